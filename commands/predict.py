"""``ddltool predict SOURCE --device NAME``: step time, throughput and memory of training on GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from ddltool.analyzers.costs.model import cost_model
from ddltool.analyzers.costs.predict import Setting, predict_on
from ddltool.analyzers.loading.fabrics import BANDWIDTH, LATENCY, fabric_of
from ddltool.analyzers.loading.sources import work_of
from ddltool.analyzers.tracing.dialect import Numerics
from ddltool.commands.options import (
    ChannelsLast,
    DevicesFile,
    Json,
    LocalLink,
    NcclTests,
    Nic,
    Output,
    Precision,
    SequenceLength,
)
from ddltool.commands.output import note, out, print_json, progress, table
from ddltool.commands.parts import is_given
from ddltool.commands.values import integers
from ddltool.device import Device, DeviceTable
from ddltool.errors import InputError
from ddltool.fixtures.loading import calibration, known_devices
from ddltool.graph_results import PredictedRow, PredictResult
from ddltool.outputs import check_outputs
from ddltool.profiles import write_profile
from ddltool.units import show_bytes, show_rate, show_seconds, show_span

_LARGEST = 2**31
# Names of more devices than these are counted.
_NAMED = 6


def predict(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="package.module:factory, file.py:factory, zoo:NAME, transformers:NAME or timm:NAME."
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
    sharding: Annotated[
        str, typer.Option(help="Of several replicas: none, ddp, zero1, zero2, fsdp, fsdp:SHARD or hsdp:SHARD.")
    ] = "ddp",
    checkpointing: Annotated[
        str,
        typer.Option(
            metavar="none|selective|full|SIZE",
            help="Of every block's activations; SIZE: what tensors may take (40GiB).",
        ),
    ] = "none",
    sequence_length: SequenceLength = None,
    bandwidth: Annotated[str, typer.Option(help="Network between nodes, as measured.")] = BANDWIDTH,
    latency: Annotated[str, typer.Option(help="Its latency.")] = LATENCY,
    nic: Nic = None,
    link: LocalLink = None,
    local_bandwidth: Annotated[
        str | None,
        typer.Option(help="Inside a node, as measured; what rings reach of the device's own link by default."),
    ] = None,
    local_latency: Annotated[
        str | None, typer.Option(help="Of a message inside a node; NCCL's own by default.")
    ] = None,
    nccl_tests: NcclTests = None,
    devices_file: DevicesFile = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Predict training steps on devices that are not here, each with the range in which 80 % of measurements fall."""
    check_outputs([source.partition(":")[0], devices_file, *(nccl_tests or [])], {"-o": output})
    sizes = None if batch_sizes == "auto" else integers(batch_sizes, "--batch-sizes", ordered=False)
    counts = integers(replicas, "--replicas")
    for option, numbers in (("--batch-sizes", sizes or (1,)), ("--replicas", counts)):
        if max(numbers) > _LARGEST:
            raise InputError(option, f"{max(numbers)} is out of range", f"write whole numbers from 1 to {_LARGEST}")
    found = _devices(device, known_devices(devices_file))
    numerics = Numerics(precision, channels_last)  # type: ignore[arg-type]  # Numerics checks it
    settings = [
        Setting(
            fabric=fabric_of(
                each,
                gpus_per_node=gpus_per_node,
                link=link,
                local_bandwidth=local_bandwidth,
                local_latency=local_latency,
                nic=nic,
                bandwidth=bandwidth if nic is None or is_given(context, "bandwidth") else None,
                latency=latency if nic is None or is_given(context, "latency") else None,
                nccl_tests=nccl_tests or (),
            ),
            optimizer=optimizer,
            accumulation=accumulation,
            compile=compile_,
            sharding=sharding,
            checkpointing=checkpointing,
        )
        for each in found
    ]
    with progress(f"tracing {source}"):
        curve = work_of(source, numerics, sequence_length)
    if remark := curve.traced.graph.meta.get("note"):
        note(f"note: {remark}")
    models = [cost_model(each, calibration()) for each in found]
    made = predict_on(curve, list(zip(models, settings, strict=True)), sizes, counts, source)
    if output is not None:
        write_profile(_frame(made), output)
    if as_json:
        print_json(made)
    else:
        _show(made, output)


def _devices(names: str, known: DeviceTable) -> list[Device]:
    """Return the devices of ``A100,L4``, each once. Raises InputError for an unknown one, and for a CPU."""
    found = [known.gpu(name) for part in names.split(",") if (name := part.strip())]
    if not found:
        raise InputError("--device", "names no device", "give one or more, such as A100,L4")
    return list({device.name: device for device in found}.values())


def _frame(made: PredictResult) -> pd.DataFrame:
    """Return the rows as a profile: what is not known there is left out."""
    given = made.assumptions
    layout = ", channels_last" if given.channels_last else ""
    compiled = ", compiled" if given.compile else ""
    settings = f"predicted, {given.precision}{layout}{compiled}, optimizer {given.optimizer}"
    rows = [{**row.model_dump(mode="json", exclude={"recompute"}), "settings": settings} for row in made.rows]
    return pd.DataFrame(rows).dropna(axis="columns", how="all")


