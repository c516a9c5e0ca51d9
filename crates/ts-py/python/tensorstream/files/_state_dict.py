# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reads and writes files of tensors in ``.ts`` and safetensors format."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Literal

import torch

from .. import _native
from .._dtypes import TORCH_DTYPES
from ..config import Codec
from ..errors import ConfigurationError, ModelError
from ._capsules import NewTensor, as_capsule, as_tensor, dtype_name, write_all, write_then
from ._mapped import MappedFiles

Path = str | os.PathLike[str]

#: The most host memory for tensors that are being copied to another device, in bytes.
_STAGING_BYTES = 256 << 20


def load_file(
    path: Path,
    device: str | int | torch.device | None = "cpu",
    *,
    verify: bool = True,
    mapped: bool | Literal["auto"] = False,
    lenient: bool = False,
) -> dict[str, torch.Tensor]:
    """Reads all tensors of a checkpoint into memory. Blocks; shows a progress bar on a terminal.

    Reads into huge pages if possible. Reads local files from the page cache if the cache contains
    the data, and with direct I/O otherwise. Compressed tensors are decoded on all cores. Adjacent
    tensors of up to 16 MiB together share an allocation, which is freed when the last of these
    tensors is deleted. Up to 64 MiB of it are kept for the next small checkpoint; `trim` returns
    them to the system.

    Args:
        path: A ``.safetensors`` or ``.ts`` file, a shard index, a directory with one of them, or a
            URL.
        device: The device of the tensors; ``None`` is the CPU. For a device other than the CPU,
            tensors are copied to it while the next ones are read. This uses 256 MiB of host memory,
            or more if the largest tensors need it. For a remote device ("ts"), the machine reads
            the files, which are its own: see ``tensorstream.remote.load_state_dict``.
        verify: Whether to verify checksums, if the file has any.
        mapped: With ``True`` or ``"auto"``, tensors are views of the file where that is possible.
            ``"auto"`` reads and verifies the data before it returns, which is the fastest way to
            load a file once. With ``True``, data is read when it is first used, and not verified.
            Writes to views do not change the file. While views exist, the file must not be written
            to, but it can be replaced. If it is truncated, the process crashes. Compressed and
            unaligned tensors are read as usual, and so are all tensors with ``"auto"`` and a
            device other than the CPU.
        lenient: Whether to accept safetensors files that only the safetensors library accepts, such
            as those with empty names, duplicate names or unknown fields.

    Returns:
        The contiguous tensors, by name.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at ``path``.
        CheckpointError: The checkpoint is damaged.
        CheckpointPermissionError: The process may not read the checkpoint.
        ChecksumError: Data differs from its checksum.
        ConfigurationError: ``mapped`` is ``True``, but ``path`` is a URL or the device is remote;
            or ``mapped`` has another value.
        StorageError: Reading failed.
        ModelError: A tensor has a dtype or a shape that torch does not support.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.arange(3)}, "a.safetensors")
        >>> ts.load_file("a.safetensors")
        {'a': tensor([0, 1, 2])}
    """
    in_page_cache = mapped == "auto"
    if not in_page_cache and mapped not in (True, False):
        raise ConfigurationError(f"mapped={mapped!r}: expected True, False or 'auto'")
    device = torch.device("cpu" if device is None else device)
    if device.type == "ts":
        from ..remote.client._checkpoint import load_state_dict

        if mapped is True:
            raise ConfigurationError("mapped=True: the memory of a machine cannot be mapped here")
        return load_state_dict(path, device, verify=verify, lenient=lenient)
    checkpoint = _native.Checkpoint(path, lenient)
    kinds = {name: torch_type(checkpoint, name) for name in checkpoint.names()}
    if mapped and not in_page_cache:
        files = MappedFiles(checkpoint)
        return {name: _view_or_read(files, checkpoint, name).to(device) for name in kinds}
    if device.type == "cpu":
        return {
            name: as_tensor(capsule, *kinds[name])
            for name, _, _, capsule in checkpoint.load(verify, in_page_cache)
        }
    tensors: dict[str, torch.Tensor] = {}

    def take(name: str, _dtype: str, _shape: list[int], capsule: object) -> None:
        tensors[name] = as_tensor(capsule, *kinds[name]).to(device)

    checkpoint.load_each(verify, _STAGING_BYTES, take)
    return {name: tensors[name] for name in kinds}


