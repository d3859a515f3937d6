"""The named figures (metrics, the numbers that a gate checks) of an artifact: those that ``kinds.toml`` declares, and more.

A name is ``family`` or ``family/member``: ``iteration_s``, ``efficiency/tac``, ``step_time_s/V100/1x2/b64``. Figures are in
SI base units; a figure that is not defined for the artifact is left out. Start at :func:`extract`. The functions
``_KIND_figures`` take an artifact of a kind, and its name for errors (``where``).
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
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from ddltool.analyzers.answers.gating.noise import FEWEST_REPEATS, Cell, cell_of, geometric_mean, pool
from ddltool.analyzers.step.transfers.efficiency import bounds
from ddltool.artifact_files import RECORDS
from ddltool.artifacts import parse
from ddltool.errors import InputError, did_you_mean, one_line, shortened
from ddltool.graph import COMPUTE, RECV, SEND, Graph, from_document
from ddltool.graph_results import CommandPlan, TraceResult
from ddltool.island_results import IslandsPlan
from ddltool.plans import Enforcement, Plan
from ddltool.simulation_results import SweepDocument
from ddltool.units import show_bytes, show_seconds

Unit = Literal["", "s", "bytes", "share", "1/s", "text"]
KINDS: dict[str, dict[str, list[str]]] = {
    f"ddltool.{kind}": table
    for kind, table in tomllib.loads(Path(__file__).with_name("kinds.toml").read_text(encoding="utf-8")).items()
}
"""By kind: ``figures`` (paths of values in the document, see :func:`_declared_figures`) and ``rules`` (the default ones)."""
_FIGURE = re.compile(r"(?P<path>[^:\s]+)(?: as (?P<name>[^:\s]+))?(?:: (?P<unit>[^!]*)(?P<measured>!)?)?")
_SWEEP_UNITS: dict[str, Unit] = {"utilization": "share", "worst_fairness": "", "restarts": "", "cost": ""}
# The times of successive steps are correlated; the medians of long blocks of steps are nearly independent repeats.
BLOCKS, FEWEST_STEPS_PER_BLOCK = 10, 5
# Most characters of a name in messages and tables; documents keep the whole name.
LONGEST_NAME = 120
# Commands that GitHub's runner executes when it reads them in a log: ::NAME at the start of a line, ##[NAME] anywhere.
_COMMAND_NAMES = (
    "add-mask|add-matcher|add-path|debug|echo|endgroup|error|group|internal-set-repo-path|notice|remove-matcher|"
    "save-state|set-env|set-output|stop-commands|warning"
)
_WORKFLOW_COMMAND = re.compile(rf"::(?=({_COMMAND_NAMES})\b)|##(?=\[)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One figure: ``value`` is in SI base units, shares are fractions; it is a text only for the unit ``text``."""

    name: str
    value: float | str
    unit: Unit = ""
    measured: bool = False
    """True: timed by a clock, so that the value has noise. False: counted or predicted, so that every difference is real."""
    cells: tuple[Cell, ...] = ()
    """The measurements whose geometric mean is ``value``; empty for a figure that is not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """All metrics of one artifact by name, and the artifact's kind."""

    kind: str
    metrics: Mapping[str, Metric]


def extract(document: Mapping[str, Any], where: str) -> Figures:
    """Return the metrics of a document; ``where`` names it in errors.

    Raises InputError for a kind without metrics and for a document that is not what its kind says.
    """
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        kinds = [name.removeprefix("ddltool.") for name in KINDS]
        kind_name = str(kind).removeprefix("ddltool.")
        raise InputError(f"{where}:kind", f"{kind!r} has no figures to gate", did_you_mean(kind_name, kinds))
    try:
        metrics: dict[str, Metric] = {}
        original_names: dict[str, str] = {}
        for metric in _all_figures(document, kind, where):
            # Names come from files that anybody made: no program that reads the gate's output may act on them.
            name = harmless(metric.name).replace(" ", "_")
            value = harmless(metric.value) if isinstance(metric.value, str) else metric.value
            if original_names.setdefault(name, metric.name) != metric.name:
                raise InputError(where, f"has two figures that read {shortened(name, 80)}", "rename one of them")
            metrics[name] = replace(metric, name=name, value=value)
    except KeyError as error:
        raise InputError(where, f"has no field {error.args[0]!r}", f"is it a whole {kind} document?") from None
    except (TypeError, AttributeError, ValueError, OverflowError) as error:
        raise InputError(where, f"is no {kind} document ({error})", "make it again") from None
    if not metrics:
        raise InputError(where, "has no figures to gate", "is it a whole document?")
    return Figures(kind=kind, metrics=metrics)


