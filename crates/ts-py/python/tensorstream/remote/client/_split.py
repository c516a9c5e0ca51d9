# SPDX-License-Identifier: MIT OR Apache-2.0
"""Divides the modules of a model into parts, one for each machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...errors import BudgetError

#: The precision of the search for the smallest load.
_STEPS = 60


@dataclass
class Unit:
    """A module whose weights are on one machine.

    Attributes:
        name: The name of the module. "" is the model.
        module: The module.
        is_whole: Whether its descendants belong to it. Otherwise they have their own units.
        nbytes: The size of its weights, without those that an earlier unit has.
        part: The index of its machine.
    """

    name: str
    module: nn.Module
    is_whole: bool
    nbytes: int = 0
    part: int = 0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the parameters and buffers of the unit, with their names in the model."""
        prefix = f"{self.name}." if self.name else ""
        for modules in (self.module.named_parameters, self.module.named_buffers):
            for name, tensor in modules(recurse=self.is_whole, remove_duplicate=False):
                yield prefix + name, tensor


def split(
    model: nn.Module, weights: Sequence[int], *, budgets: bool, itemsize: int | None = None
) -> list[Unit]:
    """Divides a model into parts of consecutive layers.

    The largest load, relative to the weight of its machine, is as small as possible. Modules that
    share a parameter are in one part, and modules without parameters in the first one.

    Args:
        model: The model. It may be on the meta device.
        weights: For each machine, its weight.
        budgets: Whether the weights are also the most bytes of each part.
        itemsize: The size of floating-point parameters, if it is not that of the model.

    Returns:
        The units in the order of their registration.

    Raises:
        BudgetError: The budgets are too small.
    """
    units = list(_units(model, "", getattr(model, "_no_split_modules", None) or ()))
    owners: dict[int, Unit] = {}
    leaders: dict[int, Unit] = {}

    def leader(unit: Unit) -> Unit:
        """Returns the first of the units that must be in one part with a unit."""
        while leaders.get(id(unit), unit) is not unit:
            unit = leaders[id(unit)]
        return unit

    with_parameters: set[int] = set()
    order = {id(unit): position for position, unit in enumerate(units)}
    for unit in units:
        for _, tensor in unit.tensors():
            if isinstance(tensor, nn.Parameter):
                with_parameters.add(id(unit))
            if id(tensor) not in owners:
                owners[id(tensor)] = unit
                given = itemsize if tensor.is_floating_point() else None
                unit.nbytes += tensor.numel() * (given or tensor.element_size())
            pair = leader(owners[id(tensor)]), leader(unit)
            first, second = sorted(pair, key=lambda each: order[id(each)])
            leaders[id(second)] = first
    loads: dict[int, int] = {}
    for unit in units:
        loads[id(leader(unit))] = loads.get(id(leader(unit)), 0) + unit.nbytes
    ordered = [each for each in units if leader(each) is each and id(each) in with_parameters]
    _assign(ordered, [loads[id(unit)] for unit in ordered], weights, budgets)
    for unit in units:
        unit.part = leader(unit).part
    return units


def _units(module: nn.Module, name: str, whole: Sequence[str]) -> Iterator[Unit]:
    """Yields the units of a module and its descendants.

    Args:
        module: The module.
        name: Its name.
        whole: The names of classes that are not divided, if the model names them.
    """
    if next(module.parameters(), None) is None and next(module.buffers(), None) is None:
        return
    if not _is_divisible(module, whole):
        yield Unit(name, module, True)
        return
    own = Unit(name, module, False)
    if next(own.tensors(), None) is not None:
        yield own
    is_container = isinstance(module, nn.ModuleList | nn.Sequential)
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if is_container and not whole and not isinstance(child, nn.ModuleList | nn.Sequential):
            yield Unit(full, child, True)  # a layer, whose residual connections are inside
        else:
            yield from _units(child, full, whole)


def _is_divisible(module: nn.Module, whole: Sequence[str]) -> bool:
    """Returns whether a module contains layers that can be on different machines."""
    if type(module).__name__ in whole:
        return False
    if whole:
        return any(type(each).__name__ in whole for each in module.modules())
    return any(
        isinstance(each, nn.ModuleList | nn.Sequential) and len(each) > 1
        for each in module.modules()
    )


def _assign(units: list[Unit], sizes: Sequence[int], weights: Sequence[int], budgets: bool) -> None:
    """Sets the parts of units with these sizes in bytes."""
    if not units:
        return
    low, high = 0.0, float(sum(sizes)) / min(weights)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _parts(sizes, [middle * weight for weight in weights]) is not None:
            high = middle
        else:
            low = middle
    parts = _parts(sizes, [high * weight for weight in weights]) or [0] * len(units)
    loads = [0] * len(weights)
    for unit, part, size in zip(units, parts, sizes, strict=True):
        unit.part = part
        loads[part] += size
    if budgets and any(load > budget for load, budget in zip(loads, weights, strict=True)):
        smallest = ", ".join(str(int(high * weight) + 1) for weight in weights)
        raise BudgetError(
            f"the budgets of the machines are too small: the parts of the model have {loads} "
            f"bytes, and the budgets are {list(weights)}; the smallest budgets in this ratio are "
            f"{smallest} bytes"
        )


def _parts(sizes: Sequence[int], limits: Sequence[float]) -> list[int] | None:
    """Divides sizes in order, as many to each part as its limit allows.

    Returns:
        The part of each, or ``None`` if the last part cannot hold the rest.
    """
    parts: list[int] = []
    load = 0
    part = 0
    for size in sizes:
        while load + size > limits[part]:
            if part + 1 == len(limits):
                return None
            part, load = part + 1, 0
        parts.append(part)
        load += size
    return parts
