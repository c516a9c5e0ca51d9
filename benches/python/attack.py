# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attacks ``tensorstream serve`` with clients that have the token.

usage: attack.py [--random 100000] [--mutated 100000] [--clients 4] [--seed 1]

The program starts a server on the loopback interface, and terminates it at the end. Clients send
two kinds of requests:

- Random requests are well formed. Most of them call a random operator, with arguments of any type,
  and with any storages, shapes, strides and offsets.
- Mutated requests are random requests in which some bytes are changed.

At the same time, an honest session runs operators and compares the results with the CPU. The
program fails unless all of these conditions hold:

- The server keeps running.
- The honest session gets only correct results.
- No reply contains the token of the server.
- The memory of the server's own processes returns to within 64 MiB of its initial size.

--random: the number of random requests.
--mutated: the number of mutated requests.
--clients: the number of clients that send requests at the same time.
--seed: the seed of the random numbers.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

#: The token of the server. No reply may contain it.
SECRET = b"a canary that nobody may have"
#: The number of seconds that a client waits for a reply before it abandons its session.
TIMEOUT = 4.0
#: The number of requests between two checks that the server still runs the session.
GROUP = 8
#: The largest number of requests in a session.
MAX_REQUESTS = 400
MIB = 1 << 20
#: Types of frames of the wire protocol.
HELLO, MESSAGE, PING, PONG, CLOSE = 1, 7, 8, 9, 10


def number(value: int) -> bytes:
    """Encodes an unsigned integer, modulo 2**64."""
    out = bytearray()
    value &= (1 << 64) - 1
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def signed(value: int) -> bytes:
    """Encodes a signed integer."""
    return number((value << 1) ^ (value >> 63))


def text(value: str) -> bytes:
    """Encodes a string."""
    return number(len(value.encode())) + value.encode()


def frame(kind: int, stream: int = 0, seq: int = 0, body: bytes = b"") -> bytes:
    return struct.pack("<BBHIQQ", kind, 0, 0, stream, seq, len(body)) + body


def field(tag: int, body: bytes) -> bytes:
    """Encodes a field of a HELLO frame."""
    return struct.pack("<BI", tag, len(body)) + body


def hello(session: bytes) -> bytes:
    """Encodes the first bytes that a client sends, which open the session with this id."""
    integers = [(0x81, 1), (0x82, 1 << 24), (0x83, 16)]
    body = b"".join(field(tag, struct.pack("<Q", value)) for tag, value in integers)
    body += field(4, SECRET) + field(5, b"attack") + field(6, b"exec/" + session.hex().encode())
    return b"TSWIRE1\n" + frame(HELLO, body=body) + message(b"\x02" + session + b"\0")


def message(content: bytes) -> bytes:
    return frame(MESSAGE, 1, 0, content)


