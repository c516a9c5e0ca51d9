# SPDX-License-Identifier: MIT OR Apache-2.0
"""Machines with several devices of an accelerator: servers that use the stand-in.

Their processes load ``stand_in_backend.py``. The process of the tests has the device ``ts``
instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorstream as ts
import torch
from on_stand_in import LIBRARY, STAND_IN
from serving import children
from tensorstream.errors import ConfigurationError, DeviceUnavailableError
from tensorstream.remote import RemoteMachine

pytestmark = pytest.mark.skipif(
    not LIBRARY.exists(), reason="the stand-in accelerator is not built: run `cargo xtask ci`"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes PyTorch load the stand-in in child processes, as an installed package would."""
    packages = tmp_path_factory.mktemp("packages")
    metadata = packages / "torch_accinte-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-accinte\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\na = stand_in_backend:load\n")
    shutil.copy(Path(__file__).with_name("stand_in_backend.py"), packages)
    with pytest.MonkeyPatch.context() as patch:
        for path in (packages, STAND_IN):
            patch.setenv("PYTHONPATH", os.fspath(path), prepend=os.pathsep)
        patch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        yield


@pytest.fixture(scope="module")
def machine(installed: None) -> Iterator[RemoteMachine]:
    with RemoteMachine("local", "accelerator", gpu_count=2, threads=1) as started:
        yield started


@pytest.fixture
def both(machine: RemoteMachine) -> tuple[torch.device, torch.device]:
    return machine.device("cuda", 0), machine.device("cuda", 1)


Both = tuple[torch.device, torch.device]


