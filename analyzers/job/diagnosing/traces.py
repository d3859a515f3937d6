"""Splits the steps of several ranks into their parts, from one profiler trace per rank. Start at :func:`of_traces`.

A rank is blocked where it computes nothing while a collective runs, up to that collective's end: it waits until the last
rank has joined, then it communicates. The rest of a step is the rank's own work; a collective hidden by compute costs nothing.
Collectives of one group are matched between ranks by their order within a step. Array shapes: R ranks, k steps of one rank,
K steps that all ranks have, m intervals or collectives; times are in seconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddltool.analyzers.step.measured.kineto import RankTrace, clipped, read_rank, union
from ddltool.analyzers.step.measured.ranks import RankSteps
from ddltool.arrays import Flags, Floats, Indices
from ddltool.errors import InputError
from ddltool.graph import natural_key

_INPUT = re.compile(r"enumerate\(DataLoader\)|data_?load|next_batch|prefetch", re.IGNORECASE)
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)")
_BACKWARD = re.compile(r"autograd::engine::evaluate_function|torch.distributed.ddp.reducer::")
_OPERATOR = re.compile(r"(?!autograd::)[A-Za-z_]\w*::\w+$")
PARTS = ("input", "forward", "backward", "optimizer", "host")
# Numbers of the parts: the first five are indices into PARTS; _BLOCKED labels time that is not a rank's own work.
_INPUT_PART, _FORWARD, _BACKWARD_PART, _OPTIMIZER_PART, _HOST, _BLOCKED = range(6)
# The scheduler resumes a waiting thread within this time, or this share of the gap, after the collective's end.
_WAKES_S, _WAKES_SHARE = 2e-3, 0.2
# A thread may also resume before the profiler records that end, by at most this share of the gap.
_NOTED_SHARE = 0.05
# The epochs of traces from one machine differ by less than this; if they do not, the clocks count as different.
_ONE_CLOCK_S = 86400.0
# Steps of each rank that the timeline shows.
_STEPS_DRAWN = 6
# Most rounds of the alternation that estimates the clocks' offsets; it usually settles in a few.
_OFFSET_ROUNDS = 200
# A gap without compute shorter than this is launch overhead, not a pause.
_SHORTEST_GAP_S = 1e-6


_Key = tuple[int, str, int]
"""Identifies a collective on all its ranks: number of the step, group, index among the group's collectives in the step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rank:
    """One rank's k steps, not yet aligned with other ranks; seconds since the rank's epoch."""

    trace: RankTrace
    step: Floats
    """(3, k) number, start and length."""
    parts: Floats
    """(2, 5, k) seconds of each of :data:`PARTS`: before (0) and after (1) the end of the step's last collective."""
    gap_s: Floats
    """(2, k) seconds of the longest gap without compute, before and after that end."""
    blocked: Floats
    """(4, b) for each blocked interval: index of the step, start, end, and column of the collective in the trace."""
    keys: list[_Key]
    """(n,) key of each collective in the trace."""
    work: Floats
    """(k,) input elements of matrix products and convolutions in each step; 0 in a trace without shapes."""
    drawn: list[tuple[float, float, str]]
    """(start, end, part) of the pieces of the first steps, for the timeline."""


