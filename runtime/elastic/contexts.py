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
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ddltool.errors import InputError
from ddltool.runtime.elastic.digests import digest

Document = dict[str, Any]
"""Nested dicts of tensors, numbers, strings and None: what ``torch.load(weights_only=True)`` takes."""
LOSS = "(loss)."
"""Before the names of what the loss has."""
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


@dataclass(frozen=True, slots=True)
class RandomStreams:
    """The generators that training code draws from without saying so: those that are global.

    Python's, NumPy's, torch's on the host, and torch's on a device. NumPy's is held as the object itself, for a swap costs
    a hundredth of what reading and writing its 624 words does; the half of a pair of normal draws that NumPy may have kept
    does not belong to that object, so it is here.
    """

    python: tuple[Any, ...]
    numpy: Any
    half_pair: tuple[int, float]
    torch_cpu: Tensor  # (5056,) bytes
    device: Tensor | None  # None where the model is on the host

    @classmethod
    def present(cls, device: torch.device) -> RandomStreams:
        """Return this process's streams; they stay as they are once others are restored."""
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        state = np.random.get_state(legacy=False)  # noqa: NPY002  # user code draws from it
        half_pair = int(state["has_gauss"]), float(state["gauss"])
        return cls(random.getstate(), get_bit_generator(), half_pair, torch.get_rng_state(), on_device)

    @classmethod
    def seeded(cls, seed: int, virtual_rank: int, device: torch.device) -> RandomStreams:
        """Return the streams that a logical worker starts with; they depend on ``seed`` and ``virtual_rank`` only."""
        with kept(device):
            seed_streams(seed, virtual_rank, device)
            return cls.present(device)

    def restore(self, device: torch.device) -> None:
        """Make these the streams of this process: what is drawn now moves them on."""
        random.setstate(self.python)
        set_bit_generator(self.numpy)
        if self.half_pair[0]:
            state = np.random.get_state(legacy=False)  # noqa: NPY002  # user code draws from it
            state["has_gauss"], state["gauss"] = self.half_pair
            np.random.set_state(state)  # noqa: NPY002  # user code draws from it
        torch.set_rng_state(self.torch_cpu)
        if self.device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.device, device)

    def to_document(self) -> Document:
        """Return the states as tensors and numbers."""
        version, words, gauss = self.python
        state, (has_gauss, cached) = self.numpy.state["state"], self.half_pair
        numbers = {"position": int(state["pos"]), "has_gauss": has_gauss, "cached": cached}
        return {
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "numpy": {"key": torch.from_numpy(state["key"].astype(np.int64))} | numbers,
            "torch_cpu": self.torch_cpu,
            "device": self.device,
        }

    @classmethod
    def from_document(cls, document: Document) -> RandomStreams:
        """Return the streams that :meth:`to_document` described."""
        python, numpy = document["python"], document["numpy"]
        generator = np.random.MT19937(0)
        key = numpy["key"].numpy().astype(np.uint32)
        generator.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": numpy["position"]}}
        return cls(
            (python["version"], tuple(python["words"].tolist()), python["gauss"]),
            generator,
            (numpy["has_gauss"], numpy["cached"]),
            document["torch_cpu"],
            document["device"],
        )


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Keep what is drawn, and seeded, within the block from this process's streams."""
    present = RandomStreams.present(device)
    set_bit_generator(np.random.MT19937(0))
    try:
        yield
    finally:
        present.restore(device)


def seed_streams(seed: int, virtual_rank: int, device: torch.device | None = None) -> None:
    """Seed this process's global generators as logical worker ``virtual_rank`` of a run with ``seed`` starts.

    For a plain DDP script that is to be compared with an elastic run: call it with the process's rank.
    """
    words = np.random.SeedSequence([seed, virtual_rank]).generate_state(4, np.uint64).tolist()
    random.seed(words[0])
    np.random.seed(words[1] % 2**32)  # noqa: NPY002  # user code draws from it
    torch.default_generator.manual_seed(words[2])
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(words[3])


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


