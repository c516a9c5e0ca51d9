# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests user code that writes to, moves, ties, interrupts or forks a streamed model.

The result is that of the model in memory, or a clear error that leaves the model usable.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
import os
import random
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
import tensorstream as ts
import torch
from torch import nn
from torch.nn import functional

WIDTH = 128
UNIT = 69632  # a Linear(128, 128) in memory
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
#: Budgets for three units, and for all of them.
BUDGETS = [3 * UNIT, 1 << 22]


def layers(
    count: int = 8, make: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)
) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for _ in range(count)))


def streamed(model: nn.Module, path: Path, budget: int) -> Any:
    return ts.offload(copy.deepcopy(model), ts.Config(storage_path=path, budget=budget))


def require_right(model: nn.Module, reference: nn.Module, passes: int = 3) -> None:
    with torch.no_grad():
        expected = reference(X)
        for _ in range(passes):
            assert torch.equal(model(X), expected)


class Writes(nn.Linear):
    """Changes its weight in its forward."""

    how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            match self.how:
                case "data.mul_":
                    self.weight.data.mul_(0.9)
                case "data =":
                    self.weight.data = functional.normalize(self.weight.data)
                case "data.copy_":
                    self.weight.data.copy_(self.weight.data * 0.9)
                case "data[0] =":
                    self.weight.data[0] = self.weight.data[0] * 0.5
                case "detach().add_":
                    self.weight.detach().add_(1)
                case "numpy":
                    self.weight.detach().numpy()[:] *= 0.9
                case "data.numpy":
                    self.weight.data.numpy()[0] = 0
                case "a view's numpy":
                    self.weight.detach()[0].numpy()[:] = 7
                case "a transposed view's numpy":
                    self.weight.data.t().view(WIDTH, 2, -1)[1].numpy().__imul__(2)
        return super().forward(x)


WRITES = [
    "data.mul_",
    "data =",
    "data.copy_",
    "data[0] =",
    "detach().add_",
    "numpy",
    "data.numpy",
    "a view's numpy",
    "a transposed view's numpy",
]


@pytest.mark.parametrize(("how", "budget"), list(itertools.product(WRITES, BUDGETS)))
def test_a_write_in_a_forward_is_refused(how: str, budget: int, tmp_path: Path) -> None:
    reference = layers(make=lambda: Writes(WIDTH, WIDTH))
    model = streamed(reference, tmp_path, budget)
    model[5].how = how
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises((ts.ModelError, ValueError), match=r"cannot be changed|read-only"):
                model(X)
    model[5].how = ""
    require_right(model, reference)
    require_right(ts.restore(model), reference)


class WritesPastPyTorch(nn.Linear):
    """Changes the bytes of its weight in its forward in ways that PyTorch does not notice."""

    how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            match self.how:
                case "a row's array":
                    self.weight[3].numpy()[:] = 7
                case "storage":
                    self.weight.untyped_storage().fill_(1)
                case "fused optimizer":
                    # The stub of PyTorch lacks this function.
                    step = torch._fused_sgd_  # type: ignore[attr-defined]
                    rates = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.0, "dampening": 0.0}
                    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
                    step([self.weight], [torch.ones_like(self.weight)], [], **rates, **flags)
                case "address":
                    ctypes.memset(self.weight.data_ptr() + 4096, 1, 1)
        return super().forward(x)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("how", ["a row's array", "storage", "fused optimizer", "address"])
def test_a_write_past_pytorch_is_detected(how: str, budget: int, tmp_path: Path) -> None:
    reference = layers(make=lambda: WritesPastPyTorch(WIDTH, WIDTH))
    model = streamed(reference, tmp_path, budget)
    if not ts.stats(model)["watches_writes"]:
        pytest.skip(
            "this system cannot track writes to memory (needs Linux 6.7 or later, with userfaultfd "
            "allowed)"
        )
    require_right(model, reference)
    for _ in range(2):
        kept = ts.stats(model)["units"][5]["resident"]
        model[5].how = how
        found = pytest.raises(ts.ModelError, match=r"`5.weight`.* was written to in place")
        with torch.no_grad(), found if kept else contextlib.nullcontext():
            model(X)
        model[5].how = ""
        require_right(model, reference)
    require_right(ts.restore(model), reference)


