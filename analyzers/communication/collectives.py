"""What data-parallel frameworks of today leave exposed, and what to set: DDP and FSDP2 on one traced step.

The paper orders transfers from parameter servers; here the same step runs on replicas that all-reduce gradients (DDP)
or gather sharded parameters (FSDP2). Start at :func:`plan_collectives`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddltool.analyzers.communication.ddp import BucketPlan, DdpPlan, plan_ddp
from ddltool.analyzers.communication.efficiency import CLEAR_GAIN, SMALL_GAIN
from ddltool.analyzers.communication.fsdp import FsdpPlan, PrefetchPlan, plan_fsdp
from ddltool.analyzers.communication.program import Ring, block_container, program_of
from ddltool.graph import SEND, Graph
from ddltool.plan import BucketSetting, PrefetchSetting
from ddltool.results import BucketFigures, CollectiveFigures, DdpFigures, FsdpFigures, PrefetchFigures
from ddltool.units import show_bytes, show_seconds

# Beyond this, a larger batch or a faster network is the answer and no setting is.
_STARVED = 1.5
# A simpler setting within this share of the best one's step is preferred.
_AS_GOOD = 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """The plans for one graph; ``fsdp`` None when the parameters' names show no list of blocks."""

    ring: Ring
    compute_s: float
    container: str | None
    """The list whose members are FSDP2's units."""
    ddp: DdpPlan
    fsdp: FsdpPlan | None


def plan_collectives(graph: Graph, ring: Ring) -> Collectives | None:
    """Return the plans of a timed training graph, None for inference: there is no gradient to reduce."""
    if graph.mode != "training" or not len(graph.of_kind(SEND)):
        return None
    program = program_of(graph)
    return Collectives(
        ring=ring,
        compute_s=program.compute_s,
        container=block_container(program),
        ddp=plan_ddp(program, ring),
        fsdp=plan_fsdp(program, ring),
    )


def own_ring(graph: Graph, replicas: int) -> Ring | None:
    """Return ``replicas`` processes on the network that the graph was timed for; None when the graph does not say."""
    rate, delay = graph.meta.get("bandwidth_bytes_per_s"), graph.meta.get("latency_s")
    if not (isinstance(rate, (int, float)) and isinstance(delay, (int, float))):
        return None
    return Ring(replicas=replicas, bandwidth_bytes_per_s=float(rate), latency_s=float(delay))


def collective_figures(plans: Collectives) -> CollectiveFigures:
    """Return the plans as records: each framework's default beside the best, and what to set."""
    ddp, fsdp = plans.ddp, plans.fsdp
    best = _buckets(ddp.best).model_copy(update={"bucket_parameters": [list(bucket) for bucket in ddp.best.buckets]})
    fsdp2 = None
    if fsdp is not None:
        fsdp2 = FsdpFigures(
            units=[unit.name for unit in fsdp.units],
            default=_prefetch(fsdp.default),
            best=_prefetch(fsdp.best),
            without_reshard=_prefetch(fsdp.without_reshard),
            forward_prefetch={name: list(ahead) for name, ahead in fsdp.forward_prefetch().items()},
            backward_prefetch={name: list(ahead) for name, ahead in fsdp.backward_prefetch().items()},
            lower_bound_s=fsdp.lower_s,
            verdict=fsdp_verdict(plans),
        )
    return CollectiveFigures(
        replicas=plans.ring.replicas,
        compute_s=plans.compute_s,
        ddp=DdpFigures(
            default=_buckets(ddp.default),
            best_cap=_buckets(ddp.best_cap),
            best=best,
            lower_bound_s=ddp.lower_s,
            verdict=ddp_verdict(plans),
        ),
        fsdp2=fsdp2,
    )


def _buckets(plan: BucketPlan) -> BucketFigures:
    return BucketFigures(
        bucket_cap_mb=plan.bucket_cap_mb,
        bucket_cap_mb_list=list(plan.bucket_cap_mb_list) if plan.bucket_cap_mb_list is not None else None,
        buckets=len(plan.buckets),
        step_s=plan.step_s,
        exposed_s=plan.exposed_s,
    )


def _prefetch(plan: PrefetchPlan) -> PrefetchFigures:
    return PrefetchFigures(**{name: getattr(plan, name) for name in PrefetchFigures.model_fields})


def settings(plans: Collectives) -> tuple[BucketSetting, PrefetchSetting | None]:
    """Return what a plan keeps of them: DDP's buckets and FSDP2's prefetch lists."""
    return bucket_setting(plans.ddp), None if plans.fsdp is None else prefetch_setting(plans.fsdp)


