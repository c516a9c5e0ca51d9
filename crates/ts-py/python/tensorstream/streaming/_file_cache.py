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
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from ..budget import parse_size
from ..config import expanded
from ..errors import BudgetError, ConfigurationError, ModelError, StorageError
from ._stored_tensor import StoredTensor

try:
    from transformers.cache_utils import DynamicCache, DynamicLayer
except ImportError as error:
    raise ConfigurationError(
        "FileCache needs transformers 5: pip install 'tensorstream[transformers]'"
    ) from error


class FileCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """A KV cache for transformers that keeps to a memory budget and stores the rest in files.

    A ``DynamicCache`` that can grow larger than memory. Give it to ``generate`` or to the model, as
    ``cache`` (``past_key_values`` in older versions of transformers). Results have the bits that
    they have with a ``DynamicCache``.

    Layers of full attention go to files when the budget is reached, spread evenly over the model.
    Each pass reads them once, one layer ahead of its use, and adds its own tokens. Beam search
    writes them again for each token. Windows of attention and recurrent states stay in memory. The
    files have no names and are gone with the cache, also after a crash. The ``keys`` and ``values``
    of a layer in files are copies. ``copy.deepcopy`` copies the files.

    Not safe for use by several threads at a time, like other caches. Tested with models on the CPU.

    Args:
        budget: The memory for keys and values, as bytes or as a size such as ``"2GiB"``. It covers
            what stays in memory, also recurrent states, the layer that is in use and the one that
            is read ahead. It is not a part of the budget of the model.
        config: The configuration of the model. Without it, layers with windows of attention keep
            all tokens, as in a ``DynamicCache``, which can change the rounding.
        directory: Where the files are. By default the directory for temporary files, or
            ``/var/tmp`` if that one is in memory.

    Raises:
        ConfigurationError: The budget or the directory is invalid, the directory is in memory, or
            transformers is missing.
        BudgetError: While generating: what stays in memory and a layer in use exceed the budget.
            The message names the budget that the pass needs. A cache after an error in the middle
            of a pass is of no use.
        StorageError: While generating: the directory is full or cannot be written to.
        ModelError: While generating: keys need gradients, which files do not keep.

    Examples:
        >>> import tensorstream as ts
        >>> model = ts.from_pretrained("organisation/model", budget="6GiB")  # doctest: +SKIP
        >>> cache = ts.FileCache("2GiB", config=model.config)  # doctest: +SKIP
        >>> output = model.generate(ids, cache=cache)  # doctest: +SKIP
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
        self._pass = 0
        self._last = -1  # the layer that was updated last
        self._updated: dict[int, int] = {}  # the pass in which each layer was updated last
        self._ahead: _Ahead | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    @property
    def bytes_in_memory(self) -> int:
        """The keys, values and states that stay in memory, in bytes."""
        return sum(map(_memory_of, self.layers))

    @property
    def bytes_in_files(self) -> int:
        """The keys and values that are in files, in bytes."""
        return sum(layer.nbytes() for layer in self._movable() if layer.is_stored)

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
            raise ModelError(
                "a FileCache cannot be used in a forked process; create another one there"
            )
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ModelError(
                "a FileCache keeps no gradients: generate under torch.no_grad(), or train with "
                "use_cache=False"
            )
        if self.layer_class_to_replicate is not None:
            while len(self.layers) <= layer_idx:
                self.layers.append(_with_files(self.layer_class_to_replicate()))
        if layer_idx <= self._last:  # a pass begins, and the cache can have been changed
            self._pass += 1
            self._measure()
        self._last = layer_idx
        layer, tokens = self.layers[layer_idx], key_states.shape[-2]
        was_empty = _length_of(layer) == 0
        self._make_room(layer_idx, tokens, key_states.nbytes + value_states.nbytes)
        before = _memory_of(layer)
        result: tuple[torch.Tensor, torch.Tensor]
        if isinstance(layer, _LayerWithFiles) and layer.can_append(key_states, value_states):
            result = layer.append(key_states, value_states, self._taken(layer, tokens))
        else:
            result = layer.update(key_states, value_states, *args, **kwargs)
            _drop_outside_window(layer)
        self._kept += _memory_of(layer) - before
        self._updated[layer_idx] = self._pass
        self._read_ahead(layer_idx, 1 if was_empty else tokens)
        return result

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence of the batch.

        Args:
            repeats: How often.
        """
        self._drop_ahead()
        for number, layer in enumerate(self.layers):
            self._measure()
            if isinstance(layer, _LayerWithFiles):
                self._make_room(number, 0, (repeats - 1) * layer.nbytes())
            layer.batch_repeat_interleave(repeats)

    def batches_that_fit(self, tokens: int) -> int:
        """Returns how many batches like its own would fit in the budget with more tokens.

        Args:
            tokens: The tokens of a sequence then.
        """
        kept, largest, length = 0, 0, max(1, *map(_length_of, self.layers))
        for layer in self.layers:
            if isinstance(layer, _LayerWithFiles):
                largest = max(largest, layer.nbytes() * tokens // length)
            else:
                window = getattr(layer, "sliding_window", 1)
                kept += _memory_of(layer) * min(tokens, window) // min(length, window)
        return self._budget // max(1, kept + 2 * largest)

    def __repr__(self) -> str:
        return (
            f"FileCache({len(self.layers)} layers, {max(map(_length_of, self.layers), default=0)} "
            f"tokens, {self.bytes_in_memory} of {self._budget} bytes in memory, "
            f"{self.bytes_in_files} bytes in {self._directory})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FileCache:
        twin: FileCache = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(vars(self), _ahead=None, _reader=None, _process=os.getpid())
        twin._updated = dict(self._updated)
        twin.layers = copy.deepcopy(self.layers, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ModelError(
            "a FileCache cannot be pickled, because it is in files; copy.deepcopy copies it"
        )

    def _movable(self) -> list[_LayerWithFiles]:
        return [layer for layer in self.layers if isinstance(layer, _LayerWithFiles)]

    def _measure(self) -> None:
        self._kept = self.bytes_in_memory
        self._largest = max((layer.nbytes() for layer in self._movable()), default=0)
        self._uses_files = any(layer.is_stored for layer in self._movable())

    def _make_room(self, number: int, tokens: int, added: int) -> None:
        """Moves layers to files until one can grow by tokens of a number of bytes."""
        layer = self.layers[number]
        self._largest = max(self._largest, _used(layer) + added)
        while True:
            # A layer in memory is copied when it grows. One in files is read when it is used, and
            # another one ahead of its use.
            least = self._kept + _growth(layer, tokens, added) + self._largest
            if least + (self._largest if self._uses_files else 0) <= self._budget:
                break
            rest = [
                (int(f"{at:016b}"[::-1], 2), each)  # which spreads the layers in files evenly
                for at, each in enumerate(self.layers)
                if isinstance(each, _LayerWithFiles) and not each.is_stored
            ]
            if not rest:
                break
            _, moved = min(rest, key=lambda pair: pair[0])
            before = _memory_of(moved)
            moved.store(self._directory)
            self._kept += _memory_of(moved) - before
            self._uses_files = True
        if least > self._budget:
            # The windows of the layers that follow are not there yet in the first pass.
            least += sum(
                _growth(each, tokens, added)
                for each in self.layers[number + 1 :]
                if not isinstance(each, _LayerWithFiles) and _length_of(each) == 0
            )
            raise BudgetError(
                f"layer {number} does not fit in the {self._budget} bytes of a FileCache: "
                "attention needs all keys and values of a layer in memory; give it at least "
                f"{least} bytes, or use shorter texts or smaller batches"
            )
        if self._ahead is not None and least + self._ahead.nbytes > self._budget:
            self._drop_ahead()

    def _read_ahead(self, number: int, tokens: int) -> None:
        """Begins to read the next layer in files, if there is room for it."""
        if not self._uses_files or self._ahead is not None:
            return
        count = len(self.layers)
        for at in (*range(number + 1, count), *range(number + 1)):
            layer = self.layers[at]
            # Not one that is only read, such as one of cross-attention.
            is_updated = self._updated.get(at) == self._pass - (1 if at > number else 0)
            if is_updated and isinstance(layer, _LayerWithFiles) and layer.is_stored:
                if self._kept + self._largest + layer.nbytes(tokens) <= self._budget:
                    if self._reader is None:
                        self._reader = ThreadPoolExecutor(1, "tensorstream-file-cache")
                    self._ahead = layer.read_ahead(self._reader, tokens)
                return

    def _taken(
        self, layer: _LayerWithFiles, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns what was read ahead, if it is for this use. Otherwise drops it."""
        ahead = self._ahead
        if ahead is None or not ahead.is_for(layer, tokens):
            self._drop_ahead()
            return None
        try:
            taken = ahead.take()
        except StorageError:
            self._drop_ahead()
            raise
        self._ahead = None
        return taken

    def _drop_ahead(self) -> None:
        ahead = self._ahead
        if ahead is not None and os.getpid() == self._process:  # a forked one has no reader
            ahead.drop()
        self._ahead = None


class _LayerWithFiles(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """Mixed into a layer of transformers: its keys and values can be in files.

    The methods of the layer use ``keys`` and ``values`` as attributes, which here read and write
    the files.
    """

    _keys: torch.Tensor | StoredTensor | None = None
    _values: torch.Tensor | StoredTensor | None = None
    _directory: str | None = None

    @property
    def keys(self) -> torch.Tensor | None:
        return self._keys.read() if isinstance(self._keys, StoredTensor) else self._keys

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._keys = _stored(keys, self._directory)

    @property
    def values(self) -> torch.Tensor | None:
        return self._values.read() if isinstance(self._values, StoredTensor) else self._values

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
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
        return int(super().get_seq_length())

    def can_append(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Returns whether the layer is in files, and the new tokens are like its own."""
        return (
            isinstance(self._keys, StoredTensor)
            and isinstance(self._values, StoredTensor)
            and self._keys.can_append(keys)
            and self._values.can_append(values)
        )

    def append(
        self,
        new_keys: torch.Tensor,
        new_values: torch.Tensor,
        read: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens to the files, and returns all.

        Args:
            new_keys: The keys of the tokens.
            new_values: The values.
            read: What was read ahead: all before, with room for these.
        """
        keys, values = self._keys, self._values
        assert isinstance(keys, StoredTensor) and isinstance(values, StoredTensor)
        length, tokens = keys.shape[-2], new_keys.shape[-2]
        if read is None:
            read = keys.with_room(tokens), values.with_room(tokens)
            keys.read_into(read[0])
            values.read_into(read[1])
        all_keys, all_values = read[0].to(keys.device), read[1].to(values.device)
        all_keys[..., length:, :] = new_keys
        all_values[..., length:, :] = new_values
        keys.append(new_keys, all_keys)
        try:
            values.append(new_values, all_values)
        except BaseException:
            keys.cut(length)
            raise
        return all_keys, all_values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.can_append(key_states, value_states):
            return self.append(key_states, value_states)
        # The layer grows in memory. It also reports what does not fit.
        before, directory = dict(vars(self)), self._directory
        self._directory = None
        try:
            result: tuple[torch.Tensor, torch.Tensor]
            result = super().update(key_states, value_states, *args, **kwargs)
            if directory is not None:
                self.store(directory)
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        return result

    def crop(self, tokens_to_remove: int) -> None:
        self._rearrange("crop", tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._rearrange("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._rearrange("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._rearrange("batch_select_indices", indices)

    def reset(self) -> None:
        super().reset()
        self._directory = None

    def read_ahead(self, reader: ThreadPoolExecutor, tokens: int) -> _Ahead | None:
        """Begins to read keys and values into tensors with room for a number of new tokens."""
        keys, values = self._keys, self._values
        if not (isinstance(keys, StoredTensor) and isinstance(values, StoredTensor)):
            return None
        # Allocated by the calling thread: the C library gives each thread a separate arena.
        tensors = keys.with_room(tokens), values.with_room(tokens)
        ahead = _Ahead(self, (keys, values), (keys.changes, values.changes), tensors)
        try:
            ahead.reading = reader.submit(ahead.read)
        except RuntimeError:  # the interpreter ends, or there can be no more threads
            return None
        return ahead

    def reads(self, stored: tuple[StoredTensor, StoredTensor]) -> bool:
        """Returns whether the keys and values are these."""
        return self._keys is stored[0] and self._values is stored[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            twin.__dict__[name] = copy.deepcopy(value, memo)
        return twin

    def _rearrange(self, operation: str, argument: Any) -> None:
        """Lets the layer select tokens or sequences, and does the same in the files."""
        keys, values, directory = self._keys, self._values, self._directory
        own = getattr(super(), operation)
        if not (isinstance(keys, StoredTensor) and isinstance(values, StoredTensor)):
            own(argument)
            return
        # The layer itself knows what the argument means. It selects from tensors of numbers.
        self._keys, self._values, self._directory = keys.numbers(), values.numbers(), None
        try:
            own(argument)
            left = self._keys, self._values
        finally:
            self._keys, self._values, self._directory = keys, values, directory
        self._keys, self._values = keys.selected(left[0]), values.selected(left[1])


@dataclass
class _Ahead:
    """Keys and values of a layer that are read ahead of their use."""

    layer: _LayerWithFiles
    stored: tuple[StoredTensor, StoredTensor]
    changes: tuple[int, int]
    tensors: tuple[torch.Tensor, ...]
    reading: Future[None] = field(default_factory=Future)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def is_for(self, layer: _LayerWithFiles, tokens: int) -> bool:
        """Returns whether a layer can use them, if it gets a number of new tokens."""
        keys, values = self.stored
        return (
            layer is self.layer
            and layer.reads(self.stored)
            and self.changes == (keys.changes, values.changes)
            and self.tensors[0].shape[-2] == keys.shape[-2] + tokens
        )

    def read(self) -> None:
        """Reads them. Called by the reader."""
        for stored, tensor in zip(self.stored, self.tensors, strict=True):
            stored.read_into(tensor)

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Waits for them, and gives them away: the reader may still refer to this object."""
        self.reading.result()
        keys, values = self.tensors
        self.tensors = ()
        return keys, values

    def drop(self) -> None:
        """Waits for the reader, and frees the memory."""
        if not self.reading.cancel():
            self.reading.exception()
        self.tensors = ()


def _stored(
    tensor: torch.Tensor | StoredTensor | None, directory: str | None
) -> torch.Tensor | StoredTensor | None:
    """Returns a tensor in a file, if there is a directory for it."""
    if directory is None or not isinstance(tensor, torch.Tensor) or not tensor.numel():
        return tensor
    return StoredTensor.of(tensor, directory)


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


def _length_of(layer: Any) -> int:
    """Returns the tokens of a layer. Those with recurrent states only have none."""
    return int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0


def _memory_of(layer: Any) -> int:
    """Returns the memory of the tensors of a layer, in bytes."""
    total = 0
    for value in vars(layer).values():
        parts = value.values() if isinstance(value, dict) else (value,)
        for part in value if isinstance(value, list | tuple) else parts:
            if isinstance(part, torch.Tensor):
                total += part.untyped_storage().nbytes()  # a part keeps the whole alive
    return total


def _used(layer: Any) -> int:
    """Returns the size of the keys and values of a layer, in bytes."""
    if isinstance(layer, _LayerWithFiles):
        return layer.nbytes()
    parts = getattr(layer, "keys", None), getattr(layer, "values", None)
    return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))


def _growth(layer: Any, tokens: int, added: int) -> int:
    """Returns how much more memory a layer keeps after new tokens of a number of bytes."""
    if isinstance(layer, _LayerWithFiles):
        return 0 if layer.is_stored else added
    window = getattr(layer, "sliding_window", None)
    if not window or not tokens or getattr(layer, "record_past", False):
        return added
    kept = min(int(window) - 1, _length_of(layer) + tokens)
    return kept * added // tokens - _used(layer)


def _drop_outside_window(layer: Any) -> None:
    """Lets go of the tokens outside of a window. After a prompt, the window is a part of them."""
    if getattr(layer, "is_sliding", False):
        for name in ("keys", "values"):
            part = getattr(layer, name, None)
            if isinstance(part, torch.Tensor) and (
                part.untyped_storage().nbytes() > 2 * part.nbytes
            ):
                setattr(layer, name, part.clone())


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
    device = os.stat(path).st_dev
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            mounts = [line.split(" ") for line in file]
    except OSError:  # not Linux
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = [fields[fields.index("-") + 1] for fields in mounts if fields[2] == number]
    return any(kind in ("tmpfs", "devtmpfs", "ramfs") for kind in kinds)
