"""Telemetry: the rows that the hook writes, and the events of a parameter server, one JSON object per line.

Each start of a job appends its rows to the file, with a ``run`` of their own; :func:`last_run` picks the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field

from ddltool.artifacts import SCHEMA_VERSION, Record, Version
from ddltool.errors import InputError
from ddltool.quantities import (
    AtLeastOne,
    Change,
    Count,
    Duration,
    Name,
    NonNegative,
    Processes,
    Seconds,
    StepTime,
    Whole,
)
from ddltool.stages import Tell, log_remark
from ddltool.tables import checked_columns, demand_valid

if TYPE_CHECKING:
    import pandas as pd


RunName = Annotated[str, Field(description="which start of the job wrote the row; empty: not said")]


class TelemetryRow(Record):
    """One optimizer step of one process. All figures are measured."""

    kind: Literal["ddltool.telemetry"] = "ddltool.telemetry"
    schema_version: Version = SCHEMA_VERSION
    run: RunName = ""
    step: Count
    rank: Count
    world_size: Processes
    num_nodes: Processes
    device: Name
    batch: Count = Field(description="samples that this rank processed in the step")
    total_batch: Count = Field(description="samples of all ranks together")
    compute_s: StepTime = Field(description="forward and backward until the local gradients were complete")
    wait_s: StepTime = Field(description="from then until the slowest rank's gradients were complete")
    sync_s: StepTime = Field(description="from then until the averaged gradients were in place")
    step_s: StepTime = Field(
        description="from the end of the previous update, or an epoch's first forward pass, to the end of this one"
    )
    memory_bytes: NonNegative = Field(description="peak memory of the process so far")
    passes: AtLeastOne = Field(default=1, description="forward and backward passes of this rank")
    servers: Count = Field(
        default=0, description="parameter servers; with any, wait_s is what the rank waited for parameters"
    )
    learning_rate_factor: NonNegative | None = Field(
        default=None, description="what a goodput agent multiplied the learning rate by"
    )
    noise_scale: NonNegative | None = Field(
        default=None, description="gradient noise scale in samples, as a goodput agent knew it"
    )
    end_s: Seconds | None = Field(default=None, description="when the step ended, in seconds since 1970 (UTC)")
    data_s: StepTime | None = Field(
        default=None, description="of step_s, from its begin to the first forward pass: waiting for data"
    )
    checkpoint_s: Seconds | None = Field(
        default=None, description="of the checkpoints since the step before; no part of step_s"
    )
    start_s: Seconds | None = Field(
        default=None, description="from the start of telemetry to this step's begin; in a run's first row alone"
    )
    restarts: Count | None = Field(
        default=None, description="how often torchrun had started the job again; in a run's first row alone"
    )


class BalanceEvent(Record):
    """One change of batch sizes, or advice. Times are measured."""

    kind: Literal["ddltool.balance_event"] = "ddltool.balance_event"
    schema_version: Version = SCHEMA_VERSION
    run: RunName = ""
    event: Literal["resize", "fine_tuning", "remove_straggler"]
    step: Count = Field(description="the step whose times led to this, from 0")
    sizes: list[AtLeastOne] = Field(description="samples of each rank from the next step that was not loaded yet")
    seconds: list[Duration] = Field(description="each rank's computation in that step")
    rank: Count | None = Field(default=None, description="the straggler that is advised to go")


def runs_of(frame: pd.DataFrame) -> pd.Series[Any]:
    """Return the number of each row's run, (n,), from 0 in the order in which the runs began.

    Where no row has a ``run`` (files of earlier versions), a rank's next run begins where its step number decreases, and
    rows whose ``world_size`` is not the last row's count as one run earlier.
    """
    import pandas as pd

    named = frame["run"].fillna("").astype(str) if "run" in frame.columns else pd.Series("", frame.index)
    if named.any() or not {"rank", "step"} <= set(frame.columns):
        return pd.Series(pd.factorize(named)[0], frame.index)
    step, rank = (pd.to_numeric(frame[name], errors="coerce") for name in ("step", "rank"))
    is_first_of_run = step.groupby(rank, dropna=False).diff() < 0
    runs_begun = is_first_of_run.groupby(rank, dropna=False).cumsum()
    # Runs are numbered 0, -1, -2 ... back from each rank's last one: a rank may have taken no part in earlier runs.
    run_number: pd.Series[Any] = runs_begun - runs_begun.groupby(rank, dropna=False).transform("max")
    if "world_size" in frame.columns:  # a run does not change its number of processes
        world_sizes = pd.to_numeric(frame["world_size"], errors="coerce")
        run_number -= world_sizes != world_sizes.iloc[-1]
    return run_number.sub(run_number.min())


def last_run(frame: pd.DataFrame, where: str, tell: Tell) -> pd.DataFrame:
    """Return the rows of a table's last run, with their index in the table.

    If the table has several runs, ``tell`` gets a remark with the run's number and its steps; ``where``: the file, for
    the remark.
    """
    runs = runs_of(frame)
    rows: pd.DataFrame = frame[runs == runs.max()]
    if len(rows) < len(frame):
        steps = f", of {rows['step'].nunique():,} steps" if "step" in rows.columns else ""
        tell(f"{where}: run {runs.nunique()} of {runs.nunique()}{steps}")
    return rows


class SyncEvent(Record, extra="ignore"):
    """The fields that every event of a server has. Unknown fields are ignored, so files of other versions stay readable."""

    kind: Literal["ddltool.sync"] = "ddltool.sync"
    schema_version: Version = SCHEMA_VERSION
    run: RunName = ""
    time_s: Change


class StepRow(SyncEvent):
    """One worker's step, written when its last gradient has arrived."""

    event: Literal["step"] = "step"
    worker: Count
    step: Count
    wait_s: Seconds
    """Seconds that its pull of parameters waited for other workers."""
    staleness: Count
    """Updates by others between the pull of a parameter and the use of its gradient; the largest of all parameters."""
    gap: Whole
    """Steps that the worker was ahead of the slowest member after its push."""


