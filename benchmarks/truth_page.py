"""docs/truth.md and its picture: predicted against measured, of rows that the fit did not see. Start at :func:`write_page`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from truth_cases import SOURCES, Row, Truth
from truth_models import Trace, build

from ddltool.analyzers.answers.reporting.charts import drawn
from ddltool.analyzers.answers.reporting.figures import Line, Lines
from ddltool.analyzers.step.costs.fitting import Belief
from ddltool.analyzers.step.costs.model import cost_model
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.torch_adapter import trace_any_batch
from ddltool.artifacts import write_text
from ddltool.calibration import CalibrationTable, Residuals
from ddltool.shipped import devices

if TYPE_CHECKING:
    from calibrate import Judged

Pairs = list[tuple[Row, float]]
COMMAND = "python benchmarks/calibrate.py --data ../shared/data --cache /tmp/ddltool-traces"
# Rows whose prediction the page shows, one of a kind: source, model, device, precision.
EXAMPLES = (
    ("timm", "regnety_032", "RTX3090", "fp16"),
    ("lambda", "ResNet-50 v1.5", "V100", "fp16"),
    ("lambda", "BERT-base SQuAD", "A100-80GB", "fp16-pure"),
    ("lambda", "SSD300-ResNet50", "RTX6000Ada", "fp16"),
    ("mpt", "MPT-125m", "A100", "bf16-pure"),
)
_CLOUDS = {
    "timm": ("timm", "timm-inference"),
    "MPT": ("mpt",),
    "Lambda, NeuSight, Lucid": ("lambda", "neusight", "lucid"),
    "Gavel, Sia": ("gavel", "sia"),
}
_KINDS = {
    "convolutions without groups": "resnet resnetv2 senet res2net sknet ssd nfnet vgg selecsls densenet vovnet hgnet "
    "inception_v3 inception_v4 inception_resnet_v2",
    "convolutions with groups": "efficientnet mobilenetv3 ghostnet regnet rexnet hardcorenas xception xception_aligned nasnet "
    "pnasnet convnext",
    "attention on images": "vision_transformer vision_transformer_hybrid vision_transformer_relpos vision_transformer_sam deit "
    "beit cait xcit crossvit volo swin_transformer_v2 swin_transformer_v2_cr pit tnt twins levit coat hiera mvitv2 gcvit",
    "BERT": "bert",
    "GPT": "gpt",
    "recurrent, and translation": "gnmt lstm transformer",
}


def kind_of(row: Row) -> str:
    """Return the class of models that a row's belongs to."""
    found = (name for name, families in _KINDS.items() if row.family in families.split())
    return next(found, "other models of images")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How far off the predictions of some rows are."""

    rows: int
    ratio: float
    """Median of predicted / measured."""
    median: float
    ninth: float
    """Median and 90th percentile of |predicted / measured - 1|."""

    @classmethod
    def of(cls, pairs: Pairs) -> Summary:
        """Return the summary of at least one row."""
        ratio = np.array([time / row.measured_s for row, time in pairs])
        error = np.abs(ratio - 1.0)
        return cls(
            rows=len(pairs),
            ratio=float(np.median(ratio)),
            median=float(np.median(error)),
            ninth=float(np.quantile(error, 0.9)),
        )

    def errors(self) -> str:
        """Return the cell of :data:`ERRORS`."""
        return f"{_number(self.median)} ({_number(self.ninth)})"


ERRORS = "error (worst tenth), %"


def _number(share: float) -> str:
    return f"{100.0 * share:.1f}" if share < 0.0995 else f"{100.0 * share:.0f}"


def _percent(share: float) -> str:
    return f"{_number(share)} %"


def _table(first: str, lines: Sequence[tuple[str, Pairs]], range_of: Callable[[Row], Residuals]) -> str:
    made = [f"| {first} | rows | ratio | {ERRORS} | in range, % |", f"|---{'|---:' * 4}|"]
    for name, pairs in lines:
        if pairs:
            each = Summary.of(pairs)
            held = np.mean([range_of(row).low <= row.measured_s / time <= range_of(row).high for row, time in pairs])
            made.append(f"| {name} | {each.rows:,} | {each.ratio:.2f} | {each.errors()} | {_number(float(held))} |")
    return "\n".join(made)


def _left_out(known: Pairs, unknown: Pairs) -> str:
    made = ["| GPU | rows | GPU left out, % | generation left out, % |", f"|---{'|---:' * 3}|"]
    alone = dict(_by(known, gpu))
    for name, pairs in _by(unknown, gpu):
        each = Summary.of(pairs)
        first = Summary.of(alone[name]).errors() if name in alone else ""
        made.append(f"| {name} | {each.rows:,} | {first} | {each.errors()} |")
    return "\n".join(made)


def _by(pairs: Pairs, key: Callable[[Row], str]) -> list[tuple[str, Pairs]]:
    groups: dict[str, Pairs] = defaultdict(list)
    for row, time in pairs:
        groups[key(row)].append((row, time))
    return sorted(groups.items())


def write_page(
    folder: Path,
    truth: Truth,
    table: CalibrationTable,
    whole: Belief,
    families: Judged,
    sources: Judged,
    known: Judged,
    unknown: Judged,
) -> None:
    """Write the page and its picture into ``folder``."""
    every = families.chosen(lambda _: True)
    _picture(folder / "truth.png", every)
    write_text(folder / "truth.md", _page(truth, table, whole, families, sources, known, unknown))


def _page(
    truth: Truth,
    table: CalibrationTable,
    whole: Belief,
    families: Judged,
    sources: Judged,
    known: Judged,
    unknown: Judged,
) -> str:
    residuals, every = table.residuals, families.chosen(lambda _: True)
    own: Callable[[Row], bool] = lambda row: not SOURCES[row.source].adds  # noqa: E731
    plain: Callable[[Row], bool] = lambda row: own(row) and not row.source.startswith("timm")  # noqa: E731
    shown: Callable[[Row], bool] = lambda row: own(row) and row.source != "timm"  # noqa: E731
    judged = [(row, time) for row, time in every if own(row)]
    by_library = {id(row) for row, _ in families.chosen(own, "library")}
    range_of = lambda row: residuals["library" if id(row) in by_library else "device"]  # noqa: E731
    device, elsewhere = Summary.of(judged), Summary.of(sources.chosen(own))
    held = [range_of(row).low <= row.measured_s / time <= range_of(row).high for row, time in sources.chosen(own)]
    of_known, of_unknown = known.chosen(plain), unknown.chosen(plain)
    new, other = Summary.of(of_known), Summary.of(of_unknown)
    usual = [
        (row, time)
        for row, time in [*of_known, *of_unknown]
        if row.source in ("lambda", "neusight") and (row.family == "bert" or "timm:resnet50@" in row.trace.model)
    ]
    usual_new = Summary.of(usual)
    by_source = [
        (SOURCES[name].title, pairs)
        for name in SOURCES
        for own_name, pairs in _by(sources.chosen(lambda _: True), lambda r: r.source)
        if own_name == name
    ]
    parts = [
        "# How far off are the predictions?",
        "A job of a project of which the fit saw nothing, with software and machines of its own, is predicted "
        f"{_percent(elsewhere.median)} off in the median and {_percent(elsewhere.ninth)} off in the worst tenth of "
        f"{elsewhere.rows:,} published measurements; the range holds {_percent(float(np.mean(held)))}. A model of a "
        f"family that it never saw, beside others of the project, {_percent(device.median)} ({_percent(device.ninth)}); a GPU "
        "that "
        f"it did not see {_percent(new.median)} ({_percent(new.ninth)}), a whole generation that it did not see "
        f"{_percent(other.median)} ({_percent(other.ninth)}).",
        "![Predicted against measured step times, cross-validated](truth.png)",
        "<!-- run: parse (the measured rows) -->\n```sh\n" + COMMAND + "\n```",
        "That command writes this page and the constants of every prediction. The fit behind a figure did not see its rows. "
        "Times are of one step on one GPU. Errors are medians, in brackets 90th percentiles; `ratio` is the median of "
        "predicted / measured; `in range` the share of rows within the 80 % range.",
        "## By source\n\nAll rows of the source were left out.\n\n" + _table("source", by_source, range_of),
        "\n".join(f"- {source.title}: {source.remark}." for source in SOURCES.values()),
        "Gavel's and Sia's are the only rows on Kepler and Turing. Their software adds "
        f"{1e3 * min(whole.settings.values()):.0f} to {1e3 * max(whole.settings.values()):.0f} ms to every step, fitted by "
        "model and not shipped; these rows are in no range.",
        "## By class of models\n\nEach model's family was left out (timm's in five folds of whole files of timm).\n\n"
        + _table("class", _by(judged, kind_of), range_of),
        "## By GPU, left out\n\nFirst the GPU's rows were left out (an A100's with those of its variants), then those of its "
        "whole generation. The errors on top of the page and the ranges count the rows without timm's.\n\n"
        + _left_out(known.chosen(shown), unknown.chosen(shown)),
        f"ResNet-50 and BERT alone: {_percent(usual_new.median)} off in the median, "
        f"{_percent(usual_new.ninth)} in the worst tenth.",
        "## Intervals\n\nA prediction's range holds 80 % of measurements (split conformal prediction): the quantiles of "
        "measured / predicted over the rows left out, weighted half by model and GPU, half by source. For a GPU that was not "
        "seen it is the range of both errors, of the GPU and of another model.\n\n" + _intervals(table),
        "## Some rows\n\nPredicted by the shipped constants, which saw these rows, from a fresh trace:\n\n"
        + _examples(families, table),
        "## Limits\n\n" + _limits(every, truth),
    ]
    return "\n\n".join(parts) + "\n"


def gpu(row: Row) -> str:
    """Return a row's GPU, apart for timm's rows."""
    return f"{row.device}, timm's inference benchmark" if row.source.startswith("timm") else row.device


def _intervals(table: CalibrationTable) -> str:
    words = {
        "device": "another model on a GPU of the fit",
        "generation": "another GPU of a generation of the fit",
        "unknown": "a generation that the fit did not see",
        "library": "a third of the step in grouped convolutions in channels_last, or recurrent layers",
        "host": "a step that waits for the host",
        "compiled": "a step under `torch.compile`",
    }
    lines = ["| what | from | to | error | rows | left out |", "|---|---:|---:|---:|---:|---|"]
    for name, word in words.items():
        each = table.residuals[name]  # type: ignore[index]
        lines.append(
            f"| {word} | {each.low:.2f} x | {each.high:.2f} x | {_percent(each.median_error)} | {each.rows:,} | {each.what} |"
        )
    return "\n".join(lines)


def examples(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of EXAMPLES: of each the one with the largest batch."""
    found = []
    for source, model, device, precision in EXAMPLES:
        same = [
            row
            for row in rows
            if (row.source, row.model, row.device, row.precision) == (source, model, device, precision)
            and row.trace.mode == "training"
        ]
        if same:
            found.append(max(same, key=lambda row: (row.batch, -row.measured_s)))
    return found


