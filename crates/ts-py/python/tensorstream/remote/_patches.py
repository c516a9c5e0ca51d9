# SPDX-License-Identifier: MIT OR Apache-2.0
"""Replaces functions of PyTorch that do not support the device ``ts``.

Each patch is applied once, when the first machine starts, and affects the whole process. For
tensors and modules on other devices, the patch calls the original function. docs/remote/patches.md
describes the patches for users.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .. import _native
from .._exchange import exchange
from ..errors import ConfigurationError
from . import _registry
from .client import _encoder, _streams
from .client._checkpoint import OfMachine
from .client._views import is_ours

_log = logging.getLogger("tensorstream.remote")


def apply(accelerator: torch.device | None, numbered: str) -> None:
    """Applies all patches.

    Args:
        accelerator: The accelerator of the process before ``ts`` was registered.
        numbered: The type of ``torch.device(0)`` before ``ts`` was registered.
    """
    _patch_backward()
    _patch_untyped_storage()
    _patch_linear_cross_entropy()
    _patch_module_moves()
    _patch_load_state_dict()
    _patch_safetensors()
    _patch_generator()
    _patch_numbered_devices(numbered)
    _patch_streams(accelerator)
    _patch_available_device()
    _patch_storages()
    _patch_dlpack()
    _patch_profiler()
    _patch_tensor_data()
    _patch_swap_tensors()
    _patch_distributed()
    _encoder.patch()


def _patch_backward() -> None:
    """Makes backward run on the calling thread while there are machines.

    Changes the function with which ``torch.autograd`` calls its engine. The engine creates only one
    thread for ``ts``, because it assumes a single device index. Without the patch, backward through
    an operator on ``ts:1`` or a later index fails, even if the output is on the CPU.
    """
    from torch.autograd import graph

    run = graph._engine_run_backward

    @functools.wraps(run)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if _registry.SESSIONS:
            with torch.autograd.set_multithreading_enabled(False):
                return run(outputs, *args, **kwargs)
        return run(outputs, *args, **kwargs)

    # Each module has its own reference to the function. For mypy, the types differ.
    graph._engine_run_backward = run_backward  # type: ignore[assignment]
    torch.autograd._engine_run_backward = run_backward  # type: ignore[assignment,attr-defined]


def _patch_untyped_storage() -> None:
    """Makes ``torch.UntypedStorage(..., device="ts:0")`` return the storage of a new tensor.

    Changes ``torch.UntypedStorage.__new__``, which needs an allocator for the device. ``ts`` has no
    allocator.
    """
    make = torch.UntypedStorage.__new__

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == "ts":
            size = args[0] if args else kwargs.get("size", 0)
            if not isinstance(size, int):
                return torch.tensor(list(size), dtype=torch.uint8).to(device).untyped_storage()
            return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        if device is not None:
            kwargs["device"] = device
        return make(cls, *args, **kwargs)

    # The class has no other hook for creation. mypy does not allow assignments to methods.
    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign]


def _patch_module_moves() -> None:
    """Keeps the identity of parameters that move to or from ``ts``.

    Changes ``nn.Module.to`` and ``nn.Module.cpu``, which would create a new parameter for each
    name. Tied weights would then be separate, and optimizers would update the old parameters. The
    patch swaps the data of the old parameters instead. It also recreates uninitialized parameters
    on the new device, and refuses moves by the modules in ``_TRAINERS``.
    """
    for name in ("to", "cpu"):
        move = getattr(torch.nn.Module, name)

        @functools.wraps(move)
        def move_module(
            self: torch.nn.Module, *args: Any, _move: Any = move, **kwargs: Any
        ) -> torch.nn.Module:
            # A number is that of the device that other functions of PyTorch mean by it.
            args = tuple(torch.device(each) if type(each) is int else each for each in args)
            if type(kwargs.get("device")) is int:
                kwargs["device"] = torch.device(kwargs["device"])
            future = torch.__future__
            current = next((p.device for p in self.parameters() if is_ours(p)), None)
            devices = {
                torch.device(value) for value in (*args, *kwargs.values()) if _names_device(value)
            }
            is_to_ts = any(device.type == "ts" for device in devices)
            if current is not None and devices and not is_to_ts:
                _refuse_trainers(type(self).__name__, current)
            if (current is None and not is_to_ts) or future.get_swap_module_params_on_conversion():
                return _move(self, *args, **kwargs)
            future.set_swap_module_params_on_conversion(True)
            try:
                dtype = next(
                    (
                        value
                        for value in (*args, *kwargs.values())
                        if isinstance(value, torch.dtype)
                    ),
                    None,
                )
                with _recreate_uninitialized(self, next(iter(devices), None), dtype):
                    return _move(self, *args, **kwargs)
            finally:
                future.set_swap_module_params_on_conversion(False)

        # PyTorch has no hook for moves of a module.
        setattr(torch.nn.Module, name, move_module)

    def ts(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
        """Moves the module to a device ``ts``, by default the current one."""
        return self.to(torch.device("ts", _registry.index_of(device)))

    # Replaces the method that PyTorch generates. mypy does not see generated methods.
    torch.nn.Module.ts = ts  # type: ignore[attr-defined]


def _patch_load_state_dict() -> None:
    """Links remote tensors of a state dict to a model on the meta device.

    Changes ``nn.Module.load_state_dict``, which copies to the parameters, and so does nothing if
    these are on the meta device. With the patch, remote tensors replace them, as with
    ``assign=True``. Names of tied parameters that the state dict lacks get the tensor of the others
    and stay tied.

    A state dict of ``load_huggingface_state_dicts`` replaces the tensors of a model on any device,
    and what it lacks moves to its device, too.
    """
    load = torch.nn.Module.load_state_dict

    @functools.wraps(load)
    def load_state_dict(
        self: torch.nn.Module, state_dict: Any, strict: bool = True, assign: bool = False
    ) -> Any:
        moves = isinstance(state_dict, OfMachine)
        is_mapping = isinstance(state_dict, Mapping) and (moves or not assign)
        remote = {
            name
            for name, tensor in (state_dict.items() if is_mapping else ())
            if isinstance(tensor, torch.Tensor) and is_ours(tensor)
        }
        if not remote:
            return load(self, state_dict, strict=strict, assign=assign)
        own = {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }
        links = {name for name in remote if name in own and (moves or own[name].is_meta)}
        if not links:
            return load(self, state_dict, strict=strict, assign=assign)
        linked = OrderedDict(state_dict)
        if hasattr(state_dict, "_metadata"):
            # PyTorch keeps the versions of modules in this attribute, which mypy does not know.
            linked._metadata = state_dict._metadata  # type: ignore[attr-defined]
        # Others are copied to, as without the patch: they replace themselves.
        copies = {
            name: value
            for name, value in state_dict.items()
            if name in own
            and name not in links
            and not own[name].is_meta
            and isinstance(value, torch.Tensor)
            and value.shape == own[name].shape
        }
        linked.update({name: own[name] for name in copies})
        if moves:
            linked.update({name: linked[name].to(own[name].dtype) for name in links})
        tied = [names for names in _tied(self) if not links.isdisjoint(names)]
        for names in tied:
            stored = next(name for name in names if name in links)
            linked.update({name: linked[stored] for name in names if name not in linked})
        try:
            result = load(self, linked, strict=strict, assign=True)
        finally:
            # An error comes when some tensors have been replaced. All are on one device still.
            if moves and not any(t.is_meta for t in (*self.parameters(), *self.buffers())):
                self.to(linked[min(links)].device)
        with torch.no_grad():
            for name, value in copies.items():
                own[name].copy_(value)
        for names in tied:
            _tie(self, names)
        return result

    # PyTorch has no hook that may replace the tensors. mypy does not allow assignments to methods.
    torch.nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _create_with(class_: type, create: Any, *, only_numbers: bool) -> None:
    """Changes how objects of a class are created, if this version of Python is known."""
    try:
        _native.remote_create_with(class_, create, only_numbers)
    except RuntimeError as error:
        _log.warning("%s; they are created as without machines", error)


class _Generator(torch.Generator):
    """A generator of the CPU that names a device ``ts``."""

    # That of PyTorch's class cannot be set.
    device: Any = None


def _patch_generator() -> None:
    """Makes ``torch.Generator(device="ts:0")`` return a generator of the CPU, for CPU machines.

    Changes how objects of ``torch.Generator`` are created, because PyTorch cannot create generators
    of devices that are implemented in Python. Such a machine draws the numbers of the CPU, and
    operators accept its generators.
    """

    def create(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        device: Any = args[0] if args else (kwargs or {}).get("device")
        if not _names_device(device) or torch.device(device).type != "ts":
            return NotImplemented
        index = _registry.index_of(torch.device(device))
        if not _registry.runs_on_cpu(index):
            raise ConfigurationError(
                f"the device ts:{index} runs operators on {_registry.KINDS[index]}, whose "
                "generators this computer cannot create: use torch.manual_seed, which also "
                "seeds machines"
            )
        generator = _Generator()
        generator.device = torch.device("ts", index)
        return generator

    _create_with(torch.Generator, create, only_numbers=False)


def _patch_numbered_devices(kind: str) -> None:
    """Makes ``torch.device(0)`` mean what it meant before ``ts`` was registered.

    Changes how objects of ``torch.device`` are created from a number. PyTorch would take the number
    for that of a device ``ts``. Where other functions get a number for a device, it does so still.

    Args:
        kind: The type of ``torch.device(0)`` before.
    """

    def create(args: tuple[int], kwargs: None) -> Any:
        return NotImplemented if args[0] < 0 else torch.device(kind, args[0])

    _create_with(torch.device, create, only_numbers=True)


def _patch_streams(accelerator: torch.device | None) -> None:
    """Makes ``torch.Stream`` and ``torch.Event`` create those of ``ts`` for its devices.

    Changes how their objects are created. PyTorch would make all streams of ``ts`` the same one,
    and has no events for a device that is implemented in Python. Without a device, or with its
    number, they are those of ``ts`` only if the process has no available accelerator.

    Args:
        accelerator: The accelerator of the process before ``ts`` was registered.
    """

    def default() -> str:
        if accelerator is None or not torch.get_device_module(accelerator).is_available():
            return "ts"
        return accelerator.type

    def create_stream(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        options = dict(kwargs or {})
        if len(args) < 2 and "stream_id" not in options:
            return create(torch.Stream, _streams.Stream, args, kwargs)
        options |= zip(("stream_id", "device_index", "device_type"), args, strict=False)
        is_ts = options.get("device_type") == _streams.TYPE
        return _streams.Stream(**options) if is_ts else NotImplemented

    def create_event(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        return create(torch.Event, _streams.Event, args, kwargs)

    def create(original: Any, ours: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
        options = dict(kwargs or {})
        given = args[0] if args else options.pop("device", None)
        if given is None or type(given) is int:
            device = torch.device(default() if given is None else f"{default()}:{given}")
        elif _names_device(given):
            device = torch.device(given)
        else:
            return NotImplemented
        if device.type == "ts":
            return ours(device, **options)
        return NotImplemented if given == device else original(device, **options)

    _create_with(torch.Stream, create_stream, only_numbers=False)
    _create_with(torch.Event, create_event, only_numbers=False)


def _patch_available_device() -> None:
    """Hides ``ts`` from ``DataParallel`` and other functions that choose a type of device.

    Changes ``torch._utils._get_available_device_type``, which names a registered device if CUDA is
    not available.
    """
    find = torch._utils._get_available_device_type

    @functools.wraps(find)
    def find_other() -> Any:
        kind = find()
        return None if kind == "ts" else kind

    # Each module has its own reference to the function.
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and vars(module).get("_get_available_device_type") is find:
            vars(module)["_get_available_device_type"] = find_other


def _patch_storages() -> None:
    """Adds ``is_ts`` and ``ts()`` to the classes of storages, as ``is_cuda`` and ``cuda()``."""
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=False, for_module=False, for_packed_sequence=False, for_storage=True
    )


def _patch_dlpack() -> None:
    """Makes ``torch.from_dlpack`` accept tensors of ``ts``, without a copy.

    Changes ``torch.Tensor.__dlpack_device__``, which does not know renamed devices.
    """
    device_of = torch.Tensor.__dlpack_device__

    @functools.wraps(device_of)
    def find_device(self: torch.Tensor) -> Any:
        if torch.overrides.has_torch_function_unary(self) or not is_ours(self):
            return device_of(self)
        return torch.utils.dlpack.DLDeviceType.kDLExtDev, self.device.index

    # PyTorch has no hook for this. mypy does not allow assignments to methods.
    torch.Tensor.__dlpack_device__ = find_device  # type: ignore[method-assign]


def _patch_profiler() -> None:
    """Makes the profiler record the calls of operators of ``ts`` as those of a CPU.

    Changes ``torch.autograd.profiler.profile.__init__``. PyTorch would ask the device for times,
    and print an error with a stack for each operator.
    """
    profile = torch.autograd.profiler.profile
    initialise = profile.__init__

    @functools.wraps(initialise)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        if getattr(self, "use_device", None) == "ts":
            self.profiler_kind = torch._C._profiler.ProfilerState.KINETO

    # PyTorch has no hook for this. mypy does not allow assignments to methods.
    profile.__init__ = init  # type: ignore[method-assign]


def _patch_tensor_data() -> None:
    """Makes ``parameter.data = tensor`` work between ``ts`` and other devices.

    Changes ``torch.Tensor.data``. PyTorch can only replace the memory of a tensor by that of the
    same kind of tensor, and tensors of ``ts`` are another kind. The patch exchanges the whole
    implementation.
    """
    base = torch._C.TensorBase
    original: Any = base.data

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        try:
            original.__set__(self, value)
        except RuntimeError:
            if not isinstance(value, torch.Tensor) or is_ours(self) == is_ours(value):
                raise
            exchange(self, value.detach().requires_grad_(self.requires_grad))

    # mypy does not allow assignments to a property.
    torch.Tensor.data = property(original.__get__, set_data)  # type: ignore[assignment]


def _patch_swap_tensors() -> None:
    """Makes modules move to and from ``ts`` while something else refers to their parameters.

    Changes ``torch.utils.swap_tensors``, with which ``nn.Module.to`` replaces parameters. PyTorch's
    function refuses parameters to which a graph, a view or another module refers.
    """
    swap_tensors = torch.utils.swap_tensors

    @functools.wraps(swap_tensors)
    def swap(t1: torch.Tensor, t2: torch.Tensor) -> None:
        if is_ours(t1) or is_ours(t2):
            exchange(t1, t2)
        else:
            swap_tensors(t1, t2)

    # PyTorch has no hook for this.
    torch.utils.swap_tensors = swap


def _patch_distributed() -> None:
    """Raises a clear error for ``DistributedDataParallel`` of remote modules.

    Changes its ``__init__``, which would fail in the process group.
    """
    parallel = torch.nn.parallel.DistributedDataParallel
    initialise = parallel.__init__

    @functools.wraps(initialise)
    def init(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        device = next((p.device for p in module.parameters() if is_ours(p)), None)
        if device is not None:
            raise ConfigurationError(
                f"DistributedDataParallel does not support {device}: process groups have no "
                "backend for remote machines; keep a replica of the model on each machine, and "
                "average the gradients, as in examples/data_parallel.py"
            )
        initialise(self, module, *args, **kwargs)

    # PyTorch has no hook for this. mypy does not allow assignments to methods.
    parallel.__init__ = init  # type: ignore[method-assign]


def _tied(module: torch.nn.Module) -> list[list[str]]:
    """Returns the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _tie(module: torch.nn.Module, names: list[str]) -> None:
    """Makes the parameter with the first name that of all names."""
    first = module.get_parameter(names[0])
    for name in names[1:]:
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, first)


