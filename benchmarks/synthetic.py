"""Synthetic traces shaped like the paper's clusters: made up, seeded, and labelled so wherever they appear.

CPU cluster (LB-BSP, section 5.3 and Table 2): 32 workers of five instance types under faked tasks that come and go. A
task takes a share of the worker's CPU and memory for a heavy-tailed number of iterations; three in four are short ones
of one to four iterations. Speed is the type's base
speed times what the CPU share leaves (a power just below 1), times a drop where available memory gets scarce (the
paper's Figure 2 shows both shapes), times noise. Transient spikes slow a worker for one or two iterations without any
change of its resources. Readings are taken at an iteration's start and carry a little noise themselves.

GPU cluster (sections 3.3.1 and 5.1): four each of V100, M60, K80 and K520 as curves of launch overhead, saturation,
linear growth, memory limit and communication, with a few percent of jitter. Figure 4 is not available as numbers; the
curves are chosen so that 32 samples each turn into about the published (89, 21, 12, 6) on one GPU of each type.
:func:`simulate` lets Algorithm 2 run on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from ddltool.analyzers.answers.reporting.figures import Figure, Line, Lines
from ddltool.analyzers.job.balancing import minmax
from ddltool.analyzers.job.balancing.algorithm2 import Algorithm2, Algorithm2Settings, Phase
from ddltool.analyzers.job.balancing.minmax import Curves, DeviceCurves
from ddltool.analyzers.job.balancing.replay import Clock
from ddltool.analyzers.job.balancing.sizing import equal
from ddltool.analyzers.step.measured.worker_tables import SpeedTrace
from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError

Counts = Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceType:
    """A kind of worker: how many of 32, and its speed in samples per second with the machine to itself."""

    name: str
    count: int
    speed: float


# Table 2 of the paper; speeds go by cores, with a quarter more per core on the newer c5.
CPU_CLUSTER = (
    InstanceType(name="m4.2xlarge", count=17, speed=80.0),
    InstanceType(name="c5.2xlarge", count=10, speed=100.0),
    InstanceType(name="r4.2xlarge", count=2, speed=84.0),
    InstanceType(name="m4.4xlarge", count=2, speed=150.0),
    InstanceType(name="m4.xlarge", count=1, speed=42.0),
)
GPU_TYPES = ("V100", "M60", "K80", "K520")

TASKS_PER_ITERATION = 0.010
SHORT_TASKS_PER_ITERATION = 0.03
SPIKE_SHARE = 0.02
SPEED_NOISE = 0.03
READING_NOISE = 0.02
_SCARCE_MEMORY = 0.25


def cpu_cluster(
    iterations: int = 2000, seed: int = 0, workers: int = 32, types: tuple[InstanceType, ...] = CPU_CLUSTER
) -> SpeedTrace:
    """Return a synthetic trace of ``workers`` CPU workers; speeds in samples per second.

    Other numbers of workers keep the types' proportions. Raises InputError for fewer than one worker or iteration.
    """
    if workers < 1 or iterations < 1:
        raise InputError("synthetic trace", f"of {workers} workers, {iterations} iterations", "give 1 or more of each")
    chance = np.random.default_rng(seed)
    shares = np.repeat(np.arange(len(types)), [kind.count for kind in types])
    kinds = shares[np.linspace(0, len(shares) - 1, workers).round().astype(int)]
    base = np.array([types[kind].speed for kind in kinds]) * chance.uniform(0.95, 1.05, workers)
    # Machines differ in how much comes to them, as in a cluster with batch queues.
    busyness = chance.gamma(3.0, 1 / 3, workers)
    cpu_used, memory_used = np.zeros((iterations, workers)), np.zeros((iterations, workers))
    lead = 2 * iterations  # tasks that began before the trace are still running when it starts
    for worker in range(workers):
        rates = np.array([TASKS_PER_ITERATION, SHORT_TASKS_PER_ITERATION]) * busyness[worker]
        for short, count in enumerate(chance.poisson(rates * (iterations + lead))):
            begins = chance.integers(-lead, iterations, count)
            lengths = chance.integers(1, 5, count) if short else np.clip(chance.lognormal(3.6, 1.1, count), 3, lead)
            for begin, length in zip(begins.tolist(), lengths.astype(int).tolist(), strict=True):
                span = slice(max(0, begin), max(0, begin + length))
                cpu_used[span, worker] += chance.beta(1.6, 3.5)
                memory_used[span, worker] += chance.beta(1.2, 6.0)
    cpu = np.clip(1.0 - cpu_used, 0.25, 1.0)
    memory = np.clip(0.9 - memory_used, 0.05, 1.0)
    swapping = np.clip(memory / _SCARCE_MEMORY, 0.0, 1.0) ** 0.4
    spikes = np.ones_like(cpu)
    struck = chance.random(cpu.shape) < SPIKE_SHARE / 1.5
    spikes[struck] = chance.uniform(0.45, 0.8, int(struck.sum()))
    longer = struck & (chance.random(cpu.shape) < 0.5)
    spikes[1:][longer[:-1]] = spikes[:-1][longer[:-1]]
    noise = np.exp(chance.normal(0.0, SPEED_NOISE, cpu.shape))
    speed = base * cpu**0.9 * swapping * spikes * noise
    readings = [np.clip(share + chance.normal(0.0, READING_NOISE, share.shape), 0.0, 1.0) for share in (cpu, memory)]
    names = tuple(f"{types[kind].name}-{number:02d}" for number, kind in enumerate(kinds))
    return SpeedTrace.of(names, speed, readings[0], readings[1])


def gpu_curves(each: int = 4, types: tuple[str, ...] = GPU_TYPES) -> tuple[tuple[str, ...], DeviceCurves]:
    """Return names and curves of ``each`` GPUs of every type, Inception-V3 like; seconds over samples."""
    shape = {  # launch_s, per_sample_s, saturation, memory limit, communication_s
        "V100": (0.15, 0.0096, 24.0, 128, 0.10),
        "M60": (0.20, 0.034, 8.0, 64, 0.13),
        "K80": (0.24, 0.053, 8.0, 96, 0.19),
        "K520": (0.32, 0.076, 4.0, 40, 0.28),
    }
    chosen = [kind for kind in types for _ in range(each)]
    rows = np.array([shape[kind] for kind in chosen]).T
    names = tuple(f"{kind}-{number:02d}" for number, kind in enumerate(chosen))
    curves = DeviceCurves.of(
        launch_s=rows[0],
        per_sample_s=rows[1],
        saturation=rows[2],
        memory_limit=rows[3].astype(np.int64),
        communication_s=rows[4],
    )
    return names, curves


def least_longest(curves: Curves, total: int) -> Counts:
    """Return (n,) whole batch sizes of n workers, one of each curve, that minimise the slowest one's time."""
    rows = minmax.spread(curves, [1] * len(curves.limits), total)
    assert rows is not None, "the limits admit the total"
    sizes = np.zeros(len(curves.limits), dtype=np.int64)
    for row in rows:
        sizes[row.kind] = row.size
    return sizes


