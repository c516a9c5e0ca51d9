# SPDX-License-Identifier: MIT OR Apache-2.0
"""Transfers succeed, or fail in time, if links are slow, lose packets, or are cut."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import preloaded
import pytest
import torch
from links import Namespace, bad_link, shaped_star, skip_reason
from safetensors.torch import save_file

_SKIP_REASON = skip_reason()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_SKIP_REASON is not None, reason=str(_SKIP_REASON)),
]

PROGRAM = Path(sys.executable).parent / "tensorstream"
TIMEOUT_S = 3.0

# Sends 1000 tensors, or fewer if a message arrives earlier.
SEND = f"""
import tensorstream as ts, torch
times = dict(idle_timeout={TIMEOUT_S}, stall_timeout={TIMEOUT_S})
with ts.listen("10.77.0.1:7000", insecure=True, **times) as listener:
    print("ready", flush=True)
    connection = listener.accept()
    try:
        for number in range(1000):
            connection.send(torch.full((1 << 18,), float(number)), str(number))
            try:
                connection.recv(timeout=0)
                break
            except TimeoutError as error:
                if "no complete tensor" not in str(error):
                    raise
        connection.close()
        print("done", flush=True)
    except (ts.ConnectionLost, ts.ConnectionTimeout) as error:
        print(type(error).__name__, flush=True)
"""

RECEIVE = f"""
import sys, time
import tensorstream as ts, torch  # PyTorch, because importing it later may exceed the timeout.
count = int(sys.argv[1])
connection = ts.connect("10.77.0.1:7000", idle_timeout={TIMEOUT_S}, stall_timeout={TIMEOUT_S})
print("connected", flush=True)
last = time.monotonic()
try:
    for number in range(count):
        tensor = connection.recv()
        last = time.monotonic()
        values = tensor.to_torch()
        assert tensor.name == str(number) and bool((values == number).all())
        print(number, flush=True)
    connection.send_message(b"enough")
    for _ in connection:
        pass
    print("done", flush=True)
except (ts.ConnectionLost, ts.ConnectionTimeout) as error:
    print(type(error).__name__, round(time.monotonic() - last, 2), flush=True)
"""


def _start_transfer(
    programs: preloaded.Server, a: Namespace, b: Namespace, count: int
) -> tuple[preloaded.Program, preloaded.Program]:
    sender = a.start_code(programs, SEND)
    assert sender.stdout.readline() == "ready\n"
    return sender, b.start_code(programs, RECEIVE, count)


def _last_line(program: preloaded.Program, timeout: float) -> str:
    return program.wait(timeout).strip().splitlines()[-1]


def _wait_for(program: preloaded.Program, line: str) -> None:
    while (printed := program.stdout.readline()) != line:
        assert printed, "the program ended"


@pytest.mark.parametrize("kind", ["delay", "loss", "slow", "cut for a while"])
def test_tensors_arrive_over_bad_links(kind: str, programs: preloaded.Server) -> None:
    with bad_link() as (a, b, link):
        count = 20
        if kind == "delay":
            link.delay_s = 0.02
        elif kind == "loss":
            link.loss, link.delay_s, count = 0.01, 0.002, 10
        elif kind == "slow":
            link.bytes_per_s, count = 3e6, 6
        sender, receiver = _start_transfer(programs, a, b, count)
        if kind == "cut for a while":
            _wait_for(receiver, "2\n")
            link.cut = True
            time.sleep(TIMEOUT_S / 3)
            link.cut = False
        assert _last_line(receiver, 90) == "done"
        assert _last_line(sender, 20) == "done"
        assert link.dropped > 0 or kind in {"delay", "slow"}


def test_a_cut_link_fails_at_both_ends_in_time(programs: preloaded.Server) -> None:
    with bad_link() as (a, b, link):
        sender, receiver = _start_transfer(programs, a, b, 1000)
        _wait_for(receiver, "2\n")
        link.cut = True
        error, seconds = _last_line(receiver, 20).split()
        assert error in {"ConnectionTimeout", "ConnectionLost"}
        assert float(seconds) < 2 * TIMEOUT_S
        # The sender's error may come later, because its socket still buffers data.
        assert _last_line(sender, 20) in {"ConnectionTimeout", "ConnectionLost"}


def test_a_checkpoint_is_fetched_over_a_failing_link(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.randn(1 << 20) for number in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    with bad_link() as (a, b, link):
        link.delay_s, link.loss, link.bytes_per_s = 0.001, 0.002, 30e6
        serve = [
            PROGRAM,
            "--json",
            "serve-weights",
            tmp_path,
            "--insecure",
            "--listen",
            "10.77.0.1:7000",
        ]
        server = a.start(serve)
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        to = tmp_path / "fetched"
        fetching = b.start([PROGRAM, "--json", "fetch", url, to])
        time.sleep(0.5)
        link.cut = True
        time.sleep(1.0)
        link.cut = False
        output, _ = fetching.communicate(timeout=120)
        assert fetching.returncode == 0
        assert json.loads(output)["bytes"] == (tmp_path / "model.safetensors").stat().st_size
        assert (to / "model.safetensors").read_bytes() == (
            tmp_path / "model.safetensors"
        ).read_bytes()


def broadcast_seconds(directory: Path, to: Path, receivers: int, rate: str) -> float:
    """Returns the time until the slowest receiver has all files of a directory."""
    with shaped_star(receivers + 1, rate) as nodes:
        (root, address), *others = nodes
        serve = [
            PROGRAM,
            "--json",
            "serve-weights",
            directory,
            "--insecure",
            "--listen",
            f"{address}:7000",
        ]
        server = root.start(serve)
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        fetching = []
        for number, (space, own) in enumerate(others):
            options = ["--insecure", "--listen", f"{own}:7000"]
            command = [PROGRAM, "--json", "fetch", url, to / str(number), *options]
            fetching.append(space.start(command))
        reports = []
        for process in fetching:
            assert process.stdout is not None
            reports.append(json.loads(process.stdout.readline()))
        assert [reports[0]["bytes"]] * receivers == [report["bytes"] for report in reports]
        return float(max(report["seconds"] for report in reports))


def test_a_broadcast_to_four_is_complete(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": torch.randn(4 << 20)}, source / "model.safetensors")
    broadcast_seconds(source, tmp_path / "to", 4, "1gbit")
    sent = (source / "model.safetensors").read_bytes()
    assert all(
        (tmp_path / "to" / str(number) / "model.safetensors").read_bytes() == sent
        for number in range(4)
    )
