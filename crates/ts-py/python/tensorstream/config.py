# SPDX-License-Identifier: MIT OR Apache-2.0
"""How streaming is set up."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from . import _native
from .errors import ConfigurationError

#: The share of available memory that a budget takes when none is given: the rest is for activations.
DETECTED_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of :func:`tensorstream.offload`. Every field has a working default.

    Args:
        budget: All memory for weights: bytes, or a size such as ``"600MiB"`` or ``"1.5GB"``. ``None`` takes
            half of what is available now and prints it.
        storage_path: The checkpoint to stream from, where :func:`~tensorstream.offload` is given none: a
            directory, a ``.safetensors`` file or a shard index.
        max_passes: Forward passes that may run at once, each needing memory of its own; more wait.
        backend: How files are read: ``"auto"``, or a name of :func:`tensorstream.backends`.
        num_io_threads: Reads in flight at once.

    Raises:
        ConfigurationError: A field is out of its range.
    """

    budget: int | str | None = None
    storage_path: str | os.PathLike[str] | None = None
    max_passes: int = 1
    backend: str = "auto"
    num_io_threads: int = 8

    def __post_init__(self) -> None:
        if self.budget is not None:
            parse_budget(self.budget)
        if self.storage_path is not None and not isinstance(self.storage_path, str | os.PathLike):
            raise _invalid("storage_path", self.storage_path, "a path")
        _check_int("max_passes", self.max_passes, 1, 64)
        _check_int("num_io_threads", self.num_io_threads, 1, 256)
        known = ["auto", *_native.backends()]
        if self.backend not in known:
            raise _invalid("backend", self.backend, "one of " + ", ".join(known))

    def budget_bytes(self) -> int:
        """The budget in bytes; detected, and printed to standard error, when none was given."""
        if self.budget is not None:
            return parse_budget(self.budget)
        available = _native.available_memory()
        if available is None:
            raise _invalid("budget", None, "a size, because the available memory cannot be detected here")
        budget = int(available * DETECTED_SHARE)
        print(
            f"tensorstream: budget {budget / 2**20:.0f} MiB, half of the {available / 2**20:.0f} MiB available",
            file=sys.stderr,
        )
        return budget


def parse_budget(budget: int | str) -> int:
    """Bytes of a budget as users write it."""
    wanted = "a positive number of bytes or a size such as '600MiB'"
    if isinstance(budget, str):
        try:
            budget = _native.parse_bytes(budget)
        except ValueError as error:
            raise _invalid("budget", budget, wanted) from error
    if isinstance(budget, bool) or not isinstance(budget, int) or not 0 < budget < 2**63:
        raise _invalid("budget", budget, wanted)
    return budget


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _invalid(field, value, f"an integer from {low} to {high}")


def _invalid(field: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(f"Config.{field} = {value!r}: must be {wanted}")
