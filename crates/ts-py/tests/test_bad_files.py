# SPDX-License-Identifier: MIT OR Apache-2.0
"""Files, paths and models that are not what they should be: each is refused in its words."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import tensorstream.numpy
import tensorstream.torch as st
import torch
from torch import nn

#: The command line.
CLI = [sys.executable, "-c", "import sys; from tensorstream._cli import main; sys.exit(main())"]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698\n"
#: What is found instead of weights, and the words that the error has.
CONTENTS = {
    "pointer": (LFS, "Git LFS pointer"),
    "page": (b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>", "HTML page"),
    "page in capitals": (b"\xef\xbb\xbf\n  <HTML><BODY>404 Not Found</BODY></HTML>", "HTML page"),
    "xhtml": (b'<?xml version="1.0"?>\n<!DOCTYPE html><html lang="en"><body/></html>', "HTML page"),
    "object store": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "XML"),
}


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"weight": torch.randn(64, 64), "bias": torch.randn(64)}


def reads_of(path: Path, out: Path) -> dict[str, Callable[[], Any]]:
    """Returns every function that reads a file."""
    config = ts.Config(budget="4MiB")
    return {
        "load_file": lambda: ts.load_file(path),
        "load_file mapped": lambda: ts.load_file(path, mapped=True),
        "load_into": lambda: ts.load_into(weights(), path),
        "safe_open": lambda: ts.safe_open(path),
        "numpy": lambda: tensorstream.numpy.load_file(path),
        "torch": lambda: st.load_file(path),
        "torch safe_open": lambda: st.safe_open(path),
        "torch load_model": lambda: st.load_model(nn.Linear(64, 64), path),
        "plan": lambda: ts.plan(path, budget="4MiB"),
        "convert": lambda: ts.convert(path, out / "converted.ts"),
        "offload": lambda: ts.offload(nn.Linear(64, 64), config, checkpoint=path),
        "as text": lambda: ts.load_file(os.fspath(path)),
    }  # fmt: skip


@pytest.mark.parametrize("name", CONTENTS)
def test_what_is_no_checkpoint_is_named_by_every_function(tmp_path: Path, name: str) -> None:
    content, words = CONTENTS[name]
    for file in ("model.safetensors", "model.ts", "model.safetensors.index.json", "other"):
        path = tmp_path / file
        path.write_bytes(content)
        calls = reads_of(path, tmp_path)
        calls["compact"] = functools.partial(ts.compact, path)
        for call in calls.values():
            with pytest.raises(ts.CheckpointError, match=words) as caught:
                call()
            assert file in str(caught.value)
        path.unlink()
    with pytest.raises(ts.CheckpointError, match=words):
        ts.load(content)
    with pytest.raises(ts.CheckpointError, match=words):
        st.load(content)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_names_what_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(LFS)
    for command in (["info"], ["verify"], ["plan"], ["diff", str(path)], ["convert", "a.ts"]):
        arguments = [*CLI, command[0], str(path), *command[1:]]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode != 0, command
        assert "Git LFS pointer" in done.stderr, (command, done.stderr)


def test_a_shard_that_was_not_downloaded_is_named(tmp_path: Path) -> None:
    ts.save_file({"weight": weights()["weight"]}, tmp_path / "1.safetensors")
    (tmp_path / "2.safetensors").write_bytes(LFS)
    index = {"weight_map": {"weight": "1.safetensors", "bias": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for call in reads_of(tmp_path, tmp_path).values():
        with pytest.raises(ts.CheckpointError, match=r"2\.safetensors.*Git LFS pointer"):
            call()


def test_real_headers_are_not_taken_for_text(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for content in (b"", b"<", b"version", b"<svg/>", b"{}", b"\x00" * 100):
        path.write_bytes(content)
        with pytest.raises(ts.CheckpointError) as caught:
            ts.load_file(path)
        assert not any(word in str(caught.value) for word in ("LFS", "HTML", "XML"))


@pytest.fixture
def latin() -> Path:
    """A directory whose name is not UTF-8."""
    path = Path(os.fsdecode(os.fsencode(tempfile.mkdtemp()) + b"/caf\xe9"))
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"the file system refuses such names: {error}")
    return path


def test_every_function_reads_paths_that_are_not_utf8(latin: Path) -> None:
    ts.save_file(weights(), latin / "model.safetensors")
    ts.save_file(weights(), latin / "model.ts", codec="zstd")
    for path in (latin, latin / "model.safetensors", latin / "model.ts"):
        for call in reads_of(path, latin).values():
            call()
        assert torch.equal(ts.load_file(path)["bias"], weights()["bias"])
        model = ts.offload(nn.Linear(64, 64), checkpoint=path, budget="4MiB")
        with torch.no_grad():
            assert torch.equal(model(torch.zeros(64)), weights()["bias"])
        ts.restore(ts.reload(model))
    ts.append_file({"more": torch.ones(1)}, latin / "model.ts")
    ts.compact(latin / "model.ts")
    (latin / "model.safetensors").unlink()
    ts.convert(latin / "model.ts", latin / "model.safetensors.index.json", max_shard_size=256)
    (latin / "model.ts").unlink()
    assert set(ts.load_file(latin)) == {"weight", "bias", "more"}
    shared = ts.Config(storage_path=latin / "stored", budget="1MiB")
    live = ts.offload(nn.Linear(64, 64), shared)
    live(torch.ones(64))
    for command in (["info"], ["verify"], ["plan"], ["convert", b"out.ts"]):
        program: list[Any] = [*CLI, command[0], os.fsencode(latin), *command[1:]]
        done = subprocess.run(program, capture_output=True, check=False, cwd=latin)
        assert done.returncode == 0, (command, done.stderr)


def an_index(directory: Path, left_out: str) -> None:
    tensors = {f"{i}.{name}": tensor for i in range(3) for name, tensor in weights().items()}
    names = {name: f"{name[0]}.safetensors" for name in tensors}
    for file in set(names.values()):
        ts.save_file({n: t for n, t in tensors.items() if names[n] == file}, directory / file)
    del names[left_out]
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("left_out", ["0.weight", "1.bias", "2.weight"])
def test_tensors_of_a_shard_that_the_index_does_not_list_are_read(
    tmp_path: Path, left_out: str
) -> None:
    an_index(tmp_path, left_out)
    assert len(ts.load_file(tmp_path)) == 6
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model = ts.offload(model, checkpoint=tmp_path, budget="40KiB")
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(model[int(left_out[0])](torch.zeros(64)), weights()["bias"])
    # If two shards have it, nothing says which one is right.
    ts.save_file({left_out: torch.zeros(2), "9": torch.zeros(2)}, tmp_path / "3.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**names, "9": "3.safetensors"}}))
    with pytest.raises(ts.CheckpointError, match=f"`{left_out}` is also in another shard"):
        ts.load_file(tmp_path)


def sparse(layout: torch.layout) -> torch.Tensor:
    return torch.eye(64).to_sparse(layout=layout)


PARAMETERS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "coo": (lambda: sparse(torch.sparse_coo), "sparse"),
    "csr": (lambda: sparse(torch.sparse_csr), "sparse"),
    "csc": (lambda: sparse(torch.sparse_csc), "sparse"),
    "mkldnn": (lambda: torch.eye(64).to_mkldnn(), "mkldnn"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(5)]), "nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=torch.jagged),
        "nested",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.eye(8), 0.1, 0, torch.qint8), "quantized"
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", PARAMETERS)
def test_parameters_that_no_file_can_have_are_refused(tmp_path: Path, kind: str) -> None:
    make, words = PARAMETERS[kind]
    model = nn.Sequential(nn.Linear(64, 64), nn.Module())
    try:
        model[1].register_parameter("odd", nn.Parameter(make(), requires_grad=False))
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this PyTorch has no such tensors: {error}")
    before = {name: id(each) for name, each in model.named_parameters()}
    config = ts.Config(storage_path=tmp_path / "weights", budget="1MiB")
    with pytest.raises(ts.ModelError, match=rf"`1\.odd`.*{words}"):
        ts.offload(model, config)
    assert before == {name: id(each) for name, each in model.named_parameters()}
    assert not (tmp_path / "weights").exists()


def dispatched(kind: str, directory: Path) -> Any:
    import accelerate as library

    accelerate: Any = library

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    cpu = torch.device("cpu")
    if kind == "disk_offload":
        return accelerate.disk_offload(model, str(directory), execution_device=cpu)
    if kind == "cpu_offload":
        return accelerate.cpu_offload(model, execution_device=cpu)
    if kind == "hook":
        return accelerate.cpu_offload_with_hook(model, cpu)[0]
    places = {"0": "cpu", "1": "disk", "2": "disk", "3": "cpu"}
    return accelerate.dispatch_model(
        model, device_map=places, main_device="cpu", offload_dir=str(directory)
    )


@pytest.mark.parametrize("kind", ["disk_offload", "cpu_offload", "hook", "dispatch_model"])
@pytest.mark.parametrize("inside", [False, True])
def test_models_that_accelerate_has_offloaded_are_refused(
    tmp_path: Path, kind: str, inside: bool
) -> None:
    model = dispatched(kind, tmp_path / "offloaded")
    whole = nn.Sequential(nn.Linear(4, 4), model) if inside else model
    zeros = {name: torch.zeros(tensor.shape) for name, tensor in whole.state_dict().items()}
    ts.save_file(zeros, tmp_path / "a.ts")
    storage = ts.Config(storage_path=tmp_path / "new", budget="1MiB")
    calls: list[Callable[[], Any]] = [
        lambda: ts.offload(whole, storage),
        lambda: ts.offload(whole, checkpoint=tmp_path / "a.ts", budget="1MiB"),
    ]
    for call in calls:
        with pytest.raises(ts.ModelError, match=r"accelerate has offloaded .*remove_hook"):
            call()
    assert not (tmp_path / "new").exists()
    with torch.no_grad():
        model(torch.zeros(64))


def test_what_is_no_model_is_refused() -> None:
    models: list[Any] = ["text", 3, None, nn.Linear, nn.Parameter(torch.ones(2)), {"a": 1}]
    offload: Any = lambda each: ts.offload(each, ts.Config(storage_path="weights"))  # noqa: E731
    for wrong in models:
        for call in (offload, ts.restore, ts.stats, ts.reload):
            with pytest.raises(ts.TensorStreamError):
                call(wrong)
    paths: list[Any] = [3, 2.5, ["a"], object()]
    functions: list[Any] = [ts.load_file, ts.safe_open, ts.from_pretrained, ts.compact, ts.plan]
    for path in paths:
        for call in functions:
            with pytest.raises(ts.ArgumentTypeError, match="invalid path"):
                call(path)


def test_no_device_is_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    st.save_file(weights(), path)
    linear = nn.Linear(64, 64)
    st.load_model(linear, path, device=None)
    assert torch.equal(linear.bias, weights()["bias"])
    for tensors in (
        ts.load_file(path, device=None),
        st.load_file(path, device=None, backend="pread"),
        ts.safe_open(path, "pt", None).get_tensors(),
        st.safe_open(path, "pt", None).get_tensors(),
        ts.load_file(path, None, mapped=True),
    ):
        assert tensors["bias"].device.type == "cpu"
        assert torch.equal(tensors["bias"], weights()["bias"])


def test_backends_are_members_of_their_enumeration() -> None:
    for given, expected in (
        ("mmap", ts.BackendType.MMAP), ("MMAP", ts.BackendType.MMAP), ("auto", ts.BackendType.AUTO),
        (ts.BackendType.MMAP, ts.BackendType.MMAP), ("buffered", "buffered"),
    ):  # fmt: skip
        backend = ts.Config(backend=given).backend
        assert backend == expected
        assert type(backend) is type(expected)
        assert str(backend) == str(expected).lower()
    assert ts.Config().backend is ts.BackendType.AUTO
    with pytest.raises(ts.ConfigurationError, match="backend"):
        ts.Config(backend="tape")
