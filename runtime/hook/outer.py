"""Averages islands of workers, which train on their own between averages: Local SGD, DiLoCo, Streaming DiLoCo.

Start at :class:`OuterSteps`. The trained parameters are cut into P fragments. Besides its own parameters theta_p of a
fragment p, every island holds the *outer* parameters O_p, which are the same on all islands. A round has H inner steps.
An island sends ``D = O_p - theta_p`` after step ``(p + 1) H / P`` (rounded down, p from 0) of each round, and applies the
average of all islands' D after ``overlap`` more inner steps: it serves as a gradient of O_p, with which theta_p is mixed
(alpha is ``mixing``)::

    M_p <- momentum M_p + D;  O_p <- O_p - learning_rate (D + momentum M_p);  theta_p <- alpha theta_p + (1 - alpha) O_p

Sources: DiLoCo (arXiv 2311.08105, Algorithm 1) and Streaming DiLoCo (arXiv 2501.18512, Algorithm 2; here all fragments
have the same rounds). A thread sends the fragments one after the other, in the same order on all islands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
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
"""The values that DiLoCo's authors found best (arXiv 2311.08105, Section 3.1)."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A fragment's difference that is being averaged with the other islands'."""

    fragment: int
    """Index of the fragment."""
    due: int
    """Number of inner steps in all after which the average is applied."""
    average: Future[Tensor]


