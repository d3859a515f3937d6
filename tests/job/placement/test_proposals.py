"""The intra-job scheduler's three roles against dealing ESTs one by one, and the step table against whole-number bisection."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.analyzers.job.placement.problem import DeviceType, Problem
from ddltool.analyzers.job.placement.proposals import Proposal, accept, best_throughput, proposals
from ddltool.analyzers.job.placement.steps import integer_weights, smallest_step, step_table
from ddltool.errors import InputError
from tests.helpers.est_oracles import closed_form

CAPABILITY = {"V100": 3.1, "P100": 2.4, "T4": 1.0}
rates = st.one_of(
    st.decimals("0.1", "9.9", places=1).map(float),
    st.floats(0.01, 100.0).map(lambda value: 1 / value),
    st.sampled_from([1.0, 2.0, 1 / 3, 2 / 3, 1e-6, 1e6]),
)


def dealt(capability: dict[str, float], held: dict[str, int], workers: int) -> float:
    """Throughput by giving one EST after the other to the device that would finish it first."""
    speeds = [Fraction(repr(float(capability[name]))) for name, count in held.items() for _ in range(count)]
    if not speeds:
        return 0.0
    ests = [0] * len(speeds)
    for _ in range(workers):
        place = min(range(len(speeds)), key=lambda place: (ests[place] + 1) / speeds[place])
        ests[place] += 1
    step = max(number / speed for number, speed in zip(ests, speeds, strict=True))
    return float(workers / step)


@given(data=st.data(), types=st.integers(1, 4), workers=st.integers(1, 40))
def test_the_best_throughput_equals_dealing(data: st.DataObject, types: int, workers: int) -> None:
    capability = {f"t{place}": data.draw(rates) for place in range(types)}
    held = {name: data.draw(st.integers(0, 6)) for name in capability}
    assert best_throughput(capability, held, workers) == dealt(capability, held, workers)


@given(data=st.data(), types=st.integers(1, 4), workers=st.integers(1, 60))
def test_table_bisection_and_closed_form_agree(data: st.DataObject, types: int, workers: int) -> None:
    capabilities = tuple(Fraction(repr(data.draw(rates))) for _ in range(types))
    table = step_table(capabilities, workers)
    assert (np.diff(table.seconds) >= 0).all()
    vectors = np.array([[data.draw(st.integers(0, 9)) for _ in range(types)] for _ in range(4)])
    for vector, place in zip(vectors.tolist(), table.smallest_steps(vectors).tolist(), strict=True):
        if not any(vector):
            assert place == len(table.seconds)
            assert table.throughputs[place] == 0
            continue
        found = smallest_step(integer_weights(capabilities), vector, workers)
        assert found is not None
        k, kind = found
        devices = tuple(
            DeviceType(name=str(number), count=count, capability_per_s=capability)
            for number, (count, capability) in enumerate(zip(vector, capabilities, strict=True))
            if count
        )
        exact = closed_form(Problem(job="j", max_workers=workers, batch_size=1, devices=devices))
        assert table.step(place) == k / capabilities[kind] == exact
        assert table.throughputs[place] == float(workers / exact)


def test_step_times_that_round_to_the_same_float_keep_their_order() -> None:
    near = (Fraction(1), 1 - Fraction(1, 10**20), 1 + Fraction(1, 10**20))
    table = step_table(near, 7)
    exact = [table.step(place) for place in range(len(table.seconds))]
    assert exact == sorted(set(exact))
    assert len(exact) == 21
    for place, step in enumerate(exact):
        assert table.capacities[place].tolist() == [min(int(speed * step), 7) for speed in near]


def test_limits_on_a_device() -> None:
    table = step_table((Fraction(3), Fraction(1)), 8, (2, None))
    assert table.capacities[:, 0].max() == 2
    assert table.step(int(table.smallest_steps(np.array([[2, 1]]))[0])) == 4  # two, two, and four on the slow one
    assert table.smallest_steps(np.array([[3, 0]]))[0] == len(table.seconds)
    with pytest.raises(InputError, match="max_workers: is 3,000,000 on 2 device types: 6,000,000 possible step times"):
        step_table((Fraction(3), Fraction(1)), 3_000_000)


@given(data=st.data(), workers=st.integers(1, 24), homogeneous=st.booleans())
def test_proposals_are_all_that_help_best_first(data: st.DataObject, workers: int, homogeneous: bool) -> None:
    counts = st.integers(0, 4)
    held = {name: data.draw(counts) for name in CAPABILITY}
    if homogeneous:
        kept = data.draw(st.sampled_from(sorted(CAPABILITY)))
        held = {name: count if name == kept else 0 for name, count in held.items()}
    free = {name: data.draw(counts) for name in CAPABILITY}
    now = dealt(CAPABILITY, held, workers)
    reference = now or 1.0
    expected = []
    for name, most in free.items():
        if homogeneous and any(held.values()) and not held[name]:
            continue
        before = now
        for count in range(1, most + 1):
            speed = dealt(CAPABILITY, {**held, name: held[name] + count}, workers)
            if speed > before:
                expected.append((name, count, speed, speed / reference, (speed - now) / reference / count))
            before = speed
    found = proposals(CAPABILITY, held, free, workers, 100, homogeneous)
    assert {(each.device_type, each.count) for each in found} == {entry[:2] for entry in expected}
    for each in found:
        entry = next(entry for entry in expected if entry[:2] == (each.device_type, each.count))
        assert (each.throughput, each.speedup, each.speedup_per_gpu) == pytest.approx(entry[2:])
    gains = [each.speedup_per_gpu for each in found]
    assert all(one >= other * (1 - 1e-8) for one, other in itertools.pairwise(gains))
    assert proposals(CAPABILITY, held, free, workers, 2, homogeneous) == found[:2]


def test_equal_speedups_prefer_more_devices_then_names() -> None:
    found = proposals({"a": 1.0, "b": 1.0}, {"a": 1}, {"a": 3, "b": 3}, 4, 10, False)
    # One more halves the step: from 4 s to 2 s; three more quarter it, for the same gain each.
    assert [(each.device_type, each.count, each.speedup, each.speedup_per_gpu) for each in found] == [
        ("a", 3, 4.0, 1.0),
        ("b", 3, 4.0, 1.0),
        ("a", 1, 2.0, 1.0),
        ("b", 1, 2.0, 1.0),
    ]


def proposal(kind: str, count: int, gain: float) -> Proposal:
    return Proposal(device_type=kind, count=count, throughput=1.0, speedup=1 + gain * count, speedup_per_gpu=gain)


def test_the_cluster_grants_by_speedup_per_device() -> None:
    offers = [
        ("j1", proposal("V100", 2, 0.5)),
        ("j2", proposal("V100", 3, 0.5)),  # as good for each, and more: first
        ("j3", proposal("T4", 1, 0.9)),
        ("j3", proposal("V100", 1, 0.8)),  # has got the T4
        ("j1", proposal("V100", 1, 0.4)),  # what is left for it
    ]
    granted = accept(offers, {"V100": 4, "T4": 1})
    assert [(job, each.device_type, each.count) for job, each in granted] == [
        ("j3", "T4", 1),
        ("j2", "V100", 3),
        ("j1", "V100", 1),
    ]
    assert accept([(job, proposal("T4", 1, 0.5)) for job in ("j10", "j9")], {"T4": 1})[0][0] == "j9"


def test_bad_input_is_one_line() -> None:
    for call, message in (
        (lambda: best_throughput(CAPABILITY, {"V100": -1}, 4), r"devices\.V100: is -1"),
        (lambda: best_throughput(CAPABILITY, {"A100": 1}, 4), r"devices\.A100: has no capability; did you mean"),
        (lambda: best_throughput(CAPABILITY, {"V100": 1}, 0), "max_workers: is 0"),
        (lambda: best_throughput({"V100": math.nan}, {"V100": 1}, 1), r"capability\.V100: is nan"),
        (lambda: best_throughput({"V100": 1e308}, {"V100": 1}, 1), r"capability\.V100: is 1e\+308"),
        (lambda: proposals(CAPABILITY, {}, {"V100": 1}, 4, 0, False), "top_k: is 0"),
    ):
        with pytest.raises(InputError, match=message):
            call()  # type: ignore[no-untyped-call]
    assert best_throughput(CAPABILITY, {}, 4) == 0.0
    assert proposals(CAPABILITY, {"V100": 4}, {}, 4, 3, False) == []


def test_ten_thousand_devices_are_no_more_work() -> None:
    capability = {f"t{place}": 1 / (0.1 + 0.17 * place) for place in range(8)}
    held = dict.fromkeys(capability, 1250)
    found = best_throughput(capability, held, 50_000)
    devices = tuple(
        DeviceType(name=name, count=1250, capability_per_s=Fraction(repr(rate))) for name, rate in capability.items()
    )
    assert found == float(50_000 / closed_form(Problem(job="j", max_workers=50_000, batch_size=1, devices=devices)))