def combine(documents: Sequence[tuple[Mapping[str, Any], str]]) -> Figures:
    """Return the merged (:func:`merge`) metrics of several (document, name for errors) pairs that measure the same thing.

    Raises InputError as :func:`extract` does, and if the kinds differ.
    """
    parts = [extract(document, where) for document, where in documents]
    for part, (_, where) in zip(parts, documents, strict=True):
        if part.kind != parts[0].kind:
            raise InputError(f"{where}:kind", f"is {part.kind!r}", f"expected {parts[0].kind!r} as before")
    merged = merge([list(part.metrics.values()) for part in parts])
    return Figures(kind=parts[0].kind, metrics={metric.name: metric for metric in merged})


def merge(sides: Iterable[Sequence[Metric]]) -> list[Metric]:
    """Return one metric for each name in several artifacts of one kind; ``sides`` has the metrics of each artifact.

    The artifacts measure the same thing: a measured metric's values are repeats (see :func:`pool`). A counted or predicted
    metric whose values differ is taken for measured, as something makes it vary.
    """
    by_name: dict[str, list[Metric]] = defaultdict(list)
    for metrics in sides:
        for metric in metrics:
            by_name[metric.name].append(metric)
    return [_merge_metric(same_name) for same_name in by_name.values()]


def _merge_metric(parts: Sequence[Metric]) -> Metric:
    """Return one metric for ``parts``, the metrics of one name in several artifacts.

    A single one and equal counts are returned unchanged, different texts are joined by commas. Otherwise the cells are
    pooled by key, and the result is a measured metric.
    """
    first = parts[0]
    if len(parts) == 1 or (not first.measured and len({metric.value for metric in parts}) == 1):
        return first
    if isinstance(first.value, str):
        return replace(first, value=", ".join(sorted({str(metric.value) for metric in parts})))
    by_key: dict[str, list[Cell]] = defaultdict(list)
    for metric in parts:
        for cell in metric.cells or (Cell(key="", median=float(metric.value), spread=0.0, repeats=1),):
            by_key[cell.key].append(cell)
    cells = tuple(pool(key, by_key[key]) for key in sorted(by_key))
    value = geometric_mean(cells) if len(cells) > 1 else cells[0].median
    return replace(first, value=value, measured=True, cells=cells)


def _all_figures(document: Mapping[str, Any], kind: str, where: str) -> Iterator[Metric]:
    """Yield the figures that ``kinds.toml`` declares for the kind, then those computed from the parsed document.

    All times and shares of a trace with measured durations are yielded as measured. ``where``: the file, for errors.
    """
    record: Any = document
    if kind == "ddltool.graph":
        record = from_document(dict(document), where)
    elif kind in RECORDS:
        record = parse(dict(document), RECORDS[kind], where)
    is_measured_trace = kind == "ddltool.trace" and record.graph.oracle == "measured"
    for metric in _declared_figures(record, kind):
        yield replace(metric, measured=metric.measured or (is_measured_trace and metric.unit in ("s", "share")))
    if kind in _COMPUTED_FIGURES:
        yield from _COMPUTED_FIGURES[kind](record, where)


def _declared_figures(record: Any, kind: str) -> Iterator[Metric]:
    """Yield the figures that ``kinds.toml`` declares for the kind and ``record`` (a record or a document) has.

    A declaration is ``PATH as NAME: UNIT!``. The path's fields are joined by ``.``, with ``*`` for any key; in the name
    ``.`` is the last field and each ``*`` the key that matched; ``!`` means measured. Name, unit ("none": a plain number)
    and ``!`` are left out where they follow from the field.
    """
    for line in KINDS[kind].get("figures", ()):
        entry = _FIGURE.fullmatch(line)
        assert entry is not None, line  # our own file
        for value in _values_at(record, entry["path"].split(".")):
            # Without a name in the declaration it is FIELD/KEY/...
            pattern = entry["name"] or "/".join((".", *("*" for _ in value.keys)))
            name = _filled_name(pattern, value)
            field = name.split("/")[-1] if value.field == "*" else value.field
            unit = (entry["unit"] or _unit_of(field)).replace("none", "")
            measured = bool(entry["measured"]) or field.endswith("seconds")
            yield from figure(name, value.content, unit, measured=measured)


