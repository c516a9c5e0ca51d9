# SPDX-License-Identifier: MIT OR Apache-2.0
"""Failures raise typed errors with file, tensor and cause, and leave the model usable."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorstream as ts
import torch
from conftest import Llama
from safetensors.torch import load_file, save_file
from tensorstream import _systems
from tensorstream.remote import RemoteMachine
from transformers import BertModel, LlamaForCausalLM

IDS = torch.arange(9).unsqueeze(0)


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def rewrite(file: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(file)
    for name, tensor in changes.items():
        tensors.pop(name)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.critical
def test_a_budget_that_is_too_small_is_refused_before_reading(minilm: Path) -> None:
    with pytest.raises(ts.BudgetError) as caught:
        ts.from_pretrained(minilm, budget="1MiB", model_class=BertModel)
    assert isinstance(caught.value, MemoryError)
    text = str(caught.value)
    assert "encoder.layer." in text
    smallest = int(text.split("smallest budget that works is ")[1].split(" ", maxsplit=1)[0])
    with pytest.raises(ts.BudgetError):
        ts.from_pretrained(minilm, budget=smallest - 1, model_class=BertModel)
    model = ts.from_pretrained(minilm, budget=smallest, model_class=BertModel)
    assert ts.stats(model)["read_bytes"] == 0
    with torch.inference_mode():
        model(IDS)


def test_a_truncated_shard_is_an_error(llama: Llama) -> None:
    path = llama(shard_size="300KB")
    victim = shards(path)[1]
    os.truncate(victim, victim.stat().st_size - 1000)
    with pytest.raises(
        ts.CheckpointError, match=rf"{victim.name}: truncated: tensor `.*` needs bytes \d+"
    ):
        ts.from_pretrained(path, budget="1MiB")


def test_a_missing_shard_is_an_error(llama: Llama) -> None:
    path = llama(shard_size="300KB")
    victim = shards(path)[1]
    victim.unlink()
    with pytest.raises(FileNotFoundError, match=victim.name) as caught:
        ts.from_pretrained(path, budget="1MiB")
    assert isinstance(caught.value, ts.TensorStreamError)


def test_a_missing_tensor_is_an_error(llama: Llama) -> None:
    path = llama()
    rewrite(shards(path)[0], {"model.layers.2.mlp.up_proj.weight": None})
    with pytest.raises(ts.MissingTensorError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        ts.from_pretrained(path, budget="1MiB")
    with torch.device("meta"):
        model = torch.nn.Linear(3, 4)
    with pytest.raises(
        KeyError, match=r"the model needs tensor `weight`, which is not in .*model\.safetensors"
    ):
        ts.offload(model, checkpoint=path, budget="1MiB")
    assert model.weight.is_meta, "the model is unchanged"


def test_an_indexed_tensor_that_no_shard_has_is_an_error(llama: Llama) -> None:
    path = llama(shard_size="300KB")
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra"] = shards(path)[0].name
    index.write_text(json.dumps(content))
    with pytest.raises(
        ts.CheckpointError, match=r"tensor `model\.extra` is listed in .*index\.json"
    ):
        ts.from_pretrained(path, budget="1MiB")


def test_a_wrong_shape_or_dtype_is_an_error(llama: Llama) -> None:
    path = llama()
    name = "model.layers.1.self_attn.q_proj.weight"
    rewrite(shards(path)[0], {name: torch.zeros(5, 7)})
    with pytest.raises(ts.CheckpointError, match=r"q_proj.*\[5, 7\].*\[96, 96\]"):
        ts.from_pretrained(path, budget="1MiB")
    with torch.device("meta"):
        model = torch.nn.Linear(7, 6)
    save_file(
        {"weight": torch.zeros(6, 7).half(), "bias": torch.zeros(6)}, path / "model.safetensors"
    )
    with pytest.raises(
        ts.CheckpointError, match=r"model\.safetensors: tensor `weight` at byte \d+ is F16 \[6, 7\]"
    ):
        ts.offload(model, checkpoint=path, budget="1MiB")


def test_a_missing_or_empty_directory_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=str(path)) as caught:
            ts.from_pretrained(path, budget="1MiB")
        assert isinstance(caught.value, ts.CheckpointNotFoundError)


def test_an_invalid_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x80" * 400)
    with pytest.raises(ts.CheckpointError, match=r"model\.safetensors: byte 0: "):
        ts.plan(file, budget="1MiB")


def test_missing_permission_is_an_error() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        path.chmod(0o755)
        save_file({"weight": torch.zeros(4)}, path / "model.safetensors")
        (path / "model.safetensors").chmod(0)
        root = os.geteuid() == 0
        if root:  # root can open all files
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError, match=r"model\.safetensors: cannot open") as caught:
                ts.plan(path, budget="1MiB")
        finally:
            if root:
                os.seteuid(0)
        assert isinstance(caught.value, ts.CheckpointPermissionError)


@pytest.mark.parametrize("change", ["truncate", "write"])
def test_changing_a_streamed_file_is_an_error(llama: Llama, change: str) -> None:
    path = llama()
    model = ts.from_pretrained(path, budget="300KiB")
    with torch.inference_mode():
        expected = model(IDS).logits
    file = shards(path)[0]
    content = file.read_bytes()
    if change == "truncate":
        os.truncate(file, len(content) // 3)
    else:
        with file.open("r+b") as handle:
            handle.seek(len(content) // 2)
            handle.write(b"\xff" * 4096)
    with torch.inference_mode():
        # A pass can still succeed with units that are in memory. At the latest, the third pass
        # raises an error. No pass returns a wrong result.
        with pytest.raises(
            ts.CheckpointChangedError, match=r"tensor `.*model\.safetensors.*byte \d+"
        ) as caught:
            for _ in range(3):
                assert torch.equal(model(IDS).logits, expected)
        assert isinstance(caught.value, OSError)
        with pytest.raises(ts.StorageError):
            model(IDS)
    with pytest.raises(ts.StorageError):
        ts.restore(model)


@pytest.mark.usefixtures("no_collector_callbacks")
@pytest.mark.parametrize("moment", range(6))
def test_ctrl_c_in_a_pass_leaves_the_model_usable(llama: Llama, moment: int) -> None:
    path = llama(num_hidden_layers=12)
    expected = LlamaForCausalLM.from_pretrained(path)(IDS).logits
    model = ts.from_pretrained(path, budget="300KiB")
    with torch.inference_mode():
        model(IDS)
        began = time.perf_counter()
        model(IDS)
        duration = time.perf_counter() - began
    timer = threading.Timer(duration * moment / 4, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        while True:
            with torch.inference_mode():
                model(IDS)
    timer.join()
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(IDS).logits, expected)
    assert torch.equal(ts.restore(model)(IDS).logits, expected)


def test_an_exception_in_the_model_leaves_it_usable(llama: Llama) -> None:
    path = llama()
    expected = LlamaForCausalLM.from_pretrained(path)(IDS).logits
    model = ts.from_pretrained(path, budget="300KiB")
    for _ in range(3):
        with pytest.raises(IndexError):
            model(torch.tensor([[10_000]]))
        assert torch.equal(model(IDS).logits, expected)


def test_what_windows_lacks_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(_systems, "sys", SimpleNamespace(platform="win32"))
    for call in (RemoteMachine.local, RemoteMachine.mock, lambda: ts.merge(model, "merged")):
        with pytest.raises(ts.ConfigurationError, match=r"does not work on Windows: .* Linux"):
            call()
