"""Records of results on traced steps: orders and their times, predictions for devices, determinism, the zoo."""

from __future__ import annotations

import shlex
from typing import Literal

from pydantic import Field

from ddltool.calibration import Residuals
from ddltool.plans import CompressionFigures, Offloaded, Recomputed
from ddltool.published_models import Library
from ddltool.quantities import AtLeastOne, Count, NonNegative, Number, Seconds, Whole
from ddltool.results import Part, Result


class RecomputeFigures(Part):
    """The modules whose activations are computed again in the backward pass or wait on the host, and what that costs."""

    modules: list[Recomputed]
    recomputed_s: Seconds = Field(description="in a pass; step_time_s has it")
    budget_bytes: NonNegative | None = Field(default=None, description="of tensors; null: the modules were not chosen")
    lower_bound_s: Seconds | None = Field(default=None, description="no choice within the budget costs less")
    on_host: list[Offloaded] = Field(default_factory=list, description="modules that save on the host")
    host_bytes: NonNegative = Field(
        default=0.0, description="of a process on its host, copied there and back in a pass"
    )
    waits_s: Seconds = Field(default=0.0, description="for these copies, in a pass; step_time_s has it")


class MemoryTimeline(Part):
    """The bytes that a process holds at moments of a pass, among them those of most memory; of the fastest row that fits."""

    num_replicas: Count
    local_batch_size: Count
    time_s: list[Seconds]
    parts: dict[str, list[NonNegative]] = Field(description="bytes of tensors by what they are, at these times")


class PredictedRow(Part):
    """A predicted row of profile.csv, with further predicted figures."""

    device: str
    num_nodes: Count
    num_replicas: Count = Field(description="data-parallel ones")
    tensor_parallel: Count = Field(default=1, description="GPUs that share every block of a replica")
    pipeline_parallel: Count = Field(default=1, description="GPUs that have some of the blocks of a replica each")
    num_gpus: Count = Field(description="replicas x tensor_parallel x pipeline_parallel")
    local_batch_size: Count
    step_time_s: Seconds
    predicted_low_s: Seconds = Field(description="80 % of measured steps are expected from here")
    predicted_high_s: Seconds
    sync_time_s: Seconds = Field(description="what the step takes longer than with one replica")
    peak_memory_bytes: Count = Field(description="of tensors")
    reserved_bytes: Count = Field(description="of the device, by torch's allocator for these tensors")
    memory_low_bytes: Count = Field(description="of tensors")
    memory_high_bytes: Count = Field(description="with the allocator's losses, the device's context and NCCL's buffers")
    fits: bool = Field(description="whether the allocator finds room for all of them, the context taken off")
    recompute: RecomputeFigures | None = None
    samples_per_s: NonNegative = Field(description="of all replicas")
    tokens_per_s: NonNegative | None
    mfu: NonNegative = Field(description="share of the step that products would take at the device's dense peak")
    host_bound: bool = Field(description="the host takes 90 % of the device's time or more to issue its operations")
    host_wait_s: Seconds = Field(default=0.0, description="of the step, in which the device waits for the host")
    price_per_million_samples: NonNegative | None
    accumulation_steps: Count
    source: str
    origin: str


class PredictedDevice(Part):
    """Figures of a device that follow from its rows, and their error."""

    saturation_batch: Count | None
    memory_limit_batch: Count
    remedy: str = Field(default="", description="where no sample fits, the least change of options by which one does")
    has_precision: bool = Field(description="whether its datasheet has a rate for what the precision computes in")
    price_per_hour: NonNegative | None
    error: Residuals
    link_bytes_per_s: NonNegative
    memory: MemoryTimeline | None = None


class PredictionAssumptions(Part):
    """The assumptions on how the steps are trained."""

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
    sequence_parallel: bool = False
    async_tensor_parallel: bool = False
    expert_parallel: Count = 1
    virtual_stages: Count = 1
    lora: Count | None = Field(
        default=None, description="rank of the adapters that are trained alone; null: all is trained"
    )
    load_in_4bit: bool = Field(default=False, description="of LoRA: the frozen linear layers have weights of 4 bits")


class PredictResult(Result):
    """The result of ``ddltool predict``: rows as in profile.csv."""

    kind: Literal["ddltool.profile"] = "ddltool.profile"
    predicted: bool
    rows: list[PredictedRow]
    devices: dict[str, PredictedDevice]
    assumptions: PredictionAssumptions
    command: list[str] = Field(
        default_factory=list,
        description="words behind ddltool predict, but for devices, batches, replicas; empty: none says it",
    )

    def command_of(self, row: PredictedRow) -> str:
        """Return the command that predicts one row alone; "" if the result was not made by a command."""
        own = ["--device", row.device]
        if self.assumptions.optimizer != "recorded":  # a recorded script fixes its batch and its replicas
            own += ["--batch-sizes", str(row.local_batch_size), "--replicas", str(row.num_replicas)]
        return shlex.join(["ddltool", "predict", *own, *self.command]) if self.command else ""


