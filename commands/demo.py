"""``ddltool demo``: the whole way on one built-in example, from a model to a measured, enforced training run."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddltool import __version__
from ddltool.analyzers.communication.efficiency import Comparison, compare
from ddltool.analyzers.communication.result import trace_result
from ddltool.analyzers.communication.timeline import to_chrome_trace
from ddltool.analyzers.costs.model import cost_model, coverage, estimate
from ddltool.analyzers.deciding.planning import make_plan, ordered_parameters
from ddltool.analyzers.emitting.enforcement import to_enforcement
from ddltool.analyzers.goodput.throughput import iteration_time_s
from ddltool.analyzers.loading.job_inputs import capabilities_of
from ddltool.analyzers.loading.timed_graph import timed_graph
from ddltool.analyzers.reporting.page import render
from ddltool.artifacts import read_document, save, to_json, write_text
from ddltool.commands.artifact_reading import read_any
from ddltool.commands.options import Json, Seed
from ddltool.commands.output import err, note, out, print_json, progress, table
from ddltool.commands.profile import RESOLVER
from ddltool.commands.report import build
from ddltool.device import Network
from ddltool.errors import DdlToolError, InputError
from ddltool.fixtures.loading import calibration, devices, folder
from ddltool.goodput_model import Goodput
from ddltool.graph import Graph
from ddltool.graph_io import read_graph, write_graph
from ddltool.job import read_job
from ddltool.plan import Enforcement, Plan
from ddltool.profile import read_table, write_profile
from ddltool.units import show_bytes, show_seconds

if TYPE_CHECKING:
    import pandas as pd


MODEL = "zoo:resnet32"
# The example's own transfers are too small for an order to matter; this shipped graph shows a case where it does.
CONTRAST, CONTRAST_DEVICE = "resnet50_v1-training", "K80"
BATCH_SIZES, REPLICAS, REPEATS, SAMPLES = (4, 8, 16, 24), (1, 2), 5, 50
TRAINING_LIMIT_S = 300
REPORTED = (
    *("graph.json", "contrast-graph.json", "profile.csv", "goodput.json", "plan.json", "plan-bsp.json"),
    *("enforce.json", "telemetry.jsonl"),
)


@dataclass
class Findings:
    """What the steps found, filled in as they finish."""

    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)
    graph: Graph = field(init=False)
    comparison: Comparison = field(init=False)
    contrast_graph: Graph = field(init=False)
    contrast: Comparison = field(init=False)
    profile: pd.DataFrame = field(init=False)
    fitted: Goodput = field(init=False)
    capabilities: dict[str, float] = field(init=False)
    plan: Plan = field(init=False)
    baseline: Plan = field(init=False)
    enforcement: Enforcement = field(init=False)
    training: dict[str, Any] = field(init=False)
    telemetry: pd.DataFrame = field(init=False)
    refitted: Goodput = field(init=False)


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for the artifacts.")] = Path(
        "ddltool-demo"
    ),
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Trace, order, profile, fit, plan, enforce a real two-process training run, and report. About a minute."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            str(output), f"cannot be made ({error.strerror})", "give a folder in a writable place"
        ) from None
    found = Findings(folder=output)
    started = time.perf_counter()
    for name, step in STEPS.items():
        with _announced(name, found):
            step(found, seed)
    report = output / "report.html"
    with _announced("report", found):
        _write_report(found, report)
    found.seconds["all"] = time.perf_counter() - started
    if as_json:
        print_json(_result(found, report))
        return
    console = out()
    console.print(table("What each step found", ("step", "finding", "time"), _rows(found), text_columns=2))
    console.print("Predicted: for V100, P100 and T4 (see ddltool predict). Measured: on this machine's CPU.")
    console.print(f"All artifacts are in {output}{os.sep}")
    console.print(f"Report: {report.resolve()}", soft_wrap=True)


@contextlib.contextmanager
def _announced(name: str, found: Findings) -> Iterator[None]:
    """Say on stderr which step runs, with a spinner on a terminal, and keep its time."""
    total = len(STEPS) + 1
    console = err()
    title = f"[{len(found.seconds) + 1}/{total}] {name}"
    started = time.perf_counter()
    if not console.is_terminal:
        console.print(title)
    with progress(title) if name not in ("profile",) else contextlib.nullcontext():
        yield
    found.seconds[name] = time.perf_counter() - started


def _trace(found: Findings, seed: int) -> None:

    found.graph = timed_graph(MODEL, batch_size=8, device="V100")
    found.comparison = compare(found.graph, samples=SAMPLES, seed=seed)
    write_graph(found.graph, found.folder / "graph.json")
    shipped = read_graph(folder() / "graphs" / f"{CONTRAST}.graph.json.gz")
    found.contrast_graph = estimate(shipped, cost_model(devices().device(CONTRAST_DEVICE), calibration()), Network())
    write_graph(found.contrast_graph, found.folder / "contrast-graph.json")
    found.contrast = compare(found.contrast_graph, samples=SAMPLES, seed=seed)
    best = found.comparison
    trace = to_chrome_trace(found.graph, best.timelines["tac"], best.schedules["tac"].priority)
    write_text(found.folder / "timeline.perfetto.json", to_json(trace, indent=None))


def _profile(found: Findings, seed: int) -> None:
    from ddltool.runtime.measuring.campaign import MeasureRequest, campaign, reliability

    request = MeasureRequest(
        source=MODEL,
        resolver=RESOLVER,
        batch_sizes=BATCH_SIZES,
        replicas=REPLICAS,
        repeats=REPEATS,
        seed=seed,
    )
    with progress("measuring", len(BATCH_SIZES) * len(REPLICAS)) as advance:
        found.profile = campaign(request, progress=advance).frame
    write_profile(found.profile, found.folder / "profile.csv")
    for warning in reliability(found.profile):
        note(f"warning: {warning}")


def _fit(found: Findings, seed: int) -> None:
    from ddltool.analyzers.loading.fitted_models import fit_files

    found.fitted = fit_files([found.folder / "profile.csv"], seed)
    save(found.fitted, found.folder / "goodput.json")


def _plan(found: Findings, seed: int) -> None:
    from ddltool.analyzers.deciding.candidates import Settings

    job_file = found.folder / "job.yaml"
    shutil.copyfile(folder() / "demo-job.yaml", job_file)
    job = read_job(job_file)
    found.capabilities = capabilities_of(job, found.folder, str(job_file), note)
    settings = Settings(top_k=3, limit_s=10.0, seed=seed)
    plans = [make_plan(job, found.capabilities, strategy, settings) for strategy in ("est", "bsp")]
    found.plan, found.baseline = (
        made.model_copy(update={"parameters": ordered_parameters(found.graph)}) for made in plans
    )
    save(found.plan, found.folder / "plan.json")
    save(found.baseline, found.folder / "plan-bsp.json")


def _emit(found: Findings, seed: int) -> None:

    found.enforcement = to_enforcement(found.plan, telemetry=str((found.folder / "telemetry.jsonl").resolve()))
    save(found.enforcement, found.folder / "enforce.json")


def _train(found: Findings, seed: int) -> None:

    result = found.folder / "training.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(found.plan.world_size), "-m", "ddltool.commands.demo_train"),
        *(str(found.folder / "enforce.json"), str(result)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    log = found.folder / "training.log"
    with log.open("w", encoding="utf-8") as stream:
        code = _run(command, environment, stream)
    if code != 0:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if "rror" in line]
        raise DdlToolError(
            f"the training run failed with exit code {code} ({lines[0] if lines else 'no message'}); see {log}"
        )
    found.training = read_document(result)
    found.telemetry = read_table(found.folder / "telemetry.jsonl")


def _run(command: list[str], environment: dict[str, str], stream: Any) -> int:
    """Run the launcher; an interruption or a time-out ends it and its ranks before it is passed on."""
    child = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
    try:
        return child.wait(timeout=TRAINING_LIMIT_S)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the launcher and its ranks, which have sessions of their own, so that no group signal reaches them."""
    import psutil

    if child.poll() is not None:
        return
    family = psutil.Process(child.pid).children(recursive=True)
    child.terminate()  # torchrun ends its ranks by itself
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    child.kill()
    child.wait()


