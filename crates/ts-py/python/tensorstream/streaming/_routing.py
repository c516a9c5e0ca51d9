# SPDX-License-Identifier: MIT OR Apache-2.0
"""Announces the experts that a model is about to use, and guesses the next ones."""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ._calls import announce, call_if_present
from ._division import route_argument, selected
from ._weights import Divided, Weights

#: With more tokens than this, a layer needs most of its experts, and guesses save nothing.
_MOST_GUESSED_TOKENS = 8
#: While guesses are of no use, only one of this many forwards makes one.
_RARELY = 32


class _Announcer:
    """Announces the routed units of a module before each of its forwards."""

    #: The announcer of the module whose units are likely to be announced next.
    next: Any = None

    def __init__(self, weights: Weights) -> None:
        # The streamer ends with the model.
        self._streamer = weakref.ref(weights.streamer)
        self._calls = 0

    def _announce(self, module: nn.Module, units: list[tuple[int, int]], inputs: Any) -> Any:
        """Announces units, and guesses the next ones. The result ends the announcement.

        Args:
            module: The module that is about to be called.
            units: The numbers of the units, each with the number of its uses.
            inputs: The input of the experts.
        """
        streamer = self._streamer()
        if streamer is None or module._forward_pre_hooks:  # hooks can change the inputs
            return None
        expected = streamer.expect(units)
        self._calls += 1
        if self.next is not None and (streamer.guesses_pay() or self._calls % _RARELY == 1):
            guessed = self.next.likely(inputs)
            if guessed is not None:
                streamer.guess(guessed)
        return expected

    def likely(self, inputs: Any) -> list[int] | None:
        """Returns the units that this module is likely to announce. ``None`` if it is unknown.

        Args:
            inputs: The input of the experts before.
        """
        raise NotImplementedError


class Expert(_Announcer):
    """Announces all units of an expert that is a module."""

    def __init__(self, weights: Weights, units: list[int]) -> None:
        super().__init__(weights)
        self._units = units

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = next((leaf for leaf in args if isinstance(leaf, torch.Tensor)), None)
        uses = 1 if tensor is None or tensor.ndim == 0 else max(tensor.shape[:-1].numel(), 1)
        return self._announce(args[0], [(unit, uses) for unit in self._units], None)

    def likely(self, _: Any) -> list[int]:
        # A batch of many tokens uses all experts in order. With few tokens, such guesses are mostly
        # wrong, and the engine does not read for them.
        return self._units


class Routed(_Announcer):
    """Announces the slices of divided weights that a module chooses: they are read together."""

    def __init__(
        self, module: nn.Module, weights: Weights, keys: list[int], router: nn.Module | None
    ) -> None:
        super().__init__(weights)
        self._divided = [each for key in keys if (each := weights.divided(key)) is not None]
        self._route = route_argument(module)
        #: Whether all slices of a weight are used before those of the next weight.
        self._by_weight = getattr(
            getattr(module, "config", None), "_experts_implementation", "eager"
        ) not in (None, "eager")
        self._router = None if router is None else weakref.ref(router)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._route is not None, "only modules with such an argument are announced"
        inputs = args[1:]  # the first one is the module
        units = self._units(selected(self._route, inputs, kwargs))
        return self._announce(args[0], units, inputs[0] if inputs else None)

    def _units(self, chosen: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns the units of slices in the order of their use, each with its number of uses."""

        def units(each: Divided, own: tuple[int, int]) -> list[tuple[int, int]]:
            index, uses = own
            return [(each.first_unit + index, uses)] if 0 <= index < each.shape[0] else []

        if self._by_weight:
            return [unit for each in self._divided for own in chosen for unit in units(each, own)]
        return [unit for own in chosen for each in self._divided for unit in units(each, own)]

    def likely(self, inputs: Any) -> list[int] | None:
        """Returns the units of the experts that this module is likely to choose.

        Applies the router of this module to the input of the experts of the layer before. These
        inputs are similar, because each layer changes little (Eliseev and Mazur, "Fast Inference of
        Mixture-of-Experts Language Models with Offloading", 2023).

        Returns:
            ``None`` if there is no router that could be applied, or its weights are not in memory.
        """
        router = None if self._router is None else self._router()
        if router is None:
            return None
        usable = (
            not router.training
            and type(inputs) is torch.Tensor
            and inputs.ndim == 2
            and inputs.shape[0] <= _MOST_GUESSED_TOKENS
            and not torch.is_grad_enabled()
        )
        if not usable:
            return None
        chosen = [
            leaf
            for leaf in tree_leaves(call_if_present(router, inputs))
            if type(leaf) is torch.Tensor and leaf.dtype == torch.int64
        ]
        if not chosen:
            return None
        # The experts that most tokens choose, and then those that a token prefers.
        counts = collections.Counter(chosen[-1].flatten().tolist())
        return [
            each.first_unit + index
            for index, _ in counts.most_common()
            for each in self._divided
            if 0 <= index < each.shape[0]
        ]


def router_of(model: nn.Module, experts: nn.Module) -> nn.Module | None:
    """Returns the router of an experts module, or ``None`` if it is unknown.

    A router is applied to other inputs than those of the model, so its forward must have no side
    effects. Therefore only the routers of transformers count.
    """
    for parent in model.modules():
        children = list(parent.children())
        if any(child is experts for child in children):
            for child in children:
                kind = type(child)
                is_known = kind.__module__.startswith("transformers.models.")
                if is_known and kind.__name__.lower().endswith("topkrouter"):
                    return child
    return None


def announced(
    model: nn.Module,
    weights: Weights,
    routed: Iterable[tuple[nn.Module, list[int]]],
    experts: Iterable[tuple[nn.Module, list[int]]],
) -> None:
    """Announces the units of modules before their forwards.

    Args:
        model: The model.
        weights: Its weights.
        routed: The modules that choose slices of weights, and the keys of these weights.
        experts: The experts that are modules, and their units.
    """
    choosing = [
        (module, Routed(module, weights, keys, router_of(model, module))) for module, keys in routed
    ]
    chosen = [(module, Expert(weights, units)) for module, units in experts]
    for announcers in (choosing, chosen):
        for (_, own), (_, after) in itertools.pairwise(announcers):
            own.next = after
        for module, announcer in announcers:
            announce(module, announcer)
