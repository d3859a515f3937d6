"""The kernels behind a graph's ops: which class each belongs to, and the work it does. Start at :func:`kernels_of`.

An op of a trace is one call of torch's; on the device the backward pass of a convolution is two kernels, and a view is none.
:mod:`.kernel_times` computes the time of a kernel from its floating-point operations, its memory traffic, and the shape of its
matrix product, which decides how well it fills the device's multiprocessors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.step.recording.op_rules import CLASS, class_of, normal_type
from ddltool.arrays import Flags, Floats
from ddltool.graph import COMPUTE, NO_GEMM, Gemm, Graph

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)
"""The directions of a kernel: the forward pass, or the part of the backward pass that computes one of the two gradients."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernels:
    """``k`` kernels of one graph, in the order of its ops."""

    op: NDArray[np.intp]
    """(k,) the index of the op that each kernel belongs to."""
    kind: NDArray[np.int8]
    """(k,) the class of each kernel, such as "matrix_product": an index into CLASSES."""
    direction: NDArray[np.int8]
    """(k,) FORWARD, INPUT_GRADIENT or WEIGHT_GRADIENT; FORWARD for anything but convolutions, batch norms and pools."""
    flops: Floats
    """(k,) floating-point operations."""
    moved_bytes: Floats
    """(k,) bytes read and written."""
    gemm: Floats
    """(k, 4) the shape of the kernel's matrix product: count, m, n, k for ``count`` products of an (m, k) and a (k, n) matrix.
    A kernel that works row by row has (rows, 0, 0, elements of a row), any other zeros."""
    width: Floats
    """(k,) bytes of one element of the type that it works in."""
    is_channels_last: Flags
    """(k,) whether its images or volumes have their channels last in memory; False for other kernels."""
    sets_alignment: Flags
    """(k, 3) of products: whether m, n and k are each the length of contiguous rows or columns of one of the matrices, so that
    it decides where the next ones begin; of convolutions as where channels lie together."""
    dtype: tuple[str, ...]
    """(k,) torch's name of the type that it works in, such as "bfloat16"."""
    ops: int
    """The number of ops in the graph."""

    def __len__(self) -> int:
        """Return the number of kernels."""
        return len(self.op)

    def per_op(self, values: Floats) -> Floats:
        """Return (ops,) the sums of ``values`` (k,) over the kernels of each op of the graph."""
        sums: Floats = np.bincount(self.op, weights=values, minlength=self.ops).astype(np.float64)
        return sums

    def chosen(self, places: Sequence[int]) -> Kernels:
        """Return the kernels at the indices ``places``, in that order, as kernels of the same graph."""
        dtype = tuple(self.dtype[place] for place in places)
        arrays = {name: getattr(self, name)[list(places)] for name in _ARRAYS}
        return Kernels(**arrays, dtype=dtype, ops=self.ops)


