"""When the goodput agent looks at its measurements, and how all ranks come to the same setting. Start at :class:`Chooser`."""

from __future__ import annotations

import atexit
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddltool.analyzers.goodput.elastic_table import Split
from ddltool.analyzers.goodput.lr_rules import GradientStatistics
from ddltool.analyzers.goodput.noise_scale import NoiseScaleEstimator
from ddltool.analyzers.goodput.tuning import BatchLimits
from ddltool.runtime.agent.noise_sampling import NoiseSampler, affordable_interval
from ddltool.runtime.agent.recording import TimedStep
from ddltool.runtime.agent.tuning import Decision, StepTimes, decide
from ddltool.runtime.hook.job import Job
from ddltool.runtime.hook.resizable_batches import ResizableBatchSampler
from ddltool.runtime.hook.telemetry import seconds_between

FIRST_LOOK = 10
"""Steps before the first look."""
FIT_WAIT_S = 0.25
"""A fit beside training is asked for its result after about so long."""
ASSUMED_FIT_S = 0.05
"""CPU seconds of a fit and search before the first was made."""
NOISE_SHARE, FIT_SHARE = 0.35, 0.25
"""Parts of the overhead allowed for norms and for fits; the rest is for what every step costs."""
LEAST_OBSERVATIONS = 5
"""Of the noise scale, before it decides anything."""
PENDING_KEPT = 256
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How often to look and when to change; the arguments of the same names of the agent."""

    interval_s: float = 30.0
    interval_steps: int | None = None
    overhead: float = 0.01
    noise_every: int | None = None
    min_gain: float = 0.05
    adapt: bool = True
    background: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """What rank 0 tells the others at a look; of the others only ``next_step`` counts. All are numbers."""

    next_step: int
    total: int = 0
    accumulation: int = 0
    look_at: int = 0
    noise_every: int = 0
    sqr: float = math.nan
    var: float = math.nan
    noise_scale: float = math.nan

    def tensor(self) -> torch.Tensor:
        return torch.tensor([float(getattr(self, name)) for name in self.__slots__], dtype=torch.float64)

    @classmethod
    def read(cls, values: torch.Tensor) -> _Message:
        numbers = dict(zip(cls.__slots__, values.tolist(), strict=True))
        whole = {name: int(numbers.pop(name)) for name in cls.__slots__[:5]}
        return cls(**whole, **numbers)


class Chooser:
    """Reads the measurements every so often, fits on rank 0, and gives all ranks the same setting at the same step.

    A look is one gathering of eight numbers per rank, at a step that was agreed on at the look before. The fit runs in a
    thread of rank 0 between two looks. The setting takes effect at the first step that no rank has handed out yet.
    """

    def __init__(
        self,
        job: Job,
        nodes: int,
        limits: BatchLimits,
        policy: Policy,
        sampler: ResizableBatchSampler,
        noise: NoiseSampler,
        estimator: NoiseScaleEstimator,
    ) -> None:
        self._job, self._nodes, self._limits, self._policy = job, nodes, limits, policy
        self._sampler, self._noise = sampler, noise
        self.estimator = estimator
        self.times = StepTimes()
        self.statistics: GradientStatistics | None = None
        self.noise_scale: float | None = None
        self.largest_tried = sampler.split_at(0).total_batch_size
        self.changes: list[tuple[int, int, int]] = []
        self.decision: Decision | None = None
        self.fit_cost_s = ASSUMED_FIT_S
        """CPU seconds of the last fit and search."""
        self._pending: deque[TimedStep] = deque(maxlen=PENDING_KEPT)
        self._durations: deque[float] = deque(maxlen=65)
        self._fitting: Future[Decision | None] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._warned: set[str] = set()
        self.restart()

    def restart(self) -> None:
        """Begin to count steps and time anew, as after loading a checkpoint."""
        self._pending.clear()
        self.look_at = self._sampler.step + (self._policy.interval_steps or FIRST_LOOK)
        self._looked = (self._sampler.step, time.perf_counter())
        self._began_s = time.perf_counter()
        self._fits = 0

    def add(self, timed: TimedStep) -> None:
        """Take a full step that was made."""
        self._pending.append(timed)

    def read(self) -> None:
        """Take in what was measured; the host waits for the device here."""
        try:
            self._noise.drain(self.estimator)
            pending, self._pending = self._pending, deque(maxlen=PENDING_KEPT)
            for timed in pending:
                if timed.end is not None and timed.end.event is not None:
                    timed.end.event.synchronize()
                timed.record(self.times, self._nodes, self._job.world_size)
                if timed.end is not None:
                    self._durations.append(seconds_between(timed.exchanges[0].start, timed.end))
        except Exception as error:
            self.warn("reading the measurements", error)

    def look(self, step: int) -> None:
        """Look at the measurements after ``step`` steps; all ranks do at the same."""
        self.read()
        message = _Message(next_step=self._sampler.next_step)
        if self._job.rank == 0:
            try:
                message = self._message(step)
            except Exception as error:
                self.warn("deciding", error)
                message = _Message(next_step=self._sampler.next_step, look_at=step + FIRST_LOOK, noise_every=-1)
        answers = self._gather(message)
        first = answers[0]
        self.look_at = max(first.look_at, step + 1)
        if first.noise_every >= 0:
            self._noise.every = first.noise_every
        if math.isfinite(first.noise_scale):
            self.noise_scale = first.noise_scale
            self.statistics = GradientStatistics(sqr=first.sqr, var=first.var)
        if first.total:
            self._resize(first, max(answer.next_step for answer in answers))
        self._looked = (step, time.perf_counter())

    def _resize(self, message: _Message, step: int) -> None:
        ranks = self._job.world_size
        split = Split(world_size=ranks, total_batch_size=message.total, accumulation_steps=message.accumulation)
        if split != self._sampler.split_at(step):
            self._sampler.resize(split, step)
            self.changes.append((step, split.total_batch_size, split.accumulation_steps))

    def _gather(self, message: _Message) -> list[_Message]:
        """Return the messages of all ranks."""
        if self._job.side is None:
            return [message]
        mine = message.tensor()
        every = [torch.empty_like(mine) for _ in range(self._job.world_size)]
        dist.all_gather(every, mine, group=self._job.side)
        return [_Message.read(values) for values in every]

    def _message(self, step: int) -> _Message:
        """Return what rank 0 has to say: the result of a fit that is done, and when to look again."""
        step_s = (time.perf_counter() - self._looked[1]) / max(step - self._looked[0], 1)
        decision, soon = self._fitted()
        split = decision.split if decision is not None and self._policy.adapt else None
        statistics_ = self.estimator.statistics(self._limits.initial_batch_size)
        known = statistics_ is not None and self.estimator.count >= LEAST_OBSERVATIONS
        phi = self.estimator.noise_scale if known else None
        return _Message(
            next_step=self._sampler.next_step,
            total=0 if split is None else split.total_batch_size,
            accumulation=0 if split is None else split.accumulation_steps,
            look_at=step + self._steps_to_next(step_s, soon),
            noise_every=self._noise_every(),
            sqr=statistics_.sqr if known and statistics_ is not None else math.nan,
            var=statistics_.var if known and statistics_ is not None else math.nan,
            noise_scale=phi if phi is not None else math.nan,
        )

    def _steps_to_next(self, step_s: float, soon: bool) -> int:
        policy = self._policy
        if policy.interval_steps is not None:
            return policy.interval_steps
        if soon:
            wanted = FIT_WAIT_S / max(step_s, 1e-6)
        else:
            first = self._fits == 0
            interval_s = self._affordable_s() - self._elapsed_s() if first else policy.interval_s
            wanted = max(interval_s, 0.0 if first else self._affordable_s()) / max(step_s, 1e-6)
        return max(1, min(math.ceil(wanted), 10_000_000))

    def _affordable_s(self) -> float:
        """Return the seconds of training over which a fit's cost is spread."""
        return self.fit_cost_s / (FIT_SHARE * self._policy.overhead)

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._began_s

    def _can_afford_fit(self) -> bool:
        """Whether the first fit is paid for by the training done so far; later ones are spaced."""
        return self._policy.interval_steps is not None or self._fits > 0 or self._elapsed_s() >= self._affordable_s()

    def _noise_every(self) -> int:
        policy = self._policy
        if policy.noise_every is not None:
            return policy.noise_every
        if not self._durations or not math.isfinite(self._noise.cost_s):
            return self._noise.every
        return affordable_interval(
            self._noise.cost_s, statistics.median(self._durations), NOISE_SHARE * policy.overhead
        )

    def _fitted(self) -> tuple[Decision | None, bool]:
        """Return a decision that is ready, and whether one is being made."""
        if self._fitting is None and not self._can_afford_fit():
            return None, False
        if self._fitting is None:
            phi = self.estimator.noise_scale if self.estimator.count >= LEAST_OBSERVATIONS else None
            work = partial(
                decide,
                self.times.copy(),
                self._nodes,
                self._sampler.split_at(self._sampler.next_step),
                self._limits,
                noise_scale=phi,
                largest_tried=self.largest_tried,
                min_gain=self._policy.min_gain,
            )
            if not self._policy.background:
                self.decision = self._timed(work)
                return self.decision, False
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="goodput-fit")
                atexit.register(self.close)
            self._fitting = self._pool.submit(self._timed, work)
            return None, True
        if not self._fitting.done():
            return None, True
        fitting, self._fitting = self._fitting, None
        self.decision = fitting.result()
        return self.decision, False

    def _timed(self, work: Callable[[], Decision | None]) -> Decision | None:
        """Return what ``work`` decides, and keep what it cost; a failure decides nothing."""
        start = time.thread_time()
        try:
            return work()
        except Exception as error:
            self.warn("the fit", error)
            return None
        finally:
            self.fit_cost_s = time.thread_time() - start
            self._fits += 1

    def warn(self, what: str, error: BaseException) -> None:
        """Say once per kind of work that it failed; training goes on with the present setting."""
        if what not in self._warned:
            self._warned.add(what)
            text = " ".join(str(error).split()) or type(error).__name__
            log.warning("goodput agent: %s failed (%s); the present batch stays", what, text)

    def close(self) -> None:
        """End the thread."""
        atexit.unregister(self.close)
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
            self._fitting = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs: numbers and a tensor of shape (times, 5)."""
        self.read()
        rows = self.times.rows()
        return {
            "estimator": self.estimator.state_dict(),
            "observations": torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 5),
            "largest_tried": self.largest_tried,
            "noise_scale": math.nan if self.noise_scale is None else self.noise_scale,
            "sqr": math.nan if self.statistics is None else self.statistics.sqr,
            "var": math.nan if self.statistics is None else self.statistics.var,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up a state again. Raises KeyError, TypeError, ValueError or InputError for what is none."""
        rows = state["observations"].tolist()
        sqr, var, noise_scale = (float(state[name]) for name in ("sqr", "var", "noise_scale"))
        tried = int(state["largest_tried"])
        self.estimator.load_state_dict(state["estimator"])
        self.times.load_rows(rows)
        known = math.isfinite(sqr) and math.isfinite(var)
        self.statistics = GradientStatistics(sqr=sqr, var=var) if known else None
        self.noise_scale = noise_scale if math.isfinite(noise_scale) else None
        self.largest_tried = tried
        self.restart()
