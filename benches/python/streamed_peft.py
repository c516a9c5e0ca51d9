# SPDX-License-Identifier: MIT OR Apache-2.0
"""A plugin for pytest that streams the base of every model in PEFT's own tests.

Run it in a checkout of PEFT at the installed version, with this directory on `PYTHONPATH`:

    python -m pytest -p streamed_peft -o addopts= tests/test_custom_models.py

`get_peft_model` and `PeftModel.from_pretrained` offload their base to a file first, with half of
its weights as the budget, or with the smallest budget that works. Models that cannot stream, such
as those on the meta device, stay as they are. The summary says how many models streamed, and
`--streamed-sample=N` runs every N-th test.
"""

from __future__ import annotations

import collections
import functools
import re
import tempfile
from typing import Any

import peft
import pytest
import tensorstream as ts
import torch
from torch import nn

_counts: collections.Counter[str] = collections.Counter()
_directory = tempfile.TemporaryDirectory(prefix="streamed-peft-")


def stream(model: Any) -> None:
    """Offloads a model, unless it streams already or cannot."""
    if not isinstance(model, nn.Module):
        return
    parameters = list(model.parameters())
    plain = all(type(each) is nn.Parameter and each.device.type == "cpu" for each in parameters)
    adapted = any(hasattr(each, "adapter_layer_names") for each in model.modules())
    if not parameters or not plain or adapted:
        _counts["left in memory"] += 1
        return
    budget: int | None = sum(each.nbytes for each in parameters) // 2
    for _ in range(3):
        try:
            ts.offload(model, ts.Config(storage_path=_directory.name, budget=budget))
        except ts.BudgetError as error:
            sizes = [int(each) for each in re.findall(r"(\d+) bytes", str(error))]
            budget = getattr(error, "smallest", None) or max(sizes)
        else:
            whole = sum(each.nbytes for each in parameters)
            _counts["streamed below their size" if budget < whole else "streamed"] += 1
            return
    raise AssertionError(f"no budget works for {type(model).__name__}")


def _streaming(original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        stream(args[0] if args else kwargs.get("model"))
        return original(*args, **kwargs)

    return call


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--streamed-sample", type=int, default=1)


def pytest_configure() -> None:
    torch.set_num_threads(1)
    peft.get_peft_model = _streaming(peft.get_peft_model)
    peft.mapping_func.get_peft_model = peft.get_peft_model
    for kind in (peft.PeftModel, peft.PeftMixedModel):
        original: Any = kind.from_pretrained
        kind.from_pretrained = classmethod(_of_class(original.__func__))


def _of_class(original: Any) -> Any:
    @functools.wraps(original)
    def from_pretrained(cls: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        stream(model)
        return original(cls, model, *args, **kwargs)

    return from_pretrained


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    step = config.getoption("--streamed-sample")
    items[:] = items[::step]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"models: {dict(_counts)}")