def predicted_s(row: Row, table: CalibrationTable) -> float:
    """Return the seconds that the product predicts for a row, from a fresh trace and the constants of ``table``."""
    trace: Trace = row.trace
    numerics = Numerics(trace.precision if row.precision != "tf32" else "tf32", trace.channels_last)  # type: ignore[arg-type]
    step = trace_any_batch(lambda: build(trace), mode=trace.mode, numerics=numerics)  # type: ignore[arg-type]
    model = cost_model(devices().device(row.device), table)
    return model.step(step.at(row.batch), optimizer=row.optimizer).step_s


def _examples(families: Judged, table: CalibrationTable) -> str:
    lines = [
        "| source | model | GPU | format | batch | measured | predicted | error |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for row in examples([row for cell in families.cells for row in cell.rows]):
        time = predicted_s(row, table)
        layout = ", channels last" if row.trace.channels_last else ""
        lines.append(
            f"| {row.source} | {row.model} | {row.device} | {row.precision}{layout} | {row.batch} "
            f"| {1e3 * row.measured_s:.1f} ms | {1e3 * time:.1f} ms | {round(100.0 * (time / row.measured_s - 1.0)):+d} % |"
        )
    return "\n".join(lines)


def _limits(every: Pairs, truth: Truth) -> str:
    training = [(row, time) for row, time in every if row.source.startswith("timm")]
    families = _by(training, lambda row: row.family)
    worst = sorted(
        ((name, Summary.of(pairs)) for name, pairs in families if len(pairs) >= 6),
        key=lambda each: -each[1].median,
    )[:5]
    listed = ", ".join(f"`{name}` ({_percent(each.median)})" for name, each in worst)
    left = sum((Counter(reasons) for reasons in truth.excluded.values()), Counter[str]()).most_common(3)
    return "\n".join(
        (
            f"- Predicted worst, by timm's files, with their median error: {listed}.",
            "- A step that waits for the host is as slow as its Python and data loader: [`ddltool calibrate`](calibrate.md) "
            "fits the constants to yours. By the source's software one GPU gives numbers 10 to 20 % apart.",
            "- AMD's GPUs, CPUs, float8 and sparse kernels were not measured: their constants are NVIDIA's.",
            f"- Rows left out, most of all: {'; '.join(f'{count:,} ({reason})' for reason, count in left)}.",
        )
    )


def _picture(path: Path, pairs: Pairs) -> None:
    none = np.empty(0)
    lines = []
    for label, names in _CLOUDS.items():
        own = np.array([(row.measured_s, time) for row, time in pairs if row.source in names]).reshape(-1, 2)
        lines.append(Line(label=f"{label} ({len(own):,})", x=none, y=none, dots=(1e3 * own[:, 0], 1e3 * own[:, 1])))
    ends = np.array(
        [1e3 * min(min(row.measured_s, t) for row, t in pairs), 1e3 * max(max(row.measured_s, t) for row, t in pairs)]
    )
    lines.append(Line(label="exact; band: 30 % off", x=ends, y=ends, low=0.7 * ends, high=1.3 * ends))
    figure = Lines(
        title="Predicted against measured step times",
        lines=lines,
        xlabel="measured step (ms)",
        ylabel="predicted step (ms)",
        x_axis="log",
        log_y=True,
        draw="line",
    )
    path.write_bytes(
        drawn([figure], "png", width=380)
    )  # as wide as a phone, whose reader could not tell smaller letters
