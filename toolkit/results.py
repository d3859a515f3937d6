"""What commands find, as records: one model of each result, which ``--json``, tables, the report, gate and ``schema`` read.

Units stand in the names of the fields. Fields that older files lack have a default; unknown ones are ignored, so that the
files of a newer ddltool can still be shown.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ddltool.artifacts import Artifact
from ddltool.calibration import Residuals
from ddltool.plan import Plan

Number = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
_LARGEST = sys.float_info.max


class Part(BaseModel):
    """A part of a result. What nobody has set is not written: some figures belong to some results alone."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, populate_by_name=True)

    @model_serializer(mode="wrap")
    def _as_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        said = {*self.model_fields_set, "kind", "schema_version"}
        made = {name.removesuffix("_"): value for name, value in handler(self).items() if name in said}
        return {"kind": made["kind"], **made} if "schema_version" in made else made


class Result(Part, Artifact):
    """What one command found."""

    model_config = ConfigDict(extra="ignore")


class NetworkPair(Part):
    """Two processes, one-way times of their messages, and the line that fits the shortest."""

    ranks: Annotated[list[Count], Field(min_length=2, max_length=2)]
    bandwidth_bytes_per_s: NonNegative
    latency_s: NonNegative
    residual: NonNegative = Field(description="root mean square of (measured - line) / line")
    sizes_bytes: list[NonNegative]
    shortest_s: list[NonNegative] = Field(default_factory=list)
    median_s: list[NonNegative]
    spread_s: list[NonNegative] = Field(default_factory=list, description="interquartile range by size")


class NetworkResult(Result):
    """``ddltool profile --network``. The worst of all pairs, which is what collectives wait for."""

    kind: Literal["ddltool.network"] = "ddltool.network"
    processes: Count
    local: bool = Field(description="the processes were started here: a machine's loopback and no network")
    bandwidth_bytes_per_s: NonNegative
    latency_s: NonNegative
    residual: NonNegative
    pairs: Annotated[list[NetworkPair], Field(min_length=1)]


class BarrierFigures(Part):
    """One choice of the next barrier."""

    waiting_time_s: NonNegative = Field(description="longest waiting of a worker")
    barrier_s: Number
    total_waiting_s: NonNegative
    waiting_per_iteration_s: NonNegative
    iteration_gap: Count


class BarrierChoice(BarrierFigures):
    """A barrier with each worker's iterations, and the CPU seconds that choosing it took."""

    iterations: dict[str, Count]
    compute_seconds: NonNegative | None = None


class TradeoffFigures(Part):
    """The least waiting under one bound on the iteration gap."""

    max_gap: Count
    waiting: BarrierFigures
    total: BarrierFigures
    per_iteration: BarrierFigures


class BarrierResult(Result):
    """``ddltool barrier``."""

    kind: Literal["ddltool.barrier"] = "ddltool.barrier"
    workers: Count
    lookahead: Count
    predictor: str | None = None
    algorithms: dict[str, BarrierChoice]
    bsp: BarrierChoice
    max_gap: Count | None = None
    objectives: dict[str, BarrierChoice]
    tradeoff: list[TradeoffFigures]


class SplitTime(Part):
    """Iteration time of a way to size batches."""

    iteration_s: NonNegative
    iteration_time_ratio: NonNegative


class PredictorFigures(SplitTime):
    """How well speeds were foretold, and what batches sized by that gave."""

    rmse: NonNegative
    rmse_relative: NonNegative
    gain_kept: Number | None


class SchemeFigures(SplitTime):
    """A way to synchronise, on the whole trace."""

    staleness: NonNegative
    iteration_gap: Count
    wasted: NonNegative | None = None


class BalanceResult(Result):
    """``ddltool balance``."""

    kind: Literal["ddltool.balance"] = "ddltool.balance"
    workers: Count
    iterations: Count
    warm_up: Count
    total_batch: Count
    seed: Count | None = None
    predictors: dict[str, PredictorFigures]
    equal_split: SplitTime
    oracle: SplitTime
    schemes: dict[str, SchemeFigures | str] = Field(
        default_factory=dict, description="with --schemes: by name; predictor: LB-BSP's"
    )