FORBIDDEN: dict[str, Callable[[Any], Any]] = {
    "data.mul_": lambda m: [p.data.mul_(0.5) for p in m.parameters()],
    "data =": lambda m: [setattr(p, "data", p.data * 0.5) for p in m.parameters()],
    "data +=": lambda m: [setattr(layer.weight, "data", layer.weight.data + 0.1) for layer in m],
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "to meta": lambda m: m.to("meta"),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
    "a part": lambda m: m[3].half(),
    "numpy": lambda m: [p.detach().numpy().__imul__(0.5) for p in m.parameters()],
    "foreach": lambda m: torch.no_grad()(torch._foreach_mul_)(list(m.parameters()), 0.5),
    "init": lambda m: m.apply(
        lambda part: nn.init.zeros_(part.weight) if isinstance(part, nn.Linear) else None
    ),
    "load_state_dict": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "twice": lambda m: ts.offload(m, ts.Config(budget="1MiB", storage_path="x")),
    "export": lambda m: torch.export.export(m, (X,)),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("what", "budget"), list(itertools.product(FORBIDDEN, BUDGETS)))
def test_changes_of_weights_are_refused_without_side_effects(
    what: str, budget: int, tmp_path: Path
) -> None:
    reference = layers()
    reference.register_buffer("own", torch.ones(3))
    model = streamed(reference, tmp_path, budget)
    for _ in range(2):
        with pytest.raises((ts.ModelError, ValueError)) as caught:
            FORBIDDEN[what](model)
        assert isinstance(caught.value, ts.TensorStreamError) or "read-only" in str(caught.value)
        assert model.own.dtype == torch.float32 and model.own.device.type == "cpu"
        require_right(model, reference)
    require_right(ts.restore(model), reference)


ALLOWED: dict[str, Callable[[Any], Any]] = {
    "assignment": lambda m: setattr(m[2], "weight", nn.Parameter(torch.zeros(WIDTH, WIDTH))),
    "requires_grad_": lambda m: m.requires_grad_(False).requires_grad_(True),
    "tie": lambda m: setattr(m[2], "weight", m[1].weight),
    "delete": lambda m: (delattr(m[2], "bias"), m[2].register_parameter("bias", None)),
    "weight norm": lambda m: nn.utils.weight_norm(m[0]),
    "parametrization": lambda m: nn.utils.parametrizations.weight_norm(m[0]),
    "attribute": lambda m: setattr(m[0].weight, "scale", 2),
    "class": lambda m: setattr(m[1], "__class__", Negated),
    "forward": lambda m: setattr(m[1], "forward", lambda x: x * 2),
    "hook": lambda m: m[1].register_forward_hook(lambda *args: args[2] + 1),
}


class Negated(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("what", "budget"), list(itertools.product(ALLOWED, BUDGETS)))
def test_changes_of_modules_act_as_in_memory(what: str, budget: int, tmp_path: Path) -> None:
    reference = layers()
    model = streamed(reference, tmp_path, budget)
    require_right(model, reference)
    for each in (reference, model):
        ALLOWED[what](each)
    for _ in range(2):
        require_right(model, reference)
    require_right(ts.restore(model), reference)


def test_libraries_that_move_weights_get_a_model_error(tmp_path: Path) -> None:
    import accelerate
    from accelerate.utils import set_module_tensor_to_device

    reference = layers()
    model = streamed(reference, tmp_path, BUDGETS[0])
    for call in (
        lambda: accelerate.cpu_offload(model),
        lambda: set_module_tensor_to_device(
            model, "0.weight", "cpu", value=torch.zeros(WIDTH, WIDTH)
        ),
        lambda: set_module_tensor_to_device(model, "0.weight", "meta"),
    ):
        with pytest.raises(ts.ModelError):
            call()
        require_right(model, reference)
    require_right(accelerate.Accelerator(cpu=True).prepare(model), reference)


NO_OPS: dict[str, Callable[[Any], Any]] = {
    "to cpu": lambda m: m.to("cpu"),
    "cpu": lambda m: m.cpu(),
    "to device": lambda m: m.to(next(m.parameters()).device),
    "float": lambda m: m.float(),
    "to float32": lambda m: m.to(torch.float32),
    "train": lambda m: m.train(),
    "zero_grad": lambda m: m.zero_grad(),
    "requires_grad_(False)": lambda m: m.requires_grad_(False),
    "own state": lambda m: m.load_state_dict(m.state_dict()),
    "own weight": lambda m: setattr(m[2], "weight", m[2].weight),
}


@pytest.mark.parametrize(("what", "grad"), list(itertools.product(NO_OPS, [True, False])))
def test_moves_without_effect_are_allowed(what: str, grad: bool, tmp_path: Path) -> None:
    model = ts.offload(
        nn.Sequential(*layers(4), nn.LayerNorm(WIDTH)),
        ts.Config(storage_path=tmp_path, budget=BUDGETS[0]),
    )
    plain = nn.Sequential(*layers(4), nn.LayerNorm(WIDTH))
    with torch.set_grad_enabled(grad):
        NO_OPS[what](model)
        NO_OPS[what](plain)
    require_right(model, plain)
    recurrent = streamed(nn.LSTM(WIDTH, WIDTH), tmp_path, 1 << 20)
    with torch.set_grad_enabled(grad):
        recurrent.to("cpu")
    assert recurrent(X)[0].shape == (3, WIDTH)


