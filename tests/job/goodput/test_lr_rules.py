"""Learning-rate rules against their papers' definitions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.analyzers.job.goodput import lr_rules
from ddltool.analyzers.job.goodput.lr_rules import GradientStatistics, LrRule, register, rule, rule_names
from ddltool.analyzers.job.goodput.throughput import efficiency
from ddltool.errors import InputError

scales = st.floats(0.1, 1e4)
nonnegative = st.floats(1e-6, 1e6)


def test_worked_numbers() -> None:
    # Goyal et al.: 0.1 at 256 images becomes 3.2 at 8192
    assert 0.1 * rule("linear").factor(8192 / 256) == pytest.approx(3.2)
    assert rule("sqrt").factor(16) == 4
    assert rule("legw").factor(16) == 4
    assert rule("constant").factor(16) == 1
    # LEGW: 32 times the batch, 32 times the warm-up epochs: as many warm-up steps as before
    assert rule("legw").warmup_epochs(32, 0.3125) == 10
    assert rule("linear").warmup_epochs(32, 5) == 5
    # AdaScale by hand: (3 + 1) / (3 / 4 + 1)
    assert rule("adascale").factor(4, GradientStatistics(sqr=1, var=3)) == pytest.approx(16 / 7)


@given(scales, nonnegative, nonnegative)
def test_adascale_lies_between_one_and_linear(scale: float, sqr: float, var: float) -> None:
    gain = rule("adascale").factor(scale, GradientStatistics(sqr=sqr, var=var))
    low, high = sorted((1.0, scale))
    assert low * (1 - 1e-12) <= gain <= high * (1 + 1e-12)
    assert rule("adascale").factor(scale, GradientStatistics(sqr=0, var=var)) == pytest.approx(
        scale
    )  # identity at noise
    assert rule("adascale").factor(scale, GradientStatistics(sqr=sqr, var=0)) == pytest.approx(1)  # no gain without


@given(st.integers(1, 4096), st.integers(1, 64), st.floats(0, 1e5))
def test_adascale_over_scale_is_statistical_efficiency(initial: int, times: int, noise: float) -> None:
    statistics = GradientStatistics.from_noise_scale(noise, initial)
    gain = rule("adascale").factor(times, statistics)
    assert gain / times == pytest.approx(float(efficiency(noise, initial * times, initial)))
    assert rule("adascale").steps_at_initial(times, statistics) == gain


@given(scales)
def test_the_initial_batch_changes_nothing_and_rules_are_monotone(scale: float) -> None:
    statistics = GradientStatistics(sqr=2.0, var=5.0)
    for name in rule_names():
        one = rule(name)
        assert one.factor(1.0, statistics) == pytest.approx(1)
        assert one.warmup_epochs(1.0, 3.0) == 3.0
        assert one.factor(scale * 1.01, statistics) >= one.factor(scale, statistics)


def test_warm_up_rises_in_a_line_to_the_factor() -> None:
    legw = rule("legw")
    values = [legw.warmed_factor(4, epoch, 1.0) for epoch in (-1, 0, 1, 2, 4, 9)]
    assert values == pytest.approx([0, 0, 0.5, 1.0, 2.0, 2.0])
    assert rule("linear").warmed_factor(4, 0, 0.0) == 4  # no warm-up


def test_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lr_rules, "_RULES", dict(lr_rules._RULES))  # known to this test alone

    class Cubic(LrRule):
        name = "cubic-root"

        def factor(self, scale: float, statistics: GradientStatistics | None = None) -> float:
            return float(scale ** (1 / 3))

    register(Cubic())
    assert rule("cubic-root").factor(8) == pytest.approx(2)
    assert rule("cubic-root").steps_at_initial(8) == 8
    with pytest.raises(InputError, match="exists"):
        register(Cubic())
    with pytest.raises(InputError, match="no name"):
        register(LrRule())


def test_errors() -> None:
    with pytest.raises(InputError, match='did you mean "linear"'):
        rule("liner")
    with pytest.raises(InputError, match="needs gradient statistics"):
        rule("adascale").factor(2)
    for scale in (0.0, -1.0, math.nan, math.inf):
        for name in ("constant", "linear", "sqrt", "legw"):
            with pytest.raises(InputError, match="scale"):
                rule(name).factor(scale)
    assert {name for name in rule_names() if rule(name).needs_statistics} == {"adascale"}
    for sqr, var in ((-1.0, 1.0), (-1.0, 3.0), (3.0, -0.5), (math.nan, 1.0), (math.inf, 1.0), (0.0, 0.0)):
        with pytest.raises(InputError):
            GradientStatistics(sqr=sqr, var=var)
