"""A plan as Kubernetes objects: a TrainJob (Kubeflow Trainer) if all nodes are equal, else a JobSet."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ddltool.analyzers.answers.emitting.layout import (
    EqualNodes,
    LaunchSettings,
    ProcessLayout,
    cluster_name,
    node_value,
    plan_hash,
)
from ddltool.analyzers.answers.emitting.scripts import remarks
from ddltool.artifacts import to_json
from ddltool.errors import InputError, shortened
from ddltool.plans import Enforcement, Plan

_LONGEST_NAME = 1000  # characters of a job's name in an annotation; all annotations together may have 256 KiB
_PORT = 29500
_IMAGE = "pytorch/pytorch:latest"
_VOLUME = "ddltool-plan"
_FOLDER = "/etc/ddltool"
# Data loaders and NCCL need more shared memory than the 64 MiB that a container has by default.
_MOUNTS = [
    {"name": _VOLUME, "mountPath": _FOLDER, "readOnly": True},
    {"name": "shared-memory", "mountPath": "/dev/shm"},
]
# A ConfigMap holds 1 MiB; the rest is for metadata and the manifest's own escapes.
_CONFIG_BYTES = 1_000_000
_RUNTIME = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed"}


def manifests(
    plan: Plan, enforcement: Enforcement, layout: ProcessLayout, settings: LaunchSettings
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two documents: the ConfigMap with the hook's ``enforcement``, and the job that mounts it under /etc/ddltool.

    The file is enforce.json; for a plan of groups of devices, which the hook does not run, it is plan.json with the plan.
    Raises InputError for a TrainJob of different nodes, and for a configuration that is too large for a ConfigMap.
    """
    if plan.group is None:
        file = "enforce.json"
        config = to_json(enforcement)
    else:
        file = "plan.json"
        config = to_json(plan)
    if len(config.encode("utf-8")) > _CONFIG_BYTES:
        problem = f"is larger than {_CONFIG_BYTES} bytes"
        raise InputError(file, problem, "mount it from a volume; --target slurm or torchrun read it as a file")
    metadata = {"name": f"{cluster_name(plan.job)}-plan", **_marks(plan)}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {file: config}}
    kind = settings.kind or ("TrainJob" if len(layout.groups) == 1 else "JobSet")
    make_job = _train_job if kind == "TrainJob" else _job_set
    return config_map, make_job(plan, layout, settings)


def manifest_text(plan: Plan, documents: Sequence[dict[str, Any]], layout: ProcessLayout, gaps: Sequence[str]) -> str:
    """Return the documents as the text of one YAML file, with the plan's hash, the nodes and the gaps in comments on top."""
    plain = json.loads(json.dumps(documents))  # copied, as YAML would write objects that are shared as aliases
    bodies = (yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=10**6) for document in plain)
    return remarks(plan, layout, gaps) + "---\n" + "---\n".join(bodies)


def assumptions(settings: LaunchSettings, plan: Plan) -> list[str]:
    """Return gaps for what the manifest assumes of the cluster, each ``PART: remedy``: node labels, and an image."""
    values = ", ".join(sorted({node_value(row.device_type, settings) for row in plan.assignments}))
    gaps = [
        f"node labels: nodes must carry {settings.node_label} with the values {values} (--node-label, --label-value)"
    ]
    if not settings.image:
        gaps.append(f"image: no --image; {_IMAGE} holds neither the script nor ddltool")
    return gaps


def _train_job(plan: Plan, layout: ProcessLayout, settings: LaunchSettings) -> dict[str, Any]:
    """Return a TrainJob (Kubeflow Trainer v2). Its runtime tells torchrun the nodes by environment variables (PET_...).

    Raises InputError for a ``layout`` of different nodes, as a TrainJob has one kind of node.
    """
    if len(layout.groups) > 1:
        groups_text = "; ".join(group.text for group in layout.groups)
        raise InputError("TrainJob", f"has one kind of node, the plan needs {groups_text}", "use --kind JobSet")
    group = layout.groups[0]
    container = {"name": "node", "volumeMounts": _MOUNTS}
    pod = {"nodeSelector": _selector(group, settings), "volumes": _volumes(plan), "containers": [container]}
    replicated = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    patch = {
        "manager": "ddltool/emit",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": replicated}}},
    }
    trainer: dict[str, Any] = {
        "image": settings.image or _IMAGE,
        "command": ["torchrun", *(_literal(word) for word in settings.script)],
        "env": _variables(plan),
        **_size(group, settings.resource),
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(plan, settings),
        "spec": {"runtimeRef": _RUNTIME, "trainer": trainer, "runtimePatches": [patch]},
    }


def _size(group: EqualNodes, resource: str | None) -> dict[str, Any]:
    """Return the fields of a TrainJob's trainer for its numbers of nodes, processes of a node and devices of a node.

    ``resource``: the devices' resource name in Kubernetes, such as nvidia.com/gpu; None: no devices are requested.
    """
    size: dict[str, Any] = {"numNodes": group.nodes, "numProcPerNode": group.processes_per_node}
    if resource is not None:
        size["resourcesPerNode"] = _resources(group, resource)
    return size


