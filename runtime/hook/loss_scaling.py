"""Losses that weigh as much as what they were counted over, whatever the ranks' batches. Start at :meth:`LossScaler.loss`.

DDP and FSDP average gradients over the N ranks as if each had as many samples. With a loss that is a mean over the x_r
samples of rank r, and X = sum x_r, the gradient of the mean over all samples is ``sum_r x_r g_r / X`` (LB-BSP, weighted
aggregation): the plain average of gradients of losses that were multiplied by ``N x_r / X``. So the weight enters at the
loss, and everything behind it follows: any number of passes through the model, terms that reach other ranks (gathered
embeddings, SyncBatchNorm), accumulation, unused parameters, any wrapper that averages.

Nobody has to call anything: :class:`LossScaler` marks the outputs of the model, and a ``backward`` that starts behind such an
output starts with the weight of the batch in hand. What the loss is a mean over is read from its graph on the first steps and
on every tenth, on all ranks; a loss that is none over the samples is refused, and :meth:`LossScaler.loss` says what it is.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddltool.errors import InputError
from ddltool.runtime.hook.job import DistributedJob
from ddltool.runtime.hook.liveness import LivenessMonitor
from ddltool.runtime.hook.loss_terms import Mark, mark, mixing, reach, terms_of
from ddltool.runtime.hook.parameter_checks import UnaveragedParameterCheck
from ddltool.runtime.hook.pending_batches import PendingBatches, Share
from ddltool.runtime.hook.telemetry import Watcher

Reduction = Literal["mean", "sum", "average"]
FIRST_READINGS = 4
STEPS_PER_READING = 10
_PLAIN = torch.autograd.backward
_inside = False
_open: weakref.WeakSet[LossScaler] = weakref.WeakSet()
_backwards, _begun = 0, 0
_waiting: list[Watcher] = []
"""Who watches the backward pass that is under way."""


def begun() -> int:
    """Return how many backward passes this process has begun since something was first weighed."""
    return _begun


class LossScaler:
    """One rank's weights. All ranks make the same ones, and the same backward passes.

    Args:
        job: this process's place.
        name: what the script calls this, for messages.
        sizes: returns the (n,) samples per step of the ranks as planned: what batches of a loader of the script's own have,
            on the first step at least; None: unknown.
        passes: in how many passes a script may split such a batch.
        always: read losses also while all ranks have as many samples, for that may change.
        watcher: wants to know when gradients are complete.

    Attributes:
        name: what the script calls this, for messages.
        last_weight: what the last loss, or term of one, was multiplied by.
    """

    def __init__(
        self,
        job: DistributedJob,
        name: str,
        sizes: Callable[[], Sequence[int]] | None = None,
        *,
        passes: int = 1,
        always: bool = False,
        watcher: Watcher | None = None,
    ) -> None:
        self._job, self.name, self._sizes, self._split = job, name, sizes, passes
        self._always, self.watcher = always, watcher
        self.pending = PendingBatches()
        """The batches that the training loop has; its loaders say so."""
        self._forwards, self._asked, self._divided = 0, 0, False
        self.last_weight = 1.0
        self._seen_full = False
        self._read = {True: 0, False: 0}
        self._notes: list[_Note] = []
        self._made = 0
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._parameter_check: UnaveragedParameterCheck | None = None
        self._model: Callable[[], nn.Module | None] = lambda: None

    # What a model and its loaders tell.

    def open(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Weigh what is trained through ``model`` from now on, until :meth:`close`.

        Raises InputError, on all ranks, where the optimizers train what nobody averages over the ranks, and where somebody
        watches the model already.
        """
        watched = [each._model() for each in (_open if self._job.world_size > 1 else ()) if each.watcher is not None]
        if self.watcher is not None and any(each is model for each in watched):
            raise InputError("model", "is attached to already", "attach, balance or make an agent once per model")
        self._model = found = weakref.ref(model)
        self.pending.trains = lambda: getattr(found(), "training", True)
        self._optimizers = optimizers
        if optimizers and self._job.world_size > 1:
            self._parameter_check = UnaveragedParameterCheck(self._job, model, *optimizers)
            for each in optimizers:
                each.register_step_post_hook(self.check_update)
        before = _Hook(lambda module, args, kwargs: self.begin_forward(module, (*args, *kwargs.values())))
        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(_Hook(lambda _, __, output: self.end_forward(output)))
        _open.add(self)
        if self._job.world_size > 1:
            LivenessMonitor.of_this_job().passes = begun
        torch.autograd.backward = _backward

    def close(self) -> None:
        """Weigh nothing any more. Idempotent."""
        _open.discard(self)
        if not _open and torch.autograd.backward is _backward:
            torch.autograd.backward = _PLAIN

    def begin_forward(self, module: nn.Module | None, values: Iterable[Any]) -> None:
        """A forward pass with gradients begins; None: a trainer that calls the module otherwise, in training."""
        self.pending.begin_forward(values)
        if self.watcher is not None and (module is None or module.training):
            self.watcher.begin_forward()
        if self._parameter_check is not None:
            self._parameter_check.begin_forward()
        self._forwards += 1

    def end_forward(self, output: Any) -> None:
        """A forward pass with gradients is over."""
        self._forwards = 0
        if self._parameter_check is not None:
            self._parameter_check.end_forward()
        mark((output,), Mark(self))

    def claim(self, roots: Iterable[Tensor]) -> None:
        """Take a backward pass that no output lies behind for this model's where it comes inside its forward pass.

        So do Lightning's manual optimization, and others whose step is the forward pass of the wrapped module.
        """
        if self._forwards:
            mark(roots, Mark(self))

    def spend(self, mark: Mark, leaves: Collection[Tensor] = ()) -> None:
        """A backward pass comes by a forward pass, and by ``leaves`` beside the model.

        Raises InputError for a second one, which DDP leaves out of its average.
        """
        if mark.spent and self._job.world_size > 1:
            remedy = "add the losses and call backward once, or pass through the model again"
            raise InputError(
                "backward", "comes again by one forward pass, whose gradients DDP averages once only", remedy
            )
        mark.spent = self.averages
        if self._parameter_check is not None:
            self._parameter_check.begin_backward(leaves)

    @property
    def averages(self) -> bool:
        """Whether DDP averages the gradients of a backward pass now."""
        return bool(getattr(self._model(), "require_backward_grad_sync", False))

    def end_backward(self) -> None:
        """A backward pass is over: what comes now belongs to another one."""
        self.pending.end_backward()
        if self._parameter_check is not None:
            self._parameter_check.end_backward()
        if self.watcher is not None:
            self.watcher.end_backward()

    def check_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raise InputError when an update uses gradients that came past the weighing. Call after each update."""
        made, self._made = self._made, _backwards
        if made == _backwards and self._job.world_size > 1 and _has_gradients(optimizer):
            remedy = f"call loss.backward(), or torch.autograd.backward of the module, after making {self.name}"
            raise InputError("backward", "went past the weights of the ranks' batches", remedy)

    def demand_averaged(self, leaves: Collection[Tensor]) -> None:
        """Raise InputError where a backward pass that came by no forward pass ends at parameters of the wrapped model."""
        model, reached = self._model(), set(map(id, leaves))
        if self._job.world_size > 1 and model is not None and any(id(value) in reached for value in model.parameters()):
            problem = "reaches the model's parameters past the wrapped model, so that nobody averages their gradients"
            raise InputError("backward", problem, "call the wrapped model, not the module inside, in the same loss")
        if self._parameter_check is not None:
            self._parameter_check.demand_weighed(reached)

    # What a loss weighs.

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
            loss: a tensor of one element, or one term of a loss that is a sum of such terms.
            count: for a mean: over how many samples, tokens or weights of labels it is one on this rank; 0 is fine. All ranks
                give theirs, which costs one small message. None: over the samples of the batch in hand.
            of: what all ranks count, where it is known; None: they are asked.
            reduction: how ranks' losses come together: each is a ``mean``, to be weighed by its count; each is a part of a
                ``sum`` (a sum over samples, or divided by a number that counts all ranks); their plain ``average`` is right
                (``Trainer`` of transformers with ``average_tokens_across_devices``).

        Raises InputError, on all ranks, where the share of the batch is unknown or the graph shows another mean.
        """
        ranks = self._job.world_size
        if reduction not in ("mean", "sum", "average"):
            raise InputError("reduction", f"is {reduction!r}", "give mean, sum or average")
        if ranks == 1 and of is None:
            return loss
        if reduction == "mean":
            factor = self._weight_of_batch(loss) if count is None else self._weight_of(float(count), of)
        else:
            factor = float(ranks) if reduction == "sum" else 1.0
            self.pending.use(_backwards)
        self.last_weight = factor
        weighed: Tensor = _Weighed.apply(loss, factor, self)  # type: ignore[no-untyped-call]
        return weighed

    def is_divided_by(self, loss: Tensor, number: float) -> bool:
        """Return whether ``loss`` is a sum divided by ``number``, on all ranks, as read from its graph.

        All ranks ask together. Read on the first steps and on every tenth; in between the last answer holds. False where a
        term has been weighed. Raises InputError, on all ranks, where the graph cannot be read on one.
        """
        if self._job.world_size == 1 or reach([loss.grad_fn]).weighed:
            return False
        asked, self._asked = self._asked, self._asked + 1
        if asked < FIRST_READINGS or asked % STEPS_PER_READING == 0:
            terms = terms_of(loss)
            unknown = next((term.unknown for term in terms if term.unknown), "")
            fits = number == 0 or all(term.count is not None and _alike(term.count, number) for term in terms)
            told = self._exchange(float(fits), float(bool(unknown)))
            if any(row[1] for row in told):
                remedy = f"say {self.name}.loss(loss, count=...) in a compute_loss of your own"
                problem = f"what it is a mean over cannot be read from its graph ({unknown or 'on another rank'})"
                raise InputError("loss", problem, remedy)
            self._divided = all(row[0] for row in told)
        return self._divided

    def weight(self, roots: Sequence[Tensor]) -> float:
        """Return N x_r / X for the batch in hand. Raises InputError, on all ranks, where that cannot be right."""
        self.last_weight = self._weight_of_batch(*roots, strict=True)
        return self.last_weight

    def _weight_of_batch(self, *losses: Tensor, strict: bool = False) -> float:
        share = self.pending.share(_backwards, self.name) or self._counted()
        if self._parameter_check is not None and not share.even:
            self._parameter_check.note_uneven()
        if losses and self._job.world_size > 1 and (self._always or not share.even):
            self._check_terms(losses, share, strict)
        return self._job.world_size * share.samples / share.total if share.total else 1.0

    def _weight_of(self, count: float, of: float | None = None) -> float:
        if not count >= 0:
            raise InputError("count", f"is {count:g}", "give what the loss is a mean over, 0 or more")
        total = sum(each for (each,) in self._exchange(count)) if of is None else of
        self.pending.use(_backwards)
        if self._parameter_check is not None:
            self._parameter_check.note_uneven()
        return self._job.world_size * count / total if total else 1.0

    def _exchange(self, *mine: float) -> list[list[float]]:
        """Return all ranks' numbers."""
        begin_s = time.perf_counter()
        numbers = self._job.numbers(*mine)
        if self.watcher is not None:
            self.watcher.pause(time.perf_counter() - begin_s)
        return numbers

    def _counted(self) -> Share:
        """Return the share by what the script said, or the size of its forward passes: for loaders of its own."""
        planned = None if self._sizes is None else self._sizes()[self._job.rank]
        alone = self._job.world_size == 1
        samples = sum(self.pending.told or self.pending.passed) if alone else self._count(planned)
        counts = [samples] if alone else [int(each) for (each,) in self._exchange(samples)]
        if min(counts) < 0:
            seen = ", ".join(map(str, self.pending.told or self.pending.passed)) or "missing"
            problem = f"the batch cannot be counted by dimension 0 of the model's arguments ({seen})"
            if planned is not None:
                problem += f": planned are {planned} samples"
            remedy = f"call {self.name}.count_samples(n) before each forward, or {self.name}.loss(loss, count=n)"
            raise InputError("forward", problem, remedy)
        self._seen_full = True
        self.pending.count(_backwards, samples, sum(counts))
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

    def _check_terms(self, losses: Sequence[Tensor], share: Share, strict: bool) -> None:
        """Raise InputError, on all ranks, unless each loss is a mean over what is in proportion to the samples.

        What is found of passes under ``no_sync`` is told with the next one that is not: ranks may make different numbers.
        """
        number = self._read[share.even]
        if number < FIRST_READINGS or number % STEPS_PER_READING == 0:
            self._notes.append(_note(losses, share, strict))
        if not getattr(self._model(), "require_backward_grad_sync", True):
            return
        self._read[share.even] += 1
        notes, self._notes = self._notes, []
        if notes:
            self._judge(notes)

    def _judge(self, notes: list[_Note]) -> None:
        """Hold what this rank has found in its passes against what the others have."""
        known = [note for note in notes if note.low > 0]
        low, high = min((note.low for note in known), default=-1.0), max((note.high for note in known), default=-1.0)
        unknown = next((note.unknown for note in notes if note.unknown), "")
        mixed = next((note.mixed for note in notes if note.mixed), "")
        kind = max(2.0 if note.is_sum else 1.0 if note.unknown else 0.0 for note in notes)
        rate = sum(float(group["lr"]) for each in self._optimizers for group in each.param_groups)
        rows = self._exchange(max(note.samples for note in notes), kind, low, high, float(bool(mixed)), rate)
        kinds = {row[1] for row in rows}
        name = self.name
        if 2.0 in kinds:
            remedy = f'say {name}.loss(loss, reduction="sum") to add the ranks\' losses, or divide by the samples'
            remedy += f", or give the sum of the weights that it was divided by: {name}.loss(loss, count=...)"
            raise InputError("loss", "is a sum over the batch, not a mean over its samples", remedy)
        if 1.0 in kinds:
            seen = f" ({unknown})" if unknown else ""
            remedy = (
                f"say {name}.loss(loss) if it is a mean over this rank's samples, else {name}.loss(loss, count=...)"
            )
            raise InputError("loss", f"what it is a mean over cannot be read from its graph{seen}", remedy)
        for rank, row in enumerate(rows):
            if row[5] != rows[0][5]:
                problem = f"differs between rank 0 ({rows[0][5]:g}) and rank {rank} ({row[5]:g})"
                remedy = (
                    "let what changes it be alike on all ranks: average a validation loss over them before the schedule"
                )
                raise InputError("learning rate", problem, remedy)
        counted = [(rank, row) for rank, row in enumerate(rows) if row[2] > 0 and row[0]]
        for rank, row in counted:
            first = counted[0][1]
            place = 2 if _alike(row[3], first[3]) else 3
            if not _alike(row[place], first[place]):
                problem = (
                    f"is a mean over {first[place] * first[0]:g} terms for {first[0]:g} samples on rank {counted[0][0]}"
                )
                problem += f", but over {row[place] * row[0]:g} for {row[0]:g} on rank {rank}"
                raise InputError("loss", problem, f"weigh it by what it counts: {name}.loss(loss, count=...)")
        if mixed and all(row[4] for row in rows if row[0]):
            problem = (
                f"goes over all samples of a rank's batch ({mixed}), and one process would over those of all ranks"
            )
            remedy = f"gather them from all ranks, or say {name}.loss(loss) if each rank's by themselves are meant"
            raise InputError("loss", problem, remedy)


