# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares the I/O backends with the limits of this machine, in nine interleaved rounds.

`cargo xtask bench io`. Requires fio. The comparison of objects requires nginx and curl (apt-get
install nginx-light curl), and is skipped without them.

- Cold files: compares the backends with the fastest of several fio runs. The runs use libaio or
  io_uring, and ordinary memory, registered memory or huge pages. Each has 16 requests of 4 MiB in
  flight.
- The automatic choice: compares it with each backend, and on warm files with memcpy.
- Objects: compares the object backend with as many curls as the backend has requests in flight.
  Both read from an nginx on the loopback interface.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models import ROOT, fio, huge_pages, llama_1b, spread

ROUNDS = 9
#: The number of requests that fio keeps in flight.
FIO_DEPTH = 16
CURLS = 8
#: The settings of the backends, which are the defaults that apply without the tuner.
DEFAULTS = ["--request-bytes", "4MiB", "--in-flight", "8"]
PROGRAM = ROOT / "target/release/tensorstream"
#: The ways to run fio, as keyword arguments of `models.fio`.
FIO = {
    "libaio": {"engine": "libaio"},
    "io_uring": {"engine": "io_uring"},
    "io_uring, registered": {"engine": "io_uring", "fixed": True},
    "libaio, huge pages": {"engine": "libaio", "huge": True},
    "io_uring, registered, huge pages": {"engine": "io_uring", "fixed": True, "huge": True},
}

Rows = dict[tuple[str, str], dict[str, Any]]


def main() -> int:
    build = [
        "cargo",
        "build",
        "--release",
        "--quiet",
        "--package",
        "tensorstream",
        "--features",
        "object",
    ]
    subprocess.run(build, check=True, cwd=ROOT)
    shard = llama_1b() / "model-00001-of-00003.safetensors"
    cold(shard)
    states(shard)
    objects(shard)
    return 0


