"""The choices that a person considers beside a plan, as rows of one table, bars, and an explorer.

An *option* is a strategy on its best devices, compared in the plan's *decision*; a *layout* is a way to shard and
checkpoint a model over devices, of which an option may use one. An *explorer* is a figure that readers filter.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddltool.analyzers.answers.reporting.figures import (
    Bars,
    Explorer,
    Point,
    explorer,
)
from ddltool.analyzers.answers.reporting.section import (
    Column,
    Picture,
    Table,
    pictured,
    tabled,
    without_empty_columns,
)
from ddltool.analyzers.step.costs.model import lora_words
from ddltool.decision import Decision, Layout, Named, Option
from ddltool.plans import Plan
from ddltool.precision import precision_name
from ddltool.units import show_hours, show_money, show_rate, show_seconds

# The most choices that the table lists, and the largest step, in picked steps, of a layout that was not compared itself.
_CHOICES, _OTHERS = 10, 2.0
# From this amount on, a table shows no cents.
_WHOLE_DOLLARS = 10_000
_REDONE = {"selective": "some", "full": "all"}
_HOW = {
    "bsp": "equal batches (bsp)",
    "lb-bsp": "batches by speed (lb-bsp)",
    "est": "logical workers (est)",
    "goodput": "tuned batch (goodput)",
    "elastic-bsp": "own pace (elastic-bsp)",
}


def choices_picture(plan: Plan, decision: Decision) -> Picture:
    """Return bars of the throughput of :func:`_choices`, with their table: memory, step, rate, hours and cost of each.

    Rates are in tokens if the length of a sample is known, else in samples. Hours and cost are of the whole run if it is
    known; else there are no hours, and the cost is of a million tokens or samples.
    """
    choices = _choices(plan, decision)
    samples = plan.max_workers * plan.batch_size
    unit, items = _items(plan, decision)
    run = decision.run
    has_goodput = any(option.goodput_per_s is not None for option in decision.options)

    def rate(row: _Choice) -> float | None:
        """Return tokens or samples per second; None without a step."""
        return None if not row.step_s else row.samples / row.step_s * items / samples

    def hours(row: _Choice) -> str | None:
        """Return the hours of the whole run, failures and checkpoints included."""
        if run is None or not row.step_s:
            return None
        return show_hours(decision.run_factors(row.devices).time * row.step_s * run.samples / row.samples / 3600)

    def price(row: _Choice) -> str | None:
        """Return the cost of the whole run, or of a million samples if it is not known."""
        if row.price_per_sample is None or not row.step_s:
            return None
        priced_samples = decision.run_factors(row.devices).price * (
            1e6 * samples / items if run is None else run.samples
        )
        amount = row.price_per_sample * priced_samples
        return f"${amount:,.0f}" if amount >= _WHOLE_DOLLARS else show_money(amount)

    rate_name = f"{unit}/s"
    columns: dict[str, Column[_Choice]] = {
        "redo": lambda row: ", ".join(_REDONE.get(word, word) for word in row.checkpointing.split(", ")) or None,
        "on": lambda row: " + ".join(f"{count} {name}" for name, count in row.devices.items()),
        "each": "each",
        "GiB": lambda row: None if row.memory_bytes is None else f"{row.memory_bytes / 2**30:.1f}",
        "step": lambda row: "no room" if row.missing_bytes else show_seconds(row.step_s),
        rate_name: lambda row: None if (found := rate(row)) is None else show_rate(found),
        "hours": hours,
        "cost" if run is not None else "$/M": price,
        "remark": lambda row: row.remark or None,
    }
    caption_parts = [f"What was compared{step_words(plan)}; the first is this plan"]
    if any(row.checkpointing for row in choices):
        on_host = ", or on the host" if any(row.checkpointing.endswith("host") for row in choices) else ""
        caption_parts.append(f"redo: activations computed again{on_host}")
    if any(row.each for row in choices):
        caption_parts.append("each: samples x passes")
    if any(row.memory_bytes for row in choices):
        caption_parts.append("GiB: of tensors")
    if run is None and any(row.price_per_sample is not None for row in choices):
        caption_parts.append(f"$/M: dollars for a million {unit}")
    if has_goodput:
        caption_parts.append("with a noise scale, plans are ranked by useful samples per second (-v)")
    table = without_empty_columns(
        tabled(
            "; ".join(caption_parts),
            "predicted",
            choices,
            columns,
            names=("how", [row.how for row in choices]),
            text_columns=3,
            spare=("remark", "hours", rate_name),  # the step says the rate as well
        )
    )
    drawn = [row for row in choices if row.step_s]
    usual = next((row for row in drawn if row.remark == "usual"), None)
    figure = Bars(
        rows=[
            (f"{', '.join(filter(None, (row.how, row.checkpointing)))} on {columns['on'](row)}", rate(row) or 0.0)  # type: ignore[operator]
            for row in drawn
        ],
        xlabel=f"{unit} per second",
        title="Throughput by choice",
        level=None if usual is None else ("usual", rate(usual) or 0.0),
    )
    caption = "What was compared; the first is this plan."
    return pictured(caption, table, *_explorer(plan, decision, choices), figure)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """One row of the table of choices: devices, how they train, and the step."""

    how: str
    """The strategy or layout in words."""
    checkpointing: str
    devices: Mapping[str, int]
    each: str | None
    """Samples of a device, as of :func:`_samples_each`; None: not known."""
    memory_bytes: float | None
    missing_bytes: float = 0.0
    step_s: float | None
    samples: float
    """Samples of a step."""
    price_per_sample: float | None
    remark: str = ""
    range_s: tuple[float | None, float | None] = (None, None)
    """80 % of measured steps are expected in it."""
    layout: Layout | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """The values that identify a choice; of two with the same the table lists the first."""
        return self.how, self.checkpointing, *sorted(self.devices.items())


def _choices(plan: Plan, decision: Decision) -> list[_Choice]:
    """Return the table's choices: the picked one, then the other options, the usual ones and other layouts, best first.

    There are at most ten, with plain DDP on the picked devices among them even if it does not fit.
    """
    samples = float(plan.max_workers * plan.batch_size)

    def of_option(option: Option, remark: str) -> _Choice:
        """Return the choice of a compared option; ``remark``: its last column."""
        layout = _layout_of(decision, option)
        how = _HOW[option.strategy]
        checkpointing = ""
        how = how.partition(" (")[0] if decision.layouts else how
        if decision.layouts and option.order and option.strategy in ("bsp", "lb-bsp"):
            how, checkpointing = _short_words(option.order) if layout is None else _short_layout(layout)
        return _Choice(
            how=how,
            checkpointing=checkpointing,
            devices=option.devices,
            each=_samples_each(option) if option.local_batch_sizes else None,
            memory_bytes=option.memory_bytes,
            step_s=option.iteration_s,
            samples=float(option.step_samples or samples),
            price_per_sample=option.price_per_sample,
            remark=remark,
            range_s=(option.low_s, option.high_s),
            layout=layout,
        )

    picked = next(option for option in decision.options if not option.why_not)  # only the others have a reason
    listed_choices = [of_option(picked, "this plan")]
    listed_choices += [of_option(option, option.why_not) for option in decision.options if option is not picked]
    listed_choices += [of_option(option, "usual") for option in decision.baselines.values()]
    if len(decision.pareto) > 1:  # in order of time, so that the last is the cheapest
        listed_choices.append(of_option(decision.pareto[-1], "cheapest"))
    listed_choices += [_of_layout(layout, samples) for layout in _other_layouts(decision, listed_choices)]
    # The way that everybody knows, and asks for: on these devices, and on all that any layout is on.
    most = max((layout.devices for layout in decision.layouts), key=lambda devices: sum(devices.values()), default={})
    plain_ddp = [
        _of_layout(layout, samples)
        for layout in decision.layouts
        if _short_layout(layout) == ("DDP", "") and layout.devices in (picked.devices, most)
    ]
    # The first of each kind, so that the picked one leads; plain DDP keeps its place where there are more than ten.
    distinct = dict[tuple[object, ...], _Choice]()
    for choice in (*listed_choices, *plain_ddp):
        distinct.setdefault(choice.key, choice)
    first, *rest = distinct.values()
    ddp_keys = {row.key for row in plain_ddp}
    kept_ddp = [row for row in rest if row.key in ddp_keys]
    room = _CHOICES - 1 - len(kept_ddp)
    others = [row for row in rest if row.key not in ddp_keys][:room] + kept_ddp
    if decision.objective == "cheapest":
        others.sort(key=lambda choice: choice.price_per_sample or math.inf)
    else:
        others.sort(key=lambda choice: math.inf if choice.step_s is None else choice.step_s / choice.samples)
    return [first, *others]


def _of_layout(layout: Layout, samples: float) -> _Choice:
    """Return the choice of a layout that no option has; ``samples``: of a step."""
    how, checkpointing = _short_layout(layout)
    return _Choice(
        how=how,
        checkpointing=checkpointing,
        devices=layout.devices,
        each=_samples_each(layout),
        memory_bytes=max(layout.memory_bytes.values()),
        missing_bytes=layout.missing_bytes,
        step_s=layout.step_s,
        samples=samples,
        price_per_sample=layout.price_per_sample,
        remark="does not fit" if layout.missing_bytes else "",
        range_s=(layout.low_s, layout.high_s),
        layout=layout,
    )


def _other_layouts(decision: Decision, listed_choices: Sequence[_Choice]) -> list[Layout]:
    """Return one layout of each kind (sharding, checkpointing, group size, device types) to list beside the choices.

    First the fastest that fits on each set of device types that no choice uses, so that readers see why it was left out.
    Then those of at most twice the first choice's step, and DDP even if it does not fit.
    """
    slowest = _OTHERS * (listed_choices[0].step_s or math.inf)
    shown_types = {tuple(sorted(choice.devices)) for choice in listed_choices}
    # the slowest first, so that the fastest of each set of types, the last one, stays in the dict
    by_step = sorted(decision.layouts, key=lambda layout: -(layout.step_s or math.inf))
    of_types = {tuple(sorted(layout.devices)): layout for layout in by_step if not layout.missing_bytes}
    others = [layout for types, layout in of_types.items() if types not in shown_types]
    others += [
        layout
        for layout in decision.layouts
        if (not layout.missing_bytes and (layout.step_s or math.inf) <= slowest)
        or (layout.sharding == "ddp" and layout.gpus == 1)
    ]
    kinds = dict[tuple[object, ...], Layout]()
    for layout in others:
        how = layout.sharding, layout.checkpointing, bool(layout.activations), layout.gpus
        kinds.setdefault((*how, *sorted(layout.devices)), layout)
    return list(kinds.values())


def _short_words(text: str) -> tuple[str, str]:
    """Return (words, checkpointing) of a layout's text, shortened for a table: ("HSDP 2 x 4, TP 2", "full, host").

    The checkpointing ends with "host" where blocks save on the host, and is "" for a text without any.
    """
    for long, short in (("FSDP2 without resharding", "ZeRO-2"), ("tensor parallel", "TP"), ("pipeline of", "PP")):
        text = text.replace(long, short)
    words = []
    checkpointing = []
    for part in text.split(", "):
        if part == "activations on the host":
            checkpointing.append("host")
        elif part.endswith(" checkpointing"):
            checkpointing.append(part.removesuffix(" checkpointing"))
        else:
            words.append(part)
    return ", ".join(words), ", ".join(checkpointing)


def _short_layout(layout: Layout) -> tuple[str, str]:
    """Return :func:`_short_words` of a layout's text, with "uneven" if the devices' batches differ by more than one sample."""
    how, checkpointing = _short_words(layout.text)
    sizes = layout.local_batch_sizes.values()
    if max(sizes) > min(sizes) + 1:
        how = f"{how}, uneven"
    return how, checkpointing


def _layout_of(decision: Decision, option: Option) -> Layout | None:
    """Return the layout of which an option was made: that of its words, devices and memory whose step is nearest to its own."""
    made_of = [
        layout
        for layout in decision.layouts
        if option.memory_bytes is not None
        and layout.text == option.order
        and layout.devices == option.devices
        and abs(max(layout.memory_bytes.values()) - option.memory_bytes) <= 1  # byte; both were rounded
    ]
    return min(made_of, key=lambda layout: abs((layout.step_s or math.inf) - option.iteration_s), default=None)


def _samples_each(layout: Layout | Option) -> str:
    """Return the samples of a device (or group) in a pass, times the passes of a step: "8x2"; several types: "8/4x2"."""
    samples_by_pass = [-(-size // layout.passes) for size in layout.local_batch_sizes.values()]  # rounded up
    text = "/".join(dict.fromkeys(map(str, samples_by_pass)))  # types with equally many are named once
    return f"{text}x{layout.passes}" if layout.passes > 1 else text


def _items(plan: Plan, decision: Decision) -> tuple[str, float]:
    """Return (the unit in which rates and prices are shown, "tokens" or "samples"; how many of them a step has).

    The unit is tokens if it is known how many a sample has.
    """
    if decision.step_tokens:
        return "tokens", decision.step_tokens
    return "samples", plan.max_workers * plan.batch_size


def step_words(plan: Plan) -> str:
    """Return the planned step's settings in brackets, with a blank before; "" if the plan does not have them."""
    run = plan.run
    if run is None or run.model is None:
        return ""
    parts: list[str] = [precision_name(run.precision), run.optimizer]
    if run.lora:
        parts.append(lora_words(run.lora, run.load_in_4bit))
    if run.sequence_length:
        parts.append(f"{run.sequence_length:,} tokens a sample")
    return f" ({', '.join(parts)}, {plan.max_workers * plan.batch_size:,} samples a step)"


