#!/bin/bash
{# --comment and --job-name are propagated to later components; the resources are not. #}
{% for group in groups %}
{% if loop.first %}
#SBATCH --job-name={{ name }}
#SBATCH --comment=ddltool-plan-sha256:{{ sha }}
#SBATCH --output=%x-%j.out
# No plan knows what lines of two # ask for: fill in what your cluster wants, and take one # away.
##SBATCH --time=24:00:00
##SBATCH --account=
{% else %}
#SBATCH hetjob
{% endif %}
#SBATCH --nodes={{ group.nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={{ cores * group.processes_per_node }}
{% if partition %}
#SBATCH --partition={{ partition }}
{% else %}
##SBATCH --partition=
{% endif %}
##SBATCH --mem=0
{% if gres %}
#SBATCH --gres={{ gres }}:{{ gres_type(group.device_type) }}:{{ group.processes_per_node }}
{% endif %}
{% endfor %}
{% include "head.txt" %}
set -euo pipefail
export DDLTOOL_PLAN_SHA256={{ sha }}
export DDLTOOL_JOB={{ name }}
{% if enforced %}
# sbatch runs a copy of this file: enforce.json lies in the folder in which sbatch was called.
export DDLTOOL_ENFORCE="${DDLTOOL_ENFORCE-${SLURM_SUBMIT_DIR:-$PWD}/enforce.json}"
{% endif %}
{% set mixed = groups|length > 1 %}
{% for group in groups %}
hosts_{{ loop.index0 }}=$(scontrol show hostnames "$SLURM_JOB_NODELIST{{ "_HET_GROUP_%d" % loop.index0 if mixed else "" }}")
{% endfor %}
export MASTER_ADDR="${MASTER_ADDR:-${hosts_0%%$'\n'*}}"
export MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
# $1: the nodes of a component, one a line; $2: the rank of its first node. Prints the rank of this node.
node_rank() {
  local n=0 host
  for host in $1; do [ "$host" != "$SLURMD_NODENAME" ] || echo $(($2 + n)); n=$((n + 1)); done
}
export -f node_rank
export{% for group in groups %} hosts_{{ loop.index0 }}{% endfor %}

# Since Slurm 22.05 srun takes no cores from sbatch by itself. What stands in quotes each node expands.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1{% for group in groups %}
{% set rank = '"$(node_rank "$hosts_%d" %d)"' % (loop.index0, group.first_node) %}
{{ "" if loop.first else " \\\n  :" }}{{ " --het-group=%d" % loop.index0 if mixed else "" }} --cpus-per-task="${SLURM_CPUS_PER_TASK{{ "_HET_GROUP_%d" % loop.index0 if mixed else "" }}:-{{ cores * group.processes_per_node }}}" bash -c {{ quote("exec %s %s \"$@\"" % (torchrun(group, rank), script)) }} bash "$@"{% endfor %}

