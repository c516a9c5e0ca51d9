# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors' bytes, lent to native calls and written to files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch.utils import dlpack

from .. import _native
from .._dtypes import SAFETENSORS_DTYPES
from ..errors import ConfigurationError

T = TypeVar("T")

#: Name, dtype, shape and address modulo 64 of a tensor that is to be written.
NewTensor = tuple[str, str, list[int], int | None]


def lent(tensor: torch.Tensor) -> object:
    """A capsule over the bytes of a contiguous tensor on the CPU."""
    with torch.inference_mode(False):
        plain = tensor.detach().resolve_conj().resolve_neg()
        return plain.reshape(-1).view(torch.uint8).__dlpack__()


def as_tensor(capsule: object, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor over the bytes that a capsule holds."""
    # An inference tensor could not be saved for backward; these can, whatever mode the caller is
    # in.
    with torch.inference_mode(False):
        tensor: torch.Tensor = dlpack.from_dlpack(capsule)
        # Dtypes that DLPack has no code for come as bytes.
        return tensor if tensor.dtype == dtype else tensor.view(dtype).view(tuple(shape))


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """The name of a tensor's dtype in files."""
    dtype = SAFETENSORS_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ConfigurationError(f"tensor `{name}` cannot be written: files have no {tensor.dtype}")
    return dtype


def write_all(
    writer: _native.FileWriter, tensors: Iterable[torch.Tensor], total_bytes: int, label: str
) -> None:
    """Writes tensors, or runs of them, one behind the other and commits; gives the file up if that
    fails.
    """
    write_then(writer, tensors, total_bytes, label, writer.commit)


def write_then(
    writer: _native.FileWriter,
    tensors: Iterable[torch.Tensor],
    total_bytes: int,
    label: str,
    end: Callable[[], T],
) -> T:
    """Writes tensors, or runs of them, one behind the other and ends the file; gives it up if that
    fails.
    """
    bar = _native.Progress(label, total_bytes)
    try:
        for tensor in tensors:
            writer.write(lent(tensor.detach().cpu().contiguous()))
            bar.advance(tensor.nbytes)
        return end()
    finally:
        bar.close()
        writer.abandon()
