"""Measurements of others as rows of profile.csv: AdaptDL's tables, hook telemetry, profiler traces, other profiles.

Start at :func:`import_table`. Every check is vectorised, so that a million rows take seconds; a bad value is named as
``FILE:row N:COLUMN``, rows counted from 1 after the header.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.goodput.observations import WARMUP_STEPS
from ddltool.errors import InputError, did_you_mean
from ddltool.profile import check_profile

if TYPE_CHECKING:
    import pandas as pd

    from ddltool.analyzers.oracle.trace_steps import TraceSteps

Kind = Literal["profile", "placements", "scalability", "telemetry"]
# Longer steps and larger batches than these are slips of the pen: eleven days, a milliard samples.
MOST_SECONDS, MOST_COUNT = 1e6, 10**9
_OWN = ("num_nodes", "num_replicas", "local_batch_size", "step_time_s", "sync_time_s")
# AdaptDL's column for each of ours.
_ADAPTDL = {"local_bsz": "local_batch_size", "step_time": "step_time_s", "sync_time": "sync_time_s"}
TELEMETRY_NUMBERS = (
    "step",
    "rank",
    "world_size",
    "num_nodes",
    "batch",
    "compute_s",
    "sync_s",
    "memory_bytes",
    "passes",
)
_TELEMETRY_NEEDED = {"step", "rank", "batch", "compute_s", "sync_s", "world_size", "num_nodes"}


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
    if names >= _TELEMETRY_NEEDED:
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


def import_table(frame: pd.DataFrame, where: str, device: str | None) -> pd.DataFrame:
    """Return a table's rows in the columns of profile.csv, with ``origin`` = imported.

    ``device`` overrides the file's own device column; AdaptDL's tables have none and need it. Telemetry becomes one
    row per rank, batch size and number of passes: the medians of its steps, the first three left out. Raises InputError
    as the module says.
    """
    kind = kind_of([str(name) for name in frame.columns], where)
    if frame.empty:
        raise InputError(where, "has no rows", "give at least one measured row")
    if kind == "telemetry":
        return _named(_from_telemetry(frame, where), where, device)
    if kind == "profile":
        rows = frame.copy()
    else:
        rows = frame[list(_ADAPTDL)].rename(columns=_ADAPTDL)
        if kind == "placements":
            rows = rows.assign(**_split(frame["placement"], where))
        else:
            rows = rows.assign(num_nodes=frame["num_nodes"], num_replicas=frame["num_replicas"])
    checked = _named(check_rows(rows, where, _ADAPTDL if kind != "profile" else {}), where, device)
    return check_profile(checked, where) if kind == "profile" else checked


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
    return _named(check_rows(pd.DataFrame([row]), steps.where, {}), steps.where, device)


def check_rows(frame: pd.DataFrame, where: str, names: dict[str, str]) -> pd.DataFrame:
    """Return the frame with numbers as numbers. ``names`` maps the file's own column names to the frame's.

    Raises InputError naming the first bad row: NaN, infinite, not a number, zero or negative times, synchronisation not
    below the step, counts that are not whole, more nodes than replicas.
    """
    import pandas as pd

    shown = {new: old for old, new in names.items()}
    checked = frame.copy()
    bad: list[tuple[int, int, str, str]] = []
    for place, name in enumerate(_OWN):
        numbers = pd.to_numeric(checked[name], errors="coerce").to_numpy(dtype=float)
        counts = name in ("num_nodes", "num_replicas", "local_batch_size")
        good, wanted = _good(numbers, name, counts)
        if not good.all():
            row = int(np.flatnonzero(~good)[0])
            bad.append((row, place, shown.get(name, name), f"it must be {wanted}"))
        else:
            checked[name] = numbers.astype(np.int64) if counts else numbers
    if bad:
        row, place, label, remedy = min(bad)
        raise InputError(f"{where}:row {row + 1}:{label}", f"is {_cell(frame[_OWN[place]].iloc[row])}", remedy)
    _check_between(checked, where, shown)
    return checked


def _good(numbers: NDArray[np.float64], name: str, counts: bool) -> tuple[NDArray[np.bool_], str]:
    with np.errstate(invalid="ignore"):
        if counts:
            whole = (numbers == np.floor(numbers)) & (numbers >= 1) & (numbers <= MOST_COUNT)
            return whole, f"a whole number from 1 to {MOST_COUNT}"
        least = numbers >= 0 if name == "sync_time_s" else numbers > 0
        seconds = "seconds from 0" if name == "sync_time_s" else "seconds above 0"
        return least & (numbers <= MOST_SECONDS), f"{seconds} and at most {MOST_SECONDS:g}"


def _check_between(frame: pd.DataFrame, where: str, shown: dict[str, str]) -> None:
    """Raise InputError where a row's columns contradict each other."""
    step, sync = frame["step_time_s"].to_numpy(), frame["sync_time_s"].to_numpy()
    late = np.flatnonzero(sync >= step)
    few = np.flatnonzero(frame["num_replicas"].to_numpy() < frame["num_nodes"].to_numpy())
    if late.size and (not few.size or late[0] <= few[0]):
        row = int(late[0])
        text = f"is {sync[row]:g}, not below the step time {step[row]:g}"
        label = shown.get("sync_time_s", "sync_time_s")
        raise InputError(f"{where}:row {row + 1}:{label}", text, "it is the part of the step that synchronises")
    if few.size:
        row = int(few[0])
        text = f"{frame['num_replicas'].iloc[row]} replicas on {frame['num_nodes'].iloc[row]} nodes"
        raise InputError(f"{where}:row {row + 1}:num_replicas", text, "every node holds at least one replica")


