# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies streamed models: ``copy.deepcopy`` returns a second streamed model on the same files.

A deep copy of a part of the model is an ordinary module in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ._distributed import IGNORED, StreamedNames
from ._forward import Parameters, own_stand_ins
from ._guards import stand_ins_below
from ._replaced_method import (
    ReplacedMethod,
    copied_without_replaced_methods,
    is_copied_without_replaced_methods,
    remove_left_out,
    replace_method,
)
from ._store import DimensionOrders, memory_order
from ._stored_weights import StoredWeights
from ._streamed_tensor import StreamedTensor

#: Offloads a copy: the model, the stored orders of dimensions, and the ``id`` of each parameter
#: that stays in memory.
Attach = Callable[[nn.Module, DimensionOrders, frozenset[int]], None]


class DeepCopy(ReplacedMethod):
    """The method ``__deepcopy__`` of a streamed model. The copy is a second streamed model."""

    def __init__(self, model: nn.Module, stored: StoredWeights, attach: Attach):
        super().__init__(model, "__deepcopy__")
        self._stored = stored
        self._attach = attach

    def __call__(self, memo: dict[int, Any]) -> Any:
        twin, streamed = _copied(self.module(), self._stored, self._without_memory, memo)
        orders = {
            name: memory_order(parameter)
            for name, parameter in twin.named_parameters()
            if id(parameter) in streamed and not parameter.is_contiguous()
        }
        kept = frozenset(
            id(parameter) for parameter in twin.parameters() if id(parameter) not in streamed
        )
        self._attach(twin, orders, kept)
        return twin

    def _without_memory(self, stand_in: StreamedTensor) -> torch.Tensor:
        """Returns a tensor without memory for a parameter of the copy."""
        if stand_in.is_contiguous():
            return self._stored.symbolic(stand_in)
        return torch.empty_strided(
            stand_in.shape, stand_in.stride(), dtype=stand_in.dtype, device="meta"
        )


class DeepCopyOfPart(ReplacedMethod):
    """The method ``__deepcopy__`` of a part of a streamed model. The copy is in memory.

    PEFT, for example, trains copies of layers: ``modules_to_save``, and norms.
    """

    def __init__(self, module: nn.Module, stored: StoredWeights) -> None:
        super().__init__(module, "__deepcopy__")
        self._stored = stored

    def __call__(self, memo: dict[int, Any]) -> Any:
        if is_copied_without_replaced_methods():  # with the module that contains it
            return _copied_with_memo(self.module(), memo)
        return _copied(self.module(), self._stored, StreamedTensor.copy, memo)[0]


def _copied(
    original: Any,
    stored: StoredWeights,
    values_of: Callable[[StreamedTensor], torch.Tensor],
    memo: dict[int, Any],
) -> tuple[nn.Module, set[int]]:
    """Copies a module that is, or is a part of, a streamed model. The copy does not stream.

    Args:
        original: The module.
        stored: The stored tensors of the streamed model.
        values_of: Returns the values of a parameter of the copy.
        memo: The argument of ``__deepcopy__``.

    Returns:
        The copy, and the ``id`` of each parameter of it that is streamed in the original.
    """
    parameters: dict[int, nn.Parameter] = {}
    for module in original.modules():
        for _, stand_in in own_stand_ins(module):
            if not stored.has(stand_in):
                continue
            number = stored.parameter(stand_in)
            if number not in parameters:
                requires_grad = stand_in.weights.requires_grad(stand_in.key)
                parameters[number] = nn.Parameter(values_of(stand_in), requires_grad)
            memo[id(stand_in)] = parameters[number]
            if stand_in.trainable is not None:
                memo[id(stand_in.trainable)] = parameters[number]
    for module in original.modules():
        for method in module.__dict__.values():
            if isinstance(method, ReplacedMethod):  # wrappers have copies of its attributes
                memo.update({id(v): v for k, v in vars(method).items() if k != "before"})
        own = module.__dict__["_parameters"]
        if isinstance(own, Parameters):
            memo[id(own)] = {name: copy.deepcopy(dict.get(own, name), memo) for name in own}
    with copied_without_replaced_methods():
        twin = _copied_with_memo(original, memo)
    for module in twin.modules():
        remove_left_out(module)
    return twin, {id(parameter) for parameter in parameters.values()}


def _copied_with_memo(original: Any, memo: dict[int, Any]) -> nn.Module:
    """Copies a module as ``copy.deepcopy`` does for modules without ``__deepcopy__``."""
    twin: nn.Module = nn.Module.__new__(type(original))
    memo[id(original)] = twin
    left_out = ("_tensorstream",)
    attributes = {k: value for k, value in original.__dict__.items() if k not in left_out}
    if isinstance(names := attributes.get(IGNORED), StreamedNames):
        attributes[IGNORED] = names.before
    twin.__dict__.update(copy.deepcopy(attributes, memo))
    return twin


class GetState(ReplacedMethod):
    """The method ``__getstate__`` of a streamed model. Refuses ``copy.copy`` and pickle."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, "__getstate__")

    def __call__(self) -> Any:
        raise ModelError(
            f"cannot pickle or copy.copy an offloaded {type(self.module()).__name__}: its weights "
            "are in files; use copy.deepcopy for a second streamed model, save_pretrained or "
            "state_dict() to save it, or restore(model) first"
        )


def replace_copying(model: nn.Module, stored: StoredWeights, attach: Attach) -> None:
    """Makes ``copy.deepcopy`` return a second streamed model, and refuses other copies.

    Deep copies of parts of the model are ordinary modules in memory.

    Args:
        model: The model.
        stored: The stored tensors of its parameters.
        attach: Offloads the copy.
    """
    for module in model.modules():
        if any(stand_ins_below(module)):
            replace_method(module, DeepCopyOfPart(module, stored))
    replace_method(model, DeepCopy(model, stored, attach))
    replace_method(model, GetState(model))
