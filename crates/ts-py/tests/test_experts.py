# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mixtures of experts: only the experts that are needed are read, and results are the same bits."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
import transformers as hf
from tensorstream.streaming._division import addresses_are_exact
from tensorstream.streaming._state import streaming_of
from tensorstream.streaming._streamed_tensor import with_slice
from torch import nn

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 95,
    "pad_token_id": 94,
}


def qwen3() -> Any:
    return hf.Qwen3MoeConfig(
        **SHAPE,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        head_dim=32,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def mixtral() -> Any:
    return hf.MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2)


def olmoe() -> Any:
    return hf.OlmoeConfig(**SHAPE, num_experts=8, num_experts_per_tok=2)


def qwen2() -> Any:
    return hf.Qwen2MoeConfig(
        **SHAPE,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def deepseek_v3() -> Any:
    return hf.DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4},
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=96,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )


def gpt_oss() -> Any:
    return hf.GptOssConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2, head_dim=32)


def jamba() -> Any:
    return hf.JambaConfig(
        **SHAPE,
        num_experts=8,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=1,
        expert_layer_offset=0,
        mamba_d_state=8,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    )


MODELS = {
    "qwen3": (hf.Qwen3MoeForCausalLM, qwen3),
    "mixtral": (hf.MixtralForCausalLM, mixtral),
    "olmoe": (hf.OlmoeForCausalLM, olmoe),
    "qwen2": (hf.Qwen2MoeForCausalLM, qwen2),
    "deepseek_v3": (hf.DeepseekV3ForCausalLM, deepseek_v3),
    "gpt_oss": (hf.GptOssForCausalLM, gpt_oss),
    "jamba": (hf.JambaForCausalLM, jamba),
}
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


def saved(name: str, path: Path, dtype: torch.dtype) -> Path:
    """Writes a checkpoint with random weights."""
    model_class, config = MODELS[name]
    torch.manual_seed(0)
    model_class(config()).to(dtype).eval().save_pretrained(path)
    return path


def pair(path: Path, name: str, dtype: torch.dtype, implementation: str, **how: Any) -> Any:
    """Returns the model in memory, and the model that streams under the smallest budget."""
    model_class, _ = MODELS[name]
    settings = {"dtype": dtype, "experts_implementation": implementation}
    reference = model_class.from_pretrained(path, **settings).eval()
    how = how or {"budget": smallest(path, **settings)}
    return reference, ts.from_pretrained(path, **how, **settings)


def smallest(path: Path, **settings: Any) -> int:
    """Returns the smallest budget, which the error for a smaller one reports."""
    with pytest.raises(ts.BudgetError) as error:
        ts.from_pretrained(path, budget=1, **settings)
    text = str(error.value)
    return int(text.split("the smallest budget that works is ")[1].split(maxsplit=1)[0])


def expert_bytes(model: nn.Module) -> int:
    return sum(
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if ".experts." in name and parameter.ndim == 3
    )


