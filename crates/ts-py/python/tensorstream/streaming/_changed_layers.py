# SPDX-License-Identifier: MIT OR Apache-2.0
"""Lets the layers of PEFT change the streamed weights that they wrap: by merging, for example.

Methods of these layers that write to weights are replaced once for the process, and so are those
that say which parameters are trained. While one runs, the
weights below the layer are ordinary parameters in memory, so PEFT computes what it computes in
memory. Afterwards, weights that have not changed stream again. The others get memory that is a
mapping of an unnamed file, whose pages the system can reclaim. They are no longer part of the
budget.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..errors import StorageError
from . import _tree as tree
from ._calls import own_stand_ins, stand_ins_below
from ._streamed_tensor import StreamedTensor, in_memory, stand_in, to_memory, to_stand_in
from ._weights import Weights

#: Changed weights of fewer bytes stay in memory.
_SMALL = 64 << 10
#: Methods of layers that write to the weights, and of variants of layers, whose argument is the
#: layer. Those that initialise an adapter from weights end in ``_init``, such as ``pissa_init``.
_WRITING = ("merge", "unmerge", "set_base_weight", "_truncate_base_weight")
#: The method of a tuner that says which parameters are trained.
_MARKING = "_mark_only_adapters_as_trainable"


@dataclass(frozen=True)
class _Origin:
    """The streamed weight from which a parameter has got its values at first."""

    weights: Weights
    key: int

    def is_equal(self, parameter: torch.Tensor) -> bool:
        """Returns whether a parameter has the bytes of the streamed weight. Reads the weight."""
        spec = self.weights.specs[self.key]
        geometry = (spec.dtype, tuple(spec.shape), tuple(spec.strides), self.weights.device)
        own = (parameter.dtype, tuple(parameter.shape), parameter.stride(), parameter.device)
        if geometry != own:
            return False
        with torch.no_grad():
            streamed = stand_in(self.weights, self.key, spec.dtype, spec.shape, spec.strides)
            return torch.equal(_bits(in_memory(streamed)), _bits(parameter.detach()))


#: The origins of the changed weights of each module, by the name of the parameter.
_changed: weakref.WeakKeyDictionary[nn.Module, dict[str, _Origin]] = weakref.WeakKeyDictionary()


def let_layers_change() -> None:
    """Replaces methods of the layers of PEFT, now or when PEFT is imported."""
    global _is_waiting  # noqa: PLW0603
    layers = sys.modules.get("peft.tuners.tuners_utils")
    if layers is not None:
        _replace_below(layers.BaseTunerLayer, _replace_writing)
        _replace_below(sys.modules["peft.tuners.lora.layer"].LoraVariant, _replace_writing)
        _replace_below(layers.BaseTuner, _replace_marking)
    elif not _is_waiting:
        _is_waiting = True
        sys.meta_path.insert(0, _WhenImported())


_is_waiting = False


class _WhenImported(importlib.abc.MetaPathFinder):
    """Replaces methods of PEFT's layers once PEFT is imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "peft":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                let_layers_change()

            loader.exec_module = exec_module
        return spec


#: The classes whose methods are replaced.
_replaced: weakref.WeakSet[type] = weakref.WeakSet()


def _replace_below(base: Any, replace: Callable[[Any], None]) -> None:
    """Replaces methods of a class, of those derived from it, and of those that will be."""
    if base not in _replaced:
        before = base.__init_subclass__

        def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
            before(**kwargs)
            replace(cls)

        base.__init_subclass__ = classmethod(__init_subclass__)
    waiting = [base]
    while waiting:
        kind = waiting.pop()
        if kind not in _replaced:
            _replaced.add(kind)
            replace(kind)
        waiting += kind.__subclasses__()


def _replace_writing(kind: Any) -> None:
    """Replaces the methods of a class that write to weights."""
    for name, method in list(vars(kind).items()):
        writes = name in _WRITING or (name.endswith("_init") and not name.startswith("_"))
        if writes and isinstance(method, FunctionType):
            setattr(kind, name, _changing(method))
        elif writes and isinstance(method, staticmethod):
            setattr(kind, name, staticmethod(_changing(method.__func__)))


