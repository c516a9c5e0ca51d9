# SPDX-License-Identifier: MIT OR Apache-2.0
"""Names of models on the Hugging Face Hub, against a server on this machine."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import preloaded
import pytest
import torch
from hub import Hub
from transformers import LlamaConfig, LlamaForCausalLM

Run = Callable[..., str]

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """Serves models: one file, shards, a variant in a subfolder, and other formats."""
    root = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.generation_config.max_length = 7
    model.save_pretrained(root / "org" / "one")
    model.save_pretrained(root / "sentence-transformers" / "mini")
    model.save_pretrained(root / "org" / "sharded", max_shard_size="200KB")
    assert len(list((root / "org" / "sharded").glob("*.safetensors"))) > 2
    (root / "org" / "sharded" / "consolidated.safetensors").write_bytes(b"not needed" * 100)
    model.half().save_pretrained(root / "org" / "nested" / "part", variant="fp16")
    for name, file in (("pickled", "pytorch_model.bin"), ("gguf", "model-q4.gguf")):
        (root / "org" / name).mkdir()
        (root / "org" / name / "config.json").write_text("{}")
        (root / "org" / name / file).write_bytes(b"weights")
    (root / "org" / "empty").mkdir()
    with Hub(root).serving() as server:
        server.gated.add("org/gated")
        (root / "org" / "gated").mkdir()
        yield server


@pytest.fixture(scope="module")
def run(hub: Hub) -> Iterator[Run]:
    """Returns a function that runs code in a process whose Hub is the server."""
    with preloaded.started(preloaded.BELOW_TRANSFORMERS) as programs:
        yield functools.partial(_run, programs)


def _run(programs: preloaded.Server, hub: Hub, home: Path, code: str, **environment: str) -> str:
    """Runs code in a process whose Hub is the server. Returns what it prints."""
    program = f"""
import sys
assert not {{"huggingface_hub", "transformers"}} & sys.modules.keys()
import tensorstream as ts
import torch, transformers
IDS = torch.arange(12).view(1, 12)
def check(name, budget="200KiB", **kwargs):
    expected = transformers.LlamaForCausalLM.from_pretrained(name, **kwargs)
    model = ts.from_pretrained(name, budget=budget, **kwargs)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(IDS).logits, expected(IDS).logits)
    assert max(unit["loads"] for unit in ts.stats(model)["units"]) > 1
    assert model.name_or_path == model.config._name_or_path == name
    assert model.generation_config.max_length == 7
    return model
def refused(error, call):
    try:
        call()
    except error as caught:
        print(caught)
    else:
        raise AssertionError("nothing was raised")
{code}
"""
    own = {"HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0"}
    done = programs.run_code(
        program, variables=os.environ | own | environment, cwd=home, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_are_downloaded_once(run: Run, hub: Hub, tmp_path: Path) -> None:
    run(hub, tmp_path, "check('org/one')\ncheck('org/sharded')")
    fetched = [each for each in hub.requests if each.startswith("GET org/")]
    assert not any("consolidated" in each for each in fetched)
    hub.requests.clear()
    run(
        hub,
        tmp_path,
        "check('org/sharded')\nts.from_pretrained('hf://org/one@main')\n"
        f"ts.from_pretrained('hf://org/one@{hub.commit('org/one')}/')\n"
        "print(ts.plan('org/one', budget='200KiB'))",
    )
    assert not [each for each in hub.requests if each.startswith("GET org/")]


def test_without_a_connection_the_cache_is_used(run: Run, hub: Hub, tmp_path: Path) -> None:
    run(hub, tmp_path, "check('org/sharded')")
    hub.requests.clear()
    code = """
check('org/sharded')
check('org/sharded', local_files_only=True)
refused(ts.CheckpointNotFoundError, lambda: ts.from_pretrained('org/one', budget='1MiB'))
"""
    printed = run(hub, tmp_path, code, HF_HUB_OFFLINE="1")
    assert "org/one" in printed and "offline" in printed
    assert not hub.requests
    # Nothing waits to ask a Hub again that cannot be reached.
    code = """
