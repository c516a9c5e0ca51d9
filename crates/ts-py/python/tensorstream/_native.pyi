# SPDX-License-Identifier: MIT OR Apache-2.0
from collections.abc import Callable, Sequence
from mmap import mmap
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, final

import torch

from .config import Settings as _Settings
from .streaming._stats import Stats as _Stats
from .streams import ProfileReport as _ProfileReport
from .wire._connection import ConnectionStats as _ConnectionStats

__all__ = [
    "DTYPES",
    "Accelerator",
    "Checkpoint",
    "Connection",
    "Conversion",
    "CudaStream",
    "DType",
    "Device",
    "DeviceBuffer",
    "Dispatcher",
    "EnergyMeter",
    "Event",
    "Execution",
    "Expected",
    "FileWriter",
    "Fingerprint",
    "GpuMemoryPool",
    "GpuStatus",
    "Handoff",
    "Listener",
    "ModuleCalls",
    "MultiStreamCoordinator",
    "Pass",
    "PassedSource",
    "PeerSession",
    "PinnedMemoryPool",
    "PoolConfig",
    "Preview",
    "Progress",
    "Relay",
    "RelayClient",
    "RemoteKernel",
    "RemoteServer",
    "RemoteSession",
    "Scope",
    "StreamOrderedAllocator",
    "StreamPool",
    "StreamProfiler",
    "StreamedTensor",
    "StreamedTensors",
    "Streamer",
    "Tensor",
    "TensorBuffer",
    "TensorCreditTracker",
    "TensorMeta",
    "Use",
    "WeightRef",
    "__version__",
    "available_memory",
    "backends",
    "cache_directory",
    "checkpoint_file",
    "compact",
    "connect",
    "convert",
    "kept_bytes",
    "leave_shared",
    "listen",
    "main",
    "modules",
    "named_modules",
    "named_tensors",
    "note_made",
    "open_file",
    "parse_bytes",
    "plan",
    "read_cached",
    "remote_cache_stats",
    "remote_create_with",
    "remote_download",
    "remote_empty",
    "remote_forked",
    "remote_names",
    "remote_scalar",
    "remote_setup",
    "remote_trace",
    "remote_upload",
    "remote_whole",
    "remove_unfinished",
    "requirement",
    "sandbox",
    "set_share",
    "shared_bytes",
    "shared_directory",
    "smallest_budget",
    "trim",
    "write_cached",
]

__version__: str

#: For each dtype: its name, its safetensors name (None if checkpoints cannot contain the dtype),
#: its ``c10::ScalarType`` number, and the size of an element in bytes.
DTYPES: list[tuple[str, str | None, int, int]]

_Path: TypeAlias = str | PathLike[str]
_bool: TypeAlias = bool  # DType has a method of that name
_Part: TypeAlias = tuple[int, int, int]
_TensorSpec: TypeAlias = tuple[str, str, list[int], list[_Part], int | None]
_WeightSpec: TypeAlias = tuple[int, int, tuple[list[int], list[int]] | None, str, torch.dtype]
_Descriptors: TypeAlias = tuple[int, tuple[int, int] | None]
_NewTensorSpec: TypeAlias = tuple[str, str, list[int], int | None]

def parse_bytes(text: str) -> int: ...
def cache_directory() -> Path | None:
    """Returns the directory for files that make later runs faster, if there is a home directory."""

def read_cached(path: Path) -> str | None:
    """Reads a file that ``write_cached`` has written. None if it is no such file."""

def write_cached(path: Path, text: str) -> None:
    """Writes a small file atomically, and creates its directory. Ignores failures."""

def remove_unfinished(directory: Path) -> None:
    """Removes unfinished files of weights that no process is writing."""

def note_made(path: Path) -> None:
    """Notes that a file was made from a checkpoint. If it turns out to be damaged, it is removed,
    so that the next load makes it again."""

def available_memory() -> int | None: ...
def backends() -> list[str]:
    """Returns the names of the I/O backends in this build. The preferred one is first.

    Examples:
        >>> import tensorstream as ts
        >>> next(iter(ts.backends()))
        'adaptive'
    """

def leave_shared() -> None: ...
def modules(model: torch.nn.Module) -> list[torch.nn.Module]: ...
def named_modules(
    model: torch.nn.Module, prefix: str, remove_duplicate: _bool
) -> list[tuple[str, torch.nn.Module]]: ...
def named_tensors(
    model: torch.nn.Module, kind: str, remove_duplicate: _bool
) -> list[tuple[str, Any]]: ...
def shared_bytes(checkpoint: Checkpoint, directory: _Path) -> int: ...
def shared_directory() -> Path: ...
def smallest_budget(sizes: list[int], together: list[list[int]], max_passes: int) -> int: ...
def requirement(
    checkpoint: Checkpoint,
    units: list[tuple[str, list[_TensorSpec], _bool]] | None,
    *,
    together: list[list[int]],
    settings: _Settings,
    tables: Sequence[tuple[Any, torch.dtype]] = ...,
    any_phase: _bool = ...,
) -> tuple[int, int]: ...
def plan(
    checkpoint: Checkpoint,
    *,
    budget: int,
    settings: _Settings | None = None,
    units: list[tuple[str, list[_TensorSpec], _bool]] | None = None,
    together: list[list[int]] = ...,
    tables: Sequence[tuple[Any, torch.dtype]] = ...,
    smallest: int | None = None,
) -> dict[str, Any]: ...
def connect(
    to: str, settings: dict[str, Any], ca: _Path | None, cert: _Path | None, key: _Path | None
) -> Connection: ...
def listen(
    at: str,
    settings: dict[str, Any],
    ca: _Path | None,
    cert: _Path | None,
    key: _Path | None,
    insecure: bool,
) -> Listener: ...
def open_file(path: _Path) -> _Descriptors: ...
def checkpoint_file(directory: _Path) -> Path: ...
def trim() -> int: ...
def kept_bytes() -> int: ...
def compact(path: _Path) -> tuple[int, int]: ...
def convert(
    source: _Path,
    target: _Path,
    codec: str = "raw",
    level: int | None = None,
    jobs: int = 0,
    max_shard_bytes: int | None = None,
) -> tuple[int, int]: ...
def main(arguments: list[str], serve_device: Callable[[str], int]) -> int: ...

@final
class Conversion:
    def __new__(
        cls,
        source: _Path,
        target: _Path,
        codec: str,
        level: int | None,
        jobs: int,
        max_shard_bytes: int | None,
    ) -> Conversion: ...
    def progress(self) -> tuple[int, int]: ...
    def cancel(self) -> None: ...
    def wait(self, seconds: float) -> _bool | None: ...

