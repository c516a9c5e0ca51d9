# SPDX-License-Identifier: MIT OR Apache-2.0
"""Outputs are bit-identical to those of transformers' own ``from_pretrained``."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import tensorstream as ts
import torch
from conftest import Llama, leased
from transformers import AutoTokenizer, BertModel, LlamaForCausalLM

SENTENCES = [
    "A cat sat on the mat.",
    "Rust is a systems programming language with a strict compiler.",
    "Hm.",
]


def decode(model: torch.nn.Module, batch: int, steps: int = 6) -> list[torch.Tensor]:
    """Returns the logits of a prefill and of greedy decode steps, and the tokens."""
    ids = (torch.arange(batch * 9).reshape(batch, 9) * 7 + 3) % 131
    outputs, past, tokens = [], None, []
    with torch.inference_mode():
        for _ in range(steps):
            result = model(input_ids=ids, past_key_values=past, use_cache=True)
            past, ids = result.past_key_values, result.logits[:, -1:].argmax(-1)
            outputs.append(result.logits)
            tokens.append(ids)
    return [*outputs, torch.cat(tokens, 1)]


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for step, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, e), f"step {step}: differs by {(a - e).abs().max()}"


@pytest.mark.critical
def test_minilm_under_16_mib_is_bit_identical_for_every_batch(minilm: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    reference = BertModel.from_pretrained(minilm)
    streamed = ts.from_pretrained(minilm, budget="16MiB", model_class=BertModel)
    assert type(streamed) is BertModel
    for sentences in (SENTENCES, SENTENCES[:1], SENTENCES[1:]):
        batch = tokenizer(sentences, padding=True, return_tensors="pt")
        with torch.inference_mode():
            expected, actual = reference(**batch), streamed(**batch)
        assert torch.equal(actual.last_hidden_state, expected.last_hidden_state)
        assert torch.equal(actual.pooler_output, expected.pooler_output)
    stats = ts.stats(streamed)
    assert stats["reserved_high_water_bytes"] <= stats["budget_bytes"] == 16 << 20
    assert stats["passes"] == 3
    assert any(unit["loads"] > 1 for unit in stats["units"]), "units were streamed"
    assert not any(unit["loads"] for unit in stats["units"] if "word_embed" in unit["name"])


@pytest.mark.product
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("data_start", [0, 8])
@pytest.mark.parametrize("batch", [1, 4])
def test_llama_prefill_and_decode_are_bit_identical(
    llama: Llama, dtype: torch.dtype, data_start: int, batch: int
) -> None:
    path = llama(dtype=dtype, data_start_mod_16=data_start)
    expected = decode(LlamaForCausalLM.from_pretrained(path), batch)
    streamed = ts.from_pretrained(path, budget="300KiB")
    assert_same(decode(streamed, batch), expected)
    assert any(not unit["resident"] for unit in ts.stats(streamed)["units"])


@pytest.mark.parametrize(
    "options", [{"shard_size": "300KB"}, {"tie": True}], ids=["sharded", "tied"]
)
def test_sharded_and_tied_checkpoints_are_bit_identical(
    llama: Llama, options: dict[str, object]
) -> None:
    path = llama(**options)
    expected = decode(LlamaForCausalLM.from_pretrained(path), 2)
    assert_same(decode(ts.from_pretrained(path, budget="400KiB"), 2), expected)


def test_generate_gives_the_same_tokens(llama: Llama) -> None:
    path = llama()
    ids = torch.tensor([[5, 9, 2, 77]])
    reference, streamed = (
        LlamaForCausalLM.from_pretrained(path),
        ts.from_pretrained(path, budget="300KiB"),
    )
    expected = reference.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(streamed.generate(ids, max_new_tokens=12, do_sample=False), expected)
    assert streamed.device == reference.device
    assert streamed.dtype == reference.dtype


@pytest.mark.slow
@pytest.mark.parametrize("max_passes", [1, 2])
def test_two_threads_can_run_forwards_at_once(llama: Llama, max_passes: int) -> None:
    path = llama()
    expected = {batch: decode(LlamaForCausalLM.from_pretrained(path), batch) for batch in (1, 3)}
    streamed = ts.from_pretrained(path, config=ts.Config(budget="500KiB", max_passes=max_passes))
    failures: list[BaseException] = []

    def run(batch: int) -> None:
        try:
            for _ in range(4):
                assert_same(decode(streamed, batch), expected[batch])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(batch,)) for batch in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures


def test_restored_and_offloaded_live_models_stay_exact(llama: Llama) -> None:
    path = llama()
    model = LlamaForCausalLM.from_pretrained(path)
    expected = decode(model, 1)
    before = {name: parameter.data_ptr() % 64 for name, parameter in model.named_parameters()}
    ts.offload(model, ts.Config(budget="300KiB"), checkpoint=path)
    assert_same(decode(model, 1), expected)
    ts.restore(model)
    assert_same(decode(model, 1), expected)
    assert {
        name: parameter.data_ptr() % 64 for name, parameter in model.named_parameters()
    } == before
    assert all(type(p) is torch.nn.Parameter and p.requires_grad for p in model.parameters())
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert not decode(model, 1)[0].any()


def test_a_live_model_of_cloned_weights_keeps_its_own_phase(llama: Llama) -> None:
    path = llama(data_start_mod_16=8)
    model = LlamaForCausalLM.from_pretrained(path)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())
    expected = decode(model, 1)
    assert_same(decode(ts.offload(model, checkpoint=path, budget="3MiB"), 1), expected)


def test_every_weight_has_the_phase_of_the_reference(llama: Llama) -> None:
    """Compares the phases, which are addresses modulo 64, with those of the reference."""
    path = llama()
    reference, streamed = (
        LlamaForCausalLM.from_pretrained(path),
        ts.from_pretrained(path, budget="300KiB"),
    )
    for name, parameter in streamed.named_parameters():
        here, there = leased(parameter), reference.get_parameter(name)
        assert here.data_ptr() % 64 == there.data_ptr() % 64, name
        assert torch.equal(here, there)
        del here


def test_results_depend_on_the_phase() -> None:
    """Passes if f32 results of this CPU depend on the address of weights modulo 64, else skips."""
    weight, vector, results = torch.randn(260, 1024), torch.randn(1, 1024), []
    for phase in range(0, 64, 4):
        room = torch.empty(weight.numel() + 32)
        start = ((phase - room.data_ptr()) % 64) // 4
        placed = room[start : start + weight.numel()].view_as(weight).copy_(weight)
        assert placed.data_ptr() % 64 == phase
        results.append(torch.nn.functional.linear(vector, placed))
    if all(torch.equal(result, results[0]) for result in results):
        pytest.skip("the matrix-vector product of this CPU does not depend on the address")
