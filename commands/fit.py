"""``ddltool fit PROFILE...``: a throughput model from measured step times."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from ddltool.commands.options import Json, Output, Seed

if TYPE_CHECKING:
    from ddltool.analyzers.goodput.observations import Observations
    from ddltool.analyzers.goodput.throughput import ThroughputParams
    from ddltool.goodput_model import Goodput, NextMeasurement, ParameterInterval


def fit(
    profiles: Annotated[
        list[Path],
        typer.Argument(metavar="PROFILE...", help="profile.csv, telemetry.jsonl, or an AdaptDL placements.csv."),
    ],
    holdout: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Rows kept out of the fit, to measure its error on."),
    ] = None,
    output: Output = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Fit Pollux's seven-parameter throughput model and report its error."""
    from ddltool.artifacts import check_writable, save
    from ddltool.commands.output import print_json

    if output is not None:
        check_writable(output)
    fitted = fit_files(profiles, holdout, seed)
    if output is not None:
        save(fitted, output)
    if as_json:
        print_json(fitted.model_dump(mode="json"))
    else:
        show_fit(fitted, output)


def fit_files(profiles: list[Path], holdout: Path | None, seed: int) -> Goodput:
    """Return the model fitted to the rows of all files together."""
    from threadpoolctl import threadpool_limits

    from ddltool.analyzers.goodput.fit import evaluate
    from ddltool.analyzers.goodput.fit import fit as fit_observations
    from ddltool.analyzers.goodput.observations import concatenate, from_frame
    from ddltool.goodput_model import FitError, Goodput, ThroughputRecord
    from ddltool.profile import read_table

    observations = concatenate([from_frame(read_table(path), str(path)) for path in profiles])
    kept_out = from_frame(read_table(holdout), str(holdout)) if holdout is not None else None
    # Small problems: threads that wait for each other cost more than they bring, above all on a loaded machine.
    with threadpool_limits(1):
        result = fit_observations(observations, seed=seed)
        error = evaluate(result.params, kept_out) if kept_out is not None else None
        intervals, following = uncertainty_of(observations, result.params)
    return Goodput(
        sources=[str(path) for path in profiles],
        params=ThroughputRecord(**result.params.as_dict()),
        rmsle=result.rmsle,
        mape=result.mape,
        samples=result.samples,
        fit_seconds=result.fit_seconds,
        undetermined=list(result.undetermined),
        holdout=FitError(rmsle=error.rmsle, mape=error.mape, samples=error.samples) if error is not None else None,
        intervals=intervals,
        next_measurement=following,
    )


def uncertainty_of(
    observations: Observations, params: ThroughputParams
) -> tuple[dict[str, ParameterInterval], NextMeasurement | None]:
    """Return the parameters' intervals and what to measure next, among the batches seen and twice the replicas seen."""
    import math

    from ddltool.analyzers.goodput.next_measurement import configurations, suggest_next
    from ddltool.analyzers.goodput.uncertainty import parameter_intervals
    from ddltool.goodput_model import NextMeasurement, ParameterInterval

    sure = parameter_intervals(observations, params)
    intervals = {
        entry.name: ParameterInterval(
            low=entry.low, high=entry.high if math.isfinite(entry.high) else None, reason=entry.reason
        )
        for entry in sure.intervals
    }
    tried = int(observations.num_replicas.max())
    per_node = int((observations.num_replicas / observations.num_nodes).max())
    if observations.num_nodes.max() == 1:
        per_node = 2 * tried  # who has measured one node may not have a second
    candidates = configurations(2 * tried, max(1, per_node), observations.local_batch_size, tried_replicas=tried)
    found = suggest_next(observations, params, candidates, error=max(sure.error, 1e-3))
    if found.variance_before <= 0:
        return intervals, None
    return intervals, NextMeasurement(
        num_nodes=found.num_nodes,
        num_replicas=found.num_replicas,
        local_batch_size=found.local_batch_size,
        variance_reduction=max(0.0, 1 - found.variance_after / found.variance_before),
    )


def show_fit(fitted: Goodput, output: Path | None) -> None:
    """Print the parameters and the errors."""
    from ddltool.commands.output import out, table
    from ddltool.units import show_seconds

    def shown(name: str, value: float | None) -> str:
        return "no limit" if value is None else f"{value:.3g}" if name == "gamma" else show_seconds(value)

    rows = []
    for name, value in fitted.params.model_dump().items():
        interval = fitted.intervals.get(name)
        limits = f"{shown(name, interval.low)} .. {shown(name, interval.high)}" if interval is not None else ""
        source = "prior: not in the data" if name in fitted.undetermined else "fitted"
        if interval is not None and interval.reason:
            limits, source = "-", "prior: not in the data" if name in fitted.undetermined else "not determined"
        rows.append((name, shown(name, value), limits, source))
    console = out()
    columns = ("parameter", "value", "90 % interval", "")
    console.print(table(f"Throughput model from {fitted.samples} rows (fitted)", columns, rows))
    for name, interval in fitted.intervals.items():
        if interval.reason:
            console.print(f"{name}: {interval.reason}")
    console.print(f"error on the fitted rows   MAPE {fitted.mape:.1%}, RMSLE {fitted.rmsle:.4f}")
    if fitted.holdout is not None:
        error = fitted.holdout
        console.print(
            f"error on the holdout rows  MAPE {error.mape:.1%}, RMSLE {error.rmsle:.4f} ({error.samples} rows)"
        )
    following = fitted.next_measurement
    if following is not None and following.variance_reduction >= 0.01:
        console.print(
            f"measure next: {following.num_replicas} replicas on {following.num_nodes} node(s) at local batch "
            f"{following.local_batch_size} (removes {following.variance_reduction:.0%} of the predictions' variance)"
        )
    console.print(f"fitted in {fitted.fit_seconds:.2f} s")
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)
