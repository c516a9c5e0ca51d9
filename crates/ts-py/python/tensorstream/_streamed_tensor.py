# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors that know where their bytes are instead of holding them.

A model's parameters are such tensors while it is offloaded. Before that they pass through the loader of
transformers, which renames, stacks and casts them as it would real ones; each such step is recorded
(_symbolic.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from ._functions import asks_about, writes
from .errors import ModelError

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
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", None),  # type: ignore[dict-item]  # not in torch 2.6
}
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items() if dtype is not None}


@dataclass(frozen=True)
class Source:
    """Where a tensor's bytes lie: runs of the checkpoint's files (file, offset, length), one behind the other.

    ``phase`` is the address modulo 64 that the reference gives it: ``None`` where it would use a mapping of the
    file, 0 where it would make a new tensor.
    """

    name: str
    parts: tuple[tuple[int, int, int], ...]
    phase: int | None = None


@dataclass(frozen=True)
class Derived:
    """How a tensor is computed whose bytes lie in no file: an operation, and which of its results this is.

    ``phase`` is the address modulo 64 that the reference gives it.
    """

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None
    phase: int


class Provider(Protocol):
    """Brings a stand-in's bytes in."""

    #: Whether operations are recorded rather than run.
    symbolic: bool

    def materialize(self, tensor: StreamedTensor) -> torch.Tensor:
        """The real tensor; it stays valid for as long as it is referenced."""

    def discard(self, tensor: StreamedTensor) -> None:
        """Somebody wrote to the real tensor: its bytes are read anew for the next use."""


class StreamedTensor(torch.Tensor):
    """Has the shape, dtype and device of a weight, and its bytes only while an operation needs them."""

    source: Source | Derived
    provider: Provider
    #: Which of its provider's weights it is, once it has its place in a model.
    key: int

    #: All tensors that look at the same bytes while a model is being built, this one too.
    aliases: list[weakref.ref[StreamedTensor]]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        source: Source | Derived,
        provider: Provider,
        key: int = -1,
        strides: Sequence[int] | None = None,
        aliases: list[weakref.ref[StreamedTensor]] | None = None,
    ) -> StreamedTensor:
        self: StreamedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides, dtype=dtype, device=torch.device("cpu")
        )
        self.source, self.provider, self.key = source, provider, key
        self.aliases = [] if aliases is None else aliases
        self.aliases.append(weakref.ref(self))
        return self

    def again(self) -> StreamedTensor:
        """Another look at the same tensor."""
        return StreamedTensor(
            self.shape, self.dtype, self.source, self.provider, self.key, self.stride(), self.aliases
        )

    def is_aliased(self) -> bool:
        """Whether other tensors look at the same bytes."""
        others = [alias for alias in self.aliases if alias() is not None and alias() is not self]
        return bool(others)

    def bound(self, provider: Provider, key: int) -> StreamedTensor:
        """This parameter's stand-in: materialises through ``provider``."""
        # An inference tensor, whatever mode the caller is in, could not be part of a graph.
        with torch.inference_mode(False):
            tensor = StreamedTensor(self.shape, self.dtype, self.source, provider, key, self.stride())
        tensor._is_param = True
        return tensor

    def materialize(self) -> torch.Tensor:
        """The real tensor."""
        return self.provider.materialize(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in the stub
        return f"StreamedTensor({self.source.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        fits = isinstance(value, StreamedTensor) and value.provider is self.provider and value.dtype == self.dtype
        if not fits or (value.shape, value.stride()) != (self.shape, self.stride()):
            raise ModelError(f"`{self.source.name}` is streamed: its data cannot be set; restore(model) first")
        self.source = value.source  # type: ignore[attr-defined]  # just checked

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
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Gives operations the real weights where no gradients are recorded, before torch takes them apart.

        It takes them apart by what their operands say: matmul folds a batch, and so rounds otherwise, for a weight
        that requires a gradient. Where gradients are recorded the graph had better hold stand-ins.
        """
        kwargs = kwargs or {}
        used: list[tuple[StreamedTensor, torch.Tensor]] = []

        def real(tensor: StreamedTensor) -> torch.Tensor:
            if tensor.provider.symbolic:
                return tensor
            used.append((tensor, tensor.materialize()))
            return used[-1][1]

        if args and writes(func):
            for leaf in tree_flatten(args[0])[0]:
                if isinstance(leaf, StreamedTensor) and not leaf.provider.symbolic:
                    raise ModelError(
                        f"{func} would write to `{leaf.source.name}`, a streamed weight; restore(model) first"
                    )
        if not (torch.is_grad_enabled() or asks_about(func) or kwargs.get("out") is not None):
            args, kwargs = tree_map_only(StreamedTensor, real, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        for tensor, bytes_of_it in used:
            if bytes_of_it._version != 0:
                tensor.provider.discard(tensor)
                raise ModelError(f"{func} wrote to `{tensor.source.name}`, a streamed weight; restore(model) first")
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub describes the disabled one
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from ._symbolic import without_bytes

        kwargs = kwargs or {}
        _refuse_writes(func, args, kwargs)
        result = without_bytes(func, args, kwargs)
        if result is not None:
            return result
        real_args, real_kwargs = tree_map_only(StreamedTensor, StreamedTensor.materialize, (args, kwargs))
        return func(*real_args, **real_kwargs)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for i, formal in enumerate(func._schema.arguments):
        actual = args[i] if i < len(args) else kwargs.get(formal.name)
        for tensor in actual if isinstance(actual, list | tuple) else [actual]:
            if formal.is_write and isinstance(tensor, StreamedTensor) and not tensor.provider.symbolic:
                raise ModelError(
                    f"{func} would write to `{tensor.source.name}`, a streamed weight; restore(model) first"
                )
