# SPDX-License-Identifier: MIT OR Apache-2.0
"""Machines load checkpoints that they have. The data does not pass through the client."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tensorstream as ts
import torch
from conftest import Llama
from serving import SERVE, Serving, cut, served
from tensorstream.errors import (
    BudgetError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointPermissionError,
    ChecksumError,
    ConfigurationError,
    MissingTensorError,
    RemoteOutOfMemoryError,
    RemoteTensorError,
    StorageError,
    TensorStreamError,
)
from tensorstream.remote import RemoteMachine, load_huggingface_state_dicts, load_state_dict
from tensorstream.remote.client._checkpoint import RemoteCheckpoint, read_text
from tensorstream.remote.providers._this_computer import ProcessServer
from tensorstream.serve import _weights
from tensorstream.serve._weights import Weights
from torch import nn
from webserver import WebServer


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(3, 4),
        "b.half": torch.randn(1000).half(),
        "b.brain": torch.randn(7, 5).bfloat16(),
        "empty": torch.empty(0, 3),
        "flag": torch.tensor(True),
        "large": torch.randint(0, 256, (3 << 20,), dtype=torch.uint8),
        "scalar": torch.tensor(3),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with checkpoints that sessions may read."""
    root = tmp_path_factory.mktemp("weights")
    for name in ("plain.safetensors", "coded.ts"):
        ts.save_file(tensors(), root / name, metadata={"of": name})
    sharded = root / "sharded"
    sharded.mkdir()
    parts = {"model-1.safetensors": ["a", "b.half"], "model-2.safetensors": ["large", "scalar"]}
    for file, names in parts.items():
        ts.save_file({name: tensors()[name] for name in names}, sharded / file)
    index = {name: file for file, names in parts.items() for name in names}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Serving]:
    with Serving({"--weights": root}) as serving:
        yield serving


@pytest.fixture(scope="module")
def machine(server: Serving) -> Iterator[RemoteMachine]:
    with RemoteMachine.tcp(server.address) as started:
        yield started


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return list(got) == sorted(want) and all(
        got[name].dtype == tensor.dtype and torch.equal(got[name].cpu(), tensor)
        for name, tensor in want.items()
    )


@pytest.mark.parametrize("name", ["plain.safetensors", "coded.ts"])
@pytest.mark.parametrize("absolute", [False, True])
def test_a_server_loads_files_that_it_allows(
    machine: RemoteMachine, root: Path, name: str, absolute: bool
) -> None:
    before = machine.stats()["uploaded_bytes"]
    source = root / name if absolute else name
    loaded = load_state_dict(source, machine.device())
    assert machine.stats()["uploaded_bytes"] == before
    assert same(loaded, tensors())
    assert same(ts.load_file(source, machine.device()), tensors())
    assert same(load_state_dict(source, machine.device(), names=["a"]), {"a": tensors()["a"]})
    device = str(machine.device())
    assert same(dict(sorted(safetensors.torch.load_file(str(source), device).items())), tensors())
    # They are ordinary tensors of the machine: each has its own storage, and can be written to.
    loaded["a"].add_(1)
    assert torch.equal(loaded["a"].cpu(), tensors()["a"] + 1)
    assert same(load_state_dict(source, machine.device()), tensors())


def test_shards_are_opened_one_by_one(machine: RemoteMachine, root: Path) -> None:
    expected = {name: tensors()[name] for name in ("a", "b.half", "large", "scalar")}
    assert same(load_state_dict("sharded", machine.device()), expected)
    pipeline = root / "pipeline"
    for part in ("", "unet", "vae/inner"):
        (pipeline / part).mkdir(parents=True, exist_ok=True)
        ts.save_file({"of": torch.tensor(len(part))}, pipeline / part / "one.safetensors")
    (pipeline / "tokenizer").mkdir()
    dicts = load_huggingface_state_dicts(str(pipeline), machine.device())
    assert {name: of["of"].item() for name, of in dicts.items()} == {
        "": 0,
        "unet": 4,
        "vae/inner": 9,
    }


