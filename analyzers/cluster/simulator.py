"""Replays a workload on a cluster under a policy. Start at :func:`simulate`.

It is a discrete-event simulation. Events are submissions, ends of a job's epoch (at which it re-tunes its batch, or ends) and
scheduling rounds; between events every job's progress is linear in time. Rounds come at multiples of the interval while there
are jobs, with ``react`` also whenever a job arrives or ends, or a node fails, leaves or comes back. ``whole_seconds`` rounds
the ends of epochs to seconds, as the published fixed-step simulator does, for comparisons with it. With :class:`NodeFailures`,
the jobs on a failed node fall back to their last checkpoint and wait for the next round, and the policy sees the nodes that
are up. :class:`Watchdog` ends replays that would never end by themselves.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ddltool.analyzers.cluster.cluster import (
    Allocation,
    ClusterSpec,
    NodeFailures,
    NodeStates,
    count_gpus,
    free_gpus,
    interfering,
    without,
)
from ddltool.analyzers.cluster.job import JobTally, SimulatedJob, Tuning, make_jobs
from ddltool.analyzers.cluster.truth import Application
from ddltool.errors import Infeasible, InputError, listed
from ddltool.simulation_results import JobSpec

YEAR_S = 31_536_000.0
# Allowed intervals and the longest delay; other values are in another unit or typing errors.
_INTERVAL_S = (1.0, 604_800.0)
_LONGEST_DELAY_S = 86_400.0
# Applications that take longer than this at best have step times or iterations in another unit.
_LONGEST_JOB_S = YEAR_S
# Most expected failures until the last job is submitted; more would take minutes to draw.
_MOST_FAILURES = 1e7
# Rounds in which nothing runs or is about to, after which the policy counts as starving its jobs.
_MOST_IDLE_ROUNDS = 1000
# Rounds and seconds in which no job gets further than before, after which all training counts as undone by failures.
_MOST_FUTILE_ROUNDS, _MOST_FUTILE_S = 10_000, 604_800.0
# Longest replay from the first submission on.
_LONGEST_S = 100 * YEAR_S
_NAMED_NODES, _NAMED_JOBS = 8, 3


class SchedulingPolicy(Protocol):
    """Decides which job gets which GPUs. A policy may keep state from round to round; it belongs to one simulation.

    An optional attribute ``pools`` that is true lets the jobs of an application share what they have observed; an optional
    attribute ``mixed`` that is false says that the policy supports only clusters with one GPU type.
    """

    name: str
    tuning: Tuning

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return ``job.index`` -> allocation; a job that is not in it gets no GPUs.

        ``jobs`` are those submitted and not finished, in the workload's order; ``job.allocation`` is the current allocation. A
        job whose allocation changes is restarted.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Number of GPUs in use and of jobs in the system from ``time_s`` on; ``up``: GPUs of nodes that are up (-1: all)."""

    time_s: float
    gpus: int
    jobs: int
    up: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResult:
    """The records of the jobs, in the workload's order, and the use of the cluster."""

    policy: str
    jobs: tuple[JobTally, ...]
    usage: tuple[Usage, ...]
    total_gpus: int
    rounds: int
    wall_seconds: float
    policy_seconds: float
    """CPU seconds within the policy."""
    node_failures: int = 0
    available_gpu_seconds: Mapping[str, float] = field(default_factory=dict)
    """GPU type -> GPU seconds of the nodes that were up, from the first submission to the last finish."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How to replay; times in seconds.

    ``interference``: share of its speed that a job loses which spans nodes and shares one with another such job. For
    ``whole_seconds`` and ``react`` see the module. ``failures`` None: no node fails, and jobs save no checkpoints. Raises
    InputError for a value out of range.
    """

    interval_s: float = 60.0
    restart_delay_s: float = 30.0
    interference: float = 0.0
    whole_seconds: bool = False
    react: bool = False
    failures: NodeFailures | None = None

    def __post_init__(self) -> None:
        """Raise InputError for an interval, a delay or a share that is out of range."""
        least, most = _INTERVAL_S
        if not least <= self.interval_s <= most:
            raise InputError("interval", f"is {self.interval_s}", f"from {least:.0f} to {most:.0f} seconds (a week)")
        if not 0 <= self.restart_delay_s <= _LONGEST_DELAY_S:
            problem = f"is {self.restart_delay_s}"
            raise InputError("restart delay", problem, f"from 0 to {_LONGEST_DELAY_S:.0f} seconds (a day)")
        if not 0 <= self.interference < 1:
            raise InputError("interference", f"is {self.interference}", "a share of the speed, at least 0 and below 1")


