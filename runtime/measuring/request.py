"""What a measurement is asked for, and the rows that its times become. Start at :class:`MeasureRequest`, :func:`row_of`."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from ddltool.analyzers.goodput.curve import median_interval
from ddltool.errors import InputError
from ddltool.runtime.measuring.worker import Outcome, Subject, Task

if TYPE_CHECKING:
    import pandas as pd

RELIABLE_SPREAD, SHORTEST_STEP_S, FEWEST_REPEATS = 0.1, 1e-3, 3
MOST_STEPS, LARGEST_BATCH, MOST_REPLICAS = 100_000, 2**24, 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureRequest:
    """What to measure. ``resolver`` is ``package.module:function``, called as ``function(source, batch_size)``.

    With ``repeats`` every configuration gets that many timed steps. Without, each gets as many as its median needs to be
    known to ``precision``, until ``budget_s`` seconds are spent, and batch sizes whose step time follows from the others'
    are left out; no ``batch_sizes`` then means to search where throughput saturates.
    """

    source: str
    resolver: str
    batch_sizes: tuple[int, ...] = ()
    replicas: tuple[int, ...] = (1,)
    accumulation: tuple[int, ...] = (0,)
    device: str = "cpu"
    device_name: str = "cpu"
    source_name: str = ""
    """What the rows say of the source; by default the source."""
    threads: int = 0
    """Threads of each process; 0: the machine's cores shared among ``processes``."""
    processes: int = 0
    """Processes on this machine; 0: the most replicas."""
    warmup: int = 2
    repeats: int | None = 5
    precision: float = 0.05
    budget_s: float = math.inf
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise InputError for numbers that no measurement can have."""
        _check("batch sizes", self.batch_sizes, 1, LARGEST_BATCH, may_be_empty=self.repeats is None)
        _check("replicas", self.replicas, 1, MOST_REPLICAS)
        _check("accumulation steps", self.accumulation, 0, MOST_STEPS)
        _check("warmup", (self.warmup,), 0, MOST_STEPS)
        if self.repeats is not None:
            _check("repeats", (self.repeats,), 1, MOST_STEPS)
        if not 0 < self.precision < 1:
            raise InputError("precision", f"is {self.precision}", "give a share between 0 and 1, such as 0.05 or 5%")
        if not self.budget_s > 0:
            raise InputError("budget", f"is {self.budget_s} s", "give a time above 0")

    def subject(self) -> Subject:
        """Return what the workers need to know."""
        return Subject(
            source=self.source,
            resolver=self.resolver,
            device=self.device,
            threads=self.threads or max(1, len(os.sched_getaffinity(0)) // (self.processes or max(self.replicas))),
            seed=self.seed,
        )


def _check(name: str, values: tuple[int, ...], least: int, most: int, *, may_be_empty: bool = False) -> None:
    if (not values and not may_be_empty) or min(values, default=least) < least:
        shown = values[0] if len(values) == 1 else values
        raise InputError(name, f"are {shown}", f"give whole numbers >= {least}")
    if max(values, default=least) > most:
        raise InputError(name, f"has {max(values)}", f"give whole numbers up to {most}")


def row_of(request: MeasureRequest, task: Task, times: Outcome, nodes: int) -> dict[str, Any]:
    """Return a configuration's row in ProfileRow's columns."""
    full = median_interval(times.full)
    step, shared = full.median, task.replicas > 1
    local = float(np.median(times.local)) if shared else step
    lower, upper = np.percentile(times.full, [25, 75])
    return {
        "device": request.device_name,
        "num_nodes": nodes,
        "num_replicas": task.replicas,
        "local_batch_size": task.batch,
        "step_time_s": step,
        # Never all of the step: computing takes some of it, whatever the noise says.
        "sync_time_s": min(max(0.0, step - local), 0.99 * step) if shared else 0.0,
        "peak_memory_bytes": times.peak_bytes,
        "step_time_spread_s": float(upper - lower),
        "repeats": len(times.full),
        "step_time_low_s": full.low,
        "step_time_high_s": full.high,
        "accumulation_steps": task.accumulation,
        "grad_time_s": min(float(np.median(times.passes)) if times.passes else local, step),
        "source": request.source_name or request.source,
        "settings": settings_of(request),
    }


def settings_of(request: MeasureRequest) -> str:
    """Return what must be equal for rows to compare, as ``NAME=VALUE`` separated by semicolons."""
    settings = {
        "device": request.device,
        "threads": request.subject().threads,
        "warmup": request.warmup,
        "seed": request.seed,
        "torch": version("torch"),
    }
    return ";".join(f"{name}={value}" for name, value in settings.items())


def reliability(frame: pd.DataFrame) -> list[str]:
    """Return a plain sentence for every reason not to trust the rows, with what to try."""
    found: list[str] = []
    wide = frame[frame["step_time_spread_s"] > RELIABLE_SPREAD * frame["step_time_s"]]
    if len(wide):
        worst = (wide["step_time_spread_s"] / wide["step_time_s"]).max()
        found.append(
            f"{len(wide)} of {len(frame)} rows spread by up to {worst:.0%}; stop other load or raise --repeats"
        )
    if (frame["step_time_s"] < SHORTEST_STEP_S).any():
        found.append("steps below 1 ms measure the framework more than the model; use larger batch sizes")
    if (frame["repeats"] < FEWEST_REPEATS).any():
        found.append(f"fewer than {FEWEST_REPEATS} repeats say nothing about the spread; raise --repeats")
    return found
