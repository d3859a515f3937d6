"""``ddltool report ARTIFACT...``: one page that shows any artifacts, without network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ddltool import __version__
from ddltool.analyzers.costs.model import cost_model, estimate
from ddltool.analyzers.reporting import (
    fit_sections,
    plan_section,
    result_sections,
    simulation_section,
    sweep_section,
    telemetry_section,
)
from ddltool.analyzers.reporting.graph_section import graph_section
from ddltool.analyzers.reporting.section import Section
from ddltool.analyzers.reporting.stragglers_section import stragglers_section
from ddltool.artifacts import write_text
from ddltool.commands.artifact_reading import ORDER, Found, read_any, told_apart
from ddltool.commands.options import Json
from ddltool.commands.output import out, print_json, progress, table
from ddltool.commands.values import number
from ddltool.device import Network
from ddltool.fixtures.loading import calibration, devices
from ddltool.outputs import check_outputs
from ddltool.results import ReportedSection, ReportResult

_MOST_SAMPLES = 1e15


def report(
    artifacts: Annotated[
        list[Path],
        typer.Argument(
            metavar="ARTIFACT...", help="Files of the kinds that 'ddltool schema' lists for report; .gz accepted."
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE.html", help="Where to write the page.")
    ] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The page's title.")] = "ddltool report",
    noise_scale: Annotated[
        float | None,
        typer.Option(
            help="Gradient noise scale in samples for goodput maps; by default telemetry's, else none.",
            metavar="SAMPLES",
            parser=number("--noise-scale", 0, _MOST_SAMPLES),
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show artifacts as one page: pictures with their numbers, for screen, phone and print.

    Example: ddltool report graph.json plan.json telemetry.jsonl -o report.html
    """
    check_outputs(artifacts, {"-o": output})
    with progress("reading", len(artifacts)) as advance:
        found = []
        for place, path in enumerate(artifacts):
            advance(place, path.name)
            found.append(read_any(path))
    made = write_report(found, output, title=title, noise_scale=noise_scale)
    if as_json:
        print_json(made)
        return
    out().print(
        table("Sections", ("section", "file"), [(one.section, one.file) for one in made.sections], text_columns=2)
    )
    out().print(f"wrote {output} ({made.bytes / 1e3:,.0f} kB)", soft_wrap=True)


def write_report(
    found: Sequence[Found], path: Path, *, title: str, summary: Sequence[str] = (), noise_scale: float | None = None
) -> ReportResult:
    """Write the page of some artifacts, in the order in which data flow.

    ``noise_scale`` (samples) is for goodput maps; None: the last that telemetry among the files knows.
    """
    from ddltool.analyzers.reporting.page import render  # it loads the plotting library

    found = told_apart(found)
    noise = _noise(found) if noise_scale is None else noise_scale
    counts: Counter[str] = Counter()
    sections, listed = [], []
    with progress("drawing", len(found)) as advance:
        for place, one in enumerate(sorted(found, key=lambda one: ORDER.index(one.kind))):
            advance(place, one.name)
            counts[one.kind] += 1
            section = replace(_section(one, found, noise), anchor=f"{one.kind}-{counts[one.kind]}")
            sections.append(section)
            kind, file = f"ddltool.{one.kind}", str(one.path)
            listed.append(ReportedSection(section=section.anchor, title=section.title, kind=kind, file=file))
    page = render(title, sections, summary=[*summary, _summary(found)], generated_by=f"ddltool {__version__}")
    write_text(path, page)
    return ReportResult(report=str(path), bytes=len(page.encode()), sections=listed)


def _noise(found: Sequence[Found]) -> float | None:
    """Return the last gradient noise scale in any telemetry, None where there is none."""
    for one in found:
        if one.kind == "telemetry" and one.content["noise_scale"].notna().any():
            return float(one.content["noise_scale"].dropna().iloc[-1])
    return None


def _section(one: Found, found: Sequence[Found], noise: float | None) -> Section:
    """Return the section of an artifact; those that may be held against others of ``found`` get them."""

    def others(kind: str) -> list[tuple[str, Any]]:
        return [(other.name, other.content) for other in found if other.kind == kind]

    match one.kind:
        case "graph":
            return _graph_section(one)
        case "profile":
            section = fit_sections.profile_section(one.content, one.name, others("goodput"))
            memory = fit_sections.memory_pictures(one.content.attrs.get("memory", {}))
            return replace(section, blocks=[*section.blocks, *memory])
        case "goodput":
            profile = next((content for _, content in others("profile")), None)
            return fit_sections.goodput_section(one.content, one.name, profile, noise)
        case "telemetry":
            return telemetry_section.telemetry_section(one.content, one.name, others("plan"))
    return _DRAWERS[one.kind](one.content, one.name)


_DRAWERS: dict[str, Callable[[Any, str], Section]] = {
    "plan": plan_section.plan_section,
    "enforcement": plan_section.enforcement_section,
    "sync": telemetry_section.sync_section,
    "network": result_sections.network_section,
    "barrier": result_sections.barrier_section,
    "balance": result_sections.balance_section,
    "verification": result_sections.verification_section,
    "simulation": simulation_section.simulation_section,
    "sweep": sweep_section.sweep_section,
    "gate": result_sections.gate_section,
    "stragglers": stragglers_section,
}


def _graph_section(one: Found) -> Section:
    """Return a graph's section; a graph without times gets a V100's behind the default network, and says so."""
    graph, remark = one.content, ""
    if not graph.timed:
        graph = estimate(graph, cost_model(devices().device("V100"), calibration()), Network())
        remark = "The file has no times: these are a V100's behind 10 Gbit/s, predicted."
    elif graph.meta.get("oracle"):
        remark = f"Times: {graph.meta['oracle']}, {graph.meta.get('device') or 'device not named'}."
    return graph_section(graph, one.name, remark=remark)


def _summary(found: Sequence[Found]) -> str:
    """Return what the labels mean, and how many artifacts there are."""
    count = f"{len(found)} artifact{'s' if len(found) > 1 else ''}, in the order in which data flow."
    return (
        f"{count} Predicted: computed from datasheet figures or a fitted model. Simulated: played through. "
        "Measured: by a clock. Read: as it stands in the file."
    )
