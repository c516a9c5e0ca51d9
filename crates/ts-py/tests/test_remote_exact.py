# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests that results on the device ``ts`` equal those of a CPU bit for bit, in several dtypes."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


def _assert_exact(module: nn.Module, device: torch.device, *inputs: Any) -> None:
    """Compares a module on the device with the CPU, forward and backward.

    Repeats this for every choice of inputs that require gradients.
    """
    for grads in itertools.product([True, False], repeat=len(inputs)):
        for to in (torch.device("cpu"), device):
            torch.manual_seed(5)
            copied = copy.deepcopy(module).to(to)
            arguments = [
                x.detach().clone().to(to).requires_grad_(grad)
                for x, grad in zip(inputs, grads, strict=True)
            ]
            output = copied(*arguments)
            output = output[0] if isinstance(output, tuple) else output
            output = output.data if isinstance(output, nn.utils.rnn.PackedSequence) else output
            if output.requires_grad:
                output.float().pow(2).sum().backward()
            results = [output, *(p.grad for p in copied.parameters()), *(x.grad for x in arguments)]
            if to.type == "cpu":
                expected = results
        for one, other in zip(expected, results, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other.cpu()), (module, one.dtype, grads)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_modules_are_exact_in_every_dtype(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    rows, images = torch.randn(4, 8).to(dtype), torch.randn(2, 3, 8, 8).to(dtype)
    for module, argument in [
        (nn.LayerNorm(8), rows),
        (nn.LayerNorm(8, elementwise_affine=False), rows),
        (nn.RMSNorm(8), rows),
        (nn.GroupNorm(1, 3), images),
        (nn.BatchNorm1d(8), rows),
        (nn.BatchNorm2d(3), images),
        (nn.InstanceNorm2d(3), images),
        (
            nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8), nn.Mish(), nn.Linear(8, 2)),
            rows,
        ),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.MaxPool2d(2)), images),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8).to(dtype)),
        *((nn.Dropout(p), rows) for p in (0.0, 0.15, 0.45, 0.5, 1.0)),
    ]:
        _assert_exact(module.to(dtype), device, argument)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_networks_are_exact(device: torch.device, kind: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    sequences = torch.randn(3, 4, 6).to(dtype)
    lengths = torch.tensor([5, 3, 3, 1])
    padded = torch.randn(5, 4, 6).to(dtype)

    class Packed(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: torch.Tensor) -> Any:
            return self.network(nn.utils.rnn.pack_padded_sequence(x, lengths))

    for bidirectional, bias, batch_first in itertools.product([True, False], repeat=3):
        network = kind(
            6, 5, 2, bidirectional=bidirectional, bias=bias, batch_first=batch_first, dropout=0.3
        ).to(dtype)
        _assert_exact(network, device, sequences)
        _assert_exact(Packed(network.train(False)), device, padded)
    if kind is nn.LSTM:
        _assert_exact(nn.LSTM(6, 5, proj_size=2).to(dtype), device, sequences)
    if kind is nn.RNN:
        _assert_exact(nn.RNN(6, 5, nonlinearity="relu").to(dtype), device, sequences)
    cell = {nn.RNN: nn.RNNCell, nn.GRU: nn.GRUCell, nn.LSTM: nn.LSTMCell}[kind]
    _assert_exact(cell(6, 5).to(dtype), device, sequences[0])


@pytest.mark.product
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_networks_are_exact_without_gradients(
    device: torch.device, kind: Any, mode: Any, dtype: torch.dtype
) -> None:
    """PyTorch chooses other kernels for some dtypes on some processors while it records none."""
    torch.manual_seed(3)
    for bidirectional, bias in itertools.product([True, False], repeat=2):
        network = kind(6, 5, 2, bidirectional=bidirectional, bias=bias).to(dtype).eval()
        for shape in ((3, 4, 6), (1, 1, 6)):
            sequences = torch.randn(shape).to(dtype)
            with mode():
                expected = network(sequences)[0]
                actual = copy.deepcopy(network).to(device)(sequences.to(device))[0]
                assert torch.equal(actual.cpu(), expected), (network, shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_language_models_in_half_precision_are_exact(
    device: torch.device, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=100, bos_token_id=0, eos_token_id=99
    )
    host = GPT2LMHeadModel(config).eval().to(dtype)
    remote = copy.deepcopy(host).to(device)
    ids = torch.randint(1, 98, (2, 6))
    with torch.no_grad():
        assert torch.equal(remote(ids.to(device)).logits.cpu(), host(ids).logits)
    for sample in (False, True):
        options = {"max_new_tokens": 8, "do_sample": sample, "pad_token_id": 99}
        torch.manual_seed(1)
        expected = host.generate(ids, attention_mask=torch.ones_like(ids), **options)
        torch.manual_seed(1)
        mask = torch.ones_like(ids).to(device)
        assert torch.equal(
            remote.generate(ids.to(device), attention_mask=mask, **options).cpu(), expected
        )


def test_networks_with_silu_and_gru_train_as_on_a_cpu(device: torch.device) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(50, 16), nn.Linear(48, 5)
            self.network = nn.GRU(16, 24, batch_first=True, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tags: torch.Tensor = self.out(self.network(self.embed(x))[0])
            return tags.transpose(1, 2)

    def conv() -> nn.Module:
        first = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.15),
        )
        return nn.Sequential(*first, nn.Flatten(), nn.Linear(8 * 64, 4))

    images, classes = torch.randn(16, 3, 16, 16), torch.randint(4, (16,))
    words, tags = torch.randint(50, (8, 12)), torch.randint(5, (8, 12))
    for make, x, y, optimizer in [
        (conv, images, classes, functools.partial(torch.optim.AdamW, lr=1e-2)),
        (
            Tagger,
            words,
            tags,
            functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        ),
    ]:
        losses: list[list[float]] = []
        for to in (torch.device("cpu"), device):
            torch.manual_seed(3)
            model = make().to(to)
            torch.manual_seed(4)
            stepper = optimizer(model.parameters())
            losses.append([])
            for _ in range(25):
                stepper.zero_grad()
                loss = nn.functional.cross_entropy(model(x.to(to)), y.to(to))
                loss.backward()
                stepper.step()
                losses[-1].append(loss.item())
        assert losses[0] == losses[1]


def test_lazily_conjugated_tensors_are_exact(device: torch.device) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 4, dtype=torch.complex64), torch.randn(4, 3, dtype=torch.complex64)
    for run in (
        lambda a, b: a.mH @ b,
        lambda a, b: torch.linalg.solve(a.mH, b),
        lambda a, b: torch.linalg.solve_triangular(a.mH.tril(), b, upper=False),
        lambda a, b: torch.linalg.lu_solve(
            *torch.linalg.lu_factor(a), b.mT, left=False, adjoint=True
        ),
        lambda a, b: (a.conj().imag + 1, a.conj() * b[:, :1]),
    ):
        expected, result = run(a, b), run(a.to(device), b.to(device))
        pairs = (
            zip(expected, result, strict=True)
            if isinstance(expected, tuple)
            else [(expected, result)]
        )
        assert all(torch.equal(one, other.cpu()) for one, other in pairs)


def test_lazy_modules_move_to_the_device(device: torch.device) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(3)
    ).to(device)
    x = torch.randn(2, 3, 6, 6)
    assert module(x.to(device)).shape == (2, 3)
    assert torch.equal(module.eval()(x.to(device)).cpu(), copy.deepcopy(module).cpu()(x))
