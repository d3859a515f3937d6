"""``ddltool emit PLAN``: a plan as the configuration or script of the program that will run it."""

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
from ddltool.commands.verbs import VerbCall, demand_part, is_given, verb
from ddltool.errors import InputError, known, shortened
from ddltool.plans import EmitResult, Plan

# Targets that can start a parameter server.
_PARAMETER_SERVER_TARGETS = ("hook", "torchrun")
_COMMON_OPTIONS = {"plan", "output", "target", "telemetry", "script"}
_SIZES_SHOWN = 16
_LAUNCHERS = ("torchrun", "slurm", "kubernetes")
# Options that have an effect for these targets only.
_TARGET_OPTIONS = {
    "torchrun": {"devices_per_node"},
    "slurm": {"devices_per_node", "queue", "resource"},
    "kubernetes": {"devices_per_node", "queue", "resource", "image", "kind", "node_label", "label_value"},
    "accelerate": {"devices_per_node"},
    "torchtitan": {"devices_per_node"},
}
# What Kubernetes and Slurm take as names; they go into scripts and manifests, where any other text could do harm.
_LABEL_KEY = r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_NODE_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_VALUE = r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?"
# registry.example:5000/team/name:tag@sha256:digest
_IMAGE_NAME = r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}"
_SLURM_NAME = r"[A-Za-z0-9_.,/-]+"


@verb
def emit(
    plan: Path | Plan,
    target: Annotated[Target, one_of(*DEFAULT_FILES)] = "hook",
    output: Path | None = None,
    *,
    telemetry: str = "telemetry.jsonl",
    script: str = "train.py",
    devices_per_node: Annotated[dict[str, int] | int | None, _read_devices_per_node] = None,
    queue: str | None = None,
    resource: str | None = None,
    image: str | None = None,
    kind: Annotated[Kind | None, one_of(*get_args(Kind))] = None,
    node_label: str = "ddltool/device-type",
    label_value: str = "",
) -> EmitResult:
    """Write the enforcement config, launch script, manifest or settings that make a job follow a plan.

    ``plan``: a Plan or its file. ``target``: the program that reads the output. ``output``: its file; None: the target's
    default name; "-": stdout. For the others see the options of ``ddltool emit``.

    Returns the files that were written, and the parts of the plan that the target cannot express. Raises InputError for
    a plan that the target cannot express at all, an option without effect, and a file that cannot be written.
    """
    where = str(plan) if isinstance(plan, (str, Path)) else "plan"
    followed = plan if isinstance(plan, Plan) else load(plan, Plan)
    output = None if output is None else Path(output)
    if followed.group is not None and output is None and not is_given("target"):
        target = "torchtitan"  # the default, the hook, does not run groups
    known("target", target, [*DEFAULT_FILES])
    demand_part(f"--target {target}", _COMMON_OPTIONS | _TARGET_OPTIONS.get(target, set()))
    path = output or Path(DEFAULT_FILES[target])
    if not (telemetry.strip() and telemetry.isprintable()):
        problem = f"is {telemetry!r}, which is no name of a file"
        raise InputError("--telemetry", problem, "give a file such as telemetry.jsonl, or none")
    demand_words_for_groups(followed, target, where)
    # Scripts need enforce.json beside them; a manifest contains it, the hook's output is it, and groups have none.
    writes_config = target in ("torchrun", "slurm") and str(path) != "-" and followed.group is None
    paths = [path, path.with_name("enforce.json")] if writes_config else [path]
    check_outputs([] if isinstance(plan, Plan) else [plan], dict(zip(("-o", "enforce.json"), paths, strict=False)))
    if followed.strategy == "elastic-bsp" and target not in _PARAMETER_SERVER_TARGETS:
        problem = f"has no parameter server, which {where}, an elastic-bsp plan, needs"
        raise InputError(f"--target {target}", problem, f"give --target {' or '.join(_PARAMETER_SERVER_TARGETS)}")
    enforcement = to_enforcement(followed, telemetry=None if telemetry == "none" else telemetry)
    # A launcher gets the script and the names of the cluster; other targets read the plan alone.
    if target in _LAUNCHERS:
        resource_name = _checked_cluster_name(
            "--resource", resource or ("gpu" if target == "slurm" else "nvidia.com/gpu"), target
        )
        settings = LaunchSettings(
            script=words(script, "--script"),
            image=None if image is None else _checked_cluster_name("--image", image, target),
            resource=None if resource_name == "none" else resource_name,
            node_label=_checked_cluster_name("--node-label", node_label, "kubernetes"),
            label_values=_label_values(label_value, [row.device_type for row in followed.assignments]),
            queue=None if queue is None else _checked_cluster_name("--queue", queue, target),
            kind=kind,
        )
        script_gaps = _script_gaps(script, target, path.parent)
        groups = layout(followed, devices_per_node)
        text, gaps = launcher_text(followed, target, groups, enforcement, settings, script_gaps)
    else:
        text, gaps = target_text(followed, target, enforcement, devices_per_node)
    for enforcement_path in paths[1:]:  # enforce.json, if it is a file of its own
        write_text(enforcement_path, to_json(enforcement))
    write_text(path, text)
    return EmitResult(
        target=target,
        paths=[str(written) for written in paths],
        world_size=followed.processes,
        plan_sha256=plan_hash(followed),
        not_expressed=gaps,
        local_batch_sizes=[rank.local_batch_size for rank in enforcement.ranks],
        group=followed.group,
    )


