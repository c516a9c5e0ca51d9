# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reads or computes the tensors of a model that is still being built, one at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from .. import _native
from .._dtypes import TORCH_DTYPES
from ..errors import ModelError
from ..files._capsules import as_capsule
from ._symbolic import VIEWS
from ._symbolic_tensor import Derived, Source, SymbolicTensor, in_memory, view_of

aten = torch.ops.aten

#: The most bytes that are read and cast at a time. Small budgets use less.
PIECE_BYTES = 4 << 20


class Builder:
    """Creates symbolic tensors for the tensors of a checkpoint.

    Operations on symbolic tensors are recorded. If an operation cannot be recorded, its operands
    are read.

    Args:
        checkpoint: The checkpoint.
        budget_bytes: The budget. A smaller budget leads to smaller pieces.
    """

    def __init__(
        self, checkpoint: _native.Checkpoint, budget_bytes: int = 16 * PIECE_BYTES
    ) -> None:
        self.checkpoint = checkpoint
        self._budget_bytes = budget_bytes

    def symbolic(self, name: str) -> SymbolicTensor:
        """Returns a symbolic tensor for the tensor with this name.

        Raises:
            MissingTensorError: The checkpoint has no such tensor.
            ModelError: torch does not support the dtype or the shape.
        """
        dtype, shape, parts = self.checkpoint.entry(name)
        torch_dtype = TORCH_DTYPES.get(dtype)
        if torch_dtype is None:
            raise ModelError(f"tensor `{name}` has dtype {dtype}, which torch does not support")
        return SymbolicTensor(shape, torch_dtype, Source(name, tuple(parts)), self)

    def materialize(self, tensor: SymbolicTensor) -> torch.Tensor:
        """Returns the real tensor, in newly allocated memory."""
        source = tensor.source
        if isinstance(source, Source):
            return self._read(source.parts).view(tensor.dtype).view(tensor.shape)
        args, kwargs = tree_map_only(SymbolicTensor, self.materialize, (source.args, source.kwargs))
        result: Any = source.func(*args, **kwargs)
        chosen: torch.Tensor = result if source.index is None else result[source.index]
        # A symbolic tensor has no conjugate or negative bit, so the result must not have one.
        return chosen.resolve_conj().resolve_neg()

    def pieces(self, tensor: SymbolicTensor) -> Iterator[torch.Tensor]:
        """Yields the elements of a tensor in order, as flat tensors.

        The yielded tensors are small, unless an operation needs all elements at once.
        """
        source = tensor.source
        if isinstance(source, Source):
            # A cast can make a piece eight times as large, so a piece is at most a sixteenth of the
            # budget, but at least 4096 bytes. The step is a multiple of 4096, so that no element is
            # split.
            step = min(PIECE_BYTES, max(4096, self._budget_bytes // 16 // 4096 * 4096))
            for file, offset, length in source.parts:
                for begin in range(0, length, step):
                    run = (file, offset + begin, min(step, length - begin))
                    yield self._read((run,)).view(tensor.dtype)
        elif source.func is in_memory:
            yield source.args[0].contiguous().view(-1)
        elif _casts(source):
            cast = functools.partial(torch.Tensor.to, dtype=tensor.dtype)
            yield from map(cast, self.pieces(source.args[0]))
        elif _joins_first_dimension(tensor):
            for part in source.args[0]:
                yield from self.pieces(part)
        else:
            yield self.materialize(tensor).contiguous().view(-1)

    def needed_bytes(self, tensor: SymbolicTensor) -> int:
        """Estimates the peak memory of ``pieces`` in bytes, excluding small pieces.

        Casts and joins along the first dimension are computed piece by piece. Any other computed
        tensor counts as a whole, together with its operands.
        """
        source = tensor.source
        if isinstance(source, Source) or source.func is in_memory:
            return 0
        inputs = [
            leaf
            for leaf in tree_flatten((source.args, source.kwargs))[0]
            if isinstance(leaf, SymbolicTensor)
        ]
        if _casts(source) or _joins_first_dimension(tensor):
            return max((self.needed_bytes(each) for each in inputs), default=0)
        return _peak_bytes(tensor)

    def _read(self, parts: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
        buffer = torch.empty(sum(length for _, _, length in parts), dtype=torch.uint8, device="cpu")
        self.checkpoint.read_into(list(parts), as_capsule(buffer))
        return buffer


def _peak_bytes(tensor: SymbolicTensor) -> int:
    """Estimates the peak memory of ``materialize`` in bytes. Views take no memory of their own."""
    source = tensor.source
    if isinstance(source, Source) or source.func is in_memory:
        return tensor.nbytes
    inputs = [
        leaf
        for leaf in tree_flatten((source.args, source.kwargs))[0]
        if isinstance(leaf, SymbolicTensor)
    ]
    own = 0 if source.func in VIEWS or source.func is view_of else tensor.nbytes
    return own + sum(map(_peak_bytes, inputs))


def _casts(source: Derived) -> bool:
    return source.func is aten._to_copy.default and source.args[0].is_contiguous()


def _joins_first_dimension(tensor: SymbolicTensor) -> bool:
    source: Any = tensor.source
    if source.func not in (aten.cat.default, aten.stack.default):
        return False
    tensors, dim = source.args[0], source.args[1] if len(source.args) > 1 else 0
    plain = (
        isinstance(t, SymbolicTensor) and t.is_contiguous() and t.dtype == tensor.dtype
        for t in tensors
    )
    return dim == 0 and all(plain)
