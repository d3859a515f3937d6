"""CUDA graphs: what is captured in a block is the script's own step once, and again whenever the graph is replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ddltool.analyzers.step.recording.recorder import Recorder


def stand_in_graphs(recorder: Recorder) -> None:
    """Let ``torch.cuda`` capture and replay graphs of the recorder's calls.

    While a graph is captured its calls run, are recorded, and are kept with it. What was recorded then stands for the
    first replay, because CUDA itself would only have captured it. Later replays hand the kept calls to the recorder
    again.
    """
    real_note = recorder._note
    capturing: list[list[tuple[Any, ...]]] = []  # the calls of every graph under capture, the innermost graph last

    def note(*call: Any) -> None:
        """Record a call, and keep it for the graph that is being captured, if one is."""
        if capturing:
            capturing[-1].append(call)  # its tensors live as long as the graph, as in a graph's pool
        real_note(*call)

    class CUDAGraph:
        """A graph: the calls between the beginning of its capture and its end."""

        def __init__(self, *_: Any, **__: Any) -> None:
            """Begin empty: no call is kept, and nothing that was recorded stands for a replay."""
            self.calls: list[tuple[Any, ...]] = []
            self.stands_for_replay = False

        def capture_begin(self, *_: Any, **__: Any) -> None:
            """Keep what is called from now on."""
            capturing.append(self.calls)

        def capture_end(self) -> None:
            """Keep no more; what was recorded while capturing stands for the replay that follows."""
            capturing.pop()
            self.stands_for_replay = recorder.recording

        def replay(self) -> None:
            """Record the kept calls again, unless what the capture recorded stands for this replay."""
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
        """Capture what the block calls into ``cuda_graph``, on a stream; the arguments are those of ``torch.cuda.graph``."""
        cuda_graph.capture_begin()
        with torch.cuda.stream(stream):
            yield
        cuda_graph.capture_end()

    setattr(recorder, "_note", note)  # noqa: B010 - mypy lets no method be assigned
    torch.cuda.CUDAGraph = CUDAGraph  # type: ignore[assignment,misc]
    torch.cuda.graph = graph  # type: ignore[assignment,misc]
    torch.cuda.graph_pool_handle = lambda: (0, 0)  # type: ignore[assignment,return-value]
    torch.cuda.make_graphed_callables = lambda callables, *_, **__: callables
