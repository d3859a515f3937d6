"""Calibration: the file of the cost model's constants, with their sources and the errors of predictions made with them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from ddltool.artifacts import Artifact, Record
from ddltool.quantities import Count, Duration, NonNegative, Positive

Shares = dict[str, Positive]
"""Positive numbers by unit, class of kernel or architecture: shares of a peak, or factors on shares (1: no change)."""
# The units of which a generation or a device may have factors: matrix units, float32 units, memory.
UNITS = ("tensor", "vector", "memory")


class Residuals(Record):
    """The middle 80 % of measured / predicted times in cross-validation, from ``low`` to ``high``."""

    low: Positive
    high: Positive
    median_error: NonNegative = Field(description="of |predicted / measured - 1|")
    rows: Count
    what: str = Field(description="what was left out of the fit")

    @model_validator(mode="after")
    def _check_range(self) -> Residuals:
        """Refuse a range of measured over predicted that does not contain 1, the prediction itself."""
        if not self.low <= 1.0 <= self.high:
            raise ValueError(f"low is {self.low:g} and high {self.high:g}; the prediction itself, 1, lies between them")
        return self


class DeviceFit(Record):
    """Constants of one device fitted to a user's own measurements, which replace the shipped ones."""

    units: Shares = Field(description="factors on the shares of matrix units, float32 units and memory")
    issue_s: Duration
    start_s: Duration
    update_s: Duration
    residuals: Residuals
    source: str = Field(description="the files that it was fitted to")

    @field_validator("units")
    @classmethod
    def _check_units(cls, units: dict[str, float]) -> dict[str, float]:
        """Refuse ``units`` whose keys are not exactly the three of ``UNITS``."""
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
