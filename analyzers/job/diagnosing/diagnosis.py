"""Names the ranks that hold the others up: since when, by how much, why, and what to do. Start at :func:`diagnose`.

A step takes the slowest rank's own work plus a rest that all ranks share. A rank's *excess* is its own work minus the median
of the others'. Its *gain* is the time that a step would save if the rank worked at that median: the *what-if* of ByteDance's
study ("Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025), whose slowdown S and M_W are
computed too. Array shapes: R ranks, K steps; times are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from ddltool.analyzers.step.measured.ranks import COMPUTE, RankSteps
from ddltool.analyzers.step.measured.worker_tables import LEAST_WARM_UP
from ddltool.arrays import Flags, Floats
from ddltool.results import Drawn, RankSplit, StragglerFinding, StragglersResult
from ddltool.telemetry import TelemetryRow
from ddltool.units import show_seconds

Pattern = Literal["persistent", "periodic", "transient"]
LEAST_GAIN = 0.05
"""Share of the run that a rank must cost before it is named."""
TIMES_THE_OTHERS = 3.0
"""A named rank costs at least this many times the median of the others, because any rank is slowest now and then."""
SURE = 0.95
"""Confidence, by bootstrap over steps, that a named rank costs at least :data:`LEAST_GAIN` of the run."""
LEAST_CHANCE = 0.01
"""Largest p-value (:func:`_chance_p_value`) of a named rank that costs less than :data:`PLAIN_GAIN`."""
PLAIN_GAIN = 0.2
"""Share of the run from which on a rank's cost is obvious, and is not tested against chance."""
# Random draws of a test against chance, and of a bootstrap.
_DRAWS = 2000
# Fewest slow steps of a named rank, and of one whose cost is obvious.
_FEWEST_STEPS, _FEWEST_OBVIOUS = 3, 2
# A slow link needs at least so many measured steps, and shows in at least this share of them.
_FEWEST_LINK, _OFTEN = 5, 0.75
# Share of the steps since the onset from which on slowness is persistent; share of all steps up to which it is a pause.
_PERSISTENT, _SELDOM = 0.6, 0.4
# A step is slow where the excess is above this share of a mean step, and this share of the rank's largest excess.
_LEAST_EXCESS, _OF_WORST = 0.05, 0.2
# A slow link exposes at least this share of a step as communication, and its rank sees the end this share of a step late.
_LINK_SHARE, _LATE_SHARE = 0.15, 0.03
WORST_SHARE = 0.03
"""Share of the workers, the slowest ones, whose part of the slowdown M_W is."""
# Ratio up to which two amounts (of time, of work) count as equal.
_NOISE_RATIO = 1.02
# Replaces a time of 0 in a divisor.
_TINY_S = 1e-12


# Remedies, by the cause that they are for.
_PAUSES = (
    "Collect garbage and save checkpoints in the same step on all ranks: gc.disable(), gc.collect() every N steps."
)
_INPUT = "Give its DataLoader more workers (num_workers, prefetch_factor) or faster storage."
_HOST = "Look at what else runs on its host: CPU affinity, other jobs, logging."


@dataclass(frozen=True, kw_only=True)
class Feeds:
    """Names of files for the commands in remedies: ``balance`` reads speeds, ``barrier`` ends, ``plan`` telemetry."""

    speeds: str = "speeds.csv"
    ends: str = "ends.csv"
    telemetry: str = "telemetry.jsonl"

    @classmethod
    def all(cls, telemetry: str) -> Feeds:
        """Return the feeds of commands that all read one telemetry file."""
        return cls(speeds=telemetry, ends=telemetry, telemetry=telemetry)


