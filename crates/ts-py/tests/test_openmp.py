# SPDX-License-Identifier: MIT OR Apache-2.0
"""While weights are streamed, idle OpenMP threads sleep at once, unless the user has chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

#: Prints whether there are extra OpenMP threads: with a streamed model, and when it is gone.
SHOW = """
import gc, sys
from pathlib import Path
import torch
import tensorstream as ts

def threads():
    names = [task / "comm" for task in Path("/proc/self/task").iterdir()]
    return [name.read_text().strip() for name in names].count("ts-openmp")

model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
model = ts.offload(model, ts.Config(budget=sys.argv[2], storage_path=sys.argv[1]))
for _ in range(3):
    model(torch.ones(1, 256))
during = threads()
del model
gc.collect()
print(during > 0, threads() > 0)
"""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.get_num_threads() * 2 <= len(os.sched_getaffinity(0)),
    reason="idle threads of PyTorch take no processor that reading needs",
)


@pytest.mark.parametrize(
    ("budget", "variables", "expected"),
    (
        ("600KiB", {}, "True False"),
        ("64MiB", {}, "False False"),
        ("600KiB", {"OMP_WAIT_POLICY": "ACTIVE"}, "False False"),
        ("600KiB", {"GOMP_SPINCOUNT": "77"}, "False False"),
    ),
)
def test_idle_threads_sleep_while_weights_stream(
    budget: str, variables: dict[str, str], expected: str, tmp_path: Path
) -> None:
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    shown = subprocess.run(
        [sys.executable, "-c", SHOW, str(tmp_path), budget],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == expected
