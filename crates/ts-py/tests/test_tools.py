# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tools that look at a model from outside: profilers, tracers, quantisers, replacers of modules.

Each found a difference between a streamed model and one in memory. The weights are more than twice
the budget, and three passes are compared.
"""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import operator
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
import torch.distributed as dist
from conftest import Llama
from safetensors.torch import save_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.ao import quantization
from torch.distributed import checkpoint
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

X = torch.linspace(-1, 1, 2 * 128).view(2, 128)
MODES: dict[str, Callable[[], Any]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def both(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[nn.Sequential, Any]:
    """Returns a model in memory, and the same one with a third of its weights in memory."""
    torch.manual_seed(0)
    memory = nn.Sequential(*(nn.Linear(128, 128) for _ in range(12))).to(dtype)
    budget = sum(each.nbytes for each in memory.parameters()) // 3
    config = ts.Config(storage_path=directory, budget=budget)
    return memory, ts.offload(copy.deepcopy(memory), config)


def passes(model: Any, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [model(X.to(dtype)) for _ in range(3)]


def check(memory: Any, streamed: Any) -> None:
    for expected, got in zip(passes(memory), passes(streamed), strict=True):
        assert torch.equal(got, expected)
    assert max(unit["loads"] for unit in ts.stats(streamed)["units"]) > 1


def sum_of_flops(profiler: profile) -> int:
    return sum(each.flops for each in profiler.key_averages())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_profiler_records_the_shapes(mode: str, dtype: torch.dtype, tmp_path: Path) -> None:
    memory, streamed = both(tmp_path, dtype)
    shown = []
    for model in (memory, streamed):
        options: Any = {"record_shapes": True, "profile_memory": True, "with_stack": True}
        options["with_flops"] = True
        with MODES[mode](), profile(activities=[ProfilerActivity.CPU], **options) as profiler:
            results = passes(model, dtype)
        events = [each for each in profiler.events() if each.name == "aten::addmm"]
        shown.append((results, [each.input_shapes for each in events], sum_of_flops(profiler)))
    (expected, *seen), (results, *own) = shown
    assert all(map(torch.equal, results, expected))
    assert own == seen
    with torch.no_grad():
        assert all(map(torch.equal, passes(streamed, dtype), passes(memory, dtype)))


def test_tracers_of_operations_are_refused(tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    for tracing in ("real", "fake", "symbolic"):
        with pytest.raises(ts.ModelError, match="cannot trace a model that streams"):
            make_fx(streamed, tracing_mode=tracing)(X)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, pytest.raises(ts.ModelError, match="cannot trace a model that streams"):
        streamed(fake.from_tensor(X))
    check(memory, streamed)


@pytest.mark.parametrize("mode", MODES)
def test_exceptions_that_are_kept_keep_no_weights(mode: str, tmp_path: Path) -> None:
    """Notebooks keep the last exception, and pytest keeps all of them."""
    memory, streamed = both(tmp_path)
    narrow, kept = X[:, :-1], []
    failing: list[Callable[[Any], Any]] = [
        lambda layer: layer(narrow),
        lambda layer: layer.weight @ narrow,
        lambda layer: nn.functional.linear(narrow, layer.weight),
    ]
    for layer, fail in itertools.product(streamed, failing):
        with MODES[mode](), pytest.raises(RuntimeError, match="shapes cannot be") as caught:
            fail(layer)
        kept.append(caught)
    check(memory, streamed)


def test_quantized_layers_keep_copies(tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    quantized = [
        quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        for model in (memory, streamed)
    ]
    assert torch.equal(quantized[0](X), quantized[1](X))
    check(memory, streamed)


def test_data_of_streamed_weights_is_copied(tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    results = []
    for model in (memory, streamed):
        new = nn.Linear(128, 128)
        new.weight.data, new.bias = model[0].weight.data, model[0].bias
        half = nn.Linear(64, 128)
        half.weight.data = model[1].weight[:, :64]
        half.bias.data = model[1].bias.data.clone()
        results.append((new(X), half(X[:, :64]), new.weight.data_ptr() != 0))
    assert all(map(torch.equal, results[0][:2], results[1][:2]))
    new = nn.Linear(128, 128)
    before = new.weight.data
    new.weight.data = before
    assert new.weight.data_ptr() == before.data_ptr(), "tensors in memory are shared, as before"
    check(memory, streamed)


@pytest.mark.parametrize("how", ["add", "set", "copy"])
def test_data_of_copies_changes_the_copy_alone(how: str, tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    results = []
    for model in (memory, streamed):
        changed: Any = copy.deepcopy(model)
        if how == "add":
            changed[0].weight.data += 1
            changed[0].weight.data -= 0.5
        elif how == "set":
            changed[0].weight.data = changed[0].weight.data * 2 + changed[1].weight.data
        else:
            changed[0].weight.data.copy_(model[3].weight.data)
        results.append(passes(changed))
    assert all(map(torch.equal, *results))
    check(memory, streamed)


def test_memory_of_streamed_weights_is_never_read_past_us(tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    plain = torch.zeros(128, 128)
    plain.data = streamed[0].weight.detach()
    with pytest.raises(RuntimeError, match=r"weight `0\.weight` has no memory of its own"):
        plain * 1
    check(memory, streamed)


def test_a_refused_step_changes_no_parameter(tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    own = nn.Parameter(torch.zeros(128))
    optimizers = [
        kind([own, *streamed.parameters()], lr=0.1) for kind in (torch.optim.SGD, torch.optim.Adam)
    ]
    (streamed(X) + own).square().mean().backward()
    for optimizer in optimizers:
        with pytest.raises(ts.ModelError, match=r"the optimizer would write to `0\.weight`"):
            optimizer.step()
    streamed.zero_grad()
    with pytest.raises(ts.ModelError, match=r"the optimizer would write to `0\.weight`"):
        optimizers[0].step(lambda: (streamed(X) + own).square().mean().backward())
    assert not own.any()
    for parameter in streamed.parameters():
        parameter.grad = None
    for optimizer in optimizers:
        optimizer.step()
    assert own.any()
    check(memory, streamed)


LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "vector": nn.utils.parameters_to_vector,
    "norms": torch._foreach_norm,
    "sums": lambda ps: torch._foreach_add(ps, [p.clone() for p in ps], alpha=2),
    "scaled": lambda ps: torch._foreach_mul(ps, [float(i) for i in range(len(ps))]),
    "stacked": lambda ps: torch.stack([p for p in ps if p.dim() == 2], 1),
    "rows": lambda ps: torch.cat([p[3:5] for p in ps if p.dim() == 2], -1),
    "clipped": torch.nn.utils.get_total_norm,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", LISTS)
def test_operations_on_all_weights_keep_the_budget(what: str, mode: str, tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    results = []
    for model in (memory, streamed):
        with MODES[mode]():
            result = LISTS[what](list(model.parameters()))
        results.append([result] if isinstance(result, torch.Tensor) else result)
    assert len(results[0]) == len(results[1])
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected) and got.stride() == expected.stride()
        assert got.requires_grad == expected.requires_grad
    check(memory, streamed)


def test_averages_of_all_weights_at_once(tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    averages = []
    for model in (memory, streamed):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for _ in range(3):
            average.update_parameters(model)
        averages.append([*average.parameters()])
    assert all(map(torch.equal, *averages))
    check(memory, streamed)


@pytest.mark.parametrize("mode", MODES)
def test_a_conversion_without_effect_returns_the_weight(mode: str, tmp_path: Path) -> None:
    for model in both(tmp_path):
        weight = model[0].weight
        with MODES[mode]():
            for same in (
                weight.float(),
                weight.to(torch.float32),
                weight.cpu(),
                weight.contiguous(),
                weight.type_as(weight),
            ):
                assert same is weight and same.requires_grad


def test_collectives_read_weights_and_do_not_write_them(tmp_path: Path) -> None:
    memory, streamed = both(tmp_path / "w")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        weight = streamed[0].weight
        for write in (
            lambda: dist.broadcast(weight.data, 0),
            lambda: dist.all_reduce(weight.detach()),
        ):
            with pytest.raises(ts.ModelError, match=r"which writes to `0\.weight`"):
                write()
        # PyTorch does not look for weights in lists of lists.
        with pytest.raises((RuntimeError, SystemError)):
            dist.all_gather([weight.detach()], torch.zeros(128, 128))
        for read in (
            lambda out, each: dist.scatter(out, [each], src=0),
            lambda out, each: dist.all_gather([out], each),
            dist.all_gather_into_tensor,
            dist.reduce_scatter_tensor,
        ):
            out = torch.empty(128, 128)
            try:
                read(out, weight.detach())
            except RuntimeError as refusal:
                assert "has no memory of its own" in str(refusal)
            else:
                assert torch.equal(out, memory[0].weight)
        check(memory, streamed)
        streamed.append(nn.Linear(128, 4))
        with pytest.raises(ts.ModelError, match="would not average the gradients"):
            nn.parallel.DistributedDataParallel(streamed)
        # A module around a frozen model trains with it.
        gradients = []
        for model in (memory, streamed[:12].requires_grad_(False)):
            torch.manual_seed(0)
            wrapped = nn.Sequential(model.requires_grad_(False), nn.Linear(128, 4))
            nn.parallel.DistributedDataParallel(wrapped)(X).sum().backward()
            gradients.append(wrapped[1].weight.grad)
        assert torch.equal(*gradients)
        averaged = nn.parallel.DistributedDataParallel(memory.requires_grad_(True))
        for model in (averaged, memory):
            with pytest.raises(ts.ModelError, match="averages its gradients"):
                ts.offload(model, ts.Config(storage_path=tmp_path / "w", budget="400KiB"))
            assert type(memory[0].weight) is nn.Parameter
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "LBFGS"])
def test_a_refused_step_changes_nothing(name: str, tmp_path: Path) -> None:
    """Gradients come from a hook of the optimizer, or are zeros that LBFGS adds."""
    _, streamed = both(tmp_path)
    streamed.requires_grad_(name != "LBFGS")
    head = nn.Linear(128, 4)
    optimizer = getattr(torch.optim, name)([*head.parameters(), *streamed.parameters()])

    def closure() -> torch.Tensor:
        loss = head(streamed(X)).square().mean()
        loss.backward()
        return loss

    def hook(*_: Any) -> None:
        closure()

    if name != "LBFGS":
        optimizer.register_step_pre_hook(hook)
    before = copy.deepcopy(head.state_dict())
    for _ in range(3):
        with pytest.raises(ts.ModelError, match="the optimizer would write to"):
            optimizer.step(closure if name == "LBFGS" else None)
    assert all(map(torch.equal, head.state_dict().values(), before.values()))


class Autoencoder(nn.Module):
    """Its decoder is the transposed encoder, or has the memory of another parameter."""

    def __init__(self, tie: str) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, 64 if tie == "data" else 128)
        self.middle = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        self.decoder = nn.Linear(self.encoder.out_features, 64)
        if tie == "data":
            self.decoder.weight.data = self.encoder.weight.data
        else:
            self.decoder.weight = nn.Parameter(self.encoder.weight.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.decoder(self.encoder(self.middle(x)))
        return result


@pytest.mark.parametrize("tie", ["data", "view"])
def test_parameters_that_shared_memory_share_it_again(tie: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    memory, x = Autoencoder(tie), torch.randn(3, 64)
    torch.manual_seed(0)
    streamed = ts.offload(Autoencoder(tie), ts.Config(storage_path=tmp_path, budget="100KiB"))
    # Copies of parameters share no memory, also in memory.
    pairs = [(copy.deepcopy(memory), copy.deepcopy(streamed)), (memory, streamed)]
    for expected, model in pairs:
        for _ in range(3):
            assert torch.equal(model(x), expected(x))
        with torch.inference_mode():
            ts.restore(model)
        for each in (expected, model):
            optimizer = torch.optim.SGD(each.parameters(), 0.5)
            each(x).square().mean().backward()
            optimizer.step()
        assert torch.equal(model(x), expected(x))


def test_views_of_a_restored_weight_are_views_again(tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    results = []
    for model in (memory, streamed):
        y = model(X).sum()
        views = [model[0].weight.data, model[0].weight.detach()[3], model[1].weight.t()]
        if model is streamed:
            ts.restore(model)
        with torch.no_grad():
            model[0].weight.add_(1)
            views[0].mul_(2)
            views[1].sub_(3)
            results.append([*views, *model.parameters(), model(X), torch.stack([*views[1:2]])])
        if model is streamed:
            y.backward()  # a graph computes with the weights of its forward
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)
    (untouched, _) = both(tmp_path)
    untouched(X).sum().backward()
    for own, other in zip(streamed.parameters(), untouched.parameters(), strict=True):
        assert own.grad is not None and torch.equal(own.grad, other.grad)


def test_references_of_pytorch_are_named_before_anything_changes(tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    with profile(profile_memory=True, record_shapes=True, with_stack=True) as kept:
        streamed(X)
    with pytest.raises(ts.ModelError, match="results of a profiler"):
        ts.restore(streamed)
    check(memory, streamed)
    del kept
    gc.collect()
    assert all(map(torch.equal, ts.restore(streamed).parameters(), memory.parameters()))


def test_the_cache_of_autocast_keeps_no_parameters(tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    copies = [copy.deepcopy(model) for model in (memory, streamed)]
    with torch.autocast("cpu", torch.bfloat16):
        for model in copies:
            model(X)
            with torch.no_grad():
                model[0].weight.mul_(2)
        assert torch.equal(copies[0](X), copies[1](X))
        check(memory, streamed)
        ts.restore(streamed)
        assert torch.equal(streamed(X), memory(X))
        config = ts.Config(storage_path=tmp_path, budget="400KiB")
        check(memory, ts.offload(streamed, config))


def test_a_refused_vector_changes_nothing(tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    head = nn.Linear(128, 128)
    before = head.weight.detach().clone()
    parameters = [*head.parameters(), *streamed.parameters()]
    vector = nn.utils.parameters_to_vector(parameters).detach() * 2
    with pytest.raises(ts.ModelError, match=r"cannot set `0\.weight`"):
        nn.utils.vector_to_parameters(vector, parameters)
    assert torch.equal(head.weight, before)
    copies = [copy.deepcopy(model) for model in (memory, streamed)]
    for each in copies:
        nn.utils.vector_to_parameters(vector[128 * 129 :], each.parameters())
    assert torch.equal(copies[0](X), copies[1](X))
    check(memory, streamed)


def test_models_that_exchanged_layers_are_restored(tmp_path: Path) -> None:
    (memory, streamed), (other_memory, other) = both(tmp_path / "a"), both(tmp_path / "b")
    streamed[3], other[3] = other[3], streamed[3]
    memory[3], other_memory[3] = other_memory[3], memory[3]
    for _ in range(3):
        assert torch.equal(streamed(X), memory(X))
    ts.restore(streamed)
    assert all(type(each) is nn.Parameter for each in streamed.parameters())
    assert all(map(torch.equal, streamed.parameters(), memory.parameters()))
    assert torch.equal(other(X), other_memory(X))
    ts.restore(other)
    assert torch.equal(other(X), other_memory(X))


@pytest.mark.parametrize("what", ["whole", "slices"])
def test_memory_of_a_buffer_is_not_streamed(what: str, tmp_path: Path) -> None:
    memory, _ = both(tmp_path / "other")
    if what == "whole":
        memory.register_buffer("codebook", memory[3].weight.data)
    else:
        flat = torch.cat([each.weight.detach().flatten() for each in memory])
        memory.register_buffer("flat", flat)
        for each, part in zip(memory.children(), flat.view(12, 128, 128), strict=True):
            each.weight = nn.Parameter(part)
    config = ts.Config(storage_path=tmp_path, budget="400KiB")
    with pytest.raises(ts.ModelError, match=r"shares memory with `(flat|codebook)`"):
        ts.offload(memory, config)
    assert list(tmp_path.iterdir()) == [tmp_path / "other"]
    assert all(type(each) is nn.Parameter for each in memory.parameters())


def test_a_copied_state_dict_keeps_its_ties(tmp_path: Path) -> None:
    memory, _ = both(tmp_path / "other")
    memory[5].weight = memory[2].weight
    config = ts.Config(storage_path=tmp_path, budget="300KiB")
    streamed = ts.offload(copy.deepcopy(memory), config)
    states = [copy.deepcopy(model.state_dict()) for model in (memory, streamed)]
    for state in states:
        for value in state.values():
            value.mul_(0.5)
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())
    check(memory, streamed)


def test_a_copied_layer_is_not_tied_to_its_original(llama: Llama, tmp_path: Path) -> None:
    """Layers are repeated to make a model deeper, which is then saved."""
    directory = llama(num_hidden_layers=6)
    models: list[Any] = [
        LlamaForCausalLM.from_pretrained(directory),
        ts.from_pretrained(directory, budget="500KiB"),
    ]
    ids = torch.arange(7).view(1, 7)
    files: list[Any] = []
    for number, model in enumerate(models):
        model.model.layers.append(copy.deepcopy(model.model.layers[2]))
        own = tmp_path / str(number)
        model.save_pretrained(own)
        save_model(model, str(own / "other.safetensors"))
        torch.save(model.state_dict(), own / "torch.bin")
        names = ("model.safetensors", "other.safetensors")
        files.append([ts.load_file(own / name) for name in names])
        files[-1].append(torch.load(own / "torch.bin"))
    for expected, got in zip(*files, strict=True):
        assert list(expected) == list(got)
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    with torch.inference_mode():
        for _ in range(3):
            results = [model(ids, use_cache=False).logits for model in models]
            assert torch.equal(*results)


OPERATORS: dict[str, Any] = {
    name: getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow")
}


@pytest.mark.product
@pytest.mark.parametrize("what", ["parameter", "data", "detached", "row", "state"])
@pytest.mark.parametrize("name", OPERATORS)
def test_assignments_with_operators_are_not_lost(what: str, name: str, tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    get: dict[str, Callable[[Any], Any]] = {
        "parameter": lambda model: model[0].weight,
        "data": lambda model: model[0].weight.data,
        "detached": lambda model: model[0].weight.detach(),
        "row": lambda model: model[0].weight.data[1],
        "state": lambda model: model.state_dict()["0.weight"],
    }
    with torch.no_grad(), pytest.raises(ts.ModelError, match=r"which writes to `0\.weight`"):
        OPERATORS[name](get[what](streamed), 2.0)
    check(memory, streamed)
    copies = [copy.deepcopy(model) for model in (memory, streamed)]
    with torch.no_grad():
        for each in copies:
            OPERATORS[name](get[what](each), 2.0)
        assert torch.equal(copies[1][0].weight, copies[0][0].weight)
        assert all(map(torch.equal, passes(copies[0]), passes(copies[1])))


WRITES: dict[str, Callable[[Any], Any]] = {
    "last rows": lambda w: w.__setitem__(slice(-2, None), 0),
    "a row of data": lambda w: w.data.__setitem__(5000, 1.0),
    "some rows": lambda w: w[4000:4003].mul_(2),
    "a row of a row range": lambda w: w[3000:6000][1500].zero_(),
    "an element": lambda w: w[7000, 3:5].fill_(2),
    "rows from rows": lambda w: w[100:110].copy_(w[7000:7010]),
    "halves": lambda w: w.chunk(2)[1].mul_(3),
    "unbound": lambda w: w.unbind()[4097].add_(1),
    "another dtype": lambda w: w[6000:6001].view(torch.int32).zero_(),
    "through a detached one": lambda w: w.detach()[4096:].detach()[5].sub_(1),
}


@pytest.mark.parametrize("what", WRITES)
def test_writes_to_views_of_copies_of_divided_weights(what: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    memory = nn.Sequential(nn.Embedding(8192, 256), *(nn.Linear(256, 256) for _ in range(4)))
    budget = sum(each.nbytes for each in memory.parameters()) // 5
    config = ts.Config(storage_path=tmp_path, budget=budget)
    streamed: Any = ts.offload(copy.deepcopy(memory), config)
    copies: list[Any] = [copy.deepcopy(model) for model in (memory, streamed)]
    with torch.no_grad():
        for each in copies:
            WRITES[what](each[0].weight)
        assert torch.equal(copies[1][0].weight, copies[0][0].weight)
        ids = torch.tensor([[0, 7000, 5000, 4097, 8191]])
        for _ in range(3):
            assert torch.equal(copies[1](ids), copies[0](ids))
            assert torch.equal(streamed(ids), memory(ids))


def test_writes_to_experts_of_copies(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    torch.manual_seed(0)
    memory: Any = MixtralForCausalLM(config).eval()
    budget = sum(each.nbytes for each in memory.parameters()) // 3
    streamed: Any = ts.offload(
        copy.deepcopy(memory), ts.Config(storage_path=tmp_path, budget=budget)
    )
    copies = [copy.deepcopy(model) for model in (memory, streamed)]
    ids = torch.arange(16).view(2, 8)
    with torch.no_grad():
        for each in copies:
            experts = each.model.layers[0].mlp.experts
            experts.gate_up_proj[1].zero_()
            experts.down_proj[2].copy_(experts.down_proj[3])
            each.model.layers[1].mlp.experts.gate_up_proj.unbind()[3].mul_(2)
        for (name, expected), got in zip(
            copies[0].named_parameters(), copies[1].parameters(), strict=True
        ):
            assert torch.equal(got, expected), name
        for _ in range(3):
            assert torch.equal(copies[1](ids).logits, copies[0](ids).logits)
            assert torch.equal(streamed(ids).logits, memory(ids).logits)


class Calls(TorchFunctionMode):
    """Collects the names of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_functions_see_what_they_see_in_memory(mode: str, tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    names, results = [], []
    for model in (memory, streamed):
        with MODES[mode](), Calls() as calls:
            results.append(passes(model))
            model[0].weight[:3].sum()
        names.append(calls.names)
    assert all(map(torch.equal, *results))
    assert names[0] == names[1]
    with torch.device("meta"):  # the default device of new tensors is a mode too
        check(memory, streamed)


def test_parameters_made_of_copies_share_their_weights(tmp_path: Path) -> None:
    results = []
    for model in both(tmp_path):
        changed: Any = copy.deepcopy(model)
        new = nn.Linear(128, 128)
        new.weight = nn.Parameter(changed[0].weight.data)
        new.bias = nn.Parameter(changed[0].bias.detach())
        changed[1].weight = nn.Parameter(changed[2].weight)
        changed.append(new)
        optimizer = torch.optim.AdamW(changed.parameters(), lr=0.01)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = changed(X).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert torch.equal(new.weight, changed[0].weight)
        assert torch.equal(changed[1].weight, changed[2].weight)
        results.append([*losses, *(each.detach() for each in changed.parameters())])
    assert all(map(torch.equal, *results))


def test_shallow_copies_of_parameters_share_their_weights(tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    same: Any = copy.copy(streamed[0].weight)
    assert isinstance(same, nn.Parameter) and same.requires_grad
    with torch.no_grad(), pytest.raises(ts.ModelError, match="which writes to"):
        same.mul_(2)
    changed = [copy.deepcopy(model) for model in (memory, streamed)]
    with torch.no_grad():
        for model in changed:
            copy.copy(model[0].weight).mul_(2)
    assert all(map(torch.equal, passes(changed[0]), passes(changed[1])))
    check(memory, streamed)


def test_a_write_before_backward_is_noticed_as_in_memory(tmp_path: Path) -> None:
    for model in both(tmp_path):
        changed: Any = copy.deepcopy(model)
        x = X.clone().requires_grad_()
        loss = changed(x).square().sum()
        with torch.no_grad():
            changed[3].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_distributed_checkpoints_have_the_weights(tmp_path: Path) -> None:
    memory, streamed = both(tmp_path / "w")
    # With one thread, it asks for streams of the device `ts`, which another test may have loaded.
    writer = checkpoint.FileSystemWriter(tmp_path / "d", thread_count=2)
    checkpoint.save({"model": streamed.state_dict()}, storage_writer=writer, no_dist=True)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in memory.state_dict().items()}
    checkpoint.load({"model": loaded}, checkpoint_id=tmp_path / "d", no_dist=True)
    for name, tensor in memory.state_dict().items():
        assert torch.equal(loaded[name], tensor)
    check(memory, streamed)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda w: w.T,
    "matrix transposed": lambda w: w.mT,
    "twice": lambda w: w.T.T,
    "row": lambda w: w[1],
    "flat": lambda w: w.flatten(),
    "chunk": lambda w: w.chunk(2)[1],
    "unbound": lambda w: w.unbind()[3],
    "expanded": lambda w: w[None].expand(2, -1, -1),
    "integers": lambda w: w.view(torch.int32),
    "detached": lambda w: w.detach(),
    "data": lambda w: w.data,
    "view of a detached one": lambda w: w.T.detach().T,
}


