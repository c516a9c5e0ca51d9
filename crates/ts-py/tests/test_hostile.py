# SPDX-License-Identifier: MIT OR Apache-2.0
"""Bad checkpoints raise a typed error that names the file and the cause, within a second."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import tensorstream as ts
import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Make = Callable[[Path], None]


def raw(header: bytes | str, data: int = 16, length: int | None = None) -> bytes:
    """Returns a safetensors file with this header, valid or not."""
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text) if length is None else length) + text + b"\x5a" * data


def one(**fields: object) -> str:
    """Returns a header of one tensor of 16 bytes, with some fields replaced."""
    return json.dumps(
        {"bad.one": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **fields}}
    )


def single(content: bytes) -> Make:
    return lambda path: (path / SINGLE).write_bytes(content) and None


def two(first: tuple[int, int], second: tuple[int, int]) -> str:
    entry = {"dtype": "U8", "shape": [8]}
    return json.dumps(
        {"a": {**entry, "data_offsets": first}, "bad.one": {**entry, "data_offsets": second}}
    )


def sharded(
    weight_map: object, *, shards: dict[str, bytes] | None = None, text: str | None = None
) -> Make:
    def make(path: Path) -> None:
        for name, content in (
            shards if shards is not None else {"s1": raw(one()), "s2": raw(one())}
        ).items():
            (path / name).write_bytes(content)
        (path / INDEX).write_text(
            text if text is not None else json.dumps({"weight_map": weight_map})
        )

    return make


def symlink_loop(name: str) -> Make:
    def make(path: Path) -> None:
        (path / name).symlink_to(path / "b")
        (path / "b").symlink_to(path / name)
        (path / INDEX).write_text('{"weight_map":{"bad.one":"s1"}}') if name != SINGLE else None

    return make


def container(change: Callable[[bytearray], object]) -> Make:
    def make(path: Path) -> None:
        ts.save_file({"good": torch.zeros(7), "bad.one": torch.ones(3, 3)}, path / "model.ts")
        content = bytearray((path / "model.ts").read_bytes())
        change(content)
        (path / "model.ts").write_bytes(content)

    return make


def overwrite(at: int, content: bytes) -> Callable[[bytearray], object]:
    return lambda file: file.__setitem__(slice(at, at + len(content)), content)


def cut(length: int) -> Callable[[bytearray], object]:
    return lambda file: file.__delitem__(slice(length, None))


GOOD = raw(one())
DEEP = "[" * 100_000 + "]" * 100_000

#: Bad checkpoints by name: a function that creates one, and a pattern for the message.
CASES: dict[str, tuple[Make, str]] = {
    "empty file": (single(b""), "truncated"),
    "length past the end": (single(raw(one(), 0, length=10_000)), "truncated.*10008"),
    "length over its cap": (single(raw("{}", 0, length=100_000_001)), "byte 0: .*100000001"),
    "length of 2^64-1": (single(b"\xff" * 8 + b"{}"), "byte 0: .*18446744073709551615"),
    "a pickle": (single(b"\x80\x02}q\x00." + b"\0" * 99),
        "byte 0: .*not a safetensors or .ts file"),
    "no JSON": (single(raw("weights here")), "byte 8: .*begin with"),
    "half JSON": (single(raw(one()[:-9])), "byte [0-9]+: .*EOF"),
    "no object": (single(raw("[]")), "byte 8: .*begin with"),
    "not UTF-8": (single(raw(b'{"a\xff":{}}')), "byte 11: the header is not UTF-8"),
    "nested deeply": (single(raw('{"bad.one":' + DEEP + "}")), "byte [0-9]+: "),
    "nested deeply in metadata": (single(raw('{"__metadata__":' + DEEP + "}")), "byte [0-9]+: "),
    "metadata of numbers": (single(raw('{"__metadata__":{"a":1}}', 0)), "byte [0-9]+: .*string"),
    "metadata key twice": (single(raw('{"__metadata__":{"a":"1","a":"2"}}', 0)),
        "duplicate key `a`"),
    "overlapping": (single(raw(two((0, 8), (4, 12)), 12)), "tensor `bad.one` .data at byte "
        "[0-9]+.*overlaps"),
    "gapped": (single(raw(two((0, 8), (12, 20)), 20)), "tensor `bad.one` .data at byte "
        "[0-9]+.*gap"),
    "a gap at the start": (single(raw(one(data_offsets=[4, 20]), 20)), "tensor `bad.one` .data at "
        "byte.*gap"),
    "reversed offsets": (single(raw(one(data_offsets=[16, 0]))), "tensor `bad.one` .data at "
        "byte.*end before they begin"),
    "negative offsets": (single(raw(one(data_offsets=[-16, 0]))), "byte [0-9]+: .*-16"),
    "float offsets": (single(raw(one(data_offsets=[0, 16.5]))), "byte [0-9]+: .*16.5"),
    "overflowing offsets": (single(raw(one(data_offsets=[0, 2**64]))), "byte [0-9]+: "),
    "offsets near 2^64": (single(raw(one(data_offsets=[2**64 - 17, 2**64 - 1]))),
        "tensor `bad.one`"),
    "three offsets": (single(raw(one(data_offsets=[0, 8, 16]))), "byte [0-9]+: "),
    "offsets past the end": (single(raw(one(shape=[400], data_offsets=[0, 1600]))),
        "tensor `bad.one` needs"),
    "offsets that do not fit the shape": (single(raw(one(data_offsets=[0, 12]), 12)),
        "`bad.one`.*16 bytes.*12"),
    "negative shape": (single(raw(one(shape=[-4]))), "byte [0-9]+: .*-4"),
    "a shape whose size overflows": (single(raw(one(shape=[2**40, 2**40]))),
        "tensor `bad.one`.*not a whole number"),
    "absurd rank": (single(raw(one(shape=[1] * 100_000 + [4]))), "tensor `bad.one`.*rank 100001"),
    "rank 65": (single(raw(one(shape=[1] * 64 + [4]))), "tensor `bad.one`.*rank 65"),
    "unknown dtype": (single(raw(one(dtype="F33"))), "tensor `bad.one`.*unknown dtype `F33`"),
    "half a byte": (single(raw(one(dtype="F4", shape=[3], data_offsets=[0, 1]), 1)),
        "tensor `bad.one`.*not a whole"),
    "a missing field": (single(raw('{"bad.one":{"dtype":"F32","shape":[4]}}')),
        "byte [0-9]+: .*missing field"),
    "an unknown field": (single(raw(one(stride=[1]))), "byte [0-9]+: .*unknown field"),
    "a name twice": (single(raw(one()[:-1] + "," + one()[1:])), "duplicate key `bad.one`"),
    "NUL in a name": (single(raw(one().replace("bad.one", "bad\\u0000one"))),
        "invalid tensor name"),
    "an empty name": (single(raw(one().replace("bad.one", ""))), "invalid tensor name"),
    "trailing bytes": (single(GOOD + b"x"), "byte [0-9]+: 1 trailing bytes after the last tensor"),
    "data cut": (single(GOOD[:-1]), "truncated: tensor `bad.one` needs bytes"),
    "index that is no JSON": (sharded({}, text="{'weight_map'"), f"{INDEX}: byte 1: "),
    "index without a map": (sharded({}, text='{"metadata":{}}'), f"{INDEX}: byte .*weight_map"),
    "index of an empty map": (sharded({}), f"{INDEX}: .*empty"),
    "index nested deeply": (sharded({}, text='{"weight_map":' + DEEP + "}"), f"{INDEX}: byte "),
    "index of numbers": (sharded({"bad.one": 1}), f"{INDEX}: byte .*string"),
    "a name twice in the index": (
        sharded({}, text='{"weight_map":{"bad.one":"s1","bad.one":"s2"}}'),
            f"{INDEX}: .*duplicate key `bad.one`"),
    "a shard that is missing": (sharded({"bad.one": "gone"}), "gone: cannot open"),
    "a shard that leaves the directory": (sharded({"bad.one": "../s1"}),
        f"{INDEX}: .*`bad.one`.*invalid shard"),
    "a shard at an absolute path": (sharded({"bad.one": "/etc/passwd"}),
        f"{INDEX}: .*`bad.one`.*invalid shard"),
    "a shard with NUL in its name": (sharded({"bad.one": "s\0"}), f"{INDEX}: .*`bad.one`.*invalid "
        "shard"),
    "a shard that is the directory": (sharded({"bad.one": "."}), f"{INDEX}: .*`bad.one`.*invalid "
        "shard"),
    "a shard that disagrees with the index": (sharded({"other": "s1"}), "s1: tensor `other` is "
        "listed in .*json"),
    "a shard that is cut": (sharded({"bad.one": "s1"}, shards={"s1": GOOD[:-3]}), "s1: truncated: "
        "tensor `bad.one`"),
    "a symlink to itself": (symlink_loop(SINGLE), f"{SINGLE}: cannot open: "),
    "a shard that is a symlink to itself": (symlink_loop("s1"), "s1: cannot open: "),
    "a directory in place of a file": (lambda path: (path / SINGLE).mkdir(),
        f"{SINGLE}: .* is a directory"),
    "a pipe in place of a file": (lambda path: os.mkfifo(path / SINGLE), f"{SINGLE}: cannot open: "
        ".*not a regular file"),
    ".ts: cut in the superblock": (container(cut(40)), "byte 0: no valid superblock"),
    ".ts: no superblock": (container(overwrite(9, b"\xff" * 60)), "byte 0: no valid "
        "superblock.*checksum"),
    ".ts: index cut": (container(lambda file: file.pop()), "truncated: the index needs bytes"),
    ".ts: index damaged": (container(lambda file: overwrite(len(file) - 9, b"\xff")(file)),
        "index checksum mismatch"),
    ".ts: data cut away": (container(cut(8192)), "truncated: the index"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_bad_checkpoint_is_refused_within_a_second(name: str, tmp_path: Path) -> None:
    make, text = CASES[name]
    make(tmp_path)
    for call in (lambda: ts.plan(tmp_path, budget="1MiB"), lambda: ts.load_file(tmp_path)):
        began = time.perf_counter()
        with pytest.raises(ts.TensorStreamError, match=rf"(?s){text}") as caught:
            call()
        assert time.perf_counter() - began < 1.0
        assert str(tmp_path) in str(caught.value)
        assert isinstance(caught.value, ts.CheckpointError | OSError)
        assert len(str(caught.value)) < 2000


def test_a_file_truncated_at_any_byte_is_an_error(
    tmp_path: Path, share: Callable[[int], int]
) -> None:
    content = raw(
        one().replace("}}", '},"second":{"dtype":"U8","shape":[3],"data_offsets":[16,19]}}'), 19
    )
    ts.save_file({"a": torch.zeros(2)}, tmp_path / "whole.ts")
    for suffix, whole in (("safetensors", content), ("ts", (tmp_path / "whole.ts").read_bytes())):
        path = tmp_path / f"cut.{suffix}"
        for length in range(0, len(whole), len(whole) // share(len(whole))):
            path.write_bytes(whole[:length])
            with pytest.raises(ts.CheckpointError, match=path.name):
                ts.plan(path, budget="1MiB")
        path.write_bytes(whole)
        assert ts.load_file(path)


def test_files_that_the_library_refuses_are_refused(tmp_path: Path) -> None:
    """The safetensors library accepts no bad checkpoints except those in ``lenient``."""
    accepted = []
    for name, (make, _) in CASES.items():
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        make(directory)
        file = directory / SINGLE
        if file.is_file():
            try:
                with safetensors.safe_open(file, "pt") as opened:
                    opened.keys()
                accepted.append(name)
            except (OSError, safetensors.SafetensorError):
                pass
    lenient = {
        "metadata key twice",
        "absurd rank",
        "rank 65",
        "an unknown field",
        "a name twice",
        "NUL in a name",
        "an empty name",
    }
    assert set(accepted) <= lenient, set(accepted) - lenient
