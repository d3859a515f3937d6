"""``ddltool devices``: the device types that are known, and one of them in full."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from ddltool.commands.options import DEVICES
from ddltool.commands.output import out, print_json, say, table
from ddltool.commands.verbs import VerbCall, refuse, verb
from ddltool.device import Device, DeviceTable
from ddltool.errors import InputError
from ddltool.graph_results import OperationsResult
from ddltool.shipped import calibration, known_devices
from ddltool.units import show_seconds, show_span

_CAPTION = (
    "GB/s: memory bandwidth; float32, tf32, 16 bit: 10^12 FLOP/s, dense; 16 bit: float16 accumulated in float32 and, from "
    "Ampere on, bfloat16; link: GB/s to the neighbours within a node, one way"
)


@verb
def devices(
    name: Annotated[str | None, DEVICES] = None,
    *,
    devices_file: Path | None = None,
    product: Sequence[str] = (),
    collective: Sequence[str] = (),
    precision: str = "bf16",
) -> DeviceTable | OperationsResult:
    """List the device types that are known: memory, rates and links, by datasheet; or one of them, or an operation on it.

    ``name``: one device type; None: all. ``product`` (``["4096x4096x4096"]``) and ``collective``
    (``["all-reduce:64MiB:8"]``): operations whose time on it is predicted, with its range and what limits it; products
    in ``precision``. ``devices_file``: device types of your own. Raises InputError for an unknown name.
    """
    known = known_devices(devices_file)
    if product or collective:
        if name is None:
            raise InputError("NAME", "no device is named", "name the one that runs the operations, such as H100")
        return _time_operations(known.gpu(name, "NAME"), product, collective, precision)
    refuse("a list of devices", ("precision",), instead="give --product, too, or leave it out")
    return known if name is None else DeviceTable(devices=[known.device(name, "NAME")])


def show_devices(call: VerbCall[DeviceTable | OperationsResult], as_json: bool = False) -> None:
    """Print the table of all devices, one device in full, or the times of operations."""
    found = call()
    if as_json:
        print_json(found.model_dump(mode="json"))
    elif isinstance(found, OperationsResult):
        _print_operations(found)
    elif call["name"] is not None:
        _print_device(found.devices[0])
    else:
        columns = ("device", "GiB", "GB/s", "float32", "tf32", "16 bit", "link", "")
        rows = [_table_row(device) for device in found.devices]
        out().print(table("Known devices", columns, rows, caption=_CAPTION))


def _time_operations(
    device: Device, products: Sequence[str], collectives: Sequence[str], precision: str
) -> OperationsResult:
    """Return the predicted times of single operations on a device, products first.

    ``products``: texts such as "4096x4096x4096"; ``collectives``: texts such as "all-reduce:64MiB:8". ``precision``: of the
    products.
    """
    from ddltool.analyzers.step.costs.model import cost_model  # imported late: listing devices does not need it
    from ddltool.analyzers.step.costs.operations import time_collective, time_product

    model = cost_model(device, calibration())
    rows = [time_product(model, text, precision) for text in products]
    rows += [time_collective(model, text) for text in collectives]
    return OperationsResult(device=device.name, rows=rows)


def _print_operations(operations: OperationsResult) -> None:
    """Print each operation's time with its range, and the resource that limits it."""
    for row in operations.rows:
        span = show_span(row.low_s, row.high_s)
        say(f"{operations.device}, {row.operation}: {show_seconds(row.time_s)} ({span}), predicted")
        say(f"  limited by {row.limit}")


def _table_row(device: Device) -> tuple[str, ...]:
    """Return a device's cells in the table of all devices."""
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
    """Return a rate in 10^12 per second as text; "-" for None."""
    return "-" if rate is None else f"{rate / 1e12:.4g}"


def _print_device(device: Device) -> None:
    """Print all figures of one device that are known."""
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
    """Return a value with its unit; "" for 0, which means not known."""
    return f"{value:.4g} {unit}" if value else ""
