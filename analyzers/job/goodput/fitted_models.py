"""From tables of measured steps to a fitted model of each device type. Start at :func:`fit_rows`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from threadpoolctl import threadpool_limits

from ddltool.analyzers.job.goodput.fit import FitResult, evaluate
from ddltool.analyzers.job.goodput.fit import fit as fitted
from ddltool.analyzers.job.goodput.observations import Observations, concatenate, from_frame
from ddltool.analyzers.job.goodput.throughput import NAMES
from ddltool.analyzers.job.goodput.uncertainty import Uncertainty, parameter_intervals
from ddltool.errors import InputError, did_you_mean
from ddltool.goodput_model import DeviceGoodput, FitError, Goodput
from ddltool.tables import read_table


def read_rows(profiles: list[Path]) -> dict[str, Observations]:
    """Return the rows of all files by device type; of one type under its name, which may be empty.

    Raises InputError when some rows name their device and others do not know to which of several they belong.
    """
    devices = concatenate([from_frame(read_table(path), str(path)) for path in profiles]).by_device()
    unnamed = devices.pop("", None)
    if unnamed is None:
        return devices
    if len(devices) > 1:
        where = profiles[int(unnamed.part[0])]
        raise InputError(f"{where}:device", "is missing", f"rows of {', '.join(devices)} are there too; add the column")
    return {name: concatenate([rows, unnamed]) for name, rows in devices.items()} or {"": unnamed}


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
        sure = {name: parameter_intervals(rows, results[name].params) for name, rows in devices.items()}
        for name in borrowing:
            results[name], sure[name] = _borrowed(results[name], results[lender], sure[name], sure[lender])
    main = max(devices, key=lambda name: len(devices[name]))
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
        "note": f"params and intervals are those of {main}, the device with most rows",
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
