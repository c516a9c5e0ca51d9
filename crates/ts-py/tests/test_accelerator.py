# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams models to the stand-in accelerator. Each test runs programs of ``on_stand_in.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import preloaded
import pytest
import tensorstream as ts
import torch
from on_stand_in import COPIES, LIBRARY, REUSE, STAGING, STAND_IN

needs_stand_in = pytest.mark.skipif(
    not LIBRARY.exists(), reason="the stand-in accelerator is not built: run `cargo xtask ci`"
)


@pytest.fixture(scope="module", autouse=True)
def server(programs: preloaded.Server) -> Iterator[None]:
    """Sets the server that `run` uses."""
    _server.append(programs)
    yield
    _server.clear()


_server: list[preloaded.Server] = []


def run(
    *arguments: object, tmp_path: Path, fails: str | None = None, file: str = "on_stand_in.py"
) -> str:
    """Runs a program. ``fails`` is a part of the error that it ends with, if it has to fail."""
    environment = {**os.environ, "XDG_CACHE_HOME": os.fspath(tmp_path), "OMP_NUM_THREADS": "1"}
    [started] = _server
    program, own = Path(__file__).with_name(file), [*map(str, arguments)]
    outcome = started.run(program, own, environment, timeout=600)
    said = outcome.stdout + outcome.stderr
    if fails is None:
        assert outcome.returncode == 0 and outcome.stdout.endswith("passed\n"), said
    else:
        assert outcome.returncode != 0 and fails in outcome.stderr, said
    return said


def test_programs_run_in_processes_of_their_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, torch\n"
        "assert torch.get_num_threads() == 1 and __name__ == '__main__'\n"
        "print(sys.argv[1:], os.environ['OWN'], sys.stdin.read(), hasattr(torch, 'mark'))\n"
        "torch.mark = True\n"
        "os.write(1, b'raw')\n"
        "if sys.argv[1] == 'crash': os.kill(os.getpid(), 11)\n"
        "raise ValueError('last words')\n"
    )
    [started] = _server
    for how, code in (("raise", 1), ("crash", -11), ("raise", 1)):
        done = started.run(program, [how, "2"], {**os.environ, "OWN": "x"}, timeout=60)
        assert done.returncode == code, done
        assert "raw" in done.stdout
        if how == "raise":
            assert f"{[how, '2']} x  False\n" in done.stdout
            assert "ValueError: last words" in done.stderr
    with pytest.raises(TimeoutError, match="took more than"):
        program.write_text("import time; time.sleep(60)")
        started.run(program, [], os.environ, timeout=0.5)


@needs_stand_in
@pytest.mark.parametrize(
    "name",
    [
        "compiled",
        "exactness",
        "budget",
        "extras",
        "interrupts",
        "kept",
        "handles",
        "moves",
        "overlap",
        "pipeline",
        "threads",
        "tiers",
        "lora",
        "refusals",
    ],
)
def test_models_stream_to_a_device(name: str, tmp_path: Path) -> None:
    run(name, tmp_path=tmp_path)


@needs_stand_in
@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "names",
    [
        ("gpt2", "bert", "t5", "mixtral", "vit", "whisper"),
        ("mamba", "deepseek_v3", "llava", "gemma3", "bloom", "jamba"),
        ("gpt2:bfloat16", "t5:bfloat16", "gemma3:bfloat16", "bert:float16"),
    ],
)
def test_families_are_bit_identical(names: tuple[str, ...], tmp_path: Path) -> None:
    run("families", *names, tmp_path=tmp_path)


@needs_stand_in
@pytest.mark.parametrize(
    "name",
    [
        "automatic",
        "combined",
        "drop_in",
        "drop_in_without_files",
        "layers",
        "lora",
        "maps",
        "refusals",
        "threads",
    ],
)
def test_models_stream_to_two_devices(name: str, tmp_path: Path) -> None:
    run(name, tmp_path=tmp_path, file="on_two_devices.py")


@needs_stand_in
@pytest.mark.long
def test_families_are_bit_identical_on_two_devices(tmp_path: Path) -> None:
    names = ("gpt2", "t5", "mixtral", "llava", "jamba", "clip", "gpt2:bfloat16", "bert:float16")
    run("families", *names, tmp_path=tmp_path, file="on_two_devices.py")


@needs_stand_in
@pytest.mark.parametrize("name", ["files", "network"])
def test_tensors_are_loaded_and_received_to_a_device(name: str, tmp_path: Path) -> None:
    run(name, tmp_path=tmp_path, file="tensors_on_stand_in.py")


@needs_stand_in
@pytest.mark.long
def test_the_measurements_of_the_gpu_bundle_run(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "benches/python/gpu.py"
    arguments = ["--small", "--device", "accinte:0", "--stand-in", STAND_IN]
    arguments += ["--programs", Path(__file__).with_name("on_stand_in.py")]
    arguments += ["--folder", tmp_path, "--out", tmp_path]
    outcome = subprocess.run(
        [sys.executable, script, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "XDG_CACHE_HOME": os.fspath(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    [results] = json.loads((tmp_path / "gpu.json").read_text())["rounds"]
    # Diffusers refuses streams on the stand-in.
    assert [name for name in results if "failed" in results[name]] == ["diffusers"], results
    assert results["ours"]["tokens"] == results["resident"]["tokens"]
    assert (
        "tokens equal to the resident model's (1 is yes) | 1.000"
        in (tmp_path / "gpu.md").read_text()
    )


@needs_stand_in
def test_diffusion_models_are_bit_identical(tmp_path: Path) -> None:
    names = ("FluxTransformer2DModel", "UNet2DConditionModel", "AutoencoderKL")
    run("diffusion", *names, tmp_path=tmp_path)


@needs_stand_in
@pytest.mark.slow
def test_delayed_copies_change_nothing(tmp_path: Path) -> None:
    run("delays", 200, tmp_path=tmp_path)


@needs_stand_in
def test_kernels_may_run_later(tmp_path: Path) -> None:
    run("kernels", 0, 40, tmp_path=tmp_path)


@needs_stand_in
@pytest.mark.parametrize("wait", [COPIES, REUSE, STAGING])
def test_each_wait_is_needed(wait: int, tmp_path: Path) -> None:
    """Without a wait of the engine, the test above fails, on a busy machine after many passes."""
    run("kernels", wait, 1000, tmp_path=tmp_path, fails="read a wrong weight")


def test_a_machine_without_an_accelerator_says_so(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    for device in ("cuda", "cuda:1", "mps", "xpu:0"):
        with pytest.raises(ts.ConfigurationError, match="cannot use the device"):
            ts.offload(model, ts.Config(storage_path=tmp_path, device=device))
    with pytest.raises(ts.ConfigurationError, match="invalid device"):
        ts.offload(model, ts.Config(storage_path=tmp_path, device="toaster"))
    assert type(model.weight) is torch.nn.Parameter
    assert not list(tmp_path.iterdir()), "the weights were written"


def test_accelerators_are_registered() -> None:
    ts.register_accelerator("mtia", library="libnone.so", prefix="none")
    with pytest.raises(ts.ConfigurationError, match="the accelerator of this PyTorch is"):
        ts.Config(device="mtia").accelerator()
    # A wrong path can be corrected, because nothing was loaded.
    ts.register_accelerator("mtia", library="libother.so", prefix="none")
    with pytest.raises(ts.ConfigurationError, match="invalid device type"):
        ts.register_accelerator("cpu", library="libnone.so", prefix="none")
