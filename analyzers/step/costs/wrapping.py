"""What DDP, FSDP2 and DTensor make the host do: hooks on modules and gradients, which bound the steps of small models.

FSDP2 runs Python before and after each block, forward and backward: streams, buffers and views of every parameter. DDP's hooks
are C++ and far cheaper. Their time is told in ops that the host issues, whose seconds a device's constants have. As measured by
`benchmarks/measure_hooks.py` (torch 2.11 beside an H200, whose host took 65 microseconds an op, and 2.13 on a CPU with 8), a
block of FSDP2 takes 0.4 to 1.1 ms, and each of its parameters 0.06 to 0.12 ms: between 20 and 100 ops a block, of which about
the middle is taken: in ops and not in seconds, so that a faster host is faster in both. A linear layer that a tensor parallel
group shares as ``emit`` writes it passes through DTensor, which takes two thirds as long as a block's hooks; Megatron's layers
do not. Start at :func:`hooked`.
"""

from __future__ import annotations

from ddltool.analyzers.step.communication.fsdp import block_container, block_of
from ddltool.analyzers.step.communication.program import Program, stretched
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.graph import SEND, Graph

# In ops that the host issues. FSDP2: for each unit, and for each parameter of it, with its update as a DTensor; DDP, and ZeRO-1
# which is built on it: for each parameter.
_UNIT, _SHARDED_PARAMETER, _REDUCED_PARAMETER = 35.0, 4.5, 0.4
_SPLIT_LAYER = 40.0
"""The same for a linear layer whose weight a tensor parallel group shares, forward and backward."""
PART_OPS = _UNIT / 3.0
"""The same in a recorded step, for each collective that gathers or scatters parts: a unit has three in a pass."""


def hook_ops(program: Program, sharding: Sharding) -> float:
    """Return as how many ops the hooks of a sharding count for the host in one pass; 0 for a process that shares nothing."""
    parameters = len(program.held)
    if sharding.kind == "none":
        return 0.0
    if not sharding.gathers:
        return _REDUCED_PARAMETER * parameters
    container = block_container(program.held, program.held_bytes.tolist())
    blocks = {block_of(name, container) for name in program.held} - {""} if container is not None else set()
    return _UNIT * (len(blocks) + 1) + _SHARDED_PARAMETER * parameters


def split_wait_s(graph: Graph, passes: int, pipeline: int, busy_s: float) -> float:
    """Return by how many seconds the host of a tensor parallel rank takes longer than its device in a step.

    ``graph``: the rank's timed pass through all ``pipeline`` stages; ``busy_s``: of the device, for all ``passes``.
    """
    issue_s, issued_s = (float(graph.meta.get(name) or 0.0) for name in ("issue_s", "issued_s"))
    sides = graph.gemm[graph.of_kind(SEND)][:, 2:]  # rows and columns of each parameter
    layers = int((sides > 1.0).all(axis=1).sum())
    return max(0.0, passes * (issued_s + issue_s * _SPLIT_LAYER * layers) / pipeline - busy_s)


def hooked(program: Program, graph: Graph, sharding: Sharding) -> Program:
    """Return a pass with the hooks of a sharding: longer where the host then needs longer than the device does.

    ``program``: of ``graph``, which is timed, so that its ``meta`` has the host's seconds for an op and for the whole pass. The
    hooks are taken to be spread over the pass. O(parameters), and only where they could matter.
    """
    issue_s, issued_s = (float(graph.meta.get(name) or 0.0) for name in ("issue_s", "issued_s"))
    most_ops = (_UNIT + _SHARDED_PARAMETER) * (
        len(program.held) + 1
    )  # every parameter in a unit of its own, beside the root
    if sharding.kind == "none" or issued_s + issue_s * most_ops <= program.compute_s:
        return program
    # Views that the host issues behind the last kernel delay nothing.
    host_s = min(issued_s, program.compute_s) + issue_s * hook_ops(program, sharding)
    return program if host_s <= program.compute_s else stretched(program, host_s)
