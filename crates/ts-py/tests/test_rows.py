# SPDX-License-Identifier: MIT OR Apache-2.0
"""Embeddings and linear layers by rows: only the needed rows are read, and results are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
import transformers as hf
from torch import nn

ROWS, WIDTH = 20_011, 128
MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Lookup(nn.Module):
    """An embedding, and layers that make the budget too small for it."""

    def __init__(self, dtype: torch.dtype, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(ROWS, WIDTH, dtype=dtype, **how)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(6)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(self.embed(ids))
        return result


def stored(model: nn.Module, path: Path) -> Path:
    """Writes the weights of a model to a safetensors file, which has no checksums."""
    file = path / "model.safetensors"
    ts.save_file(model.state_dict(), file)
    return file


def streamed(make: Callable[[], nn.Module], file: Path, budget: int | str) -> Any:
    # The addresses of the live parameters, modulo 64, are those of the reference.
    return ts.offload(make().eval(), checkpoint=file, budget=budget)


def smallest(make: Callable[[], nn.Module], file: Path) -> int:
    """Returns the smallest budget, which the error for a smaller one reports."""
    with pytest.raises(ts.BudgetError) as error:
        streamed(make, file, 1)
    text = str(error.value)
    return int(text.split("the smallest budget that works is ")[1].split(maxsplit=1)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_the_rows_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    reference = Lookup(dtype).eval().requires_grad_(False)
    file = stored(reference, tmp_path)
    budget = smallest(lambda: Lookup(dtype), file)
    assert budget < reference.embed.weight.nbytes / 1.5
    model = streamed(lambda: Lookup(dtype), file, budget)
    layers = sum(parameter.nbytes for parameter in reference.layers.parameters())
    for seed, mode in enumerate(MODES):
        ids = torch.randint(ROWS, (3, 7), generator=torch.Generator().manual_seed(seed))
        before = ts.stats(model)
        with mode():
            assert torch.equal(model(ids), reference(ids))
        after = ts.stats(model)
        rows = after["tables"]["rows"] - before["tables"]["rows"]
        assert rows == ids.unique().numel()
        # Direct reads are aligned. The layers may be read ahead for the next pass too.
        most = 2 * layers + (rows + 2 * 12) * 3 * 4096
        assert after["read_bytes"] - before["read_bytes"] <= most
        assert after["reserved_high_water_bytes"] <= budget


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_were_looked_up_stay(tmp_path: Path, dtype: torch.dtype) -> None:
    reference = Lookup(dtype).eval().requires_grad_(False)
    budget = reference.embed.weight.nbytes // 3 * 2
    model = streamed(lambda: Lookup(dtype), stored(reference, tmp_path), budget)
    for seed, mode in enumerate([*MODES, *MODES]):
        # Two thirds of these rows are the same in each pass.
        own = torch.randint(ROWS, (4,), generator=torch.Generator().manual_seed(seed))
        ids = torch.cat([torch.arange(8) * 997, own])
        with mode():
            assert torch.equal(model(ids), reference(ids))
            assert torch.equal(model(ids.flip(0)), reference(ids.flip(0)))
    stats = ts.stats(model)
    # The first pass finds nothing, and every second one finds everything.
    assert stats["tables"]["cached_rows"] >= 6 * 12 + 5 * 8
    assert stats["tables"]["rows"] == 12 * 12
    assert stats["reserved_high_water_bytes"] <= budget


@pytest.mark.parametrize("mode", MODES)
def test_every_form_of_lookup(tmp_path: Path, mode: Any) -> None:
    def make() -> nn.Module:
        return Lookup(torch.float32, padding_idx=3)

    reference = make().eval().requires_grad_(False)
    file = stored(reference, tmp_path)
    model = streamed(make, file, "3MiB")
    own, other = model.embed.weight, reference.embed.weight
    forms = [
        torch.tensor(5),
        torch.tensor([]).long(),
        torch.tensor([[ROWS - 1, 0], [3, 3]]),
        torch.tensor([7, 7, 7], dtype=torch.int32),
        torch.arange(ROWS),
        torch.randint(ROWS, (50, 100)),
    ]
    with mode():
        for ids in forms:
            assert torch.equal(model.embed(ids), reference.embed(ids)), ids.shape
            lookup = nn.functional.embedding
            assert torch.equal(lookup(ids, own, 3), lookup(ids, other, 3))
            if ids.dtype == torch.int64:
                assert torch.equal(own[ids], other[ids])
        assert torch.equal(own[torch.tensor([-1, 4])], other[torch.tensor([-1, 4])])
        assert torch.equal(own.index_select(0, forms[3].long()), other[7].expand(3, -1))
        assert torch.equal(own[17], other[17])
        assert torch.equal(own[100:9000:7].clone(), other[100:9000:7])
        assert torch.equal(own[100:900:7], other[100:900:7])
        assert torch.equal(own.clone(), other)
    for bad in (-1, ROWS):
        with pytest.raises(IndexError, match=r"`embed\.weight`: it has 20011 rows"):
            model.embed(torch.tensor([0, bad]))


@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
@pytest.mark.parametrize("mode", MODES)
def test_bags(tmp_path: Path, reduction: str, mode: Any) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode=reduction, padding_idx=9)
            self.layer = nn.Linear(WIDTH, 8)

        def forward(self, *args: Any) -> torch.Tensor:
            result: torch.Tensor = self.layer(self.bag(*args))
            return result

    make = Bag
    reference = make().eval().requires_grad_(False)
    model = streamed(make, stored(reference, tmp_path), "3MiB")
    ids = torch.randint(ROWS, (60,))
    ids[::7] = 9
    with mode():
        for offsets in (torch.tensor([0, 5, 5, 40]), torch.tensor([0, 60])):
            assert torch.equal(model(ids, offsets), reference(ids, offsets))
        assert torch.equal(model(ids.view(6, 10)), reference(ids.view(6, 10)))
        others = torch.tensor([[5, 10, 70], [11, 12, 13]])  # without the padding index
        assert torch.equal(model(others), reference(others))
        if reduction == "sum":
            weights = torch.randn(6, 10)
            arguments = (ids.view(6, 10), None, weights)
            assert torch.equal(model(*arguments), reference(*arguments))
    assert 0 < ts.stats(model)["tables"]["rows"] < 1000


@pytest.mark.parametrize("codec", ["raw", "auto"])
def test_rows_with_checksums_are_verified(tmp_path: Path, codec: str) -> None:
    model: Any = Lookup(torch.bfloat16).eval().requires_grad_(False)
    ids = torch.randint(ROWS, (2, 9))
    with torch.inference_mode():
        expected = model(ids)
    row = model.embed.weight[int(ids[0, 0])].view(torch.uint8).numpy().tobytes()
    # Decoding takes memory of the budget.
    budget = "3MiB" if codec == "raw" else "5MiB"
    config = ts.Config(
        storage_path=str(tmp_path), budget=budget, compression_enabled=codec != "raw"
    )
    ts.offload(model, config)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(ids), expected)
    if codec == "raw":
        [path] = tmp_path.glob("*.ts")
        content = path.read_bytes()
        at = content.index(row)
        damaged = tmp_path / "damaged.ts"
        damaged.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        model = ts.offload(ts.restore(model), checkpoint=damaged, budget="3MiB")
        with torch.inference_mode(), pytest.raises(ts.ChecksumError, match=r"`embed\.weight\["):
            model(ids)


class Tied(nn.Module):
    """An embedding whose weight is also the head."""

    def __init__(self, dtype: torch.dtype, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(ROWS, WIDTH, dtype=dtype)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, ROWS, bias=bias, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layer(self.embed(ids)))
        return result


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tied_head_runs_block_by_block(tmp_path: Path, dtype: torch.dtype, bias: bool) -> None:
    def make() -> nn.Module:
        return Tied(dtype, bias)

    reference = make().eval().requires_grad_(False)
    file = stored(reference, tmp_path)
    budget = smallest(make, file)
    assert budget < reference.embed.weight.nbytes / 1.5
    model = streamed(make, file, budget)
    assert len([each for each in ts.stats(model)["units"] if "embed" in each["name"]]) > 1
    for batch in (1, 4, 33):
        ids = torch.randint(ROWS, (batch, 2))
        for mode in MODES:
            with mode():
                assert torch.equal(model(ids), reference(ids)), (batch, mode)
                with torch.autocast("cpu", torch.bfloat16):
                    assert torch.equal(model(ids), reference(ids)), (batch, mode, "autocast")
    before = ts.stats(model)["read_bytes"]
    with torch.inference_mode():
        model(ids)
    # The head reads each block once, and the lookup does not read the weight a second time.
    assert ts.stats(model)["read_bytes"] - before < 1.3 * reference.embed.weight.nbytes + (1 << 20)
    model = ts.restore(model)
    assert torch.equal(model.embed.weight, reference.embed.weight)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inexact_blocks_must_be_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """On a processor where products with blocks round differently, only `exact=False` uses them."""
    monkeypatch.setattr("tensorstream.streaming._division.products_are_exact", lambda *_: False)

    def make() -> nn.Module:
        return Tied(dtype, True)

    reference = make().eval().requires_grad_(False)
    file = stored(reference, tmp_path)
    least = smallest(make, file)
    assert least > reference.embed.weight.nbytes
    budget = reference.embed.weight.nbytes // 3 * 2
    with pytest.raises(ts.BudgetError):
        streamed(make, file, budget)
    config = ts.Config(budget=budget, exact=False)
    model = ts.offload(make().eval(), config, checkpoint=file)
    ids = torch.randint(ROWS, (3, 2))
    for mode in MODES:
        with mode():
            for _ in range(3):
                torch.testing.assert_close(model(ids), reference(ids))
    stats = ts.stats(model)
    assert stats["read_bytes"] > 6 * reference.embed.weight.nbytes
    assert stats["reserved_high_water_bytes"] <= budget


def test_gradients_flow_through_a_head_in_blocks(tmp_path: Path) -> None:
    reference = Tied(torch.float32, True).eval().requires_grad_(False)
    file = stored(reference, tmp_path)
    # The gradient of the input sums over all rows, so it needs them together.
    small = streamed(lambda: Tied(torch.float32, True), file, "6MiB")
    inputs = torch.randn(2, WIDTH, requires_grad=True)
    with pytest.raises(ts.BudgetError, match=r"raise the budget to \d+ bytes or more"):
        small.head(inputs).sum().backward()
    model = streamed(lambda: Tied(torch.float32, True), file, "11MiB")
    gradients = []
    for each in (reference, model):
        hidden = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
        hidden.requires_grad_()
        each.head(each.layer(hidden)).square().sum().backward()
        gradients.append(hidden.grad)
    assert torch.equal(*gradients)


def test_a_large_linear_layer_under_a_small_budget(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(512, 9001), nn.ReLU(), nn.Linear(9001, 16))

    torch.manual_seed(0)
    reference = make().eval().requires_grad_(False)
    file = stored(reference, tmp_path)
    budget = smallest(make, file)
    assert budget < reference[0].weight.nbytes / 4
    model = streamed(make, file, budget)
    for batch in (1, 2, 17, 64):
        inputs = torch.randn(batch, 512)
        for mode in MODES:
            with mode():
                assert torch.equal(model(inputs), reference(inputs)), (batch, mode)
    # With a larger budget, the layer is not divided.
    model = streamed(make, file, "21MiB")
    assert {each["name"] for each in ts.stats(model)["units"]} == {"0", "2"}


class Headed(nn.Module):
    """Layers of 4 MiB, and a head of 16 MiB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        self.head = nn.Linear(1024, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layers(x))
        return result


