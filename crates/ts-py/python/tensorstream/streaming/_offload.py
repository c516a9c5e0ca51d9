# SPDX-License-Identifier: MIT OR Apache-2.0
"""Offloads and restores models: groups parameters into units, and replaces them with stand-ins."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from .. import _native
from .._dtypes import SAFETENSORS_DTYPES, TORCH_DTYPES
from ..config import Config, Settings, expanded
from ..errors import (
    BudgetError,
    CheckpointError,
    ConfigurationError,
    MissingTensorError,
    ModelError,
)
from ._builder import Builder
from ._division import (
    FUSED,
    Rows,
    addresses_are_exact,
    batch_divided,
    block_counts,
    block_rows,
    expert_modules,
    is_divided,
    one_range,
    route_argument,
    row_divided,
    slices,
)
from ._forward import (
    Forward,
    Parameters,
    Pass,
    Streaming,
    recurrent,
    replace_method,
    restore_methods,
    streaming_of,
)
from ._guards import guard
from ._interrupts import deferred
from ._profile import Profile
from ._routing import announced
from ._rules import register_transformers
from ._stats import Stats
from ._store import DimensionOrders, derived_of, store_derived, store_live
from ._streamed_tensor import StreamedTensor, StreamedWeight, stand_ins
from ._symbolic_tensor import Source, SymbolicTensor
from ._weights import Divided, Weight, Weights

Path = str | os.PathLike[str]
M = TypeVar("M", bound=nn.Module)
#: A tensor of a unit: its name, dtype, shape, parts (file, offset, length), and phase, which is its
#: address modulo 64. If the phase is ``None``, it is the offset of the first part modulo 64.
TensorSpec = tuple[str, str, list[int], list[tuple[int, int, int]], int | None]


def offload(
    model: M,
    config: Config | None = None,
    *,
    checkpoint: Path | None = None,
    budget: int | str | None = None,
) -> M:
    """Streams the parameters of a model from disk under a hard memory budget.

    With a ``checkpoint``, the parameters get the values of the checkpoint. Without a checkpoint,
    the weights of a model on the CPU are written to a ``.ts`` file in ``config.storage_path``, and
    their memory is freed. The file is named after its content. For a model on the meta device,
    ``config.storage_path`` is the checkpoint. Buffers stay in memory.

    Results are bit-identical to those of the model in memory. Parameters are frozen while they
    stream; ``restore`` makes them trainable again if they were before. Offloading reads only the
    headers of a checkpoint, and buffers that are on the meta device. Weights are first read by a
    forward, or by an operation on them.

    Args:
        model: Any module, on the CPU or the meta device. Changed in place and returned.
        config: The settings. The default is ``Config()``.
        checkpoint: A directory, ``.safetensors`` or ``.ts`` file, shard index or URL, whose tensors
            have the names of the model's parameters.
        budget: Shorthand for ``Config(budget=...)``.

    Raises:
        ConfigurationError: There is neither a checkpoint nor a storage path, the budget is given
            twice, or another argument is invalid.
        CheckpointNotFoundError: There is no checkpoint at this path.
        MissingTensorError: The checkpoint lacks a parameter.
        CheckpointError: A tensor has another shape or dtype than the parameter, or a file is
            damaged.
        CheckpointPermissionError: The process may not read the checkpoint, or write to the storage
            path.
        BudgetError: The budget is too small, and the message contains the smallest that works. Also
            raised if too little memory is available.
        StorageError: Reading or writing failed.
        ModelError: The model cannot be streamed.

    Examples:
        >>> import tensorstream as ts, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        >>> model = ts.offload(model, ts.Config(storage_path="weights", budget="60KiB"))
        >>> with torch.inference_mode():
        ...     model(torch.ones(1, 64)).shape
        torch.Size([1, 64])
        >>> ts.stats(model)["passes"]
        1
        >>> model = ts.restore(model)
    """
    config = checked(config)
    if budget is not None:
        if config.budget is not None or config.vram_budget_gb is not None:
            raise ConfigurationError(
                "the budget is given twice, as `budget` and in `config`; give only one"
            )
        config = replace(config, budget=budget)
    path = checkpoint if checkpoint is not None else config.storage_path
    if path is None:
        raise ConfigurationError(
            "no checkpoint: give `checkpoint`, or set Config.storage_path to a directory for the "
            "weights of the model"
        )
    for name, module in model.named_modules():
        _refuse_torchscript(name, module)
    if "_tensorstream" in model.__dict__:
        raise ModelError(f"the {type(model).__name__} is already offloaded; restore(model) first")
    if checkpoint is None and not any(p.is_meta for p in model.parameters()):
        freed = sum(parameter.nbytes for parameter in model.parameters())
        return attach(model, config, *store_live(model, config), freed_bytes=freed)
    if checkpoint is None and not all(p.is_meta for p in model.parameters()):
        raise ModelError(
            "some parameters are on the meta device and others have weights: give a `checkpoint` "
            "with all parameters"
        )
    freed = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    return attach(model, config, _native.Checkpoint(expanded(path)), freed_bytes=freed)


def checked(config: Config | None) -> Config:
    """Returns the configuration, or the default configuration for ``None``.

    Raises:
        ConfigurationError: ``config`` is not a ``Config``.
    """
    if config is None:
        return Config()
    if isinstance(config, Config):
        return config
    what = type(config).__name__
    advice = "use Config(**settings)" if isinstance(config, dict) else "pass a tensorstream.Config"
    if hasattr(config, "model_type"):
        advice = "pass this configuration of transformers to from_pretrained, as `model_config`"
    raise ConfigurationError(
        f"invalid config: expected a tensorstream.Config, got {what}; {advice}"
    )


def attach(
    model: M,
    config: Config,
    checkpoint: _native.Checkpoint,
    orders: DimensionOrders | None = None,
    *,
    freed_bytes: int = 0,
) -> M:
    """Offloads a model to an open checkpoint. If this fails, the model is unchanged.

    Args:
        model: The model.
        config: The settings.
        checkpoint: The checkpoint with the weights.
        orders: The stored orders of dimensions, by name, of parameters that are not contiguous.
        freed_bytes: Memory that offloading frees, which the budget can use.
    """
    derived = derived_of(model)
    if derived:
        checkpoint = store_derived(derived, Builder(checkpoint), config, config.working_bytes())
    converted = {
        id(tensor): Source(name, tuple(checkpoint.entry(name)[2]), tensor.source.phase)
        for name, tensor in derived.items()
    }
    settings = config.settings()

    def fitted(smallest: int, whole: int) -> int:
        return config.fitted_bytes(smallest, whole, freed_bytes)

    units, budget = _divided(
        model, checkpoint, converted, orders or {}, settings, config.exact, fitted
    )
    together = units.leased_together()
    profile = Profile(checkpoint, [(name, routed) for name, _, routed in units.specs])
    streamer = _native.Streamer(
        checkpoint,
        units.specs,
        [weight.spec() for weight in units.weights],
        budget=budget,
        together=together,
        weight_class=StreamedWeight,
        settings=settings,
        tables=units.tables,
        scores=profile.load(),
    )
    weights = Weights(streamer, units.weights, units.divided, budget)
    buffers = units.read_buffers()
    made = {key: stand_ins(weights, key) for key in units.sources}
    streaming = Streaming(
        checkpoint, units.sources, weights, config.passed_over(), profile, units.expert_units()
    )
    replaced = []
    for module, keys in units.modules:
        parameters = Parameters(module._parameters, weights)
        for name, key in keys.items():
            parameters.bind(name, *made[key])
        replaced.append((module, parameters))
    register_transformers()
    with deferred():
        for module, name, value in buffers:
            module._buffers[name] = value
        for module, parameters in replaced:
            module.__dict__["_parameters"] = parameters
            recurrent(module)
        for module, unit in units.leaves():
            replace_method(module, Forward(module, weights, unit))
        # After the leaves, because an expert can be one.
        for module, forward in announced(model, weights, units.routed(), units.experts()):
            replace_method(module, forward)
        replace_method(model, Pass(model, weights))
        guard(model)
        model.__dict__["_tensorstream"] = streaming
        profile.save_at_end(model, streamer)
    return model


def plan_model(
    model: nn.Module, config: Config, checkpoint: _native.Checkpoint
) -> tuple[int, dict[str, Any], list[Divided]] | None:
    """Plans the streaming of a model that is not offloaded. Does not change it.

    Returns:
        The budget in bytes, the plan of the native module, and the parameters that are divided.
        ``None`` if tensors would have to be converted first.
    """
    if derived_of(model):
        return None
    settings, budget = config.settings(), config.working_bytes()
    units, _ = _divided(model, checkpoint, {}, {}, settings, config.exact, lambda *_: budget)
    # A smaller budget may divide more parameters than this one.
    every = _UnitBuilder(model, checkpoint, {}, {}, Rows.ALL, config.exact)
    smallest, _ = _native.requirement(
        checkpoint,
        every.specs,
        together=every.leased_together(),
        settings=settings,
        tables=every.tables,
    )
    planned = _native.plan(
        checkpoint,
        budget=budget,
        settings=settings,
        units=units.specs,
        together=units.leased_together(),
        tables=units.tables,
        smallest=smallest,
    )
    return budget, planned, units.divided


def _divided(
    model: nn.Module,
    checkpoint: _native.Checkpoint,
    converted: dict[int, Source],
    orders: DimensionOrders,
    settings: Settings,
    exact: bool,
    fitted: Callable[[int, int], int],
) -> tuple[_UnitBuilder, int]:
    """Divides no more parameters than the budget requires. Returns the units and the budget.

    Args:
        model: The model.
        checkpoint: The checkpoint with the weights.
        converted: The sources of parameters that had to be computed, by ``id``.
        orders: The stored orders of dimensions, by name, of parameters that are not contiguous.
        settings: The settings of the engine.
        exact: Whether products with parts of a parameter must round like those with all of it.
        fitted: Returns the budget. Its arguments are the smallest budget that works, and the
            budget that keeps all units in memory.
    """

    def build(rows: Rows) -> tuple[_UnitBuilder, int, int]:
        units = _UnitBuilder(model, checkpoint, converted, orders, rows, exact)
        together, tables = units.leased_together(), units.tables
        sizes = _native.requirement(
            checkpoint, units.specs, together=together, settings=settings, tables=tables
        )
        return units, *sizes

    units, smallest, whole = build(Rows.NONE)
    by_rows, least, _ = build(Rows.EMBEDDINGS)
    try:
        budget = fitted(min(smallest, least), whole)
    except BudgetError:
        budget = 0  # too little memory is available, unless more parameters are divided
    if budget < min(smallest, least):
        # Checking that products are exact takes time, so a model is loaded without it if possible.
        by_rows, least, _ = build(Rows.ALL)
        budget = fitted(min(smallest, least), whole)
    divides = len(by_rows.divided) > len(units.divided)
    # Lookups need buffers, so that a division can also raise the smallest budget.
    works = budget >= least or least <= smallest
    return (by_rows if divides and works and budget < whole else units), budget


def stats(model: nn.Module) -> Stats:
    """Returns the statistics of an offloaded model. Does not wait for I/O.

    Sizes are bytes, and times are seconds.

    Raises:
        ModelError: The model is not offloaded.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"weight": torch.eye(4), "bias": torch.zeros(4)}, "linear.ts")
        >>> model = ts.offload(torch.nn.Linear(4, 4), checkpoint="linear.ts", budget="64KiB")
        >>> with torch.inference_mode():
        ...     output = model(torch.ones(1, 4))
        >>> stats = ts.stats(model)
        >>> stats["passes"], stats["plan"]["streamed_bytes_per_pass"]
        (1, 0)
    """
    streaming = streaming_of(model)
    stats = streaming.weights.streamer.stats()
    stats["experts"] = [
        {
            "name": name,
            "units": len(own),
            "present": sum(unit["present"] for unit in own),
            "touched": sum(unit["touched"] for unit in own),
            "hits": sum(unit["hits"] for unit in own),
            "read_bytes": sum(unit["read_bytes"] for unit in own),
        }
        for name, numbers in streaming.expert_units.items()
        for own in [[stats["units"][number] for number in numbers]]
    ]
    stats["passed_over"] = [*streaming.passed_over, *stats["passed_over"]]
    return stats


def restore(model: M) -> M:
    """Undoes ``offload``: reads all weights into ordinary parameters. Blocks.

    Needs memory for all weights in addition to the budget. If it fails, the model is still
    offloaded.

    Raises:
        ModelError: The model is not offloaded, or a forward is running.
        ChecksumError: Data differs from its checksum.
        StorageError: Reading failed.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"weight": torch.eye(4), "bias": torch.zeros(4)}, "linear.ts")
        >>> model = ts.offload(torch.nn.Linear(4, 4), checkpoint="linear.ts", budget="64KiB")
        >>> model = ts.restore(model)
        >>> type(model.weight)
        <class 'torch.nn.parameter.Parameter'>
    """
    streaming = streaming_of(model)
    if streaming.weights.streamer.in_use():
        raise ModelError(
            "cannot restore the model while a forward runs: call restore(model) after the forward"
        )
    tensors = _read_all(streaming.checkpoint, streaming.sources, streaming.weights)
    parameters = {
        key: nn.Parameter(tensor.detach(), requires_grad=streaming.weights.requires_grad(key))
        for key, tensor in tensors.items()
    }
    streaming.profile.end()
    with deferred():
        del model.__dict__["_tensorstream"]
        for module in model.modules():
            restore_methods(module)
            own = module.__dict__["_parameters"]
            if isinstance(own, Parameters) and own.weights is streaming.weights:
                keys = {
                    name: stand_in.key
                    for name in own
                    if (stand_in := own.stand_in(name)) is not None
                }
                restored = {
                    name: parameters[keys[name]] if name in keys else dict.get(own, name)
                    for name in own
                }
                module.__dict__["_parameters"] = restored
                recurrent(module)
    return model


def _read_all(
    checkpoint: _native.Checkpoint, sources: dict[int, TensorSpec], weights: Weights
) -> dict[int, torch.Tensor]:
    """Reads all parameters into memory, which the result owns. Returns them by key.

    The address of each parameter modulo 64 is the phase in its ``TensorSpec``.
    """
    total = sum(part[2] + 2 * 4096 for tensor in sources.values() for part in tensor[3])
    units = [(tensor[0], [tensor], False) for tensor in sources.values()]
    specs = [
        replace(spec, unit=unit, index=0)
        if isinstance(spec := weights.specs[key], Weight)
        else Weight(
            spec.name,
            spec.dtype,
            spec.shape,
            unit,
            0,
            spec.requires_grad,
            spec.strides,
            list(spec.shape),
        )
        for unit, key in enumerate(sources)
    ]
    # A second engine reads the weights, with a budget for all of them. Their memory outlives this
    # engine.
    streamer = _native.Streamer(
        checkpoint,
        units,
        [spec.spec() for spec in specs],
        budget=2 * total + (16 << 20),
        together=[],
        weight_class=StreamedWeight,
    )
    in_pass = streamer.begin_pass()
    bar = _native.Progress("restoring", total)
    tensors: dict[int, torch.Tensor] = {}
    try:
        for unit, key in enumerate(sources):
            [tensors[key]] = streamer.take(unit)
            bar.advance(tensors[key].nbytes)
    finally:
        bar.close()
        in_pass.close()
    return tensors


class _UnitBuilder:
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
    ) -> None:
        self._checkpoint = checkpoint
        self._model = model
        self._exact = exact
        #: The parameters that are divided into blocks of rows, by ``id``.
        self._row_divided = row_divided(model, rows, exact=exact)
        #: The parameters whose slices are units, although a pass uses all of them, by ``id``.
        self._batch_divided = batch_divided(model, rows, exact=exact)
        #: The experts that are modules of a list.
        self._experts = expert_modules(model)
        self._in_expert = {id(each) for expert in self._experts for each in expert.modules()}
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
        self.specs: list[tuple[str, list[TensorSpec], bool]] = []
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
                id(module.weight)
                for module in model.modules()
                if isinstance(module, kind) and isinstance(module.weight, torch.Tensor)
            }
            for kind in ((nn.Embedding, nn.EmbeddingBag), nn.Linear)
        )
        self._buffers = [
            (module, f"{prefix}.{name}".lstrip("."), name, buffer)
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and (isinstance(buffer, SymbolicTensor) or buffer.is_meta)
        ]
        for prefix, module in model.named_modules():
            self._add_module(prefix, module)
        self.modules = [
            (module, {name: self._final(key) for name, key in keys.items()})
            for module, keys in self.modules
        ]
        self.sources = {self._final(key): spec for key, spec in self.sources.items()}

    def _final(self, key: int) -> int:
        """Returns the final key of a weight."""
        return key if key >= 0 else len(self.weights) - 1 - key

    def _add_module(self, prefix: str, module: nn.Module) -> None:
        keys: dict[str, int] = {}
        specs: list[TensorSpec] = []
        divided: list[tuple[int, nn.Parameter]] = []
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            key = self._keys.get(id(parameter))
            if key is None:
                source = self._source(parameter)
                order = self._orders.get(source.name)
                divides = is_divided(module, parameter) or id(parameter) in (
                    self._row_divided | self._batch_divided
                )
                is_whole = order is not None or not divides
                shape = [parameter.shape[dim] for dim in order] if order else list(parameter.shape)
                dtype = SAFETENSORS_DTYPES[parameter.dtype]
                spec = (source.name, dtype, shape, list(source.parts), source.phase)
                if is_whole:
                    key = len(self.weights)
                    self.weights.append(self._weight(parameter, spec, len(specs)))
                    specs.append(spec)
                else:
                    key = -1 - len(divided) - len(self.divided)
                    divided.append((key, parameter))
                self._keys[id(parameter)] = key
                self.sources[key] = spec
            keys[name] = key
        if specs:
            routed = id(module) in self._in_expert
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
            blocks = tuple(block_counts(shape[0], block_rows(parameter)))
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
            phase is not None
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
            below = any(id(child) in owners for child in module.modules() if child is not module)
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
            owned = (self._units(keys.get(id(each), {})) for each in expert.modules())
            units = {unit: None for own in owned for unit in sorted(own) if self.specs[unit][2]}
            if units:
                yield expert, list(units)

    def expert_units(self) -> dict[str, list[int]]:
        """Returns the routed units of each module that contains experts, by name of the module."""
        names = {id(module): name for name, module in self._model.named_modules()}
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
            set().union(*(units.get(id(each), set()) for each in module.modules()))
            for module in self._model.modules()
            if isinstance(module, FUSED)
        ]
        return [sorted(each) for each in sets if len(each) > 1]

    def read_buffers(self) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Reads the buffers that are not in memory from the checkpoint."""
        return [
            (module, name, self._read_buffer(module, qualified, buffer))
            for module, qualified, name, buffer in self._buffers
        ]

    def _read_buffer(self, module: nn.Module, qualified: str, buffer: torch.Tensor) -> torch.Tensor:
        if isinstance(buffer, SymbolicTensor):
            return buffer.materialize()
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
            path = self._checkpoint.files()[parts[0][0]][0] if parts else "the checkpoint"
            at = f" at byte {parts[0][1]}" if parts else ""
            raise CheckpointError(
                f"{path}: tensor `{name}`{at} is {dtype} {shape}, but the model has "
                f"{SAFETENSORS_DTYPES.get(tensor.dtype, tensor.dtype)} {wanted}"
            )
        phase = None if tensor.is_meta else tensor.data_ptr() % 64
        return Source(name, tuple(parts), phase)


def _refuse_torchscript(name: str, module: nn.Module) -> None:
    """Refuses TorchScript modules, because their compiled forward cannot be replaced."""
    if isinstance(module, torch.jit.ScriptModule):
        what = f"module `{name}`" if name else "the model"
        raise ModelError(
            f"cannot stream {what}: TorchScript ({type(module).__name__}) is not supported; "
            "offload the Python module instead"
        )


def _qualified_names(model: nn.Module) -> dict[int, list[str]]:
    """Returns the names of each distinct parameter by ``id``. Tied parameters have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names
