"""Our policy beside Pollux, EasyScale and Sia-like beside FIFO on mixed GPUs, and both at scale (DDLTOOL_DATA: the data).

Without options: average and 99th percentile of the completion times under ``ours`` relative to ``pollux``, on the published
workloads. ``--generated SEEDS``: on generated ones of the same family, on which the constants were chosen. ``--mixed``:
6 nodes x 4 T4, 3 x 8 RTX 2080 Ti, 2 x 8 A100 and the jobs of the three applications that were measured there.
``--round JOBS``: seconds of one allocation round on 1,024 nodes x 4 GPUs. ``--scale JOBS``: a whole simulation there.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddltool.analyzers.cluster.cluster import ClusterSpec
from ddltool.analyzers.cluster.inputs import read_applications, read_workload
from ddltool.analyzers.cluster.metrics import IsolatedTimes, summarize
from ddltool.analyzers.cluster.policies.easyscale import EasyScale, EasyScaleHomo
from ddltool.analyzers.cluster.policies.gangs import Fifo, Srtf, Tiresias
from ddltool.analyzers.cluster.policies.ours import Ours
from ddltool.analyzers.cluster.policies.pollux import Pollux
from ddltool.analyzers.cluster.policies.sia import Sia
from ddltool.analyzers.cluster.simulator import Options, simulate
from ddltool.analyzers.cluster.truth import Application
from ddltool.simulation_results import JobSpec, PolicyRecord

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("DDLTOOL_DATA", ROOT / ".." / "shared" / "data"))
DATA, SIA = SHARED / "pollux-osdi21", SHARED / "sia-sosp23"
WORKLOADS = (1, 2, 3, 6)
CLUSTER = ClusterSpec.homogeneous(16, 4)
MIXED = ClusterSpec(gpus=(4,) * 6 + (8,) * 5, gpu_types=("aws",) * 6 + ("rtx",) * 3 + ("dgx-ext",) * 2)
# Requests above what every type of the mixed cluster has are cut to this many GPUs.
MOST_REQUESTED = 16
# Smallest batch, and the shares of the two generated families: Pollux's Table 1, and one without the largest class.
FIRST_BATCH = {"imagenet": 200, "yolov3": 8, "bert": 12, "deepspeech2": 20, "cifar10": 128, "ncf": 256}
FAMILIES = {
    "large": {"imagenet": 0.02, "yolov3": 0.06, "bert": 0.10, "deepspeech2": 0.10, "cifar10": 0.36, "ncf": 0.36},
    "light": {"yolov3": 0.09, "bert": 0.09, "deepspeech2": 0.09, "cifar10": 0.33, "ncf": 0.40},
}
HOURS = (1.0, 1.4, 2.2, 3.0, 2.4, 1.8, 1.4, 1.2)


def generate(family: str, seed: int, jobs: int = 160, hours: float = 8.0) -> list[JobSpec]:
    """Return a workload with a peak in the middle of ``hours``; adaptive policies do not look at the requests."""
    chance = np.random.default_rng(seed)
    names, shares = list(FAMILIES[family]), list(FAMILIES[family].values())
    rates = np.array(HOURS) / sum(HOURS)
    at = np.sort((chance.choice(len(HOURS), jobs, p=rates) + chance.random(jobs)) * 3600 * hours / len(HOURS))
    drawn = chance.choice(names, jobs, p=shares).tolist()
    return [
        JobSpec(name=str(n), submit_s=round(submit), application=name, num_replicas=1, batch_size=FIRST_BATCH[name])
        for n, (submit, name) in enumerate(zip(at.tolist(), drawn, strict=True))
    ]


def play(
    jobs: Sequence[JobSpec], applications: dict[str, Application], cluster: ClusterSpec, policy: Any
) -> tuple[PolicyRecord, float, float]:
    """Return the figures, CPU seconds of the simulation and those of the policy."""
    options = Options()
    begin = time.process_time()
    result = simulate(jobs, applications, cluster, policy, options)
    spent = time.process_time() - begin
    return (
        summarize(result, IsolatedTimes(applications, cluster), options.restart_delay_s),
        spent,
        result.policy_seconds,
    )


def compare(name: str, jobs: Sequence[JobSpec], applications: dict[str, Application]) -> dict[str, Any]:
    """Return ours over Pollux on one workload."""
    pollux, cpu_pollux, _ = play(jobs, applications, CLUSTER, Pollux())
    ours, cpu_ours, _ = play(jobs, applications, CLUSTER, Ours())
    alone, _, _ = play(jobs, applications, CLUSTER, Ours(pools=False))
    row: dict[str, Any] = {"workload": name, "cpu_s": {"pollux": cpu_pollux, "ours": cpu_ours}}
    found = {"pollux": pollux, "ours": ours, "ours, own models": alone}
    for field in ("avg_jct_s", "p99_jct_s", "makespan_s", "restarts"):
        row[field] = {key: getattr(one, field) for key, one in found.items()}
    row["worst_fairness"] = {key: one.finish_time_fairness.max for key, one in found.items()}
    return row


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print one line per workload."""
    print("workload  avg JCT: pollux    ours  change  own models | p99 change  makespan  worst FTF     moves")
    for row in rows:
        avg, last, span, worst, moves = (
            row[field] for field in ("avg_jct_s", "p99_jct_s", "makespan_s", "worst_fairness", "restarts")
        )
        print(
            f"{row['workload']:<10}{avg['pollux']:15.0f}{avg['ours']:8.0f}{avg['ours'] / avg['pollux'] - 1:8.1%}"
            f"{avg['ours, own models'] / avg['pollux'] - 1:12.1%} |{last['ours'] / last['pollux'] - 1:11.1%}"
            f"{span['ours'] / span['pollux'] - 1:10.1%}  {worst['pollux']:.2f} {worst['ours']:.2f}"
            f"  {moves['pollux']:4d} {moves['ours']:4d}",
            flush=True,
        )


