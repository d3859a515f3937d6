"""``ddltool profile SOURCE --device NAME --analytic``: the step-time curve of a GPU that is not here, predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from ddltool.analyzers.goodput.analytic import PredictedStep, Target
    from ddltool.analyzers.goodput.step_work import WorkCurve

# A rate of 90 % of the best predicted one counts as saturated, as for measured profiles.
_SATURATED = 0.9
_LARGEST = 2**31
# PCIe 3.0 x16, one way.
LOCAL_BANDWIDTH, LOCAL_LATENCY = "15.75GB/s", "10us"


@dataclass(frozen=True, kw_only=True)
class AnalyticRequest:
    """What to predict, as it stands on the command line."""

    source: str
    device: str
    batch_sizes: tuple[int, ...] | None = None
    """None: 1, 2, 4, ... up to the memory limit."""
    replicas: tuple[int, ...] = (1,)
    gpus_per_node: int = 1
    """How many replicas share a node; on one node the local link joins them, else the network."""
    bandwidth: str = "10Gbit"
    latency: str = "50us"
    local_bandwidth: str = LOCAL_BANDWIDTH
    local_latency: str = LOCAL_LATENCY
    arithmetic: str = "default"
    optimizer: str = "adam"
    per_parameter: str | None = None
    """Host time per parameter tensor instead of the calibrated one, for example ``20us``."""


@dataclass(frozen=True, kw_only=True)
class AnalyticProfile:
    """Predicted rows in the columns of profile.csv, and what goes with them."""

    frame: pd.DataFrame
    device: str
    arithmetic: str
    optimizer: str
    saturation_batch: int
    memory_limit_batch: int
    memory_gib: float
    launch_overhead_s: float
    per_parameter_s: float
    left_out: tuple[int, ...]
    """Local batch sizes asked for that do not fit."""
    affine: bool
    error: str
    """How far such predictions were off, in words."""


def profile_analytic(request: AnalyticRequest, output: Path | None, as_json: bool) -> None:
    """Predict, write the profile when ``output`` is given, and print."""
    from ddltool.artifacts import check_writable
    from ddltool.commands.output import note, print_json
    from ddltool.profile import write_profile

    if output is not None:
        check_writable(output)
    found = predict_profile(request)
    if output is not None:
        write_profile(found.frame, output)
    if found.left_out:
        sizes = ", ".join(map(str, found.left_out))
        note(f"left out: local batch {sizes} does not fit {found.memory_gib:g} GiB (limit {found.memory_limit_batch})")
    if as_json:
        print_json(analytic_document(found))
    else:
        show_analytic(found, output)


def predict_profile(request: AnalyticRequest) -> AnalyticProfile:
    """Return the predicted profile.

    Raises InputError for an unknown device (naming the nearest), a source that is no torch model or does not trace, and
    unusable options; Infeasible when no batch size fits the device's memory.
    """
    from ddltool.analyzers.goodput.analytic import memory_limit_batch, predict
    from ddltool.analyzers.goodput.analytic_calibration import error_text
    from ddltool.errors import Infeasible

    target = _target(request)
    placements = _placements(request)
    curve = _work(request)
    most = max(placement.num_replicas for placement in placements)
    limit = memory_limit_batch(curve, target, most)
    asked = request.batch_sizes or _all_sizes(curve, limit)
    fitting = tuple(size for size in asked if size <= limit)
    if not fitting:
        smallest = f"local batch {min(asked, default=1)} of {request.source}"
        raise Infeasible(
            f"{smallest} does not fit the {target.device.memory_gib:g} GiB of a {target.device.name} "
            f"(largest that does, by estimate: {limit})"
        )
    steps = predict(curve, target, fitting, placements)
    alone = [step for step in steps if step.num_replicas == min(p.num_replicas for p in placements)]
    best = max(step.local_batch_size / step.step_time_s for step in alone)
    saturated = [s.local_batch_size for s in alone if s.local_batch_size / s.step_time_s >= _SATURATED * best]
    return AnalyticProfile(
        frame=_frame(steps, target, request.source),
        device=target.device.name,
        arithmetic=target.arithmetic,
        optimizer=target.optimizer,
        saturation_batch=min(saturated),
        memory_limit_batch=limit,
        memory_gib=target.device.memory_gib,
        launch_overhead_s=steps[0].launch_s,
        per_parameter_s=target.calibration.per_parameter_s,
        left_out=tuple(size for size in asked if size > limit),
        affine=curve.affine,
        error=error_text(target.device.name),
    )


def _all_sizes(curve: WorkCurve, limit: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to the memory limit; what was traced where nothing else is known."""
    sizes = tuple(2**power for power in range(limit.bit_length()))
    return sizes if curve.affine else tuple(size for size in sorted(curve.traced) if size <= limit)


def _target(request: AnalyticRequest) -> Target:
    from ddltool.analyzers.goodput.analytic import Link, Target
    from ddltool.analyzers.goodput.analytic_calibration import CALIBRATION
    from ddltool.errors import InputError
    from ddltool.fixtures.loading import devices
    from ddltool.units import parse_bandwidth, parse_duration

    device = devices().device(request.device)
    if device.name.startswith("cpu"):
        raise InputError("--device", f"{device.name} is no GPU", "measure a CPU instead: ddltool profile SOURCE")
    calibration = CALIBRATION
    if request.per_parameter is not None:
        calibration = replace(calibration, per_parameter_s=parse_duration(request.per_parameter, "--per-parameter"))
    return Target(
        device=device,
        local=Link(
            bandwidth_bytes_per_s=parse_bandwidth(request.local_bandwidth, "--local-bandwidth"),
            latency_s=parse_duration(request.local_latency, "--local-latency"),
        ),
        network=Link(
            bandwidth_bytes_per_s=parse_bandwidth(request.bandwidth), latency_s=parse_duration(request.latency)
        ),
        arithmetic=request.arithmetic,  # type: ignore[arg-type]  # Target checks it
        optimizer=request.optimizer,
        calibration=calibration,
    )


