"""The named figures of an artifact: one extractor per kind, all in :data:`EXTRACTORS`.

A name is ``family`` or ``family/member``: ``iteration_s``, ``efficiency/tac``, ``step_time_s/V100/1x2/b64``. Figures are in
SI base units; a figure that the artifact does not have (an undefined efficiency) is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddltool.analyzers.gating.measured import merge, step_times, telemetry_times
from ddltool.analyzers.gating.metric import Metric, Unit, figure, figures, harmless
from ddltool.analyzers.gating.noise import cell_of
from ddltool.artifacts import Artifact, parse
from ddltool.errors import InputError, did_you_mean, shortened
from ddltool.goodput_model import Goodput
from ddltool.graph import RECV, SEND, Graph
from ddltool.graph_io import from_document
from ddltool.plan import Enforcement, ParameterRecord, Plan
from ddltool.results import (
    SHOWN,
    BalanceResult,
    BarrierResult,
    BucketFigures,
    NetworkResult,
    PredictorFigures,
    PrefetchFigures,
    SchemeFigures,
    SimulationDocument,
    SweepDocument,
    TraceResult,
)

_SWEEP_UNITS = {"utilization": "share", "worst_fairness": "", "restarts": "", "cost": ""}
_SHOWN: tuple[type[Artifact], ...] = (Plan, Enforcement, Goodput, TraceResult, *SHOWN)
_MODELS = {model.KIND: model for model in _SHOWN}
Extractor = Callable[[Any, str], Iterable[Metric]]


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
    if not isinstance(kind, str) or kind not in EXTRACTORS:
        known = [name.removeprefix("ddltool.") for name in EXTRACTORS]
        shown = str(kind).removeprefix("ddltool.")
        raise InputError(f"{where}:kind", f"{kind!r} has no figures to gate", did_you_mean(shown, known))
    try:
        found: dict[str, Metric] = {}
        written: dict[str, str] = {}
        for metric in EXTRACTORS[kind](_checked(document, kind, where), where):
            named = _printable(metric)
            if written.setdefault(named.name, metric.name) != metric.name:
                raise InputError(where, f"has two figures that read {shortened(named.name, 80)}", "rename one of them")
            found[named.name] = named
    except KeyError as error:
        raise InputError(where, f"has no field {error.args[0]!r}", f"is it a whole {kind} document?") from None
    except (TypeError, AttributeError, ValueError, OverflowError) as error:
        raise InputError(where, f"is no {kind} document ({error})", "make it again") from None
    if not found:
        raise InputError(where, "has no figures to gate", "is it a whole document?")
    return Figures(kind=kind, metrics=found)


def _checked(document: Mapping[str, Any], kind: str, where: str) -> Any:
    """Return what the extractor of a kind reads: its record, or the document where rows or people's own figures stand."""
    if kind == "ddltool.graph":
        return from_document(dict(document), where)
    model = _MODELS.get(kind)
    return document if model is None else parse(dict(document), model, where)


def _printable(metric: Metric) -> Metric:
    """Return the metric with names that no reader of the gate's output acts on: they come from files of others."""
    name = harmless(metric.name).replace(" ", "_")
    value = harmless(metric.value) if isinstance(metric.value, str) else metric.value
    if name == metric.name and value == metric.value:
        return metric
    return replace(metric, name=name, value=value)


def combine(documents: Sequence[tuple[Mapping[str, Any], str]]) -> Figures:
    """Return the metrics of several documents (each with its name) of one thing as one; see :func:`merge`.

    Raises InputError as :func:`extract` does, and when the kinds differ.
    """
    found = [extract(document, where) for document, where in documents]
    for figures_, (_, where) in zip(found, documents, strict=True):
        if figures_.kind != found[0].kind:
            raise InputError(f"{where}:kind", f"is {figures_.kind!r}", f"expected {found[0].kind!r} as before")
    if len(found) == 1:
        return found[0]
    merged = merge([list(figures_.metrics.values()) for figures_ in found])
    return Figures(kind=found[0].kind, metrics={metric.name: metric for metric in merged})


