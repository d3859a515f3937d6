"""Records of results of cluster simulations: replays, sweeps, advice on one job, autoscaling, searches, workloads."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ddltool.quantities import AtLeastOne, Change, Count, NonNegative, Number, Positive, Seconds
from ddltool.results import Part, Result


class Fairness(Part):
    """Finish-time fairness (completion time over that with an equal share of one's own): the worst, and the share below 1."""

    max: NonNegative
    share_below_1: NonNegative


class ReplayedJob(Part):
    """One job under one policy; times in seconds. Losses by failures and cost are there only if they were simulated."""

    name: str
    application: str
    submit_s: Seconds
    start_s: Seconds
    finish_s: Seconds
    jct_s: Seconds
    """Completion time: from submission to finish."""
    restarts: Count
    gpu_seconds: NonNegative
    finish_time_fairness: NonNegative | None = None
    failures: Count = 0
    lost_gpu_seconds: NonNegative = 0.0
    """GPU time of the training that failures undid."""
    cost: NonNegative | None = None


class UsageRecord(Part):
    """Number of GPUs held and of jobs present from each time (seconds) on."""

    time_s: list[Seconds]
    gpus: list[Count]
    jobs: list[Count] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        """Refuse lists that do not have one entry for each time; ``jobs`` may be empty."""
        for name, column in (("gpus", self.gpus), ("jobs", self.jobs or self.gpus)):
            if len(column) != len(self.time_s):
                raise ValueError(f"{name} has {len(column)} entries and time_s {len(self.time_s)}; give one per time")
        return self


class ClassFigures(Part):
    """Figures of the jobs of one size class; times in seconds."""

    jobs: Count
    avg_jct_s: Seconds
    median_jct_s: Seconds
    p99_jct_s: Seconds
    avg_queueing_s: Seconds
    restarts: Count
    worst_fairness: NonNegative
    gpu_hours: NonNegative


class ReplayCost(Part):
    """Price of the GPU time that jobs held, and of all GPUs that were up between first submission and last finish."""

    jobs: NonNegative
    cluster: NonNegative


class PolicyRecord(Part):
    """Figures of one policy; times in seconds unless said otherwise. None: older files do not have it."""

    avg_jct_s: Seconds
    median_jct_s: Seconds
    p99_jct_s: Seconds
    makespan_s: Seconds
    """From the first submission to the last finish."""
    utilization: NonNegative
    """Share of all GPU-seconds of the makespan that jobs held, restarts included."""
    restarts: Count
    finish_time_fairness: Fairness
    avg_queueing_s: Seconds | None = None
    """From submission to first start."""
    p99_queueing_s: Seconds | None = None
    avg_jct_by_application_s: dict[str, NonNegative] = Field(default_factory=dict)
    gpu_hours: NonNegative | None = None
    """GPU time held by jobs."""
    restart_gpu_hours: NonNegative | None = None
    """The part of it that starts and restarts took."""
    lost_gpu_hours: NonNegative | None = None
    """The part of it whose training failures undid."""
    useful_share: NonNegative | None = None
    """Share of the GPU time of all nodes that were up in which training was done that lasted."""
    availability: NonNegative | None = None
    """Share of the whole cluster's GPU time that was up."""
    node_failures: Count = 0
    job_failures: Count = 0
    goodput_by_application: dict[str, NonNegative] = Field(default_factory=dict)
    """Samples at M0 that the training was worth per second from first start to finish, the mean."""
    by_class: dict[str, ClassFigures] = Field(default_factory=dict)
    """By size class (Pollux, section 5.1); those that have jobs."""
    cost: ReplayCost | None = None
    rounds: Count | None = None
    wall_seconds: Seconds | None = None
    policy_cpu_seconds: Seconds | None = None
    usage: UsageRecord | None = None
    jobs: Annotated[list[ReplayedJob], Field(min_length=1)]


class ReplayFailures(Part):
    """The failures of a replay; ``events``: the number of given ones."""

    mtbf_s: Seconds | None
    repair_s: Seconds
    checkpoint_interval_s: Seconds | None
    """Training between checkpoints; null: what loses least on a job's nodes."""
    checkpoint_s: Seconds = 0.0
    """For which training stops for one."""
    events: Count
    seed: Count


class SimulationDocument(Result):
    """The result of ``ddltool simulate``."""

    kind: Literal["ddltool.simulation"] = "ddltool.simulation"
    workload: str
    jobs: Count | None = None
    gpus: Count
    interval_s: Seconds | None = None
    restart_delay_s: Seconds | None = None
    interference: NonNegative = 0.0
    seed: Count = 0
    failures: ReplayFailures | None = None
    prices_per_gpu_hour: dict[str, NonNegative] | None = None
    truth: str = "measured traces"
    """Where step times and progress are from."""
    assumptions: list[str] = Field(default_factory=list)
    conversion: str = ""
    """How a cluster's trace became a workload."""
    policies: Annotated[dict[str, PolicyRecord], Field(min_length=1)]


class SweepFigures(Part):
    """Figures of one replay, or their means over several; for the compared measures less is better.

    ``worst_fairness`` and ``fair_share``: the two of :class:`Fairness`.
    """

    jobs: NonNegative
    avg_jct_s: Seconds
    median_jct_s: Seconds
    p99_jct_s: Seconds
    makespan_s: Seconds
    avg_queueing_s: Seconds
    utilization: NonNegative
    worst_fairness: NonNegative
    fair_share: NonNegative
    restarts: NonNegative
    gpu_seconds: NonNegative
    cost: NonNegative | None = None


class SweepCell(Part):
    """One replay of a workload under a policy with a seed: its figures, or the line of its error."""

    workload: str
    policy: str
    seed: Count
    figures: SweepFigures | None
    cpu_s: Seconds | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        """(workload, policy, seed), which identifies a cell of a sweep."""
        return self.workload, self.policy, self.seed

    def __str__(self) -> str:
        """Return the cell's name, such as "day-1 under sia, seed 2"."""
        return f"{self.workload} under {self.policy}, seed {self.seed}"


class ComparedMeasure(Part):
    """The ratio of one measure under the first policy to that under the second; below 1 the first is better."""

    measure: str
    ratio: Positive
    """Geometric mean of the ratios."""
    low: NonNegative | None
    """Confidence interval of the ratio; None with fewer than two pairs, or pairs that are all the same."""
    high: NonNegative | None
    better: Count
    """Units (workloads, or seeds) on which the first is better."""
    units: Count
    decided: bool
    """Whether the interval excludes 1, so that one policy is better beyond chance."""


class PolicyComparison(Result):
    """Paired comparison of two policies, by ``ddltool simulate sweep --compare``; ``unit``: what a pair is."""

    kind: Literal["ddltool.comparison"] = "ddltool.comparison"
    first: str
    second: str
    unit: Literal["workload", "seed"]
    confidence: Number
    comparisons: Annotated[list[ComparedMeasure], Field(min_length=1)]


class SweepDocument(Result):
    """The result of ``ddltool simulate sweep``."""

    kind: Literal["ddltool.sweep"] = "ddltool.sweep"
    settings: dict[str, Any] = Field(default_factory=dict)
    """What the figures depend on; files by their hash."""
    cells_wanted: Count
    cells_failed: Count
    cells: Annotated[list[SweepCell], Field(min_length=1)]
    comparison: PolicyComparison | None = None

    @model_validator(mode="after")
    def _check_distinct_cells(self) -> Self:
        """Refuse two cells with the same workload, policy and seed."""
        seen: set[tuple[str, str, int]] = set()
        for cell in self.cells:
            if cell.key in seen:
                where = f"{cell.policy} on {cell.workload} with seed {cell.seed}"
                raise ValueError(f"cells give {where} twice; keep one of the two")
            seen.add(cell.key)
        return self

    def means_by_policy(self) -> list[tuple[str, str, int, SweepFigures]]:
        """Return (workload, policy, number of replays, their means) for each workload and policy, grouped by workload.

        Failed replays are left out, and pairs all of whose replays failed. A figure that one replay lacks is None.
        """
        groups: dict[tuple[str, str], list[SweepFigures]] = {}
        for cell in self.cells:
            groups.setdefault((cell.workload, cell.policy), [])
            if cell.figures is not None:
                groups[cell.workload, cell.policy].append(cell.figures)
        # Workloads in the order of their first cells.
        position_by_workload = {
            workload: position for position, workload in enumerate(dict.fromkeys(workload for workload, _ in groups))
        }
        ordered = sorted(groups.items(), key=lambda item: position_by_workload[item[0][0]])
        return [(workload, policy, len(values), _mean(values)) for (workload, policy), values in ordered if values]


def _mean(values: list[SweepFigures]) -> SweepFigures:
    """Return the mean of each figure over the replays; None for a figure that a replay lacks."""
    means: dict[str, float | None] = {}
    for name in SweepFigures.model_fields:
        numbers = [getattr(record, name) for record in values]
        # Divided before they are added, and limited: the sum of large numbers could be infinite.
        means[name] = (
            None if None in numbers else min(sum(value / len(numbers) for value in numbers), sys.float_info.max)
        )
    return SweepFigures.model_validate(means)


class JobNow(Part):
    """A job on what it holds now, at its best batch; ``gpus`` per node."""

    gpus: list[Count]
    replicas: Count
    batch_size: Count
    goodput_per_s: NonNegative
    remaining_s: Seconds
    remaining_factor: NonNegative


class ResizeSaving(Part):
    """The seconds that changing to another allocation saves; negative: it loses time."""

    gain: NonNegative
    """Goodput then over goodput now."""
    restart_s: Seconds
    """The mean of the measured restarts."""
    break_even_s: Seconds | None
    """Time left, on the present allocation, from which it pays; None: it never does."""
    saved_s: Change
    """With every guess at its median."""
    expected_saved_s: Change
    saved_p10_s: Change
    saved_p90_s: Change
    probability: NonNegative
    """That it saves any time."""


class ResizeOption(ResizeSaving):
    """Another allocation, and the seconds that changing to it saves."""

    gpus_by_node: dict[str, Count]
    replicas: Count
    nodes: Count
    batch_size: Count
    goodput_per_s: NonNegative
    extra_gpu_seconds: Number
    """GPU time held more than without the resize."""


class AdviceResult(Result):
    """The result of ``ddltool simulate advise``."""

    kind: Literal["ddltool.advice"] = "ddltool.advice"
    job: str
    now: JobNow
    gain_factor: NonNegative
    """By which the ratio of two goodputs may be off."""
    resize: bool
    best: ResizeOption | None
    options: list[ResizeOption]


class ScaledEpoch(Part):
    """One epoch: its begin (of the restart before it, if any), its nodes, and its statistical efficiency."""

    begin_s: Seconds
    seconds: Seconds
    nodes: Count
    batch_size: Count
    efficiency: NonNegative


class ScaledTraining(Part):
    """A whole training on rented nodes; ``cost``: nodes held times their price."""

    seconds: Seconds
    node_seconds: Seconds
    cost: NonNegative
    efficiency: NonNegative
    """Progress over what the same samples at M0 would have made."""
    restarts: Count
    first_nodes: Count
    last_nodes: Count
    epochs: Annotated[list[ScaledEpoch], Field(min_length=1)]


class AutoscalingResult(Result):
    """The result of ``ddltool simulate autoscale``."""

    kind: Literal["ddltool.autoscaling"] = "ddltool.autoscaling"
    application: str
    gpus_per_node: Count
    most_nodes: Count
    price_per_h: NonNegative
    upper: NonNegative
    lower: NonNegative
    restart_delay_s: Seconds
    rules: dict[str, ScaledTraining]


class TrialSearch(Part):
    """The setting of a hyper-parameter search; the baseline gives each trial ``gpus`` and a fixed batch."""

    application: str = "cifar10"
    trials: Annotated[int, Field(ge=1, le=10_000)] = 100
    concurrent: Annotated[int, Field(ge=1, le=10_000)] = 4
    gpus: Annotated[int, Field(ge=1, le=10_000)] = 4
    local_batch_size: Annotated[int, Field(ge=1, le=10_000)] = 128


class SearchFigures(Part):
    """Figures of all trials under one policy; a trial's completion time counts from its proposal by the search."""

    avg_jct_s: Seconds
    makespan_s: Seconds
    gpu_seconds: NonNegative
    restarts: Count


class SearchResult(Result):
    """The result of ``ddltool simulate trials``."""

    kind: Literal["ddltool.hyperparameter_search"] = "ddltool.hyperparameter_search"
    search: TrialSearch
    gpus: Count
    policies: dict[str, SearchFigures]


class JobSpec(Part):
    """One row of a workload: ``submit_s`` in seconds, ``batch_size`` in samples over all replicas."""

    name: str
    submit_s: Seconds
    application: str
    num_replicas: AtLeastOne
    batch_size: AtLeastOne


class WorkloadResult(Result):
    """The result of ``ddltool workload``; ``source`` says what the jobs are drawn from."""

    kind: Literal["ddltool.workload"] = "ddltool.workload"
    source: str
    jobs: list[JobSpec]
