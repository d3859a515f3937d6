"""Plan: how to run a job. Enforcement: the configuration of the hook that runs it so."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from ddltool import showing
from ddltool.artifacts import Artifact, Record
from ddltool.decision import Decision
from ddltool.errors import did_you_mean
from ddltool.job import LoraRank, OptimizerName, WorkerGroup
from ddltool.precision import PrecisionName
from ddltool.quantities import (
    AtLeastOne,
    Count,
    Digest,
    Duration,
    Name,
    NonNegative,
    Number,
    Passes,
    Positive,
    Processes,
    Rate,
    Seconds,
    Share,
    Whole,
)

Strategy = Literal["bsp", "est", "elastic-bsp", "lb-bsp", "goodput"]
# Aten ops that are matrix products or convolutions (:func:`is_product`).
PRODUCTS = ("mm", "_scaled_mm", "addmm", "bmm", "baddbmm", "convolution")
# The relative rounding error of a figure in a file.
_TOLERANCE = 1e-6
# How a job's devices are spread.
Choice = Literal["one device", "one node", "several nodes"]


def _demand_names(what: str, names: Iterable[str], known: Collection[str] = ()) -> None:
    """Raise ValueError for a repeated name, and, unless ``known`` is empty, for one that is not in ``known``.

    ``what``: the field that holds the names, for the message.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what}: {name!r} stands twice; name each once")
        if known and name not in known:
            raise ValueError(f"{what}: {name!r} is not known; {did_you_mean(name, known)}")
        seen.add(name)


def _demand_equal(what: str, given: float, sum_of_parts: float, before_sum: str) -> None:
    """Raise ValueError unless a plan's figure ``given`` equals the ``sum_of_parts`` to ``_TOLERANCE``.

    The message is "WHAT is 3, but BEFORE_SUM 4": ``what`` is the figure's field, ``before_sum`` such as "the assignments
    have".
    """
    if not math.isclose(given, sum_of_parts, rel_tol=_TOLERANCE):
        raise ValueError(f"{what} is {given:.10g}, but {before_sum} {sum_of_parts:.10g}")


class Assignment(Record):
    """The share of each of ``devices`` devices of one type, which all do the same."""

    device_type: Name
    devices: Processes
    ests_per_device: Count = Field(description="logical workers on each; 0 where there are none")
    local_batch_size: AtLeastOne = Field(description="samples per step on each device")
    accumulation_steps: Passes = Field(
        default=0, description="passes before the last one of a step; local_batch_size is split over all of them"
    )
    compute_s: Seconds | None = Field(default=None, description="seconds that each device computes in a step")


class Alternative(Record):
    """Another plan for the same job; the fields are those of :class:`Plan`."""

    iteration_s: Duration
    throughput: Rate
    assignments: list[Assignment]
    est_count: Count
    waste: NonNegative
    overload_factor: Seconds


class ParameterRecord(Record):
    """One parameter of the model, with its place in the order of transfers."""

    name: str
    size_bytes: Count
    priority: Whole | None = Field(default=None, description="0 first; equal numbers in any order; null: no preference")


class BucketSetting(Record):
    """DDP's gradient buckets, and the step time predicted with them."""

    bucket_cap_mb: Positive | None = Field(default=None, description="MiB; null: DDP's default, or the list")
    bucket_cap_mb_list: list[Positive] | None = Field(
        default=None, description="MiB per bucket, in the order of reduction"
    )
    buckets: list[list[str]] = Field(description="parameter names by bucket, in the order of reduction")
    step_s: Seconds
    default_step_s: Seconds = Field(description="with DDP's default buckets")

    @model_validator(mode="after")
    def _check_names_once(self) -> Self:
        """Refuse a parameter that is in two buckets, or twice in one."""
        _demand_names("buckets", chain(*self.buckets))
        return self


