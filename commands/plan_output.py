"""What ``ddltool plan`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddltool.plan import Assignment, BatchSplit, BucketSetting, ElasticSetting, GoodputChoice, Plan, Superstep

Row = TypeVar("Row")
_MOST_ROWS = 32


def show_plan(made: Plan, output: Path | None) -> None:
    """Print a plan: its devices, its step, and whatever else it settles or left open."""
    from ddltool.commands.decide import show_decision
    from ddltool.commands.output import out, table
    from ddltool.commands.placement import show_placement
    from ddltool.units import show_seconds

    rows = [
        (
            row.device_type,
            str(row.devices),
            str(row.ests_per_device) if row.ests_per_device else "-",
            str(row.local_batch_size),
        )
        for row in made.assignments
    ]
    console = out()
    title = f"{made.job}: {made.strategy} plan for {made.max_workers} logical workers (predicted)"
    console.print(table(title, ("device", "devices", "ESTs each", "local batch"), rows))
    console.print(
        f"step time   {show_seconds(made.iteration_s)}, {made.throughput:.4g} logical mini-batches/s (predicted)"
    )
    console.print(
        f"waste       {made.waste:.4g} mini-batches/s of {made.waste + made.throughput:.4g} on the used devices"
    )
    console.print(f"solver      {made.status}, gap {made.gap:.2%}, {made.solve_seconds:.3f} s")
    if made.decision is not None:
        show_decision(made.decision)
    if made.network is not None or made.migration is not None:
        show_placement(made)
    if made.goodput is not None:
        _show_goodput(made.goodput)
    _show_passes(made.assignments)
    if made.split is not None:
        _show_split(made.split, _compute_s(made))
    if made.superstep is not None:
        _show_superstep(made.superstep)
    if made.alternatives:
        shown = (
            (str(number), show_seconds(other.iteration_s), f"{other.throughput:.4g}", _mix(other.assignments))
            for number, other in enumerate(made.alternatives, start=2)
        )
        console.print(table("Other plans", ("rank", "step time", "throughput", "devices x ESTs"), shown))
    _show_settings(made)
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)


def _compute_s(made: Plan) -> float:
    """Return a plan's seconds per step without communication and whatever else an earlier run had in a step."""
    if made.decision is not None:
        return next(option.compute_s for option in made.decision.options if option.strategy == made.strategy)
    return made.iteration_s - (made.communication_s or 0.0)


def _show_passes(assignments: Sequence[Assignment]) -> None:
    """Print the device types whose memory takes a batch in several passes."""
    from ddltool.commands.output import out

    passes = [
        f"{row.device_type} {row.local_batch_size} in {row.accumulation_steps + 1}"
        for row in assignments
        if row.accumulation_steps
    ]
    if passes:
        out().print(f"passes      {', '.join(passes)}: memory does not hold them at once", soft_wrap=True)


def _show_superstep(step: Superstep) -> None:
    """Print ElasticBSP's iterations until the barrier, the waiting before it, and the devices left out."""
    from ddltool.commands.output import out
    from ddltool.units import show_seconds

    console = out()
    iterations = ", ".join(f"{name} {count}" for name, count in step.iterations.items())
    console.print(f"superstep   {show_seconds(step.superstep_s)}: iterations until the barrier: {iterations}")
    console.print(
        f"waiting     at most {show_seconds(step.waiting_s)}, all together {show_seconds(step.total_waiting_s)}; "
        f"one worker is at most {step.iteration_gap} ahead"
    )
    for name, count in step.left_out.items():
        console.print(f"left out    {count} {name}: the others make more without")


def _show_settings(made: Plan) -> None:
    """Print what the plan's DDP and FSDP2 settings save."""
    from ddltool.analyzers.communication.collectives import share_saved
    from ddltool.commands.output import out

    console = out()
    if made.ddp is not None:
        saved = share_saved(made.ddp.step_s, made.ddp.default_step_s)
        console.print(f"DDP         {_bucket_text(made.ddp)}: {saved:.1%} of the step saved (predicted)")
    if made.fsdp2 is not None:
        saved = share_saved(made.fsdp2.step_s, made.fsdp2.default_step_s)
        depth = max((len(ahead) for ahead in made.fsdp2.forward.values()), default=1)
        back = max((len(ahead) for ahead in made.fsdp2.backward.values()), default=1)
        console.print(f"FSDP2       prefetch {depth} / {back} blocks: {saved:.1%} of the step saved (predicted)")


