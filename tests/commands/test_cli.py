"""The command line's contract: keys, exit codes, one line per error, nothing half written."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
from rich.console import Console

import ddltool
from ddltool.commands import output
from ddltool.commands.main import COMMANDS, MOVED, load, run
from ddltool.goodput_model import ThroughputParams
from ddltool.profiles import read_profile
from tests.conftest import Cli

GRAPH = {
    "kind": "ddltool.graph",
    "schema_version": 1,
    "name": "g",
    "mode": "training",
    "ops": [
        {"name": "r", "kind": "recv", "resource": "channel:0", "duration_s": 1.0, "size_bytes": 8, "parameter": "w"},
        {"name": "c", "kind": "compute", "resource": "compute:0", "duration_s": 2.0, "inputs": ["r"]},
    ],
}
JOB = """
name: mixed
max_workers: 8
batch_size: 4
devices:
  - {type: V100, count: 4, capability_per_s: 3.1, memory_gib: 16, price_per_hour: 2.0}
  - {type: T4, count: 4, capability_per_s: 1.0, memory_gib: 16, price_per_hour: 0.5}
"""
HEADER = "device,num_nodes,num_replicas,local_batch_size,step_time_s,sync_time_s"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH))
    (tmp_path / "job.yaml").write_text(JOB)
    rows = [f"{HEADER},peak_memory_bytes"]
    rows += [
        f"cpu,1,{k},{m},{0.01 + 0.002 * m + 0.01 * (k > 1)},{0.01 * (k > 1)},{1e6}" for k in (1, 2) for m in (4, 8, 16)
    ]
    (tmp_path / "profile.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def test_trace_json(cli: Cli, folder: Path) -> None:
    result = cli(
        "trace", "zoo:cifarnet", "--batch-size", 4, "--samples", 5, "-o", folder / "out.json.gz", "--json"
    ).done()
    document = result.document
    assert set(document["graph"]) >= {"name", "mode", "parameters", "parameter_bytes", "ops", "recvs", "sends"}
    assert document["graph"]["mode"] == "training"
    assert document["graph"]["recvs"] == document["graph"]["sends"] == document["graph"]["parameters"] == 10
    assert document["graph"]["parameter_bytes"] == 4 * 1_756_426
    assert set(document["bounds"]) == {"upper_s", "lower_s", "speedup", "best_lower_s"}
    for name in ("tic", "tac", "random"):
        schedule = document["schedules"][name]
        assert document["bounds"]["lower_s"] <= schedule["makespan_s"] <= document["bounds"]["upper_s"]
        assert 0 <= schedule["efficiency"] <= 1
    assert sorted(document["schedules"]["tac"]["order"]) == sorted(document["schedules"]["tic"]["order"])
    assert document["schedules"]["random"]["order"] is None
    assert document["verdict"]["text"]
    again = cli("trace", folder / "out.json.gz", "--samples", 5, "--json").document
    assert again["schedules"] == document["schedules"]


def test_trace_uses_a_files_times_unless_told_otherwise(cli: Cli, folder: Path) -> None:
    kept = cli("trace", folder / "graph.json", "--json").document
    assert kept["bounds"] == {"upper_s": 3.0, "lower_s": 2.0, "speedup": 0.5, "best_lower_s": 3.0}
    assert kept["schedules"]["tac"]["efficiency"] == 0.0
    timed = cli(
        "trace", folder / "graph.json", "--oracle", "roofline", "--latency", "1s", "--bandwidth", "8bit", "--json"
    ).document
    assert timed["bounds"]["upper_s"] == pytest.approx(9.0, abs=1e-3)  # latency, and eight bytes at one byte a second


def test_trace_for_people_and_perfetto(cli: Cli, folder: Path) -> None:
    result = cli("trace", folder / "graph.json", "--perfetto", folder / "trace.json").done()
    assert all(len(line) <= 80 for line in result.out.splitlines() if not line.startswith("wrote"))
    shipped = Path(__file__).parents[2] / "fixtures" / "graphs" / "resnet32-training.graph.json.gz"
    for setting, first in (("ddp", "DDP's default"), ("fsdp2", "FSDP2"), ("servers", "Parameter servers: ")):
        out = cli("trace", shipped, "--oracle", "roofline", "--samples", 2, "--setting", setting).out
        assert out.startswith(first)
        # 1.8 MiB of parameters: of sharding there is no more than a sentence, unless it is asked for.
        assert ("FSDP2 has little to save" in out) == ("FSDP2 default" not in out) == (setting != "fsdp2")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {"r", "c"}


def test_profile_fit_plan_emit(cli: Cli, folder: Path) -> None:
    fitted = cli(
        "fit", folder / "profile.csv", "--holdout", folder / "profile.csv", "-o", folder / "goodput.json", "--json"
    )
    assert fitted.document["params"].keys() == ThroughputParams.model_fields.keys()
    assert fitted.document["mape"] < 0.01
    assert fitted.document["holdout"]["samples"] == fitted.document["samples"] == 6
    assert json.loads((folder / "goodput.json").read_text()) == fitted.document
    assert "Fitted to" in cli("fit", folder / "profile.csv").out
    planned = cli(
        *("plan", folder / "job.yaml", "--strategy", "est"),
        *("--graph", folder / "graph.json", "-o", folder / "plan.json", "--json"),
    ).document
    assert planned["throughput"] == pytest.approx(12.4)
    assert planned["status"] == "optimal"
    assert planned["parameters"] == [{"name": "w", "size_bytes": 8, "priority": 0}]
    assert {"iteration_s", "est_count", "waste", "overload_factor", "gap", "solve_seconds", "alternatives"} <= set(
        planned
    )
    assert set(planned["assignments"][0]) >= {"device_type", "devices", "ests_per_device", "local_batch_size"}
    assert "V100" in cli("plan", folder / "job.yaml", "--top-k", 3).out
    assert cli("plan", folder / "job.yaml", "--strategy", "bsp", "--json").document["throughput"] == pytest.approx(8.0)
    emitted = cli("emit", folder / "plan.json", "-o", folder / "enforce.json", "--telemetry", "none", "--json").document
    assert emitted["paths"] == [str(folder / "enforce.json")]
    enforcement = json.loads((folder / "enforce.json").read_text())
    assert [rank["local_batch_size"] for rank in enforcement["ranks"]] == [8, 8, 8, 8]
    assert enforcement["telemetry"] is None


def test_profile_command(cli: Cli, folder: Path) -> None:
    options = ("--batch-sizes", "2,1", "--repeats", 2, "--warmup", 0, "-o", folder / "p.csv", "--json")
    result = cli("profile", "zoo:cifarnet", *options).done()
    assert [row["local_batch_size"] for row in result.document["rows"]] == [1, 2]
    assert set(result.document["devices"]["cpu"]) >= {"saturation_batch", "memory_limit_batch", "launch_overhead_s"}
    assert len(read_profile(folder / "p.csv")) == 2
    assert (folder / "p.csv").read_text().startswith(f"{HEADER},peak")
    assert "fewer than 3 repeats" in result.err.replace("\n", " ")


def test_capability_from_a_profile_and_from_the_model(cli: Cli, folder: Path) -> None:
    text = JOB.replace("capability_per_s: 3.1", "profile: profile.csv")
    (folder / "job.yaml").write_text(text)
    planned = cli("plan", folder / "job.yaml", "--json").document
    assert planned["throughput"] == pytest.approx(8 / (2 * (0.01 + 0.002 * 4)))  # 4 V100 with two workers each
    (folder / "job.yaml").write_text(
        JOB.replace(", capability_per_s: 1.0", "").replace("name: mixed", "name: m\nmodel: zoo:cifarnet")
    )
    result = cli("plan", folder / "job.yaml", "--json").done()
    assert "predicted capabilities (zoo:cifarnet; fp32: 16 bytes a parameter with adam): T4" in result.err
    (folder / "job.yaml").write_text(JOB.replace(", capability_per_s: 1.0", ""))
    assert "T4 has neither capability_per_s nor profile" in cli("plan", folder / "job.yaml").error_line


def changed(folder: Path, **changes: object) -> Path:
    """Write the graph with its second op changed."""
    ops = [GRAPH["ops"][0], {**GRAPH["ops"][1], **changes}]  # type: ignore[index, dict-item]
    path = folder / "changed.json"
    path.write_text(json.dumps({**GRAPH, "ops": ops}))
    return path


def test_bad_graphs(cli: Cli, folder: Path) -> None:
    cli("trace", folder / "missing.json").refuses("missing.json: no such file; give the path of an existing file")
    assert "form a cycle: c -> c" in cli("trace", changed(folder, inputs=["c"])).error_line
    assert "unknown input 'x' of 'c'" in cli("trace", changed(folder, inputs=["x"])).error_line
    (folder / "cut.json").write_text(json.dumps(GRAPH)[:60])
    assert "cut.json:line 1 column" in cli("trace", folder / "cut.json").error_line
    (folder / "new.json").write_text(json.dumps({**GRAPH, "schema_version": 9}))
    assert "new.json:schema_version: is 9; this ddltool reads version 1" in cli("trace", folder / "new.json").error_line


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        ("trace zoo:nothing", "zoo:nothing: unknown model 'nothing'", 2),
        ("trace FOLDER/graph.json --device V1000", "--device: unknown device 'V1000'; did you mean \"V100\"", 2),
        ("trace FOLDER/graph.json --bandwidth fast", "--bandwidth: 'fast' is not a bandwidth", 2),
        ("trace FOLDER/graph.json --mode test", "--mode: unknown mode 'test'; known: inference, training", 2),
        ("trace FOLDER/graph.json --mode inference", "holds a graph for training, not inference", 2),
        (
            "trace FOLDER/graph.json --oracle moon",
            "--oracle: unknown oracle 'moon', and no such file; roofline, measured, or the path of",
            2,
        ),
        ("trace FOLDER/graph.json --batch-size 0", "--batch-size: is 0; give a whole number of at least 1", 2),
        ("trace FOLDER/graph.json -o /proc/no/graph.json", "/proc/no/graph.json: cannot be written", 2),
        ("trace FOLDER/graph.json -o FOLDER", "is a folder; give a file name", 2),
        ("trace FOLDER/bad.onnx", "bad.onnx: is not an ONNX", 2),
        ("trace FOLDER/model.py:raises", "the factory raised RuntimeError: no GPU here", 2),
        (
            "trace FOLDER/graph.json --parameter-servers 99999",
            "--parameter-servers: is 99999; give a whole number from 1 to 10000",
            2,
        ),
        ("trace", "Missing argument 'SOURCE'", 2),
        ("tarce x", "No such command 'tarce'", 2),
        ("plan FOLDER/negative.yaml", "negative.yaml:devices[0].count: is -4; give a number of at least 0", 2),
        ("plan FOLDER/job.yaml --strategy magic", "--strategy: unknown strategy 'magic'", 2),
        ("plan FOLDER/zero.yaml", "zero.yaml: no devices are offered: every count is 0", 3),
        ("plan FOLDER/job.yaml --strategy est --prefer ,", "--prefer: ',' names no objective", 2),
        ("plan FOLDER/job.yaml --price T4=1 --price V100=2", "--price: is given twice; give it once", 2),
        ("plan FOLDER/job.yaml --seed 1 --bandwidth 10Gbit --seed=1", "--seed: is given twice; give it once", 2),
        ("doctor --overhead ''", "--overhead: names no script", 2),
        ("plan FOLDER/memory.yaml", "memory_per_worker_gib: one worker needs 99 GiB; T4 has 16, V100 has 16", 3),
        ("fit FOLDER/graph.json", "graph.json: is not a CSV table (it begins like JSON)", 2),
        ("fit FOLDER/nan.csv", "nan.csv:row 2:step_time_s: is nan", 2),
        ("fit FOLDER/empty.csv", "empty.csv: is empty", 2),
        ("emit FOLDER/job.yaml", "job.yaml:", 2),
        ("profile zoo:cifarnet --batch-sizes 1,x", "--batch-sizes: '1,x' is not a list of whole numbers", 2),
        ("profile zoo:cifarnet --batch-sizes 0", "--batch-sizes: 0 is below 1", 2),
        ("profile FOLDER/graph.json", "cannot be trained here; give a torch source", 2),
        ("show schema plann", "KIND: unknown kind 'plann'; did you mean \"plan\"", 2),
        ("demo -o /proc/no", "/proc/no: cannot be made", 2),
    ],
)
def test_every_mistake_is_one_line(cli: Cli, folder: Path, arguments: str, message: str, code: int) -> None:
    (folder / "bad.onnx").write_bytes(b"not a model")
    (folder / "model.py").write_text("def raises():\n    raise RuntimeError('no GPU\\nhere')\n")
    (folder / "negative.yaml").write_text(JOB.replace("count: 4", "count: -4"))
    (folder / "zero.yaml").write_text(JOB.replace("count: 4", "count: 0"))
    (folder / "memory.yaml").write_text(JOB + "constraints: {memory_per_worker_gib: 99}\n")
    (folder / "nan.csv").write_text((folder / "profile.csv").read_text().replace("cpu,1,1,8,0.026", "cpu,1,1,8,nan"))
    (folder / "empty.csv").write_text("")
    before = sorted(folder.iterdir())
    result = cli(*shlex.split(arguments.replace("FOLDER", str(folder))))
    result.refuses(message, code=code)
    assert result.out == ""
    assert sorted(path for path in folder.iterdir() if path.name != "__pycache__") == before  # of the model's file


def test_version_and_schema(cli: Cli, folder: Path) -> None:
    from ddltool import __version__

    assert cli("--version").out == f"ddltool {__version__}\n"
    root = Path(__file__).parents[2]
    assert tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"] == __version__
    assert f"ddltool-{__version__}-py3-none-any.whl" in (root / "docs/gate.md").read_text()
    [newest, *_] = re.findall(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == "Unreleased" or newest.startswith(f"{__version__} (20")
    assert cli("show", "schema", "graph").document["$id"] == "ddltool.graph"
    assert cli("show", "schema", "ddltool.job", "-o", folder / "s.json").code == 0
    assert "max_workers" in json.loads((folder / "s.json").read_text())["properties"]


def test_an_interruption_is_130(monkeypatch: pytest.MonkeyPatch, cli: Cli, folder: Path) -> None:
    import ddltool.analyzers.step.costs.timed_graph

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ddltool.analyzers.step.costs.timed_graph, "load_graph", interrupted)
    result = cli("trace", folder / "graph.json", "-o", folder / "out.json")
    assert (result.code, result.error_line) == (130, "interrupted")
    assert not (folder / "out.json").exists()


def test_a_closed_pipe_is_no_traceback(folder: Path) -> None:
    command = f"{sys.executable} -m ddltool show schema graph | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert done.stdout == '{\n "$schem'


def test_colour_is_off_when_it_is_not_wanted(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    coloured = re.compile(r"\x1b\[[39]\d(;\d+)*m")
    assert coloured.search(cli("plan", folder / "job.yaml").err)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = cli("plan", folder / "job.yaml")
    assert not coloured.search(plain.out + plain.err)


def test_help_groups_commands_and_options(cli: Cli) -> None:
    whole = cli("--help").out
    questions = {about["question"] for about in COMMANDS.values()}
    assert 3 <= len(questions) <= 7
    assert all(question in whole for question in questions)
    for name, about in COMMANDS.items():
        parameters = {parameter.name: parameter for parameter in load(name).params}
        for title, options in about.get("panels", {}).items():
            assert {parameters[option].rich_help_panel for option in options} == {title}  # type: ignore[attr-defined]
    assert cli("-V").out == cli("--version").out


@pytest.mark.parametrize(
    ("command", "option", "begun", "wanted"),
    [
        ("trace", "precision", "", ["fp32", "tf32", "bf16", "fp16", "bf16-pure", "fp16-pure", "fp8"]),
        ("plan", "strategy", "e", ["est", "elastic-bsp"]),
        ("barrier", "algorithm", "zip", ["zipline"]),
        ("simulate", "policy", "fifo,sr", ["fifo,srtf"]),
        ("emit", "kind", "", ["TrainJob", "JobSet"]),
        ("trace", "oracle", "m", ["measured"]),
    ],
)
def test_choices_are_in_help_and_completion(cli: Cli, command: str, option: str, begun: str, wanted: list[str]) -> None:
    loaded = load(command)
    parameter = next(one for one in loaded.params if one.name == option)
    items = parameter.shell_complete(loaded.make_context(command, [], resilient_parsing=True), begun)
    assert [item.value for item in items if item.value.startswith(begun)] == wanted
    shown = " ".join(cli(command, "--help").out.replace("│", " ").split())
    assert all(name.rsplit(",", 1)[-1] in shown for name in wanted)


def test_explain_prints_the_glossary(cli: Cli) -> None:
    from ddltool.commands.show import GLOSSARY

    assert len(GLOSSARY) > 40
    for word, name in (
        ("Goodput", "goodput"),
        ("d1", "D0, D1, D2"),
        ("efficiency", "E (efficiency)"),
        ("E", "E (efficiency)"),
    ):
        assert cli("show", "term", word, "--json").document["terms"] == {name: GLOSSARY[name]}
    assert cli("show", "term", "--json").document["terms"] == GLOSSARY
    missed = cli("show", "term", "goodputt")
    assert missed.code == 2
    assert 'did you mean "goodput"?' in missed.err


def test_show_models_lists_what_a_source_completes_to(cli: Cli) -> None:
    everything = cli("show", "models", "--json").document["models"]
    qwen = cli("show", "models", "Qwen/qwen3-3", "--json").document["models"]
    assert qwen == [model for model in everything if model["name"].startswith("Qwen/Qwen3-3")] != []
    largest = next(model for model in qwen if model["name"] == "Qwen/Qwen3-32B")
    assert {**largest, "library": "transformers", "model_type": "qwen3", "parameters": 32_762_123_264} == largest
    unets = cli("show", "models", "UNet2DConditionModel", "--json").document[
        "models"
    ]  # a type, and of the other library
    assert {"stabilityai/stable-diffusion-xl-base-1.0"} < {model["name"] for model in unets if model["same_as"] is None}
    assert re.search(r"Qwen/Qwen3-32B +qwen3 +32\.8", cli("show", "models", "qwen3-3").out)
    cli("show", "models", "llama-3.1-9").refuses(
        "no published model has 'llama-3.1-9'", "did you mean meta-llama/Llama-3.1-8B"
    )
    source = next(parameter for parameter in load("predict").params if parameter.name == "source")
    for typed, first in (("transformers:Qwen/Qwen3-32", "transformers:Qwen/Qwen3-32B"), ("zoo:vgg1", "zoo:vgg16")):
        assert source.shell_complete(None, typed)[0].value == first
    assert source.shell_complete(None, "graph") == []


def test_a_verb_is_one_function() -> None:
    """What ``import ddltool`` has is what the command is made from, with each of its parameters that is no listener's."""
    for name in ddltool._VERBS:
        function = getattr(ddltool, name)
        assert function is getattr(import_module(f"ddltool.commands.{name}"), name)
        shown = {parameter.name for parameter in load(name).params}
        listening = {"tell", "stage", "batch", *(["summary"] if name == "report" else [])}
        assert set(signature(function).parameters) - listening <= shown, name


