"""Losses that weigh as much as what they were counted over, whatever the ranks' batches. Start at :meth:`LossScaler.loss`.

DDP and FSDP average gradients over the N ranks as if each had as many samples. With a loss that is a mean over the x_r
samples of rank r, and X = sum x_r, the gradient of the mean over all samples is ``sum_r x_r g_r / X`` (LB-BSP, weighted
aggregation): the plain average of gradients of losses that were multiplied by ``N x_r / X``. So the weight enters at the
loss, and everything behind it follows: any number of passes through the model, terms that reach other ranks (gathered
embeddings, SyncBatchNorm), accumulation, unused parameters, any wrapper that averages.

The script says what its loss is; nothing is guessed from it. What it says is measured in the first updates and wherever the
loss's graph changes shape (:mod:`~ddltool.runtime.hook.claims`), and what would part the ranks is found after every update
(:mod:`~ddltool.runtime.hook.guards`). Only official places of torch are used: hooks of modules, tensors, parameters and
optimizers, and an autograd function of our own, in which a backward pass is seen to begin.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddltool.errors import InputError
from ddltool.runtime.hook.claims import (
    ForwardPass,
    LossGraph,
    Output,
    OutputKey,
    find_coupling,
    largest_difference,
    mark_outputs,
    mark_weighed,
    nested_tensors,
    output_gradients,
)
from ddltool.runtime.hook.guards import FIRST_UPDATES, UpdateGuard, check_gradient_hooks
from ddltool.runtime.hook.pending_batches import PendingBatches, Share
from ddltool.runtime.hook.telemetry import Watcher
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.liveness import LivenessMonitor

Reduction = Literal["mean", "sum", "average"]
_NODES_PER_LOOK = 300
"""A loss's graph of so many nodes is walked in every step, a larger one every so often."""
_SENTINELS = 8
"""Parameters that tell, after the first updates, whether a backward pass accumulates gradients."""
_backwards = 0


def backwards_begun() -> int:
    """Return how many backward passes this process has begun since a loss was first weighed or observed."""
    return _backwards


@dataclass(eq=False, slots=True)
class _BackwardPass:
    """A backward pass that is under way.

    Attributes:
        number: how many have begun in this process.
        scalers: those whose model it trains, as far as is known.
        is_weighed: whether it has come by a loss that ``hook.loss`` returned.
        forward_passes: those that weighed losses come from.
        accumulating: the scalers whose model's parameters have got gradients.
        expected: gradients of measured outputs as far as they come from weighed losses.
        explained: further outputs that get gradients by way of the measured ones, or of weighed losses that were not measured.
    """

    number: int
    scalers: dict[LossScaler, None] = field(default_factory=dict)
    is_weighed: bool = False
    forward_passes: dict[ForwardPass, None] = field(default_factory=dict)
    accumulating: set[LossScaler] = field(default_factory=set)
    expected: dict[OutputKey, Tensor] = field(default_factory=dict)
    explained: set[OutputKey] = field(default_factory=set)


_under_way: _BackwardPass | None = None


@dataclass(slots=True)
class _Checked:
    """What is known of a weighed loss when its backward pass begins; without measurement only where it comes from.

    Attributes:
        gradients: of the loss by measured outputs, multiplied by its weight.
        explained: outputs that those are computed from, and those without rows.
    """

    forward_passes: list[ForwardPass] = field(default_factory=list)
    gradients: dict[OutputKey, Tensor] = field(default_factory=dict)
    explained: set[OutputKey] = field(default_factory=set)


