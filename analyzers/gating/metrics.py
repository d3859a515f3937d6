"""The named figures of an artifact: those that ``kinds.toml`` names, and those computed here. Start at :func:`extract`.

A name is ``family`` or ``family/member``: ``iteration_s``, ``efficiency/tac``, ``step_time_s/V100/1x2/b64``. Figures are in
SI base units; a figure that the artifact does not have (an undefined efficiency) is left out.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from ddltool.analyzers.communication.efficiency import bounds
from ddltool.analyzers.gating.noise import FEWEST_REPEATS, Cell, cell_of, geometric_mean, pool
from ddltool.artifacts import Artifact, kind_of, parse
from ddltool.errors import InputError, did_you_mean, one_line, shortened
from ddltool.goodput_model import Goodput
from ddltool.graph import RECV, SEND, Graph, from_document
from ddltool.graph_results import TraceResult
from ddltool.plans import Enforcement, Plan
from ddltool.results import BalanceResult, BarrierResult, GateResult, NetworkResult, StragglersResult, Verification
from ddltool.simulation_results import SimulationDocument, SweepDocument
from ddltool.units import show_bytes, show_seconds

Unit = Literal["", "s", "bytes", "share", "1/s", "text"]
KINDS: dict[str, dict[str, list[str]]] = {
    f"ddltool.{kind}": table
    for kind, table in tomllib.loads(Path(__file__).with_name("kinds.toml").read_text(encoding="utf-8")).items()
}
"""By kind, ``figures`` (what stands in the document) and ``rules`` (those that hold by default)."""
RECORDS: dict[str, type[Artifact]] = {
    kind_of(model): model
    for model in (
        *(Plan, Enforcement, Goodput, TraceResult, NetworkResult, BarrierResult, BalanceResult, Verification),
        *(SimulationDocument, SweepDocument, GateResult, StragglersResult),
    )
}
"""By kind, what other commands read again."""
_FIGURE = re.compile(r"(?P<path>[^:\s]+)(?: as (?P<name>[^:\s]+))?(?:: (?P<unit>[^!]*)(?P<measured>!)?)?")
_SWEEP_UNITS: dict[str, Unit] = {"utilization": "share", "worst_fairness": "", "restarts": "", "cost": ""}
# Neighbouring steps are alike, so steps are no repeats of each other; the medians of long stretches nearly are.
BLOCKS, FEWEST_STEPS_PER_BLOCK = 10, 5
# In messages and tables; documents keep the whole name.
LONGEST_NAME = 120
# What GitHub's runner acts on in a log: the newer form at the start of a line, the older one anywhere.
_COMMANDS = (
    "add-mask|add-matcher|add-path|debug|echo|endgroup|error|group|internal-set-repo-path|notice|remove-matcher|"
    "save-state|set-env|set-output|stop-commands|warning"
)
_WORKFLOW_COMMAND = re.compile(rf"::(?=({_COMMANDS})\b)|##(?=\[)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """``value`` in SI base units, shares as fractions; a text only for the unit ``text``."""

    name: str
    value: float | str
    unit: Unit = ""
    measured: bool = False
    """By a clock, so that it has noise; else counted or predicted, and any change is a change."""
    cells: tuple[Cell, ...] = ()
    """Of measured figures: what ``value`` is the geometric mean of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """All metrics of one artifact, by name."""

    kind: str
    metrics: Mapping[str, Metric]


