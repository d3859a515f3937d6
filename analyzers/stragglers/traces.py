"""One profiler trace per rank as what each rank did in each step. Start at :func:`of_traces`.

A rank blocks where it runs nothing while a collective is under way and goes on when that ends. Until the last rank has
come to the collective it waits; after that it communicates. The rest of the step is its own: a collective that runs beside
compute costs nothing. Collectives of one kind among the same ranks are matched by their order within a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddltool.analyzers.oracle.kineto import RankTrace, clipped, read_rank, union
from ddltool.analyzers.stragglers.ranks import RankSteps
from ddltool.arrays import Flags, Floats, Indices
from ddltool.errors import InputError
from ddltool.graph import natural_key

_INPUT = re.compile(r"enumerate\(DataLoader\)|data_?load|next_batch|prefetch", re.IGNORECASE)
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)")
_BACKWARD = re.compile(r"autograd::engine::evaluate_function|torch.distributed.ddp.reducer::")
_OPERATOR = re.compile(r"(?!autograd::)[A-Za-z_]\w*::\w+$")
PARTS = ("input", "forward", "backward", "optimizer", "host")
_INPUT_PART, _FORWARD, _BACKWARD_PART, _OPTIMIZER_PART, _HOST, _BLOCKED = range(6)
# A thread that was waiting goes on this soon after the collective's end: the scheduler's doing, not the rank's.
_WAKES_S, _WAKES_SHARE = 2e-3, 0.2
# And may go on before the profiler has noted the end.
_NOTED_SHARE = 0.05
# Clocks of one machine are one clock; further apart they cannot be.
_STEPS_DRAWN = 6
_TURNS = 200


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rank:
    """One rank's steps before the others are known; seconds since the rank's epoch."""

    trace: RankTrace
    step: Floats
    """(3, k) number, start and length."""
    parts: Floats
    """(2, 5, k) before the step's last collective ends, and after it"""
    gap_s: Floats
    """(2, k) likewise"""
    blocked: Floats
    """(4, b) step, start, end and the collective (its column) on which the rank was blocked."""
    keys: list[tuple[int, str, int]]
    """(n,) step, group and ordinal of each collective."""
    work: Floats
    drawn: list[tuple[float, float, str]]


def of_traces(paths: Sequence[Path], advance: Callable[[int, str], None] = lambda done, name: None) -> RankSteps:
    """Return what the ranks of some traces did in the steps that all have, one file a rank.

    One file is in memory at a time, and of each its steps stay. Raises InputError as ``read_steps`` does, for a single
    file, for a rank given twice and for traces without a step in common.
    """
    found = []
    for place, path in enumerate(sorted(paths, key=lambda path: natural_key(str(path)))):
        advance(place, path.name)
        found.append(_split(read_rank(path)))
    if len(found) < 2:
        raise InputError(
            str(paths[0]) if paths else "TRACE", "is the trace of one rank", "give one trace for each rank"
        )
    named = [rank.trace.rank if rank.trace.rank is not None else _in_name(rank.trace.where) for rank in found]
    ranks = [place if None in named else int(name or 0) for place, name in enumerate(named)]
    for place, rank in enumerate(ranks):
        if rank in ranks[:place]:
            raise InputError(
                found[place].trace.where, f"is a second trace of rank {rank}", "give one trace for each rank"
            )
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    return _aligned([found[place] for place in order], tuple(ranks[place] for place in order))


def _in_name(where: str) -> int | None:
    found = re.search(r"rank[-_.]?(\d+)", Path(where).name)
    return int(found[1]) if found else None


