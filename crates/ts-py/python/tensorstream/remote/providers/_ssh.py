# SPDX-License-Identifier: MIT OR Apache-2.0
"""The provider "ssh": ``tensorstream serve`` on a machine that the user's ssh reaches."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from ..._scratch import for_socket
from ...budget import parse_size
from ...errors import (
    ConfigurationError,
    ProviderAuthenticationError,
    ProviderCapacityError,
    ProviderConnectionError,
    ProviderError,
)
from ...serve._weights import EVERYTHING
from ._base import Provider, Request, Server

_log = logging.getLogger("tensorstream.remote")

#: The pauses between attempts to open a lost tunnel again, in seconds: the first and the longest.
_BACKOFF = 0.1, 5.0
#: A lost tunnel is given up after this many seconds: the server has dropped the session then.
_GIVE_UP = 75.0
#: The time that a started server may take to listen, in seconds. Importing PyTorch can be slow.
_START = 120
#: The time that copying a wheel may take, in seconds.
_UPLOAD = 600
#: The time that ssh may take to end, in seconds.
_STOP = 2.0
#: The most bytes of ssh's and the server's messages in an error.
_MESSAGE = 2000

#: ssh's messages about a user that the host rejects, and about a host with an unexpected key.
_AUTHENTICATION = re.compile(
    r"Permission denied|Host key verification failed|Too many authentication failures|"
    r"REMOTE HOST IDENTIFICATION HAS CHANGED|No more authentication methods"
)
#: Messages of the shell and the server about memory or disk space that is used up.
_CAPACITY = re.compile(
    r"No space left on device|Cannot allocate memory|Resource temporarily unavailable|"
    r"Disk quota exceeded|MemoryError"
)


class SshProvider(Provider):
    """Starts ``tensorstream serve`` through the user's ``ssh``, and forwards its socket.

    The server listens on a Unix socket in a directory that only its user can read. It ends with its
    session, also if this process dies: then within about a minute. If the connection breaks, it is
    opened again.

    ssh uses the user's configuration, keys and jump hosts. It asks no questions.

    Args:
        host: The host, as ``ssh`` takes it: a name, ``USER@HOST``, or a host of the configuration.
        python: The Python on that host, in which PyTorch is installed, and TensorStream unless
            there is a ``wheel``. It is a part of a shell command, so it may begin with "~" or with
            environment variables, which other users of both computers may see.
        wheel: A wheel of TensorStream. It is copied to the user's cache directory there once, and
            unpacked. ``python`` stays as it is.
        threads: The number of PyTorch threads of the session.
        budget: The most memory for weights that the machine loads, in bytes or such as "4GiB".
            Those that do not fit are streamed. The default is unlimited.
        options: More arguments of ``ssh``, such as ``["-p", "2222"]``.
        connect_timeout: The longest time to wait for a connection to the host, in seconds. Starting
            the server can take longer.

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
        budget: int | str | None = None,
        options: Sequence[str] = (),
        connect_timeout: float = 15.0,
    ) -> None:
        if not isinstance(host, str) or not host or host.startswith("-"):
            raise ConfigurationError(f"invalid host {host!r}: expected a name, or USER@HOST")
        if not isinstance(python, str) or not python:
            raise ConfigurationError(f"invalid python {python!r}: expected a command")
        if not isinstance(options, list | tuple) or not all(isinstance(o, str) for o in options):
            raise ConfigurationError(
                f"invalid options {options!r}: expected a list of texts, such as ['-p', '2222']"
            )
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise ConfigurationError(f"invalid threads {threads!r}: expected at least 1")
        if not (math.isfinite(connect_timeout) and connect_timeout > 0):
            raise ConfigurationError(
                f"invalid connect_timeout {connect_timeout!r}: expected seconds above 0"
            )
        if wheel is not None and not Path(wheel).is_file():
            raise ConfigurationError(f"invalid wheel {os.fspath(wheel)!r}: there is no such file")
        if wheel is not None and "PYTHONPATH=" in python:
            raise ConfigurationError(
                f"invalid python {python!r}: the wheel is found by PYTHONPATH; leave it out"
            )
        self.host, self._python = host, python
        self._wheel = None if wheel is None else Path(wheel)
        self._serve = [] if threads is None else ["--threads", str(threads)]
        if budget is not None:
            self._serve += ["--budget", str(parse_size(budget, "budget"))]
        # ssh takes the first value of each option.
        self._options = [
            *options,
            *("-o", "BatchMode=yes"),
            *("-o", f"ConnectTimeout={math.ceil(connect_timeout)}"),
            *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
        ]

    @classmethod
    def probe(cls) -> str | None:
        """Returns ``None`` if there is a program ``ssh``, else what to do."""
        return None if shutil.which("ssh") else "there is no program `ssh`: install OpenSSH"

    def start(self, request: Request) -> Server:
        """Starts a server on the host. Blocks until it listens and its socket is forwarded."""
        path = None if self._wheel is None else self._unpack(self._wheel)
        directory = f"/tmp/tensorstream-{secrets.token_hex(8)}"
        _log.info("%s: starting a server on %s", request.name, self.host)
        script = _start_script(directory, self._python, path, request, self._serve)
        self._run(script, timeout=_START)
        return _Forwarded(self._options, self.host, directory, request.name)

    def _unpack(self, wheel: Path) -> str:
        """Unpacks a wheel on the host, unless it is there. Returns the directory."""
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
            found = _unpacked(self._run(_unpacked_script(digest), _START))
            if found is None:
                _log.info("copying %s to %s", wheel.name, self.host)
                file.seek(0)
                output = self._run(_unpack_script(digest, self._python), _UPLOAD, file)
                found = _unpacked(output)
        if found is None:
            raise ProviderError(f"cannot unpack {wheel.name} on {self.host}: {output.strip()}")
        return found

    def _run(self, script: str, timeout: float, stdin: IO[bytes] | None = None) -> str:
        """Runs a script on the host. Returns its output.

        Raises:
            ProviderError: The host cannot be reached, or the script failed.
        """
        command = [
            *("ssh", "-T", "-a", "-x", "-o", "ClearAllForwardings=yes"),
            *("-o", "RemoteCommand=none", "-o", "ControlMaster=no"),
            *(*self._options, self.host, _shell(script)),
        ]
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


