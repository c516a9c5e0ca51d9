# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loads checkpoints that are on a machine, or that the machine can reach, into its tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch

from ... import _native
from ...errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    MissingTensorError,
)
from .. import _registry
from .._answers import answered
from . import _server_operators as _operators

Path = str | os.PathLike[str]

#: The size of the tensors that are loaded with one request, in bytes: on a CPU, and on an
#: accelerator, where a request needs as much host memory.
_ON_CPU, _ON_ACCELERATOR = 4 << 30, 256 << 20


class OfMachine(dict[str, torch.Tensor]):
    """A state dict that moves the module that loads it to the machine of its tensors."""


class RemoteCheckpoint:
    """A checkpoint that a machine has open. A context manager. The constructor blocks.

    Args:
        source: See ``load_state_dict``.
        device: A device of the machine.
        lenient: Whether to accept files that only the safetensors library accepts.

    Raises:
        CheckpointNotFoundError: The machine has no such file.
        CheckpointPermissionError: Clients of the machine may not read it.
        CheckpointError: The checkpoint is damaged.
        StorageError: Reading, or downloading from the Hub, failed.
        ConnectionLost: The machine cannot be reached.
    """

    def __init__(self, source: Path, device: torch.device, *, lenient: bool = False) -> None:
        self._anchor = _operators.anchor(_registry.index_of(device))
        self._source = source_on(source, self._anchor.device.index)
        text = _operators.OPEN_CHECKPOINT(self._anchor, self._source, lenient)
        answer = _answered(text, self._anchor.device, self._source)
        self._number: int = answer["number"]
        #: The safetensors name of the dtype, the shape, and the size in bytes of each tensor, in
        #: the order of the files.
        self.tensors: dict[str, tuple[str, list[int], int]] = {
            name: (dtype, shape, size) for name, dtype, shape, size in answer["tensors"]
        }
        self._streams: bool = answer["streams"]

    def load(
        self, names: Iterable[str] | None = None, *, verify: bool = True
    ) -> dict[str, torch.Tensor]:
        """Reads tensors on the machine. Blocks; shows a progress bar on a terminal.

        Args:
            names: Their names. By default all tensors are read.
            verify: Whether to verify checksums, if the files have any.

        Returns:
            The tensors by name, sorted.

        Raises:
            MissingTensorError: The checkpoint lacks one of the tensors.
            ChecksumError: Data differs from its checksum.
            StorageError: Reading failed.
            BudgetError: The machine streams weights, and the rest of its budget is too small.
            RemoteOutOfMemoryError: The machine has too little memory.
            ConnectionLost: The machine cannot be reached.
        """
        wanted = self.tensors.keys() if names is None else set(names)
        missing = sorted(wanted - self.tensors.keys())
        if missing:
            raise MissingTensorError(f"{self._source} has no tensor `{missing[0]}`")
        loaded: dict[str, torch.Tensor] = {}
        bar = _native.Progress("loading", sum(self.tensors[name][2] for name in wanted))
        try:
            for group in self._requests([name for name in self.tensors if name in wanted]):
                tensors, failure = _operators.LOAD_TENSORS(
                    self._anchor, self._number, group, verify
                )
                if failure:
                    _answered(failure, self._anchor.device, self._source)
                loaded.update(zip(group, tensors, strict=True))
                bar.advance(sum(self.tensors[name][2] for name in group))
        finally:
            bar.close()
        return {name: loaded[name] for name in sorted(loaded)}

    def _requests(self, names: list[str]) -> list[list[str]]:
        """Divides names into groups that are loaded with one request each."""
        if self._streams and names:
            return [names]  # nothing is read yet, and they share an engine
        is_on_cpu = _registry.runs_on_cpu(self._anchor.device.index)
        limit = _ON_CPU if is_on_cpu else _ON_ACCELERATOR
        groups: list[list[str]] = []
        size = limit
        for name in names:
            if size + self.tensors[name][2] > limit:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += self.tensors[name][2]
        return groups

    def close(self) -> None:
        """Makes the machine close the files. The tensors stay valid."""
        _operators.CLOSE_CHECKPOINT(self._anchor, self._number)

    def __enter__(self) -> RemoteCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def load_state_dict(
    source: Path,
    device: str | torch.device = "ts",
    *,
    names: Iterable[str] | None = None,
    verify: bool = True,
    lenient: bool = False,
) -> dict[str, torch.Tensor]:
    """Loads a checkpoint that is on a machine into tensors of the machine. Blocks.

    The machine reads the files, so no data passes through this process. Shows a progress bar on a
    terminal.

    Args:
        source: A file, a directory or a shard index of the machine; "hf://" with the name of a
            model on the Hugging Face Hub, which the machine downloads if necessary; or a URL as of
            ``load_file``, which the machine reads with its own credentials. Machines on this
            computer have its paths. Others look for relative paths in the directories that their
            clients may read, or in the home directory of their user.
        device: The device of the tensors.
        names: The names of the tensors. By default all tensors are loaded.
        verify: Whether to verify checksums, if the files have any.
        lenient: Whether to accept files that only the safetensors library accepts.

    Returns:
        The tensors by name, sorted.

    Raises:
        CheckpointNotFoundError: The machine has no such file.
        CheckpointPermissionError: Clients of the machine may not read it.
        CheckpointError: The checkpoint is damaged.
        MissingTensorError: The checkpoint lacks one of the tensors.
        ChecksumError: Data differs from its checksum.
        StorageError: Reading, or downloading from the Hub, failed.
        BudgetError: The machine streams weights, and the rest of its budget is too small.
        RemoteOutOfMemoryError: The machine has too little memory.
        ConnectionLost: The machine cannot be reached.

    Examples:
        >>> import tensorstream as ts, torch
        >>> from tensorstream.remote import RemoteMachine, load_state_dict
        >>> ts.save_file({"a": torch.arange(3)}, "a.safetensors")
        >>> with RemoteMachine.mock() as machine:
        ...     load_state_dict("a.safetensors", machine.device())["a"].tolist()
        [0, 1, 2]
    """
    with RemoteCheckpoint(source, torch.device(device), lenient=lenient) as checkpoint:
        return checkpoint.load(names, verify=verify)


