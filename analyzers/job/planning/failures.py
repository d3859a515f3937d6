"""Devices that fail: how often to save checkpoints, and what failures add to a run's time. Start at :class:`Failures`.

The one model of failures, for one job (``plan``, the ledger of ``verify``) and for clusters (``simulate``): every device, or
whatever else fails as one, fails independently after an exponentially distributed time. A job stops when the first of its
devices fails, starts again after ``restart_s``, and repeats what it trained since its last checkpoint. All times are seconds.
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
# A run that takes e^500 times as long, or more, counts as one that never ends.
_NEVER = 500.0
# Probability below which the tail of the binomial distribution of failed devices is cut off.
_LEAST_PROBABILITY = 1e-15


class Checkpointing(NamedTuple):
    """How often a job saves, and how long its run takes then."""

    factor: float
    """Time of the run over the time of its training alone; 1 or more, infinite where it never ends."""
    interval_s: float
    """Training between checkpoints; infinite: checkpoints are made at the notice of a failure only, or never."""
    per_storage: int
    """How many checkpoints in a neighbour's memory come with each one in storage; 0: all are in storage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """How often devices fail, and what checkpoints and restarts take. Raises InputError for values out of range."""

    mtbf_s: float = math.inf
    """Mean seconds between failures of one device; infinite: none fails by chance."""
    checkpoint_s: float = 60.0
    """How long training stops for each checkpoint."""
    write_s: float = 0.0
    """How long a checkpoint is written after that, while training goes on; it can be restored only when written."""
    size_bytes: float = 0.0
    """Bytes of a checkpoint, of all processes together; 0: not known."""
    restart_s: float = 300.0
    """From a failure until training goes on."""
    checkpoint_interval_s: float | None = None
    """Training between checkpoints; None: the interval with the shortest run."""
    memory_s: float = 0.0
    """How long training stops for a checkpoint in a neighbour's memory; 0: there are no such checkpoints."""
    memory_share: float = 0.0
    """Share of the failures after which a checkpoint in memory can be restored."""
    repair_s: float = 0.0
    """How long a failed device is down; 0: another takes its place at once."""
    spares: int = 0
    """Devices beside the job's that take the place of failed ones."""
    notice_s: float = 0.0
    """From the announcement of a failure to the failure; 0: failures are not announced."""

    def __post_init__(self) -> None:
        """Raise InputError for a time out of range, and for a share that is not between 0 and 1."""
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
        """Return these failures with checkpoints of ``size_bytes``, written in the time that storage takes for them.

        ``bytes_per_s``: of the storage; None: times stay as they are. The time replaces ``write_s`` where that is above 0
        (training goes on during the write), else ``checkpoint_s``.
        """
        sized = replace(self, size_bytes=size_bytes)
        if bytes_per_s is None:
            return sized
        seconds = size_bytes / bytes_per_s
        return replace(sized, write_s=seconds) if self.write_s else replace(sized, checkpoint_s=seconds)

    def interval_s(self, devices: int) -> float:
        """Return the seconds that a job on so many devices trains between checkpoints, in memory or storage.

        Infinite: it makes none at regular intervals.
        """
        return _best_checkpointing(self, devices).interval_s

    def per_storage(self, devices: int) -> int:
        """Return how many checkpoints in memory a job on so many devices makes for each one in storage.

        0: all are in storage.
        """
        return _best_checkpointing(self, devices).per_storage

    def factor(self, devices: int) -> float:
        """Return the time of a run on so many devices over its time without failures and checkpoints; 1 or more.

        It grows with the devices. The time until failed devices are repaired is not in it: see :meth:`remedies`.
        """
        return _best_checkpointing(self, devices).factor

    def spread_s(self, devices: int, run_s: float) -> float:
        """Return the standard deviation in seconds of the time of a run that takes ``run_s`` on average.

        Failures are a Poisson process. Each one costs the restart, what was trained while the last checkpoint was still being
        written (``write_s``), and a uniformly distributed part of the time from one checkpoint to the next, which includes the
        stop for a checkpoint (``checkpoint_s``). The variance of the sum of such costs is the number of failures to expect
        times the mean square of a cost.
        """
        job_mtbf_s = self.mtbf_s / devices  # the job stops when the first of its devices fails
        interval_s = self.interval_s(devices)
        # Without checkpoints at intervals nothing is repeated: they are made at a failure's notice, or no device fails.
        period_s = interval_s + self.checkpoint_s if interval_s < math.inf else 0.0
        mean_cost_s = period_s / 2 + self.write_s + self.restart_s
        cost_variance = period_s**2 / 12  # s^2; that of a uniform distribution is its width^2 / 12
        mean_square_cost = mean_cost_s**2 + cost_variance
        return math.sqrt(run_s / job_mtbf_s * mean_square_cost)

    def remedies(self, devices: int) -> Mapping[str, tuple[float, int]]:
        """Return remedy -> (share of the time that trains, number of devices that are paid), for a job on so many devices.

        ``wait`` until the failed device is back, ``shrink`` to the others until then, or use the ``spares``, if there are any.
        Devices, idle ones too, fail and are repaired independently, so the number that are down is binomially distributed. A
        shrunk job's speed is proportional to its devices, and it restarts to take each repaired one back. Where ``repair_s`` is
        0 or no device fails, ``restart`` is the only remedy.
        """
        whole = 1 / self.factor(devices)  # share of the time that trains while no device is down
        if not self.repair_s or self.mtbf_s == math.inf:
            return {"restart": (whole, devices)}
        share_down = self.repair_s / (self.mtbf_s + self.repair_s)  # of the time, for one device
        down_probabilities = _down_probabilities(devices, share_down)
        shrunk = 0.0
        for down, chance in enumerate(down_probabilities):
            up = devices - down
            if up:
                # failed devices come back at a rate of down / repair_s, each time with a restart
                not_restarting = max(0.0, 1 - down / self.repair_s * self.restart_s)
                shrunk += chance * up / devices / self.factor(up) * not_restarting
        found = {"wait": (whole * down_probabilities[0], devices), "shrink": (shrunk, devices)}
        if self.spares:
            with_spares = _down_probabilities(devices + self.spares, share_down)
            at_most_spares_down = sum(with_spares[: self.spares + 1])
            found["spares"] = whole * at_most_spares_down, devices + self.spares
        return found


