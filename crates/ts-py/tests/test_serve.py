# SPDX-License-Identifier: MIT OR Apache-2.0
"""``tensorstream serve`` as a service: options, state over HTTP, logs, and how it stops."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import tensorstream as ts
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families
from serving import PROGRAM, SERVE, Serving, cut, free_port, get, is_running, serving
from tensorstream.errors import ConnectionLost
from tensorstream.remote import RemoteMachine
from tensorstream.serve import _broker, _peers


def metrics(port: int) -> dict[str, float]:
    status, text = get(port, "/metrics")
    assert status == 200
    return {
        sample.name.removeprefix("tensorstream_serve_"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_state_is_served_over_http(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "token").write_text("secret\n")
    options = {"--metrics": f"127.0.0.1:{port}", "--max-sessions": 2, "--weights": tmp_path}
    with Serving({**options, "--token-file": tmp_path / "token"}) as served:
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/etc/passwd")[0] == 404
        before = metrics(port)
        assert (before["sessions"], before["max_sessions"], before["stopping"]) == (0, 2, 0)
        with (
            RemoteMachine.tcp(served.address, token="secret") as one,
            RemoteMachine.tcp(served.address, token="secret") as two,
        ):
            assert torch.ones(2, device=one.device()).sum().item() == 2.0
            with pytest.raises(ConnectionLost, match="limit of 2 sessions"):
                RemoteMachine.tcp(served.address, token="secret", retry=0.0)
            cut(served.address)
            assert torch.ones(2, device=two.device()).sum().item() == 2.0
            during = metrics(port)
            assert (during["sessions"], during["sessions_total"]) == (2, 2)
            assert during["refused_sessions_total"] == 1 and during["connections_total"] >= 4
        with pytest.raises(ConnectionLost):
            RemoteMachine.tcp(served.address, token="wrong", retry=0.0)
        end = time.monotonic() + 20
        while metrics(port)["sessions"] and time.monotonic() < end:
            time.sleep(0.05)
        after = metrics(port)
        assert (after["sessions"], after["failed_handshakes_total"]) == (0, 1)


def test_the_state_of_a_server_of_files_is_served_over_http(tmp_path: Path) -> None:
    ts.save_file({"x": torch.ones(1 << 20)}, tmp_path / "x.safetensors")
    port = free_port()
    with serving(tmp_path, "--metrics", f"127.0.0.1:{port}") as (url, process):
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/x.safetensors")[0] == 404
        before = metrics(port)
        assert (before["files_connections"], before["files_stopping"]) == (0, 0)
        assert torch.equal(ts.load_file(f"{url}x.safetensors")["x"], torch.ones(1 << 20))
        host, _, own_port = url.removeprefix("ts://").rstrip("/").rpartition(":")
        with socket.create_connection((host, int(own_port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        end = time.monotonic() + 20
        while (after := metrics(port))["files_failed_connections_total"] < 1:
            assert time.monotonic() < end, after
        assert after["files_connections_total"] >= 2
        assert 4 << 20 < after["files_sent_bytes_total"] < 5 << 20
        # A transfer that waits for its client goes on while the server drains.
        with (tmp_path / "large.bin").open("wb") as large:
            large.truncate(4 << 30)
        fetching = subprocess.Popen([PROGRAM, "fetch", f"{url}large.bin", tmp_path / "copy"])
        try:
            while metrics(port)["files_sent_bytes_total"] < 8 << 20:
                assert time.monotonic() < end
            fetching.send_signal(signal.SIGSTOP)
            os.kill(process, signal.SIGTERM)
            while (health := get(port, "/healthz"))[0] == 200:
                assert time.monotonic() < end
            assert health == (503, "the server is stopping\n")
        finally:
            fetching.kill()
            fetching.wait()
        while is_running(process):
            assert time.monotonic() < end


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("server", ["device", "files"])
def test_a_server_serves_in_a_bare_environment(server: str, tmp_path: Path) -> None:
    """Without HOME, with 64 descriptors, a closed output, and a full disk for its log."""
    tensor = torch.arange(1000.0)
    ts.save_file({"x": tensor}, tmp_path / "x.safetensors")
    address = f"127.0.0.1:{free_port()}"
    options = ["--listen", address, "-v"]
    command = [*SERVE, "--threads", "1"] if server == "device" else [PROGRAM, "serve", "files"]
    command += [*([tmp_path] if server == "files" else []), *options]
    bare = ["sh", "-c", 'ulimit -n 64; exec "$@" 2>/dev/full >&-', "sh", *command]
    environment = {"PATH": os.environ["PATH"]}

    def work() -> None:
        if server == "files":
            assert torch.equal(ts.load_file(f"ts://{address}/x.safetensors")["x"], tensor)
        else:
            with RemoteMachine("tcp", address, retry=5.0) as machine:
                assert torch.equal((tensor.to(machine.device()) + 1).cpu(), tensor + 1)

    with subprocess.Popen(bare, env=environment) as process, ExitStack() as strangers:
        try:
            end = time.monotonic() + 60
            while True:
                try:
                    work()
                    break
                except (ts.ConnectionLost, ts.StorageError):
                    assert time.monotonic() < end and process.poll() is None
                    time.sleep(0.1)
            for _ in range(100):
                host, port = address.split(":")
                strangers.enter_context(socket.create_connection((host, int(port))))
            for _ in range(3):
                work()
        finally:
            process.terminate()
            process.wait(30)
        assert process.returncode == 0


@pytest.mark.parametrize("server", ["device", "files"])
def test_a_client_of_the_pages_cannot_hold_them_up(server: str, tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        if server == "device":
            stack.enter_context(Serving({"--metrics": f"127.0.0.1:{port}"}))
        else:
            command = [PROGRAM, "serve", "files", tmp_path, "--listen", "127.0.0.1:0"]
            command += ["--metrics", f"127.0.0.1:{port}"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.terminate)
            assert process.stdout is not None
            process.stdout.readline()
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        silent[0].sendall(b"GET /" + b"a" * 100_000)
        silent[1].sendall(b"nonsense\r\n\r\n")
        assert get(port, "/healthz")[0] == 200
        for each in silent:
            each.close()


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1", "127.0.0.1:99999"])
def test_invalid_addresses_of_the_pages(address: str, tmp_path: Path) -> None:
    for command in (SERVE, [PROGRAM, "serve", "files", tmp_path]):
        done = subprocess.run(
            [*command, "--listen", "127.0.0.1:0", "--metrics", address],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert "expected HOST:PORT" in done.stderr


def test_sessions_end_by_themselves_while_the_server_drains() -> None:
    port = free_port()
    with Serving({"--drain": 60, "--metrics": f"127.0.0.1:{port}"}) as served:
        with RemoteMachine.tcp(served.address) as machine:
            total = torch.zeros(3, device=machine.device())
            machine.synchronize()
            served.process.terminate()
            while get(port, "/healthz")[0] == 200:
                time.sleep(0.01)
            assert get(port, "/healthz") == (503, "the server is stopping\n")
            with pytest.raises(ConnectionLost, match="the server is stopping"):
                RemoteMachine.tcp(served.address, retry=0.0)
            for turn in range(5):
                cut(served.address)  # the client of a running session may come back
                total += 1
                assert total.sum().item() == 3.0 * (turn + 1)
            assert served.process.poll() is None
        began = time.monotonic()
        assert served.process.wait(30) == 0
        assert time.monotonic() - began < 10, "it does not wait for the rest of --drain"


@pytest.mark.parametrize("again", [False, True])
def test_a_session_that_goes_on_is_ended(again: bool) -> None:
    with Serving({"--drain": 60 if again else 2}) as served:
        machine = RemoteMachine.tcp(served.address)
        x = torch.ones(3, device=machine.device())
        assert x.sum().item() == 3.0
        began = time.monotonic()
        served.process.send_signal(signal.SIGINT)
        if again:
            time.sleep(0.5)
            served.process.terminate()
        with pytest.raises(ConnectionLost, match="the server was stopped"):
            while time.monotonic() - began < 30:
                x += 1
                assert x.sum().item() > 3.0
        assert served.process.wait(20) == 0
        assert time.monotonic() - began > (0.5 if again else 2)
        machine.stop()


def test_one_client_cannot_have_all_sessions() -> None:
    with Serving({"--client-sessions": 2}) as served:
        first, second = (RemoteMachine("tcp", served.address) for _ in range(2))
        with pytest.raises(ConnectionLost, match="this client has reached its limit of 2 sessions"):
            RemoteMachine("tcp", served.address)
        assert torch.ones(2, device=first.device()).sum().item() == 2.0
        second.stop()
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                RemoteMachine("tcp", served.address).stop()
                break
            except ConnectionLost:
                time.sleep(0.1)
        else:
            raise AssertionError("the session that ended still counts")
        first.stop()


def test_idle_sessions_are_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        Serving({"--idle-timeout": 2}, log=log) as served,
        RemoteMachine("tcp", served.address, retry=5.0) as machine,
    ):
        x = torch.ones(3, device=machine.device())
        for _ in range(6):  # longer than the limit, with requests
            time.sleep(0.5)
            assert x.sum().item() == 3.0
        busy = torch.eye(1000, device=machine.device())
        begin = time.monotonic()
        (busy @ busy)[0, 0].item()
        for _ in range(int(3.0 / (time.monotonic() - begin)) + 1):
            busy = busy @ busy
        assert busy[0, 0].item() == 1.0  # longer than the limit, with operators
        time.sleep(0.3)
        assert x.sum().item() == 3.0
        time.sleep(3.5)
        with pytest.raises(ConnectionLost, match="sent nothing for 2 seconds"):
            x.sum().item()
        end = time.monotonic() + 10
        while "of CPU time and up to" not in log.read_text():
            assert time.monotonic() < end
            time.sleep(0.1)
    assert re.search(r"session 1: ended after 1?[3-9]\.\d s", log.read_text())


def test_clients_share_the_cpu_time() -> None:
    """A client with several sessions gets no more than one with a single session."""
    broker = object.__new__(_broker.Broker)
    shares: dict[int, int] = {}

    class Processes:
        def schedule(self, number: int, niceness: int | None = None) -> None:
            assert niceness is not None
            shares[number] = niceness

    # Only this method of the processes is used, and they cannot run here.
    broker._processes = Processes()  # type: ignore[assignment]
    clients = ["10.0.0.1"] * 24
    sender = _peers.Sender(_peers.Peers(), _broker.offers(None))
    broker._sessions = {}
    for number, client in enumerate(clients):
        ends = socket.socketpair()
        session = _broker._Session(number, str(number), *ends, client, sender)
        broker._sessions[session.service] = session
        broker._share()
    assert set(shares.values()) == {0}, "there is no other client"
    ends = socket.socketpair()
    broker._sessions["x"] = _broker._Session(99, "x", *ends, "10.0.0.2", sender)
    broker._share()
    weight = {number: 1.25**-niceness for number, niceness in shares.items()}
    assert shares[99] == 0
    assert 0.4 < sum(weight[number] for number in range(24)) < 0.6
    for peer, client in (
        ("10.0.0.1:80", "10.0.0.1"), ("[::1]:80", "[::1]"), ("unix", "unix"),
    ):  # fmt: skip
        assert _broker._client_at(peer) == client


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="Linux only")
def test_the_share_of_a_process_is_set() -> None:
    from tensorstream import _native

    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            _native.set_share(child.pid, 7, 0.02)
            assert os.getpriority(os.PRIO_PROCESS, child.pid) == 7
        finally:
            child.kill()
    _native.set_share(child.pid, 7, 0.02)  # it has ended


def test_options_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(" secret \nmore\n")
    (tmp_path / "weights").mkdir()
    for name, value in {
        "TOKEN_FILE": tmp_path / "token",
        "MAX_SESSIONS": "1",
        "WEIGHTS": f"{tmp_path},{tmp_path / 'weights'}",
        "LOG_FORMAT": "json",
        "NO_SANDBOX": "0",
    }.items():
        monkeypatch.setenv(f"TENSORSTREAM_{name}", str(value))
    with Serving(log=tmp_path / "log") as served:
        with pytest.raises(ConnectionLost):
            RemoteMachine.tcp(served.address, retry=0.0)
        with RemoteMachine.tcp(served.address, token="secret") as machine:
            assert torch.ones(1, device=machine.device()).item() == 1.0
            with pytest.raises(ConnectionLost, match="limit of 1 sessions"):
                RemoteMachine.tcp(served.address, token="secret", retry=0.0)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert any("started for 127.0.0.1" in line["message"] for line in lines)
    assert all(line["time"].endswith("+00:00") and line["level"] for line in lines)
    assert not any("malicious" in line["message"] for line in lines), "0 means no"
    monkeypatch.setenv("TENSORSTREAM_DRAIN", "soon")
    done = subprocess.run(SERVE, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "--drain" in done.stderr


@pytest.mark.parametrize("command", [["serve"], ["serve", "device"]])
def test_names_of_the_server_of_devices(command: list[str]) -> None:
    options = ["--listen", "127.0.0.1:0", "--threads", "1"]
    process = subprocess.Popen([PROGRAM, *command, *options], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("listening at ").strip()
        with RemoteMachine.tcp(address) as machine:
            assert torch.ones(1, device=machine.device()).item() == 1.0
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.parametrize("command", [["serve-weights"], ["serve", "files"]])
def test_names_of_the_server_of_files(command: list[str], tmp_path: Path) -> None:
    options = [str(tmp_path), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen([PROGRAM, *command, *options], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert "at ts://127.0.0.1:" in process.stdout.readline()
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.parametrize("command", [[*SERVE], [PROGRAM, "serve", "files", "."]])
@pytest.mark.parametrize("content", [None, "", "  \nsecret"])
def test_both_servers_read_tokens_alike(
    command: list[str], content: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    command = [*command, "--listen", "127.0.0.1:0", "--token-file", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    expected = "No such file" if content is None else "the first line is empty"
    assert done.returncode == 1 and str(file) in done.stderr and expected in done.stderr


def test_help_names_the_environment() -> None:
    environment = {**os.environ, "COLUMNS": "200"}
    for command in (["serve", "--help"], ["serve", "device", "--help"]):
        shown = subprocess.run(
            [PROGRAM, *command], capture_output=True, text=True, check=False, env=environment
        )
        assert shown.returncode == 0 and "[env: TENSORSTREAM_WEIGHTS=]" in shown.stdout


EXAMPLES = Path(__file__).parents[3] / "examples" / "service"


def _known_environment() -> set[str]:
    """Returns the environment variables that the help of both servers names."""
    known: set[str] = set()
    for command in (["serve", "device", "--help"], ["serve", "files", "--help"]):
        shown = subprocess.run([PROGRAM, *command], capture_output=True, text=True, check=True)
        known |= set(re.findall(r"\[env: (TENSORSTREAM_\w+)=", shown.stdout))
    return known


def _in_unit() -> dict[str, str]:
    lines = (EXAMPLES / "tensorstream.service").read_text().splitlines()
    given = [line.removeprefix("Environment=") for line in lines if line.startswith("Environment")]
    return {name: value for name, _, value in (line.partition("=") for line in given)}


def _in_image() -> dict[str, str]:
    lines = (EXAMPLES / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    given = next(line for line in lines if line.startswith("ENV ")).split()[1:]
    return {name: value for name, _, value in (one.partition("=") for one in given)}


def _in_compose() -> list[dict[str, str]]:
    services = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]
    return [each["environment"] for each in services.values()]


def _in_kubernetes() -> dict[str, str]:
    documents = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))
    (container,) = documents[1]["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each["value"] for each in container["env"]}


def test_the_examples_set_options_that_exist() -> None:
    known = _known_environment()
    for given in (_in_unit(), _in_image(), *_in_compose(), _in_kubernetes()):
        assert given and set(given) <= known, set(given) - known


@pytest.mark.parametrize("of", ["unit", "compose", "kubernetes"])
def test_a_server_starts_as_in_the_examples(
    of: str, tmp_path: Path, trusted: dict[str, Path]
) -> None:
    """The paths and addresses are replaced by those of this test."""
    given = {
        "unit": _in_unit(),
        "compose": {**_in_image(), **_in_compose()[0]},
        "kubernetes": {**_in_image(), **_in_kubernetes()},
    }[of]
    (tmp_path / "token").write_text("secret")
    port = free_port()
    replaced = {
        "LISTEN": "127.0.0.1:0",
        "TOKEN_FILE": tmp_path / "token",
        "TLS_CERT": trusted["cert"],
        "TLS_KEY": trusted["key"],
        "WEIGHTS": tmp_path,
        "METRICS": f"127.0.0.1:{port}",
    }
    environment = given | {
        f"TENSORSTREAM_{name}": str(value)
        for name, value in replaced.items()
        if f"TENSORSTREAM_{name}" in given
    }
    process = subprocess.Popen(
        [PROGRAM, "serve", "device"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("listening at ").strip()
        _, colon, number = address.rpartition(":")
        assert get(port, "/healthz")[0] == 200
        at = f"127.0.0.1{colon}{number}"
        with RemoteMachine.tcp(at, token="secret", ca=trusted["ca"]) as machine:
            assert torch.ones(2, device=machine.device()).sum().item() == 2.0
        process.terminate()
        assert process.wait(30) == 0
