"""Telemetry: what the hook writes down, and what a parameter server does, one JSON object per line.

Each start of a job appends its rows to the file, with a ``run`` of their own; :func:`last_run` picks the newest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ddltool.artifacts import SCHEMA_VERSION, AtLeastOne, Count, NonNegative, Positive, Record
from ddltool.errors import InputError
from ddltool.stages import Tell, log_remark
from ddltool.tables import demand, numbers

if TYPE_CHECKING:
    import pandas as pd


RunName = Annotated[str, Field(description="which start of the job wrote the row; empty: not said")]


class TelemetryRow(Record):
    """One optimizer step of one process. All figures are measured."""

    kind: Literal["ddltool.telemetry"] = "ddltool.telemetry"
    schema_version: int = SCHEMA_VERSION
    run: RunName = ""
    step: Count
    rank: Count
    world_size: AtLeastOne
    num_nodes: AtLeastOne
    device: str
    batch: Count = Field(description="samples that this rank processed in the step")
    total_batch: Count = Field(description="samples of all ranks together")
    compute_s: NonNegative = Field(description="forward and backward until the local gradients were complete")
    wait_s: NonNegative = Field(description="from then until the slowest rank's gradients were complete")
    sync_s: NonNegative = Field(description="from then until the averaged gradients were in place")
    step_s: NonNegative = Field(
        description="from the end of the previous update, or an epoch's first forward pass, to the end of this one"
    )
    memory_bytes: Annotated[float, Field(ge=0)] = Field(description="peak memory of the process so far")
    passes: AtLeastOne = Field(default=1, description="forward and backward passes of this rank")
    learning_rate_factor: NonNegative | None = Field(
        default=None, description="what a goodput agent multiplied the learning rate by"
    )
    noise_scale: NonNegative | None = Field(
        default=None, description="gradient noise scale in samples, as a goodput agent knew it"
    )


class BalanceEvent(Record):
    """One change of batch sizes, or advice. Times are measured."""

    kind: Literal["ddltool.balance_event"] = "ddltool.balance_event"
    schema_version: int = SCHEMA_VERSION
    run: RunName = ""
    event: Literal["resize", "fine_tuning", "remove_straggler"]
    step: Count = Field(description="the step whose times led to this, from 0")
    sizes: list[AtLeastOne] = Field(description="samples of each rank from the next step that was not loaded yet")
    seconds: list[Positive] = Field(description="each rank's computation in that step")
    rank: Count | None = Field(default=None, description="the straggler that is advised to go")


def runs_of(frame: pd.DataFrame) -> pd.Series[Any]:
    """Return (n,) the number of each row's run, in the order in which they began.

    Where no row says its run (files of earlier versions), a rank's next one begins where its step number falls back; rows
    of another number of processes than the last row's are then earlier ones.
    """
    import pandas as pd

    named = frame["run"].fillna("").astype(str) if "run" in frame.columns else pd.Series("", frame.index)
    if named.any() or not {"rank", "step"} <= set(frame.columns):
        return pd.Series(pd.factorize(named)[0], frame.index)
    step, rank = (pd.to_numeric(frame[name], errors="coerce") for name in ("step", "rank"))
    begins = step.groupby(rank, dropna=False).diff() < 0
    after = begins.groupby(rank, dropna=False).cumsum()
    number: pd.Series[Any] = after - after.groupby(rank, dropna=False).transform("max")
    if "world_size" in frame.columns:
        size = pd.to_numeric(frame["world_size"], errors="coerce")
        number -= size != size.iloc[-1]
    return number.sub(number.min())


def last_run(frame: pd.DataFrame, where: str, tell: Tell) -> pd.DataFrame:
    """Return the rows of a table's last run, at their places in the table; ``tell`` hears which of several it is."""
    runs = runs_of(frame)
    rows: pd.DataFrame = frame[runs == runs.max()]
    if len(rows) < len(frame):
        steps = f", of {rows['step'].nunique():,} steps" if "step" in rows.columns else ""
        tell(f"{where}: run {runs.nunique()} of {runs.nunique()}{steps}")
    return rows


class SyncEvent(Record, extra="ignore"):
    """What all rows have. Fields of other versions are passed over: what a long job wrote stays readable."""

    kind: Literal["ddltool.sync"] = "ddltool.sync"
    schema_version: int = SCHEMA_VERSION
    run: RunName = ""
    time_s: float


class StepRow(SyncEvent):
    """One worker's step, when its last gradient came in."""

    event: Literal["step"] = "step"
    worker: int
    step: int
    wait_s: float
    """How long its pull waited for other workers."""
    staleness: int
    """Updates that others made to a parameter between its pull and the use of its gradient; the most of any."""
    gap: int
    """Steps that it was ahead of the slowest member when it had pushed."""


