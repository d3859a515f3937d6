"""The plan of ordered transfers between workers and parameter servers. Start at :class:`TransferPlan`.

Ranks 0 to W-1 are workers, ranks W to W+P-1 parameter servers. In a step a worker pulls every parameter and pushes
every gradient; each worker-server pair has one channel per direction, and a channel carries one transfer at a time. The
order is enforced at the sender, as in TicTac (section 5.1): priorities become numbers 0 to n-1 within a channel, the
server holds a queue per worker and iteration, and transfer k goes to the transport only after k others.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from torch import nn

from ddltool.errors import DdlToolError, InputError, listed, one_line
from ddltool.graph import natural_key, spread
from ddltool.runtime.hook.job import Config, loaded


class TransferError(DdlToolError):
    """A transfer did not happen; the message says which process waited, and for what."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One parameter as it is transferred; both ends must agree on every field."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    server: int


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """The server of each parameter, and the order in which each server sends its parameters to each worker.

    Without ``priority`` and ``random_seed`` every channel keeps the order of registration.
    """

    slots: tuple[Slot, ...]
    """The parameters that are transferred, in the order of registration; messages name them by their index here."""
    workers: int
    servers: int
    priority: tuple[int, ...] | None = None
    """Per parameter a number, lowest first; equal ones keep the order of registration, so each channel's order is total."""
    random_seed: int | None = None
    """With a seed, each pull of each worker has a random order of its own, which is TicTac's baseline."""
    late: int = 0
    """Number of workers that may join while the job runs."""

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        *,
        workers: int,
        servers: int,
        priority: Mapping[str, int] | None = None,
        random_seed: int | None = None,
        late: int = 0,
    ) -> TransferPlan:
        """Return the plan for ``model``, whose parameters are spread over the servers by bytes.

        Parameters without elements are not transferred, and have no priority.

        Args:
            model: the model that all workers train.
            workers, servers: number of each at the start of the job.
            priority: by parameter name, its place in the order of transfers, lowest first; None: order of registration.
            random_seed: with a seed, each pull has a random order of its own; None: all have the same.
            late: number of workers that may join while the job runs.

        Raises InputError when ``priority`` leaves out a parameter or names one that the model lacks, when both priorities
        and a seed are given, for less than one worker or server, and for a negative ``late``.
        """
        if workers < 1 or servers < 1:
            raise InputError("transfer plan", f"{workers} workers and {servers} servers", "there must be one of each")
        if late < 0:
            raise InputError("transfer plan:late", f"is {late}", "give 0 or more")
        if priority is not None and random_seed is not None:
            raise InputError("transfer plan", "has both priorities and a random seed", "give one of the two")
        slots = _slots(model, servers)
        names = [slot.name for slot in slots]
        numbers = None
        if priority is not None:
            _demand_same_names(priority, names)
            numbers = tuple(priority[name] for name in names)
        return cls(slots=slots, workers=workers, servers=servers, priority=numbers, random_seed=random_seed, late=late)

    def check(self, model: nn.Module) -> None:
        """Raise InputError unless the plan was made from a model with the same parameters as ``model``."""
        differing_slots = {*self.slots} ^ {*_slots(model, self.servers)}
        if differing_names := sorted({slot.name for slot in differing_slots}, key=natural_key):
            problem = f"was made from another model: {listed(differing_names, 3)} are not the same"
            raise InputError("transfer plan", problem, "make it from this model")

    @property
    def world_size(self) -> int:
        """Number of processes at the start of the job: workers and servers."""
        return self.workers + self.servers

    @property
    def seats(self) -> int:
        """Number of workers when all that may join have joined."""
        return self.workers + self.late

    def rank_of_worker(self, worker: int) -> int:
        """Return the rank of worker number ``worker``; the ranks of late joiners come after those of the servers."""
        return worker if worker < self.workers else worker + self.servers

    def rank_of_server(self, server: int) -> int:
        """Return the rank of server number ``server``."""
        return self.workers + server

    def worker_of_rank(self, rank: int) -> int:
        """Return the number of the worker of rank ``rank``: the inverse of :meth:`rank_of_worker`."""
        return rank if rank < self.workers else rank - self.servers

    def title(self, rank: int) -> str:
        """Return the name of the process of rank ``rank`` for messages, such as ``server 0 (rank 2)``."""
        is_server = self.workers <= rank < self.world_size
        name = f"server {rank - self.workers}" if is_server else f"worker {self.worker_of_rank(rank)}"
        return f"{name} (rank {rank})"

    @cached_property
    def _on_server(self) -> tuple[tuple[int, ...], ...]:
        """Per server, the indices of its parameters in ``slots``, by priority or else in the order of registration."""
        indices = range(len(self.slots))
        numbers = self.priority or tuple(indices)
        ordered_indices = sorted(indices, key=lambda index: (numbers[index], index))
        return tuple(
            tuple(index for index in ordered_indices if self.slots[index].server == server)
            for server in range(self.servers)
        )

    def queue(self, server: int, worker: int, pull: int) -> tuple[int, ...]:
        """Return the indices of the parameters that ``server`` sends to ``worker`` in its pull number ``pull``, in order.

        The position in this tuple is the transfer's priority number within the channel. With ``random_seed`` each pull
        has another order, otherwise all have the same.
        """
        queue = self._on_server[server]
        if self.random_seed is None:
            return queue
        generator = random.Random(f"{self.random_seed}/{server}/{worker}/{pull}")
        return tuple(generator.sample(queue, len(queue)))

    def digest(self) -> str:
        """Return a hash of the plan, 12 hexadecimal digits, by which processes check that they have the same."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]


def _demand_same_names(priority: Mapping[str, int], names: list[str]) -> None:
    """Raise InputError unless ``priority`` has exactly the ``names`` of the model's parameters."""
    wrong = {"misses": set(names) - priority.keys(), "has unknown": priority.keys() - set(names)}
    if problems := [f"{what} {listed(sorted(part, key=natural_key), 3)}" for what, part in wrong.items() if part]:
        remedy = "it must name each of the model's parameters once"
        raise InputError("transfer plan:priority", " and ".join(problems), remedy)


def _slots(model: nn.Module, servers: int) -> tuple[Slot, ...]:
    """Return the slots of a model's parameters, spread over ``servers`` servers by bytes; empty ones are left out."""
    parameters = {name: value for name, value in model.named_parameters() if value.numel()}
    server_by_name = spread({name: value.nbytes for name, value in parameters.items()}, servers)
    return tuple(
        Slot(
            name=name,
            shape=tuple(value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            trainable=value.requires_grad,
            server=server_by_name[name],
        )
        for name, value in parameters.items()
    )


def planned_priority(config: Config) -> dict[str, int]:
    """Return the priority numbers of an enforcement config's parameters, for :meth:`TransferPlan.for_model`.

    Raises InputError when no parameter has a number, which is so for a plan that was made without a graph.
    """
    enforcement, path = loaded(config)
    numbers = {entry.name: entry.priority for entry in enforcement.parameters if entry.priority is not None}
    if not numbers:
        raise InputError(f"{path}:parameters", "hold no priority", "make the plan with --graph")
    return numbers


def describe_error(error: BaseException) -> str:
    """Return an error in one line: its type and text, the type alone if it has no text, of a signal the text alone."""
    text = str(error) or type(error).__name__
    if isinstance(error, Exception) and str(error):  # a signal's text, such as "SIGTERM", says enough without its type
        text = f"{type(error).__name__}: {error}"
    # Names of files, say, may hold surrogates, which UTF-8 cannot encode.
    return one_line(text.encode(errors="replace").decode())
