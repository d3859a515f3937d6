"""Which rows of a profile tell of one device: its own, measured, of one replica and one pass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddltool.analyzers.costs.fitting import Measured
from ddltool.analyzers.costs.model import OPTIMIZERS
from ddltool.device import Device, DeviceTable, name_key
from ddltool.errors import InputError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

# What `ddltool profile` trains with; its settings name neither.
_PROFILE = {"precision": "fp32", "optimizer": "sgd"}
_PROFILE_SETTINGS = {"device", "warmup", "torch"}
# The name of a row's device where it was given none.
_UNNAMED = {"", "cuda", "gpu"}
_DIGEST = re.compile(r"#[0-9a-f]{12}$")


def measured_rows(
    frame: pd.DataFrame,
    where: str,
    device: Device,
    known: DeviceTable,
    *,
    model: str | None = None,
    precision: str = "fp32",
    optimizer: str | None = None,
) -> list[Measured]:
    """Return the rows of a profile (``num_replicas`` 1, no accumulation) that were measured on a device.

    ``frame``: in the columns of :class:`ProfileRow`. ``model``: SOURCE of rows that do not say; ``optimizer``: of rows that do
    not say, adam by default. Raises InputError when no row is of the device, when one was predicted, was measured with another
    precision or optimizer, on a CPU, or does not say its model.
    """
    names = [str(name) for name in frame["device"]]
    is_own = {name: _is(device, name, known) for name in set(names)}
    if not any(is_own.values()):
        others = ", ".join(sorted(is_own)[:8])
        remedy = "name the device that was measured, as ddltool devices or --devices-file names it"
        raise InputError(where, f"holds rows of {others} and none of {device.name}", remedy)
    found = []
    for number, (name, row) in enumerate(zip(names, frame.to_dict("records"), strict=True), start=1):
        if not is_own[name]:
            continue
        place = f"{where}:row {number}"
        if row.get("origin") == "predicted" or str(row.get("settings", "")).startswith("predicted"):
            raise InputError(f"{place}:origin", "is predicted", "calibrate with measured rows")
        passes = row.get("accumulation_steps", 0)
        if row["num_replicas"] != 1 or passes > 0:  # a row that does not say has NaN
            continue
        said = _said(row, place)
        if said.get("precision", precision) not in (precision, {"tf32": "fp32"}.get(precision)):
            raise InputError(place, f"was measured in {said['precision']}, not {precision}", _alike("precision"))
        if optimizer is not None and said.get("optimizer", optimizer) != optimizer:
            raise InputError(place, f"was measured with {said['optimizer']}, not {optimizer}", _alike("optimizer"))
        trained = said.get("optimizer") or optimizer or "adam"
        if trained not in OPTIMIZERS:
            raise InputError(f"{place}:optimizer", f"unknown {trained!r}", did_you_mean(trained, OPTIMIZERS))
        source = row.get("source")
        source = _DIGEST.sub("", source) if isinstance(source, str) and source else model
        if source is None:
            raise InputError(where, "does not say which model was trained", "name it: --model SOURCE")
        found.append(
            Measured(
                model=source, batch=int(row["local_batch_size"]), optimizer=trained, seconds=float(row["step_time_s"])
            )
        )
    return found


def _is(device: Device, name: str, known: DeviceTable) -> bool:
    found = known.find(name)
    return name.casefold() in _UNNAMED or (found is not None and name_key(found.name) == name_key(device.name))


def _said(row: Mapping[Any, Any], place: str) -> dict[str, str]:
    """Return the precision and optimizer that a row tells, in its columns, its settings, or by who wrote it."""
    settings = dict(part.split("=", 1) for part in str(row.get("settings", "")).split(";") if "=" in part)
    said = dict(_PROFILE) if set(settings) >= _PROFILE_SETTINGS else {}
    for told in (settings, row):
        said |= {name: told[name] for name in _PROFILE if isinstance(told.get(name), str) and told[name]}
    if settings.get("device") == "cpu":
        raise InputError(place, "was measured on a CPU", "measure on the GPU: ddltool profile --device cuda")
    return said


def _alike(option: str) -> str:
    return f"leave --{option} out, or measure alike"
