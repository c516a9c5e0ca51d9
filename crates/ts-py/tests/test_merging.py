# SPDX-License-Identifier: MIT OR Apache-2.0
"""Merges adapters of PEFT over streamed models, and compares the bytes with PEFT's in memory."""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import peft
import preloaded
import pytest
import safetensors.torch
import tensorstream as ts
import torch
import transformers as hf
from adapters import SHAPE, X, cases
from tensorstream.streaming import _changed_layers, _merging
from torch import nn


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Changed weights go to files, although those of small models are small.
    monkeypatch.setattr(_changed_layers, "_SMALL", 1 << 10)


def saved(path: Path, name: str = "", dtype: torch.dtype = torch.float32, **config: Any) -> int:
    """Writes a small model. Returns the size of its weights in bytes."""
    torch.manual_seed(0)
    source: Any
    if name == "LORA, experts":
        source = hf.MixtralForCausalLM(hf.MixtralConfig(**SHAPE, num_local_experts=4))
    else:
        source = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE | config))
    source.to(dtype).save_pretrained(path)
    return sum(parameter.nbytes for parameter in source.parameters())


def randomised(model: Any) -> Any:
    """Gives the adapters of a model values that change what they adapt."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                noise = torch.randn(parameter.shape) * 0.02
                parameter.copy_(parameter + noise.to(parameter.dtype))
    return model


def adapted(base: Any, config: Any) -> Any:
    torch.manual_seed(1)
    return randomised(peft.get_peft_model(base, config))


def files(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a directory, read by safetensors."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= safetensors.torch.load_file(file)
    return found


def require_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        mine = actual[name]
        assert (mine.dtype, mine.shape) == (wanted.dtype, wanted.shape), name
        assert torch.equal(_bytes(mine), _bytes(wanted)), name


def require_same_parameters(model: nn.Module, reference: nn.Module) -> None:
    """Requires equal names and bytes of all parameters."""
    actual, expected = (
        {name: each.detach().clone() for name, each in own.named_parameters(remove_duplicate=False)}
        for own in (model, reference)
    )
    require_equal(actual, expected)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


#: Methods and variants that PEFT itself cannot merge into a Llama, or not save afterwards.
UNMERGEABLE = {
    "ADAPTION_PROMPT", "BEFT", "CARTRIDGE", "CPT", "LILY", "LORA, replicated layers",
    "MULTITASK_PROMPT_TUNING", "POLY", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in cases() if name not in UNMERGEABLE])
def test_every_method_merges_to_the_bytes_of_peft(name: str, tmp_path: Path) -> None:
    """The budget is a third of the weights."""
    size = saved(tmp_path / "model", name)
    kind: Any = hf.MixtralForCausalLM if name == "LORA, experts" else hf.LlamaForCausalLM
    reference = adapted(kind.from_pretrained(tmp_path / "model"), cases()[name]).eval()
    copy.deepcopy(reference).merge_and_unload().save_pretrained(tmp_path / "expected")
    streamed = ts.from_pretrained(tmp_path / "model", budget=size // 3)
    model = adapted(streamed, cases()[name]).eval()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    ts.merge(model, tmp_path / "merged")
    merged = files(tmp_path / "merged")
    require_equal(merged, files(tmp_path / "expected"))
    original = files(tmp_path / "model")
    assert any(not torch.equal(merged[own], each) for own, each in original.items())
    for own, parameter in model.named_parameters():
        assert torch.equal(parameter, before[own]), "the model itself has changed"
    assert sorted(each.name for each in (tmp_path / "merged").iterdir()) == sorted(
        each.name for each in (tmp_path / "expected").iterdir()
    )
    # PEFT's own calls.
    for call in ("merge_adapter", "unmerge_adapter", "merge_and_unload"):
        outcomes = []
        for own in (reference, model):
            try:
                outcomes.append(getattr(own, call)())
            except NotImplementedError as error:
                outcomes.append(type(error))
        if call == "merge_and_unload":
            reference, model = outcomes
        else:
            assert outcomes[0] == outcomes[1]
        require_same_parameters(model, reference)
        with torch.no_grad():
            arguments = {"input_ids": X}
            assert torch.equal(model(**arguments).logits, reference(**arguments).logits), call
    assert ts.stats(model)["passes"] > 2, "what has not changed still streams"


@pytest.mark.parametrize("name", sorted(UNMERGEABLE - {"LORA, replicated layers"}))
def test_what_peft_cannot_merge_leaves_nothing(name: str, tmp_path: Path) -> None:
    size = saved(tmp_path / "model")
    model = adapted(ts.from_pretrained(tmp_path / "model", budget=size // 3), cases()[name])
    with pytest.raises((ts.ModelError, ValueError, NotImplementedError)):
        ts.merge(model, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_several_adapters_and_dtypes(dtype: torch.dtype, autocast: bool, tmp_path: Path) -> None:
    """PEFT keeps adapters in f32, or with `autocast_adapter_dtype=False` in the dtype."""
    size = saved(tmp_path / "model", dtype=dtype)

    def two(base: Any) -> Any:
        torch.manual_seed(1)
        first = peft.LoraConfig(target_modules=["q_proj", "up_proj"], use_rslora=True)
        second = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True)
        model: Any = peft.get_peft_model(base, first, autocast_adapter_dtype=autocast)
        model.add_adapter("second", second, autocast_adapter_dtype=autocast)
        model.add_adapter("sum", first, autocast_adapter_dtype=autocast)
        torch.manual_seed(2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape) * 0.05)
        model.add_weighted_adapter(["default", "sum"], [0.5, -1.5], "weighted", "linear")
        return model

    names = ["second", "weighted"]
    reference = two(hf.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype))
    merged = reference.merge_and_unload(safe_merge=autocast, adapter_names=names)
    merged.save_pretrained(tmp_path / "expected")
    model = two(ts.from_pretrained(tmp_path / "model", budget=size // 3))
    ts.merge(model, tmp_path / "merged", adapters=names, safe=autocast)
    require_equal(files(tmp_path / "merged"), files(tmp_path / "expected"))


@pytest.mark.parametrize("whole", [True, False])
def test_a_merged_model_streams_in_place_of_the_adapted_one(whole: bool, tmp_path: Path) -> None:
    size = saved(tmp_path / "model", tie_word_embeddings=True)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    config = peft.LoraConfig(target_modules=["embed_tokens", "o_proj"], modules_to_save=["norm"])
    reference = adapted(hf.LlamaForCausalLM.from_pretrained(tmp_path / "model"), config)
    reference = reference.merge_and_unload()
    model: Any
    if whole:
        model = adapted(hf.LlamaForCausalLM.from_pretrained(tmp_path / "model"), config)
        ts.offload(model, ts.Config(storage_path=tmp_path / "weights", budget=size // 2))
    else:
        model = adapted(ts.from_pretrained(tmp_path / "model", budget=size // 2), config)
    ts.merge(nn.ModuleDict({"wrapped": model}), tmp_path / "merged")
    assert (tmp_path / "merged" / "tokenizer.json").exists() != whole
    in_memory = hf.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    streamed: Any = ts.from_pretrained(tmp_path / "merged", budget=size // 2)
    with torch.no_grad():
        expected = reference(input_ids=X).logits
        for merged in (in_memory, streamed, streamed):
            assert torch.equal(merged(input_ids=X).logits, expected)
    assert max(unit["loads"] for unit in ts.stats(streamed)["units"]) > 1


class Mixed(nn.Module):
    """Layers of several kinds, two of which share a weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, 48)
        self.first, self.second = nn.Conv1d(48, 48, 3), nn.Conv2d(1, 4, 3, groups=1)
        self.transposed = hf.pytorch_utils.Conv1D(48, 48)
        self.norm = nn.BatchNorm1d(48)
        self.head = nn.Linear(48, 1024)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.first(self.embedding(tokens).transpose(1, 2))
        hidden = self.norm(hidden).transpose(1, 2)
        hidden = hidden + self.second(hidden[:, None]).mean()
        return self.head(self.transposed(hidden.contiguous()))


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (
            "LoraConfig",
            {"target_modules": ["first", "second", "transposed", "head"], "bias": "all"},
        ),
        ("LoraConfig", {"target_modules": ["embedding", "head"], "bias": "lora_only"}),
        ("LoraConfig", {"target_modules": ["head"], "lora_bias": True}),
        ("LoraConfig", {"target_modules": ["first", "second"], "use_dora": True}),
        ("LoHaConfig", {"target_modules": ["first", "second", "head"]}),
        ("LoKrConfig", {"target_modules": ["first", "second", "head"]}),
        ("IA3Config", {"target_modules": ["head", "transposed"], "feedforward_modules": ["head"]}),
        ("LNTuningConfig", {"target_modules": ["norm"]}),
        ("BOFTConfig", {"target_modules": ["second"], "boft_block_size": 3}),
        ("BeftConfig", {"target_modules": ["head"]}),
        ("LoraConfig", {"target_modules": ["first"], "modules_to_save": ["embedding"]}),
    ],
)
@pytest.mark.parametrize("suffix", ["ts", "safetensors"])
def test_other_modules_merge(
    kind: str, arguments: dict[str, Any], suffix: str, tmp_path: Path
) -> None:
    """Convolutions, embeddings, transposed weights, biases, and weights that layers share."""
    torch.manual_seed(0)
    source = Mixed()
    path = tmp_path / f"model.{suffix}"
    ts.save_file({k: v for k, v in source.state_dict().items() if k != "head.weight"}, path)
    config = getattr(peft, kind)
    reference = adapted(copy.deepcopy(source), config(**arguments))
    if "bias" in arguments:  # the biases are trained, so that they stay in memory
        stored = ts.Config(storage_path=tmp_path / "weights", budget="640KiB")
        model = ts.offload(copy.deepcopy(reference), stored)
        suffix = "ts"
    else:
        base = ts.offload(copy.deepcopy(source), checkpoint=path, budget="640KiB")
        model = adapted(base, config(**arguments))
    expected = reference.merge_and_unload()
    ts.merge(model, tmp_path / "merged")
    [file] = (tmp_path / "merged").iterdir()
    assert file.name == f"model.{suffix}"
    found = ts.load_file(file)
    with ts.safe_open(file, "pt") as opened:
        names = opened.metadata()
    wanted = {name: value for name, value in expected.state_dict().items() if name not in names}
    require_equal(found, wanted)
    for name, kept in names.items():
        if name != "format":
            own = dict(expected.named_parameters(remove_duplicate=False))
            assert own[name] is own[kept], "only names of the same weight are left out"
    again: Any = copy.deepcopy(source)
    if "head.weight" in found:  # PEFT has replaced the embedding by a trained copy
        again.head.weight = nn.Parameter(torch.zeros_like(again.head.weight))
    again = ts.offload(again, checkpoint=file, budget="640KiB")
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens), expected.eval()(tokens))


