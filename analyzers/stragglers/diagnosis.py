"""Who holds the others up, since when, by how much, why, and what to do. Start at :func:`diagnose`.

A step lasts as long as the slowest rank's own work and what comes on top for all. A rank's *excess* is its own work above
the median of the others'; what a step would gain were it as fast as they is the *what-if* of ByteDance's study ("Understanding
Stragglers in Large Model Training Using What-if Analysis", OSDI 2025), whose slowdown S and M_W are given beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from ddltool.analyzers.balancing.replay import default_warm_up
from ddltool.analyzers.stragglers.ranks import COMPUTE, RankSteps
from ddltool.arrays import Flags, Floats
from ddltool.results import Drawn, RankSplit, StragglerFinding, StragglersResult
from ddltool.telemetry import TelemetryRow
from ddltool.units import show_seconds

Pattern = Literal["persistent", "periodic", "transient"]
LEAST_GAIN = 0.05
"""Share of the run that a rank must cost before it is named."""
TIMES_THE_OTHERS = 3.0
"""A named rank costs so many times what the median of the others does: chance makes each rank the slowest now and then."""
SURE = 0.95
"""So sure it must be that other steps of the same kind would have cost as much as a named rank has to."""
LEAST_CHANCE = 0.01
"""A rank that chance would let cost as much more often than this is not named, unless it costs :data:`PLAIN_GAIN`."""
PLAIN_GAIN = 0.2
_DRAWS = 2000
_FEWEST_STEPS, _FEWEST_PLAIN = 3, 2
_FEWEST_LINK, _OFTEN = 5, 0.75
_PERSISTENT, _SELDOM = 0.6, 0.4
_LEAST_EXCESS, _OF_WORST = 0.05, 0.2
_LINK_SHARE, _LATE_SHARE = 0.15, 0.03
WORST_SHARE = 0.03
"""M_W asks what the slowest 3 % of the workers explain."""


_PAUSES = (
    "Collect garbage and save checkpoints in the same step on all ranks: gc.disable(), gc.collect() every N steps."
)
_INPUT = "Give its DataLoader more workers (num_workers, prefetch_factor) or faster storage."
_HOST = "Look at what else runs on its host: CPU affinity, other jobs, logging."


@dataclass(frozen=True, kw_only=True)
class Feeds:
    """Files that other commands read, by their names in the remedies."""

    speeds: str = "speeds.csv"
    ends: str = "ends.csv"
    telemetry: str = "telemetry.jsonl"

    @classmethod
    def all(cls, telemetry: str) -> Feeds:
        """Telemetry is what each of them reads."""
        return cls(speeds=telemetry, ends=telemetry, telemetry=telemetry)


def diagnose(run: RankSteps, source: str, feeds: Feeds | None = None) -> StragglersResult:
    """Return the split of every rank, the what-ifs, and a finding for each rank that holds the others up."""
    feeds, whole, run = feeds or Feeds(), run, run.between_meetings()
    step = np.median(run.step_s, axis=0)
    mean = float(step.mean())
    rest = np.maximum(step - run.own_s.max(axis=0), 0.0)
    gains = np.array([_gain(run, step, rest, row) for row in range(len(run.ranks))])
    excess = np.array([run.own_s[row] - _others(run.own_s, row) for row in range(len(run.ranks))])
    rows = np.argsort(-gains.sum(axis=1)).tolist()
    every = (_finding(run, row, excess[row], gains, step, feeds) for row in rows)
    findings = [found for found in every if found is not None]
    if not findings and (link := _link(run, mean)) is not None:
        findings.append(link)
    ideal, worst = _ideal(run, rest)
    slowdown, waited = mean / ideal, float(run.wait_s.mean() / mean)
    nobody = f"No rank holds the others up: waiting takes {waited:.0%} of a step, by turns."
    return StragglersResult(
        source=source,
        ranks=len(run.ranks),
        steps=len(run.steps),
        step_s=mean,
        ideal_step_s=ideal,
        slowdown=slowdown,
        m_w=(mean - worst) / (mean - ideal) if slowdown > 1.02 else None,
        waiting_share=waited,
        verdict=findings[0].sentence if findings else nobody,
        findings=findings,
        splits=[_split(whole, row, float((step - gains[row]).mean())) for row in range(len(run.ranks))],
        classes={name: _of_class(run, name, rest) / ideal for name in run.parts},
        timeline=[Drawn(rank=name, spans=spans) for name, spans in run.timeline],
        remarks=[*run.remarks],
    )


def _others(values: Floats, row: int) -> Floats:
    """Return (K,) the median of the other ranks."""
    median: Floats = np.median(np.delete(values, row, axis=0), axis=0)
    return median


def _gain(run: RankSteps, step: Floats, rest: Floats, row: int) -> Floats:
    """Return (K,) what each step would gain, were the rank as fast as the median of the others."""
    own = run.own_s.copy()
    own[row] = np.minimum(own[row], _others(own, row))
    gain: Floats = np.maximum(step - np.maximum(own.max(axis=0) + rest, 0.0), 0.0)
    return gain


def _ideal(run: RankSteps, rest: Floats) -> tuple[float, float]:
    """Return the step with every part at its mean over ranks and steps, and with the slowest 3 % of ranks alone so."""
    means = {name: float(values.mean()) for name, values in run.parts.items()}
    ideal = sum(means.values()) + float(np.median(rest))
    slowest = np.argsort(-run.own_s.mean(axis=1))[: int(np.ceil(len(run.ranks) * WORST_SHARE))]
    own = run.own_s.copy()
    own[slowest] = sum(means.values())
    return ideal, float((own.max(axis=0) + rest).mean())


def _of_class(run: RankSteps, name: str, rest: Floats) -> float:
    """Return the mean step with every other part at its mean: what this class of work costs alone."""
    other = sum(float(values.mean()) for part, values in run.parts.items() if part != name)
    return float(run.parts[name].max(axis=0).mean() + other + np.median(rest))


def _split(run: RankSteps, row: int, if_median: float) -> RankSplit:
    return RankSplit(
        rank=run.ranks[row],
        node=run.nodes[row],
        step_s=float(run.step_s[row].mean()),
        parts_s={name: float(values[row].mean()) for name, values in run.parts.items()},
        wait_s=float(run.wait_s[row].mean()),
        exposed_s=float(run.exposed_s[row].mean()),
        step_if_median_s=if_median,
        clock_offset_s=float(run.offsets_s[row]) if run.offsets_s is not None else 0.0,
    )


def _finding(
    run: RankSteps, row: int, excess: Floats, gains: Floats, step: Floats, feeds: Feeds
) -> StragglerFinding | None:
    """Return what there is to say of a rank, None where it holds nobody up beyond chance."""
    total = float(step.sum())
    share = float(gains[row].sum()) / total
    others = float(np.median(np.delete(gains.sum(axis=1), row))) / total
    slow = (excess > max(_LEAST_EXCESS * float(step.mean()), _OF_WORST * float(excess.max()))) & (gains[row] > 0)
    plain = share >= PLAIN_GAIN
    fewest = _FEWEST_PLAIN if plain else _FEWEST_STEPS
    if share < LEAST_GAIN or share < TIMES_THE_OTHERS * others or int(slow.sum()) < min(fewest, len(step)):
        return None
    if not plain and _chance(gains, row) > LEAST_CHANCE:
        return None
    if _surely(gains, row, step) < LEAST_GAIN:
        return None
    since = _onset(slow)
    pattern, every = _pattern(slow, since)
    parts = {name: float((values[row] - _others(values, row))[slow].mean()) for name, values in run.parts.items()}
    part = max(parts, key=lambda name: parts[name])
    kind = _kind(run, row, excess, slow, pattern, part)
    shown = "compute" if part in COMPUTE and parts[part] < 0.8 * sum(parts.get(name, 0.0) for name in COMPUTE) else part
    names = [name for name in run.parts if name in COMPUTE] if shown == "compute" else [part]
    values: Floats = np.sum([run.parts[name] for name in names], axis=0)
    mine, theirs = float(values[row][slow].mean()), float(_others(values, row)[slow].mean())
    ratio = mine / theirs if theirs > 0 else None
    whole = float(gains[row][slow].sum() / step[slow].sum())
    remedy, predicted, command = _remedy(run, kind, share, float(np.median(gains[row] / step)), feeds)
    who = f"Rank {run.ranks[row]}" + (f" ({run.nodes[row]})" if len(set(run.nodes)) > 1 else "")
    first = int(run.steps[since])
    when = {
        "persistent": f"since step {first}" if since else "in every step",
        "periodic": f"every {every} steps or so",
        "transient": f"in {int(slow.sum())} of {len(step)} steps",
    }[pattern]
    pace = f"takes {show_seconds(parts[part])} longer in {shown}"
    if ratio is not None and ratio < 20:
        pace = f"is {ratio:.2f}x slower in {shown}"
    if kind == "pauses":
        pace = f"pauses for {show_seconds(float(excess[slow].mean()))}"
    sentence = f"{who} {pace} {when}: {whole:.0%} of those steps, {share:.0%} of the run ({kind}). {remedy}"
    return StragglerFinding(
        rank=run.ranks[row],
        node=run.nodes[row],
        cause=kind,
        pattern=pattern,
        part=shown,
        since_step=first,
        every_steps=every,
        slow_steps=int(slow.sum()),
        ratio=ratio,
        excess_s=float(excess[slow].mean()),
        share_of_steps=whole,
        share_of_run=share,
        predicted_gain=predicted,
        command=command,
        sentence=sentence,
    )


def _chance(gains: Floats, row: int) -> float:
    """Return how often some rank would cost as much as this one, were it chance which rank is each step's slowest."""
    ranks, steps = gains.shape
    cost = gains.max(axis=0)
    dealt = np.random.default_rng(0).integers(ranks, size=(_DRAWS, steps))
    most = np.max([np.where(dealt == rank, cost, 0.0).sum(axis=1) for rank in range(ranks)], axis=0)
    return float((most >= gains[row].sum() * (1 - 1e-9)).mean())


