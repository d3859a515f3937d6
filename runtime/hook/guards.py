"""What must be alike on all ranks while a model is trained, compared between updates. Start at :class:`UpdateGuard`.

Each rank has a row of a few numbers: whether it refuses something, its learning rates, and sums over some elements of the
gradients that the update used, of parameters, and of what was derived on this rank alone. The rows go to all ranks, at once
after the first updates and later now and then, and wherever two ranks differ all of them refuse. So a pass beside
the wrapper, a layer that was unfrozen after DDP had wrapped the model, parameters of a loss that nobody averages, and a
schedule that follows a rank's own validation loss are found by what they do, whatever the script looks like.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddltool.errors import InputError
from ddltool.runtime.processes.job import DistributedJob

FIRST_UPDATES = 4
"""After so many updates the rows are compared at once, and over all parameters."""
UPDATES_PER_EXCHANGE = 8
"""Later the rows are sent after every so many updates, and read after the next one."""
_ELEMENTS = 256
"""Elements of a tensor that are looked at."""
_TENSORS = 8
"""Parameters whose gradients are in one later row, in turns."""
_EXCHANGES_PER_CUDA_LOOK = 4
"""On CUDA a look waits for the device."""
_TOLERANCE = 1e-5
"""Relative to the size of one tensor."""


class Sums(NamedTuple):
    """A number that changes with the direction and the size of each of several tensors, and how many there are."""

    weighted: float = 0.0
    tensors: float = 0.0

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Sums:
        """Return a weighted sum over the first elements of each, scaled to a size of 1, and over the logarithms of sizes."""
        dense = (tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach() for tensor in tensors)
        parts = [tensor.reshape(-1)[:_ELEMENTS] for tensor in dense if tensor.numel()]
        if not parts:
            return cls()
        values = torch.cat([part.to(torch.float64) for part in parts]).nan_to_num_(nan=1e6, posinf=1e6, neginf=-1e6)
        lengths = torch.tensor([len(part) for part in parts])
        of_tensor = torch.repeat_interleave(torch.arange(len(parts)), lengths).to(values.device)
        sizes = values.new_zeros(len(parts)).index_add_(0, of_tensor, values.abs()).clamp_min_(1e-300)
        weights = torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device).mul_(0.618).cos_()
        return cls(float((values / sizes[of_tensor]) @ weights + sizes.log() @ weights[: len(parts)]), len(parts))

    def differs(self, other: Sums) -> bool:
        """Return whether two sums come from different values.

        Ranks on devices of several types round otherwise, from clipping on; what nobody averages differs by more.
        """
        return self.tensors != other.tensors or abs(self.weighted - other.weighted) > _TOLERANCE


class _Row(NamedTuple):
    """What one rank tells after an update."""

    refuses: float
    learning_rates: float
    gradients: Sums = Sums()
    parameters: Sums = Sums()
    past_outputs: Sums = Sums()
    """Gradients of parameters that a loss reaches past the model's outputs; without tensors: not measured."""

    def values(self) -> list[float]:
        return [self.refuses, self.learning_rates, *self.gradients, *self.parameters, *self.past_outputs]

    @classmethod
    def of(cls, values: Sequence[float]) -> _Row:
        return cls(values[0], values[1], *(Sums(*values[place : place + 2]) for place in (2, 4, 6)))


