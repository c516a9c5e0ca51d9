# SPDX-License-Identifier: MIT OR Apache-2.0
"""convert and compact: from file to file, without a tensor being made."""

from __future__ import annotations

import os

from . import _native
from .config import Codec

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
    """Writes a checkpoint into one file, or an index and shards: every tensor bit for bit, and the
    metadata. Blocks; shows a bar on a terminal.

    A conversion to ``.ts`` that was cut short, by whatever, goes on where it was, to a GiB, when it
    is called again.

    A safetensors file that its library wrote comes back byte for byte from a ``.ts`` made of it,
    however that is compressed. Needs some 60 MiB of memory, and a few more for each thread that
    compresses.

    Args:
        source: A ``.safetensors`` or ``.ts`` file, a shard index, or a directory with one of them.
        target: A ``.ts`` or ``.safetensors`` file, which appears whole or not at all; what is there
            is replaced. Or a name that ends in ``.safetensors.index.json``, which must not be
            there.
        codec: How a ``.ts`` file keeps tensors. ``"raw"``: as they are, to be mapped and streamed.
            ``"auto"``: whatever makes each smaller, by at least 3%. Or one for all that it can
            take: ``"split"`` (floats, lossless; bf16 weights come to two thirds), ``"zstd"``,
            ``"lz4"``, ``"zlib"``.
        compression_level: -7 to 22 for zstd (3 if not given), 0 to 9 for zlib (6). Other codecs
            have none.
        jobs: Threads that compress; as many as there are cores if not given.
        max_shard_size: The most bytes of tensors in one shard, or such as ``"2GB"``; 5 GB if not
            given.

    Raises:
        CheckpointNotFoundError, CheckpointError, ChecksumError: ``source`` is not there, or
            damaged.
        ConfigurationError: The suffix of ``target`` names no format, or it or the codec cannot do
            what was asked.
        StorageError: Reading or writing failed. What was there before still is.
    """
    shard = (
        _native.parse_bytes(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    )
    _native.convert(source, target, codec, compression_level, jobs or 0, shard)


def compact(path: Path) -> None:
    """Writes a ``.ts`` file anew, without what :func:`append_file` left unused. Blocks; shows a bar
    on a terminal.

    Everything is compared with its checksums on the way. What is there stays until the new file is,
    beside which it takes room meanwhile.

    Raises:
        CheckpointNotFoundError, CheckpointError, ChecksumError: The file is not there, or damaged.
        ConfigurationError: It is no ``.ts`` file.
        StorageError: Reading or writing failed.
    """
    _native.compact(path)
