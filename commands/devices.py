"""``ddltool devices``: the device types that are known, and one of them in full."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ddltool.commands.options import DEVICES
from ddltool.commands.output import out, print_json, say, table
from ddltool.device import Device, DeviceTable
from ddltool.shipped import known_devices

_CAPTION = (
    "GB/s: memory bandwidth; float32, tf32, 16 bit: 10^12 FLOP/s, dense; 16 bit: float16 accumulated in float32 and, from "
    "Ampere on, bfloat16; link: GB/s to the neighbours within a node, one way"
)


def devices(
    name: Annotated[str | None, DEVICES] = None,
    devices_file: Path | None = None,
    as_json: bool = False,
) -> None:
    """List the device types that are known: memory, rates and links, by datasheet; or one of them with its sources."""
    known = known_devices(devices_file)
    if name is not None:
        known = DeviceTable(devices=[known.device(name, "NAME")])
    if as_json:
        print_json(known.model_dump(mode="json"))
    elif name is not None:
        _show(known.devices[0])
    else:
        columns = ("device", "GiB", "GB/s", "float32", "tf32", "16 bit", "link", "")
        rows = [_row(device) for device in known.devices]
        out().print(table("Known devices", columns, rows, caption=_CAPTION))


def _row(device: Device) -> tuple[str, ...]:
    """Return a device's row in the table of all."""
    peaks = device.peak_flops
    return (
        device.name,
        f"{device.memory_gib:g}",
        f"{device.memory_bytes_per_s / 1e9:.4g}",
        _tera(peaks["float32"]),
        _tera(peaks.get("tf32")),
        _tera(peaks.get("float16", peaks.get("bfloat16"))),
        f"{device.link_bytes_per_s / 1e9:.4g}" if device.link_bytes_per_s else "-",
        device.link.partition(" ")[0],
    )


def _tera(rate: float | None) -> str:
    """Return a rate in 10^12 per second, "-" where it is not known."""
    return "-" if rate is None else f"{rate / 1e12:.4g}"


def _show(device: Device) -> None:
    """Print everything that is known of one device; what is not known is left out."""
    lines = {
        "architecture": device.architecture,
        "multiprocessors": f"{device.multiprocessors or ''}",
        "boost clock": _amount(device.clock_hz / 1e9, "GHz"),
        **{name: f"{_tera(rate)} x 10^12/s" for name, rate in device.peak_flops.items()},
        "memory": f"{device.memory_gib:g} GiB at {device.memory_bytes_per_s / 1e9:.4g} GB/s"
        + (", less a sixteenth for error-correcting codes" if device.ecc else ""),
        "last cache": _amount(device.l2_bytes / 2**20, "MiB"),
        "power": _amount(device.power_w, "W"),
        "link": ", ".join(filter(None, (_amount(device.link_bytes_per_s / 1e9, "GB/s one way"), device.link))),
        "price per hour": "" if device.price_per_hour is None else f"{device.price_per_hour:g}",
        "source": device.source,
        "note": device.note,
        "also called": ", ".join(device.aliases),
    }
    say(f"{device.name}: {device.title}" if device.title else device.name)
    for label, text in lines.items():
        if text:
            say(f"  {label:<16}{text}")


def _amount(value: float, unit: str) -> str:
    """Return a value with its unit, "" for 0: not known."""
    return f"{value:.4g} {unit}" if value else ""