class CompressionFigures(Record):
    """DDP's default buckets with compressed gradients. Predicted."""

    name: str
    sent_bytes: NonNegative = Field(description="of all gradients, in place of uncompressed_bytes")
    uncompressed_bytes: NonNegative
    compute_s: Seconds = Field(description="work of packing and unpacking")
    kept_bytes: NonNegative = Field(description="memory for what compression lost")
    step_s: Seconds
    exposed_s: Seconds
    saved: Number = Field(description="share of the step without compression")
    verdict: str


class PrefetchSetting(Record):
    """The blocks that FSDP2 gathers ahead, and the step time predicted with them."""

    units: list[str] = Field(description="the modules to shard, one unit each, in the order of forward")
    forward: dict[str, list[str]] = Field(description="block to the blocks to prefetch in forward; empty: default")
    backward: dict[str, list[str]] = Field(description="block to the blocks to prefetch in backward; empty: default")
    reshard_after_forward: bool = Field(default=True, description="what to pass to fully_shard")
    step_s: Seconds
    default_step_s: Seconds = Field(description="with FSDP2's own prefetch")

    @model_validator(mode="after")
    def _check_names_are_units(self) -> Self:
        """Refuse repeated names, and names in the prefetch lists that are not in ``units``."""
        _demand_names("units", self.units)
        for way, blocks in (("forward", self.forward), ("backward", self.backward)):
            for block, ahead in blocks.items():
                _demand_names(way, [block], self.units)
                _demand_names(f"{way}.{block}", ahead, self.units)
        return self


class Recomputed(Record):
    """A module whose activations are dropped after its forward pass and computed again before its backward pass."""

    module: str
    keeps: list[Count] = Field(
        default_factory=list,
        description="products (see is_product) that are kept: their places among those of the module's forward pass",
    )


class Offloaded(Record):
    """A module that saves on the host: what it makes for its backward pass, or its input where it is computed again."""

    module: str
    until: str = Field(
        description="the later module whose forward pass ends no sooner than the copy to the host, and with whose backward "
        "pass the copy back begins"
    )


def is_product(op: str) -> bool:
    """Return whether an aten op is a matrix product, a convolution or the forward pass of an attention.

    ``op``: its name without an overload.

    >>> is_product("addmm"), is_product("_scaled_dot_product_flash_attention"), is_product("gelu")
    (True, True, False)
    """
    forward = not op.endswith("_backward")
    return op in PRODUCTS or (forward and op.startswith("_scaled_dot_product"))


class ShardingSetting(Record):
    """How the processes share the model's state, and which modules are recomputed. Memory is predicted."""

    kind: Literal["ddp", "fsdp", "hsdp"]
    replicate: AtLeastOne = Field(default=1, description="groups that hold the whole state each")
    shard: AtLeastOne = Field(default=1, description="processes of a group, ranks one after another")
    offload: bool = Field(default=False, description="FSDP2's CPUOffloadPolicy: the state in the hosts' memory")
    checkpointing: list[Recomputed] = Field(
        default_factory=list, description="modules whose activations are computed again; all others keep theirs"
    )
    on_host: list[Offloaded] = Field(
        default_factory=list, description="modules that save on the host; all others on the device"
    )
    memory_bytes: dict[str, NonNegative] = Field(
        default_factory=dict, description="device type to the most bytes of tensors that one process holds"
    )

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        """Refuse ddp with ``shard`` above 1, fsdp with ``replicate`` above 1, and a repeated module."""
        if (self.kind == "ddp" and self.shard > 1) or (self.kind == "fsdp" and self.replicate > 1):
            raise ValueError(f"{self.kind} is not {self.replicate} x {self.shard} (replicate x shard); hsdp is")
        _demand_names("checkpointing", [recomputed.module for recomputed in self.checkpointing])
        _demand_names("on_host", [offloaded.module for offloaded in self.on_host])
        return self

    def demand_all(self, world_size: int) -> None:
        """Raise ValueError unless replicate x shard equals ``world_size``, the number of processes."""
        if self.replicate * self.shard != world_size:
            raise ValueError(f"sharding is {self.replicate} x {self.shard} processes, and world_size {world_size}")


