# SPDX-License-Identifier: MIT OR Apache-2.0
"""The tensors that represent streamed weights: stand-ins without memory, and leased weights.

A parameter of a module is a stand-in while the forward of the module does not run. An operation on
a stand-in leases the weight for the duration of the operation. Most views of a stand-in are other
stand-ins, so a program that keeps these views keeps no memory. Both classes disable
``__torch_function__``, because PyTorch otherwise skips its fast paths.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from .. import _native
from .._exchange import exchange, swap
from ..errors import BudgetError, ModelError
from ._lists import one_by_one
from ._stand_in_memory import protect, require_no_tracing
from ._weights import Weights

RESTORE_FIRST = "a streamed weight cannot be changed; restore(model) first"
CHANGE_IN_MEMORY = (
    f"{RESTORE_FIRST}, or change a model in memory, save it, and stream the saved model; to merge "
    "adapters of PEFT, call tensorstream.merge(model, directory)"
)

#: Libraries that read the memory of tensors to write them to files, or compare their addresses.
_WRITERS = (
    "accelerate", "huggingface_hub", "peft", "safetensors", "torch.distributed.checkpoint",
)  # fmt: skip

_native_torch: Any = torch._C
_requires_grad: Any = _native_torch.TensorBase.requires_grad
_NO_COPIES: dict[int, torch.Tensor] = {}
_graph_task: Callable[[], int] = _native_torch._current_graph_task_id

#: The namespaces of operations that communicate with other processes. Those of the first one write
#: to their first argument, but their schemas do not say so.
_COLLECTIVES, _FUNCTIONAL_COLLECTIVES = "c10d", "_c10d_functional"

#: If the units of an operation together exceed the budget, small operands are copied: in total, at
#: most ``COPIED_BYTES``, or the budget divided by ``COPIED_DIVISOR`` if that is more.
COPIED_BYTES = 64 << 10
COPIED_DIVISOR = 16

#: A cache of the geometries of views, by function, geometry of the base, and arguments.
_view_cache: dict[Any, Any] = {}
_VIEW_CACHE_SIZE = 4096


class StreamedTensor(torch.Tensor):
    """A stand-in for a weight, or for a view of it. Has no memory.

    A parameter of a module keeps its Python object and its attributes when it begins to stream: it
    only gets this class, and the implementation of a stand-in. While the forward of its module
    runs, it has the class ``StreamedWeight``, and the implementation of the leased weight.
    """

    # With this value, PyTorch does not call `__torch_function__`. Type checkers expect a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    #: The weight that the tensor represents. Names of libraries do not begin with an underscore.
    _ref: _native.WeightRef

    def __new__(cls, *_: Any, **__: Any) -> StreamedTensor:
        # Libraries call the class of a parameter to create its replacement.
        raise ModelError(f"cannot move or replace a streamed weight: {RESTORE_FIRST}")

    # The stub of PyTorch declares this method without types.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StreamedTensor({name_of(self)!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, format_spec: str) -> str:
        return format(copied(self).detach(), format_spec) if self.dim() == 0 else repr(self)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if is_same(self, value):
            return
        if not self._ref.is_copy:
            raise ModelError(f"cannot set the data of `{name_of(self)}`: {CHANGE_IN_MEMORY}")
        to_memory(self, value.detach())

    def detach(self) -> torch.Tensor:
        """Returns a view of the same weight without autograd history."""
        offset = int(self.storage_offset())
        return _view_stand_in(self, self.dtype, self.shape, self.stride(), offset)

    # PyTorch's own versions of the following methods need the memory of the tensor.

    def tolist(self) -> Any:
        return copied(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a copy. It is read-only, because writes to it would not reach the model."""
        if self.requires_grad and not force and torch.is_grad_enabled():
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() "
                "instead."
            )
        return _read_only(copied(self).numpy(force=force))

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy().astype(dtype) if dtype else self.numpy()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return copied(self).__dlpack__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if get_spawning_popen() is not None:
            raise ModelError(
                f"cannot pass `{name_of(self)}` to a new process, which would get a copy of the "
                "weights in shared memory; load the model in each process"
            )
        weights, key = self._ref.weights, self._ref.key
        spec = weights.specs[key]
        whole = (spec.dtype, spec.shape, spec.strides)
        is_whole = (self.dtype, tuple(self.shape), self.stride()) == whole
        # A program that pickles all weights keeps all of these tensors.
        values: Any = weights.mapped(self) if is_whole else copied(self)
        if is_parameter(self):
            values = nn.Parameter(values, requires_grad=self.requires_grad)
            values.__dict__.update(attributes_of(self))
        return values.__reduce_ex__(protocol)

    def __copy__(self) -> torch.Tensor:
        """Returns another tensor object for the same weight."""
        made = self.detach()
        _requires_grad.__set__(made, requires_grad(self))
        if is_parameter(self):
            made.__dict__.update({"_is_param": True, **attributes_of(self)})
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        known: torch.Tensor | None = memo.get(id(self))
        if known is None:
            known = _copy_of_parameter(self, memo) if is_parameter(self) else _shared(self, memo)
            memo[id(self)] = known
        return known

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
        if not f"{caller}.".startswith(tuple(f"{writer}." for writer in _WRITERS)):
            raise self._no_memory(what)
        mapping: torch.Tensor | None = self.__dict__.get(_MAPPING)
        if mapping is None:
            mapping = self.__dict__[_MAPPING] = self._ref.weights.mapped(self)
        return mapping

    def share_memory_(self) -> Any:
        raise self._no_memory("share_memory_()")

    def _no_memory(self, what: str) -> ModelError:
        return ModelError(
            f"{what} of `{name_of(self)}` failed: a streamed weight has no permanent memory; "
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
        # A graph computes gradients with the weights of its forward.
        reads_for_graph = _graph_task() != -1 and not func._schema.is_mutable
        if not reads_for_graph and _any_has_memory((*args, *kwargs.values())):
            args, kwargs = tree_map_only(StreamedTensor, with_memory, (args, kwargs))
            if not any(isinstance(leaf, StreamedTensor) for leaf in tree_leaves((args, kwargs))):
                return func(*args, **kwargs)
        if _native_torch._len_torch_function_stack():
            # The user's modes have seen this operation. They must not see how it is run.
            with _native_torch.DisableTorchFunction():
                return _dispatch(func, args, kwargs)
        return _dispatch(func, args, kwargs)


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on stand-ins."""
    # Parametrizations set a parameter to itself.
    if func in _COPYING and isinstance(args[0], StreamedTensor) and is_same(*args[:2]):
        return args[0]
    if func.overloadpacket in _CONVERSIONS and _is_unchanged(func, args, kwargs):
        return args[0]
    writes = func._schema.is_mutable or func.namespace == _COLLECTIVES
    if writes and _write_to_copies(func, args, kwargs):
        args, kwargs = tree_map_only(CopiedTensor, with_memory, (args, kwargs))
        return func(*args, **kwargs)
    if func.is_view and _streams(args[0]):
        view = _view(func, args, kwargs)
        if view is not None:
            return view
    try:
        return _run(func, args, kwargs)
    except BaseException as error:
        # Whatever keeps the exception, as notebooks do, must not keep the weights.
        traceback.clear_frames(error.__traceback__)
        raise


class CopiedTensor(StreamedTensor):
    """A copy of a streamed parameter, or a view of one.

    The copy streams the same weight until it is changed or trained. Then it becomes an ordinary
    parameter in memory.
    """

    @property
    def requires_grad(self) -> bool:
        """Whether autograd records operations on the parameter."""
        return bool(_requires_grad.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Sets whether autograd records operations. A copy that is trained gets its own memory.

        A view of a copy stays one, also as a parameter: changes of one are those of the other.
        """
        if requires_grad and _BASE not in self.__dict__:
            to_memory(self, copied(self))
        _requires_grad.__set__(self, requires_grad)
        return self


#: An attribute of a stand-in: the weight in a mapped file, once a library has asked for its memory
#: to write it to a file.
_MAPPING = "_ref_mapping"
#: Attributes of a view: the parameter, and the position in it of the slice with the view, in bytes.
_BASE, _SLICE = "_ref_base", "_ref_slice"
#: Attributes of parameters that belong to TensorStream, or mean that PyTorch takes a tensor of this
#: class for a parameter.
_OWN_ATTRIBUTES = frozenset({"_ref", "_is_param", _MAPPING, _BASE, _SLICE})
#: Attributes of the parameters of a model that transformers has built, before they stream.
_SYMBOLIC_ATTRIBUTES = ("provider", "symbolic_storage", "steps", "_cached_source")
#: Operations that return their operand if it is already as they are to make it.
_CONVERSIONS = (torch.ops.aten.to, torch.ops.aten.type_as)
_COPYING = (torch.ops.aten.copy_.default, torch.ops.aten.set_.source_Tensor)


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
    protect(made, weights.specs[key].name)
    made._ref = _native.WeightRef(weights, key)
    return made


def requires_grad(tensor: torch.Tensor) -> bool:
    """Returns whether autograd records operations on a stand-in."""
    return bool(_requires_grad.__get__(tensor))


def with_memory(tensor: StreamedTensor) -> torch.Tensor:
    """Returns a view of the memory of a parameter, if it was restored or has its own by now."""
    parameter = tensor.__dict__.get(_BASE)
    if parameter is None or isinstance(parameter, StreamedTensor | StreamedWeight):
        return tensor
    memory = torch.Tensor.detach(parameter)
    shape, strides = tensor.shape, tensor.stride()
    offset = tensor.storage_offset() + tensor.__dict__.get(_SLICE, 0) // tensor.itemsize
    if tensor.dtype != memory.dtype:
        view = torch.empty(0, dtype=tensor.dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), offset, shape, strides)
    return memory.as_strided(shape, strides, offset)


