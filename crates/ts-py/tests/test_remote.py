# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests that the device ``ts`` behaves like a CPU."""

from __future__ import annotations

import copy
import gc
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorstream.errors import ConfigurationError
from tensorstream.remote import (
    RemoteMachine,
    RemoteOutOfMemoryError,
    RemoteTensorError,
    metadata_hash,
    storage_id,
    trace,
)
from tensorstream.remote.providers._this_computer import ProcessServer
from torch import nn
from torch.utils.dlpack import to_dlpack


def test_tensors_compute_on_the_machine(machine: RemoteMachine, device: torch.device) -> None:
    x = torch.arange(12.0).reshape(3, 4).to(device)
    assert (x.device, x.shape, x.stride()) == (device, (3, 4), (4, 1))
    assert torch.equal((x @ x.T).cpu(), x.cpu() @ x.cpu().T)
    assert "device='ts:" in repr(x)
    before = machine.stats()["waits"]
    y = ((x + 1) * x).sum()
    assert machine.stats()["waits"] == before
    assert (y.item(), machine.stats()["waits"]) == (572.0, before + 1)


def test_views_share_their_storage(device: torch.device) -> None:
    x = torch.zeros(4, 6, device=device)
    view = x[1:3, ::2]
    view.add_(1)
    assert view._base is x and view.stride() == (6, 2)
    x[:, 0] = 7
    expected = torch.zeros(4, 6)
    expected[1:3, ::2] += 1
    expected[:, 0] = 7
    assert torch.equal(x.cpu(), expected)
    assert torch.equal(x.t().contiguous().cpu(), expected.t())
    assert torch.equal(x.view(torch.int32).cpu(), expected.view(torch.int32))


def test_data_dependent_shapes_need_one_wait(machine: RemoteMachine, device: torch.device) -> None:
    host = torch.tensor([[0, 3, 0], [5, 0, 3]])
    x = host.to(device)
    before = machine.stats()["waits"]
    assert x.nonzero().shape == (3, 2)
    assert machine.stats()["waits"] == before + 1
    assert torch.equal(x.unique().cpu(), host.unique())
    assert torch.equal(x[x > 0].cpu(), host[host > 0])
    assert torch.equal(
        x.repeat_interleave(torch.tensor([1, 2], device=device), 0).cpu(), host[[0, 1, 1]]
    )


def test_the_new_bytes_of_a_grown_storage_are_zero(device: torch.device) -> None:
    for _ in range(8):
        freed = torch.full((1000,), 7.0, device=device)
        del freed
        x = torch.arange(4.0).to(device)
        x.resize_(1000)
        assert x[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert not x[4:].any().item()


def test_storages_grow_under_views_and_outputs(device: torch.device) -> None:
    x = torch.arange(4.0).to(device)
    view = x[:2]
    x.resize_(8)
    x[:] = 5
    assert view.tolist() == [5.0, 5.0], "the view keeps its storage"
    out = torch.empty(0, device=device)
    result = torch.add(x, 1, out=out)
    assert result is out and out.tolist() == [6.0] * 8
    indices = torch.empty(0, dtype=torch.int64, device=device)
    torch.nonzero(x > 0, out=indices)
    assert indices.flatten().tolist() == list(range(8))


def test_unwritten_memory_is_zero(device: torch.device) -> None:
    assert torch.empty(3, device=device).tolist() == [0.0, 0.0, 0.0]


def test_random_numbers_are_those_of_a_cpu(device: torch.device) -> None:
    torch.manual_seed(5)
    host = torch.randn(7), torch.rand(3), nn.functional.dropout(torch.ones(50), 0.5)
    torch.manual_seed(5)
    remote = (
        torch.randn(7, device=device),
        torch.rand(3, device=device),
        nn.functional.dropout(torch.ones(50, device=device), 0.5),
    )
    assert all(torch.equal(one, other.cpu()) for one, other in zip(host, remote, strict=True))
    state = torch.ts.get_rng_state(device)
    first = torch.randn(4, device=device)
    torch.ts.set_rng_state(state, device)
    assert torch.equal(first.cpu(), torch.randn(4, device=device).cpu())


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.out = nn.Linear(32, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.embedding(x)))


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 3))


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(392, 3),
    )


