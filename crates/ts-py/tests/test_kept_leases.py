# SPDX-License-Identifier: MIT OR Apache-2.0
"""While everything is resident, leases are kept from use to use, and nothing else changes."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
from tensorstream.streaming._state import streaming_of
from tensorstream.streaming._streamed_tensor import StreamedTensor, StreamedWeight
from torch import nn
from torch.nn.utils import parametrize

#: After so many passes, leases are kept.
PASSES = 6


class Block(nn.Module):
    """Uses its own parameter, a child, and the bias of this child."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(32, 32))
        self.linear = Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.tanh(self.linear(x @ self.matrix)) + self.linear.bias
        return result


class Linear(nn.Linear):
    """A module that lets a test act while its forward runs."""

    act: Callable[[Linear, torch.Tensor], Any] | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        if self.act is not None:
            result = self.act(self, output)
            output = output if result is None else result
        return output


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.returns_weight = False

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return (x, self.last.weight.t()) if self.returns_weight else x

    @property
    def last(self) -> Linear:
        block: Any = self.blocks[3]
        linear: Linear = block.linear
        return linear


@pytest.fixture
def models(tmp_path: Path) -> tuple[Model, Model]:
    """A model in memory, and a streamed one whose leases are kept."""
    torch.manual_seed(0)
    model = Model()
    streamed = ts.offload(copy.deepcopy(model), ts.Config(storage_path=tmp_path, budget="16MiB"))
    with torch.no_grad():
        for _ in range(PASSES):
            streamed(torch.ones(2, 32))
    return model, streamed


def uses(model: Model) -> int:
    """Returns how many leases the engine has counted. Those that are kept do not count."""
    return sum(unit["uses"] for unit in ts.stats(model)["units"])


def matrices(model: Model) -> list[torch.Tensor]:
    blocks: Any = model.blocks
    return [block.matrix for block in blocks]


def keeps_leases(model: Model) -> bool:
    """Returns whether leases are kept in a pass now."""
    before = uses(model)
    with torch.no_grad():
        model(torch.ones(2, 32))
    return uses(model) == before


def both(models: tuple[Model, Model], act: Callable[[Linear, torch.Tensor], Any]) -> list[Any]:
    """Runs a pass of both models in which the last module acts. Returns both results."""
    for model in models:
        model.last.act = act
    results = [model(torch.ones(2, 32)) for model in models]
    for model in models:
        model.last.act = None
    return results


def test_results_and_names_stay_the_same(models: tuple[Model, Model]) -> None:
    model, streamed = models
    assert keeps_leases(streamed)
    loads = [unit["loads"] for unit in ts.stats(streamed)["units"]]
    names = [name for name, _ in streamed.named_parameters()]
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(2, 32)
            with mode():
                assert torch.equal(streamed(x), model(x))
            assert all(type(p) is StreamedTensor for p in streamed.parameters())
    assert [name for name, _ in streamed.named_parameters()] == names
    assert [unit["loads"] for unit in ts.stats(streamed)["units"]] == loads
    assert keeps_leases(streamed)


def test_gradients_of_the_input(models: tuple[Model, Model]) -> None:
    model, streamed = models
    own, other = (torch.ones(2, 32, requires_grad=True) for _ in range(2))
    streamed(own).sum().backward()
    model.requires_grad_(False)(other).sum().backward()
    assert own.grad is not None and other.grad is not None and torch.equal(own.grad, other.grad)
    assert keeps_leases(streamed)


