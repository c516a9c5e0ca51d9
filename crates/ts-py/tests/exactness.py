# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares a streamed model with the same model in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorstream as ts
import torch
from torch import nn

#: How often the streamed model runs.
PASSES = 3


def tensors(output: Any) -> list[torch.Tensor]:
    """Returns the tensors of the output of a model, without caches."""
    if isinstance(output, torch.Tensor):
        return [output]
    if hasattr(output, "values"):
        return [tensor for value in output.values() for tensor in tensors(value)]
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in tensors(value)]
    return []


def assert_same(actual: Any, expected: Any) -> None:
    """Requires equal bits, except that all NaNs are equal."""
    a, e = tensors(actual), tensors(expected)
    assert len(a) == len(e) > 0, f"{len(a)} tensors, expected {len(e)}"
    for x, y in zip(a, e, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(x.isnan(), y.isnan()), "NaNs differ"
        assert torch.equal(bits(x), bits(y)), f"differs by {(x.float() - y.float()).abs().max()}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, with zeros in place of NaNs."""
    return tensor.nan_to_num(0.0).contiguous().view(-1).view(torch.uint8)


def description(model: nn.Module) -> list[tuple[Any, ...]]:
    """Returns the name, shape, dtype and ``requires_grad`` of each parameter.

    Gradients are not recorded, because a streamed parameter requires none while they are.
    """
    with torch.no_grad():
        parameters = list(model.named_parameters())
    return [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in parameters]


def budgets(path: Path, model_class: Any) -> list[int]:
    """Returns three times the largest unit, and the smallest budget, in bytes."""
    stats = ts.stats(ts.from_pretrained(path, budget="1GiB", model_class=model_class))
    smallest = stats["plan"]["smallest_budget_bytes"]
    largest = max((unit["slot_bytes"] for unit in stats["units"]), default=0)
    return [max(3 * largest, smallest), smallest]


def check_exact(path: Path, model_class: Any, run: Callable[[nn.Module], Any]) -> bool:
    """Streams a checkpoint with a budget of three times the largest unit.

    Requires the results, parameter lists and restored parameters of the model in memory. If the
    whole model fits into this budget, repeats this with the smallest budget.

    Args:
        path: The directory of the checkpoint.
        model_class: The class of the model.
        run: Calls the model.

    Returns:
        Whether the model streamed: whether some unit was read more than once.
    """
    reference = model_class.from_pretrained(path).eval()
    with torch.inference_mode():
        torch.manual_seed(0)
        expected = run(reference)
    for budget in budgets(path, model_class):
        streamed = ts.from_pretrained(path, budget=budget, model_class=model_class)
        stats = _check(streamed, reference, run, expected)
        assert stats["reserved_high_water_bytes"] <= budget, "the budget was exceeded"
        if any(unit["loads"] > 1 for unit in stats["units"]):
            return True
    return False


def _check(
    streamed: nn.Module, reference: nn.Module, run: Callable[[nn.Module], Any], expected: Any
) -> ts.Stats:
    """Compares a streamed model with a reference. Restores it.

    Returns:
        The statistics of the streamed model, before it was restored.
    """
    listed = description(reference)
    assert description(streamed) == listed, "the parameters differ before the first call"
    during: list[Any] = []
    leaf = list(streamed.modules())[-1]
    hook = leaf.register_forward_pre_hook(lambda *_: during.append(description(streamed)))
    with torch.inference_mode():
        for index in range(PASSES):
            torch.manual_seed(0)
            assert_same(run(streamed), expected)
            if index == 0:
                hook.remove()
    assert all(own == listed for own in during), "the parameters differ during a call"
    assert description(streamed) == listed, "the parameters differ after the calls"
    stats = ts.stats(streamed)
    ts.restore(streamed)
    assert description(streamed) == listed, "the parameters differ after restoring"
    for mine, its in zip(streamed.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, its), "a restored parameter differs"
    with torch.inference_mode():
        torch.manual_seed(0)
        assert_same(run(streamed), expected)
    return stats
