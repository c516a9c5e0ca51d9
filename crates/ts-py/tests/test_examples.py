# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs every example, and checks that its output contains the expected result."""

from __future__ import annotations

import os
from pathlib import Path

import preloaded
import pytest
from raycluster import RayCluster
from test_docs import ROOT, blocks, without_numbers

EXAMPLES = ROOT / "examples"
SAYS = {
    "basic.py": "results bit-identical: True",
    "advanced_configuration.py": "do not match their checksum",
    "huggingface_directory.py": "embeddings bit-identical to the model in memory: True",
    "comparison.py": "same tokens: True",
    "data_parallel.py": "losses as on this computer, up to rounding: True",
    "lora_sft.py": "same losses as in memory: True",
    "lora_trainer.py": "same losses as in memory: True",
    "pipeline.py": "losses as on this computer, up to rounding: True",
    "remote_inference.py": "same tokens as on this computer: True",
    "remote_training.py": "same losses as on this computer: True",
    "send_tensors.py": "all delivered: True",
}

# Each of the others shows much of what one of these does.
LONG = {"comparison.py", "lora_sft.py", "pipeline.py"}


def test_every_example_is_tested() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == {*SAYS, "machines.py"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in LONG else []) for name in SAYS],
)
def test_examples_run(name: str, programs: preloaded.Server, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = programs.run(EXAMPLES / name, [], environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
    if name == "pipeline.py":
        assert "same tokens as on this computer: True" in done.stdout
    if name == "huggingface_directory.py":  # the demo
        shown = next(b for b in blocks(ROOT / "docs/install.md") if "embeddings" in b.code)
        printed = without_numbers(done.stdout)
        assert all(line in printed for line in without_numbers(shown.code))


@pytest.mark.long
def test_examples_run_on_a_ray_cluster(programs: preloaded.Server) -> None:
    with RayCluster() as cluster:
        for name in ("data_parallel.py", "pipeline.py"):
            arguments = ["ray", cluster.address]
            done = programs.run(EXAMPLES / name, arguments, os.environ, timeout=300)
            assert done.returncode == 0, done.stderr
            assert SAYS[name] in done.stdout