@final
class Checkpoint:
    def __new__(cls, path: _Path, lenient: bool = False) -> Checkpoint: ...
    @staticmethod
    def from_bytes(data: bytes, lenient: bool = False) -> Checkpoint: ...
    @staticmethod
    def opened_by(
        name: str, open: Callable[[str], PassedSource], lenient: bool = False
    ) -> Checkpoint: ...
    def overlaid(self, other: Checkpoint) -> Checkpoint: ...
    def names(self) -> list[str]: ...
    def names_by_place(self) -> list[str]: ...
    def is_remote(self, file: int) -> bool: ...
    def require_unchanged(self, file: int) -> None: ...
    def can_gather(self, parts: list[tuple[int, int, int]]) -> _bool: ...
    def entry(self, name: str) -> tuple[str, list[int], list[_Part]]: ...
    def read_into(self, parts: list[_Part], target: object) -> None: ...
    def read_block(self, name: str, block: list[tuple[int, int]], target: object) -> None: ...
    def load(
        self, verify: bool, mapped: bool, names: list[str] | None = None
    ) -> list[tuple[str, str, list[int], object]]: ...
    def load_into(self, targets: list[tuple[str, object]], verify: bool) -> None: ...
    def load_each(
        self, verify: bool, budget: int, take: Callable[[str, str, list[int], object], None]
    ) -> None: ...
    def version(self, file: int) -> str | None: ...
    def files(self) -> list[tuple[str, int, dict[str, str] | None]]: ...
    def descriptor(self, file: int) -> int: ...
    def reopened(self) -> Checkpoint: ...
    def is_overlaid(self) -> _bool: ...
    def translated(self, parts: list[_Part], newer: Checkpoint) -> list[_Part]: ...

@final
class PassedSource:
    @staticmethod
    def of_file(name: str, file: int, direct: tuple[int, int] | None = None) -> PassedSource: ...
    @staticmethod
    def at_url(url: str, beside: str) -> PassedSource: ...
    @property
    def name(self) -> str: ...
    @property
    def length(self) -> int: ...
    def read(self) -> bytes: ...

@final
class Relay:
    def __new__(cls) -> Relay: ...
    def add(self, source: PassedSource) -> int: ...
    def channel(self) -> int: ...

@final
class RelayClient:
    def __new__(cls, channels: list[int]) -> RelayClient: ...
    def source(self, number: int, name: str, length: int) -> PassedSource: ...

@final
class StreamedTensor: ...

@final
class StreamedTensors:
    @staticmethod
    def open(
        checkpoint: Checkpoint, names: list[str], budget: int, verify: bool
    ) -> tuple[StreamedTensors, list[StreamedTensor]]: ...
    @property
    def in_use(self) -> _bool: ...

@final
class Accelerator:
    def __new__(
        cls,
        torch_name: str,
        ordinal: int,
        dlpack_type: int,
        current_stream: Callable[[], int],
        library: tuple[str, str] | None = None,
    ) -> Accelerator: ...
    @property
    def name(self) -> str: ...
    @property
    def total_bytes(self) -> int | None: ...
    def available_bytes(self) -> int | None: ...
    def why_no_direct_reads(self) -> str | None: ...

@final
class Streamer:
    def __new__(
        cls,
        checkpoint: Checkpoint,
        units: list[tuple[str, list[_TensorSpec], _bool]],
        weights: list[_WeightSpec],
        *,
        budget: int,
        together: list[list[int]],
        classes: tuple[type[torch.Tensor], type[torch.Tensor]],
        settings: _Settings | None = None,
        tables: Sequence[tuple[Any, torch.dtype]] = ...,
        scores: Sequence[tuple[int, float]] = ...,
        limits: tuple[int, int] | None = None,
    ) -> Streamer: ...
    def begin_pass(self) -> Pass: ...
    def set_passes(self, passes: Any) -> None: ...
    def replan(self) -> bool: ...
    def reload(self, newer: Checkpoint) -> None: ...
    def expect(self, units: list[tuple[int, int]]) -> Expected: ...
    def guess(self, units: list[int]) -> None: ...
    def guesses_pay(self) -> _bool: ...
    def routing_scores(self) -> list[tuple[int, float]]: ...
    def hold(self, units: list[int]) -> Use: ...
    def gather(self, table: int, rows: list[int]) -> torch.Tensor: ...
    def in_pass(self) -> _bool: ...
    def take(self, unit: int) -> list[torch.Tensor]: ...
    def stats(self) -> _Stats: ...
    def set_limit(self, limit: int, now: _bool) -> None: ...
    def apply_limit(self) -> None: ...
    def limit_in_force(self) -> _bool: ...
    def stop_monitor(self) -> None: ...
    def smallest_limit(self) -> int: ...
    def curve(self, budgets: list[int]) -> list[dict[str, Any]]: ...
    def begin_trace(self) -> None: ...
    def end_trace(self, page: _bool, budgets: list[int]) -> str | None: ...
    def remember_speeds(self) -> None: ...
    def in_use(self) -> _bool: ...

@final
class Preview:
    def curve(self, budgets: list[int] | None) -> list[dict[str, Any]]: ...

@final
class Expected:
    def close(self) -> None: ...

@final
class ModuleCalls:
    def __new__(
        cls,
        original: Callable[..., Any],
        records_gradients: Callable[..., Any],
        without_weights: Callable[..., Any],
        announcers: dict[int, Callable[..., Any]],
        classes: list[type],
    ) -> ModuleCalls: ...
    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def forward_if_present(self, module: Any, args: tuple[Any, ...]) -> Any: ...

@final
class WeightRef:
    def __new__(
        cls, weights: Any, key: int, original: type | None = None, is_copy: _bool = False
    ) -> WeightRef: ...
    @property
    def weights(self) -> Any: ...
    @property
    def key(self) -> int: ...
    @property
    def original(self) -> type | None: ...
    @property
    def is_copy(self) -> _bool: ...

@final
class Use:
    def weight(self, streamer: Streamer, key: int, requires_grad: _bool) -> torch.Tensor: ...
    def exit(self) -> _bool: ...
    def addresses(self, streamer: Streamer) -> list[tuple[int, int, int]]: ...
    def close(self) -> None: ...

@final
class Pass:
    def end(self) -> bool: ...
    def close(self) -> bool: ...

@final
class FileWriter:
    def __new__(
        cls,
        path: _Path,
        tensors: list[_NewTensorSpec],
        metadata: dict[str, str] | None,
        codec: str = "raw",
        level: int | None = None,
        jobs: int = 0,
    ) -> FileWriter: ...
    @staticmethod
    def in_memory(
        name: str,
        tensors: list[_NewTensorSpec],
        metadata: dict[str, str] | None,
        codec: str = "raw",
        level: int | None = None,
    ) -> FileWriter: ...
    @staticmethod
    def append(
        path: _Path,
        tensors: list[_NewTensorSpec],
        remove: list[str],
        metadata: dict[str, str] | None,
        codec: str = "raw",
        level: int | None = None,
    ) -> FileWriter: ...
    @staticmethod
    def unless_written(
        path: _Path,
        tensors: list[_NewTensorSpec],
        metadata: dict[str, str] | None,
        fingerprint: str | None,
        codec: str = "raw",
        level: int | None = None,
    ) -> FileWriter | None: ...
    @staticmethod
    def resume(
        path: _Path,
        tensors: list[_NewTensorSpec],
        metadata: dict[str, str],
        origin: str,
        codec: str = "raw",
        level: int | None = None,
    ) -> FileWriter: ...
    def complete(self) -> int: ...
    def checkpoint(self, origin: str) -> None: ...
    def order(self) -> list[int]: ...
    def write(self, data: object) -> None: ...
    def commit(self) -> None: ...
    def to_bytes(self) -> bytes: ...
    def abandon(self) -> None: ...

