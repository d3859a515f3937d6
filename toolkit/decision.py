"""Decision: how the strategies compare for one job, which one was picked, and why. A part of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from ddltool.artifacts import Record
from ddltool.errors import Infeasible
from ddltool.job import WorkerGroup
from ddltool.quantities import AtLeastOne, Count, Devices, NonNegative, Number, Seconds

Objective = Literal["fastest", "cheapest", "same-bits", "least-memory", "fewest-devices"]
Kept = Literal["none", "D0", "D1", "D2"]
LEAST_GAIN = 0.02
"""The least gain (a share of the step) for which a change, or a strategy with more to set, is worth while."""


class Option(Record):
    """One strategy for the job, with its best order of communication. All figures are predicted."""

    strategy: str
    devices: dict[str, Devices] = Field(description="how many devices of each type it uses")
    group: WorkerGroup | None = Field(default=None, description="devices that hold a replica between them; null: one")
    compute_s: Seconds = Field(description="seconds per global step without communication")
    communication_s: Seconds | None = Field(
        default=None, description="communication left exposed per step; null: not predicted"
    )
    other_s: Seconds = Field(
        default=0.0, description="the rest of a step as an earlier run measured it: optimizer, loader, waiting"
    )
    iteration_s: Seconds = Field(description="seconds per global step, exposed communication and the rest included")
    low_s: Seconds | None = Field(default=None, description="lower end of iteration_s; null: its error is not known")
    high_s: Seconds | None = None
    throughput: NonNegative = Field(description="logical mini-batches per second")
    goodput_per_s: NonNegative | None = Field(
        default=None, description="samples per second that count like samples at the initial batch; null: not known"
    )
    staleness: Count = Field(default=0, description="iterations by which one worker may be ahead of another")
    determinism: Kept = Field(
        description="D0: same bits for the same placement; D1: on any number of devices of one type; D2: of any types"
    )
    price_per_sample: NonNegative | None = None
    memory_bytes: NonNegative | None = Field(
        default=None, description="most bytes of tensors that a process holds; null: not known"
    )
    local_batch_sizes: dict[str, Count] = Field(
        default_factory=dict, description="device type to the most samples per step of one device; empty: see the plan"
    )
    passes: AtLeastOne = Field(default=1, description="forward and backward passes of a step")
    order: str = Field(default="", description="what to set so that communication overlaps best")
    order_saves_s: Seconds | None = Field(default=None, description="what that saves per step over the default")
    leans_on: dict[str, NonNegative] = Field(
        default_factory=dict,
        description="device type to the relative change of the step by that of the type's compute times",
    )
    host_bound: bool = Field(
        default=False, description="the host that starts kernels decides the step, not the devices"
    )
    step_samples: AtLeastOne | None = Field(
        default=None, description="samples of a step where they are not the job's: a tuned batch"
    )
    why_not: str = Field(default="", description="why it is not picked; empty: it is")


class Named(Record):
    """The best plan with one of the precisions, optimizers or LoRA ranks that the user named. Predicted."""

    name: str = Field(description="the precision, optimizer or LoRA rank: bf16, adamw-8bit; full: no LoRA")
    option: Option | None = Field(default=None, description="null: nothing fits")
    saves: Number = Field(default=0.0, description="the share of its time or money that the picked one saves")
    why_not: str = Field(default="", description="why nothing fits")


class RunFigures(Record):
    """Steps, time, price and energy of the whole run. Predicted."""

    samples: NonNegative
    steps: NonNegative
    hours: NonNegative = Field(description="failures, checkpoints and restarts included where they are known")
    low_hours: NonNegative | None = None
    high_hours: NonNegative | None = None
    price: NonNegative | None = Field(default=None, description="in US dollars")
    energy_kwh: NonNegative | None = Field(
        default=None, description="of the devices at their datasheets' power; an upper end"
    )
    checkpoint_interval_s: Seconds | None = Field(default=None, description="after Daly; null: nothing fails")
    failures: NonNegative | None = Field(default=None, description="expected in the whole run")


class Remedy(Record):
    """The figures of a run under one way to go on after a device has failed. Predicted."""

    goodput: NonNegative = Field(description="share of the wall clock that is training which lasts")
    devices: Devices = Field(description="that are paid, spares included")
    hours: NonNegative | None = Field(default=None, description="of the whole run; null: nobody said how long it is")
    price: NonNegative | None = Field(default=None, description="in US dollars")


class RunFactors(Record):
    """By what failures, checkpoints and spares multiply the time and the price of a run."""

    time: NonNegative
    price: NonNegative


class FailureFigures(Record):
    """The picked plan under failures: how it goes on after one, and how often it writes checkpoints. Predicted."""

    remedy: str = Field(description="the best of the remedies for the objective")
    remedies: dict[str, Remedy] = Field(
        description="wait for the failed device, shrink until it is back, or take a spare; restart: it is back at once"
    )
    job_mtbf_s: Seconds = Field(description="between failures of any of its devices")
    repair_s: Seconds = Field(default=0.0, description="for which a failed device is away")
    checkpoint_s: Seconds = Field(description="for which training stops for a checkpoint in storage")
    write_s: Seconds = Field(default=0.0, description="for which it is written after that, beside training")
    checkpoint_bytes: NonNegative | None = Field(
        default=None, description="trained parameters and the optimizer's state; null: not known"
    )
    process_bytes: NonNegative | None = Field(default=None, description="of it what a process that writes has")
    checkpoint_interval_s: Seconds | None = Field(
        default=None, description="training between checkpoints, after Daly; null: one at a notice"
    )
    per_storage: Count = Field(default=0, description="checkpoints in memory for each in storage; 0: all in storage")


class OnHost(Record):
    """Memory, traffic and time of a host that keeps the state of its processes (offload). Predicted."""

    memory_bytes: NonNegative = Field(description="of the host, for all processes of the node")
    copied_bytes: NonNegative = Field(description="in a step over the link between a process's device and the host")
    update_s: Seconds = Field(description="of a step in which the host sums gradients and updates, and devices wait")


class SavedOnHost(Record):
    """What blocks save on the host from their forward passes to their backward passes. Predicted."""

    memory_bytes: NonNegative = Field(description="of the host, for all processes of the node")
    copied_bytes: NonNegative = Field(description="in a step over the link between a process's device and the host")
    waits_s: Seconds = Field(description="of a step for copies that its compute does not hide")


class Layout(Record):
    """One way to train a model on some devices: sharding, parallelism, checkpointing and passes of a step. Predicted."""

    devices: dict[str, Devices] = Field(description="how many devices of each type it uses")
    sharding: Literal["none", "ddp", "fsdp", "hsdp"] = Field(description="none: one process holds everything")
    replicate: AtLeastOne = Field(default=1, description="groups that hold the whole state each")
    shard: AtLeastOne = Field(default=1, description="processes of such a group")
    reshard_after_forward: bool = Field(default=True, description="false: what is gathered stays for the backward pass")
    offload: OnHost | None = Field(
        default=None,
        description="parameters, gradients and optimizer states are in the hosts' memory; null: on the devices",
    )
    activations: SavedOnHost | None = Field(default=None, description="null: blocks save on the devices")
    tensor_parallel: AtLeastOne = Field(default=1, description="devices that share every block's products")
    pipeline_parallel: AtLeastOne = Field(default=1, description="devices that have some of the blocks each")
    checkpointing: Literal["none", "selective", "full", "chosen"] = Field(
        description="of every block; chosen: of the blocks and products that cost least time for the memory there is"
    )
    local_batch_sizes: dict[str, Count] = Field(description="device type to the most samples per step of one device")
    passes: AtLeastOne = Field(description="forward and backward passes of a step")
    compute_s: Seconds | None = Field(default=None, description="seconds that the slowest device computes in a step")
    step_s: Seconds | None = Field(default=None, description="seconds per step; null: it does not fit")
    low_s: Seconds | None = None
    high_s: Seconds | None = None
    memory_bytes: dict[str, NonNegative] = Field(description="device type to the most bytes of tensors of one process")
    missing_bytes: NonNegative = Field(
        default=0.0, description="what the device with too little memory lacks; 0: it fits"
    )
    price_per_sample: NonNegative | None = None
    mfu: NonNegative | None = Field(
        default=None, description="share of the step that products would take at the devices' dense peaks"
    )
    host_bound: bool = Field(default=False, description="the host that starts kernels decides the step")
    host_wait_s: Seconds = Field(
        default=0.0, description="seconds of a step in which the slowest device waits for its host"
    )

    @property
    def text(self) -> str:
        """The layout in words, such as "FSDP2, tensor parallel 2, full checkpointing"."""
        shared = {
            "none": "one process",
            "ddp": "DDP",
            "fsdp": "FSDP2" if self.reshard_after_forward else "FSDP2 without resharding",
            "hsdp": f"HSDP {self.replicate} x {self.shard}",
        }[self.sharding]
        parts = []
        if self.gpus == 1 or self.sharding != "none":  # a single replica of several GPUs is no "one process"
            parts.append(shared)
        if self.tensor_parallel > 1:
            parts.append(f"tensor parallel {self.tensor_parallel}")
        if self.pipeline_parallel > 1:
            parts.append(f"pipeline of {self.pipeline_parallel}")
        if self.checkpointing != "none":
            parts.append(f"{self.checkpointing} checkpointing")
        if self.activations:
            parts.append("activations on the host")
        if self.offload:
            parts.append("state on the host")
        return ", ".join(parts)

    @property
    def gpus(self) -> int:
        """Number of devices that hold one replica together: tensor times pipeline parallel."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def host_bytes(self) -> float:
        """Bytes of state and activations that the fullest host keeps; 0 for none."""
        return sum(kept.memory_bytes for kept in (self.offload, self.activations) if kept is not None)

    @property
    def devices_text(self) -> str:
        """The devices in words: "4 V100 + 2 P100"."""
        return " + ".join(f"{count} {name}" for name, count in self.devices.items())


