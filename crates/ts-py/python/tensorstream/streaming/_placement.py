# SPDX-License-Identifier: MIT OR Apache-2.0
"""Divides a model among devices, and moves the inputs of its modules to their devices."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ..config import Config
from ..devices import HOST_DEVICES, device_of, devices_of_map
from ..errors import ConfigurationError
from . import _tree as tree
from ._division import FUSED

#: A device holds a model if its budget has this part of the model's bytes in addition, for the
#: pages that units do not fill. It can hold a unit with this many more bytes.
_MARGIN, _LEAST_BYTES = 32, 64 << 10


class Placement:
    """The device of each module of a model.

    Args:
        model: The model.
        config: The settings. If they let the library choose the devices, it does so now.

    Raises:
        ConfigurationError: The device map names a module that does not exist, leaves out a module
            with weights, or places parameters of one module on several devices; or a device cannot
            be used.
    """

    def __init__(self, model: nn.Module, config: Config) -> None:
        #: The settings, with the devices that were chosen.
        self.config = config = _chosen(model, config) if config.is_automatic() else config
        #: The settings for each device, the main one first.
        self.configs = config.on_devices()
        for each in self.configs.values():
            each.accelerator()  # refuses a device that cannot be used
        self.main = next(iter(self.configs))
        self._model = model
        #: The device of each name in the map.
        self._map: dict[str, torch.device] = {"": self.main}
        if isinstance(config.device, Mapping):
            self._map = {
                name: self.main if str(device) in HOST_DEVICES else device_of(device)
                for name, device in config.device.items()
            }
            self._check_names()
        #: The devices of modules, by ``id``, if there are several.
        self._devices: dict[int, torch.device] = {}
        if set(self._map.values()) != {self.main}:
            self._devices = {
                id(module): self._device_of(prefix, module)
                for prefix, module in tree.named_modules(model)
            }

    def device(self, module: nn.Module) -> torch.device:
        """Returns the device of a module of the model."""
        return self._devices[id(module)] if self._devices else self.main

    def share(self, device: torch.device) -> float:
        """Returns the share of a device in the bytes of all parameters, 0 to 1."""
        if not self._devices:
            return float(device == self.main)
        sizes = dict.fromkeys(self.configs, 0)
        for module in tree.modules(self._model):
            sizes[self.device(module)] += _bytes_of(module, recurse=False)
        return sizes[device] / max(sum(sizes.values()), 1)

    def set_device_map(self) -> None:
        """Gives the model a map that says to other libraries that it must stay where it is.

        ``Accelerator.prepare`` and ``Trainer`` do not move models whose map has several entries,
        pipelines use the first device, and PEFT looks for each layer, whose name ends with its
        number. The values are not "cpu" or "disk", for which transformers and PEFT expect hooks of
        accelerate. Without an accelerator, they refuse the CPU as a device then, and several
        processes.
        """
        names = ["", *self._model._modules]
        for name, _ in tree.named_modules(self._model):
            numbers = [part for part in name.split(".") if part.isdigit()]
            if len(numbers) == 1 and name.endswith(f".{numbers[0]}"):
                names.append(name)
        modules = dict(tree.named_modules(self._model))
        devices = {name: self.device(modules[name]) for name in names}
        self._model.__dict__["hf_device_map"] = devices

    def move_inputs(self) -> None:
        """Makes modules move their inputs to their devices, also after ``restore``.

        Results are moved to the device of the module around, which may combine them with others.
        Those of the model are moved to the main device.
        """
        for module in tree.modules(self._model):
            _remove_hooks(module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
            _remove_hooks(module._forward_hooks, module._forward_hooks_with_kwargs)
        if len(self.configs) == 1:
            return
        around = {self._model: self.main}
        for module in tree.modules(self._model):
            if len({self.device(each) for each in tree.modules(module)}) > 1:
                for part in (part for child in tree.children(module) for part in _run(child)):
                    around.setdefault(part, self.device(module))
        for module, device in around.items():
            inputs = InputsTo(self.device(module))
            module.register_forward_pre_hook(inputs, prepend=True, with_kwargs=True)
            if module is self._model or device != self.device(module):
                module.register_forward_hook(ResultTo(device))

    def _check_names(self) -> None:
        modules = {name for name, _ in tree.named_modules(self._model)}
        tensors = [
            *tree.named_parameters(self._model, remove_duplicate=False),
            *tree.named_buffers(self._model, remove_duplicate=False),
        ]
        known = modules | {name for name, _ in tensors}
        for name in self._map:
            if name not in known:
                raise ConfigurationError(
                    f"invalid device map: the {type(self._model).__name__} has no module `{name}`"
                )
        require_all(self._model, self._map)

    def _device_of(self, prefix: str, module: nn.Module) -> torch.device:
        names = [
            tree.joined(prefix, name) for name, own in module._parameters.items() if own is not None
        ]
        own = {
            self._map[entry] for name in names if (entry := entry_of(name, self._map)) is not None
        }
        if len(own) > 1:
            raise ConfigurationError(
                f"invalid device map: the parameters of `{prefix}` are on several devices "
                f"({', '.join(map(str, own))}): name the module, not its parameters"
            )
        entry = entry_of(prefix, self._map)
        return next(iter(own), self.main if entry is None else self._map[entry])


def _chosen(model: nn.Module, config: Config) -> Config:
    """Returns settings with the device or the devices for a model.

    One device is chosen if there is one that holds the model, or if no other can hold each unit.
    Several devices get layers that follow each other, in proportion to their budgets. Everything
    else is on the first one.
    """
    configs = config.on_devices()
    whole_classes = {
        name
        for module in tree.modules(model)
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    layers = {name: _bytes_of(layer) for name, layer in _layers(model, "", whole_classes, set())}
    whole = _bytes_of(model)
    budgets: dict[torch.device, int] = {}
    for device, own in configs.items():
        budgets[device] = own.free_bytes()
        if len(configs) == 1 or whole + whole // _MARGIN <= budgets[device]:
            return own
    largest = max(_bytes_of(each, isinstance(each, FUSED)) for each in tree.modules(model))
    able = [device for device, budget in budgets.items() if budget >= largest + _LEAST_BYTES]
    main = able[0] if able else next(iter(configs))
    total = sum(budgets[device] for device in able)
    places: dict[str, Any] = {"": main}
    before, end, rest = whole - sum(layers.values()), 0.0, list(layers.items())
    for device in able:
        end += whole * budgets[device] / total
        while rest and (before + rest[0][1] / 2 <= end or device == able[-1]):
            name, size = rest.pop(0)
            before += size
            if device != main:
                places[name] = device
    chosen = devices_of_map(places)
    if len(chosen) == 1:
        return configs[main]
    budget: Any = config.budget
    if isinstance(budget, Mapping):
        budget = {str(device): configs[device].budget for device in chosen}
    return replace(config, device=places, budget=budget)


def _layers(
    module: nn.Module, name: str, whole_classes: set[str], seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the layers of a model, and their names: the parts of its outermost lists.

    Args:
        module: The model, or a part of it.
        name: The name of the part.
        whole_classes: The names of classes of modules that must stay whole, as models of
            transformers and diffusers name them.
        seen: The ``id`` of each module that was looked at.
    """
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for number, child in module._modules.items():
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            own = f"{name}.{number}".lstrip(".")
            if is_list:
                yield own, child
            elif type(child).__name__ not in whole_classes:
                yield from _layers(child, own, whole_classes, seen)


