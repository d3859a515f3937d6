"""``ddltool verify PLAN TELEMETRY``: predicted against measured, and what to fit again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ddltool.commands.options import Json, Output

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddltool.analyzers.deciding.verification import Verification
    from ddltool.analyzers.goodput.throughput import ThroughputParams


def verify(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json that the run followed.")],
    telemetry: Annotated[Path, typer.Argument(metavar="TELEMETRY", help="telemetry.jsonl that the hook wrote.")],
    goodput: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="FILE",
            help="goodput.json of the devices that the job really ran on, when they are not the plan's.",
            show_default=False,
        ),
    ] = None,
    max_error: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="PERCENT", help="Exit 1 when the step time is off by more, e.g. 15%.", show_default=False),
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compare a run with its plan: step time, compute by process, synchronisation; say what to fit again."""
    from ddltool.analyzers.deciding.feedback import read_run
    from ddltool.analyzers.deciding.verification import ACCEPTED
    from ddltool.analyzers.deciding.verification import verify as compare
    from ddltool.artifacts import check_writable, load, save
    from ddltool.commands.output import print_json
    from ddltool.outputs import demand_distinct
    from ddltool.plan import Plan
    from ddltool.profile import read_table

    demand_distinct([plan_file, telemetry, goodput], {"-o": output})
    if output is not None:
        check_writable(output)
    limit = None if max_error is None else percent(max_error, "--max-error")
    made = load(plan_file, Plan)
    models, model_error = _models(goodput)
    run = read_run(read_table(telemetry), str(telemetry))
    found = compare(made, run, models, model_error=model_error, accepted=ACCEPTED if limit is None else limit)
    # A run of other devices, or of some of the processes, cannot show that the plan was right.
    passed = limit is None or (found.complete and abs(found.error) <= limit)
    names = {"plan": str(plan_file), "telemetry": str(telemetry)}
    document = as_document(found, names, limit=limit, passed=passed)
    if output is not None:
        save(document, output)
    if as_json:
        print_json(document)
    else:
        show(found, limit, output)
    if not passed:
        raise typer.Exit(1)


def as_document(found: Verification, names: Mapping[str, str], *, limit: float | None, passed: bool) -> dict[str, Any]:
    """Return the JSON document of a comparison (kind ``ddltool.verification``); ``names``: the files compared."""
    from dataclasses import asdict

    return {
        "kind": "ddltool.verification",
        "schema_version": 1,
        **names,
        "iteration": {
            "predicted_s": found.predicted_s,
            "measured_s": found.measured_s,
            "low_s": found.low_s,
            "high_s": found.high_s,
            "error": found.error,
        },
        "compute": {"predicted_s": found.predicted_compute_s, "measured_s": found.measured_compute_s},
        "sync": {"predicted_s": found.predicted_sync_s, "measured_s": found.measured_sync_s},
        "other": {"predicted_s": found.predicted_other_s, "measured_s": found.measured_other_s},
        "ranks": [asdict(rank) for rank in found.ranks],
        "missing_ranks": list(found.missing),
        "known_error": found.known_error,
        "refit": list(found.refit),
        "max_error": limit,
        "passed": passed,
    }


def percent(text: str, where: str) -> float:
    """Return ``15%`` or ``0.15`` as 0.15.

    Raises InputError for anything else, negative or not finite, and for a bare number above 1: who writes 15 means 15%.
    """
    import math

    from ddltool.errors import InputError
    from ddltool.units import parse_share

    value = parse_share(text)
    if not (math.isfinite(value) and value >= 0):
        raise InputError(where, f"{text!r} is no share", "write for example 15% or 0.15")
    if value > 1 and not text.strip().endswith("%"):
        raise InputError(where, f"{text!r} would be {100 * value:g}%", f"write {value:g}% or {value / 100:g}")
    return value


def _models(path: Path | None) -> tuple[dict[str, ThroughputParams] | None, float | None]:
    """Return the fitted models of a file by device type ("" for all others), and the error of the fit."""
    from ddltool.analyzers.goodput.throughput import ThroughputParams
    from ddltool.artifacts import load
    from ddltool.goodput_model import Goodput

    if path is None:
        return None, None
    fitted = load(path, Goodput)
    if fitted.devices:
        models = {name: ThroughputParams(**found.params.model_dump()) for name, found in fitted.devices.items()}
        return models, max(found.mape for found in fitted.devices.values())
    return {"": ThroughputParams(**fitted.params.model_dump())}, fitted.mape


def show(found: Verification, limit: float | None, output: Path | None) -> None:
    """Print the comparison."""
    from ddltool.analyzers.deciding.verification import error_text
    from ddltool.commands.output import out, table
    from ddltool.units import show_seconds

    def parts(name: str, predicted: float | None, measured: float) -> tuple[str, str, str, str]:
        return name, show_seconds(predicted), show_seconds(measured), error_text(predicted, measured)

    console = out()
    rows = [
        parts("step", found.predicted_s, found.measured_s),
        parts("compute, longest", found.predicted_compute_s, found.measured_compute_s),
        parts("synchronisation", found.predicted_sync_s, found.measured_sync_s),
        parts("other: optimizer, loader, waiting", found.predicted_other_s, found.measured_other_s),
    ]
    console.print(table("Predicted against measured", ("part of a step", "predicted", "measured", "error"), rows))
    ranks = [
        (
            str(rank.rank),
            f"{rank.device} for {rank.planned_device}" if rank.other_device else rank.device,
            str(rank.batch),
            show_seconds(rank.predicted_s),
            show_seconds(rank.measured_s),
            "-" if rank.other_device else error_text(rank.predicted_s, rank.measured_s),
            f"{rank.spread:.1%}",
        )
        for rank in found.ranks
    ]
    columns = ("rank", "device", "batch", "predicted", "measured", "error", "spread")
    console.print(table("Compute by process (measured: medians)", columns, ranks, text_columns=2))
    console.print(f"half of the measured steps took {show_seconds(found.low_s)} to {show_seconds(found.high_s)}")
    if found.known_error is None:
        console.print("the prediction comes without an error of its own")
    else:
        console.print(f"predicted compute is known to within {found.known_error:.0%}, synchronisation without an error")
    for line in found.refit or ("nothing to fit again: the plan's figures hold",):
        console.print(f"- {line}")
    if limit is not None:
        word = "within" if abs(found.error) <= limit else "beyond"
        console.print(f"step time off by {abs(found.error):.1%}: {word} the limit of {100 * limit:.3g}%")
        if not found.complete:
            console.print("FAILED: not the whole run on the planned devices (see above)")
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)
