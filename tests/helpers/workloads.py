"""What replays are tried on: the workload that ships, applications whose times are a formula, every policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddltool.analyzers.cluster.cluster import ClusterSpec
from ddltool.analyzers.cluster.inputs import read_applications, read_cluster, read_workload
from ddltool.analyzers.cluster.job import JobSpec
from ddltool.analyzers.cluster.policies import POLICIES
from ddltool.analyzers.cluster.policies.gangs import Tiresias
from ddltool.analyzers.cluster.simulator import SimulationResult
from ddltool.analyzers.cluster.truth import Application, Limits, MeasuredTimes, Validation
from ddltool.artifacts import save
from ddltool.goodput_model import Goodput
from tests.conftest import throughput

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "workloads"
EVERY: dict[str, Callable[[], Any]] = {**POLICIES, "tiresias": lambda: Tiresias(threshold_gpu_s=1800.0)}
"""Every policy; Tiresias with a threshold that short jobs reach."""
TWO_TYPES = ClusterSpec(gpus=(4, 4, 8), gpu_types=("slow", "slow", "fast"))


def shipped() -> tuple[list[JobSpec], dict[str, Application], ClusterSpec]:
    """Return the synthetic workload that ships, its applications and its cluster."""
    jobs = read_workload(FOLDER / "synthetic.csv")
    applications = read_applications([FOLDER / "traces"], [one.application for one in jobs])
    return jobs, applications, read_cluster(FOLDER / "cluster.yaml")


def finishes(result: SimulationResult) -> list[float]:
    return [made.finish_s for made in result.jobs]


def table(rows: Mapping[tuple[tuple[int, ...], int], tuple[float, float]], **scalability: Any) -> MeasuredTimes:
    """Return step times from {(placement, local batch): (step, sync)}."""
    more = np.array(scalability.get("points", np.empty((0, 3))), dtype=float)
    return MeasuredTimes(
        where="test",
        placements=[placement for placement, _ in rows],
        local_batch_size=np.array([float(local) for _, local in rows]),
        times_s=np.array(list(rows.values())),
        scalability=more,
        scalability_times_s=np.array(scalability.get("times", np.empty((0, 2))), dtype=float),
    )


def validation(batch: int, progress: Sequence[float], sqr: float, var: float) -> Validation:
    at = np.array(progress, dtype=float)
    ones = np.ones(len(progress))
    return Validation(batch_size=batch, progress=at, iteration=at / 2, grad_sqr=ones * sqr, grad_var=ones * var)


def steady(step_s: float = 1.0, epochs: int = 2, widest: int = 4) -> Application:
    """Return an application whose every step takes ``step_s`` and makes one iteration's progress, 10 per epoch."""
    rows = {(p, 8): (step_s, 0.0) for n in (1, 2) for p in itertools.product(range(1, widest + 1), repeat=n)}
    progress = [10.0 * (epoch + 1) for epoch in range(epochs)]
    runs = [validation(batch, progress, 1.0, 0.0) for batch in (8, 64)]
    return Application("steady", {"*": table(rows)}, runs, Limits())


def times(grad_s: float, sync_s: float, widest: int = 4, locals_: Sequence[int] = (8, 16)) -> MeasuredTimes:
    """Return step times of placements on up to 3 nodes: T_grad = grad (0.5 + 0.5 local / 8), T_sync on several replicas."""
    rows = {}
    for nodes in (1, 2, 3):
        for placement in itertools.product(range(1, widest + 1), repeat=nodes):
            for local in locals_:
                sync = sync_s if sum(placement) > 1 else 0.0
                rows[placement, local] = grad_s * (0.5 + local / 16) + sync, sync
    return table(rows)


def application(
    name: str, grad_s: Mapping[str, float], sync_s: float = 0.0, epochs: int = 3, noise: float = 10.0
) -> Application:
    """Return an application of 20 iterations at M0 = 8 per epoch on the given GPU types."""
    runs = [validation(batch, [20.0 * (epoch + 1) for epoch in range(epochs)], 1.0, noise) for batch in (8, 256)]
    tables = {kind: times(value, sync_s, widest=8) for kind, value in grad_s.items()}
    return Application(name, tables, runs, Limits())


APPLICATIONS = {
    "both": application("both", {"slow": 2.0, "fast": 0.5}, 0.1),
    "quick": application("quick", {"slow": 0.5, "fast": 0.4}, 0.05),
    "only": application("only", {"slow": 1.0}, 0.2),
}

FITTED = throughput(
    alpha_grad_s=0.05,
    beta_grad_s=0.002,
    alpha_sync_local_s=0.03,
    beta_sync_local_s=0.002,
    alpha_sync_node_s=0.1,
    beta_sync_node_s=0.004,
    gamma=1.8,
)


def write_goodput(path: Path) -> Path:
    """Write :data:`FITTED` as ``ddltool fit`` does."""
    errors = {"rmsle": 0.0, "mape": 0.0, "samples": 9, "fit_seconds": 0.0}
    save(Goodput(sources=["x.csv"], params=FITTED, undetermined=[], **errors), path)
    return path
