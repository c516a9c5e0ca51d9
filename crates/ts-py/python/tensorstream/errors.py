# SPDX-License-Identifier: MIT OR Apache-2.0
"""The exceptions and warnings of TensorStream.

Each exception is a ``TensorStreamError`` and also the matching built-in exception.
"""

from __future__ import annotations

__all__ = [
    "ArgumentTypeError",
    "BudgetError",
    "BudgetWarning",
    "CheckpointChangedError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointPermissionError",
    "CheckpointWarning",
    "ChecksumError",
    "ConfigurationError",
    "ConnectionLost",
    "ConnectionTimeout",
    "DeviceError",
    "DeviceUnavailableError",
    "MissingTensorError",
    "ModelError",
    "NotBuiltWarning",
    "OutOfMemoryError",
    "ProtocolError",
    "ProviderAuthenticationError",
    "ProviderCapacityError",
    "ProviderConnectionError",
    "ProviderError",
    "StorageError",
    "TensorIndexError",
    "TensorStreamError",
    "UnitReferencedError",
]


class TensorStreamError(Exception):
    """The base class of TensorStream's own exceptions.

    Examples:
        >>> import tensorstream as ts
        >>> try:
        ...     tensors = ts.load_file("missing.safetensors")
        ... except ts.TensorStreamError as error:
        ...     print(type(error).__name__)
        CheckpointNotFoundError
    """


class ConfigurationError(TensorStreamError, ValueError):
    """A setting or an argument is invalid, or a call is not allowed now.

    If a value is invalid, the message names the setting, the value and the expected values.

    Examples:
        >>> import tensorstream as ts
        >>> ts.Config(max_passes=0)
        Traceback (most recent call last):
            ...
        tensorstream.errors.ConfigurationError: invalid Config.max_passes: 0: expected ...
    """


