"""The document of ``ddltool simulate`` (kind ``ddltool.simulation``): a record per policy, and one per job in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.cluster import ClusterSpec
    from ddltool.analyzers.scheduling.failures import Failures
    from ddltool.analyzers.scheduling.metrics import Summary
    from ddltool.analyzers.scheduling.simulator import Options, SimulationResult
    from ddltool.commands.simulate_inputs import Inputs
    from ddltool.commands.simulate_replay import Replay


def document_of(
    inputs: Inputs,
    machines: ClusterSpec,
    replays: Sequence[Replay],
    options: Options,
    seed: int,
    prices: Mapping[str, float] | None,
) -> dict[str, Any]:
    """Return the document of one workload under all policies."""
    return {
        "kind": "ddltool.simulation",
        "schema_version": 1,
        "workload": str(inputs.workload),
        "jobs": len(inputs.jobs),
        "gpus": machines.total_gpus,
        "interval_s": options.interval_s,
        "restart_delay_s": options.restart_delay_s,
        "interference": options.interference,
        "seed": seed,
        **({"failures": _failures(options.failures)} if options.failures is not None else {}),
        **({"prices_per_gpu_hour": prices} if prices is not None else {}),
        "truth": inputs.truth.source,
        **({"assumptions": list(inputs.truth.assumed)} if inputs.truth.assumed else {}),
        **({"conversion": inputs.remark} if inputs.remark else {}),
        "policies": {each.policy: describe(each.result, each.summary) for each in replays},
    }


def describe(result: SimulationResult, summary: Summary) -> dict[str, Any]:
    """Return the record of one policy; jobs say their failures and cost where there can be any."""
    struck = summary.node_failures > 0 or summary.job_failures > 0
    costs = summary.job_costs or (None,) * len(result.jobs)
    return {
        "avg_jct_s": summary.avg_jct_s,
        "median_jct_s": summary.median_jct_s,
        "p99_jct_s": summary.p99_jct_s,
        "makespan_s": summary.makespan_s,
        "avg_queueing_s": summary.avg_queueing_s,
        "utilization": summary.utilization,
        "restarts": summary.restarts,
        "finish_time_fairness": {"max": summary.worst_fairness, "share_below_1": summary.share_below_1},
        "avg_jct_by_application_s": dict(summary.by_application),
        **_more(summary),
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
    return {
        "time_s": [row.time_s for row in rows],
        "gpus": [row.gpus for row in rows],
        "jobs": [row.jobs for row in rows],
    }


def _more(summary: Summary) -> dict[str, Any]:
    """Return the further keys of one policy's record; costs only where prices are given."""
    made: dict[str, Any] = {
        "p99_queueing_s": summary.p99_queueing_s,
        "gpu_hours": summary.gpu_hours,
        "restart_gpu_hours": summary.restart_gpu_hours,
        "lost_gpu_hours": summary.lost_gpu_hours,
        "useful_share": summary.useful_share,
        "availability": summary.availability,
        "node_failures": summary.node_failures,
        "job_failures": summary.job_failures,
        "goodput_by_application": dict(summary.goodput),
        "by_class": {name: asdict(figures) for name, figures in summary.by_class.items()},
    }
    if summary.cost is not None:
        made["cost"] = {"jobs": summary.cost, "cluster": summary.cluster_cost}
    return made


def _failures(failures: Failures) -> dict[str, Any]:
    """Return what was to go wrong."""
    return {
        "mtbf_s": failures.mtbf_s,
        "repair_s": failures.repair_s,
        "checkpoint_interval_s": failures.checkpoint_interval_s,
        "events": len(failures.events),
        "seed": failures.seed,
    }
