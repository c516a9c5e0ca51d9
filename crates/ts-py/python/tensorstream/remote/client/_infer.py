# SPDX-License-Identifier: MIT OR Apache-2.0
"""Uses meta tensors to infer the results of operator calls that are not in the cache."""

from __future__ import annotations

from typing import Any

import torch

from ..._dtypes import SCALAR_TYPES
from ._kernels import kernel_of
from ._schema import functional, has_numbers
from ._views import is_ours, reshape


class _MetaArguments:
    """Converts arguments to meta tensors.

    If remote tensors share a storage, so do their meta tensors.
    """

    def __init__(self) -> None:
        #: The converted tensors, and their meta tensors in the same order.
        self.tensors: list[torch.Tensor] = []
        self.metas: list[torch.Tensor] = []
        self._storages: dict[int, torch.UntypedStorage] = {}

    def convert(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._convert_tensor(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.convert(item) for item in value)
        if isinstance(value, torch.device):
            return torch.device("meta")
        return value

    def _convert_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_ours(tensor):
            if tensor.dim() == 0:
                return tensor
            # A host tensor of indices, which is sent with the call.
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
    """Infers the results of an operator call.

    Returns:
        One of these:

        - A list with a description of each result, for ``RemoteKernel``.
        - None, if only the machine can determine the results, because they depend on elements or
          are not tensors.
        - True, if an argument was resized. The call must then be inferred again.
        - A tuple of the result, if the call was already made with another overload.

    Raises:
        Exception: The error that the operator raises for these arguments.
    """
    metas = _MetaArguments()
    meta_args = [metas.convert(value) for value in args]
    # The generator is on the machine, and the shapes of the results do not depend on it.
    meta_kwargs = {
        name: None if name == "generator" else metas.convert(value)
        for name, value in (kwargs or {}).items()
    }
    call: Any = op
    if has_numbers(op, meta_args):
        call = op.overloadpacket
    try:
        result = call(*meta_args, **meta_kwargs)
    except NotImplementedError:
        return _call_functional(op, args, kwargs or {})
    except RuntimeError as error:
        if "a meta tensor" not in str(error):
            raise
        return _call_functional(op, args, kwargs or {})
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
    new_storages: dict[int, int] = {}

    def describe(tensor: Any) -> Any:
        """Describes a result: an argument, a view of an argument, or a new tensor (see plan.rs)."""
        if tensor is None:
            return None
        key = tensor.untyped_storage()._cdata
        for position, meta in enumerate(metas.metas):
            if tensor is meta:
                return position
        for position, meta in enumerate(metas.metas):
            if meta.untyped_storage()._cdata == key:
                if _layout(meta) == _layout(tensor) and meta.dtype == tensor.dtype:
                    return position
                return position, list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        storage = new_storages.setdefault(key, len(new_storages))
        nbytes = tensor.untyped_storage().nbytes()
        layout = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        return SCALAR_TYPES[tensor.dtype], *layout, nbytes, storage

    descriptions: list[Any] = []
    for returned in returns:
        if isinstance(returned, (list, tuple)):
            descriptions.append([describe(item) for item in returned])
        elif returned is None or isinstance(returned, torch.Tensor):
            descriptions.append(describe(returned))
        else:
            return None
    return descriptions


def _call_functional(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls an ``out=`` operator whose result shapes depend on elements.

    Calls the overload without outputs, and copies its results to the outputs.

    Returns:
        A tuple of the result, or None if the operator has no outputs or no such overload.
    """
    outs = [argument.name for argument in op._schema.arguments if argument.is_out]
    if not outs:
        return None
    without_outs = functional(op)
    if without_outs is None:
        return None
    returned = kernel_of(without_outs)(
        *args, **{name: value for name, value in kwargs.items() if name not in outs}
    )
    results = returned if isinstance(returned, tuple) else (returned,)
    for name, result in zip(outs, results, strict=True):
        out = kwargs[name]
        if out.shape != result.shape:
            out.resize_(result.shape)
        out.copy_(result)
    targets = tuple(kwargs[name] for name in outs)
    return (targets if len(targets) > 1 else targets[0],)


def element(tensor: torch.Tensor) -> bytes:
    """Returns the bytes of a zero-dimensional tensor on the host."""
    return bytes(tensor.detach().resolve_conj().resolve_neg().reshape(1).view(torch.uint8).tolist())


def to_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Copies a host tensor to the device ``ts`` with this index, and returns the copy."""
    return tensor.to(torch.device("ts", index))
