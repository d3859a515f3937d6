"""EasyScale, Sia-like and our policy: by hand, against brute force, and invariants of every policy on mixed GPUs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.cluster import assign as assigning
from ddltool.analyzers.cluster import policies as policies_package
from ddltool.analyzers.cluster.assign import JobSpeedups, TypeSpeedup, assign
from ddltool.analyzers.cluster.cluster import ClusterSpec, count_gpus
from ddltool.analyzers.cluster.inputs import read_applications, read_workload
from ddltool.analyzers.cluster.job import Beliefs, SimulatedJob, Tuning, make_jobs
from ddltool.analyzers.cluster.metrics import IsolatedTimes, summarize
from ddltool.analyzers.cluster.policies import ours, policies
from ddltool.analyzers.cluster.policies.easyscale import EasyScale, EasyScaleHomo
from ddltool.analyzers.cluster.policies.gangs import Fifo
from ddltool.analyzers.cluster.policies.optimus import Optimus
from ddltool.analyzers.cluster.policies.ours import Ours
from ddltool.analyzers.cluster.policies.pollux import Pollux
from ddltool.analyzers.cluster.policies.sia import Sia
from ddltool.analyzers.cluster.search import JobCosts, pack
from ddltool.analyzers.cluster.simulator import check_runs, simulate
from ddltool.analyzers.cluster.truth import Application
from ddltool.errors import InputError
from tests.conftest import submitted
from tests.helpers.workloads import APPLICATIONS, EVERY, TWO_TYPES, application, finishes

both = partial(submitted, application="both")
Costs = Sequence[Sequence[np.ndarray[Any, Any]]]


# The assignment.


def brute(costs: Costs, capacity: Sequence[int]) -> float:
    """Return the least total cost by trying everything."""
    options = []
    for tables in costs:
        mine = [(0, 0, float(tables[0][0]))]
        for kind, table in enumerate(tables):
            mine += [
                (kind, count, float(table[count])) for count in range(1, len(table)) if math.isfinite(table[count])
            ]
        options.append(mine)
    best = math.inf
    for chosen in itertools.product(*options):
        used = Counter[int]()
        for kind, count, _ in chosen:
            used[kind] += count
        if all(used[kind] <= room for kind, room in enumerate(capacity)):
            best = min(best, sum(cost for *_, cost in chosen))
    return best


def relaxed(costs: Costs, capacity: list[int]) -> list[tuple[int, int]]:
    """The assignment where there are too many options for the integer program."""
    with mock.patch.multiple(assigning, _FEW_OPTIONS=0, _MOST_BINARIES=0):
        return assign(costs, capacity)


def cost_of(costs: Costs, assigned: list[tuple[int, int]]) -> float:
    return sum(float(tables[kind][count]) for tables, (kind, count) in zip(costs, assigned, strict=True))


@st.composite
def knapsacks(draw: st.DrawFn) -> tuple[list[list[np.ndarray[Any, Any]]], list[int]]:
    kinds = draw(st.integers(1, 3))
    capacity = draw(st.lists(st.integers(1, 5), min_size=kinds, max_size=kinds))
    costs = []
    for _ in range(draw(st.integers(1, 4))):
        idle = float(draw(st.integers(10, 40)))
        tables = []
        for _ in range(kinds):
            most = draw(st.integers(0, 3))
            values = draw(st.lists(st.one_of(st.integers(0, 40), st.just(math.inf)), min_size=most, max_size=most))
            tables.append(np.array([idle, *map(float, values)]))
        costs.append(tables)
    return costs, capacity


@given(knapsacks(), st.booleans())
def test_an_assignment_fits_and_is_that_of_trying_everything(
    problem: tuple[list[list[np.ndarray[Any, Any]]], list[int]], exact: bool
) -> None:
    costs, capacity = problem
    found = assign(costs, capacity) if exact else relaxed(costs, capacity)
    used = Counter[int]()
    for kind, count in found:
        used[kind] += count
    assert all(used[kind] <= room for kind, room in enumerate(capacity))
    best, total = brute(costs, capacity), cost_of(costs, found)
    assert best <= total + 1e-6
    if exact:  # that small, the integer program runs over everything
        assert total == pytest.approx(best, rel=2e-4)


@given(
    st.lists(st.lists(st.floats(0.05, 3.0), min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=2, max_size=2),
)
def test_on_convex_costs_the_relaxation_comes_close(drops: list[list[float]], capacity: list[int]) -> None:
    costs = []
    for falls in drops:
        curve = 20.0 - np.cumsum([0.0, *sorted(falls, reverse=True)])
        faster = 20.0 - 1.5 * np.cumsum([0.0, *sorted(falls, reverse=True)])
        costs.append([curve, faster])
    best = brute(costs, capacity)
    rough = cost_of(costs, relaxed(costs, capacity))
    assert cost_of(costs, assign(costs, capacity)) == pytest.approx(best, rel=2e-4)
    # One job per type at most is not where the relaxation has it.
    ranges = sorted(
        (float(tables[0][0]) - min(float(table.min()) for table in tables) for tables in costs), reverse=True
    )
    assert best - 1e-9 <= rough <= best + sum(ranges[:2]) + 1e-6


def test_nobody_gets_anything_when_nothing_fits_and_no_jobs_are_no_problem() -> None:
    assert assign([[np.array([5.0, math.inf, math.inf, 1.0])]], [2]) == [(0, 0)]
    assert assign([], [2]) == []
    # Three GPUs would be far better, but there are two: what cannot fit must not hide what can.
    assert relaxed([[np.array([5.0, 4.9, 4.8, 1.0])]], [2]) == [(0, 2)]


def test_counts_are_packed_onto_nodes() -> None:
    choice = JobCosts(within=np.array([9.0, 3, 2, 1, 0.5]), across=np.array([9.0, np.inf, 2, 1, 0.5]))
    made = pack([choice, choice, choice], [4, 4], [4, 3, 1])
    assert sorted(made[0]) == [(0, 4)]
    assert sum(map(count_gpus, made)) == 8
    kept = replace(choice, base=((1, 3),), keep=0.1)
    assert pack([choice, kept], [4, 4], [4, 3])[1] == ((1, 3),)


# Mixed clusters: which type, and who refuses.


def test_gangs_run_on_the_emptiest_type_that_they_were_measured_on() -> None:
    jobs = [
        both("a", 0.0, replicas=3),
        both("b", 1.0, replicas=4),
        submitted("c", 2.0, "only", 4),
        submitted("d", 3.0, "only", 2),
    ]
    seen: dict[int, str] = {}

    class Watch(Fifo):
        def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Any:
            made = super().allocate(jobs, cluster, now_s)
            for index, allocation in made.items():
                seen.setdefault(index, cluster.type_of(allocation))
            return made

    simulate(
        [one.model_copy(update={"batch_size": 8 * one.num_replicas}) for one in jobs], APPLICATIONS, TWO_TYPES, Watch()
    )
    # 8 slow and 8 fast GPUs: a takes the first of two equal, then fast has more; c and d know slow ones only.
    assert seen == {0: "slow", 1: "fast", 2: "slow", 3: "slow"}


@pytest.mark.parametrize("policy", [Optimus(), Pollux()])
def test_policies_for_one_type_refuse_several_in_one_line(policy: Any) -> None:
    with pytest.raises(InputError, match=rf"policy {policy.name}: knows one GPU type, and the cluster has slow, fast"):
        check_runs([both("a", 0.0)], APPLICATIONS, TWO_TYPES, policy)
    with pytest.raises(InputError, match="knows one GPU type"):
        simulate([both("a", 0.0)], APPLICATIONS, TWO_TYPES, policy)


def test_what_can_never_run_is_refused_before_anything_runs() -> None:
    with pytest.raises(InputError, match="wants 9 GPUs of one type of 8; it could never start"):
        check_runs([both("a", 0.0, replicas=9, batch=72)], APPLICATIONS, TWO_TYPES, Fifo())
    fast = ClusterSpec.homogeneous(2, 4, "fast")
    with pytest.raises(InputError, match="only was not measured on fast; measured on slow"):
        check_runs([submitted("a", 0.0, "only")], APPLICATIONS, fast, Ours())
    check_runs([both("a", 0.0, replicas=9, batch=72)], APPLICATIONS, TWO_TYPES, EasyScale())


# EasyScale.


def test_logical_workers_take_as_long_as_the_busiest_gpu() -> None:
    made = make_jobs([both("a", 0.0, replicas=6, batch=48)], APPLICATIONS, Tuning.LOGICAL, TWO_TYPES)[0]
    assert made.capabilities() == pytest.approx({"slow": 1 / 2.0, "fast": 1 / 0.5})
    # By trying all splits of 6 logical workers: on 1 slow (2 s each) and 1 fast (0.5 s each) GPU, 5 and 1 is best.
    for slow, fast in [(1, 1), (2, 0), (0, 2), (3, 1), (2, 4)]:
        best = math.inf
        for split in itertools.product(range(7), repeat=slow + fast):
            if sum(split) == 6:
                best = min(best, max([2.0 * n for n in split[:slow]] + [0.5 * n for n in split[slow:]]))
        held = {"slow": slow, "fast": fast}
        held = {name: count for name, count in held.items() if count}
        placement = (slow, fast) if slow and fast else (slow + fast,)
        sync = 0.1 if slow + fast > 1 else 0.0
        assert made.logical_step_s(held, placement) == pytest.approx(best + sync)


def test_easyscale_starts_a_job_that_fifo_would_hold_back_and_the_batch_stays() -> None:
    # 4 GPUs; a takes 3, b wants 4: FIFO waits for a, EasyScale runs b's four logical workers on what is free.
    cluster = ClusterSpec.homogeneous(1, 4, "slow")
    jobs = [both("a", 0.0, replicas=3, batch=24), both("b", 1.0, replicas=4, batch=32)]
    batches: list[int] = []

    class Watch(EasyScaleHomo):
        def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Any:
            batches.extend(one.total_batch_size for one in jobs if one.spec.name == "b" and one.allocation)
            return super().allocate(jobs, cluster, now_s)

    held = simulate(jobs, APPLICATIONS, cluster, Fifo())
    made = simulate(jobs, APPLICATIONS, cluster, Watch())
    assert made.jobs[1].start_s == 60.0 < held.jobs[1].start_s
    assert set(batches) == {32}


def test_only_heterogeneous_jobs_mix_types_and_only_those_that_may() -> None:
    def types_held(policy: EasyScale) -> list[set[str]]:
        seen: list[set[str]] = []

        class Watch:
            name, tuning = policy.name, policy.tuning

            def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Any:
                made = policy.allocate(jobs, cluster, now_s)
                seen.extend({cluster.gpu_types[node] for node, _ in allocation} for allocation in made.values())
                return made

        simulate([submitted("a", 0.0, "quick", 16, 128)], APPLICATIONS, TWO_TYPES, Watch())
        return seen

    assert max(map(len, types_held(EasyScaleHomo()))) == 1
    assert max(map(len, types_held(EasyScale()))) == 2


def test_a_scale_out_that_measured_slower_is_taken_back_and_not_asked_for_again() -> None:
    # Synchronising costs 3 s, more than a second GPU saves: 2 logical workers of 1 s each take 2 s on one GPU.
    heavy = {"heavy": application("heavy", {"slow": 1.0}, 3.0, epochs=40)}
    held: list[tuple[float, int]] = []

    class Watch(EasyScaleHomo):
        def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Any:
            made = super().allocate(jobs, cluster, now_s)
            held.extend((now_s, count_gpus(made.get(one.index, ()))) for one in jobs if one.spec.name == "b")
            return made

    cluster = ClusterSpec.homogeneous(1, 2, "slow")
    jobs = [submitted("a", 0.0, "short"), submitted("b", 61.0, "heavy", 2, 16)]
    short = dict(heavy, short=application("short", {"slow": 1.0}, 3.0, epochs=8))
    made = simulate(jobs, short, cluster, Watch())
    counts = [count for _, count in held]
    grown = counts.index(2)
    assert counts[:grown] == [1] * grown
    back = counts.index(1, grown)
    assert set(counts[back:]) == {1}
    assert made.jobs[1].restarts == 2


def test_a_job_that_finds_nothing_free_is_given_one_gpu_by_the_job_that_loses_least() -> None:
    # a holds 4 GPUs for 4 logical workers: one less halves it (2 per GPU). b holds 3 for 4: one less changes nothing.
    cluster = ClusterSpec.homogeneous(1, 7, "slow")
    jobs = make_jobs(
        [submitted("a", 0.0, "only", 4, 32), submitted("b", 0.0, "only", 4, 32), submitted("c", 0.0, "only", 1, 8)],
        APPLICATIONS,
        Tuning.LOGICAL,
        cluster,
    )
    for one, count in zip(jobs, (4, 3), strict=False):
        one.reallocate(((0, count),), 0.0, 0.0)
        one.retune(0.0, False)
    made = EasyScaleHomo().allocate(jobs, cluster, 60.0)
    assert {index: count_gpus(allocation) for index, allocation in made.items()} == {0: 4, 1: 2, 2: 1}


# Sia-like and ours.


def test_pooled_beliefs_give_a_later_job_what_an_earlier_one_saw() -> None:
    jobs = make_jobs(
        [both("a", 0.0), both("b", 0.0)],
        APPLICATIONS,
        Tuning.ADAPTIVE,
        ClusterSpec.homogeneous(2, 4, "slow"),
        pooled=True,
    )
    first, second = jobs
    assert second.goodput_table(4) is None
    assert second.most_replicas == 1
    first.reallocate(((0, 4),), 0.0, 0.0)
    first.retune(0.0, False)
    first.advance(5.0)
    table = second.goodput_table(4)
    assert table is not None
    assert table[0, 4] > 0
    assert second.most_replicas == 8
    apart = make_jobs(
        [both("a", 0.0), both("b", 0.0)], APPLICATIONS, Tuning.ADAPTIVE, ClusterSpec.homogeneous(2, 4, "slow")
    )
    assert apart[0].beliefs is not apart[1].beliefs


def test_the_correction_is_by_how_much_the_model_was_wrong() -> None:
    beliefs = Beliefs(pooled=True)
    for replicas, step in [(1, 1.0), (2, 1.2), (4, 1.3), (8, 4.0)]:  # 8 replicas: slower than any smooth model
        beliefs.observe("x", (1, replicas, 8), (step, step - 0.9))
        beliefs.observe("x", (1, replicas, 16), (step + 0.5, step - 0.9))
    beliefs.model("x")
    made = beliefs.correction("x", 8)
    assert made[0, 8] < 0.98 < made[0, 4]
    assert made[1].tolist() == [1.0] * 9  # nothing seen across nodes


def test_ours_looks_at_no_truth_that_a_scheduler_cannot_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> float:
        raise AssertionError("an oracle was asked")

    for name in ("true_step_s", "remaining_iterations", "remaining_s", "logical_step_s"):
        monkeypatch.setattr(SimulatedJob, name, forbidden)
    inside = [False]
    for name in ("step_times", "grad_stats", "gain", "iterations"):
        method = getattr(Application, name)

        def guarded(self: Application, *given: Any, _method: Any = method, **named: Any) -> Any:
            assert not inside[0], "the truth was asked in a round"
            return _method(self, *given, **named)

        monkeypatch.setattr(Application, name, guarded)

    class Watch(Ours):
        def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Any:
            inside[0] = True
            made = super().allocate(jobs, cluster, now_s)
            inside[0] = False
            return made

    jobs = [submitted(str(n), 40.0 * n, kind) for n, kind in enumerate(["both", "quick", "only", "both", "quick"])]
    assert len(simulate(jobs, APPLICATIONS, TWO_TYPES, Watch()).jobs) == 5


@st.composite
def believed(draw: st.DrawFn) -> JobSpeedups:
    """What is believed of a job that nobody runs: speeds on one type or two, of up to four GPUs."""
    number = st.sampled_from([0.0, 0.5, 1.0, 1.75, 3.0])
    most = draw(st.integers(1, 4))
    by_type = []
    for name in ("slow", "fast")[: draw(st.integers(1, 2))]:
        held = draw(st.sampled_from([0, 0, 1, 2, most]))
        table = np.array([draw(st.lists(number, min_size=5, max_size=5)) for _ in range(2)])
        table[0, 0] = table[1, 0] = table[1, 1] = 0.0
        table[0, 1] = max(table[0, 1], 0.5)
        row = int(held > 1 and draw(st.booleans())) if held else -1
        by_type.append(TypeSpeedup(gpu_type=name, speedup=table, held=held, held_row=row))
    age_s = draw(st.sampled_from([0.0, 59.0, 700.0]))
    job = SimpleNamespace(
        **{"index": draw(st.integers(0, 2)), "running_from_s": draw(st.sampled_from([0.0, 1000.0, 1025.0]))},
        **{"allocation": ((0, 1),), "age_s": lambda now_s: age_s},
    )
    left = draw(st.sampled_from([None, 0.0, 20.0, 5000.0]))
    return JobSpeedups(job=job, most_replicas=most, remaining_s=left, by_type=tuple(by_type))  # type: ignore[arg-type]


@given(st.lists(believed(), min_size=1, max_size=4), st.sampled_from([120.0, 4000.0]), st.integers(0, 3))
def test_ours_weighs_and_prices_as_written(offers: list[JobSpeedups], hold_s: float, fair: int) -> None:
    """Job by job and count by count, in the words of the policy's first paragraph."""
    policy, now_s = Ours(delay_s=30.0), 1000.0
    late = []
    for one in offers:
        expected_s = one.job.age_s(now_s)
        if one.remaining_s is not None:
            count = min(max(1, fair), one.most_replicas)
            fastest = max(table.speedup[row][count] for table in one.by_type for row in (0, 1))
            expected_s += one.remaining_s / max(fastest, 1e-3)
        late.append(max(expected_s, 60.0) ** 0.75)
    longer = [(-(one.remaining_s or 0.0), -one.job.index, place) for place, one in enumerate(offers)]
    wanted = []
    for place in range(len(offers)):
        before = [late[other[2]] for other in longer if other <= longer[place]]
        wanted.append((sum(before) / (sum(late) / len(late))) ** 0.8)
    weights = policy._weights(offers, fair, now_s)
    assert weights == pytest.approx(wanted)

    for one, weight in zip(offers, weights, strict=True):
        top = max(float(table.speedup.max()) for table in one.by_type) ** 0.25
        made = policy._choices(one, weight, hold_s, now_s)
        assert list(made) == [table.gpu_type for table in one.by_type]
        for table in one.by_type:
            costs = made[table.gpu_type]

            def stay_s(speed: float, one: JobSpeedups = one) -> float:
                return hold_s if one.remaining_s is None or speed == 0 else min(hold_s, one.remaining_s / speed)

            for row, found in enumerate((costs.within, costs.across)):
                assert len(found) == one.most_replicas + 1
                for count, cost in enumerate(found):
                    speed = table.speedup[row, count]
                    kept = stay_s(speed) / (stay_s(speed) + 30.0)
                    price = weight * (top - (speed * kept) ** 0.25)
                    assert cost == pytest.approx(price if speed > 0 or (row, count) == (0, 0) else math.inf)
            if not table.held:
                assert (costs.keep, costs.base) == (math.inf, ())
                continue
            speed = table.speedup[table.held_row, table.held]
            starting_s = max(one.job.running_from_s - now_s, 0.0)
            share = stay_s(speed) / (stay_s(speed) + starting_s) if stay_s(speed) else 0.0
            assert costs.keep == pytest.approx(weight * (top - (speed * share) ** 0.25))
            assert costs.base == one.job.allocation


