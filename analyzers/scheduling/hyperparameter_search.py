"""Hyper-parameter searches as a workload: many trials of one application, a few at a time (Pollux, section 5.4.2).

A sequential model-based search such as TPE proposes the next trial from the results of finished ones, so a trial
arrives whenever one ends. Here the search itself is synthetic: trials train the measured application as it is, whatever
their learning rate or width would be, so neither speed nor length differs between them, and no accuracy is said. What
is compared is how the scheduler serves that pattern of arrivals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddltool.analyzers.scheduling.cluster import Allocation, ClusterSpec
from ddltool.analyzers.scheduling.gangs import Fifo
from ddltool.analyzers.scheduling.job import JobSpec, SimulatedJob
from ddltool.analyzers.scheduling.replay import Watch, unwatched
from ddltool.analyzers.scheduling.simulator import Options, Policy, SimulationResult, simulate
from ddltool.analyzers.scheduling.truth import Application
from ddltool.errors import InputError

_MOST_TRIALS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """One search: the paper's has 100 trials, 4 at a time. The baseline gives each ``gpus`` and a fixed batch."""

    application: str = "cifar10"
    trials: int = 100
    concurrent: int = 4
    gpus: int = 4
    local_batch_size: int = 128

    def __post_init__(self) -> None:
        for name in ("trials", "concurrent", "gpus", "local_batch_size"):
            value = getattr(self, name)
            if not 1 <= value <= _MOST_TRIALS:
                raise InputError(f"search:{name}", f"is {value}", f"from 1 to {_MOST_TRIALS}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """Seconds; a trial's completion time counts from when the search proposes it."""

    policy: str
    avg_jct_s: float
    makespan_s: float
    gpu_seconds: float
    restarts: int
    result: SimulationResult


class AsProposed:
    """Shows a policy only ``concurrent`` unfinished trials; the next is proposed in the round after one ends.

    The simulator knows submission times beforehand, these depend on the run: so all trials stand ready from the start,
    and a trial's submission is set to the time at which it is first shown. Policies that look at a job's age, and the
    completion times in the result, then see what they would if it had been submitted then.
    """

    def __init__(self, policy: Policy, concurrent: int) -> None:
        self.policy, self.concurrent = policy, concurrent
        self.name, self.tuning = policy.name, policy.tuning
        self.pools = getattr(policy, "pools", False)
        self._proposed: set[int] = set()

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return the policy's allocations of the trials that have been proposed."""
        shown = list(jobs[: self.concurrent])  # in the workload's order, so proposed trials stay in front
        for job in shown:
            if job.index not in self._proposed:
                self._proposed.add(job.index)
                job.spec = replace(job.spec, submit_s=now_s)
        return self.policy.allocate(shown, cluster, now_s)


def run_search(
    search: Search,
    applications: dict[str, Application],
    cluster: ClusterSpec,
    policy: Policy | None = None,
    options: Options | None = None,
    on_round: Callable[[int, float], None] | None = None,
) -> SearchResult:
    """Return what a search takes under ``policy``; None: the baseline, ``search.gpus`` GPUs and a fixed batch each.

    Rounds also come whenever a trial ends, as the next one starts then; ``on_round(finished trials, now_s)`` may show
    them. Raises InputError for an application that is not there and for trials that cannot run.
    """
    if search.application not in applications:
        known = ", ".join(applications)
        raise InputError("search:application", f"{search.application!r} has no traces", f"one of: {known}")
    application = applications[search.application]
    batch = search.gpus * search.local_batch_size
    if policy is None:
        low, high = application.init_batch_size, application.max_batch_size
        if not low <= batch <= high:
            problem = f"makes a batch of {batch} on {search.gpus} GPUs"
            raise InputError("search:local_batch_size", problem, f"{search.application} has {low} to {high}")
    else:
        batch = max(application.init_batch_size, min(batch, application.max_batch_size))
    workload = [
        JobSpec(
            name=f"trial-{number}",
            submit_s=0.0,
            application=search.application,
            num_replicas=search.gpus,
            batch_size=batch,
        )
        for number in range(search.trials)
    ]
    shown = AsProposed(policy if policy is not None else Fifo(), search.concurrent)
    settings = replace(options or Options(), react=True)
    result = simulate(workload, applications, cluster, shown, settings, on_round=on_round)
    first = min(job.submit_s for job in result.jobs)
    return SearchResult(
        policy="baseline" if policy is None else policy.name,
        avg_jct_s=sum(job.jct_s for job in result.jobs) / len(result.jobs),
        makespan_s=max(job.finish_s for job in result.jobs) - first,
        gpu_seconds=sum(job.gpu_seconds for job in result.jobs),
        restarts=sum(job.restarts for job in result.jobs),
        result=result,
    )


def search_document(
    search: Search,
    applications: dict[str, Application],
    cluster: ClusterSpec,
    policies: Mapping[str, Callable[[], Policy]],
    options: Options,
    *,
    local_batch_sizes: Sequence[int] = (),
    watch: Watch = unwatched,
) -> dict[str, Any]:
    """Return the document (kind ``ddltool.hyperparameter_search``): the baseline and each policy on the same search.

    ``local_batch_sizes``: further fixed batches per GPU at which the baseline runs, besides the search's own.
    """
    sizes = dict.fromkeys([search.local_batch_size, *local_batch_sizes])
    asked = [(f"fixed-{size}", replace(search, local_batch_size=size), None) for size in sizes]
    found: dict[str, SearchResult] = {}
    for name, one, make in [*asked, *((name, search, make) for name, make in policies.items())]:
        with watch(name) as on_round:
            found[name] = run_search(one, applications, cluster, make() if make else None, options, on_round)
    return {
        "kind": "ddltool.hyperparameter_search",
        "schema_version": 1,
        "search": asdict(search),
        "gpus": cluster.total_gpus,
        "policies": {
            name: {
                "avg_jct_s": result.avg_jct_s,
                "makespan_s": result.makespan_s,
                "gpu_seconds": result.gpu_seconds,
                "restarts": result.restarts,
            }
            for name, result in found.items()
        },
    }
