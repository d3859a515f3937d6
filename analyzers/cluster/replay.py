"""One workload under each policy (kind ``ddltool.simulation``), and searches of hyper-parameters as workloads.

Start at :func:`study`.

A sequential model-based search of hyper-parameters, such as TPE, proposes the next trial from the results of finished ones, so
a trial arrives whenever one ends (Pollux, section 5.4.2). Here the search is synthetic: all trials train the same measured
application, whatever their learning rate or width would be, so they do not differ in speed or length, and there are no
accuracies. What is compared is how schedulers serve this pattern of arrivals.
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
"""Called in each round with (number of finished jobs, simulated seconds), to show progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Files and options that several replays share.

    ``models``: fitted models, which take the place of traces; ``prices``: GPU type -> price per GPU hour; ``power``: p of
    Pollux's fitness.
    """

    cluster: Path
    traces: Sequence[Path]
    options: Options
    models: Sequence[FittedModel] = ()
    prices: Mapping[str, float] | None = None
    power: float = -1.0

    def resolved(self) -> Setup:
        """Return the setup with absolute paths, for processes with another working folder."""
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
    """Yield (policy's name, record) as soon as the jobs have been replayed under a policy.

    ``applications``: by name; ``makers``: policy's name -> function that makes a new one; ``prices``: GPU type -> price per GPU
    hour. Raises InputError, before the first replay, for jobs that can never run on the cluster under one of the policies.
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
    """Show the progress of a replay of ``jobs`` jobs.

    Yields the function to call in each round with the number of finished jobs and the simulated time in seconds.
    """
    with stage(title, jobs) as advance:

        def on_round(finished: int, now_s: float) -> None:
            """Show how many jobs are finished, and how much time has been simulated."""
            advance(finished, f"{finished} of {jobs} jobs, {now_s / 3600:,.1f} simulated hours")

        yield on_round


class AsProposed:
    """A policy that shows another policy only ``concurrent`` unfinished trials at a time.

    The next trial is shown in the round after one ends. The simulator needs submission times in advance, but here they depend
    on the run. So all trials are submitted at the start, and a trial's submission is changed to the time at which it is first
    shown: jobs' ages and completion times are then as if it had been submitted at that time.
    """

    def __init__(self, policy: SchedulingPolicy, concurrent: int) -> None:
        """Copy the policy's name, tuning and pooling, by which the simulator treats a policy.

        ``concurrent``: most unfinished trials that the policy sees at a time.
        """
        self.policy = policy
        self.concurrent = concurrent
        self.name = policy.name
        self.tuning = policy.tuning
        self.pools = getattr(policy, "pools", False)
        self._proposed: set[int] = set()
        """Indices of the trials that were shown before."""

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return job index -> allocation by the policy, for the first ``concurrent`` unfinished trials.

        Changes a trial that is shown for the first time: ``now_s`` becomes its submission.
        """
        visible = list(jobs[: self.concurrent])  # jobs are in the workload's order, so trials shown before come first
        for job in visible:
            if job.index not in self._proposed:
                self._proposed.add(job.index)
                job.spec = job.spec.model_copy(update={"submit_s": now_s})
                job.tally.submit_s = now_s
        return self.policy.allocate(visible, cluster, now_s)


def run_search(
    search: TrialSearch,
    applications: dict[str, Application],
    cluster: ClusterSpec,
    policy: SchedulingPolicy | None = None,
    options: Options | None = None,
    on_round: OnRound | None = None,
) -> SimulationResult:
    """Return the simulation of a search under ``policy``; None: the baseline, ``search.gpus`` GPUs and a fixed batch per trial.

    There is also a round whenever a trial ends, because the next one starts then. ``applications``: by name. Raises InputError
    for an application without traces, and for trials that cannot run.
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
    # A policy tunes the batch, so there the initial one need only be possible.
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

    ``local_batch_sizes``: further fixed batches per GPU at which the baseline runs, besides the search's own. ``policies``:
    name -> function that makes a new one. Keys of the figures are the policies' names and ``fixed-SIZE`` for baselines.
    """
    # without repeats, and the search's own first
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
    """Return the record of the jobs in a workload's file, or in a cluster's trace, replayed under policies.

    ``machines``: the cluster's nodes. ``makers``: policy's name -> function that makes a new one. ``seed``: of the applications
    that are drawn for a trace's jobs. ``tell`` is called with remarks on what was converted or assumed. Raises InputError for
    files that cannot be read and jobs that can never run.
    """
    with stage(f"reading {workload.name}"):
        drawn_from = partial(read_templates, setup.traces, machines)
        specs, remark = read_jobs(workload, drawn_from, jobs=None, hours=None, seed=seed)
        truth = read_truth(specs, setup.traces, setup.models)
    # Remarks are told to the user, and kept in the record too.
    for text in filter(None, [remark, *truth.assumed]):
        tell(text)
    options, prices = setup.options, setup.prices
    records = dict(replays(specs, truth.applications, machines, makers, options, prices=prices, stage=stage))
    failures = options.failures
    # fields that a document has only if they have a value
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
    """Return a replay's node failures as the record in its document.

    It has the number of given events instead of the events, and no mean time between failures (None) where none happen by
    chance.
    """
    fields = {name: value for name, value in asdict(failures).items() if name in ReplayFailures.model_fields}
    fields["mtbf_s"] = failures.mtbf_s if failures.mtbf_s < math.inf else None
    fields["events"] = len(failures.events)
    return ReplayFailures(**fields)
