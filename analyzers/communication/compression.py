"""What compressing gradients would bring under DDP: bf16, or PowerSGD of a rank. Start at :func:`compressed_ddp`.

As torch's communication hooks do it, bucket by bucket. ``bf16_compress_hook`` casts a bucket, all-reduces half of a
float32's bytes, and casts back. ``powerSGD_hook`` (Vogels, Karimireddy and Jaggi, NeurIPS 2019, Algorithm 1) keeps what it
lost for the next step, multiplies each gradient, seen as a matrix of n rows and m columns, with a matrix of m x r, all-reduces
the n x r result, orthogonalises it, multiplies again, all-reduces m x r, and multiplies back; a tensor of which that sends
more than half (vectors among them) is all-reduced whole. The work is bound by memory: bytes over the device's rate. It runs
where the backward pass does, and delays it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.communication.collectives import default_cuts
from ddltool.analyzers.communication.program import SMALL_GAIN, Program, share_saved
from ddltool.analyzers.costs.nccl import Communicator
from ddltool.errors import InputError
from ddltool.graph import Graph
from ddltool.plans import CompressionFigures
from ddltool.units import show_bytes, show_seconds

# Reads and writes of a gradient's elements of 4 bytes: to and from bfloat16; adding the error, a copy of it, three products,
# and the new error (torch.distributed.algorithms.ddp_comm_hooks).
_BF16_ENCODE, _BF16_DECODE = 6.0, 6.0
_POWER_ENCODE, _POWER_BETWEEN, _POWER_DECODE = 24.0, 4.0, 16.0
# powerSGD_hook's min_compression_rate.
_LEAST_RATE = 2.0
_WIDTHS = {"float32": 4.0, "float64": 8.0, "float16": 2.0, "bfloat16": 2.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """What is sent in place of gradients; ``rank`` of PowerSGD, 0: bfloat16."""

    rank: int = 0

    @property
    def name(self) -> str:
        """Return it as ``--compress`` takes it."""
        return f"powersgd:{self.rank}" if self.rank else "bf16"


def parse_compression(text: str, where: str = "--compress") -> Compression:
    """Return what ``bf16`` or ``powersgd:R`` says. Raises InputError for anything else.

    >>> parse_compression("powersgd:4").rank
    4
    """
    name, _, rank = text.partition(":")
    if text == "bf16":
        return Compression()
    if name == "powersgd" and rank.isdecimal() and 1 <= int(rank) <= 1024:
        return Compression(rank=int(rank))
    raise InputError(where, f"unknown {text!r}", "bf16, or powersgd:R with a rank R from 1 to 1024, such as powersgd:4")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sent:
    """Of ``p`` gradients in ready order: bytes of a first and a second all-reduce, and seconds of work around them."""

    whole: NDArray[np.float64]
    first: NDArray[np.float64]
    second: NDArray[np.float64]
    encode_s: NDArray[np.float64]
    between_s: NDArray[np.float64]
    decode_s: NDArray[np.float64]
    kept_bytes: float

    @classmethod
    def of(cls, **parts: NDArray[np.float64]) -> _Sent:
        """Return what is given, nothing kept, and zeros for the rest."""
        zero = np.zeros(len(next(iter(parts.values()))))
        columns = ("whole", "first", "second", "encode_s", "between_s", "decode_s")
        return cls(**{name: parts.get(name, zero) for name in columns}, kept_bytes=0.0)


def compressed_ddp(
    graph: Graph,
    program: Program,
    group: Communicator,
    compression: Compression,
    memory_bytes_per_s: float,
    default_s: float,
) -> CompressionFigures:
    """Return a step with DDP's default buckets, compressed, beside ``default_s``, the same without. O(p + e)."""
    sent = _sent(graph, program, compression, memory_bytes_per_s)
    cuts = default_cuts(program)
    step_s = _finish_s(program, group, sent, cuts)
    work_s = float((sent.encode_s + sent.between_s + sent.decode_s).sum())
    before, after = float(program.size_bytes.sum()), float((sent.whole + sent.first + sent.second).sum())
    saved = share_saved(step_s, default_s)
    return CompressionFigures(
        name=compression.name,
        sent_bytes=after,
        uncompressed_bytes=before,
        compute_s=work_s,
        kept_bytes=sent.kept_bytes,
        step_s=step_s,
        exposed_s=step_s - program.compute_s,
        saved=saved,
        verdict=_verdict(compression, before, after, work_s, saved),
    )


