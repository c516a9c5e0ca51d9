# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests ``Config``: valid settings, presets, and the errors for invalid settings."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import time
from pathlib import Path
from typing import Any

import preloaded
import pytest
import tensorstream as ts
import torch
from safetensors.torch import save_file
from tensorstream.config import _warned
from torch import nn


@pytest.mark.critical
@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("budget", 0, "a positive integer of bytes (below 2**63), a size such as '600MiB'"),
        ("budget", -5, "a positive integer"),
        ("budget", "lots", "a positive integer"),
        ("budget", 1.5, "a positive integer"),
        ("budget", "half%", "a share of the available memory such as '50%'"),
        ("budget", "0%", "a share above 0%"),
        ("budget", "101%", "a share above 0% and up to 100%"),
        ("budget", "nan%", "a share above 0%"),
        ("budget", True, "a positive integer"),
        ("storage_path", 7, "a path"),
        ("max_passes", 0, "an integer from 1 to 64"),
        ("max_passes", "2", "an integer from 1 to 64"),
        ("num_io_threads", 257, "an integer from 1 to 256"),
        ("io_depth", 0, "an integer from 1 to 256"),
        ("backend", "nvme", "one of auto, mmap, cuda, gpudirect, adaptive, "),
        ("backend", None, "one of auto"),
        ("vram_budget_gb", 0, "a positive number of GB"),
        ("vram_budget_gb", "8", "a positive number of GB"),
        ("prefetch_strategy", "eager", "one of none, next_layer, adaptive, aggressive"),
        ("memory_mode", 3, "one of aggressive, balanced, conservative"),
        ("verify_checksums", 1, "True, False or"),
        ("compression", True, '"auto" or "off"'),
        ("compression_enabled", "yes", "True or False"),
        ("compression_level", 23, "an integer from 1 to 22"),
        ("compression_level", 3, "None unless compression_enabled is True"),
        ("compression_codec", "brotli", "one of auto, split, zstd, zlib, lz4"),
        ("compression_codec", "lz4", "None unless compression_enabled is True"),
    ],
)
def test_invalid_field_error_names_value_and_range(field: str, value: object, wanted: str) -> None:
    with pytest.raises(ts.ConfigurationError) as caught:
        # The value is invalid on purpose.
        ts.Config(**{field: value})  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    assert f"invalid Config.{field}: {value!r}" in str(caught.value)
    assert wanted in str(caught.value)


@pytest.fixture
def linear(tmp_path: Path) -> tuple[nn.Linear, Path]:
    model = nn.Linear(64, 32)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return model, tmp_path


def on_meta(model: nn.Linear) -> nn.Linear:
    return nn.Linear(model.in_features, model.out_features, device="meta")


def test_storage_path_alone_suffices_and_the_budget_is_logged(
    linear: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reference, path = linear
    with caplog.at_level("INFO", "tensorstream"):
        model = ts.offload(on_meta(reference), ts.Config(storage_path=path))
    assert "budget" in caplog.text
    x = torch.randn(3, 64)
    assert torch.equal(model(x), reference(x))


@pytest.mark.parametrize("backend", ["auto", "adaptive", "uring", "direct", "buffered", "mmap"])
def test_every_backend_reads_the_same_weights(linear: Any, backend: str) -> None:
    reference, path = linear
    config = ts.Config(budget="1MiB", backend=backend, io_depth=2)
    try:
        model = ts.offload(on_meta(reference), config, checkpoint=path)
    except ts.ConfigurationError as error:
        assert "not available" in str(error)
        pytest.skip(f"the file system of the tests does not support direct I/O: {error}")
    x = torch.randn(3, 64)
    assert torch.equal(model(x), reference(x))
    stats = ts.stats(model)
    assert stats["io_depth"] == 2 or stats["backend"] in ("adaptive", "mmap")
    by_path = stats["read_bytes_by_path"]
    path = {"uring": "direct", "mmap": "mapped"}.get(backend, backend)
    if path in by_path:
        assert by_path[path] > 0


@pytest.mark.parametrize("compression", ["auto", "off"])
@pytest.mark.parametrize(
    "dtype",
    # PyTorch multiplies matrices of float16 slowly.
    [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long), torch.float32],
)
def test_compression_in_memory_keeps_results(
    tmp_path: Path, compression: str, dtype: torch.dtype
) -> None:
    def layers(device: str) -> nn.Sequential:
        linear = [nn.Linear(2048, 2048, device=device, dtype=dtype) for _ in range(16)]
        return nn.Sequential(*linear)

    reference = layers("cpu")
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    x = torch.randn(1, 2048).to(dtype)
    weights = sum(weight.nbytes for weight in reference.parameters())
    config = ts.Config(budget=weights * 3 // 4, storage_path=tmp_path, compression=compression)
    model = ts.offload(layers("meta"), config)

    def gradient(model: nn.Module) -> torch.Tensor:
        inputs = x.clone().requires_grad_()
        model(inputs).sum().backward()
        assert inputs.grad is not None
        return inputs.grad

    for context in (
        contextlib.nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ):
        for _ in range(2):
            with context():
                assert torch.equal(model(x), reference(x))
        assert torch.equal(gradient(model), gradient(reference))
    stats = ts.stats(model)
    assert stats["read_bytes"] > 1.5 * weights, "it streams"
    # At least samples are encoded, which show whether more would pay.
    assert (stats["encoded_bytes"] > 0) == (compression == "auto")
    assert stats["reserved_high_water_bytes"] <= stats["budget_bytes"]


@pytest.mark.parametrize("backend", ["CUDA", "GPUDIRECT"])
@pytest.mark.skipif(ts.GpuStatus.detect().is_available, reason="there is a GPU")
def test_backends_for_gpus_warn_without_one(linear: Any, backend: str) -> None:
    reference, path = linear
    _warned.clear()
    with pytest.warns(
        ts.NotBuiltWarning,
        match=rf"BackendType\.{backend}: there is no GPU .* on the CPU",
    ) as caught:
        for _ in range(2):
            config = ts.Config(budget="1MiB", backend=ts.BackendType[backend])
    assert len(caught) == 1, "warns once"
    model = ts.offload(on_meta(reference), config, checkpoint=path)
    x = torch.randn(3, 64)
    assert torch.equal(model(x), reference(x))
    stats = ts.stats(model)
    assert stats["backend"] == ts.backends()[0]
    assert [name for name, _ in stats["passed_over"]] == [backend.lower()]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="the NVIDIA driver is loaded")
