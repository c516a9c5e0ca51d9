# SPDX-License-Identifier: MIT OR Apache-2.0
"""Refuses calls that would change streamed weights. A refused call changes nothing.

The methods of ``nn.Module`` are replaced once for the process, as soon as a model streams, because
such a call may come from a module around the streamed ones, which changes others first. For the
same reason, steps of all optimizers are checked, and ``data`` of all parameters is replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ModelError
from . import _tree as tree
from ._calls import own_stand_ins, stand_ins_below
from ._distributed import replace_distributed
from ._store import memory_order
from ._streamed_tensor import (
    CHANGE_IN_MEMORY,
    CopiedTensor,
    StreamedTensor,
    copied,
    in_memory,
    is_same,
    name_of,
    to_memory,
    with_memory,
)

#: Whether the call of a module around has been checked.
_is_checked: ContextVar[bool] = ContextVar("tensorstream_is_checked", default=False)
_is_replaced = False
#: The key of the hook that an optimizer runs after its others.
_LAST_HOOK = "tensorstream"


def replace_guarded() -> None:
    """Replaces methods of all modules, parameters and optimizers, unless this has happened."""
    global _is_replaced  # noqa: PLW0603
    if not _is_replaced:
        _is_replaced = True
        nn.Module._apply = _apply(nn.Module._apply)  # type: ignore[method-assign]
        nn.Module.load_state_dict = _load(nn.Module.load_state_dict)  # type: ignore[method-assign]
        # PyTorch's stub declares a tensor, and not a descriptor.
        nn.Parameter.data = _Data()  # type: ignore[assignment]
        register_optimizer_step_pre_hook(_require_no_step)
        replace_distributed()
        utils: Any = nn.utils
        for module in (utils, utils.convert_parameters):
            module.vector_to_parameters = _refuse_vector(module.vector_to_parameters)


class _Data:
    """The attribute ``data`` of ``nn.Parameter``: PyTorch's, which accepts streamed weights too.

    A parameter in memory that is set to one gets a copy, since the weight has no memory. PyTorch
    would accept the stand-in, and fail when the parameter is used.
    """

    def __get__(self, parameter: Any, owner: type | None = None) -> Any:
        return self if parameter is None else _original_data().__get__(parameter)

    def __set__(self, parameter: Any, value: Any) -> None:
        if isinstance(value, CopiedTensor):
            value = with_memory(value)
        if isinstance(value, StreamedTensor):
            value = in_memory(value)
        _original_data().__set__(parameter, value)


def _original_data() -> Any:
    """Returns the descriptor of tensors. Remote machines replace it when the first one starts."""
    return torch.Tensor.data


def _refuse_vector(original: Any) -> Any:
    """Returns ``vector_to_parameters``, which sets one parameter after the other."""

    @functools.wraps(original)
    def vector_to_parameters(vec: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
        parameters = list(parameters)
        for each in parameters:
            if isinstance(each, StreamedTensor) and not isinstance(each, CopiedTensor):
                raise ModelError(f"cannot set `{name_of(each)}`: {CHANGE_IN_MEMORY}")
        original(vec, parameters)

    return vector_to_parameters


def _require_no_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Requires that a step of an optimizer writes to no streamed weight.

    Hooks of the optimizer run later and can compute gradients, so this is required again after
    them.

    Args:
        optimizer: The optimizer.
        args: The optimizer, and the positional arguments of its step.
        kwargs: The other arguments. A closure computes gradients during the step.

    Raises:
        ModelError: It would write to one.
    """
    has_closure = any(each is not None for each in (*args[1:], kwargs.get("closure")))
    writes_to_all = isinstance(optimizer, torch.optim.LBFGS)
    streamed = [
        each
        for group in optimizer.param_groups
        for each in group["params"]
        if isinstance(each, StreamedTensor) and not isinstance(each, CopiedTensor)
    ]
    for each in streamed:
        if writes_to_all or each.grad is not None or (has_closure and each.requires_grad):
            raise ModelError(
                f"cannot step: the optimizer would write to `{name_of(each)}`: {CHANGE_IN_MEMORY}"
            )
    own_hooks: dict[Any, Any] = optimizer._optimizer_step_pre_hooks
    own_hooks.pop(_LAST_HOOK, None)
    if streamed and own_hooks:
        own_hooks[_LAST_HOOK] = _require_no_step


