# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams and events of the device ``ts``.

A machine runs operators in the order in which they are called, so all streams of a device are one
queue, and waits between streams need no request. Streams and events exist for programs that use
them with other devices. Reading a tensor waits for its value, whatever the streams are.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any

import torch

from ...errors import ConfigurationError
from .. import _registry
from . import _server_operators as _operators

#: The type of the device, as ``torch.Stream`` numbers it.
TYPE: int = torch._C._autograd.DeviceType.PrivateUse1.value
#: Numbers streams and events. The default stream of each device is 0, as is an unrecorded event.
_numbers = itertools.count(1)


class _OfThread(threading.local):
    """The streams of a thread."""

    def __init__(self) -> None:
        #: The current stream of each device.
        self.current: dict[int, Stream] = {}
        #: For each ``with`` block of a stream: the device and the stream to which it returns.
        self.outer: list[tuple[int, Stream]] = []


_of_thread = _OfThread()


def _known(device: Any) -> int:
    """Returns the index of a device, by default the current one, which must exist."""
    index = _registry.index_of(device)
    _registry.require(index)
    return index


class _StreamClass(type):
    """Makes ``Stream(device)`` choose the index of the device and a new number.

    PyTorch would ask the guard of the device, which cannot be implemented in Python. ``__new__``
    cannot do this, because it would call the function that ``create_stream`` replaces.
    """

    def __call__(cls, device: Any = None, priority: int = 0, **fields: int) -> Any:
        if not fields:
            number, index = next(_numbers), _known(device)
            fields = {"stream_id": number, "device_index": index, "device_type": TYPE}
        return super().__call__(priority=priority, **fields)


class Stream(torch.Stream, metaclass=_StreamClass):
    """A stream of a device ``ts``, as ``torch.Stream(device)`` returns it.

    Args:
        device: The device. The default is the current one.
        priority: Ignored.
    """

    def query(self) -> bool:
        """Returns True: reading a result waits for it."""
        return True

    def synchronize(self) -> None:
        """Blocks until the machine has run all operators called so far."""
        _synchronize(self.device_index)

    def wait_event(self, event: torch.Event) -> None:
        """Does nothing, because the machine runs operators in order."""

    def wait_stream(self, other: torch.Stream) -> None:
        """Does nothing, because the machine runs operators in order."""

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Records an event, by default a new one, and returns it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        _of_thread.outer.append((_registry.current_device(), current_stream(self.device_index)))
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        device, outer = _of_thread.outer.pop()
        set_stream(outer)
        _registry.set_device(device)


class Event(torch.Event):
    """An event of a device ``ts``, as ``torch.Event(device)`` returns it.

    An event with timing reads the clock of its machine. Recording it does not block.

    Args:
        device: Ignored. The stream that records the event decides.
        enable_timing: Whether ``elapsed_time`` can be called.
        blocking: Ignored.
        interprocess: Ignored.
    """

    # Those of PyTorch's class cannot be set.
    device: Any = None
    event_id: int = 0

    def __init__(
        self,
        device: Any = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        self.device = torch.device("ts")
        self._is_timed = enable_timing
        #: The time of the machine in nanoseconds, as a tensor on it.
        self._time: torch.Tensor | None = None

    def record(self, stream: torch.Stream | None = None) -> None:
        """Records the operators called so far. The stream decides the device."""
        index = _registry.current_device() if stream is None else stream.device_index
        self.event_id = next(_numbers)
        self.device = torch.device("ts", index)
        if self._is_timed:
            self._time = _operators.CLOCK(_operators.anchor(index))

    def query(self) -> bool:
        """Returns True: reading a result waits for it."""
        return True

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Does nothing, because the machine runs operators in order."""

    def synchronize(self) -> None:
        """Blocks until the machine has run what was recorded, and maybe later operators."""
        if self.device.index is not None:
            _synchronize(self.device.index)

    def elapsed_time(self, other: torch.Event) -> float:
        """Returns the time from this event to another one of the same machine, in ms. Blocks.

        Raises:
            ConfigurationError: One of the events has no time, or they are of different machines.
        """
        if not (isinstance(other, Event) and self._is_timed and other._is_timed):
            raise ConfigurationError(
                "Both events must be created with argument 'enable_timing=True'."
            )
        if self._time is None or other._time is None:
            raise ConfigurationError(
                "Both events must be recorded before calculating elapsed time."
            )
        if _machine(self.device.index) != _machine(other.device.index):
            raise ConfigurationError(
                f"cannot compare the times of {self.device} and {other.device}: their machines "
                "have different clocks"
            )
        return float(other._time.item() - self._time.item()) / 1e6

    def __repr__(self) -> str:
        return f"torch.Event device={self.device}, event_id={self.event_id}"


def _machine(index: int) -> int | None:
    """Returns the index of the first device of a device's machine, or None if it does not run."""
    return _registry.ADDRESSES.get(index, (None,))[0]


def _synchronize(index: int) -> None:
    """Blocks until the machine of a device has run all operators called so far."""
    _registry.init()
    first = _machine(index)
    if first is not None:
        _registry.SESSIONS[first].synchronize()


def default_stream(device: Any = None) -> Stream:
    """Returns the stream that is current until another one is set."""
    stream: Stream = Stream(stream_id=0, device_index=_known(device), device_type=TYPE)
    return stream


def current_stream(device: Any = None) -> Stream:
    """Returns this thread's current stream of a device, by default of the current device."""
    return _of_thread.current.get(_known(device)) or default_stream(device)


def set_stream(stream: Stream) -> None:
    """Makes a stream this thread's current one of its device, and the device the current one."""
    _of_thread.current[stream.device_index] = stream
    _registry.set_device(stream.device_index)


def stream(stream: Stream | None) -> contextlib.AbstractContextManager[Stream | None]:
    """Returns a context manager that sets the current stream. It does nothing for None."""
    return contextlib.nullcontext() if stream is None else stream
