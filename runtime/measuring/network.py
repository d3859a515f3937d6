"""Measures latency and bandwidth between processes: ping-pong over gloo, and the line ``latency + bytes / bandwidth``.

Under torchrun the processes of the job are measured, over whatever connects their hosts; otherwise local processes are
started, whose "network" is this machine's loopback. Start at :func:`measure_network`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ddltool.errors import DdlToolError, InputError, one_line
from ddltool.results import NetworkPair, NetworkResult
from ddltool.runtime.measuring.children import Children, meeting_place
from ddltool.runtime.measuring.rendezvous import job_from_environment, job_store

if TYPE_CHECKING:
    import torch

DEFAULT_SIZES = (8, 2**12, 2**16, 2**18, 2**20, 2**22, 2**24)
MOST_PROCESSES_IN_ALL_PAIRS = 4
# Seconds that a size takes at most per pair: a slow link gets fewer round trips, and then no larger sizes.
_SECONDS_PER_SIZE, _FEWEST_ROUNDS = 1.0, 5
# Columns of a pair's table, which has a row per size: bytes; shortest, median and quartile range of one-way seconds.
_COLUMNS = 4

Progress = Callable[[int, int], None]
"""Called with (pairs done, pairs in total)."""
Measure = Callable[..., list[NetworkPair]]
""":func:`_measure_pairs` with all arguments given but rank, progress and meeting."""


class LinkFit(NamedTuple):
    """A link's one-way time as a line: ``latency_s + bytes / bandwidth_bytes_per_s``.

    ``residual``: root mean square of (measured - line) / line.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    residual: float


def fit_link(sizes_bytes: ArrayLike, times_s: ArrayLike) -> LinkFit:
    """Return the line through one-way times: ``sizes_bytes`` (k,) in bytes, ``times_s`` (k,) in seconds.

    The bandwidth is 1 / slope of the least-squares line, which the large sizes decide; the latency is the time of the
    smallest message minus its bytes / bandwidth, at least 0. The line's own intercept is not used: where a link passes
    bursts at another rate (a shaped link, a cache), it is below 0. On times that lie on a line both are exact.

    Raises InputError for fewer than two sizes, times that are not above 0, and times that do not grow with the size.
    """
    size = np.asarray(sizes_bytes, dtype=np.float64)
    time_s = np.asarray(times_s, dtype=np.float64)
    if size.shape != time_s.shape or len(np.unique(size)) < 2:
        raise InputError("times", f"{len(time_s)} times for {len(np.unique(size))} sizes", "give two sizes or more")
    if not (np.isfinite(time_s) & (time_s > 0)).all():
        raise InputError("times", f"hold {time_s.min():g} s", "they must be above 0 and finite")
    centred = size - size.mean()
    s_per_byte = float(centred @ time_s / (centred @ centred))  # the slope of the least-squares line
    if not s_per_byte > 0:
        raise InputError("times", "do not grow with the size", "measure larger sizes")
    shortest_s = time_s[size == size.min()].min()
    latency_s = max(0.0, float(shortest_s - s_per_byte * size.min()))
    relative_error = time_s / (latency_s + s_per_byte * size) - 1
    residual = float(np.sqrt(np.mean(relative_error**2)))
    return LinkFit(latency_s=latency_s, bandwidth_bytes_per_s=1 / s_per_byte, residual=residual)


