# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors from and to files, or bytes in memory, .ts and safetensors alike."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Literal

import torch

from . import _native
from ._lend import NewTensor, as_tensor, dtype_name, lent, write_all, write_then
from ._mapped import MappedFiles
from ._symbolic_tensor import TORCH_DTYPES
from .config import Codec
from .errors import ConfigurationError, ModelError

Path = str | os.PathLike[str]


#: Tensors that wait for another device take at most so many bytes of memory.
_STAGING_BYTES = 256 << 20


def load_file(
    path: Path,
    device: str | int | torch.device = "cpu",
    *,
    verify: bool = True,
    mapped: bool = False,
    lenient: bool = False,
) -> dict[str, torch.Tensor]:
    """Reads all tensors of a checkpoint into memory. Blocks; shows a bar on a terminal.

    Bytes come by the best way there is, past the page cache what it does not hold, to memory on
    huge pages. What is compressed is decoded on all cores. Tensors that lie beside each other and
    have less than 16 MiB together share an allocation, which is free when the last of them is gone.

    Args:
        path: A ``.safetensors`` or ``.ts`` file, a shard index, or a directory with one of them.
        device: Where the tensors go. For one with memory of its own they are moved while the next
            ones are read, through 256 MiB of memory, or twice the largest tensor.
        verify: Compare bytes with their checksums, where the file has them.
        mapped: Make tensors on the CPU views of the file, as safetensors does, which takes no time
            for now: bytes are read when they are first touched, and compared with nothing. Writing
            to a tensor does not change the file. The file must not be truncated or written to while
            they live: the process would be killed, or see other values. What is compressed is read
            as ever.
        lenient: Take safetensors files that are wrong in ways that their own library does not mind:
            names that are empty or stand twice, unknown fields.

    Returns:
        The tensors by name, contiguous.

    Raises:
        CheckpointNotFoundError, CheckpointError: There is no checkpoint, or it is damaged.
        ChecksumError: Bytes are not those that were written; only ``.ts`` files can tell.
        StorageError: Reading failed.
        ModelError: A tensor has a dtype that torch lacks.
    """
    checkpoint = _native.Checkpoint(path, lenient)
    kinds = {name: torch_type(checkpoint, name) for name in checkpoint.names()}
    device = torch.device(device)
    if mapped:
        files = MappedFiles(checkpoint)
        return {name: _view_or_read(files, checkpoint, name).to(device) for name in kinds}
    if device.type == "cpu":
        return {
            name: as_tensor(capsule, *kinds[name])
            for name, _, _, capsule in checkpoint.load(verify)
        }
    tensors: dict[str, torch.Tensor] = {}

    def take(name: str, _dtype: str, _shape: list[int], capsule: object) -> None:
        tensors[name] = as_tensor(capsule, *kinds[name]).to(device)

    checkpoint.load_each(verify, _STAGING_BYTES, take)
    return {name: tensors[name] for name in kinds}


def load_into(
    tensors: Mapping[str, torch.Tensor], path: Path, *, verify: bool = True, lenient: bool = False
) -> None:
    """Reads tensors of a checkpoint into tensors that are there, such as a model's ``state_dict``.
    Blocks; shows a bar on a terminal.

    Takes some 2 MiB of memory for each of 16 threads or, where there are more, of as many as there
    are cores; none of the system's fresh pages, which can be what bounds :func:`load_file`.

    Args:
        tensors: Where each goes, by its name in the checkpoint, of its dtype and shape: on the CPU,
            contiguous, no two of them over the same memory. Autograd does not see the change.
        path: A ``.safetensors`` or ``.ts`` file, a shard index, or a directory with one of them.
        verify: Compare bytes with their checksums, where the file has them.
        lenient: See :func:`load_file`.

    Raises:
        CheckpointNotFoundError, CheckpointError: There is no checkpoint, or it is damaged.
        MissingTensorError: It has no such tensor.
        ConfigurationError: A tensor is of another dtype or shape, or cannot be filled.
        ChecksumError, StorageError: Bytes are not those that were written, or did not come. What
            the tensors hold is then undefined.
    """
    checkpoint = _native.Checkpoint(path, lenient)
    ends: list[tuple[int, int, str]] = []
    for name, tensor in tensors.items():
        dtype, shape = torch_type(checkpoint, name)
        given = (tensor.dtype, list(tensor.shape), tensor.device.type, tensor.is_contiguous())
        if given != (dtype, shape, "cpu", True) or tensor.is_conj() or tensor.is_neg():
            raise ConfigurationError(
                f"cannot load `{name}`, {dtype} {shape}, into a "
                f"{'' if given[3] else 'scattered '}tensor of "
                f"{given[0]} {given[1]} on {given[2]}"
            )
        ends.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name))
    ends = sorted(end for end in ends if end[0] < end[1])
    for (_, end, first), (begin, _, second) in pairwise(ends):
        if begin < end:
            raise ConfigurationError(f"cannot load `{first}` and `{second}` into the same memory")
    checkpoint.load_into([(name, lent(tensor)) for name, tensor in tensors.items()], verify)


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Reads all tensors of a file that is in memory.

    Args:
        data: The bytes of a ``.safetensors`` or ``.ts`` file; which, they say themselves.

    Returns:
        The tensors by name, on the CPU, contiguous; none of them shares memory with ``data``.

    Raises:
        CheckpointError, ChecksumError: It is no such file, or damaged.
        ModelError: A tensor has a dtype that torch lacks.
    """
    checkpoint = _native.Checkpoint.from_bytes(bytes(data))
    return {name: read_tensor(checkpoint, name) for name in checkpoint.names()}


def read_tensor(
    checkpoint: _native.Checkpoint, name: str, block: list[tuple[int, int]] | None = None
) -> torch.Tensor:
    """Reads one tensor, or of each of its dimensions the elements from one to another."""
    dtype, shape = torch_type(checkpoint, name)
    if block is None:
        block = [(0, size) for size in shape]
    tensor = torch.empty([end - begin for begin, end in block], dtype=dtype, device="cpu")
    checkpoint.read_block(name, block, lent(tensor))
    return tensor


def _view_or_read(files: MappedFiles, checkpoint: _native.Checkpoint, name: str) -> torch.Tensor:
    view = files.view(name, *torch_type(checkpoint, name))
    return read_tensor(checkpoint, name) if view is None else view


def torch_type(checkpoint: _native.Checkpoint, name: str) -> tuple[torch.dtype, list[int]]:
    """What torch calls a tensor's dtype, and its shape; an error if torch has no such tensors."""
    dtype, shape, _ = checkpoint.entry(name)
    torch_dtype = TORCH_DTYPES.get(dtype)
    if torch_dtype is None:
        raise ModelError(f"tensor `{name}` is {dtype}, which torch does not have")
    try:
        torch.empty(shape, dtype=torch_dtype, device="meta")
    except (RuntimeError, TypeError) as error:  # sizes that only an empty tensor can have
        raise ModelError(
            f"tensor `{name}` has shape {shape}, which torch cannot make: {error}"
        ) from error
    return torch_dtype, shape


