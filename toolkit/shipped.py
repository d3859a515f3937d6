"""The data files that ship with the code (devices, constants, graphs), and the devices that a user adds to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ddltool.artifacts import parse, parse_record, read_document
from ddltool.calibration import CalibrationTable
from ddltool.device import GIVEN, Device, DeviceTable, name_key
from ddltool.errors import InputError
from ddltool.job import Job
from ddltool.schema_words import shown

# Fields that ``like`` does not pass on: they describe the other device alone.
_NOT_INHERITED = {"name", "title", "source", "note", "aliases", "fitted"}


@cache
def devices() -> DeviceTable:
    """Return the table of known device types."""
    text = resources.files("ddltool.fixtures").joinpath("devices.json").read_text(encoding="utf-8")
    return parse(json.loads(text), DeviceTable, "devices.json")


@cache
def calibration() -> CalibrationTable:
    """Return the shipped constants of the cost model, which ``benchmarks/calibrate.py`` fitted to measured steps."""
    text = resources.files("ddltool.fixtures").joinpath("calibration.json").read_text(encoding="utf-8")
    return parse(json.loads(text), CalibrationTable, "calibration.json")


def known_devices(extra: Path | None = None) -> DeviceTable:
    """Return the devices of the user's file ``extra`` (kind ``ddltool.devices``; None: no file), then the shipped ones.

    An entry replaces a shipped device of the same name. Fields that it lacks come from the device that it names as
    ``like``: a shipped one, or an earlier one of the file. Raises InputError for a file that is wrong or unreadable.
    """
    return devices() if extra is None else devices().with_devices(_read_user_devices(extra))


def with_specs(job: Job, where: str, extra: Path | None = None) -> Job:
    """Return a copy of the job with a complete ``spec`` for each device type that its ``spec`` or the file ``extra`` describes.

    The job's own ``spec`` wins. An offer without memory or price gets those of the device. Raises InputError for a file
    or a spec that is wrong. ``where``: the job's file, for errors.
    """
    device_by_type = _described_devices(job, where, [] if extra is None else _read_user_devices(extra))
    offers = []
    for offer in job.devices:
        if (device := device_by_type.get(offer.type)) is not None:
            missing_fields = [name for name in ("memory_gib", "price_per_hour") if getattr(offer, name) is None]
            update = {name: getattr(device, name) for name in missing_fields}
            offer = offer.model_copy(update={**update, "spec": device.model_dump(exclude={"name"})})
        offers.append(offer)
    return job.model_copy(update={"devices": offers})


def devices_of(job: Job, where: str) -> DeviceTable:
    """Return the devices that the job's specs describe, then the shipped ones. Raises InputError for a wrong spec."""
    return devices().with_devices(list(_described_devices(job, where, []).values()))


def _described_devices(job: Job, where: str, user_devices: list[Device]) -> dict[str, Device]:
    """Return by type the devices that an offer's ``spec``, or else one of ``user_devices``, describes; others are left out."""
    known_table, device_by_type = devices().with_devices(user_devices), {}
    for offer_index, offer in enumerate(job.devices):
        device = DeviceTable(devices=user_devices).find(offer.type)
        if offer.spec is not None:
            device = _device_with_source(
                {**offer.spec, "name": offer.type}, known_table, where, f"devices[{offer_index}].spec"
            )
        if device is not None:
            device_by_type[offer.type] = device
    return device_by_type


def _read_user_devices(path: Path) -> list[Device]:
    """Return the devices of a user's file, in file order; ``like`` may name a shipped device or an earlier entry.

    Raises InputError for a wrong entry, and for a name that two entries have.
    """
    document, where = read_document(path), str(path)
    entries = document.get("devices")
    if not isinstance(entries, list):
        return parse(document, DeviceTable, where).devices  # raises the error about it
    # The file without its entries is checked first; then each entry, as one may build on another.
    parse({**document, "devices": []}, DeviceTable, where)
    devices_so_far: list[Device] = []
    for entry_index, entry in enumerate(entries):
        device = _device_with_source(entry, devices().with_devices(devices_so_far), where, f"devices[{entry_index}]")
        if name_key(device.name) in {name_key(device_before.name) for device_before in devices_so_far}:
            raise InputError(
                f"{where}:devices[{entry_index}].name", f"{device.name!r} stands twice", "keep one of the two"
            )
        devices_so_far.append(device)
    return devices_so_far


def _device_with_source(entry: Any, known: DeviceTable, where: str, inside: str) -> Device:
    """Return the device of an entry. If a shipped device has its name but other figures, ``source`` begins with ``GIVEN``.

    Measurements of a shipped device do not hold for such an entry; with equal figures, ``source`` is the shipped one's.
    ``entry``, ``known``, ``where`` and ``inside``: see :func:`_parse_device`.
    """
    device = _parse_device(entry, known, where, inside)
    shipped = devices().find(device.name)
    if shipped is None:
        return device
    if device.runs_like(shipped):
        return device.model_copy(update={"source": shipped.source})
    given_source = device.source if device.source.startswith(GIVEN) else f"{GIVEN}; {device.source}"
    return device.model_copy(update={"source": given_source})


def _parse_device(entry: Any, known: DeviceTable, where: str, inside: str) -> Device:
    """Return the device of an entry; fields that it lacks come from the device in ``known`` that it names as ``like``.

    Of ``peak_flops`` each rate is inherited by itself. Raises InputError for a wrong field and for an unknown device.
    ``where``: the file; ``inside``: the entry's path in it, such as ``devices[0]``; both for errors.
    """
    if not isinstance(entry, Mapping) or "like" not in entry:
        return parse_record(entry, Device, where, inside)
    given_fields = {name: value for name, value in entry.items() if name != "like"}
    like_place = f"{where}:{inside}.like"
    if not isinstance(entry["like"], str):
        raise InputError(like_place, f"is {shown(entry['like'])}", "give the name of a known device")
    like_device = known.device(entry["like"], like_place)
    # Rates that are given replace the other device's one by one.
    if isinstance(given_fields.get("peak_flops"), Mapping):
        given = dict(given_fields["peak_flops"])
        # Tensor cores have one rate for both half types: who gives one of them means the pair.
        half_rates = {like_device.peak_flops.get(name) for name in ("float16", "bfloat16")}
        for one, other in (("float16", "bfloat16"), ("bfloat16", "float16")):
            if one in given and other not in given and len(half_rates) == 1:
                given[other] = given[one]
        given_fields["peak_flops"] = {**like_device.peak_flops, **given}
    inherited_fields = {**like_device.model_dump(exclude=_NOT_INHERITED), "source": f"{GIVEN}, like {like_device.name}"}
    return parse_record({**inherited_fields, **given_fields}, Device, where, inside)


def graph_files() -> list[Path]:
    """Return the paths of the fixture graphs, sorted by name."""
    return sorted(folder().joinpath("graphs").glob("*.graph.json.gz"))


def folder() -> Path:
    """Return the folder of the shipped data."""
    return Path(str(resources.files("ddltool.fixtures")))
