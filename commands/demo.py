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

from ddltool.analyzers.answers.emitting.enforcement import to_enforcement
from ddltool.analyzers.job.goodput.throughput import iteration_time_s
from ddltool.analyzers.job.planning.job_inputs import capabilities_of
from ddltool.analyzers.job.planning.options import PlanOptions
from ddltool.analyzers.job.planning.planning import make_plan, parameters_of
from ddltool.artifacts import load, make_folder, read_document, save, write_text
from ddltool.commands.fit import fit
from ddltool.commands.options import Seed
from ddltool.commands.output import err, note, out, print_json, progress, say, table
from ddltool.commands.trace import trace
from ddltool.errors import DdlToolError
from ddltool.goodput_model import Goodput
from ddltool.graph import read_graph
from ddltool.graph_results import TraceResult
from ddltool.job import read_job
from ddltool.plans import Enforcement, Plan
from ddltool.runtime.measuring.overhead import run_script
from ddltool.shipped import folder
from ddltool.tables import read_table
from ddltool.telemetry import WARMUP_STEPS
from ddltool.units import show_bytes, show_seconds

MODEL = "zoo:resnet32"
# The order of resnet32's small transfers hardly matters; in this shipped graph it does.
CONTRAST, CONTRAST_DEVICE = "resnet50_v1-training", "K80"
BATCH_SIZES, REPLICAS, REPEATS, SAMPLES = (4, 8, 16, 24), (1, 2), 5, 50
TRAINING_LIMIT_S = 300
# The files in the report.
REPORTED = (
    *("graph.json", "contrast-graph.json", "profile.csv", "goodput.json", "plan.json", "plan-bsp.json"),
    *("enforce.json", "telemetry.jsonl"),
)
Finding = tuple[str, dict[str, Any]]
"""(sentence for the table, fields for the JSON document) of a step; later steps read the files that it wrote."""


