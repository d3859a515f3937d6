"""A job in the simulator: its truth, what it believes, its batch, and when its current epoch ends.

It believes a throughput model (Pollux, section 3.2) fitted to what it has seen so far
(:func:`ddltool.analyzers.job.goodput.fit.refit`). What was never seen is taken as in the published simulator, which decides how
a job explores: half of ``T_grad`` is constant while one batch size was seen; synchronisation within a node never seen is
nothing, and across nodes never seen it is 1.1 times that within. Every job has its own :class:`Beliefs`, as in Pollux,
unless a policy pools them: then jobs of one application share them, and a new job starts from what earlier ones have seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

import numpy as np

from ddltool.analyzers.cluster.cluster import Allocation, ClusterSpec, count_gpus, packed
from ddltool.analyzers.cluster.truth import Application
from ddltool.analyzers.job.goodput.fit import predict, refit
from ddltool.analyzers.job.goodput.observations import Observations
from ddltool.analyzers.job.goodput.tuning import BatchLimits, Tuned, tune
from ddltool.analyzers.job.placement.proposals import best_throughput
from ddltool.arrays import Floats
from ddltool.errors import InputError
from ddltool.goodput_model import ThroughputParams
from ddltool.simulation_results import JobSpec

_EPSILON = 1e-8
# A model is fitted anew when a new (nodes, replicas) was seen or the rows have grown by this share: more say little more.
_GROWTH = 0.25
Configuration = tuple[int, int, int]
"""Nodes, replicas, local batch size in samples."""


Seen = tuple[tuple[Configuration, tuple[float, float]], ...]
"""Configurations in the order in which they were first seen, and their (step, sync) seconds."""


def observations(seen: Seen) -> Observations:
    """Return what was seen as rows of a fit."""
    at, times = (np.array(part, dtype=np.float64).T for part in zip(*seen, strict=True))
    return Observations(
        num_nodes=at[0],
        num_replicas=at[1],
        local_batch_size=at[2],
        step_time_s=times[0],
        grad_time_s=times[0] - times[1],
    )


@lru_cache(maxsize=1024)  # jobs of one application begin alike
def fit(seen: Seen, before: ThroughputParams | None = None) -> ThroughputParams:
    """Return the model fitted to what was seen, the rest as the published simulator takes it; ``before``: the last one."""
    rows = observations(seen)
    found = refit(rows, before).model_dump()
    if (rows.local_batch_size == rows.local_batch_size[0]).all():
        half = (found["alpha_grad_s"] + found["beta_grad_s"] * float(rows.local_batch_size[0])) / 2
        found["alpha_grad_s"], found["beta_grad_s"] = half, half / float(rows.local_batch_size[0])
    if not (rows.num_nodes > 1).any():
        for name in ("alpha", "beta"):
            found[f"{name}_sync_node_s"] = 1.1 * found[f"{name}_sync_local_s"]
    return ThroughputParams.model_construct(**found)


@lru_cache(maxsize=4096)  # noise scales go to and fro, and jobs of one application believe the same at first
def best_batches(model: ThroughputParams, limits: BatchLimits, noise_scale: float, widest: int) -> Tuned:
    """Return the best batches on 1 to ``widest`` replicas, within a node and then across nodes."""
    replicas = np.arange(1, widest + 1)
    nodes = np.concatenate([np.ones_like(replicas), np.minimum(replicas, 2)])
    return tune(model, nodes, np.concatenate([replicas, replicas]), limits, noise_scale=noise_scale)


def split_batch(batch_size: int, replicas: int, limits: BatchLimits) -> tuple[int, int]:
    """Return local batch and accumulation steps of a given total batch size, as the published simulator splits it."""
    local = -int(-(batch_size / replicas - _EPSILON) // 1)
    steps = -int(-(local / limits.max_local_batch_size - _EPSILON) // 1) - 1
    if replicas == 1 and batch_size > limits.initial_batch_size:
        steps = max(1, steps)
    return -int(-(local / (steps + 1) - _EPSILON) // 1), steps


class Beliefs:
    """Step times seen so far, by GPU type and configuration, and one fitted throughput model per type.

    ``pooled``: shared by the jobs of an application.
    """

    def __init__(self, *, pooled: bool = False) -> None:
        self.pooled = pooled
        self.grads: dict[int, tuple[float, float]] = {}
        """Squared norm and variance of the gradient last seen in each epoch; kept when pooled."""
        self._seen: dict[str, dict[Configuration, tuple[float, float]]] = {}
        self._shapes: dict[str, set[tuple[int, int]]] = {}
        self._fitted: dict[str, tuple[ThroughputParams, int, int]] = {}
        """By type the model, and of how many configurations and shapes it is."""
        self._errors: dict[str, tuple[tuple[Floats, Floats], ...]] = {}

    def observe(self, gpu_type: str, at: Configuration, times: tuple[float, float]) -> None:
        """Take note of (step, sync) seconds of a configuration, the first time that it is seen."""
        self._seen.setdefault(gpu_type, {}).setdefault(at, times)
        self._shapes.setdefault(gpu_type, set()).add(at[:2])

    def knows(self, gpu_type: str, at: Configuration) -> bool:
        """Return whether this configuration was seen."""
        return at in self._seen.get(gpu_type, {})

    @property
    def most_replicas(self) -> int:
        """The most replicas seen on any type, 0 before the first."""
        return max((replicas for shapes in self._shapes.values() for _, replicas in shapes), default=0)

    @property
    def types(self) -> tuple[str, ...]:
        """GPU types seen, the one with the most configurations first."""
        return tuple(sorted(self._shapes, key=lambda name: (-len(self._shapes[name]), name)))

    def has_run_across(self, gpu_type: str) -> bool:
        """Return whether more than one replica was seen on this type."""
        return any(replicas > 1 for _, replicas in self._shapes.get(gpu_type, ()))

    def model(self, gpu_type: str) -> ThroughputParams:
        """Return the model fitted to what was seen on this type; something must have been."""
        seen, shapes = self._seen[gpu_type], len(self._shapes[gpu_type])
        before, rows_then, shapes_then = self._fitted.get(gpu_type, (None, 0, 0))
        if before is None or shapes != shapes_then or len(seen) > (1 + _GROWTH) * rows_then:
            rows = tuple(seen.items())
            before = fit(rows, before)
            self._fitted[gpu_type] = before, len(seen), shapes
            if self.pooled:
                self._errors[gpu_type] = _errors(observations(rows), before)
        return before

    def correction(self, gpu_type: str, most: int) -> Floats:
        """Return by how much faster than the model (2, most + 1) replicas were seen to be; call :meth:`model` first.

        Row 0 within a node, row 1 across nodes: predicted over measured step time, the geometric mean over what was
        seen on that many replicas, interpolated between replicas, 1 before any. The model has seven parameters; on
        some counts every job of an application is slower than it says, and only then GPUs go where they bring nothing.
        """
        made = np.ones((2, most + 1))
        for row, (replicas, error) in enumerate(self._errors[gpu_type]):
            if len(replicas):
                made[row] = np.exp(np.interp(np.log(np.maximum(np.arange(most + 1), 1.0)), replicas, error))
        return made


def _errors(rows: Observations, model: ThroughputParams) -> tuple[tuple[Floats, Floats], ...]:
    """Return, within and across nodes, log replicas and the mean log of predicted over measured step time."""
    error = np.log(predict(model, rows) / rows.step_time_s)
    made = []
    for across in (False, True):
        chosen = (rows.num_nodes > 1) == across
        replicas, inverse = np.unique(rows.num_replicas[chosen], return_inverse=True)
        counts = np.maximum(np.bincount(inverse, minlength=len(replicas)), 1)
        made.append((np.log(replicas), np.bincount(inverse, error[chosen], minlength=len(replicas)) / counts))
    return tuple(made)


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
    """What becomes of one job; seconds."""

    name: str
    application: str
    submit_s: float
    start_s: float = math.nan
    finish_s: float = math.inf
    restarts: int = 0
    gpu_seconds: float = 0.0
    failures: int = 0
    """How often it lost a node without warning."""
    lost_gpu_seconds: float = 0.0
    """GPU time of the training that failures undid."""
    restart_gpu_seconds: float = 0.0
    """GPU time held while starting."""
    gpu_seconds_by_type: dict[str, float] = field(default_factory=dict)
    useful_samples: float = 0.0
    """Samples at the smallest batch size that the training was worth."""

    @property
    def jct_s(self) -> float:
        """Completion time: from submission to finish."""
        return self.finish_s - self.submit_s


class SimulatedJob:
    """The state of one job. Policies read it through the methods in the first half and change nothing."""

    def __init__(
        self,
        index: int,
        spec: JobSpec,
        application: Application,
        tuning: Tuning,
        cluster: ClusterSpec,
        beliefs: Beliefs | None = None,
    ):
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
        """Within which batch sizes it may run on each GPU type: memory differs."""
        self.batch_size = application.fixed_batch_size if tuning is Tuning.ADAPTIVE else spec.batch_size
        self.allocation: Allocation = ()
        self.placement: tuple[int, ...] = ()
        self.local_batch_size = 0
        self.accumulation_steps = 0
        self.progress = 0.0
        self.epoch = 0
        self.tally = JobTally(name=spec.name, application=application.name, submit_s=spec.submit_s)
        self.starts = 0
        self.last_s = spec.submit_s
        self.running_from_s = 0.0
        self.slowdown = 0.0
        self.rate = 0.0
        """Progress per second while it runs: iterations at M0."""
        self.next_s = math.inf
        """When the current epoch ends under the current configuration, in whole seconds if asked."""
        self.exact_next_s = math.inf
        self.measured_types = tuple(name for name in cluster.type_names if application.runs_on(name))
        """Types of the whole cluster that the application was measured on."""
        self.gpu_types = self.measured_types
        """Those of them that are up."""
        self.checkpoint_interval_s = math.inf
        self.lost_progress = 0.0
        """Iterations at M0 that failures undid."""
        self._saved = (0.0, 0, 0.0)
        """Progress, epoch and time of the last checkpoint."""
        self.beliefs = beliefs if beliefs is not None else Beliefs()
        self._grad: tuple[float, float] | None = None

    # What policies look at.

    @property
    def gpu_type(self) -> str:
        """The type of its (first) GPUs; it must have some."""
        return self.cluster.gpu_types[self.allocation[0][0]]

    def age_s(self, now_s: float) -> float:
        """Return the seconds since the submission."""
        return now_s - self.spec.submit_s

    def restart_factor(self, now_s: float, delay_s: float) -> float:
        """Return what is left of a goodput by a restart now: ``max(T - R d, 0) / (T + d)`` (Pollux, section 4.2)."""
        age_s = self.age_s(now_s)
        return max(age_s - self.tally.restarts * delay_s, 0.0) / (age_s + delay_s) if age_s + delay_s > 0 else 1.0

    @property
    def most_replicas(self) -> int:
        """The most replicas that it may be given now: the request, or what batch and exploration allow."""
        if self.tuning in (Tuning.RIGID, Tuning.LOGICAL):
            return self.spec.num_replicas
        limit = self.application.limits.max_replicas or self.cluster.total_gpus
        if self.tuning is Tuning.ELASTIC:
            return max(1, min(limit, self.spec.batch_size // self.limits.min_local_batch_size))
        seen = self.beliefs.most_replicas
        return min(limit, max(2 * seen, 1), self.cluster.total_gpus, self.application.max_replicas)

    @property
    def steps_per_s(self) -> float:
        """Optimizer steps per second as measured in the current allocation; 0 without one."""
        return (1.0 - self.slowdown) / self._step_s() if self.allocation else 0.0

    @property
    def gradient(self) -> tuple[float, float] | None:
        """Squared norm and variance of the gradient as last seen, its own or, pooled, that of a job like it."""
        if self._grad is not None or not self.beliefs.grads:
            return self._grad
        epochs = [epoch for epoch in self.beliefs.grads if epoch <= self.epoch]
        return self.beliefs.grads[max(epochs, default=min(self.beliefs.grads))]

    def goodput_table(self, most: int, gpu_type: str | None = None) -> Floats | None:
        """Return believed goodput (2, most + 1): row 0 on one node, row 1 across nodes; column k on k replicas.

        In samples per second; column 0 is 0, and so is one replica across nodes. None before anything was seen on this
        type (by default the cluster's first). What was seen on one GPU only scales as on the type that it knows best.
        """
        name = gpu_type or self.cluster.gpu_types[0]
        grad, types = self.gradient, self.beliefs.types
        if name not in types:
            return None
        if grad is None:
            if len(self.cluster.type_names) == 1:
                return None
            grad = 1.0, 1.0  # profiled, but never run: a noise scale of M0 until it shows its own
        table = self._goodputs(name, grad, most)
        if self.beliefs.pooled:
            table *= self.beliefs.correction(name, most)
        if types[0] != name and not self.beliefs.has_run_across(name):
            other = self._goodputs(types[0], grad, most)
            table = other * (table[0, 1] / other[0, 1]) if other[0, 1] > 0 else table
        return table

    def _goodputs(self, gpu_type: str, grad: tuple[float, float], most: int) -> Floats:
        found, widest = self._batches(gpu_type, grad, most)
        table = np.zeros((2, most + 1))
        table[:, 1:] = found.goodput_per_s.reshape(2, widest)[:, :most]
        table[1, 1] = 0.0
        return table

    def _batches(self, gpu_type: str, grad: tuple[float, float], most: int) -> tuple[Tuned, int]:
        """Return the best batches on 1 to k >= ``most`` replicas, within a node and then across nodes, and k."""
        model = self.beliefs.model(gpu_type)
        sqr, var = grad
        phi = self.limits.initial_batch_size * var / sqr if sqr > 0 and var > 0 else math.inf if var else 0.0
        if 0 < phi < math.inf:  # no noise scale is known better than that
            phi = math.exp(round(math.log(phi) / _NOISE_STEP) * _NOISE_STEP)
        widest = 1 << (most - 1).bit_length()
        return best_batches(model, self.limits_on[gpu_type], phi, widest), widest

    def remaining_samples(self) -> float:
        """Return the samples left at M0's efficiency, by the declared epochs: no oracle, users state epochs and data.

        At least one: a round may come in the moment in which the last epoch ends, and its job is not to lose its GPUs then.
        """
        last = self.application.progress[self.application.max_epochs]
        return max((last - self.progress) * self.limits.initial_batch_size, 1.0)

    def profile(self) -> None:
        """Time a few steps on one GPU of each type, as Sia does on submission; seconds that are not charged.

        Nothing to do where all GPUs are alike, or where a job like it has been profiled.
        """
        if self.tuning is not Tuning.ADAPTIVE or len(self.cluster.type_names) == 1:
            return
        for name in self.measured_types:
            low, high = self.limits.min_local_batch_size, self.limits_on[name].max_local_batch_size
            if name not in self.beliefs.types:
                for size in sorted({round(size) for size in np.geomspace(low, high, _PROFILED).tolist()}):
                    self.beliefs.observe(name, (1, 1, size), self.application.step_times((1,), size, name))

    def true_step_s(self, replicas: int) -> float:
        """Return the true time of one step at the requested batch size on ``replicas`` packed GPUs: for oracles."""
        name, placement = self.measured_types[0], packed(self.cluster, replicas)
        local, steps = split_batch(self.spec.batch_size, replicas, self.limits_on[name])
        local = min(local, self.limits.max_batch_size // (replicas * (steps + 1)))
        step, sync = self.application.step_times(placement, local, name)
        return step + steps * (step - sync)

    def remaining_iterations(self) -> float:
        """Return the true number of iterations after the current epoch at the requested batch size, at least 1.

        Counting from the end of the epoch is the published simulator's rule for Optimus.
        """
        application, batch = self.application, self.spec.batch_size
        last = application.max_epochs - 1
        return max(application.iterations(batch, last) - application.iterations(batch, min(self.epoch, last)), 1.0)

    def remaining_s(self, replicas: int) -> float:
        """Return the true seconds of training left at the requested batch size on ``replicas`` packed GPUs."""
        application, batch = self.application, self.spec.batch_size
        done = application.iterations(batch, self.epoch - 1) if self.epoch else 0.0
        span = application.progress[self.epoch + 1] - application.progress[self.epoch]
        here = application.iterations(batch, self.epoch) - done
        here *= 1.0 - (self.progress - application.progress[self.epoch]) / span
        later = application.iterations(batch, application.max_epochs - 1)
        later -= application.iterations(batch, self.epoch)
        return (here + max(later, 0.0)) * self.true_step_s(replicas)

    # What the simulator does with it.

    def advance(self, now_s: float) -> None:
        """Bring progress and GPU time up to ``now_s``, which is not after the end of the current epoch."""
        if self.allocation:
            count, held, tally = count_gpus(self.allocation), now_s - self.last_s, self.tally
            tally.gpu_seconds += count * held
            tally.restart_gpu_seconds += count * max(min(now_s, self.running_from_s) - self.last_s, 0.0)
            for name, gpus in self.cluster.by_type(self.allocation).items():
                tally.gpu_seconds_by_type[name] = tally.gpu_seconds_by_type.get(name, 0.0) + gpus * held
            ran = now_s - max(self.last_s, self.running_from_s)
            if ran > 0:
                if self.checkpoint_interval_s < math.inf:
                    self._save(now_s)
                self.progress = min(self.progress + self.rate * ran, self.application.progress[self.epoch + 1])
                self._observe()
        self.last_s = now_s

    def _save(self, now_s: float) -> None:
        """Take note of the last checkpoint of the stretch from the last look to now, in which progress is a line."""
        begin = max(self.last_s, self.running_from_s)
        count = math.floor((now_s - self.running_from_s) / self.checkpoint_interval_s)
        at_s = self.running_from_s + count * self.checkpoint_interval_s
        if count and begin < at_s <= now_s:
            end = self.application.progress[self.epoch + 1]
            self._saved = min(self.progress + self.rate * (at_s - begin), end), self.epoch, at_s

    def fail(self, now_s: float) -> None:
        """Lose the GPUs at ``now_s`` without warning: back to the last checkpoint, off all nodes."""
        self.advance(now_s)
        progress, epoch, saved_s = self._saved
        self.tally.failures += 1
        self.tally.lost_gpu_seconds += count_gpus(self.allocation) * max(now_s - saved_s, 0.0)
        self.lost_progress += self.progress - progress
        self.progress, self.epoch = progress, epoch
        self.reallocate((), now_s, 0.0)

    def end_epoch(self, now_s: float) -> bool:
        """Finish the current epoch at ``now_s`` and return whether that was the last."""
        self.advance(now_s)
        self.epoch += 1
        self.progress = self.application.progress[self.epoch]
        if self.epoch >= self.application.max_epochs:
            self.tally.finish_s = now_s
            self.tally.useful_samples = self.progress * self.limits.initial_batch_size
            self.allocation, self.placement, self.next_s = (), (), math.inf
            return True
        return False

    def reallocate(self, allocation: Allocation, now_s: float, delay_s: float) -> None:
        """Stop with a checkpoint, and start again on ``allocation`` after the restart delay; () only stops."""
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
        """Choose the batch from what is believed, and foresee the end of the epoch from what is true."""
        if not self.allocation:
            return
        self._choose_batch()
        gain = self.application.gain(self.total_batch_size, self.epoch)
        self.rate = gain / self._step_s() * (1.0 - self.slowdown)
        left = self.application.progress[self.epoch + 1] - self.progress
        begin = max(now_s, self.running_from_s)
        self.exact_next_s = self.next_s = begin + left / self.rate
        if whole_seconds:
            self.next_s = max(begin, float(round(self.next_s)))

    def _step_s(self) -> float:
        """Return the true seconds of one optimizer step under the current configuration."""
        if self.tuning is not Tuning.LOGICAL:
            step, sync = self._true_times()
            return step + self.accumulation_steps * (step - sync)
        return self.logical_step_s(self.cluster.by_type(self.allocation), self.placement)

    def logical_step_s(self, held: Mapping[str, int], placement: tuple[int, ...]) -> float:
        """Return the true seconds per step of the requested replicas as logical workers on GPUs of several types.

        The slowest GPU's logical workers one after the other (EasyScale, Equation 1), then one synchronisation: that of
        the slowest type in the same placement, which is an assumption, as mixed placements were not measured.
        """
        local, _steps = self.logical_batch()
        sync = max(self.application.step_times(placement, local, name)[1] for name in held)
        replicas = self.spec.num_replicas
        return replicas / best_throughput(self.capabilities(), held, replicas) + sync

    def logical_batch(self) -> tuple[int, int]:
        """Return the local batch of one logical worker and its accumulation steps beyond the first: the same everywhere."""
        replicas = self.spec.num_replicas
        least = min((self.limits_on[name] for name in self.measured_types), key=lambda one: one.max_local_batch_size)
        local, steps = split_batch(self.spec.batch_size, replicas, least)
        return max(1, min(local, self.limits.max_batch_size // (replicas * (steps + 1)))), steps

    def capabilities(self) -> dict[str, float]:
        """Return EasyScale's C: mini-batches per second of one logical worker alone on a GPU, by type; as measured."""
        local, steps = self.logical_batch()
        made = {}
        for name in self.gpu_types:
            step, sync = self.application.step_times((1,), local, name)
            made[name] = 1.0 / ((step - sync) * (steps + 1))
        return made

    def _true_times(self) -> tuple[float, float]:
        return self.application.step_times(self.placement, self.local_batch_size, self.gpu_type)

    def _choose_batch(self) -> None:
        if self.tuning is Tuning.LOGICAL:
            self.local_batch_size, self.accumulation_steps = self.logical_batch()
            return
        replicas, gpu_type, grad = sum(self.placement), self.gpu_type, self.gradient
        if self.batch_size is None and grad is not None and gpu_type in self.beliefs.types:
            found, widest = self._batches(gpu_type, grad, replicas)
            at = replicas - 1 + (widest if len(self.placement) > 1 else 0)
            self.local_batch_size = int(found.local_batch_size[at])
            self.accumulation_steps = int(found.accumulation_steps[at])
        else:
            batch = self.batch_size
            if batch is None:
                batch = max(self.limits.initial_batch_size, self.limits.min_local_batch_size * replicas)
            self.local_batch_size, self.accumulation_steps = split_batch(batch, replicas, self.limits_on[gpu_type])
        count = replicas * (self.accumulation_steps + 1)
        self.local_batch_size = min(self.local_batch_size, self.limits.max_batch_size // count)

    def _observe(self) -> None:
        """Take note of the times and the gradient statistics of the configuration that has just run."""
        if self.tuning is not Tuning.ADAPTIVE:
            return
        self._grad = self.application.grad_stats(self.total_batch_size, self.epoch)
        if self.beliefs.pooled:
            self.beliefs.grads[self.epoch] = self._grad
        at = (len(self.placement), sum(self.placement), self.local_batch_size)
        if not self.beliefs.knows(self.gpu_type, at):
            self.beliefs.observe(self.gpu_type, at, self._true_times())


def make_jobs(
    specs: Sequence[JobSpec],
    applications: dict[str, Application],
    tuning: Tuning,
    cluster: ClusterSpec,
    *,
    pooled: bool = False,
) -> list[SimulatedJob]:
    """Return the jobs of a workload; ``pooled``: jobs of one application share their beliefs.

    Raises InputError for what can never run: unknown application, no GPU type it was measured on, too many GPUs.
    """
    jobs = []
    shared: dict[str, Beliefs] = {}
    for index, spec in enumerate(specs):
        application = applications.get(spec.application)
        where = f"job {spec.name}"
        if application is None:
            known = ", ".join(sorted(applications))
            raise InputError(f"{where}:application", f"no traces of {spec.application!r}", f"known: {known}")
        totals = {name: cluster.gpus_of(name) for name in cluster.type_names if application.runs_on(name)}
        if not totals:
            known = ", ".join(application.times)
            problem = f"{spec.application} was not measured on {', '.join(cluster.type_names)}"
            raise InputError(f"{where}:application", problem, f"measured on {known}")
        most = max(totals.values())
        if tuning is Tuning.RIGID and spec.num_replicas > most:
            one = " of one type" if len(cluster.type_names) > 1 else ""
            problem = f"wants {spec.num_replicas} GPUs{one} of {most}"
            raise InputError(f"{where}:num_replicas", problem, "it could never start; ask for fewer")
        low, high = application.init_batch_size, application.max_batch_size
        if tuning is not Tuning.ADAPTIVE and not low <= spec.batch_size <= high:
            raise InputError(f"{where}:batch_size", f"is {spec.batch_size}", f"{spec.application} has {low} to {high}")
        beliefs = shared.setdefault(spec.application, Beliefs(pooled=True)) if pooled else None
        jobs.append(SimulatedJob(index, spec, application, tuning, cluster, beliefs))
    return jobs
