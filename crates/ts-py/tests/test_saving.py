# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streamed models save the files that the model in memory saves, in small pieces."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import preloaded
import pytest
import safetensors.torch
import tensorstream as ts
import torch
import transformers as hf
from conftest import Llama
from torch import nn

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
#: Models, the smallest budget or more, and arguments of `save_pretrained`. Some have tied weights,
#: experts that transformers stacks or transposes, weights that are computed, and convolutions.
MODELS: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)), "300KiB", {}),
    "tied": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, tie_word_embeddings=True)).half(),
        "150KiB",
        {"max_shard_size": "100KB", "variant": "fp16"},
    ),
    "mixtral": (
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SHAPE, num_local_experts=4)),
        "900KiB",
        {"max_shard_size": "200KB"},
    ),
    "qwen": (
        lambda: hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=32, head_dim=16)
        ).bfloat16(),
        "250KiB",
        {},
    ),
    "fused": (
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SHAPE, num_local_experts=4)),
        "900KiB",
        {"save_original_format": False},
    ),
    "bert": (
        lambda: hf.BertForMaskedLM(hf.BertConfig(**SHAPE)),
        "150KiB",
        {"state_dict": None},
    ),
    "t5": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2)
        ),
        "300KiB",
        {},
    ),
    "unet": (
        lambda: diffusers.UNet2DConditionModel(
            sample_size=8,
            layers_per_block=1,
            block_out_channels=(32, 64),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=4,
            norm_num_groups=8,
        ),
        "900KiB",
        {"max_shard_size": "1MB"},
    ),
}


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", MODELS)
def test_files_are_those_of_the_model_in_memory(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made, budget, how = MODELS[name]
    model_class = type(made())
    made().save_pretrained(tmp_path / "source")
    reference = model_class.from_pretrained(tmp_path / "source")
    reference.save_pretrained(tmp_path / "reference", **how)
    streamed = ts.from_pretrained(tmp_path / "source", budget=budget, model_class=model_class)
    streamed.save_pretrained(tmp_path / "saved", **how)
    assert contents(tmp_path / "saved") == contents(tmp_path / "reference")
    weights = sum(parameter.nbytes for parameter in reference.parameters())
    assert ts.stats(streamed)["reserved_high_water_bytes"] <= ts.stats(streamed)["budget_bytes"]
    assert ts.stats(streamed)["budget_bytes"] < weights
    # The functions of the libraries are theirs again.
    assert hf.modeling_utils.safe_save_file.__module__ == "safetensors.torch"


@pytest.mark.parametrize("suffix", ["ts", "packed.ts"])
def test_ts_files_and_casts_are_saved(suffix: str, llama: Llama, tmp_path: Path) -> None:
    path = llama()
    source = tmp_path / "source"
    source.mkdir()
    for file in path.glob("*.json"):
        (source / file.name).write_bytes(file.read_bytes())
    codec: Any = "auto" if suffix == "packed.ts" else "raw"
    budget = "3MiB" if suffix == "packed.ts" else "300KiB"  # decoding takes memory, too
    ts.save_file(ts.load_file(path), source / "model.ts", {"format": "pt"}, codec=codec)
    for how in ({}, {"dtype": torch.bfloat16}):
        hf.LlamaForCausalLM.from_pretrained(path, **how).save_pretrained(tmp_path / "reference")
        streamed = ts.from_pretrained(source, budget=budget, **how)
        streamed.save_pretrained(tmp_path / "saved")
        assert contents(tmp_path / "saved") == contents(tmp_path / "reference")


def test_new_weights_and_given_state_dicts_are_saved(llama: Llama, tmp_path: Path) -> None:
    path = llama()
    torch.manual_seed(0)
    streamed = ts.from_pretrained(
        path, budget="300KiB", model_class=hf.LlamaForSequenceClassification, num_labels=5
    )
    streamed.save_pretrained(tmp_path / "all")
    assert torch.equal(ts.load_file(tmp_path / "all")["score.weight"], streamed.score.weight)
    part = {
        "score.weight": streamed.score.weight,
        "norm": streamed.state_dict()["model.norm.weight"],
    }
    streamed.save_pretrained(tmp_path / "part", state_dict=part)
    saved = ts.load_file(tmp_path / "part")
    assert set(saved) == set(part)
    assert torch.equal(saved["norm"], ts.load_file(path)["model.norm.weight"])


def test_weights_in_memory_order_are_saved(tmp_path: Path) -> None:
    """The weights of a live model in channels-last order, streamed from its own file."""
    made, budget, _ = MODELS["unet"]
    torch.manual_seed(0)
    reference = made().to(memory_format=torch.channels_last)
    reference.save_pretrained(tmp_path / "reference")
    streamed = copy.deepcopy(reference)
    ts.offload(streamed, ts.Config(storage_path=tmp_path / "weights", budget=budget))
    streamed.save_pretrained(tmp_path / "saved")
    assert contents(tmp_path / "saved") == contents(tmp_path / "reference")


def test_libraries_write_streamed_weights(llama: Llama, tmp_path: Path) -> None:
    """With safetensors itself, and with accelerate, which asks for storages."""
    path = llama()
    wanted = ts.load_file(path)
    streamed = ts.from_pretrained(path, budget="300KiB")
    safetensors.torch.save_file(streamed.state_dict(), tmp_path / "all.safetensors")
    assert_equal(ts.load_file(tmp_path / "all.safetensors"), wanted)
    safetensors.torch.save_model(streamed, str(tmp_path / "model.safetensors"))
    assert_equal(ts.load_file(tmp_path / "model.safetensors"), wanted)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(streamed)
    accelerator.save_model(prepared, str(tmp_path / "saved"))
    assert_equal(ts.load_file(tmp_path / "saved"), wanted)
    accelerator.save_state(str(tmp_path / "state"))
    assert_equal(ts.load_file(tmp_path / "state"), wanted)
    with pytest.raises(ts.ModelError, match="no permanent memory"):
        streamed.lm_head.weight.data_ptr()


def test_the_directory_of_the_weights_is_refused(llama: Llama, tmp_path: Path) -> None:
    path = llama()
    before = contents(path)
    streamed = ts.from_pretrained(path, budget="300KiB")
    (tmp_path / "link").symlink_to(path)
    for directory in (path, str(path), tmp_path / "link"):
        with pytest.raises(ts.ModelError, match="another directory"):
            streamed.save_pretrained(directory)
    with pytest.raises(ts.ModelError, match="another directory"):
        streamed.save_pretrained(save_directory=path)
    assert contents(path) == before


def test_a_failed_save_leaves_the_model(llama: Llama, tmp_path: Path) -> None:
    streamed = ts.from_pretrained(llama(), budget="300KiB")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ts.StorageError):
        streamed.save_pretrained(tmp_path)
    assert hf.modeling_utils.safe_save_file.__module__ == "safetensors.torch"
    assert not isinstance(streamed.state_dict()["lm_head.weight"], nn.Parameter)
    streamed.save_pretrained(tmp_path / "saved")
    assert_equal(ts.load_file(tmp_path / "saved"), ts.load_file(llama()))


