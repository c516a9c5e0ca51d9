# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reads and writes NumPy arrays in ``.ts`` and safetensors files.

Each function works like the function with the same name in ``tensorstream``. Reading also raises
``ModelError`` for dtypes that NumPy lacks, such as BF16.
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
    path: Path,
    *,
    verify: bool = True,
    mapped: bool | Literal["auto"] = False,
    lenient: bool = False,
) -> dict[str, Array]:
    """Reads all tensors of a checkpoint as arrays. Blocks; shows a progress bar on a terminal.

    The arguments and errors are those of ``tensorstream.load_file``, without ``device``.

    Returns:
        The arrays by name, on the CPU.

    Raises:
        ModelError: A tensor has a dtype that NumPy lacks.

    Examples:
        >>> import numpy as np, tensorstream.numpy
        >>> tensorstream.numpy.save_file({"a": np.arange(3)}, "a.safetensors")
        >>> tensorstream.numpy.load_file("a.safetensors")
        {'a': array([0, 1, 2])}
    """
    return _arrays(_files.load_file(path, verify=verify, mapped=mapped, lenient=lenient))


def load(data: bytes) -> dict[str, Array]:
    """Reads all tensors from the bytes of a file as arrays.

    The arguments and errors are those of ``tensorstream.load``.

    Returns:
        The arrays by name.

    Raises:
        ModelError: A tensor has a dtype that NumPy lacks.

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
    """Writes arrays to a file atomically. Blocks; shows a progress bar.

    The arguments and errors are those of ``tensorstream.save_file``, with arrays instead of
    tensors.

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
    """Returns the bytes of the file that ``save_file`` would write.

    The arguments and errors are those of ``tensorstream.save``, with arrays instead of tensors.

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
    """Returns a NumPy array that shares the memory of a tensor on the CPU.

    Raises:
        ModelError: NumPy lacks the dtype.
    """
    try:
        array: Array = tensor.numpy()
    except TypeError as error:
        raise ModelError(
            f"tensor `{name}` has dtype {tensor.dtype}, which NumPy does not support"
        ) from error
    return array


def _tensors(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, array in arrays.items():
        try:
            # torch accepts neither big-endian numbers nor negative strides.
            plain = np.array(array, dtype=array.dtype.newbyteorder("<"), order="C", copy=None)
            tensors[name] = torch.from_numpy(plain if plain.flags.writeable else plain.copy())
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"cannot write {name!r}: expected a NumPy array of a dtype that torch supports, "
                f"got {type(array).__name__}: {error}"
            ) from error
    return tensors
