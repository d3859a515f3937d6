"""Measured steps from each kind of table that people have, as arrays for the fit or as rows of profile.csv.

Tables are native profiles, hook telemetry, AdaptDL's placements and scalability tables, and profiler traces. Start at
:func:`from_frame` and :func:`import_table`. Every check is vectorised, so that a million rows take seconds; a bad value is
named as ``FILE:row N:COLUMN``, rows counted from 1 after the header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ddltool.arrays import Flags, Floats, Ints
from ddltool.errors import InputError, did_you_mean
from ddltool.profiles import LARGEST_COUNT, REQUIRED, TIMES_S, check_profile
from ddltool.tables import demand_valid, numbers
from ddltool.telemetry import WARMUP_STEPS, rows_of_runs, runs_of

if TYPE_CHECKING:
    import pandas as pd

    from ddltool.analyzers.step.measured.kineto import TraceSteps

Kind = Literal["profile", "placements", "scalability", "telemetry"]
_COUNTS = ("num_nodes", "num_replicas", "local_batch_size")
# AdaptDL's column for each of ours.
_ADAPTDL = {"local_bsz": "local_batch_size", "step_time": "step_time_s", "sync_time": "sync_time_s"}
_TELEMETRY = ("step", "rank", "world_size", "num_nodes", "batch", "compute_s", "sync_s")
# Least T_grad, in seconds: below it a table counts the whole step as synchronisation, which says nothing about T_grad.
_LEAST_GRAD_S = 1e-15
_DIGITS, _PER_NODE = re.compile("[0-9]+"), "one digit per node, such as 44"


@dataclass(frozen=True, kw_only=True, eq=False)
class Observations:
    """``n`` measured configurations; arrays of shape (n,), times in seconds, ``grad_time_s`` NaN where not observed.

    ``accumulation_steps`` are the passes before the one that synchronises; ``grad_time_s`` is the time of one pass. ``device``
    is the type's name, "" where the table has none. ``part`` is the index of the table that a row came from.
    """

    num_nodes: Floats
    num_replicas: Floats
    local_batch_size: Floats
    step_time_s: Floats
    grad_time_s: Floats
    accumulation_steps: Floats = field(default_factory=lambda: np.zeros(0))
    device: NDArray[np.object_] = field(default_factory=lambda: np.zeros(0, dtype=object))
    part: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        """Fill in the columns that were left out: no accumulation, a device without a name, part 0."""
        count = len(self.step_time_s)
        defaults: dict[str, NDArray[Any]] = {
            "accumulation_steps": np.zeros(count),
            "device": np.full(count, "", dtype=object),
            "part": np.zeros(count, dtype=np.int64),
        }
        for name, values in defaults.items():
            if len(getattr(self, name)) == 0:
                object.__setattr__(self, name, values)

    def __len__(self) -> int:
        """Return the number of rows, n."""
        return len(self.step_time_s)

    def take(self, rows: Flags | Ints) -> Observations:
        """Return the rows that a mask (n,) or indices choose."""
        return Observations(**{f.name: getattr(self, f.name)[rows] for f in fields(Observations)})

    def by_device(self) -> dict[str, Observations]:
        """Return device type -> its rows, in the order in which the types first occur."""
        names, first_rows, device_index = np.unique(self.device.astype(str), return_index=True, return_inverse=True)
        by_first_row = np.argsort(first_rows)
        return {str(names[index]): self.take(device_index == index) for index in by_first_row}


def concatenate(parts: Sequence[Observations]) -> Observations:
    """Return the rows of all parts, one part after the other; ``part`` in the result is the index of a row's part."""
    columns = {f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Observations)}
    columns["part"] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return Observations(**columns)


def check(rows: Observations) -> None:
    """Raise InputError when there are no rows, or a time or count is out of the range that a measurement can give.

    ``grad_time_s`` may be NaN.
    """
    if len(rows) == 0:
        raise InputError("observations", "are empty", "give at least one measured row")
    limits = {
        "step_time_s": TIMES_S,
        "grad_time_s": (_LEAST_GRAD_S, TIMES_S[1]),
        **dict.fromkeys(_COUNTS, (1, LARGEST_COUNT)),
        "accumulation_steps": (0, LARGEST_COUNT),
    }
    for name, (low, high) in limits.items():
        values = getattr(rows, name)
        is_valid = (values >= low) & (values <= high) | (np.isnan(values) & (name == "grad_time_s"))
        demand_valid(is_valid, values, name, "observations", f"a number from {low:g} to {high:.15g}")


