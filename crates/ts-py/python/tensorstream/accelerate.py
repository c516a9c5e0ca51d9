# SPDX-License-Identifier: MIT OR Apache-2.0
"""Replaces the functions of accelerate that offload models: ``import tensorstream.accelerate``.

The functions have the signatures of accelerate, and ``budget`` in addition. Weights stream from
storage to the device on which the model runs: the CPU, or accelerators. Other names, such as
``Accelerator`` and ``init_empty_weights``, are those of accelerate.
"""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from . import _native
from ._scratch import directory_of
from .budget import Budget
from .config import Config, expanded
from .devices import AUTOMATIC, HOST_DEVICES, Device, device_of, devices_of_map
from .errors import CheckpointError, ConfigurationError, ModelError
from .files._places import find
from .files._state_dict import save_file
from .streaming import _tree as tree
from .streaming._arguments import (
    STRATEGIES,
    device_named_by,
    dtype_of,
    memory_of,
)
from .streaming._builder import Builder
from .streaming._division import FUSED
from .streaming._offload import offload, restore
from .streaming._placement import (
    InputsTo,
    Placement,
    ResultTo,
    entry_of,
    moved,
    require_all,
    tensors,
)

__all__ = [
    "UserCpuOffloadHook",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "load_checkpoint_and_dispatch",
]

M = TypeVar("M", bound=nn.Module)
Path = str | os.PathLike[str]

#: The file in which accelerate lists the tensors of a directory.
_INDEX = "index.json"


def disk_offload(
    model: M,
    offload_dir: Path,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
    *,
    budget: int | str | Budget | None = None,
) -> M:
    """Streams the weights of a model from a directory. Blocks while they are written.

    Weights that fit in the budget stay in memory. See ``tensorstream.offload``.

    Args:
        model: The model, on the CPU. If it is on the meta device, the directory is its checkpoint.
        offload_dir: The directory that the weights are written to, as a ``.ts`` file.
        execution_device: The device on which the model runs. The default is the CPU.
        offload_buffers: Has no effect. Buffers stay in memory.
        preload_module_classes: Has no effect. Modules whose parents use their weights directly are
            found without it.
        budget: The memory for weights. See ``tensorstream.Config``.

    Returns:
        The model, which is changed in place. ``tensorstream.restore`` undoes this.

    Raises:
        ConfigurationError: The execution device cannot be used, or the budget is invalid.
        The errors of ``tensorstream.offload``.

    Examples:
        >>> import torch
        >>> from tensorstream.accelerate import disk_offload
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        >>> model = disk_offload(model, "weights", budget="60KiB")
        >>> model(torch.ones(1, 64)).shape
        torch.Size([1, 64])
    """
    config = Config(storage_path=offload_dir, budget=budget, device=execution_device)
    if os.path.isfile(os.path.join(offload_dir, _INDEX)) and _is_meta(model):
        raise ConfigurationError(
            f"{os.fspath(offload_dir)} has weights in the format of accelerate: pass a model with "
            "weights, which are written in another format, or use load_checkpoint_and_dispatch "
            "with a checkpoint"
        )
    return _streamed(model, config, None)


