"""From files, or what a program holds, to a verdict: what ``ddltool gate``, ``ddltool.gate`` and the pytest plugin ask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import BaseModel, Field, PrivateAttr

from ddltool.analyzers.gating.gate import LEVEL, judge
from ddltool.analyzers.gating.metrics import KINDS, Figures, combine, extract
from ddltool.analyzers.gating.rules import Rule, default_rules, parse_rules
from ddltool.analyzers.loading.artifact_files import checked_document, is_table, profile_document, read_artifact
from ddltool.artifacts import Record, parse_record, read_text, read_toml, save, write_text
from ddltool.errors import InputError, did_you_mean
from ddltool.graph import Graph
from ddltool.graph_io import to_document
from ddltool.profiles import write_profile
from ddltool.results import GateResult

CONFIG_NAME = "ddltool.toml"


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


def gate(
    current: Any,
    baseline: Any = (),
    *,
    rules: Sequence[str] = (),
    level: float | None = None,
    config: Path | GateConfig | None = None,
    seed: int = 0,
) -> GateResult:
    """Hold an artifact against limits and a baseline: the verdict, with every check.

    ``current``, ``baseline``: a file or several (repeats), a folder of baselines with the same names, a Graph, a profile's
    DataFrame, a result or a document. ``rules`` such as ``iteration_s increase <= 5%``; without any those of ``config`` (a
    TOML file; ``./ddltool.toml`` where it is there), else the kind's defaults. ``level``: share of false alarms from noise
    for the whole gate, 0.05 by default. Raises InputError for rules that do not fit, and for two kinds.
    """
    settings = (
        config if isinstance(config, GateConfig) else read_config(config or Path(CONFIG_NAME), required=bool(config))
    )
    ours = several(current)
    found = figures_of(ours)
    chosen, origin = rules_for(found.kind, rules, settings)
    against = baselines_of(ours, several(baseline), settings)
    before = figures_of(against) if against else None
    if before is not None and before.kind != found.kind:
        problem = f"is a {before.kind}, {_name(ours[0])} a {found.kind}"
        raise InputError(_name(against[0]), problem, "compare two artifacts of one kind")
    verdict = judge(
        chosen,
        found.metrics,
        before.metrics if before is not None else None,
        level=_level(level, settings),
        seed=seed,
        where=origin,
    )
    names = {"current": [*map(_name, ours)], "baseline": [*map(_name, against)]}
    return verdict.model_copy(update={"artifact": found.kind, "rules_from": origin, **names})


def several(given: Any) -> list[Any]:
    """Return one thing, or a list of things, as a list; texts are paths."""
    many = given if isinstance(given, (list, tuple)) else [given]
    return [Path(one) if isinstance(one, str) else one for one in many]


def _name(given: Any) -> str:
    return str(given) if isinstance(given, Path) else type(given).__name__


def figures_of(given: Iterable[Any]) -> Figures:
    """Return the metrics of what measures or predicts the same thing. Raises InputError for two kinds."""
    return combine([(document_of(one), _name(one)) for one in given])


def baselines_of(current: Sequence[Any], given: Sequence[Any], settings: GateConfig | None) -> list[Any]:
    """Return the baselines; a folder stands for the files in it that are named as the current ones."""
    if not given and settings is not None and settings.baseline is not None:
        given = [Path(settings.baseline)]
    named = [one.name for one in current if isinstance(one, Path)]
    folders = [isinstance(one, Path) and one.is_dir() for one in given]
    return [
        each
        for one, folder in zip(given, folders, strict=True)
        for each in ([one / name for name in named] if folder else [one])
    ]


def _level(given: float | None, settings: GateConfig | None) -> float:
    """Return the share of false alarms: as given, else configured, else the default. Raises InputError outside (0, 1)."""
    chosen = given if given is not None else settings.level if settings and settings.level else LEVEL
    if not 0 < chosen < 1:
        raise InputError("--level", f"is {chosen:g}", "give a share between 0 and 1, such as 0.05")
    return chosen


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
