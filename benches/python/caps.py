# SPDX-License-Identifier: MIT OR Apache-2.0
"""A 1.1B Llama in bf16 under memory limits and budgets: seconds per token, or the words of a refusal.

`cargo xtask bench caps`. Limits of the process's own group and of a parent's, with an empty and a full page cache.
A process of its own for each pair; the checkpoint is read past the page cache or through it, as the engine decides.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from models import MIB, decode, drop_caches, llama_1b

CAPS_MB = (500, 800, 1100, 1500)
BUDGETS: tuple[str, ...] = ("100MiB", "200MiB", "300MiB", "500MiB", "1000MiB", "1500MiB", "none")
FEWER: tuple[str, ...] = ("200MiB", "1500MiB", "none")
TOKENS = 4
GROUPS = Path("/sys/fs/cgroup/memory")
#: A process that has said nothing for so long is stuck.
PATIENCE_S = 90


def contender(path: str, budget: str, fill: str) -> None:
    import warnings

    import tensorstream as ts
    import torch  # noqa: F401  # takes seconds, which are not ours

    if fill == "full":
        for file in Path(path).glob("*.safetensors"):
            with file.open("rb") as opened:
                while opened.read(16 * MIB):
                    pass
    said: dict[str, Any] = {}
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = ts.from_pretrained(path, budget=None if budget == "none" else budget)
        except ts.BudgetError as error:
            print(json.dumps({"refused": str(error), "after": time.perf_counter() - began}))
            return
        said["warned"] = [str(each.message) for each in caught if each.category is ts.BudgetWarning]
    _, seconds = decode(model, TOKENS)
    stats = ts.stats(model)
    print(json.dumps({**said, "seconds": statistics.median(seconds[1:]), "budget": stats["budget_bytes"]}))


def run(cap_mb: int, budget: str, parent: bool, fill: str) -> dict[str, Any]:
    """One pair, in a group of its own, or in a child of the group that has the limit."""
    group = GROUPS / f"tensorstream-{os.getpid()}"
    inner = group / "child" if parent else group
    inner.mkdir(parents=True)
    try:
        (group / "memory.limit_in_bytes").write_text(str(cap_mb * 1_000_000))
        start = ["sh", "-c", f'echo $$ > {inner}/cgroup.procs && exec "$@"', "capped"]
        command = [*start, sys.executable, sys.argv[0], "run", str(llama_1b()), budget, fill]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        except subprocess.TimeoutExpired:
            return {"stuck": PATIENCE_S}
        if done.returncode != 0:
            return {"killed": done.returncode, "said": done.stderr.strip()[-200:]}
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return result
    finally:
        time.sleep(0.2)
        for each in dict.fromkeys((inner, group)):
            with suppress(OSError):
                each.rmdir()


def described(result: dict[str, Any]) -> str:
    if "refused" in result:
        return f"refused after {result['after']:.1f} s: {result['refused']}"
    if "seconds" in result:
        less = ", warned" if result["warned"] else ""
        return f"{result['seconds']:.2f} s/token with {result['budget'] / MIB:.0f} MiB{less}"
    return f"FAILED: {result}"


def main() -> int:
    if not (GROUPS / "memory.limit_in_bytes").exists():
        print("needs a memory controller of version 1, and to be root")
        return 1
    llama_1b()
    drop_caches()
    failed = 0
    for parent, fill, budgets in ((False, "empty", BUDGETS), (True, "empty", FEWER), (False, "full", FEWER)):
        for cap in CAPS_MB:
            for budget in budgets:
                result = run(cap, budget, parent, fill)
                failed += not {"refused", "seconds"} & result.keys()
                whose = "a parent's" if parent else "its own"
                print(
                    f"{whose} limit of {cap} MB, {fill} page cache, budget {budget}: {described(result)}", flush=True
                )
    print(f"{failed} of them were killed or stuck")
    return int(failed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        contender(*sys.argv[2:5])
    else:
        sys.exit(main())
