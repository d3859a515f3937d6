"""``ddltool predict SOURCE --device NAME``: step time, throughput and memory of training on GPUs that are not here."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddltool.commands.options import ChannelsLast, DevicesFile, Json, Output, Precision, SequenceLength

if TYPE_CHECKING:
    from ddltool.analyzers.costs.model import CostModel
    from ddltool.analyzers.costs.predict import PredictedStep, Setting
    from ddltool.analyzers.costs.work import WorkCurve
    from ddltool.device import DeviceTable

# A rate of 90 % of the best predicted one counts as saturated, as for measured profiles.
_SATURATED = 0.9
_LARGEST = 2**31
# Rings reach about this share of what a datasheet says that a link carries one way; a measured link is what they reach.
_LINK_SHARE = 0.8
# An unknown link counts as PCIe 3.0 x16.
_PCIE = 15.75e9
# Names of more devices than these are counted.
_NAMED = 6


def predict(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="package.module:factory, file.py:factory, zoo:NAME, transformers:NAME or timm:NAME.",
            show_default=False,
        ),
    ],
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
    from ddltool.device import MEASURED
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
        own = model.device.link_bytes_per_s or _PCIE
        rate = local or (own if model.device.link.startswith(MEASURED) else _LINK_SHARE * own)
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
    document = _document(source, models, settings, found, curve, gpus_per_node)
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
        device = table.gpu(name)
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
        every = tuple(2**power for power in range(limit.bit_length()))
        sizes = tuple(size for size in every if curve.runs_at(size)) or every
    return predict(curve, model, setting, sizes, places)


def _document(
    source: str,
    models: list[CostModel],
    settings: dict[str, Setting],
    found: dict[str, list[PredictedStep]],
    curve: WorkCurve,
    gpus_per_node: int,
) -> dict[str, Any]:
    """Return the JSON document: rows as in profile.csv and more, what was assumed, and how sure it is."""
    from ddltool.analyzers.costs.predict import has_precision, memory_limit_batch

    meta = curve.traced.graph.meta
    rows, about = [], {}
    for model in models:
        name, setting = model.device.name, settings[model.device.name]
        steps = found[name]
        alone = [step for step in steps if step.num_replicas == steps[0].num_replicas and step.fits]
        best = max((step.samples_per_s for step in alone), default=0.0)
        wide = [step.local_batch_size for step in alone if step.samples_per_s >= _SATURATED * best]
        about[name] = {
            "saturation_batch": min(wide, default=None),
            "memory_limit_batch": memory_limit_batch(curve, model.device, setting.optimizer, steps[0].num_replicas),
            "has_precision": has_precision(model.device, str(meta.get("precision"))),
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
            "gpus_per_node": gpus_per_node,
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
    from ddltool.units import show_bytes, show_rate, show_seconds, show_span

    rows, console = document["rows"], out()
    several = len(document["devices"]) > 1
    if several:
        rows = sorted(rows, key=lambda row: -row["samples_per_s"])
    console.print(_answer(document), soft_wrap=True)
    replicated = any(row["num_replicas"] > 1 for row in rows)
    priced = any(row["price_per_million_samples"] is not None for row in rows)
    columns: list[tuple[str, bool, Callable[[dict[str, Any]], str]]] = [
        ("device", several, lambda row: row["device"]),  # else the title names it
        ("replicas", replicated, lambda row: str(row["num_replicas"])),
        ("batch", True, lambda row: str(row["local_batch_size"])),
        ("step", True, lambda row: show_seconds(row["step_time_s"])),
        ("80 % range", True, lambda row: show_span(row["predicted_low_s"], row["predicted_high_s"])),
        ("per s", True, lambda row: show_rate(row["samples_per_s"])),
        ("MFU", True, lambda row: f"{row['mfu']:.0%}"),
        ("sync", replicated, lambda row: show_seconds(row["sync_time_s"]) if row["num_replicas"] > 1 else "-"),
        ("memory", True, lambda row: show_bytes(row["peak_memory_bytes"]) + ("" if row["fits"] else " !")),
        (
            "per 1M",
            priced,
            lambda row: "-" if (cost := row["price_per_million_samples"]) is None else f"{cost:.3g}",
        ),
    ]
    shown = [(name, text) for name, kept, text in columns if kept]
    names = (
        ", ".join(document["devices"]) if len(document["devices"]) <= _NAMED else f"{len(document['devices'])} devices"
    )
    title = f"Training steps on {names} (predicted, not measured)"
    console.print(table(title, [name for name, _ in shown], [[text(row) for _, text in shown] for row in rows]))
    for line in _remarks(document):
        console.print(line)
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)


def _answer(document: dict[str, Any]) -> str:
    """Return the first line: the fastest row that fits, or what would."""
    from ddltool.units import show_rate

    best = max((row for row in document["rows"] if row["fits"]), key=lambda row: row["samples_per_s"], default=None)
    if best is None:
        most = {name: about["memory_limit_batch"] for name, about in document["devices"].items()}
        fitting = ", ".join(f"{batch} on {name}" for name, batch in most.items() if batch)
        return "None of these fits, by estimate; " + (
            f"at most: {fitting}." if fitting else "one sample does not either."
        )
    rate = f"{show_rate(best['samples_per_s'])} samples/s"
    rate += f", {show_rate(best['tokens_per_s'])} tokens/s" if best["tokens_per_s"] else ""
    where = f"{best['num_replicas']} x {best['device']}" if best["num_replicas"] > 1 else best["device"]
    return (
        f"Fastest here: {rate} on {where} at local batch {best['local_batch_size']} (MFU {best['mfu']:.0%}), predicted."
    )


def _remarks(document: dict[str, Any]) -> list[str]:
    """Return what was assumed, what does not fit, what waits for the host, and how far off such predictions were."""
    from ddltool.units import show_bytes

    given, rows = document["assumptions"], document["rows"]
    words = [str(given["precision"]), *(["channels_last"] if given["channels_last"] else [])]
    words += ["compiled" if given["compile"] else "eager", f"optimizer {given['optimizer']}"]
    words += [f"{given['accumulation']} passes a step"] if given["accumulation"] > 1 else []
    words += [f"{given['sequence_length']} tokens a sample"] if given["sequence_length"] else []
    if any(row["num_replicas"] > 1 for row in rows):
        words.append(f"up to {given['gpus_per_node']} GPUs a node")
        if any(row["num_nodes"] > 1 for row in rows):
            words.append(f"{show_bytes(given['bandwidth_bytes_per_s'])}/s between nodes")
    lines = [f"Assumed: {', '.join(words)}."]
    if any(not row["fits"] for row in rows):
        lines.append("! needs more memory than the device has, by estimate.")
    if lacking := [name for name, about in document["devices"].items() if not about["has_precision"]]:
        lines.append(f"{', '.join(lacking)}: no rate for {given['precision']} in the datasheet; float32's is taken.")
    waiting: dict[str, set[int]] = {}
    for row in rows:
        if row["host_bound"]:
            waiting.setdefault(row["device"], set()).add(row["local_batch_size"])
    if waiting:
        where = "; ".join(f"{name} at batch {', '.join(map(str, sorted(sizes)))}" for name, sizes in waiting.items())
        helps = "a larger batch helps" if given["compile"] else "--compile or a larger batch helps"
        lines.append(f"Host-bound, the GPU waits for Python: {where}; {helps}.")
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, about in document["devices"].items():
        alike.setdefault(tuple(about["error"].values()), []).append(name)
    for names in alike.values():
        error = document["devices"][names[0]]["error"]
        where = ", ".join(names) if len(names) <= _NAMED else f"{len(names)} devices"
        basis = f"{error['rows']} measured steps, predicted without {error['what']}" if error["rows"] else error["what"]
        lines.append(
            f"How sure on {where}: 80 % {'lay' if error['rows'] else 'should lie'} between {error['low']:.2f} and "
            f"{error['high']:.2f} times the prediction, half of them within {error['median_error']:.0%} ({basis})"
            + ("; wider where the host has a part." if waiting else ".")
        )
    return lines
