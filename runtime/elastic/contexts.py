"""The state that a logical worker (EST) keeps between its turns. Start at :class:`Contexts`.

The logical workers of a process run one after the other, each in its *turn* of a step; a worker's number in the job is
its *virtual rank*. Between turns it keeps its random streams, its module buffers, and the plain attributes of modules
that its turns change. Parameters and optimizer state are the same for all logical workers between steps, so a process
holds them once; activations are freed when a turn ends. This makes switching from one worker to the next cheap
(EasyScale, section 3.2).
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
from ddltool.runtime.processes.digests import digest
from ddltool.runtime.processes.random_streams import Document, RandomStreams

LOSS = "(loss)."
"""Prefix of the names of the loss's parameters, buffers and attributes."""
BUFFERS = "_buffers"
"""The attribute in which ``nn.Module`` keeps its dict of buffers."""
ABSENT = object()
"""The value of an attribute that a worker does not have."""
Key = tuple[str, str]
"""An attribute: (its module's prefix, its name). A key with the name :data:`BUFFERS` stands for all of a module's buffers."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
# Top-level modules whose objects are compared by identity: a model does not compute with their state.
_OPAQUE_MODULES = frozenset({"torch", "logging", "threading", "builtins", "functools"})


def plain_name(name: str) -> str:
    """Return a parameter's or buffer's name without ``_orig_mod.``, which ``torch.compile`` inserts."""
    return name.replace("_orig_mod.", "")


def modules_of(model: nn.Module, loss: Any) -> dict[str, Any]:
    """Return the modules of model and loss by the prefix of their names, such as ``"layer.0."``; the model itself has "".

    The loss's prefixes begin with :data:`LOSS`; a module that is in both has the model's. A loss that is no module but has
    attributes, as any object of a Python class and any Python function, is included for these; of a method its object is.
    None and builtins are not.
    """
    by_prefix: dict[str, Any] = {f"{name}." if name else "": module for name, module in model.named_modules()}
    if isinstance(loss, nn.Module):
        model_ids = set(map(id, by_prefix.values()))
        by_prefix |= {
            f"{LOSS}{name}." if name else LOSS: module
            for name, module in loss.named_modules()
            if id(module) not in model_ids
        }
    else:
        owner = getattr(loss, "__self__", loss)  # the object of a bound method
        if hasattr(owner, "__dict__") and not isinstance(owner, (type, ModuleType, nn.Module)):
            by_prefix[LOSS] = owner
    return by_prefix


def named_buffers(modules: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Return the buffers that ``modules`` (by prefix) hold now, by full name; None for one that is registered as None."""
    dicts = {prefix: module._buffers for prefix, module in modules.items() if isinstance(module, nn.Module)}
    return {prefix + name: value for prefix, buffers in dicts.items() for name, value in buffers.items()}


