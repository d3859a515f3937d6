"""``ddltool plan JOB.yaml`` or ``ddltool plan SOURCE --devices A100=8``: which devices, how split, and how fast."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from ddltool.analyzers.deciding.candidates import STRATEGIES
from ddltool.analyzers.deciding.goal import Failures
from ddltool.analyzers.deciding.planning import SHARING, plan_together
from ddltool.analyzers.deciding.planning import plan as plan_job
from ddltool.analyzers.loading.job_inputs import read_with_specs
from ddltool.analyzers.loading.short_jobs import job_of
from ddltool.analyzers.reporting.plan_section import joint_section, layouts_table, plan_section
from ddltool.analyzers.reporting.section import Section
from ddltool.commands.options import (
    AllowCode,
    Compress,
    DevicesFile,
    Json,
    LocalLink,
    NcclTests,
    Nic,
    Output,
    Precision,
    Seed,
    SequenceLength,
    demand_part,
    one_of,
)
from ddltool.commands.output import note, print_json, progress, show
from ddltool.commands.values import number
from ddltool.decision import NothingFits, Objective
from ddltool.errors import InputError, known
from ddltool.job import Job
from ddltool.outputs import check_outputs
from ddltool.units import counted, parse_duration

_File = Path | None
_Text = str | None

_ALL = {"job", "strategy", "graph_file", "time_limit_s", "devices_file", "allow_code", "output", "seed", "as_json"}
_BARRIERS = {"lookahead", "max_gap"}
# What a job without a file reads beside its devices.
_SHORT = {"devices", "nodes", "batch_size", "precision", "sequence_length", "optimizer", "link", "nic"}
_MOST_SAMPLES = 1e30
_RUN = {"tokens", "samples", "epochs", "deadline", "budget", "mtbf"}
_AUTO = {"objective", "telemetry", "bandwidth", "latency", "nccl_tests", "compress", *_RUN}
# The options that a strategy reads beside those.
_MORE = {
    "auto": {*_AUTO, "top_k", *_BARRIERS},
    "bsp": _AUTO,
    "lb-bsp": _AUTO,
    "elastic-bsp": {*_AUTO, *_BARRIERS},
    "est": {"top_k", "prefer", "together"},
}
# What the plan of several jobs reads.
_TOGETHER = {"job", "strategy", "together", "share", "devices_file", "allow_code", "time_limit_s", "seed", "as_json"}

_HELP = "auto: compare all and pick; est: EST mapping; bsp: equal split; lb-bsp: uneven split; elastic-bsp: barriers; goodput: "
_Job = Annotated[str, typer.Argument(metavar="JOB.yaml|SOURCE", help="The job; or a model, with --devices.")]
_Strategy = Annotated[str, typer.Option(**one_of("auto", *STRATEGIES, help=f"{_HELP}count and batch."))]
_Objective = Annotated[
    str, typer.Option(**one_of(*get_args(Objective), help="auto: cheapest is per sample, same-bits on any number."))
]
_Devices = Annotated[
    _Text, typer.Option(metavar="TYPE=N,...", help="Without a job.yaml: A100=8,V100=4; or A100=8@2.5: a price.")
]
_Nodes = Annotated[int | None, typer.Option(help="Nodes that --devices stand on; as few as hold 8 by default.", min=1)]
_Batch = Annotated[
    int | None, typer.Option(help="Samples of a step on all --devices together; 8 of each by default.", min=1)
]
_Optimizer = Annotated[
    _Text, typer.Option(**one_of("none", "sgd", "momentum", "adam", "adamw", help="With --devices; adam by default."))
]
_Tokens = Annotated[_Text, typer.Option(metavar="N", help="The whole run, in tokens: 10B.")]
_Samples = Annotated[
    _Text, typer.Option(metavar="N", help="The whole run, or with --epochs one of them: 1281167, 1.2M.")
]
_Epochs = Annotated[float | None, typer.Option(help="How many times --samples.", parser=number("--epochs", 0.001))]
_Deadline = Annotated[_Text, typer.Option(metavar="TIME", help="The most that the whole run may take: 36h.")]
_Budget = Annotated[
    float | None,
    typer.Option(help="The most that it may cost, in the currency of the prices.", parser=number("--budget", 0)),
]
_Mtbf = Annotated[
    _Text,
    typer.Option(
        metavar="TIME[,TIME[,TIME]]",
        help="A device fails every 100h; with 60s a checkpoint, 300s a restart.",
    ),
]
_Telemetry = Annotated[
    _File, typer.Option(metavar="FILE", help="auto: telemetry of an earlier run, in place of the job's capabilities.")
]
_Bandwidth = Annotated[
    _Text,
    typer.Option(
        metavar="RATE", help="auto: network of a node, e.g. 100Gbit; the cluster's nic or nic_gbit by default."
    ),
]
_Lookahead = Annotated[
    int, typer.Option(help="elastic-bsp: iterations per worker up to the barrier.", min=1, max=100_000)
]
_MaxGap = Annotated[int | None, typer.Option(help="elastic-bsp: most iterations that one worker may be ahead.", min=0)]
_Graph = Annotated[
    _File,
    typer.Option(
        "--graph", metavar="FILE", help="graph.json: puts the model's parameters and their order in the plan."
    ),
]
_TopK = Annotated[int, typer.Option(help="How many different plans to show.", min=1, max=1000)]
_Limit = Annotated[
    float,
    typer.Option(
        "--time-limit", help="Solver's time limit in seconds.", metavar="SECONDS", parser=number("--time-limit", 0.01)
    ),
]
_Prefer = Annotated[
    _Text,
    typer.Option(help="est: what matters, in this order: throughput, devices, price, waste.", metavar="NAME,..."),
]
_With = Annotated[
    list[Path] | None,
    typer.Option("--with", metavar="JOB.yaml", help="est: another job on the same devices; repeat for more."),
]
_Share = Annotated[
    str,
    typer.Option(**one_of(*SHARING, help="With --with: sum or max-min of the throughputs relative to the job alone.")),
]


def plan(
    context: typer.Context,
    job: _Job,
    strategy: _Strategy = "auto",
    objective: _Objective = "fastest",
    devices: _Devices = None,
    nodes: _Nodes = None,
    batch_size: _Batch = None,
    precision: Precision = "fp32",
    sequence_length: SequenceLength = None,
    optimizer: _Optimizer = None,
    link: LocalLink = None,
    nic: Nic = None,
    tokens: _Tokens = None,
    samples: _Samples = None,
    epochs: _Epochs = None,
    deadline: _Deadline = None,
    budget: _Budget = None,
    mtbf: _Mtbf = None,
    telemetry: _Telemetry = None,
    bandwidth: _Bandwidth = None,
    latency: Annotated[str, typer.Option(metavar="TIME", help="auto: network latency.")] = "50us",
    nccl_tests: NcclTests = None,
    compress: Compress = None,
    lookahead: _Lookahead = 15,
    max_gap: _MaxGap = None,
    graph_file: _Graph = None,
    top_k: _TopK = 1,
    time_limit_s: _Limit = 10.0,
    prefer: _Prefer = None,
    together: _With = None,
    share: _Share = "sum",
    devices_file: DevicesFile = None,
    allow_code: AllowCode = False,
    output: Output = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare the ways to run a job on its devices, or plan by one, and predict the step time."""
    if strategy in get_args(Objective):
        raise InputError("--strategy", f"{strategy} is an objective", f"give --objective {strategy}")
    strategy = known("--strategy", strategy, ("auto", *STRATEGIES))
    allowed = _ALL | _MORE.get(strategy, set()) | ({"share"} if together else set())
    demand_part(context, f"--strategy {strategy}", allowed | _SHORT)
    if devices is None:
        instead = "say it in the file, or give --devices and a model in its place"
        demand_part(context, "a plan of a job.yaml", allowed, instead=instead)
    files = [*(together or []), *(nccl_tests or []), *([] if devices else [Path(job)])]
    check_outputs([telemetry, graph_file, devices_file, *files], {"-o": output})
    if together:
        demand_part(context, "a plan of several jobs", _TOGETHER, instead="leave it out, or leave out --with")
        rule = known("--share", share, SHARING)
        read = partial(read_with_specs, devices_file=devices_file, allow_code=allow_code)
        found = plan_together([Path(job), *together], rule, limit_s=time_limit_s, seed=seed, tell=note, read=read)
        print_json(found) if as_json else show(joint_section(found))
        return
    setting = {"precision": precision, "sequence_length": sequence_length, "optimizer": optimizer}
    place = {"nodes": nodes, "link": link, "nic": nic, "devices_file": devices_file}
    asked = job if devices is None else _short(job, devices, batch_size, **setting, **place)
    try:
        with progress("planning"):
            made = plan_job(
                asked,
                strategy,
                objective=cast(Objective, known("--objective", objective, get_args(Objective))),
                samples=_samples(samples, epochs, tokens),
                tokens=None if tokens is None else _amount("--tokens", tokens),
                deadline_s=math.inf if deadline is None else parse_duration(deadline, "--deadline"),
                budget=math.inf if budget is None else budget,
                failures=None if mtbf is None else _failures(mtbf),
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
            title = asked.name if isinstance(asked, Job) else Path(asked).name
            show(Section(title=f"Plan: {title}", lead=["Nothing fits."], blocks=[layouts_table(error.layouts)]))
        raise
    print_json(made) if as_json else show(plan_section(made, made.job), output)


def _short(source: str, devices: str, batch_size: int | None, **more: Any) -> Job:
    """Return the job of a model on ``--devices``, and say how its samples are split."""
    made = job_of(source, devices, batch_size=batch_size, **more)
    split = f"{counted(made.max_workers * made.batch_size, 'sample')} a step, {made.max_workers} x {made.batch_size}"
    note(f"note: {split} for logical workers" + ("; --batch-size says otherwise" if batch_size is None else ""))
    return made


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise InputError("--prefer", f"{text!r} names no objective", "for example throughput,devices,price")
    return names


def _samples(samples: str | None, epochs: float | None, tokens: str | None) -> float | None:
    """Return the samples of the whole run; None: not said, or in tokens."""
    if samples is not None and tokens is not None:
        raise InputError("--samples", "has no part beside --tokens", "give one of the two")
    if epochs is not None and samples is None:
        raise InputError("--epochs", "of how many samples is not said", "give --samples N: those of an epoch")
    found = None if samples is None else _amount("--samples", samples) * (1.0 if epochs is None else epochs)
    if found is not None and not 0 < found <= _MOST_SAMPLES:
        raise InputError("--epochs", f"makes {found:.3g} samples", f"give a run of up to {_MOST_SAMPLES:.0e}")
    return found


def _amount(option: str, text: str) -> float:
    """Return ``10B`` or ``1.2M`` as a number."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kKMBGT]?)\s*", text)
    if match is None or not float(match[1]) > 0:
        raise InputError(option, f"{text!r} is no number of them", "write 1281167, 1.2M or 10B")
    return float(match[1]) * {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}[match[2]]


def _failures(text: str) -> Failures:
    """Return ``100h,60s,300s``: time between failures of a device, of a checkpoint, of a restart."""
    parts = [parse_duration(part, "--mtbf") for part in text.split(",")]
    if len(parts) > 3 or min(parts[:2]) <= 0:
        raise InputError("--mtbf", f"is {text!r}", "write 100h, or 100h,60s,300s: failures, a checkpoint, a restart")
    return Failures(**dict(zip(("mtbf_s", "checkpoint_s", "restart_s"), parts, strict=False)))