def extract(document: Mapping[str, Any], where: str) -> Figures:
    """Return the metrics of a document; ``where`` names it in errors.

    Raises InputError for a kind without metrics and for a document that is not what its kind says.
    """
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        known = [name.removeprefix("ddltool.") for name in KINDS]
        shown = str(kind).removeprefix("ddltool.")
        raise InputError(f"{where}:kind", f"{kind!r} has no figures to gate", did_you_mean(shown, known))
    try:
        found: dict[str, Metric] = {}
        written: dict[str, str] = {}
        for metric in _all(document, kind, where):
            # Names come from files of others: no reader of the gate's output may act on them.
            name = harmless(metric.name).replace(" ", "_")
            value = harmless(metric.value) if isinstance(metric.value, str) else metric.value
            if written.setdefault(name, metric.name) != metric.name:
                raise InputError(where, f"has two figures that read {shortened(name, 80)}", "rename one of them")
            found[name] = replace(metric, name=name, value=value)
    except KeyError as error:
        raise InputError(where, f"has no field {error.args[0]!r}", f"is it a whole {kind} document?") from None
    except (TypeError, AttributeError, ValueError, OverflowError) as error:
        raise InputError(where, f"is no {kind} document ({error})", "make it again") from None
    if not found:
        raise InputError(where, "has no figures to gate", "is it a whole document?")
    return Figures(kind=kind, metrics=found)


def combine(documents: Sequence[tuple[Mapping[str, Any], str]]) -> Figures:
    """Return the metrics of several documents (each with its name) of one thing as one; see :func:`merge`.

    Raises InputError as :func:`extract` does, and when the kinds differ.
    """
    found = [extract(document, where) for document, where in documents]
    for each, (_, where) in zip(found, documents, strict=True):
        if each.kind != found[0].kind:
            raise InputError(f"{where}:kind", f"is {each.kind!r}", f"expected {found[0].kind!r} as before")
    merged = merge([list(each.metrics.values()) for each in found])
    return Figures(kind=found[0].kind, metrics={metric.name: metric for metric in merged})


def merge(sides: Iterable[Sequence[Metric]]) -> list[Metric]:
    """Return the metrics of several artifacts of one kind as one: each file is a measurement of the same thing.

    A measured figure gets the files as repeats (see :func:`pool`). A counted or predicted one must be the same in all files;
    else it is treated as measured, for something makes it vary.
    """
    by_name: dict[str, list[Metric]] = defaultdict(list)
    for metrics in sides:
        for metric in metrics:
            by_name[metric.name].append(metric)
    return [_merged(found) for found in by_name.values()]


def _merged(found: Sequence[Metric]) -> Metric:
    first = found[0]
    if len(found) == 1 or (not first.measured and len({metric.value for metric in found}) == 1):
        return first
    if isinstance(first.value, str):
        return replace(first, value=", ".join(sorted({str(metric.value) for metric in found})))
    by_key: dict[str, list[Cell]] = defaultdict(list)
    for metric in found:
        for cell in metric.cells or (Cell(key="", median=float(metric.value), spread=0.0, repeats=1),):
            by_key[cell.key].append(cell)
    cells = tuple(pool(key, by_key[key]) for key in sorted(by_key))
    value = geometric_mean(cells) if len(cells) > 1 else cells[0].median
    return replace(first, value=value, measured=True, cells=cells)


def _all(document: Mapping[str, Any], kind: str, where: str) -> Iterator[Metric]:
    """Yield the figures that the kind's table names in the document's record, then those that are computed from it."""
    record: Any = document
    if kind == "ddltool.graph":
        record = from_document(dict(document), where)
    elif kind in RECORDS:
        record = parse(dict(document), RECORDS[kind], where)
    timed = kind == "ddltool.trace" and record.graph.oracle == "measured"
    for metric in _declared(record, kind):
        yield replace(metric, measured=metric.measured or (timed and metric.unit in ("s", "share")))
    if kind in _COMPUTED:
        yield from _COMPUTED[kind](record, where)


def _declared(record: Any, kind: str) -> Iterator[Metric]:
    """Yield the figures in a record or document that the table of the kind names."""
    for line in KINDS[kind].get("figures", ()):
        entry = _FIGURE.fullmatch(line)
        assert entry is not None, line
        for keys, leaf, value in _at(record, entry["path"].split(".")):
            members = iter(keys)
            pattern = entry["name"] or "/".join((".", *("*" for _ in keys)))
            name = re.sub(r"\*", lambda _, members=members: next(members), pattern.replace(".", leaf, 1))
            field = name.split("/")[-1] if leaf == "*" else leaf
            unit = (entry["unit"] or _unit_of(field)).replace("none", "")
            yield from figure(name, value, unit, measured=bool(entry["measured"]) or field.endswith("seconds"))


