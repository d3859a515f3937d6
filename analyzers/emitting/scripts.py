"""A plan as shell scripts: torchrun on every node, and Slurm's sbatch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from ddltool.analyzers.emitting.layout import Layout, NodeGroup, cluster_name, one_word, plan_hash
from ddltool.plan import Plan

_WIDTH = 110


def torchrun_script(plan: Plan, layout: Layout, *, script: Sequence[str], gaps: Sequence[str]) -> str:
    """Return a bash script that starts a node's processes; it is run once on every node.

    ``script`` is the training script with its arguments; the script's own arguments are appended. On several nodes it
    asks for ``NODE_RANK`` and ``MASTER_ADDR``, and a node's rank decides how many processes it starts. torchrun's
    static rendezvous numbers the processes node by node, so rank r is rank r of the plan.
    """
    lines = ["#!/usr/bin/env bash", *_comments(plan, layout, gaps), "set -euo pipefail", *_environment(plan)]
    words = shlex.join(script)
    if layout.nodes == 1:
        count = layout.groups[0].processes_per_node
        return _text([*lines, f'exec torchrun --standalone --nproc-per-node {count} {words} "$@"'])
    last = layout.nodes - 1
    lines += [
        f': "${{NODE_RANK:?set it to the rank of this node, 0 to {last}}}"',
        ': "${MASTER_ADDR:?set it to the address of node 0}"',
        f'[[ "$NODE_RANK" =~ ^[0-9]{{1,9}}$ ]] && ((10#$NODE_RANK <= {last})) || '
        f'{{ echo "NODE_RANK is $NODE_RANK; expected 0 to {last}" >&2; exit 2; }}',
    ]
    for group in layout.groups:
        command = _torchrun(layout, group, '"$NODE_RANK"')
        lines.append(f"# {group.text}")
        lines.append(f'if ((10#$NODE_RANK < {group.first_node + group.nodes})); then exec {command} {words} "$@"; fi')
    return _text(lines)


def slurm_script(
    plan: Plan,
    layout: Layout,
    *,
    script: Sequence[str],
    gaps: Sequence[str],
    gres: str | None = "gpu",
    partition: str | None = None,
) -> str:
    """Return a batch script for sbatch: one task per node, which starts the node's processes with torchrun.

    Unlike nodes are the components of a heterogeneous job (``#SBATCH hetjob``), in the order of ranks. ``gres`` is the
    name of the generic resource, asked for as ``GRES:TYPE:COUNT`` with the device type in small letters; None asks for
    none.
    """
    lines = ["#!/bin/bash"]
    for place, group in enumerate(layout.groups):
        # --comment and --job-name are propagated to later components; the resources are not.
        lines += (
            ["#SBATCH hetjob"]
            if place
            else [
                f"#SBATCH --job-name={cluster_name(plan.job)}",
                f"#SBATCH --comment=ddltool-plan-sha256:{plan_hash(plan)}",
            ]
        )
        lines += [f"#SBATCH --nodes={group.nodes}", "#SBATCH --ntasks-per-node=1"]
        lines += [f"#SBATCH --partition={partition}"] if partition else []
        lines += [f"#SBATCH --gres={gres}:{gres_type(group.device_type)}:{group.processes_per_node}"] if gres else []
    lines += [*_comments(plan, layout, gaps), "set -euo pipefail", *_environment(plan)]
    mixed = len(layout.groups) > 1
    names = [
        f"SLURM_JOB_NODELIST_HET_GROUP_{place}" if mixed else "SLURM_JOB_NODELIST"
        for place in range(len(layout.groups))
    ]
    lines += [f'hosts_{place}=$(scontrol show hostnames "${name}")' for place, name in enumerate(names)]
    lines += [
        "export MASTER_ADDR=\"${MASTER_ADDR:-${hosts_0%%$'\\n'*}}\"",
        'export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"',
        "# $1: the nodes of a component, one a line; $2: the rank of its first node. Prints the rank of this node.",
        "node_rank() {",
        "  local n=0 host",
        '  for host in $1; do [ "$host" != "$SLURMD_NODENAME" ] || echo $(($2 + n)); n=$((n + 1)); done',
        "}",
        "export -f node_rank",
        "export " + " ".join(f"hosts_{place}" for place in range(len(names))),
    ]
    steps = []
    for place, group in enumerate(layout.groups):
        rank = f'"$(node_rank "$hosts_{place}" {group.first_node})"'
        command = f'exec {_torchrun(layout, group, rank)} {shlex.join(script)} "$@"'
        chosen = f"--het-group={place} " if mixed else ""
        steps.append(f'{chosen}bash -c {shlex.quote(command)} bash "$@"')
    lines.append("srun --kill-on-bad-exit=1 " + " \\\n  : ".join(steps))
    return _text(lines)


def gres_type(device_type: str) -> str:
    """Return a device type as the type of a generic resource: small letters, digits, ``_``, ``-`` and ``.``."""
    return re.sub(r"[^a-z0-9_.-]+", "_", device_type.lower()).strip("_") or "any"


def _torchrun(layout: Layout, group: NodeGroup, rank: str) -> str:
    """Return torchrun's part of a command line, for a node of a group."""
    return (
        f"torchrun --nnodes {layout.nodes} --node-rank {rank} --nproc-per-node {group.processes_per_node} "
        '--rdzv-backend static --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}"'
    )


def _comments(plan: Plan, layout: Layout, gaps: Sequence[str]) -> list[str]:
    """Return what people should know, as comment lines."""
    return [
        f"# Job {one_word(plan.job)}, strategy {plan.strategy}: {layout.processes} process(es) on {layout.nodes} node(s)",
        f"# Plan SHA-256: {plan_hash(plan)}",
        *(f"# {group.text}" for group in layout.groups),
        *(f"# Not expressed here: {gap}" for gap in gaps),
    ]


def _environment(plan: Plan) -> list[str]:
    """Return the variables by which a process can tell which plan started it."""
    return [f"export DDLTOOL_PLAN_SHA256={plan_hash(plan)}", f"export DDLTOOL_JOB={cluster_name(plan.job)}"]


def _text(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
