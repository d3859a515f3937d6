"""Records of the commands' results, which ``--json``, tables, the report, gate and ``show schema`` read.

The names of fields end in their units. Fields that older files lack have a default; unknown ones are ignored, so that files
of a newer ddltool can still be shown.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ddltool.artifacts import Artifact
from ddltool.plans import Plan
from ddltool.quantities import (
    AtLeastOne,
    Change,
    Count,
    Duration,
    Finite,
    NonNegative,
    Number,
    Positive,
    Rate,
    Seconds,
    Share,
)


class Part(BaseModel):
    """A part of a result. Its JSON has only the fields that were set."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, populate_by_name=True)

    @model_serializer(mode="wrap")
    def _serialize_set_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the document (made whole by ``handler``) with only the fields that were set, ``kind`` first.

        A ``_`` at the end of a field's name, which avoids a reserved word of Python, is dropped.
        """
        written_names = {*self.model_fields_set, "kind", "schema_version"}
        fields = {name.removesuffix("_"): value for name, value in handler(self).items() if name in written_names}
        return {"kind": fields["kind"], **fields} if "schema_version" in fields else fields


class Result(Part, Artifact):
    """The result of one command."""

    model_config = ConfigDict(extra="ignore")


class NetworkPair(Part):
    """One-way times of messages between two processes, by size, and the line fitted to the shortest times."""

    ranks: Annotated[list[Count], Field(min_length=2, max_length=2)]
    bandwidth_bytes_per_s: Rate
    latency_s: Seconds
    residual: NonNegative = Field(description="root mean square of (measured - line) / line")
    sizes_bytes: list[Positive]
    shortest_s: list[Duration] = Field(default_factory=list)
    median_s: list[Duration]
    spread_s: list[Seconds] = Field(default_factory=list, description="interquartile range by size")

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        """Refuse lists of times that do not have one entry per size of message; an empty list passes."""
        for name in ("shortest_s", "median_s", "spread_s"):
            if (values := getattr(self, name)) and len(values) != len(self.sizes_bytes):
                raise ValueError(
                    f"{name} has {len(values)} entries and sizes_bytes {len(self.sizes_bytes)}; give one per size"
                )
        return self


class NetworkResult(Result):
    """The result of ``ddltool network``; its top figures are of the worst pair, for which collectives wait."""

    kind: Literal["ddltool.network"] = "ddltool.network"
    processes: Count
    local: bool = Field(description="the processes were started here: a machine's loopback and no network")
    bandwidth_bytes_per_s: Rate
    latency_s: Seconds
    residual: NonNegative
    pairs: Annotated[list[NetworkPair], Field(min_length=1)]


class BarrierFigures(Part):
    """Figures of one choice of the next barrier."""

    waiting_time_s: NonNegative = Field(description="longest waiting of a worker")
    barrier_s: Number = Field(description="when the last worker arrives, on the clock of the given ends")
    total_waiting_s: NonNegative
    waiting_per_iteration_s: NonNegative
    iteration_gap: Count


class BarrierChoice(BarrierFigures):
    """A barrier with each worker's iterations, and the CPU seconds that choosing it took."""

    iterations: dict[str, Count]
    iterations_per_s: NonNegative | None = Field(
        default=None,
        description="of all workers, were every superstep like this one and begun together; waiting included",
    )
    compute_seconds: Seconds | None = None


class TradeoffFigures(Part):
    """The least longest, total and per-iteration waiting under one bound on the iteration gap."""

    max_gap: Count
    waiting: BarrierFigures
    total: BarrierFigures
    per_iteration: BarrierFigures


class BarrierResult(Result):
    """The result of ``ddltool barrier``."""

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
    """Mean iteration time of one way to choose batch sizes, and its ratio to that of equal batches (of schemes: to BSP's)."""

    iteration_s: Seconds
    iteration_time_ratio: NonNegative


class PredictorFigures(SplitTime):
    """The error of one predictor of speeds, and the iteration time with batches sized by it.

    ``gain_kept``: the share of the gain that knowing the true speeds (the oracle) would bring.
    """

    rmse: NonNegative
    rmse_relative: NonNegative
    gain_kept: Number | None


