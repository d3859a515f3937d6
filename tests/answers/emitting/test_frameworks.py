"""What torchtitan, Accelerate and DeepSpeed are told of a plan, read back by their own parsers where they are installed."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddltool.analyzers.answers.emitting.accelerate import accelerate_config, accelerate_text
from ddltool.analyzers.answers.emitting.deepspeed import deepspeed_config
from ddltool.analyzers.answers.emitting.enforcement import not_expressed
from ddltool.analyzers.answers.emitting.layout import layout, plan_hash
from ddltool.analyzers.answers.emitting.shares import block_names, recomputation, reshards, shares
from ddltool.analyzers.answers.emitting.torchtitan import job_config
from ddltool.artifacts import load, save
from ddltool.decision import Decision, Layout
from ddltool.errors import InputError
from ddltool.job import WorkerGroup
from ddltool.plans import Assignment, ParameterRecord, Plan, PrefetchSetting, Recomputed, ShardingSetting, StepSettings
from tests.answers.emitting.test_emit import MIXED, plan
from tests.conftest import Cli

LLAMA = "transformers:meta-llama/Llama-3.1-8B"
BLOCKS = [f"model.layers.{n}" for n in range(4)]
# Sections and keys of torchtitan 0.2.2's JobConfig that a plan fills, with the type of their values.
TORCHTITAN: dict[str, dict[str, type]] = {
    "model": {"name": str, "flavor": str, "converters": list},
    "optimizer": {"name": str, "implementation": str},
    "training": {"enable_cpu_offload": bool,
        "local_batch_size": int, "global_batch_size": int, "seq_len": int, "dtype": str,
        "mixed_precision_param": str, "mixed_precision_reduce": str,
    },
    "parallelism": {
        "data_parallel_replicate_degree": int, "data_parallel_shard_degree": int, "fsdp_reshard_after_forward": str,
        "tensor_parallel_degree": int, "pipeline_parallel_degree": int, "pipeline_parallel_schedule": str,
        "pipeline_parallel_microbatch_size": int,
    },
    "activation_checkpoint": {"mode": str, "selective_ac_option": str},
    "compile": {"enable": bool, "components": list},
}  # fmt: skip


def made_plan(
    kind: str = "fsdp", shape: tuple[int, int] = (1, 8), batch: int = 8, passes: int = 1, **changes: Any
) -> Plan:
    """A plan of 8 samples on each device, sharded; ``run`` gives changes of how the step is run."""
    row = Assignment(device_type="H100", devices=shape[0] * shape[1], ests_per_device=0, local_batch_size=batch,
                     accumulation_steps=passes - 1)  # fmt: skip
    run = {"model": LLAMA, "precision": "bf16", "optimizer": "adamw", "sequence_length": 4096, **changes.pop("run", {})}
    sharding = {
        "kind": kind,
        "replicate": shape[0],
        "shard": shape[1],
        "checkpointing": changes.pop("checkpointing", []),
        "offload": changes.pop("offload", False),
    }
    usual = {
        "assignments": [row],
        "run": StepSettings(**run),
        "sharding": ShardingSetting(**sharding),
        "parameters": [ParameterRecord(name=f"{name}.q.weight", size_bytes=8) for name in BLOCKS],
        "devices_per_node": {"H100": 8},
    }
    return plan(strategy="bsp", **(usual | changes))


FULL = [Recomputed(module=name) for name in BLOCKS]
KEEPING = [Recomputed(module=name, keeps=[0, 2]) for name in BLOCKS]
GROUP = WorkerGroup(tensor=2, pipeline=2)
KEPT = PrefetchSetting(units=BLOCKS, forward={}, backward={}, reshard_after_forward=False, step_s=1, default_step_s=1)
PLANS = {
    "fsdp": made_plan(),
    "zero2": made_plan(fsdp2=KEPT, passes=4),
    "hsdp": made_plan("hsdp", (2, 4), checkpointing=FULL, run={"compile": True}),
    "ddp": made_plan("ddp", (8, 1), checkpointing=KEEPING, run={"precision": "tf32"}),
    "pure": made_plan(run={"precision": "bf16-pure", "optimizer": "sgd"}),
    "some": made_plan(checkpointing=FULL[:2]),
    "tensor": made_plan(group=WorkerGroup(tensor=2)),
    "one": made_plan("ddp", (1, 1)),
    "host": made_plan(offload=True),
}
FLOAT8 = made_plan(run={"precision": "fp8", "compile": True})
ALL = {**PLANS, "pipeline": made_plan(passes=4, group=GROUP)}


# -- torchtitan


@pytest.mark.parametrize("name", ALL)
def test_torchtitan_reads_every_key(cli: Cli, tmp_path: Path, name: str) -> None:
    """By the keys of 0.2.2, the last that reads TOML, and by its own class where it is installed."""
    save(ALL[name], tmp_path / "plan.json")
    cli("emit", tmp_path / "plan.json", "--target", "torchtitan", "-o", tmp_path / "t.toml").done()
    text = (tmp_path / "t.toml").read_text()
    document = tomllib.loads(text)
    for section, values in document.items():
        for key, value in values.items():
            assert type(value) is TORCHTITAN[section][key], key
    assert f"# Plan SHA-256: {plan_hash(ALL[name])}" in text
    degrees = document["parallelism"]
    world = 1
    for degree in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "pipeline_parallel"):
        world *= degrees[f"{degree}_degree"]
    assert world == ALL[name].processes
    ranks = degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"]
    training = document["training"]
    assert training["global_batch_size"] == ranks * 8
    assert training["global_batch_size"] % (training["local_batch_size"] * ranks) == 0  # its own check


def test_torchtitan_is_told_the_layout() -> None:
    said = {name: job_config(each)[0] for name, each in ALL.items()}
    assert said["zero2"]["parallelism"]["fsdp_reshard_after_forward"] == "never"
    assert said["fsdp"]["parallelism"]["fsdp_reshard_after_forward"] == "always"
    assert [said[name]["training"]["local_batch_size"] for name in ("fsdp", "zero2", "pipeline")] == [8, 2, 8]
    assert said["pipeline"]["parallelism"] | {"pipeline_parallel_microbatch_size": 2} == said["pipeline"]["parallelism"]
    modes = {name: said[name]["activation_checkpoint"] for name in ("fsdp", "hsdp", "ddp", "some")}
    assert modes == {
        "fsdp": {"mode": "none"}, "hsdp": {"mode": "full"}, "ddp": {"mode": "selective", "selective_ac_option": "op"},
        "some": {"mode": "selective", "selective_ac_option": "2"},
    }  # fmt: skip
    types = {name: (said[name]["training"]["dtype"], said[name]["training"]["mixed_precision_param"]) for name in said}
    assert (types["fsdp"], types["pure"]) == (("float32", "bfloat16"), ("bfloat16", "bfloat16"))
    assert types["ddp"] == ("float32", "float32")
    assert said["hsdp"]["compile"]["enable"] is True
    assert [name for name in said if said[name]["training"].get("enable_cpu_offload")] == ["host"]


def test_float8_brings_its_converter_and_section() -> None:
    sections, _ = job_config(FLOAT8)
    assert sections["model"]["converters"] == ["float8"]
    assert sections["quantize.linear.float8"]["enable_fsdp_float8_all_gather"] is False  # as planned


def test_torchtitan_which_has_no_adapters_refuses_them() -> None:
    with pytest.raises(
        InputError, match="--target torchtitan: trains all parameters, and the plan is of LoRA adapters; "
    ):
        job_config(made_plan(run={"lora": 16}))


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (LLAMA, {"name": "llama3", "flavor": "8B"}),
        ("transformers:Qwen/Qwen3-30B-A3B", {"name": "qwen3", "flavor": "30B-A3B"}),
        ("transformers:openai/gpt-oss-20b", {"name": "gpt_oss", "flavor": "20b"}),
        ("transformers:deepseek-ai/DeepSeek-V3", {"name": "deepseek_v3", "flavor": "671B"}),
        ("transformers:meta-llama/Llama-4-Scout-17B-16E", {"name": "llama4", "flavor": "17bx16e"}),
        ("transformers:meta-llama/Llama-3.2-1B", None),
        ("zoo:resnet50", None),
    ],
)
def test_the_models_that_torchtitan_knows(model: str, named: dict[str, str] | None) -> None:
    sections, gaps = job_config(made_plan(run={"model": model}))
    assert sections.get("model") == named
    assert any(gap.startswith("model: set name and flavor") for gap in gaps) == (named is None)


def test_torchtitan_03_takes_the_same_as_options(cli: Cli, tmp_path: Path) -> None:
    save(ALL["pipeline"], tmp_path / "plan.json")
    cli("emit", tmp_path / "plan.json", "--target", "torchtitan", "-o", tmp_path / "t.toml").done()
    line = next(
        line
        for line in (tmp_path / "t.toml").read_text().splitlines()
        if line.startswith("# MODULE=... CONFIG=... ./run_train.sh --")
    )
    document = tomllib.loads((tmp_path / "t.toml").read_text())
    said = re.findall(r"--(\w+)\.(\w+)=(\S+)", line)
    assert said == [(s, k, str(v)) for s in ("training", "parallelism") for k, v in document[s].items()]
    assert line.endswith(" --compile.no-enable")
    assert "--parallelism.pipeline_parallel_degree=2 " in line


# -- Accelerate


def launched(file: Path) -> dict[str, str]:
    """The environment that ``accelerate launch`` gives its processes; it refuses keys that it does not know."""
    pytest.importorskip("accelerate")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    arguments = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    variables: dict[str, str] = prepare_multi_gpu_env(_validate_launch_command(arguments)[0])
    return variables


@pytest.mark.parametrize("name", PLANS)
def test_accelerates_own_parser_takes_the_config(
    cli: Cli, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the class behind its file, and through what ``accelerate launch`` makes of it."""
    accelerate = pytest.importorskip("accelerate")
    save(PLANS[name], tmp_path / "plan.json")
    cli("emit", tmp_path / "plan.json", "--target", "accelerate", "-o", tmp_path / "a.yaml").done()
    variables = launched(tmp_path / "a.yaml")
    assert yaml.safe_load((tmp_path / "a.yaml").read_text())["num_processes"] == PLANS[name].processes
    is_fsdp = name not in ("ddp", "one")
    assert variables.get("ACCELERATE_USE_FSDP", "false") == str(is_fsdp).lower()
    if is_fsdp:
        assert variables["FSDP_VERSION"] == "2"
        assert variables["FSDP_OFFLOAD_PARAMS"] == str(name == "host").lower()
        assert variables["FSDP_RESHARD_AFTER_FORWARD"] == str(name != "zero2").lower()
        assert variables["FSDP_ACTIVATION_CHECKPOINTING"] == str(name in ("hsdp", "some")).lower()
    if name in ("hsdp", "tensor"):
        for key, value in variables.items():
            if key.startswith("PARALLELISM_CONFIG"):
                monkeypatch.setenv(key, value)
        mesh = accelerate.ParallelismConfig()
        sizes = (mesh.dp_replicate_size, mesh.dp_shard_size, mesh.tp_size)
        assert sizes == ((2, 4, 1) if name == "hsdp" else (1, 8, 2))
        assert mesh.total_size == PLANS[name].processes
    assert variables["ACCELERATE_MIXED_PRECISION"] == ("no" if name in ("ddp", "pure") else "bf16")
    assert variables["ACCELERATE_DYNAMO_BACKEND"] == ("INDUCTOR" if name == "hsdp" else "NO")


