# SPDX-License-Identifier: MIT OR Apache-2.0
"""Loading code of modules runs for streamed models: hooks, overrides, extra state and buffers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstream as ts
import torch
from accelerate import init_empty_weights
from exactness import PASSES, assert_same
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

WIDTH, LAYERS = 96, 8


class Permuted(nn.Linear):
    """Permutes its rows when it is loaded, as for another convention of rotary embeddings."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        rows = state[prefix + "weight"]
        state[prefix + "weight"] = rows.view(4, -1, WIDTH).transpose(0, 1).reshape(WIDTH, WIDTH)
        super()._load_from_state_dict(state, prefix, *rest)


class Dequantized(nn.Linear):
    """Computes its weight from bytes and a scale, which only the file has."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        codes, scale = state.pop(prefix + "codes"), state.pop(prefix + "scale")
        state[prefix + "weight"] = codes.to(scale.dtype) * scale
        super()._load_from_state_dict(state, prefix, *rest)


class Fused(nn.Module):
    """Joins the matrices of older files, in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _join(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        parts = [state.pop(f"{prefix}{name}.weight") for name in ("left", "right")]
        state[f"{prefix}joined.weight"] = torch.cat(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.joined(x).chunk(2, -1)
        return torch.tanh(left) + right


class Renamed(nn.Module):
    """Renames tensors of older files for the module below, in a private hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, state: Any, prefix: str, *rest: Any) -> None:
        for name in ("weight", "bias"):
            state[f"{prefix}inner.{name}"] = state.pop(f"{prefix}dense.{name}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Rescaled(nn.Linear):
    """Changes its weight in place once it is loaded, and does not need its bias."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_load_state_dict_post_hook(self._rescale)

    @staticmethod
    def _rescale(module: Any, keys: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(0.5)
            module.weight[: WIDTH // 2].add_(1)
            module.bias.zero_()
        keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith("bias")]


class WithExtraState(nn.Linear):
    """Has a scale in the extra state."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = 1.0

    def get_extra_state(self) -> Any:
        return torch.tensor(self.scale)

    def set_extra_state(self, state: Any) -> None:
        self.scale = float(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x) * self.scale)


class Created(nn.Module):
    """Has a parameter only if the file has it, and learns its shape there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.weight = nn.Parameter(torch.empty_like(state[prefix + "weight"]))
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Wrapped(nn.Sequential):
    """Loads files whose names have another beginning."""

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Any, strict: bool = True
    ) -> Any:
        return super().load_state_dict(
            {name.removeprefix("module."): value for name, value in state_dict.items()}, strict
        )


def stacked(layer: Callable[[], nn.Module], kind: type = nn.Sequential) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made: nn.Module = kind(*(part for _ in range(LAYERS) for part in (layer(), nn.Tanh())))
        return made

    return make


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def plain() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


State = dict[str, torch.Tensor]


def split(state: State) -> State:
    parts: State = {}
    for name, value in state.items():
        for part, half in zip(("left", "right"), value.chunk(2), strict=True):
            parts[name.replace("joined", part)] = half.clone()
    return parts


def quantized(state: State) -> State:
    stored: State = {}
    for name, value in state.items():
        if name.endswith("bias"):
            stored[name] = value
            continue
        scale = value.abs().amax(1, keepdim=True) / 127
        stored[name.replace("weight", "codes")] = (value / scale).round().to(torch.int8)
        stored[name.replace("weight", "scale")] = scale
    return stored


def old_names(state: State) -> State:
    names = {"parametrizations.weight.original0": "weight_g", "inner.": "dense."}
    names["parametrizations.weight.original1"] = "weight_v"
    for old, new in names.items():
        state = {name.replace(old, new): value for name, value in state.items()}
    return state


def created(state: State) -> State:
    return {f"{2 * i}.weight": torch.randn(WIDTH, WIDTH) / 9 for i in range(LAYERS)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[State], State]]] = {
    "override": (stacked(lambda: Permuted(WIDTH, WIDTH)), dict),
    "dequantized": (stacked(lambda: Dequantized(WIDTH, WIDTH)), quantized),
    "hook that joins": (stacked(Fused), split),
    "hook that renames": (stacked(Renamed), old_names),
    "hook afterwards": (
        stacked(Rescaled),
        lambda state: {k: v for k, v in state.items() if not k.endswith("bias")},
    ),
    "extra state": (stacked(WithExtraState), dict),
    "parametrization": (stacked(lambda: weight_norm(plain())), old_names),
    "created": (stacked(Created), created),
    "load_state_dict": (
        stacked(plain, Wrapped),
        lambda state: {f"module.{name}": value for name, value in state.items()},
    ),
    "buffers": (stacked(normed), dict),
}


