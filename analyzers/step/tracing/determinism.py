"""Which level of determinism a model allows, and what stands in the way: EasyScale's scan, op by op. Start at :func:`scan`.

Levels (EasyScale, Li et al., SC 2023, section 3.3): D0, equal bits on the same devices: fixed seeds, deterministic
kernels. D1, on any number of devices of one type: besides, constant virtual ranks, streams and buckets
(:class:`ddltool.runtime.elastic.trainer.ElasticTrainer`). D2, on any mix of device types: besides, kernels that do not depend
on the device. The paper scans modules; here every op of the traced step is looked up in ``determinism.toml``, so that
functional calls and the backward pass count too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddltool.graph import COMPUTE, Graph
from ddltool.graph_results import DeterminismLevel, DeterminismOp

if TYPE_CHECKING:
    from torch.fx import Node

    from ddltool.analyzers.step.tracing.torch_adapter import TracedStep

BACKWARD, MODEL = "(backward)", "(model)"
"""What stands for a module in findings: the whole backward pass, and ops of the forward pass outside of any module."""
_RANK = {"none": 0, "unknown": 1, "D1": 2, "D2": 3}
"""Levels from the worst to the best; the worst finding is the step's level."""
_TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TORCH_VERSION: str = _TABLE["torch_version"]
CLASSES: Mapping[str, Mapping[str, str]] = _TABLE["classes"]
"""By the name of a class of kernels, its ``level``, ``reason`` and ``setting``."""
OPS: Mapping[str, str] = {
    f"{'onnx' if key == 'onnx' else 'aten'}.{op}": name
    for name, entry in CLASSES.items()
    for key in ("aten", "documented", "onnx")
    for op in entry.get(key, "").split()
}
"""By op type (``aten.NAME`` without overload and trailing underscore, ``onnx.NAME``), the name of its class."""
_FLOATING_ONLY = frozenset(_TABLE["floating_only"].split())
"""Ops that are exact on integers, where no rounding makes the order of additions matter."""
_LEAST_SHOWN_SHARE = 0.0005
"""Of the step's FLOPs: a smaller share would be printed as 0.0 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpFacts:
    """What an op's arguments say beyond its type."""

    floating: bool
    """Whether an input is a floating-point or complex tensor."""
    patches: bool = False
    """Whether it is a convolution whose windows do not overlap: kernel equal to stride, no padding, dilation or groups."""


def class_of(op_type: str, facts: OpFacts | None = None) -> str:
    """Return the class of kernels of an op type, "unknown" if it is in no table; in-place ops count as functional ones.

    ``facts`` None: the op is taken to read floating-point tensors, and a convolution to have overlapping windows.

    >>> class_of("aten.convolution"), class_of("aten.add_"), class_of("mine.op")
    ('convolution', 'exact', 'unknown')
    >>> class_of("aten.cumsum", OpFacts(floating=False))
    'exact'
    """
    name = OPS.get(op_type) or OPS.get(op_type.rstrip("_"))  # a trailing underscore marks an op that works in place
    if name is None:  # an op on lists of tensors (``_foreach_add_``) has the class of the op on one
        single_op = op_type.removeprefix("aten._foreach_").rstrip("_")
        name = OPS.get(f"aten.{single_op}", "unknown")
    if facts is None:
        return name
    if not facts.floating and op_type.removeprefix("aten.").rstrip("_") in _FLOATING_ONLY:
        return "exact"
    return "patches" if facts.patches and name == "convolution" else name


