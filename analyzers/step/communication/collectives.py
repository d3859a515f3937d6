"""The communication that data-parallel frameworks leave exposed on a traced step, and which settings shorten it: DDP here,
FSDP2 in :mod:`.fsdp`.

DistributedDataParallel fills buckets with gradients in the order in which these became ready in the first step, closes a
bucket once it holds at least its cap, and all-reduces the buckets one after another, each once its last gradient is ready.
With ``t_j`` the time at which gradient j is ready, a bucket of gradients i+1 to j ends at ``max(end of the bucket before,
t_j) + cost(bytes)``; what lies after the end of backward is exposed. The best division of p gradients into buckets follows by
dynamic programming. Start at :func:`plan_collectives`.

Gradients may also be compressed, to bfloat16 or by PowerSGD of a rank r. Start at :func:`compressed_ddp`.

Both are modelled as torch's communication hooks work, bucket by bucket. ``bf16_compress_hook`` casts a bucket, all-reduces
half of the bytes of float32, and casts back. ``powerSGD_hook`` (Vogels, Karimireddy and Jaggi, NeurIPS 2019, Algorithm 1)
keeps the error of the last step and adds it, multiplies each gradient, seen as a matrix of n rows and m columns, by a matrix
of m x r, all-reduces the n x r result, orthogonalises it, multiplies again, all-reduces m x r, and multiplies back. A tensor of
which that would send more than half (vectors among them) is all-reduced whole. The work is bound by memory: bytes over the
device's rate. It runs on the device between the ops of the backward pass, and delays them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context

import numpy as np

from ddltool.analyzers.step.communication.fsdp import plan_fsdp, prefetch_setting
from ddltool.analyzers.step.communication.nccl import Communicator, Group, Reducer
from ddltool.analyzers.step.communication.program import (
    CLEAR_GAIN,
    SMALL_GAIN,
    Program,
    program_of,
    share_saved,
    stretched,
)
from ddltool.arrays import Floats, Places
from ddltool.errors import InputError
from ddltool.graph import SEND, Graph
from ddltool.graph_results import BucketFigures, CollectiveFigures, DdpFigures
from ddltool.plans import BucketSetting, CompressionFigures, PrefetchSetting
from ddltool.units import show_bytes, show_seconds

MIB = 2**20
DEFAULT_CAP_MIB = 25.0
"""torch's default of ``bucket_cap_mb``: the MiB at which a bucket is closed."""
# torch.distributed._DEFAULT_FIRST_BUCKET_BYTES: only the default configuration begins with a small bucket.
DEFAULT_FIRST_BYTES = 2**20
# Caps (``bucket_cap_mb``, in MiB) to try are found from at most so many ends of buckets, and at most so many are tried.
_MOST_ENDS, _MOST_CAPS = 400, 300
# More buckets have to save this share of the step, because the cost of launching a collective is not in the ring's formula.
_WORTHWHILE_SHARE = 0.001
# How many bucket sizes are timed in one call.
_SUMS_PER_CALL = 2**14
# A simpler setting within this share of the best one's step is preferred.
_EQUAL_SHARE = 0.002
# A single cap is advised where it brings this share of what the best buckets bring.
_MOST_OF_GAIN = 0.9
CAPS_MIB = (1, 2, 4, 8, 10, 16, 25, 32, 50, 64, 100, 128, 200, 256, 400, 512, 800, 1024, 2048, 4096)


def plan_collectives(graph: Graph, group: Group, compute_s: float | None = None) -> CollectiveFigures | None:
    """Return the plans of DDP and FSDP2 for a timed training graph; None for inference, which has no gradients to reduce.

    ``group``: the processes that reduce. ``compute_s``: the seconds of all compute, to which the graph's times are scaled;
    None: they are not scaled.
    """
    if graph.mode != "training" or not len(graph.of_kind(SEND)):
        return None
    program = program_of(graph)
    if compute_s is not None:
        program = stretched(program, compute_s)
    return CollectiveFigures(
        replicas=group.replicas,
        network=group.fabric.text,
        compute_s=program.compute_s,
        ddp=plan_ddp(program, group),
        fsdp2=plan_fsdp(program, group),
    )


