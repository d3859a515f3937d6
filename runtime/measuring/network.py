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
# One size gets about this long per pair; a slow link gets fewer round trips, and no sizes beyond.
_SECONDS_PER_SIZE, _FEWEST_ROUNDS = 1.0, 5
_COLUMNS = 4  # of a pair's table: bytes; shortest, median and spread of the one-way times

Progress = Callable[[int, int], None]


class LinkFit(NamedTuple):
    """A link's line ``latency_s + bytes / bandwidth_bytes_per_s``.

    ``residual``: root mean square of (measured - line) / line.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    residual: float


def fit_link(sizes_bytes: ArrayLike, times_s: ArrayLike) -> LinkFit:
    """Return latency and bandwidth from one-way times, shapes (k,) bytes and (k,) seconds.

    The bandwidth is the slope of the least-squares line, which the large sizes decide; the latency is what the smallest
    message took beyond its bytes. The line's own intercept says nothing about small messages where a link lets bursts
    through at another rate (a shaped link, a cache), and is below 0 there. On times that lie on a line both are exact.

    Raises InputError for fewer than two sizes, times that are not above 0, and times that do not grow with the size.
    """
    size, time_s = np.asarray(sizes_bytes, dtype=np.float64), np.asarray(times_s, dtype=np.float64)
    if size.shape != time_s.shape or len(np.unique(size)) < 2:
        raise InputError("times", f"{len(time_s)} times for {len(np.unique(size))} sizes", "give two sizes or more")
    if not (np.isfinite(time_s) & (time_s > 0)).all():
        raise InputError("times", f"hold {time_s.min():g} s", "they must be above 0 and finite")
    centred = size - size.mean()
    per_byte = float(centred @ time_s / (centred @ centred))
    if not per_byte > 0:
        raise InputError("times", "do not grow with the size", "measure larger sizes")
    smallest = size == size.min()
    latency = max(0.0, float(time_s[smallest].min() - per_byte * size.min()))
    error = time_s / (latency + per_byte * size) - 1
    return LinkFit(latency_s=latency, bandwidth_bytes_per_s=1 / per_byte, residual=float(np.sqrt(np.mean(error**2))))


def pairs_of(processes: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks to measure: all pairs of up to four processes, else each rank with the next."""
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
    """Return latency and bandwidth between the processes of this torchrun job, or of local ones that are started.

    In a job every rank must call this, and every rank gets the result. One pair is measured at a time.

    Args:
        processes: local ones to start; ignored in a job.
        sizes_bytes: of the messages.
        rounds: round trips per size, fewer where they would take longer than a second.
        timeout_s: seconds that a message may take.
        progress: ``progress(done, total)`` is called after each pair.

    Raises InputError for fewer than two processes or sizes, DdlToolError when a process dies or a message takes too
    long.
    """
    sizes = sorted(set(sizes_bytes))
    if len(sizes) < 2 or sizes[0] < 1 or rounds < 1:
        problem = f"are {list(sizes_bytes)}, {rounds} rounds"
        raise InputError("sizes", problem, "give two different sizes of 1 byte or more, and 1 round or more")
    place = job_from_environment()
    if place is not None:
        if place.world_size < 2:
            raise InputError("WORLD_SIZE", f"is {place.world_size}", "measure between 2 or more processes")
        processes = place.world_size
        with _lost_each_other():
            store = job_store("network", timeout_s)
        pairs = _measure_pairs(place.rank, processes, sizes, rounds, timeout_s, progress, store=store)
    else:
        if processes < 2:
            raise InputError("replicas", f"{processes} process has nobody to talk to", "measure between 2 or more")
        pairs = _measure_local(processes, sizes, rounds, timeout_s, progress)
    return NetworkResult(
        processes=processes,
        local=place is None,
        bandwidth_bytes_per_s=min(pair.bandwidth_bytes_per_s for pair in pairs),
        latency_s=max(pair.latency_s for pair in pairs),
        residual=max(pair.residual for pair in pairs),
        pairs=pairs,
    )


