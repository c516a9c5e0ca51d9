# SPDX-License-Identifier: MIT OR Apache-2.0
"""Replaces group offloading of diffusers: ``from tensorstream.diffusers import ...``.

``apply_group_offloading`` has the arguments of the function in ``diffusers.hooks``, and
``enable_group_offload`` those of the method of models and pipelines. Weights stream from storage
into CPU memory, where the model runs, or to an accelerator. Other names are those of
``diffusers.hooks`` and diffusers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ._scratch import directory_of
from .budget import Budget
from .config import Config
from .devices import device_of
from .errors import ConfigurationError
from .streaming._arguments import check_execution_device
from .streaming._offload import offload, restore
from .streaming._placement import InputsTo, Placement
from .streaming._state import is_offloaded

__all__ = ["apply_group_offloading", "enable_group_offload"]

Device = str | torch.device

_OFFLOAD_TYPES = ("block_level", "leaf_level")


def apply_group_offloading(
    module: nn.Module,
    onload_device: Device = "cpu",
    offload_device: Device = "cpu",
    offload_type: Any = "block_level",
    num_blocks_per_group: int | None = None,
    non_blocking: bool = False,
    use_stream: bool = False,
    record_stream: bool = False,
    low_cpu_mem_usage: bool = False,
    offload_to_disk_path: str | os.PathLike[str] | None = None,
    block_modules: list[str] | None = None,
    exclude_kwargs: list[str] | None = None,
    *,
    budget: int | str | Budget | None = None,
) -> None:
    """Streams the weights of a model from a directory. Blocks while they are written.

    Weights that fit in the budget stay in memory, and the others are read ahead. Results are
    bit-identical. The model moves its inputs to its device. See ``tensorstream.offload``.

    Args:
        module: The model, in memory. Changed in place. A model that streams already is not changed.
        onload_device: The device on which the model runs.
        offload_device: The CPU. Without a directory, weights that are used on the CPU stay there.
        offload_type: "block_level" or "leaf_level". Has no other effect: the engine plans which
            weights are in memory at a time.
        num_blocks_per_group: Has no effect.
        non_blocking: Has no effect.
        use_stream: Has no effect. Weights are always read ahead.
        record_stream: Has no effect.
        low_cpu_mem_usage: Has no effect.
        offload_to_disk_path: The directory that the weights are written to, as a ``.ts`` file. The
            default for an accelerator is a temporary one, until the model is freed.
        block_modules: Has no effect.
        exclude_kwargs: The names of keyword arguments that are not moved to the device.
        budget: The memory for weights. See ``tensorstream.Config``.

    Raises:
        ConfigurationError: A device cannot be used, the budget has no directory, or another
            argument is invalid.
        The errors of ``tensorstream.offload``.

    Examples:
        >>> import torch
        >>> from tensorstream.diffusers import apply_group_offloading
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        >>> apply_group_offloading(
        ...     model, "cpu", offload_type="leaf_level", offload_to_disk_path="weights",
        ...     budget="60KiB",
        ... )
        >>> model(torch.ones(1, 64)).shape
        torch.Size([1, 64])
    """
    check_execution_device(offload_device)
    device = device_of(onload_device)
    if str(getattr(offload_type, "value", offload_type)) not in _OFFLOAD_TYPES:
        raise ConfigurationError(
            f"invalid offload_type {offload_type!r}: expected one of {', '.join(_OFFLOAD_TYPES)}"
        )
    if is_offloaded(module):
        return
    config = Config(storage_path=offload_to_disk_path, budget=budget, device=device)
    if offload_to_disk_path is None and device.type == "cpu":
        if budget is not None:
            raise ConfigurationError(
                "a budget needs `offload_to_disk_path`, a directory for the weights"
            )
        return
    if offload_to_disk_path is None:
        Placement(module, config)  # refuses devices that cannot be used
        config = replace(config, storage_path=directory_of(module))
    offload(module, config)
    if device.type != "cpu":
        inputs = _Inputs(device, frozenset(exclude_kwargs or ()))
        module.register_forward_pre_hook(inputs, prepend=True, with_kwargs=True)


@dataclass(frozen=True)
class _Inputs(InputsTo):
    """A hook that moves the inputs of a model to its device, except some keyword arguments."""

    left: frozenset[str]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if name not in self.left}
        args, given = super().__call__(module, args, given)
        return args, {**kwargs, **given}


def enable_group_offload(
    model: Any,
    onload_device: Device = "cpu",
    offload_device: Device = "cpu",
    offload_type: Any = "block_level",
    num_blocks_per_group: int | None = None,
    non_blocking: bool = False,
    use_stream: bool = False,
    record_stream: bool = False,
    low_cpu_mem_usage: bool = False,
    offload_to_disk_path: str | os.PathLike[str] | None = None,
    exclude_modules: str | Iterable[str] | None = None,
    *,
    budget: int | str | Budget | None = None,
) -> None:
    """Streams the weights of a model, or of the models of a pipeline. Blocks.

    See ``apply_group_offloading``. If it fails for one of the models of a pipeline, none streams.

    Args:
        model: The model or pipeline. The models of a pipeline share the budget, and each has a
            directory in ``offload_to_disk_path``. On an accelerator, shares are fixed, by size.
        onload_device: The device on which they run.
        offload_device: The CPU.
        offload_type: "block_level" or "leaf_level". Has no other effect.
        num_blocks_per_group: Has no effect.
        non_blocking: Has no effect.
        use_stream: Has no effect.
        record_stream: Has no effect.
        low_cpu_mem_usage: Has no effect.
        offload_to_disk_path: The directory that the weights are written to.
        exclude_modules: The names of models of a pipeline that stay as they are.
        budget: The memory for weights. See ``tensorstream.Config``.

    Raises:
        ConfigurationError: ``model`` is neither a model nor a pipeline, or the errors of
            ``apply_group_offloading``.
    """
    how = {
        "onload_device": onload_device,
        "offload_device": offload_device,
        "offload_type": offload_type,
    }
    if isinstance(model, nn.Module):
        apply_group_offloading(
            model, **how, offload_to_disk_path=offload_to_disk_path, budget=budget
        )
        return
    components = getattr(model, "components", None)
    if not isinstance(components, dict):
        raise ConfigurationError(f"expected a model or a pipeline, got {type(model).__name__}")
    excluded = {exclude_modules} if isinstance(exclude_modules, str) else set(exclude_modules or ())
    chosen = {
        name: each
        for name, each in components.items()
        if isinstance(each, nn.Module) and name not in excluded and not is_offloaded(each)
    }
    budgets: dict[str, int | str | Budget | None] = dict.fromkeys(chosen, budget)
    device = device_of(onload_device)
    if device.type != "cpu":
        whole = Config(budget=budget, device=device).working_bytes()
        sizes = {name: sum(p.nbytes for p in each.parameters()) for name, each in chosen.items()}
        total = max(sum(sizes.values()), 1)
        budgets = {name: whole * size // total for name, size in sizes.items()}
    elif offload_to_disk_path is not None and not isinstance(budget, Budget):
        budgets = dict.fromkeys(chosen, Budget(Config(budget=budget).working_bytes()))
    done: list[nn.Module] = []
    for name, component in chosen.items():
        path = offload_to_disk_path and os.path.join(offload_to_disk_path, name)
        try:
            apply_group_offloading(
                component, **how, offload_to_disk_path=path, budget=budgets[name]
            )
        except BaseException:
            for each in filter(is_offloaded, done):
                restore(each)
            raise
        done.append(component)


def __getattr__(name: str) -> Any:
    """Returns what ``diffusers.hooks`` or diffusers has under a name that is not replaced."""
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        import diffusers
        import diffusers.hooks
    except ImportError as error:
        raise AttributeError(
            f"tensorstream.diffusers has no `{name}`, and diffusers is not installed: "
            "pip install 'tensorstream[diffusers]'"
        ) from error
    found = getattr(diffusers.hooks, name, None)
    return getattr(diffusers, name) if found is None else found
