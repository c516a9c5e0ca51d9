# SPDX-License-Identifier: MIT OR Apache-2.0
"""Gives memory back while other programs need it, and takes it again.

The limit of a process on its data stands for the memory that others leave, because a test may lower
and raise it.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import preloaded
import pytest
import tensorstream as ts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the memory")

START = """
import resource, sys, time
import tensorstream as ts, torch

def field(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024

def leave(available):
    "Sets the limit such that this much can still be allocated; None for no limit."
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = hard if available is None else field("VmData:") + available
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

def limit():
    return ts.stats(model)["limit_bytes"]

def wait(reached, seconds):
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, f"the limit is still {limit() >> 20} MiB"
        time.sleep(0.02)
        if passes:
            check()

def check():
    with torch.inference_mode():
        assert torch.equal(model(x), expected)

MIB = 1 << 20
passes = sys.argv[2] == "busy"
torch.manual_seed(0)
x = torch.randn(2, 1024)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(64)))
expected = model(x)
config = ts.Config(storage_path=sys.argv[1], budget="160MiB", memory_pressure_mode=sys.argv[3])
model = ts.offload(model, config)
check()
"""


def run(programs: preloaded.Server, program: str, tmp_path: Path, *arguments: str) -> None:
    """Runs a program in a new process, because it changes limits of its process."""
    done = programs.run_code(START + textwrap.dedent(program), tmp_path, *arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("load", ["idle", "busy"])
def test_memory_is_given_back_and_taken_again(
    programs: preloaded.Server, tmp_path: Path, load: str
) -> None:
    run(
        programs,
        """
        check()
        assert limit() == 160 * MIB
        before = field("VmRSS:")
        leave(50 * MIB)
        wait(lambda: limit() < 90 * MIB, 10)
        wait(lambda: field("VmRSS:") < before - 60 * MIB, 10)
        check()
        stats = ts.stats(model)
        assert stats["in_use_bytes"] <= stats["limit_bytes"], stats
        assert stats["plan"]["peak_bytes"] <= stats["limit_bytes"], stats
        leave(None)
        wait(lambda: limit() == 160 * MIB, 20)
        check(), check()
        plan = ts.stats(model)["plan"]
        assert plan["resident_bytes"] + plan["compressed_bytes"] > 100 * MIB, plan
        check()
        """,
        tmp_path,
        load,
        "adaptive",
    )


def test_a_strict_budget_ignores_pressure(programs: preloaded.Server, tmp_path: Path) -> None:
    run(
        programs,
        """
        leave(20 * MIB)
        time.sleep(0.5)
        check()
        assert limit() == 160 * MIB
        """,
        tmp_path,
        "idle",
        "strict",
    )


def test_a_lenient_budget_borrows_and_returns_idle_memory(
    programs: preloaded.Server, tmp_path: Path
) -> None:
    run(
        programs,
        """
        assert limit() == 160 * MIB
        assert ts.stats(model)["budget_bytes"] > 250 * MIB
        wait(lambda: limit() > 250 * MIB, 20)
        check(), check(), check()
        assert ts.stats(model)["plan"]["streamed_bytes_per_pass"] == 0
        leave(32 * MIB)
        wait(lambda: limit() == 160 * MIB, 20)
        check()
        """,
        tmp_path,
        "busy",
        "lenient",
    )


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ts.ConfigurationError, match="one of strict, adaptive, lenient"):
        ts.Config(memory_pressure_mode="hopeful")
