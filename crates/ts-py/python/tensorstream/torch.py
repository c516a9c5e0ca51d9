# SPDX-License-Identifier: MIT OR Apache-2.0
"""Replaces ``safetensors.torch`` and ``safetensors``: ``import tensorstream.torch as st``.

The functions have the signatures, the rules and the kinds of errors of safetensors. In particular,
tensors that share memory, sparse tensors and tensors that are not contiguous are not saved, unlike
with ``tensorstream.save_file``. Files have the same bytes, except that metadata keeps its order,
whereas safetensors writes it in any order. What can be read also includes ``.ts`` files, shard
indexes, directories and URLs.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path as _Path
from typing import Any

import torch

from . import _native
from ._dtypes import SAFETENSORS_DTYPES
from ._safetensors_errors import raises_theirs
from .errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    StorageError,
    TensorIndexError,
    TensorStreamError,
)
from .files import _safe_open, _state_dict
from .streaming._streamed_tensor import StreamedTensor

__all__ = [
    "SafetensorError",
    "SharedMemoryError",
    "TensorSpec",
    "deserialize",
    "load",
    "load_file",
    "load_model",
    "safe_open",
    "save",
    "save_file",
    "save_model",
    "serialize",
    "serialize_file",
    "storage_ptr",
    "storage_size",
]

Path = str | os.PathLike[str]

#: The base class of the errors, under the name that safetensors uses. If safetensors is installed,
#: errors of this module are instances of its class, too.
SafetensorError = TensorStreamError

#: How each backend of safetensors reads.
_BACKENDS = ("mmap", "pread")


class SharedMemoryError(ConfigurationError, RuntimeError):
    """Tensors share memory, so that saving them would write it several times.

    Examples:
        >>> import torch, tensorstream.torch as st
        >>> shared = torch.zeros(3)
        >>> st.save({"a": shared, "b": shared})
        Traceback (most recent call last):
            ...
        tensorstream.torch.SharedMemoryError: ...
    """


class safe_open(_safe_open.safe_open):
    """Opens a checkpoint, to read its tensors one at a time. A context manager.

    See ``tensorstream.safe_open``.

    Args:
        filename: The path or URL.
        framework: ``"pt"`` for torch tensors, ``"np"`` for NumPy arrays.
        device: The device of torch tensors; ``None`` is the CPU.
        backend: ``"mmap"`` returns views of local files, and ``"pread"`` reads.

    Raises:
        ConfigurationError: The framework or the backend is unknown.
        CheckpointNotFoundError: There is no checkpoint at ``filename``.
        CheckpointError: The checkpoint is damaged.
        CheckpointPermissionError: The process may not read the checkpoint.

    Examples:
        >>> import torch, tensorstream.torch as st
        >>> st.save_file({"a": torch.arange(3)}, "a.safetensors")
        >>> with st.safe_open("a.safetensors", framework="pt") as file:
        ...     print(file.get_tensors())
        {'a': tensor([0, 1, 2])}
    """

    @raises_theirs
    def __init__(
        self,
        filename: Path,
        framework: str = "pt",
        device: str | int | torch.device | None = "cpu",
        *,
        backend: str = "mmap",
    ) -> None:
        self._is_closed = False
        mapped = _is_mapped(backend) and "://" not in os.fspath(filename)
        super().__init__(filename, framework, device, mapped=mapped, lenient=True)

    def __exit__(self, *_: object) -> None:
        self._is_closed = True

    @raises_theirs
    def keys(self) -> list[str]:
        self._require_open()
        return super().keys()

    @raises_theirs
    def offset_keys(self) -> list[str]:
        self._require_open()
        return super().offset_keys()

    @raises_theirs
    def metadata(self) -> dict[str, str] | None:
        self._require_open()
        return super().metadata()

    @raises_theirs
    def get_slice(self, name: str) -> _safe_open.TensorSlice:
        self._require_open()
        return TensorSlice(self._checkpoint, self._files, name, self._device)

    @raises_theirs
    def get_tensor(self, name: str) -> Any:
        self._require_open()
        return super().get_tensor(name)

    def _require_open(self) -> None:
        if self._is_closed:
            raise CheckpointError(f"{self!r} is closed: read from it inside of its `with` block")


class TensorSlice(_safe_open.TensorSlice):
    """A tensor in a file. See ``tensorstream.TensorSlice``."""

    @raises_theirs
    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except TensorIndexError as error:
            # In the words of safetensors, which programs compare.
            text = str(error)
            raise TensorIndexError(text[:1].upper() + text[1:]) from error


@raises_theirs
def load_file(
    filename: Path, device: str | int | torch.device | None = "cpu", *, backend: str = "mmap"
) -> dict[str, torch.Tensor]:
    """Reads all tensors of a file. Blocks.

    Args:
        filename: The path or URL.
        device: The device of the tensors; ``None`` is the CPU.
        backend: ``"mmap"`` maps local files and reads them with several threads, so that tensors
            are views of the page cache; ``"pread"`` reads into new memory. A mapped file must not
            be truncated while tensors exist, as with safetensors.

    Returns:
        The tensors by name, in the order of the file.

    Raises:
        The errors of ``tensorstream.load_file``.

    Examples:
        >>> import torch, tensorstream.torch as st
        >>> st.save_file({"a": torch.arange(3)}, "a.safetensors")
        >>> st.load_file("a.safetensors")
        {'a': tensor([0, 1, 2])}
    """
    mapped: Any = "auto" if _is_mapped(backend) else False
    tensors = _state_dict.load_file(filename, device, mapped=mapped, lenient=True)
    return _in_order(tensors, _native.Checkpoint(filename, True))


@raises_theirs
def load(data: bytes) -> dict[str, torch.Tensor]:
    """Reads all tensors from the bytes of a file. See ``tensorstream.load``."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ArgumentTypeError(f"expected bytes, got {type(data).__name__}")
    checkpoint = _native.Checkpoint.from_bytes(bytes(data), lenient=True)
    return _in_order(_state_dict.read_all(checkpoint), checkpoint)