def diagnose(run: RankSteps, source: str, feeds: Feeds | None = None) -> StragglersResult:
    """Return the split of every rank's step, the what-ifs, and a finding for each rank that holds the others up.

    Findings are in the order of falling cost; where no rank is to blame, a slow link is searched for. ``source``: how the steps
    were measured, for the result; ``feeds``: files to name in the remedies, None: the default names.
    """
    feeds = feeds or Feeds()
    # Ranks are judged by the spans from one point where they wait for each other to the next; parts are shown of whole steps.
    whole_run = run
    run = run.between_meetings()
    step_s = np.median(run.step_s, axis=0)
    mean_step_s = float(step_s.mean())
    rest_s = np.maximum(step_s - run.own_s.max(axis=0), 0.0)
    gains = np.array([_gain_s(run, step_s, rest_s, row) for row in range(len(run.ranks))])
    excess = np.array([run.own_s[row] - _median_of_others(run.own_s, row) for row in range(len(run.ranks))])
    rows = np.argsort(-gains.sum(axis=1)).tolist()
    candidates = (_finding(run, row, excess[row], gains, step_s, feeds) for row in rows)
    findings = [finding for finding in candidates if finding is not None]
    if not findings and (link := _slow_link(run, mean_step_s)) is not None:
        findings.append(link)
    ideal_step_s, without_worst_s = _ideal_steps(run, rest_s)
    slowdown = mean_step_s / ideal_step_s
    waiting_share = float(run.wait_s.mean() / mean_step_s)
    nobody = f"No rank holds the others up: waiting takes {waiting_share:.0%} of a step, by turns."
    return StragglersResult(
        source=source,
        ranks=len(run.ranks),
        steps=len(run.steps),
        step_s=mean_step_s,
        ideal_step_s=ideal_step_s,
        slowdown=slowdown,
        m_w=(mean_step_s - without_worst_s) / (mean_step_s - ideal_step_s) if slowdown > _NOISE_RATIO else None,
        waiting_share=waiting_share,
        verdict=findings[0].sentence if findings else nobody,
        findings=findings,
        splits=[_split(whole_run, row, float((step_s - gains[row]).mean())) for row in range(len(run.ranks))],
        classes={name: _class_step_s(run, name, rest_s) / ideal_step_s for name in run.parts},
        timeline=[Drawn(rank=name, spans=spans) for name, spans in run.timeline],
        remarks=[*run.remarks],
    )


def _median_of_others(values: Floats, row: int) -> Floats:
    """Return the median (K,) of ``values`` (R, K) over all ranks except the one at ``row``."""
    median: Floats = np.median(np.delete(values, row, axis=0), axis=0)
    return median


def _gain_s(run: RankSteps, step_s: Floats, rest_s: Floats, row: int) -> Floats:
    """Return the seconds (K,) that each step would save if the rank at ``row`` were as fast as the median of the others.

    ``step_s`` (K,) are the steps' times, ``rest_s`` (K,) what a step takes beyond the slowest rank's own work.
    """
    own_s = run.own_s.copy()
    own_s[row] = np.minimum(own_s[row], _median_of_others(own_s, row))
    gain_s: Floats = np.maximum(step_s - np.maximum(own_s.max(axis=0) + rest_s, 0.0), 0.0)
    return gain_s


def _ideal_steps(run: RankSteps, rest_s: Floats) -> tuple[float, float]:
    """Return two mean step times in seconds: the ideal one, and the one in which only the slowest ranks are ideal.

    In the first, every part of every rank takes its mean over ranks and steps; in the second, only the parts of the slowest 3
    % of the ranks do. ``rest_s`` (K,): what each step takes beyond the slowest rank's own work.
    """
    means = {name: float(values.mean()) for name, values in run.parts.items()}
    ideal_s = sum(means.values()) + float(np.median(rest_s))
    slowest = np.argsort(-run.own_s.mean(axis=1))[: int(np.ceil(len(run.ranks) * WORST_SHARE))]
    own_s = run.own_s.copy()
    own_s[slowest] = sum(means.values())
    return ideal_s, float((own_s.max(axis=0) + rest_s).mean())


