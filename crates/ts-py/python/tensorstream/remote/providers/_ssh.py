# SPDX-License-Identifier: MIT OR Apache-2.0
"""The provider "ssh": ``tensorstream serve`` on a machine that the user's ssh reaches."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from ...errors import (
    ConfigurationError,
    ProviderAuthenticationError,
    ProviderCapacityError,
    ProviderConnectionError,
    ProviderError,
)
from ._base import Provider, Request, Server

_log = logging.getLogger("tensorstream.remote")

#: A dead connection is noticed after this many probes without an answer, in these intervals.
_PROBES, _INTERVAL = 3, 5
#: The shortest and the longest pause before a lost tunnel is opened again, in seconds.
_PAUSES = 0.1, 2.0
#: The time that a started server may take to listen, in seconds. Importing PyTorch can be slow.
_START = 120
#: The time that copying a wheel may take, in seconds.
_UPLOAD = 600
#: The time that ssh may take to end, in seconds.
_STOP = 5.0
#: The most bytes of ssh's and the server's messages in an error.
_MESSAGE = 2000

#: What ssh or the server prints, and the error that it means.
_ERRORS: tuple[tuple[str, type[ProviderError], str], ...] = (
    (
        r"Permission denied|Host key verification failed|Too many authentication failures|"
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        ProviderAuthenticationError,
        "check that `ssh {host}` works without questions (keys in the agent, a known host)",
    ),
    (
        r"No space left on device|Cannot allocate memory|Resource temporarily unavailable|"
        r"Disk quota exceeded|MemoryError",
        ProviderCapacityError,
        "free memory or disk space there",
    ),
)


class SshProvider(Provider):
    """Starts ``tensorstream serve`` through the user's ``ssh``, and forwards its socket.

    The server listens on a Unix socket in a directory that only its user can read. It ends with its
    session, also if this process dies. If the connection breaks, it is opened again.

    ssh uses the user's configuration, keys and jump hosts. It asks no questions.

    Args:
        host: The host, as ``ssh`` takes it: a name, ``USER@HOST``, or a host of the configuration.
        python: The Python on that host, in which PyTorch is installed, and TensorStream unless
            there is a ``wheel``. It may have environment variables before it, as in a shell.
        wheel: A wheel of TensorStream. It is copied to the user's cache directory there once, and
            unpacked. ``python`` stays as it is.
        threads: The number of PyTorch threads of the session.
        options: More arguments of ``ssh``, such as ``["-p", "2222"]``.
        connect_timeout: The longest time to wait for the host, in seconds.

    Raises:
        ConfigurationError: An option is invalid.
    """

    name = "ssh"

    def __init__(
        self,
        host: str,
        *,
        python: str = "python3",
        wheel: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        options: Sequence[str] = (),
        connect_timeout: float = 15.0,
    ) -> None:
        if not isinstance(host, str) or not host or host.startswith("-"):
            raise ConfigurationError(f"invalid host {host!r}: expected a name, or USER@HOST")
        if not isinstance(options, list | tuple):
            raise ConfigurationError(
                f"invalid options {options!r}: expected a list, such as ['-p', '2222']"
            )
        if wheel is not None and not Path(wheel).is_file():
            raise ConfigurationError(f"invalid wheel {os.fspath(wheel)!r}: there is no such file")
        self.host, self._python = host, python
        self._wheel = None if wheel is None else Path(wheel)
        self._threads = threads
        self._ssh = [
            "ssh",
            *("-o", "BatchMode=yes"),
            *("-o", f"ConnectTimeout={max(1, round(connect_timeout))}"),
            *("-o", f"ServerAliveInterval={_INTERVAL}"),
            *("-o", f"ServerAliveCountMax={_PROBES}"),
            *options,
        ]

    @classmethod
    def probe(cls) -> str | None:
        """Returns ``None`` if there is a program ``ssh``, else what to do."""
        return None if shutil.which("ssh") else "there is no program `ssh`: install OpenSSH"

    def start(self, request: Request) -> Server:
        """Starts a server on the host. Blocks until it listens and its socket is forwarded."""
        python = self._python
        if self._wheel is not None:
            python = f"PYTHONPATH={shlex.quote(self._unpack(self._wheel))}:$PYTHONPATH {python}"
        directory = f"/tmp/tensorstream-{secrets.token_hex(8)}"
        self._run(_start_script(directory, python, request, self._threads), timeout=_START)
        return _Forwarded(self._ssh, self.host, f"{directory}/socket", request.name)

    def _unpack(self, wheel: Path) -> str:
        """Unpacks a wheel on the host, unless it is there. Returns the directory."""
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
            have = self._run(_unpacked_script(digest), _START).splitlines()
            if not have:
                _log.info("copying %s to %s", wheel.name, self.host)
                file.seek(0)
                script = _unpack_script(digest, self._python)
                have = self._run(script, _UPLOAD, file).splitlines()
        return have[-1]

    def _run(self, script: str, timeout: float, stdin: IO[bytes] | None = None) -> str:
        """Runs a script on the host. Returns its output.

        Raises:
            ProviderError: The host cannot be reached, or the script failed.
        """
        command = [*self._ssh, self.host, f"exec sh -c {shlex.quote(script)}"]
        try:
            ran = subprocess.run(
                command,
                stdin=stdin or subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ProviderConnectionError(
                f"cannot start a machine on {self.host}: it did not answer in {timeout:g} seconds"
            ) from None
        if ran.returncode:
            raise _error(self.host, ran.returncode, f"{ran.stdout}{ran.stderr}")
        return ran.stdout


def _error(host: str, status: int, output: str) -> ProviderError:
    """Returns the error for what ssh, or a script that it ran, has printed."""
    text = output.strip()[-_MESSAGE:] or f"ssh ended with status {status}"
    for pattern, error, what_to_do in _ERRORS:
        if re.search(pattern, output):
            return error(
                f"cannot start a machine on {host}: {text}; {what_to_do.format(host=host)}"
            )
    if status == 255:  # ssh itself failed
        return ProviderConnectionError(
            f"cannot reach {host}: {text}; check that `ssh {host}` works"
        )
    if "No module named" in output or "not found" in output:
        return ProviderError(
            f"cannot start a machine on {host}: {text}; install TensorStream and PyTorch for the "
            "option `python` there, or pass `wheel`"
        )
    return ProviderError(f"cannot start a machine on {host}: {text}")


def _start_script(directory: str, python: str, request: Request, threads: int | None) -> str:
    """Returns a script that starts a server, and waits until it listens."""
    serve = [
        *("-m", "tensorstream.serve", "--listen", f"unix:{directory}/socket", "--once"),
        *("--device", request.kind, "--devices", str(request.device_count)),
        *([] if threads is None else ["--threads", str(threads)]),
    ]
    # `python` may begin with "~", so it is not quoted. The log is there a little longer than the
    # directory, so that it can be printed.
    server = f"{python} {shlex.join(serve)}; rm -rf {directory}; sleep 5; rm -f {directory}.log"
    return f"""
