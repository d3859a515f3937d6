"""The report's sections of measured profiles and fitted throughput models.

A profile has a row for each configuration: device, nodes, replicas, local batch (and accumulation steps) with its median
step time. A *placement* is a number of nodes and of replicas. A throughput model predicts the step time of any
configuration; *goodput* is its samples per second times their statistical efficiency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ddltool.analyzers.answers.reporting.figures import LINES_DRAWN, Bars, Figure, Heat, Line, Lines, line
from ddltool.analyzers.answers.reporting.section import (
    Blocks,
    Column,
    Picture,
    Section,
    Table,
    Verdict,
    how_many_drawn,
    pictured,
    tabled,
    without_empty_columns,
)
from ddltool.analyzers.job.goodput.fit import ASSUMED_ERROR, FitProblem
from ddltool.analyzers.job.goodput.observations import Observations, from_frame
from ddltool.analyzers.job.goodput.throughput import iteration_time_s, log_times
from ddltool.analyzers.job.goodput.tuning import BatchLimits, Frontier, frontier, goodput_grid
from ddltool.arrays import Floats
from ddltool.errors import Infeasible, InputError, listed, shortened, visible
from ddltool.goodput_model import DeviceGoodput, Goodput, ThroughputParams
from ddltool.graph_results import MemoryTimeline
from ddltool.units import counted, show_bytes, show_seconds

if TYPE_CHECKING:
    import pandas as pd

# Placements with a curve of their own in a figure; the measured points of the others would only clutter it.
_CURVES_DRAWN = 5
# Two-sided 90 % of a normal error.
_QUANTILE_90 = 1.645
_HEAT_ROWS = 32  # total batches of a heat map
_DEVICES_SHOWN = 6
# A model this far off (a factor of 1.35 on average) is no model of these rows.
_POOR_RMSLE = 0.3
# Batches over more than this ratio are drawn on a logarithmic axis; with curves, whose ends are crowded, from less on.
_WIDE_RANGE, _WIDE_RANGE_OF_CURVES = 40, 8
# What the heat map spans where no profile says which batches fit.
_DRAWN_REPLICAS, _REPLICAS_PER_NODE = 16, 4
_ASSUMED_LOCAL_BATCH, _ASSUMED_INITIAL_BATCH = 256, 32
# A further GPU pays while it brings this share of what the first does.
_PAYS_SHARE = 0.5


def profile_section(frame: pd.DataFrame, name: str, models: Sequence[tuple[str, Goodput]]) -> Section:
    """Return the section of a checked profile: its measured points, with the curves of a fitted model if one fits it.

    ``models``: pairs (file name, model); the first that has all of the profile's devices is drawn.
    """
    lead = [f"{counted(len(frame), 'measured configuration')} of {listed(sorted(set(frame['device'])), 4)}."]
    for model_name, model in models:
        if fitted_rows := _fitted_rows(frame, model):
            caption = (
                f"Points are measured, lines are {model_name}; nine of ten measured steps should lie in the bands."
            )
            picture = pictured(caption, _profile_table(frame, fitted_rows[1]), *fit_figures(*fitted_rows))
            break
    else:
        lead.append("No fitted model of these devices is among the files, so there are no curves.")
        picture = _measured_points_picture(frame)
    return Section(title=f"Profile: {name}", lead=lead, blocks=[picture], verdict=_profile_verdict(frame))


def memory_picture(device: str, timeline: MemoryTimeline) -> Picture:
    """Return the memory of one process on a device over a forward and backward pass, as stacked areas (GiB over ms).

    The table has the bytes of each part at the moment of most memory, and the part's own maximum.
    """
    time_ms = 1e3 * np.array(timeline.time_s)
    total = np.sum(list(timeline.parts.values()), axis=0)
    peak_index = int(total.argmax())
    lines = [Line(label=part, x=time_ms, y=np.array(sizes) / 2**30) for part, sizes in timeline.parts.items()]
    title = f"Memory over a pass on {device}"
    figure = Lines(lines=lines, xlabel="time of a pass (ms)", ylabel="tensors (GiB)", title=title, draw="areas")
    rows = {**timeline.parts, "all": total.tolist()}
    columns = {"at the peak": lambda sizes: show_bytes(sizes[peak_index]), "most": lambda sizes: show_bytes(max(sizes))}
    table = tabled(f"Tensors on {device}", "predicted", rows.values(), columns, names=("what", rows))
    setting = f"{counted(timeline.num_replicas, 'replica')}, local batch {timeline.local_batch_size}"
    caption = f"What one process holds on {device} ({setting}); the peak is {time_ms[peak_index]:.3g} ms after the pass begins."
    return pictured(caption, table, figure)


def _fitted_rows(
    frame: pd.DataFrame, model: Goodput
) -> tuple[dict[str, Observations], dict[str, ThroughputParams]] | None:
    """Return (rows, parameters) by device; None if the model lacks a device, or the rows are not fit for a model."""
    rows = {}
    params = {}
    try:
        for device, device_rows in frame.groupby("device"):
            params[str(device)] = model.params_of(str(device))
            rows[str(device)] = from_frame(device_rows.reset_index(drop=True), "profile")
    except InputError:
        return None
    return rows, params


def _measured_points_picture(frame: pd.DataFrame) -> Picture:
    """Return the measured step times over the local batch, a line for each placement (device, nodes, replicas)."""
    lines = []
    for (device, nodes, replicas), part in frame.groupby(["device", "num_nodes", "num_replicas"]):
        label = f"{shortened(visible(str(device)), 18)}, {counted(int(str(replicas)), 'replica')}"
        label += "" if nodes == 1 else f" on {nodes} nodes"
        ordered = part.sort_values("local_batch_size").to_dict("records")
        lines.append(line(label, ordered, "local_batch_size", "step_time_s"))
    figure = Lines(
        lines=lines,
        xlabel="local batch size (samples)",
        ylabel="step time",
        title="Measured step times",
        draw="points",
        seconds=True,
        x_axis="log" if frame["local_batch_size"].max() > _WIDE_RANGE * frame["local_batch_size"].min() else "linear",
        whole="x",
    )
    return pictured(
        f"Median step times.{how_many_drawn(LINES_DRAWN, lines, 'placements')}", _profile_table(frame, None), figure
    )


def _profile_table(frame: pd.DataFrame, params: Mapping[str, ThroughputParams] | None) -> Table:
    """Return the table of measured configurations, with fitted steps and their relative errors.

    ``params``: the models' parameters by device; None: the columns of fitted steps are left out.
    """
    columns: dict[str, Column[Mapping[Any, Any]]] = {"device": "device", "nodes": "num_nodes"}
    columns |= {"replicas": "num_replicas", "local batch": "local_batch_size", "step": "step_time_s"}
    columns |= {"spread": "step_time_spread_s", "sync": "sync_time_s", "peak memory": "peak_memory_bytes"}
    if params is not None:

        def fitted_step_s(row: Mapping[Any, Any]) -> float:
            """Return the step time (s) of a row's configuration by the model of its device."""
            steps = row.get("accumulation_steps")
            passes = 0.0 if steps is None or math.isnan(steps) else steps
            setting = (row["num_nodes"], row["num_replicas"], row["local_batch_size"], passes)
            return float(iteration_time_s(params[str(row["device"])], *setting))

        columns["fitted"] = lambda row: show_seconds(fitted_step_s(row))
        columns["error"] = lambda row: f"{fitted_step_s(row) / row['step_time_s'] - 1:+.1%}"
    return without_empty_columns(tabled("Measured configurations", "measured", frame.to_dict("records"), columns))


