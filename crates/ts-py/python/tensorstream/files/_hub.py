# SPDX-License-Identifier: MIT OR Apache-2.0
"""Finds models on the Hugging Face Hub, and downloads the files that are not in its cache.

huggingface_hub does the work, so its settings apply: the cache directory, the token, the endpoint,
and the offline mode.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import (
    CheckpointNotFoundError,
    CheckpointPermissionError,
    ConfigurationError,
    StorageError,
    TensorStreamError,
)

SCHEME = "hf://"

#: A name of a model: "model" or "organisation/model".
_NAME = re.compile(r"\w(?:[\w.-]*\w)?(?:/\w(?:[\w.-]*\w)?)?")
#: ``hf://`` URLs, as huggingface_hub's file system writes them. A revision has no slash, unless it
#: is that of a pull request.
_URL = re.compile(
    r"(?P<name>[^@/]+(?:/[^@/]+)?)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/\w+|[^/]+))?(?:/(?P<subfolder>[^/].*?))?/?"
)
#: Suffixes of files, which are not names of models.
_SUFFIXES = (".safetensors", ".ts", ".json", ".bin", ".gguf", ".pt", ".pth", ".ckpt")

#: The arguments of transformers' ``from_pretrained`` that say how to find files on the Hub.
OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")

#: How long a Hub that could not be reached is not tried again. Its library tries for 15 seconds.
_RETRY_SECONDS = 60
#: The time until which a Hub is not tried again, by its endpoint.
_unreachable_until: dict[str, float] = {}


def _endpoint() -> str:
    import huggingface_hub.constants

    return str(huggingface_hub.constants.ENDPOINT)


def _is_unreachable() -> bool:
    return time.monotonic() < _unreachable_until.get(_endpoint(), 0)


def _remember_unreachable() -> None:
    _unreachable_until[_endpoint()] = time.monotonic() + _RETRY_SECONDS


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub.

    Attributes:
        name: "model" or "organisation/model".
        revision: A branch, a tag or a commit. The default is the main branch.
        subfolder: The directory of the model in its repository.
        options: Further arguments of huggingface_hub's ``hf_hub_download``.
    """

    name: str
    revision: str | None = None
    subfolder: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def named(cls, path: str | os.PathLike[str], options: dict[str, Any]) -> HubModel | None:
        """Returns the model of this name, or ``None`` if ``path`` is not a name.

        What exists on this machine is a path, not a name.

        Args:
            path: A path, a name, or a URL ``hf://NAME@REVISION/SUBFOLDER``.
            options: Arguments of the call in ``OPTIONS``.

        Raises:
            ConfigurationError: A URL is invalid, or the call contradicts it.
        """
        text = os.fspath(path)
        known = {key: options[key] for key in OPTIONS if options.get(key) is not None}
        revision, subfolder = known.pop("revision", None), known.pop("subfolder", "")
        if not text.startswith(SCHEME):
            is_name = (
                isinstance(path, str)
                and _NAME.fullmatch(text) is not None
                and not text.lower().endswith(_SUFFIXES)
                and not os.path.lexists(text)
            )
            return cls(text, revision, subfolder, known) if is_name else None
        parts = _URL.fullmatch(text.removeprefix(SCHEME))
        if parts is None or _NAME.fullmatch(parts["name"]) is None:
            raise ConfigurationError(
                f"invalid URL {text}: expected hf://NAME, hf://NAME@REVISION or "
                "hf://NAME@REVISION/SUBFOLDER, where NAME is the name of a model on the Hub, such "
                "as organisation/model"
            )
        parts_of = [*(parts["subfolder"] or "").split("/"), *(parts["revision"] or "").split("/")]
        if any(part in (".", "..") or "\\" in part for part in parts_of):
            raise ConfigurationError(f"invalid URL {text}: it has a part `.`, `..` or a backslash")
        for name, own, given in (
            ("revision", parts["revision"], revision),
            ("subfolder", parts["subfolder"], subfolder or None),
        ):
            if own is not None and given is not None and own != given:
                raise ConfigurationError(
                    f"{text} names the {name} {own}, but the argument `{name}` is {given}; give "
                    "only one"
                )
        return cls(
            parts["name"], parts["revision"] or revision, parts["subfolder"] or subfolder, known
        )

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments for functions of transformers that take the name of a model."""
        arguments = {**self.options, "revision": self.revision, "subfolder": self.subfolder}
        return {key: value for key, value in arguments.items() if value not in (None, "")}

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.name}{at}" + (f"/{self.subfolder}" if self.subfolder else "")

    def pinned(self, file: str) -> HubModel:
        """Returns the model at the commit of a file that was downloaded."""
        commit = re.search(r"snapshots/([0-9a-f]{40})/", file.replace(os.sep, "/"))
        return self if commit is None else replace(self, revision=commit[1])

    def file(self, name: str, *, optional: bool = False) -> str | None:
        """Returns the path of a file of the model, which is downloaded first if necessary. Blocks.

        Args:
            name: The name of the file.
            optional: Whether a file that is not in the cache counts as absent if the Hub cannot be
                reached or must not be used.

        Returns:
            The path in the cache, or ``None`` if the model has no such file.

        Raises:
            CheckpointNotFoundError: There is no such model or revision, or the file is not in the
                cache and the Hub cannot be reached or must not be used.
            CheckpointPermissionError: The user has not been granted access to the model.
            StorageError: The Hub answered with another error, or the file could not be written.
            ConfigurationError: huggingface_hub is not installed.
        """
        with self._errors(name):
            import huggingface_hub
            from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

            options = dict(self.options)
            is_forced = bool(options.get("force_download"))
            if not is_forced and not options.get("local_files_only"):
                options["local_files_only"] = _is_unreachable() or (
                    # Of a file that is not in its cache, huggingface_hub asks again and again.
                    optional and not self._in_cache(name) and not self._is_answered(name)
                )
            try:
                path: str = huggingface_hub.hf_hub_download(
                    self.name,
                    name,
                    revision=self.revision,
                    subfolder=self.subfolder or None,
                    **options,
                )
            except LocalEntryNotFoundError:  # also an EntryNotFoundError
                if not options.get("local_files_only"):
                    _remember_unreachable()
                if optional or self._in_cache(name) is False:
                    return None
                raise
            except EntryNotFoundError:
                return None
            return path

    def files(self, names: list[str]) -> None:
        """Downloads the files that are not in the cache, several at once. Blocks.

        Raises:
            The errors of ``file``.
        """
        prefix = f"{self.subfolder}/" if self.subfolder else ""
        with self._errors(names[0]):
            import huggingface_hub

            huggingface_hub.snapshot_download(
                self.name,
                revision=self.revision,
                allow_patterns=[prefix + name for name in names],
                **self.options,
            )

    def list(self) -> list[str]:
        """Returns the names of the model's files on the Hub. Empty if it cannot be reached."""
        try:
            import huggingface_hub

            names = huggingface_hub.list_repo_files(
                self.name, revision=self.revision, token=self.options.get("token")
            )
        except Exception:  # only used for the text of an error
            return []
        prefix = f"{self.subfolder}/" if self.subfolder else ""
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def stored(self) -> builtins.list[str]:
        """Returns the names of the model's files: on the Hub, or else in its cache.

        Raises:
            The errors of ``file``.
        """
        names = self.list()
        if not names:
            with self._errors("a file"):
                import huggingface_hub

                options = {**self.options, "local_files_only": True}
                snapshot = huggingface_hub.snapshot_download(
                    self.name, revision=self.revision, **options
                )
                top = os.path.join(snapshot, self.subfolder)
                names = [
                    os.path.relpath(os.path.join(directory, file), top).replace(os.sep, "/")
                    for directory, _, files in os.walk(top)
                    for file in files
                ]
        return sorted(names)

    def _is_answered(self, name: str) -> bool:
        """Asks the Hub for a file once. Returns whether it answers, and remembers if not."""
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError

        url = huggingface_hub.hf_hub_url(
            self.name, name, subfolder=self.subfolder or None, revision=self.revision
        )
        try:
            huggingface_hub.get_hf_file_metadata(url, token=self.options.get("token"))
        except HfHubHTTPError:  # an answer
            pass
        except Exception:  # from an HTTP client that differs between versions
            _remember_unreachable()
        return not _is_unreachable()

    def _in_cache(self, name: str) -> bool | None:
        """Returns whether the model has a file, or ``None`` if the cache does not know it."""
        import huggingface_hub

        path = f"{self.subfolder}/{name}" if self.subfolder else name
        known = huggingface_hub.try_to_load_from_cache(
            self.name, path, cache_dir=self.options.get("cache_dir"), revision=self.revision
        )
        return None if known is None else isinstance(known, str)

    @contextlib.contextmanager
    def _errors(self, file: str) -> Iterator[None]:
        """Turns the errors of huggingface_hub into those of TensorStream."""
        try:
            from huggingface_hub import errors
        except ImportError as error:
            raise ConfigurationError(
                f"there is no file or directory {self.name}, and models of the Hub need "
                "huggingface_hub: pip install 'tensorstream[transformers]'"
            ) from error
        try:
            yield
        except errors.GatedRepoError as error:
            raise CheckpointPermissionError(
                f"access to {self} on the Hub must be granted first: accept its conditions on its "
                "page, and log in with `hf auth login`"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise CheckpointNotFoundError(
                f"there is no file or directory {self.name}, and no model of this name on the Hub "
                "that you may read; for a private model, log in with `hf auth login`"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{self.name} has no revision {self.revision} on the Hub"
            ) from error
        except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
            raise CheckpointNotFoundError(
                f"there is no file or directory {self.name}, and {file} of the model {self} is not "
                "in the cache of the Hub, which cannot be reached or must not be used (offline "
                "mode); download the model first, with `hf download`"
            ) from error
        except errors.HFValidationError as error:
            raise CheckpointNotFoundError(
                f"there is no file or directory {self.name}, and it is not a name of the Hub: "
                f"{error}"
            ) from error
        except TensorStreamError:
            raise
        # Its HTTP client and its storage raise errors of their own classes.
        except Exception as error:
            if isinstance(error, ValueError) and self.options.get("force_download"):
                raise ConfigurationError(
                    f"cannot download {self} again without a connection: leave out `force_download`"
                ) from error
            raise StorageError(f"cannot download {file} of {self} from the Hub: {error}") from error
