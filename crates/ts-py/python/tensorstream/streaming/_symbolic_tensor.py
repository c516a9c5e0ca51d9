# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors that know where their bytes are instead of holding them, for a model that is being
loaded.

They pass through the loader of transformers, which renames, stacks and casts them as it would real
ones; each such step is recorded (_symbolic.py). Once the model is built, stand-ins of its weights
take their place (_streamed_tensor.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from ..errors import ModelError


@dataclass(frozen=True)
class Source:
    """Where a tensor's bytes lie: runs of the checkpoint's files (file, offset, length), one behind
    the other.

    ``phase`` is the address modulo 64 that the reference gives it: ``None`` where it would use a
    mapping of the file, 0 where it would make a new tensor.
    """

    name: str
    parts: tuple[tuple[int, int, int], ...]
    phase: int | None = None


@dataclass(frozen=True)
class Derived:
    """How a tensor is computed whose bytes lie in no file: an operation, and which of its results
    this is.

    ``phase`` is the address modulo 64 that the reference gives it.
    """

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None
    phase: int


class Provider(Protocol):
    """Reads or computes a symbolic tensor's bytes."""

    def materialize(self, tensor: SymbolicTensor) -> torch.Tensor:
        """The real tensor, in memory of its own."""


class Memory:
    """What symbolic tensors share that look at the same bytes: where the bytes come from, after all
    writes so far.
    """

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

    def write(self, source: Derived) -> None:
        """Gives the bytes another origin: what they were, and then a write."""
        self.source = source
        self.writes += 1


#: One step from a memory's own tensor to a view: a function, the arguments behind the tensor, and
#: by name.
ViewStep = tuple[Any, tuple[Any, ...], dict[str, Any], int | None]


class SymbolicTensor(torch.Tensor):
    """Has the shape, dtype and device of a tensor, and knows where its bytes come from."""

    provider: Provider
    memory: Memory
    #: How it is seen in its memory, if not as a whole.
    steps: tuple[ViewStep, ...]
    #: Its source as it was found last, and after how many writes to its memory.
    _seen: tuple[Source | Derived, int]

    # As torch wants it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        source: Source | Derived,
        provider: Provider,
        strides: Sequence[int] | None = None,
        memory: Memory | None = None,
        steps: tuple[ViewStep, ...] = (),
    ) -> SymbolicTensor:
        self: SymbolicTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides, dtype=dtype, device=torch.device("cpu")
        )
        self.provider, self.steps = provider, steps
        self.memory = Memory(source, shape, self.stride(), dtype) if memory is None else memory
        self._seen = source, self.memory.writes
        return self

    @property
    def source(self) -> Source | Derived:
        """Where its bytes come from now."""
        source, writes = self._seen
        if writes != self.memory.writes:
            memory = self.memory
            source = memory.source
            if self.steps:
                whole = SymbolicTensor(
                    memory.shape, memory.dtype, source, self.provider, memory.strides
                )
                phase = self._seen[0].phase or 0
                source = Derived(source.name, _seen_by, (whole, self.steps), {}, None, phase)
            self._seen = source, memory.writes
        return source

    def again(self) -> SymbolicTensor:
        """Another look at the same tensor."""
        return SymbolicTensor(
            self.shape,
            self.dtype,
            self.source,
            self.provider,
            self.stride(),
            self.memory,
            self.steps,
        )

    def materialize(self) -> torch.Tensor:
        """The real tensor."""
        return self.provider.materialize(self)

    # Untyped in the stub.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"SymbolicTensor({self.source.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"
        )

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        fits = (
            isinstance(value, SymbolicTensor)
            and value.provider is self.provider
            and value.dtype == self.dtype
        )
        if not fits or (value.shape, value.stride()) != (self.shape, self.stride()):
            raise ModelError(
                f"`{self.source.name}` is being loaded: its data can only be set to another tensor "
                "of the checkpoint, of its shape and dtype"
            )
        other: Any = value
        self.memory, self.steps, self._seen = (
            other.memory,
            other.steps,
            (other.source, other.memory.writes),
        )

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
        from ._symbolic import without_bytes

        kwargs = kwargs or {}
        result = without_bytes(func, args, kwargs)
        if result is not None:
            return result
        real_args, real_kwargs = tree_map_only(
            SymbolicTensor, SymbolicTensor.materialize, (args, kwargs)
        )
        return func(*real_args, **real_kwargs)


def _seen_by(whole: torch.Tensor, steps: tuple[ViewStep, ...]) -> torch.Tensor:
    """A view of a memory's own tensor."""
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
    """A memory's own tensor after a write to a view of it."""
    whole = whole.clone(memory_format=torch.preserve_format)
    func(_seen_by(whole, steps), *args, **kwargs)
    return whole