class TriedCommand(Part):
    """One variant of the command on one device type: its predicted step, or why there is none."""

    command: str
    values: dict[str, str] = Field(description="by knob; of the command as it is only those that stand in it")
    given: bool = Field(description="the command as it is")
    device: str
    devices_per_node: Count
    row: PredictedRow | None = None
    failure: str | None = Field(default=None, description="why nothing was recorded")


class CommandPlan(Result):
    """The result of ``ddltool plan -- COMMAND``: variants of a script's options, recorded without a GPU and predicted."""

    kind: Literal["ddltool.command_plan"] = "ddltool.command_plan"
    command: str
    knobs: dict[str, list[str]] = Field(description="the values that were tried of each")
    ranked_by: Literal["samples_per_s", "tokens_per_s"]
    run_samples: NonNegative | None = Field(default=None, description="of the whole run; null: not said")
    run_tokens: NonNegative | None = Field(default=None, description="of the whole run; null: not said")
    deadline_s: Seconds | None = Field(default=None, description="the most seconds of the whole run; null: any")
    budget: NonNegative | None = Field(default=None, description="the most dollars of the whole run; null: any")
    tried: list[TriedCommand] = Field(
        min_length=1, description="what fits, the best first; what does not, the least memory first; what failed"
    )

    @property
    def best(self) -> TriedCommand | None:
        """The best variant that fits in memory and keeps the deadline and the budget; None if none does."""
        fitting = (one for one in self.tried if one.row is not None and one.row.fits)  # the best first
        return next((one for one in fitting if self.keeps_limits(one)), None)

    def rate(self, tried: TriedCommand) -> float:
        """Return a variant's figure by which the plan ranks (a rate per second); 0 if its step could not be recorded."""
        return float(getattr(tried.row, self.ranked_by) or 0.0) if tried.row is not None else 0.0

    def hours(self, tried: TriedCommand) -> float | None:
        """Return the hours of the whole run by a variant; None if its step or the run's length is not known."""
        amount, rate = (
            (self.run_samples, "samples_per_s") if self.run_tokens is None else (self.run_tokens, "tokens_per_s")
        )
        per_s = None if tried.row is None else getattr(tried.row, rate)
        return amount / per_s / 3600 if amount is not None and per_s else None

    def cost(self, tried: TriedCommand) -> float | None:
        """Return the dollars of the whole run by a variant; None where its price or the run's length is not known."""
        hours = self.hours(tried)
        if hours is None or tried.row is None or tried.row.price_per_million_samples is None:
            return None
        return tried.row.price_per_million_samples * hours * 3600 * tried.row.samples_per_s / 1e6

    def keeps_limits(self, tried: TriedCommand) -> bool:
        """Return whether the whole run by a variant keeps the deadline and the budget; one without step or price keeps none."""
        hours, cost = self.hours(tried), self.cost(tried)
        in_time = self.deadline_s is None or (hours is not None and 3600 * hours <= self.deadline_s)
        return in_time and (self.budget is None or (cost is not None and cost <= self.budget))

    def as_given(self, device: str, devices_per_node: int) -> TriedCommand | None:
        """Return the unchanged command's variant on these devices; None if it was not tried."""
        setting = (True, device, devices_per_node)
        return next(
            (tried for tried in self.tried if (tried.given, tried.device, tried.devices_per_node) == setting), None
        )


class Table1Row(Part):
    """The figures of a model in Table 1 of the TicTac paper."""

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
    published: Table1Row | None


class ZooResult(Result):
    """The result of ``ddltool show zoo``: the models, or with ``--write`` the paths of the graphs."""

    kind: Literal["ddltool.zoo"] = "ddltool.zoo"
    models: list[ZooModel] | None = None
    paths: list[str] | None = None


class HubModel(Part):
    """A published model that ``transformers:NAME`` or ``diffusers:NAME`` builds."""

    name: str
    library: Library
    model_type: str
    parameters: Count
    same_as: str | None
    """The model that is built in its place, which has the same configuration."""


class HubModelsResult(Result):
    """The result of ``ddltool show models``: the published models by name."""

    kind: Literal["ddltool.models"] = "ddltool.models"
    models: list[HubModel]


class DeterminismOp(Part):
    """An op type whose results may differ in their bits for the same inputs."""

    op: str
    class_: str = Field(alias="class")
    level: str
    count: Count
    flops: NonNegative
    modules: list[str]
    reason: str
    setting: str


class DeterminismLevel(Part):
    """The level of determinism that all ops together allow if everything in ``settings`` is set."""

    level: str
    d2_eligible: bool
    reasons: list[str]
    settings: list[str]
    exact_ops: Count
    tables_of_torch: str
    ops: list[DeterminismOp]