def of_traces(paths: Sequence[Path], advance: Callable[[int, str], None] = lambda done, name: None) -> RankSteps:
    """Return the aligned steps of all ranks from one trace file per rank.

    A file's rank is the one it records, else the number in its name; where any file has neither, ranks are the positions in
    natural order of the names. Only one file is in memory at a time. ``advance`` is called with the index and name of each file
    before it is read. Raises InputError as ``read_steps`` does, for a single file, for two files of one rank, and for traces
    without a common step.
    """
    ranks_seen = []
    for index, path in enumerate(sorted(paths, key=lambda path: natural_key(str(path)))):
        advance(index, path.name)
        ranks_seen.append(_split_rank(read_rank(path)))
    if len(ranks_seen) < 2:
        raise InputError(
            str(paths[0]) if paths else "TRACE", "is the trace of one rank", "give one trace for each rank"
        )
    known_ranks = [
        rank.trace.rank if rank.trace.rank is not None else _rank_in_name(rank.trace.where) for rank in ranks_seen
    ]
    ranks = [rank for rank in known_ranks if rank is not None]
    if len(ranks) < len(ranks_seen):  # some file tells no rank
        ranks = list(range(len(ranks_seen)))
    for index, rank in enumerate(ranks):
        if rank in ranks[:index]:
            raise InputError(
                ranks_seen[index].trace.where, f"is a second trace of rank {rank}", "give one trace for each rank"
            )
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    return _align_ranks([ranks_seen[index] for index in order], tuple(ranks[index] for index in order))


def _rank_in_name(where: str) -> int | None:
    """Return the rank in a file's name (``rank3``, ``rank-3``, ``rank_3.json``); None for a name without one."""
    match = re.search(r"rank[-_.]?(\d+)", Path(where).name)
    return int(match[1]) if match else None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Activity:
    """A rank's activity by its trace. Intervals (2, m) of start and end are in order and disjoint unless said otherwise."""

    kernels: Floats
    """(3, m) start, end and launch of each kernel; empty for a job on CPUs."""
    busy: Floats
    """(2, m) intervals in which the device (on CPUs an operator) computes."""
    inputs: Floats
    """(2, m) intervals in which the loader prepares the next batch."""
    optimizers: Floats
    """(2, m) intervals in which the optimizer steps or clears gradients."""
    backwards: Floats
    """(2, m) start and end of autograd's functions, which may overlap."""
    forward_calls: Floats
    """(m,) starts of the operators outside loader and optimizer."""

    @classmethod
    def of(cls, trace: RankTrace) -> _Activity:
        """Return the activity in a trace; loader, optimizer, backward and forward are told by the names of its spans.

        On CPUs there are no kernels, and operators count as computing.
        """
        spans = trace.spans

        def spans_of(pattern: re.Pattern[str]) -> Floats:
            """Return (2, m) start and end of the spans whose names begin with a match of ``pattern``."""
            is_wanted = np.array([pattern.match(name) is not None for name in trace.names], dtype=bool)[spans.key]
            return np.stack([spans.start_s[is_wanted], (spans.start_s + spans.duration_s)[is_wanted]])

        inputs = union(spans_of(_INPUT))
        optimizers = union(spans_of(_OPTIMIZER))
        operators = spans_of(_OPERATOR)
        middle = operators.mean(axis=0)  # unlike a start, it cannot coincide with the end of another span
        return cls(
            kernels=trace.kernels,
            busy=union(trace.kernels[:2] if trace.kernels.shape[1] else operators),
            inputs=inputs,
            optimizers=optimizers,
            backwards=spans_of(_BACKWARD),
            forward_calls=operators[0, ~_is_inside(middle, inputs) & ~_is_inside(middle, optimizers)],
        )

    @property
    def on_device(self) -> bool:
        """Whether the trace has kernels, so that the job computes on a device and not on CPUs."""
        return bool(self.kernels.shape[1])

    def gaps(self, low: float, high: float) -> Floats:
        """Return the intervals (2, m), longer than a microsecond, between ``low`` and ``high`` in which nothing computes."""
        busy = clipped(self.busy, low, high)
        gaps = np.clip([np.append(low, busy[1]), np.append(busy[0], high)], low, high)
        return np.asarray(gaps[:, gaps[1] - gaps[0] > _SHORTEST_GAP_S])

    def windows(self, low: float, high: float, blocked: Sequence[tuple[float, float, int]]) -> list[tuple[int, Floats]]:
        """Return (part, intervals (2, m)) for each phase of the step from ``low`` to ``high``.

        Where intervals overlap, the later one in the list counts. Forward lasts from the first operator to the first backward
        function, backward until the last one ends. ``blocked``: (start, end, collective) of the intervals in which a collective
        blocks the rank.
        """
        backward = self.backwards[:, (self.backwards[0] >= low) & (self.backwards[0] < high)]
        backward_start = backward[0].min() if backward.size else high
        backward_end = backward[1].max() if backward.size else high
        forward_calls = self.forward_calls[(self.forward_calls >= low) & (self.forward_calls < backward_start)]
        forward_start = forward_calls.min() if forward_calls.size else backward_start
        blocked_intervals = [[start for start, _, _ in blocked], [end for _, end, _ in blocked]]
        return [
            (_HOST, np.array([[low], [high]])),  # what no other phase covers
            (_FORWARD, np.array([[forward_start], [backward_start]])),
            (_BACKWARD_PART, np.array([[backward_start], [backward_end]])),
            (_OPTIMIZER_PART, clipped(self.optimizers, low, high)),
            (_INPUT_PART, clipped(self.inputs, low, high)),
            (_BLOCKED, np.array(blocked_intervals).reshape(2, -1)),
        ]

    def seconds(self, windows: list[tuple[int, Floats]], begin: float, end: float) -> Floats:
        """Return the seconds (5,) of each of :data:`PARTS` from ``begin`` to ``end`` in a step with these :meth:`windows`.

        They are the time of kernels on a device, and the wall-clock time of each phase on CPUs, without blocked time.
        """
        edges, label = _label_pieces(windows, begin, end)
        if self.on_device:
            return _device_parts(self.kernels, clipped(self.busy, begin, end), edges, label)
        if end <= begin:
            return np.zeros(5)
        return np.asarray(np.bincount(label, weights=np.diff(edges), minlength=6)[:5], dtype=np.float64)

    def longest_gap(self, gaps: Floats, blocked: Sequence[tuple[float, float, int]], begin: float, end: float) -> float:
        """Return the seconds of the longest pause of the rank between ``begin`` and ``end``; 0 without one.

        A pause is one of ``gaps`` (2, m), in which nothing computes, that neither overlaps a ``blocked`` interval nor lies in a
        wait for the loader.
        """
        lengths_s = [0.0]
        for start, stop in gaps.T.tolist():
            is_blocked = any(blocked_start < stop and blocked_end > start for blocked_start, blocked_end, _ in blocked)
            waits_for_loader = _is_inside(np.array([(start + stop) / 2]), self.inputs)[0]
            if not is_blocked and not waits_for_loader:
                lengths_s.append(min(stop, end) - max(start, begin))
        return max(lengths_s)