def cpu_offload(
    model: M,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> M:
    """Keeps the weights of a model in CPU memory. Blocks while weights are written.

    On the CPU, nothing changes: weights are used where they are. To an accelerator they stream,
    from CPU memory that their first use fills from a temporary file. The file is removed when the
    model is freed.

    Args:
        model: The model. A streamed model stays one.
        execution_device: The CPU, or an accelerator. Its budget is twice the largest layer.
        offload_buffers: Has no effect.
        state_dict: The weights, if the model is on the meta device. The model shares their memory.
        preload_module_classes: Has no effect.

    Returns:
        The model, which is changed in place. ``tensorstream.restore`` undoes this.

    Raises:
        ConfigurationError: The execution device cannot be used.
        ModelError: The model is on the meta device, and no weights are given.
        The errors of ``tensorstream.offload``.
    """
    device = None if execution_device is None else device_of(execution_device)
    if state_dict is None and _is_meta(model):
        raise ModelError(
            "the model is on the meta device: pass its weights as `state_dict`, or use "
            "load_checkpoint_and_dispatch"
        )
    if device is not None:
        Placement(model, Config(device=device))  # refuses devices that cannot be used
    if state_dict is not None:
        model.load_state_dict(state_dict, assign=True)
    if device is None or device.type == "cpu":
        return model
    config = Config(
        storage_path=directory_of(model),
        budget=_needed_bytes(model, {"": "cpu"}, None, device),
        device=device,
        host_budget=sum(each.nbytes for each in tree.parameters(model)),
    )
    return _streamed(model, config, None)


class UserCpuOffloadHook:
    """The hook of ``cpu_offload_with_hook``. Its methods change nothing.

    Weights are in CPU memory already. A streamed model keeps its budget; models that run in turn
    can share one ``tensorstream.Budget``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def offload(self) -> None:
        """Does nothing."""

    def remove(self) -> None:
        """Does nothing."""


def cpu_offload_with_hook(
    model: M,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[M, UserCpuOffloadHook]:
    """Returns a model with its weights in CPU memory, and a hook. See ``cpu_offload``.

    Raises:
        ModelError: The model is on the meta device.
        The other errors of ``cpu_offload``.
    """
    return cpu_offload(model, execution_device), UserCpuOffloadHook(model)


def dispatch_model(
    model: M,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: Path | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    *,
    budget: int | str | Budget | None = None,
) -> M:
    """Streams a model whose device map names the disk. Blocks while weights are written.

    Args:
        model: The model.
        device_map: "cpu", "disk" or an accelerator for the name of each module or parameter. With
            an accelerator, weights on the CPU or the disk stream to the main device.
        main_device: The main device, to which results are moved. The default is the first
            accelerator of the map, or the CPU.
        state_dict: The weights, if the model is on the meta device.
        offload_dir: The directory that the weights are written to if the map names the disk or
            accelerators. The default for accelerators is a temporary one, until the model is freed.
            If the model is on the meta device, and no ``state_dict`` is given, the directory must
            have the checkpoint.
        offload_index: Refused. Pass the checkpoint to ``load_checkpoint_and_dispatch``.
        offload_buffers: Has no effect. Buffers stay in memory.
        skip_keys: Has no effect. With several devices, all inputs of modules are moved to theirs.
        preload_module_classes: Has no effect.
        force_hooks: Has no effect.
        budget: The memory for weights. The default is what the map needs: the weights on the CPU,
            and twice those of the largest layer on the disk, such as one ``nn.Linear``. Of an
            accelerator: the weights on it, and twice those of the largest layer. Which
            weights stay in memory is chosen by the engine.

    Returns:
        The model, which is changed in place.

    Raises:
        ConfigurationError: The map names a device that cannot be used or does not name every
            weight, the directory is missing, or another argument is invalid.
        The errors of ``tensorstream.offload``.
    """
    device = _devices_of(model, device_map, main_device)
    if offload_index is not None:
        raise ConfigurationError(
            "dispatch_model cannot use `offload_index`: pass the checkpoint to "
            "load_checkpoint_and_dispatch"
        )
    if device is None and "disk" not in map(str, device_map.values()):
        return cpu_offload(model, state_dict=state_dict)
    if offload_dir is None and "disk" in map(str, device_map.values()):
        raise ConfigurationError(
            "the device map names the disk: pass `offload_dir`, a directory for the weights"
        )
    if offload_dir is None and state_dict is None and _is_meta(model):
        raise ModelError(
            "the model is on the meta device: pass its weights as `state_dict`, or `offload_dir`, "
            "a directory with its checkpoint"
        )
    config = Config(
        storage_path=offload_dir,
        budget=_needed_bytes(model, device_map, None, device) if budget is None else budget,
        device=device,
    )
    Placement(model, config)
    if state_dict is not None:
        model.load_state_dict(state_dict, assign=True)
    if offload_dir is None:
        config = replace(config, storage_path=directory_of(model))
    return _streamed(model, config, None)


def load_checkpoint_and_dispatch(
    model: M,
    checkpoint: Path,
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_folder: Path | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    budget: int | str | Budget | None = None,
) -> M:
    """Streams a model from a checkpoint. Without a device map, reads it into memory, and blocks.

    Args:
        model: The model, usually on the meta device. Its method ``tie_weights`` is called then.
        checkpoint: A directory, file, shard index, URL, or name on the Hugging Face Hub. See
            ``tensorstream.offload``. The tensors of a file of ``torch.save`` are read with
            ``weights_only=True`` and written to a temporary file, until the model is freed.
        device_map: "auto" or another strategy of accelerate, which is the accelerator if there is
            one that can be used, else the CPU, and several ones if one does not hold the model; or
            "cpu", "disk" or an accelerator for the name of each module.
        max_memory: ``{"cpu": "6GB"}`` is the budget, also for a device map that names modules. With
            accelerators, their memory is the budget, and that of the CPU the host budget.
        no_split_module_classes: Has no effect. Results do not depend on how layers are divided.
        offload_folder: The directory for weights that are cast. The default is in the user's cache
            directory. Others stream from the checkpoint.
        offload_buffers: Has no effect. Buffers stay in memory.
        dtype: The dtype of floating-point weights. The default is that of each parameter of the
            model. Weights of another dtype in the checkpoint are cast once.
        offload_state_dict: Has no effect.
        skip_keys: Has no effect.
        preload_module_classes: Has no effect.
        force_hooks: Has no effect.
        strict: Whether other tensors in the checkpoint are refused.
        full_state_dict: Has no effect.
        broadcast_from_rank0: Refused. Each process reads the checkpoint.
        budget: The memory for weights, instead of ``max_memory``. The default for a device map with
            "disk" is that of ``dispatch_model``.

    Returns:
        The model, which is changed in place.

    Raises:
        ConfigurationError: The map names a device that cannot be used, the budget is given twice,
            or another argument is invalid.
        CheckpointError: With ``strict``, the checkpoint has tensors that the model does not have.
        The errors of ``tensorstream.offload``.
    """
    if broadcast_from_rank0:
        raise ConfigurationError(
            "load_checkpoint_and_dispatch cannot use `broadcast_from_rank0`: each process reads "
            "the checkpoint; leave it out"
        )
    wanted = dtype_of(dtype)
    if isinstance(device_map, Mapping):
        device = _devices_of(model, device_map, None)
    else:
        device = device_named_by(device_map)
    memory = memory_of(max_memory, device)
    if memory is not None and budget is not None:
        raise ConfigurationError("the budget is given twice, also as `max_memory`; give only one")
    if memory is not None:
        config = Config(budget=memory.budget, device=memory.device, host_budget=memory.host)
    else:
        needed = None
        places = map(str, device_map.values()) if isinstance(device_map, Mapping) else ()
        if isinstance(device_map, Mapping) and (device is not None or "disk" in places):
            needed = _needed_bytes(model, device_map, wanted, device)
        config = Config(budget=needed if budget is None else budget, device=device)
    config = replace(config, storage_path=offload_folder)
    Placement(model, config)
    weights = find(expanded(checkpoint)).weights
    if os.path.isfile(weights) and zipfile.is_zipfile(weights):
        weights = _unpickled(weights, directory_of(model))
    opened = _native.Checkpoint(weights)
    if strict:
        _refuse_unexpected(model, opened)
    tie_weights: Any = getattr(model, "tie_weights", None)
    if tie_weights is not None and _is_meta(model):
        tie_weights()  # init_empty_weights unties them
    undo = _adapt(model, opened, wanted)
    try:
        _streamed(model, config, weights)
    except BaseException:
        undo()
        raise
    return restore(model) if device_map is None else model


def _unpickled(path: str, directory: str) -> str:
    """Writes the tensors of a file of ``torch.save`` to a file that can stream. Returns its path.

    Raises:
        CheckpointError: It has something else than tensors by name.
        StorageError: Writing failed.
    """
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path}: torch.load cannot read the tensors: {error}") from error
    named = isinstance(found, Mapping) and all(isinstance(name, str) for name in found)
    if not named or not all(isinstance(each, torch.Tensor) for each in found.values()):
        raise CheckpointError(
            f"{path}: expected tensors by name, as torch.save(model.state_dict(), path) writes them"
        )
    written = os.path.join(directory, "model.ts")
    save_file(found, written)
    return written


def _streamed(model: M, config: Config, checkpoint: str | None) -> M:
    """Streams a model. It has a device map and takes inputs on any device, as with accelerate."""
    # As with accelerate, the names need not match. `strict` has been checked.
    offload(model, config, checkpoint=checkpoint, strict=None if checkpoint is None else False)
    if not torch.accelerator.is_available():  # else, `offload` has set it
        Placement(model, config).set_device_map()
    main = next((each.device for each in tree.parameters(model)), torch.device("cpu"))
    if main.type != "cpu":
        model.register_forward_pre_hook(_InputsFromAnywhere(main), prepend=True, with_kwargs=True)
        model.register_forward_hook(_ResultToInputs(main))
    return model


class _Origins(threading.local):
    """Where the inputs of the models came from whose forwards run in this thread."""

    def __init__(self) -> None:
        self.devices: dict[int, torch.device] = {}


_origins = _Origins()


class _InputsFromAnywhere(InputsTo):
    """A hook that moves the inputs of a model to the device of its first weight."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = next(tensors([args, kwargs]), None)
        if given is not None:
            _origins.devices[id(module)] = given.device
        device = next((each.device for each in tree.parameters(module)), self.device)
        return moved(args, device), moved(kwargs, device)


class _ResultToInputs(ResultTo):
    """A hook that moves the result of a model to where its first input was."""

    def __call__(self, module: nn.Module, args: Any, result: Any) -> Any:
        origin = _origins.devices.pop(id(module), None)
        return result if origin is None else moved(result, origin)


def _devices_of(
    model: nn.Module, device_map: Mapping[str, Device], main_device: Device | None
) -> Device | Mapping[str, Device] | None:
    """Returns the accelerator of a map, a map of several ones, or ``None`` for the CPU.

    Raises:
        ConfigurationError: The map is invalid, does not name every weight, or does not have the
            main device.
    """
    require_all(model, device_map)
    device = device_named_by(dict(device_map))
    if main_device is None:
        return device
    if isinstance(device, str) and device == AUTOMATIC:
        return main_device
    main = device_of(main_device)
    if isinstance(device, Mapping):
        first = [name for name, own in device.items() if _is(own, main)]
        if first:
            return {name: device[name] for name in dict.fromkeys([*first, *device])}
    if isinstance(device, Mapping) or device_of("cpu" if device is None else device) != main:
        raise ConfigurationError(f"the main device {main} is not in the device map: leave it out")
    return device


def _is(device: Device, wanted: torch.device) -> bool:
    return str(device) not in HOST_DEVICES and device_of(device) == wanted


def _needed_bytes(
    model: nn.Module,
    device_map: Mapping[str, Device],
    dtype: torch.dtype | None,
    device: Device | Mapping[str, Device] | None,
) -> int | dict[str, int] | None:
    """Returns the memory that a device map needs. See ``dispatch_model``.

    Returns ``None`` if the map does not say where weights are.

    Args:
        model: The model.
        device_map: The map.
        dtype: The dtype that floating-point weights are cast to, or ``None``.
        device: The accelerator of the map, or a map of several ones, or ``None``.
    """

    if any(each in STRATEGIES for each in device_map.values() if isinstance(each, str)):
        return None

    def size(parameter: nn.Parameter) -> int:
        wanted = dtype if dtype and parameter.is_floating_point() else parameter.dtype
        return parameter.numel() * wanted.itemsize

    def place(name: str) -> str:
        own = device_map[entry_of(name, device_map) or ""]
        return str(own) if str(own) in HOST_DEVICES else str(device_of(own))

    streamed = ("disk",) if device is None else HOST_DEVICES
    kept: dict[str, int] = {}
    for name, parameter in tree.named_parameters(model):
        kept[place(name)] = kept.get(place(name), 0) + size(parameter)
    largest = 0
    for prefix, module in tree.named_modules(model):
        below = [(prefix, module)]
        if isinstance(module, FUSED):
            below = list(tree.named_modules(module, prefix))
        parameters = {
            id(each): (tree.joined(where, name), each)
            for where, own in below
            for name, each in own._parameters.items()
            if each is not None
        }.values()
        every = device is not None
        counted = (size(p) for name, p in parameters if every or place(name) in streamed)
        largest = max(largest, sum(counted))
    own = {where: count for where, count in kept.items() if where not in streamed}
    if not isinstance(device, Mapping):
        return max(sum(own.values()) + 2 * largest, _LEAST_BYTES)
    devices = devices_of_map(device)
    return {str(each): max(own.get(str(each), 0) + 2 * largest, _LEAST_BYTES) for each in devices}


#: Less may not suffice, because memory for weights is divided into pages.
_LEAST_BYTES = 64 << 10


def _is_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in tree.parameters(model))