class NamedGraph(Part):
    """The name of the graph."""

    name: str
    mode: str


class DeterminismResult(Result):
    """The result of ``ddltool trace --determinism``."""

    kind: Literal["ddltool.determinism"] = "ddltool.determinism"
    graph: NamedGraph
    determinism: DeterminismLevel


class TracedGraph(Part):
    """A graph's figures, and the sources of its times."""

    name: str
    mode: str
    batch_size: AtLeastOne | None = None
    parameters: Count
    parameter_bytes: Count
    parameter_elements: Count | None = None
    ops: Count
    recvs: Count
    sends: Count
    flops: NonNegative | None = None
    device: str | None = None
    oracle: str | None = None
    precision: str | None = None
    channels_last: bool | None = None
    optimizer: str | None = None
    update_s: Seconds | None = None
    error_low: NonNegative | None = Field(default=None, description="factors between which 80 % of measured steps lie")
    error_high: NonNegative | None = None
    bandwidth_bytes_per_s: NonNegative | None = None
    latency_s: Seconds | None = None
    channels: Count | None = None


class TraceBounds(Part):
    """Bounds U and L and speedup S of TicTac's Equations 1, 2 and 4, and a lower bound on the time of every order."""

    upper_s: Seconds
    lower_s: Seconds
    speedup: NonNegative | None
    best_lower_s: Seconds | None = None


class LostEfficiency(Part):
    """The parts of 1 - E (E: efficiency): what an order can gain, what is not known, what the graph itself imposes."""

    winnable: Number
    open: Number
    graph: Number


class ScheduleFigures(Part):
    """One order of transfers. Only ``exact`` has a bound and a status; simulated orders have a spread."""

    makespan_s: Seconds
    makespan_std_s: Seconds | None = None
    makespan_min_s: Seconds | None = None
    makespan_max_s: Seconds | None = None
    samples: Count | None = None
    efficiency: NonNegative | None = Field(default=None, description="TicTac's Equation 3; null: undefined")
    efficiency_of_best: NonNegative | None = None
    attribution: LostEfficiency | None = None
    lower_bound_s: Seconds | None = None
    status: str | None = None
    gap: Number | None = None
    solve_seconds: Seconds | None = None
    order: list[str] | None = None
    priority: dict[str, Whole] | None = None
    orders_compute: bool | None = Field(default=None, description="of improved: whether it orders compute as well")


class BucketFigures(Part):
    """One way to set DDP's buckets: by one size, by a list of sizes, or (both null) as DDP does by default."""

    bucket_cap_mb: NonNegative | None
    bucket_cap_mb_list: list[NonNegative] | None
    buckets: Count
    step_s: Seconds
    exposed_s: Seconds
    bucket_parameters: list[list[str]] | None = Field(default=None, description="of the best alone")


class DdpFigures(Part):
    """DDP with its default buckets, with the best single cap, and with the best buckets."""

    default: BucketFigures
    best_cap: BucketFigures
    best: BucketFigures
    lower_bound_s: Seconds
    verdict: str


class PrefetchFigures(Part):
    """One way to set FSDP2's prefetch."""

    forward_depth: Count
    backward_depth: Count
    reshard_after_forward: bool
    step_s: Seconds
    exposed_s: Seconds
    gathered_bytes: NonNegative


class FsdpFigures(Part):
    """FSDP2 with its default prefetch, with the best, and with the best without resharding."""

    units: list[str]
    default: PrefetchFigures
    best: PrefetchFigures
    without_reshard: PrefetchFigures
    forward_prefetch: dict[str, list[str]]
    backward_prefetch: dict[str, list[str]]
    lower_bound_s: Seconds
    verdict: str


class CollectiveFigures(Part):
    """The communication that DDP and FSDP2 leave exposed, and the settings that reduce it."""

    replicas: Count
    network: str = Field(default="", description="the links between them, in words")
    compute_s: Seconds
    ddp: DdpFigures
    fsdp2: FsdpFigures | None
    compressed: CompressionFigures | None = None


class CoverageFigures(Part):
    """The shares of the compute ops and of their time that come from a rule, a measurement, or a default."""

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
    """The result of ``ddltool trace``."""

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


class OperationTime(Part):
    """One operation by itself on a device."""

    operation: str
    time_s: Seconds
    low_s: Seconds = Field(description="80 % of measurements are expected from here")
    high_s: Seconds
    limit: str = Field(description="what it is bound by, and the rate that it reaches")


class OperationsResult(Result):
    """The result of ``ddltool devices NAME --product ... --collective ...``: single operations on one device."""

    kind: Literal["ddltool.operations"] = "ddltool.operations"
    predicted: bool = True
    device: str
    rows: list[OperationTime]