@final
class Fingerprint:
    def __new__(cls) -> Fingerprint: ...
    def add(self, name: str, dtype: str, shape: list[int], data: object) -> None: ...
    def hex(self) -> str: ...

@final
class Progress:
    def __new__(cls, label: str, total_bytes: int) -> Progress: ...
    def advance(self, bytes: int) -> None: ...
    def close(self) -> None: ...

@final
class DType:
    """The element type of a tensor.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.DType.of(torch.bfloat16)
        DType(bfloat16)
        >>> ts.DType.of("F32") == ts.DType.float32()
        True
        >>> ts.DType.float32().itemsize
        4
    """

    @staticmethod
    def of(value: object) -> DType:
        """Converts a dtype of another library, or the name of a dtype.

        Args:
            value: A ``DType``, a ``torch.dtype``, a NumPy dtype, or a name in PyTorch, NumPy or
                safetensors.

        Raises:
            TypeError: The value is none of these, or checkpoints cannot contain the dtype.
        """
    @staticmethod
    def bool() -> DType: ...
    @staticmethod
    def uint8() -> DType: ...
    @staticmethod
    def int8() -> DType: ...
    @staticmethod
    def uint16() -> DType: ...
    @staticmethod
    def int16() -> DType: ...
    @staticmethod
    def uint32() -> DType: ...
    @staticmethod
    def int32() -> DType: ...
    @staticmethod
    def uint64() -> DType: ...
    @staticmethod
    def int64() -> DType: ...
    @staticmethod
    def float16() -> DType: ...
    @staticmethod
    def bfloat16() -> DType: ...
    @staticmethod
    def float32() -> DType: ...
    @staticmethod
    def float64() -> DType: ...
    @staticmethod
    def complex64() -> DType: ...
    @staticmethod
    def complex128() -> DType: ...
    @staticmethod
    def float8_e4m3fn() -> DType: ...
    @staticmethod
    def float8_e5m2() -> DType: ...
    @property
    def name(self) -> str:
        """The name in PyTorch, such as "float32". The safetensors name if PyTorch has none."""
    @property
    def itemsize(self) -> int:
        """The size of an element in bytes, or 0 if an element is smaller than a byte."""

@final
class GpuStatus:
    """Reports whether CUDA GPUs can be used, and the reason if they cannot.

    Examples:
        >>> import tensorstream as ts
        >>> device = "cuda:0" if ts.GpuStatus.detect().is_available else "cpu"
        >>> ts.Tensor.zeros([2, 3], "float32", device=device).nbytes
        24
    """

    @staticmethod
    def detect() -> GpuStatus:
        """Detects the GPUs. Later calls return the result of the first call."""
    @property
    def kind(self) -> str:
        """One of "NotCompiled", "NoCuda", "NoDevices" and "Available"."""
    @property
    def is_available(self) -> _bool:
        """Whether there is at least one GPU."""
    @property
    def device_count(self) -> int:
        """The number of GPUs."""
    @property
    def cuda_compiled(self) -> _bool:
        """Whether this build supports GPUs."""
    def message(self) -> str:
        """Returns the number of GPUs, or the reason why there are none, as a text. The same as
        ``str(status)``."""

@final
class Device:
    """A device on which streams run: the CPU, an NVIDIA GPU, or a simulated GPU.

    Args:
        name: "cpu", "cuda", "cuda:1" and so on, or "sim". By default the first GPU, or the CPU if
            there is none. Each name stands for the same device whenever it is opened, except that
            each "sim" is another device. A simulated device runs its work when the program waits,
            and raises an error if two accesses to the same memory are not ordered.

    Raises:
        ConfigurationError: No kind of device has the name.
        DeviceUnavailableError: The device does not exist, or cannot be used.

    Examples:
        >>> from tensorstream.streams import Device
        >>> Device("cpu").kind
        'cpu'
    """

    def __new__(cls, name: str | None = None) -> Device: ...
    @property
    def name(self) -> str:
        """The name, such as "cpu" or "cuda:1"."""
    @property
    def kind(self) -> str:
        """ "cpu", "cuda" or "sim"."""
    @property
    def total_bytes(self) -> int | None:
        """The memory of the device in bytes, or None if it is not known."""
    @property
    def priorities(self) -> tuple[int, int]:
        """The least and the most urgent level of streams. Smaller levels are more urgent."""
    def available_bytes(self) -> int | None:
        """Returns how many bytes of the device's memory no program uses now, or None if this is not
        known.

        Raises:
            DeviceError: The driver failed.
        """
    def synchronize(self) -> None:
        """Blocks until all work on the device is done.

        Raises:
            DeviceError: The device failed. Failures of work are errors of its stream only.
        """
    def __eq__(self, other: object, /) -> _bool: ...

@final
class CudaStream:
    """A queue of work, which a device runs in the order of submission.

    Methods that submit work do not wait for it. When work fails, the stream skips later work and
    raises the error when the program waits.

    It is a stream of any device. On a GPU, it is a CUDA stream.

    Args:
        priority: "high", "normal", "low" or a level as in CUDA. Smaller levels are more urgent.
        device: A ``Device``, its name, or the number of a GPU. By default the first GPU, or the CPU
            if there is none.

    Raises:
        ConfigurationError: No kind of device has the name.
        DeviceUnavailableError: The device does not exist, or cannot be used.
        TypeError: An argument has another type.
        ValueError: No priority has the name.

    Examples:
        >>> from tensorstream.streams import CudaStream
        >>> first, second = CudaStream(device="cpu"), CudaStream("high", device="cpu")
        >>> order = []
        >>> first.launch_host_fn(lambda: order.append("first"))
        >>> second.wait_event(first.record_event())
        >>> second.launch_host_fn(lambda: order.append("second"))
        >>> second.synchronize()
        >>> order
        ['first', 'second']
    """

    def __new__(
        cls, priority: str | int | None = None, *, device: Device | str | int | None = None
    ) -> CudaStream: ...
    @staticmethod
    def from_torch(stream: Any) -> CudaStream:
        """Returns PyTorch's stream on an NVIDIA GPU as a stream of this package. Both submit to the
        same queue. The result keeps ``stream`` alive.

        Args:
            stream: A ``torch.cuda.Stream``.

        Raises:
            TypeError: ``stream`` is not a stream of an NVIDIA GPU.
        """
    @property
    def id(self) -> int:
        """The number of the stream, which no other stream of the process has."""
    @property
    def device(self) -> Device:
        """The device."""
    @property
    def priority(self) -> int:
        """The level. Smaller levels are more urgent."""
    @property
    def cuda_stream(self) -> int | None:
        """The handle of the stream of ``from_torch``, as PyTorch has it. None for other streams."""
    def launch_host_fn(self, function: Callable[[], object]) -> None:
        """Submits a function, which is called in another thread when all earlier work is done.

        It must not wait for streams. If it raises an exception, the stream fails.

        Raises:
            DeviceError: The stream has failed.
        """
    def copy(self, to: Any, from_: Any) -> None:
        """Submits a copy of all bytes of one memory to another.

        Args:
            to: A ``DeviceBuffer``, a writable object with the buffer protocol, or a PyTorch tensor
                on the host. It is contiguous, and is kept until the copy is done.
            from_: Memory of the same size in bytes.

        Raises:
            ConfigurationError: The sizes differ, ``to`` is read-only, or memory was freed or is
                that of another device.
            DeviceError: The stream has failed.
        """
    def fill(self, to: Any, byte: int) -> None:
        """Submits work that sets all bytes of a memory.

        Args:
            to: As for ``copy``.
            byte: From 0 to 255.

        Raises:
            ConfigurationError: The memory is read-only, was freed, or is that of another device.
            DeviceError: The stream has failed.
        """
    def record_event(self, event: Event | None = None) -> Event:
        """Records an event after all work submitted so far.

        Args:
            event: An event of the same device. By default a new one.

        Returns:
            The event.
        """
    def wait_event(self, event: Event) -> None:
        """Makes later work of this stream wait for an event. The program does not wait."""
    def wait_stream(self, stream: CudaStream) -> None:
        """Makes later work of this stream wait for all work that was submitted to another one."""
    def query(self) -> _bool:
        """Returns whether all submitted work is done.

        Raises:
            DeviceError: Work has failed.
        """
    def synchronize(self, timeout: float | None = None) -> None:
        """Blocks until all submitted work is done.

        Args:
            timeout: The longest time in seconds. None waits as long as it takes.

        Raises:
            DeviceError: Work has failed.
            TimeoutError: Work is pending after ``timeout``.
        """
    def take_error(self) -> str | None:
        """Returns the message of the error after which the stream skips work, and lets it run work
        again. Returns None if the stream has not failed, or cannot recover.
        """
    def metrics(self) -> dict[str, Any]:
        """Returns counts of the work so far: ``operations`` submitted, of which ``completed`` are
        done, ``transfers`` of ``transferred_bytes`` bytes, ``launches`` of functions, and the
        ``average_latency`` in seconds from submission to completion, None before the first.
        """

