"""Search small graphs on which TAC is far from the best schedule: hill climbing on durations, seeded.

    python benchmarks/search_adverse.py [--tries 20] [--seed 0]

Prints for each family the worst ratio of TAC's mean simulated step to the exact optimum, what the improved order makes
of it, and the graph. The shipped ``adverse`` graphs are such finds with their numbers rounded.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace

from ddltool.analyzers.step.transfers.efficiency import improve, solve_exact
from ddltool.analyzers.step.transfers.order import tac
from ddltool.analyzers.step.transfers.timeline import Simulator
from ddltool.graph import Graph, Op

FAMILIES = {"wide joins": (1, False), "many servers": (2, False), "sends compete": (1, True)}
SAMPLES = 12


def joins(chance: random.Random, channels: int, sends: bool, recvs: int = 5, count: int = 3) -> list[Op]:
    """Return ops that each wait for a random set of recvs, a last op that waits for all of them, and their sends."""
    ops = [
        Op(
            name=f"recv{i}",
            kind="recv",
            resource=f"channel:{chance.randrange(channels)}",
            duration_s=float(chance.randint(1, 9)),
            parameter=f"w{i}",
        )
        for i in range(recvs)
    ]
    for j in range(count):
        wanted = sorted(chance.sample(range(recvs), chance.randint(1, 3)))
        duration = float(chance.randint(0, 9))
        ops.append(Op(name=f"op{j}", kind="compute", duration_s=duration, inputs=tuple(f"recv{i}" for i in wanted)))
    if sends:
        for j in range(count):
            channel, duration = f"channel:{chance.randrange(channels)}", float(chance.randint(0, 9))
            name = f"send{j}"
            ops.append(Op(name=name, kind="send", resource=channel, duration_s=duration, inputs=(f"op{j}",)))
    return ops


def ratio(graph: Graph) -> float:
    """Return TAC's mean simulated step over the optimum."""
    best = solve_exact(graph, workers=1, time_limit_s=5).makespan_s
    return mean(graph, tac(graph).priority) / best if best > 0 else 1.0


def mean(graph: Graph, priority: dict[str, int] | object) -> float:
    """Return the mean of simulated steps under a priority."""
    simulator = Simulator(graph)
    return sum(simulator.run(priority, seed).makespan_s for seed in range(SAMPLES)) / SAMPLES  # type: ignore[arg-type]


def climb(chance: random.Random, channels: int, sends: bool, steps: int = 80) -> tuple[float, Graph]:
    """Change one duration at a time and keep what makes TAC worse."""
    mode = "training" if sends else "inference"
    ops = joins(chance, channels, sends)
    graph = Graph.from_ops("adverse", mode, ops)
    worst = ratio(graph)
    for _ in range(steps):
        place = chance.randrange(len(ops))
        changed = [*ops]
        changed[place] = replace(ops[place], duration_s=float(chance.randint(0, 9)))
        other = Graph.from_ops("adverse", mode, changed)
        if (found := ratio(other)) >= worst:
            worst, graph, ops = found, other, changed
    return worst, graph


def main() -> None:
    """Search every family and print the worst finds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for family, (channels, sends) in FAMILIES.items():
        chance = random.Random(given.seed)
        worst, graph = max((climb(chance, channels, sends) for _ in range(given.tries)), key=lambda entry: entry[0])
        best = solve_exact(graph, workers=1).makespan_s
        mended = mean(graph, improve(graph).priority) / best
        print(f"{family}: TAC {worst:.3f} times the optimum ({best:g} s), improved {mended:.3f}")
        for op in graph.ops():
            print(f"    {op.name} {op.kind} {op.resource} {op.duration_s:g} <- {', '.join(op.inputs)}")


if __name__ == "__main__":
    main()
