# SPDX-License-Identifier: MIT OR Apache-2.0
"""Kernels of the device: of each of PyTorch's operators that has one for the CPU; and those that
are not simply asked of the machine."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from ... import _native
from .. import _registry
from . import _autocast
from ._composites import COMPOSITES
from ._schema import is_view, overload, returns, tensor_places
from ._trace import LOG
from ._views import META, as_strided, is_ours, replace, reshape, whole

aten = torch.ops.aten

#: PyTorch forgets kernels with the library that they are of.
_LIBRARIES: list[torch.library.Library] = []

#: Operators of which an argument may be on the host: indices.
_TAKES_HOST = {
    f"aten::{name}"
    for name in (
        "index.Tensor", "index.Tensor_out", "_unsafe_index.Tensor", "index_put", "index_put_",
        "_index_put_impl_",
        "_unsafe_index_put",
    )
}  # fmt: skip

#: Operators that give something else on a CPU than on meta tensors, which depends on their
#: arguments' shapes alone: what they gave is known the next time.
_LEARNED = {
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
    "_batch_norm_with_update", "_batch_norm_no_update", "_embedding_bag",
    "_embedding_bag_forward_only",
    "mkldnn_rnn_layer", "multilabel_margin_loss_forward", "native_layer_norm",
    "native_layer_norm_backward",
    "native_batch_norm_backward", "batch_norm_backward",
}  # fmt: skip

#: Composite operators that go to the machine whole: what they are made of differs from device to
#: device.
_WHOLE = ["aten::convolution", "aten::convolution_backward", "aten::_convolution"]


def kernel(op: torch._ops.OpOverload) -> _native.RemoteKernel:
    """What PyTorch is to call for an operator."""
    name = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    kinds = [str(argument.type) for argument in op._schema.arguments]
    without = not any("Tensor" in kind for kind in kinds)
    learned = op._schema.name.removeprefix("aten::") in _LEARNED
    tensors = tensor_places(op)
    # Some that are learned write to arguments of which their schemas do not say so.
    writes = learned or op._schema.is_mutable
    unnamed = [a.name for a in op._schema.arguments if not a.kwarg_only]
    generator = unnamed.index("generator") if "generator" in unnamed else None
    takes_host = name in _TAKES_HOST
    return _native.RemoteKernel(
        name, op, without, takes_host, learned, writes, generator, tensors, returns(op)
    )


# What is not simply asked.


def _contiguous(sizes: Any) -> list[int]:
    strides, step = [0] * len(sizes), 1
    for at in range(len(sizes) - 1, -1, -1):
        strides[at] = step
        step *= max(sizes[at], 1)
    return strides


def _index(device: Any) -> int:
    return _registry.index_of(None if device is None else device.index)


def _empty(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:  # fmt: skip
    if layout not in (None, torch.strided):
        raise RuntimeError(f"tensors of layout {layout} cannot be on a device of tensorstream")
    if memory_format in (None, torch.contiguous_format):
        strides: Any = _contiguous(size)
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
    return _native.remote_empty(_index(device), size, stride, dtype or torch.get_default_dtype())


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
    """A capsule of a tensor's bytes: contiguous, on the host."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return torch._C._to_dlpack(flat.view(torch.uint8))


def upload(source: torch.Tensor, to: torch.Tensor) -> None:
    """Copies a tensor of the host to one of the device that is like it and contiguous."""
    if source.numel():
        _native.remote_upload(to, _bytes(source.resolve_conj().resolve_neg().contiguous()))


def download(source: torch.Tensor, to: torch.Tensor) -> None:
    """The elements of a tensor of the device come to one of the host that is like it and
    contiguous.
    """
    if source.numel():
        _native.remote_download(plain(source), _bytes(to))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, as they are: what is only noted - that they are conjugate, or negative -
    is done.

    They lie as a CPU has them then, for some operators round otherwise where they lie otherwise.
    """
    if not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    memory_format = suggest_memory_format(tensor)
    if tensor.is_conj():
        tensor = aten.conj_physical.default(tensor.conj())
    if tensor.is_neg():
        tensor = aten.neg.default(tensor._neg_view())
    return tensor.contiguous(memory_format=memory_format)


def _copy_from(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if source.shape != to.shape:
        source = source.expand(to.shape)
    if is_ours(source) and is_ours(to):
        source = plain(source)
        if to.is_neg() or to.is_conj():
            return _copy_noted(source, to)
        one = _registry.ADDRESSES.get(source.device.index)
        other = _registry.ADDRESSES.get(to.device.index)
        if one is None or other is None or one[0] == other[0]:
            _COPY(to, source)
        elif not _fetched(source, to, one[1], other[1]):
            host = torch.empty(source.shape, dtype=source.dtype)
            download(source, host)
            _copy_from(host, to)
        return to
    if is_ours(to):
        if to.is_neg() or to.is_conj():
            return _copy_noted(source.to(to.device), to)
        if source.dtype == to.dtype and to.is_contiguous():
            upload(source.cpu(), to)
            return to
        # What is narrower travels.
        source = source.to(to.dtype) if source.element_size() > to.element_size() else source
        there = _native.remote_empty(
            to.device.index, source.shape, _contiguous(source.shape), source.dtype
        )
        upload(source.cpu(), there)
        _COPY(to, there)
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


#: Pairs of addresses of which the second could not fetch from the first, and when that is tried
#: again.
_APART: dict[tuple[str, str], float] = {}
_APART_SECONDS = 60.0


def _fetched(source: torch.Tensor, to: torch.Tensor, one: str, other: str) -> bool:
    """Copies from one machine to another without a way through this process.

    Whether that could be done.
    """
    if _APART.get((one, other), 0.0) > time.monotonic() or not source.numel():
        return False
    ticket = _OFFER(source)
    try:
        why = _FETCH(to, one, ticket)
    finally:
        _WITHDRAW(source, ticket)
    if why:
        _APART[one, other] = time.monotonic() + _APART_SECONDS
        LOG.info("copies from %s to %s go by way of this process: %s", one, other, why)
    return not why


def _copy_noted(source: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Copies to a tensor that PyTorch only marks as conjugate or negative."""
    if to.is_conj():
        source, to_plain = aten.conj_physical.default(source), to.conj()
    else:
        source, to_plain = aten.neg.default(source), to._neg_view()
    _copy_from(source, to_plain)
    return to


