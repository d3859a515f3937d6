"""``ddltool gate CURRENT --baseline BASELINE``: may this change go in?"""

from __future__ import annotations

import os
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer
from pydantic import Field, PrivateAttr

from ddltool import __version__
from ddltool.analyzers.gating.formats import junit as as_junit
from ddltool.analyzers.gating.formats import sarif as as_sarif
from ddltool.analyzers.gating.formats import sentence, summary, workflow_commands
from ddltool.analyzers.gating.gate import LEVEL, judge
from ddltool.analyzers.gating.metric import LONGEST_NAME, harmless
from ddltool.analyzers.gating.metric import show as show_figure
from ddltool.analyzers.gating.metrics import EXTRACTORS, Figures, combine
from ddltool.analyzers.gating.rules import Rule, default_rules, parse_rules
from ddltool.analyzers.reporting.result_sections import gate_section
from ddltool.artifacts import Record, check_writable, parse_record, read_text, save, write_text
from ddltool.commands.artifact_reading import read_artifact
from ddltool.commands.options import Json, Seed
from ddltool.commands.output import out, print_json, show, table
from ddltool.commands.parts import demand_part
from ddltool.errors import CheckFailed, InputError, did_you_mean, shortened
from ddltool.outputs import demand_distinct
from ddltool.results import GateMetrics, GateResult, MetricFigure

_NAMED = 8
CONFIG_NAME = "ddltool.toml"


