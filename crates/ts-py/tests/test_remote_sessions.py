# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests that sessions of `tensorstream serve` are isolated processes that only run operators."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import preloaded
import pytest
import torch
from serving import Serving, cut, free_port, get, is_running
from tensorstream.errors import ConnectionLost
from tensorstream.remote import RemoteMachine
from tensorstream.remote.server import _exchange
from tensorstream.serve import _broker, _messages, _offers, _peers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sessions need Linux")

# Tries the attacks of someone who can execute code in the process of a session. Prints the result
# of each attack.
_ATTACKS = """
import ctypes, json, os, resource, socket, sys, threading
import torch
from tensorstream import _native, errors

parent, address, listening = map(int, sys.argv[1:4])
canary, unix = sys.argv[4:6]
libc = ctypes.CDLL(None, use_errno=True)
connected = socket.create_connection(("127.0.0.1", listening))
restrictions = _native.sandbox(*json.loads(sys.argv[6]))

def read_page():
    into = ctypes.create_string_buffer(16)
    class Part(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]
    own, theirs = Part(ctypes.addressof(into), 16), Part(address, 16)
    if libc.process_vm_readv(parent, ctypes.byref(own), 1, ctypes.byref(theirs), 1, 0) < 0:
        raise OSError(ctypes.get_errno(), "process_vm_readv")
    return into.raw.decode()

def reconnect():
    # AF_UNSPEC would end the connection, so that the socket can be connected to another address.
    if libc.connect(connected.fileno(), b"\\0" * 16, 16) < 0:
        raise OSError(ctypes.get_errno(), "connect")

def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), str(number))

attacks = {
    "read a file": lambda: open(canary).read(),
    "stat a file": lambda: os.stat(canary),
    "write a file": lambda: open(canary + ".new", "w"),
    "list files": lambda: os.listdir("/"),
    "open the parent's memory": lambda: open(f"/proc/{parent}/mem", "rb"),
    "read the parent's memory": read_page,
    "open a TCP socket": lambda: socket.create_connection(("127.0.0.1", listening)),
    "open a UDP socket": lambda: (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9))
    ),
    "open a Unix socket": lambda: socket.socket(socket.AF_UNIX).connect(unix),
    "reconnect a socket": reconnect,
    "run a program": lambda: os.execv("/bin/true", ["true"]),
    "fork": lambda: os.fork() or os._exit(0),
    "send a signal": lambda: os.kill(parent, 0),
    "read another process's limits": lambda: resource.prlimit(parent, resource.RLIMIT_NOFILE),
    "set a limit": lambda: resource.setrlimit(
        resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)
    ),
    "attach a socket filter": lambda: connected.setsockopt(socket.SOL_SOCKET, 26, b"\\0" * 16),
    "join a namespace": lambda: call(308, 3, 0),
    "trace a process": lambda: call(101, 16, parent, 0, 0),
    "create a namespace": lambda: call(272, 0x10000000),
    "create an io_uring": lambda: call(425, 8, ctypes.create_string_buffer(256)),
    "use the keyring": lambda: call(250, 0, 0),
    "run a program with x32": lambda: call(0x40000000 | 520, 0, 0, 0),
    "open a socket with x32": lambda: call(0x40000000 | 41, socket.AF_INET, socket.SOCK_STREAM, 0),
}
results = {}
for name, attack in attacks.items():
    try:
        results[name] = repr(attack())
    except OSError as error:
        results[name] = f"refused: {error.errno}"
# Operators, threads, memory and open sockets still work.
sums = []
ones = torch.ones(300, 300)
thread = threading.Thread(target=lambda: sums.append(float((ones @ ones).sum())))
thread.start(); thread.join()
connected.sendall(b"still connected")
memory = os.memfd_create("x"); os.ftruncate(memory, 100)
print(json.dumps([restrictions, results, sums]))
"""


