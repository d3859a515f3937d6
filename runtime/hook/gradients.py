"""Weighted gradient averaging for DistributedDataParallel: each rank counts as much as the samples it processed.

With a loss that is the mean over the local batch, rank r's gradient g_r is the mean over its x_r samples, and the
gradient of the mean over all X = sum x_r samples is ``g = sum_r x_r g_r / X`` (LB-BSP, weighted aggregation). Plain
averaging is that only while all x_r are equal. Start at :meth:`WeightedAverage.reduce`.

Under gradient accumulation the micro-batches of a rank may differ in size as well: :meth:`SampleCounter.weigh` gives each
its own samples as weight, so the result is the mean over all samples whatever the micro-batches.
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a communication hook with real types.

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddltool.errors import InputError
from ddltool.runtime.hook.telemetry import Exchange


def leading_size(values: Iterable[Any]) -> int | None:
    """Return dim 0 of the first tensor that has one, looking into lists, tuples and mappings; None if there is none.

    >>> leading_size([torch.tensor(2.0), {"pixels": torch.zeros(8, 3)}])
    8
    """
    for value in values:
        if isinstance(value, Tensor):
            found = value.shape[0] if value.dim() > 0 else None
        elif isinstance(value, Mapping):
            found = leading_size(value.values())
        else:
            found = leading_size(value) if isinstance(value, (list, tuple)) else None
        if found is not None:
            return found
    return None


class SampleCounter:
    """Counts the samples that this rank processes, over all micro-batches since they were last taken.

    Only forward passes that can be trained on count: gradients enabled (the caller sees to that) and the module in
    training mode. ``required``: samples are needed as weights, so it is an error when they cannot be counted.
    """

    def __init__(self, *, required: bool = True) -> None:
        self._required = required
        self._counted = 0
        self._announced: int | None = None
        self._passed_in_eval_mode = False
        self._passes = 0
        self._reference = 0  # samples of the first pass that had any: what the others are weighed against
        self._weight = 1.0
        self.latest = 0
        """Samples of the pass that was counted last."""

    def announce(self, samples: int) -> None:
        """Let the next counted forward pass stand for ``samples`` samples. Raises InputError when negative."""
        if samples < 0:
            raise InputError("count_samples", f"is {samples}", "give the number of samples, 0 or more")
        self._announced = samples

    def count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count one forward pass. Raises InputError when its arguments hold no tensor and nothing was announced."""
        if not module.training:
            self._passed_in_eval_mode = True
            return
        samples = self._announced if self._announced is not None else leading_size((*args, *kwargs.values()))
        self._announced = None
        if samples is None and self._required:
            problem = "the model's arguments hold no tensor to count samples by"
            raise InputError("forward", problem, "call hook.count_samples(n) before each forward pass")
        self.latest = samples or 0
        self._counted += self.latest
        self._passes += 1
        self._reference = self._reference or samples or 0
        self._weight = (samples or 0) / self._reference if self._reference else 1.0

    def weigh(self, module: nn.Module, args: object, output: Any) -> Any:
        """Give the pass that was counted last its samples as weight: a forward hook of the model.

        Gradients that enter the model through its output are scaled by the pass's samples over those of the first pass
        since they were last taken; a pass without samples adds nothing. While all passes are equal (None returned) nothing
        is touched. What a loss adds past the output (a penalty on the parameters, say) is not scaled.

        Raises InputError when passes differ and the output holds no tensor with a gradient.
        """
        if not (module.training and torch.is_grad_enabled()) or self._weight == 1.0 or not self._required:
            return None
        return scaled(output, self._weight)

    def take(self) -> int:
        """Return the samples counted since the last call and start again from 0; see :meth:`take_weight`."""
        return self.take_weight()[0]

    def take_weight(self) -> tuple[int, int]:
        """Return the samples counted since the last call, and as how many the sum of the passes' gradients counts.

        With K passes of x_k samples and mean gradients g_k, weighed against x_1, ``K x_1 sum_k (x_k / x_1) g_k`` is K times
        the sum over all samples: so the second number is ``K x_1``, for equal passes the first one. Starts again from 0.

        Raises InputError when only forward passes in evaluation mode came before: their gradient would silently weigh
        nothing.
        """
        samples, passed, self._counted, self._passed_in_eval_mode = self._counted, self._passed_in_eval_mode, 0, False
        weight = self._passes * self._reference
        self._passes, self._reference, self._weight = 0, 0, 1.0
        if samples == 0 and passed and self._required:
            problem = "gradients of a forward pass in evaluation mode, whose samples were not counted"
            raise InputError("backward", problem, "call train() on the wrapped model before training on it")
        return samples, weight


