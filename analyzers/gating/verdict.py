"""From files, or what a program holds, to a verdict: what ``ddltool gate``, ``ddltool.gate`` and the pytest plugin ask.

:func:`judge` holds every rule against every figure that it is about.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import BaseModel, Field, PrivateAttr

from ddltool.analyzers.gating.metrics import KINDS, Figures, Metric, combine, extract, show
from ddltool.analyzers.gating.noise import FEWEST_REPEATS, Cell, enough_repeats, geometric_mean, past_limit
from ddltool.analyzers.gating.rules import Rule, check_unit, default_rules, parse_rules, select
from ddltool.analyzers.loading.artifact_files import checked_document, is_table, profile_document, read_artifact
from ddltool.artifacts import Record, parse_record, read_text, read_toml, save, write_text
from ddltool.errors import InputError, did_you_mean
from ddltool.graph import Graph, to_document
from ddltool.profiles import write_profile
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


CONFIG_NAME = "ddltool.toml"


class GateConfig(Record):
    """The ``[gate]`` table of a ``ddltool.toml``: rules by kind (without ``ddltool.``), level and baseline."""

    rules: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(default_factory=dict)
    level: Annotated[float, Field(gt=0, lt=1)] | None = None
    baseline: str | None = None
    _where: str = PrivateAttr("")

    @property
    def where(self) -> str:
        """The file that was read."""
        return self._where


def read_config(path: Path, *, required: bool = True) -> GateConfig | None:
    """Return the ``[gate]`` table of a TOML file, None where it need not be there and is not.

    Raises InputError naming what is unknown or of the wrong type.
    """
    if not required and not path.is_file():
        return None
    table = read_toml(path).get("gate")
    if not isinstance(table, dict):
        raise InputError(str(path), "has no table [gate]", "write [gate.rules] with lists of rules by kind")
    found = parse_record(table, GateConfig, str(path), "gate")
    known = {kind.removeprefix("ddltool.") for kind in KINDS}
    for kind in found.rules:
        if kind not in known:
            raise InputError(f"{path}:gate.rules", f"unknown kind {kind!r}", did_you_mean(kind, known))
    folder = str(path.parent / found.baseline) if found.baseline is not None else None
    made = found.model_copy(update={"baseline": folder})
    made._where = str(path)
    return made


def rules_for(kind: str, given: Sequence[str], config: GateConfig | None) -> tuple[list[Rule], str]:
    """Return the rules that hold, and where they come from: as given, else the configuration's, else the defaults."""
    short = kind.removeprefix("ddltool.")
    if given:
        return parse_rules(given, "--rule"), "--rule"
    if config is not None and short in config.rules:
        return parse_rules(config.rules[short], f"{config.where}:gate.rules.{short}"), config.where
    return default_rules(kind), f"defaults for {short}"


def gate(
    current: Any,
    baseline: Any = (),
    *,
    rules: Sequence[str] = (),
    level: float | None = None,
    config: Path | GateConfig | None = None,
    seed: int = 0,
) -> GateResult:
    """Hold an artifact against limits and a baseline: the verdict, with every check.

    ``current``, ``baseline``: a file or several (repeats), a folder of baselines with the same names, a Graph, a profile's
    DataFrame, a result or a document. ``rules`` such as ``iteration_s increase <= 5%``; without any those of ``config`` (a
    TOML file; ``./ddltool.toml`` where it is there), else the kind's defaults. ``level``: share of false alarms from noise
    for the whole gate, 0.05 by default. Raises InputError for rules that do not fit, and for two kinds.
    """
    settings = (
        config if isinstance(config, GateConfig) else read_config(config or Path(CONFIG_NAME), required=bool(config))
    )
    ours = several(current)
    found = figures_of(ours)
    chosen, origin = rules_for(found.kind, rules, settings)
    against = baselines_of(ours, several(baseline), settings)
    before = figures_of(against) if against else None
    if before is not None and before.kind != found.kind:
        problem = f"is a {before.kind}, {_name(ours[0])} a {found.kind}"
        raise InputError(_name(against[0]), problem, "compare two artifacts of one kind")
    verdict = judge(
        chosen,
        found.metrics,
        before.metrics if before is not None else None,
        level=_level(level, settings),
        seed=seed,
        where=origin,
    )
    names = {"current": [*map(_name, ours)], "baseline": [*map(_name, against)]}
    return verdict.model_copy(update={"artifact": found.kind, "rules_from": origin, **names})


