"""Calls that change their process for good, in a fork of it where it may train on a GPU.

Recording a step registers a device with torch, which never forgets one and knows one kind of accelerator in a process:
a backward pass on CUDA fails from then on (pytorch issue 161129). A command has nothing else to do with its process and
:func:`claim` it. In a notebook or a script :func:`demand_own_process` raises, and :func:`in_fork` runs the call
elsewhere. A fork and no fresh interpreter, because the call may be about a model that nobody can pickle.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ddltool.errors import DdlToolError, one_line
from ddltool.stages import Tell

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")
_is_claimed = False


class NeedsOwnProcess(BaseException):
    """The call cannot run here; none of those that catch Exception should take it for a model's own error."""


def claim() -> None:
    """Say that this process will not train on a GPU, so that :func:`demand_own_process` lets everything pass."""
    global _is_claimed
    _is_claimed = True


def demand_own_process() -> None:
    """Raise NeedsOwnProcess if there is a GPU on which this process may train."""
    import torch

    if not _is_claimed and torch.cuda.is_available():
        problem = "after recording, training on this process's GPU would fail"
        raise NeedsOwnProcess(f"{problem}: call own_process.claim() if it will not train")


def in_fork(call: Callable[[Tell], T], tell: Tell | None = None) -> T:
    """Return what ``call`` returns in a fork of this process; what it changes there is not changed here.

    ``call`` is given a function for remarks; each text that it passes to that reaches ``tell`` in this process (None: it is
    dropped). Its result must be one that pickle takes. Raises the error that it raises (as a DdlToolError with its text, if
    pickle does not take it), and DdlToolError if the fork dies.
    """
    import multiprocessing  # `--help` needs none of it
    from multiprocessing.connection import wait

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(call, theirs), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which only a lock of theirs would disturb
        process.start()
    theirs.close()
    try:
        while ours in wait([ours, process.sentinel]):  # a dead fork's last message comes first
            kind, content = pickle.loads(ours.recv_bytes())
            if kind == "result":
                return cast(T, content)
            if kind == "error":
                raise content
            if tell is not None:
                tell(content)
    except EOFError:
        pass  # it died: with what exit code is said below
    finally:
        process.kill()
        process.join()
        ours.close()
    problem = f"the process that recorded the model ended with exit code {process.exitcode}"
    raise DdlToolError(problem)


def _answer(call: Callable[[Tell], Any], pipe: Connection) -> None:
    """Run the call in the fork, and send to the parent what comes of it through ``pipe``.

    Messages are pickled pairs: ("told", text) for each remark, then one ("result", the call's result) or ("error", its error).
    """
    import torch

    claim()
    torch.set_num_threads(1)  # the threads of the parent's pool are not here
    answer: tuple[str, object]
    try:
        answer = "result", call(lambda text: pipe.send_bytes(pickle.dumps(("told", text))))
    except Exception as error:
        answer = "error", error
    try:
        message = pickle.dumps(answer)
        if answer[0] == "error":
            pickle.loads(message)  # an exception with an __init__ of its own may not come back
    except Exception as error:
        cause = answer[1] if isinstance(answer[1], Exception) else error
        message = pickle.dumps(("error", DdlToolError(one_line(f"{type(cause).__name__}: {cause}"))))
    sys.stdout.flush()
    sys.stderr.flush()  # the parent ends this process once it has the answer
    pipe.send_bytes(message)
