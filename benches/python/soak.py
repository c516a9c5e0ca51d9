# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a streamed model while reads fail, calls are interrupted, and memory is short.

usage: soak.py [MINUTES]

`cargo xtask soak` takes 30 minutes. A Llama of 423 MiB streams from a web server, with an adaptive
budget of 120 MiB. Two threads call it: with prompts of different lengths, and token by token. All
of this happens meanwhile:

- The server cuts or refuses 4% of the answers, and sometimes all answers for a while.
- A hook of the model raises exceptions, and SIGINT interrupts calls.
- The limit of the process on its data falls and rises, so that memory is given back and taken.

The script fails unless all of these conditions hold:

- All results are those of the model in memory.
- The only errors are those that were injected.
- Neither memory, threads nor file descriptors grow: the maximum of the last third of the time is
  within 32 MiB, 2 threads and 16 descriptors of the maximum of the second third. Connections to the
  server are descriptors, and their number varies.
"""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import programs
from models import MIB

BUDGET = 120 * MIB
#: Prompts: the number of sequences, their length, and the number of tokens that are decoded.
PROMPTS = [(1, 4, 6), (1, 20, 3), (2, 9, 4), (3, 24, 1), (4, 2, 8)]


class Injected(Exception):
    """What the hook of the model raises."""


def serve(directory: Path) -> None:
    """Serves the files of a directory. Prints the port. Some answers are errors."""
    draw = random.Random(1)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            file = directory / Path(self.path).name
            if not file.is_file():
                self.send_error(404)
                return
            chance = draw.random()
            outage = time.monotonic() % 60 > 57
            if self.command == "GET" and (chance < 0.02 or outage):
                self.send_error(503)
                return
            total = file.stat().st_size
            wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            begin, end = 0, total
            if wanted:
                begin, end = int(wanted[1]), int(wanted[2] or total - 1) + 1
            self.send_response(206 if wanted else 200)
            if wanted:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{total}")
            self.send_header("ETag", '"one"')
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(end - begin))
            self.end_headers()
            if self.command == "GET":
                with file.open("rb") as opened:
                    opened.seek(begin)
                    content = opened.read(end - begin)
                cut = chance > 0.98
                self.wfile.write(content[: len(content) // 2] if cut else content)
                self.close_connection = cut

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()


def generated(model: Any, prompt: tuple[int, int, int]) -> list[Any]:
    """Returns the logits of a prompt and of tokens that are decoded after it."""
    import torch

    batch, length, tokens = prompt
    ids, past, results = programs.inputs_of(model, "llama", batch, length)["input_ids"], None, []
    with torch.no_grad():
        for _ in range(tokens):
            out = model(input_ids=ids, past_key_values=past, use_cache=True)
            past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            results.append(out.logits)
    return results


def field(name: str) -> int:
    """Returns a field of the status of this process."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


