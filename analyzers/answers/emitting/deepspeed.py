"""A plan as DeepSpeed's JSON config: ZeRO's stage, batch sizes, precision, AutoTP.

Keys after https://www.deepspeed.ai/docs/config-json/ and DeepSpeed's ``runtime/config.py`` (0.19), which reads them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ddltool.analyzers.answers.emitting.layout import plan_hash
from ddltool.analyzers.answers.emitting.shares import Shares, recomputation, run_settings, shares
from ddltool.errors import InputError
from ddltool.plans import Plan

# Optimizers that DeepSpeed builds by name; the script passes others to deepspeed.initialize.
_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "lion": "Lion"}
# Without these ZeRO keeps a float32 copy of what bf16-pure has in bfloat16 alone; at stage 0 DeepSpeed always does.
_ALL_HALF = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
# bf16 and fp16 are autocast over float32 parameters, unlike DeepSpeed's own "bf16" and "fp16".
_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {},
    "bf16": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "bf16-pure": {"bf16": {"enabled": True}},
    "fp16-pure": {"fp16": {"enabled": True}},
}


def deepspeed_config(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """Return the content of ``ds_config.json``, and its gaps: the parts of the plan that it leaves out, with remedies.

    Raises InputError for a precision that DeepSpeed does not have, and for unequal batches.
    """
    degrees, gaps = shares(plan, "deepspeed")
    run, settings_gaps = run_settings(plan)
    if run.precision not in _PRECISIONS:
        raise InputError(
            "--target deepspeed", f"has no precision {run.precision}", "give --target torchtitan or accelerate"
        )
    recomputed, recomputation_gaps = recomputation(plan)
    stage = 0  # of ZeRO: 2 shards gradients and optimizer states, 3 the parameters too
    if degrees.sharded:
        stage = 3 if degrees.reshard else 2
    total_batch = {"train_batch_size": degrees.total_batch_size}
    if degrees.tensor > 1:
        total_batch = {}  # DeepSpeed counts the batch of every GPU of a tensor group in it, unlike the plan
    config: dict[str, Any] = {
        **total_batch,
        "train_micro_batch_size_per_gpu": degrees.micro_batch_size,
        "gradient_accumulation_steps": degrees.passes,
        "zero_optimization": {"stage": stage, **_zero_options(degrees, stage)},
        **_PRECISIONS[run.precision],
    }
    if degrees.offload:
        host = {"device": "cpu", "pin_memory": True}
        config["zero_optimization"]["offload_optimizer"] = host
        if stage == 3:  # other stages do not shard parameters, and DeepSpeed keeps them on the devices
            config["zero_optimization"]["offload_param"] = host
    if run.precision == "bf16-pure" and stage:
        config["bf16"] = {"enabled": True, **_ALL_HALF}
    if degrees.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": degrees.tensor}
        gaps.append(
            f"total batch: DeepSpeed counts all {degrees.processes} GPUs in it; {degrees.total_batch_size} samples train"
        )
    if run.optimizer in _OPTIMIZERS:
        config["optimizer"] = {"type": _OPTIMIZERS[run.optimizer]}
        gaps.append("learning rate: DeepSpeed's own, 0.001, where optimizer.params.lr does not say another")
    elif run.optimizer != "none":
        gaps.append(f"optimizer: hand torch.optim's {run.optimizer} to deepspeed.initialize")
    if recomputed != "none":
        config["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": False}
        gaps.append("modules that are computed again: model.gradient_checkpointing_enable() in the script chooses them")
    if run.compile:
        gaps.append("compile: engine.compile() in the script")
    if run.precision == "tf32":
        gaps.append('tf32: torch.set_float32_matmul_precision("high") in the script')
    if (run.precision == "bf16-pure" and not stage) or run.precision == "fp16-pure":
        gaps.append(f"{run.precision}: DeepSpeed keeps a float32 copy of the parameters beside")
    if degrees.sharded and degrees.replicate > 1:
        what_is_sharded = (
            f"hpZ keeps parameters in each {degrees.shard} processes, and shards" if stage == 3 else "ZeRO-2 shards"
        )
        gaps.append(
            f"HSDP {degrees.replicate} x {degrees.shard}: {what_is_sharded} gradients and optimizer states over all "
            f"{degrees.ranks}, with other traffic than planned"
        )
    return config, [*gaps, *settings_gaps, *recomputation_gaps]


def deepspeed_text(plan: Plan, config: dict[str, Any], gaps: Sequence[str]) -> str:
    """Return the config as JSON text, with the plan's hash and the gaps under a further key ``ddltool``.

    JSON has no comments, and DeepSpeed ignores unknown keys.
    """
    marks = {"plan_sha256": plan_hash(plan), "not_expressed": list(gaps)}
    return json.dumps({**config, "ddltool": marks}, indent=2) + "\n"


def _zero_options(degrees: Shares, stage: int) -> dict[str, Any]:
    """Return the options of ZeRO ``stage`` (0 to 3) beside the stage itself; {} for stage 0.

    Stage 3 with several replicas gets hpZ, which keeps the parameters sharded within each: the nearest to HSDP.
    """
    if stage == 0:
        return {}
    options: dict[str, Any] = {"overlap_comm": True}
    if stage == 3 and degrees.replicate > 1:
        options["zero_hpz_partition_size"] = degrees.shard
    return options
