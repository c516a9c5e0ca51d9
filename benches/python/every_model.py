# SPDX-License-Identifier: MIT OR Apache-2.0
"""Streams small models of many architectures, and compares them with the models in memory.

usage: every_model.py [NAME...]

`cargo xtask models` runs all model types of transformers, all classes of diffusers, and all methods
of PEFT, and writes the list of results to benches/results/models.md. With names, runs only these
again, and updates the list.

A case is one of these:

- exact: the results, parameters and restored weights are those of the model in memory, and units
  were read several times
- resident: the same, but the smallest budget holds all units
- refused: it cannot be streamed, and an error says why
- excluded: no small configuration with inputs was found, with the reason
- failed: anything else

Workers run the cases, because a model can use much memory or end its process.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import textwrap
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from models import ROOT, SCRATCH

sys.path.insert(0, str(ROOT / "crates" / "ts-py" / "tests"))

#: How many cases a worker runs, and how long each may take, in seconds.
CASES = 25
TIMEOUT_S = 300
#: The outcomes so far, from which the page is made.
OUTCOMES = SCRATCH / "models.json"
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
    import tensorstream as ts
    from small_models import Excluded

    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
        try:
            return {"result": _run(case, Path(scratch) / "model"), "why": ""}
        except Excluded as reason:
            return {"result": "excluded", "why": str(reason)}
        except ts.ModelError as reason:
            return {"result": "refused", "why": str(reason)}
        except Exception as error:
            where = traceback.format_exc().strip().splitlines()[-3:]
            why = f"{type(error).__name__}: {error} ({' '.join(line.strip() for line in where)})"
            return {"result": "failed", "why": why}


def _run(case: Case, path: Path) -> str:
    import torch
    from adapters import EXCLUDED, check_adapter
    from exactness import check_exact, tensors
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
    if library == "transformers":
        kind: Any = type(small.model)
        _, info = kind.from_pretrained(path, output_loading_info=True)
        if info["missing_keys"]:
            raise Excluded("transformers does not find the weights that it saved itself")
    with torch.no_grad():
        if not tensors(small.model(**small.inputs)):
            raise Excluded("its forward returns no tensors")
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
    # Models can print. Only results go to the parent.
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        for case in wanted:
            print(json.dumps(run(case)), file=results, flush=True)


def outcomes(wanted: list[Case]) -> Iterator[tuple[Case, dict[str, str]]]:
    """Runs cases in as many workers as there are processors. Yields each with its outcome."""
    batches = [wanted[first : first + CASES] for first in range(0, len(wanted), CASES)]
    done: queue.Queue[tuple[Case, dict[str, str]]] = queue.Queue()
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        running = [workers.submit(_run_batch, batch, done) for batch in batches]
        for _ in wanted:
            yield done.get()
        for each in running:
            each.result()


def _run_batch(wanted: list[Case], done: queue.Queue[tuple[Case, dict[str, str]]]) -> None:
    """Runs cases in a worker, and the rest in another worker if it ends early."""
    while wanted:
        command = [sys.executable, __file__, "--worker", json.dumps(wanted)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            timer = threading.Timer(TIMEOUT_S, process.kill)
            timer.start()
            for line in process.stdout or ():
                timer.cancel()
                done.put((wanted[0], json.loads(line)))
                wanted = wanted[1:]
                timer = threading.Timer(TIMEOUT_S, process.kill)
                timer.start()
            timer.cancel()
        if wanted:
            why = f"its process ended with status {process.returncode}; {TIMEOUT_S} s are allowed"
            done.put((wanted[0], {"result": "failed", "why": why}))
            wanted = wanted[1:]


def page(found: dict[Case, dict[str, str]], versions: str) -> str:
    """Returns the page with the results."""
    lines = [
        "# Models that are tested",
        "",
        "`cargo xtask models` writes this page. For each name, it streams a small random model",
        "with a budget of three times its largest unit. Results, parameter lists and restored",
        "weights are those of the model in memory, bit by bit. Adapters train for three steps.",
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
        for result, heading in (
            ("refused", "are refused"),
            ("excluded", "are excluded: no small configuration with inputs is known"),
        ):
            why = {name: each["why"] for name, each in own.items() if each["result"] == result}
            if why:
                lines += ["", f"{len(why)} {heading}:", "", "| Name | Reason |", "|---|---|"]
                lines += [f"| `{name}` | {reason(text)} |" for name, text in why.items()]
    return "\n".join(lines).rstrip() + "\n"


def reason(why: str) -> str:
    """Returns the first of several reasons, for a table."""
    first = " ".join(why.partition("; ")[0].split()) or "no inputs are known for its forward"
    return first.replace("|", "\\|").replace("<", "&lt;")[:160]


def main(names: list[str]) -> int:
    wanted = [case for case in cases() if not names or case[1] in names]
    known = json.loads(OUTCOMES.read_text()) if names and OUTCOMES.exists() else []
    found: dict[Case, dict[str, str]] = {(library, name): each for library, name, each in known}
    for number, (case, outcome) in enumerate(outcomes(wanted), 1):
        found[case] = outcome
        print(f"{number}/{len(wanted)} {case[0]} {case[1]}: {outcome['result']}", flush=True)
        if outcome["result"] in ("failed", "refused"):
            print(f"    {outcome['why']}", flush=True)
    SCRATCH.mkdir(parents=True, exist_ok=True)
    OUTCOMES.write_text(json.dumps([(*case, each) for case, each in sorted(found.items())]))
    PAGE.write_text(page(dict(sorted(found.items())), versions()))
    print(f"wrote {PAGE.relative_to(ROOT)}")
    for library in TITLES:
        own = Counter(each["result"] for (of, _), each in found.items() if of == library)
        print(f"{library}: " + ", ".join(f"{n} {result}" for result, n in sorted(own.items())))
    return int(any(found[case]["result"] == "failed" for case in wanted))


def versions() -> str:
    from importlib.metadata import version

    names: Any = ("torch", *TITLES)
    return ", ".join(f"{name} {version(name)}" for name in names)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker([(library, name) for library, name in json.loads(sys.argv[2])])
    else:
        sys.exit(main(sys.argv[1:]))