def _train(
    model: nn.Module, batches: list[Any], device: Any, waits: Callable[[], int]
) -> tuple[list[float], list[int]]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(3)
    losses, waited = [], []
    for inputs, labels in batches:
        before = waits()
        optimizer.zero_grad()
        outputs = model(inputs.to(device))
        loss = nn.functional.cross_entropy(outputs.flatten(0, -2), labels.to(device).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        waited.append(waits() - before)
    return losses, waited


@pytest.mark.parametrize(
    ("make", "inputs", "classes"),
    [
        (_perceptron, lambda: torch.randn(16, 20), 3),
        (_convolutional, lambda: torch.randn(8, 3, 16, 16), 3),
        (_Recurrent, lambda: torch.randn(8, 5, 8), 3),
        (_Transformer, lambda: torch.randint(0, 50, (4, 7)), 50),
    ],
)
def test_models_train_as_on_a_cpu_and_wait_once_a_step(
    machine: RemoteMachine, device: torch.device, make: Any, inputs: Any, classes: int
) -> None:
    torch.manual_seed(0)
    host = make()
    remote = copy.deepcopy(host).to(device)
    batches = []
    for _ in range(50):
        batch = inputs()
        labels = batch.shape if batch.dtype == torch.int64 else batch.shape[:1]
        batches.append((batch, torch.randint(0, classes, labels)))
    expected, _ = _train(host, batches, "cpu", lambda: 0)
    losses, waited = _train(remote, batches, device, lambda: machine.stats()["waits"])
    assert losses == expected
    # In the first steps the machine reports the shapes of some results.
    assert max(waited[2:]) <= 1
    for one, other in zip(host.parameters(), remote.parameters(), strict=True):
        assert torch.equal(one, other.cpu())


def test_language_models_generate_as_on_a_cpu(machine: RemoteMachine, device: torch.device) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    # With a pad_token_id, transformers reads the tokens of each step a second time.
    ends = {"bos_token_id": 0, "eos_token_id": 99}
    llama = transformers.LlamaConfig(**shape, intermediate_size=128, num_key_value_heads=2, **ends)
    gpt2 = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, **ends)
    bert = transformers.BertConfig(**shape, intermediate_size=128, is_decoder=True, **ends)
    tokens = torch.randint(2, 99, (2, 7))
    mask = torch.ones_like(tokens)
    models = (
        transformers.GPT2LMHeadModel(gpt2), transformers.LlamaForCausalLM(llama),
        transformers.BertLMHeadModel(bert)
    )  # fmt: skip
    for model in models:
        remote = copy.deepcopy(model).eval().to(device)
        with torch.no_grad():
            assert torch.equal(model.eval()(tokens).logits, remote(tokens.to(device)).logits.cpu())
        for sample in (False, True):
            settings = {"max_new_tokens": 20, "do_sample": sample}
            torch.manual_seed(5)
            expected = model.generate(tokens, attention_mask=mask, **settings)
            torch.manual_seed(5)
            before = machine.stats()["waits"]
            output = remote.generate(tokens.to(device), attention_mask=mask.to(device), **settings)
            assert torch.equal(expected, output.cpu())
            # One wait for each token, and some before the first.
            assert machine.stats()["waits"] - before <= output.shape[1] - tokens.shape[1] + 8