def test_other_threads_save_their_own_models(llama: Llama, tmp_path: Path) -> None:
    path = llama()
    streamed = ts.from_pretrained(path, budget="300KiB")
    inside = hf.LlamaForCausalLM.from_pretrained(path)
    failed: list[BaseException] = []

    def save(model: Any, name: str) -> None:
        try:
            for count in range(5):
                model.save_pretrained(tmp_path / f"{name}{count}")
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=save, args=each)
        for each in ((streamed, "a"), (inside, "b"), (streamed, "c"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    expected = contents(tmp_path / "b0")
    assert all(contents(tmp_path / f"{n}{i}") == expected for n in "abc" for i in range(5))


def test_saving_takes_little_memory(programs: preloaded.Server, tmp_path: Path) -> None:
    """200 MB of weights are saved by a process that grows by less than 40 MB."""
    config = hf.LlamaConfig(**SHAPE | {"hidden_size": 1024, "intermediate_size": 4096})
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    program = f"""
import tensorstream as ts
def peak():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["VmHWM"].split()[0])
model = ts.from_pretrained({str(tmp_path / "source")!r}, budget="20MB")
before = peak()
model.save_pretrained({str(tmp_path / "saved")!r})
print((peak() - before) * 1024, ts.stats(model)["reserved_high_water_bytes"])
"""
    done = programs.run_code(program)
    assert done.returncode == 0, done.stderr
    grown, reserved = map(int, done.stdout.split())
    assert grown < 40_000_000, "of which the budget is a half"
    assert reserved <= 20_000_000
    size = (tmp_path / "saved" / "model.safetensors").stat().st_size
    assert size > 180_000_000
    assert size == (tmp_path / "source" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("suffix", ["safetensors", "ts"])
def test_files_that_are_saved_over_stay_what_they_are(suffix: str, tmp_path: Path) -> None:
    """Their permissions, symbolic links and other names."""
    target, link, other = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}", tmp_path / "other"
    ts.save_file({"a": torch.zeros(3)}, target)
    target.chmod(0o600)
    link.symlink_to(target.name)
    ts.save_file({"a": torch.ones(2)}, link)
    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o600
    os.link(target, other)
    ts.save_file({"a": torch.full((1,), 7.0)}, target)
    assert target.samefile(other) and other.stat().st_nlink == 2
    assert ts.load_file(link)["a"].tolist() == [7.0]
    dangling = tmp_path / f"c.{suffix}"
    dangling.symlink_to(f"new.{suffix}")
    ts.save_file({"a": torch.ones(1)}, dangling)
    assert dangling.is_symlink() and (tmp_path / f"new.{suffix}").is_file()
    expected = {target.name, link.name, "other", dangling.name, f"new.{suffix}"}
    assert {path.name for path in tmp_path.iterdir()} == expected
    loop = tmp_path / f"loop.{suffix}"
    loop.symlink_to(loop.name)
    with pytest.raises(ts.StorageError, match="symbolic links"):
        ts.save_file({"a": torch.ones(1)}, loop)
    pipe = tmp_path / f"pipe.{suffix}"
    os.mkfifo(pipe)
    with pytest.raises(ts.StorageError, match="not a regular file"):
        ts.save_file({"a": torch.ones(1)}, pipe)


def test_a_file_that_another_user_prepared_is_not_written_to(tmp_path: Path) -> None:
    target, outside = tmp_path / "a.safetensors", tmp_path / "outside"
    outside.write_bytes(b"precious")
    partial = tmp_path / "a.safetensors.partial"
    for make in (os.symlink, os.link):
        make(outside, partial)
        with pytest.raises(ts.StorageError, match="remove"):
            ts.save_file({"a": torch.ones(1)}, target)
        partial.unlink()
    assert outside.read_bytes() == b"precious" and not target.exists()


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    left = [tmp_path / f"{'0' * 32}.ts.partial", tmp_path / f"converted-{'a' * 32}-zstd.ts.partial"]
    kept = [tmp_path / "model.ts.partial", tmp_path / f"{'0' * 32}.partial", tmp_path / "a.partial"]
    for path in (*left, *kept):
        path.write_bytes(b"x")
    ts.offload(nn.Sequential(nn.Linear(8, 8)), ts.Config(storage_path=tmp_path))
    assert not any(path.exists() for path in left) and all(path.exists() for path in kept)
