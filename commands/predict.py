"""``ddltool predict SOURCE --device NAME``: step time, throughput and memory of training on GPUs that are not here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddltool.commands.options import ChannelsLast, DevicesFile, Json, Output, Precision, SequenceLength, Source

if TYPE_CHECKING:
    from ddltool.analyzers.costs.model import CostModel
    from ddltool.analyzers.costs.predict import PredictedStep, Setting
    from ddltool.analyzers.costs.work import WorkCurve
    from ddltool.device import DeviceTable

# A rate of 90 % of the best predicted one counts as saturated, as for measured profiles.
_SATURATED = 0.9
_LARGEST = 2**31
# Rings reach about this share of what a link carries one way.
_LINK_SHARE = 0.8
_PCIE = 15.75e9


def predict(
    source: Source,
    device: Annotated[str, typer.Option(metavar="NAME,NAME", help="Device types; `ddltool devices` lists them.")],
    batch_sizes: Annotated[
        str, typer.Option(metavar="N,N,...|auto", help="Local batch sizes; auto: 1, 2, 4, ... up to the memory limit.")
    ] = "auto",
    replicas: Annotated[str, typer.Option(metavar="N,N,...", help="Data-parallel replicas.")] = "1",
    gpus_per_node: Annotated[int, typer.Option(help="Replicas of a node.", min=1, max=1024)] = 8,
    precision: Precision = "fp32",
    channels_last: ChannelsLast = False,
    compile_: Annotated[bool, typer.Option("--compile", help="Under torch.compile: pointwise chains fused.")] = False,
    optimizer: Annotated[str, typer.Option(help="none, sgd, momentum, adam or adamw.")] = "adam",
    accumulation: Annotated[int, typer.Option(help="Passes in a step.", min=1, max=1_000_000)] = 1,
    sequence_length: SequenceLength = None,
    bandwidth: Annotated[str, typer.Option(help="Network between nodes.")] = "10Gbit",
    latency: Annotated[str, typer.Option(help="Its latency.")] = "50us",
    local_bandwidth: Annotated[
        str, typer.Option(help="Link between the GPUs of a node; 80 % of the device's own by default.")
    ] = "",
    local_latency: Annotated[str, typer.Option(help="Its latency.")] = "10us",
    devices_file: DevicesFile = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Predict training steps on devices that are not here, each with the range in which 80 % of measurements fall."""
    from ddltool.analyzers.costs.model import cost_model
    from ddltool.analyzers.costs.predict import Link, Placement, Setting
    from ddltool.analyzers.loading.sources import work_of
    from ddltool.analyzers.tracing.dialect import Numerics
    from ddltool.artifacts import check_writable
    from ddltool.commands import values
    from ddltool.commands.output import note, print_json, progress
    from ddltool.errors import InputError
    from ddltool.fixtures.loading import calibration, known_devices
    from ddltool.profile import write_profile
    from ddltool.units import parse_bandwidth, parse_duration

    if output is not None:
        check_writable(output)
    sizes = None if batch_sizes == "auto" else values.integers(batch_sizes, "--batch-sizes", ordered=False)
    counts = values.integers(replicas, "--replicas")
    for option, numbers in (("--batch-sizes", sizes or (1,)), ("--replicas", counts)):
        if max(numbers) > _LARGEST:
            raise InputError(option, f"{max(numbers)} is out of range", f"write whole numbers from 1 to {_LARGEST}")
    places = [Placement(num_nodes=math.ceil(count / gpus_per_node), num_replicas=count) for count in counts]
    table = known_devices(devices_file)
    models = [cost_model(found, calibration()) for found in _devices(device, table)]
    numerics = Numerics(precision, channels_last)  # type: ignore[arg-type]  # Numerics checks it
    local = parse_bandwidth(local_bandwidth, "--local-bandwidth") if local_bandwidth else None
    network = Link(bandwidth_bytes_per_s=parse_bandwidth(bandwidth), latency_s=parse_duration(latency))
    inside_s = parse_duration(local_latency, "--local-latency")

    def setting(model: CostModel) -> Setting:
        rate = local or _LINK_SHARE * (model.device.link_bytes_per_s or _PCIE / _LINK_SHARE)
        link = Link(bandwidth_bytes_per_s=rate, latency_s=inside_s)
        return Setting(local=link, network=network, optimizer=optimizer, accumulation=accumulation, compile=compile_)

    settings = {model.device.name: setting(model) for model in models}
    with progress(f"tracing {source}"):
        curve = work_of(source, numerics, sequence_length)
    if remark := curve.traced.graph.meta.get("note"):
        note(f"note: {remark}")
    found = {
        model.device.name: _predict_on(curve, model, settings[model.device.name], sizes, places) for model in models
    }
    document = _document(source, models, settings, found, curve)
    if output is not None:
        write_profile(_frame(document), output)
    if as_json:
        print_json(document)
    else:
        _show(document, output)


