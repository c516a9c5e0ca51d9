# SPDX-License-Identifier: MIT OR Apache-2.0
"""Connects models to open checkpoints, through an engine for each device."""

from __future__ import annotations

import atexit
import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from .. import _native
from ..budget import Budget
from ..config import Config
from ..errors import BudgetError, ModelError
from . import _tree as tree
from ._aliases import places
from ._calls import replace_calls
from ._changed_layers import let_layers_change
from ._distributed import require_not_averaged
from ._guards import replace_guarded
from ._interrupts import deferred
from ._live import add_live
from ._passes import Passes
from ._placement import Placement
from ._profile import Profile
from ._routing import announced
from ._rules import register_transformers
from ._saving import save_in_pieces
from ._state_dict import Loaded
from ._store import DimensionOrders, derived_of, store_derived
from ._stored_weights import StoredWeights
from ._streamed_tensor import (
    StreamedTensor,
    StreamedWeight,
    new_stand_in,
    require_exchangeable,
    to_stand_in,
)
from ._symbolic_tensor import Source, SymbolicTensor
from ._units import UnitBuilder, units_for_budget
from ._weights import Weights

M = TypeVar("M", bound=nn.Module)

#: Copies of tensors, by the ``id`` of the tensor and the device of the copy.
Moved = dict[tuple[int, torch.device], torch.Tensor]

# Models that exist when the interpreter ends are not deleted.
atexit.register(_native.leave_shared)


def attach(
    model: M,
    placement: Placement,
    checkpoint: _native.Checkpoint,
    orders: DimensionOrders | None = None,
    *,
    freed_bytes: int = 0,
    kept: frozenset[int] = frozenset(),
    with_device_map: bool = False,
    loaded: Loaded | None = None,
) -> M:
    """Offloads a model to an open checkpoint. If this fails, the model is unchanged.

    Args:
        model: The model.
        placement: The device of each module, and the settings.
        checkpoint: The checkpoint with the weights.
        orders: The stored orders of dimensions, by name, of parameters that are not contiguous.
        freed_bytes: Memory that offloading frees, which the budget can use.
        kept: The ``id`` of each parameter that stays in memory as it is.
        with_device_map: Whether the model gets a map of devices also without an accelerator.
        loaded: What the parameters and buffers become, if this was recorded.
    """
    loaded = Loaded() if loaded is None else loaded
    shared_places = places(model, kept)
    derived = derived_of(model, loaded.parameters)
    if derived:
        main = placement.configs[placement.main]
        values = {name: value for name, (_, value) in derived.items()}
        checkpoint = store_derived(values, checkpoint, main, main.working_bytes())
    converted = {
        key: Source(name, tuple(checkpoint.entry(name)[2]), value.source.phase)
        for name, (key, value) in derived.items()
    }
    budgets = [own.working_bytes() for own in placement.configs.values()]
    stored = StoredWeights(checkpoint, min(budgets))
    orders, engines = orders or {}, []
    for device, own in placement.configs.items():
        try:
            engine = _start(
                model,
                own,
                placement,
                checkpoint,
                stored,
                converted,
                orders,
                freed_bytes,
                kept,
                loaded,
            )
        except BudgetError as error:
            if len(placement.configs) == 1:
                raise
            raise BudgetError(f"for the weights on {device}: {error}") from error
        engines.append(engine)
    buffers = [
        (module, name, value.to(placement.device(module)))
        for engine in engines
        for module, name, value in engine.units.read_buffers()
    ]
    moved = _moved(model, placement, kept)
    for number, engine in enumerate(engines):
        engine.weights.number = number
        keys = engine.units.keys.items()
        engine.weights.places = {
            key: shared_places[own] for own, key in keys if own in shared_places
        }
        engine.weights.passed_over = placement.config.passed_over(placement.main)
    streamed = {identity for engine in engines for identity in engine.units.keys}
    named = [each for each in tree.named_parameters(model) if id(each[1]) in streamed]
    require_not_averaged({id(parameter): name for name, parameter in named})
    copies = [(module, target, value.materialize()) for module, target, value in loaded.copies]
    for module, target, value in copies:
        if placement.device(module) != target.device:
            moved[id(target), placement.device(module)] = value.to(placement.device(module))
    register_transformers()
    replace_calls()
    replace_guarded()
    let_layers_change()
    save_in_pieces(model)
    with deferred(), _collector_paused():
        require_exchangeable(named)
        _stream(model, engines)
        placement.move_inputs()
        for _, target, value in copies:
            target.detach().copy_(value)
        _place(model, placement, buffers, moved)
        if with_device_map or torch.accelerator.is_available():
            # Without one, other libraries would refuse the CPU as a device.
            placement.set_device_map()
        add_live(model)
        for engine in engines:
            weights = engine.weights
            announced(model, weights, engine.units.routed(), engine.units.experts())
            weights.profile.save_at_end(weights, weights.streamer)
            if engine.is_limited:
                # A thread that needs the interpreter must end before the interpreter does.
                weakref.finalize(weights, weights.streamer.stop_monitor)
    return model


def _stream(model: nn.Module, engines: list[_Engine]) -> None:
    """Makes the parameters of a model stream. They stay the same objects.

    If modules on several devices share a parameter, those on the second device get another one.
    """
    parameters = {
        id(each): each
        for module in tree.modules(model)
        for each in module._parameters.values()
        if each is not None
    }
    for engine in engines:
        others: dict[int, nn.Parameter] = {}
        for identity, key in engine.units.keys.items():
            if isinstance(parameters[identity], StreamedTensor):
                others[key] = new_stand_in(engine.weights, key)  # type: ignore[assignment]
            else:
                to_stand_in(parameters[identity], engine.weights, key)
        for module, keys in engine.units.modules if others else ():
            own = {name: others[key] for name, key in keys.items() if key in others}
            module._parameters.update(own)


