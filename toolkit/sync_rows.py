"""What a parameter server writes down, one JSON object per line (kind ``ddltool.sync``).

All times are monotonic seconds since the server began to serve, all durations seconds.
"""

from __future__ import annotations

from typing import Literal

from ddltool.artifacts import SCHEMA_VERSION, Record
from ddltool.telemetry import RunName


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
