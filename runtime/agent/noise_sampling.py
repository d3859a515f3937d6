"""Estimates gradient noise from norms of training's own gradients, on every k-th step. Start at :class:`NoiseSampler`.

The noise follows from the squared norms of gradients of two batch sizes, a small and a big one
(:mod:`ddltool.analyzers.job.goodput.noise_scale`). Which two depends on the job:

- several replicas: each rank's own gradient, seen when it is accumulated and before DDP averages it, and the averaged
  gradient.
- one replica with accumulation: the gradient after the first pass, and that of the whole step.
- one replica without: the gradients of two consecutive steps (a *pair*), which needs a copy of one for a step's time.

A *pass* is a forward and a backward pass on a part of a step's batch. Parameters have hooks in sampled steps only. A
step that is not sampled costs a comparison of integers; a sampled one reads each gradient twice, and sends one number
in addition to the gradients. How often to sample follows from the measured cost.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddltool.analyzers.job.goodput.noise_scale import NoiseScaleEstimator, NoiseTerms, differenced_terms, noise_terms
from ddltool.errors import InputError
from ddltool.runtime.processes.batches import Pass
from ddltool.runtime.processes.step_times import Stamp, seconds_between, stamp

COSTS_KEPT = 9
"""Number of latest sampled steps whose median cost says how often to sample; odd, so that one is in the middle."""
MOST_STEPS = 1000
"""The noise is sampled at least once in this many steps."""
SAMPLES_HELD = 256
"""Most observations that wait on the device to be read; of more, the oldest are dropped."""


class Norms(NamedTuple):
    """One observation of two batch sizes, still on the device."""

    values: Tensor
    """Squared norms of the small and the big batch's gradient, (2,); of a pair: of the first, the second and their
    difference, (3,)."""
    small: float
    """Samples behind the first norm."""
    big: float
    """Samples behind the second norm; equal to ``small`` for two consecutive steps."""


def _terms(norms: Norms) -> NoiseTerms:
    """Return the estimates of ``|G|^2`` and S that one observation makes; the host waits for its norms.

    It has two squared norms for a small and a big batch, and three for a pair of steps (see :class:`Norms`). Raises
    InputError for norms that are not finite.
    """
    squared_norms = norms.values.double().tolist()
    if len(squared_norms) == 2:
        small_sqr, big_sqr = squared_norms
        return noise_terms(small_sqr, big_sqr, norms.small, norms.big)
    first_sqr, second_sqr, difference_sqr = squared_norms
    # Of a pair of gradients a, b: |a - b|^2 = |a|^2 + |b|^2 - 2 a.b
    inner_product = (first_sqr + second_sqr - difference_sqr) / 2
    return differenced_terms(first_sqr, second_sqr, inner_product, norms.big)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Previous:
    """The first step of a pair: its number and samples, its gradients times the scales P, and their squared norm."""

    step: int
    samples: int
    gradients: list[Tensor]
    scales: list[Tensor] | None
    squared: Tensor


class Preconditioner:
    """The factor P by which the optimizer scales each coordinate of the gradient (Pollux, section 3.1).

    For optimizers with the state v = ``exp_avg_sq`` (Adam, AdamW, NAdam, RAdam) P is ``1 / (sqrt(v / (1 - beta2^step))
    + eps)``; with v = ``square_avg`` (RMSprop) it is ``1 / (sqrt(v) + eps)``; for all others, and before the first
    update, 1. P is computed once per sampled step: :meth:`forget` ends its validity.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        groups = enumerate(optimizer.param_groups)
        self._group_index = {id(parameter): index for index, group in groups for parameter in group["params"]}
        self.forget()

    @property
    def is_pending(self) -> bool:
        """Whether the optimizer has no scales yet, but will after its first update.

        Norms taken before would have P = 1, and so another unit than all later ones.
        """
        # Adam and its variants have the option "betas", RMSprop "alpha".
        groups = self._optimizer.param_groups
        return not self._optimizer.state and any("betas" in group or "alpha" in group for group in groups)

    def forget(self) -> None:
        """Drop the cached scales; the next call of :meth:`scales` reads the optimizer's state again."""
        self._scale_by_id: dict[int, Tensor | None] = {}

    def scales(self, parameters: Sequence[nn.Parameter]) -> list[Tensor] | None:
        """Return P for each parameter, in the parameter's shape; None if P is 1 for all.

        A parameter's P is computed at the first call and cached until :meth:`forget`.
        """
        for parameter in parameters:
            if id(parameter) not in self._scale_by_id:
                self._scale_by_id[id(parameter)] = self._scale(parameter)
        scales = [self._scale_by_id[id(parameter)] for parameter in parameters]
        if all(scale is None for scale in scales):
            return None
        pairs = zip(scales, parameters, strict=True)
        return [torch.ones_like(parameter) if scale is None else scale for scale, parameter in pairs]

    def _scale(self, parameter: nn.Parameter) -> Tensor | None:
        """Return P of one parameter, in its shape, from the optimizer's mean of squared gradients; None if P is 1."""
        # Not [] on the state: it is a defaultdict, and the empty entry that [] makes would get into checkpoints.
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        mean_square = state.get("exp_avg_sq", state.get("square_avg"))
        index = self._group_index.get(id(parameter))
        if mean_square is None or index is None or mean_square.shape != parameter.shape:
            return None  # without a mean square for each coordinate there is no P
        options = self._optimizer.param_groups[index]
        bias_correction = 1.0
        if "exp_avg_sq" in state:  # Adam corrects the bias of the mean square, RMSprop does not
            steps_made = float(state.get("step", 0))
            if steps_made < 1:
                return None
            bias_correction = 1.0 - float(options["betas"][1]) ** steps_made
        scale: Tensor = (mean_square / bias_correction).sqrt_().add_(options["eps"]).reciprocal_()
        return scale


