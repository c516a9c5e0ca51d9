# SPDX-License-Identifier: MIT OR Apache-2.0
"""load_file, save_file, convert and the command line, against the safetensors library and against interruption."""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import tensorstream as ts
import torch
from conftest import Llama
from tensorstream.config import Codec
from tensorstream._streamed_tensor import SAFETENSORS_DTYPES

FORMATS = ["ts", "safetensors"]


def every_dtype() -> dict[str, torch.Tensor]:
    """A tensor of each dtype and odd shape, random bits in it, NaNs and all."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for dtype in SAFETENSORS_DTYPES:
        size = torch.empty((), dtype=dtype).element_size()
        for shape in [(), (1,), (0, 3), (3, 5), (2, 1, 7)]:
            count = int(torch.Size(shape).numel()) * size
            raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=generator)
            tensors[f"{dtype}/{shape}"] = raw.to(torch.uint8).view(dtype).view(shape)
    return tensors


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape)
        there, here = actual[name].reshape(-1), tensor.reshape(-1)
        assert torch.equal(there.view(torch.uint8), here.view(torch.uint8)), name


@pytest.mark.critical
@pytest.mark.parametrize("suffix", FORMATS)
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"all.{suffix}"
    metadata = {"format": "pt", "ключ": 'значение\n"quoted"'}
    ts.save_file(every_dtype(), path, metadata)
    assert_equal(ts.load_file(path), every_dtype())
    assert ts._native.Checkpoint(path).files()[0][2] == metadata
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("codec", ["auto", "split", "zstd", "lz4", "zlib"])
def test_what_is_compressed_is_loaded_bit_for_bit(minilm: Path, tmp_path: Path, codec: Codec) -> None:
    path = tmp_path / "all.ts"
    ts.save_file(every_dtype(), path, codec=codec)
    assert_equal(ts.load_file(path), every_dtype())
    container, back = tmp_path / "m.ts", tmp_path / "m.safetensors"
    ts.convert(minilm, container, codec=codec, jobs=2)
    assert_equal(ts.load_file(container), safetensors.torch.load_file(minilm / "model.safetensors"))
    ts.convert(container, back)
    assert back.read_bytes() == (minilm / "model.safetensors").read_bytes()
    smaller = codec in ("auto", "split", "zlib", "zstd")
    assert (container.stat().st_size < 0.95 * back.stat().st_size) == smaller, container.stat().st_size


def test_compression_that_cannot_be_says_why(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(3)}
    with pytest.raises(ts.ConfigurationError, match="not compressed"):
        ts.save_file(tensors, tmp_path / "w.safetensors", codec="auto")
    with pytest.raises(ts.ConfigurationError, match="-7 to 22"):
        ts.save_file(tensors, tmp_path / "w.ts", codec="zstd", compression_level=23)
    with pytest.raises(ts.ConfigurationError, match="no codec"):
        ts.save_file(tensors, tmp_path / "w.ts", codec="brotli")  # type: ignore[arg-type] # that is the test
    assert not list(tmp_path.iterdir())


def test_safetensors_files_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {k: v for k, v in every_dtype().items() if "fnuz" not in k and "e8m0" not in k}
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    ts.save_file(tensors, ours, {"format": "pt"})
    safetensors.torch.save_file(tensors, theirs, {"format": "pt"})
    assert ours.read_bytes() == theirs.read_bytes()
    assert_equal(safetensors.torch.load_file(ours), tensors)
    assert_equal(ts.load_file(theirs), tensors)


def test_conversion_there_and_back_gives_the_same_file(minilm: Path, tmp_path: Path) -> None:
    container, back = tmp_path / "m.ts", tmp_path / "m.safetensors"
    ts.convert(minilm, container)
    ts.convert(container, back)
    assert back.read_bytes() == (minilm / "model.safetensors").read_bytes()
    assert_equal(ts.load_file(container), safetensors.torch.load_file(minilm / "model.safetensors"))


@pytest.mark.parametrize("codec", ["raw", "auto", "zstd"])
def test_shards_become_one_file_that_streams(llama: Llama, tmp_path: Path, codec: Codec) -> None:
    path = llama(shard_size="300KB")
    reference = ts.from_pretrained(path, budget="300KiB")
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    ts.convert(path, tmp_path / "model.ts", codec=codec)
    model = ts.from_pretrained(tmp_path, budget="300KiB" if codec == "raw" else "4MiB")
    ids = torch.arange(9).unsqueeze(0)
    with torch.inference_mode():
        assert torch.allclose(model(ids).logits, reference(ids).logits, atol=1e-5)
    merged: dict[str, torch.Tensor] = {}
    for shard in sorted(path.glob("*.safetensors")):
        merged |= safetensors.torch.load_file(shard)
    assert_equal(ts.load_file(tmp_path), merged)


@pytest.mark.parametrize("suffix", FORMATS)
def test_tensors_that_share_memory_or_lie_apart_are_written_as_they_read(tmp_path: Path, suffix: str) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    views = {"rows": base[1:3], "columns": base[:, ::2], "turned": base.t(), "again": base, "negative": base.conj()}
    ts.save_file(views, tmp_path / f"v.{suffix}")
    assert_equal(ts.load_file(tmp_path / f"v.{suffix}"), {k: v.contiguous() for k, v in views.items()})


def test_what_cannot_be_saved_or_converted_is_a_typed_error(tmp_path: Path) -> None:
    good = {"w": torch.zeros(3)}
    (tmp_path / "there.ts").write_text("before")
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: ts.save_file(good, tmp_path / "a.bin"), ts.ConfigurationError, r"a\.bin: the suffix names no"),
        (lambda: ts.save_file(good, tmp_path / "no" / "a.ts"), ts.StorageError, r"a\.ts.*cannot write: No such file"),
        (lambda: ts.save_file({"": good["w"]}, tmp_path / "there.ts"), ts.ConfigurationError, '"" is no tensor name'),
        (lambda: ts.save_file({"w": 3}, tmp_path / "a.ts"), ts.ConfigurationError, "cannot write 'w': int"),  # type: ignore[dict-item]
        (lambda: ts.save_file(good, tmp_path / "a.ts", {"k": 3}), ts.ConfigurationError, "cannot write 'k': int"),  # type: ignore[dict-item]
        (lambda: ts.save_file({"w": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "a.ts"),
         ts.ConfigurationError, "files have no torch.complex128"),
        (lambda: ts.save_file({"w": torch.zeros([1] * 64).unsqueeze(0)}, tmp_path / "a.ts"),
         ts.ConfigurationError, "rank 65"),
        (lambda: ts.convert(tmp_path / "gone", tmp_path / "a.ts"), ts.CheckpointNotFoundError, "gone"),
        (lambda: ts.convert(tmp_path / "there.ts", tmp_path / "a.ts"), ts.CheckpointError, r"there\.ts"),
        (lambda: ts.load_file(tmp_path / "gone"), FileNotFoundError, "gone"),
    ]  # fmt: skip
    for call, error, text in cases:
        with pytest.raises(error, match=text) as caught:
            call()
        assert isinstance(caught.value, ts.TensorStreamError)
    assert [file.name for file in tmp_path.iterdir()] == ["there.ts"]
    assert (tmp_path / "there.ts").read_text() == "before"


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, suffix: str) -> None:
    """A limit on the size of files is as a full disk: a write comes back short, then with an error."""
    path = tmp_path / f"a.{suffix}"
    ts.save_file({"w": torch.zeros(3)}, path)
    before = path.read_bytes()
    code = (
        "import resource, signal, sys, torch, tensorstream as ts\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))\n"
        "try:\n"
        "    ts.save_file({'w': torch.ones(2 << 20)}, sys.argv[1])\n"
        "except ts.StorageError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert f"{path.name}: cannot write at byte 0: File too large" in done.stdout
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_damage_is_an_error_on_loading_and_converting(tmp_path: Path) -> None:
    path = tmp_path / "a.ts"
    ts.save_file({"small": torch.zeros(3), "large": torch.zeros(1 << 20)}, path)
    content = bytearray(path.read_bytes())
    content[-2_000_000] ^= 8
    path.write_bytes(content)
    for call in (lambda: ts.load_file(path), lambda: ts.convert(path, tmp_path / "b.safetensors")):
        with pytest.raises(ts.ChecksumError, match=r"a\.ts: tensor `large`: 1048576 bytes at byte \d+"):
            call()
    assert list(tmp_path.iterdir()) == [path]


# --- interruption ---

CONVERTS = """
import sys, tensorstream as ts
print("ready", flush=True)
while True:
    ts.convert(sys.argv[1], sys.argv[2])
    ts.convert(sys.argv[2], sys.argv[3])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_fifty_interrupted_conversions_leave_no_partial_file(tmp_path: Path, kill: signal.Signals) -> None:
    source = tmp_path / "source.safetensors"
    ts.save_file({f"t{i}": torch.randn(300_000 + i) for i in range(40)}, source)
    expected = ts.load_file(source)
    there, back = tmp_path / "a.ts", tmp_path / "b.safetensors"
    rng = random.Random(0)
    # One process for five moments: SIGINT is survived, and a killed one is followed by another.
    for _ in range(50):
        for file in (there, back):
            file.unlink(missing_ok=True)
        with subprocess.Popen(
            [sys.executable, "-c", SURVIVES if kill is signal.SIGINT else CONVERTS, source, there, back],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(rng.random() * 0.15)
            child.send_signal(kill)
            child.wait(30)
        for file in (there, back):
            if file.exists():
                assert_equal(ts.load_file(file), expected)
    left = {file.name for file in tmp_path.iterdir()} - {source.name, there.name, back.name}
    assert left <= {"a.ts.partial", "b.safetensors.partial"}
    ts.convert(source, there)
    ts.convert(there, back)
    assert back.read_bytes() == source.read_bytes()
    assert not list(tmp_path.glob("*.partial")), "what a killed process left is taken over"


SURVIVES = CONVERTS.replace(
    "while True:", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nwhile True:"
)


@pytest.mark.slow
def test_interrupted_loads_and_saves_free_everything(tmp_path: Path) -> None:
    path = tmp_path / "a.ts"
    tensors = {f"t{i}": torch.randn(1 << 18) for i in range(16)}
    ts.save_file(tensors, path)
    rng = random.Random(1)
    descriptors = len(os.listdir("/proc/self/fd"))
    interrupted = 0
    for round_ in range(50):
        old = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-4 + rng.random() * 0.02)
            while True:
                ts.load_file(path)
                ts.save_file(tensors, tmp_path / "b.ts")
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        left = {file.name for file in tmp_path.iterdir()}
        assert left <= {"a.ts", "b.ts"}, f"round {round_}: {left}"
        if "b.ts" in left:
            assert_equal(ts.load_file(tmp_path / "b.ts"), tensors)
    assert interrupted == 50
    assert len(os.listdir("/proc/self/fd")) == descriptors


