# SPDX-License-Identifier: MIT OR Apache-2.0
"""Writes weights to ``.ts`` files if no checkpoint contains them.

These are the weights of a live model, and computed weights. The name of a file identifies its
content, so the same weights are written once and then reused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import _native
from ..config import Config, invalid
from ..errors import (
    BudgetError,
    CheckpointPermissionError,
    ConfigurationError,
    ModelError,
    StorageError,
)
from ..files._capsules import NewTensor, as_capsule, dtype_name, write_all
from . import _tree as tree
from ._aliases import places
from ._builder import Builder
from ._division import (
    FUSED,
    Rows,
    batch_divided,
    block_counts,
    is_divided,
    is_splittable,
    row_divided,
    slice_bytes,
)
from ._symbolic_tensor import Derived, Source, SymbolicTensor

#: The granularity of memory slots, in bytes.
BLOCK = 4096
#: The dimensions of each parameter, from the largest stride to the smallest, by name.
DimensionOrders = dict[str, tuple[int, ...]]


def store_live(
    model: nn.Module, config: Config, kept: frozenset[int]
) -> tuple[_native.Checkpoint, DimensionOrders]:
    """Writes the weights of a model to ``config.storage_path`` and opens the file.

    Leaves out the parameters whose ``id`` is in ``kept``.

    Reuses the file if it exists. The file name is a fingerprint of names, dtypes, shapes and bytes,
    so several models and processes can share a directory.

    A parameter that is not contiguous, such as one of a channels-last model, is written in its
    memory order.

    Returns:
        The checkpoint, and the order of the dimensions of each parameter that is not contiguous.
    """
    places(model, kept)  # refuses what shares memory with a buffer
    parameters = dict(_distinct(model, kept))
    orders = {name: memory_order(p) for name, p in parameters.items() if not p.is_contiguous()}
    stored = {
        name: p.detach().permute(orders[name]) if name in orders else p
        for name, p in parameters.items()
    }
    _check_budget(model, config, kept)
    directory = _directory(Path(config.storage_path or ""))
    fingerprint = _native.Fingerprint()
    specs: list[NewTensor] = []
    for name, tensor in stored.items():
        dtype = dtype_name(name, tensor)
        fingerprint.add(name, dtype, list(tensor.shape), as_capsule(tensor))
        specs.append((name, dtype, list(tensor.shape), tensor.data_ptr() % 64))
    path = directory / f"{fingerprint.hex()}{_suffix(config)}"
    how = config.codec(), config.level()
    writer = _native.FileWriter.unless_written(
        path, specs, {"format": "pt"}, fingerprint.hex(), *how
    )
    if writer is not None:
        write_all(
            writer,
            stored.values(),
            sum(tensor.nbytes for tensor in stored.values()),
            f"writing {path.name}",
        )
    return _native.Checkpoint(path), orders


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the dimensions of a tensor, from the largest stride to the smallest."""
    return tuple(
        sorted(
            range(tensor.dim()),
            key=lambda dim: (tensor.stride(dim), tensor.shape[dim]),
            reverse=True,
        )
    )


