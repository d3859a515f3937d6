"""What load balancing did while a job ran, one JSON object per line (kind ``ddltool.balance_event``)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ddltool.artifacts import SCHEMA_VERSION, AtLeastOne, Count, Positive, Record


class BalanceEvent(Record):
    """One change of batch sizes, or advice. Times are measured."""

    kind: Literal["ddltool.balance_event"] = "ddltool.balance_event"
    schema_version: int = SCHEMA_VERSION
    event: Literal["resize", "fine_tuning", "remove_straggler"]
    step: Count = Field(description="the step whose times led to this, from 0")
    sizes: list[AtLeastOne] = Field(description="samples of each rank from the next step that was not loaded yet")
    seconds: list[Positive] = Field(description="each rank's computation in that step")
    rank: Count | None = Field(default=None, description="the straggler that is advised to go")
