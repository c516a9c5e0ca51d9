# SPDX-License-Identifier: MIT OR Apache-2.0
"""``tensorstream.torch`` does what ``safetensors.torch`` does, with the same files and errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch as theirs
import tensorstream as ts
import tensorstream.torch as st
import torch
from torch import nn

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {
        f"{dtype}".removeprefix("torch."): (torch.randn(3, 5) * 4).to(dtype) for dtype in DTYPES
    }
    return {**made, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    bits = torch.uint8
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(a[name].reshape(-1).view(bits), b[name].reshape(-1).view(bits))
        for name in a
    )


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "b": "c"}])
def test_files_are_the_same(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    one = {"only": "one"} if metadata else metadata  # the order of several keys is random there
    assert st.save(tensors(), one) == theirs.save(tensors(), one)
    assert same(theirs.load(st.save(tensors(), metadata)), tensors())
    for name in ("a.safetensors", "model.bin", "nothing"):
        st.save_file(tensors(), tmp_path / name, metadata)
        assert [file.name for file in tmp_path.iterdir()] == [name]
        with safetensors.safe_open(tmp_path / name, "pt") as file:
            assert file.metadata() == metadata
        for backend in ("mmap", "pread"):
            loaded = st.load_file(tmp_path / name, backend=backend)
            assert same(loaded, theirs.load_file(tmp_path / name))
            with st.safe_open(tmp_path / name, framework="pt", backend=backend) as opened:
                assert same(opened.get_tensors(), loaded)
                assert opened.keys() == sorted(loaded)
        (tmp_path / name).unlink()
    assert same(st.load(theirs.save(tensors())), tensors())


def test_signatures_are_the_same() -> None:
    for name in ("load", "load_file", "load_model", "save", "save_file", "save_model"):
        mine, its = (inspect.signature(getattr(module, name)) for module in (st, theirs))
        assert list(mine.parameters) == list(its.parameters), name
        for key, parameter in its.parameters.items():
            assert mine.parameters[key].default == parameter.default, (name, key)
            assert mine.parameters[key].kind == parameter.kind, (name, key)
    public = {name for name in vars(theirs) if not name.startswith("_")} - {
        "Any", "Dict", "List", "Optional", "Set", "Tuple", "Union", "defaultdict", "os", "sys",
        "torch",
    }  # fmt: skip
    assert public <= set(st.__all__)


def shared() -> dict[str, Any]:
    return dict.fromkeys("ab", torch.zeros(3))


def overlapping() -> dict[str, Any]:
    base = torch.zeros(10)
    return {"a": base[:6], "b": base[4:]}


BAD: list[Callable[[], Any]] = [
    shared,
    overlapping,
    lambda: {"a": torch.zeros(3, 3).t()},
    lambda: {"a": torch.zeros(4, 4)[:, :2]},
    lambda: {"a": torch.eye(3).to_sparse()},
    lambda: {"a": [1.0]},
    lambda: [torch.zeros(3)],
    lambda: {"a": (base := torch.zeros(10)), "b": base[2:4]},
]


@pytest.mark.parametrize("make", BAD)
def test_what_safetensors_refuses_is_refused(make: Callable[[], Any], tmp_path: Path) -> None:
    for call in (
        lambda module: module.save(make()),
        lambda module: module.save_file(make(), tmp_path / "a.safetensors"),
    ):
        with pytest.raises((ValueError, RuntimeError)) as its:
            call(theirs)
        with pytest.raises(type(its.value)) as mine:
            call(st)
        assert isinstance(mine.value, st.SafetensorError)
    assert not list(tmp_path.iterdir())


def test_parts_that_do_not_overlap_are_saved() -> None:
    base = torch.arange(10.0)
    parts = {"a": base[:5], "b": base[5:], "empty": base[3:3]}
    assert st.save(parts) == theirs.save(parts)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(4, 4)
        self.a = nn.Linear(4, 4)
        self.a.weight = self.b.weight
        self.c = nn.Linear(4, 4)
        self.c.weight = nn.Parameter(torch.randn(4, 4).t())
        self.register_buffer("table", torch.arange(5))


def test_models_with_shared_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    for force in (True, False):
        ours, its = tmp_path / "ours.safetensors", tmp_path / "its.safetensors"
        if not force:
            model.c.weight = nn.Parameter(torch.randn(4, 4))
        metadata: dict[str, str] = {"own": "data"}
        st.save_model(model, str(ours), metadata, force_contiguous=force)
        theirs.save_model(model, str(its), {"own": "data"}, force_contiguous=force)
        assert metadata == {"own": "data", "b.weight": "a.weight"}
        assert same(theirs.load_file(ours), theirs.load_file(its))
        with safetensors.safe_open(ours, "pt") as one, safetensors.safe_open(its, "pt") as other:
            assert one.metadata() == other.metadata()
        for module in (st, theirs):
            fresh = Tied()
            missing, unexpected = module.load_model(fresh, its, backend="pread")
            assert (list(missing), unexpected) == ([], [])
            assert same(fresh.state_dict(), model.state_dict())
    model.c.weight = nn.Parameter(torch.randn(4, 4).t())
    for module in (st, theirs):
        with pytest.raises(ValueError, match="contiguous"):
            module.save_model(model, str(tmp_path / "x.safetensors"), force_contiguous=False)
    part = nn.Module()
    part.one = nn.Parameter((base := torch.zeros(10))[:6])
    part.two = nn.Parameter(base[4:])
    for module in (st, theirs):
        with pytest.raises(RuntimeError):
            module.save_model(part, str(tmp_path / "y.safetensors"))


def test_streamed_models_are_saved_one_tensor_at_a_time(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), *(nn.Linear(32, 32) for _ in range(6)))
    head = nn.Linear(32, 64, bias=False)
    head.weight = model[0].weight
    model.append(head)
    theirs.save_model(model, str(tmp_path / "its.safetensors"))
    ts.offload(model, ts.Config(storage_path=tmp_path / "weights", budget="20KiB"))
    for _ in range(2):
        st.save_model(model, str(tmp_path / "ours.safetensors"))
        assert (tmp_path / "ours.safetensors").read_bytes() == (
            tmp_path / "its.safetensors"
        ).read_bytes()
    with pytest.raises(st.SharedMemoryError):
        st.save_file(model.state_dict(), tmp_path / "x.safetensors")


def test_models_that_do_not_fit_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    model = nn.Linear(3, 3)
    st.save_file({"weight": torch.ones(3, 3), "other": torch.ones(1)}, path)
    messages = []
    for module in (st, theirs):
        with pytest.raises(RuntimeError) as caught:
            module.load_model(model, path)
        messages.append(str(caught.value))
        missing, unexpected = module.load_model(model, path, strict=False)
        assert (set(missing), unexpected) == ({"bias"}, ["other"])
    assert messages[0] == messages[1]


def test_serialization_of_memory(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    what = {"dtype": "float32", "shape": [2, 3], "data_ptr": array.ctypes.data, "data_len": 24}
    mine, its = st.TensorSpec(**what), safetensors.TensorSpec(**what)  # type: ignore[arg-type]
    assert (mine.dtype, mine.shape, mine.data_len) == (its.dtype, its.shape, its.data_len)
    expected = bytes(safetensors.serialize({"a": its}, {"k": "v"}))
    assert st.serialize({"a": mine}, {"k": "v"}) == expected
    st.serialize_file({"a": mine}, tmp_path / "a")
    assert st.load_file(tmp_path / "a")["a"].tolist() == array.tolist()
    data = theirs.save(tensors())
    assert dict(st.deserialize(data)) == dict(safetensors.deserialize(data))
    for wrong in ({"dtype": "float33"}, {"dtype": "Tensor"}):
        with pytest.raises(ValueError, match="dtype"):
            st.TensorSpec(**{**what, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ts.ConfigurationError, match="does not have 20 bytes"):
        st.serialize({"a": st.TensorSpec(**{**what, "data_len": 20})})  # type: ignore[arg-type]


def test_errors_of_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(FileNotFoundError):
        st.load_file(path)
    path.write_bytes(b"no file of tensors")
    with pytest.raises(st.SafetensorError):
        st.load_file(path)
    with pytest.raises(st.SafetensorError):
        st.load(b"")
    with pytest.raises(ts.ConfigurationError, match="backend"):
        st.load_file(path, backend="gpu")
    st.save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ts.ConfigurationError, match="framework"):
        st.safe_open(path, framework="tf")
    assert st.storage_size(torch.zeros(3)[:2]) == 12 and st.storage_ptr(torch.zeros(0)) == 0


def test_errors_are_those_that_users_of_safetensors_catch(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    theirs.save_file({"a": torch.ones(2)}, path)
    with st.safe_open(path) as file:
        part = file.get_slice("a")
    for call in (file.keys, file.offset_keys, file.metadata, lambda: file.get_tensor("a")):
        with pytest.raises(safetensors.SafetensorError, match="closed"):
            call()
    assert part[:].tolist() == [1, 1], "slices outlive the file, as with safetensors"
    path.write_bytes(b"no file of tensors")
    modules: tuple[Any, ...] = (theirs, st)
    for module in modules:
        with pytest.raises(safetensors.SafetensorError):
            module.load_file(path)
        for wrong in ({"a": 1}, {1: "a"}, "a"):
            with pytest.raises(TypeError):
                module.save_file({"a": torch.ones(2)}, tmp_path / "b", metadata=wrong)
        with pytest.raises(TypeError):
            module.save({1: torch.ones(2)})
        with pytest.raises(TypeError):
            module.load("a")
    with pytest.raises(ts.CheckpointError):
        st.load_file(path)


def test_tensors_have_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    half, long = torch.zeros(2).half(), torch.zeros(2, dtype=torch.int64)
    theirs.save_file({"a": half, "b": long, "c": torch.zeros(2)}, path)
    names = list(theirs.load_file(path))
    assert names != sorted(names)
    assert list(st.load_file(path)) == list(st.load(path.read_bytes())) == names
    assert list(st.load_file(path, backend="pread")) == names


def test_memory_without_data_and_paths_that_cannot_be_replaced(tmp_path: Path) -> None:
    spec = st.TensorSpec(dtype="float32", shape=[4], data_ptr=0, data_len=0)
    with pytest.raises(ts.ConfigurationError, match="does not have 0 bytes"):
        st.serialize({"a": spec})
    (tmp_path / "model.bin").mkdir()
    with pytest.raises(ts.StorageError, match=r"model\.bin"):
        st.save_file({"a": torch.ones(2)}, tmp_path / "model.bin")
    assert [file.name for file in tmp_path.iterdir()] == ["model.bin"]
    assert st.storage_ptr(torch.eye(3).to_sparse()) == 0


def test_headers_that_safetensors_accepts_are_read_from_memory() -> None:
    header = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"more":1}}'
    data = len(header).to_bytes(8, "little") + header + b"xy"
    assert same(st.load(data), theirs.load(data))
    assert st.deserialize(data) == theirs_deserialized(data)


def theirs_deserialized(data: bytes) -> Any:
    return [(name, dict(value)) for name, value in safetensors.deserialize(data)]


def test_files_and_slices_are_shown(tmp_path: Path) -> None:
    st.save_file({"a": torch.zeros(2, 3), "b": torch.zeros(1)}, tmp_path / "a.safetensors")
    with ts.safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert repr(file) == f"safe_open({str(tmp_path / 'a.safetensors')!r}, 2 tensors)"
        assert repr(file.get_slice("a")) == "TensorSlice('a', shape=[2, 3], dtype=F32)"