def _refuse_unexpected(model: nn.Module, checkpoint: _native.Checkpoint) -> None:
    unexpected = sorted(set(checkpoint.names()) - set(model.state_dict()))
    if unexpected:
        raise CheckpointError(
            f"the checkpoint has {len(unexpected)} tensors that the model does not have, such as "
            f"`{unexpected[0]}`; pass strict=False to ignore them"
        )


def _adapt(
    model: nn.Module, checkpoint: _native.Checkpoint, dtype: torch.dtype | None
) -> Callable[[], None]:
    """Reads the buffers of a model, and casts tensors for parameters of another dtype.

    Args:
        model: The model.
        checkpoint: The weights, whose dtypes may differ.
        dtype: The dtype of floating-point tensors, or ``None`` for that of each tensor of the
            model.

    Returns:
        A function that undoes this.
    """
    builder = Builder(checkpoint)
    adapted: dict[int, torch.Tensor] = {}
    stored = set(checkpoint.names())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in stored or id(tensor) in adapted:
            continue
        found = builder.symbolic(name)
        wanted = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        if not isinstance(tensor, nn.Parameter):
            adapted[id(tensor)] = builder.materialize(found).to(wanted)
        elif found.dtype != wanted or tensor.dtype != wanted:
            adapted[id(tensor)] = nn.Parameter(found.to(wanted), tensor.requires_grad)
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (own, name, tensor)
        for module in tree.modules(model)
        for own in _tensors_of(module)
        for name, tensor in own.items()
        if tensor is not None and id(tensor) in adapted
    ]
    for own, name, tensor in replaced:
        own[name] = adapted[id(tensor)]

    def undo() -> None:
        for own, name, tensor in replaced:
            own[name] = tensor

    return undo


def _tensors_of(module: nn.Module) -> list[dict[str, Any]]:
    """Returns the dictionaries with the parameters and buffers of a module."""
    return [module._parameters, module._buffers]


def __getattr__(name: str) -> Any:
    """Returns what accelerate has under a name that is not replaced."""
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        import accelerate
    except ImportError as error:
        raise AttributeError(
            f"tensorstream.accelerate has no `{name}`, and accelerate is not installed: "
            "pip install accelerate"
        ) from error
    return getattr(accelerate, name)
