# SPDX-License-Identifier: MIT OR Apache-2.0
"""Accelerators: devices with their own memory, on which models run while their weights stream."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from . import _native
from .errors import ConfigurationError, DeviceUnavailableError

if TYPE_CHECKING:
    import torch

#: The name or the number of a device, or the device.
Device: TypeAlias = "str | int | torch.device"

#: The name for the device, or the devices, that this library chooses.
AUTOMATIC = "auto"
#: Where a device map leaves weights that are copied to the main device for computing.
HOST_DEVICES = ("cpu", "cpu:0", "disk")
#: The runtime library of each type of device, and the prefix of its functions.
_libraries: dict[str, tuple[str, str]] = {}
#: The types of devices whose library is loaded.
_opened: set[str] = set()
#: DLPack's types of devices.
_CUDA, _ROCM, _EXTENSION, _ONE_API = 2, 10, 12, 14


def register_accelerator(device_type: str, *, library: str | os.PathLike[str], prefix: str) -> None:
    """Makes a type of accelerator usable as ``device``. Needed for all but NVIDIA GPUs.

    Weights are copied to the device by functions of its runtime library, which must be those of
    CUDA's runtime under another prefix, such as ``musaMalloc``: with the same signatures, constants
    and rules. PyTorch must support the device through ``torch.accelerator``, must take its memory
    by DLPack, and must tell the native handle of its streams (``torch.Stream.native_handle``).

    Loading a library runs its code. The library is loaded when the device is first used.

    Args:
        device_type: PyTorch's name of the type of device, such as "musa".
        library: The path of the library, or a name that the dynamic linker searches for.
        prefix: What the names of the functions begin with.

    Raises:
        ConfigurationError: The type is that of the CPU, or another library was loaded for it.

    Examples:
        >>> import tensorstream as ts
        >>> ts.register_accelerator("musa", library="libmusart.so", prefix="musa")
    """
    if device_type in ("cpu", "meta") or not device_type.isidentifier():
        raise ConfigurationError(
            f"invalid device type {device_type!r}: expected that of an accelerator, such as 'musa'"
        )
    wanted = os.fspath(library), prefix
    if device_type in _opened and _libraries[device_type] != wanted:
        raise ConfigurationError(
            f"the accelerator {device_type!r} is in use with another library: "
            f"{_libraries[device_type][0]}; register it in a new process"
        )
    _libraries[device_type] = wanted


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
    # PyTorch keeps only the lowest bits of a number.
    if found.type == "meta" or (found.index is not None and found.index < 0):
        raise ConfigurationError(
            f"invalid device {device!r}: expected one such as 'cpu' or 'cuda:0'"
        )
    if found.index is not None:
        return found
    return torch.device(found.type, _current_index(found.type))


def devices_of_map(device_map: Mapping[str, Device]) -> dict[torch.device, None]:
    """Returns the accelerators of a device map, the main one first. Those of the CPU if none.

    The main device is the first one. What the map leaves on the CPU or the disk streams to it.

    Raises:
        ConfigurationError: The map is empty, or has something else than devices.
    """
    found: dict[torch.device, None] = {}
    for name, device in device_map.items():
        if not isinstance(name, str):
            raise ConfigurationError(f"invalid device map: {name!r} is not the name of a module")
        if str(device) not in HOST_DEVICES:
            found[device_of(device)] = None
    if not device_map:
        raise ConfigurationError("invalid device map: it names no module")
    return found or {device_of("cpu"): None}


def default_device() -> torch.device | None:
    """Returns the accelerator of this machine if weights can stream to it, else ``None``."""
    import torch

    if not torch.accelerator.is_available():
        return None
    current = torch.accelerator.current_accelerator()
    if current is None:
        return None
    is_nvidia = current.type == "cuda" and torch.version.hip is None
    if current.type in _libraries or (is_nvidia and _native.GpuStatus.detect().is_available):
        return device_of(current.type)
    return None


def usable_devices() -> list[torch.device]:
    """Returns the accelerators of this machine to which weights can stream, the default first."""
    import torch

    first = default_device()
    if first is None:
        return []
    every = (torch.device(first.type, index) for index in range(torch.accelerator.device_count()))
    return list(dict.fromkeys([first, *every]))


def has_accelerator() -> bool:
    """Returns whether weights may be able to stream to an accelerator. Does not import torch."""
    return bool(_libraries) or _native.GpuStatus.detect().is_available


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
        DeviceUnavailableError: The device does not exist.
        ConfigurationError: Its library is not registered.
    """
    import torch

    if device.type == "cpu":
        return None
    index = int(device.index)
    if device.type == "cuda" and "cuda" not in _libraries:
        if not torch.cuda.is_available() or torch.version.hip is not None:
            raise DeviceUnavailableError(
                f"cannot use the device {device}: this PyTorch finds no NVIDIA GPU"
            )
        # PyTorch makes the context that the copies use, too.
        torch.cuda.init()  # type: ignore[no-untyped-call]  # PyTorch gives it no types
        stream = functools.partial(torch._C._cuda_getCurrentRawStream, index)
        return _native.Accelerator(str(device), index, _CUDA, stream)
    if device.type not in _libraries:
        raise ConfigurationError(
            f"cannot use the device {device}: call tensorstream.register_accelerator("
            f"{device.type!r}, library=..., prefix=...) first, with its runtime library"
        )
    present = torch.accelerator.current_accelerator()
    if present is None or present.type != device.type:
        raise DeviceUnavailableError(
            f"cannot use the device {device}: the accelerator of this PyTorch is {present}"
        )

    def current() -> int:
        stream: Any = torch.accelerator.current_stream(index)
        handle: int = stream.native_handle
        return handle

    found = _native.Accelerator(
        str(device), index, _dlpack_type(device), current, _libraries[device.type]
    )
    _opened.add(device.type)
    try:
        current()
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        raise ConfigurationError(
            f"cannot use the device {device}: PyTorch does not tell its streams: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return found


def _dlpack_type(device: torch.device) -> int:
    """Returns the type of a device in DLPack, from which PyTorch makes tensors of this device."""
    import torch

    known = {"cuda": _ROCM if torch.version.hip else _CUDA, "xpu": _ONE_API}
    own: str = torch._C._get_privateuse1_backend_name()
    known[own] = _EXTENSION
    if device.type not in known:
        raise ConfigurationError(
            f"cannot use the device {device}: PyTorch does not take its memory by DLPack"
        )
    return known[device.type]