class SchemeFigures(SplitTime):
    """One way to synchronise, replayed on the whole trace.

    ``staleness``: mean updates by others that a gradient has not seen; ``wasted``: the share of work that is thrown away.
    """

    staleness: NonNegative
    iteration_gap: Count
    wasted: NonNegative | None = None


class BalanceResult(Result):
    """The result of ``ddltool balance``."""

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


class LengthStatistics(Part):
    """Lengths of a dataset's samples, in tokens."""

    samples: Count
    mean: NonNegative
    median: NonNegative
    p90: NonNegative
    p99: NonNegative
    longest: Count


class LengthCost(Part):
    """Cost of a sample of L tokens: per_token L + per_square L^2 + per_sample; and the further cost of a pass and of a step."""

    per_token: NonNegative
    per_square: NonNegative
    per_sample: NonNegative
    per_pass: NonNegative
    per_step: NonNegative
    unit: Literal["s", "tokens"] = Field(description="tokens: what a token costs without attention")
    source: str


class RemedyFigures(Part):
    """One way to distribute global batches over ranks; ``speedup``: its tokens per second over today's."""

    step: NonNegative = Field(description="mean over steps, in the cost's unit")
    speedup: NonNegative
    speedup_low: NonNegative = Field(description="95 % interval over batches")
    speedup_high: NonNegative
    padding_share: NonNegative = Field(description="of the computed tokens")
    waiting_share: NonNegative = Field(description="of the ranks' time")
    most_tokens: Count = Field(description="in one pass, padding included")


class RankLengths(Part):
    """One rank's part of a global batch: the lengths in each of its passes."""

    rank: Count
    samples: Count
    tokens: Count
    cost: NonNegative
    passes: list[list[Count]]


class LengthsResult(Result):
    """The result of ``ddltool balance`` of lengths."""

    kind: Literal["ddltool.lengths"] = "ddltool.lengths"
    lengths: LengthStatistics
    replicas: Count
    speeds: list[NonNegative]
    total_batch: Count
    accumulation: Count
    max_tokens: Count | None = None
    sharded: bool
    window: Count
    batches: Count
    seed: Count
    cost: LengthCost
    today: str
    remedies: dict[str, RemedyFigures]
    gap: NonNegative = Field(description="mean over batches: how far cp_sat may be above the best")
    largest_gap: NonNegative
    solver_seconds: NonNegative
    assignments: list[RankLengths] = Field(description="of the first batch, by cp_sat")


class VerifiedTime(Part):
    """The time of a part of the step, predicted and measured; ``predicted_s`` null: the plan does not predict it."""

    predicted_s: Seconds | None
    measured_s: Seconds


class VerifiedStep(VerifiedTime):
    """The whole step, with the quartiles of the measured ones; ``error``: predicted over measured, minus one."""

    predicted_s: Seconds
    low_s: Seconds
    high_s: Seconds
    error: Number


class VerifiedRank(Part):
    """One process: its computation, batch and device, as planned and as measured."""

    rank: Count
    device: str = Field(description="what it ran on")
    planned_device: str = ""
    planned_batch: Count | None = None
    batch: Count
    predicted_s: Seconds = Field(description="compute of the batch that it really had")
    measured_s: Seconds
    error: Number
    spread: NonNegative | None = Field(default=None, description="half the interquartile range, relative")
    other_device: bool = Field(
        default=False, description="it ran on another device than planned, whose speed no model says"
    )


class Ledger(Part):
    """The parts of a job's wall-clock time, restarts included; each is the mean over the ranks."""

    wall_s: Duration = Field(description="from the start of telemetry to the end of the last step")
    starts: AtLeastOne
    parts_s: dict[str, Change] = Field(description="they add up to wall_s")
    goodput: Share = Field(description="computation of steps that were kept, over wall_s")
    in_steps: Share = Field(description="the same with waiting for others and communication")
    steps: Count = Field(description="that were kept")
    lost_steps: Count = Field(description="that were made again after a restart")
    checkpoints: Count
    largest: str | None = Field(description="the part to avoid first; null: none is worth it")
    gain: str = Field(description="what the job would be without it")
    action: str = Field(description="what removes it, and what that costs")
    remarks: list[str] = Field(default_factory=list)


