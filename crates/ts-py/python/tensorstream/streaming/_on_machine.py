# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loads transformers models whose weights a remote machine reads."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .._scratch import Scratch
from ..budget import Budget
from ..config import Config
from ..errors import (
    CheckpointNotFoundError,
    CheckpointPermissionError,
    ConfigurationError,
    TensorStreamError,
)
from ..files._hub import SCHEME
from ..files._places import Place
from ..remote.client._checkpoint import RemoteCheckpoint, read_text, source_on
from ._arguments import Arguments
from ._loading import check, class_and_config, transformers_module

if TYPE_CHECKING:
    from ..remote.client._split import Unit

Path = str | os.PathLike[str]

#: The files next to the weights that this process needs.
_CONFIGURATION = "config.json"
_GENERATION = "generation_config.json"
#: Arguments for the Hub that a machine cannot use.
_OWN = ("token", "cache_dir", "force_download", "local_files_only")


def from_pretrained(
    path: Path,
    device: torch.device,
    *,
    budget: int | str | Budget | Mapping[Any, int | str] | None,
    config: Config | Any | None,
    model_class: type[Any] | None,
    kwargs: dict[str, Any],
) -> Any:
    """Loads a model on a remote device. See ``tensorstream.from_pretrained``. Blocks."""
    if budget is not None or getattr(config, "budget", None) is not None:
        raise ConfigurationError(
            f"invalid budget: the model is in the memory of {device}; to stream its weights there, "
            "start the machine's server with --budget"
        )
    arguments = _arguments(config, kwargs, str(device))
    return _load(path, [device], model_class, arguments, None)[0]


def from_pretrained_on_several(
    path: Path,
    devices: list[torch.device],
    divide: Callable[[Any, int], list[Unit]],
    kwargs: dict[str, Any],
) -> tuple[Any, list[Unit]]:
    """Loads a model on several remote devices. Blocks.

    Args:
        path: See ``tensorstream.from_pretrained``.
        devices: The devices.
        divide: Divides the model, which is on the meta device, into parts. The second argument is
            the size of its floating-point numbers.
        kwargs: The arguments of ``from_pretrained``.

    Returns:
        What ``from_pretrained`` returns, and the units of the model.
    """
    kwargs = dict(kwargs)
    config, model_class = kwargs.pop("config", None), kwargs.pop("model_class", None)
    if "budget" in kwargs or "device" in kwargs:
        raise ConfigurationError("invalid budget or device: pass the machines and their budgets")
    arguments = _arguments(config, kwargs, "several machines")
    return _load(path, devices, model_class, arguments, divide)


def _arguments(config: Any, kwargs: dict[str, Any], where: str) -> Arguments:
    """Returns the arguments of a call, unless it has some that a machine cannot use."""
    if isinstance(config, Config):
        raise ConfigurationError(
            f"invalid config: a Config has settings of models that stream here, not on {where}"
        )
    kwargs = {name: value for name, value in kwargs.items() if name != "device_map"}
    arguments = Arguments.of(None, config, kwargs)
    if unusable := [name for name in _OWN if arguments.hub.get(name) not in (None, False)]:
        raise ConfigurationError(
            f"invalid {unusable[0]}: the machine of {where} downloads the model, with the "
            "settings of the user there; leave it out"
        )
    if arguments.trust_remote_code:
        raise ConfigurationError(
            "invalid trust_remote_code: code of the checkpoint is not copied from the machine; "
            "pass `model_class`"
        )
    return arguments


def _load(
    path: Path,
    devices: list[torch.device],
    model_class: type[Any] | None,
    arguments: Arguments,
    divide: Callable[[Any, int], list[Unit]] | None,
) -> tuple[Any, list[Unit]]:
    """Loads a model. Without ``divide``, there is one device."""
    with (
        _opened(path, devices[0], arguments) as (source, first),
        _configuration(source, devices[0]) as place,
    ):
        transformers = transformers_module()
        try:
            loaded_class, model_config, for_class = class_and_config(
                transformers, place, model_class, arguments
            )
        except TensorStreamError as error:
            raise type(error)(str(error).replace(place.name, source)) from error
        units: list[Unit] = []
        device_map: dict[str, torch.device] = {"": devices[0]}
        if divide is None:
            tensors = first.load()
        else:
            units = divide(*_shell(loaded_class, model_config, for_class))
            device_map = {unit.name: devices[unit.part] for unit in units}
            tensors = _load_parts(source, first, units, devices, loaded_class)
        model, info = loaded_class.from_pretrained(
            None,
            config=model_config,
            state_dict=tensors,
            device_map=device_map,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **for_class,
        )
        if model.can_generate() and "generation_config" not in for_class:
            model.generation_config = _generation_config(transformers, place, model)
    if divide is not None:
        _take_over(model, units)
    check(source, info, model, new_heads=model_class is not None)
    model.name_or_path = model.config._name_or_path = source
    return (model, info) if arguments.loading_info else model, units


