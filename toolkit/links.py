"""Links inside a node and between nodes, by name or rate. Start at :func:`parse_link`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ddltool.errors import InputError
from ddltool.units import parse_bandwidth

Kind = Literal[
    "nvlink1", "nvlink2", "nvlink3", "nvlink4", "nvlink5", "pcie3", "pcie4", "pcie5", "infinity", "nic", "plain"
]
# Bytes per second of one GPU, one way: all NVLinks of the generation's SXM module together; 16 lanes of PCIe.
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
# The share of a datasheet's rate that a ring reaches. Sources: NCCL's figures per NVLink and for PCIe (src/graph/topo.h);
# for NVLink 5 and network cards published results of nccl-tests; for Infinity Fabric an MI300X (XLA's collective tables).
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
# On a board of eight AMD GPUs, each has a link to each of the seven others.
INFINITY_PEERS = 7
_CARDS = re.compile(r"(?:(\d+)\s*x\s*)?(.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One level of a network: between the GPUs of a node, or between nodes."""

    kind: Kind
    """``plain``: only a rate and a latency are known, and are taken as measured."""
    bytes_per_s: float
    """Rate that a ring reaches, one way: of one GPU inside a node, of the whole node between nodes."""
    latency_s: float = 0.0
    """Seconds of one message, where that is more than the kind's own latency; 0: the kind's own."""
    peers: int = 0
    """Number of neighbours to each of which a GPU has a link of its own (a group uses only those between its members);
    0: all GPUs are joined by a switch."""
    title: str = ""
    """The maker's name of the link, if it differs from the kind's."""

    @property
    def text(self) -> str:
        """The link's name: ``NVLink 3``, ``PCIe 4``, ``Infinity Fabric 4``; "" for a plain one without a title."""
        if self.title or self.kind == "plain":
            return self.title
        return self.kind.upper().replace("NVLINK", "NVLink ").replace("PCIE", "PCIe ")


def kind_of(text: str) -> Kind | None:
    """Return the first kind of link that a datasheet's text names; None if it names none of a known generation.

    >>> kind_of("NVLink 3, 12 links"), kind_of("PCIe 4.0 x16")
    ('nvlink3', 'pcie4')
    """
    match = _NAME.search(text)
    if match is None:
        return None
    # The pattern has groups for NVLink and PCIe alone.
    name = f"{match[1].lower()}{match[2]}" if match[1] else "infinity"
    return name if name in DATASHEET else None  # type: ignore[return-value]  # the keys of DATASHEET are kinds


def datasheet_link(kind: Kind, bytes_per_s: float) -> Link:
    """Return the link with a datasheet's rate (bytes per second, one way), reduced to the share that a ring reaches."""
    peers = INFINITY_PEERS if kind == "infinity" else 0
    return Link(kind=kind, bytes_per_s=bytes_per_s * REACHED.get(kind, _PCIE_REACHED), peers=peers)


def parse_link(text: str, where: str = "--link") -> Link:
    """Return the link inside a node for a name such as ``nvlink3`` or ``pcie4``, or a measured rate such as ``240GB/s``.

    A measured rate makes a plain link. Raises InputError, named ``where``, for anything else.

    >>> parse_link("nvlink3").bytes_per_s
    240000000000.0
    """
    kind = kind_of(text)
    # Here the name must be the whole text; kind_of also finds it within other words.
    if kind is not None and (name := _NAME.search(text)) and name[0].strip() == text.strip():
        return datasheet_link(kind, DATASHEET[kind])
    try:
        return Link(kind="plain", bytes_per_s=parse_bandwidth(text, where))
    except InputError:
        names = ", ".join(DATASHEET)
        raise InputError(where, f"{text!r} is no link", f"one of {names}, or a measured rate such as 240GB/s") from None


def parse_nic(text: str, where: str = "--nic") -> Link:
    """Return the network cards of a node as one link, from datasheet rates: ``200Gbit`` for all cards, or ``8x200Gbit``.

    The rate is reduced to the share that a ring reaches. Raises InputError, named ``where``, for anything else.

    >>> parse_nic("8x200Gbit").bytes_per_s == 0.92 * 200e9
    True
    """
    match = _CARDS.fullmatch(text.strip())
    if match and match[1] and not int(match[1]):
        raise InputError(where, f"{text.strip()!r} is no card", "write 8x200Gbit, or leave it out")
    count, rate = (match[1], match[2]) if match else (None, text)
    return datasheet_link("nic", int(count or 1) * parse_bandwidth(rate, where))