def simulate(
    workload: Sequence[JobSpec],
    applications: dict[str, Application],
    cluster: ClusterSpec,
    policy: SchedulingPolicy,
    options: Options | None = None,
    *,
    on_round: Callable[[int, float], None] | None = None,
) -> SimulationResult:
    """Return the simulation of ``workload`` (n jobs) under ``policy``.

    ``applications``: by name. ``on_round(finished jobs, now_s)`` is called in each round. Raises InputError for jobs that can
    never run, CheckFailed when the policy allocates a GPU twice, Infeasible when it lets jobs starve, when for a week no
    training lasts, and after a hundred simulated years. O((n + rounds + epochs) log n), and the policy's own time.
    """
    begin = time.perf_counter()
    options = options or Options()
    _check_types(policy, cluster)
    jobs = make_jobs(workload, applications, policy.tuning, cluster, pooled=getattr(policy, "pools", False))
    if options.failures is not None:
        _check_failures(options.failures, workload, cluster)
    run = _Run(jobs, cluster, policy, options, on_round)
    run.play()
    return SimulationResult(
        policy=policy.name,
        jobs=tuple(job.tally for job in run.jobs),
        usage=tuple(run.usage),
        total_gpus=cluster.total_gpus,
        rounds=run.rounds,
        wall_seconds=time.perf_counter() - begin,
        policy_seconds=run.policy_seconds,
        node_failures=run.nodes.failed if run.nodes else 0,
        available_gpu_seconds=run.available,
    )


def check_runs(
    workload: Sequence[JobSpec], applications: dict[str, Application], cluster: ClusterSpec, policy: SchedulingPolicy
) -> None:
    """Raise InputError, before anything is replayed, for a workload or a cluster that this policy cannot run."""
    _check_types(policy, cluster)
    make_jobs(workload, applications, policy.tuning, cluster)
    for name in dict.fromkeys(job.application for job in workload):
        bound_s = applications[name].run_time_bound_s(cluster.type_names)
        if bound_s > _LONGEST_JOB_S:
            problem = f"takes {bound_s / YEAR_S:,.1f} years or more on any GPUs"
            raise InputError(f"application {name}", problem, "a year at most; check step times and iterations")


def _check_types(policy: SchedulingPolicy, cluster: ClusterSpec) -> None:
    """Raise InputError for a policy that supports one GPU type, on a cluster of several."""
    if not getattr(policy, "mixed", True) and len(cluster.type_names) > 1:
        problem = f"knows one GPU type, and the cluster has {', '.join(cluster.type_names)}"
        remedy = "use a cluster of one type, or a policy that knows several, such as sia"
        raise InputError(f"policy {policy.name}", problem, remedy)


def _check_failures(failures: NodeFailures, workload: Sequence[JobSpec], cluster: ClusterSpec) -> None:
    """Raise InputError for too many expected failures before the last submission."""
    node_s = len(cluster.gpus) * max((job.submit_s for job in workload), default=0.0)
    if node_s / (failures.mtbf_s + failures.repair_s) > _MOST_FAILURES:
        problem = f"is {failures.mtbf_s:g} s: more than {_MOST_FAILURES:.0e} failures until the last job comes"
        raise InputError("mtbf", problem, "a longer time, or jobs that come sooner")