class WorkerState:
    """Each local worker's own values of module attributes, and of a loss object's; they are swapped, not copied.

    At first these are the modules' dicts of buffers. So a buffer that a forward pass registers or removes belongs to
    its worker too, and a tensor that is registered in two places stays one tensor. Plain attributes that a turn changes
    (``self.calls += 1``, a list, a tensor) are added when the change is found; every worker then starts with the value
    from before the turn. To find changes, all attributes are compared before and after a turn: in the first turn of
    each local worker, and later in turns whose number is a power of two. Numbers, strings, tensors, arrays and
    collections of them can be swapped; ``training`` is left to the user.

    Raises InputError for buffers that cannot be swapped, and in :meth:`leave` for a change that cannot be kept per
    worker: of an object with a state or a random generator, a module that a turn adds, or a change that was found so
    late that earlier ones may have been missed.
    """

    def __init__(self, modules: dict[str, Any], local: Sequence[int]) -> None:
        """Give each of the ``local`` virtual ranks a copy of all buffers of ``modules`` (by prefix; :func:`modules_of`)."""
        self._modules = modules
        self._local = local
        # By prefix, each module's own __dict__: writing to it sets the module's attribute.
        self._attributes_by_prefix = {prefix: vars(module) for prefix, module in modules.items()}
        for prefix, module in modules.items():
            if isinstance(module, torch.jit.ScriptModule) and list(module.buffers(recurse=False)):
                what = f"model:{prefix.removesuffix('.')}"
                raise InputError(what, "is a ScriptModule, whose buffers cannot be swapped", "give the Python module")
        buffers = {(prefix, BUFFERS): part._buffers for prefix, part in modules.items() if isinstance(part, nn.Module)}
        # By virtual rank, the worker's own values, which are put into the modules for its turns.
        self._values: dict[int, dict[Key, Any]] = {rank: _copies(buffers) for rank in local}
        # (comparable, copy) of every shared attribute before the turn; None in turns that are not compared.
        self._before: dict[Key, tuple[Any, Any]] | None = None
        self._turns = 0

    def enter(self, rank: int) -> None:
        """Begin a turn of virtual rank ``rank``: put the worker's own values in place.

        If this turn is compared, also remember all attributes that workers share, to find those that the turn changes.
        """
        self._turns += 1
        self.install(rank)
        is_power_of_two = self._turns & (self._turns - 1) == 0
        if self._turns <= len(self._local) or is_power_of_two:
            own_values = self._values[rank]
            shared = ((key, value) for key, value in self._attributes() if key not in own_values)
            # The copy is what all workers start with, should this turn change the attribute.
            self._before = {key: (_comparable(value), _copied(value)) for key, value in shared}
            self._submodules_before = self._submodules()

    def leave(self, rank: int) -> None:
        """End the turn of virtual rank ``rank``: store the worker's values.

        If this turn was compared, each shared attribute that it has changed becomes every worker's own from now on.
        Raises InputError for a module that the turn has added, and for a change that cannot be kept per worker.
        """
        if self._before is not None:
            before = self._before
            self._before = None
            if new := sorted(self._submodules() - self._submodules_before):
                raise InputError(f"model:{new[0]}", "is added by a forward pass", "build the whole model beforehand")
            after = dict(self._attributes())
            for key in sorted(before.keys() | after.keys()):
                old_comparable, old = before.get(key, (None, ABSENT))  # ABSENT: the turn has made the attribute
                comparable = _comparable(after[key]) if key in after else None
                if key not in self._values[rank] and old_comparable != comparable:
                    self._adopt(key, old, after.get(key, ABSENT))
        self._values[rank] = {
            (prefix, name): self._attributes_by_prefix[prefix].get(name, ABSENT) for prefix, name in self._values[rank]
        }

    def _adopt(self, key: Key, old: Any, new: Any) -> None:
        """Give every local worker its own value of the attribute ``key``, which a turn has changed from ``old`` to ``new``.

        All start with ``old``; :meth:`leave` then stores ``new`` for the worker of the turn. Raises InputError for a
        value that cannot be swapped and, with several workers, for a change after each has had its first turn: changes
        in turns that were not compared may have been missed.
        """
        where = f"model:{key[0]}{key[1]}"
        if not (_is_swappable(old) and _is_swappable(new)):
            problem = "changes in a turn, and no logical worker can have one of its own"
            raise InputError(where, f"is a {type(new).__name__} that {problem}", "use buffers, numbers or tensors")
        if len(self._local) > 1 and self._turns > len(self._local):
            remedy = f"register it from the beginning: self.register_buffer({key[1]!r}, torch.tensor(...))"
            raise InputError(where, f"changes in turn {self._turns}, and did not in the first ones", remedy)
        for values in self._values.values():
            values[key] = _copied(old)

    def install(self, rank: int, *, copied: bool = False) -> None:
        """Set the modules' attributes to the values of virtual rank ``rank``, or to copies; one that is ABSENT is removed."""
        values = self._values[rank]
        for (prefix, name), value in (_copies(values) if copied else values).items():
            if value is ABSENT:
                self._attributes_by_prefix[prefix].pop(name, None)
            else:
                self._attributes_by_prefix[prefix][name] = value

    def to_documents(self, rank: int) -> dict[str, Document]:
        """Return the values of virtual rank ``rank`` for a checkpoint: ``buffers`` and ``attributes``, each by full name.

        Buffers are not copied, attributes are. Attributes that are absent, and buffers that are None, are left out.
        """
        buffers: Document = {}
        attributes: Document = {}
        for (prefix, name), value in self._values[rank].items():
            if name == BUFFERS:
                held = {buffer_name: buffer for buffer_name, buffer in value.items() if buffer is not None}
                buffers |= {plain_name(prefix) + buffer_name: buffer for buffer_name, buffer in held.items()}
            elif value is not ABSENT:
                attributes[plain_name(prefix) + name] = _copied(value)
        return {"buffers": buffers, "attributes": attributes}

    def load(self, documents: Sequence[Document], device: torch.device) -> None:
        """Replace the local workers' values by those in ``documents``, one per worker of the job in virtual-rank order.

        Each document has ``buffers`` and plain ``attributes`` by full name; those of this process's workers are copied to
        ``device``. The modules' attributes are set by the next :meth:`install`. Raises InputError for documents that lack a
        buffer of the model, or name a module that it lacks, and then changes nothing.
        """
        model_buffers = {plain_name(name): v for name, v in named_buffers(self._modules).items() if v is not None}
        # An attribute that any worker's document names is every worker's own: ABSENT for those whose document lacks it.
        attribute_names = dict.fromkeys(name for document in documents for name in document["attributes"])
        keys = {name: self._attribute_key(name, "attributes") for name in attribute_names}
        loaded: dict[int, dict[Key, Any]] = {}
        for rank in self._local:
            document = documents[rank]
            values = self._loaded_buffers(document["buffers"], model_buffers, device)
            for name, key in keys.items():
                values[key] = _copied(document["attributes"].get(name, ABSENT), device)
            loaded[rank] = values
        self._values = loaded

    def _loaded_buffers(
        self, saved: Document, model_buffers: Mapping[str, Tensor], device: torch.device
    ) -> dict[Key, Any]:
        """Return one worker's buffers, by module, from ``saved`` (by full name); tied buffers stay tied.

        ``model_buffers``: the model's own buffers by full name; ``device``: where the copies go. Raises InputError if ``saved``
        lacks a buffer of the model, or has one of a module that the model lacks.
        """
        if lacking := sorted(model_buffers.keys() - saved.keys()):
            raise InputError("buffers", f"{lacking[0]} is only in the model", "build the model that was saved")
        moved_by_id = dict[int, Tensor]()  # by id of the model's buffer, which tied names share
        # A checkpoint has no buffers that are registered as None.
        values: dict[Key, Any] = {
            (prefix, BUFFERS): {name: None for name, value in module._buffers.items() if value is None}
            for prefix, module in self._modules.items()
            if isinstance(module, nn.Module)
        }
        for name, value in saved.items():  # a forward pass may have registered a buffer that the model has not
            prefix, buffer_name = self._attribute_key(name, "buffers")
            moved = value.to(device)
            if name in model_buffers:
                moved = moved_by_id.setdefault(id(model_buffers[name]), moved)
            values[prefix, BUFFERS][buffer_name] = moved
        return values

    def _attribute_key(self, name: str, what: str) -> Key:
        """Return the key (prefix, attribute) of a full name in a checkpoint.

        ``what``: "buffers" or "attributes", for the message. Raises InputError for a module that the model lacks.
        """
        module_name, _, attribute = name.rpartition(".")
        module_prefix = f"{module_name}." if module_name else ""
        for prefix in reversed(self._modules):  # the inner module before the wrapper of torch.compile
            if plain_name(prefix) == module_prefix:
                return prefix, attribute
        raise InputError(what, f"{name} is only in the checkpoint", "build the model that was saved")

    def _submodules(self) -> set[str]:
        """Return the full names of the submodules that are registered now, to find those that a turn adds."""
        modules = ((prefix, part) for prefix, part in self._modules.items() if isinstance(part, nn.Module))
        return {f"{prefix}{name}" for prefix, module in modules for name in module._modules}

    def _attributes(self) -> Iterator[tuple[Key, Any]]:
        """Yield every attribute of the modules with its key, except those that all ``nn.Module`` objects have.

        Those of the wrapper that ``torch.compile`` puts around a model are left out too, as they are torch's own.
        """
        for prefix, attributes in self._attributes_by_prefix.items():
            # The wrapper is known by its name, because its class is imported only with the compiler, which takes a second.
            if type(self._modules[prefix]).__name__ != "OptimizedModule":
                for name, value in attributes.items():
                    if name not in _OF_EVERY_MODULE:
                        yield (prefix, name), value


