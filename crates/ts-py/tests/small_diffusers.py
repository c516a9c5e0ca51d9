# SPDX-License-Identifier: MIT OR Apache-2.0
"""Finds small configurations and inputs of the model classes of diffusers.

The arguments of a class are its defaults with fewer layers and heads, and smaller widths. Inputs
follow from the signature of its forward and from its configuration.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import diffusers
import torch
from known_diffusers import KNOWN
from small_models import MOST_PARAMETERS, Excluded, SmallModel, said, wave

#: The largest values of some arguments. The first pattern that is found counts.
LIMITS = (
    (re.compile(r"head_dim|axes|rope|theta|patch|kernel|^(in|out|latent|z)_|eps|scale|freq"), None),
    (re.compile(r"heads|experts$"), 2),
    (re.compile(r"layers|depth|blocks$|num_res"), 2),
    (re.compile(r"vocab|num_embeds|codebook_size"), 128),
    (re.compile(r"sample_(size|height|width)"), 16),
    (re.compile(r"(dim|dims|channels|size|width|features|embeds)$|^(dim|hidden|inner|mlp)"), 32),
)
BATCH = 2
TOKENS = 6
_CONTEXT = ["encoder_hidden_states", "timestep", "pooled_projections", "img_ids", "txt_ids"]
#: Sets of optional inputs to try, if a forward has them.
OPTIONAL = (
    [],
    [*_CONTEXT, "img_shapes", "encoder_hidden_states_mask"],
    [*_CONTEXT, "guidance", "img_shapes", "encoder_hidden_states_mask"],
    [*_CONTEXT, "image_rotary_emb", "class_labels"],
    [*_CONTEXT, "num_frames", "height", "width"],
    [*_CONTEXT, "added_cond_kwargs"],
    ["class_labels", "timestep"],
)


def class_names() -> list[str]:
    """Returns the names of all model classes of diffusers."""
    names = []
    for name in sorted(dir(diffusers)):
        try:
            found = getattr(diffusers, name)
        except (ImportError, RuntimeError):  # it needs another library
            continue
        if inspect.isclass(found) and issubclass(found, diffusers.ModelMixin):
            names.append(name)
    return [name for name in names if name != "ModelMixin"]


def small_diffusers(name: str) -> SmallModel:
    """Returns a small model with random weights.

    Raises:
        Excluded: With the reason of each attempt.
    """
    model_class = getattr(diffusers, name)
    if name in KNOWN:
        arguments, inputs = KNOWN[name]()
        torch.manual_seed(0)
        return SmallModel(model_class(**arguments).eval(), inputs)
    reasons = []
    for divide_heads in (True, False):
        try:
            model = build(model_class, divide_heads)
        except Exception as error:
            reasons.append(said(error))
            continue
        tried = set()
        for inputs in itertools.islice(candidates(model), 1000):
            try:
                torch.manual_seed(0)
                with torch.no_grad():
                    model(**inputs)
            except Exception as error:
                tried.add(said(error))
            else:
                return SmallModel(model, inputs)
        reasons.append(min(tried, default="no inputs are known"))
    raise Excluded("; ".join(reasons))


def build(model_class: Any, divide_heads: bool) -> Any:
    """Builds a model of a class."""
    arguments = {}
    for name, parameter in inspect.signature(model_class.__init__).parameters.items():
        small = _smaller(name, parameter.default)
        if "heads" in name and not divide_heads:
            small = parameter.default
        if small != parameter.default:
            arguments[name] = small
    arguments |= _related(inspect.signature(model_class.__init__).parameters, arguments)
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(**arguments).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f}M parameters")
    torch.manual_seed(0)
    return model_class(**arguments).eval()


def _related(parameters: Any, small: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that others determine."""

    def value(name: str) -> Any:
        return small.get(name, parameters[name].default if name in parameters else None)

    found: dict[str, Any] = {}
    heads, head = value("num_attention_heads"), value("attention_head_dim")
    if "caption_projection_dim" in parameters and type(head) is int:
        found["caption_projection_dim"] = heads * head
    heads, head = value("num_cross_attention_heads"), value("cross_attention_head_dim")
    if heads is not None and head is not None:
        found["cross_attention_dim"] = heads * head
    if "block_out_channels" in parameters and value("attention_head_dim") == 64:
        found["attention_head_dim"] = 8
    return found


