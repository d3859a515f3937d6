"""Every model of TicTac's Table 1: orders, efficiencies, and their distance to the best schedule.

    python benchmarks/table1.py [--devices K80,V100] [--bandwidth 10Gbit] [--time-limit 20] [--samples 30]

One line per model, mode and device: mean simulated step of random orders, TIC, TAC and the improved order over the
exact optimum (or, where that is not proven, over its lower bound), and the efficiencies. Batch sizes are the paper's.
"""

from __future__ import annotations

import argparse
import statistics

from ddltool.analyzers.step.costs.model import cost_model, estimate
from ddltool.analyzers.step.transfers.efficiency import compare
from ddltool.device import Network
from ddltool.fixtures.zoo import ZOO
from ddltool.graph import read_graph
from ddltool.shipped import calibration, devices, folder
from ddltool.units import parse_bandwidth

ORDERS = ("random", "tic", "tac", "improved")


def main() -> None:
    """Print the table and the mean gap per column."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="K80,V100")
    parser.add_argument("--bandwidth", default="10Gbit")
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--samples", type=int, default=30)
    given = parser.parse_args()
    network = Network(bandwidth_bytes_per_s=parse_bandwidth(given.bandwidth))
    models = [name for name, entry in ZOO.items() if entry.published is not None]
    gaps: dict[str, list[float]] = {order: [] for order in (*ORDERS, "exact")}
    print(
        "| model | mode | device | best s | status | random | TIC | TAC | ours | E random | TIC | TAC | ours | best |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for device in given.devices.split(","):
        for mode in ("inference", "training"):
            for model in models:
                shipped = read_graph(folder() / "graphs" / f"{model}-{mode}.graph.json.gz")
                graph = estimate(shipped, cost_model(devices().device(device), calibration()), network)
                found = compare(graph, samples=given.samples, exact_s=given.time_limit)
                exact = found.schedules["exact"]
                over = {name: each.makespan_s / exact.lower_bound_s - 1 for name, each in found.schedules.items()}
                for order, gap in over.items():
                    gaps[order].append(gap)
                values = [each.efficiency or 0.0 for each in found.schedules.values()]
                status = "optimal" if exact.status == "optimal" else f"gap {exact.gap:.3%}"
                shown = " | ".join(f"+{over[order]:.3%}" for order in ORDERS)
                print(
                    f"| {model} | {mode} | {device} | {exact.makespan_s:.4f} | {status} | {shown} | "
                    + " | ".join(f"{value:.3f}" for value in values)
                    + " |",
                    flush=True,
                )
    means = ", ".join(f"{order} {statistics.mean(values):.4%}" for order, values in gaps.items())
    print(f"\nmean distance to the bound: {means}")


if __name__ == "__main__":
    main()
