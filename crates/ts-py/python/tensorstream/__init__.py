# SPDX-License-Identifier: MIT OR Apache-2.0
"""Run PyTorch models larger than memory: weights streamed from disk under a hard budget.

import tensorstream as ts

model = ts.from_pretrained("path/to/checkpoint", budget="600MiB")
"""

from ._native import __version__, backends
from ._offload import offload, restore, stats
from ._plan import Plan, plan
from ._transformers import from_pretrained
from .config import Config
from .errors import (
    BudgetError,
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointPermissionError,
    ConfigurationError,
    MissingTensorError,
    ModelError,
    StorageError,
    TensorStreamError,
    UnitReferencedError,
)

__all__ = [
    "BudgetError",
    "CheckpointChangedError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointPermissionError",
    "Config",
    "ConfigurationError",
    "MissingTensorError",
    "ModelError",
    "Plan",
    "StorageError",
    "TensorStreamError",
    "UnitReferencedError",
    "__version__",
    "backends",
    "from_pretrained",
    "offload",
    "plan",
    "restore",
    "stats",
]
