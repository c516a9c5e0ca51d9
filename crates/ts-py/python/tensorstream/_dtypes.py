# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tables of PyTorch dtypes, their safetensors names and their ``c10::ScalarType`` numbers.

They are derived from ``DTYPES`` in the native module.
"""

from __future__ import annotations

import torch

from . import _native

#: PyTorch dtypes by safetensors name, without those that the installed PyTorch lacks.
TORCH_DTYPES: dict[str, torch.dtype] = {
    stored: getattr(torch, name)
    for name, stored, *_ in _native.DTYPES
    if stored is not None and hasattr(torch, name)
}
#: Safetensors names by PyTorch dtype.
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
#: ``c10::ScalarType`` numbers by PyTorch dtype.
SCALAR_TYPES: dict[torch.dtype, int] = {
    getattr(torch, name): number for name, _, number, _ in _native.DTYPES if hasattr(torch, name)
}
