# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures seconds per token of a 1.1B Llama in bf16 under several memory limits.

`cargo xtask bench offload [ROUNDS [LIMIT_MB]]`. Compares TensorStream with accelerate, diffusers,
mapped files and, where it fits, the model in memory. Each run is a process with a memory limit that
includes the page cache, and starts with an empty page cache. Each round runs all contenders in
turn; from the third round on, only the best setting of accelerate, and no contender that failed.
Figures are medians. The ratio to the best peer is the median of the ratios of all rounds.

For TensorStream, also prints:

- what it predicts after the run, and what it predicted before it loaded anything, from the speeds
  that earlier runs measured;
- how much of the measured time computing, waiting and overhead account for;
- the bound: the time in which the processors can decode and compute, or the disk can read,
  whichever is longer.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama
from models import MIB, SCRATCH, child, decode, drop_caches, fio, huge_pages, llama_1b, memory_cap

#: Memory limits in MB, which are 1,000,000 bytes each, with the `max_memory` settings of accelerate
#: that are tried there.
CAPS_MB = {800: (50, 150), 1500: (300, 450, 600, 750), 2500: (1300, 1600), 6000: (4500,)}
TOKENS = 12
#: The token from which on times count, for TensorStream, which may compress weights before.
STEADY = 4
#: The contenders that are TensorStream: with a compressed checkpoint, with a plain one, whose
#: weights may be compressed in memory, and with a plain one without this.
OURS = ("compressed", "plain", "plain, off")
ROUNDS = 9
#: The rounds in which all settings of accelerate run.
TRIALS = 2


def compressed(path: Path) -> Path:
    """Returns the directory of the same model as one compressed `.ts` file, which is made once."""
    import tensorstream as ts

    directory = SCRATCH / f"{path.name}-ts"
    directory.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(path / name, directory)
    file = directory / "model.ts"
    if not (directory / "compressed").exists():
        ts.convert(path, file, codec="auto")
        (directory / "compressed").touch()
    return directory


