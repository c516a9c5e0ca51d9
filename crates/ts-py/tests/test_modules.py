# SPDX-License-Identifier: MIT OR Apache-2.0
"""Modules that own, share, borrow or list parameters in unusual ways."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorstream as ts
import torch
from safetensors.torch import load_file, save_model
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrize


class OwnAndBelow(nn.Module):
    """Owns a parameter and has children with parameters, as in vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 16))
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(16)) for _ in range(2)])
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(1, 16), x])
        return self.inner(x * self.scales[0]) + self.scales[1]


class Borrows(nn.Module):
    """Uses the weight of another module without calling that module."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.a(x), self.b.weight.t() + self.a.weight, self.b.bias)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x[:, 0].abs() * 7).long() % 40
        return self.head(self.mix(self.embed(ids)))


class Reused(nn.Module):
    """Calls one layer three times and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 24, num_layers=2)
        self.gru = nn.GRU(24, 16, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(self.lstm(x)[0])[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4)
        self.encoder = nn.TransformerEncoderLayer(16, 4, dim_feedforward=32, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.attention(x, x, x)[0])


class Normed(nn.Module):
    """Has buffers. They stay in memory, and training changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 3)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x.unsqueeze(1)))


MODELS = [OwnAndBelow, Borrows, Tied, Reused, Recurrent, Attention, Normed]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("live", [False, True], ids=["meta", "live"])
def test_unusual_modules_are_bit_identical(
    make: Callable[[], nn.Module], live: bool, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    reference = make().eval()
    save_model(reference, str(tmp_path / "model.safetensors"))
    if live:
        model = copy.deepcopy(reference)
        reference = copy.deepcopy(model)
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        assert all(a.data_ptr() % 64 == b.data_ptr() % 64 for a, b in pairs)
    else:
        with torch.device("meta"):
            model = make().eval()
        # Maps the file in place, as from_pretrained does.
        mapped = load_file(tmp_path / "model.safetensors")
        reference.load_state_dict(mapped, assign=True, strict=False)
        if isinstance(reference, Tied):
            reference.head.weight = reference.embed.weight = nn.Parameter(
                mapped.get("embed.weight", mapped.get("head.weight"))
            )
    ts.offload(model, ts.Config(budget="64KiB"), checkpoint=tmp_path)
    x = torch.randn(5, 16)
    for grad in (True, False, False):
        with torch.set_grad_enabled(grad):
            assert torch.equal(model(x), reference(x))
    ts.restore(model)
    assert torch.equal(model(x), reference(x))
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in reference.named_parameters()}
    if isinstance(model, Tied):
        assert model.head.weight is model.embed.weight
    model.train()(x).sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "never" not in n)


def test_buffers_are_ordinary_tensors(tmp_path: Path) -> None:
    reference = Normed().train()
    reference(torch.randn(6, 16))
    save_model(reference, str(tmp_path / "model.safetensors"))
    with torch.device("meta"):
        model = Normed()
    ts.offload(model, checkpoint=tmp_path, budget="64KiB")
    assert torch.equal(model.norm.running_mean, reference.norm.running_mean)
    x = torch.randn(6, 16)
    model.train()(x), reference(x)
    assert torch.allclose(model.norm.running_mean, reference.norm.running_mean)


def test_parameters_can_be_read_anywhere(tmp_path: Path) -> None:
    reference = Borrows()
    save_model(reference, str(tmp_path / "model.safetensors"))
    model = ts.offload(copy.deepcopy(reference), checkpoint=tmp_path, budget="64KiB")
    weight = model.a.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == ((16, 16), torch.float32, "cpu")
    assert weight.requires_grad
    assert torch.equal(weight, reference.a.weight)
    assert weight.sum().item() == reference.a.weight.sum().item()
    assert torch.equal(weight[3], reference.a.weight[3])
    assert weight.tolist() == reference.a.weight.tolist()
    for name, value in model.state_dict().items():
        assert torch.equal(value, reference.state_dict()[name])
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in loaded.items())
    assert torch.equal(copy.deepcopy(weight), reference.a.weight)
    assert "a.weight" in repr(weight)


def test_a_submodule_can_be_called_alone(tmp_path: Path) -> None:
    reference = Borrows()
    save_model(reference, str(tmp_path / "model.safetensors"))
    model = ts.offload(copy.deepcopy(reference), checkpoint=tmp_path, budget="64KiB")
    x = torch.randn(2, 16)
    assert torch.equal(model.b(x), reference.b(x))


def test_models_that_skip_layers_are_exact(tmp_path: Path) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(96, 96, bias=False) for _ in range(10))
            self.active = list(range(9, -1, -1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in self.active:
                x = torch.tanh(self.layers[i](x))
            return x

    reference = Skips()
    save_model(reference, str(tmp_path / "model.safetensors"))
    model = ts.offload(copy.deepcopy(reference), checkpoint=tmp_path, budget="220KiB")
    x = torch.randn(2, 96)
    for active in (range(9, -1, -1), (0, 5, 1), range(10), (3, 3, 7)):
        model.active = reference.active = list(active)
        for _ in range(3):
            assert torch.equal(model(x), reference(x))
    stats = ts.stats(model)
    assert stats["reserved_high_water_bytes"] <= stats["budget_bytes"]


def test_errors_name_what_cannot_be_streamed(tmp_path: Path) -> None:
    class Odd(nn.Parameter):
        pass

    model = nn.Linear(4, 4)
    model.weight = Odd(torch.zeros(4, 4))
    save_model(nn.Linear(4, 4), str(tmp_path / "model.safetensors"))
    with pytest.raises(ts.ModelError, match=r"expected nn\.Parameter, got Odd"):
        ts.offload(model, checkpoint=tmp_path, budget="64KiB")
    with torch.device("meta"):
        lost = nn.Linear(4, 4)
        lost.register_buffer("lost", torch.zeros(3))
    with pytest.raises(ts.ModelError, match="buffer `lost` of Linear is on the meta device"):
        ts.offload(lost, checkpoint=tmp_path, budget="64KiB")


def test_changes_of_weights_are_errors(tmp_path: Path) -> None:
    reference = Reused()
    save_model(reference, str(tmp_path / "model.safetensors"))
    model = ts.offload(copy.deepcopy(reference), checkpoint=tmp_path, budget="64KiB")
    x = torch.randn(2, 16)
    with pytest.raises(ts.ModelError, match="which writes to"), torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)
    model.layer.weight = model.layer.weight
    assert torch.equal(model(x), reference(x))


def test_functional_calls_replace_weights(tmp_path: Path) -> None:
    reference = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    model = ts.offload(copy.deepcopy(reference), ts.Config(storage_path=tmp_path, budget="40KiB"))
    x = torch.randn(2, 64)
    own = {name: torch.randn(p.shape) for name, p in reference.named_parameters() if "0." in name}
    every = {name: 2 * p.detach() for name, p in reference.named_parameters()}
    for parameters in (own, every):
        # These replace the parameters, and put the stand-ins back.
        assert torch.equal(
            functional_call(model, parameters, x), functional_call(reference, parameters, x)
        )
        assert torch.equal(model(x), reference(x)) and model(x).requires_grad
    stacked = {"1.bias": torch.randn(3, 64)}

    def outputs_of(module: nn.Module) -> torch.Tensor:
        return vmap(lambda bias: functional_call(module, bias, (x,)))(stacked)

    assert torch.equal(outputs_of(model), outputs_of(reference))


def test_weights_can_become_parameters_of_others(tmp_path: Path) -> None:
    config = ts.Config(storage_path=tmp_path, budget="40KiB")
    references = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))) for _ in range(2)]
    model, other = (ts.offload(copy.deepcopy(each), config) for each in references)
    (reference, second), x = references, torch.randn(2, 64)
    for _ in range(3):
        for weight, wanted in (
            (model[0].weight.t(), reference[0].weight.t()),
            (other[0].weight, second[0].weight),
        ):
            assert torch.equal(
                functional_call(model, {"1.weight": weight}, (x,)),
                functional_call(reference, {"1.weight": wanted}, (x,)),
            )
    for each in (model, reference):
        each[1].weight = each[0].weight
        each[2].weight = nn.Parameter(each[3].weight.t(), requires_grad=False)
        each[4].weight = nn.Parameter(torch.ones(64, 64))
        del each[5].bias
        each[5].register_parameter("bias", None)
    for _ in range(3):
        assert torch.equal(model(x), reference(x))
    assert ts.restore(model)[1].weight is model[0].weight
    assert model[2].weight.untyped_storage()._cdata == model[3].weight.untyped_storage()._cdata
    assert torch.equal(model(x), reference(x))
    lstm = nn.LSTM(16, 16)
    streamed, zeros = ts.offload(copy.deepcopy(lstm), config), {"weight_ih_l0": torch.zeros(64, 16)}
    assert torch.equal(
        functional_call(streamed, zeros, (torch.ones(1, 1, 16),))[0],
        functional_call(lstm, zeros, (torch.ones(1, 1, 16),))[0],
    )


def test_weights_that_move_keep_their_gradients(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    model[5].requires_grad_(False)
    ts.offload(model, ts.Config(storage_path=tmp_path, budget="40KiB"))
    x = torch.randn(2, 64)
    with torch.no_grad():
        functional_call(model, {"0.weight": torch.zeros(64, 64)}, (x,))
        parametrize.register_parametrization(model[3], "weight", Doubled(), unsafe=True)
        parametrize.remove_parametrizations(model[3], "weight", leave_parametrized=False)
    wanted = [True] * 10 + [False] * 2
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    assert [parameter.requires_grad for parameter in ts.restore(model).parameters()] == wanted


def test_a_wrapper_is_restored_with_its_shared_parameters(tmp_path: Path) -> None:
    base = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    ts.offload(base, ts.Config(storage_path=tmp_path, budget="40KiB")).requires_grad_(False)
    head = nn.Linear(64, 64)
    head.weight = base[0].weight
    model = nn.Sequential(base, head)
    x = torch.randn(2, 64)
    expected = model(x)
    ts.restore(model)
    assert head.weight is base[0].weight and type(head.weight) is nn.Parameter
    assert torch.equal(model(x), expected)


def test_tracing_is_refused_in_words(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    expected = copy.deepcopy(model)
    ts.offload(model, ts.Config(storage_path=tmp_path, budget="40KiB"))
    x = torch.randn(2, 64)
    with pytest.raises(ts.ModelError, match=r"restore\(model\) first"):
        torch.jit.trace(model, x)
    with pytest.raises(ts.ModelError, match=r"restore\(model\) first"):
        torch.export.export(model, (x,))
    scripted = torch.jit.script(model)
    for _ in range(3):
        assert torch.equal(scripted(x), expected(x))
        assert torch.equal(model(x), expected(x))
    ts.restore(model)
    assert torch.equal(scripted(x), expected(x))


@pytest.mark.parametrize("budget", ["40KiB", "8MiB"])
def test_compiling_breaks_the_graph_or_is_refused_in_words(tmp_path: Path, budget: str) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    expected = copy.deepcopy(model)
    ts.offload(model, ts.Config(storage_path=tmp_path, budget=budget))
    x = torch.randn(2, 64)
    try:
        with torch.no_grad():
            compiled = torch.compile(model, backend="eager")
            for _ in range(8):
                assert torch.equal(compiled(x), expected(x))
            torch._dynamo.reset()
            whole = torch.compile(model, backend="eager", fullgraph=True)
            with pytest.raises(torch._dynamo.exc.Unsupported, match=r"restore\(model\) first"):
                whole(x)
            assert torch.equal(model(x), expected(x))
            whole = torch.compile(ts.restore(model), backend="eager", fullgraph=True)
            assert torch.equal(whole(x), expected(x))
    finally:
        torch._dynamo.reset()


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


def test_weights_can_be_parametrized(tmp_path: Path) -> None:
    reference = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    x = torch.randn(2, 64)
    model = ts.offload(copy.deepcopy(reference), ts.Config(storage_path=tmp_path, budget="40KiB"))
    with torch.inference_mode():
        assert torch.equal(model(x), reference(x))
        for each in (model, reference):
            each[1].weight = each[1].weight
            # Without `unsafe`, PyTorch calls the parametrization to try it.
            parametrize.register_parametrization(each[3], "weight", Doubled(), unsafe=True)
        for _ in range(3):
            assert torch.equal(model(x), reference(x))
        assert max(unit["loads"] for unit in ts.stats(model)["units"]) > 1
        assert [name for name, _ in model.named_parameters()] == [
            name for name, _ in reference.named_parameters()
        ]
        twin = ts.restore(model)
        assert torch.equal(twin(x), reference(x))
    original = model[3].parametrizations["weight"].original
    assert torch.equal(original, reference[3].parametrizations["weight"].original)
    assert type(original) is nn.Parameter


def test_a_model_with_an_offloaded_part_is_refused(tmp_path: Path) -> None:
    part = Reused()
    save_model(part, str(tmp_path / "model.safetensors"))
    ts.offload(part, checkpoint=tmp_path, budget="64KiB")
    with pytest.raises(ts.ModelError, match="already streamed"):
        ts.offload(nn.Sequential(part), checkpoint=tmp_path, budget="64KiB")


def test_a_relative_path_survives_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reused()
    save_model(reference, str(tmp_path / "model.safetensors"))
    monkeypatch.chdir(tmp_path)
    model = ts.offload(copy.deepcopy(reference), checkpoint="model.safetensors", budget="64KiB")
    monkeypatch.chdir("/")
    x = torch.randn(2, 16)
    assert torch.equal(model(x), reference(x))


class Conjugates(nn.Module):
    """Uses conjugates of its complex weight and of the weight of a child."""

    class Child(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))

        def forward(self) -> torch.Tensor:
            return self.weight.conj()

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))
        self.child, self.layers = (
            Conjugates.Child(),
            nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        conjugate = self.child()
        y = self.layers(x).to(torch.complex64)
        return (y @ self.own.conj() @ conjugate + self.own.mH[0]).abs() + torch._neg_view(
            self.layers[0].bias
        )


def test_conjugates_of_weights_are_exact(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference, x = Conjugates(), torch.randn(2, 16)
    model = ts.offload(copy.deepcopy(reference), ts.Config(storage_path=tmp_path, budget="16KiB"))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(3):
                assert torch.equal(model(x), reference(x))


def test_what_changes_nothing_is_accepted_and_other_formats_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4))
    x = torch.randn(1, 3, 3, 3)
    expected = model(x)
    streamed = ts.offload(model, ts.Config(storage_path=tmp_path, budget="1MiB"))
    for same in ("cpu", "cpu:0", torch.float32, torch.device("cpu", 0)):
        assert streamed.to(same) is streamed
    streamed.to(memory_format=torch.contiguous_format)
    assert torch.equal(streamed(x), expected)
    with pytest.raises(ts.ModelError, match="order of dimensions"):
        streamed.to(memory_format=torch.channels_last)
    with pytest.raises(ts.ModelError, match="shared memory"):
        streamed.share_memory()
    with pytest.raises(ts.ModelError, match="cannot be changed"):
        streamed._apply(lambda tensor: tensor * 2)
    assert torch.equal(streamed(x), expected)


def test_a_stored_memory_format_is_no_change(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3)).to(memory_format=torch.channels_last)
    x = torch.randn(1, 3, 5, 5)
    expected = model(x)
    streamed = ts.offload(model, ts.Config(storage_path=tmp_path, budget="1MiB"))
    assert torch.equal(streamed.to(memory_format=torch.channels_last)(x), expected)
    with pytest.raises(ts.ModelError, match="order of dimensions"):
        streamed.to(memory_format=torch.contiguous_format)


def test_gradients_of_weights_are_those_in_memory(tmp_path: Path) -> None:
    """Gradients are memory of their own. A step of an optimizer is refused."""
    memory = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)), nn.LSTM(64, 32))
    model = ts.offload(
        copy.deepcopy(memory), ts.Config(storage_path=tmp_path, budget="60KiB")
    ).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(3, 64)
        for each in (memory, model):
            each(x)[0].square().mean().backward()
        for own, wanted in zip(model.parameters(), memory.parameters(), strict=True):
            assert own.grad is not None and wanted.grad is not None
            assert torch.equal(own.grad, wanted.grad)
    assert all(unit["loads"] > 1 for unit in ts.stats(model)["units"])
    with pytest.raises(ts.ModelError, match="would write to"):
        optimizer.step()
    for own, wanted in zip(ts.restore(model).parameters(), memory.parameters(), strict=True):
        assert torch.equal(own, wanted) and own.grad is not None and wanted.grad is not None
        assert torch.equal(own.grad, wanted.grad)
    optimizer.step()
    assert not torch.equal(model[0].weight, memory[0].weight)