def test_encoders_compute_as_on_a_cpu(machine: RemoteMachine, device: torch.device) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    tokens = torch.randint(0, 100, (2, 7))
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**shape, vocab_size=100))
    vit = transformers.ViTForImageClassification(
        transformers.ViTConfig(**shape, image_size=32, patch_size=8)
    )
    inputs = (
        {"input_ids": tokens, "attention_mask": mask},
        {"pixel_values": torch.randn(2, 3, 32, 32)},
    )
    for model, arguments in zip((bert, vit), inputs, strict=True):
        remote = copy.deepcopy(model).eval().to(device)
        on_device = {name: value.to(device) for name, value in arguments.items()}
        with torch.no_grad():
            before = machine.stats()["waits"]
            logits = remote(**on_device).logits.cpu()
            # BERT reads whether its mask excludes any token.
            assert machine.stats()["waits"] - before <= 2
            assert torch.equal(model.eval()(**arguments).logits, logits)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"foreach": True, "momentum": 0.9}),
        ("SGD", {"fused": True}),
        ("Adam", {"foreach": True, "amsgrad": True}),
        ("Adam", {"foreach": False, "amsgrad": True}),
        ("AdamW", {"fused": True}),
        ("Adagrad", {"fused": True}),
        ("RMSprop", {"foreach": True}),
        ("NAdam", {"foreach": True}),
        ("Muon", {}),
    ],
)
def test_optimizers_step_as_on_a_cpu(
    device: torch.device, name: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    host = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 3, bias=False))
    remote = copy.deepcopy(host).to(device)
    x = torch.randn(4, 8)
    for model, to in ((host, torch.device("cpu")), (remote, device)):
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(x.to(to)).pow(2).sum().backward()
            optimizer.step()
    for one, other in zip(host.parameters(), remote.parameters(), strict=True):
        assert torch.equal(one, other.cpu())


def test_a_failed_operator_raises_once_and_others_continue(
    machine: RemoteMachine, device: torch.device
) -> None:
    x = torch.arange(4.0).to(device)
    bad = x.index_select(0, torch.tensor([9], device=device))
    worse = bad + 1
    good = [x + n for n in range(70)]
    with pytest.raises(
        RemoteTensorError, match=r"aten::index_select\(float32\[4\], 0, int64\[1\]\)"
    ):
        good[0].tolist()
    assert [one[1].item() for one in good[:3]] == [1.0, 2.0, 3.0]
    machine.synchronize()
    with pytest.raises(RemoteTensorError):
        worse.tolist()
    # Errors in shapes are raised at the call.
    with pytest.raises(RuntimeError, match="reduction dim"):
        torch.ones(2, 3, device=device) @ torch.ones(2, 3, device=device)


def test_errors_and_waits_name_the_line(machine: RemoteMachine, device: torch.device) -> None:
    x = torch.arange(4.0).to(device)
    bad = x.index_select(0, torch.tensor([9], device=device))  # the line
    with pytest.raises(
        RemoteTensorError, match=r"test_remote.py:\d+ in test_errors_and_waits_name_the_line"
    ) as caught:
        nn.functional.relu(bad).sum().item()
    line = str(caught.value).partition("test_remote.py:")[2].partition(" ")[0]
    assert (
        Path(__file__)
        .read_text(encoding="utf-8")
        .splitlines()[int(line) - 1]
        .endswith("# the line")
    )
    with trace() as traced:
        nn.Linear(4, 2).to(device)(x).sum().item()
    assert [event.what for event in traced.waits] == ["item"]
    assert "aten::addmm" in [event.what for event in traced.events]
    assert all("test_errors_and_waits_name_the_line" in event.place for event in traced.events)
    assert "1 waits" in str(traced)
    assert any("test_errors_and_waits_name_the_line" in wait.place for wait in machine.waits())


def test_tensors_have_storage_ids_and_hashes(device: torch.device) -> None:
    x = torch.ones(3, 4, device=device)
    assert storage_id(x) == storage_id(x[1:]) != storage_id(x.clone())
    assert metadata_hash(x) == metadata_hash(x.view(3, 4)) != metadata_hash(x[1:])
    with pytest.raises(TypeError, match="cpu"):
        storage_id(torch.ones(1))


def test_autocast_uses_the_lists_of_cuda(device: torch.device) -> None:
    x = torch.randn(4, 4, device=device)
    with torch.autocast("ts", dtype=torch.bfloat16):
        product = x @ x
        assert (product.dtype, torch.softmax(product, -1).dtype, (product + x).dtype) == (
            torch.bfloat16, torch.float32, torch.float32,
        )  # fmt: skip
        assert nn.Linear(4, 4).to(device)(x).dtype == torch.bfloat16
        assert (x.double() @ x.double()).dtype == torch.float64
    assert (x @ x).dtype == torch.float32


