# SPDX-License-Identifier: MIT OR Apache-2.0
"""Saves streamed models with their own ``save_pretrained``, one small piece at a time.

The class of the model decides names, shards and conversions. It gets symbolic tensors, and the
function of safetensors that it calls in the end is replaced by one that writes those.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from .. import _native
from ..errors import ModelError
from ..files._capsules import NewTensor, dtype_name, write_all
from ._diversion import replaced
from ._guards import stand_ins_below
from ._replaced_method import ReplacedMethod, replace_method
from ._stored_weights import StoredWeights
from ._symbolic_tensor import SymbolicTensor

#: The functions of safetensors that classes of models call to write a file.
_WRITERS = (("transformers.modeling_utils", "safe_save_file"), ("safetensors.torch", "save_file"))

#: The module that is being saved in this thread.
_saved: ContextVar[nn.Module | None] = ContextVar("tensorstream_saved", default=None)


def save_in_pieces(model: nn.Module, stored: StoredWeights) -> None:
    """Replaces ``save_pretrained`` of each module that has it and contains streamed weights."""
    for module in model.modules():
        if hasattr(type(module), "save_pretrained") and any(stand_ins_below(module)):
            replace_method(module, StateDict(module, stored))
            replace_method(module, SavePretrained(module, stored))


class StateDict(ReplacedMethod):
    """Replaces ``state_dict``, so that ``save_pretrained`` gets symbolic tensors."""

    def __init__(self, module: nn.Module, stored: StoredWeights) -> None:
        super().__init__(module, "state_dict")
        self._stored = stored

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self.original()(*args, **kwargs)
        return self._stored.symbolic_all(tensors) if _saved.get() is self.module() else tensors


class SavePretrained(ReplacedMethod):
    """Replaces ``save_pretrained``, to write weights in small pieces.

    Refuses directories from where weights stream, because replacing their files ends streaming.
    """

    def __init__(self, module: nn.Module, stored: StoredWeights) -> None:
        super().__init__(module, "save_pretrained")
        self._stored = stored

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        directory = args[0] if args else kwargs.get("save_directory")
        if isinstance(directory, str | os.PathLike) and self._stored.is_in(directory):
            raise ModelError(
                f"cannot save to {os.fspath(directory)}, from where weights stream; nothing was "
                "changed; save to another directory, or restore(model) first"
            )
        if isinstance(kwargs.get("state_dict"), Mapping):
            kwargs["state_dict"] = self._stored.symbolic_all(kwargs["state_dict"])
        with contextlib.ExitStack() as stack:
            for module, name in _WRITERS:
                if hasattr(owner := sys.modules.get(module), name):
                    stack.enter_context(replaced(owner, name, _writer))
            token = _saved.set(self.module())
            stack.callback(_saved.reset, token)
            return self.original()(*args, **kwargs)


def _writer(original: Any) -> Any:
    """Returns a function that writes symbolic tensors, and others like ``original``."""

    def save_file(
        tensors: dict[str, torch.Tensor],
        filename: str | os.PathLike[str],
        metadata: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        if not any(isinstance(tensor, SymbolicTensor) for tensor in tensors.values()):
            original(tensors, filename, metadata, **kwargs)
            return
        _write(tensors, filename, metadata or {})

    return save_file


def _write(
    tensors: dict[str, torch.Tensor], path: str | os.PathLike[str], metadata: dict[str, str]
) -> None:
    specs: list[NewTensor] = [
        (name, dtype_name(name, tensor), list(tensor.shape), None)
        for name, tensor in tensors.items()
    ]
    values = list(tensors.values())
    writer = _native.FileWriter(path, specs, metadata, "raw", None)
    pieces = (piece for index in writer.order() for piece in _pieces(values[index]))
    write_all(writer, pieces, sum(tensor.nbytes for tensor in values), "saving")


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if isinstance(tensor, SymbolicTensor):
        yield from tensor.provider.pieces(tensor)
    else:
        yield tensor
