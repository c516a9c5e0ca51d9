# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whole checkpoints into memory: `ts.load_file` beside what else loads them, nine interleaved rounds.

`cargo xtask bench load`. Every contender runs in a process of its own, as its users call it; the figure is the file's
bytes (compressed: those it stands for) over the seconds of that one call, without imports. Cold: the page cache is
emptied before. "Into memory that is there" is `ts.load_into`, on tensors that have been written to. Contenders take
turns in random order, after a process that has touched more memory than they need.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models import SCRATCH, child, drop_caches, fio, huge_pages, llama_1b, make_memory_present, spread

ROUNDS = 9
#: For ZipNN, which wants all of it in memory twice.
ZIPPED_BYTES = 512 << 20


def main() -> int:
    if len(sys.argv) > 1:
        name, *rest = sys.argv[1:]
        print(json.dumps(CONTENDERS[name](*rest)))
        return 0
    shards = sorted(str(path) for path in llama_1b().glob("*.safetensors"))
    container, packed, zipped = _made(Path(shards[0]))
    cold = {
        "ts.load_file, safetensors": ("ours", str(llama_1b())),
        "ts.load_file, .ts raw, verified": ("ours", container),
        "fastsafetensors": ("fastsafetensors", *shards),
        "Run:ai streamer": ("runai", *shards),
        "safetensors, touched": ("safetensors", *shards),
    }
    seen: dict[str, list[float]] = defaultdict(list)
    others = {
        "again": ("again", str(llama_1b())),
        "warm": ("warm", container),
        "packed": ("packed", packed),
        "packed into": ("packed_into", packed),
        "zipnn": ("zipnn", zipped),
    }
    contenders = [*cold.items(), *others.items()]
    with huge_pages() as huge:
        for number in range(ROUNDS):
            drop_caches()
            seen["fio"].append(fio(Path(shards[0]), 2, huge=huge) / 1e9)
            seen["fio, ordinary pages"].append(fio(Path(shards[0]), 1) / 1e9)
            random.shuffle(contenders)
            for name, arguments in contenders:
                make_memory_present()
                drop_caches()
                _note(seen, name, child([], *arguments))
            print(f"round {number}: " + ", ".join(f"{k} {v[-1]:.2f}" for k, v in seen.items()), flush=True)
    best_peer = [max(seen[name][i] for name in list(cold)[2:]) for i in range(ROUNDS)]
    print(f"\nfio into {'huge' if huge else 'ordinary'} pages; ratios are of the same round, median (range)\n")
    print("| cold | GB/s, median (range) | of fio | of the best peer |\n|---|---|---|---|")
    print(f"| fio, O_DIRECT | {spread(seen['fio'])} | | |")
    print(f"| fio, O_DIRECT, ordinary pages | {spread(seen['fio, ordinary pages'])} | | |")
    for name in [*cold, "again"]:
        label = "ts.load_into, safetensors, into memory that is there" if name == "again" else name
        ratios = f"{_pairs(seen[name], seen['fio'])} | {_pairs(seen[name], best_peer)}"
        print(f"| {label} | {spread(seen[name])} | {ratios} |")
    print("\n| warm | GB/s, median (range) | ratio |\n|---|---|---|")
    for name, label, other in (
        ("warm", "ts.load_into, .ts raw, into memory that is there, not verified", "memcpy"),
        ("warm verified", "the same, verified", "memcpy"),
        ("memcpy", "memcpy, one thread, into memory that is there", None),
        ("packed", "ts.load_file, .ts by split, verified", "zipnn"),
        ("packed into", "ts.load_into, the same, into memory that is there", "zipnn"),
        ("zipnn", "ZipNN, as called", None),
    ):
        ratio = f"{_pairs(seen[name], seen[other])} of {other}" if other else ""
        print(f"| {label} | {spread(seen[name])} | {ratio} |")
    print("\n| a view of a raw tensor | microseconds, median (range) |\n|---|---|")
    for name in ("view of 8 KiB", "view of 131 MB"):
        print(f"| {name} | {spread(seen[name])} |")
    return 0


def _note(seen: dict[str, list[float]], name: str, result: dict[str, Any]) -> None:
    if "error" in result:
        sys.exit(f"{name}: {result['error']}")
    for key, value in result.items():
        seen[name if key == "rate" else key].append(value)