@raises_theirs
def save_file(
    tensors: dict[str, torch.Tensor], filename: Path, metadata: dict[str, str] | None = None
) -> None:
    """Writes tensors to a safetensors file, whatever its suffix. Atomic. Blocks.

    Args:
        tensors: Dense, contiguous tensors by name, which do not share memory.
        filename: The path. An existing file is replaced.
        metadata: Strings by key.

    Raises:
        SharedMemoryError: Tensors share memory.
        ConfigurationError: A tensor is sparse or not contiguous, or an argument is invalid.
        CheckpointPermissionError: The process may not write the file.
        StorageError: Writing failed. An existing file is unchanged.
    """
    _check(tensors)
    _write(tensors, filename, metadata)


@raises_theirs
def save(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Returns the bytes of the file that ``save_file`` would write.

    Raises:
        SharedMemoryError: Tensors share memory.
        ConfigurationError: A tensor is sparse or not contiguous, or an argument is invalid.
    """
    _check(tensors)
    _check_metadata(metadata)
    return _state_dict.save(tensors, metadata)


@raises_theirs
def save_model(
    model: torch.nn.Module,
    filename: Path,
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Writes the tensors of a model to a safetensors file. Blocks.

    Of tensors that share memory, the first one by name that covers all of it is written. The
    metadata has the names of the others, each with the name that was written.

    Args:
        model: The model.
        filename: The path. An existing file is replaced.
        metadata: Strings by key. Changed in place, as safetensors does.
        force_contiguous: Whether tensors that are not contiguous are written as contiguous ones.

    Raises:
        SharedMemoryError: No tensor covers the memory that several tensors share.
        ConfigurationError: A tensor is sparse, or not contiguous without ``force_contiguous``.
        StorageError: Writing failed.
    """
    tensors: dict[str, torch.Tensor] = model.state_dict()
    for kept, others in _duplicates(tensors).items():
        for other in others:
            metadata = {} if metadata is None else metadata
            metadata.setdefault(other, kept)
            del tensors[other]
    _check(tensors, strided=not force_contiguous)
    _write(tensors, filename, metadata)


@raises_theirs
def load_model(
    model: torch.nn.Module,
    filename: Path,
    strict: bool = True,
    device: str | int | torch.device | None = "cpu",
    *,
    backend: str = "mmap",
) -> tuple[list[str] | set[str], list[str]]:
    """Reads the tensors of a file into a model. Blocks.

    Args:
        model: The model. Its tensors are changed in place.
        filename: A file that ``save_model`` wrote.
        strict: Whether missing and unexpected tensors are errors.
        device: The device to which the tensors are read before they are copied; ``None`` is the
            CPU.
        backend: See ``load_file``.

    Returns:
        The names of tensors of the model that are not in the file, and of tensors in the file that
        are not in the model.

    Raises:
        RuntimeError: Tensors are missing or unexpected, or have another shape.
        The errors of ``load_file``.
    """
    tensors = load_file(filename, device, backend=backend)
    removed = _duplicates(model.state_dict(), preferred=tensors.keys())
    found, unexpected = model.load_state_dict(tensors, strict=False)
    missing = set(found)
    for others in removed.values():
        for other in others:
            if other in missing:
                missing.remove(other)
            else:
                unexpected.append(other)
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        for kind, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                quoted = ", ".join(f'"{name}"' for name in sorted(names))
                lines.append(f"{kind} key(s) in state_dict: {quoted}")
        raise RuntimeError("\n    ".join(lines))
    return missing, unexpected


class TensorSpec:
    """A tensor in memory, for ``serialize``. The memory must exist until that returns.

    Args:
        dtype: The name of a torch dtype, such as ``"float32"``.
        shape: The size of each dimension.
        data_ptr: The address of the contiguous elements.
        data_len: Their size in bytes.
    """

    @raises_theirs
    def __init__(self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int) -> None:
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or found not in SAFETENSORS_DTYPES:
            raise ConfigurationError(f"unknown dtype {dtype!r}: expected one such as 'float32'")
        self._dtype, self._torch_shape = found, list(shape)
        #: The size of each dimension, in values as in the file.
        self.shape = _stored_shape(self.dtype, shape)
        self.data_ptr = data_ptr
        self.data_len = data_len

    @property
    def dtype(self) -> str:
        """The name of the dtype in the file, such as ``"F32"``."""
        return SAFETENSORS_DTYPES[self._dtype]

    def tensor(self) -> torch.Tensor:
        """Returns the tensor, which shares the memory."""
        if self.data_len == 0 and 0 in self.shape:
            return torch.empty(self._torch_shape, dtype=self._dtype)
        if self.data_len == 0:
            raise ValueError("the shape has elements")
        memory = (ctypes.c_char * self.data_len).from_address(self.data_ptr)
        return torch.frombuffer(memory, dtype=self._dtype).view(self._torch_shape)


@raises_theirs
def serialize(
    tensor_dict: Mapping[str, TensorSpec], metadata: dict[str, str] | None = None
) -> bytes:
    """Returns the bytes of a safetensors file with tensors that are in memory.

    Raises:
        ConfigurationError: The size of a tensor does not fit its shape, or an argument is invalid.
    """
    _check_metadata(metadata)
    return _state_dict.save(_tensors(tensor_dict), metadata)


@raises_theirs
def serialize_file(
    tensor_dict: Mapping[str, TensorSpec], filename: Path, metadata: dict[str, str] | None = None
) -> None:
    """Writes tensors that are in memory to a safetensors file. Atomic. Blocks.

    Raises:
        ConfigurationError: The size of a tensor does not fit its shape, or an argument is invalid.
        StorageError: Writing failed.
    """
    _write(_tensors(tensor_dict), filename, metadata)


@raises_theirs
def deserialize(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Returns the names, and the ``shape``, ``dtype`` and ``data`` (bytes) of all tensors."""
    return [
        (
            name,
            {
                "shape": _stored_shape(SAFETENSORS_DTYPES[tensor.dtype], tensor.shape),
                "dtype": SAFETENSORS_DTYPES[tensor.dtype],
                "data": bytearray(tensor.view(-1).view(torch.uint8).numpy().tobytes()),
            },
        )
        for name, tensor in load(data).items()
    ]


def storage_ptr(tensor: torch.Tensor) -> int:
    """Returns the address of the memory that the tensor is a part of. 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def storage_size(tensor: torch.Tensor) -> int:
    """Returns the size in bytes of the memory that the tensor is a part of."""
    return tensor.untyped_storage().nbytes()


def _stored_shape(dtype: str, shape: Sequence[int]) -> list[int]:
    """Returns the shape in the file, where two values of 4 bits are not one element as in torch."""
    return [*shape[:-1], 2 * shape[-1]] if dtype == "F4" and shape else list(shape)


def _in_order(
    tensors: dict[str, torch.Tensor], checkpoint: _native.Checkpoint
) -> dict[str, torch.Tensor]:
    """Returns the tensors in the order of the file."""
    return {name: tensors[name] for name in checkpoint.names_by_place()}


def _check_metadata(metadata: Any) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise ArgumentTypeError(f"metadata: expected a dict, got {type(metadata).__name__}")
    for key, value in metadata.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise ArgumentTypeError(
                f"metadata: expected strings, got {key!r}: {value!r}; use str(...)"
            )


def _is_mapped(backend: str) -> bool:
    if backend not in _BACKENDS:
        raise ConfigurationError(f"unknown backend {backend!r}: expected 'mmap' or 'pread'")
    return backend == "mmap"


def _write(
    tensors: Mapping[str, torch.Tensor], filename: Path, metadata: dict[str, str] | None
) -> None:
    """Writes a safetensors file with any suffix."""
    _check_metadata(metadata)
    path = _Path(filename)
    if path.suffix == ".safetensors":
        _state_dict.save_file(tensors, path, metadata)
        return
    unique = f"{os.getpid()}-{threading.get_ident()}"
    beside = path.with_name(f".{path.name}.{unique}.safetensors")
    try:
        _state_dict.save_file(tensors, beside, metadata)
        beside.replace(path)
    except OSError as error:
        if isinstance(error, TensorStreamError):
            raise
        raise StorageError(f"{path}: cannot write: {error.strerror}") from error
    finally:
        beside.unlink(missing_ok=True)


def _tensors(tensor_dict: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    if not isinstance(tensor_dict, Mapping):
        raise ArgumentTypeError(f"expected a dict of TensorSpec, got {type(tensor_dict).__name__}")
    tensors = {}
    for name, spec in tensor_dict.items():
        if not isinstance(name, str) or not isinstance(spec, TensorSpec):
            raise ArgumentTypeError(
                f"expected names of tensors and TensorSpec, got {name!r} and {type(spec).__name__}"
            )
        try:
            tensors[name] = spec.tensor()
        except (RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"tensor `{name}` of {spec.dtype} {spec.shape} does not have {spec.data_len} bytes"
            ) from error
    return tensors


def _check(tensors: Any, *, strided: bool = True) -> None:
    """Refuses what safetensors refuses to save, in its words where programs compare them."""
    if not isinstance(tensors, dict):
        raise ConfigurationError(
            f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}"
        )
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"expected names of tensors, got {name!r}")
        if not isinstance(tensor, torch.Tensor):
            raise ConfigurationError(
                f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}"
            )
    odd = [name for name, tensor in tensors.items() if tensor.layout != torch.strided]
    if odd:
        raise ConfigurationError(
            f"You are trying to save a sparse tensors: `{odd}` which this library does not "
            "support. You can make it a dense tensor before saving with `.to_dense()` but be aware "
            "this might make a much larger file than needed."
        )
    for name, tensor in tensors.items():
        if strided and not tensor.is_contiguous():
            raise ConfigurationError(
                f"cannot save `{name}`, which is not contiguous: call `.contiguous()` first, or "
                "use save_model(..., force_contiguous=True)"
            )
    shared = [sorted(names) for names in _shared(tensors) if len(names) > 1]
    if shared:
        raise SharedMemoryError(
            f"tensors share memory, which would be written several times: {shared}; use "
            "save_model, or `.clone()` all but one of them"
        )


