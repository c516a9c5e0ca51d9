# SPDX-License-Identifier: MIT OR Apache-2.0
"""The console script: the same code as the program that `cargo install` gives, and what needs PyTorch."""

import sys

from ._native import main as run


def main() -> int:
    """Runs the command line of this process; the exit status."""
    if sys.argv[1:2] == ["serve"]:
        from .remote._server import main as serve

        return serve(sys.argv[2:])
    return run(["tensorstream", *sys.argv[1:]])
