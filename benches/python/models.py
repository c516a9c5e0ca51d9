# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the benchmarks share: a generated Llama, memory caps, cold caches, a decode loop."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

ROOT = Path(__file__).parents[2]
SCRATCH = ROOT / "target" / "bench"
MIB = 2**20


def llama_1b() -> Path:
    """A random checkpoint of a 1.1B Llama's shape: 2.2 GB of bf16 in three shards, made once."""
    path = SCRATCH / "llama-1.1b"
    if not (path / "model.safetensors.index.json").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        print(f"making {path} (2.2 GB)", flush=True)
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
            vocab_size=32000,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            dtype="bfloat16",
        )
        torch.set_default_dtype(torch.bfloat16)
        LlamaForCausalLM(config).save_pretrained(path, max_shard_size="1GB")
        torch.set_default_dtype(torch.float32)
    return path


def drop_caches() -> None:
    """Makes the next reads cold; says once when it may not."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        print("(not root: the page cache stays warm)", file=sys.stderr)


@contextmanager
def memory_cap(limit: int) -> Iterator[list[str]]:
    """The start of a command line that runs what follows under ``limit`` bytes, page cache
    included.

    A memory cgroup of version 1 or 2 if one can be made, else a scope of systemd; empty, and said,
    where neither can.
    """
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    if (v1 / "memory.limit_in_bytes").exists():
        group, name = v1 / f"tensorstream-{os.getpid()}", "memory.limit_in_bytes"
    else:
        group, name = v2 / f"tensorstream-{os.getpid()}", "memory.max"
    scope = [
        "systemd-run",
        "--scope",
        "--quiet",
        f"--property=MemoryMax={limit}",
        "--property=MemorySwapMax=0",
    ]
    scope = scope if os.geteuid() == 0 else [*scope, "--user"]
    try:
        group.mkdir()
        (group / name).write_text(str(limit))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        if succeeds([*scope, "true"]):
            yield scope
        else:
            print(
                f"(no memory cap, so everything runs in all the memory there is: {error})",
                file=sys.stderr,
            )
            yield []
        return
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "capped"]
    finally:
        time.sleep(0.2)
        group.rmdir()


def succeeds(command: list[str]) -> bool:
    """Whether a command is there and ends well."""
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def child(prefix: list[str], *args: str) -> dict[str, Any]:
    """Runs this benchmark's script again, as one contender; what it printed last, as JSON."""
    command = [*prefix, sys.executable, sys.argv[0], *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        return {
            "error": (done.stderr or f"status {done.returncode}").strip().splitlines()[-1][:160]
        }
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def decode(model: Any, tokens: int) -> tuple[list[int], list[float]]:
    """Greedy decoding after a prompt of 16: the tokens, and the seconds of each step."""
    import torch

    ids, past, out, seconds = torch.arange(1, 17).unsqueeze(0), None, [], []
    with torch.inference_mode():
        for _ in range(tokens):
            began = time.perf_counter()
            result = model(input_ids=ids, past_key_values=past, use_cache=True)
            past, ids = result.past_key_values, result.logits[:, -1:].argmax(-1)
            out.append(int(ids))
            seconds.append(time.perf_counter() - began)
    return out, seconds


@contextmanager
def huge_pages(count: int = 64) -> Iterator[bool]:
    """Reserves huge pages of 2 MiB for fio, and gives them back; whether it may."""
    pool = Path("/proc/sys/vm/nr_hugepages")
    try:
        before = pool.read_text()
        pool.write_text(str(count))
    except OSError:
        yield False
        return
    try:
        yield int(pool.read_text()) >= count
    finally:
        pool.write_text(before)


def fio(
    file: Path, seconds: int, *, engine: str = "libaio", huge: bool = False, fixed: bool = False
) -> float:
    """Bytes per second that fio reads from ``file`` directly, 4 MiB at a time, 16 in flight.

    Into ordinary memory, or into huge pages: a disk may take far fewer segments a request then.
    ``fixed`` memory is registered with the kernel.
    """
    options = (
        f"--rw=read --bs=4M --direct=1 --ioengine={engine} --iodepth=16 --time_based "
        "--output-format=json"
    )
    command = ["fio", "--name=read", f"--filename={file}", f"--runtime={seconds}", *options.split()]
    if huge:
        command.append("--mem=mmaphuge")
    if fixed:
        command += ["--fixedbufs", "--registerfiles"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        sys.exit("this benchmark needs fio: apt-get install fio")
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def peak_rss() -> int:
    """The most memory this process has had, in bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) * 1024


def spread(values: list[float]) -> str:
    """Median, and the range around it."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def read_into_memory(path: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint in memory of its own, read and not mapped."""
    import tensorstream as ts
    import torch
    from tensorstream._symbolic_tensor import TORCH_DTYPES

    checkpoint = ts._native.Checkpoint(path)
    handles = [os.open(file, os.O_RDONLY) for file, _, _ in checkpoint.files()]
    tensors = {}
    for name in checkpoint.names():
        dtype, shape, parts = checkpoint.entry(name)
        tensor = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
        view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        (file, offset, length) = parts[0]
        done = 0
        while done < length:
            done += os.preadv(handles[file], [view[done:]], offset + done)
        tensors[name] = tensor
    for handle in handles:
        os.close(handle)
    return tensors
