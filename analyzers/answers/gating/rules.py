"""The rules of a gate, as people write them.

::

    rule     = metric limit
    metric   = name | family | pattern        iteration_s, efficiency (all of efficiency/...), step_time_s/*/b64
    limit    = op value                       an absolute limit: iteration_s <= 500 ms, mape <= 15%, status == optimal
             | op signed-percent              a change:          throughput >= -5%, iteration_s <= +5%
             | "increase" "<=" amount         a change:          iteration_s increase <= 5%, ops increase <= 3
             | "decrease" "<=" amount
             | "change"   "<=" amount         in either direction
             | "unchanged"                    equal to the baseline
    op       = "<=" | "<" | ">=" | ">" | "==" | "!="
    amount   = percent of the baseline, or a number with or without a unit
    value    = number, number with a unit (ns us ms s min h, B KiB MiB GiB TiB KB MB GB TB, %), or for == and != a text
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ddltool.analyzers.answers.gating.metrics import KINDS, Metric
from ddltool.errors import InputError, did_you_mean, shortened

GRAMMAR = "write METRIC <= VALUE, METRIC increase <= 5%, METRIC >= -5% or METRIC unchanged"
_UNITS: dict[str, tuple[str, float]] = {
    "%": ("%", 0.01),
    "B": ("bytes", 1.0),
    "kB": ("bytes", 1e3),
    **{f"{prefix}iB": ("bytes", 1024.0**power) for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}B": ("bytes", 1000.0**power) for power, prefix in enumerate("KMGT", start=1)},
    **{name: ("s", scale) for name, scale in (("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3))},
    **{name: ("s", scale) for name, scale in (("s", 1.0), ("min", 60.0), ("h", 3600.0))},
}
"""Unit to (dimension, number of SI base units in it)."""
_NUMBER = re.compile(r"([+-]?)([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9.]*)")
_OP = re.compile(r"\s*(<=|>=|==|!=|<|>)\s*")
_RULE = re.compile(r"([^\s<>=!]+)\s*(?:\s(increase|decrease|change)\s*)?(<=|>=|==|!=|<|>)\s*(\S.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One parsed rule. With a ``direction``, ``value`` bounds the change from the baseline; else it is the limit itself."""

    text: str
    metric: str
    op: str = "<="
    value: float | str = 0.0
    dimension: str = ""
    """The dimension in which the value was written: ``s``, ``bytes``, ``%`` or "" (a plain number)."""
    direction: str = ""
    """``increase``, ``decrease``, ``change``, or "": an absolute limit."""
    optional: bool = False
    """Whether the rule is skipped, without an error, if an artifact has no such figure."""

    @property
    def relative(self) -> bool:
        """Whether the rule compares with a baseline."""
        return bool(self.direction)

    @property
    def demand(self) -> str:
        """The rule's text without its metric, with single blanks around its operator: ``increase <= 5%``."""
        return _OP.sub(r" \1 ", self.text[len(self.metric) :], count=1).strip()


def parse_rule(text: str, where: str = "--rule", *, optional: bool = False) -> Rule:
    """Return the rule in a text such as ``iteration_s <= +5%``. Raises InputError, with the grammar, for any other text.

    A signed percentage becomes a ``direction``: ``<= +5%`` is ``increase <= 5%``. ``where``: the source of the text, for
    errors. ``optional``: the rule's field.
    """
    normalized = " ".join(text.split())
    if re.fullmatch(r"[^\s<>=!]+ unchanged", normalized):
        return Rule(text=normalized, metric=normalized.split()[0], direction="change", dimension="%", optional=optional)
    match = _RULE.fullmatch(normalized)
    if match is None:
        raise InputError(where, f"{text!r} is no rule" if normalized else "is empty", GRAMMAR)
    metric, direction, op, value_text = match.groups(default="")
    value, dimension, sign = _parse_value(value_text, op, f"{where} {text!r}")
    # "increase <= 5%": the word gives the direction, so the amount must be an upper bound without sign.
    if direction and (op != "<=" or isinstance(value, str) or value < 0 or sign):
        raise InputError(where, f"{text!r} is no rule", f"write {metric} {direction} <= 5%, the amount without sign")
    if not direction and sign and dimension == "%" and not isinstance(value, str):
        # A bound on the signed change: ">= -5%" is a decrease of at most 5 %. Other pairs of operator and sign, such as
        # ">= +5%", could hold only if the figure changed.
        bounds_decrease = op == ">=" and value <= 0
        bounds_increase = op == "<=" and value >= 0
        if not bounds_decrease and not bounds_increase:
            remedy = f"write {metric} >= -5% or {metric} <= +5%; a target is an absolute limit"
            raise InputError(where, f"{text!r} would demand an improvement", remedy)
        direction = "decrease" if op == ">=" else "increase"
        value = abs(value)
        op = "<="
    return Rule(
        text=normalized, metric=metric, op=op, value=value, dimension=dimension, direction=direction, optional=optional
    )