import time
waits = []
time.sleep = waits.append
check('org/sharded')
assert sum(waits) < 1, waits
"""
    run(hub, tmp_path, code, HF_ENDPOINT="http://127.0.0.1:9")


def test_subfolders_variants_and_directories_of_the_cache(
    run: Run, hub: Hub, tmp_path: Path
) -> None:
    code = f"""
for how in ({{"subfolder": "part"}}, {{}}):
    name = "org/nested" if how else "hf://org/nested@main/part"
    model = ts.from_pretrained(name, variant="fp16", budget="200KiB", cache_dir="cache", **how)
    assert model.dtype == torch.float16 and model.name_or_path == "org/nested"
    expected = transformers.LlamaForCausalLM.from_pretrained(
        "org/nested", subfolder="part", variant="fp16", cache_dir="cache")
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, expected(IDS).logits)
directory = {str(hub.directory / "org" / "nested")!r}
ts.from_pretrained(directory, subfolder="part", variant="fp16", budget="200KiB")
refused(ts.CheckpointNotFoundError, lambda: ts.from_pretrained(directory, variant="bf16"))
refused(ts.CheckpointNotFoundError,
        lambda: ts.from_pretrained("org/nested", variant="fp16", cache_dir="cache"))
refused(ts.ConfigurationError,
        lambda: ts.from_pretrained("hf://org/nested@main/part", revision="other"))
refused(ts.ConfigurationError, lambda: ts.from_pretrained("hf://org"+"/"*2+"nested"))
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{SHAPE!r}))
ts.offload(model, checkpoint="hf://org/one", budget="200KiB")
model(IDS)
"""
    printed = run(hub, tmp_path, code)
    assert "no weights of the variant bf16" in printed
    assert "it has part/model.fp16.safetensors" in printed
    assert "names the revision main" in printed and "invalid URL" in printed


def test_short_names_and_names_on_the_command_line(run: Run, hub: Hub, tmp_path: Path) -> None:
    """Users of sentence-transformers write ``all-MiniLM-L6-v2`` without the organisation."""
    code = """
import sys
from tensorstream._cli import main
model = ts.from_pretrained("mini", budget="200KiB")
assert model.name_or_path == "sentence-transformers/mini"
refused(ts.CheckpointNotFoundError, lambda: ts.from_pretrained("midi", budget="1MiB"))
for command in ("info", "plan"):
    for name in ("org/sharded", "hf://org/sharded"):
        sys.argv = ["tensorstream", command, name]
        assert main() == 0
    sys.argv[2] = "org/missing"
    assert main() == 1
"""
    assert "no file or directory midi" in run(hub, tmp_path, code)


def test_what_cannot_be_loaded_is_named(run: Run, hub: Hub, tmp_path: Path) -> None:
    names = ("missing", "pickled", "gguf", "empty", "gated")
    calls = "\n".join(
        f"refused(ts.TensorStreamError, lambda: ts.from_pretrained('org/{name}', budget='1MiB'))"
        for name in names
    )
    calls += (
        "\nrefused(ts.CheckpointNotFoundError,"
        " lambda: ts.from_pretrained('org/one', budget='1MiB', revision='v2'))"
    )
    lines = run(hub, tmp_path, calls).splitlines()
    expected = (
        "no model of this name on the Hub",
        "pytorch_model.bin, which cannot be streamed; convert it once",
        "gguf_file=FILE",
        "org/empty on the Hub has no weights",
        "accept its conditions",
        "org/one has no revision v2",
    )
    for line, words in zip(lines, expected, strict=True):
        assert words in line, json.dumps(lines)


def test_files_of_a_download_are_found_offline(run: Run, hub: Hub, tmp_path: Path) -> None:
    """The cache of a download has no note that `model.safetensors` does not exist."""
    run(hub, tmp_path, "import huggingface_hub; huggingface_hub.snapshot_download('org/sharded')")
    code = """
check('org/sharded', local_files_only=True)
refused(ts.ConfigurationError, lambda: ts.from_pretrained('org/sharded', force_download=True))
"""
    run(hub, tmp_path, code, HF_HUB_OFFLINE="1")