def load_huggingface_state_dicts(
    repo: str, device: str | torch.device = "ts", *, revision: str | None = None
) -> dict[str, dict[str, torch.Tensor]]:
    """Loads all weights of a model on the Hugging Face Hub into tensors of a machine. Blocks.

    The machine downloads the files that are not in its cache. No weights pass through this process:
    ``Module.load_state_dict`` of a result moves the whole module to the machine, where the tensors
    become its parameters and buffers, in its dtypes. Names of tied parameters may be missing.

    Args:
        repo: The name of the model, such as "organisation/model", or the absolute path of a
            directory of the machine.
        device: The device of the tensors.
        revision: A branch, a tag or a commit of a model that is given by its name.

    Returns:
        The tensors by name, by the directory of their files in the repository. "" is the root.

    Raises:
        The errors of ``load_state_dict``.
    """
    device = torch.device(device)
    at = f"@{revision}" if revision else ""
    is_name = "://" not in repo and not os.path.isabs(repo)
    if revision and not is_name:
        raise ConfigurationError(f"invalid revision: {repo} is not a name; use hf://NAME@REVISION")
    source = f"hf://{repo}{at}" if is_name else repo
    anchor = _operators.anchor(_registry.index_of(device))
    answer = _answered(_operators.DIRECTORIES(anchor, source), anchor.device, source)
    if not answer["directories"]:
        raise CheckpointNotFoundError(f"{source} has no directory with a checkpoint")
    found: dict[str, dict[str, torch.Tensor]] = {}
    for directory in answer["directories"]:
        weights = f"{source}/{directory}" if directory else source
        found[directory] = OfMachine(load_state_dict(weights, device))
    return found


def read_text(source: Path, beside: str, device: torch.device) -> str:
    """Returns the content of a text file that is beside the weights of a source. Blocks.

    Raises:
        CheckpointNotFoundError: The machine has no such file.
        CheckpointPermissionError: Clients of the machine may not read it.
    """
    anchor = _operators.anchor(_registry.index_of(device))
    source = source_on(source, anchor.device.index)
    answer = _answered(_operators.READ_TEXT(anchor, source, beside), anchor.device, source)
    text: str = answer["text"]
    return text


def source_on(source: Path, index: int) -> str:
    """Returns a source as the machine of a device understands it."""
    text = os.fspath(source)
    first = _registry.ADDRESSES[index][0] if index in _registry.ADDRESSES else None
    return os.path.abspath(text) if first in _registry.SHARING_FILES and "://" not in text else text


def _answered(text: str, device: torch.device, source: str) -> dict[str, Any]:
    """Returns the answer of a machine about a source. See ``answered``."""
    try:
        return answered(text, device)
    except CheckpointNotFoundError as error:
        is_elsewhere = _registry.ADDRESSES[device.index][0] not in _registry.SHARING_FILES
        if not (is_elsewhere and os.path.exists(source)):
            raise
        raise CheckpointNotFoundError(
            f"{error}; this computer has it: load it here with load_file, and copy the tensors "
            f'with .to("{device}")'
        ) from None
