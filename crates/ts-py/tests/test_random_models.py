# SPDX-License-Identifier: MIT OR Apache-2.0
"""Random module trees at random budgets give the results of the model in memory."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
from torch import nn
from torch.nn import functional

Make = Callable[["Trees"], nn.Module]


class Chain(nn.Module):
    """Calls its children in the given order, which can repeat or omit children."""

    def __init__(self, children: list[nn.Module], order: list[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = torch.tanh(self.parts[i](x))
        return x


class Modulated(nn.Module):
    """Keeps views of its table while its children run, as diffusion transformers do."""

    def __init__(self, dim: int, child: nn.Module) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, dim))
        self.child = child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.table[None].chunk(6, dim=1)[:3]
        y = self.child(x * (1 + scale) + shift)
        return x + gate * y + self.table[5]


class OwnMatrix(nn.Module):
    """Has its own matrix and bias, and a child."""

    def __init__(self, dim: int, child: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(dim, dim)), nn.Parameter(torch.randn(dim))
        self.child = child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.weight.t()
        return self.child(functional.linear(x, self.weight, self.bias)) @ kept


class Reads(nn.Module):
    """Uses the weights of its children, and keeps views of them. Does not call the children."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [self.a.weight[1], self.b.weight[0, :], self.b.bias]
        x = functional.linear(x, self.a.weight, self.a.bias)
        x = torch.einsum("bsd,ed->bse", x, self.b.weight) + self.b.bias
        return x + rows[0] * rows[1] - rows[2]


class Table(nn.Module):
    """Returns a view of its weight, which is a table of positions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 9, dim))

    def forward(self, length: int) -> torch.Tensor:
        return self.positions[:, :length]


class Positions(nn.Module):
    """Adds rows of a table before its child, and multiplies by the same rows after it."""

    def __init__(self, dim: int, child: nn.Module) -> None:
        super().__init__()
        self.table, self.child = Table(dim), child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.table(x.shape[1])
        return self.child(x + positions) * positions


class Called(nn.Linear):
    """A linear layer that overrides ``__call__``, so its forward never runs."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class Yields(nn.Linear):
    """A module whose forward is a generator."""

    def forward(self, x: torch.Tensor) -> Any:
        yield functional.linear(x, self.weight)
        yield self.bias


class Generated(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = Yields(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.expand_as(x) for part in self.inner(x)]).sum(0)


class Attention(nn.Module):
    def __init__(self, dim: int, random: random.Random) -> None:
        super().__init__()
        self.batch_first = random.random() < 0.7
        self.inner = nn.MultiheadAttention(
            dim, 4, batch_first=self.batch_first, bias=random.random() < 0.7
        )
        self.need_weights, self.average = random.random() < 0.5, random.random() < 0.5
        self.masked = random.random() < 0.4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x if self.batch_first else x.transpose(0, 1)
        mask = torch.ones(x.shape[1], x.shape[1]).tril().logical_not() if self.masked else None
        more = {
            "need_weights": self.need_weights,
            "average_attn_weights": self.average,
            "attn_mask": mask,
        }
        y = self.inner(y, y, y, **more)[0]
        return y if self.batch_first else y.transpose(0, 1)


class Recurrent(nn.Module):
    def __init__(self, dim: int, kind: type[nn.RNNBase], layers: int) -> None:
        super().__init__()
        self.inner = kind(dim, dim, layers, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)[0]
        return result