def test_accelerate_trains_in_float8(tmp_path: Path) -> None:
    """``accelerate launch`` itself asks for torchao: its class and the names of its options tell."""
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    (tmp_path / "a.yaml").write_text(accelerate_text(accelerate_config(FLOAT8, layout(FLOAT8))[0], "# a head"))
    config = load_config_from_file(str(tmp_path / "a.yaml"))
    assert (config.mixed_precision, config.fp8_config["backend"]) == ("fp8", "AO")
    known = vars(launch_command_parser().parse_args(["train.py"]))
    assert {f"fp8_{key}" for key in config.fp8_config} <= set(known)


def test_accelerate_leaves_to_the_script_what_its_file_has_no_key_for() -> None:
    _, gaps = accelerate_config(PLANS["zero2"], layout(PLANS["zero2"]))
    assert gaps[:2] == [
        "batch size: 2 a pass, in the script's DataLoader",
        "accumulation: Accelerator(gradient_accumulation_steps=4) in the script",
    ]
    config, gaps = accelerate_config(PLANS["tensor"], layout(PLANS["tensor"]))
    assert (config["num_machines"], config["num_processes"]) == (1, 16) == (layout(PLANS["tensor"]).nodes, 16)
    assert any(gap.startswith("tensor parallelism: from_pretrained") for gap in gaps)
    _, gaps = accelerate_config(made := made_plan(run={"model": "train.py:net"}), layout(made))
    assert any(gap.startswith("blocks: fsdp_transformer_layer_cls_to_wrap names") for gap in gaps)