@settings(max_examples=15)
@given(st.lists(st.sampled_from(["both", "quick", "only"]), min_size=1, max_size=3), st.integers(0, 1))
def test_ours_allocates_the_least_total_cost(kinds: list[str], types: int) -> None:
    """Every way to give the GPUs of a node or two out, tried one by one; what is given is never dearer."""
    cluster = (ClusterSpec.homogeneous(1, 3, "slow"), ClusterSpec(gpus=(2, 2), gpu_types=("slow", "fast")))[types]
    jobs = make_jobs(
        [submitted(str(n), 10.0 * n, kind) for n, kind in enumerate(kinds)], APPLICATIONS, Tuning.ADAPTIVE, cluster
    )
    for one in jobs:
        one.profile()
    policy, seen = Ours(), {}
    choices = policy._choices

    def noted(offer: JobSpeedups, *rest: Any) -> dict[str, JobCosts]:
        seen[offer.job.index] = (offer, rest, made := choices(offer, *rest))
        return made

    policy._choices = noted  # type: ignore[method-assign]
    for now_s, held_s in ((60.0, 120.0), (500.0, 440.0)):  # nobody came or went since the first round
        given_out = policy.allocate(jobs, cluster, now_s)
        assert {rest[1] for _, rest, _ in seen.values()} == {held_s}
    tables = [[made[name].within for name in made] for _, _, made in seen.values()]
    capacity = [cluster.gpus_of(name) for name in cluster.type_names]
    spent = 0.0
    for index, (_, _, made) in seen.items():
        place = given_out.get(index, ())
        spent += float(made[cluster.type_of(place) if place else next(iter(made))].within[count_gpus(place)])
    padded = [[*row, *[row[0][:1]] * (len(capacity) - len(row))] for row in tables]
    assert spent == pytest.approx(brute(padded, capacity), rel=2e-4)
    assert policy.allocate([], cluster, 600.0) == {}
    for most in (1, 3):  # pairs of a job and a node, above which a packing is taken as it is
        with mock.patch.multiple(ours, _MOST_IMPROVED_PAIRS=most, place_on_type=mock.Mock(return_value=[])):
            Ours().allocate(jobs, cluster, 60.0)
            for call in ours.place_on_type.call_args_list:  # type: ignore[attr-defined]
                assert call.kwargs["effort"] == (100 if len(call.args[0]) * len(cluster.gpus) <= most else 0)


