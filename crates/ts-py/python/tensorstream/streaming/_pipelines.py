# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loads what consists of several models: pipelines of diffusers, and SentenceTransformers."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..budget import Budget
from ..config import Config, expanded
from ..errors import BudgetError, CheckpointError, ConfigurationError
from ..files._hub import OPTIONS, HubModel
from ._arguments import Arguments
from ._diffusers import load_diffusers
from ._diversion import Load, streamed_models
from ._offload import Path

_log = logging.getLogger("tensorstream")

#: The arguments for the Hub that the constructor of a SentenceTransformer takes, and their names.
_FOR_SENTENCE_TRANSFORMERS = {
    "cache_dir": "cache_folder",
    "local_files_only": "local_files_only",
    "revision": "revision",
    "token": "token",
}

#: Arguments that say where weights are placed, which the settings of the engine do here.
_PLACEMENT = (
    "device_map",
    "low_cpu_mem_usage",
    "max_memory",
    "model_config",
    "offload_buffers",
    "offload_folder",
    "offload_state_dict",
    "output_loading_info",
)


def load_with_its_library(
    path: Path,
    model_class: type[Any] | None,
    arguments: Arguments,
    kwargs: dict[str, Any],
    load_transformers: Load,
) -> Any | None:
    """Loads a pipeline, a SentenceTransformer or a model of diffusers. Its models stream.

    Args:
        path: The directory, or a name on the Hub.
        model_class: The class to load, or ``None`` for that which the files name.
        arguments: The arguments of the call, translated.
        kwargs: The arguments of the call.
        load_transformers: Loads a model of transformers.

    Returns:
        The result, or ``None`` if there is something else at ``path``.
    """
    files = _Files(path, arguments)
    if arguments.model_config is not None:
        several = files.read("modules.json") or files.read("model_index.json")
        if several or _is_of("diffusers", model_class):
            raise ConfigurationError(
                "a configuration of the model can be given for models of transformers only; leave "
                "out `model_config`, or pass settings as `config`"
            )
    rest = {name: value for name, value in kwargs.items() if name not in _PLACEMENT}
    if _is_of("sentence_transformers", model_class) or (
        model_class is None and files.read("modules.json")
    ):
        return _sentence_transformer(files, model_class, arguments, rest, load_transformers)
    if model_class is not None and not _is_of("diffusers", model_class):
        return None
    if files.read("model_index.json"):
        return _pipeline(files, model_class, arguments, rest, load_transformers)
    if model_class is None:
        name = files.read_object("config.json").get("_class_name")
        model_class = None if name is None else _diffusers_class(name, files)
    if model_class is None:
        return None
    if hasattr(model_class, "_keep_in_fp32_modules") and hasattr(model_class, "load_config"):
        return load_diffusers(model_class, path, arguments)
    # An automatic class of diffusers chooses the class.
    with _streamed(arguments.settings, load_transformers):
        return model_class.from_pretrained(files.loaded_name(), **{**rest, **files.options()})


def sentence_transformer_name(path: Path, arguments: Arguments) -> str | None:
    """Returns the full name of a model for which sentence-transformers accepts a short one.

    Returns:
        ``None`` if ``path`` is not such a name.
    """
    name = os.fspath(path)
    model = None if "/" in name else HubModel.named(path, arguments.hub)
    return None if model is None else f"sentence-transformers/{name}"


def _is_of(library: str, model_class: type[Any] | None) -> bool:
    """Returns whether a class is of a library, or derived from one of its classes."""
    bases = () if model_class is None else model_class.__mro__
    return any(base.__module__.partition(".")[0] == library for base in bases)


