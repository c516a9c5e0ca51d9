# SPDX-License-Identifier: MIT OR Apache-2.0
"""Records operations on symbolic tensors instead of running them.

If a result consists of a few long ranges of the files, it is a ``Source`` with these ranges. Most
slices, stacks and concatenations have such results. Other results, such as those of casts and
transpositions, are a ``Derived``, which records the current state of the operands and is computed
later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import ModelError
from ._symbolic_tensor import (
    Derived,
    Source,
    SymbolicTensor,
    in_memory,
    view_of,
    written_through,
)

aten = torch.ops.aten

Part = tuple[int, int, int]

#: Joining tensors along a later dimension than the first interleaves their ranges. If a range is
#: shorter than this, the result is computed and written to a file, because many small reads are
#: slow.
SHORTEST_RANGE_BYTES = 4096

#: Operations that return views, whose offset and strides are known.
VIEWS = {
    aten.alias.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._reshape_alias.default,
    aten._unsafe_view.default,
}


#: Operations whose results depend on the shape of their operand but not on its values.
FACTORIES = {
    aten.empty_like.default,
    aten.full_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.zeros_like.default,
}


def _create(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a factory. The result is a real tensor, because the checkpoint does not contain it."""

    def shaped(leaf: Any) -> Any:
        if isinstance(leaf, SymbolicTensor):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
        return leaf

    return func(*tree_map(shaped, args), **tree_map(shaped, kwargs))


def record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the results of an operation, or ``None`` if the operation has to run.

    The results are symbolic tensors, except those of factories.
    """
    symbolic = [
        leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, SymbolicTensor)
    ]
    written = _written(func, args, kwargs)
    if any(isinstance(tensor, SymbolicTensor) for tensor in written):
        return _write(func, args, kwargs, written)
    if written:
        return None  # writes to a real tensor
    name = symbolic[0].source.name
    device = torch.device(kwargs.get("device") or "cpu")
    if device.type != "cpu":
        raise ModelError(
            f"cannot run {func} on tensor `{name}` while loading: the result must be on the CPU, "
            f"got device {device}"
        )
    if func in FACTORIES:
        return _create(func, args, kwargs)
    if func is aten.as_strided.default:
        raise ModelError(
            f"cannot run {func} on tensor `{name}` while loading: operations that depend on the "
            "layout of memory are not supported"
        )
    outcome = _run_on_meta(func, args, kwargs)
    if isinstance(outcome, torch.Tensor):
        return _describe(func, args, kwargs, symbolic, outcome, None)
    if isinstance(outcome, list | tuple) and all(
        isinstance(each, torch.Tensor) for each in outcome
    ):
        return [_describe(func, args, kwargs, symbolic, each, i) for i, each in enumerate(outcome)]
    return None


def _run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the meta device. Returns ``None`` if it needs values."""
    try:
        return func(*_on_meta(args), **_on_meta(kwargs))
    except (NotImplementedError, RuntimeError):  # the result depends on values
        return None


def _describe(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    symbolic: Sequence[SymbolicTensor],
    outcome: torch.Tensor,
    index: int | None,
) -> SymbolicTensor:
    """Returns a result of an operation as a symbolic tensor.

    ``outcome`` is the result on the meta device.
    """
    first = symbolic[0]
    if func in (aten.detach.default, aten.alias.default):
        return first.alias()
    is_view = func in VIEWS
    source: Source | Derived | None = None
    if outcome.is_contiguous():
        source = _find_bytes(func, args, symbolic, outcome, is_view)
    if source is None:
        begin = _first_byte(outcome) if is_view else 0
        phase = ((first.source.phase or 0) + begin) % 64 if is_view else 0
        source = Derived(first.source.name, func, _snapshot(args), _snapshot(kwargs), index, phase)
    if not is_view:
        return SymbolicTensor(
            outcome.shape, outcome.dtype, source, first.provider, outcome.stride()
        )
    steps = (*first.steps, (func, args[1:], kwargs, index))
    return SymbolicTensor(
        outcome.shape,
        outcome.dtype,
        source,
        first.provider,
        outcome.stride(),
        first.symbolic_storage,
        steps,
    )


def _find_bytes(
    func: Any,
    args: tuple[Any, ...],
    symbolic: Sequence[SymbolicTensor],
    outcome: torch.Tensor,
    is_view: bool,
) -> Source | None:
    """Returns the source of a contiguous result, or ``None`` if it has to be computed."""
    if not all(
        isinstance(t.source, Source) and t.is_contiguous() and t.dtype == outcome.dtype
        for t in symbolic
    ):
        return None
    first: Any = symbolic[0].source
    if func in (aten.cat.default, aten.stack.default):
        dim = (args[1] if len(args) > 1 else 0) % outcome.dim()
        parts = _interleaved(symbolic, args[0], outcome, dim)
        return None if parts is None else Source(first.name, parts, 0)
    if len(symbolic) != 1:
        return None
    if func in (aten.clone.default, aten._to_copy.default):
        return Source(first.name, first.parts, 0)
    if is_view:
        begin = _first_byte(outcome)
        parts = _subrange(first.parts, begin, outcome.numel() * outcome.element_size())
        return Source(
            first.name, parts, None if first.phase is None else (first.phase + begin) % 64
        )
    return None