class NothingFits(Infeasible):
    """No layout fits into memory; ``layouts`` are those that lack the fewest bytes."""

    def __init__(self, text: str, layouts: Sequence[Layout] = ()) -> None:
        """Make the error with the message ``text``."""
        super().__init__(text)
        self.layouts = list(layouts)


class Decision(Record):
    """The comparison behind a plan of strategy auto."""

    objective: Objective
    picked: str
    baseline: Option = Field(
        description="the best of what one would do without a plan: an equal split, communication as it comes"
    )
    baseline_name: str = Field(default="", description="what that is in words")
    baselines: dict[str, Option] = Field(
        default_factory=dict, description="all of them: over all devices, and over all of each type alone"
    )
    run: RunFigures | None = Field(default=None, description="of the picked plan; null: nobody said how long it is")
    failures: FailureFigures | None = Field(default=None, description="null: nothing fails")
    failure_factors: dict[str, RunFactors] = Field(
        default_factory=dict,
        description="number of devices to what failures and checkpoints make of a run on them; empty: nothing fails",
    )
    pareto: list[Option] = Field(
        default_factory=list,
        description="the fastest first, what nothing that was looked at is both faster and cheaper than; empty: no prices",
    )
    next_step: str = Field(default="", description="the command that would settle what is open, or carry the plan out")
    options: list[Option] = Field(description="best first for the objective")
    left_out: dict[str, str] = Field(default_factory=dict, description="strategy to why it is not compared")
    step_tokens: AtLeastOne | None = Field(
        default=None, description="of all samples of a step; null: not known, or no text"
    )
    layouts: list[Layout] = Field(
        default_factory=list,
        description="ways to shard and checkpoint the model: the picked one, the others, what does not fit",
    )
    words: list[str] = Field(
        description="the answer; why; how sure; what next; what else would save time, where something does"
    )
    named: list[Named] = Field(
        default_factory=list, description="the picked one of the numerics that the user named, then the others"
    )
    would_save: dict[str, NonNegative] = Field(
        default_factory=dict,
        description="what nobody asked for to the share of a step that it would save: torch.compile",
    )
    error: NonNegative | None = Field(
        default=None, description="relative error of the predicted compute times; null: given without one"
    )
    gain_error: NonNegative | None = Field(
        default=None,
        description="relative error of the gain over doing nothing; null: compute times have no known error",
    )
    too_close: list[str] = Field(
        default_factory=list,
        description="strategies that the error of the compute times does not tell from the picked one",
    )
    error_source: str = ""
    communication_source: str = ""

    def run_factors(self, devices: Mapping[str, int]) -> RunFactors:
        """Return what failures and checkpoints make of the time and price of a run on ``devices`` (number by type)."""
        return self.failure_factors.get(str(sum(devices.values())), RunFactors(time=1.0, price=1.0))

    @property
    def how_sure(self) -> str:
        """The sentence on how sure the answer is: the third of ``words``, without its heading; "" if there is none."""
        return self.words[2].removeprefix("How sure: ") if len(self.words) > 2 else ""
