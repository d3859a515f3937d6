"""``ddltool report ARTIFACT...``: one page that shows any artifacts, without network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ddltool.commands.options import number
from ddltool.commands.output import out, print_json, progress, say, table

_MOST_SAMPLES = 1e15


def report(
    artifacts: list[Path],
    output: Path = Path("report.html"),
    title: str = "ddltool report",
    noise_scale: Annotated[float | None, number(0, _MOST_SAMPLES)] = None,
    as_json: bool = False,
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
