# SPDX-License-Identifier: MIT OR Apache-2.0
"""Decomposes recurrent networks as PyTorch does on a CPU.

The functions call the same operators as aten/src/ATen/native/RNN.cpp and mkldnn/RNN.cpp, in the
same order, and write in place where that code does. So results and gradients are bit-identical. On
other devices, PyTorch multiplies the input of each step separately, and uses fused kernels for the
cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


class Weights(NamedTuple):
    """The weights of one direction of one layer."""

    ih: Tensor
    hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    hr: Tensor | None

    def of_input(self, x: Tensor) -> Tensor:
        return aten.linear(x, self.ih, self.b_ih)

    def of_hidden(self, h: Tensor) -> Tensor:
        return aten.linear(h, self.hh, self.b_hh)


#: The state after a step: a tensor, or a pair of tensors for an LSTM.
State = Any
#: A function that computes the state after a step. Its arguments are the input, the state before
#: the step, the weights, and whether the input was already multiplied by its weights.
Cell = Callable[[Tensor, State, Weights, bool], State]


def _simple(activate: Callable[[Tensor], Tensor]) -> Cell:
    def cell(x: Tensor, h: Tensor, w: Weights, multiplied: bool) -> Tensor:
        return activate(aten.add_(w.of_hidden(h), x if multiplied else w.of_input(x)))

    return cell


def _gru(x: Tensor, h: Tensor, w: Weights, multiplied: bool) -> Tensor:
    of_x = aten.unsafe_chunk(x if multiplied else w.of_input(x), 3, 1)
    of_h = aten.unsafe_chunk(w.of_hidden(h), 3, 1)
    reset = of_h[0].add_(of_x[0]).sigmoid_()
    update = of_h[1].add_(of_x[1]).sigmoid_()
    new = of_x[2].add(of_h[2].mul_(reset)).tanh_()
    return (h - new).mul_(update).add_(new)


def _lstm(x: Tensor, state: State, w: Weights, multiplied: bool) -> State:
    h, c = state
    gates = aten.add_(w.of_hidden(h), x if multiplied else w.of_input(x))
    i, f, g, o = aten.unsafe_chunk(gates, 4, 1)
    i, f, g, o = i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
    c = (f * c).add_(i * g)
    h = o * c.tanh()
    return h if w.hr is None else aten.matmul(h, w.hr.t()), c


def _output(state: State) -> Tensor:
    return state[0] if isinstance(state, tuple) else state


def _map(state: State, run: Callable[[Tensor], Tensor]) -> State:
    return tuple(map(run, state)) if isinstance(state, tuple) else run(state)


def _concatenate(states: Sequence[State]) -> State:
    if isinstance(states[0], tuple):
        return tuple(aten.cat(list(parts), 0) for parts in zip(*states, strict=True))
    return aten.cat(list(states), 0)


def _narrow(state: State, start: int, end: int) -> State:
    return _map(state, lambda t: t.narrow(0, start, end - start))


def _steps(
    cell: Cell, steps: Sequence[Tensor], state: State, w: Weights
) -> tuple[list[Tensor], State]:
    outputs = []
    for step in steps:
        state = cell(step, state, w, True)
        outputs.append(_output(state))
    return outputs, state


def _layer(
    cell: Cell, x: Tensor, states: Sequence[State], weights: Sequence[Weights]
) -> tuple[Tensor, list[State]]:
    """Runs all directions of a layer. The first dimension of the input is time."""
    outputs, ends = [], []
    for direction, (state, w) in enumerate(zip(states, weights, strict=True)):
        steps = aten.unbind(w.of_input(x), 0)
        results, end = _steps(cell, steps[::-1] if direction else steps, state, w)
        outputs.append(aten.stack(results[::-1] if direction else results, 0))
        ends.append(end)
    return outputs[0] if len(outputs) == 1 else aten.cat(outputs, outputs[0].dim() - 1), ends


def _packed_forward(
    cell: Cell, x: Tensor, sizes: list[int], state: State, w: Weights
) -> tuple[Tensor, State]:
    """Runs a packed sequence forward. When the batch shrinks, the dropped sequences have ended."""
    x, start, last, outputs, ended = w.of_input(x), 0, sizes[0], [], []
    for size in sizes:
        step, start = x.narrow(0, start, size), start + size
        if size < last:
            ended.append(_narrow(state, size, last))
            state = _narrow(state, 0, size)
        last = size
        state = cell(step, state, w, True)
        outputs.append(_output(state))
    return aten.cat(outputs, 0), _concatenate([state, *reversed(ended)])


def _packed_reverse(
    cell: Cell, x: Tensor, sizes: list[int], first: State, w: Weights
) -> tuple[Tensor, State]:
    """Runs a packed sequence in reverse. When the batch grows, further sequences begin."""
    x, start, last, outputs = w.of_input(x), x.size(0), sizes[-1], []
    state = _narrow(first, 0, last)
    for size in reversed(sizes):
        if size > last:
            state = _concatenate([state, _narrow(first, last, size)])
        start -= size
        last = size
        state = cell(x.narrow(0, start, size), state, w, True)
        outputs.append(_output(state))
    return aten.cat(outputs[::-1], 0), state


def _packed(sizes: list[int]) -> Callable[..., tuple[Tensor, list[State]]]:
    def layer(cell: Cell, x: Tensor, states: Sequence[State], weights: Sequence[Weights]) -> Any:
        runs = (_packed_forward, _packed_reverse)
        results = [
            run(cell, x, sizes, s, w) for run, s, w in zip(runs, states, weights, strict=False)
        ]
        outputs, ends = [output for output, _ in results], [end for _, end in results]
        return outputs[0] if len(outputs) == 1 else aten.cat(outputs, -1), ends

    return layer


def _weights(params: Sequence[Tensor], has_biases: bool, projects: bool) -> list[Weights]:
    count = 2 + 2 * has_biases + projects
    groups = [params[start : start + count] for start in range(0, len(params), count)]

    def weights(w: Sequence[Tensor]) -> Weights:
        b_ih, b_hh = (w[2], w[3]) if has_biases else (None, None)
        return Weights(w[0], w[1], b_ih, b_hh, w[count - 1] if projects else None)

    return [weights(w) for w in groups]


def _stack(
    layer: Callable[..., Any], cell: Cell, x: Tensor, states: Sequence[State],
    weights: Sequence[Weights],
    num_layers: int, dropout: float, train: bool, bidirectional: bool,
) -> tuple[Tensor, list[State]]:  # fmt: skip
    directions, ends = 1 + bidirectional, []
    for index in range(num_layers):
        part = slice(index * directions, (index + 1) * directions)
        x, end = layer(cell, x, states[part], weights[part])
        ends += end
        if dropout and train and index < num_layers - 1:
            x = aten.dropout(x, dropout, True)
    return x, ends


def _network(cell: Cell) -> Callable[..., Any]:
    """Returns an operator over sequences of one length, for cells with one state tensor."""

    def run(
        input: Tensor, hx: Tensor, params: Any, has_biases: bool, num_layers: int, dropout: float,
        train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = input.transpose(0, 1) if batch_first else input
        weights = _weights(params, has_biases, False)
        output, ends = _stack(
            _layer, cell, x, hx.unbind(0), weights, num_layers, dropout, train, bidirectional
        )
        return output.transpose(0, 1) if batch_first else output, aten.stack(ends, 0)

    return run


def _packed_network(cell: Cell) -> Callable[..., Any]:
    """Returns an operator over packed sequences, for cells with one state tensor."""

    def run(
        data: Tensor, batch_sizes: Tensor, hx: Tensor, params: Any, has_biases: bool,
        num_layers: int, dropout: float,
        train: bool, bidirectional: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        layer = _packed(batch_sizes.tolist())
        weights = _weights(params, has_biases, False)
        output, ends = _stack(
            layer, cell, data, hx.unbind(0), weights, num_layers, dropout, train, bidirectional
        )
        return output, aten.stack(ends, 0)

    return run


def lstm(
    input: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float,
    train: bool,
    bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Implements ``aten::lstm.input``."""
    projects = hx[0].size(2) != hx[1].size(2)
    if _has_onednn(input.dtype) and input.numel() and not projects:
        return _onednn_lstm(
            input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
    x = input.transpose(0, 1) if batch_first else input
    states = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
    weights = _weights(params, has_biases, projects)
    output, ends = _stack(
        _layer, _lstm, x, states, weights, num_layers, dropout, train, bidirectional
    )
    h, c = zip(*ends, strict=True)
    return (
        output.transpose(0, 1) if batch_first else output,
        aten.stack(list(h), 0),
        aten.stack(list(c), 0),
    )


def packed_lstm(
    data: Tensor, batch_sizes: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int,
    dropout: float,
    train: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Implements ``aten::lstm.data``."""
    projects = hx[0].size(2) != hx[1].size(2)
    states = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
    layer, weights = _packed(batch_sizes.tolist()), _weights(params, has_biases, projects)
    output, ends = _stack(
        layer, _lstm, data, states, weights, num_layers, dropout, train, bidirectional
    )
    h, c = zip(*ends, strict=True)
    return output, aten.stack(list(h), 0), aten.stack(list(c), 0)


def _has_onednn(dtype: torch.dtype) -> bool:
    """Returns whether PyTorch uses the LSTM of oneDNN for a dtype on a CPU like this one."""
    if not torch._C._get_mkldnn_enabled():
        return False
    if dtype == torch.float16:
        # oneDNN has no kernels for training in this dtype.
        supported = torch.ops.mkldnn._is_mkldnn_fp16_supported()
        return bool(supported) and not torch.is_grad_enabled()
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _onednn_lstm(
    input: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float,
    train: bool,
    bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Runs an LSTM with oneDNN, one layer at a time."""
    directions, count = 2 if bidirectional else 1, 4 if has_biases else 2
    steps = (input.transpose(0, 1) if batch_first else input).contiguous()
    hidden, cell = hx[0].contiguous(), hx[1].contiguous()
    hy, cy = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = list(params[index * count : (index + 1) * count])
            if not has_biases:
                weights += [torch.zeros_like(weights[0]), torch.zeros_like(weights[1])]
            states = hidden[index], cell[index], direction > 0
            if torch.is_grad_enabled():
                output, h, c, _ = aten.mkldnn_rnn_layer.default(
                    steps, *weights, *states, [], 2, hidden.size(2), num_layers, has_biases,
                    bidirectional, False, train,
                )  # fmt: skip
            else:
                output, h, c = torch.ops.tensorstream.lstm_inference.default(
                    steps, weights, *states, num_layers, has_biases, bidirectional, train
                )
            outputs.append(output)
            hy.append(h)
            cy.append(c)
        steps = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            steps = torch.dropout(steps, dropout, True)
    output = steps.transpose(0, 1) if batch_first else steps
    return output, torch.stack(hy, 0), torch.stack(cy, 0)


def _one_step(cell: Cell) -> Callable[..., Any]:
    """Returns an operator that runs one step of a cell."""

    def run(
        input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> Any:
        state = tuple(hx) if isinstance(hx, (list, tuple)) else hx
        return cell(input, state, Weights(w_ih, w_hh, b_ih, b_hh, None), False)

    return run


#: The decompositions, by operator.
RECURRENT: dict[str, Callable[..., Any]] = {
    "lstm.input": lstm,
    "lstm.data": packed_lstm,
    "lstm_cell": _one_step(_lstm),
    "gru.input": _network(_gru),
    "gru.data": _packed_network(_gru),
    "gru_cell": _one_step(_gru),
    "rnn_tanh.input": _network(_simple(aten.tanh)),
    "rnn_tanh.data": _packed_network(_simple(aten.tanh)),
    "rnn_tanh_cell": _one_step(_simple(aten.tanh)),
    "rnn_relu.input": _network(_simple(aten.relu)),
    "rnn_relu.data": _packed_network(_simple(aten.relu)),
    "rnn_relu_cell": _one_step(_simple(aten.relu)),
}
