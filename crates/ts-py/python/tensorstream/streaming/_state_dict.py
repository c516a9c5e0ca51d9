# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loads a checkpoint into a model as ``load_state_dict`` does, without the values.

Modules without loading code of their own get the tensors with their names. Where a module has
loading code (an overridden ``_load_from_state_dict``, ``set_extra_state`` or ``load_state_dict``,
or a hook), that code runs, with a state dict of symbolic tensors. Meanwhile, symbolic tensors also
stand in for the parameters and buffers of the module and of those below it, so that each write is
recorded. What the code computes is computed once and written to a file (_store.py).

Parameters stay the same objects, unless the code replaces them. Until the model is offloaded,
``Loaded.undo`` can take back everything.
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _IncompatibleKeys
from torch.utils._pytree import tree_any, tree_map

from .. import _native
from .._dtypes import SAFETENSORS_DTYPES, TORCH_DTYPES
from ..errors import CheckpointError, CheckpointWarning, MissingTensorError, ModelError
from . import _tree as tree
from ._builder import Builder
from ._store import memory_order
from ._symbolic_tensor import (
    Derived,
    Source,
    SymbolicTensor,
    in_memory,
    is_complete,
    without_value,
)


@dataclass
class Loaded:
    """What a model becomes. Its parameters and buffers have not been read."""

    #: The names of tensors of the checkpoint that are parameters as they are, by ``id`` of the
    #: parameter.
    names: dict[int, str] = field(default_factory=dict)
    #: The values of the other parameters, by ``id``.
    parameters: dict[int, SymbolicTensor] = field(default_factory=dict)
    #: The stored order of the dimensions of parameters that are not contiguous, by ``id``.
    orders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: The values of buffers that have no memory yet, by ``id`` of the module and name.
    buffers: dict[tuple[int, str], SymbolicTensor] = field(default_factory=dict)
    #: Tensors in memory whose values change: buffers, and parameters that do not stream. With each,
    #: the module that has it.
    copies: list[tuple[nn.Module, torch.Tensor, SymbolicTensor]] = field(default_factory=list)
    before: list[Snapshot] = field(default_factory=list)

    def undo(self) -> None:
        """Gives the model its state from before the loading back."""
        for snapshot in reversed(self.before):
            snapshot.restore()