def _graph(graph: Graph, where: str) -> Iterator[Metric]:
    yield from figures("", ops=len(graph), recvs=len(graph.of_kind(RECV)), sends=len(graph.of_kind(SEND)))
    yield from figure("parameters", len(graph.of_kind(RECV)))
    yield from figure("parameter_bytes", graph.parameter_bytes, "bytes")
    yield from figure("flops", float(graph.flops.sum()))
    yield from figure("channels", sum(name.startswith("channel:") for name in graph.resource_names))
    if graph.timed:
        yield from _graph_times(graph)


def _graph_times(graph: Graph) -> Iterator[Metric]:
    """Yield U and L (TicTac, Equations 1 and 2) and the busiest compute resource and channel."""
    busy: dict[str, float] = dict.fromkeys(graph.resource_names, 0.0)
    for resource, duration in zip(graph.resource.tolist(), graph.duration_s.tolist(), strict=True):
        busy[graph.resource_names[resource]] += duration
    measured = "measured" in graph.estimate
    yield from figure("upper_s", sum(busy.values()), "s", measured=measured)
    yield from figure("lower_s", max(busy.values(), default=0.0), "s", measured=measured)
    for name, kind in (("compute_s", "compute:"), ("transfer_s", "channel:")):
        longest = max((seconds for resource, seconds in busy.items() if resource.startswith(kind)), default=0.0)
        yield from figure(name, longest, "s", measured=measured and kind == "compute:")


def _trace(found: TraceResult, where: str) -> Iterator[Metric]:
    graph, schedules = found.graph, found.schedules
    counts = ("ops", "recvs", "sends", "parameters", "flops", "channels")
    yield from figures("", **{name: getattr(graph, name) for name in counts})
    yield from figure("parameter_bytes", graph.parameter_bytes, "bytes")
    measured = graph.oracle == "measured"
    for name in ("upper_s", "lower_s", "best_lower_s"):
        yield from figure(name, getattr(found.bounds, name), "s", measured=measured)
    yield from figure("speedup", found.bounds.speedup)
    ordered = [row.makespan_s for name, row in schedules.items() if name not in ("random", "exact")]
    yield from figure("iteration_s", min(ordered), "s", measured=measured)
    for name, row in schedules.items():
        yield from figure(f"iteration_s/{name}", row.makespan_s, "s", measured=measured)
        yield from figure(f"efficiency/{name}", row.efficiency, "share", measured=measured)
        yield from figure(f"efficiency_of_best/{name}", row.efficiency_of_best, "share", measured=measured)
    for framework in ("ddp", "fsdp2"):
        plans = getattr(found.collectives, framework, None)
        for setting, plan in plans or ():
            if isinstance(plan, (BucketFigures, PrefetchFigures)):
                yield from figure(f"step_s/{framework}/{setting}", plan.step_s, "s", measured=measured)
                yield from figure(f"exposed_s/{framework}/{setting}", plan.exposed_s, "s", measured=measured)
                gathered = getattr(plan, "gathered_bytes", None)
                yield from figure(f"gathered_bytes/{framework}/{setting}", gathered, "bytes")
    if found.coverage is not None:
        yield from figure("coverage/default_time", found.coverage.default_time, "share")