def test_devices_have_the_names_that_programs_use(machine: RemoteMachine, both: Both) -> None:
    first, second = both
    assert (machine.device_type, machine.gpu_count) == ("accelerator", 2)
    assert machine.device() == machine.device(0) == machine.device("cuda") == first
    for name in ("cuda", "accelerator", "accinte", "ts"):
        assert machine.device(name, 1) == machine.device(f"{name}:1") == machine.device(1) == second
    for given, words in (
        (("cuda", 2), "has no device 2: expected 0 to 1"),
        (("cuda:7",), "has no device 7"),
        (("xpu",), "has no xpu devices: it runs operators on accinte"),
        (("cpu",), "has no cpu devices: it runs operators on accinte"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            machine.device(*given)


def test_operators_run_on_each_device_and_copies_go_between_them(both: Both) -> None:
    on_host = [torch.randint(-4, 5, (300, 500)).float() for _ in both]
    x, y = (tensor.to(device) for tensor, device in zip(on_host, both, strict=True))
    assert (x.device, y.device) == both
    assert torch.equal((x @ x.T).relu_().cpu(), (on_host[0] @ on_host[0].T).relu())
    assert torch.equal((y[y > 0] * 2).sum().cpu(), (on_host[1][on_host[1] > 0] * 2).sum())
    moved = x.to(y.device)
    assert moved.device == y.device and torch.equal((moved + y).cpu(), on_host[0] + on_host[1])
    x.copy_(y)
    assert torch.equal(x.cpu(), on_host[1])
    large = torch.arange(3 << 20)
    assert torch.equal(large.to(both[1])[::3].to(both[0]).cpu(), large[::3])


def test_an_operator_refuses_tensors_on_different_devices(both: Both) -> None:
    x, y = (torch.ones(2, 2, device=device) for device in both)
    for operation in (
        lambda: x + y,
        lambda: x @ y,
        lambda: x.add_(y),
        lambda: torch.cat([x, y]),
        lambda: torch.nn.functional.linear(x, y),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            operation()
    assert (x + 1).tolist() == (y + 1).tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_each_device_draws_its_own_random_numbers(both: Both) -> None:
    def draw(device: torch.device) -> torch.Tensor:
        dropped = torch.nn.functional.dropout(torch.ones(50, device=device))
        return torch.cat([torch.randn(5, device=device), dropped]).cpu()

    torch.manual_seed(3)
    first, second = (draw(device) for device in both)
    assert torch.equal(first, second)
    assert not torch.equal(draw(both[0]), first)
    torch.ts.manual_seed_all(3)
    with torch.ts.device(both[1]):
        torch.ts.manual_seed(4)
        assert torch.ts.initial_seed() == 4
    state = torch.ts.get_rng_state(both[1])
    third = draw(both[1])
    assert torch.equal(draw(both[0]), first) and not torch.equal(third, first)
    torch.ts.set_rng_state(state, both[1])
    assert torch.equal(draw(both[1]), third)


def test_the_module_of_the_device_knows_each_device(machine: RemoteMachine, both: Both) -> None:
    assert torch.ts.device_count() >= 2
    before = [torch.ts.memory_allocated(device) for device in both]
    tensor = torch.ones(1 << 20, device=both[1])
    machine.synchronize()
    assert torch.ts.memory_allocated(both[1]) - before[1] == tensor.nbytes
    assert torch.ts.memory_allocated(both[0]) == before[0]
    torch.ts.empty_cache()
    assert [torch.ts.get_device_name(each) for each in both] == ["accinte:0", "accinte:1"]
    with torch.device(both[1]):
        assert torch.zeros(3).device == both[1]


def test_a_model_on_two_devices_trains_as_on_a_cpu(both: Both) -> None:
    def train(places: tuple[torch.device | str, torch.device | str]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        weights = [
            torch.randn(8, 8, generator=generator).to(place).requires_grad_() for place in places
        ]
        optimizer = torch.optim.Adam(weights, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            hidden = (torch.ones(4, 8, device=places[0]) @ weights[0]).tanh().to(places[1])
            (hidden @ weights[1]).pow(2).mean().backward()
            optimizer.step()
        return [weight.detach().cpu() for weight in weights]

    for actual, expected in zip(train(both), train(("cpu", "cpu")), strict=True):
        torch.testing.assert_close(actual, expected)


@ts.remote
def _add_ones(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(x.shape, device=x.device)


def test_files_and_functions_use_the_second_device(both: Both, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    ts.save_file({"weight": torch.arange(4.0)}, path)
    loaded = ts.load_file(path, device=both[1])["weight"]
    assert loaded.device == both[1]
    result = _add_ones(loaded)
    assert result.device == both[1] and result.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_pause_keeps_the_tensors_and_generators_of_both_devices(
    machine: RemoteMachine, both: Both
) -> None:
    tensors = [torch.randn(5, device=device) for device in both]
    on_host = [tensor.cpu() for tensor in tensors]
    states = [torch.ts.get_rng_state(device) for device in both]
    machine.pause()
    machine.resume()
    for tensor, expected, state in zip(tensors, on_host, states, strict=True):
        assert torch.equal(tensor.cpu(), expected)
        assert torch.equal(torch.ts.get_rng_state(tensor.device), state)


def test_devices_that_do_not_exist_are_refused_and_no_process_stays(installed: None) -> None:
    before = children(os.getpid())
    with pytest.raises(DeviceUnavailableError) as refused:
        RemoteMachine("local", "accelerator", gpu_count=3, name="m", threads=1)
    assert str(refused.value) == (
        "cannot start machine m: not enough accelerators: expected at least 3, but PyTorch finds 2"
    )
    if not torch.cuda.is_available():
        for wanted in ("cuda", "A100"):
            with pytest.raises(DeviceUnavailableError, match="not enough GPUs"):
                RemoteMachine("local", wanted, gpu_count=2)
    assert children(os.getpid()) == before


def test_a_process_that_has_the_accelerator_is_told_why_it_has_no_machines(installed: None) -> None:
    program = """if True:
        from tensorstream.errors import ConfigurationError
        from tensorstream.remote import RemoteMachine
        try:
            RemoteMachine("mock")
        except ConfigurationError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},
    )  # fmt: skip
    assert "cannot add the device ts" in done.stdout and "accinte" in done.stdout, done
    assert "set TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stdout and not done.stderr, done