class BarrierRow(SyncEvent):
    """One superstep of ElasticBSP, written at its end. Its times count from its begin, ``time_s - length_s``."""

    event: Literal["barrier"] = "barrier"
    superstep: Count
    workers: list[Count]
    """The members when the barrier was chosen; the other lists have one entry for each of them."""
    iterations: list[Count]
    """Iterations that each member made in the superstep."""
    predicted_end_s: list[Change]
    """When each member was predicted to begin its wait at the barrier; empty in the warm-up."""
    end_s: list[Change | None]
    """When each member began its wait; None: it was lost before."""
    length_s: Seconds


class LeftRow(SyncEvent):
    """A worker has left: it closed its connection, or was lost."""

    event: Literal["left"] = "left"
    worker: Count
    lost: bool
    reason: str
    epoch: Count | None = None
    """The last epoch of which it asked for its share of the data; None on all servers but 0, which alone is asked."""
    steps_of_epoch: Count | None = None
    """Steps that it has made in that epoch."""
    batches_left: Count | None = None
    """Batches of its share that nobody has processed; None: it did not say how many its share has."""


class JoinedRow(SyncEvent):
    """A worker has joined. ``step``: the number of its first step; ``epoch``: the first epoch of which it gets data."""

    event: Literal["joined"] = "joined"
    worker: Count
    step: Count
    epoch: Count


class SummaryRow(SyncEvent):
    """The figures of the whole run, in the file's last line."""

    event: Literal["summary"] = "summary"
    policy: str
    steps: list[Count]
    """Steps of each worker."""
    updates: Count
    updates_per_s: NonNegative
    wait_s: list[Seconds]
    """Seconds that each worker waited for others, in all."""
    staleness: dict[int, Count]
    """Number of gradients by staleness."""


SyncRow = StepRow | BarrierRow | LeftRow | JoinedRow | SummaryRow
EVENTS: dict[str, type[SyncEvent]] = {row.model_fields["event"].default: row for row in get_args(SyncRow)}
"""The record of a server's row by its ``event``."""

