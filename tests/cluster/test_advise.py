"""Advice on a resize: against a step-by-step replay, drawn samples and the replayed simulator's own arithmetic."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.analyzers.answers.reporting.simulation_section import advice_section
from ddltool.analyzers.cluster.advise import advise, advise_job, placements, saved_seconds
from ddltool.analyzers.job.goodput.throughput import ThroughputParams, goodput_per_s
from ddltool.artifacts import save, to_json
from ddltool.errors import DdlToolError
from ddltool.goodput_model import Goodput

PARAMS = {
    **{"alpha_grad_s": 0.02, "beta_grad_s": 0.001, "alpha_sync_local_s": 0.01, "beta_sync_local_s": 0.001},
    **{"alpha_sync_node_s": 0.05, "beta_sync_node_s": 0.002, "gamma": 1.5},
}
STATE: dict[str, Any] = {
    **{"kind": "ddltool.job_state", "schema_version": 1, "goodput": "fit.json", "noise_scale": 4000.0},
    **{"initial_batch_size": 128, "max_batch_size": 4096, "max_local_batch_size": 512, "held": [2, 0, 0]},
    **{"free": [2, 4, 1], "remaining_s": 900.0, "restarts_s": [28.0, 31.0, 45.0]},
}


def walked(remaining: float, gain: float, delay: float, hold: float | None) -> float:
    """What a resize saves, by going through the job's life instead of a formula."""
    now, left, rate = 0.0, remaining, gain  # left: seconds of work on the present allocation
    now += delay
    if hold is not None and now + left / rate > hold:
        worked = max(hold - now, 0.0)
        left -= worked * rate
        now = hold + delay
        rate = 1.0
    return remaining - (now + left / rate)


positive = st.floats(min_value=1e-2, max_value=1e5)


@given(positive, st.floats(min_value=0.2, max_value=20), st.floats(min_value=0, max_value=1e4), st.none() | positive)
def test_saving_agrees_with_a_walk_through_the_jobs_life(
    remaining: float, gain: float, delay: float, hold: float | None
) -> None:
    found = float(saved_seconds(np.array(remaining), np.array(gain), np.array(delay), hold))
    assert found == pytest.approx(walked(remaining, gain, delay, hold), rel=1e-9, abs=1e-6)


@given(st.floats(min_value=1.01, max_value=20), st.floats(min_value=0.1, max_value=1e4))
def test_break_even_is_where_the_saving_changes_its_sign(gain: float, delay: float) -> None:
    even = advise(gain, 1.0, [delay]).break_even_s
    assert even is not None
    for factor, sign in ((0.999, -1), (1.001, 1)):
        one = advise(gain, even * factor, [delay])
        assert math.copysign(1, one.saved_s) == sign
        assert (one.expected_saved_s, one.saved_p10_s, one.saved_p90_s) == pytest.approx((one.saved_s,) * 3)
        assert one.probability == (1.0 if sign > 0 else 0.0)


@pytest.mark.parametrize("hold", [None, 400.0])
def test_uncertainty_agrees_with_drawn_samples(hold: float | None) -> None:
    restarts = [20.0, 60.0, 200.0]
    advice = advise(1.5, 300.0, restarts, remaining_factor=2.5, gain_factor=1.2, hold_s=hold)
    rng = np.random.default_rng(1)
    count = 400_000
    left = 300.0 * np.exp(math.log(2.5) * rng.standard_normal(count))
    gain = 1.5 * np.exp(math.log(1.2) * rng.standard_normal(count))
    saved = saved_seconds(left, gain, rng.choice(restarts, count), hold)
    spread = saved.std()
    assert advice.probability == pytest.approx((saved > 0).mean(), abs=0.01)
    assert advice.expected_saved_s == pytest.approx(saved.mean(), abs=0.03 * spread)
    low, high = np.quantile(saved, (0.1, 0.9))
    assert (advice.saved_p10_s, advice.saved_p90_s) == pytest.approx((low, high), abs=0.03 * spread)
    assert 0.1 < advice.probability < 0.9


def test_a_slower_allocation_never_pays() -> None:
    advice = advise(0.9, 1e6, [0.0], remaining_factor=3.0)
    assert (advice.break_even_s, advice.probability) == (None, 0.0)
    # Ten seconds' hold cannot bring back two restarts of thirty, however much is left.
    assert advise(3.0, 1e6, [30.0], hold_s=10.0).break_even_s is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4))
def test_placements_take_the_fewest_nodes(nodes: list[tuple[int, int]]) -> None:
    held, free = [one for one, _ in nodes], [other for _, other in nodes]
    room = [one + other for one, other in nodes]
    found = {sum(option): option for option in placements(held, free, 100)}
    for count in range(1, sum(room) + 1):
        fewest = next(
            size
            for size in range(1, len(room) + 1)
            if any(sum(chosen) >= count for chosen in itertools.combinations(room, size))
        )
        if count == sum(held) and fewest >= sum(one > 0 for one in held):
            assert count not in found
        else:
            assert sum(one > 0 for one in found[count]) == fewest
            assert all(0 <= gpus <= most for gpus, most in zip(found[count], room, strict=True))


