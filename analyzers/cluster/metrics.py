"""Figures of one simulation: completion and queueing times, makespan, utilisation, goodput, cost, fairness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddltool.analyzers.cluster.cluster import ClusterSpec, packed
from ddltool.analyzers.cluster.generator import POLLUX, SIZE_CLASSES, size_class
from ddltool.analyzers.cluster.job import JobTally
from ddltool.analyzers.cluster.simulator import SimulationResult
from ddltool.analyzers.cluster.truth import Application
from ddltool.arrays import Floats, Places
from ddltool.errors import InputError, did_you_mean
from ddltool.simulation_results import ClassFigures, Fairness, PolicyRecord, ReplayCost, ReplayedJob, UsageRecord

_MOST_PRICE = 1e6
_BLOCK = 256
# What a job's record takes over from its tally; the second where nodes failed.
_JOB_FIELDS = ("name", "application", "submit_s", "start_s", "finish_s", "jct_s", "restarts", "gpu_seconds")
_FAILURE_FIELDS = ("failures", "lost_gpu_seconds")


class IsolatedTimes:
    """How long a job takes alone on k GPUs, packed, with the best batch size in each epoch; seconds without restarts.

    On the type on which it is fastest, of those that the application was measured on; a type with fewer than k GPUs is
    taken whole. The best k' <= k replicas are taken in each epoch, so more GPUs never take longer.
    """

    def __init__(self, applications: Mapping[str, Application], cluster: ClusterSpec) -> None:
        """Remember what is asked about; times are computed when they are first asked for, and kept."""
        self.applications = applications
        self.cluster = cluster
        self._epochs: dict[tuple[str, str], list[Floats]] = {}
        """By application and GPU type, for 1, 2, ... GPUs the least seconds of each epoch."""

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
        """Return the types of the cluster that an application was measured on; its first type where there is none."""
        application = self.applications[name]
        names = list(self.cluster.type_names)
        return [kind for kind in names if application.runs_on(kind)] or names[:1]

    def _on_part(self, application: Application, gpu_type: str, gpus: float) -> float:
        """Return the seconds of the training on a number of GPUs of one type that need not be whole.

        Below one GPU it is that part of one GPU's time; between whole numbers the speed is interpolated. ``gpus``:
        above 0.
        """
        if gpus <= 1:
            return self._on(application, gpu_type, 1) / gpus
        low = int(gpus)
        slow, fast = (1 / self._on(application, gpu_type, count) for count in (low, low + 1))
        return 1 / (slow + (gpus - low) * (fast - slow))

    def _on(self, application: Application, gpu_type: str, gpus: int) -> float:
        """Return the seconds of the whole training on ``gpus`` GPUs of one type, at each epoch's best batch.

        More GPUs than the application can use, or than there are, bring nothing; nor do more ever make it slower, as
        the job may leave some idle: hence the least over all smaller counts.
        """
        gpus = min(gpus, application.max_replicas, self.cluster.gpus_of(gpu_type))
        best_times = self._epochs.setdefault((application.name, gpu_type), [])
        while len(best_times) < gpus:
            times = self._epoch_times(application, gpu_type, len(best_times) + 1)
            best_times.append(np.minimum(times, best_times[-1]) if best_times else times)
        return float(best_times[gpus - 1].sum())

    def _epoch_times(self, application: Application, gpu_type: str, replicas: int) -> Floats:
        """Return the seconds of each epoch (E,) on ``replicas`` packed GPUs at the best of some batch sizes."""
        placement = packed(self.cluster.of_type(gpu_type), replicas)
        best = np.full(application.max_epochs, np.inf)
        for total, step_s, _ in application.batches(placement, gpu_type):
            best = np.minimum(best, application.epoch_seconds(total, step_s))
        return best


def class_of(name: str, isolated: IsolatedTimes) -> str:
    """Return an application's size class: the published one, else by its GPU time alone on one GPU.

    Source: Pollux, section 5.1 and Table 1. ``isolated``: times of each application alone.
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
) -> PolicyRecord:
    """Return the figures of one simulation of n jobs; jobs say their failures and cost where there can be any.

    ``isolated``: each application's time alone, for fairness and size classes. ``restart_delay_s``: what a start costs.
    ``prices``: per GPU hour, by type; None: no costs.
    """
    submit = np.array([job.submit_s for job in result.jobs])
    finish = np.array([job.finish_s for job in result.jobs])
    jct = finish - submit
    makespan = float(finish.max() - submit.min())
    fairness = _fairness(result, isolated, restart_delay_s)
    queueing = np.array([job.start_s - job.submit_s for job in result.jobs])
    names = sorted({job.application for job in result.jobs})
    rows_by_name = {name: [row for row, job in enumerate(result.jobs) if job.application == name] for name in names}
    overall = _figures(result.jobs, np.arange(len(jct)), jct, queueing, fairness)
    # Useful samples per second from the first start to the end.
    goodputs = np.array([job.useful_samples / (job.finish_s - job.start_s) for job in result.jobs])
    # GPU time of all jobs: held in all, while starting, and undone by failures.
    held_gpu_s, restart_gpu_s, lost_gpu_s = (
        sum(getattr(job, name) for job in result.jobs)
        for name in ("gpu_seconds", "restart_gpu_seconds", "lost_gpu_seconds")
    )
    available_gpu_s = sum(result.available_gpu_seconds.values())
    costs = [_price(job.gpu_seconds_by_type, prices) for job in result.jobs] if prices is not None else []
    total_cost = _price(result.available_gpu_seconds, prices) if prices is not None else 0.0
    has_failures = result.node_failures > 0 or any(job.failures for job in result.jobs)
    # What the record of a job says beside its tally.
    extra_fields: list[dict[str, float]] = [{"finish_time_fairness": ratio} for ratio in fairness.tolist()]
    for row, cost in enumerate(costs):
        extra_fields[row]["cost"] = cost
    job_fields = (*_JOB_FIELDS, *(_FAILURE_FIELDS if has_failures else ()))
    priced: dict[str, Any] = {"cost": ReplayCost(jobs=sum(costs), cluster=total_cost)} if costs else {}
    return PolicyRecord(
        **overall.model_dump(exclude={"jobs", "worst_fairness"}),
        makespan_s=makespan,
        utilization=held_gpu_s / (result.total_gpus * makespan),
        finish_time_fairness=Fairness(max=overall.worst_fairness, share_below_1=float((fairness < 1).mean())),
        p99_queueing_s=float(np.percentile(queueing, 99)),
        avg_jct_by_application_s={name: float(jct[rows].mean()) for name, rows in rows_by_name.items()},
        restart_gpu_hours=restart_gpu_s / 3600,
        lost_gpu_hours=lost_gpu_s / 3600,
        useful_share=max(held_gpu_s - restart_gpu_s - lost_gpu_s, 0.0) / available_gpu_s if available_gpu_s else 0.0,
        availability=available_gpu_s / (result.total_gpus * makespan),
        node_failures=result.node_failures,
        job_failures=sum(job.failures for job in result.jobs),
        goodput_by_application={name: float(goodputs[rows].mean()) for name, rows in rows_by_name.items()},
        by_class=_by_class(result, isolated, jct, queueing, fairness),
        **priced,
        rounds=result.rounds,
        wall_seconds=result.wall_seconds,
        policy_cpu_seconds=result.policy_seconds,
        usage=_usage(result),
        jobs=[
            ReplayedJob.model_validate({**{name: getattr(job, name) for name in job_fields}, **extra_fields[row]})
            for row, job in enumerate(result.jobs)
        ],
    )


