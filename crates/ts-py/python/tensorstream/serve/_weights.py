# SPDX-License-Identifier: MIT OR Apache-2.0
"""Opens checkpoints for sessions, which may neither open files nor connect sockets themselves.

Does not import PyTorch, because the main process of ``tensorstream serve`` does not either.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import _native
from ..errors import (
    CheckpointNotFoundError,
    CheckpointPermissionError,
    ConfigurationError,
    StorageError,
    TensorStreamError,
)
from ..files._hub import SCHEME, HubModel
from ..files._places import find, has_weights

#: A place that stands for all files that this user can read, and all models of the Hub.
ANY = "any"
#: The beginnings of URLs other than those of models of the Hub.
_URL_SCHEMES = ("s3://", "gs://", "az://", "http://", "https://", "ts://", "tss://")
#: The places of everything that this process can read.
EVERYTHING = (ANY, *_URL_SCHEMES)
#: What URLs cannot contain, because it could mean another path than that which is compared.
_UNCLEAR = re.compile(r"[\x00-\x1f\x7f\\%?#]|/\.{1,2}(/|$)")
#: What files of weights, and the files beside them, end in.
_SUFFIXES = (".safetensors", ".ts", ".json")
#: The longest name, in characters.
_MAX_NAME = 1024
#: The most requests to the Hub at a time, each of which may download a model.
_MAX_DOWNLOADS = 8
#: The most snapshots of models of the Hub whose shards can be opened.
_MAX_SNAPSHOTS = 1024


@dataclass(frozen=True)
class OpenFile:
    """A file that is open.

    Attributes:
        name: Its path.
        file: A descriptor for reads through the page cache, which the owner of this object closes.
        direct: A descriptor for direct reads and the alignment that they require, in bytes.
            ``None`` if the file does not support them.
    """

    name: str
    file: int
    direct: tuple[int, int] | None

    def close(self) -> None:
        """Closes the descriptors."""
        for descriptor in (self.file, *(self.direct or ())[:1]):
            os.close(descriptor)

    def passed(self) -> tuple[dict[str, Any], list[int]]:
        """Returns the message, and the descriptors to close, that pass the file to a session."""
        direct, alignment = self.direct or (None, 0)
        answer = {"name": self.name, "alignment": alignment}
        return answer, [self.file] if direct is None else [self.file, direct]

    def source(self) -> _native.PassedSource:
        """Returns the file as a source, which owns the descriptors."""
        return _native.PassedSource.of_file(self.name, self.file, self.direct)


class Weights:
    """The checkpoints that sessions can read.

    Args:
        places: Directories, whose files are found by relative names too; "hf://", followed by the
            beginning of the names of models on the Hugging Face Hub; the beginning of URLs, such as
            "s3://bucket/models"; or "any" for all files and all models of the Hub, where relative
            names are those of the home directory.

    Raises:
        ConfigurationError: A place is neither.
    """

    def __init__(self, places: tuple[str, ...] = ()) -> None:
        self._all = ANY in places
        self._hub = tuple(place for place in places if place.startswith(SCHEME))
        self._urls = tuple(place for place in places if place.startswith(_URL_SCHEMES))
        known = (ANY, *self._hub, *self._urls)
        directories = [place for place in places if place not in known]
        for directory in directories:
            if not os.path.isdir(directory):
                raise ConfigurationError(
                    f"{directory} is not a directory; expected a directory, hf://, hf:// with the "
                    f"beginning of a model's name, the beginning of URLs, or {ANY}"
                )
        self._roots = tuple(os.path.realpath(directory) for directory in directories)
        self._real_roots = self._roots
        if self._hub:
            try:
                from huggingface_hub import constants
            except ImportError as error:
                raise ConfigurationError(
                    f"{self._hub[0]} needs huggingface_hub: pip install huggingface_hub"
                ) from error
            self._real_roots += (os.path.realpath(constants.HF_HUB_CACHE),)
        self._downloads = threading.BoundedSemaphore(_MAX_DOWNLOADS)
        self._lock = threading.Lock()
        #: The directories of models of the Hub that were opened, the latest last.
        self._snapshots: collections.OrderedDict[str, None] = collections.OrderedDict()

    def open(self, source: str, beside: str = "") -> OpenFile | _native.PassedSource:
        """Opens the file with the weights of a source, or the index of its shards. Blocks.

        Args:
            source: A file; a directory; "hf://" with the name of a model on the Hub, which is
                downloaded first if necessary; or the URL of a file or directory.
            beside: The name of another file to open, in the same directory.

        Returns:
            The file, or the source at a URL.

        Raises:
            CheckpointNotFoundError: There is no such file.
            CheckpointPermissionError: Sessions may not read it.
            TensorStreamError: The file cannot be opened, or the model cannot be downloaded.
        """
        if "/" in beside or len(beside) > _MAX_NAME or beside in (".", ".."):
            raise ConfigurationError(f"invalid name {beside[:_MAX_NAME]!r}")
        _check(source)
        if source.startswith(SCHEME):
            return self._open_model(source, beside)
        if "://" in source:
            return self._open_url(source, beside)
        for path in self._paths(source):
            file = path
            if os.path.isdir(path):
                file = os.path.join(path, beside or _native.checkpoint_file(path))
            elif beside:
                file = os.path.join(os.path.dirname(path), beside)
            if os.path.lexists(file):
                return self._open_file(file)
        raise CheckpointNotFoundError(f"there is no file or directory {source}")

    def directories(self, source: str) -> list[str]:
        """Returns the directories of a source that have weights, relative and sorted. Blocks.

        Args:
            source: A directory, or "hf://" with the name of a model on the Hub. The empty string in
                the result is the directory itself.

        Raises:
            CheckpointNotFoundError: There is no such directory or model.
            CheckpointPermissionError: Sessions may not read it.
        """
        _check(source)
        if source.startswith(SCHEME):
            inside: dict[str, set[str]] = {}
            with self._downloading():
                names = self._model(source).stored()
            for name in names:
                inside.setdefault(os.path.dirname(name), set()).add(os.path.basename(name))
            return sorted(directory for directory, files in inside.items() if has_weights(files))
        if "://" in source:
            raise ConfigurationError(
                f"the directories at {source} cannot be listed; load each of them with "
                "load_state_dict"
            )
        for path in self._paths(source):
            if os.path.isdir(path):
                return sorted(_directories_in(path))
        raise CheckpointNotFoundError(f"there is no directory {source}")

    def _paths(self, source: str) -> list[str]:
        """Returns the paths that a source can mean.

        Raises:
            CheckpointPermissionError: Sessions may read none of them.
        """
        if self._all:
            return [os.path.join(os.path.expanduser("~"), os.path.expanduser(source))]
        with self._lock:
            # The shards of models of the Hub are opened by their paths.
            roots = (*self._roots, *(self._snapshots if os.path.isabs(source) else ()))
        paths = [os.path.normpath(os.path.join(root, source)) for root in roots]
        paths = [path for path, root in zip(paths, roots, strict=True) if _is_in(path, root)]
        if not paths:
            raise self._refused(source)
        for path in paths:
            self._check_links(path, os.path.realpath(path))
        return paths

    def _check_links(self, path: str, real: str) -> None:
        """Refuses a path that leads elsewhere by symbolic links."""
        if not self._all and not any(_is_in(real, root) for root in self._real_roots):
            raise CheckpointPermissionError(
                f"{path} is a symbolic link to a place that sessions may not read"
            )

    def _open_file(self, path: str) -> OpenFile:
        if not path.endswith(_SUFFIXES):
            raise _not_weights(path)
        opened = OpenFile(path, *_native.open_file(path))
        try:
            # The descriptor shows what was opened, even if links change meanwhile.
            self._check_links(path, os.readlink(f"/proc/self/fd/{opened.file}"))
        except BaseException:
            opened.close()
            raise
        return opened

    def _open_url(self, url: str, beside: str) -> _native.PassedSource:
        whole = f"{url.rstrip('/')}/{beside}"
        if not url.startswith(_URL_SCHEMES) or _UNCLEAR.search(url) or _UNCLEAR.search(whole):
            raise ConfigurationError(
                f"unsupported URL {url}: expected hf:// or one of {', '.join(_URL_SCHEMES)}, "
                "without a query, a fragment, percent-encoding, or names that consist of dots"
            )
        # What is beside a file is in its directory.
        at = f"{_directory_of(url)}/{beside}" if beside else url
        if not any(_is_below(url, place) and _is_below(at, place) for place in self._urls):
            raise self._refused(at)
        if beside and not beside.endswith(_SUFFIXES):
            raise _not_weights(f"{beside} beside {url}")
        return _native.PassedSource.at_url(url, beside)

    def _open_model(self, source: str, beside: str) -> OpenFile:
        model = self._model(source)
        with self._downloading():
            path = model.file(beside) if beside else find(source).weights
        if path is None:
            raise CheckpointNotFoundError(f"{model} on the Hub has no file {beside}")
        with self._lock:
            self._snapshots[os.path.dirname(path)] = None
            self._snapshots.move_to_end(os.path.dirname(path))
            if len(self._snapshots) > _MAX_SNAPSHOTS:
                self._snapshots.popitem(last=False)
        return self._open_file(path)

    @contextlib.contextmanager
    def _downloading(self) -> Iterator[None]:
        """Limits the downloads at a time: one goes on if its session ends.

        Raises:
            StorageError: There are too many.
        """
        if not self._downloads.acquire(blocking=False):
            raise StorageError(
                f"the machine downloads {_MAX_DOWNLOADS} other models now; try again later"
            )
        try:
            yield
        finally:
            self._downloads.release()

    def _model(self, source: str) -> HubModel:
        """Returns the model that a source names.

        Raises:
            CheckpointPermissionError: Sessions may not read it.
        """
        model = HubModel.named(source, {})
        assert model is not None, "the source has the scheme of the Hub"
        if not self._all and not any(_begins(model.name, place) for place in self._hub):
            raise self._refused(source)
        return model

    def _refused(self, source: str) -> CheckpointPermissionError:
        anything = (ANY,) if self._all else ()
        allowed = ", ".join((*anything, *self._roots, *self._hub, *self._urls)) or "nothing"
        example = SCHEME if source.startswith(SCHEME) else "DIRECTORY"
        if source.startswith(_URL_SCHEMES):
            example = source.rpartition("/")[0]
        return CheckpointPermissionError(
            f"sessions may not read {source}, but {allowed}; start the server with "
            f"`--weights {example}` to allow more"
        )


def _not_weights(name: str) -> CheckpointPermissionError:
    return CheckpointPermissionError(
        f"{name} is not a file of weights: expected a name that ends in {', '.join(_SUFFIXES)}"
    )


def _is_in(path: str, root: str) -> bool:
    """Returns whether a path is that of a directory or inside it, and no part of it is hidden."""
    rest = os.path.relpath(path, root)
    return rest == "." or not any(part.startswith(".") for part in rest.split(os.sep))


def _begins(model: str, place: str) -> bool:
    """Returns whether the name of a model begins with all parts of the name in a place."""
    allowed = place.removeprefix(SCHEME).rstrip("/")
    return not allowed or model == allowed or model.startswith(f"{allowed}/")


def _is_below(url: str, place: str) -> bool:
    """Returns whether a URL begins with all parts of another."""
    return f"{url}/".startswith(place if place in _URL_SCHEMES else f"{place.rstrip('/')}/")


def _directory_of(url: str) -> str:
    """Returns the directory of the file at a URL, or the URL if it is that of a directory."""
    return url.rpartition("/")[0] if url.endswith(_SUFFIXES) else url.rstrip("/")


def _directories_in(path: str) -> Iterator[str]:
    """Yields the directories in a directory, relative to it, whose weights can be opened."""
    for directory, inside, _ in os.walk(path):
        inside[:] = [name for name in inside if not name.startswith(".")]
        with contextlib.suppress(TensorStreamError):  # it has no weights, or several
            _native.checkpoint_file(directory)
            yield "" if directory == path else os.path.relpath(directory, path)


def _check(source: str) -> None:
    """Refuses names that no file has."""
    if not source or len(source) > _MAX_NAME or "\0" in source:
        raise ConfigurationError(f"invalid name {source[:_MAX_NAME]!r}")