class _Run:
    """One replay: the event queue and what happens at each event."""

    def __init__(
        self,
        jobs: list[SimulatedJob],
        cluster: ClusterSpec,
        policy: SchedulingPolicy,
        options: Options,
        on_round: Callable[[int, float], None] | None = None,
    ) -> None:
        """Queue the jobs in the reverse order of submission, so that pop() takes the next one; all nodes are up."""
        self.jobs = jobs
        self.cluster = cluster
        self.policy = policy
        self.options = options
        self.on_round = on_round
        self.waiting = sorted(jobs, key=lambda job: (job.spec.submit_s, job.index))[::-1]
        """Jobs that are not submitted yet, the next one last."""
        self.active: dict[int, SimulatedJob] = {}
        """Job's index -> job, for those that are submitted and not finished."""
        self.epoch_ends: list[tuple[float, int]] = []
        """Heap of (second, job's index); outdated ends are dropped when they come up."""

        self.usage: list[Usage] = []
        self.rounds = 0
        self.policy_seconds = 0.0
        """CPU seconds within the policy."""
        self.up = cluster
        """The cluster as the policy sees it: with the nodes that are up."""
        self.nodes = NodeStates(options.failures, cluster) if options.failures is not None else None
        """Which nodes are up; None: none can fail."""
        for job in jobs:
            job.failures = options.failures
        self.available = dict.fromkeys(cluster.type_names, 0.0)
        """GPU type -> GPU seconds of nodes that were up, from the first submission to ``counted_s``."""
        self.counted_s = self.waiting[-1].spec.submit_s if self.waiting else 0.0
        self.watchdog = Watchdog(policy.name, self.nodes, self.counted_s)

    def play(self) -> None:
        """Process event after event (a round, the end of an epoch, a change of nodes) until every job is finished.

        With ``react`` there is also a round at each arrival, finished job and change of nodes.
        """
        last_s = 0.0
        while self.active or self.waiting:
            now_s = self._next_round(last_s)
            if self.options.react and self.waiting:
                now_s = min(now_s, max(self.waiting[-1].spec.submit_s, last_s))
            end_s = self._next_epoch_end()
            # A change of nodes comes first: before the next round and the next end of an epoch.
            if self.nodes is not None and self.nodes.next_s() <= now_s and self.nodes.next_s() < end_s:
                now_s = self.nodes.next_s()
                self._change_nodes(now_s)
                if not (self.options.react and self.active):
                    continue
                self._admit(now_s)
                self._round(now_s)
                last_s = now_s
                continue
            # An epoch that ends at the time of a round ends before it, unless its end was rounded down to that time.
            if end_s < now_s or (end_s == now_s and self.jobs[self.epoch_ends[0][1]].exact_next_s <= now_s):
                finished = self._end_epoch(end_s)
                # all epochs that end at this time end before the round
                while self._next_epoch_end() == end_s:
                    finished |= self._end_epoch(end_s)
                # there is a round now only if a job has ended
                if not (finished and self.options.react and self.active):
                    continue
                now_s = end_s
            if self.nodes is not None and self.nodes.next_s() <= now_s:
                self._change_nodes(now_s)
            self._admit(now_s)
            self._round(now_s)
            last_s = now_s
        self._count_available(max((job.tally.finish_s for job in self.jobs), default=0.0))

    def _change_nodes(self, now_s: float) -> None:
        """Apply the node events of ``now_s``: jobs on nodes that failed or left lose all their GPUs until the next round.

        A failure undoes the training since the last checkpoint; before a node leaves, its jobs save one.
        """
        assert self.nodes is not None
        self._count_available(now_s)
        while self.nodes.next_s() == now_s:
            failed, departed = self.nodes.pop()
            for job in self.active.values():
                held = {node for node, _ in job.allocation}
                # A job that loses one GPU stops on all of them, because its replicas train together.
                if held.intersection(failed):
                    job.fail(now_s)
                elif held.intersection(departed):
                    job.advance(now_s)
                    job.reallocate((), now_s, 0.0)
        self._update_nodes_up()
        if self.options.interference:
            self._set_slowdowns(now_s)
        self._note_usage(now_s)

    def _update_nodes_up(self) -> None:
        """Set ``up``, and every job's ``gpu_types``, to the nodes that are up now."""
        assert self.nodes is not None
        self.up = without(self.cluster, self.nodes.down)
        types = self.up.type_names
        for job in self.jobs:
            job.gpu_types = tuple(name for name in job.measured_types if name in types)

    def _count_available(self, now_s: float) -> None:
        """Add the GPU seconds from ``counted_s`` to ``now_s`` of the nodes that were up in between."""
        if now_s > self.counted_s:
            for name in self.up.type_names:
                self.available[name] += self.up.gpus_of(name) * (now_s - self.counted_s)
            self.counted_s = now_s

    def _next_round(self, last_s: float) -> float:
        """Return the second of the next round: the first multiple of the interval after ``last_s`` with a submitted job.

        ``last_s``: the second of the last round. It is never 0.
        """
        interval = self.options.interval_s
        rounding = 1e-9  # a computed multiple may have a rounding error
        after_last = math.floor(last_s / interval + rounding) + 1  # as a number of intervals
        if self.active:
            return after_last * interval
        first_submit_s = self.waiting[-1].spec.submit_s
        return max(math.ceil(first_submit_s / interval - rounding), after_last) * interval

    def _next_epoch_end(self) -> float:
        """Return the second at which the next epoch ends; inf if none will.

        Ends that a job left in the queue when it was re-tuned or moved are dropped here.
        """
        while self.epoch_ends:
            end_s, index = self.epoch_ends[0]
            if self.jobs[index].next_s == end_s:
                return end_s
            heapq.heappop(self.epoch_ends)
        return math.inf

    def _end_epoch(self, now_s: float) -> bool:
        """Process the first end of an epoch in the queue, and return whether its job finished; if not, it re-tunes."""
        _, index = heapq.heappop(self.epoch_ends)
        job = self.jobs[index]
        if job.end_epoch(now_s):
            del self.active[index]
            self.watchdog.finished(now_s)
            self._note_usage(now_s)
            if self.options.interference and not self.options.whole_seconds:
                self._set_slowdowns(now_s)
            return True
        self._retune(job, now_s)
        return False

    def _admit(self, now_s: float) -> None:
        """Make the jobs submitted by ``now_s`` active, and let them profile (:meth:`SimulatedJob.profile`)."""
        while self.waiting and self.waiting[-1].spec.submit_s <= now_s:
            job = self.waiting.pop()
            job.last_s = now_s
            job.profile()
            self.active[job.index] = job

    def _retune(self, job: SimulatedJob, now_s: float) -> None:
        """Let a job choose its batch, and queue the end of its epoch if that has changed."""
        before = job.next_s
        job.retune(now_s, self.options.whole_seconds)
        if job.next_s != before:
            heapq.heappush(self.epoch_ends, (job.next_s, job.index))

    def _round(self, now_s: float) -> None:
        """Bring the jobs up to ``now_s``, let the policy allocate, and restart the jobs whose allocation changed."""
        jobs = sorted(self.active.values(), key=lambda job: job.index)
        for job in jobs:
            job.advance(now_s)
            self._retune(job, now_s)
        begin_s = time.process_time()
        # A job none of whose GPU types is up is hidden from the policy, which could give it nothing.
        runnable = jobs if self.nodes is None else [job for job in jobs if job.gpu_types]
        allocations = self.policy.allocate(runnable, self.up, now_s) if runnable else {}
        self.policy_seconds += time.process_time() - begin_s
        # Raises CheckFailed where the policy allocated a GPU twice.
        free_gpus(self.up, allocations.values())
        for job in jobs:
            allocation = allocations.get(job.index, ())
            if allocation != job.allocation:
                job.reallocate(allocation, now_s, self.options.restart_delay_s)
                if allocation and self.policy.tuning is not Tuning.LOGICAL:
                    # Raises CheckFailed where the policy mixed types, which only logical workers may.
                    self.cluster.type_of(allocation)
                self._retune(job, now_s)
        if self.options.interference:
            self._set_slowdowns(now_s)
        self.rounds += 1
        self._note_usage(now_s)
        self.watchdog.look(jobs, self.up, now_s, awaiting_jobs=bool(self.waiting))
        if self.on_round is not None:
            self.on_round(len(self.jobs) - len(self.waiting) - len(self.active), now_s)

    def _set_slowdowns(self, now_s: float) -> None:
        """Slow down, from ``now_s`` on, exactly the jobs that span nodes and share one with another such job."""
        slowed = interfering({index: job.allocation for index, job in self.active.items()})
        for index, job in self.active.items():
            slowdown = self.options.interference if index in slowed else 0.0
            if slowdown != job.slowdown:
                job.advance(now_s)
                job.slowdown = slowdown
                self._retune(job, now_s)

    def _note_usage(self, now_s: float) -> None:
        """Record GPUs in use, active jobs and GPUs that are up, if one of these has changed."""
        gpus = sum(count_gpus(job.allocation) for job in self.active.values())
        state = Usage(time_s=now_s, gpus=gpus, jobs=len(self.active), up=self.up.total_gpus)
        last = self.usage[-1] if self.usage else None
        if last is None or (last.gpus, last.jobs, last.up) != (state.gpus, state.jobs, state.up):
            self.usage.append(state)