def _comparable(value: Any, depth: int = 6) -> Any:
    """Return a value that is equal before and after a turn if and only if ``value`` has not changed, as far as can be seen.

    For tensors, arrays and generators that is a fingerprint of their contents; for collections and objects of the
    user's own classes, their contents down to ``depth`` levels; for everything else, modules and parameters included,
    the identity. NaN equals NaN, and 1 does not equal True.
    """
    value_type = type(value)
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
        return value_type, repr(value)
    if depth and isinstance(value, Mapping):
        items = value.items()
        return value_type, tuple((_comparable(key, depth - 1), _comparable(item, depth - 1)) for key, item in items)
    if depth and isinstance(value, (list, tuple, deque)):
        return value_type, tuple(_comparable(item, depth - 1) for item in value)
    if depth and isinstance(value, (set, frozenset)):
        return value_type, frozenset(_comparable(item, depth - 1) for item in value)
    is_code = inspect.isroutine(value) or isinstance(value, type)
    is_opaque = is_code or value_type.__module__.split(".")[0] in _OPAQUE_MODULES
    if depth and hasattr(value, "__dict__") and not is_opaque:
        inner_depth = max(depth - 3, 0)  # objects refer to many others: they are followed less far than collections
        return id(value), tuple((name, _comparable(item, inner_depth)) for name, item in vars(value).items())
    return id(value)