class Superstep(Record):
    """A superstep of ElasticBSP: the iterations of each device type until the next barrier."""

    lookahead: AtLeastOne = Field(description="R: iterations looked ahead per worker")
    superstep_s: Seconds = Field(description="seconds from barrier to barrier")
    iterations: dict[str, AtLeastOne] = Field(description="device type to iterations until the barrier")
    mini_batches: AtLeastOne = Field(description="logical mini-batches of all workers in a superstep")
    waiting_s: Seconds = Field(description="of the worker that waits longest")
    total_waiting_s: Seconds
    iteration_gap: Count = Field(description="staleness within a superstep")
    left_out: dict[str, AtLeastOne] = Field(
        default_factory=dict, description="device type to how many are better left out"
    )


class BatchSplit(Record):
    """The figures of LB-BSP's split of the total batch, compared with the equal split."""

    total_batch_size: AtLeastOne
    equal_s: Seconds | None = Field(description="step time of the equal split; null where memory forbids it")
    kept_s: Seconds | None = Field(description="step time with every device taking part; null where memory forbids it")
    idle_s: Seconds = Field(description="seconds that devices wait for the slowest, all together")
    dropped: dict[str, AtLeastOne] = Field(description="device type to how many are better left out")
    accumulated_s: Seconds | None = Field(
        default=None, description="step time with gradient accumulation, where that would be shorter"
    )
    goodput_per_s: NonNegative | None = Field(
        default=None,
        description="of a total batch chosen with the split: samples per second that count like initial ones",
    )
    efficiency: NonNegative | None = Field(default=None, description="what a sample of that batch counts")


BatchChoice = TypeVar("BatchChoice", "ScalingRow", "GoodputChoice")


def _demand_total(choice: BatchChoice) -> BatchChoice:
    """Return the choice. Raises ValueError unless replicas x local batch x passes is its total, and each node has a replica."""
    # A step has its accumulation steps and the pass that synchronises.
    total = choice.num_replicas * choice.local_batch_size * (choice.accumulation_steps + 1)
    _demand_equal("total_batch_size", choice.total_batch_size, total, "the passes of all replicas make")
    if choice.num_nodes > choice.num_replicas:
        raise ValueError(f"num_nodes is {choice.num_nodes}, more than num_replicas, {choice.num_replicas}")
    return choice


class ScalingRow(Record):
    """The batch of highest goodput on one number of devices."""

    num_replicas: AtLeastOne
    num_nodes: AtLeastOne
    local_batch_size: AtLeastOne
    accumulation_steps: Passes
    total_batch_size: AtLeastOne
    goodput_per_s: NonNegative
    speedup: NonNegative

    _check_sums = model_validator(mode="after")(_demand_total)


class ElasticSetting(Record):
    """How one number of processes splits the total batch exactly, or why it cannot."""

    world_size: AtLeastOne
    local_batch_sizes: list[list[Count]] = Field(
        description="samples by pass: of the first ranks_with_one_more ranks (if any), then of the others; empty: no split"
    )
    accumulation_steps: Passes | None
    ranks_with_one_more: Count = Field(description="the first ranks take one sample more")
    reason: str = Field(default="", description="why there is no split")
    nearest_total_batch_sizes: list[AtLeastOne] = Field(default_factory=list)
    learning_rates: dict[str, NonNegative] = Field(description="by rule")
    steps_per_epoch: Count
    last_step_samples: Count = Field(description="samples of the epoch's last step, 0 when it is a full one")


