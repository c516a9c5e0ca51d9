# SPDX-License-Identifier: MIT OR Apache-2.0
"""Converts and compacts files without creating tensors."""

from __future__ import annotations

import atexit
import os
import weakref
from concurrent.futures import CancelledError
from typing import Literal, overload

from .. import _native
from ..config import Codec
from ..errors import ConfigurationError

Path = str | os.PathLike[str]


class Conversion:
    """A conversion in the background, as ``convert(..., background=True)`` returns it.

    Deleting it cancels the conversion, as does the end of the process. Can be used on any thread,
    but not in a forked child, where its thread does not exist.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.arange(3)}, "a.safetensors")
        >>> conversion = ts.convert("a.safetensors", "a.ts", background=True)
        >>> conversion.result()
        >>> conversion.done_bytes == conversion.total_bytes
        True
    """

    def __init__(self, native: _native.Conversion, source: str, target: str) -> None:
        self._native = native
        self._paths = (source, target)
        _running.add(self)

    @property
    def done_bytes(self) -> int:
        """The size of the tensors that were converted, in bytes, before compression."""
        return self._native.progress()[0]

    @property
    def total_bytes(self) -> int:
        """The size of all tensors in bytes, before compression; 0 until the source is open."""
        return self._native.progress()[1]

    def done(self) -> bool:
        """Returns whether the conversion has succeeded, failed, or stopped. Does not block."""
        return self._ends_within(0)

    def _ends_within(self, seconds: float) -> bool:
        try:
            return self._native.wait(seconds) is not None
        except Exception:  # the error of the conversion
            return True

    def cancel(self) -> None:
        """Makes the conversion stop soon. Does not block.

        What a ``.ts`` file has so far is kept, and the next conversion with the same arguments
        resumes there.
        """
        self._native.cancel()

    def result(self, timeout: float | None = None) -> None:
        """Blocks until the target is complete.

        Args:
            timeout: The number of seconds after which to give up; ``None`` for no limit.

        Raises:
            TimeoutError: The conversion is still running.
            concurrent.futures.CancelledError: The conversion was cancelled.
            TensorStreamError: The conversion failed, with the errors of ``convert``.
        """
        succeeded = self._native.wait(1e9 if timeout is None else timeout)
        if succeeded is None:
            raise TimeoutError(f"{self!r} is still running after {timeout} s")
        if not succeeded:
            raise CancelledError(f"{self!r} was cancelled")

    def __repr__(self) -> str:
        source, target = self._paths
        done, total = self._native.progress()
        return f"<Conversion of {source} to {target}: {done} of {total} bytes>"


_running: weakref.WeakSet[Conversion] = weakref.WeakSet()


@atexit.register
def _stop() -> None:
    running = list(_running)
    for conversion in running:
        conversion.cancel()
    for conversion in running:
        while not conversion._ends_within(1):
            pass


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)


@overload
def convert(
    source: Path,
    target: Path,
    *,
    codec: Codec = ...,
    compression_level: int | None = ...,
    jobs: int | None = ...,
    max_shard_size: int | str | None = ...,
    background: Literal[False] = ...,
) -> None: ...


@overload
def convert(
    source: Path,
    target: Path,
    *,
    codec: Codec = ...,
    compression_level: int | None = ...,
    jobs: int | None = ...,
    max_shard_size: int | str | None = ...,
    background: Literal[True],
) -> Conversion: ...


def convert(
    source: Path,
    target: Path,
    *,
    codec: Codec = "raw",
    compression_level: int | None = None,
    jobs: int | None = None,
    max_shard_size: int | str | None = None,
    background: bool = False,
) -> Conversion | None:
    """Converts a checkpoint to another format or compression. Blocks; shows a progress bar.

    Tensors and metadata are preserved bit for bit. If the safetensors library wrote a file, then
    converting the file to ``.ts``, with any codec, and back restores it byte for byte.

    An interrupted conversion to one file resumes when ``convert`` is called again with the same
    arguments. After a crash, it repeats at most the last 1 GiB.

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
        jobs: The number of threads that compress. The default is the number of cores, or with
            ``background`` one.
        max_shard_size: The maximum size of the tensors in a shard: bytes, or a size such as
            ``"2GB"``. The default is 5 GB.
        background: Whether to return at once, and convert on a thread of the lowest priority.

    Returns:
        ``None``, or with ``background`` a ``Conversion``, which has the progress and raises the
        errors below.

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
    if background:
        native = _native.Conversion(source, target, codec, compression_level, jobs or 1, shard)
        return Conversion(native, os.fspath(source), os.fspath(target))
    _native.convert(source, target, codec, compression_level, jobs or 0, shard)
    return None


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
