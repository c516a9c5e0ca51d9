# SPDX-License-Identifier: MIT OR Apache-2.0
"""Finds the modules, parameters and buffers of a model.

Models can override ``parameters``, ``named_parameters``, ``modules`` and ``children``, for example
so that an optimizer sees only a part of them. What is streamed does not depend on that. So these
functions read the dictionaries of the modules. They return what the methods of ``nn.Module`` yield
if nothing overrides them. Most of it runs in native code: loading asks often.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .. import _native


def named_modules(
    model: nn.Module, prefix: str = "", *, remove_duplicate: bool = True
) -> list[tuple[str, nn.Module]]:
    """Returns the model and all modules in it with their names.

    Args:
        model: The model.
        prefix: The name of the model.
        remove_duplicate: Whether a shared module has only its first name.
    """
    return _native.named_modules(model, prefix, remove_duplicate)


def modules(model: nn.Module) -> list[nn.Module]:
    """Returns the model and all modules in it, each once."""
    return _native.modules(model)


def children(module: nn.Module) -> list[nn.Module]:
    """Returns the distinct modules directly below a module."""
    found = {id(child): child for child in module._modules.values() if child is not None}
    return list(found.values())


def named_parameters(
    model: nn.Module, *, remove_duplicate: bool = True
) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters of a model with their names.

    Args:
        model: The model.
        remove_duplicate: Whether a shared parameter has only its first name.
    """
    return _native.named_tensors(model, "_parameters", remove_duplicate)


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the distinct parameters of a model."""
    return [parameter for _, parameter in named_parameters(model)]


def named_buffers(
    model: nn.Module, *, remove_duplicate: bool = True
) -> list[tuple[str, torch.Tensor]]:
    """Returns the buffers of a model with their names, as ``named_parameters`` does."""
    return _native.named_tensors(model, "_buffers", remove_duplicate)


def persistent_buffers(
    model: nn.Module, is_own: Callable[[nn.Module], bool] = lambda _: True
) -> list[torch.Tensor]:
    """Returns the distinct buffers of a model that its checkpoints have.

    Args:
        model: The model.
        is_own: Returns whether the buffers of a module count.
    """
    found = {
        id(buffer): buffer
        for module in modules(model)
        if is_own(module)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    return list(found.values())


def joined(prefix: str, name: str) -> str:
    """Returns the name of a part of a module."""
    return f"{prefix}.{name}" if prefix else name
