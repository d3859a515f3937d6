"""Which level of determinism a model allows, and what stands in the way: EasyScale's scan, op by op.

Levels (EasyScale, Li et al., SC 2023, section 3.3): D0, equal bits on the same devices: fixed seeds, deterministic
kernels. D1, on any number of devices of one type: besides, constant virtual ranks, streams and buckets
(:class:`ddltool.runtime.elastic.trainer.ElasticTrainer`). D2, on any mix of device types: besides, kernels that do not depend
on the device. The paper scans modules; here every op of the traced step is looked up, so that functional calls and the
backward pass count too. Start at :func:`scan`; a planner needs :func:`d2_eligible` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddltool.analyzers.placement.determinism_ops import CLASSES, KernelClass, Level, OpFacts, class_of
from ddltool.graph import COMPUTE, Graph

if TYPE_CHECKING:
    from torch.fx import Node

    from ddltool.analyzers.tracing.torch_adapter import TracedStep

_RANK: Mapping[Level, int] = {"none": 0, "unknown": 1, "D1": 2, "D2": 3}
BACKWARD, MODEL = "(backward)", "(model)"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpFinding:
    """All ops of one type in a graph.

    Attributes:
        op: op type as in the graph, ``aten.mm``; empty where the graph has none.
        kernels: its class.
        count: how many there are.
        flops: how many floating-point operations they make together; 0 where the graph does not say.
        modules: paths of the modules that call it, in program order without repeats; ``(backward)`` for the backward
            pass, whose ops a trace does not assign to modules; ``(model)`` for no submodule; empty where the graph
            names no modules.
    """

    op: str
    kernels: KernelClass
    count: int
    flops: float
    modules: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What a model's ops allow.

    Attributes:
        level: the highest level that all ops allow, when everything in ``settings`` is done; ``none``: the bits differ
            from run to run even then; ``unknown``: an op is not known.
        reasons: why not D2, one line per op type that stands in the way, lowest level first; empty where eligible.
        settings: what to set or do to have ``level``, without repeats.
        ops: every op type whose bits depend on more than its inputs, lowest level first, then by count.
        exact: how many compute ops depend on their inputs alone.
    """

    level: Level
    reasons: tuple[str, ...]
    settings: tuple[str, ...]
    ops: tuple[OpFinding, ...]
    exact: int

    @property
    def d2_eligible(self) -> bool:
        """Whether the bits can be the same on mixed device types."""
        return self.level == "D2"


def scan(graph: Graph, facts: Mapping[str, OpFacts] | None = None) -> Scan:
    """Return what the compute ops of a step allow.

    ``facts`` says more of ops by name (:func:`op_facts`); without, the cautious case is taken: sums are floating-point,
    convolutions overlap. A graph whose ops have no types gets level ``unknown``; one without module paths in its op names
    (``forward/PATH/op``, as this project's traces have) gets no modules. An inference graph says nothing of the
    backward pass.
    """
    rows: dict[tuple[str, str], list[int]] = {}
    for place in graph.of_kind(COMPUTE):
        op = graph.op_type[place]
        kernels = class_of(op, (facts or {}).get(graph.names[place]))
        rows.setdefault((op, kernels.name), []).append(int(place))
    findings = [_finding(graph, op, CLASSES[name], places) for (op, name), places in rows.items()]
    exact = sum(finding.count for finding in findings if finding.kernels.name == "exact")
    found = [finding for finding in findings if finding.kernels.name != "exact"]
    found.sort(key=lambda finding: (_RANK[finding.kernels.level], finding.kernels.name, -finding.count, finding.op))
    level: Level = found[0].kernels.level if found else "D2"
    blocking = [finding for finding in found if finding.kernels.level != "D2"]
    settings = dict.fromkeys(finding.kernels.setting for finding in found)
    return Scan(
        level=level,
        reasons=tuple(_reason(finding, float(graph.flops.sum())) for finding in blocking),
        settings=tuple(filter(None, settings)),
        ops=tuple(found),
        exact=exact,
    )


def d2_eligible(graph: Graph) -> tuple[bool, tuple[str, ...]]:
    """Return whether a model may train on mixed device types with equal bits, and if not, why.

    No where an op has no device-independent kernel, no deterministic one at all, or is not known (an op without a type
    is not). As in the paper, matrix products, reductions, random draws and attention do not forbid it: their kernels can
    be fixed; see :attr:`Scan.settings` for how.
    """
    found = scan(graph)
    return found.d2_eligible, found.reasons


def op_facts(traced: TracedStep) -> dict[str, OpFacts]:
    """Return, for each compute op of a traced step by name, what its arguments say beyond its type."""
    return {
        name: OpFacts(floating=any(map(_floats, node.all_input_nodes)), patches=_patches(node))
        for name, node in traced.nodes.items()
    }


def _floats(node: Node) -> bool:
    value = node.meta.get("val")
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(dtype.is_floating_point or dtype.is_complex)


def _patches(node: Node) -> bool:
    """Return whether a convolution's windows lie side by side. The arguments are in the order of aten's schema."""
    name = str(node.target)
    if name == "aten.convolution.default":
        weight, stride, padding, dilation, transposed, groups = (node.args[place] for place in (1, 3, 4, 5, 6, 8))
    elif name == "aten.convolution_backward.default":
        weight, stride, padding, dilation, transposed, groups = (node.args[place] for place in (2, 4, 5, 6, 7, 9))
    else:
        return False
    kernel = list(weight.meta["val"].shape[2:])  # type: ignore[union-attr]
    plain = not any(padding) and all(step == 1 for step in dilation)  # type: ignore[arg-type,union-attr]
    return bool(plain and not transposed and groups == 1 and list(stride) == kernel)  # type: ignore[arg-type]


def _finding(graph: Graph, op: str, kernels: KernelClass, places: list[int]) -> OpFinding:
    modules = dict.fromkeys(_module_of(graph.names[place]) for place in places)
    flops = float(graph.flops[places].sum())
    return OpFinding(op=op, kernels=kernels, count=len(places), flops=flops, modules=tuple(filter(None, modules)))


def _reason(finding: OpFinding, whole: float) -> str:
    times = "once" if finding.count == 1 else f"{finding.count} times"
    share = f", {finding.flops / whole:.1%} of the FLOPs" if finding.flops > 0.0005 * whole else ""
    return f"{finding.op or 'an op without a type'} ({times}{share}): {finding.kernels.reason}"


def _module_of(name: str) -> str:
    """Return the module path in an op's name, empty where it has none."""
    phase, _, rest = name.partition("/")
    if phase == "backward":
        return BACKWARD
    return rest.rpartition("/")[0] or MODEL if phase == "forward" else ""