def _class_step_s(run: RankSteps, name: str, rest_s: Floats) -> float:
    """Return the mean step in seconds if only the part ``name`` varied and the others took their mean over ranks and steps.

    Divided by the ideal step it is the slowdown that this part alone causes. ``rest_s`` (K,): what each step takes beyond the
    slowest rank's own work, in seconds.
    """
    other = sum(float(values.mean()) for part, values in run.parts.items() if part != name)
    return float(run.parts[name].max(axis=0).mean() + other + np.median(rest_s))


def _split(run: RankSteps, row: int, step_if_median_s: float) -> RankSplit:
    """Return the mean step of the rank at ``row``, split into its parts, waiting and exposed communication.

    ``step_if_median_s``: what a step would take if the rank were as fast as the median of the others.
    """
    return RankSplit(
        rank=run.ranks[row],
        node=run.nodes[row],
        step_s=float(run.step_s[row].mean()),
        parts_s={name: float(values[row].mean()) for name, values in run.parts.items()},
        wait_s=float(run.wait_s[row].mean()),
        exposed_s=float(run.exposed_s[row].mean()),
        step_if_median_s=step_if_median_s,
        clock_offset_s=float(run.offsets_s[row]) if run.offsets_s is not None else 0.0,
    )


def _finding(
    run: RankSteps, row: int, excess: Floats, gains: Floats, step_s: Floats, feeds: Feeds
) -> StragglerFinding | None:
    """Return the finding about a rank; None where it does not hold the others up beyond chance.

    Args:
        run: the steps of all ranks.
        row: index of the rank in ``run``.
        excess: (K,) the rank's own work above the median of the others, in seconds.
        gains: (R, K) what each step would save if each rank were as fast as the median of the others, in seconds.
        step_s: (K,) step times in seconds.
        feeds: files that the commands in the remedy read.
    """
    share = float(gains[row].sum()) / float(step_s.sum())
    is_slow = (excess > max(_LEAST_EXCESS * float(step_s.mean()), _OF_WORST * float(excess.max()))) & (gains[row] > 0)
    if not _holds_up(gains, row, step_s, is_slow):
        return None
    onset_index = _onset_index(is_slow)
    pattern, period = _pattern(is_slow, onset_index)
    parts = {
        name: float((values[row] - _median_of_others(values, row))[is_slow].mean())
        for name, values in run.parts.items()
    }
    part = max(parts, key=lambda name: parts[name])
    cause = _cause(run, row, excess, is_slow, pattern, part)
    # Where one part of the computation has less than 80 % of its excess, the sentence names the computation as a whole.
    shown_part = part
    names = [part]
    if part in COMPUTE and parts[part] < 0.8 * sum(parts.get(name, 0.0) for name in COMPUTE):
        shown_part = "compute"
        names = [name for name in run.parts if name in COMPUTE]
    part_s: Floats = np.sum([run.parts[name] for name in names], axis=0)
    own_s = float(part_s[row][is_slow].mean())
    others_s = float(_median_of_others(part_s, row)[is_slow].mean())
    ratio = own_s / others_s if others_s > 0 else None
    remedy, predicted, command = _remedy(run, cause, share, float(np.median(gains[row] / step_s)), feeds)
    finding = StragglerFinding(
        rank=run.ranks[row],
        node=run.nodes[row],
        cause=cause,
        pattern=pattern,
        part=shown_part,
        since_step=int(run.steps[onset_index]),
        every_steps=period,
        slow_steps=int(is_slow.sum()),
        ratio=ratio,
        excess_s=float(excess[is_slow].mean()),
        share_of_steps=float(gains[row][is_slow].sum() / step_s[is_slow].sum()),
        share_of_run=share,
        predicted_gain=predicted,
        command=command,
        sentence="",
    )
    has_several_nodes = len(set(run.nodes)) > 1
    sentence = _sentence(finding, parts[part], len(step_s), from_begin=onset_index == 0, name_node=has_several_nodes)
    return finding.model_copy(update={"sentence": f"{sentence} {remedy}"})


