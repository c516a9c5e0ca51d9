# SPDX-License-Identifier: MIT OR Apache-2.0
"""A parameter is one Python object: before it streams, while it streams, and after `restore`.

Every model here streams: its weights are more than twice its budget, and each of three passes is
compared with the model in memory.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
from tensorstream.streaming._streamed_tensor import StreamedTensor
from torch import nn

WIDTH, LAYERS = 96, 12
MODES: dict[str, Callable[[], Any]] = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}
DTYPES = [torch.float32, torch.bfloat16]


class Layer(nn.Linear):
    """Its forward uses an attribute of its weight, and can look at its parameters."""

    look: Callable[[nn.Linear], Any] | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.look is not None:
            self.look(self)
        return torch.tanh(super().forward(input)) * getattr(self.weight, "scale", 1)


def layers(dtype: torch.dtype = torch.float32, kind: type[nn.Linear] = Layer) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(WIDTH, WIDTH) for _ in range(LAYERS))).to(dtype)


def streamed(model: nn.Module, directory: Path) -> nn.Module:
    """Offloads a model with a third of the memory of its weights."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    return ts.offload(model, ts.Config(storage_path=directory, budget=total // 3))


def both(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    memory = layers(dtype)
    return memory, streamed(copy.deepcopy(memory), directory)


def require_equal(model: nn.Module, memory: nn.Module, mode: str, passes: int = 3) -> None:
    torch.manual_seed(1)
    for _ in range(passes):
        x = torch.randn(3, WIDTH).to(next(memory.parameters()).dtype)
        with MODES[mode]():
            assert torch.equal(model(x), memory(x))


def require_streamed(model: nn.Module) -> None:
    assert max(unit["loads"] for unit in ts.stats(model)["units"]) > 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_and_attributes(dtype: torch.dtype, mode: str, tmp_path: Path) -> None:
    memory, model = layers(dtype), layers(dtype)
    for each in (memory, model):
        for number, layer in enumerate(each):
            layer.weight.scale = 1 + number / 8
    before = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in before.items()}
    keyed = {parameter: name for name, parameter in before.items()}
    references = [weakref.ref(parameter) for parameter in before.values()]
    streamed(model, tmp_path)
    seen: list[bool] = []
    for name, each in model.named_children():
        each.look = lambda own, name=name: seen.append(
            own.weight is before[f"{name}.weight"]
            and own.bias is before[f"{name}.bias"]
            and names[id(own.weight)] == keyed[own.weight] == f"{name}.weight"
            and isinstance(own.weight, nn.Parameter)
            and own.weight.requires_grad
        )
    require_equal(model, memory, mode)
    require_streamed(model)
    assert len(seen) == 3 * LAYERS and all(seen)
    for _ in range(2):
        with MODES[mode]():
            assert all(own is before[name] for name, own in model.named_parameters())
        assert [reference() for reference in references] == [*before.values()]
        ts.restore(model)
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
        require_equal(model, memory, mode)
        streamed(model, tmp_path)
    assert vars(ts.restore(model)[0].weight) == {"scale": 1}


def test_optimizers_and_hooks_outlive_offloading(tmp_path: Path) -> None:
    def trained(offloads: bool) -> tuple[list[float], list[int]]:
        model = layers()
        counts: list[int] = []
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: counts.append(grad.numel()))
            parameter.register_post_accumulate_grad_hook(lambda own: counts.append(own.dim()))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        torch.manual_seed(2)
        losses = []
        for step in range(6):
            loss = model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            if offloads and step % 2:
                streamed(model, tmp_path)
                with torch.no_grad():
                    model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)))
                ts.restore(model)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, counts

    assert trained(offloads=True) == trained(offloads=False)


def test_graphs_outlive_offloading_and_restoring(tmp_path: Path) -> None:
    memory = layers()
    x = torch.randn(3, WIDTH)
    memory(x).sum().backward()
    expected = [parameter.grad for parameter in memory.parameters()]
    model = layers()
    before = model(x)
    streamed(model, tmp_path)
    while_streamed = model(x)
    before.sum().backward()  # the graph has the memory from before
    ts.restore(model)
    check_gradients(model, expected)
    model.zero_grad()
    seen: list[Any] = []
    model[0].weight.register_post_accumulate_grad_hook(seen.append)
    while_streamed.sum().backward()  # the graph has the stand-ins
    check_gradients(model, expected)
    assert seen[0] is model[0].weight and len(seen) == 1
    model(x).sum().backward()
    check_gradients(model, [2 * gradient for gradient in expected if gradient is not None])


def check_gradients(model: nn.Module, expected: list[Any]) -> None:
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, wanted)