def test_gds_without_a_driver_is_refused(linear: Any, programs: preloaded.Server) -> None:
    # Without a driver, cuFileDriverOpen of the package nvidia-cufile never returns. TensorStream
    # finds the library if the process has loaded it.
    library = next((Path(torch.__file__).parents[1] / "nvidia").glob("*/lib/libcufile.so.0"), None)
    if library is None:
        pytest.skip("nvidia-cufile is not installed")
    code = """if True:
        import ctypes, sys
        import tensorstream as ts, torch
        ctypes.CDLL(sys.argv[1])
        try:
            config = ts.Config(budget="1MiB", backend="gds")
            ts.offload(torch.nn.Linear(64, 32, device="meta"), config, checkpoint=sys.argv[2])
        except ts.ConfigurationError as error:
            print(error)
    """
    refused = programs.run_code(code, library, linear[1])
    assert "NVIDIA's driver, which is not loaded" in refused.stdout


@pytest.mark.parametrize("level", [None, 9])
def test_weights_are_stored_and_streamed_compressed(tmp_path: Path, level: int | None) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(512, 512, dtype=torch.bfloat16) for _ in range(12))
    )
    x = torch.randn(2, 512, dtype=torch.bfloat16)
    expected = model(x)
    config = ts.Config(
        budget="4MiB",
        storage_path=tmp_path,
        compression_enabled=True,
        compression_level=level,
        verify_checksums="once",
    )
    streamed = ts.offload(model, config)
    for _ in range(3):
        assert torch.equal(streamed(x), expected)
    (file,) = tmp_path.glob("*.ts")
    assert file.stat().st_size < 0.8 * sum(p.nbytes for p in model.parameters())
    assert f"-{'auto' if level is None else 'zstd9'}.ts" in file.name


def test_verify_checksums_sets_the_verification_mode() -> None:
    modes: dict[bool | str, str] = {True: "every_read", "once": "once", False: "never"}
    for verify_checksums, wanted in modes.items():
        assert ts.Config(verify_checksums=verify_checksums).settings()["verify"] == wanted


