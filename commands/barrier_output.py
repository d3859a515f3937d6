"""What ``ddltool barrier`` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LABELS = {"waiting": "least longest", "total": "least total", "per_iteration": "least per iter."}
SHOWN = {
    "waiting": "waiting_time_s",
    "total": "total_waiting_s",
    "per_iteration": "waiting_per_iteration_s",
}
PRICED = {"total": "waiting_cost", "per_iteration": "waiting_cost_per_iteration"}
_WORKERS_SHOWN = 16


def show_barriers(document: dict[str, Any], output: Path | None) -> None:
    """Print the barriers, each worker's iterations, and the trade-off of waiting against the iteration gap."""
    from ddltool.commands.output import out, table
    from ddltool.units import show_seconds

    legend = "longest, total, per iter.: waiting of the workers"
    if document["max_gap"] is not None:
        legend += f"; in the rows 'least ...' the gap is at most {document['max_gap']}"
    priced = document["weights"] is not None
    if priced:
        legend += "; cost: waiting by weight, which 'least total' and 'least per iter.' minimise"
    records = {
        "bsp": document["bsp"],
        **document["algorithms"],
        **{label: document["objectives"][name] for name, label in LABELS.items()},
    }
    rows = [
        [
            name,
            show_seconds(record["barrier_s"]),
            show_seconds(record["waiting_time_s"]),
            show_seconds(record["total_waiting_s"]),
            show_seconds(record["waiting_per_iteration_s"]),
            str(record["iteration_gap"]),
            f"{record['waiting_cost']:.4g}" if priced else show_seconds(record["compute_seconds"]),
        ]
        for name, record in records.items()
    ]
    title = f"Next barrier of {document['workers']} workers, lookahead {document['lookahead']} (predicted)"
    columns = ("", "at", "longest", "total", "per iter.", "gap", "cost" if priced else "CPU")
    console = out()
    console.print(table(title, columns, rows, caption=legend))
    _show_iterations(document)
    curve = []
    for point in document["tradeoff"]:
        cells = [str(point["max_gap"])]
        for name, figure in SHOWN.items():
            cost = PRICED.get(name) if priced else None
            value = show_seconds(point[name][figure]) if cost is None else f"{point[name][cost]:.4g}"
            cells += [show_seconds(point[name]["barrier_s"]), value]
        curve.append(cells)
    least = ("cost", "at", "cost per iter.") if priced else ("total", "at", "per iter.")
    headings = ("gap <=", "at", "longest", "at", *least)
    console.print(table("Least waiting by bound on the iteration gap", headings, curve, text_columns=0))
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)


def _show_iterations(document: dict[str, Any]) -> None:
    """Print the iterations until the barrier: per worker, or how they spread where workers are many."""
    import numpy as np

    from ddltool.commands.output import out, table

    columns = {**document["algorithms"], LABELS["per_iteration"]: document["objectives"]["per_iteration"]}
    workers = list(next(iter(columns.values()))["iterations"])
    if len(workers) <= _WORKERS_SHOWN:
        rows = [[worker, *(str(record["iterations"][worker]) for record in columns.values())] for worker in workers]
        out().print(table("Iterations until the barrier", ("worker", *columns), rows))
        return
    counts = [np.array(list(record["iterations"].values())) for record in columns.values()]
    rows = [
        [label, *(f"{np.quantile(count, share):g}" for count in counts)]
        for label, share in (("fewest", 0.0), ("median", 0.5), ("most", 1.0))
    ]
    out().print(table(f"Iterations of {len(workers)} workers until the barrier", ("", *columns), rows))
