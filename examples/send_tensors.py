# SPDX-License-Identifier: MIT OR Apache-2.0
"""Sends the state of a model and a stream of activations from one process to another.

Run: `python examples/send_tensors.py`. Needs tensorstream.

The receiver keeps a pool of memory, so only the first activations are received into new pages.

Both processes run on this computer. To use two computers, listen on a network address. `listen`
and `connect` then need a token or certificates.
"""

from __future__ import annotations

import multiprocessing
import time

import tensorstream as ts
import torch

STEPS = 50
SHAPE = (8, 1024, 1024)


def sender(address: str) -> None:
    """Connects and sends all tensors. Returns when all of them are delivered."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 1024)
    with ts.connect(address, token="example") as connection:
        connection.send_state_dict(model.state_dict())
        for step in range(STEPS):
            connection.send(torch.full(SHAPE, float(step)), "activations")


def main() -> None:
    with ts.listen(
        "127.0.0.1:0", token="example", pool=ts.PoolConfig.high_throughput()
    ) as listener:
        process = multiprocessing.get_context("spawn").Process(
            target=sender, args=(listener.address,)
        )
        process.start()
        connection = listener.accept(timeout=60)

    state = connection.recv_state_dict()
    assert state is not None
    print(f"state: {', '.join(f'{name} {tuple(t.shape)}' for name, t in state.items())}")

    begin, steps = time.perf_counter(), 0
    for received in connection:
        assert isinstance(received, ts.Tensor)
        # The tensor shares the memory that the socket was read into. The memory returns to the
        # pool when the tensor is deleted.
        assert received.to_torch()[-1, -1, -1] == steps
        steps += 1
    seconds = time.perf_counter() - begin
    nbytes = steps * torch.Size(SHAPE).numel() * 4
    print(f"{steps} tensors, {nbytes / seconds / 1e9:.1f} GB/s")
    pool = connection.stats().get("pool")
    if pool is not None:
        print(f"received into reused memory: {pool['hit_rate']:.0f}%")
    connection.close()
    process.join()
    print(f"all delivered: {steps == STEPS and process.exitcode == 0}")


if __name__ == "__main__":
    main()
