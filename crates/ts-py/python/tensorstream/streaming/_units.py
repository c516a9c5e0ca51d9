# SPDX-License-Identifier: MIT OR Apache-2.0
"""Groups the parameters of a model into units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .. import _native
from .._dtypes import SAFETENSORS_DTYPES, TORCH_DTYPES
from ..config import HEADROOM, Settings
from ..errors import BudgetError, MissingTensorError, ModelError
from . import _tree as tree
from ._builder import Builder
from ._division import (
    FUSED,
    Rows,
    addresses_are_exact,
    batch_divided,
    block_counts,
    expert_modules,
    is_divided,
    is_splittable,
    one_range,
    route_argument,
    row_divided,
    slices,
    trial_bytes,
)
from ._state_dict import Loaded, mismatch
from ._store import DimensionOrders
from ._streamed_tensor import StreamedTensor
from ._symbolic_tensor import Source, SymbolicTensor
from ._weights import Divided, Weight

#: A tensor of a unit: its name, dtype, shape, parts (file, offset, length), and phase, which is its
#: address modulo 64. If the phase is ``None``, it is the offset of the first part modulo 64.
TensorSpec = tuple[str, str, list[int], list[tuple[int, int, int]], int | None]


#: A unit: its name, its tensors, and whether a pass uses it only for some inputs.
UnitSpec = tuple[str, list[TensorSpec], bool]


def units_for_budget(
    model: nn.Module,
    checkpoint: _native.Checkpoint,
    converted: dict[int, Source],
    orders: DimensionOrders,
    settings: Settings,
    exact: bool,
    device: torch.device,
    fitted: Callable[[int, int], int],
    kept: frozenset[int] = frozenset(),
    is_own: Callable[[nn.Module], bool] = lambda _: True,
    loaded: Loaded | None = None,
) -> tuple[UnitBuilder, int]:
    """Divides no more parameters than the budget requires. Returns the units and the budget.

    Args:
        model: The model.
        checkpoint: The checkpoint with the weights.
        converted: The sources of parameters that had to be computed, by ``id``.
        orders: The stored orders of dimensions, by name, of parameters that are not contiguous.
        settings: The settings of the engine.
        exact: Whether products with parts of a parameter must round like those with all of it.
        device: The device on which the model runs.
        fitted: Returns the budget. Its arguments are the smallest budget that works, and the
            budget that keeps all units in memory.
        kept: The ``id`` of each parameter that stays in memory as it is.
        is_own: Returns whether a module is on the device.
        loaded: What the parameters and buffers become, if this was recorded.
    """

    def build(rows: Rows, splits: bool = False) -> tuple[UnitBuilder, Requirement]:
        units = UnitBuilder(
            model, checkpoint, converted, orders, rows, exact, device, kept, is_own, loaded, splits
        )
        return units, units.requirement(settings)

    splits = any(map(is_splittable, tree.modules(model)))

    units, plain = build(Rows.NONE)
    held = units.buffer_bytes
    by_rows, divided = units, plain
    rows = Rows.EMBEDDINGS
    if splits or row_divided(model, rows, exact=exact, device=device):
        by_rows, divided = build(rows, splits)

    def least() -> int:
        return min(plain.smallest, divided.smallest)

    def budget_for_weights() -> int:
        return fitted(least() + held, plain.whole + held) - held

    try:
        budget = budget_for_weights()
    except BudgetError:
        budget = 0  # too little memory is available, unless more parameters are divided
    # Checking that products are exact takes time and memory, so a model is loaded without it if
    # possible, and else with as little of it as possible.
    for rows in (Rows.HEADS, Rows.ALL):
        if budget >= least():
            break
        if exact and device.type == "cpu":
            _require_trials(model, rows, least() + held)
        by_rows, divided = build(rows, splits)
        try:
            budget = budget_for_weights()
        except BudgetError:
            if rows is Rows.ALL:
                raise
    lowest = least()
    if splits and budget >= plain.smallest:  # modules need not be split
        by_rows, divided = build(by_rows.rows)
    divides = len(by_rows.specs) > len(units.specs)
    # Lookups need buffers, so that a division can also raise the smallest budget.
    works = budget >= divided.smallest or divided.smallest <= plain.smallest
    chosen, needs = units, plain
    if divides and works and budget < plain.whole:
        chosen, needs = by_rows, divided
    if budget < needs.smallest:
        raise chosen.too_small(settings, budget + held, lowest + held)
    chosen.smallest = lowest
    return chosen, budget


@dataclass(frozen=True)
class Requirement:
    """Budgets for the units of a model, without its buffers, in bytes.

    Attributes:
        smallest: The smallest budget that works however the model is loaded: the addresses of
            weights, and so how they are read, depend on that.
        whole: The smallest budget that keeps all units in memory.
    """

    smallest: int
    whole: int


def _require_trials(model: nn.Module, rows: Rows, without: int) -> None:
    """Requires memory to find out whether products with blocks of rows are exact.

    Args:
        model: The model.
        rows: Which parameters are divided.
        without: The smallest budget that works without this, in bytes.

    Raises:
        BudgetError: Too little memory is available.
    """
    available = _native.available_memory()
    trials = trial_bytes(model, rows)
    needed = HEADROOM + trials
    if trials and available is not None and available < needed:
        raise BudgetError(
            f"not enough memory: {available >> 20} MiB are available, and linear layers must "
            "be divided into blocks for so small a budget, but checking whether this is exact "
            f"takes {needed >> 20} MiB, with activations and code; free memory, or raise the "
            f"memory limit of this process, or the budget to {without} bytes"
        )


class UnitBuilder:
    """Groups the parameters of a model into units.

    The parameters that a module owns itself form one unit.
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: _native.Checkpoint,
        converted: dict[int, Source],
        orders: DimensionOrders,
        rows: Rows,
        exact: bool,
        device: torch.device,
        kept: frozenset[int] = frozenset(),
        is_own: Callable[[nn.Module], bool] = lambda _: True,
        loaded: Loaded | None = None,
        splits: bool = False,
    ) -> None:
        #: Whether addresses modulo 64 are those in host memory. Else they are those that the
        #: allocator of a device gives: 0.
        self._on_host = device.type == "cpu"
        self._checkpoint = checkpoint
        self._kept = kept
        self._loaded = Loaded() if loaded is None else loaded
        #: Which parameters are divided into blocks of rows.
        self.rows = rows
        #: Whether each parameter of a module with several large ones is a unit.
        self._splits = splits
        #: The smallest budget that works, without buffers, once it is known.
        self.smallest = 0
        self._together: list[list[int]] | None = None
        self._model = model
        self._exact = exact
        #: The rows of each block of the parameters that are divided into blocks, by ``id``.
        self._row_divided = row_divided(model, rows, exact=exact, device=device)
        #: The parameters whose slices are units, although a pass uses all of them, by ``id``.
        self._batch_divided = batch_divided(model, rows, exact=exact, device=device)
        #: The experts that are modules of a list.
        self._experts = [each for each in expert_modules(model) if is_own(each)]
        self._in_expert = {id(each) for expert in self._experts for each in tree.modules(expert)}
        #: The tensors whose rows can be read one by one, with their dtypes.
        self.tables: list[tuple[TensorSpec, torch.dtype]] = []
        #: The stored orders of dimensions, by name, of parameters that are not contiguous.
        self._orders = orders
        #: The sources of parameters that had to be computed, by ``id``.
        self._converted = converted
        self._builder = Builder(checkpoint)
        self._stored = set(checkpoint.names())
        self.weights: list[Weight] = []
        #: The divided weights. Their keys follow those of ``weights``.
        self.divided: list[Divided] = []
        #: The name and the tensors of each unit, and whether a pass uses the unit only for some
        #: inputs.
        self.specs: list[UnitSpec] = []
        #: Modules with parameters, and the keys of their weights by parameter name.
        self.modules: list[tuple[nn.Module, dict[str, int]]] = []
        #: The stored tensor of each parameter, by key.
        self.sources: dict[int, TensorSpec] = {}
        #: The keys of weights by ``id`` of the parameter. Those of divided weights are negative
        #: until all weights are known: -1 for the first one.
        self._keys: dict[int, int] = {}
        self._names = _qualified_names(model)
        self._embedded, self._multiplied = (
            {
                # Not the attribute, which a parametrization computes.
                id(module._parameters.get("weight"))
                for module in tree.modules(model)
                if isinstance(module, kind)
            }
            for kind in ((nn.Embedding, nn.EmbeddingBag), nn.Linear)
        )
        self._buffers = [
            (module, tree.joined(prefix, name), name, buffer)
            for prefix, module in tree.named_modules(model)
            for name, buffer in module._buffers.items()
            if buffer is not None
            and is_own(module)
            and (isinstance(buffer, SymbolicTensor) or buffer.is_meta)
        ]
        #: The size of the buffers that a checkpoint has. They stay in memory.
        self.buffer_bytes = sum(each.nbytes for each in tree.persistent_buffers(model, is_own))
        for prefix, module in tree.named_modules(model):
            if is_own(module):
                self._add_module(prefix, module)
        self.modules = [
            (module, {name: self._final(key) for name, key in keys.items()})
            for module, keys in self.modules
        ]
        self.sources = {self._final(key): spec for key, spec in self.sources.items()}
        #: The keys of weights by ``id`` of the parameter.
        self.keys = {parameter: self._final(key) for parameter, key in self._keys.items()}

    def _final(self, key: int) -> int:
        """Returns the final key of a weight."""
        return key if key >= 0 else len(self.weights) - 1 - key

    def _add_module(self, prefix: str, module: nn.Module) -> None:
        keys: dict[str, int] = {}
        specs: list[TensorSpec] = []
        divided: list[tuple[int, nn.Parameter]] = []
        is_split = self._splits and is_splittable(module)
        routed = id(module) in self._in_expert
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in self._kept:
                continue
            key = self._keys.get(id(parameter))
            if key is None:
                source = self._source(parameter)
                order = self._loaded.orders.get(id(parameter), self._orders.get(source.name))
                divides = (
                    is_divided(module, parameter)
                    or id(parameter) in self._row_divided
                    or id(parameter) in self._batch_divided
                )
                is_whole = order is not None or not divides
                shape = [parameter.shape[dim] for dim in order] if order else list(parameter.shape)
                dtype = SAFETENSORS_DTYPES[parameter.dtype]
                phase = source.phase if self._on_host else 0
                spec = (source.name, dtype, shape, list(source.parts), phase)
                if is_whole:
                    key = len(self.weights)
                    self.weights.append(self._weight(parameter, spec, len(specs)))
                    specs.append(spec)
                    if is_split:
                        self.specs.append((tree.joined(prefix, name), specs, routed))
                        specs = []
                else:
                    key = -1 - len(divided) - len(self.divided)
                    divided.append((key, parameter))
                self._keys[id(parameter)] = key
                self.sources[key] = spec
            keys[name] = key
        if specs:
            self.specs.append((prefix or type(module).__name__, specs, routed))
        for key, parameter in divided:
            self._divide(parameter, self.sources[key])
        if keys:
            self.modules.append((module, keys))

    def _divide(self, parameter: torch.Tensor, spec: TensorSpec) -> None:
        """Adds a unit for each slice of a parameter along its first dimension."""
        _, dtype, shape, parts, phase = spec
        # Not the name of the source, which is that of the first expert if experts were merged.
        name = self._names[id(parameter)][0]
        blocks = None
        if id(parameter) in self._row_divided:
            blocks = tuple(block_counts(shape[0], self._row_divided[id(parameter)]))
        self.divided.append(
            Divided(
                name,
                parameter.dtype,
                tuple(shape),
                parameter.requires_grad,
                tuple(parameter.stride()),
                len(self.weights),
                len(self.specs),
                phase if phase is not None else (parts[0][1] % 64 if parts else 0),
                blocks,
                self._table(parameter, name, spec) if blocks else None,
                id(parameter) in self._batch_divided,
                id(parameter) in self._multiplied,
            )
        )
        counts = blocks or (1,) * shape[0]
        first = 0
        for count, (own, own_phase) in zip(counts, slices(parts, phase, counts), strict=True):
            of_rows = f"{name}[{first}:{first + count}]" if blocks else f"{name}[{first}]"
            own_shape = [count, *shape[1:]] if blocks else shape[1:]
            strides = tuple(parameter.stride())
            self.weights.append(
                Weight(
                    of_rows,
                    parameter.dtype,
                    tuple(own_shape),
                    len(self.specs),
                    0,
                    parameter.requires_grad,
                    strides if blocks else strides[1:],
                    own_shape,
                )
            )
            # Every pass uses all blocks of a linear layer in order, and all slices of a batch.
            # Which other slices a pass uses depends on its input.
            ordered = self._batch_divided | (self._multiplied if blocks else set())
            routed = id(parameter) not in ordered
            in_place = one_range(own)
            tensor: TensorSpec = (of_rows, dtype, own_shape, own, own_phase)
            if in_place is not None and self._is_movable(parameter, own_phase, in_place[1] % 64):
                tensor = (of_rows, dtype, own_shape, [in_place], None)
            self.specs.append((of_rows, [tensor], routed))
            first += count

    def _is_movable(self, parameter: torch.Tensor, phase: int | None, other: int) -> bool:
        """Returns whether a slice of a parameter may have another address than its own.

        This is so for the experts of a mixture if products with them do not depend on the address.

        Args:
            parameter: The parameter.
            phase: The slice's address modulo 64 in the reference, or ``None`` for that of the file.
            other: The other address modulo 64.
        """
        key = id(parameter)
        return (
            self._on_host
            and phase is not None
            and phase != other
            and key not in self._row_divided
            and key not in self._batch_divided
            and other % parameter.itemsize == 0
            and (
                not self._exact
                or addresses_are_exact(parameter.dtype, *parameter.shape[1:], phase, other)
            )
        )

    def _table(self, parameter: torch.Tensor, name: str, spec: TensorSpec) -> int | None:
        """Adds a table of the rows of an embedding. Returns its number, or ``None``.

        Rows that have checksums are read with their blocks, which are compared with the checksums.
        """
        if not self._checkpoint.can_gather(spec[3]) or id(parameter) not in self._embedded:
            return None
        self.tables.append(((name, *spec[1:4], 0), parameter.dtype))
        return len(self.tables) - 1

    def _weight(self, parameter: torch.Tensor, spec: TensorSpec, index: int) -> Weight:
        """Returns the weight of a parameter, in the current unit."""
        name, _, stored_shape, _, _ = spec
        return Weight(
            name,
            parameter.dtype,
            tuple(parameter.shape),
            len(self.specs),
            index,
            parameter.requires_grad,
            tuple(parameter.stride()),
            stored_shape,
        )

    def leaves(self) -> Iterator[tuple[nn.Module, int]]:
        """Yields the modules that lease their unit while their forward runs, each with its unit.

        Such a module uses one unit only, has no divided weights, and no module below it has
        parameters. The weights of other modules are leased for each operation, so that no unit
        stays leased while another one is needed.
        """
        owners = {id(module) for module, _ in self.modules}
        for module, keys in self.modules:
            below = any(id(each) in owners for each in tree.modules(module) if each is not module)
            units = self._units(keys)
            divides = any(key >= len(self.weights) for key in keys.values())
            if not below and not divides and len(units) == 1:
                yield module, units.pop()

    def routed(self) -> Iterator[tuple[nn.Module, list[int]]]:
        """Yields the modules that choose slices of weights, and the keys of these weights."""
        count = len(self.weights)
        for module, keys in self.modules:
            divided = [
                key
                for key in keys.values()
                if key >= count and self.divided[key - count].blocks is None
            ]
            if divided and route_argument(module) is not None:
                yield module, divided

    def experts(self) -> Iterator[tuple[nn.Module, list[int]]]:
        """Yields the experts that are modules of a list, and their units in the order of modules.

        Experts that share weights with other modules, or whose weights are divided, may have fewer
        units.
        """
        keys = {id(module): own for module, own in self.modules}
        for expert in self._experts:
            owned = (self._units(keys.get(id(each), {})) for each in tree.modules(expert))
            units = {unit: None for own in owned for unit in sorted(own) if self.specs[unit][2]}
            if units:
                yield expert, list(units)

    def expert_units(self) -> dict[str, list[int]]:
        """Returns the routed units of each module that contains experts, by name of the module."""
        names = {id(module): name for name, module in tree.named_modules(self._model)}
        units: dict[str, list[int]] = {}
        for module, keys in self.routed():
            for each in (self.divided[key - len(self.weights)] for key in keys):
                own = range(each.first_unit, each.first_unit + each.slice_count())
                units.setdefault(names[id(module)], []).extend(own)
        for expert, numbers in self.experts():
            units.setdefault(names[id(expert)].rpartition(".")[0], []).extend(numbers)
        return units

    def _units(self, keys: dict[str, int]) -> set[int]:
        """Returns the units of those weights that are not divided."""
        own = (key for key in keys.values() if key < len(self.weights))
        return {self.weights[key].unit for key in own}

    def leased_together(self) -> list[list[int]]:
        """Returns sets of units that one operation needs at once.

        The fast path of PyTorch's attention takes all weights of a layer.
        """
        units = {id(module): self._units(keys) for module, keys in self.modules}
        sets = [
            set().union(*(units.get(id(each), set()) for each in tree.modules(module)))
            for module in tree.modules(self._model)
            if isinstance(module, FUSED)
        ]
        return [sorted(each) for each in sets if len(each) > 1]

    def requirement(self, settings: Settings) -> Requirement:
        """Returns the budgets for the units."""
        if self._together is None:
            self._together = self.leased_together()
        smallest, whole = _native.requirement(
            self._checkpoint,
            self.specs,
            together=self._together,
            settings=settings,
            tables=self.tables,
            any_phase=self._on_host,
        )
        return Requirement(smallest, whole)

    def too_small(self, settings: Settings, budget: int, smallest: int) -> BudgetError:
        """Returns the error for a budget that is too small."""
        planned = _native.plan(
            self._checkpoint,
            budget=smallest + (1 << 50),
            settings=settings,
            units=self.specs,
            together=self.leased_together(),
            tables=self.tables,
        )
        sizes = [(own["slot_bytes"], own["name"]) for own in planned["units"]]
        sets = [[sizes[i] for i in each] for each in self.leased_together()]
        sets += [[each] for each in sizes]
        largest = max(sets, key=lambda each: sum(size for size, _ in each), default=[(0, "-")])
        names = "` + `".join(name for _, name in largest)
        held = ""
        if self.buffer_bytes:
            held = f", and buffers, which stay in memory, take {self.buffer_bytes} bytes"
        return BudgetError(
            f"a budget of {budget} bytes is too small: the smallest budget that works is "
            f"{smallest} bytes, of which `{names}` needs {sum(size for size, _ in largest)} bytes "
            f"at once{held}",
            smallest,
        )

    def read_buffers(self) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Reads the buffers that are not in memory from the checkpoint."""
        return [
            (module, name, self._read_buffer(module, qualified, buffer))
            for module, qualified, name, buffer in self._buffers
        ]

    def _read_buffer(self, module: nn.Module, qualified: str, buffer: torch.Tensor) -> torch.Tensor:
        name = qualified.rpartition(".")[2]
        value = self._loaded.buffers.get((id(module), name), buffer)
        if isinstance(value, SymbolicTensor):
            return value.materialize()
        if qualified not in self._stored:
            raise ModelError(
                f"buffer `{qualified}` of {type(module).__name__} is on the meta device but not in "
                "the checkpoint; build the model with its buffers in memory"
            )
        self._match(buffer, qualified)
        return self._builder.symbolic(qualified).materialize()

    def _source(self, parameter: torch.Tensor) -> Source:
        names = self._names[id(parameter)]
        if isinstance(parameter, StreamedTensor):
            raise ModelError(
                f"parameter `{names[0]}` is already streamed, because it belongs to an offloaded "
                "model or module; restore that model or module first"
            )
        if isinstance(parameter, SymbolicTensor):
            return (
                parameter.source
                if isinstance(parameter.source, Source)
                else self._converted[id(parameter)]
            )
        if type(parameter) not in (nn.Parameter, torch.Tensor):
            raise ModelError(
                f"cannot stream parameter `{names[0]}`: expected nn.Parameter, got "
                f"{type(parameter).__name__}"
            )
        if parameter.device.type not in ("cpu", "meta"):
            raise ModelError(
                f"cannot stream parameter `{names[0]}` on {parameter.device}: expected the CPU or "
                "the meta device"
            )
        loaded = self._loaded.parameters.get(id(parameter))
        if loaded is not None:
            source = loaded.source
            return source if isinstance(source, Source) else self._converted[id(parameter)]
        name = self._loaded.names.get(id(parameter))
        if name is None:
            name = next((name for name in names if name in self._stored), None)
        if name is None:
            files = ", ".join(str(path) for path, _, _ in self._checkpoint.files())
            raise MissingTensorError(
                f"the model needs tensor `{names[0]}`, which is not in {files}"
                + (f" (also looked for {', '.join(names[1:])})" if names[1:] else "")
            )
        return self._match(parameter, name)

    def _match(self, tensor: torch.Tensor, name: str) -> Source:
        """Returns the source of a tensor. Compares its shape and dtype with the checkpoint."""
        dtype, shape, parts = self._checkpoint.entry(name)
        order = self._orders.get(name)
        if order is None and not (tensor.is_meta or tensor.is_contiguous()):
            raise ModelError(
                f"parameter `{name}` is not contiguous, but contiguous in the checkpoint: results "
                "would differ in their last bits; make it contiguous, or offload without a "
                "checkpoint"
            )
        wanted = list(tensor.permute(order).shape) if order else list(tensor.shape)
        if wanted != shape or tensor.dtype != TORCH_DTYPES.get(dtype):
            raise mismatch(self._checkpoint, tensor, name, order)
        phase = None if tensor.is_meta else tensor.data_ptr() % 64
        return Source(name, tuple(parts), phase)


def _qualified_names(model: nn.Module) -> dict[int, list[str]]:
    """Returns the names of each distinct parameter by ``id``. Tied parameters have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in tree.named_parameters(model, remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names
