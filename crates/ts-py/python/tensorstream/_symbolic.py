# SPDX-License-Identifier: MIT OR Apache-2.0
"""Operations on stand-ins that need no bytes.

A loader that slices, stacks and concatenates only says where bytes lie; such steps give a :class:`Source` of the
pieces. What changes bytes (a cast, a transposition) is written down as :class:`Derived`, to be computed later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from ._placeholder import Derived, Source, StreamedTensor
from .errors import ModelError

aten = torch.ops.aten

Part = tuple[int, int, int]

#: Shorter pieces than this are not worth a read of their own: the tensor is computed and written out instead.
SHORTEST_PIECE_BYTES = 4096


def without_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result as stand-ins; ``None`` where the operation has to run."""
    streamed = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, StreamedTensor)]
    if not all(tensor.provider.symbolic for tensor in streamed):
        return _whole(func, args, kwargs)
    written = _written(func, args, kwargs)
    if written:
        return _write(func, args, kwargs, written)
    device = torch.device(kwargs.get("device") or "cpu")
    if device.type != "cpu":
        raise ModelError(f"tensor `{streamed[0].source.name}` is wanted on {device}: only the CPU is built yet")
    try:
        outcome = func(*tree_map_only(torch.Tensor, _on_meta, args), **_meta_kwargs(kwargs))
    except (NotImplementedError, RuntimeError):  # its result depends on the values
        return None
    if isinstance(outcome, torch.Tensor):
        return _describe(func, args, kwargs, streamed, outcome, None)
    if isinstance(outcome, list | tuple) and all(isinstance(each, torch.Tensor) for each in outcome):
        return [_describe(func, args, kwargs, streamed, each, i) for i, each in enumerate(outcome)]
    return None


def _whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StreamedTensor | None:
    """Of a model's own parameter: the same one again, where an operation changes nothing about it."""
    tensor = args[0] if args else None
    if not isinstance(tensor, StreamedTensor) or tensor.provider.symbolic:
        return None
    same = func in (aten.detach.default, aten.alias.default)
    if func is aten.slice.Tensor:
        dim, bounds = (args[1] if len(args) > 1 else 0), args[2:5]
        size = tensor.shape[dim]
        same = slice(*bounds).indices(size) == (0, size, 1) if bounds else True
    if not same:
        return None
    return StreamedTensor(tensor.shape, tensor.dtype, tensor.source, tensor.provider, tensor.key, tensor.stride())


def _describe(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    streamed: Sequence[StreamedTensor],
    outcome: torch.Tensor,
    index: int | None,
) -> StreamedTensor:
    """One result of an operation, whose shape is known from a trial on the meta device."""
    first = streamed[0]
    if func in (aten.detach.default, aten.alias.default):
        return StreamedTensor(first.shape, first.dtype, first.source, first.provider, strides=first.stride())
    placed = _placed(func, args, streamed, outcome) if outcome.is_contiguous() else None
    source = placed or Derived(first.source.name, func, args, kwargs, index)
    return StreamedTensor(outcome.shape, outcome.dtype, source, first.provider, strides=outcome.stride())


def _placed(
    func: Any, args: tuple[Any, ...], streamed: Sequence[StreamedTensor], outcome: torch.Tensor
) -> Source | None:
    """Where the bytes of a contiguous result lie; ``None`` where they must be computed."""
    if not all(isinstance(t.source, Source) and t.is_contiguous() and t.dtype == outcome.dtype for t in streamed):
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
    if any(returned.alias_info is not None for returned in func._schema.returns):
        # A view: a run of the bytes that it looks at.
        begin = int(outcome.storage_offset()) * outcome.element_size()
        parts = _run(first.parts, begin, outcome.numel() * outcome.element_size())
        return Source(first.name, parts, None if first.phase is None else (first.phase + begin) % 64)
    return None


def _interleaved(
    streamed: Sequence[StreamedTensor], tensors: Sequence[object], outcome: torch.Tensor, dim: int
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


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    formals = enumerate(func._schema.arguments)
    return [args[i] if i < len(args) else kwargs.get(formal.name) for i, formal in formals if formal.is_write]


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Any]) -> StreamedTensor | None:
    """Writing to a stand-in gives it another origin: what it was, and then the operation."""
    if len(written) != 1 or written[0] is not args[0] or not isinstance(args[0], StreamedTensor):
        return None
    tensor = args[0]
    before = StreamedTensor(tensor.shape, tensor.dtype, tensor.source, tensor.provider, strides=tensor.stride())
    tensor.source = Derived(tensor.source.name, func, (before, *args[1:]), kwargs)
    return tensor


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _meta_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    on_meta: dict[str, Any] = tree_map_only(torch.Tensor, _on_meta, kwargs)
    return {**on_meta, "device": torch.device("meta")} if kwargs.get("device") is not None else on_meta