def store_derived(
    wanted: dict[str, SymbolicTensor],
    checkpoint: _native.Checkpoint,
    config: Config,
    budget_bytes: int,
) -> _native.Checkpoint:
    """Computes tensors one at a time and writes them to a file, unless the file exists.

    Args:
        wanted: The tensors, by their names in the model.
        checkpoint: The tensors from which they are computed.
        config: The directory and the compression of the file.
        budget_bytes: The most memory to use.

    Returns:
        The checkpoint, with the computed tensors added.

    Raises:
        BudgetError: The file does not exist, and a tensor needs more memory than ``budget_bytes``.
        ModelError: A tensor is not contiguous.
    """
    builder = Builder(checkpoint, budget_bytes)
    specs: list[NewTensor] = []
    for name, tensor in wanted.items():
        if not tensor.is_contiguous():
            raise ModelError(
                f"cannot stream parameter `{name}`: it is not contiguous after loading"
            )
        specs.append((name, dtype_name(name, tensor), list(tensor.shape), tensor.source.phase))
    directory = _directory(config.conversion_directory())
    path = directory / f"converted-{_key(wanted, checkpoint)}{_suffix(config)}"
    how = config.codec(), config.level()
    writer = _native.FileWriter.unless_written(path, specs, {"format": "pt"}, None, *how)
    if writer is not None:
        needed, largest = max((builder.needed_bytes(own), name) for name, own in wanted.items())
        if needed > budget_bytes:
            # The traceback of the error would keep the writer, for which other writers wait.
            del writer
            raise BudgetError(
                f"a budget of {budget_bytes} bytes is too small: converting `{largest}` needs "
                f"{needed} bytes; the smallest budget that works is {needed} bytes or more",
                needed,
            )
        total = sum(tensor.nbytes for tensor in wanted.values())
        # What is reported must not fail because standard error is closed or full.
        with contextlib.suppress(OSError, ValueError):
            print(
                f"tensorstream: converting {len(wanted)} tensors ({total / 2**20:.1f} MiB) to "
                f"{path}; later runs reuse the file",
                file=sys.stderr,
                flush=True,
            )
        write_all(writer, _pieces(wanted, builder), total, "converting")
    _native.note_made(path)
    return checkpoint.overlaid(_native.Checkpoint(path))


def _suffix(config: Config) -> str:
    """Returns the suffix of file names, which depends on the compression."""
    if config.codec() == "raw":
        return ".ts"
    return f"-{config.codec()}{config.level() or ''}.ts"


def _pieces(wanted: dict[str, SymbolicTensor], builder: Builder) -> Iterator[torch.Tensor]:
    for tensor in wanted.values():
        yield from builder.pieces(tensor)


def _distinct(model: nn.Module, kept: frozenset[int]) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in tree.named_parameters(model):
        if id(parameter) in kept:
            continue
        if type(parameter) is not nn.Parameter or parameter.device.type != "cpu":
            raise ModelError(
                f"cannot stream parameter `{name}`: expected an nn.Parameter on the CPU, got "
                f"{type(parameter).__name__} on {parameter.device}"
            )
        if not parameter.detach().permute(memory_order(parameter)).is_contiguous():
            raise ModelError(
                f"cannot stream parameter `{name}`: its memory has gaps or overlaps (strides "
                f"{list(parameter.stride())}); make it contiguous"
            )
        yield name, parameter