def _explorer(plan: Plan, decision: Decision, choices: Sequence[_Choice]) -> list[Explorer]:
    """Return the choices of the table and all other layouts with a step as one figure; none where there is but one."""
    samples = plan.max_workers * plan.batch_size
    (unit, items) = _items(plan, decision)
    rows = dict[tuple[object, ...], _Choice]()
    for row in (*choices, *(_of_layout(layout, float(samples)) for layout in decision.layouts)):
        rows.setdefault((*row.key, row.each), row)
    points = [
        Point(
            traits={
                "on": " + ".join(f"{count} {name}" for name, count in row.devices.items()),
                "how": row.how,
                "each": row.each or "-",
                "computed again": row.checkpointing or "none",
            },
            step_s=row.step_s,
            range_s=row.range_s,
            rate=row.samples / row.step_s * items / samples,
            memory_bytes=row.memory_bytes,
            price=None if row.price_per_sample is None else 1e6 * row.price_per_sample * samples / items,
            command=_command(plan, row),
        )
        for row in rows.values()
        if row.step_s and row.memory_bytes is not None
    ]
    return explorer(points, unit)


# Options that mean the same to plan and to predict.
_OF_BOTH = ("--bandwidth", "--latency", "--nic", "--link", "--nccl-tests", "--devices-file")


