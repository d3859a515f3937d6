"""``ddltool gate CURRENT --baseline BASELINE``: may this change go in?"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from ddltool import __version__
from ddltool.analyzers.answers.gating.formats import junit as as_junit
from ddltool.analyzers.answers.gating.formats import sarif as as_sarif
from ddltool.analyzers.answers.gating.formats import sentence, short_name, summary, workflow_commands
from ddltool.analyzers.answers.gating.metrics import Figures, harmless
from ddltool.analyzers.answers.gating.metrics import show as show_figure
from ddltool.analyzers.answers.gating.verdict import (
    CONFIG_NAME,
    GateConfig,
    as_list,
    baselines_of,
    figures_of,
    judge,
    level_of,
    name_of,
    read_config,
    rules_for,
)
from ddltool.analyzers.answers.reporting.result_sections import gate_section
from ddltool.artifacts import append_text, check_outputs, to_json, write_text
from ddltool.commands.options import AS_FILES, Seed
from ddltool.commands.output import out, print_json, show, table
from ddltool.commands.verbs import VerbCall, demand_part, verb
from ddltool.errors import CheckFailed, InputError
from ddltool.results import GateMetrics, GateResult, MetricFigure

# Failed checks that the error's line names.
_NAMED = 8


@verb
def gate(
    current: Annotated[Any, AS_FILES],
    baseline: Annotated[Any, AS_FILES] = (),
    *,
    rules: Sequence[str] = (),
    level: float | None = None,
    config: Path | GateConfig | None = None,
    seed: Seed = 0,
) -> GateResult:
    """Hold an artifact against limits and a baseline; exit 1 names each check that failed.

    ``current``, ``baseline``: a file or several (repeats), a Graph, a profile's DataFrame, a result or a document; a
    baseline may be a folder with files of the same names. ``rules``: such as ``iteration_s increase <= 5%``; (): those of
    ``config`` (a TOML file; None: ``./ddltool.toml`` if it exists), else the kind's defaults. ``level``: probability of a
    false alarm by noise in the whole gate; None: 0.05.

    Raises InputError for rules that do not fit, and for two artifacts of different kinds.
    """
    if isinstance(config, GateConfig):
        settings: GateConfig | None = config
    else:  # a file that was named must exist; the default one need not
        settings = read_config(config or Path(CONFIG_NAME), required=bool(config))
    artifacts = as_list(current)
    figures = figures_of(artifacts)
    parsed_rules, origin = rules_for(figures.kind, rules, settings)
    baselines = baselines_of(artifacts, as_list(baseline), settings)
    baseline_figures = figures_of(baselines) if baselines else None
    if baseline_figures is not None and baseline_figures.kind != figures.kind:
        problem = f"is a {baseline_figures.kind}, {name_of(artifacts[0])} a {figures.kind}"
        raise InputError(name_of(baselines[0]), problem, "compare two artifacts of one kind")
    verdict = judge(
        parsed_rules,
        figures.metrics,
        baseline_figures.metrics if baseline_figures is not None else None,
        level=level_of(level, settings),
        seed=seed,
        where=origin,
    )
    names = {"current": [*map(name_of, artifacts)], "baseline": [*map(name_of, baselines)]}
    return verdict.model_copy(update={"artifact": figures.kind, "rules_from": origin, **names})


def show_gate(
    call: VerbCall[GateResult],
    *,
    junit: Path | None = None,
    sarif: Path | None = None,
    github: bool = False,
    metrics: bool = False,
    as_json: bool = False,
) -> None:
    """Print the verdict, and write it as JUnit, SARIF and for GitHub if asked. Raises CheckFailed if a check failed.

    ``junit`` and ``sarif``: files to write; ``github``: print annotations, and append to the step's summary.
    ``metrics``: list the metrics of the current artifacts instead.
    """
    current, config = call["current"], call["config"]
    if metrics:
        demand_part("--metrics", {"current", "metrics", "as_json"})
        _list_metrics(figures_of(current), as_json)
        return
    begin_s = time.perf_counter()
    # Read here already, to check that no output overwrites an input.
    settings = read_config(config or Path(CONFIG_NAME), required=config is not None)
    baselines = baselines_of(current, call["baseline"], settings)
    summary_file = os.environ.get("GITHUB_STEP_SUMMARY") if github else None
    inputs = [*current, *baselines, settings.where if settings is not None else None]
    check_outputs(inputs, {"--junit": junit, "--sarif": sarif, "GITHUB_STEP_SUMMARY": summary_file or None})
    verdict = call(baseline=baselines, config=settings or GateConfig())
    junit_text = as_junit(verdict, _subject(current), seconds=time.perf_counter() - begin_s)
    sarif_text = to_json(as_sarif(verdict, str(current[0]), version=__version__))
    for path, text in ((junit, junit_text), (sarif, sarif_text)):
        if path is not None:
            write_text(path, text)
    if github:
        _tell_github(verdict, current, summary_file)
    if as_json:
        print_json(verdict)
    else:
        show(gate_section(verdict, _subject(current, baselines)), junit, sarif)
    failed = verdict.failed
    if failed:
        more_text = f" | and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
        sentences = " | ".join(sentence(check) for check in failed[:_NAMED])
        raise CheckFailed(f"{len(failed)} of {len(verdict.checks)} checks failed: {sentences}{more_text}")


def _subject(current: list[Path], baselines: Sequence[Path] = ()) -> str:
    """Return the name of what is judged, such as "a.json and 2 more against b.json", with the first of the baselines."""
    text = str(current[0])
    if len(current) > 1:
        text += f" and {len(current) - 1} more"
    if baselines:
        text += f" against {baselines[0]}"
    return harmless(text)


def _tell_github(verdict: GateResult, current: list[Path], summary_file: str | None) -> None:
    """Write the verdict for a GitHub workflow: annotations on stderr, and the summary of the workflow's step.

    ``current``: the judged files, the first of which annotations name. ``summary_file``: the file to which the summary is
    appended; None or "": there is none.
    """
    for line in workflow_commands(verdict, str(current[0])):
        sys.stderr.write(line + "\n")
    if summary_file:
        append_text(summary_file, summary(verdict, _subject(current)))


def _list_metrics(figures: Figures, as_json: bool) -> None:
    """Print the metrics of an artifact, which rules may name, with their values and numbers of repeats."""
    metrics = figures.metrics.values()
    if as_json:
        listed = [
            MetricFigure(name=metric.name, value=metric.value, unit=metric.unit, measured=metric.measured)
            for metric in metrics
        ]
        print_json(GateMetrics(artifact=figures.kind, metrics=listed))
        return
    rows = [
        (
            short_name(metric.name),
            "measured" if metric.measured else "",
            show_figure(metric.value, metric.unit),
            str(min((cell.repeats for cell in metric.cells), default=1)) if metric.measured else "-",
        )
        for metric in metrics
    ]
    out().print(table(f"Metrics of a {figures.kind}", ("metric", "", "value", "repeats"), rows, text_columns=2))
