"""The network of a job from what the user names: links, cards, rates, logs of nccl-tests. Start at :func:`fabric_of`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddltool.analyzers.costs.nccl import Fabric, Measured
from ddltool.analyzers.loading.nccl import is_nccl_log, read_tests
from ddltool.artifacts import read_text
from ddltool.device import MEASURED, Device
from ddltool.errors import InputError
from ddltool.links import DATASHEET, Link, datasheet_link, kind_of, parse_link, parse_nic
from ddltool.units import parse_bandwidth, parse_latency

BANDWIDTH, LATENCY = "10Gbit", "50us"
"""Between nodes, where nothing is said."""


def own_link(device: Device) -> Link:
    """Return the link inside a node that a device type brings along; PCIe 3.0 where its data does not say."""
    if "bridge" in device.link:
        return parse_link("pcie5")  # joins two cards: a ring of more leaves it
    kind = kind_of(device.link) or "pcie3"
    if device.link.startswith(MEASURED):
        return Link(kind=kind, bytes_per_s=device.link_bytes_per_s)
    return datasheet_link(kind, device.link_bytes_per_s or DATASHEET[kind])


def between_nodes(
    nic: str | None, bandwidth: str | None, latency: str | None, options: tuple[str, str, str]
) -> Link | None:
    """Return the link of a node to others: cards by datasheet, or a rate as measured; None where neither is given.

    ``options`` name the three for errors. Raises InputError for both at once, and for what cannot be read.
    """
    if nic is not None and bandwidth is not None:
        raise InputError(options[0], f"does not go with {options[1]}", "cards by datasheet, or a rate as measured")
    delay = 0.0 if latency is None else parse_latency(latency, options[2])
    if nic is not None:
        return replace(parse_nic(nic, options[0]), latency_s=delay)
    if bandwidth is None:
        return None
    rate = parse_bandwidth(bandwidth, options[1])
    return Link(kind="plain", bytes_per_s=rate, latency_s=parse_latency(LATENCY) if latency is None else delay)


def fabric_of(
    device: Device | None,
    *,
    gpus_per_node: int,
    link: str | None = None,
    local_bandwidth: str | None = None,
    local_latency: str | None = None,
    nic: str | None = None,
    bandwidth: str | None = None,
    latency: str | None = None,
    nccl_tests: Sequence[Path] = (),
) -> Fabric:
    """Return the network of nodes of one device type, from the texts of the options of those names.

    Inside a node it is the device's own link unless one is named; between nodes 10 Gbit/s and 50 us unless said otherwise.
    Raises InputError for what cannot be read.
    """
    if link is not None and local_bandwidth is not None:
        raise InputError("--link", "does not go with --local-bandwidth", "leave out one of the two")
    inside = parse_link(link) if link is not None else own_link(device) if device else parse_link("pcie3")
    if local_bandwidth is not None:
        inside = replace(inside, bytes_per_s=parse_bandwidth(local_bandwidth, "--local-bandwidth"))
    if local_latency is not None:
        inside = replace(inside, latency_s=parse_latency(local_latency, "--local-latency"))
    between = between_nodes(nic, bandwidth, latency, ("--nic", "--bandwidth", "--latency"))
    between = between or between_nodes(None, BANDWIDTH, latency, ("", "", "--latency"))
    assert between is not None  # a rate was given
    measured = tuple(tests_in(path, gpus_per_node) for path in nccl_tests)
    return Fabric(inside=inside, between=between, gpus_per_node=gpus_per_node, measured=measured)


def tests_in(path: Path, gpus_per_node: int) -> Measured:
    """Return the table of a log of nccl-tests. Raises InputError for another file."""
    text = read_text(path)
    if not is_nccl_log(text):
        raise InputError(str(path), "is no log of nccl-tests", "give what all_reduce_perf prints")
    return read_tests(text, str(path), gpus_per_node)