def trim() -> int:
    """Returns memory to the system that loaded tensors had until they were deleted.

    `load_file` keeps up to 64 MiB of such memory for the next small checkpoint, because the system
    clears new memory more slowly than tensors are read from the page cache. Near a memory limit of
    the process, a model that streams calls this function by itself. ``ts.metrics()`` reports the
    size of the memory as ``tensorstream_kept_bytes``.

    Returns:
        The size of the memory in bytes.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.zeros(1 << 20)}, "a.ts")
        >>> del ts.load_file("a.ts")["a"]
        >>> ts.trim() >= 4 << 20
        True
    """
    return _native.trim()


def load_into(
    tensors: Mapping[str, torch.Tensor], path: Path, *, verify: bool = True, lenient: bool = False
) -> None:
    """Reads tensors of a checkpoint into existing tensors. Blocks; shows a progress bar.

    Allocates no memory for the tensors, so it is faster than ``load_file`` where allocating pages
    limits the speed. Uses about 2 MiB for each of 16 threads, or of fewer threads if
    the page cache contains the data.

    Args:
        tensors: The targets, by name in the checkpoint. They must have the dtypes and shapes of the
            checkpoint, be contiguous, and not overlap. Autograd does not notice the change. Those
            on another device than the CPU are copied there through up to 256 MiB of host memory,
            or more if a tensor needs it.
        path: See ``load_file``.
        verify: See ``load_file``.
        lenient: See ``load_file``.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at ``path``.
        CheckpointError: The checkpoint is damaged.
        CheckpointPermissionError: The process may not read the checkpoint.
        MissingTensorError: The checkpoint lacks a tensor.
        ConfigurationError: A target has another dtype or shape, is not contiguous, is on the meta
            device, overlaps another target, or is lazily conjugated or negated.
        ChecksumError: Data differs from its checksum. The content of the targets is then undefined.
        StorageError: Reading failed. The content of the targets is then undefined.
        ModelError: A tensor has a dtype that torch lacks.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.arange(3)}, "a.safetensors")
        >>> target = torch.zeros(3, dtype=torch.int64)
        >>> ts.load_into({"a": target}, "a.safetensors")
        >>> target
        tensor([0, 1, 2])
    """
    checkpoint = _native.Checkpoint(path, lenient)
    ends: list[tuple[str, int, int, str]] = []
    for name, tensor in tensors.items():
        dtype, shape = torch_type(checkpoint, name)
        actual = (tensor.dtype, list(tensor.shape), tensor.is_meta, tensor.is_contiguous())
        if actual != (dtype, shape, False, True) or tensor.is_conj() or tensor.is_neg():
            lazy = "lazily conjugated or negated " if tensor.is_conj() or tensor.is_neg() else ""
            raise ConfigurationError(
                f"cannot load `{name}`: expected a contiguous tensor of {dtype} {shape}, got a "
                f"{lazy}{'' if actual[3] else 'non-contiguous '}tensor of {actual[0]} {actual[1]} "
                f"on {tensor.device.type}"
            )
        end = tensor.data_ptr() + tensor.nbytes
        ends.append((str(tensor.device), tensor.data_ptr(), end, name))
    ends = sorted(each for each in ends if each[1] < each[2])
    for (one, _, end, first), (other, begin, _, second) in pairwise(ends):
        if one == other and begin < end:
            raise ConfigurationError(
                f"cannot load `{first}` and `{second}`: their targets overlap in memory"
            )
    on_host = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
    _read_into(checkpoint, on_host, verify)
    group: dict[str, torch.Tensor] = {}
    elsewhere = [name for name in tensors if name not in on_host]
    for name in elsewhere:
        group[name] = torch.empty_like(tensors[name], device="cpu")
        if name == elsewhere[-1] or sum(each.nbytes for each in group.values()) >= _STAGING_BYTES:
            _read_into(checkpoint, group, verify)
            for other, read in group.items():
                tensors[other].data.copy_(read)
            group = {}


