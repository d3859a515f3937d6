"""The options of a plan beside the job. Start at :class:`PlanOptions`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ddltool.analyzers.job.planning.goal import Goal
from ddltool.analyzers.job.planning.superstep import DEFAULT_LOOKAHEAD
from ddltool.analyzers.step.communication.collectives import Compression
from ddltool.graph import Graph

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The options of ``ddltool plan``, read and checked."""

    goal: Goal = field(default_factory=Goal)
    graph: Graph | None = None
    """The model's graph, where it was given or the job names a model."""
    telemetry: Path | None = None
    """File of an earlier run's telemetry."""
    bandwidth: str | None = None
    latency: str = "50us"
    nccl_tests: tuple[Path, ...] = ()
    compress: Compression | None = None
    top_k: int = 1
    """How many EST plans to return, the best first."""
    limit_s: float = 5.0
    """Seconds for all searches together."""
    seed: int = 0
    prefer: tuple[str, ...] | None = None
    """Order of an EST plan's objectives; None: the default one."""
    lookahead: int = DEFAULT_LOOKAHEAD
    """Iterations up to an elastic-bsp plan's barrier."""
    max_gap: int | None = None
    """Iterations by which one worker may be ahead of another there; None: any number."""
    tell: Tell = lambda _: None
    """Takes a remark for the user."""
