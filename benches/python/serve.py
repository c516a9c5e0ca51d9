# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares three ways to load a checkpoint: from a server, over a raw socket, and from the file.

`cargo xtask bench serve`. ``tensorstream serve-weights`` runs on this machine, with the file in the
page cache. The raw socket sends the bytes of the file with ``sendfile``. All three load into new
memory, as loaders do.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorstream as ts
import torch
from safetensors.torch import save_file

TENSORS, BYTES, ROUNDS = 64, 16 << 20, 9


def send(file: Path, port: multiprocessing.connection.Connection) -> None:
    """Sends a file to each client of a raw socket. First sends the socket's address to ``port``."""
    listener = socket.create_server(("127.0.0.1", 0))
    port.send(listener.getsockname())
    while True:
        connection = listener.accept()[0]
        with connection, file.open("rb") as opened:
            connection.sendfile(opened)


def by_socket(address: tuple[str, int], size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Receives a file of ``size`` bytes from a raw socket into a new array."""
    array = np.empty(size, np.uint8)
    rest = memoryview(array)
    with socket.create_connection(address) as connection:
        while rest:
            rest = rest[connection.recv_into(rest, min(len(rest), 256 << 10)) :]
    return array


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.safetensors"
        save_file(
            {f"t{n}": torch.full((BYTES // 2,), n, dtype=torch.float16) for n in range(TENSORS)},
            file,
        )
        program = Path(sys.executable).parent / "tensorstream"
        command = [
            program,
            "--json",
            "serve-weights",
            directory,
            "--insecure",
            "--listen",
            "127.0.0.1:0",
        ]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            near, far = multiprocessing.Pipe()
            sender = multiprocessing.Process(target=send, args=(file, far), daemon=True)
            sender.start()
            address = near.recv()
            size = file.stat().st_size
            kinds: dict[str, Callable[[], object]] = {
                "load_file, ts://": lambda: ts.load_file(f"{url}model.safetensors"),
                "raw socket, sendfile": lambda: by_socket(address, size),
                "load_file, the file": lambda: ts.load_file(file),
            }
            rates: dict[str, list[float]] = {kind: [] for kind in kinds}
            for turn in range(ROUNDS + 1):  # The first is a warm-up.
                for kind, load in kinds.items():
                    began = time.perf_counter()
                    loaded = load()
                    if turn:
                        rates[kind].append(size / 1e9 / (time.perf_counter() - began))
                    if isinstance(loaded, dict):
                        assert all(
                            bool((loaded[f"t{n}"][::4096] == n).all()) for n in range(TENSORS)
                        )
                    del loaded
        finally:
            server.terminate()
            server.wait()
    print(f"| {size / 1e9:.2f} GB in {TENSORS} tensors, {ROUNDS} rounds | GB/s |\n|---|---|")
    for kind, measured in rates.items():
        print(f"| {kind} | {statistics.median(measured):.2f} |")
    ours, raw = rates["load_file, ts://"], rates["raw socket, sendfile"]
    print(
        "| ts://, of the raw socket | "
        f"{statistics.median(a / b for a, b in zip(ours, raw, strict=True)):.2f} |"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
