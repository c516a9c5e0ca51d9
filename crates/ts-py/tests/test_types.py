# SPDX-License-Identifier: MIT OR Apache-2.0
"""What type checkers see of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tensorstream as ts

_PROGRAM = """
import tensorstream as ts

ts.plan("x", budget="1GiB").smallest_budget_bytes.bit_length()
ts.safe_open("x").keys()
{wrong}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("ts.from_pretraind('x')", "from_pretraind"),
        ("ts.Config(bugdet='1GiB')", "bugdet"),
        ("ts.plan(3)", "incompatible type"),
    ],
)
def test_a_misspelt_name_is_an_error(wrong: str, error: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM.format(wrong=wrong), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", str(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and error in done.stdout, done.stdout
    assert "Found 1 error" in done.stdout


def test_dir_lists_the_public_names() -> None:
    assert dir(ts) == sorted(ts.__all__)
    assert all(getattr(ts, name) is not None for name in ts.__all__)
