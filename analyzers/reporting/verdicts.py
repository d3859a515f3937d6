"""What an artifact answers in one sentence, how sure that is, and what to do next: the cards on top of a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from ddltool.analyzers.gating.formats import sentence
from ddltool.analyzers.gating.metrics import harmless
from ddltool.analyzers.goodput.observations import WARMUP_STEPS
from ddltool.analyzers.loading.artifact_files import Found
from ddltool.analyzers.reporting.section import Section, Verdict
from ddltool.errors import few, listed, shortened
from ddltool.goodput_model import Goodput
from ddltool.plans import Enforcement, Plan
from ddltool.results import BalanceResult, BarrierResult, GateResult, NetworkResult, StragglersResult, Verification
from ddltool.simulation_results import SimulationDocument, SweepDocument
from ddltool.units import counted, show_bytes, show_seconds

_LONGEST = 60
# A smaller gain reads as +0.0%.
_SHOWN = 0.0005
# Which question a reader of several artifacts asked; a gate that failed and a plan that a run has refuted come first.
_IMPORTANCE = (
    *("verification", "stragglers", "plan", "simulation", "sweep", "balance", "barrier", "gate", "telemetry", "graph"),
    *("goodput", "profile", "network", "sync", "enforcement"),
)


def headline(sections: Sequence[Section]) -> Section | None:
    """Return the section whose verdict a page opens with; None where none has one."""

    def rank(section: Section) -> tuple[bool, bool, int]:
        kind = section.anchor.rsplit("-", 1)[0]
        verdict = section.verdict
        assert verdict is not None
        return not (kind in ("gate", "verification") and verdict.good is False), verdict.minor, _IMPORTANCE.index(kind)

    judged = [section for section in sections if section.verdict is not None]
    return min(judged, key=rank, default=None)


def verdict_of(one: Found, found: Sequence[Found] = ()) -> Verdict | None:
    """Return an artifact's verdict beside others of ``found``; None for what its section judges itself (a graph)."""
    if one.kind == "plan":
        return _plan(one, found)
    if one.kind == "telemetry":
        return _telemetry(one.content)
    judge = _JUDGES.get(one.kind)
    return judge(one.content) if judge is not None else None


def _plan(one: Found, found: Sequence[Found]) -> Verdict:
    plan: Plan = one.content
    job = shortened(plan.job, _LONGEST)
    decision = plan.decision
    mix = ", ".join(f"{row.devices} {shortened(row.device_type, 30)}" for row in plan.assignments)
    answer = f"{job}: {plan.strategy} on {mix} makes {plan.throughput:.4g} mini-batches/s"
    then = f"ddltool emit {one.name} -o enforce.json, train with it, then ddltool verify"
    if decision is not None:
        picked = next((option for option in decision.options if option.strategy == decision.picked), None)
        if picked is not None and decision.baseline.throughput:
            gain = picked.throughput / decision.baseline.throughput - 1
            anyway = ", what one would do anyway" if picked.devices == decision.baseline.devices else ""
            against = f"{gain:+.1%} against {decision.baseline_name}"
            answer += f", {against if abs(gain) >= _SHOWN else f'as fast as {decision.baseline_name}{anyway}'}"
        sure = next((word.removeprefix("How sure: ") for word in decision.words if word.startswith("How sure")), "")
        if picked is not None and picked.low_s is not None and picked.high_s is not None:
            sure = f"between {show_seconds(picked.low_s)} and {show_seconds(picked.high_s)} per step; {sure}"
        return Verdict(answer=f"{answer} (predicted).", sure=sure, then=then, good=None if decision.too_close else True)
    others = (other.content for other in found if other.kind == "plan")
    rival = next((other for other in others if other.job == plan.job and other.strategy != plan.strategy), None)
    good = None
    if rival is not None and rival.throughput > 0:
        gain = plan.throughput / rival.throughput - 1
        answer += f", {gain:+.1%} against {rival.strategy}"
        good = gain >= 0
    sure = "not known: its times come without an error; plan --strategy auto gives an interval where they have one"
    return Verdict(answer=f"{answer} (predicted).", sure=sure, then=then, good=good, minor=good is False)


