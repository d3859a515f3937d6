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
