"""Measured steps from each kind of table that people have, as arrays for the fit or as rows of profile.csv.

Tables are native profiles, hook telemetry, AdaptDL's placements and scalability tables, and profiler traces. Start at
:func:`from_frame` and :func:`import_table`. Every check is vectorised, so that a million rows take seconds; a bad value is
named as ``FILE:row N:COLUMN``, rows counted from 1 after the header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ddltool.errors import InputError, did_you_mean
from ddltool.profile import check_profile

if TYPE_CHECKING:
    import pandas as pd

    from ddltool.analyzers.oracle.kineto import TraceSteps

Array = NDArray[np.float64]
# The first steps after a start allocate, compile and fill caches; they are no steady state.
WARMUP_STEPS = 3
Kind = Literal["profile", "placements", "scalability", "telemetry"]
_COUNTS = ("num_nodes", "num_replicas", "local_batch_size")
_OWN = (*_COUNTS, "step_time_s", "sync_time_s")
# AdaptDL's column for each of ours.
_ADAPTDL = {"local_bsz": "local_batch_size", "step_time": "step_time_s", "sync_time": "sync_time_s"}
_TELEMETRY = ("step", "rank", "world_size", "num_nodes", "batch", "compute_s", "sync_s")
TELEMETRY_NUMBERS = (*_TELEMETRY, "memory_bytes", "passes")
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
    for name in _COUNTS:
        _check_range(getattr(rows, name), name, "observations", (1, LARGEST_COUNT))
    _check_range(rows.accumulation_steps, "accumulation_steps", "observations", (0, LARGEST_COUNT))


def _check_range(values: Array, name: str, where: str, limits: tuple[float, float]) -> None:
    bad = np.flatnonzero(~((values >= limits[0]) & (values <= limits[1])))  # NaN is bad too
    if bad.size:
        wanted = f"it must lie between {limits[0]:g} and {limits[1]:g}"
        raise InputError(f"{where}:row {bad[0] + 1}:{name}", f"is {values[bad[0]]:g}", wanted)


def kind_of(columns: list[str], where: str) -> Kind:
    """Return what a table with these columns holds.

    Raises InputError for a column that occurs twice, for columns of two kinds of table, and for those of none.
    """
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise InputError(f"{where}:{twice[0]}", "is the name of two columns", "name each column once")
    names = set(columns)
    own, theirs = names & {"local_batch_size", "step_time_s", "sync_time_s"}, names & set(_ADAPTDL)
    if own and theirs:
        mixed = f"mixes the columns of two kinds of table ({sorted(own)[0]} and {sorted(theirs)[0]})"
        raise InputError(where, mixed, "give one kind per file")
    if "placement" in names and names & {"num_nodes", "num_replicas"}:
        raise InputError(where, "has both placement and num_nodes or num_replicas", "keep one of them")
    if names >= set(_TELEMETRY):
        return "telemetry"
    wanted: dict[Kind, set[str]] = {
        "profile": set(_OWN),
        "placements": {"placement", *_ADAPTDL},
        "scalability": {"num_nodes", "num_replicas", *_ADAPTDL},
    }
    for kind, needed in wanted.items():
        if names >= needed:
            return kind
    nearest = max(wanted, key=lambda kind: len(names & wanted[kind]) / len(wanted[kind]))
    missing = sorted(wanted[nearest] - names)
    if names & wanted[nearest]:
        raise InputError(where, f"has no column {missing[0]!r}", did_you_mean(missing[0], names))
    expected = " or ".join(",".join(sorted(needed)) for needed in wanted.values())
    raise InputError(where, f"has columns {', '.join(sorted(names))[:200]}", f"expected {expected}")


def from_frame(frame: pd.DataFrame, where: str) -> Observations:
    """Return the observations of a native profile, hook telemetry, or AdaptDL's placements or scalability table.

    T_grad is ``grad_time_s`` where the table has it, else one pass's share of what the step takes without synchronisation.
    Raises InputError naming the row and the column, or the columns that would be right.
    """
    kind = kind_of([str(name) for name in frame.columns], where)
    rows = _rows(frame, kind, where)
    step, sync = rows["step_time_s"].to_numpy(dtype=float), rows["sync_time_s"].to_numpy(dtype=float)
    passes = np.nan_to_num(_optional(rows, "accumulation_steps", where))
    _check_cells(rows, "accumulation_steps", where, (passes >= 0) & (passes == np.round(passes)), "a whole number >= 0")
    grad = _optional(rows, "grad_time_s", where)
    known = ~np.isnan(grad)
    good = ~known | ((grad > 0) & (grad <= step))
    _check_cells(rows, "grad_time_s", where, good, "the time of one pass, above 0 and at most the step time")
    grad = np.where(known, grad, (step - sync) / (passes + 1.0))
    device = rows["device"].astype(str).to_numpy(dtype=object) if "device" in rows else np.zeros(0, dtype=object)
    return Observations(
        **{name: rows[name].to_numpy(dtype=float) for name in _COUNTS},
        step_time_s=step,
        # a pass below the resolution of any clock says that all was synchronisation: nothing about T_grad
        grad_time_s=np.where(grad >= TIMES_S[0] * 1e-6, grad, np.nan),
        accumulation_steps=passes,
        device=device,
        row=np.zeros(len(rows) if kind == "telemetry" else 0, dtype=np.int64),
    )


def import_table(frame: pd.DataFrame, where: str, device: str | None) -> pd.DataFrame:
    """Return a table's rows in the columns of profile.csv, with ``origin`` = imported.

    ``device`` overrides the file's own device column; AdaptDL's tables have none and need it. Telemetry becomes one
    row per rank, batch size and number of passes: the medians of its steps, the first three left out. Raises InputError
    as the module says.
    """
    kind = kind_of([str(name) for name in frame.columns], where)
    if frame.empty:
        raise InputError(where, "has no rows", "give at least one measured row")
    rows = _rows(frame, kind, where)
    if kind == "telemetry":
        rows["local_batch_size"] = np.maximum(np.rint(rows["local_batch_size"]), 1)
        rows[list(_COUNTS)] = rows[list(_COUNTS)].astype(np.int64)
    return _named(rows, where, device)


def _rows(frame: pd.DataFrame, kind: Kind, where: str) -> pd.DataFrame:
    """Return the checked rows of a table of some kind, columns named as in profile.csv."""
    if kind == "telemetry":
        return _of_telemetry(frame, where)
    if kind == "profile":
        return check_profile(_checked(frame, where, {}).assign(device=frame.get("device", "")), where)
    rows = frame[list(_ADAPTDL)].rename(columns=_ADAPTDL)
    if kind == "placements":
        rows = rows.assign(**_split_placements(frame["placement"], where))
    else:
        rows = rows.assign(num_nodes=frame["num_nodes"], num_replicas=frame["num_replicas"])
    return _checked(rows, where, {own: theirs for theirs, own in _ADAPTDL.items()})


def import_steps(
    steps: TraceSteps,
    *,
    local_batch_size: int | None,
    num_nodes: int | None = None,
    num_replicas: int | None = None,
    device: str | None = None,
) -> pd.DataFrame:
    """Return a profiler trace as one row: medians over its steps, synchronisation that no compute hid.

    A trace knows neither the batch size nor the nodes; the device and the number of replicas where it says so. Raises
    InputError when it lacks what is not given either, and when the replicas given are not those it says.
    """
    import pandas as pd

    if local_batch_size is None:
        raise InputError(steps.where, "does not say the batch size", "give it with --batch-sizes N")
    replicas = steps.world_size or num_replicas
    if num_replicas is not None and num_replicas != replicas:
        problem = f"is of a job of {replicas} replicas, not {num_replicas}"
        raise InputError(steps.where, problem, "leave --replicas out")
    if replicas is None and steps.communication_s.any():
        raise InputError(steps.where, "has collectives and does not say of how many replicas", "give --replicas N")
    replicas = replicas or 1
    if num_nodes is None and replicas > 1:
        raise InputError(steps.where, f"does not say on how many nodes its {replicas} ranks ran", "give --nodes N")
    low, high = np.percentile(steps.step_time_s, [25, 75])
    row = {
        "device": steps.device or "",
        "num_nodes": num_nodes or 1,
        "num_replicas": replicas,
        "local_batch_size": local_batch_size,
        "step_time_s": float(np.median(steps.step_time_s)),
        "sync_time_s": float(np.median(steps.exposed_s)),
        "step_time_spread_s": float(high - low),
        "repeats": len(steps.step_time_s),
    }
    return _named(_checked(pd.DataFrame([row]), steps.where, {}), steps.where, device)


def _checked(frame: pd.DataFrame, where: str, shown: dict[str, str]) -> pd.DataFrame:
    """Return the frame with numbers as numbers; ``shown`` maps columns to the names that the file has for them.

    Raises InputError naming the first bad row: NaN, infinite, not a number, zero or negative times, synchronisation not
    below the step, counts that are not whole, more nodes than replicas.
    """
    import pandas as pd

    checked = frame.copy()
    bad: list[tuple[int, int, str, str]] = []
    for place, name in enumerate(_OWN):
        column = checked[name]
        numbers = pd.to_numeric(column.map(_no_giant) if column.dtype == object else column, errors="coerce")
        values = numbers.to_numpy(dtype=float)
        low, high = (1, LARGEST_COUNT) if name in _COUNTS else (TIMES_S[0] * (name == "step_time_s"), TIMES_S[1])
        with np.errstate(invalid="ignore"):
            good = (values >= low) & (values <= high) & ((name not in _COUNTS) | (values == np.floor(values)))
        if good.all():
            checked[name] = values.astype(np.int64) if name in _COUNTS else values
            continue
        row = int(np.flatnonzero(~good)[0])
        wanted = (
            f"be a whole number from 1 to {LARGEST_COUNT}" if name in _COUNTS else f"lie between {low:g} and {high:g}"
        )
        bad.append((row, place, f"is {_cell(column.iloc[row])}", f"it must {wanted}"))
    if bad:
        row, place, problem, remedy = min(bad)
        raise InputError(f"{where}:row {row + 1}:{shown.get(_OWN[place], _OWN[place])}", problem, remedy)
    step, sync = checked["step_time_s"].to_numpy(), checked["sync_time_s"].to_numpy()
    nodes, replicas = checked["num_nodes"].to_numpy(), checked["num_replicas"].to_numpy()
    wrong = np.flatnonzero((sync >= step) | (replicas < nodes))
    if wrong.size and sync[wrong[0]] >= step[wrong[0]]:
        row = int(wrong[0])
        label = shown.get("sync_time_s", "sync_time_s")
        text = f"is {sync[row]:g}, not below the step time {step[row]:g}"
        raise InputError(f"{where}:row {row + 1}:{label}", text, "it is the part of the step that synchronises")
    if wrong.size:
        row = int(wrong[0])
        text = f"{replicas[row]} replicas on {nodes[row]} nodes"
        raise InputError(f"{where}:row {row + 1}:num_replicas", text, "every node holds at least one replica")
    return checked


def _check_cells(frame: pd.DataFrame, name: str, where: str, good: NDArray[np.bool_], wanted: str) -> None:
    """Raise InputError for the first cell of a column that is not good, (n,)."""
    bad = np.flatnonzero(~good)
    if bad.size:
        problem = f"is {_cell(frame[name].iloc[bad[0]])}"
        raise InputError(f"{where}:row {bad[0] + 1}:{name}", problem, f"it must be {wanted}")


def _optional(frame: pd.DataFrame, name: str, where: str) -> Array:
    """Return a column of numbers, NaN where empty or absent. Raises InputError naming a cell that is no number."""
    import pandas as pd

    if name not in frame.columns:
        return np.full(len(frame), np.nan)
    numbers: Array = pd.to_numeric(frame[name], errors="coerce").to_numpy(dtype=float)
    _check_cells(frame, name, where, np.isfinite(numbers) | frame[name].isna().to_numpy(), "a number")
    return numbers


def _no_giant(value: object) -> object:
    """Return the value; an integer of hundreds of digits is no float: infinite, and refused as such."""
    return np.inf if isinstance(value, int) and abs(value) > 1e300 else value


def _split_placements(placements: pd.Series[Any], where: str) -> dict[str, NDArray[np.int64]]:
    """Return nodes and replicas of AdaptDL's placements: one digit per node, its number of GPUs."""
    texts, place = np.unique(placements.fillna("").astype(str).to_numpy(dtype=str), return_inverse=True)
    counts = np.zeros((len(texts), 2), dtype=np.int64)
    for number, text in enumerate(texts.tolist()):
        if not (text.isascii() and text.isdigit()) or int(text) == 0:
            row = int(np.flatnonzero(place == number)[0])
            shown = _cell(placements.iloc[row])
            raise InputError(f"{where}:row {row + 1}:placement", f"is {shown}", "one digit per node, such as 44")
        digits = [int(digit) for digit in text if digit != "0"]
        counts[number] = len(digits), sum(digits)
    return {"num_nodes": counts[place, 0], "num_replicas": counts[place, 1]}


