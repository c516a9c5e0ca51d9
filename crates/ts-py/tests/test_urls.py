# SPDX-License-Identifier: MIT OR Apache-2.0
"""Models whose weights are on a web server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorstream as ts
import torch
import transformers
from webserver import WebServer

IDS = torch.arange(5)[None]


@pytest.fixture
def model() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=500,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def url(model: transformers.LlamaForCausalLM, tmp_path: Path) -> Iterator[str]:
    """Serves the checkpoint of the model."""
    model.save_pretrained(tmp_path)
    with WebServer(tmp_path) as server:
        yield server.url


def test_a_model_streams_from_a_web_server(model: transformers.LlamaForCausalLM, url: str) -> None:
    streamed = ts.from_pretrained(url, budget="400KiB", model_config=model.config)
    for _ in range(2):
        assert torch.equal(streamed(IDS).logits, model(IDS).logits)
    generated = streamed.generate(IDS, max_new_tokens=3, do_sample=False)
    assert torch.equal(generated, model.generate(IDS, max_new_tokens=3, do_sample=False))
    weights = sum(p.nbytes for p in model.parameters())
    assert ts.stats(streamed)["read_bytes_by_path"]["network"] > 2 * weights


def test_tensors_of_a_web_server_are_converted_once(
    model: transformers.LlamaForCausalLM,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    half = {"dtype": torch.bfloat16, "model_config": model.config, "budget": "300KiB"}
    expected = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)(IDS).logits
    messages = []
    for _ in range(2):
        assert torch.equal(ts.from_pretrained(url, **half)(IDS).logits, expected)
        messages.append("converting" in capsys.readouterr().err)
    assert messages == [True, False]


def test_tensors_of_a_web_server_cannot_be_views(
    model: transformers.LlamaForCausalLM, url: str
) -> None:
    expected = dict(model.state_dict())
    for mapped in (False, "auto"):
        loaded = ts.load_file(url, mapped=mapped)  # type: ignore[arg-type]  # widened by the loop
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    with pytest.raises(ts.ConfigurationError, match="cannot map a remote file"):
        ts.load_file(url, mapped=True)
