# SPDX-License-Identifier: MIT OR Apache-2.0
"""The README's Python runs as it is printed, on a small checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from conftest import Llama
from transformers import LlamaForCausalLM

README = Path(__file__).parents[3] / "README.md"


def test_every_python_block_runs(llama: Llama, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint = llama()
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "checkpoint").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    names = {"ids": torch.tensor([[1, 2, 3]]), "any_module": LlamaForCausalLM.from_pretrained(checkpoint)}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert names["output"].shape[0] == 1
