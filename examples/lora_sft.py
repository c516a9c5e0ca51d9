# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains LoRA adapters with `SFTTrainer` of TRL, over a model that does not fit into memory.

Only the line that loads the model differs from a script without TensorStream. The losses are those
of the model in memory.

Run: `python examples/lora_sft.py`. Needs tensorstream, transformers, peft and trl. The model is a
small Llama with random weights and a tokenizer of a few words, which are created in a temporary
directory.
"""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import tensorstream as ts
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.utils import logging
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

TEXTS = ["the cat sees a dog", "a small dog likes the old house", "the old cat and the dog"]
WORDS = ["<pad>", "</s>", *sorted(set(" ".join(TEXTS).split()))]


def save(directory: str) -> None:
    """Writes a model and its tokenizer."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(directory)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        vocab_size=len(WORDS),
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def train(model: LlamaForCausalLM, directory: str) -> list[float]:
    """Trains adapters. Returns the loss of each step."""
    set_seed(0)
    trainer = SFTTrainer(
        model,
        SFTConfig(
            output_dir=f"{directory}/run",
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"text": TEXTS * 4}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(directory),
        peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        save(directory)
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
