# SPDX-License-Identifier: MIT OR Apache-2.0
"""A plugin for pytest that runs accelerate's own tests with ``tensorstream.accelerate``.

Run it in a checkout of accelerate, with this directory on `PYTHONPATH`:

    python -m pytest -p drop_in_accelerate tests/test_big_modeling.py

With `DROP_IN_DEVICE=accinte`, and the directory of the stand-in accelerator on `PYTHONPATH` too,
tests that need an accelerator run on it. With `DROP_IN=0`, accelerate's own functions run.
`remove_hook_from_submodules` is `tensorstream.restore`, with the weights on the CPU afterwards.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import accelerate
import accelerate.big_modeling
import accelerate.hooks
import accelerate.test_utils
import accelerate.test_utils.testing
import accelerate.utils.memory
import tensorstream as ts
import tensorstream.accelerate as ours
import torch

#: The decorators that skip tests where there are too few accelerators.
_REQUIRE = ("non_cpu", "multi_device", "cuda_or_xpu", "multi_gpu_or_xpu")


def _restored(model: Any, recurse: bool = False) -> Any:
    try:
        return ts.restore(model).to("cpu")
    except ts.ModelError:
        return model


def pytest_configure() -> None:
    device = os.environ.get("DROP_IN_DEVICE", "cpu")
    testing: Any
    if device != "cpu":
        package = importlib.import_module(f"torch_{device}")
        library = Path(str(package.__file__)).parent / "lib" / "libstandin.so"
        ts.register_accelerator(device, library=library, prefix="standin")
        for testing in (accelerate.test_utils, accelerate.test_utils.testing):
            testing.torch_device = device
            for name in _REQUIRE:
                setattr(testing, f"require_{name}", lambda test: test)
        testing.device_count = torch.accelerator.device_count()
        memory: Any = accelerate.utils.memory
        memory.clear_device_cache = lambda garbage_collection=False: None
    if os.environ.get("DROP_IN", "1") == "1":
        for module in (accelerate, accelerate.big_modeling):
            for name in ours.__all__:
                setattr(module, name, getattr(ours, name))
        hooks: Any = accelerate.hooks
        hooks.remove_hook_from_submodules = _restored
