# SPDX-License-Identifier: MIT OR Apache-2.0
"""The provider "modal", through Modal's own client and a service that pretends to be Modal's."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from grpclib import Status
from modal_proto import api_pb2
from modal_service import ModalService
from tensorstream.errors import (
    ConfigurationError,
    ConnectionLost,
    ProviderAuthenticationError,
    ProviderCapacityError,
    ProviderConnectionError,
    ProviderError,
)
from tensorstream.remote import RemoteMachine, create_modal_machine, providers
from tensorstream.remote.providers import ModalProvider, _modal
from tensorstream.remote.providers._gpus import GPUS
from tensorstream.remote.providers._own_wheel import own_wheel


@pytest.fixture
def service(
    tmp_path: Path, trusted: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModalService]:
    """A service that Modal's client uses, with containers whose certificates are trusted."""
    import modal

    monkeypatch.setattr(_modal, "_authorities", lambda: str(trusted["ca"]))
    monkeypatch.setattr(_modal, "_LOOK", 0.1)
    with ModalService(tmp_path, trusted) as running:
        for name, value in running.variables.items():
            monkeypatch.setenv(name, value)
        yield running
        modal.Client.from_env().close()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel that is not installed, because the containers of the tests have no image."""
    path = tmp_path / "tensorstream-0.1.0-cp311-abi3-linux_x86_64.whl"
    path.write_bytes(b"a wheel")
    return path


def _commands(service: ModalService) -> list[str]:
    """Returns the commands of the images that were requested."""
    images = [request.image for request in service.of(api_pb2.ImageGetOrCreateRequest)]
    return [command for image in images for command in image.dockerfile_commands]


def _check_released(service: ModalService) -> None:
    """Asserts that nothing is left on Modal."""
    assert not service.apps and not service.processes()


def _await(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_container_on_modal_hosts_a_machine(
    service: ModalService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It starts from the wheel of the installed package, and again without another upload."""
    machine = RemoteMachine("modal", "cpu", device_count=2, cpu=1, packages=["transformers"])
    with machine:
        started = time.monotonic()
        (container,) = service.processes()
        ones = torch.ones(3, device=machine.device(1))
        assert (ones + ones).sum().item() == 6.0
        # Modal may be out of reach for a while. Its client gives up after the fourth attempt.
        service.refusals["FunctionGetOutputs"] = Status.UNAVAILABLE, "try again later"
        asked = len(service.of(api_pb2.FunctionGetOutputsRequest))
        _await(lambda: len(service.of(api_pb2.FunctionGetOutputsRequest)) > asked + 5)
        assert machine.status == "running" and ones.sum().item() == 3.0
    (cancelled,) = service.of(api_pb2.FunctionCallCancelRequest)
    assert cancelled.terminate_containers
    _check_released(service)

    # Modal finds the image that it has built by the content of the wheel. Times in archives have
    # a resolution of two seconds.
    time.sleep(max(0.0, started + 2 - time.monotonic()))
    (tmp_path / "again").mkdir()
    made = own_wheel(tmp_path / "again")
    (*_, mount) = service.of(api_pb2.MountGetOrCreateRequest)
    (uploaded,) = mount.files
    assert uploaded.filename == f"/root/{made.name}"
    assert service.files[uploaded.sha256_hex] == made.read_bytes()
    installs = [command for command in _commands(service) if "pip install" in command]
    assert installs[-2:] == [
        f"RUN pip install {uploaded.filename}",
        "RUN python -m pip install transformers",
    ]
    assert f"torch=={torch.__version__.partition('+')[0]}" in installs[-3]
    assert not any("tensorstream" in each for each in installs if each != installs[-2])

    service.refusals.clear()
    with machine.start():
        (again,) = service.processes()
        assert again != container
        assert torch.ones(3, device=machine.device()).sum().item() == 3.0
        assert len(service.of(api_pb2.BlobCreateRequest)) == 1
        os.killpg(again, signal.SIGKILL)
        _await(lambda: machine.status == "lost")
        with pytest.raises(ConnectionLost, match="the container was killed"):
            torch.ones(3, device=machine.device()).sum().item()
        service.refusals["AppClientDisconnect"] = Status.UNAVAILABLE, "no network"
    assert "cannot end what runs on Modal: no network" in caplog.text
    assert not service.processes()


def test_a_container_has_what_was_requested(service: ModalService, wheel: Path) -> None:
    """Modal has no capacity, so no container starts."""
    service.has_capacity = False
    options = {"cpu": 3.5, "memory": "3GiB", "lifetime": 600, "app": "mine", "start_timeout": 0.1}
    for asked, gpu_type, count in (
        ({"device_type": "cpu"}, "", 0),
        ({"device_type": "A100"}, "A100", 1),
        ({"gpu_type": "H100", "gpu_count": 2}, "H100!", 2),
        ({"device_type": "cuda", "device_count": 4}, "ANY", 4),
    ):
        with pytest.raises(ProviderCapacityError, match=r"ready after 0\.1 seconds"):
            RemoteMachine("modal", wheel=wheel, **options, **asked)
        (*_, created) = service.of(api_pb2.FunctionCreateRequest)
        function, resources = created.function, created.function.resources
        assert (resources.milli_cpu, resources.memory_mb) == (3500, 3072)
        assert function.timeout_secs == 600 and function.app_name == "mine"
        assert (resources.gpu_config.gpu_type, resources.gpu_config.count) == (gpu_type, count)
        _check_released(service)
    assert service.files == dict.fromkeys(service.files, b"a wheel")


