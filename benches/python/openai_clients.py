# SPDX-License-Identifier: MIT OR Apache-2.0
"""Clients of the OpenAI API use `tensorstream serve-openai` at the same time, for a minute.

usage: openai_clients.py [SECONDS]

`cargo xtask bench openai` runs it. Eight clients ask for greedy answers. Each answer is compared
with that of `generate` alone, with the model in memory. The memory and the descriptors of the
server are read after 10 seconds and at the end.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from models import MIB, ROOT

sys.path.insert(0, str(ROOT / "crates" / "ts-py" / "tests"))

CLIENTS = 8
PORT = 8765
TOKENS = 16


def make(path: Path) -> int:
    """Writes a Llama of about 100 MB and its tokenizer. Returns the size of its weights."""
    import torch
    from test_generate import text_config, tokenizer
    from transformers import LlamaForCausalLM

    config = text_config()
    config.update({"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8})
    config.head_dim = 128
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return sum(parameter.nbytes for parameter in model.parameters())


def answers(path: Path, prompts: list[str]) -> dict[str, str]:
    """Returns what `generate` answers to each prompt, with the model in memory."""
    from test_generate import tokenizer
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(path)
    own = tokenizer()
    found = {}
    for prompt in prompts:
        text = own.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        ids = own(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        output = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
        found[prompt] = own.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return found


def used(pid: int) -> tuple[float, int]:
    """Returns the resident memory of a process in MiB, and its number of descriptors."""
    status = Path(f"/proc/{pid}/status").read_text()
    rss = int(status.split("VmRSS:")[1].split()[0]) / 1024
    return rss, len(os.listdir(f"/proc/{pid}/fd"))


def wait_until_ready(client: Any, process: subprocess.Popen[bytes]) -> None:
    import openai

    while True:
        try:
            client.models.list()
            return
        except openai.APIConnectionError:
            if process.poll() is not None:
                sys.exit(f"the server ended with status {process.returncode}")
            time.sleep(0.2)


def main(seconds: float) -> int:
    import openai

    words = ["the", "cat", "sat", "on", "moon", "it", "is", "now", "again"]
    r = random.Random(0)
    prompts = [" ".join(r.choices(words, k=r.randint(1, 12))) for _ in range(24)]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model"
        size = make(path)
        wanted = answers(path, prompts)
        command = Path(sys.executable).parent / "tensorstream"
        budget = size // 3
        process = subprocess.Popen(
            [command, "serve-openai", path, "--budget", str(budget), "--port", str(PORT)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        client = openai.OpenAI(base_url=f"http://localhost:{PORT}/v1", api_key="none")
        try:
            wait_until_ready(client, process)
            end = time.monotonic() + seconds

            def ask(number: int) -> tuple[int, int]:
                own, right, wrong = random.Random(number), 0, 0
                while time.monotonic() < end:
                    prompt = own.choice(prompts)
                    answer = client.chat.completions.create(
                        model=str(path),
                        messages=[{"role": "user", "content": prompt}],
                        max_tokens=TOKENS,
                        temperature=0,
                    )
                    same = answer.choices[0].message.content == wanted[prompt]
                    right, wrong = right + same, wrong + (not same)
                return right, wrong

            with ThreadPoolExecutor(CLIENTS) as pool:
                asked = [pool.submit(ask, number) for number in range(CLIENTS)]
                time.sleep(10)
                early = used(process.pid)
                counts = [each.result() for each in asked]
                late = used(process.pid)
        finally:
            process.terminate()
            process.wait()
    right, wrong = (sum(column) for column in zip(*counts, strict=True))
    print(f"weights {size / MIB:.0f} MiB, budget {budget / MIB:.0f} MiB, {CLIENTS} clients")
    print(f"{right} answers equal to those of generate, {wrong} different, in {seconds:.0f} s")
    print(f"after 10 s: {early[0]:.0f} MiB resident, {early[1]} descriptors")
    print(f"at the end: {late[0]:.0f} MiB resident, {late[1]} descriptors")
    print(f"memory {late[0] / early[0]:.3f}, descriptors {late[1] / early[1]:.3f}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 60))
