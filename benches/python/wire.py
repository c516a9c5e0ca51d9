# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares TensorStream with other libraries, for sending tensors between two Python processes.

`cargo xtask bench wire-peers`. The contenders are raw sockets, Python's TLS, shared memory, Arrow
Flight, gRPC and ZeroMQ.

A child process sends tensors, which are parts of a float32 array. This process measures the time
from its request until the last tensor is in a numpy array. It reads the last element of each array.

- Each contender is used as its users would use it. Raw sockets send 1 MiB or a whole tensor at a
  time, and receive into a reused array. Flight and ZeroMQ return their own memory without a copy.
  gRPC sends parts of 1 MiB, and this process copies them into an array.
- Rounds are interleaved. Ratios of rates are medians of the ratios of each round.
- Each end is pinned to its own core, unless ``--unpinned`` is given.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20
#: The largest tensor, in bytes.
TOP = 256 * MIB
#: The size of a tensor in bytes, and the number of tensors in a round, by name of the size.
SIZES = {"1 MiB": (MIB, 256), "16 MiB": (16 * MIB, 16), "256 MiB": (TOP, 4)}
ROUNDS, PINGS, MESSAGE = 10, 300, bytes(64)
OURS = ("ours, TCP", "ours, TLS", "ours, shared memory")
KINDS = (
    *OURS,
    "raw TCP",
    "raw TCP, whole",
    "Python TLS",
    "shared memory",
    "Arrow Flight",
    "gRPC",
    "ZeroMQ",
)

Arrays = Callable[[int, int], Iterator[np.ndarray[Any, Any]]]


def fill(
    connection: socket.socket, view: memoryview, piece: int = 256 << 10, flags: int = 0
) -> None:
    """Fills a buffer from a socket, ``piece`` bytes at a time."""
    at = 0
    while at < len(view):
        count = connection.recv_into(view[at : at + piece], 0, flags)
        if not count:
            raise EOFError
        at += count