def goodput_section(
    model: Goodput,
    name: str,
    profile: pd.DataFrame | None = None,
    noise_scale: float | None = None,
    *,
    maps: bool = True,
) -> Section:
    """Return the section of a fitted model: parameters with intervals, errors, and goodput over GPUs and batch.

    ``profile``: a measured one (of any device), whose batches limit the map; None: limits are assumed. ``noise_scale``:
    samples; None: every sample counts the same. ``maps``: whether goodput is drawn.
    """
    lead = [
        f"Fitted to {counted(model.samples, 'row')} of {listed(model.sources, 4)} in {model.fit_seconds:.2f} s: MAPE "
        f"{model.mape:.1%}, RMSLE {model.rmsle:.4f}."
    ]
    if model.rmsle > _POOR_RMSLE:
        lead.append("The model does not describe these rows: check their columns, and whether they are of one job.")
    records: dict[str, Goodput | DeviceGoodput] = dict(model.devices) or {"": model}
    if model.devices:
        lead.append(f"Network {'shared' if model.shared_network else 'of each device'}: {model.network_choice}.")
    if len(records) > _DEVICES_SHOWN:
        lead.append(f"{_DEVICES_SHOWN} of {len(records)} device types are shown.")
    blocks: Blocks = []
    for device, record in list(records.items())[:_DEVICES_SHOWN]:
        lead += _error_sentences(device, record)
        blocks.append(_parameter_picture(device, record))
        heat = _goodput_heat_map(device, record, profile, noise_scale) if maps else None
        if isinstance(heat, str):
            lead.append(heat)
        elif heat is not None:
            blocks.append(heat)
    return Section(title=f"Throughput model: {name}", lead=lead, blocks=blocks, verdict=_goodput_verdict(model))


