# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every provider passes the same tests. ssh runs against a real server on loopback."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
from conftest import Llama
from raycluster import RayCluster
from serving import Serving, children, cut, is_running
from sshd import SKIP_REASON, Sshd
from tensorstream.errors import (
    ConfigurationError,
    ConnectionLost,
    ProviderAuthenticationError,
    ProviderCapacityError,
    ProviderConnectionError,
    ProviderError,
)
from tensorstream.remote import (
    RemoteMachine,
    create_ray_machines,
    function,
    providers,
)
from tensorstream.remote.providers._gpus import GPUS
from tensorstream.remote.providers._ray import RayServer
from tensorstream.remote.providers._ssh import _error, _Forwarded, _shell, _tunnel_script
from tensorstream.remote.providers._this_computer import ProcessServer
from torch import nn
from webserver import WebServer

needs_sshd = pytest.mark.skipif(SKIP_REASON is not None, reason=str(SKIP_REASON))
Start = Callable[..., RemoteMachine]


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with Sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    with RayCluster() as running:
        yield running


@pytest.fixture(scope="session")
def tcp() -> Iterator[Serving]:
    allowed = {"--weights": "any,http://", "--allow-functions": "any", "--send-to": "any"}
    with Serving(allowed) as server:
        yield server


KINDS = ["mock", "local", "tcp", pytest.param("ssh", marks=needs_sshd), "ray"]
# An actor of Ray takes some ten seconds to start.
STARTED_KINDS = [*KINDS[:-1], pytest.param("ray", marks=pytest.mark.long)]


def arguments(kind: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Returns the arguments for a machine of a provider."""
    if kind == "local":
        return {"threads": 1}
    if kind == "tcp":
        return {"address": request.getfixturevalue("tcp").address}
    if kind in ("ssh", "ray"):
        server: Sshd | RayCluster = request.getfixturevalue("sshd" if kind == "ssh" else "cluster")
        return server.options()
    return {}


@pytest.fixture(params=STARTED_KINDS)
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Returns a function that starts a machine of each provider."""
    options = arguments(request.param, request)
    with ExitStack() as stack:
        yield lambda **more: stack.enter_context(RemoteMachine(request.param, **options, **more))


@pytest.fixture(scope="module", params=KINDS)
def machine(request: pytest.FixtureRequest) -> Iterator[RemoteMachine]:
    """A machine of each provider with two devices, which tests share: some take long to start."""
    options = arguments(request.param, request)
    with RemoteMachine(request.param, device_count=2, **options) as started:
        yield started


def test_a_machine_sends_tensors_to_a_listener(machine: RemoteMachine) -> None:
    net = nn.Linear(512, 1024).to(machine.device(), torch.bfloat16)
    received: list[ts.Tensor | bytes] = []

    def receive() -> None:
        with listener.accept(timeout=60) as connection:
            received.extend(connection)

    with ts.listen("127.0.0.1:0", token="sesame") as listener:
        thread = threading.Thread(target=receive)
        thread.start()
        before = machine.stats()["downloaded_bytes"]
        with machine.connect(listener.address, token="sesame") as connection:
            for name, parameter in net.named_parameters():
                connection.send(parameter, name, metadata={"step": "1"}, checksums=True)
            connection.send(net.weight.t()[:, ::2].to(machine.device(1)), compression="lz4")
            connection.send_message(b"done")
        assert machine.stats()["downloaded_bytes"] == before
        thread.join(60)
    *tensors, message = received
    assert message == b"done"
    weight, bias, part = (tensor for tensor in tensors if isinstance(tensor, ts.Tensor))
    assert (weight.name, bias.name, part.name) == ("weight", "bias", "")
    assert weight.metadata == {"step": "1"}
    assert torch.equal(weight.to_torch(), net.weight.cpu())
    assert torch.equal(bias.to_torch(), net.bias.cpu())
    assert torch.equal(part.to_torch(), net.weight.cpu().t()[:, ::2])


def test_a_machine_trains_and_computes_as_this_process(machine: RemoteMachine) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.0), nn.Linear(64, 4))
    remote = copy.deepcopy(net).to(machine.device())
    inputs = torch.randn(6, 8, 32)
    losses = []
    for model in (net, remote):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        device = next(model.parameters()).device
        for batch in inputs.to(device):
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    for name, tensor in net.state_dict().items():
        assert torch.equal(remote.state_dict()[name].cpu(), tensor), name
    other = remote[0].weight.to(machine.device(1))
    assert torch.equal(other.cpu(), net[0].weight)
    assert machine.stats()["operators"] > 0


