# SPDX-License-Identifier: MIT OR Apache-2.0
"""Finds small configurations and inputs of the model types of transformers.

A configuration is the default one with fewer layers, a small vocabulary, and widths that are
divided by a common factor. Inputs follow from the signature of the model's forward.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

#: Maps model types to class names. The first mapping that has a type determines its class.
HEADS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)


@dataclass(frozen=True)
class Size:
    """How small to make a model."""

    #: The divisor of its widths.
    factor: int
    #: The most layers.
    layers: int = 4
    #: Whether to divide the numbers of heads too, so that heads keep their width.
    heads: bool = False

    def __str__(self) -> str:
        layers = f", {self.layers} layers" if self.layers < 1000 else ""
        return f"1/{self.factor}{' of the heads' if self.heads else ''}{layers}"


#: The sizes to try, in this order. Some models need the default number of layers, or full heads.
SIZES = (
    Size(16),
    Size(16, heads=True),
    Size(8),
    Size(32, layers=1000),
    Size(16, layers=1000),
    Size(4),
    Size(4, heads=True),
    Size(1),
    Size(1, layers=1000),
)
VOCABULARY = 512
#: The largest model to run, in parameters.
MOST_PARAMETERS = 60_000_000
#: How long to look for a configuration and inputs, in seconds.
SEARCH_S = 20

#: The largest values of some fields. The first pattern that is found counts.
LIMITS = (
    (re.compile(r"(^|_)vocab_size"), VOCABULARY),
    (re.compile(r"(num|n)_.*experts$"), 8),
    (re.compile(r"^n_groups?$|^num_expert_group$"), 2),
    (re.compile(r"topk_group"), 1),
    (re.compile(r"experts_per_tok|top_k|topk"), 2),
    (re.compile(r"^depths$"), 2),
)
_LAYERS = re.compile(r"_layers$|(num|n)_.*blocks$|^(n_layer|layers|depth|num_blocks)$")
_HEADS = re.compile(r"(num|n)_.*heads$|^n_heads?$|attention_heads$")
_WIDTH = re.compile(
    r"(^|_)(d_model|d_ff|d_kv|d_inner|n_embd|n_inner|dim|width|embed|ffn|rank)$"
    r"|(hidden|intermediate|ffn|embed|embedding|inner|model|head|proj|projection|output|mlp"
    r"|latent|bottleneck|layer_norm|state|fusion|neck|memory|reassemble|adapter|attention)"
    r".*_(size|sizes|dim|dims|channels|rank|width)$"
    r"|(_dim|_dims|_rank|_width|_channels|hidden_sizes|dims|channels|embed_dims)$"
    r"|^(d|dim)_"
)
#: Sizes that are no widths of layers.
_NO_WIDTH = re.compile(
    r"image|patch|window|kernel|stride|vocab|num_channels|in_chans|in_channels|input_channels"
    r"|chunk|^num_|max_|position|codebook_dim|mel|audio_channels|^channels$|patches|block_size"
    r"|temporal|type_|pool|spatial|expand|head_dim_ratio"
)
_SPECIAL = re.compile(r"(token|pad|bos|eos|sep|cls|mask|unk).*_(id|index|idx)$|token_ids?$")


def model_types() -> list[str]:
    """Returns all model types of transformers."""
    return sorted(CONFIG_MAPPING_NAMES)


def class_name(model_type: str) -> str | None:
    """Returns the name of the model class of a type, or ``None`` if there is none."""
    for head in HEADS:
        found = getattr(modeling_auto, head, {}).get(model_type)
        if isinstance(found, list | tuple):
            found = found[0]
        if found is not None:
            return found
    return _class_of_part(model_type)


def _class_of_part(model_type: str) -> str | None:
    """Returns the class of a type that is only part of other models, such as a vision tower."""
    config_class = CONFIG_MAPPING[model_type]
    package = config_class.__module__.rpartition(".")[0]
    for name in dir(sys.modules.get(package) or importlib.import_module(package)):
        try:
            found = getattr(hf, name, None)
        except ImportError:  # a processor that needs another library
            continue
        if name.endswith("PreTrainedModel"):
            continue
        if inspect.isclass(found) and getattr(found, "config_class", None) is config_class:
            return name
    return None


def overrides(config: Any, size: Size) -> dict[str, Any]:
    """Returns the arguments that make a configuration small."""
    own: dict[str, Any] = {}
    special = VOCABULARY
    for name, value in sorted(vars(config).items()):
        if name.startswith("_") or isinstance(value, bool) or name in ("id2label", "label2id"):
            continue
        if isinstance(value, hf.PretrainedConfig):
            own[name] = {"model_type": value.model_type, **overrides(value, size)}
        elif isinstance(value, dict) and "mrope_section" in value:
            sections = [max(n // size.factor, 1) for n in value["mrope_section"]]
            own[name] = {**value, "mrope_section": sections}
        elif _SPECIAL.search(name) and isinstance(value, int) and value >= VOCABULARY:
            special -= 1
            own[name] = special
        elif isinstance(value, int) and value > 0:
            small = _smaller(name, value, size)
            if small != value:
                own[name] = small
        elif isinstance(value, list | tuple) and value and all(type(n) is int for n in value):
            small_list = [_smaller(name, n, size) for n in value]
            if small_list != list(value) and not _LAYERS.search(name):
                own[name] = type(value)(small_list)
    return own


def _smaller(name: str, value: int, size: Size) -> int:
    """Returns a smaller value of a field of a configuration, or the same value."""
    for pattern, limit in LIMITS:
        if pattern.search(name):
            return min(value, limit)
    if name.endswith("feat_extract_layers"):  # the length of a list
        return value
    if _LAYERS.search(name):
        return min(value, size.layers)
    if _HEADS.search(name):
        return max(value // size.factor, 1) if size.heads else value
    if _WIDTH.search(name) and not _NO_WIDTH.search(name) and value >= 16:
        return max(value // size.factor, 4)
    return value


@dataclass
class SmallModel:
    """A model in memory, and inputs that it accepts."""

    model: torch.nn.Module
    inputs: dict[str, torch.Tensor]


class Excluded(Exception):
    """No small configuration or no inputs were found."""


def small_model(model_type: str) -> SmallModel:
    """Returns a small model with random weights.

    Raises:
        Excluded: With the reason of each attempt.
    """
    try:
        name = class_name(model_type)
    except ImportError as error:  # its configuration needs another library
        raise Excluded(said(error)) from error
    if name is None:
        raise Excluded("transformers has no class for it alone")
    reasons: list[str] = []
    end = time.monotonic() + SEARCH_S
    for size in SIZES:
        if time.monotonic() > end:
            break
        try:
            model = build(model_type, name, size)
        except Exception as error:
            reasons.append(f"{size}: {said(error)}")
            continue
        for inputs in candidates(model):
            try:
                with torch.no_grad():
                    model(**inputs)
            except Exception as error:
                reasons.append(f"{size}, {'+'.join(inputs)}: {said(error)}")
            else:
                return SmallModel(model, inputs)
    raise Excluded("; ".join(reasons))


def build(model_type: str, name: str, size: Size) -> torch.nn.Module:
    """Builds a model of a size."""
    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**overrides(config_class(), size))
    model_class = getattr(hf, name)
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f}M parameters")
    torch.manual_seed(0)
    return model_class(config).eval()


def said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200]


def ids(length: int = 12, batch: int = 2) -> torch.Tensor:
    """Returns tokens that are not special."""
    return (torch.arange(batch * length).reshape(batch, length) * 7 + 5) % 97 + 5


def wave(*shape: int) -> torch.Tensor:
    """Returns a tensor of smooth values between -1 and 1."""
    count = 1
    for n in shape:
        count *= n
    return torch.sin(torch.arange(count) * 0.37).reshape(shape)


def _find(config: Any, *names: str) -> Any:
    """Returns the first attribute with one of these names, also of a part of the configuration."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for part in vars(config).values():
        if isinstance(part, hf.PretrainedConfig):
            value = _find(part, *names)
            if value is not None:
                return value
    return None


