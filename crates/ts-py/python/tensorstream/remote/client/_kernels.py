# SPDX-License-Identifier: MIT OR Apache-2.0
"""The kernels of the device ``ts``.

Most operators that PyTorch implements for the CPU are sent to the machine by a
``_native.RemoteKernel``. Views are computed on this computer. The functions here implement
operators that create tensors, change their metadata, or copy between devices.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import _native
from .. import _registry
from . import _autocast, _encoder
from . import _server_operators as _operators
from ._composites import COMPOSITES
from ._direct import copy_directly, note_failure
from ._kernel import kernel
from ._schema import is_view, overload
from ._views import META, as_strided, flat_view, is_ours, replace, reshape

aten = torch.ops.aten

#: Keeps the libraries alive. PyTorch removes the kernels of a library when it is deleted.
_LIBRARIES: list[torch.library.Library] = []

#: Composite operators that are sent to the machine as one operator, because their decomposition, or
#: the strides of their results, depend on the device.
_UNDECOMPOSED = [
    "aten::convolution", "aten::convolution_backward", "aten::_convolution",
    "aten::abs", "aten::complex", "aten::isinf", "aten::polar",
    "aten::logical_and", "aten::logical_or", "aten::logical_xor",
]  # fmt: skip


def _contiguous_strides(sizes: Any) -> list[int]:
    strides, step = [0] * len(sizes), 1
    for dim in range(len(sizes) - 1, -1, -1):
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return strides


def _index(device: Any) -> int:
    index = _registry.index_of(None if device is None else device.index)
    if index < 0:  # PyTorch has one byte for it
        raise RuntimeError(f"invalid device {device}: the indices of devices are below 128")
    return index


def _empty(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:  # fmt: skip
    _require_sizes(size)
    if layout not in (None, torch.strided):
        raise RuntimeError(f"unsupported layout {layout} on the device ts: expected torch.strided")
    if memory_format in (None, torch.contiguous_format):
        strides: Any = _contiguous_strides(size)
    else:
        strides = torch.empty(size, device="meta", memory_format=memory_format).stride()
    return _native.remote_empty(_index(device), size, strides, dtype or torch.get_default_dtype())


def _empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> torch.Tensor:
    _require_sizes(size)
    return _native.remote_empty(_index(device), size, stride, dtype or torch.get_default_dtype())


def _require_sizes(size: Sequence[int]) -> None:
    """Requires that no size is negative.

    Raises:
        RuntimeError: One is. The message is PyTorch's.
    """
    if size and min(size) < 0:
        raise RuntimeError(
            f"Trying to create tensor with negative dimension {min(size)}: {list(size)}"
        )


def _copy(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Implements ``copy_``.

    PyTorch's own kernel would call ``_copy_from``, whose schema does not say that it writes, so the
    copy would be made to a resolved copy of a tensor that is lazily conjugated or negated.
    """
    return tensor if tensor is source else _copy_from(source, tensor, non_blocking)


