# SPDX-License-Identifier: MIT OR Apache-2.0
"""The tensors that represent streamed weights: stand-ins without memory, and leased weights.

A parameter of a module is a stand-in while the forward of the module does not run. An operation on
a stand-in leases the weight for the duration of the operation. Most views of a stand-in are other
stand-ins, so a program that keeps these views keeps no memory. Both classes disable
``__torch_function__``, because PyTorch otherwise skips its fast paths.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from ..errors import BudgetError, ModelError
from ._weights import Weights

RESTORE_FIRST = "a streamed weight cannot be changed; restore(model) first"
_CHANGE_IN_MEMORY = (
    f"{RESTORE_FIRST}, or change a model in memory, save it, and stream the saved model (also to "
    "merge an adapter, or to derive one from the weights as PiSSA does)"
)

#: Libraries that read the memory of tensors to write them to files.
_WRITERS = ("accelerate", "huggingface_hub", "safetensors")

_native_torch: Any = torch._C
_requires_grad: Any = _native_torch.TensorBase.requires_grad
_NO_COPIES: dict[int, torch.Tensor] = {}

#: If the units of an operation together exceed the budget, small operands are copied: in total, at
#: most ``COPIED_BYTES``, or the budget divided by ``COPIED_DIVISOR`` if that is more.
COPIED_BYTES = 64 << 10
COPIED_DIVISOR = 16

#: A cache of the geometries of views, by function, geometry of the base, and arguments.
_view_cache: dict[Any, Any] = {}
_VIEW_CACHE_SIZE = 4096


class StreamedTensor(torch.Tensor):
    """A stand-in for a weight, or for a view of it. Has no memory."""

    # With this value, PyTorch does not call `__torch_function__`. Type checkers expect a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    weights: Weights
    #: The key of the weight.
    key: int
    #: Whether it is the parameter of a module, and not a view or a copy of it.
    is_parameter = False
    #: Of a parameter that requires no gradients, the one for the same weight that does, if any.
    trainable: StreamedTensor | None = None
    #: The weight in a mapped file, once a library has asked for its memory to write it to a file.
    mapping: torch.Tensor | None = None
    #: Of a parameter that requires gradients, the one for the same weight that does not.
    frozen: weakref.ref[StreamedTensor] | None = None

    def __new__(cls, *_: Any, **__: Any) -> StreamedTensor:
        # Libraries call the class of a parameter to create its replacement.
        raise ModelError(f"cannot move or replace a streamed weight: {RESTORE_FIRST}")

    @property
    def name(self) -> str:
        """The name of the weight in the checkpoint."""
        return self.weights.specs[self.key].name

    # The stub of PyTorch declares this method without types.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StreamedTensor({self.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not is_same(self, value):
            raise ModelError(f"cannot set the data of `{self.name}`: {_CHANGE_IN_MEMORY}")

    def detach(self) -> torch.Tensor:
        """Returns a stand-in of the same weight without autograd history."""
        offset = int(self.storage_offset())
        return stand_in(self.weights, self.key, self.dtype, self.shape, self.stride(), offset)

    @property
    def requires_grad(self) -> bool:
        """Whether autograd records operations on the stand-in.

        In a pass, also true if the original parameter requires gradients, because modules of
        PyTorch choose kernels by this property.
        """
        return bool(_requires_grad.__get__(self)) or (
            self.weights.requires_grad(self.key) and self.weights.streamer.in_pass()
        )

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> StreamedTensor:
        """Freezes the weight if ``requires_grad`` is false. A frozen weight stays frozen.

        Raises:
            ModelError: The argument is true, but the property ``requires_grad`` is false.
        """
        if not requires_grad:
            self.weights.freeze(self.key)
        elif not self.requires_grad:
            raise ModelError(
                f"`{self.name}` cannot require gradients: a streamed weight is never updated; "
                "train an adapter (PEFT) on top, or restore(model) first"
            )
        return self

    def copy(self) -> torch.Tensor:
        """Returns a copy of the weight in memory."""
        with torch.no_grad():
            return self.clone(memory_format=torch.preserve_format)

    # PyTorch's own versions of the following methods need the memory of the tensor.

    def tolist(self) -> Any:
        return self.copy().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a copy. It is read-only, because writes to it would not reach the model."""
        return _read_only(self.copy().numpy(force=force))

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy().astype(dtype) if dtype else self.numpy()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.copy().__dlpack__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        spec = self.weights.specs[self.key]
        whole = (spec.dtype, spec.shape, spec.strides)
        is_whole = (self.dtype, tuple(self.shape), self.stride()) == whole
        # A program that pickles all weights keeps all of these tensors.
        values: Any = self.weights.mapped(self) if is_whole else self.copy()
        if getattr(self, "_is_param", False):
            values = nn.Parameter(values, requires_grad=False)
        return values.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = nn.Parameter(self.copy(), requires_grad=False)
        memo[id(self)] = copy
        return copy

    def data_ptr(self) -> int:
        return self._mapped("data_ptr()").data_ptr() + int(self.storage_offset()) * self.itemsize

    def untyped_storage(self) -> Any:
        return self._mapped("untyped_storage()").untyped_storage()

    def storage(self) -> Any:
        mapped: Any = self._mapped("storage()")
        return mapped.storage()

    def _mapped(self, what: str) -> torch.Tensor:
        """Returns the weight in a mapped file, for libraries that write tensors to files.

        The mapping exists as long as the stand-in. The memory is that of the page cache.

        Raises:
            ModelError: Another caller wants the memory, and may write to it.
        """
        caller: Any = sys._getframe(2).f_globals.get("__name__", "")
        if caller.partition(".")[0] not in _WRITERS:
            raise self._no_memory(what)
        if self.mapping is None:
            self.mapping = self.weights.mapped(self)
        return self.mapping

    def share_memory_(self) -> Any:
        raise self._no_memory("share_memory_()")

    def _no_memory(self, what: str) -> ModelError:
        return ModelError(
            f"{what} of `{self.name}` failed: a streamed weight has no permanent memory; "
            "restore(model) first, or save the model with "
            "tensorstream.save_file(model.state_dict(), path)"
        )

    # The stub of PyTorch describes the disabled method, which has another signature.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Parametrizations set a parameter to itself.
        if (
            func in (torch.ops.aten.copy_.default, torch.ops.aten.set_.source_Tensor)
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
    """Creates a stand-in for a weight or for a view of it."""
    # Under inference mode, the stand-in would be an inference tensor, which autograd does not
    # support.
    with torch.inference_mode(False):
        made: StreamedTensor = torch.Tensor._make_wrapper_subclass(
            StreamedTensor,
            shape,
            strides,
            offset,
            dtype=dtype,
            device=weights.device,
            requires_grad=requires_grad,
        )
    made.weights, made.key = weights, key
    return made


def parameter_of(weights: Weights, key: int) -> StreamedTensor:
    """Creates the stand-in that is the parameter of a module, which requires no gradients.

    If the original parameter requires gradients, its attribute ``trainable`` is one that does, too.
    """
    spec = weights.specs[key]

    def make(requires_grad: bool) -> StreamedTensor:
        made = stand_in(
            weights, key, spec.dtype, spec.shape, spec.strides, requires_grad=requires_grad
        )
        made._is_param = made.is_parameter = True
        return made

    frozen = make(False)
    if spec.requires_grad:
        frozen.trainable = make(True)
        frozen.trainable.frozen = weakref.ref(frozen)
    return frozen


class StreamedWeight(nn.Parameter):
    """A weight that the forward of its module leases.

    It is an ordinary parameter, but writes to it are refused or detected. ``data`` and ``detach()``
    share its memory and its version counter, which is compared when the forward ends.
    """

    # With this value, PyTorch does not call `__torch_function__`. Type checkers expect a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is not self:
            raise ModelError(f"cannot set the data of a streamed weight: {_CHANGE_IN_MEMORY}")

    def detach(self) -> torch.Tensor:
        """Returns a tensor on the same memory without autograd history."""
        return torch.Tensor._make_subclass(_Detached, self, False)

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a read-only array on the memory of the weight."""
        with torch._C.DisableTorchFunctionSubclass():
            return _read_only(torch.Tensor.numpy(self, force=force))

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Exports a copy, which the consumer may write to."""
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
    """A result of ``StreamedWeight.detach``, or a view of it. NumPy arrays of it are read-only."""

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
    """Returns whether a value is a stand-in for the same weight or view as ``own``."""

    def geometry(tensor: torch.Tensor) -> Any:
        return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    same = type(value) is StreamedTensor and value.weights is own.weights and value.key == own.key
    return same and geometry(value) == geometry(own)


def replace_weights(result: Any, weights: Weights, use: Any) -> Any:
    """Replaces tensors of a result if they share memory with leased weights.

    They become stand-ins, or copies if they are lazily conjugated or negated. Tensors with an
    autograd history are not replaced.
    """
    keys = {address: key for key, address, _ in use.addresses(weights.streamer)}

    def replaced(leaf: Any) -> Any:
        plain = (
            isinstance(leaf, torch.Tensor)
            and leaf.layout == torch.strided
            and type(leaf) is not StreamedTensor
        )
        if not plain or leaf.device != weights.device or leaf.grad_fn is not None:
            return leaf
        try:
            key = keys.get(leaf.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # a tensor without a storage
            return leaf
        if key is None:
            return leaf
        if leaf.is_conj() or leaf.is_neg():  # a stand-in has no bits for these
            return leaf.resolve_conj().resolve_neg()
        return stand_in(weights, key, leaf.dtype, leaf.shape, leaf.stride(), leaf.storage_offset())

    return tree_map(replaced, result)


def _read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the results of a view function as stand-ins, or ``None`` if the function must run."""
    base = args[0]
    geometry = base.dtype, tuple(base.shape), base.stride(), base.storage_offset()
    elements = base.weights.elements(base.key, base.dtype)
    key: Any = (func, geometry, elements, args[1:], tuple(sorted(kwargs.items())))
    try:
        known = _view_cache.get(key, ())
    except TypeError:  # an unhashable argument, such as a list
        key = repr(key)
        known = _view_cache.get(key, ())
    if known == ():
        known = _infer_views(func, geometry, elements, args, kwargs)
        if len(_view_cache) < _VIEW_CACHE_SIZE:
            _view_cache[key] = known
    if known is None:
        return None
    is_sequence, views = known
    made = [_view_stand_in(base, *view) for view in views]
    return made if is_sequence else made[0]


def _view_stand_in(
    base: StreamedTensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
) -> StreamedTensor:
    """Creates a stand-in for a view. If one slice contains the view, uses the key of the slice."""
    weights, key = base.weights, base.key
    divided = weights.divided(key)
    if divided is not None and 0 not in shape:
        row = weights.elements(key, dtype) // divided.shape[0]
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        index = divided.slice_of(offset // row)
        if index == divided.slice_of(last // row):
            key = divided.first_key + index
            offset -= divided.first_row(index) * row
    return stand_in(weights, key, dtype, shape, strides, offset)


def _infer_views(
    func: Any, geometry: Any, elements: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, list[Any]] | None:
    """Runs a function on the meta device to find the geometries of the views that it returns.

    Returns:
        Whether the result is a sequence, and the geometries. ``None`` if the function does not
        return plain views of its argument.
    """
    dtype, shape, strides, offset = geometry
    memory = torch.empty(elements, dtype=dtype, device="meta")
    try:
        outcome = func(memory.as_strided(shape, strides, offset), *args[1:], **kwargs)
    except (NotImplementedError, RuntimeError):
        # The result depends on values, or the function fails. If it fails here, it fails again when
        # it runs on the weight.
        return None
    is_sequence = isinstance(outcome, list | tuple)
    views = list(outcome) if is_sequence else [outcome]
    storage = memory.untyped_storage()._cdata

    def is_plain_view(view: Any) -> bool:
        return (
            isinstance(view, torch.Tensor)
            and view.device.type == "meta"
            and view.untyped_storage()._cdata == storage
            and not (view.is_conj() or view.is_neg())
        )

    if not all(is_plain_view(view) for view in views):
        return None
    return is_sequence, [
        (view.dtype, tuple(view.shape), view.stride(), view.storage_offset()) for view in views
    ]


#: Functions that run an operation on a divided weight with only the slices that it needs. They
#: return ``NotImplemented`` for arguments that they do not support.
rules: dict[Any, Callable[..., Any]] = {}


def with_slice(
    tensor: StreamedTensor, index: int, function: Callable[[torch.Tensor], object]
) -> None:
    """Calls a function with a slice of a divided weight, which is leased during the call.

    Args:
        tensor: A stand-in for the weight, or for a view of it whose first dimension is that of the
            slices. If the weight is divided into blocks, the function gets a block of the weight
            even if ``tensor`` is a view.
        index: The number of the slice.
        function: Its argument is a block, or the slice without the first dimension. The function
            must not keep this tensor.
    """
    weights, divided = tensor.weights, tensor.weights.divided(tensor.key)
    assert divided is not None, f"{tensor.name} is not divided"
    use = weights.streamer.hold([divided.first_unit + index])
    try:
        weight = use.weight(weights.streamer, divided.first_key + index, torch.is_grad_enabled())
        if divided.blocks is None:
            shape, strides, offset = tensor.shape[1:], tensor.stride()[1:], tensor.storage_offset()
            weight = weight.as_strided(shape, strides, offset)
        function(weight)
        del weight
    except BaseException:
        use.close()
        raise
    if use.exit():
        use.close()


def assembled(tensor: StreamedTensor, func: Any) -> torch.Tensor:
    """Returns a copy of a divided weight or of a view of it, at the same address modulo 64.

    Copies the slices from the first to the last one that the view needs. The copy is not part of
    the budget.

    Raises:
        BudgetError: The copy is larger than the budget, and ``func`` is neither a copy nor a cast.
    """
    divided = tensor.weights.divided(tensor.key)
    if divided is None:
        return tensor.clone(memory_format=torch.preserve_format)
    if tensor.numel() == 0:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    element = tensor.element_size()
    row = tensor.weights.elements(tensor.key, tensor.dtype) // divided.shape[0]
    offset = int(tensor.storage_offset())
    first = divided.slice_of(offset // row)
    last = divided.slice_of((offset + _extent_bytes(tensor) // element - 1) // row)
    begin = divided.first_row(first) * row
    keys = range(divided.first_key + first, divided.first_key + last + 1)
    lengths = [tensor.weights.elements(key, tensor.dtype) for key in keys]
    size = sum(lengths) * element
    if size > tensor.weights.budget_bytes and func not in _COPIES:
        raise BudgetError(
            f"{func} needs {size} bytes of `{tensor.name}` at once, with a budget of "
            f"{tensor.weights.budget_bytes} bytes; raise the budget to {size} bytes or more, or "
            "use a copy in memory, such as weight.clone()"
        )
    memory = torch.empty(sum(lengths) + 64 // element, dtype=tensor.dtype, device=tensor.device)
    at = skip = (divided.phase + begin * element - memory.data_ptr()) % 64 // element
    for key, length in zip(keys, lengths, strict=True):
        part = stand_in(tensor.weights, key, tensor.dtype, [length], [1], 0)
        memory[at : at + length].copy_(part)
        at += length
    return memory.as_strided(tensor.shape, tensor.stride(), skip + offset - begin)


_COPIES = {
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.to.dtype,
}


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on weights. Leases all their units for the duration of the operation."""
    nested = kwargs or any(isinstance(each, list | tuple | dict) for each in args)
    leaves = tree_flatten((args, kwargs))[0] if nested else args
    streamed = [leaf for leaf in leaves if type(leaf) is StreamedTensor]
    if any(each.weights.divided(each.key) for each in streamed):
        rule = rules.get(func)
        result = NotImplemented if rule is None else rule(*args, **kwargs)
        if result is NotImplemented:
            # The copies are dropped when the operation ends.
            whole = {id(each): assembled(each, func) for each in streamed}
            args, kwargs = tree_map_only(
                StreamedTensor, lambda each: whole[id(each)], (args, kwargs)
            )
            result = func(*args, **kwargs)
        return result
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
            result = replace_weights(result, weights, use)
            use.close()
    return result


def _lease(streamed: list[StreamedTensor], uses: dict[Weights, Any]) -> dict[int, torch.Tensor]:
    """Leases the units of stand-ins. All units of one model are leased together.

    If the units together exceed the budget, small operands, such as a row of a weight, are leased
    one after the other and copied.

    Returns:
        The copies, by ``id`` of the stand-in.
    """
    if len(streamed) == 1:
        weights = streamed[0].weights
        uses[weights] = weights.streamer.hold([weights.unit(streamed[0].key)])
        return _NO_COPIES
    copies: dict[int, torch.Tensor] = {}
    for weights in {each.weights for each in streamed}:
        own = [each for each in streamed if each.weights is weights]
        unit = {id(each): weights.unit(each.key) for each in own}
        own.sort(key=lambda each: (_extent_bytes(each), unit[id(each)]))
        room = max(COPIED_BYTES, weights.budget_bytes // COPIED_DIVISOR)
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
    """Returns the number of bytes from the first element of a tensor to its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _copied(tensor: StreamedTensor, unit: int) -> torch.Tensor:
    """Returns a copy of a weight, or of a view of it, at the same address modulo 64."""
    with contextlib.closing(tensor.weights.streamer.hold([unit])) as use:
        real = _real(tensor, use, torch.is_grad_enabled())
        element = real.element_size()
        count = _extent_bytes(real) // element + 64 // element
        memory = torch.empty(count, dtype=real.dtype, device=real.device)
        skip = (real.data_ptr() - memory.data_ptr()) % 64 // element
        copy = memory.as_strided(real.shape, real.stride(), skip)
        torch.Tensor.copy_(copy, torch.Tensor.detach(real))
        return copy.detach().requires_grad_(real.requires_grad)


def _real(tensor: StreamedTensor, use: Any, grad: bool) -> torch.Tensor:
    """Returns the leased weight, or the view of it, that a stand-in represents."""
    weights = tensor.weights
    weight: torch.Tensor = use.weight(weights.streamer, tensor.key, grad)
    shape, strides, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    if tensor.dtype != weight.dtype:
        view = torch.empty(0, dtype=tensor.dtype, device=weight.device)
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
    # Only this frame refers to the weights, so the references end when it returns.
    grad = torch.is_grad_enabled()

    def real(tensor: StreamedTensor) -> torch.Tensor:
        copy = copies.get(id(tensor))
        return _real(tensor, uses[tensor.weights], grad) if copy is None else copy

    # Uses the dispatcher state of the caller, so that views require gradients as in a model in
    # memory. matmul rounds differently for operands that require gradients.
    with _native_torch._RestorePythonTLSSnapshot():
        if nested:
            args, kwargs = tree_map_only(StreamedTensor, real, (args, kwargs))
        else:
            args = tuple([real(each) if type(each) is StreamedTensor else each for each in args])
        device_type = next(iter(uses)).device.type if uses else "cpu"
        autocasts = torch.is_autocast_enabled(device_type)
        keys = _dispatch_keys() if autocasts or torch.is_inference_mode_enabled() else None
    if func.is_view:
        # This is a view that a stand-in cannot represent, such as a conjugate. It is therefore
        # copied. Under inference mode, the copy would be an inference tensor, which cannot be a
        # view of the stand-in.
        with torch.inference_mode(False), torch.no_grad():
            views = func(*args, **kwargs)
            return tree_map_only(
                torch.Tensor, lambda each: each.detach().resolve_conj().resolve_neg(), views
            )
    if keys is None:
        return func(*args, **kwargs)
    with _caller_dispatch_state(func, _AUTOCAST.get(device_type, _OTHER_AUTOCAST), autocasts, keys):
        return func(*args, **kwargs)


#: The dispatch keys of autocast, by device type.
_AUTOCAST = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU"}
_OTHER_AUTOCAST = "AutocastPrivateUse1"


def _dispatch_keys() -> tuple[Any, Any]:
    """Returns the dispatch keys that are included and excluded on this thread."""
    return (
        _native_torch._dispatch_tls_local_include_set(),
        _native_torch._dispatch_tls_local_exclude_set(),
    )


def _caller_dispatch_state(func: Any, key: str, autocasts: bool, called: tuple[Any, Any]) -> Any:
    """Returns a context with the dispatcher state of the caller of an operation.

    In ``__torch_dispatch__``, all keys above ``Python`` are excluded. In inference mode, operations
    arrive before they are decomposed. In a model in memory, views inside such an operation can
    require gradients. Without the keys of the caller, they would not, and matmul would round
    differently.

    An operation without an autocast kernel decomposes into operations whose inputs autocast casts.
    Therefore autocast stays enabled for it.
    """
    include, exclude = called if torch.is_inference_mode_enabled() else _dispatch_keys()
    autocast = _native_torch.DispatchKeySet(getattr(_native_torch.DispatchKey, key))
    if autocasts and not _native_torch._dispatch_has_kernel_for_dispatch_key(func.name(), key):
        exclude = exclude - autocast
    else:
        exclude = exclude | autocast
    return _native_torch._ForceDispatchKeyGuard(include, exclude)


def _refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not func._schema.is_mutable:
        return
    for tensor in _written(func, args, kwargs):
        if type(tensor) is StreamedTensor:
            raise ModelError(
                f"cannot run {func}, which writes to `{tensor.name}`: {_CHANGE_IN_MEMORY}"
            )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for i, formal in enumerate(func._schema.arguments):
        if formal.is_write:
            actual = args[i] if i < len(args) else kwargs.get(formal.name)
            yield from actual if isinstance(actual, list | tuple) else [actual]