def _replace_marking(kind: Any) -> None:
    """Replaces the method of a class that says which parameters are trained.

    With ``bias="all"``, for example, biases of the model are. They get memory of their own.
    """
    method = vars(kind).get(_MARKING)
    if isinstance(method, FunctionType):

        @functools.wraps(method)
        def mark(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = method(self, model, *args, **kwargs)
            trained = {id(each): each for _, each in stand_ins_below(model) if each.requires_grad}
            for each in trained.values():
                to_memory(each, in_memory(each))
            return result

        setattr(kind, _MARKING, mark)


def _changing(method: Any) -> Any:
    """Returns a method during which the weights below its module are in memory."""

    @functools.wraps(method)
    def change(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        places = list(_places(self))
        if not places:
            return method(self, *args, **kwargs)
        # A forward that merges also unmerges before it returns.
        is_transient = sys._getframe(1).f_code.co_name == "forward"
        for parameter in {id(each): each for _, _, each, _ in places}.values():
            if isinstance(parameter, StreamedTensor):
                to_memory(parameter, in_memory(parameter))
        try:
            return method(self, *args, **kwargs)
        finally:
            done: set[int] = set()
            for module, name, _, origin in places:
                _settle(module, name, origin, done, is_transient)

    return change


def _places(layer: nn.Module) -> Iterator[tuple[nn.Module, str, Any, _Origin]]:
    """Yields the streamed and changed parameters below a layer.

    Each has its module, its name, the parameter, and the streamed weight.
    """
    for module in tree.modules(layer):
        changed = _changed.get(module, {})
        for name, each in list(own_stand_ins(module)):
            yield module, name, each, _Origin(each._ref.weights, each._ref.key)
        for name, origin in list(changed.items()):
            now = module._parameters.get(name)
            if now is None or not isinstance(now, StreamedTensor):
                yield module, name, now, origin


def _settle(
    module: nn.Module, name: str, origin: _Origin, done: set[int], is_transient: bool
) -> None:
    """Makes a parameter stream again, or moves its new values to a file.

    Args:
        module: The module.
        name: The name of the parameter, which can be another object than before.
        origin: The streamed weight.
        done: The parameters that were settled before, by ``id``.
        is_transient: Whether another change follows at once.
    """
    parameter: Any = module._parameters.get(name)
    if parameter is None:
        value = module.__dict__.get(name)
        if isinstance(value, torch.Tensor):  # PEFT has replaced the parameter
            _changed.setdefault(module, {})[name] = origin
            if not is_transient and value.grad_fn is None and not value.requires_grad:
                module.__dict__[name] = _in_file(value, origin.weights.directory)
        return
    if isinstance(parameter, StreamedTensor):
        return
    own = _changed.setdefault(module, {})
    if id(parameter) in done:
        own[name] = origin
        return
    done.add(id(parameter))
    if origin.is_equal(parameter):
        to_stand_in(parameter, origin.weights, origin.key)
        own.pop(name, None)
    else:
        own[name] = origin
        parameter.data = _in_file(parameter.detach(), origin.weights.directory)


#: The mappings of files, by the address of their memory, while their storages exist.
_mappings: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _in_file(tensor: torch.Tensor, directory: Path) -> torch.Tensor:
    """Returns a tensor with the same values in an unnamed file, at the same address modulo 64.

    Returns the tensor itself if it is small, is in a file already, or is on another device.

    Raises:
        StorageError: The file cannot be written.
    """
    storage = tensor.untyped_storage()
    is_mapped = storage.data_ptr() in _mappings
    if tensor.nbytes < _SMALL or tensor.device.type != "cpu" or is_mapped:
        return tensor
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    phase = tensor.data_ptr() % 64
    length = phase + extent * tensor.itemsize
    if directory.is_file():  # the checkpoint
        directory = directory.parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as unnamed:
            # Reserves the space: without space, a write to the mapping would end the process.
            os.posix_fallocate(unnamed.fileno(), 0, length)
            mapping = mmap.mmap(unnamed.fileno(), length)
    except OSError as error:
        raise StorageError(
            f"cannot write a changed weight to {directory}: {error}; set Config.storage_path to "
            "another directory"
        ) from error
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    _mappings[memory.untyped_storage().data_ptr()] = memory.untyped_storage()
    plain = memory[phase:].view(tensor.dtype)
    with torch.inference_mode(False), torch.no_grad():
        return plain.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).contiguous().reshape(-1).view(torch.uint8)
