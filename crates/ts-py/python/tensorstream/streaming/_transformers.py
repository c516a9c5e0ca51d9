# SPDX-License-Identifier: MIT OR Apache-2.0
"""from_pretrained: a transformers model whose weights are never materialised.

transformers builds the model itself, by its public ``from_pretrained(None, config=, state_dict=)``:
the state dict holds tensors that know their place in the files and not their bytes. So renamings,
ties, initialisation of what no checkpoint has, and the reference's choice between mapping and
copying are transformers' own.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .. import _native
from ..config import HEADROOM, Config, expanded
from ..errors import BudgetError, CheckpointError, ConfigurationError, MissingTensorError
from ._builder import Builder
from ._offload import Path, attach, checked

#: Memory that importing transformers and building a model take at least.
TRANSFORMERS_BYTES = 96 << 20


def from_pretrained(
    path: Path,
    *,
    budget: int | str | None = None,
    config: Config | None = None,
    model_class: type[Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Loads a transformers model that streams its weights from ``path`` under ``budget``.

    The result is that of the class's own ``from_pretrained(path)``, except that its parameters are
    frozen and not in memory. Outputs are bit-identical.

    Args:
        path: A directory that ``save_pretrained`` wrote: ``config.json`` and safetensors files.
        budget: The memory for weights, as of ``Config``.
        config: Further settings. Not together with ``budget``.
        model_class: The class to load; by default the one that ``config.json`` names.
        kwargs: Arguments of the class's ``from_pretrained``, such as ``attn_implementation``.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at ``path``.
        MissingTensorError: The checkpoint lacks a parameter.
        CheckpointError: The checkpoint does not fit the model, or is damaged.
        BudgetError: The budget is too small, or there is too little memory.
        ConfigurationError: A setting is invalid, or transformers is not installed.

    Examples:
        >>> import tensorstream as ts
        >>> model = ts.from_pretrained("path/to/checkpoint", budget="600MiB")  # doctest: +SKIP
        >>> output = model.generate(ids)  # doctest: +SKIP
    """
    if budget is not None and config is not None:
        raise ConfigurationError("give the budget in `config`, or `budget` alone")
    settings = Config(budget=budget) if config is None else checked(config)
    path = expanded(path)
    checkpoint = _native.Checkpoint(path)
    if "dtype" not in kwargs and "torch_dtype" not in kwargs:
        _refuse_at_once(checkpoint)
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            "from_pretrained needs transformers 5: pip install 'tensorstream[transformers]'"
        ) from error
    builder = Builder(checkpoint)
    path = os.fspath(path)
    model_config = kwargs.pop("model_config", None) or transformers.AutoConfig.from_pretrained(path)
    loaded_class: Any = model_class or _named_class(transformers, model_config, path)
    model, info = loaded_class.from_pretrained(
        None,
        config=model_config,
        state_dict={name: builder.stand_in(name) for name in checkpoint.names()},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **kwargs,
    )
    _check(checkpoint, info)
    if model.can_generate():
        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(path)
        except OSError:  # the class's own defaults, as transformers falls back to
            model.generation_config = transformers.GenerationConfig.from_model_config(model.config)
    model.name_or_path = model.config._name_or_path = path
    return attach(model, settings, checkpoint)


def _refuse_at_once(checkpoint: _native.Checkpoint) -> None:
    """Refuses where there is no memory for the largest tensor, before transformers and the model
    take theirs.
    """

    def size(name: str) -> int:
        return sum(length for _, _, length in checkpoint.entry(name)[2])

    largest = max(checkpoint.names(), key=size, default=None)
    if largest is None:
        return
    needed, available = size(largest), _native.available_memory()
    rest = HEADROOM // 2 + (0 if "transformers" in sys.modules else TRANSFORMERS_BYTES)
    if available is not None and available < needed + rest:
        raise BudgetError(
            f"{available >> 20} MiB of memory are available; tensor `{largest}` alone needs "
            f"{needed >> 20} MiB, and the rest of the process {rest >> 20} MiB more; raise the "
            "memory limit of this process"
        )


def _named_class(transformers: Any, model_config: Any, path: str) -> Any:
    for name in model_config.architectures or []:
        model_class = getattr(transformers, name, None)
        if model_class is not None:
            return model_class
    raise ConfigurationError(
        f"{path}: config.json names no model class of transformers ({model_config.architectures}); "
        "give `model_class`"
    )


def _check(checkpoint: _native.Checkpoint, info: dict[str, Any]) -> None:
    """What transformers would warn of and fill with random numbers is an error here."""
    files = ", ".join(str(path) for path, _, _ in checkpoint.files())
    if info["mismatched_keys"]:
        name, there, wanted = sorted(info["mismatched_keys"])[0]
        raise CheckpointError(
            f"{files}: tensor `{name}` has shape {list(there)}, the model has {list(wanted)}"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise MissingTensorError(
            f"{len(missing)} tensors of the model are not in {files}: {', '.join(missing[:5])}"
            + (" ..." if len(missing) > 5 else "")
        )
    if info["error_msgs"]:
        raise CheckpointError(f"{files}: {'; '.join(info['error_msgs'])}")
