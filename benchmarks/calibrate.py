"""Fit the cost model to published measurements, judge it by rows that the fit did not see, and write both down.

    python benchmarks/calibrate.py --data ../shared/data --cache DIR [--processes 2]

Writes fixtures/calibration.json (the constants), docs/truth.md and docs/truth.png (how far off they are). Tracing the
models takes an hour on two cores the first time; DIR keeps the traces. The rest takes minutes. Start at :func:`main`.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from memory_truth import write_memory
from truth_cases import SOURCES, Row, Truth, read
from truth_compiled import compiled_residuals, write_compiled
from truth_compiled import judged as compiled_pairs
from truth_measured import MeasuredOp, read_measured, write_measured
from truth_models import Trace, Work, traced
from truth_networks import write_section
from truth_ops import (
    MeasuredProducts,
    call_settings,
    operation_residuals,
    read_collectives,
    read_products,
    write_operations,
)
from truth_page import write_page
from truth_parallel import write_section as write_parallel_section

from ddltool.analyzers.step.costs.fitting import Belief, Case, fit, host_bound, library_bound, steps_s
from ddltool.analyzers.step.costs.kernel_times import ARITHMETIC, CARRIED, FEED, TRAFFIC, UNITS, Constants, demand_of
from ddltool.analyzers.step.costs.kernels import memory_kernels
from ddltool.analyzers.step.costs.model import BRANCHES, cost_model
from ddltool.analyzers.step.costs.optimizers import OPTIMIZERS
from ddltool.analyzers.step.recording.op_rules import CLASS
from ddltool.artifacts import save
from ddltool.calibration import CalibrationTable, Residuals
from ddltool.shipped import devices

ROOT = Path(__file__).resolve().parents[1]
FOLDS = 5
HELD = 0.8
# From so many measured training steps on, a device counts as one that the fit has seen.
ENOUGH = 10
# Standard deviations above which a tenth lies.
_TENTH = 1.2816
# A model of today's timm with other parameters under an old name is another architecture.
SAME_PARAMETERS = 0.02


def _slow(name: str) -> bool:
    """Return whether kernels of this name are known to reach little of a datasheet's rate, and nobody says how little."""
    return name.startswith(("grouped", "depthwise")) or name == "convolution/misaligned"


