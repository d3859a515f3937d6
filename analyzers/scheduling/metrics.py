"""Figures of one simulation: completion times, makespan, utilisation, finish-time fairness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.scheduling.cluster import ClusterSpec, packed
from ddltool.analyzers.scheduling.simulator import SimulationResult
from ddltool.analyzers.scheduling.truth import Application

Floats = NDArray[np.float64]
_CANDIDATES = 33


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Seconds unless said otherwise; ``fairness`` (n,) is the finish-time fairness of each job."""

    avg_jct_s: float
    median_jct_s: float
    p99_jct_s: float
    makespan_s: float
    """From the first submission to the last finish."""
    avg_queueing_s: float
    """From submission to first start."""
    utilization: float
    """Share of all GPU-seconds of the makespan that jobs held, restarts included."""
    restarts: int
    fairness: tuple[float, ...]
    by_application: Mapping[str, float]
    """Average completion time."""

    @property
    def worst_fairness(self) -> float:
        """The largest finish-time fairness: how much the most neglected job was delayed over its fair share."""
        return max(self.fairness)

    @property
    def share_below_1(self) -> float:
        """The share of jobs that finished earlier than on their fair share."""
        return sum(ratio < 1 for ratio in self.fairness) / len(self.fairness)


class IsolatedTimes:
    """How long a job takes alone on k GPUs, packed, with the best batch size in each epoch; seconds without restarts.

    On the type with the most GPUs that the application was measured on. The best k' <= k replicas are taken in each
    epoch, so more GPUs never take longer.
    """

    def __init__(self, applications: Mapping[str, Application], cluster: ClusterSpec) -> None:
        self.applications = applications
        self.cluster = cluster
        counts = {name: cluster.gpus_of(name) for name in cluster.type_names}
        self.types = sorted(counts, key=lambda name: -counts[name])
        self._epochs: dict[str, list[Floats]] = {}

    def __call__(self, name: str, gpus: int) -> float:
        """Return the seconds of application ``name`` on ``gpus`` GPUs."""
        application = self.applications[name]
        gpus = min(gpus, application.max_replicas, self.cluster.gpus_of(self._type(application)))
        known = self._epochs.setdefault(name, [])
        while len(known) < gpus:
            times = self._epoch_times(application, len(known) + 1)
            known.append(np.minimum(times, known[-1]) if known else times)
        return float(known[gpus - 1].sum())

    def _type(self, application: Application) -> str:
        """Return the type with the most GPUs that the application was measured on."""
        return next((name for name in self.types if application.runs_on(name)), self.types[0])

    def _epoch_times(self, application: Application, replicas: int) -> Floats:
        """Return the seconds of each epoch (E,) on ``replicas`` packed GPUs at the best of some batch sizes."""
        epochs = application.max_epochs
        gpu_type = self._type(application)
        largest = application.largest_local_batch(gpu_type)
        span = np.diff(application.progress[: epochs + 1])
        best = np.full(epochs, np.inf)
        placement = packed(self.cluster.of_type(gpu_type), replicas)
        low = max(application.init_batch_size, application.min_local_batch_size * replicas)
        totals = {application.fixed_batch_size} if application.fixed_batch_size else None
        for total in totals or set(np.geomspace(low, application.max_batch_size, _CANDIDATES).tolist()):
            steps = max(int(np.ceil(total / replicas / largest - 1e-8)), 1)
            local = int(np.ceil(total / replicas / steps - 1e-8))
            whole = replicas * local * steps
            if not application.init_batch_size <= whole <= application.max_batch_size:
                continue
            step, sync = application.step_times(placement, local, gpu_type)
            gain = np.array([application.gain(whole, epoch) for epoch in range(epochs)])
            best = np.minimum(best, span / gain * (step + (steps - 1) * (step - sync)))
        return best


def summarize(result: SimulationResult, isolated: IsolatedTimes, restart_delay_s: float) -> Summary:
    """Return the figures of one simulation.

    Finish-time fairness is a job's completion time over that in an isolated, equally partitioned cluster (Mahajan et
    al., Themis, NSDI 2020; Pollux, section 5.3.1): alone on its 1/n of the GPUs, n the time average of the jobs in the
    system during its life, with one start. A share below one GPU is that much of one GPU's time; other fractions are
    interpolated in the speed between whole GPUs.
    """
    submit = np.array([job.submit_s for job in result.jobs])
    finish = np.array([job.finish_s for job in result.jobs])
    jct = finish - submit
    present = _average_present(submit, finish)
    fair = [
        _on_share(isolated, job.application, result.total_gpus / max(count, 1.0)) + restart_delay_s
        for job, count in zip(result.jobs, present.tolist(), strict=True)
    ]
    makespan = float(finish.max() - submit.min())
    names = sorted({job.application for job in result.jobs})
    return Summary(
        avg_jct_s=float(jct.mean()),
        median_jct_s=float(np.median(jct)),
        p99_jct_s=float(np.percentile(jct, 99)),
        makespan_s=makespan,
        avg_queueing_s=float(np.mean([job.first_start_s - job.submit_s for job in result.jobs])),
        utilization=sum(job.gpu_seconds for job in result.jobs) / (result.total_gpus * makespan),
        restarts=sum(job.restarts for job in result.jobs),
        fairness=tuple((jct / np.array(fair)).tolist()),
        by_application={
            name: float(np.mean([job.jct_s for job in result.jobs if job.application == name])) for name in names
        },
    )


def _average_present(submit: Floats, finish: Floats) -> Floats:
    """Return the time average of the number of jobs in the system over each job's life, (n,); the job included."""
    overlap = np.minimum(finish[:, None], finish) - np.maximum(submit[:, None], submit)
    made: Floats = np.maximum(overlap, 0.0).sum(axis=1) / (finish - submit)
    return made


def _on_share(isolated: IsolatedTimes, application: str, share: float) -> float:
    """Return the seconds on a possibly fractional number of GPUs."""
    if share <= 1:
        return isolated(application, 1) / share
    low = int(share)
    slow, fast = 1 / isolated(application, low), 1 / isolated(application, low + 1)
    return 1 / (slow + (share - low) * (fast - slow))