def test_tied_weights_stay_one_object(tmp_path: Path) -> None:
    model = layers(5)
    model[4].weight = model[1].weight
    streamed_model = streamed(model, tmp_path, BUDGETS[0])
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(3):
                assert (
                    len(list(streamed_model.named_parameters()))
                    == len(list(model.named_parameters()))
                    == 9
                )
                assert streamed_model[4].weight is streamed_model[1].weight
                streamed_model(X)
    assert sum(p.numel() for p in streamed_model.parameters()) == sum(
        p.numel() for p in model.parameters()
    )


@pytest.mark.parametrize("budget", [2 * UNIT, *BUDGETS])
def test_autocast_does_not_cache_weights(budget: int, tmp_path: Path) -> None:
    reference = layers(12)
    model = streamed(reference, tmp_path, budget)
    for mode, enabled in itertools.product((torch.no_grad, torch.inference_mode), (True, False)):
        with mode(), torch.autocast("cpu", torch.bfloat16, cache_enabled=enabled):
            expected = reference(X)
            for _ in range(3):
                assert torch.equal(model(X), expected)


@pytest.mark.parametrize("share", [0.15, 0.4, 1.3])
def test_adapters_train_on_a_streamed_model(share: float, tmp_path: Path) -> None:
    """Trains low-rank adapters on frozen weights. The autograd graph keeps no weights."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base
            torch.manual_seed(3)
            self.down = nn.ParameterList(nn.Parameter(torch.randn(4, WIDTH)) for _ in range(12))
            self.up = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, 4)) for _ in range(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            layers: Any = self.base
            for layer, down, up in zip(layers, self.down, self.up, strict=True):
                x = torch.tanh(layer(x) + x @ down.t() @ up.t())
            return x

    base = layers(12).requires_grad_(False)
    total = sum(p.nbytes for p in base.parameters())
    expected, got = (
        Adapted(copy.deepcopy(base)),
        Adapted(streamed(base, tmp_path, int(total * share) + 4096)),
    )
    for model in (expected, got):
        for _ in range(2):
            model(X).square().mean().backward()
    for a, b in zip([*expected.down, *expected.up], [*got.down, *got.up], strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a.grad, b.grad) and a.grad.any()


def test_a_damaged_stored_file_is_rewritten(tmp_path: Path) -> None:
    reference = layers()
    streamed(reference, tmp_path, BUDGETS[0])
    (file,) = tmp_path.iterdir()
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"\xff\x00\xff\x00")
    model = streamed(reference, tmp_path, BUDGETS[0])
    require_right(model, reference)
    require_right(ts.restore(model), reference)


def test_a_scripted_model_is_refused_unchanged(tmp_path: Path) -> None:
    reference = layers()
    for compiled in (
        torch.jit.script(copy.deepcopy(reference)),
        torch.jit.trace(copy.deepcopy(reference), X),
    ):
        for model in (compiled, nn.Sequential(nn.Linear(WIDTH, WIDTH), compiled)):
            with pytest.raises(ts.ModelError, match=r"TorchScript \(.*\) is not supported"):
                ts.offload(model, ts.Config(storage_path=tmp_path, budget=BUDGETS[0]))
        require_right(compiled, reference)


@pytest.mark.usefixtures("no_collector_callbacks")
def test_a_hundred_interrupted_forwards_leave_a_working_model(tmp_path: Path) -> None:
    reference = layers(12)
    with torch.no_grad():
        expected = reference(X)
    model = streamed(reference, tmp_path, BUDGETS[0])
    generator = random.Random(1)
    interrupted = 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while interrupted < 100:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + generator.random() * 0.004)
                with torch.no_grad():
                    for _ in range(50):
                        model(X)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            with torch.no_grad():
                assert torch.equal(model(X), expected), f"after interrupt {interrupted}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    require_right(ts.restore(model), reference)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Disables OpenMP threads, which do not survive a fork."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("used", "budget"), list(itertools.product([False, True], BUDGETS)))
def test_a_forked_child_runs_the_model_and_exits(used: bool, budget: int, tmp_path: Path) -> None:
    reference = layers()
    with torch.no_grad():
        expected = reference(X)
        model = streamed(reference, tmp_path, budget)
        if used:
            model(X)
    require_right_in_child(model, expected)
    require_right(model, reference)


def require_right_in_child(model: nn.Module, expected: torch.Tensor) -> None:
    """Forks, and requires that the child runs the model, and that it exits."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with torch.no_grad():
                outcome = (
                    "equal" if all(torch.equal(model(X), expected) for _ in range(2)) else "wrong"
                )
        except BaseException as error:
            outcome = repr(error)
        os.write(writing, outcome.encode())
        os._exit(0)
    os.close(writing)
    ready = select.select([reading], [], [], 30)[0]
    outcome = os.read(reading, 999).decode() if ready else "nothing"
    os.close(reading)
    if not ready:
        os.kill(child, signal.SIGKILL)
    assert (outcome, os.waitpid(child, 0)[1]) == ("equal", 0)


