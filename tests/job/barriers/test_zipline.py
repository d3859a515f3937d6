"""Barriers against brute force, against other algorithms for the same problem, and against the published lists.
Every figure of ``ddltool barrier`` against all choices of one end per worker, in exact fractions from the file's digits.
What ``plan --strategy auto`` says of ElasticBSP's transfers: those of the devices that take part, and of no others.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.job.barriers.ends import EndTimes, bsp
from ddltool.analyzers.job.barriers.predict import PREDICTORS, ema, predict_ends
from ddltool.analyzers.job.barriers.tradeoff import OBJECTIVES, best_barrier, tradeoff
from ddltool.analyzers.job.barriers.zipline import full_gridscan, gridscan, zipline
from ddltool.analyzers.job.placement.problem import Problem, from_job
from ddltool.analyzers.job.planning.candidates import Candidate, Candidates
from ddltool.analyzers.job.planning.exposed import Communication, Exposed
from ddltool.analyzers.job.planning.job_model import JobModel
from ddltool.analyzers.job.planning.superstep import DEFAULT_LOOKAHEAD, best_superstep
from ddltool.errors import InputError
from ddltool.job import Job
from tests.conftest import Cli, write, write_lines

ROOT = Path(__file__).resolve().parents[3]
Rows = list[list[int]]
# Few distinct whole numbers: many ties, within a worker too, and exact arithmetic.
ROWS: st.SearchStrategy[Rows] = st.lists(
    st.lists(st.integers(0, 12), min_size=1, max_size=4).map(sorted), min_size=1, max_size=4
)


def benchmark_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


published = benchmark_module("published_barriers")


def random_ends(workers: int, lookahead: int, seed: int, *, whole: bool = False) -> np.ndarray:
    chance = np.random.default_rng(seed)
    lengths = chance.uniform(1, 4, (workers, 1)) * chance.uniform(0.9, 1.1, (workers, lookahead))
    ends = np.cumsum(lengths, axis=1)
    return np.floor(ends * 4) if whole else ends


def choices(rows: Rows) -> list[tuple[int, ...]]:
    """Every way to choose one place per worker."""
    return list(itertools.product(*(range(len(row)) for row in rows)))


def brute_force(rows: Rows) -> tuple[int, int]:
    """The least waiting, and the earliest barrier that has it."""
    picked = ([row[place] for row, place in zip(rows, choice, strict=True)] for choice in choices(rows))
    return min((max(ends) - min(ends), max(ends)) for ends in picked)


@settings(max_examples=80)
@given(rows=ROWS)
def test_zipline_is_the_optimum_and_the_first_of_several(rows: Rows) -> None:
    barrier = zipline([np.array(row, dtype=float) for row in rows])
    assert (barrier.waiting_time_s, barrier.barrier_s) == brute_force(rows)
    for row, count, chosen in zip(rows, barrier.iterations, barrier.chosen_s, strict=True):
        assert count == sum(end <= barrier.barrier_s for end in row)  # each worker's latest end up to the barrier
        assert chosen == row[count - 1]


@given(rows=ROWS, scale=st.sampled_from([10, 7, 1000]), start=st.sampled_from([0, 86_400, 1_700_000_000]))
def test_decimals_that_floats_cannot_hold_do_not_decide_ties(rows: Rows, scale: int, start: int) -> None:
    """0.3 - 0.2 is less than 0.2 - 0.1 in floats; the first of equals must win all the same."""
    waiting, earliest = brute_force(rows)
    barrier = zipline([[start + end / scale for end in row] for row in rows])
    assert barrier.barrier_s == start + earliest / scale
    assert barrier.waiting_time_s == pytest.approx(waiting / scale, abs=1e-6 if start else 1e-12)


def test_of_two_equal_minima_the_first_is_chosen() -> None:
    """The situation of the paper's Figure 3."""
    rows = [[1.0, 5.0, 9.0, 13.0], [3.0, 6.0, 11.0, 14.0], [2.0, 7.0, 10.0, 15.0]]
    assert max(row[0] for row in rows) == 3.0
    barrier = zipline(rows)  # waits 2 with (1, 3, 2), (5, 6, 7), (9, 11, 10) and (13, 14, 15)
    assert (barrier.waiting_time_s, barrier.barrier_s, barrier.iterations.tolist()) == (2.0, 3.0, [1, 1, 1])
    assert barrier.total_waiting_s == 3.0
    assert barrier.iteration_gap == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("whole", [False, True])
