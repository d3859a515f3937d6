"""What a logical worker (EST) keeps between its turns: random streams, module buffers, and what its turns leave in plain
attributes of modules. Start at :class:`Contexts`.

Parameters and optimizer state are the same for all logical workers between steps and are held once per process;
activations are gone when a turn ends. What is left is small, which is why a context switch is cheap (EasyScale, section
3.2 of the paper).
"""

from __future__ import annotations

import inspect
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ddltool.errors import InputError
from ddltool.runtime.hook.digests import digest
from ddltool.runtime.hook.random_streams import Document, RandomStreams

LOSS = "(loss)."
"""Before the names of what the loss has."""
BUFFERS = "_buffers"
ABSENT = object()
"""In place of an attribute that a worker does not have."""
Key = tuple[str, str]
"""An attribute: its module's prefix, and its name."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
# Objects of these are not looked into: their state is not one that a model computes with.
_NOT_OURS = frozenset({"torch", "logging", "threading", "builtins", "functools"})


def plain_name(name: str) -> str:
    """Return a parameter's or buffer's name without what ``torch.compile`` puts before it."""
    return name.replace("_orig_mod.", "")


def modules_of(model: nn.Module, loss: Any) -> dict[str, Any]:
    """Return what has a state of its own, by the prefix of its names: all modules of both, and a loss that is no module.

    The loss's names begin with :data:`LOSS`; a module of both has the model's.
    """
    found: dict[str, Any] = {f"{name}." if name else "": module for name, module in model.named_modules()}
    if isinstance(loss, nn.Module):
        known = set(map(id, found.values()))
        found |= {
            f"{LOSS}{name}." if name else LOSS: module
            for name, module in loss.named_modules()
            if id(module) not in known
        }
    else:
        owner = getattr(loss, "__self__", loss)  # of a method
        if hasattr(owner, "__dict__") and not isinstance(owner, (type, ModuleType, nn.Module)):
            found[LOSS] = owner
    return found


def named_buffers(modules: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Return the buffers that modules hold now, by name."""
    held = {prefix: each._buffers for prefix, each in modules.items() if isinstance(each, nn.Module)}
    return {prefix + name: value for prefix, each in held.items() for name, value in each.items()}