def _check_budget(model: nn.Module, config: Config, kept: frozenset[int]) -> None:
    """Refuses a budget that is too small, before the weights are written."""
    sizes: dict[str, list[int]] = {}
    in_rows = row_divided(model, Rows.ALL, exact=config.exact, device=config.torch_device())
    in_batches = batch_divided(model, Rows.ALL, exact=config.exact, device=config.torch_device())
    # `named_parameters` yields a shared parameter only once, for the first module that has it.
    for name, parameter in _distinct(model, kept):
        prefix = name.rpartition(".")[0]
        if is_divided(model.get_submodule(prefix), parameter) or id(parameter) in in_batches:
            sizes[name] = [slice_bytes(parameter)]
        elif id(parameter) in in_rows:
            counts = block_counts(parameter.shape[0], in_rows[id(parameter)])
            sizes[name] = [max(counts) * slice_bytes(parameter)]
        elif is_splittable(model.get_submodule(prefix)):
            sizes[name] = [parameter.nbytes]
        else:
            sizes.setdefault(prefix or type(model).__name__, []).append(parameter.nbytes)
    names = list(sizes)
    together = [
        [i for i, unit in enumerate(names) if f"{unit}.".startswith(f"{prefix}." if prefix else "")]
        for prefix, module in tree.named_modules(model)
        if isinstance(module, FUSED)
    ]

    def smallest(bytes_of: Callable[[list[int]], int]) -> int:
        units = [bytes_of(each) for each in sizes.values()]
        return _native.smallest_budget(units, together, config.max_passes)

    budget = config.requested_bytes()
    held = sum(each.nbytes for each in tree.persistent_buffers(model))
    if budget is not None and smallest(sum) + held > budget:
        largest = max(sizes, key=lambda name: sum(sizes[name]))
        # An upper bound: the exact size depends on the offsets of the tensors in the file.
        enough = smallest(lambda unit: (sum(unit) + 64 * len(unit) + 3 * BLOCK) // BLOCK * BLOCK)
        raise BudgetError(
            f"a budget of {budget} bytes is too small: the largest unit is `{largest}` with "
            f"{sum(sizes[largest])} bytes"
            + (f", and buffers take {held} bytes" if held else "")
            + f"; the smallest budget that works is at most {enough + held} bytes",
            enough + held,
        )


def _directory(path: Path) -> Path:
    """Creates a directory if necessary, and returns it.

    Removes what processes that were killed have left there.

    Raises:
        ConfigurationError: The path is not a directory.
        CheckpointPermissionError: The process has no permission to create the directory.
        StorageError: The directory cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        _native.remove_unfinished(path)
    except FileExistsError as error:
        raise invalid("storage_path", str(path), "a directory") from error
    except PermissionError as error:
        raise CheckpointPermissionError(
            f"{path}: cannot create the directory: {error.strerror}"
        ) from error
    except OSError as error:
        raise StorageError(f"{path}: cannot create the directory: {error.strerror}") from error
    return path


def _key(wanted: dict[str, SymbolicTensor], checkpoint: _native.Checkpoint) -> str:
    """Returns a key of computed tensors.

    It depends on the source files, the tensors, the operations and the version of PyTorch.
    """
    key = hashlib.blake2b(digest_size=16)
    for index, (path, _, _) in enumerate(checkpoint.files()):
        version = checkpoint.version(index)
        if version is None:
            raise ConfigurationError(
                f"cannot convert tensors of {path}: its server does not report when the file "
                "changes; download it with `tensorstream fetch`, or load it without conversion"
            )
        key.update(repr((os.fspath(path), version)).encode())
    key.update(torch.__version__.encode())
    for name, tensor in wanted.items():
        key.update(repr((name, tensor.dtype, tuple(tensor.shape), _described(tensor))).encode())
    return key.hexdigest()


def _described(value: Any) -> Any:
    """Returns a description of a value. Equal values have equal descriptions in every process."""
    if isinstance(value, SymbolicTensor):
        source = value.source
        if isinstance(source, Source):
            return (source.parts, value.dtype, tuple(value.shape), value.stride())
        called = (
            source.func
            if isinstance(source.func, torch._ops.OpOverload)
            else source.func.__qualname__
        )
        return (str(called), _described(source.args), _described(source.kwargs), source.index)
    if isinstance(value, torch.Tensor):
        content = _native.Fingerprint()
        content.add("-", dtype_name("-", value), list(value.shape), as_capsule(value.contiguous()))
        return content.hex()
    if isinstance(value, list | tuple):
        return [_described(each) for each in value]
    if isinstance(value, dict):
        return [(key, _described(each)) for key, each in sorted(value.items())]
    return repr(value)


def derived_of(
    model: nn.Module, loaded: Mapping[int, SymbolicTensor] | None = None
) -> dict[str, tuple[int, SymbolicTensor]]:
    """Returns the distinct parameters of a model that have to be computed, by name.

    Args:
        model: The model.
        loaded: What parameters become, by ``id``.

    Returns:
        The ``id`` of each parameter, and its value.
    """
    values = {} if loaded is None else loaded
    found = {
        name: (id(parameter), values.get(id(parameter), parameter))
        for name, parameter in tree.named_parameters(model)
    }
    return {
        name: (key, value)
        for name, (key, value) in found.items()
        if isinstance(value, SymbolicTensor) and isinstance(value.source, Derived)
    }