class LossScaler:
    """One rank's weights. All ranks make the same ones, and the same backward passes.

    Args:
        job: this process's place.
        name: what the script calls this, for messages.
        sizes: returns the (n,) samples per step of the ranks as planned: what batches of a loader of the script's own have,
            on the first step at least; None: unknown.
        passes: in how many passes a script may split such a batch.
        watcher: wants to know when gradients are complete.

    Attributes:
        last_weight: what the last loss, or term of one, was multiplied by.
    """

    def __init__(
        self,
        job: DistributedJob,
        name: str,
        sizes: Callable[[], Sequence[int]] | None = None,
        *,
        passes: int = 1,
        watcher: Watcher | None = None,
    ) -> None:
        self._job, self.name, self._sizes, self._split, self.watcher = job, name, sizes, passes, watcher
        self.pending = PendingBatches()
        """The batches that the training loop has; its loaders say so."""
        self._weighs = job.world_size > 1
        self._forwards_begun = self._forwards_inside = 0
        self.last_weight = 1.0
        self._seen_full = self._is_uneven = False
        self._guard: UpdateGuard | None = None
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._hooks: list[Any] = []
        self._sentinels: list[Any] = []
        self._weighed_losses = self._losses = 0
        self._shapes: set[tuple[object, ...]] = set()
        self._nodes = 0
        self._is_said = False
        self._returned: set[int] = set()
        """Ids of the parameters that the last forward pass has returned."""

    # What a model and its loaders tell.

    def open(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Weigh the losses of ``model`` from now on, until :meth:`close`.

        Raises InputError, on all ranks, where the model cannot be trained alike on all of them, and where somebody attached to
        it already.
        """
        if self._weighs and any(each._model() is model for each in _open):
            raise InputError("model", "is attached to already", "attach, balance or make an agent once per model")
        self._model = found = weakref.ref(model)
        self.pending.trains = lambda: getattr(found(), "training", True)
        before = _Hook(lambda module, args, kwargs: self.begin_forward(module, (*args, *kwargs.values())))
        self._hooks = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(_Hook(lambda _, __, output: self.end_forward(output))),
        ]
        _open.add(self)
        if self._job.world_size > 1:
            LivenessMonitor.of_this_job().passes = backwards_begun
        trained = [value for value in model.parameters() if value.requires_grad]
        self._sentinels = [value.register_post_accumulate_grad_hook(self._note_gradient) for value in trained]
        if self._weighs and optimizers:
            self._guard = UpdateGuard(self._job, model, optimizers, lambda: self._is_uneven)
            self._hooks += [each.register_step_post_hook(self._after_update) for each in optimizers]

    def close(self) -> None:
        """Weigh nothing any more. Idempotent."""
        _open.discard(self)
        for handle in (*self._hooks, *self._sentinels):
            handle.remove()
        self._hooks, self._sentinels = [], []
        if self._guard is not None:
            self._guard.close()
        self._guard, self._weighs = None, False

    def begin_forward(self, module: nn.Module | None, values: Iterable[Any]) -> None:
        """A forward pass with gradients begins; None: a trainer that calls the module otherwise, in training."""
        global _under_way
        if not self._forwards_inside:
            _under_way = None  # an earlier backward pass has failed, or has ended
        self.pending.begin_forward(values)
        if self.watcher is not None and (module is None or module.training):
            self.watcher.begin_forward()
        self._forwards_begun += 1
        self._forwards_inside += module is not None

    def end_forward(self, output: Any) -> None:
        """A forward pass with gradients is over."""
        self._forwards_inside = 0
        if self._guard is None:
            return
        forward_pass, outputs = ForwardPass(self), list(nested_tensors(output))
        self._returned = {id(tensor) for tensor in outputs if tensor.is_leaf and tensor.requires_grad}
        mark_outputs(outputs, forward_pass)
        if self._guard.is_measured:
            model = self._model()
            if self._guard.updates < 2 and self.averages and model is not None:
                try:
                    check_gradient_hooks(model, LossScaler)
                except InputError as refusal:
                    self._guard.refuse(refusal)
            for place, tensor in enumerate(outputs):
                if tensor.grad_fn is not None:
                    tensor.register_hook(partial(self._note_arrival, (forward_pass, place)))

    # What the script says of a loss.

    def loss(
        self,
        loss: Tensor,
        *,
        count: float | Tensor | None = None,
        reduction: Reduction = "mean",
        of: float | None = None,
    ) -> Tensor:
        """Return ``loss`` with gradients that weigh right under the plain average over ranks; its value stays.

        Args:
            loss: the loss of this rank's pass, or one term of it; each term is said.
            count: how many samples, tokens or weights of labels the loss is a mean over on this rank, or with
                ``reduction="sum"`` a sum over; 0 is fine. All ranks give theirs, which costs one small message. None: the
                samples of the batch.
            of: what all ranks count, where it is known; None: they are asked.
            reduction: how ranks' losses come together: each is a ``mean``, to be weighed by its count; each is a ``sum``, to be
                divided by the counts of all ranks, or without a count to be added up as it is (a sum divided by a number that
                counts all ranks); their plain ``average`` is right.

        Raises InputError where the share of the batch is unknown. What is found to be false is refused after the update, by all
        ranks together.
        """
        ranks = self._job.world_size
        if reduction not in ("mean", "sum", "average"):
            raise InputError("reduction", f"is {reduction!r}", "give mean, sum or average")
        if not torch.is_grad_enabled() or not (self._weighs or self.pending.is_known):
            return loss
        self._is_said = True
        share = None
        if count is not None and (ranks > 1 or of is not None):
            count = float(count)
            if not count >= 0:
                raise InputError("count", f"is {count:g}", "give what the loss is a mean over, 0 or more")
            total = sum(self._counts(count)) if of is None else of
            self.pending.use(self._forwards_begun)
            factor = ranks * count / total if total else 1.0
            if reduction == "sum":  # its gradients are those of the sum: a mean's are smaller by the count
                factor = factor / count if count else 0.0
        elif reduction == "mean":
            share = self.pending.share(self._forwards_begun, self.name) or self._counted()
            self._is_uneven = self._is_uneven or not share.even
            factor = ranks * share.samples / share.total if share.total else 1.0
        else:
            factor = float(ranks) if reduction == "sum" else 1.0
            self.pending.use(self._forwards_begun)
        if reduction == "average":
            factor = 1.0
        self.last_weight = factor
        self._is_uneven = self._is_uneven or abs(factor - 1) > 1e-9
        if not loss.requires_grad:  # a rank without labels has taken part in the message
            return loss
        checked = self._check(loss, factor, share, reduction)
        weighed: Tensor = _Weighed.apply(loss, factor, self, checked)  # type: ignore[no-untyped-call]
        mark_weighed(weighed)
        self._losses += 1
        return weighed

    def _counts(self, mine: float) -> list[float]:
        """Return all ranks' numbers."""
        begin_s = time.perf_counter()
        counts = [each for (each,) in self._job.numbers(mine)]
        if self.watcher is not None:
            self.watcher.pause(time.perf_counter() - begin_s)
        return counts

    def _counted(self) -> Share:
        """Return the share by what the script said, or the size of its forward passes: for loaders of its own."""
        planned = None if self._sizes is None else self._sizes()[self._job.rank]
        alone = self._job.world_size == 1
        samples = sum(self.pending.told or self.pending.passed) if alone else self._count(planned)
        counts = [samples] if alone else [int(each) for each in self._counts(samples)]
        if min(counts) < 0:
            seen = ", ".join(map(str, self.pending.told or self.pending.passed)) or "missing"
            problem = f"the batch cannot be counted by dimension 0 of the model's arguments ({seen})"
            if planned is not None:
                problem += f": planned are {planned} samples"
            remedy = f"call {self.name}.count_samples(n) before each forward, or {self.name}.loss(loss, count=n)"
            raise InputError("forward", problem, remedy)
        self._seen_full = True
        self.pending.count(self._forwards_begun, samples, sum(counts))
        return Share(samples, sum(counts), len(set(counts)) == 1)

    def _count(self, planned: int | None) -> int:
        """Return the samples by what was said, or the sizes of the forward passes; -1 where they do not tell."""
        told, passed = self.pending.told, self.pending.passed
        if told:
            return told[0] if len(set(told)) == 1 else -1
        if planned is not None:
            expected = {planned, planned // self._split} if planned % self._split == 0 else {planned}
            if found := [size for size in passed if size in expected]:
                return found[0]
            if not self._seen_full:
                return -1
        return passed[0] if len(set(passed)) == 1 else -1

    # What is measured of it.

    def _check(self, loss: Tensor, factor: float, share: Share | None, reduction: Reduction) -> _Checked:
        """Check one loss by its graph, and in measured updates by its derivatives; refusals wait for the update.

        ``share``: of the batch, where the loss is said to be a mean over its samples and nothing else.
        """
        checked, guard = _Checked(), self._guard
        if guard is None:
            return checked
        steps_per_look = 1 + self._nodes // _NODES_PER_LOOK
        if not guard.is_measured and self._losses % steps_per_look:
            return checked
        graph = LossGraph.of(loss)
        self._nodes, checked.forward_passes = graph.nodes, graph.forward_passes
        if graph.is_weighed:
            guard.refuse(
                InputError("loss", f"has come through {self.name}.loss before", "say each term of a loss once")
            )
        if self._forwards_inside:
            return checked  # a trainer whose step is the forward pass of the wrapped module
        past: dict[str, Tensor] = {}
        if graph.leaves and (model := self._model()) is not None:
            names = {id(value): name for name, value in model.named_parameters()}
            past = {names[id(leaf)]: leaf for leaf in graph.leaves if id(leaf) in names.keys() - self._returned}
            guard.link(leaf for leaf in graph.leaves if id(leaf) not in names)
        if past and not graph.outputs and share is not None:
            problem = "reaches the model's parameters past the wrapped model, so that nobody averages their gradients"
            guard.refuse(InputError("loss", problem, "call the wrapped model, not the module inside"))
        shape = (graph.shape, reduction)
        if graph.outputs and (guard.is_measured or shape not in self._shapes):
            self._shapes.add(shape)
            self._measure(loss, graph, factor, None if share is None else share.samples, checked)
            if past and share is not None and self.averages:
                guard.note_past_outputs(_gradients_past_outputs(loss, graph.outputs, past))
        return checked

    def _measure(self, loss: Tensor, graph: LossGraph, factor: float, samples: int | None, checked: _Checked) -> None:
        """Note the weighed gradients of a loss by its outputs, and refuse one that couples ``samples``; None: it may."""
        outputs, checked.explained = graph.measurable_outputs()
        checked.explained |= {output.key for output in graph.outputs} - {output.key for output in outputs}
        guard = self._guard
        if not outputs or guard is None:
            return
        gradients = None if samples is None else output_gradients(loss, outputs, factor, twice=True)
        if samples is not None and gradients is not None and find_coupling(outputs, gradients, samples, guard.updates):
            problem = (
                "is said to be a mean over samples, but one sample's part of it depends on others of this rank's batch"
            )
            remedy = (
                f"gather what is compared from all ranks and say {self.name}.loss(loss, count=samples), or where each rank's "
                f'samples by themselves are meant, {self.name}.loss(loss, reduction="average")'
            )
            guard.refuse(InputError("loss", problem, remedy))
        if gradients is None:
            gradients = output_gradients(loss, outputs, factor, twice=False) or []
        for output, gradient in zip(outputs, gradients, strict=False):
            if gradient is not None:
                checked.gradients[output.key] = gradient.detach()
                # Not the output itself: its edge would keep the graph alive.
                arrival = partial(self._note_measured_arrival, output.key, output.edge.output_nr)
                output.edge.node.register_prehook(arrival)

    def _note_arrival(self, key: OutputKey, gradient: Tensor, *, is_measured: bool = False) -> None:
        """Hold the gradient that arrives at an output in a backward pass against what weighed losses have sent there."""
        under_way, guard = _under_way, self._guard
        if under_way is None or guard is None or not under_way.expected or key in under_way.explained:
            return
        expected = under_way.expected.get(key)
        if is_measured != (expected is not None):
            return
        expected = torch.zeros_like(gradient) if expected is None else expected.to(gradient.dtype)
        if largest_difference(gradient.detach(), expected) > 1:
            problem = f"has a term that did not come through {self.name}.loss"
            remedy = f"say each term, {self.name}.loss(first) + {self.name}.loss(second), or {self.name}.loss(first + second)"
            guard.refuse(InputError("loss", problem, remedy))

    def _note_measured_arrival(self, key: OutputKey, place: int, gradients: tuple[Tensor | None, ...]) -> None:
        """The same at the node that computes a measured output."""
        if (gradient := gradients[place]) is not None:
            self._note_arrival(key, gradient, is_measured=True)

    # What a backward pass does.

    @property
    def averages(self) -> bool:
        """Whether DDP averages the gradients of a backward pass now."""
        return bool(getattr(self._model(), "require_backward_grad_sync", False))

    def begin_backward(self, scale: Tensor, checked: _Checked) -> None:
        """A backward pass comes by a weighed loss, which it multiplies by ``scale``."""
        under_way = self._join()
        under_way.is_weighed = True
        under_way.forward_passes |= dict.fromkeys(checked.forward_passes)
        if scale.numel() == 1:
            under_way.explained |= checked.explained
            for key, gradient in checked.gradients.items():
                part = gradient * scale.detach().to(gradient.dtype)
                under_way.expected[key] = under_way.expected[key] + part if key in under_way.expected else part

    def _join(self) -> _BackwardPass:
        """Return the backward pass that is under way, which trains this model too."""
        global _backwards, _under_way
        if _under_way is None:
            _backwards += 1
            _under_way = _BackwardPass(_backwards)
            _at_end_of_backward(_note_complete)
        if self not in _under_way.scalers:
            _under_way.scalers[self] = None
            if self.watcher is not None:
                self.watcher.begin_backward()
        return _under_way

    def _note_gradient(self, parameter: Tensor) -> None:
        """A backward pass has accumulated a parameter's gradient."""
        self._join().accumulating.add(self)

    def end_backward(self, under_way: _BackwardPass) -> None:
        """A backward pass is over, the exchange of its gradients included: what comes now belongs to another one."""
        if self not in under_way.accumulating:
            return
        self.pending.end_backward()
        if self.watcher is not None:
            self.watcher.end_backward()
        if (guard := self._guard) is None:
            return
        if not under_way.is_weighed:
            guard.refuse(self._unsaid())
            return
        self._weighed_losses += 1
        for forward_pass in under_way.forward_passes:
            if forward_pass.owner is self and self.averages:
                if forward_pass.averaged_in not in (None, under_way.number):
                    problem = "comes again by one forward pass, whose gradients DDP averages once only"
                    remedy = "add the losses and call backward once, or pass through the model again"
                    guard.refuse(InputError("backward", problem, remedy))
                forward_pass.averaged_in = under_way.number

    def count_observed(self, number: int) -> None:
        """Count the samples of a backward pass of which the script says nothing; ranks are taken to have equal batches."""
        is_said, self._is_said = self._is_said, False
        if is_said:
            return
        with contextlib.suppress(InputError):
            if self.pending.share(("observed", number), self.name) is None:
                samples = max(self.pending.told or self.pending.passed, default=0)
                self.pending.count(("observed", number), samples, samples * self._job.world_size)

    def _unsaid(self) -> InputError:
        problem = f"did not come through {self.name}.loss"
        remedy = (
            f"write loss = {self.name}.loss(loss) before loss.backward() for a mean over the batch's samples, with count= for "
            "one over tokens, pixels or labels"
        )
        return InputError("loss", problem, remedy)

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The optimizer has made an update. Raises InputError on all ranks for what one of them refuses."""
        if (guard := self._guard) is None:
            return
        if not self._weighed_losses and _has_gradients(optimizer):
            guard.refuse(self._unsaid())
        self._weighed_losses = 0
        guard.after_update()
        if guard.updates == FIRST_UPDATES and len(self._sentinels) > _SENTINELS:
            places = {round(place * (len(self._sentinels) - 1) / (_SENTINELS - 1)) for place in range(_SENTINELS)}
            kept = [self._sentinels[place] for place in sorted(places)]
            for handle in self._sentinels:
                if handle not in kept:
                    handle.remove()
            self._sentinels = kept


class Observer(LossScaler):
    """Weighs nothing, and refuses nothing: tells its watcher of passes, and counts samples by what passes get."""

    def __init__(self, job: DistributedJob, name: str) -> None:
        super().__init__(job, name)
        self._weighs = False

    def loss(self, loss: Tensor, **_: Any) -> Tensor:
        """Return the loss."""
        return loss


_open: weakref.WeakSet[LossScaler] = weakref.WeakSet()


def _gradients_past_outputs(loss: Tensor, outputs: Sequence[Output], past: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of parameters by the ways that pass none of the outputs, where gradients are made zero."""
    nodes = {output.edge.node: None for output in outputs}
    handles = [
        node.register_prehook(
            lambda gradients: tuple(each if each is None else torch.zeros_like(each) for each in gradients)
        )
        for node in nodes
    ]
    try:
        gradients = torch.autograd.grad(loss.sum(), list(past.values()), retain_graph=True, allow_unused=True)
    except RuntimeError:
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return {name: gradient for name, gradient in zip(past, gradients, strict=True) if gradient is not None}


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in trained)


class _Weighed(torch.autograd.Function):
    """The same value; gradients on their way back are multiplied by a weight, and tell that a backward pass has begun."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: float, owner: LossScaler, checked: _Checked) -> Tensor:
        ctx.weight, ctx.owner, ctx.checked = weight, owner, checked
        return value.clone()  # not a view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.owner.begin_backward(gradient, ctx.checked)
        return gradient * ctx.weight, None, None, None


class _Hook:
    """What happens before or after each forward pass with gradients.

    Copies of the model (moving averages) are not trained: theirs do nothing.
    """

    def __init__(self, act: Callable[..., None] | None = None) -> None:
        self._act = act

    def __call__(self, module: nn.Module, args: tuple[Any, ...], other: Any) -> None:
        if self._act is not None and torch.is_grad_enabled():
            self._act(module, args, other)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


def _at_end_of_backward(call: Callable[[], None]) -> None:
    """Call when the backward pass that is under way has computed all gradients.

    The engine calls in the order in which it was asked; DDP asks when its last bucket is ready, which is later.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _note_complete() -> None:
    """All gradients of this rank are there; DDP waits for those of the others from now on."""
    under_way = _under_way
    if under_way is None:
        return
    for scaler in (each for each in under_way.scalers if each in under_way.accumulating):
        scaler.count_observed(under_way.number)
        if scaler.watcher is not None and scaler.averages:
            scaler.watcher.note_complete()
    _at_end_of_backward(_note_end)  # behind DDP's own


def _note_end() -> None:
    """The backward pass is over, DDP's exchange included."""
    global _under_way
    ended, _under_way = _under_way, None
    if ended is not None:
        for scaler in ended.scalers:
            scaler.end_backward(ended)
