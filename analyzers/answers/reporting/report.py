"""Artifacts as sections of one page. Start at :func:`section_of`."""

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
from ddltool.analyzers.answers.reporting.command_section import command_section
from ddltool.analyzers.answers.reporting.graph_section import graph_section
from ddltool.analyzers.answers.reporting.islands_section import islands_section
from ddltool.analyzers.answers.reporting.lengths_section import lengths_section
from ddltool.analyzers.answers.reporting.predict_section import predict_section
from ddltool.analyzers.answers.reporting.section import Section
from ddltool.analyzers.answers.reporting.telemetry_section import stragglers_section
from ddltool.analyzers.step.costs.timed_graph import with_op_times
from ddltool.artifact_files import ORDER, ReadArtifact, read_any
from ddltool.errors import InputError
from ddltool.graph import Graph
from ddltool.graph_results import PredictResult


def found_in(artifact: Any) -> ReadArtifact:
    """Return an artifact, given as a file's path or as an object of a program, for the report.

    Raises InputError for an object that has no section, and for a wrong or unreadable file.
    """
    if isinstance(artifact, (str, Path)):
        return read_any(Path(artifact))
    if isinstance(artifact, Graph):
        return ReadArtifact(kind="graph", path=Path(artifact.name), content=artifact)
    if isinstance(artifact, pd.DataFrame):
        return ReadArtifact(kind="profile", path=Path("profile"), content=artifact)
    kind = str(getattr(artifact, "kind", "")).removeprefix("ddltool.")
    if not isinstance(artifact, BaseModel) or kind not in ORDER:
        remedy = "give a file, a result, a Graph or a profile's DataFrame"
        raise InputError("artifact", f"a {type(artifact).__name__} has no section", remedy)
    content: Any = pd.DataFrame([dict(row) for row in artifact.rows]) if kind == "profile" else artifact  # type: ignore[attr-defined]
    if isinstance(artifact, PredictResult):
        content.attrs["prediction"] = artifact  # by which section_of tells a prediction from a measured profile
    return ReadArtifact(kind=kind, path=Path(kind), content=content)


def noise_of(artifacts: Sequence[ReadArtifact]) -> float | None:
    """Return the last gradient noise scale (samples) in the first telemetry that has any; None if none has."""
    for artifact in artifacts:
        if artifact.kind == "telemetry" and artifact.content["noise_scale"].notna().any():
            return float(artifact.content["noise_scale"].dropna().iloc[-1])
    return None


def section_of(artifact: ReadArtifact, artifacts: Sequence[ReadArtifact] = (), noise: float | None = None) -> Section:
    """Return the section of an artifact.

    ``artifacts``: all of the page, of which related ones are used: a run is compared with its plans, a profile with its fitted
    model. A remark on the artifact ends the lead. ``noise``: the gradient noise scale (samples), for a fitted model; None:
    unknown.
    """

    def others(kind: str) -> list[tuple[str, Any]]:
        """Return (name, content) of each artifact of one kind on the page, this one included."""
        return [(other.name, other.content) for other in artifacts if other.kind == kind]

    match artifact.kind:
        case "graph":
            graph, origin_of_times = with_op_times(artifact.content)
            return graph_section(graph, artifact.name, remark=origin_of_times)
        case "profile":
            prediction = artifact.content.attrs.get("prediction")
            if prediction is None:
                return fit_sections.profile_section(artifact.content, artifact.name, others("goodput"))
            section = predict_section(prediction)
            memories = [(name, device.memory) for name, device in prediction.devices.items() if device.memory]
            blocks = [*section.blocks, *(fit_sections.memory_picture(*each) for each in memories)]
            return replace(section, title=f"Prediction: {artifact.name}", blocks=blocks)
        case "goodput":
            profile = next((content for _, content in others("profile")), None)
            return fit_sections.goodput_section(artifact.content, artifact.name, profile, noise)
        case "plan":
            section = plan_section.plan_section(
                artifact.content, artifact.name, [content for _, content in others("plan")]
            )
        case "telemetry":
            section = telemetry_section.telemetry_section(artifact.content, artifact.name, others("plan"))
        case _:
            section = _DRAWERS[artifact.kind](artifact.content, artifact.name)
    # Only telemetry and servers' events (sync) can have a remark, so the cases that returned above leave none out.
    if not artifact.remark:
        return section
    return replace(section, lead=[*section.lead, f"{artifact.remark.capitalize()}."])


_DRAWERS: dict[str, Callable[[Any, str], Section]] = {
    "command_plan": command_section,
    "islands_plan": islands_section,
    "enforcement": plan_section.enforcement_section,
    "sync": telemetry_section.sync_section,
    "network": result_sections.network_section,
    "barrier": result_sections.barrier_section,
    "balance": result_sections.balance_section,
    "lengths": lengths_section,
    "verification": result_sections.verification_section,
    "simulation": simulation_section.simulation_section,
    "sweep": simulation_section.sweep_section,
    "gate": result_sections.gate_section,
    "stragglers": stragglers_section,
}


def summary_of(artifacts: Sequence[ReadArtifact]) -> str:
    """Return the sentences with the number of artifacts and the meanings of the labels of figures."""
    count = f"{len(artifacts)} artifact{'s' if len(artifacts) > 1 else ''}, in the order in which data flow."
    return (
        f"{count} Predicted: computed from datasheet figures or a fitted model. Simulated: played through. "
        "Measured: by a clock. Read: as it stands in the file."
    )


# Kinds by how likely their verdict is what a reader of several artifacts asks for; failures come before all (see headline).
_IMPORTANCE = (
    "verification",
    "stragglers",
    "plan",
    "command_plan",
    "islands_plan",
    "simulation",
    "sweep",
    "balance",
    "lengths",
    "barrier",
    "gate",
    "telemetry",
    "graph",
    "goodput",
    "profile",
    "network",
    "sync",
    "enforcement",
)


def headline(sections: Sequence[Section]) -> Section | None:
    """Return the section whose verdict a page opens with; None if no section has a verdict."""

    def rank(section: Section) -> tuple[bool, bool, int]:
        """Return the sort key of verdicts: a failed gate or refuted plan first, then main before minor ones, then by kind."""
        kind = section.anchor.rsplit("-", 1)[0]
        verdict = section.verdict
        assert verdict is not None
        has_failed = kind in ("gate", "verification") and verdict.good is False
        return not has_failed, verdict.minor, _IMPORTANCE.index(kind)

    judged = [section for section in sections if section.verdict is not None]
    return min(judged, key=rank, default=None)
