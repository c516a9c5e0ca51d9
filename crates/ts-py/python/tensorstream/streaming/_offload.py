# SPDX-License-Identifier: MIT OR Apache-2.0
"""Offloads and restores models: replaces parameters with stand-ins, and puts them back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from .. import _native
from ..budget import Budget
from ..config import Config, expanded
from ..devices import Device
from ..errors import ConfigurationError, ModelError
from ..files._places import find
from . import _tree as tree
from ._adapters import adapter_parameters
from ._attach import attach
from ._calls import stand_ins_below
from ._division import Rows
from ._interrupts import deferred
from ._placement import Placement
from ._refusals import refuse_unsupported
from ._state import all_streaming, is_offloaded, streaming_of
from ._state_dict import load
from ._stats import Stats, merged
from ._store import derived_of, store_live
from ._streamed_tensor import (
    StreamedTensor,
    StreamedWeight,
    name_of,
    require_exchangeable,
    to_memory,
)
from ._units import TensorSpec, UnitBuilder, units_for_budget
from ._weights import Divided, Weight, Weights

Path = str | os.PathLike[str]
M = TypeVar("M", bound=nn.Module)


def offload(
    model: M,
    config: Config | None = None,
    *,
    checkpoint: Path | None = None,
    budget: int | str | Budget | Mapping[Any, int | str] | None = None,
    device: Device | Mapping[str, Device] | None = None,
    host_budget: int | str | None = None,
    strict: bool | None = None,
) -> M:
    """Streams the parameters of a model from disk under a hard memory budget.

    With a ``checkpoint``, parameters and buffers get the values that ``load_state_dict`` gives
    them. Loading code of modules runs, such as hooks and ``_load_from_state_dict``. What it
    computes is written to a ``.ts`` file once, in ``config.storage_path`` or the cache directory of
    the user.

    Without a checkpoint, the weights of a model on the CPU are written to a ``.ts`` file in
    ``config.storage_path``, and their memory is freed. The file is named after its content. For a
    model on the meta device, ``config.storage_path`` is the checkpoint.

    Buffers stay in memory. Those that a checkpoint has are part of the budget; those that are not
    persistent are not. Adapters of PEFT stay in memory, too, and can be trained.

    Results are bit-identical to those of the model in memory. Parameters stay the same objects, and
    cannot be changed while they stream. Offloading reads only the headers of a checkpoint, buffers,
    and what loading code needs to know. Weights are first read by a forward, or by an operation on
    them.

    Args:
        model: Any module, on the CPU or the meta device. Changed in place and returned.
        config: The settings. The default is ``Config()``.
        checkpoint: A directory, ``.safetensors`` or ``.ts`` file, shard index, URL, or name of a
            model on the Hugging Face Hub, whose tensors have the names of the model's parameters.
            Without ``strict``, a part of a model finds its tensors in that of the whole model.
        budget: Shorthand for ``Config(budget=...)``.
        device: Shorthand for ``Config(device=...)``.
        host_budget: Shorthand for ``Config(host_budget=...)``.
        strict: Whether the names of the checkpoint and the model must match, as for
            ``load_state_dict``. With ``False``, parameters and buffers that the checkpoint lacks
            keep their values, and tensors that the model lacks are ignored. The default refuses the
            first, and warns of the second. A shared parameter needs only one of its names.

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
    return offload_from(model, config, checkpoint, strict=strict)


def offload_from(
    model: M,
    config: Config,
    checkpoint: Path | None,
    *,
    strict: bool | None = None,
    casts: bool = False,
) -> M:
    """Does what ``offload`` does.

    Args:
        model: The model.
        config: The settings.
        checkpoint: The checkpoint.
        strict: As for ``offload``.
        casts: Whether tensors are cast to the dtypes of the model.
    """
    refuse_unsupported(model)
    path = checkpoint if checkpoint is not None else config.storage_path
    if path is None:
        raise ConfigurationError(
            "no checkpoint: give `checkpoint`, or set Config.storage_path to a directory for the "
            "weights of the model"
        )
    for name, module in tree.named_modules(model):
        _refuse_torchscript(name, module)
    if is_offloaded(model):
        models = streaming_of(model).shares[0].passes.models
        inside = [name for name, each in tree.named_modules(model) if each in models]
        if inside and inside[0]:
            raise ModelError(f"`{inside[0]}` is already streamed; restore it first")
        raise ModelError(f"the {type(model).__name__} is already offloaded; restore(model) first")
    placement = Placement(model, config)
    kept = adapter_parameters(model)
    streamed = [parameter for parameter in tree.parameters(model) if id(parameter) not in kept]
    freed = sum(parameter.nbytes for parameter in streamed if not parameter.is_meta)
    # Buffers are part of the budget, and these have their memory already.
    freed += sum(each.nbytes for each in tree.persistent_buffers(model) if not each.is_meta)
    if checkpoint is None and not any(p.is_meta for p in streamed):
        stored = store_live(model, placement.configs[placement.main], kept)
        return attach(model, placement, *stored, freed_bytes=freed, kept=kept)
    if checkpoint is None and not all(p.is_meta for p in streamed):
        raise ModelError(
            "some parameters are on the meta device and others have weights: give a `checkpoint` "
            "with all parameters"
        )
    # A directory that does not exist yet is not the name of a model on the Hub.
    weights = expanded(path) if checkpoint is None else find(expanded(path)).weights
    opened = _native.Checkpoint(weights)
    loaded = load(model, opened, strict=strict, kept=kept, casts=casts)
    try:
        return attach(model, placement, opened, freed_bytes=freed, kept=kept, loaded=loaded)
    except BaseException:
        loaded.undo()
        raise