def _filled_name(pattern: str, value: _Value) -> str:
    """Return the name that a declaration's ``pattern`` gives to a value: its field for ".", the keys that matched for "*"."""
    keys = iter(value.keys)
    return re.sub(r"\*", lambda _: next(keys), pattern.replace(".", value.field, 1))


class _Value(NamedTuple):
    """A value at the end of a path."""

    keys: tuple[str, ...]
    """The keys that matched each ``*`` of the path."""
    field: str
    """The last field's name, or ``*``."""
    content: Any


def _values_at(node: Any, path: Sequence[str]) -> Iterator[_Value]:
    """Yield every value at ``path`` in a record or a document; fields that are missing are skipped.

    Each step of ``path`` is a field's name, alternative names joined by ``|``, or ``*`` for every key.
    """
    step, *later_steps = path
    fields = _fields(node)
    is_wildcard = step == "*"
    for name in fields if is_wildcard else step.split("|"):
        if name not in fields:
            continue
        matched_keys = (str(name),) if is_wildcard else ()
        if not later_steps:
            yield _Value(matched_keys, "*" if is_wildcard else name, fields[name])
            continue
        for value in _values_at(fields[name], later_steps):
            yield value._replace(keys=(*matched_keys, *value.keys))


def _fields(node: Any) -> Mapping[str, Any]:
    """Return the fields of a record (and a plan's computed ``world_size``) or of a mapping; empty for other nodes."""
    if isinstance(node, BaseModel):
        return {**dict(node), "world_size": getattr(node, "world_size", None)}
    return node if isinstance(node, Mapping) else {}


def _unit_of(name: str) -> Unit:
    """Return the unit that the end of a field's name implies; "" for a plain number.

    >>> _unit_of("peak_bytes"), _unit_of("step_s"), _unit_of("samples_per_s")
    ('bytes', 's', '')
    """
    if name.endswith("_bytes"):
        return "bytes"
    is_rate = name.endswith("_per_s")
    return "s" if name.endswith(("_s", "seconds")) and not is_rate else ""


def figure(name: str, value: object, unit: str = "", *, measured: bool = False) -> Iterator[Metric]:
    """Yield one metric with this value; a list counts as its length, and with the unit "text" the value becomes a text.

    Yields nothing for None, NaN, infinities and anything else that is no number, so that callers need not test whether a
    figure exists. ``measured``: timed by a clock, so that the value has noise.
    """
    if isinstance(value, (list, tuple)):
        value = len(value)
    if unit == "text" and value is not None:
        yield Metric(name=name, value=str(value), unit="text")
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        yield Metric(name=name, value=float(value), unit=unit, measured=measured)  # type: ignore[arg-type]


def _graph_figures(graph: Graph, where: str) -> Iterator[Metric]:
    """Yield counts of ops and bytes; of a recorded step also the peak memory of its tensors and its processes.

    For a timed graph also the makespan bounds U and L (TicTac, Equations 1 and 2), and times of computation and transfer.
    """
    counts: dict[str, float] = {"ops": len(graph), "recvs": len(graph.of_kind(RECV)), "sends": len(graph.of_kind(SEND))}
    counts |= {"parameters": counts["recvs"], "parameter_bytes": graph.parameter_bytes}
    channels = sum(name.startswith("channel:") for name in graph.resource_names)
    for name, value in {**counts, "flops": float(graph.flops.sum()), "channels": channels}.items():
        yield from figure(name, value, _unit_of(name))
    if graph.recorded is not None:
        held = graph.recorded.held_bytes(len(graph.of_kind(COMPUTE)))
        yield from figure("peak_memory_bytes", float(held.max(initial=0.0)), "bytes")
        yield from figure("processes", graph.recorded.world_size)
    if graph.timed:
        makespans = bounds(graph)
        measured = "measured" in graph.estimate
        for name in ("upper_s", "lower_s", "compute_s", "transfer_s"):
            yield from figure(name, getattr(makespans, name), "s", measured=measured and name != "transfer_s")


def _trace_figures(result: TraceResult, where: str) -> Iterator[Metric]:
    """Yield the shortest makespan (s) over the heuristic orders, without the random and the exact order."""
    makespans_s = [row.makespan_s for name, row in result.schedules.items() if name not in ("random", "exact")]
    yield from figure("iteration_s", min(makespans_s), "s", measured=result.graph.oracle == "measured")


