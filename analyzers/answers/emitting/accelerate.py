"""A plan as the YAML file of ``accelerate config``: FSDP2 or DDP, number of processes, precision and compilation.

Keys after Accelerate's ``commands/config/config_args.py`` and ``parallelism_config.py`` (1.15), which read them.
"""

from __future__ import annotations

from typing import Any

import yaml

from ddltool.analyzers.answers.emitting.layout import ProcessLayout
from ddltool.analyzers.answers.emitting.shares import Shares, recomputation, run_settings, shares
from ddltool.errors import InputError
from ddltool.plans import Plan

# Precision of a plan -> Accelerate's mixed_precision; with "no" the script sets the rest, as _IN_SCRIPT says.
_MIXED = {
    "fp32": "no",
    "tf32": "no",
    "bf16": "bf16",
    "fp16": "fp16",
    "bf16-pure": "no",
    "fp16-pure": "no",
    "fp8": "fp8",
}
_IN_SCRIPT = {
    "tf32": 'tf32: torch.set_float32_matmul_precision("high") in the script',
    "bf16-pure": "bf16-pure: load the model in torch.bfloat16",
    "fp16-pure": "fp16-pure: load the model in torch.float16",
}


def accelerate_config(plan: Plan, layout: ProcessLayout) -> tuple[dict[str, Any], list[str]]:
    """Return the content for ``accelerate launch --config_file``, and its gaps: the parts of the plan left to the script.

    Raises InputError for different nodes, DDP beside tensor parallelism, and unequal batches.
    """
    degrees, gaps = shares(plan, "accelerate")
    run, settings_gaps = run_settings(plan)
    if not degrees.sharded and degrees.tensor > 1 and degrees.ranks > 1:
        problem = "has no DDP beside tensor parallelism"
        raise InputError("--target accelerate", problem, "give --target deepspeed or fsdp2")
    sizes = {group.processes_per_node for group in layout.groups}
    if len(sizes) > 1:
        nodes = "; ".join(group.text for group in layout.groups)
        problem = f"starts as many processes on every node, and the plan needs {nodes}"
        raise InputError("--target accelerate", problem, "give --target torchrun or slurm")
    recomputed, recomputation_gaps = recomputation(plan)
    is_fsdp = degrees.sharded or degrees.tensor > 1
    without_fsdp = "NO" if degrees.processes == 1 else "MULTI_GPU"
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_fsdp else without_fsdp,
        "mixed_precision": _MIXED[run.precision],
        "num_machines": layout.nodes,
        "num_processes": degrees.processes,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if run.precision == "fp8":
        config["fp8_config"] = {"backend": "AO", "enable_fsdp_float8_all_gather": False}
    if is_fsdp:
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": degrees.reshard,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": recomputed != "none",
            **({"fsdp_offload_params": True} if degrees.offload else {}),
        }
    if degrees.tensor > 1 or (degrees.sharded and degrees.replicate > 1):
        config["parallelism_config"] = _parallelism(degrees)
    if run.compile:
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": is_fsdp}
    if is_fsdp and not (run.model or "").startswith("transformers:"):
        gaps.append(
            "blocks: fsdp_transformer_layer_cls_to_wrap names their class, which only a transformers model says"
        )
    script_checkpoints = recomputed != "none" and not is_fsdp  # for FSDP2 the file has a key
    script_gaps = _script_gaps(degrees, layout, script_checkpoints, run.precision)
    return config, [*gaps, *settings_gaps, *recomputation_gaps, *script_gaps]


def accelerate_text(config: dict[str, Any], head: str) -> str:
    """Return the config as YAML text below ``head``, which is comment lines."""
    return f"{head.rstrip()}\n{yaml.safe_dump(config, sort_keys=False)}"


def _parallelism(degrees: Shares) -> dict[str, int]:
    """Return the degrees of parallelism under Accelerate's names (cp: context parallelism, which no plan has)."""
    sizes = {"dp_replicate": degrees.replicate, "dp_shard": degrees.shard, "tp": degrees.tensor, "cp": 1}
    return {f"parallelism_config_{name}_size": size for name, size in sizes.items()}


def _script_gaps(degrees: Shares, layout: ProcessLayout, checkpoints: bool, precision: str) -> list[str]:
    """Return the gaps that the training script must fill, as the file has no key for them, each ``PART: remedy``.

    ``checkpoints``: whether the script must turn activation checkpointing on; ``precision``: the plan's.
    """
    parts = [f"batch size: {degrees.micro_batch_size} a pass, in the script's DataLoader"]
    if degrees.passes > 1:
        parts.append(f"accumulation: Accelerator(gradient_accumulation_steps={degrees.passes}) in the script")
    if degrees.tensor > 1:
        parts.append(
            'tensor parallelism: from_pretrained(..., tp_plan="auto", device_mesh=accelerator.torch_device_mesh) in the script'
        )
    if checkpoints:
        parts.append("activation checkpointing: model.gradient_checkpointing_enable() in the script")
    if layout.nodes > 1:
        parts.append("machine_rank, main_process_ip, main_process_port: give them to accelerate launch on every node")
    if layout.assumed:
        parts.append(
            "nodes: the plan does not say how many devices a node has; one node is assumed (--devices-per-node)"
        )
    if precision in _IN_SCRIPT:
        parts.append(_IN_SCRIPT[precision])
    return parts
