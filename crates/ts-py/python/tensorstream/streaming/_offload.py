# SPDX-License-Identifier: MIT OR Apache-2.0
"""Offloads and restores models: replaces parameters with stand-ins, and puts them back."""

from __future__ import annotations

import atexit
import os
import weakref
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from .. import _native
from ..budget import Budget
from ..config import Config, expanded
from ..errors import (
    ConfigurationError,
    ModelError,
)
from ._adapters import adapter_parameters
from ._copying import Attach, replace_copying
from ._distributed import ignore_streamed, restore_names
from ._division import Rows
from ._forward import (
    Forward,
    Parameters,
    PartPass,
    Pass,
    Streaming,
    is_offloaded,
    offloaded_in,
    own_stand_ins,
    parts,
    recurrent,
    streaming_of,
)
from ._guards import guard
from ._interrupts import deferred
from ._live import add_live
from ._places import find
from ._profile import Profile
from ._replaced_method import replace_method, restore_methods
from ._routing import announced
from ._rules import register_transformers
from ._saving import save_in_pieces
from ._stats import Stats
from ._store import DimensionOrders, derived_of, store_derived, store_live
from ._stored_weights import StoredWeights
from ._streamed_tensor import StreamedWeight, parameter_of
from ._symbolic_tensor import Source, SymbolicTensor
from ._units import TensorSpec, UnitBuilder, units_for_budget
from ._weights import Divided, Weight, Weights

Path = str | os.PathLike[str]
M = TypeVar("M", bound=nn.Module)

_CPU = torch.device("cpu")
#: Tensors by the ``id`` of others.
Tensors = dict[int, torch.Tensor]


def offload(
    model: M,
    config: Config | None = None,
    *,
    checkpoint: Path | None = None,
    budget: int | str | Budget | None = None,
    device: str | int | torch.device | None = None,
    host_budget: int | str | None = None,
) -> M:
    """Streams the parameters of a model from disk under a hard memory budget.

    With a ``checkpoint``, the parameters get the values of the checkpoint. Without a checkpoint,
    the weights of a model on the CPU are written to a ``.ts`` file in ``config.storage_path``, and
    their memory is freed. The file is named after its content. For a model on the meta device,
    ``config.storage_path`` is the checkpoint. Buffers stay in memory, and so do adapters of PEFT,
    which can be trained.

    Results are bit-identical to those of the model in memory. Parameters are frozen while they
    stream; ``restore`` makes them trainable again if they were before. Offloading reads only the
    headers of a checkpoint, and buffers that are on the meta device. Weights are first read by a
    forward, or by an operation on them.

    Args:
        model: Any module, on the CPU or the meta device. Changed in place and returned.
        config: The settings. The default is ``Config()``.
        checkpoint: A directory, ``.safetensors`` or ``.ts`` file, shard index, URL, or name of a
            model on the Hugging Face Hub, whose tensors have the names of the model's parameters.
        budget: Shorthand for ``Config(budget=...)``.
        device: Shorthand for ``Config(device=...)``.
        host_budget: Shorthand for ``Config(host_budget=...)``.

    Raises:
        ConfigurationError: There is neither a checkpoint nor a storage path, a setting is given
            twice, or another argument is invalid.
        CheckpointNotFoundError: There is no checkpoint at this path.
        MissingTensorError: The checkpoint lacks a parameter.
        CheckpointError: A tensor has another shape or dtype than the parameter, or a file is
            damaged.
        CheckpointPermissionError: The process may not read the checkpoint, or write to the storage
            path.
        BudgetError: The budget is too small, and the message contains the smallest that works. Also
            raised if too little memory is available.
        StorageError: Reading or writing failed.
        ModelError: The model cannot be streamed.

    Examples:
        >>> import tensorstream as ts, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        >>> model = ts.offload(model, ts.Config(storage_path="weights", budget="60KiB"))
        >>> with torch.inference_mode():
        ...     model(torch.ones(1, 64)).shape
        torch.Size([1, 64])
        >>> ts.stats(model)["passes"]
        1
        >>> model = ts.restore(model)
    """
    config = with_shorthands(checked(config), budget, device, host_budget)
    config.accelerator()  # refuses a device that cannot be used
    path = checkpoint if checkpoint is not None else config.storage_path
    if path is None:
        raise ConfigurationError(
            "no checkpoint: give `checkpoint`, or set Config.storage_path to a directory for the "
            "weights of the model"
        )
    for name, module in model.named_modules():
        _refuse_torchscript(name, module)
    if is_offloaded(model):
        raise ModelError(f"the {type(model).__name__} is already offloaded; restore(model) first")
    for name, module in model.named_modules():
        if is_offloaded(module):
            raise ModelError(f"`{name}` is already streamed; restore it first")
    kept = adapter_parameters(model)
    streamed = [parameter for parameter in model.parameters() if id(parameter) not in kept]
    freed = sum(parameter.nbytes for parameter in streamed if not parameter.is_meta)
    if checkpoint is None and not any(p.is_meta for p in streamed):
        stored = store_live(model, config, kept)
        return attach(model, config, *stored, freed_bytes=freed, kept=kept)
    if checkpoint is None and not all(p.is_meta for p in streamed):
        raise ModelError(
            "some parameters are on the meta device and others have weights: give a `checkpoint` "
            "with all parameters"
        )
    # A directory that does not exist yet is not the name of a model on the Hub.
    weights = expanded(path) if checkpoint is None else find(expanded(path)).weights
    return attach(model, config, _native.Checkpoint(weights), freed_bytes=freed, kept=kept)


