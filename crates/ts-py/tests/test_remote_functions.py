# SPDX-License-Identifier: MIT OR Apache-2.0
"""Python functions that run on machines as one call."""

from __future__ import annotations

import enum
import linecache
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import tensorstream as ts
import torch
import torch.nn.functional as F
from serving import SERVE, Serving
from tensorstream.errors import (
    ConfigurationError,
    CrossMachineError,
    RemoteOutOfMemoryError,
    RemoteTensorError,
)
from tensorstream.remote import RemoteMachine, function, load_state_dict
from torch import nn


class Pair(NamedTuple):
    one: int
    other: int


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.StrEnum):
    SLOW = "slow"


SCALE = 3.0
NAMES = {"half": (torch.float16, [1, None])}
WEIGHT = torch.ones(2)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


@function
def normalized(x: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """Returns x without its mean."""
    return (x - x.mean()) / (x.std() + eps)


@function
def newton(x: torch.Tensor, steps: int = 20) -> tuple[torch.Tensor, dict[str, Any]]:
    root = x
    count = 0
    while count < steps and float((root * root - x).abs().max()) > 1e-9:
        root = (root + x / root) / 2
        count += 1
    return root, {"steps": count, "none": None, 3: [math.sqrt(4.0), 1 + 2j, (True, "x")]}


@function
def mixed(layers: list[torch.Tensor], names: dict[str, Any]) -> torch.Tensor:
    out = scaled(normalized(layers[0]))
    for layer in layers[1:]:
        out = F.gelu(out @ layer)
    assert NAMES["half"][1] == [1, None]
    return out.to(names.get("dtype", NAMES["half"][0]))


@function
def drawn(like: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(like) + torch.rand(3, device=like.device)


@function
def filled(x: torch.Tensor, value: float) -> None:
    x.fill_(value)


@function
def failing(x: torch.Tensor) -> float:
    size = x.shape[0]
    return 1 / (size - 3)


@function
def gradient(x: torch.Tensor) -> torch.Tensor:
    weight = torch.ones_like(x, requires_grad=True)
    (weight * x * x).sum().backward()
    assert weight.grad is not None
    return weight.grad


@function
def uses_a_tensor(x: torch.Tensor) -> torch.Tensor:
    return x + WEIGHT


@function
def endless(x: torch.Tensor) -> None:
    while True:
        x.add_(1)


@pytest.fixture(scope="module", params=["mock", "local", "tcp"])
def machine(request: pytest.FixtureRequest) -> Iterator[RemoteMachine]:
    if request.param == "tcp":
        options = {"--allow-functions": "any,torch.nn.functional", "--session-memory": "1GiB"}
        with Serving(options) as serving, RemoteMachine("tcp", serving.address) as started:
            yield started
    else:
        with RemoteMachine(request.param) as started:
            yield started


def test_a_function_runs_as_one_call(machine: RemoteMachine) -> None:
    x = torch.randn(5, dtype=torch.float64)
    there = x.to(machine.device())
    local = normalized.local_function
    expected = local(x)
    waits = machine.stats()["waits"]
    assert torch.equal(normalized(there).cpu(), expected)
    assert torch.equal(normalized(there, eps=0.5).cpu(), local(x, eps=0.5))
    assert normalized(there).device == machine.device()
    y = x.abs() + 0.1
    there = y.to(machine.device())
    waits = machine.stats()["waits"]
    root, rest = newton(there)
    assert machine.stats()["waits"] - waits == 1
    expected, expected_rest = newton.local_function(y)
    assert torch.equal(root.cpu(), expected)
    assert rest == expected_rest and isinstance(rest[3][2], tuple)
    assert (normalized.__name__, normalized.__doc__) == (
        "normalized",
        "Returns x without its mean.",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_function_uses_its_module(machine: RemoteMachine, dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layers = [torch.randn(4, 4).to(dtype) for _ in range(3)]
    there = [layer.to(machine.device()) for layer in layers]
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            got = mixed(there, {"dtype": dtype})
        expected = scaled(normalized.local_function(layers[0]))
        for layer in layers[1:]:
            expected = F.gelu(expected @ layer)
        assert got.dtype == dtype
        assert torch.equal(got.cpu(), expected)
    assert mixed(there, {}).dtype == torch.float16
    torch.set_num_threads(threads)


def test_results_are_tensors_of_the_machine(machine: RemoteMachine) -> None:
    @function
    def same(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, x.T, x[0], x.conj(), x.conj().imag

    x = torch.randn(2, 3, dtype=torch.complex64)
    there = x.to(machine.device())
    expected = (x, x.T, x[0], x.conj(), x.conj().imag)
    for got, wanted in zip(same(there), expected, strict=True):
        assert torch.equal(got.cpu(), wanted)
        assert torch.equal(got[1:].cpu(), wanted[1:])
        got.zero_()
    assert torch.equal(same(there.conj())[0].cpu(), x.conj())
    assert torch.equal(there.cpu(), x)


def test_functions_draw_the_numbers_of_the_session(machine: RemoteMachine) -> None:
    torch.manual_seed(5)
    expected = drawn.local_function(torch.zeros(3))
    after = torch.rand(2)
    torch.manual_seed(5)
    assert torch.equal(drawn(torch.zeros(3, device=machine.device())).cpu(), expected)
    assert torch.equal(torch.rand(2, device=machine.device()).cpu(), after)


def test_functions_can_write_to_their_arguments(machine: RemoteMachine) -> None:
    x = torch.zeros(4, device=machine.device())
    assert x[1].item() == 0.0
    filled(x[:2], 7.0)
    assert x.tolist() == [7.0, 7.0, 0.0, 0.0]
    scalar = x[3]
    assert scalar.item() == 0.0
    filled(scalar, 2.0)
    assert scalar.item() == 2.0
    assert torch.equal(gradient(x).cpu(), x.cpu() ** 2)


def test_errors_of_functions_have_their_traceback(machine: RemoteMachine) -> None:
    x = torch.zeros(3, device=machine.device())
    with pytest.raises(RemoteTensorError, match=r"ts:\d+: failing: ZeroDivisionError") as raised:
        failing(x)
    (note,) = raised.value.__notes__
    assert "return 1 / (size - 3)" in note and "_functions.py" not in note
    assert failing(torch.zeros(4, device=machine.device())) == 1.0


def test_what_cannot_be_sent_is_refused(machine: RemoteMachine) -> None:
    x = torch.ones(2, device=machine.device())
    offset = 3.0

    @function
    def closure(x: torch.Tensor) -> torch.Tensor:
        return x + offset

    space: dict[str, Any] = {}
    exec("def unknown(x): return x", space)
    generator = random.Random(1)
    for call, message in (
        (lambda: closure(x), r"variables of an enclosing function or of a decorator \(offset\)"),
        (lambda: uses_a_tensor(x), "it uses WEIGHT, a Tensor"),
        (lambda: function(lambda x: x)(x), "cannot send <lambda>"),
        (lambda: function(space["unknown"])(x), "its source is unknown"),
        (lambda: function(by="name")(closure.local_function)(x), "cannot name"),
        (lambda: normalized(torch.ones(2)), "an argument on cpu"),
        (lambda: function(int)(3), "expected a function that is written in Python"),
        (lambda: function(by="x")(scaled), "invalid by"),  # type: ignore[call-overload]  # wrong
        (lambda: drawn(3), "has no tensors among its arguments"),
        (lambda: normalized(x.requires_grad_()), "is not differentiated"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            call()
    x = x.detach()
    for value, name in (
        (generator, "Random"),
        (Pair(1, 2), "Pair"),
        (Level.LOW, "Level"),
        (Mode.SLOW, "Mode"),
    ):
        with pytest.raises(ConfigurationError, match=f"cannot pass a {name}: expected tensors"):
            normalized(x, eps=value)  # type: ignore[arg-type]  # wrong
    with pytest.raises(ConfigurationError, match="a function, not a method"):

        class Model:
            @function
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x

    with RemoteMachine.mock() as other:
        with pytest.raises(CrossMachineError):
            mixed([x, torch.ones(2, 2, device=other.device())], {})
        with pytest.raises(CrossMachineError):
            mixed([x], {"dtype": other.device()})

    @function
    def returns_a_module(x: torch.Tensor) -> Any:
        return nn.Linear(1, 1)

    with pytest.raises(RemoteTensorError, match="cannot pass a Linear"):
        returns_a_module(x)

    @function
    def returns_nothing_real(x: torch.Tensor) -> Any:
        return torch.empty(3, device="meta")

    @function
    def returns_sparse(x: torch.Tensor) -> Any:
        return x.to_sparse()

    @function
    def raises_without_a_text(x: torch.Tensor) -> None:
        class Odd(Exception):
            def __str__(self) -> str:
                raise ValueError

        raise Odd

    for odd, message in (
        (returns_nothing_real, "cannot return a tensor on meta"),
        (returns_sparse, "cannot return a sparse"),
        (raises_without_a_text, "Odd: <exception str"),
    ):
        with pytest.raises(RemoteTensorError, match=message):
            odd(x)

    @function
    def needs_a_module(x: torch.Tensor) -> None:
        import nothing_of_this_name  # noqa: F401  # there is none

    with pytest.raises(RemoteTensorError, match="ModuleNotFoundError"):
        needs_a_module(x)

    @function
    def exits(x: torch.Tensor) -> None:
        raise SystemExit(3)

    with pytest.raises(RemoteTensorError, match="SystemExit: 3"):
        exits(x)
    # The arguments can still be used.
    assert normalized(x).shape == (2,)


if TYPE_CHECKING:
    Unknown = Any  # the machine does not have it


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def calls_doubled(x: torch.Tensor) -> torch.Tensor:
    return doubled(x)


ALIAS = doubled


def test_names_mean_what_they_mean_here(machine: RemoteMachine) -> None:
    factors = []
    x = torch.arange(3.0)
    there = x.to(machine.device())
    for factor in (2.0, 5.0):

        @function
        def scale(
            x: torch.Tensor, factor: float = factor, *, act: Any = doubled, off: float = SCALE
        ) -> torch.Tensor:
            WEIGHT = 1.0  # hides the tensor of the module
            add: Unknown = lambda SCALE: SCALE + off  # noqa: E731  # hides a number of the module
            text = """of
several lines"""
            assert len(text) == 16, [WEIGHT for WEIGHT in range(2)]  # noqa: C416  # its own
            return act(add(x) * factor) * WEIGHT + ALIAS(x)

        factors.append(scale)
    for factor, scale in zip((2.0, 5.0), factors, strict=True):
        assert torch.equal(scale(there).cpu(), (x + 3) * factor * 2 + 2 * x)
        assert torch.equal(scale(there, 1.0, off=0.0).cpu(), x * 2 + 2 * x)

    @function
    def recursive(x: torch.Tensor, depth: int) -> torch.Tensor:
        def inner(x: torch.Tensor, depth: int) -> torch.Tensor:
            return x if depth == 0 else inner(x + 1, depth - 1)

        return normalized(inner(x, depth)) + torch.nn.functional.relu(x)

    expected = normalized.local_function(x + 4) + x
    assert torch.equal(recursive(there, 4).cpu(), expected)


def test_two_functions_of_a_name_are_refused(machine: RemoteMachine) -> None:
    @function
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return calls_doubled(x)

    with pytest.raises(ConfigurationError, match="two functions with the name doubled"):
        doubled(torch.ones(2, device=machine.device()))


def test_a_function_whose_file_has_changed_is_refused(
    machine: RemoteMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "changing.py"
    file.write_text("def f(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "changing", raising=False)
    import changing  # type: ignore[import-not-found]  # written above

    x = torch.ones(2, device=machine.device())
    assert function(changing.f)(x).tolist() == [2.0, 2.0]
    for text in ("def f(x):\n    return x + 2\n", "def g(x):\n    return x + 1\n"):
        file.write_text(text)
        linecache.clearcache()
        with pytest.raises(ConfigurationError, match="changed since it was imported"):
            function(changing.f)(x)


def test_weights_that_stream_can_be_read(tmp_path: Path) -> None:
    tensors = {f"{number}": torch.randn(512, 512) for number in range(8)}
    ts.save_file(tensors, tmp_path / "a.safetensors")

    @function
    def sum_of(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.stack([weight.double().sum() for weight in weights]) + x.sum()

    with RemoteMachine.local(budget="3MiB", threads=1) as machine:
        there = load_state_dict(tmp_path / "a.safetensors", machine.device())
        x = torch.ones(2, device=machine.device())
        for first in (0, 4, 0):
            names = [f"{first}", f"{first + 1}"]
            expected = torch.stack([tensors[name].double().sum() for name in names]) + 2
            assert torch.equal(sum_of([there[name] for name in names], x).cpu(), expected)


def test_the_module_is_the_decorator_too(machine: RemoteMachine) -> None:
    @ts.remote(device=machine.device())  # type: ignore[operator]  # its class changes at run time
    def device_of(name: str) -> tuple[str, torch.device]:
        return name * 2, torch.zeros(1).device

    name, _ = device_of("ab")
    assert name == "abab"


def test_a_server_allows_modules_by_name() -> None:
    normalize = function(by="name")(F.normalize)
    with (
        Serving({"--allow-functions": "torch.nn.functional"}) as serving,
        RemoteMachine("tcp", serving.address) as machine,
    ):
        x = torch.randn(3, 3)
        there = x.to(machine.device())
        assert torch.equal(normalize(there).cpu(), F.normalize(x))
        assert torch.equal(normalize(there, dim=0).cpu(), F.normalize(x, dim=0))
        for call, message in (
            (normalized, "runs only functions that it has"),
            (function(by="name")(subprocess.run), "does not allow functions of subprocess"),
            (_of_functional("_canonical_mask"), "not a public function"),
            (_of_functional("has_torch_function"), "is not a public function"),
            (_of_functional("nothing"), "cannot import"),
        ):
            with pytest.raises(ConfigurationError, match=message):
                call(there)
    with Serving() as serving, RemoteMachine("tcp", serving.address) as machine:
        with pytest.raises(RemoteTensorError, match="--allow-functions any"):
            normalized(torch.ones(3, device=machine.device()))
        assert torch.ones(3, device=machine.device()).sum().item() == 3.0
    refused = subprocess.run(
        [*SERVE, "--allow-functions", "no.such.module"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2 and "cannot import no.such.module" in refused.stderr


def _of_functional(name: str) -> Any:
    """Returns a function that names one of ``torch.nn.functional``."""

    def local(x: torch.Tensor) -> None:
        pass

    local.__module__, local.__name__, local.__qualname__ = F.__name__, name, name
    return function(by="name")(local)


def test_a_sandboxed_function_reaches_nothing() -> None:
    @function
    def reaches(x: torch.Tensor) -> list[str]:
        import os
        import socket

        got = []
        for reach, arguments in (
            (os.open, ("/etc/hostname", os.O_RDONLY)),
            (os.listdir, ("/",)),
            (socket.create_connection, (("127.0.0.1", 1),)),
            (os.fork, ()),
        ):
            try:
                reach(*arguments)
                got.append("reached")
            except OSError as error:
                got.append(type(error).__name__)
        return got

    @function
    def allocates(x: torch.Tensor) -> int:
        return len(bytearray(1 << 31))

    options = {"--allow-functions": "any", "--session-memory": "256MiB"}
    with Serving(options) as serving, RemoteMachine("tcp", serving.address) as machine:
        x = torch.ones(1, device=machine.device())
        assert reaches(x) == ["PermissionError"] * 4
        with pytest.raises(RemoteOutOfMemoryError, match="MemoryError"):
            allocates(x)
        assert x.item() == 1.0


def test_a_function_that_does_not_end_can_be_left() -> None:
    with Serving({"--allow-functions": "any"}) as serving:
        machine = RemoteMachine("tcp", serving.address)
        x = torch.ones(1, device=machine.device())
        assert x.item() == 1.0
        program = _interrupted_after(1.0)
        with pytest.raises(KeyboardInterrupt):
            endless(x)
        program.join()
        begin = time.monotonic()
        machine.stop()
        assert time.monotonic() - begin < 20.0
        with RemoteMachine("tcp", serving.address) as other:
            assert torch.ones(2, device=other.device()).sum().item() == 2.0


def _interrupted_after(seconds: float) -> Any:
    """Starts a thread that interrupts this process, as Ctrl-C does."""
    import os
    import signal
    import threading

    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer
