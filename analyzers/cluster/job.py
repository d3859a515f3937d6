"""A job in the simulator: its truth, its beliefs, its batch, and the end of its current epoch.

A job believes a throughput model (Pollux, section 3.2) that is fitted to the step times it has observed so far
(:func:`ddltool.analyzers.job.goodput.fit.refit`). What it has not observed is assumed as in the published simulator, which
decides how a job explores: with one observed batch size half of ``T_grad`` is constant; without observed synchronisation it is
0 within a node, and across nodes 1.1 times that within one. Every job has its own :class:`Beliefs`, as in Pollux, unless a
policy pools them: then jobs of one application share them, and a new job starts from the observations of earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

import numpy as np

from ddltool.analyzers.cluster.cluster import Allocation, ClusterSpec, NodeFailures, count_gpus, packed
from ddltool.analyzers.cluster.truth import Application
from ddltool.analyzers.job.goodput.fit import predict, refit
from ddltool.analyzers.job.goodput.observations import Observations
from ddltool.analyzers.job.goodput.tuning import BatchLimits, Tuned, tune
from ddltool.analyzers.job.placement.proposals import best_throughput
from ddltool.arrays import Floats
from ddltool.errors import InputError
from ddltool.goodput_model import ThroughputParams
from ddltool.simulation_results import JobSpec

_EPSILON = 1e-8  # rounding errors of a quotient that should be whole, which must not round it up
# A model is fitted again when (nodes, replicas) was seen for the first time, or the rows have grown by this share.
_GROWTH = 0.25
Configuration = tuple[int, int, int]
"""Nodes, replicas, local batch size in samples."""


Seen = tuple[tuple[Configuration, tuple[float, float]], ...]
"""Configurations in the order in which they were first seen, and their (step, sync) seconds."""


def observations(observed: Seen) -> Observations:
    """Return the observed configurations as rows for a fit; T_grad is the step time minus the sync time."""
    # Transposed: configurations (3, n) and times_s (2, n).
    configurations, times_s = (np.array(part, dtype=np.float64).T for part in zip(*observed, strict=True))
    return Observations(
        num_nodes=configurations[0],
        num_replicas=configurations[1],
        local_batch_size=configurations[2],
        step_time_s=times_s[0],
        grad_time_s=times_s[0] - times_s[1],
    )


@lru_cache(maxsize=1024)  # jobs of one application begin with the same observations
def fit(observed: Seen, previous: ThroughputParams | None = None) -> ThroughputParams:
    """Return the throughput model fitted to ``observed``, starting from the last fit (``previous``), if any.

    What was not observed is assumed as the module says: with one batch size half of the computing is constant, and without
    several nodes synchronisation across nodes is 1.1 times that within a node.
    """
    rows = observations(observed)
    params = refit(rows, previous).model_dump()
    if (rows.local_batch_size == rows.local_batch_size[0]).all():
        batch_size = float(rows.local_batch_size[0])
        half_s = (params["alpha_grad_s"] + params["beta_grad_s"] * batch_size) / 2  # of T_grad
        params["alpha_grad_s"] = half_s
        params["beta_grad_s"] = half_s / batch_size
    if not (rows.num_nodes > 1).any():
        for name in ("alpha", "beta"):
            params[f"{name}_sync_node_s"] = 1.1 * params[f"{name}_sync_local_s"]
    return ThroughputParams.model_construct(**params)


@lru_cache(maxsize=4096)  # noise scales recur, and jobs of one application have the same beliefs at first
def best_batches(model: ThroughputParams, limits: BatchLimits, noise_scale: float, widest: int) -> Tuned:
    """Return the batches of highest goodput on 1 to ``widest`` replicas on one node, followed by those across nodes.

    So arrays are (2 ``widest``,). Two nodes stand for any number, because the model only distinguishes one from several.
    ``noise_scale``: samples.
    """
    replicas = np.arange(1, widest + 1)
    nodes = np.concatenate([np.ones_like(replicas), np.minimum(replicas, 2)])
    return tune(model, nodes, np.concatenate([replicas, replicas]), limits, noise_scale=noise_scale)


def split_batch(batch_size: int, replicas: int, limits: BatchLimits) -> tuple[int, int]:
    """Return (local batch size, accumulation steps beyond the first) of a total batch on ``replicas``.

    The rule is that of Pollux's published simulator: quotients are rounded up (but for rounding errors), and one replica
    with more than the initial batch always accumulates, as one gradient a step says too little of the noise.
    """
    local = math.ceil(batch_size / replicas - _EPSILON)
    steps = math.ceil(local / limits.max_local_batch_size - _EPSILON) - 1
    if replicas == 1 and batch_size > limits.initial_batch_size:
        steps = max(1, steps)
    return math.ceil(local / (steps + 1) - _EPSILON), steps


class Beliefs:
    """Observed step times by GPU type and configuration, and a throughput model fitted to those of each type."""

    def __init__(self, *, pooled: bool = False) -> None:
        """Begin without observations; ``pooled``: whether several jobs of an application share them."""
        self.pooled = pooled
        self.grads: dict[int, tuple[float, float]] = {}
        """Epoch -> the last observed (squared norm, variance) of the gradient; empty unless pooled."""
        self._seen: dict[str, dict[Configuration, tuple[float, float]]] = {}
        """GPU type -> configuration -> (step, sync) seconds."""
        self._shapes: dict[str, set[tuple[int, int]]] = {}
        """GPU type -> observed (nodes, replicas)."""
        self._fitted: dict[str, tuple[ThroughputParams, int, int]] = {}
        """GPU type -> (model, number of configurations and number of shapes that it was fitted to)."""
        self._errors: dict[str, tuple[tuple[Floats, Floats], ...]] = {}
        """GPU type -> the fit's errors, as :func:`_errors` returns them; empty unless pooled."""

    def observe(self, gpu_type: str, configuration: Configuration, times: tuple[float, float]) -> None:
        """Record the (step, sync) seconds of a configuration, unless it was observed before."""
        self._seen.setdefault(gpu_type, {}).setdefault(configuration, times)
        self._shapes.setdefault(gpu_type, set()).add(configuration[:2])

    def knows(self, gpu_type: str, configuration: Configuration) -> bool:
        """Return whether this configuration was observed on this type."""
        return configuration in self._seen.get(gpu_type, {})

    @property
    def most_replicas(self) -> int:
        """The most replicas observed on any type; 0 before the first observation."""
        return max((replicas for shapes in self._shapes.values() for _, replicas in shapes), default=0)

    @property
    def types(self) -> tuple[str, ...]:
        """Observed GPU types, by falling number of (nodes, replicas) observed on them."""
        return tuple(sorted(self._shapes, key=lambda name: (-len(self._shapes[name]), name)))

    def has_run_across(self, gpu_type: str) -> bool:
        """Return whether several replicas were observed on this type, so that its synchronisation is known."""
        return any(replicas > 1 for _, replicas in self._shapes.get(gpu_type, ()))

    def model(self, gpu_type: str) -> ThroughputParams:
        """Return the throughput model fitted to the observations on this type, of which there must be one.

        It is fitted again only when (nodes, replicas) was observed for the first time, or there are a quarter more
        configurations than at the last fit.
        """
        observed = self._seen[gpu_type]
        shape_count = len(self._shapes[gpu_type])  # of (nodes, replicas)
        fitted, fitted_rows, fitted_shapes = self._fitted.get(gpu_type, (None, 0, 0))
        if fitted is None or shape_count != fitted_shapes or len(observed) > (1 + _GROWTH) * fitted_rows:
            rows = tuple(observed.items())
            fitted = fit(rows, fitted)
            self._fitted[gpu_type] = fitted, len(observed), shape_count
            if self.pooled:
                self._errors[gpu_type] = _errors(observations(rows), fitted)
        return fitted

    def correction(self, gpu_type: str, most: int) -> Floats:
        """Return factors (2, most + 1) that correct the model's speed: row 0 within a node, row 1 across nodes.

        Column k is predicted over measured step time on k replicas, the geometric mean over the observations, interpolated
        between observed numbers of replicas, and 1 without any. They are needed because the model has only seven parameters: on
        some numbers of replicas all jobs of an application are slower than it says. :meth:`model` must have been called before.
        """
        factors = np.ones((2, most + 1))
        for row, (replicas, error) in enumerate(self._errors[gpu_type]):
            if len(replicas):
                factors[row] = np.exp(np.interp(np.log(np.maximum(np.arange(most + 1), 1.0)), replicas, error))
        return factors


def _errors(rows: Observations, model: ThroughputParams) -> tuple[tuple[Floats, Floats], ...]:
    """Return the fit's errors within a node and across nodes, each as (log replicas (k,), mean log error (k,)).

    An error is the logarithm of predicted over measured step time, averaged over the rows with that number of replicas.
    """
    error = np.log(predict(model, rows) / rows.step_time_s)
    errors = []
    for across in (False, True):
        chosen = (rows.num_nodes > 1) == across
        replicas, inverse = np.unique(rows.num_replicas[chosen], return_inverse=True)
        # at least 1, because it is a divisor; without rows both arrays are empty
        counts = np.maximum(np.bincount(inverse, minlength=len(replicas)), 1)
        mean_errors = np.bincount(inverse, error[chosen], minlength=len(replicas)) / counts
        errors.append((np.log(replicas), mean_errors))
    return tuple(errors)


class Tuning(Enum):
    """What a policy may change of a job."""

    RIGID = "rigid"
    """Nothing: the requested replicas and batch size."""
    ELASTIC = "elastic"
    """The number of replicas, at the requested batch size."""
    ADAPTIVE = "adaptive"
    """Replicas and batch size; the request is not looked at."""
    LOGICAL = "logical"
    """The GPUs, of one type or several, that run the requested replicas as logical workers at the requested batch."""


