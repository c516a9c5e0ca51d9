# SPDX-License-Identifier: MIT OR Apache-2.0
"""How streaming is set up."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from . import _native
from .errors import BudgetError, BudgetWarning, ConfigurationError, NotBuiltWarning

E = TypeVar("E", bound=enum.Enum)

_log = logging.getLogger("tensorstream")


class BackendType(enum.Enum):
    """How files are read, in the terms of older configurations. Each is a backend of
    ``tensorstream.backends``, or falls back to one; ``tensorstream.stats`` gives the reason
    under ``passed_over``."""

    #: The best that is available.
    AUTO = "auto"
    #: Copied from mappings of the files. Another process that truncates one meanwhile ends this
    #: one.
    MMAP = "mmap"
    #: Into memory of a CUDA device.
    CUDA = "cuda"
    #: From storage into memory of a CUDA device, past the CPU.
    GPUDIRECT = "gpudirect"


class PrefetchStrategy(enum.Enum):
    """How far units are read ahead of their use."""

    #: Not at all: each streamed unit is waited for.
    NONE = "none"
    #: The next unit alone.
    NEXT_LAYER = "next_layer"
    #: As far as memory goes that the plan does not give to units that stay; the plan weighs the
    #: two.
    ADAPTIVE = "adaptive"
    #: As ``ADAPTIVE``, with at least half of the budget for reading ahead.
    AGGRESSIVE = "aggressive"


class MemoryMode(enum.Enum):
    """A preset: the share of available memory that is the budget where none is given, and how far
    to read ahead.
    """

    #: Four fifths, ``PrefetchStrategy.AGGRESSIVE``.
    AGGRESSIVE = "aggressive"
    #: Half, ``PrefetchStrategy.ADAPTIVE``.
    BALANCED = "balanced"
    #: A quarter, ``PrefetchStrategy.NEXT_LAYER``.
    CONSERVATIVE = "conservative"


#: How a .ts file keeps tensors.
Codec = Literal["raw", "auto", "split", "zstd", "lz4", "zlib"]


class Settings(TypedDict):
    """What the engine is told beside the budget."""

    max_passes: int
    backend: str | None
    in_flight: int | None
    prefetch: str
    verify: str


#: The rest is for activations.
SHARES = {MemoryMode.AGGRESSIVE: 0.8, MemoryMode.BALANCED: 0.5, MemoryMode.CONSERVATIVE: 0.25}
PREFETCH = {
    MemoryMode.AGGRESSIVE: PrefetchStrategy.AGGRESSIVE,
    MemoryMode.BALANCED: PrefetchStrategy.ADAPTIVE,
    MemoryMode.CONSERVATIVE: PrefetchStrategy.NEXT_LAYER,
}
VERIFY: dict[bool | str, str] = {True: "every_read", "once": "once", False: "never"}
#: Memory that is left to activations, page tables and code where the budget would take all, in
#: bytes.
HEADROOM = 64 << 20
#: What reads in place of a backend that is not built yet, and why.
FALLBACKS: dict[str, tuple[str | None, str]] = {
    "cuda": (None, "CUDA devices are not built yet; weights stream into memory of the CPU"),
    "gpudirect": (None, "memory of GPUs is not built yet; weights stream into memory of the CPU"),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of ``tensorstream.offload``. Every field has a default.

    Args:
        budget: The memory for weights: bytes, or a size such as ``"600MiB"`` or ``"1.5GB"``. By
            default the share of the available memory that ``memory_mode`` says. The logger
            "tensorstream" reports the choice at level INFO.
        storage_path: A directory for weights. For a model that holds weights, they are written
            there; it is created if necessary. For a model on the meta device, the checkpoint to
            stream from, if ``tensorstream.offload`` gets none. For
            ``tensorstream.from_pretrained``, the directory for converted tensors; the user's
            cache directory by default.
        max_passes: Forward passes that can run at once. Each needs its own memory; more wait.
        backend: The I/O backend: a ``BackendType``, its name, or a name of
            ``tensorstream.backends``.
        io_depth: Reads in flight, 1 to 256. By default request size and depth are measured when a
            file system is first read from, for files of 256 MiB or more, within two seconds and
            the budget. They are stored under ``tensorstream/io`` in the user's cache directory.
        num_io_threads: Another name for ``io_depth``.
        prefetch_strategy: How far to read ahead; by default what ``memory_mode`` says.
        memory_mode: A preset for settings that are not given.
        vram_budget_gb: Deprecated: use ``budget``. The budget in GB of 10^9 bytes.
        verify_checksums: Whether to compare weights with their checksums at each read. ``"once"``
            compares them at the first read. ``.ts`` files have checksums, safetensors files do not.
        compression_enabled: Whether to compress weights that are written to ``storage_path``,
            without loss. bf16 shrinks to two thirds. Pays where reading is slower than decoding,
            which reaches 4 GB/s per core.
        compression_level: 1 to 22: compress with zstd at this level, instead of the codec that
            makes each tensor smallest.

    Raises:
        ConfigurationError: A field is out of its range, or the budget is given twice.

    Warns:
        NotBuiltWarning: A field requests a feature that does not exist yet; once for each.

    Examples:
        >>> import tensorstream as ts
        >>> ts.Config(budget="600MiB", io_depth=8).budget
        '600MiB'
    """

    budget: int | str | None = None
    storage_path: str | os.PathLike[str] | None = None
    max_passes: int = 1
    backend: BackendType | str = BackendType.AUTO
    io_depth: int | None = None
    num_io_threads: int | None = None
    prefetch_strategy: PrefetchStrategy | str | None = None
    memory_mode: MemoryMode | str = MemoryMode.BALANCED
    vram_budget_gb: float | None = None
    verify_checksums: bool | str = True
    compression_enabled: bool = False
    compression_level: int | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            parse_budget(self.budget)
        if self.vram_budget_gb is not None:
            self._check_vram_budget()
        if self.storage_path is not None:
            if not isinstance(self.storage_path, str | os.PathLike):
                raise invalid("storage_path", self.storage_path, "a path")
            object.__setattr__(self, "storage_path", expanded(self.storage_path))
        _check_int("max_passes", self.max_passes, 1, 64)
        self._check_io_depth()
        if not isinstance(self.verify_checksums, bool) and self.verify_checksums != "once":
            raise invalid("verify_checksums", self.verify_checksums, 'True, False or "once"')
        if not isinstance(self.compression_enabled, bool):
            raise invalid("compression_enabled", self.compression_enabled, "True or False")
        object.__setattr__(
            self, "memory_mode", _member(MemoryMode, "memory_mode", self.memory_mode)
        )
        prefetch: Any = self.prefetch_strategy or PREFETCH[MemoryMode(self.memory_mode)]
        object.__setattr__(
            self, "prefetch_strategy", _member(PrefetchStrategy, "prefetch_strategy", prefetch)
        )
        backend = self.backend.value if isinstance(self.backend, BackendType) else self.backend
        known = [*(each.value for each in BackendType), *_native.backends()]
        if not isinstance(backend, str) or backend.lower() not in known:
            raise invalid("backend", self.backend, "one of " + ", ".join(known))
        object.__setattr__(self, "backend", backend.lower())
        if backend.lower() in FALLBACKS:
            not_built(f"BackendType.{backend.upper()}", FALLBACKS[backend.lower()][1])
        if self.compression_level is not None:
            _check_int("compression_level", self.compression_level, 1, 22)
            if not self.compression_enabled:
                raise invalid(
                    "compression_level",
                    self.compression_level,
                    "None unless compression_enabled is True",
                )

    def _check_io_depth(self) -> None:
        for name in ("io_depth", "num_io_threads"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1, 256)
        if self.io_depth is not None and self.num_io_threads is not None:
            raise ConfigurationError("io_depth and num_io_threads are the same setting; give one")

    def _check_vram_budget(self) -> None:
        gigabytes: Any = self.vram_budget_gb
        if (
            isinstance(gigabytes, bool)
            or not isinstance(gigabytes, int | float)
            or not 0 < gigabytes < 1e9
        ):
            raise invalid("vram_budget_gb", gigabytes, "a positive number of GB")
        if self.budget is not None:
            raise ConfigurationError(
                "the budget is given twice: as Config.budget and as Config.vram_budget_gb"
            )

    def asked_bytes(self) -> int | None:
        """The budget in bytes, if one was given."""
        if self.budget is not None:
            return parse_budget(self.budget)
        if self.vram_budget_gb is not None:
            return max(1, int(self.vram_budget_gb * 1e9))
        return None

    def share_bytes(self, freed_bytes: int = 0) -> int:
        """What ``memory_mode`` takes of the memory that is available, once ``freed_bytes`` more
        are.
        """
        return int(self._available_bytes(freed_bytes) * SHARES[MemoryMode(self.memory_mode)])

    def working_bytes(self) -> int:
        """Memory for what is done before the model streams."""
        asked = self.asked_bytes()
        return self.share_bytes() if asked is None else asked

    def _available_bytes(self, freed_bytes: int) -> int:
        available = _native.available_memory()
        if available is None:
            raise invalid(
                "budget", None, "a size, because the available memory cannot be detected here"
            )
        return available + freed_bytes

    def fitted_bytes(self, smallest: int, whole: int, freed_bytes: int = 0) -> int:
        """Returns the budget for a model that needs ``smallest`` to ``whole`` bytes: the one that
        was given, or the share of ``memory_mode``, but no more than there is memory for.

        Raises:
            BudgetError: There is less memory than the model needs.

        Warns:
            BudgetWarning: There is less memory than was asked for.
        """
        asked = self.asked_bytes()
        if asked is not None and (asked < smallest or _native.available_memory() is None):
            return asked  # refused by the engine, with the smallest that works
        available = self._available_bytes(freed_bytes)
        # For activations, page tables, and the pages of code that are not mapped yet.
        room = available - available // 16 - HEADROOM
        wanted = self.share_bytes(freed_bytes) if asked is None else asked
        if smallest > available - HEADROOM // 2:
            raise BudgetError(
                f"not enough memory: {_mib(available)} MiB are available, and the model needs at "
                f"least {_mib(smallest)} MiB for weights and {_mib(HEADROOM // 2)} MiB for the "
                "rest; raise the memory limit of this process"
            )
        budget = max(smallest, min(wanted, room))
        if asked is None:
            _log.info("budget %s MiB of %s MiB available", _mib(budget), _mib(available))
        elif min(asked, whole) > budget:
            warnings.warn(
                f"budget {_mib(asked)} MiB exceeds the {_mib(available)} MiB of memory that are "
                f"available to this process; using {_mib(budget)} MiB",
                BudgetWarning,
                stacklevel=4,
            )
            return budget
        return budget if asked is None else asked

    def codec(self) -> Codec:
        """How weights are written."""
        if not self.compression_enabled:
            return "raw"
        return "auto" if self.compression_level is None else "zstd"

    def level(self) -> int | None:
        """The codec's level."""
        return self.compression_level if self.compression_enabled else None

    def settings(self) -> Settings:
        """What the engine is told beside the budget."""
        backend = str(self.backend)
        if backend in FALLBACKS:
            name = FALLBACKS[backend][0]
        else:
            name = None if backend == BackendType.AUTO.value else backend
        return {
            "max_passes": self.max_passes,
            "backend": name,
            "in_flight": self.io_depth or self.num_io_threads,
            "prefetch": PrefetchStrategy(self.prefetch_strategy).value,
            "verify": VERIFY[self.verify_checksums],
        }

    def passed_over(self) -> list[tuple[str, str]]:
        """The backend that was asked for and is not built, with the reason."""
        backend = str(self.backend)
        return [(backend, FALLBACKS[backend][1])] if backend in FALLBACKS else []

    def conversion_directory(self) -> Path:
        """Where tensors are written that have to be converted."""
        if self.storage_path is not None:
            return Path(self.storage_path)
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "tensorstream"