def _show(made: PredictResult, output: Path | None) -> None:
    """Print the answer, the rows, and how sure they are."""
    rows, console = made.rows, out()
    several = len(made.devices) > 1
    if several:
        rows = sorted(rows, key=lambda row: -row.samples_per_s)
    console.print(_answer(made), soft_wrap=True)
    replicated = any(row.num_replicas > 1 for row in rows)
    priced = any(row.price_per_million_samples is not None for row in rows)
    columns: list[tuple[str, bool, Callable[[PredictedRow], str]]] = [
        ("device", several, lambda row: row.device),  # else the title names it
        ("replicas", replicated, lambda row: str(row.num_replicas)),
        ("batch", True, lambda row: str(row.local_batch_size)),
        ("step", True, lambda row: show_seconds(row.step_time_s)),
        ("80 % range", True, lambda row: show_span(row.predicted_low_s, row.predicted_high_s)),
        ("per s", True, lambda row: show_rate(row.samples_per_s)),
        ("MFU", True, lambda row: f"{row.mfu:.0%}"),
        ("sync", replicated, lambda row: show_seconds(row.sync_time_s) if row.num_replicas > 1 else "-"),
        ("memory", True, lambda row: show_bytes(row.reserved_bytes) + ("" if row.fits else " !")),
        ("per 1M", priced, lambda row: "-" if (cost := row.price_per_million_samples) is None else f"{cost:.3g}"),
    ]
    shown = [(name, text) for name, kept, text in columns if kept]
    title = f"Training steps on {_names(list(made.devices))} (predicted, not measured)"
    console.print(table(title, [name for name, _ in shown], [[text(row) for _, text in shown] for row in rows]))
    for line in _remarks(made):
        console.print(line)
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)


def _names(devices: list[str]) -> str:
    return ", ".join(devices) if len(devices) <= _NAMED else f"{len(devices)} devices"


def _answer(made: PredictResult) -> str:
    """Return the first line: the fastest row that fits, or what would."""
    best = max((row for row in made.rows if row.fits), key=lambda row: row.samples_per_s, default=None)
    if best is None:
        most = {name: about.memory_limit_batch for name, about in made.devices.items()}
        fitting = ", ".join(f"{batch} on {name}" for name, batch in most.items() if batch)
        at_most = f"at most: {fitting}." if fitting else "one sample does not either."
        return f"None of these fits, by estimate; {at_most}"
    rate = f"{show_rate(best.samples_per_s)} samples/s"
    rate += f", {show_rate(best.tokens_per_s)} tokens/s" if best.tokens_per_s else ""
    where = f"{best.num_replicas} x {best.device}" if best.num_replicas > 1 else best.device
    return f"Fastest here: {rate} on {where} at local batch {best.local_batch_size} (MFU {best.mfu:.0%}), predicted."


def _remarks(made: PredictResult) -> list[str]:
    """Return what was assumed, what does not fit, what waits for the host, and how far off such predictions were."""
    given, rows = made.assumptions, made.rows
    words = [given.precision, *(["channels_last"] if given.channels_last else [])]
    words += ["compiled" if given.compile else "eager", f"optimizer {given.optimizer}"]
    words += [f"{given.accumulation} passes a step"] if given.accumulation > 1 else []
    words += [f"{given.sequence_length} tokens a sample"] if given.sequence_length else []
    words += [f"up to {given.gpus_per_node} GPUs a node"] if any(row.num_replicas > 1 for row in rows) else []
    words += [f"sharding {given.sharding}"] if any(row.num_replicas > 1 for row in rows) else []
    words += [f"checkpointing {given.checkpointing}"] if given.checkpointing != "none" else []
    if any(row.num_nodes > 1 for row in rows):
        words.append(f"{show_bytes(given.bandwidth_bytes_per_s)}/s between nodes")
    lines = [f"Assumed: {', '.join(words)}."]
    if any(not row.fits for row in rows):
        lines.append("! needs more memory than the device has, by estimate.")
    lines += [_repeated(row) for row in rows if row.recompute is not None and row.recompute.budget_bytes is not None][
        :1
    ]
    if lacking := [name for name, about in made.devices.items() if not about.has_precision]:
        lines.append(f"{', '.join(lacking)}: no rate for {given.precision} in the datasheet; float32's is taken.")
    waiting = {
        row.device: sorted({r.local_batch_size for r in rows if r.host_bound and r.device == row.device})
        for row in rows
        if row.host_bound
    }
    if waiting:
        where = "; ".join(f"{name} at batch {', '.join(map(str, sizes))}" for name, sizes in waiting.items())
        helps = "a larger batch helps" if given.compile else "--compile or a larger batch helps"
        lines.append(f"Host-bound, the GPU waits for Python: {where}; {helps}.")
    for error in dict.fromkeys(about.error for about in made.devices.values()):
        where = _names([name for name, about in made.devices.items() if about.error == error])
        basis = f"{error.rows} measured steps, predicted without {error.what}" if error.rows else error.what
        lines.append(
            f"How sure on {where}: 80 % {'lay' if error.rows else 'should lie'} between {error.low:.2f} and "
            f"{error.high:.2f} times the prediction, half of them within {error.median_error:.0%} ({basis})"
            + ("; wider where the host has a part." if waiting else ".")
        )
    return lines


def _repeated(row: PredictedRow) -> str:
    """Return what a budget makes compute again, of the first row."""
    figures = row.recompute
    assert figures is not None
    whole = sum(not each.keeps for each in figures.modules)
    cost, bound = figures.recomputed_s, figures.lower_bound_s or 0.0
    proven = "the cheapest choice" if bound >= cost else f"at most {1 - bound / cost:.1%} more than the cheapest choice"
    count = f"{len(figures.modules)} modules again, {whole} of them whole"
    where = f"at batch {row.local_batch_size} on {row.device}"
    if not figures.modules:
        return (
            f"Computed again {where}: nothing, the tensors stay within {show_bytes(figures.budget_bytes)} as they are."
        )
    return f"Computed again {where}: {count}, {show_seconds(cost)} a pass: {proven} within {show_bytes(figures.budget_bytes)}."
