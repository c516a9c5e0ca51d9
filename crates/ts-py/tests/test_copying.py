# SPDX-License-Identifier: MIT OR Apache-2.0
"""A deep copy of a streamed model streams from the same files. Pickled weights use no memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preloaded
import pytest
import tensorstream as ts
import torch
import transformers as hf
from conftest import Llama
from tensorstream.streaming._state import streaming_of
from torch import nn

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
#: Models and budgets. Some have tied weights, stacked experts, and weights that are computed.
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "tied": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, tie_word_embeddings=True)),
        "200KiB",
    ),
    "mixtral": (
        lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**SHAPE, num_local_experts=4, num_key_value_heads=2)
        ),
        "900KiB",
    ),
    "bert": (lambda: hf.BertForMaskedLM(hf.BertConfig(**SHAPE)), "200KiB"),
}
X = torch.arange(9)[None]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def check(streamed: Any, expected: torch.Tensor, x: torch.Tensor = X) -> None:
    with torch.inference_mode():
        for _ in range(3):
            outcome = streamed(x)
            assert torch.equal(getattr(outcome, "logits", outcome), expected)
    assert max(unit["loads"] for unit in ts.stats(streamed)["units"]) > 1


@pytest.mark.parametrize("name", MODELS)
def test_a_deep_copy_streams(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made, budget = MODELS[name]
    made().save_pretrained(tmp_path / "source")
    reference = type(made()).from_pretrained(tmp_path / "source")
    with torch.inference_mode():
        expected = reference(X).logits
    streamed = ts.from_pretrained(tmp_path / "source", budget=budget)
    check(streamed, expected)
    twin = copy.deepcopy(streamed)
    assert type(twin) is type(streamed)
    # The copy uses the engine, and so the budget, of the original.
    assert ts.stats(twin)["passes"] == ts.stats(streamed)["passes"] > 0
    assert ts.stats(twin)["budget_bytes"] == ts.stats(streamed)["budget_bytes"]
    second = copy.deepcopy(twin)
    check(twin, expected)
    check(streamed, expected)
    restored = ts.restore(twin)
    assert not [key for key in restored.__dict__ if key.startswith("__")]
    for (key, parameter), (other, wanted) in zip(
        restored.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert key == other
        assert torch.equal(parameter, wanted)
        assert parameter.requires_grad == wanted.requires_grad
    check(second, expected)
    check(streamed, expected)
    # A copy ends without the cycle collector, like any streamed model.
    gc.disable()
    try:
        ended = weakref.ref(second)
        del second
        assert ended() is None
    finally:
        gc.enable()


class Convolutions(nn.Module):
    """Weights in channels-last order, a frozen one, a buffer, and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3))
        self.body[0].weight.requires_grad_(False)
        self.lstm = nn.LSTM(32, 16, batch_first=True)
        self.same = self.body[2].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.stem(x)).flatten(2).transpose(1, 2)
        return self.lstm(hidden)[0]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_copies_of_a_module_of_ones_own(layout: torch.memory_format, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = Convolutions().eval().to(memory_format=layout)
    x = torch.randn(2, 3, 12, 12)
    with torch.inference_mode():
        expected = reference(x)
    streamed = copy.deepcopy(reference)
    ts.offload(streamed, ts.Config(storage_path=tmp_path, budget="48KiB"))
    holder = copy.deepcopy({"models": [streamed, streamed]})["models"]
    twin = holder[0]
    assert holder[1] is twin
    check(twin, expected, x)
    check(streamed, expected, x)
    assert not twin.get_parameter("body.0.weight").requires_grad
    assert twin.body[1].running_mean is not streamed.body[1].running_mean
    restored = ts.restore(twin)
    assert restored.same is restored.body[2].weight
    assert [p.stride() for p in restored.parameters()] == [
        p.stride() for p in reference.parameters()
    ]


def test_adapters_are_copied(llama: Llama) -> None:
    """New parameters stay in memory, and can be trained, in the copy too."""
    streamed = ts.from_pretrained(
        llama(), budget="300KiB", model_class=hf.LlamaForSequenceClassification, num_labels=5
    )
    streamed.config.pad_token_id = 0
    streamed.adapter = nn.Linear(5, 5)
    twin = copy.deepcopy(streamed)
    assert twin.score.weight is not streamed.score.weight
    assert torch.equal(twin.score.weight, streamed.score.weight)
    twin.adapter(twin(X).logits).sum().backward()
    assert twin.score.weight.grad is not None
    assert twin.adapter.weight.grad is not None
    assert streamed.score.weight.grad is None


def test_a_copy_of_a_wrapped_encoder(tmp_path: Path) -> None:
    """transformers wraps the forward of the encoder in a hook of accelerate."""
    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, decoder_start_token_id=0
    )
    reference = hf.T5ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = reference.generate(X + 3, **options)
    streamed = ts.from_pretrained(tmp_path, budget="200KiB", device_map="auto")
    streamed.generate(X + 3, **options)
    twin = copy.deepcopy(streamed)
    for model in (twin, streamed, ts.restore(twin)):
        assert torch.equal(model.generate(X + 3, **options), expected)
    # Nothing of the restored models keeps the engine.
    engine = weakref.ref(streaming_of(streamed).shares[0])
    ts.restore(streamed)
    gc.collect()
    assert engine() is None


