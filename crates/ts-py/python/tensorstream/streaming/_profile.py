# SPDX-License-Identifier: MIT OR Apache-2.0
"""Remembers speeds and the most used experts, so that the next run starts with them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import _native
from ..config import cache_directory

#: A use in an earlier run counts this much, because the next text may have another topic.
_EARLIER = 0.25
#: Scores below this one are not saved.
_LEAST_SCORE = 1e-3


class Profile:
    """Saves the measured speeds of a model, and a file with the scores of its routed units.

    A score is the number of uses of a unit, where uses in earlier passes count less. Without
    routed units, there is no file. A file that cannot be read or written is ignored, because
    scores only affect speed.
    """

    def __init__(self, checkpoint: _native.Checkpoint, units: Sequence[tuple[str, bool]]) -> None:
        """Finds the file.

        Args:
            checkpoint: The checkpoint of the model.
            units: The names of the units, and whether they are routed.
        """
        self._units = {name: unit for unit, (name, routed) in enumerate(units) if routed}
        files = [(Path(path).name, size) for path, size, _ in checkpoint.files()]
        key = hashlib.sha256(json.dumps([files, list(self._units)]).encode()).hexdigest()[:32]
        directory = cache_directory()
        self._path = None if directory is None else directory / "routing" / f"{key}.json"
        self._finalizer: weakref.finalize[..., Any] | None = None

    def load(self) -> list[tuple[int, float]]:
        """Returns the scores for a new run, by unit."""
        if not self._units or self._path is None:
            return []
        try:
            saved = json.loads(_native.read_cached(self._path) or "{}")
            scores = [(self._units[name], _EARLIER * float(score)) for name, score in saved.items()]
        # Other programs may have written the file.
        except (
            ValueError,
            ArithmeticError,
            TypeError,
            AttributeError,
            LookupError,
            RecursionError,
        ):
            return []
        return scores if all(0 <= score < math.inf for _, score in scores) else []

    def save_at_end(self, weights: object, streamer: _native.Streamer) -> None:
        """Saves everything when the weights are deleted or the process exits."""
        self._finalizer = weakref.finalize(weights, self._save, streamer, os.getpid())

    def end(self) -> None:
        """Saves everything now."""
        if self._finalizer is not None:
            self._finalizer()

    def _save(self, streamer: _native.Streamer, process: int) -> None:
        if os.getpid() != process:  # a forked child, whose parent saves its own speeds and scores
            return
        streamer.remember_speeds()
        if self._path is None or not self._units:
            return
        names = {unit: name for name, unit in self._units.items()}
        scores = {
            names[unit]: round(score, 3)
            for unit, score in streamer.routing_scores()
            if score >= _LEAST_SCORE
        }
        if not scores:
            return
        _native.write_cached(self._path, json.dumps(scores))
