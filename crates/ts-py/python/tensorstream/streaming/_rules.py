# SPDX-License-Identifier: MIT OR Apache-2.0
"""Operations that need only some slices of a divided weight.

Each function gets the arguments of its operation, of which at least one is a stand-in for a divided
weight. It computes the same bits as the operation on the whole weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._division import slice_bytes
from ._streamed_tensor import StreamedTensor, name_of, rules, with_slice
from ._weights import Divided

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
    if not isinstance(weight, StreamedTensor) or len(indices) != 1:
        return NotImplemented
    return _select(weight, indices[0])


@_rule("index_select")
def _index_select(weight: Any, dim: int, index: Any) -> Any:
    if dim not in (0, -weight.ndim) or type(index) is not torch.Tensor:
        return NotImplemented
    if index.ndim > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    return _select(weight, index.reshape(-1), negative=False)


@_rule("embedding")
def _embedding(
    weight: Any, indices: Any, padding_idx: int = -1, scale: bool = False, sparse: bool = False
) -> Any:
    # The other arguments only affect the gradient of the weight.
    _require_integers(indices, "embedding")
    return _select(weight, indices, negative=False)


def _require_integers(indices: Any, operation: str) -> None:
    """Requires a dtype of indices that PyTorch accepts.

    Raises:
        RuntimeError: It is another one.
    """
    if isinstance(indices, torch.Tensor) and indices.dtype not in _INTEGERS:
        raise RuntimeError(
            "Expected tensor for argument #1 'indices' to have one of the following scalar types: "
            f"Long, Int; but got {indices.type()} instead (while checking arguments for "
            f"{operation})"
        )


def _embedding_bag(operation: Any, weight: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
    """Copies the needed rows to memory outside the budget, and runs the operation on the copy."""
    _require_integers(indices, "embedding_bag")
    if type(indices) is not torch.Tensor:
        return NotImplemented
    rows, numbers = torch.unique(indices, return_inverse=True)
    if (
        not isinstance(weight, StreamedTensor)
        or rows.numel() * slice_bytes(weight) > weight._ref.weights.budget_bytes
    ):
        return NotImplemented  # the copy of the whole weight is refused
    selected = _select(weight, rows, negative=False)
    if selected is NotImplemented:
        return NotImplemented
    bound = dict(zip(_BAG_ARGUMENTS, args, strict=False)) | kwargs
    padding = bound.get("padding_idx")
    if padding is not None and padding >= 0:
        at = (rows == padding).nonzero()
        # `embedding_bag` counts negative indices from the end, so -1 would be the last row.
        none = None if operation is aten.embedding_bag.padding_idx else -1
        bound["padding_idx"] = int(at[0]) if at.numel() else none
    output, bags, sizes, largest = operation(selected, numbers.to(indices.dtype), **bound)
    if bound.get("mode") == _BAG_MAXIMUM and largest.numel():
        # The row with each maximum, which backward needs. An empty bag has none.
        known = rows.to(largest.dtype)[largest.clamp(0)]
        largest = torch.where(sizes.unsqueeze(-1) > 0, known, largest)
    return output, bags, sizes, largest


for _operation in (
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    # In inference mode, operations arrive before they are decomposed.
    aten.embedding_bag.default,
    aten.embedding_bag.padding_idx,
):
    rules[_operation] = functools.partial(_embedding_bag, _operation)

_BAG_ARGUMENTS = (
    "offsets",
    "scale_grad_by_freq",
    "mode",
    "sparse",
    "per_sample_weights",
    "include_last_offset",
    "padding_idx",
)
#: The argument ``mode`` of ``embedding_bag`` for the maximum of each bag.
_BAG_MAXIMUM = 2
_INTEGERS = (torch.int32, torch.int64)


def _select(weight: Any, index: Any, *, negative: bool = True) -> Any:
    """Returns ``weight[index]``. ``negative`` says whether indices may count from the end."""
    count = weight.shape[0]
    usable = (
        type(index) is torch.Tensor
        and index.dtype in _INTEGERS
        and isinstance(weight, StreamedTensor)
        and _is_whole(weight)
    )
    least = -count if negative else 0
    if not usable:
        return NotImplemented
    if index.numel() and not (least <= index.min() and index.max() < count):
        raise IndexError(
            f"index out of range in `{name_of(weight)}`: it has {count} rows, got indices from "
            f"{int(index.min())} to {int(index.max())}"
        )
    flat = torch.where(index < 0, index + count, index).reshape(-1)
    result = torch.empty(
        (flat.numel(), *weight.shape[1:]), dtype=weight.dtype, device=weight.device
    )
    rows, numbers = torch.unique(flat, return_inverse=True)
    divided = weight._ref.weights.divided(weight._ref.key)
    assert divided is not None, "`_is_whole` checks it"
    # Sorted by row, so that each slice is leased once.
    order = torch.argsort(numbers, stable=True)
    ends = torch.cumsum(torch.bincount(numbers, minlength=rows.numel()), 0)
    for begin, end, read in _pieces(weight, divided, rows):
        first = int(ends[begin - 1]) if begin else 0
        positions = order[first : int(ends[end - 1])]
        own = numbers[positions] - begin

        def store(found: torch.Tensor, positions: Any = positions, own: Any = own) -> None:
            result[positions] = found.detach()[own]

        read(store)
    return result.view(*index.shape, *weight.shape[1:])


def _pieces(weight: StreamedTensor, divided: Divided, rows: torch.Tensor) -> Iterator[Any]:
    """Divides sorted rows into pieces. The rows of a piece are read together.

    Yields:
        The begin and the end of the piece in ``rows``, and a function. The function reads the rows
        of the piece, and calls its argument with them.
    """
    wanted: list[int] = rows.tolist()
    if divided.table is not None:
        # A piece is no larger than a block. It fits into memory, because a block is a unit.
        step = divided.blocks[0] if divided.blocks else 1
        streamer, table = weight._ref.weights.streamer, divided.table
        for begin in range(0, len(wanted), step):
            some = wanted[begin : begin + step]

            def gather(store: Callable[[torch.Tensor], None], some: list[int] = some) -> None:
                store(streamer.gather(table, some).to(weight.device))

            yield begin, begin + len(some), gather
        return
    begin = 0
    while begin < len(wanted):
        index = divided.slice_of(wanted[begin])
        end = begin
        while end < len(wanted) and divided.slice_of(wanted[end]) == index:
            end += 1
        own = rows[begin:end] - divided.first_row(index)

        def lease(
            store: Callable[[torch.Tensor], None], index: int = index, own: torch.Tensor = own
        ) -> None:
            if divided.blocks is None:
                with_slice(weight, index, lambda found: store(found.unsqueeze(0)))
            else:
                with_slice(weight, index, lambda found: store(found.detach()[own]))

        yield begin, end, lease
        begin = end


@_rule("linear")
def _linear(inputs: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, StreamedTensor) or not _has_blocks(weight, transposed=False):
        return NotImplemented
    if bias is not None and bias.shape != weight.shape[:1]:
        _on_meta(aten.linear.default, inputs, weight, bias)
        if bias.numel() != 1:
            return NotImplemented
        bias = bias.expand(weight.shape[0])
    return _by_block(weight, bias, lambda own, bias: aten.linear.default(inputs, own, bias))


@_rule("mm")
def _mm(inputs: Any, weight: Any) -> Any:
    if not isinstance(weight, StreamedTensor) or not _has_blocks(weight, transposed=True):
        return NotImplemented
    return _by_block(weight, None, lambda own, _: aten.mm.default(inputs, own.t()))


@_rule("addmm")
def _addmm(bias: Any, inputs: Any, weight: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    usable = isinstance(weight, StreamedTensor) and _has_blocks(weight, transposed=True)
    if not usable or bias.ndim > 1:
        return NotImplemented
    if bias.shape != weight.shape[1:]:
        _on_meta(aten.addmm.default, bias, inputs, weight)
        if bias.numel() != 1:
            return NotImplemented
        bias = bias.expand(weight.shape[1])

    def multiply(own: torch.Tensor, bias: Any) -> torch.Tensor:
        result: torch.Tensor = aten.addmm.default(bias, inputs, own.t(), beta=beta, alpha=alpha)
        return result

    return _by_block(weight, bias, multiply)


def _on_meta(operation: Any, *operands: torch.Tensor) -> None:
    """Runs an operation on the shapes of its operands alone.

    Raises:
        RuntimeError: They do not fit together.
    """
    operation(
        *(
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
            for each in operands
        )
    )


def _by_block(
    weight: StreamedTensor, bias: Any, multiply: Callable[[torch.Tensor, Any], torch.Tensor]
) -> torch.Tensor:
    """Joins the products with all blocks of rows."""
    divided = weight._ref.weights.divided(weight._ref.key)
    assert divided is not None and divided.blocks is not None, "`_has_blocks` checks it"
    bias = bias.clone() if isinstance(bias, StreamedTensor) else bias
    results: list[torch.Tensor] = []
    for index, count in enumerate(divided.blocks):
        begin = divided.first_row(index)
        part = None if bias is None else bias[begin : begin + count]

        def store(own: torch.Tensor, part: Any = part) -> None:
            results.append(multiply(own, part))

        with_slice(weight, index, store)
    return torch.cat(results, -1)


@_rule("bmm")
def _bmm(inputs: Any, weight: Any) -> Any:
    """Multiplies a batch of matrices by the slices of a weight, one slice after the other."""
    usable = (
        isinstance(weight, StreamedTensor)
        and type(inputs) is torch.Tensor
        and (inputs.ndim, weight.ndim) == (3, 3)
        and inputs.shape[0] == weight.shape[0]
        and weight.is_contiguous()
        and _is_batched(weight)
        and _has_slices(weight)
    )
    if not usable:
        return NotImplemented
    results: list[torch.Tensor] = []
    for index in range(weight.shape[0]):
        own = inputs[index : index + 1]

        def store(found: torch.Tensor, own: torch.Tensor = own) -> None:
            results.append(aten.bmm.default(own, found.unsqueeze(0)))

        with_slice(weight, index, store)
    return torch.cat(results)


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
        isinstance(weight, StreamedTensor)
        and type(inputs) is torch.Tensor
        and (inputs.ndim, weight.ndim) == (2, 3)
        and _has_slices(weight)
        and type(offs) is torch.Tensor
        and bias is None
    )
    if not usable:
        return NotImplemented

    def multiply(rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        end = torch.tensor([rows.shape[0]], dtype=torch.int32, device=rows.device)
        result: torch.Tensor = aten._grouped_mm.default(rows, own, end, None, out_dtype)
        return result

    return _by_group(inputs, weight, offs, out_dtype or inputs.dtype, multiply)


def _grouped_mm_fallback(inputs: Any, weight: Any, offs: Any) -> Any:
    """Like ``_grouped_mm``, for the operation ``grouped_mm_fallback`` of transformers."""
    plain = isinstance(weight, StreamedTensor) and type(inputs) is torch.Tensor
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
    result = torch.zeros((inputs.shape[0], weight.shape[2]), dtype=dtype, device=inputs.device)
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
    divided = weight._ref.weights.divided(weight._ref.key)
    return divided is not None and tuple(weight.shape) == divided.shape and weight.is_contiguous()


def _is_batched(weight: StreamedTensor) -> bool:
    divided = weight._ref.weights.divided(weight._ref.key)
    return divided is not None and divided.batched


def _has_slices(weight: StreamedTensor) -> bool:
    """Returns whether the first dimension of a stand-in is that of the slices."""
    divided = weight._ref.weights.divided(weight._ref.key)
    return (
        divided is not None
        and divided.blocks is None
        and weight.shape[0] == divided.shape[0]
        and weight.stride(0) == divided.strides[0]
        and int(weight.storage_offset()) < divided.strides[0]
        and weight.dtype == divided.dtype
    )


def _has_blocks(weight: StreamedTensor, *, transposed: bool) -> bool:
    """Returns whether a stand-in is a matrix that is divided into blocks, or its transpose."""
    divided = weight._ref.weights.divided(weight._ref.key)
    if divided is None or divided.blocks is None or weight.ndim != 2:
        return False
    shape, strides = tuple(weight.shape), weight.stride()
    if transposed:
        shape, strides = shape[::-1], strides[::-1]
    same = shape == divided.shape and strides == divided.strides
    return bool(same and weight.dtype == divided.dtype)