def test_threads_share_parameters(tmp_path: Path) -> None:
    memory = layers()
    total = sum(parameter.nbytes for parameter in memory.parameters())
    config = ts.Config(storage_path=tmp_path, budget=total // 3, max_passes=3)
    model = ts.offload(copy.deepcopy(memory), config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                expected = memory(x)
                for _ in range(20):
                    assert torch.equal(model(x), expected)
                    assert [names[id(parameter)] for parameter in model.parameters()]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert {type(parameter) for parameter in model.parameters()} == {StreamedTensor}
    require_streamed(model)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forwards_of_classes_are_looked_up_at_each_call(
    dtype: torch.dtype, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, model = both(tmp_path, dtype)
    require_equal(model, memory, mode)
    plain = nn.Linear.forward
    with monkeypatch.context() as patched:
        patched.setattr(nn.Linear, "forward", lambda self, x: plain(self, x) * 2)
        require_equal(model, memory, mode)
    require_equal(model, memory, mode)

    class Other(Layer):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input + self.weight.sum(0) * 0.5

    for each in (memory, model):
        each[3].__class__ = Other
        each[5].forward = types.MethodType(lambda self, x: x @ self.weight - self.bias, each[5])
        each[7] = torch.fx.symbolic_trace(nn.Sequential(nn.Tanh(), nn.ReLU()))
    require_equal(model, memory, mode)
    for each in (memory, model):
        del each[5].forward
        node = next(node for node in each[7].graph.nodes if node.target == "1")
        node.replace_all_uses_with(node.args[0])
        each[7].graph.erase_node(node)
        each[7].recompile()
    require_equal(model, memory, mode)
    require_streamed(model)
    ts.restore(model)
    require_equal(model, memory, mode)


def test_questions_about_methods_are_answered_as_in_memory(tmp_path: Path) -> None:
    memory, model = both(tmp_path)
    require_equal(model, memory, "no_grad")
    for name in ("forward", "__call__", "_apply", "load_state_dict", "state_dict", "train"):
        for own, other in zip([model, *model], [memory, *memory], strict=True):
            method, wanted = getattr(own, name), getattr(other, name)
            assert method == getattr(own, name) and method.__self__ is own
            assert method.__func__ is wanted.__func__
            assert inspect.signature(method) == inspect.signature(wanted)
            assert inspect.getsource(method) == inspect.getsource(wanted)
            assert method.__code__.co_varnames == wanted.__code__.co_varnames
            assert inspect.ismethod(method) and method.__name__ == wanted.__name__
    assert vars(model[0]).keys() == vars(memory[0]).keys()
    assert type(model._parameters) is dict and type(model[0]) is Layer


class Delegates(nn.Module):
    """Delegates unknown attributes to what it wraps, as libraries' wrappers do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.own = nn.Parameter(torch.full((WIDTH,), 3.0))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x) * self.own
        return result


class Slotted:
    """Not a module, but contains some."""

    def __init__(self, model: nn.Module) -> None:
        self.models = [model, {"same": model}]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.models[1]["same"](x)  # type: ignore[index]
        return result


@pytest.mark.parametrize("around", [Delegates, nn.Sequential, Slotted])
def test_wrappers_are_copied(around: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    memory, model = both(tmp_path)
    wrapped, expected = around(model), around(memory)
    x = torch.randn(3, WIDTH)
    for _ in range(2):
        wrapped = copy.deepcopy(wrapped)
        assert type(wrapped) is type(expected)
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(wrapped(x), expected(x))
                assert torch.equal(model(x), memory(x))
    require_streamed(model)


def test_parts_outlive_the_model(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = layers()
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(self.encoder(x))
            return result

    torch.manual_seed(0)
    memory = Model()
    part = streamed(copy.deepcopy(memory), tmp_path).encoder
    assert isinstance(part, nn.Module)
    gc.collect()
    require_equal(part, memory.encoder, "no_grad")
    require_streamed(part)
    twin: Any = copy.deepcopy(nn.ModuleDict({"encoder": part}))
    require_equal(twin["encoder"], memory.encoder, "no_grad")
    assert {type(p) for p in twin.parameters()} != {nn.Parameter}
    with pytest.raises(ts.ModelError, match="already offloaded"):
        ts.offload(part, ts.Config(storage_path=tmp_path, budget="1MiB"))
    engine = weakref.ref(next(part.parameters())._ref.weights)  # type: ignore[attr-defined]
    ts.restore(part)
    require_equal(part, memory.encoder, "grad")
    require_equal(twin["encoder"], memory.encoder, "no_grad")
    del twin
    assert engine() is None, "the engine ends with the last parameter that streams"


def test_calls_from_outside_change_nothing_if_they_are_refused(tmp_path: Path) -> None:
    class Around(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.stem, self.body, self.head = nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, 4)
            self.register_buffer("mean", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(self.body(self.stem(x)))
            return result

    memory, model = both(tmp_path)
    wrapper, expected = Around(model), Around(memory)
    state = {name: value + 1 for name, value in expected.state_dict().items()}
    refused: list[Callable[[], Any]] = [
        wrapper.half,
        wrapper.double,
        lambda: wrapper.to(torch.bfloat16),
        lambda: wrapper.to_empty(device="cpu"),
        lambda: nn.ModuleList([nn.Linear(2, 2), wrapper]).to("meta"),
        lambda: wrapper.load_state_dict(state),
        lambda: wrapper.load_state_dict(state, assign=True),
        lambda: nn.Sequential(wrapper).load_state_dict({f"0.{k}": v for k, v in state.items()}),
    ]
    for call in refused:
        with pytest.raises(ts.ModelError, match="nothing was changed"):
            call()
        require_equal(wrapper, expected, "no_grad")
        assert wrapper.mean.dtype == torch.float32
    equal = {name: value.clone() for name, value in expected.state_dict().items()}
    equal["stem.bias"] += 1
    for each in (wrapper, expected):
        assert str(each.load_state_dict(equal)) == "<All keys matched successfully>"
        assert "stem.weight" in each.load_state_dict({}, strict=False).missing_keys
    require_equal(wrapper, expected, "no_grad")
    assert {type(p) for p in model.parameters()} == {StreamedTensor}
    require_streamed(model)
