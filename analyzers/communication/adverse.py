"""Small graphs on which TAC is far from the best schedule, one for each reason.

Found by ``benchmarks/search_adverse.py`` and rounded by hand; the tests hold the ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddltool.graph import Graph, Op


def _recv(name: str, duration_s: float, channel: int = 0) -> Op:
    return Op(name=name, kind="recv", resource=f"channel:{channel}", duration_s=duration_s, parameter=name)


def _compute(name: str, duration_s: float, *inputs: str) -> Op:
    return Op(name=name, kind="compute", duration_s=duration_s, inputs=inputs)


def wide_join() -> Graph:
    """Return a graph on which TAC takes 22 s and the best order 14 s.

    ``large`` unlocks a second of compute by itself, so its P is 1; the recvs of the long op only unlock it together,
    so theirs is 0, and Equation 6 puts them last.
    """
    ops = (
        _recv("large", 9.0),
        _recv("left", 2.0),
        _recv("right", 2.0),
        _compute("short_op", 1.0, "large"),
        _compute("long_op", 9.0, "left", "right"),
    )
    return Graph.from_ops("wide_join", "inference", ops)


def many_servers() -> Graph:
    """Return a graph on which TAC takes 18 s and the best order 13 s.

    M adds transfers up although two servers send at the same time: the join over both servers (8 s of transfers, there
    after 4) looks later than the one on a single server (6 s of transfers, there after 6).
    """
    ops = (
        _recv("both0", 4.0, 0),
        _recv("both1", 4.0, 1),
        _recv("single0", 3.0, 0),
        _recv("single1", 3.0, 0),
        _compute("long_op", 8.0, "both0", "both1"),
        _compute("short_op", 1.0, "single0", "single1"),
    )
    return Graph.from_ops("many_servers", "inference", ops)


def sends_compete() -> Graph:
    """Return a graph on which TAC takes 18 s and the best order 12 s.

    TAC starts with what unlocks most compute and never looks at what comes after: a gradient that takes 7 s to send
    waits for an op of one second behind an op of nine.
    """
    ops = (
        _recv("first", 1.0),
        _recv("second", 2.0),
        _compute("long_op", 9.0, "first"),
        _compute("gradient", 1.0, "second"),
        Op(name="send", kind="send", resource="channel:0", duration_s=7.0, parameter="second", inputs=("gradient",)),
    )
    return Graph.from_ops("sends_compete", "training", ops)


ADVERSE: Mapping[str, Callable[[], Graph]] = {
    "wide_join": wide_join,
    "many_servers": many_servers,
    "sends_compete": sends_compete,
}
