# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures seconds per token of a 1.1B Llama in bf16 under memory limits and budgets.

`cargo xtask bench caps`. Requires root and the memory controller of cgroup version 1.

- The limit applies to the process's own memory cgroup or to the parent cgroup.
- The script empties the page cache once at the start. For a full page cache, each run first reads
  the whole model into it. The engine decides whether to read through the page cache.
- Each run is a process. Under each limit, three rounds run all budgets in turn. The figure of a
  budget is the median.
- If TensorStream rejects a budget, the script prints the reason instead.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from models import MIB, decode, drop_caches, llama_1b

#: Memory limits in MB, which are 1,000,000 bytes each.
CAPS_MB = (500, 800, 900, 1100, 1500)
BUDGETS: tuple[str, ...] = ("100MiB", "200MiB", "300MiB", "500MiB", "1000MiB", "1500MiB", "none")
ROUNDS = 3
TOKENS = 4
GROUPS = Path("/sys/fs/cgroup/memory")
#: Seconds after which a run counts as stuck.
TIMEOUT_S = 90


def contender(path: str, budget: str, fill: str) -> None:
    """Runs the model in this process. Prints its figures, or why the budget was rejected, as JSON.

    Args:
        path: The directory of the model.
        budget: The budget, or "none".
        fill: "full" to read the whole model into the page cache first.
    """
    import warnings

    import tensorstream as ts
    import torch  # noqa: F401  # The import takes seconds, which must not be timed.

    if fill == "full":
        for file in Path(path).glob("*.safetensors"):
            with file.open("rb") as opened:
                while opened.read(16 * MIB):
                    pass
    figures: dict[str, Any] = {}
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = ts.from_pretrained(path, budget=None if budget == "none" else budget)
        except ts.BudgetError as error:
            print(json.dumps({"refused": str(error), "after": time.perf_counter() - began}))
            return
        figures["warned"] = [
            str(each.message) for each in caught if each.category is ts.BudgetWarning
        ]
    _, seconds = decode(model, TOKENS)
    stats = ts.stats(model)
    print(
        json.dumps(
            {**figures, "seconds": statistics.median(seconds[1:]), "budget": stats["budget_bytes"]}
        )
    )


def run(cap_mb: int, budget: str, parent: bool, fill: str) -> dict[str, Any]:
    """Runs the model in a new process, in a memory cgroup with a limit.

    Args:
        cap_mb: The limit in MB.
        budget: The budget, or "none".
        parent: Whether the process runs in a child of the group with the limit.
        fill: "full" to read the whole model into the page cache first, else "empty".

    Returns:
        The figures of the process, or a dictionary that describes its failure.
    """
    group = GROUPS / f"tensorstream-{os.getpid()}"
    inner = group / "child" if parent else group
    inner.mkdir(parents=True)
    try:
        (group / "memory.limit_in_bytes").write_text(str(cap_mb * 1_000_000))
        start = ["sh", "-c", f'echo $$ > {inner}/cgroup.procs && exec "$@"', "capped"]
        command = [*start, sys.executable, sys.argv[0], "run", str(llama_1b()), budget, fill]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {"stuck": TIMEOUT_S}
        if done.returncode != 0:
            return {"killed": done.returncode, "said": done.stderr.strip()[-200:]}
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return result
    finally:
        time.sleep(0.2)
        for each in dict.fromkeys((inner, group)):
            with suppress(OSError):
                each.rmdir()


def described(results: list[dict[str, Any]]) -> str:
    """Formats the results of all runs with the same limit and budget."""
    for result in results:
        if not {"refused", "seconds"} & result.keys():
            return f"FAILED: {result}"
    refused = [result for result in results if "refused" in result]
    if refused:
        after = max(result["after"] for result in refused)
        reason = refused[0]["refused"]
        return f"{len(refused)} of {len(results)} rejected within {after:.1f} s: {reason}"
    seconds = [result["seconds"] for result in results]
    budget = statistics.median(result["budget"] for result in results) / MIB
    less = ", warned" if results[0]["warned"] else ""
    figure = f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f}) s/token"
    return f"{figure} with {budget:.0f} MiB{less}"


def slowest_step(rounds: list[dict[str, dict[str, Any]]]) -> str:
    """Describes the budget with the largest slowdown relative to the next smaller budget.

    A slowdown is the median of the ratios of all rounds. Each ratio is taken within a round.
    """
    steps = []
    given = [budget for budget in rounds[0] if budget != "none"]
    for smaller, larger in pairwise(given):
        ratios = [
            each[larger]["seconds"] / each[smaller]["seconds"]
            for each in rounds
            if "seconds" in each[smaller] and "seconds" in each[larger]
        ]
        if ratios:
            steps.append(
                (
                    statistics.median(ratios),
                    f"{larger} took {statistics.median(ratios):.2f} times as long as {smaller}",
                )
            )
    return max(steps)[1] if steps else "fewer than two budgets ran"


def main() -> int:
    if not (GROUPS / "memory.limit_in_bytes").exists():
        print("cannot run caps: it requires root and the memory controller of cgroup version 1")
        return 1
    llama_1b()
    drop_caches()
    failed = 0
    for parent, fill in ((False, "empty"), (True, "empty"), (False, "full")):
        for cap in CAPS_MB:
            rounds = [
                {budget: run(cap, budget, parent, fill) for budget in BUDGETS}
                for _ in range(ROUNDS)
            ]
            whose = "parent" if parent else "own"
            for budget in BUDGETS:
                results = [each[budget] for each in rounds]
                failed += sum(not {"refused", "seconds"} & result.keys() for result in results)
                print(
                    f"{whose} group's limit of {cap} MB, {fill} page cache, budget {budget}: "
                    f"{described(results)}"
                )
            print(f"  largest slowdown: {slowest_step(rounds)}", flush=True)
    print(f"{failed} runs failed or timed out")
    return int(failed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        contender(*sys.argv[2:5])
    else:
        sys.exit(main())
