# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams small models of every architecture, and compares them with the models in memory.

usage: every_model.py [NAME...]

`cargo xtask models` runs all model types of transformers, all classes of diffusers, and all methods
of PEFT, and writes the list of results to benches/results/models.md. With names, runs only these,
and writes no list.

A case is one of these:

- exact: the results, parameters and restored weights are those of the model in memory, and units
  were read several times
- resident: the same, but the smallest budget holds all units
- excluded: no small configuration with inputs was found, with the reason
- failed: anything else

Workers run the cases, because a model can use much memory or end its process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models import ROOT

sys.path.insert(0, str(ROOT / "crates" / "ts-py" / "tests"))

#: How many cases a worker runs, and how long each may take, in seconds.
CASES = 25
TIMEOUT_S = 120
PAGE = ROOT / "benches" / "results" / "models.md"
TITLES = {
    "transformers": "Model types of transformers",
    "diffusers": "Classes of diffusers",
    "peft": "Methods of PEFT",
}
Case = tuple[str, str]


def cases() -> list[Case]:
    """Returns the library and the name of each case."""
    from adapters import EXCLUDED
    from adapters import cases as methods
    from small_diffusers import class_names
    from small_models import model_types

    found = [("transformers", name) for name in model_types()]
    found += [("diffusers", name) for name in class_names()]
    return found + [("peft", name) for name in (*methods(), *EXCLUDED)]


def run(case: Case) -> dict[str, str]:
    """Runs a case in this process. Returns its result, and a reason unless it is exact."""
    from small_models import Excluded

    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
        try:
            return {"result": _run(case, Path(scratch) / "model"), "why": ""}
        except Excluded as reason:
            return {"result": "excluded", "why": str(reason)}
        except Exception as error:
            where = traceback.format_exc().strip().splitlines()[-3:]
            why = f"{type(error).__name__}: {error} ({' '.join(line.strip() for line in where)})"
            return {"result": "failed", "why": why}


def _run(case: Case, path: Path) -> str:
    from adapters import EXCLUDED, check_adapter
    from exactness import check_exact
    from small_diffusers import small_diffusers
    from small_models import Excluded, small_model

    library, name = case
    if library == "peft":
        if name in EXCLUDED:
            raise Excluded(EXCLUDED[name])
        check_adapter(name, path)
        return "exact"
    small = small_model(name) if library == "transformers" else small_diffusers(name)
    try:
        small.model.save_pretrained(path)
    except Exception as error:
        raise Excluded(f"it cannot be saved: {error}") from error
    streamed = check_exact(path, type(small.model), lambda model: model(**small.inputs))
    return "exact" if streamed else "resident"


def worker(wanted: list[Case]) -> None:
    """Prints a line of JSON for each case."""
    warnings.simplefilter("ignore")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for case in wanted:
        print(json.dumps(run(case)), flush=True)


def outcomes(wanted: list[Case]) -> Iterator[tuple[Case, dict[str, str]]]:
    """Runs cases in workers. Yields each case with its outcome."""
    while wanted:
        batch, done = wanted[:CASES], 0
        command = [sys.executable, __file__, "--worker", json.dumps(batch)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            timer = threading.Timer(TIMEOUT_S, process.kill)
            timer.start()
            for line in process.stdout or ():
                timer.cancel()
                yield batch[done], json.loads(line)
                done += 1
                timer = threading.Timer(TIMEOUT_S, process.kill)
                timer.start()
            timer.cancel()
        why = f"its process ended with status {process.returncode}, after {TIMEOUT_S} s if killed"
        if done < len(batch):
            yield batch[done], {"result": "failed", "why": why}
            done += 1
        wanted = wanted[done:]


def page(found: dict[Case, dict[str, str]], versions: str) -> str:
    """Returns the page with the results."""
    lines = [
        "# Models that are tested",
        "",
        "`cargo xtask models` writes this page. It builds a small model with random weights for",
        "each name, streams it with a budget of three times its largest unit, and compares",
        "results, parameter lists and restored weights with those of the model in memory, bit by",
        "bit. Adapters train for three steps.",
        "",
        f"Versions: {versions}.",
    ]
    for library, title in TITLES.items():
        own = {name: each for (of, name), each in found.items() if of == library}
        lines += ["", f"## {title}", ""]
        for result in ("exact", "resident", "failed"):
            names = [f"`{name}`" for name, each in own.items() if each["result"] == result]
            if names:
                heading = {
                    "exact": f"{len(names)} are exact:",
                    "resident": f"{len(names)} are exact, but always resident:",
                    "failed": f"{len(names)} failed:",
                }[result]
                lines += [heading, "", *textwrap.wrap(", ".join(names), 100), ""]
        excluded = {name: each for name, each in own.items() if each["result"] == "excluded"}
        if excluded:
            lines += [
                f"{len(excluded)} are excluded: no small configuration with inputs is known.",
                "",
                "| Name | Last attempt |",
                "|---|---|",
            ]
            lines += [f"| `{name}` | {reason(each['why'])} |" for name, each in excluded.items()]
    return "\n".join(lines).rstrip() + "\n"


def reason(why: str) -> str:
    """Returns the last of several reasons, for a table."""
    last = " ".join(why.rpartition("; ")[2].split())
    return last.replace("|", "\\|").replace("<", "&lt;")[:160]


def main(names: list[str]) -> int:
    wanted = [case for case in cases() if not names or case[1] in names]
    found: dict[Case, dict[str, str]] = {}
    for case, outcome in outcomes(wanted):
        found[case] = outcome
        print(
            f"{len(found)}/{len(wanted)} {case[0]} {case[1]}: {outcome['result']}",
            flush=True,
        )
        if outcome["result"] == "failed":
            print(f"    {outcome['why']}", flush=True)
    counts: dict[str, dict[str, int]] = {}
    for (library, _), outcome in found.items():
        own = counts.setdefault(library, {})
        own[outcome["result"]] = own.get(outcome["result"], 0) + 1
    for library, own in counts.items():
        print(f"{library}: " + ", ".join(f"{n} {result}" for result, n in sorted(own.items())))
    if not names:
        PAGE.write_text(page(found, versions()))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return int(any(outcome["result"] == "failed" for outcome in found.values()))


def versions() -> str:
    from importlib.metadata import version

    names: Any = ("torch", *TITLES)
    return ", ".join(f"{name} {version(name)}" for name in names)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker([(library, name) for library, name in json.loads(sys.argv[2])])
    else:
        sys.exit(main(sys.argv[1:]))