class GoodputChoice(Record):
    """The devices and the batch of highest goodput, and the best batches on other numbers of devices."""

    device_type: str
    num_replicas: AtLeastOne
    num_nodes: AtLeastOne
    local_batch_size: AtLeastOne = Field(description="per device and accumulation step")
    accumulation_steps: Passes
    total_batch_size: AtLeastOne
    goodput_per_s: NonNegative = Field(description="samples per second that count like samples at the initial batch")
    efficiency: NonNegative
    speedup: NonNegative = Field(description="goodput over that of the fewest devices")
    pays_until: Count = Field(description="beyond this number devices bring less than pays_share of what the first did")
    pays_share: Share
    scaling: list[ScalingRow] = Field(description="numbers of devices that no smaller number equals")
    elastic: list[ElasticSetting] = Field(description="the chosen total batch on every number of devices")

    _check_sums = model_validator(mode="after")(_demand_total)


class NetworkCost(Record):
    """How the devices are spread over nodes, and the time to synchronise them. Predicted."""

    choice: Choice
    num_nodes: AtLeastOne
    num_replicas: AtLeastOne
    compute_s: Seconds = Field(description="seconds of the slowest device's ESTs")
    sync_s: Seconds = Field(description="seconds of one gradient synchronisation, before any overlap")
    best_steps: dict[Choice, NonNegative] = Field(description="the best step time of each choice that is possible")


class StepSettings(Record):
    """The settings of a step beside its layout, which a framework's configuration names too."""

    model: str | None = Field(default=None, description="SOURCE of the model, as in job.yaml")
    precision: PrecisionName = "fp32"
    optimizer: OptimizerName = "adam"
    compile: bool = Field(default=False, description="the step runs under torch.compile")
    channels_last: bool = Field(default=False, description="images are in channels_last")
    lora: LoraRank | None = Field(default=None, description="rank of the adapters; null: all is trained")
    load_in_4bit: bool = Field(default=False, description="of LoRA: the frozen linear layers have weights of 4 bits")
    sequence_length: AtLeastOne | None = Field(
        default=None, description="tokens of a sample; null: not known, or no text"
    )
    gpus_per_node: dict[str, AtLeastOne] | None = Field(
        default=None, description="single devices of each used type on a node, where those of the plan are groups"
    )


class EmitResult(Artifact):
    """The result of ``ddltool emit``: the files that were written."""

    kind: Literal["ddltool.emit"] = "ddltool.emit"
    target: str
    paths: list[str]
    world_size: Count
    plan_sha256: str
    not_expressed: list[str] = Field(description="what of the plan the target has no words for")
    local_batch_sizes: list[Count] = Field(description="by rank, or group of ranks")
    group: WorkerGroup | None = Field(default=None, description="what runs such a batch; null: one process")


