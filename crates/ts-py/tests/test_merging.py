# SPDX-License-Identifier: MIT OR Apache-2.0
"""Merges adapters of PEFT over streamed models, and compares the bytes with PEFT's in memory."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import tensorstream as ts
import torch
import transformers as hf
from adapters import SHAPE, X, cases
from torch import nn


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def saved(path: Path, name: str = "", dtype: torch.dtype = torch.float32, **config: Any) -> int:
    """Writes a small model. Returns the size of its weights in bytes."""
    torch.manual_seed(0)
    source: Any
    if name == "LORA, experts":
        source = hf.MixtralForCausalLM(hf.MixtralConfig(**SHAPE, num_local_experts=4))
    else:
        source = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE | config))
    source.to(dtype).save_pretrained(path)
    return sum(parameter.nbytes for parameter in source.parameters())


def randomised(model: Any) -> Any:
    """Gives the adapters of a model values that change what they adapt."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                noise = torch.randn(parameter.shape) * 0.02
                parameter.copy_(parameter + noise.to(parameter.dtype))
    return model


def adapted(base: Any, config: Any) -> Any:
    torch.manual_seed(1)
    return randomised(peft.get_peft_model(base, config))


def files(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a directory, read by safetensors."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= safetensors.torch.load_file(file)
    return found


def require_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        mine = actual[name]
        assert (mine.dtype, mine.shape) == (wanted.dtype, wanted.shape), name
        assert torch.equal(_bytes(mine), _bytes(wanted)), name


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


#: Methods and variants whose adapters PEFT cannot merge, with the error of PEFT.
UNMERGEABLE = {
    "LORA, replicated layers",
}