def test_larger_problems_agree_with_the_published_lists(seed: int, whole: bool) -> None:
    ends = random_ends(5 + 20 * seed, 40, seed, whole=whole)
    barrier = zipline(ends)
    waiting, chosen = published.zipline(ends.tolist())
    assert barrier.waiting_time_s == waiting
    assert barrier.barrier_s == max(chosen)[0]
    assert barrier.waiting_time_s <= full_gridscan(ends).waiting_time_s <= gridscan(ends).waiting_time_s
    assert barrier.waiting_time_s <= bsp(ends).waiting_time_s


@pytest.mark.parametrize("seed", range(8))
def test_grid_scans_find_what_the_published_loops_find(seed: int) -> None:
    ends = random_ends(4 + 4 * seed, 20, seed, whole=seed % 2 == 1)
    ends[0] = np.concatenate(([ends.min() - 1], ends[0, :-1]))  # one worker alone is the earliest
    for ours, theirs in ((gridscan(ends), published.gridscan(ends.tolist())), (full_gridscan(ends), None)):
        waiting, chosen = theirs if theirs is not None else published.full_gridscan(ends.tolist())
        assert ours.waiting_time_s == waiting
        if theirs is not None:
            assert [count for _, _, count in sorted(chosen, key=lambda item: item[1])] == ours.iterations.tolist()


def test_of_workers_that_begin_at_once_the_scan_takes_the_one_that_goes_on_first() -> None:
    """In both orders the pivots are 0 and 5, near which the ends wait 10 s; the pivot 13 of the other would leave 8 s."""
    rows = [[0.0, 5.0], [0.0, 13.0], [10.0, 13.0]]
    assert [gridscan([rows[at] for at in order]).waiting_time_s for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0])] == [
        10.0
    ] * 3


def test_grid_scans_are_heuristics() -> None:
    """Where ZipLine is strictly better, so the comparison above is not vacuous."""
    found = [
        seed
        for seed in range(50)
        if zipline(random_ends(8, 10, seed)).waiting_time_s < gridscan(random_ends(8, 10, seed)).waiting_time_s
    ]
    assert len(found) > 10
    rows = [[0.0, 10.0], [4.0, 14.0], [7.0, 17.0]]
    assert full_gridscan(rows).waiting_time_s >= zipline(rows).waiting_time_s == 6.0


@given(rows=ROWS, chance=st.randoms(use_true_random=False))
def test_the_order_of_the_workers_does_not_matter(rows: Rows, chance: np.random.Generator) -> None:
    order = list(range(len(rows)))
    chance.shuffle(order)  # type: ignore[arg-type]
    mixed = [rows[worker] for worker in order]
    for choose in (zipline, gridscan, full_gridscan, best_barrier):
        straight, other = choose(rows), choose(mixed)
        assert other.barrier_s == straight.barrier_s
        assert other.iterations.tolist() == straight.iterations[order].tolist()


def cost(rows: Rows, choice: tuple[int, ...], objective: str) -> tuple[Fraction, int]:
    """The exact objective of one choice, and its barrier."""
    ends = [row[place] for row, place in zip(rows, choice, strict=True)]
    barrier = max(ends)
    if objective == "waiting":
        return Fraction(barrier - min(ends)), barrier
    total = sum(barrier - end for end in ends)
    made = sum(place + 1 for place in choice) if objective == "per_iteration" else 1
    return Fraction(total, made), barrier


@settings(max_examples=80)
@given(rows=ROWS, gap=st.sampled_from([None, 0, 1, 2, 3]))
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_bounded_barriers_are_optimal(objective: str, rows: Rows, gap: int | None) -> None:
    allowed = [choice for choice in choices(rows) if gap is None or max(choice) - min(choice) <= gap]
    best = min(cost(rows, choice, objective) for choice in allowed)
    barrier = best_barrier(rows, objective=objective, max_gap=gap)  # type: ignore[arg-type]
    found = tuple(int(count) - 1 for count in barrier.iterations)
    assert gap is None or barrier.iteration_gap <= gap
    assert cost(rows, found, objective) == best
    assert barrier.barrier_s == best[1]


def test_the_tradeoff_falls_to_the_unbounded_optimum() -> None:
    ends = random_ends(12, 15, 3)
    curve = tradeoff(ends)
    assert list(curve) == list(range(len(curve)))
    assert len(curve) > 3
    figures = {
        "waiting": [best["waiting"].waiting_time_s for best in curve.values()],
        "total": [best["total"].total_waiting_s for best in curve.values()],
        "per_iteration": [best["per_iteration"].waiting_per_iteration_s for best in curve.values()],
    }
    for values in figures.values():
        assert values == sorted(values, reverse=True)
        assert values[0] > values[-1]
    assert curve[len(curve) - 1]["waiting"].waiting_time_s == zipline(ends).waiting_time_s
    assert curve[len(curve) - 1]["total"].total_waiting_s == best_barrier(ends).total_waiting_s
    assert best_barrier(ends).total_waiting_s < zipline(ends).total_waiting_s  # a different question, another answer


