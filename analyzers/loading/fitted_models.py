"""From tables of measured steps to a fitted model of each device type. Start at :func:`fit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from ddltool.analyzers.goodput.fit import FitResult, evaluate, predict
from ddltool.analyzers.goodput.fit import fit as fitted
from ddltool.analyzers.goodput.observations import Observations, concatenate, from_frame
from ddltool.analyzers.goodput.throughput import NAMES, ThroughputParams
from ddltool.analyzers.goodput.uncertainty import Uncertainty, configurations, parameter_intervals, suggest_next
from ddltool.errors import InputError, did_you_mean
from ddltool.goodput_model import DeviceGoodput, FitError, Goodput, LeftOut, NextMeasurement
from ddltool.tables import read_table


def fit(
    profiles: str | Path | pd.DataFrame | Sequence[str | Path], *, holdout: str | Path | None = None, seed: int = 0
) -> Goodput:
    """Fit Pollux's seven-parameter throughput model to the rows of all files together, one per device type.

    ``profiles``: profile.csv, telemetry.jsonl, an AdaptDL placements.csv, or a profile's DataFrame; ``holdout``: rows kept out,
    to measure its error on. Raises InputError for what cannot be read or fitted.
    """
    kept_out = None if holdout is None else Path(holdout)
    if isinstance(profiles, pd.DataFrame):
        rows = from_frame(profiles, "profile").by_device()
        return fit_rows(rows, ["profile"], kept_out, seed)
    paths = [Path(profiles)] if isinstance(profiles, (str, Path)) else [Path(path) for path in profiles]
    return fit_rows(read_rows(paths), [str(path) for path in paths], kept_out, seed)


def read_rows(profiles: list[Path]) -> dict[str, Observations]:
    """Return the rows of all files by device type; of one type under its name, which may be empty.

    Raises InputError when some rows name their device and others do not know to which of several they belong.
    """
    devices = concatenate([from_frame(read_table(path), str(path)) for path in profiles]).by_device()
    unnamed = devices.pop("", None)
    if unnamed is None:
        return devices
    if len(devices) > 1:
        where = str(profiles[int(unnamed.part[0])])
        raise InputError(f"{where}:device", "is missing", f"rows of {', '.join(devices)} are there too; add the column")
    return {name: concatenate_parts([rows, unnamed]) for name, rows in devices.items()} or {"": unnamed}


def concatenate_parts(parts: list[Observations]) -> Observations:
    """Return the rows of parts of one table of files: they keep the file that each came from."""
    return replace(concatenate(parts), part=np.concatenate([rows.part for rows in parts]))


def fit_rows(devices: dict[str, Observations], sources: list[str], holdout: Path | None, seed: int) -> Goodput:
    """Return the model of each device type's rows as one document.

    A type without rows of several replicas takes gamma and synchronisation from the type that has most of them: these
    belong to the network.
    """
    kept_out = read_rows([holdout]) if holdout is not None else {}
    several = {name: int((rows.num_replicas > 1).sum()) for name, rows in devices.items()}
    lender = max(several, key=lambda name: several[name])
    borrowing = {name for name, count in several.items() if count == 0 < several[lender]}
    # Small problems: threads that wait for each other cost more than they bring, above all on a loaded machine.
    with threadpool_limits(1):
        results = {name: fitted(rows, seed=seed) for name, rows in devices.items()}
        sure = {
            name: parameter_intervals(rows.take(~results[name].left_out), results[name].params)
            for name, rows in devices.items()
        }
        for name in borrowing:
            results[name], sure[name] = _borrowed(results[name], results[lender], sure[name], sure[lender])
        main = max(devices, key=lambda name: len(devices[name]))
        kept = devices[main].take(~results[main].left_out)
        following = next_measurement(kept, results[main].params, sure[main].error)
    errors = holdout_errors(results, kept_out, str(holdout))
    records = {
        name: DeviceGoodput(
            params=result.params,
            **result.error.model_dump(),
            undetermined=list(result.undetermined),
            holdout=errors.get(name),
            intervals=sure[name].intervals,
        )
        for name, result in results.items()
    }
    document = Goodput(
        sources=sources,
        **{name: getattr(records[main], name) for name in DeviceGoodput.model_fields},
        fit_seconds=sum(result.fit_seconds for result in results.values()),
        next_measurement=following,
        left_out=left_out(results, devices, sources),
    )
    if len(records) == 1:
        return document
    held = [item.holdout for item in records.values() if item.holdout is not None]
    choice = "each type with rows of several replicas has its own"
    if borrowing:
        choice = f"{', '.join(sorted(borrowing))} without rows of several replicas has that of {lender}"
    about_all = {
        **pooled_error(list(records.values())).model_dump(),
        "holdout": pooled_error(held) if held else None,
        "devices": records,
        "shared_network": bool(borrowing),
        "network_choice": choice,
        "note": f"params, intervals and next_measurement are those of {main}, the device with most rows",
    }
    return document.model_copy(update=about_all)


def _borrowed(
    own: FitResult, other: FitResult, sure: Uncertainty, other_sure: Uncertainty
) -> tuple[FitResult, Uncertainty]:
    """Return a fit and its intervals with gamma and synchronisation of another's."""
    network = {name: getattr(other.params, name) for name in NAMES[2:]}
    unknown = {*own.undetermined} & {*NAMES[:2]} | {*other.undetermined} & {*NAMES[2:]}
    intervals = sure.intervals | {name: other_sure[name] for name in NAMES[2:]}
    result = replace(
        own, params=own.params.model_copy(update=network), undetermined=tuple(name for name in NAMES if name in unknown)
    )
    return result, replace(sure, intervals=intervals)


