# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams the new content of a checkpoint that has changed."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import ModelError
from ..files._state_dict import read_tensor, torch_type
from . import _tree as tree
from ._state import streaming_of


def reload(model: nn.Module) -> nn.Module:
    """Streams what is at the path of the checkpoint now. Reads headers, and blocks.

    A streamed model reads the files that it has opened, also if they are removed or replaced. If
    they are written to, it raises ``CheckpointChangedError``. After either, this function opens the
    checkpoint again. Tensors need the same names, shapes and dtypes, but can be in other files and
    at other offsets. What is in memory is dropped, and the next pass reads the new weights.

    Buffers that the checkpoint has under the same names are read as well. Everything else that is
    in memory stays as it is, such as adapters of PEFT.

    Args:
        model: A streamed model, or a model that contains one.

    Returns:
        The model.

    Raises:
        ModelError: The model is not offloaded, or has weights that were computed from the
            checkpoint when it was loaded, for example by a cast.
        CheckpointNotFoundError: There is no checkpoint at the path any more.
        CheckpointError: The checkpoint is damaged, or a tensor has another shape or dtype.
        MissingTensorError: The checkpoint lacks a tensor.
        BudgetError: The checkpoint is compressed now, and needs more memory than the budget.
        ConfigurationError: A forward is running, or weights are referenced.

    After an error, the model is as it was.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, "linear.ts")
        >>> model = ts.offload(torch.nn.Linear(2, 2), checkpoint="linear.ts", budget="64KiB")
        >>> ts.save_file({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, "linear.ts")
        >>> with torch.inference_mode():
        ...     model(torch.ones(2)), ts.reload(model)(torch.ones(2))
        (tensor([0., 0.]), tensor([2., 2.]))
    """
    stored = streaming_of(model).shares[0].stored
    before, shares = stored.checkpoint, stored.shares()
    if before.is_overlaid():
        raise ModelError(
            "cannot reload the model: some of its weights were computed from the checkpoint when "
            "it was loaded, for example by a cast; load the model again"
        )
    newer = before.reopened()
    sources = {
        share: {
            key: (name, dtype, shape, before.translated(parts, newer), phase)
            for key, (name, dtype, shape, parts, phase) in share.sources.items()
        }
        for share in shares
    }
    buffers = []
    names = set(newer.names()) & set(before.names())
    for name, buffer in tree.named_buffers(model):
        if name in names and torch_type(newer, name) == (buffer.dtype, list(buffer.shape)):
            buffers.append((buffer, read_tensor(newer, name)))
    reloaded = []
    try:
        for share in shares:
            share.streamer.reload(newer)
            reloaded.append(share.streamer)
    except Exception:
        for streamer in reloaded:
            streamer.reload(before)
        raise
    for share in shares:
        share.sources.update(sources[share])
    stored.reload(newer)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return model