def _is_swappable(value: Any) -> bool:
    """Return whether each worker can have a value of this type of its own, which takes copying and comparing it."""
    if value is ABSENT or isinstance(value, (*_SIMPLE, np.ndarray)):
        return True
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if type(value) in (dict, OrderedDict, defaultdict):
        return all(_is_swappable(key) and _is_swappable(item) for key, item in value.items())
    return type(value) in (list, tuple, deque, set, frozenset, torch.Size) and all(map(_is_swappable, value))


def _copies(values: Mapping[Key, Any]) -> dict[Key, Any]:
    """Return copies of a worker's values, by attribute; a buffer that is registered under several names stays one tensor."""
    copied_by_id: dict[int, Tensor] = {}

    def copy_once(tensor: Tensor | None) -> Tensor | None:
        """Return the copy of a buffer, the same for the same tensor; None for None."""
        if tensor is None:
            return None
        if id(tensor) not in copied_by_id:
            copied_by_id[id(tensor)] = tensor.detach().clone()
        return copied_by_id[id(tensor)]

    copies: dict[Key, Any] = {}
    for (prefix, name), value in values.items():
        if name == BUFFERS:  # the value is a module's dict of buffers
            copies[prefix, name] = {buffer_name: copy_once(buffer) for buffer_name, buffer in value.items()}
        else:
            copies[prefix, name] = _copied(value)
    return copies


