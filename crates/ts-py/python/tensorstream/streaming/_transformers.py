# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loads transformers models without materializing their weights.

transformers builds the model with its public ``from_pretrained(None, config=, state_dict=)``, from
a state dict of symbolic tensors. So transformers itself decides how to rename and tie weights,
which weights may be missing, and whether to map or to copy weights.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import torch

from .. import _native
from ..budget import Budget
from ..config import HEADROOM, Config, expanded
from ..errors import (
    BudgetError,
    CheckpointNotFoundError,
    ConfigurationError,
)
from ..files._places import Place, find
from . import _tree as tree
from ._arguments import Arguments, device_of_machine
from ._attach import attach
from ._builder import Builder
from ._loading import (
    check,
    class_and_config,
    fill_buffers,
    marked_memory,
    names_without_arguments,
    transformers_module,
)
from ._offload import Path, plan_model
from ._pipelines import load_with_its_library, sentence_transformer_name
from ._placement import Placement
from ._symbolic_tensor import SymbolicTensor
from ._weights import Divided

_log = logging.getLogger("tensorstream")

#: The least memory that importing transformers and building a model take, in bytes.
TRANSFORMERS_BYTES = 96 << 20


def from_pretrained(
    path: Path,
    *,
    budget: int | str | Budget | None = None,
    device: str | int | torch.device | None = None,
    host_budget: int | str | None = None,
    config: Config | Any | None = None,
    model_class: type[Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Loads a model that streams its weights under ``budget``.

    The model is the one that the class's own ``from_pretrained(path)`` returns, except that its
    parameters are frozen and not in memory. Outputs are bit-identical. Pipelines of diffusers and
    SentenceTransformers are loaded by their libraries, and their models stream under one budget.

    Args:
        path: One of these:

            - A directory that ``save_pretrained`` wrote: ``config.json`` and safetensors files, or
              a ``.ts`` file; or the directory of a pipeline or a SentenceTransformer.
            - The name of a model on the Hugging Face Hub, such as "organisation/model". Files that
              are not in the cache of the Hub are downloaded first. A path that exists is not a
              name.
            - ``hf://NAME@REVISION/SUBFOLDER``, a model on the Hub. The revision and the subfolder
              can be left out.
            - A URL of a checkpoint, with ``config``.
        budget: Shorthand for ``Config(budget=...)``.
        device: Shorthand for ``Config(device=...)``. With a device of a remote machine ("ts:0"),
            the machine reads the weights, whose path or name is its own, into its memory.
        host_budget: Shorthand for ``Config(host_budget=...)``.
        config: The settings, or a configuration of transformers that replaces the one in
            ``config.json``. Settings cannot be combined with ``budget``.
        model_class: The class to load, such as ``AutoModel``. The default is the class that the
            files name: a pipeline or a SentenceTransformer, else that of ``config.json``.
        kwargs: Arguments of the class's ``from_pretrained``. Some act as follows:

            - ``max_memory={"cpu": "6GB"}`` is the budget.
            - ``device_map`` is the ``device``: "cuda:0", or "auto" for the accelerator if there
              is one that can be used, else the CPU. See ``Config.device``. It may map modules to
              devices, the CPU and the disk: their weights stream to these devices.
            - ``offload_folder`` is ``Config.storage_path``.
            - ``dtype`` (``torch_dtype``) casts weights, which are then written to storage once.
            - ``revision``, ``subfolder``, ``token``, ``cache_dir``, ``local_files_only`` and
              ``force_download`` belong to the Hub.
            - ``model_config`` is another name for ``config`` if that has the settings.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at ``path``, and no model of this name on
            the Hub or, without a connection, in its cache.
        CheckpointPermissionError: The process may not read the checkpoint, or write to the
            directory for converted tensors, or access to a model of the Hub is not granted.
        MissingTensorError: The checkpoint lacks a parameter. A new head of a ``model_class`` that
            is given stays in memory instead, initialized and trainable as by transformers.
        CheckpointError: The checkpoint does not fit the model, or is damaged.
        ModelError: The model cannot be streamed.
        StorageError: Reading, writing or downloading failed.
        BudgetError: The budget is too small, or there is too little memory.
        ConfigurationError: An argument is invalid or cannot be supported, or transformers is not
            installed.

    Examples:
        >>> import tensorstream as ts
        >>> model = ts.from_pretrained("path/to/checkpoint", budget="600MiB")  # doctest: +SKIP
        >>> output = model.generate(ids)  # doctest: +SKIP
    """
    remote = device_of_machine(device, kwargs.get("device_map"), getattr(config, "device", None))
    if remote is not None:
        from . import _on_machine  # needs the device "ts"

        return _on_machine.from_pretrained(
            path, remote, budget=budget, config=config, model_class=model_class, kwargs=kwargs
        )
    arguments = Arguments.of(budget, config, kwargs, device, host_budget)
    # Parameters that are made under inference mode could not be used outside of it.
    with torch.inference_mode(False):
        try:
            return _load_any(path, model_class, arguments, kwargs)
        except CheckpointNotFoundError:
            full_name = sentence_transformer_name(path, arguments)
            if full_name is None:
                raise
            try:
                return _load_any(full_name, model_class, arguments, kwargs)
            except CheckpointNotFoundError:
                pass
            raise


def _load_any(
    path: Path, model_class: type[Any] | None, arguments: Arguments, kwargs: dict[str, Any]
) -> Any:
    loaded = load_with_its_library(path, model_class, arguments, kwargs, _load_class)
    return _load(path, model_class, arguments) if loaded is None else loaded


def _load_class(
    model_class: type[Any], path: Path, settings: Config, kwargs: dict[str, Any]
) -> Any:
    """Loads a model for another library, which called ``from_pretrained`` of its class."""
    kwargs = dict(kwargs)
    kwargs["model_config"] = kwargs.pop("config", None)
    return _load(path, model_class, Arguments.of(None, settings, kwargs))


def _load(path: Path, model_class: type[Any] | None, arguments: Arguments) -> Any:
    """Loads a model of transformers."""
    place = find(expanded(path), arguments.hub, arguments.variant)
    _refuse_adapter(place)
    checkpoint = _native.Checkpoint(place.weights)
    if "dtype" not in arguments.for_class and "torch_dtype" not in arguments.for_class:
        _check_memory()
    transformers = transformers_module()
    model, info = _build(transformers, place, checkpoint, model_class, arguments)
    # The class has initialised these, such as new heads, and tables of sines that no file has.
    new = frozenset(
        id(parameter)
        for parameter in tree.parameters(model)
        if not (isinstance(parameter, SymbolicTensor) or parameter.is_meta)
    )
    if model.can_generate() and "generation_config" not in arguments.for_class:
        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(
                place.name, **place.arguments
            )
        except OSError:  # no file: transformers falls back to the defaults of the class
            model.generation_config = transformers.GenerationConfig.from_model_config(model.config)
    model.name_or_path = model.config._name_or_path = place.name
    placement = Placement(model, arguments.settings)
    attach(model, placement, checkpoint, kept=new, with_device_map=arguments.has_device_map)
    return (model, info) if arguments.loading_info else model


def _refuse_adapter(place: Place) -> None:
    """Refuses a directory with an adapter of PEFT, which transformers would apply."""
    directory = place.weights if os.path.isdir(place.weights) else os.path.dirname(place.weights)
    if os.path.isfile(os.path.join(directory, "adapter_config.json")):
        raise ConfigurationError(
            f"{place.name} has an adapter of PEFT (adapter_config.json): load the base model with "
            "from_pretrained, and then the adapter with peft.PeftModel.from_pretrained(model, "
            f'"{place.name}")'
        )


def plan_checkpoint(
    place: Place, checkpoint: _native.Checkpoint, config: Config
) -> tuple[int, dict[str, Any], list[Divided], int | None] | None:
    """Plans the streaming of a checkpoint of transformers.

    Returns:
        The budget in bytes, the plan of the native module, the parameters that are divided, and the
        number of experts that a layer uses for a token, or ``None`` if it is unknown. ``None`` if
        ``place`` is not that of a transformers model, if the model cannot be built, or if its
        weights would have to be converted.

    Raises:
        BudgetError: The budget is too small.
    """
    directory = place.weights if os.path.isdir(place.weights) else os.path.dirname(place.weights)
    on_hub = "revision" in place.arguments
    if not on_hub and not os.path.isfile(os.path.join(directory, "config.json")):
        return None
    try:
        import transformers

        # Without this argument, transformers asks the user whether to run code of the checkpoint.
        arguments = Arguments.of(None, config, {"trust_remote_code": False})
        model, _ = _build(transformers, place, checkpoint, None, arguments)
        planned = plan_model(model, config, checkpoint)
        return planned and (*planned, _experts_per_token(model.config))
    except BudgetError:
        raise
    except Exception as error:  # the constructors of models raise errors of any class
        _log.info("%s: planned from the names of tensors: %s", place.name, error)
        return None


def _experts_per_token(model_config: Any) -> int | None:
    """Returns how many experts a layer uses for a token. ``None`` if the config does not say."""
    try:
        chosen = getattr(model_config.get_text_config(), "num_experts_per_tok", None)
    except ValueError:  # the config has several text configs
        return None
    return chosen if isinstance(chosen, int) else None


def _build(
    transformers: Any,
    place: Place,
    checkpoint: _native.Checkpoint,
    model_class: type[Any] | None,
    arguments: Arguments,
) -> tuple[Any, dict[str, Any]]:
    """Builds a model whose parameters are symbolic tensors of a checkpoint.

    Returns:
        The model, and the loading information of transformers.
    """
    builder = Builder(checkpoint)
    loaded_class, model_config, for_class = class_and_config(
        transformers, place, model_class, arguments
    )
    with marked_memory():
        model, info = loaded_class.from_pretrained(
            None,
            config=model_config,
            state_dict={name: builder.symbolic(name) for name in checkpoint.names()},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **for_class,
        )
    fill_buffers(model)
    # The class that the files name has the weights that the files have.
    files = ", ".join(str(path) for path, _, _ in checkpoint.files())
    if (index := _index(place.weights)) is not None:
        files = f"the shards that the index {index} lists ({files})"
    check(
        files,
        info,
        model,
        model_class is not None,
        lambda: names_without_arguments(transformers, place, model_class, arguments),
    )
    return model, info


def _index(weights: str) -> str | None:
    """Returns the path of the shard index of a checkpoint, if it has one."""
    if os.path.isdir(weights):
        weights = os.fspath(_native.checkpoint_file(weights))
    return weights if os.path.basename(weights).endswith(".json") else None


def _check_memory() -> None:
    """Raises if little memory is available, before transformers uses some of it."""
    available = _native.available_memory()
    needed = HEADROOM + (0 if "transformers" in sys.modules else TRANSFORMERS_BYTES)
    if available is not None and available < needed:
        raise BudgetError(
            f"not enough memory: {available >> 20} MiB are available, but transformers, "
            f"activations and code need {needed >> 20} MiB besides the weights; free memory, or "
            "raise the memory limit of this process"
        )
