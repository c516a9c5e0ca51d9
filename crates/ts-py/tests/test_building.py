# SPDX-License-Identifier: MIT OR Apache-2.0
"""Operations on symbolic tensors give the bytes of real tensors, or raise a typed error."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
from conftest import leased
from tensorstream.streaming import _streamed_tensor
from tensorstream.streaming._attach import attach
from tensorstream.streaming._builder import Builder
from tensorstream.streaming._placement import Placement
from tensorstream.streaming._symbolic_tensor import Source, SymbolicTensor
from torch import nn

Real = dict[str, torch.Tensor]
Program = Callable[[Any], torch.Tensor]


def weights() -> Real:
    generator = torch.Generator().manual_seed(0)
    big = {name: torch.randn(4, 6, 512, generator=generator) for name in "ab"}
    return {
        **big,
        "small": torch.randn(4, 6, generator=generator),
        "half": torch.randn(4, 6, generator=generator).half(),
        "int": torch.arange(24, dtype=torch.int32).reshape(4, 6),
        "complex": torch.randn(3, 5, dtype=torch.complex64, generator=generator),
        "empty": torch.randn(0, 6),
    }


@pytest.fixture(scope="module", params=["ts", "safetensors"])
def builder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Builder:
    path = tmp_path_factory.mktemp("w") / f"w.{request.param}"
    ts.save_file(weights(), path)
    return Builder(ts._native.Checkpoint(path))


class SymbolicWeights(dict[str, Any]):
    """Symbolic tensors by name, created at first use."""

    def __init__(self, builder: Builder) -> None:
        super().__init__()
        self.builder = builder

    def __missing__(self, name: str) -> SymbolicTensor:
        self[name] = self.builder.symbolic(name)
        return self[name]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (x.resolve_conj().resolve_neg().contiguous().view(-1) for x in (a, b))
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check(builder: Builder, program: Program) -> SymbolicTensor:
    """Compares the results of a program on symbolic and on real tensors, whole and in pieces."""
    expected, result = program(weights()), program(SymbolicWeights(builder))
    assert isinstance(result, SymbolicTensor)
    assert (result.shape, result.dtype, result.stride()) == (
        expected.shape,
        expected.dtype,
        expected.stride(),
    )
    assert same(builder.materialize(result), expected)
    for budget in (1, 1 << 30):
        pieces = list(Builder(builder.checkpoint, budget).pieces(result))
        if pieces:
            assert same(torch.cat(pieces), expected)
    return result


#: Programs that only rearrange bytes, so that nothing has to be computed.
REARRANGED: dict[str, Program] = {
    "itself": lambda w: w["a"],
    "rows": lambda w: w["a"][1:3],
    "a row": lambda w: w["a"][-1],
    "a row of a row": lambda w: w["a"][2][3],
    "chunk": lambda w: w["a"].chunk(3)[1],
    "split": lambda w: torch.split(w["a"], [1, 3])[1],
    "unbind": lambda w: w["a"].unbind()[2],
    "view": lambda w: w["a"].view(24, 512),
    "reshape": lambda w: w["a"].reshape(-1),
    "unsqueeze": lambda w: w["a"].unsqueeze(1).squeeze(1),
    "narrow": lambda w: w["a"].narrow(0, 1, 2),
    "nothing": lambda w: w["a"][2:2],
    "cat": lambda w: torch.cat([w["a"], w["b"]]),
    "cat of the same": lambda w: torch.cat([w["a"], w["a"]]),
    "cat of empty": lambda w: torch.cat([w["small"], w["empty"]]),
    "stack": lambda w: torch.stack([w["a"], w["b"]]),
    "cat inside": lambda w: torch.cat([w["a"], w["b"]], dim=1),
    "cat, negative dimension": lambda w: torch.cat([w["a"], w["b"]], dim=-2),
    "stacks joined": lambda w: torch.cat(
        [torch.stack([w["a"][0], w["a"][1]]), torch.stack([w["b"][0], w["b"][1]])], 1
    ),
    "clone": lambda w: w["a"][1].clone(),
    "contiguous": lambda w: w["a"][1:].contiguous(),
    "same dtype": lambda w: w["a"].to(torch.float32, copy=True),
    "transposed ones": lambda w: w["a"][:1].transpose(0, 0),
}
#: Programs whose results have to be computed.
COMPUTED: dict[str, Program] = {
    "cast": lambda w: w["small"].bfloat16(),
    "wider": lambda w: w["half"].double(),
    "cast of a cast": lambda w: w["small"].half().float(),
    "transposed": lambda w: w["small"].t().contiguous(),
    "transposed view": lambda w: w["small"].t(),
    "permuted": lambda w: w["a"].permute(2, 0, 1).contiguous(),
    "columns": lambda w: w["small"][:, ::2].contiguous(),
    "last": lambda w: w["small"][..., -1].contiguous(),
    "cat inside, short": lambda w: torch.cat([w["small"], w["small"]], dim=1),
    "mixed cat": lambda w: torch.cat([w["int"], w["small"]]),
    "mixed cat of halves": lambda w: torch.cat([w["half"], w["small"]]),
    "mixed stack": lambda w: torch.stack([w["int"], w["small"]]),
    "cast of stacks": lambda w: torch.stack([w["a"], w["b"]]).half(),
    "stack of casts": lambda w: torch.stack([w["a"].half(), w["b"].half()]),
    "chunk of a cast": lambda w: w["small"].double().chunk(2)[1],
    "row of a cast": lambda w: w["half"].float()[1],
    "view of a cast": lambda w: w["half"].float().view(6, 4)[1:],
    "view of another dtype": lambda w: w["small"].view(torch.int32),
    "expanded": lambda w: w["small"][:1].expand(5, 6),
    "conjugated": lambda w: w["complex"].conj().clone(),
    "conjugated view": lambda w: w["complex"].conj(),
    "imaginary": lambda w: w["complex"].conj().imag.clone(),
    "negative view": lambda w: torch._neg_view(w["small"]),
    "sums": lambda w: w["small"] + w["small"] * 2,
    "with a real tensor": lambda w: w["small"] * torch.arange(6.0),
    "reduced": lambda w: w["a"].sum(0),
    "interleaved": lambda w: w["a"].view(4, 3, 2, 512).transpose(1, 2).reshape(4, 6, 512),
    "in place": lambda w: (w["small"] + 1).mul_(3),
    "in place on a weight": lambda w: w["int"].add_(5),
    "in place with itself": lambda w: less_its_mean(w["small"] + 0),
}  # fmt: skip


def less_its_mean(x: torch.Tensor) -> torch.Tensor:
    return x.sub_(x.mean())


@pytest.mark.parametrize("name", REARRANGED)
def test_rearranged_bytes_are_read_in_place(builder: Builder, name: str) -> None:
    assert isinstance(check(builder, REARRANGED[name]).source, Source), (
        "the bytes are read in place"
    )


@pytest.mark.parametrize("name", COMPUTED)
def test_changed_bytes_are_computed(builder: Builder, name: str) -> None:
    assert not isinstance(check(builder, COMPUTED[name]).source, Source)


def test_later_writes_do_not_change_recorded_operands(builder: Builder) -> None:
    factor = torch.arange(6.0)
    w = SymbolicWeights(builder)
    product, plus = w["small"] * factor, w["small"] + 1
    factor.zero_()
    w["small"].add_(9)
    assert same(builder.materialize(product), weights()["small"] * torch.arange(6.0))
    assert same(builder.materialize(plus), weights()["small"] + 1)


WRITES: dict[str, Program] = {
    "through a slice": lambda w: w["a"][:2].zero_(),
    "through a row": lambda w: w["a"].__setitem__(0, 0.0),
    "through a column of a transposed slice": lambda w: w["a"].mT[1:, 1:2, 0].fill_(3),
    "through one of a split": lambda w: w["small"].split(1)[1].mul_(2),
    "through detach": lambda w: w["a"].detach().zero_(),
    "through data": lambda w: w["a"].data.mul_(2),
    "with an existing view": lambda w: (w["a"][0], w["a"].zero_())[1],
    "twice": lambda w: (w["a"][0].fill_(2), w["a"].add_(1), w["a"][:, 1].copy_(w["a"][:, 0]))[1],
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_through_views_reach_all_views(builder: Builder, name: str) -> None:
    w, real = SymbolicWeights(builder), weights()
    views_of = {key: [w[key][1:], w[key].mT, w[key].detach()] for key in ("a", "small")}
    WRITES[name](w)
    # The same programs also work with real tensors.
    WRITES[name](real)  # type: ignore[arg-type]
    for key, views in views_of.items():
        assert same(builder.materialize(w[key]), real[key])
        for view, expected in zip(views, [real[key][1:], real[key].mT, real[key]], strict=True):
            # The views are symbolic tensors, although torch types them as tensors.
            assert same(builder.materialize(view), expected)  # type: ignore[arg-type]


def test_factories_return_ordinary_tensors(builder: Builder) -> None:
    w = SymbolicWeights(builder)
    made = torch.zeros_like(w["a"])
    made[:, 1] = 4.0
    assert type(made) is torch.Tensor
    assert type(torch.ones_like(w["half"])) is torch.Tensor


REFUSED: dict[str, Program] = {
    "into out": lambda w: torch.add(w["a"], w["b"], out=w["b"]),
    "for each": lambda w: torch._foreach_mul_([w["a"], w["b"]], 2),
    "transposed in place": lambda w: w["small"].t_(),
    "unsqueezed in place": lambda w: w["small"].unsqueeze_(0),
    "by stride": lambda w: w["small"].as_strided((6,), (1,), 0),
    "data of another shape": lambda w: setattr(w["small"], "data", w["small"].t().contiguous()),
    "data of a real tensor": lambda w: setattr(w["small"], "data", torch.zeros(6, 4)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_operations_are_refused_without_changes(builder: Builder, name: str) -> None:
    w = SymbolicWeights(builder)
    with pytest.raises(ts.ModelError):
        REFUSED[name](w)
    for key, tensor in w.items():
        assert same(builder.materialize(tensor), weights()[key]), "nothing has changed"


def test_data_can_be_set_to_a_tensor_of_equal_shape(builder: Builder) -> None:
    w = SymbolicWeights(builder)
    w["small"].data = w["small"] * 2
    assert same(builder.materialize(w["small"]), weights()["small"] * 2)
    w["small"].data = torch.arange(24.0).view(4, 6)
    assert same(builder.materialize(w["small"]), torch.arange(24.0).view(4, 6))


def test_operations_that_need_values_read_them(builder: Builder) -> None:
    w, real = SymbolicWeights(builder), weights()
    assert torch.equal(w["small"], w["small"])
    assert not torch.equal(w["a"], w["b"])
    assert w["small"].sum().item() == real["small"].sum().item()
    assert (w["int"] > 3).any()
    assert real["small"].copy_(w["half"]).equal(real["half"].float())


def test_random_programs_match_real_tensors(builder: Builder) -> None:
    """Compares the results of random operations on symbolic tensors and on real tensors."""
    rng = random.Random(0)
    steps: list[Callable[[Any, Any], Any]] = [
        lambda x, r: x[r.randrange(x.shape[0])] if x.dim() > 1 else x,
        lambda x, r: x.narrow(d := r.randrange(x.dim()), 0, r.randint(1, x.shape[d])),
        lambda x, r: x.transpose(r.randrange(x.dim()), r.randrange(x.dim())),
        lambda x, r: x.unsqueeze(r.randrange(x.dim() + 1)),
        lambda x, r: torch.cat([x, x], dim=r.randrange(x.dim())) if x.numel() < 1 << 16 else x,
        lambda x, r: (
            torch.stack([x, x], dim=r.randrange(x.dim() + 1)) if x.numel() < 1 << 16 else x
        ),
        lambda x, r: x.reshape(-1),
        lambda x, r: x.contiguous(),
        lambda x, r: x.to(r.choice([torch.float32, torch.float64, torch.bfloat16])),
        lambda x, r: x.chunk(2, d := r.randrange(x.dim()))[-1] if x.dim() else d,
        lambda x, r: x.clone(),
        lambda x, r: x * 2,
    ]
    for _ in range(60):
        seed, chosen = rng.random(), [rng.randrange(len(steps)) for _ in range(rng.randint(1, 7))]

        def program(w: Any, seed: float = seed, chosen: list[int] = chosen) -> torch.Tensor:
            dice, x = random.Random(seed), w["a"]
            for step in chosen:
                x = steps[step](x, dice)
            # The steps have no types.
            return x  # type: ignore[no-any-return]

        check(builder, program)


def test_a_slice_of_a_checksummed_tensor_is_read(tmp_path: Path) -> None:
    ts.save_file({"a": torch.randn(8, 3)}, tmp_path / "model.ts")
    checkpoint = ts._native.Checkpoint(tmp_path)
    module = nn.Linear(3, 4, bias=False, device="meta")
    module.weight = nn.Parameter(Builder(checkpoint).symbolic("a").chunk(2)[0], requires_grad=False)
    attach(module, Placement(module, ts.Config(budget="1MiB")), checkpoint)
    assert same(leased(module.weight), ts.load_file(tmp_path)["a"][:4])


def test_a_part_of_a_computed_tensor_keeps_its_phase(tmp_path: Path) -> None:
    ts.save_file({"a": torch.randn(8, 3).half()}, tmp_path / "model.ts")
    checkpoint = ts._native.Checkpoint(tmp_path)
    second = Builder(checkpoint).symbolic("a").float().chunk(2)[1].contiguous()
    module = nn.Linear(3, 4, bias=False, device="meta")
    module.weight = nn.Parameter(second, requires_grad=False)
    attach(
        module, Placement(module, ts.Config(budget="1MiB", storage_path=tmp_path / "c")), checkpoint
    )
    assert leased(module.weight).data_ptr() % 64 == 48


# --- weights in use: requires_grad, modes and strides ---


class Direct(nn.Module):
    """Uses its own weight, and has a child with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(100, 100))
        self.child = nn.Linear(100, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Calls of modules have no types.
        return self.child(x.transpose(1, 2) @ self.w)  # type: ignore[no-any-return]


@pytest.fixture
def direct(tmp_path: Path) -> tuple[Direct, Direct, torch.Tensor]:
    torch.manual_seed(0)
    reference, model = Direct(), Direct()
    model.load_state_dict(reference.state_dict())
    with torch.inference_mode():  # the mode of offloading does not matter
        ts.offload(model, ts.Config(storage_path=tmp_path, budget="44KiB", max_passes=1))
    return reference, model, torch.randn(2, 100, 3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_products_round_as_in_memory(direct: Any, mode: Any) -> None:
    reference, model, x = direct
    for _ in range(2):
        with mode():
            assert torch.equal(model(x), reference(x))
    assert model.w.requires_grad


def test_modes_of_other_threads_have_no_effect(direct: Any, tmp_path: Path) -> None:
    reference, model, x = direct
    ts.offload(ts.restore(model), ts.Config(storage_path=tmp_path, budget="200KiB", max_passes=2))
    expected_grad = torch.autograd.grad(reference(x.requires_grad_()).sum(), x)[0]
    with torch.no_grad():
        expected = reference(x)
    failures: list[BaseException] = []

    def run(grad: bool) -> None:
        try:
            for _ in range(20):
                with torch.set_grad_enabled(grad):
                    output = model(x)
                    assert output.requires_grad == grad
                    if grad:
                        assert torch.allclose(
                            torch.autograd.grad(output.sum(), x)[0], expected_grad, atol=1e-4
                        )
                    else:
                        assert torch.equal(output, expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(grad,)) for grad in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    assert all(p.grad is None for p in model.parameters())


class Waiting(nn.Linear):
    """Its forward waits in the threads that have called ``wait_in_forward``."""

    def __init__(self) -> None:
        super().__init__(100, 100)
        self.waiting: list[threading.Thread] = []
        self.entered, self.leave = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() in self.waiting:
            self.entered.set()
            assert self.leave.wait(60)
        return super().forward(x)

    @torch.no_grad()
    def run(self) -> None:
        self(torch.randn(1, 100))

    def wait_in_forward(self) -> None:
        """Returns while a forward in another thread has borrowed the parameters."""
        self.waiting.append(thread := threading.Thread(target=self.run))
        thread.start()
        assert self.entered.wait(60)
        assert type(self.weight) is _streamed_tensor.StreamedWeight

    def end(self) -> None:
        self.leave.set()
        self.waiting.pop().join(60)


# The functions are called while an operation on a stand-in runs.
@pytest.mark.parametrize("during", ["_dispatch", "_view", "stand_in", "_keeps_operands", "_real"])
def test_a_forward_can_borrow_a_parameter_while_an_operation_runs(
    during: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = Waiting(), torch.randn(100, 3)
    expected = module.weight.detach().clone()
    ts.offload(module, ts.Config(storage_path=tmp_path, budget="200KiB", max_passes=2))
    original = getattr(_streamed_tensor, during)

    def function(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        module.wait_in_forward()
        return original(*args, **kwargs)

    monkeypatch.setattr(_streamed_tensor, during, function)
    transposed, product = module.weight.t(), module.weight @ x
    assert module.waiting, f"{during} was not called"
    module.end()
    assert torch.equal(product, expected @ x)
    assert torch.equal(transposed + 0, expected.t())
    assert torch.equal(transposed.clone(), expected.t())


def test_writes_are_refused_in_every_mode(direct: Any) -> None:
    reference, model, x = direct
    with torch.no_grad():
        expected = reference(x)
    writes: list[Callable[[], Any]] = [
        lambda: torch.zero_(model.w),
        lambda: model.w.__setitem__(0, 1.0),
        lambda: model.w.add_(1),
        lambda: torch.add(model.w, 1, out=model.w),
        lambda: nn.init.normal_(model.w),
        lambda: nn.functional.embedding(torch.tensor([1, 2]), model.w, max_norm=0.1),
        lambda: setattr(model.w, "data", torch.zeros(100, 100)),
    ]
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for write in writes:
            # Autograd refuses some writes first, as it does in memory.
            first = (RuntimeError,) if mode is torch.enable_grad else ()
            with (
                mode(),
                pytest.raises((ts.ModelError, *first), match=r"stream|leaf Variable|requires grad"),
            ):
                write()
        with torch.no_grad():
            assert torch.equal(model(x), expected)


def pointwise() -> nn.Conv2d:
    return nn.Conv2d(64, 32, 1)


def depthwise() -> nn.Conv2d:
    return nn.Conv2d(32, 32, 3, groups=32)


def ordinary() -> nn.Conv2d:
    return nn.Conv2d(16, 8, 3)


# Without `stored`, the weights come from a row-major checkpoint. This works only for weights that
# are contiguous both in row-major and in channels-last format, so `ordinary` is omitted.
@pytest.mark.parametrize(
    ("make", "stored"),
    [
        (pointwise, True),
        (depthwise, True),
        (ordinary, True),
        (pointwise, False),
        (depthwise, False),
    ],
)
def test_every_stride_of_a_live_model_is_kept(make: Any, stored: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make().to(memory_format=torch.channels_last)
    x = torch.randn(2, model.in_channels, 7, 7)
    strides = model.weight.stride()
    with torch.inference_mode():
        expected = model(x)
    config = ts.Config(budget="1MiB", storage_path=tmp_path if stored else None)
    if stored:
        ts.offload(model, config)
    else:
        ts.save_file(model.state_dict(), tmp_path / "model.ts")
        ts.offload(model, config, checkpoint=tmp_path)
    assert model.weight.stride() == strides
    with torch.inference_mode():
        actual = model(x)
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()
    assert ts.restore(model).weight.stride() == strides
