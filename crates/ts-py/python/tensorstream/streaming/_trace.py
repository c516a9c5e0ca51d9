# SPDX-License-Identifier: MIT OR Apache-2.0
"""Records what an offloaded model does and when."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import TracebackType

from torch import nn

from ..errors import ConfigurationError, ModelError
from ._forward import Streaming, streaming_of

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

    Raises:
        ConfigurationError: The path has another suffix, or its directory does not exist.
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

    def __init__(self, model: nn.Module, path: str | os.PathLike[str]) -> None:
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
        self._streaming: Streaming | None = None

    def __enter__(self) -> trace:
        streaming = streaming_of(self._model)
        if streaming.traced:
            raise ModelError("a trace of this model is running: end it before you begin another")
        streaming.weights.streamer.begin_trace()
        streaming.traced = True
        self._streaming = streaming
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        streaming, self._streaming = self._streaming, None
        if streaming is None:
            return
        streaming.traced = False
        streamer = streaming.weights.streamer
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
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        new = Path(directory, path.name)
        new.write_text(text, encoding="utf-8")
        new.replace(path)
