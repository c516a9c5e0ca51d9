# SPDX-License-Identifier: MIT OR Apache-2.0
"""Links that are slow, lose packets, or are cut: what is under way comes, or fails with a reason in
time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from links import Namespace, bad_link, reason_against, shaped_star
from safetensors.torch import save_file

_AGAINST = reason_against()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_AGAINST is not None, reason=str(_AGAINST)),
]

PROGRAM = Path(sys.executable).parent / "tensorstream"
TIMEOUT_S = 3.0

# Sends one tensor after the other until it is told that it is enough.
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
                if "nothing arrived" not in str(error):
                    raise
        connection.close()
        print("done", flush=True)
    except (ts.ConnectionLost, ts.ConnectionTimeout) as error:
        print(type(error).__name__, flush=True)
"""

RECEIVE = f"""
import sys, time
import tensorstream as ts, torch  # Loading PyTorch may take longer than the other end waits.
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


def _both(
    a: Namespace, b: Namespace, count: int
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    sender = a.start([sys.executable, "-c", SEND])
    assert sender.stdout is not None
    assert sender.stdout.readline() == "ready\n"
    return sender, b.start([sys.executable, "-c", RECEIVE, str(count)])


def _last(process: subprocess.Popen[str], timeout: float) -> str:
    output, _ = process.communicate(timeout=timeout)
    return output.strip().splitlines()[-1]


def _wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    while (said := process.stdout.readline()) != line:
        assert said, "it ended"


@pytest.mark.parametrize("kind", ["delay", "loss", "slow", "cut for a while"])
def test_tensors_come_whatever_the_link_is_like(kind: str) -> None:
    with bad_link() as (a, b, link):
        count = 20
        if kind == "delay":
            link.delay_s = 0.02
        elif kind == "loss":
            link.loss, link.delay_s, count = 0.01, 0.002, 10
        elif kind == "slow":
            link.bytes_per_s, count = 3e6, 6
        sender, receiver = _both(a, b, count)
        if kind == "cut for a while":
            _wait_for(receiver, "2\n")
            link.cut = True
            time.sleep(TIMEOUT_S / 3)
            link.cut = False
        assert _last(receiver, 90) == "done"
        assert _last(sender, 20) == "done"
        assert link.dropped > 0 or kind in {"delay", "slow"}


def test_a_link_that_stays_cut_is_an_error_in_time_at_both_ends() -> None:
    with bad_link() as (a, b, link):
        sender, receiver = _both(a, b, 1000)
        _wait_for(receiver, "2\n")
        link.cut = True
        said, seconds = _last(receiver, 20).split()
        assert said in {"ConnectionTimeout", "ConnectionLost"}
        assert float(seconds) < 2 * TIMEOUT_S
        # What is in its socket may go out later; then it waits for an answer.
        assert _last(sender, 20) in {"ConnectionTimeout", "ConnectionLost"}


def test_a_checkpoint_comes_over_a_link_that_fails(tmp_path: Path) -> None:
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
        to = tmp_path / "there"
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
    """How long until all receivers have the files of a directory: the slowest one's time."""
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
            how = ["--insecure", "--listen", f"{own}:7000"]
            fetching.append(space.start([PROGRAM, "--json", "fetch", url, to / str(number), *how]))
        told = []
        for process in fetching:
            assert process.stdout is not None
            told.append(json.loads(process.stdout.readline()))
        assert [told[0]["bytes"]] * receivers == [one["bytes"] for one in told]
        return float(max(one["seconds"] for one in told))


def test_a_broadcast_to_four_is_whole(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": torch.randn(4 << 20)}, source / "model.safetensors")
    broadcast_seconds(source, tmp_path / "to", 4, "1gbit")
    sent = (source / "model.safetensors").read_bytes()
    assert all(
        (tmp_path / "to" / str(number) / "model.safetensors").read_bytes() == sent
        for number in range(4)
    )
