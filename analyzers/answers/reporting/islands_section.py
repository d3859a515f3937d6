"""The section of islands on a slow link: whether to synchronise in every step, or after how many steps.

An *island* is a group of devices with a fast network; between islands the link is slow. They train by themselves and
average their parameters after every H steps of their own (inner steps): an outer step.
"""

from __future__ import annotations

import numpy as np

from ddltool.analyzers.answers.reporting.figures import Line, Lines
from ddltool.analyzers.answers.reporting.section import Column, Section, Verdict, pictured, tabled
from ddltool.analyzers.job.barriers.islands import FragmentExchange, Rounds
from ddltool.island_results import IslandsPlan, OuterRow, PublishedLoss, Way
from ddltool.links import Link
from ddltool.units import counted, faster_than, show_bytes, show_rate, show_seconds

_WAYS: dict[Way, str] = {
    "equal": "equal steps and samples",
    "steps": "inner steps by speed",
    "samples": "samples by speed",
}
# Of the picture: link rates from a thousandth of the link's to a thousand times it.
_DECADES = 3
_POINTS = 49
_DRAWN = 6


def islands_section(plan: IslandsPlan, name: str = "") -> Section:
    """Return the section of islands: the answer, the synchronous steps that it is compared with, a row per H.

    H is the number of inner steps between outer steps.
    """
    verdict = _verdict(plan)
    lead = [
        verdict.answer,
        f"Synchronous: {'; '.join(f'{step.text} {show_seconds(step.step_s)}' for step in plan.synchronous)}. "
        f"With a link that costs nothing a step of {plan.total_batch:,} samples takes {show_seconds(plan.compute_s)}.",
        f"Islands: {'; '.join(f'{one.devices}, {one.samples} samples in {show_seconds(one.step_s)}' for one in plan.islands)}.",
        *_by_speed_sentence(plan),
        _outer_state_sentence(plan),
        *_losses_sentence(plan),
        f"Next: {verdict.then}.",
    ]
    columns: dict[str, Column[OuterRow]] = {  # times are per total batch, with and without overlap of the exchange
        "H": lambda row: f"{row.outer_every:,}",
        "step": "step_s",
        f"overlap {plan.outer.overlap}": "overlapped_s",
        "of compute": lambda row: f"{row.overlapped_s / plan.compute_s:.2f}",
        "sent": "sent_bytes",
        "Mbit/s": lambda row: show_rate(row.sent_bytes_per_s * 8e-6),
        "loss": lambda row: "not published" if row.published is None else _loss_range_text(row.published),
    }
    if any(row.way == "steps" for row in plan.rows):
        columns["inner steps"] = lambda row: " + ".join(f"{steps:,}" for steps in row.inner_steps)
    link = f"{show_rate(plan.link_bytes_per_s * 8e-6)} Mbit/s between islands"
    exchanged = f"{counted(plan.outer.fragments, 'fragment')} of {plan.outer.bits} bits"
    table = tabled(
        f"A step by the inner steps between outer steps (H): {link}, {exchanged}; sent by an island in a round",
        "predicted",
        plan.rows,
        columns,
        spare=("Mbit/s", "sent"),
    )
    return Section(
        title=f"Islands: {plan.source}" + (f" ({name})" if name else ""),
        lead=lead,
        blocks=[pictured("Time of a step by the rate of the link.", table, _step_over_rate_figure(plan))],
        verdict=verdict,
    )


def _verdict(plan: IslandsPlan) -> Verdict:
    """Return the verdict: synchronise in every step if that is as fast, else every H steps, with the call that does it."""
    best = plan.best
    synchronous = plan.synchronous[0]  # the fastest way comes first
    gain = faster_than(synchronous.step_s / best.overlapped_s - 1)
    if plan.good_enough:
        answer = (
            f"Synchronous is good enough: {synchronous.text} takes {show_seconds(synchronous.step_s)} a step, islands at best "
            f"{show_seconds(best.overlapped_s)} (H = {best.outer_every:,})."
        )
        return Verdict(
            answer=answer,
            sure="predicted; the link as given",
            then="plan the devices of that step as one job",
            good=True,
        )
    devices_by_steps: dict[int, list[str]] = {}  # islands with equally many inner steps share a call
    for steps, island in zip(best.inner_steps, plan.islands, strict=True):
        devices_by_steps.setdefault(steps, []).append(island.devices)
    options = ""
    if plan.outer.fragments > 1:
        options += f", fragments={plan.outer.fragments}"
    if plan.outer.overlap:
        options += f", overlap={plan.outer.overlap}"
    if plan.outer.bits < 32:
        options += f", bits={plan.outer.bits}"
    calls = []
    for steps, devices in devices_by_steps.items():
        on_devices = f" on {' and '.join(dict.fromkeys(devices))}" if len(devices_by_steps) > 1 else ""
        calls.append(f"hook.outer(model, optimizer, every={steps}{options}){on_devices}")
    return Verdict(
        answer=f"Meet every {best.outer_every:,} steps: {show_seconds(best.overlapped_s)} a step, {gain} synchronous "
        f"({synchronous.text}); what it costs in loss is measured, not predicted.",
        sure="predicted; the link as given",
        then=", ".join(calls),
    )


