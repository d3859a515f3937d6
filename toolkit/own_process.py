"""Calls that change their process for good, in a fork of it where it may train on a GPU.

Recording a step registers a device with torch, which never forgets one and knows one kind of accelerator in a process: a
backward pass on CUDA fails from then on (pytorch issue 161129). A command has nothing else to do with its process and
:func:`claim` it. In a notebook or a script :func:`demand` raises, and :func:`in_fork` runs the call elsewhere. A fork and no
fresh interpreter, because the call may be about a model that nobody can pickle.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

from ddltool.errors import DdlToolError

T = TypeVar("T")
_is_claimed = False  # whether this process is a command's or a fork's, which may be changed for good


class NeedsOwnProcess(BaseException):
    """The call cannot run here; none of those that catch Exception should take it for a model's own error."""


def claim() -> None:
    """Say that this process will not train on a GPU, so that :func:`demand` lets everything pass."""
    global _is_claimed
    _is_claimed = True


def demand() -> None:
    """Raise NeedsOwnProcess if there is a GPU on which this process may train."""
    import torch

    if not _is_claimed and torch.cuda.is_available():
        raise NeedsOwnProcess


def in_fork(call: Callable[[], T]) -> T:
    """Return what ``call()`` returns in a fork of this process; what it changes there is not changed here.

    Its result must be one that pickle takes. Raises the error that it raises, and DdlToolError if the fork dies.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(call, theirs), daemon=True)  # it ends with this process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which only a lock of theirs would disturb
        process.start()
    theirs.close()  # so that recv() below ends if the fork, which has the other copy, dies
    try:
        is_result, answer = ours.recv()
    except EOFError:
        process.join()
        problem = f"the process that recorded the model ended with exit code {process.exitcode}"
        raise DdlToolError(problem) from None
    finally:
        process.kill()  # it has answered, or nobody waits for its answer any more
        process.join()
        ours.close()
    if is_result:
        return cast(T, answer)
    raise answer


def _answer(call: Callable[[], Any], pipe: Connection) -> None:
    """Run the call in the fork, and send (True, its result) or (False, its error) into the ``pipe``."""
    import torch

    claim()
    torch.set_num_threads(1)  # the threads of the parent's pool are not here
    try:
        answer = True, call()
    except Exception as error:
        answer = False, error
    pipe.send(answer)
