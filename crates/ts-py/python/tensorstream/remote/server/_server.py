# SPDX-License-Identifier: MIT OR Apache-2.0
"""The server of a remote machine: looks up PyTorch's operators by name, and runs them."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import dlpack

from ... import _native
from ...errors import ConfigurationError, DeviceUnavailableError, TensorStreamError
from ...wire._connection import LIMIT_BYTES, _settings
from .._answers import failure
from . import _bounds
from ._checkpoints import Checkpoints, Loaded
from ._exchange import Exchange, LocalExchange
from ._functions import Functions

#: The namespaces of operators that clients can call.
NAMESPACES = frozenset({"aten", "prims", "torchvision", "torchaudio", "quantized", "tensorstream"})
#: The operators of the namespace "tensorstream", which ``Session`` implements.
SERVER_OPERATORS = frozenset({
    "manual_seed", "rng_state", "set_rng_state", "give_generator", "given_generator",
    "settings", "kind",
    "devices", "gpu_name", "gpu_bytes", "empty_cache", "clock", "offer", "withdraw", "claim",
    "fetch", "take", "deposit", "connect", "send", "disconnect",
    "open_checkpoint", "load_tensors", "close_checkpoint", "read_text", "directories",
    "run_function", "lstm_inference", "nested_encoder_layer",
})  # fmt: skip
#: Those that write to their first argument.
_WRITING = frozenset({"claim", "fetch", "take"})
#: Operators that access files or the memory of other processes, and an operator whose results have
#: no memory.
REFUSED = frozenset({
    "from_file", "_share_memory", "_new_shared_filename_cpu", "save", "load",
    "_efficientzerotensor",
})  # fmt: skip
#: Operators that change the shape or storage of a tensor, but lack the tag ``inplace_view``.
#: The server refuses them, because clients make these changes locally. If the server ran them, it
#: would not notice that the storage of a tensor has changed.
RESHAPING = frozenset(
    {"set_", "set", "set_data", "resize", "_resize_output", "_resize_output_", "resize_as_sparse_"}
)

#: Held while a session uses PyTorch's default generator, of which a process has one.
_default_generator_lock = threading.Lock()
#: Held while a session uses its settings of PyTorch, of which a process has one set.
_settings_lock = threading.Lock()


class Session:
    """The state of one client's session: its generators, and the tensors that it offers.

    Args:
        exchange: Exchanges tensors with other sessions. By default, there are no other sessions.
        devices: The number of devices.
        checked: Whether to check the indices of operators whose indices PyTorch does not check.
        budget: The most memory for weights that are loaded. See ``Checkpoints``.
        functions: The Python functions that the client can call. By default there are none.
    """

    def __init__(
        self,
        exchange: Exchange | None = None,
        devices: int = 1,
        checked: bool = False,
        budget: int | None = None,
        functions: Functions | None = None,
    ) -> None:
        self._device_count = devices
        self._checked = checked
        self._generators: dict[torch.device, torch.Generator] = {}
        #: Generators whose state the client sends from its own generators.
        self._client_generators: dict[torch.device, torch.Generator] = {}
        self._exchange = exchange or LocalExchange()
        self._functions = functions or Functions()
        #: Names the session to the exchange, which does not keep it.
        self._name = object()
        self._checkpoints = Checkpoints(self._exchange, budget)

    def __del__(self) -> None:
        self._exchange.drop(self._name)

    def _generator(self, device: torch.device, of_client: bool = False) -> torch.Generator:
        generators = self._client_generators if of_client else self._generators
        if device not in generators:
            generators[device] = torch.Generator(device)
        return generators[device]

    def define(self, name: str) -> tuple[Callable[..., Any], list[int], list[str]]:
        """Looks up an operator.

        Args:
            name: The namespace, name and overload, such as "aten::add.Tensor". For the
                overload "*", PyTorch chooses the overload by the arguments. Clients need this to
                pass numbers in place of tensors.

        Returns:
            A function that runs the operator, the positions of the positional arguments that it
            writes to, and the names of the keyword arguments that it writes to.

        Raises:
            PermissionError: The server does not allow the operator.
            LookupError: There is no such operator.
        """
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace not in NAMESPACES or base in REFUSED | RESHAPING | _bounds.SPARSE:
            raise PermissionError("the machine does not allow this operator")
        if namespace == "tensorstream":
            if base not in SERVER_OPERATORS:
                raise LookupError("the machine has no such operator")
            if base == "run_function" and not self._functions:
                raise PermissionError(
                    "the machine runs no Python functions; start the server with "
                    "`--allow-functions any`, or with the name of a module, to allow them"
                )
            return getattr(self, "_" + base), [0] if base in _WRITING else [], []
        packet: Any = getattr(getattr(torch.ops, namespace), base, None)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            raise LookupError(f"the machine has no such operator (PyTorch {torch.__version__})")
        overloads = [getattr(packet, name) for name in packet.overloads()]
        if any(torch.Tag.inplace_view in each.tags for each in overloads):
            raise PermissionError(
                "the machine does not allow this operator, because it changes the shape of a tensor"
            )
        if not any(
            "Tensor" in str(a.type)
            for each in overloads
            for a in (*each._schema.arguments, *each._schema.returns)
        ):
            raise PermissionError(
                "the machine does not allow this operator, because it has no tensors as arguments "
                "or results"
            )
        if overload == "*":
            # PyTorch chooses the overload by the arguments.
            if base in _bounds.CHECKS:
                raise PermissionError(
                    "the machine does not allow numbers in place of tensors for this operator"
                )
            return packet, [0] if base.endswith("_") else [], ["out"]
        op = getattr(packet, overload or "default", None)
        if not isinstance(op, torch._ops.OpOverload):
            raise LookupError(f"the machine has no such overload (PyTorch {torch.__version__})")
        arguments = op._schema.arguments
        written = [
            (position, a)
            for position, a in enumerate(arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        positions = [position for position, a in written if not a.kwarg_only]
        call = self._with_generator(op)
        return (
            self._with_bounds_check(base, call) if self._checked else call,
            positions,
            [a.name for _, a in written if a.kwarg_only],
        )

    def _with_bounds_check(self, base: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Adds the check of ``_bounds.CHECKS`` for an operator, if there is one."""
        check = _bounds.CHECKS.get(base)
        if check is None:
            return call

        @functools.wraps(call)
        def checked(*args: Any, **kwargs: Any) -> Any:
            check(*args, **kwargs)
            return call(*args, **kwargs)

        return checked

    def _with_generator(self, op: torch._ops.OpOverload) -> Callable[..., Any]:
        """Returns a function that runs an operator, with this session's generator if needed."""
        call: Callable[..., Any] = op._op
        if any(a.name == "generator" for a in op._schema.arguments):

            @functools.wraps(call)
            def call_with_argument(*args: Any, **kwargs: Any) -> Any:
                generator = self._generator(
                    _device_of(args, kwargs), kwargs.get("generator") == "given"
                )
                return call(*args, **{**kwargs, "generator": generator})

            return call_with_argument
        if torch.Tag.nondeterministic_seeded in op.tags:

            def call_with_default(*args: Any, **kwargs: Any) -> Any:
                with self._own_default_generator(_device_of(args, kwargs)):
                    return call(*args, **kwargs)

            return call_with_default
        return call

    @contextlib.contextmanager
    def _own_default_generator(self, device: torch.device) -> Iterator[None]:
        """Gives PyTorch's default generator of a device the state of this session's generator."""
        own, (get_state, set_state) = self._generator(device), _default_rng(device)
        with _default_generator_lock:
            before = get_state()
            set_state(own.get_state())
            try:
                yield
            finally:
                own.set_state(get_state())
                set_state(before)

    def _run_function(
        self, anchor: torch.Tensor, function: str, arguments: str, tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], str]:
        def device_of(number: int) -> torch.device:
            if number < 0 or anchor.device.type == "cpu":
                return torch.device("cpu")
            return torch.device(anchor.device.type, number)

        with self._own_default_generator(anchor.device):
            return self._functions.run(function, arguments, tensors, device_of, anchor.device)

    def _lstm_inference(
        self, input: torch.Tensor, weights: list[torch.Tensor], hx: torch.Tensor, cx: torch.Tensor,
        reverse: bool, num_layers: int, has_biases: bool, bidirectional: bool, train: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        with torch.no_grad():
            output, h, c, _ = torch.ops.aten.mkldnn_rnn_layer.default(
                input, *weights, hx, cx, reverse, [], 2, hx.shape[-1], num_layers, has_biases,
                bidirectional, False, train,
            )  # fmt: skip
        return output, h, c

    def _nested_encoder_layer(
        self, input: torch.Tensor, keep: torch.Tensor, weights: list[torch.Tensor],
        num_heads: int, use_gelu: bool, norm_first: bool, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        with torch.no_grad():
            nested = torch._nested_tensor_from_mask(input, keep, mask_check=False)
            run: Any = torch._transformer_encoder_layer_fwd
            output: torch.Tensor = run(
                nested, input.shape[-1], num_heads, *weights[:4], use_gelu, norm_first, eps,
                *weights[4:],
            )  # fmt: skip
            return output.to_padded_tensor(0.0, input.shape)

    def _manual_seed(self, anchor: torch.Tensor, seed: int) -> None:
        self._generator(anchor.device).manual_seed(seed)

    def _give_generator(self, anchor: torch.Tensor, state: torch.Tensor) -> None:
        self._generator(anchor.device, True).set_state(state.cpu())

    def _given_generator(self, anchor: torch.Tensor) -> torch.Tensor:
        return self._generator(anchor.device, True).get_state().to(anchor.device)

    def _offer(self, tensor: torch.Tensor, ticket: str, to: str) -> None:
        if refusal := self._deposit(tensor, ticket, to):
            self._exchange.refuse(self._name, ticket, refusal)

    def _deposit(self, tensor: torch.Tensor, ticket: str, to: str = "") -> str:
        try:
            return self._exchange.offer(self._name, tensor, ticket, to)
        except Exception as error:  # such as too little memory for the copy
            return f"cannot offer the tensor: {error}"

    def skipped_offer(self, ticket: str, reason: str) -> None:
        """Handles an offer whose tensor was not computed. The native half calls this."""
        self._exchange.refuse(self._name, ticket, reason)

    def _withdraw(self, anchor: torch.Tensor, ticket: str) -> None:
        self._exchange.withdraw(self._name, ticket)

    def _claim(self, into: torch.Tensor, ticket: str) -> None:
        tensor = self._exchange.claim(ticket)
        if (tensor.dtype, tensor.shape) != (into.dtype, into.shape):
            raise RuntimeError(
                f"the tensor that is offered has shape {list(tensor.shape)} and {tensor.dtype}, "
                f"but {list(into.shape)} and {into.dtype} are claimed"
            )
        into.copy_(tensor)

    def _fetch(
        self, into: torch.Tensor, address: str, ticket: str, dtype: torch.dtype, is_sent: bool
    ) -> tuple[str, bool]:
        return self._exchange.fetch(into, address, ticket, dtype, is_sent)

    def _take(
        self, into: torch.Tensor, address: str, ticket: str, dtype: torch.dtype, is_sent: bool
    ) -> None:
        reason, _ = self._exchange.fetch(into, address, ticket, dtype, is_sent)
        if reason:
            raise RuntimeError(f"cannot copy the tensor from {address}: {reason}")

    def _connect(self, anchor: torch.Tensor, address: str, options: str) -> str:
        def connect() -> dict[str, Any]:
            number, peer = self._exchange.connect(self._name, address, _options(options))
            return {"number": number, "peer": peer}

        return _answer(connect)

    def _send(self, tensor: torch.Tensor, number: int, options: str) -> str:
        return _answer(lambda: self._exchange.send(self._name, number, tensor, _options(options)))

    def _disconnect(self, anchor: torch.Tensor, number: int, reason: str | None) -> str:
        return _answer(lambda: self._exchange.close(self._name, number, reason))

    def _open_checkpoint(self, anchor: torch.Tensor, source: str, lenient: bool) -> str:
        return self._checkpoints.open(source, lenient)

    def _load_tensors(
        self, anchor: torch.Tensor, number: int, names: list[str], verify: bool
    ) -> tuple[list[Loaded], str]:
        return self._checkpoints.load(number, names, anchor.device, verify)

    def _close_checkpoint(self, anchor: torch.Tensor, number: int) -> None:
        self._checkpoints.close(number)

    def _read_text(self, anchor: torch.Tensor, source: str, beside: str) -> str:
        return self._checkpoints.read_text(source, beside)

    def _directories(self, anchor: torch.Tensor, source: str) -> str:
        return self._checkpoints.directories(source)

    def _settings(self, *settings: Any) -> None:
        """Does nothing. The native half handles this operator."""

    def _kind(self, anchor: torch.Tensor) -> str:
        return anchor.device.type

    def _devices(self, anchor: torch.Tensor) -> int:
        return self._device_count

    def _gpu_name(self, anchor: torch.Tensor) -> str:
        # Not all accelerators have names.
        name = getattr(torch.get_device_module(anchor.device), "get_device_name", str)
        return str(name(anchor.device))

    def _gpu_bytes(self, anchor: torch.Tensor) -> int:
        return int(torch.cuda.get_device_properties(anchor.device).total_memory)

    def _empty_cache(self, anchor: torch.Tensor) -> None:
        if anchor.device.type != "cpu":
            torch.accelerator.empty_cache()

    def _clock(self, anchor: torch.Tensor) -> torch.Tensor:
        if anchor.device.type != "cpu":
            torch.accelerator.synchronize(anchor.device)
        return torch.tensor(time.perf_counter_ns(), device=anchor.device)

    def _rng_state(self, anchor: torch.Tensor) -> torch.Tensor:
        return self._generator(anchor.device).get_state().to(anchor.device)

    def _set_rng_state(self, anchor: torch.Tensor, state: torch.Tensor) -> None:
        self._generator(anchor.device).set_state(state.cpu())


def _answer(request: Callable[[], dict[str, Any] | None]) -> str:
    """Returns the answer of a request, or that of its error."""
    try:
        return json.dumps(request() or {})
    except (TensorStreamError, OSError, RuntimeError, ValueError, MemoryError) as error:
        return json.dumps(failure(error))


def _options(text: str) -> dict[str, Any]:
    """Returns the JSON object that a client has sent."""
    options = json.loads(text)
    if not isinstance(options, dict):
        raise ConfigurationError("invalid options: expected a JSON object")
    return options


def _device_of(args: Any, kwargs: Any) -> torch.device:
    """Returns the device of the first tensor, or the CPU."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return value[0].device
    return torch.device("cpu")


def _default_rng(
    device: torch.device,
) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], object]]:
    """Returns functions that get and set the state of PyTorch's default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator.get_state, torch.default_generator.set_state
    # All accelerators have these functions, but not all show their generators.
    module = torch.get_device_module(device)
    get_state = functools.partial(module.get_rng_state, device)
    return get_state, functools.partial(module.set_rng_state, device=device)


#: The default dtype, whether operators must be deterministic, whether those that cannot be only
#: warn, and the precision of products of float32 matrices.
Settings = tuple[torch.dtype, bool, bool, str]
_DEFAULT_SETTINGS: Settings = (torch.float32, False, False, "highest")


def _checked_settings(given: tuple[Any, ...]) -> Settings:
    """Returns the settings that a client has sent.

    Raises:
        ValueError: They are invalid.
    """
    kinds = tuple(map(type, _DEFAULT_SETTINGS))
    if tuple(map(type, given)) != kinds or given[3] not in ("highest", "high", "medium"):
        raise ValueError(
            f"invalid settings {given}: expected a default dtype, whether operators are "
            "deterministic, whether they only warn, and a precision of float32 products"
        )
    return given


def _apply(settings: Settings) -> Settings:
    """Applies settings to this process, and returns the former ones."""
    before = (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
    )
    dtype, deterministic, warns_only, precision = settings
    if dtype != before[0]:
        torch.set_default_dtype(dtype)
    if (deterministic, warns_only) != before[1:3]:
        torch.use_deterministic_algorithms(deterministic, warn_only=warns_only)
    if precision != before[3]:
        torch.set_float32_matmul_precision(precision)
    return before


def _call_with_settings(
    settings: Settings,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> Any:
    """Calls an operator with settings, which are reset afterwards."""
    with _settings_lock:
        before = _apply(settings)
        try:
            return call(*args, **(kwargs or {}))
        finally:
            _apply(before)


def _call_without_settings(
    settings: Settings,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> Any:
    """Calls an operator with the settings of the process. Ignores ``settings``."""
    return call(*args, **(kwargs or {}))


def _allocate(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    return torch.zeros(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def _view(
    storage: torch.UntypedStorage, dtype: torch.dtype, sizes: Any, strides: Any, offset: int
) -> torch.Tensor:
    """Returns a view of a storage.

    Raises:
        ValueError: The view would exceed the storage, or a stride is negative.
    """
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if 0 not in sizes and (
        min(strides, default=0) < 0 or (last + 1) * empty.element_size() > storage.nbytes()
    ):
        raise ValueError(
            f"view out of bounds: sizes {sizes}, strides {strides}, offset {offset} and {dtype} in "
            f"a storage of {storage.nbytes()} bytes"
        )
    return empty.set_(storage, offset, sizes, strides)


def _copy_with_layout(
    tensor: torch.Tensor, dtype: torch.dtype, sizes: Any, strides: Any, offset: int, nbytes: int
) -> torch.Tensor:
    """Returns a copy of a tensor with this layout, in a new storage of ``nbytes`` bytes."""
    copy = _view(_allocate(nbytes, tensor.device), dtype, sizes, strides, offset)
    return copy.copy_(tensor)


def _scalar(dtype: torch.dtype, element: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(element), dtype=dtype).reshape(())


def _constant(name: str) -> Any:
    """Returns the memory format or layout with this name in ``torch``."""
    constant = getattr(torch, name, None)
    if not isinstance(constant, (torch.memory_format, torch.layout)):
        raise LookupError(f"PyTorch has no memory format or layout {name!r}")
    return constant


def _host_bytes(tensor: torch.Tensor) -> Any:
    """Returns a DLPack capsule of a tensor's elements, contiguous and on the host."""
    host = tensor.contiguous() if tensor.device.type == "cpu" else tensor.cpu().contiguous()
    flat = host.detach().as_strided((host.numel(),), (1,))
    return torch._C._to_dlpack(flat.view(torch.uint8))


def _bytes_of(storage: torch.UntypedStorage, offset: int, nbytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, offset, (nbytes,), (1,)
    )


def _storage_bytes(storage: torch.UntypedStorage, offset: int, nbytes: int) -> Any:
    """Returns a DLPack capsule of a part of a host storage, without a copy."""
    return torch._C._to_dlpack(_bytes_of(storage, offset, nbytes))


def _staging(storage: torch.UntypedStorage, nbytes: int) -> tuple[torch.Tensor, Any]:
    """Allocates host memory for bytes to be copied to a storage, pinned for an accelerator.

    Returns:
        The memory as a tensor, and a DLPack capsule of it.
    """
    staged = torch.empty(nbytes, dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
    return staged, torch._C._to_dlpack(staged)


def _copy_staged(storage: torch.UntypedStorage, offset: int, staged: torch.Tensor) -> None:
    # PyTorch does not reuse pinned memory before the copy is done.
    _bytes_of(storage, offset, staged.numel()).copy_(staged, non_blocking=True)


def _hooks(
    devices: list[torch.device],
    exchange: Exchange,
    *,
    staged: bool = False,
    shared: bool = False,
    checked: bool = False,
    budget: int | None = None,
    functions: Functions | None = None,
) -> types.SimpleNamespace:
    """Returns the functions of ``Hooks`` (src/remote/server/hooks.rs) for the native half."""
    return types.SimpleNamespace(
        session=functools.partial(Session, exchange, len(devices), checked, budget, functions),
        allocate=_allocate,
        view=_view,
        restrided=_copy_with_layout,
        from_capsule=dlpack.from_dlpack,
        scalar=_scalar,
        constant=_constant,
        host_bytes=_host_bytes,
        storage_bytes=_storage_bytes,
        staging=_staging,
        copy_staged=_copy_staged,
        default_settings=_DEFAULT_SETTINGS,
        settings=_checked_settings,
        with_settings=_call_without_settings if shared else _call_with_settings,
        guard=torch._C._AutoDispatchBelowAutograd,
        devices=devices,
        on_host=not staged and all(device.type == "cpu" for device in devices),
    )


def server(
    listen: str, *, devices: list[torch.device], token: str | None = None, insecure: bool = False,
    cert: Any = None, key: Any = None, ca: Any = None, idle_timeout: float = 30.0,
    stall_timeout: float = 300.0,
    staged: bool = False, exchange: Exchange | None = None, shared: bool = False,
    budget: int | None = None, functions: Functions | None = None,
) -> _native.RemoteServer:  # fmt: skip
    """Creates a server that runs operators in this process. It listens when this returns.

    Args:
        listen: Its address: "HOST:PORT" or "unix:PATH".
        devices: Its devices.
        token: The secret that clients must send.
        insecure: Whether to accept clients without a token or certificate on an address that other
            computers can reach. These are all addresses except loopback and Unix sockets.
        cert: A certificate chain (PEM). Clients then use TLS.
        key: The private key of the certificate (PEM).
        ca: Accept only clients with a certificate of these authorities (PEM).
        idle_timeout: The longest silence of a client, in seconds, while the server waits for it.
            After this time, the connection is lost.
        stall_timeout: Seconds without progress after which a transfer fails.
        staged: Whether to receive payloads into separate memory, as for a GPU.
        exchange: What sessions can get from outside. By default, only each other's tensors.
        shared: Whether this process is also the client. Operators then use its default dtype.
        budget: The most memory for weights that a session loads. See ``Checkpoints``.
        functions: The Python functions that clients can call. By default there are none.
    """
    hooks = _hooks(
        devices, exchange or LocalExchange(), staged=staged, shared=shared, budget=budget,
        functions=functions,
    )  # fmt: skip
    settings = _settings(token, idle_timeout, stall_timeout, True, None, LIMIT_BYTES)
    return _native.RemoteServer(listen, hooks, settings, insecure, cert, key, ca)


def session_server(
    handoffs: socket.socket,
    exchange: Exchange,
    devices: list[torch.device],
    idle_timeout: float = 30.0,
    stall_timeout: float = 300.0,
    *,
    budget: int | None = None,
    functions: Functions | None = None,
    idle: float | None = None,
) -> _native.RemoteServer:
    """Creates a server of one session. The broker passes the connections to this process.

    The server checks the indices of operators whose indices PyTorch does not check.

    Args:
        handoffs: The socket over which connections arrive. The server takes ownership of it.
        exchange: Exchanges tensors with other sessions and machines.
        devices: The devices of the server.
        idle_timeout: The longest silence of the client, in seconds, while the server waits for it.
            After this time, the connection is lost.
        stall_timeout: Seconds without progress after which a transfer fails.
        budget: The most memory for weights that the session loads. See ``Checkpoints``.
        functions: The Python functions that the client can call. By default there are none.
        idle: Seconds without a request after which the session ends.
    """
    settings = _settings(None, idle_timeout, stall_timeout, True, None, LIMIT_BYTES)
    hooks = _hooks(devices, exchange, checked=True, budget=budget, functions=functions)
    return _native.RemoteServer.from_handoffs(handoffs.detach(), hooks, settings, idle)


def devices_of(kind: str, count: int | None = None) -> list[torch.device]:
    """Returns the devices of a server.

    Args:
        kind: "cpu", "cuda", or "accelerator" for the accelerator of PyTorch, whatever its type.
        count: The number of devices. By default all, or 8 devices that share the CPU.

    Raises:
        DeviceUnavailableError: PyTorch finds fewer devices, or none.
    """
    if kind == "cpu":
        return [torch.device("cpu")] * (8 if count is None else count)
    if kind == "cuda":
        name, found = "GPUs", torch.device("cuda") if torch.cuda.is_available() else None
    else:
        name, found = "accelerators", torch.accelerator.current_accelerator(check_available=True)
    available = 0 if found is None else torch.get_device_module(found).device_count()
    if found is None or available < (count or 1):
        raise DeviceUnavailableError(
            f"not enough {name}: expected at least {count or 1}, but PyTorch finds {available}"
        )
    return [torch.device(found.type, index) for index in range(count or available)]
