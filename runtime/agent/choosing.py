"""What the goodput agent measures and how it decides: times, the fit, the next batch, and when to look for one.

Start at :func:`decide`, which has no processes and no tensors, so that a decision can be repeated from a checkpoint's
numbers. :class:`Chooser` asks for decisions while the job trains, and brings all ranks to the same setting.
"""

from __future__ import annotations

import atexit
import copy
import logging
import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from ddltool.analyzers.job.goodput.elastic_table import Split, find_split
from ddltool.analyzers.job.goodput.fit import fit
from ddltool.analyzers.job.goodput.lr_rules import GradientStatistics
from ddltool.analyzers.job.goodput.noise_scale import NoiseScaleEstimator
from ddltool.analyzers.job.goodput.observations import Observations
from ddltool.analyzers.job.goodput.throughput import ThroughputParams, goodput_per_s
from ddltool.analyzers.job.goodput.tuning import BatchLimits, tune_one
from ddltool.artifacts import Record
from ddltool.errors import Infeasible, InputError, one_line
from ddltool.runtime.agent.noise_sampling import NoiseSampler, affordable_interval
from ddltool.runtime.processes.batches import Pass, VariableBatchSampler
from ddltool.runtime.processes.consensus import Consensus
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.step_times import Exchange, Stamp, seconds_between

DURATIONS_KEPT = 65
"""Latest step durations whose median says how often the noise can be sampled: an odd number has a middle one."""
LONGEST_WAIT_STEPS = 10_000_000
"""A look at the measurements is at most so many steps away."""
TIMES_KEPT = 64
"""Latest times per allocation and local batch; what is fitted is their median."""
FULL_STEP, PASS = 0, 1  # kinds of times; numbers, as they stand in a checkpoint's tensor
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
"""Steps whose times wait on the device to be read; of more, the oldest are dropped."""
Key = tuple[int, int, int, int]
"""(nodes, replicas, local batch, kind of time)."""
log = logging.getLogger(__name__)


class StepTimeHistory:
    """Measured times by configuration: of the synchronising part of full steps, and of passes without it."""

    def __init__(self) -> None:
        self._times: defaultdict[Key, deque[float]] = defaultdict(partial(deque, maxlen=TIMES_KEPT))

    def add(self, nodes: int, replicas: int, local_batch: int, kind: int, seconds: float) -> None:
        """Keep one measured time, in seconds, of a configuration: nodes, replicas and samples per replica (``local_batch``).

        ``kind`` FULL_STEP: the last pass of a step, with reduction and update; PASS: a pass alone. Times that are not
        finite and above 0 are left out.
        """
        if math.isfinite(seconds) and seconds > 0:
            self._times[nodes, replicas, local_batch, kind].append(seconds)

    def __len__(self) -> int:
        """Return the number of configurations with a full step."""
        return sum(1 for key in self._times if key[3] == FULL_STEP)

    @property
    def largest_local_batch(self) -> int:
        """The largest local batch with a time, 0 without any."""
        return max((key[2] for key in self._times), default=0)

    def observations(self) -> Observations:
        """Return one row per configuration that has a full step, as arrays of shape (n,); times are medians in seconds.

        The time of a pass alone is NaN where none was measured.
        """
        rows = []
        for (nodes, replicas, batch, kind), times in sorted(self._times.items()):
            if kind == FULL_STEP:
                pass_times = self._times.get((nodes, replicas, batch, PASS))
                pass_s = np.median(pass_times) if pass_times else math.nan
                rows.append((nodes, replicas, batch, np.median(times), pass_s))
        table = np.array(rows, dtype=np.float64).reshape(-1, 5)
        return Observations(
            num_nodes=table[:, 0],
            num_replicas=table[:, 1],
            local_batch_size=table[:, 2],
            step_time_s=table[:, 3],
            grad_time_s=table[:, 4],
        )

    def rows(self) -> list[list[float]]:
        """Return all times kept, as [nodes, replicas, local batch, kind, seconds], oldest first per configuration."""
        return [[*map(float, key), seconds] for key, times in sorted(self._times.items()) for seconds in times]

    def load_rows(self, rows: Iterable[Sequence[float]]) -> None:
        """Replace all times by those that :meth:`rows` returned. Raises InputError for a row that is not five numbers."""
        self._times.clear()
        for row_index, row in enumerate(rows):
            if len(row) != 5 or not all(math.isfinite(value) for value in row):
                raise InputError(f"observations:row {row_index}", f"is {list(row)}", "give what state_dict returned")
            self.add(int(row[0]), int(row[1]), int(row[2]), int(row[3]), float(row[4]))


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDecision:
    """How to share out steps from now on, the goodput that is expected of it, and the fitted model."""

    split: Split
    goodput_per_s: float
    params: ThroughputParams


