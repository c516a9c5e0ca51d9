# SPDX-License-Identifier: MIT OR Apache-2.0
"""Accelerators: devices with their own memory, on which models run while their weights stream."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from . import _native
from .errors import ConfigurationError

if TYPE_CHECKING:
    import torch

#: The runtime library of each type of device, and the prefix of its functions.
_libraries: dict[str, tuple[str, str]] = {}


def register_accelerator(device_type: str, *, library: str | os.PathLike[str], prefix: str) -> None:
    """Makes a type of accelerator usable as ``device``. Needed for all but NVIDIA GPUs.

    Weights are copied to the device by functions of its runtime library, which must be those of
    CUDA's runtime under another prefix, such as ``hipMalloc``: with the same signatures, constants
    and rules. PyTorch must support the device through ``torch.accelerator``, and must tell the
    native handle of its streams (``torch.Stream.native_handle``).

    Loading a library runs its code. The library is loaded when the device is first used.

    Args:
        device_type: PyTorch's name of the type of device, such as "musa".
        library: The path of the library, or a name that the dynamic linker searches for.
        prefix: What the names of the functions begin with.

    Raises:
        ConfigurationError: The type is that of the CPU, or is registered with another library.

    Examples:
        >>> import tensorstream as ts
        >>> ts.register_accelerator("musa", library="libmusart.so", prefix="musa")
    """
    if device_type in ("cpu", "meta") or not device_type.isidentifier():
        raise ConfigurationError(
            f"invalid device type {device_type!r}: expected that of an accelerator, such as 'musa'"
        )
    wanted = os.fspath(library), prefix
    if _libraries.setdefault(device_type, wanted) != wanted:
        raise ConfigurationError(
            f"the accelerator {device_type!r} is registered with another library: "
            f"{_libraries[device_type]}"
        )


def device_of(device: str | int | torch.device) -> torch.device:
    """Returns a device with its number.

    Raises:
        ConfigurationError: It is not the name of a device.
    """
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"invalid device {device!r}: {str(error).splitlines()[0]}; expected one such as 'cpu' "
            "or 'cuda:0'"
        ) from error
    if found.type == "cpu":
        return torch.device("cpu")
    if found.index is not None:
        return found
    return torch.device(found.type, _current_index(found.type))


def default_device() -> torch.device | None:
    """Returns the accelerator of this machine if weights can stream to it, else ``None``."""
    import torch

    if not torch.accelerator.is_available():
        return None
    current = torch.accelerator.current_accelerator()
    if current is None or not (current.type in _libraries or current.type == "cuda"):
        return None
    return device_of(current.type)


def _current_index(device_type: str) -> int:
    import torch

    current = torch.accelerator.current_accelerator()
    if current is None or current.type != device_type or not torch.accelerator.is_available():
        return 0
    return torch.accelerator.current_device_index()


@functools.cache
def accelerator(device: torch.device) -> _native.Accelerator | None:
    """Opens a device that ``device_of`` has returned. Returns ``None`` for the CPU.

    Raises:
        ConfigurationError: There is no such device, or no library is registered for it.
    """
    import torch

    if device.type == "cpu":
        return None
    index = int(device.index)
    if device.type == "cuda" and "cuda" not in _libraries:
        if not torch.cuda.is_available():
            raise ConfigurationError(
                f"cannot use the device {device}: this PyTorch finds no NVIDIA GPU"
            )
        # PyTorch makes the context that the copies use, too.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        stream = functools.partial(torch._C._cuda_getCurrentRawStream, index)
        return _native.Accelerator(index, stream)
    if device.type not in _libraries:
        raise ConfigurationError(
            f"cannot use the device {device}: call tensorstream.register_accelerator("
            f"{device.type!r}, library=..., prefix=...) first, with its runtime library"
        )

    def current() -> int:
        stream: Any = torch.accelerator.current_stream(index)
        handle: int = stream.native_handle
        return handle

    found = _native.Accelerator(index, current, _libraries[device.type])
    try:
        current()
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        raise ConfigurationError(
            f"cannot use the device {device}: PyTorch does not tell its streams: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return found
