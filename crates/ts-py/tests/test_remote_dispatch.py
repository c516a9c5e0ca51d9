# SPDX-License-Identifier: MIT OR Apache-2.0
"""Models that are split over machines compute what they compute on one CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstream as ts
import torch
from conftest import Llama
from tensorstream.errors import (
    BudgetError,
    CheckpointError,
    ConfigurationError,
    CrossMachineError,
)
from tensorstream.remote import RemoteMachine, dispatch, placement
from torch import nn


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The machines have one thread, so results are only the same with one here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def machines() -> Iterator[list[RemoteMachine]]:
    with (
        RemoteMachine.local(threads=1) as one,
        RemoteMachine.local(threads=1) as other,
        RemoteMachine.local(threads=1) as third,
    ):
        yield [one, other, third]


def _causal(directory: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, **options)


def _uploads(machines: list[RemoteMachine]) -> int:
    return sum(machine.stats()["uploaded_bytes"] for machine in machines)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_split_model_generates_the_same_tokens(
    llama: Llama, machines: list[RemoteMachine], dtype: torch.dtype, tied: bool
) -> None:
    """Its weights, and the activations between machines, do not pass through this process."""
    directory = llama(tie=tied)
    model = _causal(directory, dtype=dtype)
    ids = torch.arange(6)[None]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    uploads, downloads = _uploads(machines), machines[0].stats()["downloaded_bytes"]
    split = dispatch(directory, machines, dtype=dtype)
    devices = set(placement(split).values())
    assert devices == {machine.device() for machine in machines}
    waits = [machine.stats()["waits"] for machine in machines]
    for _ in range(2):
        got = split.generate(ids.to(machines[0].device()), max_new_tokens=8, do_sample=False)
        assert torch.equal(got.cpu(), expected)
    assert _uploads(machines) - uploads < 4096
    assert machines[0].stats()["downloaded_bytes"] - downloads < 4096
    # Only the first machine is read from, once for each token; the others hardly wait.
    after = [machine.stats()["waits"] for machine in machines]
    assert after[1] - waits[1] < 8 and after[2] - waits[2] < 8
    head, embedding = split.lm_head.weight, split.model.embed_tokens.weight
    assert (head is embedding) == tied


def test_a_split_model_trains_as_one(machines: list[RemoteMachine]) -> None:
    torch.manual_seed(2)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(5)]
    net = nn.Sequential(nn.Linear(8, 16), *layers, nn.Dropout(0.0), nn.Linear(16, 2))
    remote = dispatch(copy.deepcopy(net), machines)
    inputs, targets = torch.randn(6, 4, 8), torch.randn(6, 4, 2)
    for model in (net, remote):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for batch, target in zip(inputs, targets, strict=True):
            output = model(batch)
            loss = nn.functional.mse_loss(output, target.to(output.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    state = remote.state_dict()
    for name, tensor in net.state_dict().items():
        assert torch.equal(state[name].cpu(), tensor), name
    assert len(set(placement(remote).values())) == 3


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference_mode", "autocast"])
def test_a_split_model_runs_in_any_mode(
    llama: Llama, machines: list[RemoteMachine], mode: str
) -> None:
    from contextlib import nullcontext

    contexts: dict[str, Any] = {
        "grad": nullcontext,
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }
    model = _causal(llama())
    split = dispatch(copy.deepcopy(model), machines[:2])
    ids = torch.arange(10).reshape(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with contexts[mode]():
        expected = model(ids, attention_mask=mask).logits
    remote_mode = (
        (lambda: torch.autocast("ts", torch.bfloat16)) if mode == "autocast" else contexts[mode]
    )
    with remote_mode():
        for _ in range(3):
            got = split(ids, attention_mask=mask).logits
            assert torch.equal(got.cpu(), expected)


def test_encoders_decoders_and_experts_are_split(machines: list[RemoteMachine]) -> None:
    from transformers import (
        BertConfig,
        BertModel,
        MixtralConfig,
        MixtralForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
        ViTConfig,
        ViTModel,
    )

    small: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
        "intermediate_size": 64, "vocab_size": 99,
    }  # fmt: skip
    torch.manual_seed(3)
    ids = torch.arange(12).reshape(2, 6)
    models: list[tuple[nn.Module, dict[str, torch.Tensor]]] = [
        (BertModel(BertConfig(**small)), {"input_ids": ids}),
        (
            MixtralForCausalLM(MixtralConfig(**small, num_key_value_heads=2, num_local_experts=4)),
            {"input_ids": ids},
        ),
        (
            T5ForConditionalGeneration(
                T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=3, num_heads=2, vocab_size=99)
            ),
            {"input_ids": ids, "decoder_input_ids": ids},
        ),
        (
            ViTModel(ViTConfig(**small, image_size=32, patch_size=8)),
            {"pixel_values": torch.randn(2, 3, 32, 32)},
        ),
    ]
    for model, inputs in models:
        model.eval()
        split = dispatch(copy.deepcopy(model), machines)
        assert len(set(placement(split).values())) == 3, type(model)
        with torch.no_grad():
            for _ in range(2):
                expected, got = model(**inputs)[0], split(**inputs)[0]
                assert torch.equal(got.cpu(), expected), type(model)


def test_a_meta_model_gets_its_weights_from_a_checkpoint(
    machines: list[RemoteMachine], tmp_path: Path
) -> None:
    def net() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        model[3].weight = model[1].weight  # tied
        return model

    torch.manual_seed(4)
    model = net()
    state = model.state_dict()
    del state["3.weight"]
    ts.save_file(state, tmp_path / "a.ts")
    with torch.device("meta"):
        shell = net()
    uploads = _uploads(machines)
    split = dispatch(shell, machines[:2], checkpoint=tmp_path / "a.ts")
    assert _uploads(machines) == uploads
    assert split[3].weight is split[1].weight
    x = torch.randn(3, 4)
    assert torch.equal(split(x).cpu(), model(x))
    with torch.device("meta"), pytest.raises(ConfigurationError, match="pass a `checkpoint`"):
        dispatch(net(), machines)
    ts.save_file({**state, "4.weight": torch.ones(1)}, tmp_path / "b.ts")
    with torch.device("meta"):
        shells = net(), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 9), nn.Linear(9, 8))
    for wrong, path in ((shells[0], "b.ts"), (shells[1], "a.ts")):
        with pytest.raises(CheckpointError):
            dispatch(wrong, machines[:2], checkpoint=tmp_path / path)
        assert all(tensor.is_meta for tensor in wrong.parameters())


def test_gradients_pass_a_layer_that_was_called_without_them(
    machines: list[RemoteMachine],
) -> None:
    """Copies of a pass are kept, but not those of another grad mode, or of what has changed."""

    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[1](self.layers[0](x))
            with torch.no_grad():
                taught = self.layers[2](x)
            return self.layers[3](x) + taught

    torch.manual_seed(5)
    net = Teacher()
    split = dispatch(copy.deepcopy(net), machines[:2])
    x = torch.randn(2, 4)
    for model in (net, split):
        model(x).sum().backward()
    for here, there in zip(net.parameters(), split.parameters(), strict=True):
        assert (here.grad is None) == (there.grad is None)
        if here.grad is not None and there.grad is not None:
            assert torch.equal(there.grad.cpu(), here.grad)
    # A layer that is called by itself sees the values of now.
    values = np.ones(4, dtype=np.float32)
    given = torch.from_numpy(values)
    before = split.layers[3](given)
    values[:] = 2.0
    after = split.layers[3](given)
    assert not torch.equal(before.cpu(), after.cpu())
    moves = split._tensorstream_moves
    assert not moves._copies


def test_modules_that_share_parameters_are_together(machines: list[RemoteMachine]) -> None:
    layers = [nn.Linear(8, 8) for _ in range(6)]
    layers[3].weight, layers[5].weight, layers[5].bias = (
        layers[0].weight, layers[4].weight, layers[3].bias,
    )  # fmt: skip
    split = dispatch(nn.Sequential(*layers), machines)
    placed = placement(split)
    assert placed["0"] == placed["3"] == placed["5"] == placed["4"]
    assert len(set(placed.values())) > 1


def test_the_first_machine_may_be_too_small(machines: list[RemoteMachine], tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ts.save_file(net.state_dict(), tmp_path / "a.ts")
    with torch.device("meta"):
        shell = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    split = dispatch(shell, machines[:2], ["1KiB", "40KiB"], checkpoint=tmp_path / "a.ts")
    assert set(placement(split).values()) == {machines[1].device()}
    x = torch.ones(1, 64)
    assert torch.equal(split(x).cpu(), net(x))


def test_budgets_bound_the_parts(machines: list[RemoteMachine], llama: Llama) -> None:
    directory = llama()
    model = _causal(directory)
    total = sum(tensor.nbytes for tensor in model.parameters())
    with pytest.raises(BudgetError, match="smallest budgets in this ratio are") as raised:
        dispatch(directory, machines[:2], ["1KiB", "3KiB"])
    smallest = [int(word) for word in str(raised.value).split("are ")[-1][:-6].split(", ")]
    split = dispatch(directory, machines[:2], smallest)
    with pytest.raises(BudgetError):
        dispatch(directory, machines[:2], [size - 2 for size in smallest])
    sizes = dict.fromkeys(placement(split).values(), 0)
    for parameter in split.parameters():
        sizes[parameter.device] += parameter.nbytes
    assert sum(sizes.values()) == total
    assert all(size <= limit for size, limit in zip(sizes.values(), smallest, strict=True))
    ids = torch.arange(4)[None]
    assert torch.equal(split(ids).logits.cpu(), model(ids).logits)


def test_machines_stream_their_parts(llama: Llama) -> None:
    """Each machine has a budget that is smaller than its part."""
    directory = llama(num_hidden_layers=8)
    model = _causal(directory)
    total = sum(tensor.nbytes for tensor in model.parameters())
    budget = total // 4
    with (
        RemoteMachine.local(threads=1, budget=budget) as one,
        RemoteMachine.local(threads=1, budget=budget) as other,
    ):
        split = dispatch(directory, [one, other])
        ids = torch.arange(6)[None]
        expected = model.generate(ids, max_new_tokens=6, do_sample=False)
        for _ in range(2):
            got = split.generate(ids.to(one.device()), max_new_tokens=6, do_sample=False)
            assert torch.equal(got.cpu(), expected)


def test_invalid_dispatches_are_refused(machines: list[RemoteMachine], tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, "at least one"),
        (["cpu"], {}, "invalid machine 'cpu'"),
        ([3], {}, "invalid machine 3"),
        (machines, {"budgets": [1]}, "one for each of the 3 machines"),
        (machines, {"budgets": ["x"] * 3}, "invalid budget"),
        (machines, {"dtype": torch.float32}, "given by its source"),
    ]
    for on, options, words in wrong:
        with pytest.raises(ConfigurationError, match=words):
            dispatch(net, on, **options)
    for options, words in (
        ({"checkpoint": "x"}, "the weights come from the model"),
        ({"budget": "1GiB"}, "pass the machines and their budgets"),
        ({"trust_remote_code": True}, "trust_remote_code"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            dispatch(tmp_path, machines, **options)
    with pytest.raises(ConfigurationError, match="was not split"):
        placement(net)
    assert all(parameter.device.type == "cpu" for parameter in net.parameters())
    dispatch(net, machines)
    with pytest.raises(ConfigurationError, match="on several machines already"):
        dispatch(net, machines)


def test_results_of_several_machines_are_not_combined_silently(
    machines: list[RemoteMachine],
) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.layers[0](x)
            for layer in self.layers[1:]:
                x = layer(x)
            return first + x

    with pytest.raises(CrossMachineError):
        dispatch(Skips(), machines[:2])(torch.ones(4))