def with_shorthands(
    config: Config,
    budget: int | str | Budget | None,
    device: str | int | torch.device | None,
    host_budget: int | str | None,
) -> Config:
    """Returns the configuration with the settings that are given as arguments of their own.

    Raises:
        ConfigurationError: A setting is also in the configuration.
    """
    given: dict[str, Any] = {"budget": budget, "device": device, "host_budget": host_budget}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        twice = getattr(config, name) is not None
        if twice or (name == "budget" and config.vram_budget_gb is not None):
            raise ConfigurationError(
                f"the {name} is given twice, as `{name}` and in `config`; give only one"
            )
    return replace(config, **given) if given else config


def checked(config: Config | None) -> Config:
    """Returns the configuration, or the default configuration for ``None``.

    Raises:
        ConfigurationError: ``config`` is not a ``Config``.
    """
    if config is None:
        return Config()
    if isinstance(config, Config):
        return config
    what = type(config).__name__
    advice = "use Config(**settings)" if isinstance(config, dict) else "pass a tensorstream.Config"
    if hasattr(config, "model_type"):
        advice = "pass this configuration of transformers to from_pretrained, as `model_config`"
    raise ConfigurationError(
        f"invalid config: expected a tensorstream.Config, got {what}; {advice}"
    )


# Models that exist when the interpreter ends are not deleted.
atexit.register(_native.leave_shared)


