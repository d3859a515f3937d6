"""Figures of one simulation: completion and queueing times, makespan, utilisation, goodput, cost, fairness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.scheduling.cluster import ClusterSpec, packed
from ddltool.analyzers.scheduling.generator import POLLUX, SIZE_CLASSES, size_class
from ddltool.analyzers.scheduling.simulator import SimulationResult
from ddltool.analyzers.scheduling.truth import Application
from ddltool.errors import InputError, did_you_mean

Floats = NDArray[np.float64]
_CANDIDATES = 33
_MOST_PRICE = 1e6
_BLOCK = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassFigures:
    """The jobs of one size class; seconds unless said otherwise."""

    jobs: int
    avg_jct_s: float
    median_jct_s: float
    p99_jct_s: float
    avg_queueing_s: float
    restarts: int
    worst_fairness: float
    gpu_hours: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishTimeFairness:
    """Completion times over those in an isolated, equally partitioned cluster."""

    max: float
    """How much the most neglected job was delayed over its fair share."""
    share_below_1: float
    """The share of jobs that finished earlier than on their fair share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Price of the GPU time that jobs held, and of all GPUs that were up from the first submission to the last finish."""

    jobs: float
    cluster: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The figures of one replay, named as in the document of ``simulate``; seconds unless said otherwise."""

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
    finish_time_fairness: FinishTimeFairness
    avg_jct_by_application_s: Mapping[str, float]
    p99_queueing_s: float
    gpu_hours: float
    """GPU time held by jobs."""
    restart_gpu_hours: float
    """The part of it that starts and restarts took."""
    lost_gpu_hours: float
    """The part of it whose training failures undid."""
    useful_share: float
    """Share of the GPU time of all nodes that were up in which training was done that lasted."""
    availability: float
    """Share of the whole cluster's GPU time that was up."""
    node_failures: int
    job_failures: int
    goodput_by_application: Mapping[str, float]
    """Samples at M0 that the training was worth per second from first start to finish, the mean."""
    by_class: Mapping[str, ClassFigures]
    """By size class (Pollux, section 5.1), in their order; those that have jobs."""
    cost: Cost | None
    """None without prices."""
    fairness: tuple[float, ...]
    """(n,) the finish-time fairness of each job."""
    job_costs: tuple[float, ...]
    """(n,) the price of the GPU time that each job held; () without prices."""


class IsolatedTimes:
    """How long a job takes alone on k GPUs, packed, with the best batch size in each epoch; seconds without restarts.

    On the type on which it is fastest, of those that the application was measured on; a type with fewer than k GPUs is
    taken whole. The best k' <= k replicas are taken in each epoch, so more GPUs never take longer.
    """

    def __init__(self, applications: Mapping[str, Application], cluster: ClusterSpec) -> None:
        self.applications = applications
        self.cluster = cluster
        self._epochs: dict[tuple[str, str], list[Floats]] = {}

    def __call__(self, name: str, gpus: int) -> float:
        """Return the seconds of application ``name`` on ``gpus`` GPUs."""
        return min(self._on(self.applications[name], kind, gpus) for kind in self._types(name))

    def on_share(self, name: str, share: float) -> float:
        """Return the seconds on ``share`` (0 to 1) of every type's GPUs, on the type where that is fastest.

        A part of a GPU is that part of its time.
        """
        return min(
            self._on_part(self.applications[name], kind, share * self.cluster.gpus_of(kind))
            for kind in self._types(name)
        )

    def _types(self, name: str) -> list[str]:
        application = self.applications[name]
        names = list(self.cluster.type_names)
        return [kind for kind in names if application.runs_on(kind)] or names[:1]

    def _on_part(self, application: Application, gpu_type: str, gpus: float) -> float:
        """Return the seconds on a possibly fractional number of GPUs of one type."""
        if gpus <= 1:
            return self._on(application, gpu_type, 1) / gpus
        low = int(gpus)
        slow, fast = (1 / self._on(application, gpu_type, count) for count in (low, low + 1))
        return 1 / (slow + (gpus - low) * (fast - slow))

    def _on(self, application: Application, gpu_type: str, gpus: int) -> float:
        """Return the seconds on GPUs of one type."""
        gpus = min(gpus, application.max_replicas, self.cluster.gpus_of(gpu_type))
        known = self._epochs.setdefault((application.name, gpu_type), [])
        while len(known) < gpus:
            times = self._epoch_times(application, gpu_type, len(known) + 1)
            known.append(np.minimum(times, known[-1]) if known else times)
        return float(known[gpus - 1].sum())

    def _epoch_times(self, application: Application, gpu_type: str, replicas: int) -> Floats:
        """Return the seconds of each epoch (E,) on ``replicas`` packed GPUs at the best of some batch sizes."""
        epochs = application.max_epochs
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


def class_of(name: str, isolated: IsolatedTimes) -> str:
    """Return an application's size class: the published one, else by its GPU time alone on one GPU.

    Source: Pollux, section 5.1 and Table 1.
    """
    published = next((template.size for template in POLLUX if template.application == name), None)
    return published or size_class(isolated(name, 1) / 3600.0)


def check_prices(prices: Mapping[str, float], cluster: ClusterSpec, where: str = "price") -> None:
    """Raise InputError unless there is a price per GPU hour, finite and >= 0, for every type, and for nothing else."""
    for name, price in prices.items():
        if name not in cluster.type_names:
            raise InputError(f"{where}:{name}", "is of no type in the cluster", did_you_mean(name, cluster.type_names))
        if not 0 <= price <= _MOST_PRICE:
            raise InputError(f"{where}:{name}", f"is {price:g}", f"per GPU hour, from 0 to {_MOST_PRICE:.0f}")
    missing = [name for name in cluster.type_names if name not in prices]
    if missing:
        raise InputError(where, f"of {missing[0]} is missing", "one TYPE=PRICE per GPU type, or one number for all")


