# SPDX-License-Identifier: MIT OR Apache-2.0
"""Splits a model over several machines."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...budget import parse_size
from ...errors import CheckpointError, ConfigurationError
from .. import _registry
from ._checkpoint import RemoteCheckpoint
from ._machine import RemoteMachine
from ._split import Unit, split
from ._trace import LOG

Path = str | os.PathLike[str]

#: Tensors up to this size, in bytes, are copied together.
_PACKED = 1 << 20
#: The attribute of a dispatched model.
_ATTRIBUTE = "_tensorstream_moves"


def dispatch(
    model: nn.Module | Path,
    machines: Sequence[RemoteMachine | torch.device],
    budgets: Sequence[int | str] | None = None,
    *,
    checkpoint: Path | None = None,
    **options: Any,
) -> Any:
    """Splits a model over machines, for a model that is too large for one. Blocks.

    Each machine has consecutive layers. It reads its weights itself, if they come from a
    checkpoint. When a layer is called, its inputs are copied to its machine, from machine to
    machine if these can reach each other. Inputs may be on any device. The output stays on the
    machine of the last layer.

    The model must call its layers as modules. Layers are the elements of ``nn.ModuleList`` and
    ``nn.Sequential``, or the modules that a transformers model names as indivisible. Modules that
    share a parameter are on one machine. Results that layers on several machines have computed
    cannot be combined outside of a layer: this raises ``CrossMachineError``.

    Args:
        model: The model, or the source of a transformers model, as for
            ``tensorstream.from_pretrained``. The parameters of a model with weights are replaced by
            copies, so create optimizers afterwards. A model on the meta device needs a
            ``checkpoint``.
        machines: The machines, or devices of machines, in the order of the layers.
        budgets: For each machine, the most memory for weights, in bytes or such as "20GiB". Their
            ratio is also that of the parts. By default the parts have similar sizes.
        checkpoint: The source of the weights, which each machine must have. See
            ``load_state_dict``.
        options: The arguments of ``tensorstream.from_pretrained``, if ``model`` is a source.

    Returns:
        The model, which was changed, or was loaded.

    Raises:
        BudgetError: The budgets are too small. The message has the smallest ones that work.
        CheckpointError: The checkpoint lacks tensors, or has others than the model.
        ConfigurationError: An argument is invalid.
        RemoteOutOfMemoryError: A machine has too little memory.
        The errors of ``load_state_dict``, or of ``from_pretrained``.

    Examples:
        >>> import torch
        >>> from tensorstream.remote import RemoteMachine, dispatch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> with RemoteMachine.mock() as a, RemoteMachine.mock() as b:
        ...     dispatch(net, [a, b])(torch.ones(1, 4)).device == b.device()
        True
    """
    devices = [_device_of(machine) for machine in machines]
    if not devices:
        raise ConfigurationError("invalid machines []: expected at least one")
    weights = [1] * len(devices)
    if budgets is not None:
        if len(budgets) != len(devices):
            raise ConfigurationError(
                f"invalid budgets: expected one for each of the {len(devices)} machines, got "
                f"{len(budgets)}"
            )
        weights = [parse_size(budget, "budget") for budget in budgets]
    has_budgets = budgets is not None
    if not isinstance(model, nn.Module):
        if checkpoint is not None:
            raise ConfigurationError(
                f"unexpected checkpoint {os.fspath(checkpoint)!r}: the weights come from the model "
                f"{os.fspath(model)!r}"
            )
        from ...streaming import _on_machine

        def divided(shell: nn.Module, itemsize: int) -> list[Unit]:
            return split(shell, weights, budgets=has_budgets, itemsize=itemsize)

        loaded, units = _on_machine.from_pretrained_on_several(model, devices, divided, options)
        connect(loaded[0] if isinstance(loaded, tuple) else loaded, units, devices)
        return loaded
    if options:
        raise ConfigurationError(
            f"unexpected arguments {', '.join(options)}: they are for a model that is given by its "
            "source"
        )
    if getattr(model, _ATTRIBUTE, None) is not None:
        raise ConfigurationError("the model is on several machines already")
    units = split(model, weights, budgets=has_budgets)
    if checkpoint is not None:
        _load(model, units, devices, checkpoint)
    else:
        _move(model, units, devices)
    connect(model, units, devices)
    return model


def placement(model: nn.Module) -> dict[str, torch.device]:
    """Returns the devices of the layers of a model that ``dispatch`` has split.

    Returns:
        The devices by the names of the modules. "" is the model itself.

    Raises:
        ConfigurationError: ``dispatch`` has not split the model.
    """
    moves: _Moves | None = getattr(model, _ATTRIBUTE, None)
    if moves is None:
        raise ConfigurationError(f"{type(model).__name__} was not split: call dispatch first")
    return dict(moves.placement)


def _device_of(machine: Any) -> torch.device:
    if isinstance(machine, RemoteMachine):
        return machine.device()
    if isinstance(machine, torch.device | str):
        device = torch.device(machine)
        if device.type == "ts":
            return torch.device("ts", _registry.index_of(device))
    raise ConfigurationError(
        f'invalid machine {machine!r}: expected a RemoteMachine, or a device such as "ts:0"'
    )


def _load(
    model: nn.Module, units: list[Unit], devices: list[torch.device], checkpoint: Path
) -> None:
    """Loads the weights of each part on its machine."""
    wanted: dict[int, list[str]] = {}
    names = model.state_dict(keep_vars=True)
    for unit in units:
        for name, tensor in unit.tensors():
            if name in names:
                wanted.setdefault(unit.part, []).append(name)
            elif tensor.is_meta:
                raise ConfigurationError(
                    f"the buffer {name} is on the meta device, and not in checkpoints: create the "
                    "model on the CPU, or give transformers models by their source"
                )
    tied: dict[int, list[str]] = {}
    for name, tensor in names.items():
        tied.setdefault(id(tensor), []).append(name)
    loaded: dict[str, torch.Tensor] = {}
    unexpected: list[str] = []
    for part, part_names in sorted(wanted.items()):
        with RemoteCheckpoint(checkpoint, devices[part]) as opened:
            loaded |= opened.load([name for name in part_names if name in opened.tensors])
            unexpected = sorted(opened.tensors.keys() - names.keys())
    missing = sorted(
        name
        for name, tensor in names.items()
        if not any(each in loaded for each in tied[id(tensor)])
    )
    if missing or unexpected:
        raise CheckpointError(
            f"{os.fspath(checkpoint)} does not fit the model: missing tensors {missing[:3]}, "
            f"unexpected ones {unexpected[:3]}"
        )
    _assign(
        model,
        units,
        lambda name, tensor, unit: next(
            (loaded[each] for each in tied.get(id(tensor), [name]) if each in loaded),
            tensor.to(devices[unit.part]) if name not in names else tensor,
        ),
    )


def _move(model: nn.Module, units: list[Unit], devices: list[torch.device]) -> None:
    """Moves the weights of each part to its machine."""
    for unit in units:
        for name, tensor in unit.tensors():
            if tensor.is_meta:
                raise ConfigurationError(
                    f"{name} is on the meta device: pass a `checkpoint` with the weights"
                )
    _assign(model, units, lambda name, tensor, unit: tensor.detach().to(devices[unit.part]))


def _assign(
    model: nn.Module, units: list[Unit], value: Callable[[str, torch.Tensor, Unit], torch.Tensor]
) -> None:
    """Replaces the parameters and buffers of a model. Those that are shared stay so."""
    replaced: dict[int, torch.Tensor] = {}
    former = []  # keeps the identities valid
    for unit in units:
        for name, tensor in unit.tensors():
            former.append(tensor)
            if id(tensor) not in replaced:
                got = value(name, tensor, unit)
                if got.shape != tensor.shape:
                    raise CheckpointError(
                        f"tensor `{name}` has shape {list(got.shape)}, but the model has "
                        f"{list(tensor.shape)}"
                    )
                if isinstance(tensor, nn.Parameter):
                    got = nn.Parameter(got, tensor.requires_grad)
                replaced[id(tensor)] = got
    for module in model.modules():
        own: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in own:
            for key, former_tensor in tensors.items():
                tensors[key] = replaced.get(id(former_tensor), former_tensor)


def connect(model: nn.Module, units: list[Unit], devices: list[torch.device]) -> None:
    """Makes the layers of a model copy their inputs to their machines."""
    moves = _Moves(getattr(model, "_skip_keys_device_placement", None) or ())
    for unit in units:
        moves.add(unit, devices[unit.part])
    model.register_forward_pre_hook(moves.begin, prepend=True)
    model.register_forward_hook(moves.end, always_call=True)
    object.__setattr__(model, _ATTRIBUTE, moves)
    for part, device in enumerate(devices):
        own = [unit for unit in units if unit.part == part]
        LOG.info(
            "%s: %d bytes of weights, from %s to %s",
            device,
            sum(unit.nbytes for unit in own),
            own[0].name if own else "nothing",
            own[-1].name if own else "nothing",
        )


class _Moves:
    """Copies the inputs of layers to their machines.

    Within one pass, a tensor is copied to a machine once, such as the position embeddings that all
    layers get.

    Args:
        skipped: The names of arguments that are not moved, such as caches.
    """

    def __init__(self, skipped: str | Sequence[str]) -> None:
        self._skipped = {skipped} if isinstance(skipped, str) else set(skipped)
        #: The devices of the layers.
        self.placement: dict[str, torch.device] = {}
        #: By the identity of a tensor, and a device: the tensor, its copy, and their versions.
        self._copies: dict[
            tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor, tuple[int, int]]
        ] = {}
        #: Whether a pass of the whole model runs. Otherwise nothing is kept.
        self._keeps = False

    def add(self, unit: Unit, device: torch.device) -> None:
        """Adds a layer."""
        self.placement[unit.name] = device

        def move(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            found: list[torch.Tensor] = []
            given = {key: value for key, value in kwargs.items() if key not in self._skipped}
            _collect((args, given), device, found)
            if not found:
                return None
            copies = self._copy(found, device)
            moved, named = _replaced((args, given), copies)
            return moved, {**kwargs, **named}

        unit.module.register_forward_pre_hook(move, with_kwargs=True)

    def begin(self, module: nn.Module, args: Any) -> None:
        """Keeps the copies of a pass from now on."""
        self._copies.clear()
        self._keeps = True

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forgets the copies of a pass."""
        self._copies.clear()
        self._keeps = False

    def _copy(self, tensors: list[torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
        """Returns copies of tensors on a device, by the identities of the tensors."""
        copies: dict[int, torch.Tensor] = {}
        packed: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            known = self._copies.get((id(tensor), device))
            if known is not None and known[2] == (tensor._version, known[1]._version):
                copies[id(tensor)] = known[1]
            elif (
                tensor.nbytes <= _PACKED
                and tensor.numel()
                and not (tensor.requires_grad and torch.is_grad_enabled())
                and not (tensor.is_conj() or tensor.is_neg())
            ):
                packed.setdefault(tensor.device, []).append(tensor)
            else:
                copies[id(tensor)] = tensor.to(device)
        for group in packed.values():
            copies.update(zip(map(id, group), _together(group, device), strict=True))
        for tensor in tensors if self._keeps else ():
            copy = copies[id(tensor)]
            # PyTorch does not count writes to inference tensors. A copy that was made with another
            # grad mode may lack its history.
            if not (tensor.is_inference() or copy.is_inference() or tensor.requires_grad):
                self._copies[id(tensor), device] = tensor, copy, (tensor._version, copy._version)
        return copies


def _together(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies tensors of one device to another one, with one transfer."""
    if len(tensors) == 1:
        return [tensors[0].to(device)]
    # In the order of decreasing size, each element is aligned.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
    flat = [tensors[index].detach().reshape(-1).view(torch.uint8) for index in order]
    copied = torch.cat(flat).to(device)
    parts = copied.split([part.numel() for part in flat])
    results = [copied] * len(tensors)
    for index, part in zip(order, parts, strict=True):
        results[index] = part.view(tensors[index].dtype).view(tensors[index].shape)
    return results


def _collect(value: Any, device: torch.device, found: list[torch.Tensor]) -> None:
    """Finds the tensors of a nested argument that are on other devices."""
    if isinstance(value, torch.Tensor):
        if value.device != device and not any(value is each for each in found):
            found.append(value)
    elif type(value) is dict:
        for each in value.values():
            _collect(each, device, found)
    elif isinstance(value, tuple | list):
        for each in value:
            _collect(each, device, found)


def _replaced(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Returns a nested argument with copies in place of tensors."""
    if isinstance(value, torch.Tensor):
        return copies.get(id(value), value)
    if type(value) is dict:
        return {key: _replaced(each, copies) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_replaced(each, copies) for each in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replaced(each, copies) for each in value))
    return value