def attach(
    model: M,
    config: Config,
    checkpoint: _native.Checkpoint,
    orders: DimensionOrders | None = None,
    *,
    freed_bytes: int = 0,
    kept: frozenset[int] = frozenset(),
) -> M:
    """Offloads a model to an open checkpoint. If this fails, the model is unchanged.

    Args:
        model: The model.
        config: The settings.
        checkpoint: The checkpoint with the weights.
        orders: The stored orders of dimensions, by name, of parameters that are not contiguous.
        freed_bytes: Memory that offloading frees, which the budget can use.
        kept: The ``id`` of each parameter that stays in memory as it is.
    """
    derived = derived_of(model)
    if derived:
        checkpoint = store_derived(derived, checkpoint, config, config.working_bytes())
    converted = {
        id(tensor): Source(name, tuple(checkpoint.entry(name)[2]), tensor.source.phase)
        for name, tensor in derived.items()
    }
    settings, device = config.settings(), config.torch_device()
    shared_directory = settings["shared_cache"]
    shared_bytes = 0
    if shared_directory is not None:
        shared_bytes = _native.shared_bytes(checkpoint, shared_directory)

    extremes = (0, 0)

    def fitted(smallest: int, whole: int) -> int:
        nonlocal extremes
        extremes = (smallest, whole)
        fitted = config.fitted_bytes(smallest, whole, freed_bytes, shared_bytes)
        shared = config.budget
        if isinstance(shared, Budget):
            return min(fitted, shared.share_of(smallest, whole))
        return fitted

    units, budget = units_for_budget(
        model, checkpoint, converted, orders or {}, settings, config.exact, device, fitted, kept
    )
    most, limits = config.limits(budget, *extremes, freed_bytes)
    if isinstance(config.budget, Budget):
        most = config.budget.bytes
    together = units.leased_together()
    profile = Profile(checkpoint, [(name, routed) for name, _, routed in units.specs])
    streamer = _native.Streamer(
        checkpoint,
        units.specs,
        [weight.spec() for weight in units.weights],
        budget=most,
        together=together,
        weight_class=StreamedWeight,
        settings=settings,
        tables=units.tables,
        scores=profile.load(),
        limits=limits,
    )
    if isinstance(config.budget, Budget):
        config.budget.add(streamer, max(extremes[1], budget))
    stored = StoredWeights(checkpoint, units.sources, budget)
    weights = Weights(streamer, units.weights, units.divided, budget, stored.mapped, device)
    buffers = [(module, name, value.to(device)) for module, name, value in units.read_buffers()]
    moved = _moved(model, device, kept)
    made = {key: parameter_of(weights, key) for key in units.sources}
    streaming = Streaming(
        checkpoint, units.sources, weights, config.passed_over(), profile, units.expert_units()
    )
    replaced = []
    for module, keys in units.modules:
        streamed = {name: made[key] for name, key in keys.items()}
        lists = hasattr(module, "_flat_weights_names")
        replaced.append((module, Parameters(module._parameters, weights, streamed, lists)))
    register_transformers()
    with deferred():
        for module, parameters in replaced:
            module.__dict__["_parameters"] = parameters
            recurrent(module)
        _replace_methods(model, units, weights)
        save_in_pieces(model, stored)
        replace_copying(model, streaming, stored, _attach_copy(config, checkpoint))
        model.__dict__["_tensorstream"] = streaming
        _place(model, device, buffers, moved)
        ignore_streamed(model)
        add_live(model)
        profile.save_at_end(model, streamer)
        if limits is not None:
            # A thread that needs the interpreter must end before the interpreter does.
            weakref.finalize(model, streamer.stop_monitor)
    return model


def _attach_copy(config: Config, checkpoint: _native.Checkpoint) -> Attach:
    """Returns a function that offloads a copy of a model. It does not refer to the model."""

    def attach_copy(twin: nn.Module, orders: DimensionOrders, kept: frozenset[int]) -> None:
        attach(twin, config, checkpoint, orders, kept=kept)

    return attach_copy


def _replace_methods(model: nn.Module, units: UnitBuilder, weights: Weights) -> None:
    """Replaces methods of the modules of a model, so that they lease weights, or refuse."""
    for module, unit in units.leaves():
        replace_method(module, Forward(module, weights, unit))
    # After the leaves, because an expert can be one.
    for module, forward in announced(model, weights, units.routed(), units.experts()):
        replace_method(module, forward)
    for part in parts(model, {id(module) for module, _ in units.modules}):
        replace_method(part, PartPass(part, weights))
    replace_method(model, Pass(model, weights))
    guard(model)


def _moved(model: nn.Module, device: torch.device, kept: frozenset[int]) -> Tensors:
    """Copies what is not streamed to the device of the model: buffers, and the ``kept`` parameters.

    Returns:
        The copies, by the ``id`` of the tensors that have to be moved.
    """
    buffers = (each for each in model.buffers() if not isinstance(each, SymbolicTensor))
    parameters = (each for each in model.parameters() if id(each) in kept)
    return {
        id(each): each.detach().to(device)
        for each in (*buffers, *parameters)
        if not each.is_meta and each.device != device
    }


def _place(
    model: nn.Module,
    device: torch.device,
    read: list[tuple[nn.Module, str, torch.Tensor]],
    moved: Tensors,
) -> None:
    """Puts buffers that were read, and copies on a device, in their places.

    If there is an accelerator, also lets other libraries not move the model. Otherwise, a device
    map would have them refuse the CPU as a device, and several processes.
    """
    for module, name, value in read:
        module._buffers[name] = value
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules() if moved else ():
        for name, buffer in module._buffers.items():
            module._buffers[name] = moved.get(id(buffer), buffer)
        own: list[tuple[str, Any]] = list(dict.items(module._parameters))
        for name, parameter in own:
            key = id(parameter)
            if key in moved:
                if key not in parameters:
                    parameters[key] = _replaced(parameter, moved[key])
                dict.__setitem__(module._parameters, name, parameters[key])
    if torch.accelerator.is_available():
        set_device_map(model, device)


