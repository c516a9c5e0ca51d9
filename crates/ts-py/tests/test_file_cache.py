# SPDX-License-Identifier: MIT OR Apache-2.0
"""Keys and values in files: the same bits as in memory, under a budget."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import weakref
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import families
import pytest
import small_models
import tensorstream as ts
import torch
import transformers
from tensorstream.streaming import _file_cache, _stored_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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


@pytest.mark.sampled(2)
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


class Alive(TorchDispatchMode):
    """Counts the memory of the tensors that were made since it began.

    Attributes:
        most: The most bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(out):
            storage = leaf.untyped_storage() if isinstance(leaf, torch.Tensor) else None
            # Tensors of numbers that select are tiny beside those of any model.
            if storage is None or storage.nbytes() < 512 or storage._cdata in given:
                continue
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, storage._cdata, None)
                self.most = max(self.most, sum(self._sizes.values()))
        return out


def test_the_budget_holds_while_tensors_are_alive() -> None:
    """All keys and values are counted, also those that are used, copied and read ahead."""
    token = 2 * 2 * HEADS * WIDTH * 4  # of a layer, in bytes

    def run(budget: int, steps: list[Any], only_read: tuple[int, ...] = ()) -> int:
        alive, cache = Alive(), ts.FileCache(budget)
        for number, step in enumerate(steps):
            for layer in range(6) if isinstance(step, int) else ():
                if number and layer in only_read:
                    with alive:
                        layers = cache.layers[layer].keys, cache.layers[layer].values
                else:
                    new = (torch.ones(2, HEADS, step, WIDTH), torch.ones(2, HEADS, step, WIDTH))
                    with alive:
                        layers = cache.update(*new, layer)
                del layers
            if step == "again":  # a pass that ended early
                cache.update(*new, 0)
            elif not isinstance(step, int):
                with alive:
                    step(cache)
        return alive.most

    for tokens in (105, 215, 260, 330, 470):
        assert run(tokens * token, [100, 1, 1, 1]) <= tokens * token
    for tokens in (210, 215, 260, 330, 470):
        assert run(tokens * token, [100, 1, 100]) <= tokens * token, "a chat"
        assert run(tokens * token, [40, 1, "again", 40, "again", 1]) <= tokens * token
        assert run(tokens * token, [100, 1, 1, 1], (1, 3, 5)) <= tokens * token, "cross-attention"
        order = [lambda cache: cache.reorder_cache(torch.tensor([1, 0])), 1]
        assert run(tokens * token, [100, 1, *order, *order]) <= tokens * token
        repeat = [lambda cache: cache.batch_repeat_interleave(2)]
        assert run(tokens * token, [100, 1, *repeat]) <= tokens * token
        crop = [lambda cache: cache.crop(-20), 20, 1]
        assert run(tokens * token, [100, 1, *crop, *crop]) <= tokens * token


def test_a_window_takes_the_room_of_what_is_read_ahead() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(num_hidden_layers=3, sliding_window=8, layer_types=kinds)
    token = 2 * 2 * HEADS * WIDTH * 4
    alive, budget = Alive(), 212 * token + 8  # for the number of the window
    cache = ts.FileCache(budget, config=config)
    for tokens in (100, 1, 100):
        for layer in range(3):
            new = torch.ones(2, HEADS, tokens, WIDTH), torch.ones(2, HEADS, tokens, WIDTH)
            with alive:
                layers = cache.update(*new, layer)
            del layers
    assert 208 * token <= alive.most <= budget