def test_accelerate_starts_alike_on_all_nodes() -> None:
    made = made_plan(shape=(1, 12))
    with pytest.raises(InputError, match="starts as many processes on every node.*give --target torchrun or slurm"):
        accelerate_config(made, layout(made, 8))
    assert accelerate_config(made, layout(made, 6))[0]["num_machines"] == 2


# -- DeepSpeed


def test_deepspeed_is_told_stage_batch_and_precision(cli: Cli, tmp_path: Path) -> None:
    said = {name: deepspeed_config(each)[0] for name, each in PLANS.items()}
    stages = {name: each["zero_optimization"]["stage"] for name, each in said.items()}
    assert stages == {
        "fsdp": 3,
        "zero2": 2,
        "hsdp": 3,
        "ddp": 0,
        "pure": 3,
        "some": 3,
        "tensor": 3,
        "one": 0,
        "host": 3,
    }
    on_host = {"device": "cpu", "pin_memory": True}
    for name, each in said.items():
        parts = [each["zero_optimization"].get(f"offload_{part}") for part in ("param", "optimizer")]
        assert parts == [on_host if name == "host" else None] * 2
    for name, config in said.items():
        whole = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
        assert whole == 8
        assert config.get("train_batch_size") == (None if name == "tensor" else 8 * PLANS[name].world_size)
    assert said["hsdp"]["zero_optimization"]["zero_hpz_partition_size"] == 4
    assert said["tensor"]["tensor_parallel"] == {"autotp_size": 2}
    assert said["fsdp"]["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert said["pure"]["bf16"]["bf16_optimizer_states"] is True
    assert ("optimizer" in said["pure"], said["fsdp"]["optimizer"]["type"]) == (False, "AdamW")
    save(PLANS["hsdp"], tmp_path / "plan.json")
    cli("emit", tmp_path / "plan.json", "--target", "deepspeed", "-o", tmp_path / "d.json").done()
    written = json.loads((tmp_path / "d.json").read_text())
    marks = written.pop("ddltool")
    assert (written, marks["plan_sha256"]) == (said["hsdp"], plan_hash(PLANS["hsdp"]))
    assert any("hpZ keeps parameters in each 4 processes" in gap for gap in marks["not_expressed"])


@pytest.mark.parametrize("name", PLANS)
def test_deepspeeds_own_parser_takes_the_config(name: str) -> None:
    """Where it is installed: an unknown key of ZeRO, a wrong stage or a wrong product of batches raises."""
    runtime = pytest.importorskip("deepspeed.runtime.config")

    class Ranks:
        get_data_parallel_world_size = staticmethod(lambda: PLANS[name].world_size)

    runtime.dist.get_rank = lambda: 0
    config = runtime.DeepSpeedConfig(deepspeed_config(PLANS[name])[0], mpu=Ranks())
    assert config.train_batch_size == 8 * PLANS[name].world_size


# -- what frameworks share


def test_unequal_passes_become_equal_ones_that_take_no_more_memory() -> None:
    made, gaps = shares(made_plan(passes=3), "torchtitan")
    assert (made.passes, made.micro_batch_size, made.total_batch_size) == (4, 2, 64)
    assert gaps == ["passes: 8 samples in 3 passes are unequal ones; here 4 of 2"]
    each = Assignment(device_type="A", devices=2, ests_per_device=4, local_batch_size=8)
    turns = plan(assignments=[each], max_workers=8, batch_size=2, est_count=8, throughput=8.0)
    assert shares(turns, "deepspeed")[0].passes == 4  # logical workers that take turns


@pytest.mark.parametrize("target", ["torchtitan", "deepspeed", "accelerate"])
def test_an_uneven_split_is_refused(cli: Cli, tmp_path: Path, target: str) -> None:
    save(MIXED, tmp_path / "plan.json")
    made = cli("emit", tmp_path / "plan.json", "--target", target, "-o", tmp_path / "out")
    made.refuses(
        f"--target {target}: has one batch size for all, and the plan gives its devices 4 to 12 samples a step"
    )


@pytest.mark.parametrize(
    ("target", "made", "line"),
    [
        ("torchtitan", made_plan(run={"precision": "fp16"}), "has no precision fp16; give --target accelerate"),
        ("deepspeed", made_plan(run={"precision": "fp8"}), "has no precision fp8; give --target torchtitan"),
        ("torchtitan", made_plan("ddp", (8, 1), group=GROUP), "has no DDP beside tensor or pipeline parallelism"),
        ("accelerate", made_plan("ddp", (8, 1), group=WorkerGroup(tensor=2)), "has no DDP beside tensor parallelism"),
    ],
)
def test_what_a_framework_cannot_say_at_all_is_refused(
    cli: Cli, tmp_path: Path, target: str, made: Plan, line: str
) -> None:
    save(made, tmp_path / "plan.json")
    cli("emit", tmp_path / "plan.json", "--target", target, "-o", tmp_path / "out").refuses(line)
    assert not (tmp_path / "out").exists()


def test_a_plan_says_how_its_step_is_run(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "kind: ddltool.job\nname: j\nmax_workers: 4\nbatch_size: 2\nprecision: bf16\noptimizer: adamw\ncompile: true\n"
        "sequence_length: 512\ndevices: [{type: H100, count: 4, capability_per_s: 1.0}]\n"
    )
    cli("plan", tmp_path / "job.yaml", "--strategy", "lb-bsp", "-o", tmp_path / "plan.json").done()
    run = StepSettings(precision="bf16", optimizer="adamw", compile=True, sequence_length=512)
    assert load(tmp_path / "plan.json", Plan).run == run
    cli("emit", tmp_path / "plan.json", "--target", "torchtitan", "-o", tmp_path / "t.toml").done()
    written = tomllib.loads((tmp_path / "t.toml").read_text())
    assert (written["training"]["seq_len"], written["optimizer"]["name"], written["compile"]["enable"]) == (
        512,
        "AdamW",
        True,
    )


def test_adapters_are_the_scripts() -> None:
    for target in ("hook", "torchtitan", "fsdp2"):
        gaps = [gap for gap in not_expressed(made_plan(run={"lora": 16}), target) if gap.startswith("LoRA: the script")]  # type: ignore[arg-type]
        assert len(gaps) == 1
    assert not any(gap.startswith("LoRA") for gap in not_expressed(made_plan(), "hook"))


def test_plans_of_earlier_versions_are_written_with_what_they_lack(cli: Cli, tmp_path: Path) -> None:
    old = made_plan().model_dump(mode="json", exclude={"run"})
    (tmp_path / "plan.json").write_text(json.dumps(old))
    assert load(tmp_path / "plan.json", Plan).run is None
    said = cli("emit", tmp_path / "plan.json", "--target", "torchtitan", "-o", tmp_path / "t.toml", "--json").document
    assert any(
        gap.startswith("precision, optimizer, compile, tokens: the plan does not") for gap in said["not_expressed"]
    )


def test_blocks_are_those_that_the_names_of_parameters_number() -> None:
    names = ["embed.weight", *(f"h.{n}.mlp.0.weight" for n in (0, 10, 2)), "head.weight"]
    made = made_plan(parameters=[ParameterRecord(name=name, size_bytes=1) for name in names])
    assert block_names(made) == ["h.0", "h.2", "h.10"]
    assert recomputation(made_plan(checkpointing=FULL)) == ("full", [])
    word, gaps = recomputation(PLANS["some"])
    assert (word, gaps[0].partition(":")[0]) == ("selective", "activation checkpointing by module")


def test_the_comparison_tells_what_stays_gathered_in_groups() -> None:
    picked = Layout(
        devices={"H100": 16}, sharding="fsdp", reshard_after_forward=False, checkpointing="none",
        local_batch_sizes={"H100": 8}, passes=1, memory_bytes={},
    )  # fmt: skip
    made = made_plan(group=WorkerGroup(tensor=2))
    assert reshards(made)
    made = made.model_copy(update={"decision": Decision.model_construct(layouts=[picked])})
    assert not reshards(made)
    assert accelerate_config(made, layout(made))[0]["fsdp_config"]["fsdp_reshard_after_forward"] is False