class TensorIndexError(ConfigurationError, IndexError):
    """An index of a tensor in a file is out of bounds or not supported.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.arange(3)}, "a.safetensors")
        >>> ts.safe_open("a.safetensors").get_slice("a")[3]
        Traceback (most recent call last):
            ...
        tensorstream.errors.TensorIndexError: ...
    """


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument has the wrong type.

    Examples:
        >>> import tensorstream as ts
        >>> ts.load_file(3)
        Traceback (most recent call last):
            ...
        tensorstream.errors.ArgumentTypeError: ...
    """


class CheckpointError(TensorStreamError, ValueError):
    """A checkpoint is invalid, or does not fit the model.

    The message names the file, and the tensor and offset if the error concerns one.

    Examples:
        >>> import tensorstream as ts
        >>> with open("bad.safetensors", "wb") as file:
        ...     size = file.write(b"weights" * 99)
        >>> ts.load_file("bad.safetensors")
        Traceback (most recent call last):
            ...
        tensorstream.errors.CheckpointError: ...
    """


class MissingTensorError(CheckpointError, KeyError):
    """The checkpoint lacks a tensor that the model needs or that the caller requested.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.arange(3)}, "a.safetensors")
        >>> ts.safe_open("a.safetensors").get_tensor("b")
        Traceback (most recent call last):
            ...
        tensorstream.errors.MissingTensorError: ...
    """

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class ChecksumError(CheckpointError):
    """Data differs from its checksum. The message names the file, the tensor and the offset.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.zeros(4096)}, "a.ts")
        >>> with open("a.ts", "r+b") as file:
        ...     offset = file.seek(8192)
        ...     size = file.write(b"damage")
        >>> ts.load_file("a.ts")
        Traceback (most recent call last):
            ...
        tensorstream.errors.ChecksumError: ...
    """


class CheckpointNotFoundError(TensorStreamError, FileNotFoundError):
    """There is no checkpoint at this path or URL.

    Examples:
        >>> import tensorstream as ts
        >>> ts.load_file("missing.safetensors")
        Traceback (most recent call last):
            ...
        tensorstream.errors.CheckpointNotFoundError: ...
    """


class CheckpointPermissionError(TensorStreamError, PermissionError):
    """The process has no permission to read a checkpoint, or to write a file or directory.

    Examples:
        >>> import tensorstream as ts
        >>> issubclass(ts.CheckpointPermissionError, PermissionError)
        True
    """


class StorageError(TensorStreamError, OSError):
    """Reading or writing failed.

    The message names the file and the cause, and the tensor and offset if the error concerns one.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.arange(3)}, "missing/a.ts")
        Traceback (most recent call last):
            ...
        tensorstream.errors.StorageError: ...
    """


class CheckpointChangedError(StorageError):
    """A file was truncated or written to after it was opened, or an object on a server changed.

    A file that was removed, renamed or replaced is not an error: it exists while it is open.
    ``reload`` makes a model stream the new content.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.zeros(3)}, "a.ts")
        >>> file = ts.safe_open("a.ts", mapped=True)
        >>> ts.append_file({"b": torch.ones(3)}, "a.ts")
        >>> file.get_tensor("a")
        Traceback (most recent call last):
            ...
        tensorstream.errors.CheckpointChangedError: ...
    """


class BudgetError(TensorStreamError, MemoryError):
    """The budget or the available memory is too small.

    If the budget is too small, the message contains the smallest budget that works.

    Attributes:
        smallest: The smallest budget that works, in bytes. ``None`` if too little memory is
            available, or if the smallest budget is unknown.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a.weight": torch.zeros(4096)}, "a.ts")
        >>> try:
        ...     plan = ts.plan("a.ts", budget="1KiB")
        ... except ts.BudgetError as error:
        ...     plan = ts.plan("a.ts", budget=error.smallest)
        >>> plan.budget_bytes >= 4 * 4096
        True
    """

    def __init__(self, message: str = "", smallest: int | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest


class UnitReferencedError(TensorStreamError, RuntimeError):
    """Another unit needs the memory of streamed weights that are still referenced.

    The message names the units with references. Delete the references, or raise the budget.

    Examples:
        >>> import tensorstream as ts
        >>> issubclass(ts.UnitReferencedError, RuntimeError)
        True
    """


class NotBuiltWarning(UserWarning):
    """A setting or a call requests what this version or this computer lacks.

    The message names the fallback. The logger ``tensorstream`` gets the message, too.

    Examples:
        >>> import tensorstream as ts, warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", ts.NotBuiltWarning)
        ...     config = ts.Config(backend="cuda")
    """


class BudgetWarning(UserWarning):
    """The budget was reduced to the available memory. The message contains the new budget.

    Examples:
        >>> import tensorstream as ts, torch, warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", ts.BudgetWarning)  # raise it instead
        ...     config = ts.Config(storage_path="weights", budget="1MiB")
        ...     model = ts.offload(torch.nn.Linear(4, 4), config)
    """


class CheckpointWarning(UserWarning):
    """A checkpoint has tensors that the model does not have. The message names one of them.

    Examples:
        >>> import tensorstream as ts, torch, warnings
        >>> tensors = {"weight": torch.eye(4), "bias": torch.ones(4), "more": torch.ones(1)}
        >>> ts.save_file(tensors, "a.ts")
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", ts.CheckpointWarning)  # raise it instead
        ...     ts.offload(torch.nn.Linear(4, 4), checkpoint="a.ts", budget="64KiB")
        Traceback (most recent call last):
            ...
        tensorstream.errors.CheckpointWarning: ...
    """


class ModelError(TensorStreamError, RuntimeError):
    """The model cannot be streamed, or an operation on a streamed model is not supported.

    Also raised if PyTorch or NumPy lacks a dtype.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.restore(torch.nn.Linear(4, 4))
        Traceback (most recent call last):
            ...
        tensorstream.errors.ModelError: ...
    """


class ConnectionLost(TensorStreamError, ConnectionError, RuntimeError):
    """The peer cannot be reached, refused the connection, closed it or cancelled a transfer.

    Also raised if a connection is lost, or if an address cannot be used to listen.

    Examples:
        >>> import tensorstream as ts
        >>> ts.connect("unix:missing.socket")
        Traceback (most recent call last):
            ...
        tensorstream.errors.ConnectionLost: ...
    """


class ConnectionTimeout(TensorStreamError, TimeoutError, RuntimeError):
    """The peer was silent or made no progress, or a call did not complete within its timeout.

    Examples:
        >>> import tensorstream as ts
        >>> with ts.listen("127.0.0.1:0") as listener:
        ...     listener.accept(timeout=0.01)
        Traceback (most recent call last):
            ...
        tensorstream.errors.ConnectionTimeout: ...
    """


class ProtocolError(TensorStreamError, RuntimeError):
    """The peer sent invalid data, or its identity could not be verified.

    Examples:
        >>> import tensorstream as ts
        >>> issubclass(ts.ProtocolError, RuntimeError)
        True
    """


class ProviderError(TensorStreamError, RuntimeError):
    """A provider cannot start a machine.

    Examples:
        >>> from tensorstream.errors import ProviderCapacityError, ProviderError
        >>> issubclass(ProviderCapacityError, ProviderError)
        True
    """


class ProviderConnectionError(ProviderError, ConnectionLost):
    """The machine, or the service that provides it, cannot be reached.

    Examples:
        >>> from tensorstream.errors import ConnectionLost, ProviderConnectionError
        >>> issubclass(ProviderConnectionError, ConnectionLost)
        True
    """


class ProviderAuthenticationError(ProviderError, PermissionError):
    """The machine, or the service that provides it, does not accept the user.

    Examples:
        >>> from tensorstream.errors import ProviderAuthenticationError
        >>> issubclass(ProviderAuthenticationError, PermissionError)
        True
    """


class ProviderCapacityError(ProviderError):
    """The provider has no free machine, devices or memory.

    Examples:
        >>> from tensorstream.errors import ProviderCapacityError, ProviderError
        >>> issubclass(ProviderCapacityError, ProviderError)
        True
    """


class OutOfMemoryError(TensorStreamError, MemoryError):
    """There is not enough memory for a tensor, or a received tensor exceeds ``limit_bytes``.

    The message contains the size of the tensor.

    Examples:
        >>> import tensorstream as ts
        >>> issubclass(ts.OutOfMemoryError, MemoryError)
        True
    """


class DeviceError(TensorStreamError, RuntimeError):
    """A GPU or its driver failed. The message names the call of the driver.

    Examples:
        >>> import tensorstream as ts
        >>> issubclass(ts.DeviceError, MemoryError)
        False
    """


class DeviceUnavailableError(DeviceError, ConfigurationError):
    """A GPU does not exist on this computer, or cannot be used. The message contains the reason.

    It is not an ``OutOfMemoryError``: no smaller request would succeed.

    Examples:
        >>> import tensorstream as ts
        >>> ts.TensorBuffer.allocate_gpu(1024, device_id=99)
        Traceback (most recent call last):
            ...
        tensorstream.errors.DeviceUnavailableError: ...
    """


class RemoteTensorError(TensorStreamError, RuntimeError):
    """An operator failed on its machine.

    The message names the operator, its arguments, the line of the program and the cause.

    Examples:
        >>> import torch
        >>> from tensorstream.remote import RemoteMachine, RemoteTensorError
        >>> with RemoteMachine.mock() as machine:
        ...     x = torch.ones(3, device=machine.device())
        ...     indices = torch.tensor([9], device=machine.device())
        ...     try:
        ...         x.index_select(0, indices).tolist()
        ...     except RemoteTensorError as error:
        ...         print("aten::index_select" in str(error))
        True
    """


class RemoteOutOfMemoryError(RemoteTensorError, OutOfMemoryError):
    """A machine did not have enough memory for the result of an operator.

    Examples:
        >>> from tensorstream.remote import RemoteOutOfMemoryError
        >>> issubclass(RemoteOutOfMemoryError, MemoryError)
        True
    """


class StaleReferenceError(RemoteTensorError):
    """A tensor no longer exists on its machine, for example because its session ended.

    Examples:
        >>> import torch
        >>> from tensorstream.remote import RemoteMachine, StaleReferenceError
        >>> with RemoteMachine.mock() as machine:
        ...     x = torch.ones(3, device=machine.device())
        ...     machine.stop()
        ...     restarted = machine.start()
        ...     try:
        ...         x.tolist()
        ...     except StaleReferenceError:
        ...         print("the tensor is lost")
        the tensor is lost
    """


class CrossMachineError(TensorStreamError, RuntimeError):
    """An operator got tensors of two machines. The message names both machines.

    Examples:
        >>> import torch
        >>> from tensorstream.remote import CrossMachineError, RemoteMachine
        >>> with RemoteMachine.mock() as one, RemoteMachine.mock() as other:
        ...     x, y = torch.ones(1, device=one.device()), torch.ones(1, device=other.device())
        ...     try:
        ...         x + y
        ...     except CrossMachineError:
        ...         (x + y.to(x.device)).tolist()
        [2.0]
    """
