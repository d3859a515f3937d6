"""Other people's trainers, run whole: alone with whole batches, and on two ranks with uneven ones.

A module of cells has ``CELLS``, functions by name that train in a :class:`Run` and return what was trained.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddltool.artifacts import save
from tests.processes import as_job
from tests.runtime_workers import enforcement

SIZES = (12, 20)
TOTAL = sum(SIZES)
TOLERANCE = 1e-6
Found = tuple[dict[str, Any], list[dict[str, Any]]]


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


def copies(values: Iterable[Tensor]) -> list[Tensor]:
    return [value.detach().clone() for value in values]


def every_cell(rank: int, alone: bool, target: str, module: str, names: tuple[str, ...]) -> None:
    """Save, for each cell, the parameters and the losses that were logged; or what it raised."""
    torch.set_num_threads(1)
    cells: dict[str, Callable[[Run], Iterable[Tensor]]] = import_module(module).CELLS
    found: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(1)
        folder = Path(target).parent / f"{name}-{alone}"
        folder.mkdir(exist_ok=True)
        run = Run(alone, folder, rank)
        try:
            ends = copies(cells[name](run))
        except BaseException:
            found[name] = traceback.format_exc()
            continue
        found[name] = {"starts": run.starts, "ends": ends, "losses": run.losses}
    torch.save(found, f"{target}.{rank}")


def found_in(
    module: str, cells: Iterable[str], refused: Iterable[str], factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what came out alone, and of both ranks."""
    answers = []
    for ranks, alone, names in ((1, True, tuple(cells)), (2, False, (*cells, *refused))):
        folder = factory.mktemp("cells")
        ended = as_job(ranks, folder, every_cell, alone, str(folder / "found"), module, names)
        assert not any(code for code, _, _ in ended), ended[0][2][-3000:]
        answers += [torch.load(folder / f"found.{rank}") for rank in range(ranks)]
    return answers[0], answers[1:]


def assert_alike(found: Found, name: str) -> None:
    """The ranks' parameters, and the losses that they log, are those of one process."""
    alone = found[0][name]
    assert isinstance(alone, dict), alone
    for rank in (each[name] for each in found[1]):
        assert isinstance(rank, dict), rank
        both = list(zip(alone["ends"], rank["ends"], strict=True))
        moved = max(float((end - start).abs().max()) for (end, _), start in zip(both, alone["starts"], strict=True))
        assert moved > 0.01
        assert max(float((one - two).abs().max()) for one, two in both) < TOLERANCE * moved
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def assert_refused(found: Found, name: str, line: str) -> None:
    for rank in found[1]:
        assert isinstance(rank[name], str), "not refused"
        assert rank[name].strip().splitlines()[-1].startswith(f"ddltool.errors.InputError: {line}"), rank[name]
