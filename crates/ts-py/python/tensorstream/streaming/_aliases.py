# SPDX-License-Identifier: MIT OR Apache-2.0
"""Parameters that share memory without being the same object, such as a transposed view."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ..errors import ModelError
from . import _tree as tree

#: Other classes of tensors can have no address.
_PLAIN = (nn.Parameter, torch.Tensor)


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in memory that it shares with other parameters."""

    #: The number of the memory, whose size is ``count`` elements.
    memory: int
    count: int
    #: The index of the first element of the parameter.
    offset: int

    def filled(self, tensor: torch.Tensor, memories: dict[int, torch.Tensor]) -> torch.Tensor:
        """Returns a copy of a tensor in the memory that it shares.

        Args:
            tensor: The values.
            memories: What has been allocated, by number.
        """
        # A parameter cannot keep the memory of a tensor that was made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            if self.memory not in memories:
                memories[self.memory] = torch.empty(
                    self.count, dtype=tensor.dtype, device=tensor.device
                )
            storage = memories[self.memory].untyped_storage()
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            view.set_(storage, self.offset, tensor.shape, tensor.stride())
            return view.copy_(tensor)


class _Extent(NamedTuple):
    """The bytes of a parameter or a buffer."""

    #: The ``id`` of the storage of a tensor without memory, or 0.
    space: int
    begin: int
    end: int
    name: str
    tensor: torch.Tensor


def places(model: nn.Module, kept: frozenset[int] = frozenset()) -> dict[int, Place]:
    """Returns where the parameters lie that share memory with others, by ``id``.

    Args:
        model: The model, before it streams.
        kept: The ``id`` of each parameter that stays in memory as it is.

    Raises:
        ModelError: A parameter that is to stream shares memory with a tensor that is not.
    """
    found: dict[int, Place] = {}
    for number, group in enumerate(_sharing(model)):
        streamed = [
            each
            for each in group
            if isinstance(each.tensor, nn.Parameter) and id(each.tensor) not in kept
        ]
        others = [each.name for each in group if all(each is not own for own in streamed)]
        if streamed and others:
            raise ModelError(
                f"cannot stream `{streamed[0].name}`: it shares memory with `{others[0]}`, which "
                "stays in memory, and a change of one would not reach the other; clone one of them"
            )
        begin, end = group[0].begin, max(each.end for each in group)
        for each in streamed:
            size = each.tensor.element_size()
            place = Place(number, -(-(end - begin) // size), (each.begin - begin) // size)
            found[id(each.tensor)] = place
    return found


def _sharing(model: nn.Module) -> Iterator[list[_Extent]]:
    """Yields groups of parameters and buffers that share bytes, in the order of their bytes."""
    extents = [
        _extent(name, each)
        for name, each in (*tree.named_parameters(model), *tree.named_buffers(model))
        if type(each) in _PLAIN and each.layout is torch.strided
    ]
    extents.sort(key=lambda each: each[:3])
    group: list[_Extent] = []
    space, end = 0, 0
    for each in extents:
        if each.space != space or each.begin >= end:
            if len(group) > 1:
                yield group
            group, space, end = [], each.space, 0
        if each.begin < each.end:
            group.append(each)
            end = max(end, each.end)
    if len(group) > 1:
        yield group


def _extent(name: str, tensor: torch.Tensor) -> _Extent:
    space, begin, size = 0, tensor.data_ptr(), tensor.nbytes
    if begin == 0 and size:
        space = tensor.untyped_storage()._cdata
        begin = int(tensor.storage_offset()) * tensor.element_size()
    if size and not tensor.is_contiguous():
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        size = (last + 1) * tensor.element_size()
    return _Extent(space, begin, begin + size, name, tensor)
