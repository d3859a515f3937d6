"""The time of each rank in each step: its own work by part (forward, backward, ...), waiting for others, exposed communication.

Exposed communication is the time in which a rank communicates and computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError
from ddltool.stages import Tell, log_remark
from ddltool.telemetry import check_rows

COMPUTE = ("forward", "backward", "compute")
"""The parts whose time grows with the batch size."""
# Compute that is shorter than this is taken as this long, so that speeds stay finite.
_LEAST_COMPUTE_S = 1e-9
TELEMETRY = ("step", "compute_s", "wait_s", "sync_s", "step_s", "batch")
"""The columns of telemetry in the comparison of ranks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankSteps:
    """R ranks over the K steps that all ranks have; arrays are (R, K) seconds unless said otherwise."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    """(R,) the machine of each rank, "" where the source does not name it."""
    steps: Ints
    """(K,) step numbers."""
    parts: Mapping[str, Floats]
    """A rank's own work by part: input, forward, backward, optimizer and host; in telemetry compute and host."""
    wait_s: Floats
    """Waiting for other ranks."""
    exposed_s: Floats
    """Communication in which a rank computed nothing."""
    step_s: Floats
    after: Mapping[str, Floats] | None = None
    """By part, the time of ``parts`` after the step's last collective, for which other ranks wait in the next step; None: not
    known."""
    gap_after_s: Floats | None = None
    """The longest gap (see ``gap_s``) after the step's last collective; None: not known."""
    gap_s: Floats | None = None
    """The longest time in a step in which a rank ran nothing and waited for no other rank; None: not known."""
    work: Floats | None = None
    """Amount of work: samples in telemetry, input elements of matrix products and convolutions in a trace; None: not known."""
    samples: Floats | None = None
    """Samples of each step, None where the source does not count them."""
    offsets_s: Floats | None = None
    """(R,) how far each clock is ahead of the median clock; None: not known."""
    late_s: Floats | None = None
    """(R, m) for m steps, how much later than the first rank each sees the end of a step's longest collective; None: the ranks
    do not share one clock, or it is not known."""
    ring: int = -1
    """The difference between the number of the rank to which each rank sends in a ring and its own: -1 in gloo."""
    remarks: tuple[str, ...] = ()
    """Sentences for the user."""
    timeline: list[tuple[str, list[tuple[float, float, str]]]] = field(default_factory=list)
    """For each rank its name and the (start, end, activity) rows of some steps."""

    def between_meetings(self) -> RankSteps:
        """Return the same steps, but each from the last collective of the step before to its own last one.

        There the ranks wait for each other. Work of a rank after a step's last collective then counts in the next step. The
        first step, whose predecessor is not known, gets the rank's median over all steps for it. Steps without ``after``,
        ``gap_s`` or ``gap_after_s``, as of telemetry, are returned unchanged.
        """
        if self.after is None or self.gap_s is None or self.gap_after_s is None:
            return self

        def carried(after_s: Floats) -> Floats:
            """Return (R, K) the seconds that move into each step from the end of the one before.

            ``after_s`` (R, K): the seconds after each step's last collective.
            """
            into_first_s = np.median(after_s, axis=1, keepdims=True)
            carried_s: Floats = np.concatenate([into_first_s, after_s[:, :-1]], axis=1)
            return carried_s

        parts: dict[str, Floats] = {}
        for name, whole_s in self.parts.items():
            after_s = self.after[name]
            parts[name] = np.add(whole_s - after_s, carried(after_s))
        own_s: Floats = np.sum(list(parts.values()), axis=0)
        # The longest gap before the last collective is known only if it is the whole step's longest; else 0 is taken.
        gap_before_s = np.where(self.gap_s > self.gap_after_s, self.gap_s, 0.0)
        gap_s = np.maximum(gap_before_s, carried(self.gap_after_s))
        step_s = own_s + self.wait_s + self.exposed_s
        return replace(self, parts=parts, step_s=step_s, gap_s=gap_s, after=None)

    def speed(self, batch: float = 1.0) -> Floats:
        """Return (R, K) the samples per second of each rank's own compute in each step, without waiting for others.

        ``batch``: samples of a step, where the source does not count them.
        """
        samples = self.samples if self.samples is not None else np.full(self.step_s.shape, batch)
        speed: Floats = samples / np.maximum(self.compute_s, _LEAST_COMPUTE_S)
        return speed

    @property
    def own_s(self) -> Floats:
        """(R, K) seconds of each rank's own work."""
        total: Floats = np.sum(list(self.parts.values()), axis=0)
        return total

    @property
    def compute_s(self) -> Floats:
        """(R, K) seconds of own work that grow with the batch size."""
        total: Floats = np.sum([part_s for name, part_s in self.parts.items() if name in COMPUTE], axis=0)
        return total


def of_telemetry(frame: pd.DataFrame, where: str, tell: Tell = log_remark) -> RankSteps:
    """Return the steps of a telemetry table's last run that all ranks have, in the parts compute and host.

    ``where``: the table, for errors; ``tell`` receives a remark if there are several runs. Raises InputError, with row and
    column, for a bad value, and for fewer than two ranks or no common step.
    """
    rows = check_rows(frame, where, tell)
    rows = rows[rows["batch"] > 0]
    ranks = sorted({int(rank) for rank in rows["rank"]})
    distinct_rows = rows.drop_duplicates(["rank", "step"], keep="last").sort_values(["rank", "step"])
    ranks_with_step = distinct_rows.groupby("step")["rank"].transform("size")
    common_rows = distinct_rows[ranks_with_step == len(ranks)]
    if len(ranks) < 2 or common_rows.empty:
        problem = f"has {len(ranks)} ranks with no step in common" if len(ranks) > 1 else "has one rank only"
        raise InputError(where, problem, "give the telemetry of all ranks of one run")
    # The rows are sorted by rank, then step, and every rank has every step.
    columns = {name: common_rows[name].to_numpy(dtype=np.float64).reshape(len(ranks), -1) for name in TELEMETRY}
    return of_columns(columns, ranks)


def of_columns(columns: Mapping[str, Floats], ranks: Sequence[int]) -> RankSteps:
    """Return the steps of telemetry from an array (R, K) for each column of :data:`TELEMETRY`; ``ranks``: the R numbers.

    The part host is what a step takes beside compute, waiting and synchronisation.
    """
    host_s = columns["step_s"] - columns["compute_s"] - columns["wait_s"] - columns["sync_s"]
    return RankSteps(
        ranks=tuple(ranks),
        nodes=("",) * len(ranks),
        steps=columns["step"][0].astype(np.int64),
        parts={"compute": columns["compute_s"], "host": np.maximum(host_s, 0.0)},
        wait_s=columns["wait_s"],
        exposed_s=columns["sync_s"],
        step_s=columns["step_s"],
        work=columns["batch"],
        samples=columns["batch"],
    )
