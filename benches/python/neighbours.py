# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures what a client of `tensorstream serve` notices of another one that floods the server.

`cargo xtask bench neighbours`. Needs root, for network namespaces: the server and both clients have
one each. The hostile client has the token. It opens as many sessions as it gets. In each of them it
runs large operators without end, allocates memory, or sends huge messages or uploads. Its own work
has the lowest priority, because it would be on another computer. The other client repeats a step of
small operators, and one of larger ones, and waits for each. The table has its latencies alone and
with the hostile client, and the memory of the server's processes.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from attack import MIB, SECRET, Session, children, message

sys.path.append(str(Path(__file__).parents[2] / "crates/ts-py/tests"))
from links import Namespace, shaped_star, skip_reason

SECONDS = 12.0
MEMORY = 512 * MIB
SESSIONS = 24
DRAIN = 5
#: What the hostile sessions do.
KINDS = os.environ.get("BENCH_KINDS", "operators,allocations,messages,uploads").split(",")
#: The length of a huge message, in bytes. The protocol splits larger ones.
HUGE = 1 << 20


def hostile(address: str) -> None:
    """Runs in a separate process: floods the server until it is killed."""
    os.nice(19)
    host, port = address.rsplit(":", 1)
    for index in range(2 * SESSIONS):
        threading.Thread(target=flood, args=((host, int(port)), index), daemon=True).start()
    print("flooding", flush=True)
    time.sleep(3600)


def flood(address: tuple[str, int], index: int) -> None:
    from tensorstream.remote import RemoteMachine

    kind = KINDS[index % len(KINDS)]
    while True:
        try:
            if kind == "messages":
                with Session(address, random.Random(index)) as session:
                    while True:
                        session.send(message(b"\0" + b"\xff" * HUGE))
            with RemoteMachine(
                "tcp", f"{address[0]}:{address[1]}", token=SECRET.decode()
            ) as machine:
                x = torch.randn(1500, 1500, device=machine.device())
                kept: list[Any] = []
                while True:
                    if kind == "operators":
                        for _ in range(8):
                            x = (x @ x).tanh()
                        x[0, 0].item()
                    elif kind == "allocations":
                        kept.append(torch.ones(8 << 20, device=machine.device()))
                        kept[-1][0].item()
                    else:
                        torch.zeros(16 << 20, dtype=torch.uint8).to(machine.device())
        except Exception:
            time.sleep(0.05)


class Victim:
    """The other client."""

    def __init__(self, address: str) -> None:
        from tensorstream.remote import RemoteMachine

        self.machine = RemoteMachine("tcp", address, token=SECRET.decode())
        device = self.machine.device()
        self.small = torch.ones(8, device=device)
        self.large = torch.eye(700, device=device)

    def small_step(self) -> None:
        x = self.small
        for _ in range(20):
            x = x * 1.0
        assert x.sum().item() == 8.0

    def large_step(self) -> None:
        x = self.large
        for _ in range(10):
            x = x @ self.large
        assert x[3, 3].item() == 1.0

    def measure(self) -> dict[str, list[float]]:
        seen: dict[str, list[float]] = {"small": [], "large": []}
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            for name, step in (("small", self.small_step), ("large", self.large_step)):
                begin = time.perf_counter()
                step()
                seen[name].append(time.perf_counter() - begin)
        return seen


def run_victim(address: str) -> None:
    """Runs in a separate process: measures once for each line of its input."""
    os.nice(-20)
    victim = Victim(address)
    victim.measure()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(victim.measure()), flush=True)


def start(space: Namespace, *arguments: str) -> subprocess.Popen[str]:
    """Starts this program in a namespace."""
    return space.start(
        [sys.executable, sys.argv[0], *arguments],
        stdin=subprocess.PIPE,
    )  # fmt: skip


def main() -> int:
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        {"hostile": hostile, "victim": run_victim}[sys.argv[1]](sys.argv[2])
        return 0
    reason = skip_reason()
    if reason is not None:
        print(f"cannot measure: {reason}")
        return 1
    with tempfile.TemporaryDirectory() as directory, shaped_star(3, "20gbit") as nodes:
        token = Path(directory) / "token"
        token.write_bytes(SECRET)
        (first, host), (second, _), (third, _) = nodes
        command = [
            sys.executable, "-m", "tensorstream.serve", "--listen", f"{host}:7470",
            "--threads", "1", "--session-memory", str(MEMORY), "--token-file", str(token),
            "--client-sessions", str(SESSIONS), "--drain", str(DRAIN),
        ]  # fmt: skip
        server = first.start(command, stderr=subprocess.DEVNULL)
        assert server.stdout is not None
        server.stdout.readline()
        victim = start(second, "victim", f"{host}:7470")
        assert victim.stdin is not None and victim.stdout is not None
        victim.stdout.readline()

        def measured() -> dict[str, list[float]]:
            print(file=victim.stdin, flush=True)
            found: dict[str, list[float]] = json.loads(victim.stdout.readline())
            return found

        alone = [measured()]
        attacker = start(third, "hostile", f"{host}:7470")
        assert attacker.stdout is not None
        attacker.stdout.readline()
        time.sleep(8.0)
        contended, peaks = [], []
        for _ in range(2):
            contended.append(measured())
            (zygote,) = children(server.pid)
            sessions = children(zygote)
            own = [server.pid, zygote]
            each = list(map(size, sessions))
            peaks.append((len(sessions), sum(each) + sum(map(size, own)), max(each), size(own[0])))
        attacker.kill()
        attacker.wait()
        time.sleep(5.0)
        alone.append(measured())
        report(alone, contended, peaks)
        begin = time.monotonic()
        os.kill(server.pid, signal.SIGTERM)
        status = server.wait(60)
        print(
            f"SIGTERM while a client is connected: ended with status {status} after "
            f"{time.monotonic() - begin:.1f} s, of --drain {DRAIN}"
        )
        victim.kill()
        victim.wait()
    return 0


def size(process: int) -> int:
    """Returns the private memory of a process in bytes, or 0 if it has ended."""
    try:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    return sum(
        int(kib) << 10
        for kib in re.findall(r"^(?:Private_Dirty|Swap): +(\d+)", rollup, re.MULTILINE)
    )


def report(
    alone: list[dict[str, list[float]]],
    contended: list[dict[str, list[float]]],
    peaks: list[tuple[int, int, int, int]],
) -> None:
    for name in ("small", "large"):
        rows = []
        for runs in (alone, contended):
            times = sorted(time for run in runs for time in run[name])
            rows.append((statistics.median(times), times[int(0.99 * len(times))], len(times)))
        (own, own99, count), (other, other99, others) = rows
        print(
            f"{name:<6} alone {1e3 * own:.2f} ms (99%: {1e3 * own99:.2f}, {count} steps), with it "
            f"{1e3 * other:.2f} ms (99%: {1e3 * other99:.2f}, {others}): ratio {other / own:.2f}, "
            f"99%: {other99 / own99:.2f}"
        )
    for sessions, total, largest, broker in peaks:
        print(
            f"{sessions} sessions: {total / MIB:.0f} MiB in all, at most {largest / MIB:.0f} MiB "
            f"in one, of --session-memory {MEMORY / MIB:.0f} MiB; broker {broker / MIB:.0f} MiB"
        )


if __name__ == "__main__":
    sys.exit(main())