def test_refusals_of_modal_are_typed(
    service: ModalService, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import modal

    def refused(error: type[ProviderError], words: str) -> None:
        with pytest.raises(error, match=words):
            RemoteMachine("modal", "T4", wheel=wheel)
        _check_released(service)

    for name, status, error, words in (
        ("QueueGetOrCreate", Status.UNAVAILABLE, ProviderConnectionError, "cannot reach Modal: no"),
        ("AppCreate", Status.UNAVAILABLE, ProviderConnectionError, "cannot reach Modal: no"),
        ("FunctionCreate", Status.RESOURCE_EXHAUSTED, ProviderCapacityError, "on Modal: no"),
        ("FunctionMap", Status.RESOURCE_EXHAUSTED, ProviderCapacityError, "on Modal: no"),
        ("FunctionMap", Status.INVALID_ARGUMENT, ProviderError, "on Modal: no"),
    ):
        service.refusals = {name: (status, "no")}
        refused(error, words)
    service.refusals.clear()
    modal.Client.from_env().close()
    with monkeypatch.context() as changed:
        changed.setenv("MODAL_TOKEN_SECRET", "as-wrong")
        refused(ProviderAuthenticationError, "Token ID not found; run `modal setup`")
        modal.Client.from_env().close()


def test_a_container_that_fails_is_reported(service: ModalService, wheel: Path) -> None:
    words = "cannot start a machine on Modal: the container has failed: .*Address already in use"
    used = socket.create_server(("127.0.0.1", service.port))
    with used, pytest.raises(ProviderError, match=words):
        RemoteMachine("modal", wheel=wheel)
    _check_released(service)


def test_the_output_of_a_build_that_fails_is_reported(service: ModalService, wheel: Path) -> None:
    service.build_output = ["Collecting torch\n", "\x1b[31mERROR: no such version\x1b[0m\n"]
    words = "modal image logs im-.*printed last: Collecting torch ERROR: no such version$"
    with pytest.raises(ProviderError, match=words):
        RemoteMachine("modal", wheel=wheel)
    _check_released(service)
    service.refusals["ImageBuildChainGet"] = Status.NOT_FOUND, "no logs"
    with pytest.raises(ProviderError, match=r"modal image logs im-.*cannot be read: no logs"):
        RemoteMachine("modal", wheel=wheel)


@pytest.mark.parametrize("during", ["QueueGetRequest", "ImageJoinStreamingRequest"])
def test_ctrl_c_ends_what_has_started(service: ModalService, wheel: Path, during: str) -> None:
    service.has_capacity = False
    service.builds_end = during == "QueueGetRequest"

    def interrupt() -> None:
        _await(lambda: bool(service.of(getattr(api_pb2, during))))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        RemoteMachine("modal", wheel=wheel)
    thread.join()
    _check_released(service)


def test_the_first_error_is_raised_if_modal_is_lost(service: ModalService, wheel: Path) -> None:
    service.has_capacity = False
    service.refusals["AppClientDisconnect"] = Status.UNAVAILABLE, "no network"
    with pytest.raises(ProviderCapacityError, match="no container was ready"):
        RemoteMachine("modal", wheel=wheel, start_timeout=0.1)


def test_the_app_for_modal_is_constructed(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that needs no account."""
    import modal

    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(wheel.parent / "none.toml"))
    provider = ModalProvider(wheel=wheel, packages=["transformers"])
    for device_type, spec in (
        ("T4", "T4:1"), ("A10G", "A10G:1"), ("A100-80GB", "A100-80GB:1"), ("H100", "H100!:1"),
        ("cuda", "any:1"), ("cpu", None),
    ):  # fmt: skip
        request = providers.Request("a", device_type, 1)
        assert _modal._gpu(request) == spec
        function, app = provider.build(request)
        assert isinstance(function, modal.Function) and app.name == "tensorstream"
    assert set(provider.device_types()) == {"cpu", "cuda", *GPUS}
    for start in (
        lambda: RemoteMachine("modal", "A100", wheel=wheel),
        lambda: create_modal_machine("T4", wheel=wheel),
        lambda: RemoteMachine("modal", gpu_type="H100", gpu_count=2, wheel=wheel),
    ):
        with pytest.raises(ProviderAuthenticationError, match="run `modal setup`"):
            start()
    assert RemoteMachine("modal", "A100", start=False).gpu_type == "A100"
    for options, words in (
        ({"wheel": "/nowhere.whl"}, "no such file"),
        ({"cpu": 0}, "above 0"),
        ({"packages": "x"}, "a list of texts"),
        ({"memory": "much"}, "memory"),
        ({"device_count": 9, "device_type": "T4"}, "has 8 devices"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            RemoteMachine("modal", **options)


def test_the_installed_package_is_packed_into_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, place = own_wheel(tmp_path), tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, "--target", place, wheel], check=True, timeout=300)
    program = "import tensorstream as ts; print(ts.__file__, ts.TensorBuffer.cpu(b'abc').to_host())"
    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert ran.stdout.split() == [f"{place}/tensorstream/__init__.py", "b'abc'"]

    class Elsewhere(importlib.metadata.PathDistribution):
        def read_text(self, filename: Any) -> str:
            return "Wheel-Version: 1.0\nTag: cp311-abi3-macosx_11_0_arm64\n"

    for found, words in ((Elsewhere(tmp_path), "for cp311-abi3-macosx"), (None, "without a wheel")):

        def distribution(_: str, found: Any = found) -> Any:
            if found is None:
                raise importlib.metadata.PackageNotFoundError
            return found

        monkeypatch.setattr(importlib.metadata, "distribution", distribution)
        with pytest.raises(ConfigurationError, match=f"{words}.*; give the path of one as `wheel`"):
            own_wheel(tmp_path)
