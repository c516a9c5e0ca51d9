# SPDX-License-Identifier: MIT OR Apache-2.0
"""The streaming state of a model, and where it is found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import _native
from ..devices import device_of
from ..errors import ConfigurationError, ModelError
from ._profile import Profile
from ._weights import Weights


@dataclass(frozen=True, eq=False)
class Share:
    """The weights of a model on one device, which have an engine of their own."""

    weights: Weights
    #: The stored tensor of each parameter, as a ``TensorSpec``, by key.
    sources: dict[int, Any]
    profile: Profile
    #: The units of the experts of each layer, by the name of the module that contains them.
    expert_units: dict[str, list[int]]
    #: The smallest budget that works, without buffers, in bytes.
    smallest: int = 0
    #: The size of the buffers that a checkpoint has, which are part of the budget.
    buffer_bytes: int = 0

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.weights.device

    @property
    def streamer(self) -> _native.Streamer:
        """The engine."""
        return self.weights.streamer


@dataclass
class Streaming:
    """The streaming state of a model, which is its attribute ``_tensorstream``."""

    checkpoint: _native.Checkpoint
    #: The weights on each device, those on the main one first.
    shares: list[Share]
    #: Requested backends that are not built yet, with the reason.
    passed_over: list[tuple[str, str]]
    #: The shares of which a trace is being recorded.
    traced: list[Share] = field(default_factory=list)

    def share(self, device: str | int | torch.device | None) -> Share:
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
    """Returns whether a model streams."""
    return "_tensorstream" in model.__dict__


def offloaded_in(model: nn.Module) -> nn.Module:
    """Returns the model itself if it is offloaded, else the only offloaded model that it contains.

    For example, a ``PeftModel`` contains its base model.

    Raises:
        ModelError: The model contains no offloaded model, or several.
    """
    found = {}
    if isinstance(model, nn.Module):
        modules = [("", model)] if is_offloaded(model) else model.named_modules()
        found = {name: each for name, each in modules if is_offloaded(each)}
    if len(found) > 1:
        raise ModelError(
            f"this {type(model).__name__} contains several offloaded models "
            f"({', '.join(f'`{name}`' for name in found)}); pass one of them"
        )
    if not found:
        raise ModelError(f"this {type(model).__name__} is not offloaded; call offload(model) first")
    return next(iter(found.values()))


def streaming_of(model: nn.Module) -> Streaming:
    """Returns the streaming state of an offloaded model, which another model may contain.

    Raises:
        ModelError: The model is not offloaded.
    """
    streaming = offloaded_in(model).__dict__["_tensorstream"]
    assert isinstance(streaming, Streaming)
    return streaming
