"""``ddltool plan JOB.yaml`` or ``ddltool plan SOURCE --devices A100=8``: which devices, how split, and how fast."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Annotated, get_args

import typer

from ddltool.analyzers.deciding.candidates import STRATEGIES
from ddltool.analyzers.deciding.goal import Failures
from ddltool.analyzers.deciding.planning import SHARING, plan_together
from ddltool.analyzers.deciding.planning import plan as plan_job
from ddltool.analyzers.loading.job_inputs import job_of, read_with_specs
from ddltool.analyzers.reporting.plan_section import joint_section, layouts_table, plan_section
from ddltool.analyzers.reporting.section import Section
from ddltool.commands.declaring import called
from ddltool.commands.options import OPTIMIZER, LocalLink, Precision, Seed, demand_part, number, one_of, within
from ddltool.commands.output import answer, note, progress, show
from ddltool.decision import NothingFits, Objective
from ddltool.errors import InputError, known
from ddltool.job import Job
from ddltool.units import counted, parse_duration

_ALL = {"job", "strategy", "graph_file", "time_limit_s", "devices_file", "allow_code", "output", "seed", "as_json"}
_BARRIERS = {"lookahead", "max_gap"}
# What a job without a file reads beside its devices.
_SHORT = {"devices", "nodes", "batch_size", "precision", "sequence_length", "optimizer", "link", "nic"}
_MOST_SAMPLES = 1e30
_RUN = {"tokens", "samples", "epochs", "deadline_s", "budget", "failures"}
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


def _strategy(text: str, option: str) -> str:
    if text in get_args(Objective):
        raise InputError(option, f"{text} is an objective", f"give --objective {text}")
    return known(option, text, ("auto", *STRATEGIES))


def _names(text: str, option: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise InputError(option, f"{text!r} names no objective", "for example throughput,devices,price")
    return names


def _samples(samples: float | None, epochs: float | None, tokens: float | None) -> float | None:
    """Return the samples of the whole run; None: not said, or in tokens."""
    if samples is not None and tokens is not None:
        raise InputError("--samples", "has no part beside --tokens", "give one of the two")
    if epochs is not None and samples is None:
        raise InputError("--epochs", "of how many samples is not said", "give --samples N: those of an epoch")
    found = None if samples is None else samples * (1.0 if epochs is None else epochs)
    if found is not None and not 0 < found <= _MOST_SAMPLES:
        raise InputError("--epochs", f"makes {found:.3g} samples", f"give a run of up to {_MOST_SAMPLES:.0e}")
    return found


def _amount(text: str, option: str) -> float:
    """Return ``10B`` or ``1.2M`` as a number."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kKMBGT]?)\s*", text)
    if match is None or not float(match[1]) > 0:
        raise InputError(option, f"{text!r} is no number of them", "write 1281167, 1.2M or 10B")
    return float(match[1]) * {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}[match[2]]


def _failures(text: str, option: str) -> Failures:
    """Return ``100h,60s,300s``: time between failures of a device, of a checkpoint, of a restart."""
    parts = [parse_duration(part, option) for part in text.split(",")]
    if len(parts) > 3 or min(parts[:2]) <= 0:
        raise InputError(option, f"is {text!r}", "write 100h, or 100h,60s,300s: failures, a checkpoint, a restart")
    return Failures(**dict(zip(("mtbf_s", "checkpoint_s", "restart_s"), parts, strict=False)))


def plan(
    context: typer.Context,
    job: str,
    strategy: Annotated[str, one_of("auto", *STRATEGIES), _strategy] = "auto",
    objective: Annotated[Objective, one_of(*get_args(Objective))] = "fastest",
    devices: str | None = None,
    nodes: Annotated[int | None, within(1)] = None,
    batch_size: Annotated[int | None, within(1)] = None,
    precision: Precision = "fp32",
    sequence_length: Annotated[int | None, within(1)] = None,
    optimizer: Annotated[str | None, OPTIMIZER] = None,
    link: LocalLink = None,
    nic: str | None = None,
    tokens: Annotated[float | None, _amount] = None,
    samples: Annotated[float | None, _amount] = None,
    epochs: Annotated[float | None, number(0.001)] = None,
    deadline_s: Annotated[float, parse_duration] = math.inf,
    budget: Annotated[float, number(0)] = math.inf,
    failures: Annotated[Failures | None, _failures] = None,
    telemetry: Path | None = None,
    bandwidth: str | None = None,
    latency: str = "50us",
    nccl_tests: list[Path] | None = None,
    compress: str | None = None,
    lookahead: Annotated[int, within(1, 100_000)] = 15,
    max_gap: Annotated[int | None, within(0)] = None,
    graph_file: Path | None = None,
    top_k: Annotated[int, within(1, 1000)] = 1,
    time_limit_s: Annotated[float, number(0.01)] = 10.0,
    prefer: Annotated[tuple[str, ...] | None, _names] = None,
    together: list[Path] | None = None,
    share: Annotated[str, one_of(*SHARING)] = "sum",
    devices_file: Path | None = None,
    allow_code: bool = False,
    output: Path | None = None,
    seed: Seed = 0,
    as_json: bool = False,
) -> None:
    """Compare the ways to run a job on its devices, or plan by one, and predict the step time."""
    allowed = _ALL | _MORE.get(strategy, set()) | ({"share"} if together else set())
    demand_part(context, f"--strategy {strategy}", allowed | _SHORT)
    if devices is None:
        instead = "say it in the file, or give --devices and a model in its place"
        demand_part(context, "a plan of a job.yaml", allowed, instead=instead)
    if together:
        demand_part(context, "a plan of several jobs", _TOGETHER, instead="leave it out, or leave out --with")
        read = partial(read_with_specs, devices_file=devices_file, allow_code=allow_code)
        found = plan_together([Path(job), *together], share, limit_s=time_limit_s, seed=seed, tell=note, read=read)
        answer(found, lambda: joint_section(found), as_json)
        return
    asked = job if devices is None else _short(context, job, batch_size)
    try:
        with progress("planning"):
            made = called(context, plan_job, job=asked, samples=_samples(samples, epochs, tokens), graph=graph_file)
    except NothingFits as error:
        if error.layouts and not as_json:
            title = asked.name if isinstance(asked, Job) else Path(asked).name
            show(Section(title=f"Plan: {title}", lead=["Nothing fits."], blocks=[layouts_table(error.layouts)]))
        raise
    answer(made, lambda: plan_section(made, made.job), as_json, output)


def _short(context: typer.Context, job: str, batch_size: int | None) -> Job:
    """Return the job of a model on ``--devices``, and say how its samples are split."""
    made = called(context, job_of, source=job)
    split = f"{counted(made.max_workers * made.batch_size, 'sample')} a step, {made.max_workers} x {made.batch_size}"
    note(f"note: {split} for logical workers" + ("; --batch-size says otherwise" if batch_size is None else ""))
    return made