class OwnState:
    """What each logical worker here has of modules (and of a loss that is none) for itself; values are swapped, not copied.

    From the beginning that are the modules' dicts of buffers, so a buffer that a forward pass registers, or takes away, is its
    worker's too; a tensor that is registered in two places stays one tensor. Then plain attributes which turns change
    (``self.calls += 1``, a list, a tensor): every worker begins with what was there before the first turn.
    What turns change is found by comparing all attributes before and after them, in the first turns of each worker here and
    later in every turn whose number is a power of two. Numbers, strings, tensors, arrays and collections of them can be a
    worker's own; ``training`` is the user's.

    Raises InputError for buffers that cannot be swapped, and in :meth:`leave` for an attribute that cannot be a worker's own:
    an object with a state, a random generator of its own, a module that a turn adds, or one whose changes were found when
    others may have been overlooked already.
    """

    def __init__(self, modules: dict[str, Any], local: Sequence[int]) -> None:
        self._modules, self._local = modules, local
        self._held: dict[str, dict[str, Any]] = {prefix: vars(module) for prefix, module in modules.items()}
        for prefix, module in modules.items():
            if isinstance(module, torch.jit.ScriptModule) and list(module.buffers(recurse=False)):
                what = f"model:{prefix.removesuffix('.')}"
                raise InputError(what, "is a ScriptModule, whose buffers cannot be swapped", "give the Python module")
        held = {(prefix, BUFFERS): each._buffers for prefix, each in modules.items() if isinstance(each, nn.Module)}
        self._values: dict[int, dict[Key, Any]] = {rank: _all_copied(held) for rank in local}
        self._before: dict[Key, tuple[Any, Any]] | None = None
        self._turns = 0

    def enter(self, rank: int) -> None:
        """A turn begins: put the worker's own values in place."""
        self._turns += 1
        self.install(self._values[rank])
        if self._turns <= max(2, len(self._local)) or self._turns & (self._turns - 1) == 0:
            own = self._values[rank]
            self._before = {key: (_trace(v), _copied(v)) for key, v in self._attributes() if key not in own}
            self._shape = self._submodules()

    def leave(self, rank: int) -> None:
        """A turn ends: take the worker's values, and look what else it has changed."""
        if self._before is not None:
            before, self._before = self._before, None
            if new := sorted(self._submodules() - self._shape):
                raise InputError(f"model:{new[0]}", "is added by a forward pass", "build the whole model beforehand")
            now = dict(self._attributes())
            for key in sorted(before.keys() | now.keys()):
                old_trace, old = before.get(key, (None, ABSENT))
                if key not in self._values[rank] and old_trace != (_trace(now[key]) if key in now else None):
                    self._adopt(key, old, now.get(key, ABSENT))
        self._values[rank] = {key: self._held[key[0]].get(key[1], ABSENT) for key in self._values[rank]}

    def _adopt(self, key: Key, old: Any, new: Any) -> None:
        where = f"model:{key[0]}{key[1]}"
        if not (_can_be_own(old) and _can_be_own(new)):
            problem = "changes in a turn, and no logical worker can have one of its own"
            raise InputError(where, f"is a {type(new).__name__} that {problem}", "use buffers, numbers or tensors")
        if len(self._local) > 1 and self._turns > len(self._local):
            remedy = f"register it from the beginning: self.register_buffer({key[1]!r}, torch.tensor(...))"
            raise InputError(where, f"changes in turn {self._turns}, and did not in the first ones", remedy)
        for values in self._values.values():
            values[key] = _copied(old)

    def install(self, values: Mapping[Key, Any]) -> None:
        """Let the modules hold ``values``."""
        for (prefix, name), value in values.items():
            if value is ABSENT:
                self._held[prefix].pop(name, None)
            else:
                self._held[prefix][name] = value

    def of(self, rank: int) -> dict[Key, Any]:
        """Return a worker's own values."""
        return self._values[rank]

    def copies(self, rank: int) -> dict[Key, Any]:
        """Return copies of a worker's own values."""
        return _all_copied(self._values[rank])

    def to_documents(self, rank: int) -> dict[str, Document]:
        """Return a worker's own values by name, buffers as they are and attributes without their history; none is absent."""
        own = [(plain_name(prefix), name, value) for (prefix, name), value in self._values[rank].items()]
        dicts = [(prefix, value) for prefix, name, value in own if name == BUFFERS]
        return {
            "buffers": {p + name: v for p, each in dicts for name, v in each.items() if v is not None},
            "attributes": {p + name: _copied(v) for p, name, v in own if name != BUFFERS and v is not ABSENT},
        }

    def load(self, documents: Sequence[Document], device: torch.device) -> None:
        """Take the local workers' values from the documents of all workers. Raises InputError where they do not fit."""
        present = {plain_name(name): v for name, v in named_buffers(self._modules).items() if v is not None}
        names = dict.fromkeys(name for document in documents for name in document["attributes"])
        keys = {name: self._key(name, "attributes") for name in names}
        loaded: dict[int, dict[Key, Any]] = {}
        for rank in self._local:
            saved, memo = documents[rank]["buffers"], dict[int, Tensor]()
            if lacking := sorted(present.keys() - saved.keys()):
                raise InputError("buffers", f"{lacking[0]} is only in the model", "build the model that was saved")
            own = loaded[rank] = {
                (prefix, BUFFERS): {name: None for name, value in each._buffers.items() if value is None}
                for prefix, each in self._modules.items()
                if isinstance(each, nn.Module)
            }
            for name, value in saved.items():  # a forward pass may have registered it; tied as the present ones are
                prefix, last = self._key(name, "buffers")
                moved = value.to(device)
                own[prefix, BUFFERS][last] = memo.setdefault(id(present[name]), moved) if name in present else moved
            values = documents[rank]["attributes"]
            own |= {key: _copied(values.get(name, ABSENT), device) for name, key in keys.items()}
        self._values = loaded

    def _key(self, name: str, what: str) -> Key:
        """Return where a saved name belongs. Raises InputError for a module that is not there."""
        place, _, last = name.rpartition(".")
        wanted = f"{place}." if place else ""
        for prefix in reversed(self._modules):  # what is inside of what torch.compile puts around it
            if plain_name(prefix) == wanted:
                return prefix, last
        raise InputError(what, f"{name} is only in the checkpoint", "build the model that was saved")

    def _submodules(self) -> set[str]:
        return {
            f"{prefix}{name}"
            for prefix, module in self._modules.items()
            if isinstance(module, nn.Module)
            for name in module._modules
        }

    def _attributes(self) -> Iterator[tuple[Key, Any]]:
        for prefix, held in self._held.items():
            if type(self._modules[prefix]).__name__ != "OptimizedModule":  # what torch.compile puts around it
                for name, value in held.items():
                    if name not in _OF_EVERY_MODULE:
                        yield (prefix, name), value


