# SPDX-License-Identifier: MIT OR Apache-2.0
"""Operators of PyTorch's that take indices and do not look whether they are within bounds.

PyTorch itself is who calls them, with indices that it made; a client may call them with any. A
server looks first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def _within(what: str, indices: Tensor | None, count: int) -> None:
    if indices is None or not indices.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < 0 or high >= count:
        raise IndexError(f"{what} from {low} to {high}, where 0 to {count - 1} are")


def _pool(dims: int, at: int) -> Callable[..., None]:
    """Of the backward of a pooling layer: indices into the last dimensions of its input."""

    def check(grad: Tensor, self: Tensor, *rest: Any, **named: Any) -> None:
        indices = named["indices"] if "indices" in named else rest[at]
        _within("indices", indices, math.prod(self.shape[-dims:]))

    return check


def _embedding_bag(
    grad: Tensor, indices: Tensor, offset2bag: Tensor, bag_size: Tensor, maximum_indices: Tensor,
    num_weights: int,
    *_: Any, **__: Any,
) -> None:  # fmt: skip
    _within("indices", indices, num_weights)
    _within("bags", offset2bag, grad.shape[0])
    _within(
        "maximum indices",
        maximum_indices.clamp(min=0) if maximum_indices is not None else None,
        num_weights,
    )
    if bag_size.numel() not in (0, grad.shape[0]) or offset2bag.numel() not in (0, indices.numel()):
        raise IndexError(f"{bag_size.numel()} sizes of {grad.shape[0]} bags")


def _per_sample(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    _within("indices", indices, weight.shape[0])
    _within("bags", offset2bag, grad.shape[0])
    if offset2bag.numel() not in (0, indices.numel()):
        raise IndexError(f"{offset2bag.numel()} bags of {indices.numel()} indices")


def _segments(data: Tensor, lengths: Tensor | None, offsets: Tensor | None, axis: int) -> None:
    size = data.shape[axis]
    _within("offsets", offsets, size + 1)
    if lengths is not None and lengths.numel():
        _within("lengths", lengths, size + 1)
        _within("lengths in all", lengths.sum(-1), size + 1)


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
            f"a gradient of shape {tuple(grad.shape)} of what has {tuple(output.shape)}"
        )


#: By operator, without its overload: called with its arguments before it is.
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

#: Operators that are of use to sparse tensors alone, which no machine has, and that do not look
#: either.
SPARSE = frozenset({"_convert_indices_from_csr_to_coo", "_convert_indices_from_coo_to_csr"})
