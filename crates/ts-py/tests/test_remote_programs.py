# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests that programs find on the device ``ts`` what they find on a CPU, and that machines change
nothing for programs that do not use them."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
import tensorstream as ts
import torch
from tensorstream.remote import RemoteMachine
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.conj().mul_(2),
        lambda x: x.conj().copy_(torch.tensor([5 + 6j, 7 + 8j]).to(x.device)),
        lambda x: x.conj()[0].fill_(3j),
        lambda x: x.conj().imag.add_(3),
        lambda x: x.imag.neg_().mul_(2),
        lambda x: torch._neg_view(x).add_(1),
        lambda x: torch.view_as_real(x).sub_(1),
        lambda x: x.conj().index_add_(
            0, torch.tensor([1], device=x.device), torch.tensor([2 + 1j], device=x.device)
        ),
        lambda x: torch.mul(x, 2, out=x.conj()),
    ],
)
def test_writes_through_lazy_views_change_the_tensor(
    write: Callable[[torch.Tensor], Any], device: torch.device
) -> None:
    results = []
    for where in ("cpu", device):
        x = torch.tensor([1 + 2j, 3 - 4j], device=where)
        try:
            write(x)
        except RuntimeError:
            results.append(None)  # PyTorch refuses some
        else:
            results.append(x.cpu())
    if results[0] is None:
        assert results[1] is None
    else:
        assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_dropout_recomputes_the_same(
    reentrant: bool, device: torch.device
) -> None:
    def gradient(recompute: bool) -> torch.Tensor:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)).to(device)
        x = torch.ones(5, 8, device=device, requires_grad=True)
        torch.manual_seed(5)
        y = checkpoint(net, x, use_reentrant=reentrant) if recompute else net(x)
        y.sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    assert torch.equal(gradient(False), gradient(True))


@pytest.fixture
def current(device: torch.device) -> Iterator[torch.device]:
    """The current device of this thread during a test."""
    with torch.get_device_module(device).device(device):
        yield device


def test_the_device_module_has_what_pytorch_asks_for(current: torch.device) -> None:
    device, module = current, torch.get_device_module(current)
    with torch.random.fork_rng([device.index], device_type="ts"):
        module.manual_seed(7)
        assert module.initial_seed() == 7
        drawn = torch.rand(4, device=device)
    states = module.get_rng_state_all()
    module.seed_all()
    assert module.initial_seed() != 7
    module.seed()
    module.set_rng_state_all(states)
    assert all(map(torch.equal, states, module.get_rng_state_all()))
    module.manual_seed_all(2**64 - 1)
    assert module.initial_seed() == 2**64 - 1
    module.manual_seed(7)
    assert torch.equal(torch.rand(4, device=device), drawn)
    module.init()
    assert module.is_initialized()
    storage = torch.ones(2, device=device).untyped_storage()
    assert storage.is_ts and not torch.ones(2).untyped_storage().is_ts
    with pytest.raises(RuntimeError, match=r"invalid device ts:\d+: The device index is out of"):
        module.set_device(module.device_count())


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.randn(-1, 2, device=device),
        lambda device: torch.empty_strided((2, -3), (1, 1), device=device),
        lambda device: torch.ones(2, device=device).new_empty(-1),
        lambda device: torch.randn(2, device="ts:200"),
        lambda device: torch.ones(2).to("ts:999"),
        lambda device: torch.zeros(2, device="ts:100"),
    ],
)
def test_impossible_tensors_are_runtime_errors(
    make: Callable[[torch.device], Any], device: torch.device
) -> None:
    with pytest.raises(Exception, match=r"negative dimension|ts:100|invalid device") as caught:
        make(device)
    assert not isinstance(caught.value, OverflowError)


