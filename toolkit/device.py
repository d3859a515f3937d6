"""Device, DeviceTable and Network: the figures of hardware from which times are estimated."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from ddltool.artifacts import Artifact, Record
from ddltool.calibration import DeviceFit
from ddltool.errors import InputError, did_you_mean
from ddltool.quantities import Name, NonNegative, Positive, Price, Rate, Seconds

# NVIDIA's, the oldest first.
Generation = Literal["Kepler", "Maxwell", "Pascal", "Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell"]
Architecture = Literal["", Generation, "CDNA", "CDNA2", "CDNA3", "CDNA4", "CPU"]
# Generations with two kinds of chips: for data centres (HBM, fast float64 or wide matrix units) and for graphics.
_BOTH = ("Pascal", "Ampere", "Blackwell")
# The ``source`` of a device whose figures are not the shipped ones begins with this.
GIVEN = "given by the user"
# Devices of a node if nothing else is known: boards of NVLink modules have eight.
DEVICES_PER_NODE = 8
# The ``link`` of a device begins with this if its rate was measured.
MEASURED = "measured"
# The number types of which a device may have a rate.
PEAKS = ("float64", "float32", "tf32", "float16", "bfloat16", "float8", "float4", "int8", "int4")

# Words before a device's name that tell nothing.
_MAKERS = re.compile("(nvidia|amd|tesla|geforce|instinct)+(?=.)")


def name_key(name: str) -> str:
    """Return a device's name in lower case without blanks, hyphens, underscores and maker: equal for all its spellings.

    >>> name_key("NVIDIA GeForce RTX 3090") == name_key("rtx3090")
    True
    """
    return _MAKERS.sub("", re.sub(r"[\s_-]", "", name.casefold()), count=1) if name else name


class Device(Record):
    """One device type: its figures and their source. 0 and "" mean: not known."""

    name: Name
    title: str = ""
    architecture: Architecture = Field(default="", description="the maker's name of the chip's generation")
    multiprocessors: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=0, description="streaming multiprocessors (NVIDIA) or compute units (AMD)"
    )
    clock_hz: NonNegative = Field(default=0.0, description="boost clock")
    peak_flops: dict[str, Positive] = Field(
        description="FLOP/s by torch dtype name, dense, 16-bit types accumulated in float32; float32 (outside tensor cores) "
        "is required, and matrix products of float32 through tf32 stand under tf32"
    )
    memory_bytes_per_s: Rate
    memory_gib: Positive
    ecc: bool = Field(
        default=False, description="whether error-correcting codes take a sixteenth of its memory and of its traffic"
    )
    l2_bytes: NonNegative = Field(default=0.0, description="last cache on the chip before its memory")
    power_w: NonNegative = Field(default=0.0, description="the maker's limit: TDP or board power")
    link_bytes_per_s: NonNegative = Field(
        default=0.0, description="what one device can send to its neighbours within a node, one way, all links together"
    )
    link: str = Field(default="", description="what that connection is")
    price_per_hour: Price | None = Field(default=None, description="of one device, in US dollars")
    source: str = Field(default=GIVEN, description="the datasheet")
    note: str = ""
    fitted: DeviceFit | None = Field(default=None, description="what `ddltool calibrate` found from measured rows")
    aliases: list[str] = Field(default_factory=list, description="other names, such as torch.cuda.get_device_name's")

    @field_validator("peak_flops")
    @classmethod
    def _check_number_types(cls, peaks: dict[str, float]) -> dict[str, float]:
        """Refuse unknown number types, and a device without a rate of float32, which stands in for missing ones."""
        for name in peaks:
            if name not in PEAKS:
                raise ValueError(f"names the type {name!r}; {did_you_mean(name, PEAKS)}")
        if "float32" not in peaks:
            raise ValueError("has no float32; give at least float32: FLOP/s outside tensor cores")
        return peaks

    @property
    def free_of_codes(self) -> float:
        """The share of memory and of its traffic that is free of error-correcting codes: 15/16 with them, else 1."""
        return 15.0 / 16.0 if self.ecc else 1.0

    @property
    def branch(self) -> str:
        """The class of similar chips: the generation, plus " HBM" for data centre chips of a generation with two kinds."""
        float32_peak = self.peak_flops["float32"]
        double_rate = self.peak_flops.get("float64", 0.0) / float32_peak
        half_rate = self.peak_flops.get("float16", 0.0) / float32_peak
        # Graphics chips compute float64 at most at 1/32 of the float32 rate, and float16 at less than ten times it.
        is_data_centre = self.architecture in _BOTH and (double_rate >= 0.25 or half_rate >= 10.0)
        return f"{self.architecture} HBM" if is_data_centre else self.architecture

    def runs_like(self, other: Device) -> bool:
        """Return whether another device has the same figures on which the time of a step depends."""
        figures = {"multiprocessors", "clock_hz", "peak_flops", "memory_bytes_per_s", "l2_bytes", "power_w"}
        return all(getattr(self, name) == getattr(other, name) for name in figures | {"architecture"})

    def demand_rate(self, dtype: str, precision: str) -> None:
        """Raise InputError if the device has no rate for ``dtype``, the type in which ``precision`` (its name) computes."""
        if dtype not in self.peak_flops:
            rates = ", ".join(self.peak_flops)
            raise InputError("--precision", f"{self.name} has no rate for {precision}", f"its datasheet has {rates}")

    def peak_for(self, dtype: str) -> float:
        """Return the peak FLOP/s of a number type, by torch's name; that of float32 for a type without a rate."""
        name = "float8" if dtype.startswith("float8_") else dtype
        return self.peak_flops.get(name, self.peak_flops["float32"])


