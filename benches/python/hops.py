# SPDX-License-Identifier: MIT OR Apache-2.0
"""Generates with a model on two machines whose link delays each packet.

`cargo xtask bench hops`. Needs root, for two network namespaces. One has the client and the machine
with the first layers, the other one the machine with the last layers. Each token crosses the link
twice: the activations to the second machine, and the token back. So it should take as long as
without delay, and two one-way delays.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "crates/ts-py/tests"))
from links import bad_link, skip_reason

ADDRESSES = ("10.77.0.1:7470", "10.77.0.2:7470")
DELAYS = (0.0, 0.02, 0.05)
TOKENS, UNTIMED = 24, 4


def generate() -> None:
    """Runs in a separate process: prints the median time of a token for each line of its input."""
    from tensorstream.remote import RemoteMachine, dispatch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=1000,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.arange(8)[None]
    with torch.no_grad():
        new = model.generate(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    expected = new[0, prompt.shape[1] :].tolist()
    one, other = (RemoteMachine("tcp", address, idle_timeout=60.0) for address in ADDRESSES)
    dispatch(model, [one, other])
    print("ready", flush=True)
    for _ in sys.stdin:
        times, tokens = [], []
        with torch.no_grad():
            cache, ids = DynamicCache(), prompt
            for _ in range(TOKENS):
                begin = time.perf_counter()
                logits = model(ids.to(one.device()), past_key_values=cache, use_cache=True).logits
                tokens.append(int(logits[0, -1].argmax()))
                times.append(time.perf_counter() - begin)
                ids = torch.tensor([tokens[-1:]])
        assert tokens == expected, "the tokens differ"
        print(json.dumps(statistics.median(times[UNTIMED:])), flush=True)
    one.stop()
    other.stop()


def main(arguments: list[str]) -> int:
    if arguments:
        generate()
        return 0
    reason = skip_reason()
    if reason is not None:
        print(f"nothing was measured: {reason}")
        return 0
    with bad_link() as (near, far, link):
        for namespace, address in zip((near, far), ADDRESSES, strict=True):
            options = ["--listen", address, "--insecure", "--threads", "1", "--peer", "any"]
            server = namespace.start(
                [sys.executable, "-m", "tensorstream.serve", *options], stderr=subprocess.DEVNULL
            )
            assert server.stdout is not None
            server.stdout.readline()
        client = near.start([sys.executable, sys.argv[0], "generate"], stdin=subprocess.PIPE)
        assert client.stdin is not None and client.stdout is not None
        client.stdout.readline()

        def measured(delay: float) -> float:
            link.delay_s = delay
            print(file=client.stdin, flush=True)
            return float(json.loads(client.stdout.readline()))

        measured(0.0)
        times: dict[float, list[float]] = {delay: [] for delay in DELAYS}
        for _ in range(3):
            for delay in DELAYS:
                times[delay].append(measured(delay))
        link.delay_s = 0.0
        client.stdin.close()
        client.wait()
    base = statistics.median(times[0.0])
    print("| one-way delay | time of a token | beyond that without delay |\n|---|---|---|")
    for delay, samples in times.items():
        total = statistics.median(samples)
        beyond = f"{(total - base) / delay:.2f} one-way delays" if delay else ""
        print(f"| {1e3 * delay:.0f} ms | {1e3 * total:.1f} ms | {beyond} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
