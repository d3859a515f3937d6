"""Decision: how the strategies compare for one job, which one was picked, and why. A part of a plan."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ddltool.artifacts import Record

Objective = Literal["fastest", "cheapest", "same-bits"]
Kept = Literal["none", "D0", "D1", "D2"]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Option(Record):
    """One strategy for the job, with its best communication order. All figures are predicted."""

    strategy: str
    devices: dict[str, int] = Field(description="how many devices of each type it uses")
    compute_s: Finite = Field(description="seconds per global step without communication")
    communication_s: Finite | None = Field(
        default=None, description="communication left exposed per step; null: not predicted"
    )
    other_s: Finite = Field(
        default=0.0, description="the rest of a step as an earlier run measured it: optimizer, loader, waiting"
    )
    iteration_s: Finite = Field(description="seconds per global step, exposed communication and the rest included")
    low_s: Finite | None = Field(default=None, description="lower end of iteration_s; null: its error is not known")
    high_s: Finite | None = None
    throughput: Finite = Field(description="logical mini-batches per second")
    goodput_per_s: Finite | None = Field(
        default=None, description="samples per second that count like samples at the initial batch; null: not known"
    )
    staleness: int = Field(default=0, description="iterations by which one worker may be ahead of another")
    determinism: Kept = Field(
        description="D0: same bits for the same placement; D1: on any number of devices of one type; D2: of any types"
    )
    price_per_sample: Finite | None = None
    order: str = Field(default="", description="what to set so that communication overlaps best")
    order_saves_s: Finite | None = Field(default=None, description="what that saves per step over the default")


class Decision(Record):
    """The comparison behind a plan of strategy auto."""

    objective: Objective
    picked: str
    baseline: Option = Field(description="doing nothing: an equal split over all devices, communication as it comes")
    options: list[Option] = Field(description="best first for the objective")
    left_out: dict[str, str] = Field(default_factory=dict, description="strategy to why it is not compared")
    words: list[str] = Field(description="why, what it gains over doing nothing, how sure that is")
    error: Finite | None = Field(
        default=None, description="relative error of the predicted compute times; null: given without one"
    )
    gain_error: Finite | None = Field(
        default=None,
        description="relative error of the gain over doing nothing; null: compute times have no known error",
    )
    too_close: list[str] = Field(
        default_factory=list,
        description="strategies that the error of the compute times does not tell from the picked one",
    )
    error_source: str = ""
    communication_source: str = ""
