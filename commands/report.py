"""``ddltool report ARTIFACT...``: one page that shows any artifacts, without network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from ddltool import __version__
from ddltool.analyzers.answers.reporting.report import found_in, headline, noise_of, section_of, summary_of
from ddltool.artifact_files import ORDER, with_distinct_names
from ddltool.artifacts import check_outputs, write_text
from ddltool.commands.options import AS_FILES, number
from ddltool.commands.output import out, print_json, say, table
from ddltool.commands.verbs import VerbCall, verb
from ddltool.errors import InputError
from ddltool.results import ReportedSection, ReportResult
from ddltool.stages import Stage, quietly

_MOST_SAMPLES = 1e15


@verb
def report(
    artifacts: Annotated[Iterable[Any], AS_FILES],
    output: str | Path = Path("report.html"),
    *,
    title: str = "ddltool report",
    noise_scale: Annotated[float | None, number(0, _MOST_SAMPLES)] = None,
    summary: Sequence[str] = (),
    stage: Stage = quietly,
) -> ReportResult:
    """Show artifacts as one page: pictures with their numbers, for screen, phone and print.

    ``artifacts``: files, results, Graphs or a profile's DataFrames. The page, one file that needs no other, is written to
    ``output``. ``noise_scale`` (samples): for goodput maps; None: the last in telemetry among the artifacts. ``summary``:
    sentences at the top. ``stage``: shows the progress of reading and of drawing.

    Raises InputError, before anything is written, for an artifact of an unknown kind, and a file that is broken or empty.
    """
    from ddltool.analyzers.answers.reporting.page import render  # it loads the plotting library

    given = list(artifacts)
    if not given:
        raise InputError("artifacts", "are none", "give a file or a result at least")
    check_outputs([artifact for artifact in given if isinstance(artifact, (str, Path))], {"-o": output})
    with stage("reading", len(given)) as advance:
        read = []
        for done, artifact in enumerate(given, start=1):
            read.append(found_in(artifact))
            advance(done, read[-1].name)
    inputs = with_distinct_names(read)
    noise = noise_of(inputs) if noise_scale is None else noise_scale
    # Sections of one kind are numbered in their anchors: plan-1, plan-2.
    counts: Counter[str] = Counter()
    sections, listed = [], []
    with stage("drawing", len(inputs)) as advance:
        for done, artifact in enumerate(sorted(inputs, key=lambda one: ORDER.index(one.kind))):
            advance(done, artifact.name)
            counts[artifact.kind] += 1
            anchor = f"{artifact.kind}-{counts[artifact.kind]}"
            section = replace(section_of(artifact, inputs, noise), anchor=anchor)
            sections.append(section)
            kind, file = f"ddltool.{artifact.kind}", str(artifact.path)
            listed.append(ReportedSection(section=anchor, title=section.title, kind=kind, file=file))
    sentences, by = [*summary, summary_of(inputs)], f"ddltool {__version__}"
    page = render(title, sections, summary=sentences, generated_by=by, first=headline(sections))
    write_text(output, page)
    return ReportResult(report=str(output), bytes=len(page.encode()), sections=listed)


def show_report(call: VerbCall[ReportResult], as_json: bool = False) -> None:
    """Print the page's sections and its file; ``as_json``: the result as one JSON document."""
    result = call()
    if as_json:
        print_json(result)
        return
    rows = [(section.section, section.file) for section in result.sections]
    out().print(table("Sections", ("section", "file"), rows, text_columns=2))
    say(f"wrote {result.report} ({result.bytes / 1e3:,.0f} kB)")
