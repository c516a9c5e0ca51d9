# SPDX-License-Identifier: MIT OR Apache-2.0
"""An open file is the file: what happens to its path changes nothing. And ``ts.reload``."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preloaded
import pytest
import tensorstream as ts
import torch
from torch import nn

LAYERS = 6
X = torch.linspace(-1, 1, 2 * 64).view(2, 64)
#: Less than half of the weights, and more than all of them.
BUDGETS = ["40KiB", "1MiB"]


def a_model(seed: int = 0, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(64, 64, bias=bias) for _ in range(LAYERS)))


def without_weights() -> nn.Sequential:
    with torch.device("meta"):
        return a_model()


def saved(directory: Path, name: str = "model.safetensors", seed: int = 0) -> Path:
    directory.mkdir(exist_ok=True)
    ts.save_file(dict(a_model(seed).state_dict()), directory / name)
    return directory / name


def streamed(path: Path, budget: str, **settings: object) -> nn.Sequential:
    config = ts.Config(budget=budget, **settings)  # type: ignore[arg-type]
    return ts.offload(without_weights(), config, checkpoint=path)


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(X)
        return result


def remove(path: Path) -> None:
    path.unlink()


def remove_directory(path: Path) -> None:
    shutil.rmtree(path.parent)


def replace(path: Path) -> None:
    saved(path.parent, f"other{path.suffix}", seed=9).replace(path)


def save_over(path: Path) -> None:
    saved(path.parent, path.name, seed=9)


def rename(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def rename_directory(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


CHANGES = [remove, remove_directory, replace, save_over, rename, rename_directory]


@pytest.mark.product
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("early", [True, False])
def test_a_checkpoint_streams_on_whatever_happens_to_its_path(
    tmp_path: Path, change: Callable[[Path], None], budget: str, early: bool
) -> None:
    expected = outputs(a_model())
    path = saved(tmp_path / "weights")
    model = streamed(path, budget)
    if not early:
        assert torch.equal(outputs(model), expected)
    change(path)
    for _ in range(3):
        assert torch.equal(outputs(model), expected)
    state = model.state_dict()
    assert torch.equal(state["2.weight"] + 0, a_model().state_dict()["2.weight"])
    restored = ts.restore(model)
    assert torch.equal(outputs(restored), expected)


@pytest.mark.parametrize("backend", ts.backends())
@pytest.mark.parametrize("suffix", [".safetensors", ".ts"])
def test_every_backend_reads_a_file_without_a_name(
    tmp_path: Path, backend: str, suffix: str
) -> None:
    path = saved(tmp_path / "weights", f"model{suffix}")
    try:
        model = streamed(path, BUDGETS[0], backend=backend)
    except ts.ConfigurationError as error:
        pytest.skip(str(error))
    shutil.rmtree(path.parent)
    for _ in range(3):
        assert torch.equal(outputs(model), outputs(a_model()))


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs")
@pytest.mark.parametrize("backend", ["auto", "mmap"])
def test_files_in_memory_stream_on_without_their_names(backend: str) -> None:
    directory = Path("/dev/shm") / f"tensorstream-test-{os.getpid()}-{backend}"
    try:
        model = streamed(saved(directory), BUDGETS[0], backend=backend)
    finally:
        shutil.rmtree(directory)
    for _ in range(3):
        assert torch.equal(outputs(model), outputs(a_model()))


@pytest.mark.parametrize("mapped", [True, False])
def test_opened_files_are_read_after_they_were_replaced(tmp_path: Path, mapped: bool) -> None:
    path = saved(tmp_path)
    file = ts.safe_open(path, mapped=mapped)
    expected = a_model().state_dict()
    replace(path)
    assert torch.equal(file.get_tensor("1.weight"), expected["1.weight"])
    path.unlink()
    assert torch.equal(file.get_slice("1.bias")[3:5], expected["1.bias"][3:5])


def test_a_conversion_in_between_changes_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path, "model.ts")
    model = streamed(path, BUDGETS[0])
    assert torch.equal(outputs(model), outputs(a_model()))
    ts.convert(path, path, codec="zstd")
    ts.compact(path)
    assert torch.equal(outputs(model), outputs(a_model()))
    path.unlink()
    assert torch.equal(outputs(model), outputs(a_model()))


def test_a_forked_child_reads_a_file_without_a_name(tmp_path: Path) -> None:
    model = streamed(saved(tmp_path / "weights"), BUDGETS[0])
    expected = outputs(a_model())
    assert torch.equal(outputs(model), expected)
    shutil.rmtree(tmp_path / "weights")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            results = [torch.equal(outputs(model), expected) for _ in range(3)]
            status = 0 if all(results) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(outputs(model), expected)


def test_hundreds_of_shards_stream_on_under_a_low_limit_of_open_files(
    programs: preloaded.Server, tmp_path: Path
) -> None:
    program = textwrap.dedent(
        """
        import json, os, resource, shutil, sys
        from pathlib import Path
        import torch, tensorstream as ts
        hard = int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_NOFILE, (160, hard))
        directory = Path(sys.argv[1])
        tensors = {f"{i}.weight": torch.full((8, 8), float(i)) for i in range(260)}
        names = {name: f"{name}.safetensors" for name in tensors}
        for name, tensor in tensors.items():
            ts.save_file({name: tensor}, directory / names[name])
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
        with torch.device("meta"):
            model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in tensors))
        model = ts.offload(model, checkpoint=directory, budget="64KiB")
        shutil.rmtree(directory)
        with torch.inference_mode():
            for _ in range(2):
                for i, layer in enumerate(model):
                    assert torch.equal(layer(torch.ones(8)), torch.full((8,), 8.0 * i)), i
        more = [open(os.devnull) for _ in range(24)]
        print("done")
        """
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (min(4096, hard), 330):
        directory = tmp_path / str(limit)
        directory.mkdir()
        done = programs.run_code(program, directory, limit)
        assert done.stdout.strip().endswith("done"), done.stderr


def test_too_many_files_say_what_to_do(programs: preloaded.Server, tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import resource, sys
        import tensorstream as ts
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        files = []
        try:
            for _ in range(100):
                files.append(ts.safe_open(sys.argv[1]))
        except ts.StorageError as error:
            files.clear()
            print(error)
        """
    )
    done = programs.run_code(program, saved(tmp_path))
    assert "ulimit -n" in done.stdout, done.stdout + done.stderr