def test_ours_keeps_an_allocation_when_a_restart_does_not_pay() -> None:
    cluster = ClusterSpec.homogeneous(1, 8, "slow")
    jobs = make_jobs([both("a", 0.0)], {"both": APPLICATIONS["both"]}, Tuning.ADAPTIVE, cluster, pooled=True)
    jobs[0].reallocate(((0, 7),), 0.0, 0.0)
    jobs[0].retune(0.0, False)
    jobs[0].advance(1.0)
    assert Ours(delay_s=0.0).allocate(jobs, cluster, 60.0)[0] == ((0, 8),)
    assert Ours(delay_s=600.0).allocate(jobs, cluster, 60.0)[0] == ((0, 7),)


def test_adaptive_policies_put_each_job_where_its_speed_is() -> None:
    # On fast GPUs "both" runs four times as fast, "quick" hardly faster: with a fast node and a slow one, both > quick.
    cluster = ClusterSpec(gpus=(4, 4), gpu_types=("slow", "fast"))
    jobs = [submitted("a", 0.0, "quick"), both("b", 0.0)]
    truth = {
        name: application(name, {"slow": g, "fast": f}, epochs=100, noise=100.0)
        for name, g, f in [("quick", 0.5, 0.45), ("both", 2.0, 0.5)]
    }
    for policy in (Sia(), Ours()):
        where: dict[int, Counter[str]] = {0: Counter(), 1: Counter()}

        class Watch:
            name, tuning, pools = policy.name, policy.tuning, getattr(policy, "pools", False)

            def allocate(
                self,
                jobs: Sequence[SimulatedJob],
                cluster: ClusterSpec,
                now_s: float,
                policy: Any = policy,
                where: Any = where,
            ) -> Any:
                made = policy.allocate(jobs, cluster, now_s)
                if len(jobs) == 2:
                    for index, allocation in made.items():
                        where[index][cluster.type_of(allocation)] += 1
                return made

        simulate(jobs, truth, cluster, Watch())
        assert where[0].most_common(1)[0][0] == "slow", policy.name
        assert where[1].most_common(1)[0][0] == "fast", policy.name


