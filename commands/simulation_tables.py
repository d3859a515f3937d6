"""What ``ddltool simulate`` shows: tables of replays, sweeps, comparisons, advice and scaling, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddltool.artifacts import check_writable, write_bytes
from ddltool.commands.output import out, table
from ddltool.errors import InputError

Record = Mapping[str, Any]
Columns = Mapping[str, Callable[[Any], str]]
"""Headings, and what each shows of a record."""
_WIDTH, _NARROWEST = 80, 8
_MOST_OPTIONS_SHOWN = 12

_TIMES: Columns = {
    "avg JCT": lambda one: f"{one['avg_jct_s']:,.0f}",
    "p99": lambda one: f"{one['p99_jct_s']:,.0f}",
    "makespan": lambda one: f"{one['makespan_s']:,.0f}",
    "used": lambda one: f"{one['utilization']:.0%}",
    "worst": lambda one: f"{one['finish_time_fairness']['max']:.2f}",
    "fair": lambda one: f"{one['finish_time_fairness']['share_below_1']:.0%}",
    "moves": lambda one: str(one["restarts"]),
}
_LOSSES: Columns = {
    "median": lambda one: f"{one['median_jct_s']:,.0f}",
    "wait": lambda one: f"{one['avg_queueing_s']:,.0f}",
    "p99 wait": lambda one: f"{one['p99_queueing_s']:,.0f}",
    "useful": lambda one: f"{one['useful_share']:.0%}",
    "hit": lambda one: str(one["job_failures"]),
    "lost h": lambda one: f"{one['lost_gpu_hours']:,.1f}",
}
_CLASSES: Columns = {
    "jobs": lambda one: str(one["jobs"]),
    "avg JCT": lambda one: f"{one['avg_jct_s']:,.0f}",
    "median": lambda one: f"{one['median_jct_s']:,.0f}",
    "p99": lambda one: f"{one['p99_jct_s']:,.0f}",
    "wait": lambda one: f"{one['avg_queueing_s']:,.0f}",
    "worst": lambda one: f"{one['worst_fairness']:.2f}",
    "GPU-h": lambda one: f"{one['gpu_hours']:,.0f}",
}
_MEANS: Columns = {
    "avg JCT": lambda one: f"{one['avg_jct_s']:,.0f}",
    "p99": lambda one: f"{one['p99_jct_s']:,.0f}",
    "makespan": lambda one: f"{one['makespan_s']:,.0f}",
    "worst": lambda one: f"{one['worst_fairness']:.2f}",
    "moves": lambda one: f"{one['restarts']:,.0f}",
}
_OPTIONS: Columns = {
    "batch": lambda one: str(one["batch_size"]),
    "gain": lambda one: f"{one['gain']:.2f}",
    "pays from": lambda one: _span(one["break_even_s"], "") if one["break_even_s"] is not None else "never",
    "saves": lambda one: _span(one["expected_saved_s"], ""),
    "10 %": lambda one: _span(one["saved_p10_s"], ""),
    "90 %": lambda one: _span(one["saved_p90_s"], ""),
    "sure": lambda one: f"{one['probability']:.0%}",
    "GPU h": lambda one: f"{round(one['extra_gpu_seconds'] / 3600, 1) + 0.0:+.1f}",
}

PUBLISHED_SCALING = {"cost": -0.25, "seconds": 0.06}
"""Pollux, section 5.4.1: ImageNet, goodput against throughput."""
PUBLISHED_SEARCH = {
    "baseline": {"avg_jct_s": 2040.0, "makespan_s": 50_400.0},
    "pollux": {"avg_jct_s": 1500.0, "makespan_s": 36_000.0},
}
"""Pollux, Table 3: 100 trials of ResNet18 on CIFAR-10, two nodes with 8 A100 each."""


def _cells(records: Mapping[str, Any], columns: Columns) -> list[list[str]]:
    return [[name, *(show(record) for show in columns.values())] for name, record in records.items()]


def show_replays(document: Record, *, more: bool = False, classes: bool = False) -> None:
    """Print one row per policy; ``more``: waits, losses and cost too; ``classes``: the size classes too."""
    policies = document["policies"]
    title = f"{document['jobs']} jobs on {document['gpus']} GPUs, seconds (simulated from {document['truth']})"
    caption = (
        "JCT: completion time of a job; used: share of the GPU time held; worst: largest finish-time fairness; "
        "fair: share of jobs where it is below 1; moves: restarts"
    )
    out().print(table(title, ("", *_TIMES), _cells(policies, _TIMES), caption=caption))
    if more:
        priced = any("cost" in record for record in policies.values())
        columns = {**_LOSSES, **({"cost": lambda one: _price(one["cost"]["jobs"])} if priced else {})}
        caption = (
            "median: of the completion times; wait: from submission to first start; useful: share of the GPU time that "
            "was up in which training was done that lasted; hit: jobs that lost a node, counted each time; lost h: "
            "GPU-hours of training undone" + ("; cost: of the GPU time held" if priced else "")
        )
        out().print()
        out().print(table("Waits, use and losses; seconds", ("", *columns), _cells(policies, columns), caption=caption))
    if classes:
        rows: list[list[str]] = []
        for policy, record in policies.items():
            rows.append([policy, *[""] * len(_CLASSES)])
            rows += _cells({f"- {name}": figures for name, figures in record["by_class"].items()}, _CLASSES)
        caption = "classes by GPU time: small up to 1 GPU-hour, medium 10, large 100, xlarge above (Pollux, 5.1)"
        out().print()
        out().print(table("By size class, seconds", ("", *_CLASSES), rows, caption=caption))


def show_sweep(document: Record) -> None:
    """Print one row per policy below each workload: means over the seeds; within 80 columns."""
    groups: dict[str, dict[str, list[Mapping[str, float]]]] = {}
    for record in document["cells"]:
        if record["figures"] is not None:
            policies = groups.setdefault(record["workload"], {})
            policies.setdefault(record["policy"], []).append(record["figures"])
    found = [values for policies in groups.values() for values in policies.values()]
    priced = bool(found) and all("cost" in one for values in found for one in values)
    columns = {**_MEANS, **({"cost": lambda one: _price(one["cost"])} if priced else {})}
    made = {
        name: _cells(
            {
                f"- {policy}": {key: float(np.mean([one[key] for one in values])) for key in values[0]}
                for policy, values in policies.items()
            },
            columns,
        )
        for name, policies in groups.items()
    }
    lines = [["", *columns], *(line for rows in made.values() for line in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    room = max(_WIDTH - 1 - 3 * len(widths) - sum(widths[1:]), widths[0], _NARROWEST)
    shown = [line for name, rows in made.items() for line in ([_short(name, room), *[""] * len(columns)], *rows)]
    counts = sorted({len(values) for values in found}) or [0]
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    caption = "worst: largest finish-time fairness; moves: restarts"
    if document["cells_failed"]:
        count = document["cells_failed"]
        caption += f"; {count} replay{'s' if count > 1 else ''} failed"
    title = f"means over {seeds} seed{'' if seeds == '1' else 's'}, seconds (simulated)"
    out().print(table(title, ("", *columns), shown, caption=caption))


def _short(name: str, most: int) -> str:
    """Return a name of at most ``most`` characters, the middle left out: ends tell names of one family apart."""
    if len(name) <= most:
        return name
    end = (most - 3) * 2 // 3
    return f"{name[: most - 3 - end]}...{name[len(name) - end :]}"


def _price(price: float) -> str:
    """Return a price for people: cents matter in small ones only."""
    return f"{price:,.2f}" if price < 100_000 else f"{price:,.0f}"


def show_comparison(comparison: Record, names: Mapping[str, str]) -> None:
    """Print one row per measure; ``names``: of the measures, for people."""

    def verdict(row: Record) -> str:
        return "not decided" if not row["decided"] else "lower" if row["ratio"] < 1 else "higher"

    columns: Columns = {
        "change": lambda row: f"{row['ratio'] - 1:+.1%}",
        "interval": lambda row: "unknown" if row["low"] is None else f"{row['low'] - 1:+.1%} to {row['high'] - 1:+.1%}",
        "lower on": lambda row: f"{row['better']} of {row['units']}",
        "verdict": lambda row: "" if row["low"] is None else verdict(row),
    }
    title = f"{comparison['first']} against {comparison['second']}"
    caption = f"{comparison['confidence']:.0%} interval of Student's t on log ratios, paired by {comparison['unit']}"
    if any(row["low"] is None for row in comparison["comparisons"]):
        caption += "; unknown: one pair only, or pairs that are all the same"
    rows = _cells({names[row["measure"]]: row for row in comparison["comparisons"]}, columns)
    out().print()
    out().print(table(title, ("", *columns), rows, caption=caption))


def show_advice(document: Record) -> None:
    """Print the answer in words and the options that save most."""
    now, best = document["now"], document["best"]
    console = out()
    if not document["resize"]:
        why = "no other allocation is possible now" if best is None else "no resize saves time on average"
        console.print(f"Stay on {now['replicas']} GPUs: {why}.")
    else:
        console.print(
            f"Resize from {now['replicas']} to {best['replicas']} GPUs on {best['nodes']} "
            f"node{'s' if best['nodes'] > 1 else ''}: saves {_span(best['expected_saved_s'])} on average, some time with "
            f"probability {best['probability']:.0%}."
        )
        even = best["break_even_s"]
        if even is not None:
            console.print(f"It pays from {_span(even)} left on; {_span(now['remaining_s'])} are left, as it is now.")
    shown = sorted(document["options"], key=lambda one: -float(one["expected_saved_s"]))[:_MOST_OPTIONS_SHOWN]
    if shown:
        rows = _cells({f"{one['replicas']} on {one['nodes']}": one for one in shown}, _OPTIONS)
        left = f"{_span(now['remaining_s'])} left on {now['replicas']} GPUs"
        caption = (
            "gain: goodput over that of now; pays from: with so much left; saves: the mean, and what 10 and 90 % of cases "
            "stay below; sure: probability of saving time; GPU h: held more than without the resize"
        )
        console.print()
        console.print(table(f"{left}, predicted by the fitted model", ("GPUs", *_OPTIONS), rows, caption=caption))


def _span(seconds: float, blank: str = " ") -> str:
    """Return a time as people say it; in tables without the blank."""
    minute = "min" if blank else "m"
    for size, unit in ((86400, "d"), (3600, "h"), (60, minute)):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.1f}{blank}{unit}"
    return f"{seconds:.0f}{blank}s"


def _change(base: Record, key: str) -> Callable[[Any], str]:
    """Return what shows by how much a record differs from ``base``, which itself shows nothing."""
    return lambda one: f"{one[key] / base[key] - 1:+.0%}" if one is not base else ""


def show_autoscaling(document: Record) -> None:
    """Print one row per rule, the changes against the throughput scaler, and the published ones."""
    base = document["rules"]["throughput"]
    columns: list[tuple[str, Callable[[Any], str]]] = [
        ("hours", lambda one: f"{one['seconds'] / 3600:.2f}"),
        ("change", _change(base, "seconds")),
        ("cost", lambda one: f"{one['cost']:,.1f}"),
        ("change", _change(base, "cost")),
        ("effic.", lambda one: f"{one['efficiency']:.2f}"),
        ("nodes", lambda one: f"{one['first_nodes']}-{one['last_nodes']}"),
        ("moves", lambda one: str(one["restarts"])),
    ]
    rows = [[name, *(show(one) for _, show in columns)] for name, one in document["rules"].items()]
    if document["application"] == "imagenet":
        changes = (f"{PUBLISHED_SCALING[key]:+.0%}" for key in ("seconds", "cost"))
        rows.append(["published", "", next(changes), "", next(changes), "", "", ""])
    title = f"{document['application']} on up to {document['most_nodes']} rented nodes (simulated)"
    caption = "changes against the throughput scaler; effic.: statistical efficiency; moves: restarts"
    out().print(table(title, ("", *(name for name, _ in columns)), rows, caption=caption))


def show_search(document: Record) -> None:
    """Print one row per policy and what was published."""
    search, policies = document["search"], document["policies"]
    base = next(iter(policies.values()))

    def row(name: str, one: Record, base: Record, figures: str) -> list[str]:
        jct, span = (_change(base, key)(one) for key in ("avg_jct_s", "makespan_s"))
        times = f"{one['avg_jct_s'] / 60:.{figures}}", f"{one['makespan_s'] / 3600:.{figures}}"
        return [name, times[0], jct, times[1], span]

    rows = []
    for name, one in policies.items():
        cells = row(name, one, base, "1f")
        cells[3] = f"{one['makespan_s'] / 3600:.2f}"
        rows.append([*cells, f"{one['gpu_seconds'] / 3600:,.0f}", str(one["restarts"])])
    if search["application"] == "cifar10":
        for name, one in PUBLISHED_SEARCH.items():
            rows.append([*row(f"published {name}", one, PUBLISHED_SEARCH["baseline"], "0f"), "", ""])
    title = f"{search['trials']} trials of {search['application']}, {search['concurrent']} at a time (trials synthetic)"
    columns = ("", "JCT, min", "change", "span, h", "change", "GPU h", "moves")
    caption = (
        f"changes against a fixed {search['local_batch_size']} samples on each of {search['gpus']} GPUs; "
        "span: from the first trial to the end of the last; moves: restarts"
    )
    out().print(table(title, columns, rows, caption=caption))


def prepare_folder(folder: Path, file_format: str) -> None:
    """Make the folder of pictures, or raise InputError before anything is replayed."""
    from ddltool.analyzers.scheduling.pictures import FORMATS

    if file_format not in FORMATS:
        raise InputError("--picture-format", f"is {file_format!r}", "png or svg")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot be made ({error.strerror})"
        raise InputError(str(folder), problem, "give a folder, or the name of one to be made") from None
    check_writable(folder / f"completion-times.{file_format}")


def write_pictures(
    folder: Path, replays: Sequence[Any], *, job: str | None = None, file_format: str = "png"
) -> list[Path]:
    """Write all pictures of some policies' replays (result, recorder) of one workload and return their files.

    ``job``: whose life is drawn, by default the one that the first policy restarts most. Raises InputError for an
    unknown job before anything is written.
    """
    from ddltool.analyzers.scheduling.pictures import (
        allocation_picture,
        completion_picture,
        life_picture,
        longest_restarted,
    )

    prepare_folder(folder, file_format)
    results = {result.policy: result for result, _ in replays}
    made = {"completion-times": completion_picture(results, file_format=file_format)}
    shown = job if job is not None else longest_restarted(next(iter(results.values())))
    for result, record in replays:
        made[f"allocation-{result.policy}"] = allocation_picture(result, record, file_format=file_format)
        made[f"job-{result.policy}"] = life_picture(result, record, shown, file_format=file_format)
    paths = []
    for name, content in made.items():
        paths.append(folder / f"{name}.{file_format}")
        write_bytes(paths[-1], content)
    return paths