def _command(plan: Plan, row: _Choice) -> str:
    """Return the command that predicts a choice alone, where one layout on one device type is all; else that of the plan.

    "" where the plan's words are not known.
    """
    layout = row.layout
    run = plan.run
    words = plan.command
    [(device, size), *others] = (layout.local_batch_sizes if layout is not None else {"": 0}).items()
    # predict takes one type, equal passes and no checkpointing that a solver chose block by block
    lone = layout is not None and not others and size % layout.passes == 0 and layout.checkpointing != "chosen"
    if layout is None or run is None or run.model is None or not lone or "--devices" not in words:
        return shlex.join(["ddltool", "plan", *words]) if words else ""
    sharding = {"fsdp": "fsdp" if layout.reshard_after_forward else "zero2", "hsdp": f"hsdp:{layout.shard}"}
    per_node = run.gpus_per_node or plan.devices_per_node or {}
    checkpointing = f"{layout.checkpointing}{':cpu' if layout.activations else ''}"
    options = {
        "--device": device,
        "--replicas": layout.devices[device] // layout.gpus,
        "--batch-sizes": size // layout.passes,
        "--precision": run.precision,
        "--optimizer": run.optimizer,
        "--gpus-per-node": per_node.get(device),
        "--sharding": sharding.get(layout.sharding),
        "--checkpointing": None if checkpointing == "none" else checkpointing,
        "--accumulation": layout.passes if layout.passes > 1 else None,
        "--tensor-parallel": layout.tensor_parallel if layout.tensor_parallel > 1 else None,
        "--pipeline-parallel": layout.pipeline_parallel if layout.pipeline_parallel > 1 else None,
        "--lora": run.lora,
        "--sequence-length": run.sequence_length,
    }
    arguments = [word for option, value in options.items() if value is not None for word in (option, str(value))]
    if layout.tensor_parallel > 1:
        arguments.append("--sequence-parallel")
    if run.compile:
        arguments.append("--compile")
    if run.channels_last:
        arguments.append("--channels-last")
    if run.load_in_4bit:
        arguments.append("--load-in-4bit")
    for option, value in itertools.pairwise(words):
        if option in _OF_BOTH:
            arguments += [option, value]
    return shlex.join(["ddltool", "predict", *arguments, run.model])


