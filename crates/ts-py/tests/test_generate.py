# SPDX-License-Identifier: MIT OR Apache-2.0
"""Generates text: the command line, batches, and guesses from the prompt or a small model."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
import transformers
from tensorstream import _cli
from tensorstream.streaming import _generate
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["user", "assistant", "the", "cat", "sat", "on", "moon", "<image>", "describe", "it"]
WORDS += ["now", "again"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image> {% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %} {% endfor %}assistant"
)
Run = Callable[..., "Done"]
PROMPTS = ["the cat", "moon on the cat sat again now", "sat", "it the the cat on moon"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of words. It begins each text with a token, as that of Llama does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<pad>", "<s>", "</s>", "<unk>", *WORDS, *(f"w{i}" for i in range(100))]
    own = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<image>"]})
    fast.chat_template = TEMPLATE
    return fast


def text_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    torch.manual_seed(0)
    model = LlamaForCausalLM(text_config())
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@dataclass
class Done:
    """What a command did."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Returns a function that runs ``tensorstream`` in this process."""

    def run_here(*arguments: str, text: str = "") -> Done:
        monkeypatch.setattr(sys, "argv", ["tensorstream", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        capsys.readouterr()
        try:
            status = _cli.main()
        except SystemExit as exit:
            status = int(exit.code or 0)
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run_here


def expected(path: Path, prompt: str, *, raw: bool = False, **options: Any) -> str:
    model, own = LlamaForCausalLM.from_pretrained(path), tokenizer()
    if not raw:
        messages = [{"role": "user", "content": prompt}]
        prompt = own.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = own(prompt, return_tensors="pt", add_special_tokens=raw)
    inputs.pop("token_type_ids", None)
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False, **options)
    text: str = own.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_the_command_prints_text_and_statistics(chat: Path, run: Run) -> None:
    how = ["generate", str(chat), "--budget", "200KiB", "--max-new-tokens", "8", "--greedy"]
    for extra, stdin, raw in (
        (["--prompt", PROMPTS[1]], "", False),
        (["--raw"], PROMPTS[1], True),
        (["--raw", "--prompt", PROMPTS[1], "--prompt-lookup", "3"], "", True),
        (["--prompt", PROMPTS[1], "--cache-budget", "18KiB"], "", False),
    ):
        done = run(*how, *extra, text=stdin)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == expected(chat, PROMPTS[1], raw=raw).split()
        assert "tokens/s, limited by" in done.stderr and "budget 0 MiB" in done.stderr


def test_several_prompts_and_json(chat: Path, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    done = run(
        "generate", str(chat), "--budget", "200KiB", "--max-new-tokens", "8", "--greedy",
        "--prompts", str(file), "--batch-size", "2", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["prompt"] for each in found["outputs"]] == PROMPTS
    assert [each["text"] for each in found["outputs"]] == [expected(chat, p) for p in PROMPTS]
    assert found["new_tokens"] > 8 and found["tokens_per_s"] > 0
    assert found["budget_bytes"] == 200 << 10 and found["read_bytes"] > 200 << 10


def test_what_cannot_run_is_said(chat: Path, run: Run, tmp_path: Path) -> None:
    encoder = transformers.BertModel(transformers.BertConfig(vocab_size=50, hidden_size=12))
    encoder.save_pretrained(tmp_path)
    for arguments, status, words in (
        (["no/such/model", "--prompt", "x"], 2, "cannot open"),
        ([str(tmp_path), "--prompt", "x"], 2, "BertModel cannot generate"),
        ([str(chat), "--prompt", "x", "--budget", "1KiB"], 2, "smallest budget"),
        ([str(chat), "--prompt", "x", "--cache-budget", "1KiB"], 2, "give it at least"),
        (["no/such/model", "--prompt", "x", "--cache-budget", "little"], 2, "--cache-budget"),
        ([str(chat), "--prompt", "x", "--prompts", "y"], 2, "not both"),
        ([str(chat), "--prompts", str(tmp_path / "none")], 2, "No such file"),
        ([str(chat)], 2, "no prompt"),
    ):
        done = run("generate", *arguments)
        assert (done.returncode, words in done.stderr) == (status, True), done.stderr
        assert "Traceback" not in done.stderr


def test_an_interrupt_ends_the_command(chat: Path) -> None:
    command = Path(sys.executable).parent / "tensorstream"
    program = subprocess.Popen(
        [
            command,
            "generate",
            str(chat),
            "--prompt",
            "the cat",
            "--budget",
            "200KiB",
            "--max-new-tokens",
            "100000",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert program.stdout is not None
    program.stdout.read(1)
    time.sleep(0.2)
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 130, errors
    assert "Traceback" not in errors


def test_an_image_is_part_of_the_prompt(run: Run, tmp_path: Path) -> None:
    from PIL import Image

    torch.manual_seed(0)
    own = tokenizer()
    config = transformers.LlavaConfig(
        text_config=text_config(),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            image_size=16, patch_size=8,
        ),
        image_token_id=own.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
        tokenizer=own,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(tmp_path)
    image = Image.effect_noise((20, 20), 90).convert("RGB")
    image.save(tmp_path / "cat.png")
    done = run(
        "generate", str(tmp_path), "--image", str(tmp_path / "cat.png"), "--prompt", "describe it",
        "--greedy", "--max-new-tokens", "8", "--budget", "300KiB",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    inputs = processor(images=image, text="user <image> describe it assistant", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    text = own.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert done.stdout.split() == text.split()


def test_many_prompts_share_passes(chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ts.from_pretrained(chat, budget="200KiB")
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    texts = [expected(chat, prompt, raw=True) for prompt in PROMPTS]
    one = ts.generate_many(model, tokenizer(), PROMPTS, batch_size=1, **options)
    assert one == texts
    before = ts.stats(model)["passes"]
    assert ts.generate_many(model, tokenizer(), PROMPTS, **options) == texts
    assert ts.stats(model)["passes"] - before <= 9, "one batch, and a pass to measure"
    reads = ts.stats(model)["units"][0]["loads"]
    assert reads > 1
    available = ts._native.available_memory() or 0
    row = list(range(5, 25))
    assert _generate.fitting(model, row, options) == _generate.MOST
    monkeypatch.setattr(ts._native, "available_memory", lambda: _generate.HEADROOM + (2 << 20))
    assert 1 < _generate.fitting(model, row, options) < 30 < available
    monkeypatch.setattr(ts._native, "available_memory", lambda: 1)
    assert _generate.fitting(model, row, options) == 1
    assert ts.generate_many(model, tokenizer(), []) == []
    with pytest.raises(ts.ConfigurationError, match="batch_size"):
        ts.generate_many(model, tokenizer(), PROMPTS, batch_size=0)
    with pytest.raises(ts.ModelError, match="cannot generate"):
        ts.generate_many(torch.nn.Linear(1, 1), tokenizer(), PROMPTS)


def test_an_encoder_decoder_generates_many(tmp_path: Path) -> None:
    torch.manual_seed(0)
    own = tokenizer()
    config = transformers.T5Config(
        vocab_size=len(own), d_model=32, d_ff=64, d_kv=8, num_layers=3, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    reference = transformers.T5ForConditionalGeneration(config).eval()
    reference.save_pretrained(tmp_path)
    model = ts.from_pretrained(tmp_path, budget="100KiB")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    assert ts.generate_many(model, own, PROMPTS, **options) == ts.generate_many(
        reference, own, PROMPTS, **options
    )
    alone = own(PROMPTS[0], return_tensors="pt")["input_ids"]
    output = reference.generate(alone, **options)[0, 1:]
    [text] = ts.generate_many(model, own, PROMPTS[:1], **options)
    assert text == own.decode(output, skip_special_tokens=True)


def test_guessed_tokens_give_the_same_text(chat: Path) -> None:
    model = ts.from_pretrained(chat, budget="200KiB")
    assistant = LlamaForCausalLM.from_pretrained(chat)
    ids = tokenizer()(PROMPTS[1] + " " + PROMPTS[1], return_tensors="pt")["input_ids"]
    plain = assistant.generate(ids, max_new_tokens=12, do_sample=False)
    for guess in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        before = ts.stats(model)["passes"]
        output = model.generate(ids, max_new_tokens=12, do_sample=False, **guess)
        assert torch.equal(output, plain)
        passes = ts.stats(model)["passes"] - before
        assert passes <= 12 if "prompt_lookup_num_tokens" in guess else passes < 9


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ("text", {}, "a list"),
        (["a"], {"num_return_sequences": 2}, "num_return_sequences"),
        (["a"], {"return_dict_in_generate": True}, "return_dict_in_generate"),
        (["a", "b"], {"prompt_lookup_num_tokens": 2, "batch_size": 2}, "batch_size=1, got 2"),
    ],
)
def test_options_for_many_prompts_are_checked(
    chat: Path, prompts: Any, options: dict[str, Any], words: str
) -> None:
    model = ts.from_pretrained(chat, budget="200KiB")
    with pytest.raises(ts.ConfigurationError, match=words):
        ts.generate_many(model, tokenizer(), prompts, max_new_tokens=2, **options)
    with pytest.raises(ts.ConfigurationError, match="prompt 1 has no tokens"):
        next(_generate.batches(model, tokenizer(), [[1], []], None, {}))
    assert ts.stats(model)["passes"] == 0


def test_lookup_for_many_prompts(chat: Path) -> None:
    model = ts.from_pretrained(chat, budget="200KiB")
    options = {"max_new_tokens": 6, "do_sample": False}
    assert ts.generate_many(
        model, tokenizer(), PROMPTS, prompt_lookup_num_tokens=2, **options
    ) == ts.generate_many(model, tokenizer(), PROMPTS, batch_size=1, **options)


def test_invalid_options_of_the_command(chat: Path, run: Run, tmp_path: Path) -> None:
    how = ["generate", str(chat), "--budget", "200KiB", "--max-new-tokens", "4"]
    prompt = ["--prompt", PROMPTS[1]]
    assert run(*how, *prompt, "--temperature", "0").returncode == 0
    (tmp_path / "prompts").write_text("one\ntwo\n")
    for refused in (
        [*prompt, "--temperature", "-1"],
        [*prompt, "--greedy", "--temperature", "0.5"],
        ["--prompts", str(tmp_path / "prompts"), "--prompt-lookup", "3", "--batch-size", "2"],
        [*prompt, "--dtype", "foo"],
    ):
        done = run(*how, *refused)
        assert done.returncode == 2, refused
        assert "Traceback" not in done.stderr
    looked = run(*how, "--prompts", str(tmp_path / "prompts"), "--prompt-lookup", "3")
    assert looked.returncode == 0, looked.stderr
