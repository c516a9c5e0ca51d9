# SPDX-License-Identifier: MIT OR Apache-2.0
"""Operations on stand-ins that need no bytes.

A loader that slices, stacks and concatenates only says where bytes lie; such steps give a
``Source`` of the pieces. What changes bytes (a cast, a transposition) is written down as
``Derived``, to be computed later, of what its operands are at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import ModelError
from ._symbolic_tensor import Derived, Source, SymbolicTensor, written_through

aten = torch.ops.aten

Part = tuple[int, int, int]

#: Shorter pieces than this are not worth a read of their own: the tensor is computed and written
#: out instead.
SHORTEST_PIECE_BYTES = 4096

#: Operations whose results are looks at the same bytes, with their offset and strides.
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


#: Operations whose results have the shape of their operand and nothing of its values.
NEW = {
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


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A real tensor: what is written to it is nobody's weight yet."""

    def shaped(leaf: Any) -> Any:
        if isinstance(leaf, SymbolicTensor):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
        return leaf

    return func(*tree_map(shaped, args), **tree_map(shaped, kwargs))


def without_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result as stand-ins; ``None`` where the operation has to run."""
    streamed = [
        leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, SymbolicTensor)
    ]
    written = _written(func, args, kwargs)
    if any(isinstance(tensor, SymbolicTensor) for tensor in written):
        return _write(func, args, kwargs, written)
    if written:
        return None  # to a tensor that has bytes
    name = streamed[0].source.name
    device = torch.device(kwargs.get("device") or "cpu")
    if device.type != "cpu":
        raise ModelError(f"tensor `{name}` is wanted on {device}: only the CPU is built yet")
    if func in NEW:
        return _new(func, args, kwargs)
    if func is aten.as_strided.default:
        raise ModelError(
            f"{func} of `{name}`, a tensor that is streamed, is not built: it asks where memory "
            "lies"
        )
    outcome = _trial(func, args, kwargs)
    if isinstance(outcome, torch.Tensor):
        return _describe(func, args, kwargs, streamed, outcome, None)
    if isinstance(outcome, list | tuple) and all(
        isinstance(each, torch.Tensor) for each in outcome
    ):
        return [_describe(func, args, kwargs, streamed, each, i) for i, each in enumerate(outcome)]
    return None


def _trial(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation gives, without bytes; ``None`` where it needs them."""
    try:
        return func(*_on_meta(args), **_on_meta(kwargs))
    except (NotImplementedError, RuntimeError):  # its result depends on the values
        return None


def _describe(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    streamed: Sequence[SymbolicTensor],
    outcome: torch.Tensor,
    index: int | None,
) -> SymbolicTensor:
    """One result of an operation, whose shape is known from a trial on the meta device."""
    first = streamed[0]
    if func in (aten.detach.default, aten.alias.default):
        return first.again()
    look = func in VIEWS
    source: Source | Derived | None = None
    if outcome.is_contiguous():
        source = _placed(func, args, streamed, outcome, look)
    if source is None:
        begin = _first_byte(outcome) if look else 0
        phase = ((first.source.phase or 0) + begin) % 64 if look else 0
        source = Derived(first.source.name, func, _snapshot(args), _snapshot(kwargs), index, phase)
    if not look:
        return SymbolicTensor(
            outcome.shape, outcome.dtype, source, first.provider, outcome.stride()
        )
    steps = (*first.steps, (func, args[1:], kwargs, index))
    return SymbolicTensor(
        outcome.shape, outcome.dtype, source, first.provider, outcome.stride(), first.memory, steps
    )


