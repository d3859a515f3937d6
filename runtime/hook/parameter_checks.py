"""Refuses what a rank has beside what DDP keeps alike, and what would drift apart between ranks.

Start at :class:`UnaveragedParameterCheck`.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddltool.errors import InputError
from ddltool.runtime.hook.digests import digests
from ddltool.runtime.hook.job import DistributedJob

EARLY = 2
"""In so many first updates buffers and parameters are looked at, and in so many first passes the hooks on gradients."""
_checked_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose losses are weighed, or that the script has said are trained by themselves."""
_watched: list[weakref.ref[TrainedParameters]] = []
_ended: list[object] = []
"""Process groups of models that are gone. DDP's reducer ends its group while it holds Python's lock, which the group's own
thread may be waiting for; Python gives the lock up for that."""


def _check_all(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Hold an optimizer that begins its step against all models that are trained."""
    for each in list(_watched):
        if (trained := each()) is not None:
            trained.check(optimizer)
        elif each is not _watched[0]:
            _watched.remove(each)


def leave_alone(model: nn.Module) -> None:
    """Take it that ``model`` is trained on batches of its own, beside others."""
    _checked_models.add(model)


class UnaveragedParameterCheck:
    """Refuses what ranks would not have alike: now on all ranks, later before the first wrong gradients or update.

    Args:
        job: this process's place.
        model: the wrapped model.
        optimizers: those that the script named; others are held to the same as soon as they train the model.
    """

    def __init__(self, job: DistributedJob, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                problem = (
                    f"{name.removeprefix('module.')} has max_norm, by which each rank changes rows of its own batch"
                )
                raise InputError("model", problem, "leave it out, and shorten long rows after the optimizer's step")
        self._job, self._model = job, weakref.ref(model)
        self._is_averaged = isinstance(model, DistributedDataParallel)
        _ended.clear()
        if isinstance(model, DistributedDataParallel):
            weakref.finalize(model, _ended.append, model.process_group).atexit = False
        self._trained = TrainedParameters(model, *optimizers)
        for each in optimizers:
            job.together(functools.partial(self._trained.check, each))
        if not _watched:  # once, and for good: torch goes through these hooks while models may be collected
            register_optimizer_step_pre_hook(_check_all)
        _watched.append(weakref.ref(self._trained))
        self._known = {name for name, _ in model.named_buffers()}
        self._before: dict[str, int] = {}
        self._changed: set[str] = set()
        self._updates = self._passes = 0
        for each in optimizers:
            each.register_step_pre_hook(self._check_state)
        _checked_models.add(model)

    def begin_forward(self) -> None:
        """A forward pass with gradients begins: note which values parameters have."""
        if self._updates < EARLY and (model := self._model()) is not None:
            self._before = {name: value._version for name, value in model.named_parameters()}

    def end_forward(self) -> None:
        """It is over: note which have others now."""
        if self._updates < EARLY and (model := self._model()) is not None:
            now, before = model.named_parameters(), self._before
            self._changed |= {name for name, value in now if value._version != before.get(name, value._version)}

    def _check_state(self, *_: object) -> None:
        """Raise InputError on all ranks where buffers that forward passes make, or parameters that they change, differ."""
        if self._updates == EARLY or (model := self._model()) is None:
            return
        self._updates += 1
        made = {name: value for name, value in model.named_buffers() if name not in self._known}
        remedy = "make it before DistributedDataParallel wraps the model, from what is alike on every rank"
        self._demand("buffer {}, made in a forward pass,", made, remedy)
        changed = {name: value for name, value in model.named_parameters() if name in self._changed}
        remedy = "change it after the optimizer's step, by what is alike on every rank"
        self._demand("{}, changed by a forward pass,", changed, remedy)

    def _demand(self, what: str, values: Mapping[str, Tensor], remedy: str) -> None:
        told = digests(values)
        self._job.demand_same("model: " + what.format(min(told, default="")), " ".join(told.values()), remedy)

    def demand_weighed(self, leaves: Collection[int]) -> None:
        """Raise InputError where a loss that does not come from the model ends at what is trained together with it."""
        for model in self._trained.beside if self._trained.uneven else ():
            if any(id(value) in leaves for value in model.parameters()):
                raise unweighed(type(model.module).__name__)

    def begin_backward(self, leaves: Collection[Tensor] = ()) -> None:
        """A backward pass by way of the model begins, and of ``leaves`` beside it.

        Raises InputError, in the first passes, for a hook of the script's on a gradient that does not commute with an average.
        """
        self._trained.linked = [weakref.ref(leaf) for leaf in leaves]
        self._trained.averaging = self._is_averaged
        if not self._is_averaged or self._passes == EARLY or (model := self._model()) is None:
            return
        self._passes += 1
        own = getattr(model, "_accum_grad_hooks", None)  # where DDP averages in Python
        for name, value in model.named_parameters():
            late = value._post_accumulate_grad_hooks and not own
            if late or not all(_is_linear(hook, value) for hook in (value._backward_hooks or {}).values()):
                self._trained.averaging = False
                problem = "is changed by a hook on each rank by itself, before the ranks' gradients are averaged"
                remedy = "change .grad between backward and the optimizer's step"
                raise InputError(f"gradient of {name.removeprefix('module.')}", problem, remedy)

    def note_uneven(self) -> None:
        """Its loss weighs otherwise on this rank than on others."""
        self._trained.uneven += 1

    def end_backward(self) -> None:
        """It is over: the gradients are averaged."""
        self._trained.averaging = False


def _is_linear(hook: Callable[[torch.Tensor], torch.Tensor | None], like: torch.Tensor) -> bool:
    """Return whether a hook makes sums of sums, and multiples of multiples: it is tried on three gradients."""
    generator = torch.Generator(like.device).manual_seed(0)
    one, other = (torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator) for _ in range(2))
    made = []
    with torch.no_grad():
        for given in (one, other, one - 300 * other):
            answer = hook(given)
            made.append(given if answer is None else answer)  # it only looks, or changes what it is given
    return torch.allclose(made[2], made[0] - 300 * made[1], rtol=1e-2, atol=1e-2)


class TrainedParameters:
    """What optimizers train, held against the parameters whose gradients are averaged over the ranks.

    DDP averages what required a gradient when it wrapped the model. A loss with parameters of its own, or layers that are
    unfrozen later, have a gradient of their own on each rank, with equal batches as well.

    Attributes:
        uneven: backward passes by way of the model so far whose losses did not weigh alike on all ranks.
        averaging: whether one is under way, so that gradients are each rank's own.
        linked: what the last loss from the model came from beside it.
        beside: wrapped models that nobody has attached to, and that are trained by the same optimizers.
    """

    def __init__(self, model: nn.Module, *named: torch.optim.Optimizer) -> None:
        self._model = weakref.ref(model)
        self._averaged = {id(parameter) for parameter in _averaged_by(model)}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._named = weakref.WeakSet(named)
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Seen] = weakref.WeakKeyDictionary()
        self.uneven, self.averaging = 0, False
        self.linked: list[weakref.ref[Tensor]] = []
        self.beside: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def check(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raise InputError for a parameter that is trained but not averaged. Cheap: most steps look at what is frozen.

        An optimizer that trains nothing of this model is let alone until it steps between uneven passes, and then where it
        trains neither another wrapped model nor what the loss comes from.
        """
        seen = self._seen.setdefault(optimizer, _Seen(self.uneven))
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if size != seen.size or any(value.requires_grad for value in seen.frozen):
            held: list[Tensor] = [value for group in optimizer.param_groups for value in group["params"]]
            trained = [value for value in held if value.requires_grad]
            seen.own = optimizer in self._named or any(id(value) in self._names for value in held)
            seen.size, seen.frozen = size, [value for value in held if not value.requires_grad]
            seen.is_known = False
            seen.unknown = [value for value in trained if id(value) not in self._averaged]
        if self.averaging and seen.own:
            problem = "comes within backward, before the ranks' gradients are averaged"
            raise InputError("optimizer.step", problem, "call it after loss.backward()")
        if seen.unknown and (seen.own or seen.uneven != self.uneven) and self._model() is not None:
            if not seen.is_known:
                self._demand_attached(seen)
            if seen.own or self.linked:
                self._demand_averaged(seen)

    def _demand_attached(self, seen: _Seen) -> None:
        unknown, seen.is_known = seen.unknown, True
        for model in wrapped():
            if model is self._model():
                continue  # what it averages was settled when DDP wrapped it
            averaged = {id(each) for each in _averaged_by(model)}
            self._averaged |= averaged
            if model not in _checked_models and not averaged.isdisjoint(map(id, unknown)):
                self.beside.add(model)
                if not seen.own:
                    raise unweighed(type(model.module).__name__)

    def _demand_averaged(self, seen: _Seen) -> None:
        linked = {id(leaf()) for leaf in self.linked}
        unknown = [value for value in seen.unknown if id(value) not in self._averaged]
        unknown = [value for value in unknown if seen.own or id(value) in linked]
        if not unknown:
            if seen.own:
                seen.unknown = []
            return
        if name := self._names.get(id(unknown[0]), ""):
            remedy = (
                "unfreeze before DistributedDataParallel wraps the model, or wrap and attach again after unfreezing"
            )
            raise InputError("optimizer", f"trains {name}, which was frozen when DDP wrapped the model", remedy)
        shape = tuple(unknown[0].shape)
        problem = f"trains a parameter of shape {shape} that is not in the model: nobody averages it over the ranks"
        raise InputError(
            "optimizer", problem, "make a loss with parameters a part of the wrapped model, or wrap it too"
        )


@dataclass(slots=True)
class _Seen:
    """What is known of an optimizer."""

    uneven: int
    """Passes when it made its first step."""
    size: int = -1
    own: bool = False
    """Whether it trains anything of the model, or was named."""
    is_known: bool = False
    """Whether other wrapped models were looked through for what it trains."""
    frozen: list[Tensor] = field(default_factory=list)
    unknown: list[Tensor] = field(default_factory=list)
    """What it trains beside."""


def unweighed(name: str) -> InputError:
    """Return the refusal of a wrapped model that is trained without a hook."""
    problem = f"trains a {name} beside the one that was attached to, whose losses nobody weighs"
    remedy = "attach to that one as well, by runtime.attach(None, model=..., optimizer=...) if its batches are its own"
    return InputError("optimizer", problem, remedy)


def _averaged_by(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients a wrapped model averages."""
    if isinstance(model, DistributedDataParallel):
        reduced: list[nn.Parameter] = list(model._module_parameters)
        return [parameter for parameter in reduced if parameter.requires_grad]
    return list(model.parameters())


def wrapped() -> list[DistributedDataParallel]:
    """Return all wrapped models of this process."""
    return [thing for thing in gc.get_objects() if type(thing) is DistributedDataParallel]
