# SPDX-License-Identifier: MIT OR Apache-2.0
"""Makes libraries that choose a device by themselves choose a remote one."""

from __future__ import annotations

import os
import sys
from types import TracebackType

import torch

from ...errors import ConfigurationError
from .. import _registry
from ._machine import RemoteMachine

#: The environment variable with which accelerate, and so ``Trainer``, chooses a device.
_VARIABLE = "ACCELERATE_TORCH_DEVICE"


class Use:
    """The effect of ``use``. At the end of a ``with`` block, it ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._variable, self._index = os.environ.get(_VARIABLE), _registry.current_device()
        os.environ[_VARIABLE] = str(device)
        _registry.set_device(device)

    def __enter__(self) -> torch.device:
        return self.device

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._variable is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = self._variable
        _registry.set_device(self._index)


def use(machine: RemoteMachine | torch.device) -> Use:
    """Makes a machine the device that accelerate, and transformers' ``Trainer``, choose.

    It also becomes the current device ``ts`` of this thread. Call it before the first
    ``Accelerator`` or ``TrainingArguments`` is created, because accelerate chooses once in a
    process.

    Args:
        machine: The machine, whose first device is used, or a device of one.

    Returns:
        A context manager, which need not be used. Its value is the device.

    Raises:
        ConfigurationError: The machine does not run, or accelerate has chosen another device.

    Examples:
        >>> from tensorstream.remote import RemoteMachine, use
        >>> with RemoteMachine.mock() as machine, use(machine) as device:
        ...     device == machine.device()
        True
    """
    device = machine.device() if isinstance(machine, RemoteMachine) else torch.device(machine)
    if device.type != "ts" or _registry.index_of(device) not in _registry.ADDRESSES:
        raise ConfigurationError(f"invalid machine {machine!r}: no machine that runs has {device}")
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    chosen = getattr(state, "_shared_state", {}).get("device")
    if chosen is not None and torch.device(chosen) != device:
        raise ConfigurationError(
            f"accelerate has chosen the device {chosen} in this process: call use() before the "
            "first Accelerator or TrainingArguments is created"
        )
    return Use(device)