def _holds_up(gains: Floats, row: int, step_s: Floats, slow: Flags) -> bool:
    """Return whether the rank at ``row`` holds the others up: its cost is large, far above the others', and not by chance.

    A rank's cost is the share of the run that would be saved if it were as fast as the median of the others. An obvious cost
    (``PLAIN_GAIN`` or more) needs fewer slow steps and is not tested against chance.

    Args:
        gains: (R, K) seconds that each step would save if each rank were as fast as the median of the others.
        row: index of the rank in ``gains``.
        step_s: (K,) step times in seconds.
        slow: (K,) whether the rank is slow in each step.
    """
    costs = gains.sum(axis=1) / float(step_s.sum())  # (R,)
    is_obvious = costs[row] >= PLAIN_GAIN
    fewest_slow_steps = min(_FEWEST_OBVIOUS if is_obvious else _FEWEST_STEPS, len(step_s))
    others_cost = float(np.median(np.delete(costs, row)))
    is_small = costs[row] < LEAST_GAIN or costs[row] < TIMES_THE_OTHERS * others_cost
    if is_small or int(slow.sum()) < fewest_slow_steps:
        return False
    if not is_obvious and _chance_p_value(gains, row) > LEAST_CHANCE:  # chance alone makes such a cost too often
        return False
    return _sure_share(gains, row, step_s) >= LEAST_GAIN


def _sentence(finding: StragglerFinding, longer_s: float, steps: int, *, from_begin: bool, name_node: bool) -> str:
    """Return the sentence on rank, slowness, pattern and cost.

    Args:
        longer_s: the rank's excess in the named part, in seconds.
        steps: how many steps were measured.
        from_begin: whether the rank is slow since the first step.
        name_node: whether to name the machine.
    """
    who = f"Rank {finding.rank}" + (f" ({finding.node})" if name_node else "")
    when = {
        "persistent": "in every step" if from_begin else f"since step {finding.since_step}",
        "periodic": f"every {finding.every_steps} steps or so",
        "transient": f"in {finding.slow_steps} of {steps} steps",
    }[finding.pattern]
    pace = f"takes {show_seconds(longer_s)} longer in {finding.part}"
    if finding.ratio is not None and finding.ratio < 20:  # a larger ratio is of times near 0 and says little
        pace = f"is {finding.ratio:.2f}x slower in {finding.part}"
    if finding.cause == "pauses":
        pace = f"pauses for {show_seconds(finding.excess_s)}"
    cost = f"{finding.share_of_steps:.0%} of those steps, {finding.share_of_run:.0%} of the run"
    return f"{who} {pace} {when}: {cost} ({finding.cause})."


def _chance_p_value(gains: Floats, row: int) -> float:
    """Return the p-value of the cost of the rank at ``row`` under the hypothesis that each step's slowest rank is random.

    It is the share of random draws in which some rank costs at least as much. ``gains`` (R, K): seconds that each step would
    save by each rank. Draws are seeded, so the result repeats.
    """
    ranks, steps = gains.shape
    cost = gains.max(axis=0)
    slowest_drawn = np.random.default_rng(0).integers(ranks, size=(_DRAWS, steps))
    highest_costs = np.max([np.where(slowest_drawn == rank, cost, 0.0).sum(axis=1) for rank in range(ranks)], axis=0)
    return float((highest_costs >= gains[row].sum() * (1 - 1e-9)).mean())  # sums in another order differ by rounding


def _sure_share(gains: Floats, row: int, step_s: Floats) -> float:
    """Return the share of the run that the rank at ``row`` costs beyond the median of the others, with 95 % confidence.

    It is the 5 % quantile by bootstrap: steps are drawn again with replacement. ``gains`` (R, K), ``step_s`` (K,): seconds.
    """
    drawn = np.random.default_rng(0).integers(len(step_s), size=(_DRAWS, len(step_s)))
    extra_s = (gains[row] - np.median(np.delete(gains, row, axis=0), axis=0))[drawn].sum(axis=1)
    return float(np.quantile(extra_s / step_s[drawn].sum(axis=1), 1 - SURE))


