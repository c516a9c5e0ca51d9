# SPDX-License-Identifier: MIT OR Apache-2.0
"""Finds the parameters of PEFT's adapters, without importing PEFT."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from . import _tree as tree


def adapter_parameters(model: nn.Module) -> frozenset[int]:
    """Returns the ``id`` of each parameter of an adapter.

    They stay in memory, so that they can be trained. If a model has adapters, all parameters that
    require gradients count as theirs. If it has none, the result is empty.
    """
    found = {id(each) for module in tree.modules(model) for each in _of_layer(module)}
    if found or hasattr(model, "peft_config"):
        found |= {id(each) for each in tree.parameters(model) if each.requires_grad}
        prompts = getattr(model, "prompt_encoder", None)
        if isinstance(prompts, nn.Module):
            found |= {id(each) for each in tree.parameters(prompts)}
    return frozenset(found)


def _of_layer(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of the adapters of a layer of PEFT."""
    for name in getattr(module, "adapter_layer_names", ()):
        part = getattr(module, name, None)
        if isinstance(part, nn.Module):
            yield from tree.parameters(part)