def squared_norm(tensors: Sequence[Tensor], scales: Sequence[Tensor] | None = None) -> Tensor:
    """Return ``sum |p t|^2`` over all ``tensors`` t and their ``scales`` p (None: 1), a tensor of shape ().

    It is float64 for float64 tensors, else float32, and stays on the device, for which the host does not wait.
    """
    if not tensors:
        return torch.zeros(())
    if scales is not None:
        tensors = torch._foreach_mul(list(tensors), list(scales))
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    norms: Sequence[Tensor] = torch._foreach_norm(list(tensors), 2, dtype=wide)
    return torch.stack(list(norms)).square().sum()


class NoiseSampler:
    """Takes the norms of gradients in sampled steps, and gives observations to an estimator.

    Each pass calls :meth:`begin` and :meth:`after_pass`; a step's last pass also calls :meth:`begin_last_backward`,
    :meth:`complete` and :meth:`finish`.

    Args:
        parameters: the trained parameters.
        optimizer: its state gives the scale P of each coordinate (:class:`Preconditioner`).
        world_size: number of replicas.
        group: the replicas' process group; None with one replica.
        every: sample every so many steps; 0: never.

    Attributes:
        every: as above; change it on all ranks at the same step.
        cost_s: median seconds that sampling took per sampled step (or pair of steps), on the device where there is one;
            NaN before the first. Known after :meth:`drain`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        world_size: int,
        group: dist.ProcessGroup | None,
        every: int = 1,
    ) -> None:
        """Prepare to sample; no hooks are registered before a sampled step."""
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._preconditioner = Preconditioner(optimizer)
        self._world_size = world_size
        self._group = group
        self._cuda = any(parameter.is_cuda for parameter in self._parameters)
        self.every = every
        self.cost_s = math.nan
        self._observations: list[Norms] = []
        self._step_spans: list[tuple[Stamp, Stamp]] = []  # (start, end) of the work of sampling in this step
        self._spans_by_step: deque[list[tuple[Stamp, Stamp]]] = deque(maxlen=COSTS_KEPT)
        self._spent_s = 0.0  # seconds of the host since the last `take_spent_s`
        self._previous: _Previous | None = None
        self._hooks: list[Any] = []
        self._forget_step()

    def _forget_step(self) -> None:
        """Drop all state of one sampled step: hooks, norms, and the optimizer's scales."""
        self._is_step_sampled = False
        self._remove_hooks()
        self._local_norms: list[Tensor] = []
        # (squared norm of the small batch's gradient, its samples); 0 samples: the norm is not used.
        self._small_batch_norm: tuple[Tensor, float] | None = None
        self._reduction: dist.Work | None = None
        self._preconditioner.forget()

    def _is_sampled(self, current_pass: Pass) -> bool:
        """Return whether the step of ``current_pass`` is sampled: every k-th step (k: ``every``), if it is a full one.

        One replica without accumulation has only one batch size, so the step after it is sampled too: the two make a
        pair. No step is sampled before the optimizer has its scales.
        """
        if not self.every or not current_pass.is_full or self._preconditioner.is_pending:
            return False
        needs_pair = self._world_size == 1 and current_pass.passes == 1 and self.every > 1
        steps_since_due = current_pass.step % self.every
        return steps_since_due == 0 or (needs_pair and steps_since_due == 1)

    def begin(self, current_pass: Pass) -> None:
        """Begin a pass of the training loop; at the first pass of a step, decide whether the step is sampled."""
        if current_pass.number == 0:
            self._forget_step()
            self._is_step_sampled = self._is_sampled(current_pass)
            # The cost of the second step of a pair is added to that of the first.
            if self._previous is None or self.every == 1:
                self._step_spans = []

    def after_pass(self, current_pass: Pass) -> None:
        """With one replica that accumulates, take the squared norm of the small batch's gradient after a step's first pass.

        Its loss was weighted by the pass's share of the step, which is divided out.
        """
        if self._is_step_sampled and self._world_size == 1 and current_pass.passes > 1 and current_pass.number == 0:
            with self._measured_time():
                sizes = current_pass.split.sizes_of(current_pass.step_samples)  # (1, passes) samples
                gradients, scales = self._gradients()
                norm = squared_norm(gradients, scales) / current_pass.weight**2  # squared, as the norm is
                self._small_batch_norm = norm, int(sizes[0, 0])

    def begin_last_backward(self) -> None:
        """With several replicas, hook into each parameter before a step's last backward pass.

        So this rank's own gradients are seen before DDP averages them.
        """
        if self._is_step_sampled and self._group is not None:
            self._local_norms = []
            trained = [value for value in self._parameters if value.requires_grad]
            self._hooks = [value.register_post_accumulate_grad_hook(self._record_squared_norm) for value in trained]

    def _record_squared_norm(self, parameter: Tensor) -> None:
        """Record the squared norm of one parameter's gradient on this rank: a hook that runs when it is accumulated."""
        with self._measured_time():
            try:
                assert isinstance(parameter, nn.Parameter)
                gradients = [] if parameter.grad is None else [parameter.grad]
                self._local_norms.append(squared_norm(gradients, self._preconditioner.scales([parameter])))
            except Exception:  # the other ranks wait for a number of this rank, so it must send one: NaN
                self._local_norms.append(torch.full((), math.nan, device=parameter.device))

    def complete(self, current_pass: Pass, correction: float) -> None:
        """Start the sum over all ranks of their own squared norms, which is the small batch's squared norm.

        Call it with several replicas when this rank's gradients are complete; the sum runs in the background.
        ``correction``: the factor by which the averaged gradients will be multiplied.
        """
        if self._is_step_sampled and self._group is not None:
            with self._measured_time():
                self._remove_hooks()
                sizes = current_pass.split.sizes_of(current_pass.step_samples).sum(axis=1)  # (n,) samples by rank
                own_share = float(sizes[dist.get_rank(self._group)]) / current_pass.step_samples
                squared = torch.stack(self._local_norms).sum() if self._local_norms else torch.full((), math.nan)
                # A gradient here is n x share x the mean gradient of the rank's samples (n ranks, because DDP will divide
                # by n), so its squared norm is divided by (n x share)^2; the ranks are averaged with weights `share`.
                small = squared * correction**2 / (own_share * self._world_size**2)
                # The small batch is a rank's mean number of samples; a rank without any has no gradient to compare.
                mean_samples = current_pass.step_samples / len(sizes)
                self._small_batch_norm = small, mean_samples if sizes.min() else 0.0
                self._reduction = dist.all_reduce(small, group=self._group, async_op=True)

    def _remove_hooks(self) -> None:
        """Remove the hooks on parameters, if there are any."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def finish(self, current_pass: Pass) -> None:
        """Take the squared norm of the step's complete gradients and keep the observation; call it before the update.

        Without a second batch size, two consecutive steps make one observation.
        """
        if not self._is_step_sampled:
            return
        with self._measured_time():
            if self._reduction is not None:
                self._reduction.wait()
            if self._small_batch_norm is not None:
                small, samples = self._small_batch_norm
                big = squared_norm(*self._gradients()).to(small.dtype)
                if samples:
                    self._store_observation(torch.stack([small, big]), samples, current_pass.step_samples)
            elif self._world_size == 1 and current_pass.passes == 1:
                self._finish_pair(current_pass)
        # The first step of a pair is not an observation yet: its spans are counted with the second's.
        if self._previous is None or self.every == 1:
            self._spans_by_step.append(self._step_spans)
        self._forget_step()

    def _finish_pair(self, current_pass: Pass) -> None:
        """Make an observation of this step and the one before, or keep this step's gradient as the first of a pair.

        The step before is a pair's first only if its number of samples and of gradients are the same. Both gradients are
        scaled by the first step's P, so that they have one unit; the norm of their difference gives their inner product.
        """
        previous = self._previous
        self._previous = None
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        is_second = (
            previous is not None
            and previous.step == current_pass.step - 1
            and previous.samples == current_pass.step_samples
            and len(previous.gradients) == len(gradients)
        )
        if previous is not None and is_second:
            scaled = gradients if previous.scales is None else list(torch._foreach_mul(gradients, previous.scales))
            squared = squared_norm(scaled)
            torch._foreach_sub_(previous.gradients, scaled)  # in place, because the copy is needed for nothing else
            values = torch.stack([previous.squared, squared, squared_norm(previous.gradients)])
            self._store_observation(values, current_pass.step_samples, current_pass.step_samples)
            if self.every > 1:  # the pair is complete; with every step sampled, this one begins the next pair
                return
        if self.every == 1 or current_pass.step % self.every == 0:
            self._previous = self._as_first_of_pair(current_pass)

    def _as_first_of_pair(self, current_pass: Pass) -> _Previous:
        """Return a copy of the present gradients, times their scales P, as the first step of a pair."""
        gradients, scales = self._gradients()
        copies = (
            [gradient.clone() for gradient in gradients]
            if scales is None
            else list(torch._foreach_mul(gradients, scales))
        )
        return _Previous(
            step=current_pass.step,
            samples=current_pass.step_samples,
            gradients=copies,
            scales=scales,
            squared=squared_norm(copies),
        )

    def _gradients(self) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return (gradients of the parameters that have one, their scales P or None if all are 1)."""
        trained = [parameter for parameter in self._parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        return gradients, self._preconditioner.scales(trained)

    def _store_observation(self, values: Tensor, small: float, big: float) -> None:
        """Keep an observation, still on the device, and drop the oldest beyond SAMPLES_HELD.

        The arguments are the fields of :class:`Norms`: squared norms, and the samples behind the first and the second.
        """
        self._observations.append(Norms(values.detach(), small, big))
        del self._observations[:-SAMPLES_HELD]

    def drain(self, estimator: NoiseScaleEstimator) -> None:
        """Give the estimator the observations since the last call, and update :attr:`cost_s`.

        Here, and only here, the host waits for the device. An observation that is not finite (an overflow under loss
        scaling, or a failed hook) is left out.
        """
        observations = self._observations
        self._observations = []
        for norms in observations:
            with suppress(InputError):  # raised for norms that are not finite
                estimator.add(_terms(norms))
        if self._cuda and observations:
            torch.cuda.synchronize()  # the stamps after the last norm may not have passed yet
        if self._spans_by_step:
            seconds = [sum(seconds_between(*span) for span in spans) for spans in self._spans_by_step]
            self.cost_s = statistics.median(seconds)

    def take_spent_s(self) -> float:
        """Return the seconds of the host that sampling took since the last call."""
        spent = self._spent_s
        self._spent_s = 0.0
        return spent

    @contextmanager
    def _measured_time(self) -> Iterator[None]:
        """Count the block's time as spent on sampling; an exception in the block leaves it uncounted."""
        start = stamp(self._cuda)
        yield
        end = stamp(self._cuda)
        self._step_spans.append((start, end))
        self._spent_s += end.host_s - start.host_s


def affordable_interval(cost_s: float, step_s: float, share: float) -> int:
    """Return the smallest k for which ``cost_s`` on every k-th step of ``step_s`` seconds is at most ``share`` of the time.

    It is at most :data:`MOST_STEPS`, and 1 if an argument is not above 0.

    >>> affordable_interval(0.002, 0.05, 0.005)
    8
    """
    if not (cost_s > 0 and step_s > 0 and share > 0):
        return 1
    interval = cost_s / (step_s * share)
    if not math.isfinite(interval):
        return MOST_STEPS
    # 1e-12: so that a whole number that rounding has made a little larger is not rounded up to the next one.
    whole_steps = math.ceil(interval * (1 - 1e-12))
    return max(1, min(MOST_STEPS, whole_steps))
