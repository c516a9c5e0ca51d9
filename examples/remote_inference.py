# SPDX-License-Identifier: MIT OR Apache-2.0
"""Generates text with a Hugging Face model on a machine, which reads the weights itself.

Run: `python examples/remote_inference.py [MODEL [ssh HOST | modal GPU]]`. Needs
tensorstream[remote,transformers].

Without arguments, the machine is a process on this computer, and the model a small one that the
example makes. With a MODEL of the Hugging Face Hub, such as HuggingFaceTB/SmolLM2-135M, the machine
downloads the weights. "modal" needs an account and `pip install modal`.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from typing import Any

import torch
from machines import start
from tensorstream.remote import RemoteMachine, load_huggingface_state_dicts
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel


def generate(name: str, machine: RemoteMachine) -> torch.Tensor:
    """Returns the tokens that a model generates on a machine."""
    # The model is built without memory. `load_state_dict` moves it to where its weights are.
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    weights = load_huggingface_state_dicts(name, machine.device())
    model.load_state_dict(weights[""])
    prompt = torch.arange(1, 9)[None].to(machine.device())
    tokens: torch.Tensor = model.eval().generate(
        prompt, max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    return tokens.cpu()


def main() -> None:
    name, place = sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:]
    with tempfile.TemporaryDirectory() as directory:
        if not name:
            torch.manual_seed(0)
            config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=512, eos_token_id=None)
            GPT2LMHeadModel(config).save_pretrained(name := directory)
        with ExitStack() as stack:
            machine = start(stack, place)[0]
            tokens = generate(name, machine)
            stats = machine.stats()
        print(f"{stats['operators']} operators ran on the machine")
        print(f"{stats['downloaded_bytes']} bytes came back, and no weights")
        print("tokens:", tokens[0].tolist())
        if not place and name == directory:
            here: Any = GPT2LMHeadModel.from_pretrained(directory)
            prompt = torch.arange(1, 9)[None]
            same = here.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
            print("same tokens as on this computer:", torch.equal(tokens, same))


if __name__ == "__main__":
    main()
