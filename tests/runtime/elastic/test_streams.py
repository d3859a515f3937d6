"""Random streams that are switched with their worker: what a turn draws is what it would draw alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddltool.runtime.elastic.contexts import Contexts
from ddltool.runtime.processes.random_streams import RandomStreams, seed_streams, streams_kept

HOST = torch.device("cpu")
# What draws from each generator; "half" ones leave half of a pair of normal draws behind, 624 words are a whole block.
DRAWS: dict[str, Any] = {
    "python": random.random,
    "python half": lambda: random.gauss(0, 1),
    "python block": lambda: [random.getrandbits(32) for _ in range(624)][-1],
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002
    "numpy half": lambda: float(np.random.standard_normal()),  # noqa: NPY002
    "numpy block": lambda: int(np.random.randint(0, 2**32, 624, dtype=np.uint32)[-1]),  # noqa: NPY002
    "torch": lambda: float(torch.rand(1)),
    "torch half": lambda: float(torch.randn(1)),
    "nothing": lambda: None,
}
TURN = st.tuples(st.integers(0, 2), st.lists(st.sampled_from(list(DRAWS)), max_size=4))


@given(turns=st.lists(TURN, max_size=12), aside=st.booleans())
def test_a_worker_draws_what_it_would_draw_alone(turns: list[tuple[int, list[str]]], aside: bool) -> None:
    """The oracle seeds the global generators and runs one worker's turns on end."""
    expected = {}
    for worker in range(3):
        seed_streams(7, worker)
        expected[worker] = [DRAWS[draw]() for w, draws in turns if w == worker for draw in draws]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    outside = [DRAWS[name]() for _ in turns for name in ("python half", "numpy half", "torch half")]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    contexts = Contexts({"": nn.ReLU()}, range(3), 7, HOST)
    found: dict[int, list[Any]] = {worker: [] for worker in range(3)}
    between = []
    for worker, draws in turns:
        contexts.enter(worker)
        found[worker] += [DRAWS[draw]() for draw in draws[:2]]
        if aside:
            with streams_kept(HOST):
                random.seed(5), np.random.seed(5), torch.manual_seed(5)  # noqa: NPY002
                DRAWS["numpy half"]()
        found[worker] += [DRAWS[draw]() for draw in draws[2:]]
        contexts.leave()
        between += [DRAWS[name]() for name in ("python half", "numpy half", "torch half")]
    assert found == expected
    assert between == outside


def test_a_turn_may_seed_anew() -> None:
    contexts = Contexts({"": nn.ReLU()}, range(2), 7, HOST)
    drawn = []
    for worker in (0, 1, 0, 1):
        contexts.enter(worker)
        if len(drawn) == 0:
            np.random.seed(4), random.seed(4)  # noqa: NPY002
        drawn.append((DRAWS["numpy half"](), DRAWS["python half"]()))
        contexts.leave()
    np.random.seed(4), random.seed(4)  # noqa: NPY002
    assert drawn[::2] == [(DRAWS["numpy half"](), DRAWS["python half"]()) for _ in range(2)]


def test_documents_bring_a_stream_back() -> None:
    RandomStreams.seeded(3, 1, HOST).restore(HOST)
    [DRAWS[name]() for name in ("python half", "numpy half", "torch half")]
    streams = RandomStreams.present(HOST)
    drawn = []
    for each in (streams, RandomStreams.from_document(streams.to_document())):
        each.restore(HOST)
        drawn.append([DRAWS[name]() for name in ("python half", "numpy half", "torch half", "python", "numpy")])
    assert drawn[0] == drawn[1]