class Verification(Result):
    """The result of ``ddltool verify``: a run against its plan."""

    kind: Literal["ddltool.verification"] = "ddltool.verification"
    job: str = ""
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
    ledger: Ledger | None = Field(default=None, description="null: the rows do not say when they ended")
    max_error: NonNegative | None = None
    passed: bool = Field(description="the run followed the plan and, where max_error is given, all of it kept to that")

    @property
    def complete(self) -> bool:
        """Whether all processes of the plan have rows, on the devices that it names; else the run cannot judge the plan."""
        return not self.missing_ranks and not self.elsewhere

    @property
    def elsewhere(self) -> bool:
        """Whether a process ran on another device than planned, so that its times say nothing of the plan's."""
        return any(check.other_device for check in self.ranks)

    @property
    def followed(self) -> bool:
        """Whether every process with rows had the batch and the device that the plan gives it."""
        return not any(check.other_device or check.batch != check.planned_batch for check in self.ranks)


class NoiseFigures(Part):
    """The noise test of a measured figure; ``p``: probability of at least this change if the true one is at the limit."""

    p: Finite
    level: Finite
    standard_error: NonNegative = Field(description="of the change, as a share")
    low: Finite = Field(description="interval of current / baseline (or of the figure), at level on each side")
    high: Finite


class GateCheck(Part):
    """The check of one rule on one figure; ``limit`` is the bound on ``current``, both in SI base units."""

    name: str = ""
    metric: str
    rule: str
    unit: str
    baseline: Finite | str | None
    current: Finite | str | None
    limit: Finite | str | None
    op: str
    passed: bool
    in_noise: bool = Field(description="past the limit, but not by more than noise does: passed")
    change: Finite | None = Field(description="(current - baseline) / |baseline|; null: there is none")
    noise: NoiseFigures | None = None
    note: str | None = None


class GateResult(Result):
    """The result of ``ddltool gate``: all checks."""

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
    value: Finite | str
    unit: str
    measured: bool


class GateMetrics(Result):
    """The result of ``ddltool gate --metrics``."""

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
    """The result of ``ddltool report``."""

    kind: Literal["ddltool.report"] = "ddltool.report"
    report: str
    bytes: Count
    sections: list[ReportedSection]


class Machine(Part):
    """Description of a machine."""

    python: str
    platform: str
    cpu_count: Count
    memory_gib: NonNegative
    cuda_devices: list[str]
    cuda_build: str | None
    gloo: bool


class MachineCheck(Part):
    """One check of the machine; ``status``: ok, warning, failed or optional."""

    name: str
    status: str
    found: str
    remedy: str


class DoctorResult(Machine, Result):
    """The result of ``ddltool doctor``; versions by package, null: not installed."""

    kind: Literal["ddltool.doctor"] = "ddltool.doctor"
    version: str
    packages: dict[str, str | None]
    optional: dict[str, str | None]
    passed: bool
    checks: list[MachineCheck]


class OverheadInterval(Part):
    """The median of the pairs' ratios, with its confidence interval."""

    median: NonNegative
    low: NonNegative
    high: NonNegative
    confidence: NonNegative


class OverheadRun(Part):
    """One run: mean seconds per step after the warm-up."""

    steps: Count
    wall_s: Seconds = Field(description="the largest over the ranks")
    cpu_s: Seconds = Field(description="the sum over the ranks")


class OverheadResult(Result):
    """The result of ``ddltool doctor --overhead``: ratios on / off of the seconds per step."""

    kind: Literal["ddltool.overhead"] = "ddltool.overhead"
    script: str
    replicas: Count
    limit: NonNegative | None
    verdict: Literal["above", "not decided", "within"] | None
    wall: OverheadInterval
    cpu: OverheadInterval
    on: list[OverheadRun]
    off: list[OverheadRun]


class ScriptCheck(Result):
    """The result of ``ddltool doctor --check``: whether the first updates of a script are those of one process."""

    kind: Literal["ddltool.script_check"] = "ddltool.script_check"
    script: str
    replicas: Count
    equal: bool
    line: str = Field(description="how far the gradients are apart and, where they are, the likely reason")
    updates: Count = Field(description="that were compared, or the first one that differs; 0: undecided")
    largest_difference: NonNegative | None = Field(
        default=None, description="of a parameter's gradient, over the largest gradient (root mean squares); null: NaN"
    )


