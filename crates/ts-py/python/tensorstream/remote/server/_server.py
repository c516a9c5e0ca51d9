# SPDX-License-Identifier: MIT OR Apache-2.0
"""The machine that has the tensors: PyTorch's operators by their names, for who asks."""

from __future__ import annotations

import functools
import socket
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from ... import _native
from ...errors import ConfigurationError
from ...wire._connection import LIMIT_BYTES, _settings
from . import _bounds
from ._exchange import Exchange, Fetch, LocalExchange, fetch_nothing

#: Namespaces whose operators may be asked for.
NAMESPACES = frozenset({"aten", "prims", "torchvision", "torchaudio", "quantized", "tensorstream"})
#: Those of a machine's own.
OWN = frozenset({
    "manual_seed", "rng_state", "set_rng_state", "give_generator", "given_generator",
    "default_dtype", "kind",
    "devices", "offer", "withdraw", "claim", "fetch",
})  # fmt: skip
#: Operators that reach beyond tensors - files, and other processes' memory - and one whose tensors
#: have no memory.
REFUSED = frozenset({
    "from_file", "_share_memory", "_new_shared_filename_cpu", "save", "load",
    "_efficientzerotensor",
})  # fmt: skip
#: Operators that give a tensor another shape or storage, as those do whose tag says so: a client
#: does that by itself, and what the machine keeps of a storage would be wrong.
RESHAPING = frozenset(
    {"set_", "set", "set_data", "resize", "_resize_output", "_resize_output_", "resize_as_sparse_"}
)

#: PyTorch has one default generator for all sessions,
_default_generator = threading.Lock()
#: and one dtype that numbers become.
_default_dtype = threading.Lock()


