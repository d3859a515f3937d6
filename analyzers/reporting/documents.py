"""The documents that commands print with ``--json``, as far as the report shows them: checked, unknown fields ignored."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ddltool.artifacts import Artifact

Number = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    """A part of a document; commands may add fields that this page does not show."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class _Document(Artifact):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class NetworkPair(_Part):
    """Two processes and the times of their messages."""

    ranks: Annotated[list[Count], Field(min_length=2, max_length=2)]
    bandwidth_bytes_per_s: NonNegative
    latency_s: NonNegative
    residual: NonNegative
    sizes_bytes: list[NonNegative]
    median_s: list[NonNegative]


class NetworkDocument(_Document):
    """``ddltool profile --network --json``."""

    KIND: ClassVar[str] = "ddltool.network"
    kind: Literal["ddltool.network"] = "ddltool.network"
    processes: Count
    local: bool
    bandwidth_bytes_per_s: NonNegative
    latency_s: NonNegative
    residual: NonNegative
    pairs: Annotated[list[NetworkPair], Field(min_length=1)]


class BarrierFigures(_Part):
    """One choice of the next barrier."""

    waiting_time_s: NonNegative
    barrier_s: Number
    total_waiting_s: NonNegative
    waiting_per_iteration_s: NonNegative
    iteration_gap: Count


class BarrierRecord(BarrierFigures):
    """A barrier with each worker's iterations."""

    iterations: dict[str, Count]


class TradeoffPoint(_Part):
    """The least waiting under one bound on the iteration gap."""

    max_gap: Count
    waiting: BarrierFigures
    total: BarrierFigures
    per_iteration: BarrierFigures


class BarrierDocument(_Document):
    """``ddltool barrier --json``."""

    KIND: ClassVar[str] = "ddltool.barrier"
    kind: Literal["ddltool.barrier"] = "ddltool.barrier"
    workers: Count
    lookahead: Count
    algorithms: dict[str, BarrierRecord]
    bsp: BarrierRecord
    objectives: dict[str, BarrierRecord]
    tradeoff: list[TradeoffPoint]


class SplitTime(_Part):
    """Iteration time of a way to size batches."""

    iteration_s: NonNegative
    iteration_time_ratio: NonNegative


class PredictorRecord(SplitTime):
    """How well speeds were foretold, and what batches sized by that gave."""

    rmse: NonNegative
    rmse_relative: NonNegative
    gain_kept: Number | None


class SchemeRecord(SplitTime):
    """A way to synchronise, on the whole trace."""

    staleness: NonNegative
    iteration_gap: Count


class BalanceDocument(_Document):
    """``ddltool balance --json``."""

    KIND: ClassVar[str] = "ddltool.balance"
    kind: Literal["ddltool.balance"] = "ddltool.balance"
    workers: Count
    iterations: Count
    warm_up: Count
    total_batch: Count
    predictors: dict[str, PredictorRecord]
    equal_split: SplitTime
    oracle: SplitTime
    schemes: dict[str, SchemeRecord | str] = Field(default_factory=dict)


class VerifiedTime(_Part):
    """A part of the step, predicted and measured."""

    predicted_s: NonNegative | None
    measured_s: NonNegative


class VerifiedStep(VerifiedTime):
    """The whole step."""

    low_s: NonNegative
    high_s: NonNegative
    error: Number


class VerifiedRank(_Part):
    """One process's computation."""

    rank: Count
    device: str
    batch: Count
    predicted_s: NonNegative
    measured_s: NonNegative
    error: Number


class VerificationDocument(_Document):
    """``ddltool verify --json``."""

    KIND: ClassVar[str] = "ddltool.verification"
    kind: Literal["ddltool.verification"] = "ddltool.verification"
    plan: str
    telemetry: str
    iteration: VerifiedStep
    compute: VerifiedTime
    sync: VerifiedTime
    ranks: list[VerifiedRank]
    refit: list[str]
    passed: bool