def _split_rank(trace: RankTrace) -> _Rank:
    """Return one rank's k steps with their parts, blocked intervals and collectives, on the rank's own clock.

    Parts before and after the end of a step's last collective are separate, because other ranks wait for the latter only in the
    next step.
    """
    steps, collectives = trace.steps, trace.collectives
    activity = _Activity.of(trace)
    own_ends = steps.start_s + steps.length_s
    # A step lasts until the next one starts. The last one has no next (until_s is infinite) and lasts for its own length.
    ends = np.where(np.isfinite(steps.until_s), steps.until_s, own_ends)
    # If the next one starts over 1.5 step lengths later, a step in between was left out, and it lasts for its own length too.
    ends = np.where(ends - steps.start_s > 1.5 * steps.length_s, own_ends, ends)
    count = len(steps.start_s)
    parts = np.zeros((2, 5, count))  # as in _Rank
    gap_s = np.zeros((2, count))
    blocked: list[tuple[float, ...]] = []
    drawn: list[tuple[float, float, str]] = []
    for k, (step_start, step_end) in enumerate(zip(steps.start_s.tolist(), ends.tolist(), strict=True)):
        gaps = activity.gaps(step_start, step_end)
        blocked_here = _blocked_intervals(gaps, collectives, activity.on_device)
        blocked += [(k, *row) for row in blocked_here]
        windows = activity.windows(step_start, step_end, blocked_here)
        ended = collectives[2, (collectives[1] >= step_start) & (collectives[1] < step_end)]
        last_end = min(float(ended.max(initial=step_start)), step_end) if ended.size else step_end
        for after, (begin, end) in enumerate(((step_start, last_end), (last_end, step_end))):
            parts[after, :, k] = activity.seconds(windows, begin, end)
            gap_s[after, k] = activity.longest_gap(gaps, blocked_here, begin, end)
        if k < _STEPS_DRAWN:
            edges, label = _label_pieces(windows, step_start, step_end)
            names = [(*PARTS, "waiting")[part] for part in label.tolist()]
            drawn += zip(edges[:-1].tolist(), edges[1:].tolist(), names, strict=True)
    step_index = steps.at(trace.work[0])
    work = np.bincount(step_index[step_index >= 0], weights=trace.work[1][step_index >= 0], minlength=count)
    return _Rank(
        trace=trace,
        step=np.stack([steps.number.astype(np.float64), steps.start_s, ends - steps.start_s]),
        parts=parts,
        gap_s=gap_s,
        blocked=np.array(blocked, dtype=np.float64).reshape(-1, 4).T,
        keys=_collective_keys(trace),
        work=work.astype(np.float64),
        drawn=drawn,
    )