class BarrierRow(SyncEvent):
    """One superstep of ElasticBSP, when it is over. Ends are since ``time_s - length_s``."""

    event: Literal["barrier"] = "barrier"
    superstep: int
    workers: list[int]
    """The members when it was decided; the other lists have one entry for each."""
    iterations: list[int]
    predicted_end_s: list[float]
    """When each was to begin to wait; empty in the warm-up."""
    end_s: list[float | None]
    """When each began to wait; None: it was lost before."""
    length_s: float


class LeftRow(SyncEvent):
    """A worker has closed or was lost."""

    event: Literal["left"] = "left"
    worker: int
    lost: bool
    reason: str
    epoch: int | None = None
    """The epoch of which it last asked for a share (server 0 alone is asked)."""
    steps_of_epoch: int | None = None
    """Steps of that epoch that it has made."""
    batches_left: int | None = None
    """Batches of its share that nobody has processed, where it has said how many there are."""


class JoinedRow(SyncEvent):
    """A worker has joined; ``step`` is the number of its first one, ``epoch`` the first of which it gets a share."""

    event: Literal["joined"] = "joined"
    worker: int
    step: int
    epoch: int


class SummaryRow(SyncEvent):
    """The last line: the whole run."""

    event: Literal["summary"] = "summary"
    policy: str
    steps: list[int]
    updates: int
    updates_per_s: float
    wait_s: list[float]
    staleness: dict[int, int]


SyncRow = StepRow | BarrierRow | LeftRow | JoinedRow | SummaryRow
EVENTS: dict[str, type[SyncEvent]] = {
    **{"step": StepRow, "barrier": BarrierRow, "left": LeftRow, "joined": JoinedRow, "summary": SummaryRow}
}


# The first steps after a start allocate, compile and fill caches; they are no steady state.
WARMUP_STEPS = 3


# The hook writes nanoseconds; a step that takes less was never made. Nor does one take thirty years.
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9


_TIMES = ("compute_s", "wait_s", "sync_s", "step_s")


_MOST = {
    **dict.fromkeys(_TIMES, _LONGEST_S),
    **dict.fromkeys(("step", "batch", "total_batch", "noise_scale", "learning_rate_factor"), 1e15),
    **dict.fromkeys(("rank", "world_size", "num_nodes", "passes"), 1e9),
    "memory_bytes": 1e18,
}


_NEEDED = ("step", "rank", "world_size", "num_nodes", "device", "batch", "compute_s", "wait_s", "sync_s", "step_s")


def check_rows(frame: pd.DataFrame, where: str, tell: Tell = log_remark) -> pd.DataFrame:
    """Return the columns that a run is read from, numbers as floats, of a telemetry table's last run; the index: places.

    The one check of rows that the hook's files get, whoever reads them; ``tell`` hears which of several runs it is. Raises
    InputError, naming line and column, for missing columns, values that are no times or counts (not finite, negative, beyond
    1e9 s), ranks beyond the number of processes, samples that took no time; and for a last run in which no step has samples.
    """
    return last_with_samples(rows_of_runs(frame, where), where, tell)


def rows_of_runs(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    """Return the columns of all runs of a table. Raises InputError as :func:`check_rows` does."""
    import pandas as pd  # most plans are made without a table

    for name in _NEEDED:
        if name not in frame.columns:
            raise InputError(where, f"has no column {name!r}", "give the telemetry.jsonl that the hook wrote")
    columns: dict[str, Any] = {}
    for name in filter(frame.columns.__contains__, _MOST):
        needed, unit = name in _NEEDED, " s" if name in _TIMES else ""
        remedy = f"it must be <= {_MOST[name]:g}{unit}"
        values = numbers(
            frame,
            name,
            where,
            maximum=_MOST[name],
            whole=needed and not unit,
            missing=not needed,
            remedy=remedy,
            unit="line",
        )
        columns |= {name: values} if needed else {}
    ranks = columns["rank"]
    demand(ranks < columns["world_size"], ranks, "rank", where, "below the number of processes", unit="line")
    for name in ("step_s", "compute_s"):
        remedy = "a step takes at least 1 ns; the run did not measure"
        seconds = columns[name]
        demand((columns["batch"] == 0) | (seconds >= _SHORTEST_S), seconds, name, where, remedy, unit="line")
    columns |= {"device": frame["device"].astype(str).to_numpy(), "passes": 1.0}
    if "passes" in frame.columns:
        columns["passes"] = pd.to_numeric(frame["passes"]).fillna(1.0).clip(lower=1.0).to_numpy(dtype=float)
    if "run" in frame.columns:
        columns["run"] = frame["run"].to_numpy()
    return pd.DataFrame(columns)


def last_with_samples(rows: pd.DataFrame, where: str, tell: Tell) -> pd.DataFrame:
    """Return the rows of the last run, as :func:`last_run`. Raises InputError where no step of it has samples."""
    last = last_run(rows, where, tell)
    if not (last["batch"] > 0).any():
        raise InputError(where, "holds no step with samples", "let the job train for more steps")
    return last