def _copied(value: Any, device: torch.device | None = None) -> Any:
    """Return a deep copy of a tensor, an array or a collection, its tensors on ``device`` and without autograd history.

    ``device`` None: where they are. Parameters, and values of other types, are returned themselves.
    """
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone() if device is None else value.detach().to(device, copy=True)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, (dict, OrderedDict)) and _is_swappable(value):
        copied = value.copy()
        for key, item in value.items():
            copied[key] = _copied(item, device)
        return copied
    if type(value) is deque:
        return deque((_copied(item, device) for item in value), value.maxlen)
    if type(value) in (list, tuple, set):
        return type(value)(_copied(item, device) for item in value)
    return value


class UntrackedModules:
    """Finds modules that change in a turn although they are neither in the model nor in the loss.

    An example is a loss with a running mean in a loop of the user's own. Its buffers are not swapped between logical
    workers, so its results would depend on which workers share a process. Hooks that torch calls for every module note
    the state of each untracked module before its first call of a turn; :meth:`end_turn` compares it with the state
    after the turn. Modules whose output needs no gradient, such as metrics, may change.

    Args:
        modules: the tracked ones, which are the model's and the loss's, by prefix.
        turns: how many turns to watch, from the first.
    """

    def __init__(self, modules: Mapping[str, Any], turns: int) -> None:
        """Note which modules are tracked; hooks are registered turn by turn. A compiled model is not watched."""
        roots = [module for module in modules.values() if isinstance(module, nn.Module)]
        self._tracked_ids = {id(part) for root in roots for part in root.modules()}
        # Code that torch.compile has made does not allow global module hooks.
        is_compiled = any(type(root).__name__ == "OptimizedModule" for root in roots)
        self._turns_left = 0 if is_compiled else turns
        self._states: dict[int, Any] = {}
        """By id of an untracked module that this turn has called: its state before the call."""
        self._trained: dict[int, nn.Module] = {}
        """Those of them whose output needs a gradient."""
        self._hooks: list[Any] = []

    def begin_turn(self) -> None:
        """Register the hooks for a logical worker's turn, if it is one of the first ``turns``."""
        self._turns_left -= 1
        if self._turns_left >= 0:
            before = register_module_forward_pre_hook(self._before_call)
            self._hooks = [before, register_module_forward_hook(self._after_call)]

    def end_turn(self) -> None:
        """Remove the hooks, and compare the untracked modules' states with those before the turn.

        Raises InputError for one that the turn has changed and whose output takes part in training; it names its type.
        """
        states = self._states
        trained = self._trained
        self.close()
        for key, module in trained.items():
            if _state_of(module) != states[key]:
                module_type = type(module).__name__
                problem = f"a {module_type} that it calls changes, and is neither in the model nor the loss_fn"
                raise InputError("the turn", problem, "give it as loss_fn, or make it a part of the model")

    def close(self) -> None:
        """Remove the hooks and forget the states of this turn, also of one that an error has ended early."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._states = {}
        self._trained = {}

    def _before_call(self, module: nn.Module, _: object) -> None:
        """Note the state of an untracked module before its first call of the turn: a pre-forward hook of all modules."""
        if id(module) not in self._tracked_ids:
            self._states.setdefault(id(module), _state_of(module))

    def _after_call(self, module: nn.Module, _: object, output: object) -> None:
        """Note an untracked module whose output needs a gradient, so takes part in training: a forward hook of all modules."""
        if id(module) in self._states and isinstance(output, Tensor) and output.requires_grad:
            self._trained[id(module)] = module


def _state_of(module: nn.Module) -> Any:
    """Return a value that stays equal as long as the module's own buffers and attributes do not change."""
    attributes = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    return _comparable(attributes), _comparable(dict(module._buffers))