@pytest.mark.parametrize("gpu", [False, True])
def test_sandboxed_code_cannot_reach_anything_outside(
    programs: preloaded.Server, tmp_path: Path, gpu: bool
) -> None:
    import ctypes

    page, canary = ctypes.create_string_buffer(b"a canary's page"), tmp_path / "canary"
    canary.write_text("a canary", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
        unix.listen()
        port = listener.getsockname()[1]
        arguments = [
            os.getpid(),
            ctypes.addressof(page),
            port,
            canary,
            tmp_path / "socket",
            json.dumps([gpu]),
        ]
        done = programs.run_code(_ATTACKS, *arguments)
    assert done.returncode == 0, done.stderr
    restrictions, results, sums = json.loads(done.stdout)
    assert len(restrictions) == 2 and sums == [300.0**3]
    succeeded = {name for name, result in results.items() if not result.startswith("refused")}
    # For GPUs, the sandbox allows more, because GPU drivers open files and start processes.
    allowed_on_gpu = {
        "read a file", "stat a file", "write a file", "list files", "fork",
        "read another process's limits", "set a limit",
    }  # fmt: skip
    assert succeeded <= (allowed_on_gpu if gpu else set()), results
    # EACCES comes from the filter. A kernel without x32 returns ENOSYS.
    assert {result for name, result in results.items() if name.endswith("x32")} == {
        f"refused: {errno.EACCES}"
    }
    assert not (tmp_path / "canary.new").exists() or gpu


def _eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Waits for a condition. Returns whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_a_crash_ends_only_its_own_session(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        Serving(log=log) as served,
        RemoteMachine("tcp", served.address) as one,
        RemoteMachine("tcp", served.address, retry=5.0) as other,
    ):
        kept, lost = torch.ones(4, device=one.device()), torch.ones(4, device=other.device())
        assert kept.sum().item() == lost.sum().item() == 4.0
        first, second = served.sessions()
        os.kill(second, signal.SIGSEGV)
        with pytest.raises(ConnectionLost, match="the session has ended"):
            for _ in range(100):
                (lost + 1).sum().item()
        assert _eventually(lambda: served.sessions() == [first])
        assert (kept * 2).sum().item() == 8.0
        torch.manual_seed(1)
        other.start()
        assert torch.ones(3, device=other.device()).sum().item() == 3.0
    text = log.read_text(encoding="utf-8")
    assert re.search(r"session 2: its process ended: SIGSEGV", text), text


def test_a_sandboxed_session_computes_the_same_results_as_the_cpu() -> None:
    torch.manual_seed(1)
    x, bags = torch.randn(50, 64), torch.tensor([0, 7, 20])
    runs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "vectorised": lambda x: (
            x.exp() + torch.erf(x) + x.softmax(1) + x.sum(1, keepdim=True) + x.var()
        ),
        "matrices": lambda x: x @ x.T,
        "convolution": lambda x: torch.nn.functional.conv2d(
            x.view(2, 5, 20, 16), x[:15].reshape(3, 5, 8, 8)
        ),
        "half precision": lambda x: (
            torch.nn.functional.gelu(x.bfloat16() @ x.bfloat16().T).half().exp()
        ),
        "bags": lambda x: torch.nn.functional.embedding_bag(
            x[:, 0].argsort(), x, bags.to(x.device)
        ),
        "solvers": lambda x: torch.linalg.solve(x[:, :50], x),
        "transforms": lambda x: torch.view_as_real(torch.fft.rfft2(x)),
        "random": lambda x: torch.nn.functional.dropout(x, 0.3),
    }
    with Serving() as served, RemoteMachine("tcp", served.address) as machine:
        for name, run in runs.items():
            results = []
            for device in (torch.device("cpu"), machine.device()):
                torch.manual_seed(2)
                results.append(run(x.to(device)).cpu())
            assert torch.equal(*results), name


