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


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernels:
    """``k`` kernels of one graph, in the order of its ops."""

    op: NDArray[np.intp]
    """(k,) the index of the op that each kernel belongs to."""
    kind: NDArray[np.int8]
    """(k,) index into CLASSES."""
    direction: NDArray[np.int8]
    """(k,) FORWARD, INPUT_GRADIENT or WEIGHT_GRADIENT; FORWARD for anything but convolutions, batch norms and pools."""
    flops: Floats
    """(k,) floating-point operations."""
    moved_bytes: Floats
    """(k,) bytes read and written."""
    gemm: Floats
    """(k, 4) count, m, n, k of the kernel's own matrix product; rows, 0, 0, elements of a row for a kernel that works row by
    row; zeros for any other."""
    width: Floats
    """(k,) bytes of one element of the type that it works in."""
    is_channels_last: Flags
    """(k,) whether its images or volumes have their channels last in memory; False for other kernels."""
    dtype: tuple[str, ...]
    """(k,) torch's name of that type."""
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


_ARRAYS = ("op", "kind", "direction", "flops", "moved_bytes", "gemm", "width", "is_channels_last")
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
        dtype=(dtype,) * rows,
        ops=rows,
    )


def memory_kernels(moved_bytes: Sequence[float]) -> Kernels:
    """Return an element-wise float32 kernel for each number of bytes (read plus written), each as an op of its own."""
    return kernels_of_rows([("pointwise", "float32", float(moved), NO_GEMM) for moved in moved_bytes])


def kernels_of_rows(rows: Sequence[tuple[str, str, float, Gemm]]) -> Kernels:
    """Return a kernel for each row (op type, type that it works in, bytes moved, product), each as an op of its own."""
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
        dtype=tuple(row[1] for row in rows),
        ops=len(rows),
    )


# A row of softmax with more bytes does not fit into a multiprocessor's memory, and is read three times: for the maximum, for
# the sum, and for the result.
_ROW_BYTES = 48 * 1024


def _read_again(op_types: Sequence[str], read_bytes: Floats, gemm: Floats, training: bool) -> Floats:
    """Return (n,) how often ops read their inputs again after the first time, as a share of the bytes read.

    A batch or group norm in training reads its input for the statistics, and again to apply them; the backward pass of any
    norm reads its inputs again for the gradients of its weights. Softmax reads a long row three times, and its backward pass
    reads long rows twice (aten/src/ATen/native/cuda: Normalization.cuh, layer_norm_kernel.cu, SoftMax.cu). ``op_types``,
    ``read_bytes`` (n,), ``gemm`` (n, 4): of the ops. ``training``: whether the graph is a training step's.
    """
    times = np.zeros(len(op_types))
    row_bytes = read_bytes / np.maximum(gemm[:, 0], 1.0)
    for op, op_type in enumerate(op_types):
        name = normal_type(op_type)
        if "softmax" in name and gemm[op, 0]:
            tensors = 2.0 if "backward" in name else 1.0  # what it reads of a row
            if row_bytes[op] / tensors > _ROW_BYTES:
                # Backward softmax reads both of its tensors twice, log-softmax the gradient, which is half of what it reads.
                times[op] = 2.0 if tensors == 1.0 else 0.5 if "log" in name else 1.0
        elif name.endswith("_norm_backward") or (training and name in ("native_batch_norm", "native_group_norm")):
            times[op] = 1.0
    return times


