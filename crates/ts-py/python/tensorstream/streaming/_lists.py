# SPDX-License-Identifier: MIT OR Apache-2.0
"""Operations on lists of tensors that can be run for one tensor after the other.

Programs call them with all weights of a model, which together exceed the budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch


def _concatenated(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenates tensors, which are copied one after the other."""
    tensors = [each for each in tensors if each.shape != (0,)] or tensors
    geometries = [
        torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
        for each in tensors
    ]
    like = torch.cat(geometries, dim)
    result = torch.empty_strided(
        like.shape, like.stride(), dtype=like.dtype, device=tensors[0].device
    )
    sizes = [each.shape[dim] for each in tensors]
    for part, each in zip(torch.split(result, sizes, dim), tensors, strict=True):
        part.copy_(each)
    return result


def _stacked(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Stacks tensors, which are copied one after the other."""
    return _concatenated([each.unsqueeze(dim) for each in tensors], dim)


_CONCATENATIONS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.cat.default: _concatenated,
    torch.ops.aten.stack.default: _stacked,
}


def one_by_one(func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Returns a function that runs an operation on a list for one element after the other.

    It takes the arguments of the operation. Returns ``None`` for an operation that is not known to
    work on one element at a time.

    Args:
        func: The operation.
        args: Its positional arguments.
    """
    known = _CONCATENATIONS.get(func)
    if known is not None:
        return known
    if not func._schema.name.startswith("aten::_foreach_") or len(func._schema.returns) > 1:
        return None
    count = len(args[0])
    if count < 2 or any(isinstance(each, torch.Tensor) and each.dim() for each in args):
        return None  # a tensor of scalars has one for each element

    def nth(value: Any, i: int) -> Any:
        return [value[i]] if isinstance(value, list | tuple) else value

    def run(*args: Any, **kwargs: Any) -> list[Any] | None:
        results: list[Any] = []
        for i in range(count):
            own = [nth(each, i) for each in args]
            results.append(func(*own, **{name: nth(each, i) for name, each in kwargs.items()}))
        return None if not func._schema.returns else list(itertools.chain.from_iterable(results))

    return run
