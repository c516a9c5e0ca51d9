# SPDX-License-Identifier: MIT OR Apache-2.0
"""Merges adapters of PEFT into the weights of a streamed model, which are written to a directory.

PEFT computes every value. It merges copies of the adapted layers of one unit at a time, in memory,
with ``merge_and_unload`` of the class of the adapter. All other weights are copied as ranges of
files. The structure of the merged model, and so its names, come from a copy of the model whose
layers PEFT unloads without merging.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._systems import require_unix
from ..errors import ConfigurationError, ModelError
from . import _tree as tree
from ._builder import Builder
from ._calls import own_stand_ins, stand_ins_below
from ._merged_directory import MergedDirectory, digest
from ._saving import saved_in_pieces
from ._state import Streaming, streaming_of
from ._streamed_tensor import StreamedTensor, in_memory, to_memory
from ._symbolic_tensor import Derived, SymbolicTensor

#: The children of PEFT's layers that contain the weights of the model.
_BASES = ("base_layer", "original_module")


def merge(
    model: nn.Module,
    out: str | os.PathLike[str],
    *,
    adapters: list[str] | None = None,
    safe: bool = False,
) -> None:
    """Merges adapters of PEFT into the weights, and writes the merged model to a directory. Blocks.

    The weights are those of ``model.merge_and_unload()`` in memory, bit for bit, for every adapter
    that PEFT can merge. They are computed for one layer at a time, which needs memory for the
    weights of this layer beside the budget. The model itself does not change.

    A model of transformers or diffusers is written by its ``save_pretrained``. Other small files of
    the checkpoint, such as those of a tokenizer, are copied. Of other models, the directory has the
    state dict, in files that are named like those of the checkpoint. Load the result with
    ``from_pretrained(out)`` or ``offload(base, checkpoint=out)``.

    The directory appears when it is complete. Until then, ``OUT.partial`` contains what is. An
    interrupted merge resumes when ``merge`` is called again with the same model, adapters and
    directory. After a crash, it repeats at most the last 256 MiB.

    Args:
        model: A ``PeftModel`` whose base is streamed, or a model that contains one.
        out: The directory. It must not exist, or be empty.
        adapters: The names of the adapters to merge, in this order. The default is the active ones.
        safe: Whether to refuse merged weights that are not finite, as ``safe_merge`` of PEFT does.
            For some dtypes, PEFT then rounds differently.

    Raises:
        ConfigurationError: PEFT is not installed, or this is Windows.
        ModelError: The model is not streamed, or has no adapters that PEFT can merge.
        StorageError: Reading or writing failed, or the directory exists and is not empty.
        ValueError: PEFT refuses the merge, for example because weights are not finite.

    Examples:
        >>> import peft, tensorstream as ts, torch
        >>> layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        >>> base = ts.offload(layers, ts.Config(storage_path="weights", budget="60KiB"))
        >>> model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0", "3"]))
        >>> ts.merge(model, "merged")
        >>> sorted(name for name in ts.load_file("merged"))[:2]
        ['0.bias', '0.weight']
    """
    require_unix("merging", "merge on a Linux or macOS computer")
    streaming = streaming_of(model)
    tuner = _tuner(model)
    merged = _Merged(tuner, streaming, adapters, safe)
    with MergedDirectory(Path(out), merged.origin()) as directory:
        twin: Any = merged.model()
        with saved_in_pieces(twin, directory.write):
            if hasattr(twin, "save_pretrained"):
                twin.save_pretrained(directory.path)
            else:
                directory.write_state_dict(twin.state_dict(), streaming.checkpoint)
        directory.copy_small_files(streaming.checkpoint)
        directory.finish()


def _tuner(model: nn.Module) -> Any:
    """Returns the object of PEFT that merges the adapters of a model.

    Raises:
        ConfigurationError: PEFT is not installed.
        ModelError: The model has no adapters that can be merged, or several models with adapters.
    """
    try:
        from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
        from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    except ImportError as error:
        raise ConfigurationError("merge needs PEFT: pip install peft") from error
    modules = list(tree.modules(model))
    tuners = [each for each in modules if isinstance(each, BaseTuner)]
    inner = {id(each) for tuner in tuners for each in tree.modules(tuner.model)}
    tuners = [each for each in tuners if id(each) not in inner]
    if len(tuners) > 1:
        raise ModelError(
            f"this {type(model).__name__} contains several models with adapters "
            f"({', '.join(type(tuner.model).__name__ for tuner in tuners)}); pass one of them"
        )
    if tuners:
        return tuners[0]
    # `add_adapter` of transformers and diffusers puts layers into a model without a tuner.
    layers = [each for each in modules if isinstance(each, BaseTunerLayer)]
    owners = (each for each in modules if isinstance(each.__dict__.get("peft_config"), dict))
    owner = next(owners, None)
    if not layers or owner is None:
        raise ModelError(
            f"cannot merge {type(model).__name__}: it has no adapters that change weights; get one "
            "with peft.get_peft_model, or by PeftModel.from_pretrained"
        )
    configs: Any = owner.peft_config
    kinds = {config.peft_type for config in configs.values()}
    if len(kinds) > 1:
        raise ModelError(
            f"cannot merge adapters of several kinds ({', '.join(sorted(kinds))}); delete the "
            "others first"
        )
    kind = PEFT_TYPE_TO_TUNER_MAPPING[kinds.pop()]
    tuner = kind.__new__(kind)
    nn.Module.__init__(tuner)
    tuner.model, tuner.peft_config = owner, configs
    tuner.active_adapter = layers[0].active_adapters
    return tuner


class _Merged:
    """The merged weights of a model, which are computed when they are written.

    Args:
        tuner: The object of PEFT.
        streaming: What streams in its model.
        adapters: The adapters to merge; ``None`` for the active ones.
        safe: Whether PEFT checks that weights are finite.
    """

    def __init__(
        self, tuner: Any, streaming: Streaming, adapters: list[str] | None, safe: bool
    ) -> None:
        self._tuner, self._adapters, self._safe = tuner, adapters, safe
        self._checkpoint = streaming.checkpoint
        self._provider = Builder(streaming.checkpoint)
        #: The adapted layers, and the modules that replace others, by name.
        self._layers = dict(_adapted(tuner.model))
        #: The merged weights that were computed last, by name, and the names of their layers.
        self._last: tuple[frozenset[str], dict[str, torch.Tensor]] = (frozenset(), {})

    def origin(self) -> str:
        """Returns text that identifies the merged weights: equal texts mean equal bytes."""
        import peft

        described: list[Any] = [
            peft.__version__,
            torch.__version__,
            torch.get_num_threads(),
            self._adapters,
            self._safe,
            [(os.fspath(path), self._checkpoint.version(index))
             for index, (path, _, _) in enumerate(self._checkpoint.files())],
        ]  # fmt: skip
        for name, module in tree.named_modules(self._tuner.model):
            plain = {k: v for k, v in vars(module).items() if not k.startswith("_")}
            described.append((name, type(module).__qualname__, _plain(plain)))
            described.append(_plain(vars(module).get("_active_adapter")))
        return digest(described, _tensors_in_memory(self._tuner.model))

    def model(self) -> nn.Module:
        """Returns the merged model. The weights that stream are symbolic, as are merged ones."""
        twin = self._unloaded()
        streamed: dict[int, SymbolicTensor] = {}
        for names in _groups(self._layers):
            for name in names:
                for own, parameter in twin.get_submodule(name).named_parameters():
                    if id(parameter) not in streamed:
                        full = f"{name}.{own}"
                        source = Derived(full, self._compute, (names, full), {}, None, 0)
                        streamed[id(parameter)] = SymbolicTensor(
                            parameter.shape, parameter.dtype, source, self._provider
                        )
        for module in tree.modules(twin):
            for own, parameter in module._parameters.items():  # type: ignore[assignment]
                if id(parameter) in streamed:
                    module._parameters[own] = streamed[id(parameter)]  # type: ignore[assignment]
        return twin

    def _unloaded(self) -> nn.Module:
        """Returns a copy of the model that PEFT has unloaded. Its weights are not merged.

        It shares all tensors in memory with the model. Those that stream are symbolic.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer

        memo: dict[int, Any] = {id(each): each for each in _all_tensors(self._tuner.model)}
        for _, each in stand_ins_below(self._tuner.model):
            symbolic = each._ref.weights.stored.symbolic(each)
            memo[id(each)] = nn.Parameter(symbolic, requires_grad=False)
        twin = copy.deepcopy(self._tuner.model, memo)
        twin.__dict__.pop("hf_device_map", None)
        if "_hf_peft_config_loaded" in twin.__dict__:
            twin._hf_peft_config_loaded = False
        for module in tree.modules(twin):
            if isinstance(module, BaseTunerLayer):
                module.merge = _merge_nothing  # type: ignore[method-assign]
        return self._unload(twin)

    def _unload(self, model: nn.Module) -> nn.Module:
        """Lets PEFT merge and unload the layers of a model that is not its own."""
        tuner = copy.copy(self._tuner)
        tuner.__dict__["_modules"] = {**self._tuner._modules, "model": model}
        unloaded: nn.Module = tuner.merge_and_unload(
            progressbar=False, safe_merge=self._safe, adapter_names=self._adapters
        )
        return unloaded

    def _compute(self, names: frozenset[str], name: str) -> torch.Tensor:
        """Returns a merged weight.

        Args:
            names: The layers that must be merged together, because they share weights.
            name: The weight.
        """
        if self._last[0] != names:
            self._last = frozenset(), {}
            self._last = names, self._merged_layers(names)
        merged = self._last[1].get(name)
        if merged is None:
            raise ModelError(
                f"cannot merge {type(self._tuner).__name__}: its layer has no `{name}` once it is "
                "merged"
            )
        return merged

    def _merged_layers(self, names: frozenset[str]) -> dict[str, torch.Tensor]:
        """Merges copies of layers in memory. Returns their parameters by name."""
        memo: dict[int, Any] = {}
        part = nn.Module()
        for name in self._layers:  # in the order in which PEFT visits them
            if name in names:
                layer = copy.deepcopy(self._layers[name], memo)
                for module in tree.modules(layer):
                    for _, each in own_stand_ins(module):
                        to_memory(each, in_memory(each))
                _put(part, name, layer)
        merged = self._unload(part)
        return {
            name: each.detach() for name, each in merged.named_parameters(remove_duplicate=False)
        }


