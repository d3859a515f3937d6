"""The section of a command's plan: the best values of its knobs (options that were varied), and the variants tried.

A *variant* is the user's training command with one value of each knob, on one kind of device.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial

from ddltool.analyzers.answers.reporting.figures import Bars
from ddltool.analyzers.answers.reporting.predict_section import explored
from ddltool.analyzers.answers.reporting.section import Column, Section, Table, Verdict, pictured, tabled
from ddltool.errors import few, shortened
from ddltool.graph_results import CommandPlan, PredictedRow, TriedCommand
from ddltool.units import counted, faster_than, show_bytes, show_hours, show_money, show_rate, show_seconds, show_span

_ROWS = 10
# Most characters of a column's name and of a value.
_LONGEST_NAME = 14
_TIES_NAMED = 3
# Two predictions that differ by less than this share do not tell which variant is faster.
_TIE = 0.02


def command_section(plan: CommandPlan, name: str = "") -> Section:
    """Return the section of a command's plan: the best values, the best variants, what does not fit and what failed.

    The best ``_ROWS`` variants are shown in a table and a figure. ``name``: the plan's file, for the title; "": not named.
    """
    # Without those that failed; in the order of `tried`, the best first.
    recorded = [variant for variant in plan.tried if variant.row is not None]
    listed = recorded[:_ROWS]
    unit = plan.ranked_by.removesuffix("_per_s")
    figure = Bars(
        rows=[(f"{_variant_name(variant)} on {_where(variant)}", plan.rate(variant)) for variant in listed],
        xlabel=f"{unit} per second",
        title=f"Predicted {unit} per second of each variant",
        marked=("does not fit", [variant.row is not None and not variant.row.fits for variant in listed]),
        unmarked="fits",
    )
    explorers = explored(
        [(variant.row, _traits(plan, variant), _predicted_by(variant)) for variant in recorded if variant.row]
    )
    answer = _answer(plan)
    best = plan.best
    sure = [_certainty(plan, best)] if best is not None else []
    table = _variants_table(plan, listed, any(not variant.given for variant in recorded))
    return Section(
        title=f"Plan: {plan.command}" + (f" ({name})" if name else ""),
        lead=[answer, *sure, *_left_out(plan, recorded[_ROWS:])],
        blocks=[pictured(f"{unit.capitalize()} per second of all processes.", table, *explorers, figure)],
        verdict=Verdict(answer=answer, sure=sure[0] if sure else "", then=best.command if best is not None else ""),
    )


def _variants_table(plan: CommandPlan, listed: Sequence[TriedCommand], shows_gains: bool) -> Table:
    """Return the table of the variants in ``listed``, a row each; ``shows_gains``: with their rates over the command's own."""
    knobs: dict[str, Column[TriedCommand]] = {
        shortened(knob.lstrip("-"), 2 * _LONGEST_NAME): partial(_value_text, knob=knob) for knob in plan.knobs
    }
    unit = plan.ranked_by.removesuffix("_per_s")
    columns: dict[str, Column[TriedCommand]] = {**knobs, "on": _where}
    if len({_step_samples(variant.row) for variant in listed if variant.row is not None}) > 1:
        columns["per step"] = lambda variant: None if variant.row is None else f"{_step_samples(variant.row):,}"
    columns |= {
        "step": "row.step_time_s",
        f"{unit}/s": lambda variant: show_rate(plan.rate(variant)),
        "MFU": "row.mfu:.0%",
        "memory": _memory_text,
    }
    if any(plan.hours(variant) is not None for variant in listed):
        columns["hours"] = lambda variant: None if (hours := plan.hours(variant)) is None else show_hours(hours)
    if any(plan.cost(variant) is not None for variant in listed):
        columns["cost"] = lambda variant: None if (cost := plan.cost(variant)) is None else show_money(cost)
    elif any(variant.row is not None and variant.row.price_per_million_samples is not None for variant in listed):
        columns["$/M"] = lambda variant: _price_text(plan, variant)
    if shows_gains:
        columns["times"] = lambda variant: _gain_text(plan, variant)
    caption = f"{len(listed)} of {len(plan.tried)} tried" if len(plan.tried) > len(listed) else "All that was tried"
    caption += "; times: of the command as it is" if "times" in columns else ""
    caption += f"; $/M: dollars for a million {unit}" if "$/M" in columns else ""
    spare = ("per step", "MFU", "times", "hours")
    return tabled(caption, "predicted", listed, columns, text_columns=len(knobs) + 1, spare=spare)


