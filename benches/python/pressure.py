# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures how fast an adaptive budget gives memory back when another process needs it.

`cargo xtask bench pressure`. Requires root and a memory cgroup.

Two processes share one memory limit. The first decodes tokens of a 1.1B Llama with an adaptive
budget. In each of five rounds, the second allocates 500 MB in one second, holds them until the
first has made another 10 tokens, and ends. Without the memory that the first gives back, the kernel
would kill one of them.

The script fails unless all of these conditions hold in each round:

- the first process gives 500 MB back within two seconds of the first allocation
- all tokens are those of the first sequence
- nothing is swapped
- the first process takes nine tenths of the memory again
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from models import MIB, decode, drop_caches, llama_1b, memory_cap

ROUNDS = 5
NEEDED = 500_000_000
#: Seconds in which the second process allocates.
RAMP_S = 1.0
BUDGET = 1200 * MIB
#: The limit of both processes together. The first needs about 500 MB besides its budget.
CAP = 1_980_000_000
#: Tokens of one sequence.
TOKENS = 8
#: Seconds after which a process counts as stuck.
TIMEOUT_S = 60


def model() -> None:
    """Decodes until the standard input ends. Prints its state every 20 ms as JSON."""
    import tensorstream as ts
    import torch

    page = os.sysconf("SC_PAGE_SIZE")
    torch.set_num_threads(2)
    llama = ts.from_pretrained(
        llama_1b(), config=ts.Config(budget=BUDGET, memory_pressure_mode="adaptive")
    )
    state = {"tokens": 0, "equal": True, "seconds": 0.0}
    stop = threading.Event()

    def report() -> None:
        while not stop.wait(0.02):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            shared = int(Path("/proc/self/statm").read_text().split()[2])
            now = {"at": time.monotonic(), "bytes": (pages - shared) * page}
            print(json.dumps(state | now | {"limit": ts.stats(llama)["limit_bytes"]}), flush=True)

    expected, _ = decode(llama, TOKENS)
    threads = [threading.Thread(target=report), threading.Thread(target=sys.stdin.read)]
    for thread in threads:
        thread.start()
    while threads[1].is_alive():
        tokens, seconds = decode(llama, TOKENS)
        state["equal"] = state["equal"] and tokens == expected
        state["tokens"] += TOKENS
        state["seconds"] = statistics.median(seconds)
    stop.set()


def other() -> None:
    """Allocates in steps, prints when it began and when it had everything, and waits."""
    steps = 50
    print(json.dumps({"at": time.monotonic()}), flush=True)
    held = []
    for i in range(steps):
        held.append(bytearray(NEEDED // steps))
        memoryview(held[-1])[:: os.sysconf("SC_PAGE_SIZE")] = bytes(
            len(range(0, NEEDED // steps, os.sysconf("SC_PAGE_SIZE")))
        )
        time.sleep(RAMP_S / steps if i + 1 < steps else 0)
    print(json.dumps({"at": time.monotonic()}), flush=True)
    sys.stdin.read()


class Child:
    """A process whose lines are read in the background."""

    def __init__(self, prefix: list[str], role: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, sys.argv[0], role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[dict[str, Any]] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def wait(self, what: str, reached: Any) -> dict[str, Any]:
        """Waits for the first line from now on for which ``reached`` is true."""
        seen, end = len(self.lines), time.monotonic() + TIMEOUT_S
        while True:
            while seen < len(self.lines):
                if reached(self.lines[seen]):
                    return self.lines[seen]
                seen += 1
            if self.process.poll() is not None and seen == len(self.lines):
                sys.exit(f"the process ended with status {self.process.returncode}, before {what}")
            if time.monotonic() > end:
                last = self.lines[-1] if self.lines else None
                sys.exit(f"waited {TIMEOUT_S} s for {what}: {last}")
            time.sleep(0.005)

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()


def swapped() -> int:
    """Returns the number of pages that the system has swapped out."""
    fields = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(fields["pswpout"])


def main() -> int:
    llama_1b()
    drop_caches()
    before = swapped()
    held = True
    print(
        "| round | before | given back after | s/token before, under pressure | taken again after |"
    )
    print("|---|---|---|---|---|", flush=True)
    with memory_cap(CAP) as prefix:
        children = [first := Child(prefix, "model")]
        try:
            usual = first.wait("five sequences", lambda line: line["tokens"] >= 5 * TOKENS)
            for number in range(1, ROUNDS + 1):
                children.append(second := Child(prefix, "other"))
                began = second.wait("the first allocation", lambda line: True)
                less = first.wait(
                    "memory to be given back",
                    lambda line, usual=usual: line["bytes"] <= usual["bytes"] - NEEDED,
                )
                slow = first.wait(
                    "more tokens",
                    lambda line, less=less: line["tokens"] >= less["tokens"] + 2 * TOKENS,
                )
                second.end()
                freed = time.monotonic()
                again = first.wait(
                    "the memory to be taken again",
                    lambda line, usual=usual: line["bytes"] >= usual["bytes"] - NEEDED / 10,
                )
                took = less["at"] - began["at"]
                held &= took <= 2 and second.process.returncode == 0
                print(
                    f"| {number} | {usual['bytes'] / 1e6:.0f} MB | {took:.2f} s | "
                    f"{usual['seconds']:.2f}, {slow['seconds']:.2f} | "
                    f"{again['at'] - freed:.1f} s |",
                    flush=True,
                )
                usual = first.wait(
                    "more tokens",
                    lambda line, again=again: line["tokens"] >= again["tokens"] + 2 * TOKENS,
                )
        finally:
            for child in children:
                child.end()
    equal = first.lines[-1]["equal"]
    pages = swapped() - before
    held &= equal and pages == 0
    print(f"\nall tokens are equal: {equal}; pages swapped: {pages}; all conditions hold: {held}")
    return int(not held)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["model"]:
            model()
        case ["other"]:
            other()
        case _:
            sys.exit(main())