def test_num_io_threads_are_threads(linear: Any) -> None:
    def threads() -> list[str]:
        names = (Path(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task"))
        return [name.read_text().strip() for name in names]

    reference, path = linear
    config = ts.Config(storage_path=path, backend="buffered", io_depth=7, num_io_threads=3)
    before = threads()
    model = ts.offload(on_meta(reference), config)
    x = torch.randn(3, 64)
    assert torch.equal(model(x), reference(x))
    readers = re.compile(r"ts-io-\d+")

    def more() -> int:
        return sum(bool(readers.fullmatch(name)) for name in threads()) - already

    already = sum(bool(readers.fullmatch(name)) for name in before)
    end = time.monotonic() + 10
    while more() != 3 and time.monotonic() < end:
        time.sleep(0.01)  # a thread names itself after its start
    assert more() == 3
    assert ts.stats(model)["workers"] == 3
    assert ts.Config(io_depth=3).settings()["threads"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_codec_and_its_level_change_the_bytes(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2))).to(dtype)
    x = torch.randn(3, 256, dtype=dtype)
    wanted = reference(x)
    sizes = {}
    for codec, level in [
        (None, None),
        ("auto", None),
        ("split", None),
        ("lz4", None),
        ("zstd", None),
        (None, 1),
        (None, 22),
        ("zlib", 1),
        ("zlib", 9),
    ]:
        directory = tmp_path / f"{codec}-{level}"
        config = ts.Config(
            storage_path=directory,
            budget="4MiB",
            compression_enabled=True,
            compression_codec=codec,
            compression_level=level,
        )
        model = ts.offload(copy.deepcopy(reference), config)
        assert torch.equal(model(x), wanted)
        sizes[codec, level] = sum(file.stat().st_size for file in directory.iterdir())
    assert sizes[None, None] == sizes["auto", None] == sizes["split", None] < sizes["lz4", None]
    assert sizes[None, 1] != sizes[None, 22]
    assert sizes["zlib", 1] != sizes["zlib", 9]
    assert len(set(sizes.values())) >= 6


def test_a_level_that_cannot_act_is_refused() -> None:
    for codec, level, words in [
        ("lz4", 3, "compression_codec 'lz4' has no level"),
        ("split", 3, "compression_codec 'split' has no level"),
        ("auto", 3, "compression_codec 'auto' chooses a codec"),
        ("zlib", 10, "an integer from 1 to 9"),
    ]:
        with pytest.raises(ts.ConfigurationError, match=words):
            ts.Config(compression_enabled=True, compression_codec=codec, compression_level=level)


def test_vram_budget_gb_sets_the_budget() -> None:
    assert ts.Config(vram_budget_gb=1.5).requested_bytes() == 1_500_000_000
    with pytest.raises(ts.ConfigurationError, match="set only one"):
        ts.Config(vram_budget_gb=1.5, budget="1GB")


def test_a_budget_may_be_a_share_of_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ts._native, "available_memory", lambda: 10 << 30)
    shares = {"25%": 0.25, " 12.5 %": 0.125, "auto": 0.5, None: 0.5}
    for budget, share in shares.items():
        config = ts.Config(budget=budget)
        assert config.requested_bytes() is None
        assert config.fitted_bytes(smallest=1, whole=1 << 40) == share * (10 << 30), budget
    # Memory for everything else is left.
    everything = ts.Config(budget="100%").fitted_bytes(smallest=1, whole=1 << 40)
    assert 9 << 30 < everything < 10 << 30
    assert ts.Config(budget="6G").requested_bytes() == 6 * 10**9


def test_memory_modes_are_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ts._native, "available_memory", lambda: 10 << 30)
    budgets = {}
    for mode in ts.MemoryMode:
        config = ts.Config(memory_mode=mode)
        budgets[mode] = config.fitted_bytes(smallest=1, whole=1 << 40)
    assert (
        budgets[ts.MemoryMode.AGGRESSIVE]
        > budgets[ts.MemoryMode.BALANCED]
        > budgets[ts.MemoryMode.CONSERVATIVE]
    )
    assert budgets[ts.MemoryMode.AGGRESSIVE] == (8 << 30)
    assert ts.Config(memory_mode="conservative").prefetch_strategy is ts.PrefetchStrategy.NEXT_LAYER
    chosen = ts.Config(memory_mode="conservative", prefetch_strategy="none")
    assert chosen.prefetch_strategy is ts.PrefetchStrategy.NONE


@pytest.mark.parametrize("strategy", list(ts.PrefetchStrategy))
def test_prefetch_strategies_change_stalls_but_not_results(
    strategy: ts.PrefetchStrategy, tmp_path: Path
) -> None:
    reference = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    config = ts.Config(budget=5 * 20480, prefetch_strategy=strategy)
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    ts.offload(model, config, checkpoint=tmp_path)
    x = torch.randn(3, 64)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(model(x), reference(x))
    stats = ts.stats(model)
    streamed = [unit for unit in stats["units"] if not unit["resident"]]
    if strategy is ts.PrefetchStrategy.NONE:
        assert all(unit["stalls"] == unit["uses"] for unit in streamed), "each use waits for a read"
    if strategy is ts.PrefetchStrategy.AGGRESSIVE:
        assert stats["plan"]["ring_bytes"] >= (config.requested_bytes() or 0) // 2
    assert stats["reserved_high_water_bytes"] <= (config.requested_bytes() or 0)


def test_contradictory_calls_are_refused(linear: Any) -> None:
    reference, path = linear
    with pytest.raises(ts.ConfigurationError, match="given twice"):
        ts.offload(on_meta(reference), ts.Config(budget=1000), checkpoint=path, budget=1000)
    with pytest.raises(ts.ConfigurationError, match="no checkpoint"):
        ts.offload(on_meta(reference))
    model = ts.offload(on_meta(reference), checkpoint=path, budget="1MiB")
    with pytest.raises(ts.ModelError, match="already offloaded"):
        ts.offload(model, checkpoint=path, budget="1MiB")
    ts.restore(model)
    for call in (ts.stats, ts.restore):
        with pytest.raises(ts.ModelError, match="not offloaded"):
            call(model)


def test_a_plan_has_sizes_and_a_table(minilm: Path) -> None:
    plan = ts.plan(minilm, budget="60MiB")
    assert plan.peak_bytes <= plan.budget_bytes == 60 << 20
    assert plan.smallest_budget_bytes < plan.budget_bytes
    assert "encoder.layer.5.intermediate.dense" in str(plan)
    # The plan is that of the model, whose embedding is divided into blocks of rows.
    assert "units, such as experts; not predicted" in str(plan)
    assert plan.smallest_budget_bytes < 4 << 20
    with pytest.raises(ts.BudgetError):
        ts.plan(minilm, budget="1MiB")
