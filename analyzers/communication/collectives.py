"""What data-parallel frameworks leave exposed on one traced step, and what to set: DDP here, FSDP2 in :mod:`.fsdp`.

DistributedDataParallel closes a bucket once it holds at least its cap, in the order in which gradients became ready in
the first step, and all-reduces the buckets one after another, each when its last gradient is ready. With ``t_j`` when
gradient j is ready, a bucket of gradients i+1 to j ends at ``max(end of the bucket before, t_j) + cost(bytes)``; what
lies after the end of backward is exposed. The best cut of p gradients in ready order follows by dynamic programming.
Start at :func:`plan_collectives`.

What compressing gradients would bring under DDP: bf16, or PowerSGD of a rank. Start at :func:`compressed_ddp`.

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
from decimal import ROUND_FLOOR, Context

import numpy as np

from ddltool.analyzers.communication.fsdp import plan_fsdp, prefetch_setting
from ddltool.analyzers.communication.program import (
    CLEAR_GAIN,
    SMALL_GAIN,
    Program,
    program_of,
    share_saved,
    stretched,
)
from ddltool.analyzers.costs.nccl import Communicator, Group, Reducer
from ddltool.arrays import Floats, Places
from ddltool.errors import InputError
from ddltool.graph import SEND, Graph
from ddltool.graph_results import BucketFigures, CollectiveFigures, DdpFigures
from ddltool.plans import BucketSetting, CompressionFigures, PrefetchSetting
from ddltool.units import show_bytes, show_seconds

MIB = 2**20
DEFAULT_CAP_MIB = 25.0
# torch.distributed._DEFAULT_FIRST_BUCKET_BYTES: only the default configuration begins with a small bucket.
DEFAULT_FIRST_BYTES = 2**20
_MOST_SUMS, _MOST_CAPS = 400, 300
# More buckets are only worth it from this share of the step on: what a launch costs is not in the ring's formula.
_WORTH = 0.001
# Sums of gradients that are timed in one call.
_AT_ONCE = 2**14
# A simpler setting within this share of the best one's step is preferred.
_AS_GOOD = 0.002
CAPS_MIB = (1, 2, 4, 8, 10, 16, 25, 32, 50, 64, 100, 128, 200, 256, 400, 512, 800, 1024, 2048, 4096)


def plan_collectives(graph: Graph, group: Group, compute_s: float | None = None) -> CollectiveFigures | None:
    """Return the plans of a timed training graph, None for inference: there is no gradient to reduce.

    ``compute_s``: seconds that the pass which ends with them computes, where they are not the graph's.
    """
    if graph.mode != "training" or not len(graph.of_kind(SEND)):
        return None
    program = program_of(graph)
    program = program if compute_s is None else stretched(program, compute_s)
    return CollectiveFigures(
        replicas=group.replicas,
        network=group.fabric.text,
        compute_s=program.compute_s,
        ddp=plan_ddp(program, group),
        fsdp2=plan_fsdp(program, group),
    )


def settings(plans: CollectiveFigures) -> tuple[BucketSetting, PrefetchSetting | None]:
    """Return what a plan keeps of them: DDP's buckets and FSDP2's prefetch lists."""
    return bucket_setting(plans.ddp), None if plans.fsdp2 is None else prefetch_setting(plans.fsdp2)


def plan_ddp(program: Program, group: Communicator) -> DdpFigures:
    """Return the default buckets of DDP, the best ``bucket_cap_mb``, and the best buckets of any size. O(p^2).

    Caps tried: the usual sizes, and those at which the buckets change (all of them for small models, else spread evenly
    over them); of those within 0.1 % of the best, the one with the fewest buckets. The order of buckets is that of one
    dtype: torch buckets each dtype separately. No buckets at all can be faster than the bound: backward first, then at
    least the last gradient; or all bytes on the wire.
    """
    default = _figures(program, group, default_cuts(program))
    total = float(program.size_bytes.sum()) / MIB
    caps = [*sorted({float(cap) for cap in CAPS_MIB if cap < total} | {float(np.ceil(total))}), *_breakpoints(program)]
    tried = [_figures(program, group, assign_buckets(program, cap), cap=cap) for cap in caps]
    fastest = min(plan.step_s for plan in tried)
    as_good = [plan for plan in tried if plan.step_s <= fastest * (1 + _WORTH)]
    best_cap = min(as_good, key=lambda plan: (plan.buckets, plan.step_s))
    if default.step_s <= best_cap.step_s:
        best_cap = default
    elif best_cap.bucket_cap_mb is not None:
        best_cap = best_cap.model_copy(update={"bucket_cap_mb": _rounded(program, best_cap.bucket_cap_mb)})
    cuts = best_cuts(program, group)
    best = _figures(program, group, cuts, cap_list=_caps_for(program, cuts))
    if best_cap.step_s <= best.step_s:
        best = best_cap
    whole = group.all_reduce_s(float(program.size_bytes.sum()))
    last = group.all_reduce_s(float(program.size_bytes[-1]))
    return DdpFigures(
        default=default,
        best_cap=best_cap,
        best=best,
        lower_bound_s=max(program.compute_s, float(program.ready_s[-1]) + last, float(program.ready_s[0]) + whole),
        verdict=_verdict(program, default, best_cap, best),
    )


def _breakpoints(program: Program) -> list[float]:
    """Return caps in MiB at which the buckets change: sums of neighbouring gradients, at most ``_MOST_CAPS`` of them."""
    held = np.concatenate([np.zeros(1), np.cumsum(program.size_bytes)])
    ends = np.arange(len(held))
    if len(held) > _MOST_SUMS:
        ends = np.unique(np.linspace(0, len(held) - 1, _MOST_SUMS).astype(np.int64))
    sums = np.unique((held[ends][:, None] - held[ends][None, :])[np.tril_indices(len(ends), -1)])
    if len(sums) > _MOST_CAPS:
        sums = sums[np.linspace(0, len(sums) - 1, _MOST_CAPS).astype(np.int64)]
    return [float(value) for value in sums / MIB]


def _rounded(program: Program, cap: float) -> float:
    """Return the cap in MiB with the fewest digits, at most this one, that makes the same buckets."""
    cuts = assign_buckets(program, cap)
    shorter = (float(Context(prec=digits, rounding=ROUND_FLOOR).create_decimal(cap)) for digits in range(1, 8))
    return next((each for each in shorter if each and assign_buckets(program, each) == cuts), cap)


def default_cuts(program: Program) -> list[int]:
    """Return where DDP's own buckets end."""
    return assign_buckets(program, DEFAULT_CAP_MIB, DEFAULT_FIRST_BYTES)


