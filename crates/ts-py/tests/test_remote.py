# SPDX-License-Identifier: MIT OR Apache-2.0
"""Weights that are not on this machine: a real S3 server on loopback, moto's of PyPI."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
from moto.server import ThreadedMotoServer
from safetensors.torch import save_file
from torch import nn

BUCKET = "models"


class Bucket:
    """One bucket of the server, under its two names."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.s3 = f"s3://{BUCKET}"
        self.http = f"{endpoint}/{BUCKET}"

    def put(self, name: str, content: bytes) -> None:
        request = urllib.request.Request(f"{self.http}/{name}" if name else self.http, data=content, method="PUT")
        request.add_header("x-amz-acl", "public-read")
        request.add_header("Content-Type", "application/octet-stream")
        urllib.request.urlopen(request).close()


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ENDPOINT_URL", endpoint)
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    patch.setenv("AWS_REGION", "us-east-1")
    bucket = Bucket(endpoint)
    bucket.put("", b"")
    yield bucket
    patch.undo()
    server.stop()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def upload(bucket: Bucket, directory: str, model: nn.Module, tmp_path: Path) -> None:
    """As transformers writes them: two shards and an index."""
    state = model.state_dict()
    names = list(state)
    shards = {"model-1.safetensors": names[: len(names) // 2], "model-2.safetensors": names[len(names) // 2 :]}
    for file, part in shards.items():
        save_file({name: state[name] for name in part}, tmp_path / file)
        bucket.put(f"{directory}/{file}", (tmp_path / file).read_bytes())
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    bucket.put(f"{directory}/model.safetensors.index.json", json.dumps(index).encode())


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_model_streams_from_object_storage(bucket: Bucket, tmp_path: Path, scheme: str) -> None:
    reference = layers()
    upload(bucket, "sharded", reference, tmp_path)
    with torch.device("meta"):
        model = layers()
    model = ts.offload(model, ts.Config(budget="96KiB"), checkpoint=f"{getattr(bucket, scheme)}/sharded")
    x = torch.randn(3, 64)
    for _ in range(3):
        assert torch.equal(model(x), reference(x))
    stats = ts.stats(model)
    assert stats["read_bytes_by_path"]["network"] > 0
    assert stats["reserved_high_water_bytes"] <= 96 * 1024


def test_another_version_of_an_object_is_an_error(bucket: Bucket, tmp_path: Path) -> None:
    reference = layers()
    save_file(reference.state_dict(), tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    bucket.put("whole.safetensors", content)
    with torch.device("meta"):
        model = layers()
    # One layer fits, so each use reads.
    model = ts.offload(model, ts.Config(budget="40KiB"), checkpoint=f"{bucket.s3}/whole.safetensors")
    x = torch.randn(3, 64)
    assert torch.equal(model(x), reference(x))
    bucket.put("whole.safetensors", content[:-1] + b"x")
    with pytest.raises(ts.TensorStreamError, match=r"s3://models/whole\.safetensors: changed while it was in use"):
        model(x)
    bucket.put("whole.safetensors", content)
    # What went wrong while layers were read ahead is told once, to whoever wants them.
    for _ in range(7):
        with contextlib.suppress(ts.TensorStreamError):
            model(x)
    assert torch.equal(model(x), reference(x)), "the same version is there again"


def test_what_is_not_there_is_named(bucket: Bucket) -> None:
    with torch.device("meta"):
        model = layers()
    for url in (f"{bucket.s3}/nowhere/model.safetensors", f"{bucket.http}/nowhere"):
        with pytest.raises(ts.TensorStreamError, match=f"{bucket.s3}/nowhere|{bucket.http}/nowhere"):
            ts.offload(model, ts.Config(budget="1MiB"), checkpoint=url)


def test_the_command_line_reads_urls(bucket: Bucket, tmp_path: Path) -> None:
    upload(bucket, "listed", layers(), tmp_path)

    def run(*arguments: str) -> Any:
        command = [Path(sys.executable).parent / "tensorstream", *arguments, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    listed = run("info", f"{bucket.s3}/listed")
    assert [Path(file["path"]).name for file in listed["files"]] == ["model-1.safetensors", "model-2.safetensors"]
    bench = run("bench", "io", f"{bucket.s3}/listed/model-1.safetensors", "--rounds", "1")
    assert {(row["backend"], row["state"]) for row in bench["rows"]} == {("adaptive", "remote"), ("object", "remote")}
    assert all(row["bytes"] == {"network": bench["bytes"]} for row in bench["rows"])
