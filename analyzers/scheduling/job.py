"""A job in the simulator: its truth, what it has seen, its batch, and when its current epoch ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.scheduling.cluster import Allocation, ClusterSpec, count_gpus, packed
from ddltool.analyzers.scheduling.estimate import Profile, Tunable, best_goodput, fit, split_batch
from ddltool.analyzers.scheduling.truth import Application
from ddltool.errors import InputError

Floats = NDArray[np.float64]


class Tuning(Enum):
    """What a policy may change of a job."""

    RIGID = "rigid"
    """Nothing: the requested replicas and batch size."""
    ELASTIC = "elastic"
    """The number of replicas, at the requested batch size."""
    ADAPTIVE = "adaptive"
    """Replicas and batch size; the request is not looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """One row of a workload: ``submit_s`` in seconds, ``batch_size`` in samples over all replicas."""

    name: str
    submit_s: float
    application: str
    num_replicas: int
    batch_size: int


class SimulatedJob:
    """The state of one job. Policies read it through the methods in the first half and change nothing."""

    def __init__(self, index: int, spec: JobSpec, application: Application, tuning: Tuning, cluster: ClusterSpec):
        self.index = index
        self.spec = spec
        self.application = application
        self.tuning = tuning
        self.cluster = cluster
        self.limits = Tunable(
            init_batch_size=application.init_batch_size,
            max_batch_size=application.max_batch_size,
            min_local_batch_size=application.min_local_batch_size,
            max_local_batch_size=application.max_local_batch_size,
        )
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
        self._seen: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._model: Floats | None = None
        self._stale = False
        self._models = 0
        self._grad: tuple[float, float] | None = None
        self._tuned: tuple[object, ...] | None = None
        self._table: tuple[object, NDArray[np.float64]] | None = None

    # What policies look at.

    @property
    def restarts(self) -> int:
        """Re-allocations so far: starts after the first."""
        return max(self.starts - 1, 0)

    def age_s(self, now_s: float) -> float:
        """Return the seconds since the submission."""
        return now_s - self.spec.submit_s

    def gpu_seconds(self, now_s: float) -> float:
        """Return the GPU-seconds that it has held until now."""
        return self._gpu_seconds + count_gpus(self.allocation) * (now_s - self.last_s)

    @property
    def most_replicas(self) -> int:
        """The most replicas that it may be given now: the request, or what batch and exploration allow."""
        if self.tuning is Tuning.RIGID:
            return self.spec.num_replicas
        limit = self.application.limits.max_replicas or self.cluster.total_gpus
        if self.tuning is Tuning.ELASTIC:
            return max(1, min(limit, self.spec.batch_size // self.limits.min_local_batch_size))
        seen = max((replicas for _, replicas, _ in self._seen), default=0)
        return min(limit, max(2 * seen, 1), self.cluster.total_gpus, self.application.max_replicas)

    def goodput_table(self, most: int) -> Floats | None:
        """Return believed goodput (2, most + 1): row 0 on one node, row 1 across nodes; column k on k replicas.

        In samples per second; column 0 is 0, and so is one replica across nodes. None before the job has run.
        """
        if self._grad is None:
            return None
        model = self._fitted()
        key = (self._models, self._grad)
        if self._table is None or self._table[0] != key or self._table[1].shape[1] <= most:
            replicas = np.arange(1.0, most + 1)
            nodes = np.repeat([1.0, 2.0], most)
            found = best_goodput(model, *self._grad, self.limits, nodes, np.concatenate([replicas, replicas]))[0]
            table = np.zeros((2, most + 1))
            table[:, 1:] = found.reshape(2, most)
            table[1, 1] = 0.0
            self._table = (key, table)
        return self._table[1][:, : most + 1]

    def true_step_s(self, replicas: int, gpu_type: str | None = None) -> float:
        """Return the true time of one step at the requested batch size on ``replicas`` packed GPUs: for oracles."""
        placement = packed(self.cluster, replicas)
        local, steps = split_batch(self.spec.batch_size, replicas, self.limits)
        local = min(local, self.limits.max_batch_size // (replicas * (steps + 1)))
        step, sync = self.application.step_times(placement, local, gpu_type or self.cluster.gpu_types[0])
        return step + steps * (step - sync)

    def remaining_iterations(self) -> float:
        """Return the true number of iterations after the current epoch at the requested batch size, at least 1.

        Counting from the end of the epoch is the published simulator's rule for Optimus.
        """
        application, batch = self.application, self.spec.batch_size
        last = application.completion_epoch(batch)
        return max(application.iterations(batch, last) - application.iterations(batch, min(self.epoch, last)), 1.0)

    def remaining_s(self, replicas: int) -> float:
        """Return the true seconds of training left at the requested batch size on ``replicas`` packed GPUs."""
        application, batch = self.application, self.spec.batch_size
        done = application.iterations(batch, self.epoch - 1) if self.epoch else 0.0
        span = application.progress[self.epoch + 1] - application.progress[self.epoch]
        here = application.iterations(batch, self.epoch) - done
        here *= 1.0 - (self.progress - application.progress[self.epoch]) / span
        later = application.iterations(batch, application.completion_epoch(batch))
        later -= application.iterations(batch, self.epoch)
        return (here + max(later, 0.0)) * self.true_step_s(replicas)

    # What the simulator does with it.

    def advance(self, now_s: float) -> None:
        """Bring progress and GPU time up to ``now_s``, which is not after the end of the current epoch."""
        if self.allocation:
            self._gpu_seconds += count_gpus(self.allocation) * (now_s - self.last_s)
            ran = now_s - max(self.last_s, self.running_from_s)
            if ran > 0:
                self.progress = min(self.progress + self.rate * ran, self.application.progress[self.epoch + 1])
                self._observe()
        self.last_s = now_s

    def end_epoch(self, now_s: float) -> bool:
        """Finish the current epoch at ``now_s`` and return whether that was the last."""
        self.advance(now_s)
        total = self.total_batch_size
        self.epoch += 1
        self.progress = self.application.progress[self.epoch]
        if self.epoch > self.application.completion_epoch(total):
            self.finish_s = now_s
            self.allocation, self.placement, self.next_s = (), (), math.inf
            return True
        return False

    def reallocate(self, allocation: Allocation, now_s: float, delay_s: float) -> None:
        """Stop, and start again on ``allocation`` after the restart delay; () only stops."""
        self.allocation = allocation
        self.placement = tuple(count for _, count in allocation)
        self.next_s = math.inf
        self._tuned = None
        if allocation:
            self.starts += 1
            self.running_from_s = now_s + delay_s

    @property
    def total_batch_size(self) -> int:
        """Samples per optimizer step over all replicas."""
        return sum(self.placement) * self.local_batch_size * (self.accumulation_steps + 1)

    def retune(self, now_s: float, whole_seconds: bool) -> None:
        """Choose the batch from what is believed, and foresee the end of the epoch from what is true."""
        if not self.allocation:
            return
        self._choose_batch()
        step, sync = self._true_times()
        gain = self.application.gain(self.total_batch_size, self.epoch)
        self.rate = gain / (step + self.accumulation_steps * (step - sync)) * (1.0 - self.slowdown)
        left = self.application.progress[self.epoch + 1] - self.progress
        begin = max(now_s, self.running_from_s)
        self.exact_next_s = self.next_s = begin + left / self.rate
        if whole_seconds:
            self.next_s = max(begin, float(round(self.next_s)))

    def _true_times(self) -> tuple[float, float]:
        return self.application.step_times(
            self.placement, self.local_batch_size, self.cluster.gpu_types[self.allocation[0][0]]
        )

    def _choose_batch(self) -> None:
        replicas = sum(self.placement)
        if self.batch_size is None and self._grad is not None:
            model = self._fitted()
            key = (self._models, self._grad)
            if key == self._tuned:
                return
            self._tuned = key
            nodes = np.array([float(len(self.placement))])
            _, local, steps = best_goodput(model, *self._grad, self.limits, nodes, np.array([float(replicas)]))
            self.local_batch_size, self.accumulation_steps = int(local[0]), int(steps[0])
        else:
            batch = self.batch_size
            if batch is None:
                batch = max(self.limits.init_batch_size, self.limits.min_local_batch_size * replicas)
            self.local_batch_size, self.accumulation_steps = split_batch(batch, replicas, self.limits)
        count = replicas * (self.accumulation_steps + 1)
        self.local_batch_size = min(self.local_batch_size, self.limits.max_batch_size // count)

    def _observe(self) -> None:
        """Take note of the times and the gradient statistics of the configuration that has just run."""
        if self.tuning is not Tuning.ADAPTIVE:
            return
        self._grad = self.application.grad_stats(self.total_batch_size, self.epoch)
        key = (len(self.placement), sum(self.placement), self.local_batch_size)
        if key not in self._seen:
            self._seen[key] = self._true_times()
            self._stale = True

    def _fitted(self) -> Floats:
        """Return the throughput model of everything seen so far."""
        if self._model is None or self._stale:
            at = np.array(list(self._seen), dtype=np.float64)
            times = np.array(list(self._seen.values()))
            profile = Profile(
                num_nodes=at[:, 0],
                num_replicas=at[:, 1],
                local_batch_size=at[:, 2],
                grad_time_s=times[:, 0] - times[:, 1],
                step_time_s=times[:, 0],
            )
            self._model = fit(profile, self._model)
            self._stale = False
            self._models += 1
        return self._model


def make_jobs(
    specs: Sequence[JobSpec], applications: dict[str, Application], tuning: Tuning, cluster: ClusterSpec
) -> list[SimulatedJob]:
    """Return the jobs of a workload. Raises InputError for what can never run: unknown application, too many GPUs."""
    jobs = []
    for index, spec in enumerate(specs):
        application = applications.get(spec.application)
        where = f"job {spec.name}"
        if application is None:
            known = ", ".join(sorted(applications))
            raise InputError(f"{where}:application", f"no traces of {spec.application!r}", f"known: {known}")
        if tuning is Tuning.RIGID and spec.num_replicas > cluster.total_gpus:
            problem = f"wants {spec.num_replicas} GPUs of {cluster.total_gpus}"
            raise InputError(f"{where}:num_replicas", problem, "it could never start; ask for fewer")
        low, high = application.init_batch_size, application.max_batch_size
        if tuning is not Tuning.ADAPTIVE and not low <= spec.batch_size <= high:
            raise InputError(f"{where}:batch_size", f"is {spec.batch_size}", f"{spec.application} has {low} to {high}")
        jobs.append(SimulatedJob(index, spec, application, tuning, cluster))
    return jobs