def _as_strided(
    tensor: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> torch.Tensor:
    return as_strided(
        tensor, size, stride, tensor.storage_offset() if storage_offset is None else storage_offset
    )


def _resize(tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    if tuple(tensor.shape) != tuple(size):
        meta = torch.empty(
            size,
            dtype=tensor.dtype,
            device="meta",
            memory_format=memory_format or torch.contiguous_format,
        )
        offset = tensor.storage_offset()
        nbytes = (
            meta.untyped_storage().nbytes() + offset * tensor.element_size() if meta.numel() else 0
        )
        reshape(tensor, meta.shape, meta.stride(), offset, nbytes)
    return tensor


def _bytes(tensor: torch.Tensor) -> Any:
    """Returns a DLPack capsule of the bytes of a contiguous host tensor."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return torch._C._to_dlpack(flat.view(torch.uint8))


def upload(source: torch.Tensor, to: torch.Tensor) -> None:
    """Copies a host tensor to a contiguous remote tensor of the same shape and dtype."""
    if source.numel():
        _native.remote_upload(to, _bytes(source.resolve_conj().resolve_neg().contiguous()))


def download(source: torch.Tensor, to: torch.Tensor) -> None:
    """Copies a remote tensor to a contiguous host tensor of the same shape and dtype. Blocks."""
    if source.numel():
        _native.remote_download(materialize(source), _bytes(to))


def materialize(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without lazy conjugation or negation. A copy keeps the strides."""
    if tensor.is_conj():
        tensor = aten.conj_physical.default(tensor.conj())
    if tensor.is_neg():
        tensor = aten.neg.default(tensor._neg_view())
    return tensor


def _copy_from(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if source.shape != to.shape:
        source = source.expand(to.shape)
    if is_ours(source) and is_ours(to):
        source = materialize(source)
        if to.is_neg() or to.is_conj():
            return _copy_to_lazy(source, to)
        source_machine = _registry.ADDRESSES.get(source.device.index)
        target_machine = _registry.ADDRESSES.get(to.device.index)
        if (
            source_machine is None
            or target_machine is None
            or source_machine[0] == target_machine[0]
        ):
            _COPY(to, source)
        else:
            reason = copy_directly(source, to)
            if reason is not None:
                host = torch.empty(source.shape, dtype=source.dtype)
                download(source, host)
                _copy_from(host, to)
                # The machine has the tensor, so it was the copy that failed.
                note_failure(source, to, reason)
        return to
    if is_ours(to):
        if to.is_neg() or to.is_conj():
            return _copy_to_lazy(source.to(to.device), to)
        if source.dtype == to.dtype and to.is_contiguous():
            upload(source.cpu(), to)
            return to
        # Converts on the side with the wider dtype, so that fewer bytes are sent.
        source = source.to(to.dtype) if source.element_size() > to.element_size() else source
        staged = _native.remote_empty(
            to.device.index, source.shape, _contiguous_strides(source.shape), source.dtype
        )
        upload(source.cpu(), staged)
        _COPY(to, staged)
        return to
    direct = to.device.type == "cpu" and source.dtype == to.dtype and to.is_contiguous()
    host = (
        to
        if direct and not to.is_conj() and not to.is_neg()
        else torch.empty(source.shape, dtype=source.dtype)
    )
    download(source, host)
    if host is not to:
        to.copy_(host)
    return to


def _copy_to_lazy(source: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Copies to a tensor that is lazily conjugated or negated."""
    if to.is_conj():
        source, target = aten.conj_physical.default(source), to.conj()
    else:
        source, target = aten.neg.default(source), to._neg_view()
    _copy_from(source, target)
    return to


def _copy_from_and_resize(source: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    if source.shape != to.shape:
        to.resize_(source.shape)
    return _copy_from(source, to)


def _local_scalar_dense(tensor: torch.Tensor) -> Any:
    value = _native.remote_scalar(materialize(tensor))
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=tensor.dtype)[0].item()
    return value


def _set_empty(tensor: torch.Tensor) -> torch.Tensor:
    replace(tensor, _native.remote_empty(tensor.device.index, [0], [1], tensor.dtype))
    return tensor


def _set_storage(tensor: torch.Tensor, source: torch.UntypedStorage) -> torch.Tensor:
    replace(tensor, flat_view(source, tensor.dtype))
    return tensor


def _set_storage_offset(
    tensor: torch.Tensor,
    source: torch.UntypedStorage,
    storage_offset: int,
    size: Any,
    stride: Any = (),
) -> torch.Tensor:
    strides = list(stride) or _contiguous_strides(size)
    end = storage_offset + sum((n - 1) * step for n, step in zip(size, strides, strict=True)) + 1
    flat = flat_view(source, tensor.dtype)
    if 0 not in size and end > flat.numel():
        nbytes = end * tensor.element_size()
        flat = _native.remote_whole(
            source.device.index, source.data_ptr(), nbytes, tensor.dtype, True
        )
    replace(tensor, as_strided(flat, size, strides, storage_offset))
    return tensor


def _set_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    replace(tensor, as_strided(source, source.shape, source.stride(), source.storage_offset()))
    return tensor


def _view_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    like = aten.view.dtype(
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), dtype
    )
    old, new = tensor.element_size(), like.element_size()
    flat = flat_view(tensor.untyped_storage(), dtype)
    return as_strided(flat, like.shape, like.stride(), tensor.storage_offset() * old // new)


def _to_copy(
    tensor: torch.Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False, memory_format: Any = None,
) -> torch.Tensor:  # fmt: skip
    # Ignores `non_blocking`: host memory is filled when this returns.
    if device is None:
        device = tensor.device
    format_of = torch.preserve_format if memory_format is None else memory_format
    copied = torch.empty_like(tensor, dtype=dtype, device=device, memory_format=format_of)
    return copied.copy_(tensor)


def _clone(tensor: torch.Tensor, *, memory_format: Any = None) -> torch.Tensor:
    return _CLONE(
        materialize(tensor), **({} if memory_format is None else {"memory_format": memory_format})
    )


def _histc(tensor: torch.Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> torch.Tensor:
    """Counts integers too, as a GPU does: programs choose them for every device but the CPU."""
    if tensor.dtype.is_floating_point or not _registry.runs_on_cpu(tensor.device.index):
        return _HISTC(tensor, bins, min, max)
    return _HISTC(tensor.double(), bins, min, max).to(tensor.dtype)


def _efficientzerotensor(size: Any, **options: Any) -> torch.Tensor:
    return _empty(size, **options)


def _record_stream(tensor: torch.Tensor, stream: Any) -> None:
    """Does nothing: a machine frees memory in the order in which operators are called."""


#: The operators that are implemented here.
_IMPLEMENTED: dict[str, Callable[..., Any]] = {
    "aten::empty.memory_format": _empty,
    "aten::empty_strided": _empty_strided,
    "aten::as_strided": _as_strided,
    "aten::resize_": _resize,
    "aten::copy_": _copy,
    "aten::_copy_from": _copy_from,
    "aten::_copy_from_and_resize": _copy_from_and_resize,
    "aten::_local_scalar_dense": _local_scalar_dense,
    "aten::set_": _set_empty,
    "aten::set_.source_Tensor": _set_tensor,
    "aten::set_.source_Storage": _set_storage,
    "aten::set_.source_Storage_storage_offset": _set_storage_offset,
    "aten::view.dtype": _view_dtype,
    "aten::clone": _clone,
    "aten::_to_copy": _to_copy,
    "aten::record_stream": _record_stream,
    "aten::histc": _histc,
    "aten::_nested_tensor_from_mask": _encoder.nested_from_mask,
    "aten::_nested_tensor_from_mask_left_aligned": _encoder.is_left_aligned,
    "aten::_efficientzerotensor": _efficientzerotensor,
}

# Operators that the functions above send to the machine.
_COPY = kernel(aten.copy_.default)
_CLONE = kernel(aten.clone.default)
_HISTC = kernel(aten.histc.default)


@functools.cache
def kernel_of(op: torch._ops.OpOverload) -> _native.RemoteKernel:
    """Returns the ``kernel`` of an operator, and caches it."""
    return kernel(op)


def _fallback(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Runs operators of other libraries, and those that PyTorch does not implement for the CPU."""
    return kernel_of(op)(*args, **kwargs)


#: By dispatch key: tensors that the device does not support, and what to use instead.
_UNSUPPORTED = {
    "SparsePrivateUse1": (
        "sparse tensors",
        "use to_dense(), or nn.Embedding(sparse=False) for dense gradients",
    ),
    "SparseCsrPrivateUse1": ("sparse tensors", "use to_dense()"),
    "NestedTensorPrivateUse1": (
        "nested tensors of strided layout",
        "use nested tensors of layout=torch.jagged",
    ),
    "QuantizedPrivateUse1": ("quantized tensors", "use dequantize()"),
}


def _unsupported(tensors: str, instead: str) -> Callable[..., Any]:
    def refuse(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{op}: the device ts does not support {tensors}; {instead}")

    return refuse


_draw_lock = threading.Lock()


def draw(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs an operator that draws from a generator of the host. Blocks.

    The machine draws from its own generator, which starts with the state of the host's generator.
    Afterwards, the host's generator gets the new state.

    Raises:
        RuntimeError: The generator is for another type of device than that of the machine.
    """
    if "generator" not in kwargs:
        # A positional generator is the last argument.
        *args, kwargs = *args[:-1], {**kwargs, "generator": args[-1]}
    generator = kwargs["generator"]
    values = (*args, *kwargs.values())
    tensor = next(
        (value for value in values if isinstance(value, torch.Tensor) and is_ours(value)), None
    )
    index = _index(kwargs.get("device")) if tensor is None else tensor.device.index
    kind = _registry.KINDS.get(index, "cpu")
    # Only CPU machines have generators of the device.
    if kind != generator.device.type.replace("ts", "cpu"):
        raise RuntimeError(
            f"{op}: the generator is for {generator.device}, but the machine runs operators on "
            f'{kind}; pass torch.Generator("{kind}")'
        )
    of_device = _operators.anchor(index)
    with _draw_lock:
        _operators.SEND_GENERATOR(of_device, generator.get_state().to(of_device.device))
        result = kernel_of(op)(*args, **{**kwargs, "generator": "given"})
        generator.set_state(_operators.RECEIVE_GENERATOR(of_device).cpu())
    return result


def register() -> None:
    """Registers all kernels with PyTorch."""
    library = torch.library.Library("aten", "IMPL")
    names = [
        name
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
        if name.startswith("aten::")
    ]
    for name in {*names, *_UNDECOMPOSED, *_IMPLEMENTED}:
        op = overload(name)
        if op is None:
            continue
        if name in _IMPLEMENTED:
            run = _IMPLEMENTED[name]
        elif is_view(op):
            run = functools.partial(op.redispatch, META)
        else:
            run = kernel(op)
        library.impl(name.removeprefix("aten::"), run, "PrivateUse1")
    for name, run in COMPOSITES.items():
        library.impl(name, run, "PrivateUse1")
        library.impl(name, run, "AutogradPrivateUse1")
    _autocast.register(library)
    fallbacks = torch.library.Library("_", "IMPL")
    fallbacks.fallback(_fallback, "PrivateUse1")
    fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for key, (tensors, instead) in _UNSUPPORTED.items():
        fallbacks.fallback(_unsupported(tensors, instead), key)
    _LIBRARIES.extend([library, fallbacks])