def _down_probabilities(devices: int, share: float) -> list[float]:
    """Return the binomial probabilities that 0, 1, 2, ... of the devices are down, each for ``share`` of the time.

    The list ends where the next ones are negligible.
    """
    chances = []
    for down in range(devices + 1):
        # logarithms, because the binomial coefficients of many devices overflow
        log_ways = math.lgamma(devices + 1) - math.lgamma(down + 1) - math.lgamma(devices - down + 1)
        chances.append(math.exp(log_ways + down * math.log(share) + (devices - down) * math.log1p(-share)))
        if down > devices * share and chances[-1] < _LEAST_PROBABILITY:
            break
    return chances


@lru_cache(maxsize=4096)  # a search of plans asks for the same numbers of devices again and again
def _best_checkpointing(failures: Failures, devices: int) -> Checkpointing:
    """Return the checkpointing with the shortest run on so many devices, of the kinds that ``failures`` allow.

    The kinds are: at the notice of a failure, where that is long enough for a checkpoint, which makes regular ones
    unnecessary; at intervals in storage; and at intervals in a neighbour's memory, with every n-th in storage.
    """
    job_mtbf_s = failures.mtbf_s / devices  # the job stops when the first of its devices fails
    saving_s = failures.checkpoint_s + failures.write_s
    if failures.notice_s and failures.notice_s >= saving_s:
        # A failure costs the checkpoint and the restart, which another failure may interrupt.
        factor = _exp_or_infinite(failures.restart_s / job_mtbf_s) + saving_s / job_mtbf_s
        return Checkpointing(factor=factor, interval_s=math.inf, per_storage=0)
    if job_mtbf_s == math.inf:
        interval_s = failures.checkpoint_interval_s or math.inf
        return Checkpointing(factor=1 + failures.checkpoint_s / interval_s, interval_s=interval_s, per_storage=0)
    found = [_storage_checkpointing(failures, job_mtbf_s)]
    if failures.memory_s and failures.memory_share:
        # The first-order optimum of checkpoints in memory per one in storage (Benoit et al. 2017, the case of two levels).
        lasting = max(1 - failures.memory_share, 1e-9)
        ratio = math.sqrt(failures.memory_share / lasting * failures.checkpoint_s / failures.memory_s)
        numbers = {max(1, round_to(min(ratio, 1e6))) for round_to in (math.floor, math.ceil)}
        found += [_memory_checkpointing(failures, job_mtbf_s, number) for number in numbers]
    return min(found)  # by factor, the first field


def _exp_or_infinite(exponent: float) -> float:
    """Return e^exponent; infinite above :data:`_NEVER`, where it would soon overflow."""
    return math.inf if exponent > _NEVER else math.exp(exponent)


