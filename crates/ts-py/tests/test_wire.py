# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tensors between processes."""

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
    """Both ends, in one process: the one that connects and the one that accepts."""
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


def beside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.critical
def test_tensors_and_messages_come_as_they_were_sent(tmp_path: Path) -> None:
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

            thread = beside(send)
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


def test_a_state_dict_keeps_its_aliases() -> None:
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
        thread = beside(lambda: near.send_state_dict(state))
        came = far.recv_state_dict(timeout=20)
        thread.join()
        assert came is not None
        assert set(came) == set(state)
        assert all(torch.equal(came[name].to_torch(), state[name]) for name in state)
        assert came["a"].shares_memory(came["tied"])
        assert came["t"].to_torch().data_ptr() == came["a"].to_torch().data_ptr()
        assert near.stats()["sent_bytes"] < 64 * 32 * 4 + 5 * 4 + 4 * 8 + 2000
        thread = beside(near.close)
        assert far.recv_state_dict(timeout=20) is None
        thread.join()


def test_memory_that_is_there_is_received_to() -> None:
    with pair(far={"pool": ts.PoolConfig(pool_bytes=64 << 20, max_block_bytes=16 << 20)}) as (
        near,
        far,
    ):
        memory = torch.zeros(1_000_000)
        sent = torch.randn(1_000_000)
        thread = beside(lambda: near.send(sent, "w"))
        came = far.recv(into=memory)
        thread.join()
        assert torch.equal(memory, sent)
        assert isinstance(came, ts.Tensor)
        assert came.to_torch().data_ptr() == memory.data_ptr()
        assert far.stats()["copied_bytes"] < 5 << 20

        thread = beside(lambda: near.send(sent, "w"))
        with pytest.raises(ts.ConfigurationError, match="4000000 bytes"):
            far.recv(into=torch.zeros(5))
        came = far.recv()  # it is still there
        thread.join()
        assert isinstance(came, ts.Tensor)
        assert torch.equal(came.to_torch(), sent)
        del came

        addresses = set()
        for _ in range(5):
            thread = beside(lambda: near.send(sent, "w"))
            tensor = far.recv()
            assert isinstance(tensor, ts.Tensor)
            addresses.add(tensor.to_torch().data_ptr())
            del tensor
            thread.join()
        assert len(addresses) == 1, "the block is used again"
        assert far.stats()["pool"]["hit_rate"] > 0.5


