# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loads, saves and converts files, and compares them with the safetensors library."""

from __future__ import annotations

import functools
import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import tensorstream as ts
import tensorstream.numpy
import torch
from conftest import Llama
from tensorstream._dtypes import SAFETENSORS_DTYPES
from tensorstream.config import Codec

FORMATS = ["ts", "safetensors"]


#: The dtypes that safetensors lacks.
ONLY_IN_TS = (torch.complex32, torch.complex128)


def every_dtype(suffix: str = "ts") -> dict[str, torch.Tensor]:
    """Returns tensors of every dtype and several shapes with random bits, including NaNs."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for dtype, stored in SAFETENSORS_DTYPES.items():
        if suffix == "safetensors" and dtype in ONLY_IN_TS:
            continue
        size = torch.empty((), dtype=dtype).element_size()
        for shape in [(), (1,), (0, 3), (3, 5), (2, 1, 7)]:
            if stored == "F4" and not shape:
                continue  # half of a byte
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
def test_saved_tensors_load_bit_for_bit(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"all.{suffix}"
    metadata = {"format": "pt", "ключ": 'значение\n"quoted"'}
    tensors = every_dtype(suffix)
    ts.save_file(tensors, path, metadata)
    assert_equal(ts.load_file(path), tensors)
    for mapped in (True, "auto"):
        assert_equal(ts.load_file(path, mapped=mapped), tensors)
    assert_equal(ts.load(path.read_bytes()), tensors)
    assert_equal(ts.safe_open(path).get_tensors(), {**tensors})
    targets = {name: torch.zeros_like(each.view(torch.uint8)).view(each.dtype) if each.dim() else
               torch.empty_like(each) for name, each in tensors.items()}  # fmt: skip
    ts.load_into(targets, path)
    assert_equal(targets, tensors)
    assert ts._native.Checkpoint(path).files()[0][2] == metadata
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", FORMATS)
def test_metadata_is_text_or_json(tmp_path: Path, suffix: str) -> None:
    path, tensors = tmp_path / f"all.{suffix}", {"a": torch.zeros(2)}
    given = {"epoch": 3, "text": "3", "shape": [1, None], "é": {"ratio": 0.5, "on": True}}
    ts.save_file(tensors, path, given)
    kept = ts.safe_open(path).metadata()
    assert kept is not None and kept["text"] == kept["epoch"] == "3"
    assert {key: json.loads(kept[key]) for key in given if key != "text"} == {
        key: value for key, value in given.items() if key != "text"
    }
    before = path.read_bytes()
    assert ts.save(tensors, given, format=suffix) == before
    for wrong in ({"a": object()}, {"a": float("nan")}, {1: "a"}, {"a": torch.zeros(1)}):
        with pytest.raises(ts.ConfigurationError, match="cannot write metadata"):
            ts.save_file(tensors, path, wrong)  # type: ignore[arg-type]
    assert path.read_bytes() == before


@pytest.mark.parametrize("codec", ["auto", "split", "zstd", "lz4", "zlib"])
def test_compressed_tensors_load_bit_for_bit(minilm: Path, tmp_path: Path, codec: Codec) -> None:
    path = tmp_path / "all.ts"
    ts.save_file(every_dtype(), path, codec=codec)
    assert_equal(ts.load_file(path), every_dtype())
    container, back = tmp_path / "m.ts", tmp_path / "m.safetensors"
    ts.convert(minilm, container, codec=codec, jobs=2)
    assert_equal(ts.load_file(container), safetensors.torch.load_file(minilm / "model.safetensors"))
    ts.convert(container, back)
    assert back.read_bytes() == (minilm / "model.safetensors").read_bytes()
    smaller = codec in ("auto", "split", "zlib", "zstd")
    assert (container.stat().st_size < 0.95 * back.stat().st_size) == smaller, (
        container.stat().st_size
    )


def test_invalid_compression_is_an_error(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(3)}
    with pytest.raises(ts.ConfigurationError, match="cannot be compressed"):
        ts.save_file(tensors, tmp_path / "w.safetensors", codec="auto")
    with pytest.raises(ts.ConfigurationError, match="-7 to 22"):
        ts.save_file(tensors, tmp_path / "w.ts", codec="zstd", compression_level=23)
    with pytest.raises(ts.ConfigurationError, match="unknown codec"):
        # The codec is invalid on purpose.
        ts.save_file(tensors, tmp_path / "w.ts", codec="brotli")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_dtypes_that_safetensors_lacks_are_refused_there(tmp_path: Path) -> None:
    for dtype in ONLY_IN_TS:
        tensors = {"z": torch.ones(3).to(dtype)}
        with pytest.raises(ts.ConfigurationError, match=r"write a \.ts file"):
            ts.save_file(tensors, tmp_path / "a.safetensors")
        ts.save_file(tensors, tmp_path / "a.ts")
        with pytest.raises(ts.ConfigurationError, match=r"write a \.ts file"):
            ts.convert(tmp_path / "a.ts", tmp_path / "b.safetensors")
        assert [each.name for each in tmp_path.iterdir()] == ["a.ts"]
    header = b'{"z":{"dtype":"C128","shape":[1],"data_offsets":[0,16]}}'
    with pytest.raises(ts.CheckpointError, match="unknown dtype `C128`"):
        ts.load(len(header).to_bytes(8, "little") + header + bytes(16))


def test_tensors_of_every_dtype_are_exchanged() -> None:
    for name, tensor in every_dtype().items():
        if tensor.dtype is not torch.complex32:  # which torch does not export
            assert_equal({name: ts.Tensor.from_dlpack(tensor).to_torch()}, {name: tensor})


def test_parts_of_packed_tensors_are_read(tmp_path: Path) -> None:
    dtype = torch.float4_e2m1fn_x2
    whole = torch.arange(4 * 6 * 8, dtype=torch.uint8).view(4, 6, 8)
    for suffix in FORMATS:
        path = tmp_path / f"a.{suffix}"
        ts.save_file({"a": whole.view(dtype)}, path)
        assert_equal(safetensors.torch.load_file(path) if suffix == "safetensors" else
                     ts.load_file(path), {"a": whole.view(dtype)})  # fmt: skip
        for mapped in (False, True):
            part = ts.safe_open(path, mapped=mapped).get_slice("a")
            assert (part.get_shape(), part.get_dtype()) == ([4, 6, 16], "F4")
            for index in (1, (slice(1, 3), 2), (..., slice(2, 5)), (0, slice(1, 5, 2), 3)):
                assert torch.equal(part[index].view(torch.uint8), whole[index])
    header = b'{"z":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}}'
    with pytest.raises(ts.ModelError, match="last size must be even"):
        ts.load(len(header).to_bytes(8, "little") + header + bytes(3))


def test_packed_and_complex_weights_stream(tmp_path: Path) -> None:
    class Packed(torch.nn.Module):
        def __init__(self, value: torch.Tensor) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(value, requires_grad=False)

        def forward(self) -> torch.Tensor:
            return self.weight.detach().view(torch.uint8).clone()

    for dtype in (torch.float4_e2m1fn_x2, torch.complex128, torch.complex32, torch.float8_e8m0fnu):
        raw = [torch.full((128, 128), float(i), dtype=torch.uint8) for i in range(6)]
        model = torch.nn.ModuleList(Packed(each.view(dtype)) for each in raw)
        config = ts.Config(storage_path=tmp_path, budget="60KiB")
        streamed = ts.offload(model, config)
        for _ in range(3):
            for part, expected in zip(streamed, raw, strict=True):
                assert torch.equal(part(), expected)
        restored = ts.restore(streamed)
        assert torch.equal(restored[3].weight.detach().view(torch.uint8), raw[3])


@pytest.mark.parametrize("codec", ["raw", "zstd", "auto"])
def test_metadata_keeps_its_order_on_the_way_back(tmp_path: Path, codec: Codec) -> None:
    path, there, back = (tmp_path / n for n in ("a.safetensors", "a.ts", "b.safetensors"))
    tensors = {"w": torch.arange(4.0)}
    orders = [None, {}, {"a": ""}, {"b": "1", "a": "2", "c": "3"}, {"": "x", "tensorstream": "y"}]
    orders += [{f"key{i * 7 % 40}": str(i) for i in range(40)}]
    for metadata in orders:
        safetensors.torch.save_file(tensors, path, metadata)
        ts.convert(path, there, codec=codec)
        assert ts.safe_open(there).metadata() == metadata
        ts.convert(there, back)
        assert back.read_bytes() == path.read_bytes()
        ts.append_file({"more": torch.ones(1)}, there, {"last": "z"})
        assert list(ts.safe_open(there).metadata() or ()) == [
            *(ts.safe_open(path).metadata() or ()), "last"
        ]  # fmt: skip
        ts.append_file({}, there, remove=["more"])
        ts.compact(there)
        ts.convert(there, back)
        assert list(ts.safe_open(back).metadata() or ())[-1] == "last"


def test_safetensors_files_match_those_of_the_library(tmp_path: Path) -> None:
    tensors = every_dtype("safetensors")
    tensors = {k: v for k, v in tensors.items() if "fnuz" not in k and "e8m0" not in k}
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    ts.save_file(tensors, ours, {"format": "pt"})
    safetensors.torch.save_file(tensors, theirs, {"format": "pt"})
    assert ours.read_bytes() == theirs.read_bytes()
    assert_equal(safetensors.torch.load_file(ours), tensors)
    assert_equal(ts.load_file(theirs), tensors)


def test_a_round_trip_conversion_returns_the_same_file(minilm: Path, tmp_path: Path) -> None:
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
def test_shared_and_strided_tensors_are_saved_contiguous(tmp_path: Path, suffix: str) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    views = {
        "rows": base[1:3],
        "columns": base[:, ::2],
        "turned": base.t(),
        "again": base,
        "negative": base.conj(),
    }
    ts.save_file(views, tmp_path / f"v.{suffix}")
    assert_equal(
        ts.load_file(tmp_path / f"v.{suffix}"), {k: v.contiguous() for k, v in views.items()}
    )


def test_failed_saves_and_conversions_raise_typed_errors(tmp_path: Path) -> None:
    good = {"w": torch.zeros(3)}
    (tmp_path / "there.ts").write_text("before")
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: ts.save_file(good, tmp_path / "a.bin"), ts.ConfigurationError,
            r"a\.bin: unknown file suffix"),
        (lambda: ts.save_file(good, tmp_path / "no" / "a.ts"), ts.StorageError, r"a\.ts.*cannot "
            r"write: No such file"),
        (lambda: ts.save_file({"": good["w"]}, tmp_path / "there.ts"), ts.ConfigurationError,
            'invalid tensor name ""'),
        # The next value is invalid on purpose.
        (lambda: ts.save_file({"w": 3}, tmp_path / "a.ts"), ts.ConfigurationError,
            "cannot write 'w': expected .* got str and int"),  # type: ignore[dict-item]
        (lambda: ts.save_file(good, tmp_path / "a.ts", {"k": {1, 2}}), ts.ConfigurationError,
            "cannot write metadata 'k': .*type set is not JSON serializable"),
        (lambda: ts.save_file({"w": torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)},
                              tmp_path / "a.ts"),
         ts.ConfigurationError, "files do not support torch.qint8"),
        (lambda: ts.load_file(3), ts.ArgumentTypeError, "got int"),  # type: ignore[arg-type]
        (lambda: ts.save_file({}, None), TypeError, "got NoneType"),  # type: ignore[arg-type]
        (lambda: ts.compact(3.5), TypeError, "got float"),  # type: ignore[arg-type]
        (lambda: ts.plan(7), TypeError, "got int"),  # type: ignore[arg-type]
        (lambda: ts.save_file({"w": torch.zeros([1] * 64).unsqueeze(0)}, tmp_path / "a.ts"),
         ts.ConfigurationError, "rank 65"),
        (lambda: ts.convert(tmp_path / "gone", tmp_path / "a.ts"), ts.CheckpointNotFoundError,
            "gone"),
        (lambda: ts.convert(tmp_path / "there.ts", tmp_path / "a.ts"), ts.CheckpointError,
            r"there\.ts"),
        (lambda: ts.load_file(tmp_path / "gone"), FileNotFoundError, "gone"),
    ]  # fmt: skip
    for call, error, text in cases:
        with pytest.raises(error, match=text) as caught:
            call()
        assert isinstance(caught.value, ts.TensorStreamError)
    assert [file.name for file in tmp_path.iterdir()] == ["there.ts"]
    assert (tmp_path / "there.ts").read_text() == "before"


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_full_disk_leaves_the_old_file(
    programs: preloaded.Server, tmp_path: Path, suffix: str
) -> None:
    """Limits the size of files. Like a full disk, this causes a short write and then an error."""
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
    done = programs.run_code(code, path)
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
        with pytest.raises(
            ts.ChecksumError, match=r"a\.ts: tensor `large`: 1048576 bytes at byte \d+"
        ):
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
def test_fifty_interrupted_conversions_leave_no_partial_file(
    tmp_path: Path, kill: signal.Signals, share: Callable[[int], int]
) -> None:
    source = tmp_path / "source.safetensors"
    ts.save_file({f"t{i}": torch.randn(300_000 + i) for i in range(40)}, source)
    expected = ts.load_file(source)
    there, back = tmp_path / "a.ts", tmp_path / "b.safetensors"
    rng = random.Random(0)
    # Each process converts in a loop until the signal ends it.
    for _ in range(share(50)):
        for file in (there, back):
            file.unlink(missing_ok=True)
        with subprocess.Popen(
            [
                sys.executable,
                "-c",
                SURVIVES if kill is signal.SIGINT else CONVERTS,
                source,
                there,
                back,
            ],
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
    assert not list(tmp_path.glob("*.partial")), "the next process reuses the file of a killed one"


SURVIVES = CONVERTS.replace(
    "while True:",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nwhile True:",
)


@pytest.mark.slow
@pytest.mark.usefixtures("no_collector_callbacks")
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
    return subprocess.run(
        [program, *map(str, args)], capture_output=True, text=True, check=False, **options
    )


def test_the_command_line_matches_the_functions(minilm: Path, tmp_path: Path) -> None:
    done = command("convert", minilm, tmp_path / "m.ts", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["tensors"] == 104
    info = json.loads(command("info", tmp_path / "m.ts", "--json").stdout)
    assert info["files"][0]["metadata"] == {"format": "pt"}
    assert info["bytes"] == sum(t.nbytes for t in ts.load_file(minilm).values())
    assert "embeddings.word_embeddings.weight" in command("info", minilm).stdout
    assert command("verify", tmp_path / "m.ts").stdout.endswith("0 chunks damaged\n")
    assert "no checksums" in command("verify", minilm).stdout
    # The command does not know the model, and neither does the function for a single file.
    plan = ts.plan(tmp_path / "m.ts", budget="60MiB")
    assert command("plan", tmp_path / "m.ts", "--budget", "60MiB").stdout == f"{plan}\n"
    as_json = json.loads(command("plan", tmp_path / "m.ts", "--budget", "60MiB", "--json").stdout)
    assert as_json["smallest_budget_bytes"] == plan.smallest_budget_bytes
    less = plan.smallest_budget_bytes - 1
    with pytest.raises(ts.BudgetError) as refused:
        ts.plan(tmp_path / "m.ts", budget=less)
    assert str(refused.value) in command("plan", tmp_path / "m.ts", "--budget", str(less)).stderr
    demo = json.loads(
        command("demo", minilm, "--budget", "60MiB", "--passes", "2", "--json").stdout
    )
    assert demo["reserved_high_water_bytes"] <= demo["budget_bytes"] == 60 << 20
    assert demo["read_bytes"] >= info["bytes"]


def test_the_exit_status_reports_the_outcome(tmp_path: Path) -> None:
    path = tmp_path / "a.ts"
    ts.save_file({"w": torch.zeros(4096)}, path)
    content = bytearray(path.read_bytes())
    content[8192] ^= 1
    path.write_bytes(content)
    damaged = command("verify", path)
    assert damaged.returncode == 1
    assert "tensor `w`: 16384 bytes at byte 8192 do not match their checksum" in damaged.stdout
    assert len(json.loads(command("verify", path, "--json").stdout)["damaged"]) == 1
    missing = command("info", tmp_path / "gone")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.startswith("tensorstream: ") and "gone" in missing.stderr
    assert command("plan", path, "--budget", "1KiB").returncode == 1
    assert command("plan", path, "--budget", "lots").returncode == 2
    assert command("frobnicate").returncode == 2
    assert command("--version").stdout == f"tensorstream {ts.__version__}\n"
    assert "convert" in command("--help").stdout


TERMINAL = {"TERM": "xterm", "COLUMNS": "80"}


def started_command(program: list[str | Path], stderr: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **TERMINAL}
    return subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=stderr, env=environment)


def shown_on_terminal(
    start: Callable[[int], subprocess.Popen[bytes] | preloaded.Program],
) -> bytes:
    """Returns what a program writes to a terminal as standard error.

    Args:
        start: Starts the program, with this descriptor as its standard error.
    """
    parent, child = pty.openpty()
    with start(child) as running:
        os.close(child)
        shown = b""
        while True:
            try:
                shown += os.read(parent, 65536)
            except OSError:
                break
        running.wait(30)
    os.close(parent)
    assert running.returncode == 0, shown
    return shown


def test_progress_bars_are_shown_only_on_terminals(tmp_path: Path) -> None:
    path = tmp_path / "a.ts"
    ts.save_file({"w": torch.zeros(16 << 20)}, path)
    assert command("verify", path).stderr == ""
    program = Path(sys.executable).parent / "tensorstream"
    convert: list[str | Path] = [program, "convert", path, tmp_path / "b.ts"]
    assert b"converting" in shown_on_terminal(functools.partial(started_command, convert))


def test_a_long_first_pass_shows_its_progress(programs: preloaded.Server, tmp_path: Path) -> None:
    program = f"""