def _any_has_memory(values: Iterable[Any]) -> bool:
    """Returns whether ``with_memory`` changes any of the values, or of the elements of lists."""
    for each in values:
        if isinstance(each, StreamedTensor):
            parameter = each.__dict__.get(_BASE)
            if parameter is not None and not isinstance(parameter, StreamedTensor | StreamedWeight):
                return True
        elif isinstance(each, list | tuple) and _any_has_memory(each):
            return True
    return False


def copy_of(tensor: StreamedTensor) -> torch.Tensor | None:
    """Returns the copy of a parameter of which a stand-in is, or is a view."""
    return tensor.__dict__.get(_BASE, tensor) if isinstance(tensor, CopiedTensor) else None


def _streams(value: Any) -> bool:
    """Returns whether an operand of an operation on stand-ins is a stand-in.

    The operand may have been one when the operation began: a forward in another thread can borrow a
    parameter at any time, and return it while the operation runs.
    """
    return isinstance(value, StreamedTensor) or (
        isinstance(value, StreamedWeight) and "_ref" in value.__dict__
    )


def is_parameter(tensor: torch.Tensor) -> bool:
    """Returns whether a stand-in is a parameter, and not a view of one."""
    return "_is_param" in tensor.__dict__


def name_of(tensor: StreamedTensor) -> str:
    """Returns the name of a weight in the checkpoint."""
    name: str = tensor._ref.weights.specs[tensor._ref.key].name
    return name


