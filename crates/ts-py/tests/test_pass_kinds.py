# SPDX-License-Identifier: MIT OR Apache-2.0
"""Models that make several kinds of passes: encoder and decoder, prefill and decode."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import tensorstream as ts
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

TOKENS = 12


@pytest.fixture
def t5(tmp_path: Path) -> Path:
    """Writes a T5 with random weights: 12 MiB in the encoder, and 17 MiB in the decoder."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=512, d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4,
        decoder_start_token_id=0, eos_token_id=511,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path / "t5")
    return tmp_path / "t5"


def generated(model: nn.Module, prompt: int) -> list[int]:
    """Returns the tokens that a model generates for a prompt of this length."""
    ids = torch.arange(1, prompt + 1).unsqueeze(0)
    with torch.inference_mode():
        output = model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    return output[0].tolist()


def generate_until_the_plan_stays(model: nn.Module) -> None:
    """Generates until two generations had the same plan, because only its passes are explained."""
    for _ in range(20):
        replans = ts.stats(model)["replans"]
        generated(model, 5)
        generated(model, 5)
        if ts.stats(model)["replans"] == replans:
            return
    pytest.fail("the plan changed in each of 20 pairs of generations")


def test_the_encoder_and_the_decoder_of_a_generation_are_passes(t5: Path) -> None:
    reference = T5ForConditionalGeneration.from_pretrained(t5)
    expected = [generated(reference, prompt) for prompt in (5, 9, 5)]
    model = ts.from_pretrained(t5, config=ts.Config(budget="6MiB", exact=True))
    assert [generated(model, prompt) for prompt in (5, 9, 5)] == expected
    stats = ts.stats(model)
    assert stats["passes"] == 3 * (1 + TOKENS), "the model calls the encoder by itself"
    kinds = [own["kind"] for own in stats["recent_passes"]][-1 - TOKENS :]
    assert kinds[0] not in kinds[1:], "the encoder visits other units than the decoder"
    assert sum(unit["loads"] for unit in stats["units"]) > 3 * TOKENS, "the model does not fit"
    generate_until_the_plan_stays(model)
    explanation = ts.explain(model)
    assert explanation.other_passes, "the encoder's passes are not among the decoder's"
    assert "other passes" in str(explanation)


def test_prefill_is_another_kind_than_decode(tmp_path: Path) -> None:
    """The times of passes tell. On a busy machine, a pass may take as long as another kind."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=1024, num_hidden_layers=6,
        num_attention_heads=4, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    model = ts.from_pretrained(tmp_path / "llama", config=ts.Config(budget="12MiB"))
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (1, 2000))
    for attempt in range(12):
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
        passes = ts.stats(model)["recent_passes"][-TOKENS:]
        prefill, decode = passes[0], passes[1:]
        assert prefill["compute_s"] > 3 * min(own["compute_s"] for own in decode)
        if attempt > 1 and prefill["kind"] not in [own["kind"] for own in decode]:
            return
    pytest.fail("prefill had no kind of its own in 12 generations")


def test_a_part_may_be_called_on_another_thread_during_a_pass(tmp_path: Path) -> None:
    class Both(nn.Module):
        """Calls its parts on threads that it starts, and waits for them."""

        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
            self.right = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            results: dict[int, torch.Tensor] = {}

            def run(number: int) -> None:
                with torch.inference_mode():
                    results[number] = (self.left, self.right)[number](x)

            threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            return results[0] + results[1]

    torch.manual_seed(0)
    model = Both()
    x = torch.ones(2, 256)
    with torch.inference_mode():
        expected = model(x)
    model = ts.offload(model, ts.Config(storage_path=tmp_path / "w", budget="900KiB"))
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(model(x), expected)
        # A call has a second pass if one part has ended before the other begins.
        before = ts.stats(model)["passes"]
        assert 3 <= before <= 6
        part = model.left(x)
    assert ts.stats(model)["passes"] == before + 1, "the last call was a pass too"
    assert torch.equal(part, ts.restore(model).left(x))


def test_layers_that_are_called_one_by_one_do_not_change_the_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)) for _ in range(12))
    )
    x = torch.ones(2, 256)
    with torch.inference_mode():
        expected = model(x)
    model = ts.offload(model, ts.Config(storage_path=tmp_path / "w", budget="3MiB"))
    with torch.inference_mode():
        for _ in range(4):
            result = x
            for layer in model:
                result = layer(result)
            assert torch.equal(result, expected)
    stats = ts.stats(model)
    assert (stats["passes"], stats["replans"]) == (0, 0)
    assert sum(unit["resident"] for unit in stats["units"]) > 4