def named_table(plan: Plan, decision: Decision) -> Table:
    """Return the table of the best plan with each precision, optimizer or LoRA rank that the user named, picked one first."""
    samples = plan.max_workers * plan.batch_size
    (unit, items) = _items(plan, decision)

    def of(show: Callable[[Option], str | None]) -> Column[Named]:
        """Return the column that shows a row's option; its cell is empty if nothing fits."""
        return lambda row: None if row.option is None else show(row.option)

    columns: dict[str, Column[Named]] = {
        "how": of(lambda option: option.order or _HOW[option.strategy]),
        "on": of(lambda option: " + ".join(f"{count} {name}" for name, count in option.devices.items())),
        "GiB": of(lambda option: None if option.memory_bytes is None else f"{option.memory_bytes / 2**30:.1f}"),
        "step": lambda row: "no room" if row.option is None else show_seconds(row.option.iteration_s),
        f"{unit}/s": of(lambda option: show_rate(items / option.iteration_s)),
        "$/M": of(
            lambda option: (
                None if option.price_per_sample is None else show_money(option.price_per_sample * 1e6 * samples / items)
            )
        ),
    }
    names = ("you named", [row.name for row in decision.named])
    caption = "What you named, with the best plan of each; the first is this plan"
    if any(row.option is not None and row.option.price_per_sample is not None for row in decision.named):
        caption += f"; $/M: dollars for a million {unit}"
    table = tabled(
        caption, "predicted", decision.named, columns, names=names, text_columns=2, spare=(f"{unit}/s",)
    )  # as many samples a step in every row, so that its seconds say as much
    return without_empty_columns(table)


