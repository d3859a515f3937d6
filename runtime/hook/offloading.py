"""Let modules save on the host what their backward passes need, copied beside compute. Start at :func:`offload_modules`.

``torch.autograd.graph.save_on_cpu`` copies within compute, parameters too, and a tensor as often as it is saved. Here pack
and unpack hooks (``torch.autograd.graph.saved_tensors_hooks``) collect the storages that a module's forward pass saves, each
once. When the pass has ended, they are copied to pinned host memory on a stream of their own. At the end of a later module's
forward pass (``until`` in the plan) compute waits for the copies, and only then is the device's memory freed, so that no
other kernel gets it too early. Before the backward pass of that later module, room is made on the device and the copies back
begin, on a second stream. What is not back when it is used is copied then. A CPU has no streams: a copy blocks.

Parameters, buffers, a module's arguments and its results stay on the device. A checkpointed module
(``torch.utils.checkpoint``) saves its arguments only: those that need a gradient are copied.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ddltool.plans import Offloaded
from ddltool.runtime.hook.job import submodules


def offload_modules(model: nn.Module, plan: Sequence[Offloaded]) -> None:
    """Let each module in ``plan`` save on the host, from its forward pass to the backward pass of its ``until``.

    It replaces ``forward`` of these modules and of those that they name. Call it after
    :func:`~.sharding.checkpoint_modules` and after ``compile()`` of single modules, and before ``fully_shard`` and
    ``DistributedDataParallel``. Raises InputError for a module that the model does not have; then none changes.
    """
    names = dict.fromkeys(name for entry in plan for name in (entry.module, entry.until))
    modules = submodules(model, names, "on_host")
    until = {entry.module: entry.until for entry in plan}
    streams = _CopyStreams()
    for name, module in modules.items():
        module.forward = functools.partial(_forward, module, module.forward, streams, name, until.get(name))


@functools.partial(torch.compiler.disable, recursive=False)  # of a compiled module, only ``forward`` is compiled
def _forward(
    module: nn.Module,
    forward: Callable[..., Any],
    streams: _CopyStreams,
    name: str,
    until: str | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run ``forward`` of the module ``name`` and return its result; begin its copies, and end those that are awaited here.

    Without gradients nothing is saved, so ``forward`` just runs.

    Args:
        module: the module that is called.
        forward: its own forward function, which this one replaces.
        streams: the model's streams for copies, and the list of those under way.
        name: the module's name in the model.
        until: the name of the module at whose end this one's copies are awaited; None: this one saves on the device.
        args, kwargs: the call's arguments, for ``forward``.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    saved: _SavedStorages | None = None
    hooks: AbstractContextManager[Any] = nullcontext()
    if until is not None:
        is_checkpointed = getattr(forward, "func", None) is checkpoint  # by `checkpoint_modules`, a partial of it
        arguments = _tensors((args, kwargs))
        staying = [tensor for tensor in arguments if not (is_checkpointed and tensor.requires_grad)]
        saved = _SavedStorages(streams, _addresses(chain(module.parameters(), module.buffers(), staying)))
        hooks = saved_tensors_hooks(saved.pack, saved.unpack)
    with hooks:
        output = forward(*args, **kwargs)
    returned = _tensors(output)
    if saved is not None and until is not None:
        saved.copy_to_host(_addresses(returned))
        streams.awaited[until].append(ref(saved))
    awaited_here = streams.awaited.pop(name, [])
    for reference in awaited_here:
        if (earlier := reference()) is not None:
            earlier.free_device()
    if awaited_here:
        for tensor in returned:
            if tensor.requires_grad:  # its gradient comes first in this module's backward pass
                tensor.register_hook(functools.partial(_begin_copies_back, awaited_here))
    return output


def _begin_copies_back(awaited: Sequence[ref[_SavedStorages]], _: Tensor) -> None:
    """Begin to copy back what is still needed, where a module's backward pass begins: a hook of its results' gradients.

    ``awaited``: what was saved by the modules whose copies ended after this module's forward pass.
    """
    for reference in awaited:
        if (saved := reference()) is not None:
            saved.copy_back()


class _CopyStreams:
    """A model's streams for copies: one to the host and one back, for each device.

    Attributes:
        awaited: what is being copied to the host, by the name of the module at whose end it is awaited. The references are
            weak, so that storages live as long as the graph of their forward pass does.
    """

    def __init__(self) -> None:
        """Make no stream yet, because the device is known only with the first tensor."""
        self.awaited: defaultdict[str, list[ref[_SavedStorages]]] = defaultdict(list)
        self._streams: dict[tuple[torch.device, bool], torch.Stream] = {}  # by (device, whether to the host)

    def copying(self, device: torch.device, to_host: bool) -> AbstractContextManager[Any]:
        """Return a context whose copies, to the host or back, run beside compute, after what compute has queued so far."""
        if device.type == "cpu":
            return nullcontext()
        stream = self._streams.setdefault((device, to_host), torch.Stream(device))
        stream.wait_stream(torch.accelerator.current_stream(device))
        return stream

    def end_of_copies(self, device: torch.device, to_host: bool) -> torch.Event | None:
        """Return an event at the end of all copies begun so far in this direction; None on a CPU, where they are over."""
        return None if device.type == "cpu" else self._streams[device, to_host].record_event()

    def hold_compute(self, device: torch.device, end: torch.Event | None) -> None:
        """Make the device's compute stream wait for the event ``end`` (None: nothing); the host does not wait."""
        if end is not None:
            torch.accelerator.current_stream(device).wait_event(end)


