# SPDX-License-Identifier: MIT OR Apache-2.0
"""load_file and save_file: tensors from and to files, .ts and safetensors alike."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from . import _native
from ._lend import NewTensor, as_tensor, dtype_name, write_all
from ._streamed_tensor import TORCH_DTYPES
from .config import Codec
from .errors import ConfigurationError, ModelError

Path = str | os.PathLike[str]


def load_file(path: Path, *, verify: bool = True) -> dict[str, torch.Tensor]:
    """Reads all tensors of a checkpoint into memory. Blocks; shows a bar on a terminal.

    Bytes come by the best way there is, past the page cache what it does not hold, to memory on huge pages. What is
    compressed is decoded on all cores. Tensors that lie beside each other and have less than 16 MiB together share an
    allocation, which is free when the last of them is gone.

    Args:
        path: A ``.safetensors`` or ``.ts`` file, a shard index, or a directory with one of them.
        verify: Compare bytes with their checksums, where the file has them.

    Returns:
        The tensors by name, on the CPU, contiguous.

    Raises:
        CheckpointNotFoundError, CheckpointError: There is no checkpoint, or it is damaged.
        ChecksumError: Bytes are not those that were written; only ``.ts`` files can tell.
        StorageError: Reading failed.
        ModelError: A tensor has a dtype that torch lacks.
    """
    checkpoint = _native.Checkpoint(path)
    for name in checkpoint.names():
        torch_type(checkpoint, name)
    return {
        name: as_tensor(capsule, TORCH_DTYPES[dtype], shape)
        for name, dtype, shape, capsule in checkpoint.load(verify)
    }


def torch_type(checkpoint: _native.Checkpoint, name: str) -> tuple[torch.dtype, list[int]]:
    """What torch calls a tensor's dtype, and its shape; an error if torch has no such tensors."""
    dtype, shape, _ = checkpoint.entry(name)
    torch_dtype = TORCH_DTYPES.get(dtype)
    if torch_dtype is None:
        raise ModelError(f"tensor `{name}` is {dtype}, which torch does not have")
    try:
        torch.empty(shape, dtype=torch_dtype, device="meta")
    except (RuntimeError, TypeError) as error:  # sizes that only an empty tensor can have
        raise ModelError(f"tensor `{name}` has shape {shape}, which torch cannot make: {error}") from error
    return torch_dtype, shape


def save_file(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    codec: Codec = "raw",
    compression_level: int | None = None,
) -> None:
    """Writes tensors to a ``.ts`` or ``.safetensors`` file, which appears whole or not at all. Blocks; shows a bar on
    a terminal.

    Tensors that share memory are written each on its own; those that are not contiguous as if they were.

    Args:
        tensors: By name; on any device.
        path: The file; its suffix says which format. What is there is replaced.
        metadata: Text by key.
        codec: How a ``.ts`` file keeps them; see :func:`convert`.
        compression_level: The codec's, see there.

    Raises:
        ConfigurationError: The suffix names no format, or a tensor, name or key cannot be written, or not so.
        StorageError: Writing failed. What was there before still is.
    """
    for mapping, wanted in ((tensors, torch.Tensor), (metadata or {}, str)):
        for key, value in mapping.items():
            if not isinstance(key, str) or not isinstance(value, wanted):
                raise ConfigurationError(
                    f"cannot write {key!r}: {type(value).__name__}: names are str, metadata str by str"
                )
    specs: list[NewTensor] = [
        (name, dtype_name(name, tensor), list(tensor.shape), None) for name, tensor in tensors.items()
    ]
    writer = _native.FileWriter(path, specs, dict(metadata or {}), codec, compression_level)
    values = list(tensors.values())
    write_all(writer, (values[i] for i in writer.order()), sum(tensor.nbytes for tensor in values), "saving")
