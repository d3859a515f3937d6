"""Time against a budget of memory for ten models: what checkpointing costs at its cheapest, with the proven bound.

    python benchmarks/bench_checkpointing.py

Prints the table and writes docs/checkpointing.png. A minute on two cores; predicted on an A100 in bfloat16.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ddltool.analyzers.answers.reporting.charts import drawn
from ddltool.analyzers.answers.reporting.figures import Line, Lines
from ddltool.analyzers.step.costs.checkpointing import cheapest
from ddltool.analyzers.step.costs.memory import Recomputation
from ddltool.analyzers.step.costs.model import cost_model, estimate
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.traced_lifetimes import lifetimes_of
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.sources import training_step
from ddltool.analyzers.step.tracing.torch_adapter import trace_step
from ddltool.device import Network
from ddltool.errors import Infeasible
from ddltool.shipped import calibration, devices

ROOT = Path(__file__).resolve().parents[1]
MODELS = (
    ("transformers:gpt2", 16),
    ("transformers:bert", 32),
    ("transformers:t5", 32),
    ("timm:vit_base_patch16_224", 64),
    ("timm:mixer_b16_224", 64),
    ("timm:convnext_tiny", 64),
    ("timm:swin_tiny_patch4_window7_224", 64),
    ("timm:efficientnet_b0", 64),
    ("zoo:resnet50_v1", 64),
    ("zoo:bert_small", 256),
)
SHARES = (0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)
_PICTURED = 8


def curve(source: str, batch: int) -> Line:
    """Return added time over budget, both in per cent of the step without checkpointing, and print the row."""
    lifetimes = lifetimes_of(
        trace_step(lambda: training_step(source, batch), mode="training", numerics=Numerics("bf16-pure"))
    )
    timed = estimate(lifetimes.traced.graph, cost_model(devices().device("A100"), calibration()), Network())
    seconds, alone = lifetimes.seconds(timed), Sharding(kind="none")
    none, full = (lifetimes.peak(alone, "adamw", lifetimes.every_block(how)).total_bytes for how in ("none", "full"))  # type: ignore[arg-type]
    whole_s = seconds.sum()
    points, gap = [], 0.0
    for share in SHARES:
        budget = full + share * (none - full)
        try:
            found = cheapest(lifetimes, seconds, alone, "adamw", budget)
        except Infeasible:
            continue
        assert found.peak_bytes <= budget
        gap = max(gap, found.gap)
        points.append((100 * budget / none, 100 * found.cost_s / whole_s, 100 * found.bound_s / whole_s))
    table = np.array(points)
    recomputation = Recomputation(lifetimes, lifetimes.every_block("full"))
    every = 100 * lifetimes.recomputed(recomputation, seconds).sum() / whole_s
    middle = ", ".join(f"{budget:.0f} %: +{cost:.1f} %" for budget, cost, _ in points[:-1:2])
    print(
        f"| {source} | {batch} | {none / 2**30:.1f} GiB | {full / 2**30:.1f} GiB, +{every:.1f} % | {middle} | {gap:.2%} |",
        flush=True,
    )
    return Line(label=source.partition(":")[2], x=table[:, 0], y=table[:, 1], low=table[:, 2], high=table[:, 1])


def main() -> None:
    """Print the table and write the picture of the first models."""
    print("| model | batch | all kept | all again | at the cheapest, by share of memory | largest gap |")
    print("|---|---:|---:|---:|---|---:|")
    lines = [curve(source, batch) for source, batch in MODELS]
    figure = Lines(
        title="Time against a budget of memory",
        lines=lines[:_PICTURED],
        xlabel="budget (% of the memory with all activations kept)",
        ylabel="added time (% of the step)",
        draw="points",
    )
    (ROOT / "docs" / "checkpointing.png").write_bytes(drawn([figure], "png", width=380))


if __name__ == "__main__":
    main()