def _devices(names: str, table: DeviceTable) -> list[Any]:
    """Return the devices of ``A100,L4``, each once. Raises InputError for an unknown one, and for a CPU."""
    from ddltool.errors import InputError

    found = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        device = table.device(name)
        if device.architecture == "CPU" or device.name.startswith("cpu"):
            raise InputError("--device", f"{device.name} is no GPU", "measure a CPU instead: ddltool profile SOURCE")
        found[device.name] = device
    if not found:
        raise InputError("--device", "names no device", "give one or more, such as A100,L4")
    return list(found.values())


def _predict_on(
    curve: WorkCurve, model: CostModel, setting: Setting, sizes: tuple[int, ...] | None, places: list[Any]
) -> list[PredictedStep]:
    """Return the rows of one device; without sizes those that fit. Raises Infeasible when then none does."""
    from ddltool.analyzers.costs.predict import memory_limit_batch, predict
    from ddltool.errors import Infeasible

    if sizes is None:
        most = max(place.num_replicas for place in places)
        limit = memory_limit_batch(curve, model.device, setting.optimizer, most)
        if limit < 1:
            raise Infeasible(
                f"one sample does not fit the {model.device.memory_gib:g} GiB of a {model.device.name}, by estimate; "
                "give --batch-sizes to see its time all the same"
            )
        sizes = tuple(2**power for power in range(limit.bit_length()))
    return predict(curve, model, setting, sizes, places)


def _document(
    source: str,
    models: list[CostModel],
    settings: dict[str, Setting],
    found: dict[str, list[PredictedStep]],
    curve: WorkCurve,
) -> dict[str, Any]:
    """Return the JSON document: rows as in profile.csv and more, what was assumed, and how sure it is."""
    meta = curve.traced.graph.meta
    rows, about = [], {}
    for model in models:
        name, setting = model.device.name, settings[model.device.name]
        steps = found[name]
        alone = [step for step in steps if step.num_replicas == steps[0].num_replicas]
        best = max(step.samples_per_s for step in alone)
        about[name] = {
            "saturation_batch": min(s.local_batch_size for s in alone if s.samples_per_s >= _SATURATED * best),
            "memory_limit_batch": max((s.local_batch_size for s in alone if s.fits), default=0),
            "price_per_hour": model.device.price_per_hour,
            "error": model.residuals.model_dump(),
            "link_bytes_per_s": setting.local.bandwidth_bytes_per_s,
        }
        rows += [_row(model, setting, step, source) for step in steps]
    first = next(iter(settings.values()))
    return {
        "kind": "ddltool.profile",
        "schema_version": 1,
        "predicted": True,
        "rows": rows,
        "devices": about,
        "assumptions": {
            "precision": meta.get("precision"),
            "channels_last": meta.get("channels_last"),
            "compile": first.compile,
            "optimizer": first.optimizer,
            "accumulation": first.accumulation,
            "sequence_length": meta.get("tokens_per_sample"),
            "bandwidth_bytes_per_s": first.network.bandwidth_bytes_per_s,
        },
    }


def _row(model: CostModel, setting: Setting, step: PredictedStep, source: str) -> dict[str, Any]:
    cost = None
    if model.device.price_per_hour is not None:
        cost = model.device.price_per_hour * step.num_replicas / 3600 / step.samples_per_s * 1e6
    return {
        "device": model.device.name,
        "num_nodes": step.num_nodes,
        "num_replicas": step.num_replicas,
        "local_batch_size": step.local_batch_size,
        "step_time_s": step.step.value,
        "predicted_low_s": step.step.low,
        "predicted_high_s": step.step.high,
        "sync_time_s": step.sync_time_s,
        "peak_memory_bytes": round(step.peak_memory_bytes),
        "fits": step.fits,
        "samples_per_s": step.samples_per_s,
        "tokens_per_s": step.tokens_per_s,
        "mfu": step.mfu,
        "host_bound": step.host_bound,
        "price_per_million_samples": cost,
        "accumulation_steps": setting.accumulation - 1,
        "source": source,
        "origin": "predicted",
    }


