"""``ddltool plan JOB.yaml`` or ``ddltool plan SOURCE --devices A100=8``: which devices, how split, and how fast."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

from ddltool.analyzers.answers.reporting.command_section import command_section
from ddltool.analyzers.answers.reporting.islands_section import islands_section
from ddltool.analyzers.answers.reporting.plan_section import joint_section, layouts_table, plan_section
from ddltool.analyzers.answers.reporting.section import Section
from ddltool.analyzers.job.planning.candidates import STRATEGIES
from ddltool.analyzers.job.planning.commands import NodeOfDevices, knobs_of, plan_command, plan_recorded
from ddltool.analyzers.job.planning.failures import Failures
from ddltool.analyzers.job.planning.islands import OuterOptions, island_texts, link_of, plan_islands
from ddltool.analyzers.job.planning.job_inputs import (
    Offered,
    graph_of,
    job_of,
    offered,
    powers,
    read_with_specs,
    samples_of,
    scanned,
    with_prices,
    written_in,
)
from ddltool.analyzers.job.planning.numerics import best_of, combinations
from ddltool.analyzers.job.planning.options import Goal, PlanOptions
from ddltool.analyzers.job.planning.planning import SHARING, complete, plan_together, solve
from ddltool.analyzers.step.communication.collectives import parse_compression
from ddltool.analyzers.step.communication.fabrics import fabric_of
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.costs.model import CostModel, cost_model
from ddltool.analyzers.step.recording.command import LIMIT_S, is_command
from ddltool.analyzers.step.tracing.sources import Source, is_graph_file
from ddltool.artifacts import check_outputs, read_document, save, to_yaml, write_text
from ddltool.commands.handed import Devices, devices_text, is_model, named, on_cluster, total_batch
from ddltool.commands.options import (
    AS_TEXT,
    IN_SCRIPT,
    OPTIMIZER,
    VOICE,
    LocalLink,
    Seed,
    integers,
    number,
    one_of,
    share,
    some_of,
    within,
)
from ddltool.commands.output import answer, note, progress, show
from ddltool.commands.verbs import VerbCall, demand_part, given_options, is_given, refuse, verb
from ddltool.decision import NothingFits, Objective
from ddltool.device import DeviceTable
from ddltool.errors import Infeasible, InputError, known
from ddltool.graph import Graph, read_graph
from ddltool.graph_results import CommandPlan
from ddltool.island_results import IslandsPlan
from ddltool.job import LINKS, Attention, Cluster, Job, Offload
from ddltool.plans import Plan
from ddltool.precision import NAMES, precision_name
from ddltool.shipped import calibration, known_devices
from ddltool.stages import Stage, Tell, log_remark, quietly
from ddltool.units import counted, parse_bandwidth, parse_duration

_ALL = {"job", "strategy", "graph", "time_limit_s", "devices_file", "allow_code", "output", "seed", "as_json", "price"}
_BARRIERS = {"lookahead", "max_gap"}
# What a job without a file reads beside its devices.
_MODEL = {
    "devices",
    "nodes",
    "batch_size",
    "precision",
    "sequence_length",
    "optimizer",
    "compile",
    "offload",
    "attention",
    "lora",
    "link",
    "nic",
    "save_job",
}
# What a job.yaml holds of the options, and what is no part of an answer.
_SAVED = {*_MODEL, *_ALL, "bandwidth"} - {"strategy", "graph"}
_MOST_SAMPLES = 1e30
_FAILURES = {
    "mtbf_s",
    "checkpoint_s",
    "storage",
    "checkpoint_copy_s",
    "memory_checkpoint",
    "restart_s",
    "repair_s",
    "spares",
    "notice_s",
}
_RUN = {"tokens", "samples", "epochs", "deadline_s", "budget", *_FAILURES}
# A checkpoint where nobody says what it takes.
# How long a failed device is away where spares are asked for and nobody says.
_AWAY_S = 14_400.0
_CHECKPOINT_S = 60.0
_AUTO = {"objective", "telemetry", "bandwidth", "latency", "nccl_tests", "compress", *_RUN}
# The options that a strategy reads beside those.
_MORE = {
    "auto": {*_AUTO, "top_k", *_BARRIERS},
    "bsp": _AUTO,
    "lb-bsp": _AUTO,
    "elastic-bsp": {*_AUTO, *_BARRIERS},
    "est": {"top_k", "prefer", "together"},
}
# What the plan of a recorded step reads, and what one that is to be recorded reads beside.
_STEP = {"job", "devices", "link", "nic", "bandwidth", "latency", "nccl_tests", "devices_file", "output", "as_json"}
_COMMAND = {"vary", "limit", "keep_files"}
# What the plan of islands on a slow link reads, and what says how they meet.
_OUTER = {"link_between", "outer_every", "fragments", "overlap", "outer_bits"}
_ISLANDS = {*_STEP, *_MODEL, *_OUTER, "time_limit_s", "seed"} - {"nodes", "save_job", "offload", "attention"}
_EVERY = (1, 8, 64, 500)
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
        raise InputError("samples", "has no part beside --tokens", "give one of the two")
    if epochs is not None and samples is None:
        raise InputError("epochs", "of how many samples is not said", "give --samples N: those of an epoch")
    total = None if samples is None else samples * (1.0 if epochs is None else epochs)
    if total is not None and not 0 < total <= _MOST_SAMPLES:
        raise InputError("epochs", f"makes {total:.3g} samples", f"give a run of up to {_MOST_SAMPLES:.0e}")
    return total


def _amount(text: str, option: str) -> float:
    """Return ``10B`` or ``1.2M`` as a number."""
    match = re.fullmatch(r"\s*(-?[0-9]{1,18}(?:\.[0-9]{1,9})?(?:e[0-9]{1,2})?)\s*([kKMBGT]?)\s*", text)
    if match is None:
        raise InputError(option, f"{text!r} is no number of them", "write 1281167, 1.2M or 10B")
    if not float(match[1]) > 0:
        raise InputError(option, f"is {text.strip()}", "give a number above 0: 1281167, 1.2M or 10B")
    return float(match[1]) * {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}[match[2]]


def _each(read: Callable[[str, str], Any]) -> Callable[[str, str], str]:
    """Return the reader of a list with commas, each part of which another reader takes."""

    def read_all(text: str, option: str) -> str:
        return ",".join(dict.fromkeys(str(read(part.strip(), option)) for part in text.split(",")))

    return read_all


def _lora_ranks(given: int | str | None, option: str) -> list[int | None]:
    """Return ``none,16`` as [None, 16]: all parameters are trained, and LoRA of rank 16."""
    parts = [part.strip() for part in str(given or "none").split(",")]
    rank = number(1, 4096, whole=True)
    return list(dict.fromkeys(None if part in ("none", "full") else int(rank(part, option)) for part in parts))


def _named_numerics(precision: str, optimizer: str | None, lora: int | str | None) -> list[dict[str, Any]]:
    """Return every combination of the named values as fields of a job; a precision that is not given is the job's own."""
    return combinations(
        precision.split(",") if is_given("precision") else [None],
        [None] if optimizer is None else optimizer.split(","),
        _lora_ranks(lora, "--lora"),
    )


