# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs the Python and shell blocks of the README and docs/, and the examples of docstrings."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import Llama
from torch import nn

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: A block that cannot run has its reason above it: <!-- not run: reason -->.
_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL
)
_README_WORDS, _README_LINES = 700, 120
#: Modules whose docstrings have examples.
MODULES = [
    "tensorstream",
    "tensorstream.accelerate",
    "tensorstream.config",
    "tensorstream.diffusers",
    "tensorstream.errors",
    "tensorstream.files._convert",
    "tensorstream.files._safe_open",
    "tensorstream.files._state_dict",
    "tensorstream.numpy",
    "tensorstream.torch",
    "tensorstream.remote",
    "tensorstream.remote.client._functions",
    "tensorstream.remote.client._machine",
    "tensorstream.remote.client._trace",
    "tensorstream.streaming._offload",
    "tensorstream.streaming._plan",
    "tensorstream.streaming._stats",
    "tensorstream.wire._connection",
]


@dataclass
class Block:
    reason: str | None
    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    return [
        Block(**match.groupdict()) for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name)
def test_code_blocks_of_pages_run(
    page: Path, llama: Llama, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "checkpoint").symlink_to(llama())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    # Pages use these names without defining them.
    names = {
        "ids": torch.tensor([[1, 2, 3]]),
        "my_model": nn.Sequential(nn.Linear(3, 3), nn.ReLU()),
    }
    output: str | None = None
    for block in blocks(page):
        if block.reason:
            output = None
            continue
        if block.language == "python":
            exec(compile(block.code, name(page), "exec"), names)
        elif block.language == "sh":
            done = subprocess.run(
                ["bash", "-ec", block.code], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            output = done.stdout
        elif block.language == "text" and output is not None:
            assert without_numbers(output) == without_numbers(block.code)


def without_numbers(text: str) -> list[str]:
    # Numbers and I/O paths depend on the machine and its page cache.
    text = re.sub(r"\((?:buffered|direct)[^)]*\)", "(by some path)", text)
    return [
        re.sub(r"[\d.]+", "#", re.sub(r" +", " ", line)).strip()
        for line in text.strip().splitlines()
    ]


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert found.attempted and not found.failed


def test_skipped_blocks_have_a_reason() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        # Rust blocks run as doctests of the crate tensorstream.
        assert set(re.findall(r"^```(\w+)$", text, re.MULTILINE)) <= {
            "python",
            "sh",
            "text",
            "rust",
            "toml",
        }, page
        assert len(re.findall(r"^```\w+$", text, re.MULTILINE)) == len(blocks(page)), page


def test_the_readme_is_short() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert len(text.splitlines()) <= _README_LINES
    assert len(prose.split()) <= _README_WORDS
