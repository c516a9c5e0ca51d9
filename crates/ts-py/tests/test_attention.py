# SPDX-License-Identifier: MIT OR Apache-2.0
"""PyTorch's attention modules, whose fast paths need all weights of a layer at once.

Each module is tested at the smallest budget, at three times that budget, and in memory.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
from test_random_models import smallest_of
from torch import nn
from torch.utils._pytree import tree_leaves

DIM = 64
Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def attention(batch_first: bool, need_weights: bool, masked: bool, average: bool) -> Case:
    x = torch.randn(3, 10, DIM) if batch_first else torch.randn(10, 3, DIM)
    more: dict[str, Any] = {"need_weights": need_weights, "average_attn_weights": average}
    if masked:
        more["attn_mask"] = torch.ones(10, 10).tril().logical_not()
        more["key_padding_mask"] = torch.arange(10).expand(3, 10) > torch.tensor([[9], [6], [7]])
    return nn.MultiheadAttention(DIM, 4, batch_first=batch_first), (x, x, x), more


def cross_attention(batch_first: bool, need_weights: bool, masked: bool, average: bool) -> Case:
    module, (x, *_), more = attention(batch_first, need_weights, masked, average)
    return module, (x + 1, x, x), more


def encoder_layer(batch_first: bool, norm_first: bool, masked: bool, gelu: bool) -> Case:
    activation = "gelu" if gelu else "relu"
    layer = nn.TransformerEncoderLayer(
        DIM, 4, 2 * DIM, batch_first=batch_first, norm_first=norm_first, activation=activation
    )
    x = torch.randn(3, 10, DIM) if batch_first else torch.randn(10, 3, DIM)
    padding = torch.arange(10).expand(3, 10) > torch.tensor([[9], [6], [7]])
    return layer, (x,), {"src_key_padding_mask": padding} if masked else {}


def encoder(batch_first: bool, norm_first: bool, masked: bool, gelu: bool) -> Case:
    layer, inputs, more = encoder_layer(batch_first, norm_first, masked, gelu)
    # The stub requires the class of the layer, but `Case` types it as a module.
    return nn.TransformerEncoder(layer, 4), inputs, more  # type: ignore[arg-type]


def decoder(batch_first: bool, norm_first: bool, masked: bool, gelu: bool) -> Case:
    activation = "gelu" if gelu else "relu"
    layer = nn.TransformerDecoderLayer(
        DIM, 4, 2 * DIM, batch_first=batch_first, norm_first=norm_first, activation=activation
    )
    sizes = ((2, 7, DIM), (2, 5, DIM)) if batch_first else ((7, 2, DIM), (5, 2, DIM))
    more = {"tgt_mask": torch.ones(7, 7).tril().logical_not()} if masked else {}
    return nn.TransformerDecoder(layer, 2), tuple(torch.randn(size) for size in sizes), more


def transformer(batch_first: bool, norm_first: bool, masked: bool, gelu: bool) -> Case:
    activation = "gelu" if gelu else "relu"
    module = nn.Transformer(
        DIM, 4, 2, 2, 2 * DIM, activation=activation, batch_first=batch_first, norm_first=norm_first
    )
    sizes = ((2, 7, DIM), (2, 5, DIM)) if batch_first else ((7, 2, DIM), (5, 2, DIM))
    more = {"tgt_mask": torch.ones(5, 5).tril().logical_not()} if masked else {}
    return module, tuple(torch.randn(size) for size in sizes), more


@pytest.mark.product
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make", [attention, cross_attention, encoder_layer, encoder, decoder, transformer]
)
@pytest.mark.parametrize("flags", [*itertools.product((True, False), repeat=4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_is_bit_identical_on_every_path(
    make: Callable[..., Case], flags: tuple[bool, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, inputs, more = make(*flags)
    model, inputs = model.eval().to(dtype), tuple(each.to(dtype) for each in inputs)
    ts.offload(copy.deepcopy(model), ts.Config(storage_path=tmp_path, budget="1GiB"))
    smallest = smallest_of(model, tmp_path)
    for budget in (smallest, 3 * smallest, 1 << 30):
        streamed = ts.offload(copy.deepcopy(model), ts.Config(storage_path=tmp_path, budget=budget))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                expected = tree_leaves(model(*inputs, **more))
                for _ in range(2):
                    got = tree_leaves(streamed(*inputs, **more))
                    for a, b in zip(expected, got, strict=True):
                        assert a is b is None or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
