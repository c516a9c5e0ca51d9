# SPDX-License-Identifier: MIT OR Apache-2.0
"""Weights that lie in no checkpoint yet: a live model's, and what has to be computed. Both are
written once, as ``.ts``, under a name that says what they are; whoever needs the same finds them
there."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import _native
from ..config import Config, invalid
from ..errors import BudgetError, CheckpointPermissionError, ModelError, StorageError
from ..files._capsules import NewTensor, dtype_name, lent, write_all
from ._builder import Builder
from ._symbolic_tensor import Derived, Source, SymbolicTensor

#: Modules that hand the weights of all modules below them to one operation.
FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
#: What memory is given out in, in bytes.
BLOCK = 4096
#: By a parameter's name: its dimensions from the widest stride to the narrowest.
Orders = dict[str, tuple[int, ...]]


def store_live(model: nn.Module, config: Config) -> tuple[_native.Checkpoint, Orders]:
    """Writes a model's own weights to ``config.storage_path``, unless they are there, and opens the
    file.

    A parameter that is not contiguous, as those of a channels-last model, is written as it lies in
    memory: with its dimensions in another order, which is returned.

    The name is a fingerprint of names, dtypes, shapes and bytes, so a directory can hold many
    models, and several processes can share one.
    """
    parameters = dict(_distinct(model))
    orders = {name: memory_order(p) for name, p in parameters.items() if not p.is_contiguous()}
    stored = {
        name: p.detach().permute(orders[name]) if name in orders else p
        for name, p in parameters.items()
    }
    _refuse_what_never_fits(model, config)
    directory = _directory(Path(config.storage_path or ""))
    fingerprint = _native.Fingerprint()
    specs: list[NewTensor] = []
    for name, tensor in stored.items():
        dtype = dtype_name(name, tensor)
        fingerprint.add(name, dtype, list(tensor.shape), lent(tensor))
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
    """The dimensions of a tensor from the widest stride to the narrowest."""
    return tuple(
        sorted(
            range(tensor.dim()),
            key=lambda dim: (tensor.stride(dim), tensor.shape[dim]),
            reverse=True,
        )
    )


def store_derived(
    wanted: dict[str, SymbolicTensor], builder: Builder, config: Config, budget_bytes: int
) -> _native.Checkpoint:
    """Computes tensors of a model, by the model's names, and writes them to a file of their own,
    unless they are there. The result is the builder's checkpoint with them in it.

    Takes at most ``budget_bytes`` of memory, one tensor after the other.
    """
    specs: list[NewTensor] = []
    for name, tensor in wanted.items():
        if not tensor.is_contiguous():
            raise ModelError(
                f"parameter `{name}` is not contiguous after loading: it cannot be streamed"
            )
        needed = builder.needed_bytes(tensor)
        if needed > budget_bytes:
            raise BudgetError(
                f"a budget of {budget_bytes} bytes is too small: `{name}` has to be computed from "
                f"the checkpoint, which needs {needed} bytes; the smallest budget that works is "
                f"{needed} bytes or more"
            )
        specs.append((name, dtype_name(name, tensor), list(tensor.shape), tensor.source.phase))
    directory = _directory(config.conversion_directory())
    path = directory / f"converted-{_key(wanted, builder)}{_suffix(config)}"
    how = config.codec(), config.level()
    writer = _native.FileWriter.unless_written(path, specs, {"format": "pt"}, None, *how)
    if writer is not None:
        total = sum(tensor.nbytes for tensor in wanted.values())
        print(
            f"tensorstream: converting {len(wanted)} tensors ({total / 2**20:.1f} MiB) once, into "
            f"{path}",
            file=sys.stderr,
        )
        write_all(writer, _pieces(wanted, builder, budget_bytes), total, "converting")
    return builder.checkpoint.overlaid(_native.Checkpoint(path))


def _suffix(config: Config) -> str:
    """Of a file's name: one that is compressed in another way is another file."""
    if config.codec() == "raw":
        return ".ts"
    return f"-{config.codec()}{config.level() or ''}.ts"


