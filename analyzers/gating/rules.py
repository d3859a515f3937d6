"""What a gate demands: rules as people write them.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ddltool.analyzers.gating.metric import Metric
from ddltool.errors import InputError, did_you_mean, shortened

Op = Literal["<=", "<", ">=", ">", "==", "!="]
Direction = Literal["increase", "decrease", "change"]
GRAMMAR = "write METRIC <= VALUE, METRIC increase <= 5%, METRIC >= -5% or METRIC unchanged"

_SCALES = {
    "s": {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0},
    "bytes": {"B": 1.0}
    | {f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", start=1)}
    | {f"{prefix}B": 1000.0**power for power, prefix in enumerate("KMGT", start=1)}
    | {"kB": 1000.0},
    "%": {"%": 0.01},
}
_NUMBER = re.compile(r"([+-]?)([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9.]*)")
_OP = re.compile(r"\s*(<=|>=|==|!=|<|>)\s*")
_RULE = re.compile(r"([^\s<>=!]+)\s*(?:\s(increase|decrease|change)\s*)?(<=|>=|==|!=|<|>)\s*(\S.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One parsed rule. ``direction`` None: ``value`` is the limit itself; else it bounds the change from the baseline."""

    text: str
    metric: str
    op: Op
    value: float | str
    dimension: str = ""
    """``s``, ``bytes``, ``%`` or nothing: what the value was written in."""
    direction: Direction | None = None
    optional: bool = False
    """A default: says nothing where an artifact has no such figure."""

    @property
    def relative(self) -> bool:
        """Return whether the rule needs a baseline."""
        return self.direction is not None

    @property
    def demand(self) -> str:
        """Return the rule without its metric: ``increase <= 5%``."""
        return _OP.sub(r" \1 ", self.text[len(self.metric) :], count=1).strip()


def parse_rule(text: str, where: str = "--rule", *, optional: bool = False) -> Rule:
    """Return the rule that a text states. Raises InputError with the grammar in one line."""
    stripped = " ".join(text.split())
    if not stripped:
        raise InputError(where, "is empty", GRAMMAR)
    words = stripped.split(" ")
    if len(words) == 2 and words[1] == "unchanged" and not re.search("[<>=!]", words[0]):
        return Rule(
            text=stripped, metric=words[0], op="<=", value=0.0, direction="change", dimension="%", optional=optional
        )
    match = _RULE.fullmatch(stripped)
    if match is None:
        raise InputError(where, f"{text!r} is no rule", GRAMMAR)
    metric, word, op, written = match.groups()
    value, dimension, sign = _value(written, op, f"{where} {text!r}")
    direction: Direction | None = word  # type: ignore[assignment]
    if direction is not None:
        if op != "<=" or isinstance(value, str) or value < 0 or sign:
            raise InputError(
                where, f"{text!r} is no rule", f"write {metric} {direction} <= 5%, the amount without sign"
            )
    elif sign and dimension == "%":
        direction, value = _signed(metric, op, float(value), where, text)
        op = "<="
    return Rule(
        text=stripped,
        metric=metric,
        op=op,  # type: ignore[arg-type]
        value=value,
        dimension=dimension,
        direction=direction,
        optional=optional,
    )


def _value(written: str, op: str, where: str) -> tuple[float | str, str, str]:
    """Return a value in SI base units (a text as it is), its dimension and its sign as written."""
    match = _NUMBER.fullmatch(written)
    if match is None:
        if op in ("==", "!="):
            return written.strip("\"'"), "", ""
        raise InputError(where, f"{written!r} is no number", "write a number, such as 0.5, 500 ms or 5%")
    sign, number, unit = match.groups()
    value = float(sign + number)
    scale, dimension = 1.0, ""
    for name, scales in _SCALES.items():
        if unit in scales:
            scale, dimension = scales[unit], name
    if not math.isfinite(value * scale):
        raise InputError(where, f"{shortened(written, 60)} is beyond what a number holds", "give a limit up to 1e308")
    if not unit or dimension:
        return value * scale, dimension, sign
    known = [name for scales in _SCALES.values() for name in scales]
    raise InputError(where, f"unknown unit {unit!r}", did_you_mean(unit, known))


def _signed(metric: str, op: str, change: float, where: str, text: str) -> tuple[Direction, float]:
    """Return a bound on the signed change as a direction and an amount: ``>= -5%`` is a decrease of at most 5 %."""
    if op == ">=" and change <= 0:
        return "decrease", -change
    if op == "<=" and change >= 0:
        return "increase", change
    problem = f"{text!r} would demand an improvement"
    raise InputError(where, problem, f"write {metric} >= -5% or {metric} <= +5%; a target is an absolute limit")


