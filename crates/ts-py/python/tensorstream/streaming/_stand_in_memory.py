# SPDX-License-Identifier: MIT OR Apache-2.0
"""What happens when code asks for the memory of stand-ins, or keeps them: they have none."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ModelError

_native_torch: Any = torch._C
#: Set what PyTorch raises when it accesses the memory of a storage. PyTorch 2.10 has no such
#: functions, and ends the process instead.
_set_message: Any = getattr(_native_torch, "_set_storage_data_ptr_access_error_msg", None)
_clear_message: Any = getattr(_native_torch, "_clear_storage_data_ptr_access_error_msg", None)

_NO_MEMORY = (
    "the streamed weight `{}` has no memory of its own, but this operation accesses it directly; "
    "use a copy of the weight, such as weight.clone(), or restore(model) first"
)
#: The modes of operations in which ``make_fx`` and ``torch.export`` trace.
_TRACING = (
    _native_torch._TorchDispatchModeKey.PROXY,
    _native_torch._TorchDispatchModeKey.FAKE,
)


def protect(stand_in: torch.Tensor, name: str) -> None:
    """Makes PyTorch raise an error when it accesses the memory of a stand-in.

    Not while the profiler runs, which asks for the addresses of operands.
    """
    if _set_message is not None and not _native_torch._autograd._profiler_enabled():
        _set_message(_storage(stand_in), _NO_MEMORY.format(name))


def unprotect(stand_in: torch.Tensor) -> None:
    """Undoes ``protect``. The address of the stand-in is 0."""
    if _clear_message is not None:
        _clear_message(_storage(stand_in))


def _storage(stand_in: torch.Tensor) -> int:
    address: int = _native_torch.TensorBase.untyped_storage(stand_in)._cdata
    return address


def require_no_tracing() -> None:
    """Requires that operations are not being traced, which would keep weights.

    Raises:
        ModelError: They are.
    """
    if _native_torch._get_tracing_state() is not None or any(
        _native_torch._get_dispatch_mode(mode) is not None for mode in _TRACING
    ):
        raise ModelError("cannot trace a model that streams; restore(model) first")
