# SPDX-License-Identifier: MIT OR Apache-2.0
"""Programs that run models on both devices of the stand-in accelerator. See ``on_stand_in.py``."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorstream as ts
import torch
from exactness import assert_same
from on_stand_in import (
    DEVICE,
    OTHER,
    Library,
    adapted,
    autocast,
    linears,
    main,
    on_host,
    program,
    run_in_threads,
    small_llama,
    train_both,
)


def _halves(model: Any) -> dict[str, str]:
    """Returns a map with the second half of each list of layers on the other device."""
    halves = {"": DEVICE}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) > 1:
            layers = range(len(module) // 2, len(module))
            halves |= {f"{name}.{layer}": OTHER for layer in layers}
    return halves


@program
def layers() -> None:
    """Each device has its own layers, budget and statistics."""
    library, model = Library(), linears()
    resident = copy.deepcopy(model).to(DEVICE)
    placed = {"": DEVICE, "4": OTHER, "5": OTHER, "6": OTHER, "7": "disk"}
    unit = 256 * 257 * 4
    with tempfile.TemporaryDirectory() as directory:
        config = ts.Config(
            storage_path=directory,
            device=placed,
            budget={DEVICE: 3 * unit, OTHER: 2 * unit + 50_000},
        )
        streamed = ts.offload(copy.deepcopy(model), config)
        assert [str(each.device) for each in streamed.parameters()][::2] == [
            *[DEVICE] * 4,
            *[OTHER] * 3,
            DEVICE,
        ]
        for turn in range(4):
            inputs = torch.randn(4, 256)
            context = (torch.no_grad, torch.inference_mode, autocast)[turn % 3]
            with library.delays(2000 if turn else 0, turn), context():
                result = streamed(inputs.to((DEVICE, OTHER, "cpu")[turn % 3]))
                assert result.device == torch.device(DEVICE)
                assert torch.equal(resident(inputs.to(DEVICE)).cpu(), result.cpu())
            wanted = inputs.clone().to(DEVICE).requires_grad_()
            given = inputs.clone().to(DEVICE).requires_grad_()
            resident(wanted).sum().backward()
            streamed(given).sum().backward()
            assert torch.equal(wanted.grad.cpu(), given.grad.cpu())
        # Reads ahead for the next pass go on between the calls.
        before = sum(ts.stats(streamed, device=each)["read_bytes"] for each in (DEVICE, OTHER))
        both, one, two = (ts.stats(streamed, device=each) for each in (None, DEVICE, OTHER))
        assert (len(one["units"]), len(two["units"])) == (5, 3)
        assert both["budget_bytes"] == 5 * unit + 50_000
        assert 0 < before <= both["read_bytes"] <= one["read_bytes"] + two["read_bytes"]
        assert both["passes"] == one["passes"] == two["passes"] == 8
        assert one["plan"]["peak_bytes"] <= 3 * unit and two["plan"]["streamed_bytes_per_pass"] > 0
        assert both["recent_passes"][-1]["wall_s"] > 0
        assert library.counters()["peak"] <= 5 * unit + 50_000, library.counters()
        for look in (ts.explain, lambda each, **how: ts.trace(each, "a.json", **how).__enter__()):
            try:
                look(streamed)
            except ts.ConfigurationError as error:
                assert "several devices" in str(error), error
            else:
                raise AssertionError("no device was chosen")
        assert ts.explain(streamed, device=OTHER).passes > 0
        with ts.trace(streamed, Path(directory) / "a.json", device=OTHER), torch.no_grad():
            streamed(torch.randn(4, 256))
        restored = ts.restore(streamed)
        assert str(restored[5][0].weight.device) == OTHER
        with torch.no_grad():
            assert torch.equal(restored(inputs).cpu(), resident(inputs.to(DEVICE)).cpu())
        again = ts.offload(restored.cpu(), ts.Config(storage_path=directory, budget=4 * unit))
        with torch.no_grad():
            assert again(inputs).device == torch.device("cpu")


@program
def families(*names: str) -> None:
    """Families of transformers models stream to two devices, and generate the same tokens.

    A name may end with a dtype, as in "gpt2:bfloat16".
    """
    import transformers
    from families import FAMILIES

    for name in names:
        base, _, dtype = name.partition(":")
        family = FAMILIES[base]
        torch.manual_seed(0)
        config = family.config()
        config._attn_implementation = "eager"
        load = getattr(transformers, family.model_class)
        model = load(config).to(getattr(torch, dtype or "float32"))
        inputs = {
            key: (each.to(model.dtype) if each.is_floating_point() else each).to(DEVICE)
            for key, each in family.inputs(2).items()
        }
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            eager = {"attn_implementation": "eager"}
            resident = load.from_pretrained(directory, **eager).eval().to(DEVICE)
            halves = _halves(resident)
            assert OTHER in halves.values(), name
            how = {"model_class": load, "device_map": halves, **eager}
            whole = ts.from_pretrained(directory, budget="64MiB", **how)
            sizes: dict[int, int] = {}
            for index, device in enumerate((DEVICE, OTHER)):
                sizes[index] = ts.stats(whole, device=device)["plan"]["smallest_budget_bytes"]
            del whole
            streamed = ts.from_pretrained(directory, max_memory=sizes, **how)
            assert streamed.device == torch.device(DEVICE)
            assert len(set(streamed.hf_device_map.values())) == 2
            for index, device in enumerate((DEVICE, OTHER)):
                plan = ts.stats(streamed, device=device)["plan"]
                assert plan["peak_bytes"] <= sizes[index], (name, plan, sizes)
            assert ts.stats(streamed)["plan"]["streamed_bytes_per_pass"] > 0, name
            with torch.inference_mode():
                expected = resident(**inputs)
                for turn in range(3):
                    with Library().delays(1000 if turn else 0, turn):
                        assert_same(on_host(streamed(**inputs)), on_host(expected))
            if family.generates:
                first = dict(list(inputs.items())[:1])
                for options in ({"do_sample": False}, {"num_beams": 2}):
                    wanted, got = (
                        each.generate(**first, **options, max_new_tokens=5).cpu()
                        for each in (resident, streamed)
                    )
                    assert torch.equal(wanted, got), name
            _check_copies(streamed, directory, inputs, expected)


def _check_copies(streamed: Any, directory: str, inputs: Any, expected: Any) -> None:
    """A copy streams to the same devices, and a saved model has the same tensors."""
    twin = copy.deepcopy(streamed)
    with torch.inference_mode():
        assert_same(on_host(twin(**inputs)), on_host(expected))
    with tempfile.TemporaryDirectory() as other:
        streamed.save_pretrained(other)
        before, after = (
            ts.load_file(Path(each) / "model.safetensors") for each in (directory, other)
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


class Packed(torch.nn.Module):
    """Returns a packed sequence, whose lengths stay on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.last = torch.nn.Identity()

    def forward(self, packed: Any, **_: Any) -> Any:
        return self.last(packed._replace(data=self.inner(packed.data)))


