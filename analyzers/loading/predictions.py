"""Training steps on GPUs that are not here, for any torch SOURCE. Start at :func:`predict`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ddltool.analyzers.costs.model import cost_model
from ddltool.analyzers.costs.predict import Setting, predict_on
from ddltool.analyzers.loading.fabrics import BANDWIDTH, LATENCY, fabric_of
from ddltool.analyzers.loading.sources import Source, name_of, work_of
from ddltool.analyzers.tracing.dialect import Numerics
from ddltool.device import Device, DeviceTable
from ddltool.errors import InputError
from ddltool.fixtures.loading import calibration, known_devices
from ddltool.graph_results import PredictResult
from ddltool.stages import Stage, Tell, log_remark, quietly

_LARGEST = 2**31


def predict(
    source: Source,
    device: str | Sequence[str],
    *,
    batch_sizes: Sequence[int] | int | None = None,
    replicas: Sequence[int] | int = 1,
    gpus_per_node: int = 8,
    precision: str = "fp32",
    channels_last: bool = False,
    compile: bool = False,
    optimizer: str = "adam",
    accumulation: int = 1,
    sharding: str = "ddp",
    checkpointing: str = "none",
    sequence_length: int | None = None,
    bandwidth: str | None = None,
    latency: str | None = None,
    nic: str | None = None,
    link: str | None = None,
    local_bandwidth: str | None = None,
    local_latency: str | None = None,
    nccl_tests: Sequence[Path] = (),
    devices_file: Path | None = None,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> PredictResult:
    """Predict a training step's time, throughput and memory, each with the range in which 80 % of measurements fall.

    ``source``: a module, (module, example_inputs), a function that makes one, or a text as on the command line. ``device``:
    names as ``ddltool devices`` lists them. ``batch_sizes``: local ones; None: 1, 2, 4, ... up to the memory limit. The other
    settings are those of ``ddltool predict``. Raises InputError for what is unknown or cannot be traced, Infeasible where
    nothing fits.
    """
    sizes = _counts("--batch-sizes", batch_sizes) if batch_sizes is not None else None
    counts = _counts("--replicas", replicas)
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
                bandwidth=bandwidth if bandwidth is not None or nic is not None else BANDWIDTH,
                latency=latency if latency is not None or nic is not None else LATENCY,
                nccl_tests=nccl_tests,
            ),
            optimizer=optimizer,
            accumulation=accumulation,
            compile=compile,
            sharding=sharding,
            checkpointing=checkpointing,
        )
        for each in found
    ]
    with stage(f"tracing {name_of(source)}"):
        curve = work_of(source, numerics, sequence_length)
    if remark := curve.traced.graph.meta.get("note"):
        tell(f"note: {remark}")
    models = [cost_model(each, calibration()) for each in found]
    return predict_on(curve, list(zip(models, settings, strict=True)), sizes, counts, name_of(source))


def _counts(option: str, given: Sequence[int] | int) -> tuple[int, ...]:
    numbers = (given,) if isinstance(given, int) else tuple(given)
    for number in numbers:
        if not 1 <= number <= _LARGEST:
            raise InputError(option, f"{number} is out of range", f"write whole numbers from 1 to {_LARGEST}")
    return numbers


def _devices(names: str | Sequence[str], known: DeviceTable) -> list[Device]:
    """Return the devices of ``A100,L4``, each once. Raises InputError for an unknown one, and for a CPU."""
    parts = names.split(",") if isinstance(names, str) else names
    found = [known.gpu(name) for part in parts if (name := part.strip())]
    if not found:
        raise InputError("--device", "names no device", "give one or more, such as A100,L4")
    return list({device.name: device for device in found}.values())


def predicted_profile(made: PredictResult) -> pd.DataFrame:
    """Return the rows as a profile: what is not known there is left out."""
    given = made.assumptions
    layout = ", channels_last" if given.channels_last else ""
    compiled = ", compiled" if given.compile else ""
    settings = f"predicted, {given.precision}{layout}{compiled}, optimizer {given.optimizer}"
    rows = [{**row.model_dump(mode="json", exclude={"recompute"}), "settings": settings} for row in made.rows]
    return pd.DataFrame(rows).dropna(axis="columns", how="all")
