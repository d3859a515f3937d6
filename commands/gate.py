"""``ddltool gate CURRENT --baseline BASELINE``: may this change go in?"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from ddltool.commands.options import Json, Seed

if TYPE_CHECKING:
    from ddltool.analyzers.gating.gate import Verdict
    from ddltool.analyzers.gating.metric import Metric
    from ddltool.commands.gate_files import GateConfig

_NAMED = 8


def gate(
    current: Annotated[
        list[Path],
        typer.Argument(metavar="CURRENT...", help="An artifact of any kind; several files are repeats of one thing."),
    ],
    baseline: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(metavar="FILE|DIR", help="What to compare with; repeatable. A folder: the file of the same name."),
    ] = None,
    rule: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="RULE", help="Such as 'iteration_s <= 0.5', 'throughput >= -5%', 'ops increase <= 3'; repeatable."
        ),
    ] = None,
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Rules by kind; ./ddltool.toml where it is there.", show_default=False),
    ] = None,
    level: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Share of false alarms from noise, for the whole gate (default 0.05).", show_default=False),
    ] = None,
    junit: Annotated[Optional[Path], typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,  # noqa: UP045
    sarif: Annotated[Optional[Path], typer.Option(metavar="FILE", help="Write SARIF 2.1.0.")] = None,  # noqa: UP045
    github: Annotated[
        bool, typer.Option("--github", help="GitHub annotations on stderr, and the step summary.")
    ] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="Only list the metrics that CURRENT has.")] = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Hold an artifact against limits and a baseline; exit 1 names each check that failed.

    Example: ddltool gate plan.json --baseline main/plan.json --rule 'iteration_s increase <= 5%'
    """
    import time

    from ddltool.analyzers.gating.formats import junit as as_junit
    from ddltool.analyzers.gating.formats import sarif as as_sarif
    from ddltool.analyzers.gating.gate import LEVEL, as_document, judge
    from ddltool.analyzers.gating.metric import harmless
    from ddltool.artifacts import check_writable, save, write_text
    from ddltool.commands.gate_files import figures_of, rules_for
    from ddltool.commands.output import print_json
    from ddltool.errors import CheckFailed, InputError
    from ddltool.outputs import demand_distinct

    begin = time.perf_counter()
    for path in (junit, sarif):
        if path is not None:
            check_writable(path)
    found = figures_of(current)
    if metrics:
        _list_metrics(found.kind, list(found.metrics.values()), as_json)
        return
    settings = _settings(config)
    chosen = level if level is not None else settings.level if settings and settings.level else LEVEL
    if not 0 < chosen < 1:
        raise InputError("--level", f"is {chosen:g}", "give a share between 0 and 1, such as 0.05")
    rules, origin = rules_for(found.kind, rule or [], settings)
    against = _baselines(current, baseline or [], settings)
    summary = os.environ.get("GITHUB_STEP_SUMMARY") if github else None
    read = [*current, *against, settings.where if settings is not None else None]
    demand_distinct(read, {"--junit": junit, "--sarif": sarif, "GITHUB_STEP_SUMMARY": summary or None})
    before = figures_of(against) if against else None
    if before is not None and before.kind != found.kind:
        problem = f"is a {before.kind}, {current[0]} a {found.kind}"
        raise InputError(str(against[0]), problem, "compare two artifacts of one kind")
    verdict = judge(
        rules,
        found.metrics,
        before.metrics if before is not None else None,
        level=chosen,
        seed=seed,
        where=origin,
    )
    subject = harmless(str(current[0])) if len(current) == 1 else harmless(f"{current[0]} and {len(current) - 1} more")
    if junit is not None:
        write_text(junit, as_junit(verdict, subject, seconds=time.perf_counter() - begin))
    if sarif is not None:
        from ddltool import __version__

        save(as_sarif(verdict, str(current[0]), version=__version__), sarif)
    if github:
        _tell_github(verdict, str(current[0]), subject)
    if as_json:
        names = {"current": [str(path) for path in current], "baseline": [str(path) for path in against]}
        print_json(as_document(verdict, artifact=found.kind, rules_from=origin, **names))
    else:
        written = [path for path in (junit, sarif) if path is not None]
        beside = harmless(f"{subject} against {against[0]}") if against else subject
        _show(verdict, beside, origin, written)
    if not verdict.passed:
        failed = verdict.failed
        more = f" | and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
        named = " | ".join(check.sentence() for check in failed[:_NAMED])
        raise CheckFailed(f"{len(failed)} of {len(verdict.checks)} checks failed: {named}{more}")