class Requests:
    """Generates random requests. They use earlier operators and storages, so some are valid."""

    def __init__(self, seed: int, names: list[str]) -> None:
        self.draw, self._names = random.Random(seed), names
        self.ops: list[str] = []
        self.storages = 0
        draw = self.draw
        odd = [float("nan"), float("inf"), -1e308, 1e-320]
        words = [
            "mean",
            "sum",
            "max",
            "none",
            "linear",
            "given",
            "",
            "cpu",
            "meta",
            "/etc/passwd",
            "x" * 500,
        ]
        names = [
            "strided",
            "sparse_coo",
            "contiguous_format",
            "preserve_format",
            "channels_last",
            "load",
            "jagged",
        ]
        makers: dict[str, Callable[[], bytes]] = {
            "Tensor": lambda: bytes([draw.choice([10] * 9 + [13])]) + self.tensor(),
            "int": lambda: b"\x03" + signed(self.whole()),
            "float": lambda: (
                b"\x04" + struct.pack("<d", draw.choice([0.0, 0.5, 1.0, 2.0, -1.0, *odd]))
            ),
            "complex": lambda: b"\x05" + struct.pack("<dd", 1.0, draw.random()),
            "bool": lambda: bytes([draw.choice([1, 2])]),
            "str": lambda: b"\x06" + text(draw.choice(words)),
            "ScalarType": lambda: bytes(
                [7, draw.choice([6, 7, 4, 5, 15, 11, 0, draw.randrange(256)])]
            ),
            "Device": lambda: b"\x08" + number(draw.choice([0, 0, 1, 7, 8, 1 << 31])),
            "Layout": lambda: b"\x09" + text(draw.choice(names)),
            "scalar": lambda: (
                bytes([12, draw.choice([6, 4, 11, draw.randrange(256)])]) + draw.randbytes(16)
            ),
            "None": lambda: b"\0",
        }
        makers["SymInt"], makers["MemoryFormat"] = makers["int"], makers["Layout"]
        numbers = [makers[name] for name in ("int", "float", "bool")]
        makers["number"] = makers["Scalar"] = lambda: self.any_of(*numbers)
        self._makers = makers

    def any_of(self, *makers: Any) -> bytes:
        """Calls a random one of these functions, and returns its result."""
        return self.draw.choice(makers)()

    def whole(self) -> int:
        """Returns a random integer, which is usually small and sometimes near a limit."""
        small = [0, 1, 2, 3, 4, 5, 7, 8, 16, -1, -2, 100]
        odd = [1 << 16, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 40, (1 << 63) - 1, -(1 << 63)]
        return self.draw.choice(small if self.draw.random() < 0.85 else odd)

    def view(self) -> bytes:
        """Encodes a random dtype, shape, strides and offset."""
        draw = self.draw
        dims = draw.choice([0, 1, 1, 2, 2, 2, 3, 4, 5])
        sane = draw.random() < 0.9
        sizes = [
            draw.choice([1, 1, 2, 2, 3, 4, 5, 0] if sane else [1 << 20, 1 << 40, 1 << 62, 3])
            for _ in range(dims)
        ]
        strides = (
            [draw.choice([0, 1, 2, 5] if sane else [-1, 1 << 40, 7]) for _ in sizes]
            if draw.random() < 0.2
            else []
        )
        offset = draw.choice([0, 0, 0, 1, 2, 1 << 40]) if draw.random() < 0.3 else 0
        dtype = draw.choice([6, 6, 6, 4, 4, 7, 0, 1, 3, 5, 9, 11, 15, draw.randrange(256)])
        out = bytes([dtype]) + number(dims << 2 | bool(strides) << 1 | bool(offset))
        out += b"".join(map(number, sizes)) + b"".join(map(signed, strides))
        return out + (number(offset) if offset else b"")

    def tensor(self) -> bytes:
        """Encodes a random view of a storage. The storage usually exists."""
        storage = (
            self.draw.randrange(max(self.storages, 1)) + 1
            if self.draw.random() < 0.97
            else self.whole()
        )
        return number(storage) + self.view()

    def value(self, kind: str = "", depth: int = 0) -> bytes:
        """Encodes a random argument of the type ``kind``, or sometimes of another type."""
        draw = self.draw
        if not kind or draw.random() < 0.12:
            kind = draw.choice([*self._makers, "List"])
        if kind.startswith("Optional["):
            return b"\0" if draw.random() < 0.4 else self.value(kind[9:-1], depth)
        if kind.startswith("List"):
            inner = kind[5:-1] if kind.startswith("List[") else ""
            count = draw.choice([0, 1, 2, 2, 3, 4]) if depth < 5 else 0
            return (
                b"\x0b"
                + number(count)
                + b"".join(self.value(inner, depth + 1) for _ in range(count))
            )
        return self._makers.get(kind, lambda: b"\0")()

    def create(self) -> bytes:
        """Encodes a request that creates a storage."""
        self.storages += 1
        size = self.draw.choice([64, 64, 256, 1000, 4096, 4096, 0, 1 << 20, 1 << 33, 1 << 62, 7])
        return (
            b"\x02"
            + number(self.storages)
            + number(size)
            + number(self.draw.choice([0] * 9 + [1, 9]))
        )

    def _storage(self) -> bytes:
        return number(self.draw.randrange(max(self.storages, 1)) + 1)

    def write(self) -> bytes:
        """Encodes a request that writes to a storage."""
        draw = self.draw
        count = draw.choice([8, 64, 64, 256])
        indices = struct.pack(
            f"<{count // 8}q",
            *(draw.choice([0, 1, 2, 3, -1, 9, 1 << 40]) for _ in range(count // 8)),
        )
        body = draw.choice([indices, draw.randbytes(count)])
        return (
            b"\x05"
            + self._storage()
            + number(draw.choice([0, 0, 0, 8, 1 << 50]))
            + number(count)
            + body
        )

    def output(self) -> bytes:
        """Encodes a random destination for a result of an operator."""
        self.storages += 1
        draw, storage = self.draw, number(self.storages if self.draw.random() < 0.95 else 1)
        kind = draw.random()
        if kind < 0.2:
            return b"\0"
        if kind < 0.5:
            return b"\1" + storage + self.view() + number(draw.choice([16, 64, 256, 4096, 1 << 40]))
        return b"\2" + storage

    def call(self) -> bytes:
        """Encodes a request that calls a random operator.

        If the session has not used the operator before, a definition of the operator comes first.
        """
        draw = self.draw
        name = draw.choice(self._names)
        defined = b""
        if name not in self.ops:
            self.ops.append(name)
            defined = b"\x01" + number(len(self.ops) - 1) + text(name)
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), base, None)
        op = getattr(packet, overload or "default", None)
        arguments = op._schema.arguments if op is not None else []
        given = [self.value(str(a.type)) for a in arguments if not a.kwarg_only]
        named = [
            (a.name, self.value(str(a.type)))
            for a in arguments
            if a.kwarg_only and draw.random() < 0.5
        ]
        if draw.random() < 0.1:
            given = given[:-1] if draw.random() < 0.5 else [*given, self.value()]
        outputs = len(op._schema.returns) if op is not None else 1
        if draw.random() < 0.05:
            outputs = draw.choice([0, 1, 2, 9])
        return (
            defined + b"\x07" + number(self.ops.index(name))
            + number(len(given)) + b"".join(given)
            + number(len(named)) + b"".join(text(name) + value for name, value in named)
            + number(outputs) + b"".join(self.output() for _ in range(outputs))
            + number(draw.choice([0, 1]) and 5)
        )  # fmt: skip

    def one(self) -> bytes:
        """Encodes a random request."""
        rest = [
            self.create, self.create, self.write, self.write,
            lambda: b"\x06" + number(9) + self.tensor(),
            lambda: b"\x03" + self._storage() + number(self.draw.choice([0, 8, 64, 5000, 1 << 34])),
            lambda: b"\x04" + self._storage(),
            lambda: b"\x0a" + number(8),
        ]  # fmt: skip
        return self.call() if self.draw.random() < 0.7 else self.any_of(*rest)

    def mutated(self) -> bytes:
        """Encodes a message with a random request, and changes some of its bytes."""
        draw = self.draw
        bytes_of = bytearray(message(b"\0" + self.one()))
        for _ in range(draw.choice([1, 1, 1, 2, 4])):
            # Usually changes the request, and not the header of the frame.
            at = draw.randrange(
                24 if len(bytes_of) > 25 and draw.random() < 0.9 else 0, len(bytes_of)
            )
            match draw.randrange(5):
                case 0:
                    bytes_of[at] ^= 1 << draw.randrange(8)
                case 1:
                    bytes_of[at] = draw.choice([0, 127, 128, 255])
                case 2:
                    bytes_of[at:at] = draw.randbytes(draw.choice([1, 2, 8]))
                case 3:
                    del bytes_of[at : at + draw.choice([1, 2, 8])]
                case _:
                    bytes_of[at:at] = bytes_of[draw.randrange(len(bytes_of)) :][:16]
        if draw.random() < 0.9 and len(bytes_of) > 24:
            bytes_of[16:24] = struct.pack("<Q", len(bytes_of) - 24)
        return bytes(bytes_of)