# What was believed before any row was read: kernels reach three quarters to four fifths of a datasheet's rates, give or take
# a quarter; a few microseconds lie between two kernels, and between two steps of a recurrent layer; hosts take some twenty for
# an op, forward or backward: a desktop of 2024 less than 15 (timm's smallest model on an RTX 4090), Megatron on DGX A100 about
# 30 (vTrain's steps of one sequence), Lucid's server 45 (steps that take as long for 64 samples as for 32). A tensor of a fused
# update takes ten. Older hosts, with a loop over the parameters, took more: what the rows say of that is theirs.
_HOSTS = 0.5
"""How far one host's time per op is from another's: the standard deviation of its logarithm."""
PRIOR = Belief(
    constants=Constants(
        arithmetic={name: 0.3 if _slow(name) else 0.8 for name in ARITHMETIC},
        traffic={name: 0.3 if _slow(name) else 0.75 for name in TRAFFIC},
        feed=dict.fromkeys(FEED, 4000.0) | {"matrix_product/misaligned": 1600.0, "matrix_product/odd": 620.0},
        carried=dict.fromkeys(CARRIED, 20.0),
        start_s=5e-6,
        cache=0.4,
        issue_s=20e-6,
        update_s=10e-6,
        turn_s=5e-6,
    ),
    generations={},
    spread={
        "*": 0.25,
        **{f"arithmetic:{name}": 1.2 for name in ARITHMETIC if _slow(name)},
        "feed:matrix_product/misaligned": 0.3,
        "feed:matrix_product/odd": 0.3,
        **{f"traffic:{name}": 1.2 for name in TRAFFIC if _slow(name)},
        **{"feed": 0.8, "carried": 0.8, "start_s": 0.15, "cache": 0.5, "issue_s": 0.2, "update_s": 0.15, "turn_s": 0.8},
        "setting": 1.5,
        # Chips are alike in what they reach of their units: what they are fed and their power say most of the rest.
        **dict.fromkeys(UNITS, 0.1),
        # A K80's clock follows its power, far below the boost of the datasheet.
        **{f"{unit}:Kepler": 0.3 for unit in UNITS},
        # Another maker's libraries reach half of their datasheets' rates, or less.
        **{f"{unit}:CDNA3": 0.5 for unit in UNITS},
    },
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cell:
    """All rows of one model, batch size, format and device: one case of the fit."""

    rows: Sequence[Row]
    case: Case

    @property
    def row(self) -> Row:
        """Return one of the rows, for what all have in common."""
        return self.rows[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """Rows that were predicted without having been seen."""

    cells: Sequence[Cell]
    predicted_s: np.ndarray
    bound: Sequence[str]
    """What each step is bound by: ``device``, ``library`` or ``host``."""

    def chosen(self, keep: Callable[[Row], bool], *bound: str) -> list[tuple[Row, float]]:
        """Return (row, predicted seconds) of the rows to keep, of steps ``bound`` by these; of all where none is given."""
        parts = zip(self.cells, self.predicted_s.tolist(), self.bound, strict=True)
        return [(row, time) for cell, time, by in parts if not bound or by in bound for row in cell.rows if keep(row)]


def chip(device: str) -> str:
    """Return what is left out together: an A100 with more memory tells of the others.

    >>> chip("A100-PCIe-80GB"), chip("RTX3090")
    ('A100', 'RTX3090')
    """
    return device.partition("-")[0]


def cells_of(truth: Truth, works: dict[Trace, dict[int, Work]]) -> list[Cell]:
    """Return the cases of the fit; rows whose model cannot be traced, or is another one today, are counted as excluded."""
    grouped: dict[tuple[str, Trace, int, str, str], list[Row]] = defaultdict(list)
    for row in truth.rows:
        work = works[row.trace].get(row.batch)
        if work is None:
            truth.excluded[row.source]["the model cannot be built or traced today"] += 1
        elif row.params_m and abs(work.parameter_bytes / 4e6 / row.params_m - 1.0) > SAME_PARAMETERS:
            truth.excluded[row.source]["today's model of that name has other parameters"] += 1
        else:
            grouped[row.source, row.trace, row.batch, row.device, row.precision].append(row)
    size: dict[tuple[str, str, str], int] = defaultdict(int)
    for source, trace, _, device, _ in grouped:
        size[source, trace.model, device] += 1
    return [
        Cell(rows=rows, case=_case(rows, works[trace][batch], size[source, trace.model, device]))
        for (source, trace, batch, device, _), rows in grouped.items()
    ]


def _case(rows: Sequence[Row], work: Work, beside: int) -> Case:
    """Return the case of rows that differ in their time alone, one of ``beside`` of its model and device."""
    row, source = rows[0], SOURCES[rows[0].source]
    device = devices().device(row.device)
    training = row.trace.mode == "training" and row.optimizer != "none"
    update = OPTIMIZERS[row.optimizer if training else "none"]
    updating = memory_kernels([passes * work.parameter_bytes for passes in update.kernels])
    kernels = work.kernels
    demand = demand_of(kernels, device, precision=row.precision, cudnn=source.cudnn)
    attention = np.where(kernels.kind == CLASS["attention"], source.attention, 1.0)
    demand = replace(
        demand,
        traffic_s=source.traffic * demand.traffic_s,
        arithmetic_s=attention * demand.arithmetic_s,
        fed_s=attention * demand.fed_s,
    ).then(demand_of(updating, device))
    grouped = bool((kernels.kind == CLASS["grouped_convolution"]).any())
    today = [each.measured_s for each in rows if not (grouped and each.dated)]
    return Case(
        demand=demand,
        count=np.concatenate([work.count, np.ones(len(updating))]),
        ops=work.ops + len(updating),
        views=work.views,
        tensors=work.tensors if training else 0,
        generation=device.branch,
        measured_s=math.exp(float(np.median(np.log(today or [each.measured_s for each in rows])))),
        weight=source.weight / math.sqrt(beside) if today else 0.0,
        error=source.error,
        setting=f"{row.source}, {row.model}" if source.adds else "",
    )


def table_of(belief: Belief, **more: object) -> CalibrationTable:
    """Return the constants as a file holds them; ``more``: fields beside the constants."""
    constants = belief.constants
    once = Residuals(low=1.0, high=1.0, median_error=0.0, rows=1, what="not judged yet")
    known = [name for years in BRANCHES for name in years if name in belief.generations]
    known += sorted({*belief.generations} - {*known})
    return CalibrationTable(
        **{
            "arithmetic": _rounded(constants.arithmetic),
            "traffic": _rounded(constants.traffic),
            "feed": _rounded(constants.feed),
            "carried": _rounded(constants.carried),
            **_rounded(
                {name: getattr(constants, name) for name in ("start_s", "cache", "turn_s", "issue_s", "update_s")}
            ),
            "generations": {name: _rounded(belief.generations[name]) for name in known},
            "devices": [],
            "judged": [],
            "residuals": dict.fromkeys(
                ("device", "generation", "unknown", "host", "library", "product", "collective", "compiled"), once
            ),
            "provenance": [],
            **more,
        }  # type: ignore[arg-type]
    )


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def without(
    cells: Sequence[Cell],
    left_out: Callable[[Row], bool],
    whole: Belief,
    operations: Operations,
    keep: Callable[[str], bool] = lambda _: True,
) -> Judged:
    """Return the predictions for the rows to leave out by a fit to the others, and to single operations on devices to keep.

    A generation that the fit did not see takes the factors that the product gives it, from its neighbours.
    """
    seen = [cell for cell in cells if not left_out(cell.row)]
    judged = [cell for cell in cells if left_out(cell.row)]
    belief = fit(
        [*(cell.case for cell in seen), *operations.cases(keep)], believed(operations.groups), first=whole, rounds=12
    )
    table = table_of(belief)
    factors = {
        generation: dict(cost_model(devices().device(cell.row.device), table).constants.units)
        for generation, cell in {each.case.generation: each for each in judged}.items()
    }
    # What a setting adds is a nuisance: what is left out is judged with that of the fit to all rows.
    belief = replace(belief, generations=factors, settings=whole.settings)
    cases = [cell.case for cell in judged]
    by_host, by_library = host_bound(cases, belief), library_bound(cases, belief)
    bound = [
        "host" if host else "library" if library else "device"
        for host, library in zip(by_host, by_library, strict=True)
    ]
    return Judged(cells=judged, predicted_s=steps_s(cases, belief), bound=bound)


def joined(parts: Sequence[Judged]) -> Judged:
    """Return all of them together."""
    return Judged(
        cells=[cell for part in parts for cell in part.cells],
        predicted_s=np.concatenate([part.predicted_s for part in parts]),
        bound=[bound for part in parts for bound in part.bound],
    )


def believed(groups: Sequence[MeasuredProducts]) -> Belief:
    """Return what is believed before any row, with what single operations hold beside their kernels."""
    return replace(PRIOR, settings=call_settings(groups))


@dataclass(frozen=True, kw_only=True, eq=False)
class Operations:
    """What was measured of single operations."""

    groups: Sequence[MeasuredProducts]
    """Products that others measured."""
    measured: Sequence[MeasuredOp]
    """Ops of steps on an H200."""

    def cases(self, keep: Callable[[str], bool] = lambda _: True) -> list[Case]:
        """Return the cases on devices to keep, of those that the fit reads."""
        products = [
            case for group in self.groups if group.is_fitted and keep(group.device.name) for case in group.cases()
        ]
        return [*products, *(each.case for each in self.measured if keep("H200"))]


def sources_left_out(cells: Sequence[Cell], whole: Belief, operations: Operations) -> Judged:
    """Return every row predicted without its source: another project's software and machines, as a user's job is."""
    names = sorted({cell.row.source for cell in cells})
    return joined([without(cells, lambda row, name=name: row.source == name, whole, operations) for name in names])


def families_left_out(cells: Sequence[Cell], whole: Belief, operations: Operations) -> Judged:
    """Return every row predicted without its model's family: timm's families in folds, the others one by one."""
    size: dict[str, int] = defaultdict(int)
    for cell in cells:
        size[cell.row.family] += cell.row.source.startswith("timm")
    timm = sorted((name for name in size if size[name]), key=lambda name: (-size[name], name))
    folds = [set(timm[place::FOLDS]) for place in range(FOLDS)]
    folds += [{name} for name in sorted(size) if not size[name]]
    print(f"{len(timm)} families of timm in {FOLDS} folds, and {len(folds) - FOLDS} others", flush=True)
    return joined([without(cells, lambda row, fold=fold: row.family in fold, whole, operations) for fold in folds])


def devices_left_out(cells: Sequence[Cell], whole: Belief, operations: Operations) -> tuple[Judged, Judged]:
    """Return rows predicted without their chip, where its generation has others; and without their generation."""
    generation = {cell.row.device: devices().device(cell.row.device).architecture for cell in cells}
    chips = sorted({chip(device) for device in generation})
    of = {name: next(generation[device] for device in generation if chip(device) == name) for name in chips}
    others = [name for name in chips if sum(of[each] == of[name] for each in chips) > 1]
    known = [
        without(
            cells,
            lambda row, name=name: chip(row.device) == name,
            whole,
            operations,
            lambda device, name=name: chip(device) != name,
        )
        for name in others
    ]
    unknown = [
        without(
            cells,
            lambda row, name=name: generation[row.device] == name,
            whole,
            operations,
            lambda device, name=name: devices().device(device).architecture != name,
        )
        for name in sorted(set(of.values()))
    ]
    return joined(known), joined(unknown)


def residuals_of(judged: Sequence[tuple[Row, float]], what: str) -> Residuals:
    """Return between which factors of a prediction 80 % of measurements lie: of all (model, device), and of all sources.

    The middle of both counts, as a user's model may be like any of them: once every (model, device) has equal weight, and once
    every source and in it every (model, device). The quantiles of split conformal prediction (Vovk et al., 2005), as many on
    either side: with ``n`` cells the level ``q`` becomes ``ceil((n + 1) q) / n``.
    """
    groups: dict[tuple[str, str, str], list[tuple[Row, float]]] = defaultdict(list)
    for row, time in judged:
        groups[row.source, row.model, row.device].append((row, time))
    beside = Counter(source for source, _, _ in groups)
    logs = np.array([math.log(row.measured_s / time) for each in groups.values() for row, time in each])
    alike = np.array([1.0 / len(each) for each in groups.values() for _ in each])
    by_source = alike / np.array([beside[source] for (source, _, _), each in groups.items() for _ in each])
    cells, upper = len(groups), (1.0 + HELD) / 2.0
    level = min(1.0, math.ceil((cells + 1) * upper) / cells)
    low, high = (sum(_quantile(sign * logs, each, level) for each in (alike, by_source)) / 2.0 for sign in (-1.0, 1.0))
    return Residuals(
        low=min(1.0, float(f"{math.exp(-low):.4g}")),
        high=max(1.0, float(f"{math.exp(high):.4g}")),
        median_error=float(f"{_quantile(np.abs(np.expm1(-logs)), alike, 0.5):.4g}"),
        rows=len(judged),
        what=what,
    )


def _host(judged: Judged) -> Residuals:
    """Return those of steps that wait for the host: few were measured, so at least what was believed of hosts."""
    rows = judged.chosen(lambda _: True, "host")
    believed = math.exp(_TENTH * _HOSTS)
    what = "what is expected of other hosts"
    expected = Residuals(
        median_error=_HOSTS, rows=len(rows), what=what, **_rounded({"low": 1 / believed, "high": believed})
    )
    return _wider(residuals_of(rows, f"the model's family; at least {what}"), expected) if rows else expected


def _combined(residuals: Residuals, other: Residuals) -> Residuals:
    """Return the residuals with the interval of two independent errors: half widths of logarithms add in quadrature."""
    low, high = (math.hypot(*(math.log(getattr(each, end)) for each in (residuals, other))) for end in ("low", "high"))
    return residuals.model_copy(update=_rounded({"low": math.exp(-low), "high": math.exp(high)}))


def _wider(residuals: Residuals, than: Residuals) -> Residuals:
    """Return the residuals with an interval that holds another's: what is known less is not known better."""
    low, high = min(residuals.low, than.low), max(residuals.high, than.high)
    return residuals.model_copy(update={"low": low, "high": high})


def _quantile(values: np.ndarray, weights: np.ndarray, level: float) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    place = int(np.searchsorted(reached, level * reached[-1] * (1.0 - 1e-12)))
    return float(values[order][min(place, len(values) - 1)])


def main() -> None:
    """Trace, fit, judge and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds truth and sia-sosp23")
    parser.add_argument("--cache", type=Path, required=True, help="folder for traces, outside the repository")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    truth = read(given.data)
    wanted: dict[Trace, set[int]] = defaultdict(set)
    for row in truth.rows:
        wanted[row.trace].add(row.batch)
    cells = cells_of(truth, traced(wanted, given.cache, processes=given.processes))
    groups = read_products(given.data)
    measured = read_measured(given.cache)
    operations = Operations(groups=groups, measured=measured)
    whole = fit([*(cell.case for cell in cells), *operations.cases()], believed(groups))
    families = families_left_out(cells, whole, operations)
    sources = sources_left_out(cells, whole, operations)
    known, unknown = devices_left_out(cells, whole, operations)
    # Sources whose software adds to the step do not tell how far off it is.
    own = lambda row: not SOURCES[row.source].adds  # noqa: E731
    # timm's rows are of two GPUs: without the one nothing tells of most layers, and the other would stand for all GPUs.
    plain = lambda row: own(row) and not row.source.startswith("timm")  # noqa: E731
    device = _wider(
        residuals_of(sources.chosen(own, "device"), "the whole source"),
        residuals_of(families.chosen(own, "device"), "the model's family"),
    )
    # A model of the fit on another GPU is judged by these: a user's model may be another one as well.
    generation = _combined(residuals_of(known.chosen(plain, "device", "library"), "the GPU"), device)
    unknown_too = _combined(
        residuals_of(unknown.chosen(plain, "device", "library"), "any GPU of its generation"), device
    )
    compiled = compiled_pairs(given.data, given.cache, table_of(whole))
    residuals = {
        "device": device,
        "generation": generation,
        "unknown": _wider(unknown_too, generation),
        "host": _host(families),
        **operation_residuals(groups, read_collectives(given.data), table_of(whole)),
        "compiled": compiled_residuals(compiled, device),
        "library": _wider(residuals_of(families.chosen(own, "library"), "the model's family"), device),
    }
    provenance = [
        f"{name}: {source.title}, {sum(row.source == name for cell in cells for row in cell.rows)} rows; {source.remark}"
        for name, source in SOURCES.items()
    ]
    provenance.append(f"measured: {len(measured)} ops of steps on an H200, benchmarks/measured; torch 2.11, 2026-11-27")
    trained = Counter(row.device for cell in cells for row in cell.rows if own(row) and row.trace.mode == "training")
    judged = {name for name, rows in trained.items() if rows >= ENOUGH}
    table = table_of(
        whole,
        devices=sorted(judged),
        judged=sorted({devices().device(name).branch for name in judged}),
        residuals=residuals,
        provenance=provenance,
    )
    save(table, ROOT / "fixtures" / "calibration.json")
    write_page(ROOT / "docs", truth, table, whole, families, sources, known, unknown)
    elsewhere = [*(cell.case for cell in cells), *operations.cases(lambda device: device != "H200")]
    write_measured(measured, fit(elsewhere, believed(groups), first=whole, rounds=12), whole)
    write_operations(given.data, table)
    write_section(given.data)
    write_compiled(compiled, given.cache, table)
    write_parallel_section(given.data)
    write_memory(given.data)


if __name__ == "__main__":
    main()
