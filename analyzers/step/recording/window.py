"""The steady step of a training loop: what lies between the ends of two updates.

:class:`StepWindow` watches a loop's optimizers and tells a recorder when that step begins and ends; :func:`record` does
so for a loop in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import _disable_current_modes

from ddltool.analyzers.step.recording.graph_of import graph_of
from ddltool.analyzers.step.recording.packages import NOTE
from ddltool.analyzers.step.recording.posing import posed, recording_modules, register_device
from ddltool.analyzers.step.recording.recorder import Recorder, Recording
from ddltool.errors import InputError
from ddltool.graph import Graph
from ddltool.own_process import NeedsOwnProcess


class StepWindow:
    """Starts the recorder when the first update has ended, stops it when the second has, and then calls ``then`` once.

    An update is a step of the first optimizer whose step ends. A training step in which another optimizer updates for
    the first time is dropped and the next one recorded in its place, because an optimizer makes its states in its first
    update, which later steps do not repeat. Updates are watched until :meth:`close`.
    """

    def __init__(self, recorder: Recorder, then: Callable[[], None]) -> None:
        """Watch all optimizers of the process from now on; ``then``: called without arguments after the recorded step."""
        self.recorder, self.then = recorder, then
        self.is_over = False
        self.absent: list[str] = []
        """Packages that are stood in for."""
        self.first: Any = None
        """The optimizer whose updates bound the step."""
        self.updates = 0
        """Its updates that have ended so far."""
        self._seen: dict[int, Any] = {}
        """By ``id``, the optimizers and averages that were updated; held here, so that their ids are not used again."""
        self._is_steady = True
        """Whether nothing was updated for the first time since the step began."""
        self._depth = 0
        """How many optimizers' steps are under way: one may call another's, and only the outermost counts."""
        self._closing = ExitStack()
        self._closing.callback(register_optimizer_step_pre_hook(self._begin_update).remove)
        self._closing.callback(register_optimizer_step_post_hook(self._end_update).remove)
        self._watch_averages()

    def close(self) -> None:
        """Stop watching updates, and undo what was replaced in torch."""
        self._closing.close()

    def _note_update(self, updated: Any) -> None:
        """Note that an optimizer or an average was updated; if for the first time, the step under way is not steady."""
        if id(updated) not in self._seen:
            self._seen[id(updated)] = updated
            if self.updates:  # before the first update ends, no step is under way
                self._is_steady = False

    def _watch_averages(self) -> None:
        """Count updates of averaged weights (``AveragedModel``) among the updates, because their first one only copies."""
        real_update = AveragedModel.update_parameters

        def update(average: Any, *args: Any, **kwargs: Any) -> None:
            """Update the averages as torch does, and note it."""
            real_update(average, *args, **kwargs)
            self._note_update(average)

        AveragedModel.update_parameters = update  # type: ignore[assignment, method-assign]
        self._closing.callback(setattr, AveragedModel, "update_parameters", real_update)

    def _begin_update(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Note that an optimizer's step begins; return the step's arguments, as torch asks of this hook.

        A closure among them is wrapped, so that the passes it runs do not count as the update.
        """
        self._depth += 1
        self._enter_update(optimizer)

        def in_forward_phase(value: Any) -> Any:
            """Return a closure wrapped to run in the forward phase; return any other value unchanged."""
            if not callable(value) or value is optimizer:
                return value

            def closure() -> Any:
                """Run the script's closure, then go back to the update."""
                self.recorder.phase = "forward"
                try:
                    return value()
                finally:
                    self._enter_update(optimizer)

            return closure

        return tuple(map(in_forward_phase, args)), {name: in_forward_phase(value) for name, value in kwargs.items()}

    def _enter_update(self, optimizer: Any) -> None:
        """Note the gradients that the optimizer is about to use, and set the phase to the update.

        Called when a step of any optimizer begins, and again after each call of its closure (the function that an optimizer
        such as LBFGS calls to compute the loss again). Parameters without a gradient are passed to the recorder too, which
        skips them.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.recorder.note_gradient(parameter)
        self.recorder.phase = "update"

    def _end_update(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Note that an optimizer's step ends. If the optimizer is the first one, start or stop the recorder.

        A step within another optimizer's step, and any step after the recorded one, changes nothing.
        """
        self._depth -= 1
        if self._depth:
            return
        self.recorder.phase = "forward"
        if self.first is None:
            self.first = optimizer
        self._note_update(optimizer)  # its first step makes its states
        if optimizer is not self.first or self.is_over:
            return
        self.updates += 1
        if self.updates == 1 or not self._is_steady:  # begin; or drop the step that was recorded, and begin again
            self._is_steady = True
            self.recorder.start()
        else:
            self.is_over = True
            self.recorder.stop()
            self.then()


