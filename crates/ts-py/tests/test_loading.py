# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loads whole files: as views, into memory of deleted tensors, and before a fork."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import preloaded
import pytest
import tensorstream as ts
import torch
from test_files import FORMATS, assert_same, some_tensors


@pytest.mark.parametrize("suffix", FORMATS)
def test_views_of_read_files_equal_copies(tmp_path: Path, suffix: str) -> None:
    expected, path = some_tensors(), tmp_path / f"a.{suffix}"
    ts.save_file(expected, path)
    before = path.read_bytes()
    views = ts.load_file(path, mapped="auto")
    assert list(views) == sorted(expected)
    assert_same(views, expected)
    # A truthy value is like True.
    assert_same(ts.load_file(path, mapped=1), expected)  # type: ignore[arg-type]
    views["f32"].zero_()
    assert path.read_bytes() == before
    on_meta = ts.load_file(path, "meta", mapped="auto")
    assert {tensor.device.type for tensor in on_meta.values()} == {"meta"}
    # Another file takes the place of the mapped one, which stays as it is.
    ts.save_file({"f32": torch.ones(3)}, path)
    assert_same({"bf16": views["bf16"]}, {"bf16": expected["bf16"]})
    with pytest.raises(ts.ConfigurationError, match="expected True, False or 'auto'"):
        # The value is invalid on purpose.
        ts.load_file(path, mapped="yes")  # type: ignore[arg-type]


def test_views_are_verified_and_others_are_read(tmp_path: Path) -> None:
    expected, path = some_tensors(), tmp_path / "a.ts"
    ts.save_file(expected, path)
    harmed = bytearray(path.read_bytes())
    harmed[8200] ^= 1
    path.write_bytes(harmed)
    with pytest.raises(ts.ChecksumError, match=r"a\.ts: tensor"):
        ts.load_file(path, mapped="auto")
    assert ts.load_file(path, mapped="auto", verify=False).keys() == expected.keys()
    # Only some tensors can be compressed.
    mixed = expected | {"zeros": torch.zeros(1 << 20), "noise": torch.randn(1 << 18).long()}
    ts.save_file(mixed, path, codec="split")
    assert_same(ts.load_file(path, mapped="auto"), mixed)


def test_memory_of_deleted_tensors_is_used_again(tmp_path: Path) -> None:
    for value in range(4):
        tensor = torch.full((3 << 20,), value, dtype=torch.int32)
        ts.save_file({"a": tensor, "b": tensor[:1000]}, tmp_path / f"{value}.ts", codec="auto")

    def load(value: int) -> dict[str, torch.Tensor]:
        return ts.load_file(tmp_path / f"{value}.ts")

    ts.trim()
    kept = {value: load(value) for value in range(3)}
    # The tensors of a file share an allocation, which is free when both are deleted.
    del kept[0]["a"]
    assert ts.trim() == 0
    addresses = {tensors.pop("a").data_ptr() for tensors in kept.values() if "a" in tensors}
    del kept[1], kept[2]
    size = (12 << 20) + 4096
    assert f"tensorstream_kept_bytes {2 * size}\n" in ts.metrics()
    again = load(3)
    assert again["a"].data_ptr() in addresses
    assert bool((again["a"] == 3).all()) and not kept[0]["b"].any()
    assert ts.trim() == size
    assert ts.trim() == 0
    for _ in range(3):
        loaded = [load(value) for value in (0, 1, 2, 3, 0, 1, 2)]
        del loaded
    assert 5 * size == ts.trim()  # more would exceed 64 MiB


@pytest.mark.parametrize("mapped", [False, "auto"])
@pytest.mark.parametrize("size", [3 << 20, 140 << 20])
def test_forked_processes_inherit_loaded_tensors(
    tmp_path: Path, programs: preloaded.Server, size: int, mapped: Literal[False, "auto"]
) -> None:
    """The workers of a ``DataLoader`` are forked by default."""
    count = size // 4
    ts.save_file({"a": torch.arange(count, dtype=torch.int32)}, tmp_path / "a.ts")
    code = f"""
import os, torch
import tensorstream as ts
torch.set_num_threads(1)  # the threads of OpenMP do not survive a fork
tensor = ts.load_file({str(tmp_path / "a.ts")!r}, mapped={mapped!r})["a"]
child = os.fork()
if child == 0:
    right = torch.equal(tensor, torch.arange({count}, dtype=torch.int32))
    tensor.zero_()
    del tensor
    again = ts.load_file({str(tmp_path / "a.ts")!r}, mapped={mapped!r})["a"]
    os._exit(0 if right and int(again[-1]) == {count - 1} else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(tensor, torch.arange({count}, dtype=torch.int32))
"""
    done = programs.run_code(code)
    assert done.returncode == 0, done.stderr