def _surely(gains: Floats, row: int, step: Floats) -> float:
    """Return what share of the run the rank costs beyond a typical other one in all but 5 % of draws of as many steps."""
    drawn = np.random.default_rng(0).integers(len(step), size=(_DRAWS, len(step)))
    more = (gains[row] - np.median(np.delete(gains, row, axis=0), axis=0))[drawn].sum(axis=1)
    return float(np.quantile(more / step[drawn].sum(axis=1), 1 - SURE))


def _onset(slow: Flags) -> int:
    """Return the step from which most are slow: the first slow one from which on the share of slow ones is largest."""
    first = np.flatnonzero(slow)
    score = [slow[at:].mean() * np.sqrt(slow[at:].sum()) for at in first]
    return int(first[int(np.argmax(score))])


def _pattern(slow: Flags, since: int) -> tuple[Pattern, int | None]:
    places = np.flatnonzero(slow)
    if slow[since:].mean() >= _PERSISTENT and slow[since:].sum() >= _FEWEST_STEPS:
        return "persistent", None
    between = np.diff(places)
    if len(between) >= 2 and between.std() <= 0.25 * between.mean():
        return "periodic", round(float(between.mean()))
    return "transient", None


def _kind(
    run: RankSteps,
    row: int,
    excess: Floats,
    slow: Flags,
    pattern: str,
    part: str,
) -> str:
    """Return why a rank is slow, by where its excess lies, how it goes on, and what did not slow down with it."""
    if part == "input":
        return "slow input"
    gap, seldom = 0.0, pattern != "persistent" and slow.mean() <= _SELDOM
    if run.gap_s is not None:
        gap = float((run.gap_s[row] - _others(run.gap_s, row))[slow].mean())
        seldom = seldom and gap >= 0.6 * float(excess[slow].mean())
    else:  # telemetry: what is slow for a while is so in steps that follow one another
        more = run.work is not None and (run.work[row] > 1.02 * _others(run.work, row))[slow].any()
        seldom = seldom and not more and not (slow[1:] & slow[:-1]).any()
    if seldom:
        return "pauses"
    if part == "host":
        return "slow host"
    if _drifts(excess):
        return "thermal drift"
    compute, theirs = run.compute_s[row][slow].mean(), _others(run.compute_s, row)[slow].mean()
    ratio = float(compute / max(theirs, 1e-12))
    if run.work is not None:
        more = float(run.work[row][slow].mean() / max(_others(run.work, row)[slow].mean(), 1e-12))
        return "uneven work" if more > 1.02 and more - 1 >= 0.3 * (ratio - 1) else "slow device"
    if run.gap_s is not None and gap >= 0.3 * float(excess[slow].mean()):
        return "slow device"  # it stands still within its own phase
    control = run.parts.get("optimizer")
    if control is not None and float(np.median(control)) > 1e-4 and {"forward", "backward"} <= run.parts.keys():
        # The optimizer does the same whatever the batch: a slow device is slow there too.
        same = float(np.median(control[row][slow]) / np.median(_others(control, row)[slow]))
        passes = [run.parts[name] for name in COMPUTE[:2]]
        both = [float(each[row][slow].mean() / _others(each, row)[slow].mean()) for each in passes]
        if same - 1 < 0.35 * (ratio - 1) and min(both) - 1 > 0.4 * (max(both) - 1):
            return "uneven work"
    return "slow device"


