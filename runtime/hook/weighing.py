"""Losses that weigh as much as what they were counted over, whatever the ranks' batches. Start at :meth:`Weigher.loss`.

DDP and FSDP average gradients over the N ranks as if each had as many samples. With a loss that is a mean over the x_r
samples of rank r, and X = sum x_r, the gradient of the mean over all samples is ``sum_r x_r g_r / X`` (LB-BSP, weighted
aggregation): the plain average of gradients of losses that were multiplied by ``N x_r / X``. So the weight enters at the
loss, and everything behind it follows: any number of passes through the model, terms that reach other ranks (gathered
embeddings, SyncBatchNorm), accumulation, unused parameters, any wrapper that averages.

Nobody has to call anything: :class:`Weigher` marks the outputs of the model, and a ``backward`` that starts behind such an
output starts with the weight of the batch in hand. What the loss is a mean over is read from its graph on the first steps and
on every tenth, on all ranks; a loss that is none over the samples is refused, and :meth:`Weigher.loss` says what it is.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddltool.errors import InputError
from ddltool.runtime.hook.batches import Pass, Shares, Sizes, VariableBatchSampler
from ddltool.runtime.hook.job import Job
from ddltool.runtime.hook.loss_terms import Mark, mark, mixing, reach, terms_of
from ddltool.runtime.hook.roll_call import RollCall

Reduction = Literal["mean", "sum", "average"]
FIRST_READINGS = 4
STEPS_PER_READING = 10
_PASSES_KEPT = 4096
_PLAIN = torch.autograd.backward
_inside = False
_open: weakref.WeakSet[Weigher] = weakref.WeakSet()
_backwards, _begun = 0, 0


class Watcher(Protocol):
    """Who wants to know when a pass begins and when its gradients are complete: telemetry, or what chooses batch sizes."""

    def begin_forward(self) -> None:
        """A forward pass of the model in training mode begins."""

    def begin_backward(self) -> None:
        """A backward pass by way of the model begins."""

    def pause(self, seconds: float) -> None:
        """This rank has waited so long for what the others had to say."""

    def end_backward(self) -> None:
        """A backward pass is over, the exchange of its gradients included."""


def begun() -> int:
    """Return how many backward passes this process has begun since something was first weighed."""
    return _begun


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


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank has of the samples of a pass over all ranks."""

    samples: int
    total: float
    """Of all passes, over their number, where the loop divides by that."""
    even: bool
    """Whether all ranks have as many."""


class _Drawn:
    """A batch that the training loop has; ``taken``: of a sampler, None of a stream."""

    def __init__(self, drawn: Pass | Share) -> None:
        self.used = False
        self.taken = drawn if isinstance(drawn, Pass) else None
        if isinstance(drawn, Pass):
            passes = drawn.split.passes if isinstance(drawn.split, Sizes) else 1
            even = _is_even(drawn.split, drawn.step_samples)
            drawn = Share(drawn.samples, drawn.step_samples / passes, even)
        self.share = drawn


@lru_cache(maxsize=256)
def _is_even(split: Shares, samples: int) -> bool:
    """Whether all ranks have as many samples of such a step."""
    sizes = split.sizes_of(samples)
    return bool((sizes == sizes[0, 0]).all())


