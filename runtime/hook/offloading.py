"""Let modules save on the host what their backward passes need, copied beside compute. Start at :func:`offload_modules`.

``torch.autograd.graph.save_on_cpu`` copies within compute, parameters too, and a tensor as often as it is saved. Here pack and
unpack hooks (``torch.autograd.graph.saved_tensors_hooks``) collect the storages of a module's forward pass, each once. They
leave for pinned memory on a stream of their own when the pass has ended. Compute waits for them where the forward pass of a
later module ends, and only then is their memory given up, so no other kernel gets it too early. Before the backward pass of
that later module there is made room for what comes back, on a second stream. What is not back when it is used, is brought
then. On a CPU there are no streams: a copy is a copy.

Parameters, buffers, what a module is called with and what it returns stay. A checkpointed module (``torch.utils.checkpoint``)
saves nothing but what it is called with: of that, what needs a gradient leaves.
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

from ddltool.errors import InputError
from ddltool.plans import Offloaded


def offload_modules(model: nn.Module, plan: Sequence[Offloaded]) -> None:
    """Let each named module save on the host, from its forward pass to the backward pass of its ``until``.

    Only ``forward`` of the modules changes. Call it after :func:`~.sharding.checkpoint_modules`, and before ``fully_shard`` and
    ``DistributedDataParallel``. Raises InputError for a module that the model does not have; then none changes.
    """
    modules = dict(model.named_modules())
    names = list(dict.fromkeys(name for entry in plan for name in (entry.module, entry.until)))
    if missing := [name for name in names if name not in modules]:
        raise InputError("on_host", f"the model has no module {missing[0]!r}", "trace and plan this model")
    until, link = {entry.module: entry.until for entry in plan}, _Link()
    for name in names:
        module = modules[name]
        module.forward = functools.partial(_forward, module, module.forward, link, name, until.get(name))


def _forward(
    module: nn.Module, forward: Callable[..., Any], link: _Link, name: str, until: str | None, *args: Any, **kwargs: Any
) -> Any:
    """Run a module's ``forward``; begin its copies, and end those that are awaited here.

    ``until``: the module at whose end its own copies are awaited; None: it saves on the device.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    saved: _Saved | None = None
    hooks: AbstractContextManager[Any] = nullcontext()
    if until is not None:
        is_checkpointed = getattr(forward, "func", None) is checkpoint
        stays = [each for each in _tensors((args, kwargs)) if not (is_checkpointed and each.requires_grad)]
        saved = _Saved(link, _addresses(chain(module.parameters(), module.buffers(), stays)))
        hooks = saved_tensors_hooks(saved.pack, saved.unpack)
    with hooks:
        output = forward(*args, **kwargs)
    returned = _tensors(output)
    if saved is not None and until is not None:
        saved.leave(_addresses(returned))
        link.awaited[until].append(ref(saved))
    arrived = link.awaited.pop(name, [])
    for each in arrived:
        if (other := each()) is not None:
            other.give_up()
    for tensor in returned if arrived else ():
        if tensor.requires_grad:
            tensor.register_hook(functools.partial(_come_back, arrived))
    return output


def _come_back(arrived: Sequence[ref[_Saved]], _: Tensor) -> None:
    """Begin to bring back what is still needed, before the backward pass of the module that was awaited."""
    for each in arrived:
        if (saved := each()) is not None:
            saved.come_back()


class _Link:
    """The streams of a model's copies, and what is on its way to the host, by the module at whose end it is awaited.

    Only the graph of a forward pass holds what it saves: where it goes, the copies go.
    """

    def __init__(self) -> None:
        """Make no stream yet: the device is that of the first tensor."""
        self.awaited: defaultdict[str, list[ref[_Saved]]] = defaultdict(list)
        self._streams: dict[tuple[torch.device, bool], torch.Stream] = {}

    def beside(self, device: torch.device, out: bool) -> AbstractContextManager[Any]:
        """Return a context in which copies to (``out``) or from the host run beside compute, after what it does now."""
        if device.type == "cpu":
            return nullcontext()
        stream = self._streams.setdefault((device, out), torch.Stream(device))
        stream.wait_stream(torch.accelerator.current_stream(device))
        return stream

    def end(self, device: torch.device, out: bool) -> torch.Event | None:
        """Return the end of all copies that were begun; None on a CPU, where it is over."""
        return None if device.type == "cpu" else self._streams[device, out].record_event()

    def wait(self, device: torch.device, end: torch.Event | None) -> None:
        """Let what compute does next wait for the end of copies."""
        if end is not None:
            torch.accelerator.current_stream(device).wait_event(end)