def test_autocast(models: tuple[Model, Model]) -> None:
    model, streamed = models
    x = torch.ones(2, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(streamed(x), model(x))
    assert keeps_leases(streamed)


def test_a_weight_has_the_grad_mode_of_each_access(models: tuple[Model, Model]) -> None:
    seen: list[Any] = []

    def look(linear: Linear, _: torch.Tensor) -> None:
        modes = torch.no_grad, torch.enable_grad, torch.inference_mode
        for mode in modes:
            with mode():
                weight = linear.weight
                assert isinstance(weight, StreamedWeight | nn.Parameter)
                seen.append(weight.requires_grad)
                seen.append((weight.sum() * 2).requires_grad)

    with torch.no_grad():
        both(models, look)
    assert seen[:6] == seen[6:] == [True, False, True, True, True, False]


def test_functional_call_in_a_forward(models: tuple[Model, Model]) -> None:
    def call(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        plain = nn.Linear.forward
        zeros = {"weight": torch.zeros(32, 32), "bias": torch.ones(32)}
        linear.act, act = None, linear.act
        result = torch.func.functional_call(linear, zeros, (x,))
        linear.act = act
        return result + plain(linear, x)

    with torch.no_grad():
        expected, own = both(models, call)
        assert torch.equal(expected, own)
        model, streamed = models
        assert torch.equal(streamed(torch.ones(2, 32)), model(torch.ones(2, 32)))
        assert keeps_leases(streamed)


def test_a_parametrization(models: tuple[Model, Model]) -> None:
    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    model, streamed = models
    for each in models:
        parametrize.register_parametrization(each.last, "weight", Double())
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(streamed(torch.ones(2, 32)), model(torch.ones(2, 32)))


def test_a_weight_that_is_frozen_in_a_pass_stays_frozen(models: tuple[Model, Model]) -> None:
    _, streamed = models
    seen: list[bool] = []

    def freeze(of: Model) -> Callable[..., None]:
        return lambda *_: of.last.requires_grad_(False) and None

    for each in models:
        each.blocks[1].register_forward_pre_hook(freeze(each))
    with torch.no_grad():
        results = both(models, lambda linear, _: seen.append(linear.weight.requires_grad))
    assert torch.equal(*results)
    assert seen == [False, False]
    assert not streamed.last.weight.requires_grad


def test_a_write_is_reported_and_undone(models: tuple[Model, Model]) -> None:
    model, streamed = models
    x = torch.ones(2, 32)

    def write(linear: Linear, _: torch.Tensor) -> None:
        linear.weight.add_(1)

    with torch.no_grad():
        streamed.last.act = write
        with pytest.raises(ts.ModelError, match=r"blocks\.3\.linear\.weight.* written"):
            streamed(x)
        streamed.last.act = None
        for _ in range(PASSES):
            assert torch.equal(streamed(x), model(x))


def test_an_exception_ends_the_use(models: tuple[Model, Model]) -> None:
    model, streamed = models

    def fail(*_: Any) -> None:
        raise ValueError("from the forward")

    streamed.last.act = fail
    with torch.no_grad(), pytest.raises(ValueError, match="from the forward"):
        streamed(torch.ones(2, 32))
    assert all(type(p) is StreamedTensor for p in streamed.parameters())
    assert not streaming_of(streamed).shares[0].streamer.in_use()
    streamed.last.act = None
    assert torch.equal(streamed(torch.ones(2, 32)), model(torch.ones(2, 32)))
    assert keeps_leases(streamed)


def test_leases_are_kept_again_after_a_view_is_deleted(models: tuple[Model, Model]) -> None:
    _, streamed = models
    views: list[torch.Tensor] = []

    def keep(linear: Linear, _: torch.Tensor) -> None:
        views.append(linear.weight.view(-1))

    with torch.no_grad():
        streamed.last.act = keep
        streamed(torch.ones(2, 32))
        streamed.last.act = None
        assert not keeps_leases(streamed), "the view can be written to"
        views.clear()
        streamed(torch.ones(2, 32))
    assert keeps_leases(streamed)


def test_a_returned_weight_is_a_stand_in(models: tuple[Model, Model]) -> None:
    model, streamed = models
    for each in models:
        each.returns_weight = True
    with torch.no_grad():
        result, weight = streamed(torch.ones(2, 32))
        assert torch.equal(result, model(torch.ones(2, 32))[0])
    assert type(weight) is StreamedTensor
    assert torch.equal(weight.clone(), model.last.weight.t())
    streamed.returns_weight = False
    seen: list[Any] = []
    with torch.no_grad():
        streamed.last.act = lambda linear, _: linear.weight.t()
        hook = streamed.last.register_forward_hook(
            lambda *args: seen.append(args[2].clone()) or torch.ones(2, 32)
        )
        streamed(torch.ones(2, 32))
        assert torch.equal(seen[0], model.last.weight.t())
        hook.remove()
        assert type(streamed.last(torch.ones(2, 32))) is StreamedTensor


def test_a_write_to_a_kept_view_is_reported(models: tuple[Model, Model]) -> None:
    _, streamed = models
    x = torch.ones(2, 32)
    views: list[torch.Tensor] = []
    with torch.no_grad():
        streamed.last.act = lambda linear, _: views.append(linear.weight.view(-1))
        streamed(x)
        streamed.last.act = None
        # PyTorch does not notice this write.
        memory = (ctypes.c_float * 1).from_address(views[0].data_ptr())
        memory[0] += 1
        with pytest.raises(ts.ModelError, match="written"):
            streamed(x)


def test_a_limit_takes_effect_between_passes(models: tuple[Model, Model]) -> None:
    model, streamed = models
    x = torch.ones(2, 32)
    streamer = streaming_of(streamed).shares[0].streamer
    streamer.set_limit(streamer.smallest_limit(), True)
    assert streamer.limit_in_force()
    loads = sum(unit["loads"] for unit in ts.stats(streamed)["units"])
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(streamed(x), model(x))
    assert not keeps_leases(streamed)
    assert sum(unit["loads"] for unit in ts.stats(streamed)["units"]) > loads
    streamer.set_limit(16 << 20, True)
    with torch.no_grad():
        for _ in range(PASSES):
            assert torch.equal(streamed(x), model(x))
    assert keeps_leases(streamed)


def test_statistics_are_those_of_the_current_plan(
    models: tuple[Model, Model], tmp_path: Path
) -> None:
    _, streamed = models
    x = torch.ones(2, 32)
    streamer = streaming_of(streamed).shares[0].streamer
    with torch.no_grad():
        for limit in (streamer.smallest_limit(), 16 << 20):
            streamer.set_limit(limit, True)
            for _ in range(PASSES):
                streamed(x)
        assert keeps_leases(streamed)
        explained = ts.explain(streamed)
        # On a busy machine the plan changes once more.
        assert explained.read_bytes == 0 and 1 <= explained.passes <= 3
        began = time.perf_counter()
        for _ in range(100):
            streamed(x)
        with ts.trace(streamed, tmp_path / "trace.json"):
            streamed(x)
        between_s = ts.explain(streamed).between_s
    # Passes that were not measured are no time between passes.
    assert between_s < (time.perf_counter() - began) / 4


def test_the_first_passes_of_a_part_are_not_enough(tmp_path: Path) -> None:
    parts = [nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))) for _ in range(2)]
    model = nn.Sequential(*parts)
    ts.offload(model, ts.Config(storage_path=tmp_path, budget="16MiB"))
    with torch.no_grad():
        for _ in range(PASSES):
            parts[1](torch.ones(2, 32))
        for _ in range(PASSES):
            model(torch.ones(2, 32))
    assert {unit["uses"] >= 2 for unit in ts.stats(model)["units"]} == {True}


