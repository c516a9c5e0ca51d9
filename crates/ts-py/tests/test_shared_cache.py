# SPDX-License-Identifier: MIT OR Apache-2.0
"""Processes that share the weights which stay in memory."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
import tensorstream as ts
import torch
from torch import nn

pytestmark = pytest.mark.skipif(
    not Path("/dev/shm").exists(), reason="this system has no directory in memory"
)

#: Runs two passes of the model of `offloaded` in another process, prints its statistics, and waits.
_OTHER = """
import sys
sys.path.insert(0, sys.argv[1])
from test_shared_cache import offloaded, result, shared
model = offloaded(*sys.argv[2:])
print(result(model), *shared(model), flush=True)
sys.stdin.read()
"""


class Layer(nn.Linear):
    """A linear layer that can write to its weight without PyTorch noticing."""

    writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            ctypes.memset(self.weight.data_ptr() + 4096, 1, 1)
        return super().forward(x)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Returns a directory in memory for one test."""
    directory = Path(f"/dev/shm/tensorstream-test-{os.getpid()}-{tmp_path.name}")
    yield directory
    if directory.exists():
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Writes a checkpoint of 8 MiB, in 8 units."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(512, 512) for _ in range(8)))
    ts.save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def offloaded(
    checkpoint: str | Path, directory: str | Path | bool, budget: str = "5MiB"
) -> nn.Module:
    """Returns an offloaded model that shares weights."""
    with torch.device("meta"):
        model = nn.Sequential(*(Layer(512, 512) for _ in range(8)))
    config = ts.Config(budget=budget, shared_cache=directory)
    return ts.offload(model, config, checkpoint=checkpoint)


def result(model: nn.Module) -> float:
    """Returns the sum of the output of two passes."""
    x = torch.ones(2, 512)
    with torch.inference_mode():
        first, second = model(x), model(x)
    assert torch.equal(first, second)
    return float(second.sum())


def shared(model: nn.Module) -> tuple[int, int, int]:
    """Returns the size of shared units, that of other kept units, and the bytes read of both."""
    for _ in range(8):
        kept = [unit for unit in ts.stats(model)["units"] if unit["resident"] or unit["compressed"]]
        if kept and all(unit["shared"] for unit in kept):
            break
        result(model)  # a new plan reads its units in the next pass
    own = sum(unit["slot_bytes"] for unit in kept if not unit["shared"])
    total = sum(unit["slot_bytes"] for unit in kept)
    return total - own, own, sum(unit["read_bytes"] for unit in kept)


def entries(directory: Path) -> list[Path]:
    """Returns the files with weights."""
    return [path for path in directory.iterdir() if path.name != "locks"]


class Other:
    """Another process with the model. It ends when this object is closed."""

    def __init__(self, programs: preloaded.Server, *args: Any) -> None:
        self.process = programs.start_code(_OTHER, Path(__file__).parent, *args)
        total, *numbers = self.process.stdout.readline().split()
        self.result = float(total)
        self.shared, self.own, self.read = map(int, numbers)

    def close(self, number: signal.Signals | None = None) -> None:
        """Ends the process by itself, or by a signal."""
        if number is not None:
            self.process.send_signal(number)
        self.process.wait(timeout=60)


def second(first: Other, *args: Any) -> tuple[nn.Module, int]:
    """Returns a model of this process that shares weights with `first`, and how many bytes.

    On a busy machine its plans can come to keep only units that `first` does not, which it has
    to read. That is tried five times.
    """
    for _ in range(5):
        model = offloaded(*args)
        assert result(model) == first.result
        kept, own, read = shared(model)
        assert own == 0
        if read < kept:
            return model, kept
        del model
    pytest.fail("five models each read all that they share")


def test_a_second_process_reads_only_what_it_streams(
    programs: preloaded.Server, checkpoint: Path, directory: Path
) -> None:
    first = Other(programs, checkpoint, directory)
    try:
        assert first.shared > 2 << 20 and first.own == 0 and first.read > 2 << 20
        model, kept = second(first, checkpoint, directory)
        assert kept > 1 << 20
        there = sum(path.stat().st_size for path in entries(directory))
        assert there < kept + first.shared, "some of it is used by both"
    finally:
        first.close()
    # What this process uses stays, and goes with it.
    assert result(model) == first.result
    assert entries(directory) != []
    del model
    assert entries(directory) == []


def test_a_process_that_ends_leaves_nothing(
    programs: preloaded.Server, checkpoint: Path, directory: Path
) -> None:
    Other(programs, checkpoint, directory).close()
    assert entries(directory) == []


def test_what_a_killed_process_left_is_removed(
    programs: preloaded.Server, checkpoint: Path, directory: Path
) -> None:
    other = Other(programs, checkpoint, directory)
    other.close(signal.SIGKILL)
    assert entries(directory), "nobody removed it"
    model = offloaded(checkpoint, directory)
    assert entries(directory) == [], "it could be removed, because nobody used it"
    assert result(model) == other.result


