"""Artifacts as sections of one page, in the order in which data flow. Start at :func:`section_of`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel

from ddltool.analyzers.answers.reporting import (
    fit_sections,
    plan_section,
    result_sections,
    simulation_section,
    telemetry_section,
)
from ddltool.analyzers.answers.reporting.graph_section import graph_section
from ddltool.analyzers.answers.reporting.section import Section
from ddltool.analyzers.answers.reporting.telemetry_section import stragglers_section
from ddltool.analyzers.step.costs.timed_graph import timed_somehow
from ddltool.artifact_files import ORDER, ReadArtifact, read_any
from ddltool.errors import InputError
from ddltool.graph import Graph


def found_in(given: Any) -> ReadArtifact:
    """Return an artifact as the report knows it: read from a file, or as a program holds it."""
    if isinstance(given, (str, Path)):
        return read_any(Path(given))
    if isinstance(given, Graph):
        return ReadArtifact(kind="graph", path=Path(given.name), content=given)
    if isinstance(given, pd.DataFrame):
        return ReadArtifact(kind="profile", path=Path("profile"), content=given)
    kind = str(getattr(given, "kind", "")).removeprefix("ddltool.")
    if not isinstance(given, BaseModel) or kind not in ORDER:
        remedy = "give a file, a result, a Graph or a profile's DataFrame"
        raise InputError("artifact", f"a {type(given).__name__} has no section", remedy)
    content = pd.DataFrame([dict(row) for row in given.rows]) if kind == "profile" else given  # type: ignore[attr-defined]
    return ReadArtifact(kind=kind, path=Path(kind), content=content)


def noise_of(found: Sequence[ReadArtifact]) -> float | None:
    """Return the last gradient noise scale in any telemetry, None where there is none."""
    for one in found:
        if one.kind == "telemetry" and one.content["noise_scale"].notna().any():
            return float(one.content["noise_scale"].dropna().iloc[-1])
    return None


def section_of(one: ReadArtifact, found: Sequence[ReadArtifact] = (), noise: float | None = None) -> Section:
    """Return the section of an artifact; those that may be held against others of ``found`` get them."""

    def others(kind: str) -> list[tuple[str, Any]]:
        return [(other.name, other.content) for other in found if other.kind == kind]

    match one.kind:
        case "graph":
            graph, times = timed_somehow(one.content)
            return graph_section(graph, one.name, remark=times)
        case "profile":
            section = fit_sections.profile_section(one.content, one.name, others("goodput"))
            held = one.content.attrs.get("memory", {}).items()
            return replace(section, blocks=[*section.blocks, *(fit_sections.memory_picture(*each) for each in held)])
        case "goodput":
            profile = next((content for _, content in others("profile")), None)
            return fit_sections.goodput_section(one.content, one.name, profile, noise)
        case "plan":
            section = plan_section.plan_section(one.content, one.name, [content for _, content in others("plan")])
        case "telemetry":
            section = telemetry_section.telemetry_section(one.content, one.name, others("plan"))
        case _:
            section = _DRAWERS[one.kind](one.content, one.name)
    return replace(section, lead=[*section.lead, *([f"{one.remark.capitalize()}."] if one.remark else [])])


_DRAWERS: dict[str, Callable[[Any, str], Section]] = {
    "enforcement": plan_section.enforcement_section,
    "sync": telemetry_section.sync_section,
    "network": result_sections.network_section,
    "barrier": result_sections.barrier_section,
    "balance": result_sections.balance_section,
    "verification": result_sections.verification_section,
    "simulation": simulation_section.simulation_section,
    "sweep": simulation_section.sweep_section,
    "gate": result_sections.gate_section,
    "stragglers": stragglers_section,
}


def summary_of(found: Sequence[ReadArtifact]) -> str:
    """Return what the labels mean, and how many artifacts there are."""
    count = f"{len(found)} artifact{'s' if len(found) > 1 else ''}, in the order in which data flow."
    return (
        f"{count} Predicted: computed from datasheet figures or a fitted model. Simulated: played through. "
        "Measured: by a clock. Read: as it stands in the file."
    )


# Which question a reader of several artifacts asked; a gate that failed and a plan that a run has refuted come first.
_IMPORTANCE = (
    *("verification", "stragglers", "plan", "simulation", "sweep", "balance", "barrier", "gate", "telemetry", "graph"),
    *("goodput", "profile", "network", "sync", "enforcement"),
)


def headline(sections: Sequence[Section]) -> Section | None:
    """Return the section whose verdict a page opens with; None where none has one."""

    def rank(section: Section) -> tuple[bool, bool, int]:
        kind = section.anchor.rsplit("-", 1)[0]
        verdict = section.verdict
        assert verdict is not None
        return not (kind in ("gate", "verification") and verdict.good is False), verdict.minor, _IMPORTANCE.index(kind)

    judged = [section for section in sections if section.verdict is not None]
    return min(judged, key=rank, default=None)