def _shell(script: str) -> str:
    """Returns a command for any login shell that runs a script in ``sh``."""
    # csh does not allow new lines between quotes.
    return f"exec sh -c {shlex.quote(_one_line(script))}"


def _one_line(script: str) -> str:
    return re.sub(r"\s*\n\s*", " ", script).strip()


def _error(host: str, status: int, output: str) -> ProviderError:
    """Returns the error for what ssh, or a script that it ran, has printed."""
    text = output.strip()[-_MESSAGE:] or f"ssh ended with status {status}"
    if status == 255 and _AUTHENTICATION.search(output):
        return ProviderAuthenticationError(
            f"cannot start a machine on {host}: {text}; check that `ssh {host}` works without "
            "questions: a key in the agent, and a known host"
        )
    if status == 255:  # ssh itself failed
        return ProviderConnectionError(
            f"cannot reach {host}: {text}; check that `ssh {host}` works"
        )
    if _CAPACITY.search(output):
        return ProviderCapacityError(
            f"cannot start a machine on {host}: {text}; free memory or disk space there"
        )
    if "No module named" in output or "not found" in output:
        return ProviderError(
            f"cannot start a machine on {host}: {text}; install TensorStream and PyTorch for the "
            "option `python` there, or pass `wheel`"
        )
    return ProviderError(f"cannot start a machine on {host}: {text}")


