# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs PyTorch operators on other machines: the device ``ts``.

>>> from tensorstream.remote import RemoteMachine
>>> with RemoteMachine.local() as machine:
...     x = torch.randn(4, 4, device=machine.device())
...     (x @ x).cpu()

Calls return at once, and operators are sent in batches. Reading a value waits until it is computed.
"""

from ..errors import (
    ConnectionLost,
    CrossMachineError,
    ProtocolError,
    RemoteOutOfMemoryError,
    RemoteTensorError,
    StaleReferenceError,
)
from .client._machine import (
    RemoteMachine,
    Wait,
    create_local_machine,
    create_mock_machine,
    create_tcp_machine,
)
from .client._trace import Event, Trace, metadata_hash, storage_id, trace

__all__ = [
    "ConnectionLost",
    "CrossMachineError",
    "Event",
    "ProtocolError",
    "RemoteMachine",
    "RemoteOutOfMemoryError",
    "RemoteTensorError",
    "StaleReferenceError",
    "Trace",
    "Wait",
    "create_local_machine",
    "create_mock_machine",
    "create_tcp_machine",
    "metadata_hash",
    "storage_id",
    "trace",
]