class VerifiedTime(Part):
    """A part of the step, predicted and measured; null: the plan says nothing about it."""

    predicted_s: NonNegative | None
    measured_s: NonNegative


class VerifiedStep(VerifiedTime):
    """The whole step, with the quartiles of the measured ones; ``error``: predicted over measured, minus one."""

    predicted_s: NonNegative
    low_s: NonNegative
    high_s: NonNegative
    error: Number


class VerifiedRank(Part):
    """One process's computation: what the plan said and what it did."""

    rank: Count
    device: str = Field(description="what it ran on")
    planned_device: str = ""
    planned_batch: Count | None = None
    batch: Count
    predicted_s: NonNegative = Field(description="compute of the batch that it really had")
    measured_s: NonNegative
    error: Number
    spread: NonNegative | None = Field(default=None, description="half the interquartile range, relative")
    other_device: bool = Field(
        default=False, description="it ran on another device than planned, whose speed no model says"
    )


class Verification(Result):
    """``ddltool verify``: a run against its plan."""

    kind: Literal["ddltool.verification"] = "ddltool.verification"
    plan: str
    telemetry: str
    iteration: VerifiedStep
    compute: VerifiedTime = Field(description="of the rank that computes longest")
    sync: VerifiedTime
    other: VerifiedTime | None = Field(default=None, description="what is neither")
    ranks: list[VerifiedRank]
    missing_ranks: list[Count] = Field(default_factory=list, description="ranks of the plan without a row")
    known_error: NonNegative | None = Field(
        default=None, description="relative error that the plan or the models give for their compute times"
    )
    refit: list[str] = Field(description="what to measure or fit again, and why; empty when the plan was right")
    max_error: NonNegative | None = None
    passed: bool

    @property
    def complete(self) -> bool:
        """Whether the run can tell if the plan was right: all its processes, on the devices it names."""
        return not self.missing_ranks and not any(check.other_device for check in self.ranks)


class Fairness(Part):
    """Finish-time fairness over all jobs."""

    max: NonNegative
    share_below_1: NonNegative


class ReplayedJob(Part):
    """One job under one policy; seconds. What failures took is there where nodes could fail, a cost where GPUs have a price."""

    name: str
    application: str
    submit_s: NonNegative
    start_s: NonNegative
    finish_s: NonNegative
    jct_s: NonNegative
    """Completion time: from submission to finish."""
    restarts: Count
    gpu_seconds: NonNegative
    finish_time_fairness: NonNegative | None = None
    failures: Count = 0
    lost_gpu_seconds: NonNegative = 0.0
    """GPU time of the training that failures undid."""
    cost: NonNegative | None = None


class UsageRecord(Part):
    """GPUs that are held, and jobs that are there, from each time (seconds) on."""

    time_s: list[NonNegative]
    gpus: list[Count]
    jobs: list[Count] = []


class ClassFigures(Part):
    """The jobs of one size class; seconds unless said otherwise."""

    jobs: Count
    avg_jct_s: NonNegative
    median_jct_s: NonNegative
    p99_jct_s: NonNegative
    avg_queueing_s: NonNegative
    restarts: Count
    worst_fairness: NonNegative
    gpu_hours: NonNegative


class ReplayCost(Part):
    """Price of the GPU time that jobs held, and of all GPUs that were up from the first submission to the last finish."""

    jobs: NonNegative
    cluster: NonNegative


class PolicyRecord(Part):
    """One policy; seconds unless said otherwise. What older files lack is None."""

    avg_jct_s: NonNegative
    median_jct_s: NonNegative
    p99_jct_s: NonNegative
    makespan_s: NonNegative
    """From the first submission to the last finish."""
    utilization: NonNegative
    """Share of all GPU-seconds of the makespan that jobs held, restarts included."""
    restarts: Count
    finish_time_fairness: Fairness
    avg_queueing_s: NonNegative | None = None
    """From submission to first start."""
    p99_queueing_s: NonNegative | None = None
    avg_jct_by_application_s: dict[str, NonNegative] = {}
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
    goodput_by_application: dict[str, NonNegative] = {}
    """Samples at M0 that the training was worth per second from first start to finish, the mean."""
    by_class: dict[str, ClassFigures] = {}
    """By size class (Pollux, section 5.1); those that have jobs."""
    cost: ReplayCost | None = None
    rounds: Count | None = None
    wall_seconds: NonNegative | None = None
    policy_cpu_seconds: NonNegative | None = None
    usage: UsageRecord | None = None
    jobs: Annotated[list[ReplayedJob], Field(min_length=1)]


