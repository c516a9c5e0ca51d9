# SPDX-License-Identifier: MIT OR Apache-2.0
"""Direct copies between machines: they do not wait, and lose nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from contextlib import ExitStack

import pytest
import torch
from serving import Serving, is_running
from tensorstream import _native
from tensorstream.errors import RemoteTensorError
from tensorstream.remote import RemoteMachine
from tensorstream.remote.client import _direct
from tensorstream.remote.providers._this_computer import ProcessServer
from tensorstream.serve import _offers, _peers
from tensorstream.serve._messages import sealed


@pytest.mark.parametrize("kill", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_copy_waits_for_a_machine_that_computes(kill: bool) -> None:
    """It is asked again and again, until it is lost."""
    size = 700
    with RemoteMachine.local(threads=1) as source, RemoteMachine.local(threads=1) as target:
        eye = torch.eye(size, dtype=torch.float64, device=source.device())
        assert torch.ones(2, device=source.device()).to(target.device()).sum().item() == 2.0

        def work(turns: int) -> torch.Tensor:
            product = eye
            for _ in range(turns):
                product = product @ eye
            return product

        begin = time.monotonic()
        work(20)[0, 0].item()
        turns = 20 * 1.5 * _offers.CLAIM_WAIT / (time.monotonic() - begin)
        copied = work(int(turns)).to(target.device())
        if not kill:
            assert torch.equal(copied.cpu(), torch.eye(size, dtype=torch.float64))
            return
        assert isinstance(source._server, ProcessServer)
        source._server.process.kill()
        with pytest.raises(RemoteTensorError, match="cannot copy the tensor from"):
            copied.cpu()


def test_a_machine_that_stops_completes_its_copies() -> None:
    with RemoteMachine.local(threads=1) as target, RemoteMachine.local(threads=1) as source:
        x = torch.arange(3.0, device=source.device())
        assert x.to(target.device()).sum().item() == 3.0
        busy = torch.eye(600, device=target.device())
        for _ in range(50):
            busy = busy @ busy
        copies = [(x + turn).to(target.device()) for turn in range(3)]
        source.stop()
        assert [copy.sum().item() for copy in copies] == [3.0, 6.0, 9.0]


def test_one_machine_copies_to_several() -> None:
    with ExitStack() as stack:
        source, *targets = (stack.enter_context(RemoteMachine.local(threads=1)) for _ in range(4))
        x = torch.zeros(4, device=source.device())
        waits = source.stats()["waits"]
        copies = []
        for turn in range(40):
            x = x + 1
            copies += [(turn + 1.0, x.to(target.device())) for target in targets]
        assert all(copy[3].item() == value for value, copy in copies)
        assert source.stats()["waits"] - waits < 40
        # A copy into a tensor that failed claims nothing, and its offer must not stay.
        device = targets[0].device()
        failed = torch.ones(3, device=device).index_select(0, torch.tensor([9], device=device))
        refused = 0
        for _ in range(40):
            try:
                failed.copy_(x[:1])
            except RemoteTensorError:
                refused += 1
        assert refused
        assert x.to(targets[1].device())[0].item() == 40.0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_tensors_are_copied_through_brokers(dtype: torch.dtype) -> None:
    options = {"--peer": "any"}
    with (
        Serving(options) as one,
        Serving(options) as other,
        RemoteMachine("tcp", one.address) as source,
        RemoteMachine("tcp", other.address) as target,
    ):
        x = torch.arange(12 << 20, device=source.device()).to(dtype)
        for _ in range(2):
            before = target.stats()["uploaded_bytes"]
            copied = x.to(target.device())
            assert torch.equal(copied.cpu(), x.cpu())
            assert target.stats()["uploaded_bytes"] == before


@pytest.mark.parametrize(("peer", "is_sent"), [("any", True), ("", False)])
def test_a_server_sends_tensors_to_those_that_it_reaches(peer: str, is_sent: bool) -> None:
    with (
        Serving({"--peer": peer} if peer else {}) as one,
        Serving({"--peer": "any"}) as other,
        RemoteMachine("tcp", one.address) as source,
        RemoteMachine("tcp", other.address) as target,
    ):
        x = torch.zeros(3, device=source.device())
        copies = []
        for turn in range(20):
            x = x + 1
            copies.append((turn + 1.0, x.to(target.device())))
        assert [copy[2].item() == value for value, copy in copies] == [True] * 20
        route = _direct._ROUTES[source.device().index, target.device().index]
        assert (route.works, route.is_sent) == (True, is_sent)
        # The connections of the source are lost with their sessions, and it opens others.
        first, *others = other.sessions()
        for process in others:
            os.kill(process, signal.SIGKILL)
        copies = [(turn, (x + turn).to(target.device())) for turn in range(10)]
        assert all(torch.equal(copy.cpu(), x.cpu() + turn) for turn, copy in copies)
        assert is_running(first)


def test_a_tensor_that_cannot_be_sent_is_fetched() -> None:
    """The target refuses it, or nobody answers at its address."""
    metadata, elements = {"dtype": "float32", "sizes": [2]}, bytes(range(8))
    tickets = [f"{number:032x}" for number in range(_offers.MAX_OFFERED + 1)]
    with Serving() as served:
        peers = _peers.Peers((served.address, "127.0.0.1:1"))
        sent = [peers.send(served.address, each, metadata, elements) for each in tickets[:-1]]
        with pytest.raises(RuntimeError, match="a session can offer 16 tensors"):
            peers.send(served.address, tickets[-1], metadata, elements)
        assert peers.reaches(served.address)
        sent[0].withdraw(tickets[0])
        peers.send(served.address, tickets[-1], metadata, elements)
        assert peers.fetch(served.address, tickets[-1], metadata) == elements
        with pytest.raises(RuntimeError, match="expected 8 bytes, got 3"):
            peers.send(served.address, tickets[0], metadata, b"abc")
    offers = _offers.Offers[int]()
    sender = _peers.Sender(peers, offers)
    offers.add("session", tickets[0], 7, is_sent=True)
    with pytest.raises(LookupError, match=_offers.SENT):
        offers.take(tickets[0])
    sender.send("127.0.0.1:1", tickets[0], metadata, sealed(elements))
    for _ in range(200):
        with contextlib.suppress(LookupError):
            assert offers.take(tickets[0], 0.0) == 7
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the tensor is still being sent")
    assert not peers.reaches("127.0.0.1:1")
    sender.close()


def test_one_client_cannot_hold_all_offers() -> None:
    """Neither with offers nor with refusals, from many sessions."""
    offers = _offers.Offers[int](client=lambda session: str(session).partition("/")[0])
    tickets = (f"{number:032x}" for number in range(10_000))
    for number in range(40):
        for _ in range(_offers.MAX_OFFERED):
            refusal = offers.add(f"one/{number}", next(tickets), 7)
            offers.refuse(f"one/{number}", next(tickets), "why")
    assert "those of one client 512" in refusal
    assert len(offers._offers) == 512
    assert offers.add("other/1", next(tickets), 7) == ""
    offers.drop("one/3")
    assert offers.add("one/40", next(tickets), 7) == ""


def test_an_offer_that_ends_while_it_is_sent_leaves_nothing() -> None:
    discarded: list[int] = []
    offers = _offers.Offers[int](discarded.append)
    for end in (offers.withdraw, lambda session, ticket: offers.drop(session)):
        assert offers.add("one", "ticket", 7, is_sent=True) == ""
        offers.withdraw("other", "ticket")
        assert offers.add("one", "ticket", 8) == "invalid offer: its ticket is already in use"
        assert "ticket" in offers
        end("one", "ticket")
        assert "ticket" not in offers
        offers.keep("ticket")
        with pytest.raises(LookupError, match=_offers.NOT_YET):
            offers.take("ticket", 0.0)
    assert discarded == [7, 7]
    offers.add("one", "ticket", 9, is_sent=True)
    threading.Timer(0.2, offers.keep, ("ticket",)).start()
    assert offers.receive("ticket", 10.0) == 9


def test_what_was_sent_and_lost_is_fetched() -> None:
    """The session that holds it at the target ends before it is claimed."""
    metadata, elements = {"dtype": "float32", "sizes": [2]}, bytes(range(8))
    with Serving() as source, Serving() as target:
        peers = _peers.Peers(("any",))
        for at in (target.address, source.address):
            peers.send(at, "0" * 32, metadata, elements)
        (holder,) = target.sessions()
        os.kill(holder, signal.SIGKILL)

        def sent(ticket: str, wait: float) -> bytes:
            time.sleep(wait)
            raise LookupError(_offers.NOT_YET)

        got = peers.fetch(source.address, "0" * 32, metadata, sent=sent, is_sent=True)
        assert got == elements


def test_withdrawn_offers_do_not_fill_the_queue() -> None:
    """Nobody answers at the address, so the threads are busy."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        peers, offers = _peers.Peers(("any",)), _offers.Offers[int]()
        sender = _peers.Sender(peers, offers)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(100):
            ticket = f"{number:032x}"
            offers.add("session", ticket, number, is_sent=True)
            sender.send(address, ticket, {"dtype": "float32", "sizes": [2]}, sealed(bytes(8)))
            offers.withdraw("session", ticket)
        # A connection of each thread, and the queue.
        assert len(os.listdir("/proc/self/fd")) - before < 3 * _offers.MAX_OFFERED
        for address in ("x", "unix:/nowhere", "host:port"):
            offers.add("session", address, 1, is_sent=True)
            sender.send(address, address, {"dtype": "x"}, sealed(b""))
            assert offers.receive(address, 60.0) == 1
        sender.close()


def test_machines_on_one_server_copy_directly() -> None:
    with (
        Serving({"--peer": "any"}) as served,
        RemoteMachine("tcp", served.address) as source,
        RemoteMachine("tcp", served.address) as target,
    ):
        x = torch.zeros(3, device=source.device())
        before = target.stats()["uploaded_bytes"]
        copies = []
        for turn in range(12):
            x = x + 1
            copies.append((turn + 1.0, x.to(target.device())))
        assert all(copy[1].item() == value for value, copy in copies)
        assert target.stats()["uploaded_bytes"] == before


def test_the_size_of_a_tensor_that_nobody_offers_allocates_nothing() -> None:
    """A session says it, so it may be anything."""
    with Serving() as served:
        session = _peers.Peers((served.address,))._connect(served.address)
        assert isinstance(session, _native.PeerSession)
        for nbytes in (64 << 30, 1 << 50):
            with pytest.raises(RemoteTensorError):
                session.claim("0" * 32, 0, [nbytes], nbytes)
        session.close()
    peers = _peers.Peers(("any",))
    with pytest.raises(RuntimeError, match="too large"):
        peers.fetch("127.0.0.1:1", "0" * 32, {"dtype": "float32", "sizes": [2**40] * 4})
