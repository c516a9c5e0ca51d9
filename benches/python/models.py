# SPDX-License-Identifier: MIT OR Apache-2.0
"""Helpers for the benchmarks: a generated Llama, memory limits, cold caches, fio, decoding."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

ROOT = Path(__file__).parents[2]
SCRATCH = ROOT / "target" / "bench"
MIB = 2**20


def llama_1b() -> Path:
    """Returns the directory of a random 1.1B Llama: 2.2 GB of bf16 in three shards.

    Creates the model if it does not exist.
    """
    return _llama("llama-1.1b", 22)


def llama_3b() -> Path:
    """Returns the directory of one with 2.6B parameters: 5.2 GB, with 56 layers of the same size.

    Creates the model if it does not exist.
    """
    return _llama("llama-2.6b", 56)


def llama(layers: int) -> Path:
    """Returns the directory of one with this many layers of 88 MB. Creates it in memory."""
    return _llama(f"llama-{layers}-layers", layers)


def _llama(name: str, layers: int) -> Path:
    path = SCRATCH / name
    if not (path / "model.safetensors.index.json").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        print(f"creating {path}", flush=True)
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=layers,
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
    """Empties the page cache, or prints a warning if this is not permitted."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        print("cannot drop the page cache without root: reads may be warm", file=sys.stderr)


@contextmanager
def memory_group(limit: int, name: str = "") -> Iterator[Path]:
    """Yields the directory of a memory cgroup of version 1 or 2, for at most ``limit`` bytes.

    The limit includes the page cache. Processes join it with ``join_group``.

    Raises:
        OSError: This user cannot create one.
    """
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    is_v1 = (v1 / "memory.limit_in_bytes").exists()
    group = (v1 if is_v1 else v2) / f"tensorstream-{os.getpid()}{name}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit))
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Removes a cgroup, when its processes have ended."""
    end = time.monotonic() + 10
    while (group / "cgroup.procs").read_text() and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.2)
    group.rmdir()


def join_group() -> None:
    """Moves this process to the cgroup of the environment variable ``BENCH_GROUP``."""
    Path(os.environ["BENCH_GROUP"], "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def memory_cap(limit: int) -> Iterator[list[str]]:
    """Yields the start of a command line that limits a program to ``limit`` bytes.

    The limit includes the page cache. Uses a memory cgroup, or else a systemd scope. If neither
    works, prints a warning and yields an empty list.
    """
    scope = [
        "systemd-run",
        "--scope",
        "--quiet",
        f"--property=MemoryMax={limit}",
        "--property=MemorySwapMax=0",
    ]
    scope = scope if os.geteuid() == 0 else [*scope, "--user"]
    with ExitStack() as stack:
        try:
            group = stack.enter_context(memory_group(limit))
        except OSError as error:
            if succeeds([*scope, "true"]):
                yield scope
            else:
                print(
                    f"cannot limit memory, so programs may use all of it: {error}",
                    file=sys.stderr,
                )
                yield []
            return
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "capped"]


def succeeds(command: list[str]) -> bool:
    """Returns whether a command exists and exits with 0 within ten seconds."""
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def child(prefix: list[str], *args: str) -> dict[str, Any]:
    """Runs the current script in a new process, as one contender.

    Args:
        prefix: The start of the command line, as from `memory_cap`.
        args: The arguments of the script.

    Returns:
        The JSON in the last line of the output, or a dictionary with "error" if the process failed.
    """
    command = [*prefix, sys.executable, sys.argv[0], *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        return {
            "error": (done.stderr or f"status {done.returncode}").strip().splitlines()[-1][:160]
        }
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def decode(model: Any, tokens: int) -> tuple[list[int], list[float]]:
    """Decodes greedily after a prompt of 16 tokens. Returns the tokens, and the seconds of each."""
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
    """Reserves huge pages of 2 MiB for fio until the context ends. Yields whether this worked."""
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
    """Reads a file with fio and direct I/O, with 16 requests of 4 MiB in flight.

    Args:
        file: The file to read.
        seconds: How long to read.
        engine: The I/O engine of fio.
        huge: Whether to read into huge pages, which need fewer segments for each request.
        fixed: Whether to register the memory and the file with the kernel.

    Returns:
        The rate in bytes per second.
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
        sys.exit("cannot find the program fio: apt-get install fio")
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])


def peak_rss() -> int:
    """Returns the peak resident memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) * 1024


def spread(values: list[float]) -> str:
    """Formats the median, and the range in parentheses."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def read_into_memory(path: Path) -> dict[str, Any]:
    """Reads all tensors of a checkpoint into allocated memory, without mapping the files."""
    import tensorstream as ts
    import torch
    from tensorstream._dtypes import TORCH_DTYPES

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
