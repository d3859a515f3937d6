"""A parameter server's telemetry: JSON Lines, and the same figures summed up in memory.

Start at :class:`SyncLog`. One file per server, written by it alone; each line is a row of :mod:`ddltool.telemetry`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path

from ddltool.artifacts import kind_of
from ddltool.runtime.processes.line_files import LineFile, new_run
from ddltool.telemetry import StepRow, SummaryRow, SyncEvent

log = logging.getLogger(__name__)


class SyncLog:
    """Sums up and writes one server's rows.

    Attributes:
        wait_s: per worker, seconds in which its transfers have waited for other workers.
        staleness: by staleness, in updates, the number of steps whose gradients were used with it.
        run: name of this run of the job, the same on all servers.
    """

    def __init__(self, workers: int, path: Path | None) -> None:
        """Start with nothing summed up. ``workers``: their number, late ones included; ``path`` None: nothing is written."""
        self.path = path
        self.run = new_run()  # on the other servers replaced by server 0's when the job begins
        self.wait_s = [0.0] * workers
        self.staleness: Counter[int] = Counter()
        self._began_s = time.monotonic()
        self._file = LineFile()

    def open(self) -> None:
        """Open the file for appending. Raises InputError if it cannot be written or holds something else."""
        self._file = LineFile(self.path, kind_of(SyncEvent), "sync telemetry")

    def start(self) -> None:
        """Make this moment the zero of the times in all rows."""
        self._began_s = time.monotonic()

    @property
    def time_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began_s

    def add(self, row: SyncEvent) -> None:
        """Write a row at once, so that a killed server loses none; if writing fails, training goes on without telemetry."""
        if isinstance(row, StepRow):
            self.staleness[row.staleness] += 1
        if self._file.is_open:
            self._file.write([row.model_copy(update={"run": self.run}).model_dump_json()])

    def close(self, policy: str, steps: list[int], updates: int) -> None:
        """Write the summary row and close the file.

        ``policy``: its description; ``steps``: made by each worker; ``updates``: mean number made of each parameter.
        """
        time_s = self.time_s
        self.add(
            SummaryRow(
                time_s=time_s,
                policy=policy,
                steps=steps,
                updates=updates,
                updates_per_s=updates / time_s if time_s else 0.0,
                wait_s=self.wait_s,
                staleness=dict(sorted(self.staleness.items())),
            )
        )
        self._file.close()
