"""Figures of one simulation: completion and queueing times, makespan, utilisation, goodput, cost, fairness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddltool.analyzers.cluster.cluster import ClusterSpec, packed
from ddltool.analyzers.cluster.generator import PUBLISHED_CLASSES, SIZE_CLASSES, size_class
from ddltool.analyzers.cluster.job import JobTally
from ddltool.analyzers.cluster.simulator import SimulationResult
from ddltool.analyzers.cluster.truth import Application
from ddltool.arrays import Floats, Places
from ddltool.errors import InputError, did_you_mean
from ddltool.simulation_results import ClassFigures, Fairness, PolicyRecord, ReplayCost, ReplayedJob, UsageRecord

_MOST_PRICE = 1e6
_BLOCK = 256
# Fields that a job's record has from its tally; the second ones only where nodes failed.
_JOB_FIELDS = ("name", "application", "submit_s", "start_s", "finish_s", "jct_s", "restarts", "gpu_seconds")
_FAILURE_FIELDS = ("failures", "lost_gpu_seconds")


class IsolatedTimes:
    """Seconds, without restarts, of a job that is alone on k packed GPUs and takes the best batch size in each epoch.

    GPUs are of the type on which it is fastest, of those that the application was measured on; of a type with fewer than k
    GPUs, all are taken. In each epoch it uses the best number of replicas up to k, so it never takes longer on more GPUs.
    """

    def __init__(self, applications: Mapping[str, Application], cluster: ClusterSpec) -> None:
        """Take the applications by name and the cluster; times are computed at the first call for them, and cached."""
        self.applications = applications
        self.cluster = cluster
        self._epochs: dict[tuple[str, str], list[Floats]] = {}
        """(application, GPU type) -> for 1, 2, ... GPUs the least seconds of each epoch (E,)."""

    def __call__(self, name: str, gpus: int) -> float:
        """Return the seconds of application ``name`` on ``gpus`` GPUs."""
        return min(self._on(self.applications[name], kind, gpus) for kind in self._types(name))

    def on_share(self, name: str, share: float) -> float:
        """Return the seconds of application ``name`` on a ``share`` (above 0, up to 1) of the GPUs of its fastest type.

        That is the one type on whose share it is fastest. A fraction of a GPU has that fraction of its speed.
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
        """Return the seconds of the training on ``gpus`` GPUs of one type, above 0 and not necessarily whole.

        Below one GPU the speed is that fraction of one GPU's; between whole numbers the speed is interpolated.
        """
        if gpus <= 1:
            return self._on(application, gpu_type, 1) / gpus
        low = int(gpus)
        low_speed, high_speed = (1 / self._on(application, gpu_type, count) for count in (low, low + 1))
        return 1 / (low_speed + (gpus - low) * (high_speed - low_speed))

    def _on(self, application: Application, gpu_type: str, gpus: int) -> float:
        """Return the seconds of the whole training on up to ``gpus`` GPUs of one type, at each epoch's best batch.

        Each epoch's time is the least over all smaller numbers too, because the job may leave GPUs idle. GPUs beyond those that
        the application can use, or that there are, change nothing.
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
    """Return the size class of the application ``name``: the published one, else by its time on one GPU (``isolated``).

    Source: Pollux, section 5.1 and Table 1.
    """
    return PUBLISHED_CLASSES.get(name) or size_class(isolated(name, 1) / 3600.0)


def check_prices(prices: Mapping[str, float], cluster: ClusterSpec, where: str = "price") -> None:
    """Raise InputError unless every type of the cluster, and no other, has a price per GPU hour from 0 to a million."""
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
    """Return the figures of one simulation of n jobs; JCT is a job's completion time, from submission to its end.

    ``isolated``: times of each application alone, for fairness and size classes. ``restart_delay_s``: seconds of a start.
    ``prices``: GPU type -> price per GPU hour; None: no costs. Jobs have fields for failures and cost only where some node
    failed, and where there are prices.
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
    # useful samples per second from a job's first start to its end
    goodputs = np.array([job.useful_samples / (job.finish_s - job.start_s) for job in result.jobs])
    # GPU seconds of all jobs: in total, while starting, and undone by failures
    held_gpu_s = sum(job.gpu_seconds for job in result.jobs)
    restart_gpu_s = sum(job.restart_gpu_seconds for job in result.jobs)
    lost_gpu_s = sum(job.lost_gpu_seconds for job in result.jobs)
    available_gpu_s = sum(result.available_gpu_seconds.values())
    costs = [_price(job.gpu_seconds_by_type, prices) for job in result.jobs] if prices is not None else []
    total_cost = _price(result.available_gpu_seconds, prices) if prices is not None else 0.0
    has_failures = result.node_failures > 0 or any(job.failures for job in result.jobs)
    # fields of a job's record that are not in its tally
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
        # of the GPU time that was up, the share in which training was done that lasted
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

    Source: Mahajan et al., Themis, NSDI 2020; Pollux, section 5.3.1. In that cluster, which never fails, a job is alone on 1/n
    of the GPUs, where n is the time average of the jobs in the system during its life, and has one start of
    ``restart_delay_s`` seconds. With several types it gets its share of the type on which that is fastest
    (:meth:`IsolatedTimes.on_share`).
    """
    submit = np.array([job.submit_s for job in result.jobs])
    finish = np.array([job.finish_s for job in result.jobs])
    present = _average_present(submit, finish).tolist()
    fair_s = [
        isolated.on_share(job.application, 1 / max(count, 1.0)) + restart_delay_s
        for job, count in zip(result.jobs, present, strict=True)
    ]
    return np.asarray((finish - submit) / np.array(fair_s))


_MOST_CHANGES = 500  # of the GPUs in use; a chart cannot show more


def _usage(result: SimulationResult) -> UsageRecord:
    """Return the record of GPUs in use over time; of more than 500 changes, 500 evenly spaced ones."""
    changes = result.usage
    if len(changes) > _MOST_CHANGES:
        last = len(changes) - 1
        changes = tuple(changes[round(index * last / (_MOST_CHANGES - 1))] for index in range(_MOST_CHANGES))
    return UsageRecord(**{name: [getattr(row, name) for row in changes] for name in UsageRecord.model_fields})


def _price(gpu_seconds: Mapping[str, float], prices: Mapping[str, float]) -> float:
    """Return the price of ``gpu_seconds`` (by GPU type) at ``prices`` per GPU hour (by type)."""
    return sum(seconds / 3600 * prices[name] for name, seconds in gpu_seconds.items())


def _by_class(
    result: SimulationResult, isolated: IsolatedTimes, jct: Floats, queueing: Floats, fairness: Floats
) -> dict[str, ClassFigures]:
    """Return size class -> figures, for the classes that have jobs; the arrays are (n,), one value per job.

    ``isolated``: times of each application alone, which determine its class.
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
    """Return the figures of the jobs at ``rows``, at least one.

    Arrays are (n,) over all jobs: ``jct`` and ``queueing`` are the seconds from submission to the end and to the start,
    ``fairness`` the time to the end over that in a fair share of the cluster: the larger, the worse.
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
    """Return (n,) the time average, over each job's life, of the number of jobs in the system, the job itself included.

    ``submit`` and ``finish``: seconds, (n,). The average is the total overlap with all jobs' lives over the length of its own.
    """
    overlap_s = np.empty_like(submit)
    for begin in range(0, len(submit), _BLOCK):  # all pairs of ten thousand jobs at once would take gigabytes
        rows = slice(begin, begin + _BLOCK)
        overlap = np.minimum(finish[rows, None], finish) - np.maximum(submit[rows, None], submit)
        overlap_s[rows] = np.maximum(overlap, 0.0).sum(axis=1)
    return overlap_s / (finish - submit)