def _onset_index(slow: Flags) -> int:
    """Return the index of the step at which slowness begins, from the slow steps (K,), of which there is at least one.

    It is the slow step from which on the share of slow steps times the root of their number is largest: late enough that most
    steps after it are slow, early enough that there are many.
    """
    slow_indices = np.flatnonzero(slow)
    scores = [slow[start:].mean() * np.sqrt(slow[start:].sum()) for start in slow_indices]
    return int(slow_indices[int(np.argmax(scores))])


def _pattern(slow: Flags, since: int) -> tuple[Pattern, int | None]:
    """Return the pattern of the slow steps (K,), and the period in steps where it is periodic, else None.

    ``since``: index of the step at which slowness begins. Steps are periodic where the standard deviation of their distances is
    at most a quarter of the mean.
    """
    slow_indices = np.flatnonzero(slow)
    if slow[since:].mean() >= _PERSISTENT and slow[since:].sum() >= _FEWEST_STEPS:
        return "persistent", None
    distances = np.diff(slow_indices)
    if len(distances) >= 2 and distances.std() <= 0.25 * distances.mean():
        return "periodic", round(float(distances.mean()))
    return "transient", None


def _cause(run: RankSteps, row: int, excess: Floats, slow: Flags, pattern: str, part: str) -> str:
    """Return the cause in words: slow input, pauses, slow host, thermal drift, uneven work or slow device.

    The shares by which it decides are rules of thumb; docs/stragglers.md says how often they are right.

    Args:
        excess: (K,) the rank's own work above the median of the others, in seconds.
        slow: (K,) steps in which the rank is slow.
        pattern: of the slow steps in time.
        part: the part with the most excess.
    """
    if part == "input":
        return "slow input"
    gap_s = 0.0  # by which the rank's longest gap without compute exceeds that of the others
    if run.gap_s is not None:
        gap_s = float((run.gap_s[row] - _median_of_others(run.gap_s, row))[slow].mean())
        looks_paused = gap_s >= 0.6 * float(excess[slow].mean())
    else:  # telemetry has no gaps: pauses are single slow steps, without more work than the others
        has_more_work = (
            run.work is not None and (run.work[row] > _NOISE_RATIO * _median_of_others(run.work, row))[slow].any()
        )
        looks_paused = not has_more_work and not (slow[1:] & slow[:-1]).any()
    if looks_paused and pattern != "persistent" and slow.mean() <= _SELDOM:
        return "pauses"
    if part == "host":
        return "slow host"
    if _is_drifting(excess):
        return "thermal drift"
    compute_s = run.compute_s[row][slow].mean()
    others_s = _median_of_others(run.compute_s, row)[slow].mean()
    ratio = float(compute_s / max(others_s, _TINY_S))
    if run.work is not None:
        others_work = max(_median_of_others(run.work, row)[slow].mean(), _TINY_S)
        work_ratio = float(run.work[row][slow].mean() / others_work)
        # the extra work must explain at least 30 % of the extra time
        is_explained = work_ratio > _NOISE_RATIO and work_ratio - 1 >= 0.3 * (ratio - 1)
        return "uneven work" if is_explained else "slow device"
    if run.gap_s is not None and gap_s >= 0.3 * float(excess[slow].mean()):
        return "slow device"  # it pauses within its own computation
    optimizer_s = run.parts.get("optimizer")
    # An optimizer of less than a tenth of a millisecond is too short to compare.
    if optimizer_s is not None and float(np.median(optimizer_s)) > 1e-4 and {"forward", "backward"} <= run.parts.keys():
        # The optimizer does the same whatever the batch: a slow device is slow there too.
        others_optimizer_s = _median_of_others(optimizer_s, row)
        optimizer_ratio = float(np.median(optimizer_s[row][slow]) / np.median(others_optimizer_s[slow]))
        passes = [run.parts[name] for name in COMPUTE[:2]]
        pass_ratios = [
            float(part_s[row][slow].mean() / _median_of_others(part_s, row)[slow].mean()) for part_s in passes
        ]
        if optimizer_ratio - 1 < 0.35 * (ratio - 1) and min(pass_ratios) - 1 > 0.4 * (max(pass_ratios) - 1):
            return "uneven work"
    return "slow device"