def test_a_changed_checkpoint_is_another_one(
    programs: preloaded.Server, checkpoint: Path, directory: Path
) -> None:
    first = Other(programs, checkpoint, directory)
    try:
        changed = {name: -tensor for name, tensor in ts.load_file(checkpoint).items()}
        ts.save_file(changed, checkpoint)
        model = offloaded(checkpoint, directory)
        assert result(model) != first.result
        assert shared(model)[0] > 0, "it is shared, but with nobody yet"
    finally:
        first.close()


def test_the_compressed_units_of_a_file_are_shared(
    programs: preloaded.Server, checkpoint: Path, directory: Path, tmp_path: Path
) -> None:
    ts.convert(checkpoint, tmp_path / "model.ts", codec="split")
    first = Other(programs, tmp_path / "model.ts", directory, "7600KiB")
    try:
        second(first, tmp_path / "model.ts", directory, "7600KiB")
    finally:
        first.close()


def test_a_write_to_a_shared_weight_is_detected(
    programs: preloaded.Server, checkpoint: Path, directory: Path
) -> None:
    first = Other(programs, checkpoint, directory)
    try:
        model = offloaded(checkpoint, directory)
        before = result(model)
        if not ts.stats(model)["watches_writes"]:
            pytest.skip("this system does not detect writes")

        for number, unit in enumerate(ts.stats(model)["units"]):
            model[number].writes = unit["shared"]
        with torch.inference_mode(), pytest.raises(ts.ModelError, match="written to in place"):
            model(torch.ones(2, 512))
        for layer in model:
            layer.writes = False
        assert result(model) == before == first.result
    finally:
        first.close()


@pytest.mark.parametrize("value", [3, "no/such/directory", "/proc"])
def test_a_directory_that_cannot_be_used_is_refused(
    value: Any, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ts.ConfigurationError, match="shared_cache"):
        offloaded(checkpoint, value)
    with pytest.raises(ts.ConfigurationError, match=r"tmpfs|shared_cache"):
        offloaded(checkpoint, tmp_path / "cache")


def test_a_directory_of_others_is_refused(checkpoint: Path, directory: Path) -> None:
    directory.mkdir(mode=0o755)
    with pytest.raises(ts.ConfigurationError, match="only this user"):
        offloaded(checkpoint, directory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_through_shared_weights_are_the_same(
    dtype: torch.dtype, autocast: bool, checkpoint: Path, directory: Path
) -> None:
    weights = {name: own.to(dtype) for name, own in ts.load_file(checkpoint).items()}
    ts.save_file(weights, checkpoint)
    reference = nn.Sequential(*(Layer(512, 512) for _ in range(8))).to(dtype)
    reference.load_state_dict(weights)
    reference.requires_grad_(False)

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        found = []
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(2, 512, dtype=dtype, requires_grad=True)
            with torch.autocast("cpu", enabled=autocast):
                y = model(x)
            y.float().square().sum().backward()
            assert x.grad is not None
            found += [y.detach(), x.grad]
        return found

    # The budget is above what a graph holds of the weights, and below all of them.
    budget = str(sum(own.nbytes for own in weights.values()) * 3 // 4)
    expected = gradients(reference)
    models = []
    for _ in range(2):
        with torch.device("meta"):
            model = nn.Sequential(*(Layer(512, 512) for _ in range(8))).to(dtype)
        model.requires_grad_(False)
        config = ts.Config(budget=budget, shared_cache=directory)
        models.append(ts.offload(model, config, checkpoint=checkpoint))
        assert all(map(torch.equal, gradients(models[-1]), expected))
    # The weights are read again for later passes, also once the other model is gone.
    assert any(unit["shared"] for unit in ts.stats(models[1])["units"])
    del models[0], model
    assert all(map(torch.equal, gradients(models[0]), expected))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mounts a file system in memory of 2 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount file systems")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_units_that_do_not_fit_are_kept_apart(
    programs: preloaded.Server, checkpoint: Path, small: Path
) -> None:
    expected = result(offloaded(checkpoint, False))
    model = offloaded(checkpoint, small / "cache")
    for _ in range(12):
        assert result(model) == expected
        units = ts.stats(model)["units"]
        there = sum(unit["slot_bytes"] for unit in units if unit["shared"])
        apart = any(unit["resident"] and not unit["shared"] for unit in units)
        if there and apart:
            break  # a new plan reads its units in the next pass
    assert 0 < there <= 2 << 20, "some units are shared"
    assert apart, "others are not"

    # Others fill it. New units are kept apart, and a second process works, too.
    other = (small / "other").open("wb", buffering=0)
    with other, pytest.raises(OSError, match="No space left"):
        while True:
            other.write(bytes(4096))
    assert result(model) == expected
    second = Other(programs, checkpoint, small / "cache")
    try:
        assert second.result == expected
    finally:
        second.close()
    del model
    again = offloaded(checkpoint, small / "cache")
    assert [result(again) for _ in range(3)] == [expected] * 3