def test_what_is_sent_is_written_from_where_it_is() -> None:
    """No copy of a large tensor: the process that sends 400 MB grows by far less."""
    with pair() as (near, far):
        sent = torch.zeros(100_000_000)
        into = torch.ones(100_000_000)
        before = _resident()
        thread = beside(lambda: near.send(sent, "w"))
        far.recv(into=into)
        thread.join()
        assert _resident() - before < 64 << 20
        assert not into.any()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_tls_and_tokens(trusted: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    far = {"cert": trusted["cert"], "key": trusted["key"], "token": "sesame"}
    near = {"ca": trusted["ca"], "token": "sesame"}
    with pair(near=near, far=far) as (first, second):
        thread = beside(lambda: first.send(torch.arange(1_000_000), "w"))
        came = second.recv()
        thread.join()
        assert isinstance(came, ts.Tensor)
        assert torch.equal(came.to_torch(), torch.arange(1_000_000))
    with ts.listen("127.0.0.1:0", token="sesame") as listener:
        accepted: list[ts.Connection | None] = []
        accepting = beside(lambda: accepted.append(listener.accept(timeout=20)))
        host, port = listener.address.rsplit(":", 1)
        # Who says nothing keeps nobody waiting, and who is refused is not the last.
        silent = [socket.create_connection((host, int(port))) for _ in range(3)]
        with pytest.raises(ts.ConnectionLost, match="token"):
            ts.connect(listener.address, token="another")
        known = ts.connect(listener.address, token="sesame")
        accepting.join()
        known.close()
        assert isinstance(accepted[0], ts.Connection)
        assert "refused" in caplog.text
        assert "token" in caplog.text
        for stranger in silent:
            stranger.close()
    own = {"cert": trusted["cert"], "key": trusted["key"]}
    for certificates in ({}, own):
        # A certificate of the listener alone lets everybody in.
        with pytest.raises(ts.ConfigurationError, match="anyone could connect"):
            ts.listen("0.0.0.0:0", **certificates)
    ts.listen("0.0.0.0:0", ca=trusted["ca"], **own).close()
    with pytest.raises(ts.ConfigurationError, match="whom to trust"):
        ts.connect("127.0.0.1:1", cert=trusted["cert"], key=trusted["key"])
    with pytest.raises(ts.ConfigurationError, match="protects nothing"):
        ts.listen("127.0.0.1:0", token="")


def test_errors_say_what_where_and_what_to_do() -> None:
    free = socket.create_server(("127.0.0.1", 0))
    nobody = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ts.ConnectionTimeout, match="127"):
        ts.connect(nobody, idle_timeout=0.3)  # it accepts, and says nothing
    free.close()
    with pytest.raises(ts.ConnectionLost, match="connecting"):
        ts.connect(nobody)
    for bad in ("", "host", "unix:"):
        with pytest.raises(ts.ConfigurationError, match="HOST:PORT"):
            ts.connect(bad)
    with pytest.raises(ts.ConfigurationError, match="timeout"):
        ts.connect("127.0.0.1:1", idle_timeout=-1)
    with ts.listen("127.0.0.1:0") as listener:
        with pytest.raises(TimeoutError, match="nobody connected to 127"):
            listener.accept(timeout=0.05)
        listener.close()
        with pytest.raises(ts.ConfigurationError, match="closed"):
            listener.accept()
    with pair(far={"limit_bytes": 1000}) as (near, far):
        thread = beside(lambda: near.send(torch.zeros(10), "small"))
        assert isinstance(far.recv(), ts.Tensor)
        thread.join()
        near.send(torch.zeros(1000), "w")
        with pytest.raises(ts.OutOfMemoryError, match='"w" of 4000 bytes'):
            far.recv()
        with pytest.raises(TimeoutError, match="nothing arrived"):
            far.recv(timeout=0.1)  # and tells the other end
        with pytest.raises(ts.ConnectionLost, match="memory"):
            near.recv(timeout=5)  # its stream was given up, and the connection goes on
        thread = beside(lambda: near.send(torch.ones(10), "small again"))
        again = far.recv()
        thread.join()
        assert isinstance(again, ts.Tensor)
        assert again.name == "small again"
        with pytest.raises(ts.ConfigurationError, match="compression"):
            near.send(torch.zeros(1), compression="rar")
        with pytest.raises(TypeError):
            near.send("text")
        with pytest.raises(ts.ConnectionTimeout, match="nothing arrived"):
            near.recv(timeout=0.05)
        thread = beside(near.close)
        assert far.recv(timeout=20) is None
        thread.join()
        near.close()
        with pytest.raises(ts.ConfigurationError, match="closed"):
            near.send(torch.zeros(1))


def test_closing_after_the_other_end_has_closed_is_no_error() -> None:
    for looks in (False, True):
        with pair() as (near, far):
            thread = beside(lambda far=far: (far.recv(timeout=20), far.close("that was all")))
            near.send(torch.ones(1000))
            thread.join()
            assert not looks or near.recv(timeout=20) is None
            near.close()


def test_two_that_send_at_once_and_do_not_listen_are_told() -> None:
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


def test_between_processes_and_progress() -> None:
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
        with pytest.raises(ts.ConnectionTimeout, match="nothing arrived"):
            # The stream does not end after it.
            far.recv_state_dict(timeout=0.3)
        first = far.recv()
        assert isinstance(first, ts.Tensor) and first.name == "first"


def test_waits_are_interrupted() -> None:
    with pair() as (_, far):
        timer = threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,))
        timer.start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            far.recv()
        assert time.monotonic() - begin < 10
        timer.join()


def test_one_thread_at_a_time() -> None:
    with pair() as (near, far):
        waiting = beside(far.recv)
        time.sleep(0.2)
        with pytest.raises(ts.ConfigurationError, match="another thread"):
            far.send_message(b"now")
        near.send_message(b"go on")
        waiting.join()


def test_former_names_of_timeouts_work_and_warn() -> None:
    with pytest.warns(DeprecationWarning, match="'timeout' is now 'idle_timeout'"):
        ts.listen("127.0.0.1:0", timeout=5).close()
    with pytest.raises(TypeError, match="got both 'stall_timeout' and 'patience'"):
        ts.listen("127.0.0.1:0", patience=5, stall_timeout=5)
