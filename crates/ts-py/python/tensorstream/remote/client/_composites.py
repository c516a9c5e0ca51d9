# SPDX-License-Identifier: MIT OR Apache-2.0
"""Composite operators that PyTorch decomposes differently on a CPU than on other devices.

On CPU machines, they are decomposed as on a CPU, so that the results are bit-identical.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import _registry
from ._recurrent import RECURRENT

aten = torch.ops.aten

#: The value of ``SDPBackend.FLASH_ATTENTION``, the fused kernel of a CPU.
_FLASH = 1


def _on_cpu(tensor: torch.Tensor) -> bool:
    return _registry.runs_on_cpu(tensor.device.index)


def _attention_choices() -> tuple[Any, ...]:
    """Returns the settings of the process that decide which attention kernel is used."""
    native: Any = torch._C
    return (
        native._get_flash_sdp_enabled(),
        native._get_mem_efficient_sdp_enabled(),
        native._get_math_sdp_enabled(),
        native._get_cudnn_sdp_enabled(),
        tuple(native._get_sdp_priority_order()),
        native._get_deterministic_algorithms(),
        torch.is_inference_mode_enabled(),
    )


@functools.lru_cache(maxsize=1024)
def _sdp_backend(
    choices: tuple[Any, ...],
    layouts: tuple[Any, ...],
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> int:
    """Returns the attention kernel that PyTorch chooses for CPU tensors of these layouts.

    ``choices`` are those of ``_attention_choices``, on which the result depends too.
    """

    def like(layout: Any) -> torch.Tensor | None:
        if layout is None:
            return None
        shape, stride, dtype, grad = layout
        return torch.empty_strided(shape, stride, dtype=dtype).requires_grad_(grad)

    query, key, value, mask = map(like, layouts)
    assert query is not None and key is not None and value is not None
    return torch._fused_sdp_choice(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Implements scaled dot product attention.

    On a CPU machine, uses the kernel that PyTorch would choose on a CPU. The choice does not depend
    on values. On a GPU machine, uses the decomposition, which every GPU supports.
    """
    decompose = functools.partial(
        aten.scaled_dot_product_attention.default.decompose, scale=scale, enable_gqa=enable_gqa
    )
    if not _on_cpu(query):
        return decompose(query, key, value, attn_mask, dropout_p, is_causal)
    layouts = tuple(
        None
        if t is None
        else (tuple(t.shape), t.stride(), t.dtype, t.requires_grad and torch.is_grad_enabled())
        for t in (query, key, value, attn_mask)
    )
    choices = _attention_choices()
    if _sdp_backend(choices, layouts, dropout_p, is_causal, scale, enable_gqa) != _FLASH:
        return decompose(query, key, value, attn_mask, dropout_p, is_causal)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            attn_mask.logical_not(), -torch.inf
        )
    batched = query.dim() == 3
    if batched:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        while attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask.unsqueeze(0)
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    output = flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output.squeeze(0) if batched else output


def _dropout_by(multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns the decomposition of dropout on a CPU (aten/src/ATen/native/Dropout.cpp).

    Other devices have one fused kernel, which rounds differently.
    """

    def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if not 0 <= p <= 1:
            raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
        if p == 0 or not train or not input.numel():
            return input
        if p == 1:
            return multiply(input, torch.zeros((), dtype=input.dtype, device=input.device))
        return multiply(input, aten.div_(aten.bernoulli_(aten.empty_like(input), 1 - p), 1 - p))

    return dropout


def _on_cpu_only(op: torch._ops.OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls ``run`` on CPU machines, and decomposes ``op`` on others."""

    @functools.wraps(run)
    def call(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (
            run(input, *args, **kwargs) if _on_cpu(input) else op.decompose(input, *args, **kwargs)
        )

    return call


def _overload(name: str) -> torch._ops.OpOverload:
    base, _, overload = name.partition(".")
    op: torch._ops.OpOverload = getattr(getattr(aten, base), overload or "default")
    return op


#: The implementations of composite operators. Autograd records the operators that they call.
COMPOSITES = {
    "scaled_dot_product_attention": _attention,
    **{
        name: _on_cpu_only(_overload(name), run)
        for name, run in {
            "dropout": _dropout_by(aten.mul),
            "dropout_": _dropout_by(aten.mul_),
            **RECURRENT,
        }.items()
    },
}
