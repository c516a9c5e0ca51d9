# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors of the device as views of their storages."""

from __future__ import annotations

from typing import Any

import torch

from ... import _native

META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_as_strided = torch.ops.aten.as_strided.default


def as_strided(tensor: torch.Tensor, sizes: Any, strides: Any, offset: Any) -> torch.Tensor:
    """A view of a tensor of the device, below autograd."""
    return _as_strided.redispatch(META, tensor, sizes, strides, offset)


def is_ours(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "ts"


def replace(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """A tensor is what another is: its storage, shape and strides. It stays the same object."""
    tensor.data = other


def whole(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """Another tensor of a storage: all of it, in one dimension."""
    return _native.remote_whole(storage.device.index, storage.data_ptr(), storage.nbytes(), dtype)


def reshape(tensor: torch.Tensor, sizes: Any, strides: Any, offset: Any, nbytes: Any) -> None:
    """Gives a tensor another shape in its storage, which grows to ``nbytes`` if it has fewer."""
    storage, there = tensor.untyped_storage(), tensor
    if nbytes > storage.nbytes():
        there = _native.remote_whole(
            tensor.device.index, storage.data_ptr(), nbytes, tensor.dtype, True
        )
    replace(tensor, as_strided(there, sizes, strides, offset))