def test_totals_stay_exact_on_clocks_that_began_long_ago() -> None:
    grid = 2**20  # finer than this floats near 1.7e9 cannot tell
    ends = np.floor(random_ends(200, 30, 0) / 100 * grid) / grid
    least = best_barrier(ends).total_waiting_s
    assert least <= best_barrier(ends + 1_700_000_000).total_waiting_s <= least * 1.001


def test_predictors_follow_their_definitions() -> None:
    chance = np.random.default_rng(0)
    for size in (1, 2, 7, 400):
        lengths = chance.uniform(1, 3, size)
        average = lengths[0]
        for length in lengths[1:]:
            average = 0.2 * length + 0.8 * average
        assert ema(lengths, 3) == pytest.approx(average, rel=1e-12)
        assert PREDICTORS["last"](lengths, 3) == lengths[-1]
        assert PREDICTORS["mean"](lengths, 3) == pytest.approx(lengths[-10:].mean())


def test_predictions_of_steady_workers_are_their_future() -> None:
    lengths = [np.full(5, 2.0), np.full(9, 0.5)]
    for predictor in PREDICTORS.values():
        ends = predict_ends(lengths, [10.0, 4.5], 4, predictor)
        assert ends == pytest.approx(np.array([[12.0, 14.0, 16.0, 18.0], [5.0, 5.5, 6.0, 6.5]]))


def test_a_predictor_of_ones_own_is_used() -> None:
    ends = predict_ends([np.ones(2)], [0.0], 3, lambda lengths, lookahead: np.arange(1, lookahead + 1) * lengths[-1])
    assert ends.tolist() == [[1.0, 3.0, 6.0]]
    with pytest.raises(InputError, match=r"worker w7: its predictor returned shape \(2,\); expected \(3,\)"):
        predict_ends([np.ones(2)], [0.0], 3, lambda lengths, lookahead: np.ones(2), ["w7"])
    with pytest.raises(InputError, match=r"worker 0: .* take -1 s; iteration lengths must be above zero"):
        predict_ends([np.ones(2)], [0.0], 3, lambda lengths, lookahead: -1.0)


@pytest.mark.parametrize(
    ("times", "line"),
    [
        ([], "times: holds no workers"),
        ([[1.0], []], r"times\[1\]: holds no iteration ends"),
        ([[1.0], [2.0, float("nan")]], r"times\[1\]\[1\]: is not finite"),
        ([[1.0, 2.0], [2.0, 3.0, 2.5]], r"times\[1\]\[2\]: goes backwards"),
    ],
)
def test_unusable_ends_are_named(times: list[list[float]], line: str) -> None:
    for choose in (zipline, gridscan, full_gridscan, best_barrier):
        with pytest.raises(InputError, match=line):
            choose(times)


def test_a_later_worker_may_begin_earlier() -> None:
    """Descending across workers is no fault."""
    assert EndTimes.of([[5.0, 6.0], [1.0, 2.0]]).workers == 2


def test_an_unusable_bound_is_told() -> None:
    with pytest.raises(InputError, match="max_gap: is -1"):
        best_barrier([[1.0]], max_gap=-1)


def test_the_shipped_example_is_what_the_generator_makes() -> None:
    shipped = (ROOT / "fixtures" / "barrier" / "times.csv").read_text(encoding="utf-8")
    assert shipped == benchmark_module("bench_barriers").example()
    assert all(line.endswith(",synthetic") for line in shipped.splitlines()[1:])


Ends = dict[str, list[Fraction]]
Record = dict[str, Any]
ALPHA = Fraction(1, 5)


class Choice:
    """One end per worker, by its number from 1, and what the choice comes to."""

    def __init__(self, ends: Ends, counts: tuple[int, ...]) -> None:
        chosen = {name: row[count - 1] for (name, row), count in zip(ends.items(), counts, strict=True)}
        self.counts = counts
        self.barrier = max(chosen.values())
        self.waiting = self.barrier - min(chosen.values())
        self.total = sum((self.barrier - end for end in chosen.values()), Fraction(0))
        self.gap = max(counts) - min(counts)

    def value(self, objective: str) -> Fraction:
        """Return what the objective minimises."""
        return {"waiting": self.waiting, "total": self.total, "per_iteration": self.total / sum(self.counts)}[objective]