def _replaced(parameter: nn.Parameter, copy: torch.Tensor) -> nn.Parameter:
    """Returns a parameter with the memory of a copy: the same object if PyTorch allows this."""
    gradient = None if parameter.grad is None else parameter.grad.to(copy.device)
    if torch._has_compatible_shallow_copy_type(parameter, copy):
        parameter.data = copy
        replacement = parameter
    else:
        replacement = nn.Parameter(copy, parameter.requires_grad)
    replacement.grad = gradient
    return replacement


def set_device_map(model: nn.Module, device: torch.device = _CPU) -> None:
    """Gives a model a map that says to other libraries that it must stay where it is.

    ``Accelerator.prepare`` and ``Trainer`` do not move models whose map has several entries,
    pipelines use the first device, and PEFT looks for each layer, whose name ends with its number.
    The values are not "cpu" or "disk", for which transformers and PEFT expect hooks of accelerate.
    """
    names = ["", *(name for name, _ in model.named_children())]
    for name, _ in model.named_modules():
        numbers = [part for part in name.split(".") if part.isdigit()]
        if len(numbers) == 1 and name.endswith(f".{numbers[0]}"):
            names.append(name)
    model.__dict__["hf_device_map"] = dict.fromkeys(names, device)


def plan_model(
    model: nn.Module, config: Config, checkpoint: _native.Checkpoint
) -> tuple[int, dict[str, Any], list[Divided]] | None:
    """Plans the streaming of a model that is not offloaded. Does not change it.

    Returns:
        The budget in bytes, the plan of the native module, and the parameters that are divided.
        ``None`` if tensors would have to be converted first.
    """
    if derived_of(model):
        return None
    settings, budget = config.settings(), config.working_bytes()
    device = config.torch_device()
    units, _ = units_for_budget(
        model, checkpoint, {}, {}, settings, config.exact, device, lambda *_: budget
    )
    # A smaller budget may divide more parameters than this one.
    every = UnitBuilder(model, checkpoint, {}, {}, Rows.ALL, config.exact, device)
    smallest, _ = _native.requirement(
        checkpoint,
        every.specs,
        together=every.leased_together(),
        settings=settings,
        tables=every.tables,
    )
    planned = _native.plan(
        checkpoint,
        budget=budget,
        settings=settings,
        units=units.specs,
        together=units.leased_together(),
        tables=units.tables,
        smallest=smallest,
    )
    return budget, planned, units.divided


def stats(model: nn.Module) -> Stats:
    """Returns the statistics of an offloaded model. Does not wait for I/O.

    Sizes are bytes, and times are seconds. ``model`` may also contain the offloaded model, as a
    ``PeftModel`` does.

    Raises:
        ModelError: The model is not offloaded.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"weight": torch.eye(4), "bias": torch.zeros(4)}, "linear.ts")
        >>> model = ts.offload(torch.nn.Linear(4, 4), checkpoint="linear.ts", budget="64KiB")
        >>> with torch.inference_mode():
        ...     output = model(torch.ones(1, 4))
        >>> stats = ts.stats(model)
        >>> stats["passes"], stats["plan"]["streamed_bytes_per_pass"]
        (1, 0)
    """
    streaming = streaming_of(model)
    stats = streaming.weights.streamer.stats()
    stats["experts"] = [
        {
            "name": name,
            "units": len(own),
            "present": sum(unit["present"] for unit in own),
            "touched": sum(unit["touched"] for unit in own),
            "hits": sum(unit["hits"] for unit in own),
            "read_bytes": sum(unit["read_bytes"] for unit in own),
        }
        for name, numbers in streaming.expert_units.items()
        for own in [[stats["units"][number] for number in numbers]]
    ]
    passes = stats["recent_passes"]
    stats["bottleneck"] = (passes[-1] if passes else stats["plan"])["bottleneck"]
    stats["passed_over"] = [*streaming.passed_over, *stats["passed_over"]]
    return stats