def _ranks(text: str, option: str) -> str:
    return ",".join("none" if rank is None else str(rank) for rank in _lora_ranks(text, option))


def _every(text: str, option: str) -> tuple[int, ...]:
    """Return the inner steps between outer steps in ``1,8,64``."""
    return integers(text, option, most=10_000_000)


def _memory_checkpoint(text: str, option: str) -> tuple[float, float]:
    """Return ``5s,90%``: the seconds of a checkpoint in a neighbour's memory, the share of failures that it outlasts."""
    time_text, comma, share_text = text.partition(",")
    if not comma:
        raise InputError(option, f"is {text!r}", "write its time and the share of failures that it outlasts: 5s,90%")
    return parse_duration(time_text, option), share(share_text, option)


def _failures(
    mtbf_s: float | None,
    checkpoint_s: float | None,
    storage: float | None,
    copy_s: float | None,
    memory: tuple[float, float],
    **others: Any,
) -> Failures | None:
    """Return the failures that the options say; None: nothing fails. Raises InputError for options that say nothing."""
    if mtbf_s is None:
        for name in sorted(_FAILURES):
            if is_given(name):
                raise InputError(name, "needs --mtbf", "say how often a device fails: --mtbf 100h")
        return None
    if checkpoint_s is not None and storage is not None:
        raise InputError("storage", "has no part beside --checkpoint-write, which is its time", "give one of the two")
    if others["spares"] and not others["repair_s"]:  # where another device is there at once, spares have no part
        if is_given("repair_s"):
            raise InputError("spares", "have no part where failed devices are back at once", "give --repair 4h, or so")
        others["repair_s"] = _AWAY_S
    write_s = _CHECKPOINT_S if checkpoint_s is None else checkpoint_s
    stop_s, beside_s = (write_s, 0.0) if copy_s is None else (copy_s, write_s)
    if not stop_s:
        raise InputError("checkpoint_s" if copy_s is None else "checkpoint_copy_s", "is 0 s", "give a time above 0")
    memory_s, outlasts = memory
    return Failures(
        mtbf_s=mtbf_s, checkpoint_s=stop_s, write_s=beside_s, memory_s=memory_s, memory_share=outlasts, **others
    )