@final
class Event:
    """A point in the work of a stream, for which other streams and the program can wait.

    Args:
        device: As for ``CudaStream``.
    """

    def __new__(cls, *, device: Device | str | int | None = None) -> Event: ...
    def record(self, stream: CudaStream) -> None:
        """Records the event on a stream, after all work submitted to it so far."""
    def wait(self, stream: CudaStream) -> None:
        """Makes later work of a stream wait for the event."""
    def query(self) -> _bool:
        """Returns whether the event is reached. Also true if the event was never
        recorded.

        Raises:
            DeviceError: Work before the event has failed.
        """
    def synchronize(self, timeout: float | None = None) -> None:
        """Blocks until the event is reached.

        Args:
            timeout: The longest time in seconds. None waits as long as it takes.

        Raises:
            DeviceError: Work before the event has failed.
            TimeoutError: The event is not reached after ``timeout``.
        """
    def elapsed_time(self, end: Event) -> float:
        """Returns the time from this event to a later one in milliseconds.

        Raises:
            ConfigurationError: One of the events was not recorded, or not reached.
        """

@final
class EnergyMeter:
    """The energy counters of this computer's processors (RAPL), as Linux shows them.

    They count what the whole computer does. GPUs are not part of them. Most virtual machines have
    no such counters, and only root can read them by default.

    Args:
        folder: A folder with the layout of ``/sys/class/powercap``, which is the default.

    Raises:
        DeviceUnavailableError: There are no counters, or this user cannot read them.
    """

    def __new__(cls, folder: str | PathLike[str] | None = None) -> EnergyMeter: ...
    def read(self) -> dict[str, float]:
        """Returns the energy in joules since this object was made, by counter: "package-0" for a
        processor, "package-0/dram" for its memory, other parts of it, and "total". Read at least
        once in five minutes, because counters begin again at 0.

        Raises:
            DeviceUnavailableError: A counter cannot be read any more.
        """

@final
class StreamPool:
    """A pool of streams of one device.

    Args:
        count: The number of streams, clamped to 1 to 256. Of each four, one has a high and one a
            low priority.
        strategy: An ``AllocationStrategy``, or its value.
        max_count: With this, the pool begins with ``count`` streams, and adds and removes streams
            as work waits, up to this number.
        device: As for ``CudaStream``.

    Raises:
        ValueError: ``strategy`` is unknown.
        DeviceUnavailableError: The device does not exist, or cannot be used.

    Examples:
        >>> from tensorstream.streams import AllocationStrategy, StreamPool, WorkloadType
        >>> pool = StreamPool(4, AllocationStrategy.WORKLOAD, device="cpu")
        >>> kinds = (WorkloadType.COMPUTE, WorkloadType.MEMORY, WorkloadType.COORDINATION)
        >>> len({pool.get_stream_for_workload(kind).id for kind in kinds})
        3
    """

    def __new__(
        cls,
        count: int = 8,
        strategy: str = "load_balanced",
        *,
        max_count: int | None = None,
        device: Device | str | int | None = None,
    ) -> StreamPool: ...
    @property
    def device(self) -> Device:
        """The device."""
    @property
    def strategy(self) -> str:
        """The strategy: an ``AllocationStrategy`` has the same value. It can be set."""
    @strategy.setter
    def strategy(self, value: str) -> None: ...
    @property
    def streams(self) -> list[CudaStream]:
        """The streams."""
    def get_stream(self) -> CudaStream:
        """Returns a stream."""
    def get_stream_for_workload(self, workload: str, nbytes: int = 0) -> CudaStream:
        """Returns a stream for a kind of work.

        Args:
            workload: A ``WorkloadType``, or its value.
            nbytes: How much data the work handles, which ``AllocationStrategy.LEARNED`` uses.
        """
    def get_priority_stream(self, level: str | int) -> CudaStream:
        """Returns the least busy stream of a priority. Creates one if there is none. If the pool is
        full, returns a stream of the nearest priority.

        Args:
            level: "high", "normal", "low", or a level as in CUDA.
        """
    def has_ready_streams(self) -> _bool:
        """Returns whether a stream has no pending work."""
    def wait_for_any_ready(self, timeout: float | None = None) -> CudaStream:
        """Blocks until a stream has no pending work.

        Args:
            timeout: The longest time in seconds. None waits as long as it takes.

        Returns:
            The stream.

        Raises:
            DeviceError: All streams of the pool have failed.
                TimeoutError: No stream is ready after ``timeout``.
        """
    def resize(self, count: int) -> None:
        """Sets the number of streams, clamped to 1 to 256. Work on streams that the pool no longer
        returns goes on.

        Raises:
            DeviceError: The device cannot create a stream.
        """
    def record_workload_completion(
        self, stream: CudaStream, workload: str, seconds: float, nbytes: int = 0
    ) -> None:
        """Adds the time of a piece of work that the program has measured.

        Args:
            stream: A stream of the pool.
            workload: A ``WorkloadType``, or its value.
            seconds: The time.
            nbytes: How much data the work handled, which trains ``AllocationStrategy.LEARNED``.
        """
    def expected_time(self, workload: str, nbytes: int = 0) -> float | None:
        """Returns how long ``AllocationStrategy.LEARNED`` expects a piece of work to take.

        Args:
            workload: A ``WorkloadType``, or its value.
            nbytes: How much data the work handles.

        Returns:
            The time in seconds, or None before the first training.
        """
    def average_workload_time(self, workload: str) -> float | None:
        """Returns the average time of a kind of work in seconds, or None if none is known."""
    def optimize(self) -> tuple[str, str, str] | None:
        """Changes the strategy if measurements say that another one is better.

        Returns:
            The strategy before, the new one, and the measurement, or None if nothing changed.
        """
    def __len__(self) -> int: ...

