# SPDX-License-Identifier: MIT OR Apache-2.0
"""Exchanges the implementations of tensors, so that a parameter stays the same Python object."""

from __future__ import annotations

import weakref
from typing import Any

import torch

_native_torch: Any = torch._C

#: The attribute of a parameter with hooks that run when its gradient was accumulated.
_GRADIENT_HOOKS = "_post_accumulate_grad_hooks"


def swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchanges the implementations of two tensors, without their attributes.

    Raises:
        RuntimeError: PyTorch keeps a weak reference to one of them.
    """
    try:
        _native_torch._swap_tensor_impl(tensor, other)
    except RuntimeError:
        torch.clear_autocast_cache()  # it refers to parameters
        _native_torch._swap_tensor_impl(tensor, other)


def exchange(parameter: torch.Tensor, other: torch.Tensor) -> None:
    """Exchanges the implementations of a parameter and another tensor.

    The gradient and the hooks of the parameter belong to its implementation, so they are moved. A
    graph that was recorded before computes the gradient of the former implementation, which is
    forwarded.

    Raises:
        RuntimeError: PyTorch keeps a weak reference to one of them.
    """
    gradient, hooks = parameter.grad, _hooks_of(parameter)
    swap(parameter, other)
    if gradient is not None:
        other.grad = None
        parameter.grad = gradient.to(parameter.device)
    for attribute, each in hooks.items():
        setattr(parameter, attribute, each)
    if _native_torch.TensorBase.requires_grad.__get__(other):
        own: Any = other
        own._post_accumulate_grad_hooks = {0: _Forward(parameter)}


class _Forward:
    """Adds the gradient of a former implementation of a parameter to that of the parameter."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)

    def __call__(self, other: torch.Tensor) -> None:
        parameter, gradient = self._parameter(), other.grad
        other.grad = None
        if parameter is None or gradient is None:
            return
        gradient = gradient.to(parameter.device)
        if parameter.grad is None:
            parameter.grad = gradient
        elif gradient.requires_grad or parameter.grad.requires_grad:
            parameter.grad = parameter.grad + gradient
        else:
            parameter.grad.add_(gradient)
        for hook in tuple((_hooks_of(parameter).get(_GRADIENT_HOOKS) or {}).values()):
            hook(parameter)


def _hooks_of(parameter: Any) -> dict[str, Any]:
    """Returns the dictionaries of hooks of a parameter, by the name of the attribute."""
    names = ("_backward_hooks", _GRADIENT_HOOKS)
    return {name: each for name in names if (each := getattr(parameter, name, None)) is not None}
