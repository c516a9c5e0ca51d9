# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs programs in processes of their own that need not import PyTorch and transformers first.

A server imports them once, and forks for each program. This saves some seconds of a processor for
each program. It has one OpenMP thread, since OpenMP reads its variables when it is loaded, and
PyTorch does not find Triton.

A program that tells something about a new interpreter has to be started otherwise: what it imports,
the variables that libraries read when they are imported, and how a command starts.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: What most programs import.
MODULES = ("tensorstream", "torch", "transformers.models.llama.modeling_llama")
#: What takes long in importing transformers, except what imports huggingface_hub. That reads
#: variables of the environment when it is imported.
BELOW_TRANSFORMERS = (
    "tensorstream", "torch._dynamo.convert_frame", "torch._inductor.standalone_compile",
    "torch.distributed.checkpoint", "torch.distributed.tensor", "scipy.optimize",
)  # fmt: skip

_NUMBER = struct.Struct("q")


class Program:
    """A program that runs. It is killed at the end of a ``with`` block.

    Attributes:
        pid: The ID of its process.
        stdin: A pipe to its input.
        stdout: A pipe from its output. It is empty if the output goes elsewhere.
        returncode: Its exit status, or the negative number of the signal that ended it. It is None
            until the end of ``wait``.
    """

    def __init__(self, status: int, stdin: int, stdout: int) -> None:
        self._status = os.fdopen(status, "rb", buffering=0)
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout, errors="replace")
        self.pid = self._number()
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the program has ended."""
        if self.returncode is None and not select.select([self._status], [], [], 0)[0]:
            os.kill(self.pid, number)

    def wait(self, timeout: float = 120) -> str:
        """Closes the input, waits until the program ends, and returns the rest of its output.

        Raises:
            TimeoutError: The program was killed because it took too long.
        """
        if self.returncode is not None:
            return ""
        expired = threading.Event()

        def kill() -> None:
            expired.set()
            self.send_signal(signal.SIGKILL)

        timer = threading.Timer(timeout, kill)
        timer.start()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        try:
            with self._status, self.stdout:
                output = self.stdout.read()
                self.returncode = self._number()
        finally:
            timer.cancel()
        if expired.is_set():
            raise TimeoutError(f"the program took more than {timeout} s: {output}")
        return output

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()

    def _number(self) -> int:
        content = self._status.read(_NUMBER.size)
        assert content, "the server that runs programs has ended"
        number: int = _NUMBER.unpack(content)[0]
        return number


class Server:
    """A process that forks for each program. Close it at the end.

    Args:
        modules: The modules that the process imports.
    """

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._programs = 0
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def close(self) -> None:
        """Ends the process."""
        self._socket.close()
        self._process.wait(timeout=60)
        self._folder.cleanup()

    def start(
        self,
        program: Path,
        arguments: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        cwd: Path | None = None,
        stdout: int | None = None,
        stderr: int = 2,
    ) -> Program:
        """Starts a program.

        Args:
            program: Its file.
            arguments: Its arguments.
            variables: Its environment, if that is not the one of this process.
            cwd: Its working directory, if that is not the one of this process.
            stdout: The descriptor for its output, if that is not to be a pipe.
            stderr: The descriptor for its errors.
        """
        request = {
            "command": [os.fspath(program), *arguments],
            "variables": dict(os.environ if variables is None else variables),
            "cwd": os.fspath(cwd or Path.cwd()),
        }
        (stdin, to_stdin), (from_stdout, piped), (from_status, status) = (
            os.pipe() for _ in range(3)
        )
        with tempfile.TemporaryFile("w+", dir=self._folder.name) as file:
            json.dump(request, file)
            file.seek(0)
            sent = [file.fileno(), stdin, piped if stdout is None else stdout, stderr, status]
            socket.send_fds(self._socket, [b"\0"], sent)
        for descriptor in (stdin, piped, status):
            os.close(descriptor)
        return Program(from_status, to_stdin, from_stdout)

    def start_code(
        self,
        code: str,
        *arguments: object,
        variables: Mapping[str, str] | None = None,
        stderr: int = 2,
    ) -> Program:
        """Starts the text of a program, like ``start``."""
        return self.start(self._written(code), list(map(str, arguments)), variables, stderr=stderr)

    def run(
        self,
        program: Path,
        arguments: Sequence[str],
        variables: Mapping[str, str] | None = None,
        timeout: float = 120,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program like ``subprocess.run``, and captures its output.

        Raises:
            TimeoutError: The program was killed because it took too long.
        """
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            streams = {"stdout": stdout.fileno(), "stderr": stderr.fileno()}
            child = self.start(program, arguments, variables, cwd=cwd, **streams)
            expired = None
            try:
                child.wait(timeout)
            except TimeoutError as error:
                expired = error
            texts = []
            for file in (stdout, stderr):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        command = [os.fspath(program), *arguments]
        if expired is not None:
            raise TimeoutError(f"{command}: {expired}{''.join(texts)}")
        assert child.returncode is not None
        return subprocess.CompletedProcess(command, child.returncode, *texts)

    def run_code(
        self,
        code: str,
        *arguments: object,
        variables: Mapping[str, str] | None = None,
        timeout: float = 120,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs the text of a program, like ``run``."""
        program = self._written(code)
        return self.run(program, list(map(str, arguments)), variables, timeout, cwd)

    def _written(self, code: str) -> Path:
        self._programs += 1
        program = Path(self._folder.name, f"program{self._programs}.py")
        program.write_text(textwrap.dedent(code), encoding="utf-8")
        return program


@contextlib.contextmanager
def started(modules: Sequence[str] = MODULES) -> Iterator[Server]:
    """Starts a server, and ends it."""
    server = Server(modules)
    try:
        yield server
    finally:
        server.close()


def _serve(requests: socket.socket, modules: Sequence[str]) -> None:
    """Forks for each request. Returns in the child, which is to run the program."""
    # Triton would write to the standard error of each program what was not collected at its end.
    hidden: Any = None
    sys.modules["triton"] = hidden
    for module in modules:
        importlib.import_module(module)
    del sys.modules["triton"]
    # When a program ends, it need not look at all that was imported. That would take a second.
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, 1, 5)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        if not message:
            sys.exit()
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    requests.close()
    request, *streams, status = descriptors
    child = os.fork()
    if child != 0:
        # This process tells the exit status of the program.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for descriptor in (request, *streams):
            os.close(descriptor)
        with contextlib.suppress(BrokenPipeError):
            os.write(status, _NUMBER.pack(child))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.write(status, _NUMBER.pack(code))
        os._exit(0)
    os.close(status)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with os.fdopen(request) as file:
        asked = json.load(file)
    os.environ.clear()
    os.environ.update(asked["variables"])
    tempfile.tempdir = None  # it depends on a variable
    os.chdir(asked["cwd"])
    sys.argv = asked["command"]
    sys.path[0] = os.path.dirname(sys.argv[0])


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    runpy.run_path(sys.argv[0], run_name="__main__")