@program
def maps() -> None:
    """Devices may be without weights, and inputs may be in containers of several kinds."""
    from types import MappingProxyType

    from torch.nn.utils.rnn import pack_padded_sequence

    packed = pack_padded_sequence(torch.randn(3, 2, 8), torch.tensor([3, 2]))
    model = Packed()
    wanted = model.inner(packed.data)
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        for placed in ({"": DEVICE, "inner": OTHER}, {"inner": DEVICE, "": OTHER}):
            config = ts.Config(storage_path=directory, device=placed, budget="1MiB")
            streamed = ts.offload(copy.deepcopy(model), config)
            other = MappingProxyType({"mask": torch.ones(2).to(OTHER)})
            for given in (packed, packed.to(DEVICE), packed.to(OTHER)):
                result = streamed(given, other=other)
                assert str(result.data.device) == next(iter(placed.values()))
                torch.testing.assert_close(result.data.cpu(), wanted)
        saved = small_llama()
        saved.save_pretrained(directory)
        whole = ts.from_pretrained(
            directory,
            device_map=MappingProxyType({"": 0, "model": 1, "lm_head": 1}),
            max_memory={0: "1MiB", 1: "1MiB", 7: 0, "cpu": 0},
            attn_implementation="eager",
        )
        ids = torch.arange(8).view(1, 8)
        assert str(whole(ids).logits.device) == DEVICE
        with pytest.raises(ts.ConfigurationError, match=f"no weights on {DEVICE}"):
            ts.stats(whole, device=DEVICE)
        assert ts.stats(whole)["units"]
        nothing = ts.offload(
            torch.nn.Sequential(torch.nn.ReLU()),
            ts.Config(storage_path=directory, device=DEVICE, budget="1MiB"),
        )
        assert nothing(torch.ones(2).to(DEVICE)).sum() == 2


