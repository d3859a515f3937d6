"""``ddltool report ARTIFACT...``: one page that shows any artifacts, without network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.commands.options import Json
from ddltool.commands.output import out, print_json, progress, say, table
from ddltool.commands.values import number

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
    from ddltool.analyzers.reporting.report import report as written  # it loads the plotting library

    made = written(artifacts, output, title=title, noise_scale=noise_scale, stage=progress)
    if as_json:
        print_json(made)
        return
    out().print(
        table("Sections", ("section", "file"), [(one.section, one.file) for one in made.sections], text_columns=2)
    )
    say(f"wrote {output} ({made.bytes / 1e3:,.0f} kB)")
