"""Devices that fail: checkpoints, restarts, and what they leave of a run's time. Start at :class:`Failures`.

The one model of failures, for one job (``plan``, the ledger of ``verify``) and for clusters (``simulate``): every device, or
whatever else fails as one, fails by itself after an exponentially distributed time. A job stops with the first of its devices,
starts again after ``restart_s``, and does again what it trained since its last checkpoint. All times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ddltool.errors import InputError

# Shorter mean times between failures than a second are another unit; longer ones than 1,000 years never fail.
_MTBF_S = (1.0, 3.2e10)
_LONGEST_S = 604_800.0
# From this exponent on a run does not come to an end.
_NEVER = 500.0
# Devices that are down at once beyond which the rest of the binomial distribution does not count.
_LEAST_PROBABILITY = 1e-15


class Rhythm(NamedTuple):
    """How often a job saves, and what that leaves: ``factor`` times the time of its training alone."""

    factor: float
    interval_s: float
    """Training between checkpoints; infinite: none but that of a notice."""
    per_storage: int
    """How many checkpoints in a neighbour's memory come with each one in storage; 0: all are in storage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """What fails, what a checkpoint and a restart take. Raises InputError for values that make no sense.

    A device is down for ``repair_s`` from its failure on; 0: another takes its place at once.
    """

    mtbf_s: float = math.inf
    """Mean seconds between failures of one device; infinite: none fails by chance."""
    checkpoint_s: float = 60.0
    """For which training stops while a checkpoint is made."""
    write_s: float = 0.0
    """For which it is written after that, beside training; only then it can be restored."""
    size_bytes: float = 0.0
    """Of a checkpoint of all processes; 0: not known."""
    restart_s: float = 300.0
    checkpoint_interval_s: float | None = None
    """Training between checkpoints; None: the one that loses least."""
    memory_s: float = 0.0
    """For which training stops for a checkpoint in a neighbour's memory; 0: there are none."""
    memory_share: float = 0.0
    """Share of the failures after which that one can be restored."""
    repair_s: float = 0.0
    spares: int = 0
    """Devices beside the job's that take the place of failed ones."""
    notice_s: float = 0.0
    """From the announcement of a failure to the failure."""

    def __post_init__(self) -> None:
        """Refuse times out of range, in whatever unit they were meant, and shares that are none."""
        if not (_MTBF_S[0] <= self.mtbf_s <= _MTBF_S[1] or self.mtbf_s == math.inf):
            raise InputError("mtbf", f"is {self.mtbf_s:g} s", f"from {_MTBF_S[0]:g} to {_MTBF_S[1]:g} seconds per node")
        for name in (
            "checkpoint_s",
            "write_s",
            "restart_s",
            "memory_s",
            "repair_s",
            "notice_s",
            "checkpoint_interval_s",
        ):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= _LONGEST_S:
                text = name.removesuffix("_s").replace("_", " ")
                raise InputError(text, f"is {value:g} s", f"at most {_LONGEST_S:.0f} seconds (a week), and not below 0")
        if self.checkpoint_interval_s == 0:
            raise InputError("checkpoint interval", "is 0 s", f"above 0 and at most {_LONGEST_S:.0f} seconds (a week)")
        if not 0 <= self.memory_share <= 1:
            raise InputError(
                "memory checkpoint", f"outlasts {self.memory_share:g} of the failures", "a share, 0 to 100%"
            )

    def of_size(self, size_bytes: float, bytes_per_s: float | None) -> Failures:
        """Return these failures with checkpoints of a size, and as long as storage takes to write them where it is known.

        Training stops for that time, unless it goes on beside the write.
        """
        sized = replace(self, size_bytes=size_bytes)
        if bytes_per_s is None:
            return sized
        seconds = size_bytes / bytes_per_s
        return replace(sized, write_s=seconds) if self.write_s else replace(sized, checkpoint_s=seconds)

    def interval_s(self, devices: int) -> float:
        """Return the seconds of training between checkpoints, of whatever kind; infinite: a notice tells when to save."""
        return _rhythm(self, devices).interval_s

    def per_storage(self, devices: int) -> int:
        """Return how many checkpoints in memory come with each one in storage; 0: all are in storage."""
        return _rhythm(self, devices).per_storage

    def factor(self, devices: int) -> float:
        """Return how many times as long a run takes as without failures and checkpoints; grows with the devices.

        The time until failed devices are back is not in it: see :meth:`remedies`.
        """
        return _rhythm(self, devices).factor

    def spread_s(self, devices: int, run_s: float) -> float:
        """Return the standard deviation of the time of a run that takes ``run_s`` on average.

        Failures come as a Poisson process, each of which loses up to an interval, evenly, and the restart.
        """
        rhythm, job_mtbf_s = _rhythm(self, devices), self.mtbf_s / devices
        period_s = rhythm.interval_s + self.checkpoint_s if rhythm.interval_s < math.inf else 0.0
        lost_s = period_s / 2 + self.write_s + self.restart_s
        return math.sqrt(run_s / job_mtbf_s * (lost_s**2 + period_s**2 / 12))

    def remedies(self, devices: int) -> Mapping[str, tuple[float, int]]:
        """Return remedy -> (goodput: its training over its wall clock, devices that are paid), for a job on so many devices.

        ``wait`` until the failed device is back, ``shrink`` to the others until then, or take one of the ``spares``. Devices
        fail and are repaired independently, idle ones too, so that the number of those down is binomially distributed. A
        shrunk job is as fast as its devices are many, and restarts to take each one back. Where nothing has to be repaired
        there is ``restart`` alone.
        """
        whole = 1 / self.factor(devices)
        if not self.repair_s or self.mtbf_s == math.inf:
            return {"restart": (whole, devices)}
        down = _down(devices, self.repair_s / (self.mtbf_s + self.repair_s))
        shrunk = sum(
            chance * up / devices / self.factor(up) * max(0.0, 1 - (devices - up) / self.repair_s * self.restart_s)
            for up, chance in ((devices - number, chance) for number, chance in enumerate(down))
            if up
        )
        found = {"wait": (whole * down[0], devices), "shrink": (shrunk, devices)}
        if self.spares:
            down = _down(devices + self.spares, self.repair_s / (self.mtbf_s + self.repair_s))
            found["spares"] = whole * sum(down[: self.spares + 1]), devices + self.spares
        return found


