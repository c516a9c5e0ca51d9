# SPDX-License-Identifier: MIT OR Apache-2.0
"""The answers of operators that can fail in ways that clients distinguish: JSON objects."""

from __future__ import annotations

import json
from typing import Any

from .. import errors
from ..errors import RemoteOutOfMemoryError, StorageError, TensorStreamError


def failure(error: Exception) -> dict[str, Any]:
    """Returns the answer of an error: its class in ``tensorstream.errors`` and its text."""
    name = type(error).__name__ if isinstance(error, TensorStreamError) else StorageError.__name__
    # PyTorch and the system have no classes of their own for this error.
    is_other = name == StorageError.__name__
    if is_other and (isinstance(error, MemoryError) or "cannot allocate" in str(error).lower()):
        name = RemoteOutOfMemoryError.__name__
    return {"error": name, "message": str(error)}


def answered(text: str, place: object) -> dict[str, Any]:
    """Returns the answer of an operator.

    Args:
        text: The JSON object that the machine has returned.
        place: The device or machine, for messages.

    Raises:
        TensorStreamError: It is the answer of an error.
    """
    answer: dict[str, Any] = json.loads(text)
    if "error" not in answer:
        return answer
    named: Any = getattr(errors, str(answer["error"]), None)
    is_known = isinstance(named, type) and issubclass(named, TensorStreamError)
    raise (named if is_known else StorageError)(f"{place}: {answer['message']}")
