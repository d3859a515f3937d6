"""The network of a job, made from what the user names: links, cards, rates, logs of nccl-tests. Start at :func:`fabric_of`.

:func:`read_tests` reads what nccl-tests (github.com/NVIDIA/nccl-tests) print: the times of one collective by message size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from ddltool.analyzers.step.communication.nccl import Collective, Fabric, MeasuredCollective
from ddltool.artifacts import read_text
from ddltool.device import DEVICES_PER_NODE, MEASURED, Device
from ddltool.errors import InputError
from ddltool.links import DATASHEET, Link, datasheet_link, kind_of, parse_link, parse_nic
from ddltool.units import parse_bandwidth, parse_latency

# An all-reduce of less than this is bound by latency, not by the link.
_LARGE_BYTES = 64 * 2**20
# Size, count and type; before them may stand what a launcher puts before each process's lines.
_ROW = re.compile(r"(?:^|\s)(\d+)\s+\d+\s+(?:u?int\d+|half|float|double|bfloat16|f8\w+)\s")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*\bon\s+(\S+)\s+device")
_NAMES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
# Rates are printed with two decimals; from so many GB/s on they are precise enough for a ratio of two.
_PRECISE_GB_PER_S = 10.0
# Nearer than this to its limit for many ranks, the ratio of the two bandwidths does not say how many there are.
_NEAR_LIMIT = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class TestRow:
    """One message size of a log, measured out of place; both rates are in bytes per second."""

    __test__ = False  # pytest would collect the class by its name

    size_bytes: int
    seconds: float
    algorithm_per_s: float
    bus_per_s: float


def is_nccl_log(text: str) -> bool:
    """Return whether a text is what nccl-tests print: a header names the bus bandwidth."""
    return "busbw" in text


def rows_of(text: str) -> list[TestRow]:
    """Return the rows of an nccl-tests log with its out-of-place figures (into a second buffer); other lines are skipped.

    Columns are found by the header's names and counted from the right, because versions differ in the columns before the
    time (``root`` came later, ``redop`` may be blank).
    """
    rows: list[TestRow] = []
    header: list[str] = []  # the words of the last one; empty: none yet
    for line in text.splitlines():
        words = line.split()
        if "busbw" in words and "time" in words:
            header = words
        elif header:
            row = _row_of(line, header)
            if row is not None:
                rows.append(row)
    return rows


def _row_of(line: str, header: list[str]) -> TestRow | None:
    """Return the row in a line of an nccl-tests log; None: the line holds none, or figures that are no finite numbers.

    ``header``: the words of the last header, among them time (microseconds), algbw and busbw (GB/s).
    """
    words = line.split()
    columns_from_time = len(header) - header.index("time")
    match = _ROW.search(line)
    if match is None or len(words) < columns_from_time:
        return None
    try:  # a negative index counts from the right
        time_us, algorithm_gb_per_s, bus_gb_per_s = (
            float(words[header.index(name) - len(header)]) for name in ("time", "algbw", "busbw")
        )
    except ValueError:
        return None
    if not (0 < time_us < math.inf and 0 <= bus_gb_per_s < math.inf and 0 <= algorithm_gb_per_s < math.inf):
        return None
    return TestRow(
        size_bytes=int(match[1]),
        seconds=time_us * 1e-6,
        algorithm_per_s=algorithm_gb_per_s * 1e9,
        bus_per_s=bus_gb_per_s * 1e9,
    )


def processes_of(text: str) -> tuple[int, int]:
    """Return (ranks, nodes): how many of each the head of a log lists, (0, 0) if it lists none."""
    listed = list(_RANK.finditer(text))
    rank_count = max((int(match[1]) + 1 for match in listed), default=0)
    hosts = {match[2] for match in listed}
    return rank_count, len(hosts)


def read_tests(text: str, where: str, gpus_per_node: int = DEVICES_PER_NODE) -> MeasuredCollective:
    """Return the table of an nccl-tests log: its collective, its processes, and the median seconds by size.

    If the log does not list its ranks, their number follows from the ratio of bus bandwidth and algorithm bandwidth; if it
    does not list its nodes, each is taken to hold ``gpus_per_node``. ``where``: the file, for errors. Raises InputError for a
    log without rows, of an unknown collective, or of an unknown number of ranks.
    """
    rows = [row for row in rows_of(text) if row.size_bytes > 0]
    if not rows:
        raise InputError(where, "has no row below a header with time and busbw", "give the output of nccl-tests")
    listed_ranks, nodes = processes_of(text)
    ratios = [row.bus_per_s / row.algorithm_per_s for row in rows if row.algorithm_per_s >= _PRECISE_GB_PER_S * 1e9]
    ratio = median(ratios) if ratios else 0.0  # of bus bandwidth to algorithm bandwidth; 0: not known
    collective = _collective_of(text, where, ratio)
    replicas = listed_ranks or _ranks_of_ratio(ratio, collective)
    if replicas < 2:
        raise InputError(where, "does not tell the number of ranks", "keep the lines `# Rank 0 ...` of its head")
    by_size: dict[int, list[float]] = {}
    for row in rows:
        by_size.setdefault(row.size_bytes, []).append(row.seconds)
    sizes = sorted(by_size)
    return MeasuredCollective(
        collective=collective,
        replicas=replicas,
        nodes=nodes or -(-replicas // gpus_per_node),
        size_bytes=tuple(float(size) for size in sizes),
        seconds=tuple(median(by_size[size]) for size in sizes),
    )


def _collective_of(text: str, where: str, ratio: float) -> Collective:
    """Return the collective that a log names by its program (``all_reduce_perf``), else one that fits its bandwidths.

    ``ratio``: of bus bandwidth to algorithm bandwidth, 0: not known. ``where``: the file, for errors. Raises InputError for a
    log that names several collectives, or another one.
    """
    named: list[Collective] = [name for name in _NAMES if f"{name}_perf" in text]
    other_name = re.search(r"\b(\w+)_perf\b", text)
    remedy = f"one of {', '.join(_NAMES)} in each file"
    if len(named) > 1:
        raise InputError(where, f"is of {', '.join(named)}", remedy)
    if named:
        return named[0]
    if other_name is not None:
        raise InputError(where, f"is of {other_name[1]}", remedy)
    # Only an all-reduce sends more over a link than the message's bytes.
    return "all_gather" if 0 < ratio < 1 else "all_reduce"


def _ranks_of_ratio(ratio: float, collective: Collective) -> int:
    """Return the number of ranks for which bus bandwidth has a ratio to algorithm bandwidth, 0 if it cannot be inferred.

    The ratio is 2 (n - 1) / n for an all-reduce, else (n - 1) / n. It is solved for n, unless it is too near its limit for
    large n, or 0 (not known).
    """
    limit = 2.0 if collective == "all_reduce" else 1.0
    return round(limit / (limit - ratio)) if 0 < ratio < limit - _NEAR_LIMIT else 0


def bus_bandwidth(text: str, where: str) -> float:
    """Return the median out-of-place bus bandwidth of the large messages of an nccl-tests log, in bytes per second.

    Bus bandwidth is what each device sends over its link. ``where``: the file, for errors. Raises InputError for a log without
    large messages, and for one of several nodes.

    >>> log = "# size count type redop time algbw busbw error" + chr(10) + "134217728 33554432 float sum 2240 60.0 90.0 2e-07"
    >>> bus_bandwidth(log, "nccl.log")
    90000000000.0
    """
    _, nodes = processes_of(text)
    if nodes > 1:
        remedy = "of one node for a device's link; predict and plan read this one: --nccl-tests"
        raise InputError(where, f"is of {nodes} nodes", remedy)
    large_rates = [row.bus_per_s for row in rows_of(text) if row.size_bytes >= _LARGE_BYTES and row.bus_per_s > 0]
    if not large_rates:
        remedy = "run nccl-tests up to 1G: all_reduce_perf -b 8 -e 1G"
        raise InputError(where, "has no row of 64 MiB or more below a header with time and busbw", remedy)
    return median(large_rates)


BANDWIDTH, LATENCY = "10Gbit", "50us"
"""Between nodes, and to parameter servers, where neither cards nor a rate are given; the latency also of a rate without one."""


def own_link(device: Device) -> Link:
    """Return the link inside a node that a device type's data names, PCIe 3.0 if it names none.

    A measured rate is taken unchanged; of a datasheet's rate, the share that such links reach.
    """
    if "bridge" in device.link:
        return parse_link("pcie5")  # a bridge joins two cards, and a ring of more goes over PCIe
    kind = kind_of(device.link) or "pcie3"
    if device.link.startswith(MEASURED):
        return Link(kind=kind, bytes_per_s=device.link_bytes_per_s)
    title = device.link.partition(",")[0] if device.link.startswith("Infinity") else ""
    return replace(datasheet_link(kind, device.link_bytes_per_s or DATASHEET[kind]), title=title)


def between_nodes(
    nic: str | None, bandwidth: str | None, latency: str | None, options: tuple[str, str, str]
) -> Link | None:
    """Return the link between nodes from texts: ``nic``, cards by datasheet, or ``bandwidth``, as measured; None: neither.

    Without ``latency``, a measured rate has 50 us, and a card has the latency of NCCL's model for cards, which a
    ``Link.latency_s`` of 0 stands for. ``options``: the names of the three options, for errors. Raises InputError if both
    cards and a rate are given, and for a malformed text.
    """
    if nic is not None and bandwidth is not None:
        raise InputError(options[0], f"does not go with {options[1]}", "cards by datasheet, or a rate as measured")
    latency_s = None if latency is None else parse_latency(latency, options[2])
    if nic is not None:
        return replace(parse_nic(nic, options[0]), latency_s=latency_s or 0.0)
    if bandwidth is None:
        return None
    latency_s = parse_latency(LATENCY) if latency_s is None else latency_s
    return Link(kind="plain", bytes_per_s=parse_bandwidth(bandwidth, options[1]), latency_s=latency_s)


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
    """Return the network of nodes of one device type, from the texts of the options of those names; None: not given.

    Inside a node, ``link`` names the link (``nvlink4``), else it is the device's own, or PCIe 3.0 if ``device`` is None, too;
    ``local_bandwidth`` and ``local_latency`` (``300GB/s``, ``2us``) replace its figures. Between nodes it is 10 Gbit/s unless
    ``nic`` or ``bandwidth`` is given; for latencies see :func:`between_nodes`. ``nccl_tests``: logs whose times scale the
    model. Raises InputError for a text or file that cannot be read, and for options that exclude each other.
    """
    if link is not None and local_bandwidth is not None:
        raise InputError("--link", "does not go with --local-bandwidth", "leave out one of the two")
    if link is not None:
        inside = parse_link(link)
    elif device is not None:
        inside = own_link(device)
    else:
        inside = parse_link("pcie3")
    if local_bandwidth is not None:
        inside = replace(inside, bytes_per_s=parse_bandwidth(local_bandwidth, "--local-bandwidth"))
    if local_latency is not None:
        inside = replace(inside, latency_s=parse_latency(local_latency, "--local-latency"))
    between = between_nodes(nic, bandwidth, latency, ("--nic", "--bandwidth", "--latency"))
    between = between or between_nodes(None, BANDWIDTH, latency, ("", "", "--latency"))
    assert between is not None  # a rate was given
    measured = tuple(tests_in(path, gpus_per_node) for path in nccl_tests)
    return Fabric(inside=inside, between=between, gpus_per_node=gpus_per_node, measured=measured)


def tests_in(path: Path, gpus_per_node: int) -> MeasuredCollective:
    """Return the table of the nccl-tests log at ``path``; ``gpus_per_node``: see :func:`read_tests`.

    Raises InputError for a file that is no such log.
    """
    text = read_text(path)
    if not is_nccl_log(text):
        raise InputError(str(path), "is no log of nccl-tests", "give what all_reduce_perf prints")
    return read_tests(text, str(path), gpus_per_node)
