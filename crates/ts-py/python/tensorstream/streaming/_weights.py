# SPDX-License-Identifier: MIT OR Apache-2.0
"""The streamed weights of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import _native

if TYPE_CHECKING:
    from ..config import Config
    from ._aliases import Place
    from ._passes import Passes
    from ._profile import Profile
    from ._stored_weights import StoredWeights


@dataclass(frozen=True)
class Weight:
    """A distinct parameter of a model, which is tensor ``index`` of ``unit``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    unit: int
    index: int
    requires_grad: bool
    strides: tuple[int, ...]
    #: The shape in which the bytes are row-major. The order of its dimensions may differ from
    #: ``shape``.
    stored_shape: list[int]

    def spec(self) -> Any:
        """Returns the description of the weight for the native module."""
        row_major = torch.empty(self.stored_shape, device="meta").stride()
        plain = list(self.shape) == self.stored_shape and self.strides == row_major
        strided = None if plain else (list(self.shape), list(self.strides))
        return self.unit, self.index, strided, self.name, self.dtype


@dataclass(frozen=True)
class Divided:
    """A distinct parameter of a model whose slices along the first dimension are weights.

    A slice is either a block of rows, or one index of the first dimension. In the second case, the
    slice does not have this dimension.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    strides: tuple[int, ...]
    #: The key of the first slice. The other slices have the following keys.
    first_key: int
    #: The unit of the first slice. The other slices have the following units.
    first_unit: int
    #: The address of the parameter in memory, modulo 64.
    phase: int
    #: The number of rows of each block, or ``None`` if each index is a slice.
    blocks: tuple[int, ...] | None = None
    #: The number of the table that contains the rows, if they can be gathered.
    table: int | None = None
    #: Whether an operation uses all slices, and computes the same with one after the other.
    batched: bool = False
    #: Whether linear layers multiply by it, so that a pass needs all of it.
    multiplied: bool = False

    def slice_count(self) -> int:
        """Returns the number of slices."""
        return self.shape[0] if self.blocks is None else len(self.blocks)

    def slice_of(self, row: int) -> int:
        """Returns the number of the slice that contains a row."""
        if self.blocks is None:
            return row
        return min(row // self.blocks[0], len(self.blocks) - 1)

    def first_row(self, index: int) -> int:
        """Returns the first row of a slice."""
        return index if self.blocks is None else index * self.blocks[0]


class Weights:
    """The streamed weights of a model on a device, and the native object that leases them.

    The key of a weight is its index. The native object does not know divided weights, which have
    the largest keys.
    """

    def __init__(
        self,
        streamer: _native.Streamer,
        specs: list[Weight],
        divided: list[Divided],
        budget_bytes: int,
        device: torch.device,
        stored: StoredWeights,
        passes: Passes,
        profile: Profile,
    ) -> None:
        self.streamer = streamer
        #: The device on which the model runs, and on which leased weights are.
        self.device = device
        self.specs: list[Weight | Divided] = [*specs, *divided]
        self._native_count = len(specs)
        self.budget_bytes = budget_bytes
        #: The stored tensors of the weights on all devices. Each model has its own.
        self.stored = stored
        #: Which calls of modules are passes.
        self.passes = passes
        self.profile = profile
        #: The stored tensor of each parameter, as a ``TensorSpec``, by key.
        self.sources: dict[int, Any] = {}
        #: The original parameter of each weight as a number, by key. Weights on several devices can
        #: have the same one.
        self.parameters: dict[int, int] = {}
        #: The units of the experts of each layer, by the name of the module that contains them.
        self.expert_units: dict[str, list[int]] = {}
        #: Where the parameters lay that shared memory with others, by key.
        self.places: dict[int, Place] = {}
        #: The smallest budget that works, without buffers, in bytes.
        self.smallest = 0
        #: The size of the buffers that a checkpoint has, which are part of the budget.
        self.buffer_bytes = 0
        #: Requested backends that are not built yet, with the reason.
        self.passed_over: list[tuple[str, str]] = []
        #: The number of the device, among those of the model. The main one is first.
        self.number = 0
        #: Whether a trace is being recorded.
        self.is_traced = False
        #: The settings.
        self.config: Config | None = None

    def mapped(self, stand_in: Any) -> torch.Tensor:
        """Returns the weight of a stand-in as a view of a file. See ``StoredWeights.mapped``."""
        return self.stored.mapped(stand_in)

    @property
    def directory(self) -> Path:
        """The directory for files with changed weights."""
        assert self.config is not None, "`attach` sets the settings"
        return self.config.conversion_directory()

    def divided(self, key: int) -> Divided | None:
        """Returns the description of a weight if it is divided."""
        spec = self.specs[key] if key >= self._native_count else None
        return spec if isinstance(spec, Divided) else None

    def unit(self, key: int) -> int:
        """Returns the unit of a weight that is not divided."""
        spec = self.specs[key]
        assert isinstance(spec, Weight), f"{spec.name} is divided"
        return spec.unit

    def elements(self, key: int, dtype: torch.dtype) -> int:
        """Returns how many elements of a dtype fit into the memory of a weight."""
        spec = self.specs[key]
        count = 1
        for n in spec.shape:
            count *= n
        return count * spec.dtype.itemsize // dtype.itemsize