def scan(graph: Graph, facts: Mapping[str, OpFacts] | None = None) -> DeterminismLevel:
    """Return the level of determinism that a step's ops allow once the listed settings are made, and what limits it.

    D1: equal bits on any number of devices of one type; D2: on any mix of types; none: not even on the same devices.
    ``facts``: what the arguments of ops say, by op name (:func:`op_facts`); None: as in :func:`class_of`. The level is
    ``unknown`` if ops have no types. Modules are listed only if op names have their paths (``forward/PATH/op``, as traces
    here have). An inference graph says nothing about the backward pass. As in the paper, matrix products, reductions,
    random draws and attention do not forbid D2: their kernels can be fixed.
    """
    ops_by_kind: dict[tuple[str, str], list[int]] = {}  # by op type and class, the ops' indices
    for op in graph.of_kind(COMPUTE).tolist():
        op_type = graph.op_type[op]
        kernel_class = class_of(op_type, (facts or {}).get(graph.names[op]))
        ops_by_kind.setdefault((op_type, kernel_class), []).append(op)
    exact_ops = sum(len(ops) for (_, kernel_class), ops in ops_by_kind.items() if kernel_class == "exact")
    findings = [
        _finding(graph, op_type, kernel_class, ops)
        for (op_type, kernel_class), ops in ops_by_kind.items()
        if kernel_class != "exact"
    ]
    # The worst level first, which is the step's.
    findings.sort(key=lambda finding: (_RANK[finding.level], finding.class_, -finding.count, finding.op))
    level = findings[0].level if findings else "D2"
    step_flops = float(graph.flops.sum())
    return DeterminismLevel(
        level=level,
        d2_eligible=level == "D2",
        reasons=[_reason(finding, step_flops) for finding in findings if finding.level != "D2"],
        settings=list(dict.fromkeys(finding.setting for finding in findings if finding.setting)),
        exact_ops=exact_ops,
        tables_of_torch=TORCH_VERSION,
        ops=findings,
    )


def op_facts(traced: TracedStep) -> dict[str, OpFacts]:
    """Return, by the name of each compute op of a traced step, what its arguments say beyond its type."""
    return {
        name: OpFacts(floating=any(map(_is_floating, node.all_input_nodes)), patches=_has_separate_windows(node))
        for name, node in traced.nodes.items()
    }


def _is_floating(node: Node) -> bool:
    """Return whether a node's value is a floating-point or complex tensor."""
    dtype = getattr(node.meta.get("val"), "dtype", None)
    return dtype is not None and bool(dtype.is_floating_point or dtype.is_complex)


def _has_separate_windows(node: Node) -> bool:
    """Return whether a node is a convolution whose windows do not overlap, so that no input element is read twice."""
    name = str(node.target)
    # The indices of the arguments in aten's schemas; those of the backward pass begin with the output's gradient.
    if name == "aten.convolution.default":
        weight, stride, padding, dilation, transposed, groups = (node.args[place] for place in (1, 3, 4, 5, 6, 8))
    elif name == "aten.convolution_backward.default":
        weight, stride, padding, dilation, transposed, groups = (node.args[place] for place in (2, 4, 5, 6, 7, 9))
    else:
        return False
    kernel = list(weight.meta["val"].shape[2:])  # type: ignore[union-attr]
    is_dense = not any(padding) and all(step == 1 for step in dilation)  # type: ignore[arg-type,union-attr]
    return bool(is_dense and not transposed and groups == 1 and list(stride) == kernel)  # type: ignore[arg-type]


def _finding(graph: Graph, op_type: str, kernel_class: str, ops: list[int]) -> DeterminismOp:
    """Return one row of the result: the level of a class of kernels, and the FLOPs and modules of an op type's ops in it.

    ``op_type``: as ``aten.NAME`` or ``onnx.NAME``; ``kernel_class``: the name of the class, a key of ``CLASSES``; ``ops``:
    the indices in the graph of these ops.
    """
    entry = CLASSES[kernel_class]
    return DeterminismOp(
        op=op_type,
        class_=kernel_class,
        level=entry["level"],
        count=len(ops),
        flops=float(graph.flops[ops].sum()),
        modules=list(filter(None, dict.fromkeys(_module_of(graph.names[op]) for op in ops))),
        reason=entry.get("reason", ""),
        setting=entry.get("setting", ""),
    )


def _reason(finding: DeterminismOp, step_flops: float) -> str:
    """Return a sentence: an op type, how often it occurs, its share of the step's FLOPs, and why it limits the level."""
    times = "once" if finding.count == 1 else f"{finding.count} times"
    is_shown = finding.flops > _LEAST_SHOWN_SHARE * step_flops
    share = f", {finding.flops / step_flops:.1%} of the FLOPs" if is_shown else ""
    return f"{finding.op or 'an op without a type'} ({times}{share}): {finding.reason}"


def _module_of(name: str) -> str:
    """Return the module path in an op's name: ``layers.0`` for ``forward/layers.0/mm``; "" for a name of no such form.

    Forward ops outside any module belong to ``MODEL``. Names of backward ops hold no module: all belong to ``BACKWARD``.
    """
    phase, _, path = name.partition("/")
    if phase == "backward":
        return BACKWARD
    if phase == "forward":
        return path.rpartition("/")[0] or MODEL
    return ""
