"""What DDP, FSDP2 and DTensor make host and device do beside the step's own ops.

The host runs hooks on modules and gradients, which bound the steps of small models. The device copies: FSDP2 gathers a unit's
parameters into one buffer and copies them out of it, and copies gradients into the buffer that it reduces, all on the stream
that computes (torch's ``_fsdp_collectives.py``), so that no other work hides them.

FSDP2 runs Python before and after each block, forward and backward: streams, buffers and views of every parameter. DDP's hooks
are C++ and far cheaper. Their time is told in ops that the host issues, whose seconds a device's constants have. As measured by
`benchmarks/measure_hooks.py` (torch 2.11 beside an H200, whose host took 65 microseconds an op, and 2.13 on a CPU with 8), a
block of FSDP2 takes 0.4 to 1.1 ms, and each of its parameters 0.06 to 0.12 ms: between 20 and 100 ops a block, of which about
the middle is taken: in ops and not in seconds, so that a faster host is faster in both. A linear layer that a tensor parallel
group shares as ``emit`` writes it passes through DTensor, which takes two thirds as long as a block's hooks; Megatron's layers
do not. Start at :func:`with_copies` and :func:`hooked`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from ddltool.analyzers.step.communication.fsdp import block_container, block_of
from ddltool.analyzers.step.communication.program import Program, stretched
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.graph import SEND, Graph

# How much hooks cost the host in one pass, each counted as so many ops that the host issues. FSDP2: for each unit (what is
# gathered at once: a block, or the root), and for each parameter of it, with its update as a DTensor; DDP, and ZeRO-1 which is
# built on it: for each parameter.
_UNIT, _SHARDED_PARAMETER, _REDUCED_PARAMETER = 35.0, 4.5, 0.4
_SPLIT_LAYER = 40.0
"""The same for a linear layer whose weight a tensor parallel group shares, forward and backward."""
PART_OPS = _UNIT / 3.0
"""The same in a recorded step, for each collective that gathers or scatters parts: a unit has three in a pass."""


def hook_ops(program: Program, sharding: Sharding) -> float:
    """Return the host's work for the hooks of one pass, as the number of issued ops that take as long.

    ``program`` names the parameters whose hooks run. 0.0 for the sharding "none", which has no hooks.
    """
    parameters = len(program.held)
    if sharding.kind == "none":
        return 0.0
    if not sharding.gathers:
        return _REDUCED_PARAMETER * parameters
    blocks = {*_blocks_of(program.held, tuple(program.held_bytes.tolist()))} - {""}
    units = len(blocks) + 1  # each block, and the root: what lies outside all blocks
    return _UNIT * units + _SHARDED_PARAMETER * parameters


def split_wait_s(graph: Graph, passes: int, pipeline: int, busy_s: float) -> float:
    """Return by how many seconds the host of a tensor parallel rank takes longer than its device in a step; 0.0: it does not.

    The host issues the ops of its stage, and runs DTensor's Python code around every linear layer.

    Args:
        graph: the rank's pass through the blocks of all stages, with times.
        passes: micro-batches of a step.
        pipeline: the number of stages, which are taken to cost the host alike.
        busy_s: the seconds that the device of one stage computes in the whole step.
    """
    issue_s = float(graph.meta.get("issue_s") or 0.0)  # for one op
    issued_s = float(graph.meta.get("issued_s") or 0.0)  # for all ops of the pass
    sides = graph.gemm[graph.of_kind(SEND)][:, 2:]  # rows and columns of each trained parameter
    linear_layers = int((sides > 1.0).all(axis=1).sum())  # every parameter that is a matrix is taken for one
    pass_host_s = issued_s + issue_s * _SPLIT_LAYER * linear_layers
    return max(0.0, passes * pass_host_s / pipeline - busy_s)


def with_copies(program: Program, graph: Graph, sharding: Sharding) -> Program:
    """Return a pass with the time of FSDP2's copies, taken to be spread evenly over it; without FSDP2 ``program`` itself.

    Parameters are copied out of a buffer once for each all-gather: of blocks twice where they are freed after their forward
    pass, of the root (what lies outside all blocks) once. Gradients come in the type of the gathered parameter and are copied
    in the type in which they are reduced. ``graph``: that of the same pass, with times.
    """
    if not sharding.gathers:
        return program
    blocks = _blocks_of(program.held, tuple(program.held_bytes.tolist()))
    gathers = np.array([2.0 if block and sharding.reshards else 1.0 for block in blocks])
    is_trained = np.isin(program.held, program.parameters)
    gradient_bytes = program.held_bytes[is_trained].sum() + program.size_bytes.sum()
    copied_bytes = float(2.0 * (gathers * program.held_bytes).sum() + gradient_bytes)  # read and written
    return stretched(program, program.compute_s + copied_bytes / copy_rate(graph))


def copy_rate(graph: Graph) -> float:
    """Return the bytes per second that the device of a graph with times reads and writes together; infinite if not known."""
    return float(graph.meta.get("memory_bytes_per_s") or math.inf)


@lru_cache(maxsize=64)
def _blocks_of(held: tuple[str, ...], held_bytes: tuple[float, ...]) -> tuple[str, ...]:
    """Return (q,) the block of each parameter, "" for one outside all blocks; ``held``, ``held_bytes``: of a program."""
    container = block_container(held, held_bytes)
    return tuple("" if container is None else block_of(name, container) for name in held)


def hooked(program: Program, graph: Graph, sharding: Sharding) -> Program:
    """Return a pass with the hooks of a sharding: ``program`` itself, or stretched where the host with its hooks is slower.

    The hooks are taken to be spread evenly over the pass, so that all times in it are scaled alike.

    Args:
        program: the pass without hooks, with FSDP2's copies.
        graph: the graph of the same pass, with times; its ``meta`` has the host's seconds for an op (``issue_s``) and for
            the whole pass (``issued_s``).
        sharding: how the replicas share parameters.

    O(parameters), and only where the hooks could matter.
    """
    if sharding.kind == "none":
        return program
    issue_s = float(graph.meta.get("issue_s") or 0.0)
    issued_s = float(graph.meta.get("issued_s") or 0.0)
    # A bound that needs no look at the blocks: every parameter in a unit of its own, beside the root.
    most_ops = (_UNIT + _SHARDED_PARAMETER) * (len(program.held) + 1)
    if issued_s + issue_s * most_ops <= program.compute_s:
        return program
    # Views that the host issues behind the last kernel delay nothing.
    host_s = min(issued_s, program.compute_s) + issue_s * hook_ops(program, sharding)
    return program if host_s <= program.compute_s else stretched(program, host_s)