def slots(segment: SharedMemory) -> list[np.ndarray[Any, Any]]:
    """Returns the two arrays of a shared memory segment. The ends use the arrays in turn."""
    return [np.frombuffer(segment.buf, np.float32, TOP // 4, at * TOP) for at in (0, 1)]


def serve(kind: str, control: Any, directory: str, segment: str | None) -> None:
    """Runs the child process, which sends tensors on request.

    First sends its address to ``control``.
    """
    pin(1)
    array = np.ones(TOP // 4, np.float32)
    view = memoryview(array).cast("B")
    if kind == "Arrow Flight":
        return serve_flight(array, control)
    if kind == "gRPC":
        return serve_grpc(view, control)
    if kind == "ZeroMQ":
        import zmq

        zmq_socket = zmq.Context().socket(zmq.PAIR)
        zmq_socket.bind("tcp://127.0.0.1:*")
        control.send(zmq_socket.getsockopt_string(zmq.LAST_ENDPOINT))
        return run_requests(
            control,
            lambda n, _: zmq_socket.send(view[:n], copy=False),
            lambda: zmq_socket.send(zmq_socket.recv()),
        )
    if kind in OURS:
        return serve_ours(kind, array, control, directory)
    listener = socket.create_server(("127.0.0.1", 0))
    control.send(listener.getsockname())
    connection = listener.accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if kind == "Python TLS":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(f"{directory}/cert.pem", f"{directory}/key.pem")
        connection = context.wrap_socket(connection, server_side=True)
    own = SharedMemory(segment) if segment else None
    two = slots(own) if own else None
    echoed = memoryview(bytearray(64))

    def send(n: int, number: int) -> None:
        if two:
            connection.recv(1)
            np.copyto(two[number & 1][: n // 4], array[: n // 4])
            connection.send(b"f")
            return
        step = n if kind.endswith("whole") else MIB
        for at in range(0, n, step):
            connection.sendall(view[at : min(at + step, n)])

    def echo() -> None:
        fill(connection, echoed)
        connection.sendall(echoed)

    return run_requests(control, send, echo)


def run_requests(
    control: Any, send: Callable[[int, int], object], echo: Callable[[], object]
) -> None:
    """Serves the requests that arrive from ``control``, until None arrives.

    A request consists of a size ``n`` and a count. Calls ``send`` count times, or ``echo`` if ``n``
    is 0.
    """
    for n, count in iter(control.recv, None):
        for number in range(count):
            if n:
                send(n, number)
            else:
                echo()


def serve_ours(kind: str, array: np.ndarray[Any, Any], control: Any, directory: str) -> None:
    import tensorstream as ts

    at = f"unix:{directory}/shared" if "shared" in kind else "127.0.0.1:0"
    tls = {"cert": f"{directory}/cert.pem", "key": f"{directory}/key.pem"} if "TLS" in kind else {}
    with ts.listen(at, **tls) as listener:
        control.send(listener.address)
        connection = listener.accept()
    assert connection is not None
    parts = {n: ts.Tensor.from_dlpack(array[: n // 4]) for n, _ in SIZES.values()}

    def echo() -> None:
        message = connection.recv()
        assert isinstance(message, bytes)
        connection.send_message(message)

    run_requests(control, lambda n, _: connection.send(parts[n]), echo)


def serve_flight(array: np.ndarray[Any, Any], control: Any) -> None:
    import pyarrow as pa
    from pyarrow import flight

    class Server(flight.FlightServerBase):
        def do_get(self, _: Any, ticket: Any) -> Any:
            n, count = json.loads(ticket.ticket)
            batch = pa.record_batch([pa.array(array[: n // 4])], ["t"])
            return flight.GeneratorStream(batch.schema, (batch for _ in range(count)))

    server = Server("grpc://127.0.0.1:0")
    control.send(f"grpc://127.0.0.1:{server.port}")
    server.serve()


def serve_grpc(view: memoryview, control: Any) -> None:
    import grpc

    def pull(request: bytes, _: Any) -> Iterator[bytes]:
        n, count = json.loads(request)
        return (bytes(view[at : at + MIB]) for _ in range(count) for at in range(0, n, MIB))

    calls = {
        "pull": grpc.unary_stream_rpc_method_handler(pull),
        "echo": grpc.unary_unary_rpc_method_handler(lambda request, _: request),
    }
    server = grpc.server(ThreadPoolExecutor(1), [grpc.method_handlers_generic_handler("p", calls)])
    control.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    server.wait_for_termination()


def connect(
    kind: str, control: Any, address: Any, directory: str, segment: SharedMemory | None
) -> tuple[Arrays, Callable[[], object] | None]:
    """Connects to a child process.

    Returns a function that requests and receives arrays, and a function that sends a message and
    waits for its echo. The latter is None for contenders without messages.
    """
    memory = np.zeros(TOP // 4, np.float32)
    view = memoryview(memory).cast("B")

    def requested(receive: Callable[[int, int, int], np.ndarray[Any, Any]]) -> Arrays:
        def arrays(n: int, count: int) -> Iterator[np.ndarray[Any, Any]]:
            control.send((n, count))
            for number in range(count):
                yield receive(n, number, count)

        return arrays

    if kind == "Arrow Flight":
        from pyarrow import flight

        client = flight.connect(address)

        def batches(n: int, count: int) -> Iterator[np.ndarray[Any, Any]]:
            for batch in client.do_get(flight.Ticket(json.dumps([n, count]).encode())):
                yield batch.data.column(0).to_numpy(zero_copy_only=True)

        return batches, None
    if kind == "gRPC":
        import grpc

        channel = grpc.insecure_channel(address)
        stream, unary = channel.unary_stream("/p/pull"), channel.unary_unary("/p/echo")

        def chunks(n: int, count: int) -> Iterator[np.ndarray[Any, Any]]:
            for number, part in enumerate(stream(json.dumps([n, count]).encode())):
                at = number * MIB % n
                view[at : at + len(part)] = part
                if at + len(part) == n:
                    yield memory[: n // 4]

        return chunks, lambda: unary(MESSAGE)
    if kind == "ZeroMQ":
        import zmq

        zmq_socket = zmq.Context().socket(zmq.PAIR)
        zmq_socket.connect(address)
        receive = requested(
            lambda *_: np.frombuffer(zmq_socket.recv(copy=False).buffer, np.float32)
        )
        return receive, lambda: (zmq_socket.send(MESSAGE), zmq_socket.recv())
    if kind in OURS:
        import tensorstream as ts

        connection = ts.connect(
            address, **({"ca": f"{directory}/cert.pem"} if "TLS" in kind else {})
        )
        into = {n: ts.Tensor.from_dlpack(memory[: n // 4]) for n, _ in SIZES.values()}

        def take(n: int, *_: int) -> np.ndarray[Any, Any]:
            assert connection.recv(into=into[n]) is not None
            return memory[: n // 4]

        return requested(take), lambda: (connection.send_message(MESSAGE), connection.recv())
    raw = socket.create_connection(address)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if kind == "Python TLS":
        context = ssl.create_default_context(cafile=f"{directory}/cert.pem")
        raw = context.wrap_socket(raw, server_hostname="127.0.0.1")
    two = slots(segment) if segment else None
    whole = (TOP, socket.MSG_WAITALL) if kind.endswith("whole") else ()
    echoed = memoryview(bytearray(64))

    def receive_raw(n: int, number: int, count: int) -> np.ndarray[Any, Any]:
        if not two:
            fill(raw, view[:n], *whole)
            return memory[: n // 4]
        # Each byte grants the other end a slot: two at the start, then one after each slot is read.
        raw.send(b"c" * min(2, count) if number == 0 else b"c" * (number + 1 < count))
        raw.recv(1)
        np.copyto(memory[: n // 4], two[number & 1][: n // 4])
        return memory[: n // 4]

    return requested(receive_raw), None if two else lambda: (
        raw.sendall(MESSAGE),
        fill(raw, echoed),
    )


def pin(core: int) -> None:
    """Pins this process to a core, unless ``--unpinned`` is given.

    Without pinning, both ends may happen to share a core. Pinning slows down libraries with several
    threads more than others.
    """
    if "--unpinned" in sys.argv:
        return
    os.sched_setaffinity(0, {core} & os.sched_getaffinity(0) or os.sched_getaffinity(0))


def main() -> int:
    multiprocessing.set_start_method("spawn")
    pin(0)
    rates: dict[tuple[str, str], list[float]] = {}
    trips: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        certificate(directory)
        peers: dict[str, tuple[Any, Any, Arrays, Any]] = {}
        segment = SharedMemory(create=True, size=2 * TOP)
        for kind in [kind for kind in sys.argv[1:] if kind in KINDS] or KINDS:
            near, far = multiprocessing.Pipe()
            shared = segment if kind == "shared memory" else None
            arguments = (kind, far, directory, shared and shared.name)
            process = multiprocessing.Process(target=serve, args=arguments, daemon=True)
            process.start()
            peers[kind] = (process, near, *connect(kind, near, near.recv(), directory, shared))
        for turn in range(ROUNDS + 1):  # The first is a warm-up.
            for size, (n, count) in SIZES.items():
                # The contenders take turns to run first, because the previous contender affects the
                # contents of the caches.
                for kind in KINDS[turn % len(KINDS) :] + KINDS[: turn % len(KINDS)]:
                    if kind not in peers:
                        continue
                    arrays = peers[kind][2]
                    began = time.perf_counter()
                    for array in arrays(n, count):
                        assert array.nbytes == n and array[-1] == 1
                        if array.flags.writeable:
                            array[-1] = 0
                    rate = n * count / 1e9 / (time.perf_counter() - began)
                    if turn:
                        rates.setdefault((kind, size), []).append(rate)
            for kind, (_, near, _, trip) in peers.items():
                if trip:
                    times = list(pings(near, trip, kind))
                    if turn:
                        trips.setdefault(kind, []).append(statistics.median(times))
        for process, *_ in peers.values():
            process.kill()
            process.join()
        segment.unlink()
    report(list(peers), rates, trips)
    sys.stdout.flush()
    os._exit(0)  # Skips closing the segment, which would fail because views of it still exist.


def pings(control: Any, trip: Callable[[], object], kind: str) -> Iterator[float]:
    """Yields the duration of each of ``PINGS`` round trips, in microseconds."""
    if kind != "gRPC":
        control.send((0, PINGS))
    for _ in range(PINGS):
        began = time.perf_counter()
        trip()
        yield (time.perf_counter() - began) * 1e6


def report(
    kinds: list[str], rates: dict[tuple[str, str], list[float]], trips: dict[str, list[float]]
) -> None:
    """Prints a table of rates, round trips and ratios."""
    print(
        f"| {ROUNDS} rounds, medians | "
        + " | ".join(f"{size}, GB/s" for size in SIZES)
        + " | round trip of 64 bytes, µs |"
    )
    print("|---|" + "---|" * (len(SIZES) + 1))
    for kind in kinds:
        cells = [f"{statistics.median(rates[kind, size]):.2f}" for size in SIZES]
        trip = f"{statistics.median(trips[kind]):.0f}" if kind in trips else ""
        print(f"| {kind} | " + " | ".join(cells) + f" | {trip} |")
    for ours, theirs in (
        *(("ours, TCP", kind) for kind in kinds if kind not in OURS),
        ("ours, TLS", "Python TLS"),
        (OURS[2], "ours, TCP"),
        (OURS[2], "shared memory"),
    ):
        if ours in kinds and theirs in kinds:
            pairs = [zip(rates[ours, size], rates[theirs, size], strict=True) for size in SIZES]
            cells = [f"{statistics.median(a / b for a, b in pair):.2f}" for pair in pairs]
            both = trips.get(ours), trips.get(theirs)
            trip = (
                f"{statistics.median(both[0]) / statistics.median(both[1]):.2f}"
                if both[0] and both[1]
                else ""
            )
            print(f"| {ours}, of {theirs} | " + " | ".join(cells) + f" | {trip} |")


def certificate(directory: str) -> None:
    """Writes a self-signed certificate for 127.0.0.1 and its key into a directory."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 "
    command += "-subj /CN=127.0.0.1 "
    command += "-addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE "
    command += "-keyout key.pem -out cert.pem"
    subprocess.run(command.split(), check=True, capture_output=True, cwd=Path(directory))


if __name__ == "__main__":
    sys.exit(main())
