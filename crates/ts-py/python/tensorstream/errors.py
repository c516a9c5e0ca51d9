# SPDX-License-Identifier: MIT OR Apache-2.0
"""What can go wrong.

Every class is a :class:`TensorStreamError` and the built-in that says the same.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "BudgetWarning",
    "CheckpointChangedError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointPermissionError",
    "ChecksumError",
    "ConfigurationError",
    "ConnectionLost",
    "ConnectionTimeout",
    "MissingTensorError",
    "ModelError",
    "NotBuiltWarning",
    "OutOfMemoryError",
    "ProtocolError",
    "StorageError",
    "TensorStreamError",
    "UnitReferencedError",
]


class TensorStreamError(Exception):
    """Anything that TensorStream reports."""


class ConfigurationError(TensorStreamError, ValueError):
    """A setting is out of its range: the message names the field, the value and the range."""


class CheckpointError(TensorStreamError, ValueError):
    """A file is not the checkpoint it should be, or does not fit the model: names file, tensor and
    place.
    """


class MissingTensorError(CheckpointError, KeyError):
    """The checkpoint lacks a tensor that the model has."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class ChecksumError(CheckpointError):
    """Bytes of a file are not those that were written: names file, tensor and place."""


class CheckpointNotFoundError(TensorStreamError, FileNotFoundError):
    """There is no checkpoint at this path."""


class CheckpointPermissionError(TensorStreamError, PermissionError):
    """The system does not let this process read the checkpoint."""


class StorageError(TensorStreamError, OSError):
    """Reading failed: names file, tensor, byte and the system's error."""


class CheckpointChangedError(StorageError):
    """A file was truncated, replaced or written to while it was streamed."""


class BudgetError(TensorStreamError, MemoryError):
    """The budget is too small, or there is less memory than the smallest that works: the message
    gives both.
    """


class UnitReferencedError(TensorStreamError, RuntimeError):
    """Tensors of streamed weights that something keeps alive hold the memory that others need."""


class NotBuiltWarning(UserWarning):
    """A setting asks for what is not built yet: says what happens instead."""


class BudgetWarning(UserWarning):
    """The budget is more memory than there is: says how much there is, and what is used instead."""


class ModelError(TensorStreamError, TypeError):
    """The model, or what is done with it, cannot be streamed."""


class ConnectionLost(TensorStreamError, ConnectionError, RuntimeError):
    """The other end is gone, or wants no more: names it, and says what was under way."""


class ConnectionTimeout(TensorStreamError, TimeoutError, RuntimeError):
    """The other end has been silent, or has done nothing of what was waited for, for too long."""


class ProtocolError(TensorStreamError, RuntimeError):
    """The other end said what makes no sense, or cannot be trusted."""


class OutOfMemoryError(TensorStreamError, MemoryError):
    """There is no memory for a tensor: says how much it needs, and of which."""


class RemoteTensorError(TensorStreamError, RuntimeError):
    """An operator failed on its machine: says which, on what, and why.

    What it would have given is not there.
    """


class RemoteOutOfMemoryError(RemoteTensorError, OutOfMemoryError):
    """A machine had no memory for what an operator would have given."""


class StaleReferenceError(RemoteTensorError):
    """Something was asked of a tensor that its machine does not have, or no more."""


class CrossMachineError(TensorStreamError, RuntimeError):
    """Tensors of two machines, where they must be of one: names both."""
