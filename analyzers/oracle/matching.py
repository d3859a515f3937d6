"""Measured times for a graph's ops: which calls in a profiler trace are which ops.

The k-th call of a type in a step is the k-th op of that type. A model that runs eagerly calls composite operators
(``aten::linear``) around those a graph is made of (``aten::addmm``): the outermost call whose type the graph has is the
one that counts. Graphs carry no shapes, so shapes decide nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from ddltool.analyzers.oracle.kineto import ProfilerTrace
from ddltool.analyzers.tracing.op_rules import normal_type
from ddltool.arrays import Flags, Floats, Indices, Places
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, Estimate, Graph

# What runs here is no part of the step's graph: it ends where gradients leave.
_OUTSIDE = (
    "Optimizer.",
    "torch::autograd::AccumulateGrad",
    "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
    "torch::distributed::reducer::",
    "torch.distributed.ddp.reducer::",
)

LEAST_MATCHED_TIME = 0.45
"""A trace in which less of the time is the graph's is of another model."""
Names = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Match:
    """What the trace says about a graph of ``n`` ops."""

    durations: Floats
    """(n,) seconds: the least over the steps; 0 for ops that cost nothing; NaN for transfers and where unmatched."""
    measured: Flags
    """(n,) whether the duration was measured."""
    matched_ops: float
    """Share of the compute ops that cost something (0 to 1)."""
    matched_time: float
    """Share of the time of the trace's operator calls (of their kernels, if it has any) that ops of the graph took.

    The optimizer's, the reducer's and gradient accumulation's calls are left out: they are no part of a graph.
    Of a type that is called c times a step for g ops, ``min(c, g) / max(c, g)`` of the time counts.
    """
    steps: int
    """Steps, or repetitions, that the least was taken over."""
    unmatched_types: tuple[tuple[str, int], ...]
    """Types of ops without a time, and how many of each, most first."""
    unmatched_calls: tuple[tuple[str, int, float], ...]
    """Operators that are no op of the graph: name, calls and seconds in sum, longest first."""
    inexact_types: tuple[str, ...]
    """Types called more or less often per step than the graph has them: their ops all got the mean call."""

    def lines(self) -> list[str]:
        """Return what was and was not found in a profiler trace, a line each."""
        lines = [
            f"trace matched by type and order: {self.matched_ops:.1%} of the ops, {self.matched_time:.1%} of the trace's time, "
            f"least of {self.steps} step(s)"
        ]
        if self.unmatched_types:
            shown = ", ".join(f"{name} x{count}" for name, count in self.unmatched_types[:6])
            lines.append(f"ops without a time in the trace (scaled roofline instead): {shown}")
        if self.unmatched_calls:
            shown = ", ".join(f"{name} x{calls} ({seconds:.3g} s)" for name, calls, seconds in self.unmatched_calls[:5])
            lines.append(f"in the trace but not in the graph: {shown}")
        if self.inexact_types:
            shown = ", ".join(self.inexact_types[:6])
            lines.append(f"called more or less often than in the graph, mean taken: {shown}")
        return lines


def match(graph: Graph, trace: ProfilerTrace) -> Match:
    """Return the times that a trace gives to a graph's compute ops. O(m log m) for m spans.

    An op takes its kernels' time where it launched any, else its CPU time without waits for the device. Over several
    steps the least counts, as in the paper's time oracle (TicTac, section 5). Nothing matched is no error here.
    """
    wanted = np.flatnonzero((graph.kind == COMPUTE) & np.array([mark != "free" for mark in graph.estimate], dtype=bool))
    durations = np.full(len(graph), np.nan)
    taken = _calls(graph, wanted, trace)
    steps, inexact, agreement = _by_type(graph, wanted, trace, taken, durations)
    measured = ~np.isnan(durations)
    measured[np.setdiff1d(np.arange(len(graph)), wanted)] = False
    durations[(graph.kind == COMPUTE) & ~np.isin(np.arange(len(graph)), wanted)] = 0.0
    missing = Counter(graph.op_type[op] for op in wanted if not measured[op])
    unmatched, share = _rest(trace, taken, agreement)
    return Match(
        durations=durations,
        measured=measured,
        matched_ops=float(measured.sum()) / max(len(wanted), 1),
        matched_time=share,
        steps=steps,
        unmatched_types=tuple(sorted(missing.items(), key=lambda item: (-item[1], item[0]))),
        unmatched_calls=unmatched,
        inexact_types=inexact,
    )