def _interleaved(
    symbolic: Sequence[SymbolicTensor], tensors: Sequence[object], outcome: torch.Tensor, dim: int
) -> tuple[Part, ...] | None:
    """Joins tensors along ``dim``. Returns ranges of the files, from each tensor in turn.

    Returns ``None`` if a tensor is real, or the ranges are too short.
    """
    if len(symbolic) != len(tensors):
        return None
    outer = math.prod(outcome.shape[:dim])
    lengths = [tensor.numel() * tensor.element_size() // max(outer, 1) for tensor in symbolic]
    if outer > 1 and min(lengths, default=0) < SHORTEST_RANGE_BYTES:
        return None
    parts: list[Part] = []
    for i in range(outer):
        for tensor, length in zip(symbolic, lengths, strict=True):
            source: Any = tensor.source
            parts.extend(_subrange(source.parts, i * length, length))
    return tuple(parts)


def _subrange(parts: Sequence[Part], begin: int, length: int) -> tuple[Part, ...]:
    """Returns the ranges of ``length`` bytes of ``parts``, from byte ``begin`` on."""
    found: list[Part] = []
    for file, offset, size in parts:
        if begin < size and length > 0:
            taken = min(size - begin, length)
            found.append((file, offset + begin, taken))
            length -= taken
            begin = 0
        else:
            begin -= min(size, begin)
    return tuple(found) or tuple(parts[:1] and [(parts[0][0], parts[0][1], 0)])


def _first_byte(outcome: torch.Tensor) -> int:
    return int(outcome.storage_offset()) * outcome.element_size()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the tensors that an operation writes to."""
    formals = [formal for formal in enumerate(func._schema.arguments) if formal[1].is_write]
    return tree_flatten(
        [args[i] if i < len(args) else kwargs.get(formal.name) for i, formal in formals]
    )[0]


def _write(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Any]
) -> SymbolicTensor:
    """Records a write to a symbolic tensor as the new source of its storage."""
    tensor = args[0] if args else None
    if len(written) != 1 or written[0] is not tensor or not isinstance(tensor, SymbolicTensor):
        raise ModelError(
            f"cannot run {func} while loading: an operation may write to only one tensor of the "
            "checkpoint, which must be its first argument"
        )
    outcome = func(*_on_meta(args), **_on_meta(kwargs))
    if (outcome.shape, outcome.stride(), outcome.dtype) != (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    ):
        raise ModelError(
            f"cannot run {func} while loading: it changes the shape, strides or dtype of tensor "
            f"`{tensor.source.name}`"
        )
    storage, source = tensor.symbolic_storage, tensor.symbolic_storage.source
    if func is aten.copy_.default and not tensor.steps and tensor.is_contiguous():
        storage.write(_copied(args[1], tensor).source)
        return tensor
    if torch.Tag.nondeterministic_seeded in func.tags:
        # A later run of the same operation would give other numbers.
        real = SymbolicTensor(
            storage.shape, storage.dtype, source, tensor.provider, storage.strides
        ).materialize()
        func(view_of(real, tensor.steps), *args[1:], **kwargs)
        storage.write(Derived(source.name, in_memory, (real,), {}, None, _phase(source)))
        return tensor
    phase = _phase(source)
    if tensor.steps:
        whole = SymbolicTensor(
            storage.shape, storage.dtype, source, tensor.provider, storage.strides
        )
        rest = _snapshot(args[1:]), _snapshot(kwargs)
        storage.write(
            Derived(
                source.name, written_through, (whole, tensor.steps, func, *rest), {}, None, phase
            )
        )
    else:
        storage.write(Derived(source.name, func, _snapshot(args), _snapshot(kwargs), None, phase))
    return tensor


def _copied(value: Any, target: SymbolicTensor) -> SymbolicTensor:
    """Returns the contiguous tensor that ``target`` is after ``value`` was copied to all of it."""
    if not isinstance(value, SymbolicTensor):
        source = Derived(target.source.name, in_memory, (value.detach().clone(),), {}, None, 0)
        value = SymbolicTensor(value.shape, value.dtype, source, target.provider)
    copied: Any = value
    if copied.shape != target.shape:
        copied = record(aten.expand.default, (copied, list(target.shape)), {})
    if copied.dtype != target.dtype:
        copied = record(aten._to_copy.default, (copied,), {"dtype": target.dtype})
    if not copied.is_contiguous():
        how = {"memory_format": torch.contiguous_format}
        copied = record(aten.clone.default, (copied,), how)
    return copied  # type: ignore[no-any-return]


def _phase(source: Source | Derived) -> int:
    """Returns the address modulo 64 that a written tensor has in transformers' own loader."""
    if source.phase is None and isinstance(source, Source) and source.parts:
        return source.parts[0][1] % 64
    return source.phase or 0


def _snapshot(arguments: Any) -> Any:
    """Returns a copy of arguments. Later writes to the tensors do not change the copy."""

    def keep(leaf: Any) -> Any:
        if isinstance(leaf, SymbolicTensor):
            return SymbolicTensor(
                leaf.shape, leaf.dtype, leaf.source, leaf.provider, strides=leaf.stride()
            )
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(keep, arguments)


def _on_meta(arguments: Any) -> Any:
    """Returns arguments in which all tensors and devices are replaced with meta ones."""

    def bare(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    return tree_map(bare, arguments)