def _step_samples(row: PredictedRow) -> int:
    """Return how many samples all processes take in a step, that is, between two updates."""
    return round(row.samples_per_s * row.step_time_s)


def _price_text(plan: CommandPlan, one: TriedCommand) -> str | None:
    """Return the dollars of a million of what the plan ranks by, tokens or samples; None where no price is known."""
    if one.row is None or one.row.price_per_million_samples is None:
        return None
    return show_money(one.row.price_per_million_samples * one.row.samples_per_s / plan.rate(one))


def _memory_text(one: TriedCommand) -> str | None:
    """Return the memory of a process of a variant as text, with "!" if it does not fit; None if the variant failed."""
    if one.row is None:
        return None
    return show_bytes(one.row.reserved_bytes) + ("" if one.row.fits else " !")


def _traits(plan: CommandPlan, one: TriedCommand) -> dict[str, str | int]:
    """Return by name the devices of a variant and its value of each knob, whole numbers as int."""
    values = {knob.lstrip("-"): one.values.get(knob, "-") for knob in plan.knobs}
    return {"on": _where(one), **{knob: int(value) if value.isdecimal() else value for knob, value in values.items()}}


def _predicted_by(one: TriedCommand) -> str:
    """Return the command that records and predicts one variant alone; "" if its quotes do not match."""
    where = ["--device", one.device, "--gpus-per-node", str(one.devices_per_node)]
    try:
        return shlex.join(["ddltool", "predict", *where, "--", *shlex.split(one.command)])
    except ValueError:
        return ""


def _value_text(one: TriedCommand, *, knob: str) -> str:
    """Return a variant's value of one knob; "-" if it leaves the option out."""
    return shortened(one.values.get(knob, "-"), _LONGEST_NAME)


def _options_text(one: TriedCommand) -> str:
    """Return the values of a variant's knobs as in its command: ``--batch-size 8``, ``lr=0.1``; "" for the unchanged one."""
    return " ".join(
        f"{name} {value}" if name.startswith("-") else f"{name}={value}" for name, value in one.values.items()
    )


def _variant_name(one: TriedCommand) -> str:
    """Return the options of a variant, or that the command is as it is."""
    return _options_text(one) or "as it is"


def _where(one: TriedCommand) -> str:
    """Return the devices of a variant as text: "8 H100", its replicas and their type; the type alone if it failed."""
    return f"{one.row.num_replicas} {one.device}" if one.row is not None else one.device


def _gain_text(plan: CommandPlan, one: TriedCommand) -> str:
    """Return a variant's rate over that of the unchanged command on the same devices: "1.25"; "-" where that is not known."""
    if one.given:
        return "1.00"
    as_given = plan.as_given(one.device, one.devices_per_node)
    if as_given is None or not plan.rate(as_given):
        return "-"
    return f"{plan.rate(one) / plan.rate(as_given):.2f}"


def _answer(plan: CommandPlan) -> str:
    """Return the first line: the best values, devices, rate and memory, and the gain over the unchanged command.

    If nothing fits, the line says how much memory the least demanding variant needs.
    """
    best = plan.best
    if best is None or best.row is None:
        least = plan.tried[0]
        if least.row is None:
            return "Nothing could be recorded."
        needs = f"{show_bytes(least.row.reserved_bytes)} a process on {least.device}"
        return f"Nothing fits: the least, {_options_text(least) or 'the command as it is'}, takes {needs}."
    row = best.row
    rate = f"{show_rate(row.samples_per_s)} samples/s"
    rate += f", {show_rate(row.tokens_per_s)} tokens/s" if row.tokens_per_s else ""
    figures = f"{show_seconds(row.step_time_s)} a step, {rate}, {show_bytes(row.reserved_bytes)} a process"
    run = _run_words(plan, best)
    # The unchanged command on the same devices, to say what the change brings.
    as_given = plan.as_given(best.device, best.devices_per_node)
    if best.given or as_given is None:
        start = "Keep the command as it is" if len(plan.knobs) else "The command as it is"
        return f"{start} on {_where(best)}: {figures}, predicted.{run}"
    if as_given.row is None:
        behind = "as it is the command cannot be recorded"
    elif not as_given.row.fits:
        behind = f"as it is the command does not fit ({show_bytes(as_given.row.reserved_bytes)})"
    else:
        behind = f"{faster_than(plan.rate(best) / plan.rate(as_given) - 1)} the command as it is"
    if as_given.row is not None and _step_samples(row) != _step_samples(as_given.row):
        figures += f"; {_step_samples(row):,} samples a step, {_step_samples(as_given.row):,} as it is"
    return f"Use {_options_text(best)} on {_where(best)}: {figures}; {behind}, predicted.{run}"