class Convolution(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(dim, dim, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return result


class Trees:
    """Creates module trees of one width, with shared modules and tied weights."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.dim = self.random.choice([16, 32, 48])
        self.made: list[nn.Module] = []

    def module(self, depth: int) -> nn.Module:
        chance = self.random.random()
        if self.made and chance < 0.1:
            return self.random.choice(self.made)
        make = (
            self.random.choice(NESTED)
            if depth > 0 and chance < 0.55
            else self.random.choice(LEAVES)
        )
        made = make(self, depth) if make in NESTED else make(self)
        self.made.append(made)
        return made

    def chain(self, depth: int) -> nn.Module:
        children = [self.module(depth - 1) for _ in range(self.random.randint(1, 4))]
        order = [self.random.randrange(len(children)) for _ in range(self.random.randint(1, 5))]
        return Chain(children, order)

    def tied(self) -> nn.Module:
        a, b = nn.Linear(self.dim, self.dim), nn.Linear(self.dim, self.dim, bias=False)
        b.weight = a.weight
        return nn.Sequential(a, b)

    def encoder(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            self.dim,
            4,
            2 * self.dim,
            batch_first=self.random.random() < 0.8,
            norm_first=self.random.random() < 0.3,
            activation=self.random.choice(["relu", "gelu"]),
        )
        return layer if self.random.random() < 0.5 else nn.TransformerEncoder(layer, 2)


LEAVES: list[Any] = [
    lambda t: nn.Linear(t.dim, t.dim),
    lambda t: nn.Linear(t.dim, t.dim, bias=False),
    lambda t: nn.Sequential(
        nn.LayerNorm(t.dim), nn.Linear(t.dim, 2 * t.dim), nn.GELU(), nn.Linear(2 * t.dim, t.dim)
    ),
    lambda t: nn.utils.parametrizations.weight_norm(nn.Linear(t.dim, t.dim)),
    lambda t: Attention(t.dim, t.random),
    lambda t: Recurrent(t.dim, t.random.choice([nn.LSTM, nn.GRU, nn.RNN]), t.random.randint(1, 2)),
    lambda t: Convolution(t.dim),
    lambda t: Reads(t.dim),
    lambda t: Called(t.dim, t.dim),
    lambda t: Generated(t.dim),
    Trees.encoder,
    Trees.tied,
]
NESTED: list[Any] = [
    Trees.chain,
    Trees.chain,
    lambda t, depth: Modulated(t.dim, t.module(depth - 1)),
    lambda t, depth: OwnMatrix(t.dim, t.module(depth - 1)),
    lambda t, depth: Positions(t.dim, t.module(depth - 1)),
]


def smallest_of(model: nn.Module, path: Path) -> int:
    """Returns the smallest budget that works for a model. Reads it from the error message."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in model.parameters()
    }
    on_meta = copy.deepcopy(model, memo)
    with pytest.raises(ts.BudgetError) as caught:
        # The file has no buffers.
        ts.offload(on_meta, ts.Config(budget=1), checkpoint=path, strict=False)
    return int(
        str(caught.value).split("smallest budget that works is ")[1].split(" ", maxsplit=1)[0]
    )


def run_program(seed: int, path: Path) -> tuple[bool, bool]:
    """Runs a random model. Returns whether it was streamed, and whether autocast was enabled."""
    torch.manual_seed(seed)
    trees = Trees(seed)
    pick = trees.random
    dtype = pick.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    model = Chain([trees.module(3) for _ in range(3)], [0, 1, 2]).eval().to(dtype)
    if pick.random() < 0.3:
        model.requires_grad_(False)
    reference = copy.deepcopy(model)
    x = torch.randn(2, 5, trees.dim, dtype=dtype)
    modes = [torch.no_grad, torch.inference_mode]
    autocast = pick.random() < 0.3
    total = sum(parameter.nbytes for parameter in model.parameters())
    ts.offload(copy.deepcopy(model), ts.Config(budget="1GiB", storage_path=path))
    smallest = smallest_of(model, path)
    budget = smallest + pick.choice([0, 0, 4096, pick.randrange(1 + total)])
    ts.offload(model, ts.Config(budget=budget, storage_path=path))
    for turn in range(4):
        mode = pick.choice(modes)
        with mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            try:
                expected = reference(x)
            except RuntimeError:  # PyTorch does not mix these dtypes
                with pytest.raises(RuntimeError):
                    model(x)
                continue
            got = model(x)
        assert torch.equal(expected, got) or expected.isnan().any(), (
            f"pass {turn} in {mode.__name__}"
        )
    stats = ts.stats(model)
    assert stats["reserved_high_water_bytes"] <= budget
    return any(unit["loads"] > 1 for unit in stats["units"]), autocast


PROGRAMS = 500


@pytest.mark.parametrize("part", range(10))
def test_random_models_match_the_model_in_memory(
    part: int, share: Callable[[int], int], tmp_path: Path
) -> None:
    programs, streamed = share(PROGRAMS // 10), 0
    for seed in range(part * programs, (part + 1) * programs):
        path = tmp_path / str(seed)
        path.mkdir()
        try:
            streamed += run_program(seed, path)[0]
        except Exception as error:
            error.add_note(f"program {seed}")
            raise
    assert streamed > programs // 2, "most models read units more than once"
