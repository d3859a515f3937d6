"""The throughput fit on Pollux's measurements (set DDLTOOL_DATA to the folder that holds pollux-osdi21/).

Prints error and time per application beside AdaptDL's own fit on the same rows; with ``--prior`` the cross-validation
that chose the weight of the prior on the slopes, which looks at placements.csv only.
"""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np

from ddltool.analyzers.goodput.fit import SLOPE_PRIOR, evaluate, fit
from ddltool.analyzers.goodput.observations import Observations, from_frame
from ddltool.profile import read_table

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("DDLTOOL_DATA", ROOT / ".." / "shared" / "data")) / "pollux-osdi21" / "traces"
# AdaptDL's fit run on the same files: MAPE on placements, MAPE on scalability, seconds (2-core machine).
ADAPTDL = {
    "bert": (0.0717, 0.0534, 2.1),
    "cifar10": (0.0776, 0.0828, 10.1),
    "deepspeech2": (0.0789, 0.1962, 3.7),
    "imagenet": (0.0667, 0.0842, 3.8),
    "ncf": (0.0928, 0.1060, 8.6),
    "yolov3": (0.0851, 0.1768, 1.9),
}


def read(application: str, table: str) -> Observations:
    path = DATA / application / f"{table}.csv"
    return from_frame(read_table(path), str(path))


def rows(observations: Observations, mask: np.ndarray) -> Observations:
    return Observations(**{field.name: getattr(observations, field.name)[mask] for field in fields(Observations)})


def errors() -> None:
    print(f"{'application':12s} rows  MAPE (AdaptDL)   holdout MAPE (AdaptDL)  best possible   seconds (AdaptDL)")
    for application, (own, held, seconds) in ADAPTDL.items():
        fitted, kept = read(application, "placements"), read(application, "scalability")
        result = fit(fitted)
        floor = fit(kept, slope_prior=0.0).mape
        error = evaluate(result.params, kept).mape
        print(
            f"{application:12s} {len(fitted):4d}  {result.mape:.4f} ({own:.4f})  {error:.4f} ({held:.4f})"
            f"         {floor:.4f}          {result.fit_seconds:.2f} ({seconds})"
        )
    print("best possible: the same seven parameters fitted to the holdout rows themselves")


def prior() -> None:
    print("weight  mean RMSLE of rows left out (K > 8 from K <= 8; 4 nodes from up to 3), placements.csv only")
    for weight in (0.0, 0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 3.0):
        scores = []
        for application in ADAPTDL:
            every = read(application, "placements")
            for kept in (every.num_replicas <= 8, every.num_nodes <= 3):
                params = fit(rows(every, kept), slope_prior=weight).params
                scores.append(evaluate(params, rows(every, ~kept)).rmsle)
        print(f"{weight:6g}  {np.mean(scores):.4f}{'  <- in use' if weight == SLOPE_PRIOR else ''}")


if __name__ == "__main__":
    if not DATA.is_dir():
        print(f"no data at {DATA}; set DDLTOOL_DATA")
    elif "--prior" in sys.argv:
        prior()
    else:
        errors()
