"""What an earlier run's telemetry says about the devices: the closed loop. Start at :func:`read_run`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddltool.analyzers.goodput.observations import WARMUP_STEPS
from ddltool.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

# No clock of the hook tells less.
_SHORTEST_S = 1e-9
_NEEDED = ("step", "rank", "world_size", "num_nodes", "device", "batch", "compute_s", "wait_s", "sync_s", "step_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRun:
    """One process's steady steps: medians, and half the interquartile range of compute as its relative error."""

    rank: int
    device: str
    batch: int
    steps: int
    compute_s: float
    wait_s: float
    sync_s: float
    step_s: float
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All processes of one run."""

    world_size: int
    num_nodes: int
    ranks: tuple[RankRun, ...]
    iteration_s: float
    """Median over the steps of the time from update to update, the slowest rank's."""
    iteration_low_s: float
    """The quartiles of the same."""
    iteration_high_s: float
    sync_s: float
    """Median over the steps of the shortest synchronisation of any rank: none waits in that."""

    def capabilities(self, batch_size: int) -> dict[str, float]:
        """Return mini-batches of ``batch_size`` samples per second of one device, by device type: the median rank's."""
        found: dict[str, list[float]] = {}
        for rank in self.ranks:
            found.setdefault(rank.device, []).append(rank.batch / rank.compute_s / batch_size)
        return {device: float(np.median(rates)) for device, rates in found.items()}

    def errors(self) -> dict[str, float]:
        """Return the largest relative error of compute times, by device type."""
        found: dict[str, float] = {}
        for rank in self.ranks:
            found[rank.device] = max(found.get(rank.device, 0.0), rank.error)
        return found


def read_run(frame: pd.DataFrame, where: str) -> Run:
    """Return the last run of a telemetry table, warm-up steps left out (the first ``WARMUP_STEPS`` of longer runs).

    Several runs append to one file: a step number that falls back begins the next. Raises InputError for missing
    columns, values that are no times, or a run without samples.
    """
    import pandas as pd

    for name in _NEEDED:
        if name not in frame.columns:
            raise InputError(where, f"has no column {name!r}", "give the telemetry.jsonl that the hook wrote")
    numeric = [name for name in _NEEDED if name != "device"]
    numbers = frame[numeric].apply(pd.to_numeric, errors="coerce")
    bad = np.argwhere(~np.isfinite(numbers.to_numpy(dtype=float)) | (numbers.to_numpy(dtype=float) < 0))
    if bad.size:
        row, column = int(bad[0][0]), numeric[int(bad[0][1])]
        raise InputError(
            f"{where}:line {row + 1}:{column}", f"is {frame[column].iloc[row]}", "it must be a number >= 0"
        )
    for name, most in (("step", 1e15), ("rank", 1e9), ("world_size", 1e9), ("batch", 1e15), ("num_nodes", 1e9)):
        over = np.flatnonzero(numbers[name].to_numpy() > most)
        if over.size:
            raise InputError(f"{where}:line {over[0] + 1}:{name}", f"is {numbers[name].iloc[over[0]]:g}", "too large")
    wrong = np.flatnonzero((numbers["rank"] >= numbers["world_size"]).to_numpy())
    if wrong.size:
        row = numbers.iloc[int(wrong[0])]
        problem = f"is {row['rank']:g} of {row['world_size']:g} processes"
        raise InputError(f"{where}:line {wrong[0] + 1}:rank", problem, "ranks count from 0")
    numbers["device"] = frame["device"].astype(str)
    last = _last_run(numbers)
    steps = np.sort(last["step"].unique())
    first = steps[WARMUP_STEPS] if len(steps) > 2 * WARMUP_STEPS else steps[0]
    # An epoch's last step may be a smaller one: what the plan speaks about are the full ones.
    full = last.groupby("rank")["batch"].transform("max")
    steady = last[(last["step"] >= first) & (last["batch"] == full) & (last["batch"] > 0)]
    steady = steady[(steady["compute_s"] >= _SHORTEST_S) & (steady["step_s"] >= _SHORTEST_S)]
    if steady.empty:
        raise InputError(where, "holds no step with samples", "let the job train for more steps")
    per_step = steady.groupby("step")
    slowest = per_step["step_s"].max()
    return Run(
        world_size=int(steady["world_size"].iloc[-1]),
        num_nodes=int(steady["num_nodes"].iloc[-1]),
        ranks=tuple(_rank(int(str(rank)), part) for rank, part in steady.groupby("rank")),
        iteration_s=float(slowest.median()),
        iteration_low_s=float(slowest.quantile(0.25)),
        iteration_high_s=float(slowest.quantile(0.75)),
        sync_s=float(per_step["sync_s"].min().median()),
    )


def _last_run(numbers: pd.DataFrame) -> pd.DataFrame:
    """Return each rank's rows after its last fall of the step number."""
    import pandas as pd

    kept = []
    for _, part in numbers.groupby("rank"):
        falls = np.flatnonzero(np.diff(part["step"].to_numpy()) < 0)
        kept.append(part.iloc[falls[-1] + 1 if falls.size else 0 :])
    rows = pd.concat(kept)
    found: pd.DataFrame = rows[rows["world_size"] == rows["world_size"].iloc[-1]]
    return found


def _rank(rank: int, part: pd.DataFrame) -> RankRun:
    low, middle, high = part["compute_s"].quantile([0.25, 0.5, 0.75])
    return RankRun(
        rank=rank,
        device=str(part["device"].iloc[-1]),
        batch=int(part["batch"].iloc[-1]),
        steps=len(part),
        compute_s=float(middle),
        wait_s=float(part["wait_s"].median()),
        sync_s=float(part["sync_s"].median()),
        step_s=float(part["step_s"].median()),
        error=float((high - low) / 2 / middle),
    )
