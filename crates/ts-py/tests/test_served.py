# SPDX-License-Identifier: MIT OR Apache-2.0
"""Weights that another machine serves: here another process, by `tensorstream serve-weights`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tensorstream as ts
import torch
from safetensors.torch import save_file
from torch import nn

PROGRAM = Path(sys.executable).parent / "tensorstream"


@contextmanager
def served(directory: Path, *arguments: str) -> Iterator[str]:
    """The URL of a server, which ends with an interruption as a person's would."""
    command = [PROGRAM, "--json", "serve-weights", directory]
    server = subprocess.Popen([*command, "--listen", "127.0.0.1:0", *arguments], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield json.loads(server.stdout.readline())["url"]
    finally:
        server.send_signal(signal.SIGINT)
        rest, _ = server.communicate(timeout=20)
    assert server.returncode == 0
    assert json.loads(rest)["sent_bytes"] > 0


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def shards(directory: Path, model: nn.Module) -> None:
    """As transformers writes them: two shards and an index."""
    state = model.state_dict()
    names = list(state)
    files = {"model-1.safetensors": names[: len(names) // 2], "model-2.safetensors": names[len(names) // 2 :]}
    for file, part in files.items():
        save_file({name: state[name] for name in part}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_model_streams_from_another_process(tmp_path: Path) -> None:
    reference = layers()
    shards(tmp_path, reference)
    with served(tmp_path) as url:
        with torch.device("meta"):
            model = layers()
        model = ts.offload(model, ts.Config(budget="96KiB"), checkpoint=url)
        x = torch.randn(3, 64)
        for _ in range(3):
            assert torch.equal(model(x), reference(x))
        stats = ts.stats(model)
        assert stats["read_bytes_by_path"]["network"] > 0
        assert stats["reserved_high_water_bytes"] <= 96 * 1024


def test_a_file_is_loaded_from_another_process(tmp_path: Path) -> None:
    state = {"a": torch.randn(1000, 1000), "b": torch.arange(10), "c": torch.zeros(0)}
    save_file(state, tmp_path / "whole.safetensors")
    ts.convert(tmp_path / "whole.safetensors", tmp_path / "whole.ts", codec="auto")
    with served(tmp_path) as url:
        for name in ["whole.safetensors", "whole.ts"]:
            loaded = ts.load_file(url + name)
            assert loaded.keys() == state.keys()
            assert all(torch.equal(loaded[key], state[key]) for key in state)
        with ts.safe_open(url + "whole.safetensors", framework="pt") as file:
            assert torch.equal(file.get_slice("a")[3:7], state["a"][3:7])
        with pytest.raises(FileNotFoundError, match=r"ts://.*none\.ts"):
            ts.load_file(url + "none.ts")


def test_a_secret_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    (tmp_path / "secret").write_text("sesame\n")
    with served(tmp_path, "--token-file", str(tmp_path / "secret")) as url:
        with pytest.raises(ts.TensorStreamError, match="does not know the token"):
            ts.load_file(url + "a.safetensors")
        monkeypatch.setenv("TENSORSTREAM_TOKEN", "sesame")
        assert torch.equal(ts.load_file(url + "a.safetensors")["a"], torch.ones(3))


def test_what_others_can_reach_is_not_served_to_everybody(tmp_path: Path) -> None:
    command = [PROGRAM, "serve-weights", tmp_path, "--listen", "0.0.0.0:0"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "token or certificates" in refused.stderr


def test_a_server_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    with served(tmp_path) as url:
        ts.load_file(url + "a.safetensors")
    with pytest.raises(OSError, match="ts://127"):
        ts.load_file(url + "a.safetensors")