def _collective_keys(trace: RankTrace) -> list[_Key]:
    """Return the key of each collective in a trace; the same collective has the same key in other ranks' traces.

    Collectives before the first step have the step number -1.
    """
    order = np.argsort(trace.collectives[1], kind="stable")
    step_index = np.searchsorted(trace.steps.start_s, trace.collectives[1, order], side="right") - 1
    counts = Counter[tuple[int, str]]()
    keys: list[_Key] = [(-1, "", 0)] * len(order)
    for row, step in zip(order.tolist(), step_index.tolist(), strict=True):
        step_number = int(trace.steps.number[step]) if step >= 0 else -1
        group = trace.groups[int(trace.collectives[0, row])]
        keys[row] = (step_number, group, counts[step_number, group])
        counts[step_number, group] += 1
    return keys


def _device_parts(kernels: Floats, busy: Floats, edges: Floats, label: Indices) -> Floats:
    """Return the seconds (5,) by part in a span of time on a device.

    A kernel counts for the phase that launched it, because kernels run later than their launch. Time in which the device is
    idle counts as input where the loader works, else as host.

    Args:
        kernels: (3, m) start, end and launch of each kernel.
        busy: (2, b) intervals of the span in which the device computes.
        edges: (n + 1,) limits of the pieces of the span, from :func:`_label_pieces`.
        label: (n,) part of each piece.
    """
    parts = np.zeros(5)
    length = np.diff(edges)
    if not len(label):
        return parts
    step_kernels = kernels[:, (kernels[0] >= edges[0]) & (kernels[0] < edges[-1])]
    phase = label[np.clip(np.searchsorted(edges, step_kernels[2], side="right") - 1, 0, len(label) - 1)]
    phase = np.where(phase == _BLOCKED, _BACKWARD_PART, phase)
    # Kernels launched by host or loader, such as the copy of a batch to the device, count as forward.
    phase = np.where((phase == _HOST) | (phase == _INPUT_PART), _FORWARD, phase)
    kernel_s = np.bincount(phase, weights=step_kernels[1] - step_kernels[0], minlength=5)[:5]
    if kernel_s.sum() > 0:
        # Kernels may overlap: their shares are scaled to the time in which any of them ran.
        parts += kernel_s * float((busy[1] - busy[0]).sum()) / kernel_s.sum()
    is_input = label == _INPUT_PART
    parts[_INPUT_PART] = _seconds_outside(edges[:-1][is_input], edges[1:][is_input], busy)
    parts[_HOST] = max(float(length[label != _BLOCKED].sum()) - float(parts.sum()), 0.0)
    return parts


