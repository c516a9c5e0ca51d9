# SPDX-License-Identifier: MIT OR Apache-2.0
"""State dicts of a machine that a model of the client takes over, with the weights that it ties."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch


class TakenOver(OrderedDict[str, torch.Tensor]):
    """A state dict whose tensors ``Module.load_state_dict`` takes over, as with ``assign=True``.

    So the parameters of the module are on the machine afterwards. Copied into parameters on the
    CPU, the data would be downloaded.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self._metadata = _Assigned()


class _Assigned(dict[str, Any]):
    """The metadata of a state dict, which says the same about each module."""

    def get(self, prefix: str, default: Any = None) -> dict[str, Any]:
        return {"assign_to_params_buffers": True}


def with_tied(tensors: Mapping[str, torch.Tensor], configuration: str) -> TakenOver:
    """Adds the names that a model of transformers ties to others, and that files leave out.

    Args:
        tensors: The tensors of the files.
        configuration: The content of the model's config.json.
    """
    state = TakenOver(tensors)
    for names in _tied(configuration):
        present = [name for name in names if name in state]
        if present and len(names) > 1:
            # A module takes over a parameter as it is, so that the tied ones stay one object.
            shared = torch.nn.Parameter(state[present[0]], requires_grad=False)
            state.update(dict.fromkeys(names, shared))
    return state


def _tied(configuration: str) -> list[list[str]]:
    """Returns the names of the parameters of a model, in groups that are one parameter.

    Empty if transformers is not installed, or does not have the class.
    """
    if importlib.util.find_spec("transformers") is None:
        return []
    transformers = importlib.import_module("transformers")
    try:
        settings = json.loads(configuration)
        config = transformers.AutoConfig.for_model(**settings)
        with torch.device("meta"):
            model = getattr(transformers, settings["architectures"][0])(config)
        model.tie_weights()
    except Exception:  # the code of the model can raise anything
        return []
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return list(groups.values())
