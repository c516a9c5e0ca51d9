# SPDX-License-Identifier: MIT OR Apache-2.0
"""Keys and values in files: the same bits as in memory, under a budget."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import small_models
import tensorstream as ts
import torch
import transformers
from tensorstream.streaming import _file_cache, _stored_tensor
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, LlamaForCausalLM

LAYERS, HEADS, WIDTH = 6, 2, 16
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
}


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=64 // WIDTH,
        num_key_value_heads=HEADS,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def generated(model: Any, cache: Any, rows: int = 2, new: int = 60, **how: Any) -> Any:
    """Generates from prompts of 40 tokens. The files have to grow several times."""
    torch.manual_seed(1)
    ids = torch.randint(3, 100, (rows, 40))
    return model.generate(
        ids,
        cache=cache,
        max_new_tokens=new,
        min_new_tokens=new,
        output_logits=True,
        return_dict_in_generate=True,
        **how,
    )


def assert_same(actual: Any, expected: Any) -> None:
    assert torch.equal(actual.sequences, expected.sequences)
    for ours, theirs in zip(actual.logits, expected.logits, strict=True):
        assert torch.equal(ours, theirs)


def layer_bytes(rows: int, tokens: int, itemsize: int) -> int:
    return 2 * rows * HEADS * tokens * WIDTH * itemsize


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_generated_texts_have_the_same_bits(
    llama: LlamaForCausalLM, dtype: torch.dtype, how: str
) -> None:
    model, options = copy.deepcopy(llama).to(dtype), WAYS[how]
    rows = 1 if how == "prompt lookup" else 2
    expected = generated(model, DynamicCache(config=model.config), rows, **options)
    sequences = rows * options.get("num_beams", 1)
    whole = layer_bytes(sequences, 99 + 4, dtype.itemsize)
    for layers in (1, 2, 4):  # all in files, one read ahead, some in memory
        cache = ts.FileCache(layers * whole, config=model.config)
        assert_same(generated(model, cache, rows, **options), expected)
        assert cache.bytes_in_files >= 2 * whole * 99 // 103
        assert cache.bytes_in_memory <= (layers - 1) * whole
        assert (cache.bytes_in_memory > 0) == (layers == 4)


def test_a_streamed_model_generates_from_files(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    model = ts.from_pretrained(tmp_path, budget="150KiB")
    expected = generated(llama, DynamicCache(config=llama.config))
    for _ in range(2):
        cache = ts.FileCache("80KiB", config=model.config)
        assert_same(generated(model, cache), expected)
        assert cache.bytes_in_files > 4 * layer_bytes(2, 99, 4)


def test_the_budget_holds_while_tensors_are_alive(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts all tensors of keys and values, also those that are used and read ahead."""
    alive: dict[int, int] = {}
    most = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal most
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in alive:
            alive[key] = size
            weakref.finalize(tensor, alive.pop, key, None)
            most = max(most, sum(alive.values()))
        return tensor

    with_room, cat = _stored_tensor.StoredTensor.with_room, torch.cat
    monkeypatch.setattr(
        _stored_tensor.StoredTensor, "with_room", lambda *args: count(with_room(*args))
    )

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def cat(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return count(cat(*args, **kwargs))

    monkeypatch.setattr(transformers.cache_utils, "torch", Torch())
    whole = layer_bytes(2, 99, 4)
    for budget in (whole, 2 * whole, 3 * whole, 5 * whole, 9 * whole):
        most = 0
        cache = ts.FileCache(budget, config=llama.config)
        generated(llama, cache)
        assert whole <= most <= budget
        del cache
        gc.collect()
    assert not alive


def test_the_budget_in_an_error_is_the_smallest(llama: LlamaForCausalLM) -> None:
    whole = layer_bytes(2, 99, 4)
    with pytest.raises(ts.BudgetError, match=r"does not fit .*; give it at least") as error:
        generated(llama, ts.FileCache(whole // 2, config=llama.config))
    text = str(error.value)
    needed = int(text[text.index("at least ") + 9 :].split(maxsplit=1)[0])
    # It is the smallest for the text so far: one token more needs more.
    tokens = needed // layer_bytes(2, 1, 4) - 40
    generated(llama, ts.FileCache(needed, config=llama.config), new=tokens + 1)
    with pytest.raises(ts.BudgetError):
        generated(llama, ts.FileCache(needed, config=llama.config), new=tokens + 2)


@pytest.mark.parametrize(
    "kind", ["qwen3", "gemma2", "gpt2", "deepseek_v3", "zamba2", "nemotron_h", "qwen3_next"]
)
def test_families_of_models(kind: str) -> None:
    """Windows, latent attention, and recurrent states beside attention."""
    model = small_models.small_model(kind).model
    expected = generated(model, DynamicCache(config=model.config), new=5)
    probe = ts.FileCache("1GiB", config=model.config)
    assert_same(generated(model, probe, new=5), expected)
    stored = [layer.nbytes() for layer in probe.layers if hasattr(layer, "nbytes")]
    others = probe.bytes_in_memory - sum(stored)
    for times in (1, 2):
        cache = ts.FileCache(others + times * max(stored), config=model.config)
        assert_same(generated(model, cache, new=5), expected)
        assert cache.bytes_in_files > 0 or len(stored) == 1 < times


def test_an_encoder_and_decoder() -> None:
    family = families.FAMILIES["t5"]
    torch.manual_seed(0)
    model = getattr(transformers, family.model_class)(family.config()).eval()
    expected = generated(model, EncoderDecoderCache(DynamicCache(), DynamicCache()), new=5)
    sizes: list[int | str] = ["1GiB", "1GiB"]
    for _ in range(2):
        caches = [ts.FileCache(size) for size in sizes]
        assert_same(generated(model, EncoderDecoderCache(*caches), new=5), expected)
        sizes = [cache.layers[0].nbytes() for cache in caches]
    assert all(cache.bytes_in_files == 2 * cache.layers[0].nbytes() for cache in caches)


def test_a_prefix_is_computed_once(llama: LlamaForCausalLM) -> None:
    """The recipe of transformers: a deep copy of the cache of a prefix for each text."""
    torch.manual_seed(2)
    prefix, ends = torch.randint(3, 100, (1, 30)), torch.randint(3, 100, (3, 1, 5))
    caches = DynamicCache(config=llama.config), ts.FileCache("20KiB", config=llama.config)
    with torch.inference_mode():  # and then without
        for cache in caches:
            llama(prefix, cache=cache)
    assert caches[1].bytes_in_files > 0
    for end in ends:
        ids = torch.cat([prefix, end], 1)
        ours, theirs = (
            llama.generate(ids, cache=copy.deepcopy(cache), max_new_tokens=10, do_sample=False)
            for cache in (caches[1], caches[0])
        )
        assert torch.equal(ours, theirs)
    assert caches[1].get_seq_length() == 30


def fill(cache: Any, steps: tuple[int, ...] = (9, 1, 1, 4, 1), layers: int = 4) -> None:
    for step, tokens in enumerate(steps):
        torch.manual_seed(step)
        for number in range(layers):
            new = torch.randn(3, HEADS, tokens, WIDTH), torch.randn(3, HEADS, tokens, WIDTH + 8)
            cache.update(*new, number)


def assert_same_layers(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert mine.get_seq_length() == other.get_seq_length()
        assert mine.get_mask_sizes(1) == other.get_mask_sizes(1)
        for name in ("keys", "values"):
            assert torch.equal(getattr(mine, name), getattr(other, name))
            assert getattr(mine, name).stride() == getattr(other, name).stride()


@pytest.mark.parametrize("budget", ["54KiB", "110KiB", "1MiB"])
def test_operations_of_a_cache(budget: str) -> None:
    ours, theirs = ts.FileCache(budget), DynamicCache()
    index = torch.tensor([2, 0, 2])
    for cache in (ours, theirs):
        fill(cache)
        cache.reorder_cache(index)
    assert_same_layers(ours, theirs)
    assert len(list(iter(ours))) == len(ours) == 4
    for cache in (ours, theirs):
        cache.crop(-3)
        cache.crop(0)
    assert ours.get_seq_length() == 13
    for cache in (ours, theirs):
        fill(cache, (1, 2, 40))
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)
    for cache in (ours, theirs):
        cache.crop(-38)
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(2)
    assert_same_layers(ours, theirs)
    for cache in (ours, theirs):
        cache.reset()
    assert ours.get_seq_length() == ours.bytes_in_files == ours.bytes_in_memory == 0
    for cache in (ours, theirs):
        fill(cache)
    assert_same_layers(ours, theirs)
    with pytest.raises(ValueError, match="positive"):
        ours.crop(5)


def test_other_batches_and_dtypes_are_as_in_memory() -> None:
    ours, theirs = ts.FileCache("28KiB"), DynamicCache()
    for cache in (ours, theirs):
        fill(cache)
        wider = torch.ones(3, HEADS, 1, WIDTH, dtype=torch.float64)
        keys, _ = cache.update(wider, torch.ones(3, HEADS, 1, WIDTH + 8), 0)
        assert keys.dtype == torch.float64
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            cache.update(torch.ones(2, HEADS, 1, WIDTH), torch.ones(2, HEADS, 1, WIDTH + 8), 1)
    assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys)
    assert torch.equal(ours.layers[1].keys, theirs.layers[1].keys)


def test_files_go_with_the_cache(tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    cache = ts.FileCache("28KiB", directory=tmp_path)
    fill(cache)
    assert len(os.listdir("/proc/self/fd")) > before and list(tmp_path.iterdir()) == []
    twin = copy.deepcopy(cache)
    assert repr(cache) == repr(twin) and str(tmp_path) in repr(cache)
    del cache, twin
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:

        def pwrite(*args: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(_stored_tensor.os, "pwrite", pwrite)
        yield


def test_a_full_disk_loses_nothing(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    ours, theirs = ts.FileCache("28KiB", directory=tmp_path), DynamicCache()
    for cache in (ours, theirs):
        fill(cache)
    request.getfixturevalue("full_disk")
    new = torch.randn(3, HEADS, 1, WIDTH), torch.randn(3, HEADS, 1, WIDTH + 8)
    with pytest.raises(ts.StorageError, match=r"cannot write .*No space left .*; give it another"):
        ours.update(*new, 0)
    with pytest.raises(ts.StorageError, match="cannot write"):
        ours.reorder_cache(torch.tensor([0, 0, 1]))
    assert_same_layers(ours, theirs)


def test_a_truncated_file_is_reported() -> None:
    cache = ts.FileCache("28KiB")
    fill(cache)
    for layer in cache.layers:
        layer._forget_ahead()
        os.truncate(layer._keys._file.fileno(), 100)
    with pytest.raises(ts.StorageError, match=r"cannot read .*truncated"):
        fill(cache, (1,))


def test_what_is_refused(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    for budget in (0, -1, True, "much", 1.5):
        with pytest.raises(ts.ConfigurationError, match="invalid budget of a FileCache"):
            ts.FileCache(budget)  # type: ignore[arg-type]
    with pytest.raises(ts.ConfigurationError, match="is not a directory"):
        ts.FileCache("1MiB", directory=tmp_path / "missing")
    if Path("/dev/shm").is_dir():
        with pytest.raises(ts.ConfigurationError, match="in memory"):
            ts.FileCache("1MiB", directory="/dev/shm")
    cache = ts.FileCache("1MiB", config=llama.config)
    with pytest.raises(ts.ModelError, match="keeps no gradients"):
        llama(torch.ones(1, 3, dtype=torch.long), cache=cache)
    assert cache.get_seq_length() == 0
    with pytest.raises(ts.ModelError, match="cannot be pickled"):
        pickle.dumps(cache)


def test_a_forked_process_is_refused() -> None:
    cache = ts.FileCache("28KiB")
    fill(cache)
    child = os.fork()
    if child == 0:
        try:
            fill(cache, (1,))
        except ts.ModelError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_mounts_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"disk / ext4 rw 0 0\ntmpfs {tmp_path}/in\\040memory tmpfs rw 0 0\n"
        f"tmpfs {tmp_path}/both tmpfs rw 0 0\ndisk {tmp_path}/both ext4 rw 0 0\n"
    )
    monkeypatch.setattr(_file_cache, "open", lambda _, **how: mounts.open(**how), raising=False)
    assert _file_cache._is_in_memory(str(tmp_path / "in memory" / "deep"))
    assert not _file_cache._is_in_memory(str(tmp_path / "in"))
    assert not _file_cache._is_in_memory(str(tmp_path / "both"))


def test_many_prompts_with_a_budget_for_their_cache(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_generate import PROMPTS, tokenizer

    made: list[Any] = []
    own = _file_cache.FileCache
    monkeypatch.setattr(
        _file_cache, "FileCache", lambda *args, **how: made.append(own(*args, **how)) or made[-1]
    )
    expected = ts.generate_many(llama, tokenizer(), PROMPTS, batch_size=2, max_new_tokens=20)
    texts = ts.generate_many(
        llama, tokenizer(), PROMPTS, batch_size=2, max_new_tokens=20, cache_budget="20KiB"
    )
    assert texts == expected and len(made) == 2
    assert all(cache.bytes_in_files > 0 for cache in made)
    made.clear()
    # The batch size follows from the layer that has to fit twice: here two texts.
    ts.generate_many(llama, tokenizer(), PROMPTS, max_new_tokens=20, cache_budget="30KiB")
    assert len(made) == 3
    with pytest.raises(ts.ConfigurationError, match="invalid cache_budget"):
        ts.generate_many(llama, tokenizer(), PROMPTS, cache_budget="little")