# Of a CPU where a GPU is asked for: what is wrong, and what would be right.
_NO_GPU = (
    "is no GPU, and the steps of a CPU are measured, not predicted",
    "ddltool profile SOURCE -o profile.csv, which fit and plan read as it is",
)


class DeviceTable(Artifact):
    """The known device types (kind ``ddltool.devices``)."""

    kind: Literal["ddltool.devices"] = "ddltool.devices"
    devices: list[Device]

    def find(self, name: str) -> Device | None:
        """Return the device with this name or alias, however spelt (:func:`name_key`); None if there is none.

        A name wins over another device's alias.
        """
        key = name_key(name)
        by_name = (device for device in self.devices if name_key(device.name) == key)
        by_alias = (device for device in self.devices if key in map(name_key, device.aliases))
        return next(by_name, None) or next(by_alias, None)

    def device(self, name: str, where: str = "--device") -> Device:
        """Return the device that :meth:`find` finds. Raises InputError, with the most similar name, if it finds none.

        ``where``: the option or field that has the name, for the error.
        """
        device = self.find(name)
        if device is None and name_key(name).startswith("cpu"):
            raise InputError(where, f"{name} {_NO_GPU[0]}", _NO_GPU[1])
        if device is None:
            raise InputError(
                where, f"unknown device {name!r}", did_you_mean(name, [spec.name for spec in self.devices])
            )
        return device

    def gpu(self, name: str, where: str = "--device") -> Device:
        """Return the device that :meth:`device` returns. Raises InputError as that does, and for a CPU."""
        device = self.device(name, where)
        if device.architecture == "CPU" or device.name.startswith("cpu"):
            raise InputError(where, f"{device.name} {_NO_GPU[0]}", _NO_GPU[1])
        return device

    def with_devices(self, own: list[Device]) -> DeviceTable:
        """Return a table of the devices ``own``, then those of this table that have none of their names."""
        names = {name_key(device.name) for device in own}
        return DeviceTable(devices=own + [each for each in self.devices if name_key(each.name) not in names])


class Network(Record):
    """A worker's connection to the parameter servers: one channel to each, all at the full rate."""

    bandwidth_bytes_per_s: Rate = 1.25e9
    latency_s: Seconds = 50e-6
    parameter_servers: Annotated[int, Field(ge=1, le=10_000)] = 1