def test_a_machine_generates_the_same_tokens(machine: RemoteMachine, llama: Llama) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama())
    ids = torch.arange(6)[None]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    model.to(machine.device())
    got = model.generate(ids.to(machine.device()), max_new_tokens=8, do_sample=False)
    assert torch.equal(got.cpu(), expected)


def test_a_machine_loads_weights_that_it_has(machine: RemoteMachine, llama: Llama) -> None:
    directory = llama()
    expected = ts.load_file(directory)
    before = machine.stats()["uploaded_bytes"]
    loaded = ts.load_file(directory, machine.device())
    assert machine.stats()["uploaded_bytes"] == before
    assert list(loaded) == list(expected)
    assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in expected.items())


def test_a_machine_loads_weights_from_a_url(machine: RemoteMachine, llama: Llama) -> None:
    directory = llama()
    expected = ts.load_file(directory)
    with WebServer(directory) as web:
        loaded = ts.load_file(f"{web.url}/model.safetensors", machine.device())
        assert all(torch.equal(loaded[name].cpu(), tensor) for name, tensor in expected.items())


@function
def smallest_divisor(number: torch.Tensor) -> int:
    divisor = 2
    while (number % divisor).item():
        divisor += 1
    return divisor


def test_a_machine_runs_functions(machine: RemoteMachine) -> None:
    device = machine.device()
    assert smallest_divisor(torch.tensor(7 * 11, device=device)) == 7


def test_a_machine_stops_and_starts_again(start: Start) -> None:
    machine = start()
    device = machine.device()
    machine.stop()
    machine.start()
    assert machine.device() == device
    assert torch.ones(3, device=device).sum().item() == 3.0


def test_a_lost_link_is_replaced(start: Start) -> None:
    """The connection is cut between queued operators."""
    machine = start(retry=20.0)
    server = machine._server
    assert server is not None
    total = torch.zeros(64, device=machine.device())
    for turn in range(3):
        for _ in range(100):
            total += 1
        cut(server.address)
        for _ in range(100):
            total += 1
        assert total[turn].item() == 200.0 * (turn + 1)
    assert machine.stats()["reconnects"] >= 3
    assert machine.status == "running"


def _tunnel(machine: RemoteMachine) -> _Forwarded:
    assert isinstance(machine._server, _Forwarded)
    return machine._server


@needs_sshd
def test_a_broken_tunnel_is_opened_again(sshd: Sshd) -> None:
    with RemoteMachine.ssh(**sshd.options()) as machine:
        total = torch.zeros(256, device=machine.device())
        server = _tunnel(machine)
        for turn in range(3):
            ended = server.tunnel
            assert ended is not None
            ended.send_signal(signal.SIGKILL)
            for _ in range(50):
                total += 1
            assert total[turn].item() == 50.0 * (turn + 1)
            assert server.tunnel is not ended
        assert machine.stats()["reconnects"] >= 3
        assert torch.equal(total.cpu(), torch.full((256,), 150.0))
    assert not os.path.exists(server.address.removeprefix("unix:"))


@needs_sshd
def test_the_tunnel_to_a_server_that_has_ended_is_given_up(sshd: Sshd) -> None:
    before = set(_servers())
    with RemoteMachine.ssh(**sshd.options(), retry=1.0) as machine:
        x = torch.ones(3, device=machine.device())
        assert x.sum().item() == 3.0
        server = _tunnel(machine)
        # Other tests may start servers meanwhile.
        (forwarded,) = (part for part in server._command if part.endswith("/live/socket"))
        directory = forwarded.partition(":")[2].removesuffix("/live/socket")
        assert directory in set(_servers()) - before
        os.kill(int(Path(directory, "process").read_text()), signal.SIGKILL)
        with pytest.raises(ConnectionLost):
            for _ in range(1000):
                x.sum().item()
        server._thread.join(10)
        assert not server._thread.is_alive()
        assert "has ended: " in str(server._failure) and "session 1" in str(server._failure)


def _servers() -> list[str]:
    """Returns the directories of servers that ssh has started."""
    return sorted(str(path) for path in Path("/tmp").glob("tensorstream-" + "[0-9a-f]" * 16))


