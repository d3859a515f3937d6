"""What each rank did in each step: its own work by part, waiting for others, communication that nothing hid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from ddltool.analyzers.deciding.feedback import check_rows
from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError
from ddltool.stages import Tell, log_remark

COMPUTE = ("forward", "backward", "compute")
"""The parts that grow with a batch."""
TELEMETRY = ("step", "compute_s", "wait_s", "sync_s", "step_s", "batch")
"""The columns of telemetry that ranks are compared by."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankSteps:
    """R ranks over the K steps that all of them have; all arrays (R, K), seconds."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    """(R,) the machine of each rank, empty where nobody says."""
    steps: Ints
    """(K,)"""
    parts: Mapping[str, Floats]
    """What a rank did itself: input, forward, backward, optimizer and host; of telemetry compute and host."""
    wait_s: Floats
    exposed_s: Floats
    step_s: Floats
    after: Mapping[str, Floats] | None = None
    """What of the parts comes after the step's last collective: the others wait for it in the next step."""
    gap_after_s: Floats | None = None
    gap_s: Floats | None = None
    """The longest time in a step in which a rank ran nothing and waited for nobody."""
    work: Floats | None = None
    """What a rank had to do: samples of telemetry, elements that a trace's matrix products and convolutions took."""
    samples: Floats | None = None
    offsets_s: Floats | None = None
    """(R,) how far each clock is ahead of the middle one."""
    late_s: Floats | None = None
    """(R, m) how much later than the first rank each sees a step's longest collective end, where all have one clock."""
    ring: int = -1
    """To which rank each sends in a ring, from its own: gloo's to the one before."""
    remarks: tuple[str, ...] = ()
    timeline: list[tuple[str, list[tuple[float, float, str]]]] = field(default_factory=list)
    """By rank, what it did from when to when in some steps."""

    def between_meetings(self) -> RankSteps:
        """Return the same from one step's last collective to the next's, which is when ranks wait for each other.

        What precedes the first is what usually does: the median of the rank's steps.
        """
        if self.after is None or self.gap_s is None or self.gap_after_s is None:
            return self

        def moved(whole: Floats, after: Floats) -> Floats:
            before: Floats = np.concatenate([np.median(after, axis=1, keepdims=True), after[:, :-1]], axis=1)
            return np.add(whole - after, before)

        parts = {name: moved(whole, self.after[name]) for name, whole in self.parts.items()}
        own: Floats = np.sum(list(parts.values()), axis=0)
        before = np.where(self.gap_s > self.gap_after_s, self.gap_s, 0.0)
        gap = np.maximum(
            before,
            np.concatenate([np.median(self.gap_after_s, axis=1, keepdims=True), self.gap_after_s[:, :-1]], axis=1),
        )
        step = own + self.wait_s + self.exposed_s
        return replace(self, parts=parts, step_s=step, gap_s=gap, after=None)

    def speed(self, batch: float = 1.0) -> Floats:
        """Return (R, K) samples a second of each rank's own compute; ``batch``: samples of a step where nobody says."""
        samples = self.samples if self.samples is not None else np.full(self.step_s.shape, batch)
        found: Floats = samples / np.maximum(self.compute_s, 1e-9)
        return found

    @property
    def own_s(self) -> Floats:
        """What each rank needed by itself."""
        total: Floats = np.sum(list(self.parts.values()), axis=0)
        return total

    @property
    def compute_s(self) -> Floats:
        """The part of it that grows with the batch."""
        total: Floats = np.sum([row for name, row in self.parts.items() if name in COMPUTE], axis=0)
        return total


def of_telemetry(frame: pd.DataFrame, where: str, tell: Tell = log_remark) -> RankSteps:
    """Return the steps of a telemetry table's last run that all its ranks have. Raises InputError naming line and column.

    ``tell`` hears which of several runs it is. Input and host cannot be told apart there: both are what compute, waiting
    and synchronisation leave of a step.
    """
    rows = check_rows(frame, where, tell)
    rows = rows[rows["batch"] > 0]
    ranks = sorted({int(rank) for rank in rows["rank"]})
    whole = rows.drop_duplicates(["rank", "step"], keep="last").sort_values(["rank", "step"])
    whole = whole[whole.groupby("step")["rank"].transform("size") == len(ranks)]
    if len(ranks) < 2 or whole.empty:
        problem = f"has {len(ranks)} ranks with no step in common" if len(ranks) > 1 else "has one rank only"
        raise InputError(where, problem, "give the telemetry of all ranks of one run")
    columns = {name: whole[name].to_numpy(dtype=np.float64).reshape(len(ranks), -1) for name in TELEMETRY}
    return of_columns(columns, ranks)


def of_columns(columns: Mapping[str, Floats], ranks: Sequence[int]) -> RankSteps:
    """Return the steps of telemetry given as one array (R, K) for each of :data:`TELEMETRY`."""
    host = columns["step_s"] - columns["compute_s"] - columns["wait_s"] - columns["sync_s"]
    return RankSteps(
        ranks=tuple(ranks),
        nodes=("",) * len(ranks),
        steps=columns["step"][0].astype(np.int64),
        parts={"compute": columns["compute_s"], "host": np.maximum(host, 0.0)},
        wait_s=columns["wait_s"],
        exposed_s=columns["sync_s"],
        step_s=columns["step_s"],
        work=columns["batch"],
        samples=columns["batch"],
    )