class RunSeen(Part):
    """How much of one run's record was read; ``cut``: its last line is unfinished."""

    steps_read: Count
    first_step: Count | None
    last_step: Count | None
    cut: bool


class DifferingSetting(Part):
    """A setting that differs between the two runs at their first common step."""

    name: str
    a: Any
    b: Any


class FirstDifference(Part):
    """The first record in which two runs differ; ``worker`` null: it belongs to no single logical worker."""

    step: Count
    epoch: Count
    worker: Count | None
    record: str = Field(description="the kind of what differs, such as gradient")
    tensor: str = Field(description="the name of the one that differs among those of the kind")
    cause_class: str = Field(description="the cause in a word or two, such as kernel")
    cause: str = Field(description="the cause as a phrase that completes 'it is ...'")
    differing_in_step: dict[str, Count] = Field(description="by kind, how many tensors differ in the step")

    def __str__(self) -> str:
        """Return the sentence that says where the runs first differ, and the cause."""
        who = "" if self.worker is None else f", logical worker {self.worker}"
        what = f"{self.record} {self.tensor} differs. All before it is equal, so it is {self.cause}"
        return f"step {self.step}{who}: {what}"


class RunDifference(Result):
    """The result of ``ddltool diff-run``."""

    kind: Literal["ddltool.run-difference"] = "ddltool.run-difference"
    equal: bool
    same_length: bool
    steps_compared: Count
    a: RunSeen
    b: RunSeen
    settings: list[DifferingSetting]
    difference: FirstDifference | None


class InitResult(Result):
    """The result of ``ddltool init``."""

    kind: Literal["ddltool.init"] = "ddltool.init"
    paths: list[str]
    devices: dict[str, Count] = Field(description="found devices by type")
    nodes: Count
    unknown: list[str] = Field(description="types of which only the name is known")
    remarks: list[str] = Field(description="what was left out and why, and what to fill in")


class WatchedWorker(Part):
    """One worker's speed in samples per second, median and the 10 and 90 % quantiles; mean shares of CPU and memory."""

    worker: str
    speed: NonNegative
    speed_low: NonNegative
    speed_high: NonNegative
    cpu: NonNegative
    memory: NonNegative


class WatchResult(Result):
    """The result of ``ddltool profile watch``."""

    kind: Literal["ddltool.watch"] = "ddltool.watch"
    batch: Count
    iterations: Count
    left_out: Count = Field(description="first iterations without part in the figures")
    workers: list[WatchedWorker]
    equal_split_s: Seconds = Field(description="mean seconds of computing with equal batches")
    speeds_known_s: Seconds = Field(description="the same with batches by known speeds")


class StragglerFinding(Part):
    """One cause of slow steps and the rank responsible; ``rank`` null: no single rank, or not known."""

    rank: Count | None
    node: str = ""
    cause: str = Field(
        description="slow device, slow host, slow input, uneven work, slow link, pauses, thermal drift or slow stage"
    )
    pattern: Literal["persistent", "periodic", "transient"]
    part: str = Field(
        description="where its excess lies: input, forward, backward, compute, optimizer, host, communication"
    )
    since_step: Count
    every_steps: Count | None = None
    slow_steps: Count
    ratio: NonNegative | None = Field(default=None, description="its time for that part over the median of the others")
    excess_s: Seconds = Field(description="mean of its slow steps above the median of the others")
    share_of_steps: NonNegative = Field(description="what its slow steps would gain, were it as fast as the median")
    share_of_run: NonNegative = Field(description="the same of all steps")
    predicted_gain: NonNegative | None = Field(
        default=None, description="what the remedy is predicted to win of a step"
    )
    command: str | None = None
    sentence: str


class RankSplit(Part):
    """The parts of a rank's mean step, and the step time if this rank were as fast as the median of the others."""

    rank: Count
    node: str = ""
    step_s: Seconds
    parts_s: dict[str, NonNegative]
    wait_s: Seconds = Field(description="for the last rank to come to a collective")
    exposed_s: Seconds = Field(description="communication that nothing hid, after the last rank had come")
    step_if_median_s: Seconds
    clock_offset_s: Change = 0.0


