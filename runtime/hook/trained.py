"""What a rank has beside what DDP keeps alike: it would drift apart between ranks, so it is refused. Start at :func:`guard`."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddltool.errors import InputError
from ddltool.runtime.hook.job import Job

UPDATES_WITH_BUFFERS = 2


def guard(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse before an update what ranks would not have alike: now on all ranks, later before the first wrong update."""
    trained = TrainedParameters(model, optimizer)
    job.together(trained.check)
    optimizer.register_step_pre_hook(trained.check)
    optimizer.register_step_pre_hook(LateBuffers(job, model).check)
    if isinstance(model, DistributedDataParallel):
        optimizer.register_step_pre_hook(GradientHooks(model).check)


class LateBuffers:
    """Buffers that forward passes make: DDP does not know them, and ranks that see other batches may have others."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._job, self._model = job, weakref.ref(model)
        self._known = {name for name, _ in model.named_buffers()}
        self._updates = 0

    def check(self, *_: object) -> None:
        """Raise InputError on all ranks where one is not alike after the first two passes; all ranks come here together."""
        model = self._model()
        if model is None or self._updates == UPDATES_WITH_BUFFERS:
            return
        self._updates += 1
        made = {name: value for name, value in model.named_buffers() if name not in self._known}
        told = {name: _digest(value) for name, value in made.items()}
        remedy = "make it before DistributedDataParallel wraps the model, from what is alike on every rank"
        name = next(iter(sorted(told)), "")
        self._job.demand_same(f"model: buffer {name}, made in a forward pass,", " ".join(told.values()), remedy)


def _digest(value: torch.Tensor) -> str:
    if value.is_meta:
        return "meta"
    return hashlib.sha256(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[
        :8
    ]


class GradientHooks:
    """What the script changes gradients by on their way (``Tensor.register_hook``): each rank's own, before the average."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._updates = 0

    def check(self, *_: object) -> None:
        """Raise InputError, before the first two updates, for a hook that does not commute with an average of gradients."""
        model = self._model()
        if model is None or self._updates == UPDATES_WITH_BUFFERS:
            return
        self._updates += 1
        for name, value in model.named_parameters():
            if not all(_is_linear(hook, value) for hook in (value._backward_hooks or {}).values()):
                problem = "is changed by a hook on each rank by itself, before the ranks' gradients are averaged"
                remedy = "change .grad between backward and the optimizer's step"
                raise InputError(f"gradient of {name.removeprefix('module.')}", problem, remedy)


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
    """The parameters of ``optimizer``, held against those whose gradients are averaged over the ranks.

    DDP averages what required a gradient when it wrapped the model. A loss with parameters of its own, or layers that are
    unfrozen later, have a gradient of their own on each rank, with equal batches as well.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._model = optimizer, weakref.ref(model)
        self._averaged = {id(parameter) for parameter in _averaged_by(model)}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._groups = 0
        self._frozen: list[nn.Parameter] = []

    def check(self, *_: object) -> None:
        """Raise InputError for a parameter that is trained but not averaged. Cheap: most steps look at what is frozen."""
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        if len(held) != self._groups:
            self._groups = len(held)
            self._frozen = [parameter for parameter in held if not parameter.requires_grad]
            self._demand([parameter for parameter in held if parameter.requires_grad])
        if any(parameter.requires_grad for parameter in self._frozen):
            self._groups = -1
            self._demand([parameter for parameter in self._frozen if parameter.requires_grad])

    def _demand(self, trained: list[nn.Parameter]) -> None:
        unknown = [parameter for parameter in trained if id(parameter) not in self._averaged]
        if unknown:  # they may be another wrapped model's
            others = [model for model in wrapped() if model is not self._model()]
            self._averaged |= {id(each) for model in others for each in _averaged_by(model)}
            unknown = [parameter for parameter in unknown if id(parameter) not in self._averaged]
        if not unknown:
            return
        if name := self._names.get(id(unknown[0])):
            remedy = (
                "unfreeze before DistributedDataParallel wraps the model, or wrap and attach again after unfreezing"
            )
            raise InputError("optimizer", f"trains {name}, which was frozen when DDP wrapped the model", remedy)
        shape = tuple(unknown[0].shape)
        problem = f"trains a parameter of shape {shape} that is not in the model: nobody averages it over the ranks"
        raise InputError(
            "optimizer", problem, "make a loss with parameters a part of the wrapped model, or wrap it too"
        )


def _averaged_by(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients a wrapped model averages."""
    if isinstance(model, DistributedDataParallel):
        reduced: list[nn.Parameter] = list(model._module_parameters)
        return [parameter for parameter in reduced if parameter.requires_grad]
    return list(model.parameters())


def wrapped() -> list[DistributedDataParallel]:
    """Return all wrapped models of this process."""
    return [thing for thing in gc.get_objects() if type(thing) is DistributedDataParallel]