def _of_telemetry(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    """Return medians per rank and batch size, the warm-up left out.

    The step is compute plus synchronisation. Waiting for slower ranks is left out: it comes from how the batch is
    split, not from how fast this rank or the network is.
    """
    import pandas as pd

    names = [name for name in TELEMETRY_NUMBERS if name in frame.columns]
    numbers = frame[names].map(_no_giant).apply(pd.to_numeric, errors="coerce").astype(float)
    values = numbers.to_numpy()
    missing = np.array([[name == "passes" for name in names]]) & frame[names].isna().to_numpy()
    bad = np.argwhere(~(missing | (np.isfinite(values) & (values >= 0))))
    if bad.size:
        row, name = int(bad[0][0]), names[int(bad[0][1])]
        raise InputError(
            f"{where}:line {row + 1}:{name}", f"is {_cell(frame[name].iloc[row])}", "it must be a number >= 0"
        )
    passes = numbers["passes"].fillna(1.0).clip(lower=1.0) if "passes" in names else 1.0
    numbers = numbers.assign(device=frame.get("device", ""), passes=passes)
    steady = numbers[numbers["step"] >= WARMUP_STEPS] if numbers["step"].nunique() > 2 * WARMUP_STEPS else numbers
    steady = steady[(steady["batch"] > 0) & (steady["compute_s"] > 0)]
    if steady.empty:
        raise InputError(where, "holds no step with samples", "let the job train for more steps")
    steady = steady.assign(step_time_s=steady["compute_s"] + steady["sync_s"])
    groups = steady.groupby(
        ["device", "num_nodes", "world_size", "rank", "batch", "passes"], as_index=False, dropna=False
    )
    quartiles = [groups["step_time_s"].quantile(share)["step_time_s"] for share in (0.25, 0.75)]
    rows: pd.DataFrame = groups[["compute_s", "sync_s"]].median()
    rows = rows.assign(
        num_replicas=rows["world_size"],
        # The samples of a step are those of all its passes; the local batch is one pass's.
        local_batch_size=rows["batch"] / rows["passes"],
        step_time_s=rows["compute_s"] + rows["sync_s"],
        sync_time_s=rows["sync_s"],
        step_time_spread_s=quartiles[1] - quartiles[0],
        repeats=groups.size()["size"],
    )
    if "memory_bytes" in names:
        rows["peak_memory_bytes"] = groups["memory_bytes"].max()["memory_bytes"]
    if (rows["passes"] > 1).any():
        rows["accumulation_steps"] = (rows["passes"] - 1).astype(np.int64)
        rows["grad_time_s"] = rows["compute_s"] / rows["passes"]
    for name, limits in (("step_time_s", TIMES_S), *((name, (1, LARGEST_COUNT)) for name in _COUNTS)):
        _check_range(rows[name].to_numpy(dtype=float), name, f"{where} (medians)", limits)
    return rows.drop(columns=["world_size", "batch", "compute_s", "sync_s", "passes"])


def _named(rows: pd.DataFrame, where: str, device: str | None) -> pd.DataFrame:
    """Return the rows with their device, the given one first, and where they come from."""
    if device is not None:
        rows = rows.assign(device=device)
    elif "device" not in rows.columns:
        raise InputError(where, "does not say the device", "name it with --device-name NAME")
    else:
        missing = rows["device"].isna() | (rows["device"].astype(str).str.strip() == "")
        if missing.any():
            row = int(np.flatnonzero(missing.to_numpy())[0])
            raise InputError(f"{where}:row {row + 1}:device", "is empty", "name it with --device-name NAME")
    return rows if "origin" in rows.columns else rows.assign(origin="imported")


def _cell(value: Any) -> str:
    """Return a cell's value as it may stand in a message."""
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
