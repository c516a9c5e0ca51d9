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

from .. import _native
from ..budget import Budget
from ..config import HEADROOM, Config, expanded
from ..errors import (
    BudgetError,
    CheckpointError,
    ConfigurationError,
    MissingTensorError,
)
from ._builder import Builder
from ._offload import Path, attach, checked, plan_model
from ._weights import Divided

_log = logging.getLogger("tensorstream")

#: The least memory that importing transformers and building a model take, in bytes.
TRANSFORMERS_BYTES = 96 << 20


def from_pretrained(
    path: Path,
    *,
    budget: int | str | Budget | None = None,
    config: Config | None = None,
    model_class: type[Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Loads a transformers model that streams its weights from ``path`` under ``budget``.

    The model is the one that the class's own ``from_pretrained(path)`` returns, except that its
    parameters are frozen and not in memory. Outputs are bit-identical.

    Args:
        path: A directory that ``save_pretrained`` wrote: ``config.json`` and safetensors files.
        budget: Shorthand for ``Config(budget=...)``.
        config: The settings. Cannot be combined with ``budget``.
        model_class: The class to load. The default is the class that ``config.json`` names.
        kwargs: Arguments of the class's ``from_pretrained``, such as ``attn_implementation``.
            ``model_config`` replaces the configuration in ``config.json``.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at ``path``.
        CheckpointPermissionError: The process may not read the checkpoint, or write to the
            directory for converted tensors.
        MissingTensorError: The checkpoint lacks a parameter.
        CheckpointError: The checkpoint does not fit the model, or is damaged.
        ModelError: The model cannot be streamed.
        StorageError: Reading or writing failed.
        BudgetError: The budget is too small, or there is too little memory.
        ConfigurationError: A setting is invalid, or transformers is not installed.

    Examples:
        >>> import tensorstream as ts
        >>> model = ts.from_pretrained("path/to/checkpoint", budget="600MiB")  # doctest: +SKIP
        >>> output = model.generate(ids)  # doctest: +SKIP
    """
    if budget is not None and config is not None:
        raise ConfigurationError("cannot combine `budget` and `config`: set the budget in `config`")
    settings = Config(budget=budget) if config is None else checked(config)
    path = expanded(path)
    checkpoint = _native.Checkpoint(path)
    if "dtype" not in kwargs and "torch_dtype" not in kwargs:
        _check_memory()
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            "from_pretrained needs transformers 5: pip install 'tensorstream[transformers]'"
        ) from error
    path = os.fspath(path)
    model = _build(transformers, path, checkpoint, model_class, kwargs)
    if model.can_generate():
        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(path)
        except OSError:  # no file: transformers falls back to the defaults of the class
            model.generation_config = transformers.GenerationConfig.from_model_config(model.config)
    model.name_or_path = model.config._name_or_path = path
    return attach(model, settings, checkpoint)


def plan_checkpoint(
    path: Path, checkpoint: _native.Checkpoint, config: Config
) -> tuple[int, dict[str, Any], list[Divided], int | None] | None:
    """Plans the streaming of a checkpoint of transformers.

    Returns:
        The budget in bytes, the plan of the native module, the parameters that are divided, and the
        number of experts that a layer uses for a token, or ``None`` if it is unknown. ``None`` if
        ``path`` is not the directory of a transformers model, if the model cannot be built, or if
        its weights would have to be converted.

    Raises:
        BudgetError: The budget is too small.
    """
    if not os.path.isfile(os.path.join(os.fspath(path), "config.json")):
        return None
    try:
        import transformers

        path = os.fspath(path)
        # Without this argument, transformers asks the user whether to run code of the checkpoint.
        model_config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        model = _build(transformers, path, checkpoint, None, {"model_config": model_config})
        planned = plan_model(model, config, checkpoint)
        return planned and (*planned, _experts_per_token(model_config))
    except BudgetError:
        raise
    except Exception as error:  # the constructors of models raise errors of any class
        _log.info("%s: planned from the names of tensors: %s", path, error)
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
    path: str,
    checkpoint: _native.Checkpoint,
    model_class: type[Any] | None,
    kwargs: dict[str, Any],
) -> Any:
    """Builds a model whose parameters are symbolic tensors of a checkpoint."""
    builder = Builder(checkpoint)
    model_config = kwargs.pop("model_config", None) or transformers.AutoConfig.from_pretrained(path)
    loaded_class: Any = model_class or _named_class(transformers, model_config, path)
    model, info = loaded_class.from_pretrained(
        None,
        config=model_config,
        state_dict={name: builder.symbolic(name) for name in checkpoint.names()},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **kwargs,
    )
    _check(checkpoint, info)
    return model


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


def _named_class(transformers: Any, model_config: Any, path: str) -> Any:
    for name in model_config.architectures or []:
        model_class = getattr(transformers, name, None)
        if model_class is not None:
            return model_class
    raise ConfigurationError(
        f"{path}: transformers has no class for the architectures of the configuration "
        f"({model_config.architectures}); pass `model_class`"
    )


def _check(checkpoint: _native.Checkpoint, info: dict[str, Any]) -> None:
    """Raises for weights that transformers would warn about and initialize randomly."""
    files = ", ".join(str(path) for path, _, _ in checkpoint.files())
    if info["mismatched_keys"]:
        name, there, wanted = sorted(info["mismatched_keys"])[0]
        raise CheckpointError(
            f"{files}: tensor `{name}` has shape {list(there)}, but the model has {list(wanted)}"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise MissingTensorError(
            f"the model needs tensors that are not in {files}: "
            + ", ".join(missing[:5])
            + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        )
    if info["error_msgs"]:
        raise CheckpointError(f"cannot load {files}: {'; '.join(info['error_msgs'])}")