def kind_of(columns: list[str], where: str) -> Kind:
    """Return the kind of the table with these columns: a profile, telemetry, or AdaptDL's placements or scalability.

    ``where`` is the file, for errors. Raises InputError for a column that occurs twice, for columns of two kinds of table, and
    for columns that are not of any kind, with the name of the one that is missing.
    """
    repeated = sorted({name for name in columns if columns.count(name) > 1})
    if repeated:
        raise InputError(f"{where}:{repeated[0]}", "is the name of two columns", "name each column once")
    names = set(columns)
    own_columns = names & {"local_batch_size", "step_time_s", "sync_time_s"}
    adaptdl_columns = names & set(_ADAPTDL)
    if own_columns and adaptdl_columns:
        mixed = f"mixes the columns of two kinds of table ({sorted(own_columns)[0]} and {sorted(adaptdl_columns)[0]})"
        raise InputError(where, mixed, "give one kind per file")
    if "placement" in names and names & {"num_nodes", "num_replicas"}:
        raise InputError(where, "has both placement and num_nodes or num_replicas", "keep one of them")
    if "rank" in names and names & {"compute_s", "sync_s"}:
        return "telemetry"
    needed_by_kind: dict[Kind, set[str]] = {
        "profile": {*_COUNTS, "step_time_s", "sync_time_s"},
        "placements": {"placement", *_ADAPTDL},
        "scalability": {"num_nodes", "num_replicas", *_ADAPTDL},
    }
    for kind, needed in needed_by_kind.items():
        if names >= needed:
            return kind
    nearest = max(needed_by_kind, key=lambda kind: len(names & needed_by_kind[kind]) / len(needed_by_kind[kind]))
    if names & needed_by_kind[nearest]:
        missing = min(needed_by_kind[nearest] - names)
        raise InputError(where, f"has no column {missing!r}", did_you_mean(missing, names))
    expected = " or ".join(",".join(sorted(needed)) for needed in needed_by_kind.values())
    raise InputError(where, f"has columns {', '.join(sorted(names))[:200]}", f"expected {expected}")


def from_frame(frame: pd.DataFrame, where: str) -> Observations:
    """Return the observations in a native profile, hook telemetry, or AdaptDL's placements or scalability table.

    T_grad, the time of one pass without synchronisation, is ``grad_time_s`` where the table has it, else the step without
    synchronisation divided by the number of passes (accumulation steps, and the one that synchronises). Raises
    InputError naming ``where`` (the file), row and column, or the columns that would be right.
    """
    kind = kind_of([str(name) for name in frame.columns], where)
    table = _rows_of(frame, kind, where)
    step_s = table["step_time_s"].to_numpy(dtype=float)
    sync_s = table["sync_time_s"].to_numpy(dtype=float)
    missing = np.full(len(table), np.nan)
    accumulation_steps = np.nan_to_num(table.get("accumulation_steps", missing))
    grad_s = np.asarray(table.get("grad_time_s", missing), dtype=float)
    has_grad = ~np.isnan(grad_s)
    remedy = "it must be the time of one pass, above 0 and at most the step time"
    demand_valid(~has_grad | (grad_s <= step_s), grad_s, "grad_time_s", where, remedy)
    grad_s = np.where(has_grad, grad_s, (step_s - sync_s) / (accumulation_steps + 1.0))
    return Observations(
        **{name: table[name].to_numpy(dtype=float) for name in _COUNTS},
        step_time_s=step_s,
        grad_time_s=np.where(grad_s >= _LEAST_GRAD_S, grad_s, np.nan),
        accumulation_steps=accumulation_steps,
        device=table["device"].astype(str).to_numpy(dtype=object) if "device" in table else np.zeros(0, dtype=object),
    )