def _parse_value(value_text: str, op: str, where: str) -> tuple[float | str, str, str]:
    """Return a rule's value as (value, dimension, sign).

    The value is a number in SI base units, or, with the operators == and !=, a text. The dimension is "s", "bytes", "%"
    or ""; the sign is "", "+" or "-". Raises InputError for any other text, an unknown unit, and a number that no float
    can hold. ``where``: the rule, for errors.
    """
    match = _NUMBER.fullmatch(value_text)
    if match is None:
        if op in ("==", "!="):
            return value_text.strip("\"'"), "", ""
        raise InputError(where, f"{value_text!r} is no number", "write a number, such as 0.5, 500 ms or 5%")
    sign, number, unit = match.groups()
    if unit and unit not in _UNITS:
        raise InputError(where, f"unknown unit {unit!r}", did_you_mean(unit, _UNITS))
    dimension, scale = _UNITS.get(unit, ("", 1.0))
    value = float(sign + number) * scale
    if not math.isfinite(value):
        raise InputError(
            where, f"{shortened(value_text, 60)} is beyond what a number holds", "give a limit up to 1e308"
        )
    return value, dimension, sign


def select(rule: Rule, current: Mapping[str, Metric], baseline: Mapping[str, Metric], where: str) -> list[str]:
    """Return the names of the metrics that a rule covers: the one of its name, else its family's, else the pattern's matches.

    Metrics that only the baseline has are included. If there are none, the result is [] for an ``optional`` rule; any
    other raises InputError with the most similar name. ``where``: the rules' source, for errors.
    """
    names = list(dict.fromkeys([*current, *baseline]))
    if rule.metric in names:
        return [rule.metric]
    members = [name for name in names if name.startswith(f"{rule.metric}/")]
    members = members or [name for name in names if fnmatch.fnmatchcase(name, rule.metric)]
    if not members and not rule.optional:
        families = {name.split("/")[0] for name in names}
        known = families if "/" not in rule.metric else {*families, *names}
        raise InputError(where, f"unknown metric {rule.metric!r}", did_you_mean(rule.metric, known))
    return members


def check_unit(rule: Rule, metric: Metric, where: str) -> None:
    """Raise InputError if a rule's value cannot be compared with the metric: 5 MB with seconds, or 5 % with no baseline.

    ``where``: the rule's source, for the message.
    """
    name = metric.name
    if metric.unit == "text":
        is_unchanged = rule.direction == "change" and rule.value == 0.0
        is_equality = not rule.relative and rule.op in ("==", "!=")
        if not is_unchanged and not is_equality:
            raise InputError(where, f"{name} is a text", f"write {name} == {metric.value}, or unchanged")
    elif isinstance(rule.value, str):
        raise InputError(where, f"{name} is a number", f"write {name} <= NUMBER")
    elif rule.dimension == "%":
        if not rule.relative and metric.unit != "share":
            remedy = f"write {name} <= +5% or {name} increase <= 5% for a change"
            raise InputError(where, f"{rule.value:.4g} of what? {name} is no share", remedy)
    elif rule.dimension and rule.dimension != metric.unit:
        unit = metric.unit or "a plain number"
        raise InputError(where, f"{name} is in {unit}, the limit in {rule.dimension}", "use the metric's unit")


def default_rules(kind: str) -> list[Rule]:
    """Return the default rules of a kind of artifact (such as ``ddltool.plan``), all optional."""
    return [parse_rule(text, "default rules", optional=True) for text in KINDS[kind]["rules"]]