class _Piece(NamedTuple):
    """What stands for a saved tensor: its storage, by address in ``saved``, and its place there."""

    saved: _Saved
    address: int
    dtype: torch.dtype
    offset: int | torch.SymInt
    size: torch.Size
    stride: tuple[int, ...]


class _Saved:
    """What one forward pass of a module saves, by the addresses of its storages, which are not used again while it has them."""

    def __init__(self, link: _Link, stays: set[int]) -> None:
        """Save nothing yet; the storages at ``stays`` are never taken."""
        self.link, self.stays, self.device = link, stays, torch.device("cpu")
        self.on_device: dict[int, UntypedStorage] = {}
        self.on_host: dict[int, Tensor] = {}  # as bytes
        self.uses = Counter[int]()  # pieces that have not been used yet
        self.out_end: torch.Event | None = None
        self.back_end: torch.Event | None = None

    def __del__(self) -> None:
        """Let compute wait for what was brought and is not used: another tensor may get its room next."""
        self.link.wait(self.device, self.back_end)

    def pack(self, tensor: Tensor) -> Tensor | _Piece:
        """Return what stands for a tensor that autograd saves; itself where it stays."""
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or (self.on_device and tensor.device != self.device):
            return tensor
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.stays or not storage.nbytes():
            return tensor
        self.device, self.on_device[address] = tensor.device, storage
        self.uses[address] += 1
        return _Piece(self, address, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def leave(self, stays: set[int]) -> None:
        """Begin to copy all storages but those at ``stays`` to the host, once what compute does now is done."""
        with self.link.beside(self.device, out=True):
            for address in self.on_device.keys() - stays:
                content = self._as_bytes(self.on_device[address])
                self.on_host[address] = _host_bytes(content.numel(), is_pinned=self.device.type != "cpu")
                self.on_host[address].copy_(content, non_blocking=True)
        self.out_end = self.link.end(self.device, out=True)

    def give_up(self) -> None:
        """Let compute wait for the copies to the host, and give up the storages on the device."""
        self.link.wait(self.device, self.out_end)
        for address in self.on_host:
            del self.on_device[address]

    def come_back(self, address: int | None = None) -> None:
        """Make room on the device for what is needed again (or one storage alone), and begin to copy it there.

        The room is compute's own: copies wait for what compute does now, and what held it before is used no more.
        """
        needed = [each for each in self.on_host if self.uses[each] > 0] if address is None else [address]
        room = {each: torch.empty_like(self.on_host[each], device=self.device, pin_memory=False) for each in needed}
        with self.link.beside(self.device, out=False):
            for each, content in room.items():
                content.copy_(self.on_host[each], non_blocking=True)
                self.on_device[each] = content.untyped_storage()
        self.back_end = self.link.end(self.device, out=False)

    def unpack(self, piece: Tensor | _Piece) -> Tensor:
        """Return the tensor that was saved, on its storage; the last use of what was on the host gives that up."""
        if isinstance(piece, Tensor):
            return piece
        if piece.address not in self.on_device:
            self.come_back(piece.address)
        self.link.wait(self.device, self.back_end)
        tensor = torch.empty(0, dtype=piece.dtype, device=self.device)
        tensor.set_(self.on_device[piece.address], piece.offset, piece.size, piece.stride)
        self.uses[piece.address] -= 1
        if self.uses[piece.address] <= 0 and piece.address in self.on_host:
            del self.on_device[piece.address]
        return tensor

    def _as_bytes(self, storage: UntypedStorage) -> Tensor:
        """Return a storage as a tensor of its bytes."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)


def _host_bytes(count: int, is_pinned: bool) -> Tensor:
    """Return room for so many bytes on the host."""
    return torch.empty(count, dtype=torch.uint8, pin_memory=is_pinned)


def _tensors(values: object) -> list[Tensor]:
    """Return the tensors in arguments or results."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of tensors' storages."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}
