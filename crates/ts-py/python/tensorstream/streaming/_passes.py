# SPDX-License-Identifier: MIT OR Apache-2.0
"""Says which calls of modules are passes over the weights of a model."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .. import _native
from ..errors import ModelError
from . import _tree as tree
from ._progress import first_pass
from ._stand_in_memory import require_no_tracing, unprotect

#: Modules whose children are elements, and not parts with a role.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
#: How many modules of a wrapper, in breadth-first order, are searched for the model.
_SEARCHED = 64


class Passes:
    """Which calls of modules are passes over the weights of a model on a device.

    The native module asks this when the outermost call of a module on a thread first needs a
    weight. References are weak, because the streamer refers to this object.

    Args:
        model: The model.
        streamer: The streamer of its weights.
        device: Their device.
    """

    def __init__(self, model: nn.Module, streamer: _native.Streamer, device: torch.device) -> None:
        #: The model and its copies.
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet([model])
        self._streamer = weakref.ref(streamer)
        self._device = device
        self._kinds: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._is_first = True
        self._is_protected = True

    def kind(self, module: nn.Module) -> int:
        """Returns 2 if the module is or contains the model, 1 if it is a part, and 0 otherwise.

        Raises:
            ModelError: The call is being traced, which would keep addresses of weights.
        """
        _refuse_tracing(self._device)
        kind = self._kinds.get(module)
        if kind is None:
            self._kinds[module] = kind = self._kind(module)
        return kind

    def _kind(self, module: nn.Module) -> int:
        models = list(self.models)
        # A wrapper, such as a `PeftModel`, has the model near its top.
        if any(each is model for each in _nearest(module) for model in models):
            return 2
        return int(any(part is module for model in models for part in parts(model)))

    def profiled(self) -> None:
        """Prepares the weights for PyTorch's profiler, which asks for the addresses of operands."""
        if self._is_protected:
            self._is_protected = False
            for model in list(self.models):
                for parameter in tree.parameters(model):
                    if "_ref" in parameter.__dict__:
                        unprotect(parameter)

    def add_copies(self, memo: dict[int, Any]) -> None:
        """Adds the models that ``copy.deepcopy`` is copying, by its argument ``memo``."""
        for model in list(self.models):
            copy = memo.get(id(model))
            if isinstance(copy, nn.Module) and copy not in self.models:
                self.models.add(copy)
                self._kinds.clear()

    def progress(self) -> contextlib.ExitStack | None:
        """Returns an object that shows the progress of the first pass until it is closed."""
        streamer = self._streamer()
        if not self._is_first or streamer is None:
            return None
        self._is_first = False
        stack = contextlib.ExitStack()
        stack.enter_context(first_pass(streamer))
        return stack


def _nearest(module: nn.Module) -> Iterator[nn.Module]:
    """Yields a module and the first modules below it, in breadth-first order."""
    queue = [module]
    for number in range(_SEARCHED):
        if number == len(queue):
            return
        queue += (each for each in queue[number]._modules.values() if each is not None)
        yield queue[number]


def parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules that users may call instead of the model.

    These are its children and their children, if they have a forward and contain modules. The
    elements of a list, such as the layers, are not among them: each of them would be a pass.
    """

    def named(parent: nn.Module) -> list[nn.Module]:
        children = [each for each in parent._modules.values() if each is not None]
        return [] if isinstance(parent, _LISTS) else children

    children = named(model)
    grandchildren = itertools.chain.from_iterable(named(child) for child in children)
    for part in dict.fromkeys([*children, *grandchildren]):
        if part._modules and type(part).forward is not nn.Module.forward:
            yield part


def _refuse_tracing(device: torch.device) -> None:
    """Refuses tracing and CUDA graphs, which would keep weights or their addresses."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ModelError(
            "cannot capture a model that streams in a CUDA graph, which would keep the addresses "
            "of its weights; restore(model) first if it fits on the device"
        )
    require_no_tracing()