def _plan_figures(plan: Plan, where: str) -> Iterator[Metric]:
    """Yield the device count by type and, from the picked strategy, exposed communication, goodput, staleness and price."""
    for assignment in plan.assignments:
        # A type may have several assignments: then the same figure is yielded for each.
        device_count = sum(other.devices for other in plan.assignments if other.device_type == assignment.device_type)
        yield from figure(f"devices/{assignment.device_type}", device_count)
    yield from _parameter_figures(plan, where)
    if plan.decision is None:
        yield from figure("goodput", plan.goodput and plan.goodput.goodput_per_s, "1/s")
        return
    option = next((option for option in plan.decision.options if option.strategy == plan.decision.picked), None)
    if option is None:
        return
    yield from figure("exposed_s", option.communication_s, "s")
    yield from figure("goodput", option.goodput_per_s, "1/s")
    yield from figure("staleness", option.staleness)
    yield from figure("determinism", option.determinism, "text")
    if option.price_per_sample is not None:
        yield from figure("price_per_sample", option.price_per_sample)
        yield from figure("price_per_hour", option.price_per_sample * option.throughput * plan.batch_size * 3600)


def _command_figures(plan: CommandPlan, where: str) -> Iterator[Metric]:
    """Yield the figures of the best step, the numbers of variants that fit and that failed, and the rate of each variant.

    A rate is named ``samples_per_s/VALUES/NODE``: the options' values ("as-it-is" for the unchanged command), and the
    devices of a node, such as 8xH100.
    """
    if plan.best is not None and plan.best.row is not None:
        row = plan.best.row
        yield from figure("samples_per_s", row.samples_per_s, "1/s")
        yield from figure("step_s", row.step_time_s, "s")
        yield from figure("memory_bytes", row.reserved_bytes, "bytes")
    yield from figure("fitting", sum(variant.row is not None and variant.row.fits for variant in plan.tried))
    yield from figure("failed", sum(variant.row is None for variant in plan.tried))
    for variant in plan.tried:
        if variant.row is not None:
            values = ",".join(f"{name.lstrip('-')}={value}" for name, value in variant.values.items()) or "as-it-is"
            name = f"samples_per_s/{values}/{variant.devices_per_node}x{variant.device}"
            yield from figure(name, variant.row.samples_per_s, "1/s")


def _islands_figures(plan: IslandsPlan, where: str) -> Iterator[Metric]:
    """Yield the picked number of inner steps and its step time, and step time and bytes of each number H (``step_s/H``)."""
    yield from figure("outer_every", plan.picked)
    yield from figure("step_s", plan.best.overlapped_s, "s")
    yield from figure("compute_s", plan.compute_s, "s")
    yield from figure("parameters", plan.parameters)
    for row in plan.rows:
        yield from figure(f"step_s/{row.outer_every}", row.overlapped_s, "s")
        yield from figure(f"sent_bytes/{row.outer_every}", row.sent_bytes, "bytes")


def _enforcement_figures(enforcement: Enforcement, where: str) -> Iterator[Metric]:
    """Yield the largest and smallest local batch over the ranks, and the figures of the parameters."""
    batches = [rank.local_batch_size for rank in enforcement.ranks]
    yield from figure("local_batch_most", max(batches))
    yield from figure("local_batch_least", min(batches))
    yield from _parameter_figures(enforcement, where)


def _parameter_figures(plan: Plan | Enforcement, where: str) -> Iterator[Metric]:
    """Yield the number of the model's parameters (tensors) and their bytes; nothing if the plan lists none."""
    if plan.parameters:
        yield from figure("parameters", plan.parameters)
        yield from figure("parameter_bytes", sum(record.size_bytes for record in plan.parameters), "bytes")


def _sweep_figures(sweep: SweepDocument, where: str) -> Iterator[Metric]:
    """Yield the numbers of complete and failed replays, and each figure's mean over seeds as ``FIGURE/POLICY/WORKLOAD``.

    For a comparison also the two policies, and ``ratio/MEASURE``: the first policy's value over the second's.
    """
    failed = sum(cell.figures is None for cell in sweep.cells)
    yield from figure("replays", len(sweep.cells) - failed)
    yield from figure("failed", failed)
    for workload, policy, _, mean in sweep.means_by_policy():
        for name, value in mean.__dict__.items():
            yield from figure(f"{name}/{policy}/{workload}", value, _SWEEP_UNITS.get(name, "s"))
    if sweep.comparison is not None:
        yield from figure("compared", f"{sweep.comparison.first},{sweep.comparison.second}", "text")
        for comparison in sweep.comparison.comparisons:
            yield from figure(f"ratio/{comparison.measure}", comparison.ratio)