def test_a_limit_of_another_thread_takes_effect_after_the_pass(
    models: tuple[Model, Model],
) -> None:
    model, streamed = models
    streamer = streaming_of(streamed).shares[0].streamer

    def limit(*_: Any) -> None:
        own = threading.Thread(target=streamer.set_limit, args=(streamer.smallest_limit(), True))
        own.start()
        own.join()

    hook = streamed.blocks[1].register_forward_pre_hook(limit)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(streamed(torch.ones(2, 32)), model(torch.ones(2, 32)))
    hook.remove()
    assert streamer.limit_in_force()
    assert not keeps_leases(streamed)


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
    assert keeps_leases(streamed)


def test_calls_outside_of_a_pass(models: tuple[Model, Model]) -> None:
    model, streamed = models
    before = uses(streamed)
    x = torch.ones(2, 32)
    with torch.no_grad():
        assert torch.equal(streamed.last(x), model.last(x))
    assert torch.equal(streamed.last.weight + 1, model.last.weight + 1)
    assert uses(streamed) == before


def test_a_trace_has_each_use(models: tuple[Model, Model], tmp_path: Path) -> None:
    _, streamed = models
    before = uses(streamed)
    with torch.no_grad(), ts.trace(streamed, tmp_path / "trace.json"):
        streamed(torch.ones(2, 32))
    assert uses(streamed) - before >= 8
    assert '"use"' in (tmp_path / "trace.json").read_text().lower()
    assert keeps_leases(streamed)