class _Files:
    """The files of a model that say what it is."""

    def __init__(self, path: Path, arguments: Arguments) -> None:
        self.name = os.fspath(expanded(path))
        self.on_hub = HubModel.named(path, arguments.hub)
        self._subfolder = arguments.hub.get("subfolder") or ""

    def loaded_name(self) -> str:
        """Returns the name under which another library finds the model."""
        return self.name if self.on_hub is None else self.on_hub.name

    def options(self) -> dict[str, Any]:
        """Returns the arguments with which another library finds the model on the Hub."""
        return {} if self.on_hub is None else self.on_hub.arguments()

    def whole_name(self) -> str:
        """Returns the name of what consists of several models, including the subfolder.

        Raises:
            ConfigurationError: It is in a subfolder on the Hub, which its library cannot load.
        """
        if self.on_hub is None:
            return os.path.join(self.name, self._subfolder) if self._subfolder else self.name
        if self.on_hub.subfolder:
            raise ConfigurationError(
                f"{self.on_hub} has several models, and its library loads only those at the top of "
                "a repository: download it with `hf download`, and pass the path of the directory"
            )
        return self.on_hub.name

    def read_object(self, name: str) -> dict[str, Any]:
        """Returns the content of a JSON file that must be an object. Empty if it does not exist."""
        content = self.read(name)
        if not isinstance(content, dict):
            raise CheckpointError(f"{self.name}: {name} is not a JSON object")
        return content

    def read(self, name: str) -> Any:
        """Returns the content of a JSON file. Empty if it does not exist."""
        if self.on_hub is not None:
            path = self.on_hub.file(name, optional=True)
        else:
            path = os.path.join(self.name, self._subfolder, name)
        if path is None or not os.path.isfile(path):
            return {}
        try:
            with open(path, encoding="utf-8") as file:
                return json.load(file)
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error


def _pipeline(
    files: _Files,
    model_class: Any,
    arguments: Arguments,
    kwargs: dict[str, Any],
    load_transformers: Load,
) -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise ConfigurationError(
            f"{files.name} is a pipeline of diffusers: pip install 'tensorstream[diffusers]'"
        ) from error
    index = files.read_object("model_index.json")
    if not isinstance(index.get("_class_name"), str):
        raise CheckpointError(f"{files.name}: model_index.json does not name a class")
    components = [name for name, value in index.items() if isinstance(value, list) and any(value)]
    _log.info(
        "%s is a pipeline: %s with %s", files.name, index["_class_name"], ", ".join(components)
    )
    name, options = files.whole_name(), files.options()
    kwargs = {key: value for key, value in kwargs.items() if key != "subfolder"}
    loader: Any = model_class or diffusers.DiffusionPipeline
    settings = _on_one_device(arguments.settings)
    with (
        _streamed(_shared(settings), load_transformers)
        if settings.accelerator() is None
        else _streamed(settings, _in_share(load_transformers), _in_share(_load_diffusers))
    ):
        return loader.from_pretrained(name, **{**kwargs, **options})


def _on_one_device(settings: Config) -> Config:
    """Returns settings for several models. If the library may choose devices, it chooses one.

    Raises:
        ConfigurationError: They have a map of devices, which has the names of one model's modules.
    """
    if isinstance(settings.device, Mapping):
        raise ConfigurationError(
            "a device map divides one model: give one device for all models, or load each with "
            "`subfolder` and its own map"
        )
    return settings.on_main_device()


def _in_share(load: Load) -> Load:
    """Returns a function that loads a model of a pipeline on an accelerator with ``load``.

    The model gets the share of the budget that its files have in those of the pipeline. Budgets of
    devices are fixed when a model is loaded.
    """

    def load_in_share(
        model_class: type[Any], path: Any, settings: Config, kwargs: dict[str, Any]
    ) -> Any:
        own, whole = _file_bytes(path), sum(map(_file_bytes, _siblings(path)))
        part = own / max(whole, 1)
        host = settings.host_bytes()
        settings = replace(
            settings,
            budget=max(1, int(settings.working_bytes() * part)),
            vram_budget_gb=None,
            host_budget=max(1, int(host * part)) if host else None,
        )
        try:
            return load(model_class, path, settings, kwargs)
        except BudgetError as error:
            raise BudgetError(
                f"the {model_class.__name__} gets {settings.budget} bytes of the budget of the "
                f"pipeline, {part:.1%} as of its files: {error}"
            ) from error

    return load_in_share


def _siblings(path: str | os.PathLike[str]) -> list[str]:
    """Returns the directories beside a directory, and itself."""
    parent = os.path.dirname(os.path.abspath(path))
    return [entry.path for entry in os.scandir(parent) if entry.is_dir()]