def _trace(value: Any, depth: int = 6) -> Any:
    """Return something that is equal for equal values: NaN equals NaN, and 1 does not equal True."""
    if isinstance(value, (nn.Parameter, nn.Module)):
        return id(value)
    if isinstance(value, Tensor):
        return digest(value) if value.layout is torch.strided and not value.is_meta else id(value)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, torch.Generator):
        return digest(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, _SIMPLE):
        return type(value), repr(value)
    if depth and isinstance(value, Mapping):
        return type(value), tuple((_trace(k, depth - 1), _trace(v, depth - 1)) for k, v in value.items())
    if depth and isinstance(value, (list, tuple, deque)):
        return type(value), tuple(_trace(each, depth - 1) for each in value)
    if depth and isinstance(value, (set, frozenset)):
        return type(value), frozenset(_trace(each, depth - 1) for each in value)
    kind = type(value)
    is_code = inspect.isroutine(value) or isinstance(value, type)
    if depth and hasattr(value, "__dict__") and not is_code and kind.__module__.split(".")[0] not in _NOT_OURS:
        return id(value), tuple(
            (name, _trace(each, depth - 3 if depth > 3 else 0)) for name, each in vars(value).items()
        )
    return id(value)


def _can_be_own(value: Any) -> bool:
    if value is ABSENT or isinstance(value, (*_SIMPLE, np.ndarray)):
        return True
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if type(value) in (dict, OrderedDict, defaultdict):
        return all(_can_be_own(key) and _can_be_own(each) for key, each in value.items())
    return type(value) in (list, tuple, deque, set, frozenset, torch.Size) and all(map(_can_be_own, value))