def _copy_from_and_resize(source: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    if source.shape != to.shape:
        to.resize_(source.shape)
    return _copy_from(source, to)


def _local_scalar_dense(tensor: torch.Tensor) -> Any:
    value = _native.remote_scalar(plain(tensor))
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=tensor.dtype)[0].item()
    return value


def _set_empty(tensor: torch.Tensor) -> torch.Tensor:
    replace(tensor, _native.remote_empty(tensor.device.index, [0], [1], tensor.dtype))
    return tensor


def _set_storage(tensor: torch.Tensor, source: torch.UntypedStorage) -> torch.Tensor:
    replace(tensor, whole(source, tensor.dtype))
    return tensor


def _set_storage_offset(
    tensor: torch.Tensor,
    source: torch.UntypedStorage,
    storage_offset: int,
    size: Any,
    stride: Any = (),
) -> torch.Tensor:
    strides = list(stride) or _contiguous(size)
    reach = storage_offset + sum((n - 1) * step for n, step in zip(size, strides, strict=True)) + 1
    there = whole(source, tensor.dtype)
    if 0 not in size and reach > there.numel():
        needed = reach * tensor.element_size()
        there = _native.remote_whole(
            source.device.index, source.data_ptr(), needed, tensor.dtype, True
        )
    replace(tensor, as_strided(there, size, strides, storage_offset))
    return tensor


def _set_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    replace(tensor, as_strided(source, source.shape, source.stride(), source.storage_offset()))
    return tensor