@pytest.mark.parametrize("first", [SDPBackend.MATH, None])
def test_attention_is_what_the_program_chooses(first: Any, device: torch.device) -> None:
    tensors = [torch.rand(2, 2, 24 if first else 16, 8) for _ in range(3)]
    attention = nn.functional.scaled_dot_product_attention

    def compare() -> None:
        expected = attention(*tensors)
        assert torch.equal(attention(*(each.to(device) for each in tensors)).cpu(), expected)

    for choice in (first, None if first else SDPBackend.MATH, first):
        if choice is None:
            compare()
        else:
            with sdpa_kernel(choice):
                compare()


def test_the_settings_of_the_process_are_those_of_its_machines() -> None:
    with RemoteMachine.local(threads=1) as machine:
        device = machine.device()
        x = torch.ones(3, device=device)
        unseen = torch.tensor([0, 0, 1], device=device)
        torch.use_deterministic_algorithms(True)
        try:
            # This operator has no deterministic kernel on any device.
            with pytest.raises(RuntimeError, match="deterministic"):
                x.put_(unseen, torch.ones(3, device=device), accumulate=False).sum().item()
            torch.use_deterministic_algorithms(True, warn_only=True)
            x = torch.ones(3, device=device)
            assert x.put_(unseen, torch.ones(3, device=device)).sum().item() == 3
        finally:
            torch.use_deterministic_algorithms(False)
        before = torch.get_float32_matmul_precision()
        wide = torch.rand(64, 64)
        try:
            for precision in ("medium", "highest"):
                torch.set_float32_matmul_precision(precision)
                here = wide.to(device)
                assert torch.equal((here @ here).cpu(), wide @ wide), precision
        finally:
            torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**53 + 1, -(2**63)])
def test_large_integers_are_exact(number: int, device: torch.device) -> None:
    dtype = torch.uint64 if number > 2**62 else torch.int64
    x = torch.tensor([number, 1], dtype=dtype)
    there = x.to(device)
    assert torch.equal((there == number).cpu(), x == number)
    assert there[0].item() == number
    assert torch.equal(torch.full((2,), number, dtype=dtype, device=device)[:1].cpu(), x[:1])
    assert torch.equal(torch.where(there == number, there, there).cpu(), x)


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(3, 4),
        nn.LSTM(3, 4),
        nn.GRU(3, 4, bidirectional=True),
        nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)),
    ],
)
def test_modules_move_while_something_refers_to_their_parameters(
    module: nn.Module, device: torch.device
) -> None:
    module = copy.deepcopy(module)
    x = torch.rand(5, 3)
    output = module(x)
    parameters = dict(module.named_parameters())
    views = [parameter[:1] for parameter in parameters.values()]
    module.to(device)
    assert dict(module.named_parameters()) == parameters
    assert all(parameter.device == device for parameter in parameters.values())
    assert module(x.to(device)) is not None
    (output[0] if isinstance(output, tuple) else output).sum().backward()
    assert all(view.device.type == "cpu" for view in views)
    module.cpu()
    assert all(parameter.device.type == "cpu" for parameter in parameters.values())


def test_tied_parameters_stay_tied_when_they_move(device: torch.device) -> None:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.weight = a.weight
    both = nn.Sequential(a, b)
    output = both(torch.rand(2, 3))
    both.to(device)
    assert a.weight is b.weight and a.weight.device == device
    del output


def test_data_of_parameters_can_be_replaced(device: torch.device) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    parameter.data = parameter.data.to(device)
    assert parameter.device == device and parameter.requires_grad and parameter.is_leaf
    (parameter * 2).sum().backward()
    assert parameter.grad.tolist() == [3.0] * 3
    parameter.data = torch.zeros(3)
    assert parameter.device.type == "cpu"
    with pytest.raises(TypeError):
        parameter.data = 3  # type: ignore[assignment]