def copied(tensor: StreamedTensor) -> torch.Tensor:
    """Returns a copy of a weight, or of a view of it, in memory."""
    with torch.no_grad():
        return tensor.clone(memory_format=torch.preserve_format)


def _shared(tensor: StreamedTensor, memo: Any) -> torch.Tensor:
    """Returns a deep copy of a view of a weight. Equal views of a weight get the same memory."""
    if type(tensor) is not StreamedTensor:
        return copied(tensor)
    ref, geometry = tensor._ref, (tensor.dtype, tensor.shape, tensor.stride())
    key = id(ref.weights), ref.key, tensor.storage_offset(), tensor.__dict__.get(_SLICE), *geometry
    if key not in memo:
        memo[key] = copied(tensor)
    memory: torch.Tensor = memo[key]
    return memory.detach()


def in_memory(tensor: StreamedTensor) -> torch.Tensor:
    """Returns a copy like ``copied``, at the address modulo 64 of the weight in memory."""
    weights, key = tensor._ref.weights, tensor._ref.key
    with torch.inference_mode(False), torch.no_grad():
        if weights.divided(key) is not None:
            return assembled(tensor, torch.ops.aten.clone.default)
        return _copied(tensor, weights.unit(key)).detach()


def attributes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Returns the attributes that libraries have given to a parameter."""
    return {k: v for k, v in parameter.__dict__.items() if k not in _OWN_ATTRIBUTES}


def new_stand_in(weights: Weights, key: int) -> StreamedTensor:
    """Creates a parameter that streams."""
    spec = weights.specs[key]
    made = stand_in(
        weights, key, spec.dtype, spec.shape, spec.strides, requires_grad=spec.requires_grad
    )
    made._ref = _native.WeightRef(weights, key, nn.Parameter)
    made._is_param = True
    return made


def to_stand_in(parameter: torch.Tensor, weights: Weights, key: int) -> None:
    """Makes a parameter stream. It stays the same Python object, with the same attributes."""
    spec = weights.specs[key]
    other = stand_in(
        weights, key, spec.dtype, spec.shape, spec.strides, requires_grad=parameter.requires_grad
    )
    original = nn.Parameter if "symbolic_storage" in parameter.__dict__ else type(parameter)
    for name in _SYMBOLIC_ATTRIBUTES:
        parameter.__dict__.pop(name, None)
    with _exchanging(spec.name):
        exchange(parameter, other)
    other.__class__ = original  # type: ignore[assignment]  # an autograd graph can have it
    del other.__dict__["_ref"]
    streamed: Any = parameter
    streamed.__class__ = StreamedTensor
    streamed._ref = _native.WeightRef(weights, key, original)
    streamed._is_param = True


def to_memory(parameter: StreamedTensor, values: torch.Tensor) -> torch.Tensor:
    """Makes a streamed parameter an ordinary one. It stays the same Python object.

    Args:
        parameter: The parameter.
        values: Its memory from now on.

    Returns:
        A tensor with the former implementation, which autograd graphs can have.
    """
    original: Any = parameter._ref.original
    trains = requires_grad(parameter)
    with torch.inference_mode(False):
        # The parameter is used outside of inference mode, too.
        other: Any = nn.Parameter(values.clone() if values.is_inference() else values, trains)
    with _exchanging(name_of(parameter)):
        exchange(parameter, other)
    other.__class__ = type(parameter)  # an autograd graph can have it
    other._ref = parameter._ref
    parameter.__class__ = original or nn.Parameter  # type: ignore[assignment]
    for name in _OWN_ATTRIBUTES:
        parameter.__dict__.pop(name, None)
    former: torch.Tensor = other
    return former


def require_exchangeable(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Requires that these parameters, with their names, can begin or cease to stream.

    Must not be interrupted.

    Raises:
        ModelError: PyTorch keeps a reference to one of them.
    """
    other = torch.empty(0)
    for name, parameter in parameters:
        with _exchanging(name):
            swap(parameter, other)
        swap(parameter, other)  # undoes the first one


