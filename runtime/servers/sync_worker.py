"""The worker of a synchronisation model. Start at :class:`SyncWorker`; :mod:`ddltool.runtime.servers` has the whole picture."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store

from ddltool.artifacts import check_writable
from ddltool.errors import InputError, one_line
from ddltool.runtime.servers.ends import JOIN_S
from ddltool.runtime.servers.member_wire import knock
from ddltool.runtime.servers.membership import (
    FOREVER_S,
    JOIN,
    JOINED,
    MEMBERS,
    SHARE,
    check_same_policy,
    shard,
)
from ddltool.runtime.servers.policies import Policy
from ddltool.runtime.servers.signals import Interruptions, Terminated
from ddltool.runtime.servers.transfers import TransferError, TransferPlan
from ddltool.runtime.servers.wire import CLOSED, STEP, Wire
from ddltool.runtime.servers.worker import PushOrder, Worker

log = logging.getLogger(__name__)


class LocalOptimizer(Protocol):
    """What makes local steps: any ``torch.optim`` optimizer does."""

    def step(self) -> Any:
        """Change the parameters in place."""

    def zero_grad(self) -> Any:
        """Forget the gradients."""


class SyncWorker(Worker):
    """A training process under a synchronisation model; the loop is the same for all models.

    Attributes:
        clock: the number of steps whose gradients have been pushed; under local SGD, of rounds. Who joins late begins
            with a number near that of the others.
        epoch: the first epoch of which this worker gets a share of the samples.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: TransferPlan,
        policy: Policy,
        *,
        local_optimizer: LocalOptimizer | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        push: PushOrder = "ready",
        door: Store | None = None,
    ) -> None:
        """Connect and hook the model; a collective over all ranks, or with ``door`` this process's own doing.

        ``local_optimizer``: makes the local steps of local SGD, and only there. ``checkpoint``: where the parameters
        of the last complete pull go when the run ends by a TransferError (a lost server above all), by SIGTERM or by
        Ctrl-C; a file of this worker's own; costs one copy of the parameters per pull. SIGTERM then ends the process
        with 143; a script with a handler of its own keeps it (see :mod:`~.sync_signals`). ``push``: as
        :class:`~.workers.Worker` has it; "step" where gradients are clipped. ``door``: join a job that is
        running, through the store that its servers look at; torch.distributed need not be initialised. Raises InputError as
        :class:`~.wire.Wire` does, when the ranks' policies differ, when the file cannot be written, and when no seat is
        left for who comes late; TransferError when the job lets nobody in.
        """
        if door is None:
            check_same_policy(policy)
        self.policy, self._door, self._optimizer = policy, door, local_optimizer
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self.epoch = 0
        self._closing = False
        self._interruptions = Interruptions()
        super().__init__(model, plan, timeout_s=FOREVER_S, push=push)
        self._pulled: dict[str, Tensor] = {}
        self._pulled_clock = 0
        self._local = 0  # steps of the round that is under way
        self._updates = 0  # up to the last pull but one
        if door is not None:
            self._join_job()
        if checkpoint is not None:
            self._interruptions.open()

    @contextmanager
    def step(self, *, push: bool = True) -> Iterator[Self]:
        """Make one step; see :meth:`~.workers.Worker.step`.

        Under local SGD only the first step of a round pulls and only the last one pushes; a round that closing or
        ``push=False`` cuts short is pushed as it is. Raises TransferError also when this worker was taken out of the
        job; then, and when a server is lost, the checkpoint has been written.
        """
        with self._saving():
            if self._optimizer is None or not push:
                self._end_round()
                with super().step(push=push):
                    yield self
            else:
                with self._local_step(self._optimizer):
                    yield self

    @property
    def updates(self) -> int:
        """Updates that the parameters had when they were last pulled, of the parameter with most: the job's progress.

        While the next pull has brought nothing yet, and after a failure, what the one before brought.
        Under ASP, SSP and ElasticBSP every gradient is an update; under the other models a whole iteration is.
        """
        return max([self._updates, *(arrival.version for arrival in list(self.arrivals))])

    def _begin(self, kind: int) -> None:
        self._updates = self.updates
        super()._begin(kind)

    def batches(
        self, samples: int, batch_size: int, *, epoch: int, seed: int, drop_last: bool = False
    ) -> tuple[Tensor, ...]:
        """Return this worker's share of ``epoch`` in batches: (b,) int64 indices below ``samples``, shuffled.

        The last batch has what is left, which may be one sample; ``drop_last`` leaves it out unless it is whole.

        The share is :func:`~.membership.shard`'s among :meth:`members`. The server is told how many batches there are,
        so it can say what was left out should this worker be lost. Raises InputError for a batch size below 1, and
        TransferError as :meth:`step` does.
        """
        if batch_size < 1:
            raise InputError("batch_size", f"is {batch_size}", "give 1 or more")
        members = self.members(epoch)
        if self.rank not in members and epoch >= self.epoch:
            with self._saving(), self._requesting():
                raise TransferError(f"{self._title} was taken out of the job before epoch {epoch}")
        mine = torch.from_numpy(shard(samples, members, self.rank, epoch=epoch, seed=seed))
        split = mine.split(batch_size) if len(mine) else ()
        if drop_last and split and len(split[-1]) < batch_size:
            split = split[:-1]
        with self._saving(), self._requesting(), self._telling("while telling the size of its share"):
            self._abandonable(lambda: self._ask(0, SHARE, len(split)))
        return tuple(split)

    def members(self, epoch: int) -> tuple[int, ...]:
        """Return the workers that share the samples of ``epoch``; see :func:`~.membership.shard`.

        All workers get the same answer for an epoch. Raises TransferError as :meth:`step` does.
        """
        with self._saving(), self._requesting(), self._telling(f"while asking for the members of epoch {epoch}"):
            answer = self._exchange(0, MEMBERS, epoch, self.plan.seats)
        return tuple(answer.nonzero().flatten().tolist())

    def _exchange(self, server: int, kind: int, number: int, length: int) -> Tensor:
        """Return the (length,) numbers that a server answers to a request."""
        answer = torch.empty(length, dtype=torch.int64)

        def exchange() -> Tensor:
            coming = self._wire.post("pull", answer, self.plan.rank_of_server(server), self._wire.first_free_tag)
            self._ask(server, kind, number)
            self._wire.wait(coming, self.plan.rank_of_server(server), FOREVER_S)
            return answer

        return self._abandonable(exchange)

    def _connect(self, timeout_s: float) -> Wire:
        if self._door is None:
            return super()._connect(timeout_s)
        return knock(self._door, self.plan, self.policy, self._check)

    def _check(self) -> None:
        super()._check()
        if (self.policy.local_steps > 1) != (self._optimizer is not None):
            problem = "is missing" if self._optimizer is None else f"is given under {self.policy.describe()}"
            raise InputError("local_optimizer", problem, "local SGD of more than one step needs one, other models none")
        if self._checkpoint is not None:
            check_writable(self._checkpoint)

    def _join_job(self) -> None:
        """Become a member: server 0 says from which step and epoch on, then the others are told."""
        try:
            with self._requesting(), self._telling("while joining"):
                self.clock, self.epoch = self._exchange(0, JOIN, -1, 2).tolist()
                for server in range(1, self.plan.servers):
                    if self.clock >= 0:
                        self.clock, _ = self._exchange(server, JOIN, self.clock, 2).tolist()
                if self.clock < 0:
                    why = "the job was over" if self.clock == -1 else "the others made another step"
                    raise TransferError(f"{self._title}: {why} before all servers knew of this worker")
                self._abandonable(lambda: self._ask(0, JOINED, self.clock))
        except TransferError:
            self._reported = True
            self.close()
            raise

    def close(self) -> None:
        """Push what a round has so far, tell the servers that nothing more will be asked for, and remove the hooks.

        Raises TransferError as :meth:`step` does, and when a server was lost since the last step: what the servers hold
        is gone then, and the checkpoint has been written.
        """
        try:
            with self._saving():
                if self._threads and not self._failing:
                    self._end_round()
                self._closing = True
                super().close()
        finally:
            self._interruptions.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, KeyboardInterrupt | Terminated):  # it may have come between two steps
                self._save_and_warn()
        finally:
            super().__exit__(kind, error, trace)

    def _listen(self, peer: int) -> None:
        """Fail when a server goes away, whatever else is under way."""
        super()._listen(peer)
        with self.changed:  # a server that has been told that this worker closes may end before that is noted here
            if self.changed.wait_for(lambda: self._failing or peer in self._closed, JOIN_S if self._closing else 0.0):
                return
        raise TransferError(f"{self._title}: {CLOSED}: server {self.plan.server_of_rank(peer)} (rank {peer})", peer)

    @contextmanager
    def _local_step(self, optimizer: LocalOptimizer) -> Iterator[None]:
        """Make one local step of a round."""
        try:
            if self._local == 0:
                self._begin(STEP)
                self._pushing = False  # the hooks must not push the gradients of local steps
            yield
            if self._local == 0:
                self._wait_until(lambda: len(self._arrived) == len(self._names))
                self._keep()
            self._raise_failure()
            optimizer.step()
            optimizer.zero_grad()
            self._local += 1
            if self._local == self.policy.local_steps:
                self._end_round()
        except BaseException as error:
            self._reported = True
            self._fail(TransferError(f"{self._title} left a step with {type(error).__name__}: {error}"))
            raise

    def _end_round(self) -> None:
        """Push what the local steps have changed."""
        if self._local == 0:
            return
        self._local, self._pushing = 0, True
        for index, slot in enumerate(self.plan.slots):
            if slot.trainable:
                self._offer(index, self._pulled[slot.name] - self._parameters[slot.name].detach().cpu())
        super()._finish()

    def _finish(self) -> None:
        # Wait here for the arrivals: during the pushes the parameters still are what was pulled.
        super()._finish()
        if self._checkpoint is not None:
            self._keep()

    def _keep(self) -> None:
        """Copy the parameters of a complete pull, for the next one overwrites them in place."""
        with self._interruptions.held_off():
            if not self._pulled:
                self._pulled = {name: value.detach().cpu().clone() for name, value in self._parameters.items()}
            for name, value in self._pulled.items():
                value.copy_(self._parameters[name].detach())
            self._pulled_clock = self.clock

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Write the checkpoint when the run ends here; what ended it stays the error that is raised."""
        try:
            yield
        except TransferError as error:
            self._reported = True
            if problem := self._save():
                raise TransferError(f"{error}; {problem}") from error
            raise
        except (KeyboardInterrupt, Terminated):
            self._save_and_warn()
            raise

    def _save_and_warn(self) -> None:
        if problem := self._save():
            log.warning("%s: %s", self._title, problem)

    def _save(self) -> str:
        """Write the checkpoint: all of the model's state with the parameters of the last complete pull.

        Return why it could not be written, empty when it was or none is wanted.
        """
        if self._checkpoint is None or not self._pulled:
            return ""
        with self._interruptions.held_off():
            path, self._checkpoint = self._checkpoint, None
            try:
                state = {name: value.detach().cpu() for name, value in self.model.state_dict().items()} | self._pulled
                save_weights({"model": state, "clock": self._pulled_clock}, path)
            except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
                why = getattr(error, "strerror", None) or one_line(str(error))[:200]
                return f"checkpoint {path} could not be written ({why})"
        return ""


def save_weights(content: dict[str, object], path: Path) -> None:
    """Write a file for ``torch.load(path, weights_only=True)``: whole, or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
