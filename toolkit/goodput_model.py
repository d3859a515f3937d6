"""Goodput: the fitted throughput model as an artifact (kind ``ddltool.goodput``)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from ddltool.artifacts import Artifact, Record
from ddltool.errors import InputError, did_you_mean
from ddltool.quantities import AtLeastOne, NonNegative, Seconds


class ThroughputParams(Record):
    """The seven parameters (Pollux, section 3.2): seconds, seconds per sample or further replica, the overlap exponent."""

    alpha_grad_s: Seconds
    beta_grad_s: Seconds
    alpha_sync_local_s: Seconds
    beta_sync_local_s: Seconds
    alpha_sync_node_s: Seconds
    beta_sync_node_s: Seconds
    gamma: Annotated[float, Field(ge=1, le=10, allow_inf_nan=False)]


class FitError(Record):
    """Error of predicted against measured step times."""

    rmsle: NonNegative
    mape: NonNegative
    samples: AtLeastOne


class ParameterInterval(Record):
    """What the rows alone say about one parameter, at 90 % confidence."""

    low: NonNegative
    high: NonNegative | None = Field(description="null: the rows set no upper limit")
    reason: str = Field(default="", description="why the rows do not determine it; empty when they do")


class DeviceGoodput(Record):
    """The model of one device type among several."""

    params: ThroughputParams
    rmsle: NonNegative
    mape: NonNegative
    samples: AtLeastOne
    undetermined: list[str]
    holdout: FitError | None = None
    intervals: dict[str, ParameterInterval] = Field(default_factory=dict)


# Said only where there is something to say, so that the document of one device stays short.
_OCCASIONAL = ("devices", "shared_network", "network_choice", "note")


class Goodput(Artifact):
    """A throughput model fitted to measured step times; of several device types, one model each."""

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
        """Return the parameters of a device type: its own when the file has it, else those at the top.

        The file of one device type says nothing about its name, so it answers for any; a file of several refuses a type
        that it does not know: InputError.
        """
        if not self.devices:
            return self.params
        if device not in self.devices:
            raise InputError("devices", f"has no {device}", did_you_mean(device, self.devices))
        return self.devices[device].params

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the document without the fields that only some models have, where they are empty.

        ``handler`` makes the whole document.
        """
        document: dict[str, Any] = handler(self)
        return {
            name: value
            for name, value in document.items()
            if name not in _OCCASIONAL or value not in (None, "", [], {})
        }
