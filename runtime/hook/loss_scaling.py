"""Weights losses so that the ranks' plain average of gradients is right, whatever their batches.

Start at :meth:`LossScaler.loss`. DDP and FSDP average gradients over the N ranks as if each had as many samples. Let
rank r have x_r samples and a loss that is the mean over them, with gradient g_r, and X = sum x_r. The gradient of the
mean over all samples is ``sum_r x_r g_r / X`` (LB-BSP, weighted aggregation): the plain average of the gradients of
losses that were multiplied by ``N x_r / X``. The weight is applied to the loss, so everything before it in the graph is
weighted too: several passes through the model, terms that reach other ranks (gathered embeddings, SyncBatchNorm),
accumulation, unused parameters, with any wrapper that averages.

The script says what its loss is a mean over (``hook.loss(loss, count=..., reduction=...)``); nothing is guessed. These
claims are checked by measurement in the first updates and whenever the loss's graph changes shape
(:mod:`~ddltool.runtime.hook.claims`). What would make ranks differ is found after updates
(:mod:`~ddltool.runtime.hook.guards`). Hooks of modules, tensors, parameters and optimizers show what the loop does;
only for the end of a backward pass torch has no hook.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddltool.errors import InputError
from ddltool.runtime.hook.claims import (
    ForwardPass,
    LossGraph,
    OutputKey,
    find_coupling,
    gradients_past_outputs,
    largest_difference,
    mark_outputs,
    mark_weighed,
    nested_tensors,
    output_gradients,
)
from ddltool.runtime.hook.guards import FIRST_UPDATES, UpdateGuard, check_gradient_hooks
from ddltool.runtime.hook.pending_batches import PendingBatches
from ddltool.runtime.hook.telemetry import Watcher
from ddltool.runtime.processes.batches import Share
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.liveness import LivenessMonitor

Reduction = Literal["mean", "sum", "average"]
OutputGradients = dict[OutputKey, Tensor | None]
"""By model output, the gradient that weighted losses send there; None: any gradient is accepted there."""
_UPDATES_PER_LOOK, _NODES_PER_LOOK = 4, 300
"""After the first updates, losses of every 4th update are looked at; for graphs of more than 300 nodes, of every 8th, etc."""
_SENTINELS = 8
"""Number of parameters whose hooks stay after the first updates, to show that a backward pass accumulates gradients."""
_backwards = 0
"""Number of backward passes that this process has begun through models with a LossScaler."""


@dataclass(eq=False, slots=True)
class _BackwardPass:
    """A backward pass that is under way."""

    number: int
    """Its number among those of this process, from 1."""
    trains: dict[LossScaler, bool] = field(default_factory=dict)
    """The scalers whose models it reaches, each with whether it has accumulated gradients there."""
    accumulated: dict[LossScaler, set[int]] = field(default_factory=dict)
    """The parameters (their ids) that have their gradients, by the scaler of their model."""
    complete: set[LossScaler] = field(default_factory=set)
    """The scalers that were told that all gradients of their models are complete."""
    is_weighed: bool = False
    """Whether it has passed a loss that ``hook.loss`` returned."""
    forward_passes: set[ForwardPass] = field(default_factory=set)
    """The forward passes whose weighted losses it has passed."""
    expected: OutputGradients = field(default_factory=dict)
    """The gradients that its weighted losses send to outputs, as far as they were measured."""

    def trained(self) -> list[LossScaler]:
        """Return the scalers of the models in which this pass has accumulated gradients."""
        return [scaler for scaler, accumulates in self.trains.items() if accumulates]


_current_backward: _BackwardPass | None = None
"""The backward pass that is under way in this process; None: none is."""
_open_scalers: weakref.WeakSet[LossScaler] = weakref.WeakSet()
"""The scalers between :meth:`LossScaler.open` and :meth:`LossScaler.close`, of which a model may have only one."""


class LossScaler:
    """Weights the losses of one model on one rank. All ranks make the same scalers, and the same backward passes.

    Attributes:
        last_weight: the factor of the last loss's, or term's, gradients.
        pending: the batches that the training loop holds.

    Args:
        job: the ranks whose gradients are averaged.
        name: the script's name for this object, for messages.
        sizes: function that returns the planned samples of each rank in a step, (n,). Until a step was counted, a batch
            of the script's own loader must have this rank's number, or that over ``passes``; None: not known.
        passes: number of passes into which the script splits a step's batch.
        watcher: is told of forward and backward passes; None: nobody.
        weighs: False: losses stay as they are, nothing is refused, and samples are only counted.
    """

    def __init__(
        self,
        job: DistributedJob,
        name: str,
        sizes: Callable[[], Sequence[int]] | None = None,
        *,
        passes: int = 1,
        watcher: Watcher | None = None,
        weighs: bool = True,
    ) -> None:
        """Prepare to weight losses; no hook is registered before :meth:`open`."""
        self._job = job
        self.name = name
        self._sizes = sizes
        self._planned_passes = passes
        self.watcher = watcher
        self.pending = PendingBatches()
        self.last_weight = 1.0
        self._weighs = weighs and job.world_size > 1
        self._guard: UpdateGuard | None = None
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._hooks: list[Any] = []
        self._sentinels: list[Any] = []
        # Whether DDP averages before the outer backward pass ends; then all parameters keep their hooks, to be counted.
        self._averages_within = False
        self._forwards_begun = 0  # number of forward passes so far
        self._forwards_inside = 0  # number of those that have not ended
        self._weighed_losses = 0  # backward passes with a weighted loss since the last update
        self._was_loss_called = False  # since the last backward pass
        self._has_counted_a_step = False
        self._is_uneven = False  # whether losses have ever had another weight on this rank than on others
        self._seen_graph_shapes: set[tuple[object, ...]] = set()
        self._graph_nodes = 0
        self._returned_parameter_ids: set[int] = set()
        """Ids of the parameters that the last forward pass has returned."""

    # Events of the model.

    def open(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Register hooks on ``model`` and ``optimizers``, and weight the model's losses from now on, until :meth:`close`.

        Without optimizers, ranks are not compared after updates. Raises InputError, on all ranks, where ranks would
        change the model differently (:class:`UpdateGuard`), and where another scaler is attached to it already.
        """
        if self._weighs and any(scaler._model() is model for scaler in _open_scalers):
            raise InputError("model", "is attached to already", "attach, balance or make an agent once per model")
        reference = weakref.ref(model)  # because this object must not keep the model alive
        self._model = reference
        self.pending.trains = lambda: getattr(reference(), "training", True)
        before = _ForwardHook(lambda module, args, kwargs: self.begin_forward(module, (*args, *kwargs.values())))
        self._hooks = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(_ForwardHook(lambda _, __, output: self.end_forward(output))),
        ]
        _open_scalers.add(self)
        if self._job.world_size > 1:
            LivenessMonitor.of_this_job().passes = lambda: _backwards
        trained = [value for value in model.parameters() if value.requires_grad]
        self._sentinels = [value.register_post_accumulate_grad_hook(self._note_gradient) for value in trained]
        if self._weighs and optimizers:
            self._guard = UpdateGuard(self._job, model, optimizers, lambda: self._is_uneven)
            self._hooks += [optimizer.register_step_post_hook(self._after_update) for optimizer in optimizers]

    def close(self) -> None:
        """Stop weighting losses; remove all hooks of the model and its parameters, and those that guard updates.

        More calls do nothing.
        """
        _open_scalers.discard(self)
        for handle in (*self._hooks, *self._sentinels):
            handle.remove()
        self._hooks = []
        self._sentinels = []
        if self._guard is not None:
            self._guard.close()
        self._guard = None
        self._weighs = False

    def begin_forward(self, module: nn.Module | None, values: Sequence[Any]) -> None:
        """Note that a forward pass with gradients begins; dimension 0 of its inputs ``values`` is the samples.

        ``module`` None: a trainer's computation in training that does not call the model's forward pass, and of which
        no end will be noted.
        """
        global _current_backward
        if not self._forwards_inside:
            _current_backward = None  # an earlier backward pass has failed, or has ended
        self.pending.begin_forward(values)
        if self.watcher is not None and (module is None or module.training):
            self.watcher.begin_forward()
        self._forwards_begun += 1
        self._forwards_inside += module is not None

    def end_forward(self, output: Any) -> None:
        """Note which tensors a forward pass with gradients has returned; in measured updates, watch their gradients.

        Without a guard (:meth:`open` without optimizers) only the end is noted.
        """
        self._forwards_inside = 0
        if (guard := self._guard) is None:
            return
        outputs = list(nested_tensors(output))
        self._returned_parameter_ids = {id(tensor) for tensor in outputs if tensor.is_leaf and tensor.requires_grad}
        marked = mark_outputs(outputs, ForwardPass(self))
        if not guard.is_measured:
            return
        model = self._model()
        if guard.updates < 2 and self.averages and model is not None:
            try:
                check_gradient_hooks(model, LossScaler)
            except InputError as refusal:
                guard.refuse(refusal)
        for marked_output in marked:
            # The hook gets the key, not the output: its edge would keep the graph alive.
            key = marked_output.key
            edge = marked_output.edge
            edge.node.register_prehook(partial(self._note_arrival, key, edge.output_nr))

    # Losses that the script passes.

    def loss(
        self,
        loss: Tensor,
        *,
        count: float | Tensor | None = None,
        reduction: Reduction = "mean",
        of: float | None = None,
    ) -> Tensor:
        """Return ``loss`` with its value unchanged and its gradients weighted for the plain average over ranks.

        Args:
            loss: the loss of this rank's pass, or one term of it; each term needs a call of its own.
            count: the number of samples, tokens or label weights that the loss is a mean over on this rank, or with
                ``reduction="sum"`` a sum over; 0 is allowed. If one rank gives a count, all do, which takes one small
                message. None: the samples of the batch.
            reduction: how the ranks' losses are combined. "mean": each is a mean, weighted by its count. "sum": each is
                a sum, divided by the counts of all ranks; without a count losses are just added, for a loss that is
                divided by a number for all ranks already. "average": their plain average is right.
            of: the sum of all ranks' counts, if it is known; None: ranks exchange their counts.

        Without gradients (``no_grad``), ``loss`` itself is returned. Raises InputError for an unknown reduction, and
        where the batch's share is unknown. A claim that the measurement finds false is refused after the update, by all
        ranks together.
        """
        if reduction not in ("mean", "sum", "average"):
            raise InputError("reduction", f"is {reduction!r}", "give mean, sum or average")
        is_counted = self._weighs or (self.watcher is not None and self.pending.is_known)
        if not torch.is_grad_enabled() or not is_counted:
            return loss
        self._was_loss_called = True
        share = None
        ranks = self._job.world_size
        if count is not None and (ranks > 1 or of is not None):  # also for "average": all ranks must exchange counts
            factor = self._factor_of_count(float(count), of, reduction)
        elif reduction == "mean":
            share = self.pending.share(self._forwards_begun, self.name) or self._counted_share()
            self._is_uneven = self._is_uneven or not share.even
            factor = ranks * share.samples / share.total if share.total else 1.0
        else:
            factor = float(ranks)  # undoes the division in the ranks' average, so that losses are added
        if reduction == "average":
            factor = 1.0
        if share is None:
            self.pending.use(self._forwards_begun)
        self.last_weight = factor
        self._is_uneven = self._is_uneven or abs(factor - 1) > 1e-9
        if not loss.requires_grad:  # such as that of a rank without labels, which had to take part in the message
            return loss
        forward_passes, gradients = self._check_claim(loss, factor, share, reduction)
        weighed = loss.clone()  # a view could not be changed in place
        weighed.register_hook(partial(self._begin_backward, factor, forward_passes, gradients))
        mark_weighed(weighed)
        return weighed

    def _factor_of_count(self, count: float, of: float | None, reduction: Reduction) -> float:
        """Return the factor for the gradients of a loss that is a mean, or a sum, over ``count`` elements on this rank.

        ``of``: the sum of all ranks' counts; None: all ranks exchange their counts. If the sum is 0, the factor of a
        mean is 1. Raises InputError for a count below 0 or NaN.
        """
        if not count >= 0:
            raise InputError("count", f"is {count:g}", "give what the loss is a mean over, 0 or more")
        total = sum(self._counts_of_ranks(count)) if of is None else of
        factor = self._job.world_size * count / total if total else 1.0
        if reduction == "sum":  # its gradients are those of the sum: a mean's are smaller by the count
            return factor / count if count else 0.0
        return factor

    def _counts_of_ranks(self, own_count: float) -> list[float]:
        """Return all ranks' counts, by rank; all ranks call this together. The watcher is told how long this one waited."""
        begin_s = time.perf_counter()
        counts = [count for (count,) in self._job.numbers(own_count)]
        if self.watcher is not None:
            self.watcher.pause(time.perf_counter() - begin_s)
        return counts

    def _counted_share(self) -> Share:
        """Count a batch that is not of ddltool's loaders; return the samples of this rank and of all.

        All ranks exchange their counts. The tally of ``pending`` grows by them, and from now on :meth:`_own_count` takes
        other sizes than planned, too. Raises InputError, on all ranks, if the count of any is unknown.
        """
        planned = None if self._sizes is None else self._sizes()[self._job.rank]
        sizes = self.pending.announced_sizes or self.pending.input_sizes  # of this rank's forward passes
        if self._job.world_size == 1:
            counts = [float(sum(sizes))]  # only for telemetry: a single rank weights nothing
        else:  # losses are weighted by the counts, so the sizes must tell this rank's exactly
            own_count = self._own_count(planned)
            counts = self._counts_of_ranks(-1 if own_count is None else own_count)  # -1: this rank does not know
        if min(counts) < 0:
            sizes_text = ", ".join(map(str, sizes)) or "missing"
            problem = f"the batch cannot be counted by dimension 0 of the model's arguments ({sizes_text})"
            if planned is not None:
                problem += f": planned are {planned} samples"
            remedy = f"call {self.name}.count_samples(n) before each forward, or {self.name}.loss(loss, count=n)"
            raise InputError("forward", problem, remedy)
        self._has_counted_a_step = True
        is_even = len(set(counts)) == 1
        share = Share(samples=int(counts[self._job.rank]), total=sum(counts), even=is_even)
        self.pending.count(self._forwards_begun, share.samples, share.total)
        return share

    def _own_count(self, planned: int | None) -> int | None:
        """Return how many samples this rank's batch has, by its forward passes; None if they do not tell one number.

        ``planned``: this rank's planned samples in a step; None: not known. The first rule that applies decides:

        1. Sizes that the script has announced: their common value; None if they differ.
        2. A size of the inputs (dimension 0) is the planned one, of the step or of one of its passes: that size.
        3. Another size was planned, and no step was counted yet: None, because the size may be that of another argument.
        4. Otherwise the common value of the inputs' sizes; None if they differ.
        """
        sizes = self.pending.announced_sizes or self.pending.input_sizes
        if planned is not None and not self.pending.announced_sizes:
            # A forward pass gets the whole local batch, or its part where the script splits the batch into passes.
            passes = self._planned_passes
            expected = {planned, planned // passes} if planned % passes == 0 else {planned}
            as_planned = [size for size in sizes if size in expected]
            if as_planned:
                return as_planned[0]
            if not self._has_counted_a_step:
                return None
        return sizes[0] if len(set(sizes)) == 1 else None

    # Measurements of losses.

    def _check_claim(
        self, loss: Tensor, factor: float, share: Share | None, reduction: Reduction
    ) -> tuple[set[ForwardPass], OutputGradients]:
        """Check what the script says of a loss; return (its forward passes, its weighted gradients by model output).

        The loss's graph is walked in the first updates and then in every fourth or fewer; gradients are measured in the
        first updates and for graphs of a new shape. What is not walked or measured is empty. Refusals are left to the
        guard, until the update.

        Args:
            loss: the loss, or one of its terms.
            factor: its weight on this rank.
            share: the batch's numbers of samples, if the loss is said to be a mean over them; None otherwise.
            reduction: how the script says that the ranks' losses are combined.
        """
        guard = self._guard
        updates_per_look = _UPDATES_PER_LOOK * (1 + self._graph_nodes // _NODES_PER_LOOK)
        if guard is None or (not guard.is_measured and guard.updates % updates_per_look):
            return set(), {}
        graph = LossGraph.of(loss)
        # The number of nodes says how often to look: a large graph takes longer.
        self._graph_nodes = graph.nodes
        forward_passes = {output.key[0] for output in graph.outputs}
        if graph.is_weighed:
            before = f"has come through {self.name}.loss before"
            guard.refuse(InputError("loss", before, "say each term of a loss once"))
        if self._forwards_inside:  # the loss is made within a forward pass: a trainer wraps its whole step in a module
            return forward_passes, {}
        past_outputs = self._parameters_past_outputs(graph, guard)
        if past_outputs and not graph.outputs and share is not None:
            problem = "reaches the model's parameters past the wrapped model, so that nobody averages their gradients"
            guard.refuse(InputError("loss", problem, "call the wrapped model, not the module inside"))
        shape = graph.nodes, len(graph.outputs), len(graph.leaves), reduction
        if not graph.outputs or (shape in self._seen_graph_shapes and not guard.is_measured):
            return forward_passes, {}
        self._seen_graph_shapes.add(shape)
        if past_outputs and share is not None and self.averages:
            guard.note_past_outputs(gradients_past_outputs(loss, graph.outputs, past_outputs))
        return forward_passes, self._measure_gradients(guard, loss, graph, factor, share)

    def _parameters_past_outputs(self, graph: LossGraph, guard: UpdateGuard) -> dict[str, Tensor]:
        """Return the model's parameters that a loss reaches without passing through the model's outputs, by name.

        Parameters that the last forward pass has returned, which are outputs themselves, are left out. Leaves outside the
        model are given to the guard, because another optimizer may train them.
        """
        model = self._model()
        if model is None or not graph.leaves:
            return {}
        names = {id(value): name for name, value in model.named_parameters()}
        guard.link(leaf for leaf in graph.leaves if id(leaf) not in names)
        past_outputs = names.keys() - self._returned_parameter_ids
        return {names[id(leaf)]: leaf for leaf in graph.leaves if id(leaf) in past_outputs}

    def _measure_gradients(
        self, guard: UpdateGuard, loss: Tensor, graph: LossGraph, factor: float, share: Share | None
    ) -> OutputGradients:
        """Return the gradients of a loss, times its weight, by model output; refuse a mean over samples that are coupled.

        Samples are coupled if the loss's gradient at one sample's outputs depends on another sample's outputs. An output
        from which another one is computed has None, because gradients also arrive there by way of the other.

        ``guard`` gets the refusal; ``graph``: the part of the loss's graph that reaches back to the model's outputs; the
        others: as for :meth:`_check_claim`.
        """
        outputs, behind = graph.measurable_outputs()
        expected: OutputGradients = dict.fromkeys(behind)
        gradients = None
        if outputs and share is not None:
            gradients = output_gradients(loss, outputs, factor, twice=True)
            if gradients is not None and find_coupling(outputs, gradients, share.samples, guard.updates):
                problem = "is said to be a mean over samples, but one sample's part of it depends on others of "
                problem += "this rank's batch"
                remedy = (
                    f"gather what is compared from all ranks and say {self.name}.loss(loss, count=samples), or where "
                )
                remedy += f'each rank\'s samples by themselves are meant, {self.name}.loss(loss, reduction="average")'
                guard.refuse(InputError("loss", problem, remedy))
        if outputs and gradients is None:  # nothing is claimed, or the loss has no second derivative
            gradients = output_gradients(loss, outputs, factor, twice=False)
        for output, gradient in zip(outputs, gradients or (), strict=False):
            if gradient is not None:
                expected[output.key] = gradient.detach()
        return expected

    def _note_arrival(self, key: OutputKey, output_index: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Compare the gradient that arrives at a model's output with that of weighted losses; refuse a loss if they differ.

        They differ if a term of the loss did not come through :meth:`loss`. This is a pre-hook of the graph node that
        computes the output.

        Args:
            key: the output.
            output_index: its index among the tensors that the node computes.
            gradients: the gradients of all of these tensors; None for one without.
        """
        gradient = gradients[output_index]
        guard = self._guard
        if _current_backward is None or guard is None or gradient is None or not _current_backward.expected:
            return
        # No weighted loss sends a gradient to an output that is not in `expected`, so zeros are expected there.
        expected = _current_backward.expected.get(key, torch.zeros_like(gradient))
        if expected is not None and largest_difference(gradient.detach(), expected.to(gradient.dtype)) > 1:
            problem = f"has a term that did not come through {self.name}.loss"
            remedy = f"say each term, {self.name}.loss(first) + {self.name}.loss(second), or {self.name}.loss(first + second)"
            guard.refuse(InputError("loss", problem, remedy))

    # Events of a backward pass.

    @property
    def averages(self) -> bool:
        """Whether DDP averages the gradients of the present backward pass; False for other models."""
        return bool(getattr(self._model(), "require_backward_grad_sync", False))

    def _begin_backward(
        self, factor: float, forward_passes: set[ForwardPass], gradients: OutputGradients, scale: Tensor
    ) -> Tensor:
        """Note that a backward pass has reached a weighted loss, and return its gradient times the weight ``factor``.

        This is a tensor hook of the loss.

        Args:
            factor: the weight of this rank's loss.
            forward_passes: the forward passes from whose outputs the loss was computed.
            gradients: the loss's measured gradients with respect to the model's outputs, for a ``scale`` of 1. Times
                ``scale`` they are added to the gradients that this pass is expected to send to each output.
            scale: the gradient that comes in, which is 1 or an AMP scaler's factor.
        """
        under_way = self._join_backward()
        under_way.is_weighed = True
        under_way.forward_passes |= forward_passes
        if scale.numel() == 1:  # the loss is a scalar, as it was when it was measured
            for key, gradient in gradients.items():
                expected_so_far = under_way.expected.get(key, torch.zeros(()))
                if gradient is not None and expected_so_far is not None:
                    gradient = expected_so_far + gradient * scale.detach().to(gradient.dtype)
                # None, any gradient, stays None whatever else arrives there.
                under_way.expected[key] = None if expected_so_far is None else gradient
        return scale * factor

    def _join_backward(self) -> _BackwardPass:
        """Return the backward pass under way, or a new one if there is none, and note that it reaches this model."""
        global _backwards, _current_backward
        if _current_backward is None:
            _backwards += 1
            _current_backward = _BackwardPass(_backwards)
            _at_end_of_backward(_note_complete)
        if self not in _current_backward.trains:
            _current_backward.trains[self] = False
            if self.watcher is not None:
                self.watcher.begin_backward()
        return _current_backward

    def _note_gradient(self, parameter: Tensor) -> None:
        """Note that a backward pass has accumulated a gradient in this model: a post-accumulate hook of its parameters."""
        under_way = _current_backward
        if under_way is None or not under_way.trains.get(self):
            under_way = self._join_backward()
            under_way.trains[self] = True
        accumulated = under_way.accumulated.setdefault(self, set())
        accumulated.add(id(parameter))
        if len(accumulated) < len(self._sentinels):
            return
        if self._averages_within:
            self.note_complete(under_way)
        elif self.averages:
            _at_end_of_backward(lambda: self._note_inner_end(under_way))

    def _note_inner_end(self, under_way: _BackwardPass) -> None:
        """Note whether DDP averages within a backward pass inside the one under way, as reentrant checkpointing has them.

        This is a callback at the end of the pass that has computed the last gradient. In the outer one, :func:`_note_complete`
        was called before; within an inner one, nobody has told yet that the gradients are complete.
        """
        self._averages_within = self._averages_within or self not in under_way.complete

    def note_complete(self, under_way: _BackwardPass) -> None:
        """Note that all gradients of this rank are complete, while DDP still waits for those of other ranks; once in a pass.

        A pass without a call of :meth:`loss` is counted too, as if all ranks had this rank's number of samples.
        """
        if self in under_way.complete:
            return
        under_way.complete.add(self)
        was_loss_called = self._was_loss_called
        self._was_loss_called = False
        if not was_loss_called:
            key = -under_way.number  # negative, so that it differs from the numbers of forward passes that `loss` uses
            with contextlib.suppress(InputError):
                if self.pending.share(key, self.name) is None:
                    samples = max(self.pending.announced_sizes or self.pending.input_sizes, default=0)
                    self.pending.count(key, samples, samples * self._job.world_size)
        if self.watcher is not None and self.averages:
            self.watcher.note_complete()

    def end_backward(self, under_way: _BackwardPass) -> None:
        """Note that a backward pass is over, the exchange of its gradients included.

        A pass without a weighted loss is refused, and a second one through the same forward pass, which DDP would not
        average; the error is raised after the update.
        """
        self.pending.end_backward()
        if self.watcher is not None:
            self.watcher.end_backward()
        if (guard := self._guard) is None:
            return
        if not under_way.is_weighed:
            guard.refuse(self._missing_loss_error())
            return
        self._weighed_losses += 1
        if not self.averages:
            return
        for forward_pass in under_way.forward_passes:
            if forward_pass.owner is not self:
                continue
            if forward_pass.averaged_in not in (None, under_way.number):
                problem = "comes again by one forward pass, whose gradients DDP averages once only"
                remedy = "add the losses and call backward once, or pass through the model again"
                guard.refuse(InputError("backward", problem, remedy))
            forward_pass.averaged_in = under_way.number

    def _missing_loss_error(self) -> InputError:
        """Return the error for a loss that did not come through :meth:`loss`."""
        remedy = f"write loss = {self.name}.loss(loss) before loss.backward() for a mean over the batch's samples, with count= "
        remedy += "for one over tokens, pixels or labels"
        return InputError("loss", f"did not come through {self.name}.loss", remedy)

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Compare the ranks after an update of ``optimizer``: its post-step hook.

        An update with gradients of which none came through :meth:`loss` is refused. After the first updates most hooks on
        parameters are removed, because a few show every backward pass. Raises InputError, on all ranks, for what any rank
        refuses.
        """
        if (guard := self._guard) is None:
            return
        if not self._weighed_losses and _has_gradients(optimizer):
            guard.refuse(self._missing_loss_error())
        self._weighed_losses = 0
        guard.after_update()
        if guard.updates == FIRST_UPDATES and not self._averages_within:
            # Keep about `_SENTINELS` hooks, spread evenly over the parameters; the division is rounded up.
            kept_every = -(-len(self._sentinels) // _SENTINELS) or 1
            for index, handle in enumerate(self._sentinels):
                if index % kept_every:
                    handle.remove()


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's parameters have a gradient that is not zero."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters)


class _ForwardHook:
    """A module's hook before or after each forward pass with gradients.

    A copy of it does nothing, so that copies of the model are not watched.
    """

    def __init__(self, act: Callable[..., None] | None = None) -> None:
        """Have ``act`` called with the hook's three arguments; None: do nothing."""
        self._act = act

    def __call__(self, module: nn.Module, args: tuple[Any, ...], other: Any) -> None:
        """Call ``act`` unless gradients are off; ``other``: the keyword arguments before a pass, the output after it."""
        if self._act is not None and torch.is_grad_enabled():
            self._act(module, args, other)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to copy or pickle this hook, which is as one that does nothing."""
        return _ForwardHook, ()


def _at_end_of_backward(call: Callable[[], None]) -> None:
    """Have ``call`` called when the backward pass under way has computed all gradients.

    torch has no public function for it; DDP's reducer and FSDP2 queue callbacks of the engine in the same way.
    Callbacks run in the order in which they were queued. DDP queues its own when its last bucket is ready, which is
    after the first gradient.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _note_complete() -> None:
    """Tell the scalers that this rank's gradients are complete, and queue :func:`_note_end` to run after DDP's callback."""
    if _current_backward is not None:
        for scaler in _current_backward.trained():
            scaler.note_complete(_current_backward)
        _at_end_of_backward(_note_end)  # DDP has queued its own callback by now


def _note_end() -> None:
    """Tell the scalers that the backward pass is over, DDP's exchange included."""
    global _current_backward
    ended = _current_backward
    _current_backward = None
    if ended is not None:
        for scaler in ended.trained():
            scaler.end_backward(ended)