def settings(plans: CollectiveFigures) -> tuple[BucketSetting, PrefetchSetting | None]:
    """Return (DDP's buckets, FSDP2's prefetch lists) as a plan stores them; the latter is None for a model without blocks."""
    return bucket_setting(plans.ddp), None if plans.fsdp2 is None else prefetch_setting(plans.fsdp2)


def plan_ddp(program: Program, group: Communicator) -> DdpFigures:
    """Return the default buckets of DDP, the best ``bucket_cap_mb``, and the best buckets of any size. O(p^2) for p gradients.

    The caps that are tried are the usual ones, and those at which the buckets change (all of them for small models, else an
    even selection). Of the caps within 0.1 % of the fastest, the one with the fewest buckets is taken as the best. All
    gradients are taken to be of one dtype, since torch buckets each dtype separately. ``lower_bound_s`` holds for buckets of
    any size: the step takes at least its compute, the last gradient's reduction after it is ready, and the reduction of all
    bytes after the first gradient is ready.
    """
    default = _figures(program, group, default_cuts(program))
    best_cap = _best_cap(program, group)
    # The default has a small first bucket, which no single cap makes, and may be better than all of them.
    if default.step_s <= best_cap.step_s:
        best_cap = default
    elif best_cap.bucket_cap_mb is not None:
        best_cap = best_cap.model_copy(update={"bucket_cap_mb": _fewest_digits(program, best_cap.bucket_cap_mb)})
    cuts = best_cuts(program, group)
    best = _figures(program, group, cuts, cap_list=_caps_of_cuts(program, cuts))
    if best_cap.step_s <= best.step_s:
        best = best_cap
    first_ready_s, last_ready_s = float(program.ready_s[0]), float(program.ready_s[-1])
    reduce_all_s = group.all_reduce_s(float(program.size_bytes.sum()))
    reduce_last_s = group.all_reduce_s(float(program.size_bytes[-1]))
    return DdpFigures(
        default=default,
        best_cap=best_cap,
        best=best,
        lower_bound_s=max(program.compute_s, last_ready_s + reduce_last_s, first_ready_s + reduce_all_s),
        verdict=_verdict(program, default, best_cap, best),
    )


def _best_cap(program: Program, group: Communicator) -> BucketFigures:
    """Return the buckets of the best single cap: of those within ``_WORTHWHILE_SHARE`` of the fastest, the fewest buckets."""
    total_mib = float(program.size_bytes.sum()) / MIB
    usual_caps = {float(cap) for cap in CAPS_MIB if cap < total_mib}
    one_bucket_cap = float(np.ceil(total_mib))
    caps = [*sorted(usual_caps | {one_bucket_cap}), *_breakpoints(program)]
    capped = [_figures(program, group, assign_buckets(program, cap), cap=cap) for cap in caps]
    fastest_s = min(plan.step_s for plan in capped)
    near_best = [plan for plan in capped if plan.step_s <= fastest_s * (1 + _WORTHWHILE_SHARE)]
    return min(near_best, key=lambda plan: (plan.buckets, plan.step_s))


def _breakpoints(program: Program) -> list[float]:
    """Return caps in MiB at which the buckets change: sums of neighbouring gradients, at most ``_MOST_CAPS`` of them.

    A bucket closes once its sum reaches the cap, so only such sums change the buckets. There are p^2 / 2 of them; for a large
    model an even selection of the ends of buckets, and then of the sums, is taken.
    """
    cumulative = np.concatenate(
        [np.zeros(1), np.cumsum(program.size_bytes)]
    )  # bytes of the first 0, 1, ..., p gradients
    ends = np.arange(len(cumulative))
    if len(cumulative) > _MOST_ENDS:
        ends = np.unique(np.linspace(0, len(cumulative) - 1, _MOST_ENDS).astype(np.int64))
    # Below the diagonal, the bytes of the gradients between two ends.
    differences = cumulative[ends][:, None] - cumulative[ends][None, :]
    sums = np.unique(differences[np.tril_indices(len(ends), -1)])
    if len(sums) > _MOST_CAPS:
        sums = sums[np.linspace(0, len(sums) - 1, _MOST_CAPS).astype(np.int64)]
    return [float(value) for value in sums / MIB]


def _fewest_digits(program: Program, cap: float) -> float:
    """Return a cap in MiB with as few digits as possible, for people to copy, that makes the same buckets as ``cap``."""
    cuts = assign_buckets(program, cap)
    for digits in range(1, 8):
        rounded_down = float(Context(prec=digits, rounding=ROUND_FLOOR).create_decimal(cap))
        if rounded_down and assign_buckets(program, rounded_down) == cuts:
            return rounded_down
    return cap