def candidates(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yields possible inputs of a model, the simplest first."""
    config: Any = model.config
    signature = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    main = list(main) if isinstance(main, list | tuple) else [main]
    required = [n for n, p in signature.items() if p.default is p.empty and p.kind not in (2, 4)]
    size = _find(config, "image_size", "img_size") or 64
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = _find(config, "num_channels", "in_channels", "in_chans") or 3
    mel = _find(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels") or 80
    frames = _find(config, "num_frames") or 4
    made: dict[str, list[torch.Tensor]] = {
        "input_ids": [ids()],
        "decoder_input_ids": [ids(6)],
        "attention_mask": [torch.ones(2, 12, dtype=torch.long)],
        "bbox": [torch.tensor([1, 2, 5, 9]).expand(2, 12, 4).contiguous()],
        "pixel_values": [
            wave(2, channels, height, width),
            wave(2, channels, 64, 64),
            wave(2, channels, 224, 224),
            wave(2, frames, channels, height, width),
        ],
        "pixel_values_videos": [
            wave(2, frames, channels, height, width),
            wave(2, channels, frames, height, width),
        ],
        "input_values": [wave(2, 8000), wave(2, 1, 8000), wave(2, 1024, 128)],
        "audio_values": [wave(2, 1, 8000)],
        "input_features": [
            wave(2, mel, 100),
            wave(2, 100, mel),
            wave(2, mel, 3000),
            wave(2, 100, 160),
            wave(2, 1, 1001, 64),
        ],
    }

    def all_of(names: list[str]) -> Iterator[dict[str, torch.Tensor]]:
        names = [n for n in dict.fromkeys(names) if n in signature]
        if not names or any(n not in made for n in names):
            return
        for index in range(max(len(made[n]) for n in names)):
            yield {n: made[n][min(index, len(made[n]) - 1)] for n in names}

    more: list[list[str]] = [
        [],
        ["decoder_input_ids"],
        ["bbox"],
        ["pixel_values"],
        ["input_ids"],
        ["input_ids", "pixel_values"],
        ["input_ids", "bbox", "pixel_values"],
        ["input_ids", "attention_mask"],
        ["input_ids", "attention_mask", "pixel_values"],
        ["input_ids", "input_features"],
        ["input_ids", "pixel_values", "decoder_input_ids"],
    ]
    seen = set()
    for extra in more:
        for inputs in all_of([*main, *required, *extra]):
            key = tuple((n, tuple(t.shape)) for n, t in inputs.items())
            if key not in seen:
                seen.add(key)
                yield inputs
