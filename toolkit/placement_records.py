"""What a plan says about its nodes, and about leaving the current plan."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ddltool.artifacts import Record

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Choice = Literal["one device", "one node", "several nodes"]


class NetworkCost(Record):
    """Where the devices stand and what synchronising them costs. Predicted."""

    choice: Choice
    num_nodes: Annotated[int, Field(ge=1)]
    num_replicas: Annotated[int, Field(ge=1)]
    compute_s: Seconds = Field(description="seconds of the slowest device's ESTs")
    sync_s: Seconds = Field(description="seconds of one gradient synchronisation, before any overlap")
    best_steps: dict[Choice, Seconds] = Field(description="the best step time of each choice that is possible")


class Migration(Record):
    """Whether a plan pays for leaving the current one."""

    stay: bool = Field(description="the current plan is kept")
    devices_moved: Annotated[int, Field(ge=0)] = Field(
        description="devices to give back and to take, in the other plan"
    )
    migration_s: Seconds
    horizon_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    current_throughput: Seconds | None = Field(description="null: the current plan is no longer possible")
    other_throughput: Seconds = Field(description="of the best plan, while it runs")
    pays_after_s: Seconds | None = Field(
        description="horizon from which on moving pays; null: never (or there is nothing to move)"
    )
