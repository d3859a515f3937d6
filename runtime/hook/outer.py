"""Islands that train by themselves and meet every H steps: Local SGD, DiLoCo, Streaming DiLoCo. Start at :class:`OuterSteps`.

Of each fragment p of the parameters every island holds the outer parameters O_p, alike on all, beside its own theta_p. After
the inner step t with ``t mod H = (p + 1) H / P`` (rounded down; 0 is H) it sends ``D = O_p - theta_p``; ``overlap`` inner steps
later, at once where that is 0, the average of all islands' D is a gradient of O_p, and theta_p is mixed with the result::

    M_p <- momentum M_p + D;  O_p <- O_p - learning_rate (D + momentum M_p);  theta_p <- alpha theta_p + (1 - alpha) O_p

(arXiv 2311.08105, Algorithm 1; 2501.18512, Algorithm 2, whose P fragments of one round begin and end together here.) A thread
sends the fragments, one after the other in the same order on all islands.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddltool.artifacts import load
from ddltool.errors import InputError
from ddltool.island_results import IslandsPlan
from ddltool.runtime.hook.rounding import averaged
from ddltool.runtime.processes.liveness import LostRank

Group = Any
"""A process group: one of ``torch.distributed.new_group``, or of :func:`island_group`."""
Outer = tuple[float, float]
"""Learning rate and Nesterov momentum of the outer optimizer."""
DILOCO: Outer = (0.7, 0.9)
"""As DiLoCo's authors found best (arXiv 2311.08105, Section 3.1)."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A fragment that is on its way, and after which inner step its average is applied."""

    fragment: int
    due: int
    average: Future[Tensor]


