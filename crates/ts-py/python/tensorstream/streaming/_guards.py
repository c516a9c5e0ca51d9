# SPDX-License-Identifier: MIT OR Apache-2.0
"""Refuses calls that would change streamed weights. A refused call changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ._forward import own_stand_ins
from ._replaced_method import ReplacedMethod, replace_method
from ._store import memory_order
from ._streamed_tensor import StreamedTensor, StreamedWeight, is_same


def guard(model: nn.Module) -> None:
    """Replaces ``_apply`` and ``load_state_dict`` of each module with streamed weights.

    Also replaces ``train`` of the model.
    """
    for module in model.modules():
        if next(stand_ins_below(module), None) is not None:
            replace_method(module, Apply(module, "_apply"))
            replace_method(module, LoadStateDict(module, "load_state_dict"))
    replace_method(model, Train(model, "train"))


def stand_ins_below(module: nn.Module) -> Any:
    for each in module.modules():
        yield from own_stand_ins(each)


class Apply(ReplacedMethod):
    """Replaces ``_apply``. Refuses functions that would move, cast or change a streamed weight.

    ``to``, ``cpu``, ``float``, ``half``, ``to_empty`` and ``share_memory`` call ``_apply``.
    """

    def __call__(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module()
        checked: set[tuple[torch.dtype, tuple[int, ...]]] = set()
        for _, stand_in in stand_ins_below(module):
            kind = stand_in.dtype, memory_order(stand_in)
            if kind not in checked:
                checked.add(kind)
                self._require_no_change(fn, stand_in)
        return self.original()(_skipping_streamed(fn), *args, **kwargs)

    def _require_no_change(self, fn: Any, stand_in: StreamedTensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            order = memory_order(stand_in)
            probe = (
                torch.empty_permuted([2] * len(order), order)
                .fill_(3)
                .to(stand_in.dtype)
                .to(stand_in.device)
            )
            before, version = probe.clone(), probe._version
            outcome = fn(probe)
            if _is_unchanged(probe, before, version, outcome):
                return
        wanted, advice = "changed", "restore(model) first"
        if isinstance(outcome, torch.Tensor) and outcome.device != probe.device:
            wanted = f"moved to {outcome.device}"
        elif isinstance(outcome, torch.Tensor) and outcome.dtype != probe.dtype:
            wanted = f"cast from {probe.dtype} to {outcome.dtype}"
            advice = "pass the dtype to from_pretrained, or restore(model) first"
        elif isinstance(outcome, torch.Tensor) and outcome.stride() != probe.stride():
            wanted = "stored in another order of dimensions"
            advice = "change the memory format of a model in memory, and pass that to offload"
        elif _is_shared(outcome):
            wanted = "moved to shared memory"
            advice = "load the model in each process, or restore(model) first"
        raise ModelError(
            f"streamed weights, such as `{stand_in.name}`, cannot be {wanted}: their values come "
            f"from a file; nothing was changed; {advice}"
        )


def _is_unchanged(probe: torch.Tensor, before: torch.Tensor, version: int, outcome: Any) -> bool:
    """Returns whether a function has returned its argument, or an equal tensor on its device.

    Args:
        probe: The argument.
        before: A copy of it from before the call.
        version: Its version before the call.
        outcome: What the function returned.
    """
    if probe._version != version or not isinstance(outcome, torch.Tensor) or _is_shared(outcome):
        return False
    return outcome is probe or (
        type(outcome) is torch.Tensor
        and outcome.device == before.device
        and (outcome.dtype, outcome.stride()) == (before.dtype, before.stride())
        and torch.equal(_bytes(outcome), _bytes(before))
    )


def _is_shared(outcome: Any) -> bool:
    # PyTorch calls all memory of other devices shared.
    is_on_host = isinstance(outcome, torch.Tensor) and outcome.device.type == "cpu"
    return is_on_host and bool(outcome.untyped_storage().is_shared())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _skipping_streamed(fn: Any) -> Any:
    """Returns a function that calls ``fn`` for every tensor that is not streamed."""

    def apply(tensor: torch.Tensor) -> Any:
        return tensor if type(tensor) in (StreamedTensor, StreamedWeight) else fn(tensor)

    return apply


class LoadStateDict(ReplacedMethod):
    """Replaces ``load_state_dict``. Refuses to load streamed weights from other tensors."""

    def __call__(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        own = {}
        module: Any = self.module()
        for prefix, each in module.named_modules():
            for name, stand_in in own_stand_ins(each):
                own[f"{prefix}.{name}".lstrip(".")] = stand_in
        for name, value in state_dict.items():
            if name in own and not is_same(own[name], value):
                raise ModelError(
                    f"cannot load `{name}`: a streamed weight cannot be changed; nothing was "
                    "changed; restore(model) first, or offload with another checkpoint"
                )
        return self.original()(state_dict, *args, **kwargs)


class Train(ReplacedMethod):
    """Replaces ``train``. Warns once if the model has weights that a program may want to train."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module, name)
        self._warns = True

    def __call__(self, mode: bool = True) -> Any:
        module: Any = self.module()
        if mode and self._warns:
            keys = {
                each.key
                for _, each in stand_ins_below(module)
                if each.weights.requires_grad(each.key)
            }
            self._warns = not keys
            if keys:
                warnings.warn(
                    f"{len(keys)} parameters of {type(module).__name__} stream, and a streamed "
                    "weight is never updated: to train, put an adapter (PEFT) on top, or "
                    "restore(model) first; model.requires_grad_(False) says that they stay as they "
                    "are",
                    stacklevel=2,
                )
        return self.original()(mode)