def _drifts(excess: Floats) -> bool:
    """Return whether a rank grows slower and slower: a line explains its excess better than one jump between two levels.

    By Schwarz's criterion: a jump has a number more, where it is. Single long steps, and short ones, are something else.
    """
    count = len(excess)
    if count < 9:
        return False
    around = np.concatenate([excess[:1], excess, excess[-1:]])
    values: Floats = np.median([around[:-2], around[1:-1], around[2:]], axis=0)
    third, place = count // 3, np.arange(count)
    if (
        np.ptp(values) == 0.0
        or pd.Series(values).rank().corr(pd.Series(place)) < 0.6
        or np.median(values[-third:]) < 1.5 * np.median(values[:third])
    ):
        return False
    line = float(((values - np.polyval(np.polyfit(place, values, 1), place)) ** 2).sum())
    jumps = (values[:at].var() * at + values[at:].var() * (count - at) for at in range(1, count))
    return bool(line < float(min(jumps)) * count ** (1 / count))


def _link(run: RankSteps, mean: float) -> StragglerFinding | None:
    """Return a slow link: ranks come together, and its two ends see the longest collectives end later, time and again.

    In a ring what comes over a slow link and what goes over it is late: at its rank, and at the one that this sends to.
    """
    exposed = float(run.exposed_s.mean(axis=1).max() / mean)
    if run.late_s is None or run.late_s.shape[1] < _FEWEST_LINK or exposed < _LINK_SHARE:
        return None
    late, ranks = np.median(run.late_s, axis=1), len(run.ranks)
    row, second = np.argsort(-late)[:2].tolist()
    ends = [row]
    if late[second] >= 0.5 * late[row] and ranks > 2:
        if (row - second) % ranks not in (1, ranks - 1):
            return None
        ends = [row, second]
        row = row if (row + run.ring) % ranks == second else second
    rest = np.delete(run.late_s, ends, axis=0)
    margin = run.late_s[ends].min(axis=0) - np.median(rest, axis=0)
    # A busy machine wakes some rank later than others, too, but by turns, and none so much later.
    typical, next_s = float(np.median(margin)), float(np.median(rest, axis=1).max())
    if typical < _LATE_SHARE * mean or (margin > 0.5 * typical).mean() < _OFTEN:
        return None
    if len(ends) == 1 and late[ends[0]] < TIMES_THE_OTHERS * next_s:
        return None
    late_s = float(late[row])
    command = "ddltool network"
    remedy = f"Measure the links, pair by pair: {command}"
    sentence = (
        f"Rank {run.ranks[row]} sees collectives end {show_seconds(late_s)} after the first: its link is slow; "
        f"communication that nothing hides takes {exposed:.0%} of a step (slow link). {remedy}"
    )
    return StragglerFinding(
        rank=run.ranks[row],
        node=run.nodes[row],
        cause="slow link",
        pattern="persistent",
        part="communication",
        since_step=int(run.steps[0]),
        slow_steps=len(run.steps),
        share_of_run=exposed,
        share_of_steps=exposed,
        excess_s=late_s,
        command=command,
        sentence=sentence,
    )