@pytest.mark.parametrize("padded", [[2, 3], [1, 4], [4, 4]])
def test_encoders_leave_out_what_is_padded(padded: list[int], device: torch.device) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8)).eval()
    mask = torch.arange(4)[None] >= torch.tensor(padded)[:, None]
    x = torch.rand(2, 4, 8)
    for keep in (mask, mask.flip(1)):  # the second one is not left-aligned
        with torch.no_grad():
            expected = encoder.cpu()(x, src_key_padding_mask=keep)
            got = encoder.to(device)(x.to(device), src_key_padding_mask=keep.to(device))
        assert torch.equal(got.cpu().nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda x: x[:1].expand(x.shape),
    ],
)
def test_results_have_the_strides_of_a_cpu(
    change: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(8), nn.ReLU(),
        nn.MaxPool2d(2), nn.ConvTranspose2d(8, 8, 2), nn.PixelShuffle(2), nn.LogSoftmax(-1),
    )  # fmt: skip
    there = copy.deepcopy(net).to(device)
    host = torch.rand(2, 3, 8, 8)
    for _ in range(2):
        x = change(host).requires_grad_()
        y = change(host.to(device)).requires_grad_()
        assert y.stride() == x.stride()
        result, remote = net(x), there(y)
        assert remote.stride() == result.stride()
        assert torch.equal(remote.cpu(), result)
        result.sum().backward()
        remote.sum().backward()
        assert x.grad is not None and y.grad is not None
        assert y.grad.stride() == x.grad.stride()
        assert torch.equal(y.grad.cpu(), x.grad)


def _seed_of_worker(number: int) -> int:
    return number + torch.initial_seed() - torch.initial_seed()


class _Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full((2,), float(_seed_of_worker(at)))


def test_machines_change_nothing_on_the_cpu(device: torch.device) -> None:
    assert torch.device(0) == torch.device("cuda:0")
    assert torch.device("cpu") == torch.device(type="cpu")
    with pytest.raises(RuntimeError, match="negative"):
        torch.device(-1)
    generator = torch.Generator().manual_seed(3)
    assert type(generator) is torch.Generator
    copied = pickle.loads(pickle.dumps(generator))
    assert torch.equal(copied.get_state(), generator.get_state())
    assert nn.DataParallel(nn.Linear(3, 2))(torch.ones(4, 3)).shape == (4, 2)
    for context in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(
            _Numbers(), batch_size=2, num_workers=1, multiprocessing_context=context
        )
        assert torch.cat(list(loader))[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(_seed_of_worker, [4]) == [4]
    parameter = nn.Parameter(torch.ones(2))
    parameter.data = torch.zeros(2)
    assert parameter.data.tolist() == [0.0, 0.0]


def test_data_of_parameters_can_be_replaced_after_a_model_has_streamed(
    device: torch.device, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    ts.offload(model, ts.Config(storage_path=tmp_path))
    ts.restore(model)
    test_data_of_parameters_can_be_replaced(device)


def test_encoders_with_layers_of_their_own_are_refused(device: torch.device) -> None:
    """PyTorch would call their ``forward`` or hooks with nested tensors."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval().to(device)
    encoder.layers[1].register_forward_hook(lambda *_: None)
    mask = torch.tensor([[False, True], [False, False]], device=device)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="enable_nested_tensor=False"):
        encoder(torch.rand(2, 2, 8, device=device), src_key_padding_mask=mask)


def test_a_machine_starts_with_an_unknown_python(programs: preloaded.Server) -> None:
    program = """
        import logging, sys, torch
        logging.basicConfig(format="%(message)s", stream=sys.stdout)
        from tensorstream import _native
        from tensorstream.remote import RemoteMachine

        def unknown(class_, create, only_numbers):
            raise RuntimeError(f"cannot change {class_.__name__}")

        _native.remote_create_with = unknown
        with RemoteMachine.mock() as machine:
            print(torch.ones(3, device=machine.device()).sum().item())
    """
    ran = programs.run_code(program)
    assert ran.stdout.splitlines() == [
        "cannot change Generator; they are created as without machines",
        "cannot change device; they are created as without machines",
        "cannot change Stream; they are created as without machines",
        "cannot change Event; they are created as without machines",
        "3.0",
    ]
