# SPDX-License-Identifier: MIT OR Apache-2.0
"""Small models of many transformers families, with random weights and inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """A model class, its configuration, and a function that creates inputs."""

    model_class: str
    config: Callable[[], Any]
    inputs: Callable[[int], Inputs]
    #: Whether to compare ``generate`` too.
    generates: bool = False


def ids(batch: int, length: int = 9, vocabulary: int = 120) -> torch.Tensor:
    return (torch.arange(batch * length).reshape(batch, length) * 7 + 3) % vocabulary


def text(batch: int) -> Inputs:
    return {"input_ids": ids(batch)}


def pair(batch: int) -> Inputs:
    return {"input_ids": ids(batch), "decoder_input_ids": ids(batch, 5)}


def image(size: int = 32) -> Callable[[int], Inputs]:
    def make(batch: int) -> Inputs:
        count = batch * 3 * size * size
        return {"pixel_values": torch.linspace(-2, 2, count).reshape(batch, 3, size, size)}

    return make


def mel(batch: int) -> Inputs:
    return {
        "input_features": torch.linspace(-1, 1, batch * 16 * 60).reshape(batch, 16, 60),
        "decoder_input_ids": ids(batch, 4),
    }


def wave(batch: int) -> Inputs:
    return {"input_values": torch.sin(torch.linspace(0, 900, batch * 4000)).reshape(batch, 4000)}


def clip(batch: int) -> Inputs:
    return {"input_ids": ids(batch), **image()(batch)}


def llava(batch: int) -> Inputs:
    tokens = ids(batch, 24)
    tokens[:, 2:18] = 121  # tokens of the image: (32 / 8)^2 patches
    return {"input_ids": tokens, **image()(batch)}


BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
LM: dict[str, Any] = {
    **BASE,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def depth() -> dict[str, Any]:
    backbone = hf.Dinov2Config(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=28,
        patch_size=7,
        out_features=["stage1", "stage2", "stage3", "stage4"],
        reshape_hidden_states=False,
    )
    return {
        "backbone_config": backbone,
        "reassemble_hidden_size": 32,
        "patch_size": 7,
        "neck_hidden_sizes": [16, 16, 32, 32],
        "fusion_hidden_size": 16,
        "head_hidden_size": 8,
        "head_in_index": -1,
        "reassemble_factors": [4, 2, 1, 0.5],
    }


def seeing(batch: int) -> torch.Tensor:
    """Returns tokens that start with four image tokens."""
    return torch.cat([torch.full((batch, 4), 121), ids(batch, 5)], dim=1)


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        lambda: hf.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=128, n_positions=64),
        text,
        generates=True,
    ),
    "bert": Family("BertForMaskedLM", lambda: hf.BertConfig(**BASE), text),
    "t5": Family(
        "T5ForConditionalGeneration",
        lambda: hf.T5Config(
            d_model=64,
            d_kv=16,
            d_ff=112,
            num_layers=2,
            num_heads=4,
            vocab_size=128,
            decoder_start_token_id=0,
        ),
        pair,
        generates=True,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        lambda: hf.MixtralConfig(**LM, num_local_experts=4, num_experts_per_tok=2),
        text,
        generates=True,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        lambda: hf.Qwen2MoeConfig(
            **LM,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=56,
        ),
        text,
        generates=True,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        lambda: hf.Qwen3MoeConfig(
            **LM, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=16
        ),
        text,
        generates=True,
    ),
    "vit": Family("ViTForImageClassification", lambda: hf.ViTConfig(**VISION), image()),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        lambda: hf.WhisperConfig(
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=112,
            decoder_ffn_dim=112,
            vocab_size=128,
            num_mel_bins=16,
            max_source_positions=30,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        mel,
        generates=True,
    ),
    # Unusual architectures.
    "wav2vec2": Family(  # weight norm: a parametrised convolution
        "Wav2Vec2ForCTC",
        lambda: hf.Wav2Vec2Config(
            hidden_size=64,
            intermediate_size=112,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=32,
            conv_dim=(32, 32, 32),
            conv_stride=(5, 4, 4),
            conv_kernel=(10, 4, 4),
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
        ),
        wave,
    ),
    "mamba": Family(  # a module that owns parameters and has children
        "MambaForCausalLM",
        lambda: hf.MambaConfig(hidden_size=64, num_hidden_layers=3, vocab_size=128, state_size=8),
        text,
        generates=True,
    ),
    "albert": Family(  # one layer that is called repeatedly
        "AlbertForMaskedLM",
        lambda: hf.AlbertConfig(**BASE, embedding_size=32, num_hidden_groups=1),
        text,
    ),
    "deepseek_v3": Family(  # latent attention, grouped routing, merged experts
        "DeepseekV3ForCausalLM",
        lambda: hf.DeepseekV3Config(
            **{**LM, "num_key_value_heads": 4},
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            first_k_dense_replace=1,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
        ),
        text,
        generates=True,
    ),
    "gpt_oss": Family(  # experts with biases, sinks
        "GptOssForCausalLM",
        lambda: hf.GptOssConfig(**LM, num_local_experts=4, num_experts_per_tok=2, head_dim=16),
        text,
        generates=True,
    ),
    "llava": Family(  # two towers, renamed on load
        "LlavaForConditionalGeneration",
        lambda: hf.LlavaConfig(
            text_config=hf.LlamaConfig(**LM),
            vision_config=hf.CLIPVisionConfig(**VISION),
            image_token_index=121,
            image_seq_length=16,
            vision_feature_layer=-2,
        ),
        llava,
    ),
    "zamba2": Family(  # Mamba blocks and an attention block that is shared
        "Zamba2ForCausalLM",
        lambda: hf.Zamba2Config(
            **{**LM, "num_key_value_heads": 4, "num_hidden_layers": 4},
            mamba_d_state=8,
            mamba_headdim=16,
            n_mamba_heads=8,
            mamba_expand=2,
            mamba_ngroups=1,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
            hybrid_layer_ids=[1, 3],
            num_mem_blocks=1,
            use_shared_attention_adapter=False,
            adapter_rank=8,
            attention_head_dim=32,
            attention_hidden_size=128,
        ),
        text,
    ),
    "jamba": Family(
        "JambaForCausalLM",
        lambda: hf.JambaConfig(
            **{**LM, "num_hidden_layers": 6},
            num_experts=4,
            num_experts_per_tok=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            use_mamba_kernels=False,
            mamba_d_state=8,
        ),
        text,
    ),
    "xlnet": Family(
        "XLNetLMHeadModel",
        lambda: hf.XLNetConfig(vocab_size=128, d_model=64, n_layer=3, n_head=4, d_inner=112),
        text,
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        lambda: hf.BartConfig(
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=112,
            decoder_ffn_dim=112,
            vocab_size=128,
            max_position_embeddings=64,
            decoder_start_token_id=2,
        ),
        pair,
        generates=True,
    ),
    "deberta_v2": Family(
        "DebertaV2ForMaskedLM",
        lambda: hf.DebertaV2Config(
            **BASE, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8
        ),
        text,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        lambda: hf.Gemma3TextConfig(**LM, head_dim=16, sliding_window=4),
        text,
        generates=True,
    ),
    "clip": Family(
        "CLIPModel",
        lambda: hf.CLIPConfig(
            text_config={**BASE, "projection_dim": 32},
            vision_config={**VISION, "projection_dim": 32},
            projection_dim=32,
        ),
        clip,
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        lambda: hf.Llama4TextConfig(
            **{**LM, "num_hidden_layers": 8},
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=1,
            intermediate_size_mlp=112,
            interleave_moe_layer_step=2,
        ),
        text,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        lambda: hf.Qwen3NextConfig(
            **LM,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=56,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        text,
    ),
    "phimoe": Family(
        "PhimoeForCausalLM",
        lambda: hf.PhimoeConfig(**LM, num_local_experts=4, num_experts_per_tok=2),
        text,
    ),
    "bloom": Family(
        "BloomForCausalLM",
        lambda: hf.BloomConfig(hidden_size=64, n_layer=3, n_head=4, vocab_size=128),
        text,
    ),
    "encodec": Family(
        "EncodecModel",
        lambda: hf.EncodecConfig(
            hidden_size=32, num_filters=4, codebook_size=32, upsampling_ratios=[4, 2]
        ),
        lambda batch: {"input_values": wave(batch)["input_values"].unsqueeze(1)},
    ),
    # These models use weights of other modules, keep views, or assign tensors while they load.
    "siglip": Family(
        "SiglipModel", lambda: hf.SiglipConfig(text_config=BASE, vision_config=VISION), clip
    ),
    "siglip_vision": Family("SiglipVisionModel", lambda: hf.SiglipVisionConfig(**VISION), image()),
    "chinese_clip": Family(
        "ChineseCLIPModel",
        lambda: hf.ChineseCLIPConfig(
            text_config={**BASE, "pad_token_id": 0}, vision_config=VISION, projection_dim=32
        ),
        clip,
    ),
    "yolos": Family(
        "YolosForObjectDetection",
        lambda: hf.YolosConfig(**{**VISION, "image_size": [32, 32]}, num_detection_tokens=5),
        image(),
    ),
    "funnel": Family(
        "FunnelModel",
        lambda: hf.FunnelConfig(
            vocab_size=128,
            d_model=64,
            n_head=4,
            d_head=16,
            d_inner=112,
            block_sizes=[1, 2],
            num_decoder_layers=1,
        ),
        text,
    ),
    "bridgetower": Family(
        "BridgeTowerModel",
        lambda: hf.BridgeTowerConfig(
            hidden_size=64,
            intermediate_size=112,
            num_attention_heads=4,
            num_hidden_layers=3,
            text_config=BASE,
            vision_config={
                "hidden_size": 64,
                "num_hidden_layers": 3,
                "patch_size": 8,
                "image_size": 32,
            },
        ),
        lambda batch: {
            **clip(batch),
            "attention_mask": torch.ones(batch, 9, dtype=torch.long),
            "pixel_mask": torch.ones(batch, 32, 32, dtype=torch.long),
        },
    ),
    "depth_anything": Family(
        "DepthAnythingForDepthEstimation", lambda: hf.DepthAnythingConfig(**depth()), image(28)
    ),
    "prompt_depth_anything": Family(
        "PromptDepthAnythingForDepthEstimation",
        lambda: hf.PromptDepthAnythingConfig(**depth()),
        image(28),
    ),
    "idefics2": Family(
        "Idefics2Model",
        lambda: hf.Idefics2Config(
            text_config={"model_type": "mistral", **LM},
            vision_config=VISION,
            perceiver_config={
                "hidden_size": 64,
                "resampler_n_latents": 4,
                "resampler_depth": 2,
                "resampler_n_heads": 4,
                "num_key_value_heads": 2,
                "resampler_head_dim": 16,
            },
            image_token_id=121,
        ),
        lambda batch: {
            "input_ids": seeing(batch),
            "pixel_values": image()(batch)["pixel_values"].unsqueeze(1),
        },
    ),
    "cohere2_vision": Family(
        "Cohere2VisionForConditionalGeneration",
        lambda: hf.Cohere2VisionConfig(
            text_config={"model_type": "cohere2", **LM},
            vision_config={"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
            downsample_factor=2,
            alignment_intermediate_size=64,
            image_token_id=121,
        ),
        lambda batch: {"input_ids": seeing(batch), **image()(batch)},
    ),
    "switch_transformers": Family(
        "SwitchTransformersForConditionalGeneration",
        lambda: hf.SwitchTransformersConfig(
            vocab_size=128,
            d_model=64,
            d_kv=16,
            d_ff=112,
            num_layers=2,
            num_sparse_encoder_layers=1,
            num_decoder_layers=2,
            num_sparse_decoder_layers=1,
            num_heads=4,
            num_experts=4,
            expert_capacity=64,
            decoder_start_token_id=0,
        ),
        pair,
    ),
    "zaya": Family(
        "ZayaForCausalLM",
        lambda: hf.ZayaConfig(**LM, num_experts=4, moe_intermediate_size=32),
        text,
    ),
    "hy_v4": Family(
        "HYV4ForCausalLM",
        lambda: hf.HYV4Config(**LM, num_experts=4, moe_intermediate_size=32),
        text,
    ),
}
