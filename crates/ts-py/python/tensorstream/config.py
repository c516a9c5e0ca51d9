# SPDX-License-Identifier: MIT OR Apache-2.0
"""The settings of ``tensorstream.offload``, their presets and their defaults."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast

from . import _native
from .budget import Budget
from .devices import (
    AUTOMATIC,
    HOST_DEVICES,
    Device,
    accelerator,
    default_device,
    device_of,
    devices_of_map,
    has_accelerator,
    usable_devices,
)
from .errors import (
    ArgumentTypeError,
    BudgetError,
    BudgetWarning,
    ConfigurationError,
    NotBuiltWarning,
)

if TYPE_CHECKING:
    import torch

E = TypeVar("E", bound=enum.Enum)

_log = logging.getLogger("tensorstream")


class BackendType(enum.StrEnum):
    """The names of I/O backends in former versions. Members are equal to their names.

    ``CUDA`` and ``GPUDIRECT`` choose the accelerator as the default ``device``. Without one, the
    device is the CPU, and ``tensorstream.stats`` reports the reason in ``passed_over``.

    Examples:
        >>> import tensorstream as ts
        >>> ts.Config(backend="mmap").backend
        <BackendType.MMAP: 'mmap'>
        >>> ts.Config(backend="buffered").backend
        'buffered'
    """

    #: The best available backend.
    AUTO = "auto"
    #: Copies from memory mappings.
    MMAP = "mmap"
    #: The best available one, and the accelerator as the default device.
    CUDA = "cuda"
    #: The same. Weights that are not compressed are read straight into its memory, if GPUDirect
    #: Storage can do that, and else through memory of the host.
    GPUDIRECT = "gpudirect"


class PrefetchStrategy(enum.Enum):
    """How far in advance the units of a model are read. A unit is the parameters of one module.

    Examples:
        >>> import tensorstream as ts
        >>> config = ts.Config(prefetch_strategy=ts.PrefetchStrategy.NEXT_LAYER)
    """

    #: No prefetching: each streamed unit is read when it is needed, and all memory except for one
    #: unit keeps others. For comparisons, and where reads must not run beside computing.
    NONE = "none"
    #: Prefetches only the next unit. This needs memory for one more unit, so with a budget of less
    #: than two units it acts like ``NONE``. For models whose order of units differs from pass to
    #: pass, because reading further ahead reads the wrong ones.
    NEXT_LAYER = "next_layer"
    #: Prefetches as far as memory allows. The plan divides the budget between prefetching and
    #: units that stay in memory, such that passes take the least time. For all other models.
    ADAPTIVE = "adaptive"
    #: Like ``ADAPTIVE``, but with at least half of the budget for prefetching. For storage whose
    #: speed varies, such as a network, because a long queue evens out pauses.
    AGGRESSIVE = "aggressive"


class MemoryMode(enum.Enum):
    """A preset that sets the default budget and the default prefetch strategy.

    Examples:
        >>> import tensorstream as ts
        >>> ts.Config(memory_mode=ts.MemoryMode.CONSERVATIVE).prefetch_strategy
        <PrefetchStrategy.NEXT_LAYER: 'next_layer'>
    """

    #: 80% of the available memory, and ``PrefetchStrategy.AGGRESSIVE``.
    AGGRESSIVE = "aggressive"
    #: 50% of the available memory, and ``PrefetchStrategy.ADAPTIVE``.
    BALANCED = "balanced"
    #: 25% of the available memory, and ``PrefetchStrategy.NEXT_LAYER``.
    CONSERVATIVE = "conservative"


class MemoryPressureMode(enum.Enum):
    """What happens to the budget when other programs need memory.

    Examples:
        >>> import tensorstream as ts
        >>> config = ts.Config(memory_pressure_mode="adaptive")
        >>> config.memory_pressure_mode
        <MemoryPressureMode.ADAPTIVE: 'adaptive'>
    """

    #: Nothing: the budget is fixed.
    STRICT = "strict"
    #: While little memory is available, streaming gives memory back to the system, as far as to the
    #: smallest budget that works. It takes the memory again later, up to the budget.
    ADAPTIVE = "adaptive"
    #: Streaming also uses memory beyond the budget while nothing else needs it, and gives it back
    #: as far as to the budget.
    LENIENT = "lenient"


#: The compression of tensors in a ``.ts`` file.
Codec = Literal["raw", "auto", "split", "zstd", "lz4", "zlib"]


class Settings(TypedDict):
    """The settings of the native engine, except the budget."""

    max_passes: int
    backend: str | None
    in_flight: int | None
    threads: int | None
    prefetch: str
    verify: str
    keep_compressed: bool
    shared_cache: str | None
    device: _native.Accelerator | None
    host_bytes: int


#: The default budget as a share of the available memory. The rest is for activations.
SHARES = {MemoryMode.AGGRESSIVE: 0.8, MemoryMode.BALANCED: 0.5, MemoryMode.CONSERVATIVE: 0.25}
PREFETCH = {
    MemoryMode.AGGRESSIVE: PrefetchStrategy.AGGRESSIVE,
    MemoryMode.BALANCED: PrefetchStrategy.ADAPTIVE,
    MemoryMode.CONSERVATIVE: PrefetchStrategy.NEXT_LAYER,
}
VERIFY: dict[bool | str, str] = {True: "every_read", "once": "once", False: "never"}
#: Memory that the budget leaves for activations, page tables and code, in bytes.
HEADROOM = 96 << 20
#: The highest level of each codec with levels.
LEVELS = {"zstd": 22, "zlib": 9}
#: The backends that choose the accelerator as the default device.
ACCELERATED = (BackendType.CUDA.value, BackendType.GPUDIRECT.value)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of ``offload`` and ``from_pretrained``. Every field has a default.

    Args:
        budget: The memory for weights: bytes, a size such as ``"600MiB"`` or ``"1.5GB"``, or a
            share of the available memory such as ``"50%"``, or a ``Budget`` that models share. The
            default, ``"auto"``, is the share that ``memory_mode`` sets. A share is logged to the
            logger "tensorstream" at level INFO. With several devices, it is the memory on each of
            them; or a mapping from devices to bytes, sizes or shares.
        device: The device on which the model runs, such as "cuda" or "cuda:1". The budget is memory
            of this device, and weights are copied to it while others compute. The default is the
            CPU. Accelerators other than NVIDIA's GPUs need ``register_accelerator``. A mapping from
            names of modules to devices divides the model: inputs of these modules are moved to
            their device. ``""`` is the name of the whole model, and a longer name counts more.
            ``"auto"`` is the accelerator of this machine, or the CPU without one. If no budget of
            one accelerator holds the model, its layers are divided among them, in proportion to
            their budgets. A mapping as ``budget`` has the accelerators that may be chosen.
        host_budget: For a ``device`` with its own memory: the memory on the host in which weights
            are kept, so that they are not read again for each pass. Bytes, a size, or a share of
            the available memory. The default keeps none. Several devices divide it.
        storage_path: A directory. Its purpose depends on the call:

            - ``offload`` of a model with weights, without a ``checkpoint``, writes the weights to
              the directory. Creates the directory if necessary.
            - ``offload`` of a model on the meta device, without a ``checkpoint``, reads the
              checkpoint from the directory.
            - ``from_pretrained`` writes converted tensors to the directory. By default, they are
              written to the user's cache directory.
        max_passes: The most forward passes that run at once. Others wait. Each pass needs its own
            memory.
        backend: The I/O backend: a ``BackendType``, its name, or a name that
            ``tensorstream.backends`` returns. The name of a ``BackendType`` becomes the member.
        io_depth: The number of reads in flight, 1 to 256. By default, the best depth and request
            size are measured once per file system, with a file of 256 MiB or more. The measurement
            takes up to about two seconds, and its memory is within the budget. The result is stored
            under ``tensorstream/io`` in the user's cache directory.
        num_io_threads: The number of threads of each kind, 1 to 256: those that read files, per
            backend, and those that compare checksums and decode. Reads with io_uring need none. By
            default, each read in flight has a thread, and each processor one that decodes, at most
            four. With a small budget, fewer threads decode.
        prefetch_strategy: How far in advance units are read. ``memory_mode`` sets the default.
        memory_mode: A preset for the defaults of ``budget`` and ``prefetch_strategy``.
        memory_pressure_mode: What happens to the budget when other programs need memory. The
            available memory is that of the system and of the memory cgroups of the process. Memory
            is given back between passes.
        vram_budget_gb: Deprecated: use ``budget``. The budget in GB of 10^9 bytes.
        verify_checksums: Whether to compare weights with their checksums at each read. ``"once"``
            compares them at the first read only. Safetensors files have no checksums.
        compression: Whether weights are kept in memory compressed, without loss, where this makes
            passes faster: ``"auto"`` or ``"off"``. Those of an uncompressed checkpoint are
            compressed after the first or the third pass. Nothing is written.
        compression_enabled: Whether to compress weights that are written to ``storage_path``,
            without loss. bf16 shrinks to two thirds. Streaming is faster with compression if
            reading is slower than decoding, which reaches 4 GB/s per core.
        compression_codec: The codec of these weights: "auto", "split", "zstd", "lz4" or "zlib".
            ``"auto"`` is "split" for floats, which shrink most with it, and "zstd" for integers and
            booleans. The default is "zstd" with a ``compression_level``, and "auto" without one.
        compression_level: The level of the codec, 1 to 22 for "zstd" and 1 to 9 for "zlib". Higher
            levels are slower and usually compress better. Other codecs have no levels.
        shared_cache: Whether processes of the same user that stream the same checkpoint share the
            weights that stay in memory, or the directory through which they do. It must be in
            memory (tmpfs); the default is in ``/dev/shm``. The budget of each process includes the
            shared weights, although they are in memory only once. Weights of an uncompressed
            checkpoint are not compressed in memory then. Linux only.
        exact: Whether results must be bit-identical to those of the model in memory. If false, a
            layer that is larger than the budget is also streamed in blocks where products with
            blocks round differently. Without it, such a budget is refused. Experts of a mixture
            are also read without a copy where products depend on their address.

    Raises:
        ConfigurationError: A field is unknown or invalid, or a setting is given under two names.

    Warns:
        NotBuiltWarning: A field requests what this version or this computer lacks. Warns once.

    Examples:
        >>> import tensorstream as ts
        >>> ts.Config(budget="600MiB", io_depth=8).budget
        '600MiB'
    """

    budget: int | str | Budget | Mapping[Any, int | str] | None = None
    device: Device | Mapping[str, Device] | None = None
    host_budget: int | str | None = None
    storage_path: str | os.PathLike[str] | None = None
    max_passes: int = 1
    backend: BackendType | str = BackendType.AUTO
    io_depth: int | None = None
    num_io_threads: int | None = None
    prefetch_strategy: PrefetchStrategy | str | None = None
    memory_mode: MemoryMode | str = MemoryMode.BALANCED
    memory_pressure_mode: MemoryPressureMode | str = MemoryPressureMode.STRICT
    vram_budget_gb: float | None = None
    verify_checksums: bool | str = True
    compression: str = "auto"
    compression_enabled: bool = False
    compression_codec: str | None = None
    compression_level: int | None = None
    shared_cache: bool | str | os.PathLike[str] = False
    exact: bool = True

    def __post_init__(self) -> None:
        self._check_budget()
        if self.vram_budget_gb is not None:
            self._check_vram_budget()
        if self.storage_path is not None:
            if not isinstance(self.storage_path, str | os.PathLike):
                raise invalid("storage_path", self.storage_path, "a path")
            object.__setattr__(self, "storage_path", expanded(self.storage_path))
        self._check_device()
        _check_int("max_passes", self.max_passes, 1, 64)
        self._check_io_depth()
        if not isinstance(self.verify_checksums, bool) and self.verify_checksums != "once":
            raise invalid("verify_checksums", self.verify_checksums, 'True, False or "once"')
        self._check_compression()
        if not isinstance(self.shared_cache, bool | str | os.PathLike):
            raise invalid("shared_cache", self.shared_cache, "True, False or a path")
        if not isinstance(self.exact, bool):
            raise invalid("exact", self.exact, "True or False")
        object.__setattr__(
            self, "memory_mode", _member(MemoryMode, "memory_mode", self.memory_mode)
        )
        pressure = _member(MemoryPressureMode, "memory_pressure_mode", self.memory_pressure_mode)
        object.__setattr__(self, "memory_pressure_mode", pressure)
        prefetch: Any = self.prefetch_strategy or PREFETCH[MemoryMode(self.memory_mode)]
        object.__setattr__(
            self, "prefetch_strategy", _member(PrefetchStrategy, "prefetch_strategy", prefetch)
        )
        members = {member.value: member for member in BackendType}
        known = dict.fromkeys([*members, *_native.backends()])
        if not isinstance(self.backend, str) or self.backend.lower() not in known:
            raise invalid("backend", self.backend, "one of " + ", ".join(known))
        backend = self.backend.lower()
        object.__setattr__(self, "backend", members.get(backend, backend))
        self.passed_over()
        if isinstance(self.budget, Budget) and pressure != MemoryPressureMode.STRICT:
            raise invalid(
                "memory_pressure_mode", pressure.value, "strict, because the budget is shared"
            )

    def _check_budget(self) -> None:
        if isinstance(self.budget, Mapping):
            if not isinstance(self.device, Mapping) and not self.is_automatic():
                raise invalid("budget", self.budget, "a size, because there is one device")
            for size in self.budget.values():
                parse_budget(size)
        elif self.budget is not None and not isinstance(self.budget, Budget):
            parse_budget(self.budget)

    def _check_device(self) -> None:
        if self.host_budget is not None:
            parse_budget(self.host_budget, "host_budget")
        devices = self.device.values() if isinstance(self.device, Mapping) else [self.device]
        if self.is_automatic():
            return  # `on_devices` checks the device that it chooses
        if all(device is None or str(device) in HOST_DEVICES for device in devices):
            if self.host_budget is not None and not self._is_accelerated():
                raise invalid("host_budget", self.host_budget, "None without an accelerator")
            return
        self._check_on_accelerator()

    def _check_on_accelerator(self) -> None:
        if self.memory_pressure_mode not in (MemoryPressureMode.STRICT, "strict"):
            raise invalid(
                "memory_pressure_mode", self.memory_pressure_mode, "strict on an accelerator"
            )
        if isinstance(self.budget, Budget):
            raise invalid(
                "budget", self.budget, "a size, because models on an accelerator share none"
            )

    def is_automatic(self) -> bool:
        """Returns whether the device, or the devices, are chosen for the model."""
        return isinstance(self.device, str) and self.device == AUTOMATIC

    def _is_accelerated(self) -> bool:
        """Returns whether the backend chooses the accelerator as the default device."""
        return str(self.backend).lower() in ACCELERATED

    def _check_compression(self) -> None:
        if self.compression not in ("auto", "off"):
            raise invalid("compression", self.compression, '"auto" or "off"')
        if not isinstance(self.compression_enabled, bool):
            raise invalid("compression_enabled", self.compression_enabled, "True or False")
        codecs = ("auto", "split", *LEVELS, "lz4")
        if self.compression_codec is not None and self.compression_codec not in codecs:
            raise invalid(
                "compression_codec", self.compression_codec, "one of " + ", ".join(codecs)
            )
        if self.compression_level is not None:
            _check_int("compression_level", self.compression_level, 1, max(LEVELS.values()))
        for name in ("compression_codec", "compression_level"):
            value = getattr(self, name)
            if value is not None and not self.compression_enabled:
                raise invalid(name, value, "None unless compression_enabled is True")
        if self.compression_level is not None:
            codec = self.codec()
            if codec not in LEVELS:
                why = "chooses a codec for each dtype" if codec == "auto" else "has no levels"
                wanted = f"None, because compression_codec {codec!r} {why}"
                raise invalid("compression_level", self.compression_level, wanted)
            _check_int("compression_level", self.compression_level, 1, LEVELS[codec])

    def _check_io_depth(self) -> None:
        for name in ("io_depth", "num_io_threads"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1, 256)

    def _check_vram_budget(self) -> None:
        gigabytes: Any = self.vram_budget_gb
        if (
            isinstance(gigabytes, bool)
            or not isinstance(gigabytes, int | float)
            or not 0 < gigabytes < 1e9
        ):
            raise invalid("vram_budget_gb", gigabytes, "a positive number of GB below 10**9")
        if self.budget is not None:
            raise ConfigurationError(
                "invalid Config: budget and vram_budget_gb are the same setting; set only one"
            )

    def requested_bytes(self) -> int | None:
        """Returns the budget in bytes, or ``None`` if it is a share of the available memory."""
        if self.vram_budget_gb is not None:
            return max(1, int(self.vram_budget_gb * 1e9))
        if isinstance(self.budget, Budget):
            return self.budget.bytes
        budget = None if self.budget is None else parse_budget(self._one_budget())
        return budget if isinstance(budget, int) else None

    def _one_budget(self) -> int | str:
        assert not isinstance(self.budget, Budget | Mapping | None), "see on_devices"
        return self.budget

    def share(self) -> float:
        """Returns the share of the available memory that is the budget if it is not a size."""
        if self.budget is None or isinstance(self.budget, Budget):
            return SHARES[MemoryMode(self.memory_mode)]
        share = parse_budget(self._one_budget())
        return share if isinstance(share, float) else SHARES[MemoryMode(self.memory_mode)]

    def share_bytes(self, freed_bytes: int = 0) -> int:
        """Returns the budget in bytes if it is a share of the available memory.

        Args:
            freed_bytes: Memory that offloading will free, which counts as available.

        Raises:
            ConfigurationError: The available memory cannot be detected.
        """
        return max(1, int(self._available_bytes(freed_bytes) * self.share()))

    def working_bytes(self) -> int:
        """Returns the configured or default budget in bytes, even if less memory is available.

        Raises:
            ConfigurationError: No budget is set, and the available memory cannot be detected.
        """
        requested = self.requested_bytes()
        return self.share_bytes() if requested is None else requested

    def free_bytes(self) -> int:
        """Returns the configured or default budget in bytes, reduced to the memory that is free.

        Raises:
            ConfigurationError: No budget is set, and the available memory cannot be detected.
        """
        wanted, available = self.working_bytes(), self._unused_bytes()
        if available is None:
            return wanted
        return max(0, min(wanted, available - available // 16 - HEADROOM))

    def _available_bytes(self, freed_bytes: int) -> int:
        available = self._unused_bytes()
        if available is None:
            raise invalid("budget", None, "a size, because the available memory cannot be detected")
        return available + (freed_bytes if self.accelerator() is None else 0)

    def _unused_bytes(self) -> int | None:
        """Returns the available memory of the device, or ``None`` if it cannot be detected."""
        device = self.accelerator()
        return _native.available_memory() if device is None else device.available_bytes()

    def fitted_bytes(
        self, smallest: int, whole: int, freed_bytes: int = 0, shared_bytes: int = 0
    ) -> int:
        """Returns the configured or default budget in bytes, reduced to the available memory.

        A configured budget is not reduced in these cases:

        - It is less than ``smallest``. The engine refuses such a budget.
        - The whole model fits into the available memory.
        - The available memory cannot be detected.

        Args:
            smallest: The smallest budget that works for the model.
            whole: The budget that keeps the whole model in memory.
            freed_bytes: Memory that offloading will free, which counts as available.
            shared_bytes: Memory of other processes that this one can share. It counts as available
                for a budget that is given in bytes.

        Raises:
            BudgetError: The available memory is too small for ``smallest``.
            ConfigurationError: No budget is set, and the available memory cannot be detected.

        Warns:
            BudgetWarning: The configured budget was reduced.
        """
        requested = self.requested_bytes()
        if requested is not None and (requested < smallest or self._unused_bytes() is None):
            return requested  # if it is too small, the engine refuses it
        wanted = self.share_bytes(freed_bytes) if requested is None else requested
        if requested is not None:
            freed_bytes += shared_bytes
        available = self._available_bytes(freed_bytes)
        # Leaves memory for activations, page tables, and pages of code that are not mapped yet.
        room = available - available // 16 - HEADROOM
        if smallest > available - HEADROOM:
            raise BudgetError(
                f"not enough memory: {_mib(available)} MiB are available, but the model needs at "
                f"least {_mib(smallest)} MiB for weights and {_mib(HEADROOM)} MiB for "
                "everything else; free memory, or raise the memory limit of this process"
            )
        budget = max(smallest, min(wanted, room))
        if requested is None:
            _log.info("the budget is %s MiB; %s MiB are available", _mib(budget), _mib(available))
        elif min(requested, whole) > budget:
            warnings.warn(
                f"budget {_mib(requested)} MiB does not fit: {_mib(available)} MiB are available, "
                f"and activations need a part of them; using {_mib(budget)} MiB",
                BudgetWarning,
                stacklevel=4,
            )
            return budget
        return budget if requested is None else requested

    def limits(
        self, budget: int, smallest: int, whole: int, freed_bytes: int = 0
    ) -> tuple[int, tuple[int, int] | None]:
        """Returns the most memory for weights, and its limits if they follow the memory pressure.

        Args:
            budget: The budget from ``fitted_bytes``, in bytes.
            smallest: The smallest budget that works for the model.
            whole: The budget that keeps the whole model in memory.
            freed_bytes: Memory that offloading will free, which counts as available.

        Returns:
            The most memory, and the least memory and that at the beginning, in bytes.
        """
        mode = MemoryPressureMode(self.memory_pressure_mode)
        if mode == MemoryPressureMode.STRICT or _native.available_memory() is None:
            return budget, None
        if mode == MemoryPressureMode.ADAPTIVE:
            return budget, (min(smallest, budget), budget)
        available = self._available_bytes(freed_bytes)
        room = available - available // 16 - HEADROOM
        return max(budget, min(whole, room)), (budget, budget)

    def codec(self) -> Codec:
        """Returns the codec for weights that are written to files."""
        if not self.compression_enabled:
            return "raw"
        if self.compression_codec is not None:
            return cast(Codec, self.compression_codec)
        return "auto" if self.compression_level is None else "zstd"

    def level(self) -> int | None:
        """Returns the level of the codec, or ``None`` for its default."""
        return self.compression_level if self.compression_enabled else None

    def settings(self) -> Settings:
        """Returns the settings of the native engine, except the budget."""
        backend = str(self.backend)
        chosen_by_us = (BackendType.AUTO.value, *ACCELERATED)
        name = None if backend in chosen_by_us else backend
        on = self.accelerator()
        if backend == BackendType.GPUDIRECT.value and on and not on.why_no_direct_reads():
            name = backend
        return {
            "max_passes": self.max_passes,
            "backend": name,
            "in_flight": self.io_depth,
            "threads": self.num_io_threads,
            "prefetch": PrefetchStrategy(self.prefetch_strategy).value,
            "verify": VERIFY[self.verify_checksums],
            "keep_compressed": self.compression == "auto",
            "shared_cache": self.shared_directory(),
            "device": on,
            "host_bytes": self.host_bytes(),
        }

    def on_devices(self) -> dict[torch.device, Config]:
        """Returns the settings for each device, the main one first.

        With ``"auto"``, these are the devices that can be chosen.

        Raises:
            ConfigurationError: The device map is invalid, or the budget is a mapping that does not
                have exactly the devices of the map, or that has devices that cannot be used.
        """
        if self.is_automatic():
            return self._on_usable_devices()
        if not isinstance(self.device, Mapping):
            device = self.torch_device()
            if device.type != "cpu":
                self._check_on_accelerator()
            return {device: self}
        devices = devices_of_map(self.device)
        budgets: dict[torch.device, Any] = dict.fromkeys(devices, self.budget)
        if isinstance(self.budget, Mapping):
            budgets = {device_of(each): size for each, size in self.budget.items()}
            if budgets.keys() != devices.keys():
                names = ", ".join(map(str, devices))
                raise invalid("budget", dict(self.budget), f"a size for each of {names}")
        return {
            device: dataclasses.replace(self, device=device, budget=budgets[device])
            for device in devices
        }

    def _on_usable_devices(self) -> dict[torch.device, Config]:
        devices: list[torch.device] = usable_devices()
        budgets: dict[torch.device, Any]
        if isinstance(self.budget, Mapping):
            budgets = {device_of(each): size for each, size in self.budget.items()}
            if not budgets or not set(budgets) <= set(devices):
                names = ", ".join(map(str, devices)) or "no accelerator"
                raise invalid("budget", dict(self.budget), f"sizes for devices among: {names}")
            devices = [device for device in devices if device in budgets]
        elif not devices:
            return {device_of("cpu"): dataclasses.replace(self, device=None, host_budget=None)}
        else:
            budgets = dict.fromkeys(devices, self.budget)
        return {
            device: dataclasses.replace(self, device=device, budget=budgets[device])
            for device in devices
        }

    def on_main_device(self) -> Config:
        """Returns the settings for one device if they let the library choose several."""
        return next(iter(self.on_devices().values())) if self.is_automatic() else self

    def torch_device(self) -> torch.device:
        """Returns the device on which the model runs: of several devices, the main one."""
        if self.is_automatic():
            return next(iter(self.on_devices()))
        if isinstance(self.device, Mapping):
            return next(iter(devices_of_map(self.device)))
        if self.device is None and self.backend in ACCELERATED:
            return default_device() or device_of("cpu")
        return device_of("cpu" if self.device is None else self.device)

    def accelerator(self) -> _native.Accelerator | None:
        """Returns the device on which the model runs, or ``None`` for the CPU."""
        if self.device is None and self.backend not in ACCELERATED:
            return None  # without importing torch
        return accelerator(self.torch_device())

    def host_bytes(self) -> int:
        """Returns the memory on the host in which weights for a device are kept, in bytes."""
        if self.host_budget is None or self.accelerator() is None:
            return 0
        budget = parse_budget(self.host_budget)
        if isinstance(budget, int):
            return budget
        share = SHARES[MemoryMode(self.memory_mode)] if budget is None else budget
        return int((_native.available_memory() or 0) * share)

    def shared_directory(self) -> str | None:
        """Returns the directory through which weights are shared, or ``None``."""
        if isinstance(self.shared_cache, bool):
            return str(_native.shared_directory()) if self.shared_cache else None
        return os.fspath(expanded(self.shared_cache))

    def passed_over(self, device: torch.device | None = None) -> list[tuple[str, str]]:
        """Returns the requested backend and why it is not used, or an empty list if it is.

        Args:
            device: The device of the model. ``None`` if it is not known yet.

        Warns:
            NotBuiltWarning: It is not used. Warns once.
        """
        backend = str(self.backend)
        reasons = []
        if self._is_accelerated() and self.device is None:
            if not has_accelerator():
                why = _native.GpuStatus.detect().message()
                reasons.append(f"there is no GPU ({why}), so the model runs on the CPU")
            elif device is not None and device.type == "cpu":
                reasons.append(
                    "PyTorch finds no accelerator to which weights can stream, so the model runs "
                    "on the CPU"
                )
        if backend == BackendType.GPUDIRECT.value and not reasons:
            on = self.accelerator()
            through_host = on.why_no_direct_reads() if on else "the model runs on the CPU"
            if through_host:
                reasons.append(f"{through_host}, so weights are read through memory of the host")
        for reason in reasons:
            not_built(f"BackendType.{backend.upper()}", reason)
        return [(backend, reason) for reason in reasons]

    def conversion_directory(self) -> Path:
        """Returns the directory to which ``from_pretrained`` writes converted tensors.

        Raises:
            ConfigurationError: There is none, because the user has no home directory.
        """
        directory = cache_directory() if self.storage_path is None else Path(self.storage_path)
        if directory is None:
            raise ConfigurationError(
                "the user has no home directory for converted weights: set `storage_path`, or the "
                "environment variable XDG_CACHE_HOME to an absolute path"
            )
        return directory


def cache_directory() -> Path | None:
    """Returns the directory for files that make later runs faster.

    It is in ``$XDG_CACHE_HOME`` if that is an absolute path, or else in ``.cache`` in the home
    directory. None if the user has no home directory.
    """
    return _native.cache_directory()


#: Settings of former versions that no longer exist, with advice.
_REMOVED_FIELDS = {
    "cache_size_layers": "the plan decides how many layers stay in memory; set `budget`",
    "cache_size_gb": "set `budget`",
    "chunk_size_mb": "reads are sized for the storage; set `io_depth` to limit their number",
    "pin_memory": "weights are copied to a device from pinned memory anyway",
    "temp_dir": "set `storage_path`",
    "enable_profiling": "tensorstream.stats(model) is always available",
    "debug_mode": "omit it, because errors always contain all details",
    "dtype": "pass it to from_pretrained, or call model.to(dtype) before offload",
    "metadata": "pass it to tensorstream.save_file",
}

_generated_init = Config.__init__


@functools.wraps(_generated_init)
def _init(self: Config, *args: Any, **fields: Any) -> None:
    known = [field.name for field in dataclasses.fields(Config)]
    if args:
        raise ConfigurationError(
            f'Config takes keyword arguments only, such as budget="600MiB"; got {args[0]!r} '
            "without a name"
        )
    for name in fields:
        if name not in known:
            instead = _REMOVED_FIELDS.get(name)
            close = difflib.get_close_matches(name, known, n=1)
            advice = instead or (
                f"did you mean `{close[0]}`?" if close else "expected " + ", ".join(known)
            )
            raise ConfigurationError(f"Config has no field `{name}`: {advice}")
    _generated_init(self, **fields)


# The generated method would raise a TypeError instead of a ConfigurationError. mypy does not allow
# assignments to methods.
Config.__init__ = _init  # type: ignore[method-assign]


def expanded(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Replaces a leading ``~`` with the home directory of the user.

    Raises:
        ArgumentTypeError: The path is no path.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise ArgumentTypeError(
            f"invalid path: expected a str or os.PathLike, got {type(path).__name__}"
        )
    path = os.fsdecode(path) if isinstance(path, bytes) else path
    return os.path.expanduser(path) if str(os.fspath(path)).startswith("~") else path


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f}"


def parse_budget(budget: int | str, field: str = "budget") -> int | float | None:
    """Converts a budget to bytes (``int``) or to a share of the available memory (``float``).

    Args:
        budget: A number of bytes, a size such as ``"600MiB"``, a share such as ``"50%"``, or
            ``"auto"``, which gives ``None``.

    Raises:
        ConfigurationError: The budget is none of these, or not positive, or a share above 100%.
    """
    wanted = (
        "a positive integer of bytes (below 2**63), a size such as '600MiB', a share of the "
        "available memory such as '50%', or 'auto'"
    )
    if isinstance(budget, str):
        text = budget.strip()
        if text.lower() == "auto":
            return None
        share = None
        try:
            if text.endswith("%"):
                share = float(text[:-1]) / 100
            else:
                budget = _native.parse_bytes(text)
        except ValueError as error:
            raise invalid(field, budget, wanted) from error
        if share is not None:
            if not 0 < share <= 1:
                raise invalid(field, budget, "a share above 0% and up to 100%")
            return share
    if isinstance(budget, bool) or not isinstance(budget, int) or not 0 < budget < 2**63:
        raise invalid(field, budget, wanted)
    return budget


_warned: set[str] = set()


def not_built(what: str, instead: str) -> None:
    """Warns and logs, once per process and feature, that a feature does not exist here.

    Args:
        what: The feature.
        instead: The reason, and what is done instead.
    """
    if what not in _warned:
        _warned.add(what)
        _log.warning("%s: %s", what, instead)
        warnings.warn(f"{what}: {instead}", NotBuiltWarning, stacklevel=6)


def _member(kind: type[E], field: str, value: object) -> E:
    if isinstance(value, kind):
        return value
    for each in kind:
        if isinstance(value, str) and value.lower() == each.value:
            return each
    raise invalid(field, value, "one of " + ", ".join(each.value for each in kind))


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(field, value, f"an integer from {low} to {high}")


def invalid(field: str, value: object, wanted: str) -> ConfigurationError:
    """Returns the error for a field of ``Config`` with an invalid value."""
    return ConfigurationError(f"invalid Config.{field}: {value!r}: expected {wanted}")
