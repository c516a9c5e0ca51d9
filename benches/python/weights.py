# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares loading on a machine with loading there directly, and runs a model larger than it.

`cargo xtask bench weights`. Needs OpenSSH's server for the machine that ssh starts, and a memory
cgroup for the cap.

- Nine interleaved rounds, with the checkpoint in the page cache. "direct" is `ts.load_file` in a
  separate process. Before each load, it and the machines free the tensors of the last one.
- Then the same from a URL, with `tensorstream serve-weights` on this computer. A server of machines
  reads it in its main process, which passes the data to the process of the session.
- What passes through the client is what its ssh process has read and written.
- The capped server has a memory limit, page cache included, of the weights divided by 1.5.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tensorstream as ts
import torch
from models import SCRATCH, llama_1b, memory_cap, spread
from tensorstream.remote import RemoteMachine, load_state_dict
from tensorstream.remote.providers._ssh import _Forwarded

sys.path.append(str(Path(__file__).parents[2] / "crates/ts-py/tests"))
from serving import Serving, served
from sshd import SKIP_REASON, Sshd

ROUNDS = 9
TOKENS = 8

DIRECT = """
import sys, time
import tensorstream as ts
for line in sys.stdin:
    tensors = None
    begin = time.perf_counter()
    tensors = ts.load_file(line.strip())
    print(time.perf_counter() - begin, flush=True)
"""


class Direct:
    """Loads in a separate process."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", DIRECT]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def __call__(self, path: Path | str) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(path, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class OnMachine:
    """Loads on a machine."""

    def __init__(self, machine: RemoteMachine) -> None:
        self.machine = machine
        self.tensors: dict[str, torch.Tensor] = {}

    def __call__(self, path: Path | str) -> float:
        self.tensors = {}
        self.machine.synchronize()
        begin = time.perf_counter()
        self.tensors = load_state_dict(path, self.machine.device())
        return time.perf_counter() - begin


def through(process: int) -> int:
    """Returns the bytes that a process has read and written."""
    io = dict(line.split(": ") for line in Path(f"/proc/{process}/io").read_text().splitlines())
    return int(io["rchar"]) + int(io["wchar"])


def compare(path: Path) -> None:
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    with ExitStack() as stack:
        contenders: dict[str, Any] = {"direct": Direct()}
        stack.callback(contenders["direct"].close)
        contenders["local"] = OnMachine(stack.enter_context(RemoteMachine.local()))
        tunnel = 0
        if SKIP_REASON is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            options = stack.enter_context(Sshd(directory)).options()
            machine = stack.enter_context(RemoteMachine.ssh(**options))
            contenders["ssh"] = OnMachine(machine)
            server = machine._server
            assert isinstance(server, _Forwarded) and server.tunnel is not None
            tunnel = server.tunnel.pid
        before = through(tunnel) if tunnel else 0
        print(f"\n{size / 1e9:.2f} GB, {ROUNDS} rounds: seconds, and the ratio to direct, by round")
        run_rounds(contenders, path)
        if tunnel:
            share = (through(tunnel) - before) / (ROUNDS + 1)
            print(f"  through ssh, for each load: {share / 1e6:.3f} MB")


def compare_urls(path: Path) -> None:
    with ExitStack() as stack:
        url = stack.enter_context(served(path))
        server = stack.enter_context(Serving({"--weights": url, "--threads": 2}))
        machine = stack.enter_context(RemoteMachine.tcp(server.address))
        direct = Direct()
        stack.callback(direct.close)
        print(f"\nfrom {url}")
        run_rounds({"direct": direct, "machine": OnMachine(machine)}, url)
        status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="utf-8")
        peak = int(status.split("VmHWM:")[1].split()[0])
        print(f"  peak of the main process of the server: {peak >> 10} MiB")


def run_rounds(contenders: dict[str, Any], source: Path | str) -> None:
    """Loads in turn, and prints the times."""
    seen: dict[str, list[float]] = defaultdict(list)
    for turn in range(ROUNDS + 1):
        for name in random.sample(list(contenders), len(contenders)):
            seconds = contenders[name](source)
            if turn:  # the first round reads the files into the page cache
                seen[name].append(seconds)
    for name in contenders:
        pairs = zip(seen[name], seen["direct"], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        print(f"  {name:<8} {spread(seen[name])}   {ratio:.3f}")


def run_capped(path: Path) -> None:
    from transformers import AutoModelForCausalLM

    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    limit = size * 2 // 3
    ids = torch.arange(2, 10)[None]
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    reference = AutoModelForCausalLM.from_pretrained(path)
    expected = reference.generate(ids, **options)
    del reference
    budget = limit - (700 << 20)
    with ExitStack() as stack:
        cap = stack.enter_context(memory_cap(limit))
        socket = f"unix:{stack.enter_context(tempfile.TemporaryDirectory())}/socket"
        serve = [sys.executable, "-m", "tensorstream.serve", "--listen", socket]
        serve += ["--weights", str(path), "--budget", str(budget), "--threads", "2"]
        process = subprocess.Popen([*cap, *serve], stdout=subprocess.PIPE)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        assert process.stdout is not None
        process.stdout.readline()
        machine = stack.enter_context(RemoteMachine.tcp(socket))
        begin = time.perf_counter()
        model = ts.from_pretrained(path, device=machine.device())
        loaded = time.perf_counter() - begin
        begin = time.perf_counter()
        got = model.generate(ids.to(machine.device()), **options).cpu()
        seconds = (time.perf_counter() - begin) / TOKENS
        sent = machine.stats()
    print(
        f"\nserver capped at {limit >> 20} MiB, weights {size >> 20} MiB, budget {budget >> 20} MiB"
    )
    print(f"  tokens equal: {torch.equal(got, expected)}; loaded in {loaded:.2f} s")
    print(f"  {seconds:.2f} s a token; uploaded {sent['uploaded_bytes']} bytes")


def main() -> int:
    print(f"scratch directory: {SCRATCH}; torch {torch.__version__}")
    compare(llama_1b())
    compare_urls(llama_1b())
    run_capped(llama_1b())
    return 0


if __name__ == "__main__":
    sys.exit(main())
