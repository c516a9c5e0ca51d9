# SPDX-License-Identifier: MIT OR Apache-2.0
"""Saves streamed models with their own ``save_pretrained``, one small piece at a time.

The class of the model decides names, shards and conversions. It gets symbolic tensors, and the
function of safetensors that it calls in the end is replaced by one that writes those.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from .. import _native
from ..errors import ModelError
from ..files._capsules import NewTensor, dtype_name, write_all
from . import _tree as tree
from ._calls import stand_ins_below
from ._diversion import replaced
from ._streamed_tensor import StreamedTensor
from ._symbolic_tensor import SymbolicTensor

#: The functions of safetensors that classes of models call to write a file.
_WRITERS = (("transformers.modeling_utils", "safe_save_file"), ("safetensors.torch", "save_file"))

#: Writes tensors, which can be symbolic, to a file with metadata.
WriteFile = Callable[[dict[str, torch.Tensor], str | os.PathLike[str], dict[str, str]], None]

#: The function that writes the files of the module that is being saved in this thread.
_write_file: ContextVar[WriteFile | None] = ContextVar("tensorstream_write_file", default=None)
#: The module that is being saved in this thread.
_saved: ContextVar[nn.Module | None] = ContextVar("tensorstream_saved", default=None)


def save_in_pieces(model: nn.Module) -> None:
    """Replaces ``save_pretrained`` of the classes of the modules of a model, once for each class.

    ``state_dict`` of all modules is replaced, too, so that ``save_pretrained`` gets symbolic
    tensors.
    """
    if nn.Module.state_dict not in _replaced:
        nn.Module.state_dict = _state_dict(nn.Module.state_dict)  # type: ignore[method-assign]
        _replaced.add(nn.Module.state_dict)
    for kind in {type(module) for module in tree.modules(model)}:
        for owner in kind.__mro__:
            original = vars(owner).get("save_pretrained")
            if callable(original) and original not in _replaced:
                replacement = _save_pretrained(original)
                _replaced.add(replacement)
                setattr(owner, "save_pretrained", replacement)  # noqa: B010


#: The methods that replace others.
_replaced: set[Any] = set()


def _state_dict(original: Any) -> Any:
    @functools.wraps(original)
    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors = original(self, *args, **kwargs)
        return _symbolic_all(tensors) if _saved.get() is self else tensors

    return state_dict


def _save_pretrained(original: Any) -> Any:
    """Returns ``save_pretrained``, which writes streamed weights in small pieces.

    It refuses directories from where weights stream, because replacing their files ends streaming.
    """

    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        streams = isinstance(self, nn.Module) and _saved.get() is not self
        stored = {each._ref.weights.stored for _, each in stand_ins_below(self)} if streams else ()
        if not stored:
            return original(self, *args, **kwargs)
        directory = args[0] if args else kwargs.get("save_directory")
        if isinstance(directory, str | os.PathLike) and any(
            each.is_in(directory) for each in stored
        ):
            raise ModelError(
                f"cannot save to {os.fspath(directory)}, from where weights stream; nothing was "
                "changed; save to another directory, or restore(model) first"
            )
        if isinstance(kwargs.get("state_dict"), Mapping):
            kwargs["state_dict"] = _symbolic_all(kwargs["state_dict"])
        with saved_in_pieces(self, _write_file.get()):
            return original(self, *args, **kwargs)

    return save_pretrained


@contextlib.contextmanager
def saved_in_pieces(module: nn.Module, write: WriteFile | None = None) -> Iterator[None]:
    """Lets this thread save a module in small pieces.

    Its ``state_dict`` has symbolic tensors, and functions of safetensors write them.

    Args:
        module: The module.
        write: Writes each file, given its tensors, path and metadata. By default, files are written
            atomically, and those without symbolic tensors as usual.
    """
    with contextlib.ExitStack() as stack:
        for owner_name, name in _WRITERS:
            if hasattr(owner := sys.modules.get(owner_name), name):
                stack.enter_context(replaced(owner, name, _writer))
        stack.callback(_saved.reset, _saved.set(module))
        stack.callback(_write_file.reset, _write_file.set(write))
        yield


def _symbolic_all(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict with symbolic tensors instead of stand-ins."""
    made = dict(tensors)
    for stored in {
        each._ref.weights.stored for each in tensors.values() if isinstance(each, StreamedTensor)
    }:
        made = stored.symbolic_all(made)
    return made


def _writer(original: Any) -> Any:
    """Returns a function that writes symbolic tensors, and others like ``original``."""

    def save_file(
        tensors: dict[str, torch.Tensor],
        filename: str | os.PathLike[str],
        metadata: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        write = _write_file.get()
        if write is not None:
            write(tensors, filename, metadata or {})
        elif any(isinstance(each, SymbolicTensor) for each in tensors.values()):
            _write(tensors, filename, metadata)
        else:
            original(tensors, filename, metadata, **kwargs)

    return save_file


def _write(
    tensors: dict[str, torch.Tensor],
    path: str | os.PathLike[str],
    metadata: dict[str, str] | None,
) -> None:
    values = list(tensors.values())
    writer = _native.FileWriter(path, specs_of(tensors), metadata, "raw", None)
    pieces = (piece for index in writer.order() for piece in pieces_of(values[index]))
    write_all(writer, pieces, sum(tensor.nbytes for tensor in values), "saving")


def specs_of(tensors: Mapping[str, torch.Tensor]) -> list[NewTensor]:
    """Returns the descriptions of tensors to write."""
    return [
        (name, dtype_name(name, tensor), list(tensor.shape), None)
        for name, tensor in tensors.items()
    ]


def pieces_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the elements of a tensor, which can be symbolic, in small pieces if possible."""
    if isinstance(tensor, SymbolicTensor):
        yield from tensor.provider.pieces(tensor)
    else:
        yield tensor
