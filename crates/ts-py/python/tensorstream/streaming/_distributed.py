# SPDX-License-Identifier: MIT OR Apache-2.0
"""Keeps ``DistributedDataParallel`` from sending streamed weights to other processes.

Each process streams them from its own files. ``DistributedDataParallel`` reads an attribute of the
module that it wraps. This module can be the streamed model, or a ``PeftModel`` around it. Another
module around a streamed model needs this attribute too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ..errors import ModelError
from ._streamed_tensor import StreamedTensor

#: The attribute of a model from which ``DistributedDataParallel`` takes the names to leave out.
IGNORED = "_ddp_params_and_buffers_to_ignore"
#: The prefixes of names if PEFT wraps the model, which then still has the attribute.
_PREFIXES = ("", "base_model.model.", "base_model.")


class StreamedNames:
    """The names of the streamed parameters of a model, and those that were ignored before."""

    def __init__(self, model: nn.Module, before: Iterable[str]) -> None:
        self._model = weakref.ref(model)
        self.before = before

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamedNames:
        copy = StreamedNames.__new__(StreamedNames)
        original = self._model()
        copied = None if original is None else memo.get(id(original))
        copy._model, copy.before = self._model, list(self.before)
        if isinstance(copied, nn.Module):
            copy._model = weakref.ref(copied)
        return copy

    def __reduce__(self) -> Any:
        return list, (list(self.before),)  # a pickled model is in memory

    def __iter__(self) -> Iterator[str]:
        """Yields the names.

        Raises:
            ModelError: A streamed weight requires gradients, which each process would keep.
        """
        yield from self.before
        model = self._model()
        if model is None:
            return
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if isinstance(parameter, StreamedTensor):
                if parameter.requires_grad:
                    raise ModelError(
                        "DistributedDataParallel would not average the gradients of streamed "
                        f"weights, and `{name}` requires them; freeze the streamed weights with "
                        "parameter.requires_grad_(False)"
                    )
                yield from (prefix + name for prefix in _PREFIXES)


def ignore_streamed(model: nn.Module) -> None:
    """Makes ``DistributedDataParallel`` ignore the streamed parameters of a model."""
    model.__dict__[IGNORED] = StreamedNames(model, model.__dict__.get(IGNORED, ()))


def restore_names(model: nn.Module) -> None:
    """Undoes ``ignore_streamed``."""
    names = model.__dict__.pop(IGNORED, None)
    before = names.before if isinstance(names, StreamedNames) else names
    if before:
        model.__dict__[IGNORED] = before
