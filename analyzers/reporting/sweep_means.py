"""Means over the seeds of a sweep, for the report and the gate."""

from __future__ import annotations

import sys

from ddltool.results import SweepDocument, SweepFigures

_LARGEST = sys.float_info.max


def means_by_policy(found: SweepDocument) -> list[tuple[str, str, int, SweepFigures]]:
    """Return (workload, policy, number of seeds, means over these) in the order of the document; failed replays have no part.

    A cost is there where every replay of the group has one.
    """
    groups: dict[tuple[str, str], list[SweepFigures]] = {}
    for cell in found.cells:
        groups.setdefault((cell.workload, cell.policy), [])
        if cell.figures is not None:
            groups[cell.workload, cell.policy].append(cell.figures)
    # Workload by workload, as they come first.
    places = {workload: place for place, workload in enumerate(dict.fromkeys(workload for workload, _ in groups))}
    ordered = sorted(groups.items(), key=lambda item: places[item[0][0]])
    return [(workload, policy, len(values), _mean(values)) for (workload, policy), values in ordered if values]


def _mean(values: list[SweepFigures]) -> SweepFigures:
    made: dict[str, float | None] = {}
    for name in SweepFigures.model_fields:
        each = [getattr(one, name) for one in values]
        # Divided first: a sum of large numbers may be none.
        made[name] = None if None in each else min(sum(value / len(each) for value in each), _LARGEST)
    return SweepFigures.model_validate(made)
