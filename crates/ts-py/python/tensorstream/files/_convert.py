# SPDX-License-Identifier: MIT OR Apache-2.0
"""Converts and compacts files without creating tensors."""

from __future__ import annotations

import os

from .. import _native
from ..config import Codec

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
    """Converts a checkpoint. Blocks; shows a progress bar on a terminal.

    Tensors and metadata are preserved bit for bit. A file of the safetensors library that is
    converted to ``.ts``, with any codec, and back is identical byte for byte. An interrupted
    conversion to a ``.ts`` file of 1 GiB or more resumes when it is called again. Uses about 60 MiB
    of memory, and a few more for each thread that compresses.

    Args:
        source: A ``.safetensors`` or ``.ts`` file, a shard index, a directory with one of them, or
            a URL.
        target: A ``.ts`` or ``.safetensors`` file, which is replaced atomically. Or, for shards, a
            name that ends in ``.safetensors.index.json``, which must not exist.
        codec: The compression of a ``.ts`` file. ``"raw"``: none; the file can be mapped.
            ``"auto"``: for each tensor the codec that makes it smallest, if it saves 3% or more. Or
            one codec for all: ``"split"`` (floats; bf16 shrinks to two thirds), ``"zstd"``,
            ``"lz4"``, ``"zlib"``. All are lossless.
        compression_level: -7 to 22 for zstd (default 3), 0 to 9 for zlib (default 6).
        jobs: Threads that compress; the number of cores by default.
        max_shard_size: The most bytes of tensors in a shard, or a size such as ``"2GB"``; 5 GB by
            default.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at ``source``.
        CheckpointError: It is damaged.
        ChecksumError: Data differs from its checksum.
        ConfigurationError: The suffix of ``target`` is not that of a format, or an argument is
            invalid.
        StorageError: Reading or writing failed. An existing ``target`` is unchanged.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.arange(3)}, "a.safetensors")
        >>> ts.convert("a.safetensors", "a.ts", codec="auto")
    """
    shard = (
        _native.parse_bytes(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    )
    _native.convert(source, target, codec, compression_level, jobs or 0, shard)


def compact(path: Path) -> None:
    """Reclaims the space that ``append_file`` left unused. Blocks; shows a progress bar on a
    terminal.

    Writes a new file, which needs space next to the old one, and verifies all checksums.

    Args:
        path: The ``.ts`` file, which is replaced atomically.

    Raises:
        CheckpointNotFoundError: There is no file at ``path``.
        CheckpointError: It is damaged.
        ChecksumError: Data differs from its checksum.
        ConfigurationError: It is not a ``.ts`` file.
        StorageError: Reading or writing failed. The file is unchanged.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.arange(3)}, "a.ts")
        >>> ts.append_file({"a": torch.ones(1)}, "a.ts")
        >>> ts.compact("a.ts")
    """
    _native.compact(path)