_ARRAYS = ("op", "kind", "direction", "flops", "moved_bytes", "gemm", "width", "is_channels_last", "sets_alignment")
# Bytes of an element, where they are not 4.
_WIDTH = {"complex128": 16, "complex64": 8, "float64": 8, "int64": 8}
_WIDTH |= {"float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
_WIDTH |= {"float8_e4m3fn": 1, "float8_e5m2": 1}


def product_kernels(gemm: Floats, dtype: str, width: float, result_width: int) -> Kernels:
    """Return a kernel for each row of ``gemm`` (k, 4), each as an op of its own.

    The columns of ``gemm`` are count, m, n, k: ``count`` products of an (m, k) and a (k, n) matrix. ``width``: bytes of an
    element of the operands, which are of type ``dtype``; ``result_width``: bytes of an element of the result.
    """
    count, m, n, k = gemm.T
    rows = len(gemm)
    return Kernels(
        op=np.arange(rows),
        kind=np.full(rows, CLASS["matrix_product"], dtype=np.int8),
        direction=np.full(rows, FORWARD, dtype=np.int8),
        flops=2.0 * gemm.prod(axis=1),
        moved_bytes=count * ((m * k + k * n) * width + m * n * result_width),
        gemm=gemm,
        width=np.full(rows, float(width)),
        is_channels_last=np.zeros(rows, dtype=bool),
        sets_alignment=_sets_alignment(np.full(rows, "", dtype=object)),
        dtype=(dtype,) * rows,
        ops=rows,
    )


def _sets_alignment(layouts: NDArray[np.object_]) -> Flags:
    """Return (k, 3) :attr:`Kernels.sets_alignment` of matrix products, by the layouts (k,) of their factors.

    A product's rows are of n elements; the left factor's of k, or its columns of m; the right one's of n, or its columns of k.
    """
    both = layouts == "both_transposed"
    left = both | (layouts == "left_transposed")
    return np.stack([left, np.ones(len(left), dtype=bool), ~left | both], axis=1)


def memory_kernels(moved_bytes: Sequence[float]) -> Kernels:
    """Return element-wise float32 kernels, one for each entry of ``moved_bytes``, the bytes that it reads and writes.

    Each kernel counts as an op of its own.
    """
    return kernels_of_rows([("pointwise", "float32", float(moved), NO_GEMM) for moved in moved_bytes])


def kernels_of_rows(rows: Sequence[tuple[str, str, float, Gemm]]) -> Kernels:
    """Return a kernel for each row, each as an op of its own.

    A row is (op type without library, such as "mm"; torch's name of the type that it works in; bytes that it reads and writes;
    shape of its matrix product, or ``NO_GEMM``).
    """
    gemm = np.array([row[3] for row in rows], dtype=np.float64).reshape(len(rows), 4)
    return Kernels(
        op=np.arange(len(rows)),
        kind=np.array([class_of(row[0]) for row in rows], dtype=np.int8),
        direction=np.full(len(rows), FORWARD, dtype=np.int8),
        flops=2.0 * gemm.prod(axis=1),
        moved_bytes=np.array([row[2] for row in rows], dtype=np.float64),
        gemm=gemm,
        width=np.array([_WIDTH.get(row[1], 4) for row in rows], dtype=np.float64),
        is_channels_last=np.zeros(len(rows), dtype=bool),
        sets_alignment=_sets_alignment(np.full(len(rows), "", dtype=object)),
        dtype=tuple(row[1] for row in rows),
        ops=len(rows),
    )


# A row of softmax with more bytes does not fit into a multiprocessor's memory, and is read three times: for the maximum, for
# the sum, and for the result.
_ROW_BYTES = 48 * 1024


def _read_again(op_types: Sequence[str], read_bytes: Floats, gemm: Floats, training: bool) -> Floats:
    """Return (n,) how many more times each op reads its inputs than once; 0.5 stands for half of its inputs, once more.

    A batch or group norm in training reads its input for the statistics, and again to apply them; the backward pass of any
    norm reads its inputs again for the gradients of its weights. Softmax reads a long row three times, and its backward pass
    reads long rows twice (aten/src/ATen/native/cuda: Normalization.cuh, layer_norm_kernel.cu, SoftMax.cu).

    Args:
        op_types: (n,) the types of the ops.
        read_bytes: (n,) bytes of all inputs of an op.
        gemm: (n, 4) as in :class:`Kernels`; of a softmax, the number of its rows comes first.
        training: whether the graph is a training step's.
    """
    times = np.zeros(len(op_types))
    row_bytes = read_bytes / np.maximum(gemm[:, 0], 1.0)
    for op, op_type in enumerate(op_types):
        name = normal_type(op_type)
        if "softmax" in name and gemm[op, 0]:
            is_backward = "backward" in name
            input_tensors = 2.0 if is_backward else 1.0  # the backward pass reads the result and its gradient
            if row_bytes[op] / input_tensors <= _ROW_BYTES:  # the row stays in the multiprocessor's memory
                continue
            if not is_backward:
                times[op] = 2.0
            elif "log" in name:
                times[op] = 0.5  # the gradient alone is read again, which is half of what the op reads
            else:
                times[op] = 1.0
        elif name.endswith("_norm_backward") or (training and name in ("native_batch_norm", "native_group_norm")):
            times[op] = 1.0
    return times


def kernels_of(graph: Graph) -> Kernels:
    """Return the kernels of a graph's compute ops, in their order; ops that cost nothing have none. O(n).

    Most ops are one kernel. The backward pass of a convolution is two kernels if it has the operations of two products: the
    gradient of the weights first, then that of the input, each with half of the operations and a shape of its own.
    """
    has_cost = (graph.kind == COMPUTE) & np.array([source != "free" for source in graph.estimate], dtype=bool)
    ops = np.flatnonzero(has_cost)
    op_types = [graph.op_type[op] for op in ops]
    graph_dtype = str(graph.meta.get("dtype", "float32"))
    dtype = [graph.dtype[op] or graph_dtype for op in ops]
    width = np.array([_WIDTH.get(name, 4) for name in dtype], dtype=np.float64)
    layouts = np.array([graph.layout[op] for op in ops], dtype=object)
    is_channels_last = (layouts == "channels_last") | ((layouts == "") & bool(graph.meta.get("channels_last")))
    sets_alignment = _sets_alignment(layouts)
    is_backward = np.array([op_type.endswith("_backward") for op_type in op_types], dtype=bool)
    gemm = graph.gemm[ops].copy()
    written_bytes = graph.written_bytes[ops]
    read_bytes = graph.size_bytes[ops] - written_bytes
    kind = _refined_classes(op_types, dtype, gemm, read_bytes, written_bytes)
    # A kernel moves more bytes than its op has if it reads its inputs again.
    times_again = _read_again(op_types, read_bytes, gemm, graph.mode == "training")
    # torch's own batch norm (native): forward, its statistics (Welford's algorithm) take as long as one reading more; backward,
    # they are summed at twice the rate, so that both readings count as one.
    is_native = kind == CLASS["native_normalisation"]
    times_again[is_native] = np.where(is_backward, 0.0, 2.0)[is_native]
    moved_bytes = graph.size_bytes[ops] + times_again * read_bytes
    flops = graph.flops[ops].copy()
    product_flops = 2.0 * gemm.prod(axis=1)
    is_attention = (kind == CLASS["attention"]) & (gemm[:, 1] > 0)
    # Attention is two products (scores, values); its backward pass is five: four gradients, and the scores once more.
    products = np.where(is_backward, 5.0, 2.0)
    flops[is_attention] = (products * product_flops)[is_attention]  # under a causal mask, less than the op's FLOPs
    is_gradient = is_backward & np.isin(kind, _CONVOLUTIONS)
    direction = np.where(is_gradient, WEIGHT_GRADIENT, FORWARD).astype(np.int8)
    is_batch_norm = np.array([normal_type(op_type).startswith("native_batch_norm") for op_type in op_types], dtype=bool)
    direction[(is_batch_norm | (kind == CLASS["pooling"])) & is_backward] = INPUT_GRADIENT
    # A convolution's backward op has the operations of one product or of two; 1.5 lies between.
    is_double = is_gradient & (flops > 1.5 * product_flops) & (product_flops > 0)
    # The gradient of the input and that of the weights: each reads the output's gradient and one more tensor, so that the
    # output's gradient, counted once so far, is read twice.
    output_bytes = gemm[is_double, 0] * gemm[is_double, 1] * gemm[is_double, 2] * width[is_double]
    half_bytes = (moved_bytes[is_double] + output_bytes) / 2.0
    moved_bytes[is_double] = half_bytes
    flops[is_double] /= 2.0
    # Of the input's gradient (m, k) the inner dimension is n; of the weights' (n, k), below, it is m.
    count, m, n, k = gemm[is_double].T
    input_gemm = np.stack([count, m, k, n], axis=1)
    gemm[is_gradient] = gemm[is_gradient][:, [0, 2, 3, 1]]
    # All first kernels, then the second ones, are brought into the order of their ops; a stable sort keeps first before second.
    # Where channels lie together, a convolution's positions are rows, of which there may be any number: m forward and for the
    # input's gradient, k for that of the weights.
    is_convolution = np.isin(kind, _CONVOLUTIONS)
    sets_alignment[is_convolution] = [False, True, True]
    sets_alignment[is_convolution & (direction == WEIGHT_GRADIENT)] = [True, True, False]
    input_sets_alignment = np.broadcast_to([False, True, True], (int(is_double.sum()), 3))
    order = np.argsort(np.concatenate([ops, ops[is_double]]), kind="stable")

    def interleave(first: NDArray[np.generic], second: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return the values of all kernels in the order of their ops: an op's first kernel, then its second if it has one."""
        return np.concatenate([first, second])[order]

    names = np.array(dtype, dtype=object)
    return Kernels(
        op=interleave(ops, ops[is_double]),  # type: ignore[arg-type]
        kind=interleave(kind, kind[is_double]),  # type: ignore[arg-type]
        direction=interleave(direction, np.full(int(is_double.sum()), INPUT_GRADIENT, dtype=np.int8)),  # type: ignore[arg-type]
        flops=interleave(flops, flops[is_double]),  # type: ignore[arg-type]
        moved_bytes=interleave(moved_bytes, half_bytes),  # type: ignore[arg-type]
        gemm=interleave(gemm, input_gemm),  # type: ignore[arg-type]
        width=interleave(width, width[is_double]),  # type: ignore[arg-type]
        is_channels_last=interleave(is_channels_last, is_channels_last[is_double]),  # type: ignore[arg-type]
        sets_alignment=interleave(sets_alignment, input_sets_alignment),  # type: ignore[arg-type]
        dtype=tuple(interleave(names, names[is_double])),
        ops=len(graph),
    )


_CONVOLUTIONS = [CLASS[name] for name in ("convolution", "grouped_convolution", "depthwise_convolution")]


def _refined_classes(
    op_types: Sequence[str], dtype: Sequence[str], gemm: Floats, read_bytes: Floats, written_bytes: Floats
) -> NDArray[np.int8]:
    """Return (n,) the class of each op's kernels: :func:`class_of` its type, refined by what the op works on.

    Convolutions are told apart by their groups, batch norms by their type, and copies by the bytes that they write.

    Args:
        op_types: (n,) the types of the ops.
        dtype: (n,) torch's name of the type that each op works in.
        gemm: (n, 4) as in :class:`Kernels`; of a convolution groups, m, n, k.
        read_bytes, written_bytes: (n,) of each op.
    """
    kind = np.array([class_of(op_type) for op_type in op_types], dtype=np.int8)
    names = [normal_type(op_type) for op_type in op_types]
    is_batch_norm = np.array([name.startswith("native_batch_norm") for name in names], dtype=bool)
    is_bfloat16 = np.array([name == "bfloat16" for name in dtype], dtype=bool)
    kind[is_batch_norm & is_bfloat16] = CLASS["native_normalisation"]  # torch's own kernels, in place of cuDNN's
    # Casts to a type two to four times as wide, with a tolerance.
    is_cast = np.array([name in ("to_copy", "copy") for name in names], dtype=bool)
    kind[is_cast & (written_bytes > 1.5 * read_bytes) & (written_bytes < 4.5 * read_bytes)] = CLASS["widening"]
    is_grouped = (kind == CLASS["convolution"]) & (gemm[:, 0] > 1)
    is_depthwise = is_grouped & (gemm[:, 2] <= 1)  # one output channel in a group
    kind[is_grouped] = CLASS["grouped_convolution"]
    kind[is_depthwise] = CLASS["depthwise_convolution"]
    return kind