def _down(devices: int, share: float) -> list[float]:
    """Return the probabilities that 0, 1, 2, ... of the devices are down, each for ``share`` of the time."""
    chances = []
    for number in range(devices + 1):
        ways = math.lgamma(devices + 1) - math.lgamma(number + 1) - math.lgamma(devices - number + 1)
        chances.append(math.exp(ways + number * math.log(share) + (devices - number) * math.log1p(-share)))
        if number > devices * share and chances[-1] < _LEAST_PROBABILITY:
            break
    return chances


@lru_cache(maxsize=4096)  # a search of plans asks for the same numbers of devices again and again
def _rhythm(failures: Failures, devices: int) -> Rhythm:
    """Return the checkpoints that lose least on so many devices, of those that ``failures`` allow."""
    job_mtbf_s, saving_s = failures.mtbf_s / devices, failures.checkpoint_s + failures.write_s
    if failures.notice_s and failures.notice_s >= saving_s:
        # Saved at the notice: lost are the checkpoint and the restart, which a failure may interrupt.
        return Rhythm(_grown(failures.restart_s / job_mtbf_s) + saving_s / job_mtbf_s, math.inf, 0)
    if job_mtbf_s == math.inf:
        interval_s = failures.checkpoint_interval_s or math.inf
        return Rhythm(1 + failures.checkpoint_s / interval_s, interval_s, 0)
    rhythms = [_of_storage(failures, job_mtbf_s)]
    if failures.memory_s and failures.memory_share:
        # Of each kind of failure and checkpoint the first-order optimum (Benoit et al. 2017, the case of two levels).
        lasting = max(1 - failures.memory_share, 1e-9)
        ratio = math.sqrt(failures.memory_share / lasting * failures.checkpoint_s / failures.memory_s)
        numbers = {max(1, round_to(min(ratio, 1e6))) for round_to in (math.floor, math.ceil)}
        rhythms += [_of_memory(failures, job_mtbf_s, number) for number in numbers]
    return min(rhythms)