def jitter(iterations: int, workers: int, seed: int = 0, spread: float = 0.03) -> Floats:
    """Return (iterations, workers) factors around 1 by which workers are faster or slower; lognormal, independent."""
    return np.exp(np.random.default_rng(seed).normal(0.0, spread, (iterations, workers)))


def gpu_clock(curves: Curves, factors: Floats, total: int) -> Clock:
    """Return the clock of devices with curves: work is seconds at factor 1, ``factors`` (K, n) make them faster."""
    need = curves.seconds(equal(factors.shape[1], total))
    return Clock(factors, (need / factors).max(axis=1))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """K simulated iterations of n workers."""

    sizes: Counts
    """(K, n) samples that each worker processed."""
    seconds: Floats
    """(K, n) batch processing times."""
    fine_at: int | None
    """The iteration after which fine tuning began."""
    removals: tuple[tuple[int, int], ...]
    """(iteration, worker) of each advice to remove a straggler."""

    def spread(self, begin: int, end: int) -> float:
        """Return (longest - shortest) / longest of the workers' mean times over iterations [begin, end)."""
        mean = self.seconds[begin:end].mean(axis=0)
        return float(1 - mean.min() / mean.max())


def simulate(
    curves: DeviceCurves,
    start: Sequence[int],
    iterations: int,
    *,
    settings: Algorithm2Settings | None = None,
    factors: ArrayLike | None = None,
    changes: Mapping[int, DeviceCurves] | None = None,
    delay: int = 0,
) -> Trajectory:
    """Return what Algorithm 2 does to workers with known curves.

    Args:
        curves: seconds over samples of n workers.
        start: (n,) samples at the start.
        iterations: K, at least 1.
        settings: Algorithm 2's.
        factors: (K, n) by which times are longer; None: the curves' own times.
        changes: iteration -> the curves from then on.
        delay: iterations by which a decision comes into force later than the next one, as when it is made in the background.

    Memory use is the batch over the curve's limit, and nobody gets a batch above it.
    """
    if iterations < 1 or delay < 0:
        raise InputError("simulation", f"of {iterations} iterations, delay {delay}", "give 1 or more, and 0 or more")
    algorithm = Algorithm2(start, curves.limits.tolist(), settings)
    noise = np.ones((iterations, len(start))) if factors is None else np.asarray(factors, dtype=np.float64)
    pending: deque[Counts] = deque([algorithm.sizes.copy()] * delay)
    sizes, seconds = np.empty((iterations, len(start)), dtype=np.int64), np.empty((iterations, len(start)))
    current, fine_at, removals = algorithm.sizes.copy(), None, []
    for k in range(iterations):
        curves = (changes or {}).get(k, curves)
        sizes[k], seconds[k] = current, curves.seconds(current) * noise[k]
        decision = algorithm.observe(seconds[k], current / curves.memory_limit, current)
        if decision.phase is Phase.FINE and fine_at is None:
            fine_at = k
        if decision.remove:
            removals.append((k, decision.straggler))
        pending.append(np.array(decision.sizes))
        current = pending.popleft()
    return Trajectory(sizes=sizes, seconds=seconds, fine_at=fine_at, removals=tuple(removals))


def slower_network(curves: DeviceCurves, worker: int, factor: float) -> DeviceCurves:
    """Return the curves with one worker's communication ``factor`` times as long."""
    communication = np.array(curves.communication_s, dtype=np.float64)
    communication[worker] *= factor
    return replace(curves, communication_s=communication)


def trajectory_figures(names: Sequence[str], run: Trajectory, marks: Mapping[int, str] | None = None) -> list[Figure]:
    """Return batch sizes and times of n workers over iterations, as the paper's Figure 8 shows them; all simulated.

    ``names``: (n,) workers; ``marks``: iteration -> what happened there.
    """
    happened = dict(marks or {})
    if run.fine_at is not None:
        happened[run.fine_at] = "fine tuning"
    at = np.arange(len(run.sizes), dtype=np.float64)
    return [
        Lines(
            title=f"{what} under Algorithm 2 (simulated)",
            headed=True,
            lines=[Line(label=name, x=at, y=values[:, place]) for place, name in enumerate(names)],
            xlabel="iteration",
            ylabel=unit,
            draw="steps",
            marks=[(text, float(when)) for when, text in happened.items()],
        )
        for what, unit, values in (("Batch sizes", "samples", run.sizes), ("Times", "seconds", run.seconds))
    ]
