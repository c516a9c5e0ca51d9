# SPDX-License-Identifier: MIT OR Apache-2.0
"""Generates text for many prompts, in batches that fit in memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .. import _native
from ..budget import parse_size
from ..config import HEADROOM
from ..errors import ConfigurationError, ModelError

#: The part of the available memory that the batch may take. The rest is for temporary tensors.
_SHARE = 0.5
#: The most sequences in a batch. Beyond it, computing limits the speed on most machines.
MOST = 64


def generate_many(
    model: Any,
    tokenizer: Any,
    prompts: Iterable[str],
    *,
    batch_size: int | None = None,
    cache_budget: int | str | None = None,
    **options: Any,
) -> list[str]:
    """Generates a continuation of each prompt. Blocks.

    A pass reads the weights once for all sequences of its batch, so large batches make better use
    of a slow disk. Prompts of similar length are generated together. Those of a batch are padded on
    the left, which can change the rounding: the text of a prompt is that of its batch, not always
    that of the prompt alone.

    Args:
        model: A model of transformers that can generate, streamed or in memory.
        tokenizer: Its tokenizer. Chat templates are not applied.
        prompts: The prompts.
        batch_size: The most sequences that are generated together. By default, as many as fit in
            half of the available memory, at most 64. To find out, the first token of the longest
            prompt is generated once more.
        cache_budget: Memory for the keys and values of a batch, as bytes or as a size such as
            ``"2GiB"``. The rest goes to files (``FileCache``), so batches can be larger. None
            keeps all in memory.
        options: Arguments of the model's ``generate``, such as ``max_new_tokens``.

    Returns:
        The texts without their prompts, in the order of the prompts.

    Raises:
        ModelError: The model cannot generate.
        ConfigurationError: The batch size is not positive, the budget is invalid, the tokenizer has
            no token to pad with, a prompt has no tokens, or an option would give several texts for
            a prompt.
        BudgetError: The keys and values of a layer are larger than the budget for them.

    Examples:
        >>> import tensorstream as ts
        >>> model = ts.from_pretrained("organisation/model", budget="6GiB")  # doctest: +SKIP
        >>> ts.generate_many(model, tokenizer, ["One", "Two"], max_new_tokens=20)  # doctest: +SKIP
    """
    if isinstance(prompts, str):
        raise ConfigurationError("`prompts` is a str: pass a list of prompts")
    rows = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    texts = [""] * len(rows)
    for numbers, outputs in batches(model, tokenizer, rows, batch_size, options, cache_budget):
        for number, output in zip(numbers, outputs, strict=True):
            texts[number] = tokenizer.decode(output, skip_special_tokens=True)
    return texts


def batches(
    model: Any,
    tokenizer: Any,
    rows: list[list[int]],
    batch_size: int | None,
    options: dict[str, Any],
    cache_budget: int | str | None = None,
) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Generates in batches.

    Args:
        model: The model.
        tokenizer: The tokenizer, which knows the token to pad with.
        rows: The tokens of each prompt.
        batch_size: The most sequences in a batch. ``None`` for as many as fit in memory.
        options: Arguments of the model's ``generate``.
        cache_budget: Memory for the keys and values of a batch. ``None`` for all of them.

    Yields:
        The numbers of the prompts of a batch, and the tokens that follow each of them.
    """
    if not hasattr(model, "can_generate") or not model.can_generate():
        raise ModelError(f"{type(model).__name__} cannot generate text")
    if batch_size is not None and batch_size < 1:
        raise ConfigurationError(f"invalid batch_size: {batch_size}: expected a positive number")
    if options.get("return_dict_in_generate") or (options.get("num_return_sequences") or 1) > 1:
        raise ConfigurationError(
            "one text is generated for each prompt: leave out `return_dict_in_generate` and "
            "`num_return_sequences`"
        )
    if cache_budget is not None and {"cache", "past_key_values"} & options.keys():
        raise ConfigurationError("give a cache or a cache_budget, not both")
    if options.get("prompt_lookup_num_tokens") or options.get("assistant_model"):
        # transformers generates one sequence at a time then.
        if batch_size not in (None, 1):
            raise ConfigurationError(
                f"prompt lookup and assistant models need batch_size=1, got {batch_size}"
            )
        batch_size = 1
    for number, row in enumerate(rows):
        if not row:
            raise ConfigurationError(f"prompt {number} has no tokens")
    if not rows:
        return
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if pad is None:
        raise ConfigurationError(
            "the tokenizer has neither a padding token nor an end token; set tokenizer.pad_token"
        )
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]), reverse=True)
    options = {"pad_token_id": pad, **options}
    most = batch_size
    if most is None:
        most = 1 if len(rows) == 1 else fitting(model, rows[order[0]], options, cache_budget)
    for begin in range(0, len(order), most):
        numbers = order[begin : begin + most]
        batch = [rows[number] for number in numbers]
        longest = max(map(len, batch))
        ids = torch.tensor(
            [[pad] * (longest - len(row)) + row for row in batch], device=model.device
        )
        mask = torch.tensor(
            [[0] * (longest - len(row)) + [1] * len(row) for row in batch], device=model.device
        )
        cache = cache_argument(model, cache_budget)
        outputs = model.generate(input_ids=ids, attention_mask=mask, **cache, **options)
        # An encoder-decoder begins its output with a token of its own.
        skipped = 1 if model.config.is_encoder_decoder else longest
        yield numbers, [_until_padding(output[skipped:], pad) for output in outputs]