class Watchdog:
    """Checks in every round of a replay that it will end, and raises Infeasible if not."""

    def __init__(self, policy: str, nodes: NodeStates | None, first_submit_s: float) -> None:
        """Begin at ``first_submit_s``, the second of the first submission, from which the replay's length counts.

        ``policy``: its name, for messages; ``nodes``: which are up; None where none can fail.
        """
        self.policy, self.nodes, self.first_submit_s = policy, nodes, first_submit_s
        self.rounds = 0
        self.idle_rounds = 0
        """Rounds in a row in which nothing ran or was about to."""
        self.furthest: dict[int, float] = {}
        """Job's index -> the most progress that it has had."""
        self.last_gain = 0, 0.0
        """Round and time at which some job last exceeded its most progress."""

    def finished(self, now_s: float) -> None:
        """Count a finished job as progress, because :meth:`look` never sees jobs that are shorter than a round."""
        self.last_gain = self.rounds, now_s

    def look(self, jobs: Sequence[SimulatedJob], up: ClusterSpec, now_s: float, *, awaiting_jobs: bool) -> None:
        """Check the active ``jobs`` of a round; ``awaiting_jobs``: whether others will be submitted later.

        ``up``: the nodes that are up. Raises Infeasible where the policy starves its jobs, where none has made progress for too
        long, or the replay has lasted too long.
        """
        self.rounds += 1
        # Something runs, or may run later: a job will be submitted, or a node will come back.
        node_returns = self.nodes is not None and self.nodes.returns
        is_moving = awaiting_jobs or node_returns or any(job.allocation for job in jobs)
        self.idle_rounds = 0 if is_moving else self.idle_rounds + 1
        for job in jobs:
            if job.progress > self.furthest.get(job.index, 0.0):
                self.furthest[job.index] = job.progress
                self.last_gain = self.rounds, now_s
        gained_round, gained_s = self.last_gain
        stalled_s = now_s - gained_s
        jobs_text = f"{len(jobs)} jobs"
        problem = ""
        if self.idle_rounds > _MOST_IDLE_ROUNDS:
            problem = f"policy {self.policy} gives no GPUs to {jobs_text} ({_first_names(jobs)}) any more"
        elif self.rounds - gained_round > _MOST_FUTILE_ROUNDS and stalled_s > _MOST_FUTILE_S:
            reason = "restarts leave no time to train; shorten the restart delay or lengthen the interval"
            if self.nodes is not None:
                reason = "failures undo what is trained, or too few nodes are up; shorten the checkpoint interval or fail less"
            problem = f"under policy {self.policy} no job has come further for {stalled_s:.0f} s: {reason}"
        elif now_s - self.first_submit_s > _LONGEST_S:
            years = f"after {_LONGEST_S / YEAR_S:.0f} simulated years under policy {self.policy}"
            problem = (
                f"{years} {jobs_text} are not done ({_first_names(jobs)}): check the units of times and batch sizes"
            )
        if problem:
            raise Infeasible(f"{self._cause(jobs, up)}{problem}")

    def _cause(self, jobs: Sequence[SimulatedJob], up: ClusterSpec) -> str:
        """Return the beginning of the message: the nodes that never come back, and a job that needs them; "" for none.

        ``up``: the nodes that are up.
        """
        gone = sorted(self.nodes.gone) if self.nodes is not None else []
        if not gone:
            return ""
        by_submission = sorted(jobs, key=lambda job: (job.spec.submit_s, job.index))
        # the first submitted job for which no type has enough GPUs any more, else the first one of all
        stuck = by_submission[0]
        wanted_gpus = 0
        for job in by_submission:
            largest_type = max((up.gpus_of(name) for name in job.gpu_types), default=0)
            if job.tuning is Tuning.RIGID and job.spec.num_replicas > largest_type:
                stuck = job
                wanted_gpus = job.spec.num_replicas
                break
        need_clause = f" and it wants {wanted_gpus} of the {up.total_gpus} GPUs that are left" if wanted_gpus else ""
        nodes = listed(list(map(str, gone)), _NAMED_NODES)
        noun, verb = ("node", "does") if len(gone) == 1 else ("nodes", "do")
        return f"job {stuck.spec.name} cannot run: {noun} {nodes} {verb} not come back{need_clause}; "


def _first_names(jobs: Sequence[SimulatedJob]) -> str:
    """Return the names of the first three jobs, and the number of the others if there are any, for a message."""
    return listed([job.spec.name for job in jobs], _NAMED_JOBS)