def _demo_figures(document: Mapping[str, Any], where: str) -> Iterator[Metric]:
    """Yield the figures of the plan in a demo's document."""
    yield from _all_figures({**document["plan"], "kind": "ddltool.plan"}, "ddltool.plan", f"{where}:plan")


def _user_figures(document: Mapping[str, Any], where: str) -> Iterator[Metric]:
    """Yield a user's own figures (numbers or lists of repeats, by name); the end of a name implies the unit.

    Raises InputError for any other value.
    """
    if not isinstance(document["figures"], Mapping):
        raise InputError(f"{where}:figures", "is no mapping", "give {name: number, or list of repeats}")
    yield from _nested_figures(document["figures"], "", where)


def _nested_figures(values: Mapping[str, Any], prefix: str, where: str) -> Iterator[Metric]:
    """Yield a measured metric for each number, or list of repeats, of a mapping; nested names are joined by ``/``.

    Raises InputError for any other value. ``prefix``: put before the names; ``where``: the file, for errors.

    >>> [metric.name for metric in _nested_figures({"loss": {"last": 0.5}}, "", "file")]
    ['loss/last']
    """
    for key, value in values.items():
        name = f"{prefix}{key}".replace(" ", "_")
        if isinstance(value, Mapping):
            yield from _nested_figures(value, f"{name}/", where)
            continue
        numbers = value if isinstance(value, list) else [value]
        if not numbers or not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
            raise InputError(f"{where}:figures:{name}", f"is {value!r}", "give a finite number, or a list of them")
        cell = cell_of("", numbers)
        yield Metric(name=name, value=cell.median, unit=_unit_of(name), measured=True, cells=(cell,))


# -- measured rows


def _profile_figures(document: Mapping[str, Any], where: str) -> Iterator[Metric]:
    """Yield each configuration's step time, synchronisation time and peak memory, the mean step time, and their number.

    ``document``: a profile with its ``rows``. A configuration is ``DEVICE/NODESxREPLICAS/bBATCH``, with ``/sSTEPS`` for
    accumulation steps; its rows are repeats, of which the median counts. The mean over configurations is geometric.
    """
    by_key: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in _nonempty_rows(document, where):
        # A name without blanks and slashes, which separate the parts of a metric's name.
        device = "_".join(str(row["device"]).replace("/", "_").split())
        key = f"{device}/{int(row['num_nodes'])}x{int(row['num_replicas'])}/b{int(row['local_batch_size'])}"
        steps = _number_or_none(row.get("accumulation_steps"))
        by_key[f"{key}/s{int(steps)}" if steps else key].append(row)
    cells = [pool(key, [_row_cell(key, row) for row in rows]) for key, rows in by_key.items()]
    yield from _family_figures("step_time_s", cells)
    yield from figure("configurations", len(cells))
    for key, rows in by_key.items():
        for column, unit in (("sync_time_s", "s"), ("peak_memory_bytes", "bytes")):
            numbers = [number for row in rows if (number := _number_or_none(row.get(column))) is not None]
            if numbers:
                yield from figure(f"{column}/{key}", cell_of("", numbers).median, unit, measured=True)


def _nonempty_rows(document: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]]:
    """Return the ``rows`` of a table's document. Raises InputError if there are none."""
    if not document["rows"]:
        raise InputError(where, "has no rows", "give at least one measured row")
    return document["rows"]  # type: ignore[no-any-return]


def _row_cell(key: str, row: Mapping[str, Any]) -> Cell:
    """Return a profile's row as the cell ``key``: median step time (s), its spread and number of repeats.

    A row without a spread counts as one repeat, whatever its column says, as its noise is not known.
    """
    repeats = _number_or_none(row.get("repeats"))
    spread = _number_or_none(row.get("step_time_spread_s"))
    known_repeats = 1
    if repeats is not None and spread is not None:
        known_repeats = int(repeats or 1)
    return Cell(key=key, median=row["step_time_s"], spread=spread or 0.0, repeats=known_repeats)


def _number_or_none(value: Any) -> float | None:
    """Return a table's value as a float; None for an empty cell (NaN) or an absent column (None)."""
    return None if value is None or math.isnan(value) else float(value)