def _blocked_intervals(gaps: Floats, collectives: Floats, device: bool) -> list[tuple[float, float, int]]:
    """Return (start, end, column of the collective) for the intervals in which a collective blocks the rank.

    ``gaps`` (2, m): intervals without compute; ``collectives`` (3, n): group, start and end. On a device each collective blocks
    where it overlaps a gap. On CPUs a gap, from the first collective's start on, is blocked if it ends at about the time at
    which a collective ends, because then the thread waited for it.
    """
    blocked = []
    for gap_start, gap_end in gaps.T.tolist():
        overlapping = np.flatnonzero((collectives[2] > gap_start) & (collectives[1] < gap_end))
        if not len(overlapping):
            continue
        if device:  # kernels of one communicator run one after another, so each blocks on its own
            blocked += [
                (max(gap_start, collectives[1, row]), min(gap_end, collectives[2, row]), int(row))
                for row in overlapping
            ]
            continue
        gap_s = gap_end - gap_start
        # Collectives that end well after the gap did not end it.
        overlapping = overlapping[collectives[2, overlapping] <= gap_end + max(_WAKES_S, _NOTED_SHARE * gap_s)]
        if not len(overlapping):
            continue
        last = overlapping[np.argmax(collectives[2, overlapping])]
        last_end = float(collectives[2, last])
        if gap_end - last_end > max(_WAKES_S, _WAKES_SHARE * gap_s):  # nor do those that end well before
            continue
        begin = max(gap_start, float(collectives[1, overlapping].min()))
        end = min(gap_end, last_end)
        if end > begin:
            blocked.append((begin, end, int(last)))
    return blocked


def _align_ranks(ranks_seen: list[_Rank], ranks: tuple[int, ...]) -> RankSteps:
    """Return the steps of R ranks on a common clock, with blocked time split into waiting and communicating.

    A rank waits until the last rank has joined the collective; after that it communicates. Clocks of different machines are
    aligned by the ends of common collectives; on one machine they agree. ``ranks``: numbers of the ranks, in the order of
    ``ranks_seen``. Raises InputError where no step is common.
    """
    numbers = sorted(set.intersection(*(set(rank.step[0].astype(int).tolist()) for rank in ranks_seen)))
    if not numbers:
        where, remedy = ranks_seen[0].trace.where, "profile the same steps on all ranks"
        raise InputError(where, "has no step in common with the others", remedy)
    remarks = [f"{rank.trace.where}: {remark}" for rank in ranks_seen for remark in rank.trace.steps.left_out]
    epoch = min(rank.trace.epoch_s for rank in ranks_seen)
    shift = np.array([rank.trace.epoch_s - epoch for rank in ranks_seen])
    matched, begin, end, partial = _match_collectives(ranks_seen, ranks, set(numbers), shift)
    if partial:
        total = partial + len(matched)
        remarks.append(
            f"{partial} of {total} collectives are not in all their ranks' traces and tell nothing of waiting"
        )
    nodes = tuple(rank.trace.node for rank in ranks_seen)
    one_clock = len(set(nodes)) == 1 and nodes[0] != "" and np.ptp(shift) < _ONE_CLOCK_S
    # On one clock the ends of collectives show which rank sees them late; on several clocks they align these instead.
    offsets = np.zeros(len(ranks_seen))
    late = None
    if not matched:
        remarks.append(
            "no collective is in all its ranks' traces: clocks are not aligned, and all blocked time counts as waiting"
        )
    elif not one_clock:
        offsets = _offsets(end)
    else:
        late = _late_seconds(matched, begin, end)
    last_arrival_s = np.nanmax(begin - offsets[:, None], axis=0).tolist() if matched else ()
    came_last = dict(zip(matched, last_arrival_s, strict=True))
    moves = (shift - offsets).tolist()
    columns = [
        _select_steps(rank, numbers, came_last, clock_shift)
        for rank, clock_shift in zip(ranks_seen, moves, strict=True)
    ]
    wait, exposed, step, work, parts, gap = (np.array(values) for values in zip(*columns, strict=True))
    drawn = [
        (f"rank {name}", [(start + clock_shift, stop + clock_shift, kind) for start, stop, kind in rank.drawn])
        for name, rank, clock_shift in zip(ranks, ranks_seen, moves, strict=True)
    ]
    origin = min((start for _, spans in drawn for start, _, _ in spans), default=0.0)
    return RankSteps(
        ranks=ranks,
        nodes=nodes,
        steps=np.array(numbers, dtype=np.int64),
        parts={name: parts[:, :, part_index].sum(axis=1) for part_index, name in enumerate(PARTS)},
        after={name: parts[:, 1, part_index] for part_index, name in enumerate(PARTS)},
        wait_s=wait,
        exposed_s=exposed,
        step_s=step,
        gap_s=gap.max(axis=1),
        gap_after_s=gap[:, 1],
        work=work if (work > 0).all() else None,
        offsets_s=offsets,
        late_s=late,
        # gloo's ring sends to the rank before, NCCL's to the rank after.
        ring=-1 if all(group.startswith("gloo") for _, group, _ in matched) else 1,
        remarks=tuple(remarks),
        timeline=[(name, [(a - origin, b - origin, kind) for a, b, kind in spans]) for name, spans in drawn],
    )