class Plan(Artifact):
    """A predicted way to run a job (kind ``ddltool.plan``). Every figure in it is predicted, none measured."""

    kind: Literal["ddltool.plan"] = "ddltool.plan"
    job: str
    strategy: Strategy
    max_workers: AtLeastOne
    batch_size: AtLeastOne
    iteration_s: Duration = Field(description="seconds per global step")
    throughput: Rate = Field(description="logical mini-batches (of batch_size samples) per second")
    assignments: list[Assignment] = Field(min_length=1, description="who does what")
    est_count: Count = Field(description="logical workers on all devices, idle places included")
    waste: NonNegative = Field(description="capability that idles, logical mini-batches per second")
    overload_factor: Seconds = Field(description="f: the largest A_i / C_i over the used devices, seconds")
    status: Literal["optimal", "feasible"] = Field(description="optimal: proven")
    gap: NonNegative = Field(description="relative distance to the proven bound; 0 when optimal")
    solve_seconds: Seconds
    alternatives: list[Alternative] = Field(default_factory=list, description="the next best plans")
    parameters: list[ParameterRecord] = Field(default_factory=list, description="the model's, in sending order")
    ddp: BucketSetting | None = Field(default=None, description="buckets")
    fsdp2: PrefetchSetting | None = Field(default=None, description="units and prefetch lists")
    compressed: CompressionFigures | None = Field(default=None, description="what compressed gradients would bring DDP")
    sharding: ShardingSetting | None = Field(default=None, description="null: nothing is known of memory")
    split: BatchSplit | None = Field(default=None, description="of an lb-bsp plan")
    superstep: Superstep | None = Field(default=None, description="of an elastic-bsp plan")
    goodput: GoodputChoice | None = Field(default=None, description="of a goodput plan")
    communication_s: Seconds | None = Field(
        default=None, description="exposed communication within iteration_s; null: iteration_s leaves it out"
    )
    decision: Decision | None = Field(default=None, description="the comparison of strategies behind an auto plan")
    network: NetworkCost | None = Field(default=None, description="of an est plan with nodes and a fitted model")
    migration: None = Field(default=None, description="always null; it stands in plans of earlier versions")
    devices_per_node: dict[str, AtLeastOne] | None = Field(
        default=None,
        description="devices of each used type on a node: of the job, its cluster, or as assumed; null: nothing says it",
    )
    group: WorkerGroup | None = Field(default=None, description="what a device of this plan stands for; null: itself")
    run: StepSettings | None = Field(default=None, description="how a step is run; null: a plan of an earlier version")
    command: list[str] = Field(
        default_factory=list,
        description="words behind ddltool plan, but for those on the whole run; empty: none says it",
    )
    predicted: Literal[True] = True

    def emit(self, target: str | None = None, output: str | Path | None = None, **options: Any) -> EmitResult:
        """Write the files that make a job follow this plan, and return what was written.

        ``target``, ``output`` and ``options`` are the options of ``ddltool.emit``, which says what is raised; None: its
        default.
        """
        given = {"target": target, "output": output, **options}
        written: EmitResult = showing.module("emits plans").emit(
            self, **{name: value for name, value in given.items() if value is not None}
        )
        return written

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        """Refuse parts of the plan that contradict its assignments or each other."""
        # Figures must follow from the assignments: anybody may have edited the file.
        rows, types = self.assignments, {row.device_type for row in self.assignments}
        _demand_parts_fit(self, types)
        places = sum(
            row.devices * row.ests_per_device for row in rows
        )  # for ESTs: logical workers, each with a mini-batch
        _demand_equal("est_count", self.est_count, places, "the assignments have")
        samples = sum(row.devices * row.local_batch_size for row in rows)
        if self.strategy == "est":
            if self.est_count < self.max_workers:
                raise ValueError(f"est_count is {self.est_count}, too few for max_workers, {self.max_workers}")
            for row in rows:
                taken = row.ests_per_device * self.batch_size  # samples
                _demand_equal("local_batch_size", row.local_batch_size, taken, f"the ESTs of a {row.device_type} take")
        if self.split is not None:
            _demand_equal("split.total_batch_size", self.split.total_batch_size, samples, "the assignments have")
        if self.goodput is not None:
            _demand_equal("goodput.num_replicas", self.goodput.num_replicas, self.world_size, "the assignments have")
            _demand_equal("goodput.total_batch_size", self.goodput.total_batch_size, samples, "the assignments have")
            _demand_names("goodput.device_type", [self.goodput.device_type], types)
        if self.superstep is not None:
            mini_batches = sum(row.devices * self.superstep.iterations[row.device_type] for row in rows)
            _demand_equal(
                "superstep.mini_batches", self.superstep.mini_batches, mini_batches, "the iterations of all devices are"
            )
        if self.status == "optimal" and self.gap > _TOLERANCE:
            raise ValueError(f"gap is {self.gap:g} and status optimal; a proven plan has none")
        return self

    @property
    def world_size(self) -> int:
        """Number of used devices; of a plan with ``group``, number of such groups of devices."""
        return sum(assignment.devices for assignment in self.assignments)

    @property
    def processes(self) -> int:
        """Number of processes, one for each single device of the groups."""
        return self.world_size * (1 if self.group is None else self.group.size)

    @property
    def other_s(self) -> float | None:
        """Seconds of a step beside computation and synchronisation, such as the optimizer's; None if no run measured them."""
        if self.decision is None:
            return None
        of_strategy = [option.other_s for option in self.decision.options if option.strategy == self.strategy]
        return (of_strategy[0] or None) if of_strategy else None  # 0.0 stands for not measured


