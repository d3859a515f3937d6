"""A job in the simulator: its truth, what it has seen, its batch, and when its current epoch ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.goodput.tuning import BatchLimits, Tuned
from ddltool.analyzers.placement.proposals import best_plan
from ddltool.analyzers.scheduling.beliefs import Beliefs, best_batches, split_batch
from ddltool.analyzers.scheduling.cluster import Allocation, ClusterSpec, count_gpus, packed
from ddltool.analyzers.scheduling.truth import Application
from ddltool.errors import InputError
from ddltool.simulation_results import JobSpec

Floats = NDArray[np.float64]


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
        self._limits: dict[str, BatchLimits] = {}
        self.batch_size = application.fixed_batch_size if tuning is Tuning.ADAPTIVE else spec.batch_size
        self.allocation: Allocation = ()
        self.placement: tuple[int, ...] = ()
        self.local_batch_size = 0
        self.accumulation_steps = 0
        self.progress = 0.0
        self.epoch = 0
        self.starts = 0
        self.finish_s: float | None = None
        self.last_s = spec.submit_s
        self.running_from_s = 0.0
        self.slowdown = 0.0
        self.rate = 0.0
        """Progress per second while it runs: iterations at M0."""
        self.next_s = math.inf
        """When the current epoch ends under the current configuration, in whole seconds if asked."""
        self.exact_next_s = math.inf
        self._gpu_seconds = 0.0
        self.measured_types = tuple(name for name in cluster.type_names if application.runs_on(name))
        """Types of the whole cluster that the application was measured on."""
        self.gpu_types = self.measured_types
        """Those of them that are up."""
        self.checkpoint_interval_s = math.inf
        self.failures = 0
        self.lost_gpu_seconds = 0.0
        """GPU time spent on progress that failures undid."""
        self.lost_progress = 0.0
        """Iterations at M0 that failures undid."""
        self.restart_gpu_seconds = 0.0
        """GPU time held while starting or restarting."""
        self.gpu_seconds_by_type: dict[str, float] = {}
        self._saved = (0.0, 0, 0.0)
        """Progress, epoch and time of the last checkpoint."""
        self.beliefs = beliefs if beliefs is not None else Beliefs()
        self._grad: tuple[float, float] | None = None

    # What policies look at.

    @property
    def restarts(self) -> int:
        """Re-allocations so far: starts after the first."""
        return max(self.starts - 1, 0)

    def limits_on(self, gpu_type: str) -> BatchLimits:
        """Return within which batch sizes it may run on one GPU type: memory differs."""
        if gpu_type not in self._limits:
            largest = self.application.largest_local_batch(gpu_type)
            self._limits[gpu_type] = replace(self.limits, max_local_batch_size=largest)
        return self._limits[gpu_type]

    def age_s(self, now_s: float) -> float:
        """Return the seconds since the submission."""
        return now_s - self.spec.submit_s

    def restart_factor(self, now_s: float, delay_s: float) -> float:
        """Return what is left of a goodput by a restart now: ``max(T - R d, 0) / (T + d)`` (Pollux, section 4.2)."""
        age_s = self.age_s(now_s)
        return max(age_s - self.restarts * delay_s, 0.0) / (age_s + delay_s) if age_s + delay_s > 0 else 1.0

    def gpu_seconds(self, now_s: float) -> float:
        """Return the GPU-seconds that it has held until now."""
        return self._gpu_seconds + count_gpus(self.allocation) * (now_s - self.last_s)

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
        return best_batches(model, self.limits_on(gpu_type), phi, widest), widest

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
            low, high = self.limits.min_local_batch_size, self.limits_on(name).max_local_batch_size
            if name not in self.beliefs.types:
                for size in sorted({round(size) for size in np.geomspace(low, high, _PROFILED).tolist()}):
                    self.beliefs.observe(name, (1, 1, size), self.application.step_times((1,), size, name))

    def true_step_s(self, replicas: int, gpu_type: str | None = None) -> float:
        """Return the true time of one step at the requested batch size on ``replicas`` packed GPUs: for oracles."""
        name = gpu_type or self.measured_types[0]
        placement = packed(self.cluster, replicas)
        local, steps = split_batch(self.spec.batch_size, replicas, self.limits_on(name))
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
            self._charge(now_s)
            ran = now_s - max(self.last_s, self.running_from_s)
            if ran > 0:
                if self.checkpoint_interval_s < math.inf:
                    self._save(now_s)
                self.progress = min(self.progress + self.rate * ran, self.application.progress[self.epoch + 1])
                self._observe()
        self.last_s = now_s

    def _charge(self, now_s: float) -> None:
        """Count the GPU time since the last look, by type, and the part of it that starting took."""
        held = now_s - self.last_s
        self._gpu_seconds += count_gpus(self.allocation) * held
        starting = min(now_s, self.running_from_s) - self.last_s
        if starting > 0:
            self.restart_gpu_seconds += count_gpus(self.allocation) * starting
        for node, count in self.allocation:
            name = self.cluster.gpu_types[node]
            self.gpu_seconds_by_type[name] = self.gpu_seconds_by_type.get(name, 0.0) + count * held

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
        self.failures += 1
        self.lost_gpu_seconds += count_gpus(self.allocation) * max(now_s - saved_s, 0.0)
        self.lost_progress += self.progress - progress
        self.progress, self.epoch = progress, epoch
        self.reallocate((), now_s, 0.0)

    def end_epoch(self, now_s: float) -> bool:
        """Finish the current epoch at ``now_s`` and return whether that was the last."""
        self.advance(now_s)
        self.epoch += 1
        self.progress = self.application.progress[self.epoch]
        if self.epoch >= self.application.max_epochs:
            self.finish_s = now_s
            self.allocation, self.placement, self.next_s = (), (), math.inf
            return True
        return False

    def reallocate(self, allocation: Allocation, now_s: float, delay_s: float) -> None:
        """Stop with a checkpoint, and start again on ``allocation`` after the restart delay; () only stops."""
        self.allocation = allocation
        self.placement = tuple(count for _, count in allocation)
        self.next_s = math.inf
        if allocation:
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
        held = Counter[str]()
        for node, count in self.allocation:
            held[self.cluster.gpu_types[node]] += count
        return self.logical_step_s(held, self.placement)

    def logical_step_s(self, held: Mapping[str, int], placement: tuple[int, ...]) -> float:
        """Return the true seconds per step of the requested replicas as logical workers on GPUs of several types.

        The slowest GPU's logical workers one after the other (EasyScale, Equation 1), then one synchronisation: that of
        the slowest type in the same placement, which is an assumption, as mixed placements were not measured.
        """
        local, _steps = self.logical_batch()
        capability = self.capabilities()
        plan = best_plan(capability, held, self.spec.num_replicas)
        sync = max(self.application.step_times(placement, local, name)[1] for name in held)
        return self.spec.num_replicas / plan.throughput + sync

    def logical_batch(self) -> tuple[int, int]:
        """Return the local batch of one logical worker and its accumulation steps beyond the first: the same everywhere."""
        replicas = self.spec.num_replicas
        least = min((self.limits_on(name) for name in self.measured_types), key=lambda one: one.max_local_batch_size)
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
        return self.application.step_times(
            self.placement, self.local_batch_size, self.cluster.gpu_types[self.allocation[0][0]]
        )

    def _choose_batch(self) -> None:
        if self.tuning is Tuning.LOGICAL:
            self.local_batch_size, self.accumulation_steps = self.logical_batch()
            return
        replicas = sum(self.placement)
        gpu_type = self.cluster.gpu_types[self.allocation[0][0]]
        grad, limits = self.gradient, self.limits_on(gpu_type)
        if self.batch_size is None and grad is not None and gpu_type in self.beliefs.types:
            found, widest = self._batches(gpu_type, grad, replicas)
            at = replicas - 1 + (widest if len(self.placement) > 1 else 0)
            self.local_batch_size = int(found.local_batch_size[at])
            self.accumulation_steps = int(found.accumulation_steps[at])
        else:
            batch = self.batch_size
            if batch is None:
                batch = max(self.limits.initial_batch_size, self.limits.min_local_batch_size * replicas)
            self.local_batch_size, self.accumulation_steps = split_batch(batch, replicas, limits)
        count = replicas * (self.accumulation_steps + 1)
        self.local_batch_size = min(self.local_batch_size, self.limits.max_batch_size // count)

    def _observe(self) -> None:
        """Take note of the times and the gradient statistics of the configuration that has just run."""
        if self.tuning is not Tuning.ADAPTIVE:
            return
        self._grad = self.application.grad_stats(self.total_batch_size, self.epoch)
        if self.beliefs.pooled:
            self.beliefs.grads[self.epoch] = self._grad
        gpu_type = self.cluster.gpu_types[self.allocation[0][0]]
        at = (len(self.placement), sum(self.placement), self.local_batch_size)
        if not self.beliefs.knows(gpu_type, at):
            self.beliefs.observe(gpu_type, at, self._true_times())


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