def _bytes_of(module: nn.Module, recurse: bool = True) -> int:
    own = module._parameters.values()
    parameters = tree.parameters(module) if recurse else (each for each in own if each is not None)
    return sum(parameter.nbytes for parameter in parameters)


def entry_of(name: str, device_map: Iterable[str]) -> str | None:
    """Returns the longest name in a device map that is, or contains, a module or tensor."""
    found = [each for each in device_map if not each or f"{name}.".startswith(f"{each}.")]
    return max(found, key=len, default=None)


def require_all(model: nn.Module, device_map: Iterable[str]) -> None:
    """Refuses a device map that leaves out parameters of a model."""
    for name, _ in tree.named_parameters(model):
        if entry_of(name, device_map) is None:
            raise ConfigurationError(
                f'the device map does not name `{name}`, or a module that has it; "" names the '
                "whole model"
            )


def _run(module: nn.Module) -> Iterator[nn.Module]:
    """Yields a module, or instead those in it if it is a list of modules without a forward."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for each in tree.children(module):
            yield from _run(each)
    else:
        yield module


@dataclass(frozen=True)
class InputsTo:
    """A hook that moves the inputs of a module to a device."""

    device: torch.device

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return moved(args, self.device), moved(kwargs, self.device)


@dataclass(frozen=True)
class ResultTo:
    """A hook that moves the result of a module to a device."""

    device: torch.device

    def __call__(self, _: nn.Module, args: Any, result: Any) -> Any:
        return moved(result, self.device)


def _remove_hooks(hooks: dict[int, Any], with_kwargs: dict[int, bool]) -> None:
    """Removes the hooks of this file from the hooks of a module."""
    for number, hook in list(hooks.items()):
        if isinstance(hook, InputsTo | ResultTo):
            del hooks[number]
            with_kwargs.pop(number, None)


def moved(value: Any, device: torch.device) -> Any:
    """Returns tensors, and tuples, lists and mappings of them, on a device.

    Other objects, such as caches, are returned as they are: their parts are on the devices of the
    layers that use them. So are containers whose tensors are on the device already.
    """
    if isinstance(value, torch.Tensor):
        return value if value.device == device or value.is_meta else value.to(device)
    if isinstance(value, PackedSequence):  # one of its tensors is always on the CPU
        packed: Any = value  # its method lacks the type of devices
        return value if value.data.device == device else packed.to(device)
    if all(each.device == device for each in tensors(value)):
        return value
    if isinstance(value, Mapping):
        other: Any = copy.copy(value) if isinstance(value, MutableMapping) else {}
        for key, each in value.items():
            other[key] = moved(each, device)
        return other
    parts = [moved(each, device) for each in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors that ``moved`` moves."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors(each)
