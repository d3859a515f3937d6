"""A plan as Kubernetes objects: a TrainJob (Kubeflow Trainer), a PyTorchJob (Training Operator) or a JobSet."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from ddltool.analyzers.emitting.layout import Layout, NodeGroup, cluster_name, label_value, one_word, plan_hash
from ddltool.artifacts import to_json
from ddltool.errors import InputError, shortened
from ddltool.plan import Enforcement, Plan

Kind = Literal["TrainJob", "PyTorchJob", "JobSet"]
KINDS: tuple[Kind, ...] = ("TrainJob", "PyTorchJob", "JobSet")

_LONGEST_NAME = 1000  # of a job in an annotation; all annotations together may have 256 KiB
_PORT = 29500
_MOUNT = "/etc/ddltool"
_VOLUME = "ddltool-plan"
# A ConfigMap holds 1 MiB; the rest is for metadata and the manifest's own escapes.
_CONFIG_BYTES = 1_000_000
_RUNTIME = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSettings:
    """What a manifest says that a plan does not know."""

    script: Sequence[str]
    image: str
    resource: str | None = "nvidia.com/gpu"
    """The extended resource of a device; None: none is asked for."""
    node_label: str = "ddltool/device-type"
    """The node label whose value is the device type."""
    queue: str | None = None
    """Kueue's LocalQueue."""


def choose_kind(layout: Layout) -> Kind:
    """Return TrainJob where all nodes are alike, which is all it can say, else JobSet."""
    return "TrainJob" if len(layout.groups) == 1 else "JobSet"


def manifests(
    plan: Plan, enforcement: Enforcement, layout: Layout, settings: ClusterSettings, kind: Kind
) -> list[dict[str, Any]]:
    """Return the ConfigMap with enforce.json and the job that mounts it as ``/etc/ddltool/enforce.json``.

    Raises InputError when ``kind`` has no words for the nodes: a TrainJob has one kind of node, a PyTorchJob one
    master and equal workers; also for a config that no ConfigMap can hold.
    """
    make = {"TrainJob": _train_job, "PyTorchJob": _pytorch_job, "JobSet": _job_set}[kind]
    config = to_json(enforcement)
    if len(config.encode("utf-8")) > _CONFIG_BYTES:
        raise InputError(
            "enforce.json",
            f"is larger than {_CONFIG_BYTES} bytes",
            "mount it from a volume; --target slurm or torchrun read it as a file",
        )
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**_metadata(plan, None), "name": f"{cluster_name(plan.job)}-plan"},
        "data": {"enforce.json": config},
    }
    return [config_map, make(plan, layout, settings)]


def manifest_text(plan: Plan, documents: Sequence[dict[str, Any]], layout: Layout, gaps: Sequence[str]) -> str:
    """Return the documents as one YAML file, with comments at its top."""
    comments = [
        f"# Job {one_word(plan.job)}, strategy {plan.strategy}: {layout.processes} process(es) on {layout.nodes} node(s)",
        f"# Plan SHA-256: {plan_hash(plan)}",
        *(f"# {group.text}" for group in layout.groups),
        *(f"# Not expressed here: {gap}" for gap in gaps),
    ]
    body = "---\n".join(
        yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=10**6) for document in documents
    )
    return "\n".join(comments) + "\n---\n" + body


def assumptions(settings: ClusterSettings, plan: Plan) -> list[str]:
    """Return what the cluster must have for the manifest to work."""
    values = ", ".join(sorted({label_value(row.device_type) for row in plan.assignments}))
    return [f"node labels: nodes must carry {settings.node_label} with the values {values} (--node-label)"]


def _train_job(plan: Plan, layout: Layout, settings: ClusterSettings) -> dict[str, Any]:
    """Kubeflow Trainer v2: the runtime's torch policy gives torchrun its PET_ variables."""
    if len(layout.groups) > 1:
        shown = "; ".join(group.text for group in layout.groups)
        raise InputError("TrainJob", f"has one kind of node, the plan needs {shown}", "use --kind JobSet")
    group = layout.groups[0]
    container = {"name": "node", "volumeMounts": [_mount()]}
    pod = {"nodeSelector": _selector(group, settings), "volumes": [_volume(plan)], "containers": [container]}
    patch = {
        "manager": "ddltool/emit",
        "trainingRuntimeSpec": {
            "template": {
                "spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}
            }
        },
    }
    trainer: dict[str, Any] = {
        "image": settings.image,
        "command": ["torchrun", *(_literal(word) for word in settings.script)],
        "env": _variables(plan),
        "numNodes": group.nodes,
        "numProcPerNode": group.processes_per_node,
    }
    if settings.resource:
        trainer["resourcesPerNode"] = _resources(group, settings.resource)
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(plan, settings.queue),
        "spec": {"runtimeRef": dict(_RUNTIME), "trainer": trainer, "runtimePatches": [patch]},
    }