@program
def lora() -> None:
    """An adapter over a base on two devices gets the same gradients and updates."""
    model = small_llama()
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        base = ts.from_pretrained(
            directory, budget="140KiB", device=_halves(model), attn_implementation="eager"
        )
        streamed = adapted(base)
        devices = {str(each.device) for each in streamed.parameters() if each.requires_grad}
        assert devices == {DEVICE, OTHER}, devices
        train_both(adapted(model.to(DEVICE)).to(DEVICE), streamed)
        assert ts.stats(streamed)["plan"]["streamed_bytes_per_pass"] > 0


@program
def threads() -> None:
    """Threads run passes over both devices at once."""
    model = linears()
    resident = copy.deepcopy(model).to(DEVICE)
    inputs = [torch.randn(2, 256).to(DEVICE) for _ in range(3)]
    with torch.no_grad():
        expected = [resident(each).cpu() for each in inputs]
    placed = {"": DEVICE, **{str(layer): OTHER for layer in range(0, 8, 2)}}
    with tempfile.TemporaryDirectory() as directory:
        config = ts.Config(
            storage_path=directory, device=placed, budget="800KiB", max_passes=2, host_budget="1MiB"
        )
        streamed = ts.offload(model, config)
        plan = ts.stats(streamed)["plan"]
        whole = sum(each.nbytes for each in resident.parameters())
        assert 0 < plan["streamed_bytes_per_pass"] <= whole / 2, plan
        run_in_threads(streamed, inputs, expected, new_stream=False)