def _start_script(
    directory: str, python: str, path: str | None, request: Request, options: list[str]
) -> str:
    """Returns a script that starts a server, and waits until it listens.

    The directory "live" exists as long as the server does.
    """
    serve = [
        *("-m", "tensorstream.serve", "--listen", f"unix:{directory}/live/socket", "--once"),
        # The server has the rights of its user, who is the client.
        *("--device", request.kind, "--devices", str(request.device_count)),
        *("--weights", ",".join(EVERYTHING), "--allow-functions", "any", "--send-to", "any"),
        *options,
    ]
    own = "" if path is None else f"PYTHONPATH={shlex.quote(path)}${{PYTHONPATH:+:$PYTHONPATH}} "
    # Python finds modules in the current directory.
    server = f"""
        cd {directory}/live;
        {own}{python} {shlex.join(serve)} & echo $! > ../process; wait;
        cd /; rm -rf {directory}/live; sleep 5; rm -rf {directory}
    """
    return f"""
        umask 077; mkdir {directory} && mkdir {directory}/live || exit 1;
        nohup sh -c {shlex.quote(_one_line(server))} > {directory}/log 2>&1 < /dev/null &
        turns=0;
        until grep -qs "^listening" {directory}/log; do
            turns=$((turns + 1));
            if [ -d {directory}/live ] && [ $turns -lt 1000 ] && kill -0 $! 2> /dev/null; then
                sleep 0.1;
            else
                cat {directory}/log >&2; rm -rf {directory}; exit 1;
            fi;
        done
    """


#: The directory for unpacked wheels, as a shell expands it.
_CACHE = '"${XDG_CACHE_HOME:-$HOME/.cache}"/tensorstream/wheels'
#: The scripts print this before the path of a wheel, because a login shell may print other lines.
_UNPACKED = "unpacked in "


def _unpacked(output: str) -> str | None:
    lines = [line for line in output.splitlines() if line.startswith(_UNPACKED)]
    return lines[-1].removeprefix(_UNPACKED) if lines else None


def _unpacked_script(digest: str) -> str:
    """Returns a script that prints the directory of a wheel if it is unpacked."""
    return f"""
        if cd {_CACHE}/{digest} 2> /dev/null; then echo "{_UNPACKED}$(pwd)"; fi
    """


def _unpack_script(digest: str, python: str) -> str:
    """Returns a script that unpacks the wheel from its standard input, and prints where."""
    return f"""
        set -e; umask 077; mkdir -p {_CACHE}; cd {_CACHE};
        new=$(mktemp -d ./new.XXXXXX); trap "rm -rf $new" EXIT;
        cat > $new/wheel; {python} -m zipfile -e $new/wheel $new/files >&2;
        [ -d {digest} ] || mv $new/files {digest};
        cd {digest}; echo "{_UNPACKED}$(pwd)"; cd ..
    """


def _tunnel_script(directory: str) -> str:
    """Returns a script that runs while the server does.

    It writes a line each second, which ends it if the client is lost, and at the end the last lines
    of the server's log. The line "stop" from its input ends the server and the script.
    """
    return f"""
        cd {directory}/live || exit 0; cd ..; exec 3<&0;
        (read -r line <&3; [ "$line" = stop ] && [ -d live ] && kill $(cat process) $$) &
        echo ready; while [ -d live ]; do echo; sleep 1; done; tail -n 5 log >&2; exit 0
    """