class ReplayFailures(Part):
    """What went wrong in a replay; ``events``: how many were given."""

    mtbf_s: NonNegative | None
    repair_s: NonNegative
    checkpoint_interval_s: NonNegative
    events: Count
    seed: Count


class SimulationDocument(Result):
    """``ddltool simulate``."""

    kind: Literal["ddltool.simulation"] = "ddltool.simulation"
    workload: str
    jobs: Count | None = None
    gpus: Count
    interval_s: NonNegative | None = None
    restart_delay_s: NonNegative | None = None
    interference: NonNegative = 0.0
    seed: Count = 0
    failures: ReplayFailures | None = None
    prices_per_gpu_hour: dict[str, NonNegative] | None = None
    truth: str = "measured traces"
    """Where step times and progress are from."""
    assumptions: list[str] = []
    conversion: str = ""
    """How a cluster's trace became a workload."""
    policies: Annotated[dict[str, PolicyRecord], Field(min_length=1)]


class SweepFigures(Part):
    """What one replay comes to, or the mean of several; less is better for the measures that are compared."""

    jobs: NonNegative
    avg_jct_s: NonNegative
    median_jct_s: NonNegative
    p99_jct_s: NonNegative
    makespan_s: NonNegative
    avg_queueing_s: NonNegative
    utilization: NonNegative
    worst_fairness: NonNegative
    fair_share: NonNegative
    restarts: NonNegative
    gpu_seconds: NonNegative
    cost: NonNegative | None = None


class SweepCell(Part):
    """One replay: a workload, a policy, a seed; its figures, or the one line that says why there are none."""

    workload: str
    policy: str
    seed: Count
    figures: SweepFigures | None
    cpu_s: NonNegative | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from the others."""
        return self.workload, self.policy, self.seed

    def __str__(self) -> str:
        """Return the cell as people name it."""
        return f"{self.workload} under {self.policy}, seed {self.seed}"


class ComparedMeasure(Part):
    """One measure of the first policy over the second's; below 1 the first is better."""

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
    """Whether the interval leaves equality out."""


class PolicyComparison(Result):
    """Two policies in pairs, which a sweep with ``--compare`` has at its end; ``unit`` is what was counted."""

    kind: Literal["ddltool.comparison"] = "ddltool.comparison"
    first: str
    second: str
    unit: Literal["workload", "seed"]
    confidence: Number
    comparisons: Annotated[list[ComparedMeasure], Field(min_length=1)]


class SweepDocument(Result):
    """``ddltool simulate --seeds``."""

    kind: Literal["ddltool.sweep"] = "ddltool.sweep"
    settings: dict[str, Any] = {}
    """What the figures depend on; files by their hash."""
    cells_wanted: Count
    cells_failed: Count
    cells: Annotated[list[SweepCell], Field(min_length=1)]
    comparison: PolicyComparison | None = None

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        seen: set[tuple[str, str, int]] = set()
        for cell in self.cells:
            if cell.key in seen:
                where = f"{cell.policy} on {cell.workload} with seed {cell.seed}"
                raise ValueError(f"cells give {where} twice; keep one of the two")
            seen.add(cell.key)
        return self

    def means_by_policy(self) -> list[tuple[str, str, int, SweepFigures]]:
        """Return (workload, policy, number of seeds, means over these) in the order of the document, without failed replays.

        A cost is there where every replay of the group has one.
        """
        groups: dict[tuple[str, str], list[SweepFigures]] = {}
        for cell in self.cells:
            groups.setdefault((cell.workload, cell.policy), [])
            if cell.figures is not None:
                groups[cell.workload, cell.policy].append(cell.figures)
        # Workload by workload, as they come first.
        places = {workload: place for place, workload in enumerate(dict.fromkeys(workload for workload, _ in groups))}
        ordered = sorted(groups.items(), key=lambda item: places[item[0][0]])
        return [(workload, policy, len(values), _mean(values)) for (workload, policy), values in ordered if values]