# The first steps after a start allocate, compile and fill caches; they are slower than the later ones.
WARMUP_STEPS = 3
# The hook's clock counts nanoseconds; a step with samples cannot take less than one.
_SHORTEST_S = 1e-9
_NEEDED = tuple(name for name, field in TelemetryRow.model_fields.items() if field.is_required())


def check_rows(frame: pd.DataFrame, where: str, tell: Tell = log_remark) -> pd.DataFrame:
    """Return the last run of a telemetry table: the columns of :class:`TelemetryRow`, numbers as floats, index kept.

    Every command that reads the hook's files calls this. ``tell`` gets a remark if the table has several runs. Raises
    InputError, naming line and column, for missing columns, values that :class:`TelemetryRow` refuses, ranks or nodes
    beyond the number of processes, a rank's steps that do not rise, batches that do not add up to the total, and samples
    that took no time; and for a last run in which no step has samples.
    """
    return last_with_samples(rows_of_runs(frame, where), where, tell)


def rows_of_runs(frame: pd.DataFrame, where: str, needed: Sequence[str] = _NEEDED) -> pd.DataFrame:
    """Return the columns of :class:`TelemetryRow` that a table has, checked, with the rows of all runs.

    ``needed``: columns that must be there. A condition on columns that are absent is not checked. Raises InputError as
    :func:`check_rows` does.
    """
    import pandas as pd  # most plans are made without a table

    rows = pd.DataFrame(checked_columns(frame, TelemetryRow, where, required=needed, unit="line"), index=frame.index)
    for name in ("passes", "servers"):  # rows of earlier versions have neither
        default = float(TelemetryRow.model_fields[name].default)
        rows[name] = rows[name].fillna(default) if name in rows else default
    run = runs_of(frame)
    # The batches of a step are added up where the rows of all its ranks are there.
    batch_by_step = rows.groupby([run, "step"], sort=False)["batch"]

    def diff(name: str) -> Any:
        """Return how much a column grows from each row of a rank to its next in a run, (n,)."""
        return rows.groupby([run, "rank"])[name].diff()

    takes = "a step takes at least 1 ns; the run did not measure"
    # (Columns that it reads, the first of which is wrong where it fails; the condition on each row; what would be right).
    conditions: list[tuple[tuple[str, ...], Callable[[], Any], str]] = [
        (("rank", "world_size"), lambda: rows["rank"] < rows["world_size"], "below the number of processes"),
        (
            ("num_nodes", "world_size"),
            lambda: rows["num_nodes"] <= rows["world_size"],
            "at most the number of processes",
        ),
        (("step", "rank"), lambda: ~(diff("step") <= 0), "the steps of a rank rise within a run"),
        (
            ("batch", "total_batch"),
            lambda: rows["batch"] <= rows["total_batch"],
            "at most total_batch, that of all ranks",
        ),
        (
            ("total_batch", "batch", "world_size"),
            lambda: (
                (batch_by_step.transform("size") != rows["world_size"])
                | (batch_by_step.transform("sum") == rows["total_batch"])
            ),
            "the samples of all ranks in the step",
        ),
        (("end_s", "step", "rank"), lambda: ~(diff("end_s") < 0), "the steps of a rank end one after another"),
        (("step_s", "batch"), lambda: (rows["batch"] == 0) | (rows["step_s"] >= _SHORTEST_S), takes),
        (("compute_s", "batch"), lambda: (rows["batch"] == 0) | (rows["compute_s"] >= _SHORTEST_S), takes),
    ]
    for names, condition, remedy in conditions:
        if set(names) <= set(rows.columns):
            demand_valid(condition().to_numpy(dtype=bool), frame[names[0]], names[0], where, remedy, unit="line")
    return rows


def last_with_samples(rows: pd.DataFrame, where: str, tell: Tell) -> pd.DataFrame:
    """Return the rows of the last run (:func:`last_run`). Raises InputError if no step of that run has samples."""
    last = last_run(rows, where, tell)
    if not (last["batch"] > 0).any():
        raise InputError(where, "holds no step with samples", "let the job train for more steps")
    return last
