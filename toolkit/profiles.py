"""Profile: measured step times as a pandas frame with a checked schema (kind ``ddltool.profile``, a CSV file).

Each row holds the medians over the repeats of one configuration: device, nodes, replicas and local batch size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, Strict

from ddltool.artifacts import SCHEMA_VERSION, Record, Version, write_text
from ddltool.quantities import AtLeastOne, Duration, Name, NonNegative, Passes, Seconds, StepTime
from ddltool.tables import checked_columns, demand_valid, read_table

if TYPE_CHECKING:
    import pandas as pd

# A number beyond these is a mistake of units or of the writer.
TIMES_S = (1e-9, 1e9)
LARGEST_COUNT = 10**9
Count = Annotated[int, Strict(), Field(ge=1, le=LARGEST_COUNT)]


class ProfileRow(Record):
    """One row of profile.csv: a measured configuration."""

    device: Name
    num_nodes: Count
    num_replicas: Count
    local_batch_size: Count
    step_time_s: Annotated[float, Strict(), Field(ge=TIMES_S[0], le=TIMES_S[1], allow_inf_nan=False)] = Field(
        description="median seconds of a full step: forward, backward, synchronisation, update"
    )
    sync_time_s: StepTime = Field(description="the part of it that waits for gradient synchronisation")
    peak_memory_bytes: NonNegative | None = None
    step_time_spread_s: Seconds | None = Field(default=None, description="interquartile range over the repeats")
    repeats: AtLeastOne | None = None
    step_time_low_s: Duration | None = Field(default=None, description="lower end of the median's 95 % interval")
    step_time_high_s: Duration | None = Field(default=None, description="upper end of the median's 95 % interval")
    accumulation_steps: Passes | None = Field(
        default=None, description="passes without synchronisation before the one that synchronises; 0 is none"
    )
    grad_time_s: Duration | None = Field(
        default=None, description="median seconds of one pass over a local batch without synchronisation"
    )
    source: str | None = Field(default=None, description="the model that was measured")
    settings: str | None = Field(default=None, description="how it was measured; rows compare where this is equal")
    schema_version: Version = SCHEMA_VERSION


REQUIRED = ("device", "num_nodes", "num_replicas", "local_batch_size", "step_time_s", "sync_time_s")
COLUMNS = tuple(ProfileRow.model_fields)
_COUNTS = ("num_nodes", "num_replicas", "local_batch_size")


def check_profile(
    frame: pd.DataFrame, where: str, shown: Mapping[str, str] | None = None, *, required: Sequence[str] = REQUIRED
) -> pd.DataFrame:
    """Return a copy of the frame, checked and with the schema's types; further columns stay as they are.

    Raises InputError naming row (from 1) and column. ``where``: the table's name for errors. ``shown``: our column's name to
    the file's, where they differ. ``required``: columns that must be there.
    """
    checked = frame.copy()
    columns = checked_columns(frame, ProfileRow, where, required=required, shown=shown)
    for name, column in columns.items():
        if name in _COUNTS:
            checked[name] = column.astype("int64")  # also where the file has 2.0
        elif checked[name].dtype.kind not in "iuf":  # a numeric column keeps its own type
            checked[name] = column
    pairs = checked["num_replicas"].astype(str) + " replicas on " + checked["num_nodes"].astype(str) + " nodes"
    # Predictions also have num_gpus: one replica may be spread over several nodes.
    processes = checked.get("num_gpus", checked["num_replicas"])
    is_enough = (processes >= checked["num_nodes"]).to_numpy()
    # The pairs are whole phrases, without demand_valid's "is" before them.
    demand_valid(is_enough, pairs, "num_replicas", where, "every node holds at least one replica", said="")
    return checked


def read_profile(path: str | Path) -> pd.DataFrame:
    """Return the table in a profile file, checked by :func:`check_profile`. Raises InputError for a wrong one."""
    return check_profile(read_table(path), str(path))


def write_profile(frame: pd.DataFrame, path: str | Path) -> None:
    """Check a profile and write it atomically as CSV: the schema's columns first. Raises InputError for a wrong one."""
    checked = check_profile(frame, str(path)).assign(schema_version=SCHEMA_VERSION)
    ordered = [name for name in COLUMNS if name in checked.columns]
    other_columns = [str(name) for name in checked.columns if name not in ordered]
    write_text(path, checked[ordered + other_columns].to_csv(index=False))


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table as mappings from column to value, None for a missing one."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")  # type: ignore[return-value]
