"""Goodput: the fitted throughput model as an artifact (kind ``ddltool.goodput``)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from ddltool.artifacts import Artifact, Record
from ddltool.errors import InputError, did_you_mean
from ddltool.quantities import AtLeastOne, NonNegative, Seconds


class ThroughputParams(Record):
    """The seven parameters of the throughput model (Pollux, section 3.2).

    alpha_grad_s + beta_grad_s * local batch is the time of a gradient; alpha_sync + beta_sync * (replicas - 2) that of
    synchronising it, within one node (local) or across nodes; gamma, 1 to 10, says how far the two overlap.
    """

    alpha_grad_s: Seconds
    beta_grad_s: Seconds
    alpha_sync_local_s: Seconds
    beta_sync_local_s: Seconds
    alpha_sync_node_s: Seconds
    beta_sync_node_s: Seconds
    gamma: Annotated[float, Field(ge=1, le=10, allow_inf_nan=False)]


class FitError(Record):
    """Errors of predicted against measured step times; ``rmsle``: root mean square of the logarithms' differences."""

    rmsle: NonNegative
    mape: NonNegative
    samples: AtLeastOne


class ParameterInterval(Record):
    """The 90 % confidence interval of one parameter that follows from the rows alone, without its prior."""

    low: NonNegative
    high: NonNegative | None = Field(description="null: the rows set no upper limit")
    reason: str = Field(default="", description="why the rows do not determine it; empty when they do")


class DeviceGoodput(Record):
    """The model of one device type among several; the fields are those of :class:`Goodput`."""

    params: ThroughputParams
    rmsle: NonNegative
    mape: NonNegative
    samples: AtLeastOne
    undetermined: list[str]
    holdout: FitError | None = None
    intervals: dict[str, ParameterInterval] = Field(default_factory=dict)


# Fields that are left out of the document when empty, so that the document of one device stays short.
_OCCASIONAL = ("devices", "shared_network", "network_choice", "note")


class Goodput(Artifact):
    """A throughput model fitted to measured step times; for several device types, one model of each."""

    kind: Literal["ddltool.goodput"] = "ddltool.goodput"
    sources: list[str] = Field(description="the files that were fitted")
    params: ThroughputParams
    rmsle: NonNegative = Field(description="error of the logarithms of the step times that were fitted")
    mape: NonNegative = Field(description="mean of |fitted / measured - 1|")
    samples: AtLeastOne = Field(description="rows behind the fit")
    fit_seconds: Seconds
    undetermined: list[str] = Field(description="parameters that the data do not determine; they keep their prior")
    holdout: FitError | None = Field(default=None, description="the errors on rows kept out of the fit")
    intervals: dict[str, ParameterInterval] = Field(default_factory=dict, description="of each parameter, 90 %")
    devices: dict[str, DeviceGoodput] = Field(default_factory=dict, description="by type, when the rows name several")
    shared_network: bool | None = Field(
        default=None, description="whether a type has gamma and synchronisation of another"
    )
    network_choice: str = Field(default="", description="which types have whose")
    note: str = Field(default="", description="whose params are at the top when there are several devices")

    def params_of(self, device: str) -> ThroughputParams:
        """Return the parameters of a device type.

        A file of one device type does not name it, so its parameters are returned for any type. A file of several types
        raises InputError for a type that it does not have.
        """
        if not self.devices:
            return self.params
        if device not in self.devices:
            raise InputError("devices", f"has no {device}", did_you_mean(device, self.devices))
        return self.devices[device].params

    @model_serializer(mode="wrap")
    def _serialize_without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the document without the fields of ``_OCCASIONAL`` that are empty; ``handler`` makes the whole one."""
        document: dict[str, Any] = handler(self)
        return {
            name: value
            for name, value in document.items()
            if name not in _OCCASIONAL or value not in (None, "", [], {})
        }