# Noise scales whose logarithms differ by less are taken as one: the best batch grows with the square root, its goodput less.
_NOISE_STEP = 0.1
# Local batch sizes at which a job is profiled on one GPU of each type before it first runs in a mixed cluster.
_PROFILED = 4


@dataclass(kw_only=True, slots=True)
class JobTally:
    """The figures of one job in a simulation; times in seconds."""

    name: str
    application: str
    submit_s: float
    start_s: float = math.nan
    finish_s: float = math.inf
    restarts: int = 0
    gpu_seconds: float = 0.0
    failures: int = 0
    """Number of times that it lost a node without warning."""
    lost_gpu_seconds: float = 0.0
    """GPU seconds of the training that failures undid."""
    restart_gpu_seconds: float = 0.0
    """GPU seconds held while it was starting."""
    gpu_seconds_by_type: dict[str, float] = field(default_factory=dict)
    useful_samples: float = 0.0
    """Number of samples at the smallest batch size that make the same progress."""

    @property
    def jct_s(self) -> float:
        """Completion time: from submission to finish."""
        return self.finish_s - self.submit_s


class SimulatedJob:
    """The state of one job. Policies may use the methods in the first half, which change nothing."""

    def __init__(
        self,
        index: int,
        spec: JobSpec,
        application: Application,
        tuning: Tuning,
        cluster: ClusterSpec,
        beliefs: Beliefs | None = None,
    ):
        """Make a job without GPUs that has not begun; ``index`` is its place in the workload.

        ``tuning``: what the policy may change of it; ``beliefs``: those that it shares with other jobs; None: its own.
        """
        self.index = index
        self.spec = spec
        self.application = application
        self.tuning = tuning
        self.cluster = cluster
        self.limits = BatchLimits(
            initial_batch_size=application.init_batch_size,
            max_batch_size=application.max_batch_size,
            min_local_batch_size=application.min_local_batch_size,
            max_local_batch_size=application.max_local_batch_size,
        )
        self.limits_on = {
            name: replace(self.limits, max_local_batch_size=application.largest_local_batch(name))
            for name in cluster.type_names
        }
        """GPU type -> batch limits, which differ by memory."""
        self.batch_size = application.fixed_batch_size if tuning is Tuning.ADAPTIVE else spec.batch_size
        """Fixed total batch; None: the job tunes its batch."""

        # its configuration
        self.allocation: Allocation = ()
        self.placement: tuple[int, ...] = ()
        """GPUs on each node of the allocation."""
        self.local_batch_size = 0
        self.accumulation_steps = 0
        """Passes of a step before the one that synchronises."""

        # its progress
        self.progress = 0.0
        """Iterations at M0, the smallest batch, that its training is worth so far."""
        self.epoch = 0
        """The current epoch, from 0."""
        self.tally = JobTally(name=spec.name, application=application.name, submit_s=spec.submit_s)
        self.starts = 0
        """Number of times that it got an allocation."""
        self.last_s = spec.submit_s
        """Time up to which progress and GPU time are counted."""
        self.running_from_s = 0.0
        """Time at which the last restart is over."""
        self.slowdown = 0.0
        """Share of its speed that it loses to other jobs on its nodes."""
        self.rate = 0.0
        """Progress per second while it runs: iterations at M0."""
        self.next_s = math.inf
        """Time at which the current epoch ends; rounded if :meth:`retune` was called with ``whole_seconds``."""
        self.exact_next_s = math.inf
        """The same, never rounded."""

        # its nodes, and failures of these
        self.measured_types = tuple(name for name in cluster.type_names if application.runs_on(name))
        """Types of the whole cluster that the application was measured on."""
        self.gpu_types = self.measured_types
        """The measured types of which some node is up."""
        self.failures: NodeFailures | None = None
        """How its nodes fail and when it saves checkpoints; None: no node fails, and it saves none."""
        self.lost_progress = 0.0
        """Iterations at M0 that failures undid."""
        self._saved = (0.0, 0, 0.0)
        """Progress, epoch and time of the last checkpoint."""

        # its beliefs
        self.beliefs = beliefs if beliefs is not None else Beliefs()
        self._grad: tuple[float, float] | None = None
        """Squared norm and variance of the gradient as it last observed them; None before it ran."""

    # Methods for policies.

    @property
    def gpu_type(self) -> str:
        """The type of its first GPU; it must have one."""
        return self.cluster.gpu_types[self.allocation[0][0]]

    def age_s(self, now_s: float) -> float:
        """Return the seconds since the submission."""
        return now_s - self.spec.submit_s

    def restart_factor(self, now_s: float, delay_s: float) -> float:
        """Return the factor by which a restart now lowers goodput: ``max(T - R d, 0) / (T + d)`` (Pollux, section 4.2).

        T is the job's age, R the number of its restarts so far and d = ``delay_s``.
        """
        age_s = self.age_s(now_s)
        return max(age_s - self.tally.restarts * delay_s, 0.0) / (age_s + delay_s) if age_s + delay_s > 0 else 1.0

    @property
    def most_replicas(self) -> int:
        """The most replicas that it may get now: its request where the policy keeps that, else what batch sizes allow.

        A job with a tuned batch may also get at most twice as many as it has observed.
        """
        if self.tuning in (Tuning.RIGID, Tuning.LOGICAL):
            return self.spec.num_replicas
        limit = self.application.limits.max_replicas or self.cluster.total_gpus
        if self.tuning is Tuning.ELASTIC:
            return max(1, min(limit, self.spec.batch_size // self.limits.min_local_batch_size))
        explored = self.beliefs.most_replicas
        return min(limit, max(2 * explored, 1), self.cluster.total_gpus, self.application.max_replicas)

    @property
    def steps_per_s(self) -> float:
        """True optimizer steps per second in the current allocation; 0 without one."""
        return (1.0 - self.slowdown) / self._step_s() if self.allocation else 0.0

    @property
    def gradient(self) -> tuple[float, float] | None:
        """Squared norm and variance of the gradient as last observed; None before that.

        A job that has not run takes, from pooled beliefs, those of the latest epoch up to its own, or of the first one.
        """
        if self._grad is not None or not self.beliefs.grads:
            return self._grad
        epochs = [epoch for epoch in self.beliefs.grads if epoch <= self.epoch]
        return self.beliefs.grads[max(epochs, default=min(self.beliefs.grads))]

    def goodput_table(self, most: int, gpu_type: str | None = None) -> Floats | None:
        """Return the believed goodput (2, most + 1) in samples per second: row 0 on one node, row 1 across nodes.

        Column k is that on k replicas; column 0 is 0, and so is one replica across nodes. None before anything was observed on
        ``gpu_type`` (None: the cluster's first type). A type on which only single GPUs were observed is assumed to scale as the
        type with most observations.
        """
        name = gpu_type or self.cluster.gpu_types[0]
        gradient, types_seen = self.gradient, self.beliefs.types
        if name not in types_seen:
            return None
        if gradient is None:
            if len(self.cluster.type_names) == 1:
                return None
            gradient = 1.0, 1.0  # the job was profiled, but never ran: its noise scale is assumed to be M0
        table = self._goodputs(name, gradient, most)
        if self.beliefs.pooled:
            table *= self.beliefs.correction(name, most)
        if types_seen[0] != name and not self.beliefs.has_run_across(name):
            best_known = self._goodputs(types_seen[0], gradient, most)
            table = best_known * (table[0, 1] / best_known[0, 1]) if best_known[0, 1] > 0 else table
        return table

    def _goodputs(self, gpu_type: str, gradient: tuple[float, float], most: int) -> Floats:
        """Return the model's goodput (2, most + 1): row 0 on one node, row 1 across nodes; column k on k replicas.

        ``gradient``: its squared norm and variance; ``most``: the most replicas.
        """
        tuned, widest = self._batches(gpu_type, gradient, most)
        table = np.zeros((2, most + 1))
        table[:, 1:] = tuned.goodput_per_s.reshape(2, widest)[:, :most]
        table[1, 1] = 0.0  # one replica cannot be across nodes
        return table

    def _batches(self, gpu_type: str, gradient: tuple[float, float], most: int) -> tuple[Tuned, int]:
        """Return the best batches (:func:`best_batches`) on 1 to k >= ``most`` replicas, and k.

        k is a power of two, and the noise scale is rounded, so that many calls share one cached result. ``gradient``: its
        squared norm and variance, whose ratio gives the noise scale; this is infinite for a norm of 0, and 0 for a variance of
        0.
        """
        model = self.beliefs.model(gpu_type)
        squared_norm, variance = gradient
        noise_scale = math.inf if variance else 0.0
        if squared_norm > 0 and variance > 0:
            noise_scale = self.limits.initial_batch_size * variance / squared_norm
        if 0 < noise_scale < math.inf:  # rounded; noise scales are not known more exactly anyway
            noise_scale = math.exp(round(math.log(noise_scale) / _NOISE_STEP) * _NOISE_STEP)
        widest = 1 << (most - 1).bit_length()  # the next power of two
        return best_batches(model, self.limits_on[gpu_type], noise_scale, widest), widest

    def remaining_samples(self) -> float:
        """Return the samples left, at M0's efficiency, in the epochs that the user declared; it needs no oracle.

        It is at least 1, because a round may come at the time at which the last epoch ends, and its job must keep its GPUs.
        """
        final_progress = self.application.progress[self.application.max_epochs]
        return max((final_progress - self.progress) * self.limits.initial_batch_size, 1.0)

    def profile(self) -> None:
        """Observe a few steps on one GPU of each type, as Sia does on submission; the seconds for that are not counted.

        It does nothing where the policy does not tune batches, on a cluster of one type, and for types in its beliefs.
        """
        if self.tuning is not Tuning.ADAPTIVE or len(self.cluster.type_names) == 1:
            return
        for name in self.measured_types:
            smallest, largest = self.limits.min_local_batch_size, self.limits_on[name].max_local_batch_size
            if name not in self.beliefs.types:
                for batch in sorted({round(batch) for batch in np.geomspace(smallest, largest, _PROFILED).tolist()}):
                    self.beliefs.observe(name, (1, 1, batch), self.application.step_times((1,), batch, name))

    def true_step_s(self, replicas: int) -> float:
        """Return the true seconds of one step at the requested batch size on ``replicas`` packed GPUs.

        Only policies with an oracle may call it; others must use the job's beliefs.
        """
        name = self.measured_types[0]
        placement = packed(self.cluster, replicas)
        local, steps = split_batch(self.spec.batch_size, replicas, self.limits_on[name])
        local = min(local, self.limits.max_batch_size // (replicas * (steps + 1)))
        step, sync = self.application.step_times(placement, local, name)
        return step + steps * (step - sync)

    def remaining_iterations(self) -> float:
        """Return the true number of iterations after the current epoch at the requested batch size, at least 1.

        The current epoch is not counted, which is the published simulator's rule for Optimus.
        """
        batch = self.spec.batch_size
        last_epoch = self.application.max_epochs - 1
        all_iterations = self.application.iterations(batch, last_epoch)
        until_epoch_end = self.application.iterations(batch, min(self.epoch, last_epoch))
        return max(all_iterations - until_epoch_end, 1.0)

    def remaining_s(self, replicas: int) -> float:
        """Return the true seconds of training left at the requested batch size on ``replicas`` packed GPUs.

        They are the iterations left in the current epoch and in the later ones, times the true step.
        """
        application = self.application
        batch = self.spec.batch_size
        earlier_iterations = application.iterations(batch, self.epoch - 1) if self.epoch else 0.0
        epoch_progress = application.progress[self.epoch + 1] - application.progress[self.epoch]
        done_share = (self.progress - application.progress[self.epoch]) / epoch_progress  # of the current epoch
        epoch_iterations = application.iterations(batch, self.epoch) - earlier_iterations
        epoch_iterations *= 1.0 - done_share
        later_iterations = application.iterations(batch, application.max_epochs - 1)
        later_iterations -= application.iterations(batch, self.epoch)
        return (epoch_iterations + max(later_iterations, 0.0)) * self.true_step_s(replicas)

    # Methods for the simulator.

    def advance(self, now_s: float) -> None:
        """Bring progress and GPU time up to ``now_s``, which must not be after the end of the current epoch.

        GPU time counts from the allocation on, progress only from the end of the restart.
        """
        if self.allocation:
            tally = self.tally
            count = count_gpus(self.allocation)
            held_s = now_s - self.last_s
            tally.gpu_seconds += count * held_s
            tally.restart_gpu_seconds += count * max(min(now_s, self.running_from_s) - self.last_s, 0.0)
            for name, gpus in self.cluster.by_type(self.allocation).items():
                tally.gpu_seconds_by_type[name] = tally.gpu_seconds_by_type.get(name, 0.0) + gpus * held_s
            ran_s = now_s - max(self.last_s, self.running_from_s)
            if ran_s > 0:
                # before progress changes, because the checkpoint was made in between
                if self.failures is not None:
                    self._save(now_s, self.failures)
                self.progress = min(self.progress + self.rate * ran_s, self.application.progress[self.epoch + 1])
                self._observe()
        self.last_s = now_s

    def _save(self, now_s: float, failures: NodeFailures) -> None:
        """Record the last checkpoint between ``last_s`` and ``now_s``, if there was one.

        Checkpoints come at multiples of a period since the job began to run: the training between two and the stop for one.
        ``rate`` is the mean over a period, so progress is linear.
        """
        begin_s = max(self.last_s, self.running_from_s)
        period_s = failures.interval_s(len(self.placement)) + failures.checkpoint_s
        checkpoints = math.floor((now_s - self.running_from_s) / period_s)
        at_s = self.running_from_s + checkpoints * period_s
        if checkpoints and begin_s < at_s <= now_s:
            epoch_end = self.application.progress[self.epoch + 1]
            saved_progress = min(self.progress + self.rate * (at_s - begin_s), epoch_end)
            self._saved = saved_progress, self.epoch, at_s

    def fail(self, now_s: float) -> None:
        """Lose the GPUs at ``now_s`` without warning, and return to the state of the last checkpoint."""
        self.advance(now_s)
        progress, epoch, saved_s = self._saved
        self.tally.failures += 1
        self.tally.lost_gpu_seconds += count_gpus(self.allocation) * max(now_s - saved_s, 0.0)
        self.lost_progress += self.progress - progress
        self.progress = progress
        self.epoch = epoch
        self.reallocate((), now_s, 0.0)

    def end_epoch(self, now_s: float) -> bool:
        """Finish the current epoch at ``now_s`` and return whether that was the last."""
        self.advance(now_s)
        self.epoch += 1
        # set exactly, because a sum of small steps has rounding errors
        self.progress = self.application.progress[self.epoch]
        if self.epoch >= self.application.max_epochs:
            self.tally.finish_s = now_s
            self.tally.useful_samples = self.progress * self.limits.initial_batch_size
            self.allocation = ()
            self.placement = ()
            self.next_s = math.inf
            return True
        return False

    def reallocate(self, allocation: Allocation, now_s: float, delay_s: float) -> None:
        """Stop with a checkpoint, and restart on ``allocation`` after ``delay_s`` seconds; with () only stop."""
        self.allocation = allocation
        self.placement = tuple(count for _, count in allocation)
        self.next_s = math.inf
        if allocation:
            if not self.starts:
                self.tally.start_s = now_s
            self.tally.restarts = self.starts
            self.starts += 1
            self.running_from_s = now_s + delay_s
        self._saved = self.progress, self.epoch, self.running_from_s

    @property
    def total_batch_size(self) -> int:
        """Samples per optimizer step over all replicas."""
        replicas = self.spec.num_replicas if self.tuning is Tuning.LOGICAL else sum(self.placement)
        return replicas * self.local_batch_size * (self.accumulation_steps + 1)

    def retune(self, now_s: float, whole_seconds: bool) -> None:
        """Choose the batch by the job's beliefs, then set ``rate``, ``next_s`` and ``exact_next_s`` by the true step time.

        ``whole_seconds``: whether ``next_s`` is rounded to whole seconds, the steps of the published simulator. Without GPUs it
        does nothing.
        """
        if not self.allocation:
            return
        self._choose_batch()
        gain = self.application.gain(self.total_batch_size, self.epoch)
        self.rate = gain / self._step_s() * (1.0 - self.slowdown)
        if self.failures is not None and self.failures.checkpoint_s:
            interval_s = self.failures.interval_s(len(self.placement))
            self.rate *= interval_s / (interval_s + self.failures.checkpoint_s)
        progress_left = self.application.progress[self.epoch + 1] - self.progress
        begin_s = max(now_s, self.running_from_s)
        self.exact_next_s = self.next_s = begin_s + progress_left / self.rate
        if whole_seconds:
            self.next_s = max(begin_s, float(round(self.next_s)))

    def _step_s(self) -> float:
        """Return the true seconds of one optimizer step under the current configuration."""
        if self.tuning is not Tuning.LOGICAL:
            step, sync = self._true_times()
            return step + self.accumulation_steps * (step - sync)
        return self.logical_step_s(self.cluster.by_type(self.allocation), self.placement)

    def logical_step_s(self, held: Mapping[str, int], placement: tuple[int, ...]) -> float:
        """Return the true seconds per step of the requested replicas as logical workers on GPUs of several types.

        ``held``: GPU type -> GPUs; ``placement``: GPUs per node. Each GPU runs its logical workers one after the other until
        the slowest one is done (EasyScale, Equation 1); then all synchronise once. Mixed placements were not measured, so the
        sync is assumed to be that of the type with the longest sync in the same placement.
        """
        local, _steps = self.logical_batch()
        sync = max(self.application.step_times(placement, local, name)[1] for name in held)
        # number of logical workers over mini-batches per second: the seconds until the slowest GPU is done
        replicas = self.spec.num_replicas
        return replicas / best_throughput(self.capabilities(), held, replicas) + sync

    def logical_batch(self) -> tuple[int, int]:
        """Return (local batch size, accumulation steps beyond the first) of a logical worker, the same on every GPU type."""
        replicas = self.spec.num_replicas
        limits = [self.limits_on[name] for name in self.measured_types]
        tightest = min(limits, key=lambda each: each.max_local_batch_size)
        local, steps = split_batch(self.spec.batch_size, replicas, tightest)
        return max(1, min(local, self.limits.max_batch_size // (replicas * (steps + 1)))), steps

    def capabilities(self) -> dict[str, float]:
        """Return GPU type -> EasyScale's C: true mini-batches per second of one logical worker alone on a GPU."""
        local, steps = self.logical_batch()
        capabilities_per_s = {}
        for name in self.gpu_types:
            step, sync = self.application.step_times((1,), local, name)
            capabilities_per_s[name] = 1.0 / ((step - sync) * (steps + 1))
        return capabilities_per_s

    def _true_times(self) -> tuple[float, float]:
        """Return the true (step, sync) seconds of one pass under the current configuration."""
        return self.application.step_times(self.placement, self.local_batch_size, self.gpu_type)

    def _choose_batch(self) -> None:
        """Set the local batch size and the accumulation steps for the current allocation.

        Those of logical workers are fixed. Where the batch may be tuned and the job has observed its speed, they are those of
        highest believed goodput; else they split the fixed batch, or the smallest one that has samples for every replica.
        """
        if self.tuning is Tuning.LOGICAL:
            self.local_batch_size, self.accumulation_steps = self.logical_batch()
            return
        replicas = sum(self.placement)
        gpu_type = self.gpu_type
        gradient = self.gradient
        if self.batch_size is None and gradient is not None and gpu_type in self.beliefs.types:
            # `tuned` has the choices for 1 to `most` replicas on one node, and then those for 1 to `most` on several.
            tuned, most = self._batches(gpu_type, gradient, replicas)
            index = replicas - 1 + (most if len(self.placement) > 1 else 0)
            self.local_batch_size = int(tuned.local_batch_size[index])
            self.accumulation_steps = int(tuned.accumulation_steps[index])
        else:
            batch = self.batch_size
            if batch is None:
                batch = max(self.limits.initial_batch_size, self.limits.min_local_batch_size * replicas)
            self.local_batch_size, self.accumulation_steps = split_batch(batch, replicas, self.limits_on[gpu_type])
        # Rounding up must not make the total larger than the largest measured one. Passes of a step: those that accumulate, and
        # the last one, which synchronises.
        microbatches = replicas * (self.accumulation_steps + 1)
        self.local_batch_size = min(self.local_batch_size, self.limits.max_batch_size // microbatches)

    def _observe(self) -> None:
        """Add the true times and gradient statistics of the configuration that has just run to the beliefs.

        It does so only under policies that tune batches, because only these use beliefs.
        """
        if self.tuning is not Tuning.ADAPTIVE:
            return
        self._grad = self.application.grad_stats(self.total_batch_size, self.epoch)
        if self.beliefs.pooled:
            self.beliefs.grads[self.epoch] = self._grad
        configuration = (len(self.placement), sum(self.placement), self.local_batch_size)
        if not self.beliefs.knows(self.gpu_type, configuration):
            self.beliefs.observe(self.gpu_type, configuration, self._true_times())


def make_jobs(
    specs: Sequence[JobSpec],
    applications: dict[str, Application],
    tuning: Tuning,
    cluster: ClusterSpec,
    *,
    pooled: bool = False,
) -> list[SimulatedJob]:
    """Return the jobs of a workload.

    ``applications``: by name; ``tuning``: what the policy may change of a job; ``pooled``: whether jobs of one application
    share their beliefs. Raises InputError for jobs that can never run: of an unknown application, measured on no GPU type of
    the cluster, or with too many GPUs or an impossible batch size in a request that the policy keeps.
    """
    jobs = []
    shared: dict[str, Beliefs] = {}
    for index, spec in enumerate(specs):
        application = applications.get(spec.application)
        where = f"job {spec.name}"
        if application is None:
            known_names = ", ".join(sorted(applications))
            raise InputError(f"{where}:application", f"no traces of {spec.application!r}", f"known: {known_names}")
        # GPUs of each type that the application was measured on.
        totals = {name: cluster.gpus_of(name) for name in cluster.type_names if application.runs_on(name)}
        if not totals:
            known_names = ", ".join(application.times)
            problem = f"{spec.application} was not measured on {', '.join(cluster.type_names)}"
            raise InputError(f"{where}:application", problem, f"measured on {known_names}")
        largest_type = max(totals.values())
        if tuning is Tuning.RIGID and spec.num_replicas > largest_type:
            type_clause = " of one type" if len(cluster.type_names) > 1 else ""
            problem = f"wants {spec.num_replicas} GPUs{type_clause} of {largest_type}"
            raise InputError(f"{where}:num_replicas", problem, "it could never start; ask for fewer")
        low, high = application.init_batch_size, application.max_batch_size
        if tuning is not Tuning.ADAPTIVE and not low <= spec.batch_size <= high:
            raise InputError(f"{where}:batch_size", f"is {spec.batch_size}", f"{spec.application} has {low} to {high}")
        beliefs = shared.setdefault(spec.application, Beliefs(pooled=True)) if pooled else None
        jobs.append(SimulatedJob(index, spec, application, tuning, cluster, beliefs))
    return jobs
