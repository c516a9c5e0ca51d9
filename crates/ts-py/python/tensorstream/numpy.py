# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reads and writes files of NumPy arrays.

The functions are those of ``tensorstream`` with the same names. They raise ``ModelError`` for
dtypes that NumPy lacks, such as BF16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from .config import Codec
from .errors import ConfigurationError, ModelError
from .files import _state_dict as _files
from .files._state_dict import Path

__all__ = ["load", "load_file", "save", "save_file"]

Array = np.ndarray[Any, Any]


def load_file(
    path: Path, *, verify: bool = True, mapped: bool = False, lenient: bool = False
) -> dict[str, Array]:
    """Like ``tensorstream.load_file``, but returns arrays on the CPU.

    Examples:
        >>> import numpy as np, tensorstream.numpy
        >>> tensorstream.numpy.save_file({"a": np.arange(3)}, "a.safetensors")
        >>> tensorstream.numpy.load_file("a.safetensors")
        {'a': array([0, 1, 2])}
    """
    return _arrays(_files.load_file(path, verify=verify, mapped=mapped, lenient=lenient))


def load(data: bytes) -> dict[str, Array]:
    """Like ``tensorstream.load``, but returns arrays.

    Examples:
        >>> import numpy as np, tensorstream.numpy
        >>> tensorstream.numpy.load(tensorstream.numpy.save({"a": np.arange(3)}))
        {'a': array([0, 1, 2])}
    """
    return _arrays(_files.load(data))


def save_file(
    tensors: Mapping[str, Array],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    *,
    codec: Codec = "raw",
    compression_level: int | None = None,
) -> None:
    """Like ``tensorstream.save_file``, but takes arrays.

    Examples:
        >>> import numpy as np, tensorstream.numpy
        >>> tensorstream.numpy.save_file({"a": np.arange(3)}, "a.ts", codec="auto")
    """
    _files.save_file(
        _tensors(tensors), path, metadata, codec=codec, compression_level=compression_level
    )


def save(
    tensors: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
    *,
    format: Literal["safetensors", "ts"] = "safetensors",
    codec: Codec = "raw",
    compression_level: int | None = None,
) -> bytes:
    """Like ``tensorstream.save``, but takes arrays.

    Examples:
        >>> import numpy as np, tensorstream.numpy
        >>> len(tensorstream.numpy.save({"a": np.zeros(100, dtype=np.float32)}))
        472
    """
    return _files.save(
        _tensors(tensors), metadata, format=format, codec=codec, compression_level=compression_level
    )


def _arrays(tensors: dict[str, torch.Tensor]) -> dict[str, Array]:
    return {name: as_array(name, tensor) for name, tensor in tensors.items()}


def as_array(name: str, tensor: torch.Tensor) -> Array:
    """Returns a tensor on the CPU as an array that shares its memory."""
    try:
        array: Array = tensor.numpy()
    except TypeError as error:
        raise ModelError(
            f"tensor `{name}` is {tensor.dtype}, which NumPy does not support"
        ) from error
    return array


def _tensors(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, array in arrays.items():
        try:
            # torch needs contiguous arrays of little-endian numbers.
            plain = np.array(array, dtype=array.dtype.newbyteorder("<"), order="C", copy=None)
            tensors[name] = torch.from_numpy(plain if plain.flags.writeable else plain.copy())
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(f"cannot write array {name!r}: {error}") from error
    return tensors
