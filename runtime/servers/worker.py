"""The worker, which pulls parameters during the forward pass and pushes gradients during the backward pass.

Start at :class:`Worker`. A module's forward pass waits for the parameters that it owns and for no others; a gradient is
sent as soon as it is complete. This happens in the training process's own thread, in hooks of the model; zmq sends and
receives in threads of its own. Buffers (batch-norm statistics) are not transferred.
"""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from ddltool.arrays import Ints
from ddltool.artifacts import check_writable, write_bytes
from ddltool.errors import DdlToolError, InputError
from ddltool.runtime.processes.stopping import StopSignals, Terminated, refuse_in_one_line
from ddltool.runtime.servers.meeting import Meeting, join_job
from ddltool.runtime.servers.policies import BSP, SyncPolicy
from ddltool.runtime.servers.transfers import TransferError, TransferPlan, describe_error
from ddltool.runtime.servers.wire import BEAT_S, CLOSED, STOOD_STILL_S, Wire, fill

log = logging.getLogger(__name__)

PushTime = Literal["ready", "step"]
PUSH_TIMES = ("ready", "step")
HERE_S = 1.0  # how often a worker that is receiving sends a sign of life
# Modules that only call their children, each of which waits for its own parameters. Other modules of torch.nn may use
# their children's parameters without calling them (MultiheadAttention does).
_CONTAINERS = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict),
    *(nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One parameter's arrival in a pull."""

    name: str
    server: int
    """Number of the server that has sent it."""
    version: int
    """Number of updates that its value holds."""
    time_s: float
    """Seconds from the beginning of the pull until the model held the value."""


class Worker:
    """A training process of a plan; the loop is the same under every synchronisation policy.

    Args:
        model: its parameters are overwritten by the servers'.
        plan: which server has which parameters, and the order of transfers; the same on all ranks.
        policy: the synchronisation model, as on the servers; None: :class:`BSP` in which the loss of a worker ends the
            run.
        checkpoint: a file of this worker's own for the parameters of the last complete pull, written when the run ends
            by a TransferError (such as a lost server), by SIGTERM or by Ctrl-C; costs one copy of the parameters per
            pull. With it, SIGTERM ends the process with exit code 143 at the end of the step under way, unless the
            script has a handler of its own.
        push: "ready" sends gradients as they become ready, while the backward pass runs, so ``.grad`` must not be
            changed after it. "step" sends what ``.grad`` holds at the end of the step: after clipping and scaling, and
            after any number of backward passes.
        meeting: how the processes find each other; None: by the environment.

    Attributes:
        rank: the number of this worker.
        arrivals: the parameters of the last pull, in the order in which they came.
        updates: the largest number of updates of any parameter that has come, which is the job's progress. Under ASP,
            SSP and ElasticBSP every gradient is an update; under BSP a whole iteration is.
        clock: the number of steps whose gradients have been pushed. A late joiner starts with a number near that of the
            others.
        epoch: the first epoch of which this worker gets a share of the samples.
        waited_s: seconds in which this worker has waited for servers, in transfers and at barriers.
        run: name of this run of the job, the same on all ranks.

    Raises InputError, on all ranks, when plans, models or policies differ between ranks or a rank's arguments are
    wrong, and for a late joiner when no seat is left; TransferError when a rank does not come or is lost, or the job
    does not admit a late joiner in time.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: TransferPlan,
        policy: SyncPolicy | None = None,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        push: PushTime = "ready",
        meeting: Meeting | None = None,
    ) -> None:
        """Meet the other processes and register hooks on the model; blocks until all have come or the job admits this one."""
        refuse_in_one_line()
        meeting = meeting or Meeting.of_environment()
        self.model = model
        self.plan = plan
        self.policy = policy or BSP(fixed=True)
        self._push_time = push
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._parameters = dict(model.named_parameters())
        self._parameter_names = [slot.name for slot in plan.slots]
        self._stop = StopSignals()
        self._meet_processes(meeting)
        self.arrivals: list[Arrival] = []
        self.updates = 0
        self.waited_s = 0.0
        # Indices of the plan's slots in a step: values that have come, values that modules waited for, gradients sent.
        self._arrived_indices = set(range(len(plan.slots)))
        self._awaited_indices: set[int] = set()
        self._pushed_indices: set[int] = set()
        self._sent_gradients: dict[int, tuple[Tensor, int]] = {}  # `.grad` as the hook saw it, and its version then
        self._is_pushing = False
        self._pull_began_s = 0.0
        self._last_heard_s = dict.fromkeys(range(plan.servers), 0.0)
        self._last_sent_s = dict(self._last_heard_s)
        self._closed_servers: set[int] = set()  # servers that know that this worker has closed
        self._open = True
        self._failure: TransferError | None = None
        self._member_answers: list[list[int]] = []
        self._checkpoint_values: dict[str, Tensor] = {}
        self._checkpoint_clock = 0
        self._handles = self._register_hooks()
        if checkpoint is not None:
            self._stop.open()

    def _meet_processes(self, meeting: Meeting) -> None:
        """Join the job at server 0, which gives rank, first step and epoch, and connect to all servers."""
        plan = self.plan
        hello, refusal = meeting.hello(plan, self.policy, self._check_arguments)
        if refusal is not None and meeting.rank is None:  # nobody waits for a worker that would have joined late
            raise refusal
        try:
            first_address = meeting.find()
            self._wire = Wire(meeting.token, self._stop)
            try:
                begin, _ = join_job(self._wire, plan, first_address, hello, meeting.limit_s)
                rank, self.clock, self.epoch, addresses, self._lost_after_s, self.run = begin
            except BaseException:
                self._wire.close()
                raise
        except DdlToolError as error:  # if this process has refused, server 0 answers with its text: raise the original
            raise refusal or error from None
        self.rank = plan.worker_of_rank(rank)
        self._title = plan.title(rank)
        for server in range(1, plan.servers):
            self._wire.dial(plan.rank_of_server(server), addresses[server])
            self._wire.send(plan.rank_of_server(server), ["worker", self.rank])

    def _check_arguments(self) -> None:
        """Raise InputError for an unknown push time, another model's plan, a checkpoint that cannot be written."""
        if self._push_time not in PUSH_TIMES:
            raise InputError("push", f"is {self._push_time}", f"known: {', '.join(PUSH_TIMES)}")
        self.plan.check(self.model)
        if self._checkpoint is not None:
            check_writable(self._checkpoint)

    @contextmanager
    def step(self, *, push: bool = True) -> Iterator[Self]:
        """Pull all parameters, run the body, and push all gradients (``push`` False: inference, nothing is pushed).

        The body runs one forward pass and, with ``push``, one backward pass (any number with push="step"). Afterwards
        every parameter has arrived and every gradient is queued to be sent; a trainable parameter without a gradient
        has pushed zeros, and ``.grad`` is None again.

        Raises TransferError when a server is lost or this worker was taken out of the job, after writing the checkpoint.
        Raises InputError when ``.grad`` was changed after it had been sent. An exception of the body takes this worker
        out of the job.
        """
        with self._running("left a step with"):
            self._begin_pull(push)
            yield self
            self._finish_step()

    def pull(self) -> None:
        """Pull all parameters without a step, and block until they have come: after the last step, the trained values."""
        with self.step(push=False):
            pass

    def batches(
        self, samples: int, batch_size: int, *, epoch: int, seed: int, drop_last: bool = False
    ) -> tuple[Tensor, ...]:
        """Return this worker's share of ``epoch`` in batches: (b,) int64 indices below ``samples``, shuffled.

        The last batch has what is left, which may be one sample; ``drop_last`` leaves it out if it is not whole. The
        share is :func:`shard`'s among :meth:`members`. Server 0 is told the number of batches, so that it can log how
        many are left out if this worker is lost. Raises InputError for a batch size below 1, and TransferError as
        :meth:`step` does.
        """
        if batch_size < 1:
            raise InputError("batch_size", f"is {batch_size}", "give 1 or more")
        members = self.members(epoch)
        with self._running("was ended by"):
            if self.rank not in members and epoch >= self.epoch:  # one before it joined is refused by `shard`
                raise TransferError(f"{self._title} was taken out of the job before epoch {epoch}")
            own_samples = torch.from_numpy(shard(samples, members, self.rank, epoch=epoch, seed=seed))
            own_batches = own_samples.split(batch_size) if len(own_samples) else ()
            if drop_last and own_batches and len(own_batches[-1]) < batch_size:
                own_batches = own_batches[:-1]
            self._tell(0, "share", len(own_batches))
        return tuple(own_batches)

    def members(self, epoch: int) -> tuple[int, ...]:
        """Return the numbers of the workers that share the samples of ``epoch`` (:func:`shard`); server 0 answers.

        All workers get the same members for an epoch. Raises TransferError when a server is lost or this worker was taken
        out of the job.
        """
        with self._running("was ended by"):
            self._tell(0, "members", epoch)
            self._receive_until(lambda: bool(self._member_answers))
            return tuple(self._member_answers.pop())

    def close(self) -> None:
        """Leave the job: tell the servers, block until they confirm, and remove the hooks. More calls do nothing.

        Raises TransferError as :meth:`step` does, also when a server was lost since the last step: the parameters that
        it held are lost then, and the checkpoint has been written.
        """
        try:
            if self._open and self._failure is None:
                with self._running("was closed with"):
                    for server in range(self.plan.servers):
                        self._tell(server, "close")
                    self._receive_until(lambda: len(self._closed_servers) == self.plan.servers)
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        """Remove the hooks from the model and close the connections; the worker can only be closed again."""
        self._open = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._wire.close()
        self._stop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the worker; where the block has raised, first tell the servers why this worker leaves."""
        if error is not None and self._open and self._failure is None:  # it came between two steps
            self._fail(error, "was ended by")
        self.close()

    @contextmanager
    def _running(self, how: str) -> Iterator[None]:
        """Run the block, which talks to the servers; an error in it takes this worker out of the job and is raised.

        ``how``: words before the error's text, for the servers. Signals are raised at the block's start and end. After
        a failure the same failure is raised again, after closing an InputError.
        """
        if self._failure is not None:
            raise self._failure
        if not self._open:
            raise InputError(self._title, "is asked for something after it has closed", "ask before, inside its block")
        try:
            self._stop.hear()
            yield
            self._stop.hear()
        except BaseException as error:
            failure = self._fail(error, how)
            if isinstance(error, TransferError) and failure is not error:
                raise failure from error
            raise

    def _fail(self, error: BaseException, how: str) -> TransferError:
        """Leave the job because of ``error``: tell the servers, disconnect, and return the failure that later calls raise.

        For a TransferError (such as a lost server) or a signal, the checkpoint is written first. ``how``: words between
        this worker's name and the error's text, such as "was ended by".
        """
        message = f"{self._title} {how} {describe_error(error)}"
        failure = error if isinstance(error, TransferError) else TransferError(message)
        checkpoint_problem = ""
        if isinstance(error, TransferError | KeyboardInterrupt | Terminated):
            checkpoint_problem = self._write_checkpoint()
        if checkpoint_problem and isinstance(error, TransferError):
            failure = TransferError(f"{error}; {checkpoint_problem}")
        elif checkpoint_problem:
            log.warning("%s: %s", self._title, checkpoint_problem)
        self._failure = failure
        for server in set(range(self.plan.servers)) - self._closed_servers:
            self._tell(server, "fail", f"{how} {describe_error(error)}")
        self._disconnect()
        return failure

    def _tell(self, server: int, *content: Any, tensor: Tensor | None = None) -> None:
        """Send a server a message of kind ``content[0]``, with the bytes of ``tensor`` if given."""
        self._last_sent_s[server] = time.monotonic()
        self._wire.send(self.plan.rank_of_server(server), content, tensor)

    def _receive_until(self, is_done: Callable[[], bool]) -> None:
        """Handle the servers' messages until ``is_done()``. Raises TransferError when a server ends, is lost or is silent.

        The time counts in :attr:`waited_s`. If this process itself was stopped for a while, silence is counted from
        then on, because messages may be on their way.
        """
        begin_s = time.monotonic()
        now_s = begin_s
        silence_from_s = begin_s  # no server counts as silent before this moment
        while not is_done():
            previous_s = now_s
            message = self._wire.receive(BEAT_S)
            now_s = time.monotonic()
            if now_s - previous_s > BEAT_S + STOOD_STILL_S:
                silence_from_s = now_s
            if message is not None:
                rank, (kind, *values), payload = message
                assert isinstance(rank, int)
                server = rank - self.plan.workers
                self._last_heard_s[server] = now_s
                self._handle_message(server, kind, values, payload)
            self._demand_live_servers(now_s, silence_from_s)
        self.waited_s += time.monotonic() - begin_s

    def _demand_live_servers(self, now_s: float, silence_from_s: float) -> None:
        """Raise TransferError for a server that has been silent for longer than ``lost_after_s``, unless it has closed.

        Silence begins with the server's last message, at the earliest at ``silence_from_s``. Both times are by
        ``time.monotonic``.
        """
        for server, heard_s in self._last_heard_s.items():
            silent_s = now_s - max(silence_from_s, heard_s)
            if server not in self._closed_servers and silent_s > self._lost_after_s:
                rank = self.plan.rank_of_server(server)
                self._wire.give_up(rank)
                raise TransferError(f"{self._title}: nothing came from {self.plan.title(rank)} for {silent_s:.0f} s")

    def _handle_message(self, server: int, kind: str, values: list[Any], payload: memoryview | None) -> None:
        """Handle a message of a server: copy a value into the model, or note an epoch's members or a confirmed close.

        Other kinds are ignored. Raises TransferError where the job ends for this worker ("out", "end", "gone").

        Args:
            server: number of the sender.
            kind: "value", "members", "bye", "out", "end" or "gone".
            values: for "value": (index of the parameter in the plan, number of updates that the value holds); for
                "members": (list of worker numbers,); for "out" and "end": (the reason,).
            payload: the bytes of the parameter for "value", else None.
        """
        title = self.plan.title(self.plan.rank_of_server(server))
        if kind == "value":
            index, version = values
            name = self._parameter_names[index]
            fill(self._parameters[name].detach(), payload)
            time_s = time.perf_counter() - self._pull_began_s
            self.arrivals.append(Arrival(name=name, server=server, version=version, time_s=time_s))
            self._arrived_indices.add(index)
            self.updates = max(self.updates, version)
            if time.monotonic() - self._last_sent_s[server] > HERE_S:  # else it would count as silent while it receives
                self._tell(server, "here")
        elif kind == "members":
            self._member_answers.append(values[0])
        elif kind == "bye":
            self._closed_servers.add(server)
        elif kind == "out":
            raise TransferError(f"{self._title} was taken out of the job by {title}: it {values[0]}")
        elif kind in ("end", "gone") and server not in self._closed_servers:
            self._closed_servers.add(server)
            self._wire.give_up(self.plan.rank_of_server(server))
            cause = f"{title} {CLOSED}" if kind == "gone" else f"the job has ended: {values[0]}"
            raise TransferError(f"{self._title}: {cause}")

    # One step.

    def _register_hooks(self) -> list[Any]:
        """Register hooks that wait for a module's parameters before its forward pass, and that push each gradient.

        torch.compile must leave them out of its graphs, because they send and receive. Returns the handles.
        """
        wait = torch.compiler.disable(self._wait_for_parameters)
        push = torch.compiler.disable(self._push_ready_gradient)
        index_by_id = {id(self._parameters[name]): index for index, name in enumerate(self._parameter_names)}
        handles: list[Any] = []
        for module in self.model.modules():
            # Modules of torch.nn may use their children's parameters themselves, so they wait for those too.
            uses_children = type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)
            used_ids = [id(value) for value in module.parameters(recurse=uses_children)]
            wanted_indices = frozenset(index_by_id[value_id] for value_id in used_ids if value_id in index_by_id)
            if wanted_indices:
                handles.append(module.register_forward_pre_hook(partial(wait, wanted_indices)))
        for index, slot in enumerate(self.plan.slots):
            if slot.trainable:
                push_hook = partial(push, index)
                handles.append(self._parameters[slot.name].register_post_accumulate_grad_hook(push_hook))
        return handles

    def _begin_pull(self, push: bool) -> None:
        """Reset the state of a step, and ask every server for its parameters, without waiting for them.

        The step's number is :attr:`clock`. ``push``: whether gradients will be pushed.
        """
        self._arrived_indices = set()
        self._awaited_indices = set()
        self.arrivals = []
        self._pushed_indices = set()
        self._sent_gradients = {}
        self._is_pushing = push
        self._pull_began_s = time.perf_counter()
        for server in range(self.plan.servers):
            self._tell(server, "pull", self.clock)

    def _wait_for_parameters(self, wanted_indices: frozenset[int], *_: object) -> None:
        """Block until the parameters with these indices in the plan have arrived: the pre-forward hook of a module.

        They are noted as awaited: a gradient of any other parameter shows that its module was not called.
        """
        self._awaited_indices |= wanted_indices
        self._receive_until(lambda: wanted_indices <= self._arrived_indices)

    def _push_ready_gradient(self, index: int, parameter: Tensor) -> None:
        """Push the gradient of the parameter with this index in the plan: the hook after the gradient is accumulated.

        With push="step" it is only checked. Raises InputError for a parameter that no forward pass has waited for, and
        with push="ready" for a second gradient.
        """
        name = self._parameter_names[index]
        gradient = parameter.grad
        if not self._is_pushing or gradient is None:
            return
        if index not in self._awaited_indices:
            problem = f"uses {name} without calling the module that owns it, so nothing waited for its transfer"
            raise InputError("model", problem, "call the owning module in the forward pass")
        if self._push_time == "step":
            return
        if index in self._pushed_indices:
            remedy = 'run one backward pass per step, or give push="step"'
            raise InputError("worker.step", f"{name} has a second gradient", remedy)
        self._sent_gradients[index] = gradient, gradient._version
        self._send_gradient(index, gradient)

    def _send_gradient(self, index: int, gradient: Tensor) -> None:
        """Block until all values of the pull have come, then send a parameter's gradient as a dense copy on the CPU.

        Late joining relies on that order: every server has released the step before any gradient of it comes.
        """
        self._receive_until(self._has_all_parameters)
        self._pushed_indices.add(index)
        tensor = gradient.detach().to_dense().cpu().contiguous()
        self._tell(self.plan.slots[index].server, "gradient", index, self.clock, tensor=tensor)

    def _has_all_parameters(self) -> bool:
        """Return whether every parameter of the present pull has arrived."""
        return len(self._arrived_indices) == len(self._parameter_names)

    def _finish_step(self) -> None:
        """Block until all parameters have come, push the remaining gradients, set ``.grad`` to None, and count the step.

        A trainable parameter without a gradient pushes zeros. Without ``push`` only the first happens. Raises InputError
        for a gradient that was changed after it had been sent.
        """
        self._receive_until(self._has_all_parameters)
        if self._is_pushing:
            self._demand_unchanged_gradients()
            for index in reversed(range(len(self._parameter_names))):  # last layer first, as in a backward pass
                parameter = self._parameters[self._parameter_names[index]]
                if self.plan.slots[index].trainable and index not in self._pushed_indices:
                    gradient = parameter.grad if self._push_time == "step" else None
                    self._send_gradient(index, torch.zeros_like(parameter) if gradient is None else gradient)
            for name in self._parameter_names:
                self._parameters[name].grad = None
            self._sent_gradients = {}
            self._is_pushing = False
            self.clock += 1
        if self._checkpoint is not None:
            self._copy_for_checkpoint()

    def _demand_unchanged_gradients(self) -> None:
        """Raise InputError if a ``.grad`` was replaced or changed in place after it had been sent; None may replace it.

        torch raises a tensor's version with every change in place.
        """
        for index, (sent_gradient, version) in self._sent_gradients.items():
            name = self._parameter_names[index]
            present_gradient = self._parameters[name].grad
            is_replaced = present_gradient is not None and present_gradient is not sent_gradient
            if is_replaced or sent_gradient._version != version:
                problem = f"{name}.grad was changed after the backward pass, while it was being pushed"
                remedy = 'clip and scale gradients with push="step", or scale the loss'
                raise InputError("worker.step", problem, remedy)

    def _copy_for_checkpoint(self) -> None:
        """Copy the parameters of a complete pull for the checkpoint, because the next pull overwrites them in place."""
        if not self._checkpoint_values:
            self._checkpoint_values = {name: value.detach().cpu().clone() for name, value in self._parameters.items()}
        for name, value in self._checkpoint_values.items():
            value.copy_(self._parameters[name].detach())
        self._checkpoint_clock = self.clock

    def _write_checkpoint(self) -> str:
        """Write the checkpoint: the model's state with the parameters of the last complete pull, and its ``clock``.

        Returns why it could not be written; "" if it was written, or none is wanted or possible yet. It is tried once:
        later calls do nothing and return "", also after a failure.
        """
        if self._checkpoint is None or not self._checkpoint_values:
            return ""
        path = self._checkpoint
        self._checkpoint = None
        model_state = {key: value.detach().cpu() for key, value in self.model.state_dict().items()}
        state = model_state | self._checkpoint_values  # a pull under way may have overwritten some of the parameters
        stream = io.BytesIO()
        torch.save({"model": state, "clock": self._checkpoint_clock}, stream)
        try:
            write_bytes(path, stream.getvalue())
        except InputError as error:
            return f"checkpoint {error}"
        return ""


def shard(samples: int, members: Sequence[int], worker: int, *, epoch: int, seed: int) -> Ints:
    """Return the indices of ``worker``'s samples in ``epoch``, (m,) int64 below ``samples``, shuffled.

    The shards of all ``members`` are disjoint, hold every sample once, and differ in length by at most one. They depend
    on the arguments only. Raises InputError if ``worker`` is not a member.
    """
    if worker not in members:
        raise InputError(f"worker {worker}", f"is not among the members {list(members)}", "ask as a member")
    member_index = sorted(members).index(worker)
    sample_order = np.random.default_rng((seed, epoch)).permutation(samples)
    return sample_order[member_index :: len(members)]
