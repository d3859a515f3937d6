"""Calibration: the constants of the cost model as a file, where they come from, and how far off they were."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from ddltool.artifacts import Artifact, Record
from ddltool.quantities import Count, Duration, NonNegative, Positive

Shares = dict[str, Positive]
"""Factors by unit, class of kernel or architecture; 1 changes nothing."""
# What a generation or a device has factors on: matrix units, float32 units, memory.
UNITS = ("tensor", "vector", "memory")


class Residuals(Record):
    """Where measured / predicted lay in cross-validation: the middle 80 % of rows, and how many there were."""

    low: Positive
    high: Positive
    median_error: NonNegative = Field(description="of |predicted / measured - 1|")
    rows: Count
    what: str = Field(description="what was left out of the fit")

    @model_validator(mode="after")
    def _check_range(self) -> Residuals:
        """Refuse a range of measured over predicted that does not hold the prediction itself, 1."""
        if not self.low <= 1.0 <= self.high:
            raise ValueError(f"low is {self.low:g} and high {self.high:g}; the prediction itself, 1, lies between them")
        return self


class DeviceFit(Record):
    """What a user's own measurements say about one device, in place of the shipped constants."""

    units: Shares = Field(description="factors on the shares of matrix units, float32 units and memory")
    issue_s: Duration
    start_s: Duration
    update_s: Duration
    residuals: Residuals
    source: str = Field(description="the files that it was fitted to")

    @field_validator("units")
    @classmethod
    def _check_units(cls, units: dict[str, float]) -> dict[str, float]:
        """Refuse factors that are not exactly those of the three units."""
        if set(units) != set(UNITS):
            raise ValueError(f"has {', '.join(sorted(units)) or 'nothing'}; give exactly {', '.join(UNITS)}")
        return units


class CalibrationTable(Artifact):
    """The shipped constants (kind ``ddltool.calibration``); see ``ddltool.analyzers.step.costs.kernel_times.Constants``."""

    kind: Literal["ddltool.calibration"] = "ddltool.calibration"
    arithmetic: Shares = Field(description="share of peak FLOP/s by class of kernel")
    traffic: Shares = Field(description="share of the memory's bandwidth by class of kernel")
    feed: Shares = Field(description="operations per cycle for which a multiprocessor can feed its matrix units")
    carried: Shares = Field(description="bytes that a multiprocessor moves per cycle, by class of kernel")
    start_s: Duration = Field(description="between two kernels on the device")
    cache: Positive = Field(description="share of a kernel's traffic that the last cache saves where all of it fits")
    issue_s: Duration = Field(description="in which the host issues one op")
    update_s: Duration = Field(description="of the update per parameter tensor, beside its traffic")
    turn_s: Duration = Field(description="between two steps of a recurrent layer")
    generations: dict[str, Shares] = Field(description="factors of an architecture: tensor, vector, memory")
    devices: list[str] = Field(description="devices whose measured rows say how far off predictions are")
    judged: list[str] = Field(description="the architectures of these devices")
    residuals: dict[
        Literal["device", "generation", "unknown", "host", "library", "product", "collective", "compiled"], Residuals
    ] = Field(
        description="device: another model on a device of the fit; generation: on another device of a generation of the fit; "
        "unknown: on a generation that the fit did not see; host: a step bound by the host; "
        "library: a step of kernels that differ by the library's version; "
        "product, collective: such an operation by itself; compiled: a step under torch.compile"
    )
    provenance: list[str] = Field(
        description="one line per source of measured rows: where, rows, what was excluded and why"
    )
