# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors that know where their bytes are instead of holding them.

A model's parameters are such tensors while it is offloaded. Before that they pass through the loader of
transformers, which renames, stacks and casts them as it would real ones; each such step is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from .errors import ModelError

aten = torch.ops.aten

#: safetensors dtype names and torch's. What torch lacks cannot be a parameter.
TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", None),  # type: ignore[dict-item]
}
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items() if dtype is not None}


@dataclass(frozen=True)
class Source:
    """Where a tensor's bytes lie: runs of the checkpoint's files, one behind the other.

    ``phase`` is the address modulo 64 that the reference gives it: ``None`` where it would use a mapping of the
    file, 0 where it would make a new tensor.
    """

    name: str
    parts: tuple[tuple[int, int, int], ...]
    phase: int | None = None


class Provider(Protocol):
    """Brings a placeholder's bytes in."""

    def materialize(self, key: int) -> torch.Tensor:
        """The real tensor; it stays valid for as long as it is referenced."""


class StreamedTensor(torch.Tensor):
    """Has the shape, dtype and device of a weight, and its bytes only while an operation needs them."""

    source: Source
    provider: Provider | None
    key: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch itself does

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        source: Source,
        provider: Provider | None = None,
        key: int = -1,
    ) -> StreamedTensor:
        self: StreamedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=torch.device("cpu")
        )
        self.source, self.provider, self.key = source, provider, key
        return self

    def bound(self, provider: Provider, key: int) -> StreamedTensor:
        """This parameter's stand-in: materialises through ``provider``."""
        tensor = StreamedTensor(self.shape, self.dtype, self.source, provider, key)
        tensor._is_param = True
        return tensor

    def materialize(self) -> torch.Tensor:
        """The real tensor."""
        if self.provider is None:
            raise ModelError(f"tensor `{self.source.name}` has no bytes yet: the model is still being built")
        return self.provider.materialize(self.key)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in the stub
        return f"StreamedTensor({self.source.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    # torch answers these in C++, past the dispatcher, and only for plain tensors.

    def tolist(self) -> Any:
        return self.materialize().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.materialize().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.materialize().numpy().astype(dtype) if dtype else self.materialize().numpy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        copy: Any = torch.nn.Parameter(self.materialize().clone(), requires_grad=False)
        return copy.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = torch.nn.Parameter(self.materialize().clone(), requires_grad=False)
        memo[id(self)] = copy
        return copy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub describes the disabled one
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        symbolic = SYMBOLIC.get(func)
        if symbolic is not None:
            result = symbolic(*args, **kwargs)
            if result is not None:
                return result
        _refuse_writes(func, args, kwargs)
        real_args, real_kwargs = tree_map_only(StreamedTensor, StreamedTensor.materialize, (args, kwargs))
        return func(*real_args, **real_kwargs)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for i, formal in enumerate(func._schema.arguments):
        actual = args[i] if i < len(args) else kwargs.get(formal.name)
        for tensor in actual if isinstance(actual, list | tuple) else [actual]:
            if formal.is_write and isinstance(tensor, StreamedTensor):
                raise ModelError(
                    f"{func} would write to `{tensor.source.name}`, a streamed weight; restore(model) first"
                )


# --- operations that need no bytes; each returns None where it does need them ---


def _same(tensor: StreamedTensor, *_: object, **__: object) -> StreamedTensor:
    return StreamedTensor(tensor.shape, tensor.dtype, tensor.source, tensor.provider, tensor.key)


def _to_copy(tensor: StreamedTensor, **options: Any) -> StreamedTensor | None:
    if tensor.provider is not None:
        return None
    dtype = options.get("dtype") or tensor.dtype
    device = torch.device(options.get("device") or "cpu")
    if dtype != tensor.dtype:
        raise ModelError(
            f"tensor `{tensor.source.name}` is {tensor.dtype} in the checkpoint and {dtype} in the model: "
            "streaming with a change of dtype is not built yet; load with dtype='auto' or convert the checkpoint"
        )
    if device.type != "cpu":
        raise ModelError(f"tensor `{tensor.source.name}` is wanted on {device}: only the CPU is built yet")
    return _fresh(tensor.shape, tensor, [tensor])


def _clone(tensor: StreamedTensor, **_: object) -> StreamedTensor | None:
    return None if tensor.provider is not None else _fresh(tensor.shape, tensor, [tensor])


def _cat(tensors: Sequence[StreamedTensor], dim: int = 0) -> StreamedTensor | None:
    # Only along the first dimension do the bytes of the parts lie one behind the other.
    if not _unbound(tensors) or dim % tensors[0].dim() != 0:
        return None
    shape = [sum(t.shape[0] for t in tensors), *tensors[0].shape[1:]]
    return _fresh(shape, tensors[0], tensors)


def _stack(tensors: Sequence[StreamedTensor], dim: int = 0) -> StreamedTensor | None:
    if not _unbound(tensors) or dim != 0:
        return None
    return _fresh([len(tensors), *tensors[0].shape], tensors[0], tensors)


def _slice(
    tensor: StreamedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> StreamedTensor | None:
    begin, stop, step = slice(start, end, step).indices(tensor.shape[dim])
    if (begin, stop, step) == (0, tensor.shape[dim], 1):
        return _same(tensor)
    return None


def _unbound(tensors: Sequence[object]) -> bool:
    return all(isinstance(t, StreamedTensor) and t.provider is None for t in tensors)


def _fresh(shape: Sequence[int], like: StreamedTensor, pieces: Sequence[StreamedTensor]) -> StreamedTensor:
    """A tensor that the reference would allocate: at a multiple of 64, its bytes those of the pieces."""
    parts = tuple(part for piece in pieces for part in piece.source.parts)
    return StreamedTensor(shape, like.dtype, replace(like.source, parts=parts, phase=0))


SYMBOLIC: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.slice.Tensor: _slice,
    aten._to_copy.default: _to_copy,
    aten.clone.default: _clone,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
}
