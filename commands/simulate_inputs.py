"""What a replay of ``ddltool simulate`` reads: jobs, and the truth about their applications."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.cluster import ClusterSpec
    from ddltool.analyzers.scheduling.job import JobSpec
    from ddltool.analyzers.scheduling.truth import Application
    from ddltool.commands.workload_inputs import FittedText


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """How fast and how far per step the applications train; ``source`` and ``assumed`` say where that is from."""

    applications: dict[str, Application]
    source: str
    assumed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """One workload and its truth; ``remark`` says how a cluster's trace became one."""

    workload: Path
    jobs: list[JobSpec]
    remark: str
    truth: Truth


def check_models(jobs: Sequence[JobSpec], models: Sequence[FittedText]) -> None:
    """Raise InputError for a fitted model of an application that no job has."""
    from ddltool.errors import InputError, did_you_mean

    known = {job.application for job in jobs}
    for model in models:
        if model.application not in known:
            problem = f"{model.application!r} is no application of the workload"
            raise InputError("--goodput", problem, did_you_mean(model.application, known))


def read_truth(jobs: Sequence[JobSpec], folders: Sequence[Path], models: Sequence[FittedText]) -> Truth:
    """Return the truth about the jobs' applications: fitted ``models`` where there are some, else traces.

    Raises InputError for an application with neither, and for files that cannot be read.
    """
    from ddltool.commands.workload_inputs import read_fitted
    from ddltool.commands.workloads import read_applications
    from ddltool.errors import InputError

    fitted, assumed = read_fitted(models)
    measured = [job.application for job in jobs if job.application not in fitted]
    if measured and not folders:
        raise InputError(
            "--traces", f"are missing for application {measured[0]!r}", "give --traces or --goodput for it"
        )
    sources = [*(["measured traces"] if measured else []), *(["fitted models"] if fitted else [])]
    return Truth(
        applications=fitted | read_applications(folders, measured),
        source=" and ".join(sources),
        assumed=tuple(assumed),
    )


def read_inputs(
    workload: Path,
    folders: Sequence[Path],
    models: Sequence[FittedText],
    machines: ClusterSpec,
    sample: str = "",
    seed: int = 0,
) -> Inputs:
    """Read one workload, or a cluster's trace, and its truth; tell on stderr what is assumed. Raises InputError."""
    from ddltool.commands.output import note
    from ddltool.commands.simulate_progress import reading
    from ddltool.commands.workload_inputs import read_jobs, read_templates

    with reading(workload):
        jobs, remark = read_jobs(workload, lambda: read_templates(folders, machines), sample, seed)
    check_models(jobs, models)
    truth = read_truth(jobs, folders, models)
    for text in filter(None, [remark, *truth.assumed]):
        note(text)
    return Inputs(workload=workload, jobs=jobs, remark=remark, truth=truth)


def input_files(
    workloads: Sequence[Path],
    folders: Sequence[Path],
    models: Sequence[FittedText],
    others: Sequence[Path | None],
    outputs: Sequence[Path | None],
) -> list[Path | str | None]:
    """Return all files that are read, so that no output is one of them."""
    return [*workloads, *others, *(model.file for model in models), *_trace_files(folders, outputs)]


def _trace_files(folders: Sequence[Path], outputs: Sequence[Path | None]) -> list[Path]:
    """Return the measured traces, where an output could be one of them."""
    if all(path is None or not path.exists() for path in outputs):
        return []
    return [path for folder in folders for path in folder.glob("*/*.csv")]
