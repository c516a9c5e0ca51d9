# SPDX-License-Identifier: MIT OR Apache-2.0
"""While everything is resident, passes lease all units at once, and modules have the weights."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
from tensorstream.streaming._parameters import LentParameters, Parameters
from tensorstream.streaming._streamed_tensor import StreamedTensor, StreamedWeight
from torch import nn

#: After this many passes, a pass leases all units at once.
PASSES = 6


class Block(nn.Module):
    """A module with a parameter of its own beside a child, and one that shares the child's."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(32, 32))
        self.linear = nn.Linear(32, 32)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [type(self.linear.weight), type(self.__dict__["_parameters"])]
        result: torch.Tensor = torch.tanh(self.linear(x @ self.matrix)) + self.linear.bias
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.write: str | None = None
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        last: Any = self.blocks[3]
        if self.write == "torch":
            with torch.no_grad():
                last.linear.weight.add_(1)
        elif self.write == "raise":
            raise ValueError("from the forward")
        elif self.write == "return":
            return x, last.linear.weight.t()
        elif self.write == "keep":
            self.kept = last.linear.weight.view(-1)
        return x


@pytest.fixture
def models(tmp_path: Path) -> tuple[Model, Model]:
    """A model in memory, and a streamed one that is resident and has run several passes."""
    torch.manual_seed(0)
    model = Model()
    streamed = ts.offload(copy.deepcopy(model), ts.Config(storage_path=tmp_path, budget="16MiB"))
    with torch.no_grad():
        for _ in range(PASSES):
            streamed(torch.ones(2, 32))
    return model, streamed


def leases_at_once(model: Model) -> bool:
    """Returns whether the latest pass had leased all units at once."""
    kind, own = model.blocks[0].seen  # type: ignore[misc]
    assert (kind is StreamedWeight) == (own is LentParameters)
    return own is LentParameters


def test_modules_have_weights_in_a_pass_and_stand_ins_afterwards(
    models: tuple[Model, Model],
) -> None:
    model, streamed = models
    loads = [unit["loads"] for unit in ts.stats(streamed)["units"]]
    names = [name for name, _ in streamed.named_parameters()]
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(2, 32)
            with mode():
                result = streamed(x)
                assert leases_at_once(streamed), mode
                assert torch.equal(result, model(x))
            assert all(type(p) is StreamedTensor for p in streamed.parameters())
            assert type(streamed.blocks[0]._parameters) is Parameters
            assert "forward" in streamed.blocks[0].linear.__dict__  # type: ignore[operator]
    assert [name for name, _ in streamed.named_parameters()] == names
    assert [unit["loads"] for unit in ts.stats(streamed)["units"]] == loads


def test_training_leases_each_unit(models: tuple[Model, Model]) -> None:
    model, streamed = models
    own, other = (torch.ones(2, 32, requires_grad=True) for _ in range(2))
    streamed(own).sum().backward()
    assert not leases_at_once(streamed)
    model.requires_grad_(False)(other).sum().backward()
    assert own.grad is not None and other.grad is not None and torch.equal(own.grad, other.grad)
    with torch.no_grad():
        streamed(own)
    assert leases_at_once(streamed)


