# SPDX-License-Identifier: MIT OR Apache-2.0
"""Programs that load and receive tensors to the stand-in accelerator. See ``on_stand_in.py``."""

from __future__ import annotations

import gc
import tempfile
import threading
from pathlib import Path
from typing import Any

import tensorstream as ts
import torch
from on_stand_in import DEVICE, OTHER, Library, main, program


@program
def files() -> None:
    """Files are loaded to the device, also into tensors that are there."""
    tensors = {str(size): torch.randn(size, 30) for size in (0, 1, 100, 5000)}
    tensors["half"] = torch.randn(10).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as directory:
        for file in ("a.ts", "a.safetensors"):
            path = Path(directory) / file
            ts.save_file(tensors, path)
            loaded = ts.load_file(path, device=DEVICE)
            targets = {name: torch.zeros_like(each).to(DEVICE) for name, each in tensors.items()}
            targets["100"] = torch.zeros_like(tensors["100"])
            ts.load_into(targets, path)
            with ts.safe_open(path, "pt", device=DEVICE) as opened:
                for name, expected in tensors.items():
                    for got in (loaded[name], targets[name], opened.get_tensor(name)):
                        assert got.device.type == DEVICE[:-2] or got is targets["100"], name
                        assert torch.equal(got.cpu(), expected), name
            try:
                ts.load_into({"1": torch.zeros(1, 31).to(DEVICE)}, path)
            except ts.ConfigurationError as error:
                assert "[1, 30], got a tensor of torch.float32 [1, 31]" in str(error), error
            else:
                raise AssertionError("another shape was accepted")


@program
def network() -> None:
    """Tensors are received into the memory of the device, and it is freed after its last use."""
    library = Library()
    sizes = (0, 1, 3000, 1_000_000, 3_000_000)
    tensors = {str(size): torch.randn(size) for size in sizes}
    tensors["transposed"] = torch.randn(40, 30).t()
    tensors["half"] = torch.randn(100).to(torch.bfloat16)
    tied = torch.randn(5000)
    tensors |= {"first": tied, "second": tied[100:200]}
    for pages in (True, False):
        with (
            tempfile.TemporaryDirectory() as directory,
            ts.listen(f"unix:{directory}/socket", shared_memory=pages) as listener,
        ):

            def send(pages: bool = pages) -> None:
                with ts.connect(listener.address, shared_memory=pages) as connection:
                    for name, tensor in tensors.items():
                        connection.send(tensor, name, checksums=True)
                    connection.send_state_dict(tensors, compression="split")
                    connection.send(torch.zeros(100), "last")

            sender = threading.Thread(target=send)
            sender.start()
            with listener.accept() as connection, library.delays(2000, int(pages)):
                for name, tensor in tensors.items():
                    received: Any = connection.recv(device=DEVICE)
                    assert (received.name, received.device) == (name, DEVICE)
                    _check(received, tensor)
                named: Any = connection.recv_state_dict(device=DEVICE)
                assert named.keys() == tensors.keys()
                for name, tensor in tensors.items():
                    _check(named[name], tensor)
                assert named["first"].shares_memory(named["second"])
                assert named["second"].to_torch().device == torch.device(DEVICE)
                for words, arguments in (
                    ("either `into` or", {"into": torch.zeros(100), "device": DEVICE}),
                    ("9", {"device": f"{OTHER[:-1]}9"}),
                ):
                    try:
                        connection.recv(**arguments)
                    except ts.ConfigurationError as error:
                        assert words in str(error), error
                    else:
                        raise AssertionError("was accepted")
                last: Any = connection.recv(device="cpu")
                assert (last.device, last.name) == ("cpu", "last")
            sender.join()
            del received, named
            gc.collect()
            torch.accelerator.synchronize()
    # A segment of 64 MiB stays, and 2 MiB for each tensor of 4 MiB and more do not.
    assert library.counters()["bytes"] <= (64 << 20) + (4 << 20), library.counters()


def _check(received: Any, expected: torch.Tensor) -> None:
    """Compares a received tensor, which a slow copy on the device uses last."""
    there = received.to_torch()
    assert there.device == torch.device(DEVICE) and there.stride() == expected.stride()
    copied = there + 1
    del there, received
    assert torch.equal(copied.cpu(), expected + 1)


if __name__ == "__main__":
    main()
