# SPDX-License-Identifier: MIT OR Apache-2.0
"""Chooses the class of transformers for a checkpoint, and checks what it has loaded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ..errors import CheckpointError, ConfigurationError, MissingTensorError, ModelError
from ..files._places import Place
from . import _tree as tree
from ._arguments import Arguments


def transformers_module() -> Any:
    """Imports transformers.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            "from_pretrained needs transformers 5: pip install 'tensorstream[transformers]'"
        ) from error
    return transformers


def class_and_config(
    transformers: Any, place: Place, model_class: type[Any] | None, arguments: Arguments
) -> tuple[Any, Any, dict[str, Any]]:
    """Chooses the class of a model.

    Args:
        transformers: The module.
        place: Where the configuration is.
        model_class: The class that the caller wants. An automatic one chooses the class. ``None``
            means the class that the configuration names.
        arguments: The arguments of the call.

    Returns:
        The class, its configuration, and arguments for its ``from_pretrained``.

    Raises:
        CheckpointError: The configuration cannot be read.
        ConfigurationError: transformers has no such class.
        ModelError: The weights are quantised.
    """
    model_config, for_class = _model_config(transformers, place, model_class, arguments)
    if getattr(model_config, "quantization_config", None) is not None:
        raise ModelError(_quantised(place, model_config.quantization_config))
    if model_class is None:
        chosen = _named_class(transformers, model_config, place, arguments)
    elif hasattr(model_class, "from_config"):
        chosen, model_config = _chosen_class(model_class, model_config, place, arguments)
    else:
        chosen = model_class
    return chosen, model_config, for_class


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


def names_without_arguments(
    transformers: Any, place: Place, model_class: type[Any] | None, arguments: Arguments
) -> set[str] | None:
    """Returns the names of the weights that the model has without the arguments of the call.

    Returns ``None`` if no argument can change what the model consists of.
    """
    chosen, model_config, for_class = class_and_config(transformers, place, model_class, arguments)
    if not arguments.for_config and not set(for_class) - set(arguments.for_class):
        return None
    plain = replace(arguments, for_config={})
    chosen, model_config, _ = class_and_config(transformers, place, model_class, plain)
    with torch.device("meta"):
        return set(chosen(model_config).state_dict())


@contextlib.contextmanager
def marked_memory() -> Iterator[None]:
    """Fills tensors that are made without values with a mark: NaN, or the largest number.

    transformers makes buffers that no file has in this way, and lets ``_init_weights`` fill them.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # a module whose stub lacks the attribute
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(before, warn_only=warns)


def fill_buffers(model: Any) -> None:
    """Gives buffers that ``_init_weights`` has not filled the values that the constructor gives.

    The model was built in ``marked_memory``.

    Raises:
        ModelError: The constructor gives no value either.
    """
    unfilled = {
        tree.joined(prefix, name): (module, name)
        for prefix, module in tree.named_modules(model)
        for name in module._non_persistent_buffers_set
        if _is_marked(module._buffers.get(name))
    }
    if not unfilled:
        return
    values: dict[str, torch.Tensor] = {}
    with contextlib.suppress(Exception):  # constructors raise errors of any class
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            values = dict(tree.named_buffers(type(model)(model.config), remove_duplicate=False))
    for qualified, (module, name) in unfilled.items():
        value, own = values.get(qualified), module._buffers[name]
        if value is None or value.is_meta or own is None or value.shape != own.shape:
            raise ModelError(
                f"buffer `{qualified}` of {type(module).__name__} has no value: the checkpoint "
                "does not have it, and `_init_weights` of the model does not fill it"
            )
        module._buffers[name] = value.to(own.dtype)


def _is_marked(buffer: torch.Tensor | None) -> bool:
    if buffer is None or buffer.is_meta or not buffer.numel() or type(buffer) is not torch.Tensor:
        return False
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.isnan().all())
    mark = True if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).max
    return bool((buffer == mark).all())


def check(
    files: str,
    info: dict[str, Any],
    model: Any,
    new_heads: bool,
    plain_names: Callable[[], set[str] | None] = lambda: None,
) -> None:
    """Raises for weights that transformers would warn about and initialize randomly.

    Args:
        files: The files of the checkpoint, for messages.
        info: The loading information of transformers.
        model: The model.
        new_heads: Whether the weights of a new head are no errors: transformers has initialized
            them. Those of a pooler never are, because few checkpoints have one.
        plain_names: Returns the names of the weights that the model has without the arguments of
            the call. What an argument adds is no error: transformers has initialized it, too.

    Raises:
        CheckpointError: A tensor has another shape than the model, or cannot be loaded.
        MissingTensorError: The checkpoint lacks weights.
    """
    if info["mismatched_keys"]:
        name, there, wanted = sorted(info["mismatched_keys"])[0]
        raise CheckpointError(
            f"{files}: tensor `{name}` has shape {list(there)}, but the model has {list(wanted)}"
        )
    missing = sorted(
        name for name in info["missing_keys"] if not _is_of_new_head(name, model, info, new_heads)
    )
    if missing:
        plain = plain_names()
        missing = [name for name in missing if plain is None or name in plain]
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
    own = (each for each, _ in tree.named_parameters(model) if each.startswith(f"{whole}."))
    return all(each in missing for each in own)
