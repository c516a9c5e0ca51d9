# SPDX-License-Identifier: MIT OR Apache-2.0
"""Pipelines, models of diffusers and SentenceTransformers load with their parts streamed."""

from __future__ import annotations

import inspect
import logging
import threading
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tensorstream as ts
import tensorstream.diffusers as group_offload
import torch
import transformers
from conftest import Llama
from diffusers.hooks.group_offloading import GroupOffloadingType
from sentence_transformers import SentenceTransformer
from small_pipeline import image, save_pipeline
from tensorstream.streaming._diversion import streamed_models
from tensorstream.streaming._state import is_offloaded


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a small pipeline."""
    return save_pipeline(tmp_path_factory.mktemp("pipeline"))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_pipelines_stream_under_one_budget(
    pipeline: Path, dtype: torch.dtype | None, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"torch_dtype": dtype} if dtype else {}
    expected = diffusers.StableDiffusionPipeline.from_pretrained(pipeline, **how)
    shared = ts.Budget("1500KiB")
    with caplog.at_level(logging.INFO, "tensorstream"):
        streamed = ts.from_pretrained(
            pipeline, config=ts.Config(budget=shared, storage_path=tmp_path), **how
        )
    assert "is a pipeline: StableDiffusionPipeline" in caplog.text
    assert type(streamed) is diffusers.StableDiffusionPipeline
    parts = [streamed.text_encoder, streamed.unet, streamed.vae]
    assert sum(p.nbytes for part in parts for p in part.parameters()) > 2 * shared.bytes
    for _ in range(2):
        assert torch.equal(image(streamed), image(expected))
    stats = [ts.stats(part) for part in parts]
    assert sum(each["limit_bytes"] for each in stats) <= shared.bytes
    assert len(shared.shares()) == 3
    assert all(any(unit["loads"] > 1 for unit in each["units"]) for each in stats)
    assert streamed.to("cpu") is streamed
    assert streamed.device.type == "cpu" and streamed.dtype == (dtype or torch.float32)


def test_group_offload_of_pipelines(pipeline: Path, tmp_path: Path) -> None:
    expected = diffusers.StableDiffusionPipeline.from_pretrained(pipeline)
    changed = diffusers.StableDiffusionPipeline.from_pretrained(pipeline)
    how: dict[str, Any] = {
        "onload_device": torch.device("cpu"),
        "offload_device": torch.device("cpu"),
        "offload_type": "leaf_level",
        "use_stream": True,
    }
    group_offload.enable_group_offload(changed, **how)  # everything is on the CPU already
    assert not hasattr(changed.unet, "hf_device_map")
    how |= {"offload_to_disk_path": tmp_path, "budget": "1500KiB"}
    group_offload.enable_group_offload(changed, **how, exclude_modules="vae")
    assert not hasattr(changed.vae, "hf_device_map")
    assert ts.stats(changed.unet)["limit_bytes"] < 1500 << 10
    for _ in range(2):
        assert torch.equal(image(changed), image(expected))
    failing = diffusers.StableDiffusionPipeline.from_pretrained(pipeline)
    with pytest.raises(ts.BudgetError):
        group_offload.enable_group_offload(failing, **how | {"budget": "400KiB"})
    for part in (failing.vae, failing.text_encoder, failing.unet):
        assert type(next(part.parameters())) is torch.nn.Parameter
    assert torch.equal(image(failing), image(expected))
    group_offload.enable_group_offload(changed, **how)  # the others stream already
    parts = [changed.text_encoder, changed.unet]
    assert all(any(unit["loads"] > 1 for unit in ts.stats(part)["units"]) for part in parts)
    assert ts.stats(changed.vae)["passes"] == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["text_encoder", "unet", "vae"]


def test_group_offload_of_models(pipeline: Path, tmp_path: Path) -> None:
    expected = diffusers.UNet2DConditionModel.from_pretrained(pipeline, subfolder="unet")
    inputs = torch.randn(1, 4, 8, 8), 1, torch.randn(1, 16, 64)
    for number, function in enumerate(
        (group_offload.apply_group_offloading, group_offload.enable_group_offload)
    ):
        changed = diffusers.UNet2DConditionModel.from_pretrained(pipeline, subfolder="unet")
        directory = tmp_path / str(number)
        function(
            changed,
            torch.device("cpu"),
            offload_type=GroupOffloadingType.BLOCK_LEVEL,
            num_blocks_per_group=1,
            offload_to_disk_path=directory,
            budget="900KiB",
        )
        with torch.inference_mode():
            for _ in range(3):
                assert torch.equal(changed(*inputs).sample, expected(*inputs).sample)
        assert any(unit["loads"] > 1 for unit in ts.stats(changed)["units"])
    assert group_offload.HookRegistry is diffusers.hooks.HookRegistry
    assert group_offload.DDIMScheduler is diffusers.DDIMScheduler
    for call, message in (
        (lambda f: f(expected, "cuda"), "device cuda"),
        (lambda f: f(expected, "cpu", "meta"), "execute on meta"),
        (lambda f: f(expected, offload_type="rows"), "rows"),
        (lambda f: f(expected, budget="1GiB"), "offload_to_disk_path"),
    ):
        for refusing in (group_offload.apply_group_offloading, group_offload.enable_group_offload):
            with pytest.raises(ts.ConfigurationError, match=message):
                call(refusing)
    with pytest.raises(ts.ConfigurationError, match="a model or a pipeline"):
        group_offload.enable_group_offload({})
    assert type(expected.conv_in.weight) is torch.nn.Parameter


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (group_offload.apply_group_offloading, diffusers.hooks.apply_group_offloading),
        (
            group_offload.enable_group_offload,
            diffusers.DiffusionPipeline.enable_group_offload,
        ),
    ],
)
def test_group_offload_has_the_arguments_of_diffusers(ours: Any, theirs: Any) -> None:
    expected, found = (list(inspect.signature(each).parameters)[1:] for each in (theirs, ours))
    assert found == [*expected, "budget"]


def test_models_of_diffusers(pipeline: Path, tmp_path: Path) -> None:
    inputs = (torch.randn(1, 4, 8, 8), 7, torch.randn(1, 5, 64))
    path = pipeline / "unet"
    for how in ({}, {"torch_dtype": torch.float16}, {"model_class": diffusers.AutoModel}):
        own = {key: value for key, value in how.items() if key != "model_class"}
        expected = diffusers.UNet2DConditionModel.from_pretrained(path, **own)
        config = ts.Config(budget="700KiB", storage_path=tmp_path)
        streamed = ts.from_pretrained(path, config=config, **how)
        assert type(streamed) is diffusers.UNet2DConditionModel
        cast = [
            each.to(expected.dtype) if isinstance(each, torch.Tensor) else each for each in inputs
        ]
        with torch.inference_mode():
            for _ in range(2):
                assert torch.equal(streamed(*cast).sample, expected(*cast).sample)
        assert any(unit["loads"] > 1 for unit in ts.stats(streamed)["units"])
    nested = ts.from_pretrained(pipeline, subfolder="unet", budget="700KiB")
    assert type(nested) is diffusers.UNet2DConditionModel


def test_sentence_transformers(minilm: Path) -> None:
    sentences = ["A cat sits on the moon.", "Nobody reads this.", "Words"]
    expected = SentenceTransformer(str(minilm), device="cpu")
    for how in ({}, {"model_class": SentenceTransformer}):
        streamed = ts.from_pretrained(minilm, budget="16MiB", **how)
        assert type(streamed) is SentenceTransformer
        for _ in range(2):
            assert (streamed.encode(sentences) == expected.encode(sentences)).all()
        stats = ts.stats(streamed[0].auto_model)
        assert stats["reserved_high_water_bytes"] <= 16 << 20
        assert any(unit["loads"] > 1 for unit in stats["units"])
    alone = ts.from_pretrained(minilm, budget="16MiB", model_class=transformers.AutoModel)
    assert type(alone) is transformers.BertModel


def test_other_loads_are_not_affected(pipeline: Path, llama: Llama) -> None:
    """A pipeline that cannot be loaded leaves the libraries as they were, also meanwhile."""
    before = vars(transformers.PreTrainedModel)["from_pretrained"]
    found = []

    class Other(diffusers.StableDiffusionPipeline):  # type: ignore[misc]
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            def load() -> None:
                found.append(transformers.LlamaForCausalLM.from_pretrained(llama()))

            thread = threading.Thread(target=load)
            thread.start()
            thread.join()
            return super().from_pretrained(*args, **kwargs)

    with pytest.raises(ts.BudgetError):
        ts.from_pretrained(pipeline, budget="10KiB", model_class=Other)
    assert not is_offloaded(found[0])
    assert vars(transformers.PreTrainedModel)["from_pretrained"] is before
    assert not is_offloaded(transformers.LlamaForCausalLM.from_pretrained(llama()))


def test_several_models_in_a_subfolder(pipeline: Path, minilm: Path, tmp_path: Path) -> None:
    for name, source in (("pipe", pipeline), ("encoder", minilm)):
        (tmp_path / name).symlink_to(source)
    streamed = ts.from_pretrained(tmp_path, budget="1500KiB", subfolder="pipe")
    expected = diffusers.StableDiffusionPipeline.from_pretrained(pipeline)
    assert torch.equal(image(streamed), image(expected))
    encoder = ts.from_pretrained(tmp_path, budget="16MiB", subfolder="encoder")
    assert type(encoder) is SentenceTransformer
    with pytest.raises(ts.ConfigurationError, match="force_download"):
        ts.from_pretrained(minilm, budget="16MiB", force_download=True)
    for path in (pipeline, minilm):
        with pytest.raises(ts.ConfigurationError, match="model_config"):
            ts.from_pretrained(path, model_config=transformers.LlamaConfig())


def test_dtypes_of_diffusers_by_name(pipeline: Path, tmp_path: Path) -> None:
    for name in ("bfloat16", "auto"):
        model = ts.from_pretrained(
            pipeline / "unet",
            config=ts.Config(budget="900KiB", storage_path=tmp_path),
            torch_dtype=name,
        )
        assert model.dtype == (torch.float32 if name == "auto" else torch.bfloat16)
    with pytest.raises(ts.ConfigurationError, match="foo"):
        ts.from_pretrained(pipeline / "unet", budget="900KiB", torch_dtype="foo")


def test_arguments_by_name_work_while_a_pipeline_loads(llama: Llama) -> None:
    loaded = []

    def load(model_class: type[Any], name: Any, settings: ts.Config, kwargs: Any) -> Any:
        loaded.append((name, kwargs))

    path = llama()
    with streamed_models(ts.Config(), {transformers.PreTrainedModel: load}):
        transformers.LlamaForCausalLM.from_pretrained(
            pretrained_model_name_or_path=path, dtype=torch.float32
        )
        assert loaded == [(path, {"dtype": torch.float32})]
        others: list[Any] = []
        thread = threading.Thread(
            target=lambda: others.append(
                transformers.LlamaForCausalLM.from_pretrained(pretrained_model_name_or_path=path)
            )
        )
        thread.start()
        thread.join()
    assert type(others[0]) is transformers.LlamaForCausalLM


def test_loading_info_of_diffusers(pipeline: Path) -> None:
    path = pipeline / "unet"
    _, info = ts.from_pretrained(path, budget="900KiB", output_loading_info=True)
    _, expected = diffusers.UNet2DConditionModel.from_pretrained(path, output_loading_info=True)
    assert {key: list(value) for key, value in info.items()} == {
        key: list(value) for key, value in expected.items()
    }
