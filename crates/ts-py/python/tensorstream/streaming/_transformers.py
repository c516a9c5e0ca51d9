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
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    MissingTensorError,
    ModelError,
)
from ._arguments import Arguments
from ._attach import attach
from ._builder import Builder
from ._offload import Path, plan_model
from ._pipelines import load_with_its_library, sentence_transformer_name
from ._placement import Placement
from ._places import Place, find
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
        device: Shorthand for ``Config(device=...)``.
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
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            "from_pretrained needs transformers 5: pip install 'tensorstream[transformers]'"
        ) from error
    model, info = _build(transformers, place, checkpoint, model_class, arguments)
    # The class has initialised these, such as new heads, and tables of sines that no file has.
    new = frozenset(
        id(parameter)
        for parameter in model.parameters()
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
    model_config, for_class = _model_config(transformers, place, model_class, arguments)
    if getattr(model_config, "quantization_config", None) is not None:
        raise ModelError(_quantised(place, model_config.quantization_config))
    if model_class is None:
        loaded_class = _named_class(transformers, model_config, place, arguments)
    elif hasattr(model_class, "from_config"):
        loaded_class, model_config = _chosen_class(model_class, model_config, place, arguments)
    else:
        loaded_class = model_class
    model, info = loaded_class.from_pretrained(
        None,
        config=model_config,
        state_dict={name: builder.symbolic(name) for name in checkpoint.names()},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **for_class,
    )
    # The class that the files name has the weights that the files have.
    _check(checkpoint, info, model, new_heads=model_class is not None)
    return model, info


def _model_config(
    transformers: Any, place: Place, model_class: type[Any] | None, arguments: Arguments
) -> tuple[Any, dict[str, Any]]:
    """Returns the configuration of the model, and the arguments for its class."""
    given = arguments.model_config
    if given is not None and not isinstance(given, str | os.PathLike):
        return given, {**arguments.for_class, **arguments.for_config}
    # An automatic class has a private `_model_mapping`, but no configuration of its own.
    config_class = getattr(model_class, "config_class", None) or transformers.AutoConfig
    options = dict(arguments.for_config)
    if config_class is transformers.AutoConfig:
        options |= {
            "trust_remote_code": arguments.trust_remote_code,
            "code_revision": arguments.code_revision,
        }
    place_arguments = place.arguments
    if given is not None:  # it may be on the Hub, too, but at another place
        names = ("cache_dir", "local_files_only", "token")
        place_arguments = {name: arguments.hub[name] for name in names if name in arguments.hub}
    name = place.name if given is None else given
    try:
        model_config, rest = config_class.from_pretrained(
            name, return_unused_kwargs=True, **place_arguments, **options
        )
    # transformers raises errors of these classes for files that are missing or damaged.
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{name}: transformers cannot read the configuration of the model: {error}"
        ) from error
    return model_config, {**arguments.for_class, **rest}


def _quantised(place: Place, quantization: Any) -> str:
    """Returns the message for a checkpoint with quantised weights."""
    if not isinstance(quantization, dict):
        quantization = vars(quantization)
    method = getattr(quantization.get("quant_method"), "value", quantization.get("quant_method"))
    return (
        f"cannot stream {place.name}: its weights are quantised ({method}), which is not supported "
        "yet; use the checkpoint in bfloat16 or float16"
    )


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


def _named_class(transformers: Any, model_config: Any, place: Place, arguments: Arguments) -> Any:
    """Returns the class that the configuration names, of transformers or of the checkpoint."""
    named = model_config.architectures or []
    own = {
        reference.rpartition(".")[2]: reference
        for reference in (getattr(model_config, "auto_map", None) or {}).values()
        if isinstance(reference, str)
    }
    for name in named:
        if name in own and arguments.trust_remote_code:
            return _class_of_checkpoint(own[name], place, arguments)
        model_class = getattr(transformers, name, None)
        if model_class is not None:
            return model_class
    advice = "pass `model_class`"
    if own:
        advice += ", or `trust_remote_code=True` to run the code of the checkpoint"
    raise ConfigurationError(
        f"{place.name}: transformers has no class for the architectures of the configuration "
        f"({model_config.architectures}); {advice}"
    )


def _chosen_class(
    auto_class: Any, model_config: Any, place: Place, arguments: Arguments
) -> tuple[Any, Any]:
    """Returns the class that an automatic class chooses, and the configuration for it."""
    own = (getattr(model_config, "auto_map", None) or {}).get(auto_class.__name__)
    if own is not None and arguments.trust_remote_code:
        return _class_of_checkpoint(own, place, arguments), model_config
    with torch.device("meta"):
        chosen = auto_class.from_config(model_config, trust_remote_code=arguments.trust_remote_code)
    # The class may be that of the text model of a model for several modalities.
    if not isinstance(model_config, type(chosen.config)):
        model_config = model_config.get_text_config()
    return type(chosen), model_config


def _class_of_checkpoint(reference: str, place: Place, arguments: Arguments) -> Any:
    """Returns a class that is defined by code of the checkpoint. Runs this code."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(
        reference, place.name, code_revision=arguments.code_revision, **place.arguments
    )


def _check(
    checkpoint: _native.Checkpoint, info: dict[str, Any], model: Any, new_heads: bool
) -> None:
    """Raises for weights that transformers would warn about and initialize randomly.

    With ``new_heads``, the weights of a new head are not errors: transformers has initialized them,
    and they stay in memory. Those of a pooler never are, because few checkpoints have one.
    """
    files = ", ".join(str(path) for path, _, _ in checkpoint.files())
    if info["mismatched_keys"]:
        name, there, wanted = sorted(info["mismatched_keys"])[0]
        raise CheckpointError(
            f"{files}: tensor `{name}` has shape {list(there)}, but the model has {list(wanted)}"
        )
    missing = sorted(
        name for name in info["missing_keys"] if not _is_of_new_head(name, model, info, new_heads)
    )
    if missing:
        raise MissingTensorError(
            f"the model needs tensors that are not in {files}: "
            + ", ".join(missing[:5])
            + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        )
    if info["error_msgs"]:
        raise CheckpointError(f"cannot load {files}: {'; '.join(info['error_msgs'])}")


def _is_of_new_head(name: str, model: Any, info: dict[str, Any], new_heads: bool) -> bool:
    """Returns whether a parameter belongs to a head, or a pooler, that the checkpoint lacks."""
    base = model.base_model_prefix
    inner = name.removeprefix(f"{base}.")
    head = inner.partition(".")[0]
    is_outside = inner == name and isinstance(getattr(model, base, None), torch.nn.Module)
    if not (is_outside and new_heads) and head != "pooler":
        return False
    whole = name[: len(name) - len(inner)] + head
    missing = set(info["missing_keys"])
    own = (each for each, _ in model.named_parameters() if each.startswith(f"{whole}."))
    return all(each in missing for each in own)