class RankEnforcement(Record):
    """The share of one process in a step."""

    rank: Count
    device_type: Name
    ests: Count
    local_batch_size: AtLeastOne
    accumulation_steps: Passes = Field(
        default=0, description="passes before the last one of a step; local_batch_size is split over all of them"
    )


class ScriptProof(Record):
    """The result of ``ddltool doctor --check`` for a script that uses the config. Measured."""

    script_sha256: Digest = Field(description="of the file that was run; imported ones do not count")
    plan_sha256: Digest | None = Field(default=None, description="the config's own, as it was then")
    ddltool: str = Field(description="version")
    torch: str = Field(description="version")
    updates: Count = Field(description="that were compared, or the first one that differs")
    largest_difference: NonNegative | None = Field(
        description="of a parameter's gradient from one process's, over the largest gradient (root mean squares); null: NaN"
    )
    equal: bool


class Enforcement(Artifact):
    """The configuration that the hook enforces in each training process (kind ``ddltool.enforcement``)."""

    kind: Literal["ddltool.enforcement"] = "ddltool.enforcement"
    job: str
    strategy: Strategy
    world_size: AtLeastOne
    total_batch_size: AtLeastOne
    ranks: list[RankEnforcement]
    parameters: list[ParameterRecord] = Field(
        default_factory=list, description="the model's parameters; empty: any model will do"
    )
    ddp: BucketSetting | None = None
    fsdp2: PrefetchSetting | None = None
    sharding: ShardingSetting | None = Field(
        default=None, description="what runtime.shard applies; null: DDP as it comes"
    )
    superstep: Superstep | None = Field(
        default=None, description="of an elastic-bsp plan, whose server is one process more than world_size"
    )
    telemetry: str | None = Field(
        default="telemetry.jsonl", description="file to append to, relative to the working folder; null: none"
    )
    plan_sha256: Digest | None = Field(default=None, description="SHA-256 of the canonical JSON of the plan behind it")
    checked: ScriptProof | None = Field(
        default=None,
        description="whether a script trained as one process would; written by doctor --check; null: unknown",
    )

    @model_validator(mode="after")
    def _check_sums(self) -> Self:
        """Refuse ranks that are not 0, 1, ... in order, a total batch that is not their sum, and parts that contradict them."""
        if [entry.rank for entry in self.ranks] != list(range(self.world_size)):
            raise ValueError(f"ranks must be 0 to {self.world_size - 1} in order, one entry each (world_size)")
        total = sum(entry.local_batch_size for entry in self.ranks)
        if total != self.total_batch_size:
            raise ValueError(f"total_batch_size is {self.total_batch_size} but the ranks' batches add up to {total}")
        _demand_parts_fit(self, {entry.device_type for entry in self.ranks})
        return self


def _demand_parts_fit(plan: Plan | Enforcement, types: Collection[str]) -> None:
    """Raise ValueError unless the buckets, sharding and superstep fit the parameters, the processes and the device ``types``.

    ``types``: the device types that the plan uses.
    """
    names = [parameter.name for parameter in plan.parameters]
    _demand_names("parameters", names)
    if plan.ddp is not None:
        _demand_names("ddp.buckets", chain(*plan.ddp.buckets), set(names))
    if plan.sharding is not None:
        plan.sharding.demand_all(plan.world_size)
        _demand_names("sharding.memory_bytes", plan.sharding.memory_bytes, types)
    if (plan.superstep is None) == (plan.strategy == "elastic-bsp"):
        raise ValueError(
            "superstep is that of strategy elastic-bsp; make the plan again: ddltool plan --strategy elastic-bsp"
        )
    if plan.superstep is not None and set(plan.superstep.iterations) != set(types):
        given = ", ".join(sorted(plan.superstep.iterations))
        raise ValueError(f"superstep.iterations are of {given or 'nothing'}; give those of {', '.join(sorted(types))}")