def test_autocast_leases_each_unit(models: tuple[Model, Model]) -> None:
    model, streamed = models
    x = torch.ones(2, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(streamed(x), model(x))
    assert not leases_at_once(streamed)


def test_a_write_is_reported_and_undone(models: tuple[Model, Model]) -> None:
    model, streamed = models
    x = torch.ones(2, 32)
    with torch.no_grad():
        streamed.write = "torch"
        with pytest.raises(ts.ModelError, match="written"):
            streamed(x)
        assert leases_at_once(streamed)
        streamed.write = None
        for _ in range(PASSES):
            assert torch.equal(streamed(x), model(x))


def test_an_exception_gives_modules_their_stand_ins_again(models: tuple[Model, Model]) -> None:
    model, streamed = models
    streamed.write = "raise"
    with torch.no_grad(), pytest.raises(ValueError, match="from the forward"):
        streamed(torch.ones(2, 32))
    assert leases_at_once(streamed)
    assert all(type(p) is StreamedTensor for p in streamed.parameters())
    streamed.write = None
    assert torch.equal(streamed(torch.ones(2, 32)), model(torch.ones(2, 32)))


def test_a_returned_weight_is_a_stand_in(models: tuple[Model, Model]) -> None:
    model, streamed = models
    streamed.write = "return"
    with torch.no_grad():
        result, weight = streamed(torch.ones(2, 32))
    assert leases_at_once(streamed)
    assert type(weight) is StreamedTensor
    last: Any = model.blocks[3]
    assert torch.equal(weight.clone(), last.linear.weight.t())
    assert torch.equal(result, model(torch.ones(2, 32)))


def test_a_write_to_a_kept_view_is_reported(models: tuple[Model, Model]) -> None:
    _, streamed = models
    x = torch.ones(2, 32)
    streamed.write = "keep"
    with torch.no_grad():
        streamed(x)
        assert leases_at_once(streamed)
        streamed.write = None
        # PyTorch does not notice this write.
        memory = (ctypes.c_float * 1).from_address(streamed.kept.data_ptr())
        memory[0] += 1
        with pytest.raises(ts.ModelError, match="written"):
            streamed(x)


def test_a_parameter_that_is_set_counts(models: tuple[Model, Model]) -> None:
    model, streamed = models
    for each in (model, streamed):
        each.blocks[1].extra = nn.Parameter(torch.ones(1))  # type: ignore[union-attr]
    assert "extra" in dict(streamed.blocks[1].named_parameters())  # type: ignore[union-attr]
    block: Any = streamed.blocks[1]

    def set_in_pass(*_: Any) -> None:
        block.extra = nn.Parameter(torch.zeros(1))

    with torch.no_grad():
        streamed(torch.ones(2, 32))
        hook = block.register_forward_pre_hook(set_in_pass)
        streamed(torch.ones(2, 32))
        assert leases_at_once(streamed)
        hook.remove()
        assert float(block.extra) == 0
        streamed(torch.ones(2, 32))
        assert float(block.extra) == 0
    with pytest.raises(ts.ModelError, match="replace"):
        block.linear.weight = nn.Parameter(torch.zeros(32, 32))


def test_a_weight_cannot_be_replaced_in_a_pass(models: tuple[Model, Model]) -> None:
    model, streamed = models
    block: Any = streamed.blocks[1]

    def replace(*_: Any) -> None:
        block.linear.weight = nn.Parameter(torch.zeros(32, 32))

    hook = block.register_forward_pre_hook(replace)
    with torch.no_grad():
        with pytest.raises(ts.ModelError, match="replace"):
            streamed(torch.ones(2, 32))
        hook.remove()
        assert torch.equal(streamed(torch.ones(2, 32)), model(torch.ones(2, 32)))


def test_a_forward_that_others_wrap_still_runs(models: tuple[Model, Model]) -> None:
    model, streamed = models
    linear: Any = streamed.blocks[1].linear  # type: ignore[union-attr]
    x = torch.ones(2, 32)
    calls = []
    own = linear.forward

    def wrapped(*args: Any) -> Any:
        calls.append(args)
        return own(*args)

    def wrap(*_: Any) -> None:
        linear.forward = wrapped

    with torch.no_grad():
        linear.forward = wrapped
        for _ in range(3):
            assert torch.equal(streamed(x), model(x))
        assert leases_at_once(streamed) and len(calls) == 3
        linear.forward = own
        hook = linear.register_forward_pre_hook(wrap)
        assert torch.equal(streamed(x), model(x))
        hook.remove()
        assert torch.equal(streamed(x), model(x))
        assert len(calls) == 4, "replaced in a pass"


def test_a_limit_takes_effect_between_passes(models: tuple[Model, Model]) -> None:
    model, streamed = models
    x = torch.ones(2, 32)
    streamer = streamed._tensorstream.weights.streamer  # type: ignore[union-attr]
    streamer.set_limit(streamer.smallest_limit(), True)
    loads = sum(unit["loads"] for unit in ts.stats(streamed)["units"])
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(streamed(x), model(x))
    assert not leases_at_once(streamed)
    assert sum(unit["loads"] for unit in ts.stats(streamed)["units"]) > loads


def test_a_limit_of_another_thread_takes_effect_after_the_pass(
    models: tuple[Model, Model],
) -> None:
    model, streamed = models
    x = torch.ones(2, 32)
    streamer = streamed._tensorstream.weights.streamer  # type: ignore[union-attr]

    def limit(*_: Any) -> None:
        own = threading.Thread(target=streamer.set_limit, args=(streamer.smallest_limit(), True))
        own.start()
        own.join()

    hook = streamed.blocks[1].register_forward_pre_hook(limit)
    with torch.no_grad():
        streamed(x)
        hook.remove()
        assert leases_at_once(streamed) and streamer.limit_in_force()
        assert torch.equal(streamed(x), model(x))
    assert not leases_at_once(streamed)


def test_passes_of_several_threads(models: tuple[Model, Model]) -> None:
    model, streamed = models
    inputs = [torch.randn(2, 32) for _ in range(4)]
    wanted = [model(x).detach() for x in inputs]
    wrong: list[Any] = []

    def run(index: int) -> None:
        for step in range(50):
            x = inputs[index].clone().requires_grad_(index == 3 and step % 2 == 0)
            with torch.set_grad_enabled(index == 3):
                if not torch.equal(streamed(x).detach(), wanted[index]):
                    wrong.append((index, step))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(type(p) is StreamedTensor for p in streamed.parameters())


def test_a_trace_has_each_use(models: tuple[Model, Model], tmp_path: Path) -> None:
    _, streamed = models
    with torch.no_grad(), ts.trace(streamed, tmp_path / "trace.json"):
        streamed(torch.ones(2, 32))
    assert not leases_at_once(streamed)
    assert '"use"' in (tmp_path / "trace.json").read_text().lower()


def test_a_deleted_model_frees_its_engine_at_once(tmp_path: Path) -> None:
    model = ts.offload(Model(), ts.Config(storage_path=tmp_path, budget="16MiB"))
    with torch.no_grad():
        for _ in range(PASSES):
            model(torch.ones(2, 32))
    assert leases_at_once(model)
    streamer = weakref.ref(model._tensorstream.weights.streamer)  # type: ignore[union-attr]
    gc.collect()
    gc.disable()
    try:
        del model
        assert streamer() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_is_forked_in_a_pass(models: tuple[Model, Model]) -> None:
    model, streamed = models
    status: list[int] = []

    def fork(*_: Any) -> None:
        child = os.fork()
        if child == 0:
            kinds = {type(p) for p in streamed.blocks[0].parameters()}
            os._exit(0 if kinds == {StreamedTensor} else 1)
        status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    hook = streamed.blocks[2].register_forward_pre_hook(fork)
    with torch.no_grad():
        result = streamed(torch.ones(2, 32))
    hook.remove()
    assert leases_at_once(streamed) and status == [0]
    assert torch.equal(result, model(torch.ones(2, 32)))


def test_restore_after_such_passes(models: tuple[Model, Model]) -> None:
    model, streamed = models
    restored = ts.restore(streamed)
    for (_, own), (_, other) in zip(
        restored.named_parameters(), model.named_parameters(), strict=True
    ):
        assert type(own) is nn.Parameter and torch.equal(own, other)
