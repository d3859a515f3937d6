"""``ddltool profile SOURCE``: measure step times, synchronisation and memory on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ddltool.commands.options import Json, Output, Seed

if TYPE_CHECKING:
    import pandas as pd

    from ddltool.analyzers.goodput.curve import CurveSummary

RESOLVER = "ddltool.commands.sources:training_step"


def profile(
    source: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="SOURCE", help="The model to train; not needed with --network.", show_default=False),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(metavar="N,N,...", help="Local batch sizes to measure.")] = "1,2,4,8",
    replicas: Annotated[str, typer.Option(metavar="N,N,...", help="How many local processes to measure with.")] = "1",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    device_name: Annotated[
        str, typer.Option(metavar="NAME", help="Name to write in the device column; the hardware's own by default.")
    ] = "",
    repeats: Annotated[int, typer.Option(help="Timed steps per configuration.", min=1)] = 5,
    warmup: Annotated[int, typer.Option(help="Untimed steps before them.", min=0)] = 2,
    memory_gib: Annotated[
        float,
        typer.Option(metavar="GIB", help="Memory budget for the batch limit; the device's own by default.", min=0),
    ] = 0.0,
    network: Annotated[
        bool,
        typer.Option("--network", help="Measure latency and bandwidth between --replicas processes (or torchrun's)."),
    ] = False,
    output: Output = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure the training step over batch sizes and local processes, or the network between processes."""
    from ddltool.artifacts import check_writable
    from ddltool.commands.network import profile_network
    from ddltool.commands.output import note, print_json
    from ddltool.errors import InputError
    from ddltool.profile import write_profile
    from ddltool.runtime.measure import MeasureRequest, reliability

    if output is not None:
        check_writable(output)
    if network:
        if source is not None:
            raise InputError("SOURCE", f"{source} has no part in --network", "leave it out")
        profile_network(max(2, *integers(replicas, "--replicas")), output, as_json)
        return
    if source is None:
        raise InputError("SOURCE", "is missing", "give a model, for example zoo:resnet32, or --network")
    if device not in ("cpu", "cuda"):
        raise InputError("--device", f"unknown device {device!r}", "cpu or cuda")
    request = MeasureRequest(
        source=source,
        resolver=RESOLVER,
        batch_sizes=integers(batch_sizes, "--batch-sizes"),
        replicas=integers(replicas, "--replicas"),
        device=device,
        device_name=device_name or device,
        warmup=warmup,
        repeats=repeats,
        seed=seed,
    )
    frame = measure_with_progress(request)
    if output is not None:
        write_profile(frame, output)
    limit = memory_gib * 2**30 if memory_gib else _device_memory(device)
    summaries = summarise_frame(frame, limit)
    for warning in reliability(frame):
        note(f"warning: {warning}")
    if as_json:
        print_json(as_document(frame, summaries))
    else:
        show_profile(frame, summaries, output)


def integers(text: str, where: str) -> tuple[int, ...]:
    """Return the numbers in ``1,2,4``. Raises InputError for anything that is no whole number >= 1."""
    from ddltool.errors import InputError

    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(where, f"{text!r} is not a list of whole numbers", "write for example 1,2,4") from None
    if min(values) < 1:
        raise InputError(where, f"{min(values)} is below 1", "write whole numbers >= 1")
    return tuple(sorted(set(values)))


def measure_with_progress(request: Any) -> pd.DataFrame:
    """Return the measured rows, with a progress bar while they come in."""
    from ddltool.commands.output import progress
    from ddltool.runtime.measure import measure

    total = len(request.batch_sizes) * len(request.replicas)
    with progress("measuring", total) as advance:
        return measure(request, progress=lambda state: advance(state.done, state.remark))


def _device_memory(device: str) -> float:
    """Return the bytes that the device has: all of the GPU's, or what is free in main memory."""
    if device == "cuda":
        import torch

        return float(torch.cuda.get_device_properties(0).total_memory)
    import psutil

    return float(psutil.virtual_memory().available)


def summarise_frame(frame: pd.DataFrame, memory_limit_bytes: float | None) -> dict[str, CurveSummary]:
    """Return launch overhead, saturation and memory limit per device."""
    from ddltool.analyzers.goodput.curve import summarise

    return summarise(frame, memory_limit_bytes)


def as_document(frame: pd.DataFrame, summaries: dict[str, CurveSummary]) -> dict[str, Any]:
    """Return the JSON document of a profile."""
    import json

    devices = {
        name: {
            "saturation_batch": summary.saturation_batch,
            "memory_limit_batch": summary.memory_limit_batch,
            "launch_overhead_s": summary.launch_overhead_s,
        }
        for name, summary in summaries.items()
    }
    rows = json.loads(frame.to_json(orient="records", double_precision=15))
    return {"kind": "ddltool.profile", "schema_version": 1, "rows": rows, "devices": devices}


def show_profile(frame: pd.DataFrame, summaries: dict[str, CurveSummary], output: Path | None) -> None:
    """Print the measured rows and what they say about the device."""
    from ddltool.commands.output import out, table
    from ddltool.units import show_bytes, show_seconds

    rows = [
        (
            str(row["device"]),
            str(row["num_replicas"]),
            str(row["local_batch_size"]),
            show_seconds(row["step_time_s"]),
            show_seconds(row.get("step_time_spread_s")),
            show_seconds(row["sync_time_s"]),
            show_bytes(row["peak_memory_bytes"]),
        )
        for row in frame.to_dict("records")
    ]
    columns = ("device", "replicas", "local batch", "step", "spread", "sync", "peak memory")
    console = out()
    console.print(table("Step times (measured, median)", columns, rows))
    for name, summary in summaries.items():
        overhead = show_seconds(summary.launch_overhead_s)
        limit = summary.memory_limit_batch if summary.memory_limit_batch is not None else "not reached"
        console.print(f"{name}: launch overhead {overhead}, saturates at batch {summary.saturation_batch}")
        console.print(f"{name}: memory limit at batch {limit} (predicted by extrapolation)")
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)