def several(given: Any) -> list[Any]:
    """Return one thing, or a list of things, as a list; texts are paths."""
    many = given if isinstance(given, (list, tuple)) else [given]
    return [Path(one) if isinstance(one, str) else one for one in many]


def _name(given: Any) -> str:
    return str(given) if isinstance(given, Path) else type(given).__name__


def figures_of(given: Iterable[Any]) -> Figures:
    """Return the metrics of what measures or predicts the same thing. Raises InputError for two kinds."""
    return combine([(document_of(one), _name(one)) for one in given])


def baselines_of(current: Sequence[Any], given: Sequence[Any], settings: GateConfig | None) -> list[Any]:
    """Return the baselines; a folder stands for the files in it that are named as the current ones."""
    if not given and settings is not None and settings.baseline is not None:
        given = [Path(settings.baseline)]
    named = [one.name for one in current if isinstance(one, Path)]
    folders = [isinstance(one, Path) and one.is_dir() for one in given]
    return [
        each
        for one, folder in zip(given, folders, strict=True)
        for each in ([one / name for name in named] if folder else [one])
    ]


def _level(given: float | None, settings: GateConfig | None) -> float:
    """Return the share of false alarms: as given, else configured, else the default. Raises InputError outside (0, 1)."""
    chosen = given if given is not None else settings.level if settings and settings.level else LEVEL
    if not 0 < chosen < 1:
        raise InputError("--level", f"is {chosen:g}", "give a share between 0 and 1, such as 0.05")
    return chosen


def hold(
    current: Any, target: Path, texts: Sequence[str], level: float | None, *, update: bool, config: Path
) -> GateResult:
    """Return the verdict on an artifact against the baseline ``target``, by the rules of ``texts``, else of ``config``.

    With ``update`` the current artifact is its own baseline, so that absolute limits still hold.
    """
    found = extract(document_of(current), "current")
    settings = read_config(config, required=False)
    rules, origin = rules_for(found.kind, texts, settings)
    if not update and not target.is_file():
        raise InputError(str(target), "no such baseline", "write it with: pytest --ddltool-update")
    try:
        before = figures_of([target]) if target.exists() else found
    except InputError:
        if not update:
            raise
        before = found  # a broken baseline is what an update is for
    if before.kind != found.kind:
        raise InputError(str(target), f"is a {before.kind}", f"the current artifact is a {found.kind}")
    sides = found.metrics, (found if update else before).metrics
    return judge(rules, *sides, level=_level(level, settings), where="rules" if texts else origin)


def document_of(current: Any) -> Mapping[str, Any]:
    """Return an artifact, whatever it is held in, as a document with its kind."""
    if isinstance(current, (str, Path)):
        return read_artifact(Path(current))
    if isinstance(current, Graph):
        return to_document(current)
    if isinstance(current, pd.DataFrame):
        return profile_document(current, "current")
    if isinstance(current, BaseModel):
        return current.model_dump(mode="json")
    if isinstance(current, Mapping):
        return checked_document(dict(current), "current")
    problem = f"cannot gate a {type(current).__name__}"
    raise InputError("current", problem, "give a path, a Graph, a DataFrame, an artifact or a document")


def write_baseline(current: Any, target: Path) -> None:
    """Write the baseline atomically, in the form that its name says."""
    is_file = isinstance(current, (str, Path))
    tabular = is_table(Path(current)) if is_file else isinstance(current, pd.DataFrame)
    if tabular != is_table(target):
        remedy = "name it .csv" if tabular else "name it .json"
        raise InputError(str(target), f"is not the name of a {'table' if tabular else 'document'}", remedy)
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_file:
        write_text(target, read_text(current))
    elif isinstance(current, pd.DataFrame):
        write_profile(current, target)
    else:
        save(current if isinstance(current, BaseModel) else dict(document_of(current)), target)