def _at(node: Any, path: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Yield (keys that stood for ``*``, the field, value) of all that a path leads to."""
    if isinstance(node, BaseModel):
        fields: Mapping[str, Any] = {**dict(node), "world_size": getattr(node, "world_size", None)}
    else:
        fields = node if isinstance(node, Mapping) else {}
    wanted = [(key, (str(key),)) for key in fields] if path[0] == "*" else [(key, ()) for key in path[0].split("|")]
    for key, star in wanted:
        if key not in fields:
            continue
        if len(path) == 1:
            yield star, path[0] if star else key, fields[key]
        for keys, leaf, value in _at(fields[key], path[1:]) if len(path) > 1 else ():
            yield (*star, *keys), leaf, value


def _unit_of(name: str) -> Unit:
    if name.endswith("_bytes"):
        return "bytes"
    return "s" if name.endswith(("_s", "seconds")) and not name.endswith("_per_s") else ""


def figure(name: str, value: object, unit: str = "", *, measured: bool = False) -> Iterator[Metric]:
    """Yield the metric of a value, or nothing for None, NaN and infinities: the artifact does not have it."""
    if isinstance(value, (list, tuple)):
        value = len(value)
    if unit == "text" and value is not None:
        yield Metric(name=name, value=str(value), unit="text")
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        yield Metric(name=name, value=float(value), unit=unit, measured=measured)  # type: ignore[arg-type]


def _graph(graph: Graph, where: str) -> Iterator[Metric]:
    """Yield counts, and of a timed graph U and L (TicTac, Equations 1 and 2) and the busiest compute resource and channel."""
    counts: dict[str, float] = {"ops": len(graph), "recvs": len(graph.of_kind(RECV)), "sends": len(graph.of_kind(SEND))}
    counts |= {"parameters": counts["recvs"], "parameter_bytes": graph.parameter_bytes}
    channels = sum(name.startswith("channel:") for name in graph.resource_names)
    for name, value in {**counts, "flops": float(graph.flops.sum()), "channels": channels}.items():
        yield from figure(name, value, _unit_of(name))
    if graph.timed:
        found, measured = bounds(graph), "measured" in graph.estimate
        for name in ("upper_s", "lower_s", "compute_s", "transfer_s"):
            yield from figure(name, getattr(found, name), "s", measured=measured and name != "transfer_s")


def _trace(found: TraceResult, where: str) -> Iterator[Metric]:
    ordered = [row.makespan_s for name, row in found.schedules.items() if name not in ("random", "exact")]
    yield from figure("iteration_s", min(ordered), "s", measured=found.graph.oracle == "measured")


def _plan(plan: Plan, where: str) -> Iterator[Metric]:
    """Yield devices by type, and what only a comparison of strategies says: price, goodput, staleness, bits, communication."""
    for assignment in plan.assignments:
        held = sum(other.devices for other in plan.assignments if other.device_type == assignment.device_type)
        yield from figure(f"devices/{assignment.device_type}", held)
    yield from _parameters(plan, where)
    if plan.decision is None:
        yield from figure("goodput", plan.goodput and plan.goodput.goodput_per_s, "1/s")
        return
    option = next((each for each in plan.decision.options if each.strategy == plan.decision.picked), None)
    if option is None:
        return
    yield from figure("exposed_s", option.communication_s, "s")
    yield from figure("goodput", option.goodput_per_s, "1/s")
    yield from figure("staleness", option.staleness)
    yield from figure("determinism", option.determinism, "text")
    if option.price_per_sample is not None:
        yield from figure("price_per_sample", option.price_per_sample)
        yield from figure("price_per_hour", option.price_per_sample * option.throughput * plan.batch_size * 3600)


def _enforcement(made: Enforcement, where: str) -> Iterator[Metric]:
    batches = [rank.local_batch_size for rank in made.ranks]
    yield from figure("local_batch_most", max(batches))
    yield from figure("local_batch_least", min(batches))
    yield from _parameters(made, where)


def _parameters(made: Plan | Enforcement, where: str) -> Iterator[Metric]:
    if made.parameters:
        yield from figure("parameters", made.parameters)
        yield from figure("parameter_bytes", sum(record.size_bytes for record in made.parameters), "bytes")


def _sweep(found: SweepDocument, where: str) -> Iterator[Metric]:
    """Yield each figure's mean over the seeds, as ``FIGURE/POLICY/WORKLOAD``, and how many replays there are and failed.

    Of a comparison: the two policies, and ``ratio/MEASURE``, the first one's over the second's (1 where they are equal).
    """
    failed = sum(cell.figures is None for cell in found.cells)
    yield from figure("replays", len(found.cells) - failed)
    yield from figure("failed", failed)
    for workload, policy, _, mean in found.means_by_policy():
        for name, value in mean.__dict__.items():
            yield from figure(f"{name}/{policy}/{workload}", value, _SWEEP_UNITS.get(name, "s"))
    if found.comparison is not None:
        yield from figure("compared", f"{found.comparison.first},{found.comparison.second}", "text")
        for one in found.comparison.comparisons:
            yield from figure(f"ratio/{one.measure}", one.ratio)


def _demo(document: Mapping[str, Any], where: str) -> Iterator[Metric]:
    yield from _all({**document["plan"], "kind": "ddltool.plan"}, "ddltool.plan", f"{where}:plan")


def _own(document: Mapping[str, Any], where: str) -> Iterator[Metric]:
    """Yield what somebody measured themselves: a number, or a list of repeats, by name; units from the name's end."""
    if not isinstance(document["figures"], Mapping):
        raise InputError(f"{where}:figures", "is no mapping", "give {name: number, or list of repeats}")
    yield from _nested(document["figures"], "", where)


def _nested(values: Mapping[str, Any], prefix: str, where: str) -> Iterator[Metric]:
    for key, value in values.items():
        name = f"{prefix}{key}".replace(" ", "_")
        if isinstance(value, Mapping):
            yield from _nested(value, f"{name}/", where)
            continue
        numbers = value if isinstance(value, list) else [value]
        if not numbers or not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
            raise InputError(f"{where}:figures:{name}", f"is {value!r}", "give a finite number, or a list of them")
        cell = cell_of("", numbers)
        yield Metric(name=name, value=cell.median, unit=_unit_of(name), measured=True, cells=(cell,))


# -- measured rows


def _profile(document: Mapping[str, Any], where: str) -> Iterator[Metric]:
    """Yield ``step_time_s`` of each configuration and of all together (geometric mean), and what has no repeats.

    A configuration that occurs in several rows has them as repeats.
    """
    by_key: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in _rows(document, where):
        device = "_".join(str(row["device"]).replace("/", "_").split())
        key = f"{device}/{int(row['num_nodes'])}x{int(row['num_replicas'])}/b{int(row['local_batch_size'])}"
        steps = _number(row.get("accumulation_steps"))
        by_key[f"{key}/s{int(steps)}" if steps else key].append(row)
    cells = [pool(key, [_row_cell(key, row) for row in found]) for key, found in by_key.items()]
    yield from _family("step_time_s", cells)
    yield from figure("configurations", cells)
    for key, found in by_key.items():
        for column, unit in (("sync_time_s", "s"), ("peak_memory_bytes", "bytes")):
            numbers = [number for row in found if (number := _number(row.get(column))) is not None]
            if numbers:
                yield from figure(f"{column}/{key}", cell_of("", numbers).median, unit, measured=True)


def _rows(document: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]]:
    if not document["rows"]:
        raise InputError(where, "has no rows", "give at least one measured row")
    return document["rows"]  # type: ignore[no-any-return]


