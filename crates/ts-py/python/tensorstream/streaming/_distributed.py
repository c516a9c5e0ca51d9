# SPDX-License-Identifier: MIT OR Apache-2.0
"""Keeps ``DistributedDataParallel`` from sending streamed weights to other processes.

Each process streams them from its own files, and does not average their gradients. The names of the
streamed weights are looked up when a module is wrapped, since any module around a streamed model
can be.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import ModelError
from . import _tree as tree
from ._streamed_tensor import StreamedTensor

#: The attribute of a module from which ``DistributedDataParallel`` takes the names to leave out.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


def replace_distributed() -> None:
    """Replaces the constructor of ``DistributedDataParallel``. Call it once."""
    original: Any = DistributedDataParallel.__init__

    @functools.wraps(original)
    def __init__(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        streamed = _streamed_names(module) if isinstance(module, nn.Module) else []
        if not streamed:
            original(self, module, *args, **kwargs)
            return
        own = module.__dict__.get(_IGNORED)
        module.__dict__[_IGNORED] = [*getattr(module, _IGNORED, ()), *streamed]
        try:
            original(self, module, *args, **kwargs)
        finally:
            del module.__dict__[_IGNORED]
            if own is not None:
                module.__dict__[_IGNORED] = own

    # Type checkers allow no replacement of a method.
    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]


def require_not_averaged(parameters: dict[int, str]) -> None:
    """Requires that no ``DistributedDataParallel`` averages the gradients of these parameters.

    It knows the parameters by nodes of autograd, which are others once the parameters stream.

    Args:
        parameters: The names, by ``id``.

    Raises:
        ModelError: One averages the gradients of a parameter.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    # Nothing lists its instances.
    wrappers: list[Any] = [
        each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)
    ]
    for wrapper in wrappers:
        for parameter in wrapper.module.parameters():
            if parameter.requires_grad and id(parameter) in parameters:
                raise ModelError(
                    f"cannot stream `{parameters[id(parameter)]}`: a DistributedDataParallel "
                    "averages its gradients, and no longer would; freeze the weights and offload "
                    "the model before it is wrapped"
                )


def _streamed_names(module: nn.Module) -> list[str]:
    """Returns the names of the streamed parameters of a module.

    Raises:
        ModelError: A streamed weight requires gradients, which each process would keep.
    """
    names = []
    for name, parameter in tree.named_parameters(module, remove_duplicate=False):
        if isinstance(parameter, StreamedTensor):
            if parameter.requires_grad:
                raise ModelError(
                    "DistributedDataParallel would not average the gradients of streamed "
                    f"weights, and `{name}` requires them; freeze the streamed weights with "
                    "parameter.requires_grad_(False)"
                )
            names.append(name)
    return names