def read(model: nn.Module) -> int:
    return ts.stats(model)["read_bytes"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_batch_of_all_experts_is_divided(dtype: torch.dtype, tmp_path: Path) -> None:
    """Llama 4 multiplies all experts, so they are streamed in order."""
    config = hf.Llama4TextConfig(
        **{**SHAPE, "hidden_size": 256, "intermediate_size": 512},
        head_dim=32,
        intermediate_size_mlp=256,
        num_local_experts=16,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
    )
    torch.manual_seed(0)
    hf.Llama4ForCausalLM(config).to(dtype).eval().save_pretrained(tmp_path)
    reference = hf.Llama4ForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    gate_up = reference.model.layers[0].feed_forward.experts.gate_up_proj
    with pytest.raises(ts.BudgetError) as error:
        ts.from_pretrained(tmp_path, config=ts.Config(budget=1, exact=False), dtype=dtype)
    text = str(error.value)
    least = int(text.split("the smallest budget that works is ")[1].split(maxsplit=1)[0])
    assert least < gate_up.nbytes / 3
    model = ts.from_pretrained(tmp_path, config=ts.Config(budget=least, exact=False), dtype=dtype)
    for ids in (torch.randint(2, 90, (4, 7)), torch.tensor([[5]])):
        with torch.inference_mode():
            for _ in range(2):
                expected, actual = reference(ids).logits, model(ids).logits
                assert torch.allclose(expected, actual, atol=1e-3)
        tokens = [
            each.generate(ids, max_new_tokens=4, do_sample=False) for each in (reference, model)
        ]
        assert torch.equal(*tokens)
    stats = ts.stats(model)
    assert stats["in_use_high_water_bytes"] <= stats["budget_bytes"] == least
    # If results must be the same bits, the smallest budget depends on the processor.
    exact = ts.from_pretrained(tmp_path, budget=smallest(tmp_path, dtype=dtype), dtype=dtype)
    with torch.inference_mode():
        for ids in (torch.randint(2, 90, (4, 7)), torch.tensor([[5]])):
            assert torch.equal(reference(ids).logits, exact(ids).logits)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_results_are_bit_identical(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    saved(name, tmp_path, dtype)
    inputs = torch.randint(2, 90, (4, 7))
    for implementation in IMPLEMENTATIONS:
        try:
            reference, streamed = pair(tmp_path, name, dtype, implementation)
        except (ValueError, KeyError) as error:
            assert implementation != "eager"
            print(f"{name} has no {implementation}: {error}")
            continue
        assert ts.stats(streamed)["budget_bytes"] < expert_bytes(reference) / 3
        for ids in (inputs, inputs[:1]):
            for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
                with mode():
                    expected, actual = reference(ids).logits, streamed(ids).logits
                assert torch.equal(expected, actual), (implementation, mode.__name__)
            tokens = [
                model.generate(ids, max_new_tokens=5, do_sample=False)
                for model in (reference, streamed)
            ]
            assert torch.equal(*tokens), implementation
        stats = ts.stats(streamed)
        assert stats["in_use_high_water_bytes"] <= stats["budget_bytes"]


def test_autocast_is_bit_identical(tmp_path: Path) -> None:
    saved("qwen3", tmp_path, torch.float32)
    ids = torch.randint(2, 90, (2, 7))
    for implementation in IMPLEMENTATIONS:
        reference, streamed = pair(tmp_path, "qwen3", torch.float32, implementation)
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode(), torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(reference(ids).logits, streamed(ids).logits), implementation


def test_gradients_of_inputs_are_bit_identical(tmp_path: Path) -> None:
    saved("qwen3", tmp_path, torch.float32)
    for implementation in ("eager", "grouped_mm"):
        reference, streamed = pair(tmp_path, "qwen3", torch.float32, implementation)
        reference.requires_grad_(False)
        gradients = []
        for model in (reference, streamed):
            embedded = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(1))
            embedded.requires_grad_()
            model(inputs_embeds=embedded).logits.square().sum().backward()
            gradients.append(embedded.grad)
        assert torch.equal(*gradients), implementation


@contextlib.contextmanager
def forced(model: nn.Module, choose: Callable[[int], torch.Tensor]) -> Iterator[None]:
    """Replaces the choice of the router. ``choose`` gets the number of tokens."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden, index, weights = args
        return (hidden, choose(index.shape[0]).expand_as(index), weights), kwargs

    experts = [each for each in model.modules() if hasattr(each, "_is_expert_parallel")]
    assert experts
    hooks = [each.register_forward_pre_hook(before, with_kwargs=True) for each in experts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_only_chosen_experts_are_read(tmp_path: Path, implementation: str) -> None:
    saved("qwen3", tmp_path, torch.float32)
    reference, model = pair(tmp_path, "qwen3", torch.float32, implementation, budget=1 << 20)
    ids = torch.randint(2, 90, (1, 1))
    whole = expert_bytes(reference)
    dense = sum(parameter.nbytes for parameter in reference.parameters()) - whole
    touched = whole * 2 // 16
    # Direct reads are aligned. So the read of a part exceeds the part by at most two alignments of
    # 4096 bytes.
    parts = len(list(reference.parameters())) + 3 * 2 * 3
    most = dense + touched + parts * 8192
    with torch.inference_mode(), forced(model, lambda _: torch.tensor([[3, 11]])):
        model(ids)
        before = read(model)
        model(ids)
        again = read(model) - before
    assert before <= most < dense + whole / 2
    # The same experts are still in memory.
    assert again <= most - touched
    with torch.inference_mode(), forced(model, lambda _: torch.tensor([[4, 12]])):
        before = read(model)
        model(ids)
    assert touched <= read(model) - before <= most


def test_experts_are_read_in_place(tmp_path: Path) -> None:
    """Slices have the address modulo 64 that the file gives, if products do not depend on it."""
    saved("qwen3", tmp_path, torch.bfloat16)
    reference, model = pair(tmp_path, "qwen3", torch.bfloat16, "grouped_mm", budget=1 << 20)
    file = tmp_path / "model.safetensors"
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    experts = model.model.layers[1].mlp.experts
    moved = 0
    for own, first in (("gate_up_proj", "gate_proj"), ("down_proj", "down_proj")):
        for index in range(16):
            name = f"model.layers.1.mlp.experts.{index}.{first}.weight"
            phase = (8 + length + header[name]["data_offsets"][0]) % 64
            parameter = getattr(experts, own)
            may_move = addresses_are_exact(parameter.dtype, *parameter.shape[1:], 0, phase)
            moved += may_move and phase != 0
            found: list[int] = []
            with_slice(parameter, index, lambda own, found=found: found.append(own.data_ptr() % 64))
            assert found == [phase if may_move else 0]
    if moved == 0:
        pytest.skip("products on this processor depend on the address, or the phases are 0")
    ids = torch.randint(2, 90, (2, 9))
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, reference(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_experts_of_other_dtypes_keep_their_address(dtype: torch.dtype) -> None:
    assert not addresses_are_exact(dtype, 64, 64, 0, 8)
    assert not addresses_are_exact(torch.bfloat16, 64, 64, 7, 0)


def test_all_experts_under_the_smallest_budget_are_read_once(tmp_path: Path) -> None:
    saved("qwen3", tmp_path, torch.float32)
    for implementation in IMPLEMENTATIONS:
        reference, model = pair(tmp_path, "qwen3", torch.float32, implementation)
        ids = torch.randint(2, 90, (8, 16))
        parts = list(reference.parameters())
        most = sum(part.nbytes for part in parts) + 8192 * (len(parts) + 3 * 16 * 3)
        for _ in range(3):
            before = read(model)
            with torch.inference_mode():
                model(ids)
            assert read(model) - before <= most, implementation


@pytest.mark.parametrize("codec", ["raw", "auto"])
def test_a_live_model_divides_its_experts(tmp_path: Path, codec: str) -> None:
    torch.manual_seed(0)
    reference = hf.Qwen3MoeForCausalLM(qwen3()).eval()
    ids = torch.randint(2, 90, (1, 7))
    with torch.inference_mode():
        expected = reference(ids).logits
    state = {name: value.clone() for name, value in reference.state_dict().items()}
    config = ts.Config(
        storage_path=str(tmp_path), budget="5MiB", compression_enabled=codec != "raw"
    )
    model = ts.offload(reference, config)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(ids).logits, expected)
    for name, value in model.state_dict().items():
        assert torch.equal(value.clone(), state[name])
    model = ts.restore(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("codec", ["raw", "auto"])
@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gpt_oss"])
def test_a_converted_mixture_divides_its_experts(tmp_path: Path, name: str, codec: str) -> None:
    """In the file, the two matrices that are merged into one are neighbors."""
    saved(name, tmp_path / "plain", torch.bfloat16)
    reference = MODELS[name][0].from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).eval()
    converted = tmp_path / "converted"
    converted.mkdir()
    ts.convert(tmp_path / "plain", converted / "model.ts", codec=codec)
    (converted / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    low = smallest(converted, dtype=torch.bfloat16)
    assert low < expert_bytes(reference)
    plan = ts.plan(converted, budget=low)
    assert plan.expert_bytes_per_token
    for budget in (low, 2 * low):
        model = ts.from_pretrained(converted, budget=budget, dtype=torch.bfloat16)
        with torch.inference_mode():
            for shape in ((1, 1), (2, 9), (1, 1)):
                ids = torch.randint(2, 90, shape)
                assert torch.equal(model(ids).logits, reference(ids).logits)


def test_a_damaged_expert_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = hf.Qwen3MoeForCausalLM(qwen3()).eval()
    weight = model.model.layers[1].mlp.experts.down_proj[5].detach().numpy().tobytes()
    ts.offload(model, ts.Config(storage_path=str(tmp_path), budget="5MiB"))
    [path] = tmp_path.glob("*.ts")
    content = path.read_bytes()
    at = content.index(weight) + 100
    damaged = tmp_path / "damaged.ts"
    damaged.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    model = ts.offload(ts.restore(model), checkpoint=damaged, budget="5MiB")
    # A checksum covers a whole chunk, so the other slices of a damaged chunk are refused too.
    with (
        pytest.raises(ts.ChecksumError, match=r"`model\.layers\.1\.mlp\.experts\.down_proj\[5\]`"),
        torch.inference_mode(),
        forced(model, lambda _: torch.tensor([[5, 5]])),
    ):
        model(torch.tensor([[3]]))


def test_a_truncated_or_replaced_shard_is_an_error_that_names_the_expert(tmp_path: Path) -> None:
    saved("qwen3", tmp_path, torch.float32)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    copy = tmp_path / "copy"
    for is_replaced in (True, False):
        path.write_bytes(content)
        copy.write_bytes(content)
        model = ts.from_pretrained(tmp_path, budget="3MiB", experts_implementation="eager")
        with torch.inference_mode(), forced(model, lambda _: torch.tensor([[2, 3]])):
            model(torch.tensor([[3]]))
        if is_replaced:
            copy.replace(path)  # the open file is unchanged
            with torch.inference_mode(), forced(model, lambda _: torch.tensor([[14, 15]])):
                model(torch.tensor([[3]]))
            continue
        os.truncate(path, 200_000)
        with (
            torch.inference_mode(),
            forced(model, lambda _: torch.tensor([[14, 15]])),
            pytest.raises(
                ts.CheckpointChangedError, match=r"`.*experts\.[a-z_]+\[1[45]\]`.*too short"
            ),
        ):
            model(torch.tensor([[3]]))


def test_operations_on_all_experts(tmp_path: Path) -> None:
    saved("qwen3", tmp_path, torch.float32)
    reference, model = pair(tmp_path, "qwen3", torch.float32, "eager", budget="4MiB")
    [own, other] = [each.model.layers[0].mlp.experts.gate_up_proj for each in (model, reference)]
    assert torch.equal(own.sum(), other.sum())
    assert torch.equal(own[3], other[3])
    assert torch.equal(own[2:5], other[2:5])
    assert torch.equal(own[torch.tensor([[1, -1], [7, 1]])], other[torch.tensor([[1, -1], [7, 1]])])
    assert torch.equal(own[..., 5], other[..., 5])
    assert torch.equal(own.transpose(0, 1).contiguous(), other.transpose(0, 1).contiguous())
    with pytest.raises(IndexError):
        own[torch.tensor([16])]
    with torch.no_grad(), pytest.raises(ts.ModelError, match="restore"):
        own.zero_()
    small = ts.from_pretrained(tmp_path, budget=smallest(tmp_path, dtype=torch.float32))
    weight = small.model.layers[0].mlp.experts.gate_up_proj
    with pytest.raises(ts.BudgetError, match=r"needs \d+ bytes of `model"):
        weight.sum()
    assert torch.equal(weight.clone(), other)


class ListOfExperts(nn.Module):
    """A layer whose experts are modules of a list, as in code from before transformers 5."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(64, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)) for _ in range(experts)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(hidden).softmax(-1).topk(2, dim=-1)
        result = hidden.clone()
        for index in torch.unique(chosen).tolist():
            rows, place = torch.where(chosen == index)
            result[rows] += weights[rows, place, None] * self.experts[index](hidden[rows])
        return result


def list_model(experts: int = 16) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(ListOfExperts(experts) for _ in range(3))).eval()


