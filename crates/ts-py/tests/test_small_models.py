# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams small models of some architectures. `cargo xtask models` streams all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorstream as ts
import torch
from exactness import check_exact
from small_diffusers import small_diffusers
from small_models import SmallModel, small_model

TYPES = [
    "blenderbot",
    "codegen",
    "cohere2",
    "convnext",
    "dinov2",
    "distilbert",
    "electra",
    "falcon",
    "gemma2",
    "glm4",
    "gpt_neox",
    "gptj",
    "granite",
    "hubert",
    "internvl",
    "levit",
    "marian",
    "mpnet",
    "olmo2",
    "opt",
    "paligemma",
    "phi3",
    "qwen2_vl",
    "roberta",
    "roformer",
    "segformer",
    "starcoder2",
    "swin",
    "xglm",
    "xlm",
]
CLASSES = [
    "AutoencoderKL",
    "FluxTransformer2DModel",
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def check(small: SmallModel, path: Path) -> None:
    small.model.save_pretrained(path)
    assert check_exact(path, type(small.model), lambda model: model(**small.inputs)), "it streamed"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", TYPES)
def test_transformers(model_type: str, tmp_path: Path) -> None:
    check(small_model(model_type), tmp_path / "model")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CLASSES)
def test_diffusers(name: str, tmp_path: Path) -> None:
    check(small_diffusers(name), tmp_path / "model")


def test_a_converted_model_needs_no_memory_for_converting(tmp_path: Path) -> None:
    """Experts are merged into a file with a large budget, and stream with a smaller one."""
    small = small_model("mixtral")
    small.model.half().save_pretrained(tmp_path / "model")
    streamed = ts.from_pretrained(tmp_path / "model", budget="1GiB", dtype=torch.float32)
    needed = ts.stats(streamed)["plan"]["smallest_budget_bytes"]
    with torch.inference_mode():
        expected = streamed(**small.inputs).logits
        again = ts.from_pretrained(tmp_path / "model", budget=needed, dtype=torch.float32)
        for _ in range(2):
            assert torch.equal(again(**small.inputs).logits, expected)
    (file,) = (tmp_path / "cache" / "tensorstream").iterdir()
    file.unlink()
    with pytest.raises(ts.BudgetError, match="converting `model"):
        ts.from_pretrained(tmp_path / "model", budget=needed, dtype=torch.float32)