def _apply(original: Any) -> Any:
    """Returns ``_apply``, which ``to``, ``half``, ``to_empty`` and ``share_memory`` call.

    It refuses functions that would move, cast or change a streamed weight.
    """

    @functools.wraps(original)
    def _apply(self: nn.Module, fn: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_checked.get() or next(iter(stand_ins_below(self)), None) is None:
            return original(self, fn, *args, **kwargs)
        require_no_change(self, fn)
        token = _is_checked.set(True)
        try:
            return original(self, _skipping_streamed(fn), *args, **kwargs)
        finally:
            _is_checked.reset(token)

    return _apply


def require_no_change(module: nn.Module, fn: Any) -> None:
    """Requires that a function leaves the streamed weights of a module as they are.

    Copies of weights that it changes get memory of their own.

    Raises:
        ModelError: It would change one.
    """
    changes: dict[Any, ModelError | None] = {}
    copies: list[StreamedTensor] = []
    for _, stand_in in stand_ins_below(module):
        kind = stand_in.dtype, memory_order(stand_in)
        if kind not in changes:
            changes[kind] = _change(fn, stand_in)
        change = changes[kind]
        if change is not None and not stand_in._ref.is_copy:
            raise change
        if change is not None:
            copies.append(stand_in)
    for copy in {id(copy): copy for copy in copies}.values():
        to_memory(copy, copied(copy))


def _change(fn: Any, stand_in: StreamedTensor) -> ModelError | None:
    """Returns an error that describes what a function would change, or ``None``."""
    with torch.inference_mode(False), torch.no_grad():
        order = memory_order(stand_in)
        probe = (
            torch.empty_permuted([2] * len(order), order)
            .fill_(3)
            .to(stand_in.dtype)
            .to(stand_in.device)
        )
        before, version = probe.clone(), probe._version
        outcome = fn(probe)
        if _is_unchanged(probe, before, version, outcome):
            return None
    wanted, advice = "changed", "restore(model) first"
    if isinstance(outcome, torch.Tensor) and outcome.device != probe.device:
        wanted = f"moved to {outcome.device}"
    elif isinstance(outcome, torch.Tensor) and outcome.dtype != probe.dtype:
        wanted = f"cast from {probe.dtype} to {outcome.dtype}"
        advice = "pass the dtype to from_pretrained, or restore(model) first"
    elif isinstance(outcome, torch.Tensor) and outcome.stride() != probe.stride():
        wanted = "stored in another order of dimensions"
        advice = "change the memory format of a model in memory, and pass that to offload"
    elif _is_shared(outcome):
        wanted = "moved to shared memory"
        advice = "load the model in each process, or restore(model) first"
    return ModelError(
        f"streamed weights, such as `{name_of(stand_in)}`, cannot be {wanted}: their values come "
        f"from a file; nothing was changed; {advice}"
    )


def _is_unchanged(probe: torch.Tensor, before: torch.Tensor, version: int, outcome: Any) -> bool:
    """Returns whether a function has returned its argument, or an equal tensor on its device.

    Args:
        probe: The argument.
        before: A copy of it from before the call.
        version: Its version before the call.
        outcome: What the function returned.
    """
    if probe._version != version or not isinstance(outcome, torch.Tensor) or _is_shared(outcome):
        return False
    return outcome is probe or (
        type(outcome) is torch.Tensor
        and outcome.device == before.device
        and (outcome.dtype, outcome.stride()) == (before.dtype, before.stride())
        and torch.equal(_bytes(outcome), _bytes(before))
    )


def _is_shared(outcome: Any) -> bool:
    # PyTorch calls all memory of other devices shared.
    is_on_host = isinstance(outcome, torch.Tensor) and outcome.device.type == "cpu"
    return is_on_host and bool(outcome.untyped_storage().is_shared())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _skipping_streamed(fn: Any) -> Any:
    """Returns a function that calls ``fn`` for every tensor that is not streamed."""

    def apply(tensor: torch.Tensor) -> Any:
        return tensor if "_ref" in tensor.__dict__ else fn(tensor)

    return apply


def _load(original: Any) -> Any:
    """Returns ``load_state_dict``, which accepts values that are equal to those that stream."""

    @functools.wraps(original)
    def load_state_dict(
        self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        own = {} if _is_checked.get() else dict(_named_stand_ins(self))
        if not own:
            return original(self, state_dict, *args, **kwargs)
        loaded = type(state_dict)() if isinstance(state_dict, dict) else {}
        loaded.update(state_dict)
        for name, value in state_dict.items():
            if name in own:
                if not _is_equal(own[name], value):
                    raise ModelError(
                        f"cannot load `{name}`: a streamed weight cannot be changed; nothing was "
                        "changed; restore(model) first, or offload with another checkpoint"
                    )
                loaded[name] = own[name]
        if (metadata := getattr(state_dict, "_metadata", None)) is not None:
            loaded._metadata = metadata  # type: ignore[attr-defined]
        token = _is_checked.set(True)
        try:
            return original(self, loaded, *args, **kwargs)
        finally:
            _is_checked.reset(token)

    return load_state_dict


def _named_stand_ins(module: nn.Module) -> Iterator[tuple[str, StreamedTensor]]:
    """Yields the qualified names and streamed parameters of a module and of those below it.

    Leaves out those of modules with loading code of their own, which may change what it gets.
    """
    for prefix, each in tree.named_modules(module):
        is_plain = (
            type(each)._load_from_state_dict is nn.Module._load_from_state_dict
            and not each._load_state_dict_pre_hooks
        )
        for name, stand_in in own_stand_ins(each) if is_plain else ():
            if not stand_in._ref.is_copy:
                yield f"{prefix}.{name}".lstrip("."), stand_in


def _is_equal(own: StreamedTensor, value: Any) -> bool:
    """Returns whether loading a value would leave a streamed weight as it is."""
    if is_same(own, value):
        return True
    if not isinstance(value, torch.Tensor) or value.shape != own.shape:
        return False
    with torch.no_grad():
        other = value.detach().to(device=own.device, dtype=own.dtype)
        streamed = own.detach()
        divided = own._ref.weights.divided(own._ref.key)
        if divided is None:
            return torch.equal(_bytes(streamed), _bytes(other))
        begins = [divided.first_row(index) for index in range(divided.slice_count())]
        return all(
            torch.equal(_bytes(streamed[begin:end]), _bytes(other[begin:end]))
            for begin, end in zip(begins, [*begins[1:], own.shape[0]], strict=True)
        )
