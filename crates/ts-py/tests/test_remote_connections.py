# SPDX-License-Identifier: MIT OR Apache-2.0
"""Connections from machines to other programs: what is allowed, how they fail and how they end."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
from serving import Serving
from tensorstream.errors import (
    ConfigurationError,
    ConnectionLost,
    ConnectionTimeout,
    OutOfMemoryError,
    RemoteTensorError,
)
from tensorstream.remote import RemoteMachine, load_state_dict
from tensorstream.remote.client import _server_operators as operators
from tensorstream.serve import _broker, _messages


class Receiver:
    """A listener that accepts connections on a thread, and keeps what it receives."""

    def __init__(self, listener: ts.Listener, reads: bool = True) -> None:
        self.address = listener.address
        self.received: queue.Queue[Any] = queue.Queue()
        self._listener, self._reads = listener, reads
        self.connections: list[ts.Connection] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                self.connections.append(self._listener.accept())
                if self._reads:
                    self._read(self.connections[-1])
        except ConfigurationError:
            return  # the listener is closed

    def _read(self, connection: ts.Connection) -> None:
        while True:
            try:
                item = connection.recv()
            except OutOfMemoryError:
                self.received.put("refused")
                continue
            except ConnectionLost:
                return self.received.put("lost")
            if item is None:
                return self.received.put("closed")
            self.received.put(item.to_torch() if isinstance(item, ts.Tensor) else item)


@contextmanager
def receiving(reads: bool = True, **options: Any) -> Iterator[Receiver]:
    yield Receiver(ts.listen("127.0.0.1:0", **options), reads)


def test_only_allowed_addresses_can_be_reached() -> None:
    with receiving() as receiver, receiving() as other:
        options = {"--send-to": receiver.address}
        with Serving(options) as server, RemoteMachine("tcp", server.address) as machine:
            with pytest.raises(ConfigurationError, match=rf"--send-to {other.address}"):
                machine.connect(other.address)
            with machine.connect(receiver.address) as connection:
                connection.send(torch.ones(2, device=machine.device()))
            assert torch.equal(receiver.received.get(timeout=20), torch.ones(2))
            assert receiver.received.get(timeout=20) == "closed"


def test_machines_that_send_do_not_exchange_tensors_with_servers() -> None:
    """For that, they would send their own token."""
    with started("tcp") as source, started("tcp") as target:
        x = torch.ones(1000, device=source.device())
        before = source.stats()["downloaded_bytes"]
        assert torch.equal(x.to(target.device()).cpu(), torch.ones(1000))
        assert source.stats()["downloaded_bytes"] >= before + x.nbytes


def test_tokens_and_tls_of_the_listener(trusted: dict[str, Path]) -> None:
    own = {"cert": trusted["cert"], "key": trusted["key"]}
    with (
        receiving(token="sesame", **own) as receiver,
        Serving({"--send-to": "any", "--peer-ca": trusted["ca"]}) as server,
        RemoteMachine("tcp", server.address) as machine,
    ):
        with pytest.raises(ConnectionLost, match="token"):
            machine.connect(receiver.address, token="another", tls=True)
        with machine.connect(receiver.address, token="sesame", tls=True) as connection:
            connection.send_message(b"hidden")
        assert receiver.received.get(timeout=20) == b"hidden"
        with Serving({"--send-to": "any"}) as plain, RemoteMachine("tcp", plain.address) as without:
            with pytest.raises(ConfigurationError, match="--peer-ca"):
                without.connect(receiver.address, token="sesame", tls=True)
            with pytest.raises((ConnectionLost, ConnectionTimeout, ts.ProtocolError)):
                without.connect(receiver.address, token="sesame", idle_timeout=2.0)


@contextmanager
def started(kind: str) -> Iterator[RemoteMachine]:
    """Starts a machine that can send to all listeners."""
    with ExitStack() as stack:
        served = kind == "tcp"
        place = [stack.enter_context(Serving({"--send-to": "any"})).address] if served else []
        yield stack.enter_context(RemoteMachine(kind, *place))


@pytest.mark.parametrize("kind", ["mock", "tcp"])
def test_failures_are_typed_and_leave_the_machine_usable(kind: str) -> None:
    with ExitStack() as stack:
        machine = stack.enter_context(started(kind))
        receiver, other = (stack.enter_context(receiving()) for _ in range(2))
        connection = machine.connect(receiver.address)
        x = torch.arange(4, device=machine.device())
        rar: Any = "rar"
        numbers: Any = {"a": 1}
        wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
            (ConfigurationError, "move it there", lambda: connection.send(x.cpu())),
            (ConfigurationError, "at most 65536", lambda: connection.send_message(bytes(65537))),
            (ConfigurationError, "compression", lambda: connection.send(x, compression=rar)),
            (ConfigurationError, "too long", lambda: connection.send(x, "n" * 40_000)),
            (ConfigurationError, "must be texts", lambda: connection.send(x, metadata=numbers)),
            (ConfigurationError, "expected HOST:PORT", lambda: machine.connect("nowhere")),
            (ConfigurationError, "60 s", lambda: machine.connect("h:1", idle_timeout=1e9)),
            (ConfigurationError, "positive", lambda: machine.connect("h:1", idle_timeout=-1)),
            (ConnectionLost, "refused", lambda: machine.connect("127.0.0.1:1")),
            (ConfigurationError, "machine.connect", lambda: sent_from_here(other.address, x)),
        ]
        for error, match, call in wrong:
            with pytest.raises(error, match=match):
                call()
        connection.send(x)
        assert torch.equal(receiver.received.get(timeout=20), x.cpu())
        for _ in range(2):
            connection.close()
        assert receiver.received.get(timeout=20) == "closed"
        with pytest.raises(ConfigurationError, match="is closed"):
            connection.send(x)
        with pytest.raises(ZeroDivisionError), machine.connect(receiver.address) as another:
            another.send(x)
            # The receiver has accepted the connection.
            assert torch.equal(receiver.received.get(timeout=20), x.cpu())
            raise ZeroDivisionError
        # What was sent may not be all.
        assert receiver.received.get(timeout=20) == "lost"
        assert "closed" in repr(another)
        assert x.sum().item() == 6


def sent_from_here(address: str, tensor: torch.Tensor) -> None:
    with ts.connect(address) as connection:
        connection.send(tensor)


@pytest.mark.parametrize("kind", ["mock", "tcp"])
def test_tensors_that_the_program_refuses_are_reported(kind: str) -> None:
    with started(kind) as machine, receiving(limit_bytes=1 << 20) as receiver:
        large = torch.zeros(8 << 20, device=machine.device())
        connection = machine.connect(receiver.address)
        with pytest.raises(ConnectionLost, match="cancelled"):
            for _ in range(10):
                connection.send(large)
                time.sleep(0.2)
        with pytest.raises(ConfigurationError, match="is closed"):
            connection.send(large[:1])


def test_arguments_that_are_too_long_do_not_end_the_session() -> None:
    with started("tcp") as machine, receiving() as receiver:
        x = torch.ones(1, device=machine.device())
        with pytest.raises(ConfigurationError, match="too long"):
            machine.connect(receiver.address, token="t" * 40_000)
        machine.connect(receiver.address).close("r" * 40_000)
        assert receiver.received.get(timeout=20) == "closed"
        assert x.item() == 1


def test_failed_transfers_leave_nothing_in_the_server() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(Serving({"--send-to": "any"}))
        machine = stack.enter_context(RemoteMachine("tcp", server.address))
        receiver = stack.enter_context(receiving(reads=False))
        large = torch.zeros(8 << 20, device=machine.device())
        held: list[int] = []
        for _ in range(6):
            connection = machine.connect(receiver.address, stall_timeout=0.2, shared_memory=False)
            with pytest.raises(ConnectionTimeout):
                connection.send(large)
            for _ in range(3):
                with pytest.raises(ConfigurationError, match="is closed"):
                    connection.send(large)
            held.append(len(os.listdir(f"/proc/{server.process.pid}/fd")))
        assert held[-1] < held[0] + 4, held
        maps = Path(f"/proc/{server.process.pid}/maps")
        for _ in range(200):  # the server ends the last transfer on a thread
            if "tensorstream-offer" not in maps.read_text(encoding="utf-8"):
                break
            time.sleep(0.05)
        else:
            pytest.fail("the memory of a failed transfer is still mapped")


def test_memory_with_holes_is_refused(tmp_path: Path) -> None:
    """Reading it would allocate memory of the server's main process."""
    descriptor = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, 1 << 20)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _messages.SEALS)
        metadata = {"dtype": "uint8", "sizes": [1 << 20]}
        with pytest.raises(ConfigurationError, match="holes"):
            _broker._mapped(metadata, descriptor, None)
        with pytest.raises(ConfigurationError, match="session-memory"):
            _broker._mapped(metadata, descriptor, 1 << 19)
        with pytest.raises(ConfigurationError, match="sealed"):
            _broker._mapped(metadata, None, None)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_stream_on_the_machine_are_sent(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = {f"w{number}": torch.randn(1024, 1024).to(dtype) for number in range(12)}
    ts.save_file(weights, tmp_path / "weights.safetensors")
    budget = sum(weight.nbytes for weight in weights.values()) // 3
    options = {"--weights": tmp_path, "--send-to": "any", "--budget": budget}
    modes: list[Callable[[], AbstractContextManager[object]]]
    modes = [torch.no_grad, torch.inference_mode, lambda: torch.autocast("ts", torch.bfloat16)]
    with (
        receiving() as receiver,
        Serving(options) as server,
        RemoteMachine("tcp", server.address) as machine,
    ):
        loaded = load_state_dict(tmp_path / "weights.safetensors", machine.device())
        for mode in modes:
            with mode(), machine.connect(receiver.address) as connection:
                for name, weight in loaded.items():
                    connection.send(weight, name, compression="zstd" if name == "w3" else None)
            for name in loaded:
                assert torch.equal(receiver.received.get(timeout=30), weights[name])
            assert receiver.received.get(timeout=20) == "closed"
        assert machine.stats()["downloaded_bytes"] == 0


def test_a_tensor_that_could_not_be_computed_is_not_sent() -> None:
    with receiving() as receiver, RemoteMachine.local(threads=1) as machine:
        table = torch.ones(3, device=machine.device())
        with machine.connect(receiver.address) as connection:
            with pytest.raises(RemoteTensorError, match="out of"):
                connection.send(table[torch.tensor([9], device=machine.device())])
            connection.send_message(b"next")
        assert receiver.received.get(timeout=20) == b"next"


def test_connections_of_a_session_are_limited_and_end_with_it() -> None:
    with receiving(reads=False) as receiver, Serving({"--send-to": "any"}) as server:
        with RemoteMachine("tcp", server.address) as machine:
            first, *_ = [machine.connect(receiver.address) for _ in range(8)]
            with pytest.raises(ConfigurationError, match="8 connections"):
                machine.connect(receiver.address)
            first.close()
            machine.connect(receiver.address)
        while len(receiver.connections) < 9:
            threading.Event().wait(0.01)
        assert receiver.connections[0].recv(timeout=20) is None
        for connection in receiver.connections[1:]:
            with pytest.raises(ConnectionLost, match="without closing it"):
                connection.recv(timeout=20)


def test_a_session_that_ends_while_it_sends_ends_the_transfer() -> None:
    """The program does not read, so the transfer waits."""
    with (
        receiving(reads=False, limit_bytes=1 << 40) as receiver,
        Serving({"--send-to": "any"}) as server,
    ):
        machine = RemoteMachine("tcp", server.address, retry=0.0)
        connection = machine.connect(receiver.address, shared_memory=False)
        big = torch.zeros(64 << 20, device=machine.device())
        sending = threading.Thread(target=lambda: swallow(lambda: connection.send(big)))
        sending.start()
        sending.join(2.0)
        assert sending.is_alive()
        ended = threading.Thread(target=machine.stop)
        ended.start()
        (process,) = server.sessions()
        os.kill(process, signal.SIGKILL)
        with pytest.raises((ConnectionLost, OutOfMemoryError)):
            while receiver.connections[0].recv(timeout=30) is not None:
                pass
        for thread in (sending, ended):
            thread.join(30)
            assert not thread.is_alive()


def swallow(call: Callable[[], object]) -> None:
    with suppress(ConnectionLost, RemoteTensorError):
        call()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda at, x: operators.CONNECT(x, at, "{}"), "invalid options"),
        (lambda at, x: operators.CONNECT(x, at, "7"), "invalid options"),
        (lambda at, x: operators.CONNECT(x, at, "{"), "Expecting"),
        (lambda at, x: operators.SEND(x, 99, json.dumps({"message": True})), "is closed"),
        (lambda at, x: operators.SEND(x, -1, "[]"), "invalid options"),
        (lambda at, x: operators.SEND(x, 2**40, "{}"), "is closed"),
        (lambda at, x: operators.DISCONNECT(x, 99, "bye"), "is closed"),
    ],
)
def test_invalid_requests_are_refused(call: Callable[[str, torch.Tensor], str], match: str) -> None:
    with Serving({"--send-to": "any"}) as server, RemoteMachine("tcp", server.address) as machine:
        x = torch.ones(1, device=machine.device())
        answer = json.loads(call("127.0.0.1:1", x))
        assert match in answer["message"], answer
        assert x.item() == 1