def test_other_copies_are_those_in_memory(llama: Llama) -> None:
    path = llama()
    reference = hf.LlamaForCausalLM.from_pretrained(path)
    streamed = ts.from_pretrained(path, budget="300KiB")
    shallow = copy.copy(streamed)
    assert shallow.lm_head is streamed.lm_head
    file = io.BytesIO()
    torch.save(streamed, file)
    file.seek(0)
    with torch.inference_mode():
        expected = reference(X).logits
    check(shallow, expected)
    for saved in (pickle.loads(pickle.dumps(streamed)), torch.load(file, weights_only=False)):
        assert {type(parameter) for parameter in saved.parameters()} == {nn.Parameter}
        with torch.inference_mode():
            assert torch.equal(saved(X).logits, expected)
    check(streamed, expected)


def test_pickled_weights_are_those_of_the_model(tmp_path: Path) -> None:
    for name, (made, budget) in MODELS.items():
        torch.manual_seed(0)
        made().save_pretrained(tmp_path / name)
        reference = type(made()).from_pretrained(tmp_path / name)
        streamed = ts.from_pretrained(tmp_path / name, budget=budget)
        ours, theirs = io.BytesIO(), io.BytesIO()
        torch.save(streamed.state_dict(), ours)
        torch.save(reference.state_dict(), theirs)
        assert len(ours.getvalue()) == len(theirs.getvalue()), "tied weights are written once"
        loaded = torch.load(io.BytesIO(ours.getvalue()), weights_only=True)
        assert {type(value) for value in loaded.values()} == {torch.Tensor}
        reference.load_state_dict(loaded)
        for key, value in reference.state_dict().items():
            assert torch.equal(value, loaded[key])
        weight = next(iter(streamed.parameters()))
        assert type(pickle.loads(pickle.dumps(weight))) is nn.Parameter
        row = pickle.loads(pickle.dumps(weight.detach()[1]))
        assert row.shape == weight.shape[1:]
        with torch.inference_mode():
            assert torch.equal(streamed(X).logits, reference(X).logits)


@pytest.mark.parametrize("stored", ["safetensors", "ts"])
def test_saving_with_torch_takes_little_memory(
    stored: str, programs: preloaded.Server, tmp_path: Path
) -> None:
    """Weights of 200 MB are saved in less than 50 MB that the system cannot reclaim."""
    config = hf.LlamaConfig(**SHAPE | {"hidden_size": 1024, "intermediate_size": 4096})
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    source = tmp_path / "source"
    if stored == "ts":  # has checksums, so that weights are written to an unnamed file first
        ts.convert(source / "model.safetensors", source / "model.ts")
        (source / "model.safetensors").unlink()
    program = f"""
import sys, threading, time
import tensorstream as ts, torch
def anonymous():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["RssAnon"].split()[0]) * 1024
model = ts.from_pretrained({str(source)!r}, budget="20MB")
peak, done = 0, threading.Event()
before = anonymous()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous() - before)
        time.sleep(0.001)
watcher = threading.Thread(target=watch)
watcher.start()
torch.save(model.state_dict(), {str(tmp_path / "saved.pt")!r})
done.set()
watcher.join()
print(peak)
"""
    done = programs.run_code(program)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50_000_000
    saved = torch.load(tmp_path / "saved.pt", weights_only=True, mmap=True)
    expected = ts.load_file(source)
    assert sum(value.nbytes for value in saved.values()) > 180_000_000
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


