"""Telemetry: what the hook writes down, and what a parameter server does, one JSON object per line.

Each start of a job appends its rows to the file, with a ``run`` of their own; :func:`last_run` picks the newest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ddltool.artifacts import SCHEMA_VERSION, AtLeastOne, Count, NonNegative, Positive, Record
from ddltool.stages import Tell

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
    found: pd.Series[Any] = after - after.groupby(rank, dropna=False).transform("max")
    if "world_size" in frame.columns:
        size = pd.to_numeric(frame["world_size"], errors="coerce")
        found -= size != size.iloc[-1]
    return found.sub(found.min())


def last_run(frame: pd.DataFrame, where: str, tell: Tell) -> pd.DataFrame:
    """Return the rows of a table's last run, at their places in the table; ``tell`` hears which of several it is."""
    runs = runs_of(frame)
    found: pd.DataFrame = frame[runs == runs.max()]
    if len(found) < len(frame):
        steps = f", of {found['step'].nunique():,} steps" if "step" in found.columns else ""
        tell(f"{where}: run {runs.nunique()} of {runs.nunique()}{steps}")
    return found


class Row(Record):
    """What all rows have."""

    kind: Literal["ddltool.sync"] = "ddltool.sync"
    schema_version: int = SCHEMA_VERSION
    run: RunName = ""
    time_s: float


class StepRow(Row):
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
    dropped: bool
    """Whether its gradients came too late to be used."""


class BarrierRow(Row):
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


class LeftRow(Row):
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


class JoinedRow(Row):
    """A worker has joined; ``step`` is the number of its first one, ``epoch`` the first of which it gets a share."""

    event: Literal["joined"] = "joined"
    worker: int
    step: int
    epoch: int


class SummaryRow(Row):
    """The last line: the whole run."""

    event: Literal["summary"] = "summary"
    policy: str
    steps: list[int]
    updates: int
    updates_per_s: float
    wait_s: list[float]
    staleness: dict[int, int]
    dropped: list[int]


SyncRow = StepRow | BarrierRow | LeftRow | JoinedRow | SummaryRow
EVENTS: dict[str, type[Row]] = {
    **{"step": StepRow, "barrier": BarrierRow, "left": LeftRow, "joined": JoinedRow, "summary": SummaryRow}
}