def _frame(document: dict[str, Any]) -> Any:
    """Return the rows as a profile: what is not known there is left out."""
    import pandas as pd

    given = document["assumptions"]
    layout = ", channels_last" if given["channels_last"] else ""
    compiled = ", compiled" if given["compile"] else ""
    settings = f"predicted, {given['precision']}{layout}{compiled}, optimizer {given['optimizer']}"
    return pd.DataFrame([{**row, "settings": settings} for row in document["rows"]]).dropna(axis="columns", how="all")


def _show(document: dict[str, Any], output: Path | None) -> None:
    """Print the answer, the rows, and how sure they are."""
    from ddltool.commands.output import out, table
    from ddltool.units import show_bytes, show_seconds

    rows, console = document["rows"], out()
    several = len(document["devices"]) > 1
    if several:
        rows = sorted(rows, key=lambda row: -row["samples_per_s"])
    best = max((row for row in rows if row["fits"]), key=lambda row: row["samples_per_s"], default=None)
    if best is not None:
        rate = f"{best['samples_per_s']:.4g} samples/s"
        rate += f", {best['tokens_per_s']:.4g} tokens/s" if best["tokens_per_s"] else ""
        where = f"{best['num_replicas']} x {best['device']}" if best["num_replicas"] > 1 else best["device"]
        console.print(
            f"Fastest here: {rate} on {where} at local batch {best['local_batch_size']} (MFU {best['mfu']:.0%}), predicted.",
            soft_wrap=True,
        )
    priced = any(row["price_per_million_samples"] is not None for row in rows)
    columns = ["device", "replicas", "batch", "step", "80 % range", "per s", "MFU", "sync", "memory"]
    cells = []
    for row in rows:
        span = f"{show_seconds(row['predicted_low_s'])}..{show_seconds(row['predicted_high_s'])}"
        cells.append(
            [
                row["device"],
                str(row["num_replicas"]),
                str(row["local_batch_size"]),
                show_seconds(row["step_time_s"]),
                span,
                f"{row['samples_per_s']:.4g}",
                f"{row['mfu']:.0%}",
                show_seconds(row["sync_time_s"]) if row["num_replicas"] > 1 else "-",
                show_bytes(row["peak_memory_bytes"]) + ("" if row["fits"] else " !"),
            ]
        )
    if not several:  # the title names it
        columns, cells = columns[1:], [cell[1:] for cell in cells]
    if all(row["num_replicas"] == 1 for row in rows):
        place = columns.index("sync")
        columns, cells = _without(columns, place), [_without(cell, place) for cell in cells]
        place = columns.index("replicas")
        columns, cells = _without(columns, place), [_without(cell, place) for cell in cells]
    if priced:
        columns.append("per 1M")
        costs = (row["price_per_million_samples"] for row in rows)
        for cell, cost in zip(cells, costs, strict=True):
            cell.append("-" if cost is None else f"{cost:.3g}")
    names = ", ".join(document["devices"])
    console.print(table(f"Training steps on {names} (predicted, not measured)", columns, cells))
    for line in _remarks(document):
        console.print(line, soft_wrap=True)
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)


def _without(items: list[str], place: int) -> list[str]:
    return items[:place] + items[place + 1 :]


def _remarks(document: dict[str, Any]) -> list[str]:
    """Return what was assumed, what does not fit, what waits for the host, and how far off such predictions were."""
    given = document["assumptions"]
    words = [str(given["precision"]), "channels_last" if given["channels_last"] else "channels_first"]
    words += ["compiled" if given["compile"] else "eager", f"optimizer {given['optimizer']}"]
    words += [f"{given['accumulation']} passes a step"] if given["accumulation"] > 1 else []
    words += [f"{given['sequence_length']} tokens a sample"] if given["sequence_length"] else []
    lines = [f"Assumed: {', '.join(words)}."]
    if any(not row["fits"] for row in document["rows"]):
        lines.append("! needs more memory than the device has, by estimate.")
    if any(row["host_bound"] for row in document["rows"]):
        sizes = sorted({row["local_batch_size"] for row in document["rows"] if row["host_bound"]})
        lines.append(
            f"Host-bound at batch {', '.join(map(str, sizes))}: the GPU waits for Python; --compile or a larger batch helps."
        )
    for name, about in document["devices"].items():
        error = about["error"]
        lines.append(
            f"How sure on {name}: {error['what']}, measured / predicted lay between {error['low']:.2f} and {error['high']:.2f} "
            f"in 80 % of {error['rows']} rows (median error {error['median_error']:.0%})."
        )
    return lines