def daly_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between checkpoints with the shortest run (Daly 2006, Equation 37).

    The formula's first term is Young's of 1974. Checkpoints that take twice the mean time between failures, or more, are made
    once in ``mtbf_s``, as Daly says.
    """
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(checkpoint_s / (2 * mtbf_s))
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + ratio / 3 + ratio * ratio / 9) - checkpoint_s


def _storage_checkpointing(failures: Failures, mtbf_s: float) -> Checkpointing:
    """Return the best checkpointing with all checkpoints in storage, for a job that fails every ``mtbf_s`` on average.

    The factor is ``M e^(R/M) (e^((t + d)/M) - 1) / t`` (Daly 2006, Equation 13) with M the mean time between failures, R the
    restart, t the interval and d the time of a checkpoint. A checkpoint that is still being written when a failure comes is
    lost, so each failure costs ``write_s`` besides: R includes it. No checkpoint begins before the previous one is written.
    """
    interval_s = failures.checkpoint_interval_s or max(daly_s(failures.checkpoint_s, mtbf_s), failures.write_s)
    if not interval_s:  # checkpoints that cost nothing are made all the time
        return Checkpointing(factor=_exp_or_infinite(failures.restart_s / mtbf_s), interval_s=0.0, per_storage=0)
    exponent = (interval_s + failures.checkpoint_s) / mtbf_s
    factor = math.inf
    if exponent <= _NEVER:
        restart_factor = _exp_or_infinite((failures.restart_s + failures.write_s) / mtbf_s)  # e^(R/M)
        factor = mtbf_s * restart_factor * math.expm1(exponent) / interval_s
    return Checkpointing(factor=factor, interval_s=interval_s, per_storage=0)


def _memory_checkpointing(failures: Failures, mtbf_s: float, number: int) -> Checkpointing:
    """Return the checkpointing with ``number`` checkpoints in memory, the last of which also goes to storage.

    The interval is Daly's for the mean cost of a checkpoint, on a job that fails every ``mtbf_s`` on average; a failure that
    memory does not outlast undoes ``number`` intervals and so counts as many times. The factor is exact, by a Markov chain over
    the phases of a pattern (as Vaidya 1995): ``number`` intervals, each with its checkpoint in memory, then the checkpoint in
    storage. A phase is repeated until no failure interrupts it. ``memory_share`` of the failures return to the last checkpoint
    in memory, the others to the one in storage, which is the beginning of the pattern.
    """
    memory_share = failures.memory_share
    storage_share = 1 - memory_share  # of the failures: only the checkpoint in storage can be restored
    cost_s = failures.memory_s + failures.checkpoint_s / number
    best_s = daly_s(cost_s, mtbf_s / (memory_share + number * storage_share))
    interval_s = failures.checkpoint_interval_s or max(best_s, failures.write_s / number)
    phase_s = interval_s + failures.memory_s
    if max(phase_s, failures.checkpoint_s, failures.restart_s + failures.write_s) / mtbf_s > _NEVER:
        return Checkpointing(factor=math.inf, interval_s=interval_s, per_storage=number)
    # Expected time from a failure that only storage outlasts until training goes on from the pattern's beginning.
    from_storage_s = mtbf_s * math.expm1((failures.restart_s + failures.write_s) / mtbf_s)
    # From a failure that memory outlasts: expected time, and probabilities to go on from the last checkpoint in memory or,
    # after another failure during the restart, from the beginning.
    restarts = math.exp(-failures.restart_s / mtbf_s)  # probability that no failure interrupts a restart
    ends = 1 - (1 - restarts) * memory_share
    from_memory_s = mtbf_s * (1 - restarts) / ends
    goes_on = restarts / ends
    goes_back = (1 - restarts) * storage_share / ends
    # Expected time from the beginning of a phase to the pattern's end: constant + multiple * the same time from the pattern's
    # beginning, which is not known yet. The last phase first.
    constant, multiple = 0.0, 0.0
    for duration_s in (failures.checkpoint_s, *[phase_s] * number):
        passes = math.exp(-duration_s / mtbf_s)
        fails = -math.expm1(-duration_s / mtbf_s)
        not_repeated = 1 - fails * memory_share * goes_on
        to_beginning = fails * (memory_share * goes_back + storage_share)
        constant = (
            fails * (mtbf_s + memory_share * from_memory_s) + passes * constant + to_beginning * from_storage_s
        ) / not_repeated
        multiple = (passes * multiple + to_beginning) / not_repeated
    whole_s = constant / (1 - multiple) if multiple < 1 else math.inf
    return Checkpointing(factor=whole_s / (number * interval_s), interval_s=interval_s, per_storage=number)