class _Scaled(torch.autograd.Function):
    """The same values; gradients on their way back are multiplied by a weight."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return value.clone()  # not a view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Not a product for 0: the mean over no samples is NaN.
        return (gradient * ctx.weight if ctx.weight else torch.zeros_like(gradient)), None


def scaled(output: Any, weight: float) -> Any:
    """Return what a model returned, the gradients that enter it by ``weight``.

    Raises InputError where it holds no tensor with a gradient.
    """
    if weight == 1.0:
        return output
    found: list[Tensor] = []
    made = _scaled(output, weight, found)
    if not found:
        problem = f"is a {type(output).__name__} without a tensor to weigh, and batches of a step differ in size"
        raise InputError("the model's output", problem, "return tensors, or use batches of equal size")
    return made


def _scaled(value: Any, weight: float, found: list[Tensor]) -> Any:
    """Return ``value`` with all tensors in it scaled that have gradients; those go to ``found``."""
    if isinstance(value, Tensor):
        if not value.requires_grad:
            return value
        found.append(value)
        return _Scaled.apply(value, weight)  # type: ignore[no-untyped-call]
    if isinstance(value, Mapping):
        made = copy.copy(value)
        for key, entry in value.items():
            if (after := _scaled(entry, weight, found)) is not entry:
                made[key] = after  # type: ignore[index]
        return made
    if isinstance(value, (list, tuple)):
        entries = [_scaled(entry, weight, found) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if is_dataclass(value) and not isinstance(value, type):
        record = copy.copy(value)
        for field in fields(value):
            object.__setattr__(record, field.name, _scaled(getattr(value, field.name), weight, found))
        return record
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    """One backward pass whose gradients are exchanged: what its buckets have in common."""

    samples: int
    weight: int  # what this rank's accumulated gradient counts as, in samples
    totals: Tensor  # one number: this rank's samples, and once `counting` is complete, those of all ranks
    counting: dist.Work
    exchange: Exchange | None


class Recorder(Protocol):
    """Who wants to know about exchanges of gradients: telemetry, or what chooses batch sizes."""

    def begin_exchange(self, samples: int, totals: Tensor | None) -> Exchange:
        """Return the record of a backward pass whose gradients are about to be exchanged."""
        ...


class WeightedAverage:
    """The state of the communication hook: ``model.register_comm_hook(None, average.reduce)``.

    Args:
        counter: where this rank's samples come from.
        planned_total: samples per step of all ranks together, as planned; gradients are scaled for this total before
            they are summed, and corrected afterwards in steps where the ranks counted another one.
        group: the process group of the model.
        side: a gloo group of the same ranks, for numbers that live on the host.
        recorder: measures when gradients are ready, all here, and averaged; None: nobody wants to know.
        compress: the type in which gradients travel; None: their own. They are scaled before and corrected after that in
            their own type, so only the travelling sum is rounded.
    """

    def __init__(
        self,
        counter: SampleCounter,
        planned_total: int,
        group: dist.ProcessGroup,
        side: dist.ProcessGroup,
        recorder: Recorder | None = None,
        compress: torch.dtype | None = None,
    ) -> None:
        self._compress = compress
        self._counter = counter
        self._planned_total = planned_total
        self._group = group
        self._side = side
        self._recorder = recorder
        self._round: _Round | None = None
        self._complete = True  # between the last bucket and the next first one (an interruption would end DDP as well)
        self._beacon = torch.zeros(1)

    def reduce(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # exported only where torch.distributed is available
    ) -> torch.futures.Future[Tensor]:
        """Sum ``x_r g_r / X`` of one bucket over the ranks. DDP calls this for each bucket as it becomes ready.

        Works for any floating-point type, unused parameters, gradient accumulation under ``no_sync`` (x_r then counts
        all micro-batches) and scaled losses, for the sum is linear. Torch's wrappers may go around
        it, as in ``bf16_compress_wrapper(average.reduce)``.
        """
        buffer = bucket.buffer()
        opens = self._complete
        current = self._open(buffer.device) if opens or self._round is None else self._round
        # The round stays here until the next one: the main thread shall be the one that lets go of its tensors.
        self._round, self._complete = current, bucket.is_last()
        if bucket.is_last() and current.exchange is not None:
            self._watch_arrival(current.exchange, current.counting if opens and not buffer.is_cuda else None)
        if current.samples:
            buffer.mul_(current.weight / self._planned_total)
        else:
            buffer.zero_()  # not a product: the mean over no samples is NaN
        sent = buffer if self._compress is None else buffer.to(self._compress)
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(partial(self._finish, current, buffer))
        return future

    def _open(self, device: torch.device) -> _Round:
        """Start the count of all ranks' samples: one number, on the device and in the group of the gradients.

        It is first in the group's queue, so it is there before the buckets are, and never read on a CUDA host.
        """
        samples, weight = self._counter.take_weight()
        totals = torch.full((1,), samples, dtype=torch.float64, device=device)
        exchange = self._recorder.begin_exchange(samples, totals) if self._recorder is not None else None
        counting = dist.all_reduce(totals, group=self._group, async_op=True)
        return _Round(samples=samples, weight=weight, totals=totals, counting=counting, exchange=exchange)

    def _watch_arrival(self, exchange: Exchange, beacon: dist.Work | None) -> None:
        """Note that this rank is ready, and let ``exchange`` learn when the slowest rank is.

        ``beacon`` is a collective that was started just now; without one, a tiny one is started for the purpose.
        """
        exchange.note_ready()
        if beacon is None:
            beacon = dist.all_reduce(self._beacon, group=self._side, async_op=True)
        beacon.get_future().then(exchange.note_arrival)

    def _finish(self, current: _Round, given: Tensor, future: torch.futures.Future[list[Tensor]]) -> Tensor:
        """Correct a summed bucket for the total that was counted, where it differs from the planned one."""
        buffer = future.value()[0]
        if buffer.dtype != given.dtype:
            buffer = given.copy_(buffer)
        current.counting.wait()
        if buffer.is_cuda:
            buffer.mul_(self._planned_total / current.totals[0].clamp(min=1))
        elif (total := current.totals.item()) not in (0, self._planned_total):
            buffer.mul_(self._planned_total / total)
        if current.exchange is not None:
            current.exchange.note_done()
        return buffer