def _placed(
    func: Any,
    args: tuple[Any, ...],
    streamed: Sequence[SymbolicTensor],
    outcome: torch.Tensor,
    look: bool,
) -> Source | None:
    """Where the bytes of a contiguous result lie; ``None`` where they must be computed."""
    if not all(
        isinstance(t.source, Source) and t.is_contiguous() and t.dtype == outcome.dtype
        for t in streamed
    ):
        return None
    first: Any = streamed[0].source
    if func in (aten.cat.default, aten.stack.default):
        dim = (args[1] if len(args) > 1 else 0) % outcome.dim()
        parts = _interleaved(streamed, args[0], outcome, dim)
        return None if parts is None else Source(first.name, parts, 0)
    if len(streamed) != 1:
        return None
    if func in (aten.clone.default, aten._to_copy.default):
        return Source(first.name, first.parts, 0)
    if look:
        begin = _first_byte(outcome)
        parts = _run(first.parts, begin, outcome.numel() * outcome.element_size())
        return Source(
            first.name, parts, None if first.phase is None else (first.phase + begin) % 64
        )
    return None


def _interleaved(
    streamed: Sequence[SymbolicTensor], tensors: Sequence[object], outcome: torch.Tensor, dim: int
) -> tuple[Part, ...] | None:
    """The bytes of ``tensors`` joined along ``dim``: runs of each in turn."""
    if len(streamed) != len(tensors):
        return None
    outer = math.prod(outcome.shape[:dim])
    lengths = [tensor.numel() * tensor.element_size() // max(outer, 1) for tensor in streamed]
    if outer > 1 and min(lengths, default=0) < SHORTEST_PIECE_BYTES:
        return None
    parts: list[Part] = []
    for i in range(outer):
        for tensor, length in zip(streamed, lengths, strict=True):
            source: Any = tensor.source
            parts.extend(_run(source.parts, i * length, length))
    return tuple(parts)


def _run(parts: Sequence[Part], begin: int, length: int) -> tuple[Part, ...]:
    """``length`` bytes from ``begin`` on, of bytes that lie in ``parts``."""
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
    """The tensors that an operation writes to."""
    formals = [formal for formal in enumerate(func._schema.arguments) if formal[1].is_write]
    return tree_flatten(
        [args[i] if i < len(args) else kwargs.get(formal.name) for i, formal in formals]
    )[0]


def _write(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Any]
) -> SymbolicTensor:
    """Writing to a tensor gives its memory another origin: what it was, and then the operation."""
    tensor = args[0] if args else None
    if len(written) != 1 or written[0] is not tensor or not isinstance(tensor, SymbolicTensor):
        raise ModelError(f"{func} writes to tensors that are streamed: this is not built")
    outcome = func(*_on_meta(args), **_on_meta(kwargs))
    if (outcome.shape, outcome.stride(), outcome.dtype) != (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    ):
        raise ModelError(
            f"{func} would change the shape of `{tensor.source.name}` in place: this is not built"
        )
    memory, source = tensor.memory, tensor.memory.source
    phase = _phase(source)
    if tensor.steps:
        whole = SymbolicTensor(memory.shape, memory.dtype, source, tensor.provider, memory.strides)
        rest = _snapshot(args[1:]), _snapshot(kwargs)
        memory.write(
            Derived(
                source.name, written_through, (whole, tensor.steps, func, *rest), {}, None, phase
            )
        )
    else:
        memory.write(Derived(source.name, func, _snapshot(args), _snapshot(kwargs), None, phase))
    return tensor


def _phase(source: Source | Derived) -> int:
    """The address modulo 64 at which the reference has what it writes to in place."""
    if source.phase is None and isinstance(source, Source) and source.parts:
        return source.parts[0][1] % 64
    return source.phase or 0


def _snapshot(arguments: Any) -> Any:
    """Arguments as they are now: what is written to them later is not meant."""

    def keep(leaf: Any) -> Any:
        if isinstance(leaf, SymbolicTensor):
            return SymbolicTensor(
                leaf.shape, leaf.dtype, leaf.source, leaf.provider, strides=leaf.stride()
            )
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(keep, arguments)


def _on_meta(arguments: Any) -> Any:
    """Arguments for a trial: tensors without bytes, and their device for any that is named."""

    def bare(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    return tree_map(bare, arguments)
