# SPDX-License-Identifier: MIT OR Apache-2.0
"""What would change a streamed model's weights is refused, in words and before anything changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ._forward import Replaced, replace, streamed_of
from ._streamed_tensor import StreamedTensor, is_same


def guard(model: nn.Module) -> None:
    """Replaces the methods by which PyTorch and transformers change all weights of a model or a
    part of it.
    """
    for module in model.modules():
        if next(_streamed_below(module), None) is not None:
            replace(module, Apply(module, "_apply"))
            replace(module, Load(module, "load_state_dict"))
            if hasattr(type(module), "save_pretrained"):
                replace(module, Save(module, "save_pretrained"))


def _streamed_below(module: nn.Module) -> Any:
    for each in module.modules():
        yield from streamed_of(each)


class Apply(Replaced):
    """What ``to``, ``cpu``, ``float``, ``half``, ``to_empty`` and ``share_memory`` call: what
    neither moves nor casts a weight is done, and everything else is refused."""

    def __call__(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module()
        asked: set[torch.dtype] = set()
        for _, stand_in in _streamed_below(module):
            if stand_in.dtype not in asked:
                asked.add(stand_in.dtype)
                self._require_nothing_done(fn, stand_in)
        return self.original()(_sparing(fn), *args, **kwargs)

    def _require_nothing_done(self, fn: Any, stand_in: StreamedTensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            probe = torch.zeros(1).to(stand_in.dtype)
            before = probe._version
            outcome = fn(probe)
        if outcome is probe and probe._version == before and not probe.is_shared():
            return
        wanted = "changed"
        if isinstance(outcome, torch.Tensor) and outcome.device != probe.device:
            wanted = f"moved to {outcome.device}"
        elif isinstance(outcome, torch.Tensor) and outcome.dtype != probe.dtype:
            wanted = f"cast from {probe.dtype} to {outcome.dtype}"
        raise ModelError(
            f"a streamed model's weights cannot be {wanted}: they are read from disk for each use "
            f"(`{stand_in.name}` is one); nothing was changed. Give from_pretrained the dtype, or "
            "restore(model) first"
        )


def _sparing(fn: Any) -> Any:
    """The function for tensors that have memory; it does nothing to the others, as was tried."""

    def apply(tensor: torch.Tensor) -> Any:
        return tensor if type(tensor) is StreamedTensor else fn(tensor)

    return apply


class Load(Replaced):
    """``load_state_dict``: a streamed weight's own value is taken, another is refused."""

    def __call__(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        own = {}
        module: Any = self.module()
        for prefix, each in module.named_modules():
            for name, stand_in in streamed_of(each):
                own[f"{prefix}.{name}".lstrip(".")] = stand_in
        for name, value in state_dict.items():
            if name in own and not is_same(own[name], value):
                raise ModelError(
                    f"`{name}` cannot be loaded: a streamed weight cannot be changed; nothing was "
                    "changed. restore(model) first, or offload with another checkpoint"
                )
        return self.original()(state_dict, *args, **kwargs)


class Save(Replaced):
    """``save_pretrained``, which asks tensors for the address of their memory."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelError(
            "a streamed model cannot save_pretrained: restore(model) first, or write its weights "
            "one after the other with tensorstream.save_file(model.state_dict(), path)"
        )