def import_table(frame: pd.DataFrame, where: str, device: str | None) -> pd.DataFrame:
    """Return a table's rows in the columns of profile.csv, with ``origin`` = imported where they have none.

    ``device`` overrides the file's own device column; AdaptDL's tables have none and need it. Telemetry becomes one row per
    run, rank, batch size and number of passes, with medians over its steps (see :func:`_telemetry_medians`). Raises InputError
    naming ``where`` (the file), row and column.
    """
    kind = kind_of([str(name) for name in frame.columns], where)
    if frame.empty:
        raise InputError(where, "has no rows", "give at least one measured row")
    rows = _rows_of(frame, kind, where)
    if kind == "telemetry":
        rows["local_batch_size"] = np.maximum(np.rint(rows["local_batch_size"]), 1)
        rows[list(_COUNTS)] = rows[list(_COUNTS)].astype(np.int64)
    return _add_device(rows, where, device)


def _rows_of(frame: pd.DataFrame, kind: Kind, where: str) -> pd.DataFrame:
    """Return the checked rows of a table of this ``kind``, with columns named as in profile.csv.

    Raises InputError naming file (``where``), row and column.
    """
    if kind == "telemetry":
        return _telemetry_medians(frame, where)
    if kind == "profile":
        return _check_rows(frame, where)
    rows = frame[list(_ADAPTDL)].rename(columns=_ADAPTDL)
    if kind == "placements":
        places = split_placements(frame["placement"], where)
        rows = rows.assign(num_nodes=list(map(len, places)), num_replicas=list(map(sum, places)))
    else:
        rows = rows.assign(num_nodes=frame["num_nodes"], num_replicas=frame["num_replicas"])
    return _check_rows(rows, where, {ours: theirs for theirs, ours in _ADAPTDL.items()}).drop(columns="device")


def import_steps(
    steps: TraceSteps,
    *,
    local_batch_size: int | None,
    num_nodes: int | None = None,
    num_replicas: int | None = None,
    device: str | None = None,
) -> pd.DataFrame:
    """Return a profiler trace as a table of one row of profile.csv: the medians over its steps.

    ``sync_time_s`` is the communication that no compute hides. A trace never says its batch size and number of nodes, and not
    always its device and number of replicas, so the arguments give them. Raises InputError when one is in neither, and when
    ``num_replicas`` differs from the trace's.
    """
    import pandas as pd

    if local_batch_size is None:
        raise InputError(steps.where, "does not say the batch size", "give it with --batch-size N")
    replicas = steps.world_size or num_replicas
    if num_replicas is not None and num_replicas != replicas:
        problem = f"is of a job of {replicas} replicas, not {num_replicas}"
        raise InputError(steps.where, problem, "leave --replicas out")
    if replicas is None and steps.communication_s.any():
        raise InputError(steps.where, "has collectives and does not say of how many replicas", "give --replicas N")
    replicas = replicas or 1
    if num_nodes is None and replicas > 1:
        raise InputError(steps.where, f"does not say on how many nodes its {replicas} ranks ran", "give --nodes N")
    lower_s, upper_s = np.percentile(steps.step_time_s, [25, 75])
    row = {
        **({"device": steps.device} if steps.device else {}),
        "num_nodes": num_nodes or 1,
        "num_replicas": replicas,
        "local_batch_size": local_batch_size,
        "step_time_s": float(np.median(steps.step_time_s)),
        "sync_time_s": float(np.median(steps.exposed_s)),
        "step_time_spread_s": float(upper_s - lower_s),
        "repeats": len(steps.step_time_s),
    }
    return _add_device(_check_rows(pd.DataFrame([row]), steps.where), steps.where, device)