class Weigher:
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
        missing: what this has to know before batches may be handed out; None: nothing.
        last_weight: what the last loss, or term of one, was multiplied by.
    """

    def __init__(
        self,
        job: Job,
        name: str,
        sizes: Callable[[], Sequence[int]] | None = None,
        *,
        passes: int = 1,
        always: bool = False,
        watcher: Watcher | None = None,
    ) -> None:
        self._job, self.name, self._sizes, self._split = job, name, sizes, passes
        self._always, self.watcher = always, watcher
        self._loose: dict[VariableBatchSampler, None] = {}
        self._drawn: dict[Hashable, deque[_Drawn]] = {}
        self._held: _Drawn | None = None
        self._forwards, self._asked, self._divided = 0, 0, False
        self.missing: str | None = None
        self.last_weight = 1.0
        self._announced: int | None = None
        self._told: list[int] = []
        self._sizes_passed: list[int] = []
        self._used_at = -1
        self._seen_full = False
        self._read = {True: 0, False: 0}
        self._made = 0
        self._tally: tuple[int, float] = (0, 0.0)

    # What a model and its loaders tell.

    def open(self, model: nn.Module) -> None:
        """Weigh what is trained through ``model`` from now on, until :meth:`close`."""
        self._model = weakref.ref(model)
        model.register_forward_pre_hook(_Before(self), with_kwargs=True)
        model.register_forward_hook(_After(self))
        _open.add(self)
        if self._job.world_size > 1:
            RollCall.of_this_job().passes = begun
        torch.autograd.backward = _backward

    def close(self) -> None:
        """Weigh nothing any more. Idempotent."""
        _open.discard(self)
        if not _open and torch.autograd.backward is _backward:
            torch.autograd.backward = _PLAIN

    def follow(self, source: Hashable, *, loose: bool = False) -> None:
        """Take the shares of what a sampler or a stream gives; ``loose``: to a loader that does not :meth:`draw` it."""
        self._drawn.setdefault(source, deque(maxlen=_PASSES_KEPT))
        if isinstance(source, VariableBatchSampler):
            self._loose.pop(source, None)
            if loose:
                self._loose[source] = None

    def draw(self, source: Hashable, drawn: Pass | Share) -> None:
        """Note that the training loop gets a batch; those that backward has used before are behind it now.

        Raises InputError where nobody has said yet what is trained.
        """
        if self.missing is not None:
            raise InputError("loader", "is used before the hook knows what is trained", self.missing)
        self.drop(source)
        self._drawn[source].append(_Drawn(drawn))

    def drop(self, source: Hashable, *, unused: bool = False) -> None:
        """Forget the batches of a loader that went into gradients, or all of them."""
        drawn = self._drawn[source]
        while drawn and (unused or drawn[0].used):
            drawn.popleft()

    def turn_to_next(self, skip: int = 0) -> None:
        """Let the batch in hand be the oldest that was not yet, until the next call; before it ``skip`` are left out.

        For loops that fetch batches ahead and say when each one's turn is. Does nothing with more than one loader.
        """
        self._fill()
        if len(drawn := [each for each in self._drawn.values() if each]) != 1:
            self._held = None
            return
        for _ in range(skip + (drawn[0][0] is self._held)):
            drawn[0].popleft()
        self._held = drawn[0][0] if drawn[0] else None

    def used(self, sampler: VariableBatchSampler) -> Pass | None:
        """Return the last batch that went into gradients, of those that the training loop still has; None: none."""
        return next((each.taken for each in reversed(self._drawn[sampler]) if each.used and each.taken), None)

    def announce(self, samples: int) -> None:
        """Let the next forward pass stand for ``samples`` samples. Raises InputError when negative."""
        if samples < 0:
            raise InputError("count_samples", f"is {samples}", "give the number of samples, 0 or more")
        self._announced = samples

    def begin_forward(self, module: nn.Module | None, values: Iterable[Any]) -> None:
        """A forward pass with gradients begins; None: a trainer that calls the module otherwise, in training."""
        if self._announced is not None:
            self._told.append(self._announced)
            self._announced = None
        elif (size := leading_size(values)) is not None and len(self._sizes_passed) < _PASSES_KEPT:
            self._sizes_passed.append(size)
        if self.watcher is not None and (module is None or module.training):
            self.watcher.begin_forward()
        self._forwards += 1

    def end_forward(self, output: Any) -> None:
        """A forward pass with gradients is over."""
        self._forwards = 0
        mark((output,), Mark(self))

    def claim(self, roots: Iterable[Tensor]) -> None:
        """Take a backward pass that no output lies behind for this model's where it comes inside its forward pass.

        So do Lightning's manual optimization, and others whose step is the forward pass of the wrapped module.
        """
        if self._forwards:
            mark(roots, Mark(self))

    def spend(self, mark: Mark) -> None:
        """A backward pass comes by a forward pass. Raises InputError for a second one, which DDP leaves out of its average."""
        if self.watcher is not None:
            self.watcher.begin_backward()
        synchronises = getattr(self._model(), "require_backward_grad_sync", False)
        if mark.spent and self._job.world_size > 1:
            remedy = "add the losses and call backward once, or pass through the model again"
            raise InputError(
                "backward", "comes again by one forward pass, whose gradients DDP averages once only", remedy
            )
        mark.spent = bool(synchronises)

    def end_backward(self) -> None:
        """A backward pass is over: what comes now belongs to another one."""
        self._sizes_passed, self._told = [], []
        if self.watcher is not None:
            self.watcher.end_backward()

    def take_tally(self) -> tuple[int, int]:
        """Return this rank's and all ranks' samples that went into gradients since the last call."""
        (samples, total), self._tally = self._tally, (0, 0.0)
        return samples, round(total)

    def check_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raise InputError when an update uses gradients that came past the weighing. Call after each update."""
        made, self._made = self._made, _backwards
        if made == _backwards and self._job.world_size > 1 and _has_gradients(optimizer):
            remedy = f"call loss.backward(), or torch.autograd.backward of the module, after making {self.name}"
            raise InputError("backward", "went past the weights of the ranks' batches", remedy)

    def demand_averaged(self, leaves: Collection[int]) -> None:
        """Raise InputError where a backward pass that came by no forward pass ends at parameters of the wrapped model."""
        model = self._model()
        if self._job.world_size > 1 and model is not None and any(id(value) in leaves for value in model.parameters()):
            problem = "reaches the model's parameters past the wrapped model, so that nobody averages their gradients"
            raise InputError("backward", problem, "call the wrapped model, not the module inside, in the same loss")

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
            if in_hand := self._batches():
                self._use(in_hand)
        self.last_weight = factor
        weighed: Tensor = _Weighed.apply(loss, factor)  # type: ignore[no-untyped-call]
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
            if any(told[1::2]):
                remedy = f"say {self.name}.loss(loss, count=...) in a compute_loss of your own"
                problem = f"what it is a mean over cannot be read from its graph ({unknown or 'on another rank'})"
                raise InputError("loss", problem, remedy)
            self._divided = all(told[::2])
        return self._divided

    def weight(self, roots: Sequence[Tensor]) -> float:
        """Return N x_r / X for the batch in hand. Raises InputError, on all ranks, where that cannot be right."""
        self.last_weight = self._weight_of_batch(*roots, strict=True)
        return self.last_weight

    def _weight_of_batch(self, *losses: Tensor, strict: bool = False) -> float:
        share = self._in_hand() or self._counted()
        if losses and self._job.world_size > 1 and (self._always or not share.even):
            self._check_terms(losses, share, strict)
        return self._job.world_size * share.samples / share.total if share.total else 1.0

    def _weight_of(self, count: float, of: float | None = None) -> float:
        if not count >= 0:
            raise InputError("count", f"is {count:g}", "give what the loss is a mean over, 0 or more")
        total = sum(self._exchange(count)) if of is None else of
        if in_hand := self._batches():
            self._use(in_hand)
        return self._job.world_size * count / total if total else 1.0

    def _exchange(self, *mine: float) -> list[float]:
        """Return all ranks' numbers, one rank's after another's."""
        begin_s = time.perf_counter()
        rows = torch.zeros(self._job.world_size, len(mine), dtype=torch.float64)
        rows[self._job.rank] = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(
            rows, group=self._job.side
        )  # a third of the time that gloo takes for an all_gather of so little
        numbers: list[float] = rows.flatten().tolist()
        if self.watcher is not None:
            self.watcher.pause(time.perf_counter() - begin_s)
        return numbers

    def _fill(self) -> None:
        for sampler in self._loose:
            while sampler.issued:
                self.draw(sampler, sampler.issued.popleft())

    def _batches(self) -> list[_Drawn]:
        """Return the batches of our loaders that the training loop has, or the one whose turn it is."""
        self._fill()
        if self._held is not None:
            return [self._held]
        return [each for drawn in self._drawn.values() for each in drawn]

    def _in_hand(self) -> Share | None:
        """Return the share of the batch that is being trained on; None where no loader of ours has given one.

        Loops may fetch ahead and may leave batches out, so there can be several; mostly they are alike. Where they are not
        the size of the forward pass tells. Raises InputError where it does not.
        """
        fitting = batches = self._batches()
        if not batches:
            return None
        if len({each.share for each in batches}) > 1:
            sizes = {*self._told, *self._sizes_passed}
            fitting = [each for each in batches if each.share.samples in sizes]
        if len({each.share for each in fitting}) != 1:
            remedy = f"say which it is: {self.name}.loss(loss, count=samples)"
            raise InputError("backward", "the script has batches of several steps in hand, of different shares", remedy)
        self._use(fitting)
        return fitting[0].share

    def _use(self, fitting: list[_Drawn]) -> None:
        """Note which batches go into gradients: of each loader the oldest new one that fits, and all before it."""
        if self._used_at == _backwards:
            return  # another term of the same loss
        self._used_at = _backwards
        for drawn in self._drawn.values():
            new = next((each for each in drawn if not each.used and each in fitting), None)
            if new is None:
                continue
            self._tally = (self._tally[0] + new.share.samples, self._tally[1] + new.share.total)
            for each in drawn:
                each.used = True
                if each is new:
                    break

    def _counted(self) -> Share:
        """Return the share by what the script said, or the size of its forward passes: for loaders of its own."""
        planned = None if self._sizes is None else self._sizes()[self._job.rank]
        alone = self._job.world_size == 1
        samples = sum(self._told or self._sizes_passed) if alone else self._count(planned)
        counts = [samples] if alone else [int(each) for each in self._exchange(samples)]
        if min(counts) < 0:
            seen = ", ".join(map(str, self._told or self._sizes_passed)) or "missing"
            problem = f"the batch cannot be counted by dimension 0 of the model's arguments ({seen})"
            if planned is not None:
                problem += f": planned are {planned} samples"
            remedy = f"call {self.name}.count_samples(n) before each forward, or {self.name}.loss(loss, count=n)"
            raise InputError("forward", problem, remedy)
        self._seen_full = True
        if self._used_at != _backwards:
            self._used_at = _backwards
            self._tally = (self._tally[0] + samples, self._tally[1] + sum(counts))
        return Share(samples, sum(counts), len(set(counts)) == 1)

    def _count(self, planned: int | None) -> int:
        """Return the samples by what was said, or the sizes of the forward passes; -1 where they do not tell."""
        if self._told:
            return self._told[0] if len(set(self._told)) == 1 else -1
        if planned is not None:
            expected = {planned, planned // self._split} if planned % self._split == 0 else {planned}
            if found := [size for size in self._sizes_passed if size in expected]:
                return found[0]
            if not self._seen_full:
                return -1
        return self._sizes_passed[0] if len(set(self._sizes_passed)) == 1 else -1

    def _check_terms(self, losses: Sequence[Tensor], share: Share, strict: bool) -> None:
        """Raise InputError, on all ranks, unless each loss is a mean over what is in proportion to the samples."""
        number = self._read[share.even]
        self._read[share.even] += 1
        if number >= FIRST_READINGS and number % STEPS_PER_READING:
            return
        terms = [term for loss in losses for term in terms_of(loss)]
        worst = next((term for term in terms if term.unknown and strict), None)
        counts = sorted({term.count / max(share.samples, 1) for term in terms if term.count is not None})
        is_sum = any(term.count is None and not term.unknown for term in terms)
        if share.samples == 0:
            worst, counts, is_sum = None, [], False
        low, high = (counts[0], counts[-1]) if counts else (-1.0, -1.0)
        mixed = (
            "" if share.even or not strict else next(filter(None, (mixing(each, share.samples) for each in terms)), "")
        )
        told = self._exchange(share.samples, 2.0 if is_sum else 1.0 if worst else 0.0, low, high, float(bool(mixed)))
        rows = [told[start : start + 5] for start in range(0, len(told), 5)]
        kinds = {row[1] for row in rows}
        name = self.name
        if 2.0 in kinds:
            remedy = f'say {name}.loss(loss, reduction="sum") to add the ranks\' losses, or divide by the samples'
            remedy += f", or give the sum of the weights that it was divided by: {name}.loss(loss, count=...)"
            raise InputError("loss", "is a sum over the batch, not a mean over its samples", remedy)
        if 1.0 in kinds:
            seen = f" ({worst.unknown})" if worst else ""
            remedy = (
                f"say {name}.loss(loss) if it is a mean over this rank's samples, else {name}.loss(loss, count=...)"
            )
            raise InputError("loss", f"what it is a mean over cannot be read from its graph{seen}", remedy)
        known = [(rank, row) for rank, row in enumerate(rows) if row[2] > 0 and row[0]]
        for rank, row in known:
            first = known[0][1]
            if not (_alike(row[2], first[2]) and _alike(row[3], first[3])):
                problem = f"is a mean over {first[3] * first[0]:g} terms for {first[0]:g} samples on rank {known[0][0]}"
                problem += f", but over {row[3] * row[0]:g} for {row[0]:g} on rank {rank}"
                raise InputError("loss", problem, f"weigh it by what it counts: {name}.loss(loss, count=...)")
        if mixed and all(row[4] for row in rows if row[0]):
            problem = (
                f"goes over all samples of a rank's batch ({mixed}), and one process would over those of all ranks"
            )
            remedy = f"gather them from all ranks, or say {name}.loss(loss) if each rank's by themselves are meant"
            raise InputError("loss", problem, remedy)


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * max(abs(one), abs(other))


class Observer(Weigher):
    """Weighs nothing, and refuses nothing: tells its watcher of passes, and counts samples by what passes get."""

    def weight(self, roots: Sequence[Tensor]) -> float:
        """Return 1.0. Ranks are taken to have equal batches, as with torch's own sampler."""
        samples = max(self._told or self._sizes_passed, default=0)
        self._tally = (self._tally[0] + samples, self._tally[1] + samples * self._job.world_size)
        return 1.0

    def loss(self, loss: Tensor, **_: Any) -> Tensor:
        """Return the loss."""
        return loss

    def spend(self, mark: Mark) -> None:
        """A backward pass comes by a forward pass, which nobody minds."""

    def demand_averaged(self, leaves: Collection[int]) -> None:
        """A backward pass comes by no forward pass, which nobody minds either."""


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    held = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return any(gradient is not None and bool(gradient.any()) for gradient in held)


class _Weighed(torch.autograd.Function):
    """The same value; gradients on their way back are multiplied by a weight."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return value.clone()  # not a view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.weight, None


class _Nothing:
    """What a copy of a hook does."""

    def __call__(self, *_: object) -> None:
        return None


class _Before:
    """What happens before each forward pass. Copies of the model (moving averages) are not trained: theirs do nothing."""

    def __init__(self, weigher: Weigher) -> None:
        self.weigher = weigher

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.weigher.begin_forward(module, (*args, *kwargs.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Nothing, ()


class _After(_Before):
    """What happens after each forward pass."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self.weigher.end_forward(output)


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Stand in for ``torch.autograd.backward``: a pass that starts behind a weigher's model starts with its weight."""
    global _inside, _backwards, _begun
    rest: dict[str, Any] = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
    grad_tensors = grad_variables if grad_tensors is None else grad_tensors
    roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    if _inside or not all(isinstance(root, Tensor) for root in roots):  # checkpointing has a backward in backward
        _PLAIN(tensors, grad_tensors, **rest)
        return
    _begun += 1
    found = reach(root.grad_fn for root in roots)
    if not found.marks and not found.weighed:
        for weigher in list(_open):
            weigher.claim(roots)
        found = reach(root.grad_fn for root in roots)
    marks = [mark for mark in found.marks if mark.owner in _open]
    owners: list[Weigher] = list(dict.fromkeys(mark.owner for mark in marks))
    for each in marks:
        each.owner.spend(each)
    for weigher in [] if found.marks or found.weighed else list(_open):
        weigher.demand_averaged(found.leaves)
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
    _inside = True
    try:
        _PLAIN(tensors, grad_tensors, **rest)
    finally:
        _inside = False
        for weigher in owners or list(_open):
            weigher.end_backward()
