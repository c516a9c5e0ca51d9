# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs programs in processes of their own that need not import PyTorch and transformers first.

A server imports them once, and forks for each program. This saves some seconds of a processor for
each program. It has one OpenMP thread, since OpenMP reads its variables when it is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


class Server:
    """A process that forks for each program. Close it at the end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def run(
        self,
        program: Path,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        timeout: float,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program like ``subprocess.run``, and captures its output.

        Raises:
            TimeoutError: The program was killed because it took too long.
        """
        command = [os.fspath(program), *arguments]
        with tempfile.TemporaryDirectory() as folder:
            files = [str(Path(folder, name)) for name in ("stdout", "stderr")]
            self._tell({"command": command, "variables": dict(variables), "files": files})
            child, expired = self._answer(), threading.Event()

            def kill() -> None:
                expired.set()
                os.kill(child, 9)

            timer = threading.Timer(timeout, kill)
            timer.start()
            code = self._answer()
            timer.cancel()
            stdout, stderr = (Path(file).read_text(errors="replace") for file in files)
        if expired.is_set():
            raise TimeoutError(f"{command} took more than {timeout} s: {stdout}{stderr}")
        return subprocess.CompletedProcess(command, code, stdout, stderr)

    def run_code(self, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Runs the text of a program for at most two minutes, like ``run``."""
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "program.py")
            program.write_text(textwrap.dedent(code))
            return self.run(program, list(map(str, arguments)), os.environ, timeout=120)

    def _tell(self, message: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server that runs programs has ended"
        return int(line)


@contextlib.contextmanager
def started() -> Iterator[Server]:
    """Starts a server, and ends it."""
    server = Server()
    try:
        yield server
    finally:
        server.close()


def _serve() -> None:
    """Forks for each line of the input. Returns in the child, which is to run the program."""
    import tensorstream  # noqa: F401
    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        message = json.loads(line)
        child = os.fork()
        if child == 0:
            answers.close()
            for number, file in enumerate(message["files"], 1):
                opened = os.open(file, os.O_WRONLY | os.O_CREAT)
                os.dup2(opened, number)
                os.close(opened)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.environ.clear()
            os.environ.update(message["variables"])
            sys.argv = message["command"]
            sys.path[0] = os.path.dirname(sys.argv[0])
            return
        print(child, file=answers, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    sys.exit()


if __name__ == "__main__":
    _serve()
    runpy.run_path(sys.argv[0], run_name="__main__")