def apply(graph: Graph, match: Match, fallback: Graph) -> Graph:
    """Return ``fallback`` (the same graph, timed by the roofline) with the measured times in it.

    See :func:`with_measured` for ops without a measurement. Raises InputError when nothing matched, or less than
    :data:`LEAST_MATCHED_TIME`, and when the graphs differ.
    """
    if graph.names != fallback.names or not fallback.timed:
        raise InputError("fallback", f"is not {graph.name} with every op timed", "estimate the same graph")
    if not match.measured.any():
        shown = ", ".join(name for name, _, _ in match.unmatched_calls[:5]) or "no operator calls"
        problem = f"no op of {graph.name} occurs in the trace (it has {shown})"
        raise InputError("--oracle", problem, "give a trace of the same model")
    if match.matched_time < LEAST_MATCHED_TIME:
        problem = f"only {match.matched_time:.0%} of its time is that of ops of {graph.name}: a trace of another model"
        remedy = f"give a trace of the same model, with {LEAST_MATCHED_TIME:.0%} of its time matched or more"
        raise InputError("--oracle", problem, remedy)
    meta = {**fallback.meta, "oracle": "profiler trace", "oracle_steps": match.steps}
    return with_measured(replace(fallback, meta=meta), match.durations, match.measured)


def with_measured(fallback: Graph, durations: Floats, measured: Flags) -> Graph:
    """Return a timed graph with ``durations`` (n,) in its compute ops: NaN without one, 0 for what costs nothing.

    An op without a measurement gets its fallback time times the median ratio of measured to fallback over the ops of its
    type that have both, or over all ops where none of its type has; it is marked ``default``, a ``measured`` one so, others
    ``free``. Transfers keep the fallback's time and mark.
    """
    compute = fallback.kind == COMPUTE
    rest = compute & np.isnan(durations)
    both = measured & (durations > 0) & (fallback.duration_s > 0)
    ratio = np.divide(durations, fallback.duration_s, out=np.ones(len(fallback)), where=both)
    types = np.array(fallback.op_type)
    made = np.where(compute, durations, fallback.duration_s)
    for name in np.unique(types[rest]):
        rows, alike = rest & (types == name), both & (types == name)
        known = ratio[alike if alike.any() else both]
        made[rows] = fallback.duration_s[rows] * (float(np.median(known)) if known.size else 1.0)
    marks: list[Estimate | None] = list(fallback.estimate)
    for op in np.flatnonzero(compute):
        marks[op] = "measured" if measured[op] else "default" if rest[op] else "free"
    return fallback.with_durations(made, marks)


def _calls(graph: Graph, wanted: Places, trace: ProfilerTrace) -> Places:
    """Return the spans that may be ops of the graph, by start: the outermost of its types, in steps if there are any."""
    types = {normal_type(graph.op_type[op]) for op in wanted}
    fits = trace.is_operator & trace.marked(lambda name: normal_type(name) in types)
    outside = trace.marked(lambda name: name.startswith(_OUTSIDE))
    fits &= ~trace.spans.below(outside) & ~outside
    if trace.steps:
        fits &= trace.span_step >= 0
    rows = np.flatnonzero(fits & ~trace.spans.below(fits))
    return rows[np.argsort(trace.spans.start_s[rows], kind="stable")]


