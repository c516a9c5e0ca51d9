# SPDX-License-Identifier: MIT OR Apache-2.0
"""Generates text with a language model that streams its weights."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from ..budget import parse_size
from ..errors import ConfigurationError, TensorStreamError
from ..files._hub import HubModel
from ._generate import batches, cache_argument
from ._offload import stats


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tensorstream generate", description=__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a directory, or a name on the Hugging Face Hub")
    add("--prompt", metavar="TEXT", help="the prompt (default: standard input)")
    add("--prompts", metavar="FILE", help="a file with a prompt in each line, generated in batches")
    add("--system", metavar="TEXT", help="the system message of a chat")
    add("--image", metavar="FILE", action="append", default=[], help="an image for the prompt")
    add("--raw", action="store_true", help="do not apply the chat template of the tokenizer")
    add("--budget", metavar="SIZE", help='memory for weights, such as "6GB" (default: "auto")')
    add("--cache-budget", metavar="SIZE", help="memory for the KV cache; the rest is in files")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    add("--greedy", action="store_true", help="choose the most likely token; do not sample")
    add("--temperature", type=float, metavar="T", help="default: that of the model")
    add("--seed", type=int, metavar="N", help="the seed for sampling")
    add("--batch-size", type=int, metavar="N", help="default: as many as fit in memory")
    add("--prompt-lookup", type=int, metavar="N", help="guess N tokens from the prompt at a time")
    add("--dtype", help="cast weights, which writes them to storage once")
    add("--revision", help="the branch, tag or commit on the Hub")
    add("--trust-remote-code", action="store_true", help="run code of the checkpoint")
    add("--json", action="store_true", help="print texts and statistics as JSON")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs ``tensorstream generate``. Prints text as it is generated, and then statistics.

    Args:
        arguments: The arguments. None means those of the process.

    Returns:
        The exit status: 0; 2 after an error, which is printed; 130 after an interrupt.

    Raises:
        SystemExit: The arguments are invalid.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.prompt is not None and options.prompts is not None:
        parser.error("give --prompt or --prompts, not both")
    if options.image and options.prompts is not None:
        parser.error("--image needs one --prompt")
    if options.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    if options.temperature is not None and options.temperature < 0:
        parser.error(f"--temperature must not be negative, got {options.temperature}")
    if options.temperature == 0:
        options.greedy, options.temperature = True, None
    if options.greedy and options.temperature is not None:
        parser.error("give --greedy or --temperature, not both")
    if options.prompt_lookup is not None and options.batch_size not in (None, 1):
        parser.error("--prompt-lookup needs --batch-size 1")
    try:
        if options.cache_budget is not None:
            parse_size(options.cache_budget, "--cache-budget")
        _run(options)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    # transformers raises ValueError for settings that do not fit the model.
    except (TensorStreamError, OSError, ImportError, ValueError) as error:
        print(f"tensorstream generate: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    prompts = _prompts(options)
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigurationError(
            "generating needs transformers: pip install 'tensorstream[transformers]'"
        ) from error

    from ._transformers import from_pretrained

    transformers.utils.logging.set_verbosity_error()
    given = {"revision": options.revision} if options.revision else {}
    on_hub = HubModel.named(options.model, given)
    name = options.model if on_hub is None else on_hub.name
    own = given if on_hub is None else on_hub.arguments()
    if options.trust_remote_code:
        own["trust_remote_code"] = True
    dtype = {"dtype": options.dtype} if options.dtype else {}
    model = from_pretrained(name, budget=options.budget, **own, **dtype)
    if not hasattr(model, "can_generate") or not model.can_generate():
        raise ConfigurationError(f"{options.model}: {type(model).__name__} cannot generate text")
    decoder, rows, inputs = _inputs(transformers, options, name, own, prompts)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    shown = None
    if not options.json and len(prompts) == 1 and _streams_tokens(model):
        shown = transformers.TextStreamer(decoder, skip_prompt=True, skip_special_tokens=True)
    clock = _Clock(shown)
    texts = _texts(model, decoder, rows, inputs, options, clock)
    _report(model, options, prompts, texts, clock)


def _texts(
    model: Any,
    decoder: Any,
    rows: list[list[int]],
    inputs: dict[str, Any],
    options: argparse.Namespace,
    clock: _Clock,
) -> list[str]:
    """Generates a text for each prompt, or for the inputs with images."""
    settings: dict[str, Any] = {"max_new_tokens": options.max_new_tokens}
    if _streams_tokens(model):
        settings["streamer"] = clock
    if options.greedy:
        settings |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if options.temperature is not None:
        settings |= {"do_sample": True, "temperature": options.temperature}
    if options.prompt_lookup is not None:
        settings["prompt_lookup_num_tokens"] = options.prompt_lookup
    if inputs:
        cache = cache_argument(model, options.cache_budget)
        output = model.generate(**inputs, **cache, **settings)[0, inputs["input_ids"].shape[1] :]
        clock.count_at_end(output)
        return [str(decoder.decode(output, skip_special_tokens=True))]
    texts = [""] * len(rows)
    for numbers, outputs in batches(
        model, decoder, rows, options.batch_size, settings, options.cache_budget
    ):
        for number, output in zip(numbers, outputs, strict=True):
            clock.count_at_end(output)
            texts[number] = decoder.decode(output, skip_special_tokens=True)
    return texts


def _streams_tokens(model: Any) -> bool:
    """Returns whether tokens come one by one. transformers does not pass on those of beams."""
    return (model.generation_config.num_beams or 1) == 1


def _report(
    model: Any, options: argparse.Namespace, prompts: list[str], texts: list[str], clock: _Clock
) -> None:
    """Prints the texts that were not shown yet, and the statistics."""
    measured = stats(model)
    if options.json:
        result = {
            "model": options.model,
            "outputs": [
                {"prompt": prompt, "text": text}
                for prompt, text in zip(prompts, texts, strict=True)
            ],
            "new_tokens": clock.tokens,
            "first_token_s": round(clock.first_s, 3),
            "tokens_per_s": round(clock.rate(), 3),
            "bottleneck": measured["bottleneck"],
            "budget_bytes": measured["budget_bytes"],
            "read_bytes": measured["read_bytes"],
        }
        print(json.dumps(result))
        return
    if len(prompts) > 1:
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"> {prompt}\n{text}\n")
    elif not clock.is_shown:
        print(texts[0])
    print(
        f"{clock.tokens} tokens; the first after {clock.first_s:.1f} s, then {clock.rate():.2f} "
        f"tokens/s, limited by {measured['bottleneck']}; budget "
        f"{measured['budget_bytes'] / 2**20:.0f} MiB",
        file=sys.stderr,
    )


def _prompts(options: argparse.Namespace) -> list[str]:
    """Returns the prompts."""
    if options.prompt is not None:
        return [options.prompt]
    if options.prompts is not None:
        with open(options.prompts, encoding="utf-8") as file:
            prompts = [line.rstrip("\n") for line in file if line.strip()]
        if not prompts:
            raise ConfigurationError(f"{options.prompts} has no prompts")
        return prompts
    if sys.stdin.isatty():
        print("prompt, ended by Ctrl+D:", file=sys.stderr)
    text = sys.stdin.read().strip()
    if not text:
        raise ConfigurationError("there is no prompt: give --prompt, --prompts or standard input")
    return [text]


def _inputs(
    transformers: Any,
    options: argparse.Namespace,
    name: str,
    own: dict[str, Any],
    prompts: list[str],
) -> tuple[Any, list[list[int]], dict[str, Any]]:
    """Returns what decodes tokens, and the tokens of each prompt, or inputs with images."""
    if options.image:
        processor = transformers.AutoProcessor.from_pretrained(name, **own)
        if not hasattr(processor, "tokenizer"):  # it is a tokenizer
            raise ConfigurationError(f"{options.model} takes no images; leave out --image")
        images = [{"type": "image", "path": image} for image in options.image]
        chat = _messages(options.system, [*images, {"type": "text", "text": prompts[0]}])
        inputs = processor.apply_chat_template(
            chat,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        return processor.tokenizer, [], dict(inputs)
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, **own)
    if options.raw or not getattr(tokenizer, "chat_template", None):
        if options.system:
            raise ConfigurationError(f"{options.model} has no chat template for --system")
        return tokenizer, [tokenizer(prompt)["input_ids"] for prompt in prompts], {}
    chats = [
        tokenizer.apply_chat_template(
            _messages(options.system, prompt), add_generation_prompt=True, tokenize=False
        )
        for prompt in prompts
    ]
    # The template contains the special tokens.
    rows = [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats]
    return tokenizer, rows, {}


def _messages(system: str | None, content: Any) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": content}]


class _Clock:
    """A streamer of transformers that measures the time of tokens, and passes them on.

    Attributes:
        tokens: The number of tokens that were generated.
        first_s: Seconds until the first of them.
    """

    def __init__(self, shown: Any | None) -> None:
        self._shown = shown
        #: Whether texts are shown while they are generated.
        self.is_shown = shown is not None
        self.tokens = 0
        self.first_s = 0.0
        self._later_s = 0.0
        self._later = 0
        self._last: float | None = None
        self._was_streamed = False
        self._began = time.monotonic()

    def put(self, tokens: Any) -> None:
        """Receives the prompt at the beginning of each batch, and then tokens."""
        now = time.monotonic()
        self._was_streamed = True
        if self._last is not None:
            self.tokens += tokens.numel()
            if self.first_s == 0.0:
                self.first_s = now - self._began
            else:
                self._later += tokens.numel()
                self._later_s += now - self._last
        self._last = now
        if self._shown is not None:
            self._shown.put(tokens)

    def count_at_end(self, tokens: Any) -> None:
        """Counts the tokens of a text whose tokens did not come one by one."""
        if not self._was_streamed:
            self.tokens += tokens.numel()
            self.first_s = self.first_s or time.monotonic() - self._began

    def end(self) -> None:
        """Receives the end of a batch."""
        self._last = None
        if self._shown is not None:
            self._shown.end()

    def rate(self) -> float:
        """Returns the tokens per second, without the first ones."""
        return self._later / self._later_s if self._later_s else 0.0