def _split(trace: RankTrace) -> _Rank:
    steps, spans = trace.steps, trace.spans
    ends = np.minimum(steps.until_s, np.where(np.isfinite(steps.until_s), np.inf, steps.start_s + steps.length_s))
    # Time between two steps that follow one another is part of the first; where a step was left out it is not.
    ends = np.where(ends - steps.start_s > 1.5 * steps.length_s, steps.start_s + steps.length_s, ends)

    def spans_of(pattern: re.Pattern[str]) -> Floats:
        wanted = np.array([pattern.match(name) is not None for name in trace.names], dtype=bool)[spans.key]
        return np.stack([spans.start_s[wanted], (spans.start_s + spans.duration_s)[wanted]])

    inputs, optimizers, backwards, operators = map(spans_of, (_INPUT, _OPTIMIZER, _BACKWARD, _OPERATOR))
    device = trace.kernels.shape[1] > 0
    busy = union(trace.kernels[:2] if device else operators)
    inputs, optimizers = union(inputs), union(optimizers)
    called = np.sort(trace.collectives[1])
    order = np.argsort(trace.collectives[1], kind="stable")
    counts: dict[tuple[int, str], int] = {}
    keys: list[tuple[int, str, int]] = [(-1, "", 0)] * len(order)
    which = np.searchsorted(steps.start_s, called, side="right") - 1
    for row, at in zip(order.tolist(), which.tolist(), strict=True):
        group = trace.groups[int(trace.collectives[0, row])]
        number = int(steps.number[at]) if at >= 0 else -1
        ordinal = counts.get((number, group), 0)
        counts[number, group] = ordinal + 1
        keys[row] = (number, group, ordinal)
    count = len(steps.start_s)
    parts, gap, blocked = np.zeros((2, 5, count)), np.zeros((2, count)), []
    drawn: list[tuple[float, float, str]] = []
    middle = operators.mean(axis=0)  # what begins where something else ends is not in it
    forward_calls = operators[:, ~_inside(middle, inputs) & ~_inside(middle, optimizers)]
    for k, (low, high) in enumerate(zip(steps.start_s.tolist(), ends.tolist(), strict=True)):
        own_busy = clipped(busy, low, high)
        gaps = np.clip([np.append(low, own_busy[1]), np.append(own_busy[0], high)], low, high)
        gaps = gaps[:, gaps[1] - gaps[0] > 1e-6]
        held = _blocked(gaps, trace.collectives, device)
        blocked += [(k, *row) for row in held]
        back = backwards[:, (backwards[0] >= low) & (backwards[0] < high)]
        first, last = (back[0].min(), back[1].max()) if back.size else (high, high)
        ahead = forward_calls[0][(forward_calls[0] >= low) & (forward_calls[0] < first)]
        windows = [
            (_HOST, np.array([[low], [high]])),
            (_FORWARD, np.array([[ahead.min() if ahead.size else first], [first]])),
            (_BACKWARD_PART, np.array([[first], [last]])),
            (_OPTIMIZER_PART, clipped(optimizers, low, high)),
            (_INPUT_PART, clipped(inputs, low, high)),
            (_BLOCKED, np.array([[row[0] for row in held], [row[1] for row in held]]).reshape(2, -1)),
        ]
        edges, label = _labelled(windows, low, high)
        ended = trace.collectives[2, (trace.collectives[1] >= low) & (trace.collectives[1] < high)]
        met = min(float(ended.max(initial=low)), high) if ended.size else high
        for after, (begin, end) in enumerate(((low, met), (met, high))):
            pieces = _labelled(windows, begin, end)
            if device:
                parts[after, :, k] = _device_parts(trace.kernels, clipped(own_busy, begin, end), *pieces)
            elif end > begin:
                parts[after, :, k] = np.bincount(pieces[1], weights=np.diff(pieces[0]), minlength=6)[:5]
            quiet = (
                min(stop, end) - max(start, begin)
                for start, stop in gaps.T.tolist()
                if not any(a < stop and b > start for a, b, _ in held)
                and not _inside(np.array([(start + stop) / 2]), inputs)[0]
            )
            gap[after, k] = max(quiet, default=0.0)
        if k < _STEPS_DRAWN:
            drawn += [
                (a, b, (*PARTS, "waiting")[part])
                for a, b, part in zip(edges[:-1].tolist(), edges[1:].tolist(), label.tolist(), strict=True)
            ]
    at = steps.at(trace.work[0])
    work = np.bincount(at[at >= 0], weights=trace.work[1][at >= 0], minlength=count)
    return _Rank(
        trace=trace,
        step=np.stack([steps.number.astype(np.float64), steps.start_s, ends - steps.start_s]),
        parts=parts,
        gap_s=gap,
        blocked=np.array(blocked, dtype=np.float64).reshape(-1, 4).T,
        keys=keys,
        work=work.astype(np.float64),
        drawn=drawn,
    )


def _device_parts(kernels: Floats, busy: Floats, edges: Floats, label: Indices) -> Floats:
    """Return (5,) seconds by part: busy the device counts by the phase that launched it; idle it waits for input or host."""
    parts, length = np.zeros(5), np.diff(edges)
    if not len(label):
        return parts
    here = kernels[:, (kernels[0] >= edges[0]) & (kernels[0] < edges[-1])]
    phase = label[np.clip(np.searchsorted(edges, here[2], side="right") - 1, 0, len(label) - 1)]
    phase = np.where(phase == _BLOCKED, _BACKWARD_PART, phase)
    phase = np.where((phase == _HOST) | (phase == _INPUT_PART), _FORWARD, phase)  # the loader's copy to the device, too
    amount = np.bincount(phase, weights=here[1] - here[0], minlength=5)[:5]
    if amount.sum() > 0:
        parts += amount * float((busy[1] - busy[0]).sum()) / amount.sum()
    waits = label == _INPUT_PART
    parts[_INPUT_PART] = _outside(edges[:-1][waits], edges[1:][waits], busy)
    parts[_HOST] = max(float(length[label != _BLOCKED].sum()) - float(parts.sum()), 0.0)
    return parts


