# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks the types of the package with mypy and pyright."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tensorstream as ts
import torch

_PROGRAM = """
import tensorstream as ts

ts.plan("x", budget="1GiB").smallest_budget_bytes.bit_length()
ts.safe_open("x").keys()
{wrong}
"""


#: Wrong lines, each with a word that the error message must contain.
_WRONG = {
    "ts.from_pretraind('x')": "from_pretraind",
    "ts.Config(bugdet='1GiB')": "bugdet",
    "ts.plan(3)": "incompatible type",
}


@pytest.mark.slow
def test_mypy_reports_misspelt_names(tmp_path: Path) -> None:
    # `cargo xtask ci` has checked the package before, so the cache knows what it imports.
    package = Path(__file__).parents[1]
    done = _check(
        tmp_path, "mypy", "--strict", f"--cache-dir={package / '.mypy_cache'}",
        f"--config-file={package / 'pyproject.toml'}",
    )  # fmt: skip
    assert done.returncode == 1 and all(error in done.stdout for error in _WRONG.values())
    assert "Found 3 errors" in done.stdout, done.stdout


@pytest.mark.slow
def test_pyright_reports_misspelt_names(tmp_path: Path) -> None:
    done = _check(tmp_path, "pyright", "--pythonpath", sys.executable)
    assert done.returncode == 1 and "from_pretraind" in done.stdout and "bugdet" in done.stdout
    assert "3 errors," in done.stdout, done.stdout


def _check(tmp_path: Path, *checker: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM.format(wrong="\n".join(_WRONG)), encoding="utf-8")
    command = [sys.executable, "-m", *checker, str(program)]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_stats_have_the_documented_keys(tmp_path: Path) -> None:
    model = ts.offload(torch.nn.Linear(8, 8), ts.Config(storage_path=tmp_path, budget="1MiB"))
    stats = ts.stats(model)
    assert stats.keys() == ts.Stats.__annotations__.keys()
    assert stats["plan"].keys() == ts.PlanStats.__annotations__.keys()
    assert stats["routed"].keys() == ts.RoutedStats.__annotations__.keys()
    assert stats["tables"].keys() == ts.TableStats.__annotations__.keys()
    assert stats["units"][0].keys() == ts.UnitStats.__annotations__.keys()
    with ts.listen("127.0.0.1:0") as listener, ThreadPoolExecutor(1) as threads:
        far = threads.submit(listener.accept)
        with ts.connect(listener.address, pool=ts.PoolConfig.high_throughput()) as near:
            wire = near.stats()
        far.result().close()
    assert wire.keys() == ts.ConnectionStats.__annotations__.keys()
    assert wire["pool"].keys() == ts.BlockPoolStats.__annotations__.keys()


def test_dir_lists_the_public_names() -> None:
    assert dir(ts) == sorted(ts.__all__)
    assert all(getattr(ts, name) is not None for name in ts.__all__)
