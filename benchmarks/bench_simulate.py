"""The cluster simulator on Pollux's workloads, beside the published averages (set DDLTOOL_DATA for the data).

Prints average JCT and CPU seconds per workload and policy. ``--json`` prints one document instead. ``--genetic`` replays
busy rounds and lets a genetic algorithm with the published operators (population 100, 100 generations, carried over
from round to round) search the same allocations as ours. ``--triangulations`` repeats Optimus with the measured points
moved by 1e-7: unmeasured placements interpolate over a grid whose triangulation is not unique. ``--fixtures DIR`` writes
the synthetic workload, cluster and traces that ship in fixtures/workloads.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ddltool.analyzers.cluster.cluster import ClusterSpec
from ddltool.analyzers.cluster.inputs import read_applications, read_workload
from ddltool.analyzers.cluster.metrics import IsolatedTimes, summarize
from ddltool.analyzers.cluster.policies.gangs import Fifo, Srtf, Tiresias
from ddltool.analyzers.cluster.policies.optimus import Optimus
from ddltool.analyzers.cluster.policies.pollux import Pollux
from ddltool.analyzers.cluster.search import JobCosts, search
from ddltool.analyzers.cluster.simulator import Options, simulate
from ddltool.analyzers.cluster.truth import smallest_rotation
from ddltool.arrays import Floats, Ints

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("DDLTOOL_DATA", ROOT / ".." / "shared" / "data")) / "pollux-osdi21"
WORKLOADS = (1, 2, 3, 6)
POLICIES: dict[str, Callable[[], Any]] = {
    "fifo": Fifo,
    "tiresias": Tiresias,
    "optimus": Optimus,
    "pollux": Pollux,
    "srtf": Srtf,
}
# Average JCT of the published simulator, seconds.
PUBLISHED = {
    "tiresias": {1: 2473.7, 2: 5145.0, 3: 3876.3, 6: 3469.7},
    "optimus": {1: 4087.1, 2: 6913.9, 3: 3944.0, 6: 5301.9},
    "pollux": {1: 2088.8, 2: 3322.9, 3: 2188.5, 6: 2446.1},
}
CLUSTER = ClusterSpec.homogeneous(16, 4)
LIKE_FOR_LIKE = Options(whole_seconds=True)


def replay(number: int, policy: Any, options: Options = LIKE_FOR_LIKE) -> dict[str, Any]:
    """Return the figures of one workload under one policy."""
    jobs = read_workload(DATA / "workloads" / f"workload-{number}.csv")
    applications = read_applications([DATA / "traces"], [job.application for job in jobs])
    begin = time.process_time()
    result = simulate(jobs, applications, CLUSTER, policy, options)
    spent = time.process_time() - begin
    summary = summarize(result, IsolatedTimes(applications, CLUSTER), options.restart_delay_s)
    return {
        "workload": number,
        "policy": policy.name,
        "avg_jct_s": summary.avg_jct_s,
        "p99_jct_s": summary.p99_jct_s,
        "makespan_s": summary.makespan_s,
        "utilization": summary.utilization,
        "worst_fairness": summary.finish_time_fairness.max,
        "share_below_1": summary.finish_time_fairness.share_below_1,
        "restarts": summary.restarts,
        "cpu_seconds": spent,
        "policy_cpu_seconds": result.policy_seconds,
        "published_avg_jct_s": PUBLISHED.get(policy.name, {}).get(number),
    }


class Recorder(Pollux):
    """Pollux that writes down what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[list[int], list[JobCosts]]] = []

    def allocate(self, jobs: Any, cluster: ClusterSpec, now_s: float) -> Any:
        """Return Pollux's allocation, and keep the jobs and their choices."""
        made = super().allocate(jobs, cluster, now_s)
        choices = [self.choice(job, len(jobs), cluster, now_s) for job in jobs]
        self.asked.append(([job.index for job in jobs], choices))
        return made