def _blocked(gaps: Floats, collectives: Floats, device: bool) -> list[tuple[float, float, int]]:
    """Return where a rank was blocked on which collective: within gaps, up to the end of one that ends the gap."""
    found = []
    for low, high in gaps.T.tolist():
        ending = np.flatnonzero((collectives[2] > low) & (collectives[1] < high))
        if not len(ending):
            continue
        if device:  # kernels of one communicator follow one another
            found += [(max(low, collectives[1, row]), min(high, collectives[2, row]), int(row)) for row in ending]
            continue
        ending = ending[collectives[2, ending] <= high + max(_WAKES_S, _NOTED_SHARE * (high - low))]
        if not len(ending):
            continue
        last = ending[np.argmax(collectives[2, ending])]
        if high - collectives[2, last] > max(_WAKES_S, _WAKES_SHARE * (high - low)):
            continue
        begin = max(low, float(collectives[1, ending].min()))
        if min(high, collectives[2, last]) > begin:
            found.append((begin, float(min(high, collectives[2, last])), int(last)))
    return found


def _aligned(found: list[_Rank], ranks: tuple[int, ...]) -> RankSteps:
    """Return the ranks on one clock, and tell waiting from communicating by when the last rank came."""
    numbers = sorted(set.intersection(*(set(rank.step[0].astype(int).tolist()) for rank in found)))
    if not numbers:
        raise InputError(
            found[0].trace.where, "has no step in common with the others", "profile the same steps on all ranks"
        )
    remarks = [f"{rank.trace.where}: {said}" for rank in found for said in rank.trace.steps.left_out]
    epoch = min(rank.trace.epoch_s for rank in found)
    shift = np.array([rank.trace.epoch_s - epoch for rank in found])
    met, begin, end, alone = _met(found, ranks, set(numbers), shift)
    if alone:
        total = alone + len(met)
        remarks.append(f"{alone} of {total} collectives are not in all their ranks' traces and tell nothing of waiting")
    whole = np.flatnonzero(np.isfinite(end).all(axis=0))  # those of all ranks
    offsets, late = np.zeros(len(found)), None
    nodes = tuple(rank.trace.node for rank in found)
    one_clock = len(set(nodes)) == 1 and nodes[0] != "" and np.ptp(shift) < 86400.0
    if not met:
        remarks.append(
            "no collective is in all its ranks' traces: clocks are not aligned, and all blocked time counts as waiting"
        )
    elif not one_clock:
        offsets = _offsets(end)
    elif len(whole):
        transfer = np.median(end[:, whole], axis=0) - begin[:, whole].max(axis=0)
        longest = {met[at][0]: at for at in whole[np.argsort(transfer, kind="stable")].tolist()}
        at = [longest[number] for number in sorted(longest)]
        late = end[:, at] - end[:, at].min(axis=0)
    last = dict(zip(met, np.nanmax(begin - offsets[:, None], axis=0).tolist() if met else (), strict=True))
    made: dict[str, list[Floats]] = {name: [] for name in ("wait", "exposed", "step", "gap", "work", "parts")}
    timeline = []
    for row, rank in enumerate(found):
        place = {int(number): at for at, number in enumerate(rank.step[0].tolist())}
        kept = np.array([place[number] for number in numbers])
        arrived = np.array([last.get(key, np.inf) for key in rank.keys])
        step, low, high, which = rank.blocked
        move = shift[row] - offsets[row]
        waited = np.clip(arrived[which.astype(int)] - (low + move), 0.0, high - low)
        count = rank.step.shape[1]
        wait = np.bincount(step.astype(int), weights=waited, minlength=count)
        held = np.bincount(step.astype(int), weights=high - low, minlength=count)
        for name, values in (("wait", wait), ("exposed", held - wait), ("step", rank.step[2]), ("work", rank.work)):
            made[name].append(values[kept])
        made["parts"].append(rank.parts[:, :, kept])
        made["gap"].append(rank.gap_s[:, kept])
        timeline.append((f"rank {ranks[row]}", [(a + move, b + move, kind) for a, b, kind in rank.drawn]))
    origin = min((a for _, spans in timeline for a, _, _ in spans), default=0.0)
    parts, gap = np.array(made["parts"]), np.array(made["gap"])
    work = np.array(made["work"])
    return RankSteps(
        ranks=ranks,
        nodes=nodes,
        steps=np.array(numbers, dtype=np.int64),
        parts={name: parts[:, :, place].sum(axis=1) for place, name in enumerate(PARTS)},
        after={name: parts[:, 1, place] for place, name in enumerate(PARTS)},
        wait_s=np.array(made["wait"]),
        exposed_s=np.array(made["exposed"]),
        step_s=np.array(made["step"]),
        gap_s=gap.max(axis=1),
        gap_after_s=gap[:, 1],
        work=work if (work > 0).all() else None,
        offsets_s=offsets,
        late_s=late,
        ring=-1 if all(key[1].startswith("gloo") for key in met) else 1,
        remarks=tuple(remarks),
        timeline=[(name, [(a - origin, b - origin, kind) for a, b, kind in spans]) for name, spans in timeline],
    )