def pairs_to_measure(processes: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks to measure: of up to four processes all pairs, else each rank with the next in a ring."""
    if processes <= MOST_PROCESSES_IN_ALL_PAIRS:
        return list(itertools.combinations(range(processes), 2))
    return [(rank, (rank + 1) % processes) for rank in range(processes)]


def measure_network(
    processes: int = 2,
    *,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES,
    rounds: int = 20,
    timeout_s: float = 60.0,
    progress: Progress = lambda done, total: None,
) -> NetworkResult:
    """Return latency and bandwidth between the processes of this torchrun job, or else of local ones started for this.

    In a job every rank must call this, and every rank gets the result. One pair is measured at a time; the result has
    all pairs, and the lowest bandwidth and the highest latency and residual of any.

    Args:
        processes: number of local processes to start; ignored in a job.
        sizes_bytes: sizes of the messages, ascending: two or more.
        rounds: round trips per size; fewer where they would take longer than a second.
        timeout_s: seconds that a message may take.
        progress: ``progress(done, total)`` is called after each pair.

    Raises InputError for fewer than two processes, DdlToolError when a process dies or a message takes too
    long.
    """
    place = job_from_environment()
    if place is not None:
        if place.world_size < 2:
            raise InputError("WORLD_SIZE", f"is {place.world_size}", "measure between 2 or more processes")
        processes = place.world_size
    elif processes < 2:
        raise InputError("replicas", f"{processes} process has nobody to talk to", "measure between 2 or more")
    measure = partial(_measure_pairs, processes=processes, sizes=sizes_bytes, rounds=rounds, timeout_s=timeout_s)
    if place is None:
        pairs = _measure_local(processes, measure, progress)
    else:
        with _lost_each_other():
            store = job_store("network", timeout_s)
        pairs = measure(place.rank, progress, store=store)
    return NetworkResult(
        processes=processes,
        local=place is None,
        bandwidth_bytes_per_s=min(pair.bandwidth_bytes_per_s for pair in pairs),
        latency_s=max(pair.latency_s for pair in pairs),
        residual=max(pair.residual for pair in pairs),
        pairs=pairs,
    )


def _measure_local(processes: int, measure: Measure, progress: Progress) -> list[NetworkPair]:
    """Start ``processes`` processes that connect over the loopback interface, and return the pairs that they measure."""

    def take_progress(rank: int, message: Any) -> bool:
        """Report the progress in ``message`` if it is a tuple (done, total); return whether it is."""
        if isinstance(message, tuple):
            progress(*message)
        return isinstance(message, tuple)

    with Children(_child, [(rank, measure) for rank in range(processes)]) as children:
        pairs: list[NetworkPair] = children.gather(range(processes), "network", take_progress)[0]
        return pairs


def _child(rank: int, measure: Measure, results: Connection) -> None:
    """Measure as rank ``rank`` in a child process, and send what it measured through ``results``.

    That is a list of :class:`NetworkPair`: for each measured pair of ranks its latency in seconds and its bandwidth in
    bytes per second. Before it, rank 0 sends its progress after each pair, as tuples (pairs done, pairs in total). ``measure``:
    :func:`_measure_pairs` with the arguments that are the same for all ranks.
    """
    import torch

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # otherwise gloo asks the host's name, which need not be this machine's

    def send_progress(done: int, total: int) -> None:
        """Send the progress to the parent, on rank 0 only."""
        if rank == 0:
            results.send((done, total))

    init_method = meeting_place()  # the same in all children: a file in the folder that their parent has given them
    results.send(measure(rank, send_progress, init_method=init_method))


@contextlib.contextmanager
def _lost_each_other() -> Iterator[None]:
    """Turn a RuntimeError in the block, which torch raises for lost connections, into a DdlToolError of one line."""
    try:
        yield
    except RuntimeError as error:
        raise DdlToolError(f"the processes lost each other ({one_line(str(error))[:200]})") from error


def _measure_pairs(
    rank: int,
    progress: Progress,
    *,
    processes: int,
    sizes: Sequence[int],
    rounds: int,
    timeout_s: float,
    **meeting: Any,
) -> list[NetworkPair]:
    """Join the process group and measure one pair of ranks after another; every rank returns all pairs.

    Each of the ``processes`` processes calls this. Raises DdlToolError when a peer is lost or too slow.

    ``rank``: this process's; ``meeting``: where the processes meet, as ``init_process_group`` takes it; the others: as
    for :func:`measure_network`.
    """
    import torch
    import torch.distributed as dist

    pairs = []
    try:
        with _lost_each_other():
            limit = timedelta(seconds=timeout_s)
            dist.init_process_group("gloo", rank=rank, world_size=processes, timeout=limit, **meeting)
            rank_pairs = pairs_to_measure(processes)
            for done, (first, second) in enumerate(rank_pairs, start=1):
                table = torch.zeros(len(sizes), _COLUMNS, dtype=torch.float64)
                if rank == first:
                    _ping(second, sizes, rounds, table)
                elif rank == second:
                    _pong(first)
                dist.broadcast(table, src=first)  # the others wait here until this pair is done
                measured_rows = table[table[:, 0] > 0]  # a row of 0 bytes is that of a size which was left out
                sizes_bytes, shortest, median, spread = measured_rows.T.tolist()
                pairs.append(
                    NetworkPair(
                        ranks=[first, second],
                        **fit_link(sizes_bytes, shortest)._asdict(),
                        sizes_bytes=[int(value) for value in sizes_bytes],
                        shortest_s=shortest,
                        median_s=median,
                        spread_s=spread,
                    )
                )
                progress(done, len(rank_pairs))
    finally:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # with a dead peer this fails too, and would hide the first error
                dist.destroy_process_group()
    return pairs


def _ping(peer: int, sizes: Sequence[int], rounds: int, table: torch.Tensor) -> None:
    """Lead the round trips with ``peer``, and fill ``table``, (sizes, 4), whose columns are at :data:`_COLUMNS`.

    Each series of round trips is announced to the peer as (size, count); (0, 0) ends them. A size that is too slow for
    more than two round trips is the last one; rows of larger sizes stay 0.
    """
    import torch
    import torch.distributed as dist

    def round_trips(size: int, count: int) -> list[float]:
        """Return one-way seconds, half of each, of ``count`` round trips of a message of ``size`` bytes."""
        message = torch.zeros(size, dtype=torch.uint8)
        dist.send(torch.tensor([size, count]), dst=peer)
        times_s = []
        for _ in range(count):
            began_s = time.perf_counter()
            dist.send(message, dst=peer)
            dist.recv(message, src=peer)
            times_s.append((time.perf_counter() - began_s) / 2)
        return times_s

    for row, size in enumerate(sizes):
        # An estimate, which also warms up the connection.
        times_s = round_trips(size, _FEWEST_ROUNDS if row == 0 else 2)
        expected_s = 2 * min(times_s)  # of a round trip
        is_slow = expected_s > _SECONDS_PER_SIZE
        if not is_slow:
            times_s = round_trips(size, min(rounds, max(_FEWEST_ROUNDS, int(_SECONDS_PER_SIZE / expected_s))))
        low_s, median_s, high_s = np.percentile(times_s, [25, 50, 75])
        table[row] = torch.tensor([size, min(times_s), median_s, high_s - low_s])
        if is_slow and row > 0:  # a line takes two sizes
            break
    dist.send(torch.tensor([0, 0]), dst=peer)


def _pong(peer: int) -> None:
    """Echo messages of ``peer`` until it sends the header (0, 0); a header (size, count) precedes ``count`` messages."""
    import torch
    import torch.distributed as dist

    header = torch.zeros(2, dtype=torch.int64)
    while True:
        dist.recv(header, src=peer)
        size, count = header.tolist()
        if not count:
            return
        message = torch.empty(size, dtype=torch.uint8)
        for _ in range(count):
            dist.recv(message, src=peer)
            dist.send(message, dst=peer)