def _by_type(
    graph: Graph, wanted: Places, trace: ProfilerTrace, calls: Places, durations: Floats
) -> tuple[int, Names, Floats]:
    """Fill in times type by type, k-th op from k-th call of a step.

    Return the steps, the types whose counts differ, and for each call how far its type's counts agree (0 to 1).
    """
    agreement = np.ones(len(calls))
    types = np.array([normal_type(graph.op_type[op]) for op in wanted], dtype=str)
    names, ops = np.unique(types, return_inverse=True)
    number = {name: place for place, name in enumerate(names.tolist())}
    of_key = np.array([number.get(normal_type(name), -1) for name in trace.names], dtype=np.intp)
    called = of_key[trace.spans.key[calls]]
    step = trace.span_step[calls] if trace.steps else _repetitions(ops, called)
    inexact: list[str] = []
    for name, at in number.items():
        rows, places = np.flatnonzero(called == at), wanted[ops == at]
        if not len(rows):
            continue
        per_step = [trace.time_s[calls[rows[step[rows] == each]]] for each in np.unique(step[rows])]
        whole = [times for times in per_step if len(times) == len(places)]
        if whole:
            durations[places] = np.min(whole, axis=0)
        else:
            durations[places] = min(times.mean() for times in per_step)
            inexact.append(name)
            called_per_step = float(np.mean([len(times) for times in per_step]))
            agreement[rows] = min(called_per_step, len(places)) / max(called_per_step, len(places))
    return trace.steps or int(step.max(initial=0)) + 1, tuple(inexact), agreement


def _repetitions(ops: Places, types: Places) -> Indices:
    """Return the repetition of each call, for a trace that marks no steps.

    There are as many as most types' counts say, where these are whole multiples of the graph's; a type that does not
    fit is one repetition of its own.
    """
    count, seen = np.bincount(ops), np.bincount(types, minlength=int(ops.max(initial=-1)) + 1)
    fits = (seen > 0) & (seen % np.maximum(count, 1) == 0)
    times = Counter((seen[fits] // count[fits]).tolist()).most_common(1)
    found = np.zeros(len(types), dtype=np.int32)
    for number in np.flatnonzero(fits) if times else []:
        if seen[number] == count[number] * times[0][0]:
            rows = np.flatnonzero(types == number)
            found[rows] = np.arange(len(rows)) // count[number]
    return found


def _rest(trace: ProfilerTrace, taken: Places, agreement: Floats) -> tuple[tuple[tuple[str, int, float], ...], float]:
    """Return the operators that no op took with their calls and seconds, and the share of time that was taken.

    Of a composite call only what its taken parts leave is counted. Calls outside the steps are not. In a trace with
    kernels it is their time that is shared out: the host runs ahead, and its time is not the step's.
    """
    spans = trace.spans
    time = trace.device_s if trace.device_s.any() else trace.time_s
    is_taken = np.zeros(len(spans), dtype=bool)
    is_taken[taken] = True
    rows = trace.is_top & ((trace.span_step >= 0) | (not trace.steps))
    inside = spans.with_nested(np.where(is_taken, time, 0.0))
    doubted = np.zeros(len(spans))
    doubted[taken] = time[taken] * (1.0 - agreement)
    top = np.flatnonzero(rows)
    left = np.maximum(time[top] - inside[top], 0.0)
    count = np.bincount(spans.key[top[~is_taken[top]]], minlength=len(trace.names))
    seconds = np.bincount(spans.key[top], weights=left, minlength=len(trace.names))
    found = [(trace.names[key], int(count[key]), float(seconds[key])) for key in np.flatnonzero(count)]
    listed = sorted(found, key=lambda row: (-row[2], row[0]))
    outside = trace.marked(lambda name: name.startswith(_OUTSIDE))
    aside = (outside | spans.below(outside))[top]
    total, left = float(time[top[~aside]].sum()), left[~aside]
    lost = float(left.sum() + spans.with_nested(doubted)[top[~aside]].sum())
    return tuple(listed), max(total - lost, 0.0) / total if total > 0 else 0.0
