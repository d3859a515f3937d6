"""``ddltool profile SOURCE``: measure step times, synchronisation and memory on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ddltool.commands.options import Json, Output, Seed

# Headings of --help for options that only one way to use the command reads.
WATCH, IMPORT, ANALYTIC = "With --watch", "With --import", "With --analytic"


def profile(
    source: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="SOURCE", help="The model to train; not needed with --network.", show_default=False),
    ] = None,
    batch_sizes: Annotated[
        str,
        typer.Option(
            metavar="N,N,...|auto",
            help="Local batch sizes, 1,2,4,8 by default; auto searches where throughput saturates.",
        ),
    ] = "",
    replicas: Annotated[
        str,
        typer.Option(
            metavar="N,N,...", help="How many processes to measure with; 1, and all of a torchrun job, by default."
        ),
    ] = "",
    accumulation: Annotated[
        str, typer.Option(metavar="N,N,...", help="Accumulation steps before the one that synchronises; 0 is none.")
    ] = "0",
    device: Annotated[
        str, typer.Option(help="cpu or cuda; with --analytic the name of a device type, such as V100.")
    ] = "cpu",
    device_name: Annotated[
        str, typer.Option(metavar="NAME", help="Name to write in the device column; cpu or cuda by default.")
    ] = "",
    precision: Annotated[str, typer.Option(metavar="SHARE", help="How well to know every step time.")] = "5%",
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Stop measuring after this long; 60s by default without --repeats.")
    ] = "",
    repeats: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Timed steps per configuration, in place of --precision.", show_default=False),
    ] = None,
    warmup: Annotated[int, typer.Option(help="Untimed steps before them.")] = 2,
    threads: Annotated[int, typer.Option(help="Threads of each process; 0 shares the cores.", min=0, max=4096)] = 0,
    memory: Annotated[
        str,
        typer.Option(metavar="SIZE|all", help="Search the largest batch that fits, by trying; all is a whole GPU."),
    ] = "",
    memory_gib: Annotated[float, typer.Option(metavar="GIB", help="The same as --memory, in GiB.", min=0)] = 0.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows of -o FILE; measure what is missing.")
    ] = False,
    network: Annotated[
        bool,
        typer.Option("--network", help="Measure latency and bandwidth between --replicas processes (or torchrun's)."),
    ] = False,
    watch: Annotated[
        int,
        typer.Option(
            metavar="N", help="Record speed, CPU and memory of every process for N iterations, for balance.", min=0
        ),
    ] = 0,
    cores: Annotated[
        str, typer.Option(metavar="N,N,...", help="The core that each process stays on.", rich_help_panel=WATCH)
    ] = "",
    imports: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(
            "--import", metavar="FILE", help="AdaptDL table, profiler trace, telemetry or profile.csv; may be repeated."
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option(help="Nodes of a profiler trace that does not say.", min=0, rich_help_panel=IMPORT)
    ] = 0,
    analytic: Annotated[
        bool, typer.Option("--analytic", help="Predict the curve of a --device that is not here, with its error.")
    ] = False,
    bandwidth: Annotated[str, typer.Option(help="Network between nodes.", rich_help_panel=ANALYTIC)] = "10Gbit",
    latency: Annotated[str, typer.Option(help="Network latency.", rich_help_panel=ANALYTIC)] = "50us",
    local_bandwidth: Annotated[
        str, typer.Option(help="Link between the GPUs of a node.", rich_help_panel=ANALYTIC)
    ] = "15.75GB/s",
    local_latency: Annotated[str, typer.Option(help="Its latency.", rich_help_panel=ANALYTIC)] = "10us",
    gpus_per_node: Annotated[
        int, typer.Option(help="Replicas of a node.", min=1, max=1024, rich_help_panel=ANALYTIC)
    ] = 1,
    arithmetic: Annotated[
        str, typer.Option(help="default, float32, tf32 or mixed.", rich_help_panel=ANALYTIC)
    ] = "default",
    optimizer: Annotated[str, typer.Option(help="sgd, momentum or adam.", rich_help_panel=ANALYTIC)] = "adam",
    per_parameter: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Host time per parameter tensor; calibrated by default.", rich_help_panel=ANALYTIC
        ),
    ] = "",
    output: Output = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure training steps here, or the network; watch workers; import measurements; or predict another device's curve."""
    from ddltool.artifacts import check_writable
    from ddltool.commands import profile_options as options
    from ddltool.commands.network import profile_network
    from ddltool.commands.profile_measure import MeasureOptions, profile_model
    from ddltool.commands.torchrun import one_voice
    from ddltool.errors import InputError
    from ddltool.outputs import demand_distinct

    demand_distinct(imports or [], {"-o": output})
    with one_voice():
        modes = [
            name
            for name, on in {
                "--network": network,
                "--watch": watch,
                "--import": imports,
                "--analytic": analytic,
            }.items()
            if on
        ]
        if len(modes) > 1:
            raise InputError(modes[1], f"has no part in {modes[0]}", "give one of the two")
        sizes = () if batch_sizes == "auto" else options.integers(batch_sizes or "1,2,4,8", "--batch-sizes")
        if imports:
            from ddltool.commands.profile_import import profile_import

            if source is not None:
                raise InputError("SOURCE", f"{source} has no part in --import", "leave it out")
            if batch_sizes and len(sizes) != 1:
                raise InputError("--batch-sizes", f"is {batch_sizes}", "give the one size of the imported trace")
            replica_counts = options.integers(replicas, "--replicas") if replicas else ()
            if len(replica_counts) > 1:
                raise InputError("--replicas", f"is {replicas}", "give the one number of the imported trace")
            profile_import(
                imports,
                output,
                as_json,
                device=device_name or None,
                batch_size=sizes[0] if batch_sizes else None,
                num_nodes=nodes or None,
                num_replicas=replica_counts[0] if replica_counts else None,
            )
            return
        if analytic:
            from ddltool.commands.profile_analytic import AnalyticRequest, profile_analytic

            profile_analytic(
                AnalyticRequest(
                    source=_required(source),
                    device=device,
                    batch_sizes=sizes if batch_sizes and sizes else None,
                    replicas=options.integers(replicas, "--replicas") if replicas else (1,),
                    gpus_per_node=gpus_per_node,
                    bandwidth=bandwidth,
                    latency=latency,
                    local_bandwidth=local_bandwidth,
                    local_latency=local_latency,
                    arithmetic=arithmetic,
                    optimizer=optimizer,
                    per_parameter=per_parameter or None,
                ),
                output,
                as_json,
            )
            return
        if watch:
            from ddltool.commands.watch import profile_watch

            if batch_sizes and len(sizes) != 1:
                raise InputError(
                    "--batch-sizes", f"is {batch_sizes}", "give the one size that every process trains with"
                )
            counts = options.integers(replicas, "--replicas") if replicas else (2,)
            profile_watch(
                _required(source),
                batch=sizes[0] if batch_sizes else 8,
                workers=max(counts),
                iterations=watch,
                cores=cores or None,
                seed=seed,
                output=output,
                as_json=as_json,
            )
            return
        counts = options.integers(replicas, "--replicas") if replicas else ()
        if network:
            if source is not None:
                raise InputError("SOURCE", f"{source} has no part in --network", "leave it out")
            if output is not None:
                check_writable(output)
            profile_network(max(2, *counts, 2), output, as_json)
            return
        if memory and memory_gib:
            raise InputError("--memory-gib", "says the same as --memory", "give one of them")
        profile_model(
            MeasureOptions(
                source=_required(source),
                batch_sizes=sizes,
                replicas=counts,
                accumulation=options.integers(accumulation, "--accumulation", least=0),
                device=device,
                device_name=device_name or device,
                precision=options.share(precision, "--precision"),
                budget_s=options.budget(budget, "--budget") if budget else None,
                repeats=repeats,
                warmup=warmup,
                threads=threads,
                memory=memory or (f"{memory_gib!r}GiB" if memory_gib else ""),
                resume=resume,
                seed=seed,
            ),
            output,
            as_json,
        )


def _required(source: str | None) -> str:
    """Return the source. Raises InputError when it is missing."""
    from ddltool.errors import InputError

    if source is None:
        raise InputError("SOURCE", "is missing", "give a model, for example zoo:resnet32, or --network")
    return source