def contender(name: str, setting: str, path: Path) -> None:
    """Runs a contender in this process. Prints its figures as JSON.

    The contender "plan" only predicts, with a budget in bytes.
    """
    if name == "plan":
        import tensorstream as ts

        print(json.dumps({"before": ts.plan(path, budget=int(setting)).predicted_pass_s}))
        return
    if name not in OURS:
        llama.TOKENS = min(TOKENS, 5)
        llama.contender(name, setting, path)
        return
    import tensorstream as ts

    compression = "off" if name.endswith("off") else "auto"
    model = ts.from_pretrained(path, config=ts.Config(budget=setting, compression=compression))
    tokens, seconds = decode(model, TOKENS)
    explanation, stats = ts.explain(model), ts.stats(model)
    passes = stats["recent_passes"][STEADY - TOKENS :]
    accounted = sum(own["wall_s"] for own in passes) / sum(seconds[STEADY:])
    median = sorted(passes, key=lambda own: own["wall_s"])[len(passes) // 2]
    figures = {
        "tokens": tokens[:5],
        "seconds": statistics.median(seconds[STEADY:]),
        "first": seconds[:STEADY],
        "encode_s": stats["encode_s"],
        "predicted": explanation.predicted_s,
        "accounted": accounted,
        "bottleneck": stats["bottleneck"],
        "budget": stats["budget_bytes"],
        "reads": median["read_bytes"],
        "decoded": median["decoded_bytes"],
        "decode_rate": stats["decode_bytes_per_s"],
    }
    print(json.dumps(figures))


def in_memory(path: Path) -> float:
    """Returns the seconds of a token with everything in memory, which are the computation."""
    result = child([], "mmap", "", str(path))
    return float(result["seconds"])


def bound(result: dict[str, Any], compute_s: float, disk: float, cores: int) -> float:
    """Returns the seconds of a token that no plan with this residency can beat.

    Args:
        result: The figures of a run.
        compute_s: The seconds of a token in memory, where all processors compute.
        disk: The rate of the disk, in bytes per second.
        cores: The number of processors.
    """
    decode_s = result["decoded"] / result["decode_rate"] / cores
    return max(decode_s + compute_s, result["reads"] / disk)


#: The runs of each contender and setting.
Runs = dict[tuple[str, str], list[dict[str, Any]]]


def main(rounds: int = ROUNDS, only_mb: int | None = None) -> int:
    plain = llama_1b()
    paths = {"compressed": compressed(plain)}
    disk = []
    rows: list[tuple[int, Runs]] = []
    computing = in_memory(plain)
    with tempfile.TemporaryDirectory() as caches, huge_pages() as huge:
        os.environ["XDG_CACHE_HOME"] = caches
        for cap in CAPS_MB if only_mb is None else [only_mb]:
            accelerate = CAPS_MB[cap]
            entries = [*((name, "100%") for name in OURS), ("diffusers", "")]
            entries += [("accelerate", f"{mb}MB") for mb in accelerate] + [("mmap", "")]
            results: Runs = {entry: [] for entry in entries}
            with memory_cap(cap * 1_000_000) as prefix:
                for number in range(rounds):
                    disk.append(fio(plain / "model-00001-of-00003.safetensors", 2, huge=huge))
                    for entry in entries if number < TRIALS else worth_repeating(results):
                        path = paths.get(entry[0], plain)
                        results[entry].append(run(prefix, entry, path, results[entry]))
                        print(cap, *entry, results[entry][-1], flush=True)
            rows.append((cap, results))
    return report(rows, computing, statistics.median(disk))


def worth_repeating(results: Runs) -> list[tuple[str, str]]:
    """Returns the contenders that have not failed, with the best setting of accelerate only."""
    usable = [entry for entry, runs in results.items() if not any("error" in own for own in runs)]
    settings = [entry for entry in usable if entry[0] == "accelerate"]
    best = sorted(settings, key=lambda entry: min(own["seconds"] for own in results[entry]))[:1]
    return [entry for entry in usable if entry[0] != "accelerate" or entry in best]


def of_best_peer(name: str, results: Runs) -> float:
    """Returns the median over all rounds of the best peer's time relative to that of a run."""
    ratios = []
    for number, own in enumerate(results[name, "100%"]):
        peers = [
            runs[number]["seconds"]
            for (peer, _), runs in results.items()
            if peer not in OURS and number < len(runs) and "error" not in runs[number]
        ]
        if peers and "error" not in own:
            ratios.append(min(peers) / own["seconds"])
    return statistics.median(ratios) if ratios else float("nan")


def run(
    prefix: list[str], entry: tuple[str, str], path: Path, earlier: list[dict[str, Any]]
) -> dict[str, Any]:
    """Runs a contender in a new process, and predicts first if there was a run before.

    Args:
        prefix: The start of the command line, as from `memory_cap`.
        entry: The contender and its setting.
        path: The directory of the model.
        earlier: The runs before.

    Returns:
        The figures of the process, or a dictionary with "error".
    """
    ahead = {}
    budgets = [str(own["budget"]) for own in earlier if "budget" in own]
    if budgets:
        drop_caches()
        ahead = child([], "plan", budgets[-1], str(path))
    drop_caches()
    return {**ahead, **child(prefix, *entry, str(path))}


def report(rows: list[tuple[int, Runs]], computing: float, disk: float) -> int:
    """Prints tables of all runs. Returns 1 if contenders produced different tokens, else 0."""
    cores = len(os.sched_getaffinity(0))
    print(
        f"\n{cores} cores; disk {disk / 1e9:.2f} GB/s by fio; in memory {computing:.3f} s a token"
    )
    print(
        "\n| limit MB | contender | setting | s a token (range) | of accelerate's best | "
        "of the best peer |"
    )
    print("|---|---|---|---|---|---|")
    notes, tokens = [], set()
    for cap, results in rows:
        usable = {
            entry: [own for own in runs if "error" not in own] for entry, runs in results.items()
        }
        tokens |= {tuple(own["tokens"][:5]) for runs in usable.values() for own in runs}
        medians = {
            entry: statistics.median(own["seconds"] for own in runs)
            for entry, runs in usable.items()
            if runs
        }
        best = min((own for (name, _), own in medians.items() if name == "accelerate"), default=0)
        for (name, setting), runs in usable.items():
            if not runs:
                reason = results[name, setting][0]["error"]
                print(f"| {cap} | {name} | {setting} | failed: {reason} | | |")
                continue
            seconds = [own["seconds"] for own in runs]
            median = medians[name, setting]
            figure = f"{median:.3f} ({min(seconds):.3f}-{max(seconds):.3f})"
            peer = f"{of_best_peer(name, results):.2f}" if name in OURS else ""
            print(f"| {cap} | {name} | {setting} | {figure} | {best / median:.2f} | {peer} |")
            if name in OURS:
                notes.append(note(cap, name, runs, bound(runs[-1], computing, disk, cores)))
    print(
        "\n| limit MB | contender | budget MiB | predicted, then before loading, of the measured | "
        "accounted for | bound s | bound / measured | limited by | first tokens s | encoding s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    print("\n".join(notes))
    print(f"\nall contenders produced the same tokens: {len(tokens) == 1}")
    return int(len(tokens) > 1)


def note(cap: int, name: str, runs: list[dict[str, Any]], least: float) -> str:
    """Returns a line about how well TensorStream knows its own time."""
    later = [own for own in runs if "before" in own]
    seconds = statistics.median(own["seconds"] for own in runs)
    predicted = statistics.median(own["predicted"] / own["seconds"] for own in runs)
    before = statistics.median(own["before"] / own["seconds"] for own in later) if later else None
    accounted = min(own["accounted"] for own in runs)
    budget = statistics.median(own["budget"] for own in runs) / MIB
    limit = runs[-1]["bottleneck"]
    ahead = "-" if before is None else f"{before:.2f}"
    first = [
        statistics.median(token) for token in zip(*(own["first"] for own in runs), strict=True)
    ]
    encode_s = statistics.median(own["encode_s"] for own in runs)
    return (
        f"| {cap} | {name} | {budget:.0f} | {predicted:.2f}, {ahead} | {accounted:.1%} | "
        f"{least:.3f} | {least / seconds:.2f} | {limit} | "
        f"{' '.join(f'{token:.2f}' for token in first)} | {encode_s:.2f} |"
    )


if __name__ == "__main__":
    if len(sys.argv) == 4:
        contender(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main(*map(int, sys.argv[1:])))