def balanced_gain(run: RankSteps) -> float:
    """Return the share of a step that batches by the ranks' speeds would win: all compute as long as their harmonic mean.

    LB-BSP: ``x_i = v_i / sum v * X``. What does not grow with the batch stays with its rank. Of a typical step: single ones
    that something else held up say nothing of batches.
    """
    step = np.median(run.step_s, axis=0)
    compute = np.median(run.compute_s, axis=1)
    fixed = np.median(run.own_s - run.compute_s, axis=1)
    each = len(compute) / float((1.0 / np.maximum(compute, 1e-12)).sum())
    rest = float(np.median(step - run.own_s.max(axis=0)))
    return max(0.0, 1.0 - (each + float(fixed.max()) + max(rest, 0.0)) / float(np.median(step)))


def _remedy(
    run: RankSteps, kind: str, share: float, typical: float, feeds: Feeds
) -> tuple[str, float | None, str | None]:
    """Return what to do in words, what it would gain of a step (predicted), and the command.

    ``share``: of the run; ``typical``: of the median step, what the rank costs.
    """
    if kind in ("slow device", "uneven work", "thermal drift"):
        gain = min(balanced_gain(run), max(share, typical))
        if len(run.steps) <= default_warm_up(0, 0):  # too short to replay
            command = f"ddltool plan job.yaml --strategy lb-bsp --telemetry {feeds.telemetry}"
            return f"Balanced batches would win {gain:.0%} back (predicted): {command}", gain, command
        follow = " and follow it while it runs with ddltool.runtime.balance" if kind == "thermal drift" else ""
        command = f"ddltool balance {feeds.speeds}"
        return f"Balanced batches would win {gain:.0%} back (predicted){follow}: {command}", gain, command
    if kind == "pauses":
        command, say = f"ddltool barrier {feeds.ends}", _PAUSES
    else:
        command, say = f"ddltool plan job.yaml --telemetry {feeds.telemetry}", _INPUT if kind == "slow input" else _HOST
    return f"{say} That wins up to {share:.0%} (predicted). What else would help: {command}", share, command