def _pytorch_job(plan: Plan, layout: Layout, settings: ClusterSettings) -> dict[str, Any]:
    """Training Operator v1: the master is node 0, worker i is node i + 1; the operator sets RANK to the node's rank."""
    first, last = layout.groups[0], layout.groups[-1]
    if len(layout.groups) > 2 or (len(layout.groups) == 2 and first.nodes > 1):
        problem = "has one master and equal workers, the plan needs " + "; ".join(group.text for group in layout.groups)
        raise InputError("PyTorchJob", problem, "use --kind JobSet")
    replicas: dict[str, Any] = {}
    for role, group, count in (("Master", first, 1), ("Worker", last, layout.nodes - 1)):
        if count:
            pod = _pod(plan, layout, group, settings, name="pytorch", rank='"$RANK"', address='"$MASTER_ADDR"')
            meta = {"labels": _labels(plan), "annotations": _annotations(plan)}
            replicas[role] = {
                "replicas": count,
                "restartPolicy": "OnFailure",
                "template": {"metadata": meta, "spec": {key: pod[key] for key in pod if key != "restartPolicy"}},
            }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(plan, settings.queue),
        "spec": {"runPolicy": {"cleanPodPolicy": "None"}, "pytorchReplicaSpecs": replicas},
    }


def _job_set(plan: Plan, layout: Layout, settings: ClusterSettings) -> dict[str, Any]:
    """JobSet: one replicated job per group of equal nodes, each an indexed Job whose index is the place in the group."""
    name = cluster_name(plan.job)
    jobs = []
    for place, group in enumerate(layout.groups):
        rank = f'"$(({group.first_node} + JOB_COMPLETION_INDEX))"'
        pod = _pod(plan, layout, group, settings, name="node", rank=rank, address=f"{name}-g0-0-0.{name}")
        jobs.append(
            {
                "name": f"g{place}",
                "replicas": 1,
                "template": {
                    "spec": {
                        "parallelism": group.nodes,
                        "completions": group.nodes,
                        "completionMode": "Indexed",
                        "backoffLimit": 0,
                        "template": {
                            "metadata": {"labels": _labels(plan), "annotations": _annotations(plan)},
                            "spec": pod,
                        },
                    }
                },
            }
        )
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(plan, settings.queue),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "replicatedJobs": jobs,
        },
    }


def _pod(
    plan: Plan, layout: Layout, group: NodeGroup, settings: ClusterSettings, *, name: str, rank: str, address: str
) -> dict[str, Any]:
    """Return the pod of a node: a shell that fills in the node's rank and becomes torchrun."""
    command = (
        f"exec torchrun --nnodes {layout.nodes} --node-rank {rank} --nproc-per-node {group.processes_per_node} "
        f"--rdzv-backend static --master-addr {address} --master-port {_PORT} {_literal(shlex.join(settings.script))}"
    )
    container: dict[str, Any] = {
        "name": name,
        "image": settings.image,
        "command": ["sh", "-c", command],
        "env": _variables(plan),
        "volumeMounts": [_mount()],
    }
    if settings.resource:
        container["resources"] = _resources(group, settings.resource)
    return {
        "restartPolicy": "Never",
        "nodeSelector": _selector(group, settings),
        "containers": [container],
        "volumes": [_volume(plan)],
    }


def _literal(text: str) -> str:
    """Return ``text`` so that Kubernetes, which expands ``$(NAME)`` in commands, leaves it as it is."""
    return text.replace("$", "$$")


def _metadata(plan: Plan, queue: str | None) -> dict[str, Any]:
    labels = _labels(plan) | ({"kueue.x-k8s.io/queue-name": queue} if queue else {})
    return {"name": cluster_name(plan.job), "labels": labels, "annotations": _annotations(plan)}


def _labels(plan: Plan) -> dict[str, str]:
    """Labels take 63 characters, a SHA-256 has 64: the label has 16, the annotation and the variable all."""
    return {"app.kubernetes.io/managed-by": "ddltool", "ddltool/plan": plan_hash(plan)[:16]}


def _annotations(plan: Plan) -> dict[str, str]:
    return {"ddltool/plan-sha256": plan_hash(plan), "ddltool/job": shortened(plan.job, _LONGEST_NAME)}


def _variables(plan: Plan) -> list[dict[str, str]]:
    return [
        {"name": "DDLTOOL_PLAN_SHA256", "value": plan_hash(plan)},
        {"name": "DDLTOOL_JOB", "value": cluster_name(plan.job)},
    ]


def _resources(group: NodeGroup, resource: str) -> dict[str, Any]:
    return {"limits": {resource: str(group.processes_per_node)}, "requests": {resource: str(group.processes_per_node)}}


def _selector(group: NodeGroup, settings: ClusterSettings) -> dict[str, str]:
    return {settings.node_label: label_value(group.device_type)}


def _mount() -> dict[str, Any]:
    return {"name": _VOLUME, "mountPath": _MOUNT, "readOnly": True}


def _volume(plan: Plan) -> dict[str, Any]:
    return {"name": _VOLUME, "configMap": {"name": f"{cluster_name(plan.job)}-plan"}}
