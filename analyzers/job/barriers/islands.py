"""Islands that train by themselves and meet every H steps (Local SGD, DiLoCo): the time of a round. Start at :class:`Rounds`.

Island i takes H_i inner steps of s_i seconds each in a round. The outer state is cut into fragments; fragment p of P is sent
after step ``(p + 1) H_i / P`` of every round (rounded down), once all islands have come there, one fragment after the other
over the link; its average is waited for ``overlap`` inner steps later (tau of Streaming DiLoCo, arXiv 2501.18512, Algorithm 2;
0: at once). So events follow each other by sums and maxima alone, and what a round takes in the long run is exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.errors import InputError
from ddltool.links import Link

BITS = (4, 8, 16, 32)
"""Of an exchanged number."""
# Rounds before those that are averaged: until the islands' distances have settled.
_FIRST, _LAST = 16, 48


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentExchange:
    """What islands send each other: so many numbers of so many bits, in fragments of one size, over one link.

    ``link``: of one island to the others, one way. Numbers of few bits are summed where they are received and sent on
    rounded once more, so that any width travels as often as in a ring: ``2 (M - 1) / M`` times (Patarasuk and Yuan 2009).
    """

    elements: int
    """Numbers of the outer state."""
    islands: int
    link: Link
    bits: int = 32
    """Of each number as it is sent: 4, 8, 16 or 32."""
    fragments: int = 1

    def __post_init__(self) -> None:
        """Raise InputError for other bits, and for more fragments than numbers."""
        if self.bits not in BITS:
            raise InputError("outer_bits", f"is {self.bits}", "give 4, 8, 16 or 32")
        if not 1 <= self.fragments <= max(self.elements, 1):
            problem = f"are {self.fragments:,}, of {self.elements:,} parameters"
            raise InputError("fragments", problem, "give at least 1, and no more than there are parameters")

    @property
    def state_bytes(self) -> float:
        """Return the bytes of all that is exchanged, as it is written."""
        return self.elements * self.bits / 8

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that each island sends in a round, and receives."""
        return 2.0 * (self.islands - 1) / self.islands * self.state_bytes

    @property
    def fragment_s(self) -> float:
        """Return the seconds that one fragment is on its way."""
        group = Fabric.flat(self.link.bytes_per_s, self.link.latency_s).over(self.islands)
        return group.all_reduce_s(self.state_bytes / self.fragments)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """Islands of ``step_s`` seconds an inner step that take ``every`` steps each in a round; one entry an island.

    Raises InputError for fewer steps than fragments, and for an overlap that is not shorter than a round.
    """

    step_s: Sequence[float]
    """Seconds of an island's inner step."""
    every: Sequence[int]
    """Inner steps of an island in a round."""
    fragment_s: float
    """Seconds that one fragment is on its way."""
    fragments: int = 1
    """Of the outer state, each sent once a round."""
    overlap: int = 0
    """Inner steps after which a sent fragment's average is waited for; 0: at once."""

    def __post_init__(self) -> None:
        """Raise InputError as the class says."""
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
        """Return the seconds of a round if nothing had to be sent: those of the island that takes longest."""
        return max(steps * step_s for steps, step_s in zip(self.every, self.step_s, strict=True))

    @property
    def round_s(self) -> float:
        """Return the seconds of a round in the long run: the mean distance of rounds' last fragments, after a transient."""
        starts = self.starts_s(_LAST)
        return (starts[-1] - starts[_FIRST * self.fragments - 1]) / (_LAST - _FIRST)

    @property
    def exposed_s(self) -> float:
        """Return the seconds of a round in which islands wait for what is sent."""
        return max(self.round_s - self.compute_s, 0.0)

    def starts_s(self, rounds: int) -> list[float]:
        """Return when each fragment of so many rounds is sent, in seconds from the first step on: rounds x fragments."""
        islands = [_Island(step_s) for step_s in self.step_s]
        link_free_s, starts = 0.0, []
        for number in range(rounds * self.fragments):
            round_number, fragment = divmod(number, self.fragments)
            # Counted from the start: the step of each island after which this fragment is sent.
            sent_after = [round_number * steps + (fragment + 1) * steps // self.fragments for steps in self.every]
            arrivals_s = [island.come_to(step) for island, step in zip(islands, sent_after, strict=True)]
            starts.append(max(*arrivals_s, link_free_s))
            link_free_s = starts[-1] + self.fragment_s
            for island, step in zip(islands, sent_after, strict=True):
                island.awaited.append((step + self.overlap, link_free_s))
        return starts


@dataclass(slots=True)
class _Island:
    """Where an island is: after ``step`` inner steps of ``step_s`` seconds at ``time_s``."""

    step_s: float
    step: int = 0
    time_s: float = 0.0
    awaited: deque[tuple[int, float]] = field(default_factory=deque)
    """Averages on their way, in the order of sending: after which step each is waited for, and when it is there (seconds)."""

    def come_to(self, step_reached: int) -> float:
        """Take the steps up to ``step_reached``, waits included, and return when they are done, in seconds.

        Averages that are waited for after that very step stay in ``awaited``: the next fragment is sent before the wait.
        """
        while self.awaited and self.awaited[0][0] < step_reached:
            step, ready_s = self.awaited.popleft()
            self.time_s = max(self.time_s + (step - self.step) * self.step_s, ready_s)
            self.step = step
        self.time_s += (step_reached - self.step) * self.step_s
        self.step = step_reached
        return self.time_s
