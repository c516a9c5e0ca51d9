# SPDX-License-Identifier: MIT OR Apache-2.0
"""Temporary directories of processes that were killed are removed, and those of others are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorstream._scratch import Scratch

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")

_HOLDER = """
import sys, time
from tensorstream._scratch import Scratch
scratch = Scratch("tensorstream-test-", sys.argv[1])
(scratch.path / "file").write_text("x")
print(scratch.path, flush=True)
time.sleep(100)
"""


def _hold(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, parent], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def _age(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (0, 0))


def test_only_directories_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (killed, of_killed), (running, of_running) = _hold(tmp_path), _hold(tmp_path)
    other, link = tmp_path / "tensorstream-other-1", tmp_path / "tensorstream-test-link"
    other.mkdir()
    link.symlink_to(other)
    with killed, running:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        # A directory that has just been created may not be locked yet.
        with Scratch("tensorstream-test-", tmp_path):
            assert (of_killed / "file").exists()
        _age(of_killed, of_running, other)
        with Scratch("tensorstream-test-", tmp_path) as own:
            assert sorted(tmp_path.iterdir()) == sorted([of_running, other, link, own])
        assert not own.exists() and (of_running / "file").exists()
        running.kill()


def test_the_directory_of_a_killed_client_is_removed_by_the_next(tmp_path: Path) -> None:
    program = """
import os, signal, torch
from tensorstream.remote import RemoteMachine
machine = RemoteMachine("{}", "cpu")
x = torch.ones(3, device=machine.device())
{}
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for kind, more in (("mock", ""), ("local", ""), ("mock", "x.sum(); machine.pause()")):
        text = program.format(kind, more)
        subprocess.run([sys.executable, "-c", text], env=environment, check=False, timeout=120)
    left = list(tmp_path.iterdir())
    assert len(left) >= 3, left
    _age(*left)
    text = (
        "from tensorstream.remote import RemoteMachine\nwith RemoteMachine.mock() as m: m.pause()"
    )
    subprocess.run([sys.executable, "-c", text], env=environment, check=True, timeout=120)
    assert not [path for path in left if path.exists()]