def _telemetry(frame: pd.DataFrame) -> Verdict:
    steady = frame[frame["step"] >= frame["step"].min() + WARMUP_STEPS]
    steady = steady if len(steady) else frame
    low, middle, high = steady["step_s"].quantile([0.25, 0.5, 0.75])
    waiting = float(steady["wait_s"].sum() / max(steady["step_s"].sum(), 1e-300))
    return Verdict(
        answer=f"A step took {show_seconds(middle)}; {waiting:.0%} of it waiting for others (measured).",
        sure=f"half of all between {show_seconds(low)} and {show_seconds(high)}",
        then="ddltool verify PLAN TELEMETRY; ddltool fit on it makes the next plan better",
    )


def _verification(found: Verification) -> Verdict:
    step = found.iteration
    answer = f"The step took {show_seconds(step.measured_s)}, predicted {show_seconds(step.predicted_s)} ({step.error:+.1%})."
    again = few(found.refit, 1)
    return Verdict(
        answer=answer,
        sure=f"half of the measured steps between {show_seconds(step.low_s)} and {show_seconds(step.high_s)}",
        then=again[0] if again else "nothing to fit again: the plan's figures hold",
        good=found.passed if found.max_error is not None else None,
    )


def _gate(found: GateResult) -> Verdict:
    count = counted(len(found.checks), "check")
    if found.passed:
        return Verdict(answer=f"Passed: {count}.", sure=_level(found), then="let the change in", good=True)
    answer = f"FAILED: {len(found.failed)} of {count}: {harmless(sentence(found.failed[0]))}."
    then = "undo what made it so, or write the new baseline if it is meant"
    return Verdict(answer=answer, sure=_level(found), then=then, good=False)


def _level(found: GateResult) -> str:
    tested = [check.noise for check in found.checks if check.noise is not None]
    return f"noise raises a false alarm in at most {found.level:.0%} of gates" if tested and found.level else ""


def _simulation(found: SimulationDocument) -> Verdict:
    ranked = sorted(found.policies.items(), key=lambda item: item[1].avg_jct_s)
    (best, own), (worst, last) = ranked[0], ranked[-1]
    answer = f"{shortened(best, _LONGEST)}: jobs complete after {show_seconds(own.avg_jct_s)} on average"
    if worst != best and last.avg_jct_s > 0:
        answer += f", {1 - own.avg_jct_s / last.avg_jct_s:.0%} sooner than under {shortened(worst, _LONGEST)}"
    sure = f"one workload and one seed: no interval; 99 % of its jobs within {show_seconds(own.p99_jct_s)}"
    return Verdict(answer=f"{answer} (simulated).", sure=sure, then="ddltool sweep --seeds 10 gives an interval")


def _sweep(found: SweepDocument) -> Verdict | None:
    times: dict[str, list[float]] = {}
    for cell in found.cells:
        if cell.figures is not None:
            times.setdefault(cell.policy, []).append(cell.figures.avg_jct_s)
    if not times:
        return Verdict(answer="No replay of this sweep came to an end.", then="see the errors below", good=False)
    means = {name: math.fsum(value / len(values) for value in values) for name, values in times.items()}
    best = min(means, key=lambda name: means[name])
    answer = f"{shortened(best, _LONGEST)}: jobs complete after {show_seconds(means[best])} on average"
    values = times[best]
    sure = "one replay: no interval"
    if len(values) > 1:
        largest = max(values) or 1.0  # the squares of enormous times are no numbers
        spread = largest * float(np.std(np.divide(values, largest), ddof=1))
        half = float(stdtrit(len(values) - 1, 0.975)) * spread / math.sqrt(len(values))
        low, high = max(0.0, means[best] - half), means[best] + half
        sure = f"95 % interval of the mean over {len(values)} replays: {show_seconds(low)} to {show_seconds(high)}"
    then = "compare the two that matter in pairs: --compare A,B" if found.comparison is None else ""
    return Verdict(answer=f"{answer} (simulated).", sure=sure, then=then)


def _balance(found: BalanceResult) -> Verdict | None:
    if not found.predictors:
        return None
    name, best = min(found.predictors.items(), key=lambda item: item[1].iteration_time_ratio)
    saved = 1 - best.iteration_time_ratio
    bound = 1 - found.oracle.iteration_time_ratio
    worth = saved > 0
    text = f"{saved:.1%} less time per iteration" if worth else f"{-saved:.1%} more time per iteration"
    return Verdict(
        answer=f"Batches sized by {name}: {text} than equal ones (simulated).",
        sure=f"knowing the speeds would save {bound:.1%}; mean of {found.iterations - found.warm_up:,} iterations",
        then="balance(model, ...) in the script does it while it trains" if worth else "leave the batches equal",
        good=worth,
    )


