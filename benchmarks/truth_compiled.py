"""Predicted against measured compiled steps, and other gains that were published: a section of docs/truth.md.

    python benchmarks/truth_compiled.py --data ../shared/data --cache /tmp/ddltool-traces

It changes that section, and the residuals of compiled steps in fixtures/calibration.json. Tracing takes half an hour the
first time; DIR keeps the graphs. Start at :func:`judged`.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from truth_cases import SOURCES
from truth_models import Trace, build, gpt, llama

from ddltool.analyzers.step.costs.compiling import compiled
from ddltool.analyzers.step.costs.model import cost_model
from ddltool.analyzers.step.tracing.factories import imported
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.analyzers.step.tracing.torch_adapter import trace_step
from ddltool.artifacts import save, write_text
from ddltool.calibration import CalibrationTable, Residuals
from ddltool.graph import Graph, Mode, read_graph, write_graph
from ddltool.shipped import calibration, devices

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python benchmarks/truth_compiled.py --data ../shared/data --cache /tmp/ddltool-traces"
HEADING = "## Compiled steps"
# timm's benchmark of one GPU, eager in both layouts and compiled; of its models every so many are traced.
_FILES = ("amp-nchw-pt240-cu124-rtx4090", "amp-nhwc-pt240-cu124-rtx4090", "amp-nchw-pt240-cu124-rtx4090-dynamo")
_EVERY = 9
_NEUSIGHT = {"bert_large": "bert-large@512", "gpt2_large": "gpt2-large@1024"}
_GPUS = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA A100-PCIE-40GB": "A100-PCIe"}
HELD = 0.8


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One model, eager and compiled: seconds of a sample."""

    source: str
    model: str
    eager_s: float
    compiled_s: float
    predicted_eager_s: float
    predicted_s: float
    """Compiled."""
    layout: tuple[float, float] | None = None
    """The measured and the predicted gain of channels_last, eager, where it was measured and the model has convolutions."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A step of the published gains."""

    build: Callable[[], TrainingStep]
    numerics: Numerics
    device: str
    optimizer: str = "adamw"
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A published gain: what was changed, who measured it, and the two steps."""

    change: str
    who: str
    measured: float
    before: tuple[str, bool]
    after: tuple[str, bool]
    """Names of runs, and whether compiled."""
    samples: float = 1.0
    """Samples of the second step over those of the first."""


def _t5(batch: int) -> TrainingStep:
    """Return T5 v1.1 base on 512 tokens in and 114 out, without dropout and fused attention, as nanoT5 trains it."""
    transformers = imported("transformers", "t5")

    class Answering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.T5ForConditionalGeneration(
                transformers.T5Config(
                    vocab_size=32128,
                    d_model=768,
                    d_kv=64,
                    d_ff=2048,
                    num_layers=12,
                    num_heads=12,
                    feed_forward_proj="gated-gelu",
                    dropout_rate=0.0,
                    tie_word_embeddings=False,
                    use_cache=False,
                    attn_implementation="eager",
                    decoder_start_token_id=0,
                    pad_token_id=0,
                    eos_token_id=1,
                )
            )

        def forward(self, words: Tensor, answers: Tensor) -> Tensor:
            """Return the loss."""
            loss: Tensor = self.model(input_ids=words, labels=answers).loss
            return loss

    inputs = (torch.zeros(batch, 512, dtype=torch.long), torch.zeros(batch, 114, dtype=torch.long))
    return TrainingStep(name="t5", module=Answering(), inputs=inputs, loss=lambda loss: loss)


def _gpt2(attention: str, vocabulary: int = 50257) -> Callable[[], TrainingStep]:
    return lambda: gpt(1024, 12, 768, 12, attention, vocabulary=vocabulary, dropout=0.0).at_batch(16)


_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
_8B = {**_7B, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
_3B = {
    **{"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
    **{"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
}
_FSDP = Numerics("bf16", gathered=True)
RUNS = {
    # Under FSDP on many GPUs each updates next to nothing.
    "7B, A100": Run(build=lambda: llama(2, 4096, **_7B), numerics=_FSDP, device="A100-80GB", optimizer="none"),
    "7B, H100": Run(build=lambda: llama(2, 4096, **_7B), numerics=_FSDP, device="H100", optimizer="none"),
    "8B, H100": Run(build=lambda: llama(2, 8192, **_8B), numerics=_FSDP, device="H100", optimizer="none"),
    "3B, A100": Run(build=lambda: llama(2, 2048, **_3B), numerics=Numerics("bf16-pure"), device="A100-80GB"),
    "T5, TF32": Run(build=lambda: _t5(64), numerics=Numerics("tf32"), device="A100-80GB"),
    "T5, half": Run(build=lambda: _t5(64), numerics=Numerics("bf16"), device="A100-80GB"),
    "T5, whole": Run(build=lambda: _t5(128), numerics=Numerics("bf16"), device="A100-80GB"),
    "GPT-2": Run(build=_gpt2("eager"), numerics=Numerics("bf16"), device="A100"),
    "GPT-2, fused": Run(build=_gpt2("sdpa"), numerics=Numerics("bf16"), device="A100"),
    "GPT-2, padded": Run(build=_gpt2("sdpa", 50304), numerics=Numerics("bf16"), device="A100"),
}
_IBM = "[fms-fsdp](https://pytorch.org/blog/maximizing-training-throughput/)"
_NANO = "[build-nanogpt](https://github.com/karpathy/build-nanogpt)"
_NANO_T5 = "[nanoT5](https://github.com/PiotrNawrot/nanoT5#efficiency-statistics)"
_TUNE = "[torchtune](https://github.com/pytorch/torchtune#optimization-flags)"
_TITAN = "[torchtitan](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)"
GAINS = (
    Gain(
        change="compiled, Llama-7B, FSDP, A100",
        who=_IBM,
        measured=1.23,
        before=("7B, A100", False),
        after=("7B, A100", True),
    ),
    Gain(
        change="compiled, Llama-7B, FSDP, H100",
        who=_IBM,
        measured=1.28,
        before=("7B, H100", False),
        after=("7B, H100", True),
    ),
    Gain(
        change="compiled, Llama-3.1-8B, FSDP, H100",
        who=_TITAN,
        measured=6667 / 5762,
        before=("8B, H100", False),
        after=("8B, H100", True),
    ),
    Gain(
        change="compiled, Llama-3.2-3B, A100",
        who=_TUNE,
        measured=1.27,
        before=("3B, A100", False),
        after=("3B, A100", True),
    ),
    Gain(
        change="compiled, T5, TF32",
        who=_NANO_T5,
        measured=1.39 / 0.95,
        before=("T5, TF32", False),
        after=("T5, TF32", True),
    ),
    Gain(
        change="compiled, twice the batch, T5, bf16",
        who=_NANO_T5,
        measured=1.30 / 0.56,
        before=("T5, half", False),
        after=("T5, whole", True),
        samples=2.0,
    ),
    Gain(change="compiled, GPT-2, A100", who=_NANO, measured=300 / 130, before=("GPT-2", False), after=("GPT-2", True)),
    Gain(
        change="fused attention, compiled GPT-2",
        who=_NANO,
        measured=130 / 96,
        before=("GPT-2", True),
        after=("GPT-2, fused", True),
    ),
    Gain(
        change="50257 words padded to 50304, compiled GPT-2",
        who=_NANO,
        measured=96 / 93,
        before=("GPT-2, fused", True),
        after=("GPT-2, padded", True),
    ),
)


def _kept(path: Path, build: Callable[[], TrainingStep], mode: Mode, numerics: Numerics, batch: int | None) -> Graph:
    """Return the graph of a step, traced unless the file has it."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_graph(trace_step(build, mode=mode, batch_size=batch, numerics=numerics).graph, path)
    return read_graph(path)


