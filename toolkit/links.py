"""Links between devices by name: what joins the GPUs of a node, and what joins nodes. Start at :func:`parse_link`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ddltool.errors import InputError
from ddltool.units import parse_bandwidth

Kind = Literal[
    "nvlink1", "nvlink2", "nvlink3", "nvlink4", "nvlink5", "pcie3", "pcie4", "pcie5", "infinity", "nic", "plain"
]
# One way, of one GPU: all NVLinks of the generation's SXM module; 16 lanes of PCIe.
DATASHEET = {
    "nvlink1": 80e9,
    "nvlink2": 150e9,
    "nvlink3": 300e9,
    "nvlink4": 450e9,
    "nvlink5": 900e9,
    "pcie3": 15.75e9,
    "pcie4": 31.5e9,
    "pcie5": 63e9,
    "infinity": 448e9,
}
# Of a datasheet's rate, what a ring reaches: NCCL's own figures per NVLink and for PCIe (src/graph/topo.h), and for NVLink 5
# and network cards what published nccl-tests reach; for AMD's what an MI300X does (XLA's collective tables).
REACHED = {
    "nvlink1": 0.9,
    "nvlink2": 0.8,
    "nvlink3": 0.8,
    "nvlink4": 0.824,
    "nvlink5": 0.93,
    "infinity": 0.68,
    "nic": 0.92,
    "plain": 1.0,
}
_PCIE_REACHED = 0.76
_NAME = re.compile(r"(nvlink|pcie)\s*(\d)|infinity", re.IGNORECASE)
# On a board of eight of AMD's, each has a link to every other.
INFINITY_PEERS = 7
_CARDS = re.compile(r"(?:(\d+)\s*x\s*)?(.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One level of a network: between the GPUs of a node, or between nodes."""

    kind: Kind
    """``plain``: no more is known than a rate and a latency, which are taken as measured."""
    bytes_per_s: float
    """What a ring reaches one way: of one GPU inside a node, of the whole node between nodes."""
    latency_s: float = 0.0
    """Of one message, where it is more than the kind's own."""
    peers: int = 0
    """Where it is a link to each of so many neighbours, not to a switch: a group uses those between its members."""
    title: str = ""
    """What its maker calls it, where that is not the kind."""

    @property
    def text(self) -> str:
        """The link's name: ``NVLink 3``, ``PCIe 4``, ``Infinity Fabric 4``; "" for a rate alone."""
        named = self.kind.upper().replace("NVLINK", "NVLink ").replace("PCIE", "PCIe ")
        return self.title or ("" if self.kind == "plain" else named)


def kind_of(text: str) -> Kind | None:
    """Return the kind of link that a datasheet's words name; None where they name none.

    >>> kind_of("NVLink 3, 12 links"), kind_of("PCIe 4.0 x16")
    ('nvlink3', 'pcie4')
    """
    match = _NAME.search(text)
    name = (f"{match[1].lower()}{match[2]}" if match[1] else "infinity") if match else ""
    return name if name in DATASHEET else None  # type: ignore[return-value]  # its keys are kinds


def datasheet_link(kind: Kind, bytes_per_s: float, latency_s: float = 0.0) -> Link:
    """Return the link of a datasheet's rate (bytes per second, one way), at the share of it that a ring of GPUs reaches.

    ``latency_s``: of one message, 0 for the kind's own.
    """
    peers = INFINITY_PEERS if kind == "infinity" else 0
    rate = bytes_per_s * REACHED.get(kind, _PCIE_REACHED)
    return Link(kind=kind, bytes_per_s=rate, latency_s=latency_s, peers=peers)


def parse_link(text: str, where: str = "--link") -> Link:
    """Return the link inside a node that ``nvlink3``, ``pcie4`` or a measured rate such as ``240GB/s`` names.

    Raises InputError for anything else, named ``where``.

    >>> parse_link("nvlink3").bytes_per_s
    240000000000.0
    """
    kind = kind_of(text)
    if kind is not None and (name := _NAME.search(text)) and name[0].strip() == text.strip():
        return datasheet_link(kind, DATASHEET[kind])
    try:
        return Link(kind="plain", bytes_per_s=parse_bandwidth(text, where))
    except InputError:
        names = ", ".join(DATASHEET)
        raise InputError(where, f"{text!r} is no link", f"one of {names}, or a measured rate such as 240GB/s") from None


def parse_nic(text: str, where: str = "--nic") -> Link:
    """Return the network cards of a node as one link: ``200Gbit`` for all of them, or ``8x200Gbit``, by their datasheet.

    Its rate is the share of the datasheet's that a ring reaches. Raises InputError for anything else, named ``where``.

    >>> parse_nic("8x200Gbit").bytes_per_s == 0.92 * 200e9
    True
    """
    match = _CARDS.fullmatch(text.strip())
    count, rate = (match[1], match[2]) if match else (None, text)
    return datasheet_link("nic", int(count or 1) * parse_bandwidth(rate, where))