class Contexts:
    """The random streams, buffers and attributes of each logical worker of this process; at most one worker is switched in.

    Between steps the process's own random streams are in place, and the model holds the buffers and attributes of the
    first local worker. On the process of virtual rank 0 these are virtual rank 0's, whose buffers plain DDP would keep.

    Args:
        modules: the modules of model and loss by prefix (:func:`modules_of`).
        local: the virtual ranks that this process runs, ascending.
        seed: the job's; each worker's streams follow from it and the virtual rank.
        device: the model's.

    Attributes:
        active: virtual rank of the worker that is switched in; None between turns.
        untracked: the watch over modules in neither model nor loss.
    """

    def __init__(self, modules: dict[str, Any], local: Sequence[int], seed: int, device: torch.device) -> None:
        """Seed each local worker's random streams, and set the model to the first local worker's buffers and attributes."""
        self._modules = modules
        self._states = WorkerState(modules, local)
        self.untracked = UntrackedModules(modules, 2 * len(local))  # the first two turns of each worker
        self._device = device
        self._local = local
        # By virtual rank, the worker's random streams between its turns.
        self._streams = {rank: RandomStreams.seeded(seed, rank, device) for rank in local}
        self._process_streams: RandomStreams | None = None  # the process's own, while a step is under way
        self.active: int | None = None
        self._install_first()

    def enter(self, virtual_rank: int) -> None:
        """Switch a logical worker in: put its random streams, buffers and attributes in place for its turn.

        No other worker may be switched in. The first turn of a step saves the process's own random streams.
        """
        if self._process_streams is None:
            self._process_streams = RandomStreams.present(self._device)
        self._states.enter(virtual_rank)
        self.untracked.begin_turn()
        self._streams[virtual_rank].restore(self._device)
        self.active = virtual_rank

    def leave(self, last: bool = True) -> None:
        """Switch the active logical worker out: keep its random streams, buffers and attributes until its next turn.

        After the ``last`` turn of a step also restore the process's own random streams. Without an active worker
        nothing happens. Raises InputError for an attribute that the turn has changed and that cannot be swapped
        (:class:`WorkerState`), and for an untracked module that it has changed.
        """
        if self.active is None:
            return
        self._streams[self.active] = RandomStreams.present(self._device)
        self.untracked.end_turn()
        self._states.leave(self.active)
        self.active = None
        if last and self._process_streams is not None:
            self._process_streams.restore(self._device)
            self._process_streams = None
            self._install_first()

    def _install_first(self) -> None:
        """Set the model to the buffers and attributes of the first local worker, which it holds between steps."""
        self._states.install(self._local[0])

    @contextmanager
    def on_copies(self) -> Iterator[None]:
        """Give the block copies of the first local worker's buffers and attributes; its changes to them are dropped."""
        self._states.install(self._local[0], copied=True)
        try:
            yield
        finally:
            self._install_first()

    def present(self) -> tuple[Document, dict[str, Tensor | None]]:
        """Return (the random streams that are in place now, the model's buffers by name); the loss's are left out."""
        buffers = {name: v for name, v in named_buffers(self._modules).items() if not name.startswith(LOSS)}
        return RandomStreams.present(self._device).to_document(), buffers

    def to_documents(self) -> list[Document]:
        """Return the local workers' contexts (random streams, buffers, attributes) for a checkpoint, in virtual-rank order.

        Buffers are not copied.
        """
        return [
            {"virtual_rank": rank, "streams": self._streams[rank].to_document(), **self._states.to_documents(rank)}
            for rank in self._local
        ]

    def load(self, documents: list[Document], where: str) -> None:
        """Replace the local workers' contexts by those in ``documents``, one per worker of the job in virtual-rank order.

        ``where``: the checkpoint, for messages. Raises InputError for documents that do not fit the model.
        """
        try:
            self._states.load(documents, self._device)
        except InputError as error:
            raise InputError(f"{where}:{error.where}", error.problem, error.remedy) from None
        self._streams = {rank: RandomStreams.from_document(documents[rank]["streams"]) for rank in self._local}
        self._install_first()
