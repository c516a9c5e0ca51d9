# SPDX-License-Identifier: MIT OR Apache-2.0
"""Refuses calls that would change streamed weights. A refused call changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ._forward import own_stand_ins
from ._replaced_method import ReplacedMethod, replace_method
from ._streamed_tensor import StreamedTensor, is_same


def guard(model: nn.Module) -> None:
    """Replaces ``_apply`` and ``load_state_dict`` of each module with streamed weights."""
    for module in model.modules():
        if next(stand_ins_below(module), None) is not None:
            replace_method(module, Apply(module, "_apply"))
            replace_method(module, LoadStateDict(module, "load_state_dict"))


def stand_ins_below(module: nn.Module) -> Any:
    for each in module.modules():
        yield from own_stand_ins(each)


class Apply(ReplacedMethod):
    """Replaces ``_apply``. Refuses functions that would move, cast or change a streamed weight.

    ``to``, ``cpu``, ``float``, ``half``, ``to_empty`` and ``share_memory`` call ``_apply``.
    """

    def __call__(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module()
        checked: set[torch.dtype] = set()
        for _, stand_in in stand_ins_below(module):
            if stand_in.dtype not in checked:
                checked.add(stand_in.dtype)
                self._require_no_change(fn, stand_in)
        return self.original()(_skipping_stand_ins(fn), *args, **kwargs)

    def _require_no_change(self, fn: Any, stand_in: StreamedTensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            probe = torch.zeros(1).to(stand_in.dtype)
            before = probe._version
            outcome = fn(probe)
        if outcome is probe and probe._version == before and not probe.is_shared():
            return
        wanted, advice = "changed", "restore(model) first"
        if isinstance(outcome, torch.Tensor) and outcome.device != probe.device:
            wanted = f"moved to {outcome.device}"
        elif isinstance(outcome, torch.Tensor) and outcome.dtype != probe.dtype:
            wanted = f"cast from {probe.dtype} to {outcome.dtype}"
            advice = "pass the dtype to from_pretrained, or restore(model) first"
        raise ModelError(
            f"streamed weights, such as `{stand_in.name}`, cannot be {wanted}: their values come "
            f"from a file; nothing was changed; {advice}"
        )


def _skipping_stand_ins(fn: Any) -> Any:
    """Returns a function that calls ``fn`` for every tensor except stand-ins."""

    def apply(tensor: torch.Tensor) -> Any:
        return tensor if type(tensor) is StreamedTensor else fn(tensor)

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