def _step_s(graph: Graph, device: str, table: CalibrationTable, optimizer: str = "none", traffic: float = 1.0) -> float:
    """Return the predicted seconds; ``traffic``: of a byte beside those of training steps."""
    model = cost_model(devices().device(device), table)
    units = {**model.constants.units, "memory": model.constants.units["memory"] / traffic}
    model = replace(model, constants=replace(model.constants, units=units))
    return model.step(graph, optimizer=optimizer).step_s


def _timm(data: Path, cache: Path, table: CalibrationTable) -> Iterator[Pair]:
    """Yield every so many models of timm's benchmark that ran eager in both layouts, and compiled."""
    found: dict[tuple[str, int], dict[str, dict[str, str]]] = {}
    with gzip.open(data / "truth" / "timm_inference.csv.gz", "rt", encoding="utf-8") as lines:
        for cells in csv.DictReader(lines):
            key = cells["model"].partition(".")[0], int(float(cells["img"]))
            found.setdefault(key, {}).setdefault(cells["file"], cells)
    whole = sorted(key for key, each in found.items() if all(file in each for file in _FILES))
    timm, traffic = imported("timm", "timm"), SOURCES["timm-inference"].traffic
    for name, size in whole[::_EVERY]:
        if not timm.is_model(name):
            continue
        rows = [found[name, size][file] for file in _FILES]
        batches = [int(float(cells["batch"])) for cells in rows]
        measured = [1e-3 * float(cells["step_ms"]) / batch for cells, batch in zip(rows, batches, strict=True)]
        trace = Trace(f"timm:{name}@{size}", "fp16", mode="inference", fused=True)
        graphs = [
            _kept(
                cache / "graphs" / f"{name}@{size}-{batch}.json",
                lambda trace=trace: build(trace),  # type: ignore[misc]
                "inference",
                Numerics("fp16"),
                batch,
            )
            for batch in batches
        ]
        graphs[1] = replace(graphs[1], meta={**graphs[1].meta, "channels_last": True})
        graphs[2] = compiled(graphs[2])
        eager_s, last_s, compiled_s = (
            _step_s(graph, "RTX4090", table, traffic=traffic) / batch
            for graph, batch in zip(graphs, batches, strict=True)
        )
        yield Pair(
            source="timm",
            model=name,
            eager_s=measured[0],
            compiled_s=measured[2],
            predicted_eager_s=eager_s,
            predicted_s=compiled_s,
            layout=(measured[0] / measured[1], eager_s / last_s) if graphs[2].meta["channels_last"] else None,
        )


