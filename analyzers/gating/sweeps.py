"""The named figures of sweeps: many replays of workloads under policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddltool.analyzers.gating.metric import Metric, figure, figures
from ddltool.analyzers.reporting.sweep_means import means_by_policy
from ddltool.artifacts import parse
from ddltool.results import SweepDocument

_UNITS = {"utilization": "share", "worst_fairness": "", "restarts": "", "cost": ""}


def sweep(document: Mapping[str, Any], where: str) -> Iterator[Metric]:
    """Yield each figure's mean over the seeds, as ``FIGURE/POLICY/WORKLOAD``, and how many replays there are and failed.

    Of a comparison: the two policies, and ``ratio/MEASURE``, the first one's over the second's (1 where they are equal).
    Raises InputError for a document that is no sweep.
    """
    found = parse(dict(document), SweepDocument, where)
    failed = sum(cell.figures is None for cell in found.cells)
    yield from figures("", replays=len(found.cells) - failed, failed=failed)
    for workload, policy, _, mean in means_by_policy(found):
        for name, value in mean.__dict__.items():
            yield from figure(f"{name}/{policy}/{workload}", value, _UNITS.get(name, "s"))
    if found.comparison is not None:
        yield from figure("compared", f"{found.comparison.first},{found.comparison.second}", "text")
        for one in found.comparison.comparisons:
            yield from figure(f"ratio/{one.measure}", one.ratio)