def test_a_full_disk_is_reported(
    llama: Llama, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "model.ts"
    ts.save_file(ts.load_file(llama()), path)
    for file in llama().glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    streamed = ts.from_pretrained(tmp_path, budget="300KiB")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ts.StorageError, match="No space left"):
        torch.save(streamed.state_dict(), io.BytesIO())


def test_a_copy_of_a_part_can_be_changed(llama: Llama) -> None:
    """Copies stream until they are changed. The original stays as it is."""
    path = llama()
    streamed = ts.from_pretrained(path, budget="300KiB")
    reference = hf.LlamaForCausalLM.from_pretrained(path)
    changes: list[Callable[[Any], Any]] = [
        lambda part: part.requires_grad_(True),
        lambda part: part.to(torch.float64),
        lambda part: part.load_state_dict({k: v * 2 for k, v in part.state_dict().items()}),
        lambda part: [p.data.mul_(2) for p in part.parameters()],
        lambda part: [p.detach()[:1].fill_(3) for p in part.parameters()],
        lambda part: [nn.init.ones_(p) for p in part.parameters()],
        lambda part: [setattr(p, "data", p.data + 1) for p in part.parameters()],
        lambda part: torch.optim.SGD(_with_gradients(part), lr=0.1).step(),
    ]
    names = ("lm_head", "model.norm", "model.layers.1", "model.embed_tokens")
    for name, change in itertools.product(names, changes):
        part = copy.deepcopy(streamed.get_submodule(name))
        expected = copy.deepcopy(reference.get_submodule(name))
        for each in (part, expected):
            change(each)
        assert [type(p) for p in part.parameters()] == [nn.Parameter] * len([*part.parameters()])
        assert not [
            k for each in part.modules() for k in each.__dict__ if k in ("forward", "_apply")
        ]
        for own, wanted in zip(part.parameters(), expected.parameters(), strict=True):
            assert torch.equal(own, wanted) and own.requires_grad == wanted.requires_grad
    with torch.inference_mode():
        assert torch.equal(streamed(X).logits, reference(X).logits)
    assert ts.stats(streamed)["reserved_high_water_bytes"] <= 300 << 10


def _with_gradients(part: nn.Module) -> list[nn.Parameter]:
    for parameter in part.parameters():
        parameter.grad = torch.ones(parameter.shape)
    return [*part.parameters()]


MODES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_models_are_copied_and_saved_in_every_mode(
    dtype: torch.dtype, mode: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    source = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)).to(dtype)
    source.save_pretrained(tmp_path / "source")
    reference = hf.LlamaForCausalLM.from_pretrained(tmp_path / "source", dtype=dtype)
    size = sum(parameter.nbytes for parameter in reference.parameters())
    streamed = ts.from_pretrained(tmp_path / "source", budget=size // 2)
    file = io.BytesIO()
    with MODES[mode]():
        twin, part = copy.deepcopy(streamed), copy.deepcopy(streamed.lm_head)
        streamed.save_pretrained(tmp_path / "saved")
        torch.save(streamed.state_dict(), file)
    assert torch.equal(part.weight, reference.lm_head.weight)
    saved, loaded = ts.load_file(tmp_path / "saved"), torch.load(io.BytesIO(file.getvalue()))
    for name, value in reference.state_dict().items():
        assert torch.equal(loaded[name], value)
        assert torch.equal(saved[name], value)
    for context in MODES.values():
        with context():
            expected = reference(X).logits
            assert all(torch.equal(twin(X).logits, expected) for _ in range(3))
    inputs = [reference.model.embed_tokens(X).detach().requires_grad_() for _ in range(2)]
    for model, hidden in zip((reference, twin), inputs, strict=True):
        model(inputs_embeds=hidden).logits.float().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert max(unit["loads"] for unit in ts.stats(twin)["units"]) > 1
    restored = ts.restore(twin)
    restored(X, labels=X).loss.backward()
    assert all(parameter.grad is not None for parameter in restored.parameters())
