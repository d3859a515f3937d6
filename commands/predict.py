"""``ddltool predict SOURCE --device NAME``: step time, throughput and memory of training on GPUs that are not here."""

from __future__ import annotations

from typing import Annotated

import typer

from ddltool.analyzers.loading.fabrics import BANDWIDTH, LATENCY
from ddltool.analyzers.loading.predictions import predict as predict_steps
from ddltool.analyzers.loading.predictions import predicted_profile
from ddltool.analyzers.reporting.predict_section import predict_section
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
    device_names,
    is_given,
    one_of,
)
from ddltool.commands.output import note, print_json, progress, show
from ddltool.commands.values import integers
from ddltool.outputs import check_outputs
from ddltool.profiles import write_profile


def predict(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="package.module:factory, file.py:factory, zoo:NAME, transformers:NAME or timm:NAME."
        ),
    ],
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME", autocompletion=device_names, help="Device types; `ddltool devices` lists them."
        ),
    ],
    batch_sizes: Annotated[
        str, typer.Option(metavar="N,N,...|auto", help="Local batch sizes; auto: 1, 2, 4, ... up to the memory limit.")
    ] = "auto",
    replicas: Annotated[str, typer.Option(metavar="N,N,...", help="Data-parallel replicas.")] = "1",
    gpus_per_node: Annotated[int, typer.Option(help="Replicas of a node.", min=1, max=1024)] = 8,
    precision: Precision = "fp32",
    channels_last: ChannelsLast = False,
    compile_: Annotated[bool, typer.Option("--compile", help="Under torch.compile: pointwise chains fused.")] = False,
    optimizer: Annotated[
        str, typer.Option(**one_of("none", "sgd", "momentum", "adam", "adamw", help="Whose states it keeps."))
    ] = "adam",
    accumulation: Annotated[int, typer.Option(help="Passes in a step.", min=1, max=1_000_000)] = 1,
    sharding: Annotated[
        str,
        typer.Option(
            **one_of("none", "ddp", "zero1", "zero2", "fsdp", "fsdp:SHARD", "hsdp:SHARD", help="Of replicas.")
        ),
    ] = "ddp",
    checkpointing: Annotated[
        str,
        typer.Option(
            metavar="none|selective|full|SIZE",
            help="Of every block's activations; SIZE: what tensors may take (40GiB).",
        ),
    ] = "none",
    sequence_length: SequenceLength = None,
    bandwidth: Annotated[str, typer.Option(metavar="RATE", help="Network between nodes, as measured.")] = BANDWIDTH,
    latency: Annotated[str, typer.Option(metavar="TIME", help="Its latency.")] = LATENCY,
    nic: Nic = None,
    link: LocalLink = None,
    local_bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Inside a node, as measured; what rings reach of the device's own link by default."
        ),
    ] = None,
    local_latency: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of a message inside a node; NCCL's own by default.")
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
    given = {
        name: value
        for name, value in (("bandwidth", bandwidth), ("latency", latency))
        if nic is None or is_given(context, name)
    }
    made = predict_steps(
        source,
        device,
        batch_sizes=sizes,
        replicas=counts,
        gpus_per_node=gpus_per_node,
        precision=precision,
        channels_last=channels_last,
        compile=compile_,
        optimizer=optimizer,
        accumulation=accumulation,
        sharding=sharding,
        checkpointing=checkpointing,
        sequence_length=sequence_length,
        nic=nic,
        link=link,
        local_bandwidth=local_bandwidth,
        local_latency=local_latency,
        nccl_tests=nccl_tests or (),
        devices_file=devices_file,
        tell=note,
        stage=progress,
        **given,
    )
    if output is not None:
        write_profile(predicted_profile(made), output)
    if as_json:
        print_json(made)
    else:
        show(predict_section(made), output)