def _pairs(ours: list[float], theirs: list[float]) -> str:
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def _made(shard: Path) -> tuple[str, str, str]:
    """The model as one raw .ts; the first half of a GiB of its weights by the split, and by ZipNN."""
    import tensorstream as ts
    import torch

    container, packed, zipped = (SCRATCH / name for name in ("load.ts", "load-split.ts", "load.zipnn"))
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
        raw = b"".join(tensor.flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
        coder = zipnn.ZipNN(bytearray_dtype="bfloat16", input_format="byte")
        zipped.write_bytes(coder.compress(bytearray(raw)))
    return str(container), str(packed), str(zipped)


def _timed(load: Callable[[], Any], size: int) -> dict[str, float]:
    began = time.perf_counter()
    kept = load()
    rate = size / (time.perf_counter() - began) / 1e9
    del kept
    return {"rate": rate}


def _bytes(*files: str) -> int:
    return sum(os.path.getsize(file) for file in files)


def ours(path: str) -> dict[str, float]:
    import tensorstream as ts
    import torch  # noqa: F401  # what load_file imports is not to be timed

    files = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [path]
    ts.load_file  # noqa: B018  # its module is imported when it is first asked for
    return _timed(lambda: ts.load_file(path), _bytes(*map(str, files)))


def again(path: str) -> dict[str, float]:
    import tensorstream as ts

    tensors = _clones(path)
    size = sum(tensor.nbytes for tensor in tensors.values())
    drop_caches()
    return _timed(lambda: ts.load_into(tensors, path), size)


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
    for label, name in (("view of 8 KiB", "model.norm.weight"), ("view of 131 MB", "lm_head.weight")):
        opened.get_tensor(name)
        took = []
        for _ in range(99):
            began = time.perf_counter()
            opened.get_tensor(name)
            took.append((time.perf_counter() - began) * 1e6)
        views[label] = statistics.median(took)
    return {"rate": rate, "warm verified": verified, "memcpy": statistics.median(copies), **views}


def _clones(path: str) -> dict[str, Any]:
    """Memory of a checkpoint's tensors that has been written to."""
    import tensorstream as ts

    return {name: tensor.clone() for name, tensor in ts.load_file(path, mapped=True).items()}


def packed(path: str) -> dict[str, float]:
    import tensorstream as ts

    size = sum(tensor.nbytes for tensor in _metas(path).values())
    Path(path).read_bytes()  # warm
    return _timed(lambda: ts.load_file(path), size)


def packed_into(path: str) -> dict[str, float]:
    import tensorstream as ts

    tensors = ts.load_file(path)
    size = sum(tensor.nbytes for tensor in tensors.values())
    Path(path).read_bytes()  # warm
    return _timed(lambda: ts.load_into(tensors, path), size)


def _metas(path: str) -> dict[str, Any]:
    import tensorstream as ts

    return ts.load_file(path, device="meta")


def zipnn_file(path: str) -> dict[str, float]:
    import zipnn

    coder = zipnn.ZipNN(bytearray_dtype="bfloat16", input_format="byte")
    Path(path).read_bytes()  # warm, as ours is
    began = time.perf_counter()
    raw = coder.decompress(Path(path).read_bytes())
    return {"rate": len(raw) / (time.perf_counter() - began) / 1e9}


def fastsafetensors(*files: str) -> dict[str, float]:
    import torch
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load() -> Any:
        loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
        loader.add_filenames({0: list(files)})
        buffer = loader.copy_files_to_device()
        return {key: buffer.get_tensor(key) for key in loader.get_keys()}, buffer, loader

    return _timed(load, _bytes(*files))


def runai(*files: str) -> dict[str, float]:
    from runai_model_streamer import SafetensorsStreamer

    def load() -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(list(files))
            return {name: tensor.clone().detach() for name, tensor in streamer.get_tensors()}

    return _timed(load, _bytes(*files))


def safetensors(*files: str) -> dict[str, float]:
    import torch
    from safetensors.torch import load_file

    def load() -> Any:
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        # It maps the file: the bytes come when they are touched.
        return tensors, [int(t.view(torch.uint8).flatten()[::4096].sum()) for t in tensors.values()]

    return _timed(load, _bytes(*files))


CONTENDERS: dict[str, Callable[..., dict[str, float]]] = {
    "ours": ours,
    "again": again,
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
