# SPDX-License-Identifier: MIT OR Apache-2.0
"""Machines: several of them, who may use them, what becomes of tensors when they pause, and when
they die.
"""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

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
from torch import nn


@pytest.mark.critical
def test_a_machine_in_this_process() -> None:
    with RemoteMachine("mock") as machine:
        x = torch.ones(3, device=machine.device())
        assert (x + x).tolist() == [2.0, 2.0, 2.0]


def test_tensors_of_the_host_and_of_other_machines_do_not_mix(
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
    with pytest.raises(ConfigurationError, match="no device"):
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


def test_a_fork_is_told_that_it_cannot(device: torch.device) -> None:
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


def test_a_machine_that_dies_is_an_error_and_no_hang() -> None:
    machine = RemoteMachine("local", retry=0.5)
    x = torch.ones(3, device=machine.device())
    x.sum().item()
    machine._server.kill()
    with pytest.raises(ConnectionLost):
        for _ in range(1000):
            (x + x).sum().item()
    machine.stop()


def test_serve_wants_a_secret_and_others_are_sent_away(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    # As `serve-weights`: the first line counts, and spaces around it do not.
    secret.write_text(" let me in \nrotated last week\n", encoding="utf-8")
    (tmp_path / "empty").write_text("\nlet me in\n", encoding="utf-8")
    empty = [*SERVE, "--token-file", str(tmp_path / "empty")]
    refused = subprocess.run(empty, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "its first line is empty" in refused.stderr
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


def test_a_machine_that_is_paused_goes_on_where_it_was(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 2))
    there = copy.deepcopy(model)
    with RemoteMachine.local(device_count=2, threads=1) as machine:
        device = machine.device()
        there.to(device)
        optimizer = torch.optim.Adam(there.parameters())
        big = torch.arange(5_000_000, device=device)
        other = torch.full((3,), 2.0, device=machine.device(1))
        never, failed = (
            torch.empty(10, device=device),
            torch.arange(3.0, device=device).index_select(0, torch.tensor([9], device=device)),
        )
        with pytest.raises(RemoteTensorError):
            machine.pause(tmp_path)
        loose = torch.ones(3, device=device)
        torch.manual_seed(7)
        process = machine._server.pid
        machine.pause(tmp_path)
        assert not Path(f"/proc/{process}").exists()
        with pytest.raises(ConfigurationError, match=r"paused: resume\(\) it"):
            big + 1
        del loose
        machine.pause()
        machine.resume()
        assert list(tmp_path.iterdir()) == []
        torch_now = torch.randn(3, device=device).cpu()
        torch.manual_seed(7)
        assert torch.equal(torch_now, torch.randn(3)), "its generators go on too"
        assert torch.equal(big.cpu(), torch.arange(5_000_000))
        assert (never.tolist(), other.tolist(), other.device) == (
            [0.0] * 10,
            [2.0] * 3,
            machine.device(1),
        )
        with pytest.raises(RuntimeError, match="storage"):
            failed.tolist()
        there(torch.ones(4, 6, device=device)).sum().backward()
        optimizer.step()
        machine.synchronize()
        machine.pause()
    with pytest.raises(ConfigurationError, match="stopped"):
        machine.resume() or machine.stats()


def test_what_is_received_can_be_staged(tmp_path: Path) -> None:
    from tensorstream.remote.server._server import devices_of, server

    served = server(f"unix:{tmp_path}/socket", devices=devices_of("cpu"), staged=True, shared=True)
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        with RemoteMachine("tcp", f"unix:{tmp_path}/socket") as machine:
            for count in (3, 5_000, 9_000_000):
                x = torch.randn(count)
                there = x.to(machine.device())
                assert torch.equal(there.cpu(), x)
                there[1:].copy_(x[:-1])
                assert torch.equal(there[1:].cpu(), x[:-1])
    finally:
        served.stop()
        thread.join()


def test_machines_under_tls_fetch_under_tls(trusted: dict[str, Path], tmp_path: Path) -> None:
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
        there = x.to(machine.device())
        for address, by_way_of_here in ((second.address, True), (third.address, False)):
            before = machine.stats()["downloaded_bytes"]
            with RemoteMachine("tcp", address, token="sesame", ca=trusted["ca"]) as other:
                assert torch.equal(there.to(other.device()).cpu(), x)
            assert (machine.stats()["downloaded_bytes"] > before) == by_way_of_here


def test_the_token_is_not_told_in_the_clear(trusted: dict[str, Path]) -> None:
    from tensorstream.remote.server._exchange import LocalExchange
    from tensorstream.serve._peers import Peers

    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        peers = Peers(
            (address,), "sesame", {"cert": trusted["cert"], "key": trusted["key"], "ca": None}
        )
        assert "--peer-ca" in LocalExchange(peers.claimed).fetch(torch.ones(1), address, "ticket")
        nobody.settimeout(0.2)
        with pytest.raises(TimeoutError):
            nobody.accept()


@pytest.mark.parametrize(
    "name",
    [
        "aten::__setattr__.*", "aten::add.overloads", "aten::add.__class__", "aten::_dir.*",
        "tensorstream::_setattr__", "tensorstream::generator", "aten::from_file", "os::system",
        "aten::none_such", "",
    ],
)  # fmt: skip
def test_what_is_no_operator_is_refused(name: str) -> None:
    from tensorstream.remote.server._server import Session

    with pytest.raises((LookupError, PermissionError)):
        Session().define(name)


def test_copies_between_machines_do_not_come_by_here(
    machine: RemoteMachine, device: torch.device
) -> None:
    with RemoteMachine.local(threads=1, device_count=2) as other, RemoteMachine("mock") as third:
        x = torch.randn(300, 200).to(device)
        down, up = machine.stats()["downloaded_bytes"], other.stats()["uploaded_bytes"]
        there = x.to(other.device())
        narrow = x.t().to(other.device(), torch.float16)
        assert (machine.stats()["downloaded_bytes"], other.stats()["uploaded_bytes"]) == (down, up)
        assert torch.equal(there.cpu(), x.cpu()) and torch.equal(narrow.cpu(), x.cpu().t().half())
        # From one device of a machine to another nothing is waited for.
        waits = other.stats()["waits"]
        beside = there.to(other.device(1))
        assert (other.stats()["waits"], beside.device) == (waits, other.device(1))
        # Who fetches nothing is sent it.
        assert torch.equal(beside.to(third.device()).cpu(), x.cpu())
        assert third.stats()["uploaded_bytes"] == x.nbytes
        bad = x.index_select(0, torch.tensor([999], device=device))
        with pytest.raises(RemoteTensorError, match="index"):
            bad.to(other.device())


def test_who_knows_no_ticket_fetches_nothing(machine: RemoteMachine, device: torch.device) -> None:
    from tensorstream.remote.client import _kernels

    with pytest.raises(RemoteTensorError, match="no session offers this tensor"):
        _kernels.CLAIM(torch.empty(0, dtype=torch.uint8, device=device), "guess")
    offered = torch.ones(2, device=device)
    ticket = _kernels._OFFER(offered)
    assert _kernels.CLAIM(offered, ticket).tolist() == [1.0, 1.0]
    _kernels._WITHDRAW(offered, ticket)
    with pytest.raises(RemoteTensorError, match="no session offers this tensor"):
        _kernels.CLAIM(offered, ticket)


def test_a_pause_loses_nothing_and_makes_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorstream.remote.client._machine import _Saved

    with RemoteMachine("local", threads=1, retry=0.0) as machine:
        device = machine.device()
        good, dropped = torch.ones(3, device=device), [torch.ones(1 << 20, device=device)]
        failed = good.index_select(0, torch.tensor([9], device=device))
        copied = torch.empty(3, device=device)
        copied.copy_(failed.expand(3))
        with pytest.raises(RemoteTensorError, match="index"):
            machine.synchronize()
        # Somebody else's error is told, and the pause can be tried again.
        save = _Saved.save

        def fails(self: _Saved, session: Any, *storage: Any) -> None:
            good.index_select(0, torch.tensor([9], device=device))
            save(self, session, *storage)

        with monkeypatch.context() as patch:
            patch.setattr(_Saved, "save", fails)
            with pytest.raises(RemoteTensorError, match="index"):
                machine.pause()
        number = storage_id(dropped[0])
        restore, refused = _Saved.restore, []

        def restored(self: _Saved, session: Any) -> None:
            # What is given up meanwhile is not made again, and nobody else makes anything.
            dropped.clear()

            def other() -> None:
                with pytest.raises(ConfigurationError, match="by another thread"):
                    good + 1
                refused.append(True)

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            restore(self, session)

        monkeypatch.setattr(_Saved, "restore", restored)
        machine.pause()
        # Others go on meanwhile, and a seed is for those that are paused too.
        torch.manual_seed(11)
        torch.ts.synchronize()  # type: ignore[attr-defined]
        machine.resume()
        assert refused == [True]
        assert number not in {storage for storage, *_ in machine._there().storages()}
        assert good.tolist() == [1.0] * 3
        with pytest.raises(RuntimeError, match="not there"):
            copied.tolist()
        given = torch.rand(3, device=device).cpu()
        torch.manual_seed(11)
        assert torch.equal(given, torch.rand(3))


def test_a_machine_that_dies_when_all_is_saved_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorstream.remote.client._machine import _Saved

    save = _Saved.save
    with RemoteMachine("local", threads=1, retry=0.0) as machine:
        kept = torch.ones(3, device=machine.device())

        def last(self: _Saved, session: Any, *storage: Any) -> None:
            save(self, session, *storage)
            seen.append(storage[0])
            if len(seen) == len(session.storages()):
                machine._server.kill()
                machine._server.wait()

        seen: list[int] = []
        monkeypatch.setattr(_Saved, "save", last)
        machine.pause()
        assert machine._server is None and "paused" in repr(machine)
        machine.resume()
        assert kept.tolist() == [1.0] * 3


def test_pauses_from_two_threads_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorstream.remote.client._machine import _Saved

    save, threads = _Saved.save, []

    def saves(self: _Saved, session: Any, *storage: Any) -> None:
        if not threads:
            threads.append(threading.Thread(target=machine.pause))
            threads[0].start()
        save(self, session, *storage)

    with RemoteMachine("mock") as machine:
        kept = torch.arange(5, device=machine.device())
        monkeypatch.setattr(_Saved, "save", saves)
        machine.pause()
        threads[0].join()
        machine.resume()
        assert kept.tolist() == [0, 1, 2, 3, 4]


def test_two_sessions_with_one_machine_are_two(
    machine: RemoteMachine, device: torch.device
) -> None:
    from tensorstream.remote import _registry

    x = torch.ones(3, device=device)
    with RemoteMachine("tcp", _registry.ADDRESSES[device.index][1]) as other:
        assert x.to(other.device()).tolist() == [1.0] * 3
        bad = torch.ones(2, device=other.device()).index_select(
            0, torch.tensor([5], device=other.device())
        )
        offered = {storage for storage, *_ in machine._there().storages()}
        with pytest.raises(RemoteTensorError, match="index"):
            x.to(other.device())
        del bad
        # Nothing stays offered.
        assert {storage for storage, *_ in machine._there().storages()} <= offered


SHOWS = """
import json, sys, warnings
import torch
from torch.utils.data import DataLoader
warnings.simplefilter("ignore")
QUESTIONS = {
    name: getattr(torch.accelerator, name)
    for name in ("current_accelerator", "is_available", "device_count", "current_device_index",
                 "empty_cache",
                 "memory_allocated", "synchronize")
}
QUESTIONS["pin_memory"] = lambda: torch.ones(2).pin_memory().is_pinned()
QUESTIONS["is_pinned"] = lambda: torch.ones(2).is_pinned()
QUESTIONS["DataLoader"] = lambda: [
    batch.tolist() for batch in DataLoader(torch.arange(4.0), 2, pin_memory=True)
]
def shown():
    said = {}
    for name, question in QUESTIONS.items():
        try:
            said[name] = repr(question())
        except Exception as error:
            said[name] = f"{type(error).__name__}: {str(error)[:60]}"
    return said
before = shown()
import tensorstream.remote
assert shown() == before, (before, shown())
assert not hasattr(torch, "ts")
from tensorstream.remote import RemoteMachine
with RemoteMachine("mock") as machine:
    x = torch.ones(3, device=machine.device())
    assert x.sum().item() == 3.0
    assert shown() == before, (before, shown())
assert shown() == before, (before, shown())
"""


def test_a_process_sees_no_device_before_a_machine_starts_and_its_own_accelerator_afterwards() -> (
    None
):
    done = subprocess.run(
        [sys.executable, "-c", SHOWS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


TRAINS = """
import os, sys, warnings
os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")
import torch
from tensorstream.errors import ConfigurationError
from tensorstream.remote import RemoteMachine
machine = RemoteMachine("mock")
where = sys.argv[1]
if where == "there":
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(machine.device())
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
    there = model.to(machine.device())
    for moves in (lambda: trainer(there), lambda: Accelerator().prepare(there)):
        try:
            moves()
            raise SystemExit("it was moved without a word")
        except ConfigurationError as error:
            assert "ACCELERATE_TORCH_DEVICE" in str(error), error
    assert {p.device for p in there.parameters()} == {machine.device()}
    assert there.to("cpu").lm_head.weight.device.type == "cpu"  # who asks for it gets it
else:
    trainer(model).train()
    kind = "ts" if where == "there" else "cpu"
    assert {p.device.type for p in model.parameters()} == {kind}
machine.stop()
"""


@pytest.mark.parametrize("where", ["here", "refused", "there"])
def test_trainers_train_where_they_are_told_and_never_silently_here(
    where: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", TRAINS, where, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_machine_that_died_starts_again_with_the_same_device() -> None:
    with RemoteMachine("local", threads=1) as machine:
        device = machine.device()
        kept = torch.ones(3, device=device)
        kept.sum().item()
        machine._server.kill()
        since = time.monotonic()
        with pytest.raises(ConnectionLost):
            for _ in range(1000):
                (kept + kept).sum().item()
        assert time.monotonic() - since < 10, "who was started here and is gone does not come back"
        machine.start()
        assert machine.device() == device
        assert torch.ones(4, device=device).sum().item() == 4.0
        with pytest.raises(StaleReferenceError):
            kept.tolist()
        machine.stop()
        machine.start()
        assert machine.device() == device


def test_indices_of_machines_that_were_stopped_are_used_again() -> None:
    with RemoteMachine("mock") as first:
        for _ in range(130):
            with RemoteMachine("mock") as machine:
                assert torch.ones(3, device=machine.device()).sum().item() == 3.0
                assert machine.device().index < 8
        assert torch.ones(3, device=first.device()).sum().item() == 3.0
    with RemoteMachine.mock(device_count=100), pytest.raises(ConfigurationError, match="up to 127"):
        RemoteMachine.mock(device_count=100)


def test_what_a_machine_is_asked_for_is_there_or_refused_at_once(tmp_path: Path) -> None:
    for wrong, why in [
        ({"address": "A100"}, "unexpected address 'A100'"),
        ({"device_type": "A100"}, 'must be "cpu" or "cuda", got \'A100\''),
        ({"gpu_type": "A100"}, "got 'A100'"),
        ({"device_count": 0}, "must be 1 to 127, got 0"),
        ({"gpu_count": 0}, "must be 1 to 127, got 0"),
    ]:
        with pytest.raises(ConfigurationError, match=why):
            RemoteMachine("mock", **wrong)
    with RemoteMachine("mock", gpu_count=16) as machine:
        assert machine.device_count == machine.gpu_count == 16
        assert torch.ones(2, device=machine.device(15)).sum().item() == 2.0
        assert (
            machine.device("cpu", 3)
            == machine.device(3)
            == machine.device("cpu:3")
            == machine.device("ts", 3)
        )
        for wrong_device, why in [
            ((16,), "0 to 15"),
            (("cuda", 1), "has no cuda"),
            ((1, 1), "an index"),
        ]:
            with pytest.raises(ConfigurationError, match=why):
                machine.device(*wrong_device)
    with Serving() as served:
        with pytest.raises(ConfigurationError, match="has 8 devices"):
            RemoteMachine.tcp(served.address, device_count=9)
        if not torch.cuda.is_available():
            with pytest.raises(ConfigurationError, match="on its cpu"):
                RemoteMachine.tcp(served.address, device_type="cuda")
    if not torch.cuda.is_available():
        for kind in ("mock", "local"):
            with pytest.raises((ConfigurationError, ConnectionLost), match="GPU"):
                RemoteMachine(kind, gpu_type="cuda")


def test_what_an_operator_gives_is_a_tensor_of_the_machine_and_no_other_ones(
    device: torch.device,
) -> None:
    from tensorstream import _native
    from tensorstream.remote.client._kernels import kernel

    x = torch.arange(4.0, device=device)
    elsewhere = kernel(torch.ops.aten.empty_like.default)(x, device="meta")
    with pytest.raises(
        RemoteTensorError, match="a tensor on meta, which is no device of this machine"
    ):
        elsewhere.tolist()
    # One whose outputs are asked for has them in storages of their own.
    aliased = _native.RemoteKernel(
        "aten::alias",
        torch.ops.aten.alias.default,
        False,
        False,
        True,
        False,
        None,
        [0],
        ["tensor"],
    )(x)
    x.fill_(7.0)
    assert aliased.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_server_runs_no_operator_that_reaches_beyond_its_tensors() -> None:
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
for _ in range(5):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child hung"
    assert (x + x).sum().item() == 8.0, "the session is the parent's"
"""


@pytest.mark.parametrize("kind", ["local", "mock"])
def test_a_forked_child_that_exits_neither_hangs_nor_ends_the_session(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, kind],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