def test_a_host_generator_draws_as_on_a_cpu(device: torch.device) -> None:
    host, remote = torch.Generator().manual_seed(9), torch.Generator().manual_seed(9)
    torch.manual_seed(1)
    for _ in range(2):
        assert torch.equal(
            torch.randn(5, generator=host), torch.randn(5, device=device, generator=remote).cpu()
        )
    assert torch.equal(host.get_state(), remote.get_state())
    torch.manual_seed(1)
    first = torch.rand(3, device=device)
    torch.manual_seed(1)
    torch.rand(3, device=device, generator=remote)
    assert torch.equal(first.cpu(), torch.rand(3, device=device).cpu()), (
        "the generator of the device does not change"
    )


def test_moved_modules_keep_tied_weights_and_optimizers(device: torch.device) -> None:
    model = nn.ModuleDict({"one": nn.Linear(3, 3), "other": nn.Linear(3, 3)})
    model["other"].weight = model["one"].weight
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    weight = model["one"].weight
    model.to(device)
    assert model["other"].weight is model["one"].weight is weight
    assert weight.device == device
    before = weight.detach().cpu()
    model["one"](torch.ones(2, 3, device=device)).sum().backward()
    optimizer.step()
    assert torch.equal(weight.detach().cpu(), before - 2)
    assert model.cpu()["one"].weight is weight


def test_saved_tensors_keep_their_shared_storage(device: torch.device, tmp_path: Path) -> None:
    x = torch.randn(3, 4, device=device)
    torch.save({"x": x, "row": x[1]}, tmp_path / "tensors.pt")
    loaded = torch.load(tmp_path / "tensors.pt")
    assert loaded["x"].device == device
    loaded["x"].zero_()
    assert loaded["row"].tolist() == [0.0] * 4
    host = torch.load(tmp_path / "tensors.pt", map_location="cpu")
    assert torch.equal(host["x"], x.cpu())
    copied = copy.deepcopy([x, x[0]])
    copied[0].zero_()
    assert copied[1].tolist() == [0.0] * 4
    assert x.to("cpu", non_blocking=True).device.type == "cpu"


def test_forked_data_loader_workers_need_no_machine(device: torch.device) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    batches = [
        batch.to(device).sum().item()
        for (batch,) in torch.utils.data.DataLoader(data, 4, num_workers=1)
    ]
    assert batches == [6.0, 22.0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_run_on_the_machine(device: torch.device, backend: str) -> None:
    x = torch.randn(3, 3, device=device)
    compiled = torch.compile(lambda value: (value @ value).relu().sum(), backend=backend)
    assert compiled(x).item() == (x @ x).relu().sum().item()


def test_inductor_is_refused_for_functions(device: torch.device) -> None:
    compiled = torch.compile(lambda value: (value @ value).relu().sum())
    with pytest.raises(Exception, match="aot_eager"):
        compiled(torch.randn(3, 3, device=device))


def test_unsupported_types_of_tensors_are_refused_by_name(device: torch.device) -> None:
    def train() -> None:
        embedding = nn.Embedding(10, 4, sparse=True).to(device)
        embedding(torch.tensor([1, 2], device=device)).sum().backward()

    def nest() -> torch.Tensor:
        nested: torch.Tensor = torch.nested.nested_tensor(
            [torch.ones(2, device=device), torch.ones(3, device=device)]
        )
        return nested * 2

    for run, message in [
        (train, r"not support sparse tensors; use to_dense\(\), or nn.Embedding\(sparse=False\)"),
        (lambda: torch.eye(3).to_sparse().to(device), "sparse tensors"),
        (lambda: repr(torch.eye(3).to_sparse_csr().to(device)), r"sparse tensors; use to_dense"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8).to(device),
            r"quantized tensors; use dequantize",
        ),
        (nest, "nested tensors of strided layout; use nested tensors of layout=torch.jagged"),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            run()
    jagged = torch.nested.nested_tensor(
        [torch.ones(2, device=device), torch.ones(3, device=device)], layout=torch.jagged
    )
    assert (jagged * 2).values().tolist() == [2.0] * 5


@pytest.mark.parametrize("train", [True, False])
def test_inductor_is_refused_for_modules(device: torch.device, train: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.ReLU()).to(device))
    with torch.set_grad_enabled(train), pytest.raises(Exception, match="aot_eager"):
        compiled(torch.ones(1, 2, device=device))


