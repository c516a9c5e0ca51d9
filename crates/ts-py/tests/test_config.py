# SPDX-License-Identifier: MIT OR Apache-2.0
"""Settings: what works alone, and how a wrong one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
from safetensors.torch import save_file
from torch import nn


@pytest.mark.critical
@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("budget", 0, "a positive number of bytes or a size such as '600MiB'"),
        ("budget", -5, "a positive number"),
        ("budget", "lots", "a positive number"),
        ("budget", 1.5, "a positive number"),
        ("budget", True, "a positive number"),
        ("storage_path", 7, "a path"),
        ("max_passes", 0, "an integer from 1 to 64"),
        ("max_passes", "2", "an integer from 1 to 64"),
        ("num_io_threads", 257, "an integer from 1 to 256"),
        ("backend", "gds", "one of auto, adaptive, direct, buffered"),
    ],
)
def test_an_invalid_field_is_named_with_value_and_range(field: str, value: object, wanted: str) -> None:
    with pytest.raises(ts.ConfigurationError) as caught:
        ts.Config(**{field: value})  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    assert f"Config.{field} = {value!r}" in str(caught.value)
    assert wanted in str(caught.value)


@pytest.fixture
def linear(tmp_path: Path) -> tuple[nn.Linear, Path]:
    model = nn.Linear(64, 32)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return model, tmp_path


def on_meta(model: nn.Linear) -> nn.Linear:
    return nn.Linear(model.in_features, model.out_features, device="meta")


def test_storage_path_alone_works_and_prints_the_budget(linear: Any, capsys: pytest.CaptureFixture[str]) -> None:
    reference, path = linear
    model = ts.offload(on_meta(reference), ts.Config(storage_path=path))
    assert "tensorstream: budget" in capsys.readouterr().err
    x = torch.randn(3, 64)
    assert torch.equal(model(x), reference(x))


@pytest.mark.parametrize("backend", ["auto", "adaptive", "direct", "buffered"])
def test_every_backend_reads_the_same(linear: Any, backend: str) -> None:
    reference, path = linear
    config = ts.Config(budget="1MiB", backend=backend, num_io_threads=2)
    try:
        model = ts.offload(on_meta(reference), config, checkpoint=path)
    except ts.ConfigurationError as error:
        assert "not available" in str(error)
        pytest.skip(f"no direct I/O where the test's files are: {error}")
    x = torch.randn(3, 64)
    assert torch.equal(model(x), reference(x))
    by_path = ts.stats(model)["read_bytes_by_path"]
    if backend in by_path:
        assert by_path[backend] > 0


def test_contradictions_are_refused(linear: Any) -> None:
    reference, path = linear
    with pytest.raises(ts.ConfigurationError, match="given twice"):
        ts.offload(on_meta(reference), ts.Config(budget=1000), checkpoint=path, budget=1000)
    with pytest.raises(ts.ConfigurationError, match="no checkpoint"):
        ts.offload(on_meta(reference))
    model = ts.offload(on_meta(reference), checkpoint=path, budget="1MiB")
    with pytest.raises(ts.ModelError, match="offloaded already"):
        ts.offload(model, checkpoint=path, budget="1MiB")
    ts.restore(model)
    for call in (ts.stats, ts.restore):
        with pytest.raises(ts.ModelError, match="not offloaded"):
            call(model)


def test_a_plan_explains_itself(minilm: Path) -> None:
    plan = ts.plan(minilm, budget="60MiB")
    assert plan.peak_bytes <= plan.budget_bytes == 60 << 20
    assert plan.smallest_budget_bytes < plan.budget_bytes
    assert "embeddings.word_embeddings" in str(plan)
    with pytest.raises(ts.BudgetError):
        ts.plan(minilm, budget="1MiB")
