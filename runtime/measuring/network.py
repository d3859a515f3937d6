"""Measures latency and bandwidth between processes: ping-pong over gloo, and the line ``latency + bytes / bandwidth``.

Under torchrun the processes of the job are measured, over whatever connects their hosts; otherwise local processes are
started, whose "network" is this machine's loopback. Start at :func:`measure_network`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ddltool.device import Network
from ddltool.errors import DdlToolError, InputError, one_line
from ddltool.runtime.measuring.children import Children, free_port

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

DEFAULT_SIZES = (8, 2**12, 2**16, 2**18, 2**20, 2**22, 2**24)
MOST_PROCESSES_IN_ALL_PAIRS = 4
# One size gets about this long per pair; a slow link gets fewer round trips, and no sizes beyond.
_SECONDS_PER_SIZE, _FEWEST_ROUNDS = 1.0, 5
_COLUMNS = 4

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFit:
    """A link's line ``latency_s + bytes / bandwidth_bytes_per_s``."""

    latency_s: float
    bandwidth_bytes_per_s: float
    residual: float
    """Root mean square of (measured - line) / line: 0 where every size keeps to the line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairMeasurement:
    """One-way times between two ranks, half of a round trip each, and the fit to the shortest ones."""

    first: int
    second: int
    sizes_bytes: tuple[int, ...]
    shortest_s: tuple[float, ...]
    """The shortest per size: nobody else's traffic in the way."""
    median_s: tuple[float, ...]
    spread_s: tuple[float, ...]
    """Upper minus lower quartile per size."""
    fit: LinkFit


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkMeasurement:
    """What was measured between the processes: every pair, and the worst of them, which is what collectives wait for."""

    processes: int
    local: bool
    """Whether the processes were started here: then this is the machine's loopback and no network."""
    pairs: tuple[PairMeasurement, ...]

    @property
    def latency_s(self) -> float:
        """The longest latency of any pair."""
        return max(pair.fit.latency_s for pair in self.pairs)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """The lowest bandwidth of any pair."""
        return min(pair.fit.bandwidth_bytes_per_s for pair in self.pairs)

    @property
    def residual(self) -> float:
        """The worst fit of any pair."""
        return max(pair.fit.residual for pair in self.pairs)

    def network(self, parameter_servers: int = 1) -> Network:
        """Return this as what the oracles take."""
        return Network(
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            latency_s=self.latency_s,
            parameter_servers=parameter_servers,
        )


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
    """Return the pairs of ranks to measure: all of up to four processes, else each rank and its successor."""
    if processes <= MOST_PROCESSES_IN_ALL_PAIRS:
        return list(itertools.combinations(range(processes), 2))
    return [(rank, (rank + 1) % processes) for rank in range(processes)]


def measure_network(
    processes: int = 2,
    *,
    sizes_bytes: Sequence[int] = DEFAULT_SIZES,
    rounds: int = 20,
    timeout_s: float = 60.0,
    progress: Progress | None = None,
) -> NetworkMeasurement:
    """Return latency and bandwidth between the processes of this job, or of ``processes`` local ones.

    In a job (``torch.distributed`` initialised, or torchrun's environment) every rank must call this, and every rank
    gets the result; ``processes`` is then ignored. One pair at a time, ``rounds`` round trips per size, fewer where
    they would take longer than a second. ``progress(done, total)`` counts pairs.

    Raises InputError for fewer than two processes or sizes, DdlToolError when a process dies or a message takes longer
    than ``timeout_s``.
    """
    sizes = sorted(set(sizes_bytes))
    if len(sizes) < 2 or sizes[0] < 1:
        raise InputError("sizes", f"are {list(sizes_bytes)}", "give two different sizes of 1 byte or more")
    if rounds < 1:
        raise InputError("rounds", f"is {rounds}", "it must be at least 1")
    tell = progress or (lambda done, total: None)
    if _in_a_job():
        return _measure_job(sizes, rounds, timeout_s, tell)
    if processes < 2:
        raise InputError("replicas", f"{processes} process has nobody to talk to", "measure between 2 or more")
    return _measure_local(processes, sizes, rounds, timeout_s, tell)


