# SPDX-License-Identifier: MIT OR Apache-2.0
"""Decides which parameters are divided into slices, each of which is a unit.

The experts of a mixture are parameters whose first dimension is the expert. A token needs few of
them, so each expert is read, kept and evicted on its own.

Embeddings and large linear layers are divided into blocks of rows if the budget is smaller than the
model. A lookup reads only its rows. A product reads one block after the other.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from . import _tree as tree

#: Experts modules have an argument that contains the chosen experts of each token. These are the
#: names that it can have.
_ROUTES = ("top_k_index", "router_indices", "selected_experts")

#: Smaller slices are not worth their own units.
_LEAST_SLICE_BYTES = 16 << 10

#: transformers asks for the address of a weight before `grouped_mm` with older versions.
_DIVIDES = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) > (2, 10)

#: Ranges of compressed tensors begin at this offset. No file has such a range.
VIRTUAL_START = 1 << 63

#: A range of a file: the index of the file, the offset, and the length in bytes.
Part = tuple[int, int, int]


#: The classes of experts that multiply all experts in one batch.
_BATCHED = {"Llama4TextExperts"}
#: The number of slices with which batched products are tried.
_TRIED = 8
#: The number of rows of matrices that are tried at different addresses.
_TRIED_ROWS = 256
#: Modules that pass the weights of all modules below them to one operation.
FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
#: Embeddings and linear layers below this size are not divided.
_LEAST_DIVIDED_BYTES = 4 << 20
#: The minimum size of a block of rows in bytes. The last block can be smaller.
_BLOCK_BYTES = 1 << 20
#: The minimum number of rows in a block, except the last one. The number of rows is also a multiple
#: of ``_ROW_MULTIPLE``.
_LEAST_BLOCK_ROWS = 256
_ROW_MULTIPLE = 16
#: Other numbers of rows that are tried, if the minimum is not exact. Kernels are chosen by the size
#: of the product, and by whether the number of rows is a multiple of 256.
_BLOCK_ROWS = (256, 272, 400, 512, 528, 768, 784, 896, 1024, 1040, 1536, 1552, 2048, 2064)
#: The maximum size in bytes of a block that is larger than the minimum, if it has more rows than
#: ``_WIDE_BLOCK_ROWS``.
_LARGEST_BLOCK_BYTES = 12 << 20
_WIDE_BLOCK_ROWS = 1024
#: A matrix that is larger than this is tried with these numbers of blocks, and the last one. Where
#: kernels are chosen by the exact number of rows, the trials differ.
_WHOLE_BYTES = 16 << 20
_TRIED_BLOCKS = (4, 5)
#: The numbers of inputs with which products are tried. The first ones differ most often.
_BATCHES = (16, 130, 1, 4, 2, 3, 7, 64)
#: More of them, for dtypes whose kernels are chosen by the size of the product.
_MORE_BATCHES = (33, 5)
#: With up to this number of inputs, products are also tried with a bias.
_BIASED_BATCH = 130
#: The memory that `exact_block_rows` takes in bfloat16, in bytes, for each number of columns. The
#: process keeps it: oneDNN compiles code for each shape.
_BFLOAT16_TRIAL_BYTES = 48 << 20
#: The memory that it takes in other dtypes, in addition to the matrices.
_TRIAL_BYTES = 8 << 20


class Rows(enum.IntEnum):
    """Which parameters are divided into blocks of rows."""

    NONE = 0
    #: Those that are only embeddings.
    EMBEDDINGS = 1
    #: Also those of the largest linear layers, which are usually the head.
    HEADS = 2
    #: Also those of the other linear layers.
    ALL = 3


def block_rows(parameter: torch.Tensor) -> int:
    """Returns the minimum number of rows of each block. The last block can have fewer rows."""
    row_bytes = max(slice_bytes(parameter), 1)
    rows = max(_LEAST_BLOCK_ROWS, -(-_BLOCK_BYTES // row_bytes))
    return -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE


def block_counts(rows: int, step: int) -> list[int]:
    """Returns the number of rows of each block. A short last block is joined to its neighbor."""
    counts = [step] * (rows // step)
    rest = rows % step
    if rest >= _ROW_MULTIPLE or not counts:
        counts.append(rest)
    else:
        counts[-1] += rest
    return counts


def row_divided(
    model: nn.Module, wanted: Rows, *, exact: bool, device: torch.device
) -> dict[int, int]:
    """Returns the parameters that are divided into blocks of rows.

    These are weights that only embeddings and linear layers use, each in an operation of its own.
    With ``exact``, products with blocks of the weight must round like products with all of it. On
    an accelerator, whose libraries choose kernels by the shape, none are known to.

    Returns:
        The number of rows of each block, by ``id`` of the parameter. The last block can have fewer
        or more rows.
    """
    found: dict[int, int | None] = {}
    for weight, multiplies in _row_candidates(model, wanted):
        if not (exact and multiplies):
            found[id(weight)] = block_rows(weight)
        elif device.type == "cpu":
            found[id(weight)] = exact_block_rows(weight)
    return {key: rows for key, rows in found.items() if rows is not None}


def trial_bytes(model: nn.Module, wanted: Rows) -> int:
    """Returns the memory that `row_divided` needs to find out if products on the CPU are exact."""
    shapes = {_shape(weight) for weight, multiplies in _row_candidates(model, wanted) if multiplies}
    untried = shapes - _tried.keys()
    kept = {columns for dtype, columns, *_ in untried if dtype == torch.bfloat16}
    others = [shape for shape in untried if shape[0] != torch.bfloat16]
    freed = max((_trial_bytes(*shape) for shape in others), default=0)
    return freed + len(kept) * _BFLOAT16_TRIAL_BYTES


def _row_candidates(model: nn.Module, wanted: Rows) -> list[tuple[torch.Tensor, bool]]:
    """Returns the weights that could be divided, and whether a product uses them."""
    if wanted is Rows.NONE:
        return []
    users: dict[int, list[nn.Module]] = {}
    parameters: dict[int, torch.Tensor] = {}
    for module in tree.modules(model):
        for own in module._parameters.values():
            if own is not None:
                users.setdefault(id(own), []).append(module)
                parameters[id(own)] = own

    fused = {
        id(weight)
        for module in tree.modules(model)
        if isinstance(module, FUSED)
        for weight in tree.parameters(module)
    }

    candidates = []
    for key, modules in users.items():
        parameter = parameters[key]
        if parameter.ndim != 2 or parameter.nbytes < _LEAST_DIVIDED_BYTES or key in fused:
            continue
        embeds = [_embeds(module, parameter) for module in modules]
        multiplies = [_multiplies(module, parameter) for module in modules]
        if (
            parameter.shape[0] >= 2 * block_rows(parameter)
            and all(a or b for a, b in zip(embeds, multiplies, strict=True))
            and (all(embeds) or wanted >= Rows.HEADS)
        ):
            candidates.append((parameter, not all(embeds)))
    if wanted is Rows.HEADS:
        largest = max((weight.nbytes for weight, multiplies in candidates if multiplies), default=0)
        candidates = [own for own in candidates if not own[1] or 2 * own[0].nbytes > largest]
    return candidates


def batch_divided(model: nn.Module, wanted: Rows, *, exact: bool, device: torch.device) -> set[int]:
    """Returns the 3-D parameters that are divided although a pass uses all of them, by ``id``.

    These are the experts of models that multiply all experts in one batch. With ``exact``, products
    with one slice of the batch must round like those with all slices, as above.
    """
    return {
        id(parameter)
        for module in tree.modules(model)
        if wanted is Rows.ALL and type(module).__name__ in _BATCHED
        for parameter in module._parameters.values()
        if parameter is not None
        and parameter.ndim == 3
        and parameter.shape[0] > 1
        and parameter.nbytes >= _LEAST_DIVIDED_BYTES
        and (
            not exact
            or (device.type == "cpu" and batches_are_exact(parameter.dtype, *parameter.shape[1:]))
        )
    }


def _embeds(module: nn.Module, parameter: torch.Tensor) -> bool:
    # With `max_norm`, the forward writes to the weight.
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    return (
        isinstance(module, embeddings) and module.max_norm is None and _is_weight(module, parameter)
    )


def _multiplies(module: nn.Module, parameter: torch.Tensor) -> bool:
    return isinstance(module, nn.Linear) and _is_weight(module, parameter)


def _is_weight(module: nn.Module, parameter: torch.Tensor) -> bool:
    # An attribute could be computed: a parametrization can change buffers each time it is read.
    return parameter is module._parameters.get("weight")


#: The dtype of a matrix, its columns, its rows, and the minimum number of rows of a block. The rows
#: are 0 if they do not matter.
Shape = tuple[torch.dtype, int, int, int]

#: The results of `exact_block_rows`.
_tried: dict[Shape, int | None] = {}


def _chooses_by_size(dtype: torch.dtype) -> bool:
    """Returns whether kernels of this dtype are chosen by the number of rows of the matrix."""
    return dtype.itemsize >= 4


def _shape(weight: torch.Tensor) -> Shape:
    rows = weight.shape[0] if _chooses_by_size(weight.dtype) else 0
    return weight.dtype, weight.shape[1], rows, block_rows(weight)


def exact_block_rows(weight: torch.Tensor) -> int | None:
    """Returns a number of rows of blocks whose products equal those with all of a matrix.

    Multiplies random matrices on this processor, with the current number of threads. Returns
    ``None`` if no tried number is exact.
    """
    shape = _shape(weight)
    if shape not in _tried:
        _tried[shape] = _try_heights(*shape)
    return _tried[shape]


def _try_heights(dtype: torch.dtype, columns: int, rows: int, least: int) -> int | None:
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return None
    if not _chooses_by_size(dtype):
        totals = (2 * _LEAST_BLOCK_ROWS, 3 * _LEAST_BLOCK_ROWS + _ROW_MULTIPLE + 5)
        trial = _Trial(dtype, columns, max(totals))
        exact = all(trial.is_exact(n, _LEAST_BLOCK_ROWS, _BATCHES) for n in totals)
        return least if exact else None
    row_bytes = columns * dtype.itemsize
    heights = _heights(row_bytes, rows, least)
    trial = _Trial(dtype, columns, _most_tried_rows(rows, heights, row_bytes))
    batches = (*_BATCHES[:2], _large_batch(columns), *_BATCHES[2:], *_MORE_BATCHES)
    return next(
        (
            step
            for step in heights
            if all(trial.is_exact(n, step, batches) for n in _tried_rows(rows, step, row_bytes))
            and trial.is_exact(_tried_rows_of_threads(rows, step), step, (1,))
        ),
        None,
    )


def _large_batch(columns: int) -> int:
    """Returns a number of inputs for which kernels divide the columns too."""
    return max(257, columns // 8 + 2)


def _heights(row_bytes: int, rows: int, least: int) -> list[int]:
    """Returns the numbers of rows of blocks that are tried, in the order of preference.

    Those that divide the matrix evenly are tried too, since all their products have one shape.
    """
    most = max(_LARGEST_BLOCK_BYTES // row_bytes, _WIDE_BLOCK_ROWS)
    most = min(most, max(_BLOCK_ROWS[-1], least + _ROW_MULTIPLE), rows // 2)
    evenly = (step for step in range(_LEAST_BLOCK_ROWS, most + 1, _ROW_MULTIPLE) if not rows % step)
    heights = {step for step in (*_BLOCK_ROWS, least + _ROW_MULTIPLE, *evenly) if step <= most}
    larger = sorted(step for step in heights if step > least)
    return [least, *larger, *sorted((step for step in heights if step < least), reverse=True)]


def _tried_rows(rows: int, step: int, row_bytes: int) -> set[int]:
    """Returns with how many rows a matrix is tried."""
    if rows * row_bytes <= _WHOLE_BYTES:
        return {rows}
    return {min(rows, blocks * step + rows % step) for blocks in _TRIED_BLOCKS}


def _tried_rows_of_threads(rows: int, step: int) -> int:
    """Returns a smaller number of rows that threads divide in the same way."""
    period = _ROW_MULTIPLE * torch.get_num_threads()
    return rows - max(rows - _TRIED_BLOCKS[0] * step, 0) // period * period


def _most_tried_rows(rows: int, heights: Sequence[int], row_bytes: int) -> int:
    of_threads = (_tried_rows_of_threads(rows, step) for step in heights)
    return max(*of_threads, *(max(_tried_rows(rows, step, row_bytes)) for step in heights))


def _trial_bytes(dtype: torch.dtype, columns: int, rows: int, least: int) -> int:
    """Returns the memory that `_try_heights` takes, in bytes."""
    row_bytes = columns * dtype.itemsize
    if not _chooses_by_size(dtype):
        return _TRIAL_BYTES + 4 * _LEAST_BLOCK_ROWS * row_bytes
    tried = _most_tried_rows(rows, _heights(row_bytes, rows, least), row_bytes)
    # The product with the whole matrix, and one with a block.
    products = 3 * _large_batch(columns) * tried * dtype.itemsize // 2
    return _TRIAL_BYTES + tried * row_bytes + products


class _Trial:
    """Compares products with blocks of a random matrix with those with all of it."""

    def __init__(self, dtype: torch.dtype, columns: int, rows: int) -> None:
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(columns)
        self._weight, self._bias = self._random(rows, columns), self._random(rows)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._dtype)

    def is_exact(self, rows: int, step: int, batches: Sequence[int]) -> bool:
        """Returns whether products with blocks of ``step`` rows equal those with ``rows`` rows."""
        weight, bounds = self._weight[:rows], list(_bounds(block_counts(rows, step)))
        with torch.inference_mode():
            for batch in batches:
                inputs = self._random(batch, weight.shape[1])
                for bias in (None, self._bias[:rows]) if batch <= _BIASED_BATCH else (None,):
                    whole = nn.functional.linear(inputs, weight, bias)
                    for begin, end in bounds:
                        own_bias = None if bias is None else bias[begin:end]
                        piece = nn.functional.linear(inputs, weight[begin:end], own_bias)
                        if not torch.equal(piece, whole[:, begin:end]):
                            return False
        return True


@functools.cache
def batches_are_exact(dtype: torch.dtype, rows: int, columns: int) -> bool:
    """Returns whether ``bmm`` with one slice of a weight equals ``bmm`` with all slices.

    Multiplies random matrices on this processor, with the current number of threads.

    Args:
        dtype: The dtype of the weight.
        rows: The number of rows of a slice.
        columns: The number of columns of a slice. Wide slices are tried with fewer columns.
    """
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return False
    generator = torch.Generator().manual_seed(columns)
    with torch.inference_mode():
        shape = (_TRIED, rows, min(columns, 128))
        weight = torch.randn(shape, generator=generator).to(dtype)
        for batch in (1, 2, 3, 4, 7, 16, 64, 130):
            inputs = torch.randn((_TRIED, batch, rows), generator=generator).to(dtype)
            pieces = [torch.bmm(inputs[i : i + 1], weight[i : i + 1]) for i in range(_TRIED)]
            if not torch.equal(torch.cat(pieces), torch.bmm(inputs, weight)):
                return False
    return True


@functools.cache
def addresses_are_exact(
    dtype: torch.dtype, rows: int, columns: int, phase: int, other: int
) -> bool:
    """Returns whether products are the same with a matrix at either of two addresses.

    Multiplies random matrices on this processor, with the current number of threads. Tries only
    bfloat16: kernels of f32 depend on the address, and those of f16 can be so slow that trying them
    takes seconds.

    Args:
        dtype: The dtype of the matrix.
        rows: Its number of rows. Larger matrices are tried with fewer rows.
        columns: Its number of columns.
        phase: Its address modulo 64.
        other: The other address modulo 64.
    """
    if dtype is not torch.bfloat16 or phase % dtype.itemsize or other % dtype.itemsize:
        return False
    generator = torch.Generator().manual_seed(columns)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def placed(matrix: torch.Tensor, phase: int) -> torch.Tensor:
        room = torch.empty(matrix.numel() + 64 // dtype.itemsize, dtype=dtype)
        skip = (phase - room.data_ptr()) % 64 // dtype.itemsize
        return room[skip : skip + matrix.numel()].view_as(matrix).copy_(matrix)

    def products(matrix: torch.Tensor, batch: int) -> Iterator[torch.Tensor]:
        end = torch.tensor([batch], dtype=torch.int32)
        for own in (matrix, matrix.T):
            inputs = given[own.shape[0]][:batch]
            yield torch.mm(inputs, own)
            yield nn.functional.linear(inputs, own.T)
            yield torch.ops.aten._grouped_mm.default(inputs, own.unsqueeze(0), end)

    with torch.inference_mode():
        matrix = random(min(rows, _TRIED_ROWS), columns)
        given = {count: random(64, count) for count in matrix.shape}
        first, second = placed(matrix, phase), placed(matrix, other)
        try:
            return all(
                torch.equal(a, b)
                for batch in (1, 2, 3, 4, 16, 64)
                for a, b in zip(products(first, batch), products(second, batch), strict=True)
            )
        except RuntimeError:  # some kernels accept only certain addresses
            return False


def _bounds(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    begin = 0
    for count in counts:
        yield begin, begin + count
        begin += count


def route_argument(module: nn.Module) -> tuple[str, int] | None:
    """Returns the name and the position of the argument that selects slices of the parameters.

    Returns ``None`` if the module is not an experts module.
    """
    try:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
    except (TypeError, ValueError):  # no Python signature
        return None
    return next(((name, names.index(name)) for name in _ROUTES if name in names), None)


def is_divided(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Returns whether the slices of a parameter along its first dimension become units."""
    return (
        _DIVIDES
        and parameter.ndim == 3
        and parameter.shape[0] > 1
        and slice_bytes(parameter) >= _LEAST_SLICE_BYTES
        and route_argument(module) is not None
    )


