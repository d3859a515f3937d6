"""Device speeds from an earlier run's telemetry, which close the planning loop. Start at :func:`read_run`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddltool.arrays import Floats
from ddltool.errors import InputError
from ddltool.stages import Tell, log_remark
from ddltool.telemetry import WARMUP_STEPS, last_with_samples, rows_of_runs, runs_of

if TYPE_CHECKING:
    import pandas as pd

# A single run is divided into so many parts in time, whose spread estimates how far repeated runs differ.
_PARTS = 8
# Upper quantile of the two-sided 80 % interval.
_WITHIN = 0.9
# Columns that two runs must agree in, rank by rank, to count as repeats of each other.
_SHAPE_COLUMNS = ("rank", "device", "batch", "servers")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRun:
    """One process's steady steps: medians, and half the interquartile range of compute as its relative error."""

    rank: int
    device: str
    batch: int
    """Samples of a step."""
    steps: int
    compute_s: float
    wait_s: float
    """Waiting for other ranks."""
    error: float
    """Half the interquartile range of ``compute_s`` over its median."""
    overhead_s: float = 0.0
    """Step time without compute, waiting and synchronisation: the rank's optimizer and loader."""
    mean_step_s: float = 0.0
    """Mean step time, for workers that wait for others in some steps only."""
    parts_s: tuple[float, ...] = ()
    """Mean step time in each part of the run, in the order of time."""
    passes: int = 1
    """Forward and backward passes over the batch: more than one under gradient accumulation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All processes of one run."""

    world_size: int
    num_nodes: int
    ranks: tuple[RankRun, ...]
    iteration_s: float
    """Median over the steps of the slowest rank's time from update to update."""
    iteration_low_s: float
    """Lower quartile of the slowest rank's step times; ``iteration_high_s`` is the upper one."""
    iteration_high_s: float
    sync_s: float
    """Median over the steps of the shortest synchronisation of any rank, which holds no waiting. With ``servers`` the mean over
    the ranks of what each waits for parameters in a step (median), mostly without a barrier: these come in some steps only."""
    servers: int = 0
    """Number of parameter servers."""
    drift: float = 0.0
    """Relative half width of the interval for another run's step time (:func:`drift`)."""

    @property
    def devices(self) -> dict[str, int]:
        """The number of processes on each device type."""
        return dict(Counter(rank.device for rank in self.ranks))

    @property
    def other_s(self) -> float:
        """Seconds of an iteration beside the longest compute and the synchronisation: optimizer, loader, waiting."""
        return max(0.0, self.iteration_s - max(rank.compute_s for rank in self.ranks) - self.sync_s)

    def overheads_s(self) -> dict[str, float]:
        """Return the longest overhead of a rank, by device type."""
        return self._largest_by_device(lambda rank: rank.overhead_s)

    @property
    def imbalance(self) -> float:
        """How long the slowest rank waits for others, as a share of the longest compute (0: it never waits).

        It waits although it is the slowest on the whole, because in a single step another rank may be later. 0.0 with servers.
        """
        if self.servers:
            return 0.0
        overhead_s = max(rank.overhead_s for rank in self.ranks)
        waiting_s = max(0.0, self.other_s - overhead_s)
        return waiting_s / max(rank.compute_s for rank in self.ranks)

    def speeds(self) -> dict[str, float]:
        """Return the samples per second of the slowest rank of each device type."""
        slowest = self._largest_by_device(lambda rank: rank.compute_s / rank.batch)
        return {name: 1 / seconds for name, seconds in slowest.items()}

    def errors(self) -> dict[str, float]:
        """Return the largest relative error of compute times, by device type."""
        return self._largest_by_device(lambda rank: rank.error)

    def _largest_by_device(self, value: Callable[[RankRun], float]) -> dict[str, float]:
        """Return by device type the largest result of ``value`` for its ranks, at least 0."""
        largest: dict[str, float] = {}
        for rank in self.ranks:
            largest[rank.device] = max(largest.get(rank.device, 0.0), value(rank))
        return largest


