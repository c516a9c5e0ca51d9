# SPDX-License-Identifier: MIT OR Apache-2.0
"""The arguments of transformers' ``from_pretrained`` act as they do there, or are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
import transformers
from conftest import Llama
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM

IDS = torch.arange(24).view(2, 12)


def assert_equal(model: Any, expected: Any) -> None:
    """Compares the outputs of two passes, in which units were streamed."""
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(IDS)[0], expected(IDS)[0])
    assert max(unit["loads"] for unit in ts.stats(model)["units"]) > 1
    assert type(model) is type(expected)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_memory": {"cpu": "300KiB"}, "device_map": "auto", "low_cpu_mem_usage": True},
        {"max_memory": {0: 0, "cpu": 300 << 10}, "device_map": {"": "cpu", "lm_head": "disk"}},
        {"budget": "300KiB", "device_map": torch.device("cpu"), "use_safetensors": True},
        {"budget": "300KiB", "torch_dtype": "auto", "offload_state_dict": True},
    ],
)
def test_placement_sets_the_budget(llama: Llama, arguments: dict[str, Any]) -> None:
    path = llama()
    model = ts.from_pretrained(path, **arguments)
    assert ts.stats(model)["budget_bytes"] == 300 << 10
    assert_equal(model, LlamaForCausalLM.from_pretrained(path))


def test_the_offload_folder_gets_what_must_be_written(llama: Llama, tmp_path: Path) -> None:
    path, folder = llama(), tmp_path / "offload"
    for dtype in ("torch_dtype", "dtype"):
        model = ts.from_pretrained(
            path, budget="300KiB", offload_folder=folder, **{dtype: torch.float16}
        )
        assert len(list(folder.glob("*.ts"))) == 1
        assert_equal(model, LlamaForCausalLM.from_pretrained(path, dtype=torch.float16))


def test_a_configuration_replaces_that_of_the_checkpoint(llama: Llama) -> None:
    path = llama()
    config = AutoConfig.from_pretrained(path)
    config.num_hidden_layers = 2
    expected = LlamaForCausalLM.from_pretrained(path, config=config)
    config.save_pretrained(path / "other")
    for given in (config, str(path / "other"), path / "other"):
        model = ts.from_pretrained(path, budget="300KiB", config=given)
        assert_equal(model, expected)
    both = ts.from_pretrained(path, config=ts.Config(budget="300KiB"), model_config=config)
    assert_equal(both, expected)
    assert_equal(
        ts.from_pretrained(path, budget="300KiB", num_hidden_layers=2, use_cache=False),
        LlamaForCausalLM.from_pretrained(path, num_hidden_layers=2, use_cache=False),
    )


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
def test_automatic_classes(llama: Llama, auto: Any) -> None:
    path = llama()
    model, info = ts.from_pretrained(
        path,
        budget="300KiB",
        model_class=auto,
        attn_implementation="eager",
        output_loading_info=True,
    )
    expected, its = auto.from_pretrained(
        path, attn_implementation="eager", output_loading_info=True
    )
    assert info == its
    assert model.config._attn_implementation == "eager"
    assert_equal(model, expected)


def test_the_generation_config_can_be_given(llama: Llama) -> None:
    path = llama()
    given = transformers.GenerationConfig(max_length=17)
    model = ts.from_pretrained(path, budget="300KiB", generation_config=given)
    expected = LlamaForCausalLM.from_pretrained(path, generation_config=given)
    assert model.generation_config == expected.generation_config
    assert model.generation_config.max_length == 17


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output
"""