def _read_into(
    checkpoint: _native.Checkpoint, tensors: Mapping[str, torch.Tensor], verify: bool
) -> None:
    if tensors:
        capsules = [(name, as_capsule(tensor)) for name, tensor in tensors.items()]
        checkpoint.load_into(capsules, verify)


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Reads all tensors from the bytes of a file.

    Args:
        data: The bytes of a ``.safetensors`` or ``.ts`` file. The format is detected.

    Returns:
        All tensors by name, contiguous and on the CPU. They do not share memory with ``data``.

    Raises:
        CheckpointError: ``data`` is not a file in one of these formats, or is damaged.
        ChecksumError: Data differs from its checksum.
        ModelError: A tensor has a dtype that torch lacks.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.load(ts.save({"a": torch.arange(3)}))
        {'a': tensor([0, 1, 2])}
    """
    return read_all(_native.Checkpoint.from_bytes(bytes(data)))


def read_all(checkpoint: _native.Checkpoint) -> dict[str, torch.Tensor]:
    """Reads all tensors of a checkpoint, one after the other."""
    return {name: read_tensor(checkpoint, name) for name in checkpoint.names()}


def read_tensor(
    checkpoint: _native.Checkpoint, name: str, block: list[tuple[int, int]] | None = None
) -> torch.Tensor:
    """Reads a tensor, or a block of it.

    Args:
        checkpoint: The checkpoint.
        name: The name of the tensor.
        block: The first index and the end index of each dimension. ``None`` reads all elements.
    """
    dtype, shape = torch_type(checkpoint, name)
    if block is None:
        block = [(0, size) for size in shape]
    tensor = torch.empty([end - begin for begin, end in block], dtype=dtype, device="cpu")
    checkpoint.read_block(name, block, as_capsule(tensor))
    return tensor


def _view_or_read(files: MappedFiles, checkpoint: _native.Checkpoint, name: str) -> torch.Tensor:
    view = files.view(name, *torch_type(checkpoint, name))
    return read_tensor(checkpoint, name) if view is None else view


def torch_type(checkpoint: _native.Checkpoint, name: str) -> tuple[torch.dtype, list[int]]:
    """Returns the torch dtype and the shape of a tensor.

    Raises:
        ModelError: torch does not support the dtype or the shape.
    """
    dtype, shape, _ = checkpoint.entry(name)
    torch_dtype = TORCH_DTYPES.get(dtype)
    if torch_dtype is None:
        raise ModelError(f"tensor `{name}` has dtype {dtype}, which torch does not support")
    try:
        torch.empty(shape, dtype=torch_dtype, device="meta")
    except (RuntimeError, TypeError) as error:  # an empty tensor can have sizes that overflow
        raise ModelError(
            f"tensor `{name}` has shape {shape}, which torch does not support: {error}"
        ) from error
    return torch_dtype, shape


def save_file(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    metadata: Mapping[str, object] | None = None,
    *,
    codec: Codec = "raw",
    compression_level: int | None = None,
) -> None:
    """Writes tensors to a file atomically. Blocks; shows a progress bar.

    Tensors that share memory are written separately. Non-contiguous tensors are written as
    contiguous.

    Args:
        tensors: The tensors by name, on any device.
        path: A ``.ts`` or ``.safetensors`` file. An existing file is replaced.
        metadata: Strings by key, which are stored in the file. Numbers, lists and whatever else
            JSON has are stored as its text, which ``json.loads`` reads.
        codec: The compression of a ``.ts`` file; see ``convert``.
        compression_level: The level of the codec; see ``convert``.

    Raises:
        CheckpointPermissionError: The process may not write the file.
        ConfigurationError: The suffix does not name a format, or an argument, tensor, name or key
            is invalid.
        StorageError: Writing failed. An existing file is unchanged.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.arange(3)}, "a.ts", codec="auto")
    """
    specs, values, total = _specs(tensors)
    kept = None if metadata is None else _as_text(metadata)
    writer = _native.FileWriter(path, specs, kept, codec, compression_level)
    write_all(writer, (values[i] for i in writer.order()), total, "saving")


def append_file(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    metadata: Mapping[str, object] | None = None,
    *,
    remove: Iterable[str] = (),
    codec: Codec = "raw",
    compression_level: int | None = None,
) -> None:
    """Adds, replaces or removes tensors of a ``.ts`` file. Blocks; shows a progress bar.

    The change is atomic, also after a crash or a power failure. ``compact`` reclaims the space of
    replaced and removed tensors. Readers that have the file open get a ``CheckpointChangedError``
    at their next read.

    Args:
        tensors: The tensors by name, on any device.
        path: The file.
        metadata: Strings by key, which are added to the metadata of the file; other values are
            stored as text, see ``save_file``.
        remove: Names of tensors to remove.
        codec: The compression of the new tensors; see ``convert``.
        compression_level: The level of the codec; see ``convert``.

    Raises:
        CheckpointNotFoundError: There is no file at ``path``.
        CheckpointError: The file is damaged.
        CheckpointPermissionError: The process may not write the file.
        MissingTensorError: A tensor to remove does not exist.
        ConfigurationError: The file is not a ``.ts`` file, or an argument, tensor, name or key is
            invalid.
        StorageError: Writing failed. The file is unchanged, or has the new content if only the last
            flush failed.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.arange(3)}, "a.ts")
        >>> ts.append_file({"b": torch.ones(1)}, "a.ts", remove=["a"])
        >>> ts.load_file("a.ts")
        {'b': tensor([1.])}
    """
    specs, values, total = _specs(tensors)
    writer = _native.FileWriter.append(
        path, specs, list(remove), _as_text(metadata or {}), codec, compression_level
    )
    write_all(writer, (values[i] for i in writer.order()), total, "appending")


def save(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, object] | None = None,
    *,
    format: Literal["safetensors", "ts"] = "safetensors",
    codec: Codec = "raw",
    compression_level: int | None = None,
) -> bytes:
    """Returns the bytes of the file that ``save_file`` would write.

    Args:
        tensors: The tensors by name, on any device.
        metadata: Strings by key, which are stored in the file. Numbers, lists and whatever else
            JSON has are stored as its text, which ``json.loads`` reads.
        format: The format of the file.
        codec: The compression of a ``.ts`` file; see ``convert``.
        compression_level: The level of the codec; see ``convert``.

    Raises:
        ConfigurationError: The format is unknown, or another argument, a tensor, a name or a key is
            invalid.

    Examples:
        >>> import tensorstream as ts, torch
        >>> len(ts.save({"a": torch.zeros(100)}))
        472
    """
    specs, values, total = _specs(tensors)
    name = f"bytes.{format}"
    kept = None if metadata is None else _as_text(metadata)
    writer = _native.FileWriter.in_memory(name, specs, kept, codec, compression_level)
    return write_then(writer, (values[i] for i in writer.order()), total, "saving", writer.to_bytes)


def _as_text(metadata: Mapping[str, object]) -> dict[str, str]:
    """Returns metadata as it is stored: strings as they are, other values as JSON."""
    stored: dict[str, str] = {}
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise ConfigurationError(
                f"cannot write metadata {key!r}: expected a key of type str, "
                f"got {type(key).__name__}"
            )
        try:
            text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"cannot write metadata {key!r}: {error}; pass a string, or what JSON can hold"
            ) from error
        stored[key] = text
    return stored


def _specs(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[list[NewTensor], list[torch.Tensor], int]:
    """Returns the specifications of the tensors, the tensors, and their size in bytes."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ConfigurationError(
                f"cannot write {name!r}: expected a name of type str and a value of type Tensor, "
                f"got {type(name).__name__} and {type(tensor).__name__}"
            )
    specs: list[NewTensor] = [
        (name, dtype_name(name, tensor), list(tensor.shape), None)
        for name, tensor in tensors.items()
    ]
    values = list(tensors.values())
    return specs, values, sum(tensor.nbytes for tensor in values)
