"""Batch sizes on GPU clusters, found by trial while the job runs (LB-BSP, section 3.3.2 and Algorithm 2).

Start at :meth:`Algorithm2.observe`. Time over batch size is not known, only that it never falls. In each iteration the *leader*
has the shortest time among the workers with memory to spare, and the *straggler* the longest time. A leader that has been
faster than the straggler in every iteration of a window takes some of its samples. The fast approach moves 5 samples after a
window of 5 iterations. When a leader turns out to have been slower than the straggler before, which means that samples move
to and fro, fine tuning begins: 1 sample after a window of 20. The total never changes.

There are two additions to the paper's listing. The listing says "remove this straggler" as soon as that has no more samples
than one step, and changes nothing any more; in the fast approach that may be 5 samples, some of which fine tuning could still
move. Here it ends the fast approach, and only fine tuning gives the advice (``strict`` follows the listing). And where sizes
come into force some iterations after they were chosen, as they do when chosen in the background, times of the old sizes would
move the same samples again: so :meth:`Algorithm2.observe` is told which sizes the times belong to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ddltool.analyzers.job.balancing.sizing import checked_sizes
from ddltool.arrays import Floats
from ddltool.errors import InputError

MEMORY_SHARE = 0.95
"""Share of its memory in use above which a worker takes no more samples."""


class Phase(StrEnum):
    """Whether batch sizes change by large or by small steps."""

    APPROACH = "approach"
    FINE = "fine"


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm2Settings:
    """Steps and windows; the defaults are the paper's."""

    step: int = 5
    """Samples that move at a time in the fast approach."""
    window: int = 5
    """Iterations in which the leader must have been faster than the straggler, in the fast approach."""
    fine_step: int = 1
    fine_window: int = 20
    strict: bool = False
    """Whether to advise the removal of a straggler also in the fast approach, as the listing does."""
    renew: bool = False
    """Whether to return to the fast approach when speeds have changed so much that it is needed; the listing never does."""

    def __post_init__(self) -> None:
        """Raise InputError for a step or window below 1."""
        for name in ("step", "window", "fine_step", "fine_window"):
            if getattr(self, name) < 1:
                raise InputError(name, f"is {getattr(self, name)}", "give a whole number >= 1")


class SizesDecision(NamedTuple):
    """The decision after one iteration."""

    sizes: tuple[int, ...]
    """Samples of each worker from now on; their sum never changes."""
    leader: int | None
    """Index of the leader; None: no worker may take more samples."""
    straggler: int
    phase: Phase
    """The phase after the decision."""
    moved: int
    """Samples moved from the straggler to the leader."""
    remove: bool
    """Whether to train without the straggler: it is the slowest although it has hardly any samples left."""