def default_cuts(program: Program) -> list[int]:
    """Return where DDP's default buckets end: exclusive indices of gradients in ready order."""
    return assign_buckets(program, DEFAULT_CAP_MIB, DEFAULT_FIRST_BYTES)


def assign_buckets(program: Program, cap_mib: float, first_bytes: float | None = None) -> list[int]:
    """Return where DDP's buckets end under a cap in MiB: ascending exclusive indices in ready order, the last one p.

    ``first_bytes``: the cap of the first bucket, in bytes; None: the same as the others'.
    """
    limit = cap_mib * MIB if first_bytes is None else first_bytes
    cuts: list[int] = []
    bucket_bytes = 0.0
    for index, size in enumerate(program.size_bytes.tolist()):
        bucket_bytes += size
        if bucket_bytes >= limit:
            cuts.append(index + 1)
            bucket_bytes = 0.0
            limit = cap_mib * MIB  # of every bucket but the first
    if not cuts or cuts[-1] < len(program.parameters):
        cuts.append(len(program.parameters))
    return cuts


def finish_s(program: Program, group: Reducer, cuts: Sequence[int]) -> float:
    """Return when the last bucket is reduced, in seconds from the step's start.

    Buckets are reduced one after another, each once its last gradient is ready. ``cuts``: where they end: ascending exclusive
    indices in ready order, the last one p.
    """
    cumulative = np.concatenate([np.zeros(1), np.cumsum(program.size_bytes)])
    ends = np.array([0, *cuts])
    seconds = group.all_reduce_s(cumulative[ends[1:]] - cumulative[ends[:-1]])
    end_s = 0.0
    for ready_s, reduce_s in zip(program.ready_s[ends[1:] - 1].tolist(), seconds.tolist(), strict=True):
        end_s = max(end_s, ready_s) + reduce_s
    return end_s