def _error_sentences(device: str, record: Goodput | DeviceGoodput) -> list[str]:
    """Return sentences on a model's error on the fitted rows (unless too few to mean anything) and on held-out rows.

    ``device``: the model's device type; "": the only one, whose error on the fitted rows the section's lead has already.
    """
    prefix = f"{device}: " if device else ""
    sentences = (
        [f"{prefix}error on the fitted rows MAPE {record.mape:.1%}, RMSLE {record.rmsle:.4f}."] if device else []
    )
    # A parameter that the data do not determine keeps its prior and uses up no row.
    parameter_count = len(type(record.params).model_fields) - len(record.undetermined)
    if record.samples <= parameter_count:
        rows = counted(record.samples, "row")
        sentences.append(
            f"{prefix}{rows} for {parameter_count} parameters: any model fits them, so this error says nothing."
        )
    if record.holdout is not None:
        error = record.holdout
        error_text = f"MAPE {error.mape:.1%}, RMSLE {error.rmsle:.4f} ({counted(error.samples, 'row')})"
        sentences.append(f"{prefix}error on the holdout rows {error_text}.")
    return sentences


def _parameter_picture(device: str, record: Goodput | DeviceGoodput) -> Picture | Table:
    """Return the table of parameters, within a picture of their intervals if any can be drawn.

    Each interval is drawn relative to its fitted value, on a logarithmic axis; one without an upper end is not drawn.
    """
    rows = []
    drawn_rows = []  # (parameter, 1): the fitted value relative to itself
    intervals = []  # of the drawn ones, relative to the fitted value
    for key, value in record.params.model_dump().items():
        format_value = (lambda figure: f"{figure:.3g}") if key == "gamma" else _short_seconds  # gamma is an exponent
        interval = record.intervals.get(key)
        low_text = "-"
        high_text = "-"
        source = "prior: not in the data" if key in record.undetermined else "fitted"
        if interval is not None:
            low_text = format_value(interval.low)
            high_text = "no limit" if interval.high is None else format_value(interval.high)
            if value > 0 and interval.high is not None and not interval.reason and 1e-3 < interval.high / value < 1e4:
                drawn_rows.append((key, 1.0))
                # Cut at 0.01, because an interval down to zero has no end on a logarithmic axis.
                intervals.append((max(interval.low / value, 1e-2), max(interval.high / value, 1e-2)))
            is_outside = value < interval.low or (interval.high is not None and value > interval.high)
            if interval.reason:
                source = interval.reason
            elif is_outside:
                source = f"{source}, outside its interval"
        rows.append((key, format_value(value), low_text, high_text, source))
    device_text = f" of {device}" if device else ""
    header = ("parameter", "value", "low", "high", "from")
    table = Table(caption=f"Parameters{device_text} with 90 % intervals", header=header, rows=rows, label="predicted")
    if not drawn_rows:
        return table
    figure = Bars(
        rows=drawn_rows,
        intervals=intervals,
        xlabel="90 % interval over the fitted value",
        title="Intervals of the fitted parameters",
        level=("fitted", 1.0),
        log=True,
        dots=True,
    )
    caption = f"How surely the rows determine each parameter{device_text}: the shorter, the surer; cut at 0.01."
    undrawn = [row[0] for row in rows if row[0] not in dict(drawn_rows)]
    if undrawn:
        caption += f" Not drawn, for they have no interval or an unlimited one: {', '.join(undrawn)}."
    return pictured(caption, table, figure)


