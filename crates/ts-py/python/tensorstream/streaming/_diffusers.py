# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loads models of diffusers without materializing their weights."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .. import _native
from ..config import expanded
from ..errors import CheckpointError, ConfigurationError, MissingTensorError, ModelError
from ..files._places import Place, find
from ._arguments import Arguments, dtype_of
from ._attach import attach
from ._builder import Builder
from ._offload import Path
from ._placement import Placement


def load_diffusers(model_class: Any, path: Path, arguments: Arguments) -> Any:
    """Loads a model of diffusers that streams its weights.

    The model is the one that the class's own ``from_pretrained(path)`` returns: weights have the
    dtype of the argument ``torch_dtype``, else of the parameters as the class creates them.

    Args:
        model_class: The class, derived from ``ModelMixin``.
        path: The directory of the model, or its name on the Hub.
        arguments: The arguments of the call.

    Raises:
        The errors of ``from_pretrained``.
    """
    place = find(expanded(path), arguments.hub, arguments.variant)
    checkpoint = _native.Checkpoint(place.weights)
    dtype = dtype_of(arguments.for_class.get("dtype") or arguments.for_class.get("torch_dtype"))
    model = _build(model_class, place, checkpoint, dtype, arguments)
    model.register_to_config(_name_or_path=place.name)
    model.eval()
    placement = Placement(model, arguments.settings)
    attach(model, placement, checkpoint, with_device_map=arguments.has_device_map)
    if not arguments.loading_info:
        return model
    unexpected = sorted(set(checkpoint.names()) - set(model.state_dict()))
    info = {"missing_keys": [], "unexpected_keys": unexpected}
    return model, {**info, "mismatched_keys": [], "error_msgs": []}


def _build(
    model_class: Any,
    place: Place,
    checkpoint: _native.Checkpoint,
    dtype: torch.dtype | None,
    arguments: Arguments,
) -> Any:
    """Builds a model whose parameters are symbolic tensors of a checkpoint."""
    try:
        from accelerate import init_empty_weights
    except ImportError as error:
        raise ConfigurationError(
            "loading a model of diffusers needs accelerate: pip install 'tensorstream[diffusers]'"
        ) from error
    config, rest = model_class.load_config(
        place.name, return_unused_kwargs=True, **place.arguments, **arguments.for_config
    )
    if config.get("quantization_config") is not None:
        method = config["quantization_config"].get("quant_method")
        raise ModelError(
            f"cannot stream {place.name}: its weights are quantised ({method}), which is not "
            "supported yet; use the checkpoint in bfloat16 or float16"
        )
    with _default_dtype(dtype), init_empty_weights():
        model = model_class.from_config(config, **rest)
    builder = Builder(checkpoint)
    state: dict[str, Any] = {name: builder.symbolic(name) for name in checkpoint.names()}
    model._fix_state_dict_keys_on_load(state)
    in_float32 = model_class._keep_in_fp32_modules or ()
    in_float32 = (in_float32,) if isinstance(in_float32, str) else tuple(in_float32)
    files = ", ".join(str(file) for file, _, _ in checkpoint.files())
    loaded = {}
    missing = []
    for name, old in model.state_dict().items():
        if name not in state:
            missing.append(name)
            continue
        tensor = state[name]
        if tensor.shape != old.shape:
            raise CheckpointError(
                f"{files}: tensor `{name}` has shape {list(tensor.shape)}, but the model has "
                f"{list(old.shape)}"
            )
        wanted = old.dtype
        if dtype is not None:
            keeps = any(part in in_float32 for part in name.split("."))
            wanted = torch.float32 if keeps else dtype
            wanted = wanted if tensor.is_floating_point() else tensor.dtype
        loaded[name] = tensor if tensor.dtype == wanted else tensor.to(wanted)
    if missing:
        raise MissingTensorError(
            f"the model needs tensors that are not in {files}: " + ", ".join(sorted(missing)[:5])
        )
    model.load_state_dict(loaded, assign=True)
    return model


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Any:
    """Creates parameters with a dtype, as diffusers does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
