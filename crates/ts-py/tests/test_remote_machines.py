# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests the life cycle of machines: start, access control, copies, pause, failure and restart."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from serving import SERVE, Serving
from tensorstream.errors import ConfigurationError
from tensorstream.remote import (
    ConnectionLost,
    CrossMachineError,
    RemoteMachine,
    RemoteTensorError,
    StaleReferenceError,
    storage_id,
)
from tensorstream.remote.client._use import use
from tensorstream.remote.providers._this_computer import ProcessServer
from torch import nn


def _process(machine: RemoteMachine) -> subprocess.Popen[bytes]:
    """Returns the process of a "local" machine."""
    assert isinstance(machine._server, ProcessServer)
    return machine._server.process


@pytest.mark.critical
def test_a_mock_machine_computes() -> None:
    with RemoteMachine("mock") as machine:
        x = torch.ones(3, device=machine.device())
        assert (x + x).tolist() == [2.0, 2.0, 2.0]


def test_tensors_of_different_machines_do_not_mix(
    machine: RemoteMachine, device: torch.device
) -> None:
    x = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    assert (x * torch.tensor(2.0)).tolist() == [2.0, 2.0, 2.0]
    with RemoteMachine("mock", name="other") as other:
        y = torch.ones(3, device=other.device())
        with pytest.raises(CrossMachineError, match="other"):
            x + y
        assert (x + (y * 2).to(device)).tolist() == [3.0, 3.0, 3.0]
    with pytest.raises(ConfigurationError, match="does not exist"):
        y + y


def test_four_machines_in_one_process() -> None:
    machines = [RemoteMachine("mock") for _ in range(4)]
    try:
        sums = [
            torch.full((5,), float(at), device=m.device()).sum() for at, m in enumerate(machines)
        ]
        assert [one.item() for one in sums] == [0.0, 5.0, 10.0, 15.0]
    finally:
        for one in machines:
            one.stop()


