# SPDX-License-Identifier: MIT OR Apache-2.0
"""PyTorch's dtypes by their names in files and by their numbers.

The table is the native module's.
"""

from __future__ import annotations

import torch

from . import _native

#: PyTorch's dtypes by their safetensors names. A dtype that the installed PyTorch lacks is absent.
TORCH_DTYPES: dict[str, torch.dtype] = {
    stored: getattr(torch, name)
    for name, stored, *_ in _native.DTYPES
    if stored is not None and hasattr(torch, name)
}
#: The safetensors names of PyTorch's dtypes.
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
#: The numbers (``c10::ScalarType``) of PyTorch's dtypes.
SCALAR_TYPES: dict[torch.dtype, int] = {
    getattr(torch, name): number for name, _, number, _ in _native.DTYPES if hasattr(torch, name)
}