def _select_steps(
    rank: _Rank, numbers: Sequence[int], came_last: Mapping[_Key, float], move: float
) -> tuple[Floats, ...]:
    """Return arrays of a rank's K steps with these ``numbers``, blocked time split into waiting and exposed communication.

    In order: waiting (K,), exposed communication (K,), step length (K,), work (K,), parts (2, 5, K), gaps (2, K).

    Args:
        came_last: collective -> its start on the rank that joins last, on the common clock; all time blocked by a collective
            that is not in it counts as waiting.
        move: seconds to add to the rank's times for the common clock.
    """
    column_of = {int(step_number): column for column, step_number in enumerate(rank.step[0].tolist())}
    kept = np.array([column_of[step_number] for step_number in numbers])
    last_start_s = np.array([came_last.get(key, np.inf) for key in rank.keys])
    at_step, low, high, collective = rank.blocked
    waits_s = np.clip(last_start_s[collective.astype(int)] - (low + move), 0.0, high - low)
    count = rank.step.shape[1]
    step = at_step.astype(int)
    wait_s = np.bincount(step, weights=waits_s, minlength=count).astype(np.float64)
    blocked_s = np.bincount(step, weights=high - low, minlength=count).astype(np.float64)
    columns = (wait_s, blocked_s - wait_s, rank.step[2], rank.work, rank.parts, rank.gap_s)
    return tuple(values[..., kept] for values in columns)


def _late_seconds(matched: Sequence[_Key], begin: Floats, end: Floats) -> Floats | None:
    """Return (R, steps) by how many seconds later than the first rank each rank sees a step's longest collective end.

    ``begin`` and ``end`` (R, m) of the ``matched`` collectives are on one clock. Only collectives of all ranks count; None
    where there are none.
    """
    of_all = np.flatnonzero(np.isfinite(end).all(axis=0))
    if not len(of_all):
        return None
    transfer = np.median(end[:, of_all], axis=0) - begin[:, of_all].max(axis=0)
    # in the order of rising transfer time, so that the longest collective of a step overwrites the others
    longest = {matched[column][0]: column for column in of_all[np.argsort(transfer, kind="stable")].tolist()}
    ends = end[:, [longest[step_number] for step_number in sorted(longest)]]
    return np.asarray(ends - ends.min(axis=0))


