"""Verbs on a machine with a GPU: they record in a fork, and this process trains as if nothing had been recorded."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from ddltool.analyzers.job.planning.options import Missed
from ddltool.errors import DdlToolError, InputError
from ddltool.own_process import in_fork
from ddltool.stages import Tell
from tests.helpers.processes import as_job

# Without a GPU nothing but torch's answer is another: what breaks is seen at the accelerator that torch knows.
ASKS = """
import torch
torch.cuda.is_available = lambda: True
import ddltool as dt

class Local(torch.nn.Linear):
    pass

model = Local(64, 64)
heard = []
dt.plan(model, batch=(torch.zeros(8, 64),), devices="2xH100", tell=heard.append)
assert heard and len(set(heard)) == len(heard), heard
found = dt.predict(model, batch=(torch.zeros(8, 64),), device="H100", batch_sizes=[8])
assert found.rows[0].step_time_s > 0
for call in (lambda: dt.predict("timm:resnet999", device="H100"), lambda: dt.record().__enter__()):
    try:
        call()
    except dt.DdlToolError as error:
        print(error)
assert torch.accelerator.current_accelerator() is None
"""


def asks(rank: int) -> None:
    exec(ASKS, {"__name__": "__main__"})


def test_verbs_record_elsewhere_where_there_is_a_gpu(tmp_path: Path) -> None:
    [(code, printed, told)] = as_job(1, tmp_path, asks)
    assert code == 0, told[-2000:]
    unknown, record = printed.splitlines()[-2:]
    assert unknown.startswith("timm:resnet999: unknown model")
    assert record.startswith("step: this process may train on its GPU")


def test_a_fork_answers_raises_and_dies() -> None:
    assert in_fork(lambda _: [3]) == [3]

    def refuse() -> None:
        raise InputError("here", "is wrong", "mend it")

    with pytest.raises(InputError, match="here: is wrong; mend it"):
        in_fork(lambda _: refuse())
    with pytest.raises(DdlToolError, match="ended with exit code 7"):
        in_fork(lambda _: os._exit(7))

    class Own(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def fail() -> None:
        raise Own(1, 2)

    with pytest.raises(DdlToolError, match="Own: 1 and 2"):
        in_fork(lambda _: fail())
    with pytest.raises(DdlToolError, match=r"[Pp]ickl"):
        in_fork(lambda _: lambda: None)


def test_a_fork_tells_and_errors_come_back_as_they_were() -> None:
    told = list[str]()
    with pytest.raises(Missed, match="too slow") as raised:
        in_fork(partial(missing, 1.5), told.append)
    assert (raised.value.by, told) == (1.5, ["first", "second"])


def missing(by: float, tell: Tell) -> None:
    tell("first")
    tell("second")
    raise Missed("too slow", by)
