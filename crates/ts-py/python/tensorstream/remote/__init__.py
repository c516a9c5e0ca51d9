# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors on machines that are elsewhere: PyTorch's device ``ts``.

>>> from tensorstream.remote import RemoteMachine
>>> with RemoteMachine("local") as machine:
...     x = torch.randn(4, 4, device=machine.device())
...     (x @ x).cpu()

Operators are asked of the machine and not waited for; a value that the program looks at is.
"""

from ..errors import (
    ConnectionLost,
    CrossMachineError,
    ProtocolError,
    RemoteOutOfMemoryError,
    RemoteTensorError,
    StaleReferenceError,
)
from ._machine import RemoteMachine, create_local_machine, create_mock_machine, create_tcp_machine
from ._trace import Event, Trace, metadata_hash, storage_id, trace

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
    "create_local_machine",
    "create_mock_machine",
    "create_tcp_machine",
    "metadata_hash",
    "storage_id",
    "trace",
]