@verb
def plan(
    job: Annotated[Source | Job | Mapping[str, Any] | list[str], AS_TEXT],
    strategy: Annotated[str, one_of("auto", *STRATEGIES), _strategy] = "auto",
    *,
    objective: Annotated[Objective, one_of(*get_args(Objective))] = "fastest",
    devices: Annotated[Devices | None, {"type": str}] = None,
    batch: Any = None,
    link_between: str | None = None,
    outer_every: Annotated[Sequence[int], {"reader": _every, "metavar": "H,H,..."}] = _EVERY,
    fragments: Annotated[int, within(1, 100_000)] = 1,
    overlap: Annotated[int, within(0, 100_000)] = 1,
    outer_bits: Annotated[int, within(4, 32)] = 32,
    price: str | None = None,
    nodes: Annotated[int | None, within(1)] = None,
    batch_size: Annotated[int | None, within(1)] = None,
    precision: Annotated[str, some_of(*NAMES), _each(precision_name)] = "fp32",
    sequence_length: Annotated[int | None, within(1)] = None,
    optimizer: Annotated[str | None, some_of(*OPTIMIZER["choices"]), _each(OPTIMIZER["reader"])] = None,
    compile: bool = False,
    attention: Annotated[Attention | None, one_of(*get_args(Attention))] = None,
    offload: Annotated[Offload, one_of(*get_args(Offload))] = "auto",
    lora: Annotated[int | str | None, {"metavar": "RANK[,RANK]"}, _ranks] = None,
    link: LocalLink = None,
    nic: str | None = None,
    vary: Sequence[str] = (),
    limit: Annotated[float, number(0)] = LIMIT_S,
    keep_files: bool = False,
    tokens: Annotated[float | None, _amount] = None,
    samples: Annotated[float | None, _amount] = None,
    epochs: Annotated[float | None, number(0.001)] = None,
    deadline_s: Annotated[float, parse_duration] = math.inf,
    budget: Annotated[float, number(0)] = math.inf,
    mtbf_s: Annotated[float | None, parse_duration] = None,
    checkpoint_s: Annotated[float | None, parse_duration] = None,
    storage: Annotated[float | None, parse_bandwidth, {"metavar": "RATE"}] = None,
    checkpoint_copy_s: Annotated[float | None, parse_duration] = None,
    memory_checkpoint: Annotated[tuple[float, float], {"reader": _memory_checkpoint, "metavar": "TIME,SHARE"}] = (
        0.0,
        0.0,
    ),
    restart_s: Annotated[float, parse_duration] = 300.0,
    repair_s: Annotated[float, parse_duration] = 0.0,
    spares: Annotated[int, within(0, 100_000)] = 0,
    notice_s: Annotated[float, parse_duration] = 0.0,
    telemetry: str | Path | None = None,
    bandwidth: str | None = None,
    latency: str = "50us",
    nccl_tests: Sequence[Path] = (),
    compress: str | None = None,
    lookahead: Annotated[int, within(1, 100_000)] = 15,
    max_gap: Annotated[int | None, within(0)] = None,
    graph: str | Path | None = None,
    top_k: Annotated[int, within(1, 1000)] = 1,
    time_limit_s: Annotated[float, number(0.01)] = 10.0,
    prefer: Annotated[Sequence[str] | None, _names] = None,
    devices_file: Path | None = None,
    allow_code: bool = False,
    save_job: str | Path | None = None,
    output: str | Path | None = None,
    seed: Seed = 0,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> Plan | CommandPlan | IslandsPlan:
    """Compare the ways to run a job on its devices, or plan by one, and predict the step time.

    ``job``: a job.yaml, a Job or its fields as a dict; or with ``devices`` (``"8xA100,4xV100"``, a dict of counts, a Cluster) a
    model as :func:`ddltool.predict` takes it, with a ``batch`` that each device has. ``strategy``: auto, bsp, lb-bsp,
    elastic-bsp, est or goodput; ``samples`` (an epoch's, where ``epochs`` are given) or ``tokens``: of the whole run, which
    takes at most ``deadline_s`` and costs at most ``budget``; the rest as the options of ``ddltool plan``. ``save_job``: where
    the job that the options describe is written as YAML; ``output``: where the plan is; neither is a file of the job's. Raises
    InputError, and Infeasible, which names the job's file and the constraint.

    With ``devices`` (those of a node: ``8xH100,4xA100``) ``job`` may be the words of a command that trains: it and, where
    options of its own ``vary`` (``["--batch-size 4,8"]``), each combination of their values is recorded and predicted; or a
    graph.json of a recorded step, which is predicted. Both return a CommandPlan, the fastest that fits first.

    ``devices`` with ``+`` between islands (``8xH100+8xA100``), which ``link_between`` joins: an IslandsPlan, for each number
    of inner steps in ``outer_every``, in ``fragments`` of ``outer_bits``, each hidden behind ``overlap`` inner steps.
    """
    if isinstance(job, Mapping):
        job = Job.from_dict(job)
    if is_model(job) or batch is not None:
        if devices is None:
            raise InputError("devices", "is missing", "name them, such as 8xH100,4xA100")
        if isinstance(job, (Job, list)):
            raise InputError("batch", "has no part beside a job or a command, which has its own", "leave it out")
        taken = {"job", "batch", "tell", "stage"}
        given = {name: value for name, value in locals().items() if is_given(name) and name not in taken}
        if batch is not None and batch_size is None:
            given["batch_size"] = total_batch(batch, devices_text(devices))
        with named(job, batch) as text:
            return plan(text, **given, tell=tell, stage=stage).model_copy(update={"command": []})
    assert isinstance(job, (str, Path, Job, list))
    cluster = devices if isinstance(devices, Cluster) else None
    devices = None if devices is None else devices_text(devices)
    if devices is not None and cluster is None and not isinstance(job, (Job, list)) and len(island_texts(devices)) > 1:
        demand_part("a plan of islands", _ISLANDS)
        if link_between is None:
            raise InputError("--link-between", "is missing", "say what joins the islands: 1Gbit, or 1Gbit,30ms")
        check_outputs([], {"-o": output})
        each = PlanOptions(
            bandwidth=bandwidth,
            latency=latency,
            nccl_tests=tuple(nccl_tests),
            limit_s=time_limit_s,
            seed=seed,
            tell=tell,
        )
        [model, *others] = _named_numerics(precision, optimizer, lora)
        if others:
            raise InputError("a plan of islands", "names several precisions, optimizers or ranks", "give one of each")
        model |= {"sequence_length": sequence_length, "compile": compile, "devices_file": devices_file}
        outer = OuterOptions(every=outer_every, fragments=fragments, overlap=overlap, bits=outer_bits)
        meeting = plan_islands(
            str(job), devices, link_of(link_between), outer, each, batch_size=batch_size, stage=stage, link=link, nic=nic,
            **model,
        )  # fmt: skip
        if output is not None:
            save(meeting, output)
        return meeting
    refuse("a plan of devices on one network", _OUTER, instead="separate islands by +: --devices 8xH100+8xA100")
    recorded = _recorded(job)
    if is_command(job) or recorded is not None:
        if not is_command(job):
            refuse("the plan of a file's step", _COMMAND, instead="give the command that trains after --")
        demand_part("the plan of a recorded step", _STEP | _COMMAND, instead=IN_SCRIPT)
        if devices is None:
            raise InputError("--devices", "is missing", "name those of a node, such as 8xH100")
        check_outputs([str(job)] if isinstance(job, str) else [], {"-o": output})
        table, offers = _priced(known_devices(devices_file), offered(devices))
        if none := [offer.type for offer in offers if offer.count == 0]:
            raise InputError("--devices", f"offers no {none[0]}", "give at least one, or leave it out")
        network: dict[str, Any] = {"link": link, "nic": nic, "bandwidth": bandwidth, "nccl_tests": nccl_tests}
        costs = partial(_costs, table, latency=latency if is_given("latency") else None, **network)
        if is_command(job):
            run: dict[str, Any] = {"limit_s": limit, "keep_files": keep_files, "tell": tell, "stage": stage}
            tried = plan_command(job, offers, knobs_of(vary), table=table, costs=costs, **run)
        else:
            assert recorded is not None
            tried = plan_recorded(recorded, offers, table=table, costs=costs)
        if output is not None:
            save(tried, output)
        return tried
    assert not isinstance(job, list)
    # What no command line says: a Job, a Cluster.
    jobs, words = list[Job](), [] if isinstance(job, Job) or cluster is not None else [str(job)]
    refuse("the plan of a job", _COMMAND, instead="give the command that trains after --")
    strategy = known("strategy", strategy, ("auto", *STRATEGIES))
    read_by_all = _ALL | _MORE.get(strategy, set())
    demand_part(f"--strategy {strategy}", read_by_all | _MODEL)
    if devices is None:
        instead = "say it in the file, or give --devices and a model in its place"
        demand_part("a plan of a job.yaml", read_by_all, instead=instead)
    elif isinstance(job, Job):
        raise InputError("devices", "has no part beside a Job, which has its own", "leave it out")
    else:
        described = partial(
            job_of,
            str(job),
            devices,
            nodes=nodes,
            batch_size=batch_size,
            link=link,
            nic=nic,
            bandwidth=bandwidth,
            devices_file=devices_file,
            sequence_length=sequence_length,
            compile=compile,
            offload=offload,
            attention=attention,
        )
        jobs = [described(**numerics) for numerics in _named_numerics(precision, optimizer, lora)]
        if cluster is not None:
            jobs = [on_cluster(one, cluster) for one in jobs]
        job = jobs[0]
        split = f"{counted(job.max_workers * job.batch_size, 'sample')} a step, {job.max_workers} x {job.batch_size}"
        tell(f"note: {split} for logical workers" + ("; --batch-size says otherwise" if batch_size is None else ""))
    run_samples = _samples(samples, epochs, tokens)
    job_file = Path(job.name) if isinstance(job, Job) else Path(job)

    def known_of(one: Job | Path) -> Job:
        found = read_with_specs(one, devices_file, allow_code=allow_code)
        return found if price is None else with_prices(found, price)

    known_job = known_of(job if isinstance(job, Job) else job_file)
    check_outputs(_named(known_job, job_file.parent), {"-o": output, "--save": save_job})
    traced = graph_of(known_job, job_file.parent, None if graph is None else Path(graph))
    known_job = scanned(known_job, traced, tell)
    goal = Goal(
        objective=objective,
        samples=samples_of(known_job, traced, tokens) if run_samples is None else run_samples,
        deadline_s=deadline_s,
        budget=budget,
        failures=_failures(
            mtbf_s,
            checkpoint_s,
            storage,
            checkpoint_copy_s,
            memory_checkpoint,
            restart_s=restart_s,
            repair_s=repair_s,
            spares=spares,
            notice_s=notice_s,
        ),
        power_w=powers(known_job, str(job_file)),
    )
    _demand_length(goal)
    options = PlanOptions(
        goal=goal,
        storage_bytes_per_s=storage,
        graph=traced,
        telemetry=None if telemetry is None else Path(telemetry),
        bandwidth=bandwidth,
        latency=latency,
        nccl_tests=tuple(nccl_tests),
        compress=None if compress is None else parse_compression(compress),
        top_k=top_k,
        limit_s=time_limit_s,
        seed=seed,
        lookahead=lookahead,
        max_gap=max_gap,
        prefer=None if prefer is None else tuple(prefer),
        saved_as="" if output is None else str(output),
        tell=tell,
    )

    def planned(one: Job) -> Plan:
        return complete(solve(strategy, one, job_file, options), one, job_file, options)

    if len(jobs) > 1:
        step_samples = known_job.max_workers * known_job.batch_size
        known_job, result = best_of([known_of(one) for one in jobs], planned, replace(goal, step_samples=step_samples))
    else:
        result = planned(known_job)
    if words:
        words += ["--devices", devices] if devices is not None else []
        words += given_options({"job", "devices", "output", "save_job", "time_limit_s", *_RUN})
        result = result.model_copy(update={"command": words})
    if save_job is not None:
        write_text(save_job, to_yaml(written_in(known_job, Path(save_job).parent)))
        if again := [word for word in given_options(_SAVED) if word.startswith("--")]:
            tell(f"note: {save_job} does not hold {', '.join(again)}: give that again with it")
    if output is not None:
        save(result, output)
    return result


def show_plan(
    call: VerbCall[Plan | CommandPlan | IslandsPlan],
    *,
    together: list[Path] | None = None,
    share: Annotated[str, one_of(*SHARING)] = "sum",
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Print the plan with what else was compared; of several jobs, the plan of each."""
    if together:
        if call["strategy"] != "est":
            refuse(f"--strategy {call['strategy']}", {"together"}, instead="give --strategy est")
        demand_part("a plan of several jobs", _TOGETHER, instead="leave it out, or leave out --with")
        read = partial(read_with_specs, devices_file=call["devices_file"], allow_code=call["allow_code"])
        files, limit_s, seed = [Path(call["job"]), *together], call["time_limit_s"], call["seed"]
        joint = plan_together(files, share, limit_s=limit_s, seed=seed, tell=note, read=read)
        answer(joint, lambda: joint_section(joint), as_json)
        return
    refuse("a plan of one job", {"share"}, instead="name the other jobs by --with")
    try:
        with nullcontext() if is_command(call["job"]) or "+" in (call["devices"] or "") else progress("planning"):
            result = call()
    except NothingFits as error:
        if error.layouts and VOICE.verbose and not as_json:
            lead = ["Nothing fits."]
            show(Section(title=f"Plan: {Path(call['job']).name}", lead=lead, blocks=[layouts_table(error.layouts)]))
        raise
    if isinstance(result, Plan):
        answer(result, partial(plan_section, result, result.job), as_json, output)
        return
    if isinstance(result, IslandsPlan):
        answer(result, partial(islands_section, result), as_json, output)
        return
    answer(result, partial(command_section, result), as_json, output)
    if result.best is None:
        least = result.tried[0]
        raise Infeasible(f"memory: {least.command} fits on none of these devices, nor does any of its variants")


def _costs(table: DeviceTable, node: NodeOfDevices, **network: Any) -> tuple[CostModel, Fabric]:
    """Return what times steps on a node's devices, and their network as the options say."""
    device = table.device(node.device)
    return cost_model(device, calibration()), fabric_of(device, gpus_per_node=node.count, **network)


def _recorded(job: str | Path | Job | list[str]) -> Graph | None:
    """Return the graph of a file that holds a recorded step; None: ``job`` is something else."""
    if isinstance(job, Job) or not is_graph_file(job) or (str(job) != "-" and not Path(job).is_file()):
        return None
    if read_document(Path(job)).get("kind") != "ddltool.graph":
        return None
    graph = read_graph(job)
    return graph if graph.recorded is not None else None


def _priced(table: DeviceTable, offers: Sequence[Offered]) -> tuple[DeviceTable, list[Offered]]:
    """Return the table with the prices that an option gives."""
    priced = [
        table.device(one.type, "--devices").model_copy(update={"price_per_hour": one.price_per_hour})
        for one in offers
        if one.price_per_hour is not None
    ]
    return table.with_devices(priced), list(offers)


def _demand_length(goal: Goal) -> None:
    """Raise InputError where the whole run has a limit and nobody says how long it is."""
    for option, limit in (("--deadline", goal.deadline_s), ("--budget", goal.budget)):
        if limit < math.inf and goal.samples is None:
            problem = "limits a whole run, and how long that is nobody says"
            raise InputError(option, problem, "give --samples or --tokens")


def _named(job: Job, folder: Path) -> list[Path]:
    """Return the files that a job names."""
    names = [name for offer in job.devices for name in (offer.profile, offer.goodput)]
    names += [job.cluster, None if job.network == LINKS else job.network]
    return [folder / name for name in names if name]
