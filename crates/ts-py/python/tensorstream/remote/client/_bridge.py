# SPDX-License-Identifier: MIT OR Apache-2.0
"""The Python half of the client, which the native half calls."""

from __future__ import annotations

import os
import types

import torch

from ... import _native
from .. import _registry
from . import _infer, _kernels, _trace, _views


def connect() -> None:
    """Gives the native half the functions that it calls (``Hooks`` in remote/client/torch.rs)."""
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
