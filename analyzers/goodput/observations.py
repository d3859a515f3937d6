"""Measured steps as arrays, from each kind of table that people have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ddltool.errors import InputError
from ddltool.profile import check_profile

if TYPE_CHECKING:
    import pandas as pd

# The first steps after a start allocate, compile and fill caches; they are no steady state.
WARMUP_STEPS = 3
_NATIVE = {"num_nodes", "num_replicas", "local_batch_size", "step_time_s", "sync_time_s"}
_PLACEMENTS = {"placement", "local_bsz", "step_time", "sync_time"}
_SCALABILITY = {"num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"}
_TELEMETRY = {"step", "rank", "batch", "compute_s", "sync_s", "wait_s", "world_size", "num_nodes"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Observations:
    """``n`` measured configurations; arrays of shape (n,), times in seconds, ``grad_time_s`` NaN where not observed."""

    num_nodes: NDArray[np.float64]
    num_replicas: NDArray[np.float64]
    local_batch_size: NDArray[np.float64]
    step_time_s: NDArray[np.float64]
    grad_time_s: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.step_time_s)


def concatenate(parts: Sequence[Observations]) -> Observations:
    """Return all rows of the parts, one after the other."""
    return Observations(
        **{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Observations)}
    )


def from_frame(frame: pd.DataFrame, where: str) -> Observations:
    """Return the observations of a native profile, hook telemetry, or AdaptDL's placements or scalability table.

    Raises InputError naming the row and the column, or the columns that would be right.
    """
    columns = set(map(str, frame.columns))
    if columns >= _NATIVE:
        return _from_profile(frame, where)
    if columns >= _TELEMETRY:
        return _from_telemetry(frame, where)
    if columns >= _PLACEMENTS:
        return _from_adaptdl(frame.assign(**_split_placements(frame, where)), where)
    if columns >= _SCALABILITY:
        return _from_adaptdl(frame, where)
    wanted = " or ".join(",".join(sorted(kind)) for kind in (_NATIVE, _TELEMETRY, _PLACEMENTS, _SCALABILITY))
    raise InputError(where, f"has columns {', '.join(sorted(columns))}", f"expected {wanted}")


def _from_profile(frame: pd.DataFrame, where: str) -> Observations:
    if "device" not in frame.columns:
        frame = frame.assign(device="")
    return _checked(check_profile(frame, where), where)


def _from_adaptdl(frame: pd.DataFrame, where: str) -> Observations:
    names = {"local_bsz": "local_batch_size", "step_time": "step_time_s", "sync_time": "sync_time_s"}
    return _from_profile(frame.rename(columns=names).assign(device="adaptdl"), where)


def _split_placements(frame: pd.DataFrame, where: str) -> dict[str, list[int]]:
    """Return nodes and replicas of AdaptDL's placements: one digit per node, its number of GPUs."""
    nodes, replicas = [], []
    for row, placement in enumerate(frame["placement"].tolist(), start=1):
        text = str(placement)
        if not (text.isascii() and text.isdigit()) or int(text) == 0:
            raise InputError(f"{where}:row {row}:placement", f"is {text}", "one digit per node, such as 44")
        digits = [int(digit) for digit in text if digit != "0"]
        nodes.append(len(digits))
        replicas.append(sum(digits))
    return {"num_nodes": nodes, "num_replicas": replicas}


def _checked(frame: pd.DataFrame, where: str) -> Observations:
    """Return observations from a checked profile frame; T_grad is what the step takes without synchronisation."""
    step, sync = frame["step_time_s"].to_numpy(dtype=float), frame["sync_time_s"].to_numpy(dtype=float)
    bad = np.flatnonzero(sync >= step)
    if bad.size:
        text = f"is {sync[bad[0]]:g}, not below the step time {step[bad[0]]:g}"
        raise InputError(f"{where}:row {bad[0] + 1}:sync_time_s", text, "it is the part of the step that synchronises")
    columns = {name: frame[name].to_numpy(dtype=float) for name in ("num_nodes", "num_replicas", "local_batch_size")}
    return Observations(**columns, step_time_s=step, grad_time_s=step - sync)


def _from_telemetry(frame: pd.DataFrame, where: str) -> Observations:
    """Return medians per rank and batch size, the warm-up left out.

    The step is compute plus synchronisation. Waiting for slower ranks is left out: it comes from how the batch is
    split, not from how fast this rank or the network is.
    """
    import pandas as pd

    numbers = frame[sorted(_TELEMETRY)].apply(pd.to_numeric, errors="coerce")
    bad = np.argwhere(~np.isfinite(numbers.to_numpy(dtype=float)) | (numbers.to_numpy(dtype=float) < 0))
    if bad.size:
        row, column = int(bad[0][0]), str(numbers.columns[bad[0][1]])
        raise InputError(
            f"{where}:line {row + 1}:{column}", f"is {frame[column].iloc[row]}", "it must be a number >= 0"
        )
    steady = numbers[numbers["step"] >= WARMUP_STEPS] if numbers["step"].nunique() > 2 * WARMUP_STEPS else numbers
    steady = steady[(steady["batch"] > 0) & (steady["compute_s"] > 0)]
    if steady.empty:
        raise InputError(where, "holds no step with samples", "let the job train for more steps")
    keys = ["num_nodes", "world_size", "rank", "batch"]
    rows = steady.groupby(keys, as_index=False)[["compute_s", "sync_s"]].median()
    return Observations(
        num_nodes=rows["num_nodes"].to_numpy(dtype=float),
        num_replicas=rows["world_size"].to_numpy(dtype=float),
        local_batch_size=rows["batch"].to_numpy(dtype=float),
        step_time_s=(rows["compute_s"] + rows["sync_s"]).to_numpy(dtype=float),
        grad_time_s=rows["compute_s"].to_numpy(dtype=float),
    )