def _settings(config: Path | None) -> GateConfig | None:
    """Return the configuration that was named, else that of the working folder, else none."""
    from ddltool.commands.gate_files import CONFIG_NAME, read_config

    if config is not None:
        return read_config(config)
    here = Path(CONFIG_NAME)
    return read_config(here) if here.is_file() else None


def _baselines(current: list[Path], given: list[Path], settings: GateConfig | None) -> list[Path]:
    """Return the baseline files; a folder stands for the files in it that are named as the current ones."""
    if not given and settings is not None and settings.baseline is not None:
        given = [Path(settings.baseline)]
    found: list[Path] = []
    for path in given:
        found += [path / one.name for one in current] if path.is_dir() else [path]
    return found


def _tell_github(verdict: Verdict, path: str, subject: str) -> None:
    """Write annotations on stderr, which GitHub reads as well as stdout, and append to the step summary."""
    from ddltool.analyzers.gating.formats import summary, workflow_commands
    from ddltool.errors import InputError

    for line in workflow_commands(verdict, path):
        sys.stderr.write(line + "\n")
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    if place:
        try:
            with open(place, "a", encoding="utf-8") as file:
                file.write(summary(verdict, subject))
        except OSError as error:
            raise InputError("GITHUB_STEP_SUMMARY", f"{place} cannot be written ({error.strerror})") from None


def _show(verdict: Verdict, subject: str, origin: str, written: list[Path]) -> None:
    from ddltool.analyzers.gating.formats import outcome, remarks
    from ddltool.analyzers.gating.metric import LONGEST_NAME
    from ddltool.commands.output import out, table
    from ddltool.errors import shortened

    rows = []
    for check in verdict.checks:
        before, now, change, limit = check.shown()
        rows.append((outcome(check), shortened(check.metric, LONGEST_NAME), before, now, change, limit))
    console = out()
    columns = ("", "metric", "baseline", "current", "change", "limit")
    console.print(table(f"Gate ({origin})", columns, rows, text_columns=2))
    for line in remarks(verdict):
        console.print(line)
    if verdict.test_in_words():
        console.print(verdict.test_in_words())
    count = len(verdict.checks)
    said = f"passed: {count} checks" if verdict.passed else f"FAILED: {len(verdict.failed)} of {count} checks"
    console.print(f"{said}, {subject}", soft_wrap=True)
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True)


def _list_metrics(kind: str, metrics: list[Metric], as_json: bool) -> None:
    from ddltool.analyzers.gating.metric import LONGEST_NAME, show
    from ddltool.commands.output import out, print_json, table
    from ddltool.errors import shortened

    if as_json:
        listed = [
            {"name": metric.name, "value": metric.value, "unit": metric.unit, "measured": metric.measured}
            for metric in metrics
        ]
        print_json({"kind": "ddltool.gate_metrics", "schema_version": 1, "artifact": kind, "metrics": listed})
        return
    rows = [
        (
            shortened(metric.name, LONGEST_NAME),
            "measured" if metric.measured else "",
            show(metric.value, metric.unit),
            str(min((cell.repeats for cell in metric.cells), default=1)) if metric.measured else "-",
        )
        for metric in metrics
    ]
    out().print(table(f"Metrics of a {kind}", ("metric", "", "value", "repeats"), rows, text_columns=2))
