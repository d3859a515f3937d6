"""``ddltool plan JOB.yaml`` or ``ddltool plan SOURCE --devices A100=8``: which devices, how split, and how fast."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

from ddltool.analyzers.answers.reporting.command_section import command_section
from ddltool.analyzers.answers.reporting.islands_section import islands_section
from ddltool.analyzers.answers.reporting.plan_choices import layouts_table
from ddltool.analyzers.answers.reporting.plan_section import joint_section, plan_section
from ddltool.analyzers.answers.reporting.section import Section
from ddltool.analyzers.job.planning.candidates import STRATEGIES
from ddltool.analyzers.job.planning.commands import Knob, NodeOfDevices, knobs_of, plan_command, plan_recorded
from ddltool.analyzers.job.planning.islands import OuterOptions, island_texts, link_of, plan_islands
from ddltool.analyzers.job.planning.job_inputs import (
    Offered,
    graph_of,
    job_of,
    offered,
    powers,
    read_prices,
    read_with_specs,
    samples_of,
    scanned,
    with_prices,
    with_rates,
    written_in,
)
from ddltool.analyzers.job.planning.numerics import best_of
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
    number,
    one_of,
    some_of,
    within,
)
from ddltool.commands.output import answer, note, progress, show
from ddltool.commands.plan_options import (
    BY_ALL,
    BY_STRATEGY,
    EVERY,
    OF_COMMAND,
    OF_ISLANDS,
    OF_MODEL,
    OF_RUN,
    OF_STEP,
    OUTER,
    SAVED,
    TOGETHER,
    each_part,
    failures_of,
    named_numerics,
    read_amount,
    read_every,
    read_memory_checkpoint,
    read_names,
    read_ranks,
    read_strategy,
    total_samples,
)
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
from ddltool.units import counted, parse_bandwidth, parse_duration, show_hours, show_money, show_seconds


@verb
def plan(
    job: Annotated[Source | Job | Mapping[str, Any] | list[str], AS_TEXT],
    strategy: Annotated[str, one_of("auto", *STRATEGIES), read_strategy] = "auto",
    *,
    objective: Annotated[Objective, one_of(*get_args(Objective))] = "fastest",
    devices: Annotated[Devices | None, {"type": str}] = None,
    batch: Any = None,
    link_between: str | None = None,
    outer_every: Annotated[Sequence[int], {"reader": read_every, "metavar": "H,H,..."}] = EVERY,
    fragments: Annotated[int, within(1, 100_000)] = 1,
    overlap: Annotated[int, within(0, 100_000)] = 1,
    outer_bits: Annotated[int, within(4, 32)] = 32,
    price: str | None = None,
    nodes: Annotated[int | None, within(1)] = None,
    batch_size: Annotated[int | None, within(1)] = None,
    precision: Annotated[str, some_of(*NAMES), each_part(precision_name)] = "fp32",
    sequence_length: Annotated[int | None, within(1)] = None,
    optimizer: Annotated[str | None, some_of(*OPTIMIZER["choices"]), each_part(OPTIMIZER["reader"])] = None,
    compile: bool = False,
    channels_last: bool = False,
    attention: Annotated[Attention | None, one_of(*get_args(Attention))] = None,
    offload: Annotated[Offload, one_of(*get_args(Offload))] = "auto",
    lora: Annotated[int | str | None, {"metavar": "RANK[,RANK]"}, read_ranks] = None,
    load_in_4bit: bool = False,
    link: LocalLink = None,
    nic: str | None = None,
    vary: Sequence[str] = (),
    limit: Annotated[float, number(0)] = LIMIT_S,
    keep_files: bool = False,
    tokens: Annotated[float | None, read_amount] = None,
    samples: Annotated[float | None, read_amount] = None,
    epochs: Annotated[float | None, number(0.001)] = None,
    deadline_s: Annotated[float, parse_duration] = math.inf,
    budget: Annotated[float, number(0)] = math.inf,
    mtbf_s: Annotated[float | None, parse_duration] = None,
    checkpoint_s: Annotated[float | None, parse_duration] = None,
    storage: Annotated[float | None, parse_bandwidth, {"metavar": "RATE"}] = None,
    checkpoint_copy_s: Annotated[float | None, parse_duration] = None,
    memory_checkpoint: Annotated[tuple[float, float], {"reader": read_memory_checkpoint, "metavar": "TIME,SHARE"}] = (
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
    prefer: Annotated[Sequence[str] | None, read_names] = None,
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
        # A model as an object is planned by a name that it has within this call.
        if devices is None:
            raise InputError("devices", "is missing", "name them, such as 8xH100,4xA100")
        if isinstance(job, (Job, list)):
            raise InputError("batch", "has no part beside a job or a command, which has its own", "leave it out")
        taken = {"job", "batch", "tell", "stage"}
        # Only what the caller gave: the call below refuses given arguments that have no effect.
        given = {name: value for name, value in locals().items() if is_given(name) and name not in taken}
        if batch is not None and batch_size is None:
            given["batch_size"] = total_batch(batch, devices_text(devices))
        with named(job, batch) as text:
            # No command line says an object, so that the plan has no command.
            return plan(text, **given, tell=tell, stage=stage).model_copy(update={"command": []})
    assert isinstance(job, (str, Path, Job, list))
    cluster = devices if isinstance(devices, Cluster) else None
    devices = None if devices is None else devices_text(devices)
    # Islands, whose devices have a + between them.
    if devices is not None and cluster is None and not isinstance(job, (Job, list)) and len(island_texts(devices)) > 1:
        demand_part("a plan of islands", OF_ISLANDS)
        if link_between is None:
            raise InputError("--link-between", "is missing", "say what joins the islands: 1Gbit, or 1Gbit,30ms")
        between, numerics = link_of(link_between), named_numerics(precision, optimizer, lora)
        check_outputs([], {"-o": output})
        if len(numerics) > 1:
            raise InputError("a plan of islands", "names several precisions, optimizers or ranks", "give one of each")
        outer = OuterOptions(every=outer_every, fragments=fragments, overlap=overlap, bits=outer_bits)
        tests = tuple(nccl_tests)
        options = PlanOptions(
            bandwidth=bandwidth, latency=latency, nccl_tests=tests, limit_s=time_limit_s, seed=seed, tell=tell
        )
        islands_plan = plan_islands(
            str(job),
            devices,
            between,
            outer,
            options,
            **numerics[0],
            batch_size=batch_size,
            stage=stage,
            link=link,
            nic=nic,
            sequence_length=sequence_length,
            compile=compile,
            channels_last=channels_last,
            devices_file=devices_file,
        )
        if output is not None:
            save(islands_plan, output)
        return islands_plan
    refuse("a plan of devices on one network", OUTER, instead="separate islands by +: --devices 8xH100+8xA100")
    # A step that was recorded, or is to be.
    recorded = None if is_command(job) else _recorded(job)
    step = job if is_command(job) else recorded
    if step is not None:
        if recorded is not None:
            refuse("the plan of a file's step", OF_COMMAND, instead="give the command that trains after --")
        demand_part("the plan of a recorded step", OF_STEP | OF_COMMAND, instead=IN_SCRIPT)
        if devices is None:
            raise InputError("--devices", "is missing", "name those of a node, such as 8xH100")
        check_outputs([str(job)] if isinstance(job, str) else [], {"-o": output})
        run_samples = total_samples(samples, epochs, tokens)
        _demand_length(Goal(samples=run_samples if tokens is None else tokens, deadline_s=deadline_s, budget=budget))
        offers = offered(devices)
        prices = {} if price is None else read_prices(price, [offer.type for offer in offers])
        network = {"link": link, "nic": nic, "bandwidth": bandwidth, "nccl_tests": nccl_tests}
        # The default of ``latency`` is for jobs; here each device's network has its own.
        network["latency"] = latency if is_given("latency") else None
        tried = _plan_of_step(
            step,
            [replace(offer, price_per_hour=prices.get(offer.type, offer.price_per_hour)) for offer in offers],
            known_devices(devices_file),
            network,
            knobs=knobs_of(vary),
            limit_s=limit,
            keep_files=keep_files,
            tell=tell,
            stage=stage,
        )
        run: dict[str, float | None] = {"run_samples": run_samples, "run_tokens": tokens}
        run |= {"deadline_s": deadline_s, "budget": budget}
        tried = tried.model_copy(update={name: None if value == math.inf else value for name, value in run.items()})
        if tokens is not None and all(one.row is None or not one.row.tokens_per_s for one in tried.tried):
            raise InputError("--tokens", "the recorded steps read no tokens", "give --samples")
        _demand_within_limits(tried)
        if output is not None:
            save(tried, output)
        return tried
    # A job: of a file, of a program, or of a model whose options describe it.
    assert not isinstance(job, list)
    refuse("the plan of a job", OF_COMMAND, instead="give the command that trains after --")
    strategy = known("strategy", strategy, ("auto", *STRATEGIES))
    read_by_all = BY_ALL | BY_STRATEGY.get(strategy, set())
    demand_part(f"--strategy {strategy}", read_by_all | OF_MODEL)
    if strategy == "est":
        refuse(
            "--strategy est", {"nic", "link"}, instead="leave it out: logical workers are placed by their compute alone"
        )
    source = None if isinstance(job, Job) or cluster is not None else str(job)  # None: no command line says them
    jobs: list[Job] = []  # with ``devices``: one for each of the named numerics
    remarks: list[str] = []  # on what was taken for granted; told once the job is known to be good
    if devices is None:
        instead = "say it in the file, or give --devices and a model in its place"
        demand_part("a plan of a job.yaml", read_by_all, instead=instead)
        if source is not None and ":" in source and not Path(source).exists():  # FILE:FACTORY, timm:NAME
            raise InputError("--devices", f"is missing beside the model {source}", "name them, such as 8xH100")
    elif isinstance(job, Job):
        raise InputError("devices", "has no part beside a Job, which has its own", "leave it out")
    else:
        jobs = _described_jobs(
            str(job),
            devices,
            cluster,
            named_numerics(precision, optimizer, lora, load_in_4bit),
            remarks.append,
            nodes=nodes,
            batch_size=batch_size,
            link=link,
            nic=nic,
            bandwidth=bandwidth,
            devices_file=devices_file,
            sequence_length=sequence_length,
            compile=compile,
            channels_last=channels_last,
            offload=offload,
            attention=attention,
        )
        job = jobs[0]
    run_samples = total_samples(samples, epochs, tokens)
    job_file = Path(job.name) if isinstance(job, Job) else Path(job)

    def read_job(job_or_file: Job | Path) -> Job:
        """Return the job with the specs of its devices, and the prices that ``price`` gives."""
        found = read_with_specs(job_or_file, devices_file, allow_code=allow_code)
        return found if price is None else with_prices(found, price)

    known_job = read_job(job if isinstance(job, Job) else job_file)
    check_outputs(_files_of(known_job, job_file.parent), {"-o": output, "--save": save_job})
    traced = graph_of(known_job, job_file.parent, None if graph is None else Path(graph))
    known_job = scanned(known_job, traced, tell)
    goal = Goal(
        objective=objective,
        samples=samples_of(known_job, traced, tokens) if run_samples is None else run_samples,
        deadline_s=deadline_s,
        budget=budget,
        failures=failures_of(
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
        """Return the whole plan of a job. Raises Infeasible if it has none."""
        one = with_rates(one, str(job_file), remarks.append)
        try:
            solved = solve(strategy, one, job_file, options)
        except Infeasible:
            tell_remarks()
            raise
        tell_remarks()
        return complete(solved, one, job_file, options)

    def tell_remarks() -> None:
        """Tell the remarks, each once."""
        while remarks:
            tell(remarks.pop(0))

    if len(jobs) > 1:
        # The jobs differ in their numerics alone, so that all have the first one's samples of a step.
        step_samples = known_job.max_workers * known_job.batch_size
        known_job, result = best_of([read_job(one) for one in jobs], planned, replace(goal, step_samples=step_samples))
    else:
        result = planned(known_job)
    if source is not None:
        words = [source] if devices is None else [source, "--devices", devices]
        words += given_options({"job", "devices", "output", "save_job", "time_limit_s", *OF_RUN})
        result = result.model_copy(update={"command": words})
    if save_job is not None:
        write_text(save_job, to_yaml(written_in(known_job, Path(save_job).parent)))
        # Of the given options, those that are needed again beside the saved job.
        if again := [word for word in given_options(SAVED) if word.startswith("--")]:
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
    """Print the plan with what else was compared; of several jobs, the plan of each.

    ``together``: the files of further jobs on the same devices; ``share``: what all are planned for, a ``SHARING``.
    ``output``: the file that the plan is written to. Raises Infeasible if no variant of a command fits.
    """
    if together:
        if call["strategy"] != "est":
            refuse(f"--strategy {call['strategy']}", {"together"}, instead="give --strategy est")
        demand_part("a plan of several jobs", TOGETHER, instead="leave it out, or leave out --with")
        read = partial(read_with_specs, devices_file=call["devices_file"], allow_code=call["allow_code"])
        files, limit_s, seed = [Path(call["job"]), *together], call["time_limit_s"], call["seed"]
        joint = plan_together(files, share, limit_s=limit_s, seed=seed, tell=note, read=read)
        answer(joint, lambda: joint_section(joint), as_json)
        return
    refuse("a plan of one job", {"share"}, instead="name the other jobs by --with")
    try:
        # Recordings and islands show progress of their own.
        with nullcontext() if is_command(call["job"]) or "+" in (call["devices"] or "") else progress("planning"):
            result = call()
    except NothingFits as error:
        # With -v, before the error: how much the layouts lack that come nearest.
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
        least = result.tried[0]  # the one with the least memory
        raise Infeasible(f"memory: {least.command} fits on none of these devices, nor does any of its variants")


def _plan_of_step(
    step: str | Sequence[str] | Graph,
    offers: Sequence[Offered],
    known: DeviceTable,
    network: Mapping[str, Any],
    *,
    knobs: Sequence[Knob],
    **recording: Any,
) -> CommandPlan:
    """Return the predicted steps of a recorded graph, or of a command and its variants, on each type of devices.

    Args:
        step: the recorded graph, or the command.
        offers: the types of devices, with the number of each in a node.
        known: the device table.
        network: arguments of :func:`fabric_of` by name.
        knobs: options of the command with the values that are tried; every combination is a variant.
        recording: further arguments of :func:`plan_command` by name.

    Raises InputError for an offer of no device, and as :func:`plan_command` does.
    """
    types_of_none = [offer.type for offer in offers if offer.count == 0]
    if types_of_none:
        raise InputError("--devices", f"offers no {types_of_none[0]}", "give at least one, or leave it out")
    # The prices of the offers go before those of the table.
    priced = [
        known.device(offer.type, "--devices").model_copy(update={"price_per_hour": offer.price_per_hour})
        for offer in offers
        if offer.price_per_hour is not None
    ]
    table = known.with_devices(priced)

    def costs(node: NodeOfDevices) -> tuple[CostModel, Fabric]:
        """Return (cost model of a node's devices, network between them)."""
        device = table.device(node.device)
        return cost_model(device, calibration()), fabric_of(device, gpus_per_node=node.count, **network)

    if isinstance(step, Graph):
        return plan_recorded(step, offers, table=table, costs=costs)
    return plan_command(step, offers, knobs, table=table, costs=costs, **recording)


def _described_jobs(
    source: str,
    devices: str,
    cluster: Cluster | None,
    numerics: Sequence[Mapping[str, Any]],
    tell: Tell,
    **options: Any,
) -> list[Job]:
    """Return one job for each of the ``numerics``: that of a model on devices.

    Args:
        source: the model.
        devices: such as "8xA100,4xV100".
        cluster: the nodes of these devices, from which links and network cards are taken; None: not known.
        numerics: combinations of precision, optimizer and rank of LoRA, as fields of a job.
        tell: is called with a remark on the samples of a step.
        options: further arguments of :func:`job_of` by name, ``batch_size`` among them.
    """
    jobs = [job_of(source, devices, **options, **each) for each in numerics]
    if cluster is not None:
        jobs = [on_cluster(job, cluster) for job in jobs]
    workers, samples = jobs[0].max_workers, jobs[0].batch_size  # the same in all of them
    split = f"{counted(workers * samples, 'sample')} a step, {workers} x {samples}"
    hint = "; --batch-size says otherwise" if options["batch_size"] is None else ""
    tell(f"note: {split} for logical workers{hint}")
    return jobs


def _recorded(job: str | Path | Job | list[str]) -> Graph | None:
    """Return the graph of a file that holds a recorded step; None: ``job`` is something else, such as a job in JSON.

    A file that is missing is None too: what reads it as a job raises the error.
    """
    if isinstance(job, Job) or not is_graph_file(job) or (str(job) != "-" and not Path(job).is_file()):
        return None
    if read_document(Path(job)).get("kind") != "ddltool.graph":
        return None
    graph = read_graph(job)
    return graph if graph.recorded is not None else None


def _demand_within_limits(plan: CommandPlan) -> None:
    """Raise Infeasible where variants of a command fit in memory and none of them keeps the deadline and the budget.

    Raises InputError for a budget where no variant has a price.
    """
    fitting = [one for one in plan.tried if one.row is not None and one.row.fits]
    if plan.best is not None or not fitting:
        return
    costs = [cost for one in fitting if (cost := plan.cost(one)) is not None]
    if plan.budget is not None and not costs:
        raise InputError("--budget", "limits a price, and no device has one", "give --price, such as A100=1.5")
    broken = []
    if plan.deadline_s is not None:
        fastest_hours = min(hours for one in fitting if (hours := plan.hours(one)) is not None)
        broken.append(
            f"deadline: the fastest run takes {show_hours(fastest_hours)}, {show_seconds(plan.deadline_s)} allowed"
        )
    if plan.budget is not None:
        broken.append(f"budget: the cheapest run costs {show_money(min(costs))}, {show_money(plan.budget)} allowed")
    raise Infeasible(f"{plan.command}: no variant keeps all limits: {'; '.join(broken)}")


def _demand_length(goal: Goal) -> None:
    """Raise InputError for a goal that limits the time or price of the whole run without saying how many samples it has."""
    for option, limit in (("--deadline", goal.deadline_s), ("--budget", goal.budget)):
        if limit < math.inf and goal.samples is None:
            problem = "limits a whole run, and how long that is nobody says"
            raise InputError(option, problem, "give --samples or --tokens")


def _files_of(job: Job, folder: Path) -> list[Path]:
    """Return the paths of the files that a job names, which are relative to ``folder``."""
    names = [name for offer in job.devices for name in (offer.profile, offer.goodput)]
    names += [job.cluster, None if job.network == LINKS else job.network]
    return [folder / name for name in names if name]