@program
def drop_in() -> None:
    """The functions of accelerate and diffusers that place weights on devices stream to them."""
    import tensorstream.accelerate as ours
    from tensorstream.diffusers import apply_group_offloading

    model, inputs = linears(), torch.randn(4, 256).to(DEVICE)
    resident = copy.deepcopy(model).to(DEVICE)
    unit = 256 * 257 * 4
    halves: dict[str, Any] = {str(each): (0, "accinte:1", "cpu")[each % 3] for each in range(8)}

    def on_meta() -> Any:
        with torch.device("meta"):
            return linears()

    with torch.no_grad(), tempfile.TemporaryDirectory() as directory:
        expected = resident(inputs).cpu()
        saved = Path(directory) / "model.safetensors"
        ts.save_file(model.state_dict(), saved)

        def check(streamed: Any, devices: set[str]) -> Any:
            for _ in range(2):
                main_device = min(devices)
                result = streamed(inputs.to(main_device))
                assert str(result.device) == main_device
                assert torch.equal(result.cpu(), expected)
            assert {str(each.device) for each in streamed.parameters()} == devices
            return ts.stats(streamed)

        streamed = ours.disk_offload(copy.deepcopy(model), directory, DEVICE, budget=3 * unit)
        assert check(streamed, {DEVICE})["plan"]["streamed_bytes_per_pass"] > 0
        streamed = ours.dispatch_model(copy.deepcopy(model), halves, offload_dir=directory)
        check(streamed, {DEVICE, OTHER})
        sizes = {device: ts.stats(streamed, device=device)["budget_bytes"] for device in (0, OTHER)}
        # Three layers, and twice the largest one.
        assert sizes == {0: 5 * unit, OTHER: 5 * unit}, sizes
        loaded = ours.load_checkpoint_and_dispatch(
            on_meta(), saved, halves, max_memory={0: 3 * unit, 1: 2 * unit + 50_000, "cpu": "1MiB"}
        )
        assert check(loaded, {DEVICE, OTHER})["budget_bytes"] == 5 * unit + 50_000
        automatic = ours.load_checkpoint_and_dispatch(on_meta(), saved, "auto", budget=3 * unit)
        check(automatic, {DEVICE, OTHER})
        automatic = ours.load_checkpoint_and_dispatch(on_meta(), saved, "auto", budget=9 * unit)
        check(automatic, {DEVICE})
        automatic = ours.load_checkpoint_and_dispatch(
            on_meta(), saved, "balanced", max_memory={1: 3 * unit, "cpu": "1MiB"}
        )
        check(automatic, {OTHER})
        automatic = ours.load_checkpoint_and_dispatch(on_meta(), saved, {"": "auto"})
        check(automatic, {DEVICE})
        automatic = ours.dispatch_model(
            copy.deepcopy(model), {"": "auto"}, OTHER, offload_dir=directory
        )
        check(automatic, {OTHER})
        numbered = ours.load_checkpoint_and_dispatch(on_meta(), saved, {"": 0})
        assert check(numbered, {DEVICE})["budget_bytes"] == 10 * unit
        grouped = copy.deepcopy(model)
        apply_group_offloading(
            grouped,
            DEVICE,
            offload_type="leaf_level",
            offload_to_disk_path=directory,
            budget=3 * unit,
        )
        check(grouped, {DEVICE})
        for refused in (
            lambda: ours.dispatch_model(
                copy.deepcopy(model), {"": 0}, "accinte:1", None, directory
            ),
            lambda: ours.dispatch_model(copy.deepcopy(model), halves, "cpu", None, directory),
            lambda: ours.load_checkpoint_and_dispatch(on_meta(), saved, {"": 0}, {"cpu": "6MB"}),
        ):
            try:
                refused()
            except ts.ConfigurationError as error:
                assert "expected a size for accinte:0" in str(error) or (
                    "main device" in str(error)
                ), error
            else:
                raise AssertionError("was accepted")


@program
def drop_in_without_files() -> None:
    """Weights that stay on the CPU stream from a temporary file, to inputs on any device."""
    import tensorstream.accelerate as ours
    from tensorstream.diffusers import apply_group_offloading, enable_group_offload

    model, inputs = linears(), torch.randn(4, 256)
    unit = 256 * 257 * 4
    halves: dict[str, Any] = {str(each): (0, "accinte:1", "cpu")[each % 3] for each in range(8)}
    with torch.no_grad():
        expected = copy.deepcopy(model).to(DEVICE)(inputs.to(DEVICE)).cpu()
        kept = ours.cpu_offload(copy.deepcopy(model), DEVICE)
        divided = ours.dispatch_model(copy.deepcopy(model), halves)
        grouped = copy.deepcopy(model)
        apply_group_offloading(grouped, DEVICE, offload_type="leaf_level", budget=3 * unit)
        assert torch.equal(grouped(inputs).cpu(), expected)
        pipeline = SimpleNamespace(components={"a": copy.deepcopy(model), "b": linears()})
        enable_group_offload(pipeline, DEVICE, budget=6 * unit)
        assert torch.equal(pipeline.components["a"](inputs).cpu(), expected)
        assert ts.stats(pipeline.components["b"])["budget_bytes"] == 3 * unit
        for streamed in (kept, divided):
            for given in (inputs, inputs.to(DEVICE)):
                result = streamed(given)
                assert result.device == given.device and torch.equal(result.cpu(), expected)
        stats = ts.stats(kept)
        assert stats["budget_bytes"] == 2 * unit and stats["plan"]["streamed_bytes_per_pass"] > 0
        restored = ts.restore(kept)
        for device in ("cpu", DEVICE):
            assert torch.allclose(restored.to(device)(inputs), expected, atol=1e-5)