def test_a_command_of_earlier_versions_says_its_new_name(cli: Cli) -> None:
    for old, new in MOVED.items():
        assert new in COMMANDS
        assert old not in COMMANDS
    moved, named = cli("explain", "goodput", "--json"), cli("show", "term", "goodput", "--json")
    assert (moved.code, moved.out) == (0, named.out)
    assert moved.err == "note: ddltool explain is now ddltool show term\n"
    assert "show needs one of: term, zoo, models, schema" in cli("show").error_line


OPTIONS = {
    "predict": (
        "accumulation async-tensor-parallel attention bandwidth batch-sizes channels-last checkpointing compile device "
        "devices-file expert-parallel "
        "gpus-per-node json "
        "keep-files latency limit link load-in-4bit local-bandwidth local-latency lora nccl-tests nic optimizer output "
        "pipeline-parallel precision replicas sequence-length sequence-parallel sharding tensor-parallel "
        "virtual-stages"
    ),
    "profile": (
        "accumulation batch-sizes device device-name half-width json memory optimizer output precision repeats replicas "
        "resume seed threads time-limit warmup"
    ),
    "network": "json output replicas",
    "import": "batch-size device-name json nodes output replicas",
    "fit": "holdout json output seed",
    "calibrate": (
        "allow-code batch-size channels-last device devices-file json model optimizer output precision sequence-length"
    ),
    "devices": "collective devices-file json precision product",
    "plan": (
        "allow-code attention bandwidth batch-size budget channels-last checkpoint-copy checkpoint-write compile compress "
        "deadline devices devices-file epochs fragments graph json keep-files latency limit link link-between load-in-4bit "
        "lookahead lora max-gap memory-checkpoint mtbf nccl-tests nic nodes notice objective offload optimizer outer-bits "
        "outer-every output overlap precision prefer price repair restart samples save seed sequence-length share "
        "spares storage strategy telemetry time-limit tokens top-k vary with"
    ),
    "companion": "allow-code devices-file free json lookup measured output patch per-node resource threshold top-k",
    "trace": (
        "bandwidth batch-size bind channels-last compress determinism device devices-file exact gpus-per-node json "
        "latency link mode nccl-tests nic oracle output parameter-servers perfetto precision replicas samples seed "
        "sequence-length setting time-limit"
    ),
    "profile watch": "batch-size cores iterations json output replicas seed",
    "balance": (
        "accumulation batches cost device json limit max-tokens model output pack precision predictor rank-speeds "
        "replicas schemes seed sharded today total-batch warm-up window"
    ),
    "barrier": "algorithm json lookahead max-gap output predicted predictor",
    "emit": "devices-per-node image json kind label-value node-label output queue resource script target telemetry",
    "verify": "goodput json max-error output",
    "stragglers": "batch-size feed json output",
    "diff-run": "json whole",
    "gate": "baseline config github json junit level metrics rule sarif seed",
    "report": "json noise-scale output title",
    "simulate": (
        "checkpoint-interval checkpoint-write cluster failure-seed failures goodput interference interval json metrics "
        "mtbf output policy power price react repair restart-delay seed traces whole-seconds"
    ),
    "simulate sweep": (
        "checkpoint-interval checkpoint-write cluster compare csv engine failure-seed failures goodput interference "
        "interval jobs json mtbf output policy power price react repair restart-delay seeds traces whole-seconds"
    ),
    "simulate generate": "cluster hours jobs json output pattern pollux seed traces",
    "simulate convert": "cluster hours jobs json output pollux seed traces",
    "simulate advise": "json output",
    "simulate autoscale": "json output restart-delay traces",
    "simulate trials": "cluster interval json local-batch output policy power restart-delay seed traces",
    "init": "force json model nodes output",
    "demo": "json output seed",
    "doctor": "check json max-overhead overhead pairs replicas steps",
    "show term": "json",
    "show zoo": "json write",
    "show models": "json",
    "show schema": "json output",
}