@pytest.mark.parametrize(("budget", "layers"), [("11MiB", False), ("3MiB", True)])
def test_no_more_than_the_head_is_divided_if_that_suffices(
    tmp_path: Path, budget: str, layers: bool
) -> None:
    reference = Headed().eval().requires_grad_(False)
    model = streamed(Headed, stored(reference, tmp_path), budget)
    x = torch.randn(3, 1024)
    for _ in range(3):
        with torch.inference_mode():
            assert torch.equal(model(x), reference(x))
    names = [unit["name"] for unit in ts.stats(model)["units"]]
    assert sum(name.startswith("head") for name in names) > 1, names
    assert (sum(name.startswith("layers.0") for name in names) > 1) is layers, names
    assert ts.stats(model)["reserved_high_water_bytes"] <= ts.stats(model)["budget_bytes"]


def test_a_language_model_under_its_smallest_budget(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=30_000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path)
    reference = hf.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    with pytest.raises(ts.BudgetError) as error:
        ts.from_pretrained(tmp_path, budget=1)
    text = str(error.value)
    budget = int(text.split("the smallest budget that works is ")[1].split(maxsplit=1)[0])
    assert budget < reference.lm_head.weight.nbytes / 3
    model = ts.from_pretrained(tmp_path, budget=budget)
    ids = torch.randint(30_000, (2, 9))
    tokens = [each.generate(ids, max_new_tokens=6, do_sample=False) for each in (reference, model)]
    assert torch.equal(*tokens)
    assert ts.stats(model)["reserved_high_water_bytes"] <= budget
