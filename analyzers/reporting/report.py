"""Artifacts as one page: the answer on top, then a section each, in the order in which data flow. Start at :func:`report`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel

from ddltool import __version__
from ddltool.analyzers.loading.artifact_files import ORDER, Found, read_any, told_apart
from ddltool.analyzers.reporting import (
    fit_sections,
    plan_section,
    result_sections,
    simulation_section,
    telemetry_section,
)
from ddltool.analyzers.reporting.graph_section import graph_section
from ddltool.analyzers.reporting.section import Section
from ddltool.analyzers.reporting.telemetry_section import stragglers_section
from ddltool.analyzers.reporting.verdicts import headline, verdict_of
from ddltool.artifacts import check_outputs, write_text
from ddltool.errors import InputError
from ddltool.graph import Graph
from ddltool.results import ReportedSection, ReportResult
from ddltool.stages import Stage, quietly


def report(
    artifacts: Iterable[Any],
    output: str | Path = "report.html",
    *,
    title: str = "ddltool report",
    noise_scale: float | None = None,
    summary: Sequence[str] = (),
    stage: Stage = quietly,
) -> ReportResult:
    """Write one self-contained page of some artifacts: files, results, Graphs or a profile's DataFrames.

    ``noise_scale`` (samples) is for goodput maps; None: the last that telemetry among the artifacts knows. ``summary``:
    sentences on top. Raises InputError, before anything is written, for what is unknown, broken or empty.
    """
    from ddltool.analyzers.reporting.page import render  # it loads the plotting library

    given = list(artifacts)
    check_outputs([one for one in given if isinstance(one, (str, Path))], {"-o": output})
    with stage("reading", len(given)) as advance:
        read = []
        for place, one in enumerate(given):
            read.append(found_in(one))
            advance(place + 1, read[-1].name)
    found = told_apart(read)
    noise = _noise(found) if noise_scale is None else noise_scale
    counts: Counter[str] = Counter()
    sections, listed = [], []
    with stage("drawing", len(found)) as advance:
        for place, one in enumerate(sorted(found, key=lambda one: ORDER.index(one.kind))):
            advance(place, one.name)
            counts[one.kind] += 1
            section = section_of(one, found, noise)
            verdict = section.verdict or verdict_of(one, found)
            section = replace(section, anchor=f"{one.kind}-{counts[one.kind]}", verdict=verdict)
            sections.append(section)
            kind, file = f"ddltool.{one.kind}", str(one.path)
            listed.append(ReportedSection(section=section.anchor, title=section.title, kind=kind, file=file))
    said, by = [*summary, _summary(found)], f"ddltool {__version__}"
    page = render(title, sections, summary=said, generated_by=by, first=headline(sections))
    write_text(output, page)
    return ReportResult(report=str(output), bytes=len(page.encode()), sections=listed)


def found_in(given: Any) -> Found:
    """Return an artifact as the report knows it: read from a file, or as a program holds it."""
    if isinstance(given, (str, Path)):
        return read_any(Path(given))
    if isinstance(given, Graph):
        return Found(kind="graph", path=Path(given.name), content=given)
    if isinstance(given, pd.DataFrame):
        return Found(kind="profile", path=Path("profile"), content=given)
    kind = str(getattr(given, "kind", "")).removeprefix("ddltool.")
    if not isinstance(given, BaseModel) or kind not in ORDER:
        remedy = "give a file, a result, a Graph or a profile's DataFrame"
        raise InputError("artifact", f"a {type(given).__name__} has no section", remedy)
    content = pd.DataFrame([dict(row) for row in given.rows]) if kind == "profile" else given  # type: ignore[attr-defined]
    return Found(kind=kind, path=Path(kind), content=content)


def _noise(found: Sequence[Found]) -> float | None:
    """Return the last gradient noise scale in any telemetry, None where there is none."""
    for one in found:
        if one.kind == "telemetry" and one.content["noise_scale"].notna().any():
            return float(one.content["noise_scale"].dropna().iloc[-1])
    return None


def section_of(one: Found, found: Sequence[Found] = (), noise: float | None = None) -> Section:
    """Return the section of an artifact; those that may be held against others of ``found`` get them."""

    def others(kind: str) -> list[tuple[str, Any]]:
        return [(other.name, other.content) for other in found if other.kind == kind]

    match one.kind:
        case "graph":
            return graph_section(one.content, one.name, remark=one.remark)
        case "profile":
            section = fit_sections.profile_section(one.content, one.name, others("goodput"))
            held = one.content.attrs.get("memory", {}).items()
            return replace(section, blocks=[*section.blocks, *(fit_sections.memory_picture(*each) for each in held)])
        case "goodput":
            profile = next((content for _, content in others("profile")), None)
            return fit_sections.goodput_section(one.content, one.name, profile, noise)
        case "telemetry":
            section = telemetry_section.telemetry_section(one.content, one.name, others("plan"))
        case _:
            section = _DRAWERS[one.kind](one.content, one.name)
    return replace(section, lead=[*section.lead, *([f"{one.remark.capitalize()}."] if one.remark else [])])


_DRAWERS: dict[str, Callable[[Any, str], Section]] = {
    "plan": plan_section.plan_section,
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


def _summary(found: Sequence[Found]) -> str:
    """Return what the labels mean, and how many artifacts there are."""
    count = f"{len(found)} artifact{'s' if len(found) > 1 else ''}, in the order in which data flow."
    return (
        f"{count} Predicted: computed from datasheet figures or a fitted model. Simulated: played through. "
        "Measured: by a clock. Read: as it stands in the file."
    )
