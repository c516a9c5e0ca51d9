# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks the indices of operators whose indices PyTorch does not check.

PyTorch usually calls these operators itself, with indices that it has computed. A client can call
them with any indices. Without the checks, they would access memory out of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def _check_range(name: str, indices: Tensor | None, count: int) -> None:
    """Raises ``IndexError`` unless all indices are from 0 to ``count - 1``."""
    if indices is None or not indices.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < 0 or high >= count:
        raise IndexError(
            f"{name} out of range: expected values of at least 0 and less than {count}, got {low} "
            f"to {high}"
        )


def _pool(dims: int, position: int) -> Callable[..., None]:
    """Returns the check of the backward of a pooling operator.

    Args:
        dims: The number of trailing dimensions of the pooling input that the indices address.
        position: The position of the indices, counted from the argument after the pooling input.
    """

    def check(grad: Tensor, self: Tensor, *rest: Any, **named: Any) -> None:
        indices = named["indices"] if "indices" in named else rest[position]
        _check_range("indices", indices, math.prod(self.shape[-dims:]))

    return check


def _embedding_bag(
    grad: Tensor, indices: Tensor, offset2bag: Tensor, bag_size: Tensor, maximum_indices: Tensor,
    num_weights: int,
    *_: Any, **__: Any,
) -> None:  # fmt: skip
    _check_range("indices", indices, num_weights)
    _check_range("bags", offset2bag, grad.shape[0])
    _check_range(
        "maximum indices",
        maximum_indices.clamp(min=0) if maximum_indices is not None else None,
        num_weights,
    )
    if bag_size.numel() not in (0, grad.shape[0]) or offset2bag.numel() not in (0, indices.numel()):
        raise IndexError(
            f"invalid bags: expected {grad.shape[0]} sizes and {indices.numel()} bag numbers, got "
            f"{bag_size.numel()} and {offset2bag.numel()}"
        )


def _per_sample(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    _check_range("indices", indices, weight.shape[0])
    _check_range("bags", offset2bag, grad.shape[0])
    if offset2bag.numel() not in (0, indices.numel()):
        raise IndexError(
            f"invalid bags: expected {indices.numel()} bag numbers, one for each index, got "
            f"{offset2bag.numel()}"
        )


def _segments(data: Tensor, lengths: Tensor | None, offsets: Tensor | None, axis: int) -> None:
    size = data.shape[axis]
    _check_range("offsets", offsets, size + 1)
    if lengths is not None and lengths.numel():
        _check_range("lengths", lengths, size + 1)
        _check_range("sums of lengths", lengths.sum(-1), size + 1)


def _segment_reduce(
    data: Tensor, reduce: str, *, lengths: Tensor | None = None, indices: Tensor | None = None,
    offsets: Tensor | None = None, axis: int = 0, unsafe: bool = False, initial: Any = None,
) -> None:  # fmt: skip
    _segments(data, lengths, offsets, axis)


def _segment_reduce_backward(
    grad: Tensor, output: Tensor, data: Tensor, reduce: str, *, lengths: Tensor | None = None,
    offsets: Tensor | None = None, axis: int = 0, initial: Any = None,
) -> None:  # fmt: skip
    _segments(data, lengths, offsets, axis)
    if grad.shape != output.shape:
        raise IndexError(
            f"invalid gradient: expected shape {tuple(output.shape)}, got {tuple(grad.shape)}"
        )


#: The check of each operator, by its name without the overload. It gets the operator's arguments.
CHECKS: dict[str, Callable[..., None]] = {
    "max_pool2d_with_indices_backward": _pool(2, 5),
    "max_pool3d_with_indices_backward": _pool(3, 5),
    "adaptive_max_pool2d_backward": _pool(2, 0),
    "adaptive_max_pool3d_backward": _pool(3, 0),
    "fractional_max_pool2d_backward": _pool(2, 2),
    "fractional_max_pool3d_backward": _pool(3, 2),
    "_embedding_bag_dense_backward": _embedding_bag,
    "_embedding_bag_per_sample_weights_backward": _per_sample,
    "segment_reduce": _segment_reduce,
    "_segment_reduce_backward": _segment_reduce_backward,
}

#: Operators that are refused, because they do not check indices and are only useful for sparse
#: tensors, which machines do not support.
SPARSE = frozenset({"_convert_indices_from_csr_to_coo", "_convert_indices_from_coo_to_csr"})