@contextlib.contextmanager
def _exchanging(name: str) -> Iterator[None]:
    """Explains why the implementation of a parameter of this name cannot be exchanged."""
    try:
        yield
    except RuntimeError as error:
        raise ModelError(
            f"cannot exchange the memory of `{name}`, to which PyTorch keeps a reference: delete "
            "what holds it, such as the results of a profiler with profile_memory=True"
        ) from error


def _copy_of_parameter(original: StreamedTensor, memo: dict[int, Any]) -> torch.Tensor:
    """Returns a copy of a streamed parameter, which streams the same weight.

    Like a copy of an ordinary parameter, it has no attributes, hooks or gradient.
    """
    weights, key = original._ref.weights, original._ref.key
    trains = requires_grad(original)
    shape, strides = original.shape, original.stride()
    offset = int(original.storage_offset())
    copy = stand_in(weights, key, original.dtype, shape, strides, offset, trains)
    copy.__class__ = CopiedTensor
    copy._ref = _native.WeightRef(weights, key, original._ref.original, is_copy=True)
    copy._is_param = True
    memo[id(original)] = copy
    weights.passes.add_copies(memo)
    return copy


class StreamedWeight(nn.Parameter):
    """A parameter while the forward of its module has leased its weight.

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
            raise ModelError(f"cannot set the data of a streamed weight: {CHANGE_IN_MEMORY}")

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
        known: torch.Tensor | None = memo.get(id(self))
        if known is not None:
            return known
        if "_ref" in self.__dict__:
            return _copy_of_parameter(self, memo)  # type: ignore[arg-type]
        copy = nn.Parameter(
            torch.Tensor.detach(self).clone(memory_format=torch.preserve_format), self.requires_grad
        )
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        copy: Any = nn.Parameter(
            torch.Tensor.detach(self).clone(memory_format=torch.preserve_format), self.requires_grad
        )
        copy.__dict__.update(attributes_of(self))
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

    def __format__(self, format_spec: str) -> str:
        return format(torch.Tensor.detach(self).clone(), format_spec)

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

    return (
        isinstance(value, StreamedTensor)
        and value._ref.weights is own._ref.weights
        and value._ref.key == own._ref.key
        and geometry(value) == geometry(own)
    )


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
            and not isinstance(leaf, StreamedTensor)
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
    elements = base._ref.weights.elements(base._ref.key, base.dtype)
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
    if torch.is_inference_mode_enabled() and requires_grad(base) and not _becomes_view(func):
        for view in made:
            _requires_grad.__set__(view, view.is_floating_point() or view.is_complex())
    return made if is_sequence else made[0]


@functools.cache
def _becomes_view(func: Any) -> bool:
    """Returns whether PyTorch makes the result of a function a view, also in inference mode.

    It does for functions that autograd does not decompose. Others would keep ``requires_grad``.
    """
    kernel = "ADInplaceOrView"
    return bool(_native_torch._dispatch_has_kernel_for_dispatch_key(func.name(), kernel))


def _view_stand_in(
    base: StreamedTensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
) -> StreamedTensor:
    """Creates a stand-in for a view. If one slice contains the view, uses the key of the slice."""
    weights, key = base._ref.weights, base._ref.key
    divided, slice_offset = weights.divided(key), 0
    if divided is not None and 0 not in shape:
        row = weights.elements(key, dtype) // divided.shape[0]
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        index = divided.slice_of(offset // row)
        if index == divided.slice_of(last // row):
            key = divided.first_key + index
            slice_offset = divided.first_row(index) * row
    made = stand_in(weights, key, dtype, shape, strides, offset - slice_offset)
    if isinstance(base, CopiedTensor) or base._ref.is_copy:
        made.__class__ = CopiedTensor  # a view of a copy is one
    made.__dict__[_BASE] = base.__dict__.get(_BASE, base)
    made.__dict__[_SLICE] = base.__dict__.get(_SLICE, 0) + slice_offset * dtype.itemsize
    return made


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
    weights, divided = tensor._ref.weights, tensor._ref.weights.divided(tensor._ref.key)
    assert divided is not None, f"{name_of(tensor)} is not divided"
    use = weights.streamer.hold([divided.first_unit + index])
    try:
        weight = use.weight(weights.streamer, divided.first_key + index, requires_grad(tensor))
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
    weights, key = tensor._ref.weights, tensor._ref.key
    divided = weights.divided(key)
    if divided is None:
        return tensor.clone(memory_format=torch.preserve_format)
    if tensor.numel() == 0:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    element = tensor.element_size()
    row = weights.elements(key, tensor.dtype) // divided.shape[0]
    offset = int(tensor.storage_offset())
    first = divided.slice_of(offset // row)
    last = divided.slice_of((offset + _extent_bytes(tensor) // element - 1) // row)
    begin = divided.first_row(first) * row
    keys = range(divided.first_key + first, divided.first_key + last + 1)
    lengths = [weights.elements(own, tensor.dtype) for own in keys]
    size = sum(lengths) * element
    if size > weights.budget_bytes and func not in _COPIES:
        raise BudgetError(
            f"{func} needs {size} bytes of `{name_of(tensor)}` at once, with a budget of "
            f"{weights.budget_bytes} bytes; raise the budget to {size} bytes or more, or "
            "use a copy in memory, such as weight.clone()"
        )
    memory = torch.empty(sum(lengths) + 64 // element, dtype=tensor.dtype, device=tensor.device)
    at = skip = (divided.phase + begin * element - memory.data_ptr()) % 64 // element
    for own, length in zip(keys, lengths, strict=True):
        part = stand_in(weights, own, tensor.dtype, [length], [1], 0)
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
    require_no_tracing()
    if _keeps_operands(func):
        args, kwargs = tree_map_only(_streams, in_memory, (args, kwargs))
        return func(*args, **kwargs)
    nested = kwargs or any(isinstance(each, list | tuple | dict) for each in args)
    leaves = tree_flatten((args, kwargs))[0] if nested else args
    streamed = [leaf for leaf in leaves if _streams(leaf)]
    if nested and len(streamed) > 1:
        run = one_by_one(func, args)
        if run is not None:
            return run(*args, **kwargs)
    if any(each._ref.weights.divided(each._ref.key) for each in streamed):
        rule = rules.get(func)
        result = NotImplemented if rule is None else rule(*args, **kwargs)
        if result is NotImplemented:
            # The copies are dropped when the operation ends.
            whole = {id(each): assembled(each, func) for each in streamed}
            args, kwargs = tree_map_only(_streams, lambda each: whole[id(each)], (args, kwargs))
            result = func(*args, **kwargs)
        return result
    uses: dict[Weights, Any] = {}
    try:
        copies = _lease(streamed, uses)
        with _recorded_once():
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


@contextlib.contextmanager
def _recorded_once() -> Iterator[None]:
    """Keeps PyTorch's profiler from recording an operation twice: on stand-ins, and on weights.

    Inference mode does not decompose operations on stand-ins. There, both are recorded.
    """
    autograd = _native_torch._autograd
    if not autograd._profiler_enabled() or torch.is_inference_mode_enabled():
        yield
        return
    autograd._enable_record_function(False)
    try:
        yield
    finally:
        autograd._enable_record_function(True)


def _is_unchanged(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a conversion returns its operand. Inference mode does not decompose it."""
    own = args[0]
    names = [formal.name for formal in func._schema.arguments]
    wanted = dict(zip(names, args, strict=False)) | kwargs
    like = wanted.get("other", own)
    dtype, device = wanted.get("dtype") or like.dtype, wanted.get("device") or like.device
    in_order = wanted.get("memory_format") in (None, torch.preserve_format)
    return (
        isinstance(own, StreamedTensor)
        and not wanted.get("copy")
        and in_order
        and (dtype, torch.empty(0, device=device).device) == (own.dtype, own.device)
    )