def _verdict(compression: Compression, before: float, after: float, work_s: float, saved: float) -> str:
    sizes = f"{show_bytes(after)} in place of {show_bytes(before)}"
    text = f"{compression.name} would send {sizes} for {show_seconds(work_s)} of work: "
    if after >= before:
        return text + "nothing to gain, the gradients are as small already."
    loss = "" if compression.rank == 0 else "; what its error costs in steps is not predicted"
    if saved >= SMALL_GAIN:
        return text + f"{saved:.1%} of DDP's default step saved{loss}."
    return text + ("not worth it." if saved >= 0 else f"the step takes {-saved:.1%} longer.")


def _sent(graph: Graph, program: Program, compression: Compression, memory_bytes_per_s: float) -> _Sent:
    width = _width(graph)
    elements = program.size_bytes / width
    if compression.rank == 0:
        if width <= _WIDTHS["bfloat16"]:
            return _Sent.of(whole=program.size_bytes)
        work = elements / memory_bytes_per_s
        sent = elements * _WIDTHS["bfloat16"]
        return _Sent.of(first=sent, encode_s=work * _BF16_ENCODE, decode_s=work * _BF16_DECODE)
    rows, columns = matrices(graph, elements)
    rank = np.minimum(compression.rank, np.minimum(rows, columns))
    taken = (rows + columns) * compression.rank * _LEAST_RATE < elements
    moved = np.where(taken, elements * width / 4.0, 0.0) / memory_bytes_per_s
    return _Sent(
        whole=np.where(taken, 0.0, program.size_bytes),
        first=np.where(taken, rows * rank * width, 0.0),
        second=np.where(taken, columns * rank * width, 0.0),
        encode_s=moved * _POWER_ENCODE,
        between_s=moved * _POWER_BETWEEN,
        decode_s=moved * _POWER_DECODE,
        kept_bytes=float(program.size_bytes.sum()),
    )


def _width(graph: Graph) -> float:
    """Return the bytes of a gradient's element."""
    elements = graph.meta.get("parameter_elements")
    if isinstance(elements, (int, float)) and elements > 0:
        return graph.parameter_bytes / float(elements)
    return _WIDTHS.get(str(graph.meta.get("dtype")), 4.0)


def matrices(graph: Graph, elements: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return rows and columns (p,) of gradients of so many elements, as the graph's products tell; 1 row of a vector.

    A weight is one factor of a product: k x n of its m, n, k. What is in no product (an embedding) has the most frequent
    width of products that divides it.
    """
    factors: dict[float, tuple[float, float]] = {}
    widths: Counter[float] = Counter()
    # single products first: those of attention come by the head, and have no weights
    for count, _, n, k in sorted(graph.gemm[graph.gemm[:, 1] > 0].tolist(), key=lambda each: float(each[0])):
        factors.setdefault(count * n * k, (count * n, k))
        widths.update((n, k))
    common = [width for width, _ in widths.most_common() if width > 1]
    found = []
    for size in elements.tolist():
        size = float(round(size))
        divisor = next((width for width in common if width < size and size % width == 0), None)
        vector = size in widths
        found.append(factors.get(size) or ((1.0, size) if vector or divisor is None else (size / divisor, divisor)))
    rows, columns = np.array(found, dtype=np.float64).reshape(-1, 2).T
    return rows, columns


def _finish_s(program: Program, group: Communicator, sent: _Sent, cuts: Sequence[int]) -> float:
    """Return the end of the step: work before and after the all-reduces of each bucket delays what follows on the device."""
    device = network = left = 0.0
    delay = 0.0
    for low, high in itertools.pairwise([0, *cuts]):
        span = slice(low, high)
        delay += float(sent.encode_s[span].sum())
        ready = float(program.ready_s[high - 1]) + delay
        between = float(sent.between_s[span].sum())
        sizes = np.array([float(part[span].sum()) for part in (sent.whole, sent.first, sent.second)])
        seconds = np.where(sizes > 0, group.all_reduce_s(sizes), 0.0).sum()
        network = max(network, ready) + float(seconds) + between
        left = float(sent.decode_s[span].sum())
        device += left + between
    # what is decoded while the backward pass runs delays it; the last bucket is decoded after it has come
    return max(program.compute_s + delay + device - left, network) + left
