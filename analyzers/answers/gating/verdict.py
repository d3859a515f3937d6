"""From artifacts (files, or objects of a program) to a verdict, for the command and the pytest plugin.

:func:`judge` checks every rule against every metric that it covers.
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

from ddltool.analyzers.answers.gating.metrics import KINDS, Figures, Metric, combine, extract, show
from ddltool.analyzers.answers.gating.noise import FEWEST_REPEATS, Cell, enough_repeats, geometric_mean, past_limit
from ddltool.analyzers.answers.gating.rules import Rule, check_unit, default_rules, parse_rule, select
from ddltool.artifact_files import checked_document, is_table, profile_document, read_artifact
from ddltool.artifacts import Record, parse_record, read_text, read_toml, save, write_text
from ddltool.errors import InputError, did_you_mean
from ddltool.graph import Graph, to_document
from ddltool.profiles import write_profile
from ddltool.results import GateCheck, GateResult

LEVEL = 0.05
_OPS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt, "==": operator.eq, "!=": operator.ne}
# A decimal limit and a sum of floats may differ in their last bits, which is no regression.
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
    """Return the checks of all rules on the metrics of two artifacts of one kind; the caller fills in the files' names.

    A measured metric with repeats fails only if it exceeds its limit by more than noise. Raises InputError for a rule
    that does not fit the metrics, for one on a change without a baseline, and if no rule covers any metric.

    Args:
        rules: what is checked.
        current: the metrics of the artifact that is judged, by name.
        baseline: those of the one that it is compared with; None allows absolute limits only.
        level: the largest probability that a gate whose true figures keep their limits fails; it is divided by the
            number of tests (Bonferroni).
        seed: of the simulated noise.
        where: the source of the rules.
    """
    pairs: list[_RuleOnMetric] = []
    for rule in rules:
        if rule.relative and baseline is None:
            raise InputError(where, f"{rule.text!r} compares with a baseline", "give --baseline, or an absolute limit")
        names = select(rule, current, baseline or {}, where)
        pairs += [_align_sides(rule, current.get(name), (baseline or {}).get(name), where) for name in names]
    if not pairs:
        raise InputError(where, "no rule is about a figure of these artifacts", f"figures: {', '.join(current)}")
    testable = [pair for pair in pairs if pair.testable]
    # By name, so that a check that two rules ask for is listed once.
    checks = {check.name: check for check in (_check(pair, level / max(len(testable), 1), seed) for pair in pairs)}
    noise_test = None
    if testable:
        noise_test = (
            f"noise test: studentised difference of log medians, null simulated for the numbers of repeats; one-sided, "
            f"false alarms at most {level:.3g} for the whole gate ({len(testable)} tests)"
        )
        if any(cell.runs < FEWEST_REPEATS for pair in testable for cell in pair.cells):
            noise_test += (
                f"; noise within runs only: give {FEWEST_REPEATS} files or more a side to count that between runs"
            )
    return GateResult(
        passed=all(check.passed for check in checks.values()),
        artifact="",
        rules_from=where,
        current=[],
        baseline=[],
        level=level,
        noise_test=noise_test,
        checks=list(checks.values()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _RuleOnMetric:
    """A rule and one metric of the current artifact and of the baseline; None on at most one side: it lacks the metric."""

    rule: Rule
    current: Metric | None
    baseline: Metric | None
    note: str = ""

    @property
    def cells(self) -> list[Cell]:
        """The cells that the noise test compares: both sides for a relative rule, else the current side."""
        sides = (self.current, self.baseline) if self.rule.relative else (self.current,)
        return [cell for side in sides if side is not None for cell in side.cells]

    @property
    def testable(self) -> bool:
        """Whether the noise test applies: a measured figure with enough repeats on every compared side."""
        rule = self.rule
        if self.current is None or not self.current.measured or rule.op in ("==", "!=") or rule.demand == "unchanged":
            return False
        if not enough_repeats(self.current.cells):
            return False
        if rule.relative:
            return self.baseline is not None and enough_repeats(self.baseline.cells)
        return isinstance(rule.value, float) and rule.value > 0


def _align_sides(rule: Rule, current: Metric | None, baseline: Metric | None, where: str) -> _RuleOnMetric:
    """Return the rule with the metric of both sides; for a relative rule, only the configurations that both sides have.

    Raises InputError if they have none in common, and if the rule's unit is not the metric's. ``current``, ``baseline``:
    None on at most one side, which lacks the metric.
    """
    metric = current or baseline
    assert metric is not None  # the names come from the two sides
    check_unit(rule, metric, where)
    if current is None or baseline is None or not rule.relative:
        return _RuleOnMetric(rule=rule, current=current, baseline=baseline)
    current_keys = {cell.key for cell in current.cells}
    baseline_keys = {cell.key for cell in baseline.cells}
    common_keys = current_keys & baseline_keys
    all_keys = current_keys | baseline_keys
    if common_keys == all_keys:
        return _RuleOnMetric(rule=rule, current=current, baseline=baseline)
    if not common_keys:
        problem = f"the two sides of {metric.name} have no configuration in common"
        raise InputError(where, problem, f"they have {', '.join(sorted(all_keys))}")

    def restricted(side: Metric) -> Metric:
        """Return the metric with its common configurations alone, and their geometric mean as its value."""
        cells = tuple(cell for cell in side.cells if cell.key in common_keys)
        return replace(side, cells=cells, value=geometric_mean(cells))

    note = f"over the {len(common_keys)} of {len(all_keys)} configurations that both sides have"
    return _RuleOnMetric(rule=rule, current=restricted(current), baseline=restricted(baseline), note=note)


def _check(pair: _RuleOnMetric, level: float, seed: int) -> GateCheck:
    """Return the check of one rule on one metric; ``level``: the probability of a false alarm of its noise test.

    A metric that only the baseline has fails; for a relative rule, one that only the current artifact has passes as new.
    """
    rule = pair.rule
    metric = pair.current or pair.baseline
    assert metric is not None
    current_value = pair.current.value if pair.current is not None else None
    baseline_value = pair.baseline.value if pair.baseline is not None else None
    limit, op = _resolve_limit(rule, baseline_value, current_value)
    passed = True
    notes = [pair.note]
    if current_value is None:
        passed = False
        notes = ["the baseline has it, the current artifact does not"]
    elif limit is None:
        notes = ["new: the baseline does not have it"]
    else:
        passed = _satisfies(current_value, op, limit)
        if metric.measured and not pair.testable:
            remedy = f"(give {FEWEST_REPEATS} or more repeats or files)"
            notes.append(f"measured without repeats, so its noise is unknown {remedy}")
    check = GateCheck(
        name=f"{metric.name} {rule.demand}",
        metric=metric.name,
        rule=rule.text,
        unit=metric.unit,
        baseline=baseline_value,
        current=current_value,
        limit=limit,
        op=op,
        passed=passed,
        in_noise=False,
        change=_relative_change(current_value, baseline_value),
        noise=None,
        note="; ".join(filter(None, notes)) or None,
    )
    if pair.testable and isinstance(limit, float) and limit > 0:
        return _apply_noise_test(check, pair, limit, level, seed)
    return check


def _relative_change(current: float | str | None, baseline: float | str | None) -> float | None:
    """Return the relative change; None for texts, a missing side, a baseline of 0, and a change that overflows in percent."""
    if not (isinstance(current, float) and isinstance(baseline, float) and baseline != 0):
        return None
    change = (current - baseline) / abs(baseline)
    return change if math.isfinite(100 * change) else None


def _resolve_limit(
    rule: Rule, baseline: float | str | None, current: float | str | None
) -> tuple[float | str | None, str]:
    """Return a rule's limit and its operator, such as (1.05, "<="); the limit is None if the rule needs the missing baseline.

    An absolute rule has both. For a change the limit is ``baseline`` plus or minus the amount; for a change in either
    direction, on the side of ``current``.
    """
    if not rule.relative:
        return rule.value, rule.op
    if baseline is None:
        return None, "<="
    if isinstance(baseline, str) or isinstance(rule.value, str):
        return baseline, "=="
    amount = rule.value * abs(baseline) if rule.dimension == "%" else rule.value
    is_upper_limit = rule.direction == "increase" or (
        rule.direction == "change" and isinstance(current, float) and current >= baseline
    )
    # An overflow becomes the largest float, which no figure can exceed.
    if is_upper_limit:
        return min(baseline + amount, _LARGEST), "<="
    return max(baseline - amount, -_LARGEST), ">="


def _satisfies(current: float | str, op: str, limit: float | str) -> bool:
    """Return whether ``current OP limit`` holds; numbers that differ by rounding only (1e-9) count as equal.

    ``op``: one of <=, <, >=, >, ==, !=. If one of the two is a text, both are compared as texts.
    """
    if isinstance(current, str) or isinstance(limit, str):
        return bool(_OPS[op](str(current), str(limit)))
    if math.isclose(current, limit, rel_tol=_ROUNDING, abs_tol=0.0):
        return op in ("<=", ">=", "==")
    return bool(_OPS[op](current, limit))


def _apply_noise_test(check: GateCheck, pair: _RuleOnMetric, limit: float, level: float, seed: int) -> GateCheck:
    """Return the check with its noise test; a failure within the noise (p above the level) becomes a pass with a note.

    For a relative rule the ratio of current to baseline is tested, else the figure itself.

    Args:
        check: the outcome without regard to noise.
        pair: the rule, and the metric on both sides.
        limit: the largest or smallest allowed value of the current figure, above 0.
        level: the probability of a false alarm.
        seed: of the simulated noise.
    """
    assert pair.current is not None  # testable pairs have it
    baseline: tuple[Cell, ...] = ()
    tested_limit = limit  # of the figure itself
    if pair.rule.relative and pair.baseline is not None:
        baseline = pair.baseline.cells
    if baseline:
        ratio = limit / geometric_mean(baseline)
        tested_limit = min(max(ratio, sys.float_info.min), _LARGEST)  # within floats above 0: its logarithm is taken
    # A bound on the change in both directions is two one-sided tests.
    test_level = level / 2 if pair.rule.direction == "change" else level
    is_upper_limit = check.op in ("<=", "<")
    test = past_limit(pair.current.cells, baseline, tested_limit, above=is_upper_limit, level=test_level, seed=seed)
    if check.passed or test.p <= test_level:
        return check.model_copy(update={"noise": test})
    range_text = (
        f"the change is {100 * (test.low - 1):+.1f}% .. {100 * (test.high - 1):+.1f}%"
        if baseline
        else f"it is {show(test.low, check.unit)} .. {show(test.high, check.unit)}"
    )
    outcome = f"past the limit, but inside the noise (p = {test.p:.2g}, needs <= {test_level:.2g}): {range_text}"
    note = "; ".join(filter(None, (pair.note, outcome)))
    return check.model_copy(update={"noise": test, "passed": True, "in_noise": True, "note": note})


CONFIG_NAME = "ddltool.toml"


class GateConfig(Record):
    """The ``[gate]`` table of a ``ddltool.toml``: rules by kind (without ``ddltool.``), level and baseline."""

    rules: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(default_factory=dict)
    level: Annotated[float, Field(gt=0, lt=1)] | None = None
    baseline: str | None = None
    _where: str = PrivateAttr("")

    @property
    def where(self) -> str:
        """The file that was read; "" for a table made in a program."""
        return self._where


def read_config(path: Path, *, required: bool = True) -> GateConfig | None:
    """Return the ``[gate]`` table of a TOML file; None if the file is missing and not ``required``.

    A relative path of the baseline is resolved against the file's folder. Raises InputError for a required file that is
    missing, a file without the table, unknown keys, unknown kinds and values of the wrong type.
    """
    if not required and not path.is_file():
        return None
    table = read_toml(path).get("gate")
    if not isinstance(table, dict):
        raise InputError(str(path), "has no table [gate]", "write [gate.rules] with lists of rules by kind")
    config = parse_record(table, GateConfig, str(path), "gate")
    known_kinds = {kind.removeprefix("ddltool.") for kind in KINDS}
    for kind in config.rules:
        if kind not in known_kinds:
            raise InputError(f"{path}:gate.rules", f"unknown kind {kind!r}", did_you_mean(kind, known_kinds))
    baseline = str(path.parent / config.baseline) if config.baseline is not None else None
    resolved = config.model_copy(update={"baseline": baseline})
    resolved._where = str(path)  # it names the file in later errors
    return resolved


def rules_for(kind: str, given: Sequence[str], config: GateConfig | None) -> tuple[list[Rule], str]:
    """Return (rules, their source): of the ``given`` texts, else of the configuration, else the defaults of the ``kind``."""
    short = kind.removeprefix("ddltool.")
    if given:
        return [parse_rule(text) for text in given], "--rule"
    if config is not None and short in config.rules:
        where = f"{config.where}:gate.rules.{short}"
        return [parse_rule(text, where) for text in config.rules[short]], config.where
    return default_rules(kind), f"defaults for {short}"


def as_list(given: Any) -> list[Any]:
    """Return one artifact, or a list of them, as a list in which texts have become paths."""
    items = given if isinstance(given, (list, tuple)) else [given]
    return [Path(item) if isinstance(item, str) else item for item in items]


def name_of(given: Any) -> str:
    """Return an artifact's name for messages: the path of a file, else the name of the object's type."""
    return str(given) if isinstance(given, Path) else type(given).__name__


def figures_of(given: Iterable[Any]) -> Figures:
    """Return the merged metrics of artifacts (paths or objects) of the same thing. Raises InputError if their kinds differ."""
    return combine([(document_of(artifact), name_of(artifact)) for artifact in given])


def baselines_of(current: Sequence[Any], given: Sequence[Any], settings: GateConfig | None) -> list[Any]:
    """Return the baselines: those ``given``, else the one of ``settings`` (None: no configuration), else [].

    A folder is replaced by the files in it that have the names of the ``current`` artifacts.
    """
    paths = given
    if not given and settings is not None and settings.baseline is not None:
        paths = [Path(settings.baseline)]
    file_names = [path.name for path in current if isinstance(path, Path)]
    are_folders = [isinstance(path, Path) and path.is_dir() for path in paths]
    return [
        baseline
        for path, is_folder in zip(paths, are_folders, strict=True)
        for baseline in ([path / name for name in file_names] if is_folder else [path])
    ]


def level_of(given: float | None, settings: GateConfig | None) -> float:
    """Return the level of false alarms: ``given`` by --level, else configured, else 0.05.

    Raises InputError unless ``given`` is in (0, 1); :class:`GateConfig` refuses other configured levels when it is read.
    """
    if given is None:
        return LEVEL if settings is None or settings.level is None else settings.level
    if not 0 < given < 1:
        raise InputError("--level", f"is {given:g}", "give a share between 0 and 1, such as 0.05")
    return given


def check_against(
    current: Any, target: Path, texts: Sequence[str], level: float | None, *, update: bool, config: Path
) -> GateResult:
    """Return the checks of an artifact against the baseline file ``target``; nothing is written.

    Raises InputError for a baseline that is missing, broken or of another kind, and for rules that do not fit.

    Args:
        current: the artifact, as for :func:`document_of`.
        target: the baseline's file.
        texts: the rules; empty: those of the file ``config``, else the defaults.
        level: the probability of a false alarm; None: the configured one.
        update: True: the artifact is compared with itself, so that only absolute limits can fail, and a missing or broken
            baseline is no error.
        config: a ``ddltool.toml``, which need not exist.
    """
    figures = extract(document_of(current), "current")
    settings = read_config(config, required=False)
    rules, origin = rules_for(figures.kind, texts, settings)
    if not update and not target.is_file():
        raise InputError(str(target), "no such baseline", "write it with: pytest --ddltool-update")
    try:
        baseline_figures = figures_of([target]) if target.exists() else figures
    except InputError:
        if not update:
            raise
        baseline_figures = figures  # a broken baseline is what an update is for
    if baseline_figures.kind != figures.kind:
        raise InputError(str(target), f"is a {baseline_figures.kind}", f"the current artifact is a {figures.kind}")
    compared_with = figures if update else baseline_figures
    return judge(
        rules,
        figures.metrics,
        compared_with.metrics,
        level=level_of(level, settings),
        where="rules" if texts else origin,
    )


def document_of(current: Any) -> Mapping[str, Any]:
    """Return an artifact (path, graph, data frame of a profile, record or mapping) as a document with its kind.

    Raises InputError for anything else, and for a wrong or unreadable file.
    """
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
    """Write an artifact atomically as the baseline file ``target``, whose folder is made if it is missing.

    ``current``: a file, whose text is copied, or an object of a program. Raises InputError if a table is to be written
    into a file that is not named as a table, or a document into one that is.
    """
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