def saved(name: str, dtype: torch.dtype, path: Path) -> None:
    """Writes a checkpoint of a model whose buffers and extra states are not those of a new one."""
    torch.manual_seed(5)
    make, to_file = MODELS[name]
    trained = make().train()
    for module in trained.modules():
        if isinstance(module, WithExtraState):
            module.scale = 0.25
        if isinstance(module, nn.BatchNorm1d):
            module(torch.randn(64, WIDTH) * 3 + 1)
    state = to_file(dict(trained.state_dict()))
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}
    ts.save_file({k: v.clone() for k, v in cast.items()}, path)


def made(make: Callable[[], nn.Module], where: str, dtype: torch.dtype) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if where == "empty":
            with init_empty_weights():
                return make().eval()
        with torch.device("cpu" if where == "live" else where):
            return make().eval()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "where"),
    [
        (name, where)
        for name in MODELS
        for where in ("live", "meta", "empty")
        # It reads a parameter that has no value on the meta device, which is refused.
        if name != "hook afterwards" or where == "live"
    ],
)
def test_loading_code_runs(name: str, where: str, dtype: torch.dtype, tmp_path: Path) -> None:
    file, make = tmp_path / "model.safetensors", MODELS[name][0]
    saved(name, dtype, file)
    memory = made(make, "live", dtype)
    memory.load_state_dict(ts.load_file(file))
    streamed = made(make, where, dtype)
    weights = sum(parameter.nbytes for parameter in memory.parameters())
    parameters = dict(streamed.named_parameters())
    config = ts.Config(storage_path=tmp_path / "converted", budget=int(weights * 0.45))
    assert ts.offload(streamed, config, checkpoint=file, strict=True) is streamed
    assert ts.stats(streamed)["plan"]["streamed_bytes_per_pass"] > 0
    with torch.no_grad():
        for seed in range(PASSES):
            x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)
            assert_same(streamed(x), memory(x))
    expected = memory.state_dict()
    state = streamed.state_dict()
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert_same(torch.as_tensor(state[key].clone()), value)
    restored = dict(ts.restore(streamed).named_parameters())
    assert list(restored) == list(dict(memory.named_parameters()))
    assert [p.requires_grad for p in restored.values()] == [True] * len(restored)
    assert parameters.keys() <= restored.keys()


