"""What the commands that replay share: their options, and what these say as the setup of a replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ddltool.analyzers.scheduling.cluster import ClusterSpec, Failures
from ddltool.analyzers.scheduling.inputs import FittedModel, read_cluster, read_events
from ddltool.analyzers.scheduling.metrics import check_prices
from ddltool.analyzers.scheduling.policies import POLICIES, policies
from ddltool.analyzers.scheduling.replay import Setup
from ddltool.analyzers.scheduling.simulator import Options, Policy
from ddltool.analyzers.scheduling.truth import FittedJob
from ddltool.artifacts import check_outputs
from ddltool.commands.options import as_options, integers, is_given, number, pairs, some_of, within
from ddltool.commands.output import note
from ddltool.errors import InputError, known
from ddltool.fixtures.loading import folder
from ddltool.units import parse_duration

PolicyNames = Annotated[str, some_of(*POLICIES, "all")]


FailureSeed = Annotated[int, within(0)]


def _named(text: str, where: str) -> str:
    if not text:
        raise InputError(where, "is empty", "name an application that has a folder in --traces")
    return text


Application = Annotated[str, _named]


def read_setup(context: typer.Context) -> tuple[Setup, ClusterSpec, Mapping[str, Callable[[], Policy]]]:
    """Return what a replay's options say: the setup, its cluster, and what makes each policy. Raises InputError."""
    given = context.params
    _check_partners(context)
    models = _fitted(given["goodput"] or [])
    cluster, folders = shipped_or(given["cluster"], given["traces"], fitted=bool(models))
    read = [*given.get("workloads", [given.get("workload")]), cluster, given["failures"], *(one.file for one in models)]
    written = {"-o": given["output"], "--csv": given.get("csv")}
    if any(written.values()):
        read += [path for each in folders for path in each.glob("*/*.csv")]
    check_outputs(read, written)
    machines = read_cluster(cluster)
    makers = read_policies(given, machines)
    options = Options(
        interval_s=given["interval"],
        restart_delay_s=given["restart_delay"],
        interference=given["interference"],
        whole_seconds=given["whole_seconds"],
        react=given["react"],
        failures=_failures(given, len(machines.gpus)),
    )
    prices = _prices(given["price"], machines)
    setup = Setup(cluster=cluster, traces=folders, options=options, models=models, prices=prices, power=given["power"])
    return setup, machines, makers


def read_policies(given: Mapping[str, Any], machines: ClusterSpec) -> Mapping[str, Callable[[], Policy]]:
    """Return what makes each policy that ``--policy`` names."""
    mixed = len(machines.type_names) > 1
    return policies(given["policy"], given["power"], given["restart_delay"], given.get("seed", 0), mixed=mixed)


def shipped_traces() -> list[Path]:
    """Return the folder of the applications that ship."""
    return [folder() / "workloads" / "traces"]


def shipped_or(cluster: Path | None, traces: Sequence[Path] | None, *, fitted: bool = False) -> tuple[Path, list[Path]]:
    """Return the cluster and the traces that are given, or what ships where there are no traces, nor fitted models.

    Raises InputError for traces without a cluster.
    """
    if not traces and not fitted:
        if cluster is None:
            note("--cluster and --traces are not given: 4 nodes of 4 GPUs and two applications that ship with ddltool")
        return cluster or folder() / "workloads" / "cluster.yaml", shipped_traces()
    if cluster is None:
        raise InputError("--cluster", "is missing", "give the nodes and their GPUs")
    return cluster, list(traces or [])


def _check_partners(context: typer.Context) -> None:
    """Raise InputError for an option that is read with another one only, which is not there."""
    drawn, fails = is_given(context, "mtbf"), is_given(context, "failures")
    for name in ("repair", "failure_seed"):
        if is_given(context, name) and not drawn:
            remedy = "events say themselves when a node is back" if fails else "say how often nodes fail"
            raise InputError(f"--{name.replace('_', '-')}", "needs --mtbf", remedy)
    if is_given(context, "checkpoint_interval") and not (drawn or fails):
        raise InputError("--checkpoint-interval", "needs --mtbf or --failures", "say how often nodes fail")
    names = {name.strip() for name in context.params["policy"].split(",")}
    if is_given(context, "power") and names <= {*POLICIES} - {"pollux"}:
        problem = f"has no part in --policy {context.params['policy']}"
        raise InputError("--power", problem, "leave it out, or replay pollux, which alone reads it")


def _fields(text: str, where: str, readers: Mapping[str, Callable[[str, str], Any]]) -> dict[str, Any]:
    """Return the values of ``key=value,key=value``. Raises InputError for unknown or repeated keys and bad values."""
    found = pairs(text, where, "KEY=VALUE", ",".join(f"{key}=1" for key in readers))
    return {key: readers[known(where, key, list(readers))](value, f"{where}:{key}") for key, value in found.items()}


def _whole(text: str, where: str) -> int:
    return integers(text, where)[0]


def _fitted(texts: Sequence[str]) -> list[FittedModel]:
    """Return the models of each ``APP=FILE,noise=..,samples=..,batch=..[,max-batch=..,max-local=..]``. Reads no file.

    The default limits of the batch size: 64 M0 over all replicas, M0 on one GPU.
    """
    made: dict[str, FittedModel] = {}
    for text in texts:
        head, _, given = text.partition(",")
        name, equals, file = head.partition("=")
        if not (equals and name and file):
            raise InputError("--goodput", f"is {text!r}", "APP=FILE,noise=SAMPLES,samples=TOTAL,batch=M0")
        if name in made:
            raise InputError("--goodput", f"gives {name} twice", "one model per application")
        where = f"--goodput {name}"
        readers = {"noise": number(), "samples": number(), "batch": _whole, "max-batch": _whole, "max-local": _whole}
        fields = _fields(given, where, readers)
        for key in ("noise", "samples", "batch"):
            if key not in fields:
                raise InputError(where, f"lacks {key}", "noise=SAMPLES,samples=TOTAL,batch=M0 are needed")
        with as_options({name: f"{where}:{name}" for name in readers}):
            job = FittedJob(
                noise_scale=fields["noise"],
                total_samples=fields["samples"],
                batch_size=fields["batch"],
                max_batch_size=fields.get("max-batch", 64 * fields["batch"]),
                max_local_batch_size=fields.get("max-local", fields["batch"]),
            )
        made[name] = FittedModel(application=name, file=Path(file), job=job, given=given)
    return list(made.values())


def _failures(given: Mapping[str, Any], nodes: int) -> Failures | None:
    """Return what goes wrong, None when neither a time between failures nor a file of events is given."""
    mtbf, events = given["mtbf"], given["failures"]
    made = Failures(
        mtbf_s=parse_duration(mtbf, "--mtbf") if mtbf else None,
        repair_s=parse_duration(given["repair"], "--repair"),
        checkpoint_interval_s=parse_duration(given["checkpoint_interval"], "--checkpoint-interval"),
        events=read_events(events, nodes) if events is not None else (),
        seed=given["failure_seed"],
    )
    return made if mtbf or events is not None else None


def _prices(text: str, cluster: ClusterSpec) -> dict[str, float] | None:
    """Return the price per GPU hour by type from ``0.5`` (all types) or ``T4=0.35,A100=2``; None for no text."""
    if not text:
        return None
    if "=" in text:
        made = _fields(text, "--price", dict.fromkeys(cluster.type_names, number()))
    else:
        made = dict.fromkeys(cluster.type_names, number()(text, "--price"))
    check_prices(made, cluster, "--price")
    return made