def _split(placements: pd.Series[Any], where: str) -> dict[str, NDArray[np.int64]]:
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


def _from_telemetry(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    """Return medians per rank and batch size; the step is compute plus synchronisation, without waits for slower ranks."""
    import pandas as pd

    if "device" not in frame.columns:
        frame = frame.assign(device="")
    needed = [name for name in TELEMETRY_NUMBERS if name in frame.columns]
    numbers = frame[needed].apply(pd.to_numeric, errors="coerce")
    values = numbers.to_numpy(dtype=float)
    with np.errstate(invalid="ignore"):
        bad = np.argwhere(~((values >= 0) & (values < np.inf)))
    if bad.size:
        row, name = int(bad[0][0]), needed[int(bad[0][1])]
        raise InputError(f"{where}:row {row + 1}:{name}", f"is {_cell(frame[name].iloc[row])}", "it must be >= 0")
    numbers = numbers.assign(device=frame["device"])
    passes = numbers["passes"].clip(lower=1) if "passes" in numbers.columns else 1.0
    numbers = numbers.assign(passes=passes)
    steady = numbers[numbers["step"] >= WARMUP_STEPS] if numbers["step"].nunique() > 2 * WARMUP_STEPS else numbers
    steady = steady[(steady["batch"] > 0) & (steady["compute_s"] > 0)]
    if steady.empty:
        raise InputError(where, "holds no step with samples", "let the job train for more steps")
    steady = steady.assign(step_time_s=steady["compute_s"] + steady["sync_s"])
    groups = steady.groupby(
        ["device", "num_nodes", "world_size", "rank", "batch", "passes"], as_index=False, dropna=False
    )
    spread = groups["step_time_s"].quantile(0.75)["step_time_s"] - groups["step_time_s"].quantile(0.25)["step_time_s"]
    rows = groups[["compute_s", "sync_s"]].median()
    # Step and synchronisation as the fit reads telemetry: medians of the parts, whose sum is the step.
    rows = rows.assign(step_time_s=rows["compute_s"] + rows["sync_s"], step_time_spread_s=spread)
    rows["repeats"] = groups.size()["size"]
    if "memory_bytes" in steady.columns:
        rows["peak_memory_bytes"] = groups["memory_bytes"].max()["memory_bytes"]
    if (rows["passes"] > 1).any():
        # The samples of a step are those of all its passes; the local batch is one pass's.
        rows = rows.assign(
            accumulation_steps=(rows["passes"] - 1).astype(np.int64), grad_time_s=rows["compute_s"] / rows["passes"]
        )
        rows["batch"] = np.maximum(np.rint(rows["batch"] / rows["passes"]), 1)
    names = {"world_size": "num_replicas", "batch": "local_batch_size", "sync_s": "sync_time_s"}
    return check_rows(rows.rename(columns=names).drop(columns=["compute_s", "passes"]), where, {})


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
