# SPDX-License-Identifier: MIT OR Apache-2.0
"""``tensorstream.accelerate`` takes what accelerate takes, with the same results."""

from __future__ import annotations

import gc
import inspect
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate as theirs
import pytest
import tensorstream as ts
import tensorstream.accelerate as ours
import torch
import transformers
from accelerate.hooks import remove_hook_from_module
from torch import nn

X = torch.arange(10)[None]


class Model(nn.Module):
    """Tied weights, a persistent buffer that is not at its initial value, and six layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)
        )
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 300, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))


@pytest.fixture
def reference() -> Model:
    torch.manual_seed(0)
    model = Model().eval()
    model.norm.running_mean.normal_()
    return model


@pytest.fixture
def checkpoint(reference: Model, tmp_path: Path) -> Path:
    tensors = reference.state_dict()
    del tensors["head.weight"]
    (tmp_path / "checkpoint").mkdir()
    ts.save_file(tensors, tmp_path / "checkpoint" / "model.safetensors")
    return tmp_path / "checkpoint"


def empty() -> Model:
    with ours.init_empty_weights():
        return Model().eval()


def copy_of(reference: Model) -> Model:
    model = Model().eval()
    model.load_state_dict(reference.state_dict())
    return model


def check(model: nn.Module, reference: nn.Module, *, streams: bool = True) -> None:
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(model(X), reference(X))
    if streams:
        assert max(unit["loads"] for unit in ts.stats(model)["units"]) > 1
        assert ts.stats(model)["budget_bytes"] < sum(p.nbytes for p in reference.parameters())
        assert len(model.hf_device_map) > 1


@pytest.mark.parametrize("name", ours.__all__)
def test_signatures(name: str) -> None:
    if inspect.isclass(getattr(ours, name)):
        return
    expected = inspect.signature(getattr(theirs, name)).parameters
    found = inspect.signature(getattr(ours, name)).parameters
    assert list(found)[: len(expected)] == list(expected)
    assert all(found[each].default == expected[each].default for each in expected)
    assert set(found) - set(expected) <= {"budget"}


def test_other_names_are_those_of_accelerate() -> None:
    assert ours.Accelerator is theirs.Accelerator
    with pytest.raises(AttributeError, match="nothing"):
        _ = ours.nothing


@pytest.mark.parametrize(
    "how",
    [
        {"device_map": "auto", "max_memory": {"cpu": "300KiB"}},
        {"device_map": "sequential", "max_memory": {0: 0, "cpu": "300KiB"}, "strict": True},
        {"device_map": "auto", "budget": "300KiB", "no_split_module_classes": ["Sequential"]},
        {"device_map": {"": "disk"}, "offload_folder": "unused"},
        {"device_map": {"embed": "cpu", "layers": "disk", "norm": "cpu", "head": "cpu"}},
        {"device_map": {"": "cpu"}, "max_memory": {"cpu": "300KiB"}},
        {
            "device_map": OrderedDict({"embed": "disk", "layers": torch.device("cpu"), "": "cpu"}),
            "budget": "300KiB",
        },
    ],
)
def test_checkpoints_are_dispatched(
    how: dict[str, Any], reference: Model, checkpoint: Path
) -> None:
    model = ours.load_checkpoint_and_dispatch(empty(), checkpoint, **how)
    check(model, reference)
    restored = ts.restore(model)
    assert not hasattr(restored, "hf_device_map")
    check(restored, reference, streams=False)


def test_without_a_map_weights_are_read(reference: Model, checkpoint: Path) -> None:
    model = ours.load_checkpoint_and_dispatch(empty(), checkpoint)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert model.head.weight is model.embed.weight
    check(model, reference, streams=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16", "torch.float64"])
def test_weights_and_buffers_are_cast(
    dtype: Any, reference: Model, checkpoint: Path, tmp_path: Path
) -> None:
    model = ours.load_checkpoint_and_dispatch(
        empty(), checkpoint, "auto", dtype=dtype, budget="200KiB", offload_folder=tmp_path / "cast"
    )
    wanted = getattr(torch, str(dtype).removeprefix("torch."))
    check(model, reference.to(wanted))
    # Without a dtype, the weights get that of the model.
    model = ours.load_checkpoint_and_dispatch(
        empty().to(wanted), checkpoint, "auto", budget="200KiB", offload_folder=tmp_path / "cast"
    )
    check(model, reference)


def test_a_failed_call_changes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    model = empty()
    model.tie_weights()
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    with pytest.raises(ts.BudgetError, match="smallest budget"):
        ours.load_checkpoint_and_dispatch(
            model, checkpoint, "auto", budget=10, dtype=torch.float16, offload_folder=tmp_path
        )
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(after[name] is tensor for name, tensor in before.items())


def test_models_in_memory_are_offloaded(reference: Model, tmp_path: Path) -> None:
    check(ours.disk_offload(copy_of(reference), tmp_path / "a", "cpu", budget="200KiB"), reference)
    # A map that accelerate made for less memory than the model has.
    device_map = theirs.infer_auto_device_map(reference, max_memory={"cpu": "350KB"})
    assert {"cpu", "disk"} == set(device_map.values())
    model = ours.dispatch_model(copy_of(reference), device_map, offload_dir=tmp_path / "b")
    check(model, reference)
    assert ts.stats(model)["budget_bytes"] < 500_000


def test_models_on_the_cpu_stay_there(reference: Model) -> None:
    weights = reference.state_dict()
    model = ours.cpu_offload(Model().to("meta").eval(), state_dict=weights)
    assert model.embed.weight.data_ptr() == weights["embed.weight"].data_ptr()
    check(model, reference, streams=False)
    model, hook = ours.cpu_offload_with_hook(copy_of(reference))
    _, after = ours.cpu_offload_with_hook(model, "cpu", prev_module_hook=hook)
    check(model, reference, streams=False)
    hook.offload()
    after.remove()
    model = ours.dispatch_model(copy_of(reference), {"": "cpu"})
    check(model, reference, streams=False)
    meta = ours.dispatch_model(Model().to("meta").eval(), {"": "cpu"}, state_dict=weights)
    check(meta, reference, streams=False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda d: ours.disk_offload(Model(), d / "new", execution_device=0),
            "cannot use the device",
        ),
        (lambda d: ours.cpu_offload(Model(), torch.device("cuda")), "device cuda"),
        (lambda d: ours.dispatch_model(Model(), {"": 0}), "device cuda:0"),
        (
            lambda d: ours.dispatch_model(Model(), {"": 0}, offload_dir=d / "new"),
            "cannot use the device",
        ),
        (lambda d: ours.dispatch_model(Model(), {"embed": "cpu"}), "does not name `layers.0"),
        (lambda d: ours.dispatch_model(Model(), {"": "disk"}), "offload_dir"),
        (lambda d: ours.dispatch_model(Model(), {"": "cpu"}, offload_index={}), "offload_index"),
        (
            lambda d: ours.dispatch_model(Model(), {"": "cpu"}, main_device=1),
            "not in the device map",
        ),
        (lambda d: ours.cpu_offload(Model().to("meta")), "on the meta device"),
        (lambda d: ours.load_checkpoint_and_dispatch(empty(), d, "auto", dtype="int3"), "int3"),
        (lambda d: ours.load_checkpoint_and_dispatch(empty(), d, "auto", {0: "3GB"}), "max_memory"),
        (lambda d: ours.load_checkpoint_and_dispatch(empty(), d, "everywhere"), "device_map"),
        (
            lambda d: ours.load_checkpoint_and_dispatch(
                empty(), d, "auto", {"cpu": "3GB"}, budget="2GB"
            ),
            "given twice",
        ),
        (
            lambda d: ours.load_checkpoint_and_dispatch(empty(), d, broadcast_from_rank0=True),
            "broadcast",
        ),
        (
            lambda d: ours.load_checkpoint_and_dispatch(empty().layers, d, "auto", strict=True),
            "does not have",
        ),
    ],
)
def test_refusals(call: Callable[[Path], Any], message: str, checkpoint: Path) -> None:
    with pytest.raises(ts.TensorStreamError, match=message):
        call(checkpoint)
    assert not (checkpoint / "new").exists()


def test_a_directory_of_accelerate_is_recognised(reference: Model, tmp_path: Path) -> None:
    theirs.disk_offload(copy_of(reference), tmp_path)
    with pytest.raises(ts.ConfigurationError, match="format of accelerate"):
        ours.disk_offload(empty(), tmp_path)
    check(ours.disk_offload(copy_of(reference), tmp_path, budget="200KiB"), reference)


@pytest.mark.parametrize("device_map", [None, "auto"])
def test_files_of_torch_save_are_loaded(
    device_map: str | None, reference: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    torch.save(reference.state_dict(), tmp_path / "model.bin")
    budget = None if device_map is None else "300KiB"
    model = ours.load_checkpoint_and_dispatch(
        empty(), tmp_path / "model.bin", device_map, budget=budget
    )
    check(model, reference, streams=device_map is not None)
    assert list(tmp_path.glob("tensorstream-weights-*/model.ts"))
    del model
    gc.collect()
    assert [each.name for each in tmp_path.iterdir()] == ["model.bin"]


@pytest.mark.parametrize("saved", [{"embed": [1.0]}, [torch.ones(1)], {"a": print}])
def test_other_files_of_torch_save_are_refused(saved: Any, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "model.bin")
    with pytest.raises(ts.CheckpointError, match=r"expected tensors by name|cannot read the tens"):
        ours.load_checkpoint_and_dispatch(empty(), tmp_path / "model.bin", "auto")


def test_libraries_leave_streamed_models_where_they_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=4, decoder_start_token_id=0
    )
    reference = transformers.T5ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = reference.generate(X + 3, **options)

    plain = ts.from_pretrained(tmp_path, budget="300KiB")
    assert hasattr(plain, "hf_device_map") == torch.accelerator.is_available()
    streamed = ts.from_pretrained(tmp_path, budget="300KiB", device_map="auto")
    accelerator = theirs.Accelerator(cpu=True)
    assert accelerator.verify_device_map(streamed)
    prepared = accelerator.prepare(streamed)
    # transformers wraps the forward of the encoder of a model with a device map.
    for _ in range(2):
        assert torch.equal(prepared.generate(X + 3, **options), expected)
    assert max(unit["loads"] for unit in ts.stats(streamed)["units"]) > 1
    assert hasattr(streamed.get_encoder(), "_hf_hook")
    restored = ts.restore(streamed)
    assert torch.equal(restored.generate(X + 3, **options), expected)
    remove_hook_from_module(restored, recurse=True)
    assert torch.equal(restored.generate(X + 3, **options), expected)


def test_a_map_counts_weights_as_they_are_cast(
    reference: Model, checkpoint: Path, tmp_path: Path
) -> None:
    budgets = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        model = ours.load_checkpoint_and_dispatch(
            empty(), checkpoint, {"": "disk"}, dtype=dtype, offload_folder=tmp_path / "cast"
        )
        check(model, copy_of(reference).to(dtype))
        budgets[dtype] = ts.stats(model)["budget_bytes"]
    assert budgets[torch.float64] == 2 * budgets[torch.float32] == 4 * budgets[torch.bfloat16]


def test_refused_calls_assign_no_weights(reference: Model) -> None:
    model = Model().to("meta")
    for refused in ({"device_map": {"": "disk"}}, {"device_map": {"": "cpu"}, "main_device": 0}):
        with pytest.raises(ts.ConfigurationError):
            ours.dispatch_model(model, state_dict=reference.state_dict(), **refused)
        assert all(parameter.is_meta for parameter in model.parameters())
