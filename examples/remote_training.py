# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains on a remote machine, shows where the program waits, and compares with local training.

Run: `python examples/remote_training.py [HOST:PORT]`. Needs tensorstream[remote].

Without an address, the machine is a process on this computer. With an address, it is a computer
that runs `tensorstream serve`. Set the environment variable TENSORSTREAM_TOKEN to the token of that
server. If the server uses TLS, set TENSORSTREAM_CA to a file with the certificate of the authority
that signed the server's certificate.
"""

from __future__ import annotations

import os
import sys

import torch
from tensorstream.remote import RemoteMachine

STEPS = 20


def train(device: torch.device) -> list[torch.Tensor]:
    """Trains a small network on a device. Returns the losses, which are on the same device."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)
    ).to(device)
    inputs, targets = torch.randn(512, 64).to(device), torch.randn(512, 1).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.mse_loss(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch does not type it
        optimizer.step()
        losses.append(loss.detach())
    return losses


def connect() -> RemoteMachine:
    """Connects to the address on the command line, or starts a local machine."""
    if len(sys.argv) > 1:
        return RemoteMachine.tcp(
            sys.argv[1],
            token=os.environ.get("TENSORSTREAM_TOKEN"),
            ca=os.environ.get("TENSORSTREAM_CA"),
        )
    return RemoteMachine.local()


def main() -> None:
    with connect() as machine:
        print(f"training on {machine.device()}")
        losses = train(machine.device())
        # The program does not wait for operators. It waits when it reads a value, which it does
        # here once for all losses.
        remote = torch.stack(losses).cpu()
        stats = machine.stats()
        print(f"{stats['operators']} operators in {stats['batches']} batches")
        for wait in machine.waits():
            print(f"waited {wait.seconds * 1e3:.1f} ms, {wait.count} times, at {wait.place}")
    local = torch.stack(train(torch.device("cpu")))
    print(f"losses from {remote[0]:.4f} to {remote[-1]:.4f}")
    print(f"same losses as on this computer: {torch.equal(remote, local)}")


if __name__ == "__main__":
    main()
