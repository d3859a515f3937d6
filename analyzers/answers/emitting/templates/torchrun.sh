#!/usr/bin/env bash
{% include "head.txt" %}
set -euo pipefail
export DDLTOOL_PLAN_SHA256={{ sha }}
export DDLTOOL_JOB={{ name }}
{% if enforced %}
export DDLTOOL_ENFORCE="${DDLTOOL_ENFORCE-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/enforce.json}"
{% endif %}
{% if layout.nodes == 1 %}
exec torchrun --standalone --nproc-per-node {{ groups[0].processes_per_node }} {{ script }} "$@"
{% else %}
{% set last = layout.nodes - 1 %}
: "${NODE_RANK:?set it to the rank of this node, 0 to {{ last }}}"
: "${MASTER_ADDR:?set it to the address of node 0}"
if [[ ! "$NODE_RANK" =~ ^[0-9]{1,9}$ ]] || ((10#$NODE_RANK > {{ last }})); then echo "NODE_RANK is $NODE_RANK; expected 0 to {{ last }}" >&2; exit 2; fi
{% for group in groups %}
# {{ group.text }}
if ((10#$NODE_RANK < {{ group.first_node + group.nodes }})); then exec {{ torchrun(group, '"$NODE_RANK"') }} {{ script }} "$@"; fi
{% endfor %}
{% endif %}
