"""CUDA graphs: what is captured in a block is the script's own step once, and again whenever the graph is replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ddltool.analyzers.step.recording.recorder import Recorder


def stand_in_graphs(recorder: Recorder) -> None:
    """Let ``torch.cuda`` capture and replay graphs of the recorder's calls.

    While a graph is captured its calls run, are recorded, and are kept with the graph. CUDA itself would only capture
    them, so what was recorded stands for the first replay. Each later replay records the kept calls again. The
    recorder's ``_note`` and the functions of ``torch.cuda`` are replaced for good.
    """
    real_note = recorder._note
    capturing: list[list[tuple[Any, ...]]] = []  # the calls of every graph under capture, the innermost graph last

    def note(*call: Any) -> None:
        """Record a call, and keep it for the graph that is being captured, if one is; ``call``: the arguments of ``_note``."""
        if capturing:
            capturing[-1].append(call)  # its tensors live as long as the graph, as in a graph's pool
        real_note(*call)

    class CUDAGraph:
        """Stands in for ``torch.cuda.CUDAGraph``: the calls between the beginning of its capture and its end."""

        def __init__(self, *_: Any, **__: Any) -> None:
            """Begin without calls; the arguments are ignored."""
            self.calls: list[tuple[Any, ...]] = []
            # Whether the capture itself was recorded and no replay has come since: then the next replay adds nothing.
            self.stands_for_replay = False

        def capture_begin(self, *_: Any, **__: Any) -> None:
            """Keep the calls that are made from now on."""
            capturing.append(self.calls)

        def capture_end(self) -> None:
            """Keep no more calls. If a step is being recorded, its record of them stands for the next replay."""
            capturing.pop()
            self.stands_for_replay = recorder.recording

        def replay(self) -> None:
            """Record the kept calls again, unless this is the first replay after a capture that was recorded."""
            if not self.stands_for_replay and recorder.recording:
                for call in self.calls:
                    real_note(*call)
            self.stands_for_replay = False

        def reset(self) -> None:
            """Forget the calls."""
            self.calls.clear()

        def pool(self) -> tuple[int, int]:
            """Return a handle of the graph's memory, which differs from that of any other graph."""
            return 0, id(self)

        def __getattr__(self, name: str) -> Any:
            """Return a function that does nothing, for any other public method of torch's graphs (debugging, registration)."""
            if name.startswith("_"):
                raise AttributeError(name)
            return lambda *_, **__: None

    @contextlib.contextmanager
    def graph(cuda_graph: Any, pool: Any = None, stream: Any = None, **_: Any) -> Iterator[None]:
        """Capture the calls of the block into ``cuda_graph``, as ``torch.cuda.graph`` does, whose arguments these are.

        ``stream`` is the current stream in the block; the others are ignored.
        """
        cuda_graph.capture_begin()
        with torch.cuda.stream(stream):
            yield
        cuda_graph.capture_end()

    setattr(recorder, "_note", note)  # noqa: B010 - mypy lets no method be assigned
    torch.cuda.CUDAGraph = CUDAGraph  # type: ignore[assignment,misc]
    torch.cuda.graph = graph  # type: ignore[assignment,misc]
    torch.cuda.graph_pool_handle = lambda: (0, 0)  # type: ignore[assignment,return-value]
    torch.cuda.make_graphed_callables = lambda callables, *_, **__: callables