def _grown(exponent: float) -> float:
    return math.inf if exponent > _NEVER else math.exp(exponent)


def daly_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the seconds between checkpoints that lose least (Daly 2006, Equation 37; Young's 1974 is its first term)."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(checkpoint_s / (2 * mtbf_s))
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + ratio / 3 + ratio * ratio / 9) - checkpoint_s


def _of_storage(failures: Failures, mtbf_s: float) -> Rhythm:
    """Return the rhythm of a job that fails every ``mtbf_s``, with all its checkpoints in storage.

    Exponential failures: ``M e^(R/M) (e^((t + w)/M) - 1) / t`` (Daly 2006, Equation 13). A checkpoint that is still written
    when a failure comes is none: all failures lose that time beside the restart, which is why the exact form has it in R.
    No checkpoint begins before the last one is written.
    """
    interval_s = failures.checkpoint_interval_s or max(daly_s(failures.checkpoint_s, mtbf_s), failures.write_s)
    if not interval_s:  # checkpoints that cost nothing, all the time
        return Rhythm(_grown(failures.restart_s / mtbf_s), 0.0, 0)
    exponent = (interval_s + failures.checkpoint_s) / mtbf_s
    if exponent > _NEVER:
        return Rhythm(math.inf, interval_s, 0)
    lost = _grown((failures.restart_s + failures.write_s) / mtbf_s)
    return Rhythm(mtbf_s * lost * math.expm1(exponent) / interval_s, interval_s, 0)


def _of_memory(failures: Failures, mtbf_s: float, number: int) -> Rhythm:
    """Return the rhythm of ``number`` checkpoints in memory, the last of which goes to storage too.

    The interval is Daly's for the mean cost of a checkpoint and for failures that count by the intervals that they undo. The
    factor is exact: a Markov chain over the checkpoints of a pattern (as Vaidya 1995), in which each part is done again until
    no failure comes. ``share`` of the failures go back to the last checkpoint in memory, the others to the one in storage.
    """
    share, lasting = failures.memory_share, 1 - failures.memory_share
    cost_s = failures.memory_s + failures.checkpoint_s / number
    best_s = daly_s(cost_s, mtbf_s / (share + number * lasting))
    interval_s = failures.checkpoint_interval_s or max(best_s, failures.write_s / number)
    part_s = interval_s + failures.memory_s
    if max(part_s, failures.checkpoint_s, failures.restart_s + failures.write_s) / mtbf_s > _NEVER:
        return Rhythm(math.inf, interval_s, number)
    restarted = math.exp(-failures.restart_s / mtbf_s)
    # Expected time from a failure on that storage outlasts, until training goes on from the pattern's beginning.
    from_storage_s = mtbf_s * math.expm1((failures.restart_s + failures.write_s) / mtbf_s)
    # From one that memory outlasts: a constant, and the shares that go on from the last checkpoint and from the beginning.
    ends = 1 - (1 - restarted) * share
    from_memory_s, on, back = mtbf_s * (1 - restarted) / ends, restarted / ends, (1 - restarted) * lasting / ends
    # Expected time to the pattern's end from its part on, as a constant and a multiple of that from the beginning.
    constant, multiple = 0.0, 0.0
    for duration_s in (failures.checkpoint_s, *[part_s] * number):
        passes = math.exp(-duration_s / mtbf_s)
        fails = -math.expm1(-duration_s / mtbf_s)
        again = 1 - fails * share * on
        to_beginning = fails * (share * back + lasting)
        constant = (
            fails * (mtbf_s + share * from_memory_s) + passes * constant + to_beginning * from_storage_s
        ) / again
        multiple = (passes * multiple + to_beginning) / again
    whole_s = constant / (1 - multiple) if multiple < 1 else math.inf
    return Rhythm(whole_s / (number * interval_s), interval_s, number)