def _telemetry_figures(document: Mapping[str, Any], where: str) -> Iterator[Metric]:
    """Yield the numbers of ranks and steps, and ``step_s``, ``compute_s``, ``wait_s`` and ``sync_s``.

    Each of these four is a rank's median (``NAME/rankR``; :func:`_block_cell`), and the geometric mean of all ranks' medians
    (``NAME``). The number of steps is that of the rank with fewest. ``where``: the file's name, for errors.
    """
    by_rank: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in sorted(_nonempty_rows(document, where), key=lambda row: int(row["step"])):
        by_rank[int(row["rank"])].append(row)
    yield from figure("ranks", len(by_rank))
    yield from figure("steps", min(len(steps) for steps in by_rank.values()))
    for column in ("step_s", "compute_s", "wait_s", "sync_s"):
        seconds_by_rank = {rank: [float(row[column]) for row in steps] for rank, steps in by_rank.items()}
        yield from _family_figures(
            column, [_block_cell(f"rank{rank}", seconds) for rank, seconds in seconds_by_rank.items()]
        )


def _block_cell(key: str, seconds: Sequence[float]) -> Cell:
    """Return the cell ``key`` of one rank's steps (s), whose repeats are the medians of consecutive blocks of steps.

    Successive steps are correlated, so that single steps as repeats would underestimate the noise. With too few steps for
    ``FEWEST_REPEATS`` blocks the cell has one repeat, and no noise test applies.
    """
    block_count = min(BLOCKS, len(seconds) // FEWEST_STEPS_PER_BLOCK)
    if block_count < FEWEST_REPEATS:
        return replace(cell_of(key, seconds), repeats=1)
    edges = [round(block * len(seconds) / block_count) for block in range(block_count + 1)]
    return cell_of(key, [cell_of(key, seconds[first:end]).median for first, end in pairwise(edges)])


def _family_figures(name: str, cells: Sequence[Cell]) -> Iterator[Metric]:
    """Yield the geometric mean of all cells (s) as metric ``NAME``, then the median of each as ``NAME/KEY``."""
    ordered = tuple(sorted(cells, key=lambda cell: cell.key))
    yield Metric(name=name, value=geometric_mean(ordered), unit="s", measured=True, cells=ordered)
    for cell in ordered:
        yield Metric(name=f"{name}/{cell.key}", value=cell.median, unit="s", measured=True, cells=(cell,))


# By kind. Each takes the record (the document, for a kind without one) and its name for errors.
_COMPUTED_FIGURES: dict[str, Callable[[Any, str], Iterator[Metric]]] = {
    "ddltool.graph": _graph_figures,
    "ddltool.trace": _trace_figures,
    "ddltool.plan": _plan_figures,
    "ddltool.command_plan": _command_figures,
    "ddltool.islands_plan": _islands_figures,
    "ddltool.enforcement": _enforcement_figures,
    "ddltool.sweep": _sweep_figures,
    "ddltool.demo": _demo_figures,
    "ddltool.figures": _user_figures,
    "ddltool.profile": _profile_figures,
    "ddltool.telemetry": _telemetry_figures,
}

# -- for people


def harmless(text: str) -> str:
    r"""Return text on one line, with control characters and GitHub workflow commands escaped.

    Names come from files that anybody made, and GitHub's runner executes commands in what a job prints.

    >>> harmless("a\n::error::b"), harmless("x##[add-mask]y"), harmless("tests/t.py::test_b")
    ('a \\x3a:error::b', 'x#\\x23[add-mask]y', 'tests/t.py::test_b')
    """
    return _WORKFLOW_COMMAND.sub(lambda match: r"\x3a:" if match.group() == "::" else r"#\x23", one_line(text))


def show(value: float | str | None, unit: str) -> str:
    """Return a figure as text in a readable unit; "-" for None; a text made :func:`harmless` and shortened.

    ``unit``: of the value: "s", "bytes", "share" (a fraction), "1/s", or "" for a plain number.

    >>> show(0.00153, "s"), show(0.98, "share"), show(7.0, ""), show(None, "")
    ('1.53 ms', '98%', '7', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, str):
        return shortened(harmless(value), LONGEST_NAME)
    if unit == "s":
        return show_seconds(value)
    if unit == "bytes":
        return show_bytes(value)
    if unit == "share":
        return f"{value:.4g}" if abs(value) > 1 else f"{100 * value:.3g}%"
    text = f"{value:,.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.4g}"
    return f"{text}/s" if unit == "1/s" else text
