# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reads single tensors of a checkpoint, or parts of them."""

from __future__ import annotations

import os
from types import EllipsisType, TracebackType
from typing import Any

import torch

from .. import _native
from ..errors import ConfigurationError, TensorIndexError
from ..numpy import as_array
from ._mapped import MappedFiles
from ._state_dict import read_tensor, torch_type

Path = str | os.PathLike[str]
#: An index of one dimension.
Index = int | slice | list[int] | torch.Tensor | EllipsisType | None


class safe_open:
    """Opens a checkpoint, to read its tensors one at a time. A context manager.

    Works like ``safetensors.safe_open``, and also with ``.ts`` files, shard indexes, directories
    and URLs. Opening a checkpoint reads only its headers.

    Args:
        filename: The path or URL.
        framework: ``"pt"`` (or ``"torch"``) for torch tensors, ``"np"`` (or ``"numpy"``) for NumPy
            arrays.
        device: The device of torch tensors; ``None`` is the CPU, where NumPy arrays always are.
        mapped: Whether to return views of the file. See ``load_file``.
        lenient: Whether to accept files that only the safetensors library accepts. See
            ``load_file``.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at ``filename``.
        CheckpointError: The checkpoint is damaged.
        CheckpointPermissionError: The process may not read the checkpoint.
        ConfigurationError: The framework is unknown.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.arange(12).reshape(4, 3)}, "a.safetensors")
        >>> with ts.safe_open("a.safetensors") as file:
        ...     print(file.keys(), file.get_slice("a")[1:3, 0])
        ['a'] tensor([3, 6])
    """

    def __init__(
        self,
        filename: Path,
        framework: str = "pt",
        device: str | int | torch.device | None = "cpu",
        *,
        mapped: bool = False,
        lenient: bool = False,
    ) -> None:
        if framework not in ("pt", "torch", "np", "numpy"):
            raise ConfigurationError(f"unknown framework {framework!r}: expected 'pt' or 'np'")
        self._checkpoint = _native.Checkpoint(filename, lenient)
        self._files = MappedFiles(self._checkpoint) if mapped else None
        chosen = "cpu" if device is None else device
        self._device: str | int | torch.device | None = (
            chosen if framework in ("pt", "torch") else None
        )

    def __repr__(self) -> str:
        paths = [str(path) for path, _, _ in self._checkpoint.files()]
        more = f" and {len(paths) - 1} more files" if len(paths) > 1 else ""
        count = len(self._checkpoint.names())
        return f"safe_open({paths[0]!r}{more}, {count} tensors)"

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def keys(self) -> list[str]:
        """Returns the names of the tensors, sorted."""
        return self._checkpoint.names()

    def offset_keys(self) -> list[str]:
        """Returns the names of the tensors, sorted by their offsets in the files."""
        return self._checkpoint.names_by_place()

    def metadata(self) -> dict[str, str] | None:
        """Returns the metadata of all files together, or ``None`` if they have none."""
        found = [each for _, _, each in self._checkpoint.files() if each is not None]
        merged: dict[str, str] = {}
        for metadata in found:
            merged |= metadata
        return merged if found else None

    def get_tensor(self, name: str) -> Any:
        """Reads a tensor. Blocks.

        Returns:
            A torch tensor, or a NumPy array if the framework is NumPy.

        Raises:
            MissingTensorError: There is no tensor with this name.
            ChecksumError: Data differs from its checksum.
            ConfigurationError: The file was opened with ``mapped=True``, but is remote.
            StorageError: Reading failed.
            ModelError: torch or NumPy lacks the dtype.
        """
        return self.get_slice(name)[...]

    def get_tensors(self) -> dict[str, Any]:
        """Reads all tensors, one after another. Blocks.

        ``load_file`` reads them at once, which is faster.

        Returns:
            The tensors by name, in the order of the file.

        Raises:
            The errors of ``get_tensor``.
        """
        return {name: self.get_tensor(name) for name in self.offset_keys()}

    def get_slice(self, name: str) -> TensorSlice:
        """Returns an object that reads parts of a tensor, as in ``get_slice(name)[2:4, :, 0]``.

        Reads no data of the tensor yet.

        Raises:
            MissingTensorError: There is no tensor with this name.
            ModelError: torch does not support the dtype or the shape.
        """
        return TensorSlice(self._checkpoint, self._files, name, self._device)


