"""What one H200 took, op by op: cases of the fit, and how far off a fit that did not see them is.

    python benchmarks/truth_measured.py --cache DIR

The rows of `benchmarks/measured` were made by `measure_gpu.py`; DIR keeps the traced steps. `calibrate.py` fits them, and
writes the section of docs/truth.md. Start at :func:`read_measured`.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from measure_gpu import Case as Measured
from measure_gpu import case_of

from ddltool.analyzers.step.costs.fitting import Belief, Case, steps_s
from ddltool.analyzers.step.costs.kernel_times import Demand, demand_of
from ddltool.analyzers.step.costs.kernels import Kernels, kernels_of
from ddltool.analyzers.step.costs.work import work_of
from ddltool.analyzers.step.recording.op_rules import CLASSES, normal_type
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.artifacts import read_text, write_text
from ddltool.device import Device
from ddltool.graph import Graph, read_graph, write_graph
from ddltool.shipped import devices

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "benchmarks" / "measured"
TITLE = "## One GPU, op by op"
# A kernel's own time lacks the gap to the next: (step - device time) / kernels of the steps that the GPU bounds.
_GAP_S = 3.2e-6
# Ops of less are noise; where calls differ by more the model of that version of transformers is another one.
_LEAST_S, _SAME_CALLS = 0.2e-3, 0.02
# What an op of one step counts beside a published step, and its expected error: kernels of one class differ by so much.
_WEIGHT, _ERROR = 0.14, 0.15
# One name for what CUDA calls otherwise than the trace.
_NAMES = {
    "to_copy": "copy",
    "clone": "copy",
    "contiguous": "copy",
    **{f"{kernel}_attention_forward": "scaled_dot_product_attention" for kernel in ("cudnn", "flash", "efficient")},
    **{
        f"{kernel}_attention_backward": "scaled_dot_product_attention_backward"
        for kernel in ("cudnn", "flash", "efficient")
    },
}


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredOp:
    """All kernels of one op in one step."""

    step: Measured
    op: str
    kind: str
    """The class of its kernels."""
    case: Case


def _name(op_type: str) -> str:
    name = normal_type(op_type)
    return _NAMES.get(name, name)


def _graph(step: Measured, cache: Path) -> Graph:
    """Return the traced step, from the cache where it is there."""
    path = cache / f"measured-{hashlib.sha256(str(step).encode()).hexdigest()[:16]}.graph.json.gz"
    if not path.exists():
        numerics = Numerics(step.precision, step.channels_last)  # type: ignore[arg-type]
        write_graph(
            work_of(step.full_source, numerics, step.sequence_length, None, step.attention).traced.at(step.batch_size),
            path,
        )
    return read_graph(path)


def read_measured(cache: Path) -> list[MeasuredOp]:
    """Return the measured ops of all steps that are neither compiled nor computed again; ``cache``: folder for traced steps."""
    by_step: dict[Measured, dict[str, tuple[int, float]]] = defaultdict(dict)
    with gzip.open(ROWS / "h200_ops.csv.gz", "rt", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            calls, seconds = by_step[case_of(row)].get(_name(row["op"]), (0, 0.0))
            by_step[case_of(row)][_name(row["op"])] = (
                calls + int(row["calls"]),
                seconds + 1e-6 * float(row["device_us"]),
            )
    with (ROWS / "h200_steps.csv").open(encoding="utf-8") as lines:
        steps_by_case = {case_of(row): float(row["step_ms"]) / 1e3 for row in csv.DictReader(lines)}
    device, made = devices().device("H200"), []
    for step, ops in by_step.items():
        # The profiler counts some kernels of very long steps twice.
        is_counted_twice = sum(seconds for _, seconds in ops.values()) > 1.1 * steps_by_case[step]
        if not step.compile and step.checkpointing == "none" and not is_counted_twice:
            made += _ops_of(step, ops, _graph(step, cache), device)
    return made


def _ops_of(step: Measured, measured: dict[str, tuple[int, float]], graph: Graph, device: Device) -> list[MeasuredOp]:
    kernels = kernels_of(graph)
    demand = demand_of(kernels, device, precision=step.precision)
    names = np.array([_name(graph.op_type[op]) for op in kernels.op], dtype=object)
    made = []
    for name, (calls, seconds) in measured.items():
        places = np.flatnonzero(names == name)
        ops = len(set(kernels.op[places].tolist()))
        if seconds < _LEAST_S or abs(ops - calls) > _SAME_CALLS * calls:
            continue
        columns = np.column_stack([getattr(demand, field.name)[places] for field in fields(Demand)])
        _, first, count = np.unique(columns, axis=0, return_index=True, return_counts=True)  # alike kernels once
        case = Case(
            demand=Demand(**{field.name: getattr(demand, field.name)[places[first]] for field in fields(Demand)}),
            count=count.astype(np.float64),
            ops=0,
            views=0,
            tensors=0,
            generation=device.branch,
            measured_s=seconds + _GAP_S * calls,
            weight=_WEIGHT,
            error=_ERROR,
        )
        made.append(MeasuredOp(step=step, op=name, kind=_kind(kernels, places), case=case))
    return made


def _kind(kernels: Kernels, places: np.ndarray) -> str:
    kinds, counts = np.unique(kernels.kind[places], return_counts=True)
    return CLASSES[int(kinds[counts.argmax()])].replace("_", " ")


def section(ops: Sequence[MeasuredOp], unseen: Belief, whole: Belief) -> str:
    """Return the section: measured milliseconds by class, and predicted over measured of both fits."""
    cases = [each.case for each in ops]
    measured_s = np.array([case.measured_s for case in cases])
    predicted_s = [steps_s(cases, belief) for belief in (unseen, whole)]
    rows = []
    for kind in sorted({each.kind for each in ops}):
        places = np.array([each.kind == kind for each in ops])
        cells = [f"{times[places].sum() / measured_s[places].sum():.2f}" for times in predicted_s]
        low, high = np.quantile(predicted_s[1][places] / measured_s[places], [0.1, 0.9])
        rows.append((measured_s[places].sum(), kind, len(set(np.array([each.step for each in ops], dtype=object)[places])),
                     *cells, f"{low:.2f} to {high:.2f}"))  # fmt: skip
    steps = sorted({each.step for each in ops}, key=str)
    errors = [[] for _ in predicted_s]  # type: ignore[var-annotated]
    for step in steps:
        places = np.array([each.step == step for each in ops])
        for times, found in zip(predicted_s, errors, strict=True):
            found.append(abs(times[places].sum() / measured_s[places].sum() - 1.0))
    unseen_error, whole_error = (100 * float(np.median(found)) for found in errors)
    words = (
        f"An H200 ran {len(steps)} training steps (torch 2.11, 27 November 2026; `benchmarks/measure_gpu.py`), and torch's "
        f"profiler told the time of every op. A fit that did not see them is {unseen_error:.1f} % off in the median over the "
        f"device time of a step, the shipped one {whole_error:.1f} %. Its host was a slow virtual machine and is not judged: "
        "it bounded a third of the steps."
    )
    lines = [
        TITLE,
        "",
        words,
        "",
        "| class of kernels | steps | measured, ms | predicted / measured, unseen | shipped | 10 to 90 % of ops |",
        "|---|---:|---:|---:|---:|---:|",
        *(f"| {kind} | {count} | {1e3 * seconds:.1f} | {first} | {second} | {spread} |"
          for seconds, kind, count, first, second, spread in sorted(rows, reverse=True)),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def write_measured(ops: Sequence[MeasuredOp], unseen: Belief, whole: Belief) -> None:
    """Put the section into docs/truth.md, in place of the one that is there."""
    page = ROOT / "docs" / "truth.md"
    text = re.sub(rf"{TITLE}\n.*?(?=^## )", "", read_text(page), flags=re.DOTALL | re.MULTILINE)
    before, after, rest = text.partition("## Intervals\n")
    write_text(page, before + section(ops, unseen, whole) + "\n" + after + rest)


def main() -> None:
    """Print how many ops there are: `calibrate.py` fits them and writes the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for traced steps, outside the repository")
    ops = read_measured(parser.parse_args().cache)
    print(f"{len(ops)} ops of {len({each.step for each in ops})} steps")


if __name__ == "__main__":
    main()
