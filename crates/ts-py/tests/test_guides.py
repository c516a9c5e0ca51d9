# SPDX-License-Identifier: MIT OR Apache-2.0
"""Snippets of the guides of mycelya-torch and torch-remote, with another import line."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import preloaded
import pytest
import tensorstream as ts
import torch
import transformers as hf
from tensorstream.errors import ConfigurationError, DeviceUnavailableError
from tensorstream.remote import RemoteMachine, load_huggingface_state_dicts


def test_storages_are_numbered_from_one(programs: preloaded.Server) -> None:
    ran = programs.run_code("""
        import torch
        from tensorstream.remote import RemoteMachine, create_mock_machine, storage_id
        machine = RemoteMachine("mock", "A100")
        x = torch.ones(2, device=machine.device("cuda"))
        y = x.T @ x
        torch.manual_seed(0)
        z = torch.empty(0, device=machine.device("cuda"))
        print(storage_id(x), storage_id(x.view(1, 2)), storage_id(y), storage_id(z))
        other = create_mock_machine("T4")
        print(storage_id(torch.randn(3, device=other.device("cuda"))))
    """)
    assert ran.stdout.split() == ["1", "1", "2", "3", "4"], ran


def test_a_mock_machine_has_as_many_gpus_as_were_wanted() -> None:
    with RemoteMachine("mock", "A100", gpu_count=2) as machine:
        assert machine.device("cuda", 1) == machine.device("cuda:1") == machine.device(1)
        assert machine.device("cuda") == machine.device("cpu") == machine.device(0)
        x = torch.ones(2, device=machine.device("cuda", 1))
        assert (x.to(machine.device("cuda")) + 1).tolist() == [2.0, 2.0]
        with pytest.raises(ConfigurationError, match="no device 2: expected 0 to 1"):
            machine.device("cuda", 2)
        with pytest.raises(ConfigurationError, match="no xpu devices"):
            machine.device("xpu")
    with RemoteMachine("mock") as machine, pytest.raises(ConfigurationError, match="no cuda"):
        machine.device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this computer has a GPU")
@pytest.mark.parametrize("how", ['"A100"', '"T4", gpu_count=2', 'device_type="cuda"'])
def test_a_missing_gpu_is_refused_in_one_sentence(how: str, programs: preloaded.Server) -> None:
    ran = programs.run_code(f"""
        from tensorstream.errors import DeviceUnavailableError
        from tensorstream.remote import RemoteMachine
        try:
            RemoteMachine("local", {how})
        except DeviceUnavailableError as error:
            print(error)
    """)
    count = 2 if "2" in how else 1
    expected = f"not enough GPUs: expected at least {count}, but PyTorch finds 0\n"
    assert (ran.stdout, ran.stderr) == (expected, "")
    assert not issubclass(DeviceUnavailableError, MemoryError)


def _in_cache(model: hf.PreTrainedModel, cache: Path) -> None:
    """Puts a model into a cache of the Hub, where it is called some/model."""
    root, commit = cache / "hub/models--some--model", "0" * 40
    (root / "refs").mkdir(parents=True)
    (root / "refs/main").write_text(commit, encoding="ascii")
    model.save_pretrained(root / "snapshots" / commit)


TINY = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def _gpt2() -> hf.PreTrainedModel:
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_embd=64, n_head=2, **TINY))


def _llama(tied: bool) -> hf.PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "tie_word_embeddings": tied}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, **TINY))


@pytest.mark.product
@pytest.mark.parametrize("kind", ["mock", "local"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "tied llama", "llama"])
def test_a_strict_load_of_a_model_of_the_hub_moves_it_to_the_machine(
    name: str, dtype: torch.dtype, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # A mock machine is in this process, where the library has read the environment already.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    torch.manual_seed(0)
    made = (_gpt2() if name == "gpt2" else _llama("tied" in name)).to(dtype).eval()
    _in_cache(made, tmp_path)
    path = tmp_path / "hub/models--some--model/snapshots" / ("0" * 40)
    ids = torch.tensor([[1, 2, 3]])
    expected = made.generate(ids, max_new_tokens=6, do_sample=False)
    with RemoteMachine(kind) as machine:
        dicts = load_huggingface_state_dicts("some/model", machine.device())
        for model in (type(made).from_pretrained(path, dtype=dtype), type(made)(made.config)):
            downloaded = machine.stats()["downloaded_bytes"]
            model.eval().load_state_dict(dicts[""], strict=True)
            assert {each.device for each in model.parameters()} == {machine.device()}
            assert all(each.requires_grad for each in model.parameters())
            embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
            assert (embedding.weight is head.weight) == (name != "llama")
            assert machine.stats()["downloaded_bytes"] == downloaded
            before = machine.stats()["operators"]
            given = ids.to(machine.device())
            result = model.to(machine.device()).generate(given, max_new_tokens=6, do_sample=False)
            assert result.device == machine.device()
            assert machine.stats()["operators"] > before
            assert torch.equal(result.cpu(), expected)


class Averaged(torch.nn.Module):
    """A tied model with buffers, of which one is not in files."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.embed(ids)) * self.scale - self.mean)
        return result


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_dict_of_a_machine_moves_any_module(
    dtype: torch.dtype, on_meta: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    made = Averaged()
    with torch.no_grad():
        made.mean += 3
        made.norm.weight *= 2
    tensors = {name: tensor for name, tensor in made.state_dict().items() if "head" not in name}
    ts.save_file(tensors, tmp_path / "model.safetensors")
    expected = made.to(dtype).eval()(torch.arange(7))
    with RemoteMachine.mock() as machine:
        [state] = load_huggingface_state_dicts(str(tmp_path), machine.device()).values()
        with torch.device("meta" if on_meta else "cpu"):
            model = Averaged().to(dtype).eval()
        for name in ("embed", "head"):
            model.get_submodule(name).requires_grad_(False)
        model.load_state_dict(state)
        if on_meta:  # nothing has the values of this buffer
            assert model.scale.is_meta
            model.scale = torch.full((4,), 2.0, dtype=dtype)
            model.to(machine.device())
        assert {each.device for each in model.state_dict().values()} == {machine.device()}
        assert model.scale.device == machine.device() and model.head.weight is model.embed.weight
        assert not model.head.weight.requires_grad and model.norm.weight.requires_grad
        assert torch.equal(model(torch.arange(7).to(machine.device())).cpu(), expected)
        copied = Averaged()
        copied.load_state_dict(dict(state), strict=False)
        assert copied.mean.device.type == "cpu"
        wrong = Averaged()
        wrong.norm = torch.nn.BatchNorm1d(5)
        with pytest.raises(RuntimeError, match=r"size mismatch for norm\.weight"):
            wrong.load_state_dict(state)
        # What was replaced before the error, and the rest, are on one device.
        assert {each.device for each in wrong.state_dict().values()} == {machine.device()}
        assigned = Averaged()
        assigned.load_state_dict(state, assign=True)
        assert assigned.scale.device == machine.device()
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"mean"'):
            torch.nn.Sequential().load_state_dict(state)