# --- the command line ---


def command(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "tensorstream"
    return subprocess.run([program, *map(str, args)], capture_output=True, text=True, check=False, **options)


def test_the_command_line_does_what_the_functions_do(minilm: Path, tmp_path: Path) -> None:
    done = command("convert", minilm, tmp_path / "m.ts", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["tensors"] == 104
    info = json.loads(command("info", tmp_path / "m.ts", "--json").stdout)
    assert info["files"][0]["metadata"] == {"format": "pt"}
    assert info["bytes"] == sum(t.nbytes for t in ts.load_file(minilm).values())
    assert "embeddings.word_embeddings.weight" in command("info", minilm).stdout
    assert command("verify", tmp_path / "m.ts").stdout.endswith("0 chunks damaged\n")
    assert "no checksums" in command("verify", minilm).stdout
    plan = ts.plan(minilm, budget="60MiB")
    assert command("plan", minilm, "--budget", "60MiB").stdout == f"{plan}\n"
    as_json = json.loads(command("plan", minilm, "--budget", "60MiB", "--json").stdout)
    assert as_json["smallest_budget_bytes"] == plan.smallest_budget_bytes
    demo = json.loads(command("demo", minilm, "--budget", "60MiB", "--passes", "2", "--json").stdout)
    assert demo["reserved_high_water_bytes"] <= demo["budget_bytes"] == 60 << 20
    assert demo["read_bytes"] >= info["bytes"]


def test_the_exit_status_says_how_it_went(tmp_path: Path) -> None:
    path = tmp_path / "a.ts"
    ts.save_file({"w": torch.zeros(4096)}, path)
    content = bytearray(path.read_bytes())
    content[8192] ^= 1
    path.write_bytes(content)
    damaged = command("verify", path)
    assert damaged.returncode == 1
    assert "tensor `w`: 16384 bytes at byte 8192 do not have their checksum" in damaged.stdout
    assert len(json.loads(command("verify", path, "--json").stdout)["damaged"]) == 1
    missing = command("info", tmp_path / "gone")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith("tensorstream: ") and "gone" in missing.stderr
    assert command("plan", path, "--budget", "1KiB").returncode == 1
    assert command("plan", path, "--budget", "lots").returncode == 2
    assert command("frobnicate").returncode == 2
    assert command("--version").stdout == f"tensorstream {ts.__version__}\n"
    assert "convert" in command("--help").stdout


def test_bars_are_shown_on_terminals_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.ts"
    ts.save_file({"w": torch.zeros(16 << 20)}, path)
    assert command("verify", path).stderr == ""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        [Path(sys.executable).parent / "tensorstream", "convert", path, tmp_path / "b.ts"],
        stdout=subprocess.DEVNULL,
        stderr=child,
        env=environment,
    ) as running:
        os.close(child)
        shown = b""
        while True:
            try:
                shown += os.read(parent, 65536)
            except OSError:
                break
        running.wait(30)
    os.close(parent)
    assert b"converting" in shown


@pytest.mark.slow
def test_an_interrupted_command_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.ts"
    ts.save_file({f"l{i}.w": torch.zeros(16 << 20) for i in range(4)}, path)
    program = Path(sys.executable).parent / "tensorstream"
    with subprocess.Popen(
        [program, "demo", path, "--passes", "100000"], stderr=subprocess.PIPE, text=True
    ) as running:
        time.sleep(1.0)
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=30)
    assert running.returncode == 130
    assert error.startswith("tensorstream: interrupted")


