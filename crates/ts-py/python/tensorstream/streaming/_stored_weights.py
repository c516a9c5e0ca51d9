# SPDX-License-Identifier: MIT OR Apache-2.0
"""The stored tensors of the parameters of a streamed model, for copies and files of the model."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from .. import _native
from ..config import cache_directory
from ..errors import StorageError
from ..files._capsules import as_capsule
from ._builder import Builder
from ._store import memory_order
from ._streamed_tensor import StreamedTensor
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
        #: The stored tensor of each weight, and its original parameter as a number, by key, for the
        #: weights on each device. Those refer to this object.
        self._weights: weakref.WeakKeyDictionary[Weights, dict[int, tuple[TensorSpec, int]]]
        self._weights = weakref.WeakKeyDictionary()
        #: The storages of mapped weights that still exist, by parameter.
        self._mapped: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(
        self, weights: Weights, sources: dict[int, TensorSpec], parameters: dict[int, int]
    ) -> None:
        """Adds the weights on a device.

        Args:
            weights: The weights.
            sources: Their stored tensors, by key.
            parameters: Their original parameters as numbers, by key. Weights on several devices can
                have the same one.
        """
        own = {key: (source, parameters[key]) for key, source in sources.items()}
        self._weights[weights] = own

    def shares(self) -> list[Weights]:
        """Returns the weights on all devices."""
        return list(self._weights)

    def reload(
        self, checkpoint: _native.Checkpoint, sources: Mapping[Weights, dict[int, TensorSpec]]
    ) -> None:
        """Replaces the checkpoint, and the stored tensors of the weights on each device."""
        self.checkpoint = self._builder.checkpoint = checkpoint
        for weights, own in sources.items():
            before = self._weights[weights]
            self._weights[weights] = {key: (own[key], before[key][1]) for key in before}
        self._mapped.clear()

    def parameter(self, stand_in: StreamedTensor) -> int:
        """Returns the original parameter of a weight, as a number."""
        return self._weights[stand_in._ref.weights][stand_in._ref.key][1]

    def has(self, stand_in: StreamedTensor) -> bool:
        """Returns whether a stand-in is one of the model's."""
        return stand_in._ref.weights in self._weights

    def is_in(self, directory: str | os.PathLike[str]) -> bool:
        """Returns whether weights stream from files in a directory."""
        return any(
            os.path.realpath(os.path.dirname(path)) == os.path.realpath(directory)
            for index, (path, _, _) in enumerate(self.checkpoint.files())
            if not self.checkpoint.is_remote(index)
        )

    def symbolic_all(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a state dict with symbolic tensors instead of stand-ins.

        Names of the same weight have the same symbolic tensor.
        """
        made: dict[int, torch.Tensor] = {}
        state_dict = dict(tensors)
        for name, tensor in tensors.items():
            if isinstance(tensor, StreamedTensor) and self.has(tensor):
                parameter = self.parameter(tensor)
                if parameter not in made:
                    made[parameter] = self.symbolic(tensor)
                state_dict[name] = made[parameter]
        return state_dict

    def symbolic(self, stand_in: StreamedTensor) -> torch.Tensor:
        """Returns a symbolic tensor for a weight, or a view of one if it is not contiguous."""
        name, _, shape, parts, phase = self._weights[stand_in._ref.weights][stand_in._ref.key][0]
        source = Source(name, tuple(parts), phase)
        stored = SymbolicTensor(shape, stand_in.dtype, source, self._builder)
        if stand_in.is_contiguous():
            return stored
        order = memory_order(stand_in)
        return stored.permute([order.index(dim) for dim in range(len(order))])

    def mapped(self, stand_in: StreamedTensor) -> torch.Tensor:
        """Returns a weight as a view of a file, whose pages the system can reclaim. Blocks.

        The file is that of the checkpoint, or an unnamed one to which the weight is written.
        Tensors of the same weight share memory. Writes to it do not reach the checkpoint.

        Raises:
            StorageError: Reading or writing failed.
            CheckpointChangedError: The file changed since it was opened.
        """
        spec = stand_in._ref.weights.specs[stand_in._ref.key]
        stored, parameter = self._weights[stand_in._ref.weights][stand_in._ref.key]
        storage = self._mapped.get(parameter)
        if storage is None:
            storage = self._mapped[parameter] = self._map(stored).untyped_storage()
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
            directory = cache_directory()
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as unnamed:
                # Reserves the space: without space, a write to the mapping would end the process.
                os.posix_fallocate(unnamed.fileno(), 0, length)
                mapping = mmap.mmap(unnamed.fileno(), length)
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
            raise StorageError(f"cannot map `{stored[0]}`: {error}") from error
        target = torch.frombuffer(mapping, dtype=torch.uint8)
        self.checkpoint.read_into(parts, as_capsule(target))
        return target

    def _is_plain(self, part: tuple[int, int, int]) -> bool:
        return self.checkpoint.can_gather([part]) and not self.checkpoint.is_remote(part[0])
