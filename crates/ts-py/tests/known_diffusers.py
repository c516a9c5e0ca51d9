# SPDX-License-Identifier: MIT OR Apache-2.0
"""Arguments and inputs of classes of diffusers whose defaults and signatures do not suffice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from small_models import wave

TIME = torch.tensor([7.0, 7.0])
#: The arguments of each class, and its inputs.
Known = tuple[dict[str, Any], dict[str, Any]]
SANA: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 4,
    "num_attention_heads": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 4,
    "cross_attention_dim": 8,
    "caption_channels": 8,
    "sample_size": 32,
}
LUMINA: dict[str, Any] = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 24,
    "num_layers": 2,
    "num_attention_heads": 3,
    "num_kv_heads": 1,
    "ffn_dim_multiplier": None,
}
COGVIDEO: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 2,
    "text_embed_dim": 8,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 8,
    "max_text_seq_length": 8,
}
VIDEO = {
    "hidden_states": wave(2, 2, 4, 8, 8),
    "encoder_hidden_states": wave(2, 8, 8),
    "timestep": torch.tensor([7, 7]),
}
DIT: dict[str, Any] = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
MOTION: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 1,
    "block_out_channels": (32, 64),
    "cross_attention_dim": 32,
    "num_attention_heads": 2,
}


def _hunyuan_dit() -> Known:
    arguments = {
        "sample_size": 16,
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "cross_attention_dim": 8,
        "cross_attention_dim_t5": 8,
        "pooled_projection_dim": 4,
        "hidden_size": 16,
        "text_len": 4,
        "text_len_t5": 4,
        "activation_fn": "gelu-approximate",
    }
    inputs = {
        "hidden_states": wave(2, 4, 16, 16),
        "timestep": TIME,
        "encoder_hidden_states": wave(2, 4, 8),
        "text_embedding_mask": torch.ones(2, 4),
        "encoder_hidden_states_t5": wave(2, 4, 8),
        "text_embedding_mask_t5": torch.ones(2, 4),
        "image_meta_size": wave(2, 6),
        "style": torch.tensor([0, 0]),
        "image_rotary_emb": [wave(64, 8), wave(64, 8)],
    }
    return arguments, inputs


def _ltx2() -> Known:
    arguments = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "cross_attention_dim": 16,
        "audio_in_channels": 4,
        "audio_out_channels": 4,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 4,
        "audio_cross_attention_dim": 8,
        "num_layers": 2,
        "caption_channels": 16,
        "rope_double_precision": False,
    }
    inputs = {
        "hidden_states": wave(2, 32, 4),
        "audio_hidden_states": wave(2, 9, 4),
        "encoder_hidden_states": wave(2, 16, 16),
        "audio_encoder_hidden_states": wave(2, 16, 16),
        "timestep": TIME,
        "encoder_attention_mask": torch.ones(2, 16).bool(),
        "audio_encoder_attention_mask": torch.ones(2, 16).bool(),
        "num_frames": 2,
        "height": 4,
        "width": 4,
        "fps": 25.0,
        "audio_num_frames": 9,
    }
    return arguments, inputs


def _unet_1d() -> Known:
    arguments = {
        "block_out_channels": (8, 8, 16, 16),
        "in_channels": 14,
        "out_channels": 14,
        "extra_in_channels": 0,
        "time_embedding_type": "positional",
        "use_timestep_embedding": True,
        "out_block_type": "OutConv1DBlock",
        "mid_block_type": "MidResTemporalBlock1D",
        "down_block_types": ("DownResnetBlock1D",) * 4,
        "up_block_types": ("UpResnetBlock1D",) * 3,
        "act_fn": "swish",
    }
    return arguments, {"sample": wave(2, 14, 16), "timestep": torch.tensor([7, 7])}


def _hidream() -> Known:
    arguments = {
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "caption_channels": [8, 4],
        "text_emb_dim": 8,
        "num_routed_experts": 2,
        "num_activated_experts": 2,
        "axes_dims_rope": (4, 2, 2),
        "max_resolution": (32, 32),
        "llama_layers": (0, 1),
        "force_inference_output": True,
    }
    inputs = {
        "hidden_states": wave(2, 4, 32, 32),
        "timesteps": TIME,
        "encoder_hidden_states_t5": wave(2, 8, 8),
        "encoder_hidden_states_llama3": wave(2, 2, 8, 4),
        "pooled_embeds": wave(2, 8),
    }
    return arguments, inputs


def _spatio_temporal() -> Known:
    arguments = {
        **MOTION,
        "layers_per_block": 2,
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        "projection_class_embeddings_input_dim": 96,
        "addition_time_embed_dim": 32,
    }
    inputs = {
        "sample": wave(2, 2, 4, 16, 16),
        "timestep": torch.tensor([10]),
        "encoder_hidden_states": wave(2, 1, 32),
        "added_time_ids": wave(2, 3),
    }
    return arguments, inputs


def _uvit() -> Known:
    arguments = {
        "hidden_size": 32,
        "cond_embed_dim": 32,
        "micro_cond_encode_dim": 8,
        "micro_cond_embed_dim": 40,
        "encoder_hidden_size": 32,
        "vocab_size": 128,
        "codebook_size": 64,
        "in_channels": 32,
        "block_out_channels": 32,
        "num_res_blocks": 1,
        "block_num_heads": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "sample_size": 16,
    }
    inputs = {
        "input_ids": torch.arange(128).reshape(2, 8, 8) % 64,
        "encoder_hidden_states": wave(2, 4, 32),
        "pooled_text_emb": wave(2, 32),
        "micro_conds": wave(2, 5),
    }
    return arguments, inputs


def _text(*names: str, length: int = 6, width: int = 32) -> dict[str, torch.Tensor]:
    """Returns the usual inputs of a text encoder and a time, under these names."""
    return {
        "encoder_hidden_states": wave(2, length, width),
        "timestep": TIME,
        **{name: torch.ones(2, length, dtype=torch.bool) for name in names},
    }


KNOWN: dict[str, Callable[[], Known]] = {
    "AudioLDM2ProjectionModel": lambda: (
        dict.fromkeys(("text_encoder_dim", "text_encoder_1_dim", "langauge_model_dim"), 16),
        {"hidden_states": wave(2, 4, 16), "hidden_states_1": wave(2, 4, 16)},
    ),
    "AutoencoderKLHunyuanImage": lambda: (
        {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "layers_per_block": 1}
        | {"block_out_channels": (32, 64), "spatial_compression_ratio": 2, "sample_size": 32},
        {"sample": wave(2, 3, 32, 32)},
    ),
    "AutoencoderKLMagvit": lambda: (
        {
            "in_channels": 3,
            "latent_channels": 4,
            "block_out_channels": [8, 8, 8, 8],
            "layers_per_block": 1,
            "norm_num_groups": 8,
        },
        {"sample": wave(2, 3, 9, 16, 16)},
    ),
    "AutoencoderOobleck": lambda: (
        {
            "encoder_hidden_size": 12,
            "decoder_channels": 12,
            "decoder_input_channels": 6,
            "audio_channels": 2,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
        },
        {"sample": wave(2, 2, 24)},
    ),
    "CogVideoXTransformer3DModel": lambda: (COGVIDEO, VIDEO),
    "ConsisIDTransformer3DModel": lambda: (COGVIDEO, VIDEO),
    "EasyAnimateTransformer3DModel": lambda: (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "mmdit_layers": 2,
            "num_layers": 2,
            "sample_height": 16,
            "sample_width": 16,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
            "patch_size": 2,
        },
        {"hidden_states": wave(2, 4, 2, 16, 16), **_text(width=16)},
    ),
    "FluxControlNetModel": lambda: (
        {
            **DIT,
            "num_single_layers": 2,
            "in_channels": 4,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": [4, 4, 8],
        },
        {
            "hidden_states": wave(2, 16, 4),
            "controlnet_cond": wave(2, 16, 4),
            "pooled_projections": wave(2, 32),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(6, 3),
            **_text(),
        },
    ),
    "HiDreamImageTransformer2DModel": _hidream,
    "HunyuanDiT2DModel": _hunyuan_dit,
    "Kandinsky3UNet": lambda: (
        {
            "in_channels": 4,
            "time_embedding_dim": 4,
            "groups": 2,
            "attention_head_dim": 4,
            "block_out_channels": (32, 64),
            "cross_attention_dim": 4,
            "encoder_hid_dim": 32,
        },
        {"sample": wave(2, 4, 8, 8), **_text("encoder_attention_mask")},
    ),
    "LTX2VideoTransformer3DModel": _ltx2,
    "LTXVideoTransformer3DModel": lambda: (
        {**DIT, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32}
        | {"caption_channels": 32},
        {
            "hidden_states": wave(2, 32, 4),
            "num_frames": 2,
            "height": 4,
            "width": 4,
            **_text("encoder_attention_mask"),
        },
    ),
    "LatteTransformer3DModel": lambda: (
        {**DIT, "in_channels": 4, "out_channels": 8, "sample_size": 8, "patch_size": 2}
        | {"caption_channels": 32, "cross_attention_dim": 32, "norm_type": "ada_norm_single"}
        | {"norm_elementwise_affine": False, "num_embeds_ada_norm": 1000},
        {"hidden_states": wave(2, 4, 1, 8, 8), **_text(), "enable_temporal_attentions": False},
    ),
    "Lumina2Transformer2DModel": lambda: (
        {**LUMINA, "num_refiner_layers": 1, "multiple_of": 2, "axes_dim_rope": (4, 2, 2)}
        | {"axes_lens": (128, 128, 128), "cap_feat_dim": 32},
        {"hidden_states": wave(2, 4, 16, 16), **_text("encoder_attention_mask")},
    ),
    "LuminaNextDiT2DModel": lambda: (
        {**LUMINA, "multiple_of": 16, "learn_sigma": False, "cross_attention_dim": 32},
        {
            "hidden_states": wave(2, 4, 16, 16),
            "image_rotary_emb": wave(384, 384, 4),
            "cross_attention_kwargs": {},
            **_text("encoder_mask"),
        },
    ),
    "PriorTransformer": lambda: (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 4,
            "num_layers": 2,
            "embedding_dim": 8,
            "num_embeddings": 7,
            "additional_embeddings": 4,
        },
        {
            "hidden_states": wave(2, 8),
            "proj_embedding": wave(2, 8),
            **_text(length=7, width=8),
        },
    ),
    "QwenImageControlNetModel": lambda: (
        {**DIT, "in_channels": 16, "out_channels": 4, "joint_attention_dim": 32}
        | {"axes_dims_rope": (8, 4, 4)},
        {
            "hidden_states": wave(2, 16, 16),
            "controlnet_cond": wave(2, 16, 16),
            "img_shapes": [[(1, 4, 4)]] * 2,
            **_text("encoder_hidden_states_mask"),
        },
    ),
    "SD3ControlNetModel": lambda: (
        {**DIT, "in_channels": 4, "out_channels": 4, "sample_size": 16, "pos_embed_max_size": 16}
        | {"joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 32},
        {
            "hidden_states": wave(2, 4, 16, 16),
            "controlnet_cond": wave(2, 4, 16, 16),
            "pooled_projections": wave(2, 32),
            **_text(),
        },
    ),
    "SanaControlNetModel": lambda: (
        SANA,
        {
            "hidden_states": wave(2, 4, 32, 32),
            "controlnet_cond": wave(2, 4, 32, 32),
            **_text(width=8),
        },
    ),
    "SanaTransformer2DModel": lambda: (
        SANA,
        {"hidden_states": wave(2, 4, 32, 32), **_text(width=8)},
    ),
    "StableAudioDiTModel": lambda: (
        {"sample_size": 4, "in_channels": 4, "out_channels": 4, "num_layers": 2}
        | {"attention_head_dim": 4, "num_attention_heads": 2, "num_key_value_attention_heads": 2}
        | {"cross_attention_dim": 4, "time_proj_dim": 8, "global_states_input_dim": 8}
        | {"cross_attention_input_dim": 4},
        {
            "hidden_states": wave(2, 4, 7),
            "global_hidden_states": wave(2, 1, 8),
            **_text(width=4),
        },
    ),
    "StableAudioProjectionModel": lambda: (
        {"text_encoder_dim": 16, "conditioning_dim": 16, "min_value": 0, "max_value": 512},
        {
            "text_hidden_states": wave(2, 4, 16),
            "start_seconds": torch.tensor([0.0, 0.0]),
            "end_seconds": torch.tensor([5.0, 9.0]),
        },
    ),
    "T5FilmDecoder": lambda: (
        {"input_dims": 16, "targets_length": 8, "d_model": 16, "num_layers": 2, "num_heads": 2}
        | {"d_kv": 8, "d_ff": 32},
        {
            "encodings_and_masks": [(wave(2, 4, 16), torch.ones(2, 4))],
            "decoder_input_tokens": wave(2, 8, 16),
            "decoder_noise_time": torch.tensor([0.25, 0.5]),
        },
    ),
    "Transformer2DModel": lambda: (
        {**DIT, "in_channels": 32, "cross_attention_dim": 32},
        {"hidden_states": wave(2, 32, 8, 8), "encoder_hidden_states": wave(2, 6, 32)},
    ),
    "TransformerTemporalModel": lambda: (
        {**DIT, "in_channels": 32},
        {"hidden_states": wave(4, 32, 8, 8), "num_frames": 2},
    ),
    "UNet1DModel": _unet_1d,
    "UNetSpatioTemporalConditionModel": _spatio_temporal,
    "UVit2DModel": _uvit,
    "UniDiffuserTextDecoder": lambda: (
        {"prefix_length": 4, "prefix_inner_dim": 16, "vocab_size": 128, "n_embd": 16}
        | {"n_layer": 2, "n_head": 2, "prefix_hidden_dim": 16},
        {"input_ids": torch.arange(12).reshape(2, 6), "prefix_embeds": wave(2, 4, 16)},
    ),
    "WanVACETransformer3DModel": lambda: (
        {**DIT, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 32}
        | {"ffn_dim": 32, "vace_layers": [0, 1], "vace_in_channels": 8},
        {
            "hidden_states": wave(2, 4, 2, 16, 16),
            "control_hidden_states": wave(2, 8, 2, 16, 16),
            **_text(),
        },
    ),
    "ZImageTransformer2DModel": lambda: (
        {"in_channels": 16, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2}
        | {"n_kv_heads": 2, "cap_feat_dim": 16, "axes_dims": [8, 4, 4], "axes_lens": [256, 32, 32]},
        {
            "x": [wave(16, 1, 16, 16)] * 2,
            "t": torch.tensor([0.5, 0.5]),
            "cap_feats": [wave(8, 16)] * 2,
        },
    ),
}
