# SPDX-License-Identifier: MIT OR Apache-2.0
"""Conversions in the background."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path

import preloaded
import pytest
import tensorstream as ts
import torch


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of 96 MiB that takes some time to compress."""
    torch.manual_seed(0)
    tensors = {f"t{i}": torch.randn(2 << 20).bfloat16() for i in range(24)}
    ts.save_file(tensors, tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"


def test_the_result_is_that_of_a_call_that_blocks(source: Path) -> None:
    background, blocking = source.with_name("background.ts"), source.with_name("blocking.ts")
    conversion = ts.convert(source, background, codec="auto", background=True)
    seen = [conversion.done_bytes]
    while not conversion.done():
        seen.append(conversion.done_bytes)
        time.sleep(0.001)
    conversion.result(timeout=0)
    assert conversion.done_bytes == conversion.total_bytes == 96 << 20
    assert seen == sorted(seen)
    assert len(set(seen)) > 2, "the progress is visible"
    ts.convert(source, blocking, codec="auto")
    assert background.read_bytes() == blocking.read_bytes()


def test_a_cancelled_conversion_resumes(source: Path) -> None:
    target = source.with_name("target.ts")
    conversion = ts.convert(source, target, codec="auto", background=True)
    while conversion.done_bytes < 16 << 20:
        time.sleep(0.001)
    with pytest.raises(TimeoutError, match=r"source\.safetensors to .*target\.ts.* still running"):
        conversion.result(timeout=0)
    conversion.cancel()
    with pytest.raises(CancelledError, match="was cancelled"):
        conversion.result(timeout=60)
    assert conversion.done()
    assert not target.exists()
    again = ts.convert(source, target, codec="auto", background=True)
    while again.total_bytes == 0:
        time.sleep(0.001)
    assert again.done_bytes >= 8 << 20, "tensors that were complete are not converted again"
    again.result()
    expected, loaded = ts.load_file(source), ts.load_file(target)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_errors_are_those_of_a_call_that_blocks(source: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match="suffix"):
        ts.convert(source, source.with_name("target.unknown"), background=True).result()
    missing = ts.convert(source.with_name("missing.ts"), source.with_name("a.ts"), background=True)
    for _ in range(2):
        with pytest.raises(ts.CheckpointNotFoundError):
            missing.result()
    assert missing.done()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads from /proc")
def test_deleting_a_conversion_ends_its_thread(source: Path) -> None:
    def runs() -> bool:
        names = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                names.add((task / "comm").read_text().strip())
        return "ts-convert" in names

    conversion = ts.convert(source, source.with_name("a.ts"), codec="auto", background=True)
    while conversion.done_bytes == 0:
        time.sleep(0.001)
    assert runs()
    del conversion
    # A thread that was joined is listed for another moment.
    end = time.monotonic() + 10
    while runs():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_complete_conversion_reports_all_bytes(source: Path) -> None:
    target = source.with_name("target.ts")
    for _ in range(2):
        conversion = ts.convert(source, target, background=True)
        conversion.result()
        assert conversion.done_bytes == conversion.total_bytes == 96 << 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_forked_child_ends_without_waiting_for_a_conversion(
    programs: preloaded.Server, source: Path
) -> None:
    program = """
import os, sys, tensorstream as ts
conversion = ts.convert(sys.argv[1], sys.argv[2], codec="auto", background=True)
child = os.fork()
if child == 0:
    try:
        conversion.result()
    except RuntimeError as error:
        assert "parent of this process" in str(error)
        sys.exit(7)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
conversion.result()
"""
    target = source.with_name("target.ts")
    done = programs.run_code(program, source, target)
    assert done.returncode == 0, done.stderr
    assert len(ts.load_file(target)) == 24


def test_the_end_of_the_process_stops_a_conversion(
    programs: preloaded.Server, source: Path
) -> None:
    target = source.with_name("target.ts")
    program = """
import sys, time, tensorstream as ts
conversion = ts.convert(sys.argv[1], sys.argv[2], codec="auto", background=True)
while conversion.done_bytes < 16 << 20:
    time.sleep(0.001)
"""
    done = programs.run_code(program, source, target)
    assert (done.returncode, done.stderr) == (0, "")
    assert not target.exists()
    ts.convert(source, target, codec="auto")
    assert len(ts.load_file(target)) == 24