def gate(
    context: typer.Context,
    current: Annotated[
        list[Path],
        typer.Argument(
            metavar="CURRENT...",
            help="An artifact of a kind that 'ddltool schema' says gate reads; several are repeats.",
        ),
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
    if metrics:
        demand_part(context, "--metrics", {"current", "metrics", "as_json"})
        _list_metrics(figures_of(current), as_json)
        return
    begin_s = time.perf_counter()
    for path in (junit, sarif):
        if path is not None:
            check_writable(path)
    found = figures_of(current)
    settings = _settings(config)
    false_alarms = _level(level, settings)
    rules, origin = rules_for(found.kind, rule or [], settings)
    against = _baselines(current, baseline or [], settings)
    summary = os.environ.get("GITHUB_STEP_SUMMARY") if github else None
    read = [*current, *against, settings.where if settings is not None else None]
    demand_distinct(read, {"--junit": junit, "--sarif": sarif, "GITHUB_STEP_SUMMARY": summary or None})
    before = _figures_before(against, found, current[0]) if against else None
    verdict = judge(
        rules,
        found.metrics,
        before.metrics if before is not None else None,
        level=false_alarms,
        seed=seed,
        where=origin,
    )
    names = {"current": [str(path) for path in current], "baseline": [str(path) for path in against]}
    verdict = verdict.model_copy(update={"artifact": found.kind, "rules_from": origin, **names})
    _write(verdict, current, junit, sarif, begin_s=begin_s)
    if github:
        _tell_github(verdict, current)
    if as_json:
        print_json(verdict)
    else:
        show(gate_section(verdict, _subject(current, against)), junit, sarif)
    if not verdict.passed:
        raise CheckFailed(_failures(verdict))


def _level(given: float | None, settings: GateConfig | None) -> float:
    """Return the share of false alarms: as given, else configured, else the default. Raises InputError outside (0, 1)."""
    chosen = given if given is not None else settings.level if settings and settings.level else LEVEL
    if not 0 < chosen < 1:
        raise InputError("--level", f"is {chosen:g}", "give a share between 0 and 1, such as 0.05")
    return chosen


def _figures_before(files: list[Path], found: Figures, current: Path) -> Figures:
    """Return the baseline's figures. Raises InputError when they are of another kind than those found in ``current``."""
    before = figures_of(files)
    if before.kind != found.kind:
        problem = f"is a {before.kind}, {current} a {found.kind}"
        raise InputError(str(files[0]), problem, "compare two artifacts of one kind")
    return before


def _subject(current: list[Path], against: Sequence[Path] = ()) -> str:
    """Return what is judged in words: the first file, how many more, and the first baseline."""
    named = str(current[0]) if len(current) == 1 else f"{current[0]} and {len(current) - 1} more"
    return harmless(f"{named} against {against[0]}" if against else named)


def _write(verdict: GateResult, current: list[Path], junit: Path | None, sarif: Path | None, *, begin_s: float) -> None:
    """Write the reports that were asked for; JUnit's tells how long the gate took since ``begin_s``."""
    if junit is not None:
        write_text(junit, as_junit(verdict, _subject(current), seconds=time.perf_counter() - begin_s))
    if sarif is not None:
        save(as_sarif(verdict, str(current[0]), version=__version__), sarif)


def _failures(verdict: GateResult) -> str:
    """Return the line that names each failed check, the first few in full."""
    failed = verdict.failed
    more = f" | and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
    named = " | ".join(sentence(check) for check in failed[:_NAMED])
    return f"{len(failed)} of {len(verdict.checks)} checks failed: {named}{more}"


def _settings(config: Path | None) -> GateConfig | None:
    """Return the configuration that was named, else that of the working folder, else none."""
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


def _tell_github(verdict: GateResult, current: list[Path]) -> None:
    """Write annotations on stderr, which GitHub reads as well as stdout, and append to the step summary."""
    for line in workflow_commands(verdict, str(current[0])):
        sys.stderr.write(line + "\n")
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    if place:
        try:
            with open(place, "a", encoding="utf-8") as file:
                file.write(summary(verdict, _subject(current)))
        except OSError as error:
            raise InputError("GITHUB_STEP_SUMMARY", f"{place} cannot be written ({error.strerror})") from None


def _list_metrics(found: Figures, as_json: bool) -> None:
    """Print what an artifact can be judged by."""
    kind, metrics = found.kind, list(found.metrics.values())
    if as_json:
        listed = [
            MetricFigure(name=metric.name, value=metric.value, unit=metric.unit, measured=metric.measured)
            for metric in metrics
        ]
        print_json(GateMetrics(artifact=kind, metrics=listed))
        return
    rows = [
        (
            shortened(metric.name, LONGEST_NAME),
            "measured" if metric.measured else "",
            show_figure(metric.value, metric.unit),
            str(min((cell.repeats for cell in metric.cells), default=1)) if metric.measured else "-",
        )
        for metric in metrics
    ]
    out().print(table(f"Metrics of a {kind}", ("metric", "", "value", "repeats"), rows, text_columns=2))


def figures_of(paths: Sequence[Path]) -> Figures:
    """Return the metrics of files that measure or predict the same thing. Raises InputError for two kinds."""
    return combine([(read_artifact(path), str(path)) for path in paths])


class GateConfig(Record):
    """The ``[gate]`` table of a ``ddltool.toml``: rules by kind (without ``ddltool.``), level and baseline."""

    rules: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(default_factory=dict)
    level: Annotated[float, Field(gt=0, lt=1)] | None = None
    baseline: str | None = None
    _where: str = PrivateAttr("")

    @property
    def where(self) -> str:
        """The file that was read."""
        return self._where


def read_config(path: Path) -> GateConfig:
    """Return the ``[gate]`` table of a TOML file. Raises InputError naming what is unknown or of the wrong type."""
    try:
        table = tomllib.loads(read_text(path)).get("gate")
    except tomllib.TOMLDecodeError as error:
        raise InputError(str(path), f"is not valid TOML ({error})", "mind the quotes and brackets") from None
    if not isinstance(table, dict):
        raise InputError(str(path), "has no table [gate]", "write [gate.rules] with lists of rules by kind")
    found = parse_record(table, GateConfig, str(path), "gate")
    known = {kind.removeprefix("ddltool.") for kind in EXTRACTORS}
    for kind in found.rules:
        if kind not in known:
            raise InputError(f"{path}:gate.rules", f"unknown kind {kind!r}", did_you_mean(kind, known))
    folder = str(path.parent / found.baseline) if found.baseline is not None else None
    made = found.model_copy(update={"baseline": folder})
    made._where = str(path)
    return made


def rules_for(kind: str, given: Sequence[str], config: GateConfig | None) -> tuple[list[Rule], str]:
    """Return the rules that hold, and where they come from: as given, else the configuration's, else the defaults."""
    short = kind.removeprefix("ddltool.")
    if given:
        return parse_rules(given, "--rule"), "--rule"
    if config is not None and short in config.rules:
        return parse_rules(config.rules[short], f"{config.where}:gate.rules.{short}"), config.where
    return default_rules(kind), f"defaults for {short}"
