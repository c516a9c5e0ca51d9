# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains adapters of PEFT over streamed models, and compares them with models in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import preloaded
import pytest
import tensorstream as ts
import torch
import transformers as hf
from adapters import SHAPE, X, cases, check_adapter
from torch import distributed, nn


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", cases())
def test_adapters_train(name: str, tmp_path: Path) -> None:
    check_adapter(name, tmp_path / "model")


def saved(path: Path, dtype: torch.dtype = torch.float32, layers: int = 4) -> int:
    """Writes a Llama. Returns the size of its weights in bytes."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SHAPE | {"num_hidden_layers": layers})
    model = hf.LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(path)
    return sum(parameter.nbytes for parameter in model.parameters())


def with_lora(base: Any, **arguments: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **arguments)
    return peft.get_peft_model(base, config)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointing", "dtype", "steps"),
    [
        ("default", torch.float32, 8),
        # PyTorch multiplies these dtypes slowly.
        ("default", torch.bfloat16, 3),
        ("reentrant", torch.float16, 3),
        ("none", torch.bfloat16, 3),
    ],
)
def test_training_with_a_fifth_of_the_weights(
    checkpointing: str, dtype: torch.dtype, steps: int, tmp_path: Path
) -> None:
    size = saved(tmp_path, dtype, layers=16)
    outcomes = []
    for streams in (False, True):
        base: Any = (
            ts.from_pretrained(tmp_path, budget=size // 5)
            if streams
            else hf.LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        )
        model = with_lora(base)
        if checkpointing != "none":
            options = {"use_reentrant": True} if checkpointing == "reentrant" else None
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            model.enable_input_require_grads()
        model.train()
        own = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(own, lr=1e-3)
        results = []
        for step in range(steps):
            loss = model(input_ids=X, labels=X).loss
            loss.backward()
            if step == 0:
                results += [parameter.grad.clone() for parameter in own]
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.detach())
        outcomes.append([*results, *own])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    stats = ts.stats(model)
    assert stats["reserved_high_water_bytes"] <= size // 5
    assert max(unit["loads"] for unit in stats["units"]) >= steps


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_with_adapters_is_offloaded(whole: bool, tmp_path: Path) -> None:
    """The base streams, and the adapters stay in memory."""
    size = saved(tmp_path / "model")
    model = with_lora(
        hf.LlamaForCausalLM.from_pretrained(tmp_path / "model"), modules_to_save=["norm"]
    )
    model(input_ids=X, labels=X).loss.backward()
    expected = gradients(model)
    adapters = {name: model.get_parameter(name) for name in expected}
    model.zero_grad()
    config = ts.Config(storage_path=tmp_path / "weights", budget=size // 3)
    ts.offload(model if whole else model.get_base_model(), config)
    assert all(model.get_parameter(name) is own for name, own in adapters.items())
    for _ in range(2):
        model.zero_grad()
        model(input_ids=X, labels=X).loss.backward()
        found = gradients(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert max(unit["loads"] for unit in ts.stats(model)["units"]) > 2
    assert not [name for name in ts.load_file(tmp_path / "weights") if "lora" in name]


def test_weights_cannot_be_written_outside_of_the_layers_of_peft(tmp_path: Path) -> None:
    size = saved(tmp_path)
    model = with_lora(ts.from_pretrained(tmp_path, budget=size // 3))
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    with pytest.raises(ts.ModelError, match=r"tensorstream.merge\(model, directory\)"):
        weight.data += 1
    assert ts.restore(model) is model
    reference = with_lora(hf.LlamaForCausalLM.from_pretrained(tmp_path))
    merged, wanted = model.merge_and_unload(), reference.merge_and_unload()
    for mine, its in zip(merged.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_functions_find_the_model_inside_of_a_wrapper(tmp_path: Path) -> None:
    size = saved(tmp_path)
    model = with_lora(ts.from_pretrained(tmp_path, budget=size // 3))
    model(input_ids=X)
    assert ts.stats(model)["passes"] == 1
    assert ts.explain(model).passes == 1
    both = nn.ModuleList([ts.from_pretrained(tmp_path, budget=size // 3) for _ in range(2)])
    with pytest.raises(ts.ModelError, match="several offloaded models"):
        ts.stats(both)
    with pytest.raises(ts.ModelError, match="not offloaded"):
        ts.stats(nn.Sequential(nn.Linear(1, 1)))


def train_on_two(rank: int, path: Path, streams: bool) -> None:
    """Trains one of two replicas."""
    torch.set_num_threads(1)  # the threads of OpenMP do not survive a fork
    distributed.init_process_group(
        "gloo", init_method=f"file://{path}/{streams}", rank=rank, world_size=2
    )
    base: Any = (
        ts.from_pretrained(path / "model", budget="800KiB")
        if streams
        else hf.LlamaForCausalLM.from_pretrained(path / "model")
    )
    model = with_lora(base)
    replica = nn.parallel.DistributedDataParallel(model)
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-3)
    losses = []
    for _ in range(3):
        loss = replica(input_ids=X + rank, labels=X + rank).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if streams:
        assert max(unit["loads"] for unit in ts.stats(model)["units"]) > 2
    torch.save([*losses, *own], path / f"{streams}{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_replicas_in_two_processes(programs: preloaded.Server, tmp_path: Path) -> None:
    """`DistributedDataParallel` averages gradients, and leaves the streamed weights alone."""
    saved(tmp_path / "model")
    program = """
        import sys
        from pathlib import Path
        from torch import multiprocessing
        tests, path = sys.argv[1:]
        sys.path.insert(0, tests)
        from test_adapters import train_on_two
        for streams in (False, True):
            arguments = (Path(path), streams)
            multiprocessing.start_processes(train_on_two, arguments, nprocs=2, start_method="fork")
    """
    done = programs.run_code(program, Path(__file__).parent, tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        expected, actual = (
            torch.load(tmp_path / f"{streams}{rank}.pt") for streams in (False, True)
        )
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
