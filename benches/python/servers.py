# SPDX-License-Identifier: MIT OR Apache-2.0
"""Starts servers for the benchmarks. Each server is a process that ends with its context."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def listening(*arguments: str, stderr: int | None = None) -> Iterator[str]:
    """Runs Python with these arguments, and yields the address that the program prints.

    The process is terminated when the context ends.

    Args:
        arguments: The arguments of the Python interpreter.
        stderr: Where the standard error of the process goes, as for ``subprocess.Popen``.
    """
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().removeprefix("listening at ").strip()
        finally:
            process.terminate()


def served(
    *options: str, listen: str = "127.0.0.1:0", stderr: int | None = None
) -> contextlib.AbstractContextManager[str]:
    """Runs ``tensorstream serve`` with one thread per session, and yields its address.

    Args:
        options: Additional options of ``tensorstream serve``.
        listen: The address to listen on.
        stderr: Where the standard error of the process goes, as for ``subprocess.Popen``.
    """
    command = ("-m", "tensorstream.serve", "--threads", "1", "--listen", listen)
    return listening(*command, *options, stderr=stderr)