def _neusight(data: Path, cache: Path, table: CalibrationTable) -> Iterator[Pair]:
    """Yield NeuSight's forward passes that were measured both eager and compiled."""
    with (data / "truth" / "neusight_labels.csv").open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    of = {
        (cells["model"], cells["gpu"], cells["batch_per_gpu"], cells["compiled"]): 1e-3 * float(cells["step_time_ms"])
        for cells in rows
        if "inference" in cells["note"]
    }
    for (model, gpu, batch, is_compiled), measured_s in sorted(of.items()):
        if is_compiled == "1":
            trace = Trace(_NEUSIGHT[model], "fp32", mode="inference")
            graph = _kept(
                cache / "graphs" / f"{model}-{float(batch):.0f}.json",
                lambda trace=trace: build(trace),  # type: ignore[misc]
                "inference",
                Numerics("fp32"),
                int(float(batch)),
            )
            yield Pair(
                source="NeuSight",
                model=model,
                eager_s=of[model, gpu, batch, "0"],
                compiled_s=measured_s,
                predicted_eager_s=_step_s(graph, _GPUS[gpu], table),
                predicted_s=_step_s(compiled(graph), _GPUS[gpu], table),
            )


def judged(data: Path, cache: Path, table: CalibrationTable) -> list[Pair]:
    """Return the models that were measured both eager and compiled."""
    return [*_timm(data, cache, table), *_neusight(data, cache, table)]


def compiled_residuals(pairs: Sequence[Pair], device: Residuals) -> Residuals:
    """Return between which factors of a compiled prediction 80 % of measurements lie, no less than an eager one's."""
    logs = np.log([pair.compiled_s / pair.predicted_s for pair in pairs])
    level = min(1.0, np.ceil((len(logs) + 1) * (1.0 + HELD) / 2.0) / len(logs))
    low, high = float(np.quantile(logs, 1.0 - level)), float(np.quantile(logs, level))
    return Residuals(
        low=min(device.low, float(f"{np.exp(low):.4g}")),
        high=max(device.high, float(f"{np.exp(high):.4g}")),
        median_error=float(f"{np.median(np.abs(np.expm1(-logs))):.4g}"),
        rows=len(pairs),
        what="all compiled steps; no less than a step's without it",
    )


