"""Measured steps as arrays, from each kind of table that people have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddltool.errors import InputError
from ddltool.profile import check_profile

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
# The first steps after a start allocate, compile and fill caches; they are no steady state.
WARMUP_STEPS = 3
_NATIVE = {"num_nodes", "num_replicas", "local_batch_size", "step_time_s", "sync_time_s"}
_PLACEMENTS = {"placement", "local_bsz", "step_time", "sync_time"}
_SCALABILITY = {"num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"}
_TELEMETRY = {"step", "rank", "batch", "compute_s", "sync_s", "wait_s", "world_size", "num_nodes"}
# Beyond these a number is a mistake of units or of a writer, and its square would leave the range of floats.
TIMES_S = (1e-9, 1e9)
LARGEST_COUNT = 10**9


@dataclass(frozen=True, kw_only=True, eq=False)
class Observations:
    """``n`` measured configurations; arrays of shape (n,), times in seconds, ``grad_time_s`` NaN where not observed.

    ``accumulation_steps`` s: passes without synchronisation before the one that synchronises; ``grad_time_s`` is the time
    of one pass. ``row`` counts from 1 in the table that the row came from, ``part`` tells which table that was.
    """

    num_nodes: Array
    num_replicas: Array
    local_batch_size: Array
    step_time_s: Array
    grad_time_s: Array
    accumulation_steps: Array = field(default_factory=lambda: np.zeros(0))
    device: NDArray[np.object_] = field(default_factory=lambda: np.zeros(0, dtype=object))
    row: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    part: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        """Fill in what most tables do not say: no accumulation, one device without a name, rows in order."""
        count = len(self.step_time_s)
        usual: dict[str, NDArray[Any]] = {
            "accumulation_steps": np.zeros(count),
            "device": np.full(count, "", dtype=object),
            "row": np.arange(1, count + 1),
            "part": np.zeros(count, dtype=np.int64),
        }
        for name, values in usual.items():
            if len(getattr(self, name)) == 0:
                object.__setattr__(self, name, values)

    def __len__(self) -> int:
        return len(self.step_time_s)

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Observations:
        """Return the rows that a mask (n,) or indices choose."""
        return Observations(**{f.name: getattr(self, f.name)[rows] for f in fields(Observations)})

    def by_device(self) -> dict[str, Observations]:
        """Return the rows of each device type, types in the order in which they come."""
        names, first, which = np.unique(self.device.astype(str), return_index=True, return_inverse=True)
        return {str(names[i]): self.take(which == i) for i in np.argsort(first)}


def concatenate(parts: Sequence[Observations]) -> Observations:
    """Return all rows of the parts, one after the other; ``part`` then counts the parts from 0."""
    columns = {f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Observations)}
    columns["part"] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return Observations(**columns)


def check(rows: Observations) -> None:
    """Raise InputError when there are no rows, or a time or count is no number that a measurement can give."""
    if len(rows) == 0:
        raise InputError("observations", "are empty", "give at least one measured row")
    _check_range(rows.step_time_s, "step_time_s", "observations", TIMES_S)
    _check_range(rows.grad_time_s[~np.isnan(rows.grad_time_s)], "grad_time_s", "observations", (1e-15, TIMES_S[1]))
    for name in ("num_nodes", "num_replicas", "local_batch_size"):
        _check_range(getattr(rows, name), name, "observations", (1, LARGEST_COUNT))
    _check_range(rows.accumulation_steps, "accumulation_steps", "observations", (0, LARGEST_COUNT))


def _check_range(values: Array, name: str, where: str, limits: tuple[float, float]) -> None:
    good = (values >= limits[0]) & (values <= limits[1])  # False for NaN
    if not good.all():
        first = int(np.flatnonzero(~good)[0])
        wanted = f"it must lie between {limits[0]:g} and {limits[1]:g}"
        raise InputError(f"{where}:row {first + 1}:{name}", f"is {values[first]:g}", wanted)


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
    for name in ("num_nodes", "num_replicas", "local_batch_size"):
        # before whole numbers are made of them: 1e308 has none
        _check_most(frame[name], name, where)
    return _checked(check_profile(frame, where), where)


def _check_most(column: pd.Series[Any], name: str, where: str) -> None:
    import pandas as pd

    numbers = pd.to_numeric(column, errors="coerce").to_numpy(dtype=float)
    bad = np.flatnonzero(np.isfinite(numbers) & (numbers > LARGEST_COUNT))
    if bad.size:
        raise InputError(
            f"{where}:row {bad[0] + 1}:{name}", f"is {column.iloc[bad[0]]}", f"it must be at most {LARGEST_COUNT}"
        )


def _from_adaptdl(frame: pd.DataFrame, where: str) -> Observations:
    names = {"local_bsz": "local_batch_size", "step_time": "step_time_s", "sync_time": "sync_time_s"}
    return _from_profile(frame.rename(columns=names), where)


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
    """Return observations from a checked profile frame.

    T_grad is ``grad_time_s`` where the table has it, else one pass's share of what the step takes without synchronisation.
    """
    step, sync = frame["step_time_s"].to_numpy(dtype=float), frame["sync_time_s"].to_numpy(dtype=float)
    _check_range(step, "step_time_s", where, TIMES_S)
    bad = np.flatnonzero(sync >= step)
    if bad.size:
        text = f"is {sync[bad[0]]:g}, not below the step time {step[bad[0]]:g}"
        raise InputError(f"{where}:row {bad[0] + 1}:sync_time_s", text, "it is the part of the step that synchronises")
    passes = _optional(frame, "accumulation_steps", where)
    passes = np.where(np.isnan(passes), 0.0, passes)
    _check_range(passes, "accumulation_steps", where, (0, LARGEST_COUNT))
    bad = np.flatnonzero(passes != np.round(passes))
    if bad.size:
        raise InputError(
            f"{where}:row {bad[0] + 1}:accumulation_steps", f"is {passes[bad[0]]:g}", "it must be a whole number >= 0"
        )
    grad = _optional(frame, "grad_time_s", where)
    known = ~np.isnan(grad)
    bad = np.flatnonzero(known & ~((grad > 0) & (grad <= step)))
    if bad.size:
        text = f"is {grad[bad[0]]:g}, not above 0 and at most the step time {step[bad[0]]:g}"
        raise InputError(f"{where}:row {bad[0] + 1}:grad_time_s", text, "it is the time of one pass over a local batch")
    grad = np.where(known, grad, (step - sync) / (passes + 1.0))
    columns = {name: frame[name].to_numpy(dtype=float) for name in ("num_nodes", "num_replicas", "local_batch_size")}
    return Observations(
        **columns,
        step_time_s=step,
        # a pass below the resolution of any clock says that all was synchronisation: nothing about T_grad
        grad_time_s=np.where(grad >= TIMES_S[0] * 1e-6, grad, np.nan),
        accumulation_steps=passes,
        device=frame["device"].to_numpy(dtype=object),
    )


def _optional(frame: pd.DataFrame, name: str, where: str) -> Array:
    """Return a column of numbers, NaN where empty or absent. Raises InputError naming a cell that is no number."""
    import pandas as pd

    if name not in frame.columns:
        return np.full(len(frame), np.nan)
    numbers: Array = pd.to_numeric(frame[name], errors="coerce").to_numpy(dtype=float)
    bad = np.flatnonzero(~np.isfinite(numbers) & frame[name].notna().to_numpy())
    if bad.size:
        raise InputError(f"{where}:row {bad[0] + 1}:{name}", f"is {frame[name].iloc[bad[0]]}", "it must be a number")
    return numbers


def _from_telemetry(frame: pd.DataFrame, where: str) -> Observations:
    """Return medians per rank and batch size, the warm-up left out.

    The step is compute plus synchronisation. Waiting for slower ranks is left out: it comes from how the batch is
    split, not from how fast this rank or the network is.
    """
    import pandas as pd

    # an integer of hundreds of digits is no float: infinite, and refused as such
    limited = frame[sorted(_TELEMETRY)].map(lambda item: np.inf if isinstance(item, int) and item > 1e300 else item)
    numbers = limited.apply(pd.to_numeric, errors="coerce").astype(float)
    bad = np.argwhere(~(np.isfinite(numbers.to_numpy()) & (numbers.to_numpy() >= 0)))
    if bad.size:
        row, column = int(bad[0][0]), str(numbers.columns[bad[0][1]])
        raise InputError(
            f"{where}:line {row + 1}:{column}", f"is {str(frame[column].iloc[row])[:40]}", "it must be a number >= 0"
        )
    steady = numbers[numbers["step"] >= WARMUP_STEPS] if numbers["step"].nunique() > 2 * WARMUP_STEPS else numbers
    steady = steady[(steady["batch"] > 0) & (steady["compute_s"] > 0)]
    if steady.empty:
        raise InputError(where, "holds no step with samples", "let the job train for more steps")
    # How many passes a step's samples came in, where the rows say so: the last of them synchronises.
    passes = _optional(frame, "passes", where) if "passes" in frame.columns else np.ones(len(frame))
    steady = steady.assign(passes=np.maximum(np.nan_to_num(passes, nan=1.0), 1.0)[steady.index])
    keys = ["num_nodes", "world_size", "rank", "batch", "passes"]
    if "device" in frame.columns:
        steady = steady.assign(device=frame["device"].astype(str))
        keys.append("device")
    rows = steady.groupby(keys, as_index=False)[["compute_s", "sync_s"]].median()
    made = Observations(
        num_nodes=rows["num_nodes"].to_numpy(dtype=float),
        num_replicas=rows["world_size"].to_numpy(dtype=float),
        local_batch_size=(rows["batch"] / rows["passes"]).to_numpy(dtype=float),
        step_time_s=(rows["compute_s"] + rows["sync_s"]).to_numpy(dtype=float),
        grad_time_s=(rows["compute_s"] / rows["passes"]).to_numpy(dtype=float),
        accumulation_steps=rows["passes"].to_numpy(dtype=float) - 1.0,
        device=rows["device"].to_numpy(dtype=object) if "device" in rows else np.zeros(0, dtype=object),
        row=np.zeros(len(rows), dtype=np.int64),
    )
    for name in ("step_time_s", "grad_time_s"):
        _check_range(getattr(made, name), name, f"{where} (medians)", TIMES_S)
    for name in ("num_nodes", "num_replicas", "local_batch_size"):
        _check_range(getattr(made, name), name, f"{where} (medians)", (1, LARGEST_COUNT))
    return made