def _mean(values: list[SweepFigures]) -> SweepFigures:
    made: dict[str, float | None] = {}
    for name in SweepFigures.model_fields:
        each = [getattr(one, name) for one in values]
        # Divided first: a sum of large numbers may be none.
        made[name] = None if None in each else min(sum(value / len(each) for value in each), _LARGEST)
    return SweepFigures.model_validate(made)


class JobNow(Part):
    """A job as it runs, at its best batch; ``gpus`` per node."""

    gpus: list[Count]
    replicas: Count
    batch_size: Count
    goodput_per_s: NonNegative
    remaining_s: NonNegative
    remaining_factor: NonNegative


class ResizeOption(Part):
    """Another allocation and what changing to it saves; seconds, negative where it loses time."""

    gpus_by_node: dict[str, Count]
    replicas: Count
    nodes: Count
    batch_size: Count
    goodput_per_s: NonNegative
    gain: NonNegative
    """Goodput then over goodput now."""
    restart_s: NonNegative
    """The mean of the measured restarts."""
    break_even_s: NonNegative | None
    """Time left, on the present allocation, from which it pays; None: it never does."""
    saved_s: Number
    """With every guess at its median."""
    expected_saved_s: Number
    saved_p10_s: Number
    saved_p90_s: Number
    probability: NonNegative
    """That it saves any time."""
    extra_gpu_seconds: Number
    """GPU time held more than without the resize."""


class AdviceResult(Result):
    """``ddltool simulate --advise``."""

    kind: Literal["ddltool.advice"] = "ddltool.advice"
    job: str
    now: JobNow
    gain_factor: NonNegative
    """By which the ratio of two goodputs may be off."""
    resize: bool
    best: ResizeOption | None
    options: list[ResizeOption]


class ScaledEpoch(Part):
    """One epoch: when it began (a restart before it included), on what, and its statistical efficiency."""

    begin_s: NonNegative
    seconds: NonNegative
    nodes: Count
    batch_size: Count
    efficiency: NonNegative


class ScaledTraining(Part):
    """A whole training on rented nodes; ``cost``: nodes held times their price."""

    seconds: NonNegative
    node_seconds: NonNegative
    cost: NonNegative
    efficiency: NonNegative
    """Progress over what the same samples at M0 would have made."""
    restarts: Count
    first_nodes: Count
    last_nodes: Count
    epochs: Annotated[list[ScaledEpoch], Field(min_length=1)]


class AutoscalingResult(Result):
    """``ddltool simulate --autoscale``."""

    kind: Literal["ddltool.autoscaling"] = "ddltool.autoscaling"
    application: str
    gpus_per_node: Count
    most_nodes: Count
    price_per_h: NonNegative
    upper: NonNegative
    lower: NonNegative
    restart_delay_s: NonNegative
    rules: dict[str, ScaledTraining]


class TrialSearch(Part):
    """A search of hyper-parameters: 100 trials, 4 at a time in the paper; each of the baseline has ``gpus``, a fixed batch."""

    application: str = "cifar10"
    trials: Annotated[int, Field(ge=1, le=10_000)] = 100
    concurrent: Annotated[int, Field(ge=1, le=10_000)] = 4
    gpus: Annotated[int, Field(ge=1, le=10_000)] = 4
    local_batch_size: Annotated[int, Field(ge=1, le=10_000)] = 128


class SearchFigures(Part):
    """All trials under one policy; a trial's completion time counts from when the search proposes it."""

    avg_jct_s: NonNegative
    makespan_s: NonNegative
    gpu_seconds: NonNegative
    restarts: Count


class SearchResult(Result):
    """``ddltool simulate --hyperparameter-search``."""

    kind: Literal["ddltool.hyperparameter_search"] = "ddltool.hyperparameter_search"
    search: TrialSearch
    gpus: Count
    policies: dict[str, SearchFigures]