def _barrier(found: BarrierResult) -> Verdict:
    _, best = min(found.objectives.items(), key=lambda item: item[1].waiting_time_s)
    wait, before = show_seconds(best.waiting_time_s), show_seconds(found.bsp.waiting_time_s)
    return Verdict(
        answer=f"The longest waiting of a worker is {wait} at the best barrier, {before} under BSP (predicted).",
        sure=f"workers are then up to {counted(best.iteration_gap, 'iteration')} apart",
        then="Server(policy=ElasticBSP(...)) sets such barriers; see the trade-off for a bound on the gap",
        good=best.waiting_time_s < found.bsp.waiting_time_s,
    )


def _stragglers(found: StragglersResult) -> Verdict:
    first = found.findings[0] if found.findings else None
    sure = f"slowdown {found.slowdown:.3f} over {counted(found.steps, 'step')} of {counted(found.ranks, 'rank')}"
    then = (first.command or "") if first is not None else "nothing: the ranks are alike"
    return Verdict(answer=found.verdict, sure=sure, then=then, good=first is None)


def _goodput(found: Goodput) -> Verdict:
    following = found.next_measurement
    then = "name it in job.yaml (goodput:) and plan"
    if following is not None and following.variance_reduction > 0.05:
        then = (
            f"measure {counted(following.num_replicas, 'replica')} at local batch {following.local_batch_size}: "
            f"removes {following.variance_reduction:.0%} of the variance"
        )
    held = f"{found.holdout.mape:.1%} on rows kept out" if found.holdout is not None else "no rows were kept out"
    answer = f"The model is off by {found.mape:.1%} on its {counted(found.samples, 'row')}."
    return Verdict(answer=answer, sure=held, then=then)


def _profile(frame: pd.DataFrame) -> Verdict:
    rate = frame["local_batch_size"] * frame["num_replicas"] / frame["step_time_s"]
    best = frame.iloc[int(rate.to_numpy().argmax())]
    replicas = counted(int(best["num_replicas"]), "replica")
    sure = ""
    if "step_time_low_s" in frame.columns and pd.notna(best.get("step_time_low_s")):
        low, high = (show_seconds(float(best[f"step_time_{end}_s"])) for end in ("low", "high"))
        sure = f"95 % interval of its step: {low} to {high}"
    answer = f"Fastest: {rate.max():,.4g} samples/s, local batch {int(best['local_batch_size'])} on {replicas}."
    return Verdict(answer=answer, sure=sure, then="ddltool fit makes a throughput model of it")


def _network(found: NetworkResult) -> Verdict:
    answer = f"{show_bytes(found.bandwidth_bytes_per_s)}/s, {show_seconds(found.latency_s)} between the slowest pair."
    return Verdict(answer=answer, sure=f"the line misses by {found.residual:.1%}", then="give both to trace and plan")


def _enforcement(made: Enforcement) -> Verdict:
    sizes = listed([str(rank.local_batch_size) for rank in made.ranks], 8)
    answer = f"{counted(made.world_size, 'rank')}, local batches {sizes}."
    return Verdict(answer=answer, then="attach(...) in the script follows it; telemetry says what happened")


def _sync(rows: Sequence[Mapping[str, Any]]) -> Verdict | None:
    waits = [row["wait_s"] for row in rows if row["event"] == "step"]
    if not waits:
        return None
    low, middle, high = np.quantile(waits, [0.25, 0.5, 0.75])
    return Verdict(
        answer=f"A pull waited {show_seconds(middle)} for other workers (measured).",
        sure=f"half of all between {show_seconds(low)} and {show_seconds(high)}",
    )


_JUDGES: dict[str, Callable[[Any], Verdict | None]] = {
    **{"verification": _verification, "gate": _gate, "simulation": _simulation, "sweep": _sweep, "balance": _balance},
    **{"barrier": _barrier, "stragglers": _stragglers, "goodput": _goodput, "profile": _profile},
    **{"network": _network, "enforcement": _enforcement, "sync": _sync},
}