class _Piece(NamedTuple):
    """What autograd keeps in place of a saved tensor: its storage, by ``address`` in ``saved``, and its layout there."""

    saved: _SavedStorages
    address: int
    dtype: torch.dtype
    offset: int | torch.SymInt
    """Index of its first element in the storage."""
    size: torch.Size
    stride: tuple[int, ...]


class _SavedStorages:
    """The storages that one forward pass of a module saves, by address; no address is used again while they are held.

    Attributes:
        device: of the storages; set by the first one.
        on_device: the storages that are there now.
        on_host: copies of those that are not kept on the device, as bytes (uint8).
        uses: by address, the number of saved tensors in it that the backward pass has not used yet.
        out_end, back_end: the ends of the copies to the host and back; None: not begun, or on a CPU.
    """

    def __init__(self, streams: _CopyStreams, staying: set[int]) -> None:
        """Save nothing yet; the storages at the addresses ``staying`` are never taken."""
        self.streams = streams
        self.staying = staying
        self.device = torch.device("cpu")
        self.on_device: dict[int, UntypedStorage] = {}
        self.on_host: dict[int, Tensor] = {}
        self.uses = Counter[int]()
        self.out_end: torch.Event | None = None
        self.back_end: torch.Event | None = None

    def __del__(self) -> None:
        """Let compute wait for copies that came back and were not used: another tensor may get their memory next."""
        self.streams.hold_compute(self.device, self.back_end)

    def pack(self, tensor: Tensor) -> Tensor | _Piece:
        """Return what autograd keeps in place of a tensor that it saves: a piece, or the tensor itself if that stays.

        Besides those at ``staying``, subclasses, sparse and empty tensors stay, and those on another device than the first.
        """
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or (self.on_device and tensor.device != self.device):
            return tensor
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.staying or not storage.nbytes():
            return tensor
        self.device = tensor.device
        self.on_device[address] = storage
        self.uses[address] += 1
        return _Piece(self, address, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def copy_to_host(self, staying: set[int]) -> None:
        """Begin to copy all storages but those at ``staying`` to the host, after what compute has queued so far."""
        with self.streams.copying(self.device, to_host=True):
            for address in self.on_device.keys() - staying:
                content = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.on_device[address])
                self.on_host[address] = _host_bytes(content.numel(), is_pinned=self.device.type != "cpu")
                self.on_host[address].copy_(content, non_blocking=True)
        self.out_end = self.streams.end_of_copies(self.device, to_host=True)

    def free_device(self) -> None:
        """Let compute wait for the copies to the host, and free the storages on the device."""
        self.streams.hold_compute(self.device, self.out_end)
        for address in self.on_host:
            del self.on_device[address]

    def copy_back(self, address: int | None = None) -> None:
        """Allocate memory on the device for what is needed again, and begin to copy it there from the host.

        The memory is allocated on compute's stream, and copies begin after what compute has queued so far: that may still
        use the same memory for what it held before. ``address``: the storage that is copied; None: all that the backward
        pass has not used yet.
        """
        needed = [held for held in self.on_host if self.uses[held] > 0] if address is None else [address]
        room = {held: torch.empty_like(self.on_host[held], device=self.device, pin_memory=False) for held in needed}
        with self.streams.copying(self.device, to_host=False):
            for held, content in room.items():
                content.copy_(self.on_host[held], non_blocking=True)
                self.on_device[held] = content.untyped_storage()
        self.back_end = self.streams.end_of_copies(self.device, to_host=False)

    def unpack(self, piece: Tensor | _Piece) -> Tensor:
        """Return the tensor that :meth:`pack` was given; the last use of a storage that is on the host frees the device's."""
        if isinstance(piece, Tensor):
            return piece
        if piece.address not in self.on_device:
            self.copy_back(piece.address)
        self.streams.hold_compute(self.device, self.back_end)
        tensor = torch.empty(0, dtype=piece.dtype, device=self.device)
        tensor.set_(self.on_device[piece.address], piece.offset, piece.size, piece.stride)
        self.uses[piece.address] -= 1
        # Below 0 in a second backward pass through one graph (retain_graph), which copies back at each use.
        if self.uses[piece.address] <= 0 and piece.address in self.on_host:
            del self.on_device[piece.address]
        return tensor


def _host_bytes(count: int, is_pinned: bool) -> Tensor:
    """Return ``count`` bytes (uint8) of host memory; pinned memory is what a GPU copies to and from by itself."""
    return torch.empty(count, dtype=torch.uint8, pin_memory=is_pinned)


def _tensors(values: object) -> list[Tensor]:
    """Return the tensors in nested arguments or results."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of tensors' storages."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}
