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
from tensorstream.streaming import _division
from tensorstream.streaming._division import block_counts, exact_block_rows
from torch import nn

ROWS, WIDTH = 20_011, 128
# Threads divide this many rows evenly, so that more processors can divide a product too.
HEAD_ROWS = 20_480
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
    assert torch.equal(own.index_select(0, torch.tensor(7)), other[7:8])
    assert torch.equal(own.index_select(-2, torch.tensor([7, 9])), other[7:10:2])
    for index in (torch.tensor([-1]), torch.tensor([[1, 2]])):
        for weight in (own, other):
            with pytest.raises(IndexError):
                weight.index_select(0, index)
    for dtype in (torch.float32, torch.int16, torch.bool):
        for each in (model, reference):
            with pytest.raises(RuntimeError, match="indices' to have one of the following scalar"):
                each(torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("rows", [1, None, ROWS + 1])
@pytest.mark.parametrize("mode", MODES)
def test_the_bias_of_a_linear_function_can_have_other_shapes(
    tmp_path: Path, rows: int | None, mode: Any
) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        layers = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        return nn.Sequential(nn.Linear(WIDTH, HEAD_ROWS, bias=False), *layers)

    reference = make().requires_grad_(False)
    model = streamed(make, stored(reference, tmp_path), "3MiB").requires_grad_(False)
    x, bias = torch.randn(2, WIDTH), torch.randn([] if rows is None else rows)
    results = []
    with mode():
        for each in (model, reference):
            if rows == ROWS + 1:
                with pytest.raises(RuntimeError, match="must match"):
                    nn.functional.linear(x, each[0].weight, bias)
            else:
                results.append(nn.functional.linear(x, each[0].weight, bias))
    assert not results or torch.allclose(*results, rtol=1e-5, atol=1e-5)


def test_gradients_of_bags_are_in_the_rows_that_were_looked_up(tmp_path: Path) -> None:
    for number, reduction in enumerate(("sum", "mean", "max")):

        def make(reduction: str = reduction) -> nn.Sequential:
            torch.manual_seed(0)
            bag = nn.EmbeddingBag(ROWS, WIDTH, mode=reduction, padding_idx=9)
            return nn.Sequential(bag, *(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

        reference = make()
        directory = tmp_path / str(number)
        directory.mkdir()
        model: Any = ts.offload(make(), checkpoint=stored(reference, directory), budget="3MiB")
        ids, offsets = torch.tensor([1, 5, 203, 7, 9, 1, 20_000]), torch.tensor([0, 3, 3, 5])
        for _ in range(3):
            for each in (model, reference):
                bags = each[0](ids, offsets)
                each[1:](bags).square().sum().backward()
            for own, other in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(own.grad, other.grad), reduction


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


def divides(layer: nn.Linear) -> bool:
    """Returns whether products with blocks of a layer are exact on this processor."""
    return exact_block_rows(layer.weight) is not None


class Tied(nn.Module):
    """An embedding whose weight is also the head."""

    def __init__(self, dtype: torch.dtype, bias: bool, rows: int = HEAD_ROWS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(rows, WIDTH, dtype=dtype)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, rows, bias=bias, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layer(self.embed(ids)))
        return result


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rows", [HEAD_ROWS, ROWS])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tied_head_runs_block_by_block(
    tmp_path: Path, dtype: torch.dtype, bias: bool, rows: int
) -> None:
    """Where the processor multiplies blocks in another way, the head is one unit, and is exact."""

    def make() -> nn.Module:
        return Tied(dtype, bias, rows)

    reference: Any = make().eval().requires_grad_(False)
    file = stored(reference, tmp_path)
    budget, is_divided = smallest(make, file), divides(reference.head)
    size = reference.embed.weight.nbytes
    assert budget < size / 1.5 if is_divided else budget > size
    model = streamed(make, file, budget)
    units = [each for each in ts.stats(model)["units"] if "embed" in each["name"]]
    assert (len(units) > 1) is is_divided
    # A single token is multiplied by other kernels.
    for shape in ((1, 1), (1, 2), (2, 2), (4, 2), (33, 2)):
        batch, ids = shape[0] * shape[1], torch.randint(rows, shape)
        for mode in MODES:
            with mode():
                assert torch.equal(model(ids), reference(ids)), (batch, mode)
                with torch.autocast("cpu", torch.bfloat16):
                    assert torch.equal(model(ids), reference(ids)), (batch, mode, "autocast")
    before = ts.stats(model)["read_bytes"]
    with torch.inference_mode():
        model(ids)
    # The head reads each block once, and the lookup does not read the weight a second time. Of a
    # head that is one unit, the lookup needs all, which the layer between them replaces.
    most = 1.3 if is_divided else 2.1
    assert ts.stats(model)["read_bytes"] - before < most * size + (1 << 20)
    model = ts.restore(model)
    assert torch.equal(model.embed.weight, reference.embed.weight)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inexact_blocks_must_be_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """On a processor where products with blocks round differently, only `exact=False` uses them."""
    monkeypatch.setattr("tensorstream.streaming._division.exact_block_rows", lambda _: None)

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
    ids = torch.randint(HEAD_ROWS, (3, 2))
    for mode in MODES:
        with mode():
            for _ in range(3):
                torch.testing.assert_close(model(ids), reference(ids))
    stats, size = ts.stats(model), reference.embed.weight.nbytes
    # What was not in the budget is read in each of the later passes too.
    assert stats["read_bytes"] > size + (3 * len(MODES) - 1) * (size - budget)
    assert stats["reserved_high_water_bytes"] <= budget


def test_gradients_flow_through_a_head_in_blocks(tmp_path: Path) -> None:
    reference = Tied(torch.float32, True).eval().requires_grad_(False)
    file = stored(reference, tmp_path)
    exact = divides(reference.head)

    def model(budget: str) -> Any:
        config = ts.Config(budget=budget, exact=exact)
        return ts.offload(Tied(torch.float32, True).eval(), config, checkpoint=file)

    # The gradient of the input sums over all rows, so it needs them together.
    inputs = torch.randn(2, WIDTH, requires_grad=True)
    with pytest.raises(ts.BudgetError, match=r"raise the budget to \d+ bytes or more"):
        model("6MiB").head(inputs).sum().backward()
    gradients = []
    for each in (reference, model("11MiB")):
        hidden = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
        hidden.requires_grad_()
        each.head(each.layer(hidden)).square().sum().backward()
        gradients.append(hidden.grad)
    if exact:
        assert torch.equal(*gradients)
    else:
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("rows", [9216, 9001])
def test_a_large_linear_layer_under_a_small_budget(tmp_path: Path, rows: int) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(512, rows), nn.ReLU(), nn.Linear(rows, 16))

    torch.manual_seed(0)
    reference = make().eval().requires_grad_(False)
    file = stored(reference, tmp_path)
    budget, size = smallest(make, file), reference[0].weight.nbytes
    assert budget < size / 4 if divides(reference[0]) else budget > size
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


@pytest.mark.parametrize("only_head", [True, False])
def test_no_more_than_the_head_is_divided_if_that_suffices(tmp_path: Path, only_head: bool) -> None:
    reference: Any = Headed().eval().requires_grad_(False)
    file = stored(reference, tmp_path)
    head, layers = divides(reference.head), divides(reference.layers[0])
    least = smallest(Headed, file)
    if not head:
        assert least > reference.head.weight.nbytes
    budget = max(11 << 20, least) if only_head else least
    model = streamed(Headed, file, budget)
    for batch in (1, 3, 20, 150):
        x = torch.randn(batch, 1024)
        with torch.inference_mode():
            assert torch.equal(model(x), reference(x)), batch
    names = [unit["name"] for unit in ts.stats(model)["units"]]
    assert (sum(name.startswith("head") for name in names) > 1) is head, names
    # The smallest budget is that of the layers, if no block of the head is larger.
    needs_layers = layers and not only_head and head and least < 8 << 20
    assert (sum(name.startswith("layers.0") for name in names) > 1) is needs_layers, names
    assert ts.stats(model)["reserved_high_water_bytes"] <= ts.stats(model)["budget_bytes"]


@pytest.mark.parametrize("rows", [20_480, 20_011, 4000])
@pytest.mark.parametrize("width", [128, 1024])
def test_the_chosen_blocks_are_exact_for_every_batch(rows: int, width: int) -> None:
    """Compares products of f32 matrices and blocks, also for batches that are not tried."""
    weight = torch.randn(rows, width)
    step = exact_block_rows(weight)
    if step is None:
        return  # no blocks of this matrix are exact on this processor
    counts = block_counts(rows, step)
    assert len(counts) > 1 and sum(counts) == rows
    for batch in (*range(1, 35), 48, 64, 100, 128, 129, 131, 200, 257, 300):
        inputs = torch.randn(batch, width)
        parts = [nn.functional.linear(inputs, own) for own in weight.split(counts)]
        whole = nn.functional.linear(inputs, weight)
        assert torch.equal(torch.cat(parts, 1), whole), (batch, step)


def test_larger_blocks_are_used_if_small_ones_are_inexact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plays a processor on which only blocks of at least 800 rows are exact."""
    monkeypatch.setattr(_division, "_tried", {})
    monkeypatch.setattr(_division._Trial, "is_exact", lambda self, rows, step, _: step >= 800)
    reference: Any = Headed().eval().requires_grad_(False)
    model = streamed(Headed, stored(reference, tmp_path), "11MiB")
    names = [unit["name"] for unit in ts.stats(model)["units"]]
    assert [name for name in names if name.startswith("head")] == [
        f"head.weight[{first}:{min(first + 896, 4096)}]" for first in range(0, 4096, 896)
    ]
    x = torch.randn(3, 1024)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), reference(x))


def test_a_language_model_under_its_smallest_budget(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=30_720,
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
    size = reference.lm_head.weight.nbytes
    assert budget < size / 3 if divides(reference.lm_head) else budget > size
    model = ts.from_pretrained(tmp_path, budget=budget)
    ids = torch.randint(30_720, (2, 9))
    tokens = [each.generate(ids, max_new_tokens=6, do_sample=False) for each in (reference, model)]
    assert torch.equal(*tokens)
    assert ts.stats(model)["reserved_high_water_bytes"] <= budget