def _gain_lines(pairs: Sequence[Pair], cache: Path, table: CalibrationTable) -> Iterator[str]:
    """Yield the lines of the table of gains."""
    yield "| change | measured by | gain measured | gain predicted |"
    yield "|---|---|---:|---:|"
    times: dict[tuple[str, bool], float] = {}
    for gain in GAINS:
        for name, is_compiled in (gain.before, gain.after):
            if (name, is_compiled) not in times:
                run = RUNS[name]
                path = cache / "graphs" / f"{re.sub('[^a-zA-Z0-9]+', '-', name)}.json"
                graph = _kept(path, run.build, "training", run.numerics, None)
                times[name, is_compiled] = _step_s(
                    compiled(graph) if is_compiled else graph, run.device, table, run.optimizer
                )
        predicted = gain.samples * times[gain.before] / times[gain.after]
        yield f"| {gain.change} | {gain.who} | {gain.measured:.2f} | {predicted:.2f} |"
    for source in ("timm", "NeuSight"):
        own = [pair for pair in pairs if pair.source == source]
        measured, predicted_all = (
            _spread([getattr(pair, eager) / getattr(pair, done) for pair in own])
            for eager, done in (("eager_s", "compiled_s"), ("predicted_eager_s", "predicted_s"))
        )
        yield f"| compiled, forward only, {len(own)} of {source}'s | {source} | {measured} | {predicted_all} |"
    layouts = [pair.layout for pair in pairs if pair.layout]
    measured, predicted_all = (_spread([each[place] for each in layouts]) for place in (0, 1))
    yield f"| channels_last, forward only, {len(layouts)} of timm's with convolutions | timm | {measured} | {predicted_all} |"


def _spread(values: Sequence[float]) -> str:
    low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def section(pairs: Sequence[Pair], cache: Path, table: CalibrationTable) -> str:
    """Return the page's section on compiled steps."""
    residuals = table.residuals["compiled"]
    ratios = np.array([pair.predicted_s / pair.compiled_s for pair in pairs])
    gains = np.array([pair.predicted_eager_s / pair.predicted_s * pair.compiled_s / pair.eager_s for pair in pairs])
    inside = np.mean([residuals.low <= 1.0 / ratio <= residuals.high for ratio in ratios])
    parts = [
        HEADING,
        f"Of {len(pairs)} models that timm (RTX 4090) and NeuSight (A100, H100) ran compiled, forward only, the step is "
        f"predicted {100 * np.median(np.abs(ratios - 1)):.1f} % off in the median and "
        f"{100 * np.quantile(np.abs(ratios - 1), 0.9):.0f} % in the worst tenth, the gain "
        f"{100 * np.median(np.abs(gains - 1)):.1f} and {100 * np.quantile(np.abs(gains - 1), 0.9):.0f} %. No constant was "
        f"fitted to compiled steps. The range of a compiled prediction, {residuals.low:.2f} to {residuals.high:.2f} times, "
        f"holds {100 * inside:.0f} % of them.",
        "<!-- run: parse (the measured rows) -->\n```sh\n" + COMMAND + "\n```",
        "Gains are of time; in brackets the middle 80 % of models.",
        "\n".join(_gain_lines(pairs, cache, table)),
        "Gains of FSDP are of compute alone; torchtitan's step checkpoints every second layer.",
    ]
    return "\n\n".join(parts)


def write_compiled(pairs: Sequence[Pair], cache: Path, table: CalibrationTable) -> None:
    """Put the section into docs/truth.md, before that on memory or the limits."""
    page = ROOT / "docs" / "truth.md"
    text = re.sub(rf"{HEADING}\n.*?(?=^## )", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    behind = re.search(r"^## (Memory|Limits)\n", text, flags=re.MULTILINE)
    assert behind is not None, f"{page} has neither of its last sections"
    write_text(page, f"{text[: behind.start()]}{section(pairs, cache, table)}\n\n{text[behind.start() :]}")


def main() -> None:
    """Write the section and the residuals from the measured rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds truth")
    parser.add_argument("--cache", type=Path, required=True, help="folder for traces, outside the repository")
    given = parser.parse_args()
    table = calibration()
    pairs = judged(given.data, given.cache, table)
    residuals = {**table.residuals, "compiled": compiled_residuals(pairs, table.residuals["device"])}
    table = table.model_copy(update={"residuals": residuals})
    save(table, ROOT / "fixtures" / "calibration.json")
    write_compiled(pairs, given.cache, table)


if __name__ == "__main__":
    main()