@dataclass(frozen=True, slots=True)
class _Note:
    """What the terms of a pass's losses are means over: from ``low`` to ``high`` per sample; -1: there are none."""

    samples: int
    low: float
    high: float
    is_sum: bool
    unknown: str
    mixed: str


def _note(losses: Sequence[Tensor], share: Share, strict: bool) -> _Note:
    """Read the graphs of losses; ``strict``: what cannot be read, and what goes over the whole batch, counts."""
    if not share.samples:
        return _Note(0, -1.0, -1.0, False, "", "")
    terms = [term for loss in losses for term in terms_of(loss)]
    counts = [term.count / share.samples for term in terms if term.count is not None]
    unknown, mixed = (term.unknown for term in terms), (mixing(term, share.samples) for term in terms)
    return _Note(
        samples=share.samples,
        low=min(counts, default=-1.0),
        high=max(counts, default=-1.0),
        is_sum=any(term.count is None and not term.unknown for term in terms),
        unknown=next(filter(None, unknown), "") if strict else "",
        mixed=next(filter(None, mixed), "") if strict and not share.even else "",
    )


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * max(abs(one), abs(other))


class Observer(LossScaler):
    """Weighs nothing, and refuses nothing: tells its watcher of passes, and counts samples by what passes get."""

    def weight(self, roots: Sequence[Tensor]) -> float:
        """Return 1.0. Ranks are taken to have equal batches, as with torch's own sampler."""
        samples = max(self.pending.told or self.pending.passed, default=0)
        self.pending.count(_backwards, samples, samples * self._job.world_size)
        return 1.0

    def loss(self, loss: Tensor, **_: Any) -> Tensor:
        """Return the loss."""
        return loss

    def is_divided_by(self, loss: Tensor, number: float) -> bool:
        """Return False: it is left as it is."""
        return False

    def spend(self, mark: Mark, leaves: Collection[Tensor] = ()) -> None:
        """A backward pass comes by a forward pass, which nobody minds."""

    def demand_averaged(self, leaves: Collection[Tensor]) -> None:
        """A backward pass comes by no forward pass, which nobody minds either."""


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    held = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return any(gradient is not None and bool(gradient.any()) for gradient in held)


