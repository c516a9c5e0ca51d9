# SPDX-License-Identifier: MIT OR Apache-2.0
"""A plugin for pytest that runs safetensors' own tests with TensorStream's drop-ins.

Run it in a checkout of safetensors, with this directory on `PYTHONPATH`:

    python -m pytest -p drop_in_safetensors bindings/python/tests

`safetensors.torch` and `safetensors.numpy` are `tensorstream.torch` and `tensorstream.numpy`, and
the names of `safetensors` that these have are theirs. Private helpers of safetensors, which its
tests call too, stay its own. With `DROP_IN=0`, safetensors' own run.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import safetensors
import safetensors.numpy
import safetensors.torch
import tensorstream.numpy
import tensorstream.torch


def pytest_configure() -> None:
    if os.environ.get("DROP_IN", "1") != "1":
        return
    modules: Any = sys.modules
    package: Any = safetensors
    for name, ours in (("torch", tensorstream.torch), ("numpy", tensorstream.numpy)):
        for private in vars(theirs := modules[f"safetensors.{name}"]):
            if private.startswith("_") and not hasattr(ours, private):
                setattr(ours, private, getattr(theirs, private))
        modules[f"safetensors.{name}"] = ours
        setattr(package, name, ours)
    for name in ("safe_open", "SafetensorError", "TensorSpec", "serialize", "serialize_file"):
        setattr(package, name, getattr(tensorstream.torch, name))
