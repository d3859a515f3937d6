"""``ddltool plan JOB.yaml``: which strategy, and where each logical worker runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from ddltool.analyzers.deciding.candidates import STRATEGIES
from ddltool.analyzers.deciding.planning import SHARING, plan_together
from ddltool.analyzers.deciding.planning import plan as plan_job
from ddltool.analyzers.loading.job_inputs import read_with_specs
from ddltool.analyzers.reporting.plan_section import joint_section, layouts_table, plan_section
from ddltool.analyzers.reporting.section import Section
from ddltool.commands.options import (
    AllowCode,
    Compress,
    DevicesFile,
    Json,
    NcclTests,
    Output,
    Seed,
    demand_part,
    one_of,
)
from ddltool.commands.output import note, print_json, show
from ddltool.commands.values import number
from ddltool.decision import NothingFits, Objective
from ddltool.errors import InputError, known
from ddltool.outputs import check_outputs

_File = Path | None
_Text = str | None

_ALL = {"job_file", "strategy", "graph_file", "time_limit_s", "devices_file", "allow_code", "output", "seed", "as_json"}
_BARRIERS = {"lookahead", "max_gap"}
# The options that a strategy reads beside those.
_MORE = {
    "auto": {"objective", "telemetry", "bandwidth", "latency", "nccl_tests", "compress", "top_k", *_BARRIERS},
    "elastic-bsp": _BARRIERS,
    "est": {"top_k", "prefer", "together"},
}
# What the plan of several jobs reads.
_TOGETHER = {
    "job_file",
    "strategy",
    "together",
    "share",
    "devices_file",
    "allow_code",
    "time_limit_s",
    "seed",
    "as_json",
}


def plan(
    context: typer.Context,
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job: workers, batch size, devices.")],
    strategy: Annotated[
        str,
        typer.Option(
            **one_of(
                *("auto", *STRATEGIES),
                help="auto: compare all and pick; est: EST mapping; bsp: equal split; lb-bsp: uneven split; elastic-bsp: "
                "barriers; goodput: count and batch.",
            )
        ),
    ] = "auto",
    objective: Annotated[
        str, typer.Option(**one_of(*get_args(Objective), help="auto: cheapest is per sample, same-bits on any number."))
    ] = "fastest",
    telemetry: Annotated[
        _File,
        typer.Option(metavar="FILE", help="auto: telemetry of an earlier run, in place of the job's capabilities."),
    ] = None,
    bandwidth: Annotated[
        _Text, typer.Option(help="auto: network of a node, e.g. 100Gbit; the cluster's nic or nic_gbit by default.")
    ] = None,
    latency: Annotated[str, typer.Option(help="auto: network latency.")] = "50us",
    nccl_tests: NcclTests = None,
    compress: Compress = None,
    lookahead: Annotated[
        int, typer.Option(help="elastic-bsp: iterations per worker up to the barrier.", min=1, max=100_000)
    ] = 15,
    max_gap: Annotated[
        int | None, typer.Option(help="elastic-bsp: most iterations that one worker may be ahead.", min=0)
    ] = None,
    graph_file: Annotated[
        _File,
        typer.Option(
            "--graph", metavar="FILE", help="graph.json: puts the model's parameters and their order in the plan."
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(help="How many different plans to show.", min=1, max=1000)] = 1,
    time_limit_s: Annotated[
        float,
        typer.Option(
            "--time-limit",
            help="Solver's time limit in seconds.",
            metavar="SECONDS",
            parser=number("--time-limit", 0.01),
        ),
    ] = 10.0,
    prefer: Annotated[
        _Text,
        typer.Option(help="est: what matters, in this order: throughput, devices, price, waste.", metavar="NAME,..."),
    ] = None,
    together: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="JOB.yaml", help="est: another job on the same devices; repeat for more."),
    ] = None,
    share: Annotated[
        str,
        typer.Option(
            **one_of(*SHARING, help="With --with: sum or max-min of the throughputs relative to the job alone.")
        ),
    ] = "sum",
    devices_file: DevicesFile = None,
    allow_code: AllowCode = False,
    output: Output = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare the ways to run a job on its devices, or plan by one, and predict the step time."""
    strategy = known("--strategy", strategy, ("auto", *STRATEGIES))
    objective = known("--objective", objective, get_args(Objective))
    demand_part(
        context, f"--strategy {strategy}", _ALL | _MORE.get(strategy, set()) | ({"share"} if together else set())
    )
    check_outputs(
        [job_file, telemetry, graph_file, devices_file, *(together or []), *(nccl_tests or [])], {"-o": output}
    )
    if together:
        demand_part(context, "a plan of several jobs", _TOGETHER, instead="leave it out, or leave out --with")
        rule = known("--share", share, SHARING)
        files = [job_file, *together]
        read = partial(read_with_specs, devices_file=devices_file, allow_code=allow_code)
        found = plan_together(files, rule, limit_s=time_limit_s, seed=seed, tell=note, read=read)
        if as_json:
            print_json(found)
        else:
            show(joint_section(found))
        return
    try:
        made = plan_job(
            job_file,
            strategy,
            objective=cast(Objective, objective),
            telemetry=telemetry,
            bandwidth=bandwidth,
            latency=latency,
            nccl_tests=nccl_tests or (),
            compress=compress,
            lookahead=lookahead,
            max_gap=max_gap,
            graph=graph_file,
            top_k=top_k,
            time_limit_s=time_limit_s,
            prefer=None if prefer is None else _names(prefer),
            devices_file=devices_file,
            allow_code=allow_code,
            output=output,
            seed=seed,
            tell=note,
        )
    except NothingFits as error:
        if error.layouts and not as_json:
            show(Section(title=f"Plan: {job_file.name}", lead=["Nothing fits."], blocks=[layouts_table(error.layouts)]))
        raise
    if as_json:
        print_json(made)
    else:
        show(plan_section(made, made.job), output)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise InputError("--prefer", f"{text!r} names no objective", "for example throughput,devices,price")
    return names
