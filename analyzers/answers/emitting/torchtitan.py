"""A plan as a job configuration of torchtitan: a TOML file for versions up to 0.2, and command line options for 0.3.

Keys after torchtitan's ``config/job_config.py`` (0.2.2) and ``config/configs.py`` (0.3.0).
"""

from __future__ import annotations

import json
import re

from ddltool.analyzers.answers.emitting.shares import (
    Checkpointing,
    Shares,
    block_names,
    recomputation,
    run_settings,
    shares,
)
from ddltool.errors import InputError
from ddltool.plans import Plan
from ddltool.precision import PRECISIONS

Settings = dict[str, dict[str, object]]
_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW"}
# (pattern of a name on the hub, torchtitan's model); the pattern's group is torchtitan's flavor, but for those in _FLAVORS.
_MODELS = (
    (r"Llama-3(?:\.[13])?-(8B|70B|405B)", "llama3"),
    (r"Llama-4-Scout-(17B-16E)", "llama4"),
    (r"Llama-4-Maverick-(17B-128E)", "llama4"),
    (r"Qwen3-(0\.6B|1\.7B|4B|8B|14B|32B|30B-A3B|235B-A22B)", "qwen3"),
    (r"gpt-oss-(20b|120b)", "gpt_oss"),
    (r"DeepSeek-V3()", "deepseek_v3"),
)
_FLAVORS = {"17B-16E": "17bx16e", "17B-128E": "17bx128e", "": "671B"}


def job_config(plan: Plan) -> tuple[Settings, list[str]]:
    """Return torchtitan's settings by section, and their gaps: the parts of the plan that they leave out, with remedies.

    Raises InputError for a plan that they cannot express: LoRA, float16, DDP beside tensor or pipeline parallelism, and unequal
    batches.
    """
    degrees, gaps = shares(plan, "torchtitan")
    run, settings_gaps = run_settings(plan)
    precision = PRECISIONS[run.precision]
    if run.lora:
        problem = "trains all parameters, and the plan is of LoRA adapters"
        raise InputError(
            "--target torchtitan", problem, "give --target accelerate, deepspeed or hook, with peft's adapters"
        )
    if precision.computes == "float16":
        problem = f"has no precision {run.precision}"
        raise InputError(
            "--target torchtitan", problem, "give --target accelerate, deepspeed or hook, or plan with bf16"
        )
    if not degrees.sharded and degrees.ranks > 1 and degrees.tensor * degrees.pipeline > 1:
        problem = "has no DDP beside tensor or pipeline parallelism"
        raise InputError(
            "--target torchtitan", problem, "give --target fsdp2, or --target torchrun with a script of yours"
        )
    recomputed, recomputation_gaps = recomputation(plan)
    model, model_gaps = _model(run.model)
    settings: Settings = {
        "model": {**model, **({"converters": ["float8"]} if precision.linears else {})},
        "optimizer": _optimizer(run.optimizer),
        "training": {
            # A pipeline is fed the whole batch of a rank, and cuts it into passes itself.
            "local_batch_size": degrees.batch_size if degrees.pipeline > 1 else degrees.micro_batch_size,
            "global_batch_size": degrees.total_batch_size,
            **({} if run.sequence_length is None else {"seq_len": run.sequence_length}),
            "dtype": precision.keeps,
            "mixed_precision_param": precision.torch_type,
            "mixed_precision_reduce": "float32",
            **({"enable_cpu_offload": True} if degrees.offload else {}),
        },
        "parallelism": _parallelism(degrees),
        "activation_checkpoint": _checkpointing(recomputed, plan),
        "compile": {"enable": run.compile, "components": ["model", "loss"]},
    }
    if precision.linears:
        settings["quantize.linear.float8"] = {"enable_fsdp_float8_all_gather": False, "filter_fqns": ["output"]}
        gaps.append("all-gathers in float8: the plan counts on none; enable_fsdp_float8_all_gather sends less")
    gaps += [*settings_gaps, *model_gaps, *recomputation_gaps]
    if run.sequence_length is None:
        gaps.append("sequence length: set seq_len in [training]; the plan does not say it")
    if run.precision == "tf32":
        gaps.append('tf32: torch.set_float32_matmul_precision("high") in the script')
    if not settings["optimizer"]:
        gaps.append(f"optimizer: torchtitan has no {run.optimizer}; its AdamW takes other memory and time than planned")
    return {section: values for section, values in settings.items() if values}, gaps


