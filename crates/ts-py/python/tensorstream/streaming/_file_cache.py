# SPDX-License-Identifier: MIT OR Apache-2.0
"""A cache of keys and values for transformers that keeps to a budget: the rest is in files.

Attention reads the layers of a model in turn, again and again. So the layers that stay in memory
are always the same ones; those in files are read one ahead of their use.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import re
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ..budget import parse_size
from ..config import expanded
from ..errors import BudgetError, ConfigurationError, ModelError
from ._stored_tensor import StoredTensor

try:
    from transformers.cache_utils import DynamicCache, DynamicLayer
except ImportError as error:
    raise ConfigurationError(
        "FileCache needs transformers 5: pip install 'tensorstream[transformers]'"
    ) from error


class FileCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """Keys and values of a model of transformers, in memory up to a budget and else in files.

    A ``DynamicCache`` that can grow larger than memory. Give it to ``generate`` or to the model, as
    ``past_key_values`` (or ``cache``, its name in recent versions of transformers). Results have
    the bits that they have with a ``DynamicCache``.

    Layers of full attention go to files when the budget is reached, spread evenly over the model.
    Each pass reads them once, one layer ahead of its use, and adds its own tokens. Beam search
    writes them again for each token. Windows of attention and recurrent states are small and
    stay in memory. The files have no names and are gone with the cache, also after a crash. The
    ``keys`` and ``values`` of a layer in files are copies. ``copy.deepcopy`` copies the files.

    Not safe for use by several threads at a time, like other caches.

    Args:
        budget: The memory for keys and values, as bytes or as a size such as ``"2GiB"``. It covers
            what stays in memory, the layer that is in use and the one that is read ahead. It is
            not a part of the budget of the model.
        config: The configuration of the model. Without it, layers with windows of attention keep
            all tokens, as in a ``DynamicCache``.
        directory: Where the files are. By default the directory for temporary files, or
            ``/var/tmp`` if that one is in memory.

    Raises:
        ConfigurationError: The budget or the directory is invalid, the directory is in memory, or
            transformers is missing.
        BudgetError: While generating: a single layer is larger than the budget. The message names
            the budget that it needs.
        StorageError: While generating: the directory is full or cannot be written to.
        ModelError: While generating: keys need gradients, which files do not keep.

    Examples:
        >>> import tensorstream as ts
        >>> model = ts.from_pretrained("organisation/model", budget="6GiB")  # doctest: +SKIP
        >>> cache = ts.FileCache("2GiB", config=model.config)  # doctest: +SKIP
        >>> output = model.generate(ids, past_key_values=cache)  # doctest: +SKIP
    """

    def __init__(
        self,
        budget: int | str,
        *,
        config: Any | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        self._budget = parse_size(budget, "budget of a FileCache")
        self._directory = _directory(directory)
        super().__init__(config=config)
        self.layers: list[Any] = [_with_files(layer) for layer in self.layers]
        # Measured when a pass begins, and kept while it goes on:
        self._kept = 0  # what is in memory between uses, in bytes
        self._largest = 0  # the keys and values of the largest layer, in bytes
        self._uses_files = False
        self._last = -1  # the layer that was updated last
        self._reader: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    @property
    def bytes_in_memory(self) -> int:
        """The keys and values that stay in memory, in bytes, without a layer that is read ahead."""
        return sum(map(_memory_of, self.layers))

    @property
    def bytes_in_files(self) -> int:
        """The keys and values that are in files, in bytes."""
        return sum(layer.nbytes() for _, layer in self._movable() if layer.is_stored)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the keys and values of new tokens to a layer. Reads them if they are in files.

        Args:
            key_states: The keys, of shape ``[batch, heads, tokens, width]``.
            value_states: The values.
            layer_idx: The number of the layer.
            args: Passed to the layer.
            kwargs: Passed to the layer.

        Returns:
            All keys and all values of the layer.
        """
        if os.getpid() != self._process:
            raise ModelError("a FileCache is for the process that made it, not for forked ones")
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ModelError(
                "a FileCache keeps no gradients: generate under torch.no_grad(), or train with "
                "use_cache=False"
            )
        if self.layer_class_to_replicate is not None:
            while len(self.layers) <= layer_idx:
                self.layers.append(_with_files(self.layer_class_to_replicate()))
        layer = self.layers[layer_idx]
        if layer_idx <= self._last:  # a pass begins, and the cache can have been changed
            self._measure()
        self._last = layer_idx
        was_empty = layer.get_seq_length() == 0
        self._make_room(layer_idx, key_states.nbytes + value_states.nbytes)
        before = _memory_of(layer)
        result: tuple[torch.Tensor, torch.Tensor]
        result = layer.update(key_states, value_states, *args, **kwargs)
        self._kept += _memory_of(layer) - before
        self._read_ahead(layer_idx, 1 if was_empty else key_states.shape[-2])
        return result

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence of the batch.

        Args:
            repeats: How often.
        """
        for number, layer in enumerate(self.layers):
            self._measure()
            if isinstance(layer, _LayerWithFiles):
                self._make_room(number, (repeats - 1) * layer.nbytes())
            layer.batch_repeat_interleave(repeats)

    def __repr__(self) -> str:
        return (
            f"FileCache({len(self.layers)} layers, {self.get_seq_length()} tokens, "
            f"{self.bytes_in_memory} of {self._budget} bytes in memory, "
            f"{self.bytes_in_files} bytes in {self._directory})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FileCache:
        twin: FileCache = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(vars(self), _reader=None)
        twin.layers = copy.deepcopy(self.layers, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(
            "a FileCache cannot be pickled, because it is in files; copy.deepcopy copies it"
        )

    def _movable(self) -> list[tuple[int, _LayerWithFiles]]:
        """Returns the layers that can be in files, and their numbers."""
        return [pair for pair in enumerate(self.layers) if isinstance(pair[1], _LayerWithFiles)]

    def _measure(self) -> None:
        layers = self._movable()
        self._kept = self.bytes_in_memory
        self._largest = max((layer.nbytes() for _, layer in layers), default=0)
        self._uses_files = any(layer.is_stored for _, layer in layers)

    def _make_room(self, number: int, added: int) -> None:
        """Moves layers to files until a layer can grow by a number of bytes."""
        layer = self.layers[number]
        if not isinstance(layer, _LayerWithFiles):
            return
        self._largest = max(self._largest, layer.nbytes() + added)
        while True:
            kept = self._kept + (0 if layer.is_stored else added)
            # A layer in memory is copied when it grows. One in files is read when it is used, and
            # another one ahead of its use.
            needed = kept + self._largest * (2 if self._uses_files else 1)
            if needed <= self._budget:
                return
            rest = [pair for pair in self._movable() if not pair[1].is_stored]
            if not rest:
                break
            # Reversed bits spread the layers in files evenly, however many there are.
            _, moved = min(rest, key=lambda pair: int(f"{pair[0]:016b}"[::-1], 2))
            before = _memory_of(moved)
            moved.store(self._directory)
            self._kept += _memory_of(moved) - before
            self._uses_files = True
        least = needed - self._largest  # nothing is read ahead
        if least > self._budget:
            raise BudgetError(
                f"layer {number} does not fit in the {self._budget} bytes of a FileCache: "
                "attention needs all keys and values of a layer in memory; give it at least "
                f"{least} bytes, or use shorter texts or smaller batches"
            )

    def _read_ahead(self, number: int, tokens: int) -> None:
        """Begins to read the next layer in files, if there is room for it."""
        if not self._uses_files:
            return
        for layer in (*self.layers[number + 1 :], *self.layers[: number + 1]):
            if isinstance(layer, _LayerWithFiles) and layer.is_stored:
                if self._kept + self._largest + layer.nbytes(tokens) <= self._budget:
                    if self._reader is None:
                        self._reader = ThreadPoolExecutor(1, "tensorstream-file-cache")
                    layer.read_ahead(self._reader, tokens)
                return


class _LayerWithFiles:
    """Mixed into a layer of transformers: its keys and values can be in files.

    The methods of the layer use ``keys`` and ``values`` as attributes, which here read and write
    the files.
    """

    _keys: torch.Tensor | StoredTensor | None = None
    _values: torch.Tensor | StoredTensor | None = None
    _directory: str | None = None
    _ahead: _Ahead | None = None

    @property
    def keys(self) -> torch.Tensor | None:
        return self._keys.read() if isinstance(self._keys, StoredTensor) else self._keys

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._forget_ahead()
        self._keys = _stored(keys, self._directory)

    @property
    def values(self) -> torch.Tensor | None:
        return self._values.read() if isinstance(self._values, StoredTensor) else self._values

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._forget_ahead()
        self._values = _stored(values, self._directory)

    @property
    def is_stored(self) -> bool:
        """Whether the keys and values are in files, or will be."""
        return self._directory is not None

    def nbytes(self, more: int = 0) -> int:
        """Returns the size of the keys and values with a number of tokens more."""
        total = 0
        for part in (self._keys, self._values):
            if part is not None:
                total += part.nbytes
                if more and part.ndim > 1:
                    total += math.prod(part.shape[:-2]) * more * part.shape[-1] * part.itemsize
        return total

    def store(self, directory: str) -> None:
        """Moves the keys and values to files, now and when they change."""
        keys, values = _stored(self._keys, directory), _stored(self._values, directory)
        self._keys, self._values, self._directory = keys, values, directory

    def get_seq_length(self) -> int:
        if isinstance(self._keys, StoredTensor):
            return self._keys.shape[-2]
        return int(super().get_seq_length())  # type: ignore[misc]  # of the layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._keys, self._values
        if (
            isinstance(keys, StoredTensor)
            and isinstance(values, StoredTensor)
            and keys.can_grow_by(key_states)
            and values.can_grow_by(value_states)
        ):
            return self._append(keys, values, key_states, value_states)
        # The layer grows in memory. It also reports what does not fit.
        directory, self._directory = self._directory, None
        try:
            result: tuple[torch.Tensor, torch.Tensor]
            result = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        finally:
            if directory is not None:
                self.store(directory)
        return result

    def crop(self, tokens_to_remove: int) -> None:
        keys, values = self._keys, self._values
        if not (isinstance(keys, StoredTensor) and isinstance(values, StoredTensor)):
            super().crop(tokens_to_remove)  # type: ignore[misc]
            return
        # The layer itself knows what the number means. It crops tensors without data.
        self._forget_ahead()
        directory, self._directory = self._directory, None
        self._keys, self._values = keys.without_data(), values.without_data()
        try:
            super().crop(tokens_to_remove)  # type: ignore[misc]
            length = self._keys.shape[-2]
        finally:
            self._keys, self._values, self._directory = keys, values, directory
        keys.cut(length)
        values.cut(length)

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self._directory = None

    def read_ahead(self, reader: ThreadPoolExecutor, tokens: int) -> None:
        """Begins to read keys and values into tensors with room for a number of new tokens."""
        keys, values = self._keys, self._values
        if (
            self._ahead is None
            and isinstance(keys, StoredTensor)
            and isinstance(values, StoredTensor)
        ):
            # Allocated by this thread, because another one would take memory of its own arena.
            tensors = keys.with_room(tokens), values.with_room(tokens)
            reading = reader.submit(_read_both, (keys, values), tensors)
            self._ahead = _Ahead(tensors, reading)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._forget_ahead()
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            twin.__dict__[name] = copy.deepcopy(value, memo)
        return twin

    def _append(
        self,
        keys: StoredTensor,
        values: StoredTensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens to the files, and returns all."""
        length, tokens = keys.shape[-2], key_states.shape[-2]
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.reading.result()
        if ahead is not None and ahead.tensors[0].shape[-2] == length + tokens:
            read = ahead.tensors
        else:
            read = keys.with_room(tokens), values.with_room(tokens)
            if ahead is None:
                _read_both((keys, values), read)
            else:  # another number of tokens was expected
                for to, source in zip(read, ahead.tensors, strict=True):
                    to[..., :length, :] = source[..., :length, :]
        all_keys, all_values = read[0].to(keys.device), read[1].to(values.device)
        all_keys[..., length:, :] = key_states
        all_values[..., length:, :] = value_states
        keys.append(key_states, all_keys)
        try:
            values.append(value_states, all_values)
        except BaseException:
            keys.cut(length)
            raise
        return all_keys, all_values

    def _forget_ahead(self) -> None:
        """Drops what is read ahead. Waits for the reader."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead.reading.cancel():
            ahead.reading.exception()


@dataclass
class _Ahead:
    """Keys and values that are read ahead of their use."""

    tensors: tuple[torch.Tensor, torch.Tensor]
    reading: Future[None]


def _stored(
    tensor: torch.Tensor | StoredTensor | None, directory: str | None
) -> torch.Tensor | StoredTensor | None:
    """Returns a tensor in a file, if there is a directory for it."""
    if directory is None or not isinstance(tensor, torch.Tensor) or not tensor.numel():
        return tensor
    return StoredTensor(tensor, directory)


def _read_both(
    stored: tuple[StoredTensor, StoredTensor], to: tuple[torch.Tensor, torch.Tensor]
) -> None:
    for each, tensor in zip(stored, to, strict=True):
        each.read_into(tensor)


def _with_files(layer: Any) -> Any:
    """Returns a new layer whose keys and values can be in files, if it is one of full attention."""
    own: type = type(layer)
    if getattr(layer, "is_sliding", False) or any(
        getattr(own, name, None) is not getattr(DynamicLayer, name)
        for name in ("update", "get_seq_length", "get_mask_sizes")
    ):
        return layer
    kind: Any = _class_with_files(own)
    twin = kind.__new__(kind)
    for name, value in vars(layer).items():
        setattr(twin, name, value)
    return twin


@functools.cache
def _class_with_files(own: type) -> Any:
    # transformers would register a class with a type of layer as the one for that type.
    return type(f"{own.__name__}WithFiles", (_LayerWithFiles, own), {"_layer_type": None})


def _memory_of(layer: Any) -> int:
    """Returns the memory of the tensors of a layer, in bytes."""
    total = 0
    for value in vars(layer).values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, torch.Tensor):
                total += part.untyped_storage().nbytes()  # a part keeps the whole alive
    return total


def _directory(given: str | os.PathLike[str] | None) -> str:
    """Returns the directory for files."""
    if given is None:
        usual = tempfile.gettempdir()
        given = "/var/tmp" if _is_in_memory(usual) and os.path.isdir("/var/tmp") else usual
    path = os.path.abspath(os.fspath(expanded(given)))
    if not os.path.isdir(path):
        raise ConfigurationError(f"invalid directory of a FileCache: {path} is not a directory")
    if _is_in_memory(path):
        raise ConfigurationError(
            f"invalid directory of a FileCache: {path} is in memory (tmpfs); give one on a disk"
        )
    return path


def _is_in_memory(path: str) -> bool:
    """Returns whether files of a directory take memory."""
    try:
        with open("/proc/mounts", encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.split(" ")[1:3] for line in file]
    except OSError:  # not Linux
        return False
    real = os.path.join(os.path.realpath(path), "")
    # The innermost one counts, and of several at a place the last one.
    over = [
        (len(place), number, kind)
        for number, (place, kind) in enumerate(mounts)
        if real.startswith(os.path.join(_unescaped(place), ""))
    ]
    return bool(over) and max(over)[2] in ("tmpfs", "ramfs")


def _unescaped(place: str) -> str:
    """Returns a path of ``/proc/mounts``, in which spaces are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda number: chr(int(number[1], 8)), place)