def _placements(request: AnalyticRequest) -> list[Any]:
    from ddltool.analyzers.goodput.analytic import Placement
    from ddltool.errors import InputError

    for name, values in (
        ("--batch-sizes", request.batch_sizes or (1,)),
        ("--replicas", request.replicas or (0,)),
        ("--gpus-per-node", (request.gpus_per_node,)),
    ):
        for value in values:
            if not 1 <= value <= _LARGEST:
                raise InputError(name, f"{value} is out of range", f"write whole numbers from 1 to {_LARGEST}")
    return [
        Placement(num_nodes=math.ceil(count / request.gpus_per_node), num_replicas=count)
        for count in sorted(set(request.replicas))
    ]


def _work(request: AnalyticRequest) -> WorkCurve:
    import contextlib
    import sys

    from ddltool.analyzers.goodput.step_work import measure_work
    from ddltool.commands.sources import is_graph_file, is_onnx_file, resolve_step
    from ddltool.errors import InputError

    if is_graph_file(request.source) or is_onnx_file(request.source):
        remedy = "give a torch source: zoo:NAME, file.py:factory, ..."
        raise InputError(request.source, "holds one batch size only and cannot be traced at others", remedy)
    with contextlib.redirect_stdout(sys.stderr):  # what the user's forward prints must not mix with the result
        return measure_work(lambda: resolve_step(request.source), request.batch_sizes or (64,))


def _frame(steps: Sequence[PredictedStep], target: Target, source: str) -> pd.DataFrame:
    import pandas as pd

    from ddltool.analyzers.goodput.analytic_calibration import error_range

    device = target.device.name
    settings = f"predicted, arithmetic {target.arithmetic}, optimizer {target.optimizer}"
    rows = []
    for step in steps:
        low, high = error_range(device, several_replicas=step.num_replicas > 1).interval_s(step.step_time_s)
        rows.append(
            {
                "device": device,
                "num_nodes": step.num_nodes,
                "num_replicas": step.num_replicas,
                "local_batch_size": step.local_batch_size,
                "step_time_s": step.step_time_s,
                "sync_time_s": step.sync_time_s,
                "peak_memory_bytes": round(step.peak_memory_bytes),
                "predicted_low_s": low,
                "predicted_high_s": high,
                "source": source,
                "settings": settings,
                "origin": "analytic",
            }
        )
    return pd.DataFrame(rows)


def analytic_document(found: AnalyticProfile) -> dict[str, Any]:
    """Return the JSON document: that of a measured profile, with ``predicted: true`` and the errors."""
    from dataclasses import asdict

    from ddltool.analyzers.goodput.analytic_calibration import HELD_OUT, error_range

    alone, several = (error_range(found.device, several_replicas=many) for many in (False, True))
    return {
        "kind": "ddltool.profile",
        "schema_version": 1,
        "predicted": True,
        "rows": found.frame.to_dict("records"),
        "devices": {
            found.device: {
                "saturation_batch": found.saturation_batch,
                "memory_limit_batch": found.memory_limit_batch,
                "launch_overhead_s": found.launch_overhead_s,
            }
        },
        "left_out": list(found.left_out),
        "arithmetic": found.arithmetic,
        "optimizer": found.optimizer,
        "error": {
            "text": found.error,
            "predicted_over_measured": [alone.low, alone.high],
            "predicted_over_measured_several_replicas": [several.low, several.high],
            "mape": alone.mape,
            "held_out": [asdict(entry) for entry in HELD_OUT],
        },
    }


def show_analytic(found: AnalyticProfile, output: Path | None) -> None:
    """Print the predicted rows with their ranges, and how far off such predictions were."""
    from ddltool.analyzers.goodput.analytic_calibration import CALIBRATION
    from ddltool.commands.output import out, table
    from ddltool.units import show_bytes, show_seconds

    rows = [
        (
            str(row["num_replicas"]),
            str(row["local_batch_size"]),
            show_seconds(row["step_time_s"]),
            f"{show_seconds(row['predicted_low_s'])} .. {show_seconds(row['predicted_high_s'])}",
            show_seconds(row["sync_time_s"]),
            show_bytes(row["peak_memory_bytes"]),
        )
        for row in found.frame.to_dict("records")
    ]
    columns = ("replicas", "local batch", "step", "range", "sync", "memory")
    console = out()
    title = f"Step times on {found.device} (predicted, not measured; {found.arithmetic}, {found.optimizer})"
    console.print(table(title, columns, rows))
    overhead = show_seconds(found.launch_overhead_s)
    console.print(f"{found.device}: launch overhead {overhead}, saturates at batch {found.saturation_batch}")
    console.print(f"{found.device}: memory limit at batch {found.memory_limit_batch} (estimated)")
    if not found.affine:
        console.print("The work is not affine in the batch: every batch size was traced by itself.")
    console.print(f"How sure: {found.error}; the range column says the same of each row.", soft_wrap=True)
    if found.per_parameter_s == CALIBRATION.per_parameter_s:
        console.print(
            f"Small batches: {show_seconds(found.per_parameter_s)} of host work per parameter, as measured under AdaptDL; "
            "give yours with --per-parameter.",
            soft_wrap=True,
        )
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)
