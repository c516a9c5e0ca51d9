# SPDX-License-Identifier: MIT OR Apache-2.0
"""Random budgets from the smallest one on: none is refused, and none is exceeded."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
import transformers as hf
from safetensors.torch import save_file
from tensorstream.streaming import _division
from tensorstream.streaming._division import Rows, trial_bytes
from test_experts import MODELS, SHAPE, saved
from torch import nn
from torch.nn import functional as F

PROGRAMS = 200
ROWS = 20_000


def llama(tied: bool) -> Any:
    """Returns a configuration whose embedding and head are divided into blocks of rows."""
    config = {**SHAPE, "vocab_size": ROWS, "tie_word_embeddings": tied}
    return hf.LlamaConfig(**config)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The directory of each model, and the model in memory."""
    found = {}
    for name in ("qwen3", "mixtral", "gpt_oss", "jamba"):
        path = saved(name, tmp_path_factory.mktemp(name), torch.float32)
        found[name] = path, MODELS[name][0].from_pretrained(path).eval()
    for tied in (True, False):
        path = tmp_path_factory.mktemp("llama")
        torch.manual_seed(0)
        hf.LlamaForCausalLM(llama(tied)).save_pretrained(path)
        found[f"llama {tied}"] = path, hf.LlamaForCausalLM.from_pretrained(path).eval()
    return found


def smallest(path: Path, max_passes: int) -> int:
    """Returns the smallest budget, which the error for a smaller one reports."""
    with pytest.raises(ts.BudgetError) as error:
        ts.from_pretrained(path, config=ts.Config(budget=1, max_passes=max_passes))
    text = str(error.value)
    return int(text.split("the smallest budget that works is ")[1].split(maxsplit=1)[0])


def test_random_budgets(
    checkpoints: dict[str, tuple[Path, Any]], share: Callable[[int], int]
) -> None:
    programs = share(PROGRAMS)
    choose = random.Random(7)
    least = {
        (name, passes): smallest(path, passes)
        for name, (path, _) in checkpoints.items()
        for passes in (1, 2)
    }
    streamed = 0
    for program in range(programs):
        name = choose.choice(list(checkpoints))
        path, reference = checkpoints[name]
        passes = choose.choice([1, 1, 2])
        size = sum(parameter.nbytes for parameter in reference.parameters())
        # A third of the programs have the smallest budget, or nearly.
        low = least[name, passes]
        budget = choose.choice([low, low + choose.randrange(1 << 16), choose.randrange(low, size)])
        config = ts.Config(
            budget=budget,
            max_passes=passes,
            prefetch_strategy=choose.choice(list(ts.PrefetchStrategy)),
        )
        what = (program, name, budget, low, config.prefetch_strategy)
        model = ts.from_pretrained(path, config=config)
        tokens = choose.choice([1, 5, 30])
        ids = torch.randint(2, 90, (choose.choice([1, 3]), tokens))
        with torch.inference_mode():
            expected = reference(ids).logits
            for _ in range(2):
                assert torch.equal(model(ids).logits, expected), what
        stats = ts.stats(model)
        assert stats["reserved_high_water_bytes"] <= budget, what
        assert stats["in_use_high_water_bytes"] <= budget, what
        streamed += stats["plan"]["streamed_bytes_per_pass"] > 0
    assert streamed > programs / 2


def test_a_plan_falls_back_to_names(tmp_path: Path) -> None:
    saved("qwen3", tmp_path, torch.float32)
    by_names = str(ts.plan(tmp_path / "model.safetensors", budget="8MiB"))
    assert str(ts.plan(tmp_path, budget="8MiB")) != by_names
    config = tmp_path / "config.json"
    text = config.read_text()
    for broken in (
        "{}",
        text.replace('"qwen3_moe"', '"gpt-of-nobody"'),
        # Without an answer on standard input, transformers would ask whether to run the code.
        text.replace("{", '{"auto_map": {"AutoConfig": "own.Config"},', 1).replace(
            '"qwen3_moe"', '"own"'
        ),
        text.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'),
    ):
        config.write_text(broken)
        assert str(ts.plan(tmp_path, budget="8MiB")) == by_names


def test_plans_state_the_smallest_budget(checkpoints: dict[str, tuple[Path, Any]]) -> None:
    for name, (path, _) in checkpoints.items():
        low = smallest(path, 1)
        assert ts.plan(path, budget=low).smallest_budget_bytes <= low, name
        with pytest.raises(ts.BudgetError, match=f"the smallest budget that works is {low} bytes"):
            ts.plan(path, budget=low - 1)
        # A budget that divides less does not hide it.
        assert ts.plan(path, budget="1GiB").smallest_budget_bytes == low, name


