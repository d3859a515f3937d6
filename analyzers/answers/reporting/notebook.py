"""Results for notebooks and scripts: as HTML, as a table, as a chart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel

from ddltool.analyzers.answers.reporting.charts import altair_chart
from ddltool.analyzers.answers.reporting.figures import Line, Lines
from ddltool.analyzers.answers.reporting.graph_section import trace_section
from ddltool.analyzers.answers.reporting.page import fragment
from ddltool.analyzers.answers.reporting.plan_section import joint_section
from ddltool.analyzers.answers.reporting.predict_section import predict_section
from ddltool.analyzers.answers.reporting.report import found_in, section_of
from ddltool.analyzers.answers.reporting.section import Column, Picture, Section, Table, tabled
from ddltool.analyzers.step.costs.predict import predicted_profile
from ddltool.artifact_files import ORDER
from ddltool.device import Device, DeviceTable
from ddltool.errors import InputError
from ddltool.graph_results import PredictResult, TraceResult
from ddltool.profiles import write_profile
from ddltool.results import JointPlan, ProfileResult


def section(result: BaseModel) -> Section:
    """Return the section of a result; a kind without a section of its own gets a table of its plain fields."""
    section_makers: dict[type, Callable[[Any], Section]] = {
        TraceResult: trace_section,
        PredictResult: predict_section,
        JointPlan: joint_section,
        DeviceTable: _devices_section,
    }
    if make := section_makers.get(type(result)):
        return make(result)
    kind = str(getattr(result, "kind", "")).removeprefix("ddltool.")
    if kind in ORDER:
        artifact = found_in(result)
        return section_of(artifact, [artifact])
    rows = [(name, str(value)) for name, value in result if isinstance(value, (str, int, float))]
    title = kind or type(result).__name__
    table = Table(caption=title, header=("field", "value"), rows=rows, label="read", text_columns=2)
    return Section(title=title, lead=[], blocks=[table])


def _devices_section(result: DeviceTable) -> Section:
    """Return the section of device types: their peak 16-bit rate, memory and its bandwidth, by datasheet."""
    columns: dict[str, Column[Device]] = {
        "device": "name",
        "memory": lambda device: f"{device.memory_gib:g} GiB",
        "reads": lambda device: f"{device.memory_bytes_per_s / 1e9:.4g} GB/s",
        "16 bit": lambda device: f"{_half_rate(device) / 1e12:.4g} TFLOP/s",
    }
    figure = Lines(
        title="Device types",
        lines=[
            Line(
                label="by datasheet",
                x=np.array([device.memory_bytes_per_s / 1e9 for device in result.devices]),
                y=np.array([_half_rate(device) / 1e12 for device in result.devices]),
                texts=[device.name for device in result.devices],
            )
        ],
        xlabel="memory bandwidth (GB/s)",
        ylabel="16-bit rate (TFLOP/s)",
        draw="points",
        x_axis="log",
        log_y=True,
    )
    table = tabled("Device types", "read", result.devices, columns)
    picture = Picture(figures=[figure], caption="By datasheet.", label="read", table=table)
    return Section(title="Device types", lead=[f"{len(result.devices)} device types are known."], blocks=[picture])


def _half_rate(device: Device) -> float:
    """Return a device's peak FLOP/s in float16, else in bfloat16, else in float32."""
    peaks = device.peak_flops
    return peaks.get("float16", peaks.get("bfloat16", peaks["float32"]))


# The fields that may hold a result's main rows; the first that a result has counts.
_MAIN = (
    "rows",
    "remedies",
    "assignments",
    "policies",
    "predictors",
    "algorithms",
    "schedules",
    "checks",
    "cells",
    "sections",
    "tried",
    "devices",
    "ranks",
)


def html(result: BaseModel) -> str:
    """Return a result's section as HTML without scripts, with pictures as images."""
    return fragment(section(result))


def chart(result: BaseModel) -> Any:
    """Return the first picture of a result's section as an Altair chart. Raises InputError if it has no picture."""
    for block in section(result).blocks:
        if isinstance(block, Picture):
            return altair_chart(block.figures)
    raise InputError(type(result).__name__, "has no picture", "see to_frame()")


def frame(result: BaseModel) -> pd.DataFrame:
    """Return the main rows of a result as a table: those of its first field in ``_MAIN``; else one row of all its fields.

    Records that the result has by name are indexed by it, without their lists.
    """
    if isinstance(result, PredictResult):
        return predicted_profile(result)
    document = result.model_dump(mode="json")
    for name in _MAIN:
        records = document.get(name)
        if not records:
            continue
        if isinstance(records, list):
            return pd.json_normalize(records)
        if isinstance(records, dict):
            without_lists = [
                {field: value for field, value in record.items() if not isinstance(value, list)}
                for record in records.values()
            ]
            return pd.json_normalize(without_lists).set_axis(list(records), axis="index")
    return pd.json_normalize(document)


def save_table(result: BaseModel, path: str | Path) -> None:
    """Write the rows of a measured or predicted profile as CSV. Raises InputError for other results."""
    if not isinstance(result, (PredictResult, ProfileResult)):
        problem = f"a {type(result).__name__} is no profile"
        raise InputError(str(path), problem, "name it .json, or to_frame().to_csv(...)")
    write_profile(frame(result), path)
