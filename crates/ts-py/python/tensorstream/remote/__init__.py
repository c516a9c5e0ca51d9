# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs PyTorch operators on other machines, through the device ``ts``.

Most operator calls return at once, and are sent in batches. Reading a value waits until it is
computed.

Examples:
    >>> import torch
    >>> from tensorstream.remote import RemoteMachine
    >>> with RemoteMachine.mock() as machine:
    ...     x = torch.ones(2, 2, device=machine.device())
    ...     (x @ x).tolist()
    [[2.0, 2.0], [2.0, 2.0]]
"""

import sys
import types
from typing import Any

from ..errors import (
    ConnectionLost,
    CrossMachineError,
    ProtocolError,
    ProviderAuthenticationError,
    ProviderCapacityError,
    ProviderConnectionError,
    ProviderError,
    RemoteOutOfMemoryError,
    RemoteTensorError,
    StaleReferenceError,
)
from .client._checkpoint import load_huggingface_state_dicts, load_state_dict
from .client._connection import MachineConnection
from .client._create import (
    create_local_machine,
    create_mock_machine,
    create_modal_machine,
    create_ray_machine,
    create_ray_machines,
    create_ssh_machine,
    create_tcp_machine,
)
from .client._dispatch import dispatch, placement
from .client._functions import function
from .client._machine import RemoteMachine, Wait
from .client._trace import Event, Trace, metadata_hash, storage_id, trace
from .client._use import use

__all__ = [
    "ConnectionLost",
    "CrossMachineError",
    "Event",
    "MachineConnection",
    "ProtocolError",
    "ProviderAuthenticationError",
    "ProviderCapacityError",
    "ProviderConnectionError",
    "ProviderError",
    "RemoteMachine",
    "RemoteOutOfMemoryError",
    "RemoteTensorError",
    "StaleReferenceError",
    "Trace",
    "Wait",
    "create_local_machine",
    "create_mock_machine",
    "create_modal_machine",
    "create_ray_machine",
    "create_ray_machines",
    "create_ssh_machine",
    "create_tcp_machine",
    "dispatch",
    "function",
    "load_huggingface_state_dicts",
    "load_state_dict",
    "metadata_hash",
    "placement",
    "storage_id",
    "trace",
    "use",
]


class _Decorator(types.ModuleType):
    """This module, which is also the decorator ``function``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


sys.modules[__name__].__class__ = _Decorator