def test_an_error_that_was_never_raised_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with RemoteMachine("mock") as machine:
        x = torch.ones(3, device=machine.device())
        x.index_select(0, torch.tensor([9], device=machine.device()))
    assert "stopped with an error that was never raised" in caplog.text and "index" in caplog.text


def test_running_out_of_memory_is_its_own_error(device: torch.device) -> None:
    x = torch.ones(8, device=device).expand(1 << 40, 8)
    with pytest.raises(RemoteOutOfMemoryError):
        x.contiguous()[0, 0].item()
    assert torch.ones(2, device=device).tolist() == [1.0, 1.0]


def test_sixteen_threads_share_a_machine(device: torch.device) -> None:
    results: dict[int, float] = {}

    def work(number: int) -> None:
        x = torch.full((8,), float(number), device=device)
        total = torch.zeros(8, device=device)
        for _ in range(100):
            total = total + x
        results[number] = total.sum().item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: 800.0 * number for number in range(16)}


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def test_the_module_of_the_device_tells_names_and_memory(device: torch.device) -> None:
    ts = torch.ts  # type: ignore[attr-defined]
    before = ts.memory_allocated(device)
    x = torch.ones(1000, device=device)
    y = x[10:]  # a view
    assert ts.memory_allocated(device) == before + 4000
    with ts.device(device.index):
        assert ts.memory_allocated() == ts.memory_allocated(device.index) == before + 4000
        assert ts.get_device_name() == ts.get_device_name(str(device))
    del x, y
    assert ts.memory_allocated(device) == before
    assert "CPU of the machine at unix:" in ts.get_device_name(device)
    ts.empty_cache()
    with RemoteMachine("mock") as other:
        stopped = other.device()
        assert ts.memory_allocated(stopped) == 0
    for call in (ts.memory_allocated, ts.get_device_name):
        with pytest.raises(ConfigurationError, match="start one"):
            call(stopped)


def test_tensors_use_no_local_memory_and_free_remote_memory(
    machine: RemoteMachine, device: torch.device
) -> None:
    torch.ones(4, device=device).sum().item()
    assert isinstance(machine._server, ProcessServer)
    process = machine._server.process.pid
    local_before, remote_before = _resident(os.getpid()), _resident(process)
    tensors = [torch.full((1 << 26,), float(number), device=device) for number in range(10)]
    assert [tensor[-1].item() for tensor in tensors] == [float(number) for number in range(10)]
    assert _resident(os.getpid()) - local_before < 20 << 20
    tensors.clear()
    # 40 tensors of 64 MiB, of which only one exists at a time.
    for _ in range(40):
        torch.ones(1 << 24, device=device).mul_(2)
    machine.synchronize()
    assert _resident(process) - remote_before < 600 << 20


def test_scalars_are_cached_until_they_are_written_to(
    machine: RemoteMachine, device: torch.device
) -> None:
    x = torch.arange(4.0).to(device)
    total = x.sum()
    before = machine.stats()
    assert [total.item() for _ in range(3)] == [6.0] * 3
    after = machine.stats()
    assert (
        after["waits"] - before["waits"],
        after["cached_scalars"] - before["cached_scalars"],
    ) == (1, 2)
    # Every write to the tensor or its storage, and every change of its data, invalidates the cache.
    writes: list[tuple[Callable[[], object], float]] = [
        (lambda: total.add_(1), 7.0),
        (lambda: total.copy_(torch.tensor(3.0)), 3.0),
        (lambda: torch.sum(x, 0, out=total), 6.0),
        (lambda: torch._foreach_mul_([total], 2.0), 12.0),
        (lambda: total.view(1)[0].fill_(5.0), 5.0),
        (lambda: setattr(total, "data", x[1]), 1.0),
    ]
    for write, expected in writes:
        write()
        assert (total.item(), total.item()) == (expected, expected)
    norm = nn.BatchNorm1d(1).to(device)
    assert norm.running_mean is not None
    assert norm.running_mean.item() == 0.0
    norm(torch.full((4, 1), 2.0, device=device))
    assert norm.running_mean.item() == pytest.approx(0.2)


