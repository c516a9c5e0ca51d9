# SPDX-License-Identifier: MIT OR Apache-2.0
"""Implements ``torch.autocast("ts")`` with the lists of operators that PyTorch uses for CUDA.

The lists are in ATen/autocast_mode.h.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

#: Operators that run in the dtype of the autocast region.
_LOWER = """_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear
addbmm baddbmm bmm chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
scaled_dot_product_attention"""

#: Operators that run in float32.
_FP32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm
group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
upsample_trilinear3d upsample_bicubic2d norm.Scalar norm.ScalarOpt_dim"""

#: Operators whose result is float32 for arguments of half precision, unless the caller chooses a
#: dtype.
_FP32_SUMS = """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList"""

#: Operators that run in float32 if one of their arguments is float32.
_WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
)

#: The message of PyTorch for binary_cross_entropy, whose backward overflows in half precision.
_UNSAFE = """torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.
Many models use a sigmoid layer right before the binary cross entropy layer.
In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits
or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are
safe to autocast."""

_AUTOCAST = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))
_HALF_DTYPES = (torch.float16, torch.bfloat16)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        eligible = (
            value.is_floating_point() and value.dtype != torch.float64 and value.device.type == "ts"
        )
        return value.to(dtype) if eligible else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _tensors(values: Any) -> list[torch.Tensor]:
    tensors = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors.extend(_tensors(value))
    return tensors


def _run(op: torch._ops.OpOverload, dtype: torch.dtype, args: Any, kwargs: dict[str, Any]) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return op(
            *(_cast(value, dtype) for value in args),
            **{name: _cast(v, dtype) for name, v in kwargs.items()},
        )


def _lower(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    return _run(op, torch.get_autocast_dtype("ts"), args, kwargs)


def _fp32(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    return _run(op, torch.float32, args, kwargs)


def _fp32_sum(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    if args[0].dtype in _HALF_DTYPES and kwargs.get("dtype") is None:
        names = [argument.name for argument in op._schema.arguments]
        position = names.index("dtype")
        if len(args) > position:
            dtype = args[position] or torch.float32
            args = (*args[:position], dtype, *args[position + 1 :])
        else:
            kwargs = {**kwargs, "dtype": torch.float32}
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return op(*args, **kwargs)


def _widest(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    dtypes = {
        tensor.dtype for tensor in _tensors((*args, *kwargs.values())) if tensor.is_floating_point()
    }
    widest = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("ts")
    return _run(op, widest, args, kwargs)


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError(_UNSAFE)


def register(library: torch.library.Library) -> None:
    """Registers the autocast kernels of all listed operators."""
    policies: list[tuple[str, Callable[..., Any]]] = [
        (_LOWER, _lower), (_FP32, _fp32), (_FP32_SUMS, _fp32_sum), (_WIDEST, _widest)
    ]  # fmt: skip
    for names, policy in policies:
        for name in names.split():
            base, _, overload = name.partition(".")
            op = getattr(getattr(aten, base), overload or "default")
            library.impl(name, functools.partial(policy, op), "AutocastPrivateUse1")
    library.impl("binary_cross_entropy", _refuse, "AutocastPrivateUse1")