def _patch_safetensors() -> None:
    """Makes ``safetensors.torch.load_file(..., device="ts:0")`` load files of the machine.

    Changes the function of safetensors, which accepts only the devices that it knows.
    """
    try:
        import safetensors.torch
    except ImportError:
        return
    load = safetensors.torch.load_file

    @functools.wraps(load)
    def load_file(filename: Any, device: Any = "cpu", **kwargs: Any) -> Any:
        if str(device).partition(":")[0] != "ts":
            return load(filename, device, **kwargs)
        from .client._checkpoint import load_state_dict

        return load_state_dict(filename, torch.device(device), lenient=True)

    safetensors.torch.load_file = load_file


def _patch_linear_cross_entropy() -> None:
    """Makes ``linear_cross_entropy`` accumulate on a CPU machine as it does on a CPU.

    Changes ``LinearCrossEntropyOptions._adjust``, which chooses the accumulation by the type of
    the device. PyTorch before 2.15 does not have this class.
    """
    try:
        from torch.nn.modules.linear_cross_entropy_options import (
            LinearCrossEntropyOptions as Options,
        )
    except ImportError:
        return
    adjust = Options._adjust
    signature = inspect.signature(adjust)

    @functools.wraps(adjust)
    def adjust_as_machine(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        device = bound.arguments.get("device")
        if device is not None and device.type == "ts" and _registry.runs_on_cpu(device.index):
            bound.arguments["device"] = torch.device("cpu")
        return adjust(*bound.args, **bound.kwargs)

    # PyTorch has no setting for this choice. mypy does not allow assignments to methods.
    Options._adjust = adjust_as_machine  # type: ignore[method-assign]


@contextlib.contextmanager
def _recreate_uninitialized(
    module: torch.nn.Module, device: torch.device | None, dtype: torch.dtype | None
) -> Iterator[None]:
    """Recreates a module's uninitialized parameters and buffers, because they cannot be moved.

    Removes them at the start of the ``with`` block. At the end of the block, creates them on
    ``device`` with ``dtype``. None for ``device`` or ``dtype`` keeps the old device or dtype.
    """
    removed = [
        (tensors, name, value)
        for each in module.modules()
        for tensors in (each._parameters, each._buffers)
        for name, value in tensors.items()
        if value is not None and torch.nn.parameter.is_lazy(value)
    ]
    for tensors, name, _ in removed:
        tensors[name] = None
    try:
        yield
    finally:
        for tensors, name, value in removed:
            target: Any = device or value.device
            make: Any = type(value)
            tensors[name] = make(
                requires_grad=value.requires_grad, device=target, dtype=dtype or value.dtype
            )


def _names_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (
        isinstance(value, str) and value.partition(":")[0] in _DEVICES
    )


#: The types of devices that an argument of ``nn.Module.to`` can name.
_DEVICES = ("ts", "cpu", "cuda", "mps", "xpu", "meta")


#: Python modules that move a model to a device without a request of the user.
_TRAINERS = ("accelerate.accelerator", "transformers.trainer")


def _refuse_trainers(model: str, device: torch.device) -> None:
    """Refuses a move of a remote model if one of ``_TRAINERS`` is on the stack.

    Raises:
        ConfigurationError: The library would train the model on this computer.
    """
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in _TRAINERS:
            library = name.partition(".")[0]
            raise ConfigurationError(
                f"{library} would move {model} from {device} to this computer; call "
                "tensorstream.remote.use(machine), or set the environment variable "
                f'ACCELERATE_TORCH_DEVICE="{device}", before the first Accelerator or '
                "TrainingArguments is created"
            )
        # mypy infers that ``frame`` is never None, but ``f_back`` of the outermost frame is None.
        frame = frame.f_back  # type: ignore[assignment]
