"""Compares the ranks after updates, to find what makes their models differ. Start at :class:`UpdateGuard`.

Each rank makes a row of a few numbers: whether it refuses something, its learning rates, and checksums of some elements
of the gradients that the update used, of the parameters, and of gradients that are not averaged. All ranks get all rows,
after each of the first updates and later after every eighth. If two ranks differ, all of them raise the same error. So
mistakes are found by their effect, however the script is written: a forward pass that bypasses the DDP wrapper, a layer
that was unfrozen after DDP had wrapped the model, a loss's parameters that are not averaged, a schedule that follows a
rank's own validation loss.
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
"""Number of first updates after each of which rows cover all parameters and are compared at once."""
UPDATES_PER_EXCHANGE = 8
"""Later, rows are sent after every this many updates, and compared after the following one."""
_ELEMENTS = 256
"""Number of elements of a tensor that a checksum reads."""
_TENSORS = 8
"""Number of parameters whose gradients are in a later row; they take turns."""
_EXCHANGES_PER_CUDA_LOOK = 4
"""On CUDA, where reading waits for the device, only every this many later rows have checksums."""
_TOLERANCE = 1e-5
"""Difference of two checksums that rounding explains; each tensor contributes about 1 to a checksum."""


class Sums(NamedTuple):
    """A checksum of several tensors, as two floats, so that ranks can exchange it in one tensor of numbers."""

    weighted: float = 0.0
    """Changes with the direction and the size of each tensor."""
    tensors: float = 0.0
    """Number of tensors that are not empty."""

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Sums:
        """Return the checksum of ``tensors``, by the first :data:`_ELEMENTS` elements of each.

        ``weighted`` is the sum of two numbers. The first adds up all elements, each divided by the sum of its tensor's
        absolute values and multiplied by a fixed weight of its position: it changes with the tensors' directions. The
        second adds up the logarithms of those sums of absolute values in the same way: it changes with the tensors'
        sizes. NaN and infinities are replaced by large numbers, so that equal ones compare equal.
        """
        dense = (tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach() for tensor in tensors)
        parts = [tensor.reshape(-1)[:_ELEMENTS] for tensor in dense if tensor.numel()]
        if not parts:
            return cls()
        values = torch.cat([part.to(torch.float64) for part in parts]).nan_to_num_(nan=1e6, posinf=1e6, neginf=-1e6)
        lengths = torch.tensor([len(part) for part in parts])
        tensor_index = torch.repeat_interleave(torch.arange(len(parts)), lengths).to(values.device)
        # 1e-300: a tensor of zeros is divided by it, and has a logarithm.
        sizes = values.new_zeros(len(parts)).index_add_(0, tensor_index, values.abs()).clamp_min_(1e-300)
        # Weights that do not cancel by chance: cosines of multiples of 0.618 need no random numbers.
        weights = torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device).mul_(0.618).cos_()
        directions = (values / sizes[tensor_index]) @ weights
        logarithms = sizes.log() @ weights[: len(parts)]
        return cls(float(directions + logarithms), len(parts))

    def differs(self, other: Sums) -> bool:
        """Return whether two checksums show different values or numbers of tensors.

        Differences up to the tolerance do not count, because ranks on devices of different types round differently.
        """
        return self.tensors != other.tensors or abs(self.weighted - other.weighted) > _TOLERANCE


class _Row(NamedTuple):
    """What one rank reports after an update. A checksum of 0 tensors means that it was not measured."""

    refuses: float
    """1 if the rank has an error for all ranks to raise, else 0."""
    learning_rates: float
    """The sum of the parameter groups' learning rates, each multiplied by its group's position."""
    gradients: Sums = Sums()
    """Checksum of the averaged gradients that the update used."""
    parameters: Sums = Sums()
    """Checksum of the trained parameters and of buffers that were added to the model."""
    past_outputs: Sums = Sums()
    """Gradients of parameters that a loss reaches without passing the model's outputs; 0 tensors: not measured."""

    def values(self) -> list[float]:
        """Return the row as 8 numbers in the order of the fields, to be sent to other ranks."""
        return [self.refuses, self.learning_rates, *self.gradients, *self.parameters, *self.past_outputs]

    @classmethod
    def of(cls, values: Sequence[float]) -> _Row:
        """Return the row from its :meth:`values`."""
        refuses, learning_rates = values[:2]
        return cls(refuses, learning_rates, *(Sums(*values[begin : begin + 2]) for begin in (2, 4, 6)))


