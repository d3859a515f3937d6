"""Which rank is slow, told while the job runs: the verdict of ``ddltool stragglers`` on every so many steps.

Start at :func:`watch_ranks`. The ranks' rows travel in one gather that nobody waits for: it begins at the end of a step
and is read at the end of the next, by when all have come. Rank 0 alone looks at them. What that cost it travels with
the next gather, and all ranks make the next stretch of steps as long as keeps the cost below :data:`SHARE` of the time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import ceil

import torch
import torch.distributed as dist

from ddltool.analyzers.job.diagnosing.diagnosis import Feeds, diagnose
from ddltool.analyzers.step.measured.ranks import TELEMETRY, of_columns
from ddltool.errors import InputError
from ddltool.results import StragglersResult
from ddltool.runtime.hook.attaching import Hook
from ddltool.runtime.hook.telemetry import ObservedStep, StepRecorder
from ddltool.runtime.processes.job import DistributedJob

log = logging.getLogger(__name__)
SHARE = 0.001
"""Of a step's time, what looking may cost rank 0."""
_LONGEST = 100
"""The steps between two looks may grow to so many times what was asked for."""
_SKIPPED = 5
"""The first steps are warm-up, and not looked at."""


def watch_ranks(
    hook: Hook, *, every: int = 100, tell: Callable[[str, StragglersResult], None] | None = None
) -> StragglerMonitor:
    """Tell on rank 0 which rank holds the others up, why, and what to do: every ``every`` steps, or where the answer changes.

    Args:
        hook: one that writes telemetry (``runtime.attach(..., telemetry=FILE)``); call this on every rank after it.
        every: steps between two looks, at least 10; more where steps are so short that looking would cost too much.
        tell: is called on rank 0 with the sentence and the result of every look; None: stderr, where the answer
            changes.

    Raises InputError for a hook without telemetry, for one process alone and for too few steps.
    """
    recorder, side = hook.recorder, DistributedJob.this().side
    if recorder is None or side is None:
        raise InputError("watch_ranks", "needs telemetry of several ranks", "attach(..., telemetry=FILE) before it")
    if every < 10:
        raise InputError("every", f"is {every}", "at least 10 steps")
    recorder.watch = watch = StragglerMonitor(recorder, side, every, tell)
    return watch


class StragglerMonitor:
    """Takes the steps of one rank; made by :func:`watch_ranks`."""

    def __init__(
        self,
        recorder: StepRecorder,
        side: dist.ProcessGroup,
        every: int,
        tell: Callable[[str, StragglersResult], None] | None,
    ) -> None:
        """Prepare to gather rows over ``side``, a gloo group of all ranks; rank 0 alone looks at them."""
        self._row, self._feed = recorder.row, str(recorder.path)
        self._ranks, self._is_first, self._side = dist.get_world_size(side), dist.get_rank(side) == 0, side
        self._every = self.stretch = (
            every  # steps between two looks: as asked for, and as long as looking costs too much
        )
        self._tell = tell
        self._steps: list[ObservedStep] = []
        self._pending: tuple[dist.Work, list[torch.Tensor]] | None = None
        self._told_findings: object = None
        self.cost_s = 0.0

    def __call__(self, step: ObservedStep) -> None:
        """Take a step; all ranks take the same ones. Rows of other ranks, asked for at the step before, are read first."""
        if self._pending is not None:
            work, gathered = self._pending
            self._pending = None
            work.wait()
            self._read(torch.stack(gathered))
        if step.number >= _SKIPPED:
            self._steps.append(step)
        if len(self._steps) >= self.stretch:
            steps, self._steps = self._steps[-self._every :], []
            rows = [self._row(one) for one in steps]
            own_rows = torch.tensor(
                [[self.cost_s] * len(TELEMETRY), *([getattr(row, name) for name in TELEMETRY] for row in rows)],
                dtype=torch.float64,
            )
            rows_of_ranks = [torch.empty_like(own_rows) for _ in range(self._ranks)]
            self._pending = dist.all_gather(rows_of_ranks, own_rows, group=self._side, async_op=True), rows_of_ranks

    def _read(self, rows: torch.Tensor) -> None:
        """Read the rows of all ranks, (ranks, 1 + steps, columns): choose when to look next, and on rank 0 look.

        The first row of each rank says what its last look cost, in seconds of CPU.
        """
        values = rows.numpy()
        columns = {name: values[:, 1:, column] for column, name in enumerate(TELEMETRY)}
        cost_s, step_s = float(values[:, 0].max()), float(columns["step_s"].mean())
        affordable_steps = ceil(cost_s / (SHARE * max(step_s, 1e-9)))
        self.stretch = min(max(self._every, affordable_steps), _LONGEST * self._every)
        if not self._is_first or (columns["step"] != columns["step"][0]).any():  # ranks that sent other steps
            return
        begin = time.thread_time()
        run = of_columns(columns, range(len(values)))
        result = diagnose(run, "telemetry", Feeds.all(self._feed))
        findings = [(finding.rank, finding.cause) for finding in result.findings]
        sentence = f"steps {run.steps[0]} to {run.steps[-1]}: {result.verdict}"
        if self._tell is not None:
            self._tell(sentence, result)
        elif findings != self._told_findings:
            log.warning("%s", sentence)
        self._told_findings = findings
        self.cost_s = time.thread_time() - begin
