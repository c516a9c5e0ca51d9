# SPDX-License-Identifier: MIT OR Apache-2.0
"""Decides which parameters are divided into slices, each of which is a unit.

The experts of a mixture are parameters whose first dimension is the expert. A token needs few of
them, so each expert is read, kept and evicted on its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

#: The names of the argument of an experts module that contains the chosen experts of each token.
_ROUTES = ("top_k_index", "router_indices", "selected_experts")

#: Smaller slices are not worth their own units.
_LEAST_SLICE_BYTES = 16 << 10

#: transformers asks for the address of a weight before `grouped_mm` with older versions.
_DIVIDES = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) > (2, 10)

#: A range of a file: the index of the file, the offset, and the length in bytes.
Part = tuple[int, int, int]


def route_argument(module: nn.Module) -> tuple[str, int] | None:
    """Returns the name and the position of the argument that selects slices of the parameters.

    Returns ``None`` if the module is no experts module.
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


def slice_bytes(parameter: torch.Tensor) -> int:
    """Returns the size in bytes of one slice along the first dimension."""
    return parameter.nbytes // parameter.shape[0]


def slices(
    parts: Sequence[Part], phase: int | None, count: int
) -> list[tuple[list[Part], int | None]]:
    """Divides the bytes of a tensor into ``count`` slices of the same size.

    Returns:
        The parts and the phase of each slice, as in a ``TensorSpec``.
    """
    length = sum(part[2] for part in parts) // count
    rest, divided = list(parts), []
    for index in range(count):
        wanted, own = length, []
        while wanted:
            file, offset, available = rest.pop(0)
            taken = min(available, wanted)
            own.append((file, offset, taken))
            wanted -= taken
            if taken < available:
                rest.insert(0, (file, offset + taken, available - taken))
        divided.append((own, None if phase is None else (phase + index * length) % 64))
    return divided


def selected(route: tuple[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Returns the slices that a call selects, in ascending order, or an empty list."""
    name, position = route
    index = kwargs.get(name, args[position] if position < len(args) else None)
    if type(index) is not torch.Tensor or index.device.type != "cpu" or index.is_floating_point():
        return []
    chosen: list[int] = torch.unique(index.detach()).tolist()
    return chosen