def assign_buckets(program: Program, cap_mib: float, first_bytes: float | None = None) -> list[int]:
    """Return where buckets end (exclusive places in ready order) under a cap in MiB, as DDP's reducer forms them.

    ``first_bytes`` limits the first bucket; None: the cap does.
    """
    limit = cap_mib * MIB if first_bytes is None else first_bytes
    cuts: list[int] = []
    held = 0.0
    for place, size in enumerate(program.size_bytes.tolist()):
        held += size
        if held >= limit:
            cuts.append(place + 1)
            held, limit = 0.0, cap_mib * MIB
    if not cuts or cuts[-1] < len(program.parameters):
        cuts.append(len(program.parameters))
    return cuts


def finish_s(program: Program, group: Reducer, cuts: Sequence[int]) -> float:
    """Return when the last bucket is reduced, seconds from the step's start."""
    held = np.concatenate([np.zeros(1), np.cumsum(program.size_bytes)])
    ends = np.array([0, *cuts])
    seconds = group.all_reduce_s(held[ends[1:]] - held[ends[:-1]])
    now = 0.0
    for ready, took in zip(program.ready_s[ends[1:] - 1].tolist(), seconds.tolist(), strict=True):
        now = max(now, ready) + took
    return now


def best_cuts(program: Program, group: Reducer) -> list[int]:
    """Return the cut of the gradients, in ready order, whose last bucket is reduced first. O(p^2) vectorised."""
    count = len(program.parameters)
    held = np.concatenate([np.zeros(1), np.cumsum(program.size_bytes)])
    ends = np.zeros(count + 1)
    previous: Places = np.zeros(count + 1, dtype=np.intp)
    some = max(1, _AT_ONCE // max(count, 1))
    for first in range(1, count + 1, some):
        places = np.arange(first, min(first + some, count + 1))
        seconds = group.all_reduce_s(np.maximum(held[places, None] - held[None, : places[-1]], 0.0))
        for place, row in zip(places.tolist(), seconds, strict=True):
            values = np.maximum(ends[:place], program.ready_s[place - 1]) + row[:place]
            previous[place] = values.argmin()
            ends[place] = values[previous[place]]
    cuts: list[int] = []
    place = count
    while place:
        cuts.append(place)
        place = int(previous[place])
    return cuts[::-1]


def _caps_for(program: Program, cuts: Sequence[int]) -> list[float]:
    """Return the caps in MiB that make the reducer form exactly these buckets: each its own size in bytes.

    Exact for parameters of one dtype that hold something, in the order in which their gradients become ready.
    """
    bounds = [0, *cuts]
    return [float(program.size_bytes[low:high].sum()) / MIB for low, high in itertools.pairwise(bounds)]


def _figures(
    program: Program,
    group: Communicator,
    cuts: Sequence[int],
    *,
    cap: float | None = None,
    cap_list: list[float] | None = None,
) -> BucketFigures:
    bounds = [0, *cuts]
    step = max(program.compute_s, finish_s(program, group, cuts))
    buckets = [list(program.parameters[low:high]) for low, high in itertools.pairwise(bounds) if high > low]
    return BucketFigures(
        bucket_cap_mb=cap,
        bucket_cap_mb_list=cap_list,
        buckets=len(buckets),
        step_s=step,
        exposed_s=step - program.compute_s,
        bucket_parameters=buckets,
    )


def bucket_setting(ddp: DdpFigures) -> BucketSetting:
    """Return DDP's buckets for a plan: the simplest of default, single cap and list that is as good as the best."""
    chosen = ddp.best_cap if ddp.best_cap.step_s <= ddp.best.step_s * (1 + _AS_GOOD) else ddp.best
    chosen = ddp.default if ddp.default.step_s <= chosen.step_s * (1 + _AS_GOOD) else chosen
    return BucketSetting(
        bucket_cap_mb=chosen.bucket_cap_mb,
        bucket_cap_mb_list=chosen.bucket_cap_mb_list,
        buckets=chosen.bucket_parameters or [],
        step_s=chosen.step_s,
        default_step_s=ddp.default.step_s,
    )


def _verdict(program: Program, default: BucketFigures, best_cap: BucketFigures, best: BucketFigures) -> str:
    """Return in words what DDP's buckets can gain and what to set."""
    gain, by_cap = share_saved(best.step_s, default.step_s), share_saved(best_cap.step_s, default.step_s)
    text = f"DDP's default leaves {show_seconds(default.exposed_s)} of communication exposed; "
    if gain < SMALL_GAIN:
        text += f"no other buckets save {SMALL_GAIN:.0%} of the step: leave bucket_cap_mb alone."
    elif by_cap >= 0.9 * gain and best_cap.bucket_cap_mb is not None:
        text += f"set bucket_cap_mb={best_cap.bucket_cap_mb:g}: {by_cap:.1%} of the step saved."
    else:
        alone = f"bucket_cap_mb={best_cap.bucket_cap_mb:g} alone" if best_cap.bucket_cap_mb else "no cap alone"
        worth = "worth it" if gain >= CLEAR_GAIN else "a small gain"
        text += f"{best.buckets} buckets by bucket_cap_mb_list save {gain:.1%} ({alone}: {by_cap:.1%}): {worth}."
    return text + program.starved(default.exposed_s)


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

    whole: Floats
    first: Floats
    second: Floats
    encode_s: Floats
    between_s: Floats
    decode_s: Floats
    kept_bytes: float

    @classmethod
    def of(cls, **parts: Floats) -> _Sent:
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
        verdict=_compression_verdict(compression, before, after, work_s, saved),
    )


def _compression_verdict(compression: Compression, before: float, after: float, work_s: float, saved: float) -> str:
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


def matrices(graph: Graph, elements: Floats) -> tuple[Floats, Floats]:
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