class JobSpec(Part):
    """One row of a workload: ``submit_s`` in seconds, ``batch_size`` in samples over all replicas."""

    name: str
    submit_s: NonNegative
    application: str
    num_replicas: Annotated[int, Field(ge=1)]
    batch_size: Annotated[int, Field(ge=1)]


class WorkloadResult(Result):
    """``ddltool simulate --generate`` and ``--convert``; ``source`` says what the jobs are drawn from."""

    kind: Literal["ddltool.workload"] = "ddltool.workload"
    source: str
    jobs: list[JobSpec]


class NoiseFigures(Part):
    """The noise test of a measured figure; ``p``: how likely so clear a change is when the truth is on the limit."""

    p: Number
    level: Number
    standard_error: NonNegative = Field(description="of the change, as a share")
    low: Number = Field(description="interval of current / baseline (or of the figure), at level on each side")
    high: Number


class GateCheck(Part):
    """One rule on one figure. ``limit`` is what ``current`` had to keep to, in SI base units."""

    name: str = ""
    metric: str
    rule: str
    unit: str
    baseline: Number | str | None
    current: Number | str | None
    limit: Number | str | None
    op: str
    passed: bool
    in_noise: bool = Field(description="past the limit, but not by more than noise does: passed")
    change: Number | None = Field(description="(current - baseline) / |baseline|; null: there is none")
    noise: NoiseFigures | None = None
    note: str | None = None


class GateResult(Result):
    """``ddltool gate``: all checks."""

    kind: Literal["ddltool.gate"] = "ddltool.gate"
    passed: bool
    artifact: str
    rules_from: str = ""
    current: list[str]
    baseline: list[str]
    level: NonNegative | None = None
    noise_test: str | None = None
    checks: list[GateCheck]

    @property
    def failed(self) -> list[GateCheck]:
        """The checks that did not pass."""
        return [check for check in self.checks if not check.passed]


class MetricFigure(Part):
    """A figure that a gate can judge."""

    name: str
    value: Number | str
    unit: str
    measured: bool


class GateMetrics(Result):
    """``ddltool gate --metrics``."""

    kind: Literal["ddltool.gate_metrics"] = "ddltool.gate_metrics"
    artifact: str
    metrics: list[MetricFigure]


class ReportedSection(Part):
    """One section of a page."""

    section: str
    title: str
    kind: str
    file: str


class ReportResult(Result):
    """``ddltool report``."""

    kind: Literal["ddltool.report"] = "ddltool.report"
    report: str
    bytes: Count
    sections: list[ReportedSection]


class Machine(Part):
    """What a machine is."""

    python: str
    platform: str
    cpu_count: Count
    memory_gib: NonNegative
    cuda_devices: list[str]
    cuda_build: str | None
    gloo: bool


class MachineCheck(Part):
    """One thing that was tried."""

    name: str
    status: str
    found: str
    remedy: str


class DoctorResult(Machine, Result):
    """``ddltool doctor``; versions by package, null: not installed."""

    kind: Literal["ddltool.doctor"] = "ddltool.doctor"
    version: str
    packages: dict[str, str | None]
    optional: dict[str, str | None]
    passed: bool
    checks: list[MachineCheck]


class OverheadInterval(Part):
    """The median of the pairs' ratios, and between which values it lies."""

    median: NonNegative
    low: NonNegative
    high: NonNegative
    confidence: NonNegative


class OverheadRun(Part):
    """One run: mean seconds per step after the warm-up."""

    steps: Count
    wall_s: NonNegative = Field(description="the largest over the ranks")
    cpu_s: NonNegative = Field(description="the sum over the ranks")


class OverheadResult(Result):
    """``ddltool doctor --overhead``: ratios on / off of the seconds per step."""

    kind: Literal["ddltool.overhead"] = "ddltool.overhead"
    script: str
    replicas: Count
    limit: NonNegative | None
    verdict: Literal["above", "not decided", "within"] | None
    wall: OverheadInterval
    cpu: OverheadInterval
    on: list[OverheadRun]
    off: list[OverheadRun]


class RunSeen(Part):
    """What was read of one record; ``cut``: its last line is unfinished."""

    steps_read: Count
    first_step: int | None
    last_step: int | None
    cut: bool