def show_emit(call: VerbCall[EmitResult], as_json: bool = False) -> None:
    """Print the written files, and the parts of the plan that the target cannot express.

    Raises InputError for ``as_json`` if the output itself goes to stdout.
    """
    if as_json and str(call["output"]) == "-":
        raise InputError("--json", "cannot share stdout with -o -", "give -o a file name")
    written = call()
    if as_json:
        print_json(written)
        return
    for gap in written.not_expressed:
        note(f"not expressed by {written.target}: {gap}")
    if written.paths != ["-"]:
        sizes = [*map(str, written.local_batch_sizes)]
        shown_sizes = sizes if len(sizes) <= _SIZES_SHOWN else [*sizes[:_SIZES_SHOWN], "..."]
        batches = ", ".join(shown_sizes)
        groups = "" if written.group is None else f" in {len(sizes)} groups of {written.group.text}"
        files = " and ".join(written.paths)
        say(f"wrote {files}: {written.world_size} processes{groups}, local batch sizes {batches}")


def _script_gaps(script: str, target: str, folder: Path) -> list[str]:
    """Return a sentence on the training script if it is found nowhere, as a list of one; [] if there is nothing to report.

    The default script is looked for in the current folder and in the output's ``folder``. A script that the user named is
    trusted, and one that runs in a container of Kubernetes is not visible from here. ``target``: the program that starts it.
    """
    is_trusted = is_given("script") or target == "kubernetes"
    if is_trusted or any((place / script).exists() for place in (Path(), folder)):
        return []
    return [f"script: {script} is started, and there is none here (--script names yours)"]


def _label_values(text: str, device_types: Sequence[str]) -> dict[str, str]:
    """Return the node label's values by device type in a text such as ``T4=Tesla-T4,V100=Tesla-V100``.

    Raises InputError for other texts, and for a type that is not in ``device_types``, those of the plan.
    """
    values_by_type = pairs(text, "--label-value", "TYPE=VALUE", "T4=Tesla-T4", _NODE_VALUE)
    for device_type in values_by_type:
        known("--label-value", device_type, device_types)
    return values_by_type


def _read_devices_per_node(text: str, option: str) -> dict[str, int] | int:
    """Return the number in a text ``8``, for all device types, or the numbers by type in ``V100=8,T4=1``.

    Raises InputError, naming ``option``, for other texts.
    """
    return device_counts(text, option) if "=" in text else integers(text, option, most=999_999)[0]


def _checked_cluster_name(option: str, name: str, target: str) -> str:
    """Return ``name`` unchanged. Raises InputError if the cluster's software would refuse it as a name.

    ``option``: the option that has the name, which decides what is allowed. ``target``: "slurm"; any other stands for
    Kubernetes.
    """
    patterns = {"--image": _IMAGE_NAME, "--queue": _LABEL_VALUE}
    pattern = _SLURM_NAME if target == "slurm" else patterns.get(option, _LABEL_KEY)
    if not re.fullmatch(pattern, name):
        quoted = shortened(name, 80)
        raise InputError(option, f"is {quoted!r}, which no cluster takes as a name", f"expected {pattern}")
    return name