def _check_rows(frame: pd.DataFrame, where: str, shown: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Return the checked rows of a profile, with ``device`` "" where it has no such column.

    ``shown``: our name of a column -> the file's own, for errors; None: they are the same. Raises InputError for a bad row.
    """
    rows = check_profile(frame, where, shown, required=REQUIRED if "device" in frame else REQUIRED[1:])
    rows = rows if "device" in rows else rows.assign(device="")
    label = (shown or {}).get("sync_time_s", "sync_time_s")
    remedy = "it is the part of the step that synchronises, and below the step time"
    demand_valid((rows["sync_time_s"] < rows["step_time_s"]).to_numpy(), rows["sync_time_s"], label, where, remedy)
    return rows


def split_placements(placements: pd.Series[Any], where: str) -> list[tuple[int, ...]]:
    """Return the GPUs on each used node, for each of AdaptDL's placements: "440" is (4, 4), 4 GPUs on each of two nodes.

    A placement has one digit per node. Raises InputError for one with other characters or without a GPU.
    """
    texts = placements.fillna("").astype(str).tolist()
    gpus_by_text = {
        text: tuple(int(digit) for digit in text if digit != "0") for text in set(texts) if _DIGITS.fullmatch(text)
    }
    has_gpus = np.array([bool(gpus_by_text.get(text)) for text in texts], dtype=bool)
    demand_valid(has_gpus, placements, "placement", where, _PER_NODE)
    return [gpus_by_text[text] for text in texts]


def _telemetry_medians(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    """Return telemetry as rows of profile.csv: medians per run, rank, batch size and number of passes.

    Left out are steps without samples, and a run's first ``WARMUP_STEPS`` steps where it has more than twice as many. The step
    is compute plus synchronisation, without the waiting for slower ranks: that comes from how the batch is split, not from how
    fast this rank or the network is. Raises InputError where no step is left or a median is out of range.
    """
    steps = rows_of_runs(frame, where, _TELEMETRY)
    steps = steps.assign(run=runs_of(steps), device=steps.get("device", ""))
    is_long = steps.groupby("run")["step"].transform("nunique") > 2 * WARMUP_STEPS
    steady_steps = steps[(steps["step"] >= WARMUP_STEPS) | ~is_long]
    steady_steps = steady_steps[(steady_steps["batch"] > 0) & (steady_steps["compute_s"] > 0)]
    if not steady_steps.empty and (steady_steps["servers"] > 0).all():
        problem = "holds steps with parameter servers alone, which tell nothing of synchronisation"
        raise InputError(where, problem, "give the telemetry of a run of DDP")
    steady_steps = steady_steps[steady_steps["servers"] == 0]
    if steady_steps.empty:
        raise InputError(where, "holds no step with samples", "let the job train for more steps")
    steady_steps = steady_steps.assign(step_time_s=steady_steps["compute_s"] + steady_steps["sync_s"])
    group_columns = ["run", "device", "num_nodes", "world_size", "rank", "batch", "passes"]
    groups = steady_steps.groupby(group_columns, as_index=False, dropna=False)
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
    if "memory_bytes" in steps:
        rows["peak_memory_bytes"] = groups["memory_bytes"].max()["memory_bytes"]
    if (rows["passes"] > 1).any():
        rows["accumulation_steps"] = (rows["passes"] - 1).astype(np.int64)
        rows["grad_time_s"] = rows["compute_s"] / rows["passes"]
    for name, (low, high) in {"step_time_s": TIMES_S, **dict.fromkeys(_COUNTS, (1, LARGEST_COUNT))}.items():
        numbers(rows, name, f"{where} (medians)", minimum=low, maximum=high)
    return rows.drop(columns=["run", "world_size", "batch", "compute_s", "sync_s", "passes"])


def _add_device(rows: pd.DataFrame, where: str, device: str | None) -> pd.DataFrame:
    """Return the rows with a device's name, and with the column ``origin`` = imported if they have no such column.

    ``device`` becomes the name in all rows; None leaves each row its own. Raises InputError for a row without a name.
    """
    if device is not None:
        rows = rows.assign(device=device)
    elif "device" not in rows.columns:
        raise InputError(where, "does not say the device", "name it with --device-name NAME")
    else:
        has_device = rows["device"].notna() & (rows["device"].astype(str).str.strip() != "")
        cells = rows["device"].where(has_device, "empty").reset_index(drop=True)
        demand_valid(has_device.to_numpy(), cells, "device", where, "name it with --device-name NAME")
    return rows if "origin" in rows.columns else rows.assign(origin="imported")