def write_state(folder: Path, **changes: Any) -> Path:
    """A fitted model and a job state, with some fields changed; None removes one."""
    model = Goodput(
        sources=["made"],
        params=ThroughputParams(**PARAMS),
        rmsle=0.05,
        mape=0.05,
        samples=10,
        fit_seconds=0.0,
        undetermined=[],
    )
    save(model, folder / "fit.json")
    state = {name: value for name, value in {**STATE, **changes}.items() if value is not None}
    path = folder / "state.json"
    path.write_text(json.dumps(state))
    return path


def test_the_document_is_the_best_of_all_options(tmp_path: Path) -> None:
    document = advise_job(write_state(tmp_path, remaining_factor=2.0))
    params = ThroughputParams(**PARAMS)

    def goodput(nodes: int, replicas: int) -> float:
        """The best over every local batch and up to seven accumulation steps, one by one."""
        return max(
            float(goodput_per_s(params, nodes, replicas, m, s, noise_scale=4000.0, initial_batch_size=128))
            for m in range(1, 513)
            for s in range(8)
            if 128 <= replicas * m * (s + 1) <= 4096
        )

    now = goodput(1, 2)
    assert document.now.goodput_per_s == pytest.approx(now)
    assert [one.replicas for one in document.options] == [1, 3, 4, 5, 6, 7, 8, 9]
    for one in document.options:
        assert one.gain == pytest.approx(goodput(one.nodes, one.replicas) / now)
        assert one.saved_s == pytest.approx(900 - 900 / one.gain - np.mean(STATE["restarts_s"]))
    assert document.best is not None
    assert document.best == max(document.options, key=lambda one: one.expected_saved_s)
    assert document.resize
    assert document.gain_factor == pytest.approx(math.exp(math.sqrt(2) * 0.05))
    assert advice_section(document).lead[0].startswith("Resize from 2 to ")
    samples = advise_job(write_state(tmp_path, remaining_s=None, remaining_samples=900.0 * now, remaining_factor=2.0))
    assert (samples.best or document.options[0]).expected_saved_s == pytest.approx(document.best.expected_saved_s)


def test_little_left_or_nothing_free_means_stay(tmp_path: Path) -> None:
    late = advise_job(write_state(tmp_path, remaining_s=10.0))
    nothing = advise_job(write_state(tmp_path, held=[1], free=[0]))
    assert (nothing.best, nothing.options, nothing.resize) == (None, [], False)
    assert "Stay on 2 GPUs: no resize saves time" in advice_section(late).lead[0]
    assert advice_section(nothing).lead == ["Stay on 1 GPU: no other allocation is possible now."]
    assert to_json(nothing)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"free": [1]}, "free"),
        ({"held": [0, 0, 0]}, "held"),
        ({"held": [-1, 2, 0]}, "held"),
        ({"remaining_samples": 10.0}, "remaining_s"),
        ({"remaining_s": None}, "remaining_s"),
        ({"remaining_s": 0.0}, "remaining_s"),
        ({"remaining_s": 1e308}, "remaining_s"),
        ({"remaining_s": math.nan}, "remaining_s"),
        ({"remaining_factor": 0.5}, "remaining_factor"),
        ({"restarts_s": []}, "restarts_s"),
        ({"restarts_s": [math.inf]}, "restarts_s"),
        ({"initial_batch_size": 5000}, "initial_batch_size"),
        ({"goodput": "nowhere.json"}, "nowhere.json"),
        ({"hold_s": 1e300}, "hold_s"),
        ({"max_replica": 3}, "max_replica"),
        ({"held": [2, 0, 0] * 2000, "free": [2, 4, 1] * 2000, "noise_scale": -1.0}, "noise_scale"),
        (
            {"max_local_batch_size": 1, "initial_batch_size": 4095, "held": [4096, 0, 0], "max_batch_size": 4095},
            "batch",
        ),
    ],
)
def test_bad_states_are_one_line(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DdlToolError, match=words) as caught:
        advise_job(write_state(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_a_large_cluster_is_looked_at_in_steps(tmp_path: Path) -> None:
    held = [8, *[0] * 999]
    document = advise_job(write_state(tmp_path, held=held, free=[0, *[8] * 999], max_batch_size=100_000))
    counts = [one.replicas for one in document.options]
    assert len(counts) <= 64
    assert (counts[0], counts[-1]) == (1, 4096)
    assert document.options[-1].nodes == 512
    assert sum(document.options[-1].gpus_by_node.values()) == 4096