def demo(output: Path = Path("ddltool-demo"), seed: Seed = 0, as_json: bool = False) -> None:
    """Trace, order, profile, fit, plan, enforce a real two-process training run, and report. About a minute.

    ``output``: the folder of all artifacts. Each step reads the files of the steps before it. Raises ModuleNotFoundError,
    before the first step, for a package that a later one needs.
    """
    # The last steps need these packages: a missing one is an error before the first step.
    for package in ("altair", "vl_convert", "sklearn"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(name=package)
    make_folder(output)
    rows: list[tuple[str, str, str]] = []
    document: dict[str, Any] = {"kind": "ddltool.demo", "schema_version": 1}
    demo_began = time.perf_counter()
    for name, step in STEPS.items():
        step_began = time.perf_counter()
        with _announce_step(f"[{len(rows) + 1}/{len(STEPS)}] {name}", spinner=name != "profile"):
            finding, document_part = step(output, seed)
        document |= document_part
        rows.append((name, finding, f"{time.perf_counter() - step_began:.1f} s"))
        document.setdefault("seconds", {})[name] = time.perf_counter() - step_began
    document["seconds"]["all"] = time.perf_counter() - demo_began
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
def _announce_step(title: str, *, spinner: bool) -> Iterator[None]:
    """Show on stderr that the ``with`` block, a step of the demo, runs: by its title, or on a terminal by a spinner.

    ``spinner``: False for a step that shows its own progress on a terminal, where nothing is printed then.
    """
    console = err()
    if not console.is_terminal:
        console.print(title)
    with progress(title) if spinner and console.is_terminal else contextlib.nullcontext():
        yield


def _trace(output: Path, seed: int) -> Finding:
    """Trace the zoo model and a shipped graph, write their files, and return the simulated gain of TAC's order on each.

    TAC is the order of transfers of the TicTac paper that uses the ops' times.
    """
    shipped = folder() / "graphs" / f"{CONTRAST}.graph.json.gz"
    sampling: dict[str, Any] = {"samples": SAMPLES, "seed": seed, "tell": note}
    outputs: dict[str, Any] = {"output": output / "graph.json", "perfetto": output / "timeline.perfetto.json"}
    zoo_result = trace(MODEL, batch_size=8, device="V100", **outputs, **sampling)
    contrast_file = output / "contrast-graph.json"
    contrast_result = trace(shipped, device=CONTRAST_DEVICE, oracle="roofline", output=contrast_file, **sampling)
    by_rule = zoo_result.coverage.rule_time if zoo_result.coverage is not None else 0.0
    sentence = (
        f"{zoo_result.graph.ops} ops, {show_bytes(zoo_result.graph.parameter_bytes)}; {by_rule:.0%} of the time by rule"
    )
    fields = zoo_result.model_dump(mode="json")
    part = {name: fields[name] for name in ("graph", "bounds", "verdict", "coverage")}
    return "\n".join([sentence, _order_gain(zoo_result), _order_gain(contrast_result)]), {"trace": part}


def _profile(output: Path, seed: int) -> Finding:
    """Measure step times on this CPU and write profile.csv; return the number of configurations."""
    from ddltool.commands.profile import profile

    profiled = profile(
        MODEL,
        batch_sizes=BATCH_SIZES,
        replicas=REPLICAS,
        repeats=REPEATS,
        output=output / "profile.csv",
        seed=seed,
        tell=note,
        stage=progress,
    )
    return f"{len(profiled.rows)} configurations on this CPU (measured)", {}


def _fit(output: Path, seed: int) -> Finding:
    """Fit the throughput model to the profile and write goodput.json; return the fit's error."""
    fitted = fit(output / "profile.csv", seed=seed)
    save(fitted, output / "goodput.json")
    finding = f"throughput model, MAPE {fitted.mape:.1%} on {fitted.samples} measured rows"
    return finding, {"fit": fitted.model_dump(mode="json")}


def _plan(output: Path, seed: int) -> Finding:
    """Write job.yaml, plan.json and plan-bsp.json, the plan of an equal split; return the throughput of both plans."""
    job_file = output / "job.yaml"
    shutil.copyfile(folder() / "demo-job.yaml", job_file)
    job = read_job(job_file)
    capabilities = capabilities_of(job, output, str(job_file), note)
    parameters = parameters_of(read_graph(output / "graph.json"))
    options = PlanOptions(top_k=3, limit_s=10.0, seed=seed)
    est_plan, bsp_plan = (
        make_plan(job, capabilities, strategy, options).model_copy(update={"parameters": parameters})
        for strategy in ("est", "bsp")
    )
    save(est_plan, output / "plan.json")
    save(bsp_plan, output / "plan-bsp.json")
    mix = ", ".join(f"{row.device_type} {row.ests_per_device} EST(s)" for row in est_plan.assignments)
    finding = f"{mix}: {est_plan.throughput:.4g} mini-batches/s (predicted)\nequal split: {bsp_plan.throughput:.4g}"
    plans = {"plan": est_plan, "baseline": bsp_plan}
    return finding, {name: plan.model_dump(mode="json", exclude={"parameters"}) for name, plan in plans.items()}


def _emit(output: Path, seed: int) -> Finding:
    """Write enforce.json, the hook's configuration for the plan; return its local batches. Deletes old telemetry."""
    telemetry_file = output / "telemetry.jsonl"
    telemetry_file.unlink(missing_ok=True)  # the hook would append to the rows of an earlier demo
    enforcement = to_enforcement(load(output / "plan.json", Plan), telemetry=str(telemetry_file.resolve()))
    save(enforcement, output / "enforce.json")
    sizes = ", ".join(str(rank.local_batch_size) for rank in enforcement.ranks)
    return f"enforce.json: {enforcement.world_size} ranks, local batches {sizes}", {}


def _train(output: Path, seed: int) -> Finding:
    """Train with enforce.json in separate processes; return the loss, and the times of each rank's steps.

    Writes telemetry.jsonl, training.json and training.log. Raises DdlToolError if the training fails.
    """
    enforcement = load(output / "enforce.json", Enforcement)
    result_file, log_file = output / "training.json", output / "training.log"
    command = ["-m", "ddltool.commands.demo_train", str(output / "enforce.json"), str(result_file)]
    # One thread each, as the processes share the cores; gloo over the loopback, as there may be no network.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    code, script_output = run_script(command, enforcement.world_size, environment, "the training run", TRAINING_LIMIT_S)
    write_text(log_file, script_output)
    if code != 0:
        error_lines = [line for line in script_output.splitlines() if "rror" in line]  # Error, error
        message = error_lines[0] if error_lines else "no message"  # the first one is the cause
        raise DdlToolError(f"the training run failed with exit code {code} ({message}); see {log_file}")
    ranks = _measured_steps(output, enforcement)
    training = read_document(result_file)
    slowest = show_seconds(max(row["step_s"] for row in ranks))
    steps = f"{len(training['losses'])} steps of {slowest} on {enforcement.world_size} processes (measured)"
    finding = f"{steps}\n{_outcome(training)}"
    return finding, {"training": {**training, "ranks": ranks}}


def _measured_steps(output: Path, enforcement: Enforcement) -> list[dict[str, Any]]:
    """Return for each rank its device, batch, median seconds of each phase of a step, and the step time that the fit predicts.

    They are read from the telemetry and goodput.json in the folder ``output``; the first steps, which warm up, are left out.
    """
    params = load(output / "goodput.json", Goodput).params
    telemetry = read_table(output / "telemetry.jsonl")
    medians = telemetry[telemetry["step"] >= WARMUP_STEPS].groupby("rank").median(numeric_only=True)
    return [
        {
            "rank": rank.rank,
            "device_type": rank.device_type,
            "batch": rank.local_batch_size,
            **{name: float(medians[name][rank.rank]) for name in ("compute_s", "wait_s", "sync_s", "step_s")},
            "predicted_s": float(iteration_time_s(params, 1, enforcement.world_size, rank.local_batch_size)),
        }
        for rank in enforcement.ranks
    ]


def _outcome(training: dict[str, Any]) -> str:
    """Return the first and last loss, and the accuracy on held-out samples, in words."""
    losses = training["losses"]
    return f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, held-out accuracy {training['accuracy']:.0%}"


def _refit(output: Path, seed: int) -> Finding:
    """Fit the throughput model to the telemetry of the training, write goodput-telemetry.json; return the fit's error."""
    fitted = fit(output / "telemetry.jsonl", seed=seed)
    save(fitted, output / "goodput-telemetry.json")
    finding = f"MAPE {fitted.mape:.1%} on {fitted.samples} rows (measured)"
    return finding, {"fit_telemetry": fitted.model_dump(mode="json")}


def _report(output: Path, seed: int) -> Finding:
    """Write report.html about the files of the earlier steps; return its name."""
    training = read_document(output / "training.json")
    summary = [
        f"{MODEL.removeprefix('zoo:')}, planned for a mixed V100, P100 and T4 job, trained on this machine's CPU; "
        f"{CONTRAST} on a {CONTRAST_DEVICE} is there to show a case where the order of transfers matters.",
        f"{len(training['losses'])} steps of real training on scikit-learn's digits with the hook: {_outcome(training)}. "
        "Both ranks ran on this machine's equally fast cores while the plan is for unequal devices, so the rank with the "
        "smaller batch waits here; on the planned devices it would not.",
    ]
    report_file = output / "report.html"
    from ddltool.commands.report import report  # it loads the plotting library

    # The report orders and names its sections by the files' kinds.
    report([output / name for name in REPORTED], report_file, title="ddltool demo", summary=summary, stage=progress)
    return report_file.name, {"report": str(report_file)}


# The steps in order; each is called with (folder of artifacts, seed).
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


def _order_gain(trace_result: TraceResult) -> str:
    """Return in words a graph's simulated step in random order and in TAC's order of transfers, and the relative gain.

    TAC is the order of the TicTac paper that uses the ops' times.
    """
    random_s, tac_s = (trace_result.schedules[name].makespan_s for name in ("random", "tac"))
    times = f"{show_seconds(random_s)} -> {show_seconds(tac_s)}"
    return (
        f"{trace_result.graph.name}, {trace_result.graph.device}: TAC {times} ({1 - tac_s / random_s:.1%}, simulated)"
    )
