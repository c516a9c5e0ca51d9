# SPDX-License-Identifier: MIT OR Apache-2.0
"""Copies streamed models: ``copy.deepcopy`` returns a second streamed model on the same files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ._forward import (
    Parameters,
    ReplacedMethod,
    Streaming,
    copied_without_replaced_methods,
    own_stand_ins,
    remove_left_out,
    replace_method,
)
from ._store import DimensionOrders, memory_order
from ._stored import Stored
from ._streamed_tensor import StreamedTensor

#: Offloads a copy: the model, the stored orders of dimensions, and the ``id`` of each parameter
#: that stays in memory.
Attach = Callable[[nn.Module, DimensionOrders, frozenset[int]], None]


class DeepCopy(ReplacedMethod):
    """The method ``__deepcopy__`` of a streamed model."""

    def __init__(self, model: nn.Module, streaming: Streaming, stored: Stored, attach: Attach):
        super().__init__(model, "__deepcopy__")
        self._streaming = streaming
        self._stored = stored
        self._attach = attach

    def __call__(self, memo: dict[int, Any]) -> Any:
        model: Any = self.module()
        placeholders = self._placeholders(model, memo)
        twin = nn.Module.__new__(type(model))
        memo[id(model)] = twin
        for module in model.modules():
            for method in module.__dict__.values():
                if isinstance(method, ReplacedMethod):  # wrappers have copies of its attributes
                    memo.update({id(v): v for k, v in vars(method).items() if k != "before"})
            own = module.__dict__["_parameters"]
            if isinstance(own, Parameters):
                memo[id(own)] = {name: copy.deepcopy(dict.get(own, name), memo) for name in own}
        left_out = ("_tensorstream", "hf_device_map")
        attributes = {k: value for k, value in model.__dict__.items() if k not in left_out}
        with copied_without_replaced_methods():
            twin.__dict__.update(copy.deepcopy(attributes, memo))
        for module in twin.modules():
            remove_left_out(module)
        orders = {
            name: memory_order(parameter)
            for name, parameter in twin.named_parameters()
            if id(parameter) in placeholders and not parameter.is_contiguous()
        }
        kept = frozenset(
            id(parameter) for parameter in twin.parameters() if id(parameter) not in placeholders
        )
        self._attach(twin, orders, kept)
        return twin

    def _placeholders(self, model: nn.Module, memo: dict[int, Any]) -> dict[int, nn.Parameter]:
        """Maps the stand-ins of a model to parameters of its copy, which have no memory.

        Returns:
            These parameters by ``id``.
        """
        made: dict[int, nn.Parameter] = {}
        weights = self._streaming.weights
        for module in model.modules():
            own = module.__dict__["_parameters"]
            for name, stand_in in own_stand_ins(module):
                if stand_in.weights is not weights:
                    continue
                if stand_in.key not in made:
                    made[stand_in.key] = nn.Parameter(
                        self._placeholder(stand_in), weights.requires_grad(stand_in.key)
                    )
                memo[id(stand_in)] = made[stand_in.key]
                if name in own.trainable:
                    memo[id(own.trainable[name])] = made[stand_in.key]
        return {id(parameter): parameter for parameter in made.values()}

    def _placeholder(self, stand_in: StreamedTensor) -> torch.Tensor:
        if stand_in.is_contiguous():
            return self._stored.symbolic(stand_in)
        return torch.empty_strided(
            stand_in.shape, stand_in.stride(), dtype=stand_in.dtype, device="meta"
        )


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


def replace_copying(model: nn.Module, streaming: Streaming, stored: Stored, attach: Attach) -> None:
    """Makes ``copy.deepcopy`` return a second streamed model, and refuses other copies.

    Args:
        model: The model.
        streaming: Its streaming state.
        stored: The stored tensors of its parameters.
        attach: Offloads the copy.
    """
    replace_method(model, DeepCopy(model, streaming, stored, attach))
    replace_method(model, GetState(model))
