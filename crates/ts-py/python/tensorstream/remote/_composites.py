# SPDX-License-Identifier: MIT OR Apache-2.0
"""Operators that PyTorch makes of others, and of other ones on a CPU than elsewhere: on a machine that is one they
are made as there, so that the same elements come out."""

from __future__ import annotations

import functools
from typing import Any

import torch

aten = torch.ops.aten

#: What the machine of a device's index runs operators on: "cpu" or "cuda".
KINDS: dict[int, str] = {}

#: PyTorch's number for the kernel that a CPU has (``SDPBackend.FLASH_ATTENTION``).
_FLASH = 1


def _on_cpu(tensor: torch.Tensor) -> bool:
    return KINDS.get(tensor.device.index, "cpu") == "cpu"


# Attention.


@functools.lru_cache(maxsize=1024)
def _choice(
    layouts: tuple[Any, ...], dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool
) -> int:
    def like(layout: Any) -> torch.Tensor | None:
        if layout is None:
            return None
        shape, stride, dtype, grad = layout
        return torch.empty_strided(shape, stride, dtype=dtype).requires_grad_(grad)

    query, key, value, mask = map(like, layouts)
    assert query is not None and key is not None and value is not None
    return torch._fused_sdp_choice(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """As a CPU chooses, by shapes alone; with a GPU by what every one can."""
    by_others = functools.partial(
        aten.scaled_dot_product_attention.default.decompose, scale=scale, enable_gqa=enable_gqa
    )
    if not _on_cpu(query):
        return by_others(query, key, value, attn_mask, dropout_p, is_causal)
    layouts = tuple(
        None if t is None else (tuple(t.shape), t.stride(), t.dtype, t.requires_grad and torch.is_grad_enabled())
        for t in (query, key, value, attn_mask)
    )
    if _choice(layouts, dropout_p, is_causal, scale, enable_gqa) != _FLASH:
        return by_others(query, key, value, attn_mask, dropout_p, is_causal)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    batched = query.dim() == 3
    if batched:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        while attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask.unsqueeze(0)
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    output = flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output.squeeze(0) if batched else output


# Recurrent networks.


def _onednn_lstm(
    input: torch.Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Layer by layer, as PyTorch does it on a CPU (aten/src/ATen/native/mkldnn/RNN.cpp)."""
    directions, each = 2 if bidirectional else 1, 4 if has_biases else 2
    steps = (input.transpose(0, 1) if batch_first else input).contiguous()
    hidden, cell = hx[0].contiguous(), hx[1].contiguous()
    hy, cy = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            weights = list(params[at * each : (at + 1) * each])
            if not has_biases:
                weights += [torch.zeros_like(weights[0]), torch.zeros_like(weights[1])]
            output, h, c, _ = aten.mkldnn_rnn_layer.default(
                steps, *weights, hidden[at], cell[at], direction > 0, [], 2, hidden.size(2), num_layers, has_biases,
                bidirectional, False, train,
            )  # fmt: skip
            outputs.append(output)
            hy.append(h)
            cy.append(c)
        steps = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            steps = torch.dropout(steps, dropout, True)
    output = steps.transpose(0, 1) if batch_first else steps
    return output, torch.stack(hy, 0), torch.stack(cy, 0)


def _lstm(input: torch.Tensor, hx: Any, params: Any, *rest: Any) -> Any:
    from torch._decomp.decompositions import lstm_impl

    if not _on_cpu(input):
        return aten.lstm.input.decompose(input, hx, params, *rest)
    projected = hx[0].size(2) != hx[1].size(2)
    narrow = input.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if torch._C._get_mkldnn_enabled() and narrow and input.numel() and not projected:
        return _onednn_lstm(input, hx, params, *rest)
    return lstm_impl(input, hx, params, *rest)


def _decomposed(op: torch._ops.OpOverload, name: str) -> Any:
    def run(*args: Any) -> Any:
        from torch._decomp import decompositions

        return getattr(decompositions, name)(*args) if _on_cpu(args[0]) else op.decompose(*args)

    return run


#: Those that autograd is to see made of others, by operator.
COMPOSITES = {
    "scaled_dot_product_attention": _attention,
    "lstm.input": _lstm,
    "lstm.data": _decomposed(aten.lstm.data, "lstm_data_impl"),
    "gru.input": _decomposed(aten.gru.input, "gru_impl"),
    "gru.data": _decomposed(aten.gru.data, "gru_impl_data"),
}