def _view_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    like = aten.view.dtype(
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), dtype
    )
    old, new = tensor.element_size(), like.element_size()
    there = whole(tensor.untyped_storage(), dtype)
    return as_strided(there, like.shape, like.stride(), tensor.storage_offset() * old // new)


def _to_copy(
    tensor: torch.Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False, memory_format: Any = None,
) -> torch.Tensor:  # fmt: skip
    # Whether it is waited for is not the caller's to say: memory of the host is filled when this
    # returns.
    if device is None:
        device = tensor.device
    format_of = torch.preserve_format if memory_format is None else memory_format
    copied = torch.empty_like(tensor, dtype=dtype, device=device, memory_format=format_of)
    return copied.copy_(tensor)


def _clone(tensor: torch.Tensor, *, memory_format: Any = None) -> torch.Tensor:
    return _CLONE(
        plain(tensor), **({} if memory_format is None else {"memory_format": memory_format})
    )


def _efficientzerotensor(size: Any, **options: Any) -> torch.Tensor:
    return _empty(size, **options)


def _record_stream(tensor: torch.Tensor, stream: Any) -> None:
    raise RuntimeError(
        "a device of tensorstream has no streams: operators are done in the order in which they "
        "are called"
    )


_MANUAL: dict[str, Callable[..., Any]] = {
    "aten::empty.memory_format": _empty,
    "aten::empty_strided": _empty_strided,
    "aten::as_strided": _as_strided,
    "aten::resize_": _resize,
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
    "aten::_efficientzerotensor": _efficientzerotensor,
}

#: Asked of the machine by kernels above.
_COPY = kernel(aten.copy_.default)
_CLONE = kernel(aten.clone.default)

# Operators of the machine's own, which PyTorch knows nothing of.
_OWN = torch.library.Library("tensorstream", "DEF")
_OWN.define("manual_seed(Tensor anchor, int seed) -> ()")
_OWN.define("rng_state(Tensor anchor) -> Tensor")
_OWN.define("set_rng_state(Tensor anchor, Tensor state) -> ()")
_OWN.define("give_generator(Tensor anchor, Tensor state) -> ()")
_OWN.define("given_generator(Tensor anchor) -> Tensor")
_OWN.define("kind(Tensor anchor) -> str")
_OWN.define("devices(Tensor anchor) -> int")
_OWN.define("offer(Tensor tensor) -> str")
_OWN.define("withdraw(Tensor anchor, str ticket) -> ()")
_OWN.define("claim(Tensor anchor, str ticket) -> Tensor")
_OWN.define("fetch(Tensor(a!) into, str address, str ticket) -> str")
_OWN.impl("withdraw", lambda anchor, ticket: None, "Meta")
_OWN.impl("manual_seed", lambda anchor, seed: None, "Meta")
_OWN.impl("set_rng_state", lambda anchor, state: None, "Meta")
_OWN.impl("give_generator", lambda anchor, state: None, "Meta")
KIND = kernel(torch.ops.tensorstream.kind.default)
DEVICES = kernel(torch.ops.tensorstream.devices.default)
CLAIM = kernel(torch.ops.tensorstream.claim.default)
_OFFER = kernel(torch.ops.tensorstream.offer.default)
_WITHDRAW = kernel(torch.ops.tensorstream.withdraw.default)
_FETCH = kernel(torch.ops.tensorstream.fetch.default)
SEED = kernel(torch.ops.tensorstream.manual_seed.default)
RNG_STATE = kernel(torch.ops.tensorstream.rng_state.default)
SET_RNG_STATE = kernel(torch.ops.tensorstream.set_rng_state.default)
_GIVE = kernel(torch.ops.tensorstream.give_generator.default)
_GIVEN = kernel(torch.ops.tensorstream.given_generator.default)


@functools.cache
def kernel_of(op: torch._ops.OpOverload) -> _native.RemoteKernel:
    """As :func:`kernel`, once for each."""
    return kernel(op)


def _fallback(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Operators of other libraries, and those that have no kernel for the CPU."""
    return kernel_of(op)(*args, **kwargs)


#: Kinds of tensors that a machine does not have, by the key under which PyTorch asks for them; and
#: what does instead.
_ABSENT = {
    "SparsePrivateUse1": ("sparse tensors", "gradients are dense with nn.Embedding(sparse=False)"),
    "SparseCsrPrivateUse1": ("sparse tensors", "to_dense() makes one that can be there"),
    "NestedTensorPrivateUse1": (
        "nested tensors of strided layout",
        "those of layout=torch.jagged can be there",
    ),
    "QuantizedPrivateUse1": ("quantized tensors", "dequantize() makes one that can be there"),
}


def _absent(what: str, instead: str) -> Callable[..., Any]:
    def refuse(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{op}: a device of tensorstream has no {what}; {instead}")

    return refuse


_drawing = threading.Lock()


def draw(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator that draws from a generator of the host's: the machine draws from one that is in
    its state, and what state that is in then is waited for."""
    if "generator" not in kwargs:
        # It is the last of them where it has no name.
        *args, kwargs = *args[:-1], {**kwargs, "generator": args[-1]}
    generator = kwargs["generator"]
    values = (*args, *kwargs.values())
    tensor = next(
        (value for value in values if isinstance(value, torch.Tensor) and is_ours(value)), None
    )
    index = _index(kwargs.get("device")) if tensor is None else tensor.device.index
    if _registry.KINDS.get(index, "cpu") != generator.device.type:
        raise RuntimeError(
            f"{op}: a generator of {generator.device}, and a machine that draws as "
            f"{_registry.KINDS.get(index)} does"
        )
    anchor = torch.empty(0, dtype=torch.uint8, device=torch.device("ts", index))
    with _drawing:
        _GIVE(anchor, generator.get_state().to(anchor.device))
        given = kernel_of(op)(*args, **{**kwargs, "generator": "given"})
        generator.set_state(_GIVEN(anchor).cpu())
    return given


def register() -> None:
    """Tells PyTorch of all kernels."""
    own = torch.library.Library("aten", "IMPL")
    names = [
        name
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
        if name.startswith("aten::")
    ]
    for name in {*names, *_WHOLE, *_MANUAL}:
        op = overload(name)
        if op is None:
            continue
        if name in _MANUAL:
            run = _MANUAL[name]
        elif is_view(op):
            run = functools.partial(op.redispatch, META)
        else:
            run = kernel(op)
        own.impl(name.removeprefix("aten::"), run, "PrivateUse1")
    for name, run in COMPOSITES.items():
        own.impl(name, run, "PrivateUse1")
        own.impl(name, run, "AutogradPrivateUse1")
    _autocast.register(own)
    others = torch.library.Library("_", "IMPL")
    others.fallback(_fallback, "PrivateUse1")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for key, (what, instead) in _ABSENT.items():
        others.fallback(_absent(what, instead), key)
    _LIBRARIES.extend([own, others, _OWN])
