"""Device and Network: what the roofline needs to know about hardware."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ddltool.artifacts import Artifact, Record
from ddltool.errors import InputError, did_you_mean

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Device(Record):
    """One device type, with datasheet figures and where they were read."""

    name: str
    title: str
    peak_flops: dict[str, Positive] = Field(description="FLOP/s by torch dtype name, dense; float32 is required")
    memory_bytes_per_s: Positive
    memory_gib: Positive
    source: str = Field(description="the datasheet")
    note: str = ""

    def peak_for(self, dtype: str) -> float:
        """Return FLOP/s for a dtype name; types without a figure of their own run at the float32 rate."""
        return self.peak_flops.get(dtype, self.peak_flops["float32"])


class DeviceTable(Artifact):
    """The known device types (kind ``ddltool.devices``)."""

    KIND: ClassVar[str] = "ddltool.devices"
    kind: Literal["ddltool.devices"] = "ddltool.devices"
    devices: list[Device]

    def device(self, name: str, where: str = "--device") -> Device:
        """Return the device of that name, upper and lower case alike. Raises InputError naming the nearest."""
        by_name = {device.name.casefold(): device for device in self.devices}
        found = by_name.get(name.casefold())
        if found is None:
            names = [device.name for device in self.devices]
            raise InputError(where, f"unknown device {name!r}", did_you_mean(name, names))
        return found


class Network(Record):
    """The worker's connection: one channel per parameter server, each at the full rate."""

    bandwidth_bytes_per_s: Positive = 1.25e9
    latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 50e-6
    parameter_servers: Annotated[int, Field(ge=1, le=10_000)] = 1
