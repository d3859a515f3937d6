"""ElasticBSP (Zhao et al., ICDM 2019): asynchronous supersteps that end where predicted iteration ends meet best.

Server 0 notes when each worker's gradients come in, predicts everyone's next R iteration ends at a barrier, and lets
ZipLine (or the weighted and bounded search of :mod:`ddltool.analyzers.barriers.tradeoff`) choose how many iterations
each worker makes until the next one. In between every gradient is applied when it comes, as under ASP; at the barrier
all gradients are in before anyone goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ddltool.analyzers.barriers.predict import PREDICTORS, predict_ends
from ddltool.analyzers.barriers.tradeoff import OBJECTIVES, Objective, best_barrier
from ddltool.analyzers.barriers.zipline import zipline
from ddltool.errors import InputError, did_you_mean
from ddltool.runtime.servers.policies import ASP, Book

# Supersteps of one iteration before the first prediction. The first iteration sets up connections and caches and is too
# long to predict from, so it takes two.
WARM_UP = 2
LENGTHS_KEPT = 200


@dataclass(kw_only=True, slots=True)
class Superstep:
    """One decision, and what came of it. Times are seconds since the decision; the lists have one entry per worker."""

    number: int
    workers: list[int]
    """The members when it was made."""
    iterations: list[int]
    lengths_s: list[list[float]]
    """The recorded iteration lengths that the prediction had; empty in the warm-up."""
    predicted_s: list[list[float]]
    """(n, R) predicted ends, as the barrier was chosen from them; empty in the warm-up."""
    predicted_end_s: list[float]
    """When each worker was to begin to wait; empty in the warm-up."""
    began_s: float
    """Monotonic clock."""
    end_s: list[float] = field(default_factory=list)
    """When each worker began to wait (NaN: lost before); empty until the barrier is over."""


class ElasticBSP(ASP):
    """Elastic supersteps with a lookahead of R iterations; the gap within a superstep is below R, or ``max_gap``.

    Attributes:
        supersteps: the decisions so far, on server 0.
    """

    def __init__(
        self,
        lookahead: int,
        *,
        predictor: str = "ema",
        objective: Objective = "waiting",
        max_gap: int | None = None,
    ) -> None:
        """``lookahead``: R. ``predictor``: one of ``PREDICTORS``. ``objective`` and ``max_gap``: as ``best_barrier``.

        Raises InputError for a lookahead below 1, a negative gap, and unknown names.
        """
        if lookahead < 1:
            raise InputError("ElasticBSP:lookahead", f"is {lookahead}", "give 1 or more")
        if max_gap is not None and max_gap < 0:
            raise InputError("ElasticBSP:max_gap", f"is {max_gap}", "give 0 or more")
        if predictor not in PREDICTORS:
            raise InputError("ElasticBSP:predictor", f'"{predictor}"', did_you_mean(predictor, PREDICTORS))
        if objective not in OBJECTIVES:
            raise InputError("ElasticBSP:objective", f'"{objective}"', did_you_mean(objective, OBJECTIVES))
        self.lookahead, self.predictor, self.objective, self.max_gap = lookahead, predictor, objective, max_gap

    def describe(self) -> str:
        """See :meth:`~.sync_policies.Policy.describe`."""
        return f"ElasticBSP({self.lookahead}, {self.predictor}, {self.objective}, {self.max_gap})"

    def open(self, book: Book) -> None:
        """See :meth:`~.sync_policies.Policy.open`."""
        if book.decides and not book.names:
            raise InputError("transfer plan", "puts no trainable parameter on server 0", "it must see the gradients")
        super().open(book)
        self.supersteps: list[Superstep] = []
        self._quota = [1] * book.seats
        self._base = [0] * book.seats
        self._lengths: list[list[float]] = [[] for _ in range(book.seats)]
        self._last_end_s = [0.0] * book.seats
        self._came = [False] * book.seats

    def may_pull(self, worker: int, clock: int, name: str) -> bool:
        """See :meth:`~.sync_policies.Policy.may_pull`."""
        if not super().may_pull(worker, clock, name) or clock >= self._quota[worker]:
            return False
        return clock > self._base[worker] or not self._behind(name, self._base)

    def blockers(self, worker: int, clock: int, name: str) -> list[int]:
        """See :meth:`~.sync_policies.Policy.blockers`."""
        if clock >= self._quota[worker]:
            return self._behind(name, self._quota)
        return self._behind(name, self._base) if clock == self._base[worker] else []

    def _behind(self, name: str, target: list[int]) -> list[int]:
        """Return the members that have not pushed ``target`` gradients of ``name``."""
        pushed = self.book.pushed[name]
        return sorted(other for other in self.book.members if pushed[other] < target[other])

    def joined(self, worker: int, clock: int, now_s: float) -> None:
        """See :meth:`~.sync_policies.Policy.joined`; its first superstep is the next one."""
        self._quota[worker], self._base[worker] = max(self._quota[worker], clock), max(self._base[worker], clock)
        self._last_end_s[worker] = now_s

    def start(self, now_s: float) -> None:
        """The job begins; the first superstep is one iteration each."""
        self._record(now_s, [1] * len(self.book.members), [], [], [])

    def ended(self, worker: int, now_s: float) -> None:
        """All gradients of one more step of ``worker`` are in on server 0."""
        begin_s = self._last_end_s[worker]
        if self._came[worker]:
            self._lengths[worker] = [*self._lengths[worker], now_s - begin_s][-LENGTHS_KEPT:]
        self._came[worker] = True
        self._last_end_s[worker] = now_s

    def decide(self, now_s: float) -> list[int] | None:
        """Return the new quota per worker when the barrier has been reached and the next superstep begins, else None.

        A quota is the number of steps from the beginning of the job until the next barrier.
        """
        book = self.book
        members = sorted(book.members)
        if not members or any(book.steps[worker] < self._quota[worker] for worker in members):
            return None
        self._close()
        lengths = [self._lengths[worker] for worker in members]
        if len(self.supersteps) < WARM_UP or not all(lengths):
            iterations = [1] * len(members)
            predicted, ends = np.empty((0, 0)), []
        else:
            predicted = predict_ends(
                [np.array(recorded) for recorded in lengths],
                np.zeros(len(members)),
                self.lookahead,
                PREDICTORS[self.predictor],
            )
            if self.objective == "waiting" and self.max_gap is None:
                barrier = zipline(predicted)
            else:
                barrier = best_barrier(predicted, objective=self.objective, max_gap=self.max_gap)
            iterations, ends = barrier.iterations.tolist(), barrier.chosen_s.tolist()
        self._record(now_s, iterations, lengths if ends else [], predicted.tolist(), ends)
        quota = list(self._quota)
        for worker, count in zip(members, iterations, strict=True):
            quota[worker] = book.steps[worker] + count
            self._last_end_s[worker] = now_s  # the wait belongs to no iteration
        self.follow(quota)
        return quota

    def follow(self, quota: list[int]) -> None:
        """Begin the superstep that ends with these quotas."""
        self._base, self._quota = self._quota, quota

    def _record(
        self,
        now_s: float,
        iterations: list[int],
        lengths_s: list[list[float]],
        predicted_s: list[list[float]],
        predicted_end_s: list[float],
    ) -> None:
        self.supersteps.append(
            Superstep(
                number=len(self.supersteps),
                workers=sorted(self.book.members),
                iterations=iterations,
                lengths_s=[list(recorded) for recorded in lengths_s],
                predicted_s=predicted_s,
                predicted_end_s=predicted_end_s,
                began_s=now_s,
            )
        )

    def _close(self) -> None:
        """Note when the workers came to the barrier that is over."""
        last = self.supersteps[-1]
        last.end_s = [
            self._last_end_s[worker] - last.began_s if worker in self.book.members else float("nan")
            for worker in last.workers
        ]
