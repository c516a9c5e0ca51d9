# SPDX-License-Identifier: MIT OR Apache-2.0
"""The stored tensors of the parameters of a streamed model, for copies and files of the model."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import _native
from ..config import cache_directory
from ..errors import StorageError
from ..files._capsules import as_capsule
from ._builder import Builder
from ._store import memory_order
from ._streamed_tensor import StreamedTensor, copy_of
from ._symbolic_tensor import Source, SymbolicTensor
from ._units import TensorSpec
from ._weights import Weights


class StoredWeights:
    """The stored tensors of the parameters of a streamed model.

    Args:
        checkpoint: The checkpoint.
        budget_bytes: The smallest budget. A smaller budget leads to smaller pieces.
    """

    def __init__(self, checkpoint: _native.Checkpoint, budget_bytes: int) -> None:
        #: The checkpoint.
        self.checkpoint = checkpoint
        self._builder = Builder(checkpoint, budget_bytes)
        #: The weights on each device, which refer to this object. A dictionary with weak keys would
        #: run a callback when they end, and Python ignores an interrupt that arrives in one.
        self._shares: list[weakref.ref[Weights]] = []
        #: The storages of mapped weights that still exist, by parameter.
        self._mapped: weakref.WeakValueDictionary[tuple[int, int | None], Any] = (
            weakref.WeakValueDictionary()
        )

    def add(self, weights: Weights) -> None:
        """Adds the weights on a device."""
        self._shares.append(weakref.ref(weights))

    def shares(self) -> list[Weights]:
        """Returns the weights on all devices."""
        return [weights for share in self._shares if (weights := share()) is not None]

    def reload(self, checkpoint: _native.Checkpoint) -> None:
        """Replaces the checkpoint."""
        self.checkpoint = self._builder.checkpoint = checkpoint
        self._mapped.clear()

    def has(self, stand_in: StreamedTensor) -> bool:
        """Returns whether a stand-in is one of the model's."""
        return stand_in._ref.weights.stored is self

    def is_in(self, directory: str | os.PathLike[str]) -> bool:
        """Returns whether weights stream from files in a directory."""
        return any(
            os.path.realpath(os.path.dirname(path)) == os.path.realpath(directory)
            for index, (path, _, _) in enumerate(self.checkpoint.files())
            if not self.checkpoint.is_remote(index)
        )

    def symbolic_all(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a state dict with symbolic tensors instead of stand-ins.

        Names of the same weight have the same symbolic tensor, except names of copies of it.
        """
        made: dict[tuple[int, int | None], torch.Tensor] = {}
        state_dict = dict(tensors)
        for name, tensor in tensors.items():
            if isinstance(tensor, StreamedTensor) and self.has(tensor):
                owner = _owner(tensor)
                if owner not in made:
                    made[owner] = self.symbolic(tensor)
                state_dict[name] = made[owner]
        return state_dict

    def symbolic(self, stand_in: StreamedTensor) -> torch.Tensor:
        """Returns a symbolic tensor for a weight, or a view of one if it is not contiguous."""
        name, _, shape, parts, phase = stand_in._ref.weights.sources[stand_in._ref.key]
        source = Source(name, tuple(parts), phase)
        stored = SymbolicTensor(shape, stand_in.dtype, source, self._builder)
        if stand_in.is_contiguous():
            return stored
        order = memory_order(stand_in)
        return stored.permute([order.index(dim) for dim in range(len(order))])

    def mapped(self, stand_in: StreamedTensor) -> torch.Tensor:
        """Returns a weight as a view of a file, whose pages the system can reclaim. Blocks.

        The file is that of the checkpoint, or an unnamed one to which the weight is written.
        Tensors of the same weight share memory, except those of copies of it. Writes to it do not
        reach the checkpoint.

        Raises:
            StorageError: Reading or writing failed.
            CheckpointChangedError: The file changed since it was opened.
        """
        weights, key = stand_in._ref.weights, stand_in._ref.key
        spec, owner = weights.specs[key], _owner(stand_in)
        storage = self._mapped.get(owner)
        if storage is None:
            storage = self._map(weights.sources[key]).untyped_storage()
            self._mapped[owner] = storage
        whole = torch.empty(0, dtype=spec.dtype)
        return whole.set_(storage, 0, spec.shape, spec.strides)

    def _map(self, stored: TensorSpec) -> torch.Tensor:
        """Returns the bytes of a stored tensor in a mapped file."""
        parts = stored[3]
        length = sum(part[2] for part in parts)
        if length == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            if len(parts) == 1 and self._is_plain(parts[0]):
                file, offset, _ = parts[0]
                begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
                # The path may lead to another file by now.
                descriptor = self.checkpoint.descriptor(file)
                try:
                    self.checkpoint.require_unchanged(file)
                    mapping = mmap.mmap(
                        descriptor, offset - begin + length, access=mmap.ACCESS_COPY, offset=begin
                    )
                finally:
                    os.close(descriptor)
                return torch.frombuffer(
                    mapping, dtype=torch.uint8, count=length, offset=offset - begin
                )
            directory = cache_directory() or Path(tempfile.gettempdir())
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as unnamed:
                # Reserves the space: without space, a write to the mapping would end the process.
                os.posix_fallocate(unnamed.fileno(), 0, length)
                mapping = mmap.mmap(unnamed.fileno(), length)
        except OSError as error:
            raise StorageError(f"cannot map `{stored[0]}`: {error}") from error
        target = torch.frombuffer(mapping, dtype=torch.uint8)
        self.checkpoint.read_into(parts, as_capsule(target))
        return target

    def _is_plain(self, part: tuple[int, int, int]) -> bool:
        return self.checkpoint.can_gather([part]) and not self.checkpoint.is_remote(part[0])


def _owner(stand_in: StreamedTensor) -> tuple[int, int | None]:
    """Returns the parameter of a stand-in, and the identity of its copy if it is of a copy."""
    weights, copy = stand_in._ref.weights, copy_of(stand_in)
    return weights.parameters[stand_in._ref.key], None if copy is None else id(copy)