def _merge_nothing(*_: Any, **__: Any) -> None:
    """Replaces ``merge`` of the layers of a copy that is only unloaded."""


def _adapted(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost modules that PEFT replaces when it unloads a model, with their names."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    seen: set[int] = set()

    def visit(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        # Not `named_modules`, which some layers of PEFT override.
        for name, child in module._modules.items():
            if child is None or id(child) in seen:
                continue
            seen.add(id(child))
            if isinstance(child, BaseTunerLayer | AuxiliaryTrainingWrapper):
                yield prefix + name, child
            else:
                yield from visit(child, f"{prefix}{name}.")

    yield from visit(model, prefix)


def _groups(layers: dict[str, nn.Module]) -> list[frozenset[str]]:
    """Returns the names of layers that must be merged together, because they share weights.

    Leaves out those that replace a module by a trained copy of it, which is in memory.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    groups: dict[str, set[str]] = {}
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        if not any(isinstance(each, BaseTunerLayer) for each in tree.modules(layer)):
            continue
        groups[name] = {name}
        for parameter in _base_parameters(layer):
            other = owners.setdefault(id(parameter), name)
            if groups[other] is not groups[name]:
                joined = groups[other] | groups[name]
                groups.update(dict.fromkeys(joined, joined))
    return list(dict.fromkeys(frozenset(group) for group in groups.values()))


def _base_parameters(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of a layer of PEFT that are not those of an adapter."""
    for name, module in tree.named_modules(layer):
        is_base = any(part in _BASES for part in name.split("."))
        for each in module._parameters.values():
            if each is not None and (is_base or isinstance(each, StreamedTensor)):
                yield each


def _put(root: nn.Module, name: str, module: nn.Module) -> None:
    """Makes a module a descendant of another one, with this name."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    root.add_module(last, module)


def _all_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yields the parameters and buffers of a model that are in memory."""
    for module in tree.modules(model):
        for each in (*module._parameters.values(), *module._buffers.values()):
            if each is not None and not isinstance(each, StreamedTensor):
                yield each


def _tensors_in_memory(model: nn.Module) -> Iterable[torch.Tensor]:
    return {id(each): each for each in _all_tensors(model)}.values()


def _plain(value: Any) -> Any:
    """Returns what of an attribute of a layer can change how it merges: numbers and names."""
    if isinstance(value, dict):
        return [(repr(key), _plain(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return repr(value) if isinstance(value, int | float | str | bool | None) else None