class OuterSteps:
    """The outer steps of this process; :meth:`~ddltool.runtime.hook.attaching.Hook.outer` makes it. The loop stays as it is.

    All ranks of an island hold the same parameters, or the shards of FSDP2. ``group`` has the ranks that average: one rank of
    each island, which hands the average on over ``inside``, the island's own group; or without ``inside`` every rank with those
    of its place in the other islands (with FSDP2 a shard's). Buffers, such as BatchNorm's, are each island's own.
    A check against one process (``ddltool doctor --check``) is for the script without outer steps.

    Attributes: ``steps``, inner steps made; ``rounds``, outer steps of all fragments; ``outer``, the outer parameters, flat,
    by fragment.

    Args:
        model: whose trainable parameters are averaged.
        inner: the optimizer whose steps count.
        every: H, inner steps of this island between two outer steps; islands of unequal speed may differ.
        optimizer: learning rate and Nesterov momentum; (1, 0) is Local SGD, plain averages.
        fragments: P, parts of neighbouring parameters of about one size, each sent at its own step.
        overlap: tau, inner steps that go on while a fragment travels; below ``every``.
        mixing: alpha, the share of its own parameters that an island keeps.
        bits: of an exchanged number: 32 sends the parameters' own type; 16, 8, 4 round (:mod:`.rounding`).
        weight: of this island in the average, such as its samples; relative to the others'.
        group: None: every rank of the job is an island.
        inside: the group of this island's ranks, whose first is in ``group``; None: each rank averages by itself.

    Raises InputError for a setting that cannot be followed.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        *,
        every: int,
        optimizer: Outer = DILOCO,
        fragments: int = 1,
        overlap: int = 0,
        mixing: float = 0.0,
        bits: int = 32,
        weight: float = 1.0,
        group: Group | None = None,
        inside: Group | None = None,
    ) -> None:
        trained = [value for value in model.parameters() if value.requires_grad]
        _check(every, optimizer, fragments, overlap, mixing, bits, weight, len(trained))
        self.every, self.optimizer, self.overlap, self.mixing, self.bits = every, optimizer, overlap, mixing, bits
        self.weight, self.steps = weight, 0
        self._inside = inside
        self._group = group if group is not None or not dist.is_initialized() else dist.new_group(backend="gloo")
        self._fragments = _cut(trained, fragments)
        self.outer = [_flat(part) for part in self._fragments]
        self.momentum = [torch.zeros_like(part) for part in self.outer]
        self._sent: deque[_Sent] = deque()
        self._sender = _Sender()
        self._watch = inner.register_step_post_hook(lambda *_: self._after_update())

    @classmethod
    def settings_of(cls, path: str, island: int) -> dict[str, Any]:
        """Return the settings of an island, from 0 on, in a file that ``ddltool plan -o`` wrote of islands."""
        plan = load(path, IslandsPlan)
        if not 0 <= island < len(plan.islands):
            raise InputError("island", f"is {island}", f"{path} has 0 to {len(plan.islands) - 1}")
        outer = plan.outer
        return {
            "every": outer.every[island],
            "optimizer": (outer.learning_rate, outer.momentum),
            "fragments": outer.fragments,
            "overlap": outer.overlap,
            "mixing": outer.mixing,
            "bits": outer.bits,
        }

    @property
    def rounds(self) -> int:
        """Return how many times all fragments were sent."""
        return self.steps // self.every

    def _after_update(self) -> None:
        """Send and apply what is due after an inner step."""
        step = self.steps % self.every + 1  # in this round, from 1 on
        self.steps += 1
        for fragment in range(len(self._fragments)):
            if step == (fragment + 1) * self.every // len(self._fragments):
                self._send(fragment)
        while self._sent and self._sent[0].due <= self.steps:
            self._receive()

    @torch.no_grad()
    def _send(self, fragment: int) -> None:
        difference = self.outer[fragment] - _flat(self._fragments[fragment])
        group, bits, weight = self._group, self.bits, self.weight
        takes_part = _is_in(group)
        average = (
            self._sender.submit(lambda: averaged(difference, group, bits, weight)) if takes_part else _done(difference)
        )
        self._sent.append(_Sent(fragment, self.steps + self.overlap, average))

    @torch.no_grad()
    def _receive(self) -> None:
        """Take an outer step with the average that was sent first. Raises LostRank where it did not come about."""
        sent = self._sent.popleft()
        error = sent.average.exception()
        is_here = torch.tensor([error is None], dtype=torch.float32)
        if self._inside is not None:
            _hand_on(is_here, self._inside)
        if not is_here:
            text = "an island is gone; give a group of those left to outer.regroup"
            raise LostRank(f"{text} ({str(error or 'said by the first rank').splitlines()[0]})") from error
        average = sent.average.result()
        if self._inside is not None:
            _hand_on(average, self._inside)
        rate, momentum = self.optimizer
        outer, kept = self.outer[sent.fragment], self.momentum[sent.fragment]
        kept.mul_(momentum).add_(average)
        outer.sub_(average.add(kept, alpha=momentum), alpha=rate)
        _mix(self._fragments[sent.fragment], outer, self.mixing)

    @torch.no_grad()
    def regroup(self, group: Group, *, weight: float | None = None) -> None:
        """Go on with the ranks of ``group``: islands have joined or left. All of its ranks call it, between two inner steps.

        The first rank of the group must have trained before: the outer parameters, momentum and inner steps are its own, also
        for those who join, which begin at the outer parameters. What was under way is applied at once; what was lost with an
        island is not, and goes with the fragment's next difference.
        """
        while self._sent:
            try:
                self._receive()
            except LostRank:
                continue
        self._group, self.weight = group, self.weight if weight is None else weight
        steps = torch.tensor([self.steps, self.every], dtype=torch.int64)
        for one in (group, self._inside):
            if _is_in(one):
                for value in (steps, *self.outer, *self.momentum):
                    _hand_on(value, one)
        made, every = steps.tolist()
        if self.rounds != made // every or not self.steps:
            self.steps = made * self.every // every
            for part, outer in zip(self._fragments, self.outer, strict=True):
                _mix(part, outer, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return what resumes the outer steps, tensors of this rank; waits for what is on its way."""
        return {
            "steps": self.steps,
            "outer": [part.clone() for part in self.outer],
            "momentum": [part.clone() for part in self.momentum],
            "sent": [(sent.fragment, sent.due, sent.average.result().clone()) for sent in self._sent],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`. Raises InputError for the state of other parameters or fragments."""
        try:
            outer, momentum, sent = list(state["outer"]), list(state["momentum"]), list(state["sent"])
            steps = int(state["steps"])
        except (KeyError, TypeError, ValueError):
            raise InputError("outer state", "is none", "give what state_dict returned") from None
        if [part.shape for part in outer] != [part.shape for part in self.outer]:
            problem = f"has {len(outer)} fragments of other sizes than these {len(self.outer)}"
            raise InputError("outer state", problem, "resume with the model and the fragments of the run before")
        for mine, theirs in zip((*self.outer, *self.momentum), (*outer, *momentum), strict=True):
            mine.copy_(theirs)
        self.steps = steps
        self._sent = deque(_Sent(int(part), int(due), _done(average.to(self.outer[0]))) for part, due, average in sent)

    def close(self) -> None:
        """Count no more steps; waits for what is on its way, which is not applied. Idempotent."""
        self._watch.remove()
        self._sender.close()


class _Sender:
    """A thread that does what it is given, one after the other; at exit it is waited for, as other islands wait for it."""

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[tuple[Future[Tensor], Callable[[], Tensor]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ddltool-outer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, work: Callable[[], Tensor]) -> Future[Tensor]:
        """Return the result that ``work`` will have."""
        future: Future[Tensor] = Future()
        self._given.put((future, work))
        return future

    def close(self) -> None:
        """End the thread after what it was given. Idempotent."""
        atexit.unregister(self.close)
        self._given.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            future, work = given
            try:
                future.set_result(work())
            except Exception as error:  # it is raised where the result is asked for
                future.set_exception(error)
            # A group whose last reference is this thread's would end the process when it goes away at exit.
            del given, future, work


def island_group(address: str, island: int, islands: int, *, meeting: int = 0, timeout_s: float = 300.0) -> Group:
    """Return a gloo group of islands that are jobs of their own, for :meth:`OuterSteps.regroup` and ``hook.outer``.

    One rank of each island calls it. Nothing is authenticated: use a network of your own.

    Args:
        address: ``host:port`` of island 0, which listens there at its first call.
        island, islands: this island's place, from 0 on, and how many there are now.
        meeting: a number that grows with every change of islands.
        timeout_s: how long one waits for the others.

    Raises InputError for another address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= island < islands:
        problem = f"{address!r}, {island} of {islands}" if port.isdecimal() else f"is {address!r}"
        raise InputError("address", problem, "give host:port, and islands from 0 on")
    within = timedelta(seconds=timeout_s)
    if (host, port) not in _stores:
        _stores[host, port] = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it all the same
            host, int(port), None, island == 0, within, wait_for_workers=False
        )
    store = dist.PrefixStore(f"ddltool/islands/{meeting}", _stores[host, port])  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, island, islands, within)


_stores: dict[tuple[str, str], Any] = {}


def _check(
    every: int,
    optimizer: Outer,
    fragments: int,
    overlap: int,
    mixing: float,
    bits: int,
    weight: float,
    parameters: int,
) -> None:
    """Raise InputError for the first setting that cannot be followed."""
    if every < 1:
        raise InputError("every", f"is {every}", "give the inner steps between outer steps, 1 or more")
    if not parameters:
        raise InputError(
            "model", "has no parameters that are trained", "give hook.outer the model that the optimizer trains"
        )
    if not 1 <= fragments <= min(parameters, every):
        remedy = f"give 1 to {min(parameters, every)}: a fragment has a parameter, and a step of its own"
        raise InputError("fragments", f"are {fragments}, of {parameters} parameters in {every} steps", remedy)
    if not 0 <= overlap < every:
        raise InputError("overlap", f"is {overlap} of {every} inner steps", f"give 0 to {every - 1}")
    if not (len(optimizer) == 2 and optimizer[0] > 0 and 0 <= optimizer[1] < 1):
        raise InputError(
            "optimizer", f"is {optimizer}", "give a learning rate above 0 and a momentum of 0 to 1: (0.7, 0.9)"
        )
    if not 0 <= mixing < 1:
        raise InputError("mixing", f"is {mixing}", "give 0 (the outer parameters) to less than 1 (an island's own)")
    if bits not in (4, 8, 16, 32):
        raise InputError("bits", f"is {bits}", "give 4, 8, 16 or 32")
    if not weight > 0:
        raise InputError("weight", f"is {weight}", "give a number above 0, such as the island's samples")


def _cut(values: Sequence[nn.Parameter], fragments: int) -> list[list[nn.Parameter]]:
    """Return the parameters in so many runs of neighbours of about one size, none empty."""
    total, parts, taken = sum(value.numel() for value in values), list[list[nn.Parameter]](), 0
    for place, value in enumerate(values):
        left = len(values) - place
        is_full = taken >= total * len(parts) / fragments
        if not parts or (len(parts) < fragments and (is_full or left <= fragments - len(parts))):
            parts.append([])
        parts[-1].append(value)
        taken += value.numel()
    return parts


def _here(values: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return what this rank holds of the parameters: themselves, or FSDP2's shards."""
    held: list[Any] = [value.detach() for value in values]
    return [value.to_local() if hasattr(value, "to_local") else value for value in held]


def _flat(values: Iterable[nn.Parameter]) -> Tensor:
    """Return a copy of the parameters, one behind the other."""
    return torch.cat([value.reshape(-1) for value in _here(values)]).clone()


def _mix(values: Iterable[nn.Parameter], outer: Tensor, mixing: float) -> None:
    """Set parameters to ``mixing`` of their own and the rest of the flat outer ones."""
    start = 0
    for value in _here(values):
        part = outer[start : start + value.numel()].view_as(value)
        start += value.numel()
        if mixing:
            value.mul_(mixing).add_(part, alpha=1 - mixing)
        else:
            value.copy_(part)


def _done(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future


def _is_in(group: Group | None) -> bool:
    """Return whether this rank is one of a group's."""
    return group is not None and group != dist.GroupMember.NON_GROUP_MEMBER


def _hand_on(value: Tensor, group: Group) -> None:
    """Give all ranks of a group, registered or not, the value of its first."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([value], options).wait()