def _by_speed_sentence(plan: IslandsPlan) -> list[str]:
    """Return the sentence on giving unequal islands steps or samples by their speeds, for the picked row; [] for equal ones."""
    best = plan.best
    if len(best.ways) == 1:
        return []
    ways = ", ".join(f"{_WAYS[way]} {show_seconds(seconds)}" for way, seconds in best.ways.items())
    shares = " + ".join(str(one.samples_by_speed) for one in plan.islands)
    steps = " + ".join(f"{steps:,}" for steps in best.inner_steps)
    taken = {"equal": "", "steps": f" ({steps} steps)", "samples": f" ({shares} samples)"}[best.way]
    return [f"Unequal islands at H = {best.outer_every:,}: {ways}. Taken: {_WAYS[best.way]}{taken}."]


def _outer_state_sentence(plan: IslandsPlan) -> str:
    """Return the sentence on the memory of outer parameters and momentum on each device, and on whether it fits."""
    sizes = sorted(one.outer_bytes for one in plan.islands)
    span = dict.fromkeys((show_bytes(sizes[0]), show_bytes(sizes[-1])))  # one text where both read alike
    text = f"Outer parameters and momentum: {' to '.join(span)} on each device"
    lacking = [
        f"{one.devices} lacks {show_bytes(-one.free_bytes)}"
        for one in plan.islands
        if one.free_bytes is not None and one.free_bytes < 0
    ]
    if lacking:
        return f"{text}; {', '.join(lacking)}: shard it, or keep it in the host's memory."
    is_known_to_fit = all(one.free_bytes is not None for one in plan.islands)
    return f"{text}; it fits." if is_known_to_fit else f"{text}."


def _loss_range_text(loss: PublishedLoss) -> str:
    """Return a published range of relative changes of the loss in percent: "-0.2..+1.3 %"."""
    return f"{100 * loss.low:+.1f}..{100 * loss.high:+.1f} %"


def _losses_sentence(plan: IslandsPlan) -> list[str]:
    """Return the sentence on the publications behind the ranges of losses, one entry per source."""
    found = {row.published.source: (row.outer_every, row.published) for row in plan.rows if row.published is not None}
    if not found:
        return ["Loss: nobody has published a setting like these; try one on a small model."]
    parts = [
        f"H = {every:,}: {counted(loss.islands, 'island')}, H = {loss.every}, "
        f"{' to '.join(dict.fromkeys((_count_text(loss.parameters_low), _count_text(loss.parameters_high))))} ({source})"
        for source, (every, loss) in found.items()
    ]
    return [f"Loss: what papers measured against data parallel training, no promise. {'; '.join(parts)}."]


def _count_text(parameters: float) -> str:
    """Return a number of parameters as in names of models: "1.3B", "150M"."""
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"


def _step_over_rate_figure(plan: IslandsPlan) -> Lines:
    """Return the figure of the time of a step over the rate of the link, with a line for each drawn row (H) of the plan."""
    rates = plan.link_bytes_per_s * np.logspace(-_DECADES, _DECADES, _POINTS)
    lines = []
    for row in plan.rows[:_DRAWN]:
        steps_s = [one.step_s for one in plan.islands]
        if row.way == "samples":
            steps_s = [one.step_by_speed_s or one.step_s for one in plan.islands]
        # Samples of all islands in a round; times are shown per total batch.
        samples = sum(taken * one.samples for taken, one in zip(row.inner_steps, plan.islands, strict=True))
        seconds = []
        for rate in rates:
            exchange = FragmentExchange(
                elements=plan.parameters,
                islands=len(plan.islands),
                link=Link(kind="plain", bytes_per_s=float(rate), latency_s=plan.link_latency_s),
                bits=plan.outer.bits,
                fragments=plan.outer.fragments,
            )
            rounds = Rounds(
                step_s=steps_s,
                every=row.inner_steps,
                fragment_s=exchange.fragment_s,
                fragments=plan.outer.fragments,
                overlap=row.overlap,
            )
            seconds.append(rounds.round_s * plan.total_batch / samples)
        lines.append(Line(label=f"H = {row.outer_every:,}", x=rates * 8e-6, y=np.array(seconds)))
    return Lines(
        lines=lines,
        xlabel="link between islands, Mbit/s",
        ylabel="a step",
        x_axis="log",
        log_y=True,
        seconds=True,
        title="Time of a step by the rate of the link and by the inner steps between outer steps",
        levels=[("synchronous", plan.synchronous[0].step_s)],
        marks=[("this link", plan.link_bytes_per_s * 8e-6)],
    )
