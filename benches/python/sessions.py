# SPDX-License-Identifier: MIT OR Apache-2.0
"""Measures the cost of one process for each session of ``tensorstream serve``.

usage: sessions.py [--pairs 9] [--ops 4096] [--opened 50]

Compares ``tensorstream serve`` with a server that runs all sessions in one process. Measures both
in interleaved pairs, over TCP, Unix sockets and TLS. Also measures the time to open a session.
Requires openssl.

--pairs: the number of pairs for each transport.
--ops: the number of operators in a measurement.
--opened: the number of sessions to open.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from remote_peers import Tensors, measure
from servers import listening, served
from tensorstream.remote import RemoteMachine

#: The program of a server that runs all sessions in one process, as a ``local`` machine does.
_ONE_PROCESS = """
import sys, torch
from tensorstream.remote.server._server import devices_of, server
torch.set_num_threads(1)
listen, cert, key = (part or None for part in sys.argv[1:])
served = server(listen, devices=devices_of("cpu"), cert=cert, key=key)
print("listening at", served.address, flush=True)
served.run()
"""


def _certificates(directory: Path) -> tuple[str, str, str]:
    """Writes the certificate of an authority, and a certificate for 127.0.0.1 with its key.

    Returns the three paths in this order.
    """
    ca, ca_key, cert, key = (
        str(directory / f"{name}.pem") for name in ("ca", "ca-key", "cert", "key")
    )
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    name = [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-addext",
        "basicConstraints=CA:FALSE",
    ]
    for command in (
        [*new, "-subj", "/CN=authority", "-keyout", ca_key, "-out", ca],
        [*new, *name, "-CA", ca, "-CAkey", ca_key, "-keyout", key, "-out", cert],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return ca, cert, key


def _opened(address: str, count: int) -> list[float]:
    """Opens ``count`` sessions one after the other. Returns the milliseconds that each took."""
    times = []
    for _ in range(count):
        since = time.perf_counter()
        machine = RemoteMachine("tcp", address)
        times.append(1e3 * (time.perf_counter() - since))
        machine.stop()
    return times


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--ops", type=int, default=4096)
    parser.add_argument("--opened", type=int, default=50)
    options = parser.parse_args()
    if shutil.which("openssl") is None:
        sys.exit("cannot create certificates without openssl: apt-get install openssl")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    print(
        "| | operators/s, own process | one process | ratio | a wait, µs, own process "
        "| one process | ratio |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as servers:
        directory = Path(temporary)
        ca, cert, key = _certificates(directory)
        transports = {
            "TCP": ("127.0.0.1:0", "127.0.0.1:0", False),
            "Unix": (f"unix:{directory}/own", f"unix:{directory}/one", False),
            "TLS": ("127.0.0.1:0", "127.0.0.1:0", True),
        }
        for name, (own, one, tls) in transports.items():
            tls_options = ["--tls-cert", cert, "--tls-key", key] if tls else []
            addresses = [
                servers.enter_context(served(*tls_options, listen=own, stderr=subprocess.DEVNULL)),
                servers.enter_context(
                    listening(
                        "-c",
                        _ONE_PROCESS,
                        one,
                        *((cert, key) if tls else ("", "")),
                        stderr=subprocess.DEVNULL,
                    )
                ),
            ]
            with contextlib.ExitStack() as machines:
                peers = []
                for address in addresses:
                    machine = machines.enter_context(
                        RemoteMachine("tcp", address, ca=ca if tls else None)
                    )
                    peers.append(Tensors(torch.ones(1, 1, device=machine.device())))
                pairs = [
                    [measure(peer, options.ops) for peer in peers] for _ in range(options.pairs + 1)
                ][1:]
            rates = [statistics.median(pair[at][2] for pair in pairs) for at in (0, 1)]
            waits = [statistics.median(pair[at][0] for pair in pairs) for at in (0, 1)]
            rate = statistics.median(pair[0][2] / pair[1][2] for pair in pairs)
            wait = statistics.median(pair[0][0] / pair[1][0] for pair in pairs)
            print(
                f"| {name} | {rates[0]:,.0f} | {rates[1]:,.0f} | {rate:.3f} | {waits[0]:.1f} | "
                f"{waits[1]:.1f} | {wait:.3f} |"
            )
            if name == "TCP":
                times = _opened(addresses[0], options.opened)
        times.sort()
        print(
            f"\na session opens in {statistics.median(times):.1f} ms, median of {len(times)}; "
            f"at most {times[-1]:.1f} ms"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
