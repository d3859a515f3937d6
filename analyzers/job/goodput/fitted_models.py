"""From tables of measured steps to a fitted model of each device type. Start at :func:`fit_rows`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from threadpoolctl import threadpool_limits

from ddltool.analyzers.job.goodput.fit import FitResult, Uncertainty, evaluate, parameter_intervals
from ddltool.analyzers.job.goodput.fit import fit as fit_device
from ddltool.analyzers.job.goodput.observations import Observations, concatenate, from_frame
from ddltool.analyzers.job.goodput.throughput import NAMES
from ddltool.errors import InputError, did_you_mean
from ddltool.goodput_model import DeviceGoodput, FitError, Goodput
from ddltool.tables import read_table


def read_rows(profiles: list[Path]) -> dict[str, Observations]:
    """Return device type -> measured rows, from the tables in all files.

    Rows that name no device belong to the one type that other rows name, or to the type "" where no row names any. Raises
    InputError when some rows name no device and others name several.
    """
    devices = concatenate([from_frame(read_table(path), str(path)) for path in profiles]).by_device()
    unnamed = devices.pop("", None)
    if unnamed is None:
        return devices
    if len(devices) > 1:
        file = profiles[int(unnamed.part[0])]
        raise InputError(f"{file}:device", "is missing", f"rows of {', '.join(devices)} are there too; add the column")
    return {name: concatenate([rows, unnamed]) for name, rows in devices.items()} or {"": unnamed}


def fit_rows(devices: dict[str, Observations], sources: list[str], holdout: Path | None, seed: int) -> Goodput:
    """Return the fitted model of each device type as one document; its own params are those of the type with most rows.

    A type without rows of several replicas takes gamma and synchronisation from the type with most such rows, because these
    describe the network, which the types share.

    Args:
        devices: device type -> measured rows.
        sources: names of the files, for the document.
        holdout: file of rows that the fit must not see and is judged on; None: no such test.
        seed: of the fit's random start.
    """
    kept_out = read_rows([holdout]) if holdout is not None else {}
    several_replica_rows = {name: int((rows.num_replicas > 1).sum()) for name, rows in devices.items()}
    # The lender's fit of the network is taken over by the types that have no rows to fit it from.
    lender = max(several_replica_rows, key=lambda name: several_replica_rows[name])
    borrowing = set[str]()
    if several_replica_rows[lender]:
        borrowing = {name for name, count in several_replica_rows.items() if count == 0}
    # Small problems: threads that wait for each other cost more than they bring, above all on a loaded machine.
    with threadpool_limits(1):
        results = {name: fit_device(rows, seed=seed) for name, rows in devices.items()}
        intervals = {name: parameter_intervals(rows, results[name].params) for name, rows in devices.items()}
        for name in borrowing:
            results[name], intervals[name] = _borrow_network(
                results[name], intervals[name], results[lender], intervals[lender]
            )
    main = max(devices, key=lambda name: len(devices[name]))
    errors = holdout_errors(results, kept_out, str(holdout))
    records = {
        name: DeviceGoodput(
            params=result.params,
            **result.error.model_dump(),
            undetermined=list(result.undetermined),
            holdout=errors.get(name),
            intervals=intervals[name].intervals,
        )
        for name, result in results.items()
    }
    # The document's own figures are those of the type with most rows; of several types the errors are pooled.
    document = Goodput(
        sources=sources,
        **{name: getattr(records[main], name) for name in DeviceGoodput.model_fields},
        fit_seconds=sum(result.fit_seconds for result in results.values()),
    )
    if len(records) == 1:
        return document
    held_out = [item.holdout for item in records.values() if item.holdout is not None]
    choice_text = "each type with rows of several replicas has its own"
    if borrowing:
        choice_text = f"{', '.join(sorted(borrowing))} without rows of several replicas has that of {lender}"
    pooled = {
        **pooled_error(list(records.values())).model_dump(),
        "holdout": pooled_error(held_out) if held_out else None,
        "devices": records,
        "shared_network": bool(borrowing),
        "network_choice": choice_text,
        "note": f"params and intervals are those of {main}, the device with most rows",
    }
    return document.model_copy(update=pooled)


def _borrow_network(
    own: FitResult, own_uncertainty: Uncertainty, lender: FitResult, lender_uncertainty: Uncertainty
) -> tuple[FitResult, Uncertainty]:
    """Return a device's fit and intervals with gamma and synchronisation taken from another device, the lender.

    The times of a pass, with their intervals, remain the device's own.
    """
    own_names = NAMES[:2]  # of a pass
    network_names = NAMES[2:]  # of synchronisation and its overlap
    network = {name: getattr(lender.params, name) for name in network_names}
    undetermined = {name for name in own.undetermined if name in own_names}
    undetermined |= {name for name in lender.undetermined if name in network_names}
    intervals = own_uncertainty.intervals | {name: lender_uncertainty[name] for name in network_names}
    result = replace(
        own,
        params=own.params.model_copy(update=network),
        undetermined=tuple(name for name in NAMES if name in undetermined),
    )
    return result, replace(own_uncertainty, intervals=intervals)


def holdout_errors(results: dict[str, FitResult], kept_out: dict[str, Observations], where: str) -> dict[str, FitError]:
    """Return device type -> error of its fit on the rows in ``kept_out`` (by device type), which the fit has not seen.

    Where one type was fitted, rows of one type are taken as its own, whatever they are called. Raises InputError, with
    ``where`` as the file, for a type that was not fitted, and for rows of several types where one was fitted.
    """
    errors = {}
    for name, rows in kept_out.items():
        # one device type, or rows that name none, need no matching names
        device = next(iter(results)) if len(results) == 1 else name
        if device not in results:
            raise InputError(f"{where}:device", f'is "{name}"', did_you_mean(name, results))
        if device in errors:
            raise InputError(f"{where}:device", f"names {', '.join(kept_out)}", "the fitted rows are of one device")
        errors[device] = evaluate(results[device].params, rows)
    return errors


def pooled_error(parts: Sequence[FitError | DeviceGoodput]) -> FitError:
    """Return the error over the samples of all ``parts`` together, such as device types; there must be at least one sample.

    Its RMSLE (root mean squared log error) is the root mean square of the parts' RMSLE, its MAPE (mean absolute relative error)
    the mean of theirs, both weighted by samples.
    """
    samples = sum(part.samples for part in parts)
    mean_squared_log_error = sum(part.samples * part.rmsle**2 for part in parts) / samples
    return FitError(
        rmsle=mean_squared_log_error**0.5,
        mape=sum(part.samples * part.mape for part in parts) / samples,
        samples=samples,
    )