#: Parameters of modules with fewer bytes are not units of their own.
_LEAST_SPLIT_BYTES = 64 << 10


def is_splittable(module: nn.Module) -> bool:
    """Returns whether each parameter of a module can be a unit.

    This is so for lists of parameters, and for modules that are not PyTorch's own, if they have
    several large parameters. Operations of PyTorch's modules use their parameters together.
    """
    sizes = [each.nbytes for each in module._parameters.values() if each is not None]
    if len(sizes) < 2 or sum(sizes) < 2 * _LEAST_SPLIT_BYTES or 2 * max(sizes) > sum(sizes):
        return False
    is_list = isinstance(module, nn.ParameterList | nn.ParameterDict)
    return is_list or not any(
        kind.__module__.startswith("torch.nn.modules") and "forward" in vars(kind)
        for kind in type(module).__mro__
        if kind is not nn.Module
    )


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the experts of layers whose experts are modules of a list, in order.

    These are the modules of each ``ModuleList`` or ``ModuleDict`` that is named after experts, if
    all of them have the same class.
    """
    found: list[nn.Module] = []
    for parent in tree.modules(model):
        for name, child in parent._modules.items():
            if not isinstance(child, nn.ModuleList | nn.ModuleDict):
                continue
            # A list may have None in place of experts that are elsewhere.
            own = tree.children(child)
            is_experts = "expert" in name and "shared" not in name
            if is_experts and len(own) > 1 and len({type(each) for each in own}) == 1:
                found += own
    return found


def slice_bytes(parameter: torch.Tensor) -> int:
    """Returns the size in bytes of one slice along the first dimension."""
    return parameter.nbytes // parameter.shape[0]


def slices(
    parts: Sequence[Part], phase: int | None, counts: Sequence[int]
) -> list[tuple[list[Part], int | None]]:
    """Divides the bytes of a tensor into slices with these numbers of rows.

    Returns:
        The parts and the phase of each slice, as in a ``TensorSpec``.
    """
    row = sum(part[2] for part in parts) // sum(counts)
    rest, divided = list(parts), []
    for begin, end in _bounds(counts):
        wanted, own = (end - begin) * row, []
        while wanted:
            file, offset, available = rest.pop(0)
            taken = min(available, wanted)
            own.append((file, offset, taken))
            wanted -= taken
            if taken < available:
                rest.insert(0, (file, offset + taken, available - taken))
        divided.append((own, None if phase is None else (phase + begin * row) % 64))
    return divided


def one_range(parts: Sequence[Part]) -> Part | None:
    """Returns the range of a file that these parts make up.

    Returns ``None`` if they are not adjacent, or are compressed, so that they cannot be read in
    place.
    """
    if not parts or parts[0][1] >= VIRTUAL_START:
        return None
    file, begin, length = parts[0]
    for other, offset, own in parts[1:]:
        if (other, offset) != (file, begin + length):
            return None
        length += own
    return file, begin, length


def selected(
    route: tuple[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[int, int]]:
    """Returns the number of each slice that a call selects, and how often the call selects it.

    The numbers are in ascending order. Returns an empty list if the argument is not a plain tensor
    of integers.
    """
    name, position = route
    index = kwargs.get(name, args[position] if position < len(args) else None)
    if type(index) is not torch.Tensor or index.is_floating_point():
        return []
    chosen, counts = torch.unique(index.detach().cpu(), return_counts=True)
    return list(zip(chosen.tolist(), counts.tolist(), strict=True))