def best(choices: Iterable[Choice], objective: str) -> Choice:
    """Return the least, of these the earliest, of these the one with most iterations."""
    return min(choices, key=lambda each: (each.value(objective), each.barrier, -sum(each.counts)))


def check(record: Record, expected: Choice) -> None:
    """Compare all figures of a record."""
    figures = {
        "waiting_time_s": expected.waiting,
        "barrier_s": expected.barrier,
        "total_waiting_s": expected.total,
        "waiting_per_iteration_s": expected.total / sum(expected.counts),
    }
    for name, value in figures.items():
        assert record[name] == pytest.approx(float(value), rel=1e-9, abs=1e-9), name
    assert record["iteration_gap"] == expected.gap
    if "iterations" in record:
        assert tuple(record["iterations"].values()) == expected.counts


def check_document(document: Record, ends: Ends, max_gap: int | None) -> None:
    every = [Choice(ends, counts) for counts in itertools.product(*(range(1, len(row) + 1) for row in ends.values()))]
    check(document["algorithms"]["zipline"], best(every, "waiting"))
    check(document["bsp"], next(each for each in every if set(each.counts) == {1}))

    def bounded(gap: int | None) -> list[Choice]:
        return [each for each in every if gap is None or each.gap <= gap]

    for objective, record in document["objectives"].items():
        check(record, best(bounded(max_gap), objective))
    for point in document["tradeoff"]:
        for objective in ("waiting", "total", "per_iteration"):
            check(point[objective], best(bounded(point["max_gap"]), objective))
    # The curve begins at a gap of 0 and ends where the last of the objectives has come to its optimum.
    gaps = [point["max_gap"] for point in document["tradeoff"]]
    assert gaps == list(range(len(gaps)))
    assert gaps[-1] == max(best(every, objective).gap for objective in ("waiting", "total", "per_iteration"))


def ends_of_choices(chance: random.Random, workers: int, iterations: int) -> Ends:
    """Return ends in tenths or thousandths of a second, or near 1e9 (a clock that began long ago), with many ties."""
    unit = Fraction(1, chance.choice((1, 10, 1000)))
    origin = chance.choice((0, 0, 10**6, -50))
    longest = chance.choice((3, 30, 3000))
    ends = {}
    for worker in range(workers):
        at = Fraction(origin)
        row = []
        for _ in range(iterations):
            at += chance.randint(1, longest) * unit
            row.append(at)
        ends[f"w{worker}"] = row
    return ends


def saved(path: Path, ends: Ends, chance: random.Random) -> Path:
    rows = [f"{name},{place},{float(end)!r}" for name, row in ends.items() for place, end in enumerate(row, start=1)]
    chance.shuffle(rows)
    return write(path, "worker,iteration,end_s", *rows)


