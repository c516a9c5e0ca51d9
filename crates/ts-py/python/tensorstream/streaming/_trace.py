# SPDX-License-Identifier: MIT OR Apache-2.0
"""Records what an offloaded model does and when."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from torch import nn

from .._scratch import Scratch
from ..devices import Device
from ..errors import ConfigurationError, ModelError
from ._state import streaming_of
from ._weights import Weights

#: The most budgets in the curve of a page.
_POINTS = 8


class trace:
    """Records what streaming a model does, and writes it to a file when the block ends.

    A file that ends in ``.html`` is a page that opens in a browser without a network: a timeline,
    the memory beside the budget, the units that modules waited for, and predictions for other
    budgets. A file that ends in ``.json`` is in the Trace Event Format, which
    https://ui.perfetto.dev opens. The file is also written if the block raises an exception.

    The events are each read, decoding, copy, check, use, wait and eviction of a unit, and each pass
    that runs alone. They take up to 13 MB of memory; then further ones are counted, but not
    recorded. There is at most one trace of a model at a time.

    Args:
        model: The offloaded model.
        path: The file. An existing file is replaced.
        device: One of the devices of a model that is on several ones.

    Raises:
        ConfigurationError: The path has another suffix, its directory does not exist, or the model
            is on several devices, and ``device`` is not one of them.
        ModelError: The model is not offloaded, or a trace of it is running.
        OSError: The file cannot be written.

    Examples:
        >>> import tensorstream as ts, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        >>> model = ts.offload(model, ts.Config(storage_path="weights", budget="60KiB"))
        >>> with torch.inference_mode(), ts.trace(model, "run.html"):
        ...     output = model(torch.ones(1, 64))
        >>> open("run.html").read().startswith("<!doctype html>")
        True
    """

    def __init__(
        self, model: nn.Module, path: str | os.PathLike[str], *, device: Device | None = None
    ) -> None:
        self._path = Path(path)
        if self._path.suffix not in (".html", ".json"):
            raise ConfigurationError(
                f"cannot write a trace to {str(path)!r}: the name must end in .html or .json"
            )
        if not self._path.parent.is_dir():
            raise ConfigurationError(
                f"cannot write a trace to {str(path)!r}: the directory does not exist"
            )
        self._model = model
        self._device = device
        self._running: Weights | None = None

    def __enter__(self) -> trace:
        share = streaming_of(self._model).share(self._device)
        if share.is_traced:
            raise ModelError("a trace of this model is running: end it before you begin another")
        share.streamer.begin_trace()
        share.is_traced = True
        self._running = share
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        share, self._running = self._running, None
        if share is None:
            return
        share.is_traced = False
        streamer = share.streamer
        stats = streamer.stats()
        budget, whole = stats["budget_bytes"], sum(unit["slot_bytes"] for unit in stats["units"])
        least = stats["plan"]["smallest_budget_bytes"]
        most = max(budget, whole + (64 << 20))
        budgets = {least + (most - least) * i // _POINTS for i in range(_POINTS + 1)} | {budget}
        text = streamer.end_trace(self._path.suffix == ".html", sorted(budgets))
        if text is not None:
            _replace(self._path, text)


def _replace(path: Path, text: str) -> None:
    """Writes a file as a whole, so that there is never a part of it."""
    with Scratch("tensorstream-trace-", path.parent) as directory:
        new = directory / path.name
        new.write_text(text, encoding="utf-8")
        new.replace(path)