@program
def automatic() -> None:
    """A model that one device does not hold is divided among all, in proportion to the budgets."""
    model, inputs = linears(), torch.randn(4, 256).to(DEVICE)
    resident = copy.deepcopy(model).to(DEVICE)
    unit = 256 * 257 * 4

    def devices(streamed: Any) -> list[str]:
        return [str(each.device) for each in streamed.parameters()][::2]

    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        expected = resident(inputs).cpu()
        for budget, wanted in (
            (3 * unit, [DEVICE] * 4 + [OTHER] * 4),
            ({0: 6 * unit, 1: 2 * unit}, [DEVICE] * 6 + [OTHER] * 2),
            ({OTHER: 3 * unit}, [OTHER] * 8),
            (9 * unit, [DEVICE] * 8),
            (None, [DEVICE] * 8),
        ):
            config = ts.Config(storage_path=directory, device="auto", budget=budget)
            streamed = ts.offload(copy.deepcopy(model), config)
            assert devices(streamed) == wanted, (budget, devices(streamed))
            streams = ts.stats(streamed)["plan"]["streamed_bytes_per_pass"] > 0
            assert streams == (budget not in (9 * unit, None))
            twin = copy.deepcopy(streamed)
            assert devices(twin) == wanted
            for each in (streamed, twin, streamed):
                result = each(inputs.to(wanted[0]))
                assert (str(result.device), result.cpu().equal(expected)) == (wanted[0], True)
            del streamed, twin, each
        llama = small_llama()
        llama.save_pretrained(directory)
        ids = torch.arange(8).view(1, 8).to(DEVICE)
        logits = llama.to(DEVICE)(ids).logits.cpu()
        tokens = llama.generate(ids, max_new_tokens=5, do_sample=False).cpu()
        whole = sum(each.nbytes for each in llama.parameters())
        how = {"device_map": "auto", "attn_implementation": "eager"}
        for sizes, count in (
            ({0: "150KiB", 1: "150KiB", "cpu": "1MiB"}, 2),
            ({0: "150KiB", 1: 0}, 1),
            ({0: "8MiB", 1: "150KiB"}, 1),
        ):
            streamed = ts.from_pretrained(directory, max_memory=sizes, **how)
            places = streamed.hf_device_map
            assert len(set(places.values())) == count, (sizes, places)
            assert str(places[""]) == str(places["lm_head"]) == DEVICE
            plan = ts.stats(streamed)["plan"]
            assert (plan["resident_bytes"] < whole) == (sizes[0] != "8MiB"), (sizes, plan)
            for _ in range(3):
                assert streamed(ids).logits.cpu().equal(logits)
            assert streamed.generate(ids, max_new_tokens=5, do_sample=False).cpu().equal(tokens)
        for wanted, sizes in ((OTHER, {0: "40KiB", 1: "8MiB"}), (DEVICE, {0: "150KiB", 1: "9KiB"})):
            streamed = ts.from_pretrained(directory, max_memory=sizes, **how)
            assert {str(each.device) for each in streamed.parameters()} == {wanted}
            assert streamed(ids.to(wanted)).logits.cpu().equal(logits)
        given = ts.Config(device="auto")
        streamed = ts.from_pretrained(directory, config=given, max_memory={1: "150KiB"}, **how)
        assert streamed.device == torch.device(OTHER)
        streamed = ts.from_pretrained(directory, device=OTHER, budget="150KiB", **how)
        assert streamed.device == torch.device(OTHER)
        type(llama)._no_split_modules = ["LlamaModel"]
        streamed = ts.from_pretrained(directory, budget="150KiB", **how)
        assert set(streamed.hf_device_map.values()) == {torch.device(DEVICE)}
        try:
            ts.Config(device="auto", budget={7: "1MiB"}).on_devices()
        except ts.ConfigurationError as error:
            assert "among: accinte:0, accinte:1" in str(error), error
        else:
            raise AssertionError("a device that does not exist was accepted")


