# SPDX-License-Identifier: MIT OR Apache-2.0
"""What an operator will give, found out on meta tensors: called for what the cache of signatures
does not know.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _native
from ._dtypes import NUMBERS, TAKES_NUMBERS

META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_as_strided = torch.ops.aten.as_strided.default


def as_strided(tensor: torch.Tensor, sizes: Any, strides: Any, offset: Any) -> torch.Tensor:
    """A view of a tensor of the device, below autograd."""
    return _as_strided.redispatch(META, tensor, sizes, strides, offset)


def is_ours(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "ts"


def replace(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """A tensor is what another is: its storage, shape and strides. It stays the same object."""
    tensor.data = other


def whole(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """Another tensor of a storage: all of it, in one dimension."""
    return _native.remote_whole(storage.device.index, storage.data_ptr(), storage.nbytes(), dtype)


def reshape(tensor: torch.Tensor, sizes: Any, strides: Any, offset: Any, nbytes: Any) -> None:
    """Gives a tensor another shape in its storage, which grows to ``nbytes`` if it has fewer."""
    storage, there = tensor.untyped_storage(), tensor
    if nbytes > storage.nbytes():
        there = _native.remote_whole(
            tensor.device.index, storage.data_ptr(), nbytes, tensor.dtype, True
        )
    replace(tensor, as_strided(there, sizes, strides, offset))


class _Metas:
    """Meta tensors that share storages as the tensors do that they stand for."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.metas: list[torch.Tensor] = []
        self._storages: dict[int, torch.UntypedStorage] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.of(item) for item in value)
        if isinstance(value, torch.device):
            return torch.device("meta")
        return value

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_ours(tensor):
            if tensor.dim() == 0:
                return tensor
            # Indices, which go there with the call.
            meta = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
        else:
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if key not in self._storages:
                self._storages[key] = torch.UntypedStorage(storage.nbytes(), device="meta")
            meta = torch.empty(0, dtype=tensor.dtype, device="meta")
            meta.set_(self._storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
            if tensor.is_conj():
                meta = meta.conj()
        self.tensors.append(tensor)
        self.metas.append(meta)
        return meta


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def infer(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """What each of an operator's returns will be, as a list for the kernel; None if only its
    elements say; True if arguments were given another shape, and it is to be asked again; a tuple
    of one thing, the result, if the operator was made of others.

    Raises what the operator raises for such arguments."""
    metas = _Metas()
    margs = [metas.of(value) for value in args]
    # A generator is the machine's.
    mkwargs = {
        name: None if name == "generator" else metas.of(value)
        for name, value in (kwargs or {}).items()
    }
    call: Any = op
    if has_numbers(op, margs):
        call = op.overloadpacket
    try:
        result = call(*margs, **mkwargs)
    except NotImplementedError:
        return _by_others(op, args, kwargs or {})
    except RuntimeError as error:
        if "a meta tensor" not in str(error):
            raise
        return _by_others(op, args, kwargs or {})
    resized = False
    for tensor, meta in zip(metas.tensors, metas.metas, strict=True):
        if is_ours(tensor) and _layout(tensor) != _layout(meta):
            shape, strides, offset = _layout(meta)
            reshape(tensor, shape, strides, offset, meta.untyped_storage().nbytes())
            resized = True
    if resized:
        return True
    returns = result if isinstance(result, tuple) else () if result is None else (result,)
    if len(op._schema.returns) == 1 and not isinstance(result, tuple):
        returns = (result,)
    groups: dict[int, int] = {}

    def leaf(given: Any) -> Any:
        if given is None:
            return None
        key = given.untyped_storage()._cdata
        for at, meta in enumerate(metas.metas):
            if given is meta:
                return at
        for at, meta in enumerate(metas.metas):
            if meta.untyped_storage()._cdata == key:
                if _layout(meta) == _layout(given) and meta.dtype == given.dtype:
                    return at
                return at, list(given.shape), list(given.stride()), given.storage_offset()
        group = groups.setdefault(key, len(groups))
        nbytes = given.untyped_storage().nbytes()
        shape = list(given.shape), list(given.stride()), given.storage_offset()
        return NUMBERS[given.dtype], *shape, nbytes, group

    plan: list[Any] = []
    for given in returns:
        if isinstance(given, (list, tuple)):
            plan.append([leaf(item) for item in given])
        elif given is None or isinstance(given, torch.Tensor):
            plan.append(leaf(given))
        else:
            return None
    return plan


def _by_others(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What only elements say: asked, or made of what is asked and copied to its place."""
    outs = [argument.name for argument in op._schema.arguments if argument.is_out]
    if not outs:
        return None
    functional = _functional(op)
    if functional is None:
        return None
    from ._kernels import kernel_of

    given = kernel_of(functional)(
        *args, **{name: value for name, value in kwargs.items() if name not in outs}
    )
    results = given if isinstance(given, tuple) else (given,)
    for name, result in zip(outs, results, strict=True):
        out = kwargs[name]
        if out.shape != result.shape:
            out.resize_(result.shape)
        out.copy_(result)
    targets = tuple(kwargs[name] for name in outs)
    return (targets if len(targets) > 1 else targets[0],)


def has_numbers(op: torch._ops.OpOverload, args: Any) -> bool:
    """Whether a number is in a tensor's place, of an operator that must not be called so."""
    return any(
        at < len(args) and isinstance(args[at], (bool, int, float, complex))
        for at in tensor_places(op)
    )


@functools.cache
def tensor_places(op: torch._ops.OpOverload) -> list[int]:
    """Places of arguments that are tensors, where a number must be known."""
    if op._schema.name.partition("::")[2] in TAKES_NUMBERS:
        return []
    return [
        at for at, argument in enumerate(op._schema.arguments) if str(argument.type) == "Tensor"
    ]


@functools.cache
def _functional(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator that returns what this one writes to its outputs."""
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    packet = op.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        if other is not op and [(a.name, str(a.type)) for a in other._schema.arguments] == wanted:
            return other
    return None


def element(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor without dimensions, on the host."""
    return bytes(tensor.detach().resolve_conj().resolve_neg().reshape(1).view(torch.uint8).tolist())


def to_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A copy of a tensor of the host."""
    return tensor.to(torch.device("ts", index))
