# SPDX-License-Identifier: MIT OR Apache-2.0
"""Directories of merged models: they appear when they are complete, and can be resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .. import _native
from ..errors import CheckpointError, ModelError, StorageError
from ..files._capsules import as_capsule, dtype_name
from ._saving import pieces_of, specs_of
from ._symbolic_tensor import SymbolicTensor

if sys.platform != "win32":
    import fcntl

#: Bytes of complete tensors after which they are made durable.
CHECKPOINT_BYTES = 256 << 20
#: The file that says what a directory is being written from, and that its writer locks.
_JOURNAL = "merge.unfinished"
#: The largest file beside the weights that is copied.
_MAX_SMALL = 256 << 20
#: Suffixes of files that contain weights.
_WEIGHTS = (".safetensors", ".ts", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")


def digest(described: Any, tensors: Iterable[torch.Tensor]) -> str:
    """Returns a digest of a description and of the values of tensors in memory."""
    content = _native.Fingerprint()
    for number, tensor in enumerate(tensors):
        own = tensor.detach().cpu().contiguous()
        name = str(number)
        content.add(name, dtype_name(name, own), list(own.shape), as_capsule(own))
    key = hashlib.blake2b(repr(described).encode(), digest_size=16)
    key.update(content.hex().encode())
    return key.hexdigest()


class MergedDirectory:
    """A directory that is being written, as ``OUT.partial`` until it is complete.

    A context, which only one process at a time can enter.

    Args:
        out: The directory.
        origin: Text that identifies the content. An unfinished directory with another one is
            emptied.
    """

    def __init__(self, out: Path, origin: str) -> None:
        self._out = out
        self._origin = origin
        #: Where the files are until all are complete.
        self.path = out.with_name(f"{out.name}.partial")
        self._lock: int | None = None

    def __enter__(self) -> MergedDirectory:
        self._require_free()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _JOURNAL, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its writer may have finished after this process opened the file.
                if not os.path.samestat(os.fstat(self._lock), os.stat(self.path / _JOURNAL)):
                    raise BlockingIOError
            except (BlockingIOError, FileNotFoundError):
                raise StorageError(
                    f"cannot merge into {self._out}: another process is writing it; wait for it, "
                    "or choose another directory"
                ) from None
            if os.pread(self._lock, 64, 0) != self._origin.encode():
                self._start()
        except StorageError:
            self._unlock()
            raise
        except OSError as error:
            self._unlock()
            raise self._failed(error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _require_free(self) -> None:
        if self._out.is_dir() and not any(self._out.iterdir()):
            return
        if os.path.lexists(self._out):
            raise StorageError(
                f"cannot merge into {self._out}: it exists already, and is not an empty directory; "
                "remove it, or choose another directory"
            )

    def _start(self) -> None:
        """Removes what belongs to another merge, and begins the journal."""
        assert self._lock is not None
        for entry in self.path.iterdir():
            if entry.name == _JOURNAL:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        _sync_directory(self.path)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, self._origin.encode(), 0)
        os.fsync(self._lock)

    def write(
        self,
        tensors: Mapping[str, torch.Tensor],
        filename: str | os.PathLike[str],
        metadata: Mapping[str, str],
    ) -> None:
        """Writes a file, unless it is complete. Continues after the tensors that are complete."""
        path = Path(filename)
        specs, values = specs_of(tensors), list(tensors.values())
        if _is_complete(path, specs):
            return
        writer = _native.FileWriter.resume(path, specs, dict(metadata), self._origin)
        rest = [values[index] for index in writer.order()[writer.complete() :]]
        bar = _native.Progress(f"merging {path.name}", sum(each.nbytes for each in values))
        bar.advance(sum(each.nbytes for each in values) - sum(each.nbytes for each in rest))
        pending = 0
        try:
            for tensor in rest:
                if pending >= CHECKPOINT_BYTES:
                    writer.checkpoint(self._origin)
                    pending = 0
                for piece in pieces_of(tensor):
                    writer.write(as_capsule(piece.detach().cpu().contiguous()))
                    bar.advance(piece.nbytes)
                pending += tensor.nbytes
            writer.commit()
        except BaseException:
            # Only the first error is reported.
            with contextlib.suppress(Exception):
                if pending:
                    writer.checkpoint(self._origin)
            raise
        finally:
            bar.close()
            writer.abandon()

    def write_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], checkpoint: _native.Checkpoint
    ) -> None:
        """Writes a state dict to files that are named like those of the checkpoint, if possible.

        Names of the same tensor are written once, and the metadata of the file has the others, as
        that of ``safetensors.torch.save_model`` does.
        """
        files = checkpoint.files()
        stored = {name: _files_of(checkpoint, name) for name in checkpoint.names()}
        tensors: dict[str, torch.Tensor] = {}
        metadata = {"format": "pt"}
        for names in _names_by_tensor(state_dict):
            own = [name for name in names if name in stored] or names[:1]
            tensors.update({name: state_dict[name].contiguous() for name in own})
            metadata.update({name: own[0] for name in names if name not in own})
        shards: dict[str, dict[str, torch.Tensor]] = {}
        base_names = [os.path.basename(os.fspath(path)) for path, _, _ in files]
        for name, tensor in tensors.items():
            places = stored.get(name, ())
            shard = base_names[places[0]] if len(places) == 1 and len(files) > 1 else ""
            shards.setdefault(shard, {})[name] = tensor
        if len(set(base_names)) < len(base_names) or "" in shards:
            suffix = os.path.splitext(base_names[0])[1]
            suffix = suffix if suffix in (".ts", ".safetensors") else ".safetensors"
            shards = {f"model{suffix}": tensors}
        for shard, own_tensors in shards.items():
            self.write(own_tensors, self.path / shard, metadata)
        if len(shards) > 1:
            total = sum(tensor.nbytes for tensor in tensors.values())
            weight_map = {name: shard for shard, own in shards.items() for name in own}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    def copy_small_files(self, checkpoint: _native.Checkpoint) -> None:
        """Copies the files beside the weights of a model, such as those of its tokenizer."""
        directories = {
            Path(path).parent
            for index, (path, _, _) in enumerate(checkpoint.files())
            if not checkpoint.is_remote(index)
        }
        try:
            for directory in directories:
                if not any(directory.glob("*config.json")):
                    continue
                for entry in sorted(directory.iterdir()):
                    target = self.path / entry.name
                    weights = entry.name.endswith(_WEIGHTS) or ".index.json" in entry.name
                    if weights or target.exists() or not entry.is_file():
                        continue
                    if entry.stat().st_size <= _MAX_SMALL:
                        shutil.copyfile(entry, target)
        except OSError as error:
            raise self._failed(error) from error

    def finish(self) -> None:
        """Makes everything durable, and gives the directory its name."""
        try:
            for parent, _, names in os.walk(self.path):
                for name in names:
                    with open(os.path.join(parent, name), "rb") as file:
                        os.fsync(file.fileno())
                _sync_directory(Path(parent))
            self._require_free()
            self.path.rename(self._out)
            _sync_directory(self._out.parent)
            (self._out / _JOURNAL).unlink()
            _sync_directory(self._out)
        except StorageError:
            raise
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(f"cannot merge into {self._out}: {error}")


def _is_complete(path: Path, specs: list[Any]) -> bool:
    """Returns whether a file of an unfinished directory is complete.

    Files get their names when they are complete, and the journal of the directory says that they
    belong to the same merge.
    """
    try:
        file = _native.Checkpoint(path)
    except (CheckpointError, OSError):
        return False
    found = {name: file.entry(name)[:2] for name in file.names()}
    return found == {name: (dtype, shape) for name, dtype, shape, _ in specs}


def _files_of(checkpoint: _native.Checkpoint, name: str) -> tuple[int, ...]:
    return tuple({part[0] for part in checkpoint.entry(name)[2]})


def _names_by_tensor(state_dict: Mapping[str, torch.Tensor]) -> Iterable[list[str]]:
    """Returns the names of each tensor. Tensors that are views of the same memory are the same."""
    names: dict[Any, list[str]] = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(
                f"cannot save `{name}` of the state dict: expected a tensor, got "
                f"{type(tensor).__name__}"
            )
        own: Any = tensor.untyped_storage()
        storage = id(own) if isinstance(tensor, SymbolicTensor) else own.data_ptr()
        geometry = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = (storage, geometry) if tensor.numel() else (name,)
        names.setdefault(key, []).append(name)
    return names.values()


def _sync_directory(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