class Combining(torch.nn.Module):
    """Combines the results of its parts, and runs some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linears()
        self.twice = torch.nn.ModuleList([self.inner[2], *linears(3)])
        self.last = torch.nn.ModuleList([torch.nn.Linear(256, 256)])

    def forward(self, x: Any) -> Any:
        seen = []
        for part in (*self.inner, *self.twice, *self.last):
            x = x + part(x)
            seen.append(x)
        return torch.stack(seen).sum(0), {"last": x}


@program
def combined() -> None:
    """A module may combine the results of parts that are on several devices."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        _combined(dtype)


def _combined(dtype: torch.dtype) -> None:
    model, inputs = Combining().to(dtype), torch.randn(4, 256, dtype=dtype).to(DEVICE)
    resident = copy.deepcopy(model).to(DEVICE)
    unit = 256 * 257 * dtype.itemsize
    with tempfile.TemporaryDirectory() as directory:
        halves = {"": DEVICE, "inner.3": OTHER, "twice.1": OTHER, "last": OTHER}
        for device in ("auto", halves):
            streamed = ts.offload(
                copy.deepcopy(model),
                ts.Config(storage_path=directory, device=device, budget=3 * unit),
            )
            assert len({str(each.device) for each in streamed.parameters()}) == 2
            assert ts.stats(streamed)["plan"]["streamed_bytes_per_pass"] > 0
            for context in (torch.no_grad, torch.inference_mode, autocast):
                with context():
                    wanted, got = resident(inputs), streamed(inputs)
                assert_same(on_host(got), on_host(wanted))
            both = [inputs.clone().requires_grad_() for _ in range(2)]
            for module, given in zip((resident, streamed), both, strict=True):
                module(given)[0].sum().backward()
            assert both[0].grad.cpu().equal(both[1].grad.cpu())


@program
def refusals() -> None:
    """Device maps that cannot work are refused in words, before anything is changed."""

    def refused(words: str, model: Any, **settings: Any) -> None:
        before = dict(model.named_parameters())
        with tempfile.TemporaryDirectory() as directory:
            try:
                settings = {"budget": "1MiB", **settings}
                ts.offload(model, ts.Config(storage_path=directory, **settings))
            except ts.ConfigurationError as error:
                assert words in str(error), error
            else:
                raise AssertionError(f"{settings} was accepted")
            assert not any(Path(directory).iterdir()), "weights were written"
        assert before.keys() == dict(model.named_parameters()).keys()
        assert all(before[name] is each for name, each in model.named_parameters())

    model = linears(2)
    refused("names no module", model, device={})
    refused("no module `9`", model, device={"": DEVICE, "9": OTHER})
    refused("does not name `1.0.weight`", model, device={"0": DEVICE})
    refused("2 device(s)", model, device={"0": DEVICE, "1": "accinte:7"})
    refused("on several devices", model, device={"": DEVICE, "0.0.bias": OTHER})
    refused(
        "a size for each of accinte:0, accinte:1",
        model,
        device={"0": DEVICE, "1": OTHER},
        budget={DEVICE: "1MiB"},
    )
    for settings in ({"memory_pressure_mode": "lenient"}, {"budget": ts.Budget("1MiB")}):
        refused("on an accelerator", model, backend="cuda", **settings)
    refused("there is one device", model, device=DEVICE, budget={DEVICE: "1MiB"})
    before, where = list(model.parameters()), {"0": DEVICE, "1": OTHER}
    with tempfile.TemporaryDirectory() as directory:
        budget = {DEVICE: "1MiB", OTHER: 4096}
        try:
            ts.offload(model, ts.Config(device=where, budget=budget, storage_path=directory))
        except ts.BudgetError as error:
            assert f"for the weights on {OTHER}: " in str(error), error
        else:
            raise AssertionError("a budget of 4096 bytes was accepted")
    assert all(own is other for own, other in zip(before, model.parameters(), strict=True))


if __name__ == "__main__":
    main()