@pytest.mark.usefixtures("one_thread")
def test_many_forked_children_run_models(tmp_path: Path) -> None:
    """Idle threads of the parent must not be in a list that the threads of a child use."""
    reference = layers()
    with torch.no_grad():
        expected = reference(X)
    for _ in range(100):
        model = streamed(reference, tmp_path, BUDGETS[0])
        require_right(model, reference, passes=1)
        require_right_in_child(model, expected)


EXITS = {
    "streams": "m(x)",
    # A daemon thread in a forward is not tested, because PyTorch itself then aborts.
    "after another thread": "t = threading.Thread(target=lambda: [m(x) for _ in range(9)]); "
    "t.start(); t.join()",
    "a child that only exits": "m(x); pid = os.fork(); sys.exit(0) if pid == 0 else "
    "print(os.waitpid(pid, 0)[1])",
    "restored": "m(x); ts.restore(m)",
}


@pytest.mark.parametrize("state", EXITS)
def test_a_program_exits_cleanly_in_every_state(
    state: str, programs: preloaded.Server, tmp_path: Path
) -> None:
    program = f"""
import os, sys, threading, time, torch, tensorstream as ts
torch.set_num_threads(1); torch.set_grad_enabled(False)
m = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)]); x = torch.ones(1, 128)
ts.offload(m, ts.Config(storage_path={str(tmp_path)!r}, budget={3 * UNIT}))
{EXITS[state]}
"""
    done = programs.run_code(program)
    output = (done.returncode, done.stdout.strip(), done.stderr)
    assert output == (0, "0" if "fork" in EXITS[state] else "", "")


def test_invalid_settings_are_refused_with_advice(tmp_path: Path) -> None:
    import transformers

    linear = nn.Linear(4, 4)
    for config, words in (
        ("1MiB", "got str"),
        ({"budget": "1MiB"}, r"use Config\(\*\*settings\)"),
        (transformers.LlamaConfig(), "model_config"),
    ):
        with pytest.raises(ts.ConfigurationError, match=words):
            # The configuration is invalid on purpose.
            ts.offload(linear, config)  # type: ignore[arg-type]
    for fields, words in (
        ({"cache_size_layers": 3}, "set `budget`"),
        ({"chunk_size_mb": 4}, "io_depth"),
        ({"bugdet": 3}, "did you mean `budget`"),
        ({"compression_level": 3}, "compression_enabled"),
    ):
        with pytest.raises(ts.ConfigurationError, match=words):
            # The fields are invalid on purpose.
            ts.Config(**fields)  # type: ignore[arg-type]
    with pytest.raises(ts.ConfigurationError, match="keyword arguments"):
        # Config takes no positional arguments.
        ts.Config("600MiB")  # type: ignore[misc]
    assert ts.Config(storage_path="~/weights").storage_path == str(Path.home() / "weights")


def test_the_budget_is_limited_to_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20
    monkeypatch.setattr(ts._native, "available_memory", lambda: 350 * mib)

    def fitted(budget: int | None, smallest: int = 125) -> int:
        return ts.Config(budget=budget).fitted_bytes(smallest * mib, 2000 * mib)

    assert fitted(230 * mib) == 230 * mib
    with pytest.warns(ts.BudgetWarning, match="400 MiB does not fit: 350 MiB are available"):
        assert 230 * mib < fitted(400 * mib) < 235 * mib
    with pytest.warns(ts.BudgetWarning):
        assert fitted(300 * mib) == fitted(1500 * mib), "both get the same budget"
    assert ts.Config(budget="3000MiB").fitted_bytes(mib, 200 * mib) == 3000 * mib, (
        "the model needs less"
    )
    assert fitted(None) == 175 * mib
    assert fitted(None, smallest=200) == 200 * mib, (
        "the smallest budget, because half of the memory is too little"
    )
    for budget in (None, 400 * mib):
        with pytest.raises(
            ts.BudgetError,
            match="350 MiB are available, but the model needs at least 255",
        ):
            fitted(budget, smallest=255)
    assert fitted(None, smallest=254) == 254 * mib