def _measure_local(
    processes: int, sizes: Sequence[int], rounds: int, timeout_s: float, progress: Progress
) -> list[NetworkPair]:
    """Return the pairs of ``processes`` that are started here and meet over the loopback interface.

    The other arguments are those of :func:`measure_network`.
    """

    def take_progress(rank: int, message: Any) -> bool:
        """Report the progress that a process has sent, a tuple (done, total); return whether the message was one."""
        if isinstance(message, tuple):
            progress(*message)
        return isinstance(message, tuple)

    arguments = [(rank, processes, sizes, rounds, timeout_s) for rank in range(processes)]
    with Children(_child, arguments) as children:
        pairs: list[NetworkPair] = children.gather(range(processes), "network", take_progress)[0]
        return pairs


def _child(rank: int, processes: int, sizes: Sequence[int], rounds: int, timeout_s: float, results: Connection) -> None:
    """Measure as one local process, in a child, and send the pairs; rank 0 also sends its progress, as tuples (done, total)."""
    import torch

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # otherwise gloo asks the host's name, which need not be this machine's

    def send_progress(done: int, total: int) -> None:
        """Send the progress to the parent, from rank 0 alone."""
        if rank == 0:
            results.send((done, total))

    results.send(_measure_pairs(rank, processes, sizes, rounds, timeout_s, send_progress, init_method=meeting_place()))


@contextlib.contextmanager
def _lost_each_other() -> Iterator[None]:
    """Turn torch's errors of lost connections in the block into a DdlToolError of one line."""
    try:
        yield
    except RuntimeError as error:
        raise DdlToolError(f"the processes lost each other ({one_line(str(error))[:200]})") from error


def _measure_pairs(
    rank: int, size: int, sizes: Sequence[int], rounds: int, timeout_s: float, progress: Progress, **meeting: Any
) -> list[NetworkPair]:
    """Join the process group and measure one pair of ranks after another; every rank returns all pairs.

    Each of ``size`` processes calls this. ``sizes``: bytes of the messages; ``meeting``: where the processes meet, as
    ``init_process_group`` takes it.
    """
    import torch
    import torch.distributed as dist

    pairs = []
    try:
        with _lost_each_other():
            limit = timedelta(seconds=timeout_s)
            dist.init_process_group("gloo", rank=rank, world_size=size, timeout=limit, **meeting)
            rank_pairs = pairs_of(size)
            for done, (first, second) in enumerate(rank_pairs, start=1):
                table = torch.zeros(len(sizes), _COLUMNS, dtype=torch.float64)
                if rank == first:
                    _ping(second, sizes, rounds, table)
                elif rank == second:
                    _pong(first)
                dist.broadcast(table, src=first)  # the others wait here until this pair is done
                measured, shortest, median, spread = table[table[:, 0] > 0].T.tolist()  # 0 bytes: the size was left out
                pairs.append(
                    NetworkPair(
                        ranks=[first, second],
                        **fit_link(measured, shortest)._asdict(),
                        sizes_bytes=[int(value) for value in measured],
                        shortest_s=shortest,
                        median_s=median,
                        spread_s=spread,
                    )
                )
                progress(done, len(rank_pairs))
    finally:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # a dead peer must not hide what was reported
                dist.destroy_process_group()
    return pairs


def _ping(peer: int, sizes: Sequence[int], rounds: int, table: torch.Tensor) -> None:
    """Lead the round trips with ``peer``, and fill ``table``, (sizes, 4), in bytes and one-way seconds.

    Its columns are the size, and the shortest time, the median and the spread. Each series of round trips is announced
    as (size, count); (0, 0) ends them. A size that is too slow for more than two round trips is the last one.
    """
    import torch
    import torch.distributed as dist

    def round_trips(size: int, count: int) -> list[float]:
        """Return the one-way seconds of ``count`` round trips of a message of ``size`` bytes: half of each."""
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
        times_s = round_trips(size, _FEWEST_ROUNDS if row == 0 else 2)  # also warms the connection up
        expected_s = 2 * min(times_s)
        is_slow = expected_s > _SECONDS_PER_SIZE
        if not is_slow:
            times_s = round_trips(size, min(rounds, max(_FEWEST_ROUNDS, int(_SECONDS_PER_SIZE / expected_s))))
        low_s, median_s, high_s = np.percentile(times_s, [25, 50, 75])
        table[row] = torch.tensor([size, min(times_s), median_s, high_s - low_s])
        if is_slow and row > 0:
            break
    dist.send(torch.tensor([0, 0]), dst=peer)


def _pong(peer: int) -> None:
    """Echo the messages of ``peer``, whose header (size, count) announces how large and how many they are; count 0 ends."""
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
