# SPDX-License-Identifier: MIT OR Apache-2.0
"""Exceptions. Each is a ``TensorStreamError`` and also the matching built-in exception."""

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
    """The base class of TensorStream's own exceptions."""


class ConfigurationError(TensorStreamError, ValueError):
    """A setting is invalid. The message names the field, the value and what is expected."""


class CheckpointError(TensorStreamError, ValueError):
    """A checkpoint is invalid, or does not fit the model. Names file, tensor and offset."""


class MissingTensorError(CheckpointError, KeyError):
    """The checkpoint lacks a tensor that the model has."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class ChecksumError(CheckpointError):
    """Data differs from its checksum. Names file, tensor and offset."""


class CheckpointNotFoundError(TensorStreamError, FileNotFoundError):
    """There is no checkpoint at this path."""


class CheckpointPermissionError(TensorStreamError, PermissionError):
    """The process has no permission to read the checkpoint."""


class StorageError(TensorStreamError, OSError):
    """Reading or writing failed. Names file, tensor, offset and the system error."""


class CheckpointChangedError(StorageError):
    """A file was truncated, replaced or written to while it was streamed."""


class BudgetError(TensorStreamError, MemoryError):
    """The budget or the memory is too small. Gives the smallest budget that works."""


class UnitReferencedError(TensorStreamError, RuntimeError):
    """Another unit needs the memory of streamed weights that are still referenced."""


class NotBuiltWarning(UserWarning):
    """A setting requests a feature that does not exist yet. Names the fallback."""


class BudgetWarning(UserWarning):
    """The budget exceeds the available memory. Gives the budget that is used instead."""


class ModelError(TensorStreamError, TypeError):
    """The model cannot be streamed, or an operation on a streamed model is not supported."""


class ConnectionLost(TensorStreamError, ConnectionError, RuntimeError):
    """The connection was lost, or the peer refused or cancelled. Names the peer."""


class ConnectionTimeout(TensorStreamError, TimeoutError, RuntimeError):
    """The peer was silent or made no progress, or nothing arrived within a timeout."""


class ProtocolError(TensorStreamError, RuntimeError):
    """The peer sent invalid data, or cannot be trusted."""


class OutOfMemoryError(TensorStreamError, MemoryError):
    """There is not enough memory for a tensor. Gives its size."""


class RemoteTensorError(TensorStreamError, RuntimeError):
    """An operator failed on its machine. Gives the operator, its arguments and the cause."""


class RemoteOutOfMemoryError(RemoteTensorError, OutOfMemoryError):
    """A machine did not have enough memory for the result of an operator."""


class StaleReferenceError(RemoteTensorError):
    """A tensor no longer exists on its machine."""


class CrossMachineError(TensorStreamError, RuntimeError):
    """An operator got tensors of two machines. Names both."""
