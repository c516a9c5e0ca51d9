# SPDX-License-Identifier: MIT OR Apache-2.0
"""Diffusion transformers are bit-identical at the smallest budget and at three times that budget.

They keep views of their tables while their children run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tensorstream as ts
import torch
from known_diffusers import KNOWN
from test_random_models import smallest_of
from torch.utils._pytree import tree_leaves

Made = tuple[Any, dict[str, Any]]


def ltx2() -> Made:
    arguments, inputs = KNOWN["LTX2VideoTransformer3DModel"]()
    return diffusers.LTX2VideoTransformer3DModel(**arguments), inputs


def flux() -> Made:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32),
        "txt_ids": torch.randn(8, 3),
        "img_ids": torch.randn(16, 3),
        "timestep": torch.tensor([1.0]),
    }
    return model, inputs


def pixart() -> Made:
    model = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        attention_bias=True,
        norm_type="ada_norm_single",
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "timestep": torch.tensor([1.0, 1.0]),
        "added_cond_kwargs": {"aspect_ratio": None, "resolution": None},
    }
    return model, inputs


def same() -> Made:
    model = diffusers.AutoencoderSAME(
        patch_size=16,
        encoder_channels=16,
        encoder_c_mults=(2,),
        encoder_strides=(4,),
        encoder_transformer_depths=(2,),
        latent_dim=8,
        dim_heads=8,
    )
    return model, {"sample": torch.randn(1, 2, 512)}


def stable_audio3() -> Made:
    model = diffusers.StableAudio3DiTModel(
        io_channels=8,
        embed_dim=32,
        depth=3,
        num_heads=2,
        cond_token_dim=16,
        global_cond_dim=16,
        local_add_cond_dim=5,
        timestep_features_dim=16,
        num_memory_tokens=4,
    )
    inputs = {
        "hidden_states": torch.randn(1, 8, 16),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": torch.randn(1, 5, 16),
        "global_hidden_states": torch.randn(1, 16),
    }
    return model, inputs


@pytest.mark.slow
@pytest.mark.parametrize("make", [ltx2, flux, pixart, same, stable_audio3])
@pytest.mark.parametrize("times", [1, 3])
def test_diffusers_are_bit_identical_at_small_budgets(
    make: Callable[[], Made], times: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    reference = copy.deepcopy(model)
    ts.offload(copy.deepcopy(model), ts.Config(storage_path=tmp_path, budget="1GiB"))
    smallest = smallest_of(model, tmp_path)
    assert 3 * smallest < sum(parameter.nbytes for parameter in model.parameters())
    ts.offload(model, ts.Config(storage_path=tmp_path, budget=times * smallest))
    for mode in (torch.no_grad, torch.inference_mode):
        for _ in range(10):
            with mode(), torch.random.fork_rng():
                torch.manual_seed(1)
                expected = tree_leaves(reference(**inputs))
                torch.manual_seed(1)
                got = tree_leaves(model(**inputs))
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