class Buffers:
    """All buffers of modules. A set of values is swapped in by exchanging the modules' own dicts: nothing is copied.

    So a buffer that a forward pass registers, or takes away, is its worker's too. A tensor that is registered in two places
    stays one tensor in every set of values.
    """

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self._places = {prefix: each for prefix, each in modules.items() if isinstance(each, nn.Module)}
        for prefix, module in self._places.items():
            if isinstance(module, torch.jit.ScriptModule) and list(module.buffers(recurse=False)):
                what = f"model:{prefix.removesuffix('.')}"
                raise InputError(what, "is a ScriptModule, whose buffers cannot be swapped", "give the Python module")

    def current(self) -> list[dict[str, Tensor | None]]:
        """Return the dicts that the modules hold now, by module."""
        return [module._buffers for module in self._places.values()]

    def named(self, values: Sequence[dict[str, Tensor | None]] | None = None) -> dict[str, Tensor | None]:
        """Return values (None: those that the modules hold now) by name."""
        taken = self.current() if values is None else values
        return {prefix + name: v for prefix, each in zip(self._places, taken, strict=True) for name, v in each.items()}

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the modules hold now, each once."""
        return list({id(value): value for value in self.named().values() if value is not None}.values())

    def copy(self) -> list[dict[str, Tensor | None]]:
        """Return copies of the values that the modules hold now."""
        memo: dict[int, Tensor] = {}
        return [
            {
                name: None if value is None else memo.setdefault(id(value), value.detach().clone())
                for name, value in each.items()
            }
            for each in self.current()
        ]

    def install(self, values: Sequence[dict[str, Tensor | None]]) -> None:
        """Let the modules hold ``values``."""
        for module, each in zip(self._places.values(), values, strict=True):
            module.__dict__["_buffers"] = each

    def loaded(self, saved: Mapping[str, Tensor | None], device: torch.device) -> list[dict[str, Tensor | None]]:
        """Return a set of values with the ``saved`` ones by name, tied where the present ones are.

        Raises InputError for a module that is not there; a buffer of the model that is not saved is one.
        """
        present = self.named()
        memo: dict[int, Tensor] = {}
        made: dict[str, dict[str, Tensor | None]] = {
            prefix: {name: None for name, value in module._buffers.items() if value is None}
            for prefix, module in self._places.items()
        }
        homes = {plain_name(prefix): prefix for prefix in self._places}
        old_of = {plain_name(name): value for name, value in present.items() if value is not None}
        if lacking := sorted(old_of.keys() - saved.keys()):
            raise InputError("buffers", f"{lacking[0]} is only in the model", "build the model that was saved")
        for name, value in saved.items():
            if value is None:  # older files have these
                continue
            place, _, last = name.rpartition(".")
            prefix = f"{place}." if place else ""
            if prefix not in homes:  # a forward pass may have registered it, on a module that there is
                raise InputError("buffers", f"{name} is only in the checkpoint", "build the model that was saved")
            moved = value.to(device)
            made[homes[prefix]][last] = memo.setdefault(id(old_of[name]), moved) if name in old_of else moved
        return list(made.values())


class PlainState:
    """Plain attributes of modules (and of a loss that is none) which turns change: ``self.calls += 1``, a list, a tensor.

    They become each logical worker's own, as its buffers are: every worker begins with what was there before the first turn.
    What turns change is found by comparing all attributes before and after them, in the first turns of each worker here and
    later in every turn whose number is a power of two. Numbers, strings, tensors, arrays and collections of them can be a
    worker's own; ``training`` is the user's.

    Raises InputError, in :meth:`leave`, for an attribute that cannot: an object with a state, a random generator of its own,
    a module that a turn adds, or one whose changes were found when others may have been overlooked already.
    """

    def __init__(self, modules: Mapping[str, Any], local: Sequence[int]) -> None:
        self._modules, self._local = modules, local
        self._values: dict[int, dict[Key, Any]] = {rank: {} for rank in local}
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
        self._values[rank] = {key: self._holder(key).get(key[1], ABSENT) for key in self._values[rank]}

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
        for key, value in values.items():
            if value is ABSENT:
                self._holder(key).pop(key[1], None)
            else:
                self._holder(key)[key[1]] = value

    def of(self, rank: int) -> dict[Key, Any]:
        """Return a worker's own values."""
        return self._values[rank]

    def copies(self, rank: int) -> dict[Key, Any]:
        """Return copies of a worker's own values."""
        return {key: _copied(value) for key, value in self._values[rank].items()}

    def to_document(self, rank: int) -> Document:
        """Return a worker's own values by name, without their history; what is absent is left out."""
        return {plain_name(key[0]) + key[1]: _copied(v) for key, v in self._values[rank].items() if v is not ABSENT}

    def load(self, documents: Sequence[Document], device: torch.device) -> None:
        """Take the local workers' values from the documents of all workers. Raises InputError for an unknown module."""
        prefixes = {plain_name(prefix): prefix for prefix in self._modules}
        keys: dict[str, Key] = {}
        for name in (name for document in documents for name in document):
            place, _, last = name.rpartition(".")
            if (prefix := f"{place}." if place else "") not in prefixes:
                raise InputError("attributes", f"{name} is only in the checkpoint", "build the model that was saved")
            keys[name] = (prefixes[prefix], last)
        for rank in self._local:
            self._values[rank] = {key: _copied(documents[rank].get(name, ABSENT), device) for name, key in keys.items()}

    def _holder(self, key: Key) -> dict[str, Any]:
        held: dict[str, Any] = vars(self._modules[key[0]])
        return held

    def _submodules(self) -> set[str]:
        return {
            f"{prefix}{name}"
            for prefix, module in self._modules.items()
            if isinstance(module, nn.Module)
            for name in module._modules
        }

    def _attributes(self) -> Iterator[tuple[Key, Any]]:
        for prefix, holder in self._modules.items():
            if type(holder).__name__ != "OptimizedModule":  # what torch.compile puts around it
                for name, value in vars(holder).items():
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

    def __init__(self, modules: Mapping[str, Any], local: Sequence[int], seed: int, device: torch.device) -> None:
        self._model_buffers = Buffers(modules)
        self._plain = PlainState(modules, local)
        self.strangers = Strangers(modules, 2 * len(local))
        self._device, self._local = device, local
        self._streams = {rank: RandomStreams.seeded(seed, rank, device) for rank in local}
        self._buffers = {rank: self._model_buffers.copy() for rank in local}
        self._outside: RandomStreams | None = None  # the process's own, while a step is under way
        self.active: int | None = None
        self._model_buffers.install(self._buffers[local[0]])

    def enter(self, virtual_rank: int) -> None:
        """Switch ``virtual_rank`` in; no other worker is."""
        if self._outside is None:
            self._outside = RandomStreams.present(self._device)
        self._model_buffers.install(self._buffers[virtual_rank])
        self._plain.enter(virtual_rank)
        self.strangers.begin()
        self._streams[virtual_rank].restore(self._device)
        self.active = virtual_rank

    def leave(self, last: bool = True) -> None:
        """Switch out the worker that is in; after the ``last`` one of a step, the process's own streams come back.

        Raises InputError for what a turn changed and no worker can have for itself (:class:`PlainState`).
        """
        if self.active is None:
            return
        self._streams[self.active] = RandomStreams.present(self._device)
        self.strangers.end()
        self._plain.leave(self.active)
        self.active = None
        if last and self._outside is not None:
            self._outside.restore(self._device)
            self._outside = None
            self._install_first()

    def _install_first(self) -> None:
        self._model_buffers.install(self._buffers[self._local[0]])
        self._plain.install(self._plain.of(self._local[0]))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let the block change buffers and attributes without a trace."""
        self._model_buffers.install(self._model_buffers.copy())
        self._plain.install(self._plain.copies(self._local[0]))
        try:
            yield
        finally:
            self._install_first()

    def seen(self) -> tuple[Document, dict[str, Tensor | None]]:
        """Return the random streams and the model's buffers that code draws from and changes now, whosever they are."""
        buffers = {name: v for name, v in self._model_buffers.named().items() if not name.startswith(LOSS)}
        return RandomStreams.present(self._device).to_document(), buffers

    def to_documents(self) -> list[Document]:
        """Return the local workers' contexts in virtual-rank order, for a checkpoint; buffers are no copies."""
        return [
            {
                "virtual_rank": rank,
                "streams": self._streams[rank].to_document(),
                "buffers": {
                    plain_name(name): value
                    for name, value in self._model_buffers.named(self._buffers[rank]).items()
                    if value is not None
                },
                "attributes": self._plain.to_document(rank),
            }
            for rank in self._local
        ]

    def load(self, documents: list[Document], where: str) -> None:
        """Take the local workers' contexts from those of all workers. Raises InputError when they do not fit the model."""
        try:
            buffers = {
                rank: self._model_buffers.loaded(documents[rank]["buffers"], self._device) for rank in self._local
            }
            self._plain.load([document.get("attributes", {}) for document in documents], self._device)
        except InputError as error:
            raise InputError(f"{where}:{error.where}", error.problem, error.remedy) from None
        self._buffers = buffers
        self._streams = {rank: RandomStreams.from_document(documents[rank]["streams"]) for rank in self._local}
        self._install_first()