def write_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(b"\x01" * 64)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


@pytest.mark.parametrize("change", [write_in_place, append, truncate])
@pytest.mark.parametrize("renamed", [False, True])
def test_a_file_that_is_written_to_is_found(
    tmp_path: Path, change: Callable[[Path], None], renamed: bool
) -> None:
    path = saved(tmp_path)
    model = streamed(path, BUDGETS[0])
    assert torch.equal(outputs(model), outputs(a_model()))
    if renamed:
        path = path.rename(tmp_path / "elsewhere")
    change(path)
    with pytest.raises(ts.CheckpointChangedError, match=r"tensorstream\.reload\(model\)"):
        for _ in range(3):
            outputs(model)


def test_reload_streams_the_new_bytes_after_a_change(tmp_path: Path) -> None:
    path = saved(tmp_path)
    other = saved(tmp_path, "other.safetensors", seed=1)
    for budget in BUDGETS:
        path.write_bytes(saved(tmp_path, "first.safetensors").read_bytes())
        model = streamed(path, budget)
        weight = model[1].weight
        assert torch.equal(outputs(model), outputs(a_model()))
        path.write_bytes(other.read_bytes())
        assert ts.reload(model) is model
        for _ in range(3):
            assert torch.equal(outputs(model), outputs(a_model(1)))
        assert model[1].weight is weight
        assert torch.equal(model.state_dict()["3.weight"] + 0, a_model(1).state_dict()["3.weight"])
        assert torch.equal(outputs(copy.deepcopy(model)), outputs(a_model(1)))
        assert torch.equal(outputs(ts.restore(model)), outputs(a_model(1)))


def shards(directory: Path, state: dict[str, torch.Tensor]) -> None:
    names = {name: f"{i % 3}.safetensors" for i, name in enumerate(state)}
    for file in set(names.values()):
        ts.save_file({n: t for n, t in state.items() if names[n] == file}, directory / file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))


def whole(directory: Path, state: dict[str, torch.Tensor]) -> None:
    extra = {"0.0": torch.ones(7), **state}
    ts.save_file(extra, directory / "model.safetensors", {"step": "2" * 100})


def container(directory: Path, state: dict[str, torch.Tensor]) -> None:
    ts.save_file(dict(reversed(state.items())), directory / "model.ts")


@pytest.mark.product
@pytest.mark.parametrize("before", [shards, whole, container])
@pytest.mark.parametrize("after", [shards, whole, container])
@pytest.mark.parametrize("budget", BUDGETS)
def test_reload_finds_tensors_in_other_places(
    tmp_path: Path, before: Callable[..., None], after: Callable[..., None], budget: str
) -> None:
    before(tmp_path, dict(a_model().state_dict()))
    model = streamed(tmp_path, budget)
    assert torch.equal(outputs(model), outputs(a_model()))
    for file in tmp_path.iterdir():
        file.unlink()
    after(tmp_path, dict(a_model(1).state_dict()))
    assert torch.equal(outputs(model), outputs(a_model()))
    ts.reload(model)
    assert torch.equal(outputs(model), outputs(a_model(1)))
    assert torch.equal(outputs(model), outputs(a_model(1)))
    model.state_dict()["0.bias"].sum()
    ts.save_file(dict(model.state_dict()), tmp_path / "copy.safetensors")
    copied = ts.load_file(tmp_path / "copy.safetensors")
    assert torch.equal(copied["5.weight"], a_model(1).state_dict()["5.weight"])


