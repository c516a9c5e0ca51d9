# SPDX-License-Identifier: MIT OR Apache-2.0
"""Operations that need only some slices of a divided weight.

Each function gets the arguments of its operation, of which at least one is a stand-in for a divided
weight. It computes the same bits as the operation on the whole weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._streamed_tensor import StreamedTensor, rules, with_slice

aten = torch.ops.aten


def _rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            overload = getattr(aten, name, None)
            if overload is not None:
                rules[overload.default if name != "index" else overload.Tensor] = function
        return function

    return register


@_rule("index")
def _index(weight: Any, indices: Any) -> Any:
    """Returns ``weight[index]`` for one integer index of any shape."""
    if type(weight) is not StreamedTensor or len(indices) != 1:
        return NotImplemented
    return _select(weight, indices[0])


def _index_select(weight: Any, dim: int, index: Any) -> Any:
    return _select(weight, index) if dim == 0 else NotImplemented


rules[aten.index_select.default] = _index_select


def _select(weight: Any, index: Any) -> Any:
    count = weight.shape[0]
    usable = (
        type(index) is torch.Tensor
        and index.dtype in (torch.int32, torch.int64)
        and type(weight) is StreamedTensor
        and _is_whole(weight)
    )
    if not usable or (index.numel() and not (-count <= index.min() and index.max() < count)):
        return NotImplemented  # the operation itself raises the error
    flat = torch.where(index < 0, index + count, index).reshape(-1)
    result = torch.empty((flat.numel(), *weight.shape[1:]), dtype=weight.dtype)
    for chosen in torch.unique(flat).tolist():
        first, *others = (flat == chosen).nonzero().flatten().tolist()
        with_slice(weight, chosen, result[first].copy_)
        for position in others:
            result[position].copy_(result[first])
    return result.view(*index.shape, *weight.shape[1:])


@_rule("_grouped_mm")
def _grouped_mm(
    inputs: Any,
    weight: Any,
    offs: Any = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Any:
    """Multiplies groups of rows by the slices of a weight.

    ``inputs`` has shape [rows, n], ``weight`` [groups, n, m], and ``offs`` the end of each group.
    Each group is computed by the operation itself, with one slice.
    """
    usable = (
        type(weight) is StreamedTensor
        and type(inputs) is torch.Tensor
        and (inputs.ndim, weight.ndim) == (2, 3)
        and _has_slices(weight)
        and type(offs) is torch.Tensor
        and bias is None
    )
    if not usable:
        return NotImplemented

    def multiply(rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        end = torch.tensor([rows.shape[0]], dtype=torch.int32)
        result: torch.Tensor = aten._grouped_mm.default(rows, own, end, None, out_dtype)
        return result

    return _by_group(inputs, weight, offs, out_dtype or inputs.dtype, multiply)


def _grouped_mm_fallback(inputs: Any, weight: Any, offs: Any) -> Any:
    """Does the same for the operation with which transformers replaces ``_grouped_mm``."""
    plain = type(weight) is StreamedTensor and type(inputs) is torch.Tensor
    if not (plain and weight.ndim == 3 and _has_slices(weight)):
        return NotImplemented

    def multiply(rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return torch.mm(rows, own[0])

    return _by_group(inputs, weight, offs, inputs.dtype, multiply)


def _by_group(
    inputs: torch.Tensor,
    weight: StreamedTensor,
    offs: torch.Tensor,
    dtype: torch.dtype,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    result = torch.zeros((inputs.shape[0], weight.shape[2]), dtype=dtype)
    begin = 0
    for index, end in enumerate(offs.tolist()):
        if end > begin:
            rows, out = inputs[begin:end], result[begin:end]

            def store(own: torch.Tensor, rows: Any = rows, out: Any = out) -> None:
                out.copy_(multiply(rows, own.unsqueeze(0)))

            with_slice(weight, index, store)
            begin = end
    return result


def register_transformers() -> None:
    """Registers the rules for operations of transformers, if it is loaded."""
    library = getattr(torch.ops, "transformers", None)
    operation = getattr(library, "grouped_mm_fallback", None)
    if operation is not None:
        rules[operation.default] = _grouped_mm_fallback


def _is_whole(weight: StreamedTensor) -> bool:
    """Returns whether a stand-in is a divided weight itself, and not a view of it."""
    divided = weight.weights.divided(weight.key)
    return divided is not None and tuple(weight.shape) == divided.shape and weight.is_contiguous()


def _has_slices(weight: StreamedTensor) -> bool:
    """Returns whether the first dimension of a stand-in is that of the slices."""
    divided = weight.weights.divided(weight.key)
    return (
        divided is not None
        and weight.shape[0] == divided.shape[0]
        and weight.stride(0) == divided.strides[0]
        and int(weight.storage_offset()) < divided.strides[0]
        and weight.dtype == divided.dtype
    )
