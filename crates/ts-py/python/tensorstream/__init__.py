# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs PyTorch models larger than memory. Their weights stream from disk under a hard budget.

Examples:
    >>> import tensorstream as ts
    >>> model = ts.from_pretrained("path/to/checkpoint", budget="600MiB")  # doctest: +SKIP
"""

from typing import TYPE_CHECKING

from ._native import (
    DType,
    GpuStatus,
    PoolConfig,
    Tensor,
    TensorBuffer,
    TensorMeta,
    __version__,
    backends,
)

if TYPE_CHECKING:
    from .budget import Budget
    from .config import BackendType, Config, MemoryMode, MemoryPressureMode, PrefetchStrategy
    from .devices import register_accelerator
    from .errors import (
        ArgumentTypeError,
        BudgetError,
        BudgetWarning,
        CheckpointChangedError,
        CheckpointError,
        CheckpointNotFoundError,
        CheckpointPermissionError,
        CheckpointWarning,
        ChecksumError,
        ConfigurationError,
        ConnectionLost,
        ConnectionTimeout,
        DeviceError,
        DeviceUnavailableError,
        MissingTensorError,
        ModelError,
        NotBuiltWarning,
        OutOfMemoryError,
        ProtocolError,
        StorageError,
        TensorIndexError,
        TensorStreamError,
        UnitReferencedError,
    )
    from .files._convert import Conversion, compact, convert
    from .files._safe_open import TensorSlice, safe_open
    from .files._state_dict import append_file, load, load_file, load_into, save, save_file, trim
    from .streaming._curve import Curve, CurvePoint
    from .streaming._explain import Explanation, explain
    from .streaming._file_cache import FileCache
    from .streaming._generate import generate_many
    from .streaming._merging import merge
    from .streaming._metrics import metrics
    from .streaming._offload import offload, restore, stats
    from .streaming._plan import Plan, plan
    from .streaming._reload import reload
    from .streaming._stats import (
        ExpertsStats,
        PassStats,
        PlanStats,
        RoutedStats,
        Stats,
        TableStats,
        UnitStats,
    )
    from .streaming._trace import trace
    from .streaming._transformers import from_pretrained
    from .wire._connection import (
        BlockPoolStats,
        Connection,
        ConnectionStats,
        Listener,
        connect,
        listen,
    )

__all__ = [
    "ArgumentTypeError",
    "BackendType",
    "BlockPoolStats",
    "Budget",
    "BudgetError",
    "BudgetWarning",
    "CheckpointChangedError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointPermissionError",
    "CheckpointWarning",
    "ChecksumError",
    "Config",
    "ConfigurationError",
    "Connection",
    "ConnectionLost",
    "ConnectionStats",
    "ConnectionTimeout",
    "Conversion",
    "Curve",
    "CurvePoint",
    "DType",
    "DeviceError",
    "DeviceUnavailableError",
    "ExpertsStats",
    "Explanation",
    "FileCache",
    "GpuStatus",
    "Listener",
    "MemoryMode",
    "MemoryPressureMode",
    "MissingTensorError",
    "ModelError",
    "NotBuiltWarning",
    "OutOfMemoryError",
    "PassStats",
    "Plan",
    "PlanStats",
    "PoolConfig",
    "PrefetchStrategy",
    "ProtocolError",
    "RoutedStats",
    "Stats",
    "StorageError",
    "TableStats",
    "Tensor",
    "TensorBuffer",
    "TensorIndexError",
    "TensorMeta",
    "TensorSlice",
    "TensorStreamError",
    "UnitReferencedError",
    "UnitStats",
    "__version__",
    "append_file",
    "backends",
    "compact",
    "connect",
    "convert",
    "explain",
    "from_pretrained",
    "generate_many",
    "listen",
    "load",
    "load_file",
    "load_into",
    "merge",
    "metrics",
    "offload",
    "plan",
    "register_accelerator",
    "reload",
    "restore",
    "safe_open",
    "save",
    "save_file",
    "stats",
    "trace",
    "trim",
]

_HOMES = {
    "budget": ("Budget",),
    "devices": ("register_accelerator",),
    "files._convert": ("Conversion", "compact", "convert"),
    "files._state_dict": (
        "append_file",
        "load",
        "load_file",
        "load_into",
        "save",
        "save_file",
        "trim",
    ),
    "files._safe_open": ("TensorSlice", "safe_open"),
    "streaming._curve": ("Curve", "CurvePoint"),
    "streaming._explain": ("Explanation", "explain"),
    "streaming._file_cache": ("FileCache",),
    "streaming._generate": ("generate_many",),
    "streaming._merging": ("merge",),
    "streaming._metrics": ("metrics",),
    "streaming._offload": ("offload", "restore", "stats"),
    "streaming._reload": ("reload",),
    "streaming._plan": ("Plan", "plan"),
    "streaming._stats": (
        "ExpertsStats",
        "PassStats",
        "PlanStats",
        "RoutedStats",
        "Stats",
        "TableStats",
        "UnitStats",
    ),
    "streaming._trace": ("trace",),
    "streaming._transformers": ("from_pretrained",),
    "wire._connection": (
        "BlockPoolStats",
        "Connection",
        "ConnectionStats",
        "Listener",
        "connect",
        "listen",
    ),
    "config": ("BackendType", "Config", "MemoryMode", "MemoryPressureMode", "PrefetchStrategy"),
}


def _load(name: str) -> object:
    """Imports a public name when it is first used.

    Importing torch takes about two seconds. The command line, ``convert`` and ``plan`` do not need
    it.
    """
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "errors")
    value: object = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


# Type checkers see the imports above instead, so that they report a misspelt name.
if not TYPE_CHECKING:
    __getattr__ = _load
