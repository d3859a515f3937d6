"""One workload under each policy, and the document of that (kind ``ddltool.simulation``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from ddltool.analyzers.scheduling.cluster import ClusterSpec
from ddltool.analyzers.scheduling.inputs import Truth
from ddltool.analyzers.scheduling.job import JobSpec
from ddltool.analyzers.scheduling.metrics import IsolatedTimes, Summary, summarize
from ddltool.analyzers.scheduling.simulator import Options, Policy, SimulationResult, check_runs, simulate
from ddltool.analyzers.scheduling.truth import Application

OnRound = Callable[[int, float], None]
"""What may be called each round: with the finished jobs and the simulated seconds."""
Watch = Callable[[str], AbstractContextManager[OnRound | None]]
"""Given a policy's name: what surrounds its replay, and yields what is called each round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A workload replayed under one policy."""

    policy: str
    result: SimulationResult
    summary: Summary


def unwatched(_policy: str) -> AbstractContextManager[OnRound | None]:
    """Show nothing of a replay."""
    return nullcontext()


def replays(
    jobs: Sequence[JobSpec],
    applications: dict[str, Application],
    cluster: ClusterSpec,
    makers: Mapping[str, Callable[[], Policy]],
    options: Options,
    *,
    prices: Mapping[str, float] | None = None,
    watch: Watch = unwatched,
) -> Iterator[Replay]:
    """Yield the jobs under every policy, each as soon as it is there.

    All policies are checked before the first is replayed: InputError for jobs that can never run on the cluster.
    ``prices``: per GPU hour, by type.
    """
    isolated = IsolatedTimes(applications, cluster)
    for make in makers.values():
        check_runs(jobs, applications, cluster, make())
    for policy, make in makers.items():
        with watch(policy) as on_round:
            result = simulate(jobs, applications, cluster, make(), options, on_round=on_round)
            summary = summarize(result, isolated, options.restart_delay_s, prices=prices)
        yield Replay(policy=policy, result=result, summary=summary)


def document_of(
    workload: str,
    remark: str,
    truth: Truth,
    cluster: ClusterSpec,
    found: Sequence[Replay],
    options: Options,
    seed: int,
    prices: Mapping[str, float] | None,
) -> dict[str, Any]:
    """Return the document of one workload under all policies; ``remark`` says how a cluster's trace became one."""
    lost = options.failures
    return {
        "kind": "ddltool.simulation",
        "schema_version": 1,
        "workload": workload,
        "jobs": len(found[0].result.jobs),
        "gpus": cluster.total_gpus,
        "interval_s": options.interval_s,
        "restart_delay_s": options.restart_delay_s,
        "interference": options.interference,
        "seed": seed,
        **({"failures": {**asdict(lost), "events": len(lost.events)}} if lost is not None else {}),
        **({"prices_per_gpu_hour": prices} if prices is not None else {}),
        "truth": truth.source,
        **({"assumptions": list(truth.assumed)} if truth.assumed else {}),
        **({"conversion": remark} if remark else {}),
        "policies": {each.policy: _record(each.result, each.summary) for each in found},
    }


def _record(result: SimulationResult, summary: Summary) -> dict[str, Any]:
    """Return the record of one policy; jobs say their failures and cost where there can be any."""
    struck = summary.node_failures > 0 or summary.job_failures > 0
    costs = summary.job_costs or (None,) * len(result.jobs)
    figures = asdict(summary)
    del figures["fairness"], figures["job_costs"]
    if summary.cost is None:
        del figures["cost"]
    return {
        **figures,
        "rounds": result.rounds,
        "wall_seconds": result.wall_seconds,
        "policy_cpu_seconds": result.policy_seconds,
        "usage": _usage(result),
        "jobs": [
            {
                "name": job.name,
                "application": job.application,
                "submit_s": job.submit_s,
                "start_s": job.first_start_s,
                "finish_s": job.finish_s,
                "jct_s": job.jct_s,
                "restarts": job.restarts,
                "gpu_seconds": job.gpu_seconds,
                "finish_time_fairness": fairness,
                **({"failures": job.failures, "lost_gpu_seconds": job.lost_gpu_seconds} if struck else {}),
                **({"cost": cost} if cost is not None else {}),
            }
            for job, fairness, cost in zip(result.jobs, summary.fairness, costs, strict=True)
        ],
    }


def _usage(result: SimulationResult, most: int = 500) -> dict[str, list[float]]:
    """Return the GPUs that are held from each time on; of many changes, as many, evenly spread."""
    rows = result.usage
    if len(rows) > most:
        rows = tuple(rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most))
    return {name: [getattr(row, name) for row in rows] for name in ("time_s", "gpus", "jobs")}
