# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loads transformers models whose weights a remote machine reads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..budget import Budget
from ..config import Config
from ..errors import (
    CheckpointNotFoundError,
    CheckpointPermissionError,
    ConfigurationError,
    TensorStreamError,
)
from ..files._hub import SCHEME
from ..files._places import Place
from ..remote.client._checkpoint import RemoteCheckpoint, read_text, source_on
from ._arguments import Arguments
from ._loading import check, class_and_config, transformers_module

Path = str | os.PathLike[str]

#: The files beside the weights that this process needs.
_CONFIGURATION = "config.json"
_GENERATION = "generation_config.json"
#: Arguments for the Hub that a machine cannot use.
_OWN = ("token", "cache_dir", "force_download", "local_files_only")


def from_pretrained(
    path: Path,
    device: torch.device,
    *,
    budget: int | str | Budget | Mapping[Any, int | str] | None,
    config: Config | Any | None,
    model_class: type[Any] | None,
    kwargs: dict[str, Any],
) -> Any:
    """Loads a model on a remote device. See ``tensorstream.from_pretrained``. Blocks."""
    if budget is not None or getattr(config, "budget", None) is not None:
        raise ConfigurationError(
            f"invalid budget: the model is in the memory of {device}; to stream its weights there, "
            "start the machine's server with --budget"
        )
    if isinstance(config, Config):
        raise ConfigurationError(
            f"invalid config: a Config has settings of models that stream here, not on {device}"
        )
    kwargs = {name: value for name, value in kwargs.items() if name != "device_map"}
    arguments = Arguments.of(None, config, kwargs)
    if unusable := [name for name in _OWN if arguments.hub.get(name) not in (None, False)]:
        raise ConfigurationError(
            f"invalid {unusable[0]}: the machine of {device} downloads the model, with the "
            "settings of the user there; leave it out"
        )
    if arguments.trust_remote_code:
        raise ConfigurationError(
            "invalid trust_remote_code: code of the checkpoint is not copied from the machine; "
            "pass `model_class`"
        )
    with (
        _opened(path, device, arguments) as (source, checkpoint),
        _configuration(source, device) as place,
    ):
        transformers = transformers_module()
        try:
            loaded_class, model_config, for_class = class_and_config(
                transformers, place, model_class, arguments
            )
        except TensorStreamError as error:
            raise type(error)(str(error).replace(place.name, source)) from error
        model, info = loaded_class.from_pretrained(
            None,
            config=model_config,
            state_dict=checkpoint.load(),
            device_map={"": device},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **for_class,
        )
        if model.can_generate() and "generation_config" not in for_class:
            model.generation_config = _generation_config(transformers, place, model)
    check(source, info, model, new_heads=model_class is not None)
    model.name_or_path = model.config._name_or_path = source
    return (model, info) if arguments.loading_info else model


@contextmanager
def _opened(
    path: Path, device: torch.device, arguments: Arguments
) -> Iterator[tuple[str, RemoteCheckpoint]]:
    """Opens the weights of a path of the machine, or else those of a model of this name."""
    text = os.fspath(path)
    subfolder, revision = arguments.hub.get("subfolder") or "", arguments.hub.get("revision")
    sources = [] if "://" in text else [os.path.join(text, subfolder) if subfolder else text]
    if text.startswith(SCHEME) or not os.path.isabs(text):
        at = f"@{revision}" if revision else ""
        inner = f"/{subfolder}" if subfolder else ""
        sources.append(f"{SCHEME}{text.removeprefix(SCHEME)}{at}{inner}")
    failures: list[Exception] = []
    for source in sources or [text]:
        try:
            checkpoint = RemoteCheckpoint(source, device)
        except (CheckpointNotFoundError, CheckpointPermissionError) as error:
            failures.append(error)
        else:
            with checkpoint:
                yield source, checkpoint
            return
    first, *more = failures
    if not more:
        raise first
    raise type(first)(f"{first}; and as the name of a model: {more[0]}") from first


@contextmanager
def _configuration(source: str, device: torch.device) -> Iterator[Place]:
    """Copies the configuration of a model from the machine to a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="tensorstream-") as directory:
        for name in (_CONFIGURATION, _GENERATION):
            try:
                text = read_text(source, name, device)
            except CheckpointNotFoundError:
                continue  # transformers says what is missing, or has a default
            with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
                file.write(text)
        yield Place(directory, source_on(source, device.index or 0))


def _generation_config(transformers: Any, place: Place, model: Any) -> Any:
    try:
        return transformers.GenerationConfig.from_pretrained(place.name)
    except OSError:  # no file: transformers falls back to the defaults of the class
        return transformers.GenerationConfig.from_model_config(model.config)
