"""``ddltool gate CURRENT --baseline BASELINE``: may this change go in?"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from ddltool import __version__
from ddltool.analyzers.gating.formats import junit as as_junit
from ddltool.analyzers.gating.formats import named, sentence, summary, workflow_commands
from ddltool.analyzers.gating.formats import sarif as as_sarif
from ddltool.analyzers.gating.metrics import Figures, harmless
from ddltool.analyzers.gating.metrics import show as show_figure
from ddltool.analyzers.gating.verdict import CONFIG_NAME, GateConfig, baselines_of, figures_of, read_config
from ddltool.analyzers.gating.verdict import gate as judged
from ddltool.analyzers.reporting.result_sections import gate_section
from ddltool.artifacts import check_outputs, save, write_text
from ddltool.commands.options import Seed, demand_part
from ddltool.commands.output import out, print_json, show, table
from ddltool.errors import CheckFailed, InputError
from ddltool.results import GateMetrics, GateResult, MetricFigure

_NAMED = 8


def gate(
    context: typer.Context,
    current: list[Path],
    baseline: list[Path] | None = None,
    rule: list[str] | None = None,
    config: Path | None = None,
    level: float | None = None,
    junit: Path | None = None,
    sarif: Path | None = None,
    github: bool = False,
    metrics: bool = False,
    seed: Seed = 0,
    as_json: bool = False,
) -> None:
    """Hold an artifact against limits and a baseline; exit 1 names each check that failed.

    Example: ddltool gate plan.json --baseline main/plan.json --rule 'iteration_s increase <= 5%'
    """
    if metrics:
        demand_part(context, "--metrics", {"current", "metrics", "as_json"})
        _list_metrics(figures_of(current), as_json)
        return
    begin_s = time.perf_counter()
    settings = read_config(config or Path(CONFIG_NAME), required=config is not None)
    against = baselines_of(current, baseline or [], settings)
    place = os.environ.get("GITHUB_STEP_SUMMARY") if github else None
    read = [*current, *against, settings.where if settings is not None else None]
    check_outputs(read, {"--junit": junit, "--sarif": sarif, "GITHUB_STEP_SUMMARY": place or None})
    verdict = judged(current, against, rules=rule or [], level=level, config=settings or GateConfig(), seed=seed)
    if junit is not None:
        write_text(junit, as_junit(verdict, _subject(current), seconds=time.perf_counter() - begin_s))
    if sarif is not None:
        save(as_sarif(verdict, str(current[0]), version=__version__), sarif)
    if github:
        _tell_github(verdict, current, place)
    if as_json:
        print_json(verdict)
    else:
        show(gate_section(verdict, _subject(current, against)), junit, sarif)
    if failed := verdict.failed:
        more = f" | and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
        told = " | ".join(sentence(check) for check in failed[:_NAMED])
        raise CheckFailed(f"{len(failed)} of {len(verdict.checks)} checks failed: {told}{more}")


def _subject(current: list[Path], against: Sequence[Path] = ()) -> str:
    """Return what is judged in words: the first file, how many more, and the first baseline."""
    text = str(current[0]) if len(current) == 1 else f"{current[0]} and {len(current) - 1} more"
    return harmless(f"{text} against {against[0]}" if against else text)


def _tell_github(verdict: GateResult, current: list[Path], place: str | None) -> None:
    """Write annotations on stderr, which GitHub reads as well as stdout, and append to the step summary."""
    for line in workflow_commands(verdict, str(current[0])):
        sys.stderr.write(line + "\n")
    if place:
        try:
            with open(place, "a", encoding="utf-8") as file:
                file.write(summary(verdict, _subject(current)))
        except OSError as error:
            raise InputError("GITHUB_STEP_SUMMARY", f"{place} cannot be written ({error.strerror})") from None


def _list_metrics(found: Figures, as_json: bool) -> None:
    """Print what an artifact can be judged by."""
    metrics = found.metrics.values()
    if as_json:
        listed = [MetricFigure(name=one.name, value=one.value, unit=one.unit, measured=one.measured) for one in metrics]
        print_json(GateMetrics(artifact=found.kind, metrics=listed))
        return
    rows = []
    for one in metrics:
        repeats = str(min((cell.repeats for cell in one.cells), default=1)) if one.measured else "-"
        rows.append((named(one.name), "measured" if one.measured else "", show_figure(one.value, one.unit), repeats))
    out().print(table(f"Metrics of a {found.kind}", ("metric", "", "value", "repeats"), rows, text_columns=2))