class Genetic:
    """A genetic search with the published operators on states (population, jobs, nodes)."""

    def __init__(self, population: int = 100, generations: int = 100, seed: int = 0) -> None:
        self.population, self.generations = population, generations
        self.chance = np.random.default_rng(seed)
        self.previous: tuple[list[int], Ints] | None = None

    def search(self, names: list[int], choices: list[JobCosts], gpus: Iterable[int]) -> float:
        """Return the least total cost found; keeps the last population for the next round."""
        size = np.array(list(gpus))
        base = np.zeros((len(names), len(size)), dtype=np.int64)
        for row, choice in enumerate(choices):
            for node, count in choice.base:
                base[row, node] = count
        states = base[None]
        if self.previous is not None:
            old_names, old = self.previous
            states = np.zeros((len(old), *base.shape), dtype=np.int64)
            for row, name in enumerate(names):
                if name in old_names:
                    states[:, row] = old[:, old_names.index(name)]
        pool = self.repair(states, choices, size)
        values = self.evaluate(pool, base, choices)
        for _ in range(self.generations):
            parents = pool[self.chance.integers(len(pool), size=(2, self.population))]
            points = self.chance.integers(len(names), size=(self.population, 1, 1))
            children = np.where(np.arange(len(names))[None, :, None] < points, parents[0], parents[1])
            children = self.repair(self.mutate(children, base, size), choices, size)
            pool = np.concatenate([pool, children])
            values = np.concatenate([values, self.evaluate(children, base, choices)])
            _, first = np.unique(pool.reshape(len(pool), -1), axis=0, return_index=True)
            best = first[np.argsort(values[first], kind="stable")[: self.population]]
            pool, values = pool[best], values[best]
        self.previous = names, pool
        return float(values.min())

    def mutate(self, states: Ints, base: Ints, size: Ints) -> Ints:
        """Return states after resets to the base, zeroed elements and random increases."""
        reset = self.chance.random(states.shape[:2]) < 0.1
        states = np.where(reset[:, :, None], base, states)
        zero = np.where(self.chance.random(states.shape[:2]) < 0.1, 0.1, 0.0)[:, :, None]
        states[self.chance.random(states.shape) < zero] = 0
        room = np.broadcast_to((size - states.sum(axis=1) >= 1)[:, None], states.shape)
        one = room / np.maximum(room.sum(axis=1, keepdims=True), 1)
        held = room & (states > 0)
        two = held / np.maximum(held.sum(axis=1, keepdims=True), 1)
        chosen = self.chance.random(states.shape) < one + two - one * two
        drawn = self.chance.integers(np.minimum(states, size), size + 1)
        return np.where(chosen, drawn, states)

    def repair(self, states: Ints, choices: list[JobCosts], size: Ints) -> Ints:
        """Return states that share no node between spanning jobs and exceed neither jobs' nor nodes' limits."""
        states = states.copy()
        spans = np.count_nonzero(states, axis=2) > 1
        states[np.cumsum((states > 0) & spans[:, :, None], axis=1) * ((states > 0) & spans[:, :, None]) > 1] = 0
        most = np.array([[len(choice.across) - 1] for choice in choices])
        order = np.argsort(self.chance.random(states.shape), axis=2)
        shuffled = np.minimum(np.cumsum(np.take_along_axis(states, order, axis=2), axis=2), most)
        states = np.take_along_axis(np.diff(shuffled, axis=2, prepend=0), np.argsort(order, axis=2), axis=2)
        return np.diff(np.minimum(np.cumsum(states, axis=1), size), axis=1, prepend=0)

    def evaluate(self, states: Ints, base: Ints, choices: list[JobCosts]) -> Floats:
        """Return the total cost of each state."""
        counts, nodes = states.sum(axis=2), np.count_nonzero(states, axis=2)
        same = np.all(states == base, axis=2)
        total = np.zeros(len(states))
        for row, choice in enumerate(choices):
            within = choice.within[np.minimum(counts[:, row], len(choice.within) - 1)]
            across = choice.across[np.minimum(counts[:, row], len(choice.across) - 1)]
            cost = np.where(nodes[:, row] > 1, across, within)
            total += np.where(same[:, row] & (counts[:, row] > 0), choice.keep, cost)
        return total


def genetic(number: int, rounds: int, seed: int = 0) -> dict[str, Any]:
    """Return fitness and CPU seconds of both searches over the busiest ``rounds`` consecutive rounds of a workload."""
    recorder = Recorder()
    replay(number, recorder)
    load = np.convolve([len(names) for names, _ in recorder.asked], np.ones(rounds), mode="valid")
    start = int(load.argmax())
    rival = Genetic(seed=seed)
    spent = {"ours": 0.0, "genetic": 0.0}
    ratios, gaps = [], []
    for names, choices in recorder.asked[start : start + rounds]:
        begin = time.process_time()
        found = search(choices, CLUSTER.gpus)
        spent["ours"] += time.process_time() - begin
        begin = time.process_time()
        cost = rival.search(names, choices, CLUSTER.gpus)
        spent["genetic"] += time.process_time() - begin
        ratios.append(cost / found.cost)  # with p = -1, fitness is jobs over cost: a ratio of costs is one of fitness
        gaps.append(found.cost / found.bound - 1)
    return {
        "workload": number,
        "rounds": rounds,
        "jobs": float(load[start] / rounds),
        "fitness_over_genetic": {"mean": float(np.mean(ratios)), "min": min(ratios), "max": max(ratios)},
        "gap_to_bound": {"mean": float(np.mean(gaps)), "max": max(gaps)},
        "cpu_seconds_per_round": {name: value / rounds for name, value in spent.items()},
    }


def triangulations(number: int, draws: int) -> list[float]:
    """Return Optimus' average JCT with measured points moved by a relative 1e-7, once per draw."""
    made = []
    jobs = read_workload(DATA / "workloads" / f"workload-{number}.csv")
    for draw in range(draws):
        applications = read_applications([DATA / "traces"], [job.application for job in jobs])
        chance = np.random.default_rng(draw)
        for application in applications.values():
            for table in application.times.values():
                table.scalability = table.scalability * (1 + 1e-7 * chance.standard_normal(table.scalability.shape))
        result = simulate(jobs, applications, CLUSTER, Optimus(), LIKE_FOR_LIKE)
        made.append(float(np.mean([job.jct_s for job in result.jobs])))
    return made


