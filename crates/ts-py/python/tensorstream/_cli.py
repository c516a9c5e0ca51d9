# SPDX-License-Identifier: MIT OR Apache-2.0
"""The console script: the same code as the program that `cargo install` gives."""

import sys

from ._native import main as run


def main() -> int:
    """Runs the command line of this process; the exit status."""
    return run(["tensorstream", *sys.argv[1:]])