@dataclass(frozen=True)
class _Engine:
    """The engine for the weights of a model on one device."""

    units: UnitBuilder
    weights: Weights
    #: Whether a thread limits the memory.
    is_limited: bool


def _start(
    model: nn.Module,
    config: Config,
    placement: Placement,
    checkpoint: _native.Checkpoint,
    stored: StoredWeights,
    converted: dict[int, Source],
    orders: DimensionOrders,
    freed_bytes: int,
    kept: frozenset[int],
    loaded: Loaded,
) -> _Engine:
    """Starts the engine for the weights on one device. Adds them to ``stored``.

    Args:
        model: The model.
        config: The settings for this device.
        placement: The device of each module.
        checkpoint: The checkpoint with the weights.
        stored: The stored tensors of the weights of all devices.
        converted: The sources of parameters that had to be computed, by ``id``.
        orders: The stored orders of dimensions, by name, of parameters that are not contiguous.
        freed_bytes: Memory that offloading frees, which the budget can use.
        kept: The ``id`` of each parameter that stays in memory as it is.
        loaded: What the parameters and buffers become, if this was recorded.
    """
    settings, device = config.settings(), config.torch_device()
    settings["host_bytes"] = int(settings["host_bytes"] * placement.share(device))
    shared_directory = settings["shared_cache"]
    shared_bytes = 0
    if shared_directory is not None:
        shared_bytes = _native.shared_bytes(checkpoint, shared_directory)

    extremes = (0, 0)

    # All sizes are with the buffers, until the units are known.
    def fitted(smallest: int, whole: int) -> int:
        nonlocal extremes
        extremes = (smallest, whole)
        fitted = config.fitted_bytes(smallest, whole, freed_bytes, shared_bytes)
        shared = config.budget
        if isinstance(shared, Budget):
            return min(fitted, shared.share_of(smallest, whole))
        return fitted

    with _collector_paused():
        units, budget = units_for_budget(
            model,
            checkpoint,
            converted,
            orders,
            settings,
            config.exact,
            device,
            fitted,
            kept,
            lambda module: placement.device(module) == device,
            loaded,
        )
    held = units.buffer_bytes
    least, whole = (each - held for each in extremes)
    most, limits = config.limits(budget, least, whole, freed_bytes)
    if isinstance(config.budget, Budget):
        most = config.budget.bytes - held
    profile = Profile(checkpoint, [(name, routed) for name, _, routed in units.specs])
    streamer = _native.Streamer(
        checkpoint,
        units.specs,
        [weight.spec() for weight in units.weights],
        budget=most,
        together=units.leased_together(),
        classes=(StreamedWeight, StreamedTensor),
        settings=settings,
        tables=units.tables,
        scores=profile.load(),
        limits=limits,
    )
    if isinstance(config.budget, Budget):
        config.budget.add(streamer, max(whole, budget) + held, held)
    passes = Passes(model, streamer, device)
    streamer.set_passes(passes)
    weights = Weights(
        streamer, units.weights, units.divided, budget, device, stored, passes, profile
    )
    weights.sources, weights.expert_units = units.sources, units.expert_units()
    weights.smallest, weights.buffer_bytes = units.smallest, units.buffer_bytes
    weights.config = config
    numbers = {id(parameter): number for number, parameter in enumerate(tree.parameters(model))}
    weights.parameters = {key: numbers[own] for own, key in units.keys.items()}
    stored.add(weights)
    return _Engine(units, weights, limits is not None)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses the collector of reference cycles while many objects without cycles are made.

    Otherwise, it looks at all of them again and again, which takes a third of the time.
    """
    if not gc.isenabled():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()


def _moved(model: nn.Module, placement: Placement, kept: frozenset[int]) -> Moved:
    """Copies what is not streamed to the devices: buffers, and the ``kept`` parameters.

    Raises:
        ModelError: Modules on several devices share a parameter that is kept.
    """
    moved: Moved = {}
    devices: dict[int, torch.device] = {}
    for prefix, module in tree.named_modules(model):
        device = placement.device(module)
        kept_here = {name: each for name, each in module._parameters.items() if id(each) in kept}
        for name, each in kept_here.items():
            if devices.setdefault(id(each), device) != device:
                raise ModelError(
                    f"`{tree.joined(prefix, name)}` stays in memory, and modules on "
                    f"{devices[id(each)]} and {device} share it: place these modules on one device"
                )
        tensors: list[torch.Tensor | None] = [*module._buffers.values(), *kept_here.values()]
        for tensor in tensors:
            if tensor is None or tensor.is_meta or isinstance(tensor, SymbolicTensor):
                continue
            if tensor.device != device and (id(tensor), device) not in moved:
                moved[id(tensor), device] = tensor.detach().to(device)
    return moved


def _place(
    model: nn.Module,
    placement: Placement,
    read: list[tuple[nn.Module, str, torch.Tensor]],
    moved: Moved,
) -> None:
    """Puts buffers that were read, and copies on devices, in their places."""
    for module, name, value in read:
        module._buffers[name] = value
    parameters: dict[int, nn.Parameter] = {}
    for module in tree.modules(model) if moved else ():
        device = placement.device(module)
        for name, buffer in module._buffers.items():
            module._buffers[name] = moved.get((id(buffer), device), buffer)
        own: list[tuple[str, Any]] = list(module._parameters.items())
        for name, parameter in own:
            key = id(parameter)
            if (key, device) in moved:
                if key not in parameters:
                    parameters[key] = _replaced(parameter, moved[key, device])
                module._parameters[name] = parameters[key]


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