class DifferingSetting(Part):
    """A setting in which the first common steps differ."""

    name: str
    a: Any
    b: Any


class FirstDifference(Part):
    """Where two runs part; ``worker`` null: all share it."""

    step: int
    epoch: int
    worker: int | None
    record: str
    tensor: str
    cause_class: str
    cause: str
    differing_in_step: dict[str, Count]

    def __str__(self) -> str:
        who = "" if self.worker is None else f", logical worker {self.worker}"
        what = f"{self.record} {self.tensor} differs. All before it is equal, so it is {self.cause}"
        return f"step {self.step}{who}: {what}"


class RunDifference(Result):
    """``ddltool diff-run``."""

    kind: Literal["ddltool.run-difference"] = "ddltool.run-difference"
    equal: bool
    same_length: bool
    steps_compared: Count
    a: RunSeen
    b: RunSeen
    settings: list[DifferingSetting]
    difference: FirstDifference | None


class EmitResult(Result):
    """``ddltool emit``."""

    kind: Literal["ddltool.emit"] = "ddltool.emit"
    target: str
    paths: list[str]
    world_size: Count
    plan_sha256: str
    not_expressed: list[str]


class WatchedWorker(Part):
    """One worker's speed in samples per second, median and the 10 and 90 % quantiles; mean shares of CPU and memory."""

    worker: str
    speed: NonNegative
    speed_low: NonNegative
    speed_high: NonNegative
    cpu: NonNegative
    memory: NonNegative


class WatchResult(Result):
    """``ddltool profile --watch``."""

    kind: Literal["ddltool.watch"] = "ddltool.watch"
    batch: Count
    iterations: Count
    left_out: Count = Field(description="first iterations without part in the figures")
    workers: list[WatchedWorker]
    equal_split_s: NonNegative = Field(description="mean seconds of computing with equal batches")
    speeds_known_s: NonNegative = Field(description="the same with batches by known speeds")


class ImportedFile(Part):
    """What one file gave: rows of a table, or steps of a trace."""

    path: str
    kind: str = Field(description="profile, placements, scalability, telemetry or trace")
    rows: Count


class DeviceCurve(Part):
    """A device's throughput over batch sizes; null where the rows do not tell."""

    saturation_batch: Count = Field(description="smallest measured local batch with 90 % of the best throughput")
    memory_limit_batch: Count | None
    memory_limit_origin: str | None = Field(description="measured or extrapolated")
    launch_overhead_s: NonNegative | None
    linear_from_batch: Count | None
    seconds_per_sample: NonNegative | None


class SkippedConfiguration(Part):
    """A configuration that was not measured, and why."""

    num_replicas: Count
    accumulation_steps: Count
    local_batch_size: Count
    reason: str
    predicted_step_time_s: NonNegative | None


class MemoryTry(Part):
    """One try of the search for the memory limit; null: it did not fit."""

    local_batch_size: Count
    peak_memory_bytes: NonNegative | None


class MemorySearch(Part):
    """The search for the largest batch that fits."""

    budget_bytes: NonNegative
    tries: list[MemoryTry]


class ProfileResult(Result):
    """``ddltool profile``: the rows of profile.csv, and what they say; of an import, where they come from."""

    kind: Literal["ddltool.profile"] = "ddltool.profile"
    rows: list[dict[str, Any]]
    devices: dict[str, DeviceCurve] = Field(default_factory=dict)
    skipped: list[SkippedConfiguration] = Field(default_factory=list)
    measuring_seconds: NonNegative = 0.0
    memory: MemorySearch | None = None
    sources: list[ImportedFile] = Field(default_factory=list)


class PredictedRow(Part):
    """A row of profile.csv that was predicted, and more."""

    device: str
    num_nodes: Count
    num_replicas: Count
    local_batch_size: Count
    step_time_s: NonNegative
    predicted_low_s: NonNegative = Field(description="80 % of measured steps are expected from here")
    predicted_high_s: NonNegative
    sync_time_s: NonNegative = Field(description="what the step takes longer than with one replica")
    peak_memory_bytes: Count = Field(description="of tensors")
    memory_low_bytes: Count
    memory_high_bytes: Count = Field(description="with what an allocator and the device's context take beside them")
    fits: bool
    samples_per_s: NonNegative = Field(description="of all replicas")
    tokens_per_s: NonNegative | None
    mfu: NonNegative = Field(description="share of the step that products would take at the device's dense peak")
    host_bound: bool
    price_per_million_samples: NonNegative | None
    accumulation_steps: Count
    source: str
    origin: str


