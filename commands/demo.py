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

from ddltool.commands.options import Json, Seed

if TYPE_CHECKING:
    import pandas as pd

    from ddltool.analyzers.communication.efficiency import Comparison
    from ddltool.goodput_model import Goodput
    from ddltool.graph import Graph
    from ddltool.plan import Enforcement, Plan

MODEL = "zoo:resnet32"
# The example's own transfers are too small for an order to matter; this shipped graph shows a case where it does.
CONTRAST, CONTRAST_DEVICE = "resnet50_v1-training", "K80"
BATCH_SIZES, REPLICAS, REPEATS, SAMPLES = (4, 8, 16, 24), (1, 2), 5, 50
TRAINING_LIMIT_S = 300


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
    from ddltool.commands.demo_report import document, rows, write_report
    from ddltool.commands.output import out, print_json, table
    from ddltool.errors import InputError

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
        write_report(found, report)
    found.seconds["all"] = time.perf_counter() - started
    if as_json:
        print_json(document(found, report))
        return
    console = out()
    console.print(table("What each step found", ("step", "finding", "time"), rows(found), text_columns=2))
    console.print("Predicted: for V100, P100 and T4 (see ddltool predict). Measured: on this machine's CPU.")
    console.print(f"All artifacts are in {output}{os.sep}")
    console.print(f"Report: {report.resolve()}", soft_wrap=True)


@contextlib.contextmanager
def _announced(name: str, found: Findings) -> Iterator[None]:
    """Say on stderr which step runs, with a spinner on a terminal, and keep its time."""
    from ddltool.commands.output import err, progress

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
    from ddltool.analyzers.communication.efficiency import compare
    from ddltool.analyzers.communication.perfetto import to_chrome_trace
    from ddltool.analyzers.costs.estimate import estimate
    from ddltool.analyzers.costs.model import cost_model
    from ddltool.analyzers.loading.timed_graph import timed_graph
    from ddltool.artifacts import to_json, write_text
    from ddltool.device import Network
    from ddltool.fixtures.loading import calibration, devices, folder
    from ddltool.graph_io import read_graph, write_graph

    found.graph = timed_graph(MODEL, batch_size=8, device="V100")
    found.comparison = compare(found.graph, samples=SAMPLES, seed=seed)
    write_graph(found.graph, found.folder / "graph.json")
    shipped = read_graph(folder() / "graphs" / f"{CONTRAST}.graph.json.gz")
    found.contrast_graph = estimate(shipped, cost_model(devices().device(CONTRAST_DEVICE), calibration()), Network())
    found.contrast = compare(found.contrast_graph, samples=SAMPLES, seed=seed)
    best = found.comparison.tac
    trace = to_chrome_trace(found.graph, best.timeline, best.schedule.priority if best.schedule else None)
    write_text(found.folder / "timeline.perfetto.json", to_json(trace, indent=None))


def _profile(found: Findings, seed: int) -> None:
    from ddltool.commands.output import note
    from ddltool.commands.profile_measure import RESOLVER, measure_with_progress
    from ddltool.profile import write_profile
    from ddltool.runtime.measuring.campaign import MeasureRequest, reliability

    request = MeasureRequest(
        source=MODEL,
        resolver=RESOLVER,
        batch_sizes=BATCH_SIZES,
        replicas=REPLICAS,
        repeats=REPEATS,
        seed=seed,
    )
    found.profile = measure_with_progress(request)
    write_profile(found.profile, found.folder / "profile.csv")
    for warning in reliability(found.profile):
        note(f"warning: {warning}")


def _fit(found: Findings, seed: int) -> None:
    from ddltool.artifacts import save
    from ddltool.commands.fit import fit_files

    found.fitted = fit_files([found.folder / "profile.csv"], seed)
    save(found.fitted, found.folder / "goodput.json")


def _plan(found: Findings, seed: int) -> None:
    from ddltool.analyzers.deciding.candidates import Settings
    from ddltool.artifacts import save
    from ddltool.commands.plan_input import capabilities_of, ordered_parameters
    from ddltool.commands.plan_solve import make_plan
    from ddltool.fixtures.loading import folder
    from ddltool.job import read_job

    job_file = found.folder / "job.yaml"
    shutil.copyfile(folder() / "demo-job.yaml", job_file)
    job = read_job(job_file)
    found.capabilities = capabilities_of(job, found.folder, str(job_file))
    settings = Settings(top_k=3, limit_s=10.0, seed=seed)
    plans = [make_plan(job, found.capabilities, strategy, settings) for strategy in ("est", "bsp")]
    found.plan, found.baseline = (
        made.model_copy(update={"parameters": ordered_parameters(found.graph)}) for made in plans
    )
    save(found.plan, found.folder / "plan.json")
    save(found.baseline, found.folder / "plan-bsp.json")


def _emit(found: Findings, seed: int) -> None:
    from ddltool.analyzers.placement.enforcement import to_enforcement
    from ddltool.artifacts import save

    found.enforcement = to_enforcement(found.plan, telemetry=str((found.folder / "telemetry.jsonl").resolve()))
    save(found.enforcement, found.folder / "enforce.json")


def _train(found: Findings, seed: int) -> None:
    from ddltool.artifacts import read_document
    from ddltool.errors import DdlToolError
    from ddltool.profile import read_table

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
    from ddltool.artifacts import save
    from ddltool.commands.fit import fit_files

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