def holdout_errors(results: dict[str, FitResult], kept_out: dict[str, Observations], where: str) -> dict[str, FitError]:
    """Return the error on the rows kept out, by device. Raises InputError for a device that was not fitted."""
    made = {}
    for name, rows in kept_out.items():
        # one device type, or rows that name none, need no matching names
        known = next(iter(results)) if len(results) == 1 else name
        if known not in results:
            raise InputError(f"{where}:device", f'is "{name}"', did_you_mean(name, results))
        if known in made:
            raise InputError(f"{where}:device", f"names {', '.join(kept_out)}", "the fitted rows are of one device")
        made[known] = evaluate(results[known].params, rows)
    return made


def pooled_error(parts: Sequence[FitError | DeviceGoodput]) -> FitError:
    """Return the error over the samples of one part or more: root mean square of RMSLE, mean of MAPE."""
    whole = sum(part.samples for part in parts)
    return FitError(
        rmsle=(sum(part.samples * part.rmsle**2 for part in parts) / whole) ** 0.5,
        mape=sum(part.samples * part.mape for part in parts) / whole,
        samples=whole,
    )


def left_out(results: dict[str, FitResult], devices: dict[str, Observations], sources: list[str]) -> list[LeftOut]:
    """Return what the fit left out, with the files' names."""
    made = []
    for name, result in results.items():
        rows = devices[name]
        expected = predict(result.params, rows)
        for i in np.flatnonzero(result.left_out).tolist():
            item = LeftOut(
                source=sources[int(rows.part[i])],
                row=int(rows.row[i]),
                device=str(rows.device[i]),
                num_nodes=int(rows.num_nodes[i]),
                num_replicas=int(rows.num_replicas[i]),
                local_batch_size=int(rows.local_batch_size[i]),
                step_time_s=float(rows.step_time_s[i]),
                expected_s=float(expected[i]),
            )
            made.append(item)
    return made


def next_measurement(rows: Observations, params: ThroughputParams, error: float) -> NextMeasurement | None:
    """Return what to measure next on a device, among the batches seen and twice the replicas seen.

    ``error``: standard deviation of a measured log time.
    """
    tried = int(rows.num_replicas.max())
    per_node = int((rows.num_replicas / rows.num_nodes).max())
    if rows.num_nodes.max() == 1:
        per_node = 2 * tried  # who has measured one node may not have a second
    candidates = configurations(2 * tried, max(1, per_node), rows.local_batch_size, tried_replicas=tried)
    found = suggest_next(rows, params, candidates, error=max(error, 1e-3))
    if found.variance_before <= 0:
        return None
    return NextMeasurement(
        num_nodes=found.num_nodes,
        num_replicas=found.num_replicas,
        local_batch_size=found.local_batch_size,
        variance_reduction=max(0.0, 1 - found.variance_after / found.variance_before),
    )
