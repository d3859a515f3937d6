"""``ddltool workload generate`` and ``convert``: workloads for ``simulate``, drawn by chance or from a cluster's trace."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from ddltool.analyzers.scheduling.cluster import ClusterSpec
from ddltool.analyzers.scheduling.generator import PATTERNS, Pattern
from ddltool.analyzers.scheduling.inputs import generated, read_cluster, read_jobs, read_templates, workload_csv
from ddltool.artifacts import write_text
from ddltool.commands.options import Seed, one_of
from ddltool.commands.output import note, print_json, progress
from ddltool.commands.replays import shipped_or
from ddltool.errors import InputError
from ddltool.simulation_results import WorkloadResult


def workload_generate(
    jobs: int = 160,
    hours: float = 8.0,
    pattern: Annotated[str, one_of(*PATTERNS)] = "diurnal",
    cluster: Path | None = None,
    traces: list[Path] | None = None,
    pollux: bool = False,
    seed: Seed = 0,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Write a synthetic workload: jobs of the applications that have traces, or of Pollux's."""
    asked = Pattern(jobs=jobs, hours=hours, pattern=pattern, seed=seed)
    machines, folders = _drawn_from(cluster, traces, pollux)
    _write(generated(asked, folders, machines), output, as_json)


def workload_convert(
    trace: Path,
    jobs: int | None = None,
    hours: float | None = None,
    cluster: Path | None = None,
    traces: list[Path] | None = None,
    pollux: bool = False,
    seed: Seed = 0,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Write the trace of a cluster as a workload: each job stands for an application of its size class."""
    machines, folders = _drawn_from(cluster, traces, pollux)
    with progress(f"reading {trace.name}"):
        templates = partial(read_templates, folders, machines)
        found, remark = read_jobs(trace, templates, jobs=jobs, hours=hours, seed=seed)
    if not remark:
        raise InputError(str(trace), "is a workload already", "give a cluster's: Philly, Helios, Acme, Alibaba")
    note(remark)
    drawn = ",".join(f"{name}={value:g}" for name, value in (("jobs", jobs), ("hours", hours)) if value is not None)
    source = f"{trace.name}; applications drawn by size class, {drawn or 'all jobs'}, seed={seed}"
    _write(WorkloadResult(source=source, jobs=found), output, as_json)


def _drawn_from(cluster: Path | None, traces: list[Path] | None, pollux: bool) -> tuple[ClusterSpec | None, list[Path]]:
    """Return the cluster and the folders of the applications that jobs are drawn from; no folders: Pollux's."""
    if pollux and traces:
        raise InputError("--pollux", "has no part beside --traces", "give one of the two")
    if pollux or (traces and cluster is None):
        return read_cluster(cluster) if cluster else None, traces or []
    nodes, folders = shipped_or(cluster, traces)
    return read_cluster(nodes), folders


def _write(found: WorkloadResult, output: Path | None, as_json: bool) -> None:
    """Write a workload as CSV to ``output``, by default to standard output."""
    if output is not None or not as_json:
        write_text(output or Path("-"), workload_csv(found))
    if as_json:
        print_json(found)
    else:
        note(f"{found.source}; wrote {len(found.jobs)} jobs to {output or 'standard output'}")