def _in_a_job() -> bool:
    import torch.distributed as dist

    return dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def _measure_job(sizes: Sequence[int], rounds: int, timeout_s: float, progress: Progress) -> NetworkMeasurement:
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if size < 2:
        raise InputError("WORLD_SIZE", f"is {size}", "measure between 2 or more processes")
    own = not dist.is_initialized()
    limit = timedelta(seconds=timeout_s)
    try:
        if own:
            master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            rank = int(os.environ["RANK"])
            hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            store = TCPStore(*master, size, is_master=hosts, timeout=limit)
            # A restarted job must not read the addresses that the attempt before left in the agent's store.
            attempt = PrefixStore(f"network/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
            dist.init_process_group("gloo", store=attempt, rank=rank, world_size=size, timeout=limit)
        group = dist.group.WORLD if own else dist.new_group(backend="gloo", timeout=limit)
        pairs = _measure_pairs(sizes, rounds, group, progress)
    except RuntimeError as error:
        raise DdlToolError(f"the processes lost each other ({one_line(str(error))[:200]})") from error
    finally:
        if own and dist.is_initialized():
            dist.destroy_process_group()
    return NetworkMeasurement(processes=size, local=False, pairs=pairs)


def _measure_local(
    processes: int, sizes: Sequence[int], rounds: int, timeout_s: float, progress: Progress
) -> NetworkMeasurement:
    port = free_port()
    arguments = [(rank, processes, port, sizes, rounds, timeout_s) for rank in range(processes)]
    found: dict[int, tuple[PairMeasurement, ...]] = {}
    with Children(_child, arguments) as children:
        while 0 not in found:
            waiting = [rank for rank in range(processes) if rank not in found]
            for rank, answer in children.receive(waiting, "the measuring processes were silent"):
                if failure := children.failure(answer, "a measuring process"):
                    raise failure
                if isinstance(answer, str):
                    raise DdlToolError(f"the processes lost each other ({answer})")
                if isinstance(answer, list):
                    progress(*answer)
                else:
                    found[rank] = answer
    return NetworkMeasurement(processes=processes, local=True, pairs=found[0])


def _child(
    rank: int, processes: int, port: int, sizes: Sequence[int], rounds: int, timeout_s: float, results: Connection
) -> None:
    """Be one local process, and send its result (a tuple), or what became of it (a text); rank 0 tells its progress."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # otherwise gloo asks the host's name, which need not be this machine's

    def tell(done: int, total: int) -> None:
        if rank == 0:
            results.send([done, total])

    try:
        address, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=processes, timeout=limit)
        results.send(_measure_pairs(sizes, rounds, dist.group.WORLD, tell))
    except InputError:
        raise
    except Exception as error:
        results.send(one_line(f"{type(error).__name__}: {error}")[:300])
    finally:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # a dead peer must not hide what was reported
                dist.destroy_process_group()


def _measure_pairs(
    sizes: Sequence[int], rounds: int, group: dist.ProcessGroup | None, progress: Progress
) -> tuple[PairMeasurement, ...]:
    """Measure one pair after another; every rank of the group returns all of them."""
    import torch
    import torch.distributed as dist

    rank, wanted = dist.get_rank(group), pairs_of(dist.get_world_size(group))
    found = []
    for done, (first, second) in enumerate(wanted):
        table = torch.zeros(len(sizes), _COLUMNS, dtype=torch.float64)
        if rank == first:
            _ping(second, sizes, rounds, table, group)
        elif rank == second:
            _pong(first, group)
        dist.broadcast(table, group_src=first, group=group)  # the others wait here until this pair is done
        found.append(_pair(first, second, table[table[:, 0] > 0].numpy()))
        progress(done + 1, len(wanted))
    return tuple(found)


def _pair(first: int, second: int, table: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> PairMeasurement:
    size, shortest, median, spread = table.T.tolist()
    return PairMeasurement(
        first=first,
        second=second,
        sizes_bytes=tuple(int(value) for value in size),
        shortest_s=tuple(shortest),
        median_s=tuple(median),
        spread_s=tuple(spread),
        fit=fit_link(size, shortest),
    )


def _ping(peer: int, sizes: Sequence[int], rounds: int, table: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Lead the round trips with ``peer`` and fill ``table``: bytes, shortest, median and spread of one way, seconds."""
    import torch
    import torch.distributed as dist

    def round_trips(size: int, count: int) -> list[float]:
        message = torch.zeros(size, dtype=torch.uint8)
        dist.send(torch.tensor([size, count]), group_dst=peer, group=group)
        times = []
        for _ in range(count):
            began = time.perf_counter()
            dist.send(message, group_dst=peer, group=group)
            dist.recv(message, group_src=peer, group=group)
            times.append((time.perf_counter() - began) / 2)
        return times

    for row, size in enumerate(sizes):
        times = round_trips(size, _FEWEST_ROUNDS if row == 0 else 2)  # also warms the connection up
        expected_s = 2 * min(times)
        slow = expected_s > _SECONDS_PER_SIZE
        if not slow:
            times = round_trips(size, min(rounds, max(_FEWEST_ROUNDS, int(_SECONDS_PER_SIZE / expected_s))))
        low, middle, high = np.percentile(times, [25, 50, 75])
        table[row] = torch.tensor([size, min(times), middle, high - low])
        if slow and row > 0:
            break
    dist.send(torch.tensor([0, 0]), group_dst=peer, group=group)


def _pong(peer: int, group: dist.ProcessGroup | None) -> None:
    """Send back what ``peer`` sends, as often and as large as it announces."""
    import torch
    import torch.distributed as dist

    header = torch.zeros(2, dtype=torch.int64)
    while True:
        dist.recv(header, group_src=peer, group=group)
        size, count = header.tolist()
        if not count:
            return
        message = torch.empty(size, dtype=torch.uint8)
        for _ in range(count):
            dist.recv(message, group_src=peer, group=group)
            dist.send(message, group_dst=peer, group=group)
