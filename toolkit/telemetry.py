"""Telemetry: what the hook writes down, one JSON object per line (kind ``ddltool.telemetry``)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ddltool.artifacts import SCHEMA_VERSION, AtLeastOne, Count, NonNegative, Positive, Record


class TelemetryRow(Record):
    """One optimizer step of one process. All figures are measured."""

    kind: Literal["ddltool.telemetry"] = "ddltool.telemetry"
    schema_version: int = SCHEMA_VERSION
    step: Count
    rank: Count
    world_size: AtLeastOne
    num_nodes: AtLeastOne
    device: str
    batch: Count = Field(description="samples that this rank processed in the step")
    total_batch: Count = Field(description="samples of all ranks together")
    compute_s: NonNegative = Field(description="forward and backward until the local gradients were complete")
    wait_s: NonNegative = Field(description="from then until the slowest rank's gradients were complete")
    sync_s: NonNegative = Field(description="from then until the averaged gradients were in place")
    step_s: NonNegative = Field(
        description="from the end of the previous update, or an epoch's first forward pass, to the end of this one"
    )
    memory_bytes: Annotated[float, Field(ge=0)] = Field(description="peak memory of the process so far")
    passes: AtLeastOne = Field(default=1, description="forward and backward passes of this rank")
    learning_rate_factor: NonNegative | None = Field(
        default=None, description="what a goodput agent multiplied the learning rate by"
    )
    noise_scale: NonNegative | None = Field(
        default=None, description="gradient noise scale in samples, as a goodput agent knew it"
    )


class BalanceEvent(Record):
    """One change of batch sizes, or advice. Times are measured."""

    kind: Literal["ddltool.balance_event"] = "ddltool.balance_event"
    schema_version: int = SCHEMA_VERSION
    event: Literal["resize", "fine_tuning", "remove_straggler"]
    step: Count = Field(description="the step whose times led to this, from 0")
    sizes: list[AtLeastOne] = Field(description="samples of each rank from the next step that was not loaded yet")
    seconds: list[Positive] = Field(description="each rank's computation in that step")
    rank: Count | None = Field(default=None, description="the straggler that is advised to go")
