"""Islands that train independently and average every H steps (Local SGD, DiLoCo): the time of a round.

Start at :class:`Rounds`. In a round island i makes H_i inner steps of s_i seconds each. The outer state is cut into P
fragments; fragment p (from 0) is sent after step ``(p + 1) H_i / P`` of every round (rounded down), once all islands have
reached that step, one fragment after the other over the link. Islands wait for its average ``overlap`` inner steps later (tau
of Streaming DiLoCo, arXiv 2501.18512, Algorithm 2; 0: at once). So times follow by sums and maxima, and the time of a round in
the long run is exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.errors import InputError
from ddltool.links import Link

BITS = (4, 8, 16, 32)
"""Allowed bits of an exchanged number."""
# Rounds from _FIRST to _LAST are averaged; before, the distances between islands have not settled.
_FIRST, _LAST = 16, 48


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentExchange:
    """What islands send each other: numbers of a given width, in equal fragments, over one link.

    Numbers of few bits are summed where they are received and rounded again before they are sent on. So each of the M islands
    sends the state ``2 (M - 1) / M`` times for any width, as in a ring (Patarasuk and Yuan 2009).
    """

    elements: int
    """Numbers in the outer state."""
    islands: int
    link: Link
    """Link from one island to the others, in one direction."""
    bits: int = 32
    """Bits of each number as it is sent: 4, 8, 16 or 32."""
    fragments: int = 1
    """Number of fragments that the state is sent in."""

    def __post_init__(self) -> None:
        """Raise InputError for other bits, and for more fragments than numbers."""
        if self.bits not in BITS:
            raise InputError("outer_bits", f"is {self.bits}", "give 4, 8, 16 or 32")
        if not 1 <= self.fragments <= max(self.elements, 1):
            problem = f"are {self.fragments:,}, of {self.elements:,} parameters"
            raise InputError("fragments", problem, "give at least 1, and no more than there are parameters")

    @property
    def state_bytes(self) -> float:
        """Return the bytes of the outer state in the width in which it is sent."""
        return self.elements * self.bits / 8

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that each island sends in a round; it receives as many."""
        return 2.0 * (self.islands - 1) / self.islands * self.state_bytes

    @property
    def fragment_s(self) -> float:
        """Return the seconds from the sending of a fragment until its average is there."""
        group = Fabric.flat(self.link.bytes_per_s, self.link.latency_s).over(self.islands)
        return group.all_reduce_s(self.state_bytes / self.fragments)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """Rounds of islands, from which their times in the long run follow.

    Raises InputError for fewer inner steps than fragments, and for an overlap that is not shorter than a round.
    """

    step_s: Sequence[float]
    """Seconds of an inner step, by island."""
    every: Sequence[int]
    """Inner steps in a round, by island."""
    fragment_s: float
    """Seconds from the sending of a fragment until its average is there."""
    fragments: int = 1
    """Number of fragments of the outer state, each sent once per round."""
    overlap: int = 0
    """Inner steps after which islands wait for a sent fragment's average; 0: at once."""

    def __post_init__(self) -> None:
        """Raise InputError for the values that the class refuses."""
        fewest = min(self.every)
        if fewest < 1:
            raise InputError("outer_every", f"has {fewest}", "give 1 inner step or more")
        if self.fragments > fewest:
            problem = f"are {self.fragments}, and an island takes {fewest} inner steps between outer steps"
            raise InputError("fragments", problem, "one is sent at a time: give no more than there are steps")
        if not 0 <= self.overlap < fewest:
            problem = f"is {self.overlap} inner steps, of {fewest} between outer steps"
            raise InputError("overlap", problem, f"give 0 to {fewest - 1}")

    @property
    def compute_s(self) -> float:
        """Return the seconds of a round without any sending: those of the slowest island."""
        return max(steps * step_s for steps, step_s in zip(self.every, self.step_s, strict=True))

    @property
    def round_s(self) -> float:
        """Return the seconds of a round in the long run: the mean time between the last fragments of successive rounds."""
        starts = self.starts_s(_LAST)
        return (starts[-1] - starts[_FIRST * self.fragments - 1]) / (_LAST - _FIRST)

    @property
    def exposed_s(self) -> float:
        """Return the seconds of a round in which islands wait for what is sent."""
        return max(self.round_s - self.compute_s, 0.0)

    def starts_s(self, rounds: int) -> list[float]:
        """Return when each fragment is sent, in seconds from the first step on: ``rounds * fragments`` times in order."""
        islands = [_Island(step_s) for step_s in self.step_s]
        link_free_s = 0.0
        starts: list[float] = []
        for number in range(rounds * self.fragments):
            round_number, fragment = divmod(number, self.fragments)
            # by island, the number of inner steps since the start after which this fragment is sent
            sent_after = [round_number * steps + (fragment + 1) * steps // self.fragments for steps in self.every]
            arrivals_s = [island.come_to(step) for island, step in zip(islands, sent_after, strict=True)]
            start_s = max(*arrivals_s, link_free_s)
            starts.append(start_s)
            link_free_s = start_s + self.fragment_s
            for island, step in zip(islands, sent_after, strict=True):
                island.awaited.append((step + self.overlap, link_free_s))
        return starts


@dataclass(slots=True)
class _Island:
    """An island in the simulation: at ``time_s`` seconds it has made ``step`` inner steps of ``step_s`` seconds."""

    step_s: float
    step: int = 0
    time_s: float = 0.0
    awaited: deque[tuple[int, float]] = field(default_factory=deque)
    """Averages on their way, in the order of sending: (step after which the island waits for it, time when it is there)."""

    def come_to(self, step_reached: int) -> float:
        """Make the steps up to ``step_reached``, waits included, and return the time in seconds at which they are done.

        Averages that are due after just this step stay in ``awaited``, because the next fragment is sent before that wait.
        """
        while self.awaited and self.awaited[0][0] < step_reached:
            step, ready_s = self.awaited.popleft()
            self.time_s = max(self.time_s + (step - self.step) * self.step_s, ready_s)
            self.step = step
        self.time_s += (step_reached - self.step) * self.step_s
        self.step = step_reached
        return self.time_s