def summarize(
    result: SimulationResult,
    isolated: IsolatedTimes,
    restart_delay_s: float,
    *,
    prices: Mapping[str, float] | None = None,
) -> Summary:
    """Return the figures of one simulation.

    Finish-time fairness is a job's completion time over that in an isolated, equally partitioned cluster (Mahajan et
    al., Themis, NSDI 2020; Pollux, section 5.3.1): alone on its 1/n of the GPUs, n the time average of the jobs in the
    system during its life, with one start. With several types it is the share of the one on which
    that is fastest. A share below one GPU is that much of one GPU's time; other fractions are
    interpolated in the speed between whole GPUs. The isolated cluster never fails. ``prices``: per GPU hour, by type.
    """
    submit = np.array([job.submit_s for job in result.jobs])
    finish = np.array([job.finish_s for job in result.jobs])
    jct = finish - submit
    present = _average_present(submit, finish)
    fair = [
        isolated.on_share(job.application, 1 / max(count, 1.0)) + restart_delay_s
        for job, count in zip(result.jobs, present.tolist(), strict=True)
    ]
    makespan = float(finish.max() - submit.min())
    names = sorted({job.application for job in result.jobs})
    fairness = jct / np.array(fair)
    queueing = np.array([job.first_start_s - job.submit_s for job in result.jobs])
    held, restart, lost = (
        sum(getattr(job, name) for job in result.jobs)
        for name in ("gpu_seconds", "restart_gpu_seconds", "lost_gpu_seconds")
    )
    up = sum(result.available_gpu_seconds.values())
    costs: list[float] = []
    cost = None
    if prices is not None:
        costs = [_price(job.gpu_seconds_by_type, prices) for job in result.jobs]
        cost = Cost(jobs=sum(costs), cluster=_price(result.available_gpu_seconds, prices))
    ratios = fairness.tolist()
    return Summary(
        avg_jct_s=float(jct.mean()),
        median_jct_s=float(np.median(jct)),
        p99_jct_s=float(np.percentile(jct, 99)),
        makespan_s=makespan,
        avg_queueing_s=float(np.mean(queueing)),
        utilization=held / (result.total_gpus * makespan),
        restarts=sum(job.restarts for job in result.jobs),
        finish_time_fairness=FinishTimeFairness(
            max=max(ratios), share_below_1=sum(ratio < 1 for ratio in ratios) / len(ratios)
        ),
        avg_jct_by_application_s={
            name: float(np.mean([job.jct_s for job in result.jobs if job.application == name])) for name in names
        },
        p99_queueing_s=float(np.percentile(queueing, 99)),
        gpu_hours=held / 3600,
        restart_gpu_hours=restart / 3600,
        lost_gpu_hours=lost / 3600,
        useful_share=(held - restart - lost) / up if up else 0.0,
        availability=up / (result.total_gpus * makespan),
        node_failures=result.node_failures,
        job_failures=sum(job.failures for job in result.jobs),
        goodput_by_application={name: _goodput(result, name) for name in names},
        by_class=_by_class(result, isolated, jct, queueing, fairness),
        cost=cost,
        fairness=tuple(ratios),
        job_costs=tuple(costs),
    )


def _price(gpu_seconds: Mapping[str, float], prices: Mapping[str, float]) -> float:
    return sum(seconds / 3600 * prices[name] for name, seconds in gpu_seconds.items())


def _goodput(result: SimulationResult, application: str) -> float:
    """Return the mean over an application's jobs of useful samples per second of their life on GPUs, waits included."""
    rates = [
        job.useful_samples / (job.finish_s - job.first_start_s) for job in result.jobs if job.application == application
    ]
    return float(np.mean(rates))


def _by_class(
    result: SimulationResult, isolated: IsolatedTimes, jct: Floats, queueing: Floats, fairness: Floats
) -> dict[str, ClassFigures]:
    """Return the figures of each size class that has jobs; all arrays are (n,)."""
    of_application = {job.application: class_of(job.application, isolated) for job in result.jobs}
    made = {}
    for name in SIZE_CLASSES:
        rows = [row for row, job in enumerate(result.jobs) if of_application[job.application] == name]
        if rows:
            made[name] = ClassFigures(
                jobs=len(rows),
                avg_jct_s=float(jct[rows].mean()),
                median_jct_s=float(np.median(jct[rows])),
                p99_jct_s=float(np.percentile(jct[rows], 99)),
                avg_queueing_s=float(queueing[rows].mean()),
                restarts=sum(result.jobs[row].restarts for row in rows),
                worst_fairness=float(fairness[rows].max()),
                gpu_hours=sum(result.jobs[row].gpu_seconds for row in rows) / 3600,
            )
    return made


def _average_present(submit: Floats, finish: Floats) -> Floats:
    """Return the time average of the number of jobs in the system over each job's life, (n,); the job included."""
    made = np.empty_like(submit)
    for begin in range(0, len(submit), _BLOCK):  # all pairs of ten thousand jobs at once would take gigabytes
        rows = slice(begin, begin + _BLOCK)
        overlap = np.minimum(finish[rows, None], finish) - np.maximum(submit[rows, None], submit)
        made[rows] = np.maximum(overlap, 0.0).sum(axis=1)
    return made / (finish - submit)
