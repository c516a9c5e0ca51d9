# SPDX-License-Identifier: MIT OR Apache-2.0
"""Keeps ``DistributedDataParallel`` from sending streamed weights to other processes.

Each process streams them from its own files.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from ._streamed_tensor import StreamedTensor

#: The attribute of a model from which ``DistributedDataParallel`` takes the names to leave out.
IGNORED = "_ddp_params_and_buffers_to_ignore"
#: The prefixes of names if PEFT wraps the model, which then still has the attribute.
_PREFIXES = ("", "base_model.model.", "base_model.")


class StreamedNames:
    """The names of the streamed parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __iter__(self) -> Iterator[str]:
        model = self._model()
        if model is None:
            return
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if isinstance(parameter, StreamedTensor):
                yield from (prefix + name for prefix in _PREFIXES)