def test_a_fork_cannot_use_the_tensors_of_its_parent(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    child = os.fork()
    if child == 0:
        try:
            x + x
        except RuntimeError as error:
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (x + x).tolist() == [2.0, 2.0]


def test_a_machine_that_dies_is_an_error_not_a_hang() -> None:
    machine = RemoteMachine("local", retry=0.5)
    x = torch.ones(3, device=machine.device())
    x.sum().item()
    _process(machine).kill()
    with pytest.raises(ConnectionLost):
        for _ in range(1000):
            (x + x).sum().item()
    machine.stop()


def test_serve_requires_a_token(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    # As for `serve-weights`, the token is the first line, without whitespace around it.
    secret.write_text(" let me in \nrotated last week\n", encoding="utf-8")
    (tmp_path / "empty").write_text("\nlet me in\n", encoding="utf-8")
    empty = [*SERVE, "--token-file", str(tmp_path / "empty")]
    refused = subprocess.run(empty, capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and "the first line is empty" in refused.stderr
    refused = subprocess.run(
        [*SERVE, "--listen", "0.0.0.0:0"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2 and "token" in refused.stderr
    with Serving({"--token-file": secret}) as served:
        with pytest.raises((ConnectionLost, RuntimeError)):
            RemoteMachine("tcp", served.address, token="guess", retry=0.1)
        with RemoteMachine("tcp", served.address, token="let me in") as machine:
            x = torch.randn(300, 300)
            assert torch.equal(x.to(machine.device()).cpu(), x)


def test_a_paused_machine_resumes_with_its_state(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 2))
    remote = copy.deepcopy(model)
    with RemoteMachine.local(device_count=2, threads=1) as machine:
        device = machine.device()
        remote.to(device)
        optimizer = torch.optim.Adam(remote.parameters())
        big = torch.arange(5_000_000, device=device)
        other = torch.full((3,), 2.0, device=machine.device(1))
        unwritten = torch.empty(10, device=device)
        failed = torch.arange(3.0, device=device).index_select(0, torch.tensor([9], device=device))
        with pytest.raises(RemoteTensorError):
            machine.pause(tmp_path)
        loose = torch.ones(3, device=device)
        torch.manual_seed(7)
        process = _process(machine).pid
        machine.pause(tmp_path)
        assert not Path(f"/proc/{process}").exists()
        with pytest.raises(ConfigurationError, match=r"paused: call resume\(\)"):
            big + 1
        del loose
        machine.pause()
        machine.resume()
        assert list(tmp_path.iterdir()) == []
        drawn = torch.randn(3, device=device).cpu()
        torch.manual_seed(7)
        assert torch.equal(drawn, torch.randn(3)), "generators are restored too"
        assert torch.equal(big.cpu(), torch.arange(5_000_000))
        assert (unwritten.tolist(), other.tolist(), other.device) == (
            [0.0] * 10,
            [2.0] * 3,
            machine.device(1),
        )
        with pytest.raises(RuntimeError, match="storage"):
            failed.tolist()
        remote(torch.ones(4, 6, device=device)).sum().backward()
        optimizer.step()
        machine.synchronize()
        machine.pause()
    with pytest.raises(ConfigurationError, match="stopped"):
        machine.resume() or machine.stats()


def test_received_payloads_can_be_staged(tmp_path: Path) -> None:
    from tensorstream.remote.server._server import devices_of, server

    served = server(f"unix:{tmp_path}/socket", devices=devices_of("cpu"), staged=True, shared=True)
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        with RemoteMachine("tcp", f"unix:{tmp_path}/socket") as machine:
            for count in (3, 5_000, 9_000_000):
                x = torch.randn(count)
                remote = x.to(machine.device())
                assert torch.equal(remote.cpu(), x)
                remote[1:].copy_(x[:-1])
                assert torch.equal(remote[1:].cpu(), x[:-1])
    finally:
        served.stop()
        thread.join()


def test_machines_with_tls_fetch_over_tls(trusted: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame", encoding="utf-8")
    options = {
        "--token-file": tmp_path / "token",
        "--tls-cert": trusted["cert"],
        "--tls-key": trusted["key"],
    }
    x = torch.randn(1000)
    with (
        Serving(options) as first,
        Serving(options | {"--peer": first.address}) as second,
        Serving(options | {"--peer": first.address, "--peer-ca": trusted["ca"]}) as third,
        RemoteMachine("tcp", first.address, token="sesame", ca=trusted["ca"]) as machine,
    ):
        remote = x.to(machine.device())
        for address, through_client in ((second.address, True), (third.address, False)):
            before = machine.stats()["downloaded_bytes"]
            with RemoteMachine("tcp", address, token="sesame", ca=trusted["ca"]) as other:
                assert torch.equal(remote.to(other.device()).cpu(), x)
            assert (machine.stats()["downloaded_bytes"] > before) == through_client


def test_the_token_is_not_sent_in_the_clear(trusted: dict[str, Path]) -> None:
    from tensorstream.remote.server._exchange import LocalExchange
    from tensorstream.serve._peers import Peers

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        peers = Peers(
            (address,), "sesame", {"cert": trusted["cert"], "key": trusted["key"], "ca": None}
        )
        refusal, _ = LocalExchange(peers).fetch(torch.ones(1), address, "ticket", torch.float32)
        assert "--peer-ca" in refusal
        listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.parametrize(
    "name",
    [
        "aten::__setattr__.*", "aten::add.overloads", "aten::add.__class__", "aten::_dir.*",
        "tensorstream::_setattr__", "tensorstream::generator", "aten::from_file", "os::system",
        "aten::none_such", "",
    ],
)  # fmt: skip
def test_names_that_are_not_operators_are_refused(name: str) -> None:
    from tensorstream.remote.server._server import Session

    with pytest.raises((LookupError, PermissionError)):
        Session().define(name)


def test_copies_between_machines_bypass_the_client(
    machine: RemoteMachine, device: torch.device
) -> None:
    with RemoteMachine.local(threads=1, device_count=2) as other, RemoteMachine("mock") as third:
        x = torch.randn(300, 200).to(device)
        down, up = machine.stats()["downloaded_bytes"], other.stats()["uploaded_bytes"]
        copied = x.to(other.device())
        narrow = x.t().to(other.device(), torch.float16)
        assert (machine.stats()["downloaded_bytes"], other.stats()["uploaded_bytes"]) == (down, up)
        assert torch.equal(copied.cpu(), x.cpu()) and torch.equal(narrow.cpu(), x.cpu().t().half())
        # Once a copy has succeeded, others do not wait.
        before = machine.stats()["waits"] + other.stats()["waits"]
        copies = [(x + turn).to(other.device()) for turn in range(5)]
        assert machine.stats()["waits"] + other.stats()["waits"] == before
        assert [copy[0, 0].item() - x[0, 0].item() for copy in copies] == pytest.approx(range(5))
        # Copies between devices of one machine do not wait.
        waits = other.stats()["waits"]
        moved = copied.to(other.device(1))
        assert (other.stats()["waits"], moved.device) == (waits, other.device(1))
        # A mock machine cannot fetch, so the copy goes through this process.
        assert torch.equal(moved.to(third.device()).cpu(), x.cpu())
        assert third.stats()["uploaded_bytes"] == x.nbytes
        bad = x.index_select(0, torch.tensor([999], device=device))
        lost = bad.to(other.device())
        with pytest.raises(RemoteTensorError, match=r"cannot copy the tensor from .*index"):
            lost.cpu()
        with pytest.raises(RemoteTensorError, match="index"):
            machine.synchronize()
        assert torch.equal(x.to(other.device()).cpu(), x.cpu())
        many = [torch.full((3,), turn, device=device).to(other.device()) for turn in range(100)]
        assert [copy[0].item() for copy in many] == list(range(100))


def test_claims_need_a_valid_ticket(machine: RemoteMachine, device: torch.device) -> None:
    from tensorstream.remote.client._server_operators import CLAIM, OFFER, WITHDRAW

    offered = torch.ones(2, device=device)

    def claim(ticket: str, like: torch.Tensor = offered) -> list[float]:
        into = torch.empty_like(like)
        CLAIM(into, ticket)
        numbers: list[float] = into.tolist()
        return numbers

    with pytest.raises(RemoteTensorError, match="no session offers this tensor"):
        claim("guess")
    OFFER(offered, "a", "")
    offered += 1  # the offer is of the former values
    assert claim("a") == [1.0, 1.0]
    with pytest.raises(RemoteTensorError, match="no session offers this tensor"):
        claim("a")  # once only
    OFFER(offered, "b", "")
    WITHDRAW(offered, "b")
    with pytest.raises(RemoteTensorError, match="no session offers this tensor"):
        claim("b")
    OFFER(offered, "c", "")
    with pytest.raises(RemoteTensorError, match=r"has shape \[2\] and torch.float32"):
        claim("c", offered.half())
    failed = offered.index_select(0, torch.tensor([9], device=device))
    OFFER(failed, "d", "")
    with pytest.raises(RemoteTensorError, match="index"):
        machine.synchronize()
    with pytest.raises(RemoteTensorError, match="index"):
        claim("d")


def test_a_pause_keeps_errors_and_restores_only_used_storages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tensorstream.remote.client._pause import SavedStorages

    with RemoteMachine("local", threads=1, retry=0.0) as machine:
        device = machine.device()
        good, dropped = torch.ones(3, device=device), [torch.ones(1 << 20, device=device)]
        failed = good.index_select(0, torch.tensor([9], device=device))
        copied = torch.empty(3, device=device)
        copied.copy_(failed.expand(3))
        with pytest.raises(RemoteTensorError, match="index"):
            machine.synchronize()
        # An operator that fails during a pause is an error, and the pause can be repeated.
        save = SavedStorages.save

        def save_with_failure(self: SavedStorages, session: Any, *storage: Any) -> None:
            good.index_select(0, torch.tensor([9], device=device))
            save(self, session, *storage)

        with monkeypatch.context() as patch:
            patch.setattr(SavedStorages, "save", save_with_failure)
            with pytest.raises(RemoteTensorError, match="index"):
                machine.pause()
        number = storage_id(dropped[0])
        restore, refused = SavedStorages.restore, []

        def restore_with_changes(self: SavedStorages, session: Any) -> None:
            # A storage that is freed now is not restored, and other threads cannot run operators.
            dropped.clear()

            def compute() -> None:
                with pytest.raises(ConfigurationError, match="by another thread"):
                    good + 1
                refused.append(True)

            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()
            restore(self, session)

        monkeypatch.setattr(SavedStorages, "restore", restore_with_changes)
        machine.pause()
        # Other machines continue, and a seed also applies to paused machines.
        torch.manual_seed(11)
        # PyTorch creates this module at run time.
        torch.ts.synchronize()  # type: ignore[attr-defined]
        machine.resume()
        assert refused == [True]
        assert number not in {storage for storage, *_ in machine._get_session().storages()}
        assert good.tolist() == [1.0] * 3
        with pytest.raises(RuntimeError, match="does not exist"):
            copied.tolist()
        drawn = torch.rand(3, device=device).cpu()
        torch.manual_seed(11)
        assert torch.equal(drawn, torch.rand(3))


def test_a_machine_that_dies_after_saving_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorstream.remote.client._pause import SavedStorages

    save = SavedStorages.save
    with RemoteMachine("local", threads=1, retry=0.0) as machine:
        kept = torch.ones(3, device=machine.device())

        def save_and_kill(self: SavedStorages, session: Any, *storage: Any) -> None:
            save(self, session, *storage)
            seen.append(storage[0])
            if len(seen) == len(session.storages()):
                _process(machine).kill()
                _process(machine).wait()

        seen: list[int] = []
        monkeypatch.setattr(SavedStorages, "save", save_and_kill)
        machine.pause()
        assert machine._server is None and "paused" in repr(machine)
        machine.resume()
        assert kept.tolist() == [1.0] * 3


def test_concurrent_pauses_are_one_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorstream.remote.client._pause import SavedStorages

    save, threads = SavedStorages.save, []

    def save_and_pause(self: SavedStorages, session: Any, *storage: Any) -> None:
        if not threads:
            threads.append(threading.Thread(target=machine.pause))
            threads[0].start()
        save(self, session, *storage)

    with RemoteMachine("mock") as machine:
        kept = torch.arange(5, device=machine.device())
        monkeypatch.setattr(SavedStorages, "save", save_and_pause)
        machine.pause()
        threads[0].join()
        machine.resume()
        assert kept.tolist() == [0, 1, 2, 3, 4]


def test_sessions_of_one_machine_are_separate(machine: RemoteMachine, device: torch.device) -> None:
    from tensorstream.remote import _registry

    x = torch.ones(3, device=device)
    with RemoteMachine("tcp", _registry.ADDRESSES[device.index][1]) as other:
        assert x.to(other.device()).tolist() == [1.0] * 3
        bad = torch.ones(2, device=other.device()).index_select(
            0, torch.tensor([5], device=other.device())
        )
        offered = {storage for storage, *_ in machine._get_session().storages()}
        with pytest.raises(RemoteTensorError, match="index"):
            x.to(other.device()).cpu()
        del bad
        # The failed copy leaves no offer.
        assert {storage for storage, *_ in machine._get_session().storages()} <= offered


ACCELERATOR = """
import json, sys, warnings
import torch
from torch.utils.data import DataLoader
warnings.simplefilter("ignore")
CALLS = {
    name: getattr(torch.accelerator, name)
    for name in ("current_accelerator", "is_available", "device_count", "current_device_index",
                 "empty_cache",
                 "memory_allocated", "synchronize")
}
CALLS["pin_memory"] = lambda: torch.ones(2).pin_memory().is_pinned()
CALLS["is_pinned"] = lambda: torch.ones(2).is_pinned()
CALLS["DataLoader"] = lambda: [
    batch.tolist() for batch in DataLoader(torch.arange(4.0), 2, pin_memory=True)
]
def results():
    results = {}
    for name, call in CALLS.items():
        try:
            results[name] = repr(call())
        except Exception as error:
            results[name] = f"{type(error).__name__}: {str(error)[:60]}"
    return results
before = results()
import tensorstream.remote
assert results() == before, (before, results())
assert not hasattr(torch, "ts")
from tensorstream.remote import RemoteMachine
with RemoteMachine("mock") as machine:
    x = torch.ones(3, device=machine.device())
    assert x.sum().item() == 3.0
    assert results() == before, (before, results())
assert results() == before, (before, results())
"""


def test_the_device_is_never_the_accelerator(programs: preloaded.Server) -> None:
    done = programs.run_code(ACCELERATOR)
    assert done.returncode == 0, done.stderr


TRAINER = """
import os, sys, warnings
os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")
import torch
from tensorstream.errors import ConfigurationError
from tensorstream.remote import RemoteMachine
machine = RemoteMachine("mock")
where = sys.argv[1]
if where == "remote":
    from tensorstream.remote import use
    use(machine)
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
config = GPT2Config(
    n_embd=32, n_layer=1, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=1
)
model = GPT2LMHeadModel(config)
ids = torch.randint(0, 50, (4, 12))
data = [{"input_ids": row, "labels": row} for row in ids]
def trainer(model):
    arguments = TrainingArguments(sys.argv[2], max_steps=2, per_device_train_batch_size=2,
                                  report_to=[],
                                  save_strategy="no", disable_tqdm=True)
    return Trainer(model, arguments, train_dataset=data)
if where == "refused":
    from accelerate import Accelerator
    remote = model.to(machine.device())
    for move in (lambda: trainer(remote), lambda: Accelerator().prepare(remote)):
        try:
            move()
            raise SystemExit("the model was moved silently")
        except ConfigurationError as error:
            assert "ACCELERATE_TORCH_DEVICE" in str(error), error
            assert "tensorstream.remote.use(machine)" in str(error), error
    from tensorstream.remote import use
    try:
        use(machine)
        raise SystemExit("accelerate uses another device")
    except ConfigurationError as error:
        assert "has chosen the device" in str(error), error
    assert "ACCELERATE_TORCH_DEVICE" not in os.environ
    assert {p.device for p in remote.parameters()} == {machine.device()}
    assert remote.to("cpu").lm_head.weight.device.type == "cpu"  # a move by the user
else:
    trainer(model).train()
    kind = "ts" if where == "remote" else "cpu"
    assert {p.device.type for p in model.parameters()} == {kind}
machine.stop()
"""


@pytest.mark.parametrize("where", ["local", "refused", "remote"])
def test_trainers_do_not_move_a_remote_model_silently(
    where: str, programs: preloaded.Server, tmp_path: Path
) -> None:
    done = programs.run_code(TRAINER, where, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_is_not_supported_is_refused_by_name(machine: RemoteMachine) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    device = machine.device()
    net, x = nn.Linear(2, 2).to(device), torch.ones(2, 2, device=device)
    with pytest.raises(ConfigurationError, match="DistributedDataParallel does not support ts:"):
        nn.parallel.DistributedDataParallel(net)
    query = torch.ones(1, 1, 4, 16, device=device)
    with pytest.raises(ValueError, match="FlexAttention is only supported"):
        flex_attention(query, query, query)
    table = nn.Embedding(4, 4, sparse=True).to(device)
    with pytest.raises(NotImplementedError, match=r"sparse tensors; .*sparse=False"):
        table(torch.tensor([1], device=device)).sum().backward()
    with pytest.raises(Exception, match='backend="aot_eager"'):
        torch.compile(net)(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(net, backend="aot_eager")(x).cpu(), net(x).cpu())
    with pytest.raises(ConfigurationError, match="no machine that runs"):
        use(torch.device("cpu"))


def test_generators_of_a_machine_draw_what_the_cpu_draws(machine: RemoteMachine) -> None:
    device = machine.device()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        there = torch.Generator(device=device).manual_seed(7)
        here = torch.Generator().manual_seed(7)
        for _ in range(3):
            drawn = torch.randn(5, 7, generator=there, device=device, dtype=dtype)
            assert torch.equal(drawn.cpu(), torch.randn(5, 7, generator=here, dtype=dtype))
        assert torch.equal(there.get_state(), here.get_state())
        assert isinstance(there, torch.Generator) and isinstance(here, torch.Generator)
    assert torch.Generator("cpu").device.type == "cpu"
    with pytest.raises(RuntimeError):
        torch.Generator("no such device")
    assert not isinstance(3, torch.Generator)


def test_a_dead_machine_restarts_with_the_same_device() -> None:
    with RemoteMachine("local", threads=1) as machine:
        device = machine.device()
        kept = torch.ones(3, device=device)
        kept.sum().item()
        _process(machine).kill()
        since = time.monotonic()
        with pytest.raises(ConnectionLost):
            for _ in range(1000):
                (kept + kept).sum().item()
        assert time.monotonic() - since < 10, "a dead local process is not retried"
        machine.start()
        assert machine.device() == device
        assert torch.ones(4, device=device).sum().item() == 4.0
        with pytest.raises(StaleReferenceError):
            kept.tolist()
        machine.stop()
        machine.start()
        assert machine.device() == device


def test_device_indices_of_stopped_machines_are_reused() -> None:
    with RemoteMachine("mock") as first:
        for _ in range(130):
            with RemoteMachine("mock") as machine:
                assert torch.ones(3, device=machine.device()).sum().item() == 3.0
                assert machine.device().index < 8
        assert torch.ones(3, device=first.device()).sum().item() == 3.0
    with RemoteMachine.mock(device_count=100), pytest.raises(ConfigurationError, match="up to 127"):
        RemoteMachine.mock(device_count=100)


def test_invalid_options_of_a_machine_are_refused(tmp_path: Path) -> None:
    for wrong, message in [
        ({"address": "gpu1:7470"}, "got an unexpected keyword argument 'address'"),
        ({"device_type": "A1000"}, '"cuda", "accelerator" or one of T4, .* got \'A1000\''),
        ({"gpu_type": "A1000"}, "got 'A1000'"),
        ({"device_count": 0}, "must be 1 to 127, got 0"),
        ({"gpu_count": 0}, "must be 1 to 127, got 0"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            RemoteMachine("mock", **wrong)
    with pytest.raises(ConfigurationError, match="of kind 'mock' has no address"):
        RemoteMachine("mock", "gpu1:7470")
    with RemoteMachine("mock", gpu_count=16) as machine:
        assert machine.device_count == machine.gpu_count == 16
        assert torch.ones(2, device=machine.device(15)).sum().item() == 2.0
        assert (
            machine.device("cpu", 3)
            == machine.device(3)
            == machine.device("cpu:3")
            == machine.device("ts", 3)
        )
        for wrong_device, message in [
            ((16,), "0 to 15"),
            (("cuda", 1), "has no cuda"),
            ((1, 1), "expected an index"),
        ]:
            with pytest.raises(ConfigurationError, match=message):
                machine.device(*wrong_device)
    with Serving() as served:
        with pytest.raises(ConfigurationError, match="has 8 devices"):
            RemoteMachine.tcp(served.address, device_count=9)
        if not torch.cuda.is_available():
            with pytest.raises(ConfigurationError, match="runs operators on cpu"):
                RemoteMachine.tcp(served.address, device_type="cuda")
    if not torch.cuda.is_available():
        for kind in ("mock", "local"):
            with pytest.raises((ConfigurationError, ConnectionLost), match="GPU"):
                RemoteMachine(kind, gpu_type="cuda")


def test_results_are_tensors_of_the_machine_with_own_storage(
    device: torch.device,
) -> None:
    from tensorstream import _native
    from tensorstream.remote.client._kernels import kernel

    x = torch.arange(4.0, device=device)
    on_meta = kernel(torch.ops.aten.empty_like.default)(x, device="meta")
    with pytest.raises(
        RemoteTensorError, match="a tensor on meta, which is not a device of this machine"
    ):
        on_meta.tolist()
    # Results that the machine reports have their own storage, even if they are views.
    aliased = _native.RemoteKernel(
        "aten::alias",
        torch.ops.aten.alias.default,
        False,
        False,
        True,
        False,
        False,
        None,
        [0],
        ["tensor"],
    )(x)
    x.fill_(7.0)
    assert aliased.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_server_refuses_operators_that_reach_beyond_tensors() -> None:
    from tensorstream.remote.server._server import Session

    session = Session(checked=True)
    for name in (
        "aten::from_file", "aten::_efficientzerotensor", "aten::set_.source_Tensor",
        "aten::resize_", "aten::t_",
        "aten::as_strided_.*", "aten::manual_seed", "aten::set_grad_enabled", "aten::_print",
        "prim::Print",
        "aten::_convert_indices_from_csr_to_coo", "aten::segment_reduce.*", "image::read_file",
    ):  # fmt: skip
        with pytest.raises((PermissionError, LookupError)):
            session.define(name)

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        return session.define(name)[0](*args, **kwargs)

    x, far = torch.ones(1, 4, 4), torch.full((1, 1, 1), 1 << 40)
    pooled, at = call("aten::max_pool2d_with_indices", x, [4, 4])
    backward = (
        "aten::max_pool2d_with_indices_backward",
        pooled,
        x,
        [4, 4],
        [4, 4],
        [0, 0],
        [1, 1],
        False,
    )
    assert call(*backward, at).sum() == 1.0
    one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    bags = ("aten::_embedding_bag_dense_backward", torch.ones(1, 4))
    for run in (
        lambda: call(*backward, far),
        lambda: call(*bags, far.reshape(1), zero, one, zero, 4, False, 0, None, -1),
        lambda: call(*bags, zero, far.reshape(1), one, zero, 4, False, 0, None, -1),
        lambda: call(
            "aten::segment_reduce",
            x.reshape(16),
            "sum",
            offsets=torch.tensor([0, 1 << 16]),
            unsafe=True,
        ),
        lambda: call(
            "aten::segment_reduce", x.reshape(16), "sum", lengths=torch.tensor([9, 9]), unsafe=True
        ),
    ):
        with pytest.raises(IndexError):
            run()


FORKS = """
import os, signal, sys
import torch
from tensorstream.remote import RemoteMachine
machine = RemoteMachine(sys.argv[1], **({"threads": 1} if sys.argv[1] == "local" else {}))
x = torch.ones(4, device=machine.device())
for _ in range(3):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child hung"
    assert (x + x).sum().item() == 8.0, "the session belongs to the parent"
"""


@pytest.mark.parametrize("kind", ["local", "mock"])
def test_forks_that_exit_do_not_end_the_session(kind: str, programs: preloaded.Server) -> None:
    done = programs.run_code(FORKS, kind)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