class Algorithm2:
    """The state of Algorithm 2 for n workers.

    Args:
        sizes: (n,) samples at the start, each at least ``least``; ``sum(sizes)`` is kept.
        limits: (n,) most samples of each worker; None: memory use alone limits them.
        settings: steps and windows.
        least: samples that each worker keeps; the listing's is 1.

    Raises InputError for sizes below ``least`` or above their limits.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        limits: Sequence[int] | None = None,
        settings: Algorithm2Settings | None = None,
        least: int = 1,
    ) -> None:
        """Check sizes and limits, and begin in the fast approach without any history."""
        self.settings = settings if settings is not None else Algorithm2Settings()
        self.sizes = checked_sizes(sizes, least)
        self.least = least
        self.limits = np.full(len(self.sizes), np.iinfo(np.int64).max) if limits is None else np.array(limits)
        if self.limits.shape != self.sizes.shape or (self.limits < self.sizes).any():
            raise InputError("limits", f"is {limits}", f"give each of {len(self.sizes)} workers at least its batch")
        self.phase = Phase.APPROACH
        longest = max(self.settings.window, self.settings.fine_window)
        self._recent: deque[Floats] = deque(maxlen=longest)
        """(n,) seconds of each of the last iterations, the latest last."""
        # [a, b]: whether a was slower than b in some iteration; it replaces the history of all iterations.
        self._was_slower = np.zeros((len(self.sizes), len(self.sizes)), dtype=bool)

    def observe(
        self, seconds: ArrayLike, memory: ArrayLike | None = None, sizes: ArrayLike | None = None
    ) -> SizesDecision:
        """Take an iteration's times and return the batch sizes to use from now on.

        Args:
            seconds: (n,) batch processing times, with communication but without waiting for others; finite and above 0.
            memory: (n,) shares of each worker's memory in use, 0 to 1; None: no worker is short of memory.
            sizes: (n,) samples that took these times; None: those of the last decision. Where leader or straggler had
                other sizes than decided, nothing is moved.

        O(n^2). Raises InputError for times or shares that are not such numbers.
        """
        seconds_array = np.asarray(seconds, dtype=np.float64)
        memory_shares = np.zeros(len(seconds_array)) if memory is None else np.asarray(memory, dtype=np.float64)
        self._check_times(seconds_array, memory_shares)
        self._recent.append(seconds_array)
        self._was_slower |= seconds_array[:, None] > seconds_array[None, :]
        straggler = int(np.argmax(seconds_array))
        leader = self._leader(seconds_array, memory_shares)
        moved = 0
        remove = False
        timed_sizes = self.sizes if sizes is None else np.asarray(sizes)
        if leader is not None and leader != straggler:
            pair = [leader, straggler]
            # times of older sizes would move the same samples again
            if (timed_sizes[pair] == self.sizes[pair]).all():
                moved, remove = self._move_or_fine_tune(leader, straggler)
        if moved:
            self.sizes[leader] += moved
            self.sizes[straggler] -= moved
        sizes_now = tuple(self.sizes.tolist())
        return SizesDecision(sizes_now, leader, straggler, self.phase, moved, remove)

    def _check_times(self, seconds: Floats, memory: Floats) -> None:
        """Raise InputError unless there are n finite ``seconds`` above 0, and n finite shares of ``memory`` of 0 or more."""
        smallest_positive = np.nextafter(0, 1)
        for name, values, lowest in (("seconds", seconds, smallest_positive), ("memory", memory, 0.0)):
            if values.shape != self.sizes.shape:
                raise InputError(name, f"has shape {values.shape}", f"give one number for each of {len(self.sizes)}")
            is_wrong = ~(np.isfinite(values) & (values >= lowest))
            if is_wrong.any():
                worker = int(np.argmax(is_wrong))
                raise InputError(f"{name}[{worker}]", f"is {values[worker]:g}", "give finite numbers above 0")

    def _leader(self, seconds: Floats, memory: Floats) -> int | None:
        """Return the index of the fastest worker that may take one more step of samples; None: no worker may.

        ``seconds`` (n,) of the last iteration, ``memory`` (n,) shares in use.
        """
        has_room = (memory <= MEMORY_SHARE) & (self.sizes + self._step <= self.limits)
        return int(np.argmin(np.where(has_room, seconds, np.inf))) if has_room.any() else None

    @property
    def _step(self) -> int:
        """Samples that move at a time in the present phase."""
        return self.settings.step if self.phase is Phase.APPROACH else self.settings.fine_step

    def _move_or_fine_tune(self, leader: int, straggler: int) -> tuple[int, bool]:
        """Return (samples to move from ``straggler`` to ``leader``, whether removing the straggler is advised).

        Both are indices of workers. Samples move when the leader was faster in the whole window. Changes the phase to fine
        tuning where the leader was once slower than the straggler, which shows that steps are too large, and where the
        straggler has not enough samples for a step; with ``settings.renew`` back to the fast approach when speeds change.
        """
        if self.settings.renew and self.phase is Phase.FINE and self._still_far_apart(leader, straggler):
            self.phase = Phase.APPROACH
            self._was_slower[:] = False  # the past says nothing about the changed speeds
        step = self._step
        if self.sizes[straggler] - step < self.least:
            if self.phase is Phase.FINE or self.settings.strict:
                return 0, True
            self.phase = Phase.FINE  # whose smaller step may still be possible
            return 0, False
        window = self.settings.window if self.phase is Phase.APPROACH else self.settings.fine_window
        if len(self._recent) >= window:
            recent = list(self._recent)[-window:]
            if all(iteration_s[leader] < iteration_s[straggler] for iteration_s in recent):
                return step, False
        if self._was_slower[leader, straggler]:
            self.phase = Phase.FINE
        return 0, False

    def _still_far_apart(self, leader: int, straggler: int) -> bool:
        """Return whether the leader would still be faster after a step of the fast approach, in each iteration of the window.

        Times are taken as proportional to samples; GPUs' times change less than that, so a step is never too large. False where
        the step would break a limit or the window is not yet full.
        """
        sizes = self.sizes
        step = self.settings.step
        window = self.settings.window
        at_limit = sizes[straggler] - step < self.least or sizes[leader] + step > self.limits[leader]
        if at_limit or len(self._recent) < window:
            return False
        leader_growth = (sizes[leader] + step) / sizes[leader]
        straggler_shrink = (sizes[straggler] - step) / sizes[straggler]
        return all(
            iteration_s[leader] * leader_growth < iteration_s[straggler] * straggler_shrink
            for iteration_s in list(self._recent)[-window:]
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint as plain numbers, text and lists.

        ``sizes`` (n,) samples, ``phase`` its name, ``recent`` (k, n) seconds of the last iterations, and ``was_slower`` (n, n)
        whether the first worker was ever slower than the second.
        """
        return {
            "sizes": self.sizes.tolist(),
            "phase": self.phase.value,
            "recent": [iteration_s.tolist() for iteration_s in self._recent],
            "was_slower": self._was_slower.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned.

        Raises InputError for a state with another number of workers, another total batch, or a size below ``least``.
        """
        sizes = np.array(state.get("sizes", []), dtype=np.int64)
        present_sizes = self.sizes
        if sizes.shape != present_sizes.shape or sizes.sum() != present_sizes.sum() or sizes.min() < self.least:
            job = f"this job has {len(present_sizes)} workers and {present_sizes.sum()} samples, {self.least} or more each"
            raise InputError("state", f"has sizes {sizes.tolist()}", job)
        self.sizes = sizes
        self.phase = Phase(state["phase"])
        self._recent.clear()
        self._recent.extend(np.array(iteration_s) for iteration_s in state["recent"])
        self._was_slower = np.array(state["was_slower"], dtype=bool)
