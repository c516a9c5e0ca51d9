# SPDX-License-Identifier: MIT OR Apache-2.0
"""The operators that only the server implements, not PyTorch (remote/server/_server.py)."""

from __future__ import annotations

import torch

from ... import _native
from ._kernel import kernel

_LIBRARY = torch.library.Library("tensorstream", "DEF")
_LIBRARY.define("manual_seed(Tensor anchor, int seed) -> ()")
_LIBRARY.define("rng_state(Tensor anchor) -> Tensor")
_LIBRARY.define("set_rng_state(Tensor anchor, Tensor state) -> ()")
_LIBRARY.define("give_generator(Tensor anchor, Tensor state) -> ()")
_LIBRARY.define("given_generator(Tensor anchor) -> Tensor")
_LIBRARY.define("kind(Tensor anchor) -> str")
_LIBRARY.define("devices(Tensor anchor) -> int")
_LIBRARY.define("gpu_name(Tensor anchor) -> str")
_LIBRARY.define("gpu_bytes(Tensor anchor) -> int")
_LIBRARY.define("empty_cache(Tensor anchor) -> ()")
_LIBRARY.define("clock(Tensor anchor) -> Tensor")
_LIBRARY.define("offer(Tensor tensor, str ticket, str to) -> ()")
_LIBRARY.define("withdraw(Tensor anchor, str ticket) -> ()")
_LIBRARY.define("claim(Tensor(a!) into, str ticket) -> ()")
_LIBRARY.define("deposit(Tensor tensor, str ticket) -> str")
_LIBRARY.define(
    "fetch(Tensor(a!) into, str address, str ticket, ScalarType dtype, bool is_sent) -> (str, bool)"
)
_LIBRARY.define(
    "take(Tensor(a!) into, str address, str ticket, ScalarType dtype, bool is_sent) -> ()"
)
_LIBRARY.define("connect(Tensor anchor, str address, str options) -> str")
_LIBRARY.define("send(Tensor tensor, int number, str options) -> str")
_LIBRARY.define("disconnect(Tensor anchor, int number, str? reason) -> str")
_LIBRARY.define("open_checkpoint(Tensor anchor, str source, bool lenient) -> str")
_LIBRARY.define(
    "load_tensors(Tensor anchor, int number, str[] names, bool verify) -> (Tensor[], str)"
)
_LIBRARY.define("close_checkpoint(Tensor anchor, int number) -> ()")
_LIBRARY.define("read_text(Tensor anchor, str source, str beside) -> str")
_LIBRARY.define("directories(Tensor anchor, str source) -> str")
_LIBRARY.define(
    "run_function(Tensor anchor, str function, str arguments, Tensor(a!)[] tensors) "
    "-> (Tensor[], str)"
)
# `aten::mkldnn_rnn_layer` with the kernels that PyTorch chooses while it records no gradients.
_LIBRARY.define(
    "lstm_inference(Tensor input, Tensor[] weights, Tensor hx, Tensor cx, bool reverse, "
    "int num_layers, bool has_biases, bool bidirectional, bool train) -> (Tensor, Tensor, Tensor)"
)
# A layer of ``nn.TransformerEncoder`` on padded sequences.
_LIBRARY.define(
    "nested_encoder_layer(Tensor input, Tensor keep, Tensor[] weights, int num_heads, "
    "bool use_gelu, bool norm_first, float eps) -> Tensor"
)


def _lstm_inference_meta(
    input: torch.Tensor, weights: object, hx: torch.Tensor, cx: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    output = input.new_empty((*input.shape[:2], hx.shape[-1]))
    return output, torch.empty_like(hx), torch.empty_like(cx)


_LIBRARY.impl("lstm_inference", _lstm_inference_meta, "Meta")
_LIBRARY.impl("close_checkpoint", lambda anchor, number: None, "Meta")
_LIBRARY.impl("offer", lambda tensor, ticket, to: None, "Meta")
_LIBRARY.impl("withdraw", lambda anchor, ticket: None, "Meta")
_LIBRARY.impl("claim", lambda into, ticket: None, "Meta")
_LIBRARY.impl("take", lambda into, address, ticket, dtype, is_sent: None, "Meta")
_LIBRARY.impl("manual_seed", lambda anchor, seed: None, "Meta")
_LIBRARY.impl("empty_cache", lambda anchor: None, "Meta")
_LIBRARY.impl("clock", lambda anchor: anchor.new_empty((), dtype=torch.int64), "Meta")
_LIBRARY.impl("set_rng_state", lambda anchor, state: None, "Meta")
_LIBRARY.impl("give_generator", lambda anchor, state: None, "Meta")
_LIBRARY.impl("nested_encoder_layer", lambda x, *_: torch.empty_like(x), "Meta")
for _name in ("lstm_inference", "nested_encoder_layer"):
    _LIBRARY.impl(_name, kernel(getattr(torch.ops.tensorstream, _name).default), "PrivateUse1")
KIND = kernel(torch.ops.tensorstream.kind.default)
DEVICES = kernel(torch.ops.tensorstream.devices.default)
GPU_NAME = kernel(torch.ops.tensorstream.gpu_name.default)
GPU_BYTES = kernel(torch.ops.tensorstream.gpu_bytes.default)
EMPTY_CACHE = kernel(torch.ops.tensorstream.empty_cache.default)
CLOCK = kernel(torch.ops.tensorstream.clock.default)
CLAIM = kernel(torch.ops.tensorstream.claim.default)
OPEN_CHECKPOINT = kernel(torch.ops.tensorstream.open_checkpoint.default)
LOAD_TENSORS = kernel(torch.ops.tensorstream.load_tensors.default)
CLOSE_CHECKPOINT = kernel(torch.ops.tensorstream.close_checkpoint.default)
READ_TEXT = kernel(torch.ops.tensorstream.read_text.default)
RUN_FUNCTION = kernel(torch.ops.tensorstream.run_function.default)
DIRECTORIES = kernel(torch.ops.tensorstream.directories.default)
OFFER = kernel(torch.ops.tensorstream.offer.default)
WITHDRAW = kernel(torch.ops.tensorstream.withdraw.default)
FETCH = kernel(torch.ops.tensorstream.fetch.default)
TAKE = kernel(torch.ops.tensorstream.take.default)
CONNECT = kernel(torch.ops.tensorstream.connect.default)
SEND = kernel(torch.ops.tensorstream.send.default)
DISCONNECT = kernel(torch.ops.tensorstream.disconnect.default)
SEED = kernel(torch.ops.tensorstream.manual_seed.default)
RNG_STATE = kernel(torch.ops.tensorstream.rng_state.default)
SET_RNG_STATE = kernel(torch.ops.tensorstream.set_rng_state.default)
SEND_GENERATOR = kernel(torch.ops.tensorstream.give_generator.default)
RECEIVE_GENERATOR = kernel(torch.ops.tensorstream.given_generator.default)


def anchor(index: int) -> torch.Tensor:
    """Returns an empty tensor on a device, for operators without other tensor arguments."""
    return _native.remote_empty(index, [0], [1], torch.uint8, own=True)
