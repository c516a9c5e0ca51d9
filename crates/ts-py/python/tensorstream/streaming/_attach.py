# SPDX-License-Identifier: MIT OR Apache-2.0
"""Connects models to open checkpoints, through an engine for each device."""

from __future__ import annotations

import atexit
import weakref
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from .. import _native
from ..budget import Budget
from ..config import Config
from ..errors import BudgetError, ModelError
from ._copying import Attach, replace_copying
from ._distributed import ignore_streamed
from ._forward import Forward, Parameters, PartPass, Pass, parts, recurrent
from ._guards import guard
from ._interrupts import deferred
from ._live import add_live
from ._placement import Placement
from ._profile import Profile
from ._replaced_method import replace_method
from ._routing import announced
from ._rules import register_transformers
from ._saving import save_in_pieces
from ._state import Share, Streaming
from ._store import DimensionOrders, derived_of, store_derived
from ._stored_weights import StoredWeights
from ._streamed_tensor import StreamedWeight, parameter_of
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
    """
    derived = derived_of(model)
    if derived:
        main = placement.configs[placement.main]
        checkpoint = store_derived(derived, checkpoint, main, main.working_bytes())
    converted = {
        id(tensor): Source(name, tuple(checkpoint.entry(name)[2]), tensor.source.phase)
        for name, tensor in derived.items()
    }
    budgets = [own.working_bytes() for own in placement.configs.values()]
    stored = StoredWeights(checkpoint, min(budgets))
    orders, engines = orders or {}, []
    for device, own in placement.configs.items():
        try:
            engine = _start(
                model, own, placement, checkpoint, stored, converted, orders, freed_bytes, kept
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
    replaced = [each for engine in engines for each in engine.parameters()]
    passed_over = placement.config.passed_over(placement.main)
    streaming = Streaming(checkpoint, [each.share for each in engines], passed_over)
    register_transformers()
    with deferred():
        for module, parameters in replaced:
            module.__dict__["_parameters"] = parameters
            recurrent(module)
        for engine in engines:
            _replace_methods(model, engine.units, engine.share.weights)
        guard(model)
        placement.move_inputs()
        save_in_pieces(model, stored)
        replace_copying(model, stored, _attach_copy(placement.config, stored))
        model.__dict__["_tensorstream"] = streaming
        _place(model, placement, buffers, moved)
        if with_device_map or torch.accelerator.is_available():
            # Without one, other libraries would refuse the CPU as a device.
            placement.set_device_map()
        ignore_streamed(model)
        add_live(model)
        for engine in engines:
            engine.share.profile.save_at_end(model, engine.share.streamer)
            if engine.is_limited:
                # A thread that needs the interpreter must end before the interpreter does.
                weakref.finalize(model, engine.share.streamer.stop_monitor)
    return model


@dataclass(frozen=True)
class _Engine:
    """The engine for the weights of a model on one device."""

    units: UnitBuilder
    share: Share
    #: Whether a thread limits the memory.
    is_limited: bool

    def parameters(self) -> list[tuple[nn.Module, Parameters]]:
        """Returns new parameters for modules, in which stand-ins replace those that stream."""
        weights = self.share.weights
        made = {key: parameter_of(weights, key) for key in self.units.sources}
        replaced = []
        for module, keys in self.units.modules:
            streamed = {name: made[key] for name, key in keys.items()}
            lists = hasattr(module, "_flat_weights_names")
            replaced.append((module, Parameters(module._parameters, weights, streamed, lists)))
        return replaced


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
    """
    settings, device = config.settings(), config.torch_device()
    settings["host_bytes"] = int(settings["host_bytes"] * placement.share(device))
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
    )
    most, limits = config.limits(budget, *extremes, freed_bytes)
    if isinstance(config.budget, Budget):
        most = config.budget.bytes
    profile = Profile(checkpoint, [(name, routed) for name, _, routed in units.specs])
    streamer = _native.Streamer(
        checkpoint,
        units.specs,
        [weight.spec() for weight in units.weights],
        budget=most,
        together=units.leased_together(),
        weight_class=StreamedWeight,
        settings=settings,
        tables=units.tables,
        scores=profile.load(),
        limits=limits,
    )
    if isinstance(config.budget, Budget):
        config.budget.add(streamer, max(extremes[1], budget))
    weights = Weights(streamer, units.weights, units.divided, budget, stored, device)
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    stored.add(weights, units.sources, {key: numbers[own] for own, key in units.keys.items()})
    share = Share(weights, units.sources, profile, units.expert_units())
    return _Engine(units, share, limits is not None)


def _attach_copy(config: Config, stored: StoredWeights) -> Attach:
    """Returns a function that offloads a copy of a model. It does not refer to the model."""

    def attach_copy(twin: nn.Module, orders: DimensionOrders, kept: frozenset[int]) -> None:
        attach(twin, Placement(twin, config), stored.checkpoint, orders, kept=kept)

    return attach_copy


def _replace_methods(model: nn.Module, units: UnitBuilder, weights: Weights) -> None:
    """Replaces methods of the modules of a model, so that they lease weights."""
    for module, unit in units.leaves():
        replace_method(module, Forward(module, weights, unit))
    # After the leaves, because an expert can be one.
    for module, forward in announced(model, weights, units.routed(), units.experts()):
        replace_method(module, forward)
    for part in parts(model, {id(module) for module, _ in units.modules}):
        replace_method(part, PartPass(part, weights))
    replace_method(model, Pass(model, weights))


def _moved(model: nn.Module, placement: Placement, kept: frozenset[int]) -> Moved:
    """Copies what is not streamed to the devices: buffers, and the ``kept`` parameters.

    Raises:
        ModelError: Modules on several devices share a parameter that is kept.
    """
    moved: Moved = {}
    devices: dict[int, torch.device] = {}
    for prefix, module in model.named_modules():
        device = placement.device(module)
        for name, each in module.named_parameters(prefix, False):
            if id(each) in kept and devices.setdefault(id(each), device) != device:
                raise ModelError(
                    f"`{name}` stays in memory, and modules on {devices[id(each)]} and {device} "
                    "share it: place these modules on one device"
                )
        parameters = [each for each in module.parameters(False) if id(each) in kept]
        buffers = (each for each in module.buffers(False) if not isinstance(each, SymbolicTensor))
        for each in (*buffers, *parameters):
            if not each.is_meta and each.device != device and (id(each), device) not in moved:
                moved[id(each), device] = each.detach().to(device)
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
    for module in model.modules() if moved else ():
        device = placement.device(module)
        for name, buffer in module._buffers.items():
            module._buffers[name] = moved.get((id(buffer), device), buffer)
        own: list[tuple[str, Any]] = list(dict.items(module._parameters))
        for name, parameter in own:
            key = id(parameter)
            if (key, device) in moved:
                if key not in parameters:
                    parameters[key] = _replaced(parameter, moved[key, device])
                dict.__setitem__(module._parameters, name, parameters[key])


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