@functools.cache
def _keeps_operands(func: Any) -> bool:
    """Returns whether an operation can use its operands after it has returned.

    So do operations that return an object of a class, such as packed weights or the work of a
    collective, and asynchronous collectives.
    """
    returns_object = any(each.type.kind() == "ClassType" for each in func._schema.returns)
    return returns_object or func.namespace == _FUNCTIONAL_COLLECTIVES


def _lease(streamed: list[StreamedTensor], uses: dict[Weights, Any]) -> dict[int, torch.Tensor]:
    """Leases the units of stand-ins. All units of one model are leased together.

    If the units together exceed the budget, small operands, such as a row of a weight, are leased
    one after the other and copied.

    Returns:
        The copies, by ``id`` of the stand-in.
    """
    if len(streamed) == 1:
        weights = streamed[0]._ref.weights
        uses[weights] = weights.streamer.hold([weights.unit(streamed[0]._ref.key)])
        return _NO_COPIES
    copies: dict[int, torch.Tensor] = {}
    for weights in {each._ref.weights for each in streamed}:
        own = [each for each in streamed if each._ref.weights is weights]
        unit = {id(each): weights.unit(each._ref.key) for each in own}
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
    with contextlib.closing(tensor._ref.weights.streamer.hold([unit])) as use:
        real = _real(tensor, use)
        element = real.element_size()
        count = _extent_bytes(real) // element + 64 // element
        memory = torch.empty(count, dtype=real.dtype, device=real.device)
        skip = (real.data_ptr() - memory.data_ptr()) % 64 // element
        copy = memory.as_strided(real.shape, real.stride(), skip)
        torch.Tensor.copy_(copy, torch.Tensor.detach(real))
        return copy.detach().requires_grad_(real.requires_grad)


