"""What ``ddltool simulate`` does beside one replay: sweeps, workloads to write, and questions about one job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.simulator import Options, Policy
    from ddltool.commands.workload_inputs import FittedText


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """At most one of the questions is asked."""

    advise: Path | None
    autoscale: str | None
    search: str | None
    local_batch: str

    @property
    def is_asked(self) -> bool:
        """Return whether one is."""
        return any(each is not None for each in (self.advise, self.autoscale, self.search))


def answer(
    asked: Question,
    traces: Sequence[Path],
    cluster: Path | None,
    policies: Callable[..., Mapping[str, Callable[[], Policy]]],
    timing: Options,
    *,
    output: Path | None,
    as_json: bool,
) -> None:
    """Answer the question. ``policies(mixed=)``: the makers of the policies asked for. Raises InputError."""
    from ddltool.artifacts import save
    from ddltool.commands.advise import advise_job, show_advice
    from ddltool.commands.autoscale import autoscale_job, show_autoscaling, show_search
    from ddltool.commands.output import note, print_json
    from ddltool.errors import InputError

    show: Callable[[Mapping[str, Any]], None]
    if asked.advise is not None:
        document, show = advise_job(asked.advise), show_advice
    elif "" in (asked.autoscale, asked.search):
        option = "--autoscale" if asked.autoscale is not None else "--hyperparameter-search"
        raise InputError(option, "the application's name is empty", "name one that has a folder in --traces")
    elif not traces:
        raise InputError("--traces", "is missing", "give the folder of measured applications")
    elif asked.autoscale is not None:
        made = autoscale_job(traces, asked.autoscale, restart_delay_s=timing.restart_delay_s)
        document, show = made, show_autoscaling
    else:
        document, show = _search(asked, traces, cluster, policies, timing), show_search
    if output is not None:
        save(document, output)
        note(f"wrote {output}")
    if as_json:
        print_json(document)
    else:
        show(document)


def _search(
    asked: Question,
    traces: Sequence[Path],
    cluster: Path | None,
    policies: Callable[..., Mapping[str, Callable[[], Policy]]],
    timing: Options,
) -> dict[str, Any]:
    from ddltool.analyzers.scheduling.hyperparameter_search import Search
    from ddltool.commands.autoscale import search_trials
    from ddltool.commands.values import integers
    from ddltool.commands.workloads import read_cluster
    from ddltool.errors import InputError

    if cluster is None:
        raise InputError("--cluster", "is missing", "give the nodes that the trials share")
    first, *others = integers(asked.local_batch, "--local-batch", ordered=False)  # the first is the baseline
    made = policies(mixed=len(read_cluster(cluster).type_names) > 1)
    search = Search(application=asked.search or "", local_batch_size=first)
    return search_trials(traces, cluster, search, made, timing, local_batch_sizes=others)


def sweep_mode(
    workloads: Sequence[Path],
    cluster: Path,
    traces: Sequence[Path],
    policies: Sequence[str],
    seeds: Sequence[int],
    options: Options,
    *,
    models: Sequence[FittedText],
    prices: Mapping[str, float] | None,
    power: float,
    jobs: int,
    engine: str,
    compare: str | None,
    output: Path | None,
    csv: Path | None,
    as_json: bool,
) -> None:
    """Replay everything and print means, or the comparison of two policies. Raises CheckFailed where a replay failed."""
    from ddltool.commands.output import print_json
    from ddltool.commands.sweep import sweep
    from ddltool.commands.sweep_output import compare_document, show_comparison, show_sweep
    from ddltool.errors import CheckFailed, InputError

    pair = [name.strip() for name in compare.split(",")] if compare is not None else []
    if compare is not None and (len(pair) != 2 or not set(pair) <= set(policies)):
        raise InputError("--compare", f"is {compare!r}", f"two policies of those replayed: {', '.join(policies)}")
    document = sweep(
        workloads,
        cluster,
        traces,
        policies,
        seeds,
        options,
        models=models,
        prices=prices,
        power=power,
        jobs=jobs,
        engine=engine,
        output=output,
        table=csv,
    )
    comparison = compare_document(document, compare) if compare else None
    if as_json:
        print_json(document if comparison is None else {**document, "comparison": comparison})
    else:
        show_sweep(document)
        if comparison is not None:
            show_comparison(comparison)
    failed = [record for record in document["cells"] if record["error"]]
    if failed:
        raise CheckFailed(
            f"{len(failed)} of {document['cells_wanted']} replays failed; the first: {failed[0]['error']}"
        )


def write_jobs(
    workloads: Sequence[Path],
    cluster: Path | None,
    folders: Sequence[Path],
    generate: str | None,
    sample: str,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Write a synthetic or converted workload as CSV to ``output``, by default to standard output."""
    from dataclasses import asdict

    from ddltool.analyzers.scheduling.generator import generate as make
    from ddltool.commands.output import note, print_json
    from ddltool.commands.simulate_progress import reading
    from ddltool.commands.workload_inputs import read_jobs, read_pattern, read_templates, write_workload
    from ddltool.commands.workloads import read_cluster
    from ddltool.errors import InputError

    if len(workloads) > 1:
        raise InputError("WORKLOAD.csv", f"is given {len(workloads)} times", "one trace at a time is converted")
    workload = workloads[0] if workloads else None
    machines = read_cluster(cluster) if cluster is not None else None
    if generate is not None:
        if workload is not None:
            raise InputError("--generate", f"and the workload {workload} are two", "give one of them")
        pattern = read_pattern(generate, seed=seed)
        fields = ",".join(f"{key}={value}" for key, value in asdict(pattern).items())
        jobs, source = make(pattern, read_templates(folders, machines)), f"synthetic: {fields}"
        remark = source
    else:
        if workload is None:
            raise InputError("--convert", "needs a trace", "give a Philly (JSON) or Helios (CSV) trace")
        with reading(workload):
            jobs, remark = read_jobs(workload, lambda: read_templates(folders, machines), sample, seed)
        if not remark:
            raise InputError(str(workload), "is a workload already", "give a Philly (JSON) or Helios (CSV) trace")
        source = f"{workload.name}; applications drawn by size class, {sample or 'all jobs'}, seed={seed}"
    if as_json:
        if output is not None:
            write_workload(jobs, source, output)
        print_json(
            {"kind": "ddltool.workload", "schema_version": 1, "source": remark, "jobs": [asdict(job) for job in jobs]}
        )
        return
    write_workload(jobs, source, output or Path("-"))
    note(f"{remark}; wrote {len(jobs)} jobs to {output or 'standard output'}")