def test_windows_of_attention_stay_small() -> None:
    config = transformers.Gemma3TextConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
        pad_token_id=0,
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    ids = torch.randint(3, 100, (1, 300))
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    # Two layers of full attention in files, and ten windows of seven tokens.
    token = 2 * 16 * 4
    budget = 2 * 304 * token + 10 * 7 * token + 2000
    cache = ts.FileCache(budget, config=config)
    assert torch.equal(
        model.generate(ids, cache=cache, max_new_tokens=4, do_sample=False), expected
    )
    assert cache.bytes_in_files == 2 * 303 * token
    with torch.no_grad(), pytest.raises(ts.BudgetError) as error:
        model(ids, cache=ts.FileCache(9 * 300 * token // 10, config=config))
    needed = int(str(error.value).split("at least ")[1].split(maxsplit=1)[0])
    with torch.no_grad():
        model(ids, cache=ts.FileCache(needed, config=config))


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


@pytest.mark.sampled(2)
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


@pytest.mark.parametrize("seed", range(40))
def test_random_operations(seed: int) -> None:
    """Random sequences of operations have the results of a cache in memory."""
    random = Random(seed)
    torch.manual_seed(seed)
    dtype = random.choice([torch.float32, torch.bfloat16, torch.float16])
    heads, widths, batch = random.randint(1, 3), (random.randint(1, 9), random.randint(1, 9)), 2
    token = heads * sum(widths) * dtype.itemsize
    ours, theirs = ts.FileCache(2 * token * random.randint(40, 300)), DynamicCache()

    def both(operation: str, argument: Any) -> None:
        for cache in (ours, theirs):
            getattr(cache, operation)(argument)

    for _ in range(random.randint(4, 16)):
        kind = random.choice(["update"] * 4 + ["crop", "reorder", "select", "repeat", "copy"])
        if kind == "update" or not theirs.layers or theirs.get_seq_length() == 0:
            tokens = random.choice([1, 1, 1, 2, 9])
            with random.choice([torch.no_grad, torch.inference_mode])():
                for layer in range(4):
                    shapes = [(batch, tokens, heads, width) for width in widths]
                    new = [torch.randn(shape).to(dtype).transpose(1, 2) for shape in shapes]
                    actual, expected = ours.update(*new, layer), theirs.update(*new, layer)
                    for mine, other in zip(actual, expected, strict=True):
                        assert torch.equal(mine, other) and mine.stride() == other.stride()
        elif kind == "crop":
            both("crop", -random.randint(0, 12))
        elif kind == "reorder":
            both("reorder_cache", torch.randint(0, batch, (batch,)))
        elif kind == "select":
            batch, rows = 2, torch.randint(-batch, batch, (2,))
            both("batch_select_indices", rows)
        elif kind == "repeat" and batch < 4:
            batch *= 2
            both("batch_repeat_interleave", 2)
        elif kind == "copy":
            ours = copy.deepcopy(ours)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert mine.get_seq_length() == other.get_seq_length()
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)


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


def test_a_full_disk_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = ts.FileCache("28KiB"), DynamicCache()
    for cache in (ours, theirs):
        fill(cache)
    new = torch.randn(3, HEADS, 1, WIDTH), torch.randn(3, HEADS, 1, WIDTH + 8)
    own, left = os.pwrite, 0

    def pwrite(*args: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return own(*args)

    monkeypatch.setattr(_stored_tensor.os, "pwrite", pwrite)
    rows = 3 * HEADS  # of each file, which takes a write for each
    for left in (0, 1, rows, 2 * rows - 1):  # noqa: B007  # a variable of pwrite
        with pytest.raises(ts.StorageError, match=r"cannot write .*No space left .*; give it"):
            ours.update(*new, 0)
    for left in (0, rows, 2 * rows - 1):  # noqa: B007
        with pytest.raises(ts.StorageError, match="cannot write"):
            ours.reorder_cache(torch.tensor([0, 0, 1]))
    left = 0
    grown = torch.randn(3, HEADS, 9, WIDTH).double(), torch.randn(3, HEADS, 9, WIDTH + 8)
    with pytest.raises(ts.StorageError, match="cannot write"):
        ours.update(*grown, 0)
    left = 1000
    assert_same_layers(ours, theirs)
    first = ts.FileCache("1KiB")
    for left in (0, 1000):
        with pytest.raises(ts.StorageError) if left == 0 else nullcontext():
            first.update(*new, 0)
    assert first.get_seq_length() == 1


def test_too_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(_stored_tensor.tempfile, "TemporaryFile", full)
    with pytest.raises(ts.StorageError, match=r"Too many open files; .*ulimit -n"):
        fill(ts.FileCache("28KiB"))


def test_a_truncated_file_is_reported() -> None:
    cache = ts.FileCache("28KiB")
    fill(cache)
    for layer in cache.layers:
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
    states = ts.FileCache("1MiB", config=transformers.MambaConfig(num_hidden_layers=2))
    assert repr(states).startswith("FileCache(2 layers, 0 tokens, 0 of 1048576 bytes in memory")


def test_a_forked_process_is_refused() -> None:
    cache = ts.FileCache("28KiB")
    fill(cache)
    child = os.fork()
    if child == 0:
        try:
            cache.crop(-1)  # with a read under way
            copied = copy.deepcopy(cache)
            fill(copied, (1,))
            fill(cache, (1,))
        except ts.ModelError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("kind", ["tmpfs", "devtmpfs", "ext4", "overlay"])
def test_mounts_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "21 1 0:9999 / / rw,relatime shared:1 - tmpfs tmpfs rw\n"
        f"22 1 {os.major(device)}:{os.minor(device)} / /mnt rw - {kind} disk rw\n"
    )
    monkeypatch.setattr(_file_cache, "open", lambda _, **how: mounts.open(**how), raising=False)
    assert _file_cache._is_in_memory(str(tmp_path)) == (kind in ("tmpfs", "devtmpfs"))


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
    with pytest.raises(ts.ConfigurationError, match="not both"):
        ts.generate_many(llama, tokenizer(), PROMPTS, cache_budget="30KiB", cache=made[0])
    with pytest.raises(ts.ConfigurationError, match="invalid cache_budget"):
        ts.generate_many(llama, tokenizer(), PROMPTS, cache_budget="little")
