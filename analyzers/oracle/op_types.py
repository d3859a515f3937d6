"""One name for what graphs and profilers call differently: ``aten.conv2d``, ``aten::_convolution``, ``Conv``.

torch calls an operator by what the user wrote, by what it decomposes into and by the library that runs it; a graph
holds one of these names. ONNX has names of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache


def names_in(text: str) -> frozenset[str]:
    """Return the names in a table that is written as words."""
    return frozenset(text.split())


def factors(groups: Mapping[float, str]) -> dict[str, float]:
    """Return the factor of each name in a table of factors and names."""
    return {name: factor for factor, text in groups.items() for name in text.split()}


_OVERLOADS = re.compile(r"\.(default|out|Tensor|Scalar|dim_IntList|int|input|self|dim|Tensor_Scalar)$")
_ATTENTION = re.compile(r"scaled_dot_product_\w*?attention\w*?(_backward)?$")
_SAME = {
    "convolution": (
        "conv1d conv2d conv3d conv cudnn_convolution mkldnn_convolution miopen_convolution thnn_conv2d slow_conv2d_forward "
        "convinteger qlinearconv convolution_overrideable mps_convolution cudnn_convolution_relu conv_depthwise2d"
    ),
    "convolution_backward": (
        "cudnn_convolution_backward mkldnn_convolution_backward miopen_convolution_backward thnn_conv2d_backward "
        "slow_conv2d_backward convolution_backward_overrideable mps_convolution_backward"
    ),
    "native_batch_norm": (
        "batch_norm batch_norm_impl_index cudnn_batch_norm miopen_batch_norm native_batch_norm_legit batchnormalization "
        "native_batch_norm_legit_no_training batch_norm_with_update native_batch_norm_legit_functional"
    ),
    "native_batch_norm_backward": (
        "batch_norm_impl_index_backward cudnn_batch_norm_backward miopen_batch_norm_backward batch_norm_backward"
    ),
    "native_layer_norm": "layer_norm layernormalization",
    "native_group_norm": "group_norm",
    "max_pool2d_with_indices": "max_pool2d maxpool mkldnn_max_pool2d",
    "max_pool3d_with_indices": "max_pool3d",
    "avg_pool2d": "averagepool",
    "adaptive_avg_pool2d": "globalaveragepool",
    "nll_loss_forward": "nll_loss nll_loss_nd",
    "recurrent": "cudnn_rnn mkldnn_rnn_layer miopen_rnn lstm gru rnn_tanh rnn_relu",
    "recurrent_backward": "cudnn_rnn_backward mkldnn_rnn_layer_backward miopen_rnn_backward",
    "nll_loss2d_forward": "nll_loss2d",
    "native_dropout": "dropout",
    "to_copy": "to",
    "addmm": "gemm",
    "softmax": "safe_softmax",
    "cat": "concat concatenate",
}
_CANONICAL = {name: canonical for canonical, names in _SAME.items() for name in names.split()}


@lru_cache(maxsize=4096)
def normal_type(op_type: str) -> str:
    """Return the canonical name of an op type, without aten's or ONNX's namespace, overload and in-place mark.

    >>> [normal_type(name) for name in ("aten.convolution.default", "aten::_convolution", "aten.conv2d", "onnx.Conv")]
    ['convolution', 'convolution', 'convolution', 'convolution']
    >>> normal_type("aten::relu_"), normal_type("fbgemm::bounds_check_indices")
    ('relu', 'fbgemm.bounds_check_indices')
    """
    name = op_type.strip().replace("::", ".").removeprefix("onnx.")
    if name.startswith("aten."):
        name = _OVERLOADS.sub("", name.removeprefix("aten."))
    elif "." in name:
        return _OVERLOADS.sub("", name)
    name = name.strip("_").lower()
    attention = _ATTENTION.match(name)
    if attention:
        return f"scaled_dot_product_attention{attention[1] or ''}"
    return _CANONICAL.get(name, name)