def test_a_job_is_profiled_on_one_gpu_of_each_type_before_it_runs() -> None:
    jobs = make_jobs([both("a", 0.0), submitted("b", 0.0, "only")], APPLICATIONS, Tuning.ADAPTIVE, TWO_TYPES)
    for one in jobs:
        assert one.goodput_table(2, "slow") is None
        one.profile()
    slow, fast = jobs[0].goodput_table(2, "slow"), jobs[0].goodput_table(2, "fast")
    assert slow is not None
    assert fast is not None
    assert fast[0, 1] / slow[0, 1] == pytest.approx(2.0 / 0.5, rel=0.05)
    assert jobs[0].most_replicas == 2
    assert jobs[1].goodput_table(2, "fast") is None
    alone = make_jobs([both("a", 0.0)], APPLICATIONS, Tuning.ADAPTIVE, ClusterSpec.homogeneous(1, 4, "slow"))[0]
    alone.profile()
    assert alone.goodput_table(2) is None


def test_sia_takes_powers_of_two_within_a_node_and_whole_nodes_beyond() -> None:
    counts: set[int] = set()

    class Watch(Sia):
        def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Any:
            made = super().allocate(jobs, cluster, now_s)
            counts.update(count_gpus(allocation) for allocation in made.values())
            return made

    truth = {"both": application("both", {"slow": 1.0}, epochs=60, noise=1e4)}
    simulate([both("a", 0.0), both("b", 0.0), both("c", 200.0)], truth, ClusterSpec.homogeneous(3, 4, "slow"), Watch())
    assert counts <= {1, 2, 4, 8, 12}
    assert max(counts) >= 8


