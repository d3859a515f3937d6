"""Keeps the goodput agent's measurements and makes its decisions: times, the fit, the next batch, and when to look again.

Start at :func:`decide`, a plain function of numbers, so that a decision can be repeated from a checkpoint.
:class:`Chooser` asks for decisions while the job trains, and gives all ranks the same setting. A *look* is one round of
that: all ranks read their measurements and agree on a setting.
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
from pydantic import Field

from ddltool.analyzers.job.goodput.elastic_table import Split, find_split
from ddltool.analyzers.job.goodput.fit import fit
from ddltool.analyzers.job.goodput.lr_rules import GradientStatistics
from ddltool.analyzers.job.goodput.noise_scale import NoiseScaleEstimator
from ddltool.analyzers.job.goodput.observations import Observations
from ddltool.analyzers.job.goodput.throughput import ThroughputParams, goodput_per_s
from ddltool.analyzers.job.goodput.tuning import BatchLimits, tune_one
from ddltool.arrays import Floats
from ddltool.artifacts import Record
from ddltool.errors import Infeasible, InputError, one_line
from ddltool.runtime.agent.noise_sampling import NoiseSampler, affordable_interval
from ddltool.runtime.processes.batches import Pass, VariableBatchSampler
from ddltool.runtime.processes.consensus import Consensus
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.step_times import Exchange, Stamp, seconds_between

DURATIONS_KEPT = 65
"""Number of latest step durations whose median says how often the noise can be sampled; odd, so that one is in the middle."""
LONGEST_WAIT_STEPS = 10_000_000
"""Most steps to the next look at the measurements."""
TIMES_KEPT = 64
"""Number of latest times kept per configuration; their median is fitted."""
FULL_STEP, PASS = 0, 1  # kinds of times, as numbers because a checkpoint keeps them in a tensor
FIRST_LOOK = 10
"""Steps before the first look."""
FIT_WAIT_S = 0.25
"""Seconds after which the result of a fit beside training is looked for."""
ASSUMED_FIT_S = 0.05
"""CPU seconds of a fit and search that are assumed before the first was made."""
NOISE_SHARE, FIT_SHARE = 0.35, 0.25
"""Shares of the allowed overhead for norms and for fits; the rest is for the cost of every step."""
LEAST_OBSERVATIONS = 5
"""Number of observations of the noise scale before it is used."""
PENDING_KEPT = 256
"""Most steps whose times wait on the device to be read; of more, the oldest are dropped."""
Key = tuple[int, int, int, int]
"""A configuration and kind of time: (nodes, replicas, local batch, FULL_STEP or PASS)."""
log = logging.getLogger(__name__)


class StepTimeHistory:
    """Measured times by configuration: of the last pass of full steps, with reduction and update, and of passes alone."""

    def __init__(self) -> None:
        self._times: defaultdict[Key, deque[float]] = defaultdict(partial(deque, maxlen=TIMES_KEPT))

    def add(self, nodes: int, replicas: int, local_batch: int, kind: int, seconds: float) -> None:
        """Keep a measured time of a configuration: nodes, replicas and samples per replica and pass (``local_batch``).

        ``kind`` FULL_STEP: the last pass of a step, with reduction and update; PASS: a pass alone. Times that are not
        finite, or not above 0, are dropped.
        """
        if math.isfinite(seconds) and seconds > 0:
            self._times[nodes, replicas, local_batch, kind].append(seconds)

    def __len__(self) -> int:
        """Return the number of configurations with a time of a full step."""
        return sum(1 for key in self._times if key[3] == FULL_STEP)

    @property
    def largest_local_batch(self) -> int:
        """The largest local batch that has a time; 0 if there are none."""
        return max((key[2] for key in self._times), default=0)

    def observations(self) -> Observations:
        """Return arrays (n,) with an entry per configuration that has a full step; times are medians in seconds.

        The time of a pass alone is NaN if none was measured.
        """
        rows = []
        for (nodes, replicas, batch, kind), times in sorted(self._times.items()):
            if kind != FULL_STEP:
                continue
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
        """Return all times kept, as rows [nodes, replicas, local batch, kind, seconds], oldest first per configuration."""
        return [[*map(float, key), seconds] for key, times in sorted(self._times.items()) for seconds in times]

    def load_rows(self, rows: Iterable[Sequence[float]]) -> None:
        """Replace all times by those that :meth:`rows` returned. Raises InputError for a row that is not five numbers."""
        self._times.clear()
        for row_index, row in enumerate(rows):
            if len(row) != 5 or not all(math.isfinite(value) for value in row):
                raise InputError(f"observations:row {row_index}", f"is {list(row)}", "give what state_dict returned")
            nodes, replicas, local_batch, kind, seconds = row
            self.add(int(nodes), int(replicas), int(local_batch), int(kind), float(seconds))


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDecision:
    """How ranks share steps from now on, the best goodput that the fitted model predicts, and the model's parameters."""

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
    """Return the batch of highest goodput on the present ranks; None if the noise, times or limits allow no answer.

    Fits the throughput model to all times (Pollux, section 4.1) and maximises goodput over local batch and accumulation
    (Equation 13). Beyond the batches that were tried the model extrapolates, so neither the total nor the local batch
    may be more than twice the largest tried (Pollux's rule for replicas, applied to batches). Raises what the fit and
    the search raise.

    Args:
        times: the measured times.
        nodes: number of machines in the job.
        present: how the ranks share a step now; it is kept where no change is worth it.
        limits: of total and local batch.
        noise_scale: gradient noise scale in samples; None: unknown.
        largest_tried: largest total batch of a step so far, in samples.
        min_gain: share of the present goodput by which the best one must exceed it for a change.
    """
    if noise_scale is None or not len(times):
        return None
    params = fit(times.observations()).params
    replicas = present.world_size
    initial_batch = limits.initial_batch_size
    # The search: within the limits, and not beyond twice what was tried.
    total_limit = min(limits.max_batch_size, max(2 * largest_tried, initial_batch, replicas))
    local_limit = min(limits.max_local_batch_size, max(2 * times.largest_local_batch, limits.min_local_batch_size))
    explored = replace(limits, max_batch_size=total_limit, max_local_batch_size=local_limit)
    try:
        best = tune_one(params, nodes, replicas, explored, noise_scale=noise_scale)
    except Infeasible:
        return None
    # The present batch, by the same model.
    passes = present.accumulation_steps  # passes before the last, which alone makes the update
    local_batch = -(-present.total_batch_size // (replicas * (passes + 1)))  # rounded up
    noise = {"noise_scale": noise_scale, "initial_batch_size": initial_batch}
    present_goodput = float(goodput_per_s(params, nodes, replicas, local_batch, passes, **noise))
    # The search has equal batches on all ranks, which may exceed the limit; ranks may differ by a sample, so it is cut back.
    total = min(best.total_batch_size, explored.max_batch_size)
    best_split = Split(world_size=replicas, total_batch_size=total, accumulation_steps=best.accumulation_steps)
    is_better = best.goodput_per_s > present_goodput * (1 + min_gain)
    split = best_split if is_better else present
    return BatchDecision(split=split, goodput_per_s=best.goodput_per_s, params=params)


def split_near(total: int, replicas: int, limits: BatchLimits) -> Split:
    """Return how ``replicas`` ranks share ``total`` samples, or the nearest total that they can share within the limits.

    Of two totals at equal distance the smaller is taken. Raises Infeasible if there is none.
    """
    smallest = limits.initial_batch_size
    largest = limits.max_batch_size
    total = min(max(total, smallest), largest)
    for distance in range(max(total - smallest, largest - total) + 1):
        for candidate in (total - distance, total + distance):
            if not smallest <= candidate <= largest:
                continue
            split, _ = find_split(candidate, replicas, limits)
            if split is not None:
                return split
    raise Infeasible(
        f"no total batch from {smallest} to {largest} can be shared by {replicas} ranks in local batches of "
        f"{limits.min_local_batch_size} to {limits.max_local_batch_size}"
    )


@dataclass(kw_only=True, slots=True)
class TimedStep:
    """The times of one optimizer step of this rank, filled in while it is made."""

    first_pass: Pass
    """The pass of the step's first batch, which has the step's number, position and samples."""
    exchanges: list[Exchange]
    """One for each pass so far; that of the last pass includes the reduction."""
    end: Stamp | None = None
    """The moment after the update; None: the step is under way."""
    own_s: float = 0.0
    """Seconds of the step that sampling the noise took."""

    def record(self, times: StepTimeHistory, nodes: int, replicas: int) -> float:
        """Add this step's times to ``times``, and return the seconds of the whole step; 0 if it has not ended.

        Blocks until the device has passed the step's end. The last pass, with reduction and update, gives a full step's
        time, without the time of sampling the noise; the passes before it give times of a pass alone. With one pass and
        several replicas, the time of a pass alone is that until this rank waits for the others. A rank without samples
        in the last pass adds nothing.
        """
        last = self.exchanges[-1]
        end = self.end
        if end is None:
            return 0.0
        if end.event is not None:
            end.event.synchronize()
        if last.ready is not None and last.samples:
            full_s = seconds_between(last.start, end) - self.own_s
            times.add(nodes, replicas, last.samples, FULL_STEP, full_s)
            for exchange in self.exchanges[:-1]:
                if exchange.ready is not None:
                    pass_s = seconds_between(exchange.start, exchange.ready)
                    times.add(nodes, replicas, exchange.samples, PASS, pass_s)
            if len(self.exchanges) == 1 and replicas > 1:
                pass_s = seconds_between(last.start, last.ready) - self.own_s
                times.add(nodes, replicas, last.samples, PASS, pass_s)
        return seconds_between(self.exchanges[0].start, end)


class AgentPolicy(Record):
    """How often to look at the measurements and when to change; fields as the GoodputAgent's arguments of these names."""

    interval_s: float = Field(gt=0)
    interval_steps: int | None = Field(ge=1)
    overhead: float = Field(gt=0)
    noise_every: int | None = Field(ge=0)
    min_gain: float = Field(ge=0)
    adapt: bool
    background: bool
    warmup_epochs: float = Field(ge=0)


class _Setting(NamedTuple):
    """What rank 0 chooses at a look, as numbers that can be sent; NaN: unknown, or no change."""

    first_step: float
    """First step that no rank has handed out, from which a new split counts."""
    look_at: float
    """Number of the step after which to look again."""
    noise_every: float = math.nan
    """Sample the noise every so many steps."""
    total: float = 0
    """Total batch from ``first_step`` on; 0: no change."""
    accumulation: float = 0
    """Accumulation steps that belong to ``total``."""
    sqr: float = math.nan
    var: float = math.nan
    """``sqr`` and ``var`` of :class:`GradientStatistics`."""
    noise_scale: float = math.nan
    """Gradient noise scale in samples."""


class Chooser:
    """Looks at the measurements every so often, fits on rank 0, and gives all ranks the same setting at the same step.

    A look is one round of consensus, at a step that all ranks agreed on at the look before. The fit runs in a thread of
    rank 0 between two looks. A new split takes effect at the first step that no rank has handed out yet.

    Attributes:
        look_at: number of the step at which to call :meth:`look`, the same on all ranks.
        times, estimator: the measurements of this rank.
        statistics, noise_scale: what all ranks know of the gradient noise since the last look; None: nothing yet.
        largest_tried: largest total batch of a step so far, in samples.
        changes: changes of the batch, as (first step, total batch, accumulation steps).
        decision: the result of the last fit; rank 0 only.
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
        """Prepare to choose for the ranks of ``job`` on ``nodes`` machines.

        A new split is given to ``sampler`` and a new sampling interval to ``noise``, whose norms go to ``estimator``.
        """
        self._job = job
        self._nodes = nodes
        self._limits = limits
        self._policy = policy
        self._sampler = sampler
        self._noise = noise
        self._consensus = Consensus(job, self._choose)
        self.estimator = estimator
        self.times = StepTimeHistory()
        self.statistics: GradientStatistics | None = None
        self.noise_scale: float | None = None
        self.largest_tried = sampler.split_at(0).total_batch_size
        self.changes: list[tuple[int, int, int]] = []
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
        assert isinstance(split, Split)  # the agent gives its sampler no other shares
        return split

    def restart(self) -> None:
        """Count steps and time anew: at a start and after loading a checkpoint."""
        self._timed_steps.clear()
        self.look_at = self._sampler.step + (self._policy.interval_steps or FIRST_LOOK)
        self._last_look = (self._sampler.step, time.perf_counter())  # gives the seconds per step since then
        self._began_s = time.perf_counter()
        self._fit_count = 0

    def add(self, timed: TimedStep) -> None:
        """Keep a full step that has ended, to read its times at the next look."""
        self._timed_steps.append(timed)

    def read(self) -> None:
        """Read the noise observations and step times that are still on the device; blocks until it has made them.

        A failure is logged once; what was not read is lost.
        """
        try:
            self._noise.drain(self.estimator)
            while self._timed_steps:
                seconds = self._timed_steps.popleft().record(self.times, self._nodes, self._job.world_size)
                if seconds > 0:
                    self._durations.append(seconds)
        except Exception as error:
            self.warn("reading the measurements", error)

    def look(self) -> None:
        """Read the measurements, agree with all ranks on the next setting, and apply it.

        All ranks call this after the same step, and wait for rank 0's choice. The setting says when to look again, how
        often to sample the noise, the noise figures and, after a fit, a new split of the batch. Raises ConsensusError
        when a rank is gone.
        """
        self.read()
        step = self._sampler.step
        # Each rank proposes the first step that its loader has not handed out; rank 0 answers with a setting.
        agreed = self._consensus.propose(lambda: np.array([self._sampler.next_step], dtype=np.float64))
        assert agreed is not None  # None comes only from a consensus behind training
        setting = _Setting(*agreed)  # NaN and 0 mean: no change
        self.look_at = max(int(setting.look_at), step + 1)
        if math.isfinite(setting.noise_every):
            self._noise.every = int(setting.noise_every)
        if math.isfinite(setting.noise_scale):
            self.noise_scale = float(setting.noise_scale)
            self.statistics = GradientStatistics(sqr=float(setting.sqr), var=float(setting.var))
        if setting.total:
            first_step = int(setting.first_step)
            total = int(setting.total)
            passes = int(setting.accumulation)
            split = Split(world_size=self._job.world_size, total_batch_size=total, accumulation_steps=passes)
            if split != self.split_at(first_step):
                self._sampler.resize(split, first_step)
                self.changes.append((first_step, total, passes))
        self._last_look = (step, time.perf_counter())

    def _choose(self, rows: Floats) -> Floats:
        """Return the setting for all ranks, as an array of :class:`_Setting`'s fields; the consensus calls this on rank 0.

        ``rows``: (n, 1), each rank's first step that it has not handed out yet; at the largest of them all ranks can
        change. After a failure, which is logged once, the setting changes nothing and asks for another look.
        """
        first_step = float(rows.max())
        step = self._sampler.step
        try:
            return np.array(self._next_setting(first_step, step))
        except Exception as error:
            self.warn("deciding", error)
            return np.array(_Setting(first_step, step + FIRST_LOOK))

    def _next_setting(self, first_step: float, step: int) -> _Setting:
        """Return the setting that follows from a finished fit, the noise and the time, and start a fit if one is due.

        ``first_step``: the first step that no rank has handed out; ``step``: number of the next step of this rank.
        """
        step_then, then_s = self._last_look
        step_s = (time.perf_counter() - then_s) / max(step - step_then, 1)
        decision, is_fitting = self._advance_fit()
        setting = _Setting(
            first_step=first_step,
            look_at=step + self._steps_to_next(step_s, is_fitting),
            noise_every=self._next_noise_interval(),
        )
        if decision is not None and self._policy.adapt:
            split = decision.split
            setting = setting._replace(total=split.total_batch_size, accumulation=split.accumulation_steps)
        gradients = self.estimator.statistics(self._limits.initial_batch_size)
        noise_scale = self._known_noise_scale()
        if gradients is not None and noise_scale is not None:
            setting = setting._replace(sqr=gradients.sqr, var=gradients.var, noise_scale=noise_scale)
        return setting

    def _known_noise_scale(self) -> float | None:
        """Return the gradient noise scale in samples; None while it has fewer than LEAST_OBSERVATIONS observations."""
        return self.estimator.noise_scale if self.estimator.count >= LEAST_OBSERVATIONS else None

    def _steps_to_next(self, step_s: float, is_fitting: bool) -> int:
        """Return after how many steps of ``step_s`` seconds to look again, at least 1.

        With the policy's ``interval_steps`` it is that number. Otherwise: while a fit runs, its result is looked for
        soon; before the first fit, training must have lasted long enough to pay for one; after it, the wait is the
        policy's interval, or longer where a fit costs more than the overhead allows.
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
        wanted_steps = math.ceil(wanted_s / max(step_s, 1e-6))  # 1e-6: no division by zero
        return max(1, min(wanted_steps, LONGEST_WAIT_STEPS))

    def _affordable_s(self) -> float:
        """Return the seconds of training of which one fit takes no more than the share that fits may take."""
        return self.fit_cost_s / (FIT_SHARE * self._policy.overhead)

    def _elapsed_s(self) -> float:
        """Return the seconds since the start or the last loaded checkpoint."""
        return time.perf_counter() - self._began_s

    def _next_noise_interval(self) -> int:
        """Return every how many steps to sample the noise.

        That is the policy's ``noise_every``, or else as often as the noise's share of the overhead allows; until the
        cost of sampling is known, the present interval.
        """
        policy = self._policy
        if policy.noise_every is not None:
            return policy.noise_every
        if not self._durations or not math.isfinite(self._noise.cost_s):
            return self._noise.every
        step_s = statistics.median(self._durations)
        return affordable_interval(self._noise.cost_s, step_s, NOISE_SHARE * policy.overhead)

    def _advance_fit(self) -> tuple[BatchDecision | None, bool]:
        """Take a finished fit's result, or start a fit if none runs and it is affordable; return (decision, whether one runs).

        The decision, which :attr:`decision` keeps, is None if no fit has finished since the last call, or it has failed or
        found nothing. Without a background thread the fit runs here.
        """
        if self._running_fit is not None:
            if not self._running_fit.done():
                return None, True
            fitting = self._running_fit
            self._running_fit = None
            self.decision = fitting.result()
            return self.decision, False
        # The first fit must be affordable after the training so far; later ones are affordable because looks are spaced.
        if self._policy.interval_steps is None and not self._fit_count and self._elapsed_s() < self._affordable_s():
            return None, False
        work = partial(
            decide,
            copy.deepcopy(self.times),  # because the fit may run in a thread while times are added
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
        """Run ``work`` and return its decision; None if it fails, which is logged once. Notes the CPU seconds of the fit."""
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
        """Log a warning, once for each kind of work (``what``), that it has failed and the present batch stays."""
        if what not in self._warned:
            self._warned.add(what)
            reason = one_line(str(error))[:200] or type(error).__name__  # some of torch's messages are pages long
            log.warning("goodput agent: %s failed (%s); the present batch stays", what, reason)

    def close(self) -> None:
        """End the consensus and the thread of fits, without waiting for a fit under way. More calls do nothing."""
        atexit.unregister(self.close)
        self._consensus.close()
        if self._fit_thread is not None:
            self._fit_thread.shutdown(wait=False, cancel_futures=True)
            self._fit_thread = None
            self._running_fit = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs: numbers, and the times as a tensor (times, 5); NaN means unknown.

        It first reads the measurements, as :meth:`read` does.
        """
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
        """Continue with a state that :meth:`state` returned, and count steps and time anew.

        Raises KeyError, TypeError, ValueError, AttributeError or InputError for anything else, and then changes nothing.
        """
        times = StepTimeHistory()
        estimator = copy.copy(self.estimator)
        times.load_rows(state["observations"].tolist())
        estimator.load_state_dict(state["estimator"])
        sqr = float(state["sqr"])
        var = float(state["var"])
        noise_scale = float(state["noise_scale"])
        self.largest_tried = int(state["largest_tried"])
        self.times = times
        self.estimator = estimator
        has_statistics = math.isfinite(sqr) and math.isfinite(var)
        self.statistics = GradientStatistics(sqr=sqr, var=var) if has_statistics else None
        self.noise_scale = noise_scale if math.isfinite(noise_scale) else None
        self.restart()