def test_names_and_shards_of_a_checkpoint_are_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    directory = tmp_path / "model"
    directory.mkdir()
    weight_map = {}
    for number in range(2):
        own = {k: v for k, v in source.state_dict().items() if int(k[0]) // 2 == number}
        name = f"part-{number}.safetensors"
        safetensors.torch.save_file(own, directory / name)
        weight_map |= dict.fromkeys(own, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    base = ts.offload(copy.deepcopy(source), checkpoint=directory, budget="24KiB")
    config = peft.LoraConfig(target_modules=["0", "3"])
    ts.merge(adapted(base, config), tmp_path / "merged")
    found = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert found["weight_map"] == weight_map
    expected = adapted(copy.deepcopy(source), config).merge_and_unload()
    require_equal(files(tmp_path / "merged"), expected.state_dict())
    streamed: Any = ts.offload(source, checkpoint=tmp_path / "merged", budget="24KiB")
    with torch.no_grad():
        assert torch.equal(streamed(torch.eye(32)), expected(torch.eye(32)))


def test_adapters_without_a_peft_model_merge(tmp_path: Path) -> None:
    """`add_adapter` of transformers and diffusers calls `inject_adapter_in_model`."""
    size = saved(tmp_path / "model")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"])

    def added(base: Any) -> Any:
        torch.manual_seed(1)
        return randomised(peft.inject_adapter_in_model(config, base))

    reference = added(hf.LlamaForCausalLM.from_pretrained(tmp_path / "model"))
    for module in reference.modules():
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            module.merge()
    streamed = added(ts.from_pretrained(tmp_path / "model", budget=size // 3))
    ts.merge(streamed, tmp_path / "merged")
    wanted = {
        name.replace(".base_layer", ""): value
        for name, value in reference.state_dict().items()
        if "lora_" not in name
    }
    require_equal(files(tmp_path / "merged"), wanted)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    size = saved(tmp_path / "model")
    base = ts.from_pretrained(tmp_path / "model", budget=size // 3)
    model = adapted(base, peft.LoraConfig(target_modules=["q_proj"]))
    with torch.no_grad():
        model.base_model.model.model.layers[2].self_attn.q_proj.lora_B["default"].weight[0] = float(
            "inf"
        )
    with pytest.raises(ValueError, match="NaNs detected"):
        ts.merge(model, tmp_path / "merged", safe=True)
    assert not (tmp_path / "merged").exists()
    ts.merge(model, tmp_path / "merged")


def test_refusals_change_nothing(tmp_path: Path) -> None:
    size = saved(tmp_path / "model")
    config = peft.LoraConfig(target_modules=["q_proj"])
    base = ts.from_pretrained(tmp_path / "model", budget=size // 3)
    with pytest.raises(ts.ModelError, match="no adapters that change weights"):
        ts.merge(base, tmp_path / "merged")
    with pytest.raises(ts.ModelError, match="not offloaded"):
        ts.merge(
            adapted(nn.Sequential(nn.Linear(4, 4)), peft.LoraConfig(target_modules=["0"])), "x"
        )
    model = adapted(base, config)
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "notes").write_text("mine")
    with pytest.raises(ts.StorageError, match="exists already, and is not an empty directory"):
        ts.merge(model, tmp_path / "merged")
    assert [each.name for each in (tmp_path / "merged").iterdir()] == ["notes"]
    assert not (tmp_path / "merged.partial").exists()
    (tmp_path / "merged" / "notes").unlink()
    ts.merge(model, tmp_path / "merged")
    assert files(tmp_path / "merged")


def test_only_the_same_merge_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted merge continues; that of another adapter starts from the beginning."""
    size = saved(tmp_path / "model")
    base = ts.from_pretrained(tmp_path / "model", budget=size // 3)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"])
    model = adapted(base, config)
    original = _merging._Merged._merged_layers
    merged: list[frozenset[str]] = []
    left = 0

    def counted(self: Any, names: frozenset[str]) -> Any:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        merged.append(names)
        return original(self, names)

    monkeypatch.setattr(_merging._Merged, "_merged_layers", counted)
    for _ in range(2):
        left = 3
        with pytest.raises(KeyboardInterrupt):
            ts.merge(model, tmp_path / "merged")
    assert len(set(merged)) == len(merged) == 6, "complete layers are not merged again"
    with torch.no_grad():
        model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.add_(0.5)
    left, merged[:] = 100, []
    ts.merge(model, tmp_path / "merged")
    assert len(merged) == 8
    reference = adapted(hf.LlamaForCausalLM.from_pretrained(tmp_path / "model"), config)
    with torch.no_grad():
        reference.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.add_(
            0.5
        )
    reference.merge_and_unload().save_pretrained(tmp_path / "expected")
    require_equal(files(tmp_path / "merged"), files(tmp_path / "expected"))
    assert not (tmp_path / "merged.partial").exists()


#: Starts a process for each line that it reads, which merges, and prints what it does. At the fifth
#: layer, the process waits to be killed, if the line asks for that.
_FORKS = """
import os, sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_merging import adapted, peft, torch
import tensorstream as ts
from tensorstream.streaming import _merged_directory, _merging

torch.set_num_threads(1)
_merged_directory.CHECKPOINT_BYTES = 1
path = Path({path!r})
original = _merging._Merged._merged_layers

begun = 0

def merged_layers(self, names):
    global begun
    print("layer", flush=True)
    begun += 1
    if line == "is killed\\n" and begun > 4:
        time.sleep(600)
    return original(self, names)

_merging._Merged._merged_layers = merged_layers
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        model = adapted(
            ts.from_pretrained(path / "model", budget={budget}),
            peft.LoraConfig(target_modules="all-linear"),
        )
        print(os.getpid(), flush=True)
        ts.merge(model, path / "merged")
        os._exit(0)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


@pytest.mark.slow
def test_a_merge_that_is_killed_several_times_is_completed(
    programs: preloaded.Server, tmp_path: Path
) -> None:
    kills = 4
    size = saved(tmp_path / "model", num_hidden_layers=12)
    config = peft.LoraConfig(target_modules="all-linear")
    reference = adapted(hf.LlamaForCausalLM.from_pretrained(tmp_path / "model"), config)
    reference.merge_and_unload().save_pretrained(tmp_path / "expected")
    program = _FORKS.format(tests=str(Path(__file__).parent), path=str(tmp_path), budget=size // 3)
    parent = programs.start_code(program)
    counts = []
    for attempt in range(kills + 1):
        parent.stdin.write("is killed\n" if attempt < kills else "ends\n")
        parent.stdin.flush()
        child, merged = int(parent.stdout.readline()), 0
        for line in parent.stdout:
            if line == "ended\n":
                break
            merged += 1
            if attempt < kills and merged == 4:
                time.sleep(0.003 * attempt)
                os.kill(child, signal.SIGKILL)
        counts.append(merged)
        assert (tmp_path / "merged").exists() == (attempt == kills)
    parent.wait()
    # 84 layers are merged. Of the four or more that each attempt has begun, it kept at least two.
    assert counts[-1] <= 84 - 2 * kills
    require_equal(files(tmp_path / "merged"), files(tmp_path / "expected"))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "KaSA"])
def test_initialisations_that_change_weights(init: str, tmp_path: Path) -> None:
    """PiSSA and OLoRA subtract from a weight what the adapter adds to it. KaSA truncates it."""
    size = saved(tmp_path / "model")
    kasa = init == "KaSA"
    options = {"kasa_config": peft.KasaConfig()} if kasa else {"init_lora_weights": init}

    def initialised(base: Any) -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], **options)
        return peft.get_peft_model(base, config)

    reference = initialised(hf.LlamaForCausalLM.from_pretrained(tmp_path / "model"))
    model = initialised(ts.from_pretrained(tmp_path / "model", budget=size // 3))
    require_same_parameters(model, reference)
    for _ in range(3):
        for own in (model, reference):
            own.zero_grad()
            own(input_ids=X, labels=X).loss.backward()
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                assert torch.equal(model.get_parameter(name).grad, parameter.grad), name
    ts.merge(model, tmp_path / "merged")
    reference.merge_and_unload().save_pretrained(tmp_path / "expected")
    require_equal(files(tmp_path / "merged"), files(tmp_path / "expected"))


class Attending(nn.Module):
    """A layer whose weights PEFT merges and unmerges in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(32, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.after = nn.Sequential(*(nn.Linear(32, 32) for _ in range(10)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x)
        return self.after(hidden + self.attention(hidden, hidden, hidden)[0])


def test_multihead_attention(tmp_path: Path) -> None:
    """Each forward changes the weights in their last bits. So it does here."""
    torch.manual_seed(0)
    source = Attending()
    size = sum(parameter.nbytes for parameter in source.parameters())
    config = peft.LoraConfig(target_modules=["attention", "before"], init_lora_weights=False)
    reference = adapted(copy.deepcopy(source), config)
    stored = ts.Config(storage_path=tmp_path / "weights", budget=size // 2)
    model = adapted(ts.offload(copy.deepcopy(source), stored), config)
    merged = copy.deepcopy(reference).merge_and_unload()
    ts.merge(model, tmp_path / "merged")
    require_equal(ts.load_file(tmp_path / "merged"), merged.state_dict())
    x = torch.randn(2, 5, 32)
    for _ in range(3):
        outputs = [own(x) for own in (model, reference)]
        assert torch.equal(*outputs)
        for own, output in zip((model, reference), outputs, strict=True):
            own.zero_grad()
            output.sum().backward()
        for name, parameter in reference.named_parameters():
            mine = model.get_parameter(name)
            assert torch.equal(mine.detach().clone(), parameter.detach()), name
            assert (mine.grad is None) == (parameter.grad is None), name
            assert mine.grad is None or torch.equal(mine.grad, parameter.grad), name
    for call in ("merge_adapter", "unmerge_adapter"):
        for own in (model, reference):
            getattr(own, call)()
        assert torch.equal(model(x), reference(x)), call
    model, reference = model.merge_and_unload(), reference.merge_and_unload()
    require_same_parameters(model, reference)
    assert torch.equal(model(x), reference(x))


def test_a_merge_that_changes_nothing_leaves_the_weights_streamed(tmp_path: Path) -> None:
    size = saved(tmp_path / "model")
    config = peft.LoraConfig(target_modules="all-linear")  # its initial update is zero
    model: Any = peft.get_peft_model(
        ts.from_pretrained(tmp_path / "model", budget=size // 3), config
    )
    streamed = [name for name, each in model.named_parameters() if "_ref" in each.__dict__]
    objects = [model.get_parameter(name) for name in streamed]
    model.merge_adapter()
    model.unmerge_adapter()
    assert [name for name, each in model.named_parameters() if "_ref" in each.__dict__] == streamed
    assert all(model.get_parameter(n) is own for n, own in zip(streamed, objects, strict=True))


def test_a_refused_merge_in_place_changes_nothing(tmp_path: Path) -> None:
    size = saved(tmp_path / "model")
    base = ts.from_pretrained(tmp_path / "model", budget=size // 3)
    model = adapted(base, peft.LoraConfig(target_modules=["q_proj"]))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.lora_B["default"].weight[0] = float("inf")
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    original = files(tmp_path / "model")
    for name, value in original.items():
        own = model.get_base_model().state_dict()
        mine = own.get(name, own.get(name.replace(".weight", ".base_layer.weight")))
        assert torch.equal(mine, value), name
    assert "_ref" in layer.base_layer.weight.__dict__, "it streams again"


def test_disabled_adapters_unmerge_in_a_forward(tmp_path: Path) -> None:
    size = saved(tmp_path / "model")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"])
    reference = adapted(hf.LlamaForCausalLM.from_pretrained(tmp_path / "model"), config)
    model = adapted(ts.from_pretrained(tmp_path / "model", budget=size // 3), config)
    for own in (model, reference):
        own.merge_adapter()
    with torch.no_grad():
        for _ in range(2):
            with model.disable_adapter(), reference.disable_adapter():
                assert torch.equal(model(input_ids=X).logits, reference(input_ids=X).logits)
            assert torch.equal(model(input_ids=X).logits, reference(input_ids=X).logits)
    require_same_parameters(model, reference)


def test_merging_takes_memory_for_one_layer(programs: preloaded.Server, tmp_path: Path) -> None:
    """With a budget of an eighth of the weights, the peak stays below three eighths."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24}
    size = saved(tmp_path / "model", **shape)
    saved(tmp_path / "small")
    assert size > 300 << 20
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_merging import peft, torch
import tensorstream as ts

path = Path({str(tmp_path)!r})

def merge(name, budget):
    base = ts.from_pretrained(path / name, budget=budget)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
    ts.merge(model, path / f"{{name}}-merged")

merge("small", "1MiB")  # imports what merging needs
before = int(open("/proc/self/statm").read().split()[1]) * 4096
open("/proc/self/clear_refs", "w").write("5")
merge("model", {size // 8})
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print((int(peak) << 10) - before)
"""
    done = programs.run_code(program)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < size * 3 // 8, f"{done.stdout} of {size}"
