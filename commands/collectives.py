"""The DDP and FSDP2 part of ``ddltool trace``: plans, JSON, and table rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.analyzers.communication.collectives import Collectives
    from ddltool.analyzers.communication.ddp import BucketPlan
    from ddltool.analyzers.communication.fsdp import PrefetchPlan
    from ddltool.analyzers.communication.program import Ring
    from ddltool.graph import Graph


def collective_plans(
    graph: Graph, *, replicas: int, bandwidth: str, latency: str, own_network: bool = False
) -> Collectives | None:
    """Return the plans for ``replicas`` processes on that network, or on the graph's own; None for inference."""
    from ddltool.analyzers.communication.collectives import plan_collectives
    from ddltool.analyzers.communication.program import Ring
    from ddltool.units import parse_bandwidth, parse_duration

    if own_network:
        ring = own_ring(graph, replicas)
    else:
        ring = Ring(
            replicas=replicas, bandwidth_bytes_per_s=parse_bandwidth(bandwidth), latency_s=parse_duration(latency)
        )
    return plan_collectives(graph, ring) if ring is not None else None


def own_ring(graph: Graph, replicas: int) -> Ring | None:
    """Return ``replicas`` processes on the network that the graph was timed for; None when the graph does not say."""
    from ddltool.analyzers.communication.program import Ring

    rate, delay = graph.meta.get("bandwidth_bytes_per_s"), graph.meta.get("latency_s")
    if not (isinstance(rate, (int, float)) and isinstance(delay, (int, float))):
        return None
    return Ring(replicas=replicas, bandwidth_bytes_per_s=float(rate), latency_s=float(delay))


def collectives_document(plans: Collectives) -> dict[str, Any]:
    """Return the JSON of the plans: ``ddp`` and ``fsdp2``, each the default beside the best, and what to set."""
    from ddltool.analyzers.communication.collectives import ddp_verdict, fsdp_verdict

    ddp = plans.ddp
    document: dict[str, Any] = {
        "replicas": plans.ring.replicas,
        "compute_s": plans.compute_s,
        "ddp": {
            "default": _buckets(ddp.default),
            "best_cap": _buckets(ddp.best_cap),
            "best": {**_buckets(ddp.best), "bucket_parameters": [list(bucket) for bucket in ddp.best.buckets]},
            "lower_bound_s": ddp.lower_s,
            "verdict": ddp_verdict(plans),
        },
        "fsdp2": None,
    }
    fsdp = plans.fsdp
    if fsdp is not None:
        document["fsdp2"] = {
            "units": [unit.name for unit in fsdp.units],
            "default": _prefetch(fsdp.default),
            "best": _prefetch(fsdp.best),
            "without_reshard": _prefetch(fsdp.without_reshard),
            "forward_prefetch": {name: list(ahead) for name, ahead in fsdp.forward_prefetch().items()},
            "backward_prefetch": {name: list(ahead) for name, ahead in fsdp.backward_prefetch().items()},
            "lower_bound_s": fsdp.lower_s,
            "verdict": fsdp_verdict(plans),
        }
    return document


def _buckets(plan: BucketPlan) -> dict[str, Any]:
    return {
        "bucket_cap_mb": plan.bucket_cap_mb,
        "bucket_cap_mb_list": list(plan.bucket_cap_mb_list) if plan.bucket_cap_mb_list is not None else None,
        "buckets": len(plan.buckets),
        "step_s": plan.step_s,
        "exposed_s": plan.exposed_s,
    }


def _prefetch(plan: PrefetchPlan) -> dict[str, Any]:
    return {
        "forward_depth": plan.forward_depth,
        "backward_depth": plan.backward_depth,
        "reshard_after_forward": plan.reshard_after_forward,
        "step_s": plan.step_s,
        "exposed_s": plan.exposed_s,
        "gathered_bytes": plan.gathered_bytes,
    }


def collective_rows(plans: Collectives) -> list[tuple[str, ...]]:
    """Return the table's rows: framework, setting, step, exposed communication, memory."""
    from ddltool.units import show_seconds

    rows: list[tuple[str, ...]] = []
    ddp = plans.ddp
    named = (("DDP default", ddp.default), ("DDP best cap", ddp.best_cap), ("DDP best buckets", ddp.best))
    for name, plan in named:
        cap = "default" if plan.bucket_cap_mb is None else f"{plan.bucket_cap_mb:.4g} MiB"
        setting = f"{'own list' if plan.bucket_cap_mb_list is not None else cap}, {len(plan.buckets)} buckets"
        rows.append((name, setting, show_seconds(plan.step_s), show_seconds(plan.exposed_s), "-"))
    if plans.fsdp is not None:
        fsdp = plans.fsdp
        for title, entry in (("FSDP2 default", fsdp.default), ("FSDP2 best", fsdp.best)):
            rows.append(_row(title, f"prefetch {entry.forward_depth} / {entry.backward_depth}", entry))
        rows.append(_row("FSDP2 no reshard", f"prefetch {fsdp.without_reshard.forward_depth}", fsdp.without_reshard))
    return rows


def _row(title: str, setting: str, plan: PrefetchPlan) -> tuple[str, ...]:
    from ddltool.units import show_bytes, show_seconds

    return title, setting, show_seconds(plan.step_s), show_seconds(plan.exposed_s), show_bytes(plan.gathered_bytes)
