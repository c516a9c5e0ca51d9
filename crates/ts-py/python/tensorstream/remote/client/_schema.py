# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reads the schemas of operators."""

from __future__ import annotations

import functools
from typing import Any

import torch

aten = torch.ops.aten

#: Operators that accept a number in place of a tensor argument. For a number, other operators need
#: another overload.
_TAKES_NUMBERS = frozenset(
    name + suffix
    for name in (
        "add",
        "sub",
        "mul",
        "div",
        "subtract",
        "multiply",
        "divide",
        "true_divide",
        "floor_divide",
        "copy",
    )
    for suffix in ("", "_")
)


def has_numbers(op: torch._ops.OpOverload, args: Any) -> bool:
    """Returns whether an argument is a number where the overload ``op`` requires a tensor."""
    return any(
        position < len(args) and isinstance(args[position], (bool, int, float, complex))
        for position in tensor_positions(op)
    )


@functools.cache
def tensor_positions(op: torch._ops.OpOverload) -> list[int]:
    """Returns the positions of the arguments for which a number requires another overload."""
    if op._schema.name.partition("::")[2] in _TAKES_NUMBERS:
        return []
    return [
        position
        for position, argument in enumerate(op._schema.arguments)
        if str(argument.type) == "Tensor"
    ]


@functools.cache
def functional(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Returns the overload without outputs of an ``out=`` operator, or None if there is none."""
    inputs = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    packet = op.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        if other is not op and [(a.name, str(a.type)) for a in other._schema.arguments] == inputs:
            return other
    return None


def returns(op: torch._ops.OpOverload) -> list[Any]:
    """Describes the returns of an operator for ``RemoteKernel``.

    Returns:
        A description of each return:

        - "tensor", "tensors" (a list) or "other".
        - If the operator writes to an argument and returns it, the position of that argument among
          the tensor arguments.
    """
    kinds: list[Any] = []
    tensors = [a for a in op._schema.arguments if str(a.type) == "Tensor"]
    for result in op._schema.returns:
        alias = result.alias_info
        if alias is not None and alias.is_write:
            written = [
                position for position, a in enumerate(tensors)
                if a.alias_info is not None and a.alias_info.before_set == alias.before_set
            ]  # fmt: skip
            if written:
                kinds.append(written[0])
                continue
        kind = str(result.type)
        kinds.append(
            "tensor"
            if kind in ("Tensor", "Optional[Tensor]")
            else "tensors"
            if kind == "List[Tensor]"
            else "other"
        )
    return kinds


def is_view(op: torch._ops.OpOverload) -> bool:
    """Returns whether all results of an operator are views of its arguments."""
    returns = op._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def overload(name: str) -> torch._ops.OpOverload | None:
    """Returns the overload with a name such as "aten::add.Tensor", or None if there is none."""
    base, _, overload = name.removeprefix("aten::").partition(".")
    packet = getattr(aten, base, None)
    return getattr(packet, overload or "default", None) if packet is not None else None