def _plan(plan: Plan, where: str) -> Iterator[Metric]:
    yield from figure("iteration_s", plan.iteration_s, "s")
    yield from figure("throughput", plan.throughput, "1/s")
    yield from figure("devices", plan.world_size)
    for assignment in plan.assignments:
        held = sum(other.devices for other in plan.assignments if other.device_type == assignment.device_type)
        yield from figure(f"devices/{assignment.device_type}", held)
    yield from figures("", est_count=plan.est_count, max_workers=plan.max_workers, batch_size=plan.batch_size)
    yield from figures("1/s", waste=plan.waste)
    yield from figures("s", overload_factor=plan.overload_factor)
    yield from figure("gap", plan.gap, "share")
    yield from figure("solve_seconds", plan.solve_seconds, "s", measured=True)
    yield from figures("text", strategy=plan.strategy, status=plan.status)
    if plan.superstep is not None:
        yield from figure("iteration_gap", plan.superstep.iteration_gap)
        for name in ("superstep_s", "waiting_s", "total_waiting_s"):
            yield from figure(name, getattr(plan.superstep, name), "s")
    yield from _picked(plan)
    yield from _parameters(plan.parameters)
    yield from _settings(plan)


def _picked(plan: Plan) -> Iterator[Metric]:
    """Yield what only a plan with a comparison of strategies says: price, goodput, staleness, bits, communication."""
    if plan.decision is None:
        if plan.goodput is not None:
            yield from figure("goodput", plan.goodput.goodput_per_s, "1/s")
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
    yield from figures("", devices=made.world_size, batch_size=made.total_batch_size)
    batches = [rank.local_batch_size for rank in made.ranks]
    yield from figures("", local_batch_most=max(batches), local_batch_least=min(batches))
    yield from figure("strategy", made.strategy, "text")
    yield from _parameters(made.parameters)
    yield from _settings(made)


def _parameters(records: list[ParameterRecord]) -> Iterator[Metric]:
    if records:
        yield from figure("parameters", len(records))
        yield from figure("parameter_bytes", sum(record.size_bytes for record in records), "bytes")


def _settings(made: Plan | Enforcement) -> Iterator[Metric]:
    for name, setting in (("ddp", made.ddp), ("fsdp2", made.fsdp2)):
        if setting is not None:
            yield from figure(f"step_s/{name}/best", setting.step_s, "s")
            yield from figure(f"step_s/{name}/default", setting.default_step_s, "s")
    if made.ddp is not None:
        yield from figure("buckets", len(made.ddp.buckets))


def _goodput(fitted: Goodput, where: str) -> Iterator[Metric]:
    yield from figures("share", mape=fitted.mape)
    yield from figures("", rmsle=fitted.rmsle, samples=fitted.samples, undetermined=len(fitted.undetermined))
    if fitted.holdout is not None:
        yield from figure("holdout/mape", fitted.holdout.mape, "share")
        yield from figure("holdout/rmsle", fitted.holdout.rmsle)
        yield from figure("holdout/samples", fitted.holdout.samples)
    for name, value in fitted.params.model_dump().items():
        yield from figure(f"params/{name}", value, "s" if name.endswith("_s") else "")
    yield from figure("fit_seconds", fitted.fit_seconds, "s", measured=True)


def _barrier(found: BarrierResult, where: str) -> Iterator[Metric]:
    yield from figures("", workers=found.workers, lookahead=found.lookahead)
    least = {f"least_{name}": row for name, row in found.objectives.items()}
    for name, row in {"bsp": found.bsp, **found.algorithms, **least}.items():
        for key in ("barrier_s", "waiting_time_s", "total_waiting_s", "waiting_per_iteration_s"):
            yield from figure(f"{key}/{name}", getattr(row, key), "s")
        yield from figure(f"iteration_gap/{name}", row.iteration_gap)
        yield from figure(f"compute_seconds/{name}", row.compute_seconds, "s", measured=True)


def _simulation(found: SimulationDocument, where: str) -> Iterator[Metric]:
    yield from figures("", jobs=found.jobs, gpus=found.gpus)
    for name, row in found.policies.items():
        for key in ("avg_jct_s", "median_jct_s", "p99_jct_s", "makespan_s", "avg_queueing_s"):
            yield from figure(f"{key}/{name}", getattr(row, key), "s")
        yield from figure(f"utilization/{name}", row.utilization, "share")
        yield from figure(f"restarts/{name}", row.restarts)
        yield from figure(f"worst_fairness/{name}", row.finish_time_fairness.max)
        yield from figure(f"wall_seconds/{name}", row.wall_seconds, "s", measured=True)