class SessionEnded(Exception):
    """The server closed the session, or does not reply."""


class Session:
    """A session of an attacking client."""

    def __init__(self, address: tuple[str, int], draw: random.Random) -> None:
        self._socket = socket.create_connection(address, timeout=TIMEOUT)
        self._socket.sendall(hello(draw.randbytes(16)))
        self._bytes = bytearray()
        self._preface, self._received = False, 0
        #: The number of requests that the server rejected or that failed.
        self.failed = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, what: bytes) -> None:
        try:
            self._socket.sendall(what)
        except OSError as error:
            raise SessionEnded(type(error).__name__) from error

    def sync(self, reply: int) -> None:
        """Waits until the server has run all requests.

        Args:
            reply: A number that identifies the reply to this call.

        Raises:
            SessionEnded: The server closed the session, or did not reply within ``TIMEOUT``.
        """
        self.send(message(b"\0\x09" + number(reply)))
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            for kind, seq, body in self._frames():
                if kind == PING:
                    self.send(frame(PONG, 0, seq))
                elif kind == CLOSE:
                    raise SessionEnded("closed")
                elif kind == MESSAGE and body[:2] == b"\0\x01" and number(reply) in body[2:12]:
                    return
                elif kind == MESSAGE and body[:1] == b"\0":
                    self.failed += body[1:2] in (b"\4", b"\5")
                    self._received += 1
                    self.send(message(b"\x01" + number(self._received)))
        raise SessionEnded("timed out")

    def _frames(self) -> Iterator[tuple[int, int, bytes]]:
        try:
            received = self._socket.recv(1 << 16)
        except TimeoutError:
            raise SessionEnded("timed out") from None
        except OSError as error:
            raise SessionEnded(type(error).__name__) from error
        if not received:
            raise SessionEnded("disconnected")
        assert SECRET not in self._bytes[-100:] + received, "a reply contains the token"
        self._bytes += received
        if not self._preface and len(self._bytes) >= 8:
            self._preface = True
            del self._bytes[:8]
        while self._preface and len(self._bytes) >= 24:
            kind, _, _, _, seq, length = struct.unpack("<BBHIQQ", self._bytes[:24])
            if len(self._bytes) < 24 + length:
                return
            body = bytes(self._bytes[24 : 24 + length])
            del self._bytes[: 24 + length]
            yield kind, seq, body


