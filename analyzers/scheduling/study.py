"""A workload on a cluster under policies: what ``ddltool simulate`` and ``ddltool.simulate`` replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ddltool.analyzers.scheduling.cluster import ClusterSpec
from ddltool.analyzers.scheduling.failures import Failures
from ddltool.analyzers.scheduling.inputs import FittedModel, read_cluster, read_jobs, read_templates, read_truth
from ddltool.analyzers.scheduling.metrics import check_prices
from ddltool.analyzers.scheduling.policies import policies
from ddltool.analyzers.scheduling.replay import OnRound, replays, simulation
from ddltool.analyzers.scheduling.simulator import Options, Policy
from ddltool.errors import InputError
from ddltool.simulation_results import SimulationDocument
from ddltool.stages import Stage, Tell, log_remark, quietly


def simulate(
    workload: str | Path,
    cluster: str | Path,
    traces: str | Path | Sequence[str | Path] = (),
    *,
    policy: str | Sequence[str] = "pollux",
    interval_s: float = 60.0,
    restart_delay_s: float = 30.0,
    interference: float = 0.0,
    power: float = -1.0,
    react: bool = False,
    failures: Failures | None = None,
    models: Sequence[FittedModel] = (),
    prices: Mapping[str, float] | None = None,
    seed: int = 0,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> SimulationDocument:
    """Replay a workload on a cluster under scheduling policies and compare completion times.

    ``workload``: a CSV, or a Philly or Helios trace; ``cluster``: a cluster.yaml; ``traces``: folders of measured applications.
    ``policy``: names, or all. ``models`` stand for applications without traces, ``prices`` are per GPU hour and type, the rest
    is as the options of ``ddltool simulate``. Raises InputError for what cannot be read, and jobs that can never run.
    """
    machines = read_cluster(Path(cluster))
    names = policy if isinstance(policy, str) else ",".join(policy)
    makers = policies(names, power, restart_delay_s, seed, mixed=len(machines.type_names) > 1)
    options = Options(
        interval_s=interval_s,
        restart_delay_s=restart_delay_s,
        interference=interference,
        react=react,
        failures=failures,
    )
    if prices is not None:
        check_prices(dict(prices), machines, "prices")
    folders = [Path(one) for one in ([traces] if isinstance(traces, (str, Path)) else traces)]
    return study(
        Path(workload),
        machines,
        makers,
        options,
        folders=folders,
        models=models,
        prices=prices,
        seed=seed,
        tell=tell,
        stage=stage,
    )


def study(
    workload: Path,
    machines: ClusterSpec,
    makers: Mapping[str, Callable[[], Policy]],
    options: Options,
    *,
    folders: Sequence[Path],
    models: Sequence[FittedModel],
    prices: Mapping[str, float] | None,
    seed: int,
    jobs: int | None = None,
    hours: float | None = None,
    sample_seed: int | None = None,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> SimulationDocument:
    """Return the record of a workload under policies; ``jobs`` and ``hours`` sample a cluster's trace."""
    with stage(f"reading {workload.name}"):
        drawn_from = partial(read_templates, folders, machines)
        drawn = seed if sample_seed is None else sample_seed
        specs, remark = read_jobs(workload, drawn_from, jobs=jobs, hours=hours, seed=drawn)
        if not remark and (jobs, hours, sample_seed) != (None, None, None):
            raise InputError("--sample", f"{workload} is a workload", "sample from a cluster's trace")
        truth = read_truth(specs, folders, models)
    for text in filter(None, [remark, *truth.assumed]):
        tell(text)
    watch = partial(watched, stage=stage, jobs=len(specs))
    done = list(replays(specs, truth.applications, machines, makers, options, prices=prices, watch=watch))
    return simulation(str(workload), remark, truth, machines, done, options, seed, prices)


@contextmanager
def watched(title: str, *, stage: Stage, jobs: int) -> Iterator[OnRound]:
    """Show how far a replay of ``jobs`` jobs is."""
    with stage(title, jobs) as advance:
        yield lambda finished, now_s: advance(
            finished, f"{finished} of {jobs} jobs, {now_s / 3600:,.1f} simulated hours"
        )
