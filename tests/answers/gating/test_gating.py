"""Gating: the noise test's false alarms and power, the rules' grammar, the extractors, the verdict, the formats."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.answers.gating.formats import junit, remarks, sarif, sentence, summary, workflow_commands
from ddltool.analyzers.answers.gating.metrics import KINDS, Metric, combine, extract, merge
from ddltool.analyzers.answers.gating.noise import Cell, cell_of, geometric_mean, past_limit
from ddltool.analyzers.answers.gating.rules import default_rules, parse_rule
from ddltool.analyzers.answers.gating.verdict import judge
from ddltool.arrays import Floats
from ddltool.errors import InputError
from ddltool.graph import Graph, Op, to_document
from ddltool.results import GateResult

Noise = Callable[[np.random.Generator, int], Floats]


def normal(spread: float) -> Noise:
    return lambda random, n: 1 + spread * random.standard_normal(n)


def lognormal(spread: float) -> Noise:
    return lambda random, n: np.exp(spread * random.standard_normal(n))


def exponential(spread: float) -> Noise:
    return lambda random, n: 1 + spread * random.exponential(size=n)


def alarms(now: Noise, before: Noise, n: int, m: int, *, shift: float = 1.0, limit: float = 1.0) -> float:
    """Return the share of 1500 simulated comparisons that say 'past the limit' at the level 0.05."""
    random, hits, rounds = np.random.default_rng(11), 0, 1500
    for _ in range(rounds):
        current, baseline = cell_of("x", now(random, n) * shift), cell_of("x", before(random, m))
        hits += past_limit([current], [baseline], limit, above=True, level=0.05).p <= 0.05
    return hits / rounds


# 0.05 and three standard errors of 1500 rounds.
MOST_ALARMS = 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1500)


@pytest.mark.parametrize("repeats", [(3, 3), (5, 30), (20, 20)])
@pytest.mark.parametrize("noise", [normal(0.03), lognormal(0.2), exponential(0.1)], ids=["normal", "lognormal", "exp"])
def test_noise_alone_seldom_raises_an_alarm(noise: Noise, repeats: tuple[int, int]) -> None:
    assert alarms(noise, noise, *repeats) <= MOST_ALARMS


@pytest.mark.parametrize(("now", "before"), [(0.09, 0.03), (0.02, 0.06)])
@pytest.mark.parametrize("repeats", [(5, 5), (20, 20)])
def test_unequal_noise_seldom_raises_an_alarm(now: float, before: float, repeats: tuple[int, int]) -> None:
    assert alarms(normal(now), normal(before), *repeats) <= MOST_ALARMS


def test_a_shift_to_the_limit_is_no_alarm_and_beyond_it_is_one() -> None:
    assert alarms(normal(0.03), normal(0.03), 20, 20, shift=1.05, limit=1.05) <= MOST_ALARMS
    assert alarms(normal(0.03), normal(0.03), 5, 5, shift=1.2, limit=1.05) > 0.9
    assert alarms(normal(0.03), normal(0.03), 20, 20, shift=1.1, limit=1.05) > 0.95


def test_a_slowdown_of_all_configurations_is_seen_where_each_alone_is_not() -> None:
    random = np.random.default_rng(3)
    together = alone = 0
    for _ in range(100):
        now = [cell_of(str(b), b * 1.04 * normal(0.03)(random, 5)) for b in range(1, 13)]
        before = [cell_of(str(b), b * normal(0.03)(random, 5)) for b in range(1, 13)]
        together += past_limit(now, before, 1.0, above=True, level=0.05).p <= 0.05
        alone += past_limit(now[:1], before[:1], 1.0, above=True, level=0.05).p <= 0.05
    assert together >= 90 > 60 > alone


@settings(max_examples=15)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=12),
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=12),
    st.floats(0.01, 100.0),
)
def test_the_test_is_free_of_units_and_its_interval_agrees_with_it(now: Any, before: Any, unit: float) -> None:
    def test_in(scale: float) -> Any:
        current, baseline = cell_of("", np.multiply(now, scale)), cell_of("", np.multiply(before, scale))
        return past_limit([current], [baseline], 1.0, above=True, level=0.05)

    plain, scaled = test_in(1.0), test_in(unit)
    assert scaled.low == pytest.approx(plain.low, rel=1e-6)
    ratio = float(np.median(now) / np.median(before))
    if plain.standard_error > 1e-9 and abs(plain.low - 1) > 1e-6 * plain.standard_error:
        assert plain.low <= ratio <= plain.high
        # An interval above 1 and a small p are the same statement, up to one draw.
        assert (plain.p <= 0.05) == (plain.low > 1) or abs(plain.p - 0.05) < 2e-3
    else:
        assert plain.low == pytest.approx(ratio, rel=1e-3) or plain.standard_error > 1e-9


def test_equal_repeats_have_no_noise() -> None:
    now, before = cell_of("", [2.0, 2.0, 2.0]), cell_of("", [1.9, 1.9, 1.9])
    assert past_limit([now], [before], 1.05, above=True, level=0.01).p == 0.0
    assert past_limit([now], [before], 1.06, above=True, level=0.01).p == 1.0


# ---- rules


@pytest.mark.parametrize(
    ("text", "metric", "op", "value", "direction"),
    [
        ("iteration_s<=0.5", "iteration_s", "<=", 0.5, None),
        ("iteration_s <= 500 ms", "iteration_s", "<=", 0.5, None),
        ("parameter_bytes < 97.5MiB", "parameter_bytes", "<", 97.5 * 2**20, None),
        ("mape <= 15%", "mape", "<=", 0.15, None),
        ("status == optimal", "status", "==", "optimal", None),
        ("throughput>=-5%", "throughput", "<=", 0.05, "decrease"),
        ("iteration_s <= +5%", "iteration_s", "<=", 0.05, "increase"),
        ("step_time_s/* increase <= 10%", "step_time_s/*", "<=", 0.10, "increase"),
        ("efficiency/tac decrease <= 0.02", "efficiency/tac", "<=", 0.02, "decrease"),
        ("iteration_s change<=3ms", "iteration_s", "<=", 0.003, "change"),
        ("devices unchanged", "devices", "<=", 0.0, "change"),
        ("waste >= -1", "waste", ">=", -1.0, None),
    ],
)
def test_rules_are_read(text: str, metric: str, op: str, value: Any, direction: str | None) -> None:
    rule = parse_rule(text)
    assert (rule.metric, rule.op, rule.direction) == (metric, op, direction or "")
    assert rule.value == (value if isinstance(value, str) else pytest.approx(value))


@pytest.mark.parametrize(
    "text",
    [
        *("", "iteration_s", "<= 5", "a <= ", "a <= x", "a <= 5 parsec", "a => 3", "a b <= 3", "a unchanged 3"),
        *("a increase", "a increase >= 5%", "a increase <= -5%", "a increase <= +5%", "a decrease <= much"),
        *("a >= +5%", "a <= -5%"),
    ],
)
def test_other_texts_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_rule(text)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


@given(st.text(max_size=30))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        rule = parse_rule(text)
    except InputError:
        return
    assert rule.metric
    assert " ".join(text.split()) == rule.text


# ---- extraction


def small_graph(scale: float = 1.0) -> Graph:
    return Graph.from_ops(
        "small",
        "inference",
        [
            Op(name="recv/a", kind="recv", resource="channel:0", duration_s=1.0, size_bytes=400, parameter="a"),
            Op(name="recv/b", kind="recv", resource="channel:0", duration_s=2.0, size_bytes=800, parameter="b"),
            Op(name="x", kind="compute", resource="compute:0", duration_s=2.5 * scale, flops=10, inputs=("recv/a",)),
            Op(name="y", kind="compute", resource="compute:0", duration_s=1.5, flops=20, inputs=("recv/b", "x")),
        ],
    )


def row(batch: int = 8, step: float = 0.1, spread: float | None = 0.002, repeats: int | None = 10) -> dict[str, Any]:
    record = {"device": "Tesla V100/SXM", "num_nodes": 1, "num_replicas": 2, "local_batch_size": batch}
    return {**record, "step_time_s": step, "sync_time_s": 0.01, "step_time_spread_s": spread, "repeats": repeats}


def profile(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "ddltool.profile", "rows": list(rows)}


def values(document: dict[str, Any]) -> dict[str, float | str]:
    return {name: metric.value for name, metric in extract(document, "doc").metrics.items()}


def test_a_graphs_figures_are_those_of_its_ops() -> None:
    found = values(to_document(small_graph()))
    assert found == {
        **{"ops": 4, "recvs": 2, "sends": 0, "parameters": 2, "parameter_bytes": 1200, "flops": 30, "channels": 1},
        **{"upper_s": 7.0, "lower_s": 4.0, "compute_s": 4.0, "transfer_s": 3.0},
    }


def test_a_profiles_rows_have_names_and_repeats() -> None:
    found = extract(profile(row(8, 0.1), row(32, 0.4)), "doc").metrics
    assert found["step_time_s"].value == pytest.approx(math.sqrt(0.1 * 0.4))
    cell = found["step_time_s/Tesla_V100_SXM/1x2/b32"].cells[0]
    assert (cell.median, cell.spread, cell.repeats) == (0.4, 0.002, 10)
    assert not found["sync_time_s/Tesla_V100_SXM/1x2/b8"].cells
    bare = extract(profile(row(spread=None), row(32, repeats=None), row(64, spread=math.nan)), "doc").metrics
    assert all(cell.repeats == 1 for cell in bare["step_time_s"].cells)


def test_rows_and_files_of_one_configuration_are_its_repeats() -> None:
    rows = [row(step=step) for step in (0.10, 0.12, 0.11, 0.16)]
    cell = extract(profile(*rows), "doc").metrics["step_time_s"].cells[0]
    files = combine([(profile(one), "file") for one in rows]).metrics["step_time_s"]
    assert cell == files.cells[0]
    assert (cell.median, cell.repeats, cell.runs) == (pytest.approx(0.115), 4, 4)
    assert cell.spread == pytest.approx(0.13 - 0.1075)
    two = combine([(profile(one), "file") for one in rows[:2]]).metrics["step_time_s"].cells[0]
    assert (two.spread, two.repeats) == (pytest.approx(0.02), 20)


def test_predictions_that_differ_between_files_are_not_taken_for_exact() -> None:
    same = [[Metric(name="iteration_s", value=1.0, unit="s")] for _ in range(3)]
    assert not merge(same)[0].measured
    different = [[Metric(name="iteration_s", value=value, unit="s")] for value in (1.0, 1.1, 1.2)]
    found = merge(different)[0]
    assert (found.measured, found.value, found.cells[0].repeats) == (True, 1.1, 3)


def steps(count: int, seconds: float, rank: int = 0) -> list[dict[str, Any]]:
    times = {"step_s": seconds, "compute_s": seconds / 2, "wait_s": 0.0, "sync_s": seconds / 4}
    return [{"rank": rank, "step": step, **times} for step in range(count)]


def test_telemetry_has_stretches_of_steps_as_repeats() -> None:
    document = {"kind": "ddltool.telemetry", "rows": steps(103, 0.2) + steps(103, 0.3, rank=1)}
    found = extract(document, "doc").metrics
    assert found["step_s/rank1"].cells[0] == Cell(key="rank1", median=pytest.approx(0.3), spread=0.0, repeats=10)  # type: ignore[arg-type]
    assert found["step_s"].value == pytest.approx(math.sqrt(0.06))
    assert (found["ranks"].value, found["steps"].value) == (2, 103)
    few = extract({"kind": "ddltool.telemetry", "rows": steps(9, 0.2)}, "doc").metrics
    assert few["step_s"].cells[0].repeats == 1


def test_neighbouring_steps_that_are_alike_do_not_pass_for_repeats() -> None:
    """Slow drift (AR(1), 0.9): steps taken as independent would raise alarms in most comparisons of equal runs."""
    random = np.random.default_rng(8)

    def drifting() -> Floats:
        level = np.zeros(1000)
        for number in range(1, 1000):
            level[number] = 0.9 * level[number - 1] + random.standard_normal()
        return 1 + 0.01 * level

    blocks = naive = 0
    for _ in range(200):
        runs = [drifting(), drifting()]
        naive += past_limit([cell_of("", runs[0])], [cell_of("", runs[1])], 1.0, above=True, level=0.05).p <= 0.05
        sides = []
        for run in runs:
            rows = [{**one, "step_s": value} for one, value in zip(steps(1000, 1.0), run.tolist(), strict=True)]
            sides.append(extract({"kind": "ddltool.telemetry", "rows": rows}, "doc").metrics["step_s"].cells)
        blocks += past_limit(sides[0], sides[1], 1.0, above=True, level=0.05).p <= 0.05
    assert naive / 200 > 0.2
    assert blocks / 200 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)


def test_own_figures_take_numbers_and_repeats() -> None:
    document = {"kind": "ddltool.figures", "figures": {"hook": {"overhead_s": [2e-5, 1e-5, 3e-5]}, "count": 3}}
    found = extract(document, "doc").metrics
    assert (found["hook/overhead_s"].value, found["hook/overhead_s"].unit) == (2e-5, "s")
    assert found["hook/overhead_s"].cells[0].repeats == 3
    assert found["count"].value == 3


def test_the_documents_of_other_commands() -> None:
    times = {"iteration_s": 0.5, "iteration_time_ratio": 0.8}
    balance = {"kind": "ddltool.balance", "workers": 3, "iterations": 90, "equal_split": times, "oracle": times}
    balance |= {"predictors": {"ema": {**times, "rmse": 1.0, "rmse_relative": 0.1, "gain_kept": None}}}
    balance |= {"warm_up": 20, "total_batch": 96}
    balance["schemes"] = {
        "predictor": "ema",
        "ssp": {**times, "iteration_s": 0.7, "staleness": 1.0, "iteration_gap": 5},
    }
    found = values(balance)
    assert (found["rmse_relative/ema"], found["iteration_s/schemes/ssp"]) == (0.1, 0.7)
    assert "gain_kept/ema" not in found

    job = {"name": "a", "application": "b", "submit_s": 0, "start_s": 0, "finish_s": 60, "jct_s": 60, "gpu_seconds": 60}
    policy = {"avg_jct_s": 60.0, "median_jct_s": 60.0, "p99_jct_s": 60.0, "makespan_s": 60.0, "utilization": 0.5}
    policy |= {"finish_time_fairness": {"max": 2.0, "share_below_1": 0.0}, "wall_seconds": 1.0, "restarts": 0}
    policy |= {"jobs": [{**job, "restarts": 0}]}
    simulation = {"kind": "ddltool.simulation", "workload": "w.csv", "jobs": 1, "gpus": 4}
    simulation |= {"policies": {"pollux": policy, "fifo": policy}}
    found = values(simulation)
    assert (found["avg_jct_s/fifo"], found["worst_fairness/pollux"], found["gpus"]) == (60.0, 2.0, 4)
    shorter = {**simulation, "policies": {"pollux": {**policy, "avg_jct_s": 50.0}, "fifo": policy}}
    pair = [extract(document, "doc").metrics for document in (simulation, shorter)]
    failed = judge(default_rules("ddltool.simulation"), *pair).failed
    assert [check.metric for check in failed] == ["avg_jct_s/pollux"]

    line = {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-5, "residual": 0.1}
    pair = {"ranks": [0, 1], **line, "sizes_bytes": [8], "median_s": [1e-5]}
    network = {"kind": "ddltool.network", "processes": 2, "local": True, **line, "pairs": [pair]}
    assert values(network) == {"processes": 2, **line}


@pytest.mark.parametrize(
    ("document", "part"),
    [
        ({"kind": "ddltool.plam"}, 'did you mean "plan"'),
        ({}, "no figures to gate"),
        ({"kind": "ddltool.trace"}, "graph: is missing"),
        ({"kind": "ddltool.barrier", "workers": 3, "lookahead": 2, "bsp": 4, "algorithms": {}}, "bsp: is 4"),
        ({"kind": "ddltool.figures", "figures": {"a": "fast"}}, "finite number"),
        ({"kind": "ddltool.figures", "figures": {}}, "no figures"),
        ({"kind": "ddltool.profile", "rows": []}, "no rows"),
        ({"kind": "ddltool.plan", "job": "j"}, "missing"),
    ],
)
def test_other_documents_are_refused_in_one_line(document: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=re.escape(part)) as caught:
        extract(document, "FILE")
    assert str(caught.value).startswith("FILE")


# ---- verdict


def gate(rule: str, now: dict[str, Any], before: dict[str, Any] | None, **options: Any) -> GateResult:
    baseline = extract(before, "baseline").metrics if before is not None else None
    return judge([parse_rule(rule)], extract(now, "current").metrics, baseline, **options)


def own(**figures: Any) -> dict[str, Any]:
    return {"kind": "ddltool.figures", "figures": figures}


@given(st.sampled_from(["increase", "decrease", "change"]), st.floats(0.1, 1e6), st.floats(0.1, 1e6), st.floats(0, 99))
def test_percent_rules_say_what_arithmetic_says(direction: str, now: float, before: float, percent: float) -> None:
    moved = 100 * (now - before) / before
    worse = {"increase": moved, "decrease": -moved, "change": abs(moved)}[direction]
    if abs(worse - percent) < 1e-6 * (1 + percent + abs(moved)):
        return  # on the limit
    check = gate(f"a {direction} <= {percent:.17g}%", own(a=now), own(a=before)).checks[0]
    assert check.passed == (worse < percent)
    assert check.change == pytest.approx(moved / 100)
    assert isinstance(check.limit, float)
    if not check.passed:
        assert (now > check.limit) == (moved > 0)


@pytest.mark.parametrize(
    ("rule", "now", "before", "passed"),
    [
        ("a <= 3", 3.0, None, True),
        ("a < 3", 3.0, None, False),
        ("a >= 3", 2.9, None, False),
        ("a == 3", 3.0, None, True),
        ("a != 3", 3.0, None, False),
        ("a <= 0.3", 0.1 + 0.2, None, True),
        ("a increase <= 0", 5.0, 5.0, True),
        ("a increase <= 2", 7.0, 5.0, True),
        ("a increase <= 2", 7.1, 5.0, False),
        ("a unchanged", 5.0, 5.0, True),
        ("a unchanged", 4.0, 5.0, False),
        ("a increase <= 5%", 0.0, 0.0, True),
        ("a increase <= 5%", 1e-9, 0.0, False),
        ("a >= -10%", -1.05, -1.0, True),
        ("a >= -10%", -1.2, -1.0, False),
    ],
)
def test_limits_on_their_edges(rule: str, now: float, before: float | None, passed: bool) -> None:
    assert gate(rule, own(a=now), own(a=before) if before is not None else None).passed is passed


def test_noise_passes_and_says_so_and_a_real_change_fails() -> None:
    verdict = gate("step_time_s increase <= 5%", profile(row(step=0.109, spread=0.02)), profile(row(spread=0.02)))
    check = verdict.checks[0]
    assert (check.passed, check.in_noise) == (True, True)
    assert "inside the noise" in check.note
    assert check.noise is not None
    assert check.noise.low < 1.05 < 1.09 < check.noise.high
    assert "log medians" in (verdict.noise_test or "")
    real = gate("step_time_s increase <= 5%", profile(row(step=0.15)), profile(row())).checks[0]
    assert (real.passed, real.in_noise) == (False, False)
    assert gate("step_time_s <= 100 ms", profile(row(step=0.101, spread=0.02)), None).checks[0].in_noise
    assert not gate("step_time_s <= 100 ms", profile(row(step=0.15)), None).passed


def test_a_measurement_without_repeats_is_told() -> None:
    check = gate("step_time_s increase <= 5%", profile(row(step=0.109, repeats=2)), profile(row())).checks[0]
    assert not check.passed
    assert "without repeats" in check.note


def test_repeats_within_a_run_are_told_from_runs() -> None:
    rows = [profile(row(step=step)) for step in (0.1, 0.101, 0.102)]
    several = combine([(one, "file") for one in rows]).metrics
    rule = [parse_rule("step_time_s increase <= 5%")]
    assert "within runs only" not in judge(rule, several, several).noise_test
    one = extract(rows[0], "file").metrics
    for sides in ((one, several), (several, one), (one, one)):
        assert "within runs only" in judge(rule, *sides).noise_test


def test_the_level_holds_for_the_whole_gate() -> None:
    """Twenty configurations of pure noise: seldom any alarm in the gate as a whole."""
    random, failed = np.random.default_rng(21), 0
    rules = [parse_rule("step_time_s/* increase <= 0%"), parse_rule("step_time_s increase <= 0%")]
    for _ in range(150):
        sides = []
        for _ in range(2):
            cells = [cell_of("", 0.1 * normal(0.03)(random, 5)) for _ in range(20)]
            rows = [row(b + 1, cell.median, cell.spread, 5) for b, cell in enumerate(cells)]
            sides.append(extract(profile(*rows), "doc").metrics)
        verdict = judge(rules, sides[0], sides[1])
        assert "(21 tests)" in (verdict.noise_test or "")
        failed += not verdict.passed
    assert failed / 150 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 150)


def test_what_only_one_side_has() -> None:
    now, before = profile(row(8), row(16)), profile(row(8), row(32))
    checks = {check.metric: check for check in gate("step_time_s/* increase <= 5%", now, before).checks}
    lost, new = checks["step_time_s/Tesla_V100_SXM/1x2/b32"], checks["step_time_s/Tesla_V100_SXM/1x2/b16"]
    assert (lost.passed, lost.current, "does not" in lost.note) == (False, None, True)
    assert (new.passed, new.baseline, "new" in new.note) == (True, None, True)
    together = gate("step_time_s increase <= 5%", now, before).checks[0]
    assert together.passed
    assert together.current == pytest.approx(0.1)
    assert "1 of 3 configurations" in together.note


@pytest.mark.parametrize(
    ("rule", "part"),
    [
        ("step_tim_s <= 3", 'did you mean "step_time_s"'),
        ("nothing/* <= 3", "unknown metric"),
        ("step_time_s <= 3 MB", "is in s"),
        ("step_time_s <= 5%", "increase <= 5%"),
        ("step_time_s increase <= 5%", "baseline"),
        ("step_time_s == fast", "is a number"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rule: str, part: str) -> None:
    with pytest.raises(InputError, match=re.escape(part)):
        gate(rule, profile(row()), None)


def test_every_kind_has_default_rules_that_parse() -> None:
    for kind in KINDS:
        assert all(rule.optional for rule in default_rules(kind))
    document = to_document(small_graph())
    metrics = extract(document, "graph").metrics
    assert judge(default_rules("ddltool.graph"), metrics, metrics).passed
    slower = extract(to_document(small_graph(2.0)), "graph").metrics
    failed = judge(default_rules("ddltool.graph"), slower, metrics).failed
    assert [check.metric for check in failed] == ["upper_s"]


# ---- formats


@pytest.fixture
def mixed() -> GateResult:
    """One check that fails, one in the noise, one that passes; with characters that need escaping."""
    now = own(**{"a<b>,c:d\x07|x": 2.0, "b_s": [1.0, 1.1, 1.2, 1.3], "c": 1.0})
    before = own(**{"a<b>,c:d\x07|x": 1.0, "b_s": [1.0, 1.05, 1.0, 1.2], "c": 1.0})
    rules = default_rules("ddltool.figures")
    verdict = judge(rules, extract(now, "n").metrics, extract(before, "b").metrics)
    assert [(check.passed, check.in_noise) for check in verdict.checks] == [(False, False), (True, True), (True, False)]
    return verdict


# From the published Jenkins schema of JUnit XML (junit-10.xsd): attributes by element.
JUNIT = {
    "testsuites": {"name", "time", "tests", "failures", "errors"},
    "testsuite": {"name", "tests", "failures", "errors", "time", "skipped", "timestamp", "hostname", "id", "package"},
    "testcase": {"name", "time", "classname", "group"},
    "failure": {"type", "message"},
    "system-out": set(),
}
CHILDREN = {"testsuites": {"testsuite"}, "testsuite": {"testcase"}, "testcase": {"failure", "system-out"}}


def test_junit_keeps_to_the_published_schema(mixed: GateResult) -> None:
    root = ElementTree.fromstring(junit(mixed, "plan & co.json", seconds=0.25))
    assert root.tag == "testsuites"
    for element in root.iter():
        assert set(element.attrib) <= JUNIT[element.tag]
        assert {child.tag for child in element} <= CHILDREN.get(element.tag, set())
    suite = root.find("testsuite")
    assert suite is not None
    assert {"name", "tests", "failures", "errors"} <= set(suite.attrib)
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "0")
    failure = root.find(".//failure")
    assert failure is not None
    assert "limit <= 1.05" in (failure.get("message") or "")
    assert "inside the noise" in (root.findtext(".//system-out") or "")


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


MESSAGE = closed(["text"], text={"type": "string", "minLength": 1})
# The parts of SARIF 2.1.0 (OASIS, sarif-schema-2.1.0.json) that a log of ours uses, as closed as the schema is.
SARIF = closed(
    ["version", "runs"],
    **{
        "$schema": {"type": "string", "format": "uri"},
        "version": {"enum": ["2.1.0"]},
        "runs": {
            "type": "array",
            "items": closed(
                ["tool"],
                tool=closed(
                    ["driver"],
                    driver=closed(
                        ["name"],
                        name={"type": "string"},
                        version={"type": "string"},
                        rules={
                            "type": "array",
                            "uniqueItems": True,
                            "items": closed(
                                ["id"],
                                id={"type": "string"},
                                name={"type": "string"},
                                shortDescription=MESSAGE,
                                defaultConfiguration=closed([], level={"enum": ["none", "note", "warning", "error"]}),
                            ),
                        },
                    ),
                ),
                results={
                    "type": "array",
                    "items": closed(
                        ["message"],
                        ruleId={"type": "string"},
                        ruleIndex={"type": "integer", "minimum": -1},
                        level={"enum": ["none", "note", "warning", "error"]},
                        message=MESSAGE,
                        partialFingerprints={"type": "object", "additionalProperties": {"type": "string"}},
                        locations={
                            "type": "array",
                            "items": closed(
                                [],
                                physicalLocation=closed(
                                    ["artifactLocation"],
                                    artifactLocation=closed(
                                        [], uri={"type": "string", "pattern": r"^[^ %]*(%20[^ %]*)*$"}
                                    ),
                                    region=closed([], startLine={"type": "integer", "minimum": 1}),
                                ),
                            ),
                        },
                    ),
                },
            ),
        },
    },
)


def test_sarif_keeps_to_the_schema(mixed: GateResult) -> None:
    log = json.loads(json.dumps(sarif(mixed, "out put/plan.json", version="1.0")))
    jsonschema.validate(log, SARIF)
    run = log["runs"][0]
    assert len(run["tool"]["driver"]["rules"]) == 3
    (result,) = run["results"]
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    place = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert place == "out%20put/plan.json"
    absolute = sarif(mixed, "/a b.json", version="1.0")["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert absolute["artifactLocation"]["uri"] == "file:///a%20b.json"


def test_workflow_commands_are_escaped(mixed: GateResult) -> None:
    failed, noise = workflow_commands(mixed, "dir,1/plan:2.json")
    command, properties, message = (
        failed.split("::", 2)[1].split(" ", 1)[0],
        failed.split("::")[1],
        failed.split("::", 2)[2],
    )
    assert command == "error"
    assert properties.startswith("error file=dir%2C1/plan%3A2.json,line=1,title=")
    assert properties.count(",") == 2  # none but the separators
    assert "%25" in message
    assert not re.search("%(?!25|0D|0A|3A|2C)", message)
    assert noise.startswith("::notice ")


def test_the_summary_is_a_table_with_one_row_per_check(mixed: GateResult) -> None:
    text = summary(mixed, "plan.json")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split(" ")[1] for row in rows[1:]] == ["FAIL", "noise", "pass"]
    for line in rows:
        assert len(re.findall(r"(?<!\\)\|", line)) == 7
    assert "<b>" not in text


def test_several_cells_have_the_geometric_mean() -> None:
    cells = [cell_of(str(value), [value]) for value in (1.0, 2.0, 4.0)]
    assert geometric_mean(cells) == pytest.approx(2.0)
    assert geometric_mean([*cells, cell_of("0", [0.0])]) == 0.0


def test_a_frame_of_a_profile_file_is_taken(tmp_path: Path) -> None:
    from ddltool.artifact_files import read_artifact

    path = tmp_path / "profile.csv"
    pd.DataFrame([row(), row(16, 0.2)]).to_csv(path, index=False)
    assert values(read_artifact(path)) == values(profile(row(), row(16, 0.2)))


HOSTILE = "x\n::stop-commands::tok\n::error::pwn\x01\x1b[31m##[add-mask]a\u202e"


def _hostile() -> GateResult:
    sides = [extract({"kind": "ddltool.figures", "figures": {HOSTILE: value}}, "t").metrics for value in (2.0, 1.0)]
    return judge([parse_rule("* <= +5%")], sides[0], sides[1])


def test_no_name_becomes_a_command_of_the_runner_or_the_terminal() -> None:
    verdict = _hostile()
    lines = workflow_commands(verdict, "a\n::error::b.json")
    assert len(lines) == 1
    texts = [*lines, summary(verdict, HOSTILE), junit(verdict, HOSTILE), json.dumps(sarif(verdict, "t", version="1"))]
    texts += [*remarks(verdict), sentence(verdict.failed[0])]
    for text in texts:
        assert all(character.isprintable() or character == "\n" for character in text), text
        assert "##[" not in text
        assert "::stop-commands" not in text
    for text in [*lines, sentence(verdict.failed[0]), *remarks(verdict)]:
        assert "\n" not in text
        assert not re.search("::error::pwn", text)
    assert lines[0].startswith("::error file=")
    # However a console folds it, no line of it begins with a command.
    shown = sentence(verdict.failed[0])
    assert not any(re.match(r"::[a-z-]+( [^:]*)?::", shown[at:]) for at in range(len(shown)))


def test_ordinary_names_stay_as_they_are() -> None:
    for name in ("tests/test_a.py::TestA::test_b", "a#b", "latency[p99]", "größe/µs"):
        assert list(extract({"kind": "ddltool.figures", "figures": {name: 1.0}}, "t").metrics) == [name]


def test_two_names_that_read_the_same_are_refused() -> None:
    figures = {"a\x01": 1.0, "a\\x01": 2.0}
    with pytest.raises(InputError, match="has two figures that read"):
        extract({"kind": "ddltool.figures", "figures": figures}, "t")


def test_a_long_name_is_shortened_in_messages_only() -> None:
    name = "n" * 10_000
    sides = [extract({"kind": "ddltool.figures", "figures": {name: value}}, "t").metrics for value in (2.0, 1.0)]
    verdict = judge([parse_rule("* <= +5%")], sides[0], sides[1])
    assert all(len(text) < 1500 for text in [sentence(verdict.failed[0]), *workflow_commands(verdict, "t")])
    assert verdict.checks[0].metric == name


@pytest.mark.parametrize("text", ["a <= 1e999", "a <= 1e308 h", "a increase <= 1e999%"])
def test_limits_beyond_all_numbers_name_their_rule(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(text)) as failed:
        parse_rule(text)
    assert "beyond what a number holds" in str(failed.value)
