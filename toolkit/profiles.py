"""Profile: measured step times, a pandas frame with a checked schema (kind ``ddltool.profile``, a CSV file).

One row is one configuration: device, nodes, replicas and local batch size, with the median over the repeats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddltool.artifacts import SCHEMA_VERSION, AtLeastOne, NonNegative, Positive, Record, write_text
from ddltool.errors import InputError, did_you_mean
from ddltool.tables import ABOVE_ZERO, demand, numbers, read_table

if TYPE_CHECKING:
    import pandas as pd

# Beyond these a number is a mistake of units or of a writer, and its square would leave the range of floats.
TIMES_S = (1e-9, 1e9)
LARGEST_COUNT = 10**9
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]


class ProfileRow(Record):
    """One row of profile.csv."""

    device: str = Field(min_length=1)
    num_nodes: Count
    num_replicas: Count
    local_batch_size: Count
    step_time_s: Annotated[float, Field(ge=TIMES_S[0], le=TIMES_S[1])] = Field(
        description="median seconds of a full step: forward, backward, synchronisation, update"
    )
    sync_time_s: Annotated[float, Field(ge=0, le=TIMES_S[1])] = Field(
        description="the part of it that waits for gradient synchronisation"
    )
    peak_memory_bytes: NonNegative | None = None
    step_time_spread_s: NonNegative | None = Field(default=None, description="interquartile range over the repeats")
    repeats: AtLeastOne | None = None
    step_time_low_s: Positive | None = Field(default=None, description="lower end of the median's 95 % interval")
    step_time_high_s: Positive | None = Field(default=None, description="upper end of the median's 95 % interval")
    accumulation_steps: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="passes without synchronisation before the one that synchronises; 0 is none"
    )
    grad_time_s: Positive | None = Field(
        default=None, description="median seconds of one pass over a local batch without synchronisation"
    )
    source: str | None = Field(default=None, description="the model that was measured")
    settings: str | None = Field(default=None, description="how it was measured; rows compare where this is equal")
    schema_version: int = SCHEMA_VERSION


REQUIRED = ("device", "num_nodes", "num_replicas", "local_batch_size", "step_time_s", "sync_time_s")
COLUMNS = tuple(ProfileRow.model_fields)


def check_profile(frame: pd.DataFrame, where: str, shown: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Return the frame with the schema's types; extra columns stay. Raises InputError naming row and column.

    Rows count from 1 after the header, as ``row``; ``shown``: names that the file has for columns, where they are others.
    """
    for name in REQUIRED:
        if name not in frame.columns:
            raise InputError(where, f"has no column {name!r}", did_you_mean(name, map(str, frame.columns)))
    checked = frame.copy()
    for name, wanted in ProfileRow.model_json_schema()["properties"].items():
        # Without the null of what may be missing.
        (kind,) = (part for part in wanted.get("anyOf", [wanted]) if part["type"] != "null")
        if name not in checked.columns or kind["type"] == "string":
            continue
        whole = kind["type"] == "integer"
        limits = {"minimum": kind.get("minimum", ABOVE_ZERO), "maximum": kind.get("maximum", math.inf)}
        asked: dict[str, Any] = {"missing": name not in REQUIRED, "shown": (shown or {}).get(name, name)}
        if name == "schema_version":
            asked = {"remedy": f"this ddltool reads {SCHEMA_VERSION}"}
            limits["maximum"] = SCHEMA_VERSION
        column = numbers(checked, name, where, **limits, whole=whole, **asked)
        if whole and name in REQUIRED:
            checked[name] = column.astype("int64")
        elif checked[name].dtype.kind not in "iuf":
            checked[name] = column
    pairs = checked["num_replicas"].astype(str) + " replicas on " + checked["num_nodes"].astype(str) + " nodes"
    processes = checked.get("num_gpus", checked["num_replicas"])  # a predicted replica may be spread over nodes
    few = (processes >= checked["num_nodes"]).to_numpy()
    demand(few, pairs, "num_replicas", where, "every node holds at least one replica", said="")
    checked["device"] = checked["device"].astype(str)
    return checked


def read_profile(path: str | Path) -> pd.DataFrame:
    """Return a checked profile.csv as a frame with the columns of :class:`ProfileRow`."""
    return check_profile(read_table(path), str(path))


def write_profile(frame: pd.DataFrame, path: str | Path) -> None:
    """Write a profile atomically, schema's columns first. Raises InputError if the frame breaks the schema."""
    checked = check_profile(frame, str(path)).assign(schema_version=SCHEMA_VERSION)
    ordered = [name for name in COLUMNS if name in checked.columns]
    rest = [str(name) for name in checked.columns if name not in ordered]
    write_text(path, checked[ordered + rest].to_csv(index=False))


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a table's rows as documents have them: what is missing is null."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")  # type: ignore[return-value]