@final
class MultiStreamCoordinator:
    """Orders work on several streams of one device, without waiting for it.

    Args:
        streams: The streams, at least one.

    Raises:
        ValueError: ``streams`` is empty.
        ConfigurationError: The streams are of several devices.

    Examples:
        >>> from tensorstream.streams import CudaStream, MultiStreamCoordinator
        >>> coordinator = MultiStreamCoordinator([CudaStream(device="cpu") for _ in range(2)])
        >>> done = []
        >>> tasks = {name: lambda name=name: done.append(name) for name in ("load", "compute")}
        >>> coordinator.execute(tasks, {"compute": ["load"]}).wait()
        >>> done
        ['load', 'compute']
    """

    def __new__(cls, streams: Sequence[CudaStream]) -> MultiStreamCoordinator: ...
    @property
    def streams(self) -> list[CudaStream]:
        """The streams."""
    def order(self, later: CudaStream, earlier: CudaStream) -> None:
        """Makes the later work of one stream wait for the work submitted to another one so far."""
    def barrier(self) -> None:
        """Makes the later work of each stream wait for the work submitted to all streams so far.
        The program does not wait.
        """
    def execute_parallel(self, functions: Sequence[Callable[[], object]]) -> Execution:
        """Runs functions, on the streams in turn.

        Args:
            functions: Each is called once, in another thread.
        """
    def execute(
        self, tasks: dict[str, Callable[[], object]], after: dict[str, list[str]] | None = None
    ) -> Execution:
        """Runs functions in an order.

        Args:
            tasks: The functions by name. Each is called once, in another thread.
            after: For a name, the names of the tasks that run before it.

        Raises:
            ValueError: A name in ``after`` is not a task.
            ConfigurationError: Tasks wait for each other.
        """

@final
class Execution:
    """Tasks that a coordinator has submitted."""

    @property
    def failures(self) -> list[tuple[str, str]]:
        """The names and errors of tasks that were not submitted."""
    @property
    def event_count(self) -> int:
        """The number of events that order the tasks on different streams."""
    def query(self) -> _bool:
        """Returns whether all tasks are done.

        Raises:
            DeviceError: A task has failed.
        """
    def wait(self, timeout: float | None = None) -> None:
        """Blocks until all tasks are done.

        Args:
            timeout: The longest time in seconds. None waits as long as it takes.

        Raises:
            DeviceError: A task has failed.
            TimeoutError: A task is pending after ``timeout``.
        """
    def on_complete(self, stream: CudaStream, function: Callable[[], object]) -> None:
        """Calls a function in another thread, as work of a stream, when all tasks are done. It is
        not called if a task fails.
        """

@final
class StreamProfiler:
    """Measures the time of work on streams of a device, with events of the device.

    Args:
        device: As for ``CudaStream``.

    Examples:
        >>> from tensorstream.streams import CudaStream, StreamProfiler
        >>> stream = CudaStream(device="cpu")
        >>> profiler = StreamProfiler(device="cpu")
        >>> with profiler.scope(stream, "layer 0"):
        ...     stream.launch_host_fn(lambda: None)
        >>> report = profiler.report()
        >>> [(each["name"], each["count"]) for each in report["all"]]
        [('layer 0', 1)]
    """

    def __new__(cls, *, device: Device | str | int | None = None) -> StreamProfiler: ...
    @property
    def enabled(self) -> _bool:
        """Whether scopes are measured. It can be set."""
    @enabled.setter
    def enabled(self, value: _bool) -> None: ...
    def scope(self, stream: CudaStream, name: str) -> Scope:
        """Measures the work that is submitted to a stream in a ``with`` block."""
    def transfer(self, stream: CudaStream, nbytes: int) -> Scope:
        """Like ``scope``, for copies of ``nbytes`` bytes in total."""
    def launch(self, stream: CudaStream, name: str) -> Scope:
        """Like ``scope``, for a kernel or function."""
    def record_operation(self, stream: CudaStream, name: str, seconds: float) -> None:
        """Adds a time that the program has measured. Reports list it separately,
        under ``reported``."""
    def report(self) -> _ProfileReport:
        """Blocks until all scopes that were closed have ended, and returns the times.

        Returns:
            A ``ProfileReport``.
        """
    def chrome_trace(self) -> str:
        """Blocks as ``report`` does, and returns a JSON trace for Perfetto and Chrome."""
    def table(self) -> str:
        """Blocks as ``report`` does, and returns the times as a table."""

