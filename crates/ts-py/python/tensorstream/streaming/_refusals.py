# SPDX-License-Identifier: MIT OR Apache-2.0
"""Refuses models that cannot be streamed, before anything changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from . import _tree as tree

#: Names for the layouts of tensors that no file has.
_LAYOUTS = {"_mkldnn": "mkldnn", "jagged": "nested"}


def refuse_unsupported(model: Any, kept: frozenset[int] = frozenset()) -> None:
    """Raises an error for a model that cannot be streamed whatever the settings are.

    Args:
        model: The model.
        kept: The ``id`` of each parameter that stays in memory as it is.

    Raises:
        ModelError: It is no module, another library has offloaded it, or a parameter is sparse,
            nested, quantized or in the layout of oneDNN.
    """
    if not isinstance(model, nn.Module):
        found = model.__name__ if isinstance(model, type) else type(model).__name__
        advice = "; pass an instance of the class" if isinstance(model, type) else ""
        raise ModelError(
            f"cannot offload the model: expected a torch.nn.Module, got {found}{advice}"
        )
    for name, module in tree.named_modules(model):
        for hook in _hooks(module):
            _refuse_hook(name or type(module).__name__, hook)
    for name, parameter in tree.named_parameters(model):
        if id(parameter) not in kept:
            _refuse_layout(name, parameter)


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Yields the hooks of accelerate and diffusers that a module has."""
    own = module.__dict__.get("_hf_hook")
    if own is not None:
        yield from getattr(own, "hooks", (own,))
    registry = module.__dict__.get("_diffusers_hook")
    yield from getattr(registry, "hooks", {}).values()


def _refuse_hook(name: str, hook: Any) -> None:
    """Raises an error if a hook moves weights between a device and another place."""
    kind = type(hook).__name__
    if getattr(hook, "offload", False) or kind == "CpuOffload":
        raise ModelError(
            f"cannot offload the model: accelerate has offloaded the weights of `{name}` (its hook "
            f"{kind} moves them); call accelerate.hooks.remove_hook_from_module(model, "
            "recurse=True) first, or load the checkpoint with tensorstream instead of accelerate"
        )
    if kind.endswith("GroupOffloadingHook"):
        raise ModelError(
            f"cannot offload the model: diffusers has offloaded the weights of `{name}` (its hook "
            f"{kind} moves them); load the model without group offloading"
        )


def _refuse_layout(name: str, parameter: torch.Tensor) -> None:
    """Raises an error if the elements of a parameter are not those of a plain array."""
    is_strided = parameter.layout == torch.strided and not parameter.is_nested
    if is_strided and not parameter.is_quantized:
        return
    layout = str(parameter.layout).removeprefix("torch.")
    found = _LAYOUTS.get(layout, layout.replace("sparse_", "sparse, layout "))
    if parameter.is_nested:
        found = "nested"
    elif is_strided:
        found = "quantized"
    raise ModelError(
        f"cannot stream parameter `{name}`: its tensor is {found} (expected a dense, strided "
        "tensor); convert it with .to_dense(), .to_padded_tensor() or .dequantize(), or keep it "
        "in a buffer"
    )
