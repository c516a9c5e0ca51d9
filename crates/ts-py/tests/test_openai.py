# SPDX-License-Identifier: MIT OR Apache-2.0
"""Clients of the OpenAI API get the answers of a streamed model from the server of transformers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import tensorstream as ts
import torch
from tensorstream.streaming import _openai
from test_generate import expected, text_config, tokenizer
from transformers import LlamaForCausalLM
from transformers.cli.serving import model_manager

PROMPTS = ["the cat", "moon on the cat sat", "sat again", "it is now", "the moon", "on it", "w1 w2"]
BUDGET = "200KiB"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat")
    torch.manual_seed(0)
    LlamaForCausalLM(text_config()).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def served(chat: Path) -> Iterator[Any]:
    """Starts the server on a free port."""
    server = _openai.server(str(chat), ts.Config(budget=BUDGET), port=0)
    while not server.server.started:
        time.sleep(0.01)
    yield server
    server.kill_server()


@pytest.fixture
def client(served: Any) -> Iterator[openai.OpenAI]:
    port = served.server.servers[0].sockets[0].getsockname()[1]
    with openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none") as made:
        yield made


def ask(client: openai.OpenAI, model: Path, prompt: str) -> str:
    answer = client.chat.completions.create(
        model=str(model),
        messages=[{"role": "user", "content": prompt}],
        max_tokens=8,
        temperature=0,
    )
    return answer.choices[0].message.content or ""


def test_concurrent_clients_get_what_generate_gives(
    client: openai.OpenAI, served: Any, chat: Path
) -> None:
    wanted = {prompt: expected(chat, prompt) for prompt in PROMPTS}
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda prompt: ask(client, chat, prompt), PROMPTS * 4))
    assert answers == [wanted[prompt] for prompt in PROMPTS * 4]
    (timed,) = served._model_manager.loaded_models.values()
    stats = ts.stats(timed.model)
    assert max(unit["loads"] for unit in stats["units"]) > 20, "the model streams"
    assert stats["reserved_high_water_bytes"] <= 200 << 10


def test_text_comes_in_pieces(client: openai.OpenAI, chat: Path) -> None:
    pieces = client.chat.completions.create(
        model=str(chat),
        messages=[{"role": "user", "content": "the cat"}],
        max_tokens=8,
        temperature=0,
        stream=True,
    )
    texts = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    assert "".join(texts) == expected(chat, "the cat")
    assert len([text for text in texts if text]) > 2


def test_a_client_that_goes_away_ends_nothing_else(client: openai.OpenAI, chat: Path) -> None:
    pieces = client.chat.completions.create(
        model=str(chat),
        messages=[{"role": "user", "content": "the cat"}],
        max_tokens=2000,
        stream=True,
    )
    next(iter(pieces))
    pieces.close()
    assert ask(client, chat, "sat again") == expected(chat, "sat again")


def test_another_version_of_the_server_is_refused_in_words(
    chat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _openai._require()[1] is model_manager
    monkeypatch.setattr(model_manager.ModelManager, "_load_model", lambda self, name: None)
    with pytest.raises(ts.ConfigurationError, match=r"`ModelManager._load_model` has no `gguf_"):
        _openai.server(str(chat), ts.Config(budget=BUDGET), port=0)
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    with pytest.raises(ts.ConfigurationError, match=r"pip install 'tensorstream\[serving\]'"):
        _openai.server(str(chat), ts.Config(budget=BUDGET), port=0)


def test_errors_of_the_command(
    chat: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert _openai.main([str(chat), "--budget", "1KiB"]) == 2
    assert "smallest budget that works" in capsys.readouterr().err
    assert _openai.main([str(tmp_path / "missing")]) == 2
    assert _openai.main([str(chat), "--dtype", "float15"]) == 2
    assert "float15" in capsys.readouterr().err
    assert not [t for t in threading.enumerate() if t.name == "uvicorn-thread" and not t.daemon][1:]
