"""Rank 0's part: from all ranks' rows to batch sizes, with a log line and a line in a file for what is worth telling."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.balancing.control import Policy, Report, TrialPolicy
from ddltool.artifacts import kind_of
from ddltool.balance_events import BalanceEvent
from ddltool.runtime.hook.telemetry import check_target

Floats = NDArray[np.float64]
log = logging.getLogger(__name__)


class Manager:
    """Chooses batch sizes on rank 0: what :class:`~ddltool.runtime.hook.agreement.Agreement` calls.

    The first step is not judged: it pays for what later ones find ready. Nor are steps of fewer samples (the end of an
    epoch), whose times say little about full ones. A step of several full batches (gradient accumulation) is judged as
    one of their mean.

    Args:
        policy: what chooses.
        events: JSON Lines file for what happens, emptied now; one that cannot be written later on ends the events, not the
            training.
        skip: first steps that are not judged.

    Raises InputError for a file that cannot be written or holds something other than events.
    """

    def __init__(self, policy: Policy, events: Path | None = None, skip: int = 1) -> None:
        self._policy = policy
        self._events = events
        self._skip = skip
        self._step = 0
        self._advised: int | None = None
        self._lock = threading.Lock()
        self.total = int(policy.sizes.sum())
        if events is not None:
            check_target(events, kind_of(BalanceEvent), "balancing events")
            events.write_bytes(b"")

    def __call__(self, rows: Floats) -> Floats:
        """Return (n,) sizes from (n, 5) rows of samples, seconds, memory in use, CPU and memory available."""
        with self._lock:
            step, self._step = self._step, self._step + 1
            passes, rest = divmod(round(float(rows[:, 0].sum())), self.total)
            full = rest == 0 and passes >= 1 and (rows[:, 0] >= passes).all()
            if step < self._skip or not full:
                return self._policy.sizes.astype(np.float64)
            if passes > 1:
                rows = np.concatenate((rows[:, :2] / passes, rows[:, 2:]), axis=1)
            before = self._policy.sizes.tolist()
            choice = self._policy.choose(Report.of(rows))
        removed = choice.remove if choice.remove != self._advised else None
        seconds = rows[:, 1]
        if choice.fine_tuning:
            self._tell("fine_tuning", step, choice.sizes, seconds)
        if list(choice.sizes) != before:
            log.debug("step %d: batch sizes %s", step, choice.sizes)
            self._tell("resize", step, choice.sizes, seconds)
        if removed is not None:
            log.warning(
                "step %d: remove this straggler: rank %d is the slowest (%.3g s) with only %d samples left; training "
                "without it would be faster",
                *(step, removed, seconds[removed], choice.sizes[removed]),
            )
            self._tell("remove_straggler", step, choice.sizes, seconds, removed)
            self._advised = removed
        return np.array(choice.sizes, dtype=np.float64)

    def _tell(
        self,
        event: Literal["resize", "fine_tuning", "remove_straggler"],
        step: int,
        sizes: tuple[int, ...],
        seconds: Floats,
        rank: int | None = None,
    ) -> None:
        if self._events is None:  # a line about 96 ranks takes longer to make than their sizes to choose
            return
        shown = [float(f"{value:.4g}") for value in seconds]
        row = BalanceEvent(event=event, step=step, sizes=list(sizes), seconds=shown, rank=rank)
        try:
            with self._events.open("ab", buffering=0) as file:
                file.write(row.model_dump_json().encode() + b"\n")
        except OSError as error:
            log.warning("%s: balancing events stop, training goes on (%s)", self._events, error.strerror)
            self._events = None

    def state_dict(self) -> dict[str, Any]:
        """Return what Algorithm 2 has found out; empty for predictors, which learn anew."""
        with self._lock:
            return self._policy.state_dict() if isinstance(self._policy, TrialPolicy) else {}

    def load_state_dict(self, state: dict[str, Any], sizes: tuple[int, ...]) -> None:
        """Go on with (n,) ``sizes``, and with Algorithm 2's state where there is one for them."""
        with self._lock:
            if state and isinstance(self._policy, TrialPolicy) and state.get("sizes") == list(sizes):
                self._policy.load_state_dict(state)
            else:
                self._policy.sizes = np.array(sizes, dtype=np.int64)
