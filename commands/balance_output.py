"""What ``ddltool balance`` prints for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_LABELS = {
    "bsp": "BSP",
    "asp": "ASP",
    "ssp": "SSP, bound 5",
    "redundant": "redundant execution",
    "work_shifting": "work shifting (FlexRR-like)",
    "lb_bsp": "LB-BSP",
    "lb_bsp_oracle": "LB-BSP, speeds known",
}


def show_balance(document: dict[str, Any], output: Path | None) -> None:
    """Print the table of predictors and, where asked for, that of schemes."""
    from ddltool.commands.output import out, table
    from ddltool.units import show_seconds

    console = out()
    judged = document["iterations"] - document["warm_up"]
    title = (
        f"{document['workers']} workers, {judged} iterations after a warm-up of {document['warm_up']}, "
        f"total batch {document['total_batch']}"
    )
    rows = [["equal split", "", "", show_seconds(document["equal_split"]["iteration_s"]), "1.000", ""]]
    for name, record in document["predictors"].items():
        rows.append(
            [
                name,
                f"{record['rmse']:.4g}",
                f"{record['rmse_relative']:.1%}",
                show_seconds(record["iteration_s"]),
                f"{record['iteration_time_ratio']:.3f}",
                f"{record['gain_kept']:.0%}",
            ]
        )
    oracle = document["oracle"]
    ratio = f"{oracle['iteration_time_ratio']:.3f}"
    rows.append(["speeds known", "0", "0.0%", show_seconds(oracle["iteration_s"]), ratio, "100%"])
    columns = ("", "RMSE", "of mean", "iteration", "of equal split", "gain")
    caption = "RMSE in samples/s, mean over workers; gain: share of what knowing the speeds would gain"
    console.print(table(title, columns, rows, caption=caption))
    if min(record["iteration_time_ratio"] for record in document["predictors"].values()) >= 1:
        console.print("Equal batches are as fast here: these speeds cannot be foretold well enough.")
    if "schemes" in document:
        _show_schemes(document["schemes"])
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)


def _show_schemes(records: dict[str, Any]) -> None:
    """Print the table of schemes."""
    from ddltool.commands.output import out, table
    from ddltool.units import show_seconds

    rows = []
    for name, label in _LABELS.items():
        if name not in records:
            continue
        record = records[name]
        shown = f"{label} ({records['predictor']})" if name == "lb_bsp" else label
        rows.append(
            [
                shown,
                show_seconds(record["iteration_s"]),
                f"{record['iteration_time_ratio']:.3f}",
                f"{record['staleness']:.1f}",
                str(record["iteration_gap"]),
            ]
        )
    columns = ("", "iteration", "of BSP", "staleness", "gap")
    caption = "staleness: updates of others that a gradient has not seen; rows as wall-clock time"
    out().print(table("Schemes on the whole trace", columns, rows, caption=caption))
