"""The report's sections of measured profiles and fitted throughput models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddltool.analyzers.goodput.observations import Observations, from_frame
from ddltool.analyzers.goodput.throughput import iteration_time_s
from ddltool.analyzers.goodput.tuning import BatchLimits, Frontier, frontier
from ddltool.analyzers.reporting.charts import LINES_DRAWN, Line, draw_intervals, draw_lines
from ddltool.analyzers.reporting.section import Picture, Section, Table, counted, few, filled, listed, shortened
from ddltool.analyzers.reporting.style import at_both_widths
from ddltool.errors import Infeasible, InputError, visible
from ddltool.goodput_model import DeviceGoodput, Goodput, ThroughputParams
from ddltool.units import show_bytes, show_seconds

if TYPE_CHECKING:
    import pandas as pd

_DEVICES_SHOWN = 6
# A model this far off (a factor of 1.35 on average) is no model of these rows.
_POOR_RMSLE = 0.3
_WORTH_MEASURING = 0.01
# Batches over more than this are drawn on a logarithmic axis.
_WIDE_RANGE = 40
# What the heat map spans where no profile says which batches fit.
_REPLICAS, _REPLICAS_PER_NODE = 16, 4
_LOCAL_BATCH = 256


def profile_section(frame: pd.DataFrame, name: str, models: Sequence[tuple[str, Goodput]]) -> Section:
    """Return the section of a checked profile; the fitted curves of the first of ``models`` that knows its devices.

    ``models`` are (file name, model). Without one the measured points stand alone.
    """
    table = _profile_table(frame, None)
    lead = [f"{counted(len(frame), 'measured configuration')} of {listed(sorted(set(frame['device'])), 4)}."]
    for model_name, fitted in models:
        drawn = _fitted(frame, fitted)
        if drawn is None:
            continue
        rows, params = drawn
        draw = _curves(
            {shortened(visible(key), 40): value for key, value in rows.items()},
            {shortened(visible(key), 40): value for key, value in params.items()},
        )
        caption = f"Points are measured, lines are {model_name}; nine of ten measured steps should lie in the bands."
        table = _profile_table(frame, params)
        picture = Picture(draw=draw, caption=caption, label="measured", table=table)
        return Section(title=f"Profile: {name}", lead=lead, blocks=[picture])
    lead.append("No fitted model of these devices is among the files, so there are no curves.")
    draw, caption = _points(frame)
    picture = Picture(draw=draw, caption=caption, label="measured", table=table)
    return Section(title=f"Profile: {name}", lead=lead, blocks=[picture])


@at_both_widths
def _curves(rows: Mapping[str, Observations], params: Mapping[str, ThroughputParams]) -> str:
    from ddltool.analyzers.goodput.picture import fit_picture  # it loads matplotlib

    return fit_picture(rows, params).decode()


def _fitted(frame: pd.DataFrame, fitted: Goodput) -> tuple[dict[str, Observations], dict[str, ThroughputParams]] | None:
    """Return rows and models by device; None where the model lacks a device, or cannot draw these rows."""
    rows, params = {}, {}
    try:
        for device, part in frame.groupby("device"):
            params[str(device)] = fitted.params_of(str(device))
            rows[str(device)] = from_frame(part.reset_index(drop=True), "profile")
    except InputError:
        return None
    return rows, params


def _points(frame: pd.DataFrame) -> tuple[Callable[[], str], str]:
    """Return the measured points of each placement, and a remark where not all are drawn."""
    lines = []
    for (device, nodes, replicas), part in frame.groupby(["device", "num_nodes", "num_replicas"]):
        ordered = part.sort_values("local_batch_size")
        batch = ordered["local_batch_size"].to_numpy(dtype=float)
        label = f"{shortened(visible(str(device)), 18)}, {counted(int(str(replicas)), 'replica')}" + (
            "" if nodes == 1 else f" on {nodes} nodes"
        )
        lines.append(Line(label=label, x=batch, y=ordered["step_time_s"].to_numpy(dtype=float)))
    some = f" The first {LINES_DRAWN} of {len(lines)} placements are drawn." if len(lines) > LINES_DRAWN else ""
    draw = draw_lines(
        lines,
        xlabel="local batch size (samples)",
        ylabel="step time",
        title="Measured step times",
        draw="points",
        seconds=True,
        log_x=bool(frame["local_batch_size"].max() > _WIDE_RANGE * frame["local_batch_size"].min()),
        whole="x",
    )
    return draw, f"Median step times.{some}"


def _profile_table(frame: pd.DataFrame, params: Mapping[str, ThroughputParams] | None) -> Table:
    header = ["device", "nodes", "replicas", "local batch", "step", "spread", "sync", "peak memory"]
    rows = []
    for row in frame.to_dict("records"):
        cells = [
            str(row["device"]),
            *(f"{row[name]:,}" for name in ("num_nodes", "num_replicas", "local_batch_size")),
            *(show_seconds(_optional(row, key)) for key in ("step_time_s", "step_time_spread_s", "sync_time_s")),
            show_bytes(_optional(row, "peak_memory_bytes")),
        ]
        if params is not None:
            steps = _optional(row, "accumulation_steps") or 0.0
            where = (row["num_nodes"], row["num_replicas"], row["local_batch_size"], steps)
            predicted = float(iteration_time_s(params[str(row["device"])], *where))
            cells += [show_seconds(predicted), f"{predicted / row['step_time_s'] - 1:+.1%}"]
        rows.append(cells)
    if params is not None:
        header += ["fitted", "error"]
    return filled(Table(caption="Measured configurations", header=header, rows=rows, label="measured"))


def _optional(row: Mapping[Any, Any], name: str) -> float | None:
    value = row.get(name)
    return None if value is None or (isinstance(value, float) and math.isnan(value)) else float(value)


def goodput_section(
    fitted: Goodput,
    name: str,
    profile: pd.DataFrame | None = None,
    noise_scale: float | None = None,
    *,
    maps: bool = True,
) -> Section:
    """Return the section of a fitted model: parameters with intervals, errors, and with ``maps`` goodput over GPUs and batch.

    ``profile`` (of any device) gives the largest batch that is known to fit; ``noise_scale`` None: every sample counts
    the same.
    """
    lead = [
        f"Fitted to {counted(fitted.samples, 'row')} of {listed(fitted.sources, 4)} in {fitted.fit_seconds:.2f} s: MAPE "
        f"{fitted.mape:.1%}, RMSLE {fitted.rmsle:.4f}."
    ]
    if fitted.rmsle > _POOR_RMSLE:
        lead.append("The model does not describe these rows: check their columns, and whether they are of one job.")
    lead += _left_out(fitted)
    following = fitted.next_measurement
    if following is not None and following.variance_reduction >= _WORTH_MEASURING:
        lead.append(
            f"Measure next: {counted(following.num_replicas, 'replica')} on {counted(following.num_nodes, 'node')} "
            f"at local batch {following.local_batch_size} (removes {following.variance_reduction:.0%} "
            "of the predictions' variance)."
        )
    records: dict[str, Goodput | DeviceGoodput] = dict(fitted.devices) or {"": fitted}
    if fitted.devices:
        lead.append(f"Network {'shared' if fitted.shared_network else 'of each device'}: {fitted.network_choice}.")
    if len(records) > _DEVICES_SHOWN:
        lead.append(f"{_DEVICES_SHOWN} of {len(records)} device types are shown.")
    blocks: list[Picture | Table] = []
    for device, record in list(records.items())[:_DEVICES_SHOWN]:
        lead += _errors(device, record)
        blocks.append(_parameters(device, record))
        heat = _heat(device, record, profile, noise_scale) if maps else ""
        if isinstance(heat, Picture):
            blocks.append(heat)
        elif heat:
            lead.append(heat)
    return Section(title=f"Throughput model: {name}", lead=lead, blocks=blocks)


def _left_out(fitted: Goodput) -> list[str]:
    """Return the rows that the fit left out, several times off what all others say, the first few of many."""
    said = []
    for item in fitted.left_out:
        place = f"{item.source}:row {item.row}" if item.row else item.source
        where = f"{counted(item.num_replicas, 'replica')} on {counted(item.num_nodes, 'node')}"
        times = f"{show_seconds(item.step_time_s)}, expected {show_seconds(item.expected_s)}"
        said.append(f"Left out: {place} ({where}, batch {item.local_batch_size}): {times}.")
    return few(said, 5)


def _errors(device: str, record: Goodput | DeviceGoodput) -> list[str]:
    """Return the error on the fitted rows of one device among several, on those kept out, and whether it says anything."""
    of = f"{device}: " if device else ""
    said = [f"{of}error on the fitted rows MAPE {record.mape:.1%}, RMSLE {record.rmsle:.4f}."] if device else []
    free = len(type(record.params).model_fields) - len(record.undetermined)
    if record.samples <= free:
        rows = counted(record.samples, "row")
        said.append(f"{of}{rows} for {free} parameters: any model fits them, so this error says nothing.")
    if record.holdout is not None:
        error = record.holdout
        figures = f"MAPE {error.mape:.1%}, RMSLE {error.rmsle:.4f} ({counted(error.samples, 'row')})"
        said.append(f"{of}error on the holdout rows {figures}.")
    return said


def _parameters(device: str, record: Goodput | DeviceGoodput) -> Picture | Table:
    """Return the parameters as a table, under a picture of their intervals where there are any."""
    rows, drawn = [], []
    for key, value in record.params.model_dump().items():
        shown = (lambda one: f"{one:.3g}") if key == "gamma" else _short_seconds
        interval = record.intervals.get(key)
        low = high = "-"
        source = "prior: not in the data" if key in record.undetermined else "fitted"
        if interval is not None:
            low, high = shown(interval.low), "no limit" if interval.high is None else shown(interval.high)
            if value > 0 and interval.high is not None and not interval.reason and 1e-3 < interval.high / value < 1e4:
                floor = 1e-2  # an interval down to zero has no end on a logarithmic axis
                drawn.append((key, 1.0, max(interval.low / value, floor), max(interval.high / value, floor)))
            outside = value < interval.low or (interval.high is not None and value > interval.high)
            source = interval.reason or (f"{source}, outside its interval" if outside else source)
        rows.append((key, shown(value), low, high, source))
    of = f" of {device}" if device else ""
    table = Table(
        caption=f"Parameters{of} with 90 % intervals",
        header=("parameter", "value", "low", "high", "from"),
        rows=rows,
        label="predicted",
    )
    if not drawn:
        return table
    draw = draw_intervals(
        drawn, xlabel="90 % interval over the fitted value", title="Intervals of the fitted parameters"
    )
    caption = f"How surely the rows determine each parameter{of}: the shorter, the surer; cut at 0.01."
    missing = [row[0] for row in rows if row[0] not in {name for name, *_ in drawn}]
    if missing:
        caption += f" Not drawn, for they have no interval or an unlimited one: {', '.join(missing)}."
    return Picture(draw=draw, caption=caption, label="predicted", table=table)


def _short_seconds(seconds: float) -> str:
    """Return a fitted time; below what any clock tells apart the digits would only take the eye."""
    return "< 1 ns" if 0 < seconds < 1e-9 else show_seconds(seconds)


def _known_until(device: str, record: Goodput | DeviceGoodput, profile: pd.DataFrame | None) -> tuple[int, str]:
    """Return up to how many replicas of the map there are data, and in words why not beyond.

    A model says something of every number; where nobody measured any synchronisation, it takes that as free.
    """
    limits = [(_REPLICAS, "")]
    if "alpha_sync_node_s" in record.undetermined:
        limits.append((_REPLICAS_PER_NODE, "nothing measured synchronises between nodes, so it is drawn as within one"))
        if "beta_sync_local_s" in record.undetermined:
            limits.append((2, "nothing measured says what further replicas cost, so the model takes them as free"))
        if "alpha_sync_local_s" in record.undetermined:
            limits.append((1, "nothing measured has two replicas, so the model takes synchronisation as free"))
    if profile is not None:
        own = profile[profile["device"] == device] if device in set(profile["device"]) else profile
        replicas, nodes = own["num_replicas"], own["num_nodes"]
        spread, together = int(replicas[nodes > 1].max() or 0) if (nodes > 1).any() else 0, int(replicas.max())
        if spread < _REPLICAS:
            most = max(spread, min(together, _REPLICAS_PER_NODE))
            limits.append(
                (
                    max(1, most),
                    f"the largest measured configuration has {together} on {counted(int(nodes.max()), 'node')}",
                )
            )
    return min(limits, key=lambda limit: limit[0])


def _heat(
    device: str, record: Goodput | DeviceGoodput, profile: pd.DataFrame | None, noise_scale: float | None
) -> Picture | str:
    """Return goodput over replicas and batch, or in words why there is none."""
    params = record.params
    if (
        "alpha_sync_node_s" in record.undetermined
    ):  # never seen, it would be free: the map would jump up at a second node
        within = {"alpha_sync_node_s": params.alpha_sync_local_s, "beta_sync_node_s": params.beta_sync_local_s}
        params = params.model_copy(update=within)
    most, first = _LOCAL_BATCH, 32
    name = device
    if profile is not None:
        most = int(profile["local_batch_size"].max())
        first = int(profile["local_batch_size"].min())
        name = device or str(profile["device"].iloc[0])
    limits = BatchLimits(
        initial_batch_size=first, max_batch_size=most * _REPLICAS, max_local_batch_size=most, max_accumulation_steps=0
    )
    noise = math.inf if noise_scale is None else noise_scale
    known, why = _known_until(device, record, profile)
    from ddltool.analyzers.goodput.picture import noun_of

    noun = noun_of(name)
    try:
        found = frontier(params, _REPLICAS, limits, noise_scale=noise, replicas_per_node=_REPLICAS_PER_NODE)
        pays = frontier(params, known, limits, noise_scale=noise, replicas_per_node=_REPLICAS_PER_NODE).pays_until
        draw = _map(params, limits, noise, known, noun)
    except (InputError, Infeasible, ArithmeticError, ValueError) as error:
        return f"No goodput map: {error}."
    of = f" of {device}" if device else ""
    sort = f"at noise scale {noise_scale:,.0f}" if noise_scale is not None else "with every sample counting the same"
    bound = "the largest measured" if profile is not None else "by assumption"
    caption = (
        f"Goodput{of} over {noun}s ({_REPLICAS_PER_NODE} per node) and total batch, {sort}; initial batch {first:,}, local "
        f"batches up to {most:,} ({bound}). {_pays_words(pays, known, why, noun)}"
    )
    return Picture(draw=draw, caption=caption, label="predicted", table=_heat_table(found, known, noun))


@at_both_widths
def _map(params: ThroughputParams, limits: BatchLimits, noise_scale: float, known: int, noun: str) -> str:
    from ddltool.analyzers.goodput.picture import goodput_picture

    return goodput_picture(
        params,
        _REPLICAS,
        limits,
        noise_scale=noise_scale,
        replicas_per_node=_REPLICAS_PER_NODE,
        known=known,
        noun=noun,
    ).decode()


def _pays_words(pays: int, known: int, why: str, noun: str) -> str:
    """Return until where scaling pays, as far as there are data, and where these end."""
    if known >= _REPLICAS:
        return f"Scaling pays until {counted(pays, noun)}."
    until = (
        f"As far as that, scaling pays until {pays}." if pays < known else "Whether scaling pays beyond is not known."
    )
    return f"Beyond {counted(known, noun)} (hatched, dashed) no data support it: {why}. {until}"


def _heat_table(found: Frontier, known: int, noun: str) -> Table:
    rows = [
        (
            str(found.num_replicas[at]),
            str(found.num_nodes[at]),
            f"{found.tuned.local_batch_size[at]:,}",
            f"{found.tuned.total_batch_size[at]:,}",
            f"{found.tuned.goodput_per_s[at]:,.4g}",
            f"{found.speedup[at]:.2f}",
            *([] if known >= _REPLICAS else ["yes" if found.num_replicas[at] <= known else "no"]),
        )
        for at in range(len(found.num_replicas))
        if found.tuned.feasible[at]
    ]
    header = [f"{noun}s", "nodes", "local batch", "total batch", "goodput/s", "speedup"]
    return Table(
        caption=f"Best batch on each number of {noun}s",
        header=header if known >= _REPLICAS else [*header, "data"],
        rows=rows,
        label="predicted",
        head=8,
    )
