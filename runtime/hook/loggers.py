"""Telemetry where people already look: a step's times as TensorBoard scalars, or in anything with ``log`` (W&B, MLflow)."""

from __future__ import annotations

import math
from typing import Any

from ddltool.errors import InputError
from ddltool.runtime.hook.attaching import Hook
from ddltool.runtime.hook.telemetry import ObservedStep, StepRecorder

FIELDS = ("step_s", "compute_s", "wait_s", "sync_s", "data_s", "batch", "total_batch", "memory_bytes")
_PREFIX = "ddltool/"


def log_steps(hook: Hook, logger: Any, *, every: int = 1) -> None:
    """Give ``logger`` the times, batch and memory of each ``every``-th step of this rank, as telemetry has them.

    Args:
        hook: one that writes telemetry; call this after :func:`attach`, on the ranks that have a logger.
        logger: a ``SummaryWriter`` (``add_scalar(name, value, step)``), a function of a dict, or what has ``log(dict)``, such
            as a run of W&B; names begin with ``ddltool/``, and the dict has ``ddltool/step``.
        every: steps from one to the next.

    A step is given when the next one ends: the slowest rank's arrival is known then. Raises InputError for a hook without
    telemetry, and for a logger that is none of these.
    """
    if hook.recorder is None:
        raise InputError(
            "log_steps", "needs telemetry", "attach(..., telemetry=FILE), and model and optimizer, before it"
        )
    if every < 1:
        raise InputError("every", f"is {every}", "give 1 or more steps")
    if not (hasattr(logger, "add_scalar") or hasattr(logger, "log") or callable(logger)):
        problem = f"a {type(logger).__name__} has neither add_scalar nor log"
        raise InputError("logger", problem, "give a SummaryWriter, a run, or a function of a dict")
    hook.recorder.watch = _StepLogger(hook.recorder, logger, every)


class _StepLogger:
    def __init__(self, recorder: StepRecorder, logger: Any, every: int) -> None:
        self._row, self._logger, self._every = recorder.row, logger, every
        self._also = recorder.watch
        self._last: ObservedStep | None = None

    def __call__(self, step: ObservedStep) -> None:
        """Give the step before this one to the logger; who watched before goes on."""
        if self._also is not None:
            self._also(step)
        last, self._last = self._last, step
        if last is None or last.number % self._every:
            return
        row = self._row(last).model_dump()
        values = {f"{_PREFIX}{name}": float(row[name]) for name in FIELDS if row.get(name) is not None}
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        if hasattr(self._logger, "add_scalar"):
            for name, value in values.items():
                self._logger.add_scalar(name, value, last.number)
        else:
            log = self._logger.log if hasattr(self._logger, "log") else self._logger
            log({**values, f"{_PREFIX}step": last.number})