class PredictedDevice(Part):
    """What the rows say of a device, and how sure they are."""

    saturation_batch: Count | None
    memory_limit_batch: Count
    has_precision: bool = Field(description="whether its datasheet has a rate for what the precision computes in")
    price_per_hour: NonNegative | None
    error: Residuals
    link_bytes_per_s: NonNegative


class Assumptions(Part):
    """How the steps were taken to be trained."""

    precision: str
    channels_last: bool
    compile: bool
    optimizer: str
    accumulation: Count
    sequence_length: Count | None
    gpus_per_node: Count
    bandwidth_bytes_per_s: NonNegative
    sharding: str = "ddp"
    checkpointing: str = "none"


class PredictResult(Result):
    """``ddltool predict``: rows as in profile.csv."""

    kind: Literal["ddltool.profile"] = "ddltool.profile"
    predicted: bool
    rows: list[PredictedRow]
    devices: dict[str, PredictedDevice]
    assumptions: Assumptions


class PublishedModel(Part):
    """A model's row in TicTac's Table 1."""

    parameters: Count
    parameter_mib: NonNegative
    ops_inference: Count
    ops_training: Count
    batch_size: Count | None


class ZooModel(Part):
    """A built-in model's figures."""

    name: str
    title: str
    batch_size: Count
    parameters: Count
    parameter_elements: Count
    parameter_mib: NonNegative
    ops_inference: Count
    ops_training: Count
    published: PublishedModel | None


class ZooResult(Result):
    """``ddltool zoo``: the models, or with ``--write`` the paths of the graphs."""

    kind: Literal["ddltool.zoo"] = "ddltool.zoo"
    models: list[ZooModel] | None = None
    paths: list[str] | None = None


class DeterminismOp(Part):
    """An op type whose bits depend on more than its inputs."""

    op: str
    class_: str = Field(alias="class")
    level: str
    count: Count
    flops: NonNegative
    modules: list[str]
    reason: str
    setting: str


class DeterminismLevel(Part):
    """What all ops together allow, when everything in ``settings`` is done."""

    level: str
    d2_eligible: bool
    reasons: list[str]
    settings: list[str]
    exact_ops: Count
    tables_of_torch: str
    ops: list[DeterminismOp]


class NamedGraph(Part):
    """Which graph."""

    name: str
    mode: str


class DeterminismResult(Result):
    """``ddltool trace --determinism``."""

    kind: Literal["ddltool.determinism"] = "ddltool.determinism"
    graph: NamedGraph
    determinism: DeterminismLevel


class ListedKind(Part):
    """One kind of document."""

    name: str
    form: str
    written_by: str
    read_by: str


class KindsResult(Result):
    """``ddltool schema``."""

    kind: Literal["ddltool.kinds"] = "ddltool.kinds"
    kinds: list[ListedKind]


class TracedGraph(Part):
    """A graph's figures, and what it says of its times."""

    name: str
    mode: str
    batch_size: int | None = None
    parameters: Count
    parameter_bytes: Count
    parameter_elements: int | None = None
    ops: Count
    recvs: Count
    sends: Count
    flops: NonNegative | None = None
    device: str | None = None
    oracle: str | None = None
    precision: str | None = None
    channels_last: bool | None = None
    optimizer: str | None = None
    update_s: NonNegative | None = None
    error_low: NonNegative | None = Field(default=None, description="factors between which 80 % of measured steps lie")
    error_high: NonNegative | None = None
    bandwidth_bytes_per_s: NonNegative | None = None
    latency_s: NonNegative | None = None
    channels: Count | None = None


class TraceBounds(Part):
    """U, L and S of TicTac's Equations 1, 2 and 4, and the least that any order can reach."""

    upper_s: NonNegative
    lower_s: NonNegative
    speedup: NonNegative | None
    best_lower_s: NonNegative | None = None


