# SPDX-License-Identifier: MIT OR Apache-2.0
"""Adapters of PEFT over a small Llama and a small Mixtral, streamed and in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import tensorstream as ts
import torch
import transformers as hf

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
X = (torch.arange(24) * 7 % 250).reshape(2, 12)
LAYERS = ["q_proj", "v_proj"]
#: Arguments that a method needs beside the defaults.
NEEDED: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2, "target_modules": None},
    "C3A": {"block_size": 32},
    "CPT": {"cpt_token_ids": [1, 2, 3, 4], "num_virtual_tokens": None},
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 2},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2, 3], "target_modules": ["embed_tokens"]},
    "VBLORA": {"vector_length": 32, "num_vectors": 16},
    "VERA": {"r": 8},
}
#: Variants of LoRA.
VARIANTS: dict[str, dict[str, Any]] = {
    "rank-stabilised": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "all linear": {"target_modules": "all-linear"},
    "dropout": {"lora_dropout": 0.3},
    "bias": {"bias": "all"},
    "modules to save": {"modules_to_save": ["lm_head"]},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head"]},
    "tokens": {"trainable_token_indices": [1, 2]},
    "some layers": {"layers_to_transform": [1]},
    "replicated layers": {"layer_replication": [[0, 3], [2, 4]]},
    "rank pattern": {"rank_pattern": {"q_proj": 4}},
    "parameters": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
#: Methods that cannot train a Llama this way, with the reason.
EXCLUDED = {
    "SHADOW": "PEFT's own training fails for a model in memory",
    "XLORA": "it needs trained adapters on disk",
}


def cases() -> dict[str, Any]:
    """Returns the configuration of each method and of variants of LoRA, by name."""
    made = {}
    for kind, config in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items():
        if kind.value not in EXCLUDED:
            fields = config.__dataclass_fields__
            own = {"target_modules": LAYERS, "num_virtual_tokens": 4} | NEEDED.get(kind.value, {})
            own = {name: value for name, value in own.items() if name in fields}
            made[kind.value] = config(task_type="CAUSAL_LM", **own)
    for name, changes in VARIANTS.items():
        own = {"target_modules": LAYERS, **changes}
        made[f"LORA, {name}"] = peft.LoraConfig(task_type="CAUSAL_LM", **own)
    made["LORA, experts"] = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], target_parameters=EXPERTS
    )
    return made


def check_adapter(name: str, path: Path) -> None:
    """Requires the losses, gradients and results of the model in memory, over three steps.

    The budget is a third of the weights.
    """
    torch.manual_seed(0)
    source: Any
    if name == "LORA, experts":
        source = hf.MixtralForCausalLM(hf.MixtralConfig(**SHAPE, num_local_experts=4))
    else:
        source = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE))
    source.save_pretrained(path)
    size = sum(parameter.nbytes for parameter in source.parameters())
    expected = _train(type(source).from_pretrained(path), name)
    streamed = ts.from_pretrained(path, budget=size // 3)
    actual = _train(streamed, name)
    assert len(actual) == len(expected) > 4
    for mine, its in zip(actual, expected, strict=True):
        assert torch.equal(mine.nan_to_num(7.0), its.nan_to_num(7.0))
    stats = ts.stats(streamed)
    assert max(unit["loads"] for unit in stats["units"]) > 2, "the model streamed"
    assert stats["reserved_high_water_bytes"] <= size // 3


def _train(base: Any, name: str) -> list[torch.Tensor]:
    """Returns the losses and gradients of three steps, and the logits after them."""
    torch.manual_seed(1)
    model: Any = peft.get_peft_model(base, cases()[name])
    model.train()
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-2)
    arguments = {"input_ids": X}
    if name in ("MULTITASK_PROMPT_TUNING", "POLY"):
        arguments["task_ids"] = torch.zeros(2, dtype=torch.long)
    results = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(labels=X, **arguments).loss
        loss.backward()
        results.append(loss.detach())
        results += [parameter.grad for parameter in own if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
    with torch.no_grad():
        results.append(model(**arguments).logits)
    return results
