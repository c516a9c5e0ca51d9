# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a class overrides, computes or creates does not change what streams."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
import transformers as hf
from exactness import PASSES, assert_same
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

WIDTH = 128


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.project(x))  # type: ignore[no-any-return]


class Trainable(Parts):
    """Shows optimizers only a part."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.project.parameters(recurse)


class Named(Parts):
    """Names its parameters in its own way, and leaves some out."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((f"own.{name}", each) for name, each in self.project.named_parameters())


class Hidden(Parts):
    """Hides a module from those that walk over it."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield "", self
        yield "project", self.project

    def children(self) -> Iterator[nn.Module]:
        return iter([self.project])


@pytest.mark.product
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("make", [Trainable, Named, Hidden])
def test_overridden_methods_do_not_decide_what_streams(
    make: Callable[[], nn.Module], around: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    memory = (nn.Sequential(make()) if around else make()).to(dtype)
    for part in memory.modules():  # `to` does not reach what a model hides
        if isinstance(part, Parts):
            part.inner.to(dtype)
    streamed = copy.deepcopy(memory)
    weights = 9 * (WIDTH + 1) * WIDTH * dtype.itemsize
    ts.offload(streamed, ts.Config(storage_path=tmp_path, budget=int(weights * 0.45)))
    assert len(ts.stats(streamed)["units"]) == 9
    x = torch.randn(3, WIDTH).to(dtype)
    with torch.no_grad():
        for _ in range(PASSES):
            assert_same(streamed(x), memory(x))


PARAMETRIZATIONS: dict[str, Callable[[], nn.Module]] = {
    "spectral linear": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral embedding": lambda: spectral_norm(nn.Embedding(500, WIDTH)),
    "spectral convolution": lambda: spectral_norm(nn.Conv1d(WIDTH, WIDTH, 1)),
    "orthogonal": lambda: orthogonal(nn.Linear(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_offloading_runs_no_parametrization(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    memory = nn.Sequential(PARAMETRIZATIONS[name]()).train()
    streamed = copy.deepcopy(memory)
    ts.offload(streamed, ts.Config(storage_path=tmp_path, budget="640KiB"))
    for (_, a), (_, b) in zip(memory.named_buffers(), streamed.named_buffers(), strict=True):
        assert torch.equal(a, b)
    x = torch.arange(7) if "embedding" in name else torch.randn(3, WIDTH, 1).squeeze(-1)
    x = x.unsqueeze(-1) if "convolution" in name else x
    with torch.no_grad():
        for _ in range(PASSES):
            assert_same(streamed(x), memory(x))
    for (_, a), (_, b) in zip(memory.named_buffers(), streamed.named_buffers(), strict=True):
        assert torch.equal(a, b)


SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
VIT = hf.ViTConfig(**SMALL, intermediate_size=128, image_size=32, patch_size=8)
DEIT = hf.DeiTConfig(**SMALL, intermediate_size=128, image_size=32, patch_size=8)
BEIT = hf.BeitConfig(**SMALL, intermediate_size=128, image_size=32, patch_size=8)
ADDED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "ViT": (hf.ViTModel, VIT, {"use_mask_token": True}, "embeddings.mask_token"),
    "DeiT": (hf.DeiTModel, DEIT, {"use_mask_token": True}, "embeddings.mask_token"),
    "BEiT": (hf.BeitModel, BEIT, {"use_mask_token": True}, "embeddings.mask_token"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ADDED)
def test_parameters_that_an_argument_adds_are_initialized(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model_class, config, arguments, added = ADDED[name]
    model_class(config).to(dtype).save_pretrained(tmp_path)
    options = {**arguments, "dtype": dtype}
    torch.manual_seed(3)
    peer, info = model_class.from_pretrained(tmp_path, output_loading_info=True, **options)
    assert added in info["missing_keys"]
    weights = sum(parameter.nbytes for parameter in peer.parameters())
    torch.manual_seed(3)
    streamed, own_info = ts.from_pretrained(
        tmp_path,
        model_class=model_class,
        budget=int(weights * 0.45),
        output_loading_info=True,
        **options,
    )
    assert own_info["missing_keys"] == info["missing_keys"]
    assert torch.equal(streamed.get_parameter(added), peer.get_parameter(added))
    pixels = torch.randn(2, 3, 32, 32).to(dtype)
    masked = torch.zeros(2, 16, dtype=torch.bool)
    masked[:, ::2] = True
    with torch.no_grad():
        for _ in range(PASSES):
            expected = peer.eval()(pixels, bool_masked_pos=masked).last_hidden_state
            actual = streamed.eval()(pixels, bool_masked_pos=masked).last_hidden_state
            assert_same(actual, expected)


class OwnConfig(hf.PretrainedConfig):
    model_type = "own_with_buffers"


class Own(hf.PreTrainedModel):
    """Has buffers that no file has, and that ``_init_weights`` does not fill."""

    config_class = OwnConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.register_buffer("scale", torch.arange(1.0, WIDTH + 1) / WIDTH, persistent=False)
        self.register_buffer("order", torch.arange(WIDTH).flip(0), persistent=False)
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.post_init()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.scale + self.shift)[..., self.order]  # type: ignore


def test_buffers_that_nothing_fills_have_the_values_of_the_constructor(tmp_path: Path) -> None:
    memory = Own(OwnConfig())
    memory.shift += 2
    memory.save_pretrained(tmp_path)
    for _ in range(2):  # with other garbage in memory
        junk = [torch.full((WIDTH,), 7.0) for _ in range(64)]
        del junk
        streamed = ts.from_pretrained(tmp_path, model_class=Own, budget="150KiB")
        x = torch.randn(3, WIDTH)
        with torch.no_grad():
            for _ in range(PASSES):
                assert_same(streamed(x), memory(x))
    assert not torch.are_deterministic_algorithms_enabled()
