# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests families of transformers models, with a budget of about three times the largest unit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
import transformers
from conftest import leased
from exactness import assert_same
from families import FAMILIES, Family, Inputs

Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Returns a function that writes a checkpoint of a family with transformers."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            model_class(FAMILIES[name])(FAMILIES[name].config()).save_pretrained(made[name])
        return made[name]

    return make


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path


def model_class(family: Family) -> Any:
    return getattr(transformers, family.model_class)


def cast(inputs: Inputs, dtype: torch.dtype | None) -> Inputs:
    return {
        k: v.to(dtype) if dtype is not None and v.is_floating_point() else v
        for k, v in inputs.items()
    }


def three_largest_units(path: Path, name: str, **kwargs: Any) -> int:
    model = ts.from_pretrained(
        path, budget="64MiB", model_class=model_class(FAMILIES[name]), **kwargs
    )
    stats = ts.stats(model)
    return max(
        3 * max(unit["slot_bytes"] for unit in stats["units"]),
        stats["plan"]["smallest_budget_bytes"],
    )


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_bit_identical_within_the_budget(saved: Saved, name: str) -> None:
    family, path = FAMILIES[name], saved(name)
    reference = model_class(family).from_pretrained(path).eval()
    budget = three_largest_units(path, name)
    streamed = ts.from_pretrained(path, budget=budget, model_class=model_class(family))
    assert sum(parameter.nbytes for parameter in streamed.parameters()) > budget, (
        "the budget is smaller than the model"
    )
    with torch.inference_mode():
        for batch in (1, 4):
            inputs = family.inputs(batch)
            assert_same(streamed(**inputs), reference(**inputs))
            if family.generates:
                first = dict(list(inputs.items())[:1])
                options = {"max_new_tokens": 5, "do_sample": False}
                assert torch.equal(
                    streamed.generate(**first, **options), reference.generate(**first, **options)
                )
    stats = ts.stats(streamed)
    assert stats["reserved_high_water_bytes"] <= budget
    assert any(unit["loads"] > 1 for unit in stats["units"]), "units were streamed"
    ts.restore(streamed)
    with torch.inference_mode():
        assert_same(streamed(**inputs), reference(**inputs))
    for (key, mine), (other, its) in zip(
        streamed.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert (key, mine.dtype, mine.requires_grad) == (other, its.dtype, its.requires_grad)
        assert torch.equal(mine, its)
    assert {k: v.dtype for k, v in streamed.named_buffers()} == {
        k: v.dtype for k, v in reference.named_buffers()
    }


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_mode_and_pass_is_exact(saved: Saved, name: str) -> None:
    family, path = FAMILIES[name], saved(name)
    reference = model_class(family).from_pretrained(path).eval()
    streamed = ts.from_pretrained(
        path, budget=three_largest_units(path, name), model_class=model_class(family)
    )
    inputs = family.inputs(2)
    for mode, autocast in (
        (torch.no_grad, False),
        (torch.inference_mode, False),
        (torch.no_grad, True),
    ):
        with mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            try:
                expected = reference(**inputs)
            except RuntimeError:  # PyTorch does not support this model under autocast
                assert autocast
                continue
            for _ in range(3):
                assert_same(streamed(**inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, torch.bfloat16)
        for name in ("gpt2", "t5", "whisper", "wav2vec2", "mixtral", "qwen2_moe", "gpt_oss")
    ]
    # Merged experts do not support f64.
    + [(name, torch.float64) for name in ("gpt2", "t5", "whisper", "wav2vec2")],
)
def test_another_dtype_is_converted_once(
    saved: Saved, name: str, dtype: torch.dtype, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    family, path = FAMILIES[name], saved(name)
    reference = model_class(family).from_pretrained(path, dtype=dtype).eval()
    inputs = cast(family.inputs(2), dtype)
    with torch.inference_mode():
        expected = reference(**inputs)
    # Merged experts are converted as a whole, and streamed one by one.
    budget = max(three_largest_units(path, name, dtype=dtype), 256 << 10)
    assert "converting" in capfd.readouterr().err
    files = {file: file.stat().st_mtime_ns for file in (cache / "tensorstream").iterdir()}
    streamed = ts.from_pretrained(path, budget=budget, model_class=model_class(family), dtype=dtype)
    assert "converting" not in capfd.readouterr().err, "the second run reuses the file"
    assert files == {file: file.stat().st_mtime_ns for file in (cache / "tensorstream").iterdir()}
    with torch.inference_mode():
        assert_same(streamed(**inputs), expected)
    assert ts.stats(streamed)["reserved_high_water_bytes"] <= budget


def test_modules_that_transformers_keeps_in_f32_stay_f32(saved: Saved) -> None:
    path = saved("t5")
    streamed = ts.from_pretrained(path, budget="1MiB", dtype=torch.float16)
    reference = transformers.T5ForConditionalGeneration.from_pretrained(path, dtype=torch.float16)
    dtypes = {name: parameter.dtype for name, parameter in streamed.named_parameters()}
    assert dtypes == {name: parameter.dtype for name, parameter in reference.named_parameters()}
    assert set(dtypes.values()) == {torch.float16, torch.float32}


def test_a_changed_source_is_converted_again(saved: Saved, tmp_path: Path, cache: Path) -> None:
    for file in saved("bert").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    ts.from_pretrained(tmp_path, budget="1MiB", dtype=torch.bfloat16)
    weights = tmp_path / "model.safetensors"
    tensors = ts.load_file(weights)
    name = "bert.encoder.layer.0.output.dense.weight"
    tensors[name] = tensors[name] + 1
    ts.save_file(tensors, weights, {"format": "pt"})
    streamed = ts.from_pretrained(tmp_path, budget="1MiB", dtype=torch.bfloat16)
    assert torch.equal(leased(streamed.get_parameter(name)), tensors[name].bfloat16())
    assert len(list((cache / "tensorstream").iterdir())) == 2


def test_a_damaged_conversion_is_made_again(
    saved: Saved, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = saved("gpt2")
    ts.from_pretrained(path, budget="1MiB", dtype=torch.bfloat16)
    (file,) = (cache / "tensorstream").iterdir()
    content = bytearray(file.read_bytes())
    content[9000] ^= 1
    file.write_bytes(content)
    streamed = ts.from_pretrained(path, budget="1MiB", dtype=torch.bfloat16)
    with pytest.raises(
        ts.ChecksumError,
        match=rf"{file.name}: \d+ bytes at byte \d+ do not match their checksum.*has been removed",
    ):
        streamed(**FAMILIES["gpt2"].inputs(1))
    assert not file.exists()
    expected = model_class(FAMILIES["gpt2"]).from_pretrained(path, dtype=torch.bfloat16)
    for damaged in (None, content[:5000]):
        if damaged is not None:
            file.write_bytes(damaged)
        capfd.readouterr()
        again = ts.from_pretrained(path, budget="1MiB", dtype=torch.bfloat16)
        assert "converting" in capfd.readouterr().err
        with torch.no_grad():
            output = again(**FAMILIES["gpt2"].inputs(1)).logits
            assert torch.equal(output, expected(**FAMILIES["gpt2"].inputs(1)).logits)


def test_a_conversion_over_budget_reports_the_smallest_budget(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses transposed weights, which a loader creates for models with another layout."""
    from tensorstream.streaming._attach import attach
    from tensorstream.streaming._builder import Builder
    from tensorstream.streaming._placement import Placement

    path = saved("gpt2")
    checkpoint = ts._native.Checkpoint(path)
    builder = Builder(checkpoint)
    weight = builder.symbolic("transformer.h.0.mlp.c_fc.weight")
    module = torch.nn.Linear(weight.shape[0], weight.shape[1], bias=False, device="meta")
    module.weight = torch.nn.Parameter(weight.T.contiguous(), requires_grad=False)
    with pytest.raises(ts.BudgetError, match=r"converting `weight` needs (\d+) bytes") as caught:
        attach(module, Placement(module, ts.Config(budget=weight.nbytes)), checkpoint)
    needed = int(str(caught.value).split("`weight` needs ")[1].split()[0])
    assert needed == 2 * weight.nbytes == caught.value.smallest
    module.weight = torch.nn.Parameter(
        builder.symbolic(weight.source.name).T.contiguous(), requires_grad=False
    )
    attach(module, Placement(module, ts.Config(budget=needed)), checkpoint)
    x = torch.randn(3, weight.shape[0])
    expected = ts.load_file(path)["transformer.h.0.mlp.c_fc.weight"].T.contiguous()
    assert torch.equal(module(x), torch.nn.functional.linear(x, expected))
