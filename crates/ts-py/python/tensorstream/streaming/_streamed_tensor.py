# SPDX-License-Identifier: MIT OR Apache-2.0
"""What PyTorch sees of a streamed weight: a stand-in without bytes, and the weight itself while it
is lent.

A stand-in is a module's parameter whenever the module's own forward does not run. An operation on
it leases the weight for as long as the operation takes; a view of it is another stand-in, so
nothing that a program keeps holds memory. Neither class has a ``__torch_function__``: PyTorch asks
for one to decide whether its fast paths may be taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from ..errors import BudgetError, ModelError
from ._weights import Weights

FIRST = "a streamed weight cannot be changed; restore(model) first"

_native_torch: Any = torch._C
_requires_grad: Any = _native_torch.TensorBase.requires_grad
_NO_COPIES: dict[int, torch.Tensor] = {}

#: What is copied of the operands of one operation whose units are larger than the budget together:
#: so many bytes, or the budget's part in so many.
COPIED_BYTES = 64 << 10
COPIED_SHARE = 16

#: Geometries of views that were asked for before, by function, geometry and arguments.
_known_views: dict[Any, Any] = {}
_KNOWN_VIEWS = 4096


class StreamedTensor(torch.Tensor):
    """Has the shape, strides, dtype and device of a weight or of a view of it, and no bytes."""

    # As torch wants it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    weights: Weights
    #: Which of them it is, or is a view of.
    key: int

    def __new__(cls, *_: Any, **__: Any) -> StreamedTensor:
        # Libraries make a parameter's successor by calling its class.
        raise ModelError(f"a streamed weight cannot be moved or replaced: {FIRST}")

    @property
    def name(self) -> str:
        """The weight's name in the checkpoint."""
        return self.weights.specs[self.key].name

    # Untyped in the stub.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StreamedTensor({self.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not is_same(self, value):
            raise ModelError(f"the data of `{self.name}` cannot be set: {FIRST}")

    def detach(self) -> torch.Tensor:
        """The same weight, outside any graph."""
        offset = int(self.storage_offset())
        return stand_in(self.weights, self.key, self.dtype, self.shape, self.stride(), offset)

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are recorded for it. In a forward, whether they would be for the
        model's own parameter: PyTorch asks, and takes another path."""
        return bool(_requires_grad.__get__(self)) or (
            self.weights.learns(self.key) and self.weights.streamer.in_pass()
        )

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> StreamedTensor:
        """Notes that the weight is frozen; it cannot be unfrozen."""
        if not requires_grad:
            self.weights.freeze(self.key)
        elif not self.requires_grad:
            raise ModelError(
                f"`{self.name}` cannot require gradients: nothing could keep what a streamed "
                "weight learns; train an adapter (PEFT) on top, or restore(model) first"
            )
        return self

    # PyTorch answers these in C++, past the dispatcher, and only for tensors with memory.

    def copy(self) -> torch.Tensor:
        """The weight's value, in memory of its own."""
        with torch.no_grad():
            return self.clone(memory_format=torch.preserve_format)

    def tolist(self) -> Any:
        return self.copy().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """A copy, which is read-only: what is written to it would not reach the model."""
        return _read_only(self.copy().numpy(force=force))

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy().astype(dtype) if dtype else self.numpy()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.copy().__dlpack__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        copy: Any = nn.Parameter(self.copy(), requires_grad=False)
        return copy.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = nn.Parameter(self.copy(), requires_grad=False)
        memo[id(self)] = copy
        return copy

    def data_ptr(self) -> int:
        raise self._no_memory("data_ptr()")

    def untyped_storage(self) -> Any:
        raise self._no_memory("untyped_storage()")

    def storage(self) -> Any:
        raise self._no_memory("storage()")

    def share_memory_(self) -> Any:
        raise self._no_memory("share_memory_()")

    def _no_memory(self, what: str) -> ModelError:
        return ModelError(
            f"{what} of `{self.name}`: a streamed weight has no memory that lasts; restore(model) "
            "first, or use tensorstream.save_file(model.state_dict(), path) to write a streamed "
            "model"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub describes the disabled one
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.ops.aten.copy_.default
            and type(args[0]) is StreamedTensor
            and is_same(args[0], args[1])
        ):
            return args[0]
        _refuse_writes(func, args, kwargs)
        if func.is_view and type(args[0]) is StreamedTensor:
            view = _view(func, args, kwargs)
            if view is not None:
                return view
        return _run(func, args, kwargs)