def _refit(found: Findings, seed: int) -> None:
    from ddltool.analyzers.loading.fitted_models import fit_files

    found.refitted = fit_files([found.folder / "telemetry.jsonl"], seed)
    save(found.refitted, found.folder / "goodput-telemetry.json")


STEPS = {
    "trace": _trace,
    "profile": _profile,
    "fit": _fit,
    "plan": _plan,
    "emit": _emit,
    "train": _train,
    "fit telemetry": _refit,
}


def _rows(found: Findings) -> list[tuple[str, str, str]]:
    """Return one row per step: name, what it found, seconds."""
    plan, training = found.plan, found.training

    graph = found.graph
    count = (
        f"{len(graph)} ops, {show_bytes(graph.parameter_bytes)}; {coverage(graph).rule_time:.0%} of the time by rule"
    )
    gains = [_gain(graph, found.comparison), _gain(found.contrast_graph, found.contrast)]
    mix = ", ".join(f"{row.device_type} {row.ests_per_device} EST(s)" for row in plan.assignments)
    measured = _measured_steps(found)
    slowest = max(row["step_s"] for row in measured)
    findings = {
        "trace": "\n".join([count, *gains]),
        "profile": f"{len(found.profile)} configurations on this CPU (measured)",
        "fit": f"throughput model, MAPE {found.fitted.mape:.1%} on {found.fitted.samples} measured rows",
        "plan": f"{mix}: {plan.throughput:.4g} mini-batches/s (predicted)\nequal split: {found.baseline.throughput:.4g}",
        "emit": f"enforce.json: {plan.world_size} ranks, local batches "
        + ", ".join(str(rank.local_batch_size) for rank in found.enforcement.ranks),
        "train": f"{len(training['losses'])} steps of {show_seconds(slowest)} on {plan.world_size} processes (measured)\n"
        f"loss {training['losses'][0]:.2f} -> {training['losses'][-1]:.2f}, held-out accuracy {training['accuracy']:.0%}",
        "fit telemetry": f"MAPE {found.refitted.mape:.1%} on {found.refitted.samples} rows (measured)",
        "report": "report.html",
    }
    return [(name, findings[name], f"{found.seconds[name]:.1f} s") for name in findings] + [
        ("all", "", f"{found.seconds['all']:.1f} s")
    ]


