# SPDX-License-Identifier: MIT OR Apache-2.0
"""Creates the kernels that send an operator to the machine."""

from __future__ import annotations

import torch

from ... import _native
from ._schema import returns, tensor_positions

#: Operators that accept tensors of indices on the host.
_ACCEPTS_HOST_INDICES = {
    f"aten::{name}"
    for name in (
        "index.Tensor", "index.Tensor_out", "_unsafe_index.Tensor", "index_put", "index_put_",
        "_index_put_impl_",
        "_unsafe_index_put",
    )
}  # fmt: skip

#: Operators whose results have other shapes or strides on a CPU than on meta tensors. These depend
#: only on the signature of the call, so the machine reports them once for each signature.
_SHAPES_FROM_MACHINE = {
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
    "_batch_norm_with_update", "_batch_norm_no_update", "_embedding_bag",
    "_embedding_bag_forward_only",
    "mkldnn_rnn_layer", "multilabel_margin_loss_forward", "native_layer_norm",
    "native_layer_norm_backward",
    "native_batch_norm_backward", "batch_norm_backward",
    "_fft_r2c", "_fft_c2r", "_linalg_svd", "linalg_eig", "nonzero_static",
}  # fmt: skip

#: The same for operators whose results have other strides only if an argument is not contiguous,
#: such as one in channels_last. Some of these names have an overload.
_STRIDES_FROM_MACHINE = {
    "convolution", "_convolution", "convolution_backward", "channel_shuffle", "pixel_shuffle",
    "pixel_unshuffle", "max_unpool2d", "max_unpool3d", "native_dropout_backward",
    *(
        f"{pad}_pad{n}d{suffix}"
        for pad in ("reflection", "replication")
        for n in (1, 2, 3)
        for suffix in ("", "_backward")
    ),
    "_log_softmax_backward_data", "_softmax_backward_data", "log_sigmoid_forward",
    "huber_loss_backward", "mse_loss_backward", "smooth_l1_loss_backward",
    "hardswish_backward", "hardtanh_backward", "logit_backward",
    "abs", "complex", "copysign", "div.Tensor_mode", "floor_divide", "heaviside", "isinf", "ldexp",
    "logaddexp", "logaddexp2", "logical_and", "logical_or", "logical_xor", "normal", "polar",
    "pow.Scalar", "xlogy",
}  # fmt: skip


def kernel(op: torch._ops.OpOverload) -> _native.RemoteKernel:
    """Returns a kernel that sends an operator to the machine."""
    name = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    kinds = [str(argument.type) for argument in op._schema.arguments]
    # Without tensors, the shapes of the results depend on the values of the arguments.
    by_value = not any("Tensor" in kind for kind in kinds)
    names = {op._schema.name.removeprefix("aten::"), name.removeprefix("aten::")}
    from_machine = not names.isdisjoint(_SHAPES_FROM_MACHINE)
    # Outputs that the caller passes are resized on this computer.
    strides_from_machine = not names.isdisjoint(_STRIDES_FROM_MACHINE) and not op._schema.is_mutable
    # Some operators in `_SHAPES_FROM_MACHINE` write to arguments that their schemas do not mark.
    writes = from_machine or op._schema.is_mutable
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only]
    generator = positional.index("generator") if "generator" in positional else None
    return _native.RemoteKernel(
        name,
        op,
        by_value,
        name in _ACCEPTS_HOST_INDICES,
        from_machine,
        strides_from_machine,
        writes,
        generator,
        tensor_positions(op),
        returns(op),
    )