def test_reload_refuses_other_tensors_and_changes_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path)
    model = streamed(path, BUDGETS[0])
    expected = outputs(model)
    state = dict(a_model(1).state_dict())
    for name, value, kind in (
        ("2.weight", torch.ones(64, 32), ts.CheckpointError),
        ("2.weight", torch.ones(64, 64, dtype=torch.float64), ts.CheckpointError),
        ("2.bias", None, ts.MissingTensorError),
    ):
        wrong = {**state, name: value}
        ts.save_file({n: t for n, t in wrong.items() if t is not None}, tmp_path / "b.safetensors")
        (tmp_path / "b.safetensors").replace(path)
        with pytest.raises(kind, match=name):
            ts.reload(model)
        assert torch.equal(outputs(model), expected)
    path.write_bytes(b"no weights")
    with pytest.raises(ts.CheckpointError):
        ts.reload(model)
    path.unlink()
    with pytest.raises(ts.CheckpointNotFoundError):
        ts.reload(model)
    assert torch.equal(outputs(model), expected)


def test_reload_refuses_a_model_that_runs_or_does_not_stream(tmp_path: Path) -> None:
    path = saved(tmp_path)
    model = streamed(path, BUDGETS[0])
    replace(path)
    failures = []

    def during(*_: object) -> None:
        with pytest.raises(ts.ConfigurationError, match="while it runs"):
            ts.reload(model)
        failures.append(1)

    handle = model[3].register_forward_hook(during)
    assert torch.equal(outputs(model), outputs(a_model()))
    assert failures == [1]
    handle.remove()
    ts.reload(model)
    assert torch.equal(outputs(model), outputs(a_model(9)))
    with pytest.raises(ts.ModelError, match="not offloaded"):
        ts.reload(a_model())


def test_reload_reads_buffers_and_tied_weights(tmp_path: Path) -> None:
    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        model: Any = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)).eval()
        model[2].weight = model[0].weight
        model[1].running_mean.normal_()
        return model

    path = tmp_path / "a.safetensors"
    ts.save_file(dict(build(0).state_dict()), path)
    model = ts.offload(build(0), checkpoint=path, budget="60KiB")
    assert torch.equal(outputs(model), outputs(build(0)))
    ts.save_file(dict(build(1).state_dict()), path)
    assert torch.equal(outputs(ts.reload(model)), outputs(build(1)))
    assert torch.equal(model[1].running_mean, build(1)[1].running_mean)


def test_reload_gives_memory_back_first_and_works_in_a_forked_child(tmp_path: Path) -> None:
    path = saved(tmp_path)
    model = streamed(path, BUDGETS[1])
    outputs(model)
    for seed in range(1, 4):
        saved(tmp_path, seed=seed)
        assert torch.equal(outputs(ts.reload(model)), outputs(a_model(seed)))
        stats = ts.stats(model)
        assert stats["reserved_high_water_bytes"] <= stats["budget_bytes"]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            status = 0 if torch.equal(outputs(model), outputs(a_model(3))) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_reload_of_compressed_weights_keeps_to_the_budget(tmp_path: Path) -> None:
    path = saved(tmp_path, "model.ts")
    small, large = streamed(path, BUDGETS[0]), streamed(path, "4MiB")
    ts.save_file(dict(a_model(1).state_dict()), path, codec="zstd")
    with pytest.raises(ts.BudgetError):
        ts.reload(small)
    for _ in range(3):
        assert torch.equal(outputs(small), outputs(a_model()))
    assert torch.equal(outputs(ts.reload(large)), outputs(a_model(1)))
    saved(tmp_path, "model.ts", seed=2)
    for model in (small, large):
        assert torch.equal(outputs(ts.reload(model)), outputs(a_model(2)))


def test_reload_refuses_weights_that_were_computed(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    settings = ts.Config(budget="1MiB", storage_path=tmp_path / "converted")
    model = ts.from_pretrained(tmp_path / "model", config=settings, dtype=torch.bfloat16)
    with pytest.raises(ts.ModelError, match="load the model again"):
        ts.reload(model)


def test_reload_of_a_part_or_of_a_module_around_reloads_the_model(tmp_path: Path) -> None:
    path = saved(tmp_path)
    model = streamed(path, BUDGETS[0])
    around = nn.Sequential(nn.Identity(), model)
    for seed, each in enumerate((model[2], around, model[1:3]), start=1):
        saved(tmp_path, seed=seed)
        ts.reload(each)
        for _ in range(3):
            assert torch.equal(outputs(model), outputs(a_model(seed)))
        ts.save_file(dict(model.state_dict()), tmp_path / "copy.safetensors")
        copied = ts.load_file(tmp_path / "copy.safetensors")
        assert torch.equal(copied["0.weight"], a_model(seed).state_dict()["0.weight"])


def test_saved_weights_have_metadata_only_if_it_is_given(tmp_path: Path) -> None:
    import safetensors.torch

    model = streamed(saved(tmp_path), BUDGETS[0])
    for metadata in (None, {}, {"b": "1", "a": "2"}):
        path = tmp_path / "copy.safetensors"
        safetensors.torch.save_file(dict(model.state_dict()), path, metadata)
        assert ts.safe_open(path).metadata() == metadata
