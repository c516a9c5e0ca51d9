# SPDX-License-Identifier: MIT OR Apache-2.0
"""Passes the memory of tensors to the native module through DLPack, and writes tensors to files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch.utils import dlpack

from .. import _native
from .._dtypes import SAFETENSORS_DTYPES
from ..errors import ConfigurationError

T = TypeVar("T")

#: A tensor to write: its name, dtype, shape, and the offset of its data in the file, modulo 64. If
#: the offset is ``None``, the writer chooses it.
NewTensor = tuple[str, str, list[int], int | None]


def as_capsule(tensor: torch.Tensor) -> object:
    """Returns a DLPack capsule of the bytes of a contiguous tensor on the CPU.

    Copies the bytes only if the tensor is lazily conjugated or negated.
    """
    with torch.inference_mode(False):
        plain = tensor.detach().resolve_conj().resolve_neg()
        return plain.reshape(-1).view(torch.uint8).__dlpack__()


def as_tensor(capsule: object, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Returns a tensor that shares the memory of a DLPack capsule."""
    # Under inference mode, the result would be an inference tensor, which autograd cannot save.
    with torch.inference_mode(False):
        tensor: torch.Tensor = dlpack.from_dlpack(capsule)
        # Tensors of dtypes that DLPack lacks arrive as bytes.
        return tensor if tensor.dtype == dtype else tensor.view(dtype).view(tuple(shape))


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """Returns the name that files use for the dtype of a tensor.

    Raises:
        ConfigurationError: Files do not support the dtype.
    """
    dtype = SAFETENSORS_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ConfigurationError(
            f"cannot write tensor `{name}`: files do not support {tensor.dtype}"
        )
    return dtype


def write_all(
    writer: _native.FileWriter, tensors: Iterable[torch.Tensor], total_bytes: int, label: str
) -> None:
    """Writes tensors, or parts of them, in order and commits the file. See ``write_then``."""
    write_then(writer, tensors, total_bytes, label, writer.commit)


def write_then(
    writer: _native.FileWriter,
    tensors: Iterable[torch.Tensor],
    total_bytes: int,
    label: str,
    end: Callable[[], T],
) -> T:
    """Writes tensors in order, and calls ``end``. Shows a progress bar.

    If writing fails, the new data is discarded, and an existing file is unchanged.

    Args:
        writer: The file.
        tensors: The tensors, or parts of them, in the order in the file.
        total_bytes: The size of all tensors, for the progress bar.
        label: The label of the progress bar.
        end: Completes the file.

    Returns:
        The result of ``end``.
    """
    bar = _native.Progress(label, total_bytes)
    try:
        for tensor in tensors:
            writer.write(as_capsule(tensor.detach().cpu().contiguous()))
            bar.advance(tensor.nbytes)
        return end()
    finally:
        bar.close()
        writer.abandon()
