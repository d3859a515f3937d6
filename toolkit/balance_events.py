"""What load balancing did while a job ran, one JSON object per line (kind ``ddltool.balance_event``)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ddltool.artifacts import SCHEMA_VERSION, Positive, Record

Size = Annotated[int, Field(ge=1)]


class BalanceEvent(Record):
    """One change of batch sizes, or advice. Times are measured."""

    kind: Literal["ddltool.balance_event"] = "ddltool.balance_event"
    schema_version: int = SCHEMA_VERSION
    event: Literal["resize", "fine_tuning", "remove_straggler"]
    step: Annotated[int, Field(ge=0)] = Field(description="the step whose times led to this, from 0")
    sizes: list[Size] = Field(description="samples of each rank from the next step that was not loaded yet")
    seconds: list[Positive] = Field(description="each rank's computation in that step")
    rank: Annotated[int, Field(ge=0)] | None = Field(default=None, description="the straggler that is advised to go")
