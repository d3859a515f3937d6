"""``ddltool demo``: the whole way on one built-in example, from a model to a measured, enforced training run."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddltool.analyzers.communication.result import trace
from ddltool.analyzers.deciding.candidates import Settings
from ddltool.analyzers.deciding.planning import make_plan, parameters_of
from ddltool.analyzers.emitting.enforcement import to_enforcement
from ddltool.analyzers.goodput.observations import WARMUP_STEPS
from ddltool.analyzers.goodput.throughput import iteration_time_s
from ddltool.analyzers.loading.fitted_models import fit
from ddltool.analyzers.loading.job_inputs import capabilities_of
from ddltool.artifacts import load, make_folder, read_document, save, write_text
from ddltool.commands.options import Seed
from ddltool.commands.output import err, note, out, print_json, progress, say, table
from ddltool.errors import DdlToolError
from ddltool.fixtures.loading import folder
from ddltool.goodput_model import Goodput
from ddltool.graph import read_graph
from ddltool.graph_results import TraceResult
from ddltool.job import read_job
from ddltool.plans import Enforcement, Plan
from ddltool.runtime.measuring.overhead import finish
from ddltool.tables import read_table
from ddltool.units import show_bytes, show_seconds

MODEL = "zoo:resnet32"
# The example's own transfers are too small for an order to matter; this shipped graph shows a case where it does.
CONTRAST, CONTRAST_DEVICE = "resnet50_v1-training", "K80"
BATCH_SIZES, REPLICAS, REPEATS, SAMPLES = (4, 8, 16, 24), (1, 2), 5, 50
TRAINING_LIMIT_S = 300
REPORTED = (
    *("graph.json", "contrast-graph.json", "profile.csv", "goodput.json", "plan.json", "plan-bsp.json"),
    *("enforce.json", "telemetry.jsonl"),
)
Finding = tuple[str, dict[str, Any]]
"""What a step found in words, and its part of the JSON document; all else stands in the folder's files."""


def demo(
    output: Path = Path("ddltool-demo"),
    seed: Seed = 0,
    as_json: bool = False,
) -> None:
    """Trace, order, profile, fit, plan, enforce a real two-process training run, and report. About a minute."""
    for package in ("altair", "vl_convert", "sklearn"):  # of the last steps: told before the first
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(name=package)
    make_folder(output)
    rows: list[tuple[str, str, str]] = []
    document: dict[str, Any] = {"kind": "ddltool.demo", "schema_version": 1}
    started = time.perf_counter()
    for name, step in STEPS.items():
        since = time.perf_counter()
        with _announced(f"[{len(rows) + 1}/{len(STEPS)}] {name}", spinner=name != "profile"):
            words, part = step(output, seed)
        document |= part
        rows.append((name, words, f"{time.perf_counter() - since:.1f} s"))
        document.setdefault("seconds", {})[name] = time.perf_counter() - since
    document["seconds"]["all"] = time.perf_counter() - started
    if as_json:
        print_json(document)
        return
    rows.append(("all", "", f"{document['seconds']['all']:.1f} s"))
    console = out()
    console.print(table("What each step found", ("step", "finding", "time"), rows, text_columns=2))
    console.print("Predicted: for V100, P100 and T4 (see ddltool predict). Measured: on this machine's CPU.")
    console.print(f"All artifacts are in {output}{os.sep}")
    say(f"Report: {Path(document['report']).resolve()}")


@contextlib.contextmanager
def _announced(title: str, *, spinner: bool) -> Iterator[None]:
    """Say on stderr which step runs, with a spinner on a terminal."""
    console = err()
    if not console.is_terminal:
        console.print(title)
    with progress(title) if spinner and console.is_terminal else contextlib.nullcontext():
        yield


def _trace(place: Path, seed: int) -> Finding:
    shipped = folder() / "graphs" / f"{CONTRAST}.graph.json.gz"
    runs: dict[str, Any] = {"samples": SAMPLES, "seed": seed, "tell": note}
    timeline: dict[str, Any] = {"output": place / "graph.json", "perfetto": place / "timeline.perfetto.json"}
    found = trace(MODEL, batch_size=8, device="V100", **timeline, **runs)
    again: dict[str, Any] = {"device": CONTRAST_DEVICE, "oracle": "roofline", "output": place / "contrast-graph.json"}
    other = trace(shipped, **again, **runs)
    known = found.coverage.rule_time if found.coverage is not None else 0.0
    words = f"{found.graph.ops} ops, {show_bytes(found.graph.parameter_bytes)}; {known:.0%} of the time by rule"
    made = found.model_dump(mode="json")
    part = {name: made[name] for name in ("graph", "bounds", "verdict", "coverage")}
    return "\n".join([words, _gain(found), _gain(other)]), {"trace": part}


def _profile(place: Path, seed: int) -> Finding:
    from ddltool.runtime.measuring.profiling import profile

    found = profile(
        MODEL,
        batch_sizes=BATCH_SIZES,
        replicas=REPLICAS,
        repeats=REPEATS,
        output=place / "profile.csv",
        seed=seed,
        tell=note,
        stage=progress,
    )
    return f"{len(found.rows)} configurations on this CPU (measured)", {}


def _fit(place: Path, seed: int) -> Finding:
    found = fit(place / "profile.csv", seed=seed)
    save(found, place / "goodput.json")
    words = f"throughput model, MAPE {found.mape:.1%} on {found.samples} measured rows"
    return words, {"fit": found.model_dump(mode="json")}