def mixed(repeat: int, order: str, only: str) -> None:
    """Print every policy for mixed clusters, on the three measured applications' jobs of ``repeat`` workloads at once.

    ``order``: ``given`` (file after file), ``time`` (rows by submission) or ``turned`` (as given, the cluster's types in
    reverse order): what ties go by. ``only``: policies to replay; empty: all.
    """
    turned = order == "turned"
    cluster = ClusterSpec(gpus=MIXED.gpus[::-1], gpu_types=MIXED.gpu_types[::-1]) if turned else MIXED
    jobs = [
        job.model_copy(update={"name": f"{number}-{job.name}", "num_replicas": min(job.num_replicas, MOST_REQUESTED)})
        for number in WORKLOADS[:repeat]
        for job in read_workload(DATA / "workloads" / f"workload-{number}.csv")
        if job.application in ("bert", "cifar10", "imagenet")
    ]
    if order == "time":
        jobs.sort(key=lambda job: job.submit_s)
    applications = read_applications([SIA / "traces", DATA / "traces"], [job.application for job in jobs])
    makers: dict[str, Callable[[], Any]] = {
        "fifo": Fifo,
        "tiresias": Tiresias,
        "srtf": Srtf,
        "easyscale-homo": EasyScaleHomo,
        "easyscale-heter": EasyScale,
        "sia": Sia,
        "ours": Ours,
    }
    print(f"{len(jobs)} jobs on {MIXED.total_gpus} GPUs of three types")
    print("                         avg JCT  over fifo    p99  makespan  over fifo  worst FTF  moves  CPU s")
    first: PolicyRecord | None = None
    for name, make in makers.items():
        if only and name not in only.split(","):
            continue
        made, cpu, _ = play(jobs, applications, cluster, make())
        first = first or made
        print(
            f"{name:<24}{made.avg_jct_s:8.0f}{first.avg_jct_s / made.avg_jct_s:10.1f}x{made.p99_jct_s:7.0f}"
            f"{made.makespan_s:10.0f}{first.makespan_s / made.makespan_s:10.1f}x{made.finish_time_fairness.max:11.2f}"
            f"{made.restarts:7d}{cpu:7.1f}",
            flush=True,
        )


def busy_round(jobs: int, nodes: int = 1024) -> None:
    """Print the CPU seconds of allocation rounds with ``jobs`` jobs present, all known."""
    cluster = ClusterSpec.homogeneous(nodes, 4)
    specs = [job.model_copy(update={"submit_s": 0.0}) for job in generate("large", 1, jobs)]
    applications = read_applications([DATA / "traces"], list(FIRST_BATCH))
    spent: list[float] = []

    class Enough(Exception):
        pass

    class Timed(Ours):
        def allocate(self, jobs: Any, cluster: ClusterSpec, now_s: float) -> Any:
            begin = time.process_time()
            made = super().allocate(jobs, cluster, now_s)
            spent.append(time.process_time() - begin)
            if len(spent) == 8:
                raise Enough
            return made

    try:
        simulate(specs, applications, cluster, Timed())
    except Enough:
        print(f"{jobs} jobs, {cluster.total_gpus} GPUs: CPU s per round " + " ".join(f"{one:.2f}" for one in spent))