def with_shorthands(
    config: Config,
    budget: int | str | Budget | Mapping[Any, int | str] | None,
    device: Device | Mapping[str, Device] | None,
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
    units, left = units_for_budget(
        model, checkpoint, {}, {}, settings, config.exact, device, lambda *_: budget
    )
    # A smaller budget may divide more parameters than this one.
    every = UnitBuilder(model, checkpoint, {}, {}, Rows.ALL, config.exact, device)
    smallest = min(units.smallest, every.requirement(settings).smallest)
    planned = _native.plan(
        checkpoint,
        budget=left,
        settings=settings,
        units=units.specs,
        together=units.leased_together(),
        tables=units.tables,
    )
    planned["plan"]["smallest_budget_bytes"] = smallest + units.buffer_bytes
    planned["plan"]["peak_bytes"] += units.buffer_bytes
    planned["plan"]["buffer_bytes"] = units.buffer_bytes
    return budget, planned, units.divided


def stats(model: nn.Module, *, device: Device | None = None) -> Stats:
    """Returns the statistics of an offloaded model. Does not wait for I/O.

    Sizes are bytes, and times are seconds. ``model`` may also contain the offloaded model, as a
    ``PeftModel`` does.

    Args:
        model: The model.
        device: One of the devices of a model that is on several ones. By default, sizes and numbers
            are those of all devices together. Times in which they wait or compute are added, too.

    Raises:
        ConfigurationError: The model has no weights on the device.
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
    shares = streaming.shares if device is None else [streaming.share(device)]
    stats = merged([_stats_of(share) for share in shares])
    stats["passed_over"] = [*streaming.passed_over, *stats["passed_over"]]
    return stats


#: What the engine counts without buffers.
_WITH_BUFFERS = (
    "budget_bytes",
    "limit_bytes",
    "reserved_high_water_bytes",
    "in_use_high_water_bytes",
    "in_use_bytes",
)


def _stats_of(share: Weights) -> Stats:
    """Returns the statistics of the weights on one device."""
    stats = share.streamer.stats()
    plan, held = stats["plan"], share.buffer_bytes
    plan["smallest_budget_bytes"] = max(plan["smallest_budget_bytes"], share.smallest) + held
    plan["peak_bytes"] += held
    plan["buffer_bytes"] = held
    for key in _WITH_BUFFERS:
        stats[key] += held  # type: ignore[literal-required]
    stats["experts"] = [
        {
            "name": name,
            "units": len(own),
            "present": sum(unit["present"] for unit in own),
            "touched": sum(unit["touched"] for unit in own),
            "hits": sum(unit["hits"] for unit in own),
            "read_bytes": sum(unit["read_bytes"] for unit in own),
        }
        for name, numbers in share.expert_units.items()
        for own in [[stats["units"][number] for number in numbers]]
    ]
    passes = stats["recent_passes"]
    stats["bottleneck"] = (passes[-1] if passes else stats["plan"])["bottleneck"]
    return stats


def restore(model: M) -> M:
    """Undoes ``offload``: reads all weights into ordinary parameters. Blocks.

    Needs memory for all weights in addition to the budget. If it fails, the model is still
    offloaded. ``model`` may also contain the offloaded model, as a ``PeftModel`` does, or several.

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
    if isinstance(model, nn.Module) and not any(
        each is not None for module in tree.modules(model) for each in module._parameters.values()
    ):
        return model  # there was nothing to offload
    parts = all_streaming(model)
    shares = [share for part in parts for share in part.shares]
    if any(share.streamer.in_use() for share in shares):
        raise ModelError(
            "cannot restore the model while a forward runs: call restore(model) after the forward"
        )
    streamed = list({id(each): each for _, each in stand_ins_below(model)}.values())
    wanted = {(each._ref.weights, each._ref.key) for each in streamed}
    values = {
        (share, key): tensor.detach().to(share.device)
        for part in parts
        for share in part.shares
        for key, tensor in _read_all(
            part.checkpoint,
            {key: spec for key, spec in share.sources.items() if (share, key) in wanted},
            share,
        ).items()
    }
    memories: dict[int, torch.Tensor] = {}
    restored = [
        (each, _values_of(each, values[each._ref.weights, each._ref.key], memories))
        for each in streamed
    ]
    with deferred():
        require_exchangeable((name_of(each), each) for each in streamed)
    modules = set(tree.modules(model))
    models = {
        each: len(part.shares) == 1
        for part in parts
        for share in part.shares
        for each in share.passes.models
        if each in modules
    }
    for share in shares:
        if any(each in modules for each in share.passes.models):
            share.profile.end()
    with deferred():
        for each, tensor in restored:
            to_memory(each, tensor)
        for restored_model, is_on_one_device in models.items():
            if is_on_one_device:  # else, its modules stay on their devices
                restored_model.__dict__.pop("hf_device_map", None)
    return model


def _values_of(
    parameter: StreamedTensor, weight: torch.Tensor, memories: dict[int, torch.Tensor]
) -> torch.Tensor:
    """Returns the memory for a parameter, which can be a view or a copy of the restored weight.

    Parameters that shared memory before they streamed share it again, in ``memories``.
    """
    if parameter._ref.is_copy:
        return weight.clone(memory_format=torch.preserve_format)
    place = parameter._ref.weights.places.get(parameter._ref.key)
    if place is not None:
        filled: torch.Tensor = place.filled(weight, memories)
        return filled
    shape, strides, offset = parameter.shape, parameter.stride(), int(parameter.storage_offset())
    if parameter.dtype == weight.dtype:
        return weight.as_strided(shape, strides, offset)
    view = torch.empty(0, dtype=parameter.dtype, device=weight.device)
    return view.set_(weight.untyped_storage(), offset, shape, strides)


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
        classes=(StreamedWeight, StreamedTensor),
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
