"""Other people's trainers, run whole: alone with whole batches, and on two ranks with uneven ones.

A module of cells has ``CELLS``, functions by name that train in a :class:`Run` and return what was trained, and ``REFUSED``:
such functions with the line (a pattern) that ends them on two ranks.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ddltool.artifacts import save
from tests.helpers.processes import as_job
from tests.helpers.runtime_workers import enforcement

SIZES = (12, 20)
TOTAL = sum(SIZES)
SAMPLES, WIDTH = 3 * TOTAL + 9, 5
TOLERANCE = 1e-6


class Run:
    """The process in which a cell runs: alone, or a rank that finds its plan in the folder."""

    def __init__(self, alone: bool, folder: Path, rank: int) -> None:
        self.alone, self.folder = alone, folder
        self.file = folder / f"enforce.{rank}.json"  # some cells change their rank's own
        self.starts: list[Tensor] = []
        self.losses: list[float] = []
        save(enforcement(SIZES, telemetry=str(folder / "rows.jsonl")), self.file)

    @property
    def plan(self) -> str | None:
        return None if self.alone else str(self.file)

    def begins(self, values: Iterable[Tensor]) -> None:
        """Note what the parameters are before training."""
        self.starts = self.starts or copies(values)


Cell = Callable[[Run], Iterable[Tensor]]


class Points(Dataset[dict[str, Tensor]]):
    """Points with one label each."""

    def __init__(self, samples: int = SAMPLES, classes: int = 3) -> None:
        self.classes = classes
        self.points = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        self.points *= torch.linspace(0.3, 2.0, samples, dtype=torch.float64)[:, None]

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"points": self.points[index], "labels": torch.tensor(index * 5 % self.classes)}


class Stream(IterableDataset[Any]):
    """The samples of a dataset, one after the other."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[index] for index in range(len(self.dataset)))


def copies(values: Iterable[Tensor]) -> list[Tensor]:
    return [value.detach().clone() for value in values]


def every_cell(rank: int, alone: bool, target: str, module: str) -> None:
    """Save, for each cell, the parameters and the losses that were logged; or what it raised."""
    torch.set_num_threads(1)
    cells: Mapping[str, Cell] = import_module(module).CELLS
    refused: Mapping[str, tuple[Cell, str]] = {} if alone else import_module(module).REFUSED
    outcomes: dict[str, Any] = {}
    for name, cell in {**cells, **{name: cell for name, (cell, _) in refused.items()}}.items():
        torch.manual_seed(1)
        folder = Path(target).parent / f"{name}-{alone}"
        folder.mkdir(exist_ok=True)
        run = Run(alone, folder, rank)
        try:
            ends = copies(cell(run))
        except BaseException:
            outcomes[name] = traceback.format_exc()
            continue
        outcomes[name] = {"starts": run.starts, "ends": ends, "losses": run.losses}
    torch.save(outcomes, f"{target}.{rank}")


def failures(module: str, folder: Path) -> dict[str, str]:
    """Return what is wrong with each cell of a module: nothing, where two uneven ranks are one process, or are refused."""
    for ranks, alone in ((1, True), (2, False)):
        ended = as_job(ranks, folder, every_cell, alone, str(folder / f"outcomes-{alone}"), module)
        assert not any(code for code, _, _ in ended), ended[0][2][-3000:]
    whole = torch.load(folder / "outcomes-True.0")
    wrong: dict[str, str] = {}
    for number in range(2):
        rank = torch.load(folder / f"outcomes-False.{number}")
        for name, alone in whole.items():
            wrong[f"{name} on rank {number}"] = difference(alone, rank[name])
        for name, (_, line) in import_module(module).REFUSED.items():
            last = rank[name].strip().splitlines()[-1] if isinstance(rank[name], str) else "not refused"
            wrong[f"{name} on rank {number}"] = "" if re.match(rf"ddltool\.errors\.InputError: {line}", last) else last
    return {name: what for name, what in wrong.items() if what}


def difference(alone: Any, rank: Any) -> str:
    """Return in what a rank's parameters, or the losses that it logs, are not those of one process; "": in nothing."""
    if isinstance(alone, str) or isinstance(rank, str):
        return f"raised {alone if isinstance(alone, str) else rank}"
    moved = max(float((end - start).abs().max()) for end, start in zip(alone["ends"], alone["starts"], strict=True))
    far = max(float((one - two).abs().max()) for one, two in zip(alone["ends"], rank["ends"], strict=True))
    if moved <= 0.01 or far >= TOLERANCE * moved:
        return f"off by {far:.2g}, moved by {moved:.2g}"
    return "" if rank["losses"] == pytest.approx(alone["losses"], rel=1e-5) else f"losses {rank['losses']}"