def _short_seconds(seconds: float) -> str:
    """Return a fitted time in a readable unit; "< 1 ns" below a nanosecond, which no clock resolves."""
    return "< 1 ns" if 0 < seconds < 1e-9 else show_seconds(seconds)


def _supported_replicas(device: str, record: Goodput | DeviceGoodput, profile: pd.DataFrame | None) -> tuple[int, str]:
    """Return (the largest number of replicas that data support, the reason in words why no more).

    A model has a figure for any number of replicas; but a kind of synchronisation that was never measured counts as free
    in it, so that its figures mean nothing there. The reason is "" if data support the whole map.

    Args:
        device: the model's device type; "": the only one.
        record: the fitted model, whose undetermined parameters say what was never measured.
        profile: measured rows; None: there are none.
    """
    limits = [(_DRAWN_REPLICAS, "")]  # (replicas, reason); the smallest counts
    if "alpha_sync_node_s" in record.undetermined:
        limits.append((_REPLICAS_PER_NODE, "nothing measured synchronises between nodes, so it is drawn as within one"))
        if "beta_sync_local_s" in record.undetermined:
            limits.append((2, "nothing measured says what further replicas cost, so the model takes them as free"))
        if "alpha_sync_local_s" in record.undetermined:
            limits.append((1, "nothing measured has two replicas, so the model takes synchronisation as free"))
    if profile is not None:
        device_rows = profile[profile["device"] == device] if device in set(profile["device"]) else profile
        multi_node_replicas = device_rows.loc[device_rows["num_nodes"] > 1, "num_replicas"]
        most_replicas = int(device_rows["num_replicas"].max())
        most_across_nodes = int(multi_node_replicas.max()) if len(multi_node_replicas) else 0
        # What was measured on one node says nothing of more replicas than the map has on a node.
        supported = max(1, most_across_nodes, min(most_replicas, _REPLICAS_PER_NODE))
        nodes = counted(int(device_rows["num_nodes"].max()), "node")
        limits.append((supported, f"the largest measured configuration has {most_replicas} on {nodes}"))
    return min(limits, key=lambda limit: limit[0])


def _drawn_params(record: Goodput | DeviceGoodput) -> ThroughputParams:
    """Return the model of a step's time to draw: between nodes that were never measured it is as within one."""
    params = record.params
    if "alpha_sync_node_s" in record.undetermined:
        # Never measured, it would count as free, and goodput would jump up at the second node.
        local_costs = {"alpha_sync_node_s": params.alpha_sync_local_s, "beta_sync_node_s": params.beta_sync_local_s}
        params = params.model_copy(update=local_costs)
    return params


def _drawn_limits(profile: pd.DataFrame | None) -> BatchLimits:
    """Return the batches to draw: the smallest and largest local ones of ``profile``; None: assumed ones."""
    largest_batch = _ASSUMED_LOCAL_BATCH
    initial_batch = _ASSUMED_INITIAL_BATCH
    if profile is not None:
        largest_batch = int(profile["local_batch_size"].max())
        initial_batch = int(profile["local_batch_size"].min())
    return BatchLimits(
        initial_batch_size=initial_batch,
        max_batch_size=largest_batch * _DRAWN_REPLICAS,
        max_local_batch_size=largest_batch,
        max_accumulation_steps=0,
    )


