# SPDX-License-Identifier: MIT OR Apache-2.0
"""Parameters that share memory without being the same object, such as a transposed view."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import ModelError
from . import _tree as tree

#: A parameter or a buffer, with its name.
Named = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in memory that it shares with other parameters."""

    #: Identifies the memory, whose size is ``count`` elements.
    storage: int
    count: int
    #: The index of the first element of the parameter.
    offset: int

    def memory(self, tensor: torch.Tensor, storages: dict[int, torch.Tensor]) -> torch.Tensor:
        """Returns a copy of a tensor in the memory that it shares.

        Args:
            tensor: The values.
            storages: What has been allocated, by ``storage``.
        """
        if self.storage not in storages:
            storages[self.storage] = tensor.new_empty(self.count)
        storage = storages[self.storage].untyped_storage()
        view = tensor.new_empty(0).set_(storage, self.offset, tensor.shape, tensor.stride())
        return view.copy_(tensor)


def places(model: nn.Module, kept: frozenset[int] = frozenset()) -> dict[int, Place]:
    """Returns where the parameters lie that share memory with others, by ``id``.

    Args:
        model: The model, before it streams.
        kept: The ``id`` of each parameter that stays in memory as it is.

    Raises:
        ModelError: A parameter that is to stream shares memory with a tensor that is not.
    """
    by_storage: dict[int, list[Named]] = {}
    for name, each in (*tree.named_parameters(model), *tree.named_buffers(model)):
        is_plain = type(each) in (nn.Parameter, torch.Tensor) and each.layout is torch.strided
        if is_plain and each.numel():
            by_storage.setdefault(each.untyped_storage()._cdata, []).append((name, each))
    found: dict[int, Place] = {}
    for storage, tensors in by_storage.items():
        for group in _overlapping(tensors) if len(tensors) > 1 else ():
            streamed = [
                (name, each)
                for name, each in group
                if isinstance(each, nn.Parameter) and id(each) not in kept
            ]
            others = [name for name, each in group if all(each is not own for _, own in streamed)]
            if streamed and others:
                raise ModelError(
                    f"cannot stream `{streamed[0][0]}`: it shares memory with `{others[0]}`, which "
                    "stays in memory, and a change of one would not reach the other; clone one of "
                    "them"
                )
            for _, each in streamed:
                count = each.untyped_storage().nbytes() // each.element_size()
                found[id(each)] = Place(storage, count, int(each.storage_offset()))
    return found


def _overlapping(tensors: list[Named]) -> Iterator[list[Named]]:
    """Yields groups of tensors of one storage that share bytes."""

    def extent(named: Named) -> tuple[int, int]:
        _, tensor = named
        start = int(tensor.storage_offset()) * tensor.element_size()
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        return start, start + (last + 1) * tensor.element_size()

    group: list[Named] = []
    end = 0
    for named in sorted(tensors, key=extent):
        start, own_end = extent(named)
        if start >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append(named)
        end = max(end, own_end)
    if len(group) > 1:
        yield group
