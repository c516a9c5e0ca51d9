# SPDX-License-Identifier: MIT OR Apache-2.0
r"""A plugin for pytest that runs diffusers' tests of group offloading with TensorStream.

Run it in a checkout of diffusers, with this directory and that of the stand-in accelerator on
`PYTHONPATH`:

    python -m pytest -p drop_in_diffusers tests/hooks/test_group_offloading.py

Tests run on the stand-in accelerator. Those that name devices run once their lists name it too:

    sed -i 's/\["cuda", "xpu"\]/["cuda", "xpu", "accinte"]/' tests/hooks/test_group_offloading.py

With `DROP_IN=0`, diffusers' own functions run.
"""

from __future__ import annotations

import functools
import importlib
import os
from pathlib import Path
from typing import Any

DEVICE = "accinte"
package = importlib.import_module(f"torch_{DEVICE}")
os.environ["DIFFUSERS_TEST_DEVICE"] = DEVICE

import diffusers  # noqa: E402
import diffusers.hooks  # noqa: E402
import tensorstream as ts  # noqa: E402
import tensorstream.diffusers as ours  # noqa: E402
import torch  # noqa: E402


def pytest_configure() -> None:
    library = Path(str(package.__file__)).parent / "lib" / "libstandin.so"
    ts.register_accelerator(DEVICE, library=library, prefix="standin")
    module: Any = getattr(torch, DEVICE)
    for name in ("empty_cache", "reset_peak_memory_stats", "max_memory_allocated"):
        if not hasattr(module, name):
            setattr(module, name, lambda *_: 0)
    if os.environ.get("DROP_IN", "1") == "1":
        for kind in (diffusers.ModelMixin, diffusers.DiffusionPipeline):
            method: Any = functools.partialmethod(ours.enable_group_offload)
            kind.enable_group_offload = method  # type: ignore[method-assign]
        hooks: Any = diffusers.hooks
        hooks.apply_group_offloading = ours.apply_group_offloading
