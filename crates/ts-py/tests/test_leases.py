# SPDX-License-Identifier: MIT OR Apache-2.0
"""A lease ends in the deleter of its tensor, so the memory of a live tensor is never reused."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import tensorstream as ts
import torch
from safetensors.torch import save_file
from torch import nn


class Chain(nn.Module):
    """Layers of equal size that run in sequence."""

    def __init__(self, depth: int = 8, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


LAYER_BYTES = 128 * 128 * 4 + 8192


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Chain, Path]:
    torch.manual_seed(1)
    model = Chain()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return model, tmp_path


def streamed(path: Path, layers: int) -> Chain:
    with torch.device("meta"):
        model = Chain()
    return ts.offload(model, ts.Config(budget=layers * LAYER_BYTES), checkpoint=path)


@pytest.mark.critical
def test_gradients_are_exact_when_the_graph_fits(
    chain: tuple[Chain, Path],
) -> None:
    reference, path = chain
    x = torch.randn(3, 128, requires_grad=True)
    y = torch.randn(3, 128, requires_grad=True)
    with torch.no_grad():
        y.copy_(x)
    reference(x).sum().backward()
    model = streamed(path, 9)
    model(y).sum().backward()
    assert x.grad is not None and y.grad is not None
    assert torch.equal(x.grad, y.grad) and x.grad.any()


def test_backward_reads_weights_again(
    chain: tuple[Chain, Path],
) -> None:
    reference, path = chain
    x = torch.randn(3, 128, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    reference(x).sum().backward()
    model = streamed(path, 1)
    for _ in range(2):
        y.grad = None
        model(y).sum().backward()
        assert x.grad is not None and y.grad is not None
        assert torch.equal(x.grad, y.grad)
    units = ts.stats(model)["units"]
    assert all(unit["loads"] >= 2 for unit in units[:-1]), "read for forward and again for backward"
    for own, wanted in zip(model.layers, reference.layers, strict=True):
        assert torch.equal(own.weight.grad, 2 * wanted.weight.grad)


def test_a_kept_view_of_a_stand_in_holds_no_memory(chain: tuple[Chain, Path]) -> None:
    reference, path = chain
    model = streamed(path, 1)
    kept = [
        view
        for layer in model.layers
        for view in (layer.weight[5], layer.weight.t(), layer.weight.view(-1)[7:])
    ]
    x = torch.randn(2, 128)
    with torch.inference_mode():
        expected = reference(x)
        for _ in range(3):
            assert torch.equal(model(x), expected)
        assert torch.equal(kept[9], reference.layers[3].weight[5])
        assert torch.equal(kept[10] + 0, reference.layers[3].weight.t())


class Keeps(nn.Linear):
    """Keeps a view of its weight after its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.weight[5]
        return super().forward(x)


def test_an_error_names_the_unit_of_a_kept_view(
    chain: tuple[Chain, Path],
) -> None:
    reference, path = chain
    with torch.device("meta"):
        model = Chain()
        model.layers[3] = Keeps(128, 128, bias=False)
    ts.offload(model, ts.Config(budget=LAYER_BYTES), checkpoint=path)
    x = torch.randn(2, 128)
    with torch.inference_mode():
        with pytest.raises(ts.UnitReferencedError, match=r"`layers\.3` x1"):
            model(x)
        assert torch.equal(model.layers[3].kept, reference.layers[3].weight[5])
        model.layers[3].kept = None
        with pytest.raises(ts.UnitReferencedError, match=r"`layers\.3` x1"):
            model(x)


def test_a_write_through_a_kept_view_is_detected(
    chain: tuple[Chain, Path],
) -> None:
    reference, path = chain
    with torch.device("meta"):
        model = Chain()
        model.layers[3] = Keeps(128, 128, bias=False)
    ts.offload(model, ts.Config(budget=20 * LAYER_BYTES), checkpoint=path)
    x = torch.randn(2, 128)
    with torch.no_grad():
        expected = reference(x)
        assert torch.equal(model(x), expected)
        model.layers[3].kept.numpy()[:] = 0
        with pytest.raises(
            ts.ModelError,
            match=r"`layers\.3` was written to through a tensor kept from an earlier use",
        ):
            model(x)
        for _ in range(2):
            assert torch.equal(model(x), expected)


def test_a_view_outlives_its_model_on_another_thread(
    chain: tuple[Chain, Path],
) -> None:
    reference, path = chain
    model = streamed(path, 3)
    row = model.layers[2].weight[7]
    del model
    gc.collect()
    seen = []
    box = [row]
    del row

    def use() -> None:
        seen.append(torch.equal(box[0], reference.layers[2].weight[7]))
        box.clear()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [True]


def test_a_deleted_model_is_freed_without_the_cycle_collector(
    chain: tuple[Chain, Path],
) -> None:
    _, path = chain
    gc.disable()
    before = 0
    try:
        for number in range(20):
            model = streamed(path, 3)
            with torch.inference_mode():
                model(torch.randn(1, 128))
            del model
            if number == 0:  # PyTorch has started its threads
                before = threads()
        assert threads() <= before  # others may end
    finally:
        gc.enable()


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_writing_to_a_streamed_weight_is_an_error(chain: tuple[Chain, Path]) -> None:
    reference, path = chain
    model = streamed(path, 3)
    with torch.no_grad(), pytest.raises(ts.ModelError, match=r"layers\.0\.weight"):
        model.layers[0].weight.zero_()

    original = nn.functional.linear

    def linear(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        with torch.no_grad():
            weight.mul_(2)
        return original(x, weight, bias)

    x = torch.randn(1, 128)
    nn.functional.linear = linear
    try:
        with pytest.raises(ts.ModelError, match="written to in place"), torch.no_grad():
            model(x)
    finally:
        nn.functional.linear = original
    with torch.inference_mode():
        expected = reference(x)
        for _ in range(3):
            assert torch.equal(model(x), expected), "modified memory is never used"