def measure(source: str | Path, *options: str) -> Rows:
    """Runs one round of `tensorstream bench io`, and returns its rows by state and backend."""
    command = [PROGRAM, "bench", "io", source, "--rounds", "1", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {(row["state"], row["backend"]): row for row in json.loads(done.stdout)["rows"]}


def cold(shard: Path) -> None:
    """Compares the backends with fio on a cold file.

    The backends read the file in order, and in units of 88 MB in random order.
    """
    disks: dict[str, list[float]] = defaultdict(list)
    ours: dict[str, list[dict[str, Any]]] = defaultdict(list)
    # Two passes take about as long as fio, which reads for a second.
    common = ["--states", "cold", "--passes", "2", *DEFAULTS, "--backends"]
    with huge_pages() as huge:
        for _ in range(ROUNDS):
            for name, way in FIO.items():
                if huge or not way.get("huge"):
                    disks[name].append(fio(shard, 1, **way) / 2**30)
            for backend in ("direct", "uring", "adaptive"):
                ours[backend].append(measure(shard, *common, backend)["cold", backend])
            for backend in ("direct", "uring"):
                row = measure(shard, *common, backend, "--random-units", "88MB")["cold", backend]
                ours[f"{backend}, 88 MB units in random order"].append(row)
    winner = max(disks, key=lambda name: statistics.median(disks[name]))
    best = disks[winner]
    print(
        f"### Cold\n\n| | GiB/s, median (range) | fluctuation | of {winner}, median of pairs "
        "(range) |",
        end="",
    )
    print(" CPU s/GiB | in flight |\n|---|---|---|---|---|---|")
    for name, rates in disks.items():
        print(f"| fio: {name} | {spread(rates)} | {fluctuation(rates)} | | | {FIO_DEPTH} |")
    for name, rows in ours.items():
        rates = [row["gib_per_s"] for row in rows]
        ratios = [rate / limit for rate, limit in zip(rates, best, strict=True)]
        cpu = statistics.median(row["cpu_s_per_gib"] for row in rows)
        depth = statistics.median(row["mean_in_flight"] for row in rows)
        print(
            f"| {name} | {spread(rates)} | {fluctuation(rates)} | {spread(ratios)} | {cpu:.3f} | "
            f"{depth:.1f} |"
        )


def states(shard: Path) -> None:
    """Compares the automatic choice with each backend, and with memcpy if the file is warm."""
    cases = {
        "cold": ["--states", "cold"],
        "half warm, alternating 32 MiB": ["--states", "half"],
        "half warm, alternating 1 MiB": ["--states", "half", "--stretch", "1MiB"],
        # Four warm passes take about as long as one cold pass.
        "warm": ["--states", "warm", "--passes", "4"],
    }
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    backends = ["adaptive", "uring", "direct", "buffered", "mmap"]
    for number in range(ROUNDS):
        for case, options in cases.items():
            # Each backend runs in its own process, and the backends take turns to run first.
            # Earlier processes affect which memory the page cache gets. Some virtual machines copy
            # a part of their memory at a third of the speed of the rest.
            names = [*backends, "memcpy", "views"] if case == "warm" else backends
            first = number % len(names)
            for name in names[first:] + names[:first]:
                rows = measure(shard, *options, *DEFAULTS, "--backends", name)
                seen[case, name].append(next(iter(rows.values()))["gib_per_s"])
    print(
        "\n### The automatic choice\n\n| file | backend | GiB/s, median (range) |"
        " adaptive / backend, median of pairs (range) |"
    )
    print("|---|---|---|---|")
    for (case, backend), rates in seen.items():
        ratios = [mine / rate for mine, rate in zip(seen[case, "adaptive"], rates, strict=True)]
        print(f"| {case} | {backend} | {spread(rates)} | {spread(ratios)} |")


def objects(shard: Path) -> None:
    """Compares the object backend with curl. Both send the same number of requests at a time."""
    if shutil.which("nginx") is None or shutil.which("curl") is None:
        print("\ncannot measure objects without nginx and curl: apt-get install nginx-light curl")
        return
    curls, ours = [], []
    with nginx(shard.parent) as url:
        # Reads the file once, so that it is in the page cache of the server.
        measure(f"{url}/{shard.name}", "--backends", "object")
        for _ in range(ROUNDS):
            curls.append(curl(f"{url}/{shard.name}", shard.stat().st_size))
            ours.append(
                measure(f"{url}/{shard.name}", "--backends", "object", *DEFAULTS)[
                    "remote", "object"
                ]["gib_per_s"]
            )
    ratios = [mine / theirs for mine, theirs in zip(ours, curls, strict=True)]
    print(
        "\n### Objects\n\n| | GiB/s, median (range) | fluctuation |"
        " of curl, median of pairs (range) |\n|---|---|---|---|"
    )
    print(f"| {CURLS} curls, one range each | {spread(curls)} | {fluctuation(curls)} | |")
    print(
        f"| object, {CURLS} in flight | {spread(ours)} | {fluctuation(ours)} | {spread(ratios)} |"
    )


def curl(url: str, size: int) -> float:
    """Runs several curls that read and discard one range each. Returns the total rate in GiB/s."""
    part = size // CURLS
    began = time.perf_counter()
    ranges = [f"{i * part}-{(i + 1) * part - 1}" for i in range(CURLS)]
    running = [
        subprocess.Popen(["curl", "-sf", "-r", each, "-o", os.devnull, url]) for each in ranges
    ]
    failed = [process.wait() for process in running]
    assert not any(failed), failed
    return part * CURLS / 2**30 / (time.perf_counter() - began)


@contextlib.contextmanager
def nginx(directory: Path) -> Iterator[str]:
    """Serves a directory with nginx and two workers on the loopback interface. Yields the URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # If root starts nginx, its workers run as another user, who may not be able to read the files.
    user = "user root;" if os.geteuid() == 0 else ""
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "nginx.conf"
        config.write_text(
            f"{user} worker_processes 2; daemon off; pid {scratch}/pid; error_log "
            f"{scratch}/error.log;\n"
            "events { worker_connections 256; }\n"
            f"http {{ access_log off; sendfile on; tcp_nopush on; keepalive_requests 100000;\n"
            f"server {{ listen 127.0.0.1:{port}; root {directory}; }} }}\n"
        )
        server = subprocess.Popen(
            ["nginx", "-p", scratch, "-c", str(config)], stderr=subprocess.DEVNULL
        )
        try:
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


def fluctuation(rates: list[float]) -> str:
    """Returns the standard deviation divided by the mean, in percent."""
    return f"{statistics.stdev(rates) / statistics.mean(rates):.0%}"


if __name__ == "__main__":
    sys.exit(main())
