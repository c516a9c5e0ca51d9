# SPDX-License-Identifier: MIT OR Apache-2.0
"""Run PyTorch models larger than memory: weights streamed from disk under a hard budget.

import tensorstream as ts

model = ts.from_pretrained("path/to/checkpoint", budget="600MiB")
"""

from ._files import convert, load_file, save_file
from ._native import __version__, backends
from ._offload import offload, restore, stats
from ._plan import Plan, plan
from ._transformers import from_pretrained
from .config import BackendType, Config, MemoryMode, PrefetchStrategy
from .errors import (
    BudgetError,
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointPermissionError,
    ChecksumError,
    ConfigurationError,
    MissingTensorError,
    ModelError,
    NotBuiltWarning,
    StorageError,
    TensorStreamError,
    UnitReferencedError,
)

__all__ = [
    "BackendType",
    "BudgetError",
    "CheckpointChangedError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointPermissionError",
    "ChecksumError",
    "Config",
    "ConfigurationError",
    "MemoryMode",
    "MissingTensorError",
    "ModelError",
    "NotBuiltWarning",
    "Plan",
    "PrefetchStrategy",
    "StorageError",
    "TensorStreamError",
    "UnitReferencedError",
    "__version__",
    "backends",
    "convert",
    "from_pretrained",
    "load_file",
    "offload",
    "plan",
    "restore",
    "save_file",
    "stats",
]