def best_cuts(program: Program, group: Reducer) -> list[int]:
    """Return the ``cuts`` (see :func:`finish_s`) with which the last all-reduce ends earliest. O(p^2) vectorised.

    Dynamic programming: the best buckets of the first j gradients are the best ones of the first i, for some i, and one
    bucket of gradients i + 1 to j.
    """
    count = len(program.parameters)
    cumulative = np.concatenate([np.zeros(1), np.cumsum(program.size_bytes)])
    ends_s = np.zeros(count + 1)
    """At index j, the least time at which all buckets of the first j gradients are reduced."""
    previous: Places = np.zeros(count + 1, dtype=np.intp)
    """At index j, where the last of these buckets begins."""
    rows_at_once = max(1, _SUMS_PER_CALL // max(count, 1))
    for first in range(1, count + 1, rows_at_once):
        end_indices = np.arange(first, min(first + rows_at_once, count + 1))
        # (ends, begins) bytes of the bucket between the two; below 0, and not used, where it would begin after its end.
        bucket_bytes = cumulative[end_indices, None] - cumulative[None, : end_indices[-1]]
        reduce_s = group.all_reduce_s(np.maximum(bucket_bytes, 0.0))
        for end_index, row_s in zip(end_indices.tolist(), reduce_s, strict=True):
            candidate_ends_s = np.maximum(ends_s[:end_index], program.ready_s[end_index - 1]) + row_s[:end_index]
            previous[end_index] = candidate_ends_s.argmin()
            ends_s[end_index] = candidate_ends_s[previous[end_index]]
    cuts: list[int] = []
    end_index = count
    while end_index:  # from the last bucket back to the first
        cuts.append(end_index)
        end_index = int(previous[end_index])
    return cuts[::-1]


def _caps_of_cuts(program: Program, cuts: Sequence[int]) -> list[float]:
    """Return the list of caps in MiB with which the reducer forms exactly these buckets: the size of each.

    Exact for parameters of one dtype without empty ones, in the order in which their gradients become ready.
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
    """Return the seconds of the step, and of its exposed communication, with the buckets that end at ``cuts``.

    ``cap`` or ``cap_list``: the setting in MiB that makes these buckets; neither: it is DDP's default.
    """
    bounds = [0, *cuts]
    step_s = max(program.compute_s, finish_s(program, group, cuts))
    buckets = [list(program.parameters[low:high]) for low, high in itertools.pairwise(bounds) if high > low]
    return BucketFigures(
        bucket_cap_mb=cap,
        bucket_cap_mb_list=cap_list,
        buckets=len(buckets),
        step_s=step_s,
        exposed_s=step_s - program.compute_s,
        bucket_parameters=buckets,
    )


def bucket_setting(ddp: DdpFigures) -> BucketSetting:
    """Return DDP's buckets for a plan: the simplest setting whose step is about as short as that of the others.

    A list of caps gives way to a single cap, and that to the default, where the simpler setting's step is longer by at most
    the share ``_EQUAL_SHARE``.
    """
    chosen = ddp.best
    for simpler in (ddp.best_cap, ddp.default):
        if simpler.step_s <= chosen.step_s * (1 + _EQUAL_SHARE):
            chosen = simpler
    return BucketSetting(
        bucket_cap_mb=chosen.bucket_cap_mb,
        bucket_cap_mb_list=chosen.bucket_cap_mb_list,
        buckets=chosen.bucket_parameters or [],
        step_s=chosen.step_s,
        default_step_s=ddp.default.step_s,
    )


def _verdict(program: Program, default: BucketFigures, best_cap: BucketFigures, best: BucketFigures) -> str:
    """Return a text that says what DDP's buckets can gain and what to set: nothing, one cap, or a list of caps.

    ``default``, ``best_cap``, ``best``: the steps with the default buckets, the best single cap, and the best buckets.
    """
    gain = share_saved(best.step_s, default.step_s)
    cap_gain = share_saved(best_cap.step_s, default.step_s)
    text = f"DDP's default leaves {show_seconds(default.exposed_s)} of communication exposed; "
    if gain < SMALL_GAIN:
        text += f"no other buckets save {SMALL_GAIN:.0%} of the step: leave bucket_cap_mb alone."
    elif cap_gain >= _MOST_OF_GAIN * gain and best_cap.bucket_cap_mb is not None:
        text += f"set bucket_cap_mb={best_cap.bucket_cap_mb:g}: {cap_gain:.1%} of the step saved."
    else:
        cap_text = f"bucket_cap_mb={best_cap.bucket_cap_mb:g} alone" if best_cap.bucket_cap_mb else "no cap alone"
        advice = "worth it" if gain >= CLEAR_GAIN else "a small gain"
        text += f"{best.buckets} buckets by bucket_cap_mb_list save {gain:.1%} ({cap_text}: {cap_gain:.1%}): {advice}."
    return text + program.starvation_advice(default.exposed_s)


# Bytes that compression reads and writes per element of 4 bytes: before the all-reduce (encode), between PowerSGD's two, and
# after it (decode). They are the casts to and from bfloat16; and PowerSGD's addition of the error, a copy of it, three
# products, and the new error (torch.distributed.algorithms.ddp_comm_hooks).
_BF16_ENCODE, _BF16_DECODE = 6.0, 6.0
_POWER_ENCODE, _POWER_BETWEEN, _POWER_DECODE = 24.0, 4.0, 16.0
# powerSGD_hook's min_compression_rate: a tensor whose elements are not reduced to one in so many is sent whole.
_LEAST_RATE = 2.0
# Bytes of an element.
_WIDTHS = {"float32": 4.0, "float64": 8.0, "float16": 2.0, "bfloat16": 2.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compression:
    """A compression of gradients."""

    rank: int = 0
    """The rank of PowerSGD; 0: a cast to bfloat16."""

    @property
    def name(self) -> str:
        """The compression's name, as ``--compress`` takes it."""
        return f"powersgd:{self.rank}" if self.rank else "bf16"


def parse_compression(text: str) -> Compression:
    """Return the compression named ``bf16`` or ``powersgd:R``. Raises InputError for another text.

    >>> parse_compression("powersgd:4").rank
    4
    """
    name, _, rank = text.partition(":")
    if text == "bf16":
        return Compression()
    if name == "powersgd" and rank.isdecimal() and 1 <= int(rank) <= 1024:
        return Compression(rank=int(rank))
    remedy = "bf16, or powersgd:R with a rank R from 1 to 1024, such as powersgd:4"
    raise InputError("--compress", f"unknown {text!r}", remedy)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _CompressedSizes:
    """What is all-reduced of each of ``p`` gradients in ready order, and the seconds of work around the all-reduces.

    All arrays are (p,). A gradient is sent uncompressed, or compressed in one all-reduce (a cast) or two (PowerSGD).
    """

    whole: Floats
    """Bytes that are sent uncompressed."""
    first: Floats
    """Bytes of the first compressed all-reduce."""
    second: Floats
    """Bytes of the second one."""
    encode_s: Floats
    """The work before the all-reduces."""
    between_s: Floats
    """The work between the two."""
    decode_s: Floats
    """The work after them."""
    kept_bytes: float
    """The memory for the errors of all gradients, which PowerSGD adds in the next step."""

    @classmethod
    def of(cls, **parts: Floats) -> _CompressedSizes:
        """Return the sizes with the columns (p,) in ``parts``, by name, and zeros for the others; no errors are kept."""
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
    """Return the step with DDP's default buckets compressed, compared with the step without.

    Args:
        graph: the step, for the shapes of its parameters; ``program`` is its timed view.
        group: the processes that reduce.
        memory_bytes_per_s: the device's memory rate, which bounds the work of compressing.
        default_s: seconds of the step with DDP's default buckets uncompressed.

    O(p + e) for p gradients and e edges.
    """
    sent = _compressed_sizes(graph, program, compression, memory_bytes_per_s)
    cuts = default_cuts(program)
    step_s = _finish_compressed_s(program, group, sent, cuts)
    work_s = float((sent.encode_s + sent.between_s + sent.decode_s).sum())
    before_bytes = float(program.size_bytes.sum())
    sent_bytes = float((sent.whole + sent.first + sent.second).sum())
    saved = share_saved(step_s, default_s)
    return CompressionFigures(
        name=compression.name,
        sent_bytes=sent_bytes,
        uncompressed_bytes=before_bytes,
        compute_s=work_s,
        kept_bytes=sent.kept_bytes,
        step_s=step_s,
        exposed_s=step_s - program.compute_s,
        saved=saved,
        verdict=_compression_verdict(compression, before_bytes, sent_bytes, work_s, saved),
    )


def _compression_verdict(
    compression: Compression, before_bytes: float, sent_bytes: float, work_s: float, saved: float
) -> str:
    """Return a text that says what compression saves.

    ``before_bytes``, ``sent_bytes``: of all gradients as they are and as they are sent; ``work_s``: of compressing them;
    ``saved``: the share of DDP's default step that is saved, negative: the step takes longer.
    """
    sizes = f"{show_bytes(sent_bytes)} in place of {show_bytes(before_bytes)}"
    text = f"{compression.name} would send {sizes} for {show_seconds(work_s)} of work: "
    if sent_bytes >= before_bytes:
        return text + "nothing to gain, the gradients are as small already."
    loss = "" if compression.rank == 0 else "; what its error costs in steps is not predicted"
    if saved >= SMALL_GAIN:
        return text + f"{saved:.1%} of DDP's default step saved{loss}."
    return text + ("not worth it." if saved >= 0 else f"the step takes {-saved:.1%} longer.")


def _compressed_sizes(
    graph: Graph, program: Program, compression: Compression, memory_bytes_per_s: float
) -> _CompressedSizes:
    """Return the bytes that each gradient sends compressed, and the seconds of work at ``memory_bytes_per_s``.

    A cast to bfloat16 sends two bytes per element, and nothing is cast that is as narrow already. PowerSGD sends rows x rank,
    then columns x rank elements of a matrix; a gradient of which that would be half or more (``_LEAST_RATE``) is sent whole.
    """
    element_bytes = _element_bytes(graph)
    elements = program.size_bytes / element_bytes
    if compression.rank == 0:
        if element_bytes <= _WIDTHS["bfloat16"]:
            return _CompressedSizes.of(whole=program.size_bytes)
        work_s = elements / memory_bytes_per_s
        sent_bytes = elements * _WIDTHS["bfloat16"]
        return _CompressedSizes.of(first=sent_bytes, encode_s=work_s * _BF16_ENCODE, decode_s=work_s * _BF16_DECODE)
    rows, columns = matrices(graph, elements)
    rank = np.minimum(compression.rank, np.minimum(rows, columns))  # a matrix's rank is at most its shorter side
    is_compressed = (rows + columns) * compression.rank * _LEAST_RATE < elements
    # The constants of work are bytes for elements of 4 bytes; others take proportionally.
    traffic_s = np.where(is_compressed, elements * element_bytes / 4.0, 0.0) / memory_bytes_per_s
    return _CompressedSizes(
        whole=np.where(is_compressed, 0.0, program.size_bytes),
        first=np.where(is_compressed, rows * rank * element_bytes, 0.0),
        second=np.where(is_compressed, columns * rank * element_bytes, 0.0),
        encode_s=traffic_s * _POWER_ENCODE,
        between_s=traffic_s * _POWER_BETWEEN,
        decode_s=traffic_s * _POWER_DECODE,
        kept_bytes=float(program.size_bytes.sum()),
    )


def _element_bytes(graph: Graph) -> float:
    """Return the bytes of a gradient's element: from the parameters' bytes and elements if both are known, else by dtype."""
    elements = graph.meta.get("parameter_elements")
    if isinstance(elements, (int, float)) and elements > 0:
        return graph.parameter_bytes / float(elements)
    return _WIDTHS.get(str(graph.meta.get("dtype")), 4.0)


def matrices(graph: Graph, elements: Floats) -> tuple[Floats, Floats]:
    """Return (p,) rows and (p,) columns of gradients with ``elements`` (p,), guessed from the shapes of the graph's products.

    A gradient with as many elements as the factor (n, k) of some product has that shape. Any other one (an embedding's) gets
    the most frequent n or k that divides its number of elements as its columns. A number of elements that is such an n or k
    itself is taken for a vector, with 1 row.
    """
    factors: dict[float, tuple[float, float]] = {}  # by number of elements, rows and columns of a weight
    widths: Counter[float] = Counter()
    # columns: count, m, n, k; single products first: those of attention, one for each head, have no weights
    for count, _, n, k in sorted(graph.gemm[graph.gemm[:, 1] > 0].tolist(), key=lambda product: float(product[0])):
        factors.setdefault(count * n * k, (count * n, k))
        widths.update((n, k))
    common_widths = [width for width, _ in widths.most_common() if width > 1]

    def shape_of(size: float) -> tuple[float, float]:
        """Return (rows, columns) of a gradient of ``size`` elements."""
        if size in factors:
            return factors[size]
        if size in widths:  # a vector
            return 1.0, size
        divisor = next((width for width in common_widths if width < size and size % width == 0), None)
        return (1.0, size) if divisor is None else (size / divisor, divisor)

    # Rounded, because bytes over an average width may miss a whole number.
    shapes = [shape_of(float(round(size))) for size in elements.tolist()]
    rows, columns = np.array(shapes, dtype=np.float64).reshape(-1, 2).T
    return rows, columns


def _finish_compressed_s(program: Program, group: Communicator, sent: _CompressedSizes, cuts: Sequence[int]) -> float:
    """Return the seconds at which the step with compressed buckets ends.

    The device encodes and decodes between the ops of the backward pass, which delays the ops that follow. ``sent``: what each
    gradient sends; ``cuts``: where buckets end, ascending exclusive indices in ready order, the last one p.
    """
    network_s = 0.0  # when the network is free again
    encode_delay_s = 0.0  # by how much encoding has delayed the backward pass so far
    decoded_s = 0.0  # work of decoding so far, and of the work between all-reduces
    last_decode_s = 0.0  # decoding of the last bucket
    for low, high in itertools.pairwise([0, *cuts]):
        bucket = slice(low, high)
        encode_delay_s += float(sent.encode_s[bucket].sum())
        ready_s = float(program.ready_s[high - 1]) + encode_delay_s
        between_s = float(sent.between_s[bucket].sum())
        sizes = np.array([float(part[bucket].sum()) for part in (sent.whole, sent.first, sent.second)])
        reduce_s = np.where(sizes > 0, group.all_reduce_s(sizes), 0.0).sum()
        network_s = max(network_s, ready_s) + float(reduce_s) + between_s
        last_decode_s = float(sent.decode_s[bucket].sum())
        decoded_s += last_decode_s + between_s
    # Decoding delays the backward pass, too, except for the last bucket, which is decoded after its all-reduce.
    backward_end_s = program.compute_s + encode_delay_s + decoded_s - last_decode_s
    return max(backward_end_s, network_s) + last_decode_s