def _run_words(plan: CommandPlan, best: TriedCommand) -> str:
    """Return a sentence, behind a space, on the hours and the price of the whole run, and on a cheaper variant if any is.

    "" where nobody said how long the run is.
    """
    hours, cost = plan.hours(best), plan.cost(best)
    if hours is None:
        return ""
    text = f" The whole run takes {show_hours(hours)}" + ("." if cost is None else f" and costs {show_money(cost)}.")
    priced = [(own, one) for one in plan.tried if one.row and one.row.fits and (own := plan.cost(one)) is not None]
    least, cheapest = min(priced, default=(None, best), key=lambda pair: pair[0])
    if cost is None or least is None or least > (1 - _TIE) * cost:
        return text
    lasts = show_hours(plan.hours(cheapest) or 0.0)
    return f"{text} Cheapest: {_variant_name(cheapest)} on {_where(cheapest)}, {show_money(least)} in {lasts}."


def _certainty(plan: CommandPlan, best: TriedCommand) -> str:
    """Return the sentence on the range of the best step, and on the variants whose rate is within two percent of it."""
    assert best.row is not None
    span = show_span(best.row.predicted_low_s, best.row.predicted_high_s)
    text = f"How sure: 80 % of measured steps are expected within {span}"
    near = [variant for variant in plan.tried if variant is not best and variant.row is not None and variant.row.fits]
    ties = [variant for variant in near if plan.rate(variant) >= (1 - _TIE) * plan.rate(best)]
    if not ties:
        return f"{text}."
    names = ", ".join(f"{_variant_name(variant)} on {_where(variant)}" for variant in ties[:_TIES_NAMED])
    more = f" and {len(ties) - _TIES_NAMED} more" if len(ties) > _TIES_NAMED else ""
    return f"{text}; as good within {_TIE:.0%}: {names}{more}."


def _left_out(plan: CommandPlan, below: list[TriedCommand]) -> list[str]:
    """Return lines on the variants that do not fit, that failed, and on the number of slower ones not in the table.

    ``below``: the recorded variants that the table leaves out.
    """
    lines = []
    too_large = [
        f"{_variant_name(variant)} on {_where(variant)} ({show_bytes(variant.row.reserved_bytes)})"
        for variant in plan.tried
        if variant.row is not None and not variant.row.fits
    ]
    if too_large:
        lines.append(f"Does not fit (!): {', '.join(few(too_large))}.")
    devices_by_failure: dict[tuple[str, str | None], list[str]] = {}  # by (options, reason)
    for variant in plan.tried:
        if variant.row is None:
            devices_by_failure.setdefault((_variant_name(variant), variant.failure), []).append(_where(variant))
    options_that_ran = {_variant_name(variant) for variant in plan.tried if variant.row is not None}
    failures = []
    for (options, failure), devices in devices_by_failure.items():
        # Devices are named only where the same options ran on others.
        on_devices = f" on {', '.join(devices)}" if options in options_that_ran else ""
        failures.append(f"{options}{on_devices}: {failure}")
    lines += [f"Failed: {line}" for line in few(failures)]
    if slower := [variant for variant in below if variant.row is not None and variant.row.fits]:
        lines.append(f"{counted(len(slower), 'slower one')} stand in --json and in the file of -o.")
    return lines