@final
class Scope:
    """A part of the work of a stream that a profiler measures, from the start to the end of a
    ``with`` block.
    """

    def __enter__(self) -> Scope: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class DeviceBuffer:
    """Memory of a pool. It returns to the pool when the object is deleted and all work on it is
    done. ``CudaStream.copy`` and ``CudaStream.fill`` use it.

    Examples:
        >>> from tensorstream.streams import CudaStream, GpuMemoryPool
        >>> stream = CudaStream(device="cpu")
        >>> buffer = GpuMemoryPool(device="cpu").acquire(4)
        >>> buffer.write(stream, b"data")
        >>> buffer.read(stream)
        b'data'
    """

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
    def write(self, stream: CudaStream, data: Any, offset: int = 0) -> None:
        """Copies data to the buffer after the earlier work of a stream. Blocks until this is done.

        Args:
            stream: A stream of the device of the buffer.
            data: A contiguous object with the buffer protocol, or a PyTorch tensor on the host.
            offset: The first byte of the buffer that is written.

        Raises:
            ValueError: The data exceeds the buffer.
            DeviceError: The stream has failed.
        """
    def read(self, stream: CudaStream, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Returns a copy of bytes, after the earlier work of a stream. Blocks until this is done.

        Args:
            stream: A stream of the device of the buffer.
            offset: The first byte.
            nbytes: The number of bytes. By default all from ``offset`` on.

        Raises:
            ValueError: The bytes exceed the buffer.
            DeviceError: The stream has failed.
        """
    def __len__(self) -> int: ...

@final
class PinnedMemoryPool:
    """A pool of memory on the host for copies to and from a GPU. The driver copies to and from it
    directly, without a staging buffer.

    Args:
        config: The sizes. By default ``PoolConfig.default()``.
        device: As for ``CudaStream``. On the CPU, the memory is ordinary memory.

    Raises:
        DeviceUnavailableError: The device does not exist, or cannot be used.
        OutOfMemoryError: There is too little memory to preallocate.

    Examples:
        >>> from tensorstream.streams import PinnedMemoryPool
        >>> pool = PinnedMemoryPool(device="cpu")
        >>> pool.acquire(1 << 20).nbytes
        1048576
    """

    def __new__(
        cls, config: PoolConfig | None = None, *, device: Device | str | int | None = None
    ) -> PinnedMemoryPool: ...
    @property
    def is_pinned(self) -> _bool:
        """Whether the memory is pinned."""
    def acquire(self, nbytes: int) -> DeviceBuffer:
        """Takes memory of the pool. Its bytes are undefined.

        Raises:
            OutOfMemoryError: The pool is full.
        """
    def stats(self) -> dict[str, Any]:
        """Returns statistics: bytes, counts of buffers, and the ``hit_rate`` in per cent."""

@final
class GpuMemoryPool:
    """A pool of blocks of a device's memory.

    Args:
        device: The number of a GPU, a ``Device`` or its name. By default the first GPU, or the CPU
            if there is none.
        config: The sizes. By default ``PoolConfig.default()``.

    Raises:
        DeviceUnavailableError: The device does not exist, or cannot be used.
        OutOfMemoryError: There is too little memory to preallocate.

    Examples:
        >>> from tensorstream.streams import GpuMemoryPool
        >>> pool = GpuMemoryPool("cpu")
        >>> buffer = pool.acquire(100_000)
        >>> del buffer
        >>> buffer = pool.acquire(100_000)
        >>> print(f"Hit rate: {pool.stats()['hit_rate']:.1f}%")
        Hit rate: 50.0%
    """

    def __new__(
        cls, device: Device | str | int | None = None, config: PoolConfig | None = None
    ) -> GpuMemoryPool: ...
    def acquire(self, nbytes: int) -> DeviceBuffer:
        """Takes memory of the pool. Its bytes are undefined.

        Raises:
            OutOfMemoryError: The pool is full.
        """
    def clear(self) -> None:
        """Gives the memory of all free blocks back to the device."""
    def stats(self) -> dict[str, Any]:
        """Returns statistics: bytes, counts of buffers, and the ``hit_rate`` in per cent."""

@final
class StreamOrderedAllocator:
    """Allocates memory of a device in the order of its streams: memory that a stream has freed can
    be used again by later work of the stream, while its earlier work is pending.

    Args:
        device: As for ``GpuMemoryPool``.
        limit_bytes: The most memory to allocate. Unlimited by default.

    Raises:
        DeviceUnavailableError: The device does not exist, or cannot be used.

    Examples:
        >>> from tensorstream.streams import CudaStream, StreamOrderedAllocator
        >>> stream = CudaStream(device="cpu")
        >>> allocator = StreamOrderedAllocator("cpu")
        >>> buffer = allocator.allocate(1 << 20, stream)
        >>> stream.fill(buffer, 7)
        >>> allocator.free_for_stream(stream)
        1048576
    """

    def __new__(
        cls, device: Device | str | int | None = None, *, limit_bytes: int | None = None
    ) -> StreamOrderedAllocator: ...
    def allocate(self, nbytes: int, stream: CudaStream) -> DeviceBuffer:
        """Allocates memory for work that is submitted to ``stream`` from now on. Its bytes are
        undefined.

        Raises:
            ConfigurationError: The stream is of another device.
            OutOfMemoryError: There is too little memory.
        """
    def record_use(self, buffer: DeviceBuffer, stream: CudaStream) -> None:
        """Keeps the memory of a buffer, when it is freed, until the work that was submitted to
        ``stream`` before is done. Needed for work of other libraries only: ``copy`` and ``fill`` do
        this themselves.

        Raises:
            ConfigurationError: The buffer is not of this allocator, or was freed.
        """
    def free_for_stream(self, stream: CudaStream) -> int:
        """Frees all memory that was allocated for ``stream``. Buffers that still exist cannot be
        used any more.

        Returns:
            The number of bytes freed.

        Raises:
            ConfigurationError: A function of a stream has called this.
        """
    def trim(self, keep_bytes: int = 0) -> int:
        """Gives free memory back to the device, except ``keep_bytes`` bytes.

        Returns:
            The number of bytes given back.

        Raises:
            ConfigurationError: A function of a stream has called this.
        """
    def stats(self) -> dict[str, Any]:
        """Returns statistics: bytes and counts."""

@final
class TensorCreditTracker:
    """A counter of byte credits, for programs with a protocol of their own. Any thread can use it.
    A ``Connection`` limits what is in flight by itself.

    Args:
        initial: The most bytes in flight. By default 256 KiB.
        high_water: ``should_pause`` becomes true at this many bytes in flight. By default three
            quarters of ``initial``.
        low_water: ``should_pause`` becomes false again at this many. By default the half of
            ``initial``.

    Examples:
        >>> from tensorstream.streams import TensorCreditTracker
        >>> credit = TensorCreditTracker()
        >>> credit.try_consume(200 << 10), credit.try_consume(100 << 10)
        (True, False)
        >>> credit.grant(100 << 10)
        >>> credit.in_flight
        102400
    """

    def __new__(
        cls, initial: int = 262144, high_water: int | None = None, low_water: int | None = None
    ) -> TensorCreditTracker: ...
    def try_consume(self, nbytes: int) -> _bool:
        """Takes credit for some bytes, or returns False if less is available."""
    def consume_up_to(self, nbytes: int) -> int:
        """Takes as much of some bytes as is available, and returns how much that is."""
    def grant(self, nbytes: int) -> None:
        """Gives credit back for bytes that the receiver has processed."""
    def should_pause(self) -> _bool:
        """Returns whether a sender should wait, to go on only when enough credit was given back."""
    @property
    def available(self) -> int:
        """The available credit in bytes."""
    @property
    def in_flight(self) -> int:
        """The bytes in flight."""

@final
class PoolConfig:
    """The configuration of a memory pool. Sizes are in bytes. An argument that is omitted or None
    has the value of ``PoolConfig.default()``.

    Args:
        pool_bytes: The maximum size of the pool, including blocks in use.
        min_block_bytes: The size of the smallest block.
        max_block_bytes: The size of the largest block that is recycled.
        classes: The number of block sizes, from ``min_block_bytes`` to ``max_block_bytes``. The
            value 1 counts as 2.
        preallocate: Whether to allocate up to half of the pool when it is created.

    Raises:
        ValueError: The block sizes are invalid.

    Examples:
        >>> import tensorstream as ts
        >>> config = ts.PoolConfig(pool_bytes=128 << 20, preallocate=True)
        >>> config.min_block_bytes
        65536
    """

    def __new__(
        cls,
        *,
        pool_bytes: int | None = None,
        min_block_bytes: int | None = None,
        max_block_bytes: int | None = None,
        classes: int | None = None,
        preallocate: _bool | None = None,
    ) -> PoolConfig: ...
    @staticmethod
    def default() -> PoolConfig:
        """Returns the default configuration: 256 MiB, in blocks of 64 KiB to 64 MiB."""
    @staticmethod
    def high_throughput() -> PoolConfig:
        """Returns a configuration for large transfers: 512 MiB, in blocks of 1 MiB to 64 MiB.

        Up to half of the pool is allocated when it is created.
        """
    @staticmethod
    def low_memory() -> PoolConfig:
        """Returns a configuration for machines with little memory: 64 MiB, in blocks of 16 KiB to
        16 MiB."""
    @property
    def pool_bytes(self) -> int:
        """The maximum size of the pool, including blocks in use."""
    @property
    def min_block_bytes(self) -> int:
        """The size of the smallest block."""
    @property
    def max_block_bytes(self) -> int:
        """The size of the largest block that is recycled."""
    @property
    def classes(self) -> int:
        """The number of block sizes."""
    @property
    def preallocate(self) -> _bool:
        """Whether up to half of the pool is allocated when it is created."""

@final
class TensorMeta:
    """The shape and dtype of a tensor.

    Args:
        shape: The size of each dimension.
        dtype: A ``DType``, a ``torch.dtype``, a NumPy dtype, or the name of one.

    Raises:
        TypeError: The dtype is unknown.
        ValueError: The elements do not fill a whole number of bytes, or fill 2**61 bytes or more.

    Examples:
        >>> import tensorstream as ts
        >>> meta = ts.TensorMeta([2, 3], "float32")
        >>> meta
        TensorMeta([2, 3], float32)
        >>> meta.nbytes
        24
    """

    def __new__(cls, shape: Sequence[int], dtype: object) -> TensorMeta: ...
    @property
    def shape(self) -> list[int]:
        """The size of each dimension."""
    @property
    def dtype(self) -> DType:
        """The element type."""
    @property
    def nbytes(self) -> int:
        """The size of all elements, in bytes."""
    def allocate_buffer(self, device: int = 0) -> TensorBuffer:
        """Allocates a buffer of ``nbytes`` bytes on a GPU, or on the host if that fails.

        Args:
            device: The number of the GPU.

        Warns:
            NotBuiltWarning: The buffer is on the host.

        Raises:
            OutOfMemoryError: The host has too little memory, too.
        """

@final
class TensorBuffer:
    """Bytes on the host or on a GPU. All copies are explicit and block.

    Examples:
        >>> import tensorstream as ts
        >>> buffer = ts.TensorBuffer.cpu_zeros(3)
        >>> buffer.copy_from(b"abc")
        >>> buffer.to_host()
        b'abc'
    """

    @staticmethod
    def cpu(data: bytes) -> TensorBuffer:
        """Copies bytes to a new buffer on the host."""
    @staticmethod
    def from_bytes(data: bytes) -> TensorBuffer:
        """Copies bytes to a new buffer on the host. The same as ``cpu``."""
    @staticmethod
    def cpu_zeros(size: int) -> TensorBuffer:
        """Allocates a buffer of ``size`` zero bytes on the host.

        Raises:
            OutOfMemoryError: There is too little memory.
        """
    @staticmethod
    def allocate_gpu(size: int, device_id: int = 0) -> TensorBuffer:
        """Allocates a buffer on a GPU. Its bytes are undefined.

        Args:
            size: The size in bytes.
            device_id: The number of the GPU.

        Raises:
            DeviceUnavailableError: The GPU does not exist or cannot be used.
            OutOfMemoryError: The GPU has too little memory.
        """
    @staticmethod
    def try_allocate_gpu(size: int, device_id: int = 0) -> TensorBuffer:
        """Allocates a buffer on a GPU, or on the host if that fails.

        Args:
            size: The size in bytes. The bytes are undefined on a GPU, and 0 on the host.
            device_id: The number of the GPU.

        Warns:
            NotBuiltWarning: The buffer is on the host. The logger ``tensorstream`` gets the first
                such warning of the process, too.

        Raises:
            OutOfMemoryError: The host has too little memory, too.
        """
    @property
    def size(self) -> int:
        """The size in bytes."""
    @property
    def is_cpu(self) -> _bool:
        """Whether the bytes are on the host."""
    @property
    def is_gpu(self) -> _bool:
        """Whether the bytes are on a GPU."""
    def to_cpu(self) -> TensorBuffer:
        """Copies the bytes to a new buffer on the host.

        Raises:
            DeviceError: The copy from the GPU failed.
        """
    def to_gpu(self, device_id: int = 0) -> TensorBuffer:
        """Copies the bytes to a new buffer on a GPU.

        Args:
            device_id: The number of the GPU.

        Raises:
            DeviceUnavailableError: The GPU does not exist or cannot be used.
            DeviceError: The copy failed.
            OutOfMemoryError: The GPU has too little memory.
        """
    def to_bytes(self) -> bytes:
        """Returns a copy of the bytes. The same as ``to_host``."""
    def to_host(self) -> bytes:
        """Returns a copy of the bytes.

        Raises:
            DeviceError: The copy from the GPU failed.
        """
    def copy_from(self, data: bytes) -> None:
        """Overwrites the whole buffer with ``data``.

        Raises:
            ConfigurationError: ``data`` does not have the size of the buffer.
            DeviceError: The copy to the GPU failed.
        """
    def __len__(self) -> int: ...

@final
class Tensor:
    """A tensor that other libraries use without a copy, through DLPack, the buffer protocol, or
    ``__cuda_array_interface__``.

    Examples:
        >>> import numpy as np, tensorstream as ts
        >>> array = np.zeros([2, 3], dtype=np.float32)
        >>> tensor = ts.Tensor.from_dlpack(array, name="weight")
        >>> tensor
        Tensor("weight", [2, 3], float32, cpu)
        >>> array[1, 2] = 7  # the tensor shares the memory
        >>> tensor.to_torch()
        tensor([[0., 0., 0.],
                [0., 0., 7.]])
    """

    @staticmethod
    def zeros(
        shape: Sequence[int], dtype: object, *, device: str = "cpu", name: str = ""
    ) -> Tensor:
        """Allocates a tensor of zeros.

        Args:
            shape: The size of each dimension.
            dtype: A ``DType``, a ``torch.dtype``, a NumPy dtype, or the name of one.
            device: "cpu", or a GPU such as "cuda:0".
            name: The name of the tensor, which receivers get too.

        Raises:
            TypeError: The dtype is unknown.
            ConfigurationError: The device or the shape is invalid.
            DeviceUnavailableError: The GPU does not exist or cannot be used.
            OutOfMemoryError: There is too little memory.
        """
    @staticmethod
    def from_dlpack(
        tensor: object, *, name: str | None = None, metadata: dict[str, str] | None = None
    ) -> Tensor:
        """Wraps a tensor of another library. Shares its memory, which must be on the host.

        Args:
            tensor: An object that supports DLPack, a DLPack capsule, or a ``Tensor``.
            name: The name of the tensor, which receivers get too. None keeps the name of a
                ``Tensor``.
            metadata: Text by key, which receivers get too. None keeps the metadata of a ``Tensor``.

        Raises:
            TypeError: The object does not support DLPack.
            BufferError: The tensor is not on the host, or its dtype is not supported.
            ConfigurationError: The tensor has more than 64 dimensions.
        """
    @property
    def name(self) -> str:
        """The name of the tensor. Empty if it has none."""
    @property
    def metadata(self) -> dict[str, str]:
        """Text by key, from the sender or from ``from_dlpack``."""
    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension."""
    @property
    def dtype(self) -> DType:
        """The element type."""
    @property
    def strides(self) -> tuple[int, ...]:
        """The step along each dimension, in elements."""
    @property
    def nbytes(self) -> int:
        """The size of all elements, in bytes."""
    @property
    def device(self) -> str:
        """The device of the memory: "cpu", or a GPU such as "cuda:0"."""
    @property
    def read_only(self) -> _bool:
        """Whether the memory is read-only."""
    def is_contiguous(self) -> _bool:
        """Returns whether the elements are row-major and without gaps."""
    def shares_memory(self, other: Tensor) -> _bool:
        """Returns whether both tensors were created from the same ``Tensor``, or received in the
        same storage.

        Returns False if an array was imported twice, although the memory is the same.
        """
    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: _bool | None = None,
    ) -> Any:
        """Exports the tensor as a DLPack capsule, with the arguments of the array API standard.

        Raises:
            BufferError: The requested export is impossible, for example to another GPU.
            DeviceError: The copy failed.
        """
    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns DLPack's device type and device number."""
    def to_dlpack(self) -> Any:
        """Returns a DLPack capsule, which can be consumed once.

        Raises:
            BufferError: The tensor is read-only, or DLPack before 1.1 lacks its dtype.
        """
    def to_numpy(self) -> Any:
        """Returns a NumPy array that shares the memory, or a copy if the tensor is on a GPU.

        Raises:
            TypeError: NumPy has no such dtype: bfloat16, float8, or elements smaller than a byte.
            DeviceError: The copy from the GPU failed.
        """
    def to_torch(self) -> Any:
        """Returns a PyTorch tensor that shares the memory."""
    def tobytes(self) -> bytes:
        """Returns a copy of the bytes of all elements, in row-major order.

        Raises:
            BufferError: The tensor is not contiguous.
            DeviceError: The copy from the GPU failed.
        """
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The dictionary of the CUDA array interface, version 3.

        Raises:
            AttributeError: The tensor is on the host.
            TypeError: The interface does not support the dtype.
        """
    @property
    def cuda_array_interface(self) -> dict[str, Any] | None:
        """The dictionary of the CUDA array interface, or None if the tensor is on the host.

        Raises:
            TypeError: The interface does not support the dtype.
        """
    @staticmethod
    def _sharing(memory: bytes | mmap, dtype: str, shape: list[int]) -> Tensor: ...
    def _view(
        self, name: str, dtype: str, shape: list[int], strides: list[int], offset: int
    ) -> Tensor: ...

@final
class Connection:
    @property
    def peer(self) -> str: ...
    def _send(
        self,
        tensors: list[tuple[Tensor, int, bool]],
        *,
        compression: str | None = None,
        checksums: bool = False,
        apart: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> None: ...
    def send_message(self, message: bytes) -> None: ...
    def _recv(
        self,
        *,
        into: Tensor | None = None,
        device: Accelerator | None = None,
        timeout: float | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Tensor | bytes | None: ...
    def _recv_all(
        self,
        *,
        device: Accelerator | None = None,
        timeout: float | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> list[Tensor] | None: ...
    def stats(self) -> _ConnectionStats: ...
    def _allow_abort(self) -> None: ...
    def _abort(self) -> None: ...
    def close(self, reason: str = "the peer called close()") -> None: ...

@final
class Listener:
    @property
    def address(self) -> str: ...
    def accept(
        self, timeout: float | None = None, log: Callable[[str, str], object] | None = None
    ) -> Connection: ...
    def close(self) -> None: ...

def remote_setup(hooks: SimpleNamespace) -> None: ...
def remote_forked() -> None: ...
def remote_create_with(class_: type, create: object, only_numbers: bool) -> None: ...
def remote_cache_stats() -> tuple[int, int, int]: ...
def remote_empty(
    index: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    own: bool = False,
) -> torch.Tensor: ...
def remote_whole(
    index: int, address: int, bytes: int, dtype: torch.dtype, resized: bool = False
) -> torch.Tensor: ...
def remote_names(tensor: torch.Tensor) -> tuple[int, int] | None: ...
def remote_trace(on: bool) -> list[tuple[str, str, float | None]]: ...
def remote_scalar(tensor: torch.Tensor) -> Any: ...
def remote_upload(tensor: torch.Tensor, capsule: Any) -> None: ...
def remote_download(tensor: torch.Tensor, capsule: Any) -> None: ...

@final
class RemoteKernel:
    def __new__(
        cls,
        name: str,
        op: Any,
        by_value: bool,
        takes_host: bool,
        from_machine: bool,
        strides_from_machine: bool,
        writes: bool,
        generator: int | None,
        tensors: Sequence[int],
        returns: Sequence[Any],
    ) -> RemoteKernel: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    @property
    def name(self) -> str: ...
    @property
    def __name__(self) -> str: ...

@final
class RemoteSession:
    def __new__(
        cls,
        address: str,
        name: str,
        count: int,
        settings: dict[str, Any],
        retry: float,
        *,
        first: int | None = None,
        returns: bool = True,
        ca: Any = None,
        cert: Any = None,
        key: Any = None,
    ) -> RemoteSession: ...
    def is_over(self) -> bool: ...
    def is_reconnecting(self) -> bool: ...
    def abandon(self, reason: str) -> None: ...
    @property
    def first(self) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def waits(self) -> list[tuple[str, int, float]]: ...
    def synchronize(self) -> None: ...
    def flush(self) -> None: ...
    def pausing(self, begins: bool, end_freed: bool = False) -> None: ...
    def storages(self) -> list[tuple[int, int, int, int]]: ...
    def was_freed(self, storage: int) -> bool: ...
    def close(self) -> BaseException | None: ...
    def resume(self, address: str) -> None: ...
    def create(self, storage: int, bytes: int, ordinal: int) -> None: ...
    def read(self, storage: int, offset: int, capsule: Any) -> None: ...
    def write(self, storage: int, offset: int, capsule: Any) -> None: ...
    def forget(self) -> None: ...

@final
class RemoteServer:
    def __new__(
        cls,
        at: str,
        hooks: SimpleNamespace,
        settings: dict[str, Any],
        insecure: bool,
        cert: Any = None,
        key: Any = None,
        ca: Any = None,
    ) -> RemoteServer: ...
    @property
    def address(self) -> str: ...
    @property
    def sessions(self) -> int: ...
    @staticmethod
    def from_handoffs(
        channel: int,
        hooks: SimpleNamespace,
        settings: dict[str, Any],
        idle: float | None = None,
    ) -> RemoteServer: ...
    def run(self, log: Callable[[str, str], object] | None = None, once: bool = False) -> None: ...
    def stop(self) -> None: ...

@final
class Dispatcher:
    def __new__(
        cls,
        at: str,
        settings: dict[str, Any],
        insecure: bool,
        cert: Any = None,
        key: Any = None,
        ca: Any = None,
    ) -> Dispatcher: ...
    @property
    def address(self) -> str: ...
    def next(self, seconds: float, log: Callable[[str, str], object]) -> Handoff | None: ...

@final
class Handoff:
    @property
    def service(self) -> str: ...
    @property
    def peer(self) -> str: ...
    def send_to(self, channel: int) -> None: ...
    def refuse(self, reason: str) -> None: ...

@final
class PeerSession:
    def __new__(
        cls,
        address: str,
        settings: dict[str, Any],
        retry: float,
        *,
        ca: Any = None,
        cert: Any = None,
        key: Any = None,
    ) -> PeerSession: ...
    def claim(self, ticket: str, dtype: int, sizes: list[int], nbytes: int) -> bytes: ...
    def deposit(self, ticket: str, dtype: int, sizes: list[int], elements: bytes) -> str: ...
    def withdraw(self, ticket: str) -> None: ...
    def close(self) -> None: ...

def sandbox(gpu: bool = False) -> list[str]: ...
def set_share(process: int, niceness: int, slice: float) -> None: ...