@needs_sshd
@pytest.mark.long
def test_nothing_is_left_of_a_client_that_is_killed(sshd: Sshd, tmp_path: Path) -> None:
    """The tunnel ends, and the server keeps its session for a minute, and then ends with it."""
    before = _servers()
    program = f"""
import torch
from tensorstream.remote import RemoteMachine
machine = RemoteMachine("ssh", **{sshd.options()!r})
torch.ones(2, device=machine.device()).sum().item()
print(machine._server.tunnel.pid, flush=True)
input()
"""
    command = [sys.executable, "-c", program]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        tunnel = int(child.stdout.readline())
        (ours,) = set(_servers()) - set(before)
        child.kill()
    end = time.monotonic() + 90
    while is_running(tunnel) or os.path.exists(ours):
        assert time.monotonic() < end, (is_running(tunnel), ours)
        time.sleep(0.2)


@needs_sshd
def test_ssh_refusals_are_typed(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    good = sshd.options()
    before = _servers()
    missing = {**good, "options": [*good["options"], "-p", "1"]}
    missing["options"] = ["1" if each == str(sshd.port) else each for each in good["options"]]
    for options, error, words in (
        (sshd.options(user="stranger"), ProviderAuthenticationError, "Permission denied"),
        (sshd.options(known="unknown"), ProviderAuthenticationError, "Host key"),
        (missing, ProviderConnectionError, "Connection refused"),
        ({**good, "host": "no-such-host.invalid"}, ProviderConnectionError, "no-such-host"),
        ({**good, "python": "/usr/bin/false"}, ProviderError, "cannot start a machine"),
        ({**good, "python": "python-that-is-not-there"}, ProviderError, "install TensorStream"),
        ({**good, "host": "-oProxyCommand=true"}, ConfigurationError, "invalid host"),
        ({**good, "wheel": "/nowhere.whl"}, ConfigurationError, "no such file"),
        ({**good, "options": "-p 22"}, ConfigurationError, "expected a list"),
        ({**good, "options": ["-p", 22]}, ConfigurationError, "expected a list"),
        ({**good, "threads": 0}, ConfigurationError, "at least 1"),
        ({**good, "connect_timeout": float("inf")}, ConfigurationError, "above 0"),
        ({**good, "port": 22}, ConfigurationError, "'port'"),
    ):
        with pytest.raises(error, match=words):
            RemoteMachine("ssh", **options)
    if not torch.cuda.is_available():
        for wanted in ("cuda", "A100"):
            with pytest.raises(ProviderError, match="GPU"):
                RemoteMachine("ssh", wanted, **good)
    with pytest.raises(ConfigurationError, match="must be 1 to 127"):
        RemoteMachine("ssh", device_count=200, **good)
    assert RemoteMachine.ssh("a100", start=False).device_type == "cpu"  # the name of a host
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigurationError, match="install OpenSSH"):
        RemoteMachine("ssh", **good)
    assert providers.available()["ssh"] == "there is no program `ssh`: install OpenSSH"
    end = time.monotonic() + 20
    while set(_servers()) - set(before):
        assert time.monotonic() < end, _servers()
        time.sleep(0.1)
    exhausted = _error("far", 1, "mkdir: cannot create directory: No space left on device")
    denied = _error("far", 1, "mkdir: cannot create directory: Permission denied")
    assert not isinstance(denied, ProviderAuthenticationError)
    assert "\n" not in _shell("echo a\n    b") and "\n" not in _shell(_tunnel_script("/tmp/a"))
    assert isinstance(exhausted, ProviderCapacityError) and "free memory or disk" in str(exhausted)


@needs_sshd
def test_a_wheel_is_copied_once(sshd: Sshd, tmp_path: Path, monkeypatch: Any) -> None:
    """The package runs from the copy, in a Python in which it is not installed."""
    import zipfile

    import tensorstream

    package = Path(tensorstream.__file__).parent
    wheel = tmp_path / "tensorstream-0.1.0-cp311-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in package.rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                archive.write(path, Path("tensorstream") / path.relative_to(package))
        archive.writestr("only_in_the_wheel.py", "")
    options = {**sshd.options(), "python": sys.executable, "wheel": wheel}
    options["options"] = [*options["options"], "-o", f"SetEnv=XDG_CACHE_HOME={tmp_path}"]
    unpacked = tmp_path / "tensorstream" / "wheels"
    times = []
    for _ in range(2):
        with RemoteMachine("ssh", **options) as machine:
            assert torch.ones(3, device=machine.device()).sum().item() == 3.0
        (copied,) = unpacked.iterdir()
        times.append(copied.stat().st_mtime_ns)
        assert (copied / "only_in_the_wheel.py").exists()
    assert times[0] == times[1]