def _file_bytes(directory: str | os.PathLike[str]) -> int:
    """Returns the size of the files with weights in a directory, of one variant if there are more.

    The name of a variant follows a dot, as in "model.fp16.safetensors".
    """
    files = [
        entry
        for entry in os.scandir(directory)
        if entry.name.endswith((".safetensors", ".ts")) and entry.is_file()
    ]
    plain = [entry for entry in files if entry.name.count(".") == 1]
    return sum(entry.stat().st_size for entry in plain or files)


def _sentence_transformer(
    files: _Files,
    model_class: Any,
    arguments: Arguments,
    kwargs: dict[str, Any],
    load_transformers: Load,
) -> Any:
    kind = files.read_object("config_sentence_transformers.json").get(
        "model_type", "SentenceTransformer"
    )
    try:
        import sentence_transformers
    except ImportError as error:
        raise ConfigurationError(
            f"{files.name} is a {kind}: pip install sentence-transformers, or pass "
            "`model_class=transformers.AutoModel` to load its transformer alone"
        ) from error
    _log.info("%s is a %s", files.name, kind)
    modules = files.read("modules.json")
    loader = model_class or getattr(sentence_transformers, str(kind), None)
    if loader is None:
        raise CheckpointError(f"{files.name}: sentence_transformers has no class {kind}")
    _refuse(arguments.hub, "force_download", "SentenceTransformers")
    given = arguments.hub if files.on_hub is None else files.on_hub.arguments()
    options = {
        theirs: given[ours] for ours, theirs in _FOR_SENTENCE_TRANSFORMERS.items() if ours in given
    }
    rest = {name: value for name, value in kwargs.items() if name not in OPTIONS}
    dtypes = {name: rest.pop(name) for name in ("dtype", "torch_dtype") if name in rest}
    rest["model_kwargs"] = {**(rest.get("model_kwargs") or {}), **dtypes}
    # A router chooses one of several models.
    several = any("Router" in str(module.get("type")) for module in modules)
    # The library moves inputs to one device.
    settings = arguments.settings.on_main_device()
    settings = _shared(_on_one_device(settings)) if several else settings
    name = files.whole_name()
    with _streamed(settings, load_transformers):
        return loader(name, **{"device": str(settings.torch_device()), **rest, **options})


def _refuse(given: dict[str, Any], name: str, what: str) -> None:
    """Refuses an argument that the library of ``what`` cannot use."""
    if given.get(name):
        raise ConfigurationError(f"{what} cannot be loaded with `{name}`: leave it out")


def _shared(settings: Config) -> Config:
    """Returns settings with a budget that several models share.

    Raises:
        ConfigurationError: The models would be on an accelerator.
    """
    if settings.accelerator() is not None:
        raise ConfigurationError(
            f"the models of a router cannot share a budget on {settings.device}: load each of them "
            "by its own path, with a `device` and a `budget`"
        )
    if isinstance(settings.budget, Budget):
        return settings
    return replace(
        settings,
        budget=Budget(settings.working_bytes()),
        vram_budget_gb=None,
        memory_pressure_mode="strict",
    )


def _streamed(settings: Config, load_transformers: Load, load_diffusers: Load | None = None) -> Any:
    """Returns a context in which models of transformers and diffusers stream."""
    from transformers import PreTrainedModel

    loaders: dict[type[Any], Load] = {PreTrainedModel: load_transformers}
    try:
        from diffusers import ModelMixin
    except ImportError:
        pass
    else:
        loaders[ModelMixin] = load_diffusers or _load_diffusers
    return streamed_models(settings, loaders)


def _load_diffusers(
    model_class: type[Any], path: Any, settings: Config, kwargs: dict[str, Any]
) -> Any:
    return load_diffusers(model_class, path, Arguments.of(None, settings, kwargs))


def _diffusers_class(name: str, files: _Files) -> Any:
    """Returns the class of diffusers with a name."""
    try:
        import diffusers
    except ImportError as error:
        raise ConfigurationError(
            f"{files.name} is a model of diffusers ({name}): pip install 'tensorstream[diffusers]'"
        ) from error
    found = getattr(diffusers, name, None)
    if found is None:
        raise ConfigurationError(
            f"{files.name} is a model of diffusers, which has no class {name}; pass `model_class`"
        )
    return found
