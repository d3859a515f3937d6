"""Sends a step's measured times to TensorBoard, or to anything with a ``log`` method. Start at :func:`log_steps`."""

from __future__ import annotations

import math
from typing import Any

from ddltool.errors import InputError
from ddltool.runtime.hook.attaching import Hook
from ddltool.runtime.hook.telemetry import ObservedStep, StepRecorder

FIELDS = ("step_s", "compute_s", "wait_s", "sync_s", "data_s", "batch", "total_batch", "memory_bytes")
_PREFIX = "ddltool/"


def log_steps(hook: Hook, logger: Any, *, every: int = 1) -> None:
    """Log the times, batch and memory of each ``every``-th step of this rank with ``logger``, as in telemetry.

    A step is logged when the next one ends, because only then the moment is known when the slowest rank was ready.

    Args:
        hook: one that writes telemetry; call this after :func:`attach`, on the ranks that have a logger.
        logger: a ``SummaryWriter`` (``add_scalar(name, value, step)``), an object with ``log(dict)`` such as a run of
            W&B, or a function of a dict. Names begin with ``ddltool/``; a dict also has ``ddltool/step``.
        every: number of steps from one that is logged to the next.

    Raises InputError for a hook without telemetry, a logger of another kind, and ``every`` below 1.
    """
    if hook.recorder is None:
        remedy = "attach(..., telemetry=FILE), and model and optimizer, before it"
        raise InputError("log_steps", "needs telemetry", remedy)
    if every < 1:
        raise InputError("every", f"is {every}", "give 1 or more steps")
    if not (hasattr(logger, "add_scalar") or hasattr(logger, "log") or callable(logger)):
        problem = f"a {type(logger).__name__} has neither add_scalar nor log"
        raise InputError("logger", problem, "give a SummaryWriter, a run, or a function of a dict")
    hook.recorder.watch = _StepLogger(hook.recorder, logger, every)


class _StepLogger:
    """Receives the recorder's steps, and passes them on to the recorder's earlier receiver, if there was one."""

    def __init__(self, recorder: StepRecorder, logger: Any, every: int) -> None:
        self._row = recorder.row
        self._logger = logger
        self._every = every
        self._also = recorder.watch
        self._last: ObservedStep | None = None

    def __call__(self, step: ObservedStep) -> None:
        """Pass a step on, and log the step before it if that is an ``every``-th one; values not finite are left out."""
        if self._also is not None:
            self._also(step)
        previous = self._last
        self._last = step
        if previous is None or previous.number % self._every:
            return
        row = self._row(previous).model_dump()
        values = {f"{_PREFIX}{name}": float(row[name]) for name in FIELDS if row.get(name) is not None}
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        if hasattr(self._logger, "add_scalar"):
            for name, value in values.items():
                self._logger.add_scalar(name, value, previous.number)
        else:
            log = self._logger.log if hasattr(self._logger, "log") else self._logger
            log({**values, f"{_PREFIX}step": previous.number})