def test_scalars_that_a_loop_reads_are_prefetched(
    machine: RemoteMachine, device: torch.device
) -> None:
    x = torch.arange(4.0).to(device)
    before = machine.stats()
    for step in range(6):
        total = (x + step).sum()
        changed = (x * step).sum()
        for _ in range(70):
            x.add_(0)
        if step % 2:
            changed += 1
        assert (total.item(), changed.item()) == (6.0 + 4 * step, 6.0 * step + step % 2)
    after = machine.stats()
    # `total` is prefetched from the second iteration. In some iterations `changed` is written to
    # after its prefetch, and requested again.
    assert after["early_scalars"] - before["early_scalars"] >= 5
    assert after["waits"] - before["waits"] == 12


def test_logs_name_tensors_by_their_hashes(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(3, device=device)
    x + x
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "tensorstream.remote"):
        y = torch.add(x, x)
    expected = f"aten::add.Tensor({metadata_hash(x)}, {metadata_hash(x)}) -> {metadata_hash(y)}"
    assert expected in caplog.messages


def test_storages_are_freed_after_operators_that_use_them(
    machine: RemoteMachine, device: torch.device
) -> None:
    def storages() -> set[int]:
        return {storage for storage, *_ in machine._get_session().storages()}

    gc.collect()
    before = storages()
    x = torch.ones(1000, device=device)
    view, number = x[10:20], storage_id(x)
    # These operators are requested before the storage is freed, so they must run first.
    results = [(x + step).sum() for step in range(100)]
    del x
    assert number in storages(), "a view keeps the storage"
    del view
    assert number not in storages()
    assert [one.item() for one in results[::50]] == [1000.0, 51000.0]
    del results
    gc.collect()
    assert storages() <= before


def test_a_failed_draw_does_not_change_the_device_generator(device: torch.device) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(8)
    with pytest.raises(RuntimeError, match="std"):
        torch.empty(3, device=device).normal_(0, -1, generator=generator)
        torch.ts.synchronize()
    assert torch.equal(torch.rand(3, device=device).cpu(), expected)
    host = torch.Generator().manual_seed(8)
    assert torch.equal(
        torch.randperm(5, device=device, generator=generator).cpu(),
        torch.randperm(5, generator=host),
    )


def test_a_host_generator_does_not_affect_other_draws(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorstream.remote.client import _server_operators as _operators

    receive, others = _operators.RECEIVE_GENERATOR, []

    def draw_first(anchor: torch.Tensor) -> torch.Tensor:
        # Another thread may draw before the state is received.
        others.append(torch.rand(3, device=device))
        return receive(anchor)

    monkeypatch.setattr(_operators, "RECEIVE_GENERATOR", draw_first)
    torch.manual_seed(3)
    expected = [torch.rand(3) for _ in range(2)]
    torch.manual_seed(3)
    generator, host = torch.Generator().manual_seed(8), torch.Generator().manual_seed(8)
    for _ in range(2):
        drawn = torch.rand(4, device=device, generator=generator)
        assert torch.equal(drawn.cpu(), torch.rand(4, generator=host))
    assert all(torch.equal(one, other.cpu()) for one, other in zip(expected, others, strict=True))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, generator: x.clone().normal_(generator=generator),
        lambda x, generator: x.clone().uniform_(generator=generator),
        lambda x, generator: x.clone().random_(0, 9, generator=generator),
        lambda x, generator: x.clone().exponential_(generator=generator),
        lambda x, generator: x.clone().geometric_(0.5, generator=generator),
        lambda x, generator: x.clone().cauchy_(generator=generator),
        lambda x, generator: x.clone().log_normal_(generator=generator),
        lambda x, generator: torch.bernoulli(x, generator=generator),
        lambda x, generator: torch.bernoulli(x, 0.3, generator=generator),
        lambda x, generator: torch.multinomial(x, 3, generator=generator),
        lambda x, generator: torch.poisson(x, generator=generator),
        lambda x, generator: torch.binomial(x * 8, x, generator=generator),
        lambda x, generator: torch.normal(x, x, generator=generator),
        lambda x, generator: torch.normal(x, 2.0, generator=generator),
        lambda x, generator: torch.normal(0.5, x, generator=generator),
        lambda x, generator: torch.randint(9, (4,), device=x.device, generator=generator),
        lambda x, generator: torch.randperm(9, device=x.device, generator=generator),
    ],
)
def test_every_random_operator_takes_a_generator(device: torch.device, draw: Any) -> None:
    x = torch.full((2, 8), 0.5)
    one, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    for _ in range(2):
        assert torch.equal(draw(x, one), draw(x.to(device), other).cpu())
    assert torch.equal(one.get_state(), other.get_state())