def _row_cell(key: str, row: Mapping[str, Any]) -> Cell:
    repeats, spread = _number(row.get("repeats")), _number(row.get("step_time_spread_s"))
    known = repeats is not None and spread is not None
    return Cell(key=key, median=row["step_time_s"], spread=spread or 0.0, repeats=int(repeats or 1) if known else 1)


def _number(value: Any) -> float | None:
    """Return a number, None where the column is empty or absent."""
    return None if value is None or math.isnan(value) else float(value)


def _telemetry(document: Mapping[str, Any], where: str) -> Iterator[Metric]:
    """Yield ``step_s``, ``compute_s``, ``wait_s`` and ``sync_s`` of each rank, and of all ranks together."""
    by_rank: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in sorted(_rows(document, where), key=lambda row: int(row["step"])):
        by_rank[int(row["rank"])].append(row)
    yield from figure("ranks", len(by_rank))
    yield from figure("steps", min(len(steps) for steps in by_rank.values()))
    for column in ("step_s", "compute_s", "wait_s", "sync_s"):
        by = {rank: [float(row[column]) for row in steps] for rank, steps in by_rank.items()}
        yield from _family(column, [_stretches(f"rank{rank}", seconds) for rank, seconds in by.items()])


def _stretches(key: str, seconds: Sequence[float]) -> Cell:
    """Return the cell whose repeats are the medians of ten consecutive stretches of at least five steps each, or fewer."""
    count = min(BLOCKS, len(seconds) // FEWEST_STEPS_PER_BLOCK)
    if count < FEWEST_REPEATS:
        return replace(cell_of(key, seconds), repeats=1)
    edges = [round(part * len(seconds) / count) for part in range(count + 1)]
    return cell_of(key, [cell_of(key, seconds[low:high]).median for low, high in pairwise(edges)])


def _family(name: str, cells: Sequence[Cell]) -> Iterator[Metric]:
    """Yield the geometric mean of all cells as ``NAME``, then each as ``NAME/KEY``."""
    ordered = tuple(sorted(cells, key=lambda cell: cell.key))
    yield Metric(name=name, value=geometric_mean(ordered), unit="s", measured=True, cells=ordered)
    for cell in ordered:
        yield Metric(name=f"{name}/{cell.key}", value=cell.median, unit="s", measured=True, cells=(cell,))


_COMPUTED: dict[str, Callable[[Any, str], Iterator[Metric]]] = {
    "ddltool.graph": _graph,
    "ddltool.trace": _trace,
    "ddltool.plan": _plan,
    "ddltool.enforcement": _enforcement,
    "ddltool.sweep": _sweep,
    "ddltool.demo": _demo,
    "ddltool.figures": _own,
    "ddltool.profile": _profile,
    "ddltool.telemetry": _telemetry,
}

# -- for people


def harmless(text: str) -> str:
    r"""Return text on one line, control characters and whatever GitHub's runner would take for a command as escapes.

    >>> harmless("a\n::error::b"), harmless("x##[add-mask]y"), harmless("tests/t.py::test_b")
    ('a \\x3a:error::b', 'x#\\x23[add-mask]y', 'tests/t.py::test_b')
    """
    return _WORKFLOW_COMMAND.sub(lambda match: r"\x3a:" if match.group() == "::" else r"#\x23", one_line(text))


def show(value: float | str | None, unit: str) -> str:
    """Return a figure for people.

    >>> show(0.00153, "s"), show(0.98, "share"), show(7.0, ""), show(None, "")
    ('1.53 ms', '98%', '7', '-')
    """
    if value is None or isinstance(value, str):
        return "-" if value is None else shortened(harmless(value), LONGEST_NAME)
    if unit in ("s", "bytes"):
        return show_seconds(value) if unit == "s" else show_bytes(value)
    if unit == "share":
        return f"{value:.4g}" if abs(value) > 1 else f"{100 * value:.3g}%"
    shown = f"{value:,.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.4g}"
    return f"{shown}/s" if unit == "1/s" else shown
