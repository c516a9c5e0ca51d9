# SPDX-License-Identifier: MIT OR Apache-2.0
"""convert: from one container to another, without a tensor being made."""

from __future__ import annotations

import os

from . import _native

Path = str | os.PathLike[str]


def convert(source: Path, target: Path) -> None:
    """Writes a checkpoint into one file: every tensor bit for bit, and the metadata. Blocks; shows a bar on a
    terminal.

    A safetensors file that its library wrote comes back byte for byte from a ``.ts`` made of it. Needs no more memory
    than 16 MiB.

    Args:
        source: A ``.safetensors`` or ``.ts`` file, a shard index, or a directory with one of them.
        target: A ``.ts`` or ``.safetensors`` file. It appears whole or not at all; what is there is replaced.

    Raises:
        CheckpointNotFoundError, CheckpointError, ChecksumError: ``source`` is not there, or damaged.
        ConfigurationError: The suffix of ``target`` names no format.
        StorageError: Reading or writing failed. What was there before still is.
    """
    _native.convert(source, target)