@pytest.mark.parametrize("seed", range(60))
def test_barriers_of_given_predictions(cli: Cli, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    ends = ends_of_choices(chance, chance.randint(1, 4), chance.randint(1, 5))
    max_gap = chance.choice((None, 0, 1, 2))
    options = [] if max_gap is None else ["--max-gap", str(max_gap)]
    result = cli("barrier", saved(tmp_path / "times.csv", ends, chance), "--predicted", *options, "--json").done()
    check_document(result.document, ends, max_gap)


def predicted(lengths: list[Fraction], predictor: str) -> Fraction:
    """Return the next iteration's length as the predictor's definition has it."""
    if predictor == "last":
        return lengths[-1]
    if predictor == "mean":
        return sum(lengths[-10:], Fraction(0)) / len(lengths[-10:])
    smooth = lengths[0]
    for length in lengths[1:]:
        smooth = ALPHA * length + (1 - ALPHA) * smooth
    return smooth


@pytest.mark.parametrize("seed", range(30))
def test_barriers_of_recorded_ends(cli: Cli, tmp_path: Path, seed: int) -> None:
    """Predicted by hand from recorded ends or from telemetry; lengths that no two workers' sums share."""
    chance = random.Random(1000 + seed)
    workers, lookahead = chance.randint(1, 4), chance.randint(1, 5)
    predictor = chance.choice(("last", "ema", "mean"))
    ends: Ends = {}
    if seed % 3:
        recorded = {}
        for worker in range(workers):
            at, row = Fraction(chance.randint(0, 10**4), 1000), []
            for _ in range(chance.randint(2, 15)):
                at += Fraction(chance.randint(100, 9999), 1000)
                row.append(at)
            recorded[f"w{worker}"] = row
            lengths = [later - earlier for earlier, later in itertools.pairwise(row)]
            step = predicted(lengths, predictor)
            ends[f"w{worker}"] = [at + step * place for place in range(1, lookahead + 1)]
        path = saved(tmp_path / "times.csv", recorded, chance)
    else:
        path = tmp_path / "telemetry.jsonl"
        rows = []
        for worker in range(workers):
            lengths = []
            for number in range(chance.randint(1, 12)):
                alone, wait = Fraction(chance.randint(100, 9999), 1000), Fraction(chance.randint(0, 500), 1000)
                lengths.append(alone)
                times = {"step_s": float(alone + wait), "wait_s": float(wait), "compute_s": float(alone), "sync_s": 0.0}
                place = {"rank": worker, "world_size": workers, "num_nodes": 1, "device": "cpu", "memory_bytes": 0}
                rows.append({"step": number, **place, "batch": 1, "total_batch": workers, **times})
            step = predicted(lengths, predictor)
            ends[str(worker)] = [step * place for place in range(1, lookahead + 1)]
        write_lines(path, rows)
    options = ["--lookahead", str(lookahead), "--predictor", predictor]
    result = cli("barrier", path, *options, "--json").done()
    check_document(result.document, ends, None)


class Shared(Communication):
    """One link for all: each device more adds its time to everybody's iteration."""

    source = "a shared link"

    def __init__(self, each_s: float) -> None:
        self.each_s = each_s

    def synchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        return self.asynchronous(devices, pass_s)

    def asynchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        assert all(count >= 0 for count in devices.values())
        seconds = self.each_s * sum(devices.values())
        return Exposed(default_s=seconds, best_s=seconds, setting="as it comes")


def elastic(
    offers: Mapping[str, tuple[int, float]], each_s: float, workers: int = 16, **constraints: object
) -> tuple[Candidate, Problem]:
    listed = [{"type": name, "count": count, "capability_per_s": rate} for name, (count, rate) in offers.items()]
    made = Job.model_validate({"name": "test", "max_workers": workers, "devices": listed, "constraints": constraints})
    problem = from_job(made, {name: rate for name, (_, rate) in offers.items()})
    knowledge = JobModel(communication=Shared(each_s))
    left_out: dict[str, str] = {}
    found = Candidates(job=made, model=knowledge).of(problem, left_out, "elastic-bsp")
    return found[0], problem


def rate_of(offers: Mapping[str, tuple[int, float]], devices: Mapping[str, int], each_s: float) -> float:
    """Return mini-batches per second of the best superstep of exactly these devices, slowed by each other."""
    transfer = Fraction(each_s * sum(devices.values()))
    speeds = [(1 / (1 / Fraction(repr(offers[name][1])) + transfer), count) for name, count in devices.items()]
    barrier, iterations = best_superstep(speeds, DEFAULT_LOOKAHEAD)
    return float(sum(k * count for k, (_, count) in zip(iterations, speeds, strict=True)) / barrier)


def test_devices_that_stay_out_slow_nobody() -> None:
    """The slow ones make no iteration within the lookahead of the fast ones; only those share the link."""
    offers = {"fast": (3, 4.0), "slow": (8, 0.004)}
    made, _ = elastic(offers, 0.05)
    assert made.option.devices == {"fast": 3}
    assert made.option.throughput == pytest.approx(3 / (0.25 + 3 * 0.05))
    assert made.plan.superstep is not None
    assert made.plan.superstep.left_out == {"slow": 8}
    assert made.plan.status == "optimal"


def test_one_type_only_has_the_link_to_itself() -> None:
    """Behind the transfers of all twelve, the ten slow ones would look better; they come to 3.3 a second."""
    made, _ = elastic({"fast": (2, 4.0), "slow": (10, 0.5)}, 0.1, homogeneous=True)
    assert made.option.devices == {"fast": 2}
    assert made.option.throughput == pytest.approx(2 / (0.25 + 0.2))


@given(
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0.01, 0.5, 1.0, 2.5, 4.0, 10.0])), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.003, 0.05, 1.0]),
    st.integers(1, 12),
)
def test_the_figure_is_that_of_the_chosen_devices(shapes: list[tuple[int, float]], each_s: float, workers: int) -> None:
    offers = {f"T{place}": shape for place, shape in enumerate(shapes)}
    made, problem = elastic(offers, each_s, workers)
    option = made.option
    assert sum(option.devices.values()) <= workers
    assert option.throughput == pytest.approx(rate_of(offers, option.devices, each_s), rel=1e-9)
    assert option.iteration_s == pytest.approx(problem.max_workers / option.throughput, rel=1e-9)
    assert option.communication_s is not None
    assert option.communication_s >= -1e-12
