# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs ``nn.TransformerEncoder`` on padded sequences as a CPU does.

In inference, PyTorch computes the layers on nested tensors, which leave out what is padded. The
device has no nested tensors, so the machine makes one for each layer. The results are those of a
CPU, and zeros where the input is padded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


class _NestedInput(NotImplementedError):
    """Raised where PyTorch would make a nested tensor, which the device does not have.

    Attributes:
        keep: Which elements are not padded.
    """

    def __init__(self, keep: torch.Tensor) -> None:
        super().__init__(
            "the device ts does not support nested tensors of padded input; pass "
            "enable_nested_tensor=False to nn.TransformerEncoder"
        )
        self.keep = keep


def nested_from_mask(input: torch.Tensor, keep: torch.Tensor, mask_check: bool = True) -> Any:
    """Implements ``aten::_nested_tensor_from_mask``."""
    raise _NestedInput(keep)


def is_left_aligned(input: torch.Tensor, keep: torch.Tensor) -> bool:
    """Implements ``aten::_nested_tensor_from_mask_left_aligned``. Blocks."""
    return bool((keep[:, :-1] | ~keep[:, 1:]).all().item())


def patch() -> None:
    """Changes ``nn.TransformerEncoder.forward`` for inputs on ``ts``."""
    encoder = torch.nn.TransformerEncoder
    forward = encoder.forward

    @functools.wraps(forward)
    def run(self: Any, src: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return forward(self, src, *args, **kwargs)
        except _NestedInput as nested:
            if not all(map(_is_plain, self.layers)):
                raise
            output = src
            for layer in self.layers:
                output = _run_layer(layer, output, nested.keep)
            return output if self.norm is None else self.norm(output)

    # PyTorch has no hook for this. mypy does not allow assignments to methods.
    encoder.forward = run  # type: ignore[method-assign]


def _is_plain(layer: Any) -> bool:
    """Returns whether a call of a layer does nothing but run PyTorch's ``forward``."""
    plain = torch.nn.TransformerEncoderLayer
    hooks = (layer._forward_hooks, layer._forward_pre_hooks)
    return type(layer) is plain and "forward" not in layer.__dict__ and not any(hooks)


def _run_layer(layer: Any, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    attention, norm1, norm2 = layer.self_attn, layer.norm1, layer.norm2
    weights = [
        attention.in_proj_weight, attention.in_proj_bias,
        attention.out_proj.weight, attention.out_proj.bias,
        norm1.weight, norm1.bias, norm2.weight, norm2.bias,
        layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias,
    ]  # fmt: skip
    result: torch.Tensor = torch.ops.tensorstream.nested_encoder_layer.default(
        x, keep, weights, attention.num_heads, layer.activation_relu_or_gelu == 2,
        layer.norm_first, norm1.eps,
    )  # fmt: skip
    return result