def fitting(
    model: Any, row: list[int], options: dict[str, Any], cache_budget: int | str | None = None
) -> int:
    """Returns how many sequences of a length fit in the available memory, from 1 to ``MOST``.

    Generates one token, to measure what the cache and the logits of a sequence take.
    """
    own = {key: value for key, value in options.items() if key not in ("streamer", "max_length")}
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    given = cache_argument(model, cache_budget)
    output = model.generate(
        input_ids=torch.tensor([row], device=model.device),
        **{**own, **greedy, **given, "max_new_tokens": 1, "return_dict_in_generate": True},
    )
    # The pass has filled the budget for weights.
    available = _native.available_memory()
    if available is None:
        return 1
    length, longest = max(1, len(row)), len(row) + _new_tokens(model, row, options)
    text = model.config.get_text_config(decoder=True)
    width = max(text.vocab_size, 8 * text.hidden_size)
    each = 8 * width + 16 * len(row) * width // 8
    if cache_budget is not None:
        (cache,) = given.values()
        by_cache = int(min(part.batches_that_fit(longest) for part in _parts(cache)))
        budget = parse_size(cache_budget, "cache_budget")
        return max(1, min(by_cache, _most(available - HEADROOM - budget, each)))
    cache = getattr(output, "cache", None) or getattr(output, "past_key_values", None)
    cached = sum(tensor.nbytes for part in _parts(cache) for tensor in _tensors(part))
    return _most(available - HEADROOM, each + cached * longest // length)


def _most(available: int, each: int) -> int:
    """Returns how many sequences fit in a part of the available memory."""
    return int(min(MOST, max(1, available * _SHARE // max(1, each))))


def cache_argument(model: Any, budget: int | str | None) -> dict[str, Any]:
    """Returns the argument of ``generate`` for a cache that keeps to a budget, or none."""
    if budget is None:
        return {}
    from transformers import EncoderDecoderCache, GenerationMixin

    from ._file_cache import FileCache

    size = parse_size(budget, "cache_budget")
    cache: Any = None
    if model.config.is_encoder_decoder:

        class CrossCache(FileCache):
            """Some models create it again, with these arguments."""

            def __init__(self, *, config: Any = None, offloading: bool = False) -> None:
                super().__init__(max(1, size // 2), config=config)

        cache = EncoderDecoderCache(FileCache(max(1, size // 2), config=model.config), CrossCache())
    else:
        cache = FileCache(size, config=model.config)
    # transformers has renamed it.
    names = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


def _new_tokens(model: Any, row: list[int], options: dict[str, Any]) -> int:
    """Returns how many tokens are generated at most, or the length of the prompt if unknown."""
    given = options.get("generation_config")
    for name, prompt in (("max_new_tokens", 0), ("max_length", len(row))):
        most = options.get(name) or getattr(given, name, None)
        if most:
            return max(1, int(most) - prompt)
    own = model.generation_config
    if own.max_new_tokens or own.max_length:
        return max(1, int(own.max_new_tokens or own.max_length - len(row)))
    return len(row)


def _parts(cache: Any) -> list[Any]:
    """Returns the caches of an encoder-decoder, or the one of another model."""
    own = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    return [cache] if None in own else own


def _tensors(cache: Any) -> list[torch.Tensor]:
    """Returns the tensors of a cache of transformers."""
    layers = getattr(cache, "layers", None)
    held = [vars(layer) for layer in layers] if layers is not None else cache
    return [leaf for leaf in tree_leaves(held) if isinstance(leaf, torch.Tensor)]


def _until_padding(tokens: torch.Tensor, pad: int) -> torch.Tensor:
    """Returns the tokens of a sequence without the padding at its end."""
    others = (tokens != pad).nonzero()
    return tokens[: int(others[-1]) + 1] if len(others) else tokens[:0]