def test_the_options_are_a_decision() -> None:
    """A new option shows here, so that adding one is a choice and not an accident."""
    everywhere = {"--quiet", "--verbose"}
    for name in COMMANDS:
        options = {option for parameter in load(name).params for option in parameter.opts if option.startswith("--")}
        assert sorted(options - everywhere) == [f"--{word}" for word in OPTIONS[name].split()], name
    assert OPTIONS.keys() == COMMANDS.keys()


def test_what_no_check_foresees_is_one_line_too(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "big.json").write_text('{"kind": "ddltool.plan", "job": ' + "9" * 5000 + "}")
    cli("emit", tmp_path / "big.json", "-o", tmp_path / "o.json").refuses("big.json:job: is inf; give a text")
    cli("trace", folder_graph(tmp_path, 1.7e308)).refuses(
        "huge.json:ops[0].duration_s: is 1.7e+308; give a number of at most 1e+12"
    )
    graph, same = folder_graph(tmp_path, 1.0), tmp_path / "same.json"
    assert "is written by -o too" in cli("trace", graph, "-o", same, "--perfetto", same).error_line

    def overflows(*_: object) -> None:
        raise OverflowError("too large")

    monkeypatch.setattr("ddltool.commands.trace.trace_section", overflows)
    cli("trace", graph).refuses("beyond what can be computed with")


