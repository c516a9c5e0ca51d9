# SPDX-License-Identifier: MIT OR Apache-2.0
"""Kills each kind of writer at random moments, and looks at what it leaves.

`cargo xtask bench kills`, with 50 kills of each; `kills.py KILLS` makes another number. After each
kill, every file is what it was, what
it becomes, or refused. After one more run, nothing is beside the files.
"""

from __future__ import annotations

import collections
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tensorstream as ts
import torch

KILLS = 50
#: The number of tensors, and their elements.
COUNT, ELEMENTS = 24, 300_000
_SETUP = """
import sys, time, torch, tensorstream as ts
from pathlib import Path

def tensors(name, count=24):
    return {f"{name}.{i}": torch.full([300_000], float(i)) for i in range(count)}

d = Path(sys.argv[1])
torch.set_num_threads(1)
print("ready", flush=True)
begin = time.time()
"""
_MODEL = """
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(24)))
for parameter in model.parameters():
    torch.nn.init.constant_(parameter, 0.5)
ts.offload(model, ts.Config(storage_path=str(d / "weights"), budget="8MiB"))
"""
#: What each program does in a directory with the file base.ts.
PROGRAMS = {
    "save_file, .safetensors": "ts.save_file(tensors('l'), d / 'a.safetensors')",
    "save_file, .ts": "ts.save_file(tensors('l'), d / 'a.ts')",
    "save_file, .ts with zstd": "ts.save_file(tensors('l'), d / 'a.ts', codec='zstd')",
    "append_file": "ts.append_file(tensors('n'), d / 'base.ts')",
    "convert to .safetensors": "ts.convert(d / 'base.ts', d / 'c.safetensors')",
    "convert to .ts with zstd": "ts.convert(d / 'base.ts', d / 'c.ts', codec='zstd')",
    "append_file and compact": (
        "ts.append_file(tensors('l', 12), d / 'base.ts'); ts.compact(d / 'base.ts')"
    ),
    "offload": _MODEL,
}

Content = dict[str, torch.Tensor]


def base() -> Content:
    return {f"l.{index}": torch.full([ELEMENTS], float(index)) for index in range(COUNT)}


def content(path: Path) -> Content:
    return {name: tensor.clone() for name, tensor in ts.load_file(path).items()}


def same(one: Content, other: Content) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    ts.save_file(base(), directory / "base.ts")
    return directory


def measure(name: str, program: str, parent: Path, kills: int) -> bool:
    command = [sys.executable, "-c", f"{_SETUP}\n{program}\nprint(time.time() - begin)"]
    reference = fresh(parent / "reference")
    for _ in range(2):  # the first run imports from disk
        ran = subprocess.run([*command, reference], capture_output=True, text=True, check=True)
        seconds = float(ran.stdout.split()[-1])
        left = files(reference)
        wanted = {each: content(reference / each) for each in left}
        fresh(reference)
    draw, outcomes = random.Random(1), collections.Counter[str]()
    directory = fresh(parent / "killed")
    for _ in range(kills):
        # A file that is complete would end the next run at once. Unfinished ones stay.
        for each in files(directory):
            if each != "base.ts" and not each.endswith(".partial"):
                (directory / each).unlink()
        if "append" in name:
            ts.save_file(base(), directory / "base.ts")
        process = subprocess.Popen([*command, directory], stdout=subprocess.PIPE, text=True)
        with process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(draw.uniform(0.0, 1.2 * seconds))
            process.send_signal(signal.SIGKILL)
        for each, expected in wanted.items():
            if not (directory / each).exists():
                outcomes["not there"] += 1
                continue
            try:
                found = content(directory / each)
            except ts.TensorStreamError:
                outcomes["refused"] += 1
                continue
            is_known = same(found, expected) or (each == "base.ts" and same(found, base()))
            outcomes["right" if is_known else "wrong"] += 1
    subprocess.run([*command, directory], capture_output=True, check=True)
    beside = files(directory) - left
    print(f"{name}: {kills} kills: {dict(outcomes)}; left beside: {sorted(beside) or 'nothing'}")
    return not outcomes["wrong"] and not beside


def main() -> int:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else KILLS
    with tempfile.TemporaryDirectory() as parent:
        results = [measure(*each, Path(parent), kills) for each in PROGRAMS.items()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