def _pieces(
    wanted: dict[str, SymbolicTensor], builder: Builder, budget_bytes: int
) -> Iterator[torch.Tensor]:
    for tensor in wanted.values():
        yield from builder.pieces(tensor, budget_bytes)


def _distinct(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter or parameter.device.type != "cpu":
            raise ModelError(
                f"parameter `{name}` is a {type(parameter).__name__} on {parameter.device}: only "
                "plain parameters on the CPU can be streamed"
            )
        if not parameter.detach().permute(memory_order(parameter)).is_contiguous():
            raise ModelError(
                f"parameter `{name}` lies scattered in memory (strides "
                f"{list(parameter.stride())}): make it contiguous"
            )
        yield name, parameter


def _refuse_what_never_fits(model: nn.Module, config: Config) -> None:
    """Says so before the weights are written and not after."""
    sizes: dict[str, list[int]] = {}
    for (
        name,
        parameter,
    ) in model.named_parameters():  # each once, under the module that has it first
        sizes.setdefault(name.rpartition(".")[0] or type(model).__name__, []).append(
            parameter.nbytes
        )
    names = list(sizes)
    together = [
        [i for i, unit in enumerate(names) if f"{unit}.".startswith(f"{prefix}." if prefix else "")]
        for prefix, module in model.named_modules()
        if isinstance(module, FUSED)
    ]

    def smallest(bytes_of: Callable[[list[int]], int]) -> int:
        units = [bytes_of(each) for each in sizes.values()]
        return _native.smallest_budget(units, together, config.max_passes)

    budget = config.asked_bytes()
    if budget is not None and smallest(sum) > budget:
        largest = max(sizes, key=lambda name: sum(sizes[name]))
        # Where the tensors will lie in the file is not settled: as much as they can take in memory.
        enough = smallest(lambda unit: (sum(unit) + 64 * len(unit) + 3 * BLOCK) // BLOCK * BLOCK)
        raise BudgetError(
            f"a budget of {budget} bytes is too small: the largest unit is `{largest}` with "
            f"{sum(sizes[largest])} bytes; the smallest budget that works is at most {enough} bytes"
        )


def _directory(path: Path) -> Path:
    """The directory, made if it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise invalid("storage_path", str(path), "a directory, to write weights to") from error
    except PermissionError as error:
        raise CheckpointPermissionError(
            f"{path}: cannot make the directory: {error.strerror}"
        ) from error
    except OSError as error:
        raise StorageError(f"{path}: cannot make the directory: {error.strerror}") from error
    return path


def _key(wanted: dict[str, SymbolicTensor], builder: Builder) -> str:
    """Names what is computed: from which state of which files, and how."""
    key = hashlib.blake2b(digest_size=16)
    for path, _, _ in builder.checkpoint.files():
        stat = os.stat(path)
        state = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        key.update(repr((os.fspath(path), state)).encode())
    key.update(torch.__version__.encode())
    for name, tensor in wanted.items():
        key.update(repr((name, tensor.dtype, tuple(tensor.shape), _described(tensor))).encode())
    return key.hexdigest()


def _described(value: Any) -> Any:
    """An origin without the objects in it, equal for equal ones."""
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
        content.add("-", dtype_name("-", value), list(value.shape), lent(value.contiguous()))
        return content.hex()
    if isinstance(value, list | tuple):
        return [_described(each) for each in value]
    if isinstance(value, dict):
        return [(key, _described(each)) for key, each in sorted(value.items())]
    return repr(value)


def derived_of(model: nn.Module) -> dict[str, SymbolicTensor]:
    """A model's distinct parameters whose bytes lie in no file."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if isinstance(parameter, SymbolicTensor) and isinstance(parameter.source, Derived)
    }
