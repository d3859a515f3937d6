"""``ddltool simulate WORKLOAD.csv``: replay a workload on a cluster under scheduling policies."""

from __future__ import annotations

from functools import partial

import typer

from ddltool.commands import simulate_options as given
from ddltool.commands.options import Json, Output, Seed
from ddltool.commands.simulate_parts import OPTIONS
from ddltool.commands.values import as_options


@as_options(OPTIONS)
def simulate(
    context: typer.Context,
    workloads: given.Workloads = None,
    cluster: given.Cluster = None,
    traces: given.Traces = None,
    policy: given.PolicyNames = "pollux",
    interval: given.Interval = 60.0,
    restart_delay: given.RestartDelay = 30.0,
    interference: given.Interference = 0.0,
    power: given.Power = -1.0,
    react: given.React = False,
    whole_seconds: given.WholeSeconds = False,
    mtbf: given.Mtbf = "",
    repair: given.Repair = "30m",
    checkpoint_interval: given.CheckpointInterval = "10m",
    failures: given.FailureEvents = None,
    failure_seed: given.FailureSeed = 0,
    goodput: given.FittedModels = None,
    price: given.Price = "",
    metrics: given.Metrics = False,
    generate: given.Generate = None,
    sample: given.Sample = "",
    convert: given.Convert = False,
    picture: given.Picture = None,
    picture_job: given.PictureJob = None,
    picture_format: given.PictureFormat = "png",
    seeds: given.Seeds = None,
    jobs: given.Jobs = None,
    engine: given.Engine = "local",
    csv: given.Csv = None,
    compare: given.Compare = None,
    advise: given.Advise = None,
    autoscale: given.Autoscale = None,
    search: given.Search = None,
    local_batch: given.LocalBatch = "128",
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Replay a workload on a cluster under one or more scheduling policies and compare completion times."""
    from ddltool.analyzers.scheduling.simulator import Options
    from ddltool.artifacts import check_writable, save
    from ddltool.commands.output import note, print_json
    from ddltool.commands.simulate_inputs import input_files, read_inputs
    from ddltool.commands.simulate_modes import Question, answer, sweep_mode, write_jobs
    from ddltool.commands.simulate_parts import check_parts, is_sweep
    from ddltool.commands.simulate_pictures import draw, prepare_folder, watch
    from ddltool.commands.simulate_policies import policies
    from ddltool.commands.simulate_replay import replays
    from ddltool.commands.simulation_document import document_of
    from ddltool.commands.simulation_tables import show
    from ddltool.commands.workload_inputs import read_failures, read_prices, split_fitted
    from ddltool.commands.workloads import read_cluster
    from ddltool.errors import InputError
    from ddltool.outputs import demand_distinct

    check_parts(context)
    folders, files, models = list(traces or []), list(workloads or []), split_fitted(goodput or [])
    demand_distinct(
        input_files(files, folders, models, others=[cluster, failures, advise], outputs=[output, csv]),
        {"-o": output, "--csv": csv},
    )
    for path in (output, csv):
        if path is not None:
            check_writable(path)
    asked = Question(advise=advise, autoscale=autoscale, search=search, local_batch=local_batch)
    if asked.is_asked:
        made = partial(policies, policy, power, restart_delay, seed)
        timing = Options(interval_s=interval, restart_delay_s=restart_delay)
        answer(asked, folders, cluster, made, timing, output=output, as_json=as_json)
        return
    if generate is not None or convert:
        write_jobs(files, cluster, folders, generate, sample, seed, output, as_json)
        return
    if not files or cluster is None or not (folders or models):
        missing = "WORKLOAD.csv" if not files else "--cluster" if cluster is None else "--traces"
        raise InputError(missing, "is missing", "give WORKLOAD.csv, --cluster, and --traces or --goodput")
    machines = read_cluster(cluster)
    makers = policies(policy, power, restart_delay, seed, mixed=len(machines.type_names) > 1)
    options = Options(
        interval_s=interval,
        restart_delay_s=restart_delay,
        interference=interference,
        whole_seconds=whole_seconds,
        react=react,
        failures=read_failures(mtbf, repair, checkpoint_interval, failures, failure_seed, nodes=len(machines.gpus)),
    )
    prices = read_prices(price, machines)
    if is_sweep(context):
        sweep_mode(
            files,
            cluster,
            folders,
            list(makers),
            range(seeds) if seeds is not None else [seed],
            options,
            models=models,
            prices=prices,
            power=power,
            jobs=jobs or 1,
            engine=engine,
            compare=compare,
            output=output,
            csv=csv,
            as_json=as_json,
        )
        return
    if picture is not None:
        prepare_folder(picture, picture_format)
    inputs = read_inputs(files[0], folders, models, machines, sample, seed)
    watched = watch(makers) if picture is not None else {}
    done = list(
        replays(inputs.jobs, inputs.truth.applications, machines, {**makers, **watched}, options, prices=prices)
    )
    document = document_of(inputs, machines, done, options, seed, prices)
    if output is not None:
        save(document, output)
        note(f"wrote {output}")
    if picture is not None:
        draw(picture, done, watched, job=picture_job, file_format=picture_format)
    if as_json:
        print_json(document)
    else:
        show(document, more=metrics or options.failures is not None or prices is not None, classes=metrics)