def _fairness(result: SimulationResult, isolated: IsolatedTimes, restart_delay_s: float) -> Floats:
    """Return finish-time fairness (n,): a job's completion time over that in an isolated, equally partitioned cluster.

    Source: Mahajan et al., Themis, NSDI 2020; Pollux, section 5.3.1. There a job is alone on its 1/n of the GPUs, n the
    time average of the jobs in the system during its life, with one start. With several types it is the share of the
    one on which that is fastest. A share below one GPU is that much of one GPU's time; other fractions are interpolated
    in the speed between whole GPUs. The isolated cluster never fails. ``restart_delay_s``: of the one start that the
    job would have there.
    """
    submit = np.array([job.submit_s for job in result.jobs])
    finish = np.array([job.finish_s for job in result.jobs])
    present = _average_present(submit, finish).tolist()
    fair_s = [
        isolated.on_share(job.application, 1 / max(count, 1.0)) + restart_delay_s
        for job, count in zip(result.jobs, present, strict=True)
    ]
    return np.asarray((finish - submit) / np.array(fair_s))


_MOST_CHANGES = 500  # of the GPUs in use: a chart shows no more


def _usage(result: SimulationResult, most: int = _MOST_CHANGES) -> UsageRecord:
    """Return the GPUs in use from each time on; of more than ``most`` changes, that many evenly spread ones."""
    changes = result.usage
    if len(changes) > most:
        changes = tuple(changes[round(index * (len(changes) - 1) / (most - 1))] for index in range(most))
    return UsageRecord(**{name: [getattr(row, name) for row in changes] for name in UsageRecord.model_fields})


