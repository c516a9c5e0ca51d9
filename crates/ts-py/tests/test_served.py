# SPDX-License-Identifier: MIT OR Apache-2.0
"""Reads weights from another process that runs `tensorstream serve-weights`."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensorstream as ts
import torch
from safetensors.torch import save_file
from serving import PROGRAM, served, serving
from torch import nn


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def shards(directory: Path, model: nn.Module) -> None:
    """Writes two shards and an index, as transformers does."""
    state = model.state_dict()
    names = list(state)
    files = {
        "model-1.safetensors": names[: len(names) // 2],
        "model-2.safetensors": names[len(names) // 2 :],
    }
    for file, part in files.items():
        save_file({name: state[name] for name in part}, directory / file)
    index = {
        "metadata": {},
        "weight_map": {name: file for file, part in files.items() for name in part},
    }
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


def test_a_server_with_a_token_requires_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    (tmp_path / "secret").write_text("sesame\n")
    with served(tmp_path, "--token-file", str(tmp_path / "secret")) as url:
        with pytest.raises(ts.TensorStreamError, match="wrong token"):
            ts.load_file(url + "a.safetensors")
        monkeypatch.setenv("TENSORSTREAM_TOKEN", "sesame")
        assert torch.equal(ts.load_file(url + "a.safetensors")["a"], torch.ones(3))


def test_a_terminated_server_exits_cleanly(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    command = [PROGRAM, "--json", "serve-weights", tmp_path, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ts.load_file(json.loads(server.stdout.readline())["url"] + "a.safetensors")
        server.terminate()
        rest, _ = server.communicate(timeout=20)
    assert server.returncode == 0
    assert json.loads(rest)["sent_bytes"] > 0


def test_a_second_signal_ends_a_server_at_once(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1 << 16)}, tmp_path / "a.safetensors")
    command = [
        PROGRAM,
        "--json",
        "serve-weights",
        tmp_path,
        "--listen",
        "127.0.0.1:0",
        "--grace",
        "60",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        for _ in range(2):
            # Recent transfers delay the end of the server, so the second signal finds it running.
            for _ in range(10):
                ts.load_file(url + "a.safetensors")
            server.terminate()
            time.sleep(0.2)
        assert server.wait(timeout=10) == 128 + signal.SIGTERM


def test_a_public_address_requires_authentication(trusted: dict[str, Path], tmp_path: Path) -> None:
    command = [PROGRAM, "serve-weights", tmp_path, "--listen", "0.0.0.0:0"]
    # The certificate of a server does not authenticate clients.
    certificate = ["--tls-cert", trusted["cert"], "--tls-key", trusted["key"]]
    for options in ([], certificate):
        refused = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        assert refused.returncode == 1
        assert "other machines can reach" in refused.stderr


def test_the_error_names_an_unreachable_server(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    with served(tmp_path) as url:
        ts.load_file(url + "a.safetensors")
    with pytest.raises(OSError, match="ts://127"):
        ts.load_file(url + "a.safetensors")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ten_thousand_idle_connections_use_little_memory(tmp_path: Path) -> None:
    state = {"w": torch.ones(1 << 20)}
    save_file(state, tmp_path / "model.safetensors")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Opens fewer if this process cannot open ten thousand sockets.
    count = 10_000 if hard == resource.RLIM_INFINITY else min(10_000, hard - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 200), hard))
    silent: list[socket.socket] = []
    try:
        with serving(tmp_path, "--insecure") as (url, process):
            host, port = url.removeprefix("ts://").strip("/").split(":")

            def resident() -> int:
                status = Path(f"/proc/{process}/status").read_text()
                return 1024 * int(
                    next(line for line in status.splitlines() if "VmRSS" in line).split()[1]
                )

            assert torch.equal(ts.load_file(f"{url}model.safetensors")["w"], state["w"])
            before = resident()
            for number in range(count):
                silent.append(socket.create_connection((host, int(port))))
                if number % 1000 == 999:
                    assert torch.equal(ts.load_file(f"{url}model.safetensors")["w"], state["w"])
            assert resident() - before < 32 << 20
            assert len(list(Path(f"/proc/{process}/fd").iterdir())) < 300
    finally:
        for connection in silent:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