class TensorSlice:
    """A tensor in a file. Indexing reads the smallest block that contains the selected elements.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a": torch.arange(12).reshape(4, 3)}, "a.safetensors")
        >>> with ts.safe_open("a.safetensors") as file:
        ...     part = file.get_slice("a")
        >>> part.get_shape(), part.get_dtype()
        ([4, 3], 'I64')
        >>> part[-1]
        tensor([ 9, 10, 11])
    """

    def __init__(
        self,
        checkpoint: _native.Checkpoint,
        files: MappedFiles | None,
        name: str,
        device: str | int | torch.device | None,
    ) -> None:
        self._checkpoint, self._files, self._name, self._device = checkpoint, files, name, device
        self._dtype, self._shape = torch_type(checkpoint, name)

    def __repr__(self) -> str:
        return f"TensorSlice({self._name!r}, shape={self._shape}, dtype={self.get_dtype()})"

    def get_shape(self) -> list[int]:
        """Returns the size of each dimension, in values as in the file.

        A torch tensor of ``F4`` has half as many elements in its last dimension.
        """
        packed = self.get_dtype() == "F4"
        return [*self._shape[:-1], 2 * self._shape[-1]] if packed else list(self._shape)

    def get_dtype(self) -> str:
        """Returns the safetensors name of the dtype, such as ``"BF16"``."""
        return self._checkpoint.entry(self._name)[0]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Any:
        """Reads the elements that a torch index selects. Blocks.

        Raises:
            TensorIndexError: The index is out of bounds or not supported.
            ChecksumError: Data differs from its checksum.
            ConfigurationError: The file was opened with ``mapped=True``, but is remote.
            StorageError: Reading failed.
            ModelError: NumPy lacks the dtype.
        """
        block, within = _block(self._shape, index if isinstance(index, tuple) else (index,))
        view = (
            None if self._files is None else self._files.view(self._name, self._dtype, self._shape)
        )
        if view is not None:
            tensor = view[tuple(slice(*bounds) for bounds in block)][within]
        else:
            tensor = read_tensor(self._checkpoint, self._name, block)[within]
        if self._device is not None:
            return tensor.to(self._device)
        return as_array(self._name, tensor)


def _block(
    shape: list[int], index: tuple[Index, ...]
) -> tuple[list[tuple[int, int]], tuple[Any, ...]]:
    """Returns the smallest block with the selected elements, and their index within the block."""
    taken = sum(1 for each in index if each is not None and each is not Ellipsis)
    if taken > len(shape):
        raise TensorIndexError(f"too many indices: expected at most {len(shape)}, got {taken}")
    ellipses = sum(1 for each in index if each is Ellipsis)
    if ellipses > 1:
        raise TensorIndexError(f"invalid index: expected at most one ellipsis, got {ellipses}")
    if not ellipses:
        index = (*index, Ellipsis)
    block: list[tuple[int, int]] = []
    within: list[Any] = []
    for each in index:
        if each is None:
            within.append(None)
        elif each is Ellipsis:
            for size in shape[len(block) : len(block) + len(shape) - taken]:
                block.append((0, size))
                within.append(slice(None))
        else:
            bounds, inside = _bounds(shape[len(block)], each, len(block))
            block.append(bounds)
            within.append(inside)
    return block, tuple(within)


def _bounds(size: int, index: Any, dimension: int) -> tuple[tuple[int, int], Any]:
    """Returns the range of a dimension that an index needs, and the index within this range."""
    if isinstance(index, slice):
        begin, end, step = index.indices(size)
        if step < 0:
            raise TensorIndexError(
                f"invalid slice for dimension {dimension}: the step must be positive, got {step}"
            )
        end = max(begin, end)
        return (begin, end), slice(0, end - begin, step)
    single = not isinstance(index, list | torch.Tensor)
    wanted = torch.as_tensor(index)
    if wanted.dim() > 1:
        raise TensorIndexError(
            f"invalid index for dimension {dimension}: expected a scalar or a 1-D index, got "
            f"{wanted.dim()} dimensions"
        )
    if wanted.dtype == torch.bool:
        if wanted.dim() == 0 or len(wanted) != size:
            raise TensorIndexError(
                f"mask of shape {list(wanted.shape)} does not match dimension {dimension} of size "
                f"{size}"
            )
        wanted = wanted.nonzero().flatten()
    if wanted.numel() == 0:
        return (0, 0), wanted.long()
    wanted = torch.where(wanted < 0, wanted + size, wanted)
    first, last = int(wanted.min()), int(wanted.max())
    if first < 0 or last >= size:
        raise TensorIndexError(f"invalid index {index} for dimension {dimension} of size {size}")
    return (first, last + 1), 0 if single else wanted - first
