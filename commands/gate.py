"""``ddltool gate CURRENT --baseline BASELINE``: may this change go in? The pytest plugin asks the same here."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from pydantic import BaseModel, Field, PrivateAttr

from ddltool import __version__
from ddltool.analyzers.gating.formats import junit as as_junit
from ddltool.analyzers.gating.formats import named, sentence, summary, workflow_commands
from ddltool.analyzers.gating.formats import sarif as as_sarif
from ddltool.analyzers.gating.gate import LEVEL, judge
from ddltool.analyzers.gating.metrics import KINDS, Figures, combine, extract, harmless
from ddltool.analyzers.gating.metrics import show as show_figure
from ddltool.analyzers.gating.rules import Rule, default_rules, parse_rules
from ddltool.analyzers.reporting.result_sections import gate_section
from ddltool.artifacts import Record, parse_record, read_text, read_toml, save, write_text
from ddltool.commands.artifact_reading import checked_document, is_table, profile_document, read_artifact
from ddltool.commands.options import Json, Seed
from ddltool.commands.output import out, print_json, show, table
from ddltool.commands.parts import demand_part
from ddltool.errors import CheckFailed, InputError, did_you_mean
from ddltool.graph import Graph
from ddltool.graph_io import to_document
from ddltool.outputs import check_outputs
from ddltool.profiles import write_profile
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
        list[Path] | None,
        typer.Option(metavar="FILE|DIR", help="What to compare with; repeatable. A folder: the file of the same name."),
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE", help="Such as 'iteration_s <= 0.5', 'throughput >= -5%', 'ops increase <= 3'; repeatable."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rules by kind; ./ddltool.toml where it is there.")
    ] = None,
    level: Annotated[
        float | None, typer.Option(help="Share of false alarms from noise, for the whole gate (default 0.05).")
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    sarif: Annotated[Path | None, typer.Option(metavar="FILE", help="Write SARIF 2.1.0.")] = None,
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
    found = figures_of(current)
    settings = read_config(config or Path(CONFIG_NAME), required=config is not None)
    rules, origin = rules_for(found.kind, rule or [], settings)
    against = _baselines(current, baseline or [], settings)
    place = os.environ.get("GITHUB_STEP_SUMMARY") if github else None
    read = [*current, *against, settings.where if settings is not None else None]
    check_outputs(read, {"--junit": junit, "--sarif": sarif, "GITHUB_STEP_SUMMARY": place or None})
    before = figures_of(against) if against else None
    if before is not None and before.kind != found.kind:
        problem = f"is a {before.kind}, {current[0]} a {found.kind}"
        raise InputError(str(against[0]), problem, "compare two artifacts of one kind")
    verdict = judge(
        rules,
        found.metrics,
        before.metrics if before is not None else None,
        level=_level(level, settings),
        seed=seed,
        where=origin,
    )
    names = {"current": [str(path) for path in current], "baseline": [str(path) for path in against]}
    verdict = verdict.model_copy(update={"artifact": found.kind, "rules_from": origin, **names})
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


def _level(given: float | None, settings: GateConfig | None) -> float:
    """Return the share of false alarms: as given, else configured, else the default. Raises InputError outside (0, 1)."""
    chosen = given if given is not None else settings.level if settings and settings.level else LEVEL
    if not 0 < chosen < 1:
        raise InputError("--level", f"is {chosen:g}", "give a share between 0 and 1, such as 0.05")
    return chosen


def _subject(current: list[Path], against: Sequence[Path] = ()) -> str:
    """Return what is judged in words: the first file, how many more, and the first baseline."""
    text = str(current[0]) if len(current) == 1 else f"{current[0]} and {len(current) - 1} more"
    return harmless(f"{text} against {against[0]}" if against else text)


def _baselines(current: list[Path], given: list[Path], settings: GateConfig | None) -> list[Path]:
    """Return the baseline files; a folder stands for the files in it that are named as the current ones."""
    if not given and settings is not None and settings.baseline is not None:
        given = [Path(settings.baseline)]
    return [each for path in given for each in ([path / one.name for one in current] if path.is_dir() else [path])]


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


def read_config(path: Path, *, required: bool = True) -> GateConfig | None:
    """Return the ``[gate]`` table of a TOML file, None where it need not be there and is not.

    Raises InputError naming what is unknown or of the wrong type.
    """
    if not required and not path.is_file():
        return None
    table = read_toml(path).get("gate")
    if not isinstance(table, dict):
        raise InputError(str(path), "has no table [gate]", "write [gate.rules] with lists of rules by kind")
    found = parse_record(table, GateConfig, str(path), "gate")
    known = {kind.removeprefix("ddltool.") for kind in KINDS}
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


# -- for the pytest plugin


def hold(
    current: Any, target: Path, texts: Sequence[str], level: float | None, *, update: bool, config: Path
) -> GateResult:
    """Return the verdict on an artifact against the baseline ``target``, by the rules of ``texts``, else of ``config``.

    With ``update`` the current artifact is its own baseline, so that absolute limits still hold.
    """
    found = extract(document_of(current), "current")
    settings = read_config(config, required=False)
    rules, origin = rules_for(found.kind, texts, settings)
    if not update and not target.is_file():
        raise InputError(str(target), "no such baseline", "write it with: pytest --ddltool-update")
    try:
        before = figures_of([target]) if target.exists() else found
    except InputError:
        if not update:
            raise
        before = found  # a broken baseline is what an update is for
    if before.kind != found.kind:
        raise InputError(str(target), f"is a {before.kind}", f"the current artifact is a {found.kind}")
    sides = found.metrics, (found if update else before).metrics
    return judge(rules, *sides, level=_level(level, settings), where="rules" if texts else origin)


def document_of(current: Any) -> Mapping[str, Any]:
    """Return an artifact, whatever it is held in, as a document with its kind."""
    if isinstance(current, (str, Path)):
        return read_artifact(Path(current))
    if isinstance(current, Graph):
        return to_document(current)
    if isinstance(current, pd.DataFrame):
        return profile_document(current, "current")
    if isinstance(current, BaseModel):
        return current.model_dump(mode="json")
    if isinstance(current, Mapping):
        return checked_document(dict(current), "current")
    problem = f"cannot gate a {type(current).__name__}"
    raise InputError("current", problem, "give a path, a Graph, a DataFrame, an artifact or a document")


def write_baseline(current: Any, target: Path) -> None:
    """Write the baseline atomically, in the form that its name says."""
    is_file = isinstance(current, (str, Path))
    tabular = is_table(Path(current)) if is_file else isinstance(current, pd.DataFrame)
    if tabular != is_table(target):
        remedy = "name it .csv" if tabular else "name it .json"
        raise InputError(str(target), f"is not the name of a {'table' if tabular else 'document'}", remedy)
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_file:
        write_text(target, read_text(current))
    elif isinstance(current, pd.DataFrame):
        write_profile(current, target)
    else:
        save(current if isinstance(current, BaseModel) else dict(document_of(current)), target)