@pytest.mark.parametrize("name", policies("all", mixed=True))
def test_equal_jobs_are_served_in_the_order_of_the_workload(name: str) -> None:
    jobs = [submitted(str(n), 0.0, "only", 2, 16) for n in range(6)]
    made = simulate(jobs, APPLICATIONS, ClusterSpec.homogeneous(1, 4, "slow"), EVERY[name]())
    again = simulate(
        [one.model_copy(update={"name": f"x{one.name}"}) for one in jobs],
        APPLICATIONS,
        ClusterSpec.homogeneous(1, 4, "slow"),
        EVERY[name](),
    )
    assert finishes(again) == finishes(made)  # names do not decide
    if made.policy in ("fifo", "tiresias", "srtf"):
        assert [one.start_s for one in made.jobs] == sorted(one.start_s for one in made.jobs)


# The claim, on data of others.


@pytest.mark.slow
@pytest.mark.parametrize(("number", "least", "tail"), [(1, 0.10, 1.0), (2, 0.10, 1.0), (3, 0.10, 1.03), (6, 0.10, 1.0)])
def test_ours_is_ahead_of_pollux_on_the_published_workloads(
    shared_data: Path, number: int, least: float, tail: float
) -> None:
    folder = shared_data / "pollux-osdi21"
    jobs = read_workload(folder / "workloads" / f"workload-{number}.csv")
    applications = read_applications([folder / "traces"], [one.application for one in jobs])
    cluster = ClusterSpec.homogeneous(16, 4)
    isolated = IsolatedTimes(applications, cluster)
    made = [summarize(simulate(jobs, applications, cluster, policy), isolated, 30.0) for policy in (Pollux(), Ours())]
    assert made[1].avg_jct_s <= (1 - least) * made[0].avg_jct_s
    assert made[1].p99_jct_s <= tail * made[0].p99_jct_s
    assert made[1].finish_time_fairness.max <= made[0].finish_time_fairness.max


def test_a_new_policy_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of docs/first-change.md, put into a folder that is looked through as the package's own is."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "first-change.md").read_text()
    (tmp_path / "newest.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.setattr(policies_package, "__path__", [*policies_package.__path__, str(tmp_path)])
    monkeypatch.setattr(policies_package, "POLICIES", policies_package._found())
    cluster = ClusterSpec.homogeneous(1, 1, "slow")
    make = policies("newest")["newest"]
    made = simulate([both("a", 0.0), both("b", 1.0), both("c", 2.0)], APPLICATIONS, cluster, make())
    assert sorted(made.jobs, key=lambda one: one.start_s)[0].name == "c"