class OuterSteps:
    """The outer steps of this process; :meth:`~ddltool.runtime.hook.attaching.Hook.outer` makes them.

    The training loop stays as it is. All ranks of an island hold the same parameters, or shards of them under FSDP2.
    There are two ways to average. With ``inside``, ``group`` has one rank of each island, which broadcasts the average
    to its island over ``inside``. Without ``inside``, every rank averages with the ranks at the same place in the other
    islands (under FSDP2: with the same shard). Buffers, such as BatchNorm's statistics, are not averaged. ``ddltool
    doctor --check`` can check a script only without outer steps.

    Attributes:
        steps: number of inner steps made so far.
        outer: the outer parameters, one flat tensor for each fragment.
        momentum: the outer optimizer's momentum, in the same shapes.

    Args:
        model: the module whose trainable parameters are averaged.
        inner: the optimizer whose steps count as inner steps.
        every: H, the number of inner steps of this island in a round; islands of unequal speed may differ in it.
        optimizer: (learning rate, Nesterov momentum) of the outer steps; (1, 0) is Local SGD's plain average.
        fragments: P, the number of parts of neighbouring parameters, of about equal size, each sent at its own step.
        overlap: number of inner steps made while a fragment is averaged; fewer than ``every``. 0: the update waits.
        mixing: alpha, the share of its own parameters that an island keeps, from 0 to below 1.
        bits: of each number that is sent: 32 means the parameters' own type; 16, 8 and 4 round (:mod:`.rounding`).
        weight: weight of this island in the average, such as its number of samples.
        group: the process group that averages; None: every rank of the job is an island, and a gloo group is made.
        inside: the process group of this island, whose first rank is in ``group``; None: each rank averages by itself.

    Raises InputError for a setting out of its range.
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
        self.every = every
        self.optimizer = optimizer
        self.overlap = overlap
        self.mixing = mixing
        self.bits = bits
        self.weight = weight
        self._check(fragments, len(trained))
        self.steps = 0
        self._inside = inside
        self._group = group if group is not None or not dist.is_initialized() else dist.new_group(backend="gloo")
        self._fragments = _cut_fragments(trained, fragments)
        self.outer = [_flat(part) for part in self._fragments]
        self.momentum = [torch.zeros_like(part) for part in self.outer]
        self._sent: deque[_Sent] = deque()
        # A single thread, so that all islands exchange fragments in the same order; at exit Python waits for its work.
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ddltool-outer")
        self._hook = inner.register_step_post_hook(lambda *_: self._after_update())

    @classmethod
    def settings_of(cls, path: str, island: int) -> dict[str, Any]:
        """Return the keyword arguments of :class:`OuterSteps` for island number ``island``, from 0, of the plan in ``path``.

        ``ddltool plan -o`` writes such a file. Raises InputError for an island that the plan does not have.
        """
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

    def _check(self, fragments: int, parameters: int) -> None:
        """Raise InputError for the first setting that is out of its range.

        ``fragments``: their number; ``parameters``: how many are trained, because each fragment needs at least one.
        """
        every = self.every
        if every < 1:
            raise InputError("every", f"is {every}", "give the inner steps between outer steps, 1 or more")
        if not parameters:
            remedy = "give hook.outer the model that the optimizer trains"
            raise InputError("model", "has no parameters that are trained", remedy)
        if not 1 <= fragments <= min(parameters, every):
            remedy = f"give 1 to {min(parameters, every)}: a fragment has a parameter, and a step of its own"
            raise InputError("fragments", f"are {fragments}, of {parameters} parameters in {every} steps", remedy)
        if not 0 <= self.overlap < every:
            raise InputError("overlap", f"is {self.overlap} of {every} inner steps", f"give 0 to {every - 1}")
        if not (len(self.optimizer) == 2 and self.optimizer[0] > 0 and 0 <= self.optimizer[1] < 1):
            remedy = "give a learning rate above 0 and a momentum of 0 to 1: (0.7, 0.9)"
            raise InputError("optimizer", f"is {self.optimizer}", remedy)
        if not 0 <= self.mixing < 1:
            remedy = "give 0 (the outer parameters) to less than 1 (an island's own)"
            raise InputError("mixing", f"is {self.mixing}", remedy)
        if self.bits not in (4, 8, 16, 32):
            raise InputError("bits", f"is {self.bits}", "give 4, 8, 16 or 32")
        if not self.weight > 0:
            raise InputError("weight", f"is {self.weight}", "give a number above 0, such as the island's samples")

    @property
    def rounds(self) -> int:
        """Number of rounds completed: how often all fragments have been sent."""
        return self.steps // self.every

    def _after_update(self) -> None:
        """Count an inner step, then send the fragments and apply the averages that are due: the optimizer's post-step hook.

        It blocks for an average that is due and has not come yet.
        """
        step = self.steps % self.every + 1  # in this round, from 1 on
        self.steps += 1
        fragment_count = len(self._fragments)
        for fragment in range(fragment_count):
            # The fragments' sends are spread evenly over the round's steps.
            if step == (fragment + 1) * self.every // fragment_count:
                self._send(fragment)
        while self._sent and self._sent[0].due <= self.steps:
            self._receive()

    @torch.no_grad()
    def _send(self, fragment: int) -> None:
        """Start to average fragment number ``fragment``'s difference between outer and own parameters over the islands.

        A rank outside of the group keeps a place for it in the queue; it will get the average from its island.
        """
        difference = self.outer[fragment] - _flat(self._fragments[fragment])
        work = partial(averaged, difference, self._group, self.bits, self.weight)
        average = self._sender.submit(work) if _is_member(self._group) else _completed(difference)
        self._sent.append(_Sent(fragment, self.steps + self.overlap, average))

    @torch.no_grad()
    def _receive(self) -> None:
        """Block for the average of the oldest fragment sent, and make its outer step.

        Raises LostRank, on all ranks of the island, if averaging has failed, because an island is gone.
        """
        sent = self._sent.popleft()
        error = sent.average.exception()
        has_average = torch.tensor([error is None], dtype=torch.float32)
        if self._inside is not None:
            # With `inside`, the first rank alone averages: others hold a placeholder, and do not know whether it failed.
            _broadcast_from_first(has_average, self._inside)
        if not has_average:
            text = "an island is gone; give a group of those left to outer.regroup"
            raise LostRank(f"{text} ({str(error or 'said by the first rank').splitlines()[0]})") from error
        average = sent.average.result()
        if self._inside is not None:
            _broadcast_from_first(average, self._inside)
        rate, momentum = self.optimizer
        # M <- momentum M + D;  O <- O - rate (D + momentum M), with D = average, M = momentum_buffer and O = outer.
        outer = self.outer[sent.fragment]
        momentum_buffer = self.momentum[sent.fragment]
        momentum_buffer.mul_(momentum).add_(average)
        outer.sub_(average.add(momentum_buffer, alpha=momentum), alpha=rate)
        _mix(self._fragments[sent.fragment], outer, self.mixing)

    @torch.no_grad()
    def regroup(self, group: Group, *, weight: float | None = None) -> None:
        """Continue with the ranks of ``group``, after islands have joined or left.

        All of its ranks, and those of their islands, call this between two inner steps. The first rank of the group must
        have trained before: all others, also new ones, get its outer parameters, momentum and number of rounds. Averages
        under way are applied first; one that failed is dropped, but its difference is part of the fragment's next one.
        ``weight``: this island's from now on; None: as before.
        """
        while self._sent:
            try:
                self._receive()
            except LostRank:
                continue
        self._group = group
        self.weight = self.weight if weight is None else weight
        steps = torch.tensor([self.steps, self.every], dtype=torch.int64)
        for member_group in (group, self._inside):
            if _is_member(member_group):
                for value in (steps, *self.outer, *self.momentum):
                    _broadcast_from_first(value, member_group)
        first_steps, first_every = steps.tolist()  # the first rank's, which all have received
        # Islands differ in `every`, so rounds are compared, and the first rank's steps are scaled to this island's round.
        # An island in another round, or a new one, starts from the outer parameters; one in the same round keeps its own.
        if self.rounds != first_steps // first_every or not self.steps:
            self.steps = first_steps * self.every // first_every
            for part, outer in zip(self._fragments, self.outer, strict=True):
                _mix(part, outer, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` resumes from, with this rank's tensors; blocks for averages under way.

        "sent" has (fragment, number of inner steps after which it is due, average) of each average not applied yet.
        """
        return {
            "steps": self.steps,
            "outer": [part.clone() for part in self.outer],
            "momentum": [part.clone() for part in self.momentum],
            "sent": [(sent.fragment, sent.due, sent.average.result().clone()) for sent in self._sent],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of :meth:`state_dict`. Raises InputError for one of other parameters or fragments."""
        try:
            outer = list(state["outer"])
            momentum = list(state["momentum"])
            sent = list(state["sent"])
            steps = int(state["steps"])
        except (KeyError, TypeError, ValueError):
            raise InputError("outer state", "is none", "give what state_dict returned") from None
        if [part.shape for part in outer] != [part.shape for part in self.outer]:
            problem = f"has {len(outer)} fragments of other sizes than these {len(self.outer)}"
            raise InputError("outer state", problem, "resume with the model and the fragments of the run before")
        for own, saved in zip((*self.outer, *self.momentum), (*outer, *momentum), strict=True):
            own.copy_(saved)
        self.steps = steps
        self._sent = deque(
            _Sent(int(part), int(due), _completed(average.to(self.outer[0]))) for part, due, average in sent
        )

    def close(self) -> None:
        """Remove the hook that counts steps; blocks for averages under way, which are not applied. More calls do nothing."""
        self._hook.remove()
        self._sender.shutdown()


def island_group(address: str, island: int, islands: int, *, meeting: int = 0, timeout_s: float = 300.0) -> Group:
    """Return a gloo process group of islands that are separate jobs, for ``hook.outer`` and :meth:`OuterSteps.regroup`.

    One rank of each island calls this; it blocks until all have. Nothing is authenticated, so the network must be the
    user's own.

    Args:
        address: ``host:port`` of island 0, which listens there from its first call on.
        island, islands: this island's number, from 0, and how many islands there are now.
        meeting: a number that is raised with every change of islands, the same on all.
        timeout_s: seconds that an island waits for the others.

    Raises InputError for a malformed address or an island number out of range.
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
"""By (host, port): the store there, kept because later groups meet at it and island 0's process serves it."""


def _cut_fragments(parameters: Sequence[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """Return the parameters, in their order, divided into ``count`` non-empty fragments of about equally many elements.

    There must be at least ``count`` parameters.
    """
    total_elements = sum(parameter.numel() for parameter in parameters)
    fragments = list[list[nn.Parameter]]()
    elements_taken = 0
    for index, parameter in enumerate(parameters):
        parameters_left = len(parameters) - index
        # The fragments so far have their share of the elements.
        is_full = elements_taken >= total_elements * len(fragments) / count
        # Each fragment to come needs one of the parameters that are left.
        is_needed = parameters_left <= count - len(fragments)
        if not fragments or (len(fragments) < count and (is_full or is_needed)):
            fragments.append([])
        fragments[-1].append(parameter)
        elements_taken += parameter.numel()
    return fragments


def _local_parts(values: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the tensors of the parameters that this rank holds: whole ones, or FSDP2's local shards; not copies."""
    held: list[Any] = [value.detach() for value in values]
    return [value.to_local() if hasattr(value, "to_local") else value for value in held]


def _flat(values: Iterable[nn.Parameter]) -> Tensor:
    """Return a copy of all elements of the parameters that this rank holds, as one tensor (n,)."""
    return torch.cat([value.reshape(-1) for value in _local_parts(values)]).clone()


def _mix(values: Iterable[nn.Parameter], outer: Tensor, mixing: float) -> None:
    """Set each parameter to ``mixing`` times its own value plus ``1 - mixing`` times its part of ``outer``.

    ``outer`` has shape (n,), with the parameters one after the other as :func:`_flat` returns them.
    """
    start = 0
    for value in _local_parts(values):
        part = outer[start : start + value.numel()].view_as(value)
        start += value.numel()
        if mixing:
            value.mul_(mixing).add_(part, alpha=1 - mixing)
        else:
            value.copy_(part)


def _completed(value: Tensor) -> Future[Tensor]:
    """Return a completed future with the result ``value``."""
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future


def _is_member(group: Group | None) -> bool:
    """Return whether this rank is a member of ``group``; False for None."""
    return group is not None and group != dist.GroupMember.NON_GROUP_MEMBER


def _broadcast_from_first(tensor: Tensor, group: Group) -> None:
    """Overwrite ``tensor`` on all ranks of ``group`` with its first rank's; all of them call this together.

    The group need not be registered with torch.distributed.
    """
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    group.broadcast([tensor], options).wait()