def kernels_of(graph: Graph) -> Kernels:
    """Return the kernels of a graph's compute ops, in their order; ops that cost nothing have none. O(n).

    Most ops are one kernel. The backward pass of a convolution is two kernels if it has the operations of two products: the
    gradient of the weights first, then that of the input, each with half of the operations and a shape of its own.
    """
    graph_dtype = str(graph.meta.get("dtype", "float32"))
    has_cost = (graph.kind == COMPUTE) & np.array([source != "free" for source in graph.estimate], dtype=bool)
    ops = np.flatnonzero(has_cost)
    op_types = [graph.op_type[op] for op in ops]
    kind = np.array([class_of(op_type) for op_type in op_types], dtype=np.int8)
    gemm = graph.gemm[ops].copy()
    flops, moved_bytes = graph.flops[ops].copy(), graph.size_bytes[ops].copy()
    dtype = [graph.dtype[op] or graph_dtype for op in ops]
    width = np.array([_WIDTH.get(name, 4) for name in dtype], dtype=np.float64)
    layouts = np.array([graph.layout[op] for op in ops], dtype=object)
    is_channels_last = (layouts == "channels_last") | ((layouts == "") & bool(graph.meta.get("channels_last")))
    written = graph.written_bytes[ops]
    ends_backward = np.array([op_type.endswith("_backward") for op_type in op_types], dtype=bool)
    is_batch_norm = np.array([normal_type(op_type).startswith("native_batch_norm") for op_type in op_types], dtype=bool)
    is_bfloat16 = np.array([name == "bfloat16" for name in dtype], dtype=bool)
    is_native = is_batch_norm & is_bfloat16
    kind[is_native] = CLASS["native_normalisation"]
    times_again = _read_again(op_types, moved_bytes - written, gemm, graph.mode == "training")
    # torch's own batch norm (native): forward, its statistics (Welford's algorithm) take as long as one reading more; backward,
    # they are summed at twice the rate, so that both readings count as one.
    times_again[is_native] = np.where(ends_backward, 0.0, 2.0)[is_native]
    moved_bytes += times_again * (moved_bytes - written)
    # Casts to a type two to four times as wide, with a tolerance.
    is_cast = np.array([normal_type(op_type) in ("to_copy", "copy") for op_type in op_types], dtype=bool)
    read = moved_bytes - written
    kind[is_cast & (written > 1.5 * read) & (written < 4.5 * read)] = CLASS["widening"]
    is_convolution = kind == CLASS["convolution"]
    kind[is_convolution & (gemm[:, 0] > 1)] = CLASS["grouped_convolution"]  # gemm's columns: groups, m, n, k
    kind[is_convolution & (gemm[:, 0] > 1) & (gemm[:, 2] <= 1)] = CLASS["depthwise_convolution"]
    is_backward = is_convolution & ends_backward
    is_attention = (kind == CLASS["attention"]) & (gemm[:, 1] > 0)
    # Attention is two products (scores, values); its backward pass is five: four gradients, and the scores once more.
    products = np.where(ends_backward, 5.0, 2.0)
    product_flops = 2.0 * gemm.prod(axis=1)
    flops[is_attention] = (products * product_flops)[is_attention]  # under a causal mask, less than the op's FLOPs
    # The op has the operations of one product or of two; 1.5 lies between.
    is_double = is_backward & (flops > 1.5 * product_flops) & (product_flops > 0)
    direction = np.where(is_backward, WEIGHT_GRADIENT, FORWARD).astype(np.int8)
    direction[(is_batch_norm | (kind == CLASS["pooling"])) & ends_backward] = INPUT_GRADIENT
    # The gradient of the input and that of the weights: each reads the output's gradient and one more tensor, so that the
    # output's gradient, counted once so far, is read twice.
    output_bytes = gemm[is_double, 0] * gemm[is_double, 1] * gemm[is_double, 2] * width[is_double]
    half_bytes = (moved_bytes[is_double] + output_bytes) / 2.0
    count, m, n, k = gemm[is_double].T
    flops[is_double] /= 2.0
    moved_bytes[is_double] = half_bytes
    # Of the weights' gradient (n, k) the inner dimension is m; of the input's (m, k), below, it is n.
    gemm[is_backward] = gemm[is_backward][:, [0, 2, 3, 1]]
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
        gemm=interleave(gemm, np.stack([count, m, k, n], axis=1)),  # type: ignore[arg-type]
        width=interleave(width, width[is_double]),  # type: ignore[arg-type]
        is_channels_last=interleave(is_channels_last, is_channels_last[is_double]),  # type: ignore[arg-type]
        dtype=tuple(interleave(names, names[is_double])),
        ops=len(graph),
    )
