"""What is known of the determinism of aten ops on CUDA devices: data for :mod:`.determinism`.

Sources: the documentation of ``torch.use_deterministic_algorithms`` in torch 2.13, entry by entry (``LISTED``); the tags
``nondeterministic_seeded``, ``pointwise`` and ``reduction`` of its op overloads; cuBLAS and cuDNN's notes on results
reproducibility; EasyScale (Li et al., SC 2023), sections 3.3 and 5.1.3, for what one device type has and another lacks.
``tests/test_determinism.py`` holds the tables against the torch that is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TORCH_VERSION = "2.13"
Level = Literal["none", "unknown", "D1", "D2"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelClass:
    """Ops whose kernels are alike in what their bits depend on.

    Attributes:
        name: for tables and JSON.
        level: the highest level that a model with such an op can have: ``none`` where the bits differ from run to run
            on one device, ``D1`` where they are the same on devices of one type only, ``D2`` where they can be the same
            on any. No op stops at D0: what it lacks for D1 is not in the op but in who runs it.
        reason: what the bits depend on; empty where on the inputs alone.
        setting: what has to be set or done for that level; empty: nothing.
    """

    name: str
    level: Level
    reason: str = ""
    setting: str = ""


ALGORITHMS = "torch.use_deterministic_algorithms(True)"
CLASSES: Mapping[str, KernelClass] = {
    entry.name: entry
    for entry in (
        KernelClass(name="exact", level="D2"),
        KernelClass(
            name="convolution",
            level="D1",
            reason="cuDNN picks a kernel per device type and shape",
            setting=f"{ALGORITHMS}; torch.backends.cudnn.benchmark = False",
        ),
        KernelClass(
            name="patches",
            level="D2",
            reason="cuDNN picks the kernel, but windows that do not overlap make it a matrix product",
            setting="for D2 write it as unfold and Linear",
        ),
        KernelClass(
            name="recurrent",
            level="D1",
            reason="cuDNN's fused kernels differ between device types",
            setting="CUBLAS_WORKSPACE_CONFIG=:4096:8",
        ),
        KernelClass(
            name="vendor",
            level="D1",
            reason="cuFFT, cuSOLVER or MAGMA: equal bits on one device type only",
            setting=ALGORITHMS,
        ),
        KernelClass(
            name="gemm",
            level="D2",
            reason="cuBLAS picks a kernel by device type and number of SMs",
            setting="CUBLAS_WORKSPACE_CONFIG=:4096:8; for D2 a fixed algorithm id (not on Ampere or newer)",
        ),
        KernelClass(
            name="attention",
            level="D2",
            reason="fused attention has kernels of its own per device type",
            setting=f"{ALGORITHMS}; for D2 sdpa_kernel(SDPBackend.MATH): GEMM and softmax",
        ),
        KernelClass(
            name="reduction",
            level="D2",
            reason="partial sums follow the number of SMs and threads",
            setting="for D2 a fixed number of blocks and threads",
        ),
        KernelClass(
            name="random",
            level="D2",
            reason="draws from a generator, spread over threads by the number of SMs",
            setting="seed it; a stream per logical worker (D1); for D2 a fixed number of blocks and threads",
        ),
        KernelClass(
            name="atomics",
            level="D2",
            reason="adds with atomics, in any order, unless told not to",
            setting=ALGORITHMS,
        ),
        KernelClass(
            name="atomics only",
            level="none",
            reason="adds with atomics, in any order; torch has no other kernel",
            setting="another op (deterministic algorithms refuse this one on CUDA)",
        ),
        KernelClass(
            name="data-dependent",
            level="D2",
            reason="shape or control flow follows the data",
            setting="equal inputs: holds when all before it has equal bits",
        ),
        KernelClass(
            name="unknown",
            level="unknown",
            reason="not in the tables of known kernels",
            setting="look at its kernel: atomics? a choice by device type?",
        ),
    )
}

# The documentation's entries that name a kernel, as aten ops: what "will act deterministically" (with ALGORITHMS) and
# what "will throw a RuntimeError". Directions and cases in which torch's CUDA kernel does not alert are left out:
# `gather`, `index_select` and `repeat_interleave` draw their backward's `scatter_add`, `index_add`, which stand here.
LISTED: Mapping[str, tuple[str, ...]] = {
    "convolution": ("convolution", "convolution_backward", "conv2d", "_convolution", "cudnn_convolution"),
    "atomics": (
        *("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward"),
        *("index_put", "_unsafe_index_put", "_index_put_impl", "scatter_add", "index_add", "index_copy", "scatter"),
        *("scatter_reduce", "max_pool3d_with_indices_backward"),
    ),
    "atomics only": (
        *("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
        *("adaptive_max_pool2d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward"),
        *("max_unpool2d", "max_unpool3d", "upsample_linear1d_backward", "upsample_bilinear2d_backward"),
        *("upsample_bicubic2d_backward", "upsample_trilinear3d_backward", "reflection_pad1d_backward"),
        *("reflection_pad2d_backward", "reflection_pad3d_backward", "nll_loss2d_forward", "_ctc_loss_backward"),
        *("_embedding_bag_backward", "put", "histc", "grid_sampler_2d_backward", "grid_sampler_3d_backward"),
        *("cumsum", "bincount", "median"),
    ),
}
# Of "atomics only": deterministic after all when no argument is a floating-point tensor.
FLOATING_ONLY = frozenset(["cumsum", "bincount"])

_ATTENTION = """
_efficient_attention_forward _flash_attention_forward _scaled_dot_product_cudnn_attention
_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention
_scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable
_flash_attention_forward_no_dropout_inplace _scaled_dot_product_attention_math_for_mps
_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward
_scaled_dot_product_fused_attention_overrideable_backward _flash_attention_backward _efficient_attention_backward
_native_multi_head_attention _transformer_encoder_layer_fwd scaled_dot_product_attention _fused_sdp_choice
_scaled_dot_product_attention_math _cudnn_attention_forward _cudnn_attention_backward _triton_scaled_dot_attention
"""
_RECURRENT = """
_cudnn_rnn _cudnn_rnn_backward gru lstm miopen_rnn miopen_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward
rnn_relu rnn_tanh _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell quantized_gru
quantized_lstm _lstm_mps
"""
_RANDOM = """
_fused_dropout _standard_gamma alpha_dropout bernoulli cauchy dropout exponential geometric log_normal multinomial
native_dropout normal poisson rand rand_like randint randint_like randn randn_like randperm rrelu_with_noise
rrelu rrelu_with_noise_functional uniform random normal_functional _cudnn_init_dropout_state binomial feature_dropout
feature_alpha_dropout _fill_mem_eff_dropout_mask _sample_dirichlet _nested_tensor_softmax_with_shape
"""
_GEMM = """
mm bmm addmm addbmm baddbmm addmv mv dot vdot matmul linear linear_backward _addmm_activation _int_mm _scaled_mm
_scaled_mm_v2 _grouped_mm _scaled_grouped_mm _foreach_mm _weight_int8pack_mm _trilinear einsum
"""
_VENDOR = """
_fft_c2c _fft_c2r _fft_r2c stft istft _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex
_linalg_svd linalg_cholesky_ex linalg_eig linalg_eigvals linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex
linalg_ldl_solve linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_qr linalg_solve_triangular linalg_matrix_exp svd
cholesky cholesky_inverse cholesky_solve _cholesky_solve_helper triangular_solve ormqr _cslt_sparse_mm _cudnn_ctc_loss
"""
_REDUCTION = """
all amax amin aminmax any argmax argmin count_nonzero linalg_vector_norm logsumexp mean nansum norm prod std std_mean
sum var var_mean max min trace _foreach_norm _softmax _softmax_backward_data _safe_softmax _log_softmax
_log_softmax_backward_data _masked_softmax native_batch_norm native_batch_norm_backward _native_batch_norm_legit
_native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_with_update
_batch_norm_with_update_functional _batch_norm_no_update batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward
native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward _fused_rms_norm
_fused_rms_norm_backward nll_loss_forward nll_loss_backward nll_loss2d_backward mse_loss smooth_l1_loss huber_loss
binary_cross_entropy _ctc_loss embedding_dense_backward _weight_norm_interface _weight_norm_interface_backward cumprod
logcumsumexp renorm _cdist_forward _cdist_backward _pdist_forward _pdist_backward _euclidean_dist segment_reduce
_segment_reduce_backward avg_pool2d avg_pool2d_backward avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
_embedding_bag _embedding_bag_forward_only _embedding_bag_dense_backward
_embedding_bag_per_sample_weights_backward multi_margin_loss multilabel_margin_loss_forward soft_margin_loss
equal linalg__powsum _foreach_powsum _foreach_max _aminmax _masked_softmax_backward
"""
_DATA_DEPENDENT = """
_local_scalar_dense _unique _unique2 item masked_select nonzero nonzero_numpy nonzero_static one_hot repeat_interleave
unique_consecutive unique_dim
"""
_EXACT = """
__and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__ abs acos acosh add
addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip clone conj_physical copysign cos cosh deg2rad
digamma div elu eq erf erfc erfinv exp exp2 expm1 float_power floor fmax fmin fmod frac frexp gcd ge gelu gelu_backward
gt hardshrink hardsigmoid hardtanh heaviside hypot i0 igamma igammac isfinite isinf isnan isneginf isposinf lcm ldexp le
leaky_relu lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
logit_backward lt masked_fill maximum minimum mish mul mvlgamma nan_to_num native_dropout_backward ne neg nextafter
polygamma positive pow rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sigmoid_backward sign
signbit silu silu_backward sin sinc sinh softplus softshrink special_airy_ai special_bessel_j0 special_bessel_j1
special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr special_erfcx special_hermite_polynomial_h
special_hermite_polynomial_he special_i0e special_i1 special_i1e special_laguerre_polynomial_l
special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0
special_xlog1py special_zeta sqrt square sub tan tanh tanh_backward threshold threshold_backward true_divide trunc where
xlogy
_nested_view_from_buffer _reshape_alias alias as_strided conj copy detach diagonal expand imag lift_fresh narrow permute
pin_memory real reshape select slice split split_with_sizes squeeze t tensor_split to transpose unbind unfold unsqueeze
view view_as_complex view_as_real
_to_copy _unsafe_view _reshape_copy lift lift_fresh_copy alias_copy arange linspace logspace eye empty empty_like
empty_strided empty_permuted new_empty new_empty_strided new_full new_ones new_zeros ones ones_like zeros zeros_like
zero fill full full_like scalar_tensor cat stack block_diag meshgrid constant_pad_nd flip roll rot90 repeat tril triu
tril_indices triu_indices diag diag_embed diagonal_backward diagonal_scatter select_backward select_scatter
slice_backward slice_scatter as_strided_scatter unfold_backward im2col col2im index index_select _unsafe_index take
gather embedding index_fill masked_scatter masked_scatter_backward sort topk kthvalue mode searchsorted bucketize
isin cummax cummin max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices adaptive_max_pool2d
adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d reflection_pad1d reflection_pad2d reflection_pad3d
replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward upsample_linear1d
upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d grid_sampler_2d grid_sampler_3d pixel_shuffle
pixel_unshuffle channel_shuffle glu glu_backward elu_backward hardsigmoid_backward hardswish hardswish_backward
hardtanh_backward leaky_relu_backward log_sigmoid_forward log_sigmoid_backward mish_backward softplus_backward
mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward _prelu_kernel
_prelu_kernel_backward prelu rrelu_with_noise_backward soft_margin_loss_backward complex polar floor_divide
special_ndtr broadcast_tensors contiguous size sym_size sym_numel sym_stride _assert_tensor_metadata _assert_async
_assert_scalar resolve_conj resolve_neg addr linalg_cross _masked_scale hann_window one_minus resize set
_conj_physical _fused_adam _fused_adamw _fused_sgd _fused_adagrad _amp_foreach_non_finite_check_and_unscale
affine_grid_generator unsafe_split unsafe_split_with_sizes unsafe_chunk chunk
"""
# ONNX files hold a forward graph; what training adds to it is not seen.
_ONNX: Mapping[str, str] = {
    "convolution": "Conv ConvTranspose ConvInteger QLinearConv DeformConv",
    "recurrent": "LSTM GRU RNN",
    "gemm": "MatMul Gemm MatMulInteger QLinearMatMul Einsum",
    "attention": "Attention MultiHeadAttention GroupQueryAttention",
    "random": "RandomNormal RandomNormalLike RandomUniform RandomUniformLike Bernoulli Multinomial Dropout",
    "vendor": "DFT STFT Det",
    "atomics": "ScatterElements ScatterND Scatter",
    "atomics only": "CumSum",
    "data-dependent": "NonZero Unique Loop If Scan NonMaxSuppression Compress",
    "reduction": (
        "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp "
        "ReduceSumSquare Softmax LogSoftmax BatchNormalization LayerNormalization InstanceNormalization "
        "GroupNormalization RMSNormalization LRN LpNormalization GlobalAveragePool AveragePool Sum Mean "
        "SkipLayerNormalization SimplifiedLayerNormalization ArgMax ArgMin"
    ),
    "exact": (
        "Abs Add And Cast Ceil Clip Concat Constant ConstantOfShape Cos DequantizeLinear Div Elu Equal Erf Exp Expand "
        "EyeLike Flatten Floor Gather GatherElements GatherND Gelu GlobalMaxPool Greater GreaterOrEqual HardSigmoid "
        "HardSwish Identity IsInf IsNan LeakyRelu Less LessOrEqual Log Max MaxPool Min Mod Mul Neg Not OneHot Or PRelu "
        "Pad Pow QuantizeLinear Range Reciprocal Relu Reshape Resize Round Selu Shape Sigmoid Sign Sin Size Slice "
        "Softplus Softsign Split Sqrt Squeeze Sub Tan Tanh ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Upsample "
        "Where Xor DepthToSpace SpaceToDepth FastGelu BiasGelu"
    ),
}


def _tables() -> dict[str, str]:
    found: dict[str, str] = {}
    texts = {
        "exact": _EXACT,
        "data-dependent": _DATA_DEPENDENT,
        "reduction": _REDUCTION,
        "vendor": _VENDOR,
        "gemm": _GEMM,
        "random": _RANDOM,
        "recurrent": _RECURRENT,
        "attention": _ATTENTION,
    }
    for name, text in texts.items():
        found |= dict.fromkeys((f"aten.{op}" for op in text.split()), name)
    for name, ops in LISTED.items():
        found |= dict.fromkeys((f"aten.{op}" for op in ops), name)
    for name, text in _ONNX.items():
        found |= dict.fromkeys((f"onnx.{op}" for op in text.split()), name)
    return found


OPS: Mapping[str, str] = _tables()
"""Op type (``aten.NAME`` without overload and trailing underscore, ``onnx.NAME``) to the name of its class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpFacts:
    """What an op's arguments say beyond its type.

    Attributes:
        floating: an input is a floating-point or complex tensor.
        patches: a convolution whose kernel is its stride, without padding, dilation or groups: windows do not overlap.
    """

    floating: bool
    patches: bool = False


def class_of(op_type: str, facts: OpFacts | None = None) -> KernelClass:
    """Return the class of an op type as graphs hold it; in-place ops count as their functional twins.

    Without ``facts`` an op is taken to read floating-point tensors, and a convolution to overlap.

    >>> class_of("aten.convolution").name, class_of("aten.add_").name, class_of("mine.op").name
    ('convolution', 'exact', 'unknown')
    >>> class_of("aten.cumsum", OpFacts(floating=False)).name
    'exact'
    """
    name = OPS.get(op_type) or OPS.get(op_type.rstrip("_"))
    if name is None:  # the multi-tensor twins of element-wise ops
        name = OPS.get(f"aten.{op_type.removeprefix('aten._foreach_').rstrip('_')}", "unknown")
    if facts is not None and not facts.floating and op_type.removeprefix("aten.").rstrip("_") in FLOATING_ONLY:
        name = "exact"
    if facts is not None and facts.patches and name == "convolution":
        name = "patches"
    return CLASSES[name]
