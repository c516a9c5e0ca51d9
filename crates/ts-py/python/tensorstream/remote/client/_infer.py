# SPDX-License-Identifier: MIT OR Apache-2.0
"""What an operator will give, found out on meta tensors: called for what the cache of signatures
does not know.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._dtypes import SCALAR_TYPES
from ._kernels import kernel_of
from ._schema import functional, has_numbers
from ._views import is_ours, reshape


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
        return SCALAR_TYPES[given.dtype], *shape, nbytes, group

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
    without_outs = functional(op)
    if without_outs is None:
        return None
    given = kernel_of(without_outs)(
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


def element(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor without dimensions, on the host."""
    return bytes(tensor.detach().resolve_conj().resolve_neg().reshape(1).view(torch.uint8).tolist())


def to_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A copy of a tensor of the host."""
    return tensor.to(torch.device("ts", index))