#: Settings of the older TensorStream that this one does not have, and what takes their place.
OLDER = {
    "cache_size_layers": "the plan decides how many layers stay; give `budget`",
    "cache_size_gb": "give `budget`",
    "chunk_size_mb": "reads are sized to suit the storage; give `io_depth` for their number",
    "pin_memory": "there is no copy to a GPU to pin memory for",
    "temp_dir": "give `storage_path`",
    "enable_profiling": "tensorstream.stats(model) is always measured",
    "debug_mode": "every error names the file, the tensor and the offset",
    "dtype": "give it to from_pretrained, or convert the model",
    "memory_pressure_mode": "the budget is always strict",
    "device": "models stream into memory of the CPU",
    "metadata": "give it to tensorstream.save_file",
}

_make = Config.__init__


@functools.wraps(_make)
def _checked(self: Config, *args: Any, **fields: Any) -> None:
    known = [field.name for field in dataclasses.fields(Config)]
    if args:
        raise ConfigurationError(f"Config takes fields by name, such as Config(budget={args[0]!r})")
    for name in fields:
        if name not in known:
            instead = OLDER.get(name)
            close = difflib.get_close_matches(name, known, n=1)
            advice = instead or (
                f"did you mean `{close[0]}`?" if close else "it has " + ", ".join(known)
            )
            raise ConfigurationError(f"Config has no field `{name}`: {advice}")
    _make(self, **fields)


# The generated one knows no error of ours.
Config.__init__ = _checked  # type: ignore[method-assign]


def expanded(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """A path whose ``~`` is the user's home directory."""
    return os.path.expanduser(path) if str(os.fspath(path)).startswith("~") else path


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f}"


def parse_budget(budget: int | str) -> int:
    """Bytes of a budget as users write it."""
    wanted = "a positive number of bytes or a size such as '600MiB'"
    if isinstance(budget, str):
        try:
            budget = _native.parse_bytes(budget)
        except ValueError as error:
            raise invalid("budget", budget, wanted) from error
    if isinstance(budget, bool) or not isinstance(budget, int) or not 0 < budget < 2**63:
        raise invalid("budget", budget, wanted)
    return budget


_said: set[str] = set()


def not_built(what: str, instead: str) -> None:
    """Says once that something is not built yet, and what happens instead."""
    if what not in _said:
        _said.add(what)
        warnings.warn(f"{what}: {instead}", NotBuiltWarning, stacklevel=4)


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
    """The error that a field of Config is out of its range."""
    return ConfigurationError(f"Config.{field} = {value!r}: must be {wanted}")