def test_a_streamed_model_is_saved_a_tensor_at_a_time(llama: Llama, tmp_path: Path) -> None:
    path = llama()
    model = ts.from_pretrained(path, budget="300KiB")
    with pytest.raises(ts.ModelError, match=r"restore\(model\) first, or .* tensorstream\.save_file"):
        model.save_pretrained(tmp_path / "no")
    ts.save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    assert_equal(ts.load_file(tmp_path), ts.load_file(path))
    assert ts.stats(model)["reserved_high_water_bytes"] <= 300 << 10
    ts.restore(model).save_pretrained(tmp_path / "yes")
    assert_equal(ts.load_file(tmp_path / "yes"), ts.load_file(path))


@pytest.mark.parametrize("suffix", ["safetensors", "ts", "packed.ts"])
def test_parts_of_tensors_are_those_of_torch(tmp_path: Path, suffix: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "cube": torch.randn(5, 6, 7, generator=generator),
        "long": torch.randn(700_001, generator=generator).bfloat16(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
    }
    path = tmp_path / f"w.{suffix}"
    ts.save_file(tensors, path, {"a": "b"}, codec="auto" if suffix == "packed.ts" else "raw")
    with ts.safe_open(path) as file:
        assert (file.keys(), sorted(file.offset_keys())) == (sorted(tensors), sorted(tensors))
        assert file.metadata() == {"a": "b"}
        assert_equal({name: file.get_tensor(name) for name in tensors}, tensors)
        assert (file.get_slice("cube").get_shape(), file.get_slice("cube").get_dtype()) == ([5, 6, 7], "F32")
        indices: list[Any] = [
            ..., 0, -1, slice(1, 3), slice(None, None, 2), slice(4, 2), None, [3, 0, 3], (slice(None), 2),
            (..., slice(2, 5)), (1, ..., slice(None, 3)), (slice(1, 4), slice(2, 3), slice(0, 7, 3)),
            (None, 0, None, slice(2)), (slice(None), [1, 4]), torch.tensor([0, 4]), (0, 1, 2), (..., None),
            torch.tensor([True, False, True, False, False]), [],
        ]  # fmt: skip
        for index in indices:
            part = file.get_slice("cube")[index]
            assert torch.equal(part, tensors["cube"][index]), index
        for index in (slice(524_280, 524_300), slice(699_000, None), slice(0, 700_001, 100_000), 600_000):
            assert torch.equal(file.get_slice("long")[index], tensors["long"][index]), index
        for wrong in (5, (0, 0, 0, 0), -6, [0, 5], slice(None, None, -1)):
            with pytest.raises(IndexError):
                file.get_slice("cube")[wrong]
        with pytest.raises(ts.MissingTensorError):
            file.get_tensor("nothing")
    with ts.safe_open(path, framework="np") as file:
        assert (file.get_tensor("cube") == tensors["cube"].numpy()).all()
        with pytest.raises(ts.ModelError, match="numpy"):
            file.get_tensor("long")
    with pytest.raises(ts.ConfigurationError, match="framework"):
        ts.safe_open(path, framework="tf")
