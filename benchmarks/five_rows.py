"""What five measured rows of a GPU are worth: it is left out of the fit, calibrated by five of its rows, judged by the others.

    python benchmarks/five_rows.py --data ../shared/data --cache DIR

DIR keeps the traces that `calibrate.py` made; rows of models that it lacks are left out. Minutes. Start at :func:`judged`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from calibrate import PRIOR, Cell, cells_of, chip, table_of
from truth_cases import SOURCES, read
from truth_models import Trace, traced

from ddltool.analyzers.step.costs.fitting import OWN, Belief, fit, prior_of, refit, steps_s
from ddltool.analyzers.step.costs.model import cost_model
from ddltool.calibration import CalibrationTable
from ddltool.shipped import devices

ROWS, DRAWS = 5, 20
# Fewer rows beside the five judge nothing.
_LEAST = 9


@dataclass(frozen=True, kw_only=True)
class Judged:
    """|predicted / measured - 1| of rows of one GPU from one source, that neither fit had seen."""

    name: str
    before: np.ndarray
    after: np.ndarray
    other_model: np.ndarray
    """Whether the row is of a model that is not among the five."""


def judged(cells: Sequence[Cell], whole: Belief, *, rows: int = ROWS, seed: int = 0) -> Iterator[Judged]:
    """Yield, for each GPU and source, its rows as predicted without its chip, and after any ``rows`` of them, drawn often."""
    random = np.random.default_rng(seed)
    priors: dict[str, CalibrationTable] = {}
    mine: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        # Other sources' software adds to a step; timm's rows are of two GPUs, and tell of most layers alone.
        if not SOURCES[cell.row.source].adds and not cell.row.source.startswith("timm"):
            mine[cell.row.device, cell.row.source].append(cell)
    for (device, source), own in sorted(mine.items()):
        if len(own) < _LEAST:
            continue
        name = chip(device)
        if name not in priors:
            others = [cell.case for cell in cells if chip(cell.row.device) != name]
            priors[name] = table_of(fit(others, PRIOR, first=whole, rounds=12))
        prior = prior_of(cost_model(devices().device(device), priors[name]))
        cases = [replace(cell.case, generation=OWN, weight=1.0, error=0.1, setting="") for cell in own]
        measured = np.array([case.measured_s for case in cases])
        models = np.array([cell.row.model for cell in own])
        before, after, other = [], [], []
        for _ in range(DRAWS):
            seen = random.permutation(len(own)) < rows
            belief = refit([case for case, is_seen in zip(cases, seen, strict=True) if is_seen], prior)
            for kept, known in ((before, prior), (after, belief)):
                kept.append(np.abs(steps_s(cases, known) / measured - 1)[~seen])
            other.append(~np.isin(models, models[seen])[~seen])
        parts = {"before": before, "after": after, "other_model": other}
        yield Judged(name=f"{device}, {source}", **{key: np.concatenate(each) for key, each in parts.items()})


def main() -> None:
    """Print the median errors before and after, by GPU and for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds truth and sia-sosp23")
    parser.add_argument("--cache", type=Path, required=True, help="folder that keeps the traces")
    given = parser.parse_args()
    truth = read(given.data)
    wanted: dict[Trace, set[int]] = defaultdict(set)
    for row in truth.rows:
        if (path := given.cache / row.trace.file).exists() and row.batch in np.load(path)["batches"]:
            wanted[row.trace].add(row.batch)
    truth.rows = [row for row in truth.rows if row.batch in wanted.get(row.trace, ())]
    cells = cells_of(truth, traced(wanted, given.cache))
    whole = fit([cell.case for cell in cells], PRIOR)
    found = list(judged(cells, whole))
    print(
        f"| GPU left out, source | rows judged | median error before | after {ROWS} rows | ratio | of models not among them |"
    )
    for each in [*found, joined(found)]:
        before, after = np.median(each.before), np.median(each.after)
        other = [float(np.median(errors[each.other_model])) for errors in (each.before, each.after)]
        print(
            f"| {each.name} | {len(each.before) // DRAWS} | {before:.1%} | {after:.1%} | {after / before:.2f} | "
            f"{other[0]:.1%} to {other[1]:.1%} |"
        )


def joined(parts: Sequence[Judged]) -> Judged:
    """Return all of them together."""
    fields = ("before", "after", "other_model")
    return Judged(name="all", **{name: np.concatenate([getattr(part, name) for part in parts]) for name in fields})


if __name__ == "__main__":
    main()
