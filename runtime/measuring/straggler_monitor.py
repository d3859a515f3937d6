"""Reports slow ranks while the job runs, by the analysis of ``ddltool stragglers`` every few steps.

Start at :func:`watch_ranks`. The ranks' rows are exchanged by one asynchronous gather: it starts at the end of a step
and is read at the end of the next, when it is complete. Only rank 0 analyses them (a *look*). Its cost is sent with the
next gather, and all ranks choose the number of steps to the next look so that the cost stays below :data:`SHARE` of the
time.
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
"""Largest share of the steps' time that looks may cost rank 0."""
_LONGEST = 100
"""The steps between two looks may grow to this many times the requested number."""
_SKIPPED = 5
"""Number of first steps that are left out as warm-up."""


def watch_ranks(
    hook: Hook, *, every: int = 100, tell: Callable[[str, StragglersResult], None] | None = None
) -> StragglerMonitor:
    """Report on rank 0, while the job trains, which rank delays the others, why, and what to do; return the monitor.

    Args:
        hook: one that writes telemetry (``runtime.attach(..., telemetry=FILE)``); call this on every rank after it.
        every: steps between two looks, at least 10; more are used where steps are so short that looks would cost too
            much.
        tell: called on rank 0 with a sentence and the result of every look; None: log a warning when the finding
            changes.

    Raises InputError for a hook without telemetry, for a single process and for ``every`` below 10.
    """
    recorder = hook.recorder
    side = DistributedJob.this().side
    if recorder is None or side is None:
        raise InputError("watch_ranks", "needs telemetry of several ranks", "attach(..., telemetry=FILE) before it")
    if every < 10:
        raise InputError("every", f"is {every}", "at least 10 steps")
    monitor = StragglerMonitor(recorder, side, every, tell)
    recorder.watch = monitor
    return monitor


class StragglerMonitor:
    """Collects the steps of one rank, and on rank 0 looks at those of all; made by :func:`watch_ranks`.

    Attributes:
        stretch: steps from one look to the next, at least ``every``; the same on all ranks.
        cost_s: CPU seconds of rank 0's last look; 0 elsewhere.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        side: dist.ProcessGroup,
        every: int,
        tell: Callable[[str, StragglersResult], None] | None,
    ) -> None:
        """Prepare to gather rows over ``side``, a gloo group of all ranks.

        ``recorder``: of this rank's steps; ``every`` is also how many steps a look analyses; ``tell``: see
        :func:`watch_ranks`.
        """
        self._row = recorder.row
        self._feed = str(recorder.path)
        self._ranks = dist.get_world_size(side)
        self._is_first = dist.get_rank(side) == 0
        self._side = side
        self._every = every
        self.stretch = every
        self._tell = tell
        self._steps: list[ObservedStep] = []
        # The gather under way, and the tensors, by rank, that it fills; None: there is none.
        self._pending: tuple[dist.Work, list[torch.Tensor]] | None = None
        self._told_findings: object = None  # those of the last look
        self.cost_s = 0.0

    def __call__(self, step: ObservedStep) -> None:
        """Note a step; all ranks call this for the same steps. A gather that the step before has started is read first.

        After ``stretch`` steps it starts a gather of the rows of the last ``every``.
        """
        if self._pending is not None:
            work, gathered = self._pending
            self._pending = None
            work.wait()
            self._read(torch.stack(gathered))
        if step.number >= _SKIPPED:
            self._steps.append(step)
        if len(self._steps) >= self.stretch:
            steps = self._steps[-self._every :]
            self._steps = []
            rows = [self._row(each) for each in steps]
            values = [[getattr(row, name) for name in TELEMETRY] for row in rows]
            # (1 + steps, columns): the first row is filled with the cost of the last look.
            own_rows = torch.tensor([[self.cost_s] * len(TELEMETRY), *values], dtype=torch.float64)
            rows_of_ranks = [torch.empty_like(own_rows) for _ in range(self._ranks)]
            work = dist.all_gather(rows_of_ranks, own_rows, group=self._side, async_op=True)
            self._pending = work, rows_of_ranks

    def _read(self, rows: torch.Tensor) -> None:
        """Choose the steps to the next look from all ranks' rows, and on rank 0 analyse and report them.

        ``rows``: (ranks, 1 + steps, columns); each rank's first row is filled with the CPU seconds of its last look.
        Rows of different steps, which ranks may have sent, are not analysed.
        """
        values = rows.numpy()
        columns = {name: values[:, 1:, column] for column, name in enumerate(TELEMETRY)}
        cost_s = float(values[:, 0].max())
        step_s = float(columns["step_s"].mean())
        affordable_steps = ceil(cost_s / (SHARE * max(step_s, 1e-9)))
        self.stretch = min(max(self._every, affordable_steps), _LONGEST * self._every)
        if not self._is_first or (columns["step"] != columns["step"][0]).any():
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
