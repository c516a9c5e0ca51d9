# SPDX-License-Identifier: MIT OR Apache-2.0
"""Several models share one budget."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import tensorstream as ts
import torch
from torch import nn

MIB = 1 << 20


def stored(tmp_path: Path, seed: int, budget: ts.Budget, layers: int = 8) -> nn.Module:
    """Returns an offloaded model of one MiB for each layer."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(layers)))
    return ts.offload(model, ts.Config(storage_path=tmp_path / "weights", budget=budget))


def in_memory(seed: int, layers: int = 8) -> torch.Tensor:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(layers)))(torch.ones(2, 512))


def run(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        for _ in range(2):
            output: torch.Tensor = model(torch.ones(2, 512))
    return output


def limits(*models: nn.Module) -> list[int]:
    return [ts.stats(model)["limit_bytes"] for model in models]


def test_models_divide_a_budget_and_give_memory_back(tmp_path: Path) -> None:
    shared = ts.Budget("12MiB")
    first = stored(tmp_path, 1, shared)
    assert torch.equal(run(first), in_memory(1))
    assert ts.stats(first)["plan"]["streamed_bytes_per_pass"] == 0
    second = stored(tmp_path, 2, shared, layers=16)
    for _ in range(2):
        assert torch.equal(run(first), in_memory(1))
        assert torch.equal(run(second), in_memory(2, layers=16))
        used = [ts.stats(model)["in_use_bytes"] for model in (first, second)]
        assert sum(used) <= 12 * MIB
        assert ts.stats(first)["plan"]["streamed_bytes_per_pass"] > 0
    assert sum(limits(first, second)) <= 12 * MIB
    assert limits(first)[0] < limits(second)[0], "the larger model has the larger share"
    assert len(shared.shares()) == 2
    ts.restore(second)
    del second
    gc.collect()
    assert len(shared.shares()) == 1
    assert torch.equal(run(first), in_memory(1))
    assert ts.stats(first)["plan"]["streamed_bytes_per_pass"] == 0


def test_models_that_join_at_once_keep_the_budget(tmp_path: Path) -> None:
    shared = ts.Budget("12MiB")
    models = [nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))) for _ in range(4)]
    config = ts.Config(storage_path=tmp_path / "weights", budget=shared)
    threads = [threading.Thread(target=ts.offload, args=(model, config)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(shared.shares()) == 4
    assert limits(*models) and sum(limits(*models)) <= 12 * MIB


def test_a_graph_survives_a_smaller_share_in_bf16(tmp_path: Path) -> None:
    shared = ts.Budget("8MiB")
    model = (
        nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))).bfloat16().requires_grad_(False)
    )
    x = torch.randn(2, 512, dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    expected = x.grad.clone()
    ts.offload(model, ts.Config(storage_path=tmp_path / "weights", budget=shared))
    for _ in range(3):
        x.grad = None
        output = model(x)
        other = stored(tmp_path, 2, shared)
        output.sum().backward()
        assert torch.equal(x.grad, expected)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            other(torch.ones(2, 512))
        assert sum(limits(model, other)) <= 8 * MIB
        ts.restore(other)


def test_models_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    shared = ts.Budget(4 * MIB)
    models = [stored(tmp_path, 1, shared)]
    before = limits(*models)
    torch.manual_seed(3)
    large = nn.Sequential(nn.Linear(1024, 1024))
    weight = large[0].weight.clone()
    config = ts.Config(storage_path=tmp_path / "weights", budget=shared, exact=True)
    with pytest.raises(ts.BudgetError, match="a shared budget of 4194304 bytes is too small"):
        for seed in range(2, 6):
            models.append(stored(tmp_path, seed, shared))
            assert torch.equal(run(models[-1]), in_memory(seed))
    assert len(shared.shares()) == len(models)
    assert sum(limits(*models)) <= 4 * MIB
    assert limits(models[0])[0] <= before[0]
    with pytest.raises(ts.BudgetError, match="too small"):
        ts.offload(large, config)
    assert torch.equal(large[0].weight, weight), "a refused model is unchanged"
    for seed, model in enumerate(models, 1):
        assert torch.equal(run(model), in_memory(seed))


def test_a_model_in_use_gives_memory_back_after_its_pass(tmp_path: Path) -> None:
    shared = ts.Budget("12MiB")
    first = stored(tmp_path, 1, shared)
    run(first)
    stop = threading.Event()
    wrong: list[int] = []
    torch.manual_seed(2)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    x = torch.ones(2, 512)
    with torch.inference_mode():
        wanted = model(x)
    inputs = run(first)

    def only_run() -> None:
        while not stop.is_set():
            if not torch.equal(run(first), inputs):
                wrong.append(1)

    thread = threading.Thread(target=only_run)
    thread.start()
    try:
        second = ts.offload(model, ts.Config(storage_path=tmp_path / "weights", budget=shared))
        for _ in range(5):
            assert torch.equal(run(second), wanted)
            assert sum(limits(first, second)) <= 12 * MIB
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_a_model_joins_during_a_pass_of_another_one_on_the_same_thread(tmp_path: Path) -> None:
    shared = ts.Budget("12MiB")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            stored(tmp_path, 2, shared)
            return x

    outer = Outer()
    ts.offload(outer, ts.Config(storage_path=tmp_path / "weights", budget=shared))
    with pytest.raises(ts.BudgetError, match="is in use and cannot give memory back"):
        outer(torch.ones(2, 512))
    assert len(shared.shares()) == 1


def test_invalid_budgets_are_refused() -> None:
    for size in (0, -1, True, "much", 2**63, None):
        with pytest.raises(ts.ConfigurationError, match="invalid budget to share"):
            ts.Budget(size)  # type: ignore[arg-type]
    with pytest.raises(ts.ConfigurationError, match="strict, because the budget is shared"):
        ts.Config(budget=ts.Budget("1MiB"), memory_pressure_mode="adaptive")
    assert repr(ts.Budget("1MiB")) == "Budget(1048576 bytes, 0 models)"


def test_metrics_are_text_for_prometheus(tmp_path: Path) -> None:
    gc.collect()  # models of other tests
    model = stored(tmp_path, 1, ts.Budget("5MiB"))
    run(model)
    text = ts.metrics()
    names = set()
    for line in text.splitlines():
        if line.startswith("#"):
            assert line.split()[1] in ("HELP", "TYPE")
            continue
        sample, value = line.rsplit(" ", 1)
        assert float(value) >= 0
        # One sample is of the process, and all others are of a model.
        assert ('model="' in sample) != (sample == "tensorstream_kept_bytes")
        names.add(sample.split("{")[0])
    assert {"tensorstream_passes_total", "tensorstream_wait_seconds_total"} <= names
    own = [line for line in text.splitlines() if line.startswith("tensorstream_passes_total")]
    assert own[-1].endswith(" 2")
    label = own[-1].split("{")[1].split("}")[0]
    ts.restore(model)
    assert label not in ts.metrics()