def save_file(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    codec: Codec = "raw",
    compression_level: int | None = None,
) -> None:
    """Writes tensors to a ``.ts`` or ``.safetensors`` file, which appears whole or not at all.
    Blocks; shows a bar on a terminal.

    Tensors that share memory are written each on its own; those that are not contiguous as if they
    were.

    Args:
        tensors: By name; on any device.
        path: The file; its suffix says which format. What is there is replaced.
        metadata: Text by key.
        codec: How a ``.ts`` file keeps them; see :func:`convert`.
        compression_level: The codec's, see there.

    Raises:
        ConfigurationError: The suffix names no format, or a tensor, name or key cannot be written,
            or not so.
        StorageError: Writing failed. What was there before still is.
    """
    specs, values, total = _specs(tensors, metadata)
    writer = _native.FileWriter(path, specs, dict(metadata or {}), codec, compression_level)
    write_all(writer, (values[i] for i in writer.order()), total, "saving")


def append_file(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    remove: Iterable[str] = (),
    codec: Codec = "raw",
    compression_level: int | None = None,
) -> None:
    """Adds tensors to a ``.ts`` file that is there, in the place of those of the same name. Blocks;
    shows a bar on a terminal.

    The file has either all of what is new or none of it, also after a loss of power. What is
    replaced or removed takes room until :func:`compact`. Whoever has the file open is told by the
    next read that it has changed.

    Args:
        tensors: By name; on any device.
        path: The file.
        metadata: Text by key, beside what the file has.
        remove: Names of tensors that the file shall not have any more.
        codec: How the new tensors are kept; see :func:`convert`.
        compression_level: The codec's, see there.

    Raises:
        CheckpointNotFoundError, CheckpointError: There is no such file, or it is damaged.
        MissingTensorError: A tensor that shall be removed is not there.
        ConfigurationError: It is no ``.ts`` file, or a tensor, name or key cannot be written, or
            not so.
        StorageError: Writing failed. The file has what it had; or, when all that failed is that its
            new state could not be brought to the disk, what is new.
    """
    specs, values, total = _specs(tensors, metadata)
    writer = _native.FileWriter.append(
        path, specs, list(remove), dict(metadata or {}), codec, compression_level
    )
    write_all(writer, (values[i] for i in writer.order()), total, "appending")


def save(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    format: Literal["safetensors", "ts"] = "safetensors",
    codec: Codec = "raw",
    compression_level: int | None = None,
) -> bytes:
    """The bytes of a file of these tensors, as :func:`save_file` would write it.

    Args:
        tensors: By name; on any device.
        metadata: Text by key.
        format: Of the file.
        codec: How a ``.ts`` file keeps them; see :func:`convert`.
        compression_level: The codec's, see there.

    Raises:
        ConfigurationError: There is no such format, or a tensor, name or key cannot be written, or
            not so.
    """
    specs, values, total = _specs(tensors, metadata)
    name = f"bytes.{format}"
    writer = _native.FileWriter.in_memory(
        name, specs, dict(metadata or {}), codec, compression_level
    )
    return write_then(writer, (values[i] for i in writer.order()), total, "saving", writer.to_bytes)


def _specs(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> tuple[list[NewTensor], list[torch.Tensor], int]:
    """What is to be written, the tensors, and how many bytes they have."""
    for mapping, wanted in ((tensors, torch.Tensor), (metadata or {}, str)):
        for key, value in mapping.items():
            if not isinstance(key, str) or not isinstance(value, wanted):
                raise ConfigurationError(
                    f"cannot write {key!r}: {type(value).__name__}: names are str, metadata str "
                    "by str"
                )
    specs: list[NewTensor] = [
        (name, dtype_name(name, tensor), list(tensor.shape), None)
        for name, tensor in tensors.items()
    ]
    values = list(tensors.values())
    return specs, values, sum(tensor.nbytes for tensor in values)
