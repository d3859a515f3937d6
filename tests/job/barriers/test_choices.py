"""Every figure of ``ddltool barrier`` against all choices of one end per worker, in exact fractions from the file's digits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Result, write, write_lines

Cli = Callable[..., Result]
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


def random_ends(chance: random.Random, workers: int, iterations: int) -> Ends:
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
    ends = random_ends(chance, chance.randint(1, 4), chance.randint(1, 5))
    max_gap = chance.choice((None, 0, 1, 2))
    options = [] if max_gap is None else ["--max-gap", str(max_gap)]
    result = cli("barrier", saved(tmp_path / "times.csv", ends, chance), "--predicted", *options, "--json")
    assert result.code == 0, result.err
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
                rows.append({"rank": worker, "step": number, "step_s": float(alone + wait), "wait_s": float(wait)})
            step = predicted(lengths, predictor)
            ends[str(worker)] = [step * place for place in range(1, lookahead + 1)]
        write_lines(path, rows)
    options = ["--lookahead", str(lookahead), "--predictor", predictor]
    result = cli("barrier", path, *options, "--json")
    assert result.code == 0, result.err
    check_document(result.document, ends, None)