def _shell(loaded_class: Any, model_config: Any, for_class: dict[str, Any]) -> tuple[Any, int]:
    """Returns the model on the meta device, and the size of its floating-point numbers."""
    with torch.device("meta"):
        shell = loaded_class(copy.deepcopy(model_config))
    shell.tie_weights()
    dtype = for_class.get("dtype", for_class.get("torch_dtype"))
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(model_config, "dtype", None) or torch.get_default_dtype()
    return shell, dtype.itemsize


def _load_parts(
    source: str,
    first: RemoteCheckpoint,
    units: list[Unit],
    devices: list[torch.device],
    loaded_class: Any,
) -> dict[str, torch.Tensor]:
    """Loads each tensor on the machine of its unit."""
    base = f"{getattr(loaded_class, 'base_model_prefix', '')}."
    parts = {unit.name: unit.part for unit in units}

    def part_of(name: str) -> int:
        # The checkpoint may be of the model without its head, or of one with another head.
        for each in (name, base + name, name.removeprefix(base)):
            steps = each.split(".")
            modules = (".".join(steps[:end]) for end in range(len(steps), 0, -1))
            found = next((module for module in modules if module in parts), None)
            if found is not None:
                return parts[found]
        return 0  # transformers moves it, or does not use it

    names: dict[int, list[str]] = {}
    for name in first.tensors:
        names.setdefault(part_of(name), []).append(name)
    tensors: dict[str, torch.Tensor] = {}
    for part, own in names.items():
        if part == 0:
            tensors |= first.load(own)
        else:
            with RemoteCheckpoint(source, devices[part]) as checkpoint:
                tensors |= checkpoint.load(own)
    return tensors


def _take_over(model: Any, units: list[Unit]) -> None:
    """Replaces accelerate's hooks, and sets the modules of the units."""
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    for name in ("to", "cuda", "cpu"):
        model.__dict__.pop(name, None)  # accelerate's warnings
    for unit in units:
        unit.module = model.get_submodule(unit.name)


@contextmanager
def _opened(
    path: Path, device: torch.device, arguments: Arguments
) -> Iterator[tuple[str, RemoteCheckpoint]]:
    """Opens the weights of a path of the machine, or else those of a model of this name."""
    text = os.fspath(path)
    subfolder, revision = arguments.hub.get("subfolder") or "", arguments.hub.get("revision")
    is_model = text.startswith(SCHEME)
    sources = [] if is_model else [os.path.join(text, subfolder) if subfolder else text]
    if is_model or not ("://" in text or os.path.isabs(text)):
        at = f"@{revision}" if revision else ""
        inner = f"/{subfolder}" if subfolder else ""
        sources.append(f"{SCHEME}{text.removeprefix(SCHEME)}{at}{inner}")
    failures: list[Exception] = []
    for source in sources:
        try:
            checkpoint = RemoteCheckpoint(source, device)
        except (CheckpointNotFoundError, CheckpointPermissionError) as error:
            failures.append(error)
        else:
            with checkpoint:
                yield source, checkpoint
            return
    first, *more = failures
    if not more:
        raise first
    raise type(first)(f"{first}; and as the name of a model: {more[0]}") from first


@contextmanager
def _configuration(source: str, device: torch.device) -> Iterator[Place]:
    """Copies the configuration of a model from the machine to a temporary directory."""
    with Scratch("tensorstream-configuration-") as directory:
        for name in (_CONFIGURATION, _GENERATION):
            try:
                text = read_text(source, name, device)
            except CheckpointNotFoundError:
                continue  # transformers says what is missing, or has a default
            with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
                file.write(text)
        yield Place(str(directory), source_on(source, device.index or 0))


def _generation_config(transformers: Any, place: Place, model: Any) -> Any:
    try:
        return transformers.GenerationConfig.from_pretrained(place.name)
    except OSError:  # no file: transformers falls back to the defaults of the class
        return transformers.GenerationConfig.from_model_config(model.config)