def _real(tensor: StreamedTensor, use: Any) -> torch.Tensor:
    """Returns the leased weight, or the view of it, that a stand-in represents."""
    weights = tensor._ref.weights
    weight: torch.Tensor = use.weight(weights.streamer, tensor._ref.key, requires_grad(tensor))
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
    def real(tensor: StreamedTensor) -> torch.Tensor:
        copy = copies.get(id(tensor))
        return _real(tensor, uses[tensor._ref.weights]) if copy is None else copy

    # Uses the dispatcher state of the caller, so that views require gradients as in a model in
    # memory. matmul rounds differently for operands that require gradients.
    with _native_torch._RestorePythonTLSSnapshot():
        if nested:
            args, kwargs = tree_map_only(_streams, real, (args, kwargs))
        else:
            args = tuple([real(each) if _streams(each) else each for each in args])
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


_SEND: Any = getattr(torch.ops.c10d, "send", None)
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


def _write_to_copies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Gives copies that an operation writes to memory of their own.

    Returns:
        Whether there were any.

    Raises:
        ModelError: The operation writes to a streamed weight that is no copy.
    """
    written = [each for each in _written(func, args, kwargs) if isinstance(each, StreamedTensor)]
    copies = [each.__dict__.get(_BASE, each) for each in written]
    for tensor, copy in zip(written, copies, strict=True):
        if not isinstance(copy, CopiedTensor):
            raise ModelError(
                f"cannot run {func}, which writes to `{name_of(tensor)}`: {CHANGE_IN_MEMORY}"
            )
    for copy in copies:
        if isinstance(copy, StreamedTensor):
            former = to_memory(copy, copied(copy))
            # Graphs that need the weight must not compute with what is written.
            torch.autograd.graph.increment_version(former)
    return bool(copies)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    if func.namespace == _COLLECTIVES and func is not _SEND:
        yield from tree_leaves(args[:1])
    for i, formal in enumerate(func._schema.arguments):
        if formal.is_write:
            actual = args[i] if i < len(args) else kwargs.get(formal.name)
            yield from actual if isinstance(actual, list | tuple) else [actual]