def test_in_place_writes_to_parameters_without_values_are_refused(tmp_path: Path) -> None:
    saved("hook afterwards", torch.float32, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = MODELS["hook afterwards"][0]()
    before = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(ts.TensorStreamError, match=r"(?s)bias|Rescaled"):
        ts.offload(model, checkpoint=tmp_path, budget="1MiB")
    assert [dict(module.__dict__) for module in model.modules()] == before


class Fails(nn.Linear):
    """Changes itself, and fails at the end of loading."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        self.version = 2
        self.register_buffer("more", torch.ones(3))
        self.weight = nn.Parameter(torch.ones(2, 2))
        raise ValueError("this file is too old")


def test_errors_of_loading_code_arrive_and_change_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(plain(), nn.BatchNorm1d(WIDTH), Fails(WIDTH, WIDTH))
    ts.save_file(model.state_dict(), tmp_path / "model.safetensors")
    weight, before = model[2].weight, copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="this file is too old") as caught:
        ts.offload(model, checkpoint=tmp_path, budget="1MiB")
    assert caught.value.__notes__ == ["raised by the loading code of `2` (Fails)"]
    assert model[2].weight is weight and not hasattr(model[2], "version")
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_budget_that_is_too_small_changes_nothing(tmp_path: Path) -> None:
    make = MODELS["buffers"][0]
    saved("buffers", torch.float32, tmp_path / "model.safetensors")
    model = make()
    before = copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters())
    with pytest.raises(ts.BudgetError) as caught:
        ts.offload(model, checkpoint=tmp_path, budget="8KiB")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameters[key] is value for key, value in model.named_parameters())
    mean = model[0][1].running_mean
    assert caught.value.smallest is not None
    ts.offload(model, checkpoint=tmp_path, budget=caught.value.smallest)
    assert model[0][1].running_mean is mean
    assert not torch.equal(mean, before["0.1.running_mean"])


def test_a_part_is_found_in_the_checkpoint_of_a_larger_model(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def part() -> nn.Sequential:
        layers = (nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        return nn.Sequential(*layers, nn.BatchNorm1d(WIDTH)).eval()

    whole = nn.ModuleDict({"first": part(), "head": nn.Linear(WIDTH, 3)})
    path = tmp_path / "model.safetensors"
    ts.save_file(whole.state_dict(), path)
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        want = whole["first"](x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        streamed = ts.offload(part(), checkpoint=path, budget="64KiB")
    with torch.no_grad():
        for _ in range(PASSES):
            assert torch.equal(streamed(x), want)
    # With `strict`, names match as in memory.
    with pytest.raises(ts.MissingTensorError, match=r"needs tensor `0\.weight`"):
        ts.offload(part(), checkpoint=path, budget="64KiB", strict=True)
    # Of two parts with the same names, either could be meant.
    ts.save_file(nn.ModuleDict({"a": part(), "b": part()}).state_dict(), path)
    with pytest.raises(ts.MissingTensorError, match=r"needs tensor `0\.weight`"):
        ts.offload(part(), checkpoint=path, budget="64KiB")


def test_names_that_do_not_match_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    state = nn.Sequential(plain(), nn.BatchNorm1d(WIDTH)).state_dict()
    ts.save_file(state | {"1.more": torch.ones(1)}, file)

    def offload(strict: bool | None) -> nn.Module:
        model = nn.Sequential(plain(), nn.BatchNorm1d(WIDTH))
        return ts.offload(model, checkpoint=file, budget="1MiB", strict=strict)

    with pytest.raises(ts.CheckpointError, match=r"`1\.more`; pass strict=False"):
        offload(True)
    with pytest.warns(ts.CheckpointWarning, match=r"1 tensors are not in the Sequential"):
        offload(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offload(False)
    lacking = {key: value for key, value in state.items() if key not in ("0.bias", "1.running_var")}
    ts.save_file(lacking, file)
    for strict in (True, None):
        with pytest.raises(ts.MissingTensorError, match=r"`0\.bias`"):
            offload(strict)
    model = nn.Sequential(plain(), nn.BatchNorm1d(WIDTH)).eval()
    memory = copy.deepcopy(model)
    memory.load_state_dict(lacking, strict=False)
    config = ts.Config(storage_path=tmp_path, budget="1MiB")
    ts.offload(model, config, checkpoint=file, strict=False)
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        assert_same(model(x), memory(x))


def test_the_last_name_of_a_shared_parameter_counts(tmp_path: Path) -> None:
    """As for ``load_state_dict``, if a file has several values."""
    a, b = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)

    def make() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
        model[1].weight = model[0].weight
        return model

    ts.save_file({"0.weight": a, "1.weight": b}, tmp_path / "model.ts")
    memory, streamed = make(), make()
    memory.load_state_dict({"0.weight": a, "1.weight": b})
    ts.offload(streamed, checkpoint=tmp_path / "model.ts", budget="1MiB")
    assert_same(streamed[0].weight.clone(), memory[0].weight)


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_parameters_in_another_memory_order_are_exact(where: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(*(nn.Conv2d(24, 24, 3, padding=1) for _ in range(6)))
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    file = tmp_path / "model.safetensors"
    ts.save_file({k: v.contiguous() for k, v in make().state_dict().items()}, file)
    memory = make()
    memory.load_state_dict(ts.load_file(file))
    with torch.device(where):
        streamed = make()
    config = ts.Config(storage_path=tmp_path / "converted", budget="80KiB")
    ts.offload(streamed, config, checkpoint=file)
    x = torch.randn(2, 24, 9, 9).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for _ in range(PASSES):
            assert_same(streamed(x), memory(x))
    assert streamed[0].weight.stride() == memory[0].weight.stride()


def test_scalars_and_empty_parameters_are_loaded(tmp_path: Path) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.none = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.empty(0, 4))
            self.inner = plain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale + self.none.sum()

    memory = Small()
    # PyTorch saved scalars with one dimension once.
    state = memory.state_dict() | {"scale": torch.tensor([5.0])}
    ts.save_file(state, tmp_path / "model.ts")
    memory.load_state_dict(state)
    with torch.device("meta"):
        streamed = Small()
    ts.offload(streamed, checkpoint=tmp_path / "model.ts", budget="1MiB")
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        assert_same(streamed(x), memory(x))


@pytest.mark.parametrize(
    "overlapping",
    [lambda: torch.randn(1, WIDTH).expand(WIDTH, WIDTH), lambda: torch.randn(99).unfold(0, 4, 1)],
)
def test_overlapping_parameters_are_refused(
    overlapping: Callable[[], torch.Tensor], tmp_path: Path
) -> None:
    model = plain()
    model.register_parameter("extra", nn.Parameter(overlapping()))
    file = tmp_path / "model.ts"
    ts.save_file({k: v.contiguous() for k, v in model.state_dict().items()}, file)
    for checkpoint in (None, file):
        config = ts.Config(storage_path=tmp_path / "weights", budget="1MiB")
        with pytest.raises(ts.ModelError, match="`extra`: its memory has gaps or overlaps"):
            ts.offload(model, config, checkpoint=checkpoint)


class Lists(nn.Module):
    """Holds every weight in one list, dictionary or module."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made = [nn.Parameter(torch.randn(128, 256) / 16) for _ in range(16)]
        self.kind = kind
        if kind == "list":
            self.matrices = nn.ParameterList(made)
        elif kind == "dict":
            self.matrices = nn.ParameterDict({f"m{i}": each for i, each in enumerate(made)})
        else:
            for i, each in enumerate(made):
                setattr(self, f"m{i}", each)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own: Any = self.matrices if self.kind != "own" else self
        for i in range(16):
            matrix = own[i] if self.kind == "list" else getattr(own, f"m{i}")
            x = x + torch.tanh(x @ matrix.t() @ matrix)
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["list", "dict", "own"])
def test_a_module_with_every_weight_divides(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    memory = Lists(kind).to(dtype)
    weights = sum(parameter.nbytes for parameter in memory.parameters())
    x = torch.randn(3, 256).to(dtype)
    with torch.no_grad():
        expected = memory(x)
    streamed = copy.deepcopy(memory)
    config = ts.Config(storage_path=tmp_path, budget=weights // 4)
    ts.offload(streamed, config)
    stats = ts.stats(streamed)
    assert len(stats["units"]) == 16
    assert stats["plan"]["smallest_budget_bytes"] < weights // 4
    with torch.no_grad():
        for _ in range(PASSES):
            assert_same(streamed(x), expected)
    assert ts.stats(streamed)["reserved_high_water_bytes"] <= weights // 4
    # A larger budget leaves the module as it is.
    ts.restore(streamed)
    ts.offload(streamed, ts.Config(storage_path=tmp_path, budget=2 * weights))
    assert len(ts.stats(streamed)["units"]) == 1
