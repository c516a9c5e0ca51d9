# SPDX-License-Identifier: MIT OR Apache-2.0
"""Trains a replica of a model on each of several machines, and compares with local training.

Run: `python examples/data_parallel.py [ray [ADDRESS] | ssh HOST...]`. Needs tensorstream[remote],
and Ray for `ray`.

Each machine computes the gradients of its share of a batch. The first machine averages them, and
all apply the average, so that the replicas stay equal. Gradients are copied from machine to machine
if these can reach each other. Operators run asynchronously, so all machines compute at a time.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack

import torch
from machines import start
from torch import nn

STEPS = 10
ROWS = 64


def network() -> nn.Module:
    """Returns a network with the same weights at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 1))


def average(replicas: list[nn.Module]) -> None:
    """Replaces the gradients of all replicas by their average."""
    for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient.to(total.device)
        total /= len(gradients)
        for gradient in gradients:
            gradient.copy_(total)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the inputs and the targets of each step."""
    torch.manual_seed(1)
    return [(torch.randn(ROWS, 32), torch.randn(ROWS, 1)) for _ in range(STEPS)]


def train(devices: list[torch.device]) -> list[float]:
    """Trains a replica on each device. Returns the losses of the whole batches."""
    replicas = [copy.deepcopy(network()).to(device) for device in devices]
    optimizers = [torch.optim.AdamW(replica.parameters(), lr=1e-3) for replica in replicas]
    losses = []
    for inputs, targets in batches():
        parts = []
        shares = zip(inputs.chunk(len(devices)), targets.chunk(len(devices)), strict=True)
        for replica, device, (x, y) in zip(replicas, devices, shares, strict=True):
            loss = nn.functional.mse_loss(replica(x.to(device)), y.to(device))
            replica.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # PyTorch does not type it
            parts.append(loss.detach())
        average(replicas)
        for optimizer in optimizers:
            optimizer.step()
        # Reading the losses is the only wait of a step.
        losses.append(sum(part.item() for part in parts) / len(parts))
    return losses


def main() -> None:
    with ExitStack() as stack:
        machines = start(stack)
        print(f"training on {len(machines)} machines")
        losses = train([machine.device() for machine in machines])
    local = train([torch.device("cpu")])
    print(f"losses from {losses[0]:.4f} to {losses[-1]:.4f}")
    close = torch.allclose(torch.tensor(losses), torch.tensor(local), rtol=1e-4)
    print(f"losses as on this computer, up to rounding: {close}")


if __name__ == "__main__":
    main()