def folder_graph(folder: Path, seconds: float) -> Path:
    """A graph of two ops that take that long each."""
    ops = [
        {"name": "r", "kind": "recv", "resource": "channel:0", "duration_s": seconds, "inputs": []},
        {"name": "c", "kind": "compute", "resource": "compute:0", "duration_s": seconds, "inputs": ["r"]},
    ]
    document = {"kind": "ddltool.graph", "schema_version": 1, "name": "g", "mode": "inference", "ops": ops}
    (folder / "huge.json").write_text(json.dumps(document))
    return folder / "huge.json"


def test_profile_network(cli: Cli, tmp_path: Path) -> None:
    result = cli("network", "-o", tmp_path / "network.json", "--json").done()
    document = result.document
    assert document == json.loads((tmp_path / "network.json").read_text())
    assert document["local"] is True
    assert [pair["ranks"] for pair in document["pairs"]] == [[0, 1]]
    assert document["bandwidth_bytes_per_s"] > 0
    assert document["latency_s"] >= 0
    assert cli("profile").error_line == "Missing argument 'SOURCE'; see ddltool profile --help"
    assert cli("network", "--replicas", 1).error_line.startswith("--replicas: is 1; give a whole number from 2 to")


def test_run_returns_the_code() -> None:
    assert run(["--version"]) == 0
    assert run(["--no-such-option"]) == 2