def _plan(place: Path, seed: int) -> Finding:
    job_file = place / "job.yaml"
    shutil.copyfile(folder() / "demo-job.yaml", job_file)
    job = read_job(job_file)
    capabilities = capabilities_of(job, place, str(job_file), note)
    parameters = parameters_of(read_graph(place / "graph.json"))
    settings = Settings(top_k=3, limit_s=10.0, seed=seed)
    est, bsp = (
        make_plan(job, capabilities, strategy, settings).model_copy(update={"parameters": parameters})
        for strategy in ("est", "bsp")
    )
    save(est, place / "plan.json")
    save(bsp, place / "plan-bsp.json")
    mix = ", ".join(f"{row.device_type} {row.ests_per_device} EST(s)" for row in est.assignments)
    words = f"{mix}: {est.throughput:.4g} mini-batches/s (predicted)\nequal split: {bsp.throughput:.4g}"
    plans = {"plan": est, "baseline": bsp}
    return words, {name: made.model_dump(mode="json", exclude={"parameters"}) for name, made in plans.items()}


def _emit(place: Path, seed: int) -> Finding:
    rows = place / "telemetry.jsonl"
    rows.unlink(missing_ok=True)  # of an earlier demo in this folder
    made = to_enforcement(load(place / "plan.json", Plan), telemetry=str(rows.resolve()))
    save(made, place / "enforce.json")
    sizes = ", ".join(str(rank.local_batch_size) for rank in made.ranks)
    return f"enforce.json: {made.world_size} ranks, local batches {sizes}", {}


def _train(place: Path, seed: int) -> Finding:
    made, result, log = load(place / "enforce.json", Enforcement), place / "training.json", place / "training.log"
    command = ["-m", "ddltool.commands.demo_train", str(place / "enforce.json"), str(result)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    code, said = finish(command, made.world_size, environment, "the training run", TRAINING_LIMIT_S)
    write_text(log, said)
    if code != 0:
        lines = [line for line in said.splitlines() if "rror" in line]
        raise DdlToolError(
            f"the training run failed with exit code {code} ({lines[0] if lines else 'no message'}); see {log}"
        )
    ranks, training = _measured_steps(place, made), read_document(result)
    slowest = show_seconds(max(row["step_s"] for row in ranks))
    words = (
        f"{len(training['losses'])} steps of {slowest} on {made.world_size} processes (measured)\n{_learned(training)}"
    )
    return words, {"training": {**training, "ranks": ranks}}


def _measured_steps(place: Path, made: Enforcement) -> list[dict[str, Any]]:
    """Return per rank the median seconds of each phase, and what the fitted profile predicted for its batch."""
    params = load(place / "goodput.json", Goodput).params
    telemetry = read_table(place / "telemetry.jsonl")
    medians = telemetry[telemetry["step"] >= WARMUP_STEPS].groupby("rank").median(numeric_only=True)
    return [
        {
            "rank": rank.rank,
            "device_type": rank.device_type,
            "batch": rank.local_batch_size,
            **{name: float(medians[name][rank.rank]) for name in ("compute_s", "wait_s", "sync_s", "step_s")},
            "predicted_s": float(iteration_time_s(params, 1, made.world_size, rank.local_batch_size)),
        }
        for rank in made.ranks
    ]


def _learned(training: dict[str, Any]) -> str:
    losses = training["losses"]
    return f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, held-out accuracy {training['accuracy']:.0%}"


def _refit(place: Path, seed: int) -> Finding:
    found = fit(place / "telemetry.jsonl", seed=seed)
    save(found, place / "goodput-telemetry.json")
    words = f"MAPE {found.mape:.1%} on {found.samples} rows (measured)"
    return words, {"fit_telemetry": found.model_dump(mode="json")}


def _report(place: Path, seed: int) -> Finding:
    """Write the report of what the steps have written."""
    training = read_document(place / "training.json")
    summary = [
        f"{MODEL.removeprefix('zoo:')}, planned for a mixed V100, P100 and T4 job, trained on this machine's CPU; "
        f"{CONTRAST} on a {CONTRAST_DEVICE} is there to show a case where the order of transfers matters.",
        f"{len(training['losses'])} steps of real training on scikit-learn's digits with the hook: {_learned(training)}. "
        "Both ranks ran on this machine's equally fast cores while the plan is for unequal devices, so the rank with the "
        "smaller batch waits here; on the planned devices it would not.",
    ]
    path = place / "report.html"
    from ddltool.analyzers.reporting.report import report  # it loads the plotting library

    report([place / name for name in REPORTED], path, title="ddltool demo", summary=summary, stage=progress)
    return path.name, {"report": str(path)}


STEPS = {
    "trace": _trace,
    "profile": _profile,
    "fit": _fit,
    "plan": _plan,
    "emit": _emit,
    "train": _train,
    "fit telemetry": _refit,
    "report": _report,
}


def _gain(found: TraceResult) -> str:
    """Return what an order gains on one graph, for the table."""
    chance, ordered = (found.schedules[name].makespan_s for name in ("random", "tac"))
    times = f"{show_seconds(chance)} -> {show_seconds(ordered)}"
    return f"{found.graph.name}, {found.graph.device}: TAC {times} ({1 - ordered / chance:.1%}, simulated)"