def torchtitan_text(settings: Settings, head: str) -> str:
    """Return the sections as TOML text below ``head``, comment lines, and a comment with the options for torchtitan 0.3."""
    options = [
        _option(f"{section}.{key}", value)
        for section in ("training", "parallelism", "compile")
        for key, value in settings[section].items()
        if not isinstance(value, list)
    ]
    lines = [
        head.rstrip("\n"),
        "# Up to torchtitan 0.2: CONFIG_FILE=THIS_FILE ./run_train.sh",
        "# From 0.3 on, which reads no TOML, options say all but checkpointing and float8:",
        f"# MODULE=... CONFIG=... ./run_train.sh {' '.join(options)}",
    ]
    for section, values in settings.items():
        lines += ["", f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _optimizer(name: str) -> dict[str, object]:
    """Return the section [optimizer] for a job's optimizer; {} if torchtitan does not have it.

    ``foreach-NAME`` is the implementation that works on lists of tensors; NAME alone is the fused one.
    """
    family = name.removeprefix("foreach-")
    if family not in _OPTIMIZERS:
        return {}
    return {"name": _OPTIMIZERS[family], "implementation": "fused" if family == name else "foreach"}


def _parallelism(degrees: Shares) -> dict[str, object]:
    """Return the section [parallelism].

    The micro-batches of a pipeline are the plan's passes, if it has several; else torchtitan chooses their size.
    """
    pipeline: dict[str, object] = {"pipeline_parallel_schedule": "1F1B"}
    if degrees.passes > 1:
        pipeline["pipeline_parallel_microbatch_size"] = degrees.micro_batch_size
    return {
        "data_parallel_replicate_degree": degrees.replicate,
        "data_parallel_shard_degree": degrees.shard,
        "fsdp_reshard_after_forward": "always" if degrees.reshard else "never",
        "tensor_parallel_degree": degrees.tensor,
        "pipeline_parallel_degree": degrees.pipeline,
        **(pipeline if degrees.pipeline > 1 else {}),
    }


def _checkpointing(recomputed: Checkpointing, plan: Plan) -> dict[str, object]:
    """Return the section [activation_checkpoint]; ``recomputed``: the mode, from :func:`recomputation`.

    torchtitan does not name modules. Of mode "selective", the option "op" keeps every second product of all blocks; a
    number n recomputes every n-th block, rounded so that at least as many blocks are recomputed as planned.
    """
    entries = [] if plan.sharding is None else plan.sharding.checkpointing
    if recomputed != "selective":
        return {"mode": recomputed}
    if any(entry.keeps for entry in entries):
        return {"mode": recomputed, "selective_ac_option": "op"}
    every = len(block_names(plan)) // len(entries)
    if every <= 1:
        return {"mode": "full"}
    return {"mode": recomputed, "selective_ac_option": str(every)}


def _model(source: str | None) -> tuple[dict[str, object], list[str]]:
    """Return the section [model] for the SOURCE of a plan's model, and the gaps.

    "transformers:meta-llama/Llama-3.1-8B" gives ({"name": "llama3", "flavor": "8B"}, []). For a model that torchtitan
    does not have the section is {}, with a gap that says so.
    """
    for pattern, name in _MODELS:
        if match := re.search(rf"/{pattern}(?![\w.])", source or "", re.IGNORECASE):
            flavor = match.group(1)
            return {"name": name, "flavor": _FLAVORS.get(flavor.upper(), flavor)}, []
    return {}, ["model: set name and flavor in [model]; torchtitan has llama3, llama4, qwen3, gpt_oss and deepseek_v3"]


def _option(name: str, value: object) -> str:
    """Return a setting as an option of torchtitan's command line; False becomes ``--section.no-name``.

    >>> _option("compile.enable", False), _option("training.seq_len", 8)
    ('--compile.no-enable', '--training.seq_len=8')
    """
    if isinstance(value, bool):
        return f"--{name}" if value else f"--{name.replace('.', '.no-')}"
    return f"--{name}={value}"