def restore(model: M) -> M:
    """Undoes ``offload``: reads all weights into ordinary parameters. Blocks.

    Needs memory for all weights in addition to the budget. If it fails, the model is still
    offloaded. ``model`` may also contain the offloaded model, as a ``PeftModel`` does.

    Raises:
        ModelError: The model is not offloaded, or a forward is running.
        ChecksumError: Data differs from its checksum.
        StorageError: Reading failed.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"weight": torch.eye(4), "bias": torch.zeros(4)}, "linear.ts")
        >>> model = ts.offload(torch.nn.Linear(4, 4), checkpoint="linear.ts", budget="64KiB")
        >>> model = ts.restore(model)
        >>> type(model.weight)
        <class 'torch.nn.parameter.Parameter'>
    """
    root = offloaded_in(model)
    streaming = streaming_of(root)
    if streaming.weights.streamer.in_use():
        raise ModelError(
            "cannot restore the model while a forward runs: call restore(model) after the forward"
        )
    tensors = _read_all(streaming.checkpoint, streaming.sources, streaming.weights)
    parameters = {
        key: nn.Parameter(
            tensor.detach().to(streaming.weights.device),
            requires_grad=streaming.weights.requires_grad(key),
        )
        for key, tensor in tensors.items()
    }
    # A wrapper can share parameters of the offloaded model that it contains.
    restored = [
        (module, _restored(module, parameters, streaming.weights)) for module in model.modules()
    ]
    streaming.profile.end()
    with deferred():
        del root.__dict__["_tensorstream"]
        root.__dict__.pop("hf_device_map", None)
        restore_names(root)
        for module in root.modules():
            restore_methods(module)
        for module, own in restored:
            before = module.__dict__["_parameters"]
            if isinstance(before, Parameters) and before.weights is streaming.weights:
                module.__dict__["_parameters"] = dict(dict.items(before)) | own
                recurrent(module)
            else:
                dict.update(before, own)
    return model


def _restored(
    module: nn.Module, parameters: dict[int, nn.Parameter], weights: Weights
) -> dict[str, nn.Parameter]:
    """Returns the parameters that replace the stand-ins of a module. Views become copies."""
    return {
        name: parameters[each.key]
        if each.is_parameter
        else nn.Parameter(each.copy(), requires_grad=False)
        for name, each in own_stand_ins(module)
        if each.weights is weights
    }


def _read_all(
    checkpoint: _native.Checkpoint, sources: dict[int, TensorSpec], weights: Weights
) -> dict[int, torch.Tensor]:
    """Reads all parameters into memory, which the result owns. Returns them by key.

    The address of each parameter modulo 64 is the phase in its ``TensorSpec``.
    """
    total = sum(part[2] + 2 * 4096 for tensor in sources.values() for part in tensor[3])
    units = [(tensor[0], [tensor], False) for tensor in sources.values()]
    specs = [
        replace(spec, unit=unit, index=0)
        if isinstance(spec := weights.specs[key], Weight)
        else Weight(
            spec.name,
            spec.dtype,
            spec.shape,
            unit,
            0,
            spec.requires_grad,
            spec.strides,
            list(spec.shape),
        )
        for unit, key in enumerate(sources)
    ]
    # A second engine reads the weights, with a budget for all of them. Their memory outlives this
    # engine.
    streamer = _native.Streamer(
        checkpoint,
        units,
        [spec.spec() for spec in specs],
        budget=2 * total + (16 << 20),
        together=[],
        weight_class=StreamedWeight,
    )
    in_pass = streamer.begin_pass()
    bar = _native.Progress("restoring", total)
    tensors: dict[int, torch.Tensor] = {}
    try:
        for unit, key in enumerate(sources):
            [tensors[key]] = streamer.take(unit)
            bar.advance(tensors[key].nbytes)
    finally:
        bar.close()
        in_pass.close()
    return tensors


def _refuse_torchscript(name: str, module: nn.Module) -> None:
    """Refuses TorchScript modules, because their compiled forward cannot be replaced."""
    if isinstance(module, torch.jit.ScriptModule):
        what = f"module `{name}`" if name else "the model"
        raise ModelError(
            f"cannot stream {what}: TorchScript ({type(module).__name__}) is not supported; "
            "offload the Python module instead"
        )
