# SPDX-License-Identifier: MIT OR Apache-2.0
"""Raises errors for features that Windows does not support."""

from __future__ import annotations

import sys

from .errors import ConfigurationError


def require_unix(what: str, instead: str) -> None:
    """Requires Linux, macOS or another Unix.

    Args:
        what: What needs it.
        instead: What to do on Windows.

    Raises:
        ConfigurationError: This is Windows.
    """
    if sys.platform == "win32":
        raise ConfigurationError(f"{what} does not work on Windows: {instead}")