def test_code_of_the_checkpoint_runs_only_if_it_is_trusted(llama: Llama) -> None:
    path = llama()
    (path / "modeling_own.py").write_text(CODE)
    config = json.loads((path / "config.json").read_text())
    config |= {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    expected = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    for model_class in (None, AutoModelForCausalLM):
        model = ts.from_pretrained(
            path, budget="300KiB", trust_remote_code=True, model_class=model_class
        )
        assert type(model).__name__ == "OwnForCausalLM"
        with torch.inference_mode():
            assert torch.equal(model(IDS)[0], expected(IDS)[0])
    with pytest.raises(ValueError, match="trust_remote_code"):
        ts.from_pretrained(path, budget="300KiB", trust_remote_code=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device_map": "cuda"}, "cannot use the device cuda:0"),
        ({"device": "cpu", "device_map": "cuda"}, "twice"),
        ({"host_budget": "1GB"}, "without an accelerator"),
        ({"device_map": {"": 0}}, "invalid device_map|cannot use the device"),
        ({"max_memory": {0: "10GB", "cpu": "1GB"}}, "invalid max_memory"),
        ({"max_memory": {"cpu": "much"}}, "invalid Config.budget"),
        ({"max_memory": {"cpu": "1MB"}, "budget": "1MB"}, "twice"),
        ({"gguf_file": "a.gguf"}, "convert it once"),
        ({"quantization_config": {"load_in_8bit": True}}, "stream as they are stored"),
        ({"load_in_4bit": True}, "stream as they are stored"),
        ({"use_safetensors": False}, "convert them to safetensors"),
        ({"state_dict": {}}, "use `offload`"),
        ({"ignore_mismatched_sizes": True}, "random"),
        ({"tp_plan": "auto"}, "one process"),
        ({"config": transformers.LlamaConfig(), "model_config": transformers.LlamaConfig()}, "one"),
        ({"config": ts.Config(), "budget": 1}, "cannot combine"),
    ],
)
def test_what_cannot_act_is_refused(llama: Llama, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ts.ConfigurationError, match=words):
        ts.from_pretrained(llama(), **arguments)


def test_quantised_checkpoints_are_refused_by_name(llama: Llama) -> None:
    path = llama()
    config = json.loads((path / "config.json").read_text())
    for method in ("fp8", "bitsandbytes", "torchao"):
        config["quantization_config"] = {"quant_method": method}
        (path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ts.ModelError, match=rf"quantised \({method}\)"):
            ts.from_pretrained(path, budget="300KiB")


def test_a_new_head_is_initialized_and_can_be_trained(llama: Llama) -> None:
    """The checkpoint has no classifier. A part of the model itself must not be missing."""
    path = llama()
    torch.manual_seed(3)
    expected = transformers.LlamaForSequenceClassification.from_pretrained(path, num_labels=3)
    torch.manual_seed(3)
    model = ts.from_pretrained(
        path,
        budget="300KiB",
        model_class=transformers.AutoModelForSequenceClassification,
        num_labels=3,
        pad_token_id=0,
    )
    expected.config.pad_token_id = 0
    assert type(model.score.weight) is torch.nn.Parameter
    assert torch.equal(model.score.weight, expected.score.weight)
    for own in (model, expected):
        own.model.requires_grad_(False) if own is expected else None
        optimizer = torch.optim.SGD([own.score.weight], lr=0.1)
        for _ in range(3):
            loss = own(IDS, labels=torch.tensor([0, 2])).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.score.weight, expected.score.weight)
    assert model.score.weight.requires_grad
    assert max(unit["loads"] for unit in ts.stats(model)["units"]) > 1
    ts.restore(model)
    assert torch.equal(model.score.weight, expected.score.weight)


def test_a_missing_pooler_is_initialized(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        max_position_embeddings=16, num_attention_heads=4,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    model = ts.from_pretrained(tmp_path, budget="80KiB", model_class=AutoModel)
    assert type(model.pooler.dense.weight) is torch.nn.Parameter
    expected = AutoModel.from_pretrained(tmp_path)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(IDS).last_hidden_state, expected(IDS).last_hidden_state)


def test_a_missing_head_is_an_error_unless_it_was_asked_for(llama: Llama, tmp_path: Path) -> None:
    path = llama()
    tensors = ts.load_file(path)
    del tensors["lm_head.weight"]
    ts.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    with pytest.raises(ts.MissingTensorError, match="lm_head"):
        ts.from_pretrained(tmp_path, budget="300KiB")
    model = ts.from_pretrained(tmp_path, budget="300KiB", model_class=transformers.LlamaForCausalLM)
    assert type(model.lm_head.weight) is torch.nn.Parameter


@pytest.mark.parametrize("content", ["[]", "{", '{"model_type": "unheard-of"}', None])
def test_damaged_configurations_are_named(
    content: str | None, llama: Llama, tmp_path: Path
) -> None:
    for file in llama().glob("*.safetensors"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ts.CheckpointError, match=re.escape(str(tmp_path))):
        ts.from_pretrained(tmp_path, budget="300KiB")


def test_directories_with_adapters_are_refused(llama: Llama, tmp_path: Path) -> None:
    for file in llama().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ts.ConfigurationError, match=r"peft\.PeftModel\.from_pretrained"):
        ts.from_pretrained(tmp_path, budget="300KiB")
