"""The text of each target of ``emit``, with its gaps. Start at :func:`target_text` and :func:`launcher_text`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddltool.analyzers.answers.emitting.accelerate import accelerate_config, accelerate_text
from ddltool.analyzers.answers.emitting.deepspeed import deepspeed_config, deepspeed_text
from ddltool.analyzers.answers.emitting.enforcement import Target, not_expressed
from ddltool.analyzers.answers.emitting.kubernetes import assumptions, manifest_text, manifests
from ddltool.analyzers.answers.emitting.layout import LaunchSettings, ProcessLayout, layout
from ddltool.analyzers.answers.emitting.scripts import (
    CORES,
    ddp_module,
    fsdp2_module,
    gres_type,
    remarks,
    slurm_script,
    torchrun_script,
)
from ddltool.analyzers.answers.emitting.torchtitan import job_config, torchtitan_text
from ddltool.artifacts import to_json
from ddltool.plans import Enforcement, Plan

DEFAULT_FILES: dict[Target, str] = {
    "hook": "enforce.json",
    "torchrun": "launch.sh",
    "kubernetes": "kubernetes.yaml",
    "slurm": "slurm.sh",
    "fsdp2": "fsdp2_plan.py",
    "ddp": "ddp_plan.py",
    "torchtitan": "torchtitan.toml",
    "accelerate": "accelerate.yaml",
    "deepspeed": "ds_config.json",
}
"""The file that each target is written to by default."""


def target_text(
    plan: Plan, target: Target, enforcement: Enforcement, devices_per_node: Mapping[str, int] | int | None
) -> tuple[str, list[str]]:
    """Return the text of a target that starts no processes, and its gaps: the parts of the plan that it leaves out.

    ``enforcement``: the plan's :func:`to_enforcement`, the text of target "hook". ``devices_per_node``: see
    :func:`layout`. Raises InputError for a plan that the target cannot express.
    """
    gaps = not_expressed(plan, target)
    if target == "hook":
        return to_json(enforcement), gaps
    if target == "torchtitan":
        sections, config_gaps = job_config(plan)
        gaps += config_gaps
        return torchtitan_text(sections, remarks(plan, layout(plan, devices_per_node), gaps)), gaps
    if target == "accelerate":
        nodes = layout(plan, devices_per_node)
        config, config_gaps = accelerate_config(plan, nodes)
        gaps += config_gaps
        return accelerate_text(config, remarks(plan, nodes, gaps)), gaps
    if target == "deepspeed":
        settings, config_gaps = deepspeed_config(plan)
        gaps += config_gaps
        return deepspeed_text(plan, settings, gaps), gaps
    module = ddp_module if target == "ddp" else fsdp2_module
    return module(plan, gaps=gaps), gaps


def launcher_text(
    plan: Plan,
    target: Target,
    nodes: ProcessLayout,
    enforcement: Enforcement,
    settings: LaunchSettings,
    script_gaps: Sequence[str],
) -> tuple[str, list[str]]:
    """Return the script or manifest that starts the plan's processes, and its gaps: parts left out, and assumptions.

    Args:
        plan: the plan.
        target: "torchrun", "slurm" or, where it is neither, "kubernetes".
        nodes: the processes on each node.
        enforcement: the hook's configuration, which a manifest contains.
        settings: the training script, and what else the launcher needs beside the plan.
        script_gaps: gaps of the training script, added to the others.
    """
    gaps = [*not_expressed(plan, target, nodes), *script_gaps]
    if target == "torchrun":
        return torchrun_script(plan, nodes, settings, gaps=gaps), gaps
    if target == "slurm":
        if settings.resource is not None:
            types = ", ".join(sorted({gres_type(group.device_type) for group in nodes.groups}))
            gaps.append(f"GRES types: the site must name its devices {types} (--resource none asks for none)")
        limits = "the partition's own time limit (sbatch options override)"
        gaps.append(f"cores and time: {CORES} cores a process, {limits}")
        return slurm_script(plan, nodes, settings, gaps=gaps), gaps
    gaps += assumptions(settings, plan)
    return manifest_text(plan, manifests(plan, enforcement, nodes, settings), nodes, gaps), gaps
