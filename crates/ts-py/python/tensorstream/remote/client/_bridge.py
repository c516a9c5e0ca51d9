# SPDX-License-Identifier: MIT OR Apache-2.0
"""Passes Python functions to the native half of the client, which calls them."""

from __future__ import annotations

import os
import types

import torch

from ... import _native
from .. import _registry
from . import _infer, _kernels, _trace, _views


def connect() -> None:
    """Gives the native half its hooks. ``Hooks`` (src/remote/client/torch.rs) describes them."""
    hooks = types.SimpleNamespace(
        infer=_infer.infer,
        element=_infer.element,
        to_device=_infer.to_device,
        current_device=_registry.current_device,
        draw=_kernels.draw,
        as_strided=_views.as_strided,
        source_line=_trace.source_line,
        is_logging=_trace.LOG.isEnabledFor,
        log=_trace.log,
        libraries=[os.path.dirname(file) + os.sep for file in (torch.__file__, _native.__file__)],
    )
    _native.remote_setup(hooks)
