# SPDX-License-Identifier: MIT OR Apache-2.0
"""Views of the storages of remote tensors."""

from __future__ import annotations

from typing import Any

import torch

from ... import _native

META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_as_strided = torch.ops.aten.as_strided.default


def as_strided(tensor: torch.Tensor, sizes: Any, strides: Any, offset: Any) -> torch.Tensor:
    """Returns a view of a remote tensor's storage. Autograd does not record it."""
    return _as_strided.redispatch(META, tensor, sizes, strides, offset)


def is_ours(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is on the device ``ts``."""
    return tensor.device.type == "ts"


def replace(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Replaces the storage, shape and strides of ``tensor`` with those of ``other``, in place."""
    tensor.data = other


def flat_view(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """Returns a one-dimensional tensor of a whole storage."""
    return _native.remote_whole(storage.device.index, storage.data_ptr(), storage.nbytes(), dtype)


def reshape(tensor: torch.Tensor, sizes: Any, strides: Any, offset: Any, nbytes: Any) -> None:
    """Changes the shape of a tensor in place.

    Args:
        tensor: The tensor.
        sizes: Its new sizes.
        strides: Its new strides.
        offset: Its new offset, in elements.
        nbytes: The size in bytes to which its storage grows, if the storage is smaller.
    """
    storage, resized = tensor.untyped_storage(), tensor
    if nbytes > storage.nbytes():
        resized = _native.remote_whole(
            tensor.device.index, storage.data_ptr(), nbytes, tensor.dtype, True
        )
    replace(tensor, as_strided(resized, sizes, strides, offset))
