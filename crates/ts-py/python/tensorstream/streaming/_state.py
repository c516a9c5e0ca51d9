# SPDX-License-Identifier: MIT OR Apache-2.0
"""The streaming state of a model. It is found through the parameters of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .. import _native
from ..devices import device_of
from ..errors import ConfigurationError, ModelError
from . import _tree as tree
from ._calls import own_stand_ins, stand_ins_below
from ._stored_weights import StoredWeights
from ._weights import Weights


@dataclass(frozen=True)
class Streaming:
    """What streams in a module: the weights on each device, those on the main one first."""

    shares: list[Weights]

    @property
    def checkpoint(self) -> _native.Checkpoint:
        """The checkpoint."""
        return self.shares[0].stored.checkpoint

    @property
    def passed_over(self) -> list[tuple[str, str]]:
        """Requested backends that are not built yet, with the reason."""
        return self.shares[0].passed_over

    def share(self, device: str | int | torch.device | None) -> Weights:
        """Returns the weights on a device, or the only ones for ``None``.

        Raises:
            ConfigurationError: The model has none there, or is on several devices.
        """
        devices = ", ".join(str(share.device) for share in self.shares)
        if device is None and len(self.shares) > 1:
            raise ConfigurationError(
                f"the model is on several devices ({devices}): give one of them as `device`"
            )
        wanted = self.shares[0].device if device is None else device_of(device)
        for share in self.shares:
            if share.device == wanted:
                return share
        raise ConfigurationError(f"the model has no weights on {wanted}: expected one of {devices}")


def is_offloaded(model: nn.Module) -> bool:
    """Returns whether any parameter of a module streams."""
    return next(iter(stand_ins_below(model)), None) is not None


def streaming_of(model: nn.Module) -> Streaming:
    """Returns what streams in a module: a model, a part of one, or a module around one.

    Raises:
        ModelError: Nothing in it streams, or it contains several offloaded models.
    """
    found = _found(model)
    names = {weights.stored: _model_name(model, weights, name) for weights, name in found.items()}
    if len(names) > 1:
        raise ModelError(
            f"this {type(model).__name__} contains several offloaded models "
            f"({', '.join(f'`{name}`' for name in names.values())}); pass one of them"
        )
    return Streaming(sorted(found, key=lambda weights: weights.number))


def all_streaming(model: nn.Module) -> list[Streaming]:
    """Returns what streams in a module that may contain several offloaded models.

    Raises:
        ModelError: Nothing in it streams.
    """
    by_model: dict[StoredWeights, list[Weights]] = {}
    for weights in sorted(_found(model), key=lambda weights: weights.number):
        by_model.setdefault(weights.stored, []).append(weights)
    return [Streaming(shares) for shares in by_model.values()]


def _found(model: nn.Module) -> dict[Weights, str]:
    """Returns the weights that stream in a module, with the name of the first module of each."""
    found: dict[Weights, str] = {}
    if isinstance(model, nn.Module):
        for name, module in tree.named_modules(model):
            for _, each in own_stand_ins(module):
                found.setdefault(each._ref.weights, name)
    if not found:
        raise ModelError(f"this {type(model).__name__} is not offloaded; call offload(model) first")
    return found


def _model_name(around: nn.Module, weights: Weights, first: str) -> str:
    """Returns the name of an offloaded model in a module around it.

    Args:
        around: The module.
        weights: The weights of the model.
        first: The name of the first module with one of its weights.
    """
    names = tree.named_modules(around)
    return next((name for name, each in names if each in weights.passes.models), first)