umask 077
mkdir {directory} || exit 1
nohup sh -c {shlex.quote(server)} >{directory}.log 2>&1 </dev/null &
while ! grep -qs '^listening' {directory}.log; do
    if ! [ -d {directory} ]; then
        cat {directory}.log >&2
        exit 1
    fi
    sleep 0.05
done
"""


#: The directory in which wheels are unpacked.
_CACHE = '"${XDG_CACHE_HOME:-$HOME/.cache}"/tensorstream/wheels'


def _unpacked_script(digest: str) -> str:
    """Returns a script that prints the directory of a wheel if it is unpacked."""
    return f"""
cd {_CACHE}/{digest} 2>/dev/null && pwd
exit 0
"""


def _unpack_script(digest: str, python: str) -> str:
    """Returns a script that unpacks the wheel from its standard input, and prints where."""
    return f"""
set -e
umask 077
mkdir -p {_CACHE}
cd {_CACHE}
cat >$$.whl
{python} -m zipfile -e $$.whl $$ >&2
rm $$.whl
# Another program may do the same now.
mv -T $$ {digest} 2>/dev/null || rm -r $$
cd {digest}
pwd
"""


class _Forwarded(Server):
    """The socket of a server on another host, forwarded to a socket here.

    If the tunnel breaks, a thread opens it again. The constructor blocks until it is open.
    """

    def __init__(self, ssh: list[str], host: str, socket: str, name: str) -> None:
        self._directory = tempfile.mkdtemp(prefix="tensorstream-")
        path = f"{self._directory}/socket"
        self.address = f"unix:{path}"
        self._host, self._name = host, name
        self._command = [
            *ssh,
            # With a terminal, both sides send small packets at once (TCP_NODELAY). Without one,
            # each wait takes 40 ms or more.
            *("-tt", "-o", "ExitOnForwardFailure=yes", "-o", "ControlPath=none"),
            *("-o", "StreamLocalBindUnlink=yes", "-o", "StreamLocalBindMask=0177"),
            *("-L", f"{path}:{socket}", host),
            # The tunnel ends with the server, also if this process has died.
            f"while [ -d {os.path.dirname(socket)} ]; do sleep 1; done",
        ]
        self._stopping = threading.Event()
        self._tunnel = self._open()
        try:
            self._await(path)
        except BaseException:
            self._close()
            raise
        self._thread = threading.Thread(target=self._keep, name="tensorstream-ssh", daemon=True)
        self._thread.start()

    def _open(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Ctrl-C is for this process, which may want to save its tensors first.
            start_new_session=True,
        )

    def _await(self, path: str) -> None:
        """Waits until the tunnel is open.

        Raises:
            ProviderError: ssh ended before.
        """
        end = time.monotonic() + _START
        while not os.path.exists(path):
            status = self._tunnel.poll()
            if status is not None or time.monotonic() > end:
                assert self._tunnel.stderr is not None
                output = "" if status is None else self._tunnel.stderr.read()
                raise _error(self._host, 255 if status is None else status, output)
            time.sleep(0.01)

    def _keep(self) -> None:
        """Opens the tunnel again whenever it ends."""
        pause = _PAUSES[0]
        while True:
            opened = time.monotonic()
            assert self._tunnel.stderr is not None
            output = self._tunnel.stderr.read()
            self._tunnel.wait()
            if self._stopping.is_set():
                return
            _log.warning("%s: the tunnel to %s ended: %s", self._name, self._host, output.strip())
            pause = _PAUSES[0] if time.monotonic() - opened > 10 else min(2 * pause, _PAUSES[1])
            if self._stopping.wait(pause):
                return
            self._tunnel = self._open()

    def _close(self) -> None:
        self._stopping.set()
        self._tunnel.terminate()
        try:
            self._tunnel.wait(_STOP)
        except subprocess.TimeoutExpired:
            self._tunnel.kill()
            self._tunnel.wait()
        with contextlib.suppress(OSError):
            shutil.rmtree(self._directory)

    def stop(self) -> None:
        """Closes the tunnel. The server ends with its session."""
        self._close()
        self._thread.join(_STOP)
