# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures how long one machine and four machines take to fetch a checkpoint.

`cargo xtask bench broadcast`. Each machine is a network namespace whose link has 400 Mbit/s in each
direction. Requires root for the namespaces, and `tc` with the scheduler tbf.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "crates/ts-py/tests"))

ROUNDS, RATE, BYTES = 5, "400mbit", 256 << 20


def main() -> int:
    from links import skip_reason
    from test_faults import broadcast_seconds

    if reason := skip_reason():
        print(f"cannot run broadcast: {reason}")
        return 1
    seconds: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        source, to = Path(directory) / "source", Path(directory) / "to"
        source.mkdir()
        (source / "model.safetensors").write_bytes(os.urandom(1 << 20) * (BYTES >> 20))
        for _ in range(ROUNDS):
            for receivers in (1, 4):
                seconds.setdefault(receivers, []).append(
                    broadcast_seconds(source, to, receivers, RATE)
                )
                shutil.rmtree(to)
    medians = {receivers: statistics.median(times) for receivers, times in seconds.items()}
    for receivers, times in seconds.items():
        spread = f"{min(times):.2f} to {max(times):.2f}"
        print(
            f"{receivers} receiver(s) of {BYTES >> 20} MiB at {RATE}: {medians[receivers]:.2f} s "
            f"({spread})"
        )
    print(f"four receivers take {medians[4] / medians[1]:.2f} times as long as one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