# The name of a trainer's class, and the attribute that says from how many passes an update accumulates its gradients.
_PASSES = (
    ("Trainer", "args.gradient_accumulation_steps"),
    ("AcceleratedOptimizer", "gradient_state.num_steps"),
    ("Trainer", "accumulate_grad_batches"),
)


def note_short(step: Recording) -> None:
    """Add to a recorded step the remark that it has fewer passes than a trainer was told to make, if so.

    A pass is one forward and backward pass; a trainer may accumulate the gradients of several before an update, and makes
    fewer where its data set ends. Call it while the step's last update runs: the trainer (of transformers, accelerate or
    Lightning) is then found as the ``self`` of one of the calling methods. The remark is a key of ``step.assumed``.
    """
    asked = _passes_asked()
    passes = len(step.inputs)
    if 0 < passes < asked:
        text = f"the step has {passes} of the {asked} passes that accumulate gradients, because the data set ends there"
        step.assumed[f"{NOTE}{text}; give more samples"] = 1


def _passes_asked() -> int:
    """Return how many passes of one update the trainers among the calling methods' objects ask for; 0 without a trainer."""
    asked = 0
    frame = sys._getframe().f_back
    while frame is not None:
        caller = frame.f_locals.get("self")  # a trainer, any other object, or None in a function
        class_names = {base.__name__ for base in type(caller).__mro__}
        for name, path in _PASSES:
            if name in class_names:
                with suppress(AttributeError):  # another library's class of the same name
                    asked = max(asked, attrgetter(path)(caller))
        frame = frame.f_back
    return asked


@dataclass(slots=True)
class RecordedBlock:
    """The object that :func:`record` gives its block, to ask for the graph after it."""

    _graph: Graph | None = None

    @property
    def graph(self) -> Graph:
        """The graph of the steady step. Raises InputError before that step has ended."""
        if self._graph is None:
            raise InputError("record", "no step has been recorded yet", "ask after the block")
        return self._graph


@contextmanager
def record(name: str = "step") -> Iterator[RecordedBlock]:
    """Record the steady step of the training loop in the block, in this process and without a GPU.

    In the block CUDA seems to be there: a model and its batches that are moved to ``cuda`` have sizes and no values from then
    on, so make them in the block. The loop runs until its optimizer has updated twice, or longer; what lies between the ends of
    the two updates is the graph's step. ``name``: of the graph.

    Raises InputError where fewer updates came, where the step runs nothing on ``cuda``, and on a machine with a GPU.

    >>> import torch
    >>> with record() as recorded:
    ...     model = torch.nn.Linear(64, 10).cuda()
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     for _ in range(2):
    ...         model(torch.zeros(8, 64, device="cuda")).mean().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> recorded.graph.batch_size, recorded.graph.parameter_bytes
    (8, 2600.0)
    """
    try:
        recorder, block = Recorder(register_device()), RecordedBlock()
    except NeedsOwnProcess:
        remedy = "set CUDA_VISIBLE_DEVICES= for a process that only records, or run ddltool trace -- python SCRIPT"
        raise InputError(
            name, "this process may train on its GPU, which it could not after recording", remedy
        ) from None

    def make_graph() -> None:
        """Make the block's graph once the step has ended; for a step without calls on the GPU the block gets no graph."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            recorder.step.tf32 = torch.get_float32_matmul_precision() != "highest"
            note_short(recorder.step)
            if recorder.step.calls:
                block._graph = graph_of(recorder.step, name)

    with posed(recorder), recording_modules(recorder):
        window = StepWindow(recorder, make_graph)  # made here, because only now no other thread records
        try:
            yield block
        finally:
            window.close()
    if block._graph is None:
        problem = "runs nothing on cuda" if window.is_over else f"has {window.updates} of the 2 updates that are needed"
        raise InputError(name, problem, "let it train a model on cuda for two updates")