def _is_drifting(excess: Floats) -> bool:
    """Return whether a rank slows down gradually: a line fits its excess (K,) better than a jump between two levels.

    The two are compared by Schwarz's criterion, because a jump has one more parameter, its position. A running median of 3
    removes outliers. False for fewer than 9 steps, and for an excess that hardly rises.
    """
    count = len(excess)
    if count < 9:
        return False
    padded = np.concatenate([excess[:1], excess, excess[-1:]])
    values: Floats = np.median([padded[:-2], padded[1:-1], padded[2:]], axis=0)
    third = count // 3
    index = np.arange(count)
    if np.ptp(values) == 0.0:
        return False
    rank_correlation = pd.Series(values).rank().corr(pd.Series(index))  # Spearman's, of excess and time
    if rank_correlation < 0.6 or np.median(values[-third:]) < 1.5 * np.median(values[:third]):
        return False
    line_residual = float(((values - np.polyval(np.polyfit(index, values, 1), index)) ** 2).sum())
    jump_residuals = (
        values[:split].var() * split + values[split:].var() * (count - split) for split in range(1, count)
    )
    return bool(line_residual < float(min(jump_residuals)) * count ** (1 / count))


def _slow_link(run: RankSteps, mean_step_s: float) -> StragglerFinding | None:
    """Return the finding of a slow link; None where nothing indicates one.

    The indication is that one rank, or two neighbours in the ring, often see the longest collectives end late: data over a slow
    link arrives late at the receiving rank, and at the rank to which that one sends on. ``mean_step_s``: mean step in seconds.
    """
    exposed = float(run.exposed_s.mean(axis=1).max() / mean_step_s)
    if run.late_s is None or run.late_s.shape[1] < _FEWEST_LINK or exposed < _LINK_SHARE:
        return None
    ranks = len(run.ranks)
    median_late_s = np.median(run.late_s, axis=1)  # (R,)
    row, second_row = np.argsort(-median_late_s)[:2].tolist()
    end_rows = [row]
    if median_late_s[second_row] >= 0.5 * median_late_s[row] and ranks > 2:
        if (row - second_row) % ranks not in (1, ranks - 1):
            return None
        end_rows = [row, second_row]
        # Of the two, the rank that sends to the other is the one at the slow link.
        row = row if (row + run.ring) % ranks == second_row else second_row
    others_late = np.delete(run.late_s, end_rows, axis=0)
    margin_s = run.late_s[end_rows].min(axis=0) - np.median(others_late, axis=0)
    # A busy machine also wakes some rank later than others, but not always the same one, and not by so much.
    typical_margin_s = float(np.median(margin_s))
    next_s = float(np.median(others_late, axis=1).max())  # of the rank that is latest among the others
    if typical_margin_s < _LATE_SHARE * mean_step_s or (margin_s > 0.5 * typical_margin_s).mean() < _OFTEN:
        return None
    if len(end_rows) == 1 and median_late_s[end_rows[0]] < TIMES_THE_OTHERS * next_s:
        return None
    late_s = float(median_late_s[row])
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
    """Return the share of a median step that batches in proportion to speeds would save (LB-BSP: ``x_i = v_i / sum v * X``).

    With these, all ranks compute for the harmonic mean of their compute times; other work of a rank does not change.
    """
    step_s = np.median(run.step_s, axis=0)
    compute_s = np.median(run.compute_s, axis=1)
    fixed_s = np.median(run.own_s - run.compute_s, axis=1)
    balanced_compute_s = len(compute_s) / float((1.0 / np.maximum(compute_s, _TINY_S)).sum())
    rest_s = max(float(np.median(step_s - run.own_s.max(axis=0))), 0.0)
    balanced_step_s = balanced_compute_s + float(fixed_s.max()) + rest_s
    return max(0.0, 1.0 - balanced_step_s / float(np.median(step_s)))


