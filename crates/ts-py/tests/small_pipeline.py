# SPDX-License-Identifier: MIT OR Apache-2.0
"""A small pipeline of diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

WORDS = ["a", "cat", "dog", "on", "the", "moon"]


def save_pipeline(path: Path) -> Path:
    """Writes a small pipeline: a text encoder, a U-Net and an autoencoder with random weights.

    Returns:
        Its directory, below ``path``.
    """
    torch.manual_seed(0)
    tokens = ["<|startoftext|>", "<|endoftext|>", *(f"{word}</w>" for word in WORDS)]
    letters = sorted({letter for word in WORDS for letter in word})
    tokens += [*letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    (path / "vocab.json").write_text(json.dumps(vocabulary))
    (path / "merges.txt").write_text("#version: 0.2\n")
    config = transformers.CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
    )
    diffusers.StableDiffusionPipeline(
        text_encoder=transformers.CLIPTextModel(config),
        tokenizer=transformers.CLIPTokenizer(
            str(path / "vocab.json"), str(path / "merges.txt"), model_max_length=16
        ),
        unet=diffusers.UNet2DConditionModel(
            block_out_channels=(32, 64),
            layers_per_block=1,
            sample_size=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=64,
            attention_head_dim=8,
        ),
        vae=diffusers.AutoencoderKL(
            block_out_channels=(32, 64),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            sample_size=16,
        ),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(path / "saved")
    return path / "saved"


def image(pipe: Any) -> Any:
    """Returns the images that a small pipeline makes."""
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        "a cat on the moon",
        num_inference_steps=2,
        height=16,
        width=16,
        output_type="pt",
        generator=torch.Generator().manual_seed(1),
    ).images