class _Weighed(torch.autograd.Function):
    """The same value; gradients on their way back are multiplied by a weight."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: float, owner: LossScaler) -> Tensor:
        ctx.weight, ctx.owner = weight, owner
        return value.clone()  # not a view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.weight, None, None


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


def _at_end(roots: Sequence[Any], calls: Sequence[Callable[[], None]]) -> Any:
    """Let a backward pass from ``roots`` call these when all gradients are there, and before DDP waits for other ranks'."""
    # The engine calls in the order in which it was asked, and DDP asks when its last bucket is ready.
    root = next((root for root in roots if isinstance(root, Tensor) and root.grad_fn is not None), None)

    def begin(_: Tensor) -> None:
        for call in calls:
            torch.autograd.Variable._execution_engine.queue_callback(call)

    return None if root is None or not calls else root.register_hook(begin)


def _within(roots: Sequence[Any], run: Callable[[], None]) -> None:
    """Run a backward pass within another one: should DDP have all gradients before its end, it waits for the others there."""
    if not _waiting:
        run()
        return
    done_s: list[float] = []
    handle = _at_end(roots, [lambda: done_s.append(time.perf_counter())])
    run()
    for watcher in _waiting if done_s else []:
        watcher.pause(time.perf_counter() - done_s[-1])
    if handle is not None:
        handle.remove()


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Stand in for ``torch.autograd.backward``: a pass that starts behind a scaler's model starts with its weight."""
    global _inside, _backwards, _begun
    rest: dict[str, Any] = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
    grad_tensors = grad_variables if grad_tensors is None else grad_tensors
    roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    if _inside or not all(isinstance(root, Tensor) for root in roots):  # checkpointing has a backward in backward
        _within(roots, lambda: _PLAIN(tensors, grad_tensors, **rest))
        return
    _begun += 1
    found = reach(root.grad_fn for root in roots)
    if not found.marks and not found.weighed:
        for scaler in list(_open):
            scaler.claim(roots)
        found = reach(root.grad_fn for root in roots)
    marks = [mark for mark in found.marks if mark.owner in _open]
    owners: list[LossScaler] = list(dict.fromkeys(mark.owner for mark in marks))
    for each in marks:
        each.owner.spend(each, found.leaves)
    watched = [each for each in (*owners, *found.weighed) if each in _open and each.watcher is not None]
    for each in watched:
        each.watcher.begin_backward()
    for scaler in [] if found.marks or found.weighed else list(_open):
        scaler.demand_averaged(found.leaves)
    if owners and found.weighed:
        remedy = "weigh each term of the loss, or none"
        raise InputError("loss", "is weighed in some of its terms only", remedy)
    weights = {owner.weight(roots) for owner in owners}
    if len(weights) > 1:
        raise InputError("loss", "comes from models whose batches have different shares", "use one loader for both")
    _backwards += 1
    if weights and (weight := weights.pop()) != 1.0:
        given = (grad_tensors,) if isinstance(grad_tensors, Tensor) else grad_tensors or (None,) * len(roots)
        grad_tensors = [
            torch.full_like(root, weight) if gradient is None else gradient * weight
            for root, gradient in zip(roots, given, strict=True)
        ]
        tensors = roots
    _inside, _waiting[:] = True, [each.watcher for each in watched]
    handle = _at_end(roots, [each.watcher.note_complete for each in watched if each.averages])
    try:
        _PLAIN(tensors, grad_tensors, **rest)
    finally:
        if handle is not None:
            handle.remove()
        _inside, _waiting[:] = False, []
        for scaler in owners or list(_open):
            scaler.end_backward()
