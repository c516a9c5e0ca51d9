# SPDX-License-Identifier: MIT OR Apache-2.0
"""Temporary directories of processes that were killed are removed, and those of others are not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import preloaded
import pytest
import torch
from tensorstream._scratch import Scratch
from tensorstream.remote import RemoteMachine

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells one boot of a computer from another"
)

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


def test_only_directories_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (killed, of_killed), (running, of_running) = _hold(tmp_path), _hold(tmp_path)
    of_user, link = tmp_path / "tensorstream-test-runs", tmp_path / "tensorstream-test-link"
    of_user.mkdir()
    link.symlink_to(of_killed)
    # On a file system that computers share, locks of the others may not be seen.
    elsewhere = tmp_path / "tensorstream-test-elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".tensorstream").write_text("another boot", encoding="ascii")
    other_name = tmp_path / "tensorstream-other-1"
    shutil.copytree(of_killed, other_name)
    with killed, running:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        with Scratch("tensorstream-test-", tmp_path) as own:
            left = [of_running, of_user, link, elsewhere, other_name, own]
            assert sorted(tmp_path.iterdir()) == sorted(left)
        assert not own.exists() and (of_running / "file").exists()
        running.kill()


def test_a_directory_that_cannot_be_locked_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError

    monkeypatch.setattr("fcntl.flock", fail)
    kept = Scratch("tensorstream-test-", tmp_path)
    monkeypatch.undo()
    with Scratch("tensorstream-test-", tmp_path):
        assert kept.path.exists()
    kept.remove()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory in which the path of a socket is short enough. Those of pytest can be longer."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


def test_the_directory_of_a_killed_client_is_removed_by_the_next(
    programs: preloaded.Server, short_path: Path
) -> None:
    program = """
import os, signal, torch
from tensorstream.remote import RemoteMachine
machine = RemoteMachine("{}", "cpu")
x = torch.ones(3, device=machine.device())
{}
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "TMPDIR": str(short_path)}
    for kind, more in (("mock", ""), ("local", ""), ("mock", "x.sum(); machine.pause()")):
        text = program.format(kind, more)
        before = set(short_path.iterdir())
        done = programs.run_code(text, variables=environment)
        assert done.returncode == -signal.SIGKILL, done.stderr
        # What the one before has left is gone, and this one leaves its own.
        left = set(short_path.iterdir())
        assert left and not left & {path for path in before if "paused" not in path.name}
    text = (
        "from tensorstream.remote import RemoteMachine\nwith RemoteMachine.mock() as m: m.pause()"
    )
    done = programs.run_code(text, variables=environment)
    assert done.returncode == 0, done.stderr
    assert not [path for path in left if path.exists()]


def test_sockets_have_short_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary directory of a job on a cluster can have a long path."""
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with RemoteMachine("mock") as machine:
        assert torch.ones(3, device=machine.device()).sum().item() == 3.0
    assert not list(long.iterdir())