class UpdateGuard:
    """Compares all ranks after updates of a model, and raises the same InputError on all of them if two differ.

    Args:
        job: the ranks that are compared.
        model: the model whose parameters are compared.
        optimizers: the optimizers that train it.
        is_uneven: function that returns whether losses have ever had another weight on this rank than on others.

    ``updates`` is the number of updates so far. Raises InputError for an embedding with ``max_norm``, because each rank
    then changes the rows of its own batch.
    """

    def __init__(
        self,
        job: DistributedJob,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        is_uneven: Callable[[], bool],
    ) -> None:
        """Note the model's buffers, and register torch's global hooks, to see other DDP modules and their optimizers."""
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                problem = (
                    f"{name.removeprefix('module.')} has max_norm, by which each rank changes rows of its own batch"
                )
                raise InputError("model", problem, "leave it out, and shorten long rows after the optimizer's step")
        self.updates = 0
        self._job = job
        self._is_uneven = is_uneven
        self._model = weakref.ref(model)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._is_replicated = isinstance(model, DistributedDataParallel)
        self._is_cuda = any(value.is_cuda for value in model.parameters())
        self._buffers_before = {name for name, _ in model.named_buffers()}
        self._refusal: InputError | None = None
        # A message under way: the table of all ranks' rows, (ranks, numbers), and the work to wait for.
        self._sent_table: tuple[Tensor, Any] | None = None
        self._sums_past_outputs = Sums()
        self._name_past_outputs = ""
        self._loss_parameters: dict[int, weakref.ref[Tensor]] = {}  # by id: outside the model, used by a weighted loss
        self._ids_of_other_models: set[int] = set()  # of the parameters of other DDP modules that were called
        self._global_hooks: list[Any] = []
        leave_alone(*optimizers)
        if isinstance(model, DistributedDataParallel):
            # torch's global hooks must not keep this guard, and with it the model, alive, so they have weak references.
            wrapped = weakref.WeakMethod(self._note_wrapped)
            updated = weakref.WeakMethod(self._note_update)
            self._global_hooks = [
                register_module_forward_pre_hook(lambda module, _: note(module) if (note := wrapped()) else None),
                register_optimizer_step_post_hook(lambda other, *_: note(other) if (note := updated()) else None),
            ]
            weakref.finalize(model, _remove, self._global_hooks)
            # Process groups of deleted models are kept until the next guard is made: see `_ended`.
            _ended.clear()
            weakref.finalize(model, _ended.append, model.process_group).atexit = False

    def close(self) -> None:
        """Remove the global hooks. More calls do nothing."""
        _remove(self._global_hooks)

    # What is noted between updates.

    @property
    def is_measured(self) -> bool:
        """Whether losses are measured before the next update: if it is one of the first, or its number a power of two."""
        return self.updates < FIRST_UPDATES or self.updates & (self.updates - 1) == 0

    def refuse(self, refusal: InputError) -> None:
        """Keep ``refusal``, for all ranks to raise when rows are compared next; of several, the first is kept.

        Raised at once, it would end one rank while the others wait for it.
        """
        self._refusal = self._refusal or refusal

    def note_past_outputs(self, gradients: Mapping[str, Tensor]) -> None:
        """Note gradients, by parameter name, that come from a loss without passing the wrapped model's outputs.

        A penalty on weights has such gradients, for example. DDP does not weight them, so they will be compared between
        ranks: they are right if they are the same on all.
        """
        self._sums_past_outputs = Sums.of(gradients.values())
        self._name_past_outputs = next(iter(gradients), "")  # the first one's, for the message

    def link(self, leaves: Iterable[Tensor]) -> None:
        """Note the parameters outside the model from which a weighted loss was computed, so other optimizers may train them."""
        self._loss_parameters |= {id(leaf): weakref.ref(leaf) for leaf in leaves}

    def _note_wrapped(self, module: nn.Module) -> None:
        """Note the parameters of another DDP module whose forward pass begins: a pre-forward hook of all modules."""
        if isinstance(module, DistributedDataParallel) and module is not self._model():
            self._ids_of_other_models.update(id(value) for value in module.parameters())

    def _note_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse the update of another DDP module's parameters: a post-step hook of all optimizers.

        Its losses are not weighted, which is wrong if batches are uneven. The update is allowed for an optimizer that was
        given to :func:`leave_alone`, and if a weighted loss was computed from its parameters.
        """
        if optimizer in _left_alone or not self._ids_of_other_models or not self._is_uneven():
            return
        trained = {id(value) for group in optimizer.param_groups for value in group["params"]}
        behind_losses = {key for key, leaf in self._loss_parameters.items() if leaf() is not None}
        if trained & self._ids_of_other_models and not trained & behind_losses:
            problem = "trains a wrapped model beside the one that was attached to, whose losses nobody weighs"
            remedy = "attach to it too, by runtime.attach(None, model=..., optimizer=...) if its batches are its own"
            self.refuse(InputError("optimizer", problem, remedy))

    # What is compared after an update.

    def after_update(self) -> None:
        """Count an update, send this rank's row if it is due, and compare the rows of all ranks that have come.

        After each of the first updates it blocks for the rows. Later they are sent after every eighth update, and
        compared after the following one. Raises InputError, on all ranks, if one refuses something or two differ.
        """
        updates_before = self.updates
        is_first = updates_before < FIRST_UPDATES
        self.updates += 1
        if self.updates == FIRST_UPDATES and self._global_hooks:
            self._global_hooks[0].remove()  # the pre-forward hook, which costs time at every module's forward pass
        sent = self._sent_table  # under way since an earlier update; None: nothing is
        self._sent_table = None
        if is_first:
            sent = self._send(self._row())
        elif updates_before % UPDATES_PER_EXCHANGE == 0:
            self._sent_table = self._send(self._row())
        if sent is not None:
            table, work = sent
            work.wait()
            self._raise_differences([_Row.of(values) for values in table.tolist()])

    def _send(self, row: _Row) -> tuple[Tensor, Any]:
        """Start to exchange rows; return (table of all ranks' rows, (ranks, numbers); the work that completes it)."""
        numbers = torch.tensor(row.values(), dtype=torch.float64)
        table = torch.zeros(self._job.world_size, len(numbers), dtype=torch.float64)
        table[self._job.rank] = numbers
        return table, dist.all_reduce(table, group=self._job.side, async_op=True)

    def _row(self) -> _Row:
        """Return this rank's row, and forget the noted gradients that reach parameters past the model's outputs.

        After each of the first updates it covers all parameters and their gradients; later only the gradients of
        :data:`_TENSORS` parameters, other ones in each row, and on CUDA only in every fourth row. A model without DDP
        has no checksums of gradients and parameters, because its ranks hold different shards.
        """
        gradients = Sums()
        parameters = Sums()
        is_first = self.updates <= FIRST_UPDATES
        exchange = self.updates // UPDATES_PER_EXCHANGE  # number of this row among the later ones
        # On CUDA a checksum waits for the device, so it is taken seldom.
        is_due = is_first or not self._is_cuda or exchange % _EXCHANGES_PER_CUDA_LOOK == 0
        if self._is_replicated and is_due:
            trained = self._trained()
            if not is_first and len(trained) > _TENSORS:
                start = exchange * _TENSORS % len(trained)
                # Twice, so that the slice may go on from the last parameter to the first.
                listed_twice = [*trained.items()] * 2
                trained = dict(listed_twice[start : start + _TENSORS])
            gradients = Sums.of(value.grad for value in trained.values() if value.grad is not None)
            if is_first:
                parameters = Sums.of([*trained.values(), *self._new_buffers().values()])
        sums_past_outputs = self._sums_past_outputs
        self._sums_past_outputs = Sums()
        # Each rate is multiplied by its place, so that exchanged rates give another sum.
        rates = sum(place * float(group["lr"]) for place, group in enumerate(self._groups(), 1))
        return _Row(float(self._refusal is not None), rates, gradients, parameters, sums_past_outputs)

    def _groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all watched optimizers that still exist."""
        return [
            group
            for reference in self._optimizers
            if (optimizer := reference()) is not None
            for group in optimizer.param_groups
        ]

    def _trained(self) -> dict[str, Tensor]:
        """Return the parameters of the watched optimizers by name; the name of one outside the model tells its shape."""
        model = self._model()
        names_by_id: dict[int, str] = {}
        if model is not None:
            names_by_id = {id(value): name.removeprefix("module.") for name, value in model.named_parameters()}
        trained: dict[str, Tensor] = {}
        for group in self._groups():
            for value in group["params"]:
                name = names_by_id.get(id(value), f"a parameter of shape {tuple(value.shape)} that is not in the model")
                if name in trained:  # two parameters outside the model may have the same shape
                    name = f"{name} ({len(trained)})"
                trained[name] = value
        return trained

    def _new_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that were added to the model since the guard was made, which DDP does not synchronise, by name."""
        model = self._model()
        if model is None:
            return {}
        return {name: value for name, value in model.named_buffers() if name not in self._buffers_before}

    def _raise_differences(self, rows: Sequence[_Row]) -> None:
        """Raise InputError if a rank refuses something, or for the first difference between the ``rows`` of all ranks.

        All ranks raise the same error.
        """
        if any(row.refuses for row in rows):
            self._job.raise_together(self._refusal)
        first = rows[0]
        for rank, row in enumerate(rows):
            if row.learning_rates != first.learning_rates:
                problem = f"differs between rank 0 and rank {rank}"
                remedy = "let what changes it be alike on all ranks: average a validation loss before the schedule"
                raise InputError("learning rate", problem, remedy)
            if row.gradients.differs(first.gradients):
                raise self._difference_error("gradient")
            if row.parameters.differs(first.parameters):
                raise self._difference_error("value")
        have_past_outputs = all(row.past_outputs.tensors for row in rows)
        if have_past_outputs and any(row.past_outputs.differs(first.past_outputs) for row in rows):
            problem = f"reaches {self._name_past_outputs} past the wrapped model's outputs, by each rank's own data"
            remedy = "return that term from the model's forward, or say it by itself with its count: hook.loss(term, count=n), "
            remedy += 'or hook.loss(term, reduction="average") for what DDP alone would do'
            raise InputError("loss", problem, remedy)

    def _difference_error(self, what: Literal["gradient", "value"]) -> InputError:
        """Return the error that names the first tensor that differs between ranks; all ranks call this together.

        ``what``: "gradient" if the averaged gradients differ, "value" if parameters or buffers do. The rows that were
        compared are sums over many tensors, so here the ranks exchange a checksum of each tensor.
        """
        trained = self._trained()
        named: dict[str, Tensor | None] = {**trained, **self._new_buffers()}
        if what == "gradient":
            named = {name: value.grad for name, value in trained.items()}
        own_checksums = [Sums.of([] if value is None else [value]) for value in named.values()]
        own_numbers = [number for checksum in own_checksums for number in checksum]  # two for each tensor
        checksums_of_ranks = [
            [Sums(*numbers[begin : begin + 2]) for begin in range(0, len(numbers), 2)]
            for numbers in self._job.numbers(*own_numbers)
        ]
        by_tensor = zip(named, *checksums_of_ranks, strict=True)  # (name, rank 0's checksum, rank 1's, ...)
        differing = (name for name, first, *others in by_tensor if any(first.differs(other) for other in others))
        name = next(differing, "of an earlier update")  # the rows that differed may be of the update before
        remedy = "change parameters and buffers by what is alike on every rank, after the optimizer's step"
        if what == "gradient":
            remedy = "call the wrapped model, not the module inside; unfreeze layers before DistributedDataParallel wraps it, "
            remedy += "and make a loss with parameters a part of it"
        return InputError(what, f"of {name} differs between ranks", remedy)


def _remove(handles: Sequence[Any]) -> None:
    """Remove hooks by their handles; handles of removed hooks do nothing."""
    for handle in handles:
        handle.remove()


def check_gradient_hooks(model: nn.Module, own: type) -> None:
    """Raise InputError for a script's hook on a parameter's gradient whose result depends on when gradients are averaged.

    Gradient hooks run on each rank's own gradient, before the average; only a linear function gives the same result
    after it. Any post-accumulate hook is refused, except ddltool's own, which are methods of objects of type ``own``.
    """
    for name, parameter in model.named_parameters():
        # torch has no public list of a parameter's hooks.
        post_accumulate_hooks = (parameter._post_accumulate_grad_hooks or {}).values()
        has_foreign_hook = not all(isinstance(getattr(hook, "__self__", None), own) for hook in post_accumulate_hooks)
        gradient_hooks = (parameter._backward_hooks or {}).values()
        if has_foreign_hook or not all(_is_linear(hook, parameter) for hook in gradient_hooks):
            problem = "is changed by a hook on each rank by itself, before the ranks' gradients are averaged"
            remedy = "change .grad between backward and the optimizer's step"
            raise InputError(f"gradient of {name.removeprefix('module.')}", problem, remedy)


def _is_linear(hook: Callable[[Tensor], Tensor | None], like: Tensor) -> bool:
    """Return whether a gradient hook is linear: whether hook(a - 300 b) = hook(a) - 300 hook(b) for random a and b.

    ``like``: the parameter whose gradients the hook gets; a and b have its shape, type and device.
    """
    generator = torch.Generator(like.device).manual_seed(0)
    a, b = (torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator) for _ in range(2))
    outputs = []
    with torch.no_grad():
        for gradient in (a, b, a - 300 * b):  # 300: large, so that clipping to a bound shows
            output = hook(gradient)
            # A hook that returns None leaves the gradient as it is, or has changed it in place.
            outputs.append(gradient if output is None else output)
    output_a, output_b, output_combined = outputs
    return torch.allclose(output_combined, output_a - 300 * output_b, rtol=1e-2, atol=1e-2)


_ended: list[object] = []
"""Process groups of deleted models. If DDP's reducer destroyed its group, it would hold Python's lock, for which the group's
own thread may be waiting; destroying it from Python releases the lock."""
_left_alone: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers whose updates no guard refuses: of models that the script trains separately, or that another guard watches."""


def leave_alone(*optimizers: torch.optim.Optimizer) -> None:
    """Make all guards allow these optimizers to train another DDP module than the attached one."""
    _left_alone.update(optimizers)
