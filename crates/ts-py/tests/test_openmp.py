# SPDX-License-Identifier: MIT OR Apache-2.0
"""Importing tensorstream limits how long idle OpenMP threads spin, unless the user has set it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = "; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("code", "variables", "expected"),
    (
        ("import os, tensorstream", {}, "4000"),
        ("import os, tensorstream, torch", {}, "4000"),
        ("import os, torch, tensorstream", {}, "None"),
        ("import os, tensorstream", {"OMP_WAIT_POLICY": "ACTIVE"}, "None"),
        ("import os, tensorstream", {"GOMP_SPINCOUNT": "77"}, "77"),
    ),
)
def test_idle_threads_sleep_sooner(code: str, variables: dict[str, str], expected: str) -> None:
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    shown = subprocess.run(
        [sys.executable, "-c", code + SHOW],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.strip() == expected