class Session:
    """What operators of one client have in common: generators, and what was offered to other
    machines.
    """

    def __init__(
        self, exchange: Exchange | None = None, devices: int = 1, checked: bool = False
    ) -> None:
        self._device_count = devices
        self._checked = checked
        self._generators: dict[torch.device, torch.Generator] = {}
        #: Those that stand for one of the client's while it draws from it.
        self._given: dict[torch.device, torch.Generator] = {}
        self._exchange = exchange or LocalExchange()
        self._tickets: set[str] = set()

    def __del__(self) -> None:
        for ticket in self._tickets:
            self._exchange.withdraw(ticket)

    def _generator(self, device: torch.device, given: bool = False) -> torch.Generator:
        generators = self._given if given else self._generators
        if device not in generators:
            generators[device] = torch.Generator(device)
        return generators[device]

    def define(self, name: str) -> tuple[Callable[..., Any], list[int], list[str]]:
        """What is called for an operator, and which of its arguments it writes to, by place and by
        name.
        """
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace not in NAMESPACES or base in REFUSED | RESHAPING | _bounds.SPARSE:
            raise PermissionError("this machine does not run it")
        if namespace == "tensorstream":
            if base not in OWN:
                raise LookupError("this machine has no such operator of its own")
            return getattr(self, "_" + base), [0] if base == "fetch" else [], []
        packet: Any = getattr(getattr(torch.ops, namespace), base, None)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            raise LookupError(f"PyTorch {torch.__version__} of this machine has no such operator")
        overloads = [getattr(packet, name) for name in packet.overloads()]
        if any(torch.Tag.inplace_view in each.tags for each in overloads):
            raise PermissionError("a client does it by itself: this machine does not run it")
        if not any(
            "Tensor" in str(a.type)
            for each in overloads
            for a in (*each._schema.arguments, *each._schema.returns)
        ):
            raise PermissionError(
                "it neither takes nor gives tensors: this machine does not run it"
            )
        if overload == "*":
            # That which is for the arguments: numbers in tensors' places have overloads of their
            # own.
            if base in _bounds.CHECKS:
                raise PermissionError("it takes no numbers for tensors")
            return packet, [0] if base.endswith("_") else [], ["out"]
        op = getattr(packet, overload or "default", None)
        if not isinstance(op, torch._ops.OpOverload):
            raise LookupError(f"PyTorch {torch.__version__} of this machine has no such overload")
        arguments = op._schema.arguments
        written = [
            (at, a)
            for at, a in enumerate(arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        places = [at for at, a in written if not a.kwarg_only]
        call = self._call(op)
        return (
            self._within_bounds(base, call) if self._checked else call,
            places,
            [a.name for _, a in written if a.kwarg_only],
        )

    def _within_bounds(self, base: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """An operator whose indices are looked at first, if PyTorch does not do that."""
        check = _bounds.CHECKS.get(base)
        if check is None:
            return call

        @functools.wraps(call)
        def checked(*args: Any, **kwargs: Any) -> Any:
            check(*args, **kwargs)
            return call(*args, **kwargs)

        return checked

    def _call(self, op: torch._ops.OpOverload) -> Callable[..., Any]:
        call: Callable[..., Any] = op._op
        if any(a.name == "generator" for a in op._schema.arguments):

            @functools.wraps(call)
            def drawn(*args: Any, **kwargs: Any) -> Any:
                generator = self._generator(
                    _device_of(args, kwargs), kwargs.get("generator") == "given"
                )
                return call(*args, **{**kwargs, "generator": generator})

            return drawn
        if torch.Tag.nondeterministic_seeded in op.tags:

            def seeded(*args: Any, **kwargs: Any) -> Any:
                device = _device_of(args, kwargs)
                own, shared = self._generator(device), _default(device)
                with _default_generator:
                    before = shared.get_state()
                    shared.set_state(own.get_state())
                    try:
                        return call(*args, **kwargs)
                    finally:
                        own.set_state(shared.get_state())
                        shared.set_state(before)

            return seeded
        return call

    def _manual_seed(self, anchor: torch.Tensor, seed: int) -> None:
        self._generator(anchor.device).manual_seed(seed)

    def _give_generator(self, anchor: torch.Tensor, state: torch.Tensor) -> None:
        self._generator(anchor.device, True).set_state(state.cpu())

    def _given_generator(self, anchor: torch.Tensor) -> torch.Tensor:
        return self._generator(anchor.device, True).get_state().to(anchor.device)

    def _offer(self, tensor: torch.Tensor) -> str:
        ticket = self._exchange.offer(tensor)
        self._tickets.add(ticket)
        return ticket

    def _withdraw(self, anchor: torch.Tensor, ticket: str) -> None:
        if ticket in self._tickets:
            self._tickets.discard(ticket)
            self._exchange.withdraw(ticket)

    def _claim(self, anchor: torch.Tensor, ticket: str) -> torch.Tensor:
        return self._exchange.claim(ticket).to(anchor.device)

    def _fetch(self, into: torch.Tensor, address: str, ticket: str) -> str:
        return self._exchange.fetch(into, address, ticket)

    def _default_dtype(self, dtype: torch.dtype) -> None:
        """Noted by who runs operators."""

    def _kind(self, anchor: torch.Tensor) -> str:
        return anchor.device.type

    def _devices(self, anchor: torch.Tensor) -> int:
        return self._device_count

    def _rng_state(self, anchor: torch.Tensor) -> torch.Tensor:
        return self._generator(anchor.device).get_state().to(anchor.device)

    def _set_rng_state(self, anchor: torch.Tensor, state: torch.Tensor) -> None:
        self._generator(anchor.device).set_state(state.cpu())


def _device_of(args: Any, kwargs: Any) -> torch.device:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return value[0].device
    return torch.device("cpu")


def _default(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _with_default(
    dtype: torch.dtype,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> Any:
    with _default_dtype:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return call(*args, **(kwargs or {}))
        finally:
            torch.set_default_dtype(before)


def _with_present_default(
    dtype: torch.dtype,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> Any:
    return call(*args, **(kwargs or {}))


def _allocate(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    return torch.zeros(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def _view(
    storage: torch.UntypedStorage, dtype: torch.dtype, sizes: Any, strides: Any, offset: int
) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    reach = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if 0 not in sizes and (
        min(strides, default=0) < 0 or (reach + 1) * empty.element_size() > storage.nbytes()
    ):
        raise ValueError(
            f"sizes {sizes}, strides {strides}, offset {offset} of {dtype}: not within "
            f"{storage.nbytes()} bytes"
        )
    return empty.set_(storage, offset, sizes, strides)


def _restrided(
    given: torch.Tensor, dtype: torch.dtype, sizes: Any, strides: Any, offset: int, nbytes: int
) -> torch.Tensor:
    there = _view(_allocate(nbytes, given.device), dtype, sizes, strides, offset)
    return there.copy_(given)


def _scalar(dtype: torch.dtype, element: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(element), dtype=dtype).reshape(())


def _constant(name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, (torch.memory_format, torch.layout)):
        raise LookupError(f"PyTorch has no memory format and no layout {name}")
    return found


def _host_bytes(tensor: torch.Tensor) -> Any:
    host = tensor.contiguous() if tensor.device.type == "cpu" else tensor.cpu().contiguous()
    flat = host.detach().as_strided((host.numel(),), (1,))
    return torch._C._to_dlpack(flat.view(torch.uint8))


def _bytes_of(storage: torch.UntypedStorage, offset: int, nbytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, offset, (nbytes,), (1,)
    )


def _storage_bytes(storage: torch.UntypedStorage, offset: int, nbytes: int) -> Any:
    return torch._C._to_dlpack(_bytes_of(storage, offset, nbytes))


def _staging(storage: torch.UntypedStorage, nbytes: int) -> tuple[torch.Tensor, Any]:
    """Memory that a GPU copies from by itself, where there is one."""
    staged = torch.empty(nbytes, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return staged, torch._C._to_dlpack(staged)


def _copy_staged(storage: torch.UntypedStorage, offset: int, staged: torch.Tensor) -> None:
    # PyTorch keeps pinned memory from being used again before it was copied.
    _bytes_of(storage, offset, staged.numel()).copy_(staged, non_blocking=True)


def _hooks(
    devices: list[torch.device],
    exchange: Exchange,
    *,
    staged: bool = False,
    shared: bool = False,
    checked: bool = False,
) -> types.SimpleNamespace:
    """Returns what the native half calls (``Hooks`` in remote/server/executor.rs)."""
    return types.SimpleNamespace(
        session=functools.partial(Session, exchange, len(devices), checked),
        allocate=_allocate,
        view=_view,
        restrided=_restrided,
        scalar=_scalar,
        constant=_constant,
        host_bytes=_host_bytes,
        storage_bytes=_storage_bytes,
        staging=_staging,
        copy_staged=_copy_staged,
        default_dtype=torch.float32,
        with_default=_with_present_default if shared else _with_default,
        guard=torch._C._AutoDispatchBelowAutograd,
        devices=devices,
        on_host=not staged and all(device.type == "cpu" for device in devices),
    )


def server(
    listen: str, *, devices: list[torch.device], token: str | None = None, insecure: bool = False,
    cert: Any = None, key: Any = None, ca: Any = None, idle_timeout: float = 30.0,
    stall_timeout: float = 300.0,
    staged: bool = False, fetch: Fetch = fetch_nothing, shared: bool = False,
) -> _native.RemoteServer:  # fmt: skip
    """Creates a server that runs operators in this process, and listens at "HOST:PORT" or
    "unix:PATH".

    Args:
        staged: Receive payloads into separate memory, as for devices without host memory.
        fetch: Fetches tensors from other machines; not allowed by default.
        shared: The process is also a client, whose default dtype operators use.
    """
    hooks = _hooks(devices, LocalExchange(fetch), staged=staged, shared=shared)
    settings = _settings(token, idle_timeout, stall_timeout, True, None, LIMIT_BYTES)
    return _native.RemoteServer(listen, hooks, settings, insecure, cert, key, ca)


def session_server(
    handoffs: socket.socket,
    exchange: Exchange,
    devices: list[torch.device],
    idle_timeout: float = 30.0,
    stall_timeout: float = 300.0,
) -> _native.RemoteServer:
    """Creates a server of one session, whose connections another process passes over ``handoffs``.
    Takes ownership of ``handoffs``. Checks the indices of operators that PyTorch does not check."""
    settings = _settings(None, idle_timeout, stall_timeout, True, None, LIMIT_BYTES)
    return _native.RemoteServer.from_handoffs(
        handoffs.detach(), _hooks(devices, exchange, checked=True), settings
    )


def devices_of(kind: str, count: int | None = None) -> list[torch.device]:
    """Devices of a kind, all or as many: of "cpu" any number stands for the one there is, and 8 if
    none is given.

    Raises:
        ConfigurationError: PyTorch finds no GPU, or fewer.
    """
    if kind == "cpu":
        return [torch.device("cpu")] * (8 if count is None else count)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < (count or 1):
        raise ConfigurationError(
            f"{count or 1} GPUs are needed, and PyTorch finds {there} on this computer"
        )
    return [torch.device("cuda", index) for index in range(there if count is None else count)]
