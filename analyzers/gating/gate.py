"""The verdict: every rule on every figure it is about."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddltool.analyzers.gating.metrics import Metric, show
from ddltool.analyzers.gating.noise import FEWEST_REPEATS, Cell, enough_repeats, geometric_mean, past_limit
from ddltool.analyzers.gating.rules import Rule, check_unit, select
from ddltool.errors import InputError
from ddltool.results import GateCheck, GateResult

LEVEL = 0.05
_OPS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt, "==": operator.eq, "!=": operator.ne}
# Decimal limits and sums of floats differ in their last bits; that is no regression.
_ROUNDING = 1e-9
_LARGEST = sys.float_info.max


def judge(
    rules: Sequence[Rule],
    current: Mapping[str, Metric],
    baseline: Mapping[str, Metric] | None,
    *,
    level: float = LEVEL,
    seed: int = 0,
    where: str = "--rule",
) -> GateResult:
    """Return the verdict of the rules on the metrics of two artifacts of one kind; whoever read them names the files.

    A measured figure with repeats fails only when it is past its limit beyond noise, tested so that at most ``level`` of gates
    whose figures truly keep their limits raise any alarm (Bonferroni). Raises InputError for rules that do not fit the
    metrics and for a rule on changes without a baseline.
    """
    drafts: list[_Draft] = []
    for rule in rules:
        if rule.relative and baseline is None:
            raise InputError(where, f"{rule.text!r} compares with a baseline", "give --baseline, or an absolute limit")
        names = select(rule, current, baseline or {}, where)
        drafts += [_aligned(rule, current.get(name), (baseline or {}).get(name), where) for name in names]
    if not drafts:
        raise InputError(where, "no rule is about a figure of these artifacts", f"figures: {', '.join(current)}")
    tested = [draft for draft in drafts if draft.testable]
    checks = {check.name: check for check in (_check(draft, level / max(len(tested), 1), seed) for draft in drafts)}
    words = None
    if tested:
        words = (
            f"noise test: studentised difference of log medians, null simulated for the numbers of repeats; one-sided, "
            f"false alarms at most {level:.3g} for the whole gate ({len(tested)} tests)"
        )
        if any(cell.runs < FEWEST_REPEATS for draft in tested for cell in draft.cells):
            words += f"; noise within runs only: give {FEWEST_REPEATS} files or more a side to count that between runs"
    return GateResult(
        passed=all(check.passed for check in checks.values()),
        artifact="",
        rules_from=where,
        current=[],
        baseline=[],
        level=level,
        noise_test=words,
        checks=list(checks.values()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draft:
    """A rule and the two sides of a figure, of which at least one has it."""

    rule: Rule
    current: Metric | None
    baseline: Metric | None
    note: str = ""

    @property
    def cells(self) -> list[Cell]:
        """The cells of the sides that are compared."""
        sides = (self.current, self.baseline) if self.rule.relative else (self.current,)
        return [cell for side in sides if side is not None for cell in side.cells]

    @property
    def testable(self) -> bool:
        """Whether the noise test applies."""
        rule = self.rule
        if self.current is None or not self.current.measured or rule.op in ("==", "!=") or rule.demand == "unchanged":
            return False
        if not enough_repeats(self.current.cells):
            return False
        if rule.relative:
            return self.baseline is not None and enough_repeats(self.baseline.cells)
        return isinstance(rule.value, float) and rule.value > 0


def _aligned(rule: Rule, current: Metric | None, baseline: Metric | None, where: str) -> _Draft:
    """Return the two sides of a check reduced to the configurations that both have."""
    metric = current or baseline
    assert metric is not None  # the names come from the two sides
    check_unit(rule, metric, where)
    if current is None or baseline is None or not rule.relative:
        return _Draft(rule=rule, current=current, baseline=baseline)
    either, other = ({cell.key for cell in side.cells} for side in (current, baseline))
    keys, everything = either & other, either | other
    if keys == everything:
        return _Draft(rule=rule, current=current, baseline=baseline)
    if not keys:
        problem = f"the two sides of {metric.name} have no configuration in common"
        raise InputError(where, problem, f"they have {', '.join(sorted(everything))}")

    def only(side: Metric) -> Metric:
        cells = tuple(cell for cell in side.cells if cell.key in keys)
        return replace(side, cells=cells, value=geometric_mean(cells))

    note = f"over the {len(keys)} of {len(everything)} configurations that both sides have"
    return _Draft(rule=rule, current=only(current), baseline=only(baseline), note=note)


def _check(draft: _Draft, level: float, seed: int) -> GateCheck:
    rule, metric = draft.rule, draft.current or draft.baseline
    assert metric is not None
    now = draft.current.value if draft.current is not None else None
    before = draft.baseline.value if draft.baseline is not None else None
    limit, op = _limit(rule, before, now)
    passed, notes = True, [draft.note]
    if now is None:
        passed, notes = False, ["the baseline has it, the current artifact does not"]
    elif limit is None:
        notes = ["new: the baseline does not have it"]
    else:
        passed = _keeps(now, op, limit)
        if metric.measured and not draft.testable:
            few = f"(give {FEWEST_REPEATS} or more repeats or files)"
            notes.append(f"measured without repeats, so its noise is unknown {few}")
    made = GateCheck(
        name=f"{metric.name} {rule.demand}",
        metric=metric.name,
        rule=rule.text,
        unit=metric.unit,
        baseline=before,
        current=now,
        limit=limit,
        op=op,
        passed=passed,
        in_noise=False,
        change=_change(now, before),
        noise=None,
        note="; ".join(filter(None, notes)) or None,
    )
    if draft.testable and isinstance(limit, float) and limit > 0:
        return _with_noise(made, draft, limit, level, seed)
    return made


def _change(now: float | str | None, before: float | str | None) -> float | None:
    """Return the relative change, None where there is none that can be written as a percentage."""
    if not (isinstance(now, float) and isinstance(before, float) and before != 0):
        return None
    change = (now - before) / abs(before)
    return change if math.isfinite(100 * change) else None


def _limit(rule: Rule, before: float | str | None, now: float | str | None) -> tuple[float | str | None, str]:
    """Return the value that the current figure is held against, and how."""
    if not rule.relative:
        return rule.value, rule.op
    if before is None:
        return None, "<="
    if isinstance(before, str) or isinstance(rule.value, str):
        return before, "=="
    amount = rule.value * abs(before) if rule.dimension == "%" else rule.value
    # Of the two limits of a change the one on the side to which the figure moved.
    upward = rule.direction == "increase" or (rule.direction == "change" and isinstance(now, float) and now >= before)
    # Where the sum overflows, no figure can be past it.
    return (min(before + amount, _LARGEST), "<=") if upward else (max(before - amount, -_LARGEST), ">=")


def _keeps(now: float | str, op: str, limit: float | str) -> bool:
    if isinstance(now, str) or isinstance(limit, str):
        return bool(_OPS[op](str(now), str(limit)))
    if math.isclose(now, limit, rel_tol=_ROUNDING, abs_tol=0.0):
        return op in ("<=", ">=", "==")
    return bool(_OPS[op](now, limit))


def _with_noise(made: GateCheck, draft: _Draft, limit: float, level: float, seed: int) -> GateCheck:
    """Return the check with its noise test: it fails only when the figure is past the limit beyond noise."""
    assert draft.current is not None  # testable drafts have it
    other: tuple[Cell, ...] = draft.baseline.cells if draft.rule.relative and draft.baseline is not None else ()
    # No float is further from 1 than these, and a limit of 0 has no logarithm.
    ratio = min(max(limit / geometric_mean(other), sys.float_info.min), _LARGEST) if other else limit
    # A bound in both directions is two tests.
    each = level / 2 if draft.rule.direction == "change" else level
    test = past_limit(draft.current.cells, other, ratio, above=made.op in ("<=", "<"), level=each, seed=seed)
    if made.passed or test.p <= each:
        return made.model_copy(update={"noise": test})
    span = f"{100 * (test.low - 1):+.1f}% .. {100 * (test.high - 1):+.1f}%" if other else ""
    shown = f"the change is {span}" if other else f"it is {show(test.low, made.unit)} .. {show(test.high, made.unit)}"
    told = f"past the limit, but inside the noise (p = {test.p:.2g}, needs <= {each:.2g}): {shown}"
    note = "; ".join(filter(None, (draft.note, told)))
    return made.model_copy(update={"noise": test, "passed": True, "in_noise": True, "note": note})
