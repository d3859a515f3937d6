"""Goodput: the fitted throughput model as an artifact (kind ``ddltool.goodput``)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ddltool.artifacts import Artifact, Record

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ThroughputRecord(Record):
    """The seven parameters of the throughput model (Pollux, section 3.2)."""

    alpha_grad_s: NonNegative
    beta_grad_s: NonNegative
    alpha_sync_local_s: NonNegative
    beta_sync_local_s: NonNegative
    alpha_sync_node_s: NonNegative
    beta_sync_node_s: NonNegative
    gamma: Annotated[float, Field(ge=1, le=10)]


class FitError(Record):
    """Error of predicted against measured step times."""

    rmsle: NonNegative
    mape: NonNegative
    samples: Annotated[int, Field(ge=1)]


class ParameterInterval(Record):
    """What the rows alone say about one parameter, at 90 % confidence."""

    low: NonNegative
    high: NonNegative | None = Field(description="null: the rows set no upper limit")
    reason: str = Field(default="", description="why the rows do not determine it; empty when they do")


class NextMeasurement(Record):
    """The configuration whose measurement would make predictions most certain."""

    num_nodes: Annotated[int, Field(ge=1)]
    num_replicas: Annotated[int, Field(ge=1)]
    local_batch_size: Annotated[int, Field(ge=1)]
    variance_reduction: NonNegative = Field(
        description="share of the variance of predicted log step times that it removes"
    )


class Goodput(Artifact):
    """A throughput model fitted to measured step times."""

    KIND: ClassVar[str] = "ddltool.goodput"
    kind: Literal["ddltool.goodput"] = "ddltool.goodput"
    sources: list[str] = Field(description="the files that were fitted")
    params: ThroughputRecord
    rmsle: NonNegative
    mape: NonNegative
    samples: Annotated[int, Field(ge=1)]
    fit_seconds: NonNegative
    undetermined: list[str] = Field(description="parameters that the data do not determine; they keep their prior")
    holdout: FitError | None = None
    intervals: dict[str, ParameterInterval] = Field(default_factory=dict)
    next_measurement: NextMeasurement | None = None