@pytest.mark.parametrize("mode", MODES)
def test_views_require_gradients_as_in_memory(mode: str, tmp_path: Path) -> None:
    """PyTorch chooses kernels by it."""
    memory, streamed = both(tmp_path)
    x = torch.randn(5, 2, 128).transpose(0, 1)
    for view in VIEWS.values():
        with MODES[mode]():
            expected, got = view(memory[0].weight), view(streamed[0].weight)
        assert (got.requires_grad, got.stride()) == (expected.requires_grad, expected.stride())
        assert torch.equal(got, expected)
    with MODES[mode]():
        assert torch.equal(x @ streamed[0].weight.T, x @ memory[0].weight.T)


def test_copies_that_are_written_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    results = []
    for model in both(tmp_path):
        changed: Any = copy.deepcopy(model)
        with torch.inference_mode():
            changed[0].weight.mul_(0.5)
            changed[1].weight.data.add_(1)
        changed(X).square().sum().backward()
        results.append([changed(X).detach(), *(each.grad for each in changed.parameters())])
    assert all(map(torch.equal, *results))


def test_a_model_is_not_passed_to_a_new_process(tmp_path: Path) -> None:
    memory, streamed = both(tmp_path)
    process = multiprocessing.get_context("spawn").Process(target=print, args=(streamed,))
    with pytest.raises(ts.ModelError, match="load the model in each process"):
        process.start()
    check(memory, streamed)