def read_run(frame: pd.DataFrame, where: str, tell: Tell = log_remark) -> Run:
    """Return the last run of a telemetry table without its first ``WARMUP_STEPS`` steps (a short run keeps them).

    ``Run.drift`` is computed from the median step times of this run and of earlier runs in the table with the same ranks,
    devices and batches; without such a run, from those of ``_PARTS`` parts of this one. ``where``: the table, for errors;
    ``tell`` takes remarks. Raises InputError for rows that :func:`check_rows` refuses, and for a run without a step with
    samples.
    """
    all_rows = rows_of_runs(frame, where)
    steady = _steady_rows(last_with_samples(all_rows, where, tell))
    if steady.empty:
        raise InputError(where, "holds no step with samples", "let the job train for more steps")
    per_step = steady.groupby("step")
    slowest_s = per_step["step_s"].max()  # by step, the time of its slowest rank
    # Step times by which the next run's is judged: those of runs with the same ranks, devices and batches, or of parts of
    # this run.
    steady_runs = [_steady_rows(rows) for _, rows in all_rows.groupby(runs_of(all_rows))]
    repeats_s = [rows.groupby("step")["step_s"].max() for rows in steady_runs if _run_shape(rows) == _run_shape(steady)]
    has_earlier_repeat = len(repeats_s) > 1  # this run is among its repeats
    samples_s = repeats_s if has_earlier_repeat else _split_in_time(slowest_s)
    # pandas types a group's key as any object, and a rank may be a float such as 1.0.
    ranks = tuple(_rank_run(int(float(str(rank))), rows) for rank, rows in steady.groupby("rank"))
    servers = int(steady["servers"].min())
    mean_wait_s = np.mean([rank.wait_s for rank in ranks])
    shortest_sync_s = per_step["sync_s"].min().median()  # of the last rank to arrive, which waits for nobody
    return Run(
        world_size=int(steady["world_size"].iloc[-1]),
        num_nodes=int(steady["num_nodes"].iloc[-1]),
        ranks=ranks,
        iteration_s=float(slowest_s.median()),
        iteration_low_s=float(slowest_s.quantile(0.25)),
        iteration_high_s=float(slowest_s.quantile(0.75)),
        sync_s=float(mean_wait_s if servers else shortest_sync_s),
        servers=servers,
        drift=drift([float(np.median(step_times)) for step_times in samples_s]),
    )


def _steady_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a run's rows of telemetry after warm-up whose batch is the rank's full one.

    An epoch's last step may have a smaller batch. The columns stay as they are.
    """
    steps = np.sort(rows["step"].unique())
    is_short = len(steps) <= 2 * WARMUP_STEPS  # it would lose most of its steps
    first_step = steps[0 if is_short else WARMUP_STEPS]
    full_batch = rows.groupby("rank")["batch"].transform("max")
    steady_rows: pd.DataFrame = rows[(rows["step"] >= first_step) & (rows["batch"] == full_batch) & (rows["batch"] > 0)]
    return steady_rows


def _run_shape(steady_rows: pd.DataFrame) -> list[list[Any]]:
    """Return a row of ``_SHAPE_COLUMNS`` for each rank, ascending; runs for which these are equal are repeats of each other."""
    rank_rows = steady_rows.drop_duplicates("rank").sort_values("rank")
    shape: list[list[Any]] = rank_rows[list(_SHAPE_COLUMNS)].to_numpy().tolist()
    return shape


def _split_in_time(values: pd.Series[float]) -> list[Floats]:
    """Return the values of a run's steps divided into ``_PARTS`` consecutive parts of about equal length, or one per step."""
    return np.array_split(values.to_numpy(dtype=float), min(_PARTS, len(values)))


def drift(medians: Sequence[float]) -> float:
    """Return the relative half width of the 80 % interval for one more median around the last one.

    For n medians, of runs or of parts of a run, with standard deviation s of their logarithms: ``t s sqrt(2)``, where t is
    Student's quantile with n - 1 degrees of freedom and sqrt(2) stands for two single draws. 0 for fewer than two.

    >>> round(drift([1.0, 1.02, 0.97, 1.01]), 3), drift([1.0])
    (0.052, 0.0)
    """
    from scipy.special import stdtrit  # most plans are made without a run

    if len(medians) < 2:
        return 0.0
    t = stdtrit(len(medians) - 1, _WITHIN)
    s = np.log(medians).std(ddof=1)
    return float(math.expm1(t * math.sqrt(2) * s))


def _rank_run(rank: int, rows: pd.DataFrame) -> RankRun:
    """Return one rank's medians over its steady rows of telemetry, one row for each step."""
    low_s, median_s, high_s = rows["compute_s"].quantile([0.25, 0.5, 0.75])
    overhead_s = (rows["step_s"] - rows["compute_s"] - rows["wait_s"] - rows["sync_s"]).median()
    return RankRun(
        rank=rank,
        device=str(rows["device"].iloc[-1]),
        batch=int(rows["batch"].iloc[-1]),
        steps=len(rows),
        compute_s=float(median_s),
        wait_s=float(rows["wait_s"].median()),
        mean_step_s=float(rows["step_s"].mean()),
        parts_s=tuple(float(part_s.mean()) for part_s in _split_in_time(rows["step_s"])),
        error=float((high_s - low_s) / 2 / median_s),
        overhead_s=max(0.0, float(overhead_s)),
        passes=int(rows["passes"].median()),
    )