def _goodput_heat_map(
    device: str, record: Goodput | DeviceGoodput, profile: pd.DataFrame | None, noise_scale: float | None
) -> Picture | str:
    """Return the heat map of predicted goodput over replicas and total batch, or a sentence with the reason for none.

    Local batches go up to the largest of ``profile``, None: to an assumed one. ``device``: its type, "" where the record
    names none; ``noise_scale``: samples; None: every sample counts the same, so that goodput is throughput.
    """
    params = _drawn_params(record)
    limits = _drawn_limits(profile)
    noise = math.inf if noise_scale is None else noise_scale
    known_replicas, reason = _supported_replicas(device, record, profile)
    noun = noun_of(device or ("" if profile is None else str(profile["device"].iloc[0])))
    try:
        search = partial(frontier, noise_scale=noise, replicas_per_node=_REPLICAS_PER_NODE, threshold=_PAYS_SHARE)
        full_frontier = search(params, _DRAWN_REPLICAS, limits)  # for the map
        # Only those that data support say until how many scaling pays.
        pays = search(params, known_replicas, limits).pays_until
        figure = goodput_map(params, limits, full_frontier, pays, noise_scale=noise, known=known_replicas, noun=noun)
    except (InputError, Infeasible, ArithmeticError, ValueError) as error:
        return f"No goodput map: {error}."
    device_text = f" of {device}" if device else ""
    weighting = (
        f"at noise scale {noise_scale:,.0f}" if noise_scale is not None else "with every sample counting the same"
    )
    bound = "the largest measured" if profile is not None else "by assumption"
    caption = (
        f"Goodput{device_text} over {noun}s ({_REPLICAS_PER_NODE} per node) and total batch, {weighting}; "
        f"initial batch {limits.initial_batch_size:,}, local batches up to {limits.max_local_batch_size:,} ({bound}). "
        f"{_pays_words(pays, known_replicas, reason, noun)}"
    )
    return pictured(caption, _heat_table(full_frontier, known_replicas, noun), figure)


def _pays_words(pays: int, known_replicas: int, reason: str, noun: str) -> str:
    """Return the sentences on the number of replicas until which scaling pays, and on where the data end.

    "Beyond 4 GPUs (faded) no data support it: the largest measured configuration has 4 on 1 node. As far as that, scaling pays
    until 2." The chart is faded there; data for all of its ``_DRAWN_REPLICAS`` leave one sentence. ``pays``: until how many
    scaling pays; ``known_replicas``: the most that data support; ``reason``: why no more; ``noun``: GPU or replica.
    """
    if known_replicas >= _DRAWN_REPLICAS:
        return f"Scaling pays until {counted(pays, noun)}."
    pays_text = (
        f"As far as that, scaling pays until {pays}."
        if pays < known_replicas
        else "Whether scaling pays beyond is not known."
    )
    return f"Beyond {counted(known_replicas, noun)} (faded) no data support it: {reason}. {pays_text}"


def _heat_table(curve: Frontier, known_replicas: int, noun: str) -> Table:
    """Return the table of the best batch on each number of replicas; ``known_replicas``: the largest that data support."""
    tuned = curve.tuned
    feasible_indexes = np.flatnonzero(curve.tuned.feasible)
    columns: dict[str, Column[int]] = {
        f"{noun}s": lambda index: int(curve.num_replicas[index]),
        "nodes": lambda index: int(curve.num_nodes[index]),
        "local batch": lambda index: f"{tuned.local_batch_size[index]:,}",
        "total batch": lambda index: f"{tuned.total_batch_size[index]:,}",
        "goodput/s": lambda index: f"{tuned.goodput_per_s[index]:,.4g}",
        "speedup": lambda index: f"{curve.speedup[index]:.2f}",
    }
    if known_replicas < _DRAWN_REPLICAS:
        columns["data"] = lambda index: "yes" if curve.num_replicas[index] <= known_replicas else "no"
    return tabled(f"Best batch on each number of {noun}s", "predicted", feasible_indexes.tolist(), columns, head=8)


