"""Rank 0's part: from all ranks' rows to batch sizes, with a log line and a line in a file for what is worth telling."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.balancing.control import Policy, Report, TrialPolicy
from ddltool.artifacts import check_writable
from ddltool.balance_events import BalanceEvent
from ddltool.errors import InputError

Floats = NDArray[np.float64]
log = logging.getLogger(__name__)


class EventFile:
    """Appends events as JSON Lines. A file that cannot be written later on ends the events, not the training."""

    def __init__(self, path: Path | None) -> None:
        """Empty the file. Raises InputError where it cannot be written or holds something other than events."""
        self._path = path
        if path is None:
            return
        check_writable(path)
        if path.exists():
            with path.open("rb") as file:
                beginning = file.read(4096)
            if beginning.strip() and BalanceEvent.KIND.encode() not in beginning.splitlines()[0]:
                raise InputError(
                    str(path), "holds something other than balancing events", "move it or name another file"
                )
        path.write_bytes(b"")

    @property
    def wanted(self) -> bool:
        """Whether events are written at all."""
        return self._path is not None

    def add(self, event: BalanceEvent) -> None:
        """Append one line, in one write."""
        if self._path is None:
            return
        line = event.model_dump_json().encode() + b"\n"
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("%s: balancing events stop, training goes on (%s)", self._path, error.strerror)
            self._path = None


class Manager:
    """Chooses batch sizes on rank 0: what :class:`~ddltool.runtime.balancing.exchange.Exchange` calls.

    The first step is not judged: it pays for what later ones find ready. Nor are steps of fewer samples (the end of an
    epoch), whose times say little about full ones. A step of several full batches (gradient accumulation) is judged as
    one of their mean.
    """

    def __init__(self, policy: Policy, events: EventFile, skip: int = 1) -> None:
        self._policy = policy
        self._events = events
        self._skip = skip
        self._step = 0
        self._advised: int | None = None
        self._lock = threading.Lock()
        self.total = int(policy.sizes.sum())

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
            size = choice.sizes[removed]
            log.warning(
                "step %d: remove this straggler: rank %d is the slowest (%.3g s) with only %d samples left; training "
                "without it would be faster",
                *(step, removed, seconds[removed], size),
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
        if self._events.wanted:  # a line about 96 ranks takes longer to make than their sizes to choose
            shown = [float(f"{value:.4g}") for value in seconds]
            self._events.add(BalanceEvent(event=event, step=step, sizes=list(sizes), seconds=shown, rank=rank))

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
