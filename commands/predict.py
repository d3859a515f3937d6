"""``ddltool predict SOURCE --device NAME``: step time, throughput and memory of training on GPUs that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.loading.fabrics import BANDWIDTH, LATENCY
from ddltool.analyzers.loading.predictions import predict as predict_steps
from ddltool.analyzers.loading.predictions import predicted_profile
from ddltool.analyzers.reporting.predict_section import predict_section
from ddltool.commands.declaring import called
from ddltool.commands.options import DEVICES, OPTIMIZER, LocalLink, Precision, completed, integers, within
from ddltool.commands.output import answer
from ddltool.profiles import write_profile

SHARDINGS = ("none", "ddp", "zero1", "zero2", "fsdp", "fsdp:SHARD", "hsdp:SHARD")


def _sizes(text: str, where: str) -> tuple[int, ...] | None:
    return None if text == "auto" else integers(text, where, ordered=False)


def predict(
    context: typer.Context,
    source: str,
    device: Annotated[str, DEVICES],
    batch_sizes: Annotated[str, _sizes] = "auto",
    replicas: Annotated[str, integers] = "1",
    gpus_per_node: Annotated[int, within(1, 1024)] = 8,
    precision: Precision = "fp32",
    channels_last: bool = False,
    compile_: bool = False,
    optimizer: Annotated[str, OPTIMIZER] = "adam",
    accumulation: Annotated[int, within(1, 1_000_000)] = 1,
    sharding: Annotated[str, {"choices": SHARDINGS, **completed(SHARDINGS)}] = "ddp",
    checkpointing: str = "none",
    sequence_length: Annotated[int | None, within(1)] = None,
    bandwidth: str = BANDWIDTH,
    latency: str = LATENCY,
    nic: str | None = None,
    link: LocalLink = None,
    local_bandwidth: str | None = None,
    local_latency: str | None = None,
    nccl_tests: list[Path] | None = None,
    devices_file: Path | None = None,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Predict training steps on devices that are not here, each with the range in which 80 % of measurements fall."""
    made = called(context, predict_steps)
    if output is not None:
        write_profile(predicted_profile(made), output)
    answer(made, lambda: predict_section(made), as_json, output)