def _show_split(split: BatchSplit, step_s: float) -> None:
    """Print what an uneven split saves of ``step_s`` of computing, whom it leaves out, and its price in memory."""
    from ddltool.commands.output import out
    from ddltool.units import show_seconds

    console = out()
    if split.equal_s is not None:
        saved = 1 - step_s / split.equal_s
        console.print(f"equal split {show_seconds(split.equal_s)} of computing: {saved:.1%} of it saved")
    for name, count in split.dropped.items():
        console.print(f"left out    {count} {name}: the step is shorter without")
    if split.accumulated_s is not None:
        console.print(
            f"accumulation would make the step {show_seconds(split.accumulated_s)} where memory limits batches"
        )


def _show_goodput(choice: GoodputChoice) -> None:
    """Print the chosen batch, the scaling table, and the elastic table."""
    from ddltool.commands.output import out, table

    console = out()
    console.print(
        f"goodput     {choice.goodput_per_s:.4g} samples/s: {choice.num_replicas} {choice.device_type}, local batch "
        f"{choice.local_batch_size}, {choice.accumulation_steps} accumulation steps, total batch "
        f"{choice.total_batch_size} (efficiency {choice.efficiency:.1%})"
    )
    console.print(
        f"scaling     pays until {choice.pays_until}: beyond, a device brings less than {choice.pays_share:.0%} of the first"
    )
    rows = [
        (
            str(row.num_replicas),
            str(row.local_batch_size),
            str(row.accumulation_steps),
            str(row.total_batch_size),
            f"{row.goodput_per_s:.4g}",
            f"{row.speedup:.2f}",
        )
        for row in _thinned(choice.scaling)
    ]
    columns = ("devices", "local batch", "accumulation", "total batch", "goodput/s", "speedup")
    console.print(table("Goodput by number of devices (predicted)", columns, rows))
    hidden = max(len(choice.scaling), len(choice.elastic)) - _MOST_ROWS
    title = f"Elastic: how to keep a total batch of {choice.total_batch_size} exactly"
    console.print(
        table(
            title,
            ("processes", "local batch", "accumulation", "last step of an epoch"),
            map(_split_row, _thinned(choice.elastic)),
            text_columns=2,
        )
    )
    console.print("(k + 1): the first k processes take one sample more per step")
    if hidden > 0:
        console.print(f"{hidden} numbers of processes are left out here; -o FILE and --json have all")
    console.print(
        "the goodput table lists the numbers of devices that no smaller number equals, with equal splits alone"
    )
    if choice.elastic:
        shown = ", ".join(f"{name} {rate:.4g}" for name, rate in choice.elastic[0].learning_rates.items())
        console.print(f"learning rate at that batch: {shown}")


def _split_row(entry: ElasticSetting) -> tuple[str, ...]:
    """Return how a number of processes keeps the total batch, or the nearest batches that it could keep."""
    if entry.accumulation_steps is None:
        nearest = " or ".join(str(total) for total in entry.nearest_total_batch_sizes) or "none"
        return str(entry.world_size), f"none; {nearest}", "-", "-"
    sizes = sorted({size for rank in entry.local_batch_sizes for size in rank}, reverse=True)
    more = f" ({entry.ranks_with_one_more} + 1)" if entry.ranks_with_one_more else ""
    last = str(entry.last_step_samples or "-")
    return str(entry.world_size), "/".join(map(str, sizes)) + more, str(entry.accumulation_steps), last


def _thinned(rows: list[Row]) -> list[Row]:
    """Return at most _MOST_ROWS of the rows for people: all of them, or the first, the last and evenly between."""
    if len(rows) <= _MOST_ROWS:
        return rows
    return [rows[round(place * (len(rows) - 1) / (_MOST_ROWS - 1))] for place in range(_MOST_ROWS)]


def _bucket_text(setting: BucketSetting) -> str:
    if setting.bucket_cap_mb_list is not None:
        return f"bucket_cap_mb_list of {len(setting.bucket_cap_mb_list)}"
    return "default buckets" if setting.bucket_cap_mb is None else f"bucket_cap_mb={setting.bucket_cap_mb:g}"


def _mix(assignments: Sequence[Assignment]) -> str:
    return ", ".join(f"{row.devices} {row.device_type} x {row.ests_per_device}" for row in assignments)