def test_a_command_says_as_much_as_it_is_asked_to(cli: Cli, tmp_path: Path) -> None:
    """Remarks go with -q, before and after the command's name; -v gives seconds and keeps to this one command."""
    rows = tmp_path / "p.csv"
    rows.write_text("placement,local_bsz,step_time,sync_time\n1,8,0.1,0\n")
    asked = ("simulate", "generate", "--jobs", 2, "--hours", 1, "-o", tmp_path / "w.csv")
    assert "wrote 2 jobs" in cli(*asked).err
    assert cli("-q", *asked).err == cli(*asked, "-q").err == ""
    assert re.fullmatch(r"\d+\.\d s in all\n", cli("import", rows, "--device-name", "T4", "-v").err)
    assert cli("import", rows, "--device-name", "T4").err == ""
    assert cli("-q", "import", rows, "-v").error_line == "-q: has no part beside -v; give one of the two"
    assert cli("-q", "import", rows, "--device-name", "T4", "-o", rows).error_line.startswith("-o: ")


def test_a_mistake_of_its_own_is_one_line_and_v_shows_where(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("ddltool.commands.devices.known_devices", breaks)
    result = cli("devices")
    assert (result.code, result.error_line) == (
        1,
        "internal: KeyError: 'lost'; this is ddltool's own mistake, -v shows where it is",
    )
    loud = cli("devices", "-v").err
    assert loud.startswith("Traceback (most recent call last):")
    assert "in breaks" in loud


def test_an_extra_that_is_missing_is_told_before_the_work(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    absent = ("vl_convert", "statsmodels")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else real(name, *rest))
    demo = cli("demo", "-o", tmp_path / "demo")
    assert (demo.code, demo.error_line.partition(": ")[0]) == (2, "vl_convert")
    assert demo.error_line.endswith("pip install altair vl-convert-python")
    assert not (tmp_path / "demo").exists()
    rows = [f"{k},w{worker},{1 + worker},1,0.5\n" for k in range(40) for worker in range(2)]
    (tmp_path / "trace.csv").write_text("".join(["iteration,worker,speed,cpu,memory\n", *rows]))
    monkeypatch.setattr("ddltool.commands.balance.PREDICTORS", ("last", "arima"))
    found = cli("balance", tmp_path / "trace.csv", "--warm-up", 20, "--json")
    assert [*found.document["predictors"]] == ["last"]
    assert "arima is left out: pip install statsmodels" in found.err


def test_bash_completes_what_is_installed(tmp_path: Path) -> None:
    """The function that bash gets, called as bash calls it: the choices of an option, one after a comma."""
    script = """
    ddltool --install-completion
    . "$HOME/.bashrc"
    ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _ddltool_completion ddltool; echo "${COMPREPLY[@]}"; }
    ask ddltool simulate workload.csv --policy fifo,sr
    """
    (tmp_path / "ddltool").write_text(f'#!/bin/sh\nexec {sys.executable} -m ddltool "$@"\n')
    (tmp_path / "ddltool").chmod(0o755)
    given = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=given, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "fifo,srtf", done.stdout + done.stderr


def test_a_long_stage_tells_a_log_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()  # not capsys: reading it empties it, also of what a thread is just writing
    monkeypatch.setattr(output, "err", lambda: Console(file=log))
    with output.progress("replays", 8):
        pass
    assert log.getvalue() == ""
    monkeypatch.setattr(output, "_FIRST_LINE_S", 0.5)
    monkeypatch.setattr(output, "_NEXT_LINES_S", 0.5)  # the first may come before it is said how far the stage is
    line = re.compile(r"^replays of fifo \(3 of 8\): \d+ s so far\n", re.MULTILINE)
    with output.progress("replays", 8) as advance:
        advance(3, "of fifo")
        deadline = time.monotonic() + 60
        while not line.search(log.getvalue()) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert line.search(log.getvalue())
