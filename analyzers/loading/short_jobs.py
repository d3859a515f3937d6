"""A job without a file: a model and what stands where, as the command line says it. Start at :func:`job_of`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ddltool.errors import InputError
from ddltool.fixtures.loading import devices_of, with_specs
from ddltool.job import DeviceOffer, Job
from ddltool.units import counted

_NODE = 8
_OFFER = re.compile(r"(?P<type>[^=,@]+)=(?P<count>[0-9]{1,7})(@(?P<price>[0-9.]{1,12}))?")
_FIELDS = {"batch_size": "--batch-size", "max_workers": "--batch-size", "devices": "--devices"}


def job_of(
    source: str,
    devices: str,
    *,
    nodes: int | None = None,
    batch_size: int | None = None,
    link: str | None = None,
    nic: str | None = None,
    devices_file: Path | None = None,
    **more: Any,
) -> Job:
    """Return the job of a model on ``devices`` such as ``A100=8,V100=4``, or ``A100=8@2.5`` with a price per hour.

    ``batch_size``: samples of a step on all devices together; 8 of each by default. ``nodes``: of all types, each of one
    type, in proportion to the devices; by default as few as hold 8. ``devices_file``: types of the user's own. ``more``:
    precision, optimizer and sequence_length of the job. Raises InputError, which names the option.
    """
    offers = [_OFFER.fullmatch(part.strip()) for part in devices.split(",")]
    if not offers or None in offers:
        raise InputError(
            "--devices", f"{devices!r} is not TYPE=N", "for example A100=8,V100=4, or A100=8@2.5 with a price"
        )
    counts: dict[str, int] = {}
    prices: dict[str, float | None] = {}
    for offer in offers:
        assert offer is not None
        counts[offer["type"]] = counts.get(offer["type"], 0) + int(offer["count"])
        prices[offer["type"]] = float(offer["price"]) if offer["price"] else prices.get(offer["type"])
    total = sum(counts.values())
    if total == 0:
        raise InputError("--devices", f"{devices!r} offers none", "for example A100=8,V100=4")
    per_node = _per_node(counts, nodes)
    samples = batch_size or 8 * total
    workers = max(size for size in range(1, min(total, samples) + 1) if samples % size == 0)
    known = {name: value for name, value in more.items() if value is not None}
    try:
        made = Job(
            name=re.sub(r"[^\w.-]+", "-", source.rpartition(":")[2] or source).strip("-") or "job",
            model=source,
            max_workers=workers,
            batch_size=samples // workers,
            devices=[
                DeviceOffer(
                    type=name, count=count, per_node=per_node[name], link=link, nic=nic, price_per_hour=prices[name]
                )
                for name, count in counts.items()
            ],
            **known,
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else "devices"
        option = _FIELDS.get(field, "--" + field.replace("_", "-"))
        raise InputError(option, first["msg"].removeprefix("Value error, "), "see ddltool plan --help") from None
    table = devices_of(with_specs(made, "--devices", devices_file), "--devices")
    for name in counts:
        table.device(name, "--devices")
    return made


def _per_node(counts: dict[str, int], nodes: int | None) -> dict[str, int]:
    """Return how many devices of each type stand on one of its nodes."""
    used = {name: count for name, count in counts.items() if count}
    if nodes is None:
        return {name: max(1, min(count, _NODE)) for name, count in counts.items()}
    if not len(used) <= nodes <= sum(used.values()):
        problem = f"is {nodes}, for {counted(sum(used.values()), 'device')} of {counted(len(used), 'type')}"
        raise InputError("--nodes", problem, "a node has devices of one type, and at least one")
    given = dict.fromkeys(used, 1)
    for _ in range(nodes - len(used)):  # the next node to the type whose nodes are fullest
        fullest = max((name for name in used if given[name] < used[name]), key=lambda name: used[name] / given[name])
        given[fullest] += 1
    return {name: max(1, -(-count // given.get(name, 1))) for name, count in counts.items()}