def stand_in(
    weights: Weights,
    key: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int = 0,
    requires_grad: bool = False,
) -> StreamedTensor:
    """Makes the stand-in of a weight or of a view of it."""
    # An inference tensor, whatever mode the caller is in, could not be part of a graph.
    with torch.inference_mode(False):
        made: StreamedTensor = torch.Tensor._make_wrapper_subclass(
            StreamedTensor,
            shape,
            strides,
            offset,
            dtype=dtype,
            device=torch.device("cpu"),
            requires_grad=requires_grad,
        )
    made.weights, made.key = weights, key
    return made


def stand_ins(weights: Weights, key: int) -> tuple[StreamedTensor, StreamedTensor | None]:
    """A weight's stand-ins: one that requires no gradient, and one that does if the model's own
    did.
    """
    spec = weights.specs[key]

    def make(requires_grad: bool) -> StreamedTensor:
        made = stand_in(
            weights, key, spec.dtype, spec.shape, spec.strides, requires_grad=requires_grad
        )
        made._is_param = True
        return made

    return make(False), make(True) if spec.requires_grad else None


class StreamedWeight(nn.Parameter):
    """A weight that is lent to its module's forward: an ordinary parameter, but writes are refused
    or found.

    What shares its memory by ``data`` or ``detach()`` shares its version counter, which is looked
    at when the forward ends.
    """

    # As torch wants it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is not self:
            raise ModelError(f"the data of a streamed weight cannot be set: {FIRST}")

    def detach(self) -> torch.Tensor:
        """The same memory, outside any graph."""
        return torch.Tensor._make_subclass(_Detached, self, False)

    def numpy(self, *, force: bool = False) -> Any:
        """The weight's memory, read-only."""
        with torch._C.DisableTorchFunctionSubclass():
            return _read_only(torch.Tensor.numpy(self, force=force))

    def __dlpack__(self, **kwargs: Any) -> Any:
        """A copy, which its consumer may write to."""
        with torch._C.DisableTorchFunctionSubclass():
            return (
                torch.Tensor.detach(self)
                .clone(memory_format=torch.preserve_format)
                .__dlpack__(**kwargs)
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = nn.Parameter(
            torch.Tensor.detach(self).clone(memory_format=torch.preserve_format), self.requires_grad
        )
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        copy: Any = self.__deepcopy__({})
        return copy.__reduce_ex__(protocol)


class _Detached(torch.Tensor):
    """What ``StreamedWeight.detach`` gives, and views of it: none becomes a writable array."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if type(result) is torch.Tensor and result.layout == torch.strided:
            memory = result.untyped_storage()._cdata
            own = [each for each in args if type(each) is cls]
            if any(torch.Tensor.untyped_storage(each)._cdata == memory for each in own):
                return torch.Tensor._make_subclass(cls, result, False)
        return result

    data = StreamedWeight.data
    detach = StreamedWeight.detach
    numpy = StreamedWeight.numpy
    __dlpack__ = StreamedWeight.__dlpack__

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copy = torch.Tensor.detach(self).clone(memory_format=torch.preserve_format)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        copy: Any = self.__deepcopy__({})
        return copy.__reduce_ex__(protocol)


def is_same(own: StreamedTensor, value: Any) -> bool:
    """Whether a value is the very weight or view that a stand-in stands for."""

    def geometry(tensor: torch.Tensor) -> Any:
        return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    same = type(value) is StreamedTensor and value.weights is own.weights and value.key == own.key
    return same and geometry(value) == geometry(own)


def unlent(result: Any, weights: Weights, use: Any) -> Any:
    """A result in which stand-ins take the place of tensors that share memory with weights, whose
    use has ended.
    """
    found = {address: key for key, address, _ in use.addresses(weights.streamer)}

    def replaced(leaf: Any) -> Any:
        plain = (
            isinstance(leaf, torch.Tensor)
            and leaf.layout == torch.strided
            and type(leaf) is not StreamedTensor
        )
        if not plain or leaf.device.type != "cpu" or leaf.grad_fn is not None:
            return leaf
        try:
            key = found.get(leaf.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
            return leaf
        if key is None:
            return leaf
        if leaf.is_conj() or leaf.is_neg():  # a stand-in has no mark for that
            return leaf.resolve_conj().resolve_neg()
        return stand_in(weights, key, leaf.dtype, leaf.shape, leaf.stride(), leaf.storage_offset())

    return tree_map(replaced, result)


def _read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function that may give a view, as stand-ins; ``None`` where it has to run."""
    base = args[0]
    geometry = base.dtype, tuple(base.shape), base.stride(), base.storage_offset()
    elements = base.weights.elements(base.key, base.dtype)
    key: Any = (func, geometry, elements, args[1:], tuple(sorted(kwargs.items())))
    try:
        known = _known_views.get(key, ())
    except TypeError:  # an argument that has no hash, such as a list
        key = repr(key)
        known = _known_views.get(key, ())
    if known == ():
        known = _trial(func, geometry, elements, args, kwargs)
        if len(_known_views) < _KNOWN_VIEWS:
            _known_views[key] = known
    if known is None:
        return None
    several, views = known
    made = [stand_in(base.weights, base.key, *view) for view in views]
    return made if several else made[0]


def _trial(
    func: Any, geometry: Any, elements: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, list[Any]] | None:
    """The geometries of the views that a function gives, found without bytes; ``None`` where it
    gives others.
    """
    dtype, shape, strides, offset = geometry
    memory = torch.empty(elements, dtype=dtype, device="meta")
    try:
        outcome = func(memory.as_strided(shape, strides, offset), *args[1:], **kwargs)
    except (
        NotImplementedError,
        RuntimeError,
    ):  # its result depends on the values, or it fails: it does so when it runs
        return None
    several = isinstance(outcome, list | tuple)
    views = list(outcome) if several else [outcome]
    storage = memory.untyped_storage()._cdata

    def looks(view: Any) -> bool:
        return (
            isinstance(view, torch.Tensor)
            and view.device.type == "meta"
            and view.untyped_storage()._cdata == storage
            and not (view.is_conj() or view.is_neg())
        )

    if not all(looks(view) for view in views):
        return None
    return several, [
        (view.dtype, tuple(view.shape), view.stride(), view.storage_offset()) for view in views
    ]


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the weights themselves, which are leased together for as long as it
    takes.
    """
    nested = kwargs or any(isinstance(each, list | tuple | dict) for each in args)
    leaves = tree_flatten((args, kwargs))[0] if nested else args
    streamed = [leaf for leaf in leaves if type(leaf) is StreamedTensor]
    uses: dict[Weights, Any] = {}
    try:
        copies = _lease(streamed, uses)
        result = _call(func, args, kwargs, uses, copies, nested)
    except BaseException:
        for use in uses.values():
            use.close()
        raise
    for weights, use in uses.items():
        if use.exit():
            result = unlent(result, weights, use)
            use.close()
    return result


def _lease(streamed: list[StreamedTensor], uses: dict[Weights, Any]) -> dict[int, torch.Tensor]:
    """Leases the units of stand-ins, those of one model together.

    Where they are larger than the budget together, what is small of it is leased alone and copied:
    views such as a row of a weight. The copies are returned, by the stand-ins' identity.
    """
    if len(streamed) == 1:
        weights = streamed[0].weights
        uses[weights] = weights.streamer.hold([weights.specs[streamed[0].key].unit])
        return _NO_COPIES
    copies: dict[int, torch.Tensor] = {}
    for weights in {each.weights for each in streamed}:
        own = [each for each in streamed if each.weights is weights]
        unit = {id(each): weights.specs[each.key].unit for each in own}
        own.sort(key=lambda each: (_extent_bytes(each), unit[id(each)]))
        room = max(COPIED_BYTES, weights.budget_bytes // COPIED_SHARE)
        while own:
            try:
                uses[weights] = weights.streamer.hold(
                    list(dict.fromkeys(unit[id(each)] for each in own))
                )
                break
            except BudgetError:
                room -= _extent_bytes(own[0])
                if room < 0 or len(own) == 1:
                    raise
                smallest = own.pop(0)
                copies[id(smallest)] = _copied(smallest, unit[id(smallest)])
    return copies


def _extent_bytes(tensor: torch.Tensor) -> int:
    """The bytes from a tensor's first element to its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _copied(tensor: StreamedTensor, unit: int) -> torch.Tensor:
    """A weight or a view of it, in memory of its own, at the same address modulo 64."""
    with contextlib.closing(tensor.weights.streamer.hold([unit])) as use:
        real = _real(tensor, use, torch.is_grad_enabled())
        element = real.element_size()
        memory = torch.empty(_extent_bytes(real) // element + 64 // element, dtype=real.dtype)
        skip = (real.data_ptr() - memory.data_ptr()) % 64 // element
        copy = memory.as_strided(real.shape, real.stride(), skip)
        torch.Tensor.copy_(copy, torch.Tensor.detach(real))
        return copy.detach().requires_grad_(real.requires_grad)


def _real(tensor: StreamedTensor, use: Any, grad: bool) -> torch.Tensor:
    """The weight or the view that a stand-in stands for."""
    weights = tensor.weights
    weight: torch.Tensor = use.weight(weights.streamer, tensor.key, grad)
    shape, strides, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    if tensor.dtype != weight.dtype:
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(torch.Tensor.untyped_storage(weight), offset, shape, strides)
    if offset or shape != weight.shape or strides != weight.stride():
        return weight.as_strided(shape, strides, offset)
    return weight


def _call(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    uses: dict[Weights, Any],
    copies: dict[int, torch.Tensor],
    nested: Any,
) -> Any:
    # The weights are referred to from this frame alone.
    grad = torch.is_grad_enabled()

    def real(tensor: StreamedTensor) -> torch.Tensor:
        copy = copies.get(id(tensor))
        return _real(tensor, uses[tensor.weights], grad) if copy is None else copy

    # As views of parameters are for the caller: that they require gradients decides how matmul
    # rounds.
    with _native_torch._RestorePythonTLSSnapshot():
        if nested:
            args, kwargs = tree_map_only(StreamedTensor, real, (args, kwargs))
        else:
            args = tuple([real(each) if type(each) is StreamedTensor else each for each in args])
        autocasts = torch.is_autocast_enabled("cpu")
        keys = _dispatch_keys() if autocasts or torch.is_inference_mode_enabled() else None
    if func.is_view:
        # A view that no stand-in can be, such as a conjugate: a copy without the mark, and no
        # inference tensor, which could not be a view of the stand-in.
        with torch.inference_mode(False), torch.no_grad():
            views = func(*args, **kwargs)
            return tree_map_only(
                torch.Tensor, lambda each: each.detach().resolve_conj().resolve_neg(), views
            )
    if keys is None:
        return func(*args, **kwargs)
    with _as_called(func, autocasts, keys):
        return func(*args, **kwargs)


def _dispatch_keys() -> tuple[Any, Any]:
    """The keys of the dispatcher that are included and excluded on this thread."""
    return (
        _native_torch._dispatch_tls_local_include_set(),
        _native_torch._dispatch_tls_local_exclude_set(),
    )


def _as_called(func: Any, autocasts: bool, called: tuple[Any, Any]) -> Any:
    """The dispatcher as the caller of an operation has it.

    Here all keys above Python's are excluded. In inference mode an operation gets here before it is
    taken apart: views in it would not require gradients as they do in memory, so that matmul rounds
    otherwise. And what autocast does not know itself consists of parts that it casts.
    """
    include, exclude = called if torch.is_inference_mode_enabled() else _dispatch_keys()
    autocast = _native_torch.DispatchKeySet(_native_torch.DispatchKey.AutocastCPU)
    if autocasts and not _native_torch._dispatch_has_kernel_for_dispatch_key(
        func.name(), "AutocastCPU"
    ):
        exclude = exclude - autocast
    else:
        exclude = exclude | autocast
    return _native_torch._ForceDispatchKeyGuard(include, exclude)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not func._schema.is_mutable:
        return
    for tensor in _written(func, args, kwargs):
        if type(tensor) is StreamedTensor:
            raise ModelError(f"{func} would write to `{tensor.name}`: {FIRST}")


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for i, formal in enumerate(func._schema.arguments):
        if formal.is_write:
            actual = args[i] if i < len(args) else kwargs.get(formal.name)
            yield from actual if isinstance(actual, list | tuple) else [actual]
