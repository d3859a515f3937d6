"""What an earlier run's telemetry says about the devices: the closed loop. Start at :func:`read_run`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddltool.analyzers.goodput.observations import WARMUP_STEPS
from ddltool.arrays import Floats
from ddltool.errors import InputError
from ddltool.stages import Tell, log_remark
from ddltool.tables import demand, numbers
from ddltool.telemetry import last_run, runs_of

if TYPE_CHECKING:
    import pandas as pd

# The hook writes nanoseconds; a step that takes less was never made. Nor does one take thirty years.
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9
_TIMES = ("compute_s", "wait_s", "sync_s", "step_s")
_MOST = {
    **dict.fromkeys(_TIMES, _LONGEST_S),
    **dict.fromkeys(("step", "batch", "total_batch", "noise_scale", "learning_rate_factor"), 1e15),
    **dict.fromkeys(("rank", "world_size", "num_nodes", "passes"), 1e9),
    "memory_bytes": 1e18,
}
# Parts in time that a run is cut into: how far they lie apart tells how far another run may.
_PARTS = 8
# Of what is seen of other runs, eight of ten lie within the interval.
_WITHIN = 0.9
_SHAPE = ("rank", "device", "batch")
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
    rest_s: float = 0.0
    """What compute, waiting and synchronisation leave of its steps: its own optimizer and loader."""
    mean_step_s: float = 0.0
    """Mean over all its steps; what a worker that waits at some of them only takes for one."""
    parts_s: tuple[float, ...] = ()
    """The same of each part of the run, in the order of time."""
    passes: int = 1
    """Forward and backward passes over the batch: more than one under gradient accumulation."""


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
    drift: float = 0.0
    """By what share another run's step may be longer or shorter (:func:`drift`)."""

    @property
    def devices(self) -> dict[str, int]:
        """Return how many processes were on each device type."""
        return dict(Counter(rank.device for rank in self.ranks))

    @property
    def other_s(self) -> float:
        """Return what the longest compute and the synchronisation leave of a step: optimizer, loader, waiting."""
        return max(0.0, self.iteration_s - max(rank.compute_s for rank in self.ranks) - self.sync_s)

    def rests_s(self) -> dict[str, float]:
        """Return the longest rest of a rank's own, by device type."""
        return self._largest(lambda rank: rank.rest_s)

    @property
    def skew(self) -> float:
        """Return what even the slowest waits for others whose turn it is to be late, over the longest compute."""
        own = max(rank.rest_s for rank in self.ranks)
        return max(0.0, self.other_s - own) / max(rank.compute_s for rank in self.ranks)

    def speeds(self) -> dict[str, float]:
        """Return the samples per second of the slowest rank of each device type."""
        slowest = self._largest(lambda rank: rank.compute_s / rank.batch)
        return {name: 1 / seconds for name, seconds in slowest.items()}

    def errors(self) -> dict[str, float]:
        """Return the largest relative error of compute times, by device type."""
        return self._largest(lambda rank: rank.error)

    def _largest(self, value: Callable[[RankRun], float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for rank in self.ranks:
            found[rank.device] = max(found.get(rank.device, 0.0), value(rank))
        return found


def check_rows(frame: pd.DataFrame, where: str, tell: Tell = log_remark) -> pd.DataFrame:
    """Return the columns that a run is read from, numbers as floats, of a telemetry table's last run; the index: places.

    The one check of rows that the hook's files get, whoever reads them; ``tell`` hears which of several runs it is. Raises
    InputError, naming line and column, for missing columns, values that are no times or counts (not finite, negative, beyond
    1e9 s), ranks beyond the number of processes, samples that took no time; and for a last run in which no step has samples.
    """
    return _last(_numbers(frame, where), where, tell)


def _numbers(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    """Return the columns of all runs of a table. Raises InputError as :func:`check_rows` does."""
    import pandas as pd  # most plans are made without a table

    for name in _NEEDED:
        if name not in frame.columns:
            raise InputError(where, f"has no column {name!r}", "give the telemetry.jsonl that the hook wrote")
    made: dict[str, Any] = {}
    for name in filter(frame.columns.__contains__, _MOST):
        needed, unit = name in _NEEDED, " s" if name in _TIMES else ""
        remedy = f"it must be <= {_MOST[name]:g}{unit}"
        values = numbers(
            frame,
            name,
            where,
            most=_MOST[name],
            whole=needed and not unit,
            missing=not needed,
            remedy=remedy,
            unit="line",
        )
        made |= {name: values} if needed else {}
    demand(made["rank"] < made["world_size"], made["rank"], "rank", where, "below the number of processes", unit="line")
    for name in ("step_s", "compute_s"):
        remedy = "a step takes at least 1 ns; the run did not measure"
        demand((made["batch"] == 0) | (made[name] >= _SHORTEST_S), made[name], name, where, remedy, unit="line")
    made |= {"device": frame["device"].astype(str).to_numpy(), "passes": 1.0}
    if "passes" in frame.columns:
        made["passes"] = pd.to_numeric(frame["passes"]).fillna(1.0).clip(lower=1.0).to_numpy(dtype=float)
    if "run" in frame.columns:
        made["run"] = frame["run"].to_numpy()
    return pd.DataFrame(made)


def _last(rows: pd.DataFrame, where: str, tell: Tell) -> pd.DataFrame:
    found = last_run(rows, where, tell)
    if not (found["batch"] > 0).any():
        raise InputError(where, "holds no step with samples", "let the job train for more steps")
    return found


def read_run(frame: pd.DataFrame, where: str, tell: Tell = log_remark) -> Run:
    """Return the last run of a telemetry table, warm-up steps left out (the first ``WARMUP_STEPS`` of longer runs).

    Raises InputError for what :func:`check_rows` refuses.
    """
    every = _numbers(frame, where)
    steady = _steady(_last(every, where, tell))
    if steady.empty:
        raise InputError(where, "holds no step with samples", "let the job train for more steps")
    per_step = steady.groupby("step")
    slowest = per_step["step_s"].max()
    runs = [_steady(rows) for _, rows in every.groupby(runs_of(every))]
    alike = [rows.groupby("step")["step_s"].max() for rows in runs if _shape(rows) == _shape(steady)]
    return Run(
        world_size=int(steady["world_size"].iloc[-1]),
        num_nodes=int(steady["num_nodes"].iloc[-1]),
        ranks=tuple(_rank(int(float(str(rank))), part) for rank, part in steady.groupby("rank")),
        iteration_s=float(slowest.median()),
        iteration_low_s=float(slowest.quantile(0.25)),
        iteration_high_s=float(slowest.quantile(0.75)),
        sync_s=float(per_step["sync_s"].min().median()),
        drift=drift([float(np.median(each)) for each in (alike if len(alike) > 1 else _parts(slowest))]),
    )


def _steady(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a run's rows without its first steps, and without an epoch's last where that is smaller."""
    steps = np.sort(rows["step"].unique())
    first = steps[WARMUP_STEPS] if len(steps) > 2 * WARMUP_STEPS else steps[0]
    full = rows.groupby("rank")["batch"].transform("max")
    found: pd.DataFrame = rows[(rows["step"] >= first) & (rows["batch"] == full) & (rows["batch"] > 0)]
    return found


def _shape(steady: pd.DataFrame) -> list[list[Any]]:
    """Return the device and the batch of each rank: what makes two runs repeats of one."""
    found: list[list[Any]] = steady.drop_duplicates("rank").sort_values("rank")[list(_SHAPE)].to_numpy().tolist()
    return found


def _parts(values: pd.Series[float]) -> list[Floats]:
    return np.array_split(values.to_numpy(dtype=float), min(_PARTS, len(values)))


def drift(medians: Sequence[float]) -> float:
    """Return by what share one more such median may be off the last one: half of the interval for 80 %.

    Of n runs, or of parts of one, whose logarithms scatter with s: ``t s sqrt(2)``, t by Student with n - 1 degrees of
    freedom (both are single draws). 0 where there is only one.

    >>> round(drift([1.0, 1.02, 0.97, 1.01]), 3), drift([1.0])
    (0.05, 0.0)
    """
    from scipy.special import stdtrit  # most plans are made without a run

    if len(medians) < 2:
        return 0.0
    return float(math.expm1(stdtrit(len(medians) - 1, _WITHIN) * math.sqrt(2) * np.log(medians).std(ddof=1)))


def _rank(rank: int, part: pd.DataFrame) -> RankRun:
    low, middle, high = part["compute_s"].quantile([0.25, 0.5, 0.75])
    rest = (part["step_s"] - part["compute_s"] - part["wait_s"] - part["sync_s"]).median()
    return RankRun(
        rank=rank,
        device=str(part["device"].iloc[-1]),
        batch=int(part["batch"].iloc[-1]),
        steps=len(part),
        compute_s=float(middle),
        wait_s=float(part["wait_s"].median()),
        sync_s=float(part["sync_s"].median()),
        step_s=float(part["step_s"].median()),
        mean_step_s=float(part["step_s"].mean()),
        parts_s=tuple(float(each.mean()) for each in _parts(part["step_s"])),
        error=float((high - low) / 2 / middle),
        rest_s=max(0.0, float(rest)),
        passes=int(part["passes"].median()),
    )