def _measured_steps(found: Findings) -> list[dict[str, Any]]:
    """Return per rank the median seconds of each phase, and what the fitted profile predicted for its batch."""
    params = found.fitted.params
    medians = found.telemetry[found.telemetry["step"] >= 3].groupby("rank").median(numeric_only=True)
    seconds = {name: medians[name].to_dict() for name in ("compute_s", "wait_s", "sync_s", "step_s")}
    return [
        {
            "rank": rank.rank,
            "device_type": rank.device_type,
            "batch": rank.local_batch_size,
            **{name: float(by_rank[rank.rank]) for name, by_rank in seconds.items()},
            "predicted_s": float(iteration_time_s(params, 1, found.plan.world_size, rank.local_batch_size)),
        }
        for rank in found.enforcement.ranks
    ]


def _result(found: Findings, report: Path) -> dict[str, Any]:
    """Return the demo's JSON document (kind ``ddltool.demo``): its parts are results and artifacts of their own kinds."""
    trace = trace_result(found.graph, found.comparison).model_dump(mode="json")
    return {
        "kind": "ddltool.demo",
        "schema_version": 1,
        "trace": {name: trace[name] for name in ("graph", "bounds", "verdict", "coverage")},
        "fit": found.fitted.model_dump(mode="json"),
        "plan": found.plan.model_dump(mode="json", exclude={"parameters"}),
        "baseline": found.baseline.model_dump(mode="json", exclude={"parameters"}),
        "training": {**found.training, "ranks": _measured_steps(found)},
        "fit_telemetry": found.refitted.model_dump(mode="json"),
        "seconds": found.seconds,
        "report": str(report),
    }


def _write_report(found: Findings, path: Path) -> None:
    """Write the report of what the steps have written."""
    _, sections = build([read_any(found.folder / name) for name in REPORTED])
    losses = found.training["losses"]
    summary = [
        f"{found.graph.name}, planned for a mixed V100, P100 and T4 job, trained on this machine's CPU; {CONTRAST} on a "
        f"{CONTRAST_DEVICE} is there to show a case where the order of transfers matters.",
        f"{len(losses)} steps of real training on scikit-learn's digits in {found.plan.world_size} processes with the hook: "
        f"loss {losses[0]:.2f} to {losses[-1]:.2f}, held-out accuracy {found.training['accuracy']:.0%}. Both ranks ran on "
        "this machine's equally fast cores while the plan is for unequal devices, so the rank with the smaller batch waits "
        "here; on the planned devices it would not.",
        "Predicted: computed from datasheet figures or from a fitted model. Simulated: played through on the traced graph. "
        "Measured: by a clock, here.",
    ]
    write_text(path, render("ddltool demo", sections, summary=summary, generated_by=f"ddltool {__version__}"))


def _gain(graph: Graph, comparison: Comparison) -> str:
    """Return what an order gains on one graph, for the table."""
    times = f"{' -> '.join(show_seconds(comparison.schedules[name].makespan_s) for name in ('random', 'tac'))}"
    return f"{graph.name}, {graph.meta.get('device')}: TAC {times} ({comparison.gain:.1%}, simulated)"