@pytest.mark.parametrize("rows", (1, 64))
def test_experts_that_are_modules_are_read_when_chosen(rows: int, tmp_path: Path) -> None:
    reference = list_model()
    size = sum(parameter.nbytes for parameter in reference[0].experts[0].parameters())
    model = ts.offload(
        list_model(), ts.Config(storage_path=tmp_path, budget=14 * size, verify_checksums=False)
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        inputs = torch.randn(rows, 64, generator=generator)
        before = ts.stats(model)
        with torch.inference_mode():
            assert torch.equal(model(inputs), reference(inputs))
        after = ts.stats(model)
        touched = after["routed"]["touched_bytes"] - before["routed"]["touched_bytes"]
        read = after["read_bytes"] - before["read_bytes"]
        guessed = after["routed"]["guessed_bytes"] - before["routed"]["guessed_bytes"]
        # Both linear layers of each expert are units, which direct reads extend to alignments.
        assert touched > 0
        assert read - guessed <= touched + 3 * 16 * 2 * 8192 + 3 * 16 * 64 * 4
        assert after["routed"]["touched"] - before["routed"]["touched"] <= 3 * 2 * min(2 * rows, 16)
    assert ts.stats(model)["in_use_high_water_bytes"] <= 14 * size


def test_a_layer_that_always_uses_all_experts_is_read_ahead(tmp_path: Path) -> None:
    class All(ListOfExperts):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for expert in self.experts:
                hidden = hidden + expert(hidden)
            return hidden

    torch.manual_seed(3)
    reference = nn.Sequential(*(All(16) for _ in range(2))).eval()
    torch.manual_seed(3)
    size = sum(parameter.nbytes for parameter in reference[0].experts[0].parameters())
    model = ts.offload(
        nn.Sequential(*(All(16) for _ in range(2))).eval(),
        ts.Config(storage_path=tmp_path, budget=8 * size),
    )
    with torch.inference_mode():
        for _ in range(12):
            inputs = torch.randn(4, 64)
            assert torch.equal(model(inputs), reference(inputs))
    routed = ts.stats(model)["routed"]
    assert routed["right_guesses"] > 0.8 * routed["guesses"] > 100, routed


@contextlib.contextmanager
def autocast() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad, autocast])
def test_the_router_of_the_next_layer_guesses_its_experts(
    tmp_path: Path, mode: Any, dtype: torch.dtype
) -> None:
    """If all layers are the same and hardly change their input, the guesses are right."""
    torch.manual_seed(0)
    made = hf.Qwen3MoeForCausalLM(qwen3()).to(dtype)
    state = made.state_dict()
    for name in state:
        layer = name.replace("layers.1.", "layers.0.").replace("layers.2.", "layers.0.")
        state[name].copy_(state[layer])
        if name.endswith(("down_proj", "o_proj.weight")):
            state[name].mul_(1e-3)
    made.load_state_dict(state)
    made.save_pretrained(tmp_path)
    reference = hf.Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    least = smallest(tmp_path, dtype=dtype)
    budget = least + 12 * 128 * 96 * 3 * dtype.itemsize
    model = ts.from_pretrained(tmp_path, budget=budget, dtype=dtype)
    with mode():
        for token in range(60):
            ids = torch.tensor([[token], [token // 7]])
            assert torch.equal(model(ids).logits, reference(ids).logits)
    routed = ts.stats(model)["routed"]
    assert routed["touched"] > routed["hits"] > 0
    if mode is torch.enable_grad:
        assert routed["guesses"] == 0  # the router would add to the graph
        return
    assert routed["guesses"] > 10, routed
    assert routed["right_guesses"] > 0.6 * routed["guesses"], routed


def test_a_router_that_refuses_other_inputs_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved("qwen3", tmp_path, torch.float32)
    budget = smallest(path) + 1_000_000
    reference, model = pair(path, "qwen3", torch.float32, "eager", budget=budget)
    refused = []
    own: dict[int, torch.Tensor] = {}

    def forward(gate: Any, hidden: torch.Tensor) -> Any:
        if own.get(id(gate)) is not hidden:
            refused.append(1)
            raise ValueError("unexpected inputs")
        return plain(gate, hidden)

    ids = torch.tensor([[1]])
    with torch.inference_mode():
        expected = reference(ids).logits
    plain = type(model.model.layers[0].mlp.gate).forward
    monkeypatch.setattr(type(model.model.layers[0].mlp.gate), "forward", forward)
    for layer in model.model.layers:
        gate = layer.mlp.gate
        gate.register_forward_pre_hook(lambda gate, inputs: own.update({id(gate): inputs[0]}))
    with torch.inference_mode():
        for _ in range(3):
            own.clear()
            assert torch.equal(model(ids).logits, expected)
    assert refused


def test_the_most_used_experts_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = saved("qwen3", tmp_path / "model", torch.float32)
    model = ts.from_pretrained(path, budget=smallest(path))
    ids = torch.arange(12).unsqueeze(0)
    with torch.inference_mode():
        for _ in range(5):
            model(ids)
    scores = dict(streaming_of(model).shares[0].streamer.routing_scores())
    assert max(scores.values()) > 4
    del model
    (profile,) = (tmp_path / "cache" / "tensorstream" / "routing").iterdir()
    second = ts.from_pretrained(path, budget=smallest(path))
    loaded = dict(streaming_of(second).shares[0].streamer.routing_scores())
    for unit, score in scores.items():
        assert abs(loaded[unit] - score / 4) < 0.1
    # A damaged profile is ignored, and `restore` saves a new one.
    profile.write_text("[1, 2")
    third = ts.from_pretrained(path, budget=smallest(path))
    assert set(dict(streaming_of(third).shares[0].streamer.routing_scores()).values()) == {0.0}
    with torch.inference_mode():
        third(ids)
        third(ids)
    ts.restore(third)
    assert profile.read_text().startswith("{")


def test_statistics_by_layer(tmp_path: Path) -> None:
    path = saved("qwen3", tmp_path, torch.float32)
    model = ts.from_pretrained(path, budget=smallest(path) + 2_000_000)
    with torch.inference_mode():
        for token in range(4):
            model(torch.tensor([[token]]))
    stats = ts.stats(model)
    layers = [f"model.layers.{layer}.mlp.experts" for layer in range(3)]
    assert [each["name"] for each in stats["experts"]] == layers
    for each in stats["experts"]:
        # Two parameters of 16 experts, of which each of four tokens uses two.
        assert (each["units"], each["touched"]) == (32, 16)
        assert 0 <= each["hits"] <= 16
        assert 0 <= each["present"] <= 32
    for key in ("touched", "hits"):
        assert sum(each[key] for each in stats["experts"]) == stats["routed"][key]
    assert sum(each["present"] for each in stats["experts"]) > 0
    routed = [unit for unit in stats["units"] if unit["routed"]]
    assert sum(unit["read_bytes"] for unit in routed) == sum(
        each["read_bytes"] for each in stats["experts"]
    )


def test_experts_that_are_single_layers_get_their_weights(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.experts[3](hidden) + self.experts[5](hidden)

    class Addressed(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            assert self.weight.data_ptr() % 64 == 0, "a forward gets real memory"
            return super().forward(inputs)

    torch.manual_seed(0)
    reference = Layer()
    for index in range(8):
        reference.experts[index].__class__ = Addressed
    torch.manual_seed(0)
    model = Layer()
    for index in range(8):
        model.experts[index].__class__ = Addressed
    model = ts.offload(model, ts.Config(storage_path=tmp_path, budget="64KiB"))
    inputs = torch.randn(2, 64)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(inputs), reference(inputs))
    assert ts.stats(model)["routed"]["touched"] == 4
    assert ts.stats(model)["experts"][0]["name"] == "experts"
    ts.restore(model)
    with torch.inference_mode():
        assert torch.equal(model(inputs), reference(inputs))


def test_offload_works_without_a_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Path:
        raise RuntimeError("Could not determine home directory.")

    path = saved("qwen3", tmp_path, torch.float32)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fails)
    model = ts.from_pretrained(path, budget=smallest(path))
    with torch.inference_mode():
        model(torch.tensor([[1]]))
    del model
