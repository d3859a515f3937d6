"""Applies a plan's DDP buckets and FSDP2 prefetch lists, and reports what was applied.

::

    model = DistributedDataParallel(net, **ddp_arguments("enforce.json"))
    ...                                    # three steps: DDP settles on its buckets after the first
    print(bucket_report(model, "enforce.json").text)

    for name in prefetch_units("enforce.json"):
        fully_shard(net.get_submodule(name))
    fully_shard(net)
    print(apply_prefetch(net, "enforce.json").text)
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ddltool.errors import InputError
from ddltool.plans import BucketSetting, PrefetchSetting
from ddltool.runtime.hook.job import Config, loaded, submodules


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketReport:
    """The gradient buckets that DDP reduces, and the planned ones."""

    status: Literal["as planned", "differs", "not settled", "unknown"]
    """"not settled": DDP has not formed its final buckets, which it does by the third step; "unknown": torch logs none."""
    planned: tuple[frozenset[str], ...]
    actual: tuple[frozenset[str], ...]
    """Parameter names by bucket, in the order of reduction; empty where unknown."""

    @property
    def text(self) -> str:
        """One line for the log that says whether DDP's buckets are as planned, and which is the first that differs."""
        if self.status == "as planned":
            return f"DDP buckets: {len(self.actual)}, as planned"
        if self.status == "not settled":
            return "DDP buckets: not settled yet; ask again after the third step"
        if self.status == "unknown":
            return "DDP buckets: this torch does not tell which it formed"
        pairs = enumerate(zip(self.planned, self.actual, strict=False))
        # Where the common buckets are equal, the first one that only one side has.
        first_differing = next(
            (index for index, (planned, actual) in pairs if planned != actual),
            min(len(self.planned), len(self.actual)),
        )
        return (
            f"DDP buckets: {len(self.actual)}, planned {len(self.planned)}; the first that differs is bucket {first_differing} "
            "(gradients became ready in another order than in the traced graph)"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchReport:
    """Numbers of modules whose forward and backward prefetch lists were set, and one line for the log on that."""

    forward: int
    backward: int
    text: str


def ddp_arguments(config: Config) -> dict[str, Any]:
    """Return the keyword arguments for ``DistributedDataParallel`` that make it form the planned buckets.

    They are empty if the plan keeps DDP's default. Raises InputError for a config without a bucket plan, or if the plan
    needs ``bucket_cap_mb_list`` and this torch does not have it.
    """
    plan = _buckets(config)
    if plan.bucket_cap_mb_list is not None:
        if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel.__init__).parameters:
            remedy = "torch 2.11 knows it; or plan a single cap"
            raise InputError("ddp.bucket_cap_mb_list", "is unknown to this torch", remedy)
        return {"bucket_cap_mb_list": list(plan.bucket_cap_mb_list)}
    return {} if plan.bucket_cap_mb is None else {"bucket_cap_mb": plan.bucket_cap_mb}


def bucket_report(model: DistributedDataParallel, config: Config) -> BucketReport:
    """Return the buckets that ``model`` reduces and the planned ones; call it after the third step.

    It reads torch's log data of the reducer, a private interface; without it the status is "unknown".
    """
    plan = _buckets(config)
    planned = tuple(frozenset(bucket) for bucket in plan.buckets)
    logged: dict[str, Any] = getattr(model, "_get_ddp_logging_data", dict)()
    names = [name for name, value in model.module.named_parameters() if value.requires_grad]
    rebuilt = str(logged.get("rebuilt_per_bucket_param_indices", ""))  # such as "2 1, 0": indices in `names` by bucket
    if not logged:
        return BucketReport(status="unknown", planned=planned, actual=())
    if not rebuilt:
        return BucketReport(status="not settled", planned=planned, actual=())
    actual = tuple(frozenset(names[int(index)] for index in bucket.split()) for bucket in rebuilt.split(","))
    return BucketReport(status="as planned" if actual == planned else "differs", planned=planned, actual=actual)


def prefetch_units(config: Config) -> list[str]:
    """Return the names of the modules to call ``fully_shard`` on, in order of their forward passes, without the root."""
    return list(_prefetch(config).units)


def apply_prefetch(model: nn.Module, config: Config) -> PrefetchReport:
    """Set the planned prefetch lists on a model whose units are sharded by ``fully_shard``, and report that.

    Raises InputError if a planned unit is missing from the model or is not sharded, or the config has no plan for FSDP2;
    then no list is set.
    """
    plan = _prefetch(config)
    # Both prefetch plans have, by a module's name, the names of the modules that are gathered ahead while it computes.
    prefetched = itertools.chain(*plan.forward.values(), *plan.backward.values())
    named_units = sorted({*plan.units, *plan.forward, *plan.backward, *prefetched})
    modules = submodules(model, named_units, "fsdp2.units")
    if bare := [name for name in plan.units if not isinstance(modules[name], FSDPModule)]:
        raise InputError("fsdp2.units", f"{bare[0]!r} is not sharded", "call fully_shard on each unit and on the model")
    for name, ahead in plan.forward.items():
        modules[name].set_modules_to_forward_prefetch([modules[other] for other in ahead])
    for name, ahead in plan.backward.items():
        modules[name].set_modules_to_backward_prefetch([modules[other] for other in ahead])
    forward = len(plan.forward)
    backward = len(plan.backward)
    summary = f"lists set on {forward} modules for forward and {backward} for backward"
    text = f"FSDP2 prefetch: {summary if forward or backward else 'the default, as planned'}"
    return PrefetchReport(forward=forward, backward=backward, text=text)


def _buckets(config: Config) -> BucketSetting:
    """Return the config's plan of DDP buckets. Raises InputError if it has none."""
    enforcement, where = loaded(config)
    if enforcement.ddp is None:
        raise InputError(f"{where}:ddp", "is missing", "plan with --graph and a training graph")
    return enforcement.ddp


def _prefetch(config: Config) -> PrefetchSetting:
    """Return the config's plan of FSDP2 prefetch lists. Raises InputError if it has none."""
    enforcement, where = loaded(config)
    if enforcement.fsdp2 is None:
        problem = "is missing: the plan knew no list of blocks"
        raise InputError(f"{where}:fsdp2", problem, "plan with --graph and a training graph of a model with blocks")
    return enforcement.fsdp2