class Fairness(_Part):
    """Finish-time fairness over all jobs."""

    max: NonNegative
    share_below_1: NonNegative


class SimulatedJob(_Part):
    """One job under one policy."""

    name: str
    application: str
    submit_s: NonNegative
    start_s: NonNegative
    finish_s: NonNegative
    jct_s: NonNegative
    restarts: Count
    gpu_seconds: NonNegative


class UsageRecord(_Part):
    """GPUs that are held from each time (seconds) on."""

    time_s: list[NonNegative]
    gpus: list[Count]


class PolicyRecord(_Part):
    """One policy."""

    avg_jct_s: NonNegative
    median_jct_s: NonNegative
    p99_jct_s: NonNegative
    makespan_s: NonNegative
    utilization: NonNegative
    restarts: Count
    finish_time_fairness: Fairness
    usage: UsageRecord | None = None
    jobs: Annotated[list[SimulatedJob], Field(min_length=1)]


class SimulationDocument(_Document):
    """``ddltool simulate --json``."""

    KIND: ClassVar[str] = "ddltool.simulation"
    kind: Literal["ddltool.simulation"] = "ddltool.simulation"
    workload: str
    gpus: Count
    policies: Annotated[dict[str, PolicyRecord], Field(min_length=1)]


class SweepFigures(_Part):
    """What one replay comes to."""

    avg_jct_s: NonNegative
    median_jct_s: NonNegative
    p99_jct_s: NonNegative
    makespan_s: NonNegative
    utilization: NonNegative
    worst_fairness: NonNegative
    restarts: NonNegative
    gpu_seconds: NonNegative
    cost: NonNegative | None = None


class SweepCell(_Part):
    """One replay: a workload, a policy, a seed."""

    workload: str
    policy: str
    seed: int
    figures: SweepFigures | None
    error: str | None = None


class ComparedMeasure(_Part):
    """One measure of the first policy over the second's."""

    measure: str
    ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    low: NonNegative | None
    high: NonNegative | None
    better: Count
    units: Count
    decided: bool


class PolicyComparison(_Part):
    """Two policies in pairs, which a sweep with ``--compare`` has at its end."""

    first: str
    second: str
    unit: str
    confidence: Number
    comparisons: Annotated[list[ComparedMeasure], Field(min_length=1)]


class SweepDocument(_Document):
    """``ddltool simulate --seeds``."""

    KIND: ClassVar[str] = "ddltool.sweep"
    kind: Literal["ddltool.sweep"] = "ddltool.sweep"
    cells_wanted: Count
    cells_failed: Count
    cells: Annotated[list[SweepCell], Field(min_length=1)]
    comparison: PolicyComparison | None = None

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        seen: set[tuple[str, str, int]] = set()
        for cell in self.cells:
            key = cell.workload, cell.policy, cell.seed
            if key in seen:
                where = f"{cell.policy} on {cell.workload} with seed {cell.seed}"
                raise ValueError(f"cells give {where} twice; keep one of the two")
            seen.add(key)
        return self


class GateCheck(_Part):
    """One rule."""

    metric: str
    rule: str
    unit: str
    baseline: Number | str | None
    current: Number | str | None
    limit: Number | str | None
    op: str
    passed: bool
    in_noise: bool
    change: Number | None
    note: str | None = None


class GateDocument(_Document):
    """``ddltool gate --json``."""

    KIND: ClassVar[str] = "ddltool.gate"
    kind: Literal["ddltool.gate"] = "ddltool.gate"
    passed: bool
    artifact: str
    current: list[str]
    baseline: list[str]
    checks: list[GateCheck]
    noise_test: str | None = None


COMMAND_DOCUMENTS: tuple[type[Artifact], ...] = (
    NetworkDocument,
    BarrierDocument,
    BalanceDocument,
    VerificationDocument,
    SimulationDocument,
    SweepDocument,
    GateDocument,
)
