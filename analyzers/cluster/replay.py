"""One workload under each policy (kind ``ddltool.simulation``), and searches of hyper-parameters as workloads.

Start at :func:`study`.

A search that is sequential and model-based, such as TPE, proposes the next trial from the results of finished ones, so a
trial arrives whenever one ends (Pollux, section 5.4.2). Here the search itself is synthetic: trials train the measured
application as it is, whatever their learning rate or width would be, so neither speed nor length differs between them,
and no accuracy is said. What is compared is how the scheduler serves that pattern of arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ddltool.analyzers.cluster.cluster import Allocation, ClusterSpec, NodeFailures
from ddltool.analyzers.cluster.inputs import FittedModel, read_jobs, read_templates, read_truth
from ddltool.analyzers.cluster.job import SimulatedJob
from ddltool.analyzers.cluster.metrics import IsolatedTimes, summarize
from ddltool.analyzers.cluster.policies.gangs import Fifo
from ddltool.analyzers.cluster.simulator import Options, SchedulingPolicy, SimulationResult, check_runs
from ddltool.analyzers.cluster.simulator import simulate as play
from ddltool.analyzers.cluster.truth import Application
from ddltool.errors import InputError
from ddltool.simulation_results import (
    JobSpec,
    PolicyRecord,
    ReplayFailures,
    SearchFigures,
    SearchResult,
    SimulationDocument,
    TrialSearch,
)
from ddltool.stages import Stage, Tell, log_remark, quietly

OnRound = Callable[[int, float], None]
"""What may be called each round: with the finished jobs and the simulated seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What replays share; ``models``: fitted ones in place of traces; ``prices``: per GPU hour, by type."""

    cluster: Path
    traces: Sequence[Path]
    options: Options
    models: Sequence[FittedModel] = ()
    prices: Mapping[str, float] | None = None
    power: float = -1.0

    def resolved(self) -> Setup:
        """Return the setup with absolute paths, as another process or machine may have another working folder."""
        models = tuple(replace(model, file=model.file.resolve()) for model in self.models)
        traces = tuple(folder.resolve() for folder in self.traces)
        return replace(self, cluster=self.cluster.resolve(), traces=traces, models=models)


def replays(
    jobs: Sequence[JobSpec],
    applications: dict[str, Application],
    cluster: ClusterSpec,
    makers: Mapping[str, Callable[[], SchedulingPolicy]],
    options: Options,
    *,
    prices: Mapping[str, float] | None = None,
    stage: Stage = quietly,
) -> Iterator[tuple[str, PolicyRecord]]:
    """Yield each policy and its record, as soon as the jobs have been replayed under it.

    All policies are checked before the first is replayed: InputError for jobs that can never run on the cluster.
    ``prices``: per GPU hour, by type. ``makers``: what makes each policy anew, by name.
    """
    isolated = IsolatedTimes(applications, cluster)
    for make in makers.values():
        check_runs(jobs, applications, cluster, make())
    for policy, make in makers.items():
        with _watched(policy, stage, len(jobs)) as on_round:
            result = play(jobs, applications, cluster, make(), options, on_round=on_round)
            record = summarize(result, isolated, options.restart_delay_s, prices=prices)
        yield policy, record


@contextmanager
def _watched(title: str, stage: Stage, jobs: int) -> Iterator[OnRound]:
    """Show how far a replay of ``jobs`` jobs is; yields what the simulator is to call each round."""
    with stage(title, jobs) as advance:
        yield lambda finished, now_s: advance(
            finished, f"{finished} of {jobs} jobs, {now_s / 3600:,.1f} simulated hours"
        )


class AsProposed:
    """Shows a policy only ``concurrent`` unfinished trials; the next is proposed in the round after one ends.

    The simulator knows submission times beforehand, these depend on the run: so all trials stand ready from the start,
    and a trial's submission is set to the time at which it is first shown. Policies that look at a job's age, and the
    completion times in the result, then see what they would if it had been submitted then.
    """

    def __init__(self, policy: SchedulingPolicy, concurrent: int) -> None:
        """Take over the policy's name, tuning and pooling, so that the simulator treats this one alike."""
        self.policy, self.concurrent = policy, concurrent
        self.name, self.tuning = policy.name, policy.tuning
        self.pools = getattr(policy, "pools", False)
        self._proposed: set[int] = set()

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return the allocations that the policy makes for the trials that have been proposed, by job index.

        The first time that a trial is shown, ``now_s`` becomes its submission.
        """
        visible = list(jobs[: self.concurrent])  # in the workload's order, so proposed trials stay in front
        for job in visible:
            if job.index not in self._proposed:
                self._proposed.add(job.index)
                job.spec, job.tally.submit_s = job.spec.model_copy(update={"submit_s": now_s}), now_s
        return self.policy.allocate(visible, cluster, now_s)


def run_search(
    search: TrialSearch,
    applications: dict[str, Application],
    cluster: ClusterSpec,
    policy: SchedulingPolicy | None = None,
    options: Options | None = None,
    on_round: OnRound | None = None,
) -> SimulationResult:
    """Return what becomes of a search under ``policy``; None: the baseline, ``search.gpus`` GPUs and a fixed batch each.

    Rounds also come whenever a trial ends, as the next one starts then; ``on_round(finished trials, now_s)`` may show
    them. Raises InputError for an application that is not there and for trials that cannot run.
    """
    if search.application not in applications:
        known_names = ", ".join(applications)
        raise InputError("search:application", f"{search.application!r} has no traces", f"one of: {known_names}")
    application = applications[search.application]
    low, high = application.init_batch_size, application.max_batch_size
    batch = search.gpus * search.local_batch_size
    if policy is None and not low <= batch <= high:
        problem = f"makes a batch of {batch} on {search.gpus} GPUs"
        raise InputError("search:local_batch_size", problem, f"{search.application} has {low} to {high}")
    trial = {"submit_s": 0.0, "application": search.application, "num_replicas": search.gpus}
    # Under a policy the batch is tuned from here on, so it need only be possible.
    trial["batch_size"] = max(low, min(batch, high))
    workload = [JobSpec.model_validate({"name": f"trial-{number}", **trial}) for number in range(search.trials)]
    proposing = AsProposed(policy if policy is not None else Fifo(), search.concurrent)
    settings = replace(options or Options(), react=True)
    return play(workload, applications, cluster, proposing, settings, on_round=on_round)


def search_trials(
    search: TrialSearch,
    applications: dict[str, Application],
    cluster: ClusterSpec,
    policies: Mapping[str, Callable[[], SchedulingPolicy]],
    options: Options,
    *,
    local_batch_sizes: Sequence[int] = (),
    stage: Stage = quietly,
) -> SearchResult:
    """Return the baseline and each policy on the same search: mean completion time, makespan, GPU time and restarts.

    ``local_batch_sizes``: further fixed batches per GPU at which the baseline runs, besides the search's own.
    ``policies``: what makes each one anew, by name.
    """
    # Each once, the search's own first.
    batch_sizes = dict.fromkeys([search.local_batch_size, *local_batch_sizes])
    baselines = [(f"fixed-{size}", search.model_copy(update={"local_batch_size": size}), None) for size in batch_sizes]
    figures: dict[str, SearchFigures] = {}
    for name, variant, make in [*baselines, *((name, search, make) for name, make in policies.items())]:
        with _watched(name, stage, search.trials) as on_round:
            jobs = run_search(variant, applications, cluster, make() if make else None, options, on_round).jobs
        figures[name] = SearchFigures(
            avg_jct_s=sum(job.jct_s for job in jobs) / len(jobs),
            makespan_s=max(job.finish_s for job in jobs) - min(job.submit_s for job in jobs),
            gpu_seconds=sum(job.gpu_seconds for job in jobs),
            restarts=sum(job.restarts for job in jobs),
        )
    return SearchResult(search=search, gpus=cluster.total_gpus, policies=figures)


def study(
    workload: Path,
    machines: ClusterSpec,
    makers: Mapping[str, Callable[[], SchedulingPolicy]],
    setup: Setup,
    *,
    seed: int,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> SimulationDocument:
    """Return the record of a workload, or of all jobs of a cluster's trace, under policies.

    ``machines``: the cluster's nodes. ``makers``: by name, what makes each policy anew. ``setup``: the files and
    options that all replays share. ``tell`` is given the remarks on what was converted or assumed. Raises InputError
    for files that cannot be read and jobs that can never run.
    """
    with stage(f"reading {workload.name}"):
        drawn_from = partial(read_templates, setup.traces, machines)
        specs, remark = read_jobs(workload, drawn_from, jobs=None, hours=None, seed=seed)
        truth = read_truth(specs, setup.traces, setup.models)
    # What was converted or assumed is said, and kept in the record too.
    for text in filter(None, [remark, *truth.assumed]):
        tell(text)
    options, prices = setup.options, setup.prices
    records = dict(replays(specs, truth.applications, machines, makers, options, prices=prices, stage=stage))
    failures = options.failures
    # Fields that a document has only where there is something to say.
    optional_fields: dict[str, Any] = {
        "failures": failures and _record_of(failures),
        "prices_per_gpu_hour": None if prices is None else dict(prices),
        "assumptions": list(truth.assumed) or None,
        "conversion": remark or None,
    }
    return SimulationDocument(
        workload=str(workload),
        jobs=len(specs),
        gpus=machines.total_gpus,
        interval_s=options.interval_s,
        restart_delay_s=options.restart_delay_s,
        interference=options.interference,
        seed=seed,
        truth=truth.source,
        **{name: value for name, value in optional_fields.items() if value is not None},
        policies=records,
    )


def _record_of(failures: NodeFailures) -> ReplayFailures:
    """Return what a document says of the failures that a replay had."""
    said = {name: value for name, value in asdict(failures).items() if name in ReplayFailures.model_fields}
    by_chance = failures.mtbf_s if failures.mtbf_s < math.inf else None
    return ReplayFailures(**{**said, "mtbf_s": by_chance, "events": len(failures.events)})