import time, torch, tensorstream as ts

class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.7)
        return super().forward(x)

layers = torch.nn.Sequential(*(Slow(512, 512) for _ in range(3)))
model = ts.offload(layers, ts.Config(storage_path={str(tmp_path)!r}, budget="2MiB"))
model(torch.randn(1, 512))
"""
    shown = shown_on_terminal(
        lambda stderr: programs.start_code(program, variables=os.environ | TERMINAL, stderr=stderr)
    )
    assert shown.count(b"first pass") >= 1
    assert b"3.0" in shown, "the total, in MiB"
    quiet = programs.run_code(program)
    assert quiet.returncode == 0 and "first pass" not in quiet.stderr


@pytest.mark.slow
def test_an_interrupted_command_reports_it(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("suffix", ["safetensors", "ts", "packed.ts"])
def test_slices_match_torch_indexing(tmp_path: Path, suffix: str) -> None:
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
        assert (file.get_slice("cube").get_shape(), file.get_slice("cube").get_dtype()) == (
            [5, 6, 7],
            "F32",
        )
        indices: list[Any] = [
            ..., 0, -1, slice(1, 3), slice(None, None, 2), slice(4, 2), None, [3, 0, 3],
            (slice(None), 2),
            (..., slice(2, 5)), (1, ..., slice(None, 3)), (slice(1, 4), slice(2, 3), slice(0, 7,
                3)),
            (None, 0, None, slice(2)), (slice(None), [1, 4]), torch.tensor([0, 4]), (0, 1, 2),
            (..., None),
            torch.tensor([True, False, True, False, False]), [],
        ]  # fmt: skip
        for index in indices:
            part = file.get_slice("cube")[index]
            assert torch.equal(part, tensors["cube"][index]), index
        for index in (
            slice(524_280, 524_300),
            slice(699_000, None),
            slice(0, 700_001, 100_000),
            600_000,
        ):
            assert torch.equal(file.get_slice("long")[index], tensors["long"][index]), index
        for wrong in (5, (0, 0, 0, 0), -6, [0, 5], slice(None, None, -1)):
            with pytest.raises(IndexError):
                file.get_slice("cube")[wrong]
        with pytest.raises(ts.MissingTensorError):
            file.get_tensor("nothing")
    with ts.safe_open(path, framework="np") as file:
        assert (file.get_tensor("cube") == tensors["cube"].numpy()).all()
        with pytest.raises(ts.ModelError, match="NumPy"):
            file.get_tensor("long")
    with pytest.raises(ts.ConfigurationError, match="framework"):
        ts.safe_open(path, framework="tf")


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "bf16": torch.randn(300, 70).to(torch.bfloat16),
        "f32": torch.randn(5, 6, 7),
        "i8": torch.randint(-9, 9, (1001,), dtype=torch.int8),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }


def assert_same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(tensors) == set(expected)
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


def test_files_in_memory_match_files_on_disk(tmp_path: Path) -> None:
    expected = some_tensors()
    data = ts.save(expected, {"k": "v"})
    assert data == safetensors.torch.save(expected, {"k": "v"})
    assert_same(safetensors.torch.load(data), expected)
    assert_same(ts.load(data), expected)
    codecs: tuple[Codec, ...] = ("raw", "auto", "zlib")
    for codec in codecs:
        ts.save_file(expected, tmp_path / "a.ts", codec=codec)
        data = ts.save(expected, format="ts", codec=codec)
        assert data == (tmp_path / "a.ts").read_bytes()
        loaded = ts.load(data)
        assert_same(loaded, expected)
        harmed = bytearray(data)
        harmed[8200] ^= 1
        with pytest.raises(ts.ChecksumError, match="bytes: tensor"):
            ts.load(bytes(harmed))
    with pytest.raises(ts.CheckpointError):
        ts.load(data[:-1])
    with pytest.raises(ts.ConfigurationError):
        # The format is invalid on purpose.
        ts.save(expected, format="tar")  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", FORMATS)
def test_mapped_tensors_never_change_the_file(tmp_path: Path, suffix: str) -> None:
    expected, path = some_tensors(), tmp_path / f"a.{suffix}"
    ts.save_file(expected, path)
    before = path.read_bytes()
    views = ts.load_file(path, mapped=True)
    assert_same(views, expected)
    views["f32"].zero_()
    assert path.read_bytes() == before
    with ts.safe_open(path, mapped=True) as opened:
        first, second = opened.get_tensor("bf16"), opened.get_tensor("bf16")
        assert first.data_ptr() == second.data_ptr()
        assert torch.equal(opened.get_slice("bf16")[3:5, -7:], expected["bf16"][3:5, -7:])
    del opened
    assert_same({"bf16": first}, {"bf16": expected["bf16"]})
    ts.save_file(expected, tmp_path / "b.ts", codec="split")
    assert_same(ts.load_file(tmp_path / "b.ts", mapped=True), expected)
    opened = ts.safe_open(path, mapped=True)
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ts.CheckpointChangedError):
        opened.get_tensor("f32")
    path.write_bytes(before)
    opened = ts.safe_open(path, mapped=True)
    (tmp_path / "other").write_bytes(path.read_bytes())  # the same size and names
    (tmp_path / "other").replace(path)
    assert torch.equal(opened.get_tensor("f32"), opened.get_slice("f32")[...])


@pytest.mark.parametrize("codec", ["raw", "auto"])
def test_load_into_fills_existing_tensors(tmp_path: Path, codec: Codec) -> None:
    expected = some_tensors()
    ts.save_file(expected, tmp_path / "a.ts", codec=codec)
    model = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in model.items()}
    ts.load_into(model, tmp_path / "a.ts")
    assert_same(model, expected)
    assert addresses == {name: tensor.data_ptr() for name, tensor in model.items()}
    whole = torch.zeros(600, 70, dtype=torch.bfloat16)
    ts.load_into({"bf16": whole[300:]}, tmp_path / "a.ts")
    assert torch.equal(whole[300:], expected["bf16"]) and not whole[:300].any()
    for wrong, error in (
        ({"none": torch.zeros(1)}, ts.MissingTensorError),
        ({"f32": torch.zeros(5, 6, 8)}, ts.ConfigurationError),
        ({"f32": torch.zeros(5, 6, 7, dtype=torch.float64)}, ts.ConfigurationError),
        ({"f32": torch.zeros(5, 6, 14)[:, :, ::2]}, ts.ConfigurationError),
        (
            {
                "bf16": (same := torch.zeros(300, 70, dtype=torch.bfloat16)),
                "f32": same.view(-1).view(torch.float32)[:210].view(5, 6, 7),
            },
            ts.ConfigurationError,
        ),
    ):
        with pytest.raises(error):
            ts.load_into(wrong, tmp_path / "a.ts")


def test_unaligned_tensors_are_copied(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}}'
    )
    values = np.array([1.5, -2.5], dtype="<f4")
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x07" + values.tobytes())
    for mapped in (False, True):
        assert ts.load_file(path, mapped=mapped)["b"].tolist() == [1.5, -2.5]
    assert ts.load(path.read_bytes())["b"].tolist() == [1.5, -2.5]


def test_tensors_load_onto_a_device(tmp_path: Path) -> None:
    """Uses the meta device in place of a GPU, so only shapes, dtypes and errors are compared."""
    big = {f"t{i}": torch.full((9 << 20,), i, dtype=torch.uint8) for i in range(40)}
    ts.save_file(big | some_tensors(), tmp_path / "a.ts", codec="auto")
    loaded = ts.load_file(tmp_path / "a.ts", device="meta")
    assert {name: (t.shape, t.dtype) for name, t in loaded.items()} == {
        name: (t.shape, t.dtype) for name, t in (big | some_tensors()).items()
    }
    assert all(tensor.device.type == "meta" for tensor in loaded.values())
    with pytest.raises(RuntimeError):
        ts.load_file(tmp_path / "a.ts", device="nonsense")


def test_numpy_files_match_those_of_the_library(tmp_path: Path) -> None:
    arrays = {
        "f4": np.linspace(0, 1, 700, dtype="f4").reshape(7, 100),
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "big": np.arange(9, dtype=">i4"),
        "empty": np.zeros((0, 2), dtype="u1"),
        "bool": np.array([True, False]),
    }
    arrays["f4"].setflags(write=False)
    for path in (tmp_path / "a.safetensors", tmp_path / "a.ts"):
        tensorstream.numpy.save_file(arrays, path, {"k": "v"})
        for mapped in (False, True, "auto"):
            loaded = tensorstream.numpy.load_file(path, mapped=mapped)
            assert all(np.array_equal(loaded[name], arrays[name]) for name in arrays)
    theirs = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert all(np.array_equal(theirs[name], arrays[name]) for name in arrays)
    data = tensorstream.numpy.save({"f4": arrays["f4"]})
    assert data == safetensors.numpy.save({"f4": arrays["f4"]})
    assert np.array_equal(tensorstream.numpy.load(data)["f4"], arrays["f4"])
    with pytest.raises(ts.ConfigurationError, match="'text'"):
        tensorstream.numpy.save({"text": np.array(["a"])})
    with pytest.raises(ts.ModelError, match="NumPy does not support"):
        tensorstream.numpy.load(ts.save(some_tensors()))


def test_append_and_compact_change_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ts"
    expected = some_tensors()
    ts.save_file(expected, path, {"k": "v", "step": "1"})
    whole = path.stat().st_size
    expected["bf16"] = torch.randn(9, 9).to(torch.bfloat16)
    expected["new"] = torch.arange(4)
    del expected["i8"]
    added = {name: expected[name] for name in ("bf16", "new")}
    ts.append_file(added, path, {"step": "2"}, remove=["i8"], codec="auto")
    assert path.stat().st_size > whole
    assert_same(ts.load_file(path), expected)
    assert ts.safe_open(path).metadata() == {"k": "v", "step": "2"}
    ts.compact(path)
    assert path.stat().st_size < whole
    assert_same(ts.load_file(path), expected)
    with pytest.raises(ts.MissingTensorError, match="i8"):
        ts.append_file({}, path, remove=["i8"])
    ts.save_file(expected, tmp_path / "a.safetensors")
    for act in (lambda p: ts.append_file({}, p), ts.compact):
        with pytest.raises(ts.ConfigurationError, match=r"not a single \.ts file"):
            act(tmp_path / "a.safetensors")
        with pytest.raises(ts.CheckpointNotFoundError):
            act(tmp_path / "none.ts")
        with pytest.raises(ts.TensorStreamError):
            act(tmp_path)


def test_masks_must_match_their_dimension(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    ts.save_file({"a": tensor}, tmp_path / "a.ts")
    part = ts.safe_open(tmp_path / "a.ts").get_slice("a")
    mask = torch.tensor([True, False, True])
    assert torch.equal(part[mask], tensor[mask])
    for wrong in (
        torch.ones(4, dtype=torch.bool),
        torch.ones(3, 4, dtype=torch.bool),
        [[0, 1]],
        True,
    ):
        with pytest.raises(IndexError):
            # The masks are invalid on purpose.
            part[wrong]  # type: ignore[index]


def test_a_conversion_never_replaces_its_source(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((1000,), float(i)) for i in range(6)}
    ts.save_file(tensors, tmp_path / "a.ts")
    ts.convert(tmp_path / "a.ts", tmp_path / "m.safetensors.index.json", max_shard_size=12000)
    (tmp_path / "m.safetensors.index.json").rename(tmp_path / "old.json")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 4
    with pytest.raises(ts.StorageError, match="also the source of the conversion"):
        ts.convert(
            tmp_path / "old.json", tmp_path / "m.safetensors.index.json", max_shard_size=14000
        )
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_lenient_reads_files_that_only_the_library_accepts(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header = b'{"":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":[]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x07")
    assert safetensors.torch.load_file(path)[""].tolist() == [7]
    with pytest.raises(ts.CheckpointError):
        ts.load_file(path)
    assert ts.load_file(path, lenient=True)[""].tolist() == [7]
    assert ts.safe_open(path, lenient=True).get_tensor("").tolist() == [7]


def test_transformers_reads_converted_shards(llama: Llama, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    checkpoint = llama()
    ts.convert(checkpoint, tmp_path / "m.ts")
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    ts.convert(tmp_path / "m.ts", sharded / "model.safetensors.index.json", max_shard_size="200KiB")
    assert len(list(sharded.glob("model-*-of-*.safetensors"))) > 1
    (sharded / "config.json").write_bytes((Path(checkpoint) / "config.json").read_bytes())
    theirs = LlamaForCausalLM.from_pretrained(sharded).state_dict()
    ours = LlamaForCausalLM.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert command("diff", tmp_path / "m.ts", sharded).stdout.startswith("0 tensors differ")
    ts.append_file({"more": torch.ones(3)}, tmp_path / "m.ts")
    differing = command("diff", tmp_path / "m.ts", sharded)
    assert (differing.returncode, differing.stdout.splitlines()[0]) == (
        1,
        "more: only in the first",
    )
    assert json.loads(command("diff", tmp_path / "m.ts", sharded, "--json").stdout)["tensors"] == {
        "more": "only in the first"
    }
    assert "now" in command("compact", tmp_path / "m.ts").stdout
