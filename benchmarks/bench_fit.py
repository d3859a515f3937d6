"""The throughput fit on others' measurements (set DDLTOOL_DATA to the folder that holds pollux-osdi21/ and sia-sosp23/).

Prints error and CPU time per application beside AdaptDL's own fit on the same rows, then the errors of each device type of
Sia's measurements. ``--prior``: the cross-validation that chose the prior on the slopes and the weight of T_grad, which
looks at placements.csv only.
``--tables FOLDER``: the errors with and without the prior over all tables of Sia's artifact (its folder sia-simulator/traces).
"""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path

import numpy as np

from ddltool.analyzers.job.goodput.fit import GRAD_WEIGHT, SLOPE_SPREAD, evaluate, fit
from ddltool.analyzers.job.goodput.observations import Observations, from_frame
from ddltool.errors import InputError
from ddltool.tables import read_table

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("DDLTOOL_DATA", ROOT / ".." / "shared" / "data"))
POLLUX, SIA = DATA / "pollux-osdi21" / "traces", DATA / "sia-sosp23" / "traces"
# AdaptDL's fit run on the same files: RMSLE and MAPE on placements, the same on scalability, seconds (2-core machine).
ADAPTDL = {
    "bert": (0.1201, 0.0717, 0.0699, 0.0534, 2.1),
    "cifar10": (0.1033, 0.0776, 0.1145, 0.0828, 10.1),
    "deepspeech2": (0.1036, 0.0789, 0.2177, 0.1962, 3.7),
    "imagenet": (0.0975, 0.0667, 0.1255, 0.0842, 3.8),
    "ncf": (0.1292, 0.0928, 0.1611, 0.1060, 8.6),
    "yolov3": (0.1255, 0.0851, 0.1993, 0.1768, 1.9),
}
TYPES = {"aws": "T4", "rtx": "RTX 2080 Ti", "dgx-ext": "A100"}


def read(path: Path) -> Observations:
    """Return the measured rows of a table."""
    return from_frame(read_table(path), str(path))


def errors() -> None:
    """Print the fit's errors on fitted and unseen rows beside AdaptDL's, by application."""
    print("             fitted: RMSLE  MAPE    unseen: RMSLE   MAPE   CPU s    (in brackets AdaptDL; * ours is larger)")
    for application, reference in ADAPTDL.items():
        folder = POLLUX / application
        fitted, kept = read(folder / "placements.csv"), read(folder / "scalability.csv")
        fit(fitted)  # the first call also warms the caches
        started = time.process_time()
        result = fit(fitted)
        seconds = time.process_time() - started
        held = evaluate(result.params, kept)
        best = fit(kept, slope_spread=math.inf).error.mape
        cells = [
            f"{own:.4f}{'*' if own > other + 5e-5 else ' '}({other:.4f})"
            for own, other in zip(
                (result.error.rmsle, result.error.mape, held.rmsle, held.mape), reference, strict=False
            )
        ]
        ratio = reference[4] / seconds
        print(f"{application:12s}", *cells, f"{seconds:.3f} ({reference[4]}, x{ratio:.0f})  best possible {best:.4f}")
    print("best possible: MAPE when the same seven parameters are fitted to the unseen rows themselves")


def types() -> None:
    """Print the errors of each device type's fit."""
    print("\nfitted RMSLE, MAPE and unseen RMSLE, MAPE of each device type by itself")
    for application in ("bert", "cifar10", "imagenet"):
        devices = {name: read(SIA / application / f"placements-{name}.csv") for name in TYPES}
        for name, rows in devices.items():
            result = fit(rows)
            line = f"{application:9s}{TYPES[name]:12s} {result.error.rmsle:.4f} {result.error.mape:.4f}"
            if name != "dgx-ext":  # that table of unseen rows is the fitted one
                held = evaluate(result.params, read(SIA / application / f"scalability-{name}.csv"))
                line += f"   {held.rmsle:.4f} {held.mape:.4f}"
            print(line)


def prior() -> None:
    """Print the error beyond the measured replicas and nodes for every weight of the prior: how the ones in use were chosen."""
    print("mean RMSLE of rows left out (K > 8 from K <= 8; 4 nodes from up to 3), placements.csv only")
    weights = (0.03, 0.1, 0.3, 1.0)
    print("slope spread   " + "".join(f"  T_grad {weight:<5g}" for weight in weights))
    every = {application: read(POLLUX / application / "placements.csv") for application in ADAPTDL}
    for spread in (0.02, 0.03, 0.04, 0.05, 0.06, 0.1, 0.2, math.inf):
        line = f"{spread:12g}   "
        for weight in weights:
            scores = []
            for rows in every.values():
                for kept in (rows.num_replicas <= 8, rows.num_nodes <= 3):
                    params = fit(rows.take(kept), slope_spread=spread, grad_weight=weight).params
                    scores.append(evaluate(params, rows.take(~kept)).rmsle)
            line += f"  {np.mean(scores):.4f}{'<' if (spread, weight) == (SLOPE_SPREAD, GRAD_WEIGHT) else ' '}     "
        print(line)
    print("<: in use")


def tables(folder: Path) -> None:
    """Print the mean errors over all tables under a folder: fitted, of the table beside, of the rows with most replicas."""
    found: list[list[float]] = []
    for path in sorted(folder.glob("*/placements-*.csv")):
        try:
            rows, beside = read(path), read(path.with_name(path.name.replace("placements", "scalability")))
        except InputError as error:
            print(f"left out: {error}")
            continue
        most = rows.num_replicas == rows.num_replicas.max()
        line = []
        for spread in (SLOPE_SPREAD, math.inf):
            params = fit(rows, slope_spread=spread).params
            unseen = len(beside) != len(rows)  # the same table twice, where one was not measured
            line += [evaluate(params, rows).rmsle, evaluate(params, beside).rmsle if unseen else math.nan]
            line += [evaluate(fit(rows.take(~most), slope_spread=spread).params, rows.take(most)).rmsle]
        found.append(line)
    fitted, unseen, most_replicas, *free = np.nanmean(np.array(found), axis=0)
    print(f"{len(found)} tables, mean RMSLE, in brackets without the prior")
    for name, own, other in zip(
        ("fitted", "unseen", "most replicas"), (fitted, unseen, most_replicas), free, strict=True
    ):
        print(f"{name:14s} {own:.4f} ({other:.4f})")


if __name__ == "__main__":
    if "--tables" in sys.argv:
        tables(Path(sys.argv[-1]))
    elif not POLLUX.is_dir():
        print(f"no data at {POLLUX}; set DDLTOOL_DATA")
    elif "--prior" in sys.argv:
        prior()
    else:
        errors()
        if SIA.is_dir():
            types()