class LostEfficiency(Part):
    """What becomes of 1 - E: what an order could win, what is open, what is the graph's own."""

    winnable: Number
    open: Number
    graph: Number


class ScheduleFigures(Part):
    """One order of transfers. ``exact`` alone has a bound and a status, the simulated ones a spread."""

    makespan_s: NonNegative
    makespan_std_s: NonNegative | None = None
    makespan_min_s: NonNegative | None = None
    makespan_max_s: NonNegative | None = None
    samples: Count | None = None
    efficiency: NonNegative | None = Field(default=None, description="TicTac's Equation 3; null: undefined")
    efficiency_of_best: NonNegative | None = None
    attribution: LostEfficiency | None = None
    lower_bound_s: NonNegative | None = None
    status: str | None = None
    gap: Number | None = None
    solve_seconds: NonNegative | None = None
    order: list[str] | None = None
    priority: dict[str, int] | None = None
    orders_compute: bool | None = Field(default=None, description="of improved: whether it orders compute as well")


class BucketFigures(Part):
    """One way to set DDP's buckets."""

    bucket_cap_mb: NonNegative | None
    bucket_cap_mb_list: list[NonNegative] | None
    buckets: Count
    step_s: NonNegative
    exposed_s: NonNegative
    bucket_parameters: list[list[str]] | None = Field(default=None, description="of the best alone")


class DdpFigures(Part):
    """DDP's default, its best single cap, its best buckets."""

    default: BucketFigures
    best_cap: BucketFigures
    best: BucketFigures
    lower_bound_s: NonNegative
    verdict: str


class PrefetchFigures(Part):
    """One way to set FSDP2's prefetch."""

    forward_depth: Count
    backward_depth: Count
    reshard_after_forward: bool
    step_s: NonNegative
    exposed_s: NonNegative
    gathered_bytes: NonNegative


class FsdpFigures(Part):
    """FSDP2's default and best, and the best without resharding."""

    units: list[str]
    default: PrefetchFigures
    best: PrefetchFigures
    without_reshard: PrefetchFigures
    forward_prefetch: dict[str, list[str]]
    backward_prefetch: dict[str, list[str]]
    lower_bound_s: NonNegative
    verdict: str


class CollectiveFigures(Part):
    """What DDP and FSDP2 leave exposed, and what to set."""

    replicas: Count
    compute_s: NonNegative
    ddp: DdpFigures
    fsdp2: FsdpFigures | None


class CoverageFigures(Part):
    """How much of the compute ops and of their time rests on a rule, a measurement, or a default."""

    rule_ops: NonNegative
    rule_time: NonNegative
    measured_ops: NonNegative
    measured_time: NonNegative
    default_ops: NonNegative
    default_time: NonNegative
    free_ops: NonNegative
    default_types: list[tuple[str, int]] = Field(strict=False)


class TraceVerdict(Part):
    """Whether to enforce an order."""

    worth_it: bool
    text: str


class TraceResult(Result):
    """``ddltool trace``."""

    kind: Literal["ddltool.trace"] = "ddltool.trace"
    graph: TracedGraph
    bounds: TraceBounds
    schedules: dict[str, ScheduleFigures]
    efficiency_undefined: str | None = None
    coverage: CoverageFigures | None = None
    servers: dict[str, list[str]] = Field(default_factory=dict, description="parameters of each channel")
    collectives: CollectiveFigures | None = None
    verdict: TraceVerdict | None = None
    predicted: bool = True


class JointJob(Part):
    """One job of a joint plan; ``relative``: its throughput over that alone."""

    file: str
    relative: NonNegative
    plan: Plan | None
    waits: str | None = Field(description="why it waits; null: it runs")


class JointPlan(Part):
    """``ddltool plan --with``: several jobs on the same devices. It has no kind."""

    objective: str
    value: Number
    bound: Number
    gap: Number
    status: str
    solve_seconds: NonNegative
    jobs: list[JointJob]


SHOWN: tuple[type[Artifact], ...] = (
    NetworkResult,
    BarrierResult,
    BalanceResult,
    Verification,
    SimulationDocument,
    SweepDocument,
    GateResult,
)
"""Those that the report has a section of."""