def fit_figures(devices: Mapping[str, Observations], params: Mapping[str, ThroughputParams]) -> list[Figure]:
    """Return figures of the fitted step time over the local batch with the measured points, one per device type.

    There is a line for each placement (nodes and replicas), at most five of them, with a band in which nine of ten
    measured steps should lie, by the uncertainty of the model and the scatter of the rows. Of more than six types those
    with most rows are drawn. ``devices``: the fitted rows by device; ``params``: the parameters of each.
    """
    names = sorted(devices, key=lambda name: -len(devices[name]))[:_DEVICES_SHOWN]
    return [_fit_figure(name, devices[name], params[name], headed=len(devices) > 1) for name in names]


def noun_of(device: str) -> str:
    """Return the noun for one replica on a device: "GPU"; "replica" on a CPU, and if ``device`` is ""."""
    return "GPU" if device and not device.casefold().startswith("cpu") else "replica"


def _fit_figure(name: str, rows: Observations, params: ThroughputParams, *, headed: bool) -> Lines:
    """Return the figure of one device's fitted step times with the measured ones, a line with its 90 % band per placement.

    ``headed``: whether the device's name is drawn above.
    """
    # Only rows of the most frequent number of accumulation steps: others are on other curves.
    steps, counts = np.unique(rows.accumulation_steps, return_counts=True)
    passes = float(steps[counts.argmax()])
    rows = rows.take(rows.accumulation_steps == passes)
    batches = np.unique(rows.local_batch_size)
    curve_batches = np.geomspace(batches[0], batches[-1], 40) if len(batches) > 1 else batches[:1]
    lines = []
    for nodes, replicas in _placements(rows):
        placement_rows = rows.take((rows.num_nodes == nodes) & (rows.num_replicas == replicas))
        fitted_s = np.asarray(iteration_time_s(params, nodes, replicas, curve_batches, passes))
        # The band is a factor, as errors of step times are relative.
        band_factor = np.exp(_QUANTILE_90 * _log_deviation(rows, params, nodes, replicas, curve_batches, passes))
        noun = f"{noun_of(name)}{'s' if replicas > 1 else ''}"
        label = f"{replicas:.0f} {noun}" + (f" on {nodes:.0f} nodes" if nodes > 1 else "")
        dots = (placement_rows.local_batch_size, placement_rows.step_time_s)
        lines.append(
            Line(
                label=label,
                x=curve_batches,
                y=fitted_s,
                low=fitted_s / band_factor,
                high=fitted_s * band_factor,
                dots=dots,
            )
        )
    extra = f", {passes:.0f} accumulation steps" if passes else ""
    return Lines(
        title=name or "fitted step times over the measured ones",
        headed=headed,
        lines=lines,
        xlabel="local batch size (samples per replica and pass)",
        ylabel=f"step time{extra}",
        seconds=True,
        x_axis="log" if batches[-1] > _WIDE_RANGE_OF_CURVES * batches[0] else "linear",
        log_y=bool(rows.step_time_s.max() > _WIDE_RANGE_OF_CURVES * rows.step_time_s.min()),
    )


def _placements(rows: Observations) -> list[tuple[float, float]]:
    """Return up to five placements as (nodes, replicas), evenly from the fewest replicas to the most."""
    # (2, placements): replicas and nodes, in ascending order of replicas.
    pairs, counts = np.unique(np.stack([rows.num_replicas, rows.num_nodes]), axis=1, return_counts=True)
    # Placements with a single point are left out, unless there is nothing else.
    curve_pairs = pairs[:, counts > 1] if (counts > 1).any() else pairs
    chosen_indices = np.unique(np.linspace(0, curve_pairs.shape[1] - 1, _CURVES_DRAWN).round().astype(int))
    return [(float(curve_pairs[1, index]), float(curve_pairs[0, index])) for index in chosen_indices]


