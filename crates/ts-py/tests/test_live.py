# SPDX-License-Identifier: MIT OR Apache-2.0
"""Writes the weights of live models to a storage path, streams them, and restores them."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preloaded
import pytest
import tensorstream as ts
import torch
from conftest import leased
from tensorstream.streaming._state import is_offloaded
from torch import nn


def mlp(seed: int = 0, layers: int = 8, width: int = 64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


class Zoo(nn.Module):
    """Has parameters with no, one and many elements, and parameters that are tied or transposed.

    Also has buffers, and modules without parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.act = nn.PReLU()
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 32))
        self.wide = nn.Linear(32, 4096)
        self.back = nn.Linear(4096, 32, bias=False)
        self.tied = nn.Linear(32, 4096)
        self.tied.weight = self.wide.weight
        self.turned = nn.Parameter(torch.randn(32, 48).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.back(self.act(self.wide(self.norm(x) * self.scale)) + self.tied(x))
        return torch.cat([self.drop(x), self.empty]) @ self.turned.t()


@pytest.mark.critical
def test_a_live_model_is_stored_streamed_and_restored(tmp_path: Path) -> None:
    model = mlp()
    x = torch.randn(5, 64)
    with torch.inference_mode():
        expected = model(x)
    ts.offload(model, ts.Config(storage_path=tmp_path / "made" / "for it", budget="60KiB"))
    (file,) = (tmp_path / "made" / "for it").iterdir()
    assert file.suffix == ".ts"
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(model(x), expected)
    stats = ts.stats(model)
    assert any(unit["loads"] > 1 for unit in stats["units"])
    assert stats["reserved_high_water_bytes"] <= 60 << 10
    ts.restore(model)
    assert torch.equal(model(x), expected)
    assert torch.equal(ts.load_file(file)["3.weight"], model[3].weight)


def test_every_kind_of_module_is_exact(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Zoo().eval()
    x = torch.randn(5, 32)
    with torch.inference_mode():
        expected = model(x)
    strides = {name: p.stride() for name, p in model.named_parameters(remove_duplicate=False)}
    phases = {
        name: p.data_ptr() % 64
        for name, p in model.named_parameters()
        if p.is_contiguous() and p.numel()
    }
    ts.offload(model, ts.Config(storage_path=tmp_path, budget="1200KiB"))
    assert model.tied.weight is model.wide.weight
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(x), expected)
    for name, phase in phases.items():
        parameter: Any = model.get_parameter(name)
        assert leased(parameter).data_ptr() % 64 == phase
    assert {
        name: p.stride() for name, p in model.named_parameters(remove_duplicate=False)
    } == strides
    ts.restore(model)
    assert {
        name: p.stride() for name, p in model.named_parameters(remove_duplicate=False)
    } == strides
    assert model.tied.weight is model.wide.weight
    with torch.inference_mode():
        assert torch.equal(model(x), expected)


def test_models_without_parameters_can_be_offloaded(tmp_path: Path) -> None:
    for model in (nn.ReLU(), nn.Sequential(nn.Flatten(), nn.Tanh())):
        ts.offload(model, ts.Config(storage_path=tmp_path, budget="1MiB"))
        assert model(torch.zeros(2, 3)).shape == (2, 3)
        ts.restore(model)


def test_offload_frees_the_memory_of_the_model(tmp_path: Path) -> None:
    freed: list[int] = []
    model = mlp()
    for index, parameter in enumerate(model.parameters()):
        weakref.finalize(parameter.untyped_storage(), freed.append, index)
    del parameter
    ts.offload(model, ts.Config(storage_path=tmp_path, budget="60KiB"))
    gc.collect()
    assert sorted(freed) == list(range(16))


def test_only_equal_weights_share_a_file(tmp_path: Path) -> None:
    config = ts.Config(storage_path=tmp_path, budget="60KiB")
    x = torch.randn(2, 64)
    expected = {seed: mlp(seed)(x) for seed in (0, 1)}
    for seed in (0, 1, 0, 1):
        before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
        model = ts.offload(mlp(seed), config)
        assert torch.equal(model(x), expected[seed])
        assert all(file.stat().st_mtime_ns == written for file, written in before.items())
    assert len(list(tmp_path.iterdir())) == 2
    # A model that differs in one bit gets its own file.
    model = mlp(0)
    with torch.no_grad():
        model[7].bias[63] = torch.nextafter(model[7].bias[63], torch.tensor(9.0))
    expected_bit = model(x)
    assert torch.equal(ts.offload(model, config)(x), expected_bit)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_truncated_stored_file_is_rewritten(tmp_path: Path) -> None:
    config = ts.Config(storage_path=tmp_path, budget="60KiB")
    x = torch.randn(2, 64)
    expected = mlp()(x)
    ts.offload(mlp(), config)
    (file,) = tmp_path.iterdir()
    for content in (b"", file.read_bytes()[:10_000], b"\0" * 100_000):
        file.write_bytes(content)
        assert torch.equal(ts.offload(mlp(), config)(x), expected)


def test_a_file_with_wrong_content_is_not_used(tmp_path: Path) -> None:
    config = ts.Config(storage_path=tmp_path, budget="60KiB")
    ts.offload(mlp(0), config)
    (mine,) = tmp_path.iterdir()
    content = mine.read_bytes()
    mine.unlink()
    ts.offload(mlp(1), config)
    (other,) = tmp_path.iterdir()
    other.write_bytes(content)
    x = torch.randn(2, 64)
    assert torch.equal(ts.offload(mlp(1), config)(x), mlp(1)(x))


SHARES = """
import sys, torch, tensorstream as ts
from torch import nn
torch.manual_seed(int(sys.argv[2]))
model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
x = torch.linspace(-1, 1, 1024).reshape(2, 512)
expected = model(x)
sys.stdin.readline()
for _ in range(3):
    ts.offload(model, ts.Config(storage_path=sys.argv[1], budget="3MiB"))
    assert torch.equal(model(x), expected)
    ts.restore(model)
    assert torch.equal(model(x), expected)
print("right")
"""


@pytest.mark.slow
def test_processes_share_a_storage_path(programs: preloaded.Server, tmp_path: Path) -> None:
    """Runs four processes at once, two for each of two models."""
    children = [programs.start_code(SHARES, tmp_path, seed % 2) for seed in range(4)]
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    outputs = [child.wait() for child in children]
    assert outputs == ["right\n"] * 4
    assert len(list(tmp_path.iterdir())) == 2, "one file for each model"


def test_threads_share_a_storage_path(tmp_path: Path) -> None:
    x = torch.randn(2, 64)
    expected, failures = mlp()(x), []

    def run() -> None:
        try:
            assert torch.equal(ts.offload(mlp_of_state(), config)(x), expected)
        except BaseException as error:
            failures.append(error)

    state = mlp().state_dict()

    def mlp_of_state() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        model.load_state_dict(state)
        return model

    config = ts.Config(storage_path=tmp_path, budget="60KiB")
    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("no_collector_callbacks")
@pytest.mark.parametrize("moment", range(4))
def test_ctrl_c_while_storing_keeps_the_model(tmp_path: Path, moment: int) -> None:
    model = mlp(layers=24, width=512)
    x = torch.randn(2, 512)
    expected = model(x)
    timer = threading.Timer(0.004 * (moment + 1), os.kill, (os.getpid(), signal.SIGINT))
    config = ts.Config(storage_path=tmp_path, budget="3MiB")
    try:
        timer.start()
        while True:
            ts.offload(model, config)
            ts.restore(model)
            for file in tmp_path.iterdir():
                file.unlink()
    except KeyboardInterrupt:
        pass
    finally:  # another error must not be hidden by the interrupt
        timer.cancel()
        timer.join()
    assert all(file.suffix == ".ts" for file in tmp_path.iterdir())
    if not is_offloaded(model):
        assert torch.equal(model(x), expected)
        ts.offload(model, config)
    assert torch.equal(model(x), expected)


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_a_failed_store_leaves_the_model_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    x = torch.randn(2, 64)
    expected = mlp()(x)
    half_meta = mlp()
    half_meta[1] = nn.Linear(64, 64, device="meta")
    odd = mlp()
    packed = torch.zeros(64, 64, dtype=torch.uint8).view(torch.uint4)
    odd[1].weight = nn.Parameter(packed, requires_grad=False)
    cases: list[tuple[nn.Module, Any, type[Exception], str]] = [
        (
            mlp(),
            {"storage_path": file, "budget": "1MiB"},
            ts.ConfigurationError,
            "storage_path.*a directory",
        ),
        (
            mlp(),
            {"storage_path": file / "x", "budget": "1MiB"},
            ts.StorageError,
            "cannot create the directory",
        ),
        (
            mlp(),
            {"storage_path": tmp_path / "d", "budget": "1KiB"},
            ts.BudgetError,
            "smallest budget that works",
        ),
        (
            half_meta,
            {"storage_path": tmp_path / "d", "budget": "1MiB"},
            ts.ModelError,
            "others have weights",
        ),
        (
            odd,
            {"storage_path": tmp_path / "d", "budget": "1MiB"},
            ts.ConfigurationError,
            "files do not support torch.uint4",
        ),
    ]
    for model, fields, error, text in cases:
        with pytest.raises(error, match=text):
            ts.offload(model, ts.Config(**fields))
        if model not in (half_meta, odd):
            assert torch.equal(model(x), expected)
    assert not (tmp_path / "d").exists() or not list((tmp_path / "d").iterdir())


@pytest.mark.slow
def test_cycles_leak_nothing(tmp_path: Path, share: Callable[[int], int]) -> None:
    """Counts memory, descriptors and threads over cycles of offload, two passes and restore."""
    model = mlp(layers=16, width=256)
    x = torch.randn(2, 256)
    expected = model(x)

    def cycle() -> None:
        ts.offload(model, ts.Config(storage_path=tmp_path, budget="1MiB"))
        for _ in range(2):
            assert torch.equal(model(x), expected)
        ts.restore(model)

    def census() -> tuple[int, int, int, int]:
        gc.collect()
        status = Path("/proc/self/status").read_text()
        rss = int(status.split("VmRSS:")[1].split()[0]) * 1024
        maps = len(Path("/proc/self/maps").read_text().splitlines())
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps, rss

    for _ in range(20):
        cycle()
    before = census()
    for _ in range(share(100)):
        cycle()
    after = census()
    for _ in range(100):  # stopped threads leave /proc after a moment
        if after[1] <= before[1]:
            break
        time.sleep(0.02)
        after = census()
    assert after[:2] == before[:2]
    assert after[2] <= before[2] + 4, "mappings are not leaked"
    assert after[3] <= before[3] + (4 << 20), f"{(after[3] - before[3]) >> 20} MiB more in memory"


def test_the_file_matches_format_md(tmp_path: Path) -> None:
    """Parses the file as FORMAT.md describes it."""
    ts.offload(mlp(layers=2), ts.Config(storage_path=tmp_path, budget="60KiB"))
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    assert content[:8] == b"\x89TSF\r\n\x1a\n"
    offset, length = (int.from_bytes(content[at : at + 8], "little") for at in (24, 32))
    index = content[offset : offset + length]
    assert len(content) == offset + length
    count, keys, chunk = (
        int.from_bytes(index[a:b], "little") for a, b in ((0, 4), (4, 8), (8, 16))
    )
    assert (count, keys, chunk) == (4, 1, 1 << 20)
    assert json.dumps("format").encode()[1:-1] in index


def test_channels_last_is_preserved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(24, 24, 3, padding=1) for _ in range(6))).to(
        memory_format=torch.channels_last
    )  # type: ignore[call-overload]  # the stub has no such overload
    x = torch.randn(2, 24, 9, 9).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        expected = model(x)
    ts.offload(model, ts.Config(storage_path=tmp_path, budget="80KiB"))
    assert model[0].weight.stride() == (216, 1, 72, 24)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
        assert torch.equal(ts.restore(model)(x), expected)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_parameters_with_gaps_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
    with pytest.raises(
        ts.ModelError, match=r"`weight`: its memory has gaps or overlaps \(strides \[8, 2\]\)"
    ):
        ts.offload(model, ts.Config(storage_path=tmp_path, budget="1MiB"))
    model.weight = nn.Parameter(torch.randn(4, 4).t())
    ts.save_file(dict(model.named_parameters()), tmp_path / "model.ts")
    x, strides = torch.randn(3, 4), model.weight.stride()
    with torch.inference_mode():
        expected = model(x)
        ts.offload(model, checkpoint=tmp_path / "model.ts", budget="1MiB")
        assert torch.equal(model(x), expected)
    assert model.weight.stride() == strides


@pytest.mark.usefixtures("no_collector_callbacks")
def test_ctrl_c_at_any_moment_leaves_a_working_model(tmp_path: Path) -> None:
    """Offload and restore are atomic under interrupts, and never lose weights."""
    model = mlp(layers=40)
    x = torch.randn(2, 64)
    expected = model(x)
    config = ts.Config(storage_path=tmp_path, budget="60KiB")
    rng = random.Random(0)
    interrupted = 0
    for _ in range(100):
        old = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        try:
            # Python ignores an interrupt in a callback. Then the test ends with the next one.
            signal.setitimer(signal.ITIMER_REAL, 1e-4 + rng.random() * 0.03, 10)
            while True:
                if is_offloaded(model):
                    ts.restore(model)
                ts.offload(model, config)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        assert torch.equal(model(x), expected)
        assert {file.suffix for file in tmp_path.iterdir()} <= {".ts"}
    assert interrupted == 100