def test_a_division_does_not_raise_the_smallest_budget(
    checkpoints: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups need buffers, which an embedding that is a unit does not need."""
    monkeypatch.setattr("tensorstream.streaming._division.exact_block_rows", lambda _: None)
    for tied in (True, False):
        path, reference = checkpoints[f"llama {tied}"]
        low = smallest(path, 1)
        assert ts.plan(path, budget="1GiB").smallest_budget_bytes == low
        model = ts.from_pretrained(path, budget=low)
        ids = torch.tensor([[3, 1, 3]])
        with torch.inference_mode():
            for _ in range(2):
                assert torch.equal(model(ids).logits, reference(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divisions_are_not_tried_without_memory_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """In bfloat16, trying a division keeps memory for each width, and else for one at a time."""
    monkeypatch.setattr("tensorstream.streaming._division._tried", {})
    widths = (1536, 1600, 1664, 1728)

    def layers(device: str) -> nn.ModuleList:
        return nn.ModuleList(nn.Linear(n, 2048, device=device, dtype=dtype) for n in widths)

    # Blocks of the minimum size are taken on every processor, also if they round differently.
    monkeypatch.setattr(_division._Trial, "is_exact", lambda *_: True)
    reference = layers("cpu")
    ts.save_file(reference.state_dict(), tmp_path / "model.safetensors")
    needed = trial_bytes(reference, Rows.ALL) >> 20
    largest = 2048 * max(widths) * 4 >> 20
    assert needed == 4 * 48 if dtype == torch.bfloat16 else largest < needed < 3 * largest
    available = [96 + needed + 1]
    monkeypatch.setattr(ts._native, "available_memory", lambda: available[0] << 20)
    config = ts.Config(budget="4500KiB", storage_path=tmp_path)
    available[0] -= 2
    with pytest.raises(ts.BudgetError, match=r"must be divided .* the budget to \d+ bytes") as why:
        ts.offload(layers("meta"), config)
    larger = int(str(why.value).rsplit(" ", 2)[1])
    available[0] += 2
    for budget in (config.budget, larger):
        model = ts.offload(layers("meta"), ts.Config(budget=budget, storage_path=tmp_path))
        for _ in range(2):
            for layer, expected in zip(model, reference, strict=True):
                x = torch.randn(3, expected.in_features).to(dtype)
                torch.testing.assert_close(layer(x), expected(x))


@pytest.mark.parametrize("rows", [2048, 20_480])
def test_trying_a_division_takes_no_more_memory_than_planned(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Measures the tensors that live at once, with the profiler of PyTorch."""
    monkeypatch.setattr(_division, "_tried", {})
    weight = torch.empty(rows, 1024, device="meta")
    planned = trial_bytes(nn.Linear(1024, rows, device="meta"), Rows.ALL)
    shape = _division._shape(weight)
    with torch.profiler.profile(profile_memory=True) as profile:
        _division._try_heights(*shape)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak <= planned, (peak, planned)


def test_plans_say_what_is_divided_and_what_a_token_needs(tmp_path: Path) -> None:
    saved("qwen3", tmp_path, torch.float32)
    plan = ts.plan(tmp_path, budget="1MiB")
    # Two of sixteen experts in each of three layers.
    assert plan.expert_bytes_per_token == 3 * 2 * 3 * 128 * 96 * 4
    lines = {line[:19].strip(): line[19:] for line in str(plan).splitlines()}
    assert "6.8 MiB" in lines["experts"] and "0.8 MiB" in lines["a token needs"]
    read = float(lines["a token reads"].split()[0])
    assert 0 < read <= 0.9
    assert "all experts are chosen equally often" in lines["a token reads"]
    dense = ts.plan(tmp_path / "model.safetensors", budget="8MiB")
    assert dense.expert_bytes_per_token is None and "experts" not in str(dense)


class Codes(nn.Module):
    """Keeps its weights in buffers, as many quantised layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-9, 9, (256, 256), dtype=torch.int8))
        self.bias = nn.Parameter(torch.randn(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(x, self.codes.to(x.dtype), self.bias))


def codes() -> nn.Module:
    return nn.Sequential(*(Codes() for _ in range(8)))


def mixed() -> nn.Module:
    return nn.Sequential(
        *(part for _ in range(8) for part in (nn.Linear(128, 128), nn.BatchNorm1d(128)))
    )


def odd() -> nn.Module:
    """Its tensors are at all kinds of addresses in a file."""
    return nn.Sequential(nn.Linear(256, 99), *(nn.Linear(99, 99) for _ in range(8)))


@pytest.mark.parametrize("make", [codes, mixed, odd])
def test_a_model_has_one_smallest_budget(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = make().eval()
    file = tmp_path / "model.safetensors"
    save_file(reference.state_dict(), file)
    buffers = sum(buffer.nbytes for buffer in reference.buffers())
    found = set()
    x = torch.randn(3, 256 if make is not mixed else 128)
    with torch.no_grad():
        expected = reference(x)
    for where in ("cpu", "meta"):
        with torch.device(where):
            model = make().eval()
        with pytest.raises(ts.BudgetError) as caught:
            ts.offload(model, checkpoint=file, budget=512)
        smallest = caught.value.smallest
        assert smallest is not None and f" {smallest} bytes" in str(caught.value)
        assert (f"take {buffers} bytes" in str(caught.value)) == (buffers > 0)
        with pytest.raises(ts.BudgetError) as again:
            ts.offload(model, checkpoint=file, budget=smallest - 1)
        assert again.value.smallest == smallest
        ts.offload(model, checkpoint=file, budget=smallest)
        with torch.no_grad():
            for _ in range(3):
                # On the meta device, weights have the addresses of a mapped file.
                if where == "cpu":
                    assert torch.equal(model(x), expected)
                torch.testing.assert_close(model(x), expected)
        stats = ts.stats(model)
        assert stats["budget_bytes"] == stats["plan"]["smallest_budget_bytes"] == smallest
        assert stats["plan"]["buffer_bytes"] == buffers
        assert stats["reserved_high_water_bytes"] <= smallest
        assert stats["plan"]["streamed_bytes_per_pass"] > 0 or make is codes
        found.add(smallest)
    assert len(found) == 1
    by_names = ts.plan(file, budget="1GiB")
    assert "assumes that all tensors are parameters" in str(by_names)
    if not buffers:
        assert by_names.smallest_budget_bytes in found
    live = make()
    with pytest.raises(ts.BudgetError) as caught:
        ts.offload(live, ts.Config(storage_path=tmp_path / "own", budget=512))
    assert caught.value.smallest is not None and caught.value.smallest > buffers
    ts.offload(live, ts.Config(storage_path=tmp_path / "own", budget=caught.value.smallest))