def _met(
    found: list[_Rank], ranks: tuple[int, ...], numbers: set[int], shift: Floats
) -> tuple[list[tuple[int, str, int]], Floats, Floats, int]:
    """Return the collectives that all their ranks have in ``numbers``, begin and end (R, m) of each, and how many are left.

    NaN where a rank has no part: HSDP, tensor and pipeline parallelism communicate among some. Who has is in the group's
    name; all ranks where it is not.
    """
    every = [dict(zip(rank.keys, range(len(rank.keys)), strict=True)) for rank in found]
    seen: dict[tuple[int, str, int], list[int]] = {}
    for row, keys in enumerate(every):
        for key in keys:
            if key[0] in numbers:
                seen.setdefault(key, []).append(row)
    here = set(ranks)
    members = {group: {int(name) for name in re.findall(r"\d+", group.partition("[")[2])} for _, group, _ in seen}
    met = sorted(
        key
        for key, rows in seen.items()
        if len(rows) > 1 and len(rows) >= len(members[key[1]] & here if members[key[1]] else here)
    )
    begin, end = np.full((2, len(found), len(met)), np.nan)
    for column, key in enumerate(met):
        for row in seen[key]:
            begin[row, column], end[row, column] = found[row].trace.collectives[1:, every[row][key]] + shift[row]
    return met, begin, end, len(seen) - len(met)


def _offsets(end: Floats) -> Floats:
    """Return (R,) how far each clock is ahead, by the ends (R, m) of the collectives, which are one moment for all in them.

    Where groups overlap only in part the moments and the clocks are found by turns.
    """
    offsets = np.zeros(len(end))
    for _ in range(_TURNS):
        moment = np.nanmedian(end - offsets[:, None], axis=0)
        change = np.nan_to_num(np.nanmedian(end - offsets[:, None] - moment, axis=1))
        offsets = offsets + change
        if np.abs(change).max() < 1e-8:
            break
    return offsets


def _labelled(windows: list[tuple[int, Floats]], low: float, high: float) -> tuple[Floats, Indices]:
    """Return the edges (n + 1,) of the pieces of a step and the label (n,) of each: that of the last window over it."""
    edges = np.unique(np.clip(np.concatenate([[low, high], *(window.ravel() for _, window in windows)]), low, high))
    middle = (edges[1:] + edges[:-1]) / 2
    label = np.full(len(middle), _HOST, dtype=np.int32)
    for name, window in windows:
        label[_inside(middle, window)] = name
    return edges, label


def _inside(time: Floats, intervals: Floats) -> Flags:
    """Return (n,) whether each moment lies in one of the ordered, disjoint intervals (2, m)."""
    if not intervals.shape[1]:
        return np.zeros(len(time), dtype=bool)
    place = np.searchsorted(intervals[0], time, side="right") - 1
    inside: Flags = (place >= 0) & (time < intervals[1][np.maximum(place, 0)])
    return inside


def _outside(start: Floats, end: Floats, intervals: Floats) -> float:
    """Return how much of some pieces lies in none of the ordered, disjoint intervals (2, m)."""
    pieces = zip(start.tolist(), end.tolist(), strict=True)
    within = (np.clip(intervals[1], a, b) - np.clip(intervals[0], a, b) for a, b in pieces)
    return float((end - start).sum()) - sum(float(each.sum()) for each in within)