def layouts_table(layouts: Sequence[Layout]) -> Table:
    """Return the table of layouts (ways to shard and checkpoint a model): devices, batches, step, memory, and the price.

    Memory is that of the process with most, and what is missing where it does not fit. The price is of a million samples.
    """
    types = sorted({name for row in layouts for name in row.devices})

    def by_type(values: Mapping[str, object]) -> str:
        """Return the values of all device types, separated by slashes."""
        return " / ".join(str(values.get(name, "-")) for name in types)

    columns: dict[str, Column[Layout]] = {
        "n": lambda row: by_type(row.devices) if len(types) > 1 else str(sum(row.devices.values())),
        "batch": lambda row: by_type(row.local_batch_sizes) + (f" in {row.passes}" if row.passes > 1 else ""),
        "step": "step_s",
        "GiB": lambda row: f"{max(row.memory_bytes.values()) / 2**30:.1f}",
        "missing": lambda row: f"{row.missing_bytes / 2**30:.1f}" if row.missing_bytes else None,
        "price/1e6": lambda row: None if row.price_per_sample is None else f"{row.price_per_sample * 1e6:.3g}",
    }
    caption = (
        f"Ways to hold the model on {' / '.join(types)}: with which checkpointing, on n of them, batch: samples "
        "per step of each (in passes); GiB of tensors in a process, and what is missing where it does not fit"
    )
    # Short, for the width: parameters that are not sharded again stay gathered, and the caption speaks of checkpointing.
    labels = (row.text.replace("without resharding", "kept gathered").removesuffix(" checkpointing") for row in layouts)
    return without_empty_columns(
        tabled(
            caption,
            label="predicted",
            records=layouts,
            columns=columns,
            names=("layout", labels),
            text_columns=3,  # layout, n, batch
            spare=("price/1e6",),
        )
    )
