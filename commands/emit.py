"""``ddltool emit PLAN``: a plan in the words of what will run it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

from ddltool.analyzers.answers.emitting.enforcement import Target, demand_words_for_groups, to_enforcement
from ddltool.analyzers.answers.emitting.layout import Kind, LaunchSettings, layout, plan_hash
from ddltool.analyzers.answers.emitting.targets import DEFAULT_FILES, launcher_text, target_text
from ddltool.artifacts import check_outputs, load, to_json, write_text
from ddltool.commands.options import device_counts, integers, one_of, pairs, words
from ddltool.commands.output import note, print_json, say
from ddltool.commands.verbs import demand_part, is_given
from ddltool.errors import InputError, known, shortened
from ddltool.plans import Plan
from ddltool.results import EmitResult

_PARAMETER_SERVER_TARGETS = ("hook", "torchrun")
_COMMON_OPTIONS = {"plan_file", "output", "target", "telemetry", "script", "as_json"}
_LAUNCHERS = ("torchrun", "slurm", "kubernetes")
# Options that only these targets read.
_TARGET_OPTIONS = {
    "torchrun": {"devices_per_node"},
    "slurm": {"devices_per_node", "queue", "resource"},
    "kubernetes": {"devices_per_node", "queue", "resource", "image", "kind", "node_label", "label_value"},
    "accelerate": {"devices_per_node"},
    "torchtitan": {"devices_per_node"},
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
    target: Annotated[Target, one_of(*DEFAULT_FILES)] = "hook",
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
    plan = load(plan_file, Plan)
    if plan.group is not None and output is None and not is_given("target"):
        target = "torchtitan"  # the hook runs no groups
    demand_part(f"--target {target}", _COMMON_OPTIONS | _TARGET_OPTIONS.get(target, set()))
    path = output or Path(DEFAULT_FILES[target])
    if as_json and str(path) == "-":
        raise InputError("--json", "cannot share stdout with -o -", "give -o a file name")
    if not (telemetry.strip() and telemetry.isprintable()):
        problem = f"is {telemetry!r}, which is no name of a file"
        raise InputError("--telemetry", problem, "give a file such as telemetry.jsonl, or none")
    demand_words_for_groups(plan, target, str(plan_file))
    # A manifest embeds enforce.json; for the hook it is the output itself, and it has no words for groups.
    brings = target in ("torchrun", "slurm") and str(path) != "-" and plan.group is None
    paths = [path, path.with_name("enforce.json")] if brings else [path]
    check_outputs([plan_file], dict(zip(("-o", "enforce.json"), paths, strict=False)))
    if plan.strategy == "elastic-bsp" and target not in _PARAMETER_SERVER_TARGETS:
        problem = f"has no parameter server, which {plan_file}, an elastic-bsp plan, needs"
        raise InputError(f"--target {target}", problem, f"give --target {' or '.join(_PARAMETER_SERVER_TARGETS)}")
    enforcement = to_enforcement(plan, telemetry=None if telemetry == "none" else telemetry)
    if target in _LAUNCHERS:
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
        script_gaps = []
        is_said = is_given("script") or target == "kubernetes"
        if not is_said and not any((folder / script).exists() for folder in (Path(), path.parent)):
            script_gaps = [f"script: {script} is started, and there is none here (--script names yours)"]
        text, gaps = launcher_text(plan, target, layout(plan, devices_per_node), enforcement, settings, script_gaps)
    else:
        text, gaps = target_text(plan, target, enforcement, devices_per_node)
    for enforcement_path in paths[1:]:
        write_text(enforcement_path, to_json(enforcement))
    write_text(path, text)
    if as_json:
        names = [str(written) for written in paths]
        sha, size = plan_hash(plan), plan.processes
        print_json(EmitResult(target=target, paths=names, world_size=size, plan_sha256=sha, not_expressed=gaps))
        return
    for gap in gaps:
        note(f"not expressed by {target}: {gap}")
    if str(path) != "-":
        sizes = [str(rank.local_batch_size) for rank in enforcement.ranks]
        batches = ", ".join([*sizes[:16], *(["..."] if len(sizes) > 16 else [])])
        groups = "" if plan.group is None else f" in {len(sizes)} groups of {plan.group.text}"
        say(f"wrote {' and '.join(map(str, paths))}: {plan.processes} processes{groups}, local batch sizes {batches}")


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