def test_the_default_dtype_is_that_of_the_client(device: torch.device) -> None:
    numbers = torch.arange(4, device=device)
    assert (numbers / 2).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal((numbers / 3).cpu(), torch.arange(4) / 3)
        assert torch.equal(torch.sqrt(numbers).cpu(), torch.arange(4).sqrt())
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal((numbers / 3).cpu(), torch.arange(4) / 3)


def test_backward_goes_from_a_cpu_loss_through_a_second_device() -> None:
    with RemoteMachine.mock(device_count=2) as machine:
        x = torch.ones(3, requires_grad=True)
        (x.to(machine.device(1)) * 2).cpu().sum().backward()
        assert x.grad is not None and x.grad.tolist() == [2.0] * 3


def test_module_ts_keeps_tied_weights_and_optimizers() -> None:
    with RemoteMachine.mock(device_count=2) as machine:
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        net[1].weight = net[0].weight
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        net.ts(machine.device(1).index)
        assert net[1].weight is net[0].weight and net[0].weight.device == machine.device(1)
        assert optimizer.param_groups[0]["params"][0] is net[0].weight


@pytest.mark.parametrize("count", [1000, (1 << 18) - 1, 1 << 18])
def test_parts_of_storages_keep_their_place(device: torch.device, count: int) -> None:
    """DLPack and slices of storages have the address of a part, and no offset.

    Storages of 1 MiB and more have addresses of another kind.
    """
    outcomes = []
    for where in (torch.device("cpu"), device):
        x, other = torch.arange(float(count), device=where), torch.ones(4, device=where)
        first = torch.from_dlpack(to_dlpack(x[1:]))
        part = torch.from_dlpack(to_dlpack(x[128:132]))
        part.zero_()
        sliced = torch.empty(0, device=where).set_(x.untyped_storage()[1024:], 2, (3,), (1,))
        sliced += 1000
        columns = torch.from_dlpack(to_dlpack(x[:1000].view(10, 100)[2:, 5::7]))
        last = torch.from_dlpack(to_dlpack(x[-1:]))
        assert (
            part.data_ptr() == x[128:].data_ptr() and x.view(torch.int32).data_ptr() == x.data_ptr()
        )
        outcomes.append([each.tolist() for each in (x[:999], last, other, first[:3], columns)])
        del x
        outcomes[-1] += [sliced.tolist(), columns.sum().item()]
        with pytest.raises(RuntimeError, match="not resizable"):
            sliced.resize_(5 * count)
    assert outcomes[0] == outcomes[1]
    with pytest.raises(ValueError, match="multiple of the 4 bytes of an element, got 2"):
        x = torch.arange(1000.0, device=device)
        torch.empty(0, device=device).set_(x.untyped_storage()[2:], 0, (3,), (1,)).tolist()


def test_views_stay_valid_while_a_storage_grows(device: torch.device) -> None:
    outcomes = []
    for where in (torch.device("cpu"), device):
        x = torch.arange(10.0, device=where)
        view = x[2:5]
        seen = []
        for count in (1000, (1 << 18) - 1, 1 << 18, 1 << 20):
            x.resize_(count)
            view += 1
            seen.append((x[:10].tolist(), view.tolist(), x.untyped_storage().nbytes()))
        outcomes.append(seen)
    assert outcomes[0] == outcomes[1]
