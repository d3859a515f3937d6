"""What ``ddltool fit`` prints for people."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddltool.goodput_model import DeviceGoodput, Goodput

_NETWORK = ("alpha_sync_local_s", "beta_sync_local_s", "alpha_sync_node_s", "beta_sync_node_s", "gamma")

# A model this far off (a factor of 1.35 on average) is no model of these rows.
POOR_RMSLE = 0.3


def show_fit(fitted: Goodput, output: Path | None) -> None:
    """Print the parameters and the errors."""
    from ddltool.commands.output import out

    console = out()
    if fitted.devices:
        for name, record in fitted.devices.items():
            hidden = _NETWORK if fitted.shared_network else ()
            show_parameters(f"{name}: throughput model from {record.samples} rows (fitted)", record, hidden)
            show_errors(record)
        if fitted.shared_network:
            first = next(iter(fitted.devices.values()))
            show_parameters("network, shared by all", first, ("alpha_grad_s", "beta_grad_s"))
        console.print(f"network {'shared' if fitted.shared_network else 'of each device'}: {fitted.network_choice}")
    else:
        show_parameters(f"Throughput model from {fitted.samples} rows (fitted)", fitted, ())
        show_errors(fitted)
    show_left_out(fitted)
    if fitted.rmsle > POOR_RMSLE:
        console.print("the model does not describe these rows: check their columns, and whether they are of one job")
    following = fitted.next_measurement
    if following is not None and following.variance_reduction >= 0.01:
        console.print(
            f"measure next: {following.num_replicas} replica(s) on {following.num_nodes} node(s) at local batch "
            f"{following.local_batch_size} (removes {following.variance_reduction:.0%} of the predictions' variance)"
        )
    console.print(f"fitted in {fitted.fit_seconds:.2f} s")
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)


def show_parameters(title: str, fitted: Goodput | DeviceGoodput, hidden: tuple[str, ...]) -> None:
    """Print a table of parameters with their intervals, and why some have none."""
    from ddltool.commands.output import out, table
    from ddltool.units import show_seconds

    def shown(name: str, value: float | None) -> str:
        return "no limit" if value is None else f"{value:.3g}" if name == "gamma" else show_seconds(value)

    rows, reasons = [], []
    for name, value in fitted.params.model_dump().items():
        if name in hidden:
            continue
        interval = fitted.intervals.get(name)
        limits = f"{shown(name, interval.low)} .. {shown(name, interval.high)}" if interval is not None else ""
        source = "prior: not in the data" if name in fitted.undetermined else "fitted"
        if interval is not None and interval.reason:
            limits, source = "-", "prior: not in the data" if name in fitted.undetermined else "not determined"
            reasons.append(f"{name}: {interval.reason}")
        elif interval is not None and not interval.low <= value <= (
            math.inf if interval.high is None else interval.high
        ):
            source = "fitted, with the prior"
            reasons.append(f"{name}: the rows alone would put it in the interval; the prior draws it out")
        rows.append((name, shown(name, value), limits, source))
    console = out()
    console.print(table(title, ("parameter", "value", "90 % interval", ""), rows))
    for line in reasons:
        console.print(line)


def show_errors(fitted: Goodput | DeviceGoodput) -> None:
    """Print the errors on the fitted rows and on those kept out."""
    from ddltool.commands.output import out

    console = out()
    console.print(f"error on the fitted rows   MAPE {fitted.mape:.1%}, RMSLE {fitted.rmsle:.4f}")
    free = len(type(fitted.params).model_fields) - len(fitted.undetermined)
    if fitted.samples <= free:
        console.print(f"{fitted.samples} row(s) for {free} parameters: any model fits them, so this error says nothing")
    if fitted.holdout is not None:
        error = fitted.holdout
        console.print(
            f"error on the holdout rows  MAPE {error.mape:.1%}, RMSLE {error.rmsle:.4f} ({error.samples} rows)"
        )


def show_left_out(fitted: Goodput, most: int = 5) -> None:
    """Print the rows that the fit left out, the first few of many."""
    from ddltool.commands.output import out
    from ddltool.units import show_seconds

    console = out()
    for item in fitted.left_out[:most]:
        place = f"{item.source}:row {item.row}" if item.row else item.source
        configuration = f"{item.num_replicas} replica(s) on {item.num_nodes} node(s), batch {item.local_batch_size}"
        times = f"{show_seconds(item.step_time_s)}, expected {show_seconds(item.expected_s)}"
        console.print(f"left out: {place} ({configuration}): {times}", soft_wrap=True)
    if len(fitted.left_out) > most:
        console.print(f"left out: {len(fitted.left_out) - most} more rows")