def test_units_used_together_for_the_first_time_count_for_the_smallest_limit(
    models: tuple[Model, Model],
) -> None:
    model, streamed = models
    streamer = streaming_of(streamed).shares[0].streamer
    smallest = streamer.smallest_limit()
    with torch.no_grad():
        for _ in range(PASSES):
            own, other = (torch.block_diag(*matrices(each)) for each in models)
            assert torch.equal(own, other)
            assert torch.equal(streamed(torch.ones(2, 32)), model(torch.ones(2, 32)))
    assert keeps_leases(streamed)
    assert streamer.smallest_limit() > smallest
    streamer.set_limit(streamer.smallest_limit(), True)
    with torch.no_grad():
        assert torch.equal(torch.block_diag(*matrices(streamed)), other)


def test_passes_with_kept_leases_are_not_measured(models: tuple[Model, Model]) -> None:
    _, streamed = models
    measured = ts.stats(streamed)["recent_passes"]
    with torch.no_grad():
        for _ in range(40):
            streamed(torch.ones(2, 32))
    assert ts.stats(streamed)["recent_passes"] == measured
    assert keeps_leases(streamed)


def test_a_forward_that_returns_its_weight_is_not_compared(models: tuple[Model, Model]) -> None:
    model, streamed = models

    def give(linear: Linear, _: torch.Tensor) -> torch.Tensor:
        return linear.weight[:2]

    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(*both(models, give))
        assert torch.equal(streamed(torch.ones(2, 32)), model(torch.ones(2, 32)))
    assert keeps_leases(streamed), "the unit has no checksum"


def offload_with_cycle(path: Path) -> weakref.ref[nn.Module]:
    """Offloads a model to which the forward of one of its classes refers."""
    found: list[nn.Module] = []

    class Closed(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            assert found
            return super().forward(input)

    found.append(ts.offload(nn.Sequential(Closed(8, 8)), ts.Config(storage_path=path)))
    return weakref.ref(found[0])


def test_a_forward_that_refers_to_the_model_is_collected(tmp_path: Path) -> None:
    reference = offload_with_cycle(tmp_path)
    gc.collect()
    assert reference() is None


def test_a_deleted_model_frees_its_engine_at_once(tmp_path: Path) -> None:
    model = ts.offload(Model(), ts.Config(storage_path=tmp_path, budget="16MiB"))
    with torch.no_grad():
        for _ in range(PASSES):
            model(torch.ones(2, 32))
    assert keeps_leases(model)
    streamer = weakref.ref(streaming_of(model).shares[0].streamer)
    gc.collect()
    gc.disable()
    try:
        del model
        assert streamer() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("in_pass", [True, False])
def test_a_forked_child(models: tuple[Model, Model], in_pass: bool) -> None:
    model, streamed = models
    status: list[int] = []
    wanted = model(torch.ones(2, 32))

    def fork(*_: Any) -> None:
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            try:
                streamed.last.act = None
                for hook in list(streamed.blocks[2]._forward_pre_hooks):
                    del streamed.blocks[2]._forward_pre_hooks[hook]
                os._exit(0 if torch.equal(streamed(torch.ones(2, 32)), wanted) else 1)
            finally:
                os._exit(2)
        status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with torch.no_grad():
        if in_pass:
            hook = streamed.blocks[2].register_forward_pre_hook(fork)
            assert torch.equal(streamed(torch.ones(2, 32)), wanted)
            hook.remove()
        else:
            fork()
    assert status == [0]
    assert keeps_leases(streamed)


def test_copy_and_restore(models: tuple[Model, Model]) -> None:
    model, streamed = models
    twins: list[Any] = []

    def copy_model(*_: Any) -> None:
        twins.append(copy.deepcopy(streamed))

    hook = streamed.blocks[1].register_forward_pre_hook(copy_model)
    with torch.no_grad():
        streamed(torch.ones(2, 32))
        hook.remove()
        assert torch.equal(twins[0](torch.ones(2, 32)), model(torch.ones(2, 32)))
    restored = ts.restore(streamed)
    for (_, own), (_, other) in zip(
        restored.named_parameters(), model.named_parameters(), strict=True
    ):
        assert type(own) is nn.Parameter and torch.equal(own, other)
