"""Random graphs for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from ddltool.graph import Graph, Op

# Small whole numbers make ties, where ordering goes wrong; sevenths make sums that floats cannot hold exactly.
TIMES = st.one_of(st.integers(0, 4).map(float), st.integers(1, 20).map(lambda k: k / 7), st.just(0.1))


@st.composite
def timed_graphs(draw: st.DrawFn, *, max_recvs: int = 6, max_computes: int = 8, channels: int = 1) -> Graph:
    """A timed training-like graph: recv roots, compute ops on anything before them, send leaves."""
    recvs = [
        Op(
            name=f"r{i}",
            kind="recv",
            resource=f"channel:{draw(st.integers(0, channels - 1))}",
            duration_s=draw(TIMES),
            size_bytes=1.0,
            parameter=f"p{i}",
        )
        for i in range(draw(st.integers(1, max_recvs)))
    ]
    ops = list(recvs)
    for i in range(draw(st.integers(1, max_computes))):
        names = [op.name for op in ops]
        inputs = draw(st.lists(st.sampled_from(names), unique=True, max_size=3))
        ops.append(Op(name=f"c{i}", kind="compute", duration_s=draw(TIMES), inputs=tuple(inputs)))
    computes = [op.name for op in ops if op.kind == "compute"]
    for i in range(draw(st.integers(0, 2))):
        source = draw(st.sampled_from(computes))
        channel = f"channel:{draw(st.integers(0, channels - 1))}"
        ops.append(
            Op(name=f"s{i}", kind="send", resource=channel, duration_s=draw(TIMES), parameter=f"p{i}", inputs=(source,))
        )
    return Graph.from_ops("random", "training", ops)