def on_offer() -> list[str]:
    """Returns the names of the operators that a server offers, and some other names."""
    from tensorstream.remote.server._server import NAMESPACES, SERVER_OPERATORS

    names = [str(name) for name in torch._C._dispatch_get_all_op_names()]
    names = [name for name in names if name.partition("::")[0] in NAMESPACES - {"tensorstream"}]
    return (
        names
        + [f"tensorstream::{name}" for name in SERVER_OPERATORS] * 5
        + ["aten::no_such", "tensorstream::__init__", "x::y"]
    )


def attack(
    address: tuple[str, int], count: int, seed: int, names: list[str], mutate: bool,
    outcomes: collections.Counter[str],
    done: list[int],
) -> None:  # fmt: skip
    """Sends ``count`` requests in many sessions.

    ``outcomes`` counts how the sessions end. Adds the number of requests to ``done[0]``.
    """
    sent, turn = 0, 0
    while sent < count:
        turn += 1
        requests = Requests(seed * 1_000_003 + turn, names)
        try:
            with Session(address, requests.draw) as session:
                for _ in range(6):
                    session.send(message(b"\0" + requests.create()))
                reply = 1_000
                for _ in range(MAX_REQUESTS // GROUP):
                    for _ in range(GROUP):
                        session.send(
                            requests.mutated() if mutate else message(b"\0" + requests.one())
                        )
                        sent += 1
                        done[0] += 1
                    reply += 1
                    session.sync(reply)
                    outcomes["requests refused or failed"] += session.failed
                    session.failed = 0
                outcomes["completed"] += 1
        except SessionEnded as reason:
            outcomes[str(reason)] += 1
        except OSError as error:
            outcomes[f"not connected: {type(error).__name__}"] += 1
            time.sleep(0.1)


def resident(processes: list[int]) -> int:
    """Returns the anonymous memory of these processes, in bytes.

    Memory mapped from files does not count, because other processes may share it.
    """
    total = 0
    for process in processes:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
        total += sum(
            int(kib) << 10
            for kib in re.findall(r"^(?:Anonymous|Swap): +(\d+)", rollup, re.MULTILINE)
        )
    return total


def children(process: int) -> list[int]:
    """Returns the ids of the child processes that the main thread of a process has started."""
    return [
        int(c)
        for c in Path(f"/proc/{process}/task/{process}/children")
        .read_text(encoding="ascii")
        .split()
    ]


class HonestSession:
    """A session that runs operators on its own thread, and compares the results with the CPU."""

    def __init__(self, address: str) -> None:
        self.right, self.error, self._address = 0, "", address
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        from tensorstream.remote import RemoteMachine

        try:
            with RemoteMachine("tcp", self._address, token=SECRET.decode(), retry=0.0) as machine:
                there, here = torch.eye(8, device=machine.device()), torch.eye(8)
                while not self._stop.is_set():
                    x = torch.randn(8, 8)
                    there, here = (there + x.to(machine.device())).tanh(), (here + x).tanh()
                    assert torch.equal(there.cpu(), here), "the result differs from that of the CPU"
                    self.right += 1
                    time.sleep(0.01)
        except BaseException as error:  # `sweep` raises an error
            self.error = repr(error)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


def sweep(
    server: subprocess.Popen[str],
    address: str,
    honest: HonestSession,
    count: int,
    mutate: bool,
    options: Any,
) -> None:
    """Sends ``count`` requests from several clients at once, and prints how the sessions ended."""
    host, port = address.rsplit(":", 1)
    outcomes: collections.Counter[str] = collections.Counter()
    since, done, names = time.monotonic(), [0], on_offer()
    threads = []
    for client in range(options.clients):
        seed = options.seed * 100 + client + 50 * mutate
        share = (host, int(port)), count // options.clients, seed, names, mutate, outcomes, done
        threads.append(threading.Thread(target=attack, args=share))
        threads[-1].start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(1.0)
        if sys.stderr.isatty():
            print(f"\r{done[0]:,} of {count:,}", end="", file=sys.stderr, flush=True)
        assert server.poll() is None, "the server exited"
        assert not honest.error, f"the honest session failed: {honest.error}"
    kind = "mutated" if mutate else "random"
    print(
        f"{done[0]:,} {kind} requests in {time.monotonic() - since:.0f} s; "
        f"sessions: {dict(outcomes)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random", type=int, default=100_000)
    parser.add_argument("--mutated", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        (Path(directory) / "log").open("w+", encoding="utf-8") as log,
    ):
        (Path(directory) / "token").write_bytes(SECRET)
        server = subprocess.Popen(
            [
                sys.executable, "-m", "tensorstream.serve", "--listen", "127.0.0.1:0",
                "--threads", "1",
                "--session-memory", "1GiB", "--token-file", f"{directory}/token",
            ],
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        own = [server.pid, *children(server.pid)]
        honest = HonestSession(address)
        time.sleep(1.0)
        before = resident(own)
        try:
            sweep(server, address, honest, options.random, False, options)
            sweep(server, address, honest, options.mutated, True, options)
            end = time.monotonic() + 90.0
            while len(children(own[1])) > 1 and time.monotonic() < end:
                time.sleep(1.0)
            after, left = resident(own), len(children(own[1]))
        finally:
            honest.end()
            server.send_signal(signal.SIGTERM)
            status = server.wait(30)
        log.seek(0)
        signals = collections.Counter(re.findall(r"its process ended: (\w+)", log.read()))
        print(f"session processes that ended by themselves: {dict(signals)}")
        print(
            f"memory of the server: {before / MIB:.1f} MiB before, {after / MIB:.1f} MiB after; "
            f"{left - 1} sessions left"
        )
        print(f"the honest session got {honest.right:,} right results, and no wrong ones")
        assert status == 0 and not honest.error and abs(after - before) < 64 * MIB
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