def select(rule: Rule, current: Mapping[str, Metric], baseline: Mapping[str, Metric], where: str) -> list[str]:
    """Return the names that a rule is about: its metric, else all of that family, else all that match the pattern.

    A figure that only the baseline has is one of them. Raises InputError for a metric that neither side has, naming
    the nearest; a default rule then has no names.
    """
    names = list(dict.fromkeys([*current, *baseline]))
    if rule.metric in names:
        return [rule.metric]
    members = [name for name in names if name.startswith(f"{rule.metric}/")]
    if not members:
        members = [name for name in names if fnmatch.fnmatchcase(name, rule.metric)]
    if not members and not rule.optional:
        families = {name.split("/")[0] for name in names}
        known = families if "/" not in rule.metric else {*families, *names}
        raise InputError(where, f"unknown metric {rule.metric!r}", did_you_mean(rule.metric, known))
    return members


def check_unit(rule: Rule, metric: Metric, where: str) -> None:
    """Raise InputError when a rule's value cannot be compared with the metric: 5 MB for seconds, 5 % of nothing."""
    if metric.unit == "text":
        if rule.direction == "change" and rule.value == 0.0:
            return
        if rule.direction is not None or rule.op not in ("==", "!="):
            raise InputError(where, f"{metric.name} is a text", f"write {metric.name} == {metric.value}, or unchanged")
        return
    if isinstance(rule.value, str):
        raise InputError(where, f"{metric.name} is a number", f"write {metric.name} <= NUMBER")
    if rule.dimension == "%":
        if rule.direction is None and metric.unit != "share":
            remedy = f"write {metric.name} <= +5% or {metric.name} increase <= 5% for a change"
            raise InputError(where, f"{rule.value:.4g} of what? {metric.name} is no share", remedy)
    elif rule.dimension and rule.dimension != metric.unit:
        unit = metric.unit or "a plain number"
        raise InputError(where, f"{metric.name} is in {unit}, the limit in {rule.dimension}", "use the metric's unit")


# By kind. Small tolerances on what is predicted: the same input gives the same figures to the last bits on one machine only.
DEFAULT_RULES: dict[str, tuple[str, ...]] = {
    "ddltool.graph": (
        "ops increase <= 5%",
        "parameter_bytes increase <= 1%",
        "flops increase <= 5%",
        "upper_s increase <= 5%",
    ),
    "ddltool.trace": (
        "iteration_s increase <= 5%",
        "efficiency/tic decrease <= 0.02",
        "efficiency/tac decrease <= 0.02",
        "efficiency/improved decrease <= 0.02",
        "exposed_s/ddp/best increase <= 5%",
        "exposed_s/fsdp2/best increase <= 5%",
        "parameter_bytes increase <= 1%",
        "ops increase <= 5%",
    ),
    "ddltool.plan": (
        "iteration_s increase <= 5%",
        "throughput decrease <= 5%",
        "devices increase <= 0",
        "price_per_hour increase <= 5%",
        "price_per_sample increase <= 5%",
        "determinism unchanged",
        "parameter_bytes increase <= 1%",
    ),
    "ddltool.enforcement": ("devices unchanged", "batch_size unchanged", "parameter_bytes increase <= 1%"),
    "ddltool.goodput": ("mape increase <= 0.05", "holdout/mape increase <= 0.05", "undetermined increase <= 0"),
    "ddltool.profile": (
        "step_time_s increase <= 5%",
        "step_time_s/* increase <= 10%",
        "peak_memory_bytes increase <= 10%",
    ),
    "ddltool.telemetry": ("step_s increase <= 5%", "ranks unchanged"),
    "ddltool.barrier": (
        "waiting_time_s increase <= 5%",
        "iteration_gap increase <= 0",
    ),
    "ddltool.simulation": ("avg_jct_s increase <= 5%", "makespan_s increase <= 5%", "utilization decrease <= 5%"),
    "ddltool.sweep": ("avg_jct_s increase <= 5%", "makespan_s increase <= 5%", "failed increase <= 0"),
    "ddltool.balance": ("iteration_time_ratio increase <= 5%", "rmse_relative increase <= 10%"),
    "ddltool.network": ("bandwidth_bytes_per_s decrease <= 20%", "latency_s increase <= 20%"),
    "ddltool.demo": ("iteration_s increase <= 5%", "mape/fit <= 30%"),
    "ddltool.figures": ("* increase <= 5%",),
}


def default_rules(kind: str) -> list[Rule]:
    """Return the rules of a kind that holds when nobody wrote any; each counts only where an artifact has its figure."""
    return [parse_rule(text, "default rules", optional=True) for text in DEFAULT_RULES[kind]]


def parse_rules(texts: Iterable[str], where: str) -> list[Rule]:
    """Return the rules of several texts."""
    return [parse_rule(text, where) for text in texts]
