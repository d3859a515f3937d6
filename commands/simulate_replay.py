"""Runs the replays of ``ddltool simulate``: one workload under each policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.cluster import ClusterSpec
    from ddltool.analyzers.scheduling.job import JobSpec
    from ddltool.analyzers.scheduling.metrics import Summary
    from ddltool.analyzers.scheduling.simulator import Options, Policy, SimulationResult
    from ddltool.analyzers.scheduling.truth import Application


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A workload replayed under one policy."""

    policy: str
    result: SimulationResult
    summary: Summary


def replays(
    jobs: Sequence[JobSpec],
    applications: dict[str, Application],
    cluster: ClusterSpec,
    makers: Mapping[str, Callable[[], Policy]],
    options: Options,
    *,
    prices: Mapping[str, float] | None = None,
    show_progress: bool = True,
) -> Iterator[Replay]:
    """Yield the jobs under every policy, each as soon as it is there.

    All policies are checked before the first is replayed: InputError for jobs that can never run on the cluster.
    ``prices``: per GPU hour, by type.
    """
    from ddltool.analyzers.scheduling.metrics import IsolatedTimes, summarize
    from ddltool.analyzers.scheduling.simulator import check_runs, simulate
    from ddltool.commands.simulate_progress import replay_progress

    isolated = IsolatedTimes(applications, cluster)
    for make in makers.values():
        check_runs(jobs, applications, cluster, make())
    for policy, make in makers.items():
        with replay_progress(policy, len(jobs)) if show_progress else nullcontext() as on_round:
            result = simulate(jobs, applications, cluster, make(), options, on_round=on_round)
            summary = summarize(result, isolated, options.restart_delay_s, prices=prices)
        yield Replay(policy=policy, result=result, summary=summary)