def test_a_closed_session_leaves_no_process() -> None:
    with Serving() as served:
        with RemoteMachine("tcp", served.address) as machine:
            x = torch.ones(50_000_000, device=machine.device())
            assert x[-1].item() == 1.0
            (process,) = served.sessions()
        assert _eventually(lambda: not is_running(process)) and not served.sessions()


def test_a_client_reconnects_to_its_own_session() -> None:
    with Serving() as served, RemoteMachine("tcp", served.address, retry=20.0) as machine:
        x = torch.arange(5.0, device=machine.device())
        assert x.sum().item() == 10.0
        (process,) = served.sessions()
        for _ in range(3):
            cut(served.address)
            x += 1
            assert x.sum().item() == 10.0 + 5 * (_ + 1)
        assert machine.stats()["reconnects"] == 3 and served.sessions() == [process]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--listen", "0.0.0.0:0"], ["--token-file", "--tls-client-ca", "--insecure"]),
        (["--listen", "127.0.0.1:0", "--tls-client-ca", "ca.pem"], ["--tls-cert", "--tls-key"]),
        (["--listen", "127.0.0.1:0", "--tls-cert", "cert.pem"], ["--tls-key"]),
    ],
)
def test_errors_of_the_command_name_its_options(arguments: list[str], options: list[str]) -> None:
    command = [sys.executable, "-m", "tensorstream.serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert all(option in done.stderr for option in options)
    assert not re.search(r"\b(token|ca|cert|key|insecure)=", done.stderr)


def test_a_full_server_refuses_sessions_with_a_reason() -> None:
    with Serving({"--max-sessions": 2}) as served:
        machines = [RemoteMachine("tcp", served.address) for _ in range(2)]
        with pytest.raises(ConnectionLost, match="limit of 2 sessions"):
            RemoteMachine("tcp", served.address, retry=0.0)
        machines[0].stop()
        assert _eventually(lambda: len(served.sessions()) == 1)
        with RemoteMachine("tcp", served.address) as third:
            assert torch.ones(2, device=third.device()).sum().item() == 2.0
        machines[1].stop()


def test_stopping_a_server_notifies_clients_and_leaves_no_process() -> None:
    with Serving() as served:
        machine = RemoteMachine("tcp", served.address, retry=20.0)
        x = torch.ones(3, device=machine.device())
        assert x.sum().item() == 3.0
        processes = [served.zygote(), *served.sessions()]
        served.process.terminate()
        end = time.monotonic() + 20.0
        with pytest.raises(ConnectionLost, match="the server was stopped"):
            while time.monotonic() < end:
                x.sum().item()
                x += 1
        assert served.process.wait(20) == 0
        assert not any(map(is_running, processes))
        machine.stop()


def _forks_of_zygote(seconds: int) -> list[int]:
    """Returns the zygote, its successors and its sessions, of a server with this idle timeout."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (process / "cmdline").read_bytes()
            if b"_zygote" in line and f'"idle_timeout": {seconds}'.encode() in line:
                found.append(int(process.name))
    return sorted(process for process in found if is_running(process))


def _unique_seconds() -> int:
    """Returns an idle timeout that no server of another test has."""
    return 1_000_000 + 10 * os.getpid()


def test_killing_a_server_leaves_no_process() -> None:
    seconds = _unique_seconds()
    with Serving({"--idle-timeout": seconds}) as served:
        machine = RemoteMachine("tcp", served.address, retry=0.1)
        assert torch.ones(3, device=machine.device()).sum().item() == 3.0
        assert _eventually(lambda: len(_forks_of_zygote(seconds)) == 3)
        assert {served.zygote(), *served.sessions()} < {*_forks_of_zygote(seconds)}
        served.process.kill()
        assert _eventually(lambda: not _forks_of_zygote(seconds))
        machine.stop()


def _try_to_connect(address: str, refusals: list[str]) -> RemoteMachine | None:
    """Returns a connected machine. On failure, returns None and adds the error to ``refusals``."""
    try:
        return RemoteMachine("tcp", address)
    except ConnectionLost as error:
        refusals.append(str(error))
        return None


def test_a_successor_replaces_the_zygote_at_once() -> None:
    seconds = _unique_seconds() + 1
    port = free_port()
    options = {"--idle-timeout": seconds, "--metrics": f"127.0.0.1:{port}"}
    with Serving(options) as served, RemoteMachine("tcp", served.address) as one:
        x = torch.ones(3, device=one.device())
        zygote, (session,) = served.zygote(), served.sessions()
        for _ in range(3):
            assert _eventually(lambda: len(_forks_of_zygote(seconds)) == 3)
            os.kill(zygote, signal.SIGKILL)
            refusals: list[str] = []
            while (other := _try_to_connect(served.address, refusals)) is None:
                # The first connection may have been passed to the zygote before its end.
                assert len(refusals) < 2, refusals
            assert get(port, "/healthz") == (200, "ok\n")
            assert torch.ones(2, device=other.device()).sum().item() == 2.0
            other.stop()
            # The session of the first machine goes on, and the successor has a successor.
            assert (x + 1).sum().item() == 6.0
            assert _eventually(lambda: len(_forks_of_zygote(seconds)) == 3)
            zygote = min(each for each in _forks_of_zygote(seconds) if each != session)


def test_a_server_starts_another_zygote_if_the_successor_ends_with_it() -> None:
    seconds = _unique_seconds() + 2
    with Serving({"--idle-timeout": seconds}) as served:
        assert _eventually(lambda: len(_forks_of_zygote(seconds)) == 2)
        for process in _forks_of_zygote(seconds):
            os.kill(process, signal.SIGKILL)
        refusals: list[str] = []
        while (other := _try_to_connect(served.address, refusals)) is None and len(refusals) < 300:
            time.sleep(0.1)
        assert other is not None and torch.ones(2, device=other.device()).sum().item() == 2.0
        # The first connection may have been passed to the zygote before its end was noticed.
        assert all("sessions is starting" in refusal for refusal in refusals[1:]), refusals
        other.stop()
        # A successor that ends alone is replaced, too.
        assert _eventually(lambda: len(_forks_of_zygote(seconds)) == 2)
        (successor,) = {*_forks_of_zygote(seconds)} - {served.zygote()}
        os.kill(successor, signal.SIGKILL)
        assert _eventually(
            lambda: (
                len(_forks_of_zygote(seconds)) == 2 and successor not in _forks_of_zygote(seconds)
            )
        )


def test_the_processes_of_sessions_contain_no_secrets(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a very secret token", encoding="utf-8")
    os.environ["SECRET_OF_THE_SERVER"] = "a very secret value"
    try:
        served = Serving({"--token-file": tmp_path / "token"})
    finally:
        del os.environ["SECRET_OF_THE_SERVER"]
    with served:
        with RemoteMachine("tcp", served.address, token="a very secret token"):
            status = Path(f"/proc/{served.sessions()[0]}/status").read_text(encoding="utf-8")
        for line in (
            "CapEff:\t0000000000000000",
            "CapPrm:\t0000000000000000",
            "NoNewPrivs:\t1",
            "Seccomp:\t2",
        ):
            assert line in status, status
        process = served.zygote()
        inherited = (
            Path(f"/proc/{process}/environ").read_bytes()
            + Path(f"/proc/{process}/cmdline").read_bytes()
        )
        assert b"secret" not in inherited.lower() and b"PATH=" in inherited
        # Searches the writable memory of the zygote, except mappings of files.
        with Path(f"/proc/{process}/mem").open("rb", buffering=0) as memory:
            for line in Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines():
                addresses, access, _, _, inode, *_ = [*line.split(), ""]
                if "rw" not in access or inode != "0":
                    continue
                start, end = (int(part, 16) for part in addresses.split("-"))
                memory.seek(start)
                assert b"a very secret" not in memory.read(end - start), line


@pytest.mark.parametrize(
    "invalid",
    [
        {"sizes": [2, 4]}, {"sizes": [-2, -3]}, {"sizes": [True, 6]}, {"sizes": 6},
        {"sizes": [2**70]},
        {"dtype": "int64"}, {"dtype": "__class__"}, {"dtype": ["float32"]}, {"dtype": None},
    ],
)  # fmt: skip
def test_invalid_metadata_of_an_offer_is_an_error(invalid: dict[str, object]) -> None:
    metadata, descriptor = _exchange.pack(torch.arange(6.0).view(2, 3))
    with pytest.raises(RuntimeError, match="invalid offer"):
        _exchange.unpack({**metadata, **invalid}, descriptor)


def _fake_session() -> tuple[_broker._Session, socket.socket]:
    """Creates a session without a process, and the socket that the process would have."""
    requests, its_requests = _messages.pair()
    sender = _peers.Sender(_peers.Peers(), _broker.offers(None))
    return _broker._Session(1, "exec/0", requests, requests, "here", sender), its_requests


def _broker_without_server() -> _broker.Broker:
    broker = object.__new__(_broker.Broker)
    broker._lock, broker._sessions = threading.Lock(), {}
    broker._peers, broker._memory = _peers.Peers(), 1000
    broker._offers = _broker.offers(broker._memory)
    return broker


def test_a_refused_fetch_does_not_import_pytorch() -> None:
    with (
        Serving() as serving,
        Serving() as other,
        RemoteMachine("tcp", serving.address) as machine,
        RemoteMachine("tcp", other.address) as source,
    ):
        x = torch.arange(1000.0, device=source.device())
        # The copy goes through this process.
        assert torch.equal(x.to(machine.device()).cpu(), torch.arange(1000.0))
        maps = Path(f"/proc/{serving.process.pid}/maps").read_text(encoding="utf-8")
    assert "_native" in maps and "libtorch" not in maps


def test_a_claim_waits_for_its_offer() -> None:
    broker = _broker_without_server()
    peers = dict(_fake_session() for _ in range(2))
    one, other = peers
    tensor, packed = _exchange.pack(torch.arange(3.0))
    for offer, refusal in (
        ({"offer": "0" * 32, "tensor": tensor, "to": ""}, ""),
        ({"refuse": "1" * 32, "reason": "it failed"}, "it failed"),
    ):
        ticket = offer.get("offer") or offer["refuse"]
        claim = threading.Thread(target=broker._answer, args=(other, {"claim": ticket}, None))
        claim.start()
        time.sleep(0.1)
        assert claim.is_alive()
        broker._answer(one, offer, packed)
        claim.join()
        answer, received = _messages.receive(peers[other]) or ({}, None)
        assert answer.get("refused", "") == refusal
        if received is not None:
            assert torch.equal(_exchange.unpack(answer, received), torch.arange(3.0))
    os.close(packed)


def test_the_broker_validates_the_requests_of_sessions() -> None:
    broker = _broker_without_server()
    peers = dict(_fake_session() for _ in range(2))
    one, other = peers
    ticket = "0" * 32
    tensor, packed = _exchange.pack(torch.arange(6.0).view(2, 3))
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 24)

    def ask(
        session: _broker._Session, message: dict[str, object], descriptor: int | None = None
    ) -> object:
        broker._answer(session, message, descriptor)
        answer, received = _messages.receive(peers[session]) or ({}, None)
        return answer.get("refused") if received is None else _exchange.unpack(answer, received)

    for message, descriptor in [
        ({"offer": ticket, "tensor": tensor, "to": ""}, None),
        ({"offer": ticket, "tensor": tensor, "to": ""}, unsealed),
        ({"offer": "../../etc", "tensor": tensor, "to": ""}, packed),
    ]:
        assert "invalid offer" in str(ask(one, message, descriptor))
    assert ask(one, {"offer": ticket, "tensor": tensor, "to": ""}, packed) == ""
    assert "already in use" in str(
        ask(other, {"offer": ticket, "tensor": tensor, "to": ""}, packed)
    )
    # Another session can claim the tensor, once, but cannot withdraw it.
    broker._answer(other, {"withdraw": ticket}, None)
    assert torch.equal(ask(other, {"claim": ticket}), torch.arange(6.0).view(2, 3))
    assert "no session offers" in str(ask(other, {"claim": ticket}))
    for number in range(_offers.MAX_OFFERED + 1):
        full = ask(one, {"offer": f"{number:032x}", "tensor": tensor, "to": ""}, packed)
    assert "16 tensors at a time" in str(full)
    for number in range(100):  # refusals are limited, too
        broker._answer(one, {"refuse": f"{number + 100:032x}", "reason": "x" * 9999}, None)
    assert len(broker._offers._offers) == 2 * _offers.MAX_OFFERED
    broker._offers.drop(one)
    assert not broker._offers._offers
    big, packed_big = _exchange.pack(torch.ones(300))
    assert "would offer 1200 bytes" in str(
        ask(other, {"offer": "f" * 32, "tensor": big, "to": ""}, packed_big)
    )
    os.close(packed_big)
    fetch = {"fetch": ticket, "from": "127.0.0.1:1", "tensor": tensor, "is_sent": False}
    assert "not allowed to fetch from" in str(ask(one, fetch))
    broker._peers = _peers.Peers(("any",))
    for metadata, refusal in (
        ({"dtype": "float32", "sizes": [2**40]}, "too large"),
        ({"dtype": "float32", "sizes": [2**40] * 4}, "too large"),
        ({"dtype": "float32", "sizes": [-1]}, "invalid offer"),
        ({}, "invalid offer"),
    ):
        assert refusal in str(ask(one, {**fetch, "tensor": metadata}))
    for invalid in (
        {}, {"offer": 1}, {"claim": None}, {"fetch": ticket, "from": "x"}, {"x": "y"},
        {"failed": "\nforged"},
        {"disconnected": []}, {"disconnected": [1, 2]}, {"disconnected": ["a", "b"]},
    ):  # fmt: skip
        with pytest.raises(_broker._InvalidRequest) as raised:
            broker._answer(one, invalid, None)
        assert "\n" not in str(raised.value)
    # The broker does not wait for a process that does not receive its answers.
    with pytest.raises(BlockingIOError):
        for _ in range(100_000):
            broker._answer(one, fetch | {"tensor": {}}, None)
    os.close(packed)
    os.close(unsealed)


@pytest.mark.parametrize("kill", [False, True])
def test_a_session_that_does_not_end_is_killed(kill: bool) -> None:
    with Serving() as served:
        machine = RemoteMachine("tcp", served.address, retry=0.1, idle_timeout=2.0)
        assert torch.ones(3, device=machine.device()).sum().item() == 3.0
        processes = [served.zygote(), *served.sessions()]
        os.kill(processes[1], signal.SIGSTOP)
        if kill:
            served.process.kill()
        else:
            served.process.terminate()
        assert served.process.wait(30) == (-signal.SIGKILL if kill else 0)
        assert _eventually(lambda: not any(map(is_running, processes)))
        machine.stop()


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"[" * 20_000, b"1" * 20_000, b"\xff", b'"x"', b"{}" + b" " * 40_000]
)
def test_an_invalid_message_ends_the_channel(text: bytes) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        before = len(os.listdir("/proc/self/fd"))
        if text:
            socket.send_fds(one, [text], [0, 1, 2])
        else:
            one.close()
        assert _messages.receive(other) is None
        assert len(os.listdir("/proc/self/fd")) <= before
