"""The section of predicted training steps: the answer, the rows, how sure they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddltool.analyzers.answers.reporting.figures import BARS_DRAWN, Bars, Explorer, Point, explorer
from ddltool.analyzers.answers.reporting.section import Column, Section, Verdict, pictured, tabled
from ddltool.analyzers.step.costs.model import lora_words, memory_words
from ddltool.graph_results import PredictedRow, PredictionAssumptions, PredictResult
from ddltool.precision import no_rate_words, precision_of
from ddltool.units import show_bytes, show_rate, show_seconds, show_span

# Names of more devices than these are counted.
_DEVICES_NAMED = 6
# A share of the step from which waiting for the host is told.
_WAITS = 0.1


def predict_section(result: PredictResult) -> Section:
    """Return the section of predicted steps: the fastest row that fits, all rows with their ranges, and their errors."""
    rows = list(result.rows)
    several = len(result.devices) > 1
    if several:
        rows = sorted(rows, key=lambda row: -row.samples_per_s)
    replicated = any(row.num_replicas > 1 for row in rows)
    priced = any(row.price_per_million_samples is not None for row in rows)
    columns: dict[str, Column[PredictedRow]] = {"device": "device"} if several else {}  # else the title names it
    columns |= {"replicas": "num_replicas:d"} if replicated else {}
    columns |= {"batch": "local_batch_size:d", "step": "step_time_s"}
    columns["80 % range"] = lambda row: show_span(row.predicted_low_s, row.predicted_high_s)
    columns |= {"per s": lambda row: show_rate(row.samples_per_s), "MFU": "mfu:.0%"}
    if replicated:
        columns["sync"] = lambda row: show_seconds(row.sync_time_s) if row.num_replicas > 1 else None
    columns["memory"] = lambda row: show_bytes(row.reserved_bytes) + ("" if row.fits else " !")
    columns |= {"$ per 1M": "price_per_million_samples:.3g"} if priced else {}
    title = f"Training steps on {_device_names(list(result.devices))}"
    title += f"; per s{' and per 1M' if priced else ''}: samples"
    table = tabled(title, "predicted", rows, columns, spare=("MFU", "sync"))
    drawn = rows[:BARS_DRAWN]
    figure = Bars(
        rows=[(f"{row.num_gpus} x {row.device}, batch {row.local_batch_size}", row.step_time_s) for row in drawn],
        xlabel="step time",
        title="Predicted step times, with the range in which 80 % of measurements fall",
        seconds=True,
        intervals=[(row.predicted_low_s, row.predicted_high_s) for row in drawn],
    )
    explorers = explored([(row, _traits(row), result.command_of(row)) for row in rows])
    caption = "Step times, with the range in which 80 % of measurements fall."
    picture = pictured(caption, table, *explorers, figure)
    answer = _answer(result)
    verdict = Verdict(answer=answer, good=None if any(row.fits for row in rows) else False)
    lead = [answer, *_remarks(result)]
    return Section(title="Predicted training steps", lead=lead, blocks=[picture], verdict=verdict)


def _traits(row: PredictedRow) -> dict[str, str | int]:
    """Return by name the values that identify a row: device, number of GPUs and batch."""
    return {"device": row.device, "GPUs": row.num_gpus, "batch": row.local_batch_size}


def explored(choices: Sequence[tuple[PredictedRow, Mapping[str, str | int], str]]) -> list[Explorer]:
    """Return predicted rows, each with its traits and its command, as a figure to explore; none where there is but one."""
    unit = "tokens" if all(row.tokens_per_s for row, _, _ in choices) else "samples"
    points = []
    for row, traits, command in choices:
        rate = getattr(row, f"{unit}_per_s")
        price = None  # of a million samples or tokens
        if row.price_per_million_samples is not None:
            price = row.price_per_million_samples * row.samples_per_s / rate
        points.append(
            Point(
                traits=traits,
                step_s=row.step_time_s,
                range_s=(row.predicted_low_s, row.predicted_high_s),
                rate=rate,
                memory_bytes=row.reserved_bytes,
                price=price,
                fits=row.fits,
                command=command,
            )
        )
    return explorer(points, unit)


def _device_names(devices: list[str]) -> str:
    """Return the names of the devices, joined by commas; of more than six only their number."""
    return ", ".join(devices) if len(devices) <= _DEVICES_NAMED else f"{len(devices)} devices"


def _answer(result: PredictResult) -> str:
    """Return the first line: the fastest row that fits in memory; if none fits, the largest batches that would, or a remedy."""
    best = max((row for row in result.rows if row.fits), key=lambda row: row.samples_per_s, default=None)
    if best is None:
        largest_batches = {name: device.memory_limit_batch for name, device in result.devices.items()}
        fitting = ", ".join(f"{batch} on {name}" for name, batch in largest_batches.items() if batch)
        if fitting:
            return f"None of these fits, by estimate; at most: {fitting}."
        helps = next((f"; {device.remedy}" for device in result.devices.values() if device.remedy), "")
        return f"None of these fits, by estimate; one sample does not either{helps}."
    rate = f"{show_rate(best.samples_per_s)} samples/s"
    rate += f", {show_rate(best.tokens_per_s)} tokens/s" if best.tokens_per_s else ""
    where = f"{best.num_gpus} x {best.device}" if best.num_gpus > 1 else best.device
    if best.num_gpus > best.num_replicas:
        where += f" ({best.num_replicas} replicas x tensor {best.tensor_parallel} x pipeline {best.pipeline_parallel})"
    return f"Fastest here: {rate} on {where} at local batch {best.local_batch_size} (MFU {best.mfu:.0%}), predicted."


def _remarks(result: PredictResult) -> list[str]:
    """Return lines on the assumptions, rows that do not fit, rows bound by the host, and the errors of such predictions."""
    assumed = result.assumptions
    rows = result.rows
    lines = [_assumptions_sentence(assumed, rows)]
    is_sharded = assumed.sharding.startswith(("zero2", "fsdp", "hsdp")) and any(row.num_replicas > 1 for row in rows)
    if assumed.optimizer == "muon" and is_sharded:
        lines.append(
            "Muon: each process updates some of the matrices whole; torch.optim.Muon itself, on FSDP2's shards, exchanges in "
            "every iteration and takes longer: predict the script (-- torchrun train.py)."
        )
    if any(not row.fits for row in rows):
        lines.append("! needs more memory than the device has, by estimate.")
    # Rows whose modules to compute again a solver has chosen, within a budget or with the host's memory.
    solved = [
        row for row in rows if row.recompute and (row.recompute.budget_bytes is not None or row.recompute.on_host)
    ]
    if solved:  # one row stands for all
        lines.append(_recomputed(solved[0]))
    if lacking := [name for name, device in result.devices.items() if not device.has_precision]:
        lines.append(no_rate_words(", ".join(lacking), assumed.precision))
    if waiting := _waiting(rows):
        compiling = (
            "torch.compile" if assumed.optimizer == "recorded" else "--compile"
        )  # a script is compiled in itself
        remedy = "a larger batch" if assumed.compile else f"{compiling} or a larger batch"
        lines.append(f"The GPU waits for Python: {waiting}; {remedy} helps.")
    return [*lines, *_error_sentences(result, waits_for_host=bool(waiting))]


def _assumptions_sentence(assumed: PredictionAssumptions, rows: Sequence[PredictedRow]) -> str:
    """Return the sentence on what the predicted steps compute in, train and are set to."""
    settings = ", ".join(_settings_words(assumed, rows))
    if assumed.optimizer == "recorded":
        return f"The script's own step: {precision_of(assumed.precision).words or assumed.precision}; {settings}."
    if assumed.lora:
        adapters = lora_words(assumed.lora, assumed.load_in_4bit)
        trained = f"{adapters}, all else frozen; {assumed.precision}, {assumed.optimizer}"
    else:
        has_groups = any(row.num_gpus > row.num_replicas for row in rows)  # by tensor or pipeline parallelism
        trained = memory_words(assumed.precision, assumed.optimizer, has_groups)
    return f"Assumed: {trained}; {settings}."


def _error_sentences(result: PredictResult, *, waits_for_host: bool) -> list[str]:
    """Return a sentence on how far off such predictions were, for each set of devices with the same error.

    ``waits_for_host``: whether the GPU waits for Python in some row, whose range is then wider.
    """
    sentences = []
    for error in dict.fromkeys(device.error for device in result.devices.values()):
        names = [name for name, device in result.devices.items() if device.error == error]
        has_wider_range = any(
            row.predicted_low_s is not None and row.predicted_low_s < (error.low - 0.01) * row.step_time_s
            for row in result.rows
            if row.device in names
        )
        basis = f"{error.rows} measured steps, predicted without {error.what}" if error.rows else error.what
        remark = ""
        if waits_for_host:
            remark = "; wider where the host has a part"
        elif has_wider_range:
            remark = "; wider as in the table"
        sentences.append(
            f"How sure on {_device_names(names)}: 80 % {'lay' if error.rows else 'should lie'} between {error.low:.2f} and "
            f"{error.high:.2f} times the prediction, half of them within {error.median_error:.0%} ({basis}){remark}."
        )
    return sentences


def _waiting(rows: Sequence[PredictedRow]) -> str:
    """Return by device the batches at which the GPU waits for the host, and for how much of the step; "" for none."""
    share_by_batch = dict[str, dict[int, float]]()
    for row in rows:
        if row.host_wait_s >= _WAITS * row.step_time_s:
            shares = share_by_batch.setdefault(row.device, {})
            share = row.host_wait_s / row.step_time_s
            shares[row.local_batch_size] = max(share, shares.get(row.local_batch_size, 0.0))
    return "; ".join(
        f"{device} at batch {', '.join(f'{batch} ({share:.0%} of the step)' for batch, share in sorted(shares.items()))}"
        for device, shares in share_by_batch.items()
    )


def _settings_words(assumed: PredictionAssumptions, rows: Sequence[PredictedRow]) -> list[str]:
    """Return the assumed settings of the steps in words, without defaults and settings that affect no row."""
    is_replicated = any(row.num_replicas > 1 for row in rows)
    words = {
        "channels_last": assumed.channels_last,
        "compiled" if assumed.compile else "eager": True,
        f"{assumed.accumulation} passes a step": assumed.accumulation > 1,
        f"{assumed.sequence_length} tokens a sample": assumed.sequence_length,
        f"up to {assumed.gpus_per_node} GPUs a node": any(row.num_gpus > 1 for row in rows),
        "sequence parallel": assumed.sequence_parallel and not assumed.async_tensor_parallel,
        "asynchronous tensor parallel": assumed.async_tensor_parallel,
        f"{assumed.expert_parallel} replicas share experts": assumed.expert_parallel > 1,
        f"{assumed.virtual_stages} interleaved stages a GPU": assumed.virtual_stages > 1,
        f"sharding {assumed.sharding}": assumed.sharding != "recorded" and is_replicated,
        f"checkpointing {assumed.checkpointing}": assumed.checkpointing != "none",
        f"{show_bytes(assumed.bandwidth_bytes_per_s)}/s between nodes": any(row.num_nodes > 1 for row in rows),
    }
    return [text for text, is_said in words.items() if is_said]


def _recomputed(row: PredictedRow) -> str:
    """Return the sentence on the modules that a row has computed again or save on the host, and on their cost in a pass."""
    figures = row.recompute
    assert figures is not None
    where = f"at batch {row.local_batch_size} on {row.device}"
    cost = figures.recomputed_s + figures.waits_s
    bound = figures.lower_bound_s or 0.0
    whole_count = sum(not module.keeps for module in figures.modules)
    parts = [f"{len(figures.modules)} modules again, {whole_count} of them whole"] if figures.modules else []
    if figures.on_host:
        parts.append(
            f"{len(figures.on_host)} save on the host, {show_bytes(figures.host_bytes)} a process, with "
            f"{show_seconds(figures.waits_s)} of waits"
        )
    if figures.budget_bytes is None:
        return f"Computed again {where}: {'; '.join(parts)}: {show_seconds(cost)} a pass."
    within = f"within {show_bytes(figures.budget_bytes)}"
    if not parts:
        return f"Computed again {where}: nothing, the tensors stay {within} as they are."
    proven = "the cheapest choice" if bound >= cost else f"at most {1 - bound / cost:.1%} more than the cheapest choice"
    return f"Computed again {where}: {'; '.join(parts)}: {show_seconds(cost)} a pass, {proven} {within}."
