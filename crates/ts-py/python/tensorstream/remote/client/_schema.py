# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the schema of an operator says."""

from __future__ import annotations

import functools
from typing import Any

import torch

aten = torch.ops.aten

#: Operators that may be called with a number in a tensor's place. Of others there is an overload
#: for numbers.
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
    """Whether a number is in a tensor's place, of an operator that must not be called so."""
    return any(
        at < len(args) and isinstance(args[at], (bool, int, float, complex))
        for at in tensor_places(op)
    )


@functools.cache
def tensor_places(op: torch._ops.OpOverload) -> list[int]:
    """Places of arguments that are tensors, where a number must be known."""
    if op._schema.name.partition("::")[2] in _TAKES_NUMBERS:
        return []
    return [
        at for at, argument in enumerate(op._schema.arguments) if str(argument.type) == "Tensor"
    ]


@functools.cache
def functional(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator that returns what this one writes to its outputs."""
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    packet = op.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        if other is not op and [(a.name, str(a.type)) for a in other._schema.arguments] == wanted:
            return other
    return None


def returns(op: torch._ops.OpOverload) -> list[Any]:
    kinds: list[Any] = []
    tensors = [a for a in op._schema.arguments if str(a.type) == "Tensor"]
    for given in op._schema.returns:
        alias = given.alias_info
        if alias is not None and alias.is_write:
            written = [
                at for at, a in enumerate(tensors)
                if a.alias_info is not None and a.alias_info.before_set == alias.before_set
            ]  # fmt: skip
            if written:
                kinds.append(written[0])
                continue
        kind = str(given.type)
        kinds.append(
            "tensor"
            if kind in ("Tensor", "Optional[Tensor]")
            else "tensors"
            if kind == "List[Tensor]"
            else "other"
        )
    return kinds


def is_view(op: torch._ops.OpOverload) -> bool:
    returns = op._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def overload(name: str) -> torch._ops.OpOverload | None:
    base, _, overload = name.removeprefix("aten::").partition(".")
    packet = getattr(aten, base, None)
    return getattr(packet, overload or "default", None) if packet is not None else None
