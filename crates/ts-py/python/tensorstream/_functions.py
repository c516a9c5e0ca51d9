# SPDX-License-Identifier: MIT OR Apache-2.0
"""What torch's functions want of their operands, by the functions' names."""

from __future__ import annotations

from typing import Any

import torch

#: Methods that ask a tensor about itself, or give it again: they need no bytes.
_METHODS = """
    __deepcopy__ __format__ __hash__ __len__ __reduce_ex__ __repr__ alias as_subclass data_ptr detach dim element_size
    get_device has_names is_complex is_conj is_contiguous is_floating_point is_inference is_neg is_pinned is_set_to
    is_shared is_signed ndimension nelement numel numpy register_hook requires_grad_ retain_grad size storage
    storage_offset stride tolist untyped_storage
"""
_ABOUT = {getattr(torch.Tensor, name) for name in _METHODS.split() if hasattr(torch.Tensor, name)}
_ABOUT |= {torch.is_complex, torch.is_floating_point, torch.numel, torch.result_type, torch.detach}

_OPERATORS = "add and div floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_IN_PLACE = {"__setitem__", *(f"__i{operator}__" for operator in _OPERATORS.split())}


def asks_about(func: Any) -> bool:
    """Whether a function only asks a tensor about itself: an attribute, or one of the list."""
    return getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__") or func in _ABOUT


def writes(func: Any) -> bool:
    """Whether a function writes to its first operand."""
    name = getattr(func, "__name__", "")
    return func not in _ABOUT and (name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")))