def _sweep(found: SweepDocument, where: str) -> Iterator[Metric]:
    """Yield each figure's mean over the seeds, as ``FIGURE/POLICY/WORKLOAD``, and how many replays there are and failed.

    Of a comparison: the two policies, and ``ratio/MEASURE``, the first one's over the second's (1 where they are equal).
    """
    failed = sum(cell.figures is None for cell in found.cells)
    yield from figures("", replays=len(found.cells) - failed, failed=failed)
    for workload, policy, _, mean in found.means_by_policy():
        for name, value in mean.__dict__.items():
            yield from figure(f"{name}/{policy}/{workload}", value, _SWEEP_UNITS.get(name, "s"))
    if found.comparison is not None:
        yield from figure("compared", f"{found.comparison.first},{found.comparison.second}", "text")
        for one in found.comparison.comparisons:
            yield from figure(f"ratio/{one.measure}", one.ratio)


def _balance(found: BalanceResult, where: str) -> Iterator[Metric]:
    yield from figures("", workers=found.workers, iterations=found.iterations)
    split = {"equal_split": found.equal_split, "oracle": found.oracle}
    schemes = {f"schemes/{name}": row for name, row in found.schemes.items() if isinstance(row, SchemeFigures)}
    for name, row in {**found.predictors, **split, **schemes}.items():
        yield from figure(f"iteration_s/{name}", row.iteration_s, "s")
        yield from figure(f"iteration_time_ratio/{name}", row.iteration_time_ratio)
        if isinstance(row, PredictorFigures):
            yield from figure(f"rmse_relative/{name}", row.rmse_relative, "share")
            yield from figure(f"gain_kept/{name}", row.gain_kept, "share")


def _network(found: NetworkResult, where: str) -> Iterator[Metric]:
    yield from figure("processes", found.processes)
    yield from figure("bandwidth_bytes_per_s", found.bandwidth_bytes_per_s, measured=True)
    yield from figure("latency_s", found.latency_s, "s", measured=True)
    yield from figure("residual", found.residual, "share", measured=True)


def _training(document: Mapping[str, Any], where: str) -> Iterator[Metric]:
    """Yield the figures of ``ddltool demo``: its plan, its fits, and what its training run measured."""
    yield from _plan(parse({**document["plan"], "kind": "ddltool.plan"}, Plan, f"{where}:plan"), where)
    for name, part in (("fit", document["fit"]), ("fit_telemetry", document["fit_telemetry"])):
        yield from figure(f"mape/{name}", part["mape"], "share")
        yield from figure(f"rmsle/{name}", part["rmsle"])
    for name, value in document.get("training", {}).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            unit: Unit = "s" if name.endswith(("_s", "seconds")) else ""
            yield from figure(f"training/{name}", value, unit, measured=unit == "s")


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
        unit: Unit = "s" if name.endswith("_s") else "bytes" if name.endswith("_bytes") else ""
        cell = cell_of("", numbers)
        yield Metric(name=name, value=cell.median, unit=unit, measured=True, cells=(cell,))


EXTRACTORS: dict[str, Extractor] = {
    "ddltool.graph": _graph,
    "ddltool.trace": _trace,
    "ddltool.plan": _plan,
    "ddltool.enforcement": _enforcement,
    "ddltool.goodput": _goodput,
    "ddltool.profile": step_times,
    "ddltool.telemetry": telemetry_times,
    "ddltool.barrier": _barrier,
    "ddltool.simulation": _simulation,
    "ddltool.sweep": _sweep,
    "ddltool.balance": _balance,
    "ddltool.network": _network,
    "ddltool.demo": _training,
    "ddltool.figures": _own,
}
