"""Measured times for a graph's ops, matched with the calls of a profiler trace by type and order.

The k-th call of a type in a step is the k-th op of that type. A model that runs eagerly calls composite operators
(``aten::linear``) around the graph's ops (``aten::addmm``): the outermost call of a type in the graph counts. Graphs
carry no shapes, so shapes are not compared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from ddltool.analyzers.step.measured.kineto import ProfilerTrace
from ddltool.analyzers.step.recording.op_rules import normal_type
from ddltool.arrays import Flags, Floats, Indices, Places
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, Estimate, Graph

# Ranges whose operators are no part of the step's graph, which ends with the gradients.
_OUTSIDE_RANGES = (
    "Optimizer.",
    "torch::autograd::AccumulateGrad",
    "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
    "torch::distributed::reducer::",
    "torch.distributed.ddp.reducer::",
)

LEAST_MATCHED_TIME = 0.45
"""Least share of a trace's time that the graph's ops must take; a trace with less is of another model."""
# How many types, and how many calls, a line of remarks names.
_TYPES_SHOWN, _CALLS_SHOWN = 6, 5
Names = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Match:
    """The times that a trace gives to a graph of ``n`` ops, and how well the two match."""

    durations: Floats
    """(n,) seconds, the least over the steps; 0 for free ops, NaN for transfers and unmatched ops."""
    measured: Flags
    """(n,) whether the duration was measured."""
    matched_ops: float
    """Share of the compute ops that cost something (0 to 1)."""
    matched_time: float
    """Share (0 to 1) of the time of the trace's operator calls that matched calls take; in a trace with kernels, their time.

    Calls of the optimizer, the reducer and gradient accumulation are left out, because they are no part of a graph.
    Of a type with c calls per step for g ops, ``min(c, g) / max(c, g)`` of the time counts as matched.
    """
    steps: int
    """Number of steps, or repetitions, over which the least was taken."""
    unmatched_types: tuple[tuple[str, int], ...]
    """Types of ops without a time, and how many of each, most first."""
    unmatched_calls: tuple[tuple[str, int, float], ...]
    """Unmatched operators: name, number of calls and their total seconds, longest first."""
    inexact_types: tuple[str, ...]
    """Types with more or fewer calls per step than ops: all their ops get the mean time of a call."""

    def lines(self) -> list[str]:
        """Return lines of text: the matched shares, then unmatched ops, unmatched calls and inexact types, if any."""
        lines = [
            f"trace matched by type and order: {self.matched_ops:.1%} of the ops, {self.matched_time:.1%} of the trace's time, "
            f"least of {self.steps} step(s)"
        ]
        if self.unmatched_types:
            shown = ", ".join(f"{name} x{count}" for name, count in self.unmatched_types[:_TYPES_SHOWN])
            lines.append(f"ops without a time in the trace (scaled roofline instead): {shown}")
        if self.unmatched_calls:
            shown_calls = self.unmatched_calls[:_CALLS_SHOWN]
            shown = ", ".join(f"{name} x{calls} ({seconds:.3g} s)" for name, calls, seconds in shown_calls)
            lines.append(f"in the trace but not in the graph: {shown}")
        if self.inexact_types:
            shown = ", ".join(self.inexact_types[:_TYPES_SHOWN])
            lines.append(f"called more or less often than in the graph, mean taken: {shown}")
        return lines


def match(graph: Graph, trace: ProfilerTrace) -> Match:
    """Return the times that a trace gives to a graph's compute ops. O(m log m) for m spans.

    An op's time is that of its kernels if it launched any, else its CPU time without waits for the device. The least over
    the steps is taken, as by the paper's time oracle (TicTac, section 5). A trace in which nothing matches raises no error
    here; :func:`apply` raises it.
    """
    is_compute = graph.kind == COMPUTE
    is_free = np.array([mark == "free" for mark in graph.estimate], dtype=bool)
    costly_ops = np.flatnonzero(is_compute & ~is_free)
    durations = np.full(len(graph), np.nan)
    calls = _candidate_calls(graph, costly_ops, trace)
    steps, inexact, agreement = _fill_by_type(graph, costly_ops, trace, calls, durations)
    is_measured = ~np.isnan(durations)  # only costly ops have a time so far
    durations[is_compute & is_free] = 0.0
    unmatched_types = Counter(graph.op_type[op] for op in costly_ops if not is_measured[op])
    unmatched_calls, matched_time = _unmatched_calls(trace, calls, agreement)
    return Match(
        durations=durations,
        measured=is_measured,
        matched_ops=float(is_measured.sum()) / max(len(costly_ops), 1),
        matched_time=matched_time,
        steps=steps,
        unmatched_types=tuple(sorted(unmatched_types.items(), key=lambda item: (-item[1], item[0]))),
        unmatched_calls=unmatched_calls,
        inexact_types=inexact,
    )


def apply(graph: Graph, match: Match, fallback: Graph) -> Graph:
    """Return ``fallback`` with the times of the match in it, as :func:`with_measured` puts them there.

    ``fallback``: the same graph as ``graph``, timed by the roofline. Raises InputError if the graphs differ, if nothing
    matched, or if less than :data:`LEAST_MATCHED_TIME` of the trace's time did.
    """
    if graph.names != fallback.names or not fallback.timed:
        raise InputError("fallback", f"is not {graph.name} with every op timed", "estimate the same graph")
    if not match.measured.any():
        shown = ", ".join(name for name, _, _ in match.unmatched_calls[:_CALLS_SHOWN]) or "no operator calls"
        problem = f"no op of {graph.name} occurs in the trace (it has {shown})"
        raise InputError("--oracle", problem, "give a trace of the same model")
    if match.matched_time < LEAST_MATCHED_TIME:
        problem = f"only {match.matched_time:.0%} of its time is that of ops of {graph.name}: a trace of another model"
        remedy = f"give a trace of the same model, with {LEAST_MATCHED_TIME:.0%} of its time matched or more"
        raise InputError("--oracle", problem, remedy)
    meta = {**fallback.meta, "oracle": "profiler trace", "oracle_steps": match.steps}
    return with_measured(replace(fallback, meta=meta), match.durations, match.measured)


def with_measured(fallback: Graph, durations: Floats, measured: Flags) -> Graph:
    """Return the timed graph ``fallback`` with ``durations`` (n,) in seconds in its compute ops.

    ``durations`` are NaN for an unknown time and 0 for free ops; ``measured`` (n,) says which were measured. An op of
    unknown time gets its fallback time times the median ratio of measured to fallback time over the ops of its type, or
    over all measured ops where its type has none. Compute ops are marked ``measured``, ``default`` (scaled) or ``free``;
    transfers keep the fallback's time and mark.
    """
    is_compute = fallback.kind == COMPUTE
    is_unmeasured = is_compute & np.isnan(durations)
    has_both = measured & (durations > 0) & (fallback.duration_s > 0)
    # Where one of the times is unknown the ratio stays 1, and is never read.
    ratio = np.divide(durations, fallback.duration_s, out=np.ones(len(fallback)), where=has_both)
    types = np.array(fallback.op_type)
    seconds = np.where(is_compute, durations, fallback.duration_s)
    for name in np.unique(types[is_unmeasured]):
        is_of_type = types == name
        has_ratio = has_both & is_of_type
        if not has_ratio.any():  # no op of this type was measured
            has_ratio = has_both
        scale = float(np.median(ratio[has_ratio])) if has_ratio.any() else 1.0
        to_scale = is_unmeasured & is_of_type
        seconds[to_scale] = fallback.duration_s[to_scale] * scale
    marks: list[Estimate | None] = list(fallback.estimate)
    for op in np.flatnonzero(is_compute):
        if measured[op]:
            marks[op] = "measured"
        else:
            marks[op] = "default" if is_unmeasured[op] else "free"
    return fallback.with_durations(seconds, marks)


def _candidate_calls(graph: Graph, costly_ops: Places, trace: ProfilerTrace) -> Places:
    """Return the indices of the spans that may be ops of the graph, sorted by start.

    They are the outermost operator calls of the types of ``costly_ops`` (indices of ops of the graph): calls within an op are
    part of it. Calls in the optimizer, the reducer or the accumulation of gradients are left out, because the graph ends with
    the gradients; so are calls outside the steps, if the trace marks steps.
    """
    types = {normal_type(graph.op_type[op]) for op in costly_ops}
    is_candidate = trace.is_operator & trace.marked(lambda name: normal_type(name) in types)
    is_outside = trace.marked(lambda name: name.startswith(_OUTSIDE_RANGES))
    is_candidate &= ~trace.spans.below(is_outside) & ~is_outside
    if trace.steps:
        is_candidate &= trace.span_step >= 0
    is_outermost = is_candidate & ~trace.spans.below(is_candidate)
    span_indices = np.flatnonzero(is_outermost)
    return span_indices[np.argsort(trace.spans.start_s[span_indices], kind="stable")]


def _fill_by_type(
    graph: Graph, costly_ops: Places, trace: ProfilerTrace, calls: Places, durations: Floats
) -> tuple[int, Names, Floats]:
    """Fill ``durations`` (n,) in place, type by type: the k-th op gets the least time of the k-th call over the steps.

    Only steps with as many calls of the type as there are ops are used. If there is none, all ops of the type get the mean
    time of a call in the step in which this mean is least.

    Args:
        costly_ops: the graph's ops that cost something.
        calls: (c,) indices of the spans that may be ops, by start.

    Returns the number of steps, the types with other counts of calls than of ops, and (c,) for each call how well the
    counts of its type agree (0 to 1).
    """
    agreement = np.ones(len(calls))
    types = np.array([normal_type(graph.op_type[op]) for op in costly_ops], dtype=str)
    type_names, type_of_op = np.unique(types, return_inverse=True)
    type_indices = {name: index for index, name in enumerate(type_names.tolist())}
    type_of_name = np.array([type_indices.get(normal_type(name), -1) for name in trace.names], dtype=np.intp)
    type_of_call = type_of_name[trace.spans.key[calls]]
    step_of_call = trace.span_step[calls] if trace.steps else _repetitions(type_of_op, type_of_call)
    inexact: list[str] = []
    for name, type_index in type_indices.items():
        rows = np.flatnonzero(type_of_call == type_index)  # of ``calls``, those of the type
        op_indices = costly_ops[type_of_op == type_index]
        if not len(rows):
            continue
        steps_of_rows = step_of_call[rows]
        times_by_step = [trace.time_s[calls[rows[steps_of_rows == step]]] for step in np.unique(steps_of_rows)]
        exact_times = [times for times in times_by_step if len(times) == len(op_indices)]
        if exact_times:
            durations[op_indices] = np.min(exact_times, axis=0)
            continue
        durations[op_indices] = min(times.mean() for times in times_by_step)
        inexact.append(name)
        mean_calls = float(np.mean([len(times) for times in times_by_step]))
        agreement[rows] = min(mean_calls, len(op_indices)) / max(mean_calls, len(op_indices))
    steps = trace.steps or int(step_of_call.max(initial=0)) + 1
    return steps, tuple(inexact), agreement


def _repetitions(type_of_op: Places, type_of_call: Places) -> Indices:
    """Return (c,) the number of the repetition of the step to which each call belongs, for a trace that marks no steps.

    There are as many repetitions as the most common ratio of calls to ops among the types for which it is whole. All calls
    of a type with another ratio are put in repetition 0. ``type_of_op`` (ops,), ``type_of_call`` (c,): the index of the type
    of each op and of each call, none of them -1.
    """
    type_count = int(type_of_op.max(initial=-1)) + 1
    op_counts, call_counts = np.bincount(type_of_op), np.bincount(type_of_call, minlength=type_count)
    is_multiple = (call_counts > 0) & (call_counts % np.maximum(op_counts, 1) == 0)
    ratios = Counter((call_counts[is_multiple] // op_counts[is_multiple]).tolist())
    repetition = np.zeros(len(type_of_call), dtype=np.int32)
    if not ratios:
        return repetition
    [(common_ratio, _)] = ratios.most_common(1)
    for type_index in np.flatnonzero(is_multiple):
        if call_counts[type_index] == op_counts[type_index] * common_ratio:
            call_rows = np.flatnonzero(type_of_call == type_index)
            repetition[call_rows] = np.arange(len(call_rows)) // op_counts[type_index]
    return repetition


def _unmatched_calls(
    trace: ProfilerTrace, calls: Places, agreement: Floats
) -> tuple[tuple[tuple[str, int, float], ...], float]:
    """Return the operators that no op of the graph matches, and the share (0 to 1) of the trace's time that is matched.

    The operators are rows (name, number of calls, seconds of all calls), longest first.

    The time of a composite call counts without its matched descendants; calls outside the steps do not count. In a trace
    with kernels, times are of the device, because the host runs ahead of it. ``calls`` (c,): indices of the matched spans;
    ``agreement`` (c,): the part of the time of each that counts as matched.
    """
    spans = trace.spans
    has_kernels = trace.device_s.any()
    time = trace.device_s if has_kernels else trace.time_s
    is_matched = np.zeros(len(spans), dtype=bool)
    is_matched[calls] = True
    matched_s = spans.with_nested(np.where(is_matched, time, 0.0))
    is_in_step = (trace.span_step >= 0) | (not trace.steps)
    top = np.flatnonzero(trace.is_top & is_in_step)  # operator calls outside all others
    unmatched_s = np.maximum(time[top] - matched_s[top], 0.0)
    call_counts = np.bincount(spans.key[top[~is_matched[top]]], minlength=len(trace.names))
    seconds = np.bincount(spans.key[top], weights=unmatched_s, minlength=len(trace.names))
    rows = [(trace.names[key], int(call_counts[key]), float(seconds[key])) for key in np.flatnonzero(call_counts)]
    rows_by_time = sorted(rows, key=lambda row: (-row[2], row[0]))
    # The share is of the time of calls in the graph's passes, without the optimizer and the like.
    is_outside = trace.marked(lambda name: name.startswith(_OUTSIDE_RANGES))
    is_top_outside = (is_outside | spans.below(is_outside))[top]
    inside = top[~is_top_outside]
    total_s = float(time[inside].sum())
    if total_s <= 0:
        return tuple(rows_by_time), 0.0
    # Not matched are the time that no call matched, and a part of matched calls whose number does not agree with the graph.
    disagreeing_s = np.zeros(len(spans))
    disagreeing_s[calls] = time[calls] * (1.0 - agreement)
    lost_s = float(unmatched_s[~is_top_outside].sum() + spans.with_nested(disagreeing_s)[inside].sum())
    return tuple(rows_by_time), max(total_s - lost_s, 0.0) / total_s