def _match_collectives(
    ranks_seen: list[_Rank], ranks: tuple[int, ...], numbers: set[int], shift: Floats
) -> tuple[list[_Key], Floats, Floats, int]:
    """Return the m complete collectives in the steps ``numbers``, their begin and end (R, m), and how many are incomplete.

    A collective is complete if it is in the traces of all ranks of its group: those that the group's name lists, else all
    ranks. Begin and end are NaN for a rank outside the group, as with HSDP, tensor and pipeline parallelism. ``shift`` (R,):
    seconds to add to the ranks' times for a common epoch.
    """
    columns = [dict(zip(rank.keys, range(len(rank.keys)), strict=True)) for rank in ranks_seen]
    rows_by_key: dict[_Key, list[int]] = {}
    for row, keys in enumerate(columns):
        for key in keys:
            if key[0] in numbers:
                rows_by_key.setdefault(key, []).append(row)
    traced_ranks = set(ranks)
    members = {
        group: {int(name) for name in re.findall(r"\d+", group.partition("[")[2])} for _, group, _ in rows_by_key
    }
    complete = sorted(
        key
        for key, rows in rows_by_key.items()
        if len(rows) > 1 and len(rows) >= len(members[key[1]] & traced_ranks if members[key[1]] else traced_ranks)
    )
    begin, end = np.full((2, len(ranks_seen), len(complete)), np.nan)
    for column, key in enumerate(complete):
        for row in rows_by_key[key]:
            begin[row, column], end[row, column] = ranks_seen[row].trace.collectives[1:, columns[row][key]] + shift[row]
    return complete, begin, end, len(rows_by_key) - len(complete)


def _offsets(end: Floats) -> Floats:
    """Return the seconds (R,) by which each rank's clock is ahead, from the ends (R, m) of collectives on each rank's clock.

    A collective ends at the same moment on all its ranks, so that differences are due to the clocks. ``end`` is NaN for a rank
    outside the group. As groups may overlap only in part, true moments and offsets are estimated in turn until they settle.
    """
    offsets = np.zeros(len(end))
    for _ in range(_OFFSET_ROUNDS):
        moment = np.nanmedian(end - offsets[:, None], axis=0)
        change = np.nan_to_num(np.nanmedian(end - offsets[:, None] - moment, axis=1))
        offsets = offsets + change
        if np.abs(change).max() < 1e-8:
            break
    return offsets


def _label_pieces(windows: list[tuple[int, Floats]], low: float, high: float) -> tuple[Floats, Indices]:
    """Return the edges (n + 1,) of the pieces between ``low`` and ``high``, and the part (n,) of each, as a number.

    A piece lies between two neighbouring limits of the ``windows`` and has the part of the last window that covers it.
    """
    edges = np.unique(np.clip(np.concatenate([[low, high], *(window.ravel() for _, window in windows)]), low, high))
    middle = (edges[1:] + edges[:-1]) / 2
    label = np.full(len(middle), _HOST, dtype=np.int32)
    for name, window in windows:
        label[_is_inside(middle, window)] = name
    return edges, label


def _is_inside(time: Floats, intervals: Floats) -> Flags:
    """Return (n,) whether each ``time`` lies in one of the ordered, disjoint ``intervals`` (2, m)."""
    if not intervals.shape[1]:
        return np.zeros(len(time), dtype=bool)
    index = np.searchsorted(intervals[0], time, side="right") - 1
    inside: Flags = (index >= 0) & (time < intervals[1][np.maximum(index, 0)])
    return inside


def _seconds_outside(start: Floats, end: Floats, intervals: Floats) -> float:
    """Return the sum of the seconds from ``start`` (n,) to ``end`` (n,) that lie outside the disjoint ``intervals`` (2, m)."""
    pieces = zip(start.tolist(), end.tolist(), strict=True)
    overlaps_s = (np.clip(intervals[1], low, high) - np.clip(intervals[0], low, high) for low, high in pieces)
    return float((end - start).sum()) - sum(float(overlap_s.sum()) for overlap_s in overlaps_s)