class UpdateGuard:
    """Compares the ranks after each update of the named optimizers.

    ``is_uneven``: whether losses have weighed otherwise on this rank than on others since the guard was made. ``updates`` are
    those made so far. Raises InputError, on all ranks, for a model that changes its parameters by each rank's own batch.
    """

    def __init__(
        self,
        job: DistributedJob,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        is_uneven: Callable[[], bool],
    ) -> None:
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                problem = f"{_plain(name)} has max_norm, by which each rank changes rows of its own batch"
                raise InputError("model", problem, "leave it out, and shorten long rows after the optimizer's step")
        self.updates = 0
        self._job, self._is_uneven = job, is_uneven
        self._model, self._optimizers = weakref.ref(model), [weakref.ref(optimizer) for optimizer in optimizers]
        self._is_replicated = isinstance(model, DistributedDataParallel)
        self._is_cuda = any(value.is_cuda for value in model.parameters())
        self._buffers_before = {name for name, _ in model.named_buffers()}
        self._refusal: InputError | None = None
        self._sent: tuple[Tensor, Any] | None = None
        self._past, self._past_name = Sums(), ""
        self._linked: dict[int, weakref.ref[Tensor]] = {}
        self._beside: set[int] = set()
        self._looks: list[Any] = []
        leave_alone(*optimizers)
        if isinstance(model, DistributedDataParallel):
            # Global hooks of torch's, which must not keep this guard, and with it a model, alive.
            found = weakref.WeakMethod(self._note_wrapped), weakref.WeakMethod(self._note_update)
            self._looks = [
                register_module_forward_pre_hook(lambda module, _: call(module) if (call := found[0]()) else None),
                register_optimizer_step_post_hook(lambda other, *_: call(other) if (call := found[1]()) else None),
            ]
            weakref.finalize(model, _remove, self._looks)
            _ended.clear()
            weakref.finalize(model, _ended.append, model.process_group).atexit = False

    def close(self) -> None:
        """Look at no optimizer any more. Idempotent."""
        _remove(self._looks)

    # What is noted between updates.

    @property
    def is_measured(self) -> bool:
        """Whether the next update is one whose losses are measured: the first ones, and then ever fewer."""
        return self.updates < FIRST_UPDATES or self.updates & (self.updates - 1) == 0

    def refuse(self, refusal: InputError) -> None:
        """Let all ranks refuse this after the next update, so that none waits for one that has ended; the first counts."""
        self._refusal = self._refusal or refusal

    def note_past_outputs(self, gradients: Mapping[str, Tensor]) -> None:
        """Note gradients of named parameters by ways past the outputs; those of penalties are alike on all ranks."""
        self._past, self._past_name = Sums.of(gradients.values()), next(iter(gradients), "")

    def link(self, leaves: Iterable[Tensor]) -> None:
        """Note parameters outside the model that a weighed loss comes from: who trains them may do so."""
        self._linked |= {id(leaf): weakref.ref(leaf) for leaf in leaves}

    def _note_wrapped(self, module: nn.Module) -> None:
        """Note the parameters of another wrapped model whose forward pass begins."""
        if isinstance(module, DistributedDataParallel) and module is not self._model():
            self._beside.update(id(value) for value in module.parameters())

    def _note_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an update of another wrapped model, unless it is attached to too or a weighed loss comes from it."""
        if optimizer in _alone or not self._beside or not self._is_uneven():
            return
        trained = {id(value) for group in optimizer.param_groups for value in group["params"]}
        if trained & self._beside and not trained & {key for key, leaf in self._linked.items() if leaf() is not None}:
            problem = "trains a wrapped model beside the one that was attached to, whose losses nobody weighs"
            remedy = "attach to it too, by runtime.attach(None, model=..., optimizer=...) if its batches are its own"
            self.refuse(InputError("optimizer", problem, remedy))

    # What is compared after an update.

    def after_update(self) -> None:
        """Compare the ranks after an update. Raises InputError, on all ranks, where one refuses or where two differ."""
        is_first, number = self.updates < FIRST_UPDATES, self.updates
        self.updates += 1
        if self.updates == FIRST_UPDATES and self._looks:
            self._looks[0].remove()  # it sees every module's forward pass
        sent, self._sent = self._sent, None
        if is_first:
            sent = self._send(self._row())
        elif number % UPDATES_PER_EXCHANGE == 0:
            self._sent = self._send(self._row())
        if sent is not None:
            table, work = sent
            work.wait()
            self._judge([_Row.of(values) for values in table.tolist()])

    def _send(self, row: _Row) -> tuple[Tensor, Any]:
        own = row.values()
        table = torch.zeros(self._job.world_size, len(own), dtype=torch.float64)
        table[self._job.rank] = torch.tensor(own, dtype=torch.float64)
        return table, dist.all_reduce(table, group=self._job.side, async_op=True)

    def _row(self) -> _Row:
        gradients = parameters = Sums()
        is_first, exchange = self.updates <= FIRST_UPDATES, self.updates // UPDATES_PER_EXCHANGE
        if self._is_replicated and (is_first or not self._is_cuda or exchange % _EXCHANGES_PER_CUDA_LOOK == 0):
            trained = self._trained()
            if not is_first and len(trained) > _TENSORS:  # some in turns
                start, twice = exchange * _TENSORS % len(trained), [*trained.items()] * 2
                trained = dict(twice[start : start + _TENSORS])
            gradients = Sums.of(value.grad for value in trained.values() if value.grad is not None)
            if is_first:
                parameters = Sums.of([*trained.values(), *self._new_buffers().values()])
        past, self._past = self._past, Sums()
        rates = sum(place * float(group["lr"]) for place, group in enumerate(self._groups(), 1))
        return _Row(float(self._refusal is not None), rates, gradients, parameters, past)

    def _groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all named optimizers."""
        return [
            group
            for reference in self._optimizers
            if (optimizer := reference()) is not None
            for group in optimizer.param_groups
        ]

    def _trained(self) -> dict[str, Tensor]:
        """Return what the optimizers train, by name; parameters that are not the model's by their shape."""
        model = self._model()
        names = {} if model is None else {id(value): _plain(name) for name, value in model.named_parameters()}
        trained: dict[str, Tensor] = {}
        for value in (value for group in self._groups() for value in group["params"]):
            name = names.get(id(value), f"a parameter of shape {tuple(value.shape)} that is not in the model")
            trained[name if name not in trained else f"{name} ({len(trained)})"] = value
        return trained

    def _new_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that forward passes have made; those that were there before are DDP's to keep alike."""
        named = () if (model := self._model()) is None else model.named_buffers()
        return {name: value for name, value in named if name not in self._buffers_before}

    def _judge(self, rows: Sequence[_Row]) -> None:
        """Raise InputError, on all ranks, for what one rank refuses or what differs between two."""
        if any(row.refuses for row in rows):
            self._job.raise_together(self._refusal)
        first = rows[0]
        for rank, row in enumerate(rows):
            if row.learning_rates != first.learning_rates:
                problem = f"differs between rank 0 and rank {rank}"
                remedy = "let what changes it be alike on all ranks: average a validation loss before the schedule"
                raise InputError("learning rate", problem, remedy)
            if row.gradients.differs(first.gradients):
                raise self._unlike("gradient")
            if row.parameters.differs(first.parameters):
                raise self._unlike("value")
        is_past = all(row.past_outputs.tensors for row in rows)
        if is_past and any(row.past_outputs.differs(first.past_outputs) for row in rows):
            problem = f"reaches {self._past_name} past the wrapped model's outputs, by each rank's own data"
            remedy = "return that term from the model's forward, or say it by itself with its count: hook.loss(term, count=n), "
            remedy += 'or hook.loss(term, reduction="average") for what DDP alone would do'
            raise InputError("loss", problem, remedy)

    def _unlike(self, what: Literal["gradient", "value"]) -> InputError:
        """Return the refusal that names the first tensor that differs; all ranks call this together."""
        trained = self._trained()
        named: dict[str, Tensor | None] = {**trained, **self._new_buffers()}
        if what == "gradient":
            named = {name: value.grad for name, value in trained.items()}
        sums = [Sums.of([] if value is None else [value]) for value in named.values()]
        rows = [
            [Sums(*row[place : place + 2]) for place in range(0, len(row), 2)]
            for row in self._job.numbers(*(number for each in sums for number in each))
        ]
        of_tensor = zip(named, *rows, strict=True)
        unlike = (name for name, *each in of_tensor if any(each[0].differs(one) for one in each))
        name = next(unlike, "of an earlier update")
        remedy = "change parameters and buffers by what is alike on every rank, after the optimizer's step"
        if what == "gradient":
            remedy = "call the wrapped model, not the module inside; unfreeze layers before DistributedDataParallel wraps it, "
            remedy += "and make a loss with parameters a part of it"
        return InputError(what, f"of {name} differs between ranks", remedy)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def check_gradient_hooks(model: nn.Module, own: type) -> None:
    """Raise InputError for a hook of the script's on a gradient that does not commute with an average over ranks.

    Each is tried on three gradients: it must make sums of sums, and multiples of multiples. Methods of an ``own`` object
    are ours, also where a trainer that is done with them wraps the same parameters again.
    """
    for name, value in model.named_parameters():
        # Torch has no public place that tells which hooks there are.
        late = (value._post_accumulate_grad_hooks or {}).values()
        foreign = not all(isinstance(getattr(hook, "__self__", None), own) for hook in late)
        if foreign or not all(_is_linear(hook, value) for hook in (value._backward_hooks or {}).values()):
            problem = "is changed by a hook on each rank by itself, before the ranks' gradients are averaged"
            remedy = "change .grad between backward and the optimizer's step"
            raise InputError(f"gradient of {_plain(name)}", problem, remedy)


def _is_linear(hook: Callable[[Tensor], Tensor | None], like: Tensor) -> bool:
    """Return whether a hook on gradients like a tensor is a linear function."""
    generator = torch.Generator(like.device).manual_seed(0)
    one, other = (torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator) for _ in range(2))
    answers = []
    with torch.no_grad():
        for gradient in (one, other, one - 300 * other):
            answer = hook(gradient)
            answers.append(gradient if answer is None else answer)  # it only looks, or changes what it is given
    return torch.allclose(answers[2], answers[0] - 300 * answers[1], rtol=1e-2, atol=1e-2)


_ended: list[object] = []
"""Process groups of models that are gone. DDP's reducer ends its group while it holds Python's lock, which the group's own
thread may be waiting for; Python gives the lock up for that."""
_alone: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that the script has said train by themselves, or that another guard watches."""


def leave_alone(*optimizers: torch.optim.Optimizer) -> None:
    """Take it that these train a model on batches of its own, or that its losses are weighed, beside others."""
    _alone.update(optimizers)


def _plain(name: str) -> str:
    return name.removeprefix("module.")
