# SPDX-License-Identifier: MIT OR Apache-2.0
"""Symbolic tensors, which store the source of their bytes instead of the bytes.

The loader of transformers renames, stacks and casts symbolic tensors like real ones, and each step
is recorded (_symbolic.py). Once the model is built, stand-ins replace them (_streamed_tensor.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from ..errors import ModelError


@dataclass(frozen=True)
class Source:
    """A tensor whose bytes are in files: consecutive ranges (file, offset, length).

    ``phase`` is the address modulo 64 of the tensor in the reference, which is transformers' own
    loader or the model in memory. ``None`` stands for the phase of a mapped file, which is the
    offset of the first range modulo 64.
    """

    name: str
    parts: tuple[tuple[int, int, int], ...]
    phase: int | None = None


@dataclass(frozen=True)
class Derived:
    """A tensor that has to be computed: result ``index`` of an operation.

    ``phase`` is the address modulo 64 of the tensor in the reference.
    """

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None
    phase: int


class Provider(Protocol):
    """Reads or computes symbolic tensors."""

    def materialize(self, tensor: SymbolicTensor) -> torch.Tensor:
        """Returns the real tensor, in newly allocated memory."""

    def pieces(self, tensor: SymbolicTensor) -> Iterator[torch.Tensor]:
        """Yields the elements of a tensor in order, as flat tensors, small ones if possible."""


class SymbolicStorage:
    """Bytes that symbolic tensors share, and the source of these bytes after all writes so far."""

    def __init__(
        self,
        source: Source | Derived,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        dtype: torch.dtype,
    ) -> None:
        self.source = source
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.writes = 0

    def data_ptr(self) -> int:
        """Returns a number that identifies the storage, like the address of one with memory."""
        return id(self)

    def nbytes(self) -> int:
        """Returns the size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def write(self, source: Source | Derived) -> None:
        """Replaces the source after a write, and counts the write."""
        self.source = source
        self.writes += 1


#: A step from the tensor of a storage to a view: a function, its arguments after the tensor, its
#: keyword arguments, and the index of the result.
ViewStep = tuple[Any, tuple[Any, ...], dict[str, Any], int | None]


class SymbolicTensor(torch.Tensor):
    """A tensor that stores the source of its bytes instead of the bytes."""

    provider: Provider
    symbolic_storage: SymbolicStorage
    #: The steps from the tensor of the storage to this view.
    steps: tuple[ViewStep, ...]
    #: The source when it was last determined, and the number of writes at that time.
    _cached_source: tuple[Source | Derived, int]

    # With this value, PyTorch does not call `__torch_function__`. Type checkers expect a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        source: Source | Derived,
        provider: Provider,
        strides: Sequence[int] | None = None,
        symbolic_storage: SymbolicStorage | None = None,
        steps: tuple[ViewStep, ...] = (),
    ) -> SymbolicTensor:
        self: SymbolicTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides, dtype=dtype, device=torch.device("cpu")
        )
        self.provider, self.steps = provider, steps
        if symbolic_storage is None:
            symbolic_storage = SymbolicStorage(source, shape, self.stride(), dtype)
        self.symbolic_storage = symbolic_storage
        self._cached_source = source, symbolic_storage.writes
        return self

    @property
    def source(self) -> Source | Derived:
        """The source of the tensor's bytes, after all writes so far."""
        source, writes = self._cached_source
        storage = self.symbolic_storage
        if writes != storage.writes:
            source = storage.source
            if self.steps:
                whole = SymbolicTensor(
                    storage.shape, storage.dtype, source, self.provider, storage.strides
                )
                phase = self._cached_source[0].phase or 0
                source = Derived(source.name, view_of, (whole, self.steps), {}, None, phase)
            self._cached_source = source, storage.writes
        return source

    def alias(self) -> SymbolicTensor:
        """Returns another tensor with the same storage and geometry."""
        return SymbolicTensor(
            self.shape,
            self.dtype,
            self.source,
            self.provider,
            self.stride(),
            self.symbolic_storage,
            self.steps,
        )

    def materialize(self) -> torch.Tensor:
        """Returns the real tensor, in newly allocated memory."""
        return self.provider.materialize(self)

    # The stub of PyTorch declares this method without types.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"SymbolicTensor({self.source.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"
        )

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu":
            source = Derived(self.source.name, in_memory, (value.detach(),), {}, None, 0)
            value = SymbolicTensor(value.shape, value.dtype, source, self.provider, value.stride())
        fits = (
            isinstance(value, SymbolicTensor)
            and value.provider is self.provider
            and value.dtype == self.dtype
        )
        if not fits or (value.shape, value.stride()) != (self.shape, self.stride()):
            raise ModelError(
                f"cannot set the data of `{self.source.name}` while the model is being loaded: "
                "expected a tensor of the same checkpoint with the same shape, strides and dtype"
            )
        other: Any = value
        self.symbolic_storage, self.steps = other.symbolic_storage, other.steps
        self._cached_source = other.source, other.symbolic_storage.writes

    def untyped_storage(self) -> Any:
        """Returns the identity and the size of the storage, which has no memory."""
        return self.symbolic_storage

    def data_ptr(self) -> int:
        """Returns a number that is the same for the same storage, where memory has its address."""
        return self.symbolic_storage.data_ptr()

    # PyTorch's own versions of these methods need the memory of the tensor.

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

    # The stub of PyTorch describes the disabled method, which has another signature.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from ._symbolic import record

        kwargs = kwargs or {}
        result = record(func, args, kwargs)
        if result is not None:
            return result
        real_args, real_kwargs = tree_map_only(
            SymbolicTensor, SymbolicTensor.materialize, (args, kwargs)
        )
        return func(*real_args, **real_kwargs)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor. As the function of a ``Derived``, it is a value in memory."""
    return tensor.clone()


def without_value(name: str) -> torch.Tensor:
    """Refuses to return a value. The function of a ``Derived`` that nothing was written to.

    Raises:
        ModelError: Always.
    """
    raise ModelError(f"`{name}` has no value, because it is on the meta device")


def is_complete(source: Source | Derived) -> bool:
    """Returns whether the bytes of a tensor depend only on bytes that have a value."""
    pending, seen = [source], set()
    while pending:
        own = pending.pop()
        if isinstance(own, Source) or id(own) in seen:
            continue
        seen.add(id(own))
        if own.func is without_value:
            return False
        leaves = tree_flatten((own.args, own.kwargs))[0]
        pending += [leaf.source for leaf in leaves if isinstance(leaf, SymbolicTensor)]
    return True


def view_of(whole: torch.Tensor, steps: tuple[ViewStep, ...]) -> torch.Tensor:
    """Applies ``steps`` to ``whole``, the tensor of a storage, and returns the resulting view."""
    view = whole
    for func, args, kwargs, index in steps:
        outcome = func(view, *args, **kwargs)
        view = outcome if index is None else outcome[index]
    return view


def written_through(
    whole: torch.Tensor,
    steps: tuple[ViewStep, ...],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Applies ``func`` to a view of a copy of ``whole``, and returns the copy.

    ``whole`` is the tensor of a storage. ``steps`` lead to the view, which ``func`` writes to.
    """
    whole = whole.clone(memory_format=torch.preserve_format)
    func(view_of(whole, steps), *args, **kwargs)
    return whole