def scale(jobs: int, nodes: int = 1024, hours: float = 8.0) -> None:
    """Print CPU seconds and memory of a whole simulation."""
    cluster = ClusterSpec.homogeneous(nodes, 4)
    applications = read_applications([DATA / "traces"], list(FIRST_BATCH))
    specs = generate("large", 1, jobs, hours)
    options = Options(interval_s=300.0)
    begin = time.process_time()
    result = simulate(specs, applications, cluster, Ours(), options)
    spent = time.process_time() - begin
    most = max(usage.jobs for usage in result.usage)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    jct = np.mean([job.jct_s for job in result.jobs])
    print(
        f"{jobs} jobs, {cluster.total_gpus} GPUs, interval 300 s: {spent:.0f} CPU s ({result.policy_seconds:.0f} in the "
        f"policy, {result.rounds} rounds, at most {most} jobs at once), peak {peak:.2f} GiB, average JCT {jct:.0f} s"
    )


def bounds(jobs: Sequence[JobSpec], applications: dict[str, Application]) -> tuple[float, float]:
    """Return what no policy can be below: the average and the 99th percentile of the completion times, seconds.

    No job ends before its time alone on the number of GPUs that suits it best, of all 64, with the best batch in each
    epoch. No policy finishes work faster than all GPUs as one machine that makes no use of parallelism badly: each job is
    worth the fewest GPU-seconds on any number, served in order of what is left (SRPT, which is optimal there). The
    average is at least the larger of the two; neither counts restarts, rounds or exploration.
    """
    isolated = IsolatedTimes(applications, CLUSTER)
    total = CLUSTER.total_gpus
    alone, work = {}, {}
    for name in {job.application for job in jobs}:
        times = np.array([isolated(name, count) for count in range(1, total + 1)])
        alone[name], work[name] = times.min() + 30.0, float((times * np.arange(1, total + 1)).min())
    least = np.array([alone[job.application] for job in jobs])
    todo = sorted((job.submit_s, work[job.application] / total) for job in jobs)
    now, left, waits = 0.0, [], 0.0
    while todo or left:
        if not left:
            now = max(now, todo[0][0])
        while todo and todo[0][0] <= now:
            begin, seconds = todo.pop(0)
            heapq.heappush(left, (seconds, begin))
        seconds, begin = heapq.heappop(left)
        until = min(now + seconds, todo[0][0]) if todo else now + seconds
        if until < now + seconds:
            heapq.heappush(left, (seconds - (until - now), begin))
        else:
            waits += until - begin
        now = until
    return max(float(least.mean()), waits / len(jobs)), float(np.percentile(least, 99))


def main() -> None:
    """Answer the question that the options ask; without any, compare the policies on all published workloads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(map(str, WORKLOADS)))
    parser.add_argument("--generated", metavar="SEEDS")
    parser.add_argument("--mixed", type=int, metavar="WORKLOADS", help="this many workloads' jobs at once")
    parser.add_argument("--round", type=int, metavar="JOBS")
    parser.add_argument("--scale", type=int, metavar="JOBS")
    parser.add_argument("--order", choices=("given", "time", "turned"), default="given", help="with --mixed")
    parser.add_argument("--only", default="", help="with --mixed: these policies")
    parser.add_argument("--bound", action="store_true", help="what no policy can be below, for the same workloads")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not DATA.is_dir():
        print(f"no data at {DATA}; set DDLTOOL_DATA")
        return
    if given.mixed:
        mixed(given.mixed, given.order, given.only)
    elif given.round:
        busy_round(given.round)
    elif given.scale:
        scale(given.scale)
    else:
        workloads(given)


def workloads(given: argparse.Namespace) -> None:
    """Compare the policies on published or generated workloads, or print what no policy can be below on them."""
    applications = read_applications([DATA / "traces"], list(FIRST_BATCH))
    if given.generated:
        named = [
            (f"{family}-{seed}", generate(family, seed))
            for family in FAMILIES
            for seed in map(int, given.generated.split(","))
        ]
    else:
        named = [
            (number, read_workload(DATA / "workloads" / f"workload-{number}.csv"))
            for number in given.workloads.split(",")
        ]
    if given.bound:
        for name, jobs in named:
            average, tail = bounds(jobs, applications)
            print(
                f"{name}: no policy is below {average:,.0f} s on average, nor below {tail:,.0f} s at the 99th percentile"
            )
        return
    rows = [compare(name, jobs, applications) for name, jobs in named]
    if given.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows)


if __name__ == "__main__":
    main()