def _log_deviation(
    rows: Observations, params: ThroughputParams, nodes: float, replicas: float, batch: Floats, passes: float
) -> Floats:
    """Return the standard deviation of a measured log step time from the curve, (b,), at each local batch of ``batch``, (b,).

    To first order its variance is the scatter of the rows plus the parameters' covariance along the slopes of the log
    time. ``nodes``, ``replicas`` and ``passes`` are those of the curve.
    """
    problem = FitProblem(rows)
    point = problem.start_from(params)
    _, jacobian = problem.residuals(point)
    variance = max((problem.scatter(point) or ASSUMED_ERROR) ** 2, 1e-12)  # not 0, as it is a divisor
    # Gauss-Newton: the inverse of the information matrix is the parameters' covariance.
    free_parameters = np.flatnonzero(problem.free)
    information = jacobian[:, free_parameters].T @ jacobian[:, free_parameters] * len(rows) / variance
    # The added 1 is a prior: a parameter that the rows do not determine counts as known within a factor of e.
    covariance = np.linalg.inv(information + np.eye(len(free_parameters)))
    ones = np.ones_like(batch)
    *_, all_slopes = log_times(problem.values(point), nodes * ones, replicas * ones, batch, passes)
    slopes = all_slopes[:, free_parameters]  # (b, free parameters)
    model_variance = np.einsum("bi,ij,bj->b", slopes, covariance, slopes)
    deviation: Floats = np.sqrt(variance + model_variance)
    return deviation


def goodput_map(
    params: ThroughputParams,
    limits: BatchLimits,
    found: Frontier,
    pays: int,
    *,
    noise_scale: float,
    known: int,
    noun: str = "GPU",
) -> Heat:
    """Return goodput over (number of GPUs, total batch) as a heat map, with the best batch of each number.

    Args:
        found: the best batches on 1, 2, ... GPUs.
        pays: the number of GPUs until which scaling pays; it is marked.
        noise_scale: samples.
        known: the largest number that measurements support; the map is faded beyond it.
        noun: the word for a replica.
    """
    # Batches far above the best would only shrink the interesting part of the map.
    best = int(found.tuned.total_batch_size[found.tuned.feasible].max())
    largest_drawn = min(limits.max_batch_size, max(4 * best, 2 * limits.initial_batch_size))
    batches = np.geomspace(limits.initial_batch_size, max(largest_drawn, limits.initial_batch_size + 1), _HEAT_ROWS)
    qualifier = "at least " if pays == known < len(found.num_replicas) else ""
    return Heat(
        title=f"Goodput over {noun}s and total batch size",
        x=found.num_replicas.astype(float),
        y=batches,
        values=goodput_grid(params, found.num_nodes, found.num_replicas, batches, limits, noise_scale=noise_scale),
        best=np.where(found.tuned.feasible, found.tuned.total_batch_size, np.nan),
        xlabel=f"{noun}s ({_REPLICAS_PER_NODE} per node)",
        ylabel="total batch size (samples)",
        what="goodput (useful samples/s); line: best batch",
        marks=[(f"scaling pays {qualifier}until {pays}", float(pays))],
        known=known,
    )


def _goodput_verdict(model: Goodput) -> Verdict:
    """Return the verdict on a fitted model: its error on the fitted rows, and on held-out rows."""
    holdout_text = (
        f"{model.holdout.mape:.1%} on rows kept out" if model.holdout is not None else "no rows were kept out"
    )
    answer = f"The model is off by {model.mape:.1%} on its {counted(model.samples, 'row')}."
    return Verdict(answer=answer, sure=holdout_text, then="name it in job.yaml (goodput:) and plan")


def _profile_verdict(frame: pd.DataFrame) -> Verdict:
    """Return the verdict on a profile: the configuration of most samples per second, with the interval of its step."""
    samples_per_s = frame["local_batch_size"] * frame["num_replicas"] / frame["step_time_s"]
    best = frame.iloc[int(samples_per_s.to_numpy().argmax())]
    replicas = counted(int(best["num_replicas"]), "replica")
    certainty = ""
    if "step_time_low_s" in frame.columns and not math.isnan(best["step_time_low_s"]):
        low_text = show_seconds(float(best["step_time_low_s"]))
        high_text = show_seconds(float(best["step_time_high_s"]))
        certainty = f"95 % interval of its step: {low_text} to {high_text}"
    answer = (
        f"Fastest: {samples_per_s.max():,.4g} samples/s, local batch {int(best['local_batch_size'])} on {replicas}."
    )
    return Verdict(answer=answer, sure=certainty, then="ddltool fit makes a throughput model of it")