def _price(gpu_seconds: Mapping[str, float], prices: Mapping[str, float]) -> float:
    """Return what GPU seconds by type cost at prices per GPU hour."""
    return sum(seconds / 3600 * prices[name] for name, seconds in gpu_seconds.items())


def _by_class(
    result: SimulationResult, isolated: IsolatedTimes, jct: Floats, queueing: Floats, fairness: Floats
) -> dict[str, ClassFigures]:
    """Return the figures of each size class that has jobs, by its name; the arrays are (n,), one value a job.

    ``isolated``: times of each application alone, by which its class is told.
    """
    class_by_application = {job.application: class_of(job.application, isolated) for job in result.jobs}
    classes = np.array([class_by_application[job.application] for job in result.jobs])
    rows_by_class = {name: np.flatnonzero(classes == name) for name in SIZE_CLASSES}
    return {
        name: _figures(result.jobs, class_rows, jct, queueing, fairness)
        for name, class_rows in rows_by_class.items()
        if len(class_rows)
    }


def _figures(jobs: Sequence[JobTally], rows: Places, jct: Floats, queueing: Floats, fairness: Floats) -> ClassFigures:
    """Return the summary of the jobs at ``rows``.

    ``jct``, ``queueing`` (seconds from submission to the end and to the start) and ``fairness`` hold all jobs, (n,).
    """
    return ClassFigures(
        jobs=len(rows),
        avg_jct_s=float(jct[rows].mean()),
        median_jct_s=float(np.median(jct[rows])),
        p99_jct_s=float(np.percentile(jct[rows], 99)),
        avg_queueing_s=float(queueing[rows].mean()),
        restarts=sum(jobs[row].restarts for row in rows),
        worst_fairness=float(fairness[rows].max()),
        gpu_hours=sum(jobs[row].gpu_seconds for row in rows) / 3600,
    )


def _average_present(submit: Floats, finish: Floats) -> Floats:
    """Return the time average of the number of jobs in the system over each job's life, (n,); the job included.

    ``submit`` and ``finish``: seconds, (n,). The average is the total overlap with all jobs' lives over the job's own.
    """
    overlap_s = np.empty_like(submit)
    for begin in range(0, len(submit), _BLOCK):  # all pairs of ten thousand jobs at once would take gigabytes
        rows = slice(begin, begin + _BLOCK)
        overlap = np.minimum(finish[rows, None], finish) - np.maximum(submit[rows, None], submit)
        overlap_s[rows] = np.maximum(overlap, 0.0).sum(axis=1)
    return overlap_s / (finish - submit)