@pytest.mark.long
def test_a_dead_actor_is_noticed_at_once(cluster: RayCluster) -> None:
    import ray

    statuses: list[str] = []
    starting = RemoteMachine("ray", **cluster.options(), retry=60.0, start=False)
    starting.on_status(statuses.append)
    with starting as machine:
        x = torch.ones(3, device=machine.device())
        assert x.sum().item() == 3.0
        server = machine._server
        assert isinstance(server, RayServer)
        begin = time.monotonic()
        ray.kill(server.actor)
        with pytest.raises(ConnectionLost, match=r"Ray actor died|the server was stopped"):
            while True:
                x.sum().item()
        assert time.monotonic() - begin < 30  # and not `retry`
        assert machine.status == "lost"
        machine.start()
        assert torch.ones(3, device=machine.device()).sum().item() == 3.0
    _await_statuses(statuses, ["running", "lost", "stopped", "running", "stopped"])


@pytest.mark.long
def test_the_server_of_an_actor_ends_with_it(cluster: RayCluster) -> None:
    import ray

    with RemoteMachine("ray", **cluster.options()) as machine:
        server = machine._server
        assert isinstance(server, RayServer)
        process = ray.get(server.actor.process.remote())
        (zygote,) = children(process)
        assert torch.ones(3, device=machine.device()).sum().item() == 3.0
        session = children(zygote)
        assert session
        os.kill(process, signal.SIGKILL)
        end = time.monotonic() + 20
        while any(map(is_running, (process, zygote, *session))):
            assert time.monotonic() < end
            time.sleep(0.1)


@pytest.mark.long
def test_machines_on_all_nodes_of_a_cluster_share_tensors(cluster: RayCluster) -> None:
    machines = create_ray_machines(**cluster.options())
    try:
        assert len(machines) == 2 and machines[0].name != machines[1].name
        one, other = (machine.device() for machine in machines)
        x = torch.arange(4096.0, device=one)
        before = [machine.stats() for machine in machines]
        y = x.to(other)
        assert torch.equal(y.cpu(), torch.arange(4096.0))
        after = [machine.stats() for machine in machines]
        assert after[0]["downloaded_bytes"] == before[0]["downloaded_bytes"]
        assert after[1]["uploaded_bytes"] == before[1]["uploaded_bytes"]
    finally:
        for machine in machines:
            machine.stop()