def speeds(run: RankSteps, batch: int) -> list[Sequence[float | int]]:
    """Return rows of ``ddltool balance``: iteration, worker, samples a second of its own compute, cpu and memory (1)."""
    speed = run.speed(batch)
    return [
        (int(number), rank, float(speed[row, column]), 1.0, 1.0)
        for column, number in enumerate(run.steps)
        for row, rank in enumerate(run.ranks)
    ]


def ends(run: RankSteps) -> list[Sequence[float | int]]:
    """Return rows of ``ddltool barrier``: worker, iteration (from 0) and its end, had nobody waited."""
    end = run.own_s.cumsum(axis=1)
    end += end[:, -1].max() - end[:, -1:]
    return [
        (rank, column, float(end[row, column]))
        for row, rank in enumerate(run.ranks)
        for column in range(len(run.steps))
    ]


def telemetry(run: RankSteps, batch: int, device: str = "cpu") -> list[TelemetryRow]:
    """Return the run as rows of telemetry, which ``plan --telemetry``, ``fit`` and ``verify`` read."""
    nodes = max(1, len(set(run.nodes)))
    return [
        TelemetryRow(
            step=int(number),
            rank=place,
            world_size=len(run.ranks),
            num_nodes=nodes,
            device=device,
            batch=batch,
            total_batch=batch * len(run.ranks),
            compute_s=max(float(run.compute_s[place, column]), 1e-9),
            wait_s=float(run.wait_s[place, column]),
            sync_s=float(run.exposed_s[place, column]),
            step_s=float(run.step_s[place, column]),
            memory_bytes=0.0,
        )
        for column, number in enumerate(run.steps)
        for place in range(len(run.ranks))
    ]