def test_a_server_refuses_what_it_does_not_allow(
    machine: RemoteMachine, root: Path, tmp_path: Path
) -> None:
    ts.save_file({"secret": torch.ones(1)}, tmp_path / "secret.safetensors")
    (root / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (root / ".hidden").mkdir(exist_ok=True)
    shutil.copy(root / "plain.safetensors", root / ".hidden" / "a.safetensors")
    (root / "notes.txt").write_text("text")
    os.mkfifo(root / "pipe.safetensors")
    index = {"weight_map": {"secret": str(tmp_path / "secret.safetensors")}}
    (root / "evil.index.json").write_text(json.dumps(index))
    refused = CheckpointPermissionError
    for source, error, message in (
        (tmp_path / "secret.safetensors", refused, "may not read .*--weights"),
        ("../secret.safetensors", refused, "may not read"),
        ("link.safetensors", refused, "symbolic link"),
        (".hidden/a.safetensors", refused, "may not read"),
        ("notes.txt", refused, "not a file of weights"),
        ("/proc/self/environ", refused, "may not read"),
        ("hf://gpt2", refused, "may not read"),
        ("nothing.safetensors", CheckpointNotFoundError, "no file or directory nothing"),
        ("pipe.safetensors", TensorStreamError, "not a regular file"),
        ("evil.index.json", TensorStreamError, "evil.index.json"),
        ("https://example.org/a.safetensors", refused, "--weights https://example.org"),
        ("a\0b", ConfigurationError, "invalid name"),
    ):
        with pytest.raises(error, match=message):
            load_state_dict(source, machine.device())
    (root / "pipe.safetensors").unlink()
    assert torch.ones(2, device=machine.device()).sum().item() == 2.0


def test_errors_of_checkpoints_are_those_of_load_file(
    machine: RemoteMachine, root: Path, tmp_path: Path
) -> None:
    (root / "broken.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{broken")
    damaged = root / "damaged.ts"
    ts.save_file({"a": torch.arange(100_000)}, damaged)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    (root / "empty").mkdir(exist_ok=True)
    device = machine.device()
    for source, error in (
        ("broken.safetensors", CheckpointError),
        ("damaged.ts", ChecksumError),
        ("empty", CheckpointNotFoundError),
    ):
        with pytest.raises(error) as remote:
            load_state_dict(source, device)
        with pytest.raises(error) as local:
            ts.load_file(root / source)
        assert str(remote.value) == f"{device}: {local.value}"
    load_state_dict("damaged.ts", device, verify=False)
    with pytest.raises(MissingTensorError, match="no tensor `none`"):
        load_state_dict("plain.safetensors", device, names=["none"])
    with pytest.raises(ConfigurationError, match="cannot be mapped"):
        ts.load_file("plain.safetensors", device, mapped=True)
    here = tmp_path / "here.safetensors"
    ts.save_file({"a": torch.ones(1)}, here)
    with RemoteMachine.local(threads=1) as local_machine:
        os.rename(here, tmp_path / "there.safetensors")
        with pytest.raises(CheckpointNotFoundError):
            load_state_dict(here, local_machine.device())


def test_a_file_that_grows_too_large_for_a_session_is_an_error(root: Path) -> None:
    ts.save_file({"big": torch.zeros(8, dtype=torch.uint8)}, root / "big.safetensors")
    size, small = 3 << 30, (root / "big.safetensors").read_bytes()
    header = small[:-8].replace(b"[8]", f"[{size}]".encode()).replace(b"0,8", f"0,{size}".encode())
    length = int.from_bytes(header[:8], "little")
    header = header[8:].rstrip().ljust(-(-length // 8) * 8 + 32)
    with (root / "big.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + size)  # a hole
    with (
        Serving({"--weights": root, "--session-memory": "2GiB"}) as serving,
        RemoteMachine.tcp(serving.address) as machine,
    ):
        with pytest.raises(RemoteOutOfMemoryError, match="memory"):
            load_state_dict("big.safetensors", machine.device())
        assert same(load_state_dict("plain.safetensors", machine.device()), tensors())
    (root / "big.safetensors").unlink()


def test_loading_survives_lost_connections(server: Serving) -> None:
    with RemoteMachine.tcp(server.address) as machine:
        machine.synchronize()
        for _ in range(5):
            cut(server.address)
            assert same(load_state_dict("plain.safetensors", machine.device()), tensors())


def test_files_are_closed(server: Serving, machine: RemoteMachine) -> None:
    load_state_dict("sharded", machine.device())
    machine.synchronize()
    open_files = [
        os.readlink(link)
        for session in server.sessions()
        for link in Path(f"/proc/{session}/fd").iterdir()
    ]
    assert not [name for name in open_files if name.endswith((".safetensors", ".json"))]


def test_relative_paths_of_a_machine_here_are_those_of_this_process(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RemoteMachine.local(threads=1) as machine:
        monkeypatch.chdir(root)
        assert same(load_state_dict("plain.safetensors", machine.device()), tensors())
        assert same(load_state_dict(Path("coded.ts"), machine.device()), tensors())


def test_a_model_on_the_meta_device_is_linked(machine: RemoteMachine, root: Path) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    own = {name: each for name, each in net.state_dict().items() if name != "2.weight"}
    ts.save_file(own, root / "net.safetensors")
    loaded = load_state_dict("net.safetensors", machine.device())
    with torch.device("meta"):
        linked = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    linked[2].weight = linked[0].weight
    result = linked.load_state_dict(loaded, strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    assert {each.device for each in linked.state_dict().values()} == {machine.device()}
    assert linked[2].weight is linked[0].weight and linked[0].weight.requires_grad
    assert linked[0].weight.data_ptr() == loaded["0.weight"].data_ptr(), "linked, not copied"
    x = torch.randn(5, 6)
    # PyTorch rounds differently for other alignments, which depend on the file.
    net.load_state_dict(ts.load_file(root / "net.safetensors"), strict=False, assign=True)
    net[2].weight = net[0].weight
    # In training, batch normalization also rounds differently for other numbers of threads.
    want = net.eval()(x)
    want.sum().backward()
    got = linked.eval()(x.to(machine.device()))
    got.sum().backward()
    assert torch.equal(got.cpu(), want)
    assert torch.equal(linked[0].weight.grad.cpu(), net[0].weight.grad)
    # Models that are not on the meta device are copied to, as ever.
    copied = nn.Linear(6, 6)
    copied.load_state_dict({name: loaded[f"0.{name}"] for name in ("weight", "bias")})
    assert torch.equal(copied.weight, net[0].weight) and copied.weight.device.type == "cpu"
    with torch.device("meta"):
        other = nn.Linear(5, 6)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict({name: loaded[f"0.{name}"] for name in ("weight", "bias")})


def test_a_transformers_model_is_loaded_where_it_is(
    llama: Llama, tmp_path: Path, capsys: Any
) -> None:
    from transformers import AutoModelForCausalLM

    directory = llama()
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.arange(6)[None]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    with (
        Serving({"--weights": directory}) as serving,
        RemoteMachine.tcp(serving.address) as machine,
    ):
        for options in ({"device": machine.device()}, {"device_map": str(machine.device())}):
            loaded = ts.from_pretrained(directory, **options)
            assert {each.device for each in loaded.parameters()} == {machine.device()}
            assert {each.device for each in loaded.buffers()} == {machine.device()}
            got = loaded.generate(ids.to(machine.device()), max_new_tokens=8, do_sample=False)
            assert torch.equal(got.cpu(), expected)
        assert machine.stats()["uploaded_bytes"] < 10_000
        half = ts.from_pretrained(directory, device=machine.device(), dtype=torch.bfloat16)
        assert half.dtype == torch.bfloat16
        logits = half(ids.to(machine.device())).logits.cpu()
        own = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        assert torch.equal(logits, own(ids).logits)
        for arguments, message in (
            ({"budget": "1GiB"}, "start the machine's server with --budget"),
            ({"config": ts.Config()}, "models that stream here"),
            ({"token": "secret"}, "the settings of the user there"),
            ({"load_in_8bit": True}, "load_in_8bit"),
        ):
            with pytest.raises(ConfigurationError, match=message):
                ts.from_pretrained(directory, device=machine.device(), **arguments)
        with pytest.raises(ConfigurationError, match="a model is on one remote device"):
            ts.from_pretrained(directory, device_map={"model": "ts:0", "lm_head": "cpu"})
        with pytest.raises(CheckpointPermissionError, match="may not read"):
            ts.from_pretrained(tmp_path, device=machine.device())
        with pytest.raises(CheckpointNotFoundError):
            ts.from_pretrained("nobody/nothing", device=machine.device())


def test_parameters_elsewhere_are_copied_to(machine: RemoteMachine) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with torch.device("meta"):
        net[0] = nn.Linear(3, 3)
    kept = dict(net[1].named_parameters())
    net[1].register_parameter("again", net[1].weight)
    torch.manual_seed(3)
    own = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    own[1].weight.data.normal_()
    own[1].register_parameter("again", own[1].weight)
    remote = {name: each.to(machine.device()) for name, each in own.state_dict().items()}
    # A state dict of a part that does not fit changes nothing.
    with pytest.raises(RuntimeError, match="size mismatch"):
        net.load_state_dict({**remote, "1.bias": torch.ones(1)})
    assert torch.equal(net[1].weight, torch.ones(3))
    with torch.device("meta"):
        net[0] = nn.Linear(3, 3)
    net.load_state_dict(remote)
    assert net[0].weight.device == machine.device()
    assert net[1].weight is kept["weight"] and net[1].again is kept["weight"]
    assert torch.equal(kept["weight"], own[1].weight) and kept["weight"].device.type == "cpu"
    with pytest.raises(TypeError):  # that of PyTorch, although the type is wrong
        net.load_state_dict(3)  # type: ignore[arg-type]
    # The version of the module's state is passed on: an old one lacks the number of batches.
    state = own.state_dict()
    state["0.weight"] = state["0.weight"].to(machine.device())
    with torch.device("meta"):
        linked = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    linked[1].register_parameter("again", linked[1].weight)
    del state["1.num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        linked.load_state_dict(state)


def test_lists_of_directories_stay_inside(
    machine: RemoteMachine, root: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside" / "secret"
    outside.mkdir(parents=True)
    ts.save_file({"a": torch.ones(1)}, outside / "model.safetensors")
    (root / "away").symlink_to(outside.parent)
    for source in (root / "away", root / "away" / "secret", tmp_path):
        for load in (load_state_dict, load_huggingface_state_dicts):
            with pytest.raises(CheckpointPermissionError):
                load(str(source), machine.device())
    (root / "away").unlink()
    with pytest.raises(ConfigurationError, match="invalid revision"):
        load_huggingface_state_dicts(str(root), machine.device(), revision="main")
    with pytest.raises(ConfigurationError, match="invalid name"):
        load_state_dict("a" * 5000, machine.device())
    for url in ("hf://org/model/..", "hf://org/model/a/../../b", "hf://org/model@../x"):
        with pytest.raises(ConfigurationError, match=r"`\.\.`"):
            Weights(("any",)).directories(url)


@pytest.mark.parametrize(
    ("place", "name", "allowed"),
    [
        ("hf://", "any/model", True),
        ("hf://org", "org/model", True),
        ("hf://org/", "org/model", True),
        ("hf://org", "organisation/model", False),
        ("hf://org/model", "org/model@main", True),
        ("hf://org/model", "org/model-2", False),
        ("any", "any/model", True),
    ],
)
def test_places_of_the_hub(place: str, name: str, allowed: bool) -> None:
    weights = Weights((place,))
    if allowed:
        assert weights._model(f"hf://{name}").name == name.partition("@")[0]
    else:
        with pytest.raises(CheckpointPermissionError):
            weights._model(f"hf://{name}")


def test_the_hub_is_read_by_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Llama
) -> None:
    """The cache of the machine is another one than that of this process."""
    commit = "0" * 40
    for top, cache in (("cache", "HF_HUB_CACHE"),):
        snapshot = tmp_path / top / "models--org--model" / "snapshots" / commit
        blobs, references = snapshot.parents[1] / "blobs", snapshot.parents[1] / "refs"
        for directory in (snapshot, blobs, references):
            directory.mkdir(parents=True)
        (references / "main").write_text(commit)
        for file in llama().iterdir():
            shutil.copy(file, blobs / file.name)
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
        monkeypatch.setenv(cache, str(tmp_path / top))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expected = ts.load_file(llama())
    for place in ("hf://org", "any"):
        with (
            Serving({"--weights": place}) as serving,
            RemoteMachine.tcp(serving.address) as machine,
        ):
            assert same(load_state_dict("hf://org/model", machine.device()), expected)
            dicts = load_huggingface_state_dicts("org/model", machine.device())
            assert list(dicts) == [""] and same(dicts[""], expected)
            model = ts.from_pretrained("org/model", device=machine.device())
            assert {each.device for each in model.parameters()} == {machine.device()}
            with pytest.raises((CheckpointNotFoundError, CheckpointPermissionError)):
                load_state_dict("hf://other/model", machine.device())


def _read_bytes(machine: RemoteMachine) -> int:
    """Returns what the process of a "local" machine has read so far, in bytes."""
    assert isinstance(machine._server, ProcessServer)
    io = Path(f"/proc/{machine._server.process.pid}/io").read_text(encoding="ascii")
    return int(io.split()[1])


def _memory(machine: RemoteMachine) -> int:
    """Returns the peak of the memory of a "local" machine's process, in bytes."""
    assert isinstance(machine._server, ProcessServer)
    status = Path(f"/proc/{machine._server.process.pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.fixture(scope="module")
def large(llama: Llama) -> tuple[Path, int]:
    """Returns a Llama of about 180 MiB, and the size of its weights."""
    directory = llama(hidden_size=512, intermediate_size=2048, num_hidden_layers=10)
    return directory, sum(file.stat().st_size for file in directory.glob("*.safetensors"))


@pytest.mark.parametrize("share", [0.2, 0.5, 2.0])
def test_weights_stream_on_the_machine(large: tuple[Path, int], share: float) -> None:
    from transformers import AutoModelForCausalLM

    directory, size = large
    reference = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.arange(6)[None]
    expected = reference.generate(ids, max_new_tokens=6, do_sample=False)
    with RemoteMachine.local(threads=1, budget=int(share * size)) as machine:
        machine.synchronize()
        before, memory = _read_bytes(machine), _memory(machine)
        model = ts.from_pretrained(directory, device=machine.device())
        assert _read_bytes(machine) - before < size / 4, "large ones are read when they are used"
        for _ in range(2):
            got = model.generate(ids.to(machine.device()), max_new_tokens=6, do_sample=False)
            assert torch.equal(got.cpu(), expected)
        read, used = _read_bytes(machine) - before, _memory(machine) - memory
        if share < 1:
            assert read > 12 * (1 - share) * size / 2, "12 passes read what does not fit"
            assert used < share * size + (64 << 20)
        else:
            assert read < 1.1 * size
        # Gradients flow through weights that stream.
        embedded = torch.randn(1, 4, 512)
        gradients = []
        for one in (reference, model):
            one.requires_grad_(False)
            device = next(one.parameters()).device
            inputs = embedded.detach().to(device).requires_grad_()
            one(inputs_embeds=inputs).logits.square().sum().backward()
            assert inputs.grad is not None
            gradients.append(inputs.grad.cpu())
        assert torch.equal(*gradients)
        assert torch.equal(model.lm_head.weight.cpu(), reference.lm_head.weight)
        assert model.lm_head.weight[3, 5].item() == reference.lm_head.weight[3, 5].item()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_stream_in_half_precision(llama: Llama, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    directory = llama(dtype=dtype, hidden_size=512, intermediate_size=2048, num_hidden_layers=6)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    ids = torch.arange(6)[None]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the machine
    try:
        reference = AutoModelForCausalLM.from_pretrained(directory)
        with RemoteMachine.local(threads=1, budget=size // 4) as machine:
            model = ts.from_pretrained(directory, device=machine.device())
            assert model.dtype == dtype
            for mode in (
                lambda _: contextlib.nullcontext(),
                lambda _: torch.no_grad(),
                lambda _: torch.inference_mode(),
                lambda device: torch.autocast(device, torch.bfloat16),
            ):
                with mode("cpu"):
                    expected = reference(ids).logits
                for _ in range(2):
                    with mode("ts"):
                        got = model(ids.to(machine.device())).logits
                    assert torch.equal(got.cpu(), expected)
        with RemoteMachine.local(threads=1, budget=size // 4) as machine:
            assert load_state_dict(directory, machine.device(), names=[]) == {}
    finally:
        torch.set_num_threads(threads)


def test_weights_that_stream_are_not_written_to(large: tuple[Path, int]) -> None:
    directory, size = large
    with RemoteMachine.local(threads=1, budget=size // 2) as machine:
        loaded = load_state_dict(directory, machine.device())
        name = max(loaded, key=lambda each: loaded[each].nbytes)
        weight, own = loaded[name], ts.load_file(directory)[name]
        for write in (
            lambda: weight.add_(1),
            lambda: weight.copy_(torch.zeros(weight.shape)),
            lambda: weight[0].fill_(1),
            lambda: torch.add(weight, 1, out=weight),
        ):
            with pytest.raises(RemoteTensorError, match="streams under the server's --budget"):
                write()
                machine.synchronize()
        # Results are tensors of their own, also those of operators that return their argument.
        for result in (weight.clone(), weight.contiguous(), weight.to(weight.dtype), weight[1:]):
            assert torch.equal(result.cpu(), own if len(result) == len(own) else own[1:])
        changed = weight.clone().add_(1)
        assert torch.equal(changed.cpu(), own + 1) and torch.equal(weight.cpu(), own)


def test_the_budget_of_a_session_is_shared(large: tuple[Path, int], root: Path) -> None:
    directory, size = large
    small = root / "plain.safetensors"
    with RemoteMachine.local(threads=1, budget=size // 2) as machine:
        first = load_state_dict(directory, machine.device())
        # The next one gets an eighth, which is enough for small ones, and for streaming.
        assert same(load_state_dict(small, machine.device()), tensors())
        second = load_state_dict(directory, machine.device())
        with pytest.raises(BudgetError, match="checkpoints that were loaded before have"):
            for _ in range(20):
                second |= {
                    f"{_}.{name}": each
                    for name, each in load_state_dict(directory, machine.device()).items()
                }
        del first, second
        machine.synchronize()
        assert len(load_state_dict(directory, machine.device()))
    with RemoteMachine.local(threads=1, budget="64KiB") as machine:
        with pytest.raises(BudgetError, match=r"smallest|at least"):
            load_state_dict(directory, machine.device())
        assert torch.ones(2, device=machine.device()).sum().item() == 2.0
    with pytest.raises(ConfigurationError, match="invalid budget"):
        RemoteMachine.local(budget="much")


def _logits_of(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs of a model, and its outputs with one thread, as in a session."""
    from transformers import AutoModelForCausalLM

    ids, threads = torch.arange(6)[None], torch.get_num_threads()
    torch.set_num_threads(1)
    logits = AutoModelForCausalLM.from_pretrained(directory)(ids).logits
    torch.set_num_threads(threads)
    return ids, logits


def test_a_sandboxed_session_streams(large: tuple[Path, int]) -> None:
    directory, size = large
    ids, expected = _logits_of(directory)
    with (
        Serving({"--weights": directory, "--budget": size // 3}) as serving,
        RemoteMachine.tcp(serving.address) as machine,
    ):
        model = ts.from_pretrained(directory, device=machine.device())
        for _ in range(3):
            cut(serving.address)
            assert torch.equal(model(ids.to(machine.device())).logits.cpu(), expected)
    options = ["--budget", "1GiB", "--device", "cuda"]
    refused = subprocess.run([*SERVE, *options], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "only on CPUs so far" in refused.stderr


@pytest.fixture(scope="module")
def web(root: Path, large: tuple[Path, int]) -> Iterator[WebServer]:
    """Serves the checkpoints under "models", and a model under "large"."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "models").symlink_to(root)
        (Path(directory) / "large").symlink_to(large[0])
        with WebServer(Path(directory)) as server:
            yield server


@pytest.fixture(scope="module")
def online(web: WebServer) -> Iterator[RemoteMachine]:
    """Returns a machine that reads checkpoints at URLs, among them those of an object store."""
    store = {"AWS_ENDPOINT_URL": web.url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "here"}
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (store | keys).items():
            patch.setenv(name, value)
        places = f"{web.url}/models,s3://models/"
        with (
            Serving({"--weights": places}) as serving,
            RemoteMachine.tcp(serving.address) as machine,
        ):
            yield machine


@pytest.mark.parametrize("place", ["{web}/models", "s3://models"])
def test_a_server_reads_urls(online: RemoteMachine, web: WebServer, place: str) -> None:
    place = place.format(web=web.url)
    before = online.stats()
    for name in ("plain.safetensors", "coded.ts"):
        loaded = load_state_dict(f"{place}/{name}", online.device())
        assert same(loaded, tensors())
        assert same(ts.load_file(f"{place}/{name}", online.device()), tensors())
    expected = {name: tensors()[name] for name in ("a", "b.half", "large", "scalar")}
    for _ in range(3):
        assert same(load_state_dict(f"{place}/sharded", online.device()), expected)
    assert online.stats()["uploaded_bytes"] == before["uploaded_bytes"]


def test_a_server_refuses_urls_that_it_does_not_allow(
    online: RemoteMachine, web: WebServer, root: Path
) -> None:
    device, requests = online.device(), list(web.requests)
    for source, error, message in (
        (f"{web.url}/large", CheckpointPermissionError, "--weights"),
        (f"{web.url}/models2/a.safetensors", CheckpointPermissionError, "--weights"),
        ("s3://other/a.safetensors", CheckpointPermissionError, "--weights s3://other"),
        (f"{web.url}/models/../large", ConfigurationError, "unsupported URL"),
        (f"{web.url}/models/%2e%2e/large", ConfigurationError, "unsupported URL"),
        (f"{web.url}/models/.\t./large", ConfigurationError, "unsupported URL"),
        (f"{web.url}/models\\..\\large", ConfigurationError, "unsupported URL"),
        (f"{web.url}/models/a.safetensors?x=1", ConfigurationError, "unsupported URL"),
        ("ftp://host/a.safetensors", ConfigurationError, "unsupported URL"),
    ):
        with pytest.raises(error, match=message):
            load_state_dict(source, device)
    for beside in ("..\\..\\large\\config.json", "..", "%2e%2e", "a.json?x", "."):
        with pytest.raises(ConfigurationError, match=r"unsupported URL|invalid name"):
            read_text(f"{web.url}/models", beside, device)
    with pytest.raises(CheckpointPermissionError, match="not a file of weights"):
        read_text(f"{web.url}/models", "secret.txt", device)
    with pytest.raises(ConfigurationError, match="cannot be listed"):
        load_huggingface_state_dicts(f"{web.url}/models", device)
    assert web.requests == requests
    index = {"weight_map": {"secret": "../large/model.safetensors"}}
    (root / "outside.index.json").write_text(json.dumps(index))
    with pytest.raises(TensorStreamError):
        load_state_dict(f"{web.url}/models/outside.index.json", device)
    assert not [path for path in web.requests if "large" in path]
    with pytest.raises(CheckpointNotFoundError):
        load_state_dict(f"{web.url}/models/nothing.safetensors", device)
    with pytest.raises(CheckpointNotFoundError):
        load_state_dict(f"{web.url}/models/nothing", device)
    assert torch.ones(2, device=device).sum().item() == 2.0


@pytest.mark.parametrize(
    ("place", "url", "beside", "allowed"),
    [
        ("s3://", "http://169.254.169.254/a.json", "", False),
        ("https://", "http://host/a.json", "", False),
        ("http://", "http://host/a.json", "", True),
        ("http://host/d/model.safetensors", "http://host/d/model.safetensors", "", True),
        ("http://host/d/model.safetensors", "http://host/d/model.safetensors", "a.json", False),
        ("http://host/d", "http://host/d/model.safetensors", "a.json", True),
        ("http://host/d/", "http://host/d", "a.json", True),
        ("http://host/d", "http://host/dd/a.json", "", False),
        ("http://host", "http://host:80/a.json", "", False),
        ("http://host", "http://host@other/a.json", "", False),
        ("HTTP://host", "http://host/a.json", "", False),
    ],
)
def test_places_of_urls(place: str, url: str, beside: str, allowed: bool) -> None:
    opened: list[str] = []
    try:
        weights = Weights((place,))
    except ConfigurationError:
        return  # a place of another form is none
    with pytest.MonkeyPatch.context() as patch:
        fake = types.SimpleNamespace(at_url=lambda url, beside: opened.append(f"{url} {beside}"))
        patch.setattr(_weights._native, "PassedSource", fake)
        if allowed:
            weights.open(url, beside)
        else:
            with pytest.raises(CheckpointPermissionError, match="sessions may not read"):
                weights.open(url, beside)
    assert bool(opened) == allowed


def test_a_session_notices_that_a_file_at_a_url_changes(
    online: RemoteMachine, web: WebServer
) -> None:
    url = f"{web.url}/models/plain.safetensors"
    with RemoteCheckpoint(url, online.device()) as checkpoint:
        web.etag = "two"
        with pytest.raises(StorageError, match="has another version"):
            checkpoint.load()
    assert same(load_state_dict(url, online.device()), tensors())


@pytest.mark.parametrize("scheme", ["http", "ts"])
def test_a_server_streams_a_model_from_a_url(
    large: tuple[Path, int], web: WebServer, scheme: str
) -> None:
    directory, size = large
    ids, expected = _logits_of(directory)
    with contextlib.ExitStack() as stack:
        url = f"{web.url}/large"
        if scheme == "ts":
            url = stack.enter_context(served(directory))
        options = {"--weights": url, "--budget": size // 3}
        serving = stack.enter_context(Serving(options))
        machine = stack.enter_context(RemoteMachine.tcp(serving.address))
        model = ts.from_pretrained(url, device=machine.device())
        for _ in range(3):
            assert torch.equal(model(ids.to(machine.device())).logits.cpu(), expected)