def _remedy(
    run: RankSteps, cause: str, share: float, median_share: float, feeds: Feeds
) -> tuple[str, float | None, str | None]:
    """Return (remedy in words, share of a step that it is predicted to gain, command to run).

    Args:
        cause: as :func:`_cause` returns it.
        share: share of the run that the rank costs.
        median_share: share of the median step that the rank costs.
        feeds: files that the commands read.
    """
    if cause in ("slow device", "uneven work", "thermal drift"):
        gain = min(balanced_gain(run), max(share, median_share))
        if len(run.steps) <= LEAST_WARM_UP:  # balance replays only longer runs
            command = f"ddltool plan job.yaml --strategy lb-bsp --telemetry {feeds.telemetry}"
            return f"Balanced batches would win {gain:.0%} back (predicted): {command}", gain, command
        follow_up = " and follow it while it runs with ddltool.runtime.balance" if cause == "thermal drift" else ""
        command = f"ddltool balance {feeds.speeds}"
        return f"Balanced batches would win {gain:.0%} back (predicted){follow_up}: {command}", gain, command
    if cause == "pauses":
        command = f"ddltool barrier {feeds.ends}"
        advice = _PAUSES
    else:
        command = f"ddltool plan job.yaml --telemetry {feeds.telemetry}"
        advice = _INPUT if cause == "slow input" else _HOST
    return f"{advice} That wins up to {share:.0%} (predicted). What else would help: {command}", share, command


def speeds(run: RankSteps, batch: int) -> list[Sequence[float | int]]:
    """Return the rows that ``ddltool balance`` reads: iteration, worker, speed, CPU and memory.

    The speed is in samples per second of the rank's own compute, with ``batch`` samples per step. CPU and memory are not known
    and set to 1.
    """
    speed = run.speed(batch)
    return [
        (int(number), rank, float(speed[row, column]), 1.0, 1.0)
        for column, number in enumerate(run.steps)
        for row, rank in enumerate(run.ranks)
    ]


def ends(run: RankSteps) -> list[Sequence[float | int]]:
    """Return the rows that ``ddltool barrier`` reads: worker, iteration (from 0) and its end in seconds if nobody had waited.

    Times are shifted so that all workers end their last iteration at the same time.
    """
    end = run.own_s.cumsum(axis=1)
    end += end[:, -1].max() - end[:, -1:]
    return [
        (rank, column, float(end[row, column]))
        for row, rank in enumerate(run.ranks)
        for column in range(len(run.steps))
    ]


def telemetry(run: RankSteps, batch: int, device: str = "cpu") -> list[TelemetryRow]:
    """Return the run as rows of telemetry, which ``plan --telemetry``, ``fit`` and ``verify`` read.

    ``batch``: samples of each rank in a step; ``device``: name of the device type. Ranks are numbered from 0 in the run's
    order.
    """
    nodes = max(1, len(set(run.nodes)))
    return [
        TelemetryRow(
            step=int(number),
            rank=row,
            world_size=len(run.ranks),
            num_nodes=nodes,
            device=device,
            batch=batch,
            total_batch=batch * len(run.ranks),
            compute_s=max(float(run.compute_s[row, column]), 1e-9),  # telemetry demands a time above 0
            wait_s=float(run.wait_s[row, column]),
            sync_s=float(run.exposed_s[row, column]),
            step_s=float(run.step_s[row, column]),
            memory_bytes=0.0,
        )
        for column, number in enumerate(run.steps)
        for row in range(len(run.ranks))
    ]
