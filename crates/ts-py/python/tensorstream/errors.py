# SPDX-License-Identifier: MIT OR Apache-2.0
"""Exceptions. Each is a ``TensorStreamError`` and also the built-in one that fits."""

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
    """The base class of all exceptions of TensorStream."""


class ConfigurationError(TensorStreamError, ValueError):
    """A setting is invalid. The message names the field, the value and what is expected."""


class CheckpointError(TensorStreamError, ValueError):
    """A file is no valid checkpoint, or does not fit the model. Names file, tensor and offset."""


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
    """The budget is too small, or there is too little memory. Names the smallest that works."""


class UnitReferencedError(TensorStreamError, RuntimeError):
    """Tensors of streamed weights are still referenced, and others need their memory."""


class NotBuiltWarning(UserWarning):
    """A setting requests a feature that does not exist yet. Says what happens instead."""


class BudgetWarning(UserWarning):
    """The budget exceeds the available memory. Says how much is used instead."""


class ModelError(TensorStreamError, TypeError):
    """The model cannot be streamed, or an operation on a streamed model is not supported."""


class ConnectionLost(TensorStreamError, ConnectionError, RuntimeError):
    """The connection is lost, or the peer refused or cancelled. Names the peer."""


class ConnectionTimeout(TensorStreamError, TimeoutError, RuntimeError):
    """The peer was silent, or made no progress, or nothing arrived within a timeout."""


class ProtocolError(TensorStreamError, RuntimeError):
    """The peer sent invalid data, or cannot be trusted."""


class OutOfMemoryError(TensorStreamError, MemoryError):
    """There is no memory for a tensor. Says how much it needs."""


class RemoteTensorError(TensorStreamError, RuntimeError):
    """An operator failed on its machine. Names the operator, its arguments and the cause."""


class RemoteOutOfMemoryError(RemoteTensorError, OutOfMemoryError):
    """A machine had no memory for the result of an operator."""


class StaleReferenceError(RemoteTensorError):
    """A tensor no longer exists on its machine."""


class CrossMachineError(TensorStreamError, RuntimeError):
    """An operator got tensors of two machines. Names both."""
