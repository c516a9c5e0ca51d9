# SPDX-License-Identifier: MIT OR Apache-2.0
"""Lets a server use the stand-in accelerator: PyTorch loads this module when it is imported.

Adds what the stand-in lacks, and accelerators have: random numbers from the generator of a device,
and storages that can grow.
"""

from __future__ import annotations

from typing import Any

import torch

#: Operators that draw random numbers.
_DRAWING = ("normal_", "uniform_", "bernoulli_.float", "random_", "native_dropout", "multinomial")

_libraries: list[torch.library.Library] = []


def load() -> None:
    """Registers the device ``accinte`` and its operators. The entry point of the backend."""
    import torch_accinte  # noqa: F401  # registers the device with PyTorch

    library = torch.library.Library("aten", "IMPL")
    # The library unregisters its operators when it is deleted.
    _libraries.append(library)
    for name in _DRAWING:
        library.impl(name, _drawing(name), "PrivateUse1")
    setattr(torch.UntypedStorage, "resize_", _resize)  # noqa: B010


def _drawing(name: str) -> Any:
    base, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, base), overload or "default")

    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        generator = kwargs.pop("generator", None)
        if generator is None:
            generator = torch._C._accelerator_getDefaultGenerator(tensor.device.index)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(generator.get_state())
            drawn = operator(tensor.cpu(), *args, **kwargs)
            generator.set_state(torch.get_rng_state())
        if base.endswith("_"):
            return tensor.copy_(drawn)
        return torch.utils._pytree.tree_map(lambda each: each.to(tensor.device), drawn)

    return run


_of_torch = torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
    """Resizes a storage. One of the stand-in must be empty: PyTorch copies as on a CPU."""
    if storage.device.type != "accinte" or storage.nbytes():
        return _of_torch(storage, nbytes)
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).resize_(nbytes)
    return storage
