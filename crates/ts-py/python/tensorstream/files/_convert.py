# SPDX-License-Identifier: MIT OR Apache-2.0
"""Converts and compacts files without creating tensors."""

from __future__ import annotations

import os

from .. import _native
from ..config import Codec
from ..errors import ConfigurationError

Path = str | os.PathLike[str]


def convert(
    source: Path,
    target: Path,
    *,
    codec: Codec = "raw",
    compression_level: int | None = None,
    jobs: int | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Converts a checkpoint to another format or compression. Blocks; shows a progress bar.

    Tensors and metadata are preserved bit for bit. If the safetensors library wrote a file, then
    converting the file to ``.ts``, with any codec, and back restores it byte for byte.

    An interrupted conversion to a ``.ts`` file resumes when ``convert`` is called again with the
    same arguments. After a crash, it repeats at most the last 1 GiB.

    A conversion uses about 60 MiB of memory, plus a few MiB for each thread that compresses.

    Args:
        source: A ``.safetensors`` or ``.ts`` file, a shard index, a directory with one of them, or
            a URL.
        target: A ``.ts`` or ``.safetensors`` file, which is replaced atomically. To write shards,
            the path of an index that ends in ``.safetensors.index.json`` and does not exist yet.
        codec: The compression of a ``.ts`` file. All codecs are lossless.

            - ``"raw"`` does not compress. Only uncompressed tensors can be mapped.
            - ``"auto"`` chooses the codec that makes a tensor smallest, if it saves 3% or more.
            - ``"split"`` compresses floats. bf16 shrinks to two thirds.
            - ``"zstd"``, ``"lz4"`` and ``"zlib"`` compress all tensors.
        compression_level: -7 to 22 for zstd (default 3), 0 to 9 for zlib (default 6). With
            ``"auto"``, it is for the tensors that zstd compresses: integers and booleans.
        jobs: The number of threads that compress. The default is the number of cores.
        max_shard_size: The maximum size of the tensors in a shard: bytes, or a size such as
            ``"2GB"``. The default is 5 GB.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at ``source``.
        CheckpointError: The checkpoint is damaged.
        ChecksumError: Data differs from its checksum.
        CheckpointPermissionError: The process may not read ``source`` or write ``target``.
        ConfigurationError: The suffix of ``target`` does not name a format, or an argument is
            invalid, such as a ``max_shard_size`` that is not a size.
        StorageError: Reading or writing failed. An existing ``target`` is unchanged.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.arange(3)}, "a.safetensors")
        >>> ts.convert("a.safetensors", "a.ts", codec="auto")
    """
    try:
        shard = (
            _native.parse_bytes(max_shard_size)
            if isinstance(max_shard_size, str)
            else max_shard_size
        )
    except ValueError as error:
        raise ConfigurationError(
            f"invalid max_shard_size {max_shard_size!r}: expected bytes or a size such as '2GB'"
        ) from error
    _native.convert(source, target, codec, compression_level, jobs or 0, shard)


def compact(path: Path) -> None:
    """Reclaims the space that ``append_file`` left unused. Blocks; shows a progress bar.

    Writes a new file and verifies all checksums. Until the old file is replaced, both need space.

    Args:
        path: The ``.ts`` file, which is replaced atomically.

    Raises:
        CheckpointNotFoundError: There is no file at ``path``.
        CheckpointError: The file is damaged.
        ChecksumError: Data differs from its checksum.
        CheckpointPermissionError: The process may not read or replace the file.
        ConfigurationError: The file is not a ``.ts`` file.
        StorageError: Reading or writing failed. The file is unchanged.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.arange(3)}, "a.ts")
        >>> ts.append_file({"a": torch.ones(1)}, "a.ts")
        >>> ts.compact("a.ts")
    """
    _native.compact(path)
