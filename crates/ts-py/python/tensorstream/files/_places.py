# SPDX-License-Identifier: MIT OR Apache-2.0
"""Finds the files of a model: in a directory, or on the Hugging Face Hub."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError, CheckpointNotFoundError
from ._hub import HubModel

#: The stems of files with weights, as transformers and diffusers write them.
_STEMS = ("model", "diffusion_pytorch_model")

#: The longest index of shards that is read, in bytes.
_MAX_INDEX = 256 << 20

#: Suffixes of files with weights in other formats, and how to convert them.
_FOREIGN = {
    ".gguf": "AutoModelForCausalLM.from_pretrained(NAME, gguf_file=FILE).save_pretrained(TARGET)",
    ".bin": "AutoModel.from_pretrained(NAME).save_pretrained(TARGET), with the class of the model",
    ".pt": 'ts.save_file(torch.load(FILE, mmap=True), "model.safetensors")',
    ".pth": 'ts.save_file(torch.load(FILE, mmap=True), "model.safetensors")',
    ".ckpt": 'ts.save_file(torch.load(FILE, mmap=True), "model.safetensors")',
}


@dataclass(frozen=True)
class Place:
    """Where the files of a model are.

    Attributes:
        name: The name that functions of transformers take: a directory, or a name on the Hub.
        weights: The path or URL of the weights.
        arguments: Further arguments for functions of transformers, such as the commit.
    """

    name: str
    weights: str
    arguments: dict[str, Any] = field(default_factory=dict)


def find(
    path: str | os.PathLike[str],
    options: dict[str, Any] | None = None,
    variant: str | None = None,
) -> Place:
    """Finds a model. Downloads its weights from the Hub if necessary, and then blocks.

    Args:
        path: A path, a URL, or the name of a model on the Hub. A path need not exist.
        options: Arguments for the Hub. See ``OPTIONS``.
        variant: The variant of the files with weights, such as "fp16".

    Raises:
        CheckpointNotFoundError: There is no such model on the Hub, or no such variant.
        CheckpointPermissionError: The user has not been granted access to the model.
        CheckpointError: The model on the Hub has weights in other formats only.
        StorageError: Downloading failed.
        ConfigurationError: The path is an invalid URL of the Hub, or contradicts the options.
    """
    options = options or {}
    model = HubModel.named(path, options)
    if model is not None:
        return _on_hub(model, variant)
    name = os.fspath(path)
    subfolder = options.get("subfolder") or ""
    directory = os.path.join(name, subfolder) if subfolder else name
    arguments = {"subfolder": subfolder} if subfolder else {}
    if not variant:
        return Place(name, directory, arguments)
    for file in _names(variant):
        if os.path.isfile(os.path.join(directory, file)):
            return Place(name, os.path.join(directory, file), arguments)
    raise CheckpointNotFoundError(
        f"{directory} has no weights of the variant {variant}: expected {_names(variant)[0]} or "
        f"{_names(variant)[1]}"
    )


def has_weights(files: set[str]) -> bool:
    """Returns whether a directory of a model on the Hub has weights that ``find`` finds.

    Args:
        files: The names of its files.
    """
    return not files.isdisjoint(_names(None))


def _names(variant: str | None) -> list[str]:
    """Returns the names that files with weights can have."""
    dotted = f".{variant}" if variant else ""
    return [
        name.format(stem)
        for stem in _STEMS
        for name in (f"{{}}{dotted}.safetensors", f"{{}}.safetensors.index{dotted}.json")
    ]


def _on_hub(model: HubModel, variant: str | None) -> Place:
    names = _names(variant)
    for name in names:
        # Without a connection, nothing says that a file which is not in the cache does not exist.
        path = model.file(name, optional=True)
        if path is None:
            continue
        model = model.pinned(path)
        if name.endswith(".json"):
            model.files(_shards(path))
        return Place(model.name, path, model.arguments())
    model.file(names[0])  # raises if the Hub could not be asked
    raise _without_weights(model, variant)


def _shards(index: str) -> list[str]:
    """Returns the names of the files that a shard index lists."""
    try:
        if (size := os.path.getsize(index)) > _MAX_INDEX:
            raise ValueError(f"it has {size} bytes, and at most {_MAX_INDEX} are read")
        with open(index, encoding="utf-8") as file:
            files = {str(name) for name in json.load(file)["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a shard index: {error}") from error
    if not files:
        raise CheckpointError(f"{index} lists no files")
    return sorted(files)


def _without_weights(model: HubModel, variant: str | None) -> Exception:
    """Returns the error for a model without safetensors files, which says what it has."""
    names = model.list()
    for suffix, conversion in _FOREIGN.items():
        files = [name for name in names if name.endswith(suffix)]
        if files and not any(name.endswith(".safetensors") for name in names):
            return CheckpointError(
                f"{model} on the Hub has no safetensors files, but {files[0]}, which cannot be "
                f"streamed; convert it once, on a machine with enough memory: {conversion}"
            )
    others = sorted(name for name in names if name.endswith(".safetensors"))
    found = f"; it has {', '.join(others[:3])}" if others else ""
    what = f"of the variant {variant} " if variant else ""
    return CheckpointNotFoundError(
        f"{model} on the Hub has no weights {what}(expected {_names(variant)[0]} or "
        f"{_names(variant)[1]}){found}; give a `subfolder` or a `variant` if they are elsewhere"
    )
