# SPDX-License-Identifier: MIT OR Apache-2.0
"""The README does what it prints: its Python on a small checkpoint, its commands on the real one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Llama
from torch import nn
from transformers import LlamaForCausalLM

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_every_python_block_runs(llama: Llama, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint = llama()
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "checkpoint").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = {
        "ids": torch.tensor([[1, 2, 3]]),
        "any_module": LlamaForCausalLM.from_pretrained(checkpoint),
        "your_model": nn.Sequential(nn.Linear(3, 3), nn.ReLU()),
    }
    assert len(blocks("python")) >= 2
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    assert names["output"].shape[0] == 1
    assert names["half"].dtype is torch.float16
    assert names["tensors"]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_every_python_block_of_the_guides_runs(page: Path) -> None:
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, page.name, "exec"), names)


def without_numbers(text: str) -> list[str]:
    # Which way bytes come is the file system's and the page cache's.
    text = re.sub(r"\((?:buffered|direct)[^)]*\)", "(by some path)", text)
    return [re.sub(r"[\d.]+", "#", re.sub(r" +", " ", line)).strip() for line in text.strip().splitlines()]


def test_every_command_prints_what_the_readme_shows(tmp_path: Path) -> None:
    """But for the two that run this test, and figures, which are this machine's."""
    python = Path(sys.executable).parent
    pairs = re.findall(r"```sh\n((?:(?!```).)*?tensorstream .*?)```\n+```text\n(.*?)```", README, re.DOTALL)
    assert len(pairs) == 2
    script, shown = "".join(pair[0] for pair in pairs), "".join(pair[1] for pair in pairs)
    script = script.replace("$PWD/.venv/bin", str(python))
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert without_numbers(done.stdout) == without_numbers(shown)
