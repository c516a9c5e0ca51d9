# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests connections, which send tensors and messages between processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstream as ts
import torch


@contextmanager
def pair(
    at: str = "127.0.0.1:0", near: Any = None, far: Any = None
) -> Iterator[tuple[ts.Connection, ts.Connection]]:
    """Yields both ends of a connection in this process: the client and the server."""
    with ts.listen(at, **(far or {})) as listener:
        accepted: list[ts.Connection] = []

        def accept() -> None:
            connection = listener.accept(timeout=20)
            assert connection is not None
            accepted.append(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        connection = ts.connect(listener.address, **(near or {}))
        thread.join()
    yield connection, accepted[0]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.critical
def test_tensors_and_messages_arrive_unchanged(tmp_path: Path) -> None:
    for at in ("127.0.0.1:0", f"unix:{tmp_path}/socket"):
        with pair(at) as (near, far):
            tensors = [
                torch.randn(300, 500),
                torch.randn(7, 9).t(),
                torch.zeros(0, 3),
                torch.tensor(3),
            ]
            tensors += [torch.randn(10, dtype=torch.bfloat16), torch.randn(3, requires_grad=True)]
            large = torch.randn(3_000_000)

            def send(
                near: ts.Connection = near, tensors: Any = tensors, large: torch.Tensor = large
            ) -> None:
                for number, tensor in enumerate(tensors):
                    near.send(tensor, f"t{number}", metadata={"layer": str(number)})
                near.send_message(b"tokens")
                near.send(np.arange(5), "numpy", compression="zstd", checksums=True)
                near.send(large, "large", compression="split", checksums=True)
                near.close()

            thread = in_thread(send)
            for number, tensor in enumerate(tensors):
                came = far.recv()
                assert isinstance(came, ts.Tensor)
                assert (came.name, came.metadata) == (f"t{number}", {"layer": str(number)})
                assert torch.equal(came.to_torch(), tensor.detach())
                assert came.strides == tuple(tensor.stride()) or tensor.numel() < 2
            assert far.recv() == b"tokens"
            rest = list(far)
            assert [tensor.name for tensor in rest if isinstance(tensor, ts.Tensor)] == [
                "numpy",
                "large",
            ]
            assert torch.equal(rest[1].to_torch(), large)
            assert far.recv() is None
            thread.join()


def test_a_state_dict_keeps_shared_storages() -> None:
    weight = torch.randn(64, 32)
    state = {
        "a": weight,
        "b": torch.randn(5),
        "tied": weight,
        "t": weight.t(),
        "row": weight[3],
        "i": torch.arange(4),
    }
    with pair() as (near, far):
        thread = in_thread(lambda: near.send_state_dict(state))
        came = far.recv_state_dict(timeout=20)
        thread.join()
        assert came is not None
        assert set(came) == set(state)
        assert all(torch.equal(came[name].to_torch(), state[name]) for name in state)
        assert came["a"].shares_memory(came["tied"])
        assert came["t"].to_torch().data_ptr() == came["a"].to_torch().data_ptr()
        assert near.stats()["sent_bytes"] < 64 * 32 * 4 + 5 * 4 + 4 * 8 + 2000
        thread = in_thread(near.close)
        assert far.recv_state_dict(timeout=20) is None
        thread.join()


def test_recv_uses_existing_and_pooled_memory() -> None:
    with pair(far={"pool": ts.PoolConfig(pool_bytes=64 << 20, max_block_bytes=16 << 20)}) as (
        near,
        far,
    ):
        memory = torch.zeros(1_000_000)
        sent = torch.randn(1_000_000)
        thread = in_thread(lambda: near.send(sent, "w"))
        came = far.recv(into=memory)
        thread.join()
        assert torch.equal(memory, sent)
        assert isinstance(came, ts.Tensor)
        assert came.to_torch().data_ptr() == memory.data_ptr()
        assert far.stats()["copied_bytes"] < 5 << 20

        thread = in_thread(lambda: near.send(sent, "w"))
        with pytest.raises(ts.ConfigurationError, match="4000000 bytes"):
            far.recv(into=torch.zeros(5))
        came = far.recv()  # the tensor is still there
        thread.join()
        assert isinstance(came, ts.Tensor)
        assert torch.equal(came.to_torch(), sent)
        del came

        addresses = set()
        for _ in range(5):
            thread = in_thread(lambda: near.send(sent, "w"))
            tensor = far.recv()
            assert isinstance(tensor, ts.Tensor)
            addresses.add(tensor.to_torch().data_ptr())
            del tensor
            thread.join()
        assert len(addresses) == 1, "the block is reused"
        assert far.stats()["pool"]["hit_rate"] > 50


def test_sending_does_not_copy_the_tensor() -> None:
    """Sends 400 MB, and checks that the memory of the process grows by less than 64 MiB."""
    with pair() as (near, far):
        sent = torch.zeros(100_000_000)
        into = torch.ones(100_000_000)
        before = _resident()
        thread = in_thread(lambda: near.send(sent, "w"))
        far.recv(into=into)
        thread.join()
        assert _resident() - before < 64 << 20
        assert not into.any()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_tls_and_tokens_authenticate_peers(
    trusted: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    far = {"cert": trusted["cert"], "key": trusted["key"], "token": "sesame"}
    near = {"ca": trusted["ca"], "token": "sesame"}
    with pair(near=near, far=far) as (first, second):
        thread = in_thread(lambda: first.send(torch.arange(1_000_000), "w"))
        came = second.recv()
        thread.join()
        assert isinstance(came, ts.Tensor)
        assert torch.equal(came.to_torch(), torch.arange(1_000_000))
    with ts.listen("127.0.0.1:0", token="sesame") as listener:
        accepted: list[ts.Connection | None] = []
        accepting = in_thread(lambda: accepted.append(listener.accept(timeout=20)))
        host, port = listener.address.rsplit(":", 1)
        # Silent clients do not delay others, and a refused client does not end ``accept``.
        silent = [socket.create_connection((host, int(port))) for _ in range(3)]
        with pytest.raises(ts.ConnectionLost, match="token"):
            ts.connect(listener.address, token="another")
        known = ts.connect(listener.address, token="sesame")
        accepting.join()
        known.close()
        assert isinstance(accepted[0], ts.Connection)
        assert "refused" in caplog.text
        assert "token" in caplog.text
        for client in silent:
            client.close()
    own = {"cert": trusted["cert"], "key": trusted["key"]}
    for certificates in ({}, own):
        # Without `ca` and `token`, the listener does not authenticate clients.
        with pytest.raises(ts.ConfigurationError, match="other machines can reach"):
            ts.listen("0.0.0.0:0", **certificates)
    ts.listen("0.0.0.0:0", ca=trusted["ca"], **own).close()
    with pytest.raises(ts.ConfigurationError, match="cannot verify the peer"):
        ts.connect("127.0.0.1:1", cert=trusted["cert"], key=trusted["key"])
    with pytest.raises(ts.ConfigurationError, match="protects nothing"):
        ts.listen("127.0.0.1:0", token="")


def test_connection_errors_are_typed_and_clear() -> None:
    free = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ts.ConnectionTimeout, match="127"):
        ts.connect(address, idle_timeout=0.3)  # accepts, but never answers
    free.close()
    with pytest.raises(ts.ConnectionLost, match="connecting"):
        ts.connect(address)
    for bad in ("", "host", "unix:"):
        with pytest.raises(ts.ConfigurationError, match="HOST:PORT"):
            ts.connect(bad)
    with pytest.raises(ts.ConfigurationError, match="timeout"):
        ts.connect("127.0.0.1:1", idle_timeout=-1)
    with ts.listen("127.0.0.1:0") as listener:
        with pytest.raises(TimeoutError, match="no client completed a handshake with 127"):
            listener.accept(timeout=0.05)
        listener.close()
        with pytest.raises(ts.ConfigurationError, match="closed"):
            listener.accept()
    pooled = {"limit_bytes": 1000, "pool": ts.PoolConfig(pool_bytes=1 << 20)}
    with pair(far=pooled) as (near, far):
        near.send(torch.zeros(1000), "w")
        with pytest.raises(ts.OutOfMemoryError, match='"w" of 4000 bytes'):
            far.recv()
    with pair(far={"limit_bytes": 1000}) as (near, far):
        thread = in_thread(lambda: near.send(torch.zeros(10), "small"))
        assert isinstance(far.recv(), ts.Tensor)
        thread.join()
        near.send(torch.zeros(1000), "w")
        with pytest.raises(ts.OutOfMemoryError, match='"w" of 4000 bytes'):
            far.recv()
        with pytest.raises(TimeoutError, match="no complete tensor"):
            far.recv(timeout=0.1)  # this also notifies the other end
        with pytest.raises(ts.ConnectionLost, match="memory"):
            near.recv(timeout=5)  # its stream was cancelled; the connection stays open
        thread = in_thread(lambda: near.send(torch.ones(10), "small again"))
        again = far.recv()
        thread.join()
        assert isinstance(again, ts.Tensor)
        assert again.name == "small again"
        with pytest.raises(ts.ConfigurationError, match="compression"):
            near.send(torch.zeros(1), compression="rar")
        with pytest.raises(TypeError):
            near.send("text")
        with pytest.raises(ts.ConnectionTimeout, match="no complete tensor"):
            near.recv(timeout=0.05)
        thread = in_thread(near.close)
        assert far.recv(timeout=20) is None
        thread.join()
        near.close()
        with pytest.raises(ts.ConfigurationError, match="closed"):
            near.send(torch.zeros(1))


def test_closing_after_the_peer_closed_is_allowed() -> None:
    for receives in (False, True):
        with pair() as (near, far):
            thread = in_thread(lambda far=far: (far.recv(timeout=20), far.close("that was all")))
            near.send(torch.ones(1000))
            thread.join()
            assert not receives or near.recv(timeout=20) is None
            near.close()


def test_two_senders_that_never_receive_time_out() -> None:
    impatient = {"stall_timeout": 0.5}
    with pair(near=impatient, far=impatient) as (near, far):
        failures: list[BaseException] = []

        def send(end: ts.Connection) -> None:
            try:
                end.send(torch.zeros(10_000_000))
            except (ts.ConnectionTimeout, ts.ConnectionLost) as error:
                failures.append(error)

        threads = [threading.Thread(target=send, args=(end,)) for end in (near, far)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures
        assert any("has made no progress" in str(error) for error in failures)


def _send_slowly(address: str) -> None:
    with ts.connect(address) as connection:
        for number in range(3):
            time.sleep(0.1)
            connection.send(torch.full((1000,), float(number)), str(number))


def test_progress_is_reported_between_processes() -> None:
    with ts.listen("127.0.0.1:0") as listener:
        child = multiprocessing.get_context("spawn").Process(
            target=_send_slowly, args=(listener.address,)
        )
        child.start()
        connection = listener.accept(timeout=60)
        assert connection is not None
        seen: list[int] = []
        came = [connection.recv(progress=seen.append) for _ in range(3)]
        assert [
            float(tensor.to_numpy()[0]) for tensor in came if isinstance(tensor, ts.Tensor)
        ] == [0, 1, 2]
        assert seen == sorted(seen)
        child.join()
        assert child.exitcode == 0


def test_a_timeout_loses_nothing() -> None:
    with pair() as (near, far):
        near.send(torch.arange(3.0), "first")
        with pytest.raises(ts.ConnectionTimeout, match="end of the stream did not arrive"):
            # Another tensor of the state dict could still follow.
            far.recv_state_dict(timeout=0.3)
        first = far.recv()
        assert isinstance(first, ts.Tensor) and first.name == "first"


def test_ctrl_c_interrupts_a_wait() -> None:
    with pair() as (_, far):
        timer = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
        timer.start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            far.recv()
        assert time.monotonic() - begin < 10
        timer.join()


def test_concurrent_use_of_a_connection_is_an_error() -> None:
    with pair() as (near, far):
        waiting = in_thread(far.recv)
        time.sleep(0.2)
        with pytest.raises(ts.ConfigurationError, match="another thread"):
            far.send_message(b"now")
        near.send_message(b"go on")
        waiting.join()


def test_deprecated_names_of_timeouts_work_and_warn() -> None:
    with pytest.warns(DeprecationWarning, match="'timeout' is deprecated; use 'idle_timeout'"):
        ts.listen("127.0.0.1:0", timeout=5).close()
    with pytest.raises(TypeError, match="got both 'stall_timeout' and 'patience'"):
        ts.listen("127.0.0.1:0", patience=5, stall_timeout=5)


def test_a_producer_that_dies_has_not_finished() -> None:
    """Between two tensors, and within a state dict."""
    for sends_dict in (False, True):
        with pair() as (near, far):
            for number in range(3):
                near.send(torch.ones(10), str(number))
            thread = in_thread(lambda near=near: _cut(near))
            thread.join()
            received = []
            with pytest.raises(ts.ConnectionLost, match="without closing it"):
                if sends_dict:
                    far.recv_state_dict()
                for tensor in far:
                    received.append(tensor)
            if sends_dict:
                # What had arrived is not lost.
                assert isinstance(far.recv(), ts.Tensor)
            else:
                assert [tensor.name for tensor in received] == ["0", "1", "2"]


def _cut(connection: ts.Connection) -> None:
    connection._native._allow_abort()
    connection._native._abort()


def test_lazy_tensors_arrive_with_their_values() -> None:
    x = torch.tensor([1 + 2j, 3 + 4j])
    negated, conjugated = x.conj().imag, x.conj()
    assert negated.is_neg() and conjugated.is_conj()
    with pair() as (near, far):
        near.send(negated, "negated")
        near.send(conjugated, "conjugated")
        near.send_state_dict({"x": x, "conjugated": conjugated, "negated": negated})
        for expected in (negated, conjugated):
            came = far.recv()
            assert isinstance(came, ts.Tensor)
            assert torch.equal(came.to_torch(), expected)
        together = far.recv_state_dict()
        assert together is not None
        assert torch.equal(together["negated"].to_torch(), negated)
        assert torch.equal(together["conjugated"].to_torch(), conjugated)
        assert torch.equal(together["x"].to_torch(), x)
        near.send(torch.ones(2), "real")
        with pytest.raises(BufferError, match=r"resolve_neg"):
            far.recv(into=negated)


def test_close_ends_calls_of_other_threads() -> None:
    errors: list[Exception] = []

    def wait(call: Callable[[], object]) -> None:
        try:
            call()
        except ts.ConfigurationError as error:
            errors.append(error)

    listener = ts.listen("127.0.0.1:0")
    thread = in_thread(lambda: wait(listener.accept))
    time.sleep(0.2)
    listener.close()
    thread.join(10)
    with pair() as (near, far):
        thread = in_thread(lambda: wait(far.recv))
        time.sleep(0.2)
        far.close()
        thread.join(10)
        assert near.recv() is None
    assert [str(error) for error in errors] == [
        "the listener is closed",
        "the connection is closed",
    ]


def test_the_socket_of_a_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(os.fspath(path))
    stale.close()
    with ts.listen(f"unix:{path}"):
        with pytest.raises(ts.ConnectionLost, match="in use"):
            ts.listen(f"unix:{path}")
        # The path may be that of another socket when the listener closes.
        path.unlink()
        other = socket.socket(socket.AF_UNIX)
        other.bind(os.fspath(path))
    assert path.exists()
    other.close()
    path.unlink()
    path.write_text("a file")
    with pytest.raises(ts.ConnectionLost):
        ts.listen(f"unix:{path}")
    assert path.read_text() == "a file"
