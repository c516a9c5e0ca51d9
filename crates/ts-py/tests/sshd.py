# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs OpenSSH's server on loopback, with keys that exist for one test run."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_SSHD = shutil.which("sshd") or "/usr/sbin/sshd"

#: Why the tests cannot run, or None.
SKIP_REASON = (
    None
    if os.access(_SSHD, os.X_OK) and shutil.which("ssh")
    else "there is no OpenSSH server: run `apt-get install openssh-server`"
)


class Sshd:
    """A server that accepts one key. Ends with the ``with`` block."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in ("host", "user", "stranger"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)]
            subprocess.run(command, check=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        shutil.copy(directory / "user.pub", directory / "authorized")
        key = " ".join((directory / "host.pub").read_text(encoding="ascii").split()[:2])
        (directory / "known").write_text(f"[127.0.0.1]:{self.port} {key}\n", encoding="ascii")
        (directory / "unknown").touch()
        (directory / "config").write_text(
            f"""
            Port {self.port}
            ListenAddress 127.0.0.1
            HostKey {directory}/host
            AuthorizedKeysFile {directory}/authorized
            PidFile none
            UsePAM no
            StrictModes no
            PermitRootLogin yes
            PasswordAuthentication no
            KbdInteractiveAuthentication no
            MaxStartups 100
            AcceptEnv XDG_CACHE_HOME
            """,
            encoding="ascii",
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # for the separation of privileges
        command = [_SSHD, "-D", "-f", str(directory / "config"), "-E", str(directory / "log")]
        self.process = subprocess.Popen(command)
        end = time.monotonic() + 10
        while "Server listening" not in self.log():
            assert self.process.poll() is None and time.monotonic() < end, self.log()
            time.sleep(0.01)

    def log(self) -> str:
        """Returns what the server has logged."""
        path = self.directory / "log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def options(self, *, user: str = "user", known: str = "known") -> dict[str, Any]:
        """Returns the options of an ``SshProvider`` that reaches the server.

        Args:
            user: The name of the key.
            known: The name of the file with known hosts.
        """
        path = os.environ.get("PYTHONPATH")
        python = sys.executable if path is None else f"PYTHONPATH={path} {sys.executable}"
        return {
            "host": "127.0.0.1",
            "python": python,
            "threads": 1,
            "options": [
                *("-F", "none", "-p", str(self.port), "-i", str(self.directory / user)),
                *("-o", "IdentitiesOnly=yes"),
                *("-o", f"UserKnownHostsFile={self.directory / known}"),
            ],
        }

    def __enter__(self) -> Sshd:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(10)