def test_ray_refusals_are_typed(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    options = cluster.options()
    for changed, error, words in (
        ({"num_cpus": 999, "start_timeout": 2}, ProviderCapacityError, "needs 999 CPU"),
        ({"resources": {"x": 1}, "start_timeout": 2}, ProviderCapacityError, "and 1 x"),
        ({"node": "ab" * 28}, ProviderCapacityError, "not schedulable"),
        ({"device_type": "A100", "start_timeout": 2}, ProviderCapacityError, "1 A100; of 16 CPU"),
        ({"num_cpus": 0}, ConfigurationError, "at least 1"),
        ({"start_timeout": float("nan")}, ConfigurationError, "above 0"),
        ({"budget": "nothing"}, ConfigurationError, "budget"),
        ({"cpus": 1}, ConfigurationError, "'cpus'"),
    ):
        with pytest.raises(error, match=words):
            RemoteMachine("ray", **{**options, **changed})
    with pytest.raises(ProviderCapacityError, match="none of the 2 nodes has 1 CPU and 1 GPU"):
        create_ray_machines("cuda", **options)
    program = """
from tensorstream.errors import ProviderConnectionError
from tensorstream.remote import RemoteMachine
try:
    RemoteMachine("ray", address="127.0.0.1:1")
except ProviderConnectionError as error:
    print(error)
"""
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "ray start --head" in ran.stdout, ran
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert providers.available()["ray"] == "Ray is not installed: `pip install ray`"


def _await_statuses(got: list[str], expected: list[str]) -> None:
    end = time.monotonic() + 5
    while got != expected:
        assert time.monotonic() < end, got
        time.sleep(0.05)


def test_a_killed_process_is_noticed_without_a_call() -> None:
    statuses: list[str] = []
    starting = RemoteMachine.local(start=False)
    remove = starting.on_status(statuses.append)
    with starting as machine:
        machine.on_status(lambda status: statuses[99])  # fails, and is logged
        server = machine._server
        assert isinstance(server, ProcessServer)
        assert machine.status == "running"
        server.process.kill()
        _await_statuses(statuses, ["running", "lost"])
        with pytest.raises(ConnectionLost):
            torch.ones(3, device=machine.device()).sum().item()
        remove()
        machine.start()
        machine.pause()
        assert machine.status == "paused"
        machine.resume()
        assert machine.status == "running"
    assert machine.status == "stopped" and statuses == ["running", "lost"]


def test_types_of_gpus_are_checked() -> None:
    """A pretended machine takes the names; others are compared with the name that a GPU has."""
    for name in GPUS:
        with RemoteMachine("mock", name) as machine:
            assert machine.gpu_type == machine.device_type == name
    with RemoteMachine("mock", gpu_type="a100-80gb", start=False) as machine:
        assert machine.device_type == "A100-80GB"
    for arguments in ({"device_type": "A1000"}, {"gpu_type": "A1000"}):
        with pytest.raises(ConfigurationError, match="T4, L4, A10G"):
            RemoteMachine("mock", **arguments)
    with pytest.raises(ConfigurationError, match="T4, L4, A10G"):
        RemoteMachine("mock", "A1000")
    with pytest.raises(ConfigurationError, match="given twice"):
        RemoteMachine("mock", "A100", device_type="cpu")
    gib = 1 << 30
    assert GPUS["A100"].matches("NVIDIA A100-SXM4-40GB", 39 * gib)
    assert GPUS["A100-40GB"].matches("NVIDIA A100-SXM4-40GB", 39 * gib)
    assert not GPUS["A100-80GB"].matches("NVIDIA A100-SXM4-40GB", 39 * gib)
    assert not GPUS["A100-40GB"].matches("NVIDIA A100 80GB PCIe", 79 * gib)
    assert GPUS["T4"].matches("Tesla T4", 15 * gib)
    for name, other in (("L4", "NVIDIA L40S"), ("A100", "NVIDIA A10G"), ("H100", "NVIDIA H200")):
        assert not GPUS[name].matches(other, 200 * gib)


class Shelf(providers.Provider):
    """The provider of another package."""

    name = "shelf"

    def __init__(self, address: str) -> None:
        self._address = address
        self.started: list[providers.Request] = []
        self.stopped = 0

    def device_types(self) -> dict[str, int]:
        return {"cpu": 2, "T4": 1, "V100": 1}

    def start(self, request: providers.Request) -> providers.Server:
        self.started.append(request)
        provider = self

        class Running(providers.Server):
            address = self._address

            def stop(self) -> None:
                provider.stopped += 1

        return Running()


def test_another_package_can_add_a_provider(tmp_path: Path, monkeypatch: Any) -> None:
    metadata = tmp_path / "shelf-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[tensorstream.providers]\n"
        "shelf = test_remote_providers:Shelf\n"
        "broken = no_such_module:Provider\n"
        "wrong = os:getcwd\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Serving() as served:
        with RemoteMachine("shelf", address=served.address, device_type="cpu") as machine:
            assert torch.ones(3, device=machine.device()).sum().item() == 3.0
        with RemoteMachine(Shelf(served.address), device_count=2) as machine:
            provider = machine._provider
            assert isinstance(provider, Shelf)
            assert machine.kind == "shelf"
        assert provider.stopped == 1
        assert [each.device_count for each in provider.started] == [2]
        for options, words in (
            ({"device_type": "H100"}, "no devices of type 'H100': expected one of cpu, T4, V100"),
            ({"device_count": 3}, "has 2 devices of type 'cpu'"),
            ({"shelf": 1}, "unexpected keyword argument 'shelf'"),
        ):
            with pytest.raises(ConfigurationError, match=words):
                RemoteMachine("shelf", **{"address": served.address, **options})
    assert RemoteMachine("shelf", "x", device_type="V100", start=False).device_type == "V100"
    found = providers.available()
    assert found["shelf"] is None and found["local"] is None
    assert "cannot load" in str(found["broken"]) and "not a class" in str(found["wrong"])
    with pytest.raises(ConfigurationError, match="did you mean 'shelf'"):
        RemoteMachine("shelff")
    with pytest.raises(ConfigurationError, match="expected the name"):
        RemoteMachine(3)  # type: ignore[arg-type]