def main(minutes: float) -> int:
    import tensorstream as ts
    import torch

    # A shell ignores SIGINT in programs that it starts in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program = programs.Program.of(0)
    program.kind, program.dtype = "llama", "float32"
    programs.make(program)
    torch.set_num_threads(1)
    cls, _ = programs.model_class("llama")
    whole = cls.from_pretrained(program.path, dtype="auto").eval()
    expected = {prompt: generated(whole, prompt) for prompt in PROMPTS}
    del whole

    server = subprocess.Popen(
        [sys.executable, sys.argv[0], "serve", str(program.path)], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
    counts: Counter[str] = Counter()
    try:
        config = ts.Config(budget=BUDGET, memory_pressure_mode="adaptive", max_passes=2)
        for _ in range(20):
            try:
                model = ts.from_pretrained(
                    url, model_config=program_config(program.path), config=config
                )
                break
            except (ts.TensorStreamError, OSError) as error:
                counts[f"opening: {type(error).__name__}"] += 1
                time.sleep(1)
        soak = Soak(model.eval(), expected, counts)
        soak.run(60 * minutes)
    finally:
        server.terminate()
    samples = soak.samples
    third = len(samples) // 3
    grown = [
        max(sample[i] for sample in samples[2 * third :])
        - max(sample[i] for sample in samples[third : 2 * third])
        for i in range(3)
    ]
    flat = grown[0] <= 32 and grown[1] <= 2 and grown[2] <= 16
    wrong = [what for what in counts if what.startswith(("wrong", "unexpected"))]
    print("\n" + "\n".join(f"{count:7} {what}" for what, count in sorted(counts.items())))
    print(
        f"growth from the second to the last third: {grown[0]} MiB, {grown[1]} threads, "
        f"{grown[2]} descriptors; flat: {flat}; wrong results or unexpected errors: {len(wrong)}"
    )
    return int(not flat or bool(wrong))


def program_config(path: Path) -> Any:
    """Returns the configuration of a model."""
    import transformers

    return transformers.AutoConfig.from_pretrained(path)


class Soak:
    """Calls a model for some seconds, and disturbs the calls."""

    def __init__(self, model: Any, expected: dict[Any, Any], counts: Counter[str]) -> None:
        self.model = model
        self.expected = expected
        self.counts = counts
        self.draw = random.Random(2)
        self.lock = threading.Lock()
        self.end = 0.0
        self.throws = threading.Event()
        #: Memory in MiB, threads and descriptors, every ten seconds.
        self.samples: list[tuple[int, int, int]] = []
        model.model.layers[5].register_forward_pre_hook(self.hook)

    def hook(self, module: Any, inputs: Any) -> None:
        if self.throws.is_set():
            self.throws.clear()
            raise Injected

    def call(self) -> str:
        """Makes one call. Returns what happened."""
        import tensorstream as ts
        import torch

        prompt = self.draw.choice(PROMPTS)
        try:
            results = generated(self.model, prompt)
            same = all(map(torch.equal, results, self.expected[prompt]))
            return "right results" if same else f"wrong results: {prompt}"
        except Injected:
            return "exceptions of the hook"
        except KeyboardInterrupt:
            return "interrupts"
        except (ts.TensorStreamError, OSError) as error:
            if "http://" in str(error):
                return f"network: {type(error).__name__}"
            return f"unexpected: {type(error).__name__}: {error}"

    def calls(self) -> None:
        while time.monotonic() < self.end:
            what = self.call()
            with self.lock:
                self.counts[what] += 1

    def disturb(self) -> None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        while time.monotonic() < self.end:
            time.sleep(self.draw.uniform(1, 4))
            match self.draw.randrange(4):
                case 0:
                    self.throws.set()
                case 1:
                    os.kill(os.getpid(), signal.SIGINT)
                case 2:
                    short = field("VmData") * 1024 + 40 * MIB
                    resource.setrlimit(resource.RLIMIT_DATA, (short, hard))
                case 3:
                    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def watch(self) -> None:
        import tensorstream as ts

        limits = set()
        while time.monotonic() < self.end:
            time.sleep(10)
            descriptors = len(os.listdir("/proc/self/fd"))
            self.samples.append((field("VmRSS") // 1024, field("Threads"), descriptors))
            limits.add(ts.stats(self.model)["limit_bytes"] >> 20)
            with self.lock:
                right = self.counts["right results"]
            memory, threads, descriptors = self.samples[-1]
            print(
                f"{len(self.samples) * 10} s: {right} right results, {memory} MiB, {threads} "
                f"threads, {descriptors} descriptors, limits {min(limits)}-{max(limits)} MiB",
                flush=True,
            )

    def run(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        threads = [threading.Thread(target=each) for each in (self.calls, self.disturb, self.watch)]
        for thread in threads:
            thread.start()
        # SIGINT interrupts only the main thread.
        while any(thread.is_alive() for thread in threads):
            try:
                self.calls()
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt:
                self.counts["interrupts between calls"] += 1


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", directory]:
            serve(Path(directory))
        case [minutes]:
            sys.exit(main(float(minutes)))
        case _:
            sys.exit(main(30))