class Drawn(Part):
    """The intervals of one rank's work in some steps, for drawing."""

    rank: str
    spans: list[tuple[Change, Change, str]]


class StragglersResult(Result):
    """The result of ``ddltool stragglers``. Slowdown S and M_W as in ByteDance's what-if analysis of stragglers."""

    kind: Literal["ddltool.stragglers"] = "ddltool.stragglers"
    source: str = Field(description="traces, telemetry, operations or live")
    ranks: Count
    steps: Count
    step_s: Seconds
    ideal_step_s: Seconds = Field(description="every operation as long as the mean of its class")
    slowdown: NonNegative = Field(description="S: the step over the ideal step")
    m_w: Number | None = Field(
        default=None, description="share of the slowdown that the slowest 3 % of workers explain"
    )
    m_s: Number | None = Field(default=None, description="the same of the last pipeline stage")
    waiting_share: NonNegative | None = None
    verdict: str
    findings: list[StragglerFinding]
    splits: list[RankSplit]
    classes: dict[str, NonNegative] = Field(
        default_factory=dict, description="the slowdown that remains when all other classes of operations are ideal"
    )
    stages: dict[str, NonNegative] = Field(default_factory=dict, description="the same by pipeline stage")
    workers: dict[str, NonNegative] = Field(default_factory=dict, description="the same by data-parallel rank")
    timeline: list[Drawn] = Field(default_factory=list)
    remarks: list[str] = Field(default_factory=list)


class ImportedFile(Part):
    """The number of rows of a table, or of steps of a trace, that were read from one file."""

    path: str
    kind: str = Field(description="profile, placements, scalability, telemetry or trace")
    rows: Count
    remarks: list[str] = Field(default_factory=list, description="what of the file was left out")


class DeviceCurve(Part):
    """A device's throughput over batch sizes; null: the rows do not determine it."""

    saturation_batch: Count = Field(description="smallest measured local batch with 90 % of the best throughput")
    memory_limit_batch: Count | None
    memory_limit_origin: str | None = Field(description="measured or extrapolated")
    launch_overhead_s: Seconds | None
    linear_from_batch: Count | None
    seconds_per_sample: NonNegative | None


class SkippedConfiguration(Part):
    """A configuration that was not measured, and why."""

    num_replicas: Count
    accumulation_steps: Count
    local_batch_size: Count
    reason: str
    predicted_step_time_s: Seconds | None


class MemoryTry(Part):
    """One trial of the search for the memory limit; null bytes: it did not fit."""

    local_batch_size: Count
    peak_memory_bytes: NonNegative | None


class MemorySearch(Part):
    """The search for the largest batch that fits."""

    budget_bytes: NonNegative
    tries: list[MemoryTry]


class ProfileResult(Result):
    """The result of ``ddltool profile`` and ``import``: the rows of profile.csv, curves of them, and their source files."""

    kind: Literal["ddltool.profile"] = "ddltool.profile"
    rows: list[dict[str, Any]]
    devices: dict[str, DeviceCurve] = Field(default_factory=dict)
    skipped: list[SkippedConfiguration] = Field(default_factory=list)
    measuring_seconds: Seconds = 0.0
    memory: MemorySearch | None = None
    sources: list[ImportedFile] = Field(default_factory=list)


class ListedKind(Part):
    """One kind of document."""

    name: str
    form: str
    written_by: str
    read_by: str


class KindsResult(Result):
    """The result of ``ddltool show schema``."""

    kind: Literal["ddltool.kinds"] = "ddltool.kinds"
    kinds: list[ListedKind]


class JointJob(Part):
    """One job of a joint plan; ``relative``: its throughput over that alone."""

    file: str
    relative: NonNegative
    plan: Plan | None
    waits: str | None = Field(description="why it waits; null: it runs")


Sharing = Literal["sum", "max-min"]
"""What several jobs on the same devices are planned for: of their throughputs relative to each alone."""


class JointPlan(Part):
    """The result of ``ddltool plan --with``: several jobs on the same devices. It has no kind.

    ``value``: of the objective; ``bound``: what no plan exceeds; ``gap``: the relative distance of the two.
    """

    objective: str
    value: Number
    bound: Number
    gap: Number
    status: str
    solve_seconds: Seconds
    jobs: list[JointJob]