class _Forwarded(Server):
    """The socket of a server on another host, forwarded to a socket here.

    A thread opens the tunnel, and opens it again if it breaks. The constructor blocks until the
    tunnel is open.

    Args:
        options: The options of ssh.
        host: The host.
        directory: The directory of the server on the host.
        name: The name of the machine in messages.

    Raises:
        ProviderError: The tunnel cannot be opened.
    """

    def __init__(self, options: list[str], host: str, directory: str, name: str) -> None:
        self._directory = for_socket("tensorstream-tunnel-")
        self._socket = f"{self._directory.path}/socket"
        self.address = f"unix:{self._socket}"
        self._host, self._name = host, name
        self._command = [
            *("ssh", "-T", "-a", "-x", "-o", "RemoteCommand=none"),
            # Other forwardings of the user's configuration may fail.
            *("-o", "ExitOnForwardFailure=no", "-o", "ControlPath=none"),
            *("-o", "StreamLocalBindUnlink=yes", "-o", "StreamLocalBindMask=0177"),
            *("-L", f"{self._socket}:{directory}/live/socket"),
            # With a command, both sides send small packets at once.
            *(*options, host, _shell(_tunnel_script(directory))),
        ]
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        #: Set when the tunnel was opened first, or could not be.
        self._decided = threading.Event()
        self._failure: ProviderError | None = None
        #: The process of ssh, while there is one.
        self.tunnel: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="tensorstream-ssh", daemon=True)
        try:
            self._thread.start()
            if not self._decided.wait(_START):
                raise ProviderConnectionError(
                    f"cannot reach {host}: the tunnel was not open after {_START} seconds"
                )
            if self._failure is not None:
                raise self._failure
        except BaseException:
            self.stop()
            raise

    def _keep(self) -> None:
        """Opens the tunnel, and opens it again whenever it breaks, until the server has ended."""
        pause, lost = _BACKOFF[0], time.monotonic()
        while True:
            was_open, is_over, failure = self._run()
            if was_open:
                pause, lost = _BACKOFF[0], time.monotonic()
            if self._stopping.is_set():
                break
            is_over |= isinstance(failure, ProviderAuthenticationError)
            if not self._decided.is_set() or is_over or time.monotonic() - lost > _GIVE_UP:
                self._failure = failure
                _log.warning("%s: %s", self._name, failure)
                break
            _log.warning("%s: the tunnel broke: %s", self._name, failure)
            if self._stopping.wait(pause):
                break
            pause = min(2 * pause, _BACKOFF[1])
        self._decided.set()

    def _run(self) -> tuple[bool, bool, ProviderError]:
        """Runs ssh until it ends.

        Returns:
            Whether the tunnel was open, whether the server has ended, and why the tunnel ended.
        """
        # ssh's messages are in a file, because other processes may keep a pipe open.
        with open(f"{self._directory.path}/messages", "w+b") as messages:
            try:
                with self._lock:
                    if self._stopping.is_set():
                        return False, True, ProviderError("the machine was stopped")
                    self.tunnel = subprocess.Popen(
                        self._command,
                        stdin=subprocess.PIPE,
                        # ssh ends soon after this process: it cannot write then.
                        stdout=subprocess.PIPE,
                        stderr=messages,
                        # Ctrl-C is for this process, which may want to save its tensors first.
                        start_new_session=True,
                    )
            except OSError as error:
                return False, False, ProviderError(f"cannot run ssh: {error}")
            with self.tunnel as tunnel:
                assert tunnel.stdout is not None
                was_open = False
                for line in tunnel.stdout:
                    if line.strip() == b"ready":
                        was_open = os.path.exists(self._socket)
                        if not was_open:  # the socket could not be bound
                            tunnel.terminate()
                            break
                        self._decided.set()
                status = tunnel.wait()
            messages.seek(0)
            output = messages.read().decode(errors="replace")
        if status == 0:
            text = output.strip()[-_MESSAGE:] or "without a message"
            return was_open, True, ProviderError(f"the server on {self._host} has ended: {text}")
        return was_open, False, _error(self._host, 255 if status < 0 else status, output)

    def failure(self) -> str | None:
        """Returns why the tunnel was given up, with the last messages of the server."""
        return None if self._failure is None else str(self._failure)

    def stop(self) -> None:
        """Ends the server, unless it has ended with its session, and closes the tunnel."""
        with self._lock:
            self._stopping.set()
            tunnel = self.tunnel
        if tunnel is not None:
            assert tunnel.stdin is not None
            with contextlib.suppress(OSError, ValueError):
                tunnel.stdin.write(b"stop\n")
                tunnel.stdin.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                tunnel.wait(_STOP)
            tunnel.kill()
        self._thread.join()
        self._directory.remove()