def bucket_setting(ddp: DdpPlan) -> BucketSetting:
    """Return DDP's buckets for a plan: the simplest of default, single cap and list that is as good as the best."""
    chosen = ddp.best_cap if ddp.best_cap.step_s <= ddp.best.step_s * (1 + _AS_GOOD) else ddp.best
    chosen = ddp.default if ddp.default.step_s <= chosen.step_s * (1 + _AS_GOOD) else chosen
    return BucketSetting(
        bucket_cap_mb=None if chosen is ddp.default else chosen.bucket_cap_mb,
        bucket_cap_mb_list=list(chosen.bucket_cap_mb_list) if chosen.bucket_cap_mb_list is not None else None,
        buckets=[list(bucket) for bucket in chosen.buckets],
        step_s=chosen.step_s,
        default_step_s=ddp.default.step_s,
    )


def prefetch_setting(fsdp: FsdpPlan) -> PrefetchSetting:
    """Return FSDP2's units and prefetch lists for a plan."""
    return PrefetchSetting(
        units=[unit.name for unit in fsdp.units],
        forward={name: list(ahead) for name, ahead in fsdp.forward_prefetch().items()},
        backward={name: list(ahead) for name, ahead in fsdp.backward_prefetch().items()},
        reshard_after_forward=fsdp.best.reshard_after_forward,
        step_s=fsdp.best.step_s,
        default_step_s=fsdp.default.step_s,
    )


def share_saved(step_s: float, before_s: float) -> float:
    """Return the share of a step that is saved, 0 where there was nothing to save."""
    return 1.0 - step_s / before_s if before_s > 0 else 0.0


def ddp_verdict(plans: Collectives) -> str:
    """Return in words what DDP's buckets can gain and what to set."""
    plan = plans.ddp
    gain = share_saved(plan.best.step_s, plan.default.step_s)
    by_cap = share_saved(plan.best_cap.step_s, plan.default.step_s)
    exposed = f"DDP's default leaves {show_seconds(plan.default.exposed_s)} of communication exposed"
    if gain < SMALL_GAIN:
        text = f"{exposed}; no other buckets save {SMALL_GAIN:.0%} of the step: leave bucket_cap_mb alone."
    elif by_cap >= 0.9 * gain and plan.best_cap.bucket_cap_mb is not None:
        text = f"{exposed}; set bucket_cap_mb={plan.best_cap.bucket_cap_mb:g}: {by_cap:.1%} of the step saved."
    else:
        alone = (
            f"bucket_cap_mb={plan.best_cap.bucket_cap_mb:g} alone" if plan.best_cap.bucket_cap_mb else "no cap alone"
        )
        worth = "worth it" if gain >= CLEAR_GAIN else "a small gain"
        count = len(plan.best.buckets)
        text = f"{exposed}; {count} buckets by bucket_cap_mb_list save {gain:.1%} ({alone}: {by_cap:.1%}): {worth}."
    return text + _starved(plans, plan.default.exposed_s)


def fsdp_verdict(plans: Collectives) -> str:
    """Return in words what FSDP2's prefetch can gain and what to set."""
    plan = plans.fsdp
    if plan is None:
        return "FSDP2: the parameters' names show no list of blocks to shard by."
    best = plan.best
    gain = share_saved(best.step_s, plan.default.step_s)
    exposed = f"FSDP2's default leaves {show_seconds(plan.default.exposed_s)} of communication exposed"
    if gain < SMALL_GAIN:
        text = f"{exposed}; prefetching further ahead saves less than {SMALL_GAIN:.0%}: leave the default."
    else:
        extra = show_bytes(best.gathered_bytes - plan.default.gathered_bytes)
        depths = f"prefetch {best.forward_depth} blocks in forward and {best.backward_depth} in backward"
        text = f"{exposed}; {depths}: {gain:.1%} of the step saved for {extra} more."
    kept = share_saved(plan.without_reshard.step_s, best.step_s)
    if kept >= SMALL_GAIN:
        size = show_bytes(plan.without_reshard.gathered_bytes)
        text += f" Where {size} of gathered parameters fit, reshard_after_forward=False saves another {kept:.1%}."
    return text + _starved(plans, plan.default.exposed_s)


def _starved(plans: Collectives, exposed_s: float) -> str:
    wire = exposed_s + plans.compute_s
    if wire < _STARVED * plans.compute_s or plans.compute_s <= 0:
        return ""
    return f" The step is {wire / plans.compute_s:.1f} times its compute: a larger batch per replica gains far more."
