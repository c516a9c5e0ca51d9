# SPDX-License-Identifier: MIT OR Apache-2.0
"""Shortens the messages of other programs, so that they fit into an error."""

from __future__ import annotations

import re

#: The most characters of a message.
_LENGTH = 1000
#: The codes of colours.
_COLOURS = re.compile("\x1b\\[[0-9;]*m")


def brief(text: str) -> str:
    """Returns the end of a message, on one line, without colours and marks."""
    words = _COLOURS.sub("", text).split()
    return " ".join(word for word in words if word.strip("^"))[-_LENGTH:]


def brief_error(error: BaseException) -> str:
    """Returns the end of an exception's message, or its type if there is no message."""
    return brief(str(error)) or type(error).__name__