class Snapshot:
    """The attributes of a module, with its parameters, buffers and modules."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(module.__dict__)
        self.contents = {name: self.attributes[name].copy() for name in _CONTAINERS}

    def restore(self) -> None:
        """Gives the module its attributes back."""
        for name, content in self.contents.items():
            container = self.attributes[name]
            container.clear()
            container.update(content)
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)


#: The dictionaries and sets of a module that loading code may change.
_CONTAINERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def load(
    model: nn.Module,
    checkpoint: _native.Checkpoint,
    *,
    strict: bool | None,
    kept: frozenset[int],
    casts: bool = False,
) -> Loaded:
    """Loads a checkpoint into a model. Reads only what the model's own code asks for.

    If this fails, the model is unchanged.

    Args:
        model: The model.
        checkpoint: The checkpoint.
        strict: Whether all names must match. ``None`` warns of tensors that the model lacks.
        kept: The ``id`` of each parameter that stays in memory as it is.
        casts: Whether tensors are cast to the dtypes of parameters, and of buffers on the meta
            device. Buffers in memory keep their dtypes anyway.

    Raises:
        MissingTensorError: The checkpoint lacks tensors of the model.
        CheckpointError: A tensor has another shape or dtype, or the model lacks tensors.
        ModelError: Loading code cannot be recorded, or leaves a parameter without a value.
        Exception: Loading code of the model raised it.
    """
    loading = _Loading(model, checkpoint, kept, casts)
    try:
        loading.run(strict)
        loading.report(strict)
    except BaseException:
        loading.loaded.undo()
        raise
    return loading.loaded


class _Loading:
    def __init__(
        self, model: nn.Module, checkpoint: _native.Checkpoint, kept: frozenset[int], casts: bool
    ) -> None:
        self.loaded = Loaded()
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        #: What the names of the model begin with in the checkpoint.
        self._prefix = ""
        self._errors: list[str] = []
        self._model = model
        self._checkpoint = checkpoint
        self._builder = Builder(checkpoint)
        self._kept = kept
        self._casts = casts
        #: The parameters and buffers with a value from the checkpoint, by ``id``.
        self._filled: set[int] = set()
        #: The stand-ins of parameters and buffers, by ``id`` of these, and the reverse.
        self._stand_ins: dict[int, SymbolicTensor] = {}
        self._originals: dict[int, torch.Tensor] = {}
        #: The source of each stand-in before loading code ran, by ``id``.
        self._initial: dict[int, Source | Derived] = {}
        self._shadowed: dict[int, Snapshot] = {}

    def run(self, strict: bool | None) -> None:
        """Loads everything, and notes what is missing, unexpected or wrong."""
        names = self._checkpoint.names()
        if _overrides(self._model, "load_state_dict"):
            self._run_override(names, strict is True)
        else:
            if strict is None:  # else, names match as in memory
                self._prefix = self._part_of_a_model(names)
            own = [name for name in names if name.startswith(self._prefix)]
            self._visit(self._model, self._prefix, own)
        for snapshot in self.loaded.before:
            self._finish(snapshot)

    def report(self, strict: bool | None) -> None:
        """Raises or warns as ``load_state_dict`` does.

        Parameters that the checkpoint may lack keep the values that they have in memory.
        """
        files = ", ".join(str(path) for path, _, _ in self._checkpoint.files())
        if self._errors:
            raise CheckpointError(
                f"cannot load {files} into the {type(self._model).__name__}: "
                + "; ".join(error.strip() for error in self._errors)
            )
        self._report_missing(files, strict)
        unexpected = list(dict.fromkeys(self._unexpected))
        if unexpected and strict is not False:
            text = (
                f"{files}: {len(unexpected)} tensors are not in the {type(self._model).__name__}, "
                f"such as `{unexpected[0]}`"
            )
            if strict:
                raise CheckpointError(f"{text}; pass strict=False to ignore them")
            warnings.warn(
                f"{text}; pass strict=False to ignore them, or strict=True to refuse them",
                CheckpointWarning,
                stacklevel=5,
            )

    def _report_missing(self, files: str, strict: bool | None) -> None:
        names: dict[int, list[str]] = {}
        for own in (tree.named_parameters, tree.named_buffers):
            for name, tensor in own(self._model, remove_duplicate=False):
                names.setdefault(id(tensor), []).append(name)
        ids = {name: key for key, own_names in names.items() for name in own_names}
        found = self._filled | self._kept
        unloaded = (name.removeprefix(self._prefix) for name in dict.fromkeys(self._missing))
        missing = [name for name in unloaded if ids.get(name) not in found]
        if strict is False:
            missing = [name for name in missing if name not in ids]
        for name, parameter in tree.named_parameters(self._model):
            key = id(parameter)
            if key in found or isinstance(parameter, SymbolicTensor) or name in missing:
                continue
            if parameter.is_meta:
                missing.append(name)
            else:
                self._set(parameter, _in_memory(name, parameter, self._builder))
        for prefix, module in tree.named_modules(self._model):
            for name, buffer in module._buffers.items():
                valued = (
                    isinstance(buffer, SymbolicTensor) or (id(module), name) in self.loaded.buffers
                )
                if buffer is not None and buffer.is_meta and not valued:
                    raise ModelError(
                        f"buffer `{tree.joined(prefix, name)}` of {type(module).__name__} is on "
                        "the meta device but not in the checkpoint; build the model with its "
                        "buffers in memory"
                    )
        if missing and strict is not False:
            also = names.get(ids.get(missing[0], 0), [missing[0]])[1:]
            raise MissingTensorError(
                f"the model needs tensor `{missing[0]}`, which is not in {files}"
                + (f" (also looked for {', '.join(also)})" if also else "")
                + (f", and {len(missing) - 1} other tensors" if len(missing) > 1 else "")
            )
        if missing:
            raise MissingTensorError(
                f"the model needs tensor `{missing[0]}`, which is not in {files}, and has no value "
                "in memory"
            )

    def _part_of_a_model(self, names: Sequence[str]) -> str:
        """Returns what all names of the model begin with in the checkpoint of a larger model.

        Returns an empty string if the checkpoint has a parameter with the name that it has here, or
        if no other names match, or those of several parts do.
        """
        stored = set(names)
        own: dict[int, list[str]] = {}
        for name, parameter in tree.named_parameters(self._model, remove_duplicate=False):
            if id(parameter) not in self._kept:
                own.setdefault(id(parameter), []).append(name)
        if not own or any(name in stored for each in own.values() for name in each):
            return ""
        first = [f".{name}" for name in next(iter(own.values()))]
        prefixes = {
            name.removesuffix(end) + "." for name in names for end in first if name.endswith(end)
        }
        matching = [
            prefix
            for prefix in prefixes
            if all(any(prefix + name in stored for name in each) for each in own.values())
        ]
        return matching[0] if len(matching) == 1 else ""

    # Modules without loading code.

    def _visit(self, module: nn.Module, prefix: str, names: Iterable[str]) -> None:
        """Loads a module, and those below it.

        Args:
            module: The module.
            prefix: Its name, with a dot at the end.
            names: The tensors of the checkpoint whose names begin with the prefix.
        """
        if _has_loading_code(module):
            self._shadow(module, prefix)
            self._replay(module, self._state(names), prefix)
            return
        own = _local_state(module)
        found, groups = self._sorted(module, prefix, names, own)
        for name, tensor in own.items():
            if name in found:
                self._match(module, name, tensor, prefix + name)
            elif not isinstance(tensor, SymbolicTensor):  # else, it has a value
                self._missing.append(prefix + name)
        for name, child in module._modules.items():
            if child is not None:
                self._visit(child, f"{prefix}{name}.", groups.get(name, ()))

    def _sorted(
        self, module: nn.Module, prefix: str, names: Iterable[str], own: dict[str, torch.Tensor]
    ) -> tuple[set[str], dict[str, list[str]]]:
        """Sorts names into those of the module itself and those of modules below it.

        Adds buffers to ``own`` that are not persistent, but need a value.
        """
        found: set[str] = set()
        groups: dict[str, list[str]] = {}
        for name in names:
            first, dot, _ = name[len(prefix) :].partition(".")
            buffer = module._buffers.get(first)
            if dot and first in module._modules:
                groups.setdefault(first, []).append(name)
            elif not dot and (first in own or (buffer is not None and buffer.is_meta)):
                found.add(first)
                if buffer is not None:
                    own[first] = buffer
            else:
                self._unexpected.append(name)
        return found, groups

    def _match(self, module: nn.Module, name: str, tensor: torch.Tensor, key: str) -> None:
        """Gives a parameter or buffer the tensor of the checkpoint that has its name."""
        self._filled.add(id(tensor))
        streams = name in module._parameters and id(tensor) not in self._kept
        dtype, shape, _ = self._checkpoint.entry(key)
        casts = tensor.dtype != TORCH_DTYPES.get(dtype)
        is_saved_scalar = tensor.dim() == 0 and shape == [1]  # as PyTorch saved them once
        if streams and tensor.is_contiguous() and not ((casts and self._casts) or is_saved_scalar):
            # The units compare shapes and dtypes.
            self.loaded.names[id(tensor)] = key
            self.loaded.parameters.pop(id(tensor), None)
            return
        value: Any = self._builder.symbolic(key)
        if is_saved_scalar:
            value = value[0]
        if value.shape != tensor.shape or (
            casts and not self._casts and (streams or tensor.is_meta)
        ):
            raise mismatch(self._checkpoint, tensor, key)
        value = value.to(tensor.dtype)
        if streams:
            self._set(tensor, value)
        elif tensor.is_meta:
            self.loaded.buffers[id(module), name] = value
        else:
            self._copy(module, tensor, value, key)

    # Modules with loading code.

    def _state(self, names: Iterable[str]) -> OrderedDict[str, Any]:
        """Returns the state dict with these tensors."""
        state: OrderedDict[str, Any] = OrderedDict()
        for name in names:
            value: torch.Tensor = self._builder.symbolic(name)
            if name.endswith(_EXTRA_STATE_KEY_SUFFIX) and isinstance(value, SymbolicTensor):
                value = value.materialize()
            state[name] = value
        return state

    def _run_override(self, names: Iterable[str], strict: bool) -> None:
        """Calls the model's own ``load_state_dict``."""
        model = self._model
        self._shadow(model, "")
        takes = inspect.signature(model.load_state_dict).parameters
        any_name = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        options = {"strict": strict} if "strict" in takes or any_name else {}
        with self._named(model, ""):
            try:
                keys: Any = model.load_state_dict(self._state(names), **options)
            except RuntimeError as error:
                # PyTorch has no class of its own for these.
                if not str(error).startswith("Error(s) in loading state_dict"):
                    raise
                raise CheckpointError(str(error)) from error
        self._missing += getattr(keys, "missing_keys", None) or ()
        self._unexpected += getattr(keys, "unexpected_keys", None) or ()

    def _shadow(self, module: nn.Module, prefix: str) -> None:
        """Replaces the parameters and buffers of a module, and of those below, with stand-ins."""
        for name, each in tree.named_modules(module, prefix.removesuffix(".")):
            if id(each) in self._shadowed:
                continue
            snapshot = self._shadowed[id(each)] = Snapshot(each)
            self.loaded.before.append(snapshot)
            for container in ("_parameters", "_buffers"):
                own = snapshot.contents[container].copy()
                for key, tensor in own.items():
                    own[key] = self._stand_in(tree.joined(name, key), tensor)
                each.__dict__[container] = own

    def _stand_in(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Returns a symbolic tensor with the value of a parameter or buffer."""
        if type(tensor) not in (nn.Parameter, torch.Tensor, nn.Buffer) or tensor is None:
            return tensor
        if id(tensor) not in self._stand_ins:
            if tensor.is_meta:
                source = Derived(name, without_value, (name,), {}, None, 0)
                made = SymbolicTensor(tensor.shape, tensor.dtype, source, self._builder)
            else:
                made = _in_memory(name, tensor, self._builder)
            made.__dict__.update({**tensor.__dict__, **made.__dict__})
            if isinstance(tensor, nn.Parameter):
                made._is_param = True
                made.requires_grad_(tensor.requires_grad)
            self._stand_ins[id(tensor)] = made
            self._initial[id(made)] = made.source
            self._originals[id(made)] = tensor
        return self._stand_ins[id(tensor)]

    def _replay(self, module: nn.Module, state: OrderedDict[str, Any], prefix: str) -> None:
        """Does what ``load_state_dict`` does for a module and those below it."""
        self._shadow(module, prefix)  # loading code may have created it
        lists = self._missing, self._unexpected, self._errors
        if module._load_state_dict_pre_hooks or not _fill(module, state, prefix):
            with self._named(module, prefix):
                module._load_from_state_dict(state, prefix, {}, True, *lists)
        groups: dict[str, OrderedDict[str, Any]] = {}
        for key, value in state.items():
            if key.startswith(prefix):
                first, dot, _ = key[len(prefix) :].partition(".")
                if dot:
                    groups.setdefault(first, OrderedDict())[key] = value
        for name, child in module._modules.items():
            if child is not None:
                self._replay(child, groups.get(name, OrderedDict()), f"{prefix}{name}.")
        if not module._load_state_dict_post_hooks:
            return
        with self._named(module, prefix):
            for hook in module._load_state_dict_post_hooks.values():
                hook(module, _IncompatibleKeys(self._missing, self._unexpected))

    @contextmanager
    def _named(self, module: nn.Module, prefix: str) -> Iterator[None]:
        """Adds the name of a module to errors of its loading code."""
        what = f"`{prefix[:-1]}` ({type(module).__name__})" if prefix else type(module).__name__
        try:
            yield
        except ModelError as error:
            if str(error).startswith("cannot stream"):  # has the name of a module below
                raise
            raise ModelError(
                f"cannot stream {what}: its loading code must run on values, which are not in "
                f"memory: {error}; load the model in memory, and offload it without a checkpoint"
            ) from error
        except Exception as error:
            if not getattr(error, "__notes__", None):
                error.add_note(f"raised by the loading code of {what}")
            raise

    def _finish(self, snapshot: Snapshot) -> None:
        """Gives a module its own parameters and buffers back, and notes their values."""
        module = snapshot.module
        current = {name: module.__dict__[name] for name in ("_parameters", "_buffers")}
        for container, own in current.items():
            final = {
                name: tensor if tensor is None else self._ended(module, container, name, tensor)
                for name, tensor in own.items()
            }
            before = snapshot.attributes[container]
            before.clear()
            before.update(final)
            module.__dict__[container] = before
        for name, value in module.__dict__.items():
            if name not in _CONTAINERS and tree_any(_is_symbolic, value):
                module.__dict__[name] = tree_map(self._real, value)

    def _ended(
        self, module: nn.Module, container: str, name: str, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Notes the value of a parameter or buffer after loading. Returns what the module gets."""
        original = self._originals.get(id(tensor))
        if original is None:
            if container == "_parameters" and not _is_symbolic(tensor) and not tensor.is_meta:
                if id(tensor) not in self._kept:  # the code has created it
                    self._filled.add(id(tensor))
                    self._set(tensor, _in_memory(name, tensor, self._builder))
            elif isinstance(tensor, SymbolicTensor):
                self._require_complete(module, name, tensor)
            return tensor
        assert isinstance(tensor, SymbolicTensor)
        if tensor.source is self._initial[id(tensor)]:
            return original
        if container == "_buffers" and original.is_meta:
            self._require_complete(module, name, tensor)
            self.loaded.buffers[id(module), name] = tensor
        elif id(original) not in self._filled:
            self._require_complete(module, name, tensor)
            if container == "_parameters" and id(original) not in self._kept:
                self._set(original, tensor)
            else:
                self._copy(module, original, tensor, name)
        self._filled.add(id(original))
        return original

    def _require_complete(self, module: nn.Module, name: str, tensor: SymbolicTensor) -> None:
        if not is_complete(tensor.source):
            raise ModelError(
                f"cannot stream {type(module).__name__}: its loading code writes to a part of "
                f"`{name}`, which has no value because it is on the meta device; build the model "
                "in memory"
            )

    def _real(self, value: Any) -> Any:
        """Returns what an attribute of a module gets instead of a symbolic tensor."""
        if not isinstance(value, SymbolicTensor):
            return value
        return self._originals[id(value)] if id(value) in self._originals else value.materialize()

    # Values.

    def _set(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Notes the value of a parameter that streams."""
        assert isinstance(value, SymbolicTensor)
        key = id(parameter)
        self.loaded.names.pop(key, None)
        if not parameter.is_contiguous():
            order = memory_order(parameter)
            require_dense(value.source.name, parameter)
            self.loaded.orders[key] = order
            value = value.permute(order).contiguous()
            assert isinstance(value, SymbolicTensor)
        source = value.source
        if not parameter.is_meta:
            source = replace(source, phase=parameter.data_ptr() % 64)
        value = SymbolicTensor(value.shape, value.dtype, source, self._builder, value.stride())
        self.loaded.parameters[key] = value

    def _copy(
        self, module: nn.Module, tensor: torch.Tensor, value: torch.Tensor, name: str
    ) -> None:
        """Notes the value of a tensor that stays in memory."""
        assert isinstance(value, SymbolicTensor)
        require_dense(name, tensor)
        self.loaded.copies.append((module, tensor, value))


def _fill(module: nn.Module, state: OrderedDict[str, Any], prefix: str) -> bool:
    """Gives the stand-ins of a module the values that ``_load_from_state_dict`` would copy.

    Returns whether it did: only if the method is that of ``nn.Module``, and each name has a tensor
    that can be taken as it is.
    """
    own = _local_state(module)
    plain = not _overrides(module, "_load_from_state_dict")
    if not plain or _overrides(module, "set_extra_state") or len(own) > len(state):
        return False
    for key in state:
        first, dot, _ = key[len(prefix) :].partition(".")
        known: Any = module._modules if dot else own
        if not key.startswith(prefix) or first not in known:
            return False
    values = {name: state.get(prefix + name) for name in own}
    for name, stand_in in own.items():
        value = values[name]
        if not (
            type(value) is type(stand_in) is SymbolicTensor
            and (value.shape, value.dtype) == (stand_in.shape, stand_in.dtype)
            and value.is_contiguous()
            and not stand_in.steps
        ):
            return False
    for name, stand_in in own.items():
        kept: Any = stand_in
        kept.symbolic_storage.write(values[name].source)  # type: ignore[union-attr]
    return True


def mismatch(
    checkpoint: _native.Checkpoint, tensor: torch.Tensor, key: str, order: Any = None
) -> CheckpointError:
    """Returns the error for a tensor with another shape or dtype than in the checkpoint."""
    dtype, shape, parts = checkpoint.entry(key)
    path = checkpoint.files()[parts[0][0]][0] if parts else "the checkpoint"
    at = f" at byte {parts[0][1]}" if parts else ""
    wanted = list(tensor.permute(order).shape) if order else list(tensor.shape)
    return CheckpointError(
        f"{path}: tensor `{key}`{at} is {dtype} {shape}, but the model has "
        f"{SAFETENSORS_DTYPES.get(tensor.dtype, tensor.dtype)} {wanted}"
    )


def require_dense(name: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor whose memory has gaps, or whose elements share memory."""
    if not tensor.detach().permute(memory_order(tensor)).is_contiguous():
        raise ModelError(
            f"cannot stream `{name}`: its memory has gaps or overlaps (strides "
            f"{list(tensor.stride())}); make it contiguous"
        )


def _in_memory(name: str, tensor: torch.Tensor, builder: Builder) -> SymbolicTensor:
    """Returns a symbolic tensor whose value is that of a tensor in memory."""
    source = Derived(name, in_memory, (tensor.detach(),), {}, None, 0)
    return SymbolicTensor(tensor.shape, tensor.dtype, source, builder)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, SymbolicTensor)


def _local_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and persistent buffers of a module."""
    own = {name: each for name, each in module._parameters.items() if each is not None}
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            own[name] = buffer  # type: ignore[assignment]
    return own  # type: ignore[return-value]


def _overrides(module: nn.Module, name: str) -> bool:
    """Returns whether a class, or a module itself, replaces a method of ``nn.Module``."""
    plain = getattr(nn.Module, name)
    return getattr(type(module), name, plain) is not plain or name in module.__dict__


def _has_loading_code(module: nn.Module) -> bool:
    return bool(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or _overrides(module, "_load_from_state_dict")
        or _overrides(module, "set_extra_state")
    )