# A synthetic application: M0, largest total batch, local batch sizes, epochs, T_grad (constant, per sample), T_sync
# (one node, across), noise scale at the first and the last epoch, iterations per epoch at M0.
SYNTHETIC = {
    "vision": (64, 1024, (16, 32, 64, 128, 256), 20, (0.02, 8e-4), (0.01, 0.05), (300.0, 6000.0), 1200),
    "language": (16, 256, (4, 8, 16, 32), 8, (0.05, 0.012), (0.06, 0.25), (60.0, 900.0), 2500),
}


def write_fixtures(folder: Path) -> None:
    """Write the synthetic workload, its cluster and its traces."""
    for name, (first, largest, locals_, epochs, grad, sync, noise, iterations) in SYNTHETIC.items():
        place = folder / "traces" / name
        place.mkdir(parents=True, exist_ok=True)
        placements = sorted(
            {smallest_rotation(p) for n in range(1, 5) for p in product(range(1, 5), repeat=n)},
            key=lambda p: (len(p), p),
        )
        rows = []
        for placement, local in product(placements, locals_):
            t_grad = grad[0] + grad[1] * local
            replicas = sum(placement)
            t_sync = 0.0 if replicas == 1 else sync[len(placement) > 1] * (1 + 0.05 * (replicas - 2))
            step = math.hypot(t_grad, t_sync)
            rows.append(f"{''.join(map(str, placement))},{local},{step:.5g},{step - t_grad:.4g}")
        text = "\n".join(["placement,local_bsz,step_time,sync_time", *rows]) + "\n"
        (place / "placements.csv").write_text(text, encoding="utf-8")
        scales = [2**power for power in range(int(math.log2(largest / first)) + 1)]
        phis = np.geomspace(*noise, epochs)
        for scale in scales:
            lines = ["progress,iteration,metric,grad_sqr,grad_var"]
            made = 0.0
            for epoch in range(epochs):
                gain = (phis[epoch] / first + 1) / (phis[epoch] / first / scale + 1)
                made += iterations / gain
                metric = 1 - math.exp(-3 * (epoch + 1) / epochs)
                lines.append(f"{iterations * (epoch + 1)},{made:.1f},{metric:.4f},1,{phis[epoch] / first:.5g}")
            (place / f"validation-{first * scale}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    chance = np.random.default_rng(7)
    at = np.sort(chance.uniform(0, 5400, 24)).round().astype(int)
    shapes = {"vision": [(1, 128), (2, 256), (4, 512), (8, 1024)], "language": [(1, 16), (2, 32), (4, 128), (6, 192)]}
    lines = ["name,time,application,num_replicas,batch_size"]
    for number, submit in enumerate(at.tolist()):
        application = "vision" if chance.random() < 0.65 else "language"
        replicas, batch = shapes[application][int(chance.integers(4))]
        lines.append(f"{application}-{number},{submit},{application},{replicas},{batch}")
    (folder / "synthetic.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    cluster = (
        "kind: ddltool.cluster\nname: synthetic\nnodes:\n  - {name: node, count: 4, devices: {type: gpu, count: 4}}\n"
    )
    (folder / "cluster.yaml").write_text(cluster, encoding="utf-8")


def main() -> None:
    """Replay the workloads under the policies beside the published times, or do what an option asks for instead."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(map(str, WORKLOADS)))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--genetic", type=int, metavar="ROUNDS", help="compare the search on that many rounds")
    parser.add_argument("--triangulations", type=int, metavar="DRAWS")
    parser.add_argument("--fixtures", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.fixtures:
        write_fixtures(given.fixtures)
        return
    if not DATA.is_dir():
        print(f"no data at {DATA}; set DDLTOOL_DATA")
        return
    numbers = [int(number) for number in given.workloads.split(",")]
    document: list[Any]
    if given.genetic:
        document = [genetic(number, given.genetic) for number in numbers]
    elif given.triangulations:
        document = [{"workload": n, "optimus_avg_jct_s": triangulations(n, given.triangulations)} for n in numbers]
    else:
        document = [replay(n, POLICIES[name]()) for name in given.policies.split(",") for n in numbers]
    if given.json or given.genetic or given.triangulations:
        print(json.dumps(document, indent=1))
        return
    print("policy    workload  avg JCT  published  p99 JCT  makespan  worst FTF  FTF < 1  restarts  CPU s")
    for row in document:
        published = row["published_avg_jct_s"]
        shown = f"{published:9.1f}" if published else "        -"
        print(
            f"{row['policy']:9} {row['workload']:8}  {row['avg_jct_s']:7.1f}  {shown}  {row['p99_jct_s']:7.0f}  "
            f"{row['makespan_s']:8.0f}  {row['worst_fairness']:9.2f}  {row['share_below_1']:7.0%}  "
            f"{row['restarts']:8}  {row['cpu_seconds']:5.2f}"
        )


if __name__ == "__main__":
    main()