def train_job_patch(group: EqualNodes, resource: str | None, notes: Mapping[str, str]) -> dict[str, Any]:
    """Return the merge patch that gives a suspended TrainJob the nodes and processes of ``group``.

    A recommender of Kubeflow's KEP-3328 applies it: ``kubectl patch trainjob NAME --type merge --patch-file FILE``.
    ``resource``: the devices' resource name; None: none is requested. ``notes``: annotations, stored as ``ddltool/NAME``.
    """
    marks = {f"ddltool/{name}": text for name, text in notes.items()}
    return {"metadata": {"annotations": marks}, "spec": {"trainer": _size(group, resource)}}


def _job_set(plan: Plan, layout: ProcessLayout, settings: LaunchSettings) -> dict[str, Any]:
    """Return a JobSet, Kubernetes' object for several jobs together, with one replicated job per group of equal nodes.

    Each is an indexed Job: a pod's index plus the rank of the group's first node is the node's rank. ``layout``: the
    groups of nodes; ``settings``: the training script, and what else the launcher needs beside the plan.
    """
    name = cluster_name(plan.job)
    jobs = []
    for index, group in enumerate(layout.groups):
        template = {"metadata": _marks(plan), "spec": _pod(plan, layout, group, settings)}
        spec = {
            "parallelism": group.nodes,
            "completions": group.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": template,
        }
        jobs.append({"name": f"g{index}", "replicas": 1, "template": {"spec": spec}})
    # Pods find the first node by its host name, which must resolve before that pod is ready.
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(plan, settings),
        "spec": {"network": network, "replicatedJobs": jobs},
    }


def _pod(plan: Plan, layout: ProcessLayout, group: EqualNodes, settings: LaunchSettings) -> dict[str, Any]:
    """Return the spec of a pod, one node of ``group``: its shell computes the node's rank from the pod's index.

    The shell then replaces itself (``exec``) by torchrun, which starts the node's processes. ``layout``: all nodes of the
    job; ``settings``: the training script, the image and the devices' resource name.
    """
    name = cluster_name(plan.job)
    command = (
        f'exec torchrun --nnodes {layout.nodes} --node-rank "$(({group.first_node} + JOB_COMPLETION_INDEX))" '
        f"--nproc-per-node {group.processes_per_node} --rdzv-backend static --master-addr {name}-g0-0-0.{name} "
        f"--master-port {_PORT} {_literal(shlex.join(settings.script))}"
    )
    container: dict[str, Any] = {
        "name": "node",
        "image": settings.image or _IMAGE,
        "command": ["sh", "-c", command],
        "env": _variables(plan),
        "volumeMounts": _MOUNTS,
    }
    if settings.resource:
        container["resources"] = _resources(group, settings.resource)
    return {
        "restartPolicy": "Never",
        "nodeSelector": _selector(group, settings),
        "containers": [container],
        "volumes": _volumes(plan),
    }


def _literal(text: str) -> str:
    """Return ``text`` with every ``$`` doubled, so that Kubernetes does not expand ``$(NAME)`` in a command."""
    return text.replace("$", "$$")


def _metadata(plan: Plan, settings: LaunchSettings) -> dict[str, Any]:
    """Return the metadata of a job: its name, the plan's labels and annotations, and Kueue's queue if one is given."""
    marks = _marks(plan)
    queue = {"kueue.x-k8s.io/queue-name": settings.queue} if settings.queue else {}
    return {"name": cluster_name(plan.job), **marks, "labels": marks["labels"] | queue}


def _marks(plan: Plan) -> dict[str, dict[str, str]]:
    """Return the labels and annotations that identify the plan by its SHA-256.

    The label has the first 16 of its 64 digits, as a label is limited to 63 characters; the annotation has all.
    """
    sha = plan_hash(plan)
    return {
        "labels": {"app.kubernetes.io/managed-by": "ddltool", "ddltool/plan": sha[:16]},
        "annotations": {"ddltool/plan-sha256": sha, "ddltool/job": shortened(plan.job, _LONGEST_NAME)},
    }


def _variables(plan: Plan) -> list[dict[str, str]]:
    """Return Kubernetes' list of the environment variables that tell a process its plan, its job and the hook's file."""
    values = {"DDLTOOL_PLAN_SHA256": plan_hash(plan), "DDLTOOL_JOB": cluster_name(plan.job)}
    if plan.group is None:  # the hook does not run groups of devices, so there is no file for it
        values["DDLTOOL_ENFORCE"] = f"{_FOLDER}/enforce.json"
    return [{"name": name, "value": value} for name, value in values.items()]


def _resources(group: EqualNodes, resource: str) -> dict[str, Any]:
    """Return the resource request of a pod: one ``resource`` (such as nvidia.com/gpu) for each of its processes."""
    counts = {resource: str(group.processes_per_node)}
    return {"limits": counts, "requests": counts}


def _selector(group: EqualNodes, settings: LaunchSettings) -> dict[str, str]:
    """Return the node selector: the label of nodes that have the group's device type."""
    return {settings.node_label: node_value(group.device_type, settings)}


def _volumes(plan: Plan) -> list[dict[str, Any]]:
    """Return the volumes that ``_MOUNTS`` mounts: the plan's ConfigMap and shared memory."""
    return [
        {"name": _VOLUME, "configMap": {"name": f"{cluster_name(plan.job)}-plan"}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