def decide(
    times: StepTimeHistory,
    nodes: int,
    present: Split,
    limits: BatchLimits,
    *,
    noise_scale: float | None,
    largest_tried: int,
    min_gain: float,
) -> BatchDecision | None:
    """Return the batch of highest goodput on the present ranks; None where nothing can be said yet.

    Fits the throughput model to all times (Pollux, section 4.1) and maximises goodput over local batch and accumulation
    (Equation 13). What the model says beyond the batches that were tried is extrapolation, so neither the total nor the
    local batch may be more than twice the largest tried (Pollux's rule for replicas, applied to batches). Raises what
    the fit and the search raise.

    Args:
        times: what was measured.
        nodes: machines in the job.
        present: how the ranks share a step now; also the result's split where no change is worth it.
        limits: of total and local batch.
        noise_scale: gradient noise scale in samples; None: unknown.
        largest_tried: largest total batch of a step so far, in samples.
        min_gain: share of goodput by which a change must promise to be better.
    """
    if noise_scale is None or not len(times):
        return None
    params, replicas, initial_batch = fit(times.observations()).params, present.world_size, limits.initial_batch_size
    total_limit = min(limits.max_batch_size, max(2 * largest_tried, initial_batch, replicas))
    local_limit = min(limits.max_local_batch_size, max(2 * times.largest_local_batch, limits.min_local_batch_size))
    explored = replace(limits, max_batch_size=total_limit, max_local_batch_size=local_limit)
    passes = present.accumulation_steps  # those without an update, beside the last
    local_batch = -(-present.total_batch_size // (replicas * (passes + 1)))  # rounded up
    noise = {"noise_scale": noise_scale, "initial_batch_size": initial_batch}
    present_goodput = float(goodput_per_s(params, nodes, replicas, local_batch, passes, **noise))
    try:
        best = tune_one(params, nodes, replicas, explored, noise_scale=noise_scale)
    except Infeasible:
        return None
    # ranks may differ by a sample, so a total that equal batches only reach beyond the limit is cut back to it
    total = min(best.total_batch_size, explored.max_batch_size)
    best_split = Split(world_size=replicas, total_batch_size=total, accumulation_steps=best.accumulation_steps)
    is_better = best.goodput_per_s > present_goodput * (1 + min_gain)
    split = best_split if is_better else present
    return BatchDecision(split=split, goodput_per_s=best.goodput_per_s, params=params)


def split_near(total: int, replicas: int, limits: BatchLimits) -> Split:
    """Return how the ranks share ``total`` samples, or the nearest total that they can share within the limits.

    Of two totals at equal distance it is the smaller. Raises Infeasible when there is none at all.
    """
    smallest, largest = limits.initial_batch_size, limits.max_batch_size
    total = min(max(total, smallest), largest)
    for distance in range(max(total - smallest, largest - total) + 1):
        for candidate in (total - distance, total + distance):
            split = find_split(candidate, replicas, limits)[0] if smallest <= candidate <= largest else None
            if split is not None:
                return split
    raise Infeasible(
        f"no total batch from {smallest} to {largest} can be shared by {replicas} ranks in local batches of "
        f"{limits.min_local_batch_size} to {limits.max_local_batch_size}"
    )


@dataclass(kw_only=True, slots=True)
class TimedStep:
    """One optimizer step of this rank while it is made: one exchange per pass, of which the last has the reduction."""

    first_pass: Pass
    """The pass of the step's first batch; it tells the step's number, position and samples."""
    exchanges: list[Exchange]
    end: Stamp | None = None
    own_s: float = 0.0
    """What sampling the noise took of it."""

    def record(self, times: StepTimeHistory, nodes: int, replicas: int) -> float:
        """Add this step's times to ``times``, once the device has passed its end; return the seconds of the whole step.

        The last pass, with reduction and update, gives a full step's time, without what sampling the noise took. The
        passes before it give times of a pass alone. With one pass and several replicas, a pass's time is what comes
        before this rank waits for the others.
        """
        last, end = self.exchanges[-1], self.end
        if end is None:
            return 0.0
        if end.event is not None:
            end.event.synchronize()
        if last.ready is not None and last.samples:
            times.add(nodes, replicas, last.samples, FULL_STEP, seconds_between(last.start, end) - self.own_s)
            for exchange in self.exchanges[:-1]:
                if exchange.ready is not None:
                    times.add(nodes, replicas, exchange.samples, PASS, seconds_between(exchange.start, exchange.ready))
            if len(self.exchanges) == 1 and replicas > 1:
                times.add(nodes, replicas, last.samples, PASS, seconds_between(last.start, last.ready) - self.own_s)
        return seconds_between(self.exchanges[0].start, end)


class AgentPolicy(Record):
    """How often to look at the measurements and when to change; the arguments of the same names of the agent."""

    interval_s: float = Field(gt=0)
    interval_steps: int | None = Field(ge=1)
    overhead: float = Field(gt=0)
    noise_every: int | None = Field(ge=0)
    min_gain: float = Field(ge=0)
    adapt: bool
    background: bool
    warmup_epochs: float = Field(ge=0)


class _Setting(NamedTuple):
    """What rank 0 chooses at a look, as numbers that can be sent; ``total`` 0: no change; NaN: unknown."""

    first_step: float
    """First step that no rank has handed out."""
    look_at: float
    noise_every: float = math.nan
    total: float = 0
    accumulation: float = 0
    sqr: float = math.nan
    var: float = math.nan
    noise_scale: float = math.nan


class Chooser:
    """Looks at the measurements every so often, fits on rank 0, and gives all ranks the same setting at the same step.

    A look is one round of consensus, at a step that was agreed on at the look before. The fit runs in a thread of rank
    0 between two looks. The setting takes effect at the first step that no rank has handed out yet.
    """

    def __init__(
        self,
        job: DistributedJob,
        nodes: int,
        limits: BatchLimits,
        policy: AgentPolicy,
        sampler: VariableBatchSampler,
        noise: NoiseSampler,
        estimator: NoiseScaleEstimator,
    ) -> None:
        """Prepare to choose for the ranks of ``job`` on ``nodes`` machines; ``sampler`` and ``noise`` get what is chosen."""
        self._job, self._nodes, self._limits, self._policy = job, nodes, limits, policy
        self._sampler, self._noise = sampler, noise
        self._consensus = Consensus(job, self._choose)
        self.estimator = estimator
        self.times = StepTimeHistory()
        self.statistics: GradientStatistics | None = None
        self.noise_scale: float | None = None
        self.largest_tried = sampler.split_at(0).total_batch_size  # of the total batches that steps were made of
        self.changes: list[tuple[int, int, int]] = []  # (first step, total batch, accumulation steps)
        self.decision: BatchDecision | None = None
        self.fit_cost_s = ASSUMED_FIT_S
        """CPU seconds of the last fit and search."""
        self._timed_steps: deque[TimedStep] = deque(maxlen=PENDING_KEPT)  # not yet read from the device
        self._durations: deque[float] = deque(maxlen=DURATIONS_KEPT)  # seconds of the latest steps
        self._running_fit: Future[BatchDecision | None] | None = None
        self._fit_thread: ThreadPoolExecutor | None = None
        self._warned: set[str] = set()  # kinds of work whose failure was logged
        self.restart()

    @property
    def adapts(self) -> bool:
        """Whether the batch may change."""
        return self._policy.adapt

    def split_at(self, step: int) -> Split:
        """Return how the ranks share a full step at step number ``step``."""
        split = self._sampler.split_at(step)
        assert isinstance(split, Split)
        return split

    def restart(self) -> None:
        """Begin to count steps and time anew, at a start and after loading a checkpoint."""
        self._timed_steps.clear()
        self.look_at = self._sampler.step + (self._policy.interval_steps or FIRST_LOOK)
        self._last_look = (self._sampler.step, time.perf_counter())  # from which the seconds of a step follow
        self._began_s = time.perf_counter()
        self._fit_count = 0

    def add(self, timed: TimedStep) -> None:
        """Keep a full step that was made, to read its times at the next look."""
        self._timed_steps.append(timed)

    def read(self) -> None:
        """Read the noise observations and step times that are still on the device; the host waits for it."""
        try:
            self._noise.drain(self.estimator)
            while self._timed_steps:
                seconds = self._timed_steps.popleft().record(self.times, self._nodes, self._job.world_size)
                if seconds > 0:
                    self._durations.append(seconds)
        except Exception as error:
            self.warn("reading the measurements", error)

    def look(self) -> None:
        """Read the measurements and agree with all ranks on the next setting. All ranks call this after the same step.

        The setting says when to look again, how often to sample the noise, the noise figures and, after a fit, a new
        split of the batch. Raises ConsensusError when a rank is gone.
        """
        self.read()
        step = self._sampler.step
        agreed = self._consensus.propose(lambda: np.array([self._sampler.next_step], dtype=np.float64))
        assert agreed is not None  # a consensus that does not go on behind training has its choice at once
        setting = _Setting(*agreed)  # NaN and 0 mean: no change
        self.look_at = max(int(setting.look_at), step + 1)
        if math.isfinite(setting.noise_every):
            self._noise.every = int(setting.noise_every)
        if math.isfinite(setting.noise_scale):
            self.noise_scale = float(setting.noise_scale)
            self.statistics = GradientStatistics(sqr=float(setting.sqr), var=float(setting.var))
        if setting.total:
            first_step, total, passes = int(setting.first_step), int(setting.total), int(setting.accumulation)
            split = Split(world_size=self._job.world_size, total_batch_size=total, accumulation_steps=passes)
            if split != self.split_at(first_step):
                self._sampler.resize(split, first_step)
                self.changes.append((first_step, total, passes))
        self._last_look = (step, time.perf_counter())

    def _choose(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return rank 0's setting for all ranks, as an array of :class:`_Setting`'s fields; the consensus calls this on rank 0.

        ``rows`` (n, 1): each rank's first step that it has not handed out yet; at the largest of them all ranks can
        change. A failure leaves everything as it is until a later look.
        """
        first_step, step = float(rows.max()), self._sampler.step
        try:
            return np.array(self._next_setting(first_step, step))
        except Exception as error:
            self.warn("deciding", error)
            return np.array(_Setting(first_step, step + FIRST_LOOK))

    def _next_setting(self, first_step: float, step: int) -> _Setting:
        """Return rank 0's setting by what is known now: a finished fit's split, the noise figures, the step of the next look.

        ``first_step``: the first step that no rank has handed out, where a new split takes effect; ``step``: the
        present one.
        """
        step_s = (time.perf_counter() - self._last_look[1]) / max(step - self._last_look[0], 1)
        decision, is_fitting = self._finished_decision()
        setting = _Setting(first_step, step + self._steps_to_next(step_s, is_fitting), self._next_noise_interval())
        if decision is not None and self._policy.adapt:
            split = decision.split
            setting = setting._replace(total=split.total_batch_size, accumulation=split.accumulation_steps)
        gradient_statistics = self.estimator.statistics(self._limits.initial_batch_size)
        noise_scale = self._known_noise_scale()
        if gradient_statistics is not None and noise_scale is not None:
            sqr, var = gradient_statistics.sqr, gradient_statistics.var
            setting = setting._replace(sqr=sqr, var=var, noise_scale=noise_scale)
        return setting

    def _known_noise_scale(self) -> float | None:
        """Return the gradient noise scale in samples, None while there are too few observations of it to decide by."""
        return self.estimator.noise_scale if self.estimator.count >= LEAST_OBSERVATIONS else None

    def _steps_to_next(self, step_s: float, is_fitting: bool) -> int:
        """Return after how many steps of ``step_s`` seconds to look again, at least 1.

        While a fit runs, its result is fetched soon. Before the first fit, the wait lasts until training has gone on
        long enough to pay for one. Afterwards it lasts for the interval, or longer where a fit costs more than the
        overhead allows.
        """
        policy = self._policy
        if policy.interval_steps is not None:
            return policy.interval_steps
        if is_fitting:
            wanted_s = FIT_WAIT_S
        elif self._fit_count:
            wanted_s = max(policy.interval_s, self._affordable_s())
        else:
            wanted_s = max(self._affordable_s() - self._elapsed_s(), 0.0)
        return max(1, min(math.ceil(wanted_s / max(step_s, 1e-6)), LONGEST_WAIT_STEPS))  # 1e-6: no division by zero

    def _affordable_s(self) -> float:
        """Return the seconds of training that pay for one fit, by the share of the time that fits may take."""
        return self.fit_cost_s / (FIT_SHARE * self._policy.overhead)

    def _elapsed_s(self) -> float:
        """Return the seconds since the start, or since a checkpoint was loaded."""
        return time.perf_counter() - self._began_s

    def _next_noise_interval(self) -> int:
        """Return every how many steps to sample the noise: as the user says, or as often as its share of the overhead pays for.

        Until its cost is known, the present interval stays.
        """
        policy = self._policy
        if policy.noise_every is not None:
            return policy.noise_every
        if not self._durations or not math.isfinite(self._noise.cost_s):
            return self._noise.every
        step_s = statistics.median(self._durations)
        return affordable_interval(self._noise.cost_s, step_s, NOISE_SHARE * policy.overhead)

    def _finished_decision(self) -> tuple[BatchDecision | None, bool]:
        """Return (a finished fit's decision, whether a fit is under way); start a fit when one is due.

        The decision is None where none is ready or the fit failed. A fit gets a copy of the times, as it may run in a
        thread.
        """
        if self._running_fit is not None:
            if not self._running_fit.done():
                return None, True
            fitting, self._running_fit = self._running_fit, None
            self.decision = fitting.result()
            return self.decision, False
        # The first fit is paid for by the training done so far; later ones are spaced.
        if self._policy.interval_steps is None and not self._fit_count and self._elapsed_s() < self._affordable_s():
            return None, False
        work = partial(
            decide,
            copy.deepcopy(self.times),
            self._nodes,
            self.split_at(self._sampler.next_step),
            self._limits,
            noise_scale=self._known_noise_scale(),
            largest_tried=self.largest_tried,
            min_gain=self._policy.min_gain,
        )
        if not self._policy.background:
            self.decision = self._run_fit(work)
            return self.decision, False
        if self._fit_thread is None:
            self._fit_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="goodput-fit")
            atexit.register(self.close)
        self._running_fit = self._fit_thread.submit(self._run_fit, work)
        return None, True

    def _run_fit(self, work: Callable[[], BatchDecision | None]) -> BatchDecision | None:
        """Run ``work`` and return its decision, None when it fails; note the CPU seconds that it took."""
        start = time.thread_time()
        try:
            return work()
        except Exception as error:
            self.warn("the fit", error)
            return None
        finally:
            self.fit_cost_s = time.thread_time() - start
            self._fit_count += 1

    def warn(self, what: str, error: BaseException) -> None:
        """Log, once for each kind of work (``what``), that it failed; training goes on with the present setting."""
        if what not in self._warned:
            self._warned.add(what)
            reason = one_line(str(error))[:200] or type(error).__name__  # some of torch's messages are pages
            log.warning("goodput agent: %s failed (%s); the present batch stays", what, reason)

    def close(self) -> None:
        """End the consensus and the thread of fits; the result of a fit under way is not waited for."""
        atexit.unregister(self.close)
        self._consensus.close()
        if self._fit_thread is not None:
            self._fit_thread.shutdown(wait=False, cancel_futures=True)
            self._fit_thread = self._running_fit = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs: numbers and a tensor of shape (times, 5); NaN stands for what is not known."""
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
        """Take up what :meth:`state` returned. Raises KeyError, TypeError, ValueError or InputError for anything else."""
        rows = state["observations"].tolist()
        sqr, var, noise_scale = (float(state[name]) for name in ("sqr", "var", "noise_scale"))
        largest_tried = int(state["largest_tried"])
        self.estimator.load_state_dict(state["estimator"])
        self.times.load_rows(rows)
        has_statistics = math.isfinite(sqr) and math.isfinite(var)
        self.statistics = GradientStatistics(sqr=sqr, var=var) if has_statistics else None
        self.noise_scale = noise_scale if math.isfinite(noise_scale) else None
        self.largest_tried = largest_tried
        self.restart()
