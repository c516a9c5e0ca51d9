# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains LoRA adapters with `Trainer` of transformers, over a model that does not fit into memory.

Only the line that loads the model differs from a script without TensorStream. The losses are those
of the model in memory.

Run: `python examples/lora_trainer.py`. Needs tensorstream, transformers, peft and accelerate. The
model is a small Llama with random weights, which is created in a temporary directory.
"""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import tensorstream as ts
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.utils import logging


class Examples(Dataset[dict[str, torch.Tensor]]):
    """Sixteen sequences of 32 tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(32) + 32 * index) % 100
        return {"input_ids": ids, "labels": ids}


def train(base: LlamaForCausalLM, directory: str) -> list[float]:
    """Trains adapters. Returns the loss of each step."""
    set_seed(0)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    arguments = TrainingArguments(
        output_dir=f"{directory}/run",
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        gradient_checkpointing=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Examples())
    trainer.train()
    model.save_pretrained(f"{directory}/adapter")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    logging.disable_progress_bar()
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        vocab_size=1000,
    )
    with tempfile.TemporaryDirectory() as directory:
        LlamaForCausalLM(config).save_pretrained(directory)
        expected = train(LlamaForCausalLM.from_pretrained(directory), directory)
        base = ts.from_pretrained(directory, budget="6MiB")  # the line that differs
        losses = train(base, directory)
        stats = ts.stats(base)
    read = sum(unit["read_bytes"] for unit in stats["units"])
    print(f"budget 6 MiB, {read / 2**20:.0f} MiB read in 4 steps")
    print("losses:", ", ".join(f"{loss:.3f}" for loss in losses))
    print("same losses as in memory:", losses == expected)


if __name__ == "__main__":
    main()
