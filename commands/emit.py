"""``ddltool emit PLAN``: a plan in the words of what will run it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

from ddltool.analyzers.answers.emitting.enforcement import Target, not_expressed, to_enforcement
from ddltool.analyzers.answers.emitting.kubernetes import assumptions, manifest_text, manifests
from ddltool.analyzers.answers.emitting.layout import Kind, LaunchSettings, ProcessLayout, layout, plan_hash
from ddltool.analyzers.answers.emitting.scripts import (
    CORES,
    ddp_module,
    fsdp2_module,
    gres_type,
    slurm_script,
    torchrun_script,
)
from ddltool.artifacts import check_outputs, load, to_json, write_text
from ddltool.commands.options import device_counts, integers, one_of, pairs, words
from ddltool.commands.output import note, print_json, say
from ddltool.commands.verbs import demand_part, is_given
from ddltool.errors import InputError, known, shortened
from ddltool.plans import Enforcement, Plan
from ddltool.results import EmitResult

_Text = str | None
_DEFAULT_FILES = {
    **{"hook": "enforce.json", "torchrun": "launch.sh", "kubernetes": "kubernetes.yaml", "slurm": "slurm.sh"},
    **{"fsdp2": "fsdp2_plan.py", "ddp": "ddp_plan.py"},
}
_PARAMETER_SERVER_TARGETS = ("hook", "torchrun")
_COMMON_OPTIONS = {"plan_file", "output", "target", "telemetry", "script", "as_json"}
# Options that only these targets read.
_TARGET_OPTIONS = {
    "torchrun": {"devices_per_node"},
    "slurm": {"devices_per_node", "queue", "resource"},
    "kubernetes": {"devices_per_node", "queue", "resource", "image", "kind", "node_label", "label_value"},
}
_LABEL_KEY = r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_NODE_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_VALUE = r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?"
# registry.example:5000/team/name:tag@sha256:digest
_IMAGE_NAME = r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}"
_SLURM_NAME = r"[A-Za-z0-9_.,/-]+"


def emit(
    plan_file: Path,
    output: Path | None = None,
    target: Annotated[Target, one_of(*_DEFAULT_FILES)] = "hook",
    telemetry: str = "telemetry.jsonl",
    script: str = "train.py",
    devices_per_node: Annotated[dict[str, int] | int | None, _read_devices_per_node] = None,
    queue: str | None = None,
    resource: str | None = None,
    image: str | None = None,
    kind: Annotated[Kind | None, one_of(*get_args(Kind))] = None,
    node_label: str = "ddltool/device-type",
    label_value: str = "",
    as_json: bool = False,
) -> None:
    """Write the enforcement config, launch script, manifest or settings that make a job follow a plan."""
    demand_part(f"--target {target}", _COMMON_OPTIONS | _TARGET_OPTIONS.get(target, set()))
    path = output or Path(_DEFAULT_FILES[target])
    if as_json and str(path) == "-":
        raise InputError("--json", "cannot share stdout with -o -", "give -o a file name")
    if not (telemetry.strip() and telemetry.isprintable()):
        problem = f"is {telemetry!r}, which is no name of a file"
        raise InputError("--telemetry", problem, "give a file such as telemetry.jsonl, or none")
    paths = [path]
    if (
        target in ("torchrun", "slurm") and str(path) != "-"
    ):  # a manifest embeds enforce.json; for the hook, enforce.json is the output itself
        paths.append(path.with_name("enforce.json"))
    check_outputs([plan_file], dict(zip(("-o", "enforce.json"), paths, strict=False)))
    plan = load(plan_file, Plan)
    if plan.group is not None:
        problem = f"each device is a group of {plan.group.text}, whose own processes no plan starts"
        raise InputError(f"{plan_file}:group", problem, "take each group's batch and passes from the plan")
    if plan.strategy == "elastic-bsp" and target not in _PARAMETER_SERVER_TARGETS:
        problem = f"has no parameter server, which {plan_file}, an elastic-bsp plan, needs"
        raise InputError(f"--target {target}", problem, f"give --target {' or '.join(_PARAMETER_SERVER_TARGETS)}")
    enforcement = to_enforcement(plan, telemetry=None if telemetry == "none" else telemetry)
    if target in _TARGET_OPTIONS:
        resource_name = _checked_cluster_name(
            "--resource", resource or ("gpu" if target == "slurm" else "nvidia.com/gpu"), target
        )
        settings = LaunchSettings(
            script=words(script, "--script"),
            image=None if image is None else _checked_cluster_name("--image", image, target),
            resource=None if resource_name == "none" else resource_name,
            node_label=_checked_cluster_name("--node-label", node_label, "kubernetes"),
            label_values=_label_values(label_value, [row.device_type for row in plan.assignments]),
            queue=None if queue is None else _checked_cluster_name("--queue", queue, target),
            kind=kind,
        )
        process_layout = layout(plan, devices_per_node)
        is_script_there = is_given("script") or target == "kubernetes"
        is_script_there = is_script_there or any((folder / script).exists() for folder in (Path(), path.parent))
        script_gaps = (
            [] if is_script_there else [f"script: {script} is started, and there is none here (--script names yours)"]
        )
        text, gaps = _launcher_text(plan, enforcement, target, process_layout, settings, script_gaps)
    else:
        gaps = not_expressed(plan, target)
        modules = {"ddp": ddp_module, "fsdp2": fsdp2_module}
        text = to_json(enforcement) if target == "hook" else modules[target](plan, gaps=gaps)
    for enforcement_path in paths[1:]:
        write_text(enforcement_path, to_json(enforcement))
    write_text(path, text)
    if as_json:
        names = [str(written) for written in paths]
        sha, size = plan_hash(plan), plan.world_size
        print_json(EmitResult(target=target, paths=names, world_size=size, plan_sha256=sha, not_expressed=gaps))
        return
    for gap in gaps:
        note(f"not expressed by {target}: {gap}")
    if str(path) != "-":
        sizes = [str(rank.local_batch_size) for rank in enforcement.ranks]
        batches = ", ".join([*sizes[:16], *(["..."] if len(sizes) > 16 else [])])
        say(f"wrote {' and '.join(map(str, paths))}: {len(sizes)} processes, local batch sizes {batches}")


def _launcher_text(
    plan: Plan,
    enforcement: Enforcement,
    target: Target,
    process_layout: ProcessLayout,
    settings: LaunchSettings,
    script_gaps: Sequence[str],
) -> tuple[str, list[str]]:
    """Return the script or manifest that starts the plan, and its gaps: fields that it lacks, and its assumptions."""
    gaps = [*not_expressed(plan, target, process_layout), *script_gaps]
    if target == "torchrun":
        return torchrun_script(plan, process_layout, settings, gaps=gaps), gaps
    if target == "slurm":
        if settings.resource is not None:
            types = ", ".join(sorted({gres_type(group.device_type) for group in process_layout.groups}))
            gaps.append(f"GRES types: the site must name its devices {types} (--resource none asks for none)")
        limits = "the partition's own time limit (sbatch options override)"
        gaps.append(f"cores and time: {CORES} cores a process, {limits}")
        return slurm_script(plan, process_layout, settings, gaps=gaps), gaps
    gaps += assumptions(settings, plan)
    return manifest_text(plan, manifests(plan, enforcement, process_layout, settings), process_layout, gaps), gaps


def _label_values(text: str, device_types: Sequence[str]) -> dict[str, str]:
    """Parse ``T4=Tesla-T4,V100=Tesla-V100`` to node label values by device type.

    Raises InputError for a device type that the plan does not use.
    """
    values_by_type = pairs(text, "--label-value", "TYPE=VALUE", "T4=Tesla-T4", _NODE_VALUE)
    for device_type in values_by_type:
        known("--label-value", device_type, device_types)
    return values_by_type


def _read_devices_per_node(text: str, option: str) -> dict[str, int] | int:
    """Parse ``8`` to one number for every device type, ``V100=8,T4=1`` to numbers by device type."""
    return device_counts(text, option) if "=" in text else integers(text, option, most=999_999)[0]


def _checked_cluster_name(option: str, name: str, target: str) -> str:
    """Return the option's value. Raises InputError where the target cluster's syntax of names excludes it."""
    patterns = {"--image": _IMAGE_NAME, "--queue": _LABEL_VALUE}
    pattern = _SLURM_NAME if target == "slurm" else patterns.get(option, _LABEL_KEY)
    if not re.fullmatch(pattern, name):
        quoted = shortened(name, 80)
        raise InputError(option, f"is {quoted!r}, which no cluster takes as a name", f"expected {pattern}")
    return name