def _shared(tensors: Mapping[str, torch.Tensor]) -> list[set[str]]:
    """Returns sets of the names of tensors whose elements overlap in memory."""
    storages: dict[tuple[torch.device, int, int], list[tuple[int, int, str]]] = defaultdict(list)
    streamed: dict[tuple[int, int], set[str]] = defaultdict(set)
    for name, tensor in tensors.items():
        if isinstance(tensor, StreamedTensor):
            streamed[id(tensor._ref.weights), tensor._ref.key].add(name)
            continue
        if tensor.is_meta or tensor.layout != torch.strided or not storage_ptr(tensor):
            continue
        begin = tensor.data_ptr()
        storages[(tensor.device, storage_ptr(tensor), storage_size(tensor))].append(
            (begin, begin + _extent(tensor), name)
        )
    groups = list(streamed.values())
    for ranges in storages.values():
        last = -1
        for begin, end, name in sorted(ranges):
            if begin < last:
                groups[-1].add(name)
            else:
                groups.append({name})
            last = end
    return groups


def _extent(tensor: torch.Tensor) -> int:
    """Returns the bytes from the first element of a tensor to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize


def _duplicates(
    tensors: Mapping[str, torch.Tensor], *, preferred: Any = ()
) -> dict[str, list[str]]:
    """Returns the names of tensors that share the memory of another one, by its name."""
    removed: dict[str, list[str]] = defaultdict(list)
    for names in _shared(tensors):
        whole = {name for name in names if _is_whole(tensors[name])}
        if not whole:
            raise SharedMemoryError(
                f"tensors share memory, and none of them covers all of it: {sorted(names)}; "
                "`.clone()` all but one of them"
            )
        kept = min(whole & set(preferred) or whole)
        removed[kept] += sorted(names - {kept})
    return {kept: others for kept, others in removed.items() if others}


def _is_whole(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, StreamedTensor) or (
        tensor.data_ptr() == storage_ptr(tensor) and tensor.nbytes == storage_size(tensor)
    )