def _all_copied(values: Mapping[Key, Any]) -> dict[Key, Any]:
    """Return copies, of a tensor that is in several dicts of buffers one."""
    memo: dict[int, Tensor] = {}

    def once(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else memo.setdefault(id(tensor), tensor.detach().clone())

    return {
        key: {name: once(each) for name, each in value.items()} if key[1] == BUFFERS else _copied(value)
        for key, value in values.items()
    }


def _copied(value: Any, device: torch.device | None = None) -> Any:
    """Return a copy of tensors, arrays and collections, without their history; anything else as it is."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone() if device is None else value.detach().to(device, copy=True)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, (dict, OrderedDict)) and _can_be_own(value):
        made = value.copy()
        for key, each in value.items():
            made[key] = _copied(each, device)
        return made
    if type(value) is deque:
        return deque((_copied(each, device) for each in value), value.maxlen)
    if type(value) in (list, tuple, set):
        return type(value)(_copied(each, device) for each in value)
    return value


class Strangers:
    """Modules that turns call and that the trainer was not told of: a loss with a running mean, in a loop of one's own.

    They are found as they are called, in the first turns of each worker here. One whose outputs have a gradient may not change.
    """

    def __init__(self, modules: Mapping[str, Any], turns: int) -> None:
        known = [each for each in modules.values() if isinstance(each, nn.Module)]
        self._known = {id(part) for each in known for part in each.modules()}
        # A compiled module minds hooks of all modules.
        is_compiled = any(type(each).__name__ == "OptimizedModule" for each in known)
        self._turns = 0 if is_compiled else turns
        self._called: dict[int, Any] = {}
        self._trained: dict[int, nn.Module] = {}
        self._handles: list[Any] = []

    def begin(self) -> None:
        """A turn begins."""
        self._turns -= 1
        if self._turns >= 0:
            hooks = register_module_forward_pre_hook(self._begin), register_module_forward_hook(self._end)
            self._handles = list(hooks)

    def end(self) -> None:
        """It ends. Raises InputError for a module that it has changed."""
        called, trained = self._called, self._trained
        self.close()
        for key, module in trained.items():
            if _state(module) != called[key]:
                problem = (
                    f"a {type(module).__name__} that it calls changes, and is neither in the model nor the loss_fn"
                )
                raise InputError("the turn", problem, "give it as loss_fn, or make it a part of the model")

    def close(self) -> None:
        """Look no more in this turn, which may have been left before its end."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._called, self._trained = [], {}, {}

    def _begin(self, module: nn.Module, _: object) -> None:
        if id(module) not in self._known:
            self._called.setdefault(id(module), _state(module))

    def _end(self, module: nn.Module, _: object, output: object) -> None:
        if id(module) in self._called and isinstance(output, Tensor) and output.requires_grad:
            self._trained[id(module)] = module


def _state(module: nn.Module) -> Any:
    """Return something that is equal as long as a module's own buffers and attributes are."""
    held = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    return _trace(held), _trace(dict(module._buffers))


class Contexts:
    """What the logical workers of this process have of their own; at most one worker is switched in.

    Between turns, the process's own random streams are back in place and the model holds the buffers and attributes of the
    first local worker (on the process of virtual rank 0 those of that one, whose buffers plain DDP would keep).
    """

    def __init__(self, modules: dict[str, Any], local: Sequence[int], seed: int, device: torch.device) -> None:
        self._modules, self._own = modules, OwnState(modules, local)
        self.strangers = Strangers(modules, 2 * len(local))
        self._device, self._local = device, local
        self._streams = {rank: RandomStreams.seeded(seed, rank, device) for rank in local}
        self._outside: RandomStreams | None = None  # the process's own, while a step is under way
        self.active: int | None = None
        self._install_first()

    def enter(self, virtual_rank: int) -> None:
        """Switch ``virtual_rank`` in; no other worker is."""
        if self._outside is None:
            self._outside = RandomStreams.present(self._device)
        self._own.enter(virtual_rank)
        self.strangers.begin()
        self._streams[virtual_rank].restore(self._device)
        self.active = virtual_rank

    def leave(self, last: bool = True) -> None:
        """Switch out the worker that is in; after the ``last`` one of a step, the process's own streams come back.

        Raises InputError for what a turn changed and no worker can have for itself (:class:`OwnState`).
        """
        if self.active is None:
            return
        self._streams[self.active] = RandomStreams.present(self._device)
        self.strangers.end()
        self._own.leave(self.active)
        self.active = None
        if last and self._outside is not None:
            self._outside.restore(self._device)
            self._outside = None
            self._install_first()

    def _install_first(self) -> None:
        self._own.install(self._own.of(self._local[0]))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let the block change buffers and attributes without a trace."""
        self._own.install(self._own.copies(self._local[0]))
        try:
            yield
        finally:
            self._install_first()

    def seen(self) -> tuple[Document, dict[str, Tensor | None]]:
        """Return the random streams and the model's buffers that code draws from and changes now, whosever they are."""
        buffers = {name: v for name, v in named_buffers(self._modules).items() if not name.startswith(LOSS)}
        return RandomStreams.present(self._device).to_document(), buffers

    def to_documents(self) -> list[Document]:
        """Return the local workers' contexts in virtual-rank order, for a checkpoint; buffers are no copies."""
        return [
            {"virtual_rank": rank, "streams": self._streams[rank].to_document(), **self._own.to_documents(rank)}
            for rank in self._local
        ]

    def load(self, documents: list[Document], where: str) -> None:
        """Take the local workers' contexts from those of all workers. Raises InputError when they do not fit the model."""
        try:
            self._own.load(documents, self._device)
        except InputError as error:
            raise InputError(f"{where}:{error.where}", error.problem, error.remedy) from None
        self._streams = {rank: RandomStreams.from_document(documents[rank]["streams"]) for rank in self._local}
        self._install_first()