def _smaller(name: str, value: Any) -> Any:
    if isinstance(value, tuple | list) and value and all(type(n) is int for n in value):
        most = max(value)
        limit = _limit(name)
        if limit is None or most <= limit:
            return value
        # The smallest one is at least 32, and the ratios stay.
        divisor = max(min(value) // 32, 1) if limit >= 32 else 1
        return type(value)(n // divisor if divisor > 1 else min(n, limit) for n in value)
    if type(value) is not int or value <= 0:
        return value
    limit = _limit(name)
    return value if limit is None else min(value, limit)


def _limit(name: str) -> int | None:
    return next((limit for pattern, limit in LIMITS if pattern.search(name)), None)


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Yields possible inputs of a model."""
    config = dict(model.config)
    signature = inspect.signature(model.forward).parameters
    sizes = sorted({n for n in config.values() if type(n) is int and 1 < n <= 4096}, reverse=True)
    likely = [
        config.get(name)
        for name in (
            "joint_attention_dim",
            "cross_attention_dim",
            "caption_channels",
            "text_embed_dim",
            "text_dim",
            "caption_dim",
            "cap_feat_dim",
            "in_channels",
        )
    ]
    widths = list(dict.fromkeys(n for n in [*likely, *sizes] if type(n) is int))
    channels = [config.get(name) for name in ("in_channels", "latent_channels", "z_dim")]
    channels = [*(n for n in channels if type(n) is int), 3]
    size = config.get("sample_size")
    size = size if type(size) is int and size <= 64 else 16
    heads, head = config.get("num_attention_heads"), config.get("attention_head_dim")
    axes = config.get("axes_dims_rope") or config.get("axes_dims") or [0, 0, 0]
    for shape, width in itertools.product(_shapes(channels, size), widths):
        tokens = shape[1] if len(shape) == 3 else 16
        known: dict[str, Any] = {
            "sample": wave(*shape),
            "hidden_states": wave(*shape),
            "x": wave(*shape),
            "latents": wave(*shape),
            "timestep": torch.tensor([7.0] * BATCH),
            "timesteps": torch.tensor([7] * BATCH),
            "t": torch.tensor([7.0] * BATCH),
            "r_timestep": torch.tensor([3.0] * BATCH),
            "timestep_r": torch.tensor([3.0] * BATCH),
            "encoder_hidden_states": wave(BATCH, TOKENS, width),
            "text_hidden_states": wave(BATCH, TOKENS, width),
            "encoder_attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.long),
            "text_attention_mask": torch.ones(BATCH, TOKENS, dtype=torch.long),
            "encoder_hidden_states_mask": torch.ones(BATCH, TOKENS, dtype=torch.bool),
            "pooled_projections": wave(BATCH, config.get("pooled_projection_dim") or width),
            "proj_embedding": wave(BATCH, width),
            "img_ids": torch.zeros(tokens, len(axes)),
            "txt_ids": torch.zeros(TOKENS, len(axes)),
            "guidance": torch.tensor([3.0] * BATCH),
            "class_labels": torch.tensor([1] * BATCH),
            "original_size": torch.tensor([[16.0, 16.0]] * BATCH),
            "target_size": torch.tensor([[16.0, 16.0]] * BATCH),
            "crop_coords": torch.tensor([[0.0, 0.0]] * BATCH),
            "controlnet_cond": wave(BATCH, 3, 8 * shape[-1], 8 * shape[-1]),
            "fps": torch.tensor([8] * BATCH),
            "img_shapes": [[(1, 4, 4)]] * BATCH,
            "added_time_ids": wave(BATCH, 3),
            "global_hidden_states": wave(BATCH, 1, width),
            "num_frames": 2,
            "height": 4,
            "width": 4,
            "image_rotary_emb": None,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            "scale_factor": (1.0, 1.0, 1.0),
        }
        if type(heads) is int and type(head) is int:
            known["image_rotary_emb"] = (wave(tokens, head), wave(tokens, head))
        required = [
            name
            for name, parameter in signature.items()
            if parameter.default is parameter.empty and parameter.kind not in (2, 4)
        ]
        for more in OPTIONAL:
            names = [*required, *more]
            own = [name for name in dict.fromkeys(names) if name in signature]
            if own and all(name in known for name in own):
                yield {name: known[name] for name in own}


def _shapes(channels: list[int], size: int) -> Iterator[tuple[int, ...]]:
    for own in dict.fromkeys(channels):
        yield BATCH, own, size, size
        yield BATCH, 16, own
        yield BATCH, 32, own
        yield BATCH, own, 2, size, size
        yield BATCH, own, 5, 16, 16
        yield BATCH, own, 32, 32
        yield BATCH, own, 64
        yield BATCH, 2, own, size, size
