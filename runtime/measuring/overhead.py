"""What ddltool costs a training script: runs with it on and off, taking turns. Start at :func:`measure_overhead`.

On is ``DDLTOOL_HOLD=1`` (the goodput agent does all its work but leaves the batch alone, so that both runs do the same), off
is ``DDLTOOL_OFF=1`` (``attach(config)`` is ``attach(None)``, and the agent only hands out batches). Each pair of runs gives a
ratio; reported is the median over the pairs with an interval that needs no assumption on the noise.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddltool.errors import InputError

CONFIDENCE = 0.95
ERROR_LINES = 3
ENDING_S = 40.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The median of the pairs' ratios, and between which values it lies with ``confidence`` or more."""

    median: float
    low: float
    high: float
    confidence: float

    def excess(self, limit: float) -> Literal["within", "above", "not decided"]:
        """Return how ``ratio - 1`` compares with ``limit``, as far as the interval tells: nothing below 95 % confidence."""
        if self.confidence < CONFIDENCE:
            return "not decided"
        if self.low - 1 > limit:
            return "above"
        return "within" if self.high - 1 <= limit else "not decided"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of the script: mean seconds per step after the warm-up, the largest over the ranks for wall, the sum for CPU."""

    steps: int
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """Ratios on / off of the seconds per step, over the pairs of runs, in the order in which they were made."""

    on: tuple[Run, ...]
    off: tuple[Run, ...]
    wall: Interval
    cpu: Interval


def median_interval(ratios: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the median and its distribution-free interval: the k-th smallest and largest values, by the binomial law.

    The narrowest such interval of at least ``confidence``; where there are too few values for any (fewer than 6 at 95 %),
    the whole range and the confidence that it has. Raises InputError without values.

    >>> median_interval([1.0, 1.3, 1.1, 1.2, 1.4, 1.5, 1.6, 1.7]).low
    1.0
    """
    ordered, count = sorted(ratios), len(ratios)
    if not count:
        raise InputError("ratios", "are none", "make at least one pair of runs")
    tail, skipped = 0.5**count, 0
    while skipped + 1 < count / 2:
        more = tail + math.comb(count, skipped + 1) * 0.5**count
        if 1 - 2 * more < confidence:
            break
        tail, skipped = more, skipped + 1
    return Interval(
        median=statistics.median(ordered),
        low=ordered[skipped],
        high=ordered[count - 1 - skipped],
        confidence=max(0.0, 1 - 2 * tail),
    )


def measure_overhead(
    command: Sequence[str],
    *,
    pairs: int = 10,
    steps: int = 60,
    warmup: int = 10,
    replicas: int = 1,
    timeout_s: float = 600.0,
    progress: Callable[[int], None] = lambda done: None,
) -> Overhead:
    """Run a script ``2 pairs`` times, on and off in turns (on off, off on, ...), and compare the seconds per step.

    ``command`` is the script and its arguments; each run is ended after ``steps`` optimizer steps, of which the first
    ``warmup`` do not count; ``replicas`` above 1 start it under torchrun. ``progress`` learns the number of runs made.
    Raises InputError when the script cannot be run, fails, makes too few steps, or takes longer than ``timeout_s``.
    """
    if pairs < 1 or warmup < 0 or steps < warmup + 2 or replicas < 1:
        problem = f"are {pairs} pairs, {steps} steps, {warmup} of warm-up, {replicas} replicas"
        raise InputError("--pairs, --steps, --replicas", problem, "give 1 or more, and 2 steps beyond the warm-up")
    if not Path(command[0]).is_file():
        raise InputError(command[0], "is no file", "name a training script")
    made: dict[bool, list[Run]] = {True: [], False: []}
    for pair in range(pairs):
        for turn in (True, False) if pair % 2 == 0 else (False, True):
            made[turn].append(_run(command, turn, steps, warmup, replicas, timeout_s))
            progress(len(made[True]) + len(made[False]))
    both = list(zip(made[True], made[False], strict=True))
    return Overhead(
        on=tuple(made[True]),
        off=tuple(made[False]),
        wall=median_interval([on.wall_s / off.wall_s for on, off in both]),
        cpu=median_interval([on.cpu_s / off.cpu_s for on, off in both]),
    )


def _run(command: Sequence[str], turn: bool, steps: int, warmup: int, replicas: int, timeout_s: float) -> Run:
    environment = {name: value for name, value in os.environ.items() if name not in ("DDLTOOL_OFF", "DDLTOOL_HOLD")}
    environment["DDLTOOL_HOLD" if turn else "DDLTOOL_OFF"] = "1"
    launch = [sys.executable]
    if replicas > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(replicas)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "times")
        launch += ["-m", "ddltool.runtime.measuring.step_clock", str(file), str(steps), *command]
        code, errors = _finish(launch, environment, command[0], timeout_s)
        times = [file.with_name(f"{file.name}.{rank}") for rank in range(replicas)]
        if code or not all(path.exists() for path in times):
            last = " ".join(errors.strip().splitlines()[-ERROR_LINES:])
            problem = f"failed with exit code {code}: {last}"
            raise InputError(command[0], problem, "see to it that it runs by itself")
        stamps = [json.loads(path.read_text(encoding="utf-8")) for path in times]
    made = min(len(rank) for rank in stamps)
    if made < warmup + 2:
        problem = f"made {made} optimizer steps, of which {warmup} are warm-up"
        raise InputError(command[0], problem, "let it train for longer, or ask for fewer --steps")
    count = made - 1 - warmup
    spans = [[rank[made - 1][clock] - rank[warmup][clock] for rank in stamps] for clock in (0, 1)]
    return Run(steps=made, wall_s=max(spans[0]) / count, cpu_s=sum(spans[1]) / count)


def _finish(launch: Sequence[str], environment: dict[str, str], name: str, timeout_s: float) -> tuple[int, str]:
    """Return the exit code and stderr of a process; whatever happens, it is gone afterwards."""
    child = subprocess.Popen(
        list(launch), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace"
    )
    try:
        _, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise InputError(name, f"took longer than {timeout_s:g} s", "ask for fewer --steps") from None
    finally:
        if child.poll() is None:
            child.terminate()  # torchrun ends its workers when asked to, not when killed
            try:
                child.communicate(timeout=ENDING_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.communicate()
    return child.returncode, errors
